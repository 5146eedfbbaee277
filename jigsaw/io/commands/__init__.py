"""The commands of ``python -m jigsaw`` that are the reader's."""
