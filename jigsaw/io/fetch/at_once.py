"""Questions to a store that answers after a round trip, asked many at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

IN_FLIGHT = 32


def at_once(ask: Callable[[T], Any], items: Sequence[T]) -> None:
    """Ask for every item; raises what the first that fails raises."""
    if len(items) == 1:
        ask(items[0])
    if len(items) < 2:
        return
    with ThreadPoolExecutor(min(IN_FLIGHT, len(items)), thread_name_prefix="jigsaw-ask") as pool:
        for _ in pool.map(ask, items):
            pass
