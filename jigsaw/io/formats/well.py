"""The Well's files as fields on named dims: simulations in HDF5, several trajectories a file.

Its groups ``t0_fields``, ``t1_fields`` and ``t2_fields`` have scalars, vectors and tensors, stored as ``[trajectory,
time, *space, *components]``. Attributes say which of these dims a field lacks. Here the components are channels with
names: of a vector ``velocity_x, velocity_y``, of a tensor ``D_xx, D_xy, D_yx, D_yy``. Space keeps the order and the
names that the file gives it.

What `scalars` has, and the times, are fields that are alike at every place, and are read where they are asked for by
name. Steps are counted: times differ by trajectory and file, and windows count steps, as The Well's own reader does.

The format: https://polymathic-ai.org/the_well/data_format
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from math import prod
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError, UnsupportedStoreError
from jigsaw.geometry.cut import Box
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable
from jigsaw.io.formats.array_source import FilelessPlaces, table_of_values, wrap_places
from jigsaw.io.formats.hdf5_filters import FilterPipeline
from jigsaw.io.formats.slab_arrays import read_table_box, read_whole_coordinate
from jigsaw.io.series.coords import BOUNDARY_ATTR, TRAJECTORY_ROLE

_FIELD_GROUPS = ("t0_fields", "t1_fields", "t2_fields")
BOUNDARY_GROUP = "boundary_conditions"
WELL_GROUPS = ("dimensions", BOUNDARY_GROUP, "scalars", *_FIELD_GROUPS)
_OPEN, _WALL = "open", "wall"

GroupAttributes = Mapping[str, Mapping[str, Any]]
"""The attributes of each group of a file, by its path."""


def is_well_file(groups: GroupAttributes) -> bool:
    """Say whether a file has The Well's groups, which say what its dims are."""
    return "spatial_dims" in groups.get("dimensions", {}) and any(name in groups for name in _FIELD_GROUPS)


def well_as_fields(store: ArrayStore, groups: GroupAttributes) -> ArrayStore:
    """Return the store with a variable for each field, scalar and coordinate, on named dims.

    Raises: `GridError` for a field of another shape than the file's dims and its own attributes say, or of none.
    """
    return _WellFile(store, groups).store()


class _StoredField(NamedTuple):
    """A stored array of The Well, the dims that it varies along, and the sizes of the dims of components after them."""

    name: str
    table: ArrayTable
    dims: tuple[str, ...]
    components: tuple[int, ...]

    @property
    def has_time(self) -> bool:
        return "time" in self.dims


class _WellFile:
    def __init__(self, stored: ArrayStore, groups: GroupAttributes) -> None:
        self._stored, self._groups = stored, groups
        self._space = _listed_texts(groups["dimensions"]["spatial_dims"])
        self._dims = (TRAJECTORY_ROLE, "time", *self._space)
        self._sizes = {d: self._array(f"dimensions/{d}").shape[-1] for d in self._dims[1:]}
        self._sizes[TRAJECTORY_ROLE] = int(stored.attrs.get("n_trajectories", 1))
        self._names: dict[str, NDArray[Any]] = {}

    def store(self) -> ArrayStore:
        fields = [field for order, group in enumerate(_FIELD_GROUPS) for field in self._fields(group, order)]
        tables: dict[str, ArrayTable] = {}
        for field in sorted(fields, key=lambda field: not field.has_time):  # what changes stands before what does not
            name = field.name if field.name not in tables else field.table.name
            tables[name] = replace(self._channels(field), name=name)
        for field in [*self._scalars(), self._stored_field("time", "dimensions/time", (), (0,))]:
            tables.setdefault(field.name, replace(self._spread_scalar(field), name=field.name))
        for name, values in self._names.items():
            tables[name] = table_of_values(name, values, (name,), {}, self._stored.url)
        coordinates = {d: self._coordinate(d) for d in self._space}
        notes = [f"the coordinate {d!r} differs by trajectory; its rows are counted" for d in self._uneven()]
        tables |= {name: replace(table, name=name) for name, table in coordinates.items()}

        def read_small(name: str) -> NDArray[Any]:
            return self._names[name] if name in self._names else read_whole_coordinate(tables[name])

        return ArrayStore(self._stored.url, tables, self._stored.attrs, read_small, (*self._stored.notes, *notes))

    def _array(self, path: str) -> ArrayTable:
        table = self._stored.arrays.get(path)
        if table is None:
            raise GridError(f"{self._stored.url}: its attributes name {path!r}, which is not an array of numbers in it")
        return table

    def _fields(self, group: str, order: int) -> Iterator[_StoredField]:
        for name in _listed_texts(self._groups.get(group, {}).get("field_names", ())):
            path = f"{group}/{name}"
            varying = _listed_flags(self._array(path).attrs.get("dim_varying", [True] * len(self._space)))
            if len(varying) != len(self._space):
                raise GridError(
                    f"{self._stored.url}: {path!r} has dim_varying={list(varying)} for the dims {list(self._space)}; "
                    "write a flag for each"
                )
            yield self._stored_field(name, path, varying, ((0,), (1,), (1, 2))[order])  # D^2 may lie along one dim

    def _stored_field(
        self, name: str, path: str, varying: Sequence[bool], component_dims: tuple[int, ...]
    ) -> _StoredField:
        """Return a field with the dims that its attributes say, after which come so many of components."""
        table = self._array(path)
        flags = table.attrs.get("sample_varying", False), table.attrs.get("time_varying", True), *varying
        dims = tuple(d for d, flag in zip(self._dims, flags, strict=False) if flag)
        sizes = tuple(self._sizes[d] for d in dims)
        # along a dim of space that it does not vary along it may have one row
        one_row = dims[: sum(map(bool, flags[:2]))] + (self._space if varying else ())
        if table.shape[: len(one_row)] == tuple(self._sizes[d] if d in dims else 1 for d in one_row):
            dims, sizes = one_row, table.shape[: len(one_row)]
        components = table.shape[len(dims) :]
        one_number = bool(varying) or prod(components) == 1  # a scalar may be a list of one
        if table.shape[: len(dims)] != sizes or len(components) not in component_dims or not one_number:
            raise GridError(
                f"{self._stored.url}: {path!r} has the shape {table.shape}, and its attributes say that it varies "
                f"along {', '.join(f'{d} {n}' for d, n in zip(dims, sizes, strict=True)) or 'no dim'}; correct "
                "sample_varying, time_varying or dim_varying"
            )
        return _StoredField(name, table, dims, components)

    def _scalars(self) -> Iterator[_StoredField]:
        for name in _listed_texts(self._groups.get("scalars", {}).get("field_names", ())):
            yield self._stored_field(name, f"scalars/{name}", (), (0, 1))

    def _channels(self, field: _StoredField) -> ArrayTable:
        """Return the table of a field, whose components lie along one dim with names."""
        table, dims, components = field.table, field.dims, f"{field.name} component"
        if field.components:
            table = table if len(field.components) == 1 else _with_one_component_dim(table)
            self._names[components] = np.array(self._component_names(field, table.shape[-1]))
            dims = (*dims, components)
        table = replace(table, dims=dims, roles=tuple("level" if d == components else d for d in dims))
        rows = dict(zip(dims, table.shape, strict=True))
        is_whole = all(rows.get(d) == self._sizes[d] for d in self._space)
        return table if is_whole else self._spread(table, {*field.dims, *self._space})

    def _component_names(self, field: _StoredField, count: int) -> list[str]:
        order = next(i for i, group in enumerate(_FIELD_GROUPS) if field.table.name.startswith(group))
        letters = ["".join(each) for each in product(self._space, repeat=order)]
        return [f"{field.name}_{each}" for each in (letters if len(letters) == count else range(count))]

    def _spread(self, table: ArrayTable, dims: Iterable[str]) -> ArrayTable:
        """Return the table of an array that is alike along those of `dims` that it lacks, or has one row of."""
        components = tuple(d for d in table.dims if d not in self._dims)
        whole = (*sorted(dims, key=self._dims.index), *components)
        shape = tuple(table.shape[-1] if d in components else self._sizes[d] for d in whole)

        def load(box: Box) -> NDArray[Any]:
            spans = dict(zip(whole, box, strict=True))
            stored = zip(table.dims, table.shape, strict=True)
            values = read_table_box(table, tuple((0, 1) if n == 1 else spans[d] for d, n in stored))
            missing = [i for i, d in enumerate(whole) if d not in table.dims]
            return np.broadcast_to(np.expand_dims(values, missing), [b - a for a, b in box])

        return replace(
            table,
            shape=shape,
            dims=whole,
            roles=(*whole[: len(whole) - len(components)], *table.roles[len(table.roles) - len(components) :]),
            dtype=np.dtype(table.dtype).newbyteorder("=").str,
            chunks=tuple(1 if d in (TRAJECTORY_ROLE, "time") else max(n, 1) for d, n in zip(whole, shape, strict=True)),
            decoder=None,
            places=FilelessPlaces(f"{self._stored.url}, array {table.name!r}"),
            load_slowly=load,
            lengths={},
            clipped=True,
            slices=True,
        )

    def _spread_scalar(self, field: _StoredField) -> ArrayTable:
        """Return the table of a scalar as a field that is alike at every place, of each trajectory."""
        table = field.table
        if len(table.shape) > len(field.dims):  # a list of one number
            values = read_table_box(table, tuple((0, n) for n in table.shape))
            table = table_of_values(field.name, values[..., 0], field.dims, table.attrs, self._stored.url)
        table = replace(table, name=field.table.name, dims=field.dims, roles=field.dims, by_name_only=True)
        time = ("time",) if field.has_time else ()
        return self._spread(table, {TRAJECTORY_ROLE, *time, *self._space})

    def _uneven(self) -> list[str]:
        return [d for d in self._space if len(self._array(f"dimensions/{d}").shape) != 1]

    def _coordinate(self, dim: str) -> ArrayTable:
        table, attrs = self._array(f"dimensions/{dim}"), {BOUNDARY_ATTR: self._boundary(dim)}
        if dim in self._uneven():
            return table_of_values(dim, np.arange(self._sizes[dim]), (dim,), attrs, self._stored.url)
        return replace(table, dims=(dim,), attrs={**table.attrs, **attrs})

    def _boundary(self, dim: str) -> tuple[str, str]:
        """Return what lies beyond the first and the last row of a dim: ``open``, ``wall`` or ``periodic``.

        The rule is The Well's own: a wall is one where all of that face is, and anything else where any of it is.
        """
        ends = [_OPEN, _OPEN]
        for path, attrs in self._groups.items():
            dims = _listed_texts(attrs.get("associated_dims", ()))
            mask = self._stored.arrays.get(f"{path}/mask")
            if not path.startswith(BOUNDARY_GROUP + "/") or dim not in dims or mask is None:
                continue
            if mask.shape != tuple(self._sizes.get(d) for d in dims):
                continue  # of each trajectory or step: the file does not say one thing of the dim
            kind = str(attrs.get("bc_type", _OPEN)).lower()
            for end, row in enumerate((0, self._sizes[dim] - 1)):
                face = read_table_box(
                    mask, tuple((row, row + 1) if d == dim else (0, n) for d, n in zip(dims, mask.shape, strict=True))
                )
                if face.all() if kind == _WALL else face.any():
                    ends[end] = kind
        return ends[0], ends[1]


def _with_one_component_dim(table: ArrayTable) -> ArrayTable:
    """Return a table of tensors with their components along one dim instead of the last two."""
    rows, columns = table.shape[-2:]
    shape = (*table.shape[:-2], rows * columns)
    decoder, order = table.decoder, tuple(range(len(table.shape)))
    if isinstance(decoder, FilterPipeline) and decoder.order == order and table.chunks[-1] == columns:
        return replace(  # the same bytes: within a chunk the rows of components follow each other
            table,
            shape=shape,
            chunks=(*table.chunks[:-2], table.chunks[-2] * columns),
            dims=table.dims[:-1],
            decoder=replace(decoder, order=order[:-1]),
            places=wrap_places(table.places, dims=len(shape), tail=(0,)),
            load_slowly=partial(_components_of_rows, table),
        )
    return replace(
        table,
        shape=shape,
        chunks=(*table.chunks[:-2], rows * columns),
        dims=table.dims[:-1],
        dtype=np.dtype(table.dtype).newbyteorder("=").str,
        decoder=None,
        places=FilelessPlaces(f"array {table.name!r}"),
        load_slowly=partial(_components_of_rows, table),
        clipped=True,
        slices=True,
    )


def _components_of_rows(table: ArrayTable, box: Box) -> NDArray[Any]:
    *lead, (start, stop) = box
    columns = table.shape[-1]
    first = start // columns
    values = read_table_box(table, (*lead, (first, -(-stop // columns)), (0, columns)))
    return values.reshape(*values.shape[:-2], -1)[..., start - first * columns : stop - first * columns]


def _listed_texts(value: Any) -> tuple[str, ...]:
    """Return an attribute that lists names; a list of one is kept as the name."""
    names = (value,) if isinstance(value, str) else value
    if not isinstance(names, list | tuple):
        raise UnsupportedStoreError(f"an attribute of The Well's groups is {value!r}, and a list of names is expected")
    return tuple(map(str, names))


def _listed_flags(value: Any) -> tuple[bool, ...]:
    return tuple(map(bool, value)) if isinstance(value, list | tuple) else (bool(value),)
