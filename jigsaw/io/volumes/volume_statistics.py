"""`volume_statistics`: mean, std, range and percentiles of volumes, exact, the same bits on every mesh.

Volumes are taken in slabs that follow from their chunks alone, shared out among the ranks. Percentiles are those of all
voxels, not of a sample, by a radix selection: the order of float32 is that of integers of 32 bits. A first pass counts
their upper halves, a second one the lower halves of those around a percentile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar, overload

import numpy as np
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import FieldError, ReadError
from jigsaw.geometry.cut import Interval
from jigsaw.io.arguments import is_real_number
from jigsaw.io.rank_results import place_in_mesh, results_of_ranks
from jigsaw.io.series.statistics import PERCENTILE_PREFIX, Statistics
from jigsaw.io.stats.moments import ChannelMoments
from jigsaw.io.volumes.volume_dataset import Volumes
from jigsaw.io.volumes.volume_listing import check_same_listing

T = TypeVar("T")
_HALF = 1 << 16

HalfCounts = NDArray[np.int64]
"""Counts of values by the 65536 upper (or lower) halves of their key."""


@overload
def volume_statistics(
    volumes: Volumes, *, percentiles: Sequence[float] = ..., foreground: bool = ..., each: Literal[False] = False
) -> Statistics: ...
@overload
def volume_statistics(
    volumes: Volumes, *, percentiles: Sequence[float] = ..., foreground: bool = ..., each: Literal[True]
) -> list[Statistics]: ...
def volume_statistics(
    volumes: Volumes,
    *,
    percentiles: Sequence[float] = (0.5, 99.5),
    foreground: bool = False,
    each: bool = False,
) -> Statistics | list[Statistics]:
    """Compute count, missing, mean, std, min, max and percentiles of every channel, over all voxels of all volumes.

    They are those of the voxels as stored, whatever crops, spacing or intensities the `volumes` are opened with; with
    ``box=``, of those in the boxes. Each
    rank of their mesh takes its share of slabs; every rank returns the same, with the same bits on every mesh. NaN is
    skipped and counted (`missing`), as are the voxels of channels that a volume lacks; a channel that all of them lack
    has NaN. std is the population's; values are float32, as they are read.

    - `percentiles`: as numpy's ``percentile`` has them, in the columns ``percentile_0.5`` …; they take a second pass
      over the files, an empty list none;
    - `foreground`: only voxels whose label is not 0, once ``label_map`` is applied, as nnU-Net normalizes CT; images
      without a label map are left out;
    - `each`: a list with the statistics of each volume.

    The result can be given to ``open_volumes(window=, normalize=)``, as can the list of `each`.

    *Sends*: a digest of the list; 512 KiB a channel to every other rank, then as much again, at most twice, for each
    percentile; with `each`, for each volume.

    Raises: `PeerError` where ranks list other volumes. `FieldError` for invalid percentiles, for `foreground` without
    labels, or where there is no foreground; the `ReadError` of a chunk. All are alike on every rank.

    >>> how = {"mesh": jigsaw.init_mesh(depth=1), "crop": (8, 8, 8)}
    >>> stats = jigsaw.io.volume_statistics(jigsaw.io.open_volumes(["scan.zarr"], **how))
    >>> sorted(stats.columns)
    ['count', 'max', 'mean', 'min', 'missing', 'percentile_0.5', 'percentile_99.5', 'std']
    >>> volumes = jigsaw.io.open_volumes(["scan.zarr"], window=stats, normalize=stats, **how)
    """
    if not isinstance(volumes, Volumes):  # pyright: ignore[reportUnnecessaryIsInstance] # what a user may pass
        raise FieldError(f"volume_statistics takes what open_volumes gives, not {type(volumes).__name__}")
    is_list = isinstance(percentiles, Sequence | np.ndarray)  # pyright: ignore[reportUnnecessaryIsInstance]
    if not is_list or not all(is_real_number(q) and 0 <= q <= 100 for q in percentiles):
        raise FieldError(f"percentiles={percentiles!r} must be numbers from 0 to 100, in a list like (0.5, 99.5)")
    if foreground and not volumes.labels:
        raise FieldError("foreground=True needs labels, and the volumes were opened without; give labels=")
    check_same_listing(None if volumes.mesh is None else volumes.device_mesh(), volumes.listing)
    numbers = [i for i in range(len(volumes.images)) if not foreground or volumes.labels[i] is not None]
    distinct_percentiles = tuple(dict.fromkeys(map(float, percentiles)))
    groups = [[i] for i in numbers] if each else [numbers]
    results = [_statistics_of_group(VolumeSlabs(volumes, group, foreground), distinct_percentiles) for group in groups]
    return results if each else results[0]


def _statistics_of_group(slabs: VolumeSlabs, percentiles: tuple[float, ...]) -> Statistics:
    channels = slabs.volumes.images[0].channels

    def look() -> tuple[list[NDArray[np.float64]], HalfCounts]:
        tables, uppers = list[NDArray[np.float64]](), np.zeros((channels, _HALF), np.int64)
        for values in slabs.mine():
            tables.append(ChannelMoments.of(values).table)
            for channel, numbers in enumerate(values if percentiles else ()):
                uppers[channel] += np.bincount(_ordered_keys(numbers) >> 16, minlength=_HALF)
        return tables, uppers

    by_rank = slabs.results(look)
    in_order = [by_rank[k % len(by_rank)][0][k // len(by_rank)] for k in range(len(slabs.windows))]
    columns = ChannelMoments.nothing(channels).add(map(ChannelMoments, in_order)).summary()
    present = np.any([slabs.volumes.images[number].present for number in slabs.numbers], axis=0)
    if not columns["count"][present].all():
        noun = "voxel of the foreground" if slabs.foreground else "number"
        raise FieldError(f"volume_statistics: {slabs.named()} has no {noun} in one of its channels")
    if percentiles:
        columns |= _percentile_columns(slabs, np.sum([uppers for _, uppers in by_rank], axis=0), percentiles)
    attrs = {"foreground": int(slabs.foreground), "volumes": len(slabs.numbers)}
    return Statistics(tuple(map(str, range(channels))), columns, attrs, f"statistics of {slabs.named()}")


def _percentile_columns(
    slabs: VolumeSlabs, uppers: HalfCounts, percentiles: tuple[float, ...]
) -> dict[str, NDArray[np.float64]]:
    """Find each percentile between two values of known places in the order, by a second pass."""
    starts = np.cumsum(uppers, axis=1) - uppers  # the number of values before each upper half
    counts = uppers.sum(axis=1)
    places = [sorted({at for q in percentiles for at in _places_around(q, int(n))[:2]}) if n else [] for n in counts]
    halves = [
        [int(np.searchsorted(start, at, "right")) - 1 for at in wanted]
        for start, wanted in zip(starts, places, strict=True)
    ]

    def look() -> dict[tuple[int, int], HalfCounts]:
        counted = {
            (c, half): np.zeros(_HALF, np.int64) for c, channel_halves in enumerate(halves) for half in channel_halves
        }
        for values in slabs.mine():
            keys = [_ordered_keys(numbers) for numbers in values]
            for channel, half in counted:
                own_keys = keys[channel]
                counted[channel, half] += np.bincount(own_keys[own_keys >> 16 == half] & (_HALF - 1), minlength=_HALF)
        return counted

    by_rank = slabs.results(look)
    values = [dict[int, float]() for _ in counts]
    for channel, (wanted, inside) in enumerate(zip(places, halves, strict=True)):
        for at, half in zip(wanted, inside, strict=True):
            lowers = np.cumsum(sum(each[channel, half] for each in by_rank))
            lower = int(np.searchsorted(lowers, at - starts[channel, half], "right"))
            key = half << 16 | lower
            bits = key ^ (1 << 31) if key >> 31 else ~key & 0xFFFFFFFF
            values[channel][at] = float(np.array(bits, np.uint32).view(np.float32))
    columns = dict[str, NDArray[np.float64]]()
    for q in percentiles:
        ends = [(*_places_around(q, int(n)), known) for n, known in zip(counts, values, strict=True)]
        columns[f"{PERCENTILE_PREFIX}{repr(q).removesuffix('.0')}"] = np.array(
            [known[a] + (known[b] - known[a]) * part if known else np.nan for a, b, part, known in ends]
        )
    return columns


def _places_around(q: float, count: int) -> tuple[int, int, float]:
    """Return the two places in the order of `count` values around a percentile, and how far past the first it is."""
    at = q / 100 * (count - 1)
    return int(at), min(int(at) + 1, count - 1), at - int(at)


def _ordered_keys(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return integers in the order of the numbers, without NaN: negative ones flip all bits, others the first."""
    bits = (values[~np.isnan(values)] + np.float32(0)).view(np.uint32)  # -0.0 counts as 0.0
    return np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))


@dataclass(frozen=True, eq=False)
class VolumeSlabs:
    """The voxels of some volumes, in slabs of whole chunks, shared out among the ranks of their mesh."""

    volumes: Volumes
    numbers: Sequence[int]
    foreground: bool

    def named(self) -> str:
        first = self.volumes.images[self.numbers[0]].url if self.numbers else "nothing"
        return first if len(self.numbers) < 2 else f"{first} and {len(self.numbers) - 1} others"

    @cached_property
    def windows(self) -> list[tuple[int, list[Interval]]]:
        return [(number, slab) for number in self.numbers for slab in self.volumes.images[number].slabs()]

    def _values(self, number: int, window: Sequence[Interval]) -> NDArray[np.float32]:
        values = self.volumes.images[number].read_window(window).astype(np.float32)
        label = self.volumes.labels[number] if self.foreground else None
        if label is None:
            return values.reshape(len(values), -1)
        labels = label.read_window(window)
        known = ~np.isnan(labels) if labels.dtype.kind == "f" else np.ones(labels.shape, bool)
        whole = self.volumes.renamed.applied(np.rint(labels) if labels.dtype.kind == "f" else labels)
        return values[:, ((whole != 0) & known).any(0)]

    def mine(self) -> Iterator[NDArray[np.float32]]:
        """Yield this rank's slabs: every one whose number leaves the rank's own when divided by the number of ranks."""
        me, ranks = place_in_mesh(self._mesh)
        for number, window in self.windows[me::ranks]:
            yield self._values(number, window)

    @property
    def _mesh(self) -> DeviceMesh | None:
        return None if self.volumes.mesh is None else self.volumes.device_mesh()

    def results(self, look: Callable[[], T]) -> list[T]:
        return results_of_ranks(self._mesh, look, ReadError)
