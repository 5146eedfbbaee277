"""Look up private names of torch, and replace some of them; a name that torch lacks is an error, never ignored."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any

import torch

from jigsaw.errors import TorchVersionError

PROVEN_TORCH = ">=2.13,<2.16"
"""Versions that have passed the tests of this room; `pyproject.toml` has the same."""


def private_name(path: str) -> Any:
    """Return what has a name, written ``module:attribute.attribute``.

    *Raises*: `TorchVersionError` where this torch does not have it.
    """
    try:
        return resolve_name(path)
    except (ImportError, AttributeError) as error:
        raise _lacking(path.replace(":", ".")) from error


def private_attribute(owner: Any, name: str) -> Callable[[Any], Any]:
    """Return the function that reads an attribute of objects, once a class or an example of them is found to have it.

    *Raises*: `TorchVersionError` where it does not.
    """
    if not hasattr(owner, name):
        kind = owner if isinstance(owner, type) else type(owner)
        raise _lacking(f"{kind.__module__}.{kind.__qualname__}.{name}")
    return attrgetter(name)


def _lacking(name: str) -> TorchVersionError:
    return TorchVersionError(
        f"jigsaw uses {name}, which torch {torch.__version__} does not have; install a torch that jigsaw is tested "
        f'with: pip install "torch{PROVEN_TORCH}"'
    )


@contextmanager
def torch_imports() -> Generator[None]:
    """Import private classes of torch within the block, for annotations.  *Raises*: `TorchVersionError`, as above."""
    try:
        yield
    except ImportError as error:
        raise _lacking(f"{error.name} ({error})") from error


class LateName:
    """A private function, or class to call, that is looked up at its first call: import does not need it."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._found: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._found is None:
            self._found = private_name(self._path)
        return self._found(*args, **kwargs)


# -- patches ----------------------------------------------------------------------------------------------------------

_replaced: list[tuple[Any, str, Any, Any]] = []  # the owner, the name, torch's own value, and jigsaw's


def replace_in_torch(owner: Any, name: str, value: Any) -> None:
    """Put jigsaw's function or class in the place of torch's, for the life of the process.

    *Raises*: `TorchVersionError` where torch has none of that name.
    """
    if not hasattr(owner, name):
        raise _lacking(f"{owner.__name__}.{name}")
    _replaced.append((owner, name, getattr(owner, name), value))
    setattr(owner, name, value)


@contextmanager
def replaced_in_torch(owner: Any, name: str, value: Any) -> Generator[None]:
    """Put `value` in the place of what `owner` itself has of that name, within the block."""
    before = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def without_patches() -> Generator[None]:
    """Let torch have its own functions and classes back within the block."""
    for owner, name, before, _ in reversed(_replaced):
        setattr(owner, name, before)
    try:
        yield
    finally:
        for owner, name, _, value in _replaced:
            setattr(owner, name, value)
