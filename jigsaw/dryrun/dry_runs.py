"""`dry_run`: one training step of a model on a mesh, counted on one CPU, without ranks and without memory
for tensors.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NoReturn, cast

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from jigsaw.comm import TrafficCall
from jigsaw.dryrun.bare_models import ModelMaker, made_once
from jigsaw.dryrun.devices import Device, crowding_among, device_named
from jigsaw.dryrun.few_blocks import play_rank_shortly
from jigsaw.dryrun.kernel_clock import timed_kernel
from jigsaw.dryrun.rank_playing import (
    ONCE_A_STEP,
    LossOfOutput,
    OptimizerMaker,
    PlayedRank,
    StepPlan,
    mean_square_of_tiles,
)
from jigsaw.dryrun.report import (
    PHASES,
    PHASES_AGAIN,
    DryRunReport,
    PhaseCost,
    RankCost,
    Remark,
    Traffic,
    part_of_phase,
    phase_after_phase,
)
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import SplitRule
from jigsaw.geometry.layout import LayoutSpec
from jigsaw.parallel.channel_parallel import TensorPlan
from jigsaw.parallel.parallelize import check_count
from jigsaw.parallel.sharding import WeightSharding
from jigsaw.ranks.mesh import axes_of_mesh


def dry_run(
    model: nn.Module | ModelMaker,
    x_shape: Sequence[int] | Sequence[Sequence[int]],
    mesh: Mapping[str, int] | DeviceMesh,
    *,
    spec: LayoutSpec | Sequence[LayoutSpec | None] | None = None,
    dtype: torch.dtype | None = None,
    split: SplitRule = "balanced",
    align: int | Mapping[int, int] = 1,
    loss: LossOfOutput | None = None,
    optimizer: OptimizerMaker | None = torch.optim.AdamW,
    shard_weights: WeightSharding = False,
    replicate: str | Sequence[str] = (),
    mp_policy: MixedPrecisionPolicy | None = None,
    tensor: TensorPlan | None = None,
    gather_again: bool = False,
    passes: int = 1,
    checkpoint: Literal["none", "blocks"] | Sequence[str] = "none",
    device: str | Device = "h100",
    ranks_per_node: int | None = None,
    ranks: Sequence[int] | None = None,
    dataset: Any = None,
    blocks: int | None = None,
    every_block: bool = False,
) -> DryRunReport:
    """Report what one training step of `model` takes on every kind of rank of a mesh that need not exist.

    The step is the real one: `parallelize`, a tile of the input, forward pass and loss, backward pass, optimizer.  But
    tensors have no values, and messages carry nothing.  So its messages, shapes and errors are those of the real step;
    only seconds are estimated.

    `model` stays unchanged.  If it is too large to make here, or its layers take a mesh, pass a function that makes it.
    It is called without arguments or with the mesh.  `x_shape` is the global shape of the input. Of several inputs it
    has each, and `spec` too, with None for one that is passed whole; or `spec` is one of names and None for all.
    `dtype` is that of the input and the weights, by default the weights' own. One of integers is the input's alone.
    `spec`, `split` and `align` cut the input as `jigsaw.shard` does; by default axes with the usual names of dims cut
    those. `loss` takes the model's output; by default the mean square of all of it. `optimizer=None` leaves the step
    out. `shard_weights`, `replicate`, `mp_policy`, `tensor` and `gather_again` are those of `jigsaw.parallelize`;
    without `tensor`, columns and rows are those that ``parallelize(example=)`` finds with this input. With `passes`
    the gradients of so many passes forward and backward are added up before a step of the optimizer. Each has an
    input of `x_shape`.
    ``checkpoint="blocks"`` recomputes the elements of ``ModuleList`` (without one, of the outermost ``Sequential``) in
    the backward pass; or name modules.  `device` is one of `DEVICES` or a `Device`.

    The dry run plays all ranks of up to 4, else the first, the last, and one inside; or `ranks`.  With a `dataset` of
    `jigsaw.io.open` on this mesh, the step waits for its reader where that is slower.  `blocks` is how many
    blocks are kept of each row of three or more equal ones (``ModuleList``, ``Sequential``), for a quick look.  A
    row of seven or more blocks equal in everything is played with one to four where these give the same to the byte;
    `every_block` always plays all.  On a mesh with an axis `pipe`, `x_shape` is that of a microbatch, which runs
    through all stages on ranks of the first; `jigsaw.dryrun.advise_mesh` makes a step of it.

    *Sends*: nothing.
    *Raises*: `ShardingError` for a model that was parallelized before, a spec that does not fit, or another invalid
    argument.  Functions that jigsaw refuses at more than one rank are not errors here, but ``report.remarks``. So is an
    error of the model or the loss, which stops the step there.

    >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.GELU(), torch.nn.Conv2d(8, 3, 1))
    >>> report = jigsaw.dry_run(net, (1, 3, 33, 64), mesh={"lat": 4, "lon": 2})
    >>> report.is_complete, report.remarks, report.parameters
    (True, (), 251)
    >>> [rank.coordinate for rank in report.ranks]
    [(0, 0), (1, 1), (3, 1)]
    """
    axes, priced = _checked_axes(mesh), device_named(device)
    _check_types_given(dtype, loss, optimizer, dataset)
    node = priced.ranks_per_node if ranks_per_node is None else ranks_per_node
    for name, number in (("ranks_per_node", node), ("passes", passes), ("blocks", 1 if blocks is None else blocks)):
        check_count(name, number)
    _check_plan_arguments(spec, replicate, mp_policy, tensor)
    plan = StepPlan(
        made_once(model),
        shapes_of_inputs(x_shape),
        spec,
        dtype,
        split,
        align,
        loss or mean_square_of_tiles,
        optimizer,
        shard_weights,
        checkpoint,
        blocks,
        (replicate,) if isinstance(replicate, str) else tuple(replicate),
        every_block,
        keeps_calls=priced.times_kernels,
        on_processor=priced.is_processor,
        tensor=tensor,
        gather_again=gather_again,
        mp_policy=mp_policy,
        passes=passes,
    )
    size = torch.Size(axes.values()).numel()
    chosen = _usual_ranks(axes) if ranks is None else list(ranks) if isinstance(ranks, Iterable) else []
    if not chosen or not all(rank in range(size) for rank in chosen):
        raise ShardingError(f"ranks={ranks!r} must be some of the mesh's, 0 to {size - 1}")
    played = [play_rank_shortly(plan, axes, rank) for rank in chosen]
    return DryRunReport(
        axes,
        priced.name,
        priced.memory_bytes,
        played[0].parameters,
        tuple(_priced_step(rank, priced, node, size, passes) for rank in played),
        _merged_remarks(played),
        passes * _reader_seconds(dataset, plan.shapes[0], size, priced),
        blocks=played[0].blocks,
    )


def _priced_step(played: PlayedRank, device: Device, ranks_per_node: int, ranks: int, passes: int) -> RankCost:
    """Return the cost of a rank's step, also of what a step of several passes, or of a pipeline, sends once."""
    priced = priced_rank(played, device, ranks_per_node, ranks)
    phases = dict(priced.phases)

    def price_as(name: str, phase: str) -> PhaseCost:
        alone = replace(played, phases={name: played.phases[phase]})
        return priced_rank(alone, device, ranks_per_node, ranks).phases[name]

    for name, again in PHASES_AGAIN.items():
        if again in played.phases:  # the first pass has no gradients to add to, and all others are alike
            second = price_as(name, again)
            others = replace(part_of_phase(second, passes - 1), peak=second.peak)
            phases[name] = phase_after_phase(phases[name], others)
    phases |= {name: price_as("backward", name) for name in ONCE_A_STEP if name in played.phases}
    return replace(priced, phases=phases)


def _checked_axes(mesh: Any) -> dict[str, int]:
    if isinstance(mesh, DeviceMesh):
        return dict(axes_of_mesh(mesh))
    axes: dict[Any, Any] = dict(mesh) if isinstance(mesh, Mapping) else {}
    if not axes or not all(isinstance(name, str) and isinstance(n, int) and n >= 1 for name, n in axes.items()):
        raise ShardingError(f"mesh={mesh!r} must name axes and their sizes, as in mesh={{'lat': 4, 'lon': 2}}")
    return axes


def shapes_of_inputs(x_shape: Any) -> tuple[tuple[int, ...], ...]:
    """Return the shape of each input.  Raises: `ShardingError` for what is neither a shape nor a list of some."""
    shapes: list[Any] = list(x_shape) if isinstance(x_shape, Sequence) else []
    if not any(isinstance(shape, Sequence) for shape in shapes):
        shapes = [shapes] if shapes else []
    if not shapes or not all(isinstance(s, Sequence) and all(isinstance(n, int) for n in s) for s in shapes):
        shown = f"a {type(x_shape).__name__}" if isinstance(x_shape, torch.Tensor) else repr(x_shape)
        raise ShardingError(
            f"x_shape={shown} must be the global shape of the input, as in (1, 3, 64, 128), or a list of several"
        )
    return tuple(map(tuple, shapes))


def leading_input(
    shapes: Sequence[tuple[int, ...]], options: Mapping[str, Any]
) -> tuple[tuple[int, ...], LayoutSpec | None]:
    """Return the shape and the spec of the first input that has a spec, if any is given; else of the first."""
    spec: Any = options.get("spec")
    if len(shapes) == 1 or spec is None or all(isinstance(names, str | None) for names in spec):
        return shapes[0], spec
    return next(((s, own) for s, own in zip(shapes, spec, strict=False) if own is not None), (shapes[0], None))


def check_search(devices: Any, options: Mapping[str, Any]) -> None:
    """Raise `ShardingError` for what a search cannot take: options that `dry_run` lacks, or that it tries itself."""
    check_count("devices", devices)
    chosen_by_search = {"mesh", "device", "checkpoint", "replicate", "ranks", "blocks", "dataset"}
    known = {"store", "schedule", *inspect.signature(dry_run).parameters} - chosen_by_search - {"model", "x_shape"}
    if unknown := sorted(options.keys() - known):
        varied = [name for name in unknown if name in chosen_by_search]
        why = f", as it tries them itself: {varied}" if varied else ""
        raise ShardingError(f"a search for a mesh does not take {unknown}{why}; it takes {sorted(known)}")


def _check_plan_arguments(spec: Any, replicate: Any, mp_policy: Any, tensor: Any) -> None:
    def refuse(name: str, value: Any, rule: str) -> NoReturn:
        raise ShardingError(f"{name}={value!r} must be {rule}")

    if spec is not None and (isinstance(spec, str) or not isinstance(spec, Sequence)):
        refuse("spec", spec, "the axis of each dim, like (None, None, 'lat', 'lon')")
    if not isinstance(replicate, str) and not (
        isinstance(replicate, Sequence) and all(isinstance(name, str) for name in cast(Sequence[Any], replicate))
    ):
        refuse("replicate", replicate, "the name of an axis, or names")
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        refuse("mp_policy", mp_policy, "a torch.distributed.fsdp.MixedPrecisionPolicy, or None")
    if tensor is not None:
        words = dict(cast(Mapping[Any, Any], tensor)).items() if isinstance(tensor, Mapping) else None
        if words is None or not all(isinstance(x, str) for item in words for x in item):
            refuse("tensor", tensor, "words by patterns of module names, like {'*.up': 'column', '*.down': 'row'}")


def _check_types_given(dtype: Any, loss: Any, optimizer: Any, dataset: Any) -> None:
    for name, value, is_right, wanted in (
        ("dtype", dtype, isinstance(dtype, torch.dtype), "a torch.dtype, as torch.bfloat16"),
        ("loss", loss, callable(loss), "a function of the model's output, as lambda y: y.square().mean()"),
        ("optimizer", optimizer, callable(optimizer), "what makes one of parameters, as torch.optim.AdamW"),
        ("dataset", dataset, hasattr(dataset, "plan"), "what jigsaw.io.open gives on this mesh"),
    ):
        if value is not None and not is_right:
            raise ShardingError(f"{name}={value!r} must be {wanted}, or None")


def _usual_ranks(axes: Mapping[str, int]) -> list[int]:
    """Return the ranks to play: all of a few; else a corner, which has larger parts, one inside, the other corner."""
    sizes = torch.Size(axes.values())
    if sizes.numel() <= 4:
        return list(range(sizes.numel()))
    return sorted({0, inside_rank(axes), sizes.numel() - 1})


def inside_rank(axes: Mapping[str, int]) -> int:
    """Return a rank with neighbors on all sides, where there is one, because such a rank sends most."""
    return int(np.ravel_multi_index([min(1, n - 1) for n in axes.values()], list(axes.values())))


def _reader_seconds(dataset: Any, shape: Sequence[int], ranks: int, device: Device) -> float:
    """Return how long the readers of all ranks work for the samples of one step, by the costs that plans use."""
    if dataset is None:
        return 0.0
    plan = dataset.plan(len(dataset) // 2)
    return shape[0] * sum(plan.cost(*mode) for mode in plan.modes.items()) / (ranks * device.reader_cores)


def _merged_remarks(played: Sequence[PlayedRank]) -> tuple[Remark, ...]:
    most: dict[Remark, int] = {}
    for rank in played:
        bytes_by_remark: dict[Remark, int] = {}
        for remark in rank.remarks:
            bare = replace(remark, sent_bytes=0)
            bytes_by_remark[bare] = bytes_by_remark.get(bare, 0) + remark.sent_bytes
        for bare, size in bytes_by_remark.items():
            most[bare] = max(most.get(bare, 0), size)
        most |= {Remark("gathered", name, "linear", 0, why): 0 for name, why in rank.unpaired.items()}
    return tuple(replace(bare, sent_bytes=size) for bare, size in most.items())


def priced_rank(played: PlayedRank, device: Device, ranks_per_node: int, ranks: int) -> RankCost:
    """Return the rank's step on the device, one of `ranks` ranks, `ranks_per_node` to a node.

    A phase takes the sum of its kernels, each the longest of its operations, its bytes and the least time of a kernel.
    It also takes its messages, by link, except for those that work hides.  Ranks lie on nodes in order.
    """
    phases = {
        name: _priced_phase(played, name, device, ranks_per_node, ranks) for name in PHASES if name in played.phases
    }
    return RankCost(played.rank, played.coordinate, phases)


def _priced_phase(played: PlayedRank, name: str, device: Device, ranks_per_node: int, ranks: int) -> PhaseCost:
    count = played.phases[name]
    bounds: dict[str, float] = dict.fromkeys(("flop", "memory", "kernels"), 0.0)
    kernels = [*count.kernels, *count.kernels_at_end]
    beside = min(ranks, ranks_per_node)
    crowding, host_crowding = (crowding_among(of, beside) for of in (device.crowding, device.host_crowding))
    for cost, times in Counter(kernels).items():
        seconds, bound = device.kernel_time(cost.flop, cost.moved_bytes, cost.dtype, cost.is_attention)
        if device.times_kernels and cost.call is not None:
            seconds = timed_kernel(cost.call) or seconds
        bounds[bound] += times * seconds * crowding
    again = count.kernels_again
    host = device.host_seconds.get(name, 0.0)
    if name == "step":
        host += played.cut_share * (device.host_seconds.get("step of parts", host) - host)
    host = (len(kernels) - again) * host + again * device.host_seconds.get("forward", 0.0)
    bounds["kernels"] += host * host_crowding
    computing = sum(bounds.values())
    traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
    links: defaultdict[str, Traffic] = defaultdict(Traffic)
    waited = {True: 0.0, False: 0.0}
    for call in (*count.calls, *count.calls_of_weights):
        traffic[call.kind] += Traffic(call.sent_bytes, call.messages)
        by_link = _split_by_link(call, played.rank // ranks_per_node, ranks_per_node)
        for link, part in by_link.items():
            links[link] += part
        nodes = len({rank // ranks_per_node for rank in call.ring})
        if nodes > 1:  # the slowest link holds up all ranks, even one that sends within its node
            seconds = device.ring_time(call.sent_bytes, call.messages, len(call.ring), nodes)
        else:
            seconds = sum(device.call_time(call.kind, link, x.sent_bytes, x.messages) for link, x in by_link.items())
        waited[call.is_behind] += host_crowding * seconds
    hidden = min(waited[True], device.overlap * computing)
    shown = waited[False] + waited[True] - hidden
    return PhaseCost(
        sum(cost.flop for cost in kernels),
        sum(cost.moved_bytes for cost in kernels),
        len(kernels),
        count.peak,
        dict(traffic),
        dict(links),
        bounds,
        waited[True] + waited[False],
        hidden,
        computing + shown,
    )


def _split_by_link(call: TrafficCall, node: int, ranks_per_node: int) -> dict[str, Traffic]:
    traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
    places = len(call.sent_to)
    for to, size in call.sent_to:
        # all messages of a ring go to one rank, else each rank has one
        traffic["node" if to // ranks_per_node == node else "network"] += Traffic(size, call.messages // places)
    return dict(traffic)
