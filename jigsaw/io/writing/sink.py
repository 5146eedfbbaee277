"""Sinks, which formats offer to a writer, and the record of how far a store is written."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from numpy.typing import NDArray

from jigsaw.errors import writing_to
from jigsaw.geometry.cut import Box
from jigsaw.io.writing.cf import StoredCoordinate
from jigsaw.io.writing.outline import ArrayOutline, GrowingStore

APPEND_DIM_ATTRIBUTE, COMPLETE_ATTRIBUTE, CLOSED_ATTRIBUTE = "jigsaw_append_dim", "jigsaw_complete", "jigsaw_closed"


@dataclass(frozen=True)
class StoreCompleteness:
    """Completeness of a store: whole steps along the dim that grows, and whether its writer came to its end."""

    append_dim: str | None
    steps: int
    closed: bool

    def attrs(self) -> dict[str, Any]:
        """Return the global attributes that record it."""
        grows = {} if self.append_dim is None else {APPEND_DIM_ATTRIBUTE: self.append_dim}
        return {**grows, COMPLETE_ATTRIBUTE: self.steps, CLOSED_ATTRIBUTE: int(self.closed)}


def completeness_from_attrs(attrs: Mapping[str, Any]) -> StoreCompleteness | None:
    """Return the completeness in a store's attributes; None for a store that jigsaw did not write."""
    if COMPLETE_ATTRIBUTE not in attrs:
        return None
    dim = attrs.get(APPEND_DIM_ATTRIBUTE)
    return StoreCompleteness(
        None if dim is None else str(dim), int(attrs[COMPLETE_ATTRIBUTE]), bool(attrs.get(CLOSED_ATTRIBUTE, 0))
    )


def part_path(path: Path) -> Path:
    """Return where a file grows, unseen by others, until it is whole."""
    return path.with_name(f"{path.name}.part")


class FormatSink(Protocol):
    """One format.

    The first rank calls `find` or `create`, and `commit`; every rank that writes calls `attach`, `put` and `close`.
    """

    path: Path

    @property
    def remedy(self) -> str:
        """Advice for when writing failed."""
        ...

    @property
    def writers(self) -> tuple[int, ...]:
        """The only mesh positions that write; empty where every rank may."""
        ...

    def find(self, append_dim: str) -> GrowingStore | None:
        """Return the existing store to append to, if any."""

    def create(
        self,
        arrays: Sequence[ArrayOutline],
        coords: Sequence[StoredCoordinate],
        attrs: Mapping[str, Any],
        replace: bool,
    ) -> None:
        """Make a store without a complete step."""

    def attach(self, arrays: Sequence[ArrayOutline]) -> None:
        """Get ready to write boxes of arrays of these shapes, those of the whole store."""

    def put(self, name: str, box: Box, block: NDArray[Any]) -> None:
        """Write one box; nobody else writes to its units."""

    def commit(self, coords: Sequence[StoredCoordinate], start: int, done: StoreCompleteness) -> None:
        """Say that everything up to here is complete; `coords` are written, those that grow from step `start` on."""

    def close(self, done: bool) -> None:
        """Let go of the store; `done` when nothing failed."""


S = TypeVar("S", bound=FormatSink)
P = ParamSpec("P")
T = TypeVar("T")


def failing_with_remedy(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Wrap a method of a sink so that each failure is a `WriteError` that names the store and the sink's remedy."""

    @wraps(method)
    def told(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        with writing_to(self.path, self.remedy):
            return method(self, *args, **kwargs)

    return told


def listed_coordinates(attrs: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the coordinates that the ``coordinates`` attributes of arrays name."""
    return {name for each in attrs for name in str(each.get("coordinates", "")).split()}
