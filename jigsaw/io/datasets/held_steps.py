"""`HeldSteps`: decoded steps that a loader keeps, because a later batch needs them again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

AnyArray = NDArray[Any]


class HeldSteps:
    r"""Copies of decoded steps [C, \*held] by their keys, the last `capacity` that were used.

    Without a capacity, it keeps what `keep` is told that the next read needs.  Copies, because the samples are the
    user's to change.  `fixed` are the channels without time, which are read once.
    """

    def __init__(self, capacity: int, fixed: Sequence[int]) -> None:
        self._capacity, self.fixed = capacity, tuple(fixed)
        self._known: OrderedDict[int, AnyArray] = OrderedDict()
        self._fixed_values: AnyArray | None = None

    @property
    def has_fixed(self) -> bool:
        return self._fixed_values is not None

    def known(self, keys: Iterable[int]) -> frozenset[int]:
        return frozenset(key for key in keys if key in self._known)

    def foreseen(self, keys: Iterable[int], wanted: Collection[int]) -> HeldSteps:
        """Return the memory without values as it will be after a read of `keys` that keeps the `wanted` ones."""
        nothing = np.empty(0)
        # The same order of use that `write` and `keep` will leave: what is not used, what is used again, what is new.
        # Of steps 1 to 4 in memory and 3 to 6 read, with room for 5: 1 2 | 3 4 | 5 6, of which 1 goes.
        memory = HeldSteps(self._capacity, self.fixed)
        again = [key for key in keys if key in self._known]
        unused = [key for key in self._known if key not in again]
        memory._known = OrderedDict.fromkeys([*unused, *again, *keys], nothing)
        memory._drop(wanted)
        memory._fixed_values = nothing if self.fixed else None
        return memory

    def write(self, block: AnyArray, keys: Sequence[int], known: Collection[int]) -> None:
        r"""Copy the known steps, and the channels without time, to their places in a block [steps, C, \*held]."""
        for i, key in enumerate(keys):
            if key in known:
                block[i] = self._known[key]
                self._known.move_to_end(key)
            elif self._fixed_values is not None:
                for c, values in zip(self.fixed, self._fixed_values, strict=True):
                    block[i, c] = values

    def keep(self, block: AnyArray, keys: Sequence[int], wanted: Collection[int]) -> None:
        if self.fixed and self._fixed_values is None:
            self._fixed_values = block[0][list(self.fixed)].copy()
        for i, key in enumerate(keys):
            if key not in self._known and (self._capacity or key in wanted):
                self._known[key] = np.array(block[i])
        self._drop(wanted)

    def _drop(self, wanted: Collection[int]) -> None:
        """Drop the steps that were unused for longest, or those that the next read does not need."""
        # In the order of use, which is that of the samples: four ranks that share them drop the same steps. If time or
        # free memory decided, one rank would read again what the others hold, and plan alone.
        if self._capacity:
            while len(self._known) > self._capacity:
                self._known.popitem(last=False)
        else:
            for key in [key for key in self._known if key not in wanted]:
                del self._known[key]
