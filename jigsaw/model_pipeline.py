"""`pipeline`: the layers of a model in stages along a mesh axis, with microbatches that follow each other
through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from jigsaw import comm
from jigsaw.dryrun.stage_balance import balanced_stages
from jigsaw.errors import ShardingError
from jigsaw.nn.weights import is_dtensor
from jigsaw.ops.meeting.plain_operands import AVERAGED_MARK
from jigsaw.parallel.gradients import axes_not_cutting, has_gradient_hooks
from jigsaw.parallel.parallelize import PIPE_MARK, reduced_at_end
from jigsaw.parallel.sharding import ShardingOptions, WeightSharding
from jigsaw.ranks.mesh import axes_of_mesh, mesh_coordinate, ranks_along
from jigsaw.ranks.waiting_ranks import OpenWait
from jigsaw.stages.batch_split import BatchSplit, as_on_paper
from jigsaw.stages.stage_calls import CallWatch
from jigsaw.stages.stage_cuts import (
    StageCuts,
    balanced_begins,
    cut_stages,
    mesh_of_stage,
    parallel_stage,
    stage_of_tensor,
    whole_names,
)
from jigsaw.stages.stage_plan import PaperModel, PipelinePlan
from jigsaw.stages.stage_runner import StageBatch, StageRunner
from jigsaw.tile.tile import Tile


@dataclass(frozen=True)
class PipeSchedule:
    """One of torch's schedules: how many stages a rank has (None: any number from 2), and its requirements."""

    make: Any
    per_rank: int | None
    is_v: bool = False
    parts_backward: bool = False  # gradients of inputs first, those of weights later
    least_batches: int = 0  # a stage


_SCHEDULES = {
    "gpipe": PipeSchedule(pipelining.ScheduleGPipe, 1),
    "1f1b": PipeSchedule(pipelining.Schedule1F1B, 1, least_batches=1),
    "interleaved_1f1b": PipeSchedule(pipelining.ScheduleInterleaved1F1B, None),
    "interleaved_zero_bubble": PipeSchedule(pipelining.ScheduleInterleavedZeroBubble, None, parts_backward=True),
    "zbv": PipeSchedule(pipelining.ScheduleZBVZeroBubble, 2, is_v=True, parts_backward=True),
    "dualpipev": PipeSchedule(pipelining.ScheduleDualPipeV, 2, is_v=True, parts_backward=True, least_batches=1),
}


def pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    loss: Callable[[Any, Any], Tensor],
    microbatches: int = 4,
    schedule: str = "1f1b",
    stages: Sequence[str] | Literal["balanced"] | None = None,
    example: Any = None,
    axis: str = "pipe",
    shard_weights: WeightSharding = False,
    replicate: str | Sequence[str] = (),
    channel: str = "channel",
) -> ModelPipeline:
    """Cut the layers of `model` into stages along the mesh axis `axis`; ``step`` trains on microbatches in turn.

    A rank keeps the parameters of its stages, with the gradients of the whole batch after each step; those of other
    stages move to the meta device.  The model's own forward runs in every stage, up to the call of the module that
    begins the next one, so the model may be written in any way.  Stages follow the order in which the model has its
    modules.  With `example`, the `x` of a step, they follow the order in which it calls them.

    - `stages` names the modules that begin the stages after the first, as ``named_modules()`` does.  By default the
      stages have about equally many parameters, with cuts between elements of ``Sequential`` and ``ModuleList``.
      ``stages="balanced"`` makes stages that take about the same time and fit the device, by a dry run of a microbatch
      of `example`, a tile like the input of a step (`jigsaw.dryrun`).
    - `schedule` is one of torch's: ``"gpipe"``, ``"1f1b"`` (a stage a rank), ``"interleaved_1f1b"``,
      ``"interleaved_zero_bubble"``, ``"zbv"``, ``"dualpipev"`` (two stages a rank, or as many as `stages` makes).
    - `loss` takes the model's output and the target of a microbatch and returns their mean.  The loss of a step is the
      mean over its `microbatches`: that of the whole batch, but for functions of the batch such as batch norm.
    - The other axes of the mesh work within each stage, as `jigsaw.parallelize` has it with `shard_weights`,
      `replicate` and `channel`.
    - A tile that a later stage reads (a skip) travels through the stages between, and so does a plain tensor from a
      module or a tile (a condition, a mean). Every stage makes the plain tensors that come from constants and buffers
      between modules (a mask). Every stage keeps the parameters of a module that has a cut within it (a positional
      embedding of the whole net), and buffers that are read outside of the call of their module.

    *Shapes*: unchanged; a stage is sent ``[batch / microbatches, ...]`` of a tile, per rank the rows that it owns.
    *Sends*: for each microbatch and border between stages on two ranks the tiles that a later stage reads, backward
    their gradients; cut weights and the parts of their gradients.  For each step: the loss, and the gradients of
    weights that several ranks share.
    *Raises*: `ShardingError` for a mesh without the axis, stages that do not fit the model or the schedule,
    `shard_weights` and `replicate` that do not fit the axes of a stage, and parameters that are DTensors over other
    axes or in two stages.  In the first step, for a forward pass that calls modules in another order, uses random
    numbers or a parameter of one stage in another, or has a cut within a checkpointed part.

    Source of the schedules: Huang et al., arXiv 1811.06965 (GPipe); Narayanan et al., arXiv 2104.04473 (1F1B); Qi et
    al., arXiv 2401.10241 (zero bubble); DeepSeek-AI, arXiv 2412.19437 (DualPipe).

    >>> mesh = jigsaw.init_mesh(pipe=1, lat=1)
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.GELU(), torch.nn.Conv2d(8, 3, 1))
    >>> pipe = jigsaw.pipeline(model, mesh, loss=torch.nn.functional.mse_loss, microbatches=2)
    >>> x = jigsaw.shard(torch.randn(4, 3, 9, 16), mesh, (None, None, "lat", None))
    >>> optimizer = torch.optim.AdamW(pipe.parameters())
    >>> loss = pipe.step(x, x)
    >>> optimizer.step()
    >>> [name for name, _ in pipe.named_parameters()]
    ['0.weight', '0.bias', '2.weight', '2.bias']
    """
    sizes = dict(axes_of_mesh(mesh))
    name = schedule.lower().replace("-", "_")
    if axis not in sizes:
        raise ShardingError(
            f"pipeline needs a mesh with the axis {axis!r}, but it has {sizes}; init_mesh({axis}=2, ...)"
        )
    if name not in _SCHEDULES:
        raise ShardingError(f"schedule={schedule!r} is none of {', '.join(map(repr, _SCHEDULES))}")
    how, ranks = _SCHEDULES[name], sizes[axis]
    if shard_weights and how.parts_backward and ranks > 1:
        raise ShardingError(
            f"shard_weights=True with schedule={schedule!r}: it computes gradients of weights after those of inputs, "
            "when FSDP2 has parted the weights again; take schedule='1f1b', 'gpipe' or 'interleaved_1f1b'"
        )
    stage_mesh = mesh_of_stage(mesh, axis)
    options = ShardingOptions.checked(stage_mesh, shard_weights, replicate, None, None)
    for parameter, p in model.named_parameters():
        if is_dtensor(p) and not set(axes_of_mesh(p.device_mesh)) <= set(axes_of_mesh(mesh)) - {(axis, ranks)}:
            raise ShardingError(
                f"parameter {parameter!r} is a DTensor over {dict(axes_of_mesh(p.device_mesh))}, which are no axes of "
                f"a stage, those of {sizes} without {axis!r}: make the layer with the pipeline's mesh, or pass the "
                "plain model and let pipeline cut its weights, with shard_weights=True or an axis 'channel'"
            )

    def order_of_calls(names: Sequence[str]) -> Sequence[str]:
        return names if example is None else _order_of_calls(model, names, mesh, stage_mesh, axis, example)

    count = ranks * (how.per_rank or 2) if ranks > 1 else 1
    begins = _begins(model, mesh, stages, count, example, axis, microbatches, order_of_calls)
    _check_schedule(name, how, ranks, len(begins) + 1, microbatches)
    cuts = cut_stages(model, begins, order_of_calls(whole_names(model, begins)) if example is not None else ())
    return ModelPipeline(model, mesh, stage_mesh, axis, how, cuts, microbatches, loss, options, channel)


def _order_of_calls(
    model: nn.Module, names: Sequence[str], mesh: DeviceMesh, stage_mesh: DeviceMesh, axis: str, example: Any
) -> Sequence[str]:
    """Return those of the modules that the model calls on the example, in order."""
    given: Any = (example if isinstance(example, tuple) else (example,), {})
    split = BatchSplit(mesh, stage_mesh, axis, 1, given)
    paper = PaperModel(model, StageCuts((), dict.fromkeys(names, 0)), stage_mesh)
    return paper.order_of_calls(as_on_paper(pytree.tree_map(split.stage_tile, given)))


def _begins(
    model: nn.Module,
    mesh: DeviceMesh,
    stages: Sequence[str] | None,
    count: int,
    example: Any,
    axis: str,
    microbatches: int,
    order: Callable[[Sequence[str]], Sequence[str]],
) -> tuple[str, ...]:
    """Return the modules that begin the later stages, of which there are `count` where they are not named."""
    if stages == "balanced" and not isinstance(example, Tile):
        raise ShardingError("stages='balanced' needs example=, a tile like the input of a step, for its dry run")
    if isinstance(stages, str) and stages != "balanced":
        raise ShardingError(f"stages={stages!r} must be a list of names of modules, 'balanced' or None")
    if count == 1:
        return ()
    if stages is None:
        return balanced_begins(model, count, order)
    if isinstance(stages, str):
        return balanced_stages(model, example, mesh, axis=axis, stages=count, microbatches=microbatches)
    return tuple(stages)


def _check_schedule(name: str, how: PipeSchedule, ranks: int, stages: int, batches: int) -> None:
    """Check the numbers.  *Raises*: `ShardingError` for stages and microbatches that the schedule cannot have."""
    if batches < 1:
        raise ShardingError(f"microbatches={batches} must be at least 1")
    if ranks == 1:
        return
    each = how.per_rank or max(stages // ranks, 2)
    if stages != each * ranks:
        wanted = f"{how.per_rank * ranks}" if how.per_rank else f"a multiple of {ranks}, at least {2 * ranks}"
        raise ShardingError(
            f"schedule={name!r} on {ranks} ranks has {wanted} stages, but stages= makes {stages}; name one module less "
            "than there are stages"
        )
    if batches < how.least_batches * stages:
        raise ShardingError(f"schedule={name!r} of {stages} stages needs microbatches >= {stages}, not {batches}")
    rounds = max(1, batches // ranks)
    if how.per_rank is None and batches % rounds:
        raise ShardingError(
            f"schedule={name!r} on {ranks} ranks: microbatches={batches} is no multiple of its {rounds} rounds; take a "
            f"multiple of {ranks}"
        )


class ModelPipeline:
    """Stages of a model that this rank has, and the schedule that runs them; `jigsaw.pipeline` makes one.

    >>> mesh = jigsaw.init_mesh(pipe=1)
    >>> pipe = jigsaw.pipeline(torch.nn.Linear(4, 1), mesh, loss=torch.nn.functional.mse_loss, microbatches=1)
    >>> pipe.step(torch.ones(2, 4), torch.ones(2, 1)).shape
    torch.Size([])
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        stage_mesh: DeviceMesh,
        axis: str,
        how: PipeSchedule,
        cuts: StageCuts,
        microbatches: int,
        loss: Callable[[Any, Any], Tensor],
        sharding: ShardingOptions | None,
        channel: str,
    ) -> None:
        self.model, self.mesh, self.stage_mesh, self.microbatches = model, mesh, stage_mesh, microbatches
        self._axis, self._how = axis, how
        self._ranks = dict(axes_of_mesh(mesh))[axis]
        self._here = mesh_coordinate(mesh)[[name for name, _ in axes_of_mesh(mesh)].index(axis)]
        self._cuts = cuts
        self._check_alike()
        self.names_of_all_stages = list(model.state_dict())
        self.stages = self._stages_at(self._here)
        self._paper = PaperModel(model, self._cuts, self.stage_mesh)
        self._keep_own_stages(sharding, channel)
        elsewhere = {
            name
            for name, stage in self._cuts.stage_of.items()
            if stage not in self.stages and next(model.get_submodule(name).parameters(), None) is not None
        }
        watch = CallWatch(model, self._cuts, elsewhere)
        self._runners = [StageRunner(watch, stage, self.stage_mesh, self._paper.mode, loss) for stage in self.stages]
        if sharding is not None and sharding.replicate:
            for runner in self._runners:
                own = [model.get_submodule(n) for n, stage in self._cuts.stage_of.items() if stage == runner.stage]
                runner.copied_units = [m for each in own for m in each.modules() if isinstance(m, FSDPModule)]
                for unit in runner.copied_units:
                    # all parameters of a unit are summed in one tensor, whichever of them a microbatch uses
                    unit.set_reduce_scatter_unused_params(True, recurse=False)
        self._built: dict[Any, tuple[PipelinePlan, Any]] = {}
        self._spread = set[str]()

    def _stages_at(self, place: int) -> list[int]:
        """Return the stages of a rank of the axis: loops over the ranks, or there and back."""
        count = self._cuts.stages
        return [place, count - 1 - place] if self._how.is_v and self._ranks > 1 else [*range(place, count, self._ranks)]

    def _check_alike(self) -> None:
        named = [(name, tuple(p.shape), str(p.dtype)) for name, p in self.model.named_parameters()]
        mine = (named, self._cuts.begins, self.microbatches, self._how.make.__name__)
        for at, theirs in enumerate(comm.all_gather_object(self.mesh, mine)):
            if theirs != mine:
                raise ShardingError(
                    f"pipeline needs the same model, stages, microbatches and schedule on every rank, but rank {at} of "
                    "the mesh passed others"
                )

    def _keep_own_stages(self, sharding: ShardingOptions | None, channel: str) -> None:
        """Move the weights of other stages to the meta device, and prepare the gradients of those that stay."""
        stage_of = self._cuts.stage_of
        whole = {name: self.model.get_submodule(name) for name in stage_of}
        within = {p for module in whole.values() for p in module.parameters()}
        self._shared = {name: p for name, p in self.model.named_parameters() if p not in within}
        for name, module in whole.items():
            if stage_of[name] not in self.stages:
                module.to("meta")
        own = [module for name, module in whole.items() if stage_of[name] in self.stages]
        own = [module for module in own if next(module.parameters(), None) is not None]
        if sharding is not None:
            self._join_groups(sharding, channel)
        self._holder = parallel_stage(own, self.stage_mesh, sharding, channel)
        axes = [name for name, _ in axes_of_mesh(self.mesh)]
        with torch.no_grad():
            for p in self._shared.values():
                whole_value = p.detach().contiguous()
                comm.broadcast_first(whole_value, self.mesh, axes)
                p.copy_(whole_value)
                setattr(p, AVERAGED_MARK, self.stage_mesh.size())
        for name, p in self.named_parameters():
            setattr(p, PIPE_MARK, (self.mesh, self._axis, name not in self._shared or self._here == 0))

    def _join_groups(self, sharding: ShardingOptions, channel: str) -> None:
        """Make the groups that any stage cuts weights over, because all ranks of the job must make each.  Some stages
        may have nothing that `channel` cuts, or no DTensor.
        """
        names = tuple(name for name, _ in axes_of_mesh(self.stage_mesh))
        cut = (axes_not_cutting(p, self.stage_mesh) for p in self.model.parameters() if is_dtensor(p))
        for axes in dict.fromkeys([names, tuple(name for name in names if name != channel), *cut]):
            if comm.rank_count(self.stage_mesh, [name for name in axes if name not in sharding.replicate]) > 1:
                sharding.mesh_along(self.stage_mesh, axes)

    # -- parameters ---------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of this rank's stages, by the model's own names."""
        for name, p in self.model.named_parameters():
            if name in self._shared or self._is_own(name):
                yield name, p

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of this rank's stages, for its optimizer."""
        for _, p in self.named_parameters():
            yield p

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters and buffers of this rank's stages, by the model's own names."""
        return {name: x for name, x in self.model.state_dict().items() if self._is_own(name)}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load as a module does, for this rank's stages: the state of other stages is left out."""
        own = {name: x for name, x in state_dict.items() if self._is_own(name)}
        missing = [name for name in self.state_dict() if name not in own]
        if strict and missing:
            raise ShardingError(f"load_state_dict of a pipeline: {missing[0]!r}, of a stage of this rank, is missing")
        self._spread.clear()
        return self.model.load_state_dict(own, strict=False)

    def train(self, mode: bool = True) -> ModelPipeline:
        """Set the training mode, as a module does."""
        self.model.train(mode)
        return self

    def eval(self) -> ModelPipeline:
        """Set the evaluation mode, as a module does."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients, as a module does."""
        for p in self.parameters():
            if set_to_none:
                p.grad = None
            elif p.grad is not None:
                p.grad.zero_()

    def _is_own(self, name: str) -> bool:
        stage = self._stage_of(name)
        return stage is None or stage in self.stages

    def _stage_of(self, name: str) -> int | None:
        """Return the stage of a parameter or buffer, None for one that every stage has."""
        return stage_of_tensor(name, self._cuts)

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, x: Any, y: Any = None, **inputs: Any) -> Tensor:
        """Run all microbatches forward and backward; return the loss, the same on every rank.  Gradients add to
        ``.grad``.

        `x` is the input (a tuple: several), `y` the target, `inputs` the model's keyword arguments: tiles of the mesh
        or of ``pipe.stage_mesh``, whole tensors, or nests of them.  Every rank passes all; only ranks of the stages
        that use them read their values.  Every microbatch gets the whole of an input whose dim 0 is not the batch.  The
        loss has the type of the model's parameters.  Under ``torch.no_grad()`` only the loss is computed.
        """
        given: Any = (x if isinstance(x, tuple) else (x,), inputs)
        split = BatchSplit(self.mesh, self.stage_mesh, self._axis, self.microbatches, given)
        given = pytree.tree_map(split.stage_tile, given)
        target = pytree.tree_map_only(Tile, split.stage_tile, y)
        batches = split.parts_of(given, is_input=True)
        batch = StageBatch(batches, as_on_paper(batches[0]), split.parts_of(target))
        plan, schedule = self._plan_for(batch)
        self._spread_buffers(plan)
        losses = self._run(plan, schedule, batch)
        total = torch.stack([each.detach().double() for each in losses]).sum() if losses else torch.zeros(()).double()
        total = total.to(self.mesh.device_type)
        if self._ranks > 1:
            total = comm.all_reduce(total, self.mesh, [self._axis])
        floats = (p.dtype for p in self.model.parameters() if p.is_floating_point())
        return total.to(next(floats, torch.get_default_dtype()))

    def _plan_for(self, batch: StageBatch) -> tuple[PipelinePlan, Any]:
        device = self.mesh.device_type
        autocast = device, torch.get_autocast_dtype(device), torch.is_autocast_enabled(device)
        training = {name: module.training for name, module in self.model.named_modules()}
        leaves, spec = pytree.tree_flatten(batch.on_paper)
        key = (tuple(leaves), spec, autocast, tuple(training.values()), torch.is_grad_enabled())
        if key not in self._built:
            with torch.autocast(*autocast, cache_enabled=False):
                plan = self._paper.plan(batch.on_paper, training)
            self._built[key] = plan, self._schedule(plan) if self._ranks > 1 else None
        for runner in self._runners:
            runner.autocast = autocast
        return self._built[key]

    def _spread_buffers(self, plan: PipelinePlan) -> None:
        """Give every rank the buffers that are read outside of the calls of their modules: tables, as a rule.

        *Sends*: each once, and again after `load_state_dict`.
        """
        buffers = dict(self.model.named_buffers())
        for name in sorted(plan.read_apart.keys() & buffers.keys() - self._spread):
            x, is_own = buffers[name], self._is_own(name)
            mine = x if is_own else torch.zeros(x.shape, dtype=x.dtype, device=self.mesh.device_type)
            if self._ranks > 1:
                whole = comm.all_reduce(mine, self.mesh, [self._axis])
                parent, _, key = name.rpartition(".")
                if not is_own:
                    self.model.get_submodule(parent)._buffers[key] = whole  # pyright: ignore[reportPrivateUsage]
            self._spread.add(name)

    def _schedule(self, plan: PipelinePlan) -> Any:
        device, group = torch.device(self.mesh.device_type), self.mesh.get_group(self._axis)
        made: list[Any] = []
        for runner in self._runners:
            given = self._messages(plan, runner.stage)
            last = runner.stage + 1 == self._cuts.stages
            out = torch.empty((), device="meta", requires_grad=True) if last else self._messages(plan, runner.stage + 1)
            made.append(
                pipelining.PipelineStage(
                    runner,
                    runner.stage,
                    self._cuts.stages,
                    device,
                    input_args=given,
                    output_args=out,
                    group=group,
                )
            )
        stages: Any = made[0] if self._how.per_rank == 1 else made
        return self._how.make(stages, n_microbatches=self.microbatches, loss_fn=_as_it_is, scale_grads=False)

    def _messages(self, plan: PipelinePlan, stage: int) -> tuple[Tensor, ...]:
        """Return the tensors that a stage gets for a microbatch, without values."""
        here = mesh_coordinate(self.stage_mesh)
        return tuple(
            torch.empty(each.sent_layout.local_shape(here), dtype=each.dtype, device="meta").requires_grad_(
                each.dtype.is_floating_point or each.dtype.is_complex
            )
            for each in plan.sent[stage]
        )

    def _count_messages(self, plan: PipelinePlan) -> None:
        """Count what the schedule sends in a step, because torch's schedules send without `jigsaw.comm`."""
        places = {stage: place for place in range(self._ranks) for stage in self._stages_at(place)}
        with_grad = torch.is_grad_enabled()
        for stage in self.stages:
            before, after = (
                [] if places.get(other, self._here) == self._here else self._messages(plan, border)
                for other, border in ((stage - 1, stage), (stage + 1, stage + 1))
            )
            back = [[x for x in tensors if x.requires_grad and with_grad] for tensors in (before, after)]
            out, taken = [*after, *back[0]], [*before, *back[1]]
            sent, received = (self.microbatches * sum(x.nbytes for x in tensors) for tensors in (out, taken))
            if out or taken:
                comm.record_call("pipeline", sent, received, self.microbatches * len(out))

    def _run(self, plan: PipelinePlan, schedule: Any, batch: StageBatch) -> list[Tensor]:
        """Return the losses of the microbatches, where the last stage is."""
        own = dict(self.named_parameters())
        for runner in self._runners:
            runner.plan, runner.batch = plan, batch
            runner.owned = {n: p for n, p in own.items() if self._stage_of(n) in (None, runner.stage)}
        hooked = next((name for name, p in own.items() if has_gradient_hooks(p)), None)
        if hooked is not None:
            raise ShardingError(
                f"parameter {hooked!r} of a pipeline has a hook on its gradient, which would see that of each "
                "microbatch: pipe.step sums them and averages over ranks at its end; remove the hook, and read .grad "
                "or step the optimizer after pipe.step"
            )
        before = {name: p.grad for name, p in self._shared.items()}
        for p in self._shared.values():
            p.grad = None
        places, losses = torch.arange(self.microbatches), list[Tensor]()
        with torch.autocast(self.mesh.device_type, enabled=False), reduced_at_end(self._holder):
            if schedule is None:
                losses = [self._run_alone(place) for place in places]
            else:
                self._count_messages(plan)
                run = schedule.step if torch.is_grad_enabled() else schedule.eval
                wait = OpenWait("a step of a pipeline", ranks_along(self.mesh, self._axis))
                try:
                    run(target=places, losses=losses, return_outputs=False, place=places)
                except RuntimeError as error:
                    if error.__cause__ is not None:  # torch wraps the errors of a stage
                        raise error.__cause__ from None
                    with wait:
                        raise
        self._reduce_shared(before)
        return losses

    def _run_alone(self, place: Tensor) -> Tensor:
        loss = self._runners[0](place=place)
        if torch.is_grad_enabled():
            loss.backward()
        return loss.detach()

    def _reduce_shared(self, before: Mapping[str, Tensor | None]) -> None:
        """Sum the gradients of every stage for the parameters that all of them have, averaged within each stage."""
        axes = [name for name, _ in axes_of_mesh(self.mesh)]
        for name, p in self._shared.items():
            if p.requires_grad and torch.is_grad_enabled():
                mine = torch.zeros_like(p) if p.grad is None else p.grad
                total = comm.all_reduce(mine, self.mesh, axes) / self.stage_mesh.size()
                known = before[name]
                p.grad = total if known is None else known + total
            else:
                p.grad = before[name]


def _as_it_is(loss: Tensor, place: Tensor) -> Tensor:
    return loss
