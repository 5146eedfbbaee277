"""Arguments of a writer, in a form in which ranks compare them before anything is changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from jigsaw.io.writing.outline import WriteOptions


def facts_of_options(options: WriteOptions) -> dict[str, Any]:
    """Return by name what every rank must give alike, apart from what stands in an outline of the arrays."""
    restores = None if options.restores is None else (options.restores[0], options.restores[1].targets)
    facts = {
        "format": options.suffix,
        "dims": options.dims,
        "append_dim": options.append_dim,
        "encoding": options.encoding,
        "attrs": options.attrs,
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
