"""One file a format: what becomes a chunk table, and how its chunks decode."""
