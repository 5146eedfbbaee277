"""Collectives of tiles.  They run on the mesh's own groups, and every byte that they send is counted.  Torch's own
messages for parameters are not counted: DTensors that are cut, gathered or saved, and FSDP2.

Gradients follow one convention (docs/design.md): a value that is the same on several ranks has the same, whole gradient
on each of them.  A parameter is the exception: its gradient on a rank is that rank's *part*, and the parts sum to the
whole over the mesh.  So `sum_parts` (sum of parts, the same on all) and `use_in_parts` (the same on all, used in parts)
are adjoint.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm.alike_marks import SameOnRanks, alike_marks, alike_number, check_marks
from jigsaw.comm.connections import connect_ranks
from jigsaw.comm.debug import compare_calls
from jigsaw.comm.graph_calls import graph_call, is_shape_run, refuse_in_graph
from jigsaw.comm.traffic import TrafficCall as TrafficCall
from jigsaw.comm.traffic import TrafficCount as TrafficCount
from jigsaw.comm.traffic import count as count
from jigsaw.comm.traffic import open_counts, record_call
from jigsaw.comm.wire_values import (
    byte_view,
    floats_from_order,
    is_narrow,
    order_as_integers,
    plain_memory,
    wire_dtype,
    wire_memory,
)
from jigsaw.geometry import transfers
from jigsaw.ranks.mesh import (
    TrafficKind,
    axes_along,
    axes_of_mesh,
    group_patience,
    groups_along,
    mesh_group,
    ranks_in_mesh,
    sends_through_host,
)
from jigsaw.ranks.model_world import job_rank, job_size
from jigsaw.ranks.waiting_ranks import OpenWait
from jigsaw.torch_internals.autograd import memory_id
from jigsaw.torch_internals.groups import devices_of_group, takes_batches

AxisNames = str | Sequence[str]
T = TypeVar("T")


# -- point to point ---------------------------------------------------------------------------------------------------


class PendingWork:
    """Messages or an all-reduce under way, which keeps alive what it sends; `wait()` returns once all have arrived."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        buffers: Sequence[Tensor],
        kind: str = "",
        others: Sequence[int] = (),
        limit: timedelta | None = None,
        landed: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        self._works, self._buffers, self._kind, self._others, self._limit = works, buffers, kind, others, limit
        self._landed = landed  # (its destination, host memory that it arrives in)

    def wait(self) -> None:
        if not self._works:
            return
        with OpenWait(self._kind, self._others):
            for work in self._works:
                _ = work.wait() if self._limit is None else work.wait(self._limit)
        for memory, host in self._landed:
            memory.copy_(host)
        self._works, self._buffers, self._landed = (), (), ()


def begin_at_one_place(x: Tensor, y: Tensor) -> bool:
    """Say whether two tensors begin at the same element of the same memory; those without values have no address."""
    same = memory_id(x.untyped_storage()) == memory_id(y.untyped_storage())
    return same and x.storage_offset() == y.storage_offset()


def swap_messages(
    mesh: DeviceMesh,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, Tensor]],
    kind: str = "swap",
    traffic: TrafficKind = TrafficKind.MESSAGES,
) -> PendingWork:
    """Start one batch of messages to and from mesh positions; nothing is reduced or converted.

    A position is a row-major index into the mesh.  `receives` hold contiguous buffers that are filled in place.  Both
    sides must list the same messages in the same order per pair; empty ones are left out on both sides.  Calls meet in
    their order, too.  Every rank of the mesh calls this, even one without a message.

    *Sends*: the bytes of `sends`, one message each.
    """
    if is_shape_run():
        return PendingWork((), ())
    refuse_in_graph(f"a message of the kind {kind!r}")
    group = connect_ranks(mesh, traffic)
    outgoing = [(at, byte_view(plain_memory(x))) for at, x in sends if x.numel()]
    incoming = [(at, byte_view(x)) for at, x in receives if x.numel()]
    if open_counts:
        sent_bytes, received_bytes = [x.numel() for _, x in outgoing], [x.numel() for _, x in incoming]
        receivers = [ranks_in_mesh(mesh)[at] for at, _ in outgoing]
        record_call(
            kind, sum(sent_bytes), sum(received_bytes), len(sent_bytes), list(zip(receivers, sent_bytes, strict=True))
        )
    if not (outgoing or incoming):
        return PendingWork((), ())
    if group is None:
        group = mesh_group(mesh)  # raises on slabs
    on_host, landed = sends_through_host(mesh), list[tuple[Tensor, Tensor]]()
    if on_host and mesh.device_type != "cpu":
        outgoing = [(at, x.cpu()) for at, x in outgoing]
        landed = [(x, torch.empty_like(x, device="cpu")) for _, x in incoming]
        incoming = [(at, host) for (at, _), (_, host) in zip(incoming, landed, strict=True)]
    # gloo sends once it hears that the other side receives; that notice must not queue behind this rank's own message
    ways, ranks = ((dist.irecv, incoming), (dist.isend, outgoing)), ranks_in_mesh(mesh)
    messages = [(way, x, ranks[at]) for way, some in ways for at, x in some]
    others = sorted({rank for _, _, rank in messages})
    with OpenWait(kind, others):
        if takes_batches(group, torch.device(mesh.device_type)):
            works = dist.batch_isend_irecv([dist.P2POp(way, x, rank, group) for way, x, rank in messages])
        else:  # torch's batch would check each message twice
            works = [work for way, x, rank in messages if (work := way(x, rank, group)) is not None]
    # for messages of gloo; with NCCL a limit would make the host wait
    limit = group_patience(group, mesh.device_type) if on_host else None
    return PendingWork(works, [x for _, x in outgoing], kind, others, limit, landed)


# -- collectives ------------------------------------------------------------------------------------------------------


def rank_count(mesh: DeviceMesh, axes: AxisNames) -> int:
    """Return the number of ranks along `axes`."""
    return axes_along(mesh, axes).ranks


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "prod": dist.ReduceOp.PRODUCT}


def _record_reduce(buffer: Tensor, line: Sequence[int], is_behind: bool = False) -> None:
    if not open_counts:
        return
    ranks = len(line)
    moved = 2 * (ranks - 1) * buffer.nbytes // ranks
    following = line[(line.index(job_rank()) + 1) % ranks]  # on the ring
    record_call("all_reduce", moved, moved, 2 * (ranks - 1), [(following, moved)], is_behind, line)


def _result_of_reduce(
    x: Tensor, mesh: DeviceMesh, axes: AxisNames, op: str = "sum", same: SameOnRanks = None
) -> Tensor:
    return _plain_copy(x)


@graph_call(_result_of_reduce)
def all_reduce(x: Tensor, mesh: DeviceMesh, axes: AxisNames, op: str = "sum", same: SameOnRanks = None) -> Tensor:
    """Return a new tensor: `x` combined over the ranks along `axes`, the same bits on each.  Not differentiable.

    An axis that the mesh lacks counts as one rank, here as in a spec: the same program runs on any mesh.

    `op` is ``"sum"``, ``"prod"``, ``"max"`` or ``"min"``; NaN wins in the last two, as it does in `torch.amax`.
    bfloat16 and float16 are combined in float32, and rounded once.  `same` (a layout) must be equal on all ranks.

    *Sends*: 2 (P-1)/P of the bytes of `x` (ring: reduce-scatter, then all-gather); with `same`, of one element more, or
    two for a maximum or minimum.  Narrow types send twice that, as float32.  Sums of 64 KiB or more do not, on at
    most 64 ranks, where each sends a share to each other one.
    *Raises*: `ShardingError` for an op that the dtype does not have; on every rank, where `same` differs, or a plain
    value that tiles have met (`jigsaw.comm.first_meetings`).
    """
    wire = wire_dtype(x.dtype, op)
    ranks = rank_count(mesh, axes)
    own_values = x.detach()
    if ranks == 1:
        return _plain_copy(own_values)
    compare_calls(mesh, "all_reduce", op, *(same or ()), axes=axes, shape=x.shape)
    if x.numel() == 0:
        return _plain_copy(own_values)
    groups = groups_along(mesh, axes)
    in_shares = len(groups) == 1 and groups[0][0].size() <= transfers.MOST_PEERS_AT_ONCE
    if op == "sum" and is_narrow(x.dtype) and x.nbytes >= _SHARED_BYTES and in_shares:
        number = None if same is None else alike_number(same, mesh, ranks)
        total, is_alike = _sum_in_shares(_plain_copy(own_values), *groups[0], number)
        if is_alike is not None:
            check_marks(is_alike, mesh, axes, same or ())
        return total.detach()
    wide = _plain_copy(own_values).to(wire)
    ordered = op in ("max", "min") and wide.is_floating_point()
    if wide.dtype == torch.bool:
        buffer = wide.view(torch.uint8)
    elif wide.is_complex():
        buffer = torch.view_as_real(wide)
    else:
        buffer = order_as_integers(wide, op == "max") if ordered else wide
    marks = [] if same is None else alike_marks(buffer, mesh, axes, op, same)
    if marks:
        buffer = torch.cat([buffer.reshape(-1), *(buffer.new_full((1,), mark) for mark in marks)])
    # several groups only on a mesh that leaves out ranks of the job; a sum along one axis after the other still gives
    # every rank the same bits
    for group, line in groups:
        with OpenWait("all_reduce", line):
            dist.all_reduce(buffer, _OPS[op], group=group)
        _record_reduce(buffer, line)
    if marks:
        received_marks = buffer[-len(marks) :]
        check_marks(
            received_marks[0] == 0 if op == "sum" else received_marks[0] == -received_marks[1], mesh, axes, same or ()
        )
        buffer = buffer[: -len(marks)]
        wide = torch.view_as_complex(buffer.view(*wide.shape, 2)) if wide.is_complex() else buffer.view(wide.shape)
    # detached from what was sent: autograd would not let a user change a view that a Function made
    return (floats_from_order(buffer, wire).view(wide.shape) if ordered else wide).to(x.dtype).detach()


# for narrow sums of fewer bytes the number of messages decides the cost, and one all-reduce has half as many
_SHARED_BYTES = 2**16


def _sum_in_shares(
    x: Tensor, group: dist.ProcessGroup, line: Sequence[int], number: int | None
) -> tuple[Tensor, Tensor | None]:
    """Return the sum of narrow floats, which travel as they are, and whether all ranks have the same `number`.  Each
    rank adds up a share of all of them in float32, rounds it once and gives it to the others.

    A backend's own sum would round at every rank that it passes.
    """
    ranks, size = group.size(), x.numel()
    share = -(-size // ranks)
    sent = torch.nn.functional.pad(x.reshape(-1), (0, ranks * share - size)).view(ranks, share)
    if number is not None:  # in 8 bytes behind each share
        mark = torch.full((1,), number, device=x.device).view(x.dtype)
        sent = torch.cat([sent, mark.expand(ranks, -1)], 1)
    received = wire_memory(sent, sent.shape)
    with OpenWait("all_reduce", line):
        dist.all_to_all_single(byte_view(received), byte_view(sent), group=group)
    is_alike = None
    if number is not None:
        is_alike = (received[:, share:].view(torch.int16) == sent[:, share:].view(torch.int16)).all()
    own_share = received[:, :share].sum(0, dtype=torch.float32).to(x.dtype)
    whole = wire_memory(x, (ranks, share))
    with OpenWait("all_reduce", line):
        dist.all_gather([byte_view(row) for row in whole], byte_view(own_share), group=group)
    each = sent[0].nbytes + own_share.nbytes
    sent_to = [(rank, each) for rank in line if rank != job_rank()]
    record_call("all_reduce", (ranks - 1) * each, (ranks - 1) * each, 2 * (ranks - 1), sent_to)
    return whole.view(-1)[:size].view(x.shape), is_alike


def _plain_copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format).resolve_conj().resolve_neg()


def _results_of_gather(x: Tensor, mesh: DeviceMesh, axes: AxisNames, same: SameOnRanks = None) -> list[Tensor]:
    return [_plain_copy(x) for _ in range(rank_count(mesh, axes))]


@graph_call(_results_of_gather)
def all_gather(x: Tensor, mesh: DeviceMesh, axes: AxisNames, same: SameOnRanks = None) -> list[Tensor]:
    """Return the tensors of all ranks along `axes`, of one shape, in mesh order.  Not differentiable; `same` as in
    `all_reduce`.

    *Sends*: the bytes of `x`, and 8 with `same`, to each of the other P-1 ranks.
    """
    ranks = rank_count(mesh, axes)
    if ranks == 1:
        return [x.detach()]
    compare_calls(mesh, "all_gather", *(same or ()), axes=axes, shape=x.shape)
    if x.numel() == 0:
        return [x.detach()] * ranks
    own_bytes = byte_view(plain_memory(x))
    if same is not None:
        number = torch.full((1,), alike_number(same, mesh, ranks), device=x.device)
        own_bytes = torch.cat([own_bytes, number.view(torch.uint8)])
    parts = _gather_bytes(own_bytes, mesh, axes, "all_gather")
    if same is not None:
        numbers = torch.stack([part[-8:] for part in parts])
        check_marks((numbers == numbers[0]).all(), mesh, axes, same)
        parts = [part[:-8].clone() for part in parts]
    return [part.view(x.dtype).view(x.shape) for part in parts]


def _gather_bytes(own_bytes: Tensor, mesh: DeviceMesh, axes: AxisNames, kind: str) -> list[Tensor]:
    gathered = own_bytes
    for group, ranks in reversed(groups_along(mesh, axes)):
        parts = [wire_memory(gathered, gathered.shape) for _ in ranks]
        with OpenWait(kind, ranks):
            dist.all_gather(parts, gathered, group=group)
        moved = (len(ranks) - 1) * gathered.nbytes
        sent_to = [(rank, gathered.nbytes) for rank in ranks if rank != job_rank()] if open_counts else ()
        record_call(kind, moved, moved, len(ranks) - 1, sent_to, ring=ranks)
        # torch sorts the ranks of a group; a mesh may list them in another order
        by_rank = dict(zip(dist.get_process_group_ranks(group), parts, strict=True))
        gathered = torch.cat([by_rank[r] for r in ranks])
    return list(gathered.split(own_bytes.numel()))


def all_gather_object(mesh: DeviceMesh, value: object) -> list[Any]:
    """Return the picklable `value` of every rank of the mesh, in mesh order: for checks whose outcome all ranks must
    share.

    *Sends*: 8 bytes, then the pickled value (padded to the longest), to each of the other P-1 ranks.
    """
    refuse_in_graph("what ranks agree on by values")
    if mesh.size() == 1:
        return [value]
    compare_calls(mesh, "agreement")
    if dist.get_backend(mesh_group(mesh)) == "fake":  # in a dry run the imaginary ranks have the same value
        return [value] * mesh.size()
    names = [name for name, _ in axes_of_mesh(mesh)]
    own_bytes = pickle.dumps(value)
    length = torch.tensor([len(own_bytes)], device=mesh.device_type).view(torch.uint8)
    # lengths first: an all-gather wants messages of one length
    lengths = [int(n.view(torch.int64)) for n in _gather_bytes(length, mesh, names, "agree")]
    padded = torch.frombuffer(bytearray(own_bytes.ljust(max(lengths), b"\0")), dtype=torch.uint8).to(mesh.device_type)
    parts = _gather_bytes(padded, mesh, names, "agree")
    return [pickle.loads(part.cpu().numpy().tobytes()[:n]) for part, n in zip(parts, lengths, strict=True)]


def start_sum(x: Tensor, mesh: DeviceMesh, axes: AxisNames) -> PendingWork:
    """Start summing the contiguous `x`, of gradients, in place over the ranks along `axes`; `wait()` before it is used.

    Not differentiable.

    *Sends*: 2 (P-1)/P of the bytes of `x`.
    """
    refuse_in_graph("the sum of a bucket of gradients")
    compare_calls(mesh, "sum of gradients", axes=axes, shape=x.shape)
    if x.numel() == 0:
        return PendingWork((), ())
    buffer = torch.view_as_real(x) if x.is_complex() else x
    under_way = PendingWork((), ())
    for group, ranks in groups_along(mesh, axes, TrafficKind.GRADIENTS):
        under_way.wait()
        with OpenWait("all_reduce", ranks):
            work = dist.all_reduce(buffer, group=group, async_op=True)
        under_way = PendingWork([] if work is None else [work], (x,), "all_reduce", ranks)
        _record_reduce(buffer, ranks, is_behind=True)
    return under_way


def sum_of_host(counts: Sequence[int], mesh: DeviceMesh, axes: AxisNames) -> list[int]:
    """Return the sums of numbers of the hosts over the ranks along `axes`; no host waits for its device.

    The groups must serve hosts (`serves_hosts_along`).

    *Sends*: 2 (P-1)/P of 8 bytes a number.
    """
    compare_calls(mesh, "sum of numbers of hosts", axes=axes, shape=(len(counts),))
    sums = torch.tensor(counts, dtype=torch.int64, device="cpu")
    for group, ranks in groups_along(mesh, axes):
        with OpenWait("all_reduce", ranks):
            dist.all_reduce(sums, group=group)
        _record_reduce(sums, ranks)
    return sums.tolist()


def serves_hosts_along(mesh: DeviceMesh, axes: AxisNames) -> bool:
    """Say whether the groups along `axes` send numbers of the host, too; those of NCCL alone do not."""
    return all("cpu" in devices_of_group(group) for group, _ in groups_along(mesh, axes))


def broadcast_first(x: Tensor, mesh: DeviceMesh, axes: AxisNames) -> None:
    """Fill the contiguous `x` in place with that of the first rank along `axes`, in its own dtype.  Not differentiable.

    *Sends*: the bytes of `x` once a rank (tree).
    """
    refuse_in_graph("a broadcast")
    compare_calls(mesh, "broadcast", axes=axes, shape=x.shape)
    if x.numel() == 0:
        return
    for group, ranks in groups_along(mesh, axes):
        is_sender = ranks[0] == job_rank()
        record_call("broadcast", x.nbytes if is_sender else 0, 0 if is_sender else x.nbytes, int(is_sender))
        with OpenWait("broadcast", ranks):
            dist.broadcast(byte_view(x), ranks[0], group=group)


def all_gather_in_job(value: T) -> list[T]:
    """Return the small picklable `value` of every rank of the job, by rank, where there is no mesh for
    `all_gather_object`.

    *Sends*: the pickled value, to each of the other P-1 ranks; not counted.
    """
    if job_size() == 1:
        return [value]
    values: list[Any] = [None] * job_size()
    with OpenWait("agreement of the job", range(job_size())):
        dist.all_gather_object(values, value)
    return values


# -- adjoint pairs ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _RankSum:
    """Ranks along `axes` that parts are summed over; `same` as in `all_reduce`."""

    mesh: DeviceMesh
    axes: AxisNames
    same: SameOnRanks = None


class _SumParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, over: _RankSum) -> Tensor:
        ctx.over = over
        return all_reduce(x, over.mesh, over.axes, same=over.same)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # the values are the same, but for a second derivative the parts must be summed
        again = torch.is_grad_enabled()
        return _UseInParts.apply(grads[0], _RankSum(ctx.over.mesh, ctx.over.axes)) if again else grads[0], None


class _UseInParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, over: _RankSum) -> Tensor:
        ctx.over = over
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            return _SumParts.apply(grads[0], ctx.over), None
        return all_reduce(grads[0], ctx.over.mesh, ctx.over.axes), None


def sum_parts(x: Tensor, mesh: DeviceMesh, axes: AxisNames, same: SameOnRanks = None) -> Tensor:
    """Return the sum of `x` over the ranks along `axes`, the same on all of them; `same` as in `all_reduce`.

    *Sends*: forward, one all-reduce of `x`; backward, nothing, because the gradient of y is the same on all already.
    """
    return x if rank_count(mesh, axes) == 1 else _SumParts.apply(x, _RankSum(mesh, axes, same))


def use_in_parts(x: Tensor, mesh: DeviceMesh, axes: AxisNames) -> Tensor:
    """Return `x`, the same along `axes`, for use in every rank's own part of the work.

    *Sends*: forward nothing; backward one all-reduce of the gradient.
    """
    if rank_count(mesh, axes) == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _UseInParts.apply(x, _RankSum(mesh, axes))


class _EnterMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return share_of_mean(grads[0], ctx.scale), None


class _ShareOfMean(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return enter_mean(grads[0], ctx.scale), None


def enter_mean(x: Tensor, scale: float) -> Tensor:
    """Return `x`, whose gradient is `scale` times that of the result, a part, because a mean over ranks will follow."""
    return _EnterMean.apply(x, scale)


def share_of_mean(part: Tensor, scale: float) -> Tensor:
    """Return scale x, a share of a whole mean, of a part `x`.

    The gradient of the mean is whole on every rank, and so is that of the part: it goes back as it is, not scaled.
    """
    return _ShareOfMean.apply(part, scale)


def mean_of_shares(x: Tensor, mesh: DeviceMesh, axes: AxisNames, same: SameOnRanks = None) -> Tensor:
    """Return the mean of `x` over the ranks along `axes`, the same on all of them; `same` as in `all_reduce`.

    *Sends*: forward one all-reduce of `x`; backward nothing.
    """
    return sum_parts(share_of_mean(x, 1 / rank_count(mesh, axes)), mesh, axes, same)
