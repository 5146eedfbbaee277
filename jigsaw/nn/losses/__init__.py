"""Losses on tiles."""
