"""Blocks of steps read on a mesh, each rank its tile, through the loader; every step is read once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jigsaw import comm
from jigsaw.geometry.axis_names import DATA_AXIS
from jigsaw.geometry.layout import Layout
from jigsaw.io.datasets.loader import Batch, DataLoader
from jigsaw.io.stats.moments import ChannelMoments, MomentValues, StepBlock
from jigsaw.io.stats.step_series import StepSeries
from jigsaw.ranks.mesh import mesh_coordinate

StepTiles = NDArray[Any]


def blocks_on_mesh(series: StepSeries, start: int) -> Iterator[StepBlock]:
    """Yield this rank's part of each block from step `start` on.

    The axis `data` cuts a block's steps; the last tile of a rank's part travels to the rank that has the next steps.

    *Sends*: what reading sends, and with an axis `data` one tile for each block.
    """
    ranks = dict(series.dataset.frame.axes).get(DATA_AXIS, 1)
    loader = DataLoader(series.dataset, batch_size=series.block * ranks)
    try:
        carry = _CarriedTile(series, start)
        if start:
            loader.load_state_dict({**loader.state_dict(), "next_sample": start})
        for batch in loader:
            yield carry.block(batch)
    finally:
        loader.close()


class _CarriedTile:
    """The tile of the step before the next block, on the rank that needs it."""

    def __init__(self, series: StepSeries, start: int) -> None:
        self.series, dataset = series, series.dataset
        self.mesh = dataset.device_mesh()
        self.at = mesh_coordinate(self.mesh)
        self.inner = dataset.frame.inner(self.at)
        self.weights = series.row_weights(dataset.layout.owned(self.at)[2:])
        self.names = [name for name, _ in dataset.frame.axes]
        self.before = None if start == 0 else self._tile(dataset[start - 1].input.local[None])[0]

    def _tile(self, local: torch.Tensor) -> StepTiles:
        r"""Return the owned rows [n, C, \*space] of [n, 1, C, \*held]."""
        return steps_as_numpy(local)[(..., *self.inner)]

    def block(self, batch: Batch) -> StepBlock:
        tiles, layout = self._tile(batch.input.local), batch.input.layout
        first, stop = layout.owned(self.at)[0]
        before = self._handed_on(tiles, layout)
        steps = batch.samples[first:stop]
        return StepBlock(
            batch.samples[-1] + 1, *moments_of_steps(self.series.follows[list(steps)], tiles, before, self.weights)
        )

    def _handed_on(self, tiles: StepTiles, layout: Layout) -> StepTiles | None:
        """Return the tile of the step before this rank's first, if any, and keep the one that the next block needs."""
        ranks = layout.size_of(DATA_AXIS)
        before = self.before
        if ranks == 1:
            self.before = tiles[-1].copy()
            return before
        # a ring along `data`: the last rank's tile goes to the first, which needs it for the next block
        me = self.at[self.names.index(DATA_AXIS)]
        last = torch.from_numpy(tiles[-1:].copy()).to(self.mesh.device_type)
        arrived = last.new_empty(tiles.shape[1:])
        behind, ahead = (me - 1) % ranks, (me + 1) % ranks
        comes = _has_steps_after(layout, behind)
        sends = [(self._at(layout, ahead), last[0])] if _has_steps_after(layout, me) else []
        receives = [(self._at(layout, behind), arrived)] if comes else []
        comm.swap_messages(self.mesh, sends, receives, "carry").wait()
        found = arrived.cpu().numpy() if comes else None
        if me == 0:
            self.before = found
            return before
        return found

    def _at(self, layout: Layout, rank: int) -> int:
        """Return the mesh position of this rank's counterpart along `data`."""
        return layout.index(tuple(rank if n == DATA_AXIS else c for n, c in zip(self.names, self.at, strict=True)))


def _has_steps_after(layout: Layout, rank: int) -> bool:
    """Say whether a rank along `data` hands on its last tile: both it and the next have steps, in this block
    or later.
    """
    counts = [stop - first for first, stop in map(layout.cuts[0].owned, range(layout.size_of(DATA_AXIS)))]
    return counts[rank] > 0 and (rank == len(counts) - 1 or counts[rank + 1] > 0)


def steps_as_numpy(local: torch.Tensor) -> StepTiles:
    r"""Return [n, C, \*held] of a batch of single steps [n, 1, C, \*held]; numpy lacks bfloat16."""
    steps = local[:, 0].cpu()
    return (steps.float() if steps.dtype == torch.bfloat16 else steps).numpy()


def moments_of_steps(
    follows: NDArray[np.bool_], tiles: StepTiles, before: StepTiles | None, weights: MomentValues | None
) -> tuple[list[ChannelMoments], list[ChannelMoments]]:
    r"""Return the moments of each of `tiles` [n, C, \*space], and of its difference to the one it follows, if any."""
    values = [ChannelMoments.of(tile, weights) for tile in tiles]
    earlier = [before, *tiles[:-1]]
    differences = [
        ChannelMoments.of(tile, weights, minus=less)
        for joins, tile, less in zip(follows, tiles, earlier, strict=False)
        if joins and less is not None
    ]
    return values, differences
