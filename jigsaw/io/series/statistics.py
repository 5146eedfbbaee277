"""`Statistics`: mean, std and range of each channel, from jigsaw's own files, makani's and GraphCast's.

`Statistics.read` reads

- jigsaw's own: ``stats.nc`` (a variable for each statistic along a dim ``channel``), ``.npz`` (the same arrays) or
  ``.json`` (an object for each channel);
- makani: a folder with ``global_means.npy``, ``global_stds.npy`` and optionally ``time_diff_means.npy``,
  ``time_diff_stds.npy``, ``mins.npy``, ``maxs.npy``, each [1, C, 1, 1]. They lack names: the channels are taken in
  order, or named by `fields`;
- GraphCast: a folder (or any one of the files) with ``mean_by_level.nc``, ``stddev_by_level.nc`` and optionally
  ``diffs_stddev_by_level.nc``, ``min_by_level.nc``, all with the same prefix or none. A scalar variable is a surface
  field, one along ``level`` a channel for each level.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Literal, NoReturn, TypeVar
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from jigsaw.drafts import draft_of
from jigsaw.errors import FieldError, ReadError, imports_needed, writing_to
from jigsaw.io.chunks.array_table import ArrayStore
from jigsaw.io.series.fields import FieldChannel, quantity_and_level

ChannelValues = NDArray[np.float64]
StatisticsPath = str | os.PathLike[str]

VALUE_STATISTICS = ("count", "missing", "mean", "std", "min", "max")
ALL_STATISTICS = (*VALUE_STATISTICS, *(f"diff_{name}" for name in VALUE_STATISTICS))
PERCENTILE_PREFIX = "percentile_"


def is_statistic(name: str) -> bool:
    """Say whether a column of this name is a statistic."""
    return name in ALL_STATISTICS or name.startswith(PERCENTILE_PREFIX)


@dataclass(frozen=True, eq=False)
class Statistics(Mapping[str, dict[str, float]]):
    """Statistics of channels: ``stats["t2m"]["mean"]``, or ``stats.columns["mean"]`` for all of them, [C] float64.

    The statistics are ``count, missing, mean, std, min, max`` of the values; ``diff_count`` … ``diff_max`` are those of
    the differences between consecutive steps, in the units of the fields. A file of another origin has some of them,
    and those of volumes have ``percentile_0.5`` … instead of differences. `fields` is empty where the file lacks names.
    `attrs` describe the data that they were taken of.

    >>> data = jigsaw.io.open("globe.zarr", mesh=jigsaw.init_mesh(lat=1), fields=["t2m"])
    >>> jigsaw.io.statistics(data).write("stats.json")
    >>> stats = jigsaw.io.Statistics.read("stats.json")
    >>> stats["t2m"]["mean"], stats["t2m"]["diff_mean"]
    (283.5, 1.0)
    """

    fields: tuple[str, ...]
    columns: Mapping[str, ChannelValues]
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    source: str = "statistics"

    def __post_init__(self) -> None:
        if not self.columns:
            raise FieldError(f"{self.source} has no statistics; it needs some of {list(ALL_STATISTICS)}")
        lengths = {name: len(v) for name, v in self.columns.items()}
        if len(set(lengths.values())) > 1 or (self.fields and set(lengths.values()) != {len(self.fields)}):
            named = f" for the {len(self.fields)} fields {_fields_text(self.fields)}" if self.fields else ""
            raise FieldError(f"{self.source} has {lengths} channels{named}; every statistic needs a number a channel")

    @property
    def channels(self) -> int:
        """The number of channels, named or not."""
        return len(next(iter(self.columns.values())))

    def __len__(self) -> int:
        return len(self.fields)

    def __iter__(self) -> Iterator[str]:
        return iter(self.fields)

    def __getitem__(self, field: str) -> dict[str, float]:
        if field not in self.fields:
            raise KeyError(f"{field!r} is none of the channels {_fields_text(self.fields)}")
        at = self.fields.index(field)
        return {name: float(v[at]) for name, v in self.columns.items()}

    @classmethod
    def read(
        cls, path: StatisticsPath | Mapping[str, StatisticsPath], fields: Sequence[str] | None = None
    ) -> Statistics:
        """Read a file or folder, or one file for each statistic: ``{"mean": "m.npy", "std": "s.npy"}`` (`.npy` or
        NetCDF).

        `fields` names the channels of files that lack names, in their order.

        Raises: `FieldError` for a path that does not exist or does not hold statistics, and for another number of names
        than channels.
        """
        named = None if fields is None else tuple(fields)
        if isinstance(path, Mapping):
            return _read_each({name: Path(file) for name, file in path.items()}, named, f"statistics of {dict(path)}")
        at = Path(path)
        if at.is_dir():
            return _read_each(_files_in_folder(at), named, f"statistics {at}")
        if not at.is_file():
            raise FieldError(f"there is no file or folder of statistics {str(at)!r}")
        files = _files_of_set(at.parent, at.name, _GRAPHCAST_FILES) or _files_of_set(at.parent, at.name, _MAKANI_FILES)
        if files:
            return _read_each(files, named, f"statistics {at.parent}")
        return _with_field_names(_read_own(at), named)

    def write(self, path: StatisticsPath) -> None:
        """Write ``.nc``, ``.npz`` or ``.json``; the file appears when it is complete.

        Raises: `FieldError` for another ending, and where a file stands that does not hold statistics.
        """
        at = check_statistics_path(path)
        if not self.fields:
            raise FieldError(f"{self.source} have no names; read them with fields=[…] before they are written")
        content = {".nc": _as_nc, ".npz": _as_npz, ".json": _as_json}[at.suffix](self)
        replace_file(at, content, "write again: what was there is there still")

    def mean_std(self, channels: Sequence[FieldChannel]) -> dict[str, tuple[float, float]]:
        """Return the mean and std of every channel by its name: what `normalize=` takes.

        A channel is found by its own name, else by its quantity and level under any name of `jigsaw.io.series.fields`:
        ``z500`` is ``geopotential@500``.  Levels are compared as numbers, so their units must be the same.

        Raises: `FieldError` for a missing channel, or when nothing has names and the numbers differ.
        """
        lacking = [name for name in ("mean", "std") if name not in self.columns]
        if lacking:
            raise FieldError(f"{self.source} has no {lacking[0]!r}; it has {sorted(self.columns)}")
        places = [self._place(i, c, len(channels)) for i, c in enumerate(channels)]
        mean, std = self.columns["mean"], self.columns["std"]
        return {c.name: (float(mean[i]), float(std[i])) for c, i in zip(channels, places, strict=True)}

    def _place(self, position: int, channel: FieldChannel, channels: int) -> int:
        if not self.fields:
            if self.channels != channels:
                raise FieldError(
                    f"{self.source} has {self.channels} channels without names and the dataset has {channels}; "
                    "name them: Statistics.read(path, fields=[…])"
                )
            return position
        if channel.name in self.fields:
            return self.fields.index(channel.name)
        quantity = quantity_and_level(channel.name)
        places = [i for i, name in enumerate(self.fields) if quantity_and_level(name) == quantity]
        if not places:
            raise FieldError(f"{self.source} has no channel {channel.name!r}; it has {_fields_text(self.fields)}")
        if len(places) > 1:
            names = [self.fields[i] for i in places]
            raise FieldError(
                f"{self.source} has {names[0]!r} and {names[1]!r}, two names of channel {channel.name!r}; give its "
                f"mean and std by one name: normalize={{{channel.name!r}: (mean, std), …}}"
            )
        return places[0]


def _fields_text(fields: Sequence[str], most: int = 40) -> str:
    more = f" and {len(fields) - most} more" if len(fields) > most else ""
    return ", ".join(fields[:most]) + more


FieldNames = tuple[str, ...]
T = TypeVar("T")

STATISTICS_FORMAT = "jigsaw statistics 1"
STATISTICS_SUFFIXES = (".nc", ".npz", ".json")
_MAKANI_FILES = {
    "mean": "global_means.npy",
    "std": "global_stds.npy",
    "diff_mean": "time_diff_means.npy",
    "diff_std": "time_diff_stds.npy",
    "min": "mins.npy",
    "max": "maxs.npy",
}
# the longer name first: "diffs_stddev_by_level.nc" also ends like "stddev_by_level.nc"
_GRAPHCAST_FILES = {
    "diff_std": "diffs_stddev_by_level.nc",
    "std": "stddev_by_level.nc",
    "mean": "mean_by_level.nc",
    "min": "min_by_level.nc",
}


# -- reading -----------------------------------------------------------------------------------------------------------


def _files_in_folder(folder: Path) -> dict[str, Path]:
    files = sorted(p.name for p in folder.iterdir())
    sets = [_files_of_set(folder, name, names) for name in files for names in (_MAKANI_FILES, _GRAPHCAST_FILES)]
    groups = [files_of_set for files_of_set in sets if files_of_set]
    if not groups:
        raise FieldError(
            f"folder {str(folder)!r} has neither {_MAKANI_FILES['mean']} and {_MAKANI_FILES['std']} (makani) nor "
            f"mean_by_level.nc and stddev_by_level.nc (GraphCast); name the file of the statistics"
        )
    other = next((files_of_set for files_of_set in groups if files_of_set != groups[0]), None)
    if other is not None:
        one, two = (next(iter(files_of_set.values())).name for files_of_set in (groups[0], other))
        raise FieldError(
            f"folder {str(folder)!r} has several sets of statistics, such as {one} and {two}; name one of the files"
        )
    return groups[0]


def _files_of_set(folder: Path, name: str, names: Mapping[str, str]) -> dict[str, Path]:
    """Return the files of the set that `name` belongs to: those with the same prefix; empty when it belongs to none."""
    ending = next((n for n in names.values() if name.endswith(n)), None)
    if ending is None or (names is _MAKANI_FILES and ending != name):
        return {}
    prefix = name.removesuffix(ending)
    return {stat: folder / (prefix + n) for stat, n in names.items() if (folder / (prefix + n)).is_file()}


def _read_each(files: Mapping[str, Path], fields: FieldNames | None, source: str) -> Statistics:
    unknown = sorted(set(files) - set(ALL_STATISTICS))
    if unknown or not files:
        raise FieldError(f"{source}: {unknown[:1] or 'nothing'} is not a statistic; they are {list(ALL_STATISTICS)}")
    missing = [str(p) for p in files.values() if not p.is_file()]
    if missing:
        raise FieldError(f"{source}: there is no file {missing[0]!r}")
    columns = {stat: _read_column(p) for stat, p in files.items()}
    unnamed = {stat: v for stat, (names, v) in columns.items() if not names}
    if len(unnamed) == len(columns):
        return _with_field_names(Statistics((), unnamed, source=source), fields)
    if unnamed:
        raise FieldError(f"{source}: {files[next(iter(unnamed))].name} has no names and the other files have; mix none")
    order = tuple(dict.fromkeys(name for names, _ in columns.values() for name in names))
    named = {stat: dict(zip(names, v.tolist(), strict=True)) for stat, (names, v) in columns.items()}
    # NaN where a file lacks such a channel: GraphCast's forcings do not have diffs
    values = {stat: np.array([at.get(name, math.nan) for name in order]) for stat, at in named.items()}
    return _with_field_names(Statistics(order, values, source=source), fields)


def _read_column(path: Path) -> tuple[FieldNames, ChannelValues]:
    """Read one statistic: the channels' names, empty for a `.npy`, and a number for each."""
    if path.suffix == ".npy":
        numbers = _read_or_refuse(path, lambda: np.load(path, allow_pickle=False))
        if numbers.dtype.kind not in "fiu" or numbers.size != max(numbers.shape, default=0):
            raise FieldError(
                f"{path} is {numbers.dtype}{list(numbers.shape)}; a statistic is [1, C, 1, 1] or [C] numbers"
            )
        return (), numbers.reshape(-1).astype(np.float64)
    return _read_or_refuse(path, lambda: _read_by_level(path))


def _read_by_level(path: Path) -> tuple[FieldNames, ChannelValues]:
    """Read scalars and variables along one dim of a NetCDF file; others are not statistics of a channel."""
    with _open_statistics_nc(path) as file:
        names: list[str] = []
        values: list[float] = []
        for name, variable in file.variables.items():
            numbers = np.ma.filled(np.ma.asarray(variable[...], dtype=np.float64), np.nan)
            if not variable.dimensions:
                names.append(name)
                values.append(float(numbers))
            elif len(variable.dimensions) == 1 and name != variable.dimensions[0]:
                levels = file.variables.get(variable.dimensions[0])
                marks = range(len(numbers)) if levels is None else np.asarray(levels[...], dtype=np.float64)
                names += [f"{name}@{level:g}" for level in marks]
                values += numbers.tolist()
        return tuple(names), np.array(values)


def _read_own(path: Path) -> Statistics:
    readers = {".nc": _read_nc, ".npz": _read_npz, ".json": _read_json}
    if path.suffix not in readers:
        raise FieldError(
            f"statistics {str(path)!r} end in {path.suffix!r}; known are {', '.join(STATISTICS_SUFFIXES)}, makani's "
            '.npy or GraphCast\'s *_by_level.nc, and {"mean": file, "std": file}'
        )
    return _read_or_refuse(path, lambda: readers[path.suffix](path))


def _read_or_refuse(path: Path, reader: Callable[[], T]) -> T:
    try:
        return reader()
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as broken:
        if isinstance(broken, FieldError):
            raise
        raise FieldError(f"{path} cannot be read as statistics ({type(broken).__name__}: {broken})") from broken


def _check_format(path: Path, mark: Any) -> None:
    if mark != STATISTICS_FORMAT:
        raise FieldError(
            f"{path} has no format {STATISTICS_FORMAT!r} and is not named like GraphCast's (…mean_by_level.nc); for a "
            'file that holds one statistic use Statistics.read({"mean": file, "std": file})'
        )


def _read_nc(path: Path) -> Statistics:
    with _open_statistics_nc(path) as file:
        attrs = {name: file.getncattr(name) for name in file.ncattrs()}
        _check_format(path, attrs.pop("format", None))
        fields = tuple(str(name) for name in file.variables["channel"][...])
        columns = {n: file.variables[n][...] for n in file.variables if is_statistic(n)}
        values = {n: np.ma.getdata(column).astype(np.float64) for n, column in columns.items()}
    return Statistics(fields, values, attrs, f"statistics {path}")


def _read_npz(path: Path) -> Statistics:
    with np.load(path, allow_pickle=False) as file:
        attrs = json.loads(str(file["attrs"])) if "attrs" in file else {}
        _check_format(path, attrs.pop("format", None))
        values = {n: file[n] for n in file if is_statistic(n)}
        return Statistics(tuple(map(str, file["channel"])), values, attrs, f"statistics {path}")


def _read_json(path: Path) -> Statistics:
    document = json.loads(path.read_text())
    _check_format(path, document.get("format") if isinstance(document, dict) else None)
    channels: list[dict[str, Any]] = document["channels"]
    names = [n for n in dict.fromkeys(n for c in channels for n in c) if is_statistic(n)]
    values = {n: np.array([math.nan if c[n] is None else c[n] for c in channels], dtype=np.float64) for n in names}
    return Statistics(tuple(str(c["name"]) for c in channels), values, document["attrs"], f"statistics {path}")


def _with_field_names(stats: Statistics, fields: FieldNames | None) -> Statistics:
    if fields is None:
        return stats
    if stats.fields:
        raise FieldError(f"fields={list(fields)} names channels, but {stats.source} has names of its own; leave it out")
    if len(fields) != stats.channels:
        raise FieldError(
            f"fields={list(fields)} are {len(fields)} names and {stats.source} has {stats.channels} channels"
        )
    return Statistics(fields, stats.columns, stats.attrs, stats.source)


def _open_statistics_nc(path: Path, mode: Literal["r", "w"] = "r", **options: Any) -> Any:
    with imports_needed(FieldError, f"{path} needs netCDF4: pip install 'jigsaw-torch[netcdf]', or use .npz or .json"):
        import netCDF4
    return netCDF4.Dataset(str(path), mode, **options)


# -- writing -----------------------------------------------------------------------------------------------------------


def check_statistics_path(path: str | os.PathLike[str]) -> Path:
    """Return the path, when its ending can be written, its folder exists, and what it would replace are statistics."""
    if Path(path).suffix not in STATISTICS_SUFFIXES:
        raise FieldError(
            f"statistics are written as {', '.join(STATISTICS_SUFFIXES)}, not {str(path)!r}; choose one of the endings"
        )
    if not Path(path).parent.is_dir():
        raise FieldError(f"statistics are to be written to {str(path)!r}, whose folder is not there; make it first")
    if os.path.lexists(path):
        try:
            Statistics.read(path)
        except (FieldError, ReadError, OSError) as error:
            raise FieldError(
                f"{str(path)!r} is there and does not hold statistics, so they do not replace it; remove it yourself, "
                "or choose another name"
            ) from error
    return Path(path)


def replace_file(path: Path, content: bytes, remedy: str) -> None:
    """Put a file in its place once it is on the disk: a reader sees the old or the new; errors name the `remedy`."""
    with writing_to(path, remedy), draft_of(path) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _attrs_with_format(stats: Statistics) -> dict[str, Any]:
    return {**stats.attrs, "format": STATISTICS_FORMAT}


def _as_nc(stats: Statistics) -> bytes:
    """Return the file's bytes, made in memory, because libhdf5 may end the process when it meets a full disk."""
    file = _open_statistics_nc(Path("statistics.nc"), "w", memory=1 << 16)
    file.setncatts(_attrs_with_format(stats))
    file.createDimension("channel", len(stats))
    file.createVariable("channel", str, ("channel",))[:] = np.array(stats.fields, dtype=object)
    for name, values in stats.columns.items():
        file.createVariable(name, "f8", ("channel",), fill_value=False)[:] = values
    return bytes(file.close())


def _as_npz(stats: Statistics) -> bytes:
    attrs = np.array(json.dumps(_attrs_with_format(stats)))
    return npz_bytes({"channel": np.array(stats.fields), "attrs": attrs, **stats.columns})


def npz_bytes(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    """Return the bytes that `numpy.savez` makes of arrays by name."""
    content = BytesIO()
    np.savez(content, **arrays)  # pyright: ignore[reportArgumentType]
    return content.getvalue()


def _as_json(stats: Statistics) -> bytes:
    numbers = {name: {n: None if math.isnan(v) else v for n, v in stats[name].items()} for name in stats.fields}
    channels = [{"name": name, **values} for name, values in numbers.items()]  # None is NaN, which JSON has not
    whole = {"format": STATISTICS_FORMAT, "attrs": dict(stats.attrs), "channels": channels}
    return (json.dumps(whole, indent=1) + "\n").encode()


# -- normalization as one multiply-add for each channel: (x - mean) / std = x * scale + offset ------------------------

_STORED_STATISTICS = {"mean": "mean", "std": "stdev", "min": "minimum", "max": "maximum"}
NormalizeArgument = Mapping[str, Any] | Statistics | str | os.PathLike[str] | None


def with_stored_statistics(normalize: NormalizeArgument, store: ArrayStore) -> NormalizeArgument:
    """Return the argument as given; for ``"store"``, the store's own statistics, as anemoi-datasets writes them.

    Raises: `FieldError` where the store has none.
    """
    if not (isinstance(normalize, str) and normalize == "store"):
        return normalize
    names = store.attrs.get("variables")
    stored = {name: theirs for name, theirs in _STORED_STATISTICS.items() if theirs in store.arrays}
    if not isinstance(names, list) or not {"mean", "std"} <= set(stored):
        raise FieldError(
            f"normalize='store' needs statistics in the store {store.url}: an attribute 'variables' and the arrays "
            f"{list(_STORED_STATISTICS.values())}; compute some with jigsaw.io.statistics"
        )
    columns = {name: store.read_small(theirs).astype(np.float64) for name, theirs in stored.items()}
    return Statistics(tuple(map(str, names)), columns, source=f"statistics of {store.url}")


def channel_scales(
    channels: Sequence[FieldChannel], normalize: NormalizeArgument
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return scale and offset of every channel, from ``{"t2m": (mean, std)}`` or ``{"t2m": {"mean": …, "std": …}}``.

    A key is a channel (``geopotential@500``) under any name of `jigsaw.io.series.fields`, a field as it was asked for,
    or an array of the store. For a field of several levels mean and std may be sequences, one value for each level. A
    file of statistics, or `Statistics`, may have more channels than are read.
    """
    if normalize is None:
        return (1.0,) * len(channels), (0.0,) * len(channels)
    if isinstance(normalize, str | os.PathLike):
        normalize = Statistics.read(normalize)
    if isinstance(normalize, Statistics):
        normalize = normalize.mean_std(channels)
    if not isinstance(normalize, Mapping):
        raise FieldError(
            f"normalize={normalize!r} must be (mean, std) by field, Statistics, or the path of a file of statistics"
        )
    by_name = _by_own_names(normalize, channels)
    pairs = [_mean_and_std(c, channels, by_name) for c in channels]
    return tuple(1.0 / std for _, std in pairs), tuple(-mean / std for mean, std in pairs)


def _by_own_names(normalize: Mapping[str, Any], channels: Sequence[FieldChannel]) -> dict[str, Any]:
    """Return `normalize` with the names that the channels have in this dataset."""
    strange = [key for key in normalize if not isinstance(key, str)]
    if strange:
        raise FieldError(f"normalize names {strange[0]!r}, which is not a string; its keys are names of fields")
    own = {name for c in channels for name in (c.name, c.field, c.array)}
    names = {quantity_and_level(c.name): c.name for c in channels}
    other = {key: names.get(quantity_and_level(key)) for key in normalize if key not in own}
    unknown = sorted(key for key, name in other.items() if name is None)
    if unknown:
        raise FieldError(
            f"normalize has {unknown[0]!r}, which is not a field; the channels are {[c.name for c in channels]}"
        )
    key_of = {key: key for key in normalize if key in own}
    for key, name in other.items():
        first = key_of.setdefault(str(name), key)
        if first != key:
            _refuse_two_names(first, key, str(name))
    return {name: normalize[key] for name, key in key_of.items()}


def _refuse_two_names(first: str, second: str, channel: str) -> NoReturn:
    raise FieldError(
        f"normalize has {first!r} and {second!r}, two names of channel {channel!r}; keep the one whose numbers you want"
    )


def _mean_and_std(
    channel: FieldChannel, channels: Sequence[FieldChannel], normalize: Mapping[str, Any]
) -> tuple[float, float]:
    keys = [k for k in (channel.name, channel.field, channel.array) if k in normalize]
    if not keys:
        raise FieldError(f"normalize has no mean and std for channel {channel.name!r}; it has {sorted(normalize)}")
    key = keys[0]
    # the name of one level goes before that of its field, which is for the others
    if key == channel.field and keys[-1] != key:
        _refuse_two_names(key, keys[-1], channel.name)
    pair = normalize[key]
    try:
        mean, std = (pair["mean"], pair["std"]) if isinstance(pair, Mapping) else pair
        mean, std = _pick_level(mean, channel, channels), _pick_level(std, channel, channels)
    except (KeyError, TypeError, ValueError, IndexError):
        raise FieldError(
            f"normalize[{key!r}]={pair!r} must be (mean, std) or {{'mean': …, 'std': …}}, numbers or one a level"
        ) from None
    if not (math.isfinite(mean) and math.isfinite(std) and std > 0):
        raise FieldError(
            f"normalize[{key!r}] gives channel {channel.name!r} mean {mean:g} and std {std:g}; "
            "need finite numbers and std > 0; leave out a field that is constant, or give it (mean, 1.0)"
        )
    return mean, std


def _pick_level(value: Any, channel: FieldChannel, channels: Sequence[FieldChannel]) -> float:
    """Return a number, or this channel's entry in a list with one for each level of its field."""
    values = np.asarray(value, dtype=np.float64)
    if values.ndim == 0:
        return float(values)
    siblings = [c for c in channels if c.field == channel.field]
    if values.shape != (len(siblings),):
        raise ValueError(values.shape)
    return float(values[siblings.index(channel)])
