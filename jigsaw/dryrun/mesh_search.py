"""Search for the best mesh: a dry run of each mesh of a number of devices, with each way to spend memory or time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

import torch
from torch import nn

from jigsaw.dryrun.bare_models import checkpointed_modules, made_once, remembered_models, rows_of_blocks
from jigsaw.dryrun.devices import Device, device_named
from jigsaw.dryrun.dry_runs import check_search, dry_run, inside_rank, leading_input, shapes_of_inputs
from jigsaw.dryrun.pipeline_estimate import (
    Borders,
    balanced_cuts,
    piece_costs,
    pipelined_report,
    stage_shares,
    tiles_at_borders,
)
from jigsaw.dryrun.rank_playing import StepPlan
from jigsaw.dryrun.report import DryRunReport, seconds_text, size_text
from jigsaw.errors import ShardingError
from jigsaw.geometry.axis_names import CHANNEL_AXIS, DATA_AXIS, PIPE_AXIS, REPLICATE_AXIS, space_dims
from jigsaw.geometry.layout import LayoutSpec
from jigsaw.parallel.sharding import WeightSharding
from jigsaw.stages.own_stages import PIPE_SCHEDULES, check_schedule

_BEST = 5  # number of options that are shown
_MESHES = 3  # number of the fastest meshes, for which every strategy is tried
_WAYS = 2  # number of the fastest strategies on the fastest mesh, which are tried on other meshes
_FAR = 1.1  # as a multiple of the best time
_MANY = 8  # more meshes than these are compared by a few blocks of the model


@dataclass(frozen=True)
class StepOption:
    """A mesh with a strategy, and the report of its dry run; or `refusal`, why there is none.

    >>> (option,) = jigsaw.dryrun.advise_mesh(torch.nn.Conv2d(3, 3, 3, padding=1), (1, 3, 16, 16), 1)
    >>> option.works, str(option)
    (True, 'one rank: whole weights')
    """

    mesh: Mapping[str, int]
    shard_weights: WeightSharding
    checkpoint: bool
    report: DryRunReport | None
    refusal: str = ""
    microbatches: int = 1
    replicate: tuple[str, ...] = ()
    begins: tuple[str, ...] = ()
    blocks: int | None = None  # blocks of each row, where only this many were played
    ranks_per_node: int = 8
    has_policy: bool = False  # mixed precision of cut weights
    schedule: str = "1f1b"

    @property
    def works(self) -> bool:
        return not self.hindrance

    @property
    def hindrance(self) -> str:
        """The change that would let this option work; empty where it does."""
        if self.report is None:
            return self.refusal
        for remark in self.report.remarks:
            if remark.kind in ("stopped", "skipped"):
                return f"{remark.module or 'the model'} must run: {remark.reason}"
        if not self.report.fits:
            lacking = self.report.peak_bytes / 0.9 - self.report.device_memory
            largest = max(self.report.peak.items(), key=lambda item: item[1])[0]
            return (
                f"{size_text(lacking)} more memory a device (most of it is {largest}), or a smaller net or input, "
                "or more devices"
            )
        return ""

    @property
    def strategy(self) -> str:
        """The strategy in words: what is cut beside the input, and what is computed twice."""
        weights = f"weights cut (shard_weights={self.shard_weights!r})" if self.shard_weights else "whole weights"
        if self.replicate:
            arguments = f"shard_weights={self.shard_weights!r}, replicate={self.replicate[0]!r}"
            weights = f"weights cut within the node ({arguments})"
        named = self.schedule.upper() if self.schedule in ("1f1b", "gpipe") else self.schedule
        pipe = f", {self.microbatches} microbatches ({named})" if self.microbatches > 1 else ""
        few = f", {self.blocks} of the blocks of each row" if self.blocks is not None else ""
        return f"{weights}, blocks checkpointed{pipe}{few}" if self.checkpoint else weights + pipe + few

    @property
    def lines_to_paste(self) -> tuple[str, ...]:
        """The command that starts the job, and the lines of a script that make its mesh and its model.

        >>> (option,) = jigsaw.dryrun.advise_mesh(torch.nn.Conv2d(3, 3, 3, padding=1), (1, 3, 16, 16), 1)
        >>> print("\\n".join(option.lines_to_paste))
        torchrun --nnodes=1 --nproc-per-node=1 train.py
        mesh = jigsaw.init_mesh(data=1)
        model = jigsaw.parallelize(model, mesh)
        """
        ranks = torch.Size(self.mesh.values()).numel()
        on_node = gcd(ranks, self.ranks_per_node)
        axes = {name: size for name, size in self.mesh.items() if size > 1} or {DATA_AXIS: 1}
        lines = [f"torchrun --nnodes={ranks // on_node} --nproc-per-node={on_node} train.py"]
        lines.append(f"mesh = jigsaw.init_mesh({', '.join(f'{name}={size}' for name, size in axes.items())})")
        weights = f", shard_weights={self.shard_weights!r}" if self.shard_weights else ""
        weights += f", replicate={self.replicate[0]!r}" if self.replicate else ""
        weights += ", mp_policy=mp_policy" if self.has_policy else ""
        if self.checkpoint:
            lines.append("for block in blocks:  # the ModuleList, or the outermost Sequential")
            lines.append(
                "    block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)"
            )
        if PIPE_AXIS in axes:
            stages = f"microbatches={self.microbatches}, schedule={self.schedule!r}, stages={list(self.begins)}"
            lines.append(f"model = jigsaw.pipeline(model, mesh, loss=loss, {stages}{weights})")
        else:
            lines.append(f"model = jigsaw.parallelize(model, mesh{weights})")
        return tuple(lines)

    def __str__(self) -> str:
        axes = " ".join(f"{name}={size}" for name, size in self.mesh.items() if size > 1) or "one rank"
        return f"{axes}: {self.strategy}"


def advise_mesh(
    model: Any,
    x_shape: Sequence[int] | Sequence[Sequence[int]],
    devices: int,
    *,
    device: str | Device = "h100",
    progress: Callable[[StepOption], object] | None = None,
    **options: Any,
) -> list[StepOption]:
    """Return every option for a number of devices, those that work first, each group by the seconds of a step.

    Meshes cut the batch by `data` and the last dims by ``lat`` and ``lon``, or ``z``, ``y`` and ``x`` of a volume. Of a
    `spec`, as ``("data", None, "cell")``, they cut what it names, where cells have no batch these alone.  Of
    those that differ just in the order of two dims of one size, only one is tried.  Within a node `channel` cuts
    weights (`jigsaw.parallelize`).  `pipe` cuts a model with a row of equal blocks, for a batch of several samples.
    This is an estimate from one microbatch (`pipelined_report`), with balanced stages (`balanced_cuts`), by the
    `schedule` of `jigsaw.pipeline`.  An axis of the three fastest meshes gives these its ranks.  The fastest is also
    run with ``shard_weights``, on several nodes cut over all ranks or within a node (`replicate`). It is run with
    checkpointing of blocks, and with both, too. The next two, and the fastest with `channel` and `pipe`, are run with
    the two of these ways that are fastest there.

    Of several inputs, as `dry_run` takes them, the first that has a spec says what a mesh may cut.

    Of more than eight meshes the fastest are found by dry runs of one block of each row, from those that cut space the
    least. Where one takes a tenth longer than the best, those that cut its space further are left out.  `options` takes
    further arguments of `dry_run`; a `store`, or arguments of `jigsaw.io.open` with it, adds the reader.  Of these
    ``shard_weights="keep"`` and `mp_policy` are of options that cut weights, where they do; a pipeline, which has no
    such policy, takes the samples of all `passes` as microbatches of one step.

    The model first runs on one device, so that a wrong input raises before the search.  A search may take minutes; it
    calls `progress` with each option as soon as it was tried, that of one device first.

    *Raises*: `ShardingError` for a model that does not run on such an input.

    >>> found = jigsaw.dryrun.advise_mesh(torch.nn.Conv2d(3, 3, 3, padding=1), (1, 3, 16, 16), 2, device="a100")
    >>> len(found), found[0].works
    (4, True)
    """
    check_search(devices, options)
    device = device_named(device)
    shapes = shapes_of_inputs(x_shape)
    meshes = list(possible_meshes(*leading_input(shapes, options), devices, options.get("align", 1)))
    search = _MeshSearch(made_once(model), shapes, device, options.pop("store", None), options, progress)
    node = options.get("ranks_per_node") or device.ranks_per_node
    with remembered_models():
        alone = search.tried_alone()
        plain = [alone] if devices == 1 else search.tried_meshes(meshes)
        fastest = [option.mesh for option in plain[:_MESHES]]
        sizes = [size for size in range(2, min(node, devices) + 1) if devices % size == 0]
        narrow = search.tried_meshes([axes for size in sizes for axes in _giving_ranks(fastest, CHANNEL_AXIS, size)])
        pipes = search.tried_pipes(fastest)
        first = [o for o in (*plain[:_MESHES], *narrow[:1], *pipes[:1]) if o.report is not None]
        others = search.tried_ways(first, node if devices > node else 0)
    return ranked_options([*plain, *narrow, *pipes, *others])


def ranked_options(options: Iterable[StepOption]) -> list[StepOption]:
    """Return options in the order of advice: those that work, then others, each group by the seconds of a step."""
    return sorted(options, key=lambda o: (not o.works, _by_seconds(o)))


class _MeshSearch:
    def __init__(
        self,
        model: Any,
        shapes: tuple[tuple[int, ...], ...],
        device: Device,
        store: Any,
        options: Mapping[str, Any],
        progress: Callable[[StepOption], object] | None = None,
    ) -> None:
        self._model, self._shapes, self._store = model, shapes, store
        x_shape, spec = leading_input(shapes, options)
        self._samples = x_shape[0]
        self._how = {name: value for name, value in options.items() if name != "schedule"}
        self._schedule = str(options.get("schedule", "1f1b"))
        if self._schedule not in PIPE_SCHEDULES:
            raise ShardingError(f"schedule={self._schedule!r} is none of {', '.join(map(repr, PIPE_SCHEDULES))}")
        self._device, self._progress = device, progress
        self._node: int = options.get("ranks_per_node") or self._device.ranks_per_node
        self._batch = x_shape[0] * options.get("passes", 1)  # of a step
        self._has_policy = options.get("mp_policy") is not None
        self._cut: WeightSharding = options.get("shard_weights") or True  # how weights are cut, where they are
        self._space = space_dims(x_shape, spec)
        self._blocks: int | None = None
        self._borders: dict[Any, Borders] = {}

    def tried_alone(self) -> StepOption:
        """Return the option of one device.

        *Raises*: `ShardingError` where the model does not run there: it would run on no mesh.
        """
        alone = self.attempt(dict.fromkeys((DATA_AXIS, *self._space), 1))
        if alone.report is None or not alone.report.is_complete:
            shapes = ", ".join(map(str, self._shapes))
            raise ShardingError(
                f"the model does not run on one device with an input of shape {shapes}, so a mesh is not "
                f"searched for: {alone.hindrance}"
            )
        return alone

    def attempt(self, axes: Mapping[str, int], is_cut: bool = False, twice: bool = False, **more: Any) -> StepOption:
        """Return the option of a mesh; one with ``pipe`` by the microbatch of a stage."""
        more |= {"ranks_per_node": self._node, "has_policy": is_cut and PIPE_AXIS not in axes and self._has_policy}
        more |= {"schedule": self._schedule}
        option = self._attempted(StepOption(axes, self._cut if is_cut else False, twice, None, **more))
        if self._progress is not None:
            self._progress(option)
        return option

    def _attempted(self, option: StepOption) -> StepOption:
        stage_axes, is_pipe = _without_pipe(option.mesh), PIPE_AXIS in option.mesh
        batch = (self._batch if is_pipe else self._samples) // option.microbatches
        shapes = tuple((batch, *s[1:]) if s[:1] == (self._samples,) else s for s in self._shapes)
        try:
            ways: dict[str, Any] = {
                "shard_weights": option.shard_weights,
                "checkpoint": "blocks" if option.checkpoint else "none",
                "replicate": option.replicate,
                "device": self._device,
                "ranks": [inside_rank(stage_axes)],
                "dataset": None if self._store is None else _opened_store(self._store, stage_axes, self._space),
                "blocks": option.blocks,
            }
            if not option.has_policy:
                ways["mp_policy"] = None
            if is_pipe:  # its microbatches are those of all passes
                ways["passes"] = 1
            if option.blocks is not None and CHANNEL_AXIS not in option.mesh:
                ways["optimizer"] = None  # its memory and time are the same on all meshes that keep weights whole
            option = replace(option, report=dry_run(self._model, shapes, option.mesh, **{**self._how, **ways}))
            return self._pipelined(option, shapes)
        except ShardingError as refusal:
            return replace(option, report=None, refusal=str(refusal))

    def _pipelined(self, option: StepOption, shapes: tuple[tuple[int, ...], ...]) -> StepOption:
        """Return an option with stages as that of a step, from its report of a microbatch; others as they are."""
        axes, report, stages = option.mesh, option.report, self._stage_count(option.mesh.get(PIPE_AXIS, 1))
        if report is None or not report.is_complete or PIPE_AXIS not in axes:
            return option
        check_schedule(self._schedule, PIPE_SCHEDULES[self._schedule], axes[PIPE_AXIS], stages, option.microbatches)
        known = {name: value for name, value in self._how.items() if name in StepPlan.__dataclass_fields__}
        known |= {"shard_weights": option.shard_weights, "replicate": option.replicate}
        known |= {"checkpoint": "blocks"} if option.checkpoint else {}
        known |= {"mp_policy": None, "passes": 1}
        known |= {"keeps_calls": self._device.times_kernels, "on_processor": self._device.is_processor}
        plan = StepPlan(self._model, shapes, **known)
        pieces = piece_costs(plan, _without_pipe(axes), stages, self._device, self._node)
        cuts = balanced_cuts(pieces, stages, option.microbatches, self._device.memory_bytes)
        begins = tuple(pieces[at].name for at in cuts)
        key = tuple(axes.items()), plan.shapes, begins
        if key not in self._borders:
            self._borders[key] = tiles_at_borders(plan, axes, begins)
        shares, borders = stage_shares(pieces, cuts), self._borders[key]
        step = option.microbatches, self._device, self._node, self._schedule
        return replace(option, report=pipelined_report(report, shares, borders, *step), begins=begins)

    def _stage_count(self, ranks: int) -> int:
        return ranks * (PIPE_SCHEDULES[self._schedule].per_rank or 2)

    def tried_ways(self, options: Sequence[StepOption], ranks_per_node: int) -> list[StepOption]:
        """Try each way to keep weights and to compute blocks twice on the first option's mesh, and the two fastest on
        others'.
        """
        results: list[StepOption] = []
        # a model without blocks has nothing to recompute; a model made by a function is looked at for each mesh
        has_blocks = not isinstance(self._model, nn.Module) or bool(checkpointed_modules(self._model, "blocks"))
        again = (False, True) if has_blocks else (False,)
        chosen = [(is_cut, twice) for is_cut in ("whole", "cut", "within nodes") for twice in again][1:]
        for option in options:
            tried = {way: self._other_way(option, *way, ranks_per_node) for way in chosen}
            attempts = {way: each for way, each in tried.items() if each is not None}
            plain = {"whole": option.report} | {way[0]: each.report for way, each in attempts.items() if not way[1]}
            attempts = {way: each for way, each in attempts.items() if not way[1] or each.report != plain.get(way[0])}
            if not results:
                able = sorted(
                    (way for way in attempts if attempts[way].works), key=lambda way: _by_seconds(attempts[way])
                )
                chosen = able[:_WAYS] or chosen
            results += attempts.values()
        return results

    def _other_way(self, option: StepOption, weights: str, twice: bool, ranks_per_node: int) -> StepOption | None:
        """Return the mesh of an option with whole weights, or cut over all ranks or those of a node; or None."""
        axes, batches = option.mesh, option.microbatches
        if weights == "whole":
            return self.attempt(axes, False, twice, microbatches=batches)
        within = _without_pipe(axes)
        if torch.Size(within.values()).numel() == 1:
            return None
        if PIPE_AXIS in axes and PIPE_SCHEDULES[self._schedule].parts_backward:
            return None  # `jigsaw.pipeline` refuses cut weights there
        if weights == "cut":
            return self.attempt(axes, True, twice, microbatches=batches)
        hybrid = hybrid_axes(within, ranks_per_node) if ranks_per_node else None
        if hybrid is None:
            return None
        stages = {PIPE_AXIS: axes[PIPE_AXIS]} if PIPE_AXIS in axes else {}
        return self.attempt({**stages, **hybrid[0]}, True, twice, microbatches=batches, replicate=(hybrid[1],))

    def tried_meshes(self, meshes: Sequence[Mapping[str, int]]) -> list[StepOption]:
        """Return options with whole weights, the fastest first; of many meshes, the fastest with one block a row."""
        if len(meshes) > _MANY and self._block_count(min(meshes, key=_ranks_in_space)):
            meshes = self._fastest_by_a_block(meshes)
        return sorted(map(self.attempt, meshes), key=_by_seconds)

    def _fastest_by_a_block(self, meshes: Sequence[Mapping[str, int]]) -> list[Mapping[str, int]]:
        """Return the meshes that are fastest with one block a row.  A mesh is compared with one that cuts a dim of
        space into fewer parts, and the batch into more. It is left out where that one takes longer than the best,
        because it sends even more.
        """
        seconds: dict[tuple[int, ...], float] = {}
        chosen: list[Mapping[str, int]] = []
        for axes in sorted(meshes, key=_ranks_in_space):
            wider = [tuple(other.values()) for other in _wider_meshes(axes)]
            far = _FAR * min(seconds.values(), default=float("inf"))
            if any(seconds.get(sizes, 0.0) > far for sizes in wider):
                seconds[tuple(axes.values())] = float("inf")
                continue
            seconds[tuple(axes.values())] = _by_seconds(self.attempt(axes, blocks=1))
            chosen.append(axes)
        return sorted(chosen, key=lambda axes: seconds[tuple(axes.values())])[:_MESHES]

    def tried_pipes(self, fastest: Sequence[Mapping[str, int]]) -> list[StepOption]:
        batch = self._batch
        options: list[StepOption] = []
        for ranks in (2, 4, 8):
            meshes, stages = _giving_ranks(fastest, PIPE_AXIS, ranks), self._stage_count(ranks)
            if batch < ranks or not meshes or self._block_count(fastest[0]) < stages:
                continue
            for axes in meshes[:1]:
                # as many microbatches as possible, because each one more makes the bubble smaller
                possible = [n for n in range(ranks, batch + 1) if batch % (n * axes.get(DATA_AXIS, 1)) == 0]
                options += [self.attempt(axes, microbatches=n) for n in possible[-1:]]
        return sorted(options, key=_by_seconds)

    def _block_count(self, axes: Mapping[str, int]) -> int:
        if self._blocks is None and isinstance(self._model, nn.Module):
            self._blocks = sum(map(len, rows_of_blocks(self._model)))
        if self._blocks is None:  # of a model that is made from the mesh
            report = self.attempt(axes, blocks=1).report
            self._blocks = 0 if report is None else report.blocks
        return self._blocks


def _giving_ranks(meshes: Sequence[Mapping[str, int]], name: str, size: int) -> list[dict[str, int]]:
    candidates: list[dict[str, int]] = []
    for axes in meshes:
        for giver, ranks in axes.items():
            less = {**axes, giver: ranks // size}
            candidate = {name: size, **less} if name == PIPE_AXIS else {**less, name: size}
            if ranks % size == 0 and candidate not in candidates:
                candidates.append(candidate)
    return candidates


def hybrid_axes(axes: Mapping[str, int], ranks_per_node: int) -> tuple[dict[str, int], str] | None:
    """Return the mesh with an axis, a part of `data` over the nodes, along which each node has the same parts, and its
    name. None: weights cannot be cut within nodes and be the same between them.

    >>> from jigsaw.dryrun.mesh_search import hybrid_axes
    >>> hybrid_axes({"data": 64, "lat": 4}, 8)
    ({'replicate': 32, 'data': 2, 'lat': 4}, 'replicate')
    >>> hybrid_axes({"data": 64, "lat": 4}, 4)
    ({'data': 64, 'lat': 4}, 'data')
    """
    data, others = axes.get(DATA_AXIS, 1), _ranks_in_space(axes)
    within = gcd(data, max(ranks_per_node // others, 1))
    if data == within or within * others == 1:
        return None
    if within == 1:
        return dict(axes), DATA_AXIS
    return {REPLICATE_AXIS: data // within, **axes, DATA_AXIS: within}, REPLICATE_AXIS


def _ranks_in_space(axes: Mapping[str, int]) -> int:
    return torch.Size(axes.values()).numel() // axes.get(DATA_AXIS, 1)


def _wider_meshes(axes: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Return the meshes of as many ranks with one axis of space shorter, by a prime factor, and `data` longer."""
    for name, size in axes.items():
        for factor in range(2, size + 1) if name not in (DATA_AXIS, CHANNEL_AXIS) else ():
            if size % factor == 0 and all(factor % n for n in range(2, factor)):
                yield {**axes, name: size // factor, DATA_AXIS: axes.get(DATA_AXIS, 1) * factor}


def _by_seconds(option: StepOption) -> float:
    return option.report.seconds if option.report is not None and option.report.is_complete else float("inf")


def _without_pipe(axes: Mapping[str, int]) -> dict[str, int]:
    return {name: size for name, size in axes.items() if name != PIPE_AXIS}


def possible_meshes(
    x_shape: Sequence[int], spec: LayoutSpec | None, devices: int, align: int | Mapping[int, int] = 1
) -> Iterator[dict[str, int]]:
    """Return the meshes of `devices` ranks whose dims are long enough, each once; `align` rows stay together.  Of an
    input without space, as tokens are, the batch alone is cut; of a `spec` that gives the batch no axis, space alone.
    """
    space = space_dims(x_shape, spec)
    has_batch = spec is None or any(
        DATA_AXIS in ((names,) if isinstance(names, str) else names or ()) for names in spec
    )
    samples = x_shape[0] if has_batch else 1
    if not space and samples % devices:
        raise ShardingError(
            f"an input of {len(x_shape)} dims is cut along its batch alone, and x_shape={tuple(x_shape)} has "
            f"{samples} samples, no multiple of devices={devices}; images [N, C, lat, lon] and volumes [N, C, z, y, x] "
            "are cut in space, too, and so is what a spec names (advise --axes cell=-1)"
        )
    together = [align if isinstance(align, int) else align.get(dim, 1) for dim in space.values()]
    sizes = samples, *(x_shape[dim] for dim in space.values())
    most = [n // 2 if rows == 1 else -(-n // rows) for n, rows in zip(sizes[1:], together, strict=True)]
    seen: set[tuple[tuple[int, int, int], ...]] = set()
    for factors in _factorizations(devices, len(sizes)):
        parts = zip(sizes[1:], together, factors[1:], strict=True)
        alike = (sizes[0], 1, factors[0]), *sorted(parts)
        fits = sizes[0] % factors[0] == 0 and all(
            f in range(1, max(n, 1) + 1) for n, f in zip(most, factors[1:], strict=True)
        )
        if fits and alike not in seen:
            seen.add(alike)
            yield dict(zip((DATA_AXIS, *space), factors, strict=True))


def _factorizations(number: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (number,)
        return
    for first in range(1, number + 1):
        if number % first == 0:
            yield from ((first, *rest) for rest in _factorizations(number // first, parts - 1))


def _opened_store(store: Any, axes: Mapping[str, int], space: Iterable[str]) -> Any:
    from jigsaw import io

    options = dict(store) if isinstance(store, Mapping) else {"store": store}
    path = options.pop("store")
    spec = {name: name for name in axes if name in space}
    return io.open(path, mesh=dict(axes), spec=options.pop("spec", spec), **options)


def advice_text(options: Sequence[StepOption]) -> str:
    """Describe the best five options that work, each with its reasons, and what would have to change for the next
    better one.  The last lines are those of a script that has the best.

    >>> found = jigsaw.dryrun.advise_mesh(torch.nn.Conv2d(3, 3, 3, padding=1), (1, 3, 16, 16), 1)
    >>> jigsaw.dryrun.advice_text(found).startswith("1. one rank: whole weights")
    True
    """
    working = [o for o in options if o.works and o.report is not None]
    lines: list[str] = []
    for place, option in enumerate(working[:_BEST], 1):
        assert option.report is not None
        lines += [f"{place}. {option}", *(f"   {reason}" for reason in _reasons(option, option.report, working[0]))]
    if not working:
        lines.append("none of the meshes works:")
    best = working[0].report if working else None
    better = [o for o in options if not o.works and o.report is not None and o.report.is_complete]
    better = [o for o in better if best is None or (o.report is not None and o.report.seconds < best.seconds)]
    for option in sorted(better, key=lambda o: o.report.peak_bytes if o.report else 0)[: 1 if working else _BEST]:
        assert option.report is not None
        lines.append(
            f"next better: {option}, {seconds_text(option.report.seconds)} a step; it would need {option.hindrance}"
        )
    refused = {o.hindrance: o for o in options if o.report is None or not o.report.is_complete}
    lines += [f"not possible: {option}: {why}" for why, option in list(refused.items())[:_BEST]]
    if working:
        lines += ["", f"to have {working[0]}:", *(f"    {line}" for line in working[0].lines_to_paste)]
    return "\n".join(lines)


def _reasons(option: StepOption, report: DryRunReport, best: StepOption) -> Iterator[str]:
    bounds = {name: seconds / report.seconds for name, seconds in report.seconds_by_bound.items()}
    parts = ", ".join(f"{name} {share:.0%}" for name, share in bounds.items() if share >= 0.01)
    assert best.report is not None
    slower = "" if option is best else f", {report.seconds / best.report.seconds:.2f} times the best"
    yield f"{seconds_text(report.seconds)} a step{slower}; bound by {report.bound} ({parts})"
    most = {kind: size for kind, size in report.peak.items() if size > report.peak_bytes / 10}
    memory = ", ".join(f"{kind} {size_text(size)}" for kind, size in most.items())
    yield f"{size_text(report.peak_bytes)} of {size_text(report.device_memory)} a device: {memory}"
    if option.begins:
        yield f"stages begin with {', '.join(option.begins)}, balanced by their seconds (stages='balanced')"
    yield f"each rank sends {size_text(report.sent_bytes)} in {report.messages} messages a step"
    for remark in report.remarks:
        if remark.kind != "value":
            yield f"{remark.kind} in {remark.module or 'the model'}: {remark.function} ({size_text(remark.sent_bytes)})"
