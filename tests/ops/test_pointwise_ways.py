"""A pointwise function has one way and a quick one, which agree over the whole table."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import get_overridable_functions

from jigsaw.ops.pointwise import is_pointwise, run_copy, run_in_place, run_on_tiles, run_pointwise
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.table import table
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

ARGUMENTS: dict[str, Callable[[Tile, Tile, Tensor], tuple[Any, ...]]] = {
    "a tile": lambda x, y, row: (x,),
    "two tiles": lambda x, y, row: (x, y),
    "a number": lambda x, y, row: (x, 2),
    "a plain tensor": lambda x, y, row: (x, row),
    "three tiles": lambda x, y, row: (x, y, y),
}


def _quick_functions() -> list[tuple[Any, Any]]:
    functions = {f for each in get_overridable_functions().values() for f in each if is_pointwise(f)}
    functions -= {torch.empty_like}  # whose values are any
    answers = [(f, table.entries[f].handler if f in table.entries else table.find_rest(f)) for f in functions]
    quick_ways = (run_on_tiles, run_in_place, run_copy)
    return [(f, handler) for f, handler in answers if isinstance(handler, partial) and handler.func in quick_ways]


def _bits(x: Tensor) -> Tensor:
    return x.resolve_conj().resolve_neg().contiguous().view(torch.uint8)


def _outcome(call: Callable[..., Any], make: Callable[..., tuple[Any, ...]], tiles: tuple[Tile, Tile]) -> Any:
    x, y = (Tile(tile.local.clone(), tile.layout, tile.mesh) for tile in tiles)  # some change them in place
    try:
        out = call(*make(x, y, torch.tensor([0.5, 1.5, 2.5])))
    except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:  # of torch, on both ways
        return type(error), False
    leaves = out if isinstance(out, tuple) else (out,)
    return [
        (_bits(leaf.local), leaf.local.dtype, leaf.layout) if isinstance(leaf, Tile) else leaf for leaf in leaves
    ], out is x


def _are_alike(one: Any, other: Any) -> bool:
    if isinstance(one[0], type) or isinstance(other[0], type):
        return one[0] is other[0]
    if one[1] != other[1]:
        return False
    pairs = list(zip(one[0], other[0], strict=True))
    return all(torch.equal(a[0], b[0]) and a[1:] == b[1:] if isinstance(a, tuple) else a == b for a, b in pairs)


@on_ranks(2)
def test_the_quick_way_gives_what_the_whole_way_gives():
    mesh, values = world_mesh(lat=2), torch.linspace(0.4, 3.6, 21).reshape(7, 3)
    tiles = shard(values, mesh, ("lat", None)), shard(4 - values, mesh, ("lat", None))
    compared, apart = 0, list[str]()
    for function, quick in _quick_functions():
        for name, make in ARGUMENTS.items():
            given = [_outcome(call, make, tiles) for call in (quick, partial(run_pointwise, function))]
            compared += not isinstance(given[0][0], type)
            if not _are_alike(*given):
                apart.append(f"{function} of {name}: {given}")
    assert not apart, apart[:5]
    assert compared > 700, compared
