"""Layers: torch.nn signatures, exact on tiles.  Unmodified `torch.nn` modules run on tiles through the same functions."""

from jigsaw.nn import conv, dropout, interpolate, loss, norm, pad, pool

__all__ = ["conv", "dropout", "interpolate", "loss", "norm", "pad", "pool"]
