"""Gradients of weights of which each rank uses a block: the blocks travel, not the zeros around them.

A weight that contracts cut tokens is of use to each rank in the rows or columns of its own tokens.  Its gradient is
zero elsewhere, so that a sum over the ranks adds zeros to every element: all-gathering the blocks sends half of it.

Two ranks, lat=2, and W [3, 4] over four tokens, two a rank: rank 0 has the gradient of columns 0:2 and zeros in 2:4,
rank 1 the other way round.  Each sends the other its 3 x 2 elements.  By lat=2, data=2 the two that have the same
columns first sum theirs.

Whether a gradient is its block and nothing else is known where it arrives alone: a weight that is used elsewhere too
(tied, a loss term, an earlier backward pass) has more, and is then summed whole.  So it is among more ranks than
exchange rows at once: each block would be a message to each of them, for each weight.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.comm.debug import compare_calls
from jigsaw.comm.wire_values import wire_memory
from jigsaw.geometry import transfers
from jigsaw.geometry.cut import box_slices
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.ranks.mesh import TrafficKind, mesh_coordinate
from jigsaw.torch_internals.autograd import tensor_version

_RECORD = "_jigsaw_gradient_block"


class BlockRecord:
    """Record of the gradient of a parameter: how blocks cut it, and the tensor that is one block and zeros.

    Ranks use a block together, so `layout` is alike on all of them; whether the gradient has come as that tensor is
    each rank's own.  `is_mixed` once it had not on some rank: blocks do not travel again.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self.mesh, self.is_mixed = mesh, False
        self.forget()

    def forget(self) -> None:
        self.layout: Layout | None = None
        self._placed: tuple[Tensor, int] | None = None

    @property
    def has_come(self) -> bool:
        """True where blocks are to travel: few ranks have used some, and never had more than them."""
        layout = self.layout
        if layout is None or self.is_mixed:
            return False
        return math.prod(map(layout.size_of, layout.cut_axes)) <= transfers.MOST_PEERS_AT_ONCE

    def note(self, grad: Tensor, layout: Layout) -> None:
        # keep an alias: while it exists, autograd adds other gradients to a copy, not to this memory
        self.layout, self._placed = layout, (grad.detach(), tensor_version(grad))

    def is_all_of(self, grad: Tensor | None) -> bool:
        """Say whether `grad` is the noted tensor, unchanged: versions show hooks that changed it, and sums."""
        if grad is None or grad.requires_grad or self._placed is None:
            return False
        placed, version = self._placed
        return (
            grad.data_ptr() == placed.data_ptr()
            and grad.stride() == placed.stride()
            and tensor_version(placed) == version
        )


def record_blocks(parameter: nn.Parameter, mesh: DeviceMesh) -> None:
    """Note the blocks of a parameter from now on, for the reducer of its gradient over `mesh`."""
    setattr(parameter, _RECORD, BlockRecord(mesh))


def recorded_blocks(parameter: Tensor, mesh: DeviceMesh | None = None) -> BlockRecord | None:
    """Return the record of a parameter whose blocks are noted, and of tiles on `mesh` where one is given."""
    record: BlockRecord | None = getattr(parameter, _RECORD, None)
    return None if record is None or (mesh is not None and record.mesh != mesh) else record


# -- a block in the forward pass --------------------------------------------------------------------------------------


def _block_view(w: Tensor, layout: Layout, at: MeshCoordinate) -> Tensor:
    """Return the part of `w` that the rank at a coordinate owns; dims that were flattened together are apart."""
    for dim in reversed(range(w.ndim)):
        if len(cuts := layout.dim(dim)) > 1:
            w = w.unflatten(dim, [c.size for c in cuts])
    return w[box_slices(layout.owned(at))]


@dataclass(frozen=True, slots=True)
class _BlockUse:
    """Use of the block of a whole weight that the rank at a coordinate owns; its gradient is times `scale`."""

    layout: Layout
    at: MeshCoordinate
    scale: float
    record: BlockRecord


class _OwnBlock(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, w: Tensor, use: _BlockUse) -> Tensor:
        ctx.use = use
        return _block_view(w, use.layout, use.at).reshape(use.layout.local_shape(use.at))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        use: _BlockUse = ctx.use
        whole = grads[0].new_zeros(use.layout.shape)
        block = _block_view(whole, use.layout, use.at)
        if torch.is_grad_enabled():  # for second derivatives, the incoming gradient is reduced whole
            block.copy_(comm.share_of_mean(grads[0].reshape(block.shape), use.scale))
        else:
            torch.mul(grads[0].reshape(block.shape), use.scale, out=block)
        use.record.note(whole, use.layout)
        return whole, None


def own_block(parameter: nn.Parameter, layout: Layout, scale: float, record: BlockRecord) -> Tensor:
    """Return this rank's block of a whole weight, whose gradient is that of the block times `scale`, and zeros."""
    return _OwnBlock.apply(parameter, _BlockUse(layout, mesh_coordinate(record.mesh), scale, record))


# -- on its way -------------------------------------------------------------------------------------------------------


class TravelingBlock:
    """The gradient of a parameter while blocks of it travel; lent until `finish` or `undo` is called.

    Where other ranks have more than their block, all of them learn it from what travels beside, and undo: then the
    gradient is summed as any other.

    *Sends*: the block, in one message, to each rank along the axes that cut it, (P-1)/P of the gradient in all; before
    that one all-reduce of the block over the other axes.
    """

    def __init__(self, parameter: nn.Parameter, record: BlockRecord, axes: tuple[str, ...]) -> None:
        assert record.layout is not None
        self.parameter, self.record, self._layout = parameter, record, record.layout
        self.is_alone = record.is_all_of(parameter.grad)
        record.forget()
        # a gradient of more than the block stays in `.grad`, and zeros are summed in place of the block
        grad = parameter.grad
        if grad is not None and self.is_alone:
            self._grad, parameter.grad = grad, None
        else:
            self._grad = torch.zeros_like(parameter)
        mesh = record.mesh
        self._mine = _block_view(self._grad, self._layout, mesh_coordinate(mesh))
        self._arriving: list[tuple[Tensor, Tensor]] = []
        self._axes, self._rest = axes, [a for a in axes if a not in self._layout.cut_axes]
        self._is_summed = comm.rank_count(mesh, self._rest) > 1
        self._ranks = comm.rank_count(mesh, axes)
        if not self._is_summed and self._mine.is_contiguous():
            self._sent = self._mine.div_(self._ranks)  # sent without a copy
        else:
            narrow = self._is_summed and self._mine.dtype in (torch.bfloat16, torch.float16)
            self._sent = ((self._mine.float() if narrow else self._mine) / self._ranks).contiguous()
        self._pending = comm.start_sum(self._sent, mesh, self._rest) if self._is_summed else self._swap()

    def _swap(self) -> comm.PendingWork:
        mesh, layout = self.record.mesh, self._layout
        own = mesh_coordinate(mesh)
        compare_calls(mesh, "blocks of gradients", layout)
        sent: list[tuple[int, Tensor]] = []
        arriving: list[tuple[int, Tensor]] = []
        for peer in layout.coords():
            alike = all(a == b for (name, _), a, b in zip(layout.axes, peer, own, strict=True) if name in self._rest)
            if alike and peer != own:
                place = _block_view(self._grad, layout, peer)
                buffer = place if place.is_contiguous() else wire_memory(place, place.shape)
                self._arriving.append((place, buffer))
                sent.append((layout.index(peer), self._sent))
                arriving.append((layout.index(peer), buffer))
        return comm.swap_messages(mesh, sent, arriving, "blocks of gradients", TrafficKind.GRADIENTS)

    def finish(self, is_mixed: bool) -> None:
        """Wait, and give the parameter its mean; by a sum of all of it, where a rank had more than its block."""
        if is_mixed:
            self.undo()
            self._sum_whole()
            return
        self._pending.wait()
        if self._is_summed:
            self._sent = self._sent.to(self._grad.dtype)
            self._swap().wait()
        for place, buffer in [*self._arriving, (self._mine, self._sent)]:
            if place is not buffer:
                place.copy_(buffer)
        self.parameter.grad = self._grad

    def undo(self) -> None:
        """Wait, and give the parameter this rank's part back, and what came later beside it."""
        self._pending.wait()
        if self.is_alone:
            for place, _ in self._arriving:
                place.zero_()
            if self._sent is self._mine:
                self._mine.mul_(self._ranks)
            late = self.parameter.grad
            self.parameter.grad = self._grad if late is None else self._grad.add_(late)

    def _sum_whole(self) -> None:
        self.record.is_mixed = True
        if self.parameter.grad is None:
            self.parameter.grad = torch.zeros_like(self.parameter)
        grad = self.parameter.grad
        wide = torch.float32 if grad.dtype in (torch.bfloat16, torch.float16) else grad.dtype
        total = grad.detach().to(wide, copy=True, memory_format=torch.contiguous_format)
        comm.start_sum(total, self.record.mesh, self._axes).wait()
        torch.div(total, self._ranks, out=grad.detach())
