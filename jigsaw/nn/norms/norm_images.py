"""Passes of a norm over its values on the CPU, by the kernels of torch's own norms: as few and as fast.

Example: a U-Net's groups [1, 4, 4, 360, 1440] are normalized over their last three dims.  They are 16 *images* of 360 x
1440 values, each with one mean, one variance and one weight.  The statistics of a group, or of a batch, are combined
afterwards, and then those of all ranks.  `torch.var_mean` goes value by value, many times slower than the statistics
within torch's group norm.  A broadcast product with a factor an image is slower than torch's batch norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from jigsaw.comm.graph_calls import lacks_values
from jigsaw.torch_internals.dispatch import UNSAFE_VIEW

_LEAST_VALUES = 256
_CHUNK_BYTES = 1 << 20  # a kernel's output beside the statistics is thrown away, so it should stay in the cache


@dataclass(frozen=True)
class NormImages:
    """A contiguous tensor as images: `values` [1, images, values of each]; a value an image has `shape`, which
    broadcasts to the tensor's.
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
        # not a view to autograd, because a view that a Function returns cannot be changed in place
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
    """Return the images of a tensor that is normalized over `dims` and has these `scales`, a value an image, or None.
    None: images are small or do not lie in order, or another device, or a compiler, does better.
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
    """Return the first of the dims that lie within an image: the last ones, normalized over, along which no scale
    varies.
    """
    first = len(shape)
    while first - 1 in dims and all(s is None or _size_along(s, first - 1 - len(shape)) == 1 for s in scales):
        first -= 1
    return first


def _size_along(shape: tuple[int, ...], dim: int) -> int:
    """Return the size along `dim`, counted from the last, as broadcasting sees it."""
    return shape[dim] if -dim <= len(shape) else 1
