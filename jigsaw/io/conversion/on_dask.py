"""Regions moved by the workers of a `dask.distributed` cluster; only digests come back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from jigsaw.io.errors import WriteError

if TYPE_CHECKING:
    from dask.distributed import Client

T = TypeVar("T")
_AHEAD = 2  # regions that a thread of a worker has been given and not yet answered


def by_workers(
    client: Client, work: Callable[..., Any], given: Sequence[T], data: Any, path: Any
) -> Iterator[tuple[T, Any]]:
    """``work(each, data, path)`` by the workers, few at a time, and its results in the order of what is given.

    Raises: `WriteError` for a cluster without workers; whatever the work raises.
    """
    on_each: Any = client.nthreads()
    threads = sum(on_each.values())
    if not threads:
        raise WriteError(f"the dask cluster at {client.scheduler_info()['address']} has no workers; start some first")
    shared: Any = client.scatter(data, broadcast=True, hash=False)
    running: deque[tuple[T, Any]] = deque()
    left = iter(given)
    try:
        while True:
            while len(running) < _AHEAD * threads and (one := next(left, None)) is not None:
                running.append((one, client.submit(work, one, shared, path, pure=False)))
            if not running:
                return
            each, future = running.popleft()
            yield each, future.result()
    finally:
        client.cancel([future for _, future in running])
