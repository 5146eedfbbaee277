"""Dtypes of tiles, and those that they are read as."""

from __future__ import annotations

from collections.abc import Collection

import torch

from jigsaw.errors import FieldError

# numpy reads into these; bfloat16 is rounded from float32 once it is a torch tensor
FLOAT_DTYPES = {"float16": "float16", "bfloat16": "float32", "float32": "float32", "float64": "float64"}


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype: ``float32`` for `torch.float32`."""
    return str(dtype).removeprefix("torch.")


def numpy_dtype_name(dtype: torch.dtype) -> str:
    """Return the numpy dtype that values of a tile of floats are read as."""
    return FLOAT_DTYPES[dtype_name(dtype)]


def checked_dtype(argument: str, given: str | torch.dtype, known: Collection[str] = FLOAT_DTYPES) -> torch.dtype:
    """Return the torch dtype of an argument. Raises: `FieldError` for a dtype that is not `known`."""
    name = dtype_name(given) if isinstance(given, torch.dtype) else given
    if not isinstance(name, str) or name not in known:
        raise FieldError(f"{argument}={given!r} must be one of {sorted(known)}")
    return getattr(torch, name)
