"""What a store means: dims and coordinates, times, fields, windows, boundaries, forcings; statistics as data."""
