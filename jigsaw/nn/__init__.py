"""Layers with the signatures of torch.nn, exact on tiles.  Unmodified `torch.nn` modules run through the same
functions.
"""

# layers without weights are torch's own
from torch.nn import AvgPool1d, AvgPool2d, AvgPool3d, MaxPool1d, MaxPool2d, MaxPool3d

from jigsaw.nn import activation, attention, dropout
from jigsaw.nn.attention import multi_head_attention
from jigsaw.nn.attention.attention_ways import attention_way
from jigsaw.nn.attention.multi_head_attention import MultiheadAttention
from jigsaw.nn.attention.scaled_dot_product import explain_attention
from jigsaw.nn.cells.gather import gather_neighbors, scatter_to_cells
from jigsaw.nn.cells.healpix_pad import HEALPixPad
from jigsaw.nn.chunked import chunked
from jigsaw.nn.experts.experts import MoE
from jigsaw.nn.losses import loss, margin_losses
from jigsaw.nn.losses.field_losses import crps_loss, dice_loss, focal_loss, spectral_loss, tversky_loss
from jigsaw.nn.norms import norm
from jigsaw.nn.norms.norm import GroupNorm, LayerNorm, RMSNorm
from jigsaw.nn.products import embedding, linear, mixing, product, recurrent
from jigsaw.nn.products.embedding import Embedding
from jigsaw.nn.products.linear import Linear
from jigsaw.nn.products.mixing import Mix
from jigsaw.nn.spheres import sphere
from jigsaw.nn.spheres.sphere_pad import SpherePad
from jigsaw.nn.spheres.spherical_harmonics import (
    InverseSphericalHarmonicTransform,
    InverseVectorSphericalHarmonicTransform,
    SphericalConv,
    SphericalHarmonicTransform,
    VectorSphericalHarmonicTransform,
)
from jigsaw.nn.stencils import adaptive, conv, interpolate, pad, patches, pixel, pool, sampling
from jigsaw.nn.stencils.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d

__all__ = [
    "AvgPool1d", "AvgPool2d", "AvgPool3d", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d",
    "ConvTranspose3d", "Embedding", "GroupNorm", "HEALPixPad", "InverseSphericalHarmonicTransform",
    "InverseVectorSphericalHarmonicTransform", "LayerNorm", "Linear", "MaxPool1d", "MaxPool2d", "MaxPool3d",
    "Mix", "MoE", "MultiheadAttention", "RMSNorm", "SpherePad", "SphericalConv", "SphericalHarmonicTransform",
    "VectorSphericalHarmonicTransform", "activation", "adaptive", "attention", "attention_way", "chunked",
    "conv", "crps_loss", "dice_loss", "dropout", "embedding", "explain_attention", "focal_loss",
    "gather_neighbors", "interpolate", "linear", "loss", "margin_losses", "mixing", "multi_head_attention",
    "norm", "pad", "patches", "pixel", "pool", "product", "recurrent", "sampling", "scatter_to_cells",
    "spectral_loss", "sphere", "tversky_loss",
]  # fmt: skip
