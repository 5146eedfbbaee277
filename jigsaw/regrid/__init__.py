"""Regridding between latitude-longitude grids."""
