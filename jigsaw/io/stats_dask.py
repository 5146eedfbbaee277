"""Blocks of steps read by the workers of a `dask.distributed` cluster, each through a reader of its own.

A worker keeps the first and last tile of its block; the difference between two blocks is taken by whichever worker
has one of them, so that every step is read once and only moments come back.
"""

from __future__ import annotations

import os
import re
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from jigsaw.io.dataset import Dataset
from jigsaw.io.errors import FieldError
from jigsaw.io.moments import Float, Moments
from jigsaw.io.opening import open
from jigsaw.io.stats_series import Series
from jigsaw.io.stats_state import Block
from jigsaw.io.stats_tiles import Array, inner, of_steps, plain
from jigsaw.mesh import coordinate, init_mesh

if TYPE_CHECKING:
    from dask.distributed import Client

_AHEAD = 2  # blocks a worker has been given and not yet answered


@dataclass(frozen=True)
class Recipe:
    """How a worker opens the same dataset."""

    store: str
    fields: tuple[str, ...]
    dtype: str
    nan: str | float
    select: tuple[tuple[str, int], ...]
    lat_order: str

    @classmethod
    def of(cls, dataset: Dataset) -> Recipe:
        """Raises: `FieldError` for a dataset that workers could not open by a path, or of normalised values."""
        lat = dataset.whole_coords.get("lat")
        if any(size > 1 for _, size in dataset.frame.axes):
            raise FieldError(
                f"client= spreads the work over dask's workers, but the mesh has {dict(dataset.frame.axes)}; "
                "open the dataset on a mesh of one rank, or leave the client out"
            )
        if any(s != 1.0 for s in dataset.scale) or any(o != 0.0 for o in dataset.offset):
            raise FieldError("client= takes statistics of the store's values; open the dataset without normalize")
        if not os.path.exists(dataset.store.url) and not re.match(r"[a-z][a-z0-9+.-]*://", dataset.store.url):
            raise FieldError(
                f"client= needs a store that workers open by its path or URL, not {dataset.store.url!r}; "
                "leave the client out, or open the file itself"
            )
        north = "store" if lat is None or len(lat) < 2 else "north-first" if lat[0] > lat[-1] else "south-first"
        name = str(dataset.dtype).removeprefix("torch.")
        select = tuple(sorted(dataset.select.items()))
        return cls(dataset.store.url, dataset.fields, name, dataset.nan, select, north)


def blocks(series: Series, start: int, client: Client) -> Iterator[Block]:
    """The blocks from step `start` on, in order, however the workers finish; a bounded number is under way.

    Raises: what a worker's read raised, and `FieldError` when the cluster has no worker.
    """
    known: Any = client.nthreads()
    workers = len(known)
    if not workers:
        raise FieldError(f"the dask cluster at {client.scheduler_info()['address']} has no workers; start some first")
    work = _Work(Recipe.of(series.dataset), series.weights)
    dataset, follows = series.dataset, series.follows
    steps = dataset.anchors + dataset.inputs[0]
    before = None if start == 0 else client.submit(_tile, work, int(steps[start - 1]), pure=False)
    ranges = iter([(a, min(a + series.block, len(series))) for a in range(start, len(series), series.block)])
    running: deque[tuple[int, Any]] = deque()
    try:
        while True:
            while len(running) < _AHEAD * workers and (span := next(ranges, None)) is not None:
                part = client.submit(_part, work, steps[slice(*span)], follows[slice(*span)], pure=False)
                running.append((span[1], client.submit(_joined, work, part, before, pure=False)))
                before = client.submit(_last, part, pure=False)
            if not running:
                return
            stop, future = running.popleft()
            yield Block(stop, *future.result())
    finally:
        client.cancel([future for _, future in running])
        client.run(_forget, work, on_error="ignore")


# -- on a worker ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Work:
    recipe: Recipe
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
        recipe = work.recipe
        self.dataset = open(
            recipe.store,
            mesh=init_mesh(device="cpu", data=1),
            fields=recipe.fields,
            dtype=recipe.dtype,
            nan=recipe.nan,
            select=dict(recipe.select),
            lat_order=recipe.lat_order,
        )
        self.at = coordinate(self.dataset.device_mesh())
        layout = self.dataset.layout
        self.inner = inner(layout, self.at)
        self.weights: Float | None = Series.of(self.dataset, None, work.weights, 1).row_weights(
            layout.owned(self.at)[2:]
        )
        self.engine = self.dataset.new_engine()

    def tiles(self, steps: NDArray[np.int64]) -> Array:
        r"""The steps [n, C, \*space] of the store."""
        reading = self.dataset.reading(np.searchsorted(self.dataset.anchors, steps).tolist())
        block = self.engine.read(self.dataset.plan_of(reading))
        rounded = torch.from_numpy(block).to(self.dataset.dtype)  # numpy has no bfloat16 to read into
        return plain(rounded[:, None])[(..., *self.inner)]


_readers: dict[_Work, _Reader] = {}
_opening = threading.Lock()


def _reader(work: _Work) -> _Reader:
    with _opening:
        if work not in _readers:
            _readers[work] = _Reader(work)
        return _readers[work]


def _forget(work: _Work) -> None:
    with _opening:
        reader = _readers.pop(work, None)
    if reader is not None:
        reader.engine.close()


def _part(work: _Work, steps: NDArray[np.int64], follows: NDArray[np.bool_]) -> _Part:
    reader = _reader(work)
    tiles = reader.tiles(steps)
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


def _tile(work: _Work, step: int) -> Array:
    return _reader(work).tiles(np.array([step]))[0].copy()
