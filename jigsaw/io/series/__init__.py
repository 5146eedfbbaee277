"""Meaning of a store: dims and coordinates, times, fields, windows, boundaries, forcings; statistics as data."""
