"""Stages of a pipeline: where a model is cut, and what a rank runs and sends in which order."""
