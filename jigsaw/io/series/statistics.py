"""`Statistics`: mean, std and range of each channel, from jigsaw's own files, makani's and GraphCast's.

`Statistics.read` reads

- jigsaw's own: ``stats.nc`` (a variable for each statistic along a dim ``channel``), ``.npz`` (the same arrays) or
  ``.json`` (an object for each channel);
- makani: a folder with ``global_means.npy``, ``global_stds.npy`` and optionally ``time_diff_means.npy``,
  ``time_diff_stds.npy``, ``mins.npy``, ``maxs.npy``, each [1, C, 1, 1]. They lack names: the channels are taken in
  order, or named by `fields`;
- GraphCast: a folder (or any one of the files) with ``mean_by_level.nc``, ``stddev_by_level.nc`` and optionally
  ``diffs_stddev_by_level.nc``, ``min_by_level.nc``, all with the same prefix or none. A scalar variable is a surface
  field, one along ``level`` a channel for each level.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError
from jigsaw.io.series.fields import FieldChannel, quantity_and_level

ChannelValues = NDArray[np.float64]
StatisticsPath = str | os.PathLike[str]

VALUE_STATISTICS = ("count", "missing", "mean", "std", "min", "max")
ALL_STATISTICS = (*VALUE_STATISTICS, *(f"diff_{name}" for name in VALUE_STATISTICS))
PERCENTILE_PREFIX = "percentile_"


def is_statistic(name: str) -> bool:
    """Say whether a column of this name is a statistic."""
    return name in ALL_STATISTICS or name.startswith(PERCENTILE_PREFIX)


@dataclass(frozen=True, eq=False)
class Statistics(Mapping[str, dict[str, float]]):
    """Statistics of channels: ``stats["t2m"]["mean"]``, or ``stats.columns["mean"]`` for all of them, [C] float64.

    The statistics are ``count, missing, mean, std, min, max`` of the values; ``diff_count`` … ``diff_max`` are those of
    the differences between consecutive steps, in the units of the fields. A file of another origin has some of them,
    and those of volumes have ``percentile_0.5`` … instead of differences. `fields` is empty where the file lacks names.
    `attrs` describe the data that they were taken of.

    >>> data = jigsaw.io.open("globe.zarr", mesh=jigsaw.init_mesh(lat=1), fields=["t2m"])
    >>> jigsaw.io.statistics(data).write("stats.json")
    >>> stats = jigsaw.io.Statistics.read("stats.json")
    >>> stats["t2m"]["mean"], stats["t2m"]["diff_mean"]
    (283.5, 1.0)
    """

    fields: tuple[str, ...]
    columns: Mapping[str, ChannelValues]
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: str = "statistics"

    def __post_init__(self) -> None:
        if not self.columns:
            raise FieldError(f"{self.source} has no statistics; it needs some of {list(ALL_STATISTICS)}")
        lengths = {name: len(v) for name, v in self.columns.items()}
        if len(set(lengths.values())) > 1 or (self.fields and set(lengths.values()) != {len(self.fields)}):
            named = f" for the {len(self.fields)} fields {_fields_text(self.fields)}" if self.fields else ""
            raise FieldError(f"{self.source} has {lengths} channels{named}; every statistic needs a number a channel")

    @property
    def channels(self) -> int:
        """The number of channels, named or not."""
        return len(next(iter(self.columns.values())))

    def __len__(self) -> int:
        return len(self.fields)

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __getitem__(self, field: str) -> dict[str, float]:
        if field not in self.fields:
            raise KeyError(field)
        at = self.fields.index(field)
        return {name: float(v[at]) for name, v in self.columns.items()}

    @classmethod
    def read(
        cls, path: StatisticsPath | Mapping[str, StatisticsPath], fields: Sequence[str] | None = None
    ) -> Statistics:
        """Read a file or folder, or one file for each statistic: ``{"mean": "m.npy", "std": "s.npy"}`` (`.npy` or
        NetCDF).

        `fields` names the channels of files that lack names, in their order.

        Raises: `FieldError` for a path that does not exist or does not hold statistics, and for another number of names
        than channels.
        """
        from jigsaw.io.series import statistics_files as stats_files

        return stats_files.read_statistics(path, None if fields is None else tuple(fields))

    def write(self, path: StatisticsPath) -> None:
        """Write ``.nc``, ``.npz`` or ``.json``; the file appears when it is complete.

        Raises: `FieldError` for another ending.
        """
        from jigsaw.io.series import statistics_files as stats_files

        stats_files.write_statistics(self, path)

    def mean_std(self, channels: Sequence[FieldChannel]) -> dict[str, tuple[float, float]]:
        """Return the mean and std of every channel by its name: what `normalize=` takes.

        A channel is found by its own name, else by its quantity and level under any name of `jigsaw.io.series.fields`:
        ``z500`` is ``geopotential@500``.  Levels are compared as numbers, so their units must be the same.

        Raises: `FieldError` for a missing channel, or when nothing has names and the numbers differ.
        """
        lacking = [name for name in ("mean", "std") if name not in self.columns]
        if lacking:
            raise FieldError(f"{self.source} has no {lacking[0]!r}; it has {sorted(self.columns)}")
        places = [self._place(i, c, len(channels)) for i, c in enumerate(channels)]
        mean, std = self.columns["mean"], self.columns["std"]
        return {c.name: (float(mean[i]), float(std[i])) for c, i in zip(channels, places, strict=True)}

    def _place(self, position: int, channel: FieldChannel, channels: int) -> int:
        if not self.fields:
            if self.channels != channels:
                raise FieldError(
                    f"{self.source} has {self.channels} channels without names and the dataset has {channels}; "
                    "name them: Statistics.read(path, fields=[…])"
                )
            return position
        if channel.name in self.fields:
            return self.fields.index(channel.name)
        wanted = quantity_and_level(channel.name)
        for i, name in enumerate(self.fields):
            if quantity_and_level(name) == wanted:
                return i
        raise FieldError(f"{self.source} has no channel {channel.name!r}; it has {_fields_text(self.fields)}")


def _fields_text(fields: Sequence[str], most: int = 40) -> str:
    more = f" and {len(fields) - most} more" if len(fields) > most else ""
    return ", ".join(fields[:most]) + more
