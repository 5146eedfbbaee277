"""Arguments of a writer: checked where it is made, and in a form in which ranks compare them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from typing import Any, cast

import numpy as np

from jigsaw.errors import GridError, WriteError
from jigsaw.io.arguments import checked_mapping, checked_names
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.writing.outline import ArrayDims, WriteOptions, parse_written_field

_SIZES_EXAMPLE = "{'time': 1, 'lat': 90}"


def checked_write_options(
    suffix: str,
    dims: Any,
    fields: Any,
    coords: Any,
    attrs: Any,
    field_attrs: Any,
    chunks: Any,
    shards: Any,
    append_dim: str | None,
    encoding: Any,
) -> WriteOptions:
    """Return the arguments of a `Writer` as options.

    Raises: `FieldError` for dims and fields that are not names; `GridError` for coordinates that are not by name;
    `WriteError` for anything else that is not what the argument takes.
    """
    by_array = checked_mapping("field_attrs", field_attrs, "{'t2m': {'units': 'K'}}", WriteError)
    own_attrs = {
        name: dict(checked_mapping(f"field_attrs[{name!r}]", each, "{'units': 'K'}", WriteError))
        for name, each in by_array.items()
    }
    encoding = checked_mapping("encoding", encoding, "{'dtype': 'float32'}", WriteError)
    if "dtype" in encoding and encoding["dtype"] is None:
        raise WriteError("encoding={'dtype': None} must name a dtype, like 'float32'; leave it out to keep the tiles'")
    return WriteOptions(
        suffix,
        _checked_array_dims(dims),
        None if fields is None else [parse_written_field(f) for f in checked_names("fields", fields)],
        checked_coordinates(coords),
        dict(checked_mapping("attrs", attrs, "{'title': 'run 1'}", WriteError)),
        own_attrs,
        _checked_sizes("chunks", chunks),
        _checked_sizes("shards", shards),
        append_dim,
        encoding,
        own_attrs=frozenset(own_attrs),
    )


def checked_coordinates(coords: Any) -> dict[str, Any]:
    """Return coordinates by name.  Raises: `GridError` for anything else."""
    by_name = checked_mapping("coords", coords, "{'lat': latitudes}", GridError)
    if wrong := [name for name in by_name if not isinstance(name, str)]:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise GridError(f"coords name {wrong[0]!r}, which is not a string; give names, like 'lat'")
    return dict(by_name)


def checked_budget(budget: Any) -> int:
    """Return a number of bytes.  Raises: `WriteError` for anything else."""
    is_number = isinstance(budget, int | float | np.number) and not isinstance(budget, bool)
    if not is_number or not isfinite(budget) or budget < 1:
        raise WriteError(f"budget={budget!r} must be a number of bytes >= 1, like budget=256 << 20")
    return int(budget)


def checked_lender(like: Any) -> Dataset | None:
    """Return the dataset of `like`.  Raises: `WriteError` for anything else."""
    if like is None or isinstance(like, Dataset):
        return like
    raise WriteError(f"like={like!r} must be a jigsaw.io.Dataset; open one: jigsaw.io.open(place, mesh=mesh)")


def _checked_array_dims(dims: Any) -> ArrayDims:
    if isinstance(dims, Mapping):
        by_array = cast(Mapping[str, Any], dims)
        return {name: checked_names(f"dims[{name!r}]", own, "lat") for name, own in by_array.items()}
    return checked_names("dims", dims, "lat")


def _checked_sizes(argument: str, sizes: Any) -> dict[str, int]:
    by_dim = checked_mapping(argument, sizes, _SIZES_EXAMPLE, WriteError)
    for dim, rows in by_dim.items():
        if not isinstance(rows, int | np.integer) or isinstance(rows, bool) or rows < 1:
            raise WriteError(
                f"{argument}={dict(by_dim)} must be sizes >= 1 by dim, and {rows!r} of {dim!r} is not a whole number "
                f">= 1; give {argument}={_SIZES_EXAMPLE}"
            )
    return {dim: int(rows) for dim, rows in by_dim.items()}


def facts_of_options(options: WriteOptions) -> dict[str, Any]:
    """Return by name what every rank must give alike, apart from what stands in an outline of the arrays."""
    restores = None if options.restores is None else (options.restores[0], options.restores[1].targets)
    facts = {
        "format": options.suffix,
        "dims": options.dims,
        "append_dim": options.append_dim,
        "encoding": options.encoding,
        "like": restores,
    }
    return {name: _comparable_value(value) for name, value in facts.items()}


def _comparable_value(value: Any) -> Any:
    """Return a value whose `repr` is the same on ranks that were given the same."""
    if isinstance(value, Mapping):
        items = sorted((str(k), _comparable_value(v)) for k, v in cast(Mapping[Any, Any], value).items())
        return dict(items)
    if isinstance(value, np.ndarray | np.generic):
        return str(value.dtype), value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_comparable_value(v) for v in cast(Sequence[Any], value)]
    as_mapping: Any = getattr(value, "to_dict", None)  # of a codec of zarr
    if callable(as_mapping):
        return type(value).__name__, _comparable_value(as_mapping())
    # the default `repr` has an address in memory
    return type(value).__qualname__ if type(value).__repr__ is object.__repr__ else value
