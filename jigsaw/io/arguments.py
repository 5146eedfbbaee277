"""Checks of users' arguments before they are interpreted: lists of names, mappings by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from jigsaw.errors import FieldError, ReadError

T = TypeVar("T")


def checked_names(argument: str, given: Any, example: str = "t2m") -> tuple[str, ...]:
    """Return the strings of a list; a single string is refused, as is a list of anything else."""
    if isinstance(given, str):
        raise FieldError(f"{argument}={given!r} is one string; give a list: {argument}=[{given!r}]")
    try:
        found: tuple[Any, ...] = tuple(given)
    except TypeError:
        raise FieldError(
            f"{argument}={given!r} is no list; give a list of names, like {argument}=[{example!r}]"
        ) from None
    wrong = [name for name in found if not isinstance(name, str)]
    if wrong:
        raise FieldError(
            f"{argument}={list(found)!r} has {wrong[0]!r}, which is no string; give names, like {example!r}"
        )
    return found


def checked_mapping(argument: str, given: Any, example: str, error: type[ReadError]) -> Mapping[str, Any]:
    """Return a mapping, empty for None; anything else is an `error`, which shows an `example`."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        secret = argument == "options" and not isinstance(given, int | float)  # they may be credentials
        shown = "…" if secret else repr(given)
        raise error(f"{argument}={shown} must say it by name: {argument}={example}")
    return cast(Mapping[str, Any], given)


def checked_choice(argument: str, given: T, known: Sequence[T], error: type[ReadError] = FieldError) -> T:
    """Return one of the `known` choices.

    Raises: `error` for anything else.
    """
    if given not in known:
        raise error(f"{argument}={given!r} must be one of {tuple(known)}")
    return given
