"""Which mesh axis cuts which tensor dim, and where.  Integers only: no torch, the same answer on every rank.

A `Layout` says, for a global array cut over a mesh, which box every mesh coordinate *owns* (the owned boxes
partition the array) and which box it *holds* (owned rows plus halo).  Everything else in jigsaw, from the
reader to the matmul core, is a question to this arithmetic: "each rank owns this box and needs that box".

Words: an *axis* is a mesh axis (``"lat"``, ``"data"``), a *dim* is a tensor dim, an *interval* is half open.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from operator import index
from typing import Any, TypeVar, cast

Interval = tuple[int, int]
Box = tuple[Interval, ...]
MeshCoordinate = tuple[int, ...]
AxisSizes = tuple[tuple[str, int], ...]
DimSpec = None | str | Sequence[str]
LayoutSpec = Sequence[DimSpec]
SplitRule = str | Sequence[int]
T = TypeVar("T")


class ShardingError(ValueError):
    """What cannot be answered exactly: a layout, a mesh, an operation.

    Raised alike on every rank, before any communication.
    """


def box_slices(box: Box, within: Box | None = None) -> tuple[slice, ...]:
    """What picks a box out of memory that holds the whole array, or the box `within`."""
    lows = [0] * len(box) if within is None else [low for low, _ in within]
    return tuple(slice(a - low, b - low) for (a, b), low in zip(box, lows, strict=True))


def box_shape(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(stop - start for start, stop in box)


def box_elements(box: Box) -> int:
    """The number of elements of a box."""
    return math.prod(box_shape(box))


def interval_overlap(a: Interval, b: Interval) -> Interval:
    """What two intervals share; an empty interval where nothing."""
    start = max(a[0], b[0])
    return start, max(start, min(a[1], b[1]))


def box_overlap(a: Box, b: Box) -> Box:
    """What two boxes share; an empty interval along each dim in which they share nothing."""
    return tuple(interval_overlap(x, y) for x, y in zip(a, b, strict=True))


def cut_points(size: int, pieces: int, split: SplitRule = "balanced", align: int = 1) -> tuple[int, ...]:
    """Where `size` rows are cut into `pieces`: ``pieces + 1`` non-decreasing points from 0 to `size`.

    - ``"balanced"``: piece sizes differ by at most one `align`-block, larger ones first (721/8 = 91 + 7x90);
    - ``"chunk"``: `torch.chunk`'s rule, ceil(size / pieces) rows until they run out (721/8 = 7x91 + 84);
    - a sequence: explicit points, checked.

    `align` keeps every inner point at a multiple of `align` (patches, strides); then `size` must be one too.

    Raises: `ShardingError` naming the size, the pieces and the rule that they break.
    """
    _check_split_rule(pieces, split, align)
    if size < 0 or pieces < 1:
        raise ShardingError(
            f"cannot cut {size} rows into {pieces} pieces of {align}-row blocks: need size >= 0, pieces >= 1"
        )
    if not isinstance(split, str):
        return _explicit_points(size, pieces, tuple(index(p) for p in split), align)
    if size % align:
        raise ShardingError(
            f"cannot cut {size} rows into {pieces} pieces of whole {align}-row blocks; "
            f"pad to {-(-size // align) * align} rows or choose an align that divides {size}"
        )
    blocks = size // align
    if split == "balanced":
        base, extra = divmod(blocks, pieces)
        return tuple(align * (i * base + min(i, extra)) for i in range(pieces + 1))
    step = -(-blocks // pieces)
    return tuple(align * min(i * step, blocks) for i in range(pieces + 1))


def _check_split_rule(pieces: int, split: Any, align: Any) -> None:
    """Raises: `ShardingError` for a `split` or `align` that would be wrong for any size."""
    if not _is_integer(align) or align < 1:
        raise ShardingError(f"align={align!r} must be a whole number, 1 or more: the rows of a block that is not cut")
    if isinstance(split, str) or not isinstance(split, Collection):
        known = split in ("balanced", "chunk")
    else:
        known = all(map(_is_integer, cast(Collection[Any], split)))
    if not known:
        raise ShardingError(
            f"split={split!r} is not a rule: use 'balanced', 'chunk' or {pieces + 1} explicit cut points"
        )


def _is_integer(value: Any) -> bool:
    try:
        index(value)
    except TypeError:
        return False
    return True


def _explicit_points(size: int, pieces: int, points: tuple[int, ...], align: int) -> tuple[int, ...]:
    rising = all(a <= b for a, b in pairwise(points))
    if len(points) != pieces + 1 or not rising or points[0] != 0 or points[-1] != size:
        raise ShardingError(
            f"cut points {points} must be {pieces + 1} non-decreasing integers from 0 to {size}, for {pieces} pieces"
        )
    if any(p % align for p in points[1:-1]):
        raise ShardingError(f"cut points {points} must be multiples of align={align}")
    return points


@dataclass(frozen=True)
class Cut:
    """How one dim is cut: `points` by `axes` (major to minor), and what each piece holds.

    ``held[i]`` is in *unwrapped* coordinates: on a periodic dim row -1 is row ``size - 1`` and an interval may
    reach below 0 or beyond `size`.  Without a halo it equals the owned interval.

    Where `wraps` is False, held rows beyond [0, size) are no rows of the array: a reader put there what its boundary
    says (`jigsaw.io.series.boundary`).  They are `Tile.local`'s alone: views, copies and functions along other dims
    carry them along, everything else leaves them out, and nothing takes them for a row of the array.

    `source` remembers the cuts of the dim that a contraction made this one from, so that one that leads back to the
    same size restores them (the tokens after a mixer's second linear lie where they did before its first).  It is part
    of equality, for what is kept by layout (a stencil's plan has the layout of its result) must not hand out another
    dim's memory; whether two tiles can meet is asked of `have_same_rows`.

    Raises: `ShardingError` for points that fall or do not run from 0 to `size`, and for other than one held interval a
    piece.

    >>> cut = jigsaw.Cut(10, (0, 4, 7, 10), axes=("lat",))
    >>> cut.pieces, cut.owned(1)
    (3, (4, 7))
    >>> cut.with_halo(1, 2, periodic=True).held
    ((-1, 6), (3, 9), (6, 12))
    """

    size: int
    points: tuple[int, ...]
    axes: tuple[str, ...] = ()
    held: tuple[Interval, ...] = ()
    source: tuple[Cut, ...] = field(default=(), repr=False)
    wraps: bool = True

    def __post_init__(self) -> None:
        _explicit_points(self.size, self.pieces, self.points, 1)
        if not self.held:
            object.__setattr__(self, "held", tuple(pairwise(self.points)))
        if len(self.held) != self.pieces or any(start > stop for start, stop in self.held):
            raise ShardingError(
                f"held {self.held} must be one interval (start <= stop) for each of the {self.pieces} pieces "
                f"that {self.points} make"
            )

    @property
    def pieces(self) -> int:
        return len(self.points) - 1

    @property
    def is_cut(self) -> bool:
        """Whether more than one piece exists; a dim cut by axes of size 1 is whole."""
        return len(self.points) > 2

    @property
    def has_halo(self) -> bool:
        return any(self.held[i] != self.owned(i) for i in range(self.pieces))

    def owned(self, piece: int) -> Interval:
        return self.points[piece], self.points[piece + 1]

    def bare(self) -> Cut:
        """The same cut without halo."""
        return replace(self, held=(), wraps=True)

    def has_same_rows(self, other: Cut) -> bool:
        """Whether every piece owns the same rows on the same ranks, whatever it holds and the dim was made from."""
        return (self.size, self.points, self.axes) == (other.size, other.points, other.axes)

    def holding(self, held: Sequence[Interval]) -> Cut:
        return replace(self, held=tuple(held), wraps=True)

    def inside(self, piece: int) -> Interval:
        """The rows of the array that a piece holds: all but rows beyond an end that does not wrap."""
        return self.held[piece] if self.wraps else self.between_ends(piece)

    def between_ends(self, piece: int) -> Interval:
        """What a piece holds in [0, size), for operations that do not take the dim for a circle."""
        start, stop = self.held[piece]
        return max(start, 0), min(stop, self.size)

    def uncut(self) -> Cut:
        return whole_dim(self.size)

    def with_halo(self, below: int, above: int, periodic: bool = False) -> Cut:
        """Hold `below` and `above` rows more; clipped at the ends of a dim that is not periodic.

        Raises: `ShardingError` when a margin is negative or wider than the dim.
        """
        if min(below, above) < 0 or max(below, above) > self.size:
            raise ShardingError(
                f"halo ({below}, {above}) must lie within 0..{self.size}, the size of the dim that it extends"
            )

        def grow(start: int, stop: int) -> Interval:
            if start == stop:
                return start, stop
            wide = start - below, stop + above
            return wide if periodic else (max(wide[0], 0), min(wide[1], self.size))

        return self.holding([grow(*self.owned(i)) for i in range(self.pieces)])

    def with_beyond(self, below: int, above: int) -> Cut:
        """Hold `below` and `above` rows more, also beyond the ends of a dim that does not wrap."""
        wide, ended = self.with_halo(below, above, periodic=True), self.with_halo(below, above)
        return replace(wide, wraps=wide.held == ended.held)


def have_same_rows(group: Sequence[Cut], other: Sequence[Cut]) -> bool:
    """Whether two tensor dims lie on the ranks alike, so that their tiles can meet without a message."""
    return len(group) == len(other) and all(a.has_same_rows(b) for a, b in zip(group, other, strict=True))


def whole_dim(size: int) -> Cut:
    """A dim that nothing cuts."""
    return Cut(size, (0, size))


def _entry_axes(entry: DimSpec) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@dataclass(frozen=True)
class Layout:
    """How a global array is cut over a mesh.

    `cuts` has one entry a dim.  Dims that were flattened together (the tokens of a lat x lon tile) stay
    separate cuts and `groups` counts how many consecutive cuts make up each tensor dim, because the rows that
    a rank owns of a product dim are no interval.  `axes` are the names and sizes of the mesh axes, in mesh order;
    an axis that cuts nothing replicates.  `Layout.of` is the way to make one.

    Raises: `ShardingError` for an axis that cuts two dims, a cut with other than one piece for each place along its
    axes, and groups that do not share out the cuts.

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
        may be negative.  An axis that the mesh lacks counts as size 1.

        Raises: `ShardingError` for a spec of the wrong length, an axis used twice, a dim that does not exist, or cuts
        that break their rule.
        """
        sizes = dict(axes)
        _check_spec(shape, spec)
        splits, aligns = _values_by_dim("split", split, shape), _values_by_dim("align", align, shape)
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
        return cls(tuple(cuts), tuple(sizes.items()))

    # -- shape ----------------------------------------------------------------------------------------------------

    @property
    def ndim(self) -> int:
        return len(self.groups)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return tuple(math.prod(c.size for c in self.dim(d)) for d in range(self.ndim))

    def dim(self, dim: int) -> tuple[Cut, ...]:
        """The cuts that make up a tensor dim: one, unless dims were flattened together."""
        first = sum(self.groups[:dim])
        return self.cuts[first : first + self.groups[dim]]

    def dims(self) -> tuple[tuple[Cut, ...], ...]:
        return tuple(self.dim(d) for d in range(self.ndim))

    @classmethod
    def from_dims(cls, dims: Sequence[Sequence[Cut]], axes: AxisSizes) -> Layout:
        return cls(tuple(c for group in dims for c in group), axes, tuple(len(group) for group in dims))

    def is_cut(self, dim: int) -> bool:
        return any(c.is_cut for c in self.dim(dim))

    @property
    def cut_dims(self) -> tuple[int, ...]:
        return tuple(d for d in range(self.ndim) if self.is_cut(d))

    def dim_axes(self, dim: int) -> tuple[str, ...]:
        """The mesh axes that cut a dim."""
        return tuple(a for c in self.dim(dim) for a in c.axes)

    @property
    def cut_axes(self) -> tuple[str, ...]:
        """The mesh axes that cut any dim, in mesh order."""
        used = {a for c in self.cuts for a in c.axes}
        return tuple(name for name, size in self.axes if name in used and size > 1)

    @property
    def replicas(self) -> int:
        """How many ranks hold the same tile."""
        return math.prod(size for name, size in self.axes if name not in self.cut_axes)

    @property
    def spec(self) -> tuple[str | tuple[str, ...] | None, ...]:
        """What `Layout.of` was asked for, an entry a dim."""
        named = (self.dim_axes(d) for d in range(self.ndim))
        return tuple(None if not a else a[0] if len(a) == 1 else a for a in named)

    @property
    def has_halo(self) -> bool:
        return any(c.has_halo for c in self.cuts)

    def without_halo(self) -> Layout:
        return replace(self, cuts=tuple(c.bare() for c in self.cuts)) if self.has_halo else self

    def without_beyond(self) -> Layout:
        """The same without rows beyond an end that does not wrap."""
        if all(c.wraps for c in self.cuts):
            return self
        kept = (c if c.wraps else c.holding([c.inside(i) for i in range(c.pieces)]) for c in self.cuts)
        return replace(self, cuts=tuple(kept))

    # -- who has what ---------------------------------------------------------------------------------------------

    @property
    def ranks(self) -> int:
        return math.prod(size for _, size in self.axes)

    def size_of(self, axis: str) -> int:
        return dict(self.axes).get(axis, 1)

    def coords(self) -> Iterator[MeshCoordinate]:
        """Every mesh coordinate, in the mesh's row-major order."""
        return product(*(range(size) for _, size in self.axes))

    def index(self, coord: MeshCoordinate) -> int:
        """The row-major position of a coordinate: the inverse of enumerating `coords()`."""
        flat = 0
        for (_, size), c in zip(self.axes, coord, strict=True):
            flat = flat * size + c
        return flat

    def piece(self, cut: Cut, coord: MeshCoordinate) -> int:
        """Which piece of `cut` a coordinate has."""
        at = {name: c for (name, _), c in zip(self.axes, coord, strict=True)}
        flat = 0
        for axis in cut.axes:
            flat = flat * self.size_of(axis) + at[axis]
        return flat

    def owned(self, coord: MeshCoordinate) -> Box:
        """The box a coordinate owns, an interval a cut."""
        return tuple(c.owned(self.piece(c, coord)) for c in self.cuts)

    def held(self, coord: MeshCoordinate) -> Box:
        """The box a coordinate holds, halo included, in unwrapped coordinates."""
        return tuple(c.held[self.piece(c, coord)] for c in self.cuts)

    def local_shape(self, coord: MeshCoordinate) -> tuple[int, ...]:
        """The shape of the local tensor at a coordinate, halo included, an entry a tensor dim."""
        extents = box_shape(self.held(coord))
        shape: list[int] = []
        for count in self.groups:
            shape.append(math.prod(extents[:count]))
            extents = extents[count:]
        return tuple(shape)

    # -- derived layouts ------------------------------------------------------------------------------------------

    def replace_dim(self, dim: int, *cuts: Cut) -> Layout:
        dims = list(self.dims())
        dims[dim] = cuts
        return Layout.from_dims(dims, self.axes)

    def permute(self, order: Sequence[int]) -> Layout:
        return Layout.from_dims([self.dim(d) for d in order], self.axes)

    def drop(self, dims: Sequence[int], keepdim: bool = False) -> Layout:
        """The layout after the dims (which may be negative) were reduced away, or to size 1."""
        gone = {d % self.ndim for d in dims}
        kept = [(whole_dim(1),) if d in gone else self.dim(d) for d in range(self.ndim) if keepdim or d not in gone]
        return Layout.from_dims(kept, self.axes)

    def insert(self, dim: int, size: int = 1) -> Layout:
        dims = list(self.dims())
        dims.insert(dim, (whole_dim(size),))
        return Layout.from_dims(dims, self.axes)

    def __str__(self) -> str:
        def show(group: tuple[Cut, ...]) -> str:
            return "·".join(f"{c.size}" + (f"/{'+'.join(c.axes)}{list(c.points)}" if c.is_cut else "") for c in group)

        return "[" + ", ".join(show(g) for g in self.dims()) + "]"


def _cut_dim(size: int, axes: tuple[str, ...], sizes: Mapping[str, int], split: SplitRule, align: int) -> Cut:
    """One dim, cut by those of `axes` that have more than one place."""
    named = tuple(a for a in axes if sizes.get(a, 1) > 1)
    if size < 0 or (axes and not named and not isinstance(split, str)):
        cut_points(size, 1, split, align)  # raises: not an array, or points for other pieces
    if not named:
        _check_split_rule(1, split, align)
        return whole_dim(size)
    return Cut(size, cut_points(size, math.prod(sizes[a] for a in named), split, align), named)


def _values_by_dim(what: str, value: T | Mapping[int, T], shape: Sequence[int]) -> dict[int, T]:
    """`value` for each dim; a mapping's negative dims count from the last one."""
    if not isinstance(value, Mapping):
        return dict.fromkeys(range(len(shape)), value)
    given = cast(Mapping[int, T], value)
    wrong = [d for d in given if not -len(shape) <= d < len(shape)]
    if wrong:
        raise ShardingError(
            f"{what} names dim {wrong[0]}, but shape {tuple(shape)} has {len(shape)} dims, "
            f"{-len(shape)} to {len(shape) - 1}"
        )
    return {d % len(shape): v for d, v in given.items()}


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
