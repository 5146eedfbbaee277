"""`statistics`: mean, std and range of every channel and of its differences between consecutive steps, in one pass.

Every step is read once, in blocks that are reduced to moments. A rank reads its tile through the loader, and sends its
last one to the rank that has the next steps. A worker reads through its own reader, and keeps the first and last tile
of its block; the difference between two blocks is taken by whichever worker has one of them. Only moments come back.
"""

from __future__ import annotations

import hashlib
import math
import os
import pickle
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from jigsaw import comm
from jigsaw.comm.wire_values import wire_memory
from jigsaw.errors import FieldError, GridError, imports_needed
from jigsaw.fields.latlon import latitude_rows
from jigsaw.geometry.axis_names import DATA_AXIS
from jigsaw.geometry.layout import Layout
from jigsaw.io.arguments import checked_choice
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.datasets.epochs import check_whole_number
from jigsaw.io.datasets.loader import Batch, DataLoader
from jigsaw.io.datasets.pairs import PairedDataset
from jigsaw.io.rank_results import result_of_first_rank
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.series.statistics import Statistics
from jigsaw.io.stats.cluster import results_in_order, worker_threads
from jigsaw.io.stats.moments import (
    ChannelMoments,
    MomentTables,
    MomentValues,
    StatisticsState,
    StepBlock,
    check_moments,
    load_moments,
    save_moments,
)
from jigsaw.ranks.mesh import axes_of_mesh, mesh_coordinate

if TYPE_CHECKING:
    from dask.distributed import Client

StepTiles = NDArray[Any]

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
        if isinstance(dataset, PairedDataset):
            raise FieldError(
                "statistics are those of one dataset, and a pair has two; make them of data.unpaired, the inputs, and "
                "of data.partner, the targets"
            )
        if len(dataset.inputs) != 1 or dataset.targets:
            raise FieldError(
                f"statistics read each step once, but the dataset has inputs={list(dataset.inputs)} and "
                f"targets={list(dataset.targets)}; open it with inputs=[0] and no targets"
            )
        if dataset.stacked is not None:
            raise FieldError(
                f"statistics read samples of single members, and stack={dataset.stacked!r} puts all into one; open it "
                f"with select={{{dataset.stacked!r}: 'all'}} alone"
            )
        checked_choice("weights", weights, WEIGHT_RULES)
        if weights == "area" and dataset.cells is not None:
            _ = dataset.cells.area_weights  # refused before anything is read
        elif weights == "area" and "lat" not in dataset.frame.dims:
            raise GridError(f"weights='area' needs a lat dim, and the fields have {dataset.frame.dims}; use 'none'")
        if weights == "area" and "lat" in dataset.counted:
            raise GridError("weights='area' needs latitudes, and the store has no coordinate along lat; use 'none'")
        check_whole_number("block", 1 if block is None else block, 1, ": the steps that a rank reads together")
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
        if self.dataset.cells is not None:
            return self.dataset.cells.area_weights[slice(*box[0])]
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
        order = [] if d.turn.cells is None else [d.turn.cells]  # the ranks then count different cells
        scaled = hashlib.sha256(repr((scales, d.nan, sorted(d.select.items()), *order)).encode()).hexdigest()[:16]
        # the rows that names stand for, and those of sums
        read = [(c.array, c.level, c.earlier) for c in d.channels], [(s.channel, s.earlier) for s in d.sums]
        sizes = dict(zip(d.frame.dims, d.frame.sizes, strict=True))
        return {
            "store": d.store.url,
            "fields": list(self.channels),
            "rows of fields": hashlib.sha256(repr(read).encode()).hexdigest()[:16],
            "sizes": sizes,
            "places": d.places_digest(),
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
    return rows.latitude_shares() if len(lat) > 1 else np.ones(1)


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


def _steps_as_numpy(local: torch.Tensor) -> StepTiles:
    r"""Return [n, C, \*held] of a batch of single steps [n, 1, C, \*held]; numpy lacks bfloat16."""
    steps = local[:, 0].cpu()
    return (steps.float() if steps.dtype == torch.bfloat16 else steps).numpy()


def _reduce_steps(
    stop: int,
    follows: NDArray[np.bool_],
    tiles: StepTiles,
    before: StepTiles | None,
    weights: MomentValues | None,
) -> StepBlock:
    r"""Return the moments of each of `tiles` [n, C, \*space], and of its difference to the one it follows, if any."""
    differences = [
        ChannelMoments.of(tile, weights, minus=less)
        for joins, tile, less in zip(follows, tiles, [before, *tiles[:-1]], strict=False)
        if joins and less is not None
    ]
    return StepBlock(stop, [ChannelMoments.of(tile, weights) for tile in tiles], differences)


# -- by the ranks of a mesh -------------------------------------------------------------------------------------------


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
            loader.load_state_dict({**loader.state_dict(), "next_sample": start, "samples": len(series.dataset)})
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
        return _steps_as_numpy(local)[(..., *self.inner)]

    def block(self, batch: Batch) -> StepBlock:
        tiles, layout = self._tile(batch.input.local), batch.input.layout
        first, stop = layout.owned(self.at)[0]
        before = self._handed_on(tiles, layout)
        follows = self.series.follows[list(batch.samples[first:stop])]
        return _reduce_steps(batch.samples[-1] + 1, follows, tiles, before, self.weights)

    def _handed_on(self, tiles: StepTiles, layout: Layout) -> StepTiles | None:
        """Return the tile of the step before this rank's first, if any, and keep the one that the next block needs."""
        ranks = layout.size_of(DATA_AXIS)
        before = self.before
        if ranks == 1:
            self.before = tiles[-1].copy()
            return before
        # a ring along `data`: the last rank's tile goes to the first rank, which needs it for the next block
        me = self.at[self.names.index(DATA_AXIS)]
        last = torch.from_numpy(tiles[-1:].copy()).to(self.mesh.device_type)
        arrived = wire_memory(last, tiles.shape[1:])
        behind, ahead = (me - 1) % ranks, (me + 1) % ranks
        comes = _has_steps_after(layout, behind)
        sends = [(self._at(layout, ahead), last[0])] if _has_steps_after(layout, me) else []
        receives = [(self._at(layout, behind), arrived)] if comes else []
        comm.swap_messages(self.mesh, sends, receives, "carry").wait()
        tile = arrived.cpu().numpy() if comes else None
        if me == 0:
            self.before = tile
            return before
        return tile

    def _at(self, layout: Layout, rank: int) -> int:
        return layout.index(tuple(rank if n == DATA_AXIS else c for n, c in zip(self.names, self.at, strict=True)))


def _has_steps_after(layout: Layout, rank: int) -> bool:
    """Say whether a rank along `data` hands on its last tile: both it and the next have steps."""
    counts = [stop - first for first, stop in map(layout.cuts[0].owned, range(layout.size_of(DATA_AXIS)))]
    return counts[rank] > 0 and (rank == len(counts) - 1 or counts[rank + 1] > 0)


# -- by the workers of a cluster --------------------------------------------------------------------------------------


def _check_dataset_travels(dataset: Dataset) -> None:
    if dataset.device is None or any(size > 1 for _, size in dataset.frame.axes):
        raise FieldError(
            f"client= spreads the work over dask's workers, but the dataset's mesh is {dict(dataset.frame.axes)}; "
            "open it on a mesh of one rank, or leave the client out"
        )
    if dataset.store.url.startswith("xarray dataset"):
        # tasks of dask within it would wait for workers that all wait for them
        raise FieldError(
            f"client= needs a store that workers open by themselves, not an {dataset.store.url}; "
            "open the files by path or URL, or leave the client out"
        )
    try:
        pickle.dumps(dataset)
    except (pickle.PicklingError, TypeError, AttributeError) as unfit:
        raise FieldError(
            f"client= sends the dataset to dask's workers, and {dataset.store.url} does not pickle ({unfit}); "
            "leave the client out"
        ) from unfit


def blocks_by_workers(series: StepSeries, start: int, client: Client) -> Iterator[StepBlock]:
    """Yield the blocks from step `start` on, in order, however the workers finish; a bounded number is under way.

    Raises: the error of a worker's read, and `FieldError` when the cluster lacks workers.
    """
    workers = len(worker_threads(client))
    _check_dataset_travels(series.dataset)
    work: Any = client.scatter(_WorkerTask(series.dataset, series.weights), broadcast=True, hash=False)

    def parts() -> Iterator[tuple[None, Any]]:
        before = None if start == 0 else client.submit(_WorkerTask.last_tile, work, [start - 1], pure=False)
        for first in range(start, len(series), series.block):
            follows = series.follows[first : min(first + series.block, len(series))]
            samples = range(first, first + len(follows))
            part = client.submit(_WorkerTask.read_block, work, samples, follows, pure=False)
            yield None, client.submit(_WorkerTask.joined, work, part, before if follows[0] else None, pure=False)
            before = client.submit(itemgetter(-1), part, pure=False)

    yield from (block for _, block in results_in_order(client, parts(), workers))


class _WorkerTask:
    """Dataset whose steps a worker reads, with a reader that stays from task to task."""

    def __init__(self, dataset: Dataset, weights: str) -> None:
        self._dataset, self._weights = dataset, weights

    def __reduce__(self) -> tuple[Any, ...]:
        return _WorkerTask, (self._dataset, self._weights)

    @cached_property
    def _engine(self) -> ReadEngine:
        return self._dataset.new_engine()

    @cached_property
    def _row_weights(self) -> MomentValues | None:
        owned = self._dataset.layout.owned(mesh_coordinate(self._dataset.device_mesh()))
        return StepSeries.of(self._dataset, self._weights, 1).row_weights(owned[2:])

    def _tiles(self, samples: Sequence[int]) -> StepTiles:
        reading = self._dataset.reading(samples)
        steps, *_ = self._dataset.unpack(self._dataset.read(self._engine, reading), reading)
        inner = self._dataset.frame.inner(mesh_coordinate(self._dataset.device_mesh()))
        return _steps_as_numpy(steps)[(..., *inner)]

    def last_tile(self, samples: Sequence[int]) -> StepTiles:
        return self._tiles(samples)[-1].copy()

    def read_block(self, samples: Sequence[int], follows: NDArray[np.bool_]) -> tuple[StepBlock, StepTiles, StepTiles]:
        tiles = self._tiles(samples)
        within = _reduce_steps(samples[-1] + 1, follows, tiles, None, self._row_weights)
        return within, tiles[0].copy(), tiles[-1].copy()

    def joined(self, part: tuple[StepBlock, StepTiles, StepTiles], before: StepTiles | None) -> StepBlock:
        """Return all moments of a block, with those of the difference of its first step to the step before, if any."""
        within, first, _ = part
        if before is None:
            return within
        seam = ChannelMoments.of(first, self._row_weights, minus=before)
        return replace(within, differences=[seam, *within.differences])


# -- statistics -------------------------------------------------------------------------------------------------------

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
      `resume` the run goes on from it, if it exists, with the same bits as a run that was never interrupted. A store
      that has grown since, or was written anew as a few of its chunks show, is refused;
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
            begin = (lambda: load_moments(path, self._identity, shape)) if resume else lambda: check_moments(path)
            saved = result_of_first_rank(self.mesh, self.is_first, begin)
        done, tables = saved or (0, np.broadcast_to(nothing, shape))
        return StatisticsState(done, tables[self.me])

    @cached_property
    def _identity(self) -> dict[str, Any]:
        """Facts of the run that its checkpoint must have too, among them some stored bytes: a new store has others."""
        return {**self.series.identity(), "stored bytes": self.series.dataset.identity().chunks}

    def gather(self, state: StatisticsState) -> MomentTables:
        """[ranks, 2, 7, C], in mesh order."""
        if self.mesh is None:
            return state.tables[None]
        tables = torch.from_numpy(state.tables.copy()).to(self.mesh.device_type)
        names = [name for name, _ in axes_of_mesh(self.mesh)]
        return np.stack([t.cpu().numpy() for t in comm.all_gather(tables, self.mesh, names)])

    def save(self, state: StatisticsState) -> None:
        if (path := self.checkpoint) is not None:
            tables = self.gather(state)
            begun = self._identity if self.is_first else {}
            result_of_first_rank(self.mesh, self.is_first, lambda: save_moments(path, begun, state.done, tables))

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
