"""`pipeline`: the layers of a model in stages along a mesh axis, with microbatches that follow each other
through them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.comm.agreement import told_where_different
from jigsaw.dryrun.pipeline_estimate import balanced_stages
from jigsaw.errors import ShardingError
from jigsaw.geometry.axis_names import CHANNEL_AXIS, PIPE_AXIS
from jigsaw.parallel.channel_parallel import TensorPlan, completed_plan, planned_layers
from jigsaw.parallel.gradients import has_gradient_hooks
from jigsaw.parallel.parallelize import reduced_at_end
from jigsaw.parallel.sharding import ShardingOptions, WeightSharding
from jigsaw.ranks.mesh import axes_of_mesh, mesh_coordinate, ranks_along
from jigsaw.ranks.waiting_ranks import OpenWait
from jigsaw.stages.own_stages import PIPE_SCHEDULES, OwnStages, PipeSchedule, PlacedStage, check_schedule
from jigsaw.stages.stage_calls import BatchSplit, as_on_paper
from jigsaw.stages.stage_cuts import (
    StageCuts,
    balanced_begins,
    cut_stages,
    mesh_of_stage,
    whole_names,
)
from jigsaw.stages.stage_plan import PaperModel, PipelinePlan
from jigsaw.stages.stage_runner import StageBatch, StageRunner
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.placements import is_dtensor


def pipeline(
    model: nn.Module,
    mesh: DeviceMesh,
    *,
    loss: Callable[[Any, Any], Tensor],
    microbatches: int = 4,
    schedule: str = "1f1b",
    stages: Sequence[str] | Literal["balanced"] | None = None,
    example: Any = None,
    example_kwargs: Mapping[str, Any] | None = None,
    axis: str = PIPE_AXIS,
    shard_weights: WeightSharding = False,
    replicate: str | Sequence[str] = (),
    channel: str = CHANNEL_AXIS,
    tensor: TensorPlan | None = None,
    gather_again: bool = False,
) -> ModelPipeline:
    """Cut the layers of `model` into stages along the mesh axis `axis`; ``step`` trains on microbatches in turn.

    A rank keeps the parameters of its stages, with the gradients of the whole batch after each step; those of other
    stages move to the meta device.  The model's own forward runs in every stage, up to the call of the module that
    begins the next one. So the model may be written in any way.  Stages follow the order in which the model has its
    modules.  With `example`, the `x` of a step, and `example_kwargs`, its keyword arguments, they follow the order in
    which it calls them.

    - `stages` names the modules that begin the stages after the first, as ``named_modules()`` does.  By default the
      stages have about equally many parameters, with cuts between elements of ``Sequential`` and ``ModuleList``.
      ``stages="balanced"`` makes stages that take about the same time and fit the device. It makes a dry run of a
      microbatch of `example`, a tile like the input of a step (`jigsaw.dryrun`).
    - `schedule` is one of torch's: ``"gpipe"``, ``"1f1b"`` (a stage a rank), ``"interleaved_1f1b"``,
      ``"interleaved_zero_bubble"``, ``"zbv"``, ``"dualpipev"`` (two stages a rank, or as many as `stages` makes).
    - `loss` takes the model's output and the target of a microbatch and returns their mean.  The loss of a step is the
      mean over its `microbatches`: that of the whole batch, but for functions of the batch such as batch norm. Of a
      mean over a count that differs, as with ``ignore_index``, return the sum times `microbatches` over the count of
      the whole batch.
    - The other axes of the mesh work within each stage, as `jigsaw.parallelize` has it with `shard_weights`,
      `replicate`, `channel`, `tensor` and `gather_again`. Patterns of `tensor` are of names in the whole model.
    - A tile that a later stage reads (a skip) travels through the stages between. So does a plain tensor from a module
      or a tile (a condition, a mean). Every stage makes the plain tensors that come from constants and buffers between
      modules (a mask). A module that has a cut within it keeps its parameters in every stage (a positional embedding of
      the whole net). So do buffers that are read outside of the call of their module.

    *Shapes*: unchanged; a stage is sent ``[batch / microbatches, ...]`` of a tile, per rank the rows that it owns.
    *Sends*: for each microbatch and border between stages on two ranks the tiles that a later stage reads, backward
    their gradients; cut weights and the parts of their gradients.  For each step: the loss, and the gradients of
    weights that several ranks share.
    *Raises*: `ShardingError` for a mesh without the axis, and stages that do not fit the model or the schedule.  Also
    for `shard_weights` and `replicate` that do not fit the axes of a stage, and DTensors over other axes or in two
    stages.  In the first step, for a forward pass that calls modules in another order, and for a checkpointed part with
    a cut within it.  Also for random numbers or a parameter of one stage that another uses.

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
    if name not in PIPE_SCHEDULES:
        raise ShardingError(f"schedule={schedule!r} is none of {', '.join(map(repr, PIPE_SCHEDULES))}")
    pipe_schedule, ranks = PIPE_SCHEDULES[name], sizes[axis]
    if shard_weights and pipe_schedule.parts_backward and ranks > 1:
        raise ShardingError(
            f"shard_weights=True with schedule={schedule!r}: it computes gradients of weights after those of inputs, "
            "when FSDP2 has parted the weights again; take schedule='1f1b', 'gpipe' or 'interleaved_1f1b'"
        )
    stage_mesh = mesh_of_stage(mesh, axis)
    options = ShardingOptions.checked(stage_mesh, shard_weights, replicate, None, None)
    for parameter, p in model.named_parameters():
        if is_dtensor(p) and not set(axes_of_mesh(p.device_mesh)) <= set(axes_of_mesh(mesh)) - {(axis, ranks)}:
            raise ShardingError(
                f"parameter {parameter!r} is a DTensor over {dict(axes_of_mesh(p.device_mesh))}, which are not axes of "
                f"a stage, those of {sizes} without {axis!r}: make the layer with the pipeline's mesh, or pass the "
                "plain model and let pipeline cut its weights, with shard_weights=True or an axis 'channel'"
            )

    by_name = dict(example_kwargs or {})
    tensor, _ = completed_plan(model, tensor, comm.rank_count(stage_mesh, channel), example, **by_name)
    planned = planned_layers(model, tensor)
    example_inputs = _example_inputs(example, example_kwargs)

    def order_of_calls(names: Sequence[str]) -> Sequence[str]:
        return (
            names if example_inputs is None else _order_of_calls(model, names, mesh, stage_mesh, axis, example_inputs)
        )

    count = ranks * (pipe_schedule.per_rank or 2) if ranks > 1 else 1
    begins = _begins(model, mesh, stages, count, example, axis, microbatches, order_of_calls)
    check_schedule(name, pipe_schedule, ranks, len(begins) + 1, microbatches)
    cuts = cut_stages(model, begins, order_of_calls(whole_names(model, begins)) if example_inputs is not None else ())
    own = OwnStages(model, mesh, stage_mesh, axis, cuts, pipe_schedule)
    _check_same_on_ranks(own, microbatches, name)
    names, paper = list(model.state_dict()), PaperModel(model, cuts, stage_mesh)
    holder = own.keep(options, channel, planned, gather_again)
    return ModelPipeline(own, pipe_schedule, paper, own.runners(paper, loss, options), holder, names, microbatches)


def _check_same_on_ranks(own: OwnStages, microbatches: int, schedule: str) -> None:
    parameters = [(name, tuple(p.shape), str(p.dtype)) for name, p in own.model.named_parameters()]
    passed = (parameters, own.cuts.begins, microbatches, schedule)
    for rank, other in enumerate(told_where_different("pipeline", own.mesh, passed)):
        if other != passed:
            raise ShardingError(
                f"pipeline needs the same model, stages, microbatches and schedule on every rank, but rank {rank} of "
                "the mesh passed others"
            )


def _example_inputs(example: Any, example_kwargs: Mapping[str, Any] | None) -> Any:
    """Return the arguments of the example by place and by name, or None where there is no example."""
    if example is None and not example_kwargs:
        return None
    by_place: Any = () if example is None else example if isinstance(example, tuple) else (example,)
    return by_place, dict(example_kwargs or {})


def _order_of_calls(
    model: nn.Module, names: Sequence[str], mesh: DeviceMesh, stage_mesh: DeviceMesh, axis: str, example_inputs: Any
) -> Sequence[str]:
    """Return those of the modules that the model calls on the example's arguments, in order."""
    split = BatchSplit(mesh, stage_mesh, axis, 1, example_inputs)
    paper = PaperModel(model, StageCuts((), dict.fromkeys(names, 0)), stage_mesh)
    return paper.order_of_calls(as_on_paper(pytree.tree_map(split.stage_tile, example_inputs)))


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


class ModelPipeline:
    """Stages of a model that this rank has, and the schedule that runs them; `jigsaw.pipeline` makes one.

    >>> mesh = jigsaw.init_mesh(pipe=1)
    >>> pipe = jigsaw.pipeline(torch.nn.Linear(4, 1), mesh, loss=torch.nn.functional.mse_loss, microbatches=1)
    >>> pipe.step(torch.ones(2, 4), torch.ones(2, 1)).shape
    torch.Size([])
    """

    def __init__(
        self,
        own: OwnStages,
        schedule: PipeSchedule,
        paper: PaperModel,
        runners: list[StageRunner],
        holder: nn.Module,
        names_of_all_stages: Sequence[str],
        microbatches: int,
    ) -> None:
        self.model, self.mesh, self.stage_mesh, self.stages = own.model, own.mesh, own.stage_mesh, own.numbers
        self.names_of_all_stages, self.microbatches = names_of_all_stages, microbatches
        self._own, self._schedule, self._paper, self._runners, self._holder = own, schedule, paper, runners, holder
        self._built: dict[Any, tuple[PipelinePlan, Any]] = {}
        self._spread = set[str]()

    # -- parameters ---------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over the parameters of this rank's stages, by the model's own names."""
        yield from self._own.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Iterate over the parameters of this rank's stages, for its optimizer."""
        for _, p in self.named_parameters():
            yield p

    def state_dict(self) -> dict[str, Any]:
        """Return the parameters and buffers of this rank's stages, by the model's own names."""
        return {name: x for name, x in self.model.state_dict().items() if self._own.has(name)}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
        """Load as a module does, for this rank's stages: the state of other stages is left out.

        Raises: `ShardingError` for names that the model does not have, and for missing ones of this rank's stages,
        unless `strict` is False.
        """
        strange = sorted(set(state_dict).difference(self.names_of_all_stages))
        if strict and strange:
            raise ShardingError(
                f"load_state_dict of a pipeline: the model has no {strange[0]!r}; leave it out, or pass strict=False"
            )
        own = {name: x for name, x in state_dict.items() if self._own.has(name)}
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

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, x: Any, y: Any = None, **inputs: Any) -> Tensor:
        """Run all microbatches forward and backward; return the loss, the same on every rank.  Gradients add to
        ``.grad``.

        `x` is the input (a tuple: several), `y` the target, `inputs` the model's keyword arguments: tiles of the mesh
        or of ``pipe.stage_mesh``, whole tensors, or nests of them.  Every rank passes all; only ranks of the stages
        that use them read their values.  Every microbatch gets the whole of an input whose dim 0 is not the batch.  The
        loss has the type of the model's parameters.  Under ``torch.no_grad()`` only the loss is computed.
        """
        stage_inputs: Any = (x if isinstance(x, tuple) else (x,), inputs)
        split = BatchSplit(self.mesh, self.stage_mesh, self._own.axis, self.microbatches, stage_inputs)
        stage_inputs = pytree.tree_map(split.stage_tile, stage_inputs)
        target = pytree.tree_map_only(Tile, split.stage_tile, y)
        batches = split.parts_of(stage_inputs, is_input=True)
        batch = StageBatch(batches, as_on_paper(batches[0]), split.parts_of(target))
        plan, schedule = self._plan_for(batch)
        self._spread_buffers(plan)
        losses = self._run(plan, schedule, batch)
        total = torch.stack([each.detach().double() for each in losses]).sum() if losses else torch.zeros(()).double()
        total = total.to(self.mesh.device_type)
        if self._own.ranks > 1:
            total = comm.all_reduce(total, self.mesh, [self._own.axis])
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
            self._built[key] = plan, self._torch_schedule(plan) if self._own.ranks > 1 else None
        for runner in self._runners:
            runner.autocast = autocast
        return self._built[key]

    def _spread_buffers(self, plan: PipelinePlan) -> None:
        """Give every rank the buffers that are read outside of the calls of their modules: tables, as a rule.

        *Sends*: each once, and again after `load_state_dict`.
        """
        # with every name of a shared buffer, because only ranks of its stages have it
        buffers = dict(self.model.named_buffers(remove_duplicate=False))
        for name in sorted(plan.read_apart.keys() & buffers.keys() - self._spread):
            x, is_own = buffers[name], self._own.has(name)
            own_values = x if is_own else torch.zeros(x.shape, dtype=x.dtype, device=self.mesh.device_type)
            if self._own.ranks > 1:
                whole = comm.all_reduce(own_values, self.mesh, [self._own.axis])
                shared_names = [] if is_own else self._paper.names_of_buffer(name)
                for shared_name in shared_names:
                    parent, _, key = shared_name.rpartition(".")
                    setattr(self.model.get_submodule(parent), key, whole)
            self._spread.add(name)

    def _torch_schedule(self, plan: PipelinePlan) -> Any:
        device, group = torch.device(self.mesh.device_type), self.mesh.get_group(self._own.axis)
        pipeline_stages: list[Any] = []
        for runner in self._runners:
            stage_inputs = self._messages(plan, runner.stage)
            last = runner.stage + 1 == self._own.cuts.stages
            out = torch.empty((), device="meta", requires_grad=True) if last else self._messages(plan, runner.stage + 1)
            pipeline_stages.append(
                PlacedStage(
                    runner,
                    runner.stage,
                    self._own.cuts.stages,
                    device,
                    input_args=stage_inputs,
                    output_args=out,
                    group=group,
                )
            )
        stages: Any = pipeline_stages[0] if self._schedule.per_rank == 1 else pipeline_stages
        return self._schedule.make(stages, n_microbatches=self.microbatches, loss_fn=_as_it_is, scale_grads=False)

    def _messages(self, plan: PipelinePlan, stage: int) -> tuple[Tensor, ...]:
        """Return the tensors that a stage gets for a microbatch, without values."""
        coordinate = mesh_coordinate(self.stage_mesh)
        return tuple(
            torch.empty(each.sent_layout.local_shape(coordinate), dtype=each.dtype, device="meta").requires_grad_(
                each.dtype.is_floating_point or each.dtype.is_complex
            )
            for each in plan.sent[stage]
        )

    def _count_messages(self, plan: PipelinePlan) -> None:
        """Count what the schedule sends in a step, because torch's schedules send without `jigsaw.comm`."""
        places = {
            stage: place
            for place in range(self._own.ranks)
            for stage in self._schedule.stages_at(place, self._own.ranks, self._own.cuts.stages)
        }
        with_grad = torch.is_grad_enabled()
        for stage in self.stages:
            before, after = (
                [] if places.get(other, self._own.place) == self._own.place else self._messages(plan, border)
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
            runner.owned = {n: p for n, p in own.items() if self._own.stage_of(n) in (None, runner.stage)}
        hooked = next((name for name, p in own.items() if has_gradient_hooks(p)), None)
        if hooked is not None:
            raise ShardingError(
                f"parameter {hooked!r} of a pipeline has a hook on its gradient, which would see that of each "
                "microbatch: pipe.step sums them and averages over ranks at its end; remove the hook, and read .grad "
                "or step the optimizer after pipe.step"
            )
        before = {name: p.grad for name, p in self._own.shared.items()}
        for p in self._own.shared.values():
            p.grad = None
        places, losses = torch.arange(self.microbatches), list[Tensor]()
        with torch.autocast(self.mesh.device_type, enabled=False), reduced_at_end(self._holder):
            if schedule is None:
                losses = [self._run_alone(place) for place in places]
            else:
                self._count_messages(plan)
                run = schedule.step if torch.is_grad_enabled() else schedule.eval
                with OpenWait("a step of a pipeline", ranks_along(self.mesh, self._own.axis)):
                    try:
                        run(target=places, losses=losses, return_outputs=False, place=places)
                    except RuntimeError as error:
                        if error.__cause__ is not None:  # torch wraps the errors of a stage
                            raise error.__cause__ from None
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
        for name, p in self._own.shared.items():
            if p.requires_grad and torch.is_grad_enabled():
                own_gradient = torch.zeros_like(p) if p.grad is None else p.grad
                total = comm.all_reduce(own_gradient, self.mesh, axes) / self.stage_mesh.size()
                earlier = before[name]
                p.grad = total if earlier is None else earlier + total
            else:
                p.grad = before[name]


def _as_it_is(loss: Tensor, place: Tensor) -> Tensor:
    return loss
