"""A `dask.distributed` cluster: found or started, and work given to its workers a little at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from jigsaw.errors import FieldError, imports_needed

if TYPE_CHECKING:
    from dask.distributed import Client

T = TypeVar("T")
_TASKS_AHEAD = 2  # tasks that a worker has at a time: one that runs and one that waits


@contextmanager
def dask_client(address: str | None, workers: int | None = None) -> Generator[Client]:
    """Connect to the cluster at `address`; without one, start a local cluster of `workers` (by default one a core).

    Raises: `FieldError` where dask's scheduler is not installed, or none answers at the address.
    """
    with imports_needed(FieldError, "a dask cluster needs dask's scheduler: pip install 'dask[distributed]'"):
        from dask.distributed import Client
    quiet = {"dashboard": False, "dashboard_address": "127.0.0.1:0"}  # even without a dashboard dask opens a port
    local = {"n_workers": workers or None, "host": "127.0.0.1", "threads_per_worker": 1, "scheduler_kwargs": quiet}
    options: dict[str, Any] = local if address is None else {"address": address}
    try:
        # a client that fails to connect would otherwise stay dask's default
        connection = Client(**options, set_as_default=False)
    except (ValueError, OSError) as error:
        if address is None:
            raise
        raise FieldError(
            f"no dask scheduler answers at {address!r} ({error}); give the address of a running one, like tcp://host:8786"
        ) from error
    with connection as client:
        yield client


def worker_threads(client: Client) -> Mapping[str, int]:
    """Return the number of threads of each worker.

    Raises: `FieldError` when there are no workers.
    """
    threads: Any = client.nthreads()
    if not threads:
        raise FieldError(f"the dask cluster at {client.scheduler_info()['address']} has no workers; start some first")
    return threads


def results_in_order(client: Client, tasks: Iterator[tuple[T, Any]], working: int) -> Iterator[tuple[T, Any]]:
    """Yield the results of futures in the order in which they are `tasks`, each with what comes beside it.

    `tasks` submits as it is iterated: a few for each of the `working`; those that are left in the end are canceled.

    Raises: whatever the work raises.
    """
    running: deque[tuple[T, Any]] = deque()
    try:
        while True:
            while len(running) < _TASKS_AHEAD * working and (task := next(tasks, None)) is not None:
                running.append(task)
            if not running:
                return
            beside, future = running.popleft()
            yield beside, future.result()
    finally:
        client.cancel([future for _, future in running])
