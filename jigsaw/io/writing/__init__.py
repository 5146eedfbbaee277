"""Writing: every rank writes its own tile."""
