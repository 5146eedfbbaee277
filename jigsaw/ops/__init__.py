"""The closed table: every torch function that tiles answer, a file for each kind."""
