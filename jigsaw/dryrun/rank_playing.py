"""A training step as one rank of a fake mesh runs it, on tensors without values."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint as run_checkpointed

from jigsaw import comm
from jigsaw.comm.matmul import products_of_accelerators
from jigsaw.dryrun.bare_models import (
    ModelMaker,
    OptimizerMaker,
    bare_copy,
    cast_weights,
    check_model_made,
    checkpointed_modules,
    facts_of_models,
    keeps_indices,
    make_bare,
    rows_of_blocks,
    stepped_optimizer,
    wants_mesh,
)
from jigsaw.dryrun.counted_steps import CountedPhase
from jigsaw.dryrun.fake_ranks import fake_mesh
from jigsaw.dryrun.report import PHASES, PHASES_AGAIN, Remark
from jigsaw.dryrun.step_meter import PieceMarks, StepMeter
from jigsaw.errors import ShardingError
from jigsaw.geometry.axis_names import CHANNEL_AXIS, PIPE_AXIS, usual_spec
from jigsaw.geometry.cut import SplitRule
from jigsaw.geometry.layout import AxisSizes, Layout, LayoutSpec
from jigsaw.nn.experts.experts import even_choices
from jigsaw.ops.into_torch.whole_tensor import hearing_costs
from jigsaw.ops.meeting.common_cuts import REALIGN_KIND, RECUT_KIND
from jigsaw.ops.meeting.plain_operands import AVERAGED_MARK, hearing_repeats
from jigsaw.parallel.channel_parallel import TensorPlan, completed_plan, planned_layers
from jigsaw.parallel.channel_watcher import FoundPairs
from jigsaw.parallel.gradient_buckets import local_part
from jigsaw.parallel.parallelize import parallelize, reduced_at_end, reducer_of
from jigsaw.parallel.sharding import ShardingOptions, WeightSharding
from jigsaw.ranks.call_places import is_of_packages
from jigsaw.ranks.mesh import axes_of_mesh, groups_along, mesh_coordinate, ranks_along
from jigsaw.stages.stage_cuts import cut_places, mesh_of_stage, parallel_stage, whole_names
from jigsaw.tile.tile import Tile, tiles_in
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import graph_task_id
from jigsaw.torch_internals.fake_tensors import VALUE_ERRORS, PaperMode

LossOfOutput = Callable[[Any], Tensor]

ONCE_A_STEP = ("sums", "shared")
"""Phases of a pipeline's step behind the last microbatch: sums of gradients within stages, and over all of them."""


def mean_square_of_tiles(output: Any) -> Tensor:
    """Return the sum over all floating tiles of an output of the mean of their squares."""
    tiles = tiles_in(output if isinstance(output, (list, tuple, dict, Tensor)) else getattr(output, "__dict__", ()))
    values: Any = [t.square().mean() for t in tiles if t.is_floating_point()]
    if not values:
        raise ShardingError("the model gives no tile to take a loss of; pass loss=")
    return torch.stack(values).sum() if len(values) > 1 else values[0]


# -- the step ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StepPlan:
    """Arguments of `jigsaw.dry_run`: the model, its input, and how to run it."""

    model: nn.Module | ModelMaker
    shapes: tuple[tuple[int, ...], ...]
    spec: Any = None
    dtype: torch.dtype | None = None
    split: SplitRule = "balanced"
    align: int | Mapping[int, int] = 1
    loss: LossOfOutput = mean_square_of_tiles
    optimizer: OptimizerMaker | None = torch.optim.AdamW
    shard_weights: WeightSharding = False
    checkpoint: str | Sequence[str] = "none"
    blocks: int | None = None
    replicate: tuple[str, ...] = ()
    every_block: bool = False
    row: tuple[str, int] | None = None  # number of blocks of a row that exist
    keeps_calls: bool = True
    on_processor: bool = True
    tensor: TensorPlan | None = None
    gather_again: bool = False
    pieces: tuple[str, ...] = ()  # modules whose costs are counted separately
    mp_policy: MixedPrecisionPolicy | None = None
    passes: int = 1  # forward and backward, before a step of the optimizer

    def parallel_options(self) -> dict[str, Any]:
        """Return the arguments of `parallelize` that the plan has."""
        names = ("shard_weights", "replicate", "mp_policy", "tensor", "gather_again")
        return {name: getattr(self, name) for name in names}


@dataclass(frozen=True)
class PlayedPiece:
    """Counts of a piece, forward and backward, without sums of gradients; bytes of its weights with state, and kept."""

    name: str
    phases: dict[str, CountedPhase]
    weight_bytes: int
    kept_bytes: int


@dataclass
class PlayedRank:
    """Counts of one rank, before prices."""

    rank: int
    coordinate: tuple[int, ...]
    parameters: int
    phases: dict[str, CountedPhase]
    remarks: list[Remark]
    blocks: int = 0
    is_periodic: bool = True  # gradients of each block of the row travel in buckets with the same ends
    pieces: tuple[PlayedPiece, ...] = ()
    cut_share: float = 0.0  # bytes of those parameters that are DTensors
    unpaired: Mapping[str, str] = field(default_factory=dict[str, str])  # layers that are in no plan, and why


def play_rank(plan: StepPlan, axes: Mapping[str, int], rank: int) -> PlayedRank:
    """Run the step as `rank` of a mesh of these axes."""
    meter, traffic = StepMeter(plan.keeps_calls, plan.on_processor), dict[str, list[comm.TrafficCall]]()
    with fake_mesh(axes, rank) as mesh:
        played = PlayedRank(rank, mesh_coordinate(mesh), 0, {}, [])
        know_neighbors(mesh)
        stage_mesh = mesh_of_stage(mesh, PIPE_AXIS) if PIPE_AXIS in axes else mesh
        know_neighbors(stage_mesh)
        copies = ranks_along(stage_mesh, plan.replicate)
        products = nullcontext() if plan.on_processor else products_of_accelerators()
        without_values = PaperMode()
        with _without_collections(), without_values, meter.counting(), products, even_choices():
            meter.begin_phase("setup")
            _play_step(plan, mesh, stage_mesh, played, meter, traffic)
    played.phases = {name: meter.counted_phase(name, calls) for name, calls in traffic.items()}
    if stage_mesh is not mesh and plan.replicate and "sums" in played.phases:
        # a pipeline sums over ranks that have the same parts of weights once a step
        backward, sums = played.phases["backward"], played.phases["sums"]
        sums.calls_of_weights = [*sums.calls_of_weights, *(c for c in backward.calls_of_weights if c.ring == copies)]
        backward.calls_of_weights = [c for c in backward.calls_of_weights if c.ring != copies]
    for place, times in meter.value_reads.items():
        reason = f"asks {times} times for a value, of which the dry run knows nothing: it took False, or 1"
        played.remarks.append(Remark("value", "", place, 0, reason))
    return played


@contextmanager
def _without_collections() -> Generator[None]:
    """Run without Python's garbage collector, whose moments differ from run to run, and with them the memory in use."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def know_neighbors(mesh: DeviceMesh) -> None:
    """Ask a mesh for its tensors in advance, because later they have no values."""
    names = [name for name, _ in axes_of_mesh(mesh)]
    for some in [*([name] for name in names), names]:
        ranks_along(mesh, some)
        groups_along(mesh, some)


def _play_step(
    plan: StepPlan,
    mesh: DeviceMesh,
    stage_mesh: DeviceMesh,
    played: PlayedRank,
    meter: StepMeter,
    traffic: dict[str, list[comm.TrafficCall]],
) -> None:
    model, dtype = prepared_model(plan, mesh, played)
    meter.known_values.follows_integers = keeps_indices(model)
    inputs = prepared_inputs(plan, stage_mesh, dtype)
    in_tensor = dict(axes_of_mesh(mesh)).get(CHANNEL_AXIS, 1)
    tensor, pairs = _completed_once(plan, mesh, model, in_tensor, inputs)
    plan, played.unpaired = replace(plan, tensor=tensor), pairs.reasons
    for module in checkpointed_modules(model, plan.checkpoint):
        module.forward = partial(run_checkpointed, module.forward, use_reentrant=False)
    stages = None if stage_mesh is mesh else PlayedStages(plan, model, mesh, stage_mesh)
    if stages is None:
        model = parallelize(model, mesh, **plan.parallel_options(), strict=False)
    reducer = reducer_of(model if stages is None else stages.holder)
    if plan.row is not None and reducer is not None:
        played.is_periodic = reducer.ends_alike(
            [list(b.parameters()) for b in model.get_submodule(plan.row[0]).children()]
        )
    parameters = list(model.parameters())
    played.cut_share = sum(isinstance(p, DTensor) for p in parameters) / max(len(parameters), 1)
    meter.mark_memory([*parameters, *model.buffers()], "weights")
    is_trained = plan.optimizer is not None and any(p.requires_grad for p in parameters)
    optimizer = None if plan.optimizer is None or not is_trained else stepped_optimizer(plan.optimizer, parameters)
    if optimizer is not None:
        meter.mark_memory(pytree.tree_leaves([*optimizer.state.values()]), "optimizer")
    if plan.pieces:
        meter.marks = PieceMarks(model, plan.pieces)
    watch = _ModuleWatch(model, played.remarks)

    @contextmanager
    def phase(name: str) -> Generator[None]:
        gc.collect(0)  # free reference cycles of earlier phases, such as the whole weights of a model that was cut
        meter.begin_phase(name)
        with comm.count() as counted:
            watch.follow(counted)
            traffic[name] = meter.calls = counted.calls
            yield
            watch.attribute()
        meter.begin_phase("after")

    for names in (PHASES[:2], PHASES_AGAIN.values())[: plan.passes]:
        try:
            _play_pass(plan, model, inputs, names, watch, phase, played, meter)
        except Exception as error:  # any error of the model or the loss: the report says where it ends
            why = _why_it_stopped(error, guessed=bool(meter.value_reads))
            played.remarks.append(Remark("stopped", watch.module_of_error(error), type(error).__name__, 0, why))
            return
        meter.mark_memory((p.grad for p in parameters if p.grad is not None), "gradients")
    if meter.marks is not None:
        played.pieces = _played_pieces(plan.pieces, model, optimizer, meter, traffic)
    if stages is not None:
        stages.play_sums(phase)
    if optimizer is not None:
        with phase("step"):
            optimizer.step()


def _completed_once(
    plan: StepPlan, mesh: DeviceMesh, model: nn.Module, ranks: int, inputs: Sequence[Any]
) -> tuple[TensorPlan, FoundPairs]:
    """Return the plan of columns and rows for a model and inputs of these shapes, found once while models are known."""
    is_of_mesh = not isinstance(plan.model, nn.Module) and wants_mesh(plan.model)
    words = None if plan.tensor is None else tuple(plan.tensor.items())
    of_model = id(plan.model), words, plan.dtype, plan.blocks, plan.row
    looks = [(x.shape, x.dtype) for x in inputs]
    key = "pairs", *of_model, tuple(axes_of_mesh(mesh)) if is_of_mesh else ranks, *looks
    facts = facts_of_models()
    if key not in facts:
        facts[key] = completed_plan(model, plan.tensor, ranks, tuple(inputs))
    return facts[key]


def _play_pass(
    plan: StepPlan,
    model: nn.Module,
    inputs: Sequence[Any],
    names: Iterable[str],
    watch: _ModuleWatch,
    phase: Callable[[str], Any],
    played: PlayedRank,
    meter: StepMeter,
) -> None:
    """Run forward and backward, as phases of these names."""
    forward, backward = names
    with phase(forward), hearing_costs(watch.tell_refusal), hearing_repeats(watch.tell_repeat):
        value = _one_number(plan.loss(model(*inputs)))
    meter.mark_memory((t.local if isinstance(t, Tile) else t for t in inputs), "activations")
    meter.mark_the_rest("activations")
    # sums over ranks give gradients to all weights, so the graph tells which of them took part
    played.remarks += _remarks_of_idle_weights(model, value) if meter.value_reads else []
    if value.requires_grad:
        with phase(backward), hearing_costs(watch.tell_refusal):
            value.backward()


def _remarks_of_idle_weights(model: nn.Module, value: Tensor) -> list[Remark]:
    """Remark the modules of whose trained weights none led to a value, each without the modules in it."""
    reason = (
        "its weights take no part in a step in which Python asked for a value, which was assumed: a branch or the "
        "turns of a loop may be missing; bound loops by numbers, and set requires_grad=False for what is not trained"
    )
    active = _leaves_under(value)
    idle: list[Remark] = []
    for name, module in model.named_modules():
        trained = [p for p in module.parameters() if p.requires_grad and not isinstance(p, DTensor)]
        is_within = any(name.startswith(f"{remark.module}." if remark.module else "") for remark in idle)
        if trained and not is_within and active.isdisjoint(map(id, trained)):
            idle.append(Remark("skipped", name, type(module).__name__, 0, reason))
    return idle


def _leaves_under(value: Tensor) -> set[int]:
    """Return the identities of the leaves of a value's graph."""
    seen: set[Any] = set()
    leaves: set[int] = set()
    todo: list[Any] = [(value.local if isinstance(value, Tile) else value).grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            leaves.add(id(node.variable))
        todo += [before for before, _ in node.next_functions]
    return leaves


def _one_number(loss: Any) -> Tensor:
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ShardingError(f"the loss is {shown}; it must be a tensor of one number, as of loss=lambda y: y.mean()")
    return loss


def _why_it_stopped(error: Exception, guessed: bool) -> str:
    if isinstance(error, ShardingError):
        return str(error)
    frames = [(f.f_code.co_filename, line) for f, line in walk_tb(error.__traceback__)]
    file, line = next((at for at in reversed(frames) if not is_of_packages(at[0])), frames[-1])
    if isinstance(error, VALUE_ERRORS):
        return f"it needs the values of tensors, which a dry run has not: {error}, from {file}:{line}"
    why = "; values that Python had asked for were assumed, which may be why" if guessed else ""
    return f"{error}, from {file}:{line}{why}"


def _played_pieces(
    names: Sequence[str],
    model: nn.Module,
    optimizer: Optimizer | None,
    meter: StepMeter,
    traffic: Mapping[str, Sequence[comm.TrafficCall]],
) -> tuple[PlayedPiece, ...]:
    kept = meter.kept_by_piece()
    return tuple(
        PlayedPiece(
            name,
            {phase: meter.phase_of_piece(phase, at, calls) for phase, calls in traffic.items()},
            sum(_bytes_with_state(p, optimizer) for p in model.get_submodule(name).parameters()),
            kept.get(at, 0),
        )
        for at, name in enumerate(names)
    )


class PlayedStages:
    """Model of a dry run as stages of a pipeline have it (`jigsaw.pipeline`), all of them on one rank."""

    def __init__(self, plan: StepPlan, model: nn.Module, mesh: DeviceMesh, stage_mesh: DeviceMesh) -> None:
        names = whole_names(model, [name for name, _ in cut_places(model, 1)])
        modules = [model.get_submodule(name) for name in names]
        modules = [module for module in modules if next(module.parameters(), None) is not None]
        within = {p for module in modules for p in module.parameters()}
        self._shared = [p for p in model.parameters() if p not in within]
        self._mesh, self._held = mesh, ExitStack()
        for p in self._shared:
            setattr(p, AVERAGED_MARK, stage_mesh.size())
        sharding = ShardingOptions.checked(stage_mesh, plan.shard_weights, plan.replicate, None, None)
        self.holder = parallel_stage(
            modules, stage_mesh, sharding, CHANNEL_AXIS, planned_layers(model, plan.tensor or {}), plan.gather_again
        )
        # gradients of whole weights are not sent in the backward passes, but once, in `play_sums`
        self._held.enter_context(reduced_at_end(self.holder))

    def play_sums(self, phase: Callable[[str], Any]) -> None:
        """Send what a step sends once: gradients of whole weights, of parameters that all stages have, the loss."""
        with phase("sums"):
            self._held.close()
        axes = [name for name, _ in axes_of_mesh(self._mesh)]
        with phase("shared"):
            for p in self._shared:
                if p.requires_grad:
                    comm.all_reduce(torch.zeros_like(p), self._mesh, axes)
            comm.all_reduce(torch.zeros((), dtype=torch.float64), self._mesh, [PIPE_AXIS])


def prepared_model(plan: StepPlan, mesh: DeviceMesh, played: PlayedRank | None = None) -> tuple[nn.Module, torch.dtype]:
    """Return the model as it is before `parallelize`, with the blocks to play, and the dtype of its input."""
    recipe = plan.model
    arguments = () if isinstance(recipe, nn.Module) or not wants_mesh(recipe) else (mesh,)
    source: Any = recipe if isinstance(recipe, nn.Module) else make_bare(recipe, *arguments)
    check_model_made(source)
    rows = rows_of_blocks(source)
    blocks = sum(map(len, rows))
    shorter: list[tuple[Any, int]] = [] if plan.blocks is None else [(row, plan.blocks) for row in rows]
    if plan.row is not None:
        shorter.append((source.get_submodule(plan.row[0]), plan.row[1]))
    left_out = {block for row, n in shorter for block in list(row)[n:] if block not in list(row)[:n]}
    model = bare_copy(source, left_out) if source is recipe else source
    names, inside = {m: n for n, m in source.named_modules()}, {m for block in left_out for m in block.modules()}
    for row, n in shorter:
        short: Any = model.get_submodule(names[row]) if row not in inside else []
        del short[n:]
    if played is not None:
        played.blocks = blocks
    dtype = plan.dtype or next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if plan.dtype is not None and (plan.dtype.is_floating_point or plan.dtype.is_complex):
        cast_weights(model, plan.dtype)
    if played is not None:
        played.parameters = sum(p.numel() for p in model.parameters())
    return model, dtype


def _bytes_with_state(parameter: nn.Parameter, optimizer: Optimizer | None) -> int:
    state = {} if optimizer is None else optimizer.state[parameter]
    kept = [x for x in pytree.tree_leaves(dict(state)) if isinstance(x, Tensor)]
    return sum(local_part(x).nbytes for x in (parameter, *([parameter] * parameter.requires_grad), *kept))


# -- the input --------------------------------------------------------------------------------------------------------


def prepared_inputs(plan: StepPlan, mesh: DeviceMesh, dtype: torch.dtype) -> list[Any]:
    """Return the tiles of this rank that the model is called with; a plain tensor for an input without a spec."""
    tiles: list[Any] = []
    for shape, spec in zip(plan.shapes, _specs_of_inputs(plan, axes_of_mesh(mesh)), strict=True):
        if spec is None:
            tiles.append(torch.empty(shape, dtype=dtype))
            continue
        layout = Layout.of(shape, spec, axes_of_mesh(mesh), split=plan.split, align=plan.align)
        local = torch.empty(layout.local_shape(mesh_coordinate(mesh)), dtype=dtype)
        tiles.append(Tile(local, layout, mesh))
    return tiles


def _specs_of_inputs(plan: StepPlan, axes: AxisSizes) -> list[LayoutSpec | None]:
    if plan.spec is None:
        return [usual_spec(len(shape), dict(axes)) for shape in plan.shapes]
    if all(isinstance(names, str | None) for names in plan.spec):  # one spec, for inputs that are cut alike
        if any(len(shape) != len(plan.spec) for shape in plan.shapes):
            some = "; of several inputs pass a list with a spec for each" * (len(plan.shapes) > 1)
            shapes = ", ".join(map(str, plan.shapes))
            raise ShardingError(f"spec={plan.spec!r} is for {len(plan.spec)} dims, but the input is {shapes}{some}")
        return [plan.spec] * len(plan.shapes)
    several = len(plan.shapes) > 1 or any(isinstance(s, (tuple, list)) and None in s for s in plan.spec)
    specs = list(plan.spec) if several else [plan.spec]
    if len(specs) != len(plan.shapes):
        raise ShardingError(
            f"dry_run has {len(plan.shapes)} inputs but {len(specs)} specs; pass a list with one for each, as in "
            f"spec=[{', '.join(map(str, (usual_spec(len(shape), dict(axes)) for shape in plan.shapes)))}]"
        )
    return specs


# -- modules ----------------------------------------------------------------------------------------------------------


class _ModuleWatch:
    def __init__(self, model: nn.Module, remarks: list[Remark]) -> None:
        self._open: list[str] = []
        self._names = {id(module): name for name, module in model.named_modules()}
        self._remarks, self._calls, self._seen = remarks, list[comm.TrafficCall](), 0
        for name, module in model.named_modules():
            module.register_forward_pre_hook(partial(self._enter, name), prepend=True)
            module.register_forward_hook(self._leave, always_call=True)

    @property
    def module(self) -> str:
        return self._open[-1] if self._open else ""

    def module_of_error(self, error: BaseException) -> str:
        name, at = "", error.__traceback__
        while at is not None:
            name = self._names.get(id(at.tb_frame.f_locals.get("self")), "") or name
            at = at.tb_next
        return name

    def follow(self, counted: comm.TrafficCount) -> None:
        self._calls, self._seen, self._open = counted.calls, 0, []

    def attribute(self) -> None:
        """Remark the rows that were re-cut since the last call, in the module that is under way."""
        is_forward = graph_task_id() == -1
        for call in self._calls[self._seen :]:
            if is_forward and call.kind in (REALIGN_KIND, RECUT_KIND):
                reason = "rows at other cut points, or cut by other axes, are moved to where the others lie"
                self._remarks.append(Remark("re-cut", self.module, call.kind, call.sent_bytes, reason))
        self._seen = len(self._calls)

    def tell_refusal(self, function: str, lacking: int, refusal: ShardingError) -> None:
        self._remarks.append(Remark("refused", self.module, function, lacking, str(refusal)))

    def tell_repeat(self, product: str, unused: int) -> None:
        reason = (
            "every rank makes the whole of a plain tensor by a product, and then takes its own rows of it; make it a "
            "tile before the product, as x = x + torch.zeros_like(tile) does for one that broadcasts"
        )
        self._remarks.append(Remark("repeated", self.module, product, unused, reason))

    def _enter(self, name: str, module: nn.Module, args: Any) -> None:
        self.attribute()
        self._open.append(name)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.attribute()
        if self._open:
            self._open.pop()
