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
        ends = None if window is None else _channel_pair(_window_ends(window), channels)
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


def _one_a_volume(name: str, given: Any, volumes: int) -> list[Any]:
    """Return one argument for each volume, from one for all or from a list of statistics."""
    if not isinstance(given, list) or not any(isinstance(one, Statistics) for one in given):
        return [given] * volumes
    if len(given) != volumes:
        raise FieldError(f"{name}= has {len(given)} statistics for {volumes} volumes; give one a volume, or one")
    return given


def _window_ends(given: Any) -> Any:
    """Return the window as given; for statistics, their lowest and highest percentile."""
    if not isinstance(given, Statistics):
        return given
    numbers = sorted(float(n.removeprefix(PERCENTILE_PREFIX)) for n in given.columns if n.startswith(PERCENTILE_PREFIX))
    return [given.columns[f"{PERCENTILE_PREFIX}{q:g}"] for q in (numbers[:1] + numbers[-1:])]


def _given_mean_std(given: Any, channels: int) -> ChannelPair:
    columns = (given.columns.get("mean"), given.columns.get("std")) if isinstance(given, Statistics) else given
    pair = _channel_pair(columns, channels)
    if pair is None:
        raise FieldError(
            f"normalize={given!r} must be (mean, std), a number each or one for {channels} channels, or what "
            "jigsaw.io.volume_statistics gives"
        )
    if not (pair[1] > 0).all():
        raise FieldError(f"normalize={given!r}: means must be finite and standard deviations above 0")
    return pair


def _channel_pair(given: Any, channels: int) -> ChannelPair | None:
    """Return two finite numbers for each channel; None for anything else."""
    if not isinstance(given, Sequence | np.ndarray) or isinstance(given, str) or len(given) != 2:
        return None
    try:
        one, other = (np.broadcast_to(np.asarray(v, np.float64), (channels,)) for v in given)
    except (TypeError, ValueError):  # no numbers, or not one for each channel
        return None
    return (one, other) if np.isfinite(one).all() and np.isfinite(other).all() else None
