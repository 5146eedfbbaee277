"""Quantiles along a dim, which is made whole, or of all elements, which every rank then holds.

>>> tile = jigsaw.shard(torch.arange(5.0), jigsaw.init_mesh(lat=1), ("lat",))
>>> tile.quantile(0.25, 0).item()
1.0
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jigsaw.geometry.layout import Layout
from jigsaw.ops.reductions import reduced_dims
from jigsaw.ops.whole_dims import brought_home, check_by_torch, run_held_whole, with_whole_dims
from jigsaw.tile.tile import Tile, implements_torch, leave_tile


def _answer_quantile(function: Any) -> None:
    def handler(
        input: Tile, q: float | Tensor, dim: int | None = None, keepdim: bool = False, *, interpolation: str = "linear"
    ) -> Any:
        """Return [quantiles, *the other dims], or only the other dims for one quantile.

        *Sends*: where `dim` is cut, what `jigsaw.ops.whole_dims` says, and the quantiles back; without `dim`, the tile
        to every rank.
        """
        if dim is None or not input.ndim:
            return run_held_whole(function, input, q, dim, keepdim, interpolation=interpolation)
        (at,) = reduced_dims(input, dim)
        check_by_torch(function, input, at, q, at, keepdim, interpolation=interpolation)
        whole = with_whole_dims(input, (at,))
        several = (len(q),) if isinstance(q, Tensor) and q.ndim else ()
        if whole.local.numel() or not input.numel():
            out = function(whole.local, q, at, keepdim, interpolation=interpolation)
        else:  # torch refuses a rank without rows, which takes part in the backward pass
            none = whole.local.sum(at, keepdim)
            out = none.expand(*several, *none.shape)

        def of_quantiles(layout: Layout) -> Layout:
            kept = layout.without_halo().drop((at,), keepdim)
            return kept.insert(0, *several) if several else kept

        home = of_quantiles(input.layout)
        if home.ndim == 0:
            return leave_tile(out, input.mesh)
        return brought_home(Tile(out, of_quantiles(whole.layout), input.mesh), home)

    implements_torch(function)(handler)


_answer_quantile(torch.quantile)
_answer_quantile(torch.nanquantile)
