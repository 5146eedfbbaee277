"""Request of one sample: what it needs of the stored arrays, and where each value goes. Integers and numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jigsaw.geometry.layout import Layout
from jigsaw.io.series.boundary import DimBoundary

IndexPicks = tuple[tuple[int, int], ...]

DROPPED_DIM = -1
MISSING_RULES = ("error", "fill")
"""Rules for a chunk that the store lacks."""


@dataclass(frozen=True)
class ReadPart:
    """One stored array's contribution to a sample.

    An entry a *stored* dim:

    - `picks`: None for a spatial dim (the layout cuts it), else pairs (stored index, destination index);
    - `to`: the destination dim that it lands in: 0 time, 1 channel, 2 and up space; `DROPPED_DIM` for a dim of which
      one index is picked and which the destination lacks.

    `at` fixes the destination dims that the array lacks, as pairs (dim, index): ``((1, 3),)`` puts a variable without
    levels into channel 3; a static field is one part a destination step.  `flip` lists the stored dims that run
    against the layout's rows.  `first` is where a window begins that is smaller than the array: for each stored dim the
    row that is the layout's row 0 (its last one along a flipped dim; 0 for dims that are picked from).  A window as
    long as the array wraps: it is rolled.
    """

    array: str
    picks: tuple[IndexPicks | None, ...]
    to: tuple[int, ...]
    at: tuple[tuple[int, int], ...] = ()
    flip: tuple[int, ...] = ()
    first: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReadRequest:
    """One sample [T, C, \\*space]: y = x * scale + offset, a channel each, after the file's own scale, offset and fill.

    `layout` is that of the sample over the ranks that share it; its held intervals are what is read.  `nan` says what
    becomes of missing values: ``"keep"``, ``"raise"`` (`NaNError`), or the number that stands in the result for them.
    With `gaps`, a (time, channel) that no part fills is left as it is, instead of refused.
    `missing` says what becomes of chunks whose object the store has not: ``"error"`` (`MissingChunkError`) or
    ``"fill"``, the array's fill value.
    `boundary` says for each spatial dim what rows beyond its ends show; without it they wrap.  `vectors` are the
    channels that change sign in turned rows.
    """

    layout: Layout
    parts: tuple[ReadPart, ...]
    scale: tuple[float, ...] = ()
    offset: tuple[float, ...] = ()
    dtype: str = "float32"
    nan: str | float = "keep"
    gaps: bool = False
    boundary: tuple[DimBoundary, ...] = ()
    missing: str = "error"
    vectors: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        channels = self.layout.cuts[1].size
        if not self.scale:
            object.__setattr__(self, "scale", (1.0,) * channels)
        if not self.offset:
            object.__setattr__(self, "offset", (0.0,) * channels)


def runs_of_pairs(pairs: Sequence[tuple[int, int]]) -> tuple[tuple[int, int, int, int, int], ...]:
    """Return pairs (source, target) as runs (source, source step, target, target step, count), in their order."""
    runs: list[tuple[int, int, int, int, int]] = []
    for source, target in pairs:
        if runs:
            s, ds, t, dt, n = runs[-1]
            step = (source - s, target - t) if n == 1 else (ds, dt)
            fits = source == s + n * step[0] and target == t + n * step[1]
            if fits and step[0] != 0 and step[1] != 0:
                runs[-1] = (s, step[0], t, step[1], n + 1)
                continue
        runs.append((source, 1, target, 1, 1))
    return tuple(runs)
