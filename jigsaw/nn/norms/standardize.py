"""Core of the norms, (x - mean) / sqrt(var + eps) * weight + bias over cut dims, with one tensor kept for backward.

Statistics of the ranks are combined so that no digits cancel (Chan, Golub and LeVeque, 1979). The gradient is the
closed formula of Ioffe and Szegedy (arXiv 1502.03167) with its two sums taken over all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.comm.graph_calls import lacks_values
from jigsaw.nn.slab_statistics import slabs_cut, standardize_slab
from jigsaw.ops.reductions import elements_per_value, global_moments, reducing_axes
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals.dispatch import UNSAFE_VIEW

_LEAST_VALUES = 256
_CHUNK_BYTES = 1 << 20  # only the statistics of a kernel are used, so its other output should fit in the cache


@dataclass(frozen=True)
class NormImages:
    """A contiguous tensor as *images*, `values` [1, images, values of each], normalized on the CPU by kernels of
    torch's norms; `shape` is that of a value an image.

    For example a U-Net's groups [1, 4, 4, 360, 1440] are 16 images of 360 x 1440 values.  `torch.var_mean` goes value
    by value, many times slower, and a broadcast product with a factor an image is slower than torch's batch norm.
    """

    values: Tensor
    shape: tuple[int, ...]
    whole: torch.Size

    def moments(self, dims: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Return (variance, mean) along `dims`, as `torch.var_mean` with ``correction=0, keepdim=True``."""
        size = self.values.shape[2]
        parts: list[tuple[Tensor, Tensor]] = []
        for some in self.values.split(max(_CHUNK_BYTES // (size * self.values.itemsize), 1), 1):
            _, mean, inverse = torch.native_group_norm(some, None, None, 1, some.shape[1], size, some.shape[1], 0.0)
            parts.append((inverse.pow(-2), mean))
        spread, mean = (torch.cat(each, 1).view(self.shape) for each in zip(*parts, strict=True))
        between, own = torch.var_mean(mean, dims, correction=0, keepdim=True)
        return spread.mean(dims, keepdim=True) + between, own

    def scaled(self, scale: Tensor, shift: Tensor) -> Tensor:
        """Return the tensor times `scale` plus `shift`, which have a value an image."""
        by, to = self._an_image(scale), self._an_image(shift)
        y = torch.native_batch_norm(self.values, by, to, torch.zeros_like(by), torch.ones_like(by), False, 0.0, 0.0)
        # autograd must not take this for a view: a view that a Function returns cannot be changed in place
        return UNSAFE_VIEW(y[0], self.whole)

    def sums(self, grad: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sums of ``grad * (x - mean) * inverse`` and of `grad`, a value an image."""
        like, center, scale = grad.reshape(self.values.shape), self._an_image(mean), self._an_image(inverse)
        _, along, total = torch.ops.aten.native_batch_norm_backward(
            like, self.values, None, None, None, center, scale, True, 0.0, [False, True, True]
        )
        return along.view(self.shape), total.view(self.shape)

    def _an_image(self, value: Tensor) -> Tensor:
        return value.expand(self.shape).reshape(-1)


def as_norm_images(x: Tensor, dims: tuple[int, ...], *scales: Tensor | None) -> NormImages | None:
    """Return the images of a tensor that is normalized over `dims`, with `scales` of a value an image, or None: images
    are small or do not lie in order, or another device, or a compiler, does better.
    """
    if x.device.type != "cpu" or lacks_values() or not x.is_contiguous():
        return None
    last = _first_dim_within(tuple(x.shape), dims, tuple(None if s is None else tuple(s.shape) for s in scales))
    size = math.prod(x.shape[last:])
    if size < _LEAST_VALUES or not x.numel():
        return None
    return NormImages(x.view(1, -1, size), (*x.shape[:last], *(1,) * (x.ndim - last)), x.shape)


@lru_cache(maxsize=4096)
def _first_dim_within(shape: tuple[int, ...], dims: tuple[int, ...], scales: tuple[tuple[int, ...] | None, ...]) -> int:
    """Return the first of the dims within an image: the last ones, normalized over, along which no scale varies."""
    first = len(shape)
    while first - 1 in dims and all(s is None or _size_along(s, first - 1 - len(shape)) == 1 for s in scales):
        first -= 1
    return first


def _size_along(shape: tuple[int, ...], dim: int) -> int:
    """Return the size along `dim`, counted from the last, as broadcasting sees it."""
    return shape[dim] if -dim <= len(shape) else 1


def is_whole_along(tile: Tile, dims: Sequence[int]) -> bool:
    """Say whether each rank has all rows of `dims` once, so that plain torch's own norm is exact there."""
    return all(map(tile.layout.complete_dims.__getitem__, dims))


def owned_along(tile: Tile, dims: Sequence[int]) -> Tile:
    """Return the tile without halo rows along `dims`, so that a statistic counts each row once; nothing is sent."""
    layout = tile.layout
    for d in dims:
        layout = layout.replace_dim(d, *(c.bare() for c in layout.dim(d)))
    return tile if layout == tile.layout else tile.with_layout(layout)


def standardize_tile(
    x: Tile, dims: Sequence[int], eps: float, weight: Tensor | None = None, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (y, mean, sum of squared deviations): local y of all rows, halo included, and statistics of owned ones.

    *Shapes*: y as x.local, which is float32 or wider; statistics of size 1 along `dims`, alike along their axes;
    `weight` and `bias` broadcast to x.local. *Sends*: forward, two all-reduces of one value a statistic; backward, one
    of two values.
    """
    dims = tuple(dims)
    if slabs_cut(x, *dims):
        return standardize_slab(x, dims, eps, weight, bias)
    if any(c.has_halo for d in dims for c in x.layout.dim(d)):
        mean, squares = global_moments(owned_along(x, dims), dims)
        return (_apply_statistics(x.local, mean, squares, weight, bias, _NormOptions.of(x, dims, eps)), mean, squares)
    options = _NormOptions.of(x, dims, eps)
    return cast("tuple[Tensor, Tensor, Tensor]", _Standardize.apply(x.local, weight, bias, options))


@dataclass(frozen=True, slots=True)
class _NormOptions:
    """Statistics over `dims`, of `count` elements each, which the ranks along `axes` of the mesh share."""

    mesh: DeviceMesh
    axes: tuple[str, ...]
    dims: tuple[int, ...]
    eps: float
    count: int

    @classmethod
    def of(cls, x: Tile, dims: tuple[int, ...], eps: float) -> _NormOptions:
        return cls(x.mesh, reducing_axes(x.layout, dims), dims, eps, elements_per_value(x, dims))

    def inverse(self, squares: Tensor) -> Tensor:
        return torch.rsqrt(squares / self.count + self.eps)

    def tilt_and_shift(self, along: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        """Return the means of a gradient times x, standardized, and of that gradient."""
        sums = torch.stack([along.sum(self.dims, keepdim=True), total.sum(self.dims, keepdim=True)])
        tilt, shift = (comm.all_reduce(sums, self.mesh, self.axes) / self.count).unbind()
        return tilt, shift


def _apply_statistics(
    x: Tensor, mean: Tensor, squares: Tensor, weight: Tensor | None, bias: Tensor | None, options: _NormOptions
) -> Tensor:
    mesh, axes = options.mesh, options.axes
    y = (x - comm.use_in_parts(mean, mesh, axes)) * comm.use_in_parts(options.inverse(squares), mesh, axes)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _global_statistics(x: Tensor, images: NormImages | None, options: _NormOptions) -> tuple[Tensor, Tensor]:
    """Return (mean, sum of squared deviations) over the rows of all ranks."""
    mesh, axes, dims, count = options.mesh, options.axes, options.dims, options.count
    rows = math.prod(x.shape[d] for d in dims)
    if images is not None:
        spread, own = images.moments(dims)
    elif rows:
        spread, own = torch.var_mean(x, dims, correction=0, keepdim=True)
    else:
        own = x.new_zeros([1 if d in dims else n for d, n in enumerate(x.shape)])
        spread = own
    mean = comm.all_reduce(own * rows, mesh, axes, same=(dims, count)) / count
    return mean, comm.all_reduce((spread + (own - mean).square()) * rows, mesh, axes)


def _are_near_zero(mean: Tensor, inverse: Tensor) -> bool:
    """Say whether one pass, x * scale + shift, keeps the digits of two; with large means plain torch loses some."""
    return bool((mean * inverse).abs().max() < _LARGEST_MEAN)


_LARGEST_MEAN = 16  # counted in standard deviations


class _Standardize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, options: _NormOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        ctx.options = options
        images = as_norm_images(x, options.dims, weight, bias)
        mean, squares = _global_statistics(x, images, options)
        inverse = options.inverse(squares)
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.mark_non_differentiable(mean, squares)
        scale = inverse if weight is None else inverse * weight
        if images is not None and _are_near_zero(mean, inverse):
            return images.scaled(scale, -mean * scale if bias is None else bias - mean * scale), mean, squares
        y = x - mean
        return (y.mul_(scale) if bias is None else torch.addcmul(bias, y, scale, out=y)), mean, squares

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        options: _NormOptions = ctx.options
        if torch.is_grad_enabled():  # compute it from differentiable operations, for second derivatives
            return *_differentiable_gradients(x, weight, bias, options, grads[0], ctx.needs_input_grad), None
        images = as_norm_images(x, options.dims, weight, bias)
        if images is not None and _are_near_zero(mean, inverse):
            saved = images, weight, bias, mean, inverse
            return *_gradients_by_images(grads[0], *saved, options, ctx.needs_input_grad), None
        unit = (x - mean).mul_(inverse)
        along = grads[0] * unit
        of_weight = along.sum_to_size(weight.shape) if weight is not None and ctx.needs_input_grad[1] else None
        of_bias = grads[0].sum_to_size(bias.shape) if bias is not None and ctx.needs_input_grad[2] else None
        if not ctx.needs_input_grad[0]:
            return None, of_weight, of_bias, None
        grad = grads[0] if weight is None else grads[0] * weight
        # where `along` has the weight's shape, `of_weight` is the same tensor, and must not be changed
        if weight is not None:
            along = along * weight if weight.shape == along.shape else along.mul_(weight)
        tilt, shift = options.tilt_and_shift(along, grad)
        del along
        # (grad - shift - unit * tilt) / sqrt(var + eps), in the memory of `unit`
        of_x = torch.sub(grad, unit.mul_(tilt).add_(shift), out=unit).mul_(inverse)
        return of_x, of_weight, of_bias, None


def _gradients_by_images(
    grad: Tensor,
    images: NormImages,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor,
    inverse: Tensor,
    options: _NormOptions,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    along, total = images.sums(grad, mean, inverse)
    of_weight = along.sum_to_size(weight.shape) if weight is not None and needs[1] else None
    of_bias = total.sum_to_size(bias.shape) if bias is not None and needs[2] else None
    if not needs[0]:
        return None, of_weight, of_bias
    if weight is not None:
        along, total = along * weight, total * weight
    tilt, shift = options.tilt_and_shift(along, total)
    # (grad * weight - shift - (x - mean) * inverse * tilt) * inverse, in one pass over x and one over grad
    slope = -tilt * inverse.square()
    of_x = images.scaled(slope, -shift * inverse - slope * mean)
    return of_x.addcmul_(grad, inverse if weight is None else inverse * weight), of_weight, of_bias


def _differentiable_gradients(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, options: _NormOptions, grad: Tensor, needs: Sequence[bool]
) -> list[Tensor | None]:
    mesh, axes, dims = options.mesh, options.axes, options.dims
    mean = comm.sum_parts(x.sum(dims, keepdim=True), mesh, axes) / options.count
    squares = comm.sum_parts((x - comm.use_in_parts(mean, mesh, axes)).square().sum(dims, keepdim=True), mesh, axes)
    y = _apply_statistics(x, mean, squares, weight, bias, options)
    asked = [v for v, needed in zip((x, weight, bias), needs, strict=False) if needed and v is not None]
    gradients = iter(torch.autograd.grad(y, asked, grad, create_graph=True))
    return [
        next(gradients) if needed and v is not None else None
        for v, needed in zip((x, weight, bias), needs, strict=False)
    ]
