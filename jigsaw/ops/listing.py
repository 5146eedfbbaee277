"""Functions that list elements (nonzero, unique, masked_select), or count them by value.

A list's size depends on the values, so no cut points can be known before: lists are tiles that nothing cuts, made of
the whole tensor on every rank.  Counts are sums over the ranks.

>>> tile = jigsaw.shard(torch.tensor([2, 0, 2]), jigsaw.init_mesh(lat=1), ("lat",))
>>> tile.nonzero().local.flatten(), tile.unique().local, tile.bincount().local
(tensor([0, 2]), tensor([0, 2]), tensor([1, 0, 2]))
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jigsaw import comm
from jigsaw.comm.graph_calls import lacks_values
from jigsaw.errors import ShardingError
from jigsaw.ops.pointwise import align_tiles
from jigsaw.ops.reductions import extreme_of_all
from jigsaw.ops.unknown_functions import run_alike, uncut_tiles
from jigsaw.ops.whole_dims import brought_home, held_whole, run_held_whole
from jigsaw.tile.tile import Tile, implements_torch

# -- lists ------------------------------------------------------------------------------------------------------------


@implements_torch(torch.nonzero)
def _nonzero(input: Tile, *, as_tuple: bool = False) -> Any:
    """Return the places of elements that are not zero, in order; *Sends*: one byte an element to every rank."""
    return run_held_whole(torch.nonzero, input.ne(0), as_tuple=as_tuple)


@implements_torch(torch.argwhere)
def _argwhere(input: Tile) -> Any:
    return _nonzero(input)


def _answer_unique(function: Any, inverse_place: int) -> None:
    def handler(input: Tile, *args: Any, **kwargs: Any) -> Any:
        """Return the values, and, if wanted, their counts and, for each element, its value's number, cut as the input.

        *Sends*: the tile to every rank.
        """
        own = input.owned()
        whole = held_whole(own)
        with_places = kwargs.get("return_inverse", args[inverse_place] if len(args) > inverse_place else False)
        out = run_alike(function, (whole, *args), kwargs, whole)
        if not with_places or own.layout.cut_dims == ():
            return out
        places = out[1]
        if places.shape == own.shape and kwargs.get("dim") is None:
            places = brought_home(places, own.layout)
        return (out[0], places, *out[2:])

    implements_torch(function)(handler)


for _function in (torch.unique, torch.Tensor.unique):
    _answer_unique(_function, 1)
for _function in (torch.unique_consecutive, torch.Tensor.unique_consecutive):
    _answer_unique(_function, 0)


# -- counts -----------------------------------------------------------------------------------------------------------


def check_counts(function: Any, counts: Tensor, tile: Tile) -> None:
    """Check counts, alike on all ranks.  Raises: `ShardingError` where adding 1 to one of them would change nothing:
    torch's count, element by element, would end there, or sooner by its threads.
    """
    most = 2 / torch.finfo(counts.dtype).eps if counts.dtype.is_floating_point else math.inf
    if tile.numel() >= most and not lacks_values() and (counts >= most).any():
        raise ShardingError(
            f"{function.__name__} of a Tile of shape {tuple(tile.shape)}: a count of {most:.0f} or more, where counts "
            f"of {counts.dtype} end in torch; use x.float() for a narrow dtype, or x.double()"
        )


@implements_torch(torch.histc)
def _histc(input: Tile, bins: int = 100, min: float = 0, max: float = 0) -> Any:
    """Count how many elements lie in each of `bins` ranges; *Sends*: one all-reduce of the counts (and of the
    extremes).

    *Raises*: `ShardingError` where a bin has more elements than torch, which counts in the input's dtype, can count.
    """
    torch.histc(input.local.detach().new_zeros(1), bins, min, max)  # only to raise torch's own errors
    own = input.owned().detach()
    if min == max and own.numel():
        min, max = extreme_of_all(own, "min").item(), extreme_of_all(own, "max").item()
    if min == max:
        min, max = min - 1, max + 1
    torch.histc(own.local.new_tensor([min, max]), bins, min, max)  # raises for infinities, on ranks without rows, too
    local = torch.histc(own.local, bins, min, max) if own.local.numel() else own.local.new_zeros(bins)
    counts = comm.all_reduce(local, own.mesh, own.layout.cut_axes, same=(own.layout, bins))
    check_counts(torch.histc, counts, own)
    return uncut_tiles(counts, own)


@implements_torch(torch.bincount, either=("input", "weights"))
def _bincount(input: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Count how often each number of a 1-d tensor occurs, or sum the `weights` there.

    *Sends*: one all-reduce for the largest number, and one of the counts.
    """
    if not isinstance(input, Tile):
        return run_held_whole(torch.bincount, input, weights, minlength)
    torch.bincount(input.local.new_zeros([min(n, 1) for n in input.shape]), minlength=minlength)  # torch's own errors
    own = input.owned()
    if own.numel() and extreme_of_all(own, "min").item() < 0:
        raise RuntimeError("bincount: a Tile of numbers below 0 has no counts; shift it first")
    size = max(minlength, int(extreme_of_all(own, "max").item()) + 1 if own.numel() else 0)
    parts = [own.local]
    if weights is not None:
        if tuple(weights.shape) != tuple(own.shape):
            raise RuntimeError(f"bincount: weights of shape {tuple(weights.shape)} for a Tile of {tuple(own.shape)}")
        tiles = [own, weights if isinstance(weights, Tile) else own * 0 + weights]
        parts = align_tiles(tiles)[1]
    counts = torch.bincount(*(p.detach() for p in parts), minlength=size)
    if weights is not None and own.numel():  # for an empty input, as on a rank without rows, torch returns int64
        counts = counts.to(torch.float32 if weights.dtype == torch.float32 else torch.float64)
    return uncut_tiles(comm.all_reduce(counts, own.mesh, own.layout.cut_axes, same=(own.layout, size)), own)
