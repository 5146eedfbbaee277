"""Functions of all pairs of rows, or of vectors along a dim: kron, meshgrid, cartesian_prod, block_diag, cdist, pdist,
bilinear, cosine_similarity, pairwise_distance, cross, renorm.

Of two operands that one axis cuts along dims that meet crosswise, the later one is made whole along its dim.

>>> tile = jigsaw.shard(torch.tensor([[3.0, 4.0]]), jigsaw.init_mesh(lat=1), ("lat", None))
>>> torch.cdist(tile, torch.zeros(1, 2)).local, torch.nn.functional.cosine_similarity(tile, tile).local
(tensor([[5.]]), tensor([1.]))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw import comm
from jigsaw.geometry.cut import whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.apart_copies import copied_apart, note_views
from jigsaw.ops.joining import join_tiles
from jigsaw.ops.meeting.common_cuts import with_moved_rows
from jigsaw.ops.meeting.plain_operands import cut_whole_tensor
from jigsaw.ops.pointwise import align_tiles, held_by_all
from jigsaw.ops.reductions import reduced_dims, vector_norm
from jigsaw.ops.whole_dims import check_by_torch, with_whole_dims
from jigsaw.ops.whole_strides import whole_strides, with_order, with_strides
from jigsaw.tile.tile import Tile, implements_torch
from jigsaw.torch_internals.autograd import cpp_meshgrid

# -- crosswise --------------------------------------------------------------------------------------------------------


def _without_axes(tile: Tile, dim: int, taken: Sequence[str]) -> Tile:
    """Return the tile, held whole along `dim` where one of the axes `taken` cuts it.

    *Sends*: then its rows to the ranks along the axes of `dim`; backward nothing.
    """
    if not set(taken) & set(tile.layout.dim_axes(dim)):
        return tile
    own = tile.owned()
    whole = own.with_layout(own.layout.replace_dim(dim, *(c.uncut() for c in own.layout.dim(dim))))
    return Tile(whole.local, whole.layout.replace_dim(dim, whole_dim(tile.shape[dim])), tile.mesh)


def _without_crossing_axes(operands: Sequence[Any]) -> list[Any]:
    """Return operands of equally many dims of which no axis cuts two different ones; earlier ones keep their cuts."""
    used: dict[str, int] = {}
    ready: list[Any] = []
    for x in operands:
        if isinstance(x, Tile):
            for d in range(x.ndim):
                x = _without_axes(x, d, [a for a, at in used.items() if at != d])
            used.update({a: d for d in range(x.ndim) for a in x.layout.dim_axes(d)})
        ready.append(x)
    return ready


def _meet_locally(operands: Sequence[Any]) -> tuple[Layout, list[Tensor], Tile]:
    """Return the layout of a broadcast of operands of equally many dims, their local tensors, and a tile of them."""
    operands = _without_crossing_axes(operands)
    tiles = [x for x in operands if isinstance(x, Tile)]
    longer = [d for d in range(tiles[0].ndim) if any(not isinstance(x, Tile) and x.shape[d] != 1 for x in operands)]
    held = [held_by_all(t.owned(), [d for d in longer if t.shape[d] == 1]) for t in tiles]
    layout, locals_ = align_tiles(held)
    for x in operands:
        for d in range(layout.ndim):
            if not isinstance(x, Tile) and layout.shape[d] == 1 and x.shape[d] != 1:
                layout = layout.replace_dim(d, whole_dim(x.shape[d]))
    ready = iter(locals_)
    operands_here = [next(ready) if isinstance(x, Tile) else cut_whole_tensor(x, tiles[0], layout) for x in operands]
    return layout, operands_here, tiles[0]


@implements_torch(torch.kron, either=("input", "other"))
def _kron(input: Any, other: Any) -> Any:
    """Return every element of `input` times `other`, in blocks; *Sends*: nothing, where no axis cuts both."""
    ndim = max(input.ndim, other.ndim)
    first, second = (x.reshape((1,) * (ndim - x.ndim) + tuple(x.shape)) for x in (input, other))
    for d in range(ndim):
        first, second = first.unsqueeze(2 * d + 1), second.unsqueeze(2 * d)
    layout, (a, b), tile = _meet_locally([first, second])
    sizes = [n * m for n, m in zip(layout.shape[::2], layout.shape[1::2], strict=True)]
    return Tile(a * b, layout, tile.mesh).reshape(sizes)


def _given_tensors(tensors: Sequence[Any]) -> list[Any]:
    return list(tensors[0]) if len(tensors) == 1 and isinstance(tensors[0], (list, tuple)) else list(tensors)


# called with a list, torch dispatches only in the function of C++
@implements_torch(torch.meshgrid, cpp_meshgrid)
def _meshgrid(*tensors: Any, indexing: Any = None) -> tuple[Any, ...]:
    """Return each 1-d tensor along a separate dim, repeated along those of the others; cut as the tensors are.

    Where another tensor's dim is cut, a grid follows its tensor (`copied_apart`), and a write to it is refused: an
    element lies on some ranks, and its row on all.
    """
    vectors = _given_tensors(tensors)
    if indexing not in (None, "ij", "xy") or any(t.ndim > 1 for t in vectors):
        raise RuntimeError(
            f"meshgrid of shapes {[tuple(t.shape) for t in vectors]}, indexing={indexing!r}: pass 1-d tensors, "
            "and 'ij' or 'xy'"
        )
    count = len(vectors)
    wide = [t.reshape([-1 if d == i else 1 for d in range(count)]) for i, t in enumerate(vectors)]
    layout, ready, tile = _meet_locally(wide)
    grids = [_grid_along(d, x, rows, layout, tile) for d, (x, rows) in enumerate(zip(wide, ready, strict=True))]
    return tuple(g.transpose(0, 1) if indexing == "xy" and count > 1 else g for g in grids)


def _grid_along(dim: int, x: Any, rows: Tensor, layout: Layout, tile: Tile) -> Tile:
    """Return `x`, which has one row but along `dim`, in the shape of `layout`; `rows` are those of this rank."""
    once = Layout.from_dims([c if d == dim else (whole_dim(1),) for d, c in enumerate(layout.dims())], layout.axes)
    if isinstance(x, Tile):
        if not any(d != dim and layout.is_cut(d) for d in range(layout.ndim)) and x.layout.dim(dim) == layout.dim(dim):
            return x.expand(layout.shape)
        axes = tuple(a for a in layout.cut_axes if a not in once.cut_axes)
        rows = copied_apart(Tile(rows, once, x.mesh), x, False, partial(_rows_in_parts, axes)).local
    strides = tuple(n if d == dim else 0 for d, n in enumerate(whole_strides(x) if isinstance(x, Tile) else x.stride()))
    grid = with_strides(Tile(rows.expand(layout.local_shape(tile.coordinate)), layout, tile.mesh), strides, x)
    note_views(grid)
    return grid


def _rows_in_parts(axes: Sequence[str], source: Tile, layout: Layout) -> Tile:
    """Return the rows of a grid again, each of them used in parts over the axes that cut the other dims."""
    moved = with_moved_rows(source, layout)
    return Tile(comm.use_in_parts(moved.local, moved.mesh, axes), layout, moved.mesh)


@implements_torch(torch.cartesian_prod)
def _cartesian_prod(*tensors: Any) -> Any:
    vectors = _given_tensors(tensors)
    if len(vectors) == 1:
        return vectors[0]
    return torch.stack([g.flatten() for g in _meshgrid(*vectors)], -1)


@implements_torch(torch.block_diag)
def _block_diag(*tensors: Any) -> Any:
    """Return a matrix of matrices along its diagonal; the rows of each lie as in a join, the columns are whole.

    *Sends*: what makes columns whole, and what a join of the rows sends.
    """
    matrices = [t.reshape((1,) * (2 - t.ndim) + tuple(t.shape)) for t in tensors]
    total, before, rows = sum(t.shape[1] for t in matrices), 0, list[Any]()
    for t in matrices:
        x = with_whole_dims(t, (1,)) if isinstance(t, Tile) else t
        like = x.local if isinstance(x, Tile) else x
        sides = (before, total - before - t.shape[1])
        left, right = (like.new_zeros((1, n)).expand(t.shape[0], n) for n in sides)
        rows.append(join_tiles([left, x, right], 1) if isinstance(x, Tile) else torch.cat([left, x, right], 1))
        before += t.shape[1]
    return join_tiles(rows, 0)


@implements_torch(torch.cdist, either=("x1", "x2"))
def _cdist(x1: Any, x2: Any, p: float = 2.0, compute_mode: str | None = None) -> Any:
    """Return the distance of every row of `x1` to every row of `x2`.

    *Shapes*: [..., P, M] and [..., R, M] to [..., P, R]; P and R keep their cuts, M is brought whole.
    *Sends*: where one axis cuts P and R, the rows of `x2` to every rank along it.
    """
    if x1.ndim < 2 or x2.ndim < 2 or x1.shape[-1] != x2.shape[-1]:
        raise RuntimeError(f"cdist of shapes {tuple(x1.shape)} and {tuple(x2.shape)}: [..., P, M] and [..., R, M]")
    ndim = max(x1.ndim, x2.ndim)
    first, second = (x.reshape((1,) * (ndim - x.ndim) + tuple(x.shape)) for x in (x1, x2))
    first, second = (with_whole_dims(x, (ndim - 1,)) if isinstance(x, Tile) else x for x in (first, second))
    layout, (a, b), tile = _meet_locally([first.unsqueeze(-2), second.unsqueeze(-3)])
    a, b = _without_row(a, -2), _without_row(b, -3)
    local = torch.cdist(a, b, p, compute_mode or "use_mm_for_euclid_dist_if_necessary")
    return Tile(local, layout.drop((-1,)), tile.mesh)


@implements_torch(F.pdist, torch.pdist, either=("input",))
def _pdist(input: Any, p: float = 2.0) -> Any:
    """Return the distances of each row to those after it, whole on every rank, as rows picked by indices are."""
    if input.ndim != 2:
        raise RuntimeError(f"pdist of shape {tuple(input.shape)}: it takes 2 dims")
    first, second = torch.triu_indices(len(input), len(input), 1, device=input.device)
    return _cdist(input, input, p, "donot_use_mm_for_euclid_dist")[first, second]


@implements_torch(F.bilinear, either=("input1", "input2", "weight", "bias"))
def _bilinear(input1: Any, input2: Any, weight: Any, bias: Any = None) -> Any:
    """Return y[k] = x1 W[k] x2 + b[k], along the last dims."""
    if input1.shape[:-1] != input2.shape[:-1] or (input1.shape[-1], input2.shape[-1]) != tuple(weight.shape[1:]):
        shapes = [tuple(x.shape) for x in (input1, input2, weight)]
        raise RuntimeError(f"bilinear of shapes {shapes}: pass [..., i], [..., j] and [k, i, j]")
    kinds = {input1.dtype, input2.dtype, weight.dtype}
    if len(kinds) > 1 and not torch.is_autocast_enabled(weight.device.type):
        raise RuntimeError(f"bilinear of {' and '.join(sorted(map(str, kinds)))}: all operands must have one dtype")
    out = torch.einsum("...i,kij,...j->...k", input1, weight, input2)
    return out if bias is None else out + bias


def _without_row(x: Tensor, dim: int) -> Tensor:
    """Return the tensor without a dim of one row, even where another rank has the row."""
    return x.squeeze(dim) if x.shape[dim] == 1 else x.sum(dim)


# -- vectors along a dim ----------------------------------------------------------------------------------------------


@implements_torch(F.cosine_similarity, either=("x1", "x2"))
def _cosine_similarity(x1: Any, x2: Any, dim: int = 1, eps: float = 1e-8) -> Any:
    """Return <x1, x2> / (|x1| |x2|) along `dim` of their broadcast.

    *Sends*: along a cut dim, an all-gather and an all-reduce of the results.
    """
    shape = torch.broadcast_shapes(x1.shape, x2.shape)
    if not shape:
        return _cosine_similarity(x1.reshape(1), x2.reshape(1), dim, eps)
    # numbers count in the promotion, because torch expands them to tensors first
    dtype = torch.promote_types(x1.dtype, x2.dtype)
    x1, x2 = (x if x.dtype.is_floating_point else x.to(dtype) for x in (x1, x2))
    x1, x2 = (x.reshape((1,) * (len(shape) - x.ndim) + tuple(x.shape)) for x in (x1, x2))
    first, second = (_lengths_along(x, dim, shape, eps) for x in (x1, x2))
    return (x1 / first * (x2 / second)).sum(dim)


def _lengths_along(x: Any, dim: int, shape: Sequence[int], eps: float) -> Any:
    """Return |x| along `dim` of x broadcast to `shape`: one row counts as often as it is repeated."""
    lengths = torch.linalg.vector_norm(x, 2, dim, True)
    if x.shape[dim] != shape[dim]:
        lengths = lengths * math.sqrt(shape[dim])
    # clamped at eps, with the gradient of the unclamped value
    return lengths + (lengths.clamp_min(eps) - lengths).detach()


@implements_torch(F.pairwise_distance, either=("x1", "x2"))
def _pairwise_distance(x1: Any, x2: Any, p: float = 2.0, eps: float = 1e-6, keepdim: bool = False) -> Any:
    return vector_norm(x1 - x2 + eps, p, -1, keepdim)


@implements_torch(torch.dist, either=("input", "other"))
def _dist(input: Any, other: Any, p: float = 2) -> Any:
    return vector_norm(input - other, p)


@implements_torch(torch.linalg.vecdot, either=("x", "y"))
def _vecdot(x: Any, y: Any, *, dim: int = -1) -> Any:
    return (x.conj() * y if x.dtype.is_complex else x * y).sum(dim)


@implements_torch(torch.linalg.cross, either=("input", "other"))
def _cross_along(input: Any, other: Any, *, dim: int = -1) -> Any:
    """Return the cross product of vectors of 3 along `dim`, which is whole in the result."""
    ndim = max(input.ndim, other.ndim)
    if input.ndim != other.ndim or input.shape[dim] != 3 or other.shape[dim] != 3:
        raise RuntimeError(
            f"cross of shapes {tuple(input.shape)} and {tuple(other.shape)}: both need as many dims, and 3 rows along "
            f"dim {dim}"
        )
    at = dim % ndim
    ready = [with_whole_dims(x, (at,)) if isinstance(x, Tile) and x.layout.is_cut(at) else x for x in (input, other)]
    if all(isinstance(x, Tile) for x in ready) and ready[0].layout.cut_axes != ready[1].layout.cut_axes:
        ready = [input, other]
        ready = [_without_axes(x, at, x.layout.dim_axes(at)) if isinstance(x, Tile) else x for x in ready]
    layout, (a, b), tile = _meet_locally(ready)
    out = Tile(torch.linalg.cross(a, b, dim=at), layout, tile.mesh)
    like = next(x for x in (input, other) if isinstance(x, Tile))
    home = like.layout.without_halo()
    return out.with_layout(home) if out.shape == like.shape and home.groups == layout.groups else out


@implements_torch(torch.cross, either=("input", "other"))
def _cross(input: Any, other: Any, dim: int | None = None) -> Any:
    threes = [d for d, n in enumerate(input.shape) if n == 3]
    if dim is None and not threes:
        raise RuntimeError(f"cross of shape {tuple(input.shape)}: no dim has 3 rows; name the dim")
    return _cross_along(input, other, dim=threes[0] if dim is None else dim)


@implements_torch(torch.renorm)
def _renorm(input: Tile, p: float, dim: int, maxnorm: float) -> Any:
    """Scale parts along `dim` whose norm is more than `maxnorm` down to it.

    *Sends*: one all-gather of the ranks' norms, one number a part.
    """
    (at,) = reduced_dims(input, dim)
    check_by_torch(torch.renorm, input, at, p, at, maxnorm)
    norms = vector_norm(input, p, [d for d in range(input.ndim) if d != at], True)
    return with_order(input * torch.where(norms > maxnorm, maxnorm / (norms + 1e-7), 1.0), None)
