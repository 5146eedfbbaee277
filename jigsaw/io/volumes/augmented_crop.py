"""`AugmentedCrop`: the steps drawn for one sample, and the rows that each rank must read for its own part of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from jigsaw.geometry.cut import Box, Cut, cut_points
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.io.volumes.drawn_steps import VoxelStep
from jigsaw.io.volumes.volume import AffineMatrix


@dataclass(frozen=True)
class AugmentedCrop:
    """`steps` in the order in which they are taken.

    Steps count from the first voxel of a window of `sizes` voxels, the row `first` of the sample along each dim: a crop
    is its own window; of a whole volume it is the volume, wherever that lies in its batch.
    """

    steps: tuple[VoxelStep, ...]
    first: tuple[int, ...]
    sizes: tuple[int, ...]

    def of_labels(self) -> AugmentedCrop:
        """Return the steps that label maps follow."""
        return replace(self, steps=tuple(step for step in self.steps if step.moves_labels))

    def after(self, step: VoxelStep) -> AugmentedCrop:
        """Return the same crop with another step before the others."""
        return replace(self, steps=(step, *self.steps))

    def stages(self, layout: Layout) -> list[list[Cut]]:
        """Return the cuts along each dim before each step, and after the last, in rows of the window."""
        cuts = [
            replace(cut, held=tuple((a - first, b - first) for a, b in cut.held), wraps=True)
            for cut, first in zip(layout.cuts[2:], self.first, strict=True)
        ]
        found = [cuts]
        for step in reversed(self.steps):
            cuts = step.needed(cuts, self.sizes)
            found.append(cuts)
        return found[::-1]

    def boxes(self, layout: Layout, coordinate: MeshCoordinate) -> list[Box]:
        """Return the box that a rank holds at each stage."""
        return [Layout(tuple(cuts), layout.axes).held(coordinate) for cuts in self.stages(layout)]

    def read_layout(self, layout: Layout, origin: Sequence[int], shape: Sequence[int]) -> tuple[Layout, list[int]]:
        """Return the layout of what is read for a crop that begins at `origin` of a volume. Also return the volume's
        row where that layout begins along each dim.
        """
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
        """Return the affine of the augmented sample; `affine` takes the voxels (x, y, z) before augmentation to the
        world.
        """
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
