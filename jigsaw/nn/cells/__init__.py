"""Layers on cells: values of neighbors, and sums over them."""
