"""Normalization on tiles."""
