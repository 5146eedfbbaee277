"""Formats, one file each: their chunk tables and the decoding of their chunks."""
