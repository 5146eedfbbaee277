"""Samples by number, and loaders that read them ahead and resume on any mesh."""
