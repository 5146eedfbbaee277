"""`sums` of `jigsaw.io.open`: fields whose value at a step is the sum over the stored steps up to it.

Each earlier step is a channel of its own while it is read, after those of the fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError
from jigsaw.io.series.fields import FieldChannel


@dataclass(frozen=True)
class StepSum:
    """Sum of a channel and of those of its `earlier` steps; `fill` replaces missing sums."""

    channel: int
    earlier: tuple[int, ...]
    fill: float | None

    def add_up(self, block: NDArray[Any]) -> None:
        r"""Add the earlier steps of a block [steps, C, \*held] to the channel."""
        total = block[:, self.channel]
        for place in self.earlier:
            total += block[:, place]
        if self.fill is not None:
            np.copyto(total, self.fill, where=np.isnan(total))


def summed_channels(sums: Mapping[str, Any], channels: Sequence[FieldChannel]) -> dict[int, Any]:
    """Return the length of the sum of each channel that has one: by its name, its field's or its array's."""
    names = [(c.name, c.field, c.array) for c in channels]
    unknown = sorted(str(key) for key in sums if not any(key in of_channel for of_channel in names))
    if unknown:
        known = [c.name for c in channels]
        raise FieldError(f"sums has {unknown[0]!r}, which is not a field; the channels are {known}")
    lengths = ((i, next((name for name in of_channel if name in sums), None)) for i, of_channel in enumerate(names))
    return {i: sums[name] for i, name in lengths if name is not None}
