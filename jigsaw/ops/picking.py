"""Elements of a plain tensor, whole on every rank, that integer tiles pick: the result is cut as they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from jigsaw.geometry.cut import whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.meeting.local_cells import is_mask
from jigsaw.ops.meeting.plain_operands import plain_operand
from jigsaw.ops.pointwise import align_tiles
from jigsaw.ops.unknown_functions import run_alike
from jigsaw.tile.tile import Tile, refusal_error, tiles_in


def pick_from_plain(function: Any, table: Tensor, index: Any) -> Any:
    """Return ``table[index]``, where integer tiles are among the indices; the result has their layout.

    *Shapes*: as in torch: the dims of the tiles, broadcast, take the place of those that they index.
    *Sends*: nothing; backward nothing for a parameter, whose gradient is a part.
    *Raises*: `ShardingError` for cut masks, and for cut tiles among other indices than full slices.
    """
    tiles = list(tiles_in(index))
    if not any(t.layout.cut_dims for t in tiles):
        return run_alike(Tensor.__getitem__, (table, index), {}, tiles[0])
    items = _of_each_dim(table, index)
    where = [d for d, i in enumerate(items) if isinstance(i, Tile)]
    only = all(i == slice(None) for d, i in enumerate(items) if d not in where)
    for t in tiles:
        if not only or where != list(range(where[0], where[-1] + 1)) or is_mask(t):
            raise refusal_error(
                function,
                t,
                f"it picks from a plain tensor of shape {tuple(table.shape)} by a tile of {t.dtype}",
                "index by integer tiles next to each other, among full slices; or use tile.full_tensor()",
            )
    layout, locals_ = align_tiles(tiles)
    before, after = table.shape[: where[0]], table.shape[where[-1] + 1 :]
    dims = [*((whole_dim(n),) for n in before), *layout.dims(), *((whole_dim(n),) for n in after)]
    out = Layout.from_dims(dims, layout.axes)
    local = plain_operand(table, tiles[0], out)[(slice(None),) * len(before) + tuple(locals_)]
    return Tile(local, out, tiles[0].mesh)


def _of_each_dim(table: Tensor, index: Any) -> Sequence[Any]:
    """Return the items of an index, with full slices for an ellipsis."""
    items: list[Any] = list(index) if isinstance(index, tuple) else [index]
    for at, item in enumerate(items):
        if item is Ellipsis:
            return [*items[:at], *[slice(None)] * (table.ndim - len(items) + 1), *items[at + 1 :]]
    return items
