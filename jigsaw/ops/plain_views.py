"""One element of a tile: a plain tensor that is still a view of the tile.

An element has no dim that an axis could cut, so it leaves the tile: nets compare ``tile[0, 3]``, index with it, and
call ``backward()`` on it.  To torch it is a view: ``tile[0, 3].add_(5)`` changes the tile.  Every rank has a copy of
it, and plain functions would not report that they changed it.  So it is a tensor of a special class.
A graph of `jigsaw.compile` has no such changes: they are refused while it is made.

>>> tile = jigsaw.shard(torch.ones(2, 4), jigsaw.init_mesh(lat=1), (None, "lat"))
>>> _ = tile[0, 3].add_(5)
>>> tile.local[0]
tensor([1., 1., 1., 6.])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import MethodWrapperType
from typing import Any

import torch
from torch import Tensor

from jigsaw.comm.graph_calls import is_making_graph
from jigsaw.comm.wire_values import lie_in_one_memory
from jigsaw.errors import ShardingError
from jigsaw.geometry.layout import Layout
from jigsaw.ops.apart_copies import change_watcher, note_views
from jigsaw.ops.meeting.common_cuts import apart_mark
from jigsaw.tile.table import table
from jigsaw.tile.tile import Tile, leave_tile
from jigsaw.torch_internals.autograd import tensor_version


class PlainView(Tensor):
    """A plain tensor from a tile, where torch gives a view of one element: its changes in place are the tile's, too.

    Reads and computations use the plain tensor, the same on every rank, and have plain results.  Changes in place go to
    `rows`, the same element as a tile, which knows its base.  The element is read again where `rows` changed.
    """

    rows: Tile
    # the local tensor that was read, its version, and the plain tensor that was made of it
    _plain: tuple[Tensor, int, Tensor]

    @staticmethod
    def of_rows(rows: Tile, plain: Tensor | None = None) -> PlainView:
        """Return the view that stands for a tile which nothing cuts; `plain` left it already, if given."""
        local = rows.local
        plain = leave_tile(local, rows.mesh) if plain is None else plain
        view = plain.as_subclass(PlainView) if type(plain) is Tensor else _as_view_class(plain)
        vars(view).update(rows=rows, _plain=(local, tensor_version(local), plain))
        return view

    def as_plain(self) -> Tensor:
        """Return the ordinary tensor, with the values that the tile has now."""
        local, version, plain = self.__dict__["_plain"]
        rows = self.__dict__["rows"]
        if is_making_graph() and ("local" not in rows.__dict__ or tensor_version(rows.local) != version):
            raise ShardingError(
                "an element of a Tile is read after the tile was changed, in jigsaw.compile, whose graph has it "
                "as it was; read tile[0, 3] again, or take tile[0, 3].clone() before the change"
            )
        now = rows.local
        if now is not local or tensor_version(now) != version:
            plain = plain if plain is now else leave_tile(now, self.__dict__["rows"].mesh)
            vars(self).update(_plain=(now, tensor_version(now), plain))
        return plain

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        target: Any = args[0] if args else None
        others = _replace_views(tuple(args[1:]), cls.as_plain)
        named = _replace_views(kwargs, cls.as_plain) if kwargs else {}
        if "out" in named and _views_in(kwargs["out"] if kwargs else None):
            raise ShardingError(
                f"{getattr(func, '__name__', func)}(out=x), where x is an element of a Tile: the tile would not change "
                "with it; write x.copy_(result)"
            )
        changed = _views_in(target)
        if changed and func.__class__ is not MethodWrapperType and change_watcher(func) is not None:
            if is_making_graph():
                raise ShardingError(
                    f"{getattr(func, '__name__', func)} of an element of a Tile, in jigsaw.compile: the graph would "
                    "not change the tile with it; write tile[0, 3] = tile[0, 3] + 5 for tile[0, 3].add_(5) or +="
                )
            return _left_again(func(_replace_views(target, _rows_of), *others, **named), changed)
        plain = _replace_views(target, cls.as_plain)
        out = func(plain, *others, **named) if args else func(**named)
        if not isinstance(target, PlainView) or not _has_memory_of(out, plain):
            return out
        if out is plain:
            return target
        rows = _rows_of(target)
        views = func(rows.local, *others, **named)
        return tuple(_leave_view(rows, v) for v in views) if isinstance(views, tuple) else _leave_view(rows, views)


def _as_view_class(plain: Tensor) -> PlainView:
    """Return a plain view of a tensor without values (in a graph, or on paper), whose class cannot be left out."""
    view: Any = plain.view_as(plain)
    view.__class__ = _view_class(type(plain))
    return view


@lru_cache(maxsize=64)
def _view_class(kind: type[Tensor]) -> type[PlainView]:
    view_class: type[PlainView] = type(PlainView.__name__, (PlainView, kind), {})
    table.plain_readers[view_class] = PlainView.as_plain
    return view_class


def _rows_of(view: PlainView) -> Tile:
    return view.__dict__["rows"]


def _views_in(value: Any) -> list[PlainView]:
    return [x for x in (value if isinstance(value, (list, tuple)) else (value,)) if isinstance(x, PlainView)]


def _replace_views(value: Any, replace: Callable[[Any], Any]) -> Any:
    """Return the arguments of a function, with another value for each plain view among them."""
    if isinstance(value, PlainView):
        return replace(value)
    if type(value) in (list, tuple):
        return type(value)(_replace_views(v, replace) for v in value)
    return {k: _replace_views(v, replace) for k, v in value.items()} if type(value) is dict else value


def _left_again(out: Any, changed: Sequence[PlainView]) -> Any:
    """Return the plain views, where a function returned their tiles; else new plain values."""
    if isinstance(out, (list, tuple)):
        return type(out)(_left_again(o, changed) for o in out)
    if not isinstance(out, Tile):
        return out
    for view in changed:
        if lie_in_one_memory(out.local, _rows_of(view).local):
            return view
    return leave_tile(out.local, out.mesh)


def _has_memory_of(out: Any, plain: Tensor) -> bool:
    first = out[0] if isinstance(out, tuple) and out else out
    return isinstance(first, Tensor) and first.layout is torch.strided and lie_in_one_memory(first, plain)


def leave_as_view(local: Tensor, layout: Layout, tile: Tile) -> Tensor:
    """Return a plain tensor for one element of a tile, which all ranks have in `local`, and which torch gives as a
    view.
    """
    plain = leave_tile(local, tile.mesh)
    if plain is local and apart_mark(local) is None:
        return plain  # it shares the tile's memory
    rows = Tile(local, layout, tile.mesh)
    note_views(rows)
    return PlainView.of_rows(rows, plain)


def _leave_view(rows: Tile, local: Tensor) -> PlainView:
    """Return a view of the tile that a plain view stands for."""
    shape = tuple(local.shape)
    view = Tile(local, Layout.of(shape, (None,) * len(shape), rows.layout.axes), rows.mesh)
    note_views(view)
    return PlainView.of_rows(view)


table.plain_readers[PlainView] = PlainView.as_plain
