"""Checks of users' arguments before they are interpreted: numbers, lists of names, mappings by name."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from typing import Any, TypeGuard, TypeVar, cast

from jigsaw.errors import FieldError, ReadError

T = TypeVar("T")


def checked_names(argument: str, value: Any, example: str = "t2m") -> tuple[str, ...]:
    """Return the strings of a list; a single string is refused, as is a list of anything else."""
    if isinstance(value, str):
        raise FieldError(f"{argument}={value!r} is one string; give a list: {argument}={value.split(',')!r}")
    try:
        names: tuple[Any, ...] = tuple(value)
    except TypeError:
        raise FieldError(
            f"{argument}={value!r} is not a list; give a list of names, like {argument}=[{example!r}]"
        ) from None
    wrong = [name for name in names if not isinstance(name, str)]
    if wrong:
        raise FieldError(
            f"{argument}={list(names)!r} has {wrong[0]!r}, which is not a string; give names, like {example!r}"
        )
    return names


def checked_mapping(argument: str, value: Any, example: str, error: type[Exception]) -> Mapping[str, Any]:
    """Return a mapping, empty for None; anything else is an `error`, which shows an `example`."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        secret = argument == "options" and not isinstance(value, int | float)  # they may be credentials
        shown = "…" if secret else repr(value)
        raise error(f"{argument}={shown} must say it by name: {argument}={example}")
    return cast(Mapping[str, Any], value)


def checked_choice(argument: str, choice: T, known: Sequence[T], error: type[ReadError] = FieldError) -> T:
    """Return one of the `known` choices.

    Raises: `error` for anything else.
    """
    if choice not in known:
        raise error(f"{argument}={choice!r} must be one of {tuple(known)}")
    return choice


def is_real_number(value: Any) -> TypeGuard[float]:
    """Say whether a value is a real number, of Python or numpy, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def are_some_integers(values: Any) -> TypeGuard[Collection[int]]:
    """Say whether values are a list, or the like, of at least one integer."""
    if not isinstance(values, Collection) or isinstance(values, str | Mapping):
        return False
    return len(values) > 0 and all(isinstance(v, Integral) and not isinstance(v, bool) for v in values)


def check_cache_folder(folder: Any) -> None:
    """Raise `FieldError` unless `cache` is a folder's path, or None."""
    if folder is not None and not isinstance(folder, str | os.PathLike):
        raise FieldError(f"cache={folder!r} must be the path of a folder, or None")
