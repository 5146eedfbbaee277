"""Plain tensors beside tiles: how they enter, and what their gradients are.

A plain tensor is the whole one, on every rank.

>>> from jigsaw.ops.meeting.plain_operands import cut_whole_tensor
>>> tile = jigsaw.shard(torch.ones(2, 9), jigsaw.init_mesh(lat=1), (None, "lat"), halo={1: 1})
>>> cut_whole_tensor(torch.arange(9.0), tile).shape
torch.Size([9])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.comm.first_meetings import meet_tensor
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.meeting.common_cuts import with_moved_rows
from jigsaw.ranks.mesh import axes_of_mesh, mesh_size
from jigsaw.tile.misuse import warn_of_unreduced
from jigsaw.tile.table import table
from jigsaw.tile.tensor_shell import ENTER_NODE
from jigsaw.tile.tile import LEAVE_NODE, Tile
from jigsaw.torch_internals.autograd import result_metadata
from jigsaw.torch_internals.placements import axes_cutting_exit, axes_cutting_tensor, whole_of_dtensor

AVERAGED_MARK = "_jigsaw_averaged_over"
_SUMMED_MARK = "_jigsaw_entered_summed"
_PLAIN = (Tensor, nn.Parameter)


def averaged_over(leaf: Tensor) -> int:
    """Return over how many ranks a leaf's gradient is averaged (by `jigsaw.parallelize`); 1: its parts are summed."""
    return getattr(leaf, AVERAGED_MARK, 1)


def plain_operand(x: Tensor, tile: Tile, layout: Layout | None = None, is_whole: bool = False) -> Tensor:
    """Return a plain tensor as an operand of an op whose result has `layout` (by default that of `tile`), on the mesh
    of `tile`.  A parameter, and what `is_whole`, is compared at its first meeting; others may be a rank's own rows.

    Its gradient on each rank becomes this rank's part: the parts sum to the gradient over the whole mesh, even where
    the result is replicated.  Parts of a parameter that will be averaged over n ranks are n times as large, so that
    their mean is the gradient.  A plain tensor that was computed from a tile (a global statistic) has a whole gradient
    instead, for which the parts are summed.

    A parameter that axes cut takes its own piece of the gradient, so that must be complete along them. It is where `x`
    is made of that piece. Where DTensor made it whole, as in ``weight[:6]`` or by ``full_tensor``, parts are summed.

    *Sends*: nothing for parameters; backward one all-reduce for a tensor that came out of a tile. For one that DTensor
    made whole, also along the axes that cut the parameter.
    *Raises*: `ShardingError` for a tensor made of both a global statistic and a parameter whose parts are summed.
    """
    x = x if type(x) in _PLAIN else whole_of_dtensor(x)
    if (is_whole or type(x) is nn.Parameter) and mesh_size(tile.mesh) > 1 and not hasattr(x, AVERAGED_MARK):
        meet_tensor(x, tile.mesh)  # tensors that `parallelize` marked are known to be the same on all ranks
    if not (x.requires_grad and torch.is_grad_enabled()) or mesh_size(tile.mesh) == 1:
        return x
    mesh, layout = tile.mesh, layout or tile.layout
    left, leaves = (False, [x]) if x.grad_fn is None else graph_origins(x)
    cuts = [{} if type(leaf) in _PLAIN else axes_cutting_tensor(leaf) for leaf in leaves]
    joined = _axes_joined_by_dtensor(x, cuts, mesh) if any(cuts) else {}
    ranks = _ranks_of_means(leaves, cuts, joined, left)
    if joined and not left:
        x = comm.use_in_parts(x, mesh, tuple(joined))
    if left and ranks <= {mesh.size()}:
        # tensors that left a tile, and averaged parameters, get the whole gradient on every rank
        return comm.use_in_parts(x, mesh, layout.cut_axes)
    if left or len(ranks) > 1:
        raise ShardingError(
            f"a plain tensor of shape {tuple(x.shape)} was computed from a parameter and from a tensor that left a "
            "Tile, or from leaves that are summed and leaves that are averaged over the ranks; its gradient would be "
            "counted wrongly; pass the model through jigsaw.parallelize, or keep the reduction a Tile (keepdim=True) "
            "and multiply there"
        )
    for leaf in leaves:
        if not hasattr(leaf, AVERAGED_MARK) and not isinstance(leaf, nn.Parameter):
            setattr(leaf, _SUMMED_MARK, True)
    if layout.cut_axes:
        for leaf in leaves:
            if isinstance(leaf, nn.Parameter) and not hasattr(leaf, AVERAGED_MARK):
                warn_of_unreduced(leaf)
    scale = max(ranks, default=1) / layout.replicas
    return x if scale == 1 else comm.enter_mean(x, scale)


def _ranks_of_means(
    leaves: Sequence[Tensor], cuts: Sequence[Mapping[str, int]], joined: Mapping[str, int], left: bool
) -> set[float]:
    """Return over how many ranks the gradients of leaves are averaged, as parts of them that are to be made."""
    if joined and left and all(axes.keys() <= joined.keys() for axes in cuts):
        # each rank gets the whole gradient, of which a cut leaf takes its piece: a mean over the ranks that have it
        return {averaged_over(leaf) * math.prod(axes.values()) for leaf, axes in zip(leaves, cuts, strict=True)}
    if joined and not left:
        # a sum along these axes is on each of their ranks, and another leaf's mean over them is to be one of it
        repeats = [math.prod(n for name, n in joined.items() if name not in axes) for axes in cuts]
        return {averaged_over(leaf) / n for leaf, n in zip(leaves, repeats, strict=True)}
    ranks = {averaged_over(leaf) for leaf in leaves}
    return set(_average_others(leaves, max(ranks)) if len(ranks) == 2 and 1 in ranks else ranks)


def _axes_joined_by_dtensor(x: Tensor, cuts: Sequence[Mapping[str, int]], mesh: DeviceMesh) -> dict[str, int]:
    """Return those of the axes that cut the parameters behind `x` along which DTensor made it whole."""
    exits = [axes for node in _nodes_behind(x) if (axes := axes_cutting_exit(node)) is not None] if x.grad_fn else []
    joined = [{a: n for axes in cuts for a, n in axes.items() if a not in exit_axes} for exit_axes in exits]
    if any(axes != joined[0] for axes in joined):
        raise ShardingError(
            f"a plain tensor of shape {tuple(x.shape)} was computed from a cut weight's own piece and from a whole "
            "one; make all weights whole first, by full_tensor()"
        )
    unknown = [name for name in (joined[0] if joined else ()) if name not in dict(axes_of_mesh(mesh))]
    if unknown:
        raise ShardingError(
            f"a tensor of shape {tuple(x.shape)} was made of a weight that is cut over {unknown[0]!r}, ranks along "
            "several axes at once (shard_weights=): use a weight within the forward pass of its unit, where it is "
            "whole, or name that module in parallelize(units=...)"
        )
    return joined[0] if joined else {}


def _average_others(leaves: Sequence[Tensor], ranks: int) -> set[int]:
    """Scale the gradients of leaves that a model makes beside its parameters by `ranks`, too, and back where they
    arrive; return over how many ranks each leaf is averaged.  Such leaves are zeros that require grad, as in decoders
    of DETR.  One that entered by itself before, and a parameter that is not averaged, stay unchanged.
    """
    for leaf in leaves:
        if not (hasattr(leaf, AVERAGED_MARK) or hasattr(leaf, _SUMMED_MARK) or isinstance(leaf, nn.Parameter)):
            setattr(leaf, AVERAGED_MARK, ranks)
            leaf.register_hook(partial(torch.mul, other=1 / ranks))
    return {averaged_over(leaf) for leaf in leaves}


def _enter_function(x: Tensor, tile: Tile) -> Tensor:
    """Return a plain tensor that a custom ``autograd.Function`` took beside tiles: its gradient is whole."""
    return plain_operand(x, tile, Layout((), tile.layout.axes))


table.enter_function = _enter_function


def averaged_operand(x: Tensor, tile: Tile) -> Tensor:
    """Return a plain tensor for a use that gives it another gradient on each rank, of which the mean is the whole one.

    *Sends*: backward one all-reduce.
    """
    ranks = mesh_size(tile.mesh)
    if ranks == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    alike = comm.enter_mean(_enter_function(x, tile), 1 / ranks)
    return comm.use_in_parts(alike, tile.mesh, [name for name, _ in tile.layout.axes])


def graph_origins(x: Tensor) -> tuple[bool, list[Tensor]]:
    """Return whether the graph of `x` reaches a tensor that left a tile, and the leaves that it reaches otherwise."""
    left, leaves = False, list[Tensor]()
    for node in _nodes_behind(x):
        if node.name() == LEAVE_NODE:
            left = True
        elif hasattr(node, "variable"):
            leaves.append(node.variable)
    return left, leaves


def _nodes_behind(x: Tensor) -> Iterator[Any]:
    """Iterate over the nodes of the graph of a plain tensor, as far as leaves and tensors that left a tile."""
    seen: set[Any] = set()
    todo: list[Any] = [x.grad_fn]
    while todo:
        node = todo.pop()
        # stop at a tile that only went through the same module hooks: the plain tensor was not computed from it
        if node is None or node in seen or node.name() == ENTER_NODE:
            continue
        seen.add(node)
        yield node
        # while a graph is made, a leaf has further nodes
        if node.name() != LEAVE_NODE and not hasattr(node, "variable"):
            todo.extend(next_node for next_node, _ in node.next_functions)


_repeat_listeners: list[Callable[[str, int], None]] = []


def cut_whole_tensor(x: Tensor, tile: Tile, layout: Layout | None = None) -> Tensor:
    """Return a plain whole tensor, broadcast against `layout` from the right, cut to the box that this rank holds.

    *Raises*: `ShardingError` when a dim is neither 1 nor the global size.
    """
    layout = layout or tile.layout
    if x.layout != torch.strided:
        raise ShardingError(f"a tensor of layout {x.layout} cannot meet a Tile: use to_dense(), or tile.full_tensor()")
    part = cut_entered_tensor(plain_operand(x, tile, layout, is_whole=True), tile, layout)
    if _repeat_listeners:
        tell_of_repeats(x, part)
    return part


def cut_entered_tensor(x: Tensor, tile: Tile, layout: Layout) -> Tensor:
    """Do `cut_whole_tensor` for a result of `plain_operand`, or a tensor made from one."""
    if is_taken_whole(x, layout):
        return x
    lead = layout.ndim - x.ndim
    if lead < 0 or any(n not in (1, layout.shape[lead + d]) for d, n in enumerate(x.shape)):
        raise ShardingError(
            f"a plain tensor of shape {tuple(x.shape)} does not broadcast to the Tile's global shape {layout.shape}; "
            f"plain tensors are whole: pass the whole tensor, or make a Tile of local parts with jigsaw.from_local"
        )
    for d in range(x.ndim):
        cuts = layout.dim(lead + d)
        if x.shape[d] == layout.shape[lead + d] and any(c.is_cut or c.has_halo for c in cuts):
            x = _take_held_rows(x, d, cuts, tile, layout)
    return x


def operand_part(value: Any, tile: Tile, layout: Layout) -> Tensor:
    """Return this rank's part of `value` (a whole plain tensor or a tile), which broadcasts to `layout`, for its own
    part of `tile`.

    *Sends*: the rows of a tile that this rank lacks; backward their gradients, added over the ranks that used a row.
    *Raises*: `ShardingError` where it does not broadcast.
    """
    lead = layout.ndim - value.ndim
    fits = lead >= 0 and all(n in (1, layout.shape[lead + d]) for d, n in enumerate(value.shape))
    if not fits:
        raise ShardingError(
            f"values of shape {tuple(value.shape)} do not broadcast to the places, of shape {layout.shape}, that they "
            "are written to; plain tensors are whole"
        )
    if isinstance(value, Tile):
        dims = [layout.dim(lead + d) if n != 1 else (whole_dim(1),) for d, n in enumerate(value.shape)]
        target = Layout.from_dims(dims, layout.axes)
        # False for tokens flattened from 8/lat x 6/lon that are written to a dim of 48 that was never flattened
        is_flattened_alike = value.layout.groups == target.groups
        moved = value.with_layout(target) if is_flattened_alike else with_moved_rows(value, target)
        return comm.use_in_parts(
            moved.local, tile.mesh, [a for a in tile.layout.cut_axes if a not in moved.layout.cut_axes]
        )
    return cut_entered_tensor(plain_operand(value, tile), tile, layout)


def is_taken_whole(x: Tensor, layout: Layout) -> bool:
    """Say whether a plain tensor meets tiles of `layout` without making them larger, and each rank needs all of it."""
    return x.layout == torch.strided and _has_whole_dims(x.shape, layout)


@lru_cache(maxsize=4096)
def _has_whole_dims(shape: tuple[int, ...], layout: Layout) -> bool:
    lead = layout.ndim - len(shape)
    sizes = layout.shape[max(lead, 0) :]
    if lead < 0 or any(n not in (1, size) for n, size in zip(shape, sizes, strict=True)):
        return False
    whole = layout.complete_dims[lead:]
    return all(n != size or is_whole for n, size, is_whole in zip(shape, sizes, whole, strict=True))


def _take_held_rows(x: Tensor, dim: int, cuts: Sequence[Cut], tile: Tile, layout: Layout) -> Tensor:
    coord = tile.coordinate
    sizes = [c.size for c in cuts]
    x = x.unflatten(dim, sizes) if len(sizes) > 1 else x
    for k, cut in enumerate(cuts):
        start, stop = cut.held[layout.piece(cut, coord)]
        if start < 0 or stop > cut.size:
            rows = torch.arange(start, stop, device=x.device)
            # beyond an end that does not wrap, repeat the plain tensor's last row
            x = x.index_select(dim + k, rows % cut.size if cut.wraps else rows.clamp(0, cut.size - 1))
        else:
            x = x.narrow(dim + k, start, stop - start)
    return x.flatten(dim, dim + len(sizes) - 1) if len(sizes) > 1 else x


# -- what every rank has computed for nothing -------------------------------------------------------------------------

_PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "linear", "convolution")
_BYTES_TO_TELL_OF = 1 << 20


@contextmanager
def hearing_repeats(listener: Callable[[str, int], None]) -> Generator[None]:
    """Report to `listener`, within the block, plain tensors that every rank makes whole by a product, to take its own
    rows of them.  It gets the product, and the bytes of the others' rows.
    """
    _repeat_listeners.append(listener)
    try:
        yield
    finally:
        _repeat_listeners.remove(listener)


def tell_of_repeats(whole: Tensor, part: Tensor) -> None:
    """Report to the listener a plain tensor of which this rank has taken a part."""
    unused = (whole.numel() - part.numel()) * whole.itemsize if _repeat_listeners else 0
    product = _product_behind(whole) if unused >= _BYTES_TO_TELL_OF else None
    if product is not None:
        for listener in _repeat_listeners:
            listener(product, unused)


def _product_behind(x: Tensor) -> str | None:
    """Return the product of plain tensors, as large as `x`, that it was made of.  Weights, and tensors made of them
    element by element or by lookup, need none.
    """
    for node in _nodes_behind(x):
        name = node.name().partition("Backward")[0].lower()
        if name in _PRODUCTS and math.prod(result_metadata(node)[0].shape) >= x.numel():
            return name
    return None
