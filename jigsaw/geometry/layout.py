"""Layouts: which mesh axis cuts which tensor dim, and where.  Integers only: no torch, the same result on every rank.

A `Layout` says how a global array is cut over a mesh. Every mesh coordinate *owns* a box (the owned boxes partition the
array) and *holds* a box (owned rows plus halo).  Everything else in jigsaw, from the reader to the matmul core, asks
this arithmetic: "each rank owns this box and needs that box".

Words: an *axis* is a mesh axis (``"lat"``, ``"data"``), a *dim* is a tensor dim, an *interval* is half open.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate, pairwise, product
from typing import TYPE_CHECKING, Any, TypeVar, cast

from jigsaw.errors import ShardingError
from jigsaw.geometry.axis_names import SAMPLE_AXES
from jigsaw.geometry.cut import Box, Cut, FrozenValue, SplitRule, box_shape, check_split_rule, cut_points, whole_dim

if TYPE_CHECKING:
    from numpy.typing import NDArray  # for annotations only: a layout does not need NumPy

MeshCoordinate = tuple[int, ...]
AxisSizes = tuple[tuple[str, int], ...]
DimSpec = None | str | Sequence[str]
LayoutSpec = Sequence[DimSpec]
T = TypeVar("T")


def _entry_axes(entry: DimSpec) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@dataclass(frozen=True, eq=False)
class Layout(FrozenValue):
    """Cuts of a global array over a mesh.

    `cuts` has one entry a dim.  Dims that were flattened together (the tokens of a lat x lon tile) stay separate cuts.
    The rows that a rank owns of such a dim are not an interval. `groups` counts how many consecutive cuts make up each
    tensor dim.  `axes` are the names and sizes of the mesh axes, in mesh order; an axis that cuts nothing replicates.
    Make one with `Layout.of`.

    Raises: `ShardingError` for an axis that cuts two dims, and a cut without exactly one piece for each place along its
    axes. Also for groups that do not divide the cuts among them.

    >>> layout = jigsaw.Layout.of((2, 721, 1440), (None, "lat", "lon"), {"lat": 4, "lon": 2})
    >>> layout.owned((1, 0))
    ((0, 2), (181, 361), (0, 720))
    >>> layout.local_shape((0, 1)), layout.local_shape((3, 1))
    ((2, 181, 720), (2, 180, 720))
    """

    cuts: tuple[Cut, ...]
    axes: AxisSizes
    groups: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.groups:
            object.__setattr__(self, "groups", (1,) * len(self.cuts))
        if sum(self.groups) != len(self.cuts) or min(self.groups, default=1) < 1:
            raise ShardingError(f"groups {self.groups} must share out the {len(self.cuts)} cuts, at least one a dim")
        _check_cut_axes(self.cuts, dict(self.axes))

    @classmethod
    def of(
        cls,
        shape: Sequence[int],
        spec: LayoutSpec,
        axes: Mapping[str, int] | AxisSizes,
        split: SplitRule | Mapping[int, SplitRule] = "balanced",
        align: int | Mapping[int, int] = 1,
        halo: Mapping[int, int | tuple[int, int]] | None = None,
        periodic: Sequence[int] = (),
    ) -> Layout:
        """Cut `shape` by `spec`: for each dim None, an axis name, or several names (major to minor).

        `split` and `align` apply to every dim that `spec` names, or are mappings from dim to value, as `halo` is; dims
        may be negative.  An integer `align` applies to space: not to a dim that ``data``, ``replicate`` or ``ensemble``
        cuts, whose rows are samples or members.  An axis that the mesh lacks counts as size 1.

        Raises: `ShardingError` for a spec of the wrong length, an axis used twice, a dim that does not exist, or cuts
        that break their rule. Warns: where an integer `align` leaves ranks without rows of a dim that has rows for all.

        >>> by_four = jigsaw.Layout.of((4, 3, 16), ("data", None, "lat"), {"data": 4, "lat": 2}, align=4)
        >>> by_four.local_shape((0, 0)), by_four.local_shape((3, 1))
        ((1, 3, 8), (1, 3, 8))
        """
        sizes = dict(axes)
        _check_spec(shape, spec)
        splits, aligns = _values_by_dim("split", split, shape), _rows_together(align, shape, spec)
        halos, wraps = (
            _values_by_dim("halo", halo or {}, shape),
            _values_by_dim("periodic", dict.fromkeys(periodic, True), shape),
        )
        cuts: list[Cut] = []
        for dim, (size, entry) in enumerate(zip(shape, spec, strict=True)):
            try:
                cut = _cut_dim(size, _entry_axes(entry), sizes, splits.get(dim, "balanced"), aligns.get(dim, 1))
                if dim in halos:
                    width = halos[dim]
                    below, above = (width, width) if isinstance(width, int) else width
                    cut = cut.with_halo(below, above, dim in wraps)
            except ShardingError as error:
                raise ShardingError(f"dim {dim} of shape {tuple(shape)}, spec {entry!r}: {error}") from None
            cuts.append(cut)
        if not isinstance(align, Mapping) and align > 1:
            _warn_of_empty_pieces([(d, cuts[d]) for d in aligns if splits.get(d, "balanced") == "balanced"], align)
        return cls.from_dims([(cut,) for cut in cuts], tuple(sizes.items()))

    # -- shape ----------------------------------------------------------------------------------------------------

    @cached_property
    def ndim(self) -> int:
        return len(self.groups)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Global shape."""
        return tuple(math.prod(c.size for c in group) for group in self._dims)

    @cached_property
    def _dims(self) -> tuple[tuple[Cut, ...], ...]:
        ends = tuple(accumulate(self.groups, initial=0))
        return tuple(self.cuts[first:end] for first, end in pairwise(ends))

    def dim(self, dim: int) -> tuple[Cut, ...]:
        """Return the cuts that make up a tensor dim: one, unless dims were flattened together."""
        return self._dims[dim]

    def dims(self) -> tuple[tuple[Cut, ...], ...]:
        return self._dims

    @classmethod
    def from_dims(cls, dims: Sequence[Sequence[Cut]], axes: AxisSizes) -> Layout:
        return _made_layout(tuple(map(tuple, dims)), axes)

    def is_cut(self, dim: int) -> bool:
        return self._are_cut[dim]

    @cached_property
    def _are_cut(self) -> tuple[bool, ...]:
        # a 0-d tensor accepts dim 0, as in torch
        return tuple(any(c.is_cut for c in group) for group in self._dims) or (False,)

    @cached_property
    def complete_dims(self) -> tuple[bool, ...]:
        """True for each dim of which every rank has all rows, each once: nothing cuts it, and it has no halo."""
        return tuple(not any(c.is_cut or c.has_halo for c in group) for group in self._dims)

    @cached_property
    def cut_dims(self) -> tuple[int, ...]:
        return tuple(d for d in range(self.ndim) if self.is_cut(d))

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """Return the mesh axes that cut a dim."""
        return tuple(a for c in (self.dim(dim) if self._dims else ()) for a in c.axes)

    @cached_property
    def cut_axes(self) -> tuple[str, ...]:
        """Mesh axes that cut any dim, in mesh order."""
        used = {a for c in self.cuts for a in c.axes}
        return tuple(name for name, size in self.axes if name in used and size > 1)

    @cached_property
    def replicas(self) -> int:
        """Number of ranks that hold the same tile."""
        return math.prod(size for name, size in self.axes if name not in self.cut_axes)

    @property
    def spec(self) -> tuple[str | tuple[str, ...] | None, ...]:
        """Spec that `Layout.of` was called with, an entry a dim."""
        named = (self.dim_axes(d) for d in range(self.ndim))
        return tuple(None if not a else a[0] if len(a) == 1 else a for a in named)

    @cached_property
    def has_halo(self) -> bool:
        return any(c.has_halo for c in self.cuts)

    def without_halo(self) -> Layout:
        return self._without_halo

    @cached_property
    def _without_halo(self) -> Layout:
        if not self.has_halo:
            return self
        return Layout.from_dims([[c.bare() for c in group] for group in self._dims], self.axes)

    def uncut(self) -> Layout:
        """Return the layout of the whole tensor on every rank; dims that were flattened together stay so."""
        return Layout.from_dims([[c.uncut() for c in group] for group in self._dims], self.axes)

    def without_beyond(self) -> Layout:
        """Return the same layout without rows beyond an end that does not wrap."""
        return self._without_beyond

    @cached_property
    def _without_beyond(self) -> Layout:
        if all(c.wraps for c in self.cuts):
            return self
        kept = [
            [c if c.wraps else c.holding([c.inside(i) for i in range(c.pieces)]) for c in group] for group in self._dims
        ]
        return Layout.from_dims(kept, self.axes)

    # -- who has what ---------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size_of(self, axis: str) -> int:
        return dict(self.axes).get(axis, 1)

    def coords(self) -> Iterator[MeshCoordinate]:
        """Iterate over every mesh coordinate, in the mesh's row-major order."""
        return product(*(range(size) for _, size in self.axes))

    def index(self, coord: MeshCoordinate) -> int:
        """Return the row-major position of a coordinate: the inverse of enumerating `coords()`."""
        flat = 0
        for (_, size), c in zip(self.axes, coord, strict=True):
            flat = flat * size + c
        return flat

    def coord(self, position: int) -> MeshCoordinate:
        """Return the coordinate at a row-major position: the inverse of `index`."""
        places: list[int] = []
        for _, size in reversed(self.axes):
            position, at = divmod(position, size)
            places.append(at)
        return tuple(reversed(places))

    def piece(self, cut: Cut, coord: MeshCoordinate) -> int:
        """Return which piece of `cut` a coordinate has."""
        if not cut.axes:
            return 0
        # mixed radix, major axis first: for (lat, lon) = 2 x 3 the rank at (1, 2) has piece 1 * 3 + 2
        flat = 0
        radix = self._radices.get(cut.axes)
        if radix is None:
            places = {name: (place, size) for place, (name, size) in enumerate(self.axes)}
            radix = self._radices[cut.axes] = tuple([places[axis] for axis in cut.axes])
        for place, size in radix:
            flat = flat * size + coord[place]
        return flat

    @cached_property
    def _radices(self) -> dict[tuple[str, ...], tuple[tuple[int, int], ...]]:
        return {}

    def owned(self, coord: MeshCoordinate) -> Box:
        """Return the box a coordinate owns, an interval a cut."""
        return tuple([c.owned(self.piece(c, coord)) for c in self.cuts])

    def held(self, coord: MeshCoordinate) -> Box:
        """Return the box a coordinate holds, halo included, in unwrapped coordinates."""
        return tuple([c.held[self.piece(c, coord)] for c in self.cuts])

    def local_shape(self, coord: MeshCoordinate) -> tuple[int, ...]:
        """Return the shape of the local tensor at a coordinate, halo included, an entry a tensor dim."""
        return _local_shape(self, coord)

    # -- derived layouts ------------------------------------------------------------------------------------------

    def replace_dim(self, dim: int, *cuts: Cut) -> Layout:
        return _with_dim_replaced(self, dim, cuts)

    def permute(self, order: Sequence[int]) -> Layout:
        return _permuted(self, tuple(order))

    def drop(self, dims: Sequence[int], keepdim: bool = False) -> Layout:
        """Return the layout after the dims (which may be negative) were reduced away, or to size 1."""
        return _without_dims(self, tuple(dims), keepdim)

    def insert(self, dim: int, size: int = 1) -> Layout:
        return _with_dim_inserted(self, dim, size)

    def __str__(self) -> str:
        # all that equality compares, so that an error never shows two equal texts for layouts that differ
        def show(cut: Cut) -> str:
            text = f"{cut.size}" + (f"/{'+'.join(cut.axes)}{list(cut.points)}" if cut.axes else "")
            text += f" with halo, holding {[f'{a}:{b}' for a, b in cut.held]}" if cut.has_halo else ""
            text += "" if cut.wraps else " that goes beyond the ends"
            text += " of an index" if cut.by_index else ""
            return text + (f" made of {'·'.join(map(show, cut.source))}" if cut.source else "")

        return "[" + ", ".join("·".join(map(show, group)) for group in self.dims()) + "]"


@lru_cache(maxsize=4096)
def _made_layout(dims: tuple[tuple[Cut, ...], ...], axes: AxisSizes) -> Layout:
    """Return one object for the layouts that functions derive anew at each call.  Then its derived values are computed
    once, and comparisons take no time.
    """
    return Layout(tuple(c for group in dims for c in group), axes, tuple(map(len, dims)))


# one lookup finds each derived layout, because functions on tiles need the same ones at every call


@lru_cache(maxsize=4096)
def _with_dim_replaced(layout: Layout, dim: int, cuts: tuple[Cut, ...]) -> Layout:
    dims = list(layout.dims())
    dims[dim] = cuts
    return Layout.from_dims(dims, layout.axes)


@lru_cache(maxsize=4096)
def _permuted(layout: Layout, order: tuple[int, ...]) -> Layout:
    return Layout.from_dims([layout.dim(d) for d in order], layout.axes)


@lru_cache(maxsize=4096)
def _without_dims(layout: Layout, dims: tuple[int, ...], keepdim: bool) -> Layout:
    gone = {d % max(layout.ndim, 1) for d in dims}
    kept = [(whole_dim(1),) if d in gone else layout.dim(d) for d in range(layout.ndim) if keepdim or d not in gone]
    return Layout.from_dims(kept, layout.axes)


@lru_cache(maxsize=4096)
def _with_dim_inserted(layout: Layout, dim: int, size: int) -> Layout:
    dims = list(layout.dims())
    dims.insert(dim, (whole_dim(size),))
    return Layout.from_dims(dims, layout.axes)


@lru_cache(maxsize=4096)
def _local_shape(layout: Layout, coord: MeshCoordinate) -> tuple[int, ...]:
    shape = box_shape(layout.held(coord))
    if len(shape) == layout.ndim:  # no dims were flattened together
        return shape
    extents = iter(shape)
    return tuple(math.prod(next(extents) for _ in range(count)) for count in layout.groups)


def values_over_mesh(axes: AxisSizes, cutting: Sequence[str], by_piece: NDArray[Any]) -> NDArray[Any]:
    """Return a value for each piece of a dim that the axes `cutting` cut, as an array over the mesh.  Each rank's value
    has one place along the axes that do not cut the dim.

    >>> import numpy as np
    >>> from jigsaw.geometry.layout import values_over_mesh
    >>> values_over_mesh((("data", 2), ("lat", 3)), ("lat",), np.array([5, 4, 4]))
    array([[5, 4, 4]])
    """
    sizes = dict(axes)
    named = [axis for axis in cutting if axis in sizes]
    # pieces count the places along their axes major to minor: for (lon, lat) = 3 x 2 piece 4 is at lon 2, lat 0
    placed = by_piece.reshape([sizes[axis] for axis in named])
    placed = placed.transpose([named.index(axis) for axis in sizes if axis in named])
    return placed.reshape([size if axis in named else 1 for axis, size in axes])


def _cut_dim(size: int, axes: tuple[str, ...], sizes: Mapping[str, int], split: SplitRule, align: int) -> Cut:
    """Cut one dim by those of `axes` that have more than one place."""
    named = tuple(a for a in axes if sizes.get(a, 1) > 1)
    # an axis of size 1 cuts nothing and is left out, so that layouts with one rank and without the axis compare equal
    if size < 0 or (axes and not named and not isinstance(split, str)):
        cut_points(size, 1, split, align)  # raises for a rule that is none, or points of another number of pieces
    if not named:
        check_split_rule(1, split, align)
        return whole_dim(size)
    return Cut(size, cut_points(size, math.prod(sizes[a] for a in named), split, align), named)


def _values_by_dim(what: str, value: T | Mapping[int, T], shape: Sequence[int]) -> dict[int, T]:
    """Return `value` for each dim; a mapping's negative dims count from the last one."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(range(len(shape)), value)
    values = cast(Mapping[int, T], value)
    wrong = [d for d in values if not -len(shape) <= d < len(shape)]
    if wrong:
        raise ShardingError(
            f"{what} names dim {wrong[0]}, but shape {tuple(shape)} has {len(shape)} dims, "
            f"{-len(shape)} to {len(shape) - 1}"
        )
    return {d % len(shape): v for d, v in values.items()}


def _rows_together(align: int | Mapping[int, int], shape: Sequence[int], spec: LayoutSpec) -> dict[int, int]:
    """Return how many rows of each dim stay together: an integer is for space, a batch is cut at any sample."""
    if isinstance(align, Mapping):
        return _values_by_dim("align", align, shape)
    check_split_rule(1, "balanced", align)
    return {dim: align for dim, entry in enumerate(spec) if not set(SAMPLE_AXES).intersection(_entry_axes(entry))}


def _warn_of_empty_pieces(cuts: Iterable[tuple[int, Cut]], align: int) -> None:
    """Warn where an axis of another name may cut a batch, whose ranks would silently do nothing."""
    for dim, cut in cuts:
        empty = sum(start == stop for start, stop in pairwise(cut.points))
        if empty and cut.size >= cut.pieces:
            text = (
                f"align={align} leaves {empty} of the {cut.pieces} pieces of dim {dim} ({cut.size} rows, cut by "
                f"{cut.axes}) without rows, although it has rows for all; say which dims it is for, as in "
                f"align={{2: {align}, 3: {align}}}"
            )
            warnings.warn(text, UserWarning, stacklevel=4)


def _check_cut_axes(cuts: Sequence[Cut], sizes: Mapping[str, int]) -> None:
    used: set[str] = set()
    for cut in cuts:
        places = math.prod(sizes.get(a, 1) for a in cut.axes)
        if cut.pieces != places:
            raise ShardingError(
                f"a cut at {cut.points} has {cut.pieces} pieces, but the axes {cut.axes} that cut it "
                f"have {places} places on mesh {dict(sizes)}"
            )
        for axis in cut.axes:
            if axis in used:
                raise ShardingError(f"axis {axis!r} cuts two dims; an axis can cut one dim only")
            used.add(axis)


def _is_spec_entry(entry: Any) -> bool:
    names = () if entry is None else (entry,) if isinstance(entry, str) else entry
    return isinstance(names, Iterable) and all(isinstance(name, str) for name in cast(Iterable[Any], names))


def _check_spec(shape: Sequence[int], spec: LayoutSpec) -> None:
    if isinstance(spec, str):
        raise ShardingError(f"spec={spec!r} is one string; give one entry a dim, like ({spec!r}, None)")
    wrong = [entry for entry in spec if not _is_spec_entry(entry)]
    if wrong:
        raise ShardingError(
            f"spec {tuple(spec)} has {wrong[0]!r}, which names no axis; give a name, several of them, or None"
        )
    if len(spec) != len(shape):
        raise ShardingError(
            f"spec {tuple(spec)} has {len(spec)} entries for {len(shape)} dims of shape {tuple(shape)}; "
            f"give one entry a dim, None where nothing cuts"
        )
    named = [a for entry in spec for a in _entry_axes(entry)]
    twice = sorted({a for a in named if named.count(a) > 1})
    if twice:
        raise ShardingError(f"spec {tuple(spec)} uses axis {twice[0]!r} more than once; an axis can cut one dim only")
