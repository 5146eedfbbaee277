"""Cuts, layouts and what travels between them: integers, without torch."""
