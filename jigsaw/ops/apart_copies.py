"""Copies of rows that torch gives as a view: writes to them, or to their source.

A row that an int picks from a cut dim lies on one rank, so all get a copy of it.  A view whose rows had to move to
other cut points is a copy, too.  Such a copy knows its source, the rows that it was made of.  The rule for both is:

1. What is written to the copy is written to its source at once.
2. What is written to the source puts its copies out of date.  A copy that is out of date is made again when it is read,
   and costs nothing where nobody reads it.

A copy keeps no memory of its source alive: where nothing else holds that memory, there is nothing to write back.

Example: two ranks, 5 rows cut at 0, 3, 5, and ``tile[3].mul_(2)``.  Rank 1 has sent row 3 to rank 0, both double their
copies, and rank 1 writes its own back; each has the whole row, so nothing is sent.  The gradient of row 3 is the sum of
those of the two copies.

>>> tile = jigsaw.shard(torch.ones(5, 2), jigsaw.init_mesh(lat=1), ("lat", None))
>>> tile[3].zero_(); tile.sum().item()
Tile(shape (2,), torch.float32; cut: nowhere; at lat=0/1 owns [0:2])
8.0
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from jigsaw import comm
from jigsaw.comm.graph_calls import lacks_values
from jigsaw.comm.wire_values import lie_in_one_memory
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.meeting.common_cuts import APART_MARK, apart_mark, set_apart_mark, with_moved_rows
from jigsaw.ops.pointwise import changes_in_place, functions_named
from jigsaw.ops.whole_strides import repeated_dims
from jigsaw.tile.table import table
from jigsaw.tile.tensor_shell import note_change
from jigsaw.tile.tile import Tile, in_own_memory, tiles_in
from jigsaw.torch_internals.autograd import base_of_view

# number of functions that have changed a tile in place
_changes_made = [0]
_COPIES = "_jigsaw_copies"  # attribute of memory: the copies that were made of it
_Place = tuple[torch.Size, tuple[int, ...], Any]
_MoveRows = Callable[[Tile, Layout], Tile]


def _place_in_memory(x: Tensor) -> _Place:
    return x.shape, x.stride(), x.storage_offset()


def _at_place(root: Tensor, place: _Place) -> Tensor:
    return root if _place_in_memory(root) == place else root.as_strided(*place)


def _at_place_of_memory(memory: Any, place: _Place, dtype: torch.dtype, device: Any) -> Tensor:
    shape, strides, offset = place
    return torch.empty(0, dtype=dtype, device=device).set_(memory, offset, shape, strides)


_KINDS = attrgetter("dtype", "requires_grad"), Tensor.is_conj, Tensor.is_neg


class _WeakRows:
    """Rows of a tile, as long as something else keeps their memory."""

    def __init__(self, tile: Tile, is_in_storage: bool = False) -> None:
        local = tile.local
        root = local if base_of_view(local) is None else base_of_view(local)
        is_alike = all(of(root) == of(local) for of in _KINDS)
        # keep anything but a plain view of its base, and the rows of a copy that nothing else may hold (not within
        # the memory itself, which would then never be freed)
        is_kept = not is_alike or isinstance(apart_mark(local), ApartCopy)
        self.kept = tile if is_kept and not is_in_storage else None
        self.root, self.memory = weakref.ref(root), weakref.ref(local.untyped_storage())
        self.place, self.dtype = _place_in_memory(local), local.dtype
        self.layout, self.mesh = tile.layout, tile.mesh

    def tile(self) -> Tile | None:
        if self.kept is not None:
            return self.kept
        root, memory = self.root(), self.memory()
        if memory is None:
            return None
        if root is not None and root.dtype.is_complex and not self.dtype.is_complex:
            root = torch.view_as_real(root)
        if root is None or root.dtype != self.dtype:  # the memory belongs to a detached tensor, or its bytes are cast
            with torch.no_grad():
                local = _at_place_of_memory(memory, self.place, self.dtype, self.mesh.device_type)
        else:
            local = _at_place(root, self.place)
        return Tile(local, self.layout, self.mesh)


class ApartCopy:
    """Copy in `layout` of a source's rows, known by its memory; `move_rows` makes it again after a change."""

    def __init__(self, source: Tile, layout: Layout, local: Tensor, has_way_back: bool, move_rows: _MoveRows) -> None:
        self.source, self.layout, self.has_way_back = _WeakRows(source), layout, has_way_back
        self._move_rows = move_rows
        self.has_grad_mode = torch.is_grad_enabled()
        self.asked: tuple[Tile, Any] | None = None  # the tile that was indexed, and the index
        self.seen, self.is_written, self._is_writing = _changes_made[0], False, False
        self._tiles: dict[int, tuple[weakref.ref[Tile], _Place | None]] = {}  # the tiles that share its memory
        self._newer: Tile | None = None  # the source, if it was changed since
        self._take_memory(local)
        self._add_to(source)
        table.copies_made += 1
        if self.source.kept is not None:
            note_views(self.source.kept)

    def _add_to(self, source: Tile) -> None:
        memory = source.local.untyped_storage()
        copies = getattr(memory, _COPIES, None)
        if copies is None:
            setattr(memory, _COPIES, copies := weakref.WeakSet[ApartCopy]())
        copies.add(self)

    def _take_memory(self, local: Tensor) -> None:
        self.root = weakref.ref(local if base_of_view(local) is None else base_of_view(local))
        self.place, self.dtype = _place_in_memory(local), local.dtype
        set_apart_mark(local, self)

    def add_tile(self, tile: Tile) -> None:
        """Remember a tile that has the memory of the copy, or a part of it."""
        if "apart" not in tile.__dict__:
            tile.__dict__["apart"] = self
            self._tiles = {k: known for k, known in self._tiles.items() if known[0]() is not None}
            self._tiles[id(tile)] = weakref.ref(tile), None

    def whole_of(self, local: Tensor) -> tuple[Tensor, bool]:
        """Return the whole copy, for a view of it, and whether autograd knows that it is one."""
        root = self.root()
        if root is not None and (local is root or base_of_view(local) is root):
            return _at_place(root, self.place), True
        with torch.no_grad():
            return _at_place_of_memory(local.untyped_storage(), self.place, self.dtype, local.device), False

    def write_back(self, local: Tensor) -> None:
        """Write the copy into its source rows, through autograd where it tracks `local`.

        *Sends*: where rows had moved, these rows back, after one number that says whether any rank still has the
        source.
        """
        whole, is_known = self.whole_of(local)
        source, layout, mesh = self.source.tile(), self.source.layout, self.source.mesh
        is_at_hand, is_there = _is_at_hand(self.layout, layout), source is not None
        if not is_at_hand and not lacks_values():
            # ranks collect garbage at different times, so they ask each other
            counter = torch.tensor(int(is_there), device=local.device)
            is_there = bool(comm.all_reduce(counter, mesh, [name for name, _ in layout.axes]))
        if not is_there:
            return
        with torch.set_grad_enabled(is_known and torch.is_grad_enabled()):
            rows = Tile(whole, self.layout, mesh)
            rows = rows if is_at_hand else with_moved_rows(rows, layout)
            if source is not None:
                self._is_writing = True
                try:
                    source[...] = rows
                finally:
                    self._is_writing = False
        self.seen, self.is_written = _changes_made[0], True

    def put_out_of_date(self) -> None:
        """Mark the copy as out of date because its source was changed: the next reader of a tile of it makes
        it again.
        """
        tiles = [tile for known, _ in self._tiles.values() if (tile := known()) is not None]
        if self._is_writing or self._newer is not None or not tiles:
            return
        root = self.root()
        # copies of this copy; their sources are among its tiles
        for copy in [] if root is None else _copies_of(root.untyped_storage()):
            copy.put_out_of_date()
        self._newer = self.source.tile()
        for known, _ in list(self._tiles.values()):
            tile = known()
            if tile is not None:
                self._tiles[id(tile)] = known, _place_in_memory(tile.local)
                tile.__dict__["awaited"] = self._made_again
                del tile.__dict__["local"]

    def _made_again(self, asked: Tile) -> Tensor:
        """Return the local tensor of a tile of this copy, made again from its source, like all its other tiles.

        *Sends*: the rows that moved.
        """
        source, self._newer = self._newer, None
        assert source is not None
        with torch.set_grad_enabled(self.has_grad_mode):
            local = in_own_memory(self._move_rows(source, self.layout).local, source)
            if _place_in_memory(local) != self.place:
                laid = torch.empty_strided(*self.place[:2], dtype=local.dtype, device=local.device)
                local = laid.copy_(local)
            self._take_memory(local)
            self._add_to(source)
            for known, place in self._tiles.values():
                tile = known()
                if tile is not None and place is not None:
                    del tile.__dict__["awaited"]
                    tile.__dict__["local"] = _at_place(local, place)
        return asked.__dict__["local"]


class _RowsAround:
    """Rows that a rank holds from the other end of a periodic dim.

    Views leave them out, so that they are fetched anew where a view of the tile was changed; its memory keeps this.
    """

    def __init__(self, tile: Tile) -> None:
        self.source = _WeakRows(tile, is_in_storage=True)

    def put_out_of_date(self) -> None:
        """Fetch the rows.  *Sends*: the halo."""
        tile = self.source.tile()
        if tile is not None:
            tile.local.copy_(tile.owned().with_layout(tile.layout).local)


_AROUND = "_jigsaw_around"


def note_rows_around(tile: Tile) -> None:
    """Remember a tile of which a view was made that lacks the rows from the other end of a dim."""
    memory = tile.local.untyped_storage()
    if not hasattr(memory, _AROUND):
        setattr(memory, _AROUND, _RowsAround(tile))


@lru_cache(maxsize=4096)
def _is_at_hand(source: Layout, target: Layout) -> bool:
    """Say whether every rank holds in one layout what it holds in the other."""
    return all(
        low <= start and stop <= high
        for at in source.coords()
        for (low, high), (start, stop) in zip(source.held(at), target.held(at), strict=True)
        if start < stop
    )


def _copies_of(memory: Any) -> list[ApartCopy]:
    """Return the copies that were made of a memory."""
    return list(getattr(memory, _COPIES, ()))


def copied_to(source: Tile, layout: Layout, has_way_back: bool = True) -> Tile:
    """Return the rows of `source` in another layout of the same dims, in new memory that knows its origin.  Without a
    way back nothing may be written to it.

    *Sends*: what `with_moved_rows` does.
    """
    return copied_apart(with_moved_rows(source, layout), source, has_way_back)


def copied_apart(moved: Tile, source: Tile, has_way_back: bool = True, move_rows: _MoveRows = with_moved_rows) -> Tile:
    """Return `moved`, all the rows of `source` in another layout, in new memory that knows its origin.  `move_rows`
    moves them again after a change.

    Rows that lie in one place, as those of an expanded dim, do so in the new memory, too, where no axis cuts them.
    """
    repeated = repeated_dims(source)
    if repeated and not any(t.layout.is_cut(d) for t in (moved, source) for d in repeated):
        rows = copied_apart(
            _with_rows_once(moved, repeated), _with_rows_once(source, repeated), has_way_back, move_rows
        )
        tile = Tile(rows.local.expand(moved.local.shape), moved.layout, moved.mesh)
        apart_mark(rows.local).add_tile(tile)
        return tile
    has_way_back, local = has_way_back and not repeated, moved.local
    if lie_in_one_memory(local, source.local) or apart_mark(local) is not None:
        local = local.clone(memory_format=torch.contiguous_format)
    copy = ApartCopy(source, moved.layout, local, has_way_back, move_rows)
    tile = Tile(local, moved.layout, moved.mesh)
    copy.add_tile(tile)
    return tile


def _with_rows_once(tile: Tile, dims: Sequence[int]) -> Tile:
    local, layout = tile.local, tile.layout
    for d in dims:
        local, layout = local.narrow(d, 0, 1), layout.replace_dim(d, whole_dim(1))
    return Tile(local, layout, tile.mesh)


def note_views(out: Any, rows: Tensor | None = None) -> None:
    """Remember the results of a function that are views of a copy: that of `rows`, or by their memory."""
    for tile in (out,) if type(out) is Tile else tiles_in(out):
        # a view that autograd makes of a tile gets its local tensor only when that is first read; it has rows before
        local = tile.__dict__.get("local", tile.__dict__.get("_rows")) if rows is None else rows
        copy = None if local is None else apart_mark(local)
        if isinstance(copy, ApartCopy):
            copy.add_tile(tile)


table.note_views = note_views


def note_index_asked(answer: Any, tile: Tile, index: Any) -> None:
    """Remember the result of ``tile[index]``, for the row that Python writes back after ``tile[index] += 1``."""
    copy = apart_mark(answer.local) if isinstance(answer, Tile) else None
    if isinstance(copy, ApartCopy) and copy.asked is None:
        copy.asked = tile, index


def is_written_back(value: Any, tile: Tile, index: Any) -> bool:
    """Say whether ``tile[index] = value`` has been done, when `value` was changed in place."""
    copy = value.__dict__.get("apart") if isinstance(value, Tile) else None
    if copy is None or copy.asked is None or not copy.is_written or copy.seen != _changes_made[0]:
        return False
    return copy.asked[0] is tile and copy.asked[1] is index


def count_of_changes() -> int:
    """Return the number of functions that have changed a tile in place so far, the same on every rank."""
    return _changes_made[0]


# -- what changes a tile in place -------------------------------------------------------------------------------------

_WRITES_NOTHING = functions_named("requires_grad_ detach_ rename_ share_memory_")


@lru_cache(maxsize=4096)
def change_watcher(function: Any) -> Callable[..., Any] | None:
    """Return the check before a function that may change its first argument in place runs on tiles; None for others."""
    if changes_in_place(function) and function not in _WRITES_NOTHING:
        return _before_change
    code = getattr(function, "__code__", None)
    arguments = () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return partial(_before_flagged, arguments.index("inplace")) if "inplace" in arguments else None


table.find_watcher = change_watcher


def _before_flagged(place: int, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    flag = args[place] if place < len(args) else kwargs.get("inplace", False)
    return _before_change(function, args, kwargs) if flag else None


def _before_change(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[Any], Any] | None:
    """Prepare for a function that changes its first argument in place; return what to do after it, if anything.

    *Raises*: `ShardingError` for a view whose rows moved and do not know the way back, or lie in one place.
    """
    target: Any = args[0] if args else kwargs.get("input")
    _changes_made[0] += 1
    changed: list[Tensor] = []
    for tile in target if isinstance(target, (list, tuple)) else (target,):
        if isinstance(tile, Tile):
            if function is not Tensor.__setitem__:  # `__setitem__` itself checks the rows that its index names
                check_rows_apart(function, tile)
            # the version of the shell, by which a custom Function that saved it sees the change
            increment_version(tile)
            memory = tile.local.untyped_storage()
            note_change(memory)  # this finds changes through a view, too
            if hasattr(memory, APART_MARK):
                check_way_back(function, tile)
                changed.append(tile.local)
            elif hasattr(memory, _COPIES) or hasattr(memory, _AROUND):
                changed.append(tile.local)
    return partial(_after_change, changed) if changed else None


def check_way_back(function: Any, tile: Tile) -> None:
    """Check a view.  Raises: `ShardingError` for one with its own memory that does not know its source rows."""
    mark = apart_mark(tile.local)
    if mark is not None and not (isinstance(mark, ApartCopy) and mark.has_way_back):
        raise ShardingError(
            f"{function.__name__} of a Tile of shape {tuple(tile.shape)} in place: it is a view whose rows moved "
            "to other cut points, so what it is a view of would not change with it; use the function that makes a "
            "new one, as x + y, or clone() first"
        )


def check_rows_apart(function: Any, tile: Tile) -> None:
    """Check a target.  Raises: `ShardingError` where several of its rows lie in one place: torch would raise on the
    ranks alone that hold such rows.
    """
    repeated = repeated_dims(tile)
    if repeated:
        raise ShardingError(
            f"{function.__name__} of a Tile of shape {tuple(tile.shape)} in place: the rows of dim {repeated[0]} lie "
            "in one place in memory, as those that expand() makes; use the function that makes a new one, as x + y, or "
            "clone() first"
        )


def _after_change(changed: Sequence[Tensor], out: Any) -> Any:
    for local in changed:
        carry_change(local)
    return out


def carry_change(local: Tensor) -> None:
    """Carry a write to a tensor on to the rows that it is a copy of, and to copies of it."""
    copy = apart_mark(local)
    if isinstance(copy, ApartCopy):
        copy.write_back(local)
    memory = local.untyped_storage()
    rows_around = getattr(memory, _AROUND, None)
    if rows_around is not None and local.numel() == rows_around.source.place[0].numel():
        rows_around = None  # all rows of the source were changed, those around included
    for other in _copies_of(memory) if rows_around is None else [rows_around, *_copies_of(memory)]:
        other.put_out_of_date()
