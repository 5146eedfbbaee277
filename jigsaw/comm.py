"""The only file that calls collectives.  Each is one of an adjoint pair, runs on the mesh's own groups and counts its bytes.

Gradients follow one convention (docs/design.md): the gradient of a value that several ranks hold alike is the same, whole
gradient on each of them; a parameter is the exception, its gradient on a rank is that rank's *part*, and the parts sum to
the whole over the mesh.  So `total` (sum of parts, held alike) and `enter` (held alike, used in parts) are adjoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.mesh import axes_of, group_along, members, rank_at, submesh

Axes = Sequence[str]


# -- counting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One communication of this rank: what, and how many payload bytes and messages."""

    kind: str
    sent_bytes: int
    received_bytes: int
    messages: int


@dataclass
class Count:
    """What this rank communicated while the count was open; `messages` are those it sent."""

    calls: list[Call] = field(default_factory=list[Call])

    @property
    def sent_bytes(self) -> int:
        return sum(c.sent_bytes for c in self.calls)

    @property
    def received_bytes(self) -> int:
        return sum(c.received_bytes for c in self.calls)

    @property
    def messages(self) -> int:
        return sum(c.messages for c in self.calls)


_open_counts: list[Count] = []


@contextmanager
def count() -> Iterator[Count]:
    """Count every byte and message that this rank sends and receives inside the block, in all threads."""
    mine = Count()
    _open_counts.append(mine)
    try:
        yield mine
    finally:
        # by identity: two counts with the same calls compare equal
        _open_counts[:] = [c for c in _open_counts if c is not mine]


def _record(kind: str, sent: int, received: int, messages: int) -> None:
    for each in _open_counts:
        each.calls.append(Call(kind, sent, received, messages))


# -- point to point -----------------------------------------------------------------------------------------------------


class Pending:
    """Messages under way; `wait()` returns once all have arrived.  Keeps the buffers alive until then."""

    def __init__(self, works: Sequence[dist.Work], buffers: Sequence[Tensor]) -> None:
        self._works, self._buffers = works, buffers

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works, self._buffers = (), ()


def _as_bytes(x: Tensor) -> Tensor:
    """A flat byte view, so that any dtype travels as it is over any backend."""
    return x.reshape(-1).view(torch.uint8)


def swap(mesh: DeviceMesh, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], kind: str = "swap") -> Pending:
    """Start one batch of messages to and from mesh positions; nothing is reduced or converted.

    A position is a row-major index into the mesh.  `receives` hold contiguous buffers that are filled in place.  Both
    sides must list the same messages in the same order per pair; empty ones are left out on both sides.

    *Sends*: the bytes of `sends`, one message each.
    """
    outgoing = [(at, _as_bytes(x.detach().contiguous())) for at, x in sends if x.numel()]
    incoming = [(at, _as_bytes(x)) for at, x in receives if x.numel()]
    _record(kind, sum(x.numel() for _, x in outgoing), sum(x.numel() for _, x in incoming), len(outgoing))
    if not outgoing and not incoming:
        return Pending((), ())
    group = group_along(mesh, [name for name, _ in axes_of(mesh)])
    ops = [dist.P2POp(dist.isend, x, rank_at(mesh, at), group) for at, x in outgoing]
    ops += [dist.P2POp(dist.irecv, x, rank_at(mesh, at), group) for at, x in incoming]
    return Pending(dist.batch_isend_irecv(ops), [x for _, x in outgoing])


# -- collectives ----------------------------------------------------------------------------------------------------------


def extent(mesh: DeviceMesh, axes: Axes) -> int:
    """The number of ranks along `axes`."""
    return math.prod(size for name, size in axes_of(mesh) if name in axes)


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN, "prod": dist.ReduceOp.PRODUCT}


def all_reduce(x: Tensor, mesh: DeviceMesh, axes: Axes, op: str = "sum") -> Tensor:
    """A new tensor: `x` combined over the ranks along `axes`, the same bits on each.  Not differentiable.

    bfloat16 and float16 are summed in float32.

    *Sends*: 2 (P-1)/P of the bytes of `x` (ring: reduce-scatter, then all-gather).
    """
    ranks = extent(mesh, axes)
    narrow = x.dtype in (torch.bfloat16, torch.float16) and op in ("sum", "prod")
    wide = x.detach().to(torch.float32) if narrow else x.detach().clone()
    if ranks == 1 or x.numel() == 0:
        return x.detach().clone()
    wide = wide.contiguous()
    buffer = torch.view_as_real(wide) if wide.is_complex() else wide.view(torch.uint8) if wide.dtype == torch.bool else wide
    dist.all_reduce(buffer, _OPS[op], group=group_along(mesh, axes))
    moved = 2 * (ranks - 1) * buffer.nbytes // ranks
    _record("all_reduce", moved, moved, 2 * (ranks - 1))
    return wide.to(x.dtype)


def all_gather(x: Tensor, mesh: DeviceMesh, axes: Axes) -> list[Tensor]:
    """The tensors of all ranks along `axes`, of one shape, in mesh order.  Not differentiable.

    *Sends*: the bytes of `x` to each of the other P-1 ranks.
    """
    ranks = extent(mesh, axes)
    if ranks == 1:
        return [x.detach()]
    group = group_along(mesh, axes)
    mine = _as_bytes(x.detach().contiguous())
    parts = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(parts, mine, group=group)
    _record("all_gather", (ranks - 1) * mine.nbytes, (ranks - 1) * mine.nbytes, ranks - 1)
    by_rank = dict(zip(dist.get_process_group_ranks(group), parts, strict=True))
    return [by_rank[r].view(x.dtype).reshape(x.shape) for r in members(mesh, axes)]


def agree(mesh: DeviceMesh, value: object) -> list[Any]:
    """The picklable `value` of every rank of the mesh, in mesh order: for checks whose outcome all ranks must share."""
    names = [name for name, _ in axes_of(mesh)]
    ranks = extent(mesh, names)
    if ranks == 1:
        return [value]
    group = group_along(mesh, names)
    found: list[Any] = [None] * ranks
    dist.all_gather_object(found, value, group=group)
    by_rank = dict(zip(dist.get_process_group_ranks(group), found, strict=True))
    return [by_rank[r] for r in submesh(mesh, names).mesh.flatten().tolist()]


def start_sum(x: Tensor, mesh: DeviceMesh, axes: Axes) -> Pending:
    """Start summing the contiguous `x` in place over the ranks along `axes`; `wait()` before it is used.  Not differentiable.

    *Sends*: 2 (P-1)/P of the bytes of `x`.
    """
    ranks = extent(mesh, axes)
    if ranks == 1 or x.numel() == 0:
        return Pending((), ())
    moved = 2 * (ranks - 1) * x.nbytes // ranks
    _record("all_reduce", moved, moved, 2 * (ranks - 1))
    buffer = torch.view_as_real(x) if x.is_complex() else x
    work = dist.all_reduce(buffer, group=group_along(mesh, axes), async_op=True)
    return Pending((work,) if work is not None else (), (x,))


def broadcast(x: Tensor, mesh: DeviceMesh, axes: Axes) -> None:
    """Fill the contiguous `x` in place with that of the first rank along `axes`, in its own dtype.  Not differentiable.

    *Sends*: the bytes of `x` once a rank (tree).
    """
    ranks = extent(mesh, axes)
    if ranks == 1 or x.numel() == 0:
        return
    first = members(mesh, axes)[0]
    mine = first == dist.get_rank()
    _record("broadcast", x.nbytes if mine else 0, 0 if mine else x.nbytes, int(mine))
    dist.broadcast(_as_bytes(x), first, group=group_along(mesh, axes))


# -- adjoint pairs --------------------------------------------------------------------------------------------------------


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, axes: Axes) -> Tensor:
        return all_reduce(x, mesh, axes)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: DeviceMesh, axes: Axes) -> Tensor:
        ctx.mesh, ctx.axes = mesh, axes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return _Total.apply(grads[0], ctx.mesh, ctx.axes), None, None


def total(x: Tensor, mesh: DeviceMesh, axes: Axes) -> Tensor:
    """y = sum of `x` over the ranks along `axes`, held alike by all of them.

    *Sends*: forward one all-reduce of `x`; backward nothing (the gradient of y is held alike already).
    """
    return x if extent(mesh, axes) == 1 else _Total.apply(x, mesh, axes)  # type: ignore[no-any-return]


def enter(x: Tensor, mesh: DeviceMesh, axes: Axes) -> Tensor:
    """y = x, where x is held alike along `axes` and every rank goes on to use y in its own part of the work.

    *Sends*: forward nothing; backward one all-reduce of the gradient.
    """
    if extent(mesh, axes) == 1 or not (x.requires_grad and torch.is_grad_enabled()):
        return x
    return _Enter.apply(x, mesh, axes)  # type: ignore[no-any-return]
