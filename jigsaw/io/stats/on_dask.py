"""Blocks of steps read by the workers of a `dask.distributed` cluster, each through a reader of its own.

A worker keeps the first and last tile of its block; the difference between two blocks is taken by whichever worker
has one of them, so that every step is read once and only moments come back.
"""

from __future__ import annotations

import pickle
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.io.cluster import in_order, workers_of
from jigsaw.io.dataset import Dataset
from jigsaw.io.errors import FieldError
from jigsaw.io.stats.moments import Float, Moments
from jigsaw.io.stats.series import Series
from jigsaw.io.stats.state import Block
from jigsaw.io.stats.tiles import Array, of_steps, plain
from jigsaw.mesh import coordinate

if TYPE_CHECKING:
    from dask.distributed import Client


def _check(dataset: Dataset) -> None:
    """Raises: `FieldError` for a dataset that a worker cannot take over."""
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


def blocks(series: Series, start: int, client: Client) -> Iterator[Block]:
    """The blocks from step `start` on, in order, however the workers finish; a bounded number is under way.

    Raises: what a worker's read raised, and `FieldError` when the cluster has no worker.
    """
    workers = len(workers_of(client))
    _check(series.dataset)
    key, follows = uuid.uuid4().hex, series.follows
    work: Any = client.scatter(_Work(key, series.dataset, series.weights), broadcast=True, hash=False)

    def given() -> Iterator[tuple[int, Any]]:
        before = None if start == 0 else client.submit(_tile, work, start - 1, pure=False)
        for first in range(start, len(series), series.block):
            stop = min(first + series.block, len(series))
            part = client.submit(_part, work, range(first, stop), follows[first:stop], pure=False)
            yield stop, client.submit(_joined, work, part, before, pure=False)
            before = client.submit(_last, part, pure=False)

    try:
        for stop, moments in in_order(client, given(), workers):
            yield Block(stop, *moments)
    finally:
        client.run(_forget, key, on_error="ignore")


# -- on a worker ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    key: str
    dataset: Dataset
    weights: str


@dataclass(frozen=True)
class _Part:
    """The moments within a block, and what the blocks beside it need; `joins`: its first step follows another."""

    values: list[Moments]
    differences: list[Moments]
    first: Array
    last: Array
    joins: bool


class _Reader:
    """One reader a worker process, shared by its threads."""

    def __init__(self, work: _Work) -> None:
        self.dataset = work.dataset
        at, layout = coordinate(self.dataset.device_mesh()), self.dataset.layout
        self.inner = self.dataset.frame.inner(at)
        self.weights: Float | None = Series.of(self.dataset, work.weights, 1).row_weights(layout.owned(at)[2:])
        self.engine = self.dataset.new_engine()

    def tiles(self, samples: Sequence[int]) -> Array:
        r"""The steps [n, C, \*space] of some samples."""
        reading = self.dataset.reading(samples)
        given, *_ = self.dataset.unpack(self.dataset.read(self.engine, reading), reading)
        return plain(given)[(..., *self.inner)]


_readers: dict[str, _Reader] = {}
_opening = threading.Lock()


def _reader(work: _Work) -> _Reader:
    with _opening:
        if work.key not in _readers:
            _readers[work.key] = _Reader(work)
        return _readers[work.key]


def _forget(key: str) -> None:
    with _opening:
        reader = _readers.pop(key, None)
    if reader is not None:
        reader.engine.close()


def _part(work: _Work, samples: Sequence[int], follows: NDArray[np.bool_]) -> _Part:
    reader = _reader(work)
    tiles = reader.tiles(samples)
    moments = of_steps(follows, tiles, None, reader.weights)
    return _Part(*moments, tiles[0].copy(), tiles[-1].copy(), bool(follows[0]))


def _joined(work: _Work, part: _Part, before: Array | None) -> tuple[list[Moments], list[Moments]]:
    """All moments of a block: with the difference of its first step to the step before."""
    if before is None or not part.joins:
        return part.values, part.differences
    seam = Moments.of(part.first, _reader(work).weights, minus=before)
    return part.values, [seam, *part.differences]


def _last(part: _Part) -> Array:
    return part.last


def _tile(work: _Work, sample: int) -> Array:
    return _reader(work).tiles([sample])[0].copy()
