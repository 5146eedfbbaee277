"""Series of steps that statistics run over: which follow which, the weights of rows, the steps read together."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError, GridError
from jigsaw.fields.latlon import latitude_rows
from jigsaw.io.arguments import checked_choice
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.stats.moments import MomentValues

WEIGHT_RULES = ("none", "area")
_BLOCK_BYTES = 1 << 27


@dataclass(frozen=True)
class StepSeries:
    """A dataset of single steps; `follows` says of each whether the step before it lies one usual step earlier."""

    dataset: Dataset
    follows: NDArray[np.bool_]
    weights: str
    block: int

    @classmethod
    def of(cls, dataset: Dataset, weights: str, block: int | None) -> StepSeries:
        """Check what is asked.

        Raises: `FieldError` for a dataset of windows, `GridError` for area weights without latitudes.
        """
        if not isinstance(dataset, Dataset):  # pyright: ignore[reportUnnecessaryIsInstance] # what a user may pass
            raise FieldError(
                f"statistics takes what jigsaw.io.open gives, not {type(dataset).__name__}; of volumes "
                "jigsaw.io.volume_statistics makes them"
            )
        if len(dataset.inputs) != 1 or dataset.targets:
            raise FieldError(
                f"statistics read each step once, but the dataset has inputs={list(dataset.inputs)} and "
                f"targets={list(dataset.targets)}; open it with inputs=[0] and no targets"
            )
        checked_choice("weights", weights, WEIGHT_RULES)
        if weights == "area" and "lat" not in dataset.frame.dims:
            raise GridError(f"weights='area' needs a lat dim, and the fields have {dataset.frame.dims}; use 'none'")
        if weights == "area" and "lat" in dataset.counted:
            raise GridError("weights='area' needs latitudes, and the store has no coordinate along lat; use 'none'")
        if block is not None and block < 1:
            raise FieldError(f"block={block} must be at least 1, the steps that a rank reads together")
        once = _follows_last(elapsed_times(dataset))
        # members and lead times come one after the other, each with all steps
        follows = np.tile(once, len(dataset) // len(once))
        return cls(dataset, follows, weights, min(block or _default_block(dataset), len(dataset)))

    @property
    def channels(self) -> tuple[str, ...]:
        """The names of the channels that are read, forcings included."""
        return (*self.dataset.fields, *self.dataset.forcing_names)

    def __len__(self) -> int:
        return len(self.dataset)

    def row_weights(self, box: Sequence[tuple[int, int]]) -> MomentValues | None:
        r"""Return the weights [\*space] of the rows of a spatial box; 1 on average over the globe."""
        if self.weights == "none":
            return None
        shape = tuple(b - a for a, b in box)
        dim = self.dataset.frame.dims.index("lat")
        weights = area_weights(np.asarray(self.dataset.whole_coords["lat"], dtype=np.float64))[slice(*box[dim])]
        lined = weights.reshape([-1 if d == dim else 1 for d in range(len(shape))])
        return np.ascontiguousarray(np.broadcast_to(lined, shape))

    def identity(self) -> dict[str, Any]:
        """Return the facts that a checkpoint must share with the run that goes on with it."""
        d = self.dataset
        steps = hashlib.sha256(elapsed_times(d).tobytes()).hexdigest()[:16]
        scales = [x.hex() for x in (*d.scale, *d.offset)]
        scaled = hashlib.sha256(repr((scales, d.nan, sorted(d.select.items()))).encode()).hexdigest()[:16]
        sizes = dict(zip(d.frame.dims, d.frame.sizes, strict=True))
        return {
            "store": d.store.url,
            "fields": list(self.channels),
            "sizes": sizes,
            "steps": f"{len(self)} ({steps})",
            "values": f"{d.dtype} ({scaled})",
            "weights": self.weights,
            "mesh": [list(axis) for axis in d.frame.axes if axis[1] > 1],
            "cuts": [list(c.points) for c in d.layout.cuts[2:]],
        }

    def attrs(self) -> dict[str, Any]:
        d = self.dataset
        first, last = d.input_times(0)[0], d.input_times(len(d) - 1)[0]
        usual = _usual_step(elapsed_times(d))
        return {
            "store": d.store.url,
            "first": str(first),
            "last": str(last),
            "steps": len(d),
            "every": f"{usual / 3600:g}h" if d.times.dtype.kind in "mMO" else f"{usual:g}",
            "weights": self.weights,
        }


def area_weights(lat: MomentValues) -> MomentValues:
    """Return each latitude row's share of the sphere, 1 on average: rows reach half-way to the next row or the pole.

    Raises: `GridError` for latitudes that do not rise or fall, or lie beyond the poles.
    """
    try:
        rows = latitude_rows(lat)
    except GridError as e:
        raise GridError(f"weights='area' needs latitudes: {e}; or use 'none'") from e
    if len(lat) == 1:
        return np.ones(1)
    cells = np.diff(np.sin(np.deg2rad(rows.edges)))
    return (cells if lat[0] < lat[-1] else cells[::-1]) / cells.mean()


def elapsed_times(dataset: Dataset) -> MomentValues:
    """Return the time of each step, in seconds on one scale, or as the store's plain numbers."""
    stamps = dataset.times[dataset.anchors + dataset.inputs[0]]
    if stamps.dtype.kind in "mM":
        return stamps.astype(f"{stamps.dtype.kind}8[us]").astype(np.int64) / 1e6
    if stamps.dtype.kind == "O":
        return np.array([(t - stamps[0]).total_seconds() for t in stamps])
    return stamps.astype(np.float64)


def _usual_step(times: MomentValues) -> float:
    return float(np.median(np.diff(times))) if len(times) > 1 else 0.0


def _follows_last(times: MomentValues) -> NDArray[np.bool_]:
    """Say for each step whether the one before lies less than 1.5 usual steps back: months differ by less."""
    follows = np.zeros(len(times), dtype=np.bool_)
    follows[1:] = np.diff(times) < 1.5 * _usual_step(times)
    return follows


def _default_block(dataset: Dataset) -> int:
    """Return the number of steps that fit into 128 MiB a rank, in whole chunks where one holds several."""
    fit = max(1, _BLOCK_BYTES // max(1, dataset.sample_bytes()))
    along = [v.table.chunks[v.roles.index("time")] for v in dataset.variables if "time" in v.roles]
    chunk = math.lcm(*along) if along else 1
    return fit // chunk * chunk or fit
