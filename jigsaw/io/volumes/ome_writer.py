"""OME-Zarr with its levels: each rank makes its own part of every level from the level before.

The metadata are those of OME-NGFF 0.5 (https://ngff.openmicroscopy.org/0.5/), on Zarr v3. A level halves the rows of
the one before along each dim whose voxels are less than twice as long as the shortest. So voxels become cubes. An odd
row at the end stays by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jigsaw.errors import GridError, WriteError
from jigsaw.geometry.cut import Cut
from jigsaw.geometry.layout import Layout
from jigsaw.io.series.times import is_whole_number
from jigsaw.io.volumes.volume import VOLUME_DIMS, AffineMatrix
from jigsaw.io.writing.deliver import StoreCompleteness, deliver_boxes, gather_results
from jigsaw.io.writing.outline import ArrayOutline, TileSource
from jigsaw.io.writing.zarr_writer import ZarrSink
from jigsaw.ranks.mesh import mesh_coordinate
from jigsaw.tile.tile import Tile

COARSER_RULES = ("mean", "mode")
_CHUNK_ROWS = 64
_SMALL_SIDE = 256  # longest side of the last level, where the number of levels is not given
_BUDGET_BYTES = 256 << 20
_MOST_TILT = 1e-4


@dataclass(frozen=True)
class PyramidLevel:
    """One level along z, y, x: sizes, how many rows of the level before make one row, spacing and origin."""

    sizes: tuple[int, ...]
    factors: tuple[int, ...]
    spacing: tuple[float, ...]
    origin: tuple[float, ...]

    def coarser(self) -> PyramidLevel | None:
        """Return the next level; None where no dim is left to halve."""
        lengths = [step for n, step in zip(self.sizes, self.spacing, strict=True) if n > 1]
        if not lengths:
            return None
        rows = zip(self.sizes, self.spacing, strict=True)
        factors = tuple(2 if n > 1 and step < 2 * min(lengths) else 1 for n, step in rows)
        return PyramidLevel(
            tuple(-(-n // f) for n, f in zip(self.sizes, factors, strict=True)),
            factors,
            tuple(step * f for step, f in zip(self.spacing, factors, strict=True)),
            tuple(at + step * (f - 1) / 2 for at, step, f in zip(self.origin, self.spacing, factors, strict=True)),
        )


def pyramid_levels(sizes: Sequence[int], affine: AffineMatrix, levels: int | None) -> list[PyramidLevel]:
    """Return the levels of a volume.

    Raises: `WriteError` for an impossible number of levels; `GridError` for an affine that the format cannot store.
    """
    if levels is not None and (not is_whole_number(levels) or levels < 1):
        raise WriteError(f"levels={levels!r} must be a whole number >= 1, the volume itself counted")
    at = [2, 1, 0]  # z, y, x of an affine's x, y, z
    steps = np.diag(affine)[at]
    if (
        np.abs(affine[:3, :3] - np.diag(np.diag(affine)[:3])).max() > _MOST_TILT * np.abs(steps).max()
        or steps.min() <= 0
    ):
        raise GridError(
            f"OME-Zarr stores spacings and an origin, and no rotation, but the affine {affine.tolist()} has one; open "
            "the volumes with orientation='RAS', write .nii, or give affine="
        )
    steps_down = [PyramidLevel(tuple(sizes), (1, 1, 1), tuple(steps.tolist()), tuple(affine[at, 3].tolist()))]
    while len(steps_down) < levels if levels is not None else max(steps_down[-1].sizes) > _SMALL_SIDE:
        further = steps_down[-1].coarser()
        if further is None:
            raise WriteError(
                f"levels={levels}: a volume of {tuple(sizes)} has only {len(steps_down)}; the last is one voxel"
            )
        steps_down.append(further)
    return steps_down


def ome_attributes(
    name: str, levels: Sequence[PyramidLevel], has_channels: bool, unit: str, rule: str
) -> dict[str, Any]:
    """Return the attributes of the group; a channel dim comes first, where there is one, with a step of 1."""
    channel = [{"name": "c", "type": "channel"}] * has_channels
    lead = [1.0] * has_channels
    datasets = [
        {
            "path": str(number),
            "coordinateTransformations": [
                {"type": "scale", "scale": [*lead, *level.spacing]},
                {"type": "translation", "translation": [*(0.0 for _ in lead), *level.origin]},
            ],
        }
        for number, level in enumerate(levels)
    ]
    axes = [*channel, *({"name": d, "type": "space", "unit": unit} for d in VOLUME_DIMS)]
    return {
        "ome": {"version": "0.5", "multiscales": [{"name": name, "axes": axes, "datasets": datasets, "type": rule}]}
    }


def write_pyramid(
    where: Path, image: Tile, kind: np.dtype[Any], levels: Sequence[PyramidLevel], unit: str, rule: str, replaces: bool
) -> None:
    """Write a tile [C, z, y, x] and its coarser levels.

    *Sends*: rows that another rank needs for its part of a level, or for a chunk that it writes; never a whole level.
    *Raises*: `WriteError` when anything fails on any rank.
    """
    has_channels = image.shape[0] > 1
    mesh, sink = image.mesh, ZarrSink(where, None, {}, "it is incomplete; write it again")
    sources = list[TileSource]()
    for number, level in enumerate(levels):
        image = coarser_tile(image, level.factors, rule) if number else image
        image = image.round() if kind.kind in "iu" and image.dtype.is_floating_point else image
        shape, dims = tuple(image.shape), ("c", *VOLUME_DIMS)
        chunks = (1, *(max(1, min(n, _CHUNK_ROWS)) for n in shape[1:]))
        kept = slice(None) if has_channels else slice(1, None)
        tile = image if has_channels else image[0]
        array = ArrayOutline(str(number), dims[kept], shape[kept], kind.name, chunks[kept], None, {})
        sources.append(TileSource(tile, array))
    arrays, first = [source.array for source in sources], not any(mesh_coordinate(mesh))
    attrs = ome_attributes(where.name.partition(".")[0], levels, has_channels, unit, rule)
    try:
        gather_results(mesh, lambda: sink.create(arrays, (), attrs, replaces) if first else None)
        gather_results(mesh, lambda: sink.attach(arrays))
        for source in sources:
            deliver_boxes(source, mesh, sink, None, 0, _BUDGET_BYTES)
        done = StoreCompleteness(None, 0, closed=True)
        gather_results(mesh, lambda: sink.commit((), 0, done) if first else None)
    finally:
        sink.close(done=True)


def coarser_tile(tile: Tile, factors: Sequence[int], rule: str) -> Tile:
    """Return a tile [C, z, y, x] in which every `factors` rows have become one.

    *Sends*: the rows beyond the last whole block of a rank, to the next.
    """
    wide = [(cut, f) for cut, f in zip(tile.layout.cuts, (1, *factors), strict=True)]
    even = [Cut(c.size, (*(p // f * f for p in c.points[:-1]), c.size), c.axes) for c, f in wide]
    block = tile.with_layout(Layout(tuple(even), tile.layout.axes)).local
    halved = [
        Cut(-(-c.size // f), tuple(-(-p // f) for p in c.points), c.axes) for c, (_, f) in zip(even, wide, strict=True)
    ]
    # the last row of an odd dim is repeated, which changes neither mean nor mode
    for d, f in enumerate(factors, start=1):
        if f == 2 and block.shape[d] % 2:
            block = torch.cat([block, block.narrow(d, block.shape[d] - 1, 1)], d)
    coarse = (_mean_of_blocks if rule == "mean" else _mode_of_blocks)(block, factors)
    return Tile(coarse.to(block.dtype), Layout(tuple(halved), tile.layout.axes), tile.mesh)


def _mean_of_blocks(block: Tensor, factors: Sequence[int]) -> Tensor:
    # sums of two, one dim after the other, are the same bits wherever a rank's part begins
    values = block if block.is_floating_point() else block.to(torch.float64)
    for d, f in enumerate(factors, start=1):
        if f == 2:
            pairs = values.unflatten(d, (-1, 2))
            values = (pairs.select(d + 1, 0) + pairs.select(d + 1, 1)) / 2
    return values if block.is_floating_point() else values.round()


def _mode_of_blocks(block: Tensor, factors: Sequence[int]) -> Tensor:
    """Return the most frequent value of each block, and of several the smallest."""
    steps = [
        tuple(slice(first, None, f) for first, f in zip(start, factors, strict=True))
        for start in product(*map(range, factors))
    ]
    corners = torch.stack([block[(slice(None), *each)] for each in steps], -1).sort(-1).values
    best, most = corners[..., 0], torch.zeros(corners.shape[:-1], dtype=torch.int64, device=block.device)
    run = torch.ones_like(most)
    for before, value in pairwise(corners.unbind(-1)):
        run = torch.where(value == before, run + 1, 1)
        longer = run > torch.clamp(most, min=1)
        best, most = torch.where(longer, value, best), torch.where(longer, run, most)
    return best
