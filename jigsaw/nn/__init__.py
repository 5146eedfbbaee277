"""Layers: torch.nn signatures, exact on tiles.  Unmodified `torch.nn` modules run on tiles through the same functions."""

from jigsaw.nn import loss, norm

__all__ = ["loss", "norm"]
