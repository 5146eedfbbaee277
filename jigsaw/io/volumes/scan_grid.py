"""Labels put back on the grid of a scan: each of its voxels takes the label of the nearest voxel of a tile.

The two grids may differ in spacing, orientation and extent, but their axes run alike, so that an axis is resampled by
itself: a rank fetches the rows that its own part of the scan takes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from jigsaw.errors import GridError
from jigsaw.geometry.stencil_rules import InterpolationTable
from jigsaw.io.volumes.volume import AffineMatrix
from jigsaw.nn.stencils.stencil import DimStencil, gather_input_rows, plan_stencil
from jigsaw.tile.tile import Tile

_OFF_AXIS = 0.05
"""Voxels by which an axis may drift along another over the whole scan: a header's float32 makes some."""
_ROUNDING = 1e-3
"""Voxels beyond its half by which an outer voxel may reach: affines in float32 are rounded by less."""


@dataclass(frozen=True)
class ScanAxis:
    """Dim of a scan: the dim of the tile that runs alike, or against it, and the nearest row of that for each row.

    Rows from `inside` on, up to its end, lie within the tile; the others are background.
    """

    dim: int
    is_reversed: bool
    rows: tuple[int, ...]
    inside: tuple[int, int]


def axes_of_scan(
    scan: AffineMatrix, sides: Sequence[int], tile: AffineMatrix, space: Sequence[int]
) -> tuple[ScanAxis, ...]:
    """Match the dims z, y, x of a scan of these `sides` with those of a tile of the sides `space`, by their affines.

    Raises: `GridError` for grids that are turned or sheared against each other.
    """
    into = np.linalg.inv(tile) @ scan
    found: list[ScanAxis] = []
    for column, n in zip((2, 1, 0), sides, strict=True):
        along = np.abs(into[:3, column])
        row = int(along.argmax())
        if (np.delete(along, row) * n).max() > _OFF_AXIS:
            raise GridError(
                f"the axis {'xyz'[column]} of the scan runs along none of the tile's; labels are put back on grids "
                "whose axes run alike, so read the scan without turning it, or resample the labels beforehand"
            )
        size, slope = space[2 - row], into[row, column]
        at = into[row, column] * np.arange(n) + into[row, 3]
        within = np.flatnonzero((at > -0.5 - _ROUNDING) & (at < size - 0.5 + _ROUNDING))
        rows = np.clip(np.rint(at), 0, size - 1).astype(int)
        rows = size - 1 - rows if slope < 0 else rows
        inside = (int(within[0]), int(within[-1]) + 1) if len(within) else (0, 0)
        found.append(ScanAxis(2 - row, bool(slope < 0), tuple(rows.tolist()), inside))
    if len({axis.dim for axis in found}) < 3:
        raise GridError("two axes of the scan run along one of the tile's; give the affine that the tile has")
    return tuple(found)


def labels_on_scan(labels: Tile, axes: Sequence[ScanAxis]) -> Tile:
    """Move labels [C, z, y, x] to the grid of a scan.

    *Shapes*: ``[C, *sides]``; cut as the labels are, at the points that lie nearest.
    *Sends*: the rows that other ranks' voxels take.
    """
    turned = [1 + axis.dim for axis in axes if axis.is_reversed]
    image = (labels.flip(turned) if turned else labels).permute(0, *(1 + axis.dim for axis in axes)).owned()
    along = tuple(DimStencil(d, InterpolationTable(axis.rows, axis.rows)) for d, axis in enumerate(axes, 1))
    plan = plan_stencil(image.layout, along, image.coordinate, "write_volume")
    x = gather_input_rows(image, plan)
    if plan.is_empty:
        return Tile(x.new_zeros(plan.shape), plan.out, image.mesh)
    touched = {d: (derived.needs[piece], derived.out.held[piece]) for d, derived, piece in plan.derived}
    for d, axis in enumerate(axes, 1):
        need, (start, stop) = touched.get(d, ((0, image.shape[d]), (0, len(axis.rows))))
        x = x.index_select(d, torch.tensor(axis.rows[start:stop], device=x.device) - need[0])
        first, last = (min(max(row, start), stop) - start for row in axis.inside)
        x.narrow(d, 0, first).zero_()
        x.narrow(d, last, stop - start - last).zero_()
    return Tile(x, plan.out, image.mesh)
