"""Checks of users' arguments before they are interpreted: lists of names, mappings by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from jigsaw.errors import FieldError, ReadError

T = TypeVar("T")


def checked_names(argument: str, value: Any, example: str = "t2m") -> tuple[str, ...]:
    """Return the strings of a list; a single string is refused, as is a list of anything else."""
    if isinstance(value, str):
        raise FieldError(f"{argument}={value!r} is one string; give a list: {argument}=[{value!r}]")
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
