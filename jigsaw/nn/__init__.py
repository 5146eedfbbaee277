"""Layers with the signatures of torch.nn, exact on tiles.  Unmodified `torch.nn` modules run through the same
functions.
"""

# layers without weights are torch's own
from torch.nn import AvgPool1d, AvgPool2d, AvgPool3d, MaxPool1d, MaxPool2d, MaxPool3d

from jigsaw.nn import (
    activation,
    adaptive,
    attention,
    conv,
    dropout,
    embedding,
    interpolate,
    linear,
    loss,
    margin_losses,
    mixing,
    multi_head_attention,
    norm,
    pad,
    patches,
    pixel,
    pool,
    product,
    recurrent,
    sampling,
    sphere,
)
from jigsaw.nn.attention import explain_attention
from jigsaw.nn.attention_ways import attention_way
from jigsaw.nn.chunked import chunked
from jigsaw.nn.conv import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from jigsaw.nn.embedding import Embedding
from jigsaw.nn.ensemble_loss import crps_loss
from jigsaw.nn.experts import MoE
from jigsaw.nn.heads import MultiheadAttention
from jigsaw.nn.linear import Linear
from jigsaw.nn.mixing import Mix
from jigsaw.nn.norm import GroupNorm, LayerNorm, RMSNorm
from jigsaw.nn.overlap_loss import dice_loss, focal_loss, tversky_loss
from jigsaw.nn.spectral_loss import spectral_loss
from jigsaw.nn.sphere_pad import SpherePad
from jigsaw.nn.spherical_conv import SphericalConv
from jigsaw.nn.spherical_harmonics import (
    InverseSphericalHarmonicTransform,
    InverseVectorSphericalHarmonicTransform,
    SphericalHarmonicTransform,
    VectorSphericalHarmonicTransform,
)

__all__ = [
    "AvgPool1d",
    "AvgPool2d",
    "AvgPool3d",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "ConvTranspose3d",
    "Embedding",
    "GroupNorm",
    "InverseSphericalHarmonicTransform",
    "InverseVectorSphericalHarmonicTransform",
    "LayerNorm",
    "Linear",
    "MaxPool1d",
    "MaxPool2d",
    "MaxPool3d",
    "Mix",
    "MoE",
    "MultiheadAttention",
    "RMSNorm",
    "SpherePad",
    "SphericalConv",
    "SphericalHarmonicTransform",
    "VectorSphericalHarmonicTransform",
    "activation",
    "adaptive",
    "attention",
    "attention_way",
    "chunked",
    "conv",
    "crps_loss",
    "dice_loss",
    "dropout",
    "embedding",
    "explain_attention",
    "focal_loss",
    "interpolate",
    "linear",
    "loss",
    "margin_losses",
    "mixing",
    "multi_head_attention",
    "norm",
    "pad",
    "patches",
    "pixel",
    "pool",
    "product",
    "recurrent",
    "sampling",
    "spectral_loss",
    "sphere",
    "tversky_loss",
]
