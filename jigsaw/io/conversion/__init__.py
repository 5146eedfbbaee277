"""Anything that xarray opens, as a training store."""
