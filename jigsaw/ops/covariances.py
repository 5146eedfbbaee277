"""Functions made of products of rows (cov and corrcoef) and of powers of each element (vander).

>>> tile = jigsaw.shard(torch.tensor([[0.0, 1.0, 2.0], [0.0, 2.0, 4.0]]), jigsaw.init_mesh(lat=1), (None, "lat"))
>>> torch.cov(tile).local[0], torch.corrcoef(tile).local[0]
(tensor([1., 2.]), tensor([1., 1.]))
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jigsaw.ops.whole_dims import held_whole
from jigsaw.tile.tile import Tile, implements_torch


@implements_torch(torch.cov, either=("fweights", "aweights"))
def _covariance(input: Tile, *, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Return the covariance.  *Sends*: the sums of a mean, and what the product of a tile with itself sends."""
    if input.ndim > 2:
        raise RuntimeError(f"cov of a Tile of {input.ndim} dims: it needs 1 or 2")
    x: Any = input.unsqueeze(0) if input.ndim < 2 else input
    x = x if x.dtype.is_floating_point or x.dtype.is_complex else x.to(torch.get_default_dtype())
    weights = [w for w in (fweights, aweights) if w is not None]
    if any(tuple(w.shape) != (x.shape[1],) for w in weights):
        raise RuntimeError(f"cov: weights of shapes {[tuple(w.shape) for w in weights]} for {x.shape[1]} observations")
    if not weights:
        number: Any = x.shape[1]
        total, w = number - correction, None
        mean = x.mean(1, keepdim=True)
    else:
        w = weights[0] if len(weights) == 1 else weights[0] * weights[1]  # summed in their own dtype, as torch does
        number = w.sum()
        mean = (x * w).sum(1, keepdim=True) / number
        total = number - correction * (number if aweights is None else (w * aweights).sum() / number)
        if aweights is None:
            total = number - correction
    total = total.clamp_min(0) if isinstance(total, Tensor) else max(total, 0)
    apart = x - mean
    covariance = (apart if w is None else apart * w) @ apart.mH / total
    return covariance.squeeze(1).squeeze(0) if x.shape[0] == 1 else covariance


@implements_torch(torch.corrcoef)
def _correlation(input: Tile) -> Any:
    if input.ndim > 2:
        raise RuntimeError(f"corrcoef of a Tile of {input.ndim} dims: it needs 1 or 2")
    covariance = _covariance(input)
    if covariance.ndim == 0:
        return covariance / covariance
    deviation = held_whole(covariance.diagonal()).real.sqrt()  # it divides along both dims, so all ranks need all
    correlation = covariance / deviation[:, None] / deviation
    if not correlation.dtype.is_complex:
        return correlation.clamp(-1, 1)
    return torch.complex(correlation.real.clamp(-1, 1), correlation.imag.clamp(-1, 1))


def _powers(x: Tile, count: int) -> Any:
    """Return 1, x, x^2 and so on, along a new last dim, which is whole; integers become int64, as in torch."""
    x = x if x.dtype.is_floating_point or x.dtype.is_complex else x.long()
    ones = torch.ones_like(x).unsqueeze(-1)
    if count < 2:
        return ones[..., :count]
    return torch.cat([ones, x.unsqueeze(-1).expand(*x.shape, count - 1).cumprod(-1)], -1)


@implements_torch(torch.vander)
def _vander(x: Tile, N: int | None = None, increasing: bool = False) -> Any:  # torch's own name
    if x.ndim != 1 or (N is not None and N < 0):
        raise RuntimeError(f"vander(N={N}) of a Tile of {x.ndim} dims: it needs 1, and N >= 0")
    powers = _powers(x, x.shape[0] if N is None else N)
    return powers if increasing else powers.flip(-1)


@implements_torch(torch.linalg.vander)
def _vander_of_last_dim(x: Tile, *, N: int | None = None) -> Any:  # torch's own name
    count = x.shape[-1] if N is None and x.ndim else N
    if count is None or count < 2 or x.dtype == torch.bool:
        raise RuntimeError(
            f"linalg.vander(N={N}) of a Tile of shape {tuple(x.shape)} and {x.dtype}: it needs a dim, N >= 2 (the last "
            "size by default), and numbers"
        )
    return _powers(x, count)
