"""Refused functions, run on the whole tensor on every rank: ``parallelize(model, mesh, strict=False)``.

Every rank makes the tiles among the arguments whole and computes the same answer with torch's own function.  It keeps
the rows that the first cut tile has of it, where a dim has the same size.  A tensor that every rank has alike has its
whole gradient on each, so the way back is exact as it is; a plain parameter enters as an operand of an answer that
nothing cuts (`plain_operand`).

Four ranks, x [12, 32] cut in rows by lat=4, and `torch.linalg.pinv(x)`, [32, 12]: each rank takes the 9 rows that it
lacks, and all compute the whole pseudo-inverse.  No dim has the size of before, so it stays uncut; of a `cholesky` each
rank would keep its rows again.

Ranks refuse alike, from what they all know (`RanksDifferError` is the one exception), so all of them come here, or
none.  Only the function that was called on tiles runs whole, never one that its answer is made of.

>>> with jigsaw.strict_mode(False):
...     torch.linalg.pinv(jigsaw.shard(torch.eye(3), jigsaw.init_mesh(lat=1), ("lat", None))).shape
torch.Size([3, 3])
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from jigsaw.comm import begin_at_one_place
from jigsaw.comm.exchange import redistribute_rows
from jigsaw.comm.wire_values import lie_in_one_memory
from jigsaw.errors import RanksDifferError, ShardingError
from jigsaw.geometry.cut import whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.meeting.common_cuts import mark_rows_moved
from jigsaw.ops.meeting.plain_operands import plain_operand
from jigsaw.ops.pointwise import changes_in_place, changes_plain, replace_results, replace_tensors
from jigsaw.ops.random_numbers import random_states
from jigsaw.ranks.call_places import is_of_packages
from jigsaw.ranks.model_world import OneProcessError
from jigsaw.tile.misuse import calling_line, warn_once
from jigsaw.tile.table import table
from jigsaw.tile.tile import Tile, leave_tile, refusal_error, shared_mesh, tiles_in
from jigsaw.torch_internals.autograd import graph_task_id, tensor_version
from jigsaw.torch_internals.placements import is_dtensor

GATHERED = "gathered"

# (the mode's owner, whether it is strict), innermost last; outside of all modes it is strict
_modes: ContextVar[tuple[tuple[object, bool], ...]] = ContextVar("_modes", default=())
_whole_places: set[str] = set()

_REMEDY = (
    "jigsaw.parallelize(model, mesh, strict=False) runs it on the whole tensor on every rank, and says what it costs"
)


# -- the mode ---------------------------------------------------------------------------------------------------------


@contextmanager
def strict_mode(is_strict: bool) -> Generator[None]:
    """Let functions that tiles cannot answer raise (True) within the block, or run on the whole tensor on every rank
    (False).  It is ``parallelize(strict=False)`` for a loss, which is computed outside a model.

    >>> tile = jigsaw.shard(torch.eye(3), jigsaw.init_mesh(lat=1), ("lat", None))
    >>> with jigsaw.strict_mode(False):
    ...     torch.linalg.matrix_rank(tile)
    tensor(3)
    """
    before = _modes.get()
    _modes.set((*before, (None, is_strict)))
    try:
        yield
    finally:
        _modes.set(before)


def run_forward_whole(model: nn.Module) -> None:
    """Let every forward pass of the model, whether it returns or raises, be one that is not strict."""
    mode = (object(), False)

    def enter(module: nn.Module, args: Any) -> None:
        _modes.set((*_modes.get(), mode))

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        if _modes.get()[-1:] == (mode,):  # called even if a hook before `enter` raised
            _modes.set(_modes.get()[:-1])

    model.register_forward_pre_hook(enter, prepend=True)
    model.register_forward_hook(leave, always_call=True)


def _is_strict(place: str) -> bool:
    # checkpointing runs the forward pass again, outside the model: places that ran whole then run whole again
    if graph_task_id() != -1 and place in _whole_places:
        return False
    return _modes.get()[-1][1] if _modes.get() else True


_cost_listeners: list[Callable[[str, int, ShardingError], None]] = []


@contextmanager
def hearing_costs(listener: Callable[[str, int, ShardingError], None]) -> Generator[None]:
    """Report to `listener`, in place of a warning: the function that runs whole, the bytes, and the refusal."""
    _cost_listeners.append(listener)
    try:
        yield
    finally:
        _cost_listeners.remove(listener)


# -- what is refused --------------------------------------------------------------------------------------------------


def _raise_or_run(refusal: ShardingError, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Raise the refusal, or run the function on the whole tensors.

    *Sends*: dims that an index picked come whole to every rank, as they would without its plan
    (`jigsaw.ops.kept_indices`), and the function is called again.
    """
    tiles = list(tiles_in((args, kwargs)))
    is_cut = any(t.layout.cut_dims or t.layout.has_halo for t in tiles)
    if isinstance(refusal, (RanksDifferError, OneProcessError)) or not is_cut or _is_in_another_call():
        raise refusal
    picked = [t for t in tiles if _is_cut_by_index(t)]
    if picked and not (changes_in_place(function) and any(args[0] is t for t in picked)):
        args, kwargs = replace_tensors((tuple(args), dict(kwargs)), _with_picked_dims_whole, lambda x: x)
        return function(*args, **kwargs)
    place = calling_line()
    if _is_strict(place):
        refusal.add_note(_REMEDY)
        raise refusal
    shared_mesh(tiles)
    return _run_on_whole_tensors(refusal, function, args, kwargs, tiles, place)


table.answer_refusal = _raise_or_run


def _is_cut_by_index(tile: Tile) -> bool:
    return any(cut.by_index and cut.is_cut for cut in tile.layout.cuts)


def _with_picked_dims_whole(tile: Tile) -> Tile:
    """Return a tile with the dims whole that are cut only because an index stays as it is; others as they are."""
    if not _is_cut_by_index(tile):
        return tile
    dims = [[c.uncut() if c.by_index else c.bare() for c in group] for group in tile.layout.dims()]
    return tile.with_layout(Layout.from_dims(dims, tile.layout.axes))


def _is_in_another_call() -> bool:
    """Say whether the refused function is part of the handling of another one, which was called on tiles itself."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    dispatcher = frame.f_code  # `_call_handler` of jigsaw.tile.tile, above `_raise_or_run`
    while frame.f_back is not None and is_of_packages(frame.f_code.co_filename):
        frame = frame.f_back
        if frame.f_code is dispatcher:
            return True
    return False


def _run_on_whole_tensors(
    refusal: ShardingError,
    function: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    tiles: Sequence[Tile],
    place: str,
) -> Any:
    """Return the function's own result on whole tensors, cut again.

    *Sends*: the rows of every tile that a rank lacks, to each rank, counted as ``"gathered"``; backward the same of the
    gradient of the result.
    *Raises*: the refusal, where torch raises on the whole tensors too, ranks would draw other random numbers, or a
    parameter is a DTensor.
    """
    like = next((t for t in tiles if t.layout.cut_dims), tiles[0])
    _check_plain_values(refusal, args, kwargs)
    _tell_cost(refusal, function, tiles, place)
    whole_tiles = {
        id(t): (t, redistribute_rows(t.local, t.layout, t.layout.uncut(), t.mesh, kind=GATHERED)) for t in tiles
    }
    versions = {at: tensor_version(whole) for at, (_, whole) in whole_tiles.items()}
    uncut = Tile(whole_tiles[id(like)][1], like.layout.uncut(), like.mesh)
    into_plain = changes_in_place(function) and changes_plain(args)
    whole_args, whole_kwargs = replace_tensors(
        (tuple(args), dict(kwargs)),
        # a tile that is written into a plain tensor becomes plain in sight of autograd, so that the graph records it
        lambda t: leave_tile(whole_tiles[id(t)][1], t.mesh) if into_plain else whole_tiles[id(t)][1],
        lambda x: x if into_plain else plain_operand(x, uncut, Layout((), uncut.layout.axes)),
    )
    numbers = random_states(like)
    try:
        out = function(*whole_args, **whole_kwargs)
    except torch.OutOfMemoryError:
        raise
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise refusal from error
    if any(not torch.equal(a, b) for a, b in zip(numbers, random_states(like), strict=True)):
        raise refusal_error(
            function,
            like,
            "it draws random numbers, which every rank would draw apart",
            "draw them into a tensor that ranks have alike (seed them alike), and use that",
        ) from refusal
    for at, (tile, whole) in whole_tiles.items():
        if tensor_version(whole) != versions[at]:
            _write_back(refusal, tile, whole)
    if into_plain:
        return out
    return replace_results(out, lambda y: _cut_again(y, like, list(whole_tiles.values()), refusal))


def _check_plain_values(refusal: ShardingError, args: Any, kwargs: Any) -> None:
    """Refuse a DTensor, a part of a weight: torch lets it meet no plain tensor, and whole it may not fit."""
    plain: list[Tensor] = []
    replace_tensors((args, kwargs), lambda t: t.local, lambda x: plain.append(x) or x)
    if any(map(is_dtensor, plain)):
        raise refusal


def _tell_cost(refusal: ShardingError, function: Any, tiles: Sequence[Tile], place: str) -> None:
    name = getattr(function, "__name__", str(function))
    _whole_places.add(place)
    lacking = {
        id(t): (t.numel() - math.prod(b - a for a, b in t.layout.owned(t.coordinate))) * t.local.itemsize for t in tiles
    }
    for tell in _cost_listeners:
        tell(name, sum(lacking.values()), refusal)
    if _cost_listeners:
        return
    warn_once(
        f"{name} whole at {place}",
        f"{name} runs on the whole tensor on every rank at {place}: a call brings {sum(lacking.values())} bytes to "
        f"this rank, and the gradient of what it gives about as many; the reason: {refusal}",
    )


# -- whole, and cut again ---------------------------------------------------------------------------------------------


def _write_back(refusal: ShardingError, tile: Tile, whole: Tensor) -> None:
    """Write what a function changed in place on the whole tensor into the tile."""
    if tuple(whole.shape) != tuple(tile.shape) or whole.dtype != tile.dtype:
        raise refusal
    changed = redistribute_rows(whole, tile.layout.uncut(), tile.layout, tile.mesh, kind=GATHERED)
    if not begin_at_one_place(changed, tile.local) or tile.layout.has_halo:
        tile.local.copy_(changed)


def _cut_again(out: Tensor, like: Tile, arguments: Sequence[tuple[Tile, Tensor]], refusal: ShardingError) -> Any:
    """Return a whole result as a tile, cut as `like` where dims have its sizes, or as the argument that it is; a number
    stays a plain tensor.
    """
    for tile, whole in arguments:
        if out is whole:
            return tile
    if out.layout != torch.strided:
        raise refusal
    return leave_tile(out, like.mesh) if out.ndim == 0 else _cut_tensor(out, like, arguments)


def _cut_tensor(out: Tensor, like: Tile, arguments: Sequence[tuple[Tile, Tensor]]) -> Tile:
    groups = like.layout.dims() if out.ndim == like.ndim else ()
    alike = [
        groups[d] if groups and out.shape[d] == like.shape[d] else (whole_dim(out.shape[d]),) for d in range(out.ndim)
    ]
    target = Layout.from_dims(alike, like.layout.axes).without_halo()
    cut = Tile(redistribute_rows(out, target.uncut(), target, like.mesh, kind=GATHERED), target, like.mesh)
    if any(lie_in_one_memory(out, whole) and not lie_in_one_memory(whole, tile.local) for tile, whole in arguments):
        # torch would return a view, and change the tile with it; marked on every rank, also where no row moved
        mark_rows_moved(cut.local)
    return cut
