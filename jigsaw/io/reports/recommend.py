"""`recommend`: the mesh and cuts that read a store cheapest, and the chunks that a mesh would read cheapest.

Candidates are planned as if they existed (`jigsaw.io.reading.read_plan`), on one typical sample, and ranked by the
predicted cost (`cost_of_mode`). Integers only: it needs no ranks, and asks the store only where its
chunks lie.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np

from jigsaw.errors import HaloError, ShardingError
from jigsaw.geometry.axis_names import DATA_AXIS
from jigsaw.geometry.cut import box_elements
from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.chunks.chunk import (
    MOST_PORTION_SHARE,
    ChunkIndex,
    ChunkPortion,
    ChunkRef,
    ChunkRows,
    needed_byte_spans,
    needed_share,
)
from jigsaw.io.chunks.chunk_finder import SMALLEST_DIVIDED_CHUNK, ChunkFinder
from jigsaw.io.chunks.codecs import CodecDecoder
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.datasets.opening import open
from jigsaw.io.formats.array_source import FilelessPlaces
from jigsaw.io.reading.read_plan import ReadPlan, make_read_plan, plan_read
from jigsaw.io.series.coords import SPATIAL_ROLES
from jigsaw.io.series.request import ReadRequest, SampleSpace
from jigsaw.io.series.store_survey import StoreVariable

TILE_GROWTH = 1.1
"""Largest growth of the largest tile for which cuts move to the edges of chunks: all ranks wait for that tile."""
_CHUNK_ROWS, _CHUNK_LEVELS = (128, 256), 4  # sizes that are tried besides those that fit the cuts
_LARGEST_CHUNK = 1 << 26
_USUAL_RATIO = 0.5  # stored by decoded bytes, where the store does not tell
_CHEAP_JOBS = 3000  # chunks times candidates that are planned in about a second


class ReadFigures(NamedTuple):
    """Figures of a read: CPU seconds and bytes over all ranks (None: unknown), bytes that the busiest rank decodes."""

    seconds: float
    stored_bytes: int | None
    decoded_bytes: int
    sent_bytes: int
    busiest_bytes: int
    amplification: float

    @classmethod
    def of(cls, plan: ReadPlan) -> ReadFigures:
        total, seconds = plan.total, sum(plan.cost(name, mode) for name, mode in plan.modes.items())
        busiest = max(row.decoded_bytes for row in plan.rows)
        return cls(seconds, total.stored, total.decoded_bytes, total.sent_bytes, busiest, plan.amplification)


@dataclass(frozen=True)
class MeshOption:
    """A mesh, and for each dim that is cut where: ``"balanced"``, or explicit points at the edges of chunks."""

    axes: Mapping[str, int]
    split: Mapping[str, str | tuple[int, ...]]
    largest_tile: int
    figures: ReadFigures


@dataclass(frozen=True)
class ChunkOption:
    """Sizes of chunks and of the shards that hold them, by canonical dim, and what reading a sample then costs."""

    chunks: Mapping[str, int]
    shards: Mapping[str, int]
    chunk_bytes: int
    seconds: float
    stored_bytes: int
    decoded_bytes: int


@dataclass(frozen=True)
class Recommendation:
    """The options, best first, and what the dataset costs as it is opened: `now`.

    `meshes` cut space by as many ranks as the dataset's mesh, or as asked for; `chunks` are for the dataset's mesh.

    >>> best = jigsaw.io.recommend("globe.zarr", mesh={"lat": 2})
    >>> best.chunks[0].chunks
    {'time': 1, 'lat': 5, 'lon': 16}
    """

    now: ReadFigures
    meshes: tuple[MeshOption, ...]
    chunks: tuple[ChunkOption, ...]

    @property
    def mesh_gain(self) -> float:
        """Factor by which the best mesh reads cheaper; 1 where it is the present one."""
        return self._times_cheaper(self.meshes[0].figures.seconds if self.meshes else 0.0)

    @property
    def chunk_gain(self) -> float:
        """Factor by which the dataset's mesh reads a store with the best chunks cheaper."""
        return self._times_cheaper(self.chunks[0].seconds if self.chunks else 0.0)

    def _times_cheaper(self, then: float) -> float:
        return self.now.seconds / then if then else 1.0


def recommend(
    store: Any,
    *,
    ranks: int | None = None,
    mesh: Mapping[str, int] | None = None,
    sample: int | None = None,
    **arguments: Any,
) -> Recommendation:
    """Recommend the best meshes of `ranks` ranks for a store, and the best chunks and shards for `mesh`.

    - `store`: a `Dataset`, or what `jigsaw.io.open` takes; `arguments` are further arguments of it (fields, halo, …);
    - `ranks`: the number of tiles that a sample is cut into; by default as many as the mesh cuts it into;
    - `mesh`: axis sizes as integers, for a store that is not open yet;
    - `sample`: the one that is planned, by default the middle one.

    *Sends*: nothing.

    Raises: a `ReadError` or `ShardingError` as `jigsaw.io.open`; `ShardingError` when no mesh of `ranks` ranks fits.

    >>> best = jigsaw.io.recommend("globe.zarr", mesh={"lat": 4}, ranks=4)
    >>> [option.axes for option in best.meshes]
    [{'lon': 4}, {'lat': 2, 'lon': 2}, {'lat': 4}]
    """
    dataset = store if isinstance(store, Dataset) else open(store, mesh=mesh or {}, **arguments)
    count = prod(cut.pieces for cut in dataset.layout.cuts[2:]) if ranks is None else ranks
    if count < 1:
        raise ShardingError(f"ranks={ranks} must be at least 1")
    request = dataset.reading([len(dataset) // 2 if sample is None else sample]).request
    plan = plan_read(request, dataset.store.arrays, dataset.mode).ask_sizes()
    meshes, chunks = _mesh_options(dataset, request, count), _chunk_options(dataset, request, plan)
    return Recommendation(ReadFigures.of(plan), meshes, chunks)


def best_chunks(dataset: Dataset) -> ChunkOption:
    """Return the chunks and shards that the dataset's mesh would read cheapest."""
    request = dataset.reading([len(dataset) // 2]).request
    plan = plan_read(request, dataset.store.arrays, dataset.mode)
    return _chunk_options(dataset, request, plan)[0]


def is_cheap_recommendation(dataset: Dataset, plan: ReadPlan) -> bool:
    """Say whether `recommend` takes about a second at most: few chunks times few candidates, and not a far store."""
    if any(table.far for table in plan.tables.values()):
        return False
    whole = sum(plan.tables[name].grid.chunk_bytes for name, *_ in plan.jobs)
    candidates = 2 * sum(1 for _ in _rank_factors(plan.ranks, dataset))
    return len(plan.jobs) * candidates + whole // SMALLEST_DIVIDED_CHUNK * candidates <= _CHEAP_JOBS


# -- meshes ------------------------------------------------------------------------------------------------------------


def _mesh_options(dataset: Dataset, request: ReadRequest, ranks: int) -> tuple[MeshOption, ...]:
    options = [
        _weigh_mesh(dataset, request, frame)
        for sizes in _rank_factors(ranks, dataset)
        for frame in _sample_spaces(dataset, sizes)
    ]
    if not options:
        space = ", ".join(f"{d} {n}" for d, n in zip(dataset.frame.dims, dataset.frame.sizes, strict=True))
        raise ShardingError(f"no mesh of {ranks} ranks cuts {space} with a halo of {dataset.frame.halo}; use fewer")
    options.sort(key=lambda o: (_to_three_digits(o.figures.seconds), o.figures.busiest_bytes, o.largest_tile))
    return tuple(options)


def _to_three_digits(seconds: float) -> float:
    """Round a cost to three digits: predictions are not more accurate."""
    return float(f"{seconds:.2e}")


def _rank_factors(ranks: int, dataset: Dataset) -> Iterator[tuple[int, ...]]:
    sizes = dataset.frame.sizes
    divisors = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for pieces in product(*([n for n in divisors if n <= size] for size in sizes)):
        if prod(pieces) == ranks:
            yield pieces


def _sample_spaces(dataset: Dataset, pieces: Sequence[int]) -> Iterator[SampleSpace]:
    old = dataset.frame
    data = tuple((name, n) for name, n in old.axes if name == DATA_AXIS)
    axes = (*data, *((d, n) for d, n in zip(old.dims, pieces, strict=True) if n > 1))
    balanced = replace(old, axes=axes, spec=old.dims, split=("balanced",) * len(pieces))
    edged = tuple(_points_at_edges(dataset, i, n) or "balanced" for i, n in enumerate(pieces))
    for frame in dict.fromkeys((balanced, replace(balanced, split=edged))):
        try:
            frame.layout((1, 1), (None, None))
        except (ShardingError, HaloError):
            continue
        yield frame


def _points_at_edges(dataset: Dataset, dim: int, pieces: int) -> tuple[int, ...] | None:
    """Cut points at the edges of the largest array's chunks, nearest to equal pieces; None where these are uneven."""
    name, size, align = dataset.frame.dims[dim], dataset.frame.sizes[dim], dataset.frame.align[dim]
    largest = _largest_variable(v for v in dataset.variables if name in v.roles)
    edges = sorted(edges_in_sample(dataset, largest, name, size) | {0, size})
    points = [min(edges, key=lambda e: abs(e - size * i / pieces)) for i in range(pieces + 1)]
    widths = np.diff(points)
    if pieces == 1 or align > 1 or widths.min() < 1 or widths.max() > TILE_GROWTH * -(-size // pieces):
        return None
    return tuple(points)


def edges_in_sample(dataset: Dataset, variable: StoreVariable, dim: str, size: int) -> set[int]:
    """Return where a variable's chunks end, in rows of a sample, which may be flipped, or begin at another longitude.

    Rows of cells in another order than the store's have no such ends.
    """
    if dataset.turn.cells is not None:
        return set()
    stored, begin = variable.table.grid.along[variable.roles.index(dim)].edges(), dataset.turn.rolled.get(dim, 0)
    return {size - e for e in stored} if dim in dataset.flipped else {(e - begin) % size for e in stored}


def _weigh_mesh(dataset: Dataset, request: ReadRequest, frame: SampleSpace) -> MeshOption:
    layout = frame.layout(request.layout.shape[:2], (None, None), axes=frame.domain)
    plan = plan_read(replace(request, layout=layout), dataset.store.arrays, dataset.mode)
    rules = zip(frame.dims, frame.split, strict=True)
    split = {d: r if isinstance(r, str) else tuple(r) for d, r in rules if dict(frame.axes).get(d, 1) > 1}
    largest = max(box_elements(layout.held(coord)[2:]) for coord in layout.coords())
    return MeshOption(dict(frame.axes), split, largest, ReadFigures.of(plan))


# -- chunks ------------------------------------------------------------------------------------------------------------


def _chunk_options(dataset: Dataset, request: ReadRequest, plan: ReadPlan) -> tuple[ChunkOption, ...]:
    """Return chunk shapes for the dataset's own mesh, the cheapest first; arrays alike are planned once."""
    kept = _group_alike(dataset.variables, request)
    whole = plan.total
    ratio = whole.stored_bytes / whole.decoded_bytes if whole.stored_bytes and whole.decoded_bytes else _USUAL_RATIO
    options = [_weigh_chunks(dataset.mode, kept, chunks, ratio) for chunks in _chunk_shapes(dataset, request, kept)]
    return tuple(sorted(options, key=lambda o: (_to_three_digits(o.seconds), -o.chunk_bytes)))


class _AlikeArrays(NamedTuple):
    """An array that stands for all `many` of the same shape and roles of which the same is read, and its request."""

    variable: StoreVariable
    many: int
    request: ReadRequest


def _group_alike(variables: Sequence[StoreVariable], request: ReadRequest) -> list[_AlikeArrays]:
    groups: dict[Any, list[StoreVariable]] = {}
    for variable in variables:
        table = variable.table
        read = [len(p or ()) for part in request.parts if part.array == table.name for p in part.picks]
        groups.setdefault((variable.roles, table.shape, table.dtype, tuple(read)), []).append(variable)
    alike: list[_AlikeArrays] = []
    for first, *others in groups.values():
        parts = tuple(part for part in request.parts if part.array == first.table.name)
        alike.append(_AlikeArrays(first, 1 + len(others), replace(request, parts=parts)))
    return alike


def _largest_variable(variables: Iterable[StoreVariable]) -> StoreVariable:
    return max(variables, key=lambda v: prod(v.table.shape) * v.table.grid.itemsize)


def _chunk_shapes(dataset: Dataset, request: ReadRequest, alike: Sequence[_AlikeArrays]) -> Iterator[dict[str, int]]:
    """Yield sizes by role: one step, one to all levels, and space whole, aligned with the cuts, or in powers of two."""
    largest = _largest_variable(a.variable for a in alike)
    choices: dict[str, list[int]] = {"time": [1]} if "time" in largest.roles else {}
    if "level" in largest.roles:
        count = largest.size("level")
        choices["level"] = sorted({1, min(_CHUNK_LEVELS, count), count})
    for i, dim in enumerate(dataset.frame.dims):
        size, pieces = dataset.frame.sizes[i], request.layout.cuts[2 + i].pieces
        aligned = [-(-size // (pieces * k)) for k in (1, 2)]
        choices[dim] = sorted({size, *aligned, *(n for n in _CHUNK_ROWS if n < size)})
    cells = prod(max(sizes) for sizes in choices.values())
    for picked in product(*choices.values()):
        size, most = (n * largest.table.grid.itemsize for n in (prod(picked), cells))
        if SMALLEST_DIVIDED_CHUNK <= size <= _LARGEST_CHUNK or most <= SMALLEST_DIVIDED_CHUNK:
            yield dict(zip(choices, picked, strict=True))


def _weigh_chunks(mode: str, alike: Sequence[_AlikeArrays], chunks: Mapping[str, int], ratio: float) -> ChunkOption:
    seconds, stored, decoded, largest_chunk = 0.0, 0, 0, 0
    for variable, many, request in alike:
        table = proposed_table(variable, chunks, ratio)
        plan = make_read_plan(request, {table.name: table}, mode)
        seconds += many * plan.cost(table.name, plan.modes[table.name])
        stored, decoded = stored + many * plan.total.stored_bytes, decoded + many * plan.total.decoded_bytes
        largest_chunk = max(largest_chunk, table.grid.chunk_bytes)
    largest = _largest_variable(a.variable for a in alike)
    dims = dims_with_roles(largest)
    shape = proposed_table(largest, chunks, ratio).chunks
    shards = shard_shape_of(dims, largest.table.grid.itemsize, shape)
    by_role = {role: n for (role, _, _), n in zip(dims, shards, strict=True)}
    return ChunkOption(dict(chunks), by_role, largest_chunk, seconds, stored, decoded)


MOST_SHARD_BYTES = 1 << 27
"""Largest number of decoded bytes in a shard, unless one chunk is larger: a writer keeps these in memory at a time."""
BLOSC_BLOCK_BYTES = 1 << 18
"""Size of the blocks of a Blosc frame, each of which is decoded alone; Blosc chooses about this size."""
SPACELESS_CHUNK_BYTES = 1 << 26
"""Largest number of bytes in a chunk of an array without space."""


def chunk_shape_of(
    dims: Sequence[tuple[str, str, int]], itemsize: int, given_sizes: Mapping[str, int]
) -> tuple[int, ...]:
    """Return the chunk of an array whose dims are (role, own name, size), given sizes by role or name.

    Levels and space that are not named are whole; of any other dim a chunk has one row. An array without space is one
    chunk, or as many as keep each small.
    """
    whole = [max(n, 1) for _, _, n in dims]
    if any(role in SPATIAL_ROLES for role, _, _ in dims):
        free = [n if role in (*SPATIAL_ROLES, "level") else 1 for (role, _, _), n in zip(dims, whole, strict=True)]
        sizes = [given_sizes.get(own, given_sizes.get(role, n)) for (role, own, _), n in zip(dims, free, strict=True)]
        return tuple(min(size, n) for size, n in zip(sizes, whole, strict=True))
    if whole and prod(whole) * itemsize > SPACELESS_CHUNK_BYTES:
        whole[0] = max(1, SPACELESS_CHUNK_BYTES // (prod(whole[1:]) * itemsize))
    return tuple(whole)


def shard_shape_of(
    dims: Sequence[tuple[str, str, int]], itemsize: int, chunks: Sequence[int], most: int = MOST_SHARD_BYTES
) -> tuple[int, ...]:
    """Return the whole chunks along each dim that make a shard of at most `most` bytes: space and levels first, then
    steps.

    Fewer, larger files cost a reader nothing: it fetches chunks, and keeps the index of a shard.
    """
    shard = list(chunks)
    last_first = sorted(range(len(dims)), key=lambda d: (dims[d][0] == "time", -d))
    for d in last_first:
        room = most // (prod(shard) * itemsize)
        needed = -(-dims[d][2] // chunks[d])
        # 128 steps rather than 129: powers of two fit other cuts along the dim
        shard[d] = chunks[d] * (needed if needed <= room else 1 << max(room, 1).bit_length() - 1)
    return tuple(shard)


def dims_with_roles(variable: StoreVariable) -> list[tuple[str, str, int]]:
    """Return (role, own name, size) of each dim."""
    return list(zip(variable.roles, variable.table.dims, variable.table.shape, strict=True))


def proposed_table(variable: StoreVariable, chunks: Mapping[str, int], ratio: float) -> ArrayTable:
    """Return the array in chunks of these sizes; each is stored in `ratio` of its decoded bytes."""
    table = variable.table
    shape = chunk_shape_of(dims_with_roles(variable), table.grid.itemsize, chunks)
    stored = max(1, int(prod(shape) * table.grid.itemsize * ratio))
    decoder = CodecDecoder(np.dtype(table.dtype), tuple(range(table.grid.ndim)), "blosc")
    places = FilelessPlaces("a store that is not written yet", stored)
    return _ProposedTable(
        name=table.name,
        shape=table.shape,
        dims=table.dims,
        dtype=table.dtype,
        chunks=shape,
        attrs={},
        decoder=decoder,
        places=places,
    )


class _ProposedTable(ArrayTable):
    """An array whose chunks are nowhere: its finder makes them up."""

    def make_finder(self) -> ChunkFinder:
        return _ProposedFinder(self.name, self.grid, self.places, self.decoder, self.slices)


class _ProposedFinder(ChunkFinder):
    """Parts of chunks are those blocks of equal size that the rows touch."""

    def portion_key(self, index: ChunkIndex, ref: ChunkRef | None) -> Hashable:
        return "proposed", self.grid.itemsize, self.stored_bytes(index)

    def portion(self, index: ChunkIndex, rects: Sequence[ChunkRows]) -> ChunkPortion | None:
        grid, size = self.grid, self.grid.bytes_of(index)
        if size < SMALLEST_DIVIDED_CHUNK or needed_share(rects, grid.chunks) > MOST_PORTION_SHARE:
            return None
        spans = needed_byte_spans(rects, grid.chunks, range(grid.ndim), grid.itemsize, BLOSC_BLOCK_BYTES)
        blocks: set[Any] = {
            b for a, z in spans.tolist() for b in range(a // BLOSC_BLOCK_BYTES, -(-z // BLOSC_BLOCK_BYTES))
        }
        decoded = min(size, len(blocks) * BLOSC_BLOCK_BYTES)
        if decoded > MOST_PORTION_SHARE * size:
            return None
        stored = self.stored_bytes(index) * decoded // size
        return ChunkPortion(((0, stored),), ((0, decoded),), decoded=decoded)
