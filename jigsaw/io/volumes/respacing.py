"""Voxels as the user asks for them: intensities clipped to a window and scaled, at other distances than those stored.

The grid and the values are those of MONAI's ``Spacing``. The first voxel stays where it is, and beyond the last stored
row that row is repeated. For an oblique scan MONAI keeps the first voxel or the middle, depending on the last bits of
its affine. Each axis is resampled by itself, so a rank reads the stored rows that its own lie between.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jigsaw.errors import FieldError, GridError
from jigsaw.geometry.cut import Box, Cut, Interval, box_shape
from jigsaw.io.series.statistics import PERCENTILE_PREFIX, Statistics
from jigsaw.io.volumes.drawn_steps import VoxelStep

ChannelPair = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True)
class ImageIntensities:
    """``x * scale + offset`` of each channel, and not below `low` nor above `high` afterwards, where there are any."""

    scale: tuple[float, ...]
    offset: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @classmethod
    def of(cls, normalize: Any, window: Any, present: Sequence[bool]) -> ImageIntensities:
        """Make the intensities of an image; statistics may lack its channels that are not `present`.

        Raises: `FieldError` unless given (mean, std) and (low, high).
        """
        channels = len(present)
        pair = window
        if isinstance(window, Statistics):  # the lowest and the highest percentile
            names = [name for name in window.columns if name.startswith(PERCENTILE_PREFIX)]
            names.sort(key=lambda name: float(name.removeprefix(PERCENTILE_PREFIX)))
            pair = [window.columns[name] for name in names[:1] + names[-1:]]
        ends = None if window is None else _channel_pair(pair, present)
        if window is not None and (ends is None or not (ends[0] < ends[1]).all()):
            raise FieldError(
                f"window={window!r} must be (low, high), a number each or one for {channels} channels, low < high, or "
                "statistics with two percentiles"
            )
        if normalize is not None:
            mean, std = _given_mean_std(normalize, present)
        elif ends is not None:
            mean, std = ends[0], ends[1] - ends[0]
        else:
            mean, std = np.zeros(channels), np.ones(channels)
        with np.errstate(all="ignore"):
            factors, shifts = 1 / std, -mean / std + 0.0
        if not (np.isfinite(factors).all() and np.isfinite(shifts).all()):
            name, value = ("window", window) if normalize is None else ("normalize", normalize)
            raise FieldError(f"{name}={value!r} scales by infinity: widths this small cannot be divided by")
        scale, offset = tuple(factors.tolist()), tuple(shifts.tolist())
        if ends is None:
            return cls(scale, offset)
        low, high = (tuple(((end - mean) / std).tolist()) for end in ends)
        return cls(scale, offset, low, high)

    def clip_values(self, values: NDArray[Any]) -> None:
        r"""Clip scaled values [C, \*space], in place."""
        if self.low:
            low, high = (np.array(v, values.dtype).reshape(-1, *[1] * (values.ndim - 1)) for v in (self.low, self.high))
            np.clip(values, low, high, out=values)

    def holds(self, value: float) -> bool:
        return all(low <= value <= high for low, high in zip(self.low, self.high, strict=True))


def intensities_of_volumes(
    normalize: Any, window: Any, present: Sequence[Sequence[bool]]
) -> tuple[ImageIntensities, ...]:
    """Return the intensities of each volume, which has the channels that are `present`.

    Raises: `FieldError` for another number of statistics than volumes.
    """
    if isinstance(normalize, str | os.PathLike):
        normalize = Statistics.read(normalize)
    means, windows = (_one_a_volume(*each, len(present)) for each in (("normalize", normalize), ("window", window)))
    return tuple(ImageIntensities.of(n, w, p) for n, w, p in zip(means, windows, present, strict=True))


def _one_a_volume(name: str, value: Any, volumes: int) -> list[Any]:
    """Return one argument for each volume, from one for all or from a list of statistics."""
    if not isinstance(value, list) or not any(isinstance(entry, Statistics) for entry in value):
        return [value] * volumes
    if len(value) != volumes:
        raise FieldError(f"{name}= has {len(value)} statistics for {volumes} volumes; give one a volume, or one")
    return value


def _given_mean_std(normalize: Any, present: Sequence[bool]) -> ChannelPair:
    columns = (
        (normalize.columns.get("mean"), normalize.columns.get("std"))
        if isinstance(normalize, Statistics)
        else normalize
    )
    pair = _channel_pair(columns, present)
    if pair is None:
        raise FieldError(
            f"normalize={normalize!r} must be (mean, std), a number each or one for {len(present)} channels, or what "
            "jigsaw.io.volume_statistics gives"
        )
    if not (pair[1] > 0).all():
        raise FieldError(f"normalize={normalize!r}: means must be finite and standard deviations above 0")
    return pair


def _channel_pair(pair: Any, present: Sequence[bool]) -> ChannelPair | None:
    """Return two finite numbers for each channel; None for anything else.

    Statistics have none for a channel that is not `present`: it gets 0 and 1, which change nothing.
    """
    if not isinstance(pair, Sequence | np.ndarray) or isinstance(pair, str) or len(pair) != 2:
        return None
    try:
        a, b = (np.broadcast_to(np.asarray(v, np.float64), (len(present),)) for v in pair)
    except (TypeError, ValueError):  # not numbers, or not one for each channel
        return None
    a, b = (np.where(np.isnan(v) & ~np.asarray(present), n, v) for n, v in enumerate((a, b)))
    return (a, b) if np.isfinite(a).all() and np.isfinite(b).all() else None


_SAME_ROW = 1e-5
"""Distance within which rows are one: a header's float32 makes 0.9 mm 0.89999998, which must not cost another row."""
_ALIKE = 1e-3
"""Differences of distances below this keep them as stored, as in MONAI. For distances below 1 the difference is
relative, because files in meters have small ones. Axes closer to a right angle do not count as sheared.
"""


def checked_spacing(spacing: Any, dims: Sequence[str]) -> tuple[float, ...] | None:
    """Return a distance for each of `dims`. Raises: `FieldError` for anything that is not a distance."""
    if spacing is None:
        return None
    is_each = isinstance(spacing, Sequence | np.ndarray) and len(spacing) > 0
    distances: tuple[Any, ...] = tuple(spacing) if is_each else (spacing,) * len(dims)
    numbers = [n for n in distances if isinstance(n, int | float | np.number) and not isinstance(n, bool)]
    if len(distances) != len(dims) or len(numbers) < len(dims) or not all(0 < float(n) < math.inf for n in numbers):
        raise FieldError(
            f"spacing={spacing!r} must be a number > 0, or {len(dims)} of them, of the dims {', '.join(dims)}: the "
            "distance of voxels in the unit of the files, mm in most"
        )
    return tuple(map(float, distances))


@dataclass(frozen=True)
class GridRespacing:
    """Row i of the `sizes` along a dim lies at the row ``i * step`` of the `stored` ones."""

    stored: tuple[int, ...]
    sizes: tuple[int, ...]
    step: tuple[float, ...]

    @classmethod
    def of(
        cls, url: str, affine: NDArray[np.float64], dims: Sequence[str], stored: tuple[int, ...], asked: Sequence[float]
    ) -> GridRespacing | None:
        """Return the respacing from voxels that `affine` places to the distances `asked`; None where they have them.

        Raises: `GridError` for axes that are not at right angles.
        """
        axes = affine[:3, ["xyz".index(d) for d in dims]]
        have = np.linalg.norm(axes, axis=0)
        tilts = np.abs(np.triu((axes / have).T @ (axes / have), 1))
        if tilts.max(initial=0) > _ALIKE:
            a, b = divmod(int(tilts.argmax()), len(dims))
            apart = math.degrees(math.asin(min(1.0, tilts[a, b])))
            raise GridError(
                f"{url} is sheared: its axes {dims[a]} and {dims[b]} are {apart:.3g} degrees off a right angle, "
                "and spacing= resamples along each axis by itself; resample it beforehand, or leave spacing= out"
            )
        steps = [
            1.0 if abs(want - has) <= _ALIKE * min(1, has) else want / has
            for want, has in zip(asked, have, strict=True)
        ]
        sizes = [round((n - 1) / step + 1) for n, step in zip(stored, steps, strict=True)]
        return None if all(step == 1 for step in steps) else cls(stored, tuple(sizes), tuple(map(float, steps)))

    def respaced_affine(self, affine: NDArray[np.float64], dims: Sequence[str]) -> NDArray[np.float64]:
        respaced = affine.copy()
        for d, step in zip(dims, self.step, strict=True):
            respaced[:3, "xyz".index(d)] *= step
        return respaced

    def nearest_voxel(self, stored: Sequence[int]) -> tuple[int, ...]:
        places = zip(stored, self.step, self.sizes, strict=True)
        return tuple(min(round(row / step), size - 1) for row, step, size in places)

    def places(self, d: int, rows: Interval) -> NDArray[np.float64]:
        return np.minimum(np.arange(*rows, dtype=np.float64) * self.step[d], self.stored[d] - 1)


@dataclass(frozen=True)
class RespaceStep(VoxelStep):
    """Stored voxels to those of another grid: the window begins at the row `offset` of the new and of the old one.

    Images are interpolated linearly; labels (`nearest`) take the nearest stored voxel, of two as near that of the even
    row. Then images are clipped, and what lies beyond the volume is `fill`.
    """

    grid: GridRespacing
    offset: tuple[int, ...]
    nearest: bool
    fill: float
    intensities: ImageIntensities | None = None
    moves_labels: ClassVar[bool] = True

    def _inside(self, d: int, rows: Interval) -> Interval:
        """Return the rows of the window that lie in the volume, in rows of the new grid."""
        low, high = (min(max(row + self.offset[d], 0), self.grid.sizes[d]) for row in rows)
        return low, max(low, high)

    def _stored_rows(self, d: int, rows: Interval) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Return the stored row at or before each row, and how far on from it that row lies."""
        at = self.grid.places(d, rows)
        whole = np.rint(at)
        if not self.nearest:
            at = np.where(np.abs(at - whole) < _SAME_ROW, whole, at)
        below = whole if self.nearest else np.floor(at)
        return below.astype(np.int64), np.zeros_like(at) if self.nearest else at - below

    def needed(self, cuts: Sequence[Cut], sizes: Sequence[int]) -> list[Cut]:
        def reach(d: int, held: Interval) -> Interval:
            rows, start = self._inside(d, held), self.offset[d]
            if rows[0] == rows[1]:
                return -start, -start
            below, part = self._stored_rows(d, rows)
            return int(below[0]) - start, int(below[-1]) + 1 + int(part[-1] > 0) - start

        return [replace(cut, held=tuple(reach(d, held) for held in cut.held)) for d, cut in enumerate(cuts)]

    def applied(self, block: Tensor, source: Box, target: Box, sizes: Sequence[int], nearest: bool) -> Tensor:
        inside = [self._inside(d, rows) for d, rows in enumerate(target)]
        shape = box_shape(target)
        if any(a == b for a, b in inside):
            return block.new_full((block.shape[0], *shape), self.fill)
        for d, rows in enumerate(inside):
            block = self._between(block, d, rows, source[d][0])
        if self.intensities:
            self.intensities.clip_values(block.numpy())
        if tuple(block.shape[1:]) == shape:
            return block
        whole = block.new_full((block.shape[0], *shape), self.fill)
        spans = zip(inside, target, self.offset, strict=True)
        whole[(slice(None), *(slice(a - first - at, b - first - at) for (a, b), (first, _), at in spans))] = block
        return whole

    def _between(self, block: Tensor, d: int, rows: Interval, first: int) -> Tensor:
        """Interpolate the rows of a dim from a block that begins at the row `first` of the window."""
        below, part = self._stored_rows(d, rows)
        index = torch.from_numpy(below - self.offset[d] - first)
        lower = block.index_select(1 + d, index)
        if not part.any():
            return lower
        upper = block.index_select(1 + d, index + torch.from_numpy((part > 0).astype(np.int64)))
        weight = torch.from_numpy(part).to(block.dtype).reshape([-1 if k == d else 1 for k in range(block.ndim - 1)])
        # where a row is a stored one, both are that row, and infinite voxels have no difference
        return lower + ((upper - lower) * weight).masked_fill_(weight == 0, 0)
