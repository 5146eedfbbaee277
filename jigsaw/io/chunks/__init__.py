"""Stored chunks: where their bytes lie, how they are fetched, what they cost, how they decode."""
