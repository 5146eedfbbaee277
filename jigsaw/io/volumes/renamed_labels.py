"""Renaming of labels as they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jigsaw.errors import FieldError
from jigsaw.io.series.times import is_whole_number


@dataclass(frozen=True)
class RenamedLabels:
    """Map from stored labels to new ones, by rising old label; those not named stay."""

    old: tuple[int, ...] = ()
    new: tuple[int, ...] = ()

    @classmethod
    def of(cls, given: Mapping[int, int] | None, dtype: torch.dtype, fill: int) -> RenamedLabels:
        """Make it from a mapping. Raises: `FieldError` unless it maps integers, or where it would rename missing
        values.
        """
        if given is None:
            return cls()
        held = torch.iinfo(dtype)
        if not isinstance(given, Mapping) or not all(
            is_whole_number(old) and is_whole_number(new) and held.min <= new <= held.max for old, new in given.items()
        ):
            raise FieldError(
                f"label_map={given!r} must say which label becomes which, in integers that {dtype} holds, like "
                "label_map={2: 1, 3: 1}"
            )
        if given.get(fill, fill) != fill:
            raise FieldError(
                f"label_map={given!r} renames {fill}, which is also label_fill, what stands where there is no label: "
                "give another label_fill, like the ignore_index of the loss"
            )
        known = sorted((int(old), int(new)) for old, new in given.items())
        return cls(tuple(old for old, _ in known), tuple(new for _, new in known))

    def applied(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the new labels of integers, in a dtype that holds both."""
        if not self.old:
            return values
        old, new = np.array(self.old), np.array(self.new)
        at = np.minimum(np.searchsorted(old, values), len(old) - 1)
        return np.where(old[at] == values, new[at], values)
