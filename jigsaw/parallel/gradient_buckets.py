"""Buckets of gradients that travel together, and the axes along which gradients are reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from jigsaw import comm
from jigsaw.comm.wire_values import is_on_accelerator, lie_in_one_memory, values_on_device
from jigsaw.errors import ShardingError
from jigsaw.ops.meeting.gradient_blocks import TravelingBlock, recorded_blocks
from jigsaw.ranks.mesh import axes_of_mesh, ranks_along, ranks_in_mesh
from jigsaw.torch_internals.autograd import is_zero_tensor
from jigsaw.torch_internals.dispatch import without_modes


def local_part(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, not differentiable; any other tensor as it is."""
    if not isinstance(x, DTensor):
        return x.detach()
    with torch.no_grad():
        return x.to_local()


_LENT_BYTES = 2**20  # bytes of a gradient that is summed in place, at the price of one more message


def is_lent_alone(parameter: Tensor) -> bool:
    """Say whether the gradient of a parameter, alone in its bucket, is summed in its own memory."""
    return local_part(parameter).nbytes >= _LENT_BYTES


@dataclass(eq=False)
class GradientBucket:
    """Parameters whose gradients travel together, along `axes`; ``late`` when one changed after the bucket had left.

    A large gradient alone in its bucket is summed in its own memory: it is `lent` until then, and a late part is a
    gradient beside it.  Of a large one that is a block and zeros `blocks` travel.  The hosts of all ranks tell each
    other who has gradients (`asks_hosts`) after a backward pass in which no rank had one of them.
    """

    parameters: list[nn.Parameter]
    axes: tuple[str, ...]
    arrived: set[nn.Parameter] = field(default_factory=set[nn.Parameter])
    seen: int = 0  # number of parameters, from the first on, that have arrived or are frozen
    sent: list[nn.Parameter] = field(default_factory=list[nn.Parameter])
    flat: Tensor | None = None
    own_flags: list[bool] = field(default_factory=list[bool])
    flags: Tensor | None = None
    asks_hosts: bool = False
    lent: Tensor | None = None
    blocks: list[TravelingBlock] = field(default_factory=list[TravelingBlock])
    pending: Sequence[comm.PendingWork] | None = None
    late: bool = False
    owed: set[nn.Parameter] = field(default_factory=set[nn.Parameter])  # those with parts that `no_sync` kept back

    def is_full(self) -> bool:
        """Say whether no parameter is missing; all calls together check each parameter once."""
        while self.seen < len(self.parameters):
            p = self.parameters[self.seen]
            if p.requires_grad and p not in self.arrived:
                return False
            self.seen += 1
        return True

    def launch(self, mesh: DeviceMesh, lends: bool) -> None:
        """Start the sum of all gradients, zeros where there is none, and of a flag each: whether there is one (beside a
        block).

        bfloat16 and float16 are summed in float32; parameters that were frozen since `no_sync` are among them, those
        frozen before stay behind.
        """
        # decided by requires_grad, the same on all ranks, never by the presence of a gradient, because all must sum the
        # same number of elements.  A flag separates a gradient of zeros from none.
        trained = [p for p in self.parameters if p.requires_grad or p in self.owed]
        self.pending, self.flat, self.late = (), None, False
        if comm.rank_count(mesh, self.axes) == 1:  # their axes cut them all, so each rank has the whole of its part
            for p in trained:
                _strided_gradient(p)
            return
        self.blocks = self._start_blocks(trained, lends)
        apart = {block.parameter for block in self.blocks}
        self.sent = [p for p in trained if p not in apart] if apart else trained
        if trained:
            like = local_part(trained[0])
            wide = torch.float32 if like.dtype in (torch.bfloat16, torch.float16) else like.dtype
            self.own_flags = [p.grad is not None for p in self.sent] + [not block.is_alone for block in self.blocks]
            self.flags = values_on_device(self.own_flags, wide, like.device)
            if lends and len(self.sent) == 1 and is_lent_alone(self.sent[0]):
                self.flat = self._lend_gradient(self.sent[0], wide)
                self.pending = [comm.start_sum(x, mesh, self.axes) for x in (self.flat, self.flags)]
            else:
                self.flat = torch.cat([*(_flat_gradient(p).to(wide) for p in self.sent), self.flags])
                self.flags = self.flat[-len(trained) :]
                self.pending = [comm.start_sum(self.flat, mesh, self.axes)]

    def _start_blocks(self, trained: Sequence[nn.Parameter], lends: bool) -> list[TravelingBlock]:
        blocks: list[TravelingBlock] = []
        for p in trained:
            record = recorded_blocks(p)
            if record is not None and lends and record.has_come:
                blocks.append(TravelingBlock(p, record, self.axes))
            elif record is not None:
                record.forget()
        return blocks

    def _lend_gradient(self, parameter: nn.Parameter, wide: torch.dtype) -> Tensor:
        flat = _flat_gradient(parameter).to(wide)
        grad = parameter.grad
        # there is no gradient here yet, or one with a graph for second derivatives
        if grad is None or grad.requires_grad:
            return flat.clone()
        if lie_in_one_memory(local_part(grad), flat):
            self.lent, parameter.grad = grad, None
        return flat

    def finish(self, mesh: DeviceMesh) -> None:
        """Wait for the sum and give every parameter its mean; one that no rank has a gradient for keeps none."""
        if self.pending is not None and self.flat is not None and self.flags is not None:
            self._wait()
            has, ranks = self._summed_flags(self.flags, mesh), comm.rank_count(mesh, self.axes)
            if self.lent is not None:
                self.flat.div_(ranks)
                self.sent[0].grad = self.lent
            else:
                sizes = [local_part(p).numel() for p in self.sent]
                totals = self.flat[: sum(sizes)].split(sizes)
                for p, total, has_gradient in zip(self.sent, totals, has[: len(sizes)], strict=True):
                    if has_gradient:
                        _write_mean(p, total, ranks)
            for block, more in zip(self.blocks, has[len(self.sent) :], strict=True):
                block.finish(bool(more))
        self.owed = set()
        self.forget()

    def _summed_flags(self, flags: Tensor, mesh: DeviceMesh) -> Sequence[float]:
        """Return the number of ranks that have a gradient of each parameter sent, and more than a block of the rest."""
        if self.asks_hosts:
            sums = comm.sum_of_host(self.own_flags, mesh, self.axes)
        # read flags, for which the host waits, only where they decide; a lent gradient exists on every rank
        elif self.blocks or (self.lent is None and not all(self.own_flags)):
            sums = flags.tolist()
        else:
            return [1.0] * len(self.sent)
        # a zero is one on every rank, and all have read it: so they agree on who asks next time
        self.asks_hosts = is_on_accelerator(flags) and 0 in sums and comm.serves_hosts_along(mesh, self.axes)
        return sums

    def settle(self, ranks: int) -> None:
        """Wait for a sum under way; a lent gradient comes back as the mean of what was sent, plus what came later."""
        self._wait()
        if self.lent is not None and self.flat is not None:
            self.flat.div_(ranks)
            late = self.sent[0].grad
            self.sent[0].grad = self.lent if late is None else self.lent.add_(late)
            self.lent = None
        for block in self.blocks:
            block.undo()

    def _wait(self) -> None:
        for work in self.pending or ():
            work.wait()

    def forget(self) -> None:
        self.arrived, self.seen, self.sent, self.pending, self.late = set(), 0, [], None, False
        self.flat = self.flags = self.lent = None
        self.blocks, self.own_flags = [], []


def _strided_gradient(parameter: nn.Parameter) -> Tensor | None:
    """Return the gradient, cut as the parameter is and in memory of its own; it takes the place of any other form."""
    grad = parameter.grad
    if grad is None:
        return None
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        grad = parameter.grad = grad.redistribute(placements=parameter.placements)
    if is_zero_tensor(local_part(grad)):  # autograd's zeros without memory, as those of torch.sgn
        grad = parameter.grad = grad.clone()
    return grad


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    grad = _strided_gradient(parameter)
    return (torch.zeros_like(local_part(parameter)) if grad is None else local_part(grad)).reshape(-1)


def _write_mean(parameter: nn.Parameter, total: Tensor, ranks: int) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    local = local_part(parameter.grad)
    torch.div(total.view(local.shape), ranks, out=local)  # divided while it is copied, which saves a pass


def axes_not_cutting(parameter: Tensor, mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the axes along which the gradient of a parameter is reduced: all but those that cut it (a DTensor).
    Raises: `ShardingError` for a DTensor over ranks that no axes of the mesh make up.
    """
    if not isinstance(parameter, DTensor):
        return tuple(name for name, _ in axes_of_mesh(mesh))
    return _axes_beside(parameter, ranks_in_mesh(parameter.device_mesh), mesh)


def axes_of_copies(parameter: Tensor, mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the axes along which every rank holds the same part, with those of hybrid sharding's copies."""
    if not isinstance(parameter, DTensor):
        return axes_not_cutting(parameter, mesh)
    where = parameter.device_mesh
    cut = [
        n
        for (n, _), placement in zip(axes_of_mesh(where), parameter.placements, strict=True)
        if not placement.is_replicate()
    ]
    if not cut:
        return tuple(name for name, _ in axes_of_mesh(mesh))
    with without_modes():
        ranks = ranks_along(where, cut)
    return _axes_beside(parameter, ranks, mesh)


def _axes_beside(parameter: DTensor, ranks: Sequence[int], mesh: DeviceMesh) -> tuple[str, ...]:
    """Return the axes of the mesh except those that make up these ranks, over which the parameter lies."""
    names, holders = tuple(name for name, _ in axes_of_mesh(mesh)), set(ranks)
    for count in range(1, len(names) + 1):
        for some in combinations(names, count):
            if set(ranks_along(mesh, some)) == holders:
                return tuple(n for n in names if n not in some)
    raise ShardingError(
        f"a DTensor parameter of shape {tuple(parameter.shape)} lies on ranks {sorted(holders)}, which are not axes of "
        f"the mesh {dict(axes_of_mesh(mesh))}; make it on a part of that mesh"
    )


def part_bytes(parameter: Tensor) -> int:
    """Return the bytes of an even part of a parameter, the same on every rank, whose own part may have less."""
    parts = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
    return parameter.numel() * parameter.element_size() // parts


def make_buckets(parameters: Sequence[nn.Parameter], mesh: DeviceMesh, most_bytes: int) -> list[GradientBucket]:
    """Make buckets of at most `most_bytes` (or one parameter), in the order in which backward passes fill them.

    Those begin with the last parameters. A bucket has parameters of one dtype and device that are reduced along the
    same axes, and skips others between them. A parameter of `most_bytes` or more ends all buckets before it: so equal
    blocks with such parameters have equal buckets.
    """
    buckets: list[GradientBucket] = []
    ends: list[int] = []
    under_way: dict[tuple[Any, ...], tuple[int, int]] = {}  # of each kind the bucket's number and its bytes
    for place, p in enumerate(reversed(parameters)):
        axes, size = axes_not_cutting(p, mesh), part_bytes(p)
        if size >= most_bytes:
            under_way.clear()
        kind = p.dtype, p.device, axes
        number, filled = under_way.get(kind, (-1, 0))
        if number < 0 or filled + size > most_bytes:
            number, filled = len(buckets), 0
            buckets.append(GradientBucket([], axes))
            ends.append(place)
        buckets[number].parameters.append(p)
        ends[number], under_way[kind] = place, (number, filled + size)
    return [buckets[number] for number in sorted(range(len(buckets)), key=ends.__getitem__)]
