"""The table: what an argument may be stands in the decorator, and in no text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from jigsaw.errors import ShardingError
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.table import table
from jigsaw.tile.tile import implements_torch
from jigsaw.tile.tile_making import shard


def _kinds_as(annotation: object) -> dict[str, bool]:
    def handler(input: Any, weight: Any = None, mask: Any = None, *others: Any, size: Any = None) -> Any: ...

    handler.__annotations__ = dict.fromkeys(("input", "weight", "mask", "size"), annotation)
    implements_torch(handler, tiles=("weight",), either=("mask",))(handler)
    return {name: is_tile for _, name, is_tile in table.entries.pop(handler).kinds}


@pytest.mark.parametrize("annotation", ["Any", "Tile", "int", "Tile | Tensor", "Weight", "Mask", "Values", object])
def test_an_annotation_decides_nothing(annotation):
    assert _kinds_as(annotation) == {"input": True, "weight": True, "size": False}


@pytest.mark.parametrize("words", [{"tiles": ("wieght",)}, {"either": ("mask",)}, {"plain": ("size",)}])
def test_a_decorator_names_arguments_that_are_there(words):
    def handler(input: Any, weight: Any = None) -> Any: ...

    with pytest.raises(AssertionError, match="has no arguments"):
        implements_torch(handler, **words)(handler)


NO_TILES_HERE: dict[str, Callable[[Any, Any], Any]] = {
    "p": torch.norm,
    "running_mean": lambda x, n: F.batch_norm(x, n, n, training=False),
}


@pytest.mark.parametrize("name", NO_TILES_HERE)
@on_ranks(2)
def test_a_tile_is_not_a_plain_value(name):
    mesh = world_mesh(lat=2)
    x, n = shard(torch.ones(4, 3), mesh, ("lat", None)), shard(torch.ones(3), mesh, ("lat",))
    with pytest.raises(ShardingError, match="answered for plain values only"):
        NO_TILES_HERE[name](x, n)
