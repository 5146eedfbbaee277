"""Normalization as one multiply-add for each channel: (x - mean) / std = x * scale + offset."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jigsaw.errors import FieldError
from jigsaw.io.chunks.array_table import ArrayStore
from jigsaw.io.series.fields import FieldChannel, quantity_and_level
from jigsaw.io.series.statistics import Statistics

_STORED_STATISTICS = {"mean": "mean", "std": "stdev", "min": "minimum", "max": "maximum"}
NormalizeArgument = Mapping[str, Any] | Statistics | str | os.PathLike[str] | None


def with_stored_statistics(normalize: NormalizeArgument, store: ArrayStore) -> NormalizeArgument:
    """Return the argument as given; for ``"store"``, the store's own statistics, as anemoi-datasets writes them.

    Raises: `FieldError` where the store has none.
    """
    if not (isinstance(normalize, str) and normalize == "store"):
        return normalize
    names = store.attrs.get("variables")
    stored = {name: theirs for name, theirs in _STORED_STATISTICS.items() if theirs in store.arrays}
    if not isinstance(names, list) or not {"mean", "std"} <= set(stored):
        raise FieldError(
            f"normalize='store' needs statistics in the store {store.url}: an attribute 'variables' and the arrays "
            f"{list(_STORED_STATISTICS.values())}; compute some with jigsaw.io.statistics"
        )
    columns = {name: store.read_small(theirs).astype(np.float64) for name, theirs in stored.items()}
    return Statistics(tuple(map(str, names)), columns, source=f"statistics of {store.url}")


def channel_scales(
    channels: Sequence[FieldChannel], normalize: NormalizeArgument
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return scale and offset of every channel, from ``{"t2m": (mean, std)}`` or ``{"t2m": {"mean": …, "std": …}}``.

    A key is a channel (``geopotential@500``) under any name of `jigsaw.io.series.fields`, a field as it was asked for,
    or an array of the store. For a field of several levels mean and std may be sequences, one value for each level. A
    file of statistics, or `Statistics`, may have more channels than are read.
    """
    if normalize is None:
        return (1.0,) * len(channels), (0.0,) * len(channels)
    if isinstance(normalize, str | os.PathLike):
        normalize = Statistics.read(normalize)
    if isinstance(normalize, Statistics):
        normalize = normalize.mean_std(channels)
    if not isinstance(normalize, Mapping):
        raise FieldError(
            f"normalize={normalize!r} must be (mean, std) by field, Statistics, or the path of a file of statistics"
        )
    by_name = _by_own_names(normalize, channels)
    pairs = [_mean_and_std(c, channels, by_name) for c in channels]
    return tuple(1.0 / std for _, std in pairs), tuple(-mean / std for mean, std in pairs)


def _by_own_names(normalize: Mapping[str, Any], channels: Sequence[FieldChannel]) -> dict[str, Any]:
    """Return `normalize` under the names that the channels have here."""
    strange = [key for key in normalize if not isinstance(key, str)]
    if strange:
        raise FieldError(f"normalize names {strange[0]!r}, which is no string; its keys are names of fields")
    own = {name for c in channels for name in (c.name, c.field, c.array)}
    meant = {quantity_and_level(c.name): c.name for c in channels}
    other = {key: meant.get(quantity_and_level(key)) for key in normalize if key not in own}
    unknown = sorted(key for key, name in other.items() if name is None)
    if unknown:
        raise FieldError(
            f"normalize has {unknown[0]!r}, which is no field; the channels are {[c.name for c in channels]}"
        )
    return {name: normalize[key] for key, name in other.items() if name} | {
        k: normalize[k] for k in normalize if k in own
    }


def _mean_and_std(
    channel: FieldChannel, channels: Sequence[FieldChannel], normalize: Mapping[str, Any]
) -> tuple[float, float]:
    key = next((k for k in (channel.name, channel.field, channel.array) if k in normalize), None)
    if key is None:
        raise FieldError(f"normalize has no mean and std for channel {channel.name!r}; it has {sorted(normalize)}")
    pair = normalize[key]
    try:
        mean, std = (pair["mean"], pair["std"]) if isinstance(pair, Mapping) else pair
        mean, std = _pick_level(mean, channel, channels), _pick_level(std, channel, channels)
    except (KeyError, TypeError, ValueError, IndexError):
        raise FieldError(
            f"normalize[{key!r}]={pair!r} must be (mean, std) or {{'mean': …, 'std': …}}, numbers or one a level"
        ) from None
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise FieldError(
            f"normalize[{key!r}] gives channel {channel.name!r} mean {mean:g} and std {std:g}; "
            "need finite numbers and std > 0"
        )
    return mean, std


def _pick_level(value: Any, channel: FieldChannel, channels: Sequence[FieldChannel]) -> float:
    """Return a number, or this channel's entry in a list with one for each level of its field."""
    values = np.asarray(value, dtype=np.float64)
    if values.ndim == 0:
        return float(values)
    siblings = [c for c in channels if c.field == channel.field]
    if values.shape != (len(siblings),):
        raise ValueError(values.shape)
    return float(values[siblings.index(channel)])
