"""Meaning of a store's dims: roles by what the user says, then by CF attributes, then by name.

A *role* is the canonical name of a dim, whatever the store calls it: `time, level, lat, lon` on the globe, `z, y, x` in
a volume, `y, x` on a curvilinear or projected grid; `cell` where each place has a latitude and a longitude of its own
(HEALPix, ICON, reduced Gaussian grids, stations); `member` for an ensemble, `trajectory` for runs of a simulation,
`lead` for the time since a forecast began and `init` for when it did.  A dim of channels (``[time, channel, lat,
lon]``) is `level`, too: its levels have names.
A dim without a role keeps its own name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError, UnsupportedStoreError
from jigsaw.io.arguments import checked_mapping
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable

CELL_ROLE = "cell"
SPATIAL_ROLES = ("lat", "lon", "z", "y", "x", CELL_ROLE)
_TIME_ROLES = ("time", "init", "lead")
TRAJECTORY_ROLE = "trajectory"
FURTHER_ROLES = (*_TIME_ROLES, "member", "level", TRAJECTORY_ROLE)
"""Roles of dims that are not space."""
BOUNDARY_ATTR = "boundary"
"""The attribute of a coordinate with what lies beyond its first and its last row: open, wall or periodic."""
DIM_ROLES = (*_TIME_ROLES, "member", "level", "channel", *SPATIAL_ROLES)
_CHANNEL_DIMS = ("channel", "channels", "variable", "variables")


def _roles_by_word(**words: str) -> dict[str, str]:
    return {word: role for role, names in words.items() for word in names.split()}


_ROLE_OF_STANDARD_NAME = _roles_by_word(
    time="time",
    init="forecast_reference_time",
    lead="forecast_period",
    member="realization",
    lat="latitude",
    lon="longitude",
    y="grid_latitude projection_y_coordinate",
    x="grid_longitude projection_x_coordinate",
    cell="healpix_index",
    level="air_pressure altitude height depth model_level_number atmosphere_sigma_coordinate "
    "atmosphere_hybrid_sigma_pressure_coordinate",
)
_ROLE_OF_UNITS = _roles_by_word(
    lat="degrees_north degree_north degree_n degrees_n degreen degreesn degree_norths",
    lon="degrees_east degree_east degree_e degrees_e degreee degreese",
    level="pa hpa mbar millibar millibars mb",
)
_ROLE_OF_AXIS = {"T": "time", "Z": "z", "Y": "y", "X": "x"}
_ROLE_OF_NAME = _roles_by_word(
    time="time valid_time t",
    init="init init_time initial_time forecast_reference_time reference_time",
    lead="prediction_timedelta step lead lead_time leadtime forecast_period",
    member="number member realization realisation ensemble ensemble_member ens",
    level="level levels lev plev pressure pressure_level isobaricinhpa hybrid",
    lat="lat latitude lats latitudes nav_lat",
    lon="lon longitude lons longitudes long nav_lon",
    z="z depth height",
    y="y row rows rlat south_north",
    x="x column columns col cols rlon west_east",
    cell="cell cells ncell ncells",
)
_ANGLES = ("lat", "lon")
SOURCE_PLACES = "jigsaw_source_places"
"""The array with the place that each cell has in the source, in a store whose cells were put in another order."""
_ICON_TABLES = ("neighbor_cell_index", "adjacent_cell_of_edge", "cells_of_vertex")
MESH_TABLES = tuple(
    f"{ends}_connectivity"
    for ends in "face_node face_face face_edge edge_node edge_face boundary_node volume_node".split()
)
"""The attributes of UGRID's topology that name tables of a mesh."""
_MESH_PLACES = ("face_coordinates", "node_coordinates", "edge_coordinates")
_LARGEST_COORDINATE = 1 << 31


def role_of_dim(dim: str, attrs: Mapping[str, Any]) -> str | None:
    """Return the role of a dim from standard_name, units, axis or positive of its coordinate, then its name."""
    role = _said_role(attrs)
    axis, named = _ROLE_OF_AXIS.get(str(attrs.get("axis", "")).upper()), _ROLE_OF_NAME.get(dim.lower())
    if role:
        # units like "hours since" mean a time, and the name says which one
        return named if role == "time" and "standard_name" not in attrs and named == "init" else role
    if axis == "time" and named in ("init", "lead"):
        return named
    if axis in ("y", "x", "z") and named in ("lat", "lon", "level"):
        return named
    if axis is None and str(attrs.get("positive", "")).lower() in ("up", "down"):
        return named or "z"
    return axis or named


def _said_role(attrs: Mapping[str, Any]) -> str | None:
    standard = str(attrs.get("standard_name", "")).lower()
    units = str(attrs.get("units", "")).lower()
    if attrs.get("grid_name") == "healpix":
        return CELL_ROLE
    return _ROLE_OF_STANDARD_NAME.get(standard) or _ROLE_OF_UNITS.get(units) or ("time" if " since " in units else None)


@dataclass(frozen=True)
class DimNaming:
    """Naming of a store's dims by the user: the role of a dim, and the coordinate variable that has its values."""

    roles: Mapping[str, str] = field(default_factory=dict[str, str])
    coordinates: Mapping[str, str] = field(default_factory=dict[str, str])

    @classmethod
    def of(cls, dims: Mapping[str, str] | None, along: str, arrays: Mapping[str, ArrayTable]) -> DimNaming:
        """Make it from ``{"time": "valid_time"}``: a role, and the store's dim, or its coordinate variable of one dim.

        `along` is the dim that windows run along: its role becomes `time`, and that of the time dim `init`.
        """
        known = {d for table in arrays.values() for d in table.dims}
        roles: dict[str, str] = {}
        coordinates: dict[str, str] = {}
        for role, name in checked_mapping("dims", dims, "{'time': 'valid_time'}", GridError).items():
            if role not in DIM_ROLES:
                raise GridError(
                    f"dims={dict(dims or {})!r} names {role!r}, which is not a role; there are {list(DIM_ROLES)}"
                )
            table = arrays.get(name)
            if name not in known and (table is None or len(table.dims) != 1):
                raise GridError(f"dims={{{role!r}: {name!r}}}: the store has no such dim; it has {sorted(known)}")
            dim = name if name in known or table is None else table.dims[0]
            roles[dim] = "level" if role == "channel" else role
            if dim != name:
                coordinates[dim] = name
        if along != "time":
            roles |= dict.fromkeys(_dims_along(along, known, arrays), "time")
        return cls(roles, coordinates)


def _dims_along(along: str, known: set[str], arrays: Mapping[str, ArrayTable]) -> list[str]:
    """Return the store's dims that `along` names, by their own name or by their role."""
    if isinstance(along, str) and along in known:
        return [along]
    meant = sorted(d for d in known if role_of_dim(d, arrays[d].attrs if d in arrays else {}) == along)
    if not meant:
        raise GridError(f"along={along!r} is not a dim of the store; it has {sorted(known)}")
    return meant


class StoreCoordinates:
    """The dims of a store's arrays: their roles, and where their coordinates are."""

    def __init__(
        self,
        arrays: Mapping[str, ArrayTable],
        naming: DimNaming | None = None,
        attrs: Mapping[str, Any] | None = None,
    ) -> None:
        self.arrays, self.naming = arrays, naming or DimNaming()
        self._store_attrs = attrs or {}
        self._meshes = [t for t in self.arrays.values() if t.attrs.get("cf_role") == "mesh_topology"]
        self._planes: dict[tuple[str, tuple[str, ...]], dict[str, str]] = {}
        self._auxiliary: dict[tuple[str, str], str] = {}
        self._angles: dict[tuple[str, str], dict[str, str]] = {}
        self._bounds = {
            _group_prefix(n) + str(t.attrs[k])
            for n, t in arrays.items()
            for k in ("bounds", "climatology", *MESH_TABLES)
            if k in t.attrs
        } | {n for n in arrays if n.removeprefix(_group_prefix(n)) in (*_ICON_TABLES, SOURCE_PLACES)}
        for name, table in sorted(arrays.items()):
            group, role = _group_prefix(name), _said_role(table.attrs)
            if len(table.dims) == 2 and role in _ANGLES:
                self._planes.setdefault((group, tuple(table.dims)), {}).setdefault(role, name)
            if len(table.dims) == 1 and name != group + table.dims[0]:
                angle = role if role in _ANGLES else _ROLE_OF_NAME.get(name.removeprefix(group).lower())
                if angle in _ANGLES and _can_be_role(table.dims[0], angle):
                    self._angles.setdefault((group, table.dims[0]), {}).setdefault(angle, name)
            if len(table.dims) == 1 and role and name != group + table.dims[0] and _can_be_role(table.dims[0], role):
                self._auxiliary.setdefault((group, table.dims[0]), name)
        self._angles = {key: angles for key, angles in self._angles.items() if len(angles) == len(_ANGLES)}
        # a place along such a dim has both, so neither is the dim's coordinate
        for key, angles in self._angles.items():
            if self._auxiliary.get(key) in angles.values():
                del self._auxiliary[key]

    def name(self, array: ArrayTable, dim: str) -> str | None:
        """Return the coordinate variable of a dim: the user's choice, the one of its name, or the only other one along
        it. Else it is one of its name and length in a group around the array's.
        """
        group = _group_prefix(array.name)
        own = self.arrays.get(group + dim)
        if dim in self.naming.coordinates:
            return self.naming.coordinates[dim]
        described = self.dggs(array)
        if "coordinate" in described and dim == described["spatial_dimension"]:
            return self._numbers_of_dggs(array, described)
        if own is not None and len(own.dims) == 1:
            return group + dim
        return self._auxiliary.get((group, dim)) or self._around(group, array, dim)

    def _around(self, group: str, array: ArrayTable, dim: str) -> str | None:
        """Return a coordinate of an enclosing group, whose dims NetCDF-4 shares with the groups inside."""
        while group:
            group = _group_prefix(group[:-1])
            candidate = self.arrays.get(group + dim)
            if candidate is not None and tuple(candidate.dims) == (dim,):
                return candidate.name if tuple(candidate.shape) == (array.shape[array.dims.index(dim)],) else None
        return None

    def attrs(self, array: ArrayTable, dim: str) -> Mapping[str, Any]:
        """Return the attributes of that coordinate variable; empty where it does not exist."""
        name = self.name(array, dim)
        return {} if name is None else self.arrays[name].attrs

    def values(self, store: ArrayStore, array: ArrayTable, dim: str) -> NDArray[Any]:
        """Return the values along a dim of `array`: its coordinate variable, decoded, with missing values as NaN.

        The places 0, 1, 2… are used only for a dim without such a variable in the store.
        """
        name, size = self.name(array, dim), array.shape[array.dims.index(dim)]
        if name is None:
            check_coordinate_size(f"{array.name}: {dim}", (size,), 8 * size)
            return np.arange(size)
        table = self.arrays[name]
        if tuple(table.shape) != (size,):
            raise GridError(
                f"array {array.name!r} has {size} rows along {dim!r}, and its coordinate {name!r} has "
                f"{' x '.join(map(str, table.shape))}; write both equally long, or rename the coordinate's dim"
            )
        return decoded_coordinate(table, store.read_small(name))

    def is_field(self, array: ArrayTable) -> bool:
        """Say whether an array has values along two spatial dims, or one of cells, and does not describe these."""
        if array.roles:
            return True
        stated, group = _said_role(array.attrs), _group_prefix(array.name)
        if not array.dims or stated in (*_ANGLES, CELL_ROLE) or array.name in self._bounds:
            return False
        spatial = set(SPATIAL_ROLES).intersection(self._roles(array))
        if len(array.dims) == 1:  # an array over cells alone is a field, unless it describes the cells
            named = {n for (g, _), angles in self._angles.items() if g == group for n in angles.values()}
            named |= {group + str(self.dggs(array).get("coordinate"))}
            describes = array.name in named or array.name == group + array.dims[0] or stated == "time"
            return spatial == {CELL_ROLE} and np.dtype(array.dtype).kind in "fiu" and not describes
        return len(spatial) >= 2 or spatial == {CELL_ROLE}

    def angles(self, array: ArrayTable, dim: str) -> dict[str, str]:
        """Return the arrays of the latitude and the longitude of each place along a dim; none where it lacks one."""
        return self._angles.get((_group_prefix(array.name), dim), {})

    def grid_mapping(self, array: ArrayTable) -> ArrayTable | None:
        """Return the variable that describes the grid of an array, where CF attributes name one."""
        named, group = str(array.attrs.get("grid_mapping", "")).split(":")[0].strip(), _group_prefix(array.name)
        if not named or group + named in self.arrays:
            return self.arrays.get(group + named) if named else None
        # xdggs gives the name of the mapping instead of its variable's
        alike = [t for t in self.arrays.values() if t.attrs.get("grid_mapping_name") == named]
        alike = [t for t in alike if _group_prefix(t.name) == group]
        return alike[0] if len(alike) == 1 else None

    def dggs(self, array: ArrayTable) -> Mapping[str, Any]:
        """Return the attribute ``dggs`` of an array, else of the store for its outer arrays: a convention of Zarr for
        discrete global grids.  Empty where it is absent, or for other dims.
        """
        inherited = None if _group_prefix(array.name) else self._store_attrs.get("dggs")
        described = array.attrs.get("dggs", inherited)
        return described if isinstance(described, Mapping) and described.get("spatial_dimension") in array.dims else {}

    def _numbers_of_dggs(self, array: ArrayTable, described: Mapping[str, Any]) -> str:
        """Return the array with the numbers of the cells.  Raises: `GridError` where it is compressed, or absent."""
        name, compression = (
            _group_prefix(array.name) + str(described["coordinate"]),
            described.get("compression", "none"),
        )
        if compression != "none" or name not in self.arrays:
            raise GridError(
                f"the attribute 'dggs' of array {array.name!r} names the coordinate {name!r} with compression "
                f"{compression!r}; the store must have it, with compression 'none': a number for each cell"
            )
        return name

    def mesh_topology(self, array: ArrayTable) -> ArrayTable | None:
        """Return the variable that describes the unstructured mesh of an array by UGRID: the one that its attribute
        names, or else the only one whose faces lie along a dim of the array.
        """
        group, named = _group_prefix(array.name), array.attrs.get("mesh")
        if named is not None:
            return next((t for t in self._meshes if t.name == group + str(named)), None)
        meshes = [t for t in self._meshes if _group_prefix(t.name) == group and _face_dim(t) in array.dims]
        return meshes[0] if len(meshes) == 1 else None

    def mesh_variables(self, array: ArrayTable) -> list[str]:
        """Return the names of the topology, the tables and the places of an array's mesh; of ICON its tables."""
        mesh, group = self.mesh_topology(array), _group_prefix(array.name)
        if mesh is None:
            return [n for n in self.tables_of_cells(array) if set(self.arrays[n].dims) & set(array.dims)]
        words = [str(mesh.attrs.get(key, "")) for key in (*MESH_TABLES, *_MESH_PLACES)]
        return [mesh.name, *(group + w for w in " ".join(words).split() if group + w in self.arrays)]

    def tables_of_cells(self, array: ArrayTable) -> dict[str, int]:
        """Return the tables that number the cells of an array, by UGRID or of ICON, and from where on each counts."""
        mesh, group = self.mesh_topology(array), _group_prefix(array.name)
        words, first = _ICON_TABLES, 1
        if mesh is not None:
            words, first = [str(mesh.attrs.get(key)) for key in ("face_face_connectivity", "edge_face_connectivity")], 0
        tables = {group + w: self.arrays[group + w] for w in words if group + w in self.arrays}
        return {name: int(t.attrs.get("start_index", first)) for name, t in tables.items() if len(t.dims) == 2}

    def roles(self, array: ArrayTable) -> tuple[str, ...]:
        """Return the role of every dim of `array`, or its own name where it lacks one; two dims must not have one role.

        A vertical dim is `level` beside lat and lon (or time), and `z` in a volume.
        """
        named = self._roles(array)
        twice = sorted({role for role in named if named.count(role) > 1})
        if twice:
            dims = [d for d, role in zip(array.dims, named, strict=True) if role == twice[0]]
            raise GridError(
                f"array {array.name!r} has dims {dims} that both look like {twice[0]!r}; say which one is, with "
                f"dims={{{twice[0]!r}: {dims[0]!r}}}, or set the CF attributes standard_name, units or axis"
            )
        return named

    def _roles(self, array: ArrayTable) -> tuple[str, ...]:
        if array.roles:
            return tuple(self.naming.roles.get(d, role) for d, role in zip(array.dims, array.roles, strict=True))
        plane = dict(zip(self.plane(array)[0], ("y", "x"), strict=False)) or self._cells(array)
        choices = [self.naming.roles.get(dim) for dim in array.dims]
        likely = [
            choices[i] or plane.get(dim) or role_of_dim(dim, self.attrs(array, dim)) or dim
            for i, dim in enumerate(array.dims)
        ]
        roles = _without_rivals(likely, choices, array.dims)
        if "time" not in roles:  # an array without another time has the time at which its forecasts began
            roles = ["time" if role == "init" else role for role in roles]
        if CELL_ROLE in roles and any(pair <= set(roles) for pair in ({"lat", "lon"}, {"y", "x"})):
            # beside lat and lon, cells are of something else
            roles[roles.index(CELL_ROLE)] = f"other {array.dims[roles.index(CELL_ROLE)]}"
        globe = bool(plane) or {"lat", "lon"} <= set(roles) or CELL_ROLE in roles
        channels = [dim for dim in array.dims if dim.lower() in _CHANNEL_DIMS and dim in roles]
        if len(channels) == 1 and not {"level", "z"} & set(roles) and (globe or "time" in roles):
            roles[roles.index(channels[0])] = "level"
        volume = {"y", "x"} <= set(roles) and "time" not in roles
        vertical = {"z": "level"} if globe else {"level": "z"} if volume else {}
        return tuple(vertical.get(role, role) for role in roles)

    def plane(self, array: ArrayTable) -> tuple[tuple[str, ...], dict[str, str]]:
        """Return the dims `y, x` of an array on a curvilinear grid, and the arrays of its latitudes and longitudes.

        Nothing for another grid, whose latitudes depend on one dim.
        """
        for (group, dims), angles in self._planes.items():
            if group == _group_prefix(array.name) and set(dims) <= set(array.dims) and "lat" in angles:
                alone = [self.attrs(array, d) for d in dims]
                if not any(_said_role(attrs) in _ANGLES for attrs in alone):
                    return dims, angles if len(angles) == len(_ANGLES) else {}
        return (), {}

    def _cells(self, array: ArrayTable) -> dict[str, str]:
        """Return the one dim along which each place has its own latitude and longitude, is numbered by HEALPix, or is a
        face of a mesh.
        """
        scattered = [dim for dim in array.dims if self.angles(array, dim)]
        if self.dggs(array):
            scattered = [str(self.dggs(array)["spatial_dimension"])]
        mapping, mesh = self.grid_mapping(array), self.mesh_topology(array)
        if not scattered and mesh is not None and array.attrs.get("location", "face") == "face":
            corners = self.arrays.get(_group_prefix(array.name) + str(mesh.attrs.get("face_node_connectivity", "")))
            faces = (_face_dim(mesh),) if "face_dimension" in mesh.attrs else () if corners is None else corners.dims
            scattered = [dim for dim in array.dims if dim in faces]
        if not scattered and mapping is not None and is_healpix(mapping.attrs):
            known = [dim for dim in array.dims if role_of_dim(dim, self.attrs(array, dim)) is not None]
            scattered = [dim for dim in array.dims[-1:] if dim not in known]
        return {scattered[0]: CELL_ROLE} if len(scattered) == 1 else {}


def is_healpix(attrs: Mapping[str, Any]) -> bool:
    """Say whether attributes describe a HEALPix grid: those of CF's grid mapping, or of xdggs' coordinate."""
    return "healpix" in (attrs.get("grid_mapping_name"), attrs.get("grid_name"))


def decoded_coordinate(table: ArrayTable, stored: NDArray[Any], wide: bool = False) -> NDArray[Any]:
    """Decode the stored values of a coordinate, `wide` as float64; missing values become NaN."""
    if str(table.attrs.get("_Unsigned", "")).lower() == "true" and stored.dtype.kind == "i":
        stored = stored.view(stored.dtype.str.replace("i", "u"))
    missing = np.isin(stored, table.masks) if table.masks and stored.dtype.kind in "iuf" else np.zeros(0, bool)
    numbers = stored.astype(np.float64) if wide else stored
    values = numbers if (table.scale, table.offset) == (1.0, 0.0) else numbers * table.scale + table.offset
    return np.where(missing, np.nan, values) if missing.any() else values


def _can_be_role(dim: str, role: str) -> bool:
    """Say whether a variable of another name may define a dim's role: a series of pressures along time does not."""
    named = _ROLE_OF_NAME.get(dim.lower())
    if named is None or named in _TIME_ROLES:
        return named is None or role in _TIME_ROLES
    return role == named or (named in ("z", "y", "x", CELL_ROLE) and role not in _TIME_ROLES)


def _face_dim(mesh: ArrayTable) -> str:
    return str(mesh.attrs.get("face_dimension", ""))


def _group_prefix(name: str) -> str:
    group, slash, _ = name.rpartition("/")
    return group + slash


def _without_rivals(likely: list[str], choices: Sequence[str | None], dims: Sequence[str]) -> list[str]:
    """Give the user's choice its role: a rival is `init` beside `time`, else keeps its own name."""
    taken = {role for role in choices if role}
    kept: list[str] = []
    for role, choice, dim in zip(likely, choices, dims, strict=True):
        rival = choice is None and role in taken
        kept.append(
            role if not rival else "init" if role == "time" else dim if dim not in DIM_ROLES else f"other {dim}"
        )
    return kept


def check_lon_periodic(values: NDArray[Any], dim: str = "lon", rule: str = "periodic") -> None:
    """Check that longitudes to be wrapped go round once, n steps of 360/n degrees; `rule` of `dim` asks for it. A
    region is refused, and a grid that stores both 0 and 360.
    """
    if len(values) < 2 or values.dtype.kind not in "fiu":
        return
    step = abs(float(values[-1]) - float(values[0])) / (len(values) - 1)
    covered = step * len(values)
    if abs(covered - 360.0) > 0.5 * step:
        raise GridError(
            f"boundary={{{dim!r}: {rule!r}}} needs 'lon' to go round once, but its {len(values)} values "
            f"{float(values[0]):g}..{float(values[-1]):g} cover {covered:g} degrees; leave the boundary out"
        )


def rolled_longitudes(values: NDArray[Any], convention: str) -> tuple[int, NDArray[Any]]:
    """Return the number of rows to roll longitudes by so that they rise in a convention, and those longitudes.
    `convention` is ``"0..360"`` or ``"-180..180"``; row i of the result is the stored row i + shift. A region across
    the edge would be torn apart, and is refused.
    """
    if convention == "store":
        return 0, values
    if convention not in ("0..360", "-180..180"):
        raise GridError(f"lon={convention!r} must be 'store', '0..360' or '-180..180'")
    low = 0.0 if convention == "0..360" else -180.0
    inside = (values.astype(np.float64) - low) % 360.0 + low
    shift = int(np.argmin(inside))
    rolled = np.roll(inside, -shift)
    steps = np.diff(rolled)
    if len(steps) and (steps.min() <= 0 or steps.max() > 1.5 * np.median(steps)):
        raise GridError(
            f"lon={convention!r} cannot be had by rolling the {len(values)} stored longitudes "
            f"{float(values[0]):g}..{float(values[-1]):g}; use lon='store'"
        )
    return shift, rolled.astype(values.dtype) if values.dtype.kind == "f" else rolled


def check_coordinate_size(name: str, shape: Sequence[int], size: int) -> None:
    """Refuse an array that claims more bytes than any coordinate has."""
    if size > _LARGEST_COORDINATE:
        raise UnsupportedStoreError(
            f"array {name!r} of shape {tuple(shape)} is too large for a coordinate ({_LARGEST_COORDINATE} bytes)"
        )
