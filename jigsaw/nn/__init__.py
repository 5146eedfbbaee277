"""Layers: torch.nn signatures, exact on tiles.  Unmodified `torch.nn` modules run on tiles through the same functions."""

from jigsaw.nn import dropout, loss, norm

__all__ = ["dropout", "loss", "norm"]
