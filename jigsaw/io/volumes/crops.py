"""Places of random crops, from (seed, epoch, sample) alone: the same on every rank without communication."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jigsaw.io.volumes.foreground import Foreground, FoundVoxels
from jigsaw.io.volumes.respacing import GridRespacing

_WORD_VALUES = 1 << 64


class RandomDraws:
    """Numbers of a counter-based generator (Philox, Salmon et al. 2011) at the place (seed, epoch, sample).

    The raw words, because numpy's distributions may change from version to version.  Each `stream` has its own: 0 is
    that of where crops lie.
    """

    def __init__(self, seed: int, epoch: int, sample: int, stream: int = 0) -> None:
        key = np.array([seed % _WORD_VALUES, epoch % _WORD_VALUES], np.uint64)
        counter = np.array([0, 0, sample % _WORD_VALUES, stream], np.uint64)
        self._source = np.random.Philox(key=key, counter=counter)

    def word(self) -> int:
        """Draw the next 64 bits."""
        return int(self._source.random_raw())

    def below(self, count: int) -> int:
        """Draw an integer in ``range(count)``, uniformly."""
        return (self.word() * count) >> 64

    def chance(self, p: float) -> bool:
        """Draw True with probability `p`."""
        return self.word() < p * _WORD_VALUES

    def between(self, low: float, high: float) -> float:
        """Draw a number from `low` to `high`, uniformly."""
        return low + (high - low) * (self.word() / _WORD_VALUES)


def crop_origin(
    shape: Sequence[int],
    crop: Sequence[int],
    draws: RandomDraws,
    how: Foreground | None,
    found: FoundVoxels | None,
    respacing: GridRespacing | None = None,
) -> tuple[int, ...]:
    """Draw the first row of a crop along each dim; below 0 where the volume is smaller, which then lies in
    its middle.
    """
    stored = respacing.stored if respacing else shape  # where foreground was found
    centre = None if how is None or found is None else _foreground_centre(stored, draws, how, found)
    if centre and respacing:
        centre = respacing.nearest_voxel(centre)
    if centre is None:
        firsts = [draws.below(max(n - rows, 0) + 1) for n, rows in zip(shape, crop, strict=True)]
    else:
        firsts = [c - rows // 2 for c, rows in zip(centre, crop, strict=True)]
    return tuple(_clamp_first_row(*each) for each in zip(firsts, shape, crop, strict=True))


def _clamp_first_row(first: int, size: int, rows: int) -> int:
    return -((rows - size) // 2) if rows > size else min(max(first, 0), size - rows)


def _foreground_centre(
    shape: Sequence[int], draws: RandomDraws, how: Foreground, found: FoundVoxels
) -> tuple[int, ...] | None:
    """Draw a voxel of the kind that is drawn, or of the other kind where a volume has none of the first."""
    wants = draws.chance(how.pos / (how.pos + how.neg))
    present = [kept.at for kept in found.classes.values() if kept.at.size]
    if not present or (not wants and found.background.at.size):
        voxels = found.background.at
    else:
        voxels = present[draws.below(len(present))]
    if not voxels.size:
        return None
    return tuple(int(i) for i in np.unravel_index(int(voxels[draws.below(voxels.size)]), tuple(shape)))
