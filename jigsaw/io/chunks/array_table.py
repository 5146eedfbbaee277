"""Tables of arrays, made from every file format: where the stored bytes of each chunk lie and how they decode."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError, UnsupportedStoreError, redacted_text
from jigsaw.geometry.cut import Box, Interval
from jigsaw.io.chunks.chunk import ChunkDecoder, ChunkGrid, ChunkPlaces
from jigsaw.io.chunks.chunk_finder import ChunkFinder
from jigsaw.io.chunks.chunk_loader import BoxReader, ChunkLoader, LibraryLoader

MISSING_VALUE_ATTRS = ("_FillValue", "missing_value")


@dataclass(frozen=True)
class JoinedArrays:
    """Arrays that one is made of: their `names` in the store, and the row of `dim` where each begins, then all rows."""

    dim: int
    names: tuple[str, ...]
    edges: tuple[int, ...]

    def find(self, row: int) -> int:
        return bisect_right(self.edges, row) - 1

    def inside(self, rows: Interval) -> Iterator[tuple[int, Interval]]:
        if rows[0] < rows[1]:
            for i in range(self.find(rows[0]), self.find(rows[1] - 1) + 1):
                yield i, (max(rows[0], self.edges[i]), min(rows[1], self.edges[i + 1]))

    def local(self, box: Box, number: int, rows: Interval) -> Box:
        """Return a box of the whole in the coordinates of the array `number`, of which it takes `rows`."""
        start = self.edges[number]
        return (*box[: self.dim], (rows[0] - start, rows[1] - start), *box[self.dim + 1 :])


def _no_library(box: Box) -> NDArray[Any]:
    raise UnsupportedStoreError(f"the box {box} cannot be read: the array has neither a decoder nor `load_slowly`")


@dataclass(frozen=True, eq=False, kw_only=True)
class ArrayTable:
    """Array as a table of chunks.

    `chunks` is the shape of what is fetched and decoded as one; in a shard, the inner chunk. It is the largest shape
    where `lengths` has those along a dim one by one. `clipped` says that the last chunk along a dim does not hold
    padding. `dtype` is the stored numpy dtype with its byte order; `masks` are the stored values that mean "missing".
    `decoder` is None for an array that only its library can read. Then `load_slowly` gives the values of a box, and
    reads no more than the box where `slices` says so. `unfit` says why the array is refused where it is asked for.
    Ranks compare some of the values of one that is `compared`. `roles` are those of its dims, where the format says
    them (see `jigsaw.io.series.coords`). An array that is read `by_name_only` is none of the default fields.

    These facts make its `grid` (where chunks lie in the array), its `finder` (where their bytes lie) and its `loader`
    (their values); `dataclasses.replace` makes them anew.
    """

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    dtype: str
    chunks: tuple[int, ...]
    attrs: Mapping[str, Any]
    places: ChunkPlaces = field(repr=False)
    fill_value: Any = None
    masks: tuple[float, ...] = ()
    decoder: ChunkDecoder | None = field(repr=False, default=None)
    load_slowly: BoxReader = field(repr=False, default=_no_library)
    lengths: Mapping[int, tuple[int, ...]] = field(default_factory=dict[int, tuple[int, ...]], repr=False)
    clipped: bool = False
    slices: bool = False
    members: JoinedArrays | None = None
    compared: bool = False
    unfit: str = ""
    roles: tuple[str, ...] = ()
    by_name_only: bool = False
    grid: ChunkGrid = field(init=False, repr=False)
    finder: ChunkFinder = field(init=False, repr=False)
    loader: ChunkLoader | LibraryLoader = field(init=False, repr=False)

    def __post_init__(self) -> None:
        itemsize = np.dtype(self.dtype).itemsize
        object.__setattr__(self, "grid", ChunkGrid(self.shape, itemsize, self.chunks, self.lengths, self.clipped))
        object.__setattr__(self, "finder", self.make_finder())
        if self.decoder is not None:
            loader = ChunkLoader(self.finder, self.decoder, self.fill_value)
        else:
            loader = LibraryLoader(self.finder, np.dtype(self.dtype), self.load_slowly, self.fill_value)
        object.__setattr__(self, "loader", loader)

    def make_finder(self) -> ChunkFinder:
        return ChunkFinder(self.name, self.grid, self.places, self.decoder, self.slices)

    @property
    def decoding(self) -> ChunkLoader:
        """The `loader` of an array that has a `decoder`: callers have seen to that."""
        assert isinstance(self.loader, ChunkLoader)
        return self.loader

    @property
    def far(self) -> bool:
        return self.finder.far

    @property
    def scale(self) -> float:
        """Factor of stored values; an attribute that is not a number is refused, as for `offset`."""
        return self._number("scale_factor", 1.0)

    @property
    def offset(self) -> float:
        return self._number("add_offset", 0.0)

    def check_readable(self) -> None:
        """Raise `GridError` for an array that is unfit, `UnsupportedStoreError` for a scale that is not a number."""
        if self.unfit:
            raise GridError(self.unfit)
        _ = self.scale, self.offset

    def check_rows(self, dims: Iterable[str]) -> None:
        """Raise `GridError` where the array has no row along one of these dims."""
        empty = [dim for dim in dims if self.shape[self.dims.index(dim)] == 0]
        if empty:
            raise GridError(
                f"array {self.name!r} has 0 rows along {empty[0]!r}, so it holds no sample; write it with rows, or "
                "leave it out"
            )

    def _number(self, attr: str, usual: float) -> float:
        value = self.attrs.get(attr, usual)
        try:
            if np.asarray(value).dtype.kind not in "biuf":  # text such as "0.01" is a mistake of the file's writer
                raise TypeError(f"{value!r} is not a number")
            number = float(np.asarray(value).item())
            if not isfinite(number):  # all values would be missing
                raise ValueError(f"{value!r} is not finite")
            return number
        except (TypeError, ValueError, OverflowError) as e:
            raise UnsupportedStoreError(
                f"array {self.name!r} has {attr}={value!r}, which is not a number; rewrite the attribute"
            ) from e


@dataclass(frozen=True, eq=False)
class ArrayStore:
    """An opened store: its arrays, its attributes, and `notes` that a user should read.

    `read_small` gives a whole array as it is stored: for coordinates. `files` are the places that values come from,
    where they are not the `url`; the `stamp` of a far file tells it from what its server has under that name later.
    """

    url: str
    arrays: Mapping[str, ArrayTable]
    attrs: Mapping[str, Any]
    read_small: Callable[[str], NDArray[Any]] = field(repr=False)
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = field(default=(), repr=False)
    stamp: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "url", redacted_text(self.url))

    @property
    def places(self) -> tuple[str, ...]:
        """Every file, folder or URL that values come from, as far as the format says."""
        return self.files or (self.url,)


def dtype_with_declared_sign(dtype: np.dtype[Any], attrs: Mapping[str, Any]) -> np.dtype[Any]:
    """Return the dtype of the stored values: by ``_Unsigned`` NetCDF-3 declares signs that its types lack."""
    declared = attrs.get("_Unsigned")
    words = ("true", "True") if dtype.kind == "i" else ("false", "False")
    is_other = isinstance(declared, str) and declared in words
    other = {"i": "u", "u": "i"}.get(dtype.kind, dtype.kind) if is_other else dtype.kind
    return np.dtype(dtype.str.replace(dtype.kind, other))


def declared_missing_values(
    dtype: np.dtype[Any], attrs: Mapping[str, Any], stored: np.dtype[Any] | None = None
) -> tuple[float, ...]:
    """Return the stored values that an array's attributes declare as missing (`missing_values_of`)."""
    return missing_values_of(dtype, (attrs[name] for name in MISSING_VALUE_ATTRS if name in attrs), stored)


def missing_values_of(
    dtype: np.dtype[Any], missing: Iterable[Any], stored: np.dtype[Any] | None = None
) -> tuple[float, ...]:
    """Return the stored values that mean "missing": numbers and lists of them, as an array of `dtype` holds them. A
    number that it cannot hold is left out, as in xarray and netCDF4.

    `stored` is the dtype before `dtype_with_declared_sign`, in which such numbers are written.
    """
    if dtype.kind not in "iuf":
        return ()
    turns = stored is not None and stored.kind != dtype.kind
    flat = [x for value in missing for x in np.ravel(np.asarray(value)).tolist()]
    numbers = [x for x in flat if isinstance(x, int | float) and x == x]
    if dtype.kind == "f":  # float64's 0.1 is not a number of float32; rounded to one, it would hide a value
        with np.errstate(over="ignore"):
            numbers = [x for x in numbers if stored_number_of(x, dtype) == x]
    return tuple(dict.fromkeys(fill_value_of(x, dtype) if turns else stored_number_of(x, dtype) for x in numbers))


def fill_is_missing(fill: Any, attrs: Mapping[str, Any]) -> bool:
    """Say whether the `fill_value` of a Zarr v2 array means "missing"."""
    return bool(fill) or "scale_factor" in attrs  # 0 may be a default, so it means missing only for packed numbers


def stored_number_of(value: float, dtype: np.dtype[Any]) -> float:
    """Return the number that `dtype` stores for a value: rounded, or with the other sign; integers stay exact."""
    if dtype.kind == "f":
        return float(np.asarray(value).astype(dtype))
    number = int(value) if isinstance(value, int) or value.is_integer() else value
    return number + (1 << 8 * dtype.itemsize) if dtype.kind == "u" and number < 0 else number


def fill_value_of(value: Any, dtype: np.dtype[Any]) -> Any:
    """Return a fill value as a Python number that `dtype` holds: one written for the other sign has the same bits.

    Anything but a number stays as it is.
    """
    if not isinstance(value, int | float | np.number) or dtype.kind not in "iuf":
        return value.item() if isinstance(value, np.generic) else value
    if dtype.kind == "f" or not np.isfinite(value) or value != np.floor(value):
        return float(value)
    bits = 8 * dtype.itemsize
    wrapped = int(value) % 2**bits
    return wrapped - 2**bits if dtype.kind == "i" and wrapped >= 2 ** (bits - 1) else wrapped
