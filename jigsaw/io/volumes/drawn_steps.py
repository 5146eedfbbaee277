"""Steps drawn for one sample, from the voxels that are read to those of the sample.

A step works on any box of the sample, and says which box it needs for it. Positions count from the first voxel of the
sample, and the value of a voxel follows from its position alone. So each rank reads what its own box needs and no more.
All ranks find the values of the whole augmented sample, without communication.

Say 12 rows, cut into four pieces of 3, are shown backwards and then warped by up to 2 rows. Rank 1 holds the rows 3-5.
For the warp it needs the rows 1-7 of the reversed scan, and for those the rows 4-10 of the scan, which it reads.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jigsaw.geometry.cut import Box, Cut, Interval, box_shape

Matrix = NDArray[np.float64]
Values = NDArray[np.float64]
_VECTOR = 64
_ROUNDING = 1e-6  # rounding error of positions, in voxels, by which boxes are made wider


class VoxelStep(ABC):
    r"""One step, on blocks [C, \*box]; `moves_labels` says whether label maps take part."""

    moves_labels: ClassVar[bool] = False

    def needed(self, cuts: Sequence[Cut], sizes: Sequence[int]) -> list[Cut]:
        """Return the cuts that must be held before it, along each dim, when `cuts` are held after it."""
        return list(cuts)

    @abstractmethod
    def applied(self, block: Tensor, source: Box, target: Box, sizes: Sequence[int], nearest: bool) -> Tensor:
        """Return the values of the box `target`, made from those of the box `source`."""

    def to_source(self, sizes: Sequence[int]) -> Matrix:
        """Return the matrix from a voxel (its place along each dim, and 1) to the one that it comes from."""
        return np.eye(len(sizes) + 1)


@dataclass(frozen=True)
class VoxelTurn(VoxelStep):
    """Dim d shows the dim ``order[d]``, from its end on where it is `flipped`."""

    order: tuple[int, ...]
    flipped: tuple[bool, ...]
    moves_labels: ClassVar[bool] = True

    def needed(self, cuts: Sequence[Cut], sizes: Sequence[int]) -> list[Cut]:
        before = list(cuts)
        for source, cut, flipped, n in zip(self.order, cuts, self.flipped, sizes, strict=True):
            before[source] = replace(cut, held=tuple((n - b, n - a) for a, b in cut.held)) if flipped else cut
        return before

    def applied(self, block: Tensor, source: Box, target: Box, sizes: Sequence[int], nearest: bool) -> Tensor:
        turned = block.permute(0, *(1 + d for d in self.order))
        return turned.flip([1 + d for d, flipped in enumerate(self.flipped) if flipped]).contiguous()

    def to_source(self, sizes: Sequence[int]) -> Matrix:
        matrix = np.zeros((len(sizes) + 1,) * 2)
        matrix[-1, -1] = 1
        for d, (source, flipped) in enumerate(zip(self.order, self.flipped, strict=True)):
            matrix[source, d], matrix[source, -1] = (-1, sizes[d] - 1) if flipped else (1, 0)
        return matrix


@dataclass(frozen=True)
class IntensityStep(VoxelStep):
    """x times `scale` plus `shift`; before that, above `low`, ``low + width ((x - low) / width) ** gamma``."""

    scale: float = 1.0
    shift: float = 0.0
    gamma: float = 1.0
    low: float = 0.0
    width: float = 1.0

    def applied(self, block: Tensor, source: Box, target: Box, sizes: Sequence[int], nearest: bool) -> Tensor:
        if self.gamma != 1:
            above = (block.to(torch.float64) - self.low).clamp_(min=0) / self.width
            bent = torch.from_numpy(_in_whole_vectors(lambda x: np.power(x, self.gamma), above.numpy()))
            block = torch.where(block > self.low, bent.mul_(self.width).add_(self.low).to(block.dtype), block)
        return block * self.scale + self.shift


@dataclass(frozen=True)
class NoiseStep(VoxelStep):
    """Noise: normal numbers, added, that follow from the place of a voxel and its channel alone."""

    key: int
    std: float

    def applied(self, block: Tensor, source: Box, target: Box, sizes: Sequence[int], nearest: bool) -> Tensor:
        bits = hashed_places(self.key, ((0, block.shape[0]), *target))
        # Box and Muller's method, from the upper and the lower half of the bits
        first = ((bits >> np.uint64(32)).astype(np.float64) + 0.5) * 2.0**-32
        second = (bits & np.uint64(0xFFFFFFFF)).astype(np.float64) * (2 * math.pi * 2.0**-32)
        drawn = np.sqrt(-2 * _in_whole_vectors(np.log, first)) * _in_whole_vectors(np.cos, second)
        return block + torch.from_numpy(drawn * self.std).to(block.dtype)


@dataclass(frozen=True)
class CoarseStep(VoxelStep):
    """View of a scan with voxels `factor` times as long: the nearest voxels, and lines between them."""

    factor: tuple[float, ...]

    def _rows(self, d: int, rows: Interval) -> tuple[NDArray[np.int64], NDArray[np.int64], Matrix]:
        """Return the two rows that each row lies between, and how far on from the first it lies."""
        f = self.factor[d]
        at: Values = (np.arange(*rows, dtype=np.float64) + 0.5) / f - 0.5
        below = np.floor(at)
        first, second = (np.floor(f * (each + 0.5)).astype(np.int64) for each in (below, below + 1))
        return first, second, at - below

    def needed(self, cuts: Sequence[Cut], sizes: Sequence[int]) -> list[Cut]:
        def reach(d: int, held: Interval) -> Interval:
            first, second, _ = self._rows(d, held)
            return (int(first.min()), int(second.max()) + 1) if first.size else held

        return [
            cut if self.factor[d] == 1 else replace(cut, held=tuple(reach(d, held) for held in cut.held))
            for d, cut in enumerate(cuts)
        ]

    def applied(self, block: Tensor, source: Box, target: Box, sizes: Sequence[int], nearest: bool) -> Tensor:
        for d, rows in enumerate(target):
            if self.factor[d] == 1:
                continue
            first, second, part = self._rows(d, rows)
            lower, upper = (block.index_select(1 + d, torch.from_numpy(at - source[d][0])) for at in (first, second))
            part = torch.from_numpy(part).to(block.dtype).reshape([-1 if k == d else 1 for k in range(len(target))])
            block = lower + (upper - lower) * part
        return block


class WarpStep(VoxelStep):
    """Voxels taken from other places: interpolated for an image, the nearest for a label map."""

    moves_labels: ClassVar[bool] = True

    @abstractmethod
    def places(self, target: Box, sizes: Sequence[int]) -> list[Tensor]:
        """Return where the voxels of a box come from: their places along each dim."""

    def applied(self, block: Tensor, source: Box, target: Box, sizes: Sequence[int], nearest: bool) -> Tensor:
        shape = box_shape(target)
        if not math.prod(shape):
            return block.new_zeros(block.shape[0], *shape)
        # places depend on the sample alone, and each sum has one order, so results have the same bits on all meshes
        places = [at.expand(shape).reshape(-1) for at in self.places(target, sizes)]
        flat = block.reshape(block.shape[0], -1)
        strides = [math.prod(block.shape[2 + d :]) for d in range(len(shape))]
        lows = [(at + 0.5).floor() if nearest else at.floor() for at in places]
        index = torch.zeros_like(lows[0], dtype=torch.int64)
        for low, (a, _), stride in zip(lows, source, strides, strict=True):
            index += (low.to(torch.int64) - a) * stride
        if nearest:
            return flat.index_select(1, index).reshape(-1, *shape)
        parts = [(at - low).to(block.dtype) for at, low in zip(places, lows, strict=True)]
        total = torch.zeros(block.shape[0], index.numel(), dtype=block.dtype)
        for corner in product((0, 1), repeat=len(shape)):
            weight = torch.ones_like(parts[0])
            for part, upper in zip(parts, corner, strict=True):
                weight *= part if upper else 1 - part
            offset = sum(stride for stride, upper in zip(strides, corner, strict=True) if upper)
            total += flat.index_select(1, index + offset) * weight
        return total.reshape(-1, *shape)


def _reach_of_places(low: float, high: float) -> Interval:
    return math.floor(low - _ROUNDING), math.floor(high + _ROUNDING) + 2


@dataclass(frozen=True)
class AffineStep(WarpStep):
    """Affine map: the voxel at p comes from ``center + matrix (p - center) + shift``, with the sample's center."""

    matrix: tuple[tuple[float, ...], ...]
    shift: tuple[float, ...]

    def places(self, target: Box, sizes: Sequence[int]) -> list[Tensor]:
        places: list[Tensor] = []
        for row, shift, n in zip(self.matrix, self.shift, sizes, strict=True):
            at = torch.full((), (n - 1) / 2 + shift, dtype=torch.float64)
            for d, (weight, rows) in enumerate(zip(row, target, strict=True)):
                apart = (torch.arange(*rows, dtype=torch.float64) - (sizes[d] - 1) / 2) * weight
                at = at + apart.reshape([-1 if k == d else 1 for k in range(len(target))])
            places.append(at)
        return places

    def needed(self, cuts: Sequence[Cut], sizes: Sequence[int]) -> list[Cut]:
        # A piece along one dim is held by ranks with other pieces of the other dims: its rows are those that any of
        # them needs.
        hulls = [(min(a for a, _ in cut.held), max(b for _, b in cut.held)) for cut in cuts]

        def reach(d: int, held: Interval) -> Interval:
            box = [held if k == d else hull for k, hull in enumerate(hulls)]
            if any(a >= b for a, b in box):
                return held
            low = high = (sizes[d] - 1) / 2 + self.shift[d]
            for weight, (a, b), n in zip(self.matrix[d], box, sizes, strict=True):
                ends = weight * (a - (n - 1) / 2), weight * (b - 1 - (n - 1) / 2)
                low, high = low + min(ends), high + max(ends)
            return _reach_of_places(low, high)

        return [replace(cut, held=tuple(reach(d, held) for held in cut.held)) for d, cut in enumerate(cuts)]

    def to_source(self, sizes: Sequence[int]) -> Matrix:
        matrix, center = np.eye(len(sizes) + 1), (np.array(sizes) - 1) / 2
        matrix[:-1, :-1] = self.matrix
        matrix[:-1, -1] = center - matrix[:-1, :-1] @ center + self.shift
        return matrix


@dataclass(frozen=True)
class ElasticStep(WarpStep):
    """Displacements of at most `most` voxels: cubic B-splines of random ones `every` voxels apart (Rueckert 1999)."""

    key: int
    most: float
    every: int

    def needed(self, cuts: Sequence[Cut], sizes: Sequence[int]) -> list[Cut]:
        def reach(held: Interval) -> Interval:
            a, b = held
            # a mean of ones of at most `most`
            return _reach_of_places(a - self.most, b - 1 + self.most) if a < b else held

        return [replace(cut, held=tuple(map(reach, cut.held))) for cut in cuts]

    def places(self, target: Box, sizes: Sequence[int]) -> list[Tensor]:
        knots = tuple((a // self.every - 1, (b - 1) // self.every + 3) for a, b in target)
        places: list[Tensor] = []
        for d, rows in enumerate(target):
            bits = hashed_places(self.key, ((d, d + 1), *knots))[0]
            moved = torch.from_numpy(((bits >> np.uint64(11)).astype(np.float64) * 2.0**-52 - 1) * self.most)
            for k, span in enumerate(target):
                moved = self._between_knots(moved, k, span, knots[k][0])
            start = torch.arange(*rows, dtype=torch.float64)
            places.append(moved + start.reshape([-1 if k == d else 1 for k in range(len(target))]))
        return places

    def _between_knots(self, values: Tensor, dim: int, rows: Interval, first: int) -> Tensor:
        at = torch.arange(*rows)
        below = torch.div(at, self.every, rounding_mode="floor")
        u = (at - below * self.every).to(torch.float64) / self.every
        weights = ((1 - u) ** 3, 3 * u**3 - 6 * u**2 + 4, -3 * u**3 + 3 * u**2 + 3 * u + 1, u**3)
        shape = [-1 if k == dim else 1 for k in range(values.ndim)]
        terms = [
            values.index_select(dim, below - 1 + k - first) * (weight / 6).reshape(shape)
            for k, weight in enumerate(weights)
        ]
        return terms[0] + terms[1] + terms[2] + terms[3]


def _in_whole_vectors(function: Callable[[Values], Values], values: Values) -> Values:
    """Apply a function that is not correctly rounded, with the same result wherever a value stands in memory.

    A processor computes its vectors and the remainder at the end by different code, whose last bits may differ. So rows
    are filled up until there is no remainder. (Torch also cuts at its threads' shares, so numpy is used.)
    """
    flat = np.ones(-(-values.size // _VECTOR) * _VECTOR)
    flat[: values.size] = values.ravel()
    return function(flat)[: values.size].reshape(values.shape)


def hashed_places(key: int, box: Box) -> NDArray[np.uint64]:
    """Return 64 random bits for each place of a box, which may reach below 0, from the place and the key alone.

    Words are mixed dim after dim: each dim counts on from the result of the outer ones.
    """
    words = np.array(key % (1 << 64), np.uint64)
    for rows in box:
        words = mix_words(words[..., None] + np.arange(*rows, dtype=np.int64).astype(np.uint64))
    return words


def mix_words(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Hash words of 64 bits by the finalizer of splitmix64 (Steele, Lea, Flood 2014): different ones differ."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
