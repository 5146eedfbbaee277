"""Owned boxes + needed boxes -> transfers: one planner for halos, redistribution and roll, and the calls that carry it out.

Each rank owns the box ``source.owned(coord)`` and holds ``source.held(coord)``; it needs ``target.held(coord)``.  Needed
intervals may reach below 0 or beyond the size: rows wrap around, as on a longitude circle.  What a rank holds already is
copied, everything else comes from its owner, in one message a pair of ranks.  The arithmetic is per dim, so boxes with
several hops, several wraps, empty pieces and negative margins need no special case.

The adjoint of a move is the reversed move with additions (Hewett and Grady, "A linear algebraic approach to model
parallelism in deep learning", arXiv 2006.03108).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.layout import Box, Coordinate, Cut, Interval, Layout, ShardingError
from jigsaw.mesh import coordinate

Margins = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Move:
    """Rows that one rank (mesh position `giver`) gives another: `taken` of its local tensor become `placed` of the other's."""

    giver: int
    taken: Box
    placed: Box


@dataclass(frozen=True)
class Plan:
    """One rank's side of an exchange, in local rows.  Shapes have one entry a cut."""

    source_shape: tuple[int, ...]
    target_shape: tuple[int, ...]
    kept: tuple[Move, ...]
    sends: tuple[tuple[int, tuple[Box, ...]], ...]
    receives: tuple[tuple[int, tuple[Box, ...]], ...]

    @property
    def is_local(self) -> bool:
        return not self.sends and not self.receives

    @property
    def is_slice(self) -> bool:
        """Whether the target is one box of what this rank holds, and nobody needs anything else from it."""
        return self.is_local and len(self.kept) == 1 and _extents(self.kept[0].placed) == self.target_shape

    @property
    def keeps_all(self) -> bool:
        """Whether the whole source is kept, as one box: the gradient can then start as a slice."""
        return len(self.kept) == 1 and _extents(self.kept[0].taken) == self.source_shape


def _extents(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)


# -- planning: integers only ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Segment:
    """Consecutive needed rows of one dim with one owner: `rows` of the global dim, `placed` in the needed interval."""

    owner: int
    rows: Interval
    placed: Interval
    mine: Interval | None  # the same rows in this rank's own local coordinates, where it holds them


@lru_cache(maxsize=65536)
def _segments(cut: Cut, need: Interval, piece: int) -> tuple[_Segment, ...]:
    """Split a needed interval at wraps, at the owners' cut points and at the edges of what `piece` holds."""
    start, stop = need
    edges = sorted({0, cut.size, *cut.points, *(e % cut.size for e in cut.held[piece])}) if cut.size else [0]
    found: list[_Segment] = []
    while start < stop:
        row = start % cut.size
        length = min(stop - start, next(e for e in edges if e > row) - row)
        owner = next(i for i in range(cut.pieces) if cut.points[i] <= row < cut.points[i + 1])
        placed = (start - need[0], start - need[0] + length)
        found.append(_Segment(owner, (row, row + length), placed, _held_at(cut, piece, start, length)))
        start += length
    return tuple(found)


def _held_at(cut: Cut, piece: int, start: int, length: int) -> Interval | None:
    """Where `piece` holds the rows [start, start + length), tried as asked first, then any number of wraps away."""
    low, high = cut.held[piece]
    for wraps in (0, *((low - start) // cut.size + k for k in (0, 1))):
        at = start + wraps * cut.size
        if low <= at and at + length <= high:
            return at - low, at - low + length
    return None


def _runs(segments: Sequence[_Segment]) -> list[tuple[Interval, Interval]]:
    """(mine, placed) of the segments that this rank holds itself, consecutive ones merged."""
    runs: list[tuple[Interval, Interval]] = []
    for s in segments:
        if s.mine is None:
            continue
        if runs and runs[-1][0][1] == s.mine[0] and runs[-1][1][1] == s.placed[0]:
            (mine, placed) = runs.pop()
            runs.append(((mine[0], s.mine[1]), (placed[0], s.placed[1])))
        else:
            runs.append((s.mine, s.placed))
    return runs


@lru_cache(maxsize=4096)
def moves(source: Layout, target: Layout, coord: Coordinate) -> tuple[Move, ...]:
    """Everything that the rank at `coord` must gather to hold its target box; its own rows first."""
    me = source.index(coord)
    by_dim = [_segments(c, need, source.piece(c, coord)) for c, need in zip(source.cuts, target.held(coord), strict=True)]
    if any(start >= stop for start, stop in target.held(coord)):
        return ()
    found = [
        Move(me, tuple(mine for mine, _ in cell), tuple(placed for _, placed in cell)) for cell in product(*map(_runs, by_dim))
    ]
    if all(s.mine is not None for segments in by_dim for s in segments):
        return tuple(found)
    for cell in product(*by_dim):
        if all(s.mine is not None for s in cell):
            continue
        giver = _owner(source, coord, [s.owner for s in cell])
        base = source.held(giver)
        taken = tuple((s.rows[0] - low, s.rows[1] - low) for s, (low, _) in zip(cell, base, strict=True))
        found.append(Move(source.index(giver), taken, tuple(s.placed for s in cell)))
    return tuple(found)


def _owner(source: Layout, coord: Coordinate, pieces: Sequence[int]) -> Coordinate:
    """The coordinate that owns the given piece of every cut; along axes that cut nothing, the asking rank's own."""
    at = dict(zip((name for name, _ in source.axes), coord, strict=True))
    for cut, piece in zip(source.cuts, pieces, strict=True):
        for axis in reversed(cut.axes):
            piece, at[axis] = divmod(piece, source.size_of(axis))
    return tuple(at.values())


@lru_cache(maxsize=4096)
def plan(source: Layout, target: Layout, coord: Coordinate) -> Plan:
    """The transfers that bring every rank from its source box to its target box, as the rank at `coord` sees them.

    Raises: `ShardingError` when the layouts describe arrays of different shapes or meshes.
    """
    if source.axes != target.axes or [c.size for c in source.cuts] != [c.size for c in target.cuts]:
        raise ShardingError(f"cannot exchange between {source} on mesh {dict(source.axes)} and {target} on mesh {dict(target.axes)}: sizes and mesh must agree")
    me = source.index(coord)
    mine = moves(source, target, coord)
    sends: list[tuple[int, tuple[Box, ...]]] = []
    for other in source.coords():
        boxes = tuple(m.taken for m in moves(source, target, other) if m.giver == me) if other != coord else ()
        if boxes:
            sends.append((source.index(other), boxes))
    receives: dict[int, list[Box]] = {}
    for m in mine:
        if m.giver != me:
            receives.setdefault(m.giver, []).append(m.placed)
    return Plan(
        _extents(source.held(coord)),
        _extents(target.held(coord)),
        tuple(m for m in mine if m.giver == me),
        tuple(sends),
        tuple((peer, tuple(boxes)) for peer, boxes in sorted(receives.items())),
    )


# -- carrying it out --------------------------------------------------------------------------------------------------


def _at(x: Tensor, box: Box, margins: Margins | None = None) -> Tensor:
    shift = [low for low, _ in margins] if margins else [0] * len(box)
    return x[tuple(slice(start + s, stop + s) for (start, stop), s in zip(box, shift, strict=True))]


def _pack(x: Tensor, boxes: Sequence[Box], margins: Margins | None = None) -> Tensor:
    parts = [_at(x, box, margins).reshape(-1) for box in boxes]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _unpack(flat: Tensor, x: Tensor, boxes: Sequence[Box], add: bool, margins: Margins | None = None) -> None:
    start = 0
    for box in boxes:
        part = _at(x, box, margins)
        values = flat[start : start + part.numel()].view(part.shape)
        part.add_(values) if add else part.copy_(values)
        start += part.numel()


def _buffers(like: Tensor, boxes_by_peer: Sequence[tuple[int, tuple[Box, ...]]]) -> list[tuple[int, Tensor]]:
    def size(boxes: tuple[Box, ...]) -> int:
        return sum(torch.Size(_extents(b)).numel() for b in boxes)

    return [(peer, like.new_empty(size(boxes))) for peer, boxes in boxes_by_peer]


def _forward(x: Tensor, plan: Plan, mesh: DeviceMesh, margins: Margins | None, fill: float) -> Tensor:
    if plan.is_slice and margins is None:
        return _at(x, plan.kept[0].taken)
    received = _buffers(x, plan.receives)
    pending = comm.swap(mesh, [(peer, _pack(x, boxes)) for peer, boxes in plan.sends], received, "exchange")
    grown = margins or ((0, 0),) * len(plan.target_shape)
    shape = [n + low + high for n, (low, high) in zip(plan.target_shape, grown, strict=True)]
    out = x.new_empty(shape) if margins is None else x.new_full(shape, fill)
    for move in plan.kept:
        _at(out, move.placed, margins).copy_(_at(x, move.taken))
    pending.wait()
    for (_, flat), (_, boxes) in zip(received, plan.receives, strict=True):
        _unpack(flat, out, boxes, add=False, margins=margins)
    return out


def _adjoint(grad: Tensor, plan: Plan, mesh: DeviceMesh, margins: Margins | None) -> Tensor:
    received = _buffers(grad, plan.sends)
    pending = comm.swap(mesh, [(peer, _pack(grad, boxes, margins)) for peer, boxes in plan.receives], received, "exchange")
    if plan.keeps_all:
        kept = _at(grad, plan.kept[0].placed, margins)
        out = kept if plan.is_local else kept.clone(memory_format=torch.contiguous_format)
    else:
        out = grad.new_zeros(plan.source_shape)
        for move in plan.kept:
            _at(out, move.taken).add_(_at(grad, move.placed, margins))
    pending.wait()
    for (_, flat), (_, boxes) in zip(received, plan.sends, strict=True):
        _unpack(flat, out, boxes, add=True)
    return out


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, plan: Plan, mesh: DeviceMesh, margins: Margins | None, fill: float) -> Tensor:
        ctx.how = plan, mesh, margins
        return _forward(x, plan, mesh, margins, fill)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _Adjoint.apply(grads[0], *ctx.how), None, None, None, None


class _Adjoint(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, plan: Plan, mesh: DeviceMesh, margins: Margins | None) -> Tensor:
        ctx.how = plan, mesh, margins
        return _adjoint(grad, plan, mesh, margins)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Exchange.apply(grads[0], *ctx.how, 0.0), None, None, None


def exchange(
    local: Tensor, source: Layout, target: Layout, mesh: DeviceMesh, margins: Margins | None = None, fill: float = 0.0
) -> Tensor:
    """Each rank gives its source box and gets its target box; rows that several ranks need are sent to each of them.

    `margins` adds rows of `fill` around this rank's target box (a cut each: below, above), so that a padded stencil input
    is assembled in one copy.  The layouts must be cut by the same axes (else use `redistribute`).

    *Shapes*: global source.shape = target.shape; per rank ``source.held`` -> ``target.held`` plus margins.
    *Sends*: forward the rows that others need and this rank owns, one message a pair of ranks; backward the same, reversed.
    *Raises*: `ShardingError` for layouts of different shapes, meshes or cut axes.
    """
    if set(source.cut_axes) != set(target.cut_axes):
        raise ShardingError(f"exchange from {source} to {target} would change what is replicated; use redistribute")
    todo = plan(source, target, coordinate(mesh))
    if margins is not None and not any(low or high for low, high in margins):
        margins = None
    if margins is None and todo.is_slice and todo.keeps_all:
        return local
    cells = local.reshape(todo.source_shape)
    out: Tensor = _at(cells, todo.kept[0].taken) if margins is None and todo.is_slice else _Exchange.apply(cells, todo, mesh, margins, fill)
    if source.ndim == len(source.cuts):
        return out
    shape, sizes = [], list(out.shape)
    for n in source.groups:
        shape.append(torch.Size(sizes[:n]).numel())
        sizes = sizes[n:]
    return out.reshape(shape)


class _Redistribute(torch.autograd.Function):
    """The identity between two partitions; a value held alike has its whole gradient everywhere, so the way back is the same map."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Layout, target: Layout, mesh: DeviceMesh) -> Tensor:
        ctx.how = target, source, mesh
        out = _forward(x, plan(source, target, coordinate(mesh)), mesh, None, 0.0)
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _Redistribute.apply(grads[0], *ctx.how), None, None, None


def redistribute(local: Tensor, source: Layout, target: Layout, mesh: DeviceMesh) -> Tensor:
    """From any layout of an array to any other: other cut points, other dims, other axes, gathered or cut, with or without halo.

    *Shapes*: global unchanged; per rank ``source.held`` -> ``target.held``.
    *Sends*: forward the rows that others need and this rank owns; backward likewise from target to source.
    *Raises*: `ShardingError` for layouts of different shapes or meshes.
    """
    if source.groups != target.groups:
        raise ShardingError(f"cannot redistribute {source} to {target}: their dims are flattened differently; unflatten first")
    if set(source.cut_axes) == set(target.cut_axes):
        return exchange(local, source, target, mesh)
    bare_source, bare_target = source.without_halo(), target.without_halo()
    owned = exchange(local, source, bare_source, mesh)
    here = coordinate(mesh)
    cells = owned.reshape([b - a for a, b in bare_source.held(here)])
    moved: Tensor = _Redistribute.apply(cells, bare_source, bare_target, mesh)
    return exchange(moved.reshape(bare_target.local_shape(here)), bare_target, target, mesh)
