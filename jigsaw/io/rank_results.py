"""Results of a step on every rank of a mesh; where it fails on one, all raise alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.errors import ReadError, ShardingError, WriteError
from jigsaw.geometry.layout import Layout
from jigsaw.ranks.mesh import axes_of_mesh, mesh_coordinate

T = TypeVar("T")


def place_in_mesh(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Return the number of this rank in mesh order, and how many ranks there are."""
    if mesh is None:
        return 0, 1
    return Layout.of((), (), axes_of_mesh(mesh)).index(mesh_coordinate(mesh)), mesh.size()


def results_of_ranks(mesh: DeviceMesh | None, step: Callable[[], T], other: type[Exception]) -> list[T]:
    """Return what `step` returned on every rank, in mesh order; when it failed on any, all raise.

    A failure other than jigsaw's own refusals (a full disk, an error of a library) becomes an `other`. Type and text
    are sent, because an exception itself may hold what does not pickle: its rank would fail while the others wait.

    *Sends*: the pickled result of `step`, to each of the other ranks.
    """
    value, problem = None, None
    try:
        value = step()
    except (ReadError, ShardingError, WriteError) as error:
        problem = error
    except Exception as error:  # a library may raise anything
        problem = other(f"{type(error).__name__}: {error}")
        problem.__cause__ = error
    if mesh is None or mesh.size() == 1:
        if problem is not None:
            raise problem
        return [value]  # pyright: ignore[reportReturnType] # what failed has been raised
    outcomes = comm.all_gather_object(mesh, (value, None if problem is None else (type(problem), str(problem))))
    failed = [(rank, *why) for rank, (_, why) in enumerate(outcomes) if why is not None]
    if not failed:
        return [value_of_rank for value_of_rank, _ in outcomes]
    rank, kind, text = failed[0]
    where = "" if len(failed) == mesh.size() else f"rank {rank} of the mesh: "
    raise kind(f"{where}{text}") from problem


def result_of_first_rank(mesh: DeviceMesh | None, first: bool, step: Callable[[], T]) -> T:
    """Return on every rank what `step` returns on the `first`; a failure there is raised on all, as a `ReadError`."""
    results = results_of_ranks(mesh, lambda: step() if first else None, ReadError)
    return results[0]  # pyright: ignore[reportReturnType] # that of the first rank
