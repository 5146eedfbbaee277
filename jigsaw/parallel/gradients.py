"""Reduction of each rank's part of a gradient to the whole one, during the backward pass.

A parameter whose gradient will be averaged is *marked*.  Where it meets a Tile its part is scaled up by the number of
ranks (`jigsaw.ops.meeting.plain_operands`). So the mean over the ranks is the gradient.  Where it meets only plain
tensors, which are the same on every rank, each rank has the whole gradient. The mean does not change it.  A sum would
count that P times, and would count again what an earlier backward pass had reduced; the mean is right for both.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from jigsaw import comm
from jigsaw.comm.connections import connect_sums
from jigsaw.errors import ShardingError
from jigsaw.ops.into_torch.reentrant import (
    at_end_of_pass,
    innermost_pass,
    is_recomputing,
    is_taken_from_pass,
    outermost_pass,
)
from jigsaw.ops.meeting.gradient_blocks import record_blocks, recorded_blocks
from jigsaw.ops.meeting.plain_operands import AVERAGED_MARK
from jigsaw.parallel.gradient_buckets import GradientBucket, axes_not_cutting, is_lent_alone, make_buckets, part_bytes
from jigsaw.parallel.late_parameters import gathered_parameters, note_parameters, refuse_late_parameters
from jigsaw.tile.tensor_shell import GRAPH_THROUGH_UNIT
from jigsaw.torch_internals.autograd import gradient_hooks, hooks_behind_gradient
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


_SPARSE = "a sparse gradient cannot be reduced in a bucket; use torch.nn.Embedding(sparse=False)"


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


# -- the reducer ------------------------------------------------------------------------------------------------------


class _EndOfPass:
    """Callback at the end of a backward pass. Autograd drops it where the pass raises, before the user's own code goes
    on: then it gives back, so that a `zero_grad` there reaches all gradients.
    """

    def __init__(self, finish: Callable[[], None], give_back: Callable[[], None]) -> None:
        self._finish, self._give_back, self._is_over = finish, give_back, False

    def __call__(self) -> None:
        self._is_over = True
        self._finish()

    def __del__(self) -> None:
        if not self._is_over:
            # a message that failed, too, is raised by the next forward pass, which waits for it again
            with suppress(Exception):
                self._give_back()


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
        large = [p for b in self._buckets for p in b.parameters if type(p) is nn.Parameter and is_lent_alone(p)]
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
        sizes = [[part_bytes(p) for p in group if p in averaged] for group in groups]
        return all(not own or max(own) >= self._bytes for own in sizes)

    def begin(self, module: nn.Module, args: Any) -> None:
        """Forget the remains of a backward pass that raised; called before the forward pass."""
        # gradients are not lent under DDP, which reads each in place as soon as it arrives
        self._lends = wrapper_around() is None
        if outermost_pass() == -1 and self._task != -1:
            self._give_back()

    def _give_back(self) -> None:
        """Give parameters back what was taken from them in a backward pass that raised."""
        with torch.no_grad():
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
            at_end_of_pass(_EndOfPass(self._finish, self._give_back))
        # buckets leave in their order, so that two ranks that fill them in different orders still meet
        bucket.arrived.add(parameter)
        bucket.late = bucket.pending is not None
        if has_gradient_hooks(parameter):
            # Later hooks may step and remove the gradient, so the bucket is sent after them. It is whole by now, and no
            # block of it travels.
            if record := recorded_blocks(parameter):
                record.forget()
            return
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
