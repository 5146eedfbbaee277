"""Mixture of experts whose experts lie on the ranks."""
