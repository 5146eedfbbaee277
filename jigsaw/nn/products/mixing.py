"""Token mixing: a linear whose contraction runs along dims that may be cut, such as the tokens of a lat x lon tile.

An unmodified MLP-Mixer (arXiv 2105.01601) needs nothing of this file: `F.linear` on a transposed tile does the same.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.randn(2, 144, 8), mesh, (None, "lat", None))
>>> torch.nn.functional.linear(tile.mT, torch.randn(144, 144)).mT.shape
torch.Size([2, 144, 8])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import ShardingError
from jigsaw.nn.products.linear import Linear, tile_linear
from jigsaw.nn.weights import StoredWeight, refuse_plain_inputs
from jigsaw.tile.tile import Tile


def mix_tokens(
    input: Any, weight: StoredWeight, bias: StoredWeight | None = None, dims: int | Sequence[int] = -2
) -> Any:
    """Return y[..., m, ...] = sum_n x[..., n, ...] W[m, n] + b[m], where n runs over `dims` flattened together.

    *Shapes*: x ``[..., *dims, ...]`` with N tokens, W [M, N], b [M]. y has M in place of the dims. When M = N it has
    the same dims, cut as before.
    *Sends*: with P ranks that cut the tokens and hold R other elements each, the fewer of two.  Partial sums of y:
    ``(1-1/P) R M`` elements received a rank forward, and as many backward.  Parts of x: ``(1-1/P) R N`` forward and
    twice that backward.  A W stored 1/P by rows adds its rows that lie elsewhere, at most ``N M / P``.
    *Raises*: `ShardingError` for dims that are not consecutive.

    >>> mesh = jigsaw.init_mesh(lat=1)
    >>> tile = jigsaw.shard(torch.ones(2, 9, 4), mesh, (None, "lat", None))
    >>> jigsaw.nn.products.mixing.mix_tokens(tile, torch.ones(5, 9), dims=1).local[0, :, 0]
    tensor([9., 9., 9., 9., 9.])
    """
    (first, *rest) = order = _consecutive_dims(input, dims)
    back = [d for d in range(input.ndim) if d not in order]
    shape = [input.shape[d] for d in order]
    x = input.permute([*back, *order]).flatten(-len(order)) if rest else input.movedim(first, -1)
    # a plain tensor is whole on every rank, and so is the result, as of `torch.nn.Linear`
    y = tile_linear(x, weight, bias) if isinstance(x, Tile) else F.linear(x, weight, bias)
    if rest and y.shape[-1] == math.prod(shape):
        y = y.unflatten(-1, shape)
        return y.permute([*range(first), *range(len(back), y.ndim), *range(first, len(back))])
    return y.movedim(-1, first)


def _consecutive_dims(input: Any, dims: int | Sequence[int]) -> list[int]:
    order = [d % input.ndim for d in ((dims,) if isinstance(dims, int) else dims)]
    if not order or order != list(range(order[0], order[0] + len(order))):
        raise ShardingError(
            f"mix over dims {dims} of a Tile of shape {tuple(input.shape)}: they must be consecutive; permute the "
            "tile first"
        )
    return order


class Mix(Linear):
    """`mix_tokens` as a module: `torch.nn.Linear` over the tokens of `dims`, with its names and full shapes.

    With an `axis` (or several, those that cut the tokens) each rank holds 1/P of the rows of the weight at rest.

    *Shapes*: weight ``[out_tokens, in_tokens]``, per rank ceil(out_tokens / P) of its rows, or all without `axis`.
    *Shapes* of tiles, *Sends*, *Raises*: see `mix_tokens`.

    >>> mesh = jigsaw.init_mesh(lat=1, lon=1)
    >>> tile = jigsaw.shard(torch.randn(2, 9, 16, 4), mesh, (None, "lat", "lon", None))
    >>> jigsaw.nn.Mix(9 * 16, 9 * 16, dims=(1, 2), mesh=mesh)(tile).shape
    torch.Size([2, 9, 16, 4])
    """

    def __init__(
        self,
        in_tokens: int,
        out_tokens: int,
        bias: bool = True,
        dims: int | Sequence[int] = -2,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: DeviceMesh,
        axis: str | Sequence[str] = (),
    ) -> None:
        super().__init__(in_tokens, out_tokens, bias, device, dtype, mesh=mesh, axis=axis)
        self.dims = dims

    def forward(self, input: Any) -> Any:
        refuse_plain_inputs(self, input)
        return mix_tokens(input, self.weight, self.bias, self.dims)
