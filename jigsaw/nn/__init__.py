"""Layers: torch.nn signatures, exact on tiles.  Unmodified `torch.nn` modules run on tiles through the same functions."""

from jigsaw.nn import attention, conv, dropout, interpolate, linear, loss, norm, pad, pool, product
from jigsaw.nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d

__all__ = [
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "attention",
    "conv",
    "dropout",
    "interpolate",
    "linear",
    "loss",
    "norm",
    "pad",
    "pool",
    "product",
]
