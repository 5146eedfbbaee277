"""Index tensors that stay as they are: what they pick along a cut dim is cut, and only the rows needed travel.

An index that is new in each step brings all that it picks to every rank, because a plan would cost as much.  One that
stays is planned once: each rank then gets the rows that its own part of the result needs, each of them once.

**The rule**, from what every rank has alike:

1. *Which index.*  A plain tensor of integers, by itself along a dim of one cut.  It stays as it is if a module under
   way keeps it, as buffer, parameter or attribute, or if it is met a second time: the same memory, shape, strides and
   version, or the same values.  For those that a GPU has the host waits, so they are planned and compared only where
   the index picks a mebibyte or more.  A checkpointed call runs again as it ran.  One that a reentrant one, or a
   backward pass, meets first stays unplanned.
2. *Which dim of it.*  The first with as many rows as there are cells along the cut dim, cut as these are: a table
   [cells, k].  Else the longest, cut evenly.  With less than a sixteenth of the cells, or fewer rows than pieces, it is
   left whole.
3. *A refusal.*  A function that a cut dim of such a result stops runs with that dim whole, as it is without a plan.

Values that such an index writes (`index_add`, `scatter_reduce`) travel to the owners of their rows, and sums go in the
order of the index.  The tensor that they are written to is cut, unless another tensor of some rank shares its memory:
as the cells are that were picked from, where there are as many, and else evenly by the second rule (of the values,
where no index picked them).  Where it is changed in place, the ranks agree on that, but for graphs.

Three ranks, 12 cells, ``x[:, table]`` of the neighbors [12, 2] on a ring: rank 1 owns 4 to 7 and needs 3 and 8 of the
others, two rows.  The result [1, 12, 2] is cut at 4 and 8; whole it would be 24 rows on every rank.

>>> ring = torch.tensor([[3, 1], [0, 2], [1, 3], [2, 0]])
>>> tile = jigsaw.shard(torch.arange(4.0), jigsaw.init_mesh(cell=1), ("cell",))
>>> tile[ring].sum(-1).local
tensor([4., 2., 4., 2.])
"""

from __future__ import annotations

import gc
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jigsaw.comm.agreement import is_true_everywhere
from jigsaw.comm.checkpoint_runs import FrameNotes, open_frames
from jigsaw.comm.first_meetings import meet_tensor
from jigsaw.comm.graph_calls import is_making_graph, lacks_values
from jigsaw.comm.neighbor_exchange import (
    NeighborExchange,
    edges_to_rows,
    positions_of_pieces,
    rows_to_edges,
)
from jigsaw.comm.wire_values import checksum_of_bits, is_on_accelerator, lie_in_one_memory, places_with_values
from jigsaw.geometry.cut import Cut, cut_of_written_rows, cut_points, is_worth_cutting
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.neighbors import Integers, NeighborPlan, Neighbors, plan_neighbors
from jigsaw.ops.into_torch.reentrant import is_first_run
from jigsaw.ops.meeting.plain_operands import operand_part
from jigsaw.ranks.call_places import modules_of_call
from jigsaw.ranks.mesh import mesh_size
from jigsaw.ranks.slab_mesh import SlabMesh
from jigsaw.tile.misuse import warn_once
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals.autograd import (
    graph_task_id,
    memory_id,
    memory_users,
    own_buffers,
    own_parameters,
    tensor_users,
    tensor_version,
)
from jigsaw.torch_internals.dispatch import without_modes
from jigsaw.torch_internals.fake_tensors import FakeTensor, constant_in_graph, is_on_paper, note_values_read, real_view

_MARK = "_jigsaw_kept"  # attribute of memory: the indices in it, by dtype, shape, strides and offset
_PLAIN = (Tensor, nn.Parameter)
# number of indices that are recognized by their values; a net that makes more in each step gets no plan
_MOST_RECENT = 64
_MOST_VIEWS = 64  # number of indices in one memory: each step may pick by other rows of it
_COSTLY = 2**20  # number of picked bytes from which the host waits for a GPU, and warnings are given
_MANY_NEW = 8  # number of indices with new values, none of which came again, before a warning is given

# -- which index ------------------------------------------------------------------------------------------------------


class KeptIndex:
    """An index that stays as it is, with its plans; negative places count from the end of the `size` cells."""

    def __init__(self, index: Tensor, size: int) -> None:
        values = _index_values(index)
        lowest, highest = values.min(initial=0), values.max(initial=-1)
        self.is_right, self.has_negative = bool(-size <= lowest and highest < size), bool(lowest < 0)
        self.places: Integers = np.where(values < 0, values + size, values)
        self.size, self._negative = size, values if self.has_negative else None
        # the GPU compares with its own copy, so that only one bool is copied to the host
        self._on_device = index.detach().clone() if is_on_accelerator(index) else None
        self._tables: dict[Any, Neighbors] = {}
        self._plans: dict[Any, NeighborPlan] = {}
        self._own_rows: dict[Any, Tensor] = {}

    def has_values(self, index: Tensor) -> bool:
        """Say whether an index has the same places; the host waits for one that a GPU has."""
        if self._on_device is not None and self._on_device.device == index.device:
            with without_modes():
                return torch.equal(self._on_device, index.detach())
        return np.array_equal(_index_values(index), self.places if self._negative is None else self._negative)

    def gather_plan(self, along: int, sources: Sequence[int], targets: Sequence[int], piece: int) -> NeighborPlan:
        """Return the plan of a gather whose result is cut at `targets` along a dim of the index."""
        key = along, tuple(sources), tuple(targets), piece
        if key not in self._plans:
            if along not in self._tables:
                rows = np.moveaxis(self.places, along, 0)
                self._tables[along] = Neighbors(rows.reshape(len(rows), -1), self.size)
            self._plans[key] = plan_neighbors(self._tables[along], sources, targets, piece)
        return self._plans[key]

    def owner_plan(self, sources: Sequence[int], targets: Sequence[int], piece: int) -> NeighborPlan:
        """Return the plan that brings what the index is written with to the owners of the rows, in its order."""
        key = "owners", tuple(sources), tuple(targets), piece
        if key not in self._plans:
            order, ends = self._by_owner(targets)
            self._plans[key] = plan_neighbors(Neighbors(order[:, None], len(order)), sources, ends, piece)
        return self._plans[key]

    def own_rows(self, targets: Sequence[int], piece: int, device: torch.device) -> Tensor:
        """Return the local rows that are written, in the order of `owner_plan`."""
        key = tuple(targets), piece, device
        if key not in self._own_rows:
            order, ends = self._by_owner(targets)
            rows = self.places[order[ends[piece] : ends[piece + 1]]] - targets[piece]
            self._own_rows[key] = places_with_values(rows, device)
        return self._own_rows[key]

    def _by_owner(self, targets: Sequence[int]) -> tuple[Integers, list[int]]:
        owners = np.searchsorted(np.asarray(targets), self.places, side="right") - 1
        counts = np.bincount(owners, minlength=len(targets) - 1)
        return np.argsort(owners, kind="stable"), [0, *np.cumsum(counts).tolist()]


def _index_values(index: Tensor) -> Integers:
    # a copy, because memory that numpy shares cannot be resized any more
    with without_modes():
        return index.detach().to("cpu", torch.int64, copy=True).numpy()


class _MetIndex:
    """Indices of the same values: what is planned for them, by number of cells."""

    def __init__(self) -> None:
        self._kept: dict[int, KeptIndex] = {}

    def has_values(self, index: Tensor) -> bool:
        """Say whether an index may take over what is planned."""
        return all(kept.has_values(index) for kept in self._kept.values())

    def of_cells(self, size: int, index: Tensor, tile: Tile) -> KeptIndex | None:
        """Return the index as one of `size` cells; None if it names cells beyond these."""
        if size not in self._kept:
            meet_tensor(index, tile.mesh)
            self._kept[size] = KeptIndex(index, size)
        return self._kept[size] if self._kept[size].is_right else None


def _met_before(index: Any, tile: Tile, dim: int) -> _MetIndex | None:
    """Return what is known of an index along a dim, if it stays as it is by the rule; None for others.

    Where it runs for the first time, a checkpointed call notes what it is.
    """
    if not _can_stay(index, tile):
        return None
    if is_making_graph():
        note_values_read(index)
        return _met_in_order(index, tile, dim)
    is_again = open_frames()[1] is not None
    met = _plans_of_frames.next_note() if is_again else _met_in_order(index, tile, dim)
    _plans_of_frames.add(met)
    return met


def _met_in_order(index: Tensor, tile: Tile, dim: int) -> _MetIndex | None:
    try:
        version = tensor_version(index)
    except RuntimeError:  # in inference mode torch counts no changes
        return None
    memory: Any = index.untyped_storage()
    known: dict[Any, tuple[int, _MetIndex | None]] = getattr(memory, _MARK, {})
    view = index.dtype, tuple(index.shape), index.stride(), index.storage_offset()
    if view in known and known[view][0] == version:
        return known[view][1]
    if view not in known and len(known) >= _MOST_VIEWS:
        return None
    # Where values that an index has while a graph is made change, another graph is made.  Of an index that a dry run
    # knows, every step has the same values: it plays one after the first.
    is_kept = is_making_graph() or (view not in known and (is_on_paper(index) or _is_of_module(index)))
    is_settled = graph_task_id() == -1 and not is_first_run()
    met, is_new = (None, True) if is_kept or not is_settled else _met_with_values(index, tile, dim)
    known[view] = version, met or (_MetIndex() if is_kept else None)
    setattr(memory, _MARK, known)
    return None if is_new and not is_kept else known[view][1]


_recent: OrderedDict[Any, _MetIndex] = OrderedDict()
# a checkpointed call runs again by the same plans, and with the same targets cut
_plans_of_frames, _targets_of_frames = FrameNotes(), FrameNotes()


def _met_with_values(index: Tensor, tile: Tile, dim: int) -> tuple[_MetIndex | None, bool]:
    """Return what is known of indices of the same values, and whether this is the first of them, as far as is seen.
    None stands for one that is not worth a wait, which stays unplanned.
    """
    picked = index.numel() * (tile.numel() // max(tile.shape[dim], 1)) * tile.local.itemsize
    is_costly = picked >= _COSTLY and _dim_to_cut(index.shape, tile.layout.dim(dim)[0]) is not None
    is_awaited = is_on_accelerator(index)
    if is_awaited and not (is_costly and _is_worth_a_wait(index, tile, dim)):
        return None, True
    with without_modes():
        key = checksum_of_bits(index), index.dtype, tuple(index.shape)
    before = _recent.pop(key, None)
    is_new = before is None or not before.has_values(index)
    _recent[key] = met = _MetIndex() if before is None or is_new else before
    if len(_recent) > _MOST_RECENT:
        _recent.popitem(last=False)
    if is_costly and is_new:
        _tell_of_new_values(index, tile, dim, picked)
    elif is_costly:
        _came_again.add((index.ndim, tile.shape[dim]))
        if is_awaited:
            warn_once(
                f"awaited index {tuple(index.shape)}",
                f"an index of shape {tuple(index.shape)} is made anew in each step with the same values, so each time "
                f"the host waits for {index.device} to compare them; this saves bringing {picked} bytes to every rank; "
                "keep it as a buffer of the module, and nothing waits",
            )
    return met, is_new


# by dims of the index and number of cells: the indices with new values, and whether any came again
_count_of_new: Counter[tuple[int, int]] = Counter()
_came_again: set[tuple[int, int]] = set()


def _is_worth_a_wait(index: Tensor, tile: Tile, dim: int) -> bool:
    """Say whether values on a GPU are compared: not where none came again, nor while a CUDA graph is captured."""
    key = index.ndim, tile.shape[dim]
    is_hopeless = _count_of_new[key] >= _MANY_NEW and key not in _came_again
    return not is_hopeless and not (index.is_cuda and torch.cuda.is_current_stream_capturing())


def _tell_of_new_values(index: Tensor, tile: Tile, dim: int, picked: int) -> None:
    """Warn once where the indices along a dim have other values each time."""
    key = index.ndim, tile.shape[dim]
    if len(_count_of_new) > _MOST_RECENT:
        _count_of_new.clear()
    _count_of_new[key] += 1
    if _count_of_new[key] > _MOST_RECENT or (_count_of_new[key] >= _MANY_NEW and key not in _came_again):
        warn_once(
            f"new indices {key}",
            f"an index of shape {tuple(index.shape)} along dim {dim} of a Tile of shape {tuple(tile.shape)}, cut by "
            f"{', '.join(tile.layout.dim_axes(dim))}, has other values in each step, so all that it picks, {picked} "
            "bytes, comes to every rank; where its values repeat, keep it as a buffer of the module: then only the "
            "rows that each rank needs travel",
        )


def _can_stay(index: Any, tile: Tile) -> bool:
    return (
        type(index) in _PLAIN
        and index.dtype in (torch.int64, torch.int32)
        and index.ndim > 0
        and index.layout == torch.strided
        and mesh_size(tile.mesh) > 1
        and not isinstance(tile.mesh, SlabMesh)
        # tiles have no values while a graph is made, nor in a dry run, but indices that a module keeps have
        and (is_making_graph() or (not lacks_values() and type(tile.local) in (*_PLAIN, FakeTensor)))
    )


def _is_of_module(index: Tensor) -> bool:
    return any(
        _has_memory(values, index)
        for module in modules_of_call()
        for values in (own_buffers(module), own_parameters(module), vars(module))
    )


def _has_memory(values: Any, index: Tensor, depth: int = 3) -> bool:
    """Say whether the memory of the index is that of a tensor among the values of a dict, list or tuple."""
    for value in values.values() if isinstance(values, dict) else values:
        if isinstance(value, (dict, list, tuple)):
            if depth and _has_memory(value, index, depth - 1):
                return True
        elif type(value) in _PLAIN and lie_in_one_memory(value, index):
            return True
    return False


# -- what is picked ---------------------------------------------------------------------------------------------------


def _dim_to_cut(shape: Sequence[int], cut: Cut) -> int | None:
    """Return the dim of an index that is cut, by the rule; None for none."""
    alike = [d for d, n in enumerate(shape) if n == cut.size]
    longest = alike[0] if alike else max(range(len(shape)), key=lambda d: shape[d])
    return longest if is_worth_cutting(shape[longest], (cut,)) else None


def pick_kept_rows(tile: Tile, dim: int, index: Any, may_be_negative: bool = True) -> Tile | None:
    """Return what an index picks along a dim, cut by the rule; None where the index is none that stays as it is.

    *Shapes*: the dims of the index take the place of `dim`; one of them is cut by its axes.
    *Sends*: forward each own row that another rank needs, once a rank; backward the gradient of each picked row that
    another rank owns.
    """
    lone, index = _lone_cut(tile, dim), real_view(index)
    if lone is None or not lone.is_cut:
        return None
    met = _met_before(index, tile, dim)
    kept = None if met is None else met.of_cells(lone.size, index, tile)
    if met is None and is_making_graph():
        _tell_cost_in_graph(tile, dim, index, lone)
    if kept is None or (kept.has_negative and not may_be_negative):
        return None
    x = tile.owned()
    (cut,) = x.layout.dim(dim)
    shape, along = kept.places.shape, _dim_to_cut(kept.places.shape, cut)
    if along is None:
        return None
    target = replace(cut, by_index=True)
    if shape[along] != cut.size:
        target = replace(target, size=shape[along], points=cut_points(shape[along], cut.pieces), held=(), source=(cut,))
    piece = x.layout.piece(cut, x.coordinate)
    plan = kept.gather_plan(along, cut.points, target.points, piece)
    edges = rows_to_edges(x.local, _exchange(plan, x, cut, dim))
    start, stop = target.owned(piece)
    rest = [n for d, n in enumerate(shape) if d != along]
    edges = edges.unflatten(dim, (stop - start, *rest)).movedim(dim, dim + along)
    layout = x.layout.replace_dim(dim, target)
    for d, n in enumerate(shape):
        if d != along:
            layout = layout.insert(dim + d, n)
    return Tile(edges, layout, x.mesh)


def _tell_cost_in_graph(tile: Tile, dim: int, index: Any, cut: Cut) -> None:
    """Warn once that a graph brings all that an index picks to every rank, where a plan would cut it."""
    if not isinstance(index, Tensor) or isinstance(index, Tile) or not index.ndim or index.is_floating_point():
        return
    rows = tuple(index.shape)
    if index.dtype != torch.bool and _dim_to_cut(rows, cut) is not None:
        picked = index.numel() * (tile.numel() // max(cut.size, 1)) * tile.local.itemsize
        warn_once(
            f"index {rows} in a graph",
            f"jigsaw.compile: an index of shape {rows} picks along dim {dim}, cut by {', '.join(cut.axes)}, of a Tile "
            f"of shape {tuple(tile.shape)}; the graph has no values of it, because it is computed or has changed, so "
            f"each call brings all that it picks, {picked} bytes, to every rank; keep it unchanged in the module, as a "
            "buffer or attribute, and the graph has a plan of it",
        )


def _exchange(plan: NeighborPlan, tile: Tile, cut: Cut, dim: int) -> NeighborExchange:
    return NeighborExchange(plan, tile.mesh, positions_of_pieces(tile.layout.without_halo(), cut, tile.coordinate), dim)


# -- what is written --------------------------------------------------------------------------------------------------


class RowsForOwners:
    """Values along a cut dim that an index which stays as it is writes to the rows of a tile, cut by the same axes."""

    def __init__(self, kept: KeptIndex, input: Tile, source: Tile, dim: int) -> None:
        self._kept, self._input, self._dim = kept, input, dim
        self._from, self._to = source.layout.dim(dim)[0].bare(), input.layout.dim(dim)[0].bare()
        self._piece = input.layout.piece(self._to, input.coordinate)

    @property
    def layout(self) -> Layout:
        """Layout of the values, which lie as the input along its other dims."""
        return self._input.layout.replace_dim(self._dim, self._from)

    def summed(self, values: Tensor) -> Tensor:
        """Return the sum for each own row, in the order of the index.

        *Sends*: each value whose row another rank owns; backward each own row that another rank needs, once.
        """
        plan = self._kept.gather_plan(0, self._to.points, self._from.points, self._piece)
        return edges_to_rows(values, _exchange(plan, self._input, self._from, self._dim))

    def moved(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the own rows that are written, and the values for them, in the order of the index.

        *Sends*: each value whose row another rank owns; backward its gradient.
        """
        plan = self._kept.owner_plan(self._from.points, self._to.points, self._piece)
        rows = constant_in_graph(self._kept.own_rows(self._to.points, self._piece, values.device))
        return rows, rows_to_edges(values, _exchange(plan, self._input, self._from, self._dim))


def rows_for_owners(input: Tile, dim: int, index: Any, source: Any, is_new: bool = False) -> RowsForOwners | None:
    """Return how values of a cut tile, which an index writes along a dim, come to the owners of its rows.

    None where the index changes from call to call, and where the values are whole along the dim. Also where these and
    the input are not each cut once by the same axes.  An input that `is_new` is a copy that nobody else can have.

    *Sends*: where the dim of an input that is not new may be cut, 32 bytes: the ranks agree that none keeps its memory.
    """
    if not isinstance(source, Tile) or source.ndim != input.ndim:
        return None
    index = along_one_dim(index, dim)
    met, cut, source_cut = _met_before(index, source, dim), _lone_cut(input, dim), _lone_cut(source, dim)
    if met is None or cut is None or source_cut is None or cut.has_halo or not source_cut.is_cut:
        return None
    kept = met.of_cells(cut.size, index, source)
    if kept is None or kept.places.shape != (source_cut.size,) or kept.has_negative:
        return None
    if not cut.is_cut:
        _cut_for_owners(input, dim, source_cut, is_new)
    return RowsForOwners(kept, input, source, dim) if input.layout.dim_axes(dim) == source_cut.axes else None


def _lone_cut(tile: Tile, dim: int) -> Cut | None:
    cuts = tile.layout.dim(dim)
    return cuts[0] if len(cuts) == 1 else None


def write_for_owners(
    owners: RowsForOwners,
    input: Tile,
    dim: int,
    source: Tile,
    is_sum: bool,
    write: Callable[..., Any],
    alpha: float = 1,
) -> Tile:
    """Write, in place, the values of a cut tile for rows of which others own some; sums go in the order of the index.

    *Sends*: each value whose row another rank owns; backward, of a sum, each own row that another rank needs, once, and
    else the gradient of each value.
    """
    part = operand_part(source, input, owners.layout).to(input.dtype)
    if is_sum:
        input.local.add_(owners.summed(part), alpha=alpha)
        return input
    rows, moved = owners.moved(part)
    if not input.local.numel():
        # this rank's part stays in the graph, because others wait for it
        input.local.add_(moved.sum(dtype=input.dtype))
    else:
        write(input.local, dim, rows, moved)
    return input


def _cut_for_owners(input: Tile, dim: int, values: Cut, is_new: bool) -> None:
    """Cut a dim of a tile in place, by the rule, where nothing cuts it and no rank keeps its memory elsewhere."""
    is_taken = any(a in values.axes for d in range(input.ndim) for a in input.layout.dim_axes(d))
    cuts = None if is_taken else cut_of_written_rows(input.shape[dim], (values,))
    if cuts is None or (not is_new and not _is_free_everywhere(input)):
        return
    tile = input.with_layout(input.layout.without_halo().replace_dim(dim, *cuts))
    input.__dict__.update(local=tile.local.clone(), layout=tile.layout)


def _is_free_everywhere(tile: Tile) -> bool:
    """Say whether no rank keeps the memory of a tile elsewhere, or kept it when a checkpointed call ran first.

    While a graph is made, each rank answers for itself: all trace the same calls, and no rank keeps what has no values.
    """
    if is_making_graph():
        return not _is_shared(tile)
    noted = _targets_of_frames.next_note()
    is_free = is_true_everywhere(tile.mesh, not _is_shared(tile)) if noted is None else noted
    _targets_of_frames.add(is_free)
    return is_free


def _is_shared(tile: Tile) -> bool:
    """Say whether another tensor or tile of this rank has the memory of a tile, and would keep its old values."""
    for _ in range(2):
        of_memory, of_tensor = memory_users(memory_id(tile.local.untyped_storage())), tensor_users(tile.local)
        if of_memory <= 2 and of_tensor <= 1 and sys.getrefcount(vars(tile)["local"]) <= 2:
            return False
        gc.collect()  # another tile may be part of an unreachable cycle
    return True


def along_one_dim(index: Tensor, dim: int) -> Any:
    """Return an index that is repeated along all dims but one as one of that dim; None for others."""
    index = real_view(index)
    if type(index) not in _PLAIN:
        return None
    if index.ndim == 1:
        return index
    if any(
        n == 0 or (n > 1 and step)
        for d, (n, step) in enumerate(zip(index.shape, index.stride(), strict=True))
        if d != dim
    ):
        return None
    with without_modes():
        for d in reversed(range(index.ndim)):
            index = index if d == dim else index.select(d, 0)
    return index
