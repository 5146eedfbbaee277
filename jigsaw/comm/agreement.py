"""Agreement of ranks: same arguments of `jigsaw.shard` and `jigsaw.from_local`, same values by checksum, and decisions
of one rank for all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm import collectives
from jigsaw.comm.wire_values import checksum_of_bits
from jigsaw.errors import RanksDifferError
from jigsaw.ranks.mesh import axes_of_mesh, ranks_along
from jigsaw.ranks.model_world import job_group, job_rank, job_size
from jigsaw.ranks.waiting_ranks import OpenWait

T = TypeVar("T")
U = TypeVar("U")


def agree_on_arguments(
    what: str, mesh: DeviceMesh, x: Tensor, with_values: bool, **arguments: object
) -> list[tuple[tuple[int, ...], int]]:
    """Return the shape and checksum of all ranks' tensors, in mesh order, once all their other arguments are known to
    be the same.
    """
    alike = {
        "mesh": (axes_of_mesh(mesh), ranks_along(mesh, [n for n, _ in axes_of_mesh(mesh)])),
        "dtype": x.dtype,
        **arguments,
    }
    mine = {name: repr(value) for name, value in alike.items()} | {"requires_grad": repr(x.requires_grad)}
    checksum = checksum_of_bits(x) if with_values and mesh.size() > 1 else 0
    found = collectives.all_gather_object(mesh, (mine, tuple(x.shape), checksum))
    for at, (theirs, _, _) in enumerate(found):
        for name, value in theirs.items():
            if value != found[0][0][name]:
                raise RanksDifferError(
                    f"{what}: the ranks must agree on {name}, but at place {at} of the mesh it is {value}, "
                    f"at place 0 {found[0][0][name]}"
                )
    return [(shape, number) for _, shape, number in found]


def decide_on_first_rank(
    give: Callable[[], T],
    decide: Callable[[list[T]], Sequence[U]],
    what: str,
    error: type[Exception],
    group: dist.ProcessGroup | None = None,
) -> U:
    """Let the job's first rank `decide` from what all ranks give, and return each rank its own result.

    `group` has all ranks of the job, in their order; by default it is the job's own.

    *Sends*: this rank's value, pickled, to the first rank, and a result from there; not counted.
    *Raises*: an `error` on every rank, where `give` fails on any or `decide` on the first: `what`, the rank, and why.
    """
    mine: tuple[Any, BaseException | None] = _tried(give)
    given = mine[0], None if mine[1] is None else repr(mine[1])
    ranks, group = job_size(), group or job_group()  # even in a model's forward pass, which sees one process
    is_first = ranks == 1 or job_rank() == 0
    every: list[Any] | None = [given] * ranks if is_first else None
    if ranks > 1:
        with OpenWait(what, range(ranks)):
            dist.gather_object(given, every, dst=0, group=group)
    results: list[Any] | None = None
    if every is not None:
        failed = next(((rank, why) for rank, (_, why) in enumerate(every) if why is not None), None)
        found: Sequence[U] | None = None
        if failed is None:
            found, failure = _tried(lambda: decide([value for value, _ in every]))
            mine, failed = (mine[0], failure), None if failure is None else (0, repr(failure))
        results = [(None, failed)] * ranks if found is None else [(each, None) for each in found]
    told: list[Any] = [None]
    if ranks > 1:
        with OpenWait(what, range(ranks)):
            dist.scatter_object_list(told, results, src=0, group=group)
    else:
        told = results or told
    result, failed = told[0]
    if failed is not None:
        raise error(f"{what}: rank {failed[0]}: {failed[1]}") from mine[1]
    return result


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as e:  # a library may raise anything
        return None, e
