"""Functions that no file of the table answers by name: pointwise ones, variants of known ones, and any on tiles that
nothing cuts.

>>> tile = jigsaw.shard(torch.eye(2), jigsaw.init_mesh(lat=1), (None, None))
>>> torch.linalg.matrix_exp(tile).shape
torch.Size([2, 2])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jigsaw.errors import ShardingError
from jigsaw.geometry.layout import Layout
from jigsaw.ops.meeting.filling import fill_from_tiles
from jigsaw.ops.meeting.plain_operands import plain_operand
from jigsaw.ops.pointwise import (
    COPYING_FUNCTIONS,
    changes_in_place,
    changes_plain,
    functions_named,
    is_pointwise,
    replace_results,
    replace_tensors,
    run_copy,
    run_in_place,
    run_into_plain,
    run_on_tiles,
)
from jigsaw.tile.table import table
from jigsaw.tile.tile import Tile, TileHandler, leave_tile, refusal_error, shared_mesh, tiles_in

# -- tiles that nothing cuts ------------------------------------------------------------------------------------------


def run_alike(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], first: Tile) -> Any:
    """Run any function on tiles that nothing cuts: every rank computes the same whole result."""
    args, kwargs = replace_tensors(
        (tuple(args), dict(kwargs)),
        lambda t: t.owned().local,
        lambda x: plain_operand(x, first, Layout((), first.layout.axes)),
    )
    return uncut_tiles(function(*args, **kwargs), first)


def uncut_tiles(out: Any, first: Tile) -> Any:
    """Return results that are the same on every rank as tiles that nothing cuts; scalars as ordinary tensors."""

    def as_tile(x: Tensor) -> Any:
        layout = Layout.of(x.shape, (None,) * x.ndim, first.layout.axes)
        return Tile(x, layout, first.mesh) if x.ndim else leave_tile(x, first.mesh)

    return replace_results(out, as_tile)


# -- what no file of ops implements -----------------------------------------------------------------------------------


def _find_handler(function: Any) -> TileHandler:
    if not is_pointwise(function):
        name = getattr(function, "__name__", "")
        is_method = name.endswith("_") and not name.endswith("__") and getattr(Tensor, name, None) is function
        new = getattr(Tensor, name[:-1], None) if is_method and function not in _RANDOM else None
        return partial(run_unknown_function, function) if new is None else partial(write_new_values, function, new)
    if function in COPYING_FUNCTIONS:
        return partial(run_copy, function)
    return partial(run_in_place if changes_in_place(function) else run_on_tiles, function)


table.find_rest = _find_handler


CHANGES_SHAPE = functions_named(
    "t_ squeeze_ unsqueeze_ transpose_ swapdims_ swapaxes_ as_strided_ resize_ resize_as_ set_ sparse_resize_"
)


_RANDOM = functions_named("random_ uniform_ normal_ exponential_ geometric_ cauchy_ log_normal_ bernoulli_")


def write_new_values(function: Any, new: Any, input: Any, *args: Any, **kwargs: Any) -> Any:
    """Write the result of a function of the table into its first argument."""
    if not isinstance(input, Tile):
        return run_unknown_function(function, input, *args, **kwargs)
    stays = "the shape and the cuts of a Tile stay as they are", f"write x = x.{new.__name__}(...)"
    if function in CHANGES_SHAPE:
        raise refusal_error(function, input, *stays)
    # run on a copy, because the function may save its input, which is overwritten below
    out = new(input.clone() if input.requires_grad else input, *args, **kwargs)
    if out.shape != input.shape and function is Tensor.addbmm_:  # only this function of torch resizes a smaller target
        raise refusal_error(function, input, *stays)
    if out.shape != input.shape or not torch.can_cast(out.dtype, input.dtype):
        raise RuntimeError(
            f"{function.__name__}: a result of {out.dtype} and shape {tuple(out.shape)} does not fit into a Tile of "
            f"{input.dtype} and shape {tuple(input.shape)}"
        )
    return input.copy_(out)


def run_unknown_function(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an unknown function where that is exact: on tiles that nothing cuts."""
    tiles = list(tiles_in((args, kwargs)))
    if not tiles:
        raise ShardingError(
            f"{getattr(function, '__name__', function)} was called on a Tile that none of its arguments is; pass plain "
            "tensors, with tile.full_tensor(), or tile.local for a local answer"
        )
    if changes_in_place(function) and changes_plain(args) and fill_from_tiles(function, args, kwargs):
        return function(*args, **kwargs)
    for tile in tiles:
        if tile.layout.cut_dims:
            raise refusal_error(
                function,
                tile,
                "jigsaw does not answer this function on a cut dim",
                "use tile.full_tensor(), tile.local for a local answer, or cut nothing",
                needs_whole=range(tile.ndim),
            )
    shared_mesh(tiles)
    if changes_in_place(function):
        if changes_plain(args):
            return run_into_plain(function, args, kwargs)
        if tiles[0].layout.has_halo:
            why = "it would change the owned rows in place, and leave the halo as it was"
            raise refusal_error(function, tiles[0], why, "use tile.owned()")
    return run_alike(function, args, kwargs, tiles[0])
