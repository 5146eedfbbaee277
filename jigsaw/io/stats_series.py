"""The steps that statistics run over: which follow which, how rows weigh, how many are read together."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.io.dataset import Dataset
from jigsaw.io.errors import FieldError, GridError, WindowError
from jigsaw.io.moments import Float

WEIGHTS = ("none", "area")
_BLOCK_BYTES = 1 << 27
_SECONDS = {"s": 1, "min": 60, "h": 3600, "d": 86400}


@dataclass(frozen=True)
class Series:
    """A dataset of single steps, and for each step whether the one before it is the one before it in time."""

    dataset: Dataset
    follows: NDArray[np.bool_]
    every: str
    weights: str
    block: int

    @classmethod
    def of(cls, dataset: Dataset, every: Any, weights: str, block: int | None) -> Series:
        """Check what is asked, and thin the steps.

        Raises: `FieldError` for a dataset of windows, `WindowError` for a frequency that the steps do not have,
        `GridError` for area weights without latitudes.
        """
        if len(dataset.inputs) != 1 or dataset.targets:
            raise FieldError(
                f"statistics read each step once, but the dataset has inputs={list(dataset.inputs)} and "
                f"targets={list(dataset.targets)}; open it with inputs=[0] and no targets"
            )
        if weights not in WEIGHTS:
            raise FieldError(f"weights={weights!r} must be one of {WEIGHTS}")
        if weights == "area" and "lat" not in dataset.frame.dims:
            raise GridError(f"weights='area' needs a lat dim, and the fields have {dataset.frame.dims}; use 'none'")
        if block is not None and block < 1:
            raise FieldError(f"block={block} must be at least 1, the steps that a rank reads together")
        thin = dataset if every is None else _thinned(dataset, every)
        follows = _follows(elapsed(thin))
        return cls(thin, follows, str(every or "step"), weights, min(block or _block(thin), len(thin)))

    def __len__(self) -> int:
        return len(self.dataset)

    def row_weights(self, box: Sequence[tuple[int, int]]) -> Float | None:
        r"""The weights [\*space] of the rows of a spatial box; 1 on average over the globe."""
        if self.weights == "none":
            return None
        shape = tuple(b - a for a, b in box)
        dim = self.dataset.frame.dims.index("lat")
        mine = area(np.asarray(self.dataset.whole_coords["lat"], dtype=np.float64))[slice(*box[dim])]
        lined = mine.reshape([-1 if d == dim else 1 for d in range(len(shape))])
        return np.ascontiguousarray(np.broadcast_to(lined, shape))

    def identity(self) -> dict[str, Any]:
        """What a checkpoint must have in common with the run that goes on with it."""
        d = self.dataset
        steps = hashlib.sha256(np.ascontiguousarray(d.anchors + d.inputs[0]).tobytes()).hexdigest()[:16]
        scales = [x.hex() for x in (*d.scale, *d.offset)]
        scaled = hashlib.sha256(repr((scales, d.nan, sorted(d.select.items()))).encode()).hexdigest()[:16]
        sizes = dict(zip(d.frame.dims, d.frame.sizes, strict=True))
        return {
            "store": d.store.url,
            "fields": list(d.fields),
            "sizes": sizes,
            "steps": f"{len(self)} ({steps})",
            "every": self.every,
            "values": f"{d.dtype} ({scaled})",
            "weights": self.weights,
            "mesh": [list(axis) for axis in d.frame.axes if axis[1] > 1],
            "cuts": [list(c.points) for c in d.layout.cuts[2:]],
        }

    def attrs(self) -> dict[str, Any]:
        """What the statistics were taken of."""
        d = self.dataset
        first, last = d.input_times(0)[0], d.input_times(len(d) - 1)[0]
        return {
            "store": d.store.url,
            "first": str(first),
            "last": str(last),
            "steps": len(d),
            "every": self.every,
            "weights": self.weights,
        }


def area(lat: Float) -> Float:
    """The share of the sphere of each latitude row, 1 on average: rows reach half-way to their neighbours or the pole.

    Raises: `GridError` for latitudes that do not rise or fall, or lie beyond the poles.
    """
    steps = np.diff(lat)
    if not (np.all(steps > 0) or np.all(steps < 0)) or np.abs(lat).max() > 90 + 1e-4:
        raise GridError("weights='area' needs latitudes that rise or fall, from -90 to 90 degrees; use 'none'")
    if len(lat) == 1:
        return np.ones(1)
    middle = (lat[:-1] + lat[1:]) / 2
    ends = lat[0] - steps[0] / 2, lat[-1] + steps[-1] / 2
    edges = np.clip(np.concatenate([[ends[0]], middle, [ends[1]]]), -90, 90)
    cells = np.abs(np.diff(np.sin(np.deg2rad(edges))))
    return cells / cells.mean()


def elapsed(dataset: Dataset) -> Float:
    """The time of each step, in seconds on one scale, or as the store's plain numbers."""
    stamps = dataset.times[dataset.anchors + dataset.inputs[0]]
    if stamps.dtype.kind == "M":
        return stamps.astype("datetime64[us]").astype(np.int64) / 1e6
    if stamps.dtype.kind == "O":
        return np.array([(t - stamps[0]).total_seconds() for t in stamps])
    return stamps.astype(np.float64)


def _usual(times: Float) -> float:
    return float(np.median(np.diff(times))) if len(times) > 1 else 0.0


def _follows(times: Float) -> NDArray[np.bool_]:
    """Months and leap years differ by less than half a step; what is longer is a gap, with no difference over it."""
    found = np.zeros(len(times), dtype=np.bool_)
    found[1:] = np.diff(times) < 1.5 * _usual(times)
    return found


def _thinned(dataset: Dataset, every: Any) -> Dataset:
    """Every n-th step, or those a whole number of durations after the first, as ``"6h"``."""
    # numpy counts its timedeltas among the integers
    if isinstance(every, int | np.integer) and not isinstance(every, np.timedelta64):
        if every < 1:
            raise WindowError(f"every={every} must be at least 1 step")
        return replace(dataset, anchors=dataset.anchors[::every])
    wanted, times = _duration(every), elapsed(dataset)
    if dataset.times.dtype.kind not in "MO":
        raise WindowError(f"every={every!r} is a duration, but the store's time has no units; give a number of steps")
    usual = _usual(times)
    if usual > 0 and (wanted < usual or abs(wanted / usual - round(wanted / usual)) > 1e-9):
        raise WindowError(f"every={every!r} is no whole number of the store's steps of {usual / 3600:g} h")
    since = (times - times[0]) / wanted
    return replace(dataset, anchors=dataset.anchors[np.abs(since - np.rint(since)) < 1e-9])


def _duration(every: Any) -> float:
    """Seconds of ``"6h"``, ``"30min"``, ``"1d"`` or a numpy timedelta."""
    if isinstance(every, np.timedelta64):
        return float(every / np.timedelta64(1, "s"))
    match = re.fullmatch(r"(\d*)\s*(s|min|h|d)", str(every).strip().lower())
    seconds = int(match[1] or 1) * _SECONDS[match[2]] if match else 0
    if not seconds:
        raise WindowError(f"every={every!r} is no duration like '6h', '30min' or '1d', nor a number of steps")
    return float(seconds)


def _block(dataset: Dataset) -> int:
    """As many steps as fit into 128 MiB a rank, whole chunks where one holds several."""
    fit = max(1, _BLOCK_BYTES // max(1, dataset.sample_bytes()))
    along = [v.table.chunks[v.roles.index("time")] for v in dataset.variables if "time" in v.roles]
    chunk = math.lcm(*along) if along else 1
    return fit // chunk * chunk or fit
