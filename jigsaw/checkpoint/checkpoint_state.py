"""Small state of a checkpoint as JSON: that of a loader, a schedule, a parameter group or random generators.

It is JSON and not a pickle, because loading a pickle runs what its writer wrote.  JSON has only lists and objects with
names; other types are marked: ``{"$tuple": [0.9, 0.999]}``.
"""

from __future__ import annotations

import json
import os
import random
from base64 import b64decode, b64encode
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from jigsaw.errors import CheckpointError

CheckpointPath = str | os.PathLike[str]


def checked_path(path: Any) -> Path:
    """Return a path. Raises: `CheckpointError` for anything else than a text or a path of one."""
    if not isinstance(path, str | os.PathLike) or not isinstance(os.fspath(cast("Any", path)), str):
        raise CheckpointError(f"path={path!r} is a {type(path).__name__}; give a text or a pathlib.Path")
    return Path(cast("CheckpointPath", path))


_LARGEST_TENSOR = 1 << 20
_DEEPEST = 100
_PLAIN = (bool, int, float, str, type(None))


def parse_strict_json(raw: bytes) -> Any:
    """Read JSON in UTF-8 that has each key once.

    Raises: `ValueError` for anything else.
    """
    try:
        return json.loads(raw.decode(), object_pairs_hook=_distinct_keys)
    except RecursionError as e:
        raise ValueError("it has lists or objects nested too deeply") from e


def _distinct_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(entries := dict(pairs)) < len(pairs):
        twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
        raise ValueError(f"it has the key {twice[0]!r} twice")
    return entries


def dtype_by_name(name: str) -> torch.dtype:
    """Return the type of torch with this name.

    Raises: `TypeError` where torch has none.
    """
    if not isinstance(dtype := getattr(torch, name, None), torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return dtype


def is_converted_weight(stored: torch.dtype, current: torch.dtype) -> bool:
    """Say whether stored weights are read as another type: any float type as another, integers only as wider ones."""
    if stored == current or (stored.is_floating_point and current.is_floating_point):
        return True
    alike = (stored == torch.bool) == (current == torch.bool) and stored.is_complex == current.is_complex
    return alike and not current.is_floating_point and torch.promote_types(stored, current) == current


def plain_state(value: Any, name: str, depth: int = 0) -> Any:
    """Return `value` in JSON's own types; messages call it `name`.

    Raises: `CheckpointError` for a value that is not plain; it names the place in `value`, the type and the remedy.
    """
    _check_depth(depth, name)
    depth += 1
    kind: type[Any] = type(value)
    if isinstance(value, np.number | np.bool_):
        value = value.item()
        kind = type(value)
    if kind in _PLAIN:
        return value
    if kind is list:
        return [plain_state(each, f"{name}[{i}]", depth) for i, each in enumerate(value)]
    if kind is tuple:
        return {"$tuple": plain_state(list(value), name, depth)}
    if kind in (dict, OrderedDict) and all(type(key) is str and not key.startswith("$") for key in value):
        return {key: plain_state(each, f"{name}[{key!r}]", depth) for key, each in value.items()}
    if kind in (dict, OrderedDict, Counter):
        key = f"a key of {name}"
        pairs = [[plain_state(k, key, depth), plain_state(v, f"{name}[{k!r}]", depth)] for k, v in value.items()]
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


def restored_state(plain: Any, depth: int = 0) -> Any:
    """Return the value that `plain_state` turned into JSON.

    Raises: `CheckpointError` for a mark that it does not know.
    """
    _check_depth(depth, "the state of a checkpoint")
    if isinstance(plain, list):
        return [restored_state(each, depth + 1) for each in plain]  # pyright: ignore[reportUnknownVariableType]
    if not isinstance(plain, Mapping):
        return plain
    mark, values = next(iter(plain.items()), ("", None))  # pyright: ignore[reportUnknownVariableType]
    if not str(mark).startswith("$"):
        return {key: restored_state(each, depth + 1) for key, each in plain.items()}  # pyright: ignore[reportUnknownVariableType]
    try:
        return _MARKS[mark](values, depth + 1)
    except CheckpointError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as e:
        raise CheckpointError(
            f"the state of a checkpoint has {mark!r} in a form that jigsaw.save never writes: {e}"
        ) from e


def _check_depth(depth: int, name: str) -> None:
    if depth > _DEEPEST:
        raise CheckpointError(f"{name} is nested more than {_DEEPEST} deep, which a checkpoint cannot hold; flatten it")


def _restored_tensor(parts: Any, _: int) -> torch.Tensor:
    name, shape, text = parts
    dtype, raw = dtype_by_name(name), bytearray(b64decode(text))
    values = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return values.view(dtype).reshape(shape)


def _restored_pairs(values: Any, depth: int) -> dict[Any, Any]:
    return {restored_state(key, depth): restored_state(value, depth) for key, value in values}


_MARKS: dict[Any, Callable[[Any, int], Any]] = {
    "$tuple": lambda values, depth: tuple(restored_state(values, depth)),
    "$dict": _restored_pairs,
    "$Counter": lambda values, depth: Counter(_restored_pairs(values, depth)),
    "$bytes": lambda text, _: b64decode(text),
    "$tensor": _restored_tensor,
}


# -- random generators ------------------------------------------------------------------------------------------------


class RandomState:
    """State of torch's (of the CPU and the current GPU), numpy's and Python's generators, for ``jigsaw.save(path,
    random=RandomState(), ...)``.

    A checkpoint has those of the first rank, and loading sets every rank's to them, on any mesh.  Dropout and other
    random functions on tiles then continue as they would have. Their numbers come from the first rank's generator and
    the place in the whole tensor.  Separate generators that each rank seeds itself are not kept.

    >>> state = jigsaw.RandomState()
    >>> jigsaw.save("seeded", random=state)
    >>> drawn = torch.rand(2)
    >>> jigsaw.load("seeded", random=state)
    >>> torch.equal(torch.rand(2), drawn)
    True
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the states of all generators."""
        kind, words, *place = np.random.get_state()  # noqa: NPY002 # the default one is the one that users forget
        states: dict[str, Any] = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": (kind, np.asarray(words).tolist(), *place),
        }
        return states | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from that state."""
        torch.set_rng_state(state_dict["torch"])
        random.setstate(state_dict["python"])
        np.random.set_state(state_dict["numpy"])  # noqa: NPY002
        if "cuda" in state_dict and torch.cuda.is_available():
            torch.cuda.set_rng_state(state_dict["cuda"])
