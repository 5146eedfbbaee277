"""Writing: every rank its own tile."""
