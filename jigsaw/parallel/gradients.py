"""Reduction of each rank's part of a gradient to the whole one: buckets of parameters, reduced during the backward
pass.

A parameter whose gradient will be averaged is *marked*.  Where it meets a Tile its part is scaled up by the number of
ranks (`jigsaw.ops.meeting.plain_operands`). So the mean over the ranks is the gradient.  Where it meets only plain
tensors, which are the same on every rank, each rank has the whole gradient. The mean does not change it.  A sum would
count that P times, and would count again what an earlier backward pass had reduced; the mean is right for both.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import combinations, groupby
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from jigsaw import comm
from jigsaw.comm.connections import connect_sums
from jigsaw.comm.wire_values import is_on_accelerator, lie_in_one_memory, values_on_device
from jigsaw.errors import ShardingError
from jigsaw.ops.into_torch.reentrant import (
    at_end_of_pass,
    innermost_pass,
    is_recomputing,
    is_taken_from_pass,
    outermost_pass,
)
from jigsaw.ops.meeting.gradient_blocks import TravelingBlock, record_blocks, recorded_blocks
from jigsaw.ops.meeting.plain_operands import AVERAGED_MARK
from jigsaw.parallel.late_parameters import gathered_parameters, note_parameters, refuse_late_parameters
from jigsaw.ranks.mesh import axes_of_mesh, ranks_along, ranks_in_mesh
from jigsaw.tile.tensor_shell import GRAPH_THROUGH_UNIT
from jigsaw.torch_internals.autograd import gradient_hooks, hooks_behind_gradient, is_zero_tensor
from jigsaw.torch_internals.dispatch import without_modes
from jigsaw.torch_internals.groups import is_before_backward, wrapper_around

# -- marks ------------------------------------------------------------------------------------------------------------


def mark_averaged(model: nn.Module, ranks: int) -> None:
    """Mark the parameters of `model`, now and whenever a module runs: `fully_shard` swaps them for others meanwhile."""
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            _mark_parameter(parameter, ranks)
        note_parameters(module)
        module.register_forward_pre_hook(partial(_before_forward, ranks))


def _before_forward(ranks: int, module: nn.Module, args: Any) -> None:
    if isinstance(module, FSDPModule):
        _check_recomputed_once(module)
        # it has gathered the parameters of all modules in it, even of those whose forward is not called
        for parameter in gathered_parameters(module):
            _mark_parameter(parameter, ranks)
            if not hasattr(parameter, _OWN_HOOKS):
                _refuse_early_looks(parameter)
        return
    refuse_late_parameters(module)


def _check_recomputed_once(unit: FSDPModule) -> None:
    """Raise where a unit that was behind in a backward pass runs again in it: FSDP2 (torch 2.13) then hooks nothing to
    its inputs, and where reentrant checkpointing runs it a second time, gradients would be lost.
    """
    if is_recomputing() and is_before_backward(unit):
        raise ShardingError(
            f"checkpoint(use_reentrant=True) runs {type(unit).__name__}, a unit of weights that are gathered at once, "
            "a second time in one backward pass: FSDP2 would lose gradients; pass use_reentrant=False, or leave it out "
            "of parallelize(units=...)"
        )


def _mark_parameter(parameter: nn.Parameter, ranks: int) -> None:
    # along axes that cut a DTensor its gradient is already complete, so it is averaged only over the other axes
    cut = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
    setattr(parameter, AVERAGED_MARK, max(ranks // cut, 1))


# -- who looks at a gradient before it is whole -----------------------------------------------------------------------

_OWN_HOOKS = "_jigsaw_own_gradient_hooks"


def has_gradient_hooks(parameter: Any) -> bool:
    """Say whether there are hooks on the gradient of a parameter beside those of `parallelize`."""
    tensor_hooks, hooks_behind = gradient_hooks(parameter) or (), hooks_behind_gradient(parameter) or ()
    return (len(tensor_hooks), len(hooks_behind)) != getattr(parameter, _OWN_HOOKS, (0, 0))


class WholeGradients:
    """Early reduction of gradients for other hooks on a parameter, `torch.autograd.grad`, and all with
    ``create_graph=True``.

    A hook on each parameter runs before all others and takes the mean over the ranks at once.  Then ``.grad`` is the
    same on all ranks, and the bucket's mean does not change it.

    *Sends*: one all-reduce for each gradient that is read early. *Raises*: `RanksDifferError` where ranks take
    gradients of different parameters.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh, own_hooks: int) -> None:
        self.waits_for_step = False  # True in a pipeline, which sums gradients of microbatches and reduces them once
        self._mesh, self._pass, self._is_taken = mesh, -1, False
        for name, p in parameters.items():
            if p.is_floating_point() or p.is_complex():
                setattr(p, _OWN_HOOKS, (1, own_hooks))
                needs = p.requires_grad
                p.requires_grad_()  # a frozen parameter may be trained later; a hook needs this
                p.register_hook(partial(self._reduced, name, p))
                p.requires_grad_(needs)

    def _reduced(self, name: str, parameter: nn.Parameter, grad: Tensor) -> Tensor | None:
        if self.waits_for_step:
            return None
        if self._pass != innermost_pass():
            self._pass, self._is_taken = innermost_pass(), is_taken_from_pass(parameter)
        if not (self._is_taken or torch.is_grad_enabled() or has_gradient_hooks(parameter)):
            return None
        if grad.layout != torch.strided:
            raise ShardingError(_SPARSE)
        return _mean_of_gradients(grad, name, parameter, self._mesh)


def _mean_of_gradients(grad: Tensor, name: str, parameter: nn.Parameter, mesh: DeviceMesh) -> Tensor:
    axes, same = axes_not_cutting(parameter, mesh), ("the gradient of", name, tuple(parameter.shape))
    if not (isinstance(grad, DTensor) and isinstance(parameter, DTensor)):
        return comm.mean_of_shares(grad, mesh, axes, same)
    if grad.placements != parameter.placements:
        grad = grad.redistribute(placements=parameter.placements)
    local = comm.mean_of_shares(grad.to_local(), mesh, axes, same)
    where = grad.device_mesh, grad.placements
    return DTensor.from_local(local, *where, run_check=False, shape=grad.shape, stride=grad.stride())


def refuse_hooks(parameters: Iterable[nn.Parameter]) -> None:
    """Let `register_hook` raise on cut parameters, whose gradients FSDP2 accumulates elsewhere, calling no hook."""
    parameter: Any
    for parameter in parameters:
        setattr(parameter, _OWN_HOOKS, (len(gradient_hooks(parameter) or ()), 0))
        parameter.register_hook = _refuse_hook


def _refuse_hook(hook: Any) -> NoReturn:
    raise ShardingError(
        "register_hook on a parameter that shard_weights= cuts would never be called: its gradient is summed and cut "
        "before it arrives; use register_post_accumulate_grad_hook, which sees this rank's part of the whole gradient "
        "in .grad, or shard_weights=False"
    )


def _refuse_early_looks(gathered: nn.Parameter) -> None:
    """Let a backward pass raise where a reader would see the gradient of gathered weights, which is a part."""
    if not gathered.requires_grad:
        return

    def look(grad: Tensor) -> None:
        if torch.is_grad_enabled():
            raise ShardingError(GRAPH_THROUGH_UNIT)
        # a leaf that was frozen meanwhile gets none
        if has_gradient_hooks(gathered) or (gathered.requires_grad and is_taken_from_pass(gathered)):
            raise ShardingError(
                "a hook on a weight that is gathered for one forward pass (shard_weights=), or torch.autograd.grad of "
                "it, would see a part of its gradient; call loss.backward(), and use .grad of the parameter outside of "
                "the forward pass, or its register_post_accumulate_grad_hook"
            )

    setattr(gathered, _OWN_HOOKS, (1, 0))
    gathered.register_hook(look)


# -- buckets ----------------------------------------------------------------------------------------------------------


def local_part(x: Tensor) -> Tensor:
    """Return this rank's part of a DTensor, not differentiable; any other tensor as it is."""
    if not isinstance(x, DTensor):
        return x.detach()
    with torch.no_grad():
        return x.to_local()


_SPARSE = "a sparse gradient cannot be reduced in a bucket; use torch.nn.Embedding(sparse=False)"
_LENT_BYTES = 2**20  # bytes of a gradient that is summed in place, at the price of one more message


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
        self.blocks = self._start_blocks(trained, lends)
        apart = {block.parameter for block in self.blocks}
        self.sent = [p for p in trained if p not in apart] if apart else trained
        self.pending, self.flat, self.late = (), None, False
        if trained:
            like = local_part(trained[0])
            wide = torch.float32 if like.dtype in (torch.bfloat16, torch.float16) else like.dtype
            self.own_flags = [p.grad is not None for p in self.sent] + [not block.is_alone for block in self.blocks]
            self.flags = values_on_device(self.own_flags, wide, like.device)
            if lends and len(self.sent) == 1 and local_part(self.sent[0]).nbytes >= _LENT_BYTES:
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


def _flat_gradient(parameter: nn.Parameter) -> Tensor:
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(local_part(parameter)).reshape(-1)
    if isinstance(grad, DTensor) and isinstance(parameter, DTensor) and grad.placements != parameter.placements:
        grad = parameter.grad = grad.redistribute(placements=parameter.placements)
    if is_zero_tensor(local_part(grad)):  # autograd's zeros without memory, as those of torch.sgn
        grad = parameter.grad = grad.clone()
    return local_part(grad).reshape(-1)


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


def make_buckets(parameters: Sequence[nn.Parameter], mesh: DeviceMesh, most_bytes: int) -> list[GradientBucket]:
    """Make buckets of at most `most_bytes` (or one parameter), last parameters first, as backward passes find them."""

    def kind(p: nn.Parameter) -> tuple[Any, ...]:
        return p.dtype, p.device, axes_not_cutting(p, mesh)

    buckets: list[GradientBucket] = []
    for (_, _, axes), group in groupby(reversed(parameters), kind):
        size = most_bytes + 1  # the first parameter opens a bucket, even if no row of it lies on this rank
        for p in group:
            part_size = local_part(p).nbytes
            if size + part_size > most_bytes:
                buckets.append(GradientBucket([], axes))
                size = 0
            buckets[-1].parameters.append(p)
            size += part_size
    return buckets


# -- the reducer ------------------------------------------------------------------------------------------------------


class GradientReducer:
    """Average of gradients over the mesh in every backward pass: one all-reduce a bucket, begun as soon as it is full.

    Buckets leave in one order on every rank. All of them leave in every backward pass that reaches any. So ranks cannot
    wait forever for a parameter that one of them did not use.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], mesh: DeviceMesh, bucket_bytes: int) -> None:
        self.enabled, self._lends = True, True
        self.early = WholeGradients(parameters if mesh.size() > 1 else {}, mesh, own_hooks=1)
        self._mesh, self._bytes = mesh, bucket_bytes
        self._parameters = dict(parameters)
        # on a single rank gradients are whole, so buckets would only copy them
        averaged = self._parameters.values() if mesh.size() > 1 else ()
        self._buckets = make_buckets(
            [p for p in averaged if p.is_floating_point() or p.is_complex()], mesh, bucket_bytes
        )
        self._next = 0
        self._task = -1
        large = [p for b in self._buckets for p in b.parameters if type(p) is nn.Parameter and p.nbytes >= _LENT_BYTES]
        connect_sums(mesh, dict.fromkeys(bucket.axes for bucket in self._buckets), bool(large))
        for p in large:
            record_blocks(p, mesh)
        for bucket in self._buckets:
            for p in bucket.parameters:
                needs = p.requires_grad
                p.requires_grad_()  # a frozen parameter may be trained later; a hook needs this
                p.register_post_accumulate_grad_hook(partial(self._arrived, bucket))
                p.requires_grad_(needs)

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientReducer:
        copied = {name: copy.deepcopy(p, memo) for name, p in self._parameters.items()}
        for name, p in copied.items():
            setattr(p, AVERAGED_MARK, getattr(self._parameters[name], AVERAGED_MARK))
        return GradientReducer(copied, self._mesh, self._bytes)

    def __reduce__(self) -> Any:
        raise TypeError(
            "a model that went through jigsaw.parallelize cannot be pickled, as its mesh is this process's own; "
            "save model.state_dict()"
        )

    def ends_alike(self, groups: Sequence[Sequence[nn.Parameter]]) -> bool:
        """Say whether buckets end alike in groups of equal parameters: one that fills a bucket begins the next."""
        averaged = {p for bucket in self._buckets for p in bucket.parameters}
        sizes = [[local_part(p).nbytes for p in group if p in averaged] for group in groups]
        return all(not own or max(own) >= self._bytes for own in sizes)

    def begin(self, module: nn.Module, args: Any) -> None:
        """Forget the remains of a backward pass that raised; called before the forward pass."""
        # gradients are not lent under DDP, which reads each in place as soon as it arrives
        self._lends = wrapper_around() is None
        if outermost_pass() == -1 and self._task != -1:
            for bucket in self._buckets:
                bucket.settle(comm.rank_count(self._mesh, bucket.axes))
                bucket.forget()
            self._next, self._task = 0, -1

    def hold_back(self) -> None:
        """Let backward passes send nothing, until `enabled` is True again."""
        self.enabled = False
        for bucket in self._buckets:
            # what requires a gradient is the same on every rank, and who has one may not be
            bucket.owed |= {p for p in bucket.parameters if p.requires_grad}

    def reduce_now(self) -> None:
        """Average the gradients outside of a backward pass, for ways to compute them that call no hooks."""
        with torch.no_grad():
            for bucket in self._buckets:
                bucket.launch(self._mesh, self._lends)
            for bucket in self._buckets:
                bucket.finish(self._mesh)

    def _arrived(self, bucket: GradientBucket, parameter: nn.Parameter) -> None:
        if not self.enabled:
            if record := recorded_blocks(parameter):
                record.forget()
            return
        if parameter.grad is not None and parameter.grad.layout != torch.strided:
            raise ShardingError(_SPARSE)
        task = outermost_pass()
        if task != self._task:
            self._task = task
            at_end_of_pass(self._finish)
        # buckets leave in their order, so that two ranks that fill them in different orders still meet
        bucket.arrived.add(parameter)
        bucket.late = bucket.pending is not None
        if has_gradient_hooks(parameter):
            return  # later hooks may step and remove the gradient, so the bucket is sent after them
        while self._next < len(self._buckets) and self._buckets[self._next].is_full():
            self._launch_next()

    def _launch_next(self) -> None:
        with torch.no_grad():
            self._buckets[self._next].launch(self._mesh, self._lends)
        self._next += 1

    def _finish(self) -> None:
        if self._next == 0 and not any(b.arrived for b in self._buckets):
            return  # a backward pass within this one has already finished the buckets
        # send buckets that this rank did not fill, too: other ranks may have filled them, and wait
        while self._next < len(self._buckets):
            self._launch_next()
        with torch.no_grad():
            for bucket in self._buckets:
                if bucket.late:  # its copy is out of date; the mean over the means and the later parts is exact
                    bucket.settle(comm.rank_count(self._mesh, bucket.axes))
                    bucket.launch(self._mesh, self._lends)
            for bucket in self._buckets:
                bucket.finish(self._mesh)
        self._next, self._task = 0, -1
