"""Requests to a store that answers after a round trip, made many at a time, as long as a caller waits."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

REQUESTS_IN_FLIGHT = 32
_idle_pool = ThreadPoolExecutor(1, thread_name_prefix="jigsaw-idle")
_waits_for_answer: ContextVar[Callable[[], bool] | None] = ContextVar("jigsaw_somebody_waits", default=None)


def ask_at_once(ask: Callable[[T], Any], items: Sequence[T]) -> None:
    """Ask for every item; raises the error of the first that fails."""
    if len(items) == 1:
        ask(items[0])
    if len(items) < 2:
        return
    with ThreadPoolExecutor(min(REQUESTS_IN_FLIGHT, len(items)), thread_name_prefix="jigsaw-ask") as pool:
        for _ in ask_in_pool(pool, ask, items):
            pass


def ask_in_pool(pool: ThreadPoolExecutor, ask: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield the answers, in order, of requests made in a pool's threads for the caller that waits here."""

    def run(context: Context, item: T) -> R:
        return context.run(ask, item)

    return pool.map(run, [copy_context() for _ in items], items)  # each context is entered by one thread at a time


@contextmanager
def while_waited_for(waits: Callable[[], bool]) -> Generator[None]:
    """Retry requests made inside only while `waits()`."""
    before = _waits_for_answer.set(waits)
    try:
        yield
    finally:
        _waits_for_answer.reset(before)


def is_waited_for() -> bool:
    """Say whether another try is worthwhile."""
    waits = _waits_for_answer.get()
    return (waits is None or waits()) and not _is_python_ending()


def _is_python_ending() -> bool:
    """Say whether Python is ending, and waits for this thread: pools then take no more work."""
    try:
        _idle_pool.submit(int)
    except RuntimeError:
        return True
    return False
