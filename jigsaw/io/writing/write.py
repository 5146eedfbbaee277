"""Writing: every rank gives its own tile, and together they make one Zarr store or NetCDF file.

Only what must cross between ranks does: where a chunk (or shard) lies on several tiles, the rank that owns most of it
writes it and the others send it their boxes. Zarr is written by all ranks at once; a NetCDF-4 file by the first rank,
to which the others send their boxes, a budget at a time.

**Killed runs.**  A Zarr store opens at any moment and shows whole steps only: new chunks are not part of it until one
small file, the root ``zarr.json``, is replaced atomically after each append.  A NetCDF file takes its name when it is
whole (until then it is ``NAME.part``, flushed after each append).  On a full disk too, both keep the steps that were
complete, and ``mode="a"`` goes on after them.  Nothing is forced out of the system's own buffers, which a power cut may
lose.  `completeness` tells how far a store is; the same stands in its global attributes ``jigsaw_append_dim``,
``jigsaw_complete`` (steps along that dim) and ``jigsaw_closed``.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Required, Self, TypedDict, TypeVar, Unpack

from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import ShardingError, WriteError
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.writing.cf import StoredCoordinate
from jigsaw.io.writing.deliver import (
    FormatSink,
    PendingStep,
    StoreCompleteness,
    WriteJob,
    agreed_arguments,
    agreed_outline,
    check_mesh_of_all_ranks,
    completeness_from_attrs,
    deliver_boxes,
    gather_results,
    part_path,
)
from jigsaw.io.writing.lent_options import check_not_replaced, dataset_of_targets, options_like_dataset
from jigsaw.io.writing.netcdf_writer import NetcdfSink, netcdf_attrs
from jigsaw.io.writing.outline import (
    AppendOutline,
    ArrayDims,
    ArrayOutline,
    GrowingStore,
    TileData,
    WriteOptions,
    outline_append,
)
from jigsaw.io.writing.write_arguments import (
    checked_budget,
    checked_coordinates,
    checked_lender,
    checked_write_options,
    facts_of_options,
)
from jigsaw.io.writing.zarr_writer import ZarrSink, zarr_store_attrs
from jigsaw.nn.cells.gather import gather_neighbors
from jigsaw.ranks.mesh import is_same_mesh, mesh_coordinate
from jigsaw.tile.tile import Tile

T = TypeVar("T")
_FORMAT_SUFFIXES = {"zarr": ".zarr", "netcdf": ".nc"}
_WRITE_MODES = ("w-", "w", "a")


class WriterOptions(TypedDict, total=False):
    """Arguments of a `Writer`, which says what they are and what they are by default."""

    dims: Required[ArrayDims]
    fields: Sequence[str] | None
    attrs: Mapping[str, Any] | None
    field_attrs: Mapping[str, Mapping[str, Any]] | None
    like: Dataset | None
    chunks: Mapping[str, int] | None
    shards: Mapping[str, int] | None
    append_dim: str | None
    mode: str
    format: str | None
    encoding: Mapping[str, Any] | None
    budget: int


def write(
    path: str | os.PathLike[str],
    data: TileData,
    *,
    coords: Mapping[str, Any] | None = None,
    **options: Unpack[WriterOptions],
) -> None:
    """Write tiles to a Zarr v3 store or a NetCDF-4 file: one `Writer.append`, then `close`.

    *Shapes*: global ``data.shape`` = the sizes of `dims`; per rank its own tile.  See `Writer` for the arguments,
    what is sent and what is raised.

    >>> tile = jigsaw.shard(torch.zeros(1, 3, 9, 16), jigsaw.init_mesh(lat=1), (None, None, "lat", None))
    >>> lat, lon, times = np.linspace(90, -90, 9), np.arange(16) * 22.5, [np.datetime64("2020-01-01", "ns")]
    >>> jigsaw.io.write("forecast.zarr", tile, dims=("time", "channel", "lat", "lon"), fields=["t2m", "z@500", "z@850"],
    ...                 coords={"time": times, "lat": lat, "lon": lon}, field_attrs={"t2m": {"units": "K"}})
    >>> jigsaw.io.open("forecast.zarr", mesh={"lat": 1}).fields
    ('t2m', 'z@500', 'z@850')
    """
    with Writer(path, **options) as out:
        out.append(data, coords=coords)


def completeness(path: str | os.PathLike[str]) -> StoreCompleteness:
    """Return how far a store that jigsaw wrote is complete: whole steps along `append_dim`, and whether it is `closed`.

    Where a NetCDF file does not exist, its growing ``NAME.part`` is looked for.

    Raises: `WriteError` when the store does not exist, or jigsaw did not write it.

    >>> tile = jigsaw.shard(torch.zeros(2, 9), jigsaw.init_mesh(lat=1), (None, "lat"))
    >>> jigsaw.io.write("means.zarr", {"t2m": tile}, dims=("time", "lat"), append_dim="time")
    >>> jigsaw.io.completeness("means.zarr")
    StoreCompleteness(append_dim='time', steps=2, closed=True)
    """
    where = Path(path)
    if not where.exists() and part_path(where).is_file():
        where = part_path(where)
    attrs = _attrs_at_path(where) if where.exists() else {}
    record = completeness_from_attrs(attrs)
    if record is None:
        why = "does not say how far it is complete; jigsaw did not write it" if where.exists() else "does not exist"
        raise WriteError(f"{where} {why}")
    return record


class Writer:
    r"""A store that grows: opened once, appended to as a rollout goes on, closed when it is whole.

    - `path`: a local ``.zarr`` or ``.nc``; `format` (``"zarr"``, ``"netcdf"``) for other suffixes;
    - `dims`: the name of each dim of the tiles, or names by array;
    - `fields`: an array for each entry of the dim ``channel``. ``t2m`` is an array without levels, ``z@500`` the level
      500 of ``z``, along a dim ``level`` in the place of ``channel`` (levels that an array lacks are NaN). A mapping of
      tiles does not need fields: its keys name arrays;
    - `coords`: by name an array along the dim of that name, ``(array, attrs)``, ``(dims, array, attrs)`` or an xarray
      variable; whole, the same on every rank, in the order of the tiles' rows. Dates are stored in CF units and
      calendars; a coordinate without attributes gets those of the CF conventions;
    - `attrs`: of the store, those of the first rank; `field_attrs`: of each array, without those of packing, such as
      ``scale_factor``;
    - `like`: a `jigsaw.io.Dataset` that lends its space and level coordinates (space along dims named as in jigsaw,
      ``lat``, or as in its store) and the units of time. It also lends all attributes but those that name variables
      that are not written. As `fields` it lends the channels of its target by their names in its store.
      Cells that `convert` put along a curve are written in the order that they had before;
    - `chunks`, `shards`: sizes by dim; by default one step of time, all levels, and in space the largest tile, so that
      chunks and tiles align. Shards hold whole chunks, and only Zarr has them;
    - `append_dim`: the dim along which it grows, such as ``time`` or ``prediction_timedelta``;
    - `mode`: ``"w-"`` makes a new store, ``"w"`` replaces one, ``"a"`` goes on after its last complete step;
    - `encoding`: ``dtype`` (bfloat16 is stored as float32, else tiles keep theirs) and, in Zarr, ``compressors``,
      ``filters``, ``serializer``, in NetCDF ``compression``, ``complevel``, ``shuffle``, ``fletcher32``;
    - `budget`: bytes that a rank puts together at a time, at least one chunk or shard; the smallest of all ranks;
    - `wait`: with False, a thread writes a copy, of each array at most `budget`, behind the next step. In Zarr alone,
      for tiles whose mesh has all ranks of the job.

    Making one sends nothing; `append` and `close` are collective over the tiles' mesh.  Every rank gives the same
    arguments, apart from `attrs` and `budget`.  Only one writer at a time grows a store.

    Raises: `WriteError` for another suffix or mode, and for chunks, shards or an encoding that the format does not
    have; then what `append` raises.

    >>> tile = jigsaw.shard(torch.zeros(1, 9, 16), jigsaw.init_mesh(lat=1), (None, "lat", None))
    >>> lat, lon = np.linspace(90, -90, 9), np.arange(16) * 22.5
    >>> with jigsaw.io.Writer("run.zarr", dims={"t2m": ("lead", "lat", "lon")}, append_dim="lead") as out:
    ...     for hours in (6, 12):
    ...         lead = np.array([hours], "timedelta64[h]").astype("timedelta64[ns]")
    ...         out.append({"t2m": tile}, coords={"lead": lead, "lat": lat, "lon": lon})
    >>> jigsaw.io.completeness("run.zarr")
    StoreCompleteness(append_dim='lead', steps=2, closed=True)
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        dims: ArrayDims,
        fields: Sequence[str] | None = None,
        coords: Mapping[str, Any] | None = None,
        attrs: Mapping[str, Any] | None = None,
        field_attrs: Mapping[str, Mapping[str, Any]] | None = None,
        like: Dataset | None = None,
        chunks: Mapping[str, int] | None = None,
        shards: Mapping[str, int] | None = None,
        append_dim: str | None = None,
        mode: str = "w-",
        format: str | None = None,
        encoding: Mapping[str, Any] | None = None,
        budget: int = 256 << 20,
        wait: bool = True,
    ) -> None:
        if not isinstance(path, str | os.PathLike):
            raise WriteError(
                f"path is a {type(path).__name__}, and a writer takes a local path, which all ranks can write to; copy "
                "the store afterwards"
            )
        if "://" in os.fspath(path):
            raise WriteError(f"{os.fspath(path)!r} is a URL; only local paths are written, copy the store afterwards")
        self.path = Path(path)
        suffix = _store_suffix(self.path, format)
        if mode not in _WRITE_MODES or (mode == "a" and append_dim is None):
            raise WriteError(f"mode={mode!r} must be one of {_WRITE_MODES}; 'a' needs append_dim='time' or another dim")
        if not wait and suffix != ".zarr":
            raise WriteError(
                f"wait=False with {self.path}: only Zarr is written behind a step, as the libraries of NetCDF "
                "cannot be called by two threads; write a .zarr, or leave wait=False out"
            )
        self._mode, self._dim, self._budget, self._wait = mode, append_dim, checked_budget(budget), wait
        options = checked_write_options(
            suffix, dims, fields, coords, attrs, field_attrs, chunks, shards, append_dim, encoding
        )
        like = checked_lender(like)
        if like is not None and mode == "w":
            check_not_replaced(self.path, like)
        self._options = options if like is None else options_like_dataset(options, dataset_of_targets(like))
        make_sink = ZarrSink if suffix == ".zarr" else NetcdfSink
        self._sink: FormatSink = make_sink(self.path, append_dim, options.encoding)
        self._mesh: DeviceMesh | None = None
        self._known: GrowingStore | None = None
        self._steps, self._over = 0, False
        self._pending: tuple[PendingStep, int, GrowingStore] | None = None

    @property
    def steps(self) -> int:
        """Number of complete steps along `append_dim`, of an existing store too; not one that a thread still writes."""
        if self._mesh is None and self._known is None and self._mode == "a":
            return self._sink.stored_steps(self._dim or "")
        return self._steps

    def append(self, data: TileData, coords: Mapping[str, Any] | None = None) -> None:
        """Write tiles: all there is, or the next steps along `append_dim`; complete when it returns.

        With ``wait=False`` the steps of the call before are complete then, and the tiles may be changed. What went
        wrong with those is raised here, or by `close`.  `coords` add to those of the writer; after the first call only
        those along `append_dim` may be given.

        *Sends*: the boxes whose chunk or shard another rank writes, in the tile's dtype; in NetCDF everything that the
        first rank does not own.  Besides, a few messages of less than a kilobyte each round.
        *Raises*: `WriteError`, alike on every rank, when anything fails on any of them (a full disk, a rank that
        ended, a store that does not fit, values that the stored dtype does not hold); the store keeps the steps that
        were complete.  `FieldError`, `GridError` or `ShardingError` for data, names and coordinates that do not fit
        together.  Also for times that do not rise, from those of the store too; nothing is changed then.  `WriteError`
        for a store that another writer has changed since, of which nothing is overwritten.
        """
        mesh = _mesh_of_tiles(data)
        with self._over_on_failure():
            self._end_pending_step()
        if self._mesh is None and self._known is None:
            # before anything is looked for: ranks that write different stores would change each other's
            self._budget = min(agreed_arguments(mesh, self._told_arguments))
            self._find(mesh)
        if not self._wait:
            check_mesh_of_all_ranks(mesh, self.path)
        data = _in_source_order(data, self._options)
        # before anything is changed: ranks that describe different arrays would wait for boxes that are never sent
        piece = agreed_outline(mesh, self._steps, lambda: self._outline(data, coords))
        with self._over_on_failure():
            self._begin(mesh, piece)
            self._add(mesh, piece)

    def _told_arguments(self) -> tuple[int, Mapping[str, Any]]:
        """Return the budget, which may differ between ranks, and what they must have alike."""
        self._refuse_when_over()
        own = {"path": os.path.realpath(self.path), "mode": self._mode, "wait": self._wait}
        return self._budget, own | facts_of_options(self._options)

    def _outline(self, data: Any, coords: Mapping[str, Any] | None) -> AppendOutline:
        self._refuse_when_over()
        lent = self._options.coords if self._mesh is None else {}
        return outline_append(data, {**lent, **checked_coordinates(coords)}, self._options, self._known)

    def _refuse_when_over(self) -> None:
        """Raise `WriteError` for a store that takes no more; called where all ranks hear of it."""
        if self._over or (self._mesh is not None and self._dim is None):
            raise WriteError(f"{self.path} takes no more: it was closed, failed, or has no append_dim to grow along")

    @contextmanager
    def _over_on_failure(self) -> Generator[None]:
        try:
            yield
        except BaseException:
            self._over = True
            self._sink.close(done=False)
            raise

    def _add(self, mesh: DeviceMesh, piece: AppendOutline) -> None:
        whole = [self._whole(s.array, piece.rows) for s in piece.sources]
        gather_results(mesh, lambda: self._attach(mesh, whole))  # all ranks are ready before any sends its rows
        later: list[WriteJob] | None = None if self._wait else []
        for source in piece.sources:
            deliver_boxes(source, mesh, self._sink, self._dim, self._steps, self._budget, later)
        start, steps = self._steps, self._steps + piece.rows
        known = piece.known(self._known, steps)
        if later is not None:
            commit = partial(self._end_step, piece.coords, start, StoreCompleteness(self._dim, steps, False))
            self._pending = PendingStep(self.path, mesh, later, commit), steps, known
            return
        # every rank has heard that all boxes of all ranks are written: only now may the store say so
        self._steps = steps
        self._commit(mesh, piece.coords, start, closed=False)
        self._known = known

    def _attach(self, mesh: DeviceMesh, whole: Sequence[ArrayOutline]) -> None:
        if not any(mesh_coordinate(mesh)):
            self._sink.check_untouched()
        self._sink.attach(whole)

    def _end_step(self, coords: Sequence[StoredCoordinate], start: int, done: StoreCompleteness) -> None:
        """Commit on the first rank, unless another writer has done so since the step began."""
        self._sink.check_untouched()
        self._sink.commit(coords, start, done)

    def _end_pending_step(self) -> None:
        """Wait for the step that the thread writes, if any. Raises: `WriteError` on every rank where it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            step, steps, known = pending
            step.wait()
            self._steps, self._known = steps, known

    def close(self) -> None:
        """Say that the store is whole; collective.  Leaving a ``with`` block does it, unless an exception leaves it."""
        if self._over:
            return
        self._over, mesh = True, self._mesh
        if mesh is None:  # nothing was written, but a store may have been opened to append to
            self._sink.close(done=False)
            return
        with self._over_on_failure():
            self._end_pending_step()
            self._commit(mesh, (), self._steps, closed=True)
        gather_results(mesh, lambda: self._sink.close(done=True))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, why: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self.close()
        elif not self._over:
            with suppress(WriteError):  # what leaves the block says more
                self._end_pending_step()
            self._over = True
            self._sink.close(done=False)

    def _by_first_rank(self, mesh: DeviceMesh, step: Callable[[], T]) -> T | None:
        """Return on all ranks what `step` returns on the first; they wait for it, and fail where it fails."""
        # one rank alone writes the root of a store, or a file of HDF5
        return gather_results(mesh, lambda: step() if not any(mesh_coordinate(mesh)) else None)[0]

    def _find(self, mesh: DeviceMesh) -> None:
        growing = self._by_first_rank(mesh, lambda: self._sink.find(self._dim or "") if self._mode == "a" else None)
        if growing is not None:
            self._known, self._steps = growing, growing.steps

    def _begin(self, mesh: DeviceMesh, piece: AppendOutline) -> None:
        arrays, replaces = [s.array for s in piece.sources], self._mode != "w-"
        if self._known is None:
            self._by_first_rank(mesh, lambda: self._sink.create(arrays, piece.coords, self._options.attrs, replaces))
        self._mesh = mesh

    def _whole(self, array: ArrayOutline, rows: int) -> ArrayOutline:
        shape = tuple(self._steps + rows if d == self._dim else n for d, n in zip(array.dims, array.shape, strict=True))
        return replace(array, shape=shape)

    def _commit(self, mesh: DeviceMesh, coords: Sequence[StoredCoordinate], start: int, closed: bool) -> None:
        done = StoreCompleteness(self._dim, self._steps, closed)
        self._by_first_rank(mesh, lambda: self._end_step(coords, start, done))


def _mesh_of_tiles(data: Any) -> DeviceMesh:
    tiles = [data] if isinstance(data, Tile) else list(data.values()) if isinstance(data, Mapping) else []
    mesh = next((t.mesh for t in tiles if isinstance(t, Tile)), None)
    if mesh is None:
        raise ShardingError(
            f"write takes a tile or a mapping of tiles, not {type(data).__name__}; "
            "cut it first: jigsaw.shard(x, mesh, spec)"
        )
    if not all(is_same_mesh(mesh, t.mesh) for t in tiles if isinstance(t, Tile)):
        raise ShardingError("the tiles of one write lie on different meshes; write them one mesh at a time")
    return mesh


def _in_source_order(data: Any, options: WriteOptions) -> Any:
    """Return tiles with their cells in the order of the source.  *Sends*: each row that another rank has there."""
    if options.restores is None:
        return data
    cells, rows = options.restores

    def restored(tile: Any, dims: Sequence[str]) -> Any:
        if not isinstance(tile, Tile) or cells not in dims or len(dims) != tile.ndim:
            return tile  # it has no cells, or is refused later
        at = list(dims).index(cells)
        return gather_neighbors(tile.detach(), rows, at).select(at + 1, 0)

    if isinstance(data, Tile):
        return restored(data, () if isinstance(options.dims, Mapping) else options.dims)
    by_name = options.dims if isinstance(options.dims, Mapping) else dict.fromkeys(data, options.dims)
    return {name: restored(tile, by_name.get(name, ())) for name, tile in data.items()}


def _store_suffix(path: Path, format: str | None) -> str:
    suffix = path.suffix if format is None else _FORMAT_SUFFIXES.get(format, "")
    if suffix not in _FORMAT_SUFFIXES.values():
        raise WriteError(
            f"{path} with format={format!r} is neither .zarr nor .nc; choose format='zarr' or 'netcdf'; "
            "write_volume makes .nii"
        )
    return suffix


def _attrs_at_path(path: Path) -> Mapping[str, Any]:
    """Return the attributes of a store. Raises: `WriteError` for anything else, or one that is damaged."""
    try:
        return zarr_store_attrs(path) if path.is_dir() else netcdf_attrs(path)
    except (OSError, ValueError, KeyError) as e:  # errors of netCDF4, and of zarr for groups and metadata
        raise WriteError(f"{path} cannot be read as a store that jigsaw wrote: {e}") from e
