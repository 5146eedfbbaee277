"""Commands of ``python -m jigsaw`` that belong to the reader."""
