"""Indexing of tiles: ``tile[...]``, ``tile[...] = value``, and the functions that pick, write or add rows by indices.

Ints, slices and None move only a picked row.  Index tensors and masks are whole on every rank (cut tiles become so).
Four ranks with 33 rows cut at 0, 9, 17, 25, 33, asked for the rows 30, 3, 12: rank 0 fills the second place of the
result, rank 1 the third, rank 3 the first; each has zeros elsewhere, and the sum over the four is the answer.  Told to
write at these rows, each writes the one that it owns, and nothing is sent.

>>> tile = jigsaw.shard(torch.zeros(2, 5), jigsaw.init_mesh(lat=1), (None, "lat"))
>>> tile[:, 1::2] = torch.tensor([1.0, 2.0])
>>> tile[0, [3, 1]].local
tensor([2., 1.])
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jigsaw import comm
from jigsaw.comm.graph_calls import lacks_values
from jigsaw.comm.wire_values import is_on_accelerator, lie_in_one_memory
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.apart_copies import carry_change, check_rows_apart, check_way_back, is_written_back, note_index_asked
from jigsaw.ops.changing_rows import changes_rows
from jigsaw.ops.kept_indices import pick_kept_rows, rows_for_owners, write_for_owners
from jigsaw.ops.meeting.local_cells import cells_at_rows, cells_in_front, dims_named_by, is_mask, rows_held
from jigsaw.ops.meeting.plain_operands import operand_part, plain_operand
from jigsaw.ops.picking import pick_from_plain
from jigsaw.ops.reductions import reduced_dims, sum_parts_over
from jigsaw.ops.shapes import select_dim, slice_dim, unsqueeze_tile
from jigsaw.ops.unknown_functions import run_alike, run_unknown_function
from jigsaw.ops.whole_strides import order_of_results, whole_strides, with_order
from jigsaw.tile.tile import Tile, implements_torch, refusal_error
from jigsaw.torch_internals.autograd import assert_on_device


def as_whole_tensor(value: Any) -> Any:
    """Return a tile as a plain tensor, other values unchanged.  *Sends*: the rows of a cut tile, to every rank."""
    return value.full_tensor() if isinstance(value, Tile) else value


# -- places -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TilePlaces:
    """Meaning of an index: `view` after its ints, slices and new dims, and the index tensor of each dim in `picked`.

    `dropped` are dims of `view`, of size 1, that an int made and that the answer lacks.
    """

    view: Tile
    picked: dict[int, Any]
    dropped: tuple[int, ...]

    @property
    def position(self) -> int:
        """Position of the dims of the index tensors in the result: in place of theirs, or in front where these are
        apart.
        """
        kept = [d for d in range(self.view.ndim) if d not in self.dropped]
        at = [kept.index(d) for d in self.picked]
        return at[0] if at == list(range(at[0], at[0] + len(at))) else 0


def _read_index(function: Any, tile: Tile, index: Any, drop: bool) -> TilePlaces:
    """Return the places that an index names.  With `drop` ints take their row; else `view` is a view of the tile."""
    items = list(index) if isinstance(index, tuple) or _lists_items(index) else [index]
    items = [i if type(i) in _SIMPLE else _as_item(i, tile) for i in items]
    items = _without_ellipsis(function, tile, items)
    dim, out, picked, dropped = 0, tile, dict[int, Any](), list[int]()
    for item in items:
        is_number = is_mask(item) and not item.ndim
        if item is None or is_number:  # `out` is a plain tensor if only one element was picked
            out = unsqueeze_tile(out, dim) if isinstance(out, Tile) else out.unsqueeze(dim)
        if item is None:
            dim += 1
        elif isinstance(item, slice):
            start, stop, step = item.indices(out.layout.shape[dim])
            if step < 1:
                raise ValueError("step must be greater than zero")
            out = slice_dim(out, dim, start, max(start, stop), step)
            dim += 1
        elif isinstance(item, (Tensor, Tile)):
            # a 0-d mask adds a dim, of one row if it is True, else of none
            for places in _places_of_tensor(item.reshape(1) if is_number else item, out, dim):
                picked[dim] = places
                dim += 1
        else:
            out, rows = _rows_named(out, dim, item)
            for row in rows:
                if drop:
                    out = select_dim(out, dim, row)
                else:
                    out = slice_dim(out, dim, row, row + 1)
                    dropped.append(dim)
                    dim += 1
    return TilePlaces(out, picked, tuple(dropped))


def _lists_items(index: Any) -> bool:
    """Say whether torch takes a list for a tuple: it has a slice, None, an ellipsis, or nested rows of places."""
    return isinstance(index, list) and any(type(i) in _NO_PLACES or hasattr(i, "__len__") for i in list[Any](index))


_NO_PLACES = frozenset((slice, type(None), type(...)))


def _without_ellipsis(function: Any, tile: Tile, items: list[Any]) -> list[Any]:
    if bool in map(type, items):
        raise refusal_error(
            function,
            tile,
            f"{next(i for i in items if isinstance(i, bool))!r} is a mask of no dims",
            "use None, which adds a dim",
        )
    named = sum([1 if type(i) in (slice, int) else dims_named_by(i) for i in items])
    dots = [k for k, i in enumerate(items) if i is Ellipsis]
    if len(dots) > 1:
        raise refusal_error(function, tile, "an index has one ellipsis, not several", "write the slices out")
    if named > tile.ndim:
        raise IndexError(f"too many indices ({named}) for a Tile of {tile.ndim} dims")
    return items if not dots else [*items[: dots[0]], *[slice(None)] * (tile.ndim - named), *items[dots[0] + 1 :]]


_SIMPLE = frozenset((slice, int, type(None), type(...)))


def _rows_named(tile: Tile, dim: int, row: int) -> tuple[Tile, tuple[int, ...]]:
    """Return the row that an int names, counted from 0.  A flattened dim splits again, so that no other row moves."""
    size = tile.shape[dim]
    if not -size <= row < size:
        raise IndexError(f"index {row} is out of range for dim {dim} of size {size}")
    cuts = tile.layout.dim(dim)
    if len(cuts) == 1:
        return tile, (row % size,)
    sizes = tuple([c.size for c in cuts])
    rows = tuple(int(i) for i in np.unravel_index(row % size, sizes))
    return tile.unflatten(dim, sizes), rows


def _as_item(item: Any, tile: Tile) -> Any:
    """Return an item of an index as None, an ellipsis, a slice, an int, a bool or a tensor."""
    if item is None or item is Ellipsis or isinstance(item, (slice, bool)):
        return item
    if isinstance(item, (list, range, tuple, np.ndarray)):
        entries: list[Any] = list(item)
        index = torch.as_tensor(entries, device=tile.device, dtype=None if entries else torch.int64)
    elif isinstance(item, (Tensor, Tile)):
        index = item
    else:
        return operator.index(item)
    if index.ndim == 0 and isinstance(index, Tensor) and index.dtype != torch.bool:
        return int(index.item())
    if index.dtype.is_floating_point or index.dtype.is_complex:
        raise IndexError(f"tensors used as indices must be integers or bools, got {index.dtype}")
    return index


def _places_of_tensor(item: Any, out: Tile, dim: int) -> Sequence[Any]:
    """Return an index tensor, or those of the places of a mask, one a dim."""
    if not is_mask(item):
        return (item,)
    if tuple(item.shape) != tuple(out.shape[dim : dim + item.ndim]):
        raise IndexError(
            f"the shape of the mask {tuple(item.shape)} at dim {dim} does not match the shape of the indexed Tile "
            f"{tuple(out.shape)}"
        )
    return as_whole_tensor(item).nonzero(as_tuple=True)


def _flat_places(picked: Mapping[int, Any], view: Tile) -> Any:
    """Return one row-major index over the picked dims, for the index tensors of each; a tile where one of them is."""
    flat: Any = None
    for d, index in picked.items():
        n, index = view.shape[d], index.long()  # a narrow integer of numpy may overflow in row + n
        if isinstance(index, Tensor) and index.numel():
            is_right = ((index >= -n) & (index < n)).all()
            if is_on_accelerator(index) or lacks_values():  # check on the device, so that the host does not wait
                assert_on_device(is_right)
            elif not is_right:
                raise IndexError(
                    f"an index of dim {d} is out of range: {n} rows, indices {index.min()} to {index.max()}"
                )
        rows = torch.where(index < 0, index + n, index)
        flat = rows if flat is None else flat * n + rows
    if isinstance(flat, Tile):
        flat = flat.owned()
        return flat if flat.layout.cut_dims else flat.local
    return flat


def _join_dims(index_dims: Sequence[Any], kept: Sequence[Any], at: int) -> list[Any]:
    return [*kept[:at], *index_dims, *kept[at:]]


# -- picking ----------------------------------------------------------------------------------------------------------


def pick_places(view: Tile, picked: Mapping[int, Any], position: int) -> Tile:
    """Return the elements at index tensors, which broadcast against each other, of the dims that `picked` names.

    *Shapes*: the dims of the index tensors stand at `position`; the others keep their cuts.
    *Sends*: of dims that nothing cuts nothing.  Else, for plain indices, one all-reduce of the result over the axes
    that cut the dims, and every rank has all that was picked; for cut tiles the rows of the tile along these axes,
    backward their gradient, and the result is cut as the indices are.  An index that stays as it is has a plan, by
    `jigsaw.ops.kept_indices`: only rows that are needed travel, and the result is cut.
    """
    if len(picked) == 1 and position in picked:
        kept = pick_kept_rows(view, position, picked[position])
        if kept is not None:
            return with_order(kept, None)
    x, dims = view.owned(), list(picked)
    flat = _flat_places(picked, x)
    kept = [d for d in range(x.ndim) if d not in dims]
    if isinstance(flat, Tile) and any(a in x.layout.dim_axes(d) for d in kept for a in flat.layout.cut_axes):
        flat = flat.full_tensor()  # an axis cannot cut two dims
    if isinstance(flat, Tile):
        for d in dims:
            x = x.with_layout(x.layout.replace_dim(d, *(c.uncut() for c in x.layout.dim(d))))
        local = comm.use_in_parts(x.local, x.mesh, [a for a in flat.layout.cut_axes if a not in x.layout.cut_axes])
        index_dims, places = flat.layout.dims(), flat.local
    else:
        local, places = x.local, flat
        index_dims = [(whole_dim(n),) for n in flat.shape]
    cells, cuts = cells_in_front(local, x, dims)
    rows, is_held = rows_held(places.reshape(-1), cuts, x)
    cells_picked = cells_at_rows(cells, rows, is_held)
    if any(x.layout.is_cut(d) for d in dims):
        wide = cells_picked.to(torch.uint8) if cells_picked.dtype == torch.bool else cells_picked
        cells_picked = sum_parts_over(wide, x, dims).to(cells_picked.dtype)
    cells_picked = cells_picked.reshape((*places.shape, *cells_picked.shape[1:]))
    order = _join_dims(range(places.ndim), range(places.ndim, cells_picked.ndim), position)
    layout = Layout.from_dims(_join_dims(index_dims, [x.layout.dim(d) for d in kept], position), x.layout.axes)
    return with_order(Tile(cells_picked.permute(order), layout, x.mesh), None)


@implements_torch(Tensor.__getitem__, either=("tile", "index"))
def _getitem(tile: Any, index: Any) -> Any:
    if not isinstance(tile, Tile):
        return pick_from_plain(Tensor.__getitem__, tile, index)
    places = _read_index(Tensor.__getitem__, tile, index, drop=True)
    note_index_asked(places.view, tile, index)
    view, picked = places.view, places.picked
    if not isinstance(view, Tile):
        return view[tuple(picked.get(d, slice(None)) for d in range(view.ndim))] if picked else view
    if not picked:
        return view
    out = pick_places(view, picked, places.position)
    return with_order(out, _order_of_picked(view, tuple(picked), places.position, out.ndim))


def _order_of_picked(view: Tile, picked: tuple[int, ...], position: int, ndim: int) -> tuple[int, ...]:
    """Return strides in the order of those of torch's result: the dims that stay are sorted as those of `view` are."""
    strides, shape = whole_strides(view), tuple(view.shape)
    kept = [d for d in range(view.ndim) if d not in picked]
    index_dims = range(ndim - len(kept))
    sizes = _join_dims([2 for _ in index_dims], [shape[d] for d in kept], position)
    rows = _join_dims([0 for _ in index_dims], [strides[d] for d in kept], position)
    places = _join_dims([1 << d for d in reversed(index_dims)], [0 for _ in kept], position)
    return order_of_results(tuple(sizes), ((tuple(sizes), tuple(rows)), (tuple(sizes), tuple(places))))


@implements_torch(torch.index_select, either=("input", "index"))
def _index_select(input: Any, dim: int, index: Any) -> Any:
    if index.ndim > 1 or index.dtype not in (torch.int32, torch.int64):
        raise RuntimeError(
            f"index_select(): the index must be 1-d integers, got {index.dtype} of shape {tuple(index.shape)}"
        )
    if not isinstance(input, Tile):
        if not input.ndim:
            raise ShardingError("index_select(): a number has no dim that a Tile could index; use the number itself")
        return pick_from_plain(torch.index_select, input, (slice(None),) * (dim % max(input.ndim, 1)) + (index,))
    (at,) = reduced_dims(input, dim)
    if not input.ndim:
        return run_alike(torch.index_select, (input, dim, as_whole_tensor(index)), {}, input)
    if isinstance(index, Tensor) and not (is_on_accelerator(index) or lacks_values()) and not (index >= 0).all():
        raise IndexError(
            f"index_select(): index {int(index.min())} is out of range for dim {at}, of {input.shape[at]} rows"
        )
    return pick_places(input, {at: index.reshape(-1)}, at)


@implements_torch(torch.masked_select, either=("input", "mask"))
def _masked_select(input: Any, mask: Any) -> Any:
    """Return the elements where a mask is true, in the order of the whole tensor; whole on every rank.

    *Sends*: a cut mask to every rank; one all-reduce of the result.
    """
    shape = torch.broadcast_shapes(tuple(input.shape), tuple(mask.shape))
    if not isinstance(input, Tile):
        if _is_cut(mask):
            why = "it picks from a plain tensor by a cut mask"
            raise refusal_error(torch.masked_select, mask, why, "use mask.full_tensor()")
        return torch.masked_select(input, as_whole_tensor(mask))
    return _getitem(input.expand(shape), as_whole_tensor(mask).expand(shape))


def _is_cut(value: Any) -> bool:
    return isinstance(value, Tile) and bool(value.layout.cut_dims)


# -- writing ----------------------------------------------------------------------------------------------------------


def write_places(function: Any, tile: Tile, places: TilePlaces, value: Any, accumulate: bool = False) -> None:
    """Do ``view[picked] = value`` (or ``+=``), in place.

    *Sends*: the rows of a tile `value` that are written here and lie elsewhere, and cut index tiles to every rank;
    backward their gradients.  Rows of a `view` that had to move go back.
    """
    view = places.view
    check_rows_apart(function, view)
    if lie_in_one_memory(view.local, tile.local):
        _write_into_view(tile, places, value, accumulate)
        return
    check_way_back(function, view)
    _write_into_view(tile, places, value, accumulate)
    carry_change(view.local)


def _write_into_view(tile: Tile, places: TilePlaces, value: Any, accumulate: bool) -> None:
    view, dropped = places.view, places.dropped
    kept = [d for d in range(view.ndim) if d not in dropped]
    if not places.picked:
        shape, layout = [view.shape[d] for d in kept], view.layout
        source = _shaped_value(value, shape, tile)
        if isinstance(source, (Tensor, Tile)):
            for d in reversed(dropped):
                after = view.ndim - d - 1
                source = source.unsqueeze(source.ndim - after) if source.ndim > after else source
            # the dim of one row that an int stands for is cut, but every rank that holds the row writes it
            part = operand_part(source, tile, layout).expand(view.local.shape)
            # after `tile[0] += 1` Python writes the row back, which is already changed in place
            strides = zip(part.shape, part.stride(), view.local.stride(), strict=True)
            if (
                not part.numel()
                # a value with a gradient must be written, as in `x.detach()[...] = x`
                or (part.requires_grad and not view.local.requires_grad)
                or not lie_in_one_memory(part, view.local)
                or part.storage_offset() != view.local.storage_offset()
                or any(n > 1 and a != b for n, a, b in strides)
            ):
                view.local.copy_(part)
        else:
            view.local.fill_(source)
        return
    # treat an int as one more index tensor, of one row
    picked = {**places.picked, **{d: torch.zeros((), dtype=torch.int64, device=tile.device) for d in dropped}}
    dims, position = list(picked), places.position
    flat = as_whole_tensor(_flat_places(picked, view))
    index_dims = [(whole_dim(n),) for n in flat.shape]
    rest = [view.layout.dim(d) for d in range(view.ndim) if d not in dims]
    layout = Layout.from_dims(_join_dims(index_dims, rest, position), view.layout.axes)
    # each rank writes to the rows that it holds, halo rows included
    cells, cuts = cells_in_front(view.local, view, dims)
    rows, is_held = rows_held(flat.reshape(-1), cuts, view)
    source = _shaped_value(value, layout.shape, tile)
    if not isinstance(source, (Tensor, Tile)):
        source = torch.tensor(source, dtype=tile.dtype, device=tile.device)
    part = operand_part(source, tile, layout).to(tile.dtype)
    local_shape = layout.local_shape(tile.coordinate)
    part = part.expand(local_shape)
    front = range(position, position + flat.ndim)
    part = part.permute([*front, *(d for d in range(part.ndim) if d not in front)])
    part = part.reshape(flat.numel(), *part.shape[flat.ndim :])
    if is_held is not None:
        held_places = is_held.nonzero()[:, 0]
        rows, part = [row[held_places] for row in rows], part[held_places]
    cells.index_put_(tuple(rows), part, accumulate)


def _shaped_value(value: Any, shape: Sequence[int], tile: Tile) -> Any:
    """Return the written value: a number, or a tensor or tile without dims of size 1 that the places lack."""
    if isinstance(value, (list, tuple)):
        value = torch.as_tensor(value, device=tile.device)
    if not isinstance(value, (Tensor, Tile)):
        return value
    while value.ndim > len(shape) and value.shape[0] == 1:
        value = value.squeeze(0)
    return value


@implements_torch(Tensor.__setitem__, either=("tile", "index", "value"))
def _setitem(tile: Any, index: Any, value: Any) -> None:
    if not (isinstance(tile, Tile) and is_written_back(value, tile, index)):
        _write_at_index(tile, index, value)


@changes_rows(Tensor.__setitem__)
def _write_at_index(tile: Any, index: Any, value: Any) -> None:
    """Do ``tile[index] = value``, in place: every name of the tile sees it, and autograd's own rules hold.

    *Sends*: the rows of a tile `value` that are written on another rank than they lie on; backward their gradients.
    Cut rows for an index tensor that does not stay as it is go to every rank.
    *Raises*: `ShardingError` for a value that does not broadcast, and where a halo would keep the old values.
    """
    items = index if isinstance(index, tuple) else (index,)
    masks = [k for k, i in enumerate(items) if is_mask(i)]
    is_one = not isinstance(value, (Tile, list, tuple)) and (not isinstance(value, Tensor) or value.ndim == 0)
    if (
        len(masks) == 1
        and is_one
        and all(i is Ellipsis or i == slice(None) for k, i in enumerate(items) if k not in masks)
    ):
        _fill_masked(tile, items, masks[0], value)
        return
    if isinstance(value, Tile) and _write_kept_rows(Tensor.__setitem__, tile, items, value):
        return
    write_places(Tensor.__setitem__, tile, _read_index(Tensor.__setitem__, tile, index, drop=False), value)


def _write_kept_rows(function: Any, tile: Tile, items: Sequence[Any], value: Tile, accumulate: bool = False) -> bool:
    """Do ``tile[:, index] = value``, in place, for a cut value whose rows an index that stays as it is writes.  Return
    False for others.

    *Sends*: each row to the owner of its place, as `write_for_owners` does.
    """
    if not any(isinstance(i, Tensor) for i in items):
        return False
    by_dim = _without_ellipsis(function, tile, [_as_item(i, tile) for i in items])
    dim = next((d for d, i in enumerate(by_dim) if isinstance(i, Tensor)), None)
    if dim is None or any(i != slice(None) for d, i in enumerate(by_dim) if d != dim):
        return False
    owners = None if by_dim[dim].ndim != 1 else rows_for_owners(tile, dim, by_dim[dim], value)
    if owners is None:
        return False
    check_rows_apart(function, tile)
    write_for_owners(owners, tile, dim, value, accumulate, Tensor.index_copy_)
    return True


def _fill_masked(tile: Tile, items: Sequence[Any], at: int, value: Any) -> None:
    """Do ``tile[:, mask] = number``, which does not need the number of places."""
    mask = items[at]
    others = [i for k, i in enumerate(items) if k != at]
    named = mask.ndim + sum(i is not Ellipsis for i in others)
    before = at if Ellipsis not in items[:at] else at - 1 + tile.ndim - named
    shape = tile.shape[before : before + mask.ndim]
    if tuple(mask.shape) != tuple(shape):
        raise IndexError(
            f"the shape of the mask {tuple(mask.shape)} at dim {before} does not match the Tile {tuple(tile.shape)}"
        )
    wide = mask.reshape((*mask.shape, *(1,) * (tile.ndim - before - mask.ndim)))
    value = plain_operand(value, tile, is_whole=True) if isinstance(value, Tensor) else value
    tile.local.masked_fill_(operand_part(wide, tile, tile.layout).bool(), value)


@implements_torch(Tensor.copy_, either=("input", "src"))
def _copy_in_place(input: Any, src: Any, non_blocking: bool = False) -> Any:
    if not isinstance(input, Tile):
        return run_unknown_function(Tensor.copy_, input, src, non_blocking)
    _setitem(input, (...,), src)
    return input


@implements_torch(Tensor.index_put_, torch.index_put_, either=("input", "indices", "values"))
@changes_rows(Tensor.index_put_)
def _index_put_in_place(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    index = tuple(slice(None) if i is None else i for i in indices)
    if isinstance(values, Tile) and _write_kept_rows(Tensor.index_put_, input, index, values, accumulate):
        return input
    places = _read_index(Tensor.index_put_, input, index, drop=False)
    write_places(Tensor.index_put_, input, places, values, accumulate)
    return input


@implements_torch(torch.index_put, either=("input", "indices", "values"))
def _index_put(input: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    if not isinstance(input, Tile):
        return run_unknown_function(torch.index_put, input, indices, values, accumulate)
    return _index_put_in_place(input.clone(), indices, values, accumulate)
