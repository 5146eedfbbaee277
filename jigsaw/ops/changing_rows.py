"""Rows of a tile changed in place, with its halo: `changes_rows`, around the handlers of functions that do so.

>>> tile = jigsaw.shard(torch.zeros(3), jigsaw.init_mesh(lat=1), ("lat",), halo={0: 1}, periodic=[0])
>>> tile.index_fill_(0, torch.tensor([0]), 1.0).local
tensor([0., 1., 0., 0., 1.])
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any

import torch

from jigsaw.geometry.layout import Layout
from jigsaw.ops.unknown_functions import run_unknown_function
from jigsaw.tile.tile import Tile, refusal_error


def changes_rows(function: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorate a handler that changes rows of its first argument in place, halo rows of the array among them.

    Where the halo goes around a periodic dim, the handler changes the owned rows, and the halo is fetched after it.
    *Raises*: errors that would occur only on some ranks: a leaf that is changed, a halo that would stay as it was.
    """

    def decorate(change: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(change)
        def handler(input: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(input, Tile):
                return run_unknown_function(function, input, *args, **kwargs)
            check_no_leaf(function, input)
            if not holds_beyond(input.layout):
                return change(input, *args, **kwargs)
            check_halo_goes_around(function, input)
            own = input.owned().clone()
            change(own, *args, **kwargs)
            input.local.copy_(own.with_layout(input.layout).local)
            return input

        return handler

    return decorate


@lru_cache(maxsize=4096)
def holds_beyond(layout: Layout) -> bool:
    """Say whether ranks hold rows beyond an end of a dim."""
    return any(a < 0 or b > c.size for c in layout.cuts for a, b in c.held)


def check_halo_goes_around(function: Any, tile: Tile) -> None:
    """Check a target.  Raises: `ShardingError` where a rank holds rows beyond an end that does not wrap."""
    if any(not c.wraps for c in tile.layout.cuts for a, b in c.held if a < 0 or b > c.size):
        why = "it would change the owned rows in place, and leave the halo as it was"
        raise refusal_error(function, tile, why, "use tile.owned()")


def check_no_leaf(function: Any, tile: Tile) -> None:
    """Check a target.  Raises: what autograd would raise on the ranks that have rows of it."""
    # not `tile.requires_grad`, which records the tile in the graph
    if tile.local.requires_grad and tile.local.is_leaf and torch.is_grad_enabled():
        raise RuntimeError(
            f"{function.__name__}: a leaf Variable that requires grad is being used in an in-place operation; change "
            "tile.clone(), or use torch.no_grad()"
        )
