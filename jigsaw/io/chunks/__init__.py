"""Stored chunks: where their bytes lie, how they are fetched, their cost, and their decoding."""
