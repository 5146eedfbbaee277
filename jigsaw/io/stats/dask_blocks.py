"""Blocks of steps read by the workers of a `dask.distributed` cluster, each through its own reader.

A worker keeps the first and last tile of its block. The difference between two blocks is taken by whichever worker has
one of them. So every step is read once, and only moments come back.
"""

from __future__ import annotations

import pickle
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.stats.cluster import results_in_order, worker_threads
from jigsaw.io.stats.mesh_blocks import StepTiles, moments_of_steps, steps_as_numpy
from jigsaw.io.stats.moments import ChannelMoments, StepBlock
from jigsaw.io.stats.step_series import StepSeries
from jigsaw.ranks.mesh import mesh_coordinate

if TYPE_CHECKING:
    from dask.distributed import Client


def _check_dataset_travels(dataset: Dataset) -> None:
    """Raise `FieldError` for a dataset that a worker cannot take over."""
    if dataset.device is None or any(size > 1 for _, size in dataset.frame.axes):
        raise FieldError(
            f"client= spreads the work over dask's workers, but the dataset's mesh is {dict(dataset.frame.axes)}; "
            "open it on a mesh of one rank, or leave the client out"
        )
    if dataset.store.url.startswith("xarray dataset"):
        # what is dask's in it would wait for workers that all wait for it
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
    key, follows = uuid.uuid4().hex, series.follows
    work: Any = client.scatter(_WorkerTask(key, series.dataset, series.weights), broadcast=True, hash=False)

    def given() -> Iterator[tuple[int, Any]]:
        before = None if start == 0 else client.submit(_read_tile, work, start - 1, pure=False)
        for first in range(start, len(series), series.block):
            stop = min(first + series.block, len(series))
            part = client.submit(_read_block, work, range(first, stop), follows[first:stop], pure=False)
            yield stop, client.submit(_join_block, work, part, before, pure=False)
            before = client.submit(attrgetter("last"), part, pure=False)

    try:
        for stop, moments in results_in_order(client, given(), workers):
            yield StepBlock(stop, *moments)
    finally:
        client.run(_forget_reader, key, on_error="ignore")


# -- on a worker ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _WorkerTask:
    key: str
    dataset: Dataset
    weights: str


@dataclass(frozen=True)
class _DaskBlock:
    """The moments within a block, and its outer tiles; `joins`: no gap in time lies before its first step."""

    values: list[ChannelMoments]
    differences: list[ChannelMoments]
    first: StepTiles
    last: StepTiles
    joins: bool


class _WorkerReader:
    """Reader of a worker process, shared by its threads."""

    def __init__(self, work: _WorkerTask) -> None:
        self.dataset = work.dataset
        at = mesh_coordinate(self.dataset.device_mesh())
        self.inner = self.dataset.frame.inner(at)
        self.weights = StepSeries.of(self.dataset, work.weights, 1).row_weights(self.dataset.layout.owned(at)[2:])
        self.engine = self.dataset.new_engine()

    def tiles(self, samples: Sequence[int]) -> StepTiles:
        r"""Read the steps [n, C, \*space] of some samples."""
        reading = self.dataset.reading(samples)
        given, *_ = self.dataset.unpack(self.dataset.read(self.engine, reading), reading)
        return steps_as_numpy(given)[(..., *self.inner)]


_worker_readers: dict[str, _WorkerReader] = {}
_readers_lock = threading.Lock()


def _worker_reader(work: _WorkerTask) -> _WorkerReader:
    with _readers_lock:
        if work.key not in _worker_readers:
            _worker_readers[work.key] = _WorkerReader(work)
        return _worker_readers[work.key]


def _forget_reader(key: str) -> None:
    with _readers_lock:
        reader = _worker_readers.pop(key, None)
    if reader:
        reader.engine.close()


def _read_block(work: _WorkerTask, samples: Sequence[int], follows: NDArray[np.bool_]) -> _DaskBlock:
    reader = _worker_reader(work)
    tiles = reader.tiles(samples)
    moments = moments_of_steps(follows, tiles, None, reader.weights)
    return _DaskBlock(*moments, tiles[0].copy(), tiles[-1].copy(), bool(follows[0]))


def _join_block(
    work: _WorkerTask, part: _DaskBlock, before: StepTiles | None
) -> tuple[list[ChannelMoments], list[ChannelMoments]]:
    """Return all moments of a block, including the difference of its first step to the step before."""
    if before is None or not part.joins:
        return part.values, part.differences
    seam = ChannelMoments.of(part.first, _worker_reader(work).weights, minus=before)
    return part.values, [seam, *part.differences]


def _read_tile(work: _WorkerTask, sample: int) -> StepTiles:
    return _worker_reader(work).tiles([sample])[0].copy()
