"""Convolution on the sphere by spherical harmonics: the layer of spherical Fourier neural operators.

Source of the method: Bonev et al., Spherical Fourier neural operators: learning stable dynamics on the sphere, arXiv
2306.03838; Driscoll and Healy 1994 for the theorem.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from jigsaw.errors import ShardingError
from jigsaw.nn.spheres.spherical_harmonics import InverseSphericalHarmonicTransform, SphericalHarmonicTransform


class SphericalConv(nn.Module):
    """Layer y = S^-1(W S(x)): complex weights mix coefficients over channels.  They are one matrix for each degree l
    ("dhconv"), or for each degree and order ("diagonal"). The former is the same for all orders: a convolution with a
    filter round a pole, after Driscoll and Healy.

    The transforms are separate modules, so that layers share them and their tables; between different grids the field
    is resampled.

    *Shapes*: [..., in, nlat, nlon] -> [..., out, nlat', nlon'], cut alike; weight complex [in, out, lmax], or [in, out,
    lmax, mmax], whole on every rank; bias [out].
    *Sends*: what the transforms send, and nothing between them. Where channels are cut, also one all-reduce of the
    coefficients over their axes, and y has whole channels.
    *Raises*: `ShardingError` for transforms of other degrees, or another `operator_type`.

    >>> there = jigsaw.nn.SphericalHarmonicTransform(9, 16)
    >>> back = jigsaw.nn.InverseSphericalHarmonicTransform(9, 16)
    >>> layer = jigsaw.nn.SphericalConv(3, 4, there, back)
    >>> layer(jigsaw.shard(torch.randn(2, 3, 9, 16), jigsaw.init_mesh(lat=1), (None, None, "lat", None))).shape
    torch.Size([2, 4, 9, 16])
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        forward_transform: SphericalHarmonicTransform,
        inverse_transform: InverseSphericalHarmonicTransform,
        operator_type: str = "dhconv",
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.complex64,
    ) -> None:
        super().__init__()
        forth, back = forward_transform, inverse_transform
        if (forth.lmax, forth.mmax) != (back.lmax, back.mmax):
            raise ShardingError(
                f"SphericalConv: the forward transform makes {forth.lmax} degrees, and the inverse takes {back.lmax}; "
                "give both the lesser lmax"
            )
        if operator_type not in ("dhconv", "diagonal"):
            raise ShardingError(f"SphericalConv: operator_type={operator_type!r}; use 'dhconv' or 'diagonal'")
        self.operator_type, self.forward_transform, self.inverse_transform = operator_type, forth, back
        modes = (forth.lmax,) if operator_type == "dhconv" else (forth.lmax, forth.mmax)
        weight = torch.randn(in_channels, out_channels, *modes, device=device, dtype=dtype)
        self.weight = nn.Parameter(weight * in_channels**-0.5)
        self.bias = nn.Parameter(weight.new_zeros(out_channels, dtype=dtype.to_real())) if bias else None

    def forward(self, x: Any) -> Any:
        """Return the convolved field, of a tile or a plain tensor."""
        equation = "...ilm,iol->...olm" if self.operator_type == "dhconv" else "...ilm,iolm->...olm"
        y = self.inverse_transform(torch.einsum(equation, self.forward_transform(x), self.weight))
        return y if self.bias is None else y + self.bias[:, None, None]
