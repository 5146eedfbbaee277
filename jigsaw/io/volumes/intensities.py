"""Intensities of an image as it is read: clipped to a window, and scaled."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError
from jigsaw.io.series.statistics import PERCENTILE_PREFIX, Statistics

ChannelPair = tuple[NDArray[np.float64], NDArray[np.float64]]


@dataclass(frozen=True)
class ImageIntensities:
    """``x * scale + offset`` of each channel, and not below `low` nor above `high` afterwards, where there are any."""

    scale: tuple[float, ...]
    offset: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    @classmethod
    def of(cls, normalize: Any, window: Any, channels: int) -> ImageIntensities:
        """Make the intensities of an image. Raises: `FieldError` unless given (mean, std) and (low, high)."""
        pair = window
        if isinstance(window, Statistics):  # their lowest and highest percentile
            names = [name for name in window.columns if name.startswith(PERCENTILE_PREFIX)]
            names.sort(key=lambda name: float(name.removeprefix(PERCENTILE_PREFIX)))
            pair = [window.columns[name] for name in names[:1] + names[-1:]]
        ends = None if window is None else _channel_pair(pair, channels)
        if window is not None and (ends is None or not (ends[0] < ends[1]).all()):
            raise FieldError(
                f"window={window!r} must be (low, high), a number each or one for {channels} channels, low < high, or "
                "statistics with two percentiles"
            )
        if normalize is not None:
            mean, std = _given_mean_std(normalize, channels)
        elif ends is not None:
            mean, std = ends[0], ends[1] - ends[0]
        else:
            mean, std = np.zeros(channels), np.ones(channels)
        scale, offset = tuple((1 / std).tolist()), tuple((-mean / std + 0.0).tolist())
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
        """Say whether a scaled value is within the window of every channel."""
        return all(low <= value <= high for low, high in zip(self.low, self.high, strict=True))


def intensities_of_volumes(normalize: Any, window: Any, channels: int, volumes: int) -> tuple[ImageIntensities, ...]:
    """Return the intensities of each volume. Raises: `FieldError` for another number of statistics than volumes."""
    if isinstance(normalize, str | os.PathLike):
        normalize = Statistics.read(normalize)
    means, windows = (_one_a_volume(*each, volumes) for each in (("normalize", normalize), ("window", window)))
    return tuple(ImageIntensities.of(n, w, channels) for n, w in zip(means, windows, strict=True))


def _one_a_volume(name: str, value: Any, volumes: int) -> list[Any]:
    """Return one argument for each volume, from one for all or from a list of statistics."""
    if not isinstance(value, list) or not any(isinstance(entry, Statistics) for entry in value):
        return [value] * volumes
    if len(value) != volumes:
        raise FieldError(f"{name}= has {len(value)} statistics for {volumes} volumes; give one a volume, or one")
    return value


def _given_mean_std(normalize: Any, channels: int) -> ChannelPair:
    columns = (
        (normalize.columns.get("mean"), normalize.columns.get("std"))
        if isinstance(normalize, Statistics)
        else normalize
    )
    pair = _channel_pair(columns, channels)
    if pair is None:
        raise FieldError(
            f"normalize={normalize!r} must be (mean, std), a number each or one for {channels} channels, or what "
            "jigsaw.io.volume_statistics gives"
        )
    if not (pair[1] > 0).all():
        raise FieldError(f"normalize={normalize!r}: means must be finite and standard deviations above 0")
    return pair


def _channel_pair(pair: Any, channels: int) -> ChannelPair | None:
    """Return two finite numbers for each channel; None for anything else."""
    if not isinstance(pair, Sequence | np.ndarray) or isinstance(pair, str) or len(pair) != 2:
        return None
    try:
        a, b = (np.broadcast_to(np.asarray(v, np.float64), (channels,)) for v in pair)
    except (TypeError, ValueError):  # no numbers, or not one for each channel
        return None
    return (a, b) if np.isfinite(a).all() and np.isfinite(b).all() else None
