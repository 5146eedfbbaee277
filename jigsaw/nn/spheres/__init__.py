"""Layers on the sphere: spherical harmonics, poles and convolutions."""
