"""Random crops: their places, and the steps drawn for each with the rows that every rank must read for them.

Both follow from (seed, epoch, sample) alone: they are the same on every rank without communication.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from jigsaw.geometry.cut import Box, Cut, cut_points
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.io.volumes.drawn_steps import VoxelStep
from jigsaw.io.volumes.foreground import Foreground, FoundVoxels
from jigsaw.io.volumes.respacing import GridRespacing
from jigsaw.io.volumes.volume import AffineMatrix

_WORD_VALUES = 1 << 64


class RandomDraws:
    """Numbers of a counter-based generator (Philox, Salmon et al. 2011) at the place (seed, epoch, sample).

    The raw words, because numpy's distributions may change from version to version.  Each `stream` has its own: 0 is
    that of where crops lie.
    """

    def __init__(self, seed: int, epoch: int, sample: int, stream: int = 0) -> None:
        key = np.array([seed % _WORD_VALUES, epoch % _WORD_VALUES], np.uint64)
        counter = np.array([0, 0, sample % _WORD_VALUES, stream], np.uint64)
        self._source = np.random.Philox(key=key, counter=counter)

    def word(self) -> int:
        return int(self._source.random_raw())

    def below(self, count: int) -> int:
        return (self.word() * count) >> 64

    def chance(self, p: float) -> bool:
        return self.word() < p * _WORD_VALUES

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * (self.word() / _WORD_VALUES)


def crop_origin(
    shape: Sequence[int],
    crop: Sequence[int],
    draws: RandomDraws,
    weights: Foreground | None,
    voxels: FoundVoxels | None,
    respacing: GridRespacing | None = None,
) -> tuple[int, ...]:
    """Draw the first row of a crop along each dim; a volume that is smaller, below row 0 then, lies in its middle."""
    stored = respacing.stored if respacing else shape  # where foreground was found
    center = None if weights is None or voxels is None else _foreground_center(stored, draws, weights, voxels)
    if center and respacing:
        center = respacing.nearest_voxel(center)
    if center is None:
        firsts = [draws.below(max(n - rows, 0) + 1) for n, rows in zip(shape, crop, strict=True)]
    else:
        firsts = [c - rows // 2 for c, rows in zip(center, crop, strict=True)]
    return tuple(
        -((rows - size) // 2) if rows > size else min(max(first, 0), size - rows)
        for first, size, rows in zip(firsts, shape, crop, strict=True)
    )


def _foreground_center(
    shape: Sequence[int], draws: RandomDraws, weights: Foreground, known: FoundVoxels
) -> tuple[int, ...] | None:
    """Draw a voxel of the kind that is drawn, or of the other kind where a volume has none of the first."""
    wants = draws.chance(weights.pos / (weights.pos + weights.neg))
    present = [kept.at for kept in known.classes.values() if kept.at.size]
    if not present or (not wants and known.background.at.size):
        voxels = known.background.at
    else:
        voxels = present[draws.below(len(present))]
    if not voxels.size:
        return None
    return tuple(int(i) for i in np.unravel_index(int(voxels[draws.below(voxels.size)]), tuple(shape)))


@dataclass(frozen=True)
class AugmentedCrop:
    """Steps of a sample, in the order in which they are taken.

    They count from the first voxel of a window of `sizes` voxels, the row `first` of the sample along each dim: a crop
    is its own window; of a whole volume it is the volume, wherever that lies in its batch.
    """

    steps: tuple[VoxelStep, ...]
    first: tuple[int, ...]
    sizes: tuple[int, ...]

    def of_labels(self) -> AugmentedCrop:
        return replace(self, steps=tuple(step for step in self.steps if step.moves_labels))

    def after(self, step: VoxelStep) -> AugmentedCrop:
        return replace(self, steps=(step, *self.steps))

    def stages(self, layout: Layout) -> list[list[Cut]]:
        """Return the cuts along each dim before each step, and after the last, in rows of the window."""
        cuts = [
            replace(cut, held=tuple((a - first, b - first) for a, b in cut.held), wraps=True)
            for cut, first in zip(layout.cuts[2:], self.first, strict=True)
        ]
        stages = [cuts]
        for step in reversed(self.steps):
            cuts = step.needed(cuts, self.sizes)
            stages.append(cuts)
        return stages[::-1]

    def boxes(self, layout: Layout, coordinate: MeshCoordinate) -> list[Box]:
        return [Layout(tuple(cuts), layout.axes).held(coordinate) for cuts in self.stages(layout)]

    def read_layout(self, layout: Layout, origin: Sequence[int], shape: Sequence[int]) -> tuple[Layout, list[int]]:
        """Return the layout of what is read for a crop from `origin` on, and the row of the volume where it begins."""
        cuts, begins = list(layout.cuts), list[int]()
        where = zip(self.stages(layout)[0], origin, self.first, shape, strict=True)
        for d, (cut, at, first, size) in enumerate(where, start=2):
            held = [tuple(min(max(row + first + at, 0), size) for row in rows) for rows in cut.held]
            rows = [(a, b) for a, b in held if a < b] or [(0, 1)]
            low, high = min(a for a, _ in rows), max(b for _, b in rows)
            spans = tuple((a - low, b - low) if a < b else (0, 0) for a, b in held)
            cuts[d] = Cut(high - low, cut_points(high - low, cut.pieces), cut.axes, spans)
            begins.append(low)
        return Layout(tuple(cuts), layout.axes), begins

    def applied(self, block: Tensor, boxes: Sequence[Box], is_label: bool) -> Tensor:
        r"""Return the values [C, \*box] of the last of the `boxes`, made from those of the first."""
        for step, source, target in zip(self.steps, boxes, boxes[1:], strict=False):
            block = step.applied(block, source, target, self.sizes, is_label)
        return block

    def turned_affine(self, affine: AffineMatrix, dims: Sequence[str]) -> AffineMatrix:
        """Return the affine of the augmented sample; `affine` is that of the voxels (x, y, z) before it."""
        to_source = np.eye(len(dims) + 1)
        for step in self.steps:
            to_source = to_source @ step.to_source(self.sizes)
        moved = np.eye(len(dims) + 1)
        moved[:-1, -1] = self.first
        to_source = moved @ to_source @ np.linalg.inv(moved)
        at = [*("xyz".index(d) for d in dims), 3]
        whole = np.eye(4)
        whole[np.ix_(at, at)] = to_source
        return affine @ whole
