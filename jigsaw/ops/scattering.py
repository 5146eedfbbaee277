"""Rows and elements gathered from, and scattered to, places that an index names along one dim.

The dim may be cut: each rank takes what the index finds in its own rows, or writes what the index sends there.

>>> tile = jigsaw.shard(torch.zeros(5), jigsaw.init_mesh(lat=1), ("lat",))
>>> torch.index_add(tile, 0, torch.tensor([1, 3, 3]), torch.ones(3)).local
tensor([0., 1., 0., 2., 0.])
>>> tile.scatter(0, torch.tensor([4]), 7.0).gather(0, torch.tensor([4, 4])).local
tensor([7., 7.])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from jigsaw import comm
from jigsaw.comm.graph_calls import lacks_values
from jigsaw.comm.wire_values import is_on_accelerator
from jigsaw.geometry.cut import whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.changing_rows import changes_rows, holds_beyond
from jigsaw.ops.indexing import TilePlaces, as_whole_tensor, pick_places, write_places
from jigsaw.ops.kept_indices import along_one_dim, pick_kept_rows, rows_for_owners, write_for_owners
from jigsaw.ops.meeting.local_cells import rows_held
from jigsaw.ops.meeting.plain_operands import operand_part
from jigsaw.ops.picking import pick_from_plain
from jigsaw.ops.reductions import reduced_dims, sum_parts_over
from jigsaw.ops.shapes import slice_dim
from jigsaw.ops.unknown_functions import run_alike, run_unknown_function
from jigsaw.ops.whole_strides import with_strides_of
from jigsaw.tile.tile import Tile, implements_torch


def _own_places(places: Tensor, tile: Tile, dim: int) -> tuple[Tensor, Tensor]:
    """Return the local row of each place along a dim, and whether this rank holds it."""
    cuts = tile.layout.dim(dim)
    rows, is_held = rows_held(places, cuts, tile)
    row = rows[0]
    for cut, along in zip(cuts[1:], rows[1:], strict=True):
        start, stop = cut.held[tile.layout.piece(cut, tile.coordinate)]
        row = row * (stop - start) + along
    return row, torch.ones_like(places, dtype=torch.bool) if is_held is None else is_held


def _is_local(tile: Tile, dim: int) -> bool:
    """Say whether every rank holds all rows of a dim, once."""
    return not tile.layout.is_cut(dim) and not any(c.has_halo for c in tile.layout.dim(dim))


def _check_range(function: Any, index: Any, size: int) -> None:
    """Check an index.  Raises: on every rank, for one out of range; torch checks only a rank's own rows."""
    can_look = isinstance(index, Tensor) and index.numel() and not (is_on_accelerator(index) or lacks_values())
    if can_look and not ((index >= 0) & (index < size)).all():
        raise IndexError(f"{function.__name__}: an index is out of range for a dim of size {size}")


def _new_target(tile: Tile, memory_format: torch.memory_format = torch.contiguous_format) -> Tile:
    """Return a new tile to write into, without a halo that could not be written alike."""
    return (tile.owned() if holds_beyond(tile.layout) else tile).clone(memory_format=memory_format)


# -- whole rows -------------------------------------------------------------------------------------------------------


def _write_rows(
    function: Any, input: Tile, dim: int, index: Any, source: Any, is_new: bool = False, **named: Any
) -> Tile:
    """Write, add or fill the rows that a 1-d index names, in place.

    *Sends*: along a kept index (`jigsaw.ops.kept_indices`), each row of a tile `source` to the owner of its target row.
    Else its rows along `dim`, to every rank along the axes that cut it.  Backward their gradient.
    """
    (at,) = reduced_dims(input, dim)
    if not input.ndim:  # a number is a row of one element, to torch
        _write_rows(function, input.reshape(1), dim, index, source, is_new, **named)
        return input
    index = as_whole_tensor(index).reshape(-1)
    size = input.layout.shape[at]
    index = torch.where(index < 0, index + size, index) if function is Tensor.index_fill_ else index
    _check_range(function, index, size)
    owners = None if function is Tensor.index_fill_ else rows_for_owners(input, at, index, source, is_new)
    if owners is not None and source.shape[at] == len(index):
        write, is_sum = partial(function, **named), function is Tensor.index_add_
        return write_for_owners(owners, input, at, source, is_sum, write, named.get("alpha", 1))
    rows, places_held = index, None
    if not _is_local(input, at):
        rows, held = _own_places(index, input, at)
        places_held = held.nonzero()[:, 0]
        rows = rows[places_held]
    if not isinstance(source, (Tensor, Tile)) or source.ndim == 0:
        function(input.local, at, rows, source, **named)
        return input
    layout = input.layout.replace_dim(at, whole_dim(len(index)))
    if tuple(source.shape) != layout.shape:
        raise RuntimeError(f"{function.__name__}: values of shape {tuple(source.shape)} for places of {layout.shape}")
    part = operand_part(source, input, layout)
    part = part if places_held is None else part.index_select(at, places_held)
    if not input.local.numel():
        # torch refuses some empty tensors, on this rank alone; its part stays in the graph, because others wait for it
        input.local.add_(part.sum(dtype=input.dtype))
        return input
    function(input.local, at, rows, part.to(input.dtype), **named)
    return input


def _answer_rows(name: str, memory_format: torch.memory_format = torch.contiguous_format) -> None:
    in_place = getattr(Tensor, f"{name}_")

    @changes_rows(in_place)
    def change(
        input: Any, dim: int, index: Any, source: Any = None, *args: Any, value: Any = None, **named: Any
    ) -> Any:
        source = value if source is None else source
        if args:
            named["reduce"] = args[0]
        if name == "index_reduce" and "reduce" not in named:
            raise TypeError("index_reduce(): reduce= is missing; pass 'prod', 'mean', 'amax' or 'amin'")
        return _write_rows(in_place, input, dim, index, source, **named)

    def make(input: Any, dim: int, index: Any, source: Any = None, *args: Any, value: Any = None, **named: Any) -> Any:
        source = value if source is None else source
        if not isinstance(input, Tile):
            return run_unknown_function(getattr(torch, name), input, dim, index, source, *args, **named)
        return change(_new_target(input, memory_format), dim, index, source, *args, is_new=True, **named)

    implements_torch(in_place, either=("input", "index", "source", "value"))(change)
    implements_torch(getattr(torch, name), either=("input", "index", "source", "value"))(make)


for _name in ("index_add", "index_copy", "index_reduce"):
    _answer_rows(_name)
_answer_rows("index_fill", torch.preserve_format)  # the result has the memory order of its input, as in torch


# -- elements ---------------------------------------------------------------------------------------------------------


def _narrowed(tile: Tile, dim: int, index: Any) -> Tile:
    """Return the tile as far as an index of equally many dims reaches along the others."""
    if index.ndim != tile.ndim:
        raise RuntimeError(f"index of {index.ndim} dims and a Tile of {tile.ndim}: they must have as many")
    for d in range(tile.ndim):
        if d != dim and index.shape[d] != tile.shape[d]:
            if index.shape[d] > tile.shape[d]:
                raise RuntimeError(
                    f"index of shape {tuple(index.shape)} is larger than the Tile, {tuple(tile.shape)}, apart from "
                    f"dim {dim}"
                )
            tile = slice_dim(tile, d, 0, index.shape[d])
    return tile


@implements_torch(torch.gather, either=("input", "index"))
def gather_elements(input: Any, dim: int, index: Any, *, sparse_grad: bool = False) -> Any:
    """Return y[i, j] = input[index[i, j], j], for ``dim=0``.

    *Shapes*: those of `index`; the other dims are cut as the input's are.
    *Sends*: where nothing cuts `dim`, the rows of a tile `index` that lie elsewhere.  Else, for an index that stays as
    it is, what `jigsaw.ops.kept_indices` says.  For others that are whole along `dim`, one all-reduce of the result;
    for a cut one the input's rows along `dim`, backward their gradient.
    """
    if input.ndim == 0 and index.ndim == 1:  # a number is a row of one element, to torch
        input = input.reshape(1)
    if not isinstance(input, Tile):
        return _gather_from_plain(input, dim, index)
    if not input.ndim:
        return run_alike(torch.gather, (input, dim, as_whole_tensor(index)), {}, input)
    (at,) = reduced_dims(input, dim)
    if _are_alike_but(input.shape, index.shape, at):
        kept = pick_kept_rows(input, at, along_one_dim(index, at), may_be_negative=False)
        if kept is not None:
            return kept
    _check_range(torch.gather, index, input.layout.shape[at])
    x = _narrowed(input.owned(), at, index)
    axes = {a for d in range(x.ndim) if d != at for a in x.layout.dim_axes(d)}
    along = (whole_dim(index.shape[at]),)
    if isinstance(index, Tile) and index.layout.is_cut(at) and not axes.intersection(index.layout.dim_axes(at)):
        along = index.owned().layout.dim(at)
        x = x.with_layout(x.layout.replace_dim(at, *(c.uncut() for c in x.layout.dim(at))))
    layout = x.layout.replace_dim(at, *along)
    local = comm.use_in_parts(x.local, x.mesh, [a for a in layout.cut_axes if a not in x.layout.cut_axes])
    places = operand_part(index, x, layout).expand(layout.local_shape(x.coordinate))
    if not x.layout.is_cut(at):
        return Tile(local.gather(at, places), layout, x.mesh)
    rows, is_held = _own_places(places, x, at)
    if local.shape[at]:
        picked = local.gather(at, rows % local.shape[at])
    else:  # a rank without rows adds zeros, and takes part in the backward messages
        picked = local.sum(at, keepdim=True).to(local.dtype).expand(places.shape)
    wide = picked.to(torch.uint8) if picked.dtype == torch.bool else picked
    summed = sum_parts_over(torch.where(is_held, wide, torch.zeros((), dtype=wide.dtype, device=wide.device)), x, (at,))
    return Tile(summed.to(picked.dtype), layout, x.mesh)


def _gather_from_plain(input: Tensor, dim: int, index: Tile) -> Any:
    if not index.layout.cut_dims:
        return run_unknown_function(torch.gather, input, dim, index)
    at = dim % max(input.ndim, 1)
    whole = Layout.of(input.shape, (None,) * input.ndim, index.layout.axes)
    x = _narrowed(Tile(input, whole, index.mesh), at, index)
    # the plain tensor is whole on every rank; along the other dims it is cut like the index
    dims = [whole.dim(d) if d == at else index.owned().layout.dim(d) for d in range(input.ndim)]
    part = operand_part(x.local, index, Layout.from_dims(dims, index.layout.axes))
    return Tile(part.gather(at, index.owned().local), index.owned().layout, index.mesh)


@implements_torch(torch.take_along_dim, either=("input", "indices"))
def _take_along_dim(input: Any, indices: Any, dim: int | None = None) -> Any:
    if dim is None:
        return torch.take(input, indices.reshape(-1))
    at = dim % max(input.ndim, 1)
    other = [1 if d == at else n for d, n in enumerate(input.shape)]
    shape = torch.broadcast_shapes(torch.Size(1 if d == at else n for d, n in enumerate(indices.shape)), other)
    wide = indices.expand([indices.shape[d] if d == at else n for d, n in enumerate(shape)])
    from_shape = [input.shape[d] if d == at else n for d, n in enumerate(shape)]
    # negative indices count from the end, as in torch
    return torch.gather(input.expand(from_shape), at, wide.remainder(input.shape[at]))


def _are_alike_but(shape: Sequence[int], other: Sequence[int], dim: int) -> bool:
    return len(shape) == len(other) and all(
        n == m for d, (n, m) in enumerate(zip(shape, other, strict=True)) if d != dim
    )


Scatter = Callable[[Tensor, int, Tensor, Any], Any]


def _scatter_elements(
    function: Any, input: Tile, dim: int, index: Any, source: Any, write: Scatter, is_sum: bool, is_new: bool
) -> Tile:
    """Set x[index[i, j], j] = source[i, j], or combine them otherwise, in place, for ``dim=0``.

    *Sends*: as `_write_rows` for an index that stays as it is, and is repeated along all dims but one.  Else index and
    source tiles that lie elsewhere, along `dim` to every rank that cuts it; backward the gradient of the source.
    """
    (at,) = reduced_dims(input, dim)
    if not input.ndim:
        values = source.reshape(-1) if isinstance(source, (Tensor, Tile)) else source
        _scatter_elements(function, input.reshape(1), dim, index.reshape(-1), values, write, is_sum, is_new)
        return input
    if isinstance(source, Tile) and _are_alike_but(input.shape, index.shape, at) and source.shape == index.shape:
        owners = rows_for_owners(input, at, index, source, is_new)
        if owners is not None:

            def write_rows(x: Tensor, dim: int, rows: Tensor, values: Tensor) -> None:
                write(x, dim, rows.view([-1 if d == dim else 1 for d in range(x.ndim)]).expand_as(values), values)

            return write_for_owners(owners, input, at, source, is_sum, write_rows)
    _check_range(function, index, input.layout.shape[at])
    view = _narrowed(input, at, index)
    layout = view.layout.replace_dim(at, whole_dim(index.shape[at]))
    places = operand_part(index, view, layout).expand(layout.local_shape(view.coordinate))
    if isinstance(source, (Tensor, Tile)) and source.ndim:
        for d, n in enumerate(index.shape):
            source = source.narrow(d, 0, n) if source.shape[d] != n else source
        source = operand_part(source, input, layout).to(input.dtype).expand(places.shape)
    if _is_local(view, at):
        write(view.local, at, places, source)
        return input
    # values for rows of other ranks go to an extra row, which is dropped
    count = view.local.shape[at]
    rows, is_held = _own_places(places, view, at)
    rows = torch.where(is_held, rows, count)
    one = [1 if d == at else n for d, n in enumerate(view.local.shape)]
    longer = torch.cat([view.local, view.local.new_zeros(one)], at)
    write(longer, at, rows, source)
    view.local.copy_(longer.narrow(at, 0, count))
    return input


def _answer_scatter(name: str, takes_reduce: bool) -> None:
    in_place = getattr(Tensor, f"{name}_")

    @changes_rows(in_place)
    def change(
        input: Any,
        dim: int,
        index: Any,
        src: Any = None,
        *args: Any,
        value: Any = None,
        is_new: bool = False,
        **named: Any,
    ) -> Any:
        source = value if src is None else src
        if args and takes_reduce:
            named["reduce"], args = args[0], args[1:]

        def write(x: Tensor, at: int, places: Tensor, values: Any) -> None:
            in_place(x, at, places, values, **{k: v for k, v in named.items() if v is not None})

        reduce = named.get("reduce")
        is_sum = (
            name == "scatter_add" if reduce is None else reduce in ("sum", "add") and named.get("include_self", True)
        )
        return _scatter_elements(in_place, input, dim, index, source, write, is_sum, is_new)

    def make(input: Any, dim: int, index: Any, src: Any = None, *args: Any, value: Any = None, **named: Any) -> Any:
        source = value if src is None else src
        if not isinstance(input, Tile):
            return run_unknown_function(getattr(torch, name), input, dim, index, source, *args, **named)
        return change(_new_target(input), dim, index, source, *args, is_new=True, **named)

    implements_torch(in_place, either=("input", "index", "src", "value"))(change)
    implements_torch(getattr(torch, name), either=("input", "index", "src", "value"))(make)


_answer_scatter("scatter", True)
_answer_scatter("scatter_add", False)
_answer_scatter("scatter_reduce", True)


# -- rows and boxes written into a copy -------------------------------------------------------------------------------


@implements_torch(torch.select_scatter, either=("input", "src"))
def _select_scatter(input: Any, src: Any, dim: int, index: int) -> Any:
    return _written(torch.select_scatter, input, src, dim, index)


@implements_torch(torch.slice_scatter, either=("input", "src"))
def _slice_scatter(
    input: Any, src: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    return _written(torch.slice_scatter, input, src, dim, slice(start, end, step))


def _written(function: Any, input: Any, src: Any, dim: int, item: Any) -> Any:
    if not isinstance(input, Tile):
        out: Any = input.clone()
        out[_along(input.ndim, dim, item)] = src
        return out
    out = with_strides_of(_new_target(input, torch.preserve_format), input)
    out[_along(input.ndim, reduced_dims(input, dim)[0], item)] = src
    return out


def _along(ndim: int, dim: int, item: Any) -> Sequence[Any]:
    return (*(slice(None),) * (dim % max(ndim, 1)), item)


# -- values written where a mask is true ------------------------------------------------------------------------------


@implements_torch(Tensor.masked_scatter_, either=("input", "mask", "source"))
@changes_rows(Tensor.masked_scatter_)
def _masked_scatter_in_place(input: Any, mask: Any, source: Any) -> Any:
    """Write a source where a mask is true.  *Sends*: a cut mask and a cut source to every rank."""
    if isinstance(input, Tile) and not input.ndim:
        _masked_scatter_in_place(input.reshape(1), mask, source)
        return input
    places = as_whole_tensor(mask).expand(tuple(input.shape)).nonzero(as_tuple=True)
    count = len(places[0]) if places else 1
    if source.numel() < count:
        raise RuntimeError(f"masked_scatter_(): {count} places, but {source.numel()} values")
    whole = source
    if isinstance(source, Tile):
        whole = source.with_layout(Layout.of(source.shape, (None,) * source.ndim, source.layout.axes))
    values = whole.reshape(-1)[:count]
    write_places(Tensor.masked_scatter_, input, TilePlaces(input, dict(enumerate(places)), ()), values)
    return input


@implements_torch(torch.masked_scatter, either=("input", "mask", "source"))
def _masked_scatter(input: Any, mask: Any, source: Any) -> Any:
    if not isinstance(input, Tile):
        return run_unknown_function(torch.masked_scatter, input, mask, source)
    shape = torch.broadcast_shapes(tuple(input.shape), tuple(mask.shape))
    return _masked_scatter_in_place(_new_target(input.expand(shape)), mask, source)


@implements_torch(Tensor.masked_fill_, either=("input", "mask", "value"))
@changes_rows(Tensor.masked_fill_)
def _masked_fill_in_place(input: Any, mask: Any, value: Any) -> Any:
    number = operand_part(value, input, input.layout) if isinstance(value, (Tensor, Tile)) else value
    input.local.masked_fill_(operand_part(mask, input, input.layout), number)
    return input


# -- places in the flattened tensor -----------------------------------------------------------------------------------


@implements_torch(torch.take, either=("input", "index"))
def _take(input: Any, index: Any) -> Any:
    if not isinstance(input, Tile):
        return pick_from_plain(torch.take, input.reshape(-1), index)
    input = input if input.ndim else input.reshape(1)  # a number is a row of one element, to torch
    return pick_places(input, _unravelled(index, input), 0)


def _unravelled(index: Any, tile: Tile) -> dict[int, Any]:
    """Return positions in the flattened tensor as an index of each dim."""
    rest, by_dim = torch.where(index < 0, index + tile.numel(), index), dict[int, Any]()
    for d in reversed(range(tile.ndim)):
        # the first dim takes the rest, so that a position out of range is out of range in that dim
        by_dim[d] = rest % tile.shape[d] if d else torch.where(rest < 0, tile.shape[0], rest)
        rest = torch.div(rest, max(tile.shape[d], 1), rounding_mode="floor")
    return dict(sorted(by_dim.items()))


@implements_torch(Tensor.put_, either=("input", "index", "source"))
@changes_rows(Tensor.put_)
def _put_in_place(input: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    if index.numel() != source.numel():
        raise RuntimeError(f"put_(): {index.numel()} places and {source.numel()} values, which must be as many")
    if isinstance(input, Tile) and not input.ndim:
        _put_in_place(input.reshape(1), index, source, accumulate)
        return input
    places = TilePlaces(input, _unravelled(as_whole_tensor(index).reshape(-1), input), ())
    write_places(Tensor.put_, input, places, source.reshape(-1), accumulate)
    return input


@implements_torch(torch.put, either=("input", "index", "source"))
def _put(input: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    if not isinstance(input, Tile):
        return run_unknown_function(torch.put, input, index, source, accumulate)
    return _put_in_place(input.clone(), index, source, accumulate)
