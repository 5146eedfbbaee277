"""`StoredVolume`: one image or label map of one or several stores, and where it lies in the world."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from hashlib import blake2b
from itertools import pairwise
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from jigsaw.errors import FieldError, GridError, MissingArrayError, MissingLevelError, redacted_text
from jigsaw.geometry.cut import Box, Interval, box_shape
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable
from jigsaw.io.chunks.files import size_and_change
from jigsaw.io.formats.conventions import is_multiscale_group, multiscale_level, space_unit, unit_ratio
from jigsaw.io.formats.slab_arrays import read_table_box
from jigsaw.io.formats.store import open_store
from jigsaw.io.series.coords import role_of_dim
from jigsaw.io.series.request import DROPPED_DIM, IndexPicks, ReadPart
from jigsaw.io.series.times import is_whole_number
from jigsaw.io.volumes.respacing import GridRespacing
from jigsaw.io.volumes.volume_arrays import store_of_given, values_of_array, with_given_dims

# -- axes in the world, in nibabel's terms and with its results -------------------------------------------------------


_VOXEL_AXES = "xyz"
_WORLD_ENDS = ("LR", "PA", "IS")  # names of the low and the high end of each axis of the world


def orientation_codes(affine: NDArray[np.float64]) -> str:
    """Return the world ends that x, y and z run toward, as ``"RAS"`` or ``"LPS"``: nibabel's ``aff2axcodes``."""
    return "".join(_WORLD_ENDS[axis][sign > 0] for axis, sign in _world_axes(affine))


def scaled_affine(affine: AffineMatrix, ratio: float) -> AffineMatrix:
    """Return an affine to a world whose unit is 1 / `ratio` of the present one."""
    return affine if ratio == 1 else np.diag([ratio, ratio, ratio, 1.0]) @ affine


def _world_axes(affine: NDArray[np.float64]) -> tuple[tuple[int, int], ...]:
    """Return for x, y and z the world axis that each runs along most, and its sign: nibabel's ``io_orientation``."""
    columns = affine[:3, :3] / np.linalg.norm(affine[:3, :3], axis=0)
    u, _, v = np.linalg.svd(columns)
    turned = u @ v  # the closest rotation, so without shears
    axes = dict[int, tuple[int, int]]()
    # the clearest axes first, so that an axis between two takes the one that is left
    for voxel in np.argsort(np.min(-(turned**2), axis=0), kind="stable").tolist():
        world = int(np.argmax(np.abs(turned[:, voxel])))
        axes[voxel] = world, 1 if turned[world, voxel] > 0 else -1
        turned[world] = 0
    return tuple(axes[voxel] for voxel in range(3))


@dataclass(frozen=True)
class AxisTurn:
    """Turn of the stored x, y and z: the axis that each becomes, and whether it then runs the other way."""

    to: tuple[int, ...]
    flipped: tuple[bool, ...]

    @classmethod
    def of(cls, affine: NDArray[np.float64], codes: str) -> AxisTurn:
        """Return the turn that makes axes placed by `affine` run toward the ends that `codes` name."""
        asked = [next(w for w, ends in enumerate(_WORLD_ENDS) if code in ends) for code in codes]
        have = _world_axes(affine)
        targets = tuple(asked.index(world) for world, _ in have)
        signs = [1 if code == _WORLD_ENDS[world][1] else -1 for code, world in zip(codes, asked, strict=True)]
        return cls(targets, tuple(sign != signs[axis] for axis, (_, sign) in zip(targets, have, strict=True)))

    def role(self, role: str) -> str:
        """Return the role that a stored dim of this role gets; any but x, y, z keeps its own."""
        return _VOXEL_AXES[self.to[_VOXEL_AXES.index(role)]] if role and role in _VOXEL_AXES else role

    def flips(self, role: str) -> bool:
        return bool(role) and role in _VOXEL_AXES and self.flipped[_VOXEL_AXES.index(role)]

    def check_dims(self, url: str, roles: tuple[str, ...]) -> None:
        """Raise `GridError` for a plane whose dims would no longer be y and x."""
        space = {role for role in roles if role and role in _VOXEL_AXES}
        if {self.role(role) for role in space} != space:
            raise GridError(
                f"{url} is a plane of {', '.join(sorted(space))}, and orientation= would make another dim of one; give "
                "the orientation that it has, leave orientation= out, or store it as a volume"
            )

    def turned_affine(self, affine: NDArray[np.float64], sizes: dict[str, int]) -> NDArray[np.float64]:
        """Return the affine of the turned voxels of a volume that is stored with these sizes."""
        back = np.zeros((4, 4))
        back[3, 3] = 1
        for stored, (target, flipped) in enumerate(zip(self.to, self.flipped, strict=True)):
            back[stored, target] = -1 if flipped else 1
            back[stored, 3] = sizes.get(_VOXEL_AXES[stored], 1) - 1 if flipped else 0
        return affine @ back


def checked_orientation(orientation: Any) -> str | None:
    """Check an orientation and return it in capitals. Raises: `FieldError` for anything else."""
    if orientation is None:
        return None
    codes = orientation.upper() if isinstance(orientation, str) else ""
    if (
        sorted(w for code in codes for w, ends in enumerate(_WORLD_ENDS) if code in ends) != [0, 1, 2]
        or len(codes) != 3
    ):
        raise FieldError(
            f"orientation={orientation!r} must say toward which end x, y and z run, by one letter each of L or R, "
            "P or A, I or S, like 'RAS'"
        )
    return codes


def differing_orientations(named: list[tuple[str, str]]) -> str:
    """Describe the first two of (name, orientation) that differ; empty where all are alike."""
    for (first, own), (other, theirs) in pairwise(named):
        if own != theirs:
            return f"{first} is stored {own} and {other} {theirs}"
    return ""


VOLUME_DIMS = ("z", "y", "x")
_SLAB_VALUES = 1 << 23
CHANNEL_ROLE = "channel"

AffineMatrix = NDArray[np.float64]


@dataclass(frozen=True)
class VolumeArray:
    """One array of a volume: the role of each stored dim (`z`, `y`, `x`, `channel`, or "" for one of size 1).

    `flip` lists the stored dims that are read from their end on.
    """

    table: ArrayTable
    roles: tuple[str, ...]
    flip: tuple[int, ...] = ()

    @property
    def channels(self) -> int:
        return self.table.shape[self.roles.index(CHANNEL_ROLE)] if CHANNEL_ROLE in self.roles else 1

    def turned(self, turn: AxisTurn | None) -> VolumeArray:
        if turn is None:
            return self
        flip = tuple(d for d, role in enumerate(self.roles) if turn.flips(role))
        return VolumeArray(self.table, tuple(map(turn.role, self.roles)), flip)

    def size(self, dim: str) -> int:
        return self.table.shape[self.roles.index(dim)]

    def chunk_rows(self, dim: str) -> int:
        return self.table.chunks[self.roles.index(dim)]

    def unpacked(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return stored values as numbers, with missing ones as NaN."""
        table = self.table
        if table.masks or (table.scale, table.offset) != (1.0, 0.0):
            missing = np.isin(values, table.masks)
            values = values * np.float64(table.scale) + table.offset
            values[missing] = np.nan
        return values

    def in_order(self, values: NDArray[Any], dims: Sequence[str]) -> NDArray[Any]:
        r"""Return the values of a stored box, turned, as [\*dims, channels]."""
        order = [self.roles.index(d) for d in dims]
        rest = [d for d in range(values.ndim) if d not in order]
        return np.flip(values, self.flip).transpose(*order, *rest).reshape([*(values.shape[d] for d in order), -1])

    def part(self, name: str, window: Mapping[str, Interval], channel: int, space: Sequence[str]) -> ReadPart:
        """Return the part that is read for a window of (start, stop) rows; its channels begin at `channel`."""
        channels: IndexPicks = tuple((c, channel + c) for c in range(self.channels))
        taken = {CHANNEL_ROLE: (channels, 1), "": (((0, 0),), DROPPED_DIM)}
        picks, targets = zip(*(taken.get(role) or (None, 2 + space.index(role)) for role in self.roles), strict=True)
        at = ((0, 0),) if CHANNEL_ROLE in self.roles else ((0, 0), (1, channel))
        first = tuple(
            self.size(role) - window[role][1] if d in self.flip else window.get(role, (0, 0))[0]
            for d, role in enumerate(self.roles)
        )
        return ReadPart(name, picks, targets, at, self.flip, first)


@dataclass(frozen=True, eq=False)
class StoredVolume:
    r"""Image [C, \*space] in the order ``z, y, x`` (or ``y, x``), in whatever order it is stored.

    `given` are its stores, whose channels follow each other; None among them is one channel that it lacks.
    `given_dims` are the names of their dims where the user gives them. `turn` says what its stored axes become, `box`
    which rows of them are its own, and `respacing` the distances of its voxels after that. It pickles as those, and is
    opened on first use. `missing` is the rule for chunks that its stores lack.
    """

    given: tuple[Any, ...]
    array: str | None = None
    level: int = 0
    turn: AxisTurn | None = None
    box: Box | None = None
    respacing: GridRespacing | None = None
    given_dims: tuple[str, ...] | None = None
    missing: str = "error"

    def __repr__(self) -> str:
        names = [each if values_of_array(each) is None else type(each).__name__ for each in self.given]
        return f"Volume({redacted_text(repr(tuple(names)))}, array={self.array!r}, level={self.level})"

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def turned(self, turn: AxisTurn) -> StoredVolume:
        """Return the same stores, with their axes turned. Raises: `GridError` for a plane that would lose y or x."""
        turn.check_dims(self.url, self.stored[0].roles)
        return self._opened_as(replace(self, turn=turn))

    def boxed(self, box: Box) -> StoredVolume:
        return self._opened_as(replace(self, box=box))

    def respaced(self, respacing: GridRespacing | None) -> StoredVolume:
        return self._opened_as(replace(self, respacing=respacing))

    def _opened_as(self, other: StoredVolume) -> StoredVolume:
        vars(other)["_stores"] = self._stores
        return other

    @property
    def url(self) -> str:
        """Name in messages: that of its first store."""
        return self._stores[0].url

    @cached_property
    def _stores(self) -> tuple[ArrayStore, ...]:
        return tuple(_open_level(source, self.level, self.given_dims) for source in self.given if source is not None)

    @cached_property
    def stored(self) -> tuple[VolumeArray, ...]:
        """Its arrays.  Raises: `GridError` when they lie on different grids."""
        arrays = tuple(_find_array(store, self.array).turned(self.turn) for store in self._stores)
        first = arrays[0]
        for store, other in zip(self._stores, arrays, strict=True):
            own, theirs = ({d: s.size(d) for d in VOLUME_DIMS if d in s.roles} for s in (first, other))
            if own != theirs:
                raise GridError(f"{self.url} has {own} and {store.url} {theirs}: channels of one image share a grid")
        return arrays

    @property
    def dims(self) -> tuple[str, ...]:
        return tuple(d for d in VOLUME_DIMS if d in self.stored[0].roles)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.respacing.sizes if self.respacing else self.stored_shape

    @property
    def own_box(self) -> Box:
        """The rows of its stores that are its own, all without a `box`."""
        return self.box or tuple((0, self.stored[0].size(d)) for d in self.dims)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        return box_shape(self.own_box)

    def _rows_of_stores(self, window: Sequence[Interval]) -> dict[str, Interval]:
        places = zip(self.dims, window, self.own_box, strict=True)
        return {d: (first + a, first + b) for d, (a, b), (first, _) in places}

    def slabs(self) -> list[list[Interval]]:
        """Return windows of whole chunks along the first dim that together are all of it, of bounded size."""
        first, *rest = self.stored_shape
        chunk = self.stored[0].chunk_rows(self.dims[0])
        rows = chunk * max(1, _SLAB_VALUES // max(1, chunk * prod(rest) * self.channels))
        tops = range(0, first, rows)
        return [[(top, min(top + rows, first)), *((0, n) for n in rest)] for top in tops]

    @cached_property
    def present(self) -> tuple[bool, ...]:
        """True for each channel that it has, False for one that it lacks."""
        stored = iter(self.stored)
        return tuple(
            has for source in self.given for has in ([False] if source is None else [True] * next(stored).channels)
        )

    @property
    def absent(self) -> list[int]:
        """The channels that it lacks."""
        return [channel for channel, has in enumerate(self.present) if not has]

    @property
    def channels(self) -> int:
        return len(self.present)

    @cached_property
    def tables(self) -> dict[str, ArrayTable]:
        return {_plan_name(i, s): s.table for i, s in enumerate(self.stored)}

    def parts(self, window: Sequence[Interval]) -> tuple[ReadPart, ...]:
        """Return the part of each array that a window takes, given as stored (start, stop) rows along each dim."""
        at, parts = self._rows_of_stores(window), list[ReadPart]()
        channels = [channel for channel, has in enumerate(self.present) if has]
        for i, stored in enumerate(self.stored):
            parts.append(stored.part(_plan_name(i, stored), at, channels[0], self.dims))
            channels = channels[stored.channels :]
        return tuple(parts)

    def read_window(self, window: Sequence[Interval]) -> NDArray[Any]:
        r"""Read the values [C, \*space] of stored rows, by this rank alone; channels that it lacks are NaN."""
        at, blocks = self._rows_of_stores(window), list[NDArray[Any]]()
        for stored in self.stored:
            rows = [at.get(role, (0, n)) for role, n in zip(stored.roles, stored.table.shape, strict=True)]
            box = tuple(
                (n - b, n - a) if d in stored.flip else (a, b)
                for d, ((a, b), n) in enumerate(zip(rows, stored.table.shape, strict=True))
            )
            values = stored.unpacked(read_table_box(stored.table, box, self.missing))
            blocks.append(np.moveaxis(stored.in_order(values, self.dims), -1, 0))
        values = np.concatenate(blocks)
        if not self.absent:
            return values
        whole = np.full((self.channels, *values.shape[1:]), np.nan, np.result_type(values, np.float32))
        whole[list(self.present)] = values
        return whole

    @property
    def unit(self) -> str:
        """Unit of the world, as OME-NGFF names it: that of its first store; "" where that does not say one."""
        return space_unit(self.stored[0].table.attrs)

    @cached_property
    def affines(self) -> tuple[tuple[str, AffineMatrix], ...]:
        """The name and affine of each of its stores that has an affine, in its `unit`, before they are resampled."""
        return self.affines_in(self.unit)

    def affines_in(self, unit: str) -> tuple[tuple[str, AffineMatrix], ...]:
        """Return its `affines` in another unit; as they are where one of the units is not known."""
        stored_affines = [
            (st.url, affine_of_array(st, s.table), s) for st, s in zip(self._stores, self.stored, strict=True)
        ]
        return tuple(
            (url, scaled_affine(self._turned_affine(affine, s), unit_ratio(space_unit(s.table.attrs), unit)))
            for url, affine, s in stored_affines
            if affine is not None
        )

    def _turned_affine(self, affine: AffineMatrix, stored: VolumeArray) -> AffineMatrix:
        if turn := self.turn:
            sizes = {d: stored.size(turn.role(d)) for d in "xyz" if turn.role(d) in stored.roles}
            affine = turn.turned_affine(affine, sizes)
        return affine if self.box is None else _moved_affine(affine, self.dims, [first for first, _ in self.box])

    @property
    def affine(self) -> AffineMatrix:
        """Affine from voxels (x, y, z, 1) to the world, 4 x 4, as nibabel has it; the identity where it is unknown."""
        stored = self.affines[0][1] if self.affines else np.eye(4)
        return self.respacing.respaced_affine(stored, self.dims) if self.respacing else stored

    @property
    def spacing(self) -> tuple[float, ...]:
        """The distance of voxels along each spatial dim, in the order of `dims`, in the units of the world."""
        return voxel_spacing(self.affine, self.dims)

    def affine_at(self, origin: Sequence[int]) -> AffineMatrix:
        """Return the affine of the part that begins at `origin`, given in the order of `dims`."""
        return _moved_affine(self.affine, self.dims, origin)

    def fingerprint(self, asked: Any) -> str | None:
        """Return a checksum of what is `asked` of it and of the state of its stores; None if nothing tells a change."""
        digest = blake2b(repr((self.turn, self.box, asked)).encode(), digest_size=16)
        sources = (each for each in self.given if each is not None)
        for source, store, stored in zip(sources, self._stores, self.stored, strict=True):
            table, values = stored.table, values_of_array(source)
            facts = store.url, table.name, table.shape, table.dims, table.dtype, table.chunks
            meaning = table.scale, table.offset, table.masks, repr(table.fill_value), self.missing
            digest.update(repr((facts, meaning)).encode())
            if values is not None:
                digest.update(np.ascontiguousarray(values).tobytes())
                continue
            for path in dict.fromkeys(table.finder.path(index) for index in table.grid.indices()):
                state = size_and_change(path)  # None also where the folder lacks a chunk
                if state is None and (table.places.files.far or table.decoder is None):
                    return None
                digest.update(f"{os.path.abspath(path)} {state}".encode())
        return digest.hexdigest()


def _moved_affine(affine: AffineMatrix, dims: Sequence[str], origin: Sequence[int]) -> AffineMatrix:
    at, moved = dict(zip(dims, origin, strict=True)), affine.copy()
    moved[:3, 3] += affine[:3, :3] @ np.array([at.get(d, 0) for d in "xyz"], np.float64)
    return moved


def voxel_spacing(affine: AffineMatrix, dims: Sequence[str]) -> tuple[float, ...]:
    """Return the length of a step along each dim."""
    lengths = np.linalg.norm(affine[:3, :3], axis=0)
    return tuple(float(lengths["xyz".index(d)]) for d in dims)


def _plan_name(number: int, stored: VolumeArray) -> str:
    return f"{number}:{stored.table.name}" if number else stored.table.name


def _open_level(source: Any, level: int, dims: tuple[str, ...] | None) -> ArrayStore:
    store = store_of_given(source, dims) or open_store(source)
    if is_multiscale_group(store.attrs):
        return multiscale_level(store, level)
    if level:
        raise MissingLevelError(f"level={level}: {store.url} is not an OME-Zarr image, so it has level 0 alone")
    return with_given_dims(store, dims)


def _find_array(store: ArrayStore, array: str | None) -> VolumeArray:
    roles = {name: _space_roles(table) for name, table in store.arrays.items() if table.dtype[1] in "biuf"}
    fitting = [name for name, own in roles.items() if {"y", "x"} <= set(own)]
    if array is not None and array not in fitting:
        raise MissingArrayError(f"{store.url} has no volume {array!r}; it has {', '.join(sorted(fitting)) or 'none'}")
    if array is None and len(fitting) != 1:
        shown = ", ".join(f"{name} {store.arrays[name].dims}" for name in sorted(fitting or store.arrays))
        raise MissingArrayError(
            f"{store.url} has {len(fitting)} arrays with dims z, y, x (or y, x), not one: {shown or 'no arrays'}; "
            "name it by image_array= or label_array=, or name its dims by dims="
        )
    name = array or fitting[0]
    table = store.arrays[name]
    table.check_rows(table.dims)
    return VolumeArray(table, _with_channel_role(store, table, roles[name]))


def _space_roles(table: ArrayTable) -> tuple[str, ...]:
    roles = [role_of_dim(dim, {}) for dim in table.dims]
    return tuple(role if role in VOLUME_DIMS and roles.count(role) == 1 else "" for role in roles)


def _with_channel_role(store: ArrayStore, table: ArrayTable, roles: tuple[str, ...]) -> tuple[str, ...]:
    """Give the one dim beyond space the role of channels; of several, those of size 1 are dropped."""
    others = [d for d, role in enumerate(roles) if not role]
    long = [d for d in others if table.shape[d] != 1]
    if len(long) > 1:
        shown = ", ".join(f"{table.dims[d]} {table.shape[d]}" for d in long)
        which = f"array {table.name!r} of {store.url}"
        raise GridError(f"{which} has {shown} beside space; only one dim can be the channels")
    chosen = long or others[:1]
    return tuple(CHANNEL_ROLE if d in chosen else role for d, role in enumerate(roles))


def affine_of_array(store: ArrayStore, table: ArrayTable) -> AffineMatrix | None:
    """Return the affine in the attributes of an array, or of its store. Raises: `GridError` for an invalid one."""
    value = table.attrs.get("affine", store.attrs.get("affine"))
    if value is None:
        return None
    affine = checked_affine(value)
    if affine is None:
        raise GridError(f"{store.url}: affine {value!r} must be an invertible 4 x 4 matrix of numbers")
    return affine


def checked_affine(value: Any) -> AffineMatrix | None:
    """Return an invertible 4 x 4 matrix of finite numbers as one of numpy; None for anything else."""
    try:
        affine = np.asarray(value, np.float64)
    except (TypeError, ValueError):  # strings, or rows of different lengths
        return None
    is_matrix = affine.shape == (4, 4) and bool(np.isfinite(affine).all())
    return affine if is_matrix and abs(np.linalg.det(affine[:3, :3])) >= 1e-300 else None


@dataclass(frozen=True)
class RenamedLabels:
    """Map from stored labels to new ones, by rising old label; those not named stay."""

    old: tuple[int, ...] = ()
    new: tuple[int, ...] = ()

    @classmethod
    def of(cls, renames: Mapping[int, int] | None, dtype: torch.dtype, fill: float) -> RenamedLabels:
        """Make it from a mapping. Raises: `FieldError` unless it maps integers, and for renamed missing values."""
        if renames is None:
            return cls()
        held = torch.iinfo(dtype)
        if not isinstance(renames, Mapping) or not all(
            is_whole_number(old) and is_whole_number(new) and held.min <= new <= held.max
            for old, new in renames.items()
        ):
            raise FieldError(
                f"label_map={renames!r} must say which label becomes which, in integers that {dtype} holds, like "
                "label_map={2: 1, 3: 1}"
            )
        if renames.get(int(fill), fill) != fill:
            raise FieldError(
                f"label_map={renames!r} renames {fill}, which is also label_fill, what stands where there is no label: "
                "give another label_fill, like the ignore_index of the loss"
            )
        known = sorted((int(old), int(new)) for old, new in renames.items())
        return cls(tuple(old for old, _ in known), tuple(new for _, new in known))

    def applied(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the new labels of integers, in a dtype that holds both."""
        if not self.old:
            return values
        old, new = np.array(self.old), np.array(self.new)
        at = np.minimum(np.searchsorted(old, values), len(old) - 1)
        return np.where(old[at] == values, new[at], values)
