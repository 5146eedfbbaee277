"""Values that a slab needs from all slabs: the moments of a norm, the keys and values of an attention
(`jigsaw.nn.chunked`).

Each is a function s of the whole input that the rest of the module reads like a weight.  Slabs run up to it and hand
out their part (`SlabPaused`); then they run with its values.  Backward, they run with its gradient, which is added to
that of the slab's rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.geometry.cut import box_shape, box_slices
from jigsaw.geometry.layout import Layout
from jigsaw.ops.reductions import elements_per_value, reducing_axes
from jigsaw.ranks.slab_mesh import SLAB_AXIS, SlabMesh
from jigsaw.tile.tile import Tile


@dataclass
class SlabStatistic:
    """Values, the same on the ranks along `axes`, and, once they are known, their gradients, summed over these."""

    values: tuple[Tensor, ...]
    axes: tuple[str, ...]
    gradients: tuple[Tensor, ...] | None = None

    def summed_over_ranks(self, parts: Sequence[Tensor], mesh: DeviceMesh | None) -> tuple[Tensor, ...]:
        return tuple(parts) if mesh is None else tuple(comm.all_reduce(x, mesh, self.axes) for x in parts)


class SlabPaused(BaseException):
    """Raised where a slab needs a statistic that is not known yet; `part` is the slab's share of it."""

    def __init__(self, part: MomentsPart | KeysPart) -> None:
        super().__init__(part)
        self.part = part


class SlabRun:
    """One run of a module over one slab, with the statistics that are known, in the order in which the module asks."""

    def __init__(self, known: Sequence[SlabStatistic]) -> None:
        self._known, self._next = known, 0

    def statistic(self, part: MomentsPart | KeysPart) -> SlabStatistic:
        if self._next == len(self._known):
            raise SlabPaused(part)
        self._next += 1
        return self._known[self._next - 1]


def _axes_of_ranks(axes: Sequence[str]) -> tuple[str, ...]:
    return tuple(a for a in axes if a != SLAB_AXIS)


# -- norms ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MomentsPart:
    """Rows of a slab that a norm takes its statistics over: `x` without halo along `dims`."""

    x: Tile
    dims: tuple[int, ...]

    def counted(self) -> tuple[int, Tensor, Tensor]:
        """Return (rows, mean, sum of squared deviations), after which the slab itself is not needed."""
        rows = math.prod(self.x.local.shape[d] for d in self.dims)
        x = self.x.local.detach()
        if not rows:  # this rank has no rows of another dim
            none = x.new_zeros([1 if d in self.dims else n for d, n in enumerate(x.shape)])
            return 0, none, none
        spread, mean = torch.var_mean(x, self.dims, correction=0, keepdim=True)
        return rows, mean, spread * rows

    def merge(self, parts: Sequence[tuple[int, Tensor, Tensor]], mesh: DeviceMesh | None) -> SlabStatistic:
        """Return mean and sum of squared deviations over all slabs of all ranks (Chan, Golub and LeVeque, 1979)."""
        axes = _axes_of_ranks(reducing_axes(self.x.layout, self.dims))
        count = elements_per_value(self.x, self.dims)

        def over_ranks(value: Tensor) -> Tensor:
            return value if mesh is None else comm.all_reduce(value, mesh, axes)

        sums = torch.stack([rows * mean for rows, mean, _ in parts]).sum(0)
        mean = over_ranks(sums) / count
        squares = torch.stack([own + rows * (center - mean).square() for rows, center, own in parts]).sum(0)
        return SlabStatistic((mean, over_ranks(squares)), axes)


@dataclass(frozen=True, slots=True)
class _SlabNorm:
    """Statistics over `dims`, of `count` elements each, rows `own` of the slab in them, and `gradients`, once known."""

    dims: tuple[int, ...]
    eps: float
    count: int
    own: tuple[slice, ...]
    gradients: tuple[Tensor, ...] | None


class _StandardizeSlab(torch.autograd.Function):
    """Function y = (x - mean) / sqrt(squares / count + eps) * weight + bias, with gradients of mean and squares."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, squares: Tensor, slab: _SlabNorm
    ) -> Tensor:
        inverse = torch.rsqrt(squares / slab.count + slab.eps)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.slab = slab
        y = x - mean
        scale = inverse if weight is None else inverse * weight
        return y.mul_(scale) if bias is None else torch.addcmul(bias, y, scale, out=y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        dims, count, own, of_all = ctx.slab.dims, ctx.slab.count, ctx.slab.own, ctx.slab.gradients
        needs = ctx.needs_input_grad
        g, unit = grads[0], (x - mean).mul_(inverse)
        of_weight = (g * unit).sum_to_size(weight.shape) if weight is not None and needs[1] else None
        of_bias = g.sum_to_size(bias.shape) if bias is not None and needs[2] else None
        g = g if weight is None else g * weight
        of_mean = (g * inverse).sum(dims, keepdim=True).neg_() if needs[3] else None
        of_squares = (g * unit).sum(dims, keepdim=True) * inverse.square() * (-0.5 / count) if needs[4] else None
        of_x = g * inverse if needs[0] else None
        if of_x is not None and of_all is not None:  # for halo rows, other ranks have the gradient of the statistics
            of_x[own].add_(unit[own].mul_(of_all[1] * 2 / inverse)).add_(of_all[0] / count)
        return of_x, of_weight, of_bias, of_mean, of_squares, None


def slabs_cut(x: Tile, *dims: int) -> bool:
    """Say whether `x` is a slab's tile, and the slabs cut one of its `dims`."""
    return isinstance(x.mesh, SlabMesh) and SLAB_AXIS in reducing_axes(x.layout, dims)


def standardize_slab(
    x: Tile, dims: tuple[int, ...], eps: float, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Do as `jigsaw.nn.norms.standardize.standardize_tile`, for a tile on a `SlabMesh` whose slabs cut `dims`."""
    layout = x.layout
    for d in dims:
        layout = layout.replace_dim(d, *(c.bare() for c in layout.dim(d)))
    moments = _run_of(x).statistic(MomentsPart(x.with_layout(layout), dims))
    held = layout.held(x.coordinate), x.layout.held(x.coordinate)
    own = box_slices(*held) if len(layout.cuts) == x.ndim else (slice(None),) * x.ndim
    slab = _SlabNorm(dims, eps, elements_per_value(x, dims), own, moments.gradients)
    y = cast(Tensor, _StandardizeSlab.apply(x.local, weight, bias, *moments.values, slab))
    return y, moments.values[0].detach(), moments.values[1].detach()


def _run_of(x: Tile) -> SlabRun:
    assert isinstance(x.mesh, SlabMesh) and isinstance(x.mesh.player, SlabRun)
    return x.mesh.player


# -- attention --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeysPart:
    """Keys and values of a slab; the slabs cut their tokens, the last dim but one."""

    key: Tile
    value: Tile

    def counted(self) -> tuple[KeysPart]:
        return (self,)

    def merge(self, parts: Sequence[tuple[KeysPart]], mesh: DeviceMesh | None) -> SlabStatistic:
        keys, values = ([getattr(part, name) for (part,) in parts] for name in ("key", "value"))
        axes = _axes_of_ranks(self.key.layout.dim_axes(self.key.ndim - 2))
        return SlabStatistic((_tokens_of_all(keys, axes, mesh), _tokens_of_all(values, axes, mesh)), axes)


def _token_box(tile: Tile) -> tuple[Layout, Any]:
    tokens = tile.ndim - 2
    layout = tile.layout.replace_dim(tokens, *(c.uncut() for c in tile.layout.dim(tokens)))
    return layout, box_slices(tile.layout.held(tile.coordinate), layout.held(tile.coordinate))


def _tokens_of_all(slabs: Sequence[Tile], axes: Sequence[str], mesh: DeviceMesh | None) -> Tensor:
    layout, _ = _token_box(slabs[0])
    coord = slabs[0].coordinate
    whole = slabs[0].local.new_zeros(box_shape(layout.held(coord)))
    for tile in slabs:
        box = _token_box(tile)[1]
        whole[box] = tile.local.detach().reshape(whole[box].shape)
    # each rank has zeros for the tokens of others, so the sum has every token once
    whole = whole if mesh is None else comm.all_reduce(whole, mesh, axes)
    return whole.reshape(layout.local_shape(coord))


class _WithGradients(torch.autograd.Function):
    """Function that returns `y` unchanged; in the backward pass `others` get `gradients`, computed elsewhere."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, gradients: tuple[Tensor, ...], *others: Tensor) -> Tensor:
        ctx.gradients = gradients
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, *ctx.gradients


def keys_of_all_slabs(key: Tile, value: Tile) -> tuple[list[tuple[Tensor, Layout]], Callable[[Tensor], Tensor]]:
    """Return keys and values with all tokens, each with its layout, and the function that the local result is to pass
    through.

    *Sends*: an all-reduce of all keys and values over the ranks that cut their tokens, in the pass that finds them.
    Backward, one of their gradients.
    """
    key, value = key.owned(), value.owned()
    statistic = _run_of(key).statistic(KeysPart(key, value))
    whole = [(x, _token_box(t)[0]) for x, t in zip(statistic.values, (key, value), strict=True)]

    def attach(y: Tensor) -> Tensor:
        if statistic.gradients is None:
            return y
        gradients: list[Tensor] = []
        for g, t in zip(statistic.gradients, (key, value), strict=True):
            layout, box = _token_box(t)
            gradients.append(g.reshape(box_shape(layout.held(t.coordinate)))[box].reshape(t.local.shape))
        return cast(Tensor, _WithGradients.apply(y, tuple(gradients), key.local, value.local))

    return whole, attach
