"""Conversion of anything that xarray opens to a store for training."""
