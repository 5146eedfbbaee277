"""Rows that torch gives as a view and a tile as a copy: what is written to them in place.

A row that an int picks of a cut dim lies on one rank, so that all get a copy of it.  The copy knows the rows that it
was made of, and a function that changes it in place changes these too: each rank has the whole row, and writes what it
owns, so that nothing is sent.  ``tile[:, 3] += 1`` has then been done when Python writes the row back.

A view whose rows had to move to other cut points (``mark_rows_moved``) does not know the way back, and is refused as
the target of whatever changes it in place.

Two ranks, 5 rows cut at 0, 3, 5, and ``tile[3].mul_(2)``: rank 1 has sent row 3 to rank 0, both double their copies,
and rank 1 writes its own back.  The gradient of row 3 is the sum of what the two ranks made of their copies.

>>> tile = jigsaw.shard(torch.ones(5, 2), jigsaw.init_mesh(lat=1), ("lat", None))
>>> tile[3].zero_(); tile.sum().item()
Tile(shape (2,), torch.float32; cut: nowhere; at lat=0/1 owns [0:2])
8.0
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jigsaw.cut import ShardingError
from jigsaw.layout import Layout
from jigsaw.ops.meeting import apart_mark, set_apart_mark
from jigsaw.ops.pointwise import changes_in_place
from jigsaw.tile import Tile, lie_in_one_memory, watches_changes

# How many functions have changed a tile in place: alike on every rank, for all of them call the same functions.  A
# copy that has seen fewer may be out of date.
_changes_made = [0]


@dataclass(eq=False)
class ApartCopy:
    """A copy in `layout` of the rows of `source`, whose shape it has; `asked`: the tile and the index that it
    answers.
    """

    source: Tile
    layout: Layout
    root: weakref.ref[Tensor]  # not the tensor itself, which has the storage that this stands in
    dtype: torch.dtype
    seen: int = field(default_factory=lambda: _changes_made[0])
    is_written: bool = False
    asked: tuple[Tile, Any] | None = None

    def whole_of(self, local: Tensor) -> tuple[Tensor, bool]:
        """The whole copy, for a view of it, and whether autograd knows that it is one."""
        shape = self.layout.local_shape(self.source.coordinate)
        root = self.root()
        if root is not None and (local is root or local._base is root):
            return root.view(shape), True
        strides = [math.prod(shape[d + 1 :]) for d in range(len(shape))]
        with torch.no_grad():
            bare = torch.empty(0, dtype=self.dtype, device=local.device)
            return bare.set_(local.untyped_storage(), 0, shape, strides), False

    def bring_up_to_date(self, local: Tensor) -> None:
        """Take what was written to the source since; *Sends*: the rows, where anything was changed in place at all."""
        if self.seen == _changes_made[0]:
            return
        above = apart_mark(self.source.local)
        if isinstance(above, ApartCopy):
            above.bring_up_to_date(self.source.local)
        whole, is_known = self.whole_of(local)
        with torch.set_grad_enabled(is_known and (self.source.requires_grad or torch.is_grad_enabled())):
            whole.copy_(self.source.with_layout(self.layout).local)
        self.seen = _changes_made[0]

    def write_back(self, local: Tensor) -> None:
        """Write the copy into the rows that it was made of, by autograd's eyes where they see `local`."""
        whole, is_known = self.whole_of(local)
        with torch.set_grad_enabled(is_known and torch.is_grad_enabled()):
            self.source[...] = Tile(whole, self.layout, self.source.mesh)
        self.seen, self.is_written = _changes_made[0], True


def copied_apart(moved: Tile, source: Tile) -> Tile:
    """`moved`, all the rows of `source` in another layout, in memory of its own that knows where it came from; where
    no axis has ceased to cut it, it is a view already.
    """
    if moved.layout.cut_axes == source.layout.cut_axes:
        return moved
    local = moved.local
    root = local if local._base is None else local._base
    shared = lie_in_one_memory(root, source.local)
    if shared or root.numel() != local.numel() or not root.is_contiguous() or root.storage_offset():
        local = root = local.clone(memory_format=torch.contiguous_format)
    set_apart_mark(local, ApartCopy(source, moved.layout, weakref.ref(root), local.dtype))
    return Tile(local, moved.layout, moved.mesh)


def note_index_asked(answer: Any, tile: Tile, index: Any) -> None:
    """Remember what ``tile[index]`` gave, for the row that Python writes back after ``tile[index] += 1``."""
    copy = apart_mark(answer.local) if isinstance(answer, Tile) else None
    if isinstance(copy, ApartCopy) and copy.asked is None:
        copy.asked = tile, index


def is_written_back(value: Any, tile: Tile, index: Any) -> bool:
    """Whether ``tile[index] = value`` has been done, when `value` was changed in place."""
    copy = apart_mark(value.local) if isinstance(value, Tile) else None
    if not isinstance(copy, ApartCopy) or copy.asked is None or not copy.is_written or copy.seen != _changes_made[0]:
        return False
    return copy.asked[0] is tile and copy.asked[1] is index


# -- what changes a tile in place -------------------------------------------------------------------------------------

_WRITES_NOTHING = frozenset("requires_grad_ detach_ rename_ share_memory_".split())


@watches_changes
def _find_watcher(function: Any) -> Callable[..., Any] | None:
    name = getattr(function, "__name__", "")
    if changes_in_place(function) and name not in _WRITES_NOTHING:
        return _before_change
    code = getattr(function, "__code__", None)
    arguments = () if code is None else code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return partial(_before_flagged, arguments.index("inplace")) if "inplace" in arguments else None


def _before_flagged(place: int, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    flag = args[place] if place < len(args) else kwargs.get("inplace", False)
    return _before_change(function, args, kwargs) if flag else None


def _before_change(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Callable[[Any], Any]:
    """What is done before a function changes its first argument in place; it returns what is done after.

    *Raises*: `ShardingError` for a view whose rows moved.
    """
    target: Any = args[0] if args else kwargs.get("input")
    copies: list[tuple[ApartCopy, Tensor]] = []
    for tile in target if isinstance(target, (list, tuple)) else (target,):
        mark = apart_mark(tile.local) if isinstance(tile, Tile) else None
        if isinstance(mark, ApartCopy):
            mark.bring_up_to_date(tile.local)
            copies.append((mark, tile.local))
        elif mark is not None:
            raise ShardingError(
                f"{function.__name__} of a Tile of shape {tuple(tile.shape)} in place: it is a view whose rows moved "
                "to other cut points, so what it is a view of would not change with it; use the function that makes a "
                "new one, as x + y, or clone() first"
            )
    return partial(_after_change, copies)


def _after_change(copies: Sequence[tuple[ApartCopy, Tensor]], out: Any) -> Any:
    _changes_made[0] += 1
    for copy, local in copies:
        copy.write_back(local)
    return out
