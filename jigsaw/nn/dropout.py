"""Dropout whose mask is a function of the global position, so that it is the same on every mesh.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) with the finaliser of
splitmix64 (Steele et al., OOPSLA 2014): each element hashes its global row-major index with a seed of the call.  The
seed comes from torch's default generator of the mesh's first rank, so `torch.manual_seed` fixes the masks; they are not
those of plain torch.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.ones(1000), mesh, ("lat",))
>>> torch.nn.functional.dropout(tile, 0.5).unique().local
tensor([0., 2.])
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw import comm
from jigsaw.tile import Tile, implements_torch

_SIGN = -(1 << 63)


def _signed_int64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) + _SIGN


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical, where torch's shift of int64 is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _splitmix_bits(x: Tensor) -> Tensor:
    x = (x ^ _shift_right(x, 30)) * _signed_int64(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed_int64(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def global_index(tile: Tile, dims: int) -> Tensor:
    """The row-major global index over the first `dims` dims of every local element, size 1 in the others."""
    cuts = [(c, d) for d in range(tile.ndim) for c in tile.layout.dim(d)]
    index = torch.zeros((), dtype=torch.int64, device=tile.device)
    stride = math.prod(tile.shape[:dims])
    for k, (cut, dim) in enumerate(cuts):
        if dim >= dims:
            continue
        stride //= cut.size
        start, stop = cut.held[tile.layout.piece(cut, tile.coordinate)]
        rows = torch.arange(start, stop, device=tile.device) % max(cut.size, 1)
        index = index + (rows * stride).reshape(-1, *(1,) * (len(cuts) - 1 - k))
    shape = [n if d < dims else 1 for d, n in enumerate(tile.local.shape)]
    return index.reshape(shape)


def _shared_seed(tile: Tile) -> int:
    seed = torch.randint(1 << 62, (1,))
    if tile.mesh.device_type == "cuda":
        seed = seed.to(tile.device)
    comm.broadcast_first(seed, tile.mesh, [name for name, _ in tile.layout.axes])
    return int(seed)


def global_uniform(tile: Tile, dims: int) -> Tensor:
    """Numbers in [0, 1) for every local element (of the first `dims` dims), the same for a global position on every
    mesh.

    *Sends*: one seed of 8 bytes from the first rank.
    """
    mixed = _splitmix_bits(
        _splitmix_bits(global_index(tile, dims) * _signed_int64(0x9E3779B97F4A7C15) + _shared_seed(tile))
    )
    return _shift_right(mixed, 11).to(torch.float64) * 2.0**-53


def _drop_random(tile: Tile, p: float, training: bool, dims: int) -> Tile:
    if not 0 <= p <= 1:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
    if not training or p == 0:
        return tile
    kept = (global_uniform(tile, dims) >= p).to(tile.dtype)
    return Tile(tile.local * kept * (0.0 if p == 1 else 1 / (1 - p)), tile.layout, tile.mesh)


def _answer_element_dropout(function: Any) -> None:
    def dropout(input: Tile, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tile:
        """y = x / (1 - p) where kept, else 0; `inplace` is taken as permission, not used."""
        return _drop_random(input, p, training, input.ndim)

    implements_torch(function)(dropout)


def _answer_channel_dropout(function: Any, dims: int) -> None:
    def dropout(input: Tile, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tile:
        """Whole channels are dropped: ``[batch, channel, *space]``, or ``[channel, *space]``."""
        return _drop_random(input, p, training, 2 if input.ndim == dims + 2 else 1)

    implements_torch(function)(dropout)


_answer_element_dropout(F.dropout)
_answer_element_dropout(torch.dropout)
_answer_channel_dropout(F.dropout1d, 1)
_answer_channel_dropout(F.dropout2d, 2)
_answer_channel_dropout(F.dropout3d, 3)
