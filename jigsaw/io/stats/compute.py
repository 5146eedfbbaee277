"""`statistics`: mean, std and range of every channel and of its differences between consecutive steps, in one pass."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from jigsaw import comm
from jigsaw.errors import FieldError, imports_needed
from jigsaw.geometry.axis_names import DATA_AXIS
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.rank_results import result_of_first_rank
from jigsaw.io.series.statistics import Statistics
from jigsaw.io.stats.moments import (
    ChannelMoments,
    MomentTables,
    StatisticsState,
    StepBlock,
    check_moments,
    load_moments,
    save_moments,
)
from jigsaw.io.stats.step_blocks import StepSeries, blocks_by_workers, blocks_on_mesh
from jigsaw.ranks.mesh import axes_of_mesh, mesh_coordinate

if TYPE_CHECKING:
    from dask.distributed import Client

StatisticsProgress = Callable[[int, int], None]


def statistics(
    dataset: Dataset,
    *,
    weights: str = "none",
    block: int | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    resume: bool = False,
    progress: bool | StatisticsProgress = False,
    client: Client | None = None,
) -> Statistics:
    """Compute count, mean, std, min and max of each channel of a dataset of single steps, and of its step-to-step
    differences.

    One pass in float64 reads every step once. Each rank of the dataset's mesh takes its tile, and its share of the
    steps along the axis `data`. The ranks' moments are merged exactly at the end, and every rank returns the same. NaN
    is skipped and counted (`missing`); std is the population's. No difference is taken over a gap in time.

    - `weights`: ``"area"`` weighs latitude rows by their share of the sphere, ``"none"`` counts each value alike;
    - `block`: steps that a rank reads together, by default 128 MiB of them;
    - `checkpoint`: a file that is replaced whole after each block, and yours to remove once the result is safe. With
      `resume` the run goes on from it, if it exists, with the same bits as a run that was never interrupted;
    - `progress`: a bar (tqdm) on the first rank, or a function of the steps done and their number;
    - `client`: a `dask.distributed.Client`: its workers get the dataset pickled and read blocks of steps, and the
      result has the same bits as on one rank.

    *Sends*: what reading sends; with `data`, a tile a rank and block; at the end (with `checkpoint`, after each block)
    112 C bytes to every other rank.

    Raises: `FieldError` or `GridError` for a request that the dataset cannot fulfill, `StateError` for a checkpoint of
    something else, `WriteError` for one that cannot be written.

    >>> data = jigsaw.io.open("globe.zarr", mesh=jigsaw.init_mesh(lat=1), fields=["t2m", "u10"])
    >>> stats = jigsaw.io.statistics(data, weights="area")
    >>> stats.columns["mean"], stats["t2m"]["max"]
    (array([283.5,   0. ]), 287.0)
    """
    series = StepSeries.of(dataset, weights, block)
    if resume and checkpoint is None:
        raise FieldError("resume=True needs checkpoint=, the file that the run before wrote")
    spread = _RankMoments(series, None if checkpoint is None else Path(checkpoint), client is not None)
    state = spread.begin(resume)
    blocks: Iterator[StepBlock] = iter(())
    if (start := state.done) < len(series):
        blocks = blocks_by_workers(series, start, client) if client else blocks_on_mesh(series, start)
    with _report_progress(progress, spread.is_first, state.done, len(series)) as report:
        for step_block in blocks:
            state.add(step_block)
            spread.save(state)
            report(state.done, len(series))
    values, differences = (moments.summary() for moments in spread.merged(state))
    columns = {**values, **{f"diff_{name}": column for name, column in differences.items()}}
    return Statistics(series.channels, columns, series.attrs(), f"statistics of {dataset.store.url}")


class _RankMoments:
    def __init__(self, series: StepSeries, checkpoint: Path | None, alone: bool) -> None:
        self.series, self.checkpoint = series, checkpoint
        self.mesh = None if alone else series.dataset.device_mesh()
        self.coords = list(series.dataset.layout.coords())
        self.me = 0 if self.mesh is None else self.coords.index(mesh_coordinate(self.mesh))
        self.is_first = self.me == 0

    def begin(self, resume: bool) -> StatisticsState:
        """Return the state to go on from, alike on every rank, or raise an error on every rank."""
        nothing = ChannelMoments.nothing(len(self.series.channels)).table
        path, shape = self.checkpoint, (len(self.coords), 2, *nothing.shape)
        saved = None
        if path is not None:
            begin = (
                (lambda: load_moments(path, self.series.identity(), shape)) if resume else lambda: check_moments(path)
            )
            saved = result_of_first_rank(self.mesh, self.is_first, begin)
        done, tables = saved or (0, np.broadcast_to(nothing, shape))
        return StatisticsState(done, tables[self.me])

    def gather(self, state: StatisticsState) -> MomentTables:
        """[ranks, 2, 7, C], in mesh order."""
        if self.mesh is None:
            return state.tables[None]
        tables = torch.from_numpy(state.tables.copy()).to(self.mesh.device_type)
        names = [name for name, _ in axes_of_mesh(self.mesh)]
        return np.stack([t.cpu().numpy() for t in comm.all_gather(tables, self.mesh, names)])

    def save(self, state: StatisticsState) -> None:
        if (path := self.checkpoint) is not None:
            tables, identity = self.gather(state), self.series.identity()
            result_of_first_rank(self.mesh, self.is_first, lambda: save_moments(path, identity, state.done, tables))

    def merged(self, state: StatisticsState) -> list[ChannelMoments]:
        """Return the moments of values and of differences; of ranks with the same tile the first counts."""
        layout = self.series.dataset.layout
        spare = [i for i, (name, _) in enumerate(layout.axes) if name not in {*layout.cut_axes, DATA_AXIS}]
        firsts = [not any(coord[i] for i in spare) for coord in self.coords]
        nothing = ChannelMoments.nothing(len(self.series.channels))
        by_rank = self.gather(state)[firsts]
        return [nothing.add(map(ChannelMoments, by_rank[:, kind])) for kind in (0, 1)]


@contextmanager
def _report_progress(
    progress: bool | StatisticsProgress, first: bool, done: int, steps: int
) -> Generator[StatisticsProgress]:
    """Yield the function that takes the steps done and their number: a bar's, the caller's, or an idle one."""
    if callable(progress):
        yield progress
    elif progress and first:
        with imports_needed(FieldError, "progress=True needs tqdm: pip install 'jigsaw-torch[train]'"):
            from tqdm import tqdm
        with tqdm(total=steps, initial=done, unit="step") as bar:

            def update(now: int, _: int) -> None:
                bar.update(now - bar.n)

            yield update
    else:
        yield lambda now, total: None
