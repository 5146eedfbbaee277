"""Agreement of ranks: same arguments and values by digest, and decisions of one rank for all.

Ranks compare digests of fixed size.  Example: each of 4096 ranks was given the same 300 parameters.  The largest and
the smallest digest are one number, so 32 bytes a rank have told that.  Only where they are two do the lists travel, for
an error that names the rank and the parameter.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm import collectives
from jigsaw.comm.debug import compare_calls
from jigsaw.comm.graph_calls import refuse_in_graph
from jigsaw.comm.traffic import record_call
from jigsaw.comm.wire_values import checksum_of_bits
from jigsaw.errors import RanksDifferError
from jigsaw.ranks.job_groups import device_of_values
from jigsaw.ranks.mesh import axes_of_mesh, groups_along, mesh_group, ranks_along
from jigsaw.ranks.model_world import job_group, job_rank, job_size
from jigsaw.ranks.waiting_ranks import OpenWait
from jigsaw.torch_internals.fake_tensors import FakeTensor

T = TypeVar("T")
U = TypeVar("U")


# -- on a mesh --------------------------------------------------------------------------------------------------------


def are_alike(mesh: DeviceMesh, value: object, axes: Sequence[str] | None = None) -> bool:
    """Say whether the `repr` of a value is the same on all ranks along `axes`, by default on all of the mesh.

    Every rank of the mesh calls this.

    *Sends*: an all-reduce of 32 bytes.
    """
    refuse_in_graph("what ranks agree on by values")
    if mesh.size() == 1:
        return True
    compare_calls(mesh, "agreement")
    if dist.get_backend(mesh_group(mesh)) == "fake":  # in a dry run the imaginary ranks have the same value
        return True
    ends = _both_ends(value, mesh.device_type)
    for group, ranks in groups_along(mesh, [name for name, _ in axes_of_mesh(mesh)] if axes is None else axes):
        with OpenWait("agree", ranks):
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
        moved = 2 * (len(ranks) - 1) * ends.nbytes // len(ranks)
        following = ranks[(ranks.index(job_rank()) + 1) % len(ranks)]  # on the ring
        record_call("agree", moved, moved, 2 * (len(ranks) - 1), [(following, moved)], ring=ranks)
    return _is_one_digest(ends)


def is_true_everywhere(mesh: DeviceMesh, value: bool) -> bool:
    """Say whether a value is true on all ranks of a mesh; every rank of it calls this.

    *Sends*: an all-reduce of 32 bytes.
    """
    return are_alike(mesh, value) and value


class _ToldValue(NamedTuple):
    """Value, or its digest, that a rank tells others, and the call in which it does."""

    what: str
    value: Any


def _values_of_one_call(what: str, messages: Sequence[Any]) -> list[Any]:
    """Return what ranks told, once all did so in the same call."""
    for at, theirs in enumerate(messages):
        other = theirs.what if isinstance(theirs, _ToldValue) else "something else"
        if other != what:
            raise RanksDifferError(
                f"{what}: the rank at place {at} calls {other} meanwhile; every rank makes the same calls in the same "
                "order, so look for a loop that ends earlier there, or a branch that ranks take by their number"
            )
    return [theirs.value for theirs in messages]


def told_where_different(what: str, mesh: DeviceMesh, value: T) -> list[T]:
    """Return the picklable values of all ranks of a mesh, in its order, or none where all have the same `repr`.

    *Sends*: an all-reduce of 32 bytes; where values differ, also what `all_gather_object` does.
    *Raises*: `RanksDifferError` for ranks that agree on something else than `what`.
    """
    message = _ToldValue(what, value)
    return [] if are_alike(mesh, message) else _values_of_one_call(what, collectives.all_gather_object(mesh, message))


def agree_on_arguments(what: str, mesh: DeviceMesh, x: Tensor, with_values: bool, **arguments: object) -> list[int]:
    """Return the checksums of all ranks' tensors, in mesh order, once all their other arguments are known to be the
    same; none where the checksums are, too.
    """
    axes = axes_of_mesh(mesh)
    alike = {"mesh": (axes, ranks_along(mesh, [n for n, _ in axes])), "dtype": x.dtype, **arguments}
    own_reprs = {name: repr(value) for name, value in alike.items()} | {"requires_grad": repr(x.requires_grad)}
    has_values = not isinstance(x, FakeTensor)  # in a dry run there are none
    checksum = checksum_of_bits(x) if with_values and has_values and mesh.size() > 1 else 0
    every = told_where_different(what, mesh, (own_reprs, checksum))
    _refuse_different(what, [reprs for reprs, _ in every])
    return [number for _, number in every]


def check_arguments_alike(what: str, mesh: DeviceMesh, **arguments: object) -> None:
    """Raise `RanksDifferError` on every rank of a mesh where arguments of a call differ in their `repr`.

    *Sends*: an all-reduce of 32 bytes; where they differ, the arguments.
    """
    _refuse_different(what, told_where_different(what, mesh, {name: repr(value) for name, value in arguments.items()}))


def _refuse_different(what: str, every: Sequence[Mapping[str, str]]) -> None:
    for at, reprs in enumerate(every):
        for name, value in reprs.items():
            if value != every[0][name]:
                raise RanksDifferError(
                    f"{what}: the ranks must agree on {name}, but at place {at} of the mesh it is {value}, "
                    f"at place 0 {every[0][name]}"
                )


def _both_ends(value: object, device: str) -> Tensor:
    """Return a digest and its complement: the maximum of a complement over ranks tells the smallest digest."""
    digest = hashlib.blake2b(repr(value).encode(), digest_size=16).digest()
    words = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    return torch.cat([words, ~words]).to(device)


def _is_one_digest(ends: Tensor) -> bool:
    return bool((ends[:2] == ~ends[2:]).all())


# -- in the job -------------------------------------------------------------------------------------------------------


def is_alike_in_job(value: object) -> bool:
    """Say whether the `repr` of a value is the same on all ranks of the job; every rank calls this.

    *Sends*: an all-reduce of 32 bytes; not counted.
    """
    group = job_group()
    if group is None or group.size() == 1:
        return True
    ends = _both_ends(value, device_of_values(group))
    with OpenWait("agreement of the job", range(group.size())):
        dist.all_reduce(ends, dist.ReduceOp.MAX, group=group)
    return _is_one_digest(ends)


def told_in_job_where_different(what: str, value: T) -> list[T]:
    """Return the picklable values of all ranks of the job, by rank, or none where all have the same `repr`.

    *Sends*: an all-reduce of 32 bytes; where values differ, a digest to each other rank, and each of the different
    values once down a tree; not counted.
    *Raises*: `RanksDifferError` for ranks that agree on something else than `what`.
    """
    if is_alike_in_job(_ToldValue(what, value)):
        return []
    own_digest = _ToldValue(what, tuple(_both_ends(value, "cpu").tolist()))
    digests = _values_of_one_call(what, collectives.all_gather_in_job(own_digest))
    first_ranks = {digest: rank for rank, digest in reversed([*enumerate(digests)])}
    # the same order on every rank
    values = {digest: told_by_rank(value, first_ranks[digest]) for digest in dict.fromkeys(digests)}
    return [values[digest] for digest in digests]


def first_rank_where(is_here: bool) -> int | None:
    """Return the first rank of the job where something is, or None where it is on no rank; every rank calls this.

    *Sends*: an all-reduce of 8 bytes; not counted.
    """
    group = job_group()
    if group is None:
        return 0 if is_here else None
    first = torch.tensor([group.rank() if is_here else group.size()], device=device_of_values(group))
    with OpenWait("agreement of the job", range(group.size())):
        dist.all_reduce(first, dist.ReduceOp.MIN, group=group)
    return None if int(first) == group.size() else int(first)


def told_by_rank(value: T, rank: int) -> T:
    """Return the picklable value of one rank of the job on all.

    *Sends*: the pickled value, down a tree; not counted.
    """
    values = [value]
    if job_size() > 1:
        with OpenWait("what one rank tells", range(job_size())):
            dist.broadcast_object_list(values, src=rank, group=job_group())
    return values[0]


def decide_on_first_rank(
    give: Callable[[], T],
    decide: Callable[[list[T]], Sequence[U]],
    what: str,
    error: type[Exception],
    group: dist.ProcessGroup | None = None,
) -> U:
    """Let the job's first rank `decide` from what all ranks give, and return each rank its own result.

    `group` has all ranks of the job, in their order; by default it is the job's own.

    *Sends*: an all-reduce of 8 bytes; this rank's value, pickled, to the first rank, and a result from there; not
    counted.
    *Raises*: an `error` on every rank, where `give` fails on any or `decide` on the first: `what`, the rank, and why.
    """
    own_result: tuple[Any, BaseException | None] = _tried(give)
    sent = own_result[0], None if own_result[1] is None else repr(own_result[1])
    ranks, group = job_size(), group or job_group()  # even in a model's forward pass, which sees one process
    every: list[Any] | None = [sent]
    if ranks > 1:
        with OpenWait(what, range(ranks)):
            every = gather_on_first_rank(sent, cast("dist.ProcessGroup", group))
    results: list[Any] | None = None
    if every is not None:
        failed = next(((rank, why) for rank, (_, why) in enumerate(every) if why is not None), None)
        decisions: Sequence[U] | None = None
        if failed is None:
            decisions, failure = _tried(lambda: decide([value for value, _ in every]))
            own_result, failed = (own_result[0], failure), None if failure is None else (0, repr(failure))
        results = [(None, failed)] * ranks if decisions is None else [(each, None) for each in decisions]
    received: list[Any] = [None]
    if ranks > 1:
        with OpenWait(what, range(ranks)):
            dist.scatter_object_list(received, results, src=0, group=group)
    else:
        received = results or received
    result, failed = received[0]
    if failed is not None:
        raise error(f"{what}: rank {failed[0]}: {failed[1]}") from own_result[1]
    return result


def gather_on_first_rank(value: T, group: dist.ProcessGroup) -> list[T] | None:
    """Return the picklable values of a group's ranks on its first rank, and None on the others.

    Torch's `gather_object` tells every rank the size of every value; here all agree on the longest.
    """
    raw, device = bytearray(pickle.dumps(value)), device_of_values(group)
    longest = torch.tensor([len(raw)], device=device)
    dist.all_reduce(longest, dist.ReduceOp.MAX, group=group)
    # a pickle knows its end, so padding does no harm
    padded = torch.frombuffer(raw.ljust(int(longest), b"\0"), dtype=torch.uint8).to(device)
    rows = [torch.empty_like(padded) for _ in range(group.size())] if group.rank() == 0 else None
    dist.gather(padded, rows, group=group, group_dst=0)
    return None if rows is None else [pickle.loads(row.numpy(force=True).tobytes()) for row in rows]


def _tried(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as e:  # a library may raise anything
        return None, e
