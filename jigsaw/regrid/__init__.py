"""Regrid."""
