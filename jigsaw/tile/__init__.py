"""`Tile`, the part of a tensor that a rank holds, and what is refused on it."""
