"""The small state of a checkpoint as JSON: what a loader, a schedule or a parameter group says of itself.

JSON and not a pickle, for whoever loads a pickle runs what its writer wrote.  JSON has lists and objects with names
alone; the rest that such states are made of is marked: ``{"$tuple": [0.9, 0.999]}``.
"""

from __future__ import annotations

import os
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

CheckpointPath = str | os.PathLike[str]
_LARGEST_TENSOR = 1 << 20
_PLAIN = (bool, int, float, str, type(None))


class CheckpointError(ValueError):
    """A checkpoint that is not there, not whole, damaged or of another model, or a state that none can hold.

    Raised alike on every rank.
    """


def plain_state(value: Any, name: str) -> Any:
    """`value` in JSON's own types; `name` is what messages call it.

    Raises: `CheckpointError` for what is not plain: it names the place in `value`, the type and the remedy.
    """
    kind: type[Any] = type(value)
    if isinstance(value, np.number | np.bool_):
        value = value.item()
        kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [plain_state(each, f"{name}[{i}]") for i, each in enumerate(value)]
    if kind is tuple:
        return {"$tuple": plain_state(list(value), name)}
    if kind in (dict, OrderedDict) and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: plain_state(each, f"{name}[{key!r}]") for key, each in value.items()}
    if kind in (dict, OrderedDict, Counter):
        pairs = [[plain_state(k, f"a key of {name}"), plain_state(v, f"{name}[{k!r}]")] for k, v in value.items()]
        return {"$Counter" if kind is Counter else "$dict": pairs}
    if kind is bytes:
        return {"$bytes": b64encode(value).decode()}
    if kind is torch.Tensor and value.nbytes <= _LARGEST_TENSOR and value.layout == torch.strided:
        raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return {"$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), b64encode(raw).decode()]}
    raise CheckpointError(
        f"{name} is of type {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot hold; let its "
        "state_dict() return numbers, texts, bytes, None, lists, tuples and dicts of them, and tensors of at most 1 MB "
        "(an array as .tolist()); large tensors belong to the model"
    )


def restored_state(plain: Any) -> Any:
    """What `plain_state` made JSON of.

    Raises: `CheckpointError` for a mark that it does not know.
    """
    if isinstance(plain, list):
        return [restored_state(each) for each in plain]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(plain, Mapping):
        return plain
    mark, values = next(iter(plain.items()), ("", None))  # pyright: ignore[reportUnknownVariableType]
    if not str(mark).startswith("$"):
        return {key: restored_state(each) for key, each in plain.items()}  # pyright: ignore[reportUnknownVariableType]
    try:
        return _MARKS[mark](values)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as e:
        raise CheckpointError(f"the state of a checkpoint has {mark!r}, which no save of ours writes so: {e}") from e


def _restored_tensor(parts: Any) -> torch.Tensor:
    name, shape, text = parts
    dtype, raw = getattr(torch, name), bytearray(b64decode(text))
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name!r} is no dtype")
    values = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return values.view(dtype).reshape(shape)


def _restored_pairs(values: Any) -> dict[Any, Any]:
    return {restored_state(key): restored_state(value) for key, value in values}


def _restored_tuple(values: Any) -> tuple[Any, ...]:
    return tuple(restored_state(values))


def _restored_counter(values: Any) -> Counter[Any]:
    return Counter(_restored_pairs(values))


_MARKS: dict[Any, Any] = {
    "$tuple": _restored_tuple,
    "$dict": _restored_pairs,
    "$Counter": _restored_counter,
    "$bytes": b64decode,
    "$tensor": _restored_tensor,
}
