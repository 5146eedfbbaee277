"""Layers that read neighboring rows: convolutions, pooling, padding, interpolation and patches."""
