"""Count, mean, variance and range of values that come in pieces, one number for each channel, in float64.

A piece is reduced in two passes; pieces are merged by Chan, Golub and LeVeque's formula (The American Statistician 37,
1983), which for a piece of one value is Welford's.  Sums of squares are never formed, so nothing cancels.  A checkpoint
holds the moments of the steps so far.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import StateError
from jigsaw.io.series.statistics import npz_bytes, replace_file

TileValues = NDArray[Any]
MomentValues = NDArray[np.float64]

MOMENT_ROWS = ("count", "missing", "weight", "mean", "m2", "min", "max")
_COUNT, _MISSING, _WEIGHT, _MEAN, _M2, _MIN, _MAX = range(len(MOMENT_ROWS))
_VALUES_AT_ONCE = 1 << 15
_MOMENTS_OF_NOTHING = np.array([0, 0, 0, 0, 0, np.inf, -np.inf])


@dataclass(frozen=True)
class ChannelMoments:
    """Moments of the values seen so far: `table` is [7, C] float64, a row for each of `MOMENT_ROWS`.

    The rows are the `count` of values, the `missing` NaN, the sum of weights, and the weighted mean. The weighted sum
    of squared deviations from the mean (`m2`) and the range follow. It holds numbers only, so that it is sent and
    stored as one array.
    """

    table: MomentValues

    @classmethod
    def nothing(cls, channels: int) -> ChannelMoments:
        return cls(np.repeat(_MOMENTS_OF_NOTHING[:, None], channels, axis=1))

    @classmethod
    def of(
        cls, tile: TileValues, weights: MomentValues | None = None, minus: TileValues | None = None
    ) -> ChannelMoments:
        r"""Compute the moments of a tile [C, \*space], or of its difference to the tile `minus`; NaN counts as missing.

        `weights` [\*space] weigh the rows; without them each value counts alike.
        """
        flat = None if weights is None else weights.reshape(-1)
        earlier = [None] * len(tile) if minus is None else minus
        columns = [_moments_of_channel(x, less, flat) for x, less in zip(tile, earlier, strict=True)]
        return cls(np.stack(columns, axis=1)) if columns else cls.nothing(0)

    def merge(self, other: ChannelMoments) -> ChannelMoments:
        """Return the moments of the values of both: exact up to rounding, in either order."""
        a, b = self.table, other.table
        out = a + b
        share = np.divide(b[_WEIGHT], out[_WEIGHT], out=np.zeros_like(out[_WEIGHT]), where=out[_WEIGHT] > 0)
        apart = b[_MEAN] - a[_MEAN]
        out[_MEAN] = a[_MEAN] + apart * share
        out[_M2] += apart * apart * a[_WEIGHT] * share
        out[_MIN], out[_MAX] = np.minimum(a[_MIN], b[_MIN]), np.maximum(a[_MAX], b[_MAX])
        return ChannelMoments(out)

    def add(self, others: Iterable[ChannelMoments]) -> ChannelMoments:
        """Merge others into these one after the other: the order decides the last bits."""
        total = self
        for other in others:
            total = total.merge(other)
        return total

    def summary(self) -> dict[str, MomentValues]:
        """Return count, missing, mean, std (of the population: divided by the weight), min and max, each [C]; NaN if
        empty.

        With area weights mean and std are those over the sphere.
        """
        t = self.table
        is_any = t[_COUNT] > 0
        variance = np.divide(t[_M2], t[_WEIGHT], out=np.full_like(t[_M2], np.nan), where=t[_WEIGHT] > 0)
        alike = t[_MIN] == t[_MAX]  # a rounded mean would give constant values a std of 1e-13
        mean, std = np.where(alike, t[_MIN], t[_MEAN]), np.where(alike, 0.0, np.sqrt(variance))
        columns = {"mean": mean, "std": std, "min": t[_MIN], "max": t[_MAX]}
        blank = {name: np.where(is_any, values, np.nan) for name, values in columns.items()}
        return {"count": t[_COUNT].copy(), "missing": t[_MISSING].copy(), **blank}


def _moments_of_channel(x: TileValues, less: TileValues | None, weights: MomentValues | None) -> MomentValues:
    """Return the column of one channel, in pieces that stay in the processor's cache."""
    flat, earlier = x.reshape(-1), None if less is None else less.reshape(-1)
    starts = range(0, flat.size, _VALUES_AT_ONCE)
    pieces = [_moments_of_slice(flat, earlier, weights, slice(i, i + _VALUES_AT_ONCE)) for i in starts]
    return _merge_columns(np.array(pieces)) if pieces else _MOMENTS_OF_NOTHING


def _moments_of_slice(
    x: TileValues, less: TileValues | None, weights: MomentValues | None, at: slice
) -> tuple[float, ...]:
    wide = x[at].astype(np.float64)
    if less is not None:
        wide -= less[at]
    w, lost, total = None if weights is None else weights[at], 0, wide.sum()
    if np.isnan(total):
        is_present = ~np.isnan(wide)
        lost = len(wide) - int(np.count_nonzero(is_present))
        wide, w = wide[is_present], None if w is None else w[is_present]
        total = wide.sum()
    weight = float(len(wide)) if w is None else float(w.sum())
    if not weight > 0:
        return len(wide), lost, 0, 0, 0, np.inf, -np.inf
    low, high = wide.min(), wide.max()
    mean = (total if w is None else np.einsum("i,i->", wide, w)) / weight
    wide -= mean
    m2 = np.einsum("i,i->", wide, wide) if w is None else np.einsum("i,i,i->", wide, wide, w)
    return len(wide), lost, weight, mean, m2, low, high


def _merge_columns(pieces: MomentValues) -> MomentValues:
    """Return the column of pieces [n, 7]: Chan's formula for all of them at once."""
    weight, means = pieces[:, _WEIGHT], pieces[:, _MEAN]
    out = pieces.sum(axis=0)
    out[_MEAN] = (weight * means).sum() / out[_WEIGHT] if out[_WEIGHT] > 0 else 0.0
    out[_M2] += (weight * (means - out[_MEAN]) ** 2).sum()
    out[_MIN], out[_MAX] = pieces[:, _MIN].min(), pieces[:, _MAX].max()
    return out


MomentTables = NDArray[np.float64]
_CHECKPOINT_FORMAT = "jigsaw statistics checkpoint 1"


@dataclass(frozen=True)
class StepBlock:
    """The moments of some steps up to `stop`, one by one: `values`, and `differences` to the step before each."""

    stop: int
    values: Sequence[ChannelMoments]
    differences: Sequence[ChannelMoments]


@dataclass
class StatisticsState:
    """The moments of all `done` steps: `tables` is [2, 7, C], of the values and of the differences."""

    done: int
    tables: MomentTables

    def add(self, block: StepBlock) -> None:
        """Add one block, step by step, so that the sizes of blocks do not change a bit of the result."""
        pairs = zip(self.tables, (block.values, block.differences), strict=True)
        self.tables = np.stack([ChannelMoments(table).add(moments).table for table, moments in pairs])
        self.done = block.stop


def save_moments(path: Path, identity: Mapping[str, Any], done: int, tables: MomentTables) -> None:
    """Put a checkpoint in place, whole: `tables` is [ranks, 2, 7, C].

    Raises: `WriteError` when it cannot be written; the one before stays.
    """
    about = json.dumps({"format": _CHECKPOINT_FORMAT, "done": done, "of": dict(identity)})
    remedy = "run it again with resume=True (--resume): it goes on from the last checkpoint"
    replace_file(path, npz_bytes({"about": np.array(about), "tables": tables}), remedy)


def load_moments(path: Path, identity: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, MomentTables] | None:
    """Return the steps done and the tables of a checkpoint; None when it does not exist yet.

    Raises: `StateError` for a file that is not a checkpoint, or one of other statistics, naming what differs.
    """
    _check_folder_of_checkpoint(path)
    if not path.exists():
        return None
    about, tables = _read_checkpoint(path)
    done, facts, known = about["done"], about["of"], about["format"] == _CHECKPOINT_FORMAT
    own_facts = json.loads(json.dumps(dict(identity)))
    differing = [name for name in own_facts if facts.get(name) != own_facts[name]]
    if differing:
        name = differing[0]
        raise StateError(
            f"checkpoint {str(path)!r} is of {name} {facts.get(name)!r}, this run of {own_facts[name]!r}; "
            "run it as before, or remove the checkpoint to begin anew"
        )
    if not known or tables.shape != shape:
        raise StateError(f"checkpoint {str(path)!r} has tables {list(tables.shape)}, not {list(shape)}; remove it")
    return done, tables


def check_moments(path: Path) -> None:
    """Raise `StateError` where a checkpoint would replace a file that is not a checkpoint of statistics."""
    _check_folder_of_checkpoint(path)
    if os.path.lexists(path) and not path.is_symlink():
        _ = _read_checkpoint(path)


def _check_folder_of_checkpoint(path: Path) -> None:
    if not path.parent.is_dir():
        raise StateError(f"checkpoint {str(path)!r} is in a folder that is not there; make it first")


def _read_checkpoint(path: Path) -> tuple[dict[str, Any], MomentTables]:
    try:
        with np.load(path, allow_pickle=False) as file:
            about, tables = json.loads(str(file["about"])), np.asarray(file["tables"], dtype=np.float64)
        return {"done": int(about["done"]), "of": dict(about["of"]), "format": str(about["format"])}, tables
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as broken:
        raise StateError(f"checkpoint {str(path)!r} cannot be read ({broken}); remove it to begin anew") from broken
