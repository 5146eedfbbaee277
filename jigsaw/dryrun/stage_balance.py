"""Stages of a pipeline that take about the same time, and fit, from a dry run with costs by piece of the model.

For example six pieces of 1, 1, 1, 1, 1 and 4 ms for three stages. They become 2, 3 and 4 ms, where equal numbers of
pieces would wait for one of 5 ms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.dryrun.devices import DEVICES, Device
from jigsaw.dryrun.fake_ranks import fake_mesh
from jigsaw.dryrun.few_blocks import longest_row
from jigsaw.dryrun.rank_playing import PlayedRank, StepPlan, play_rank, prepared_model
from jigsaw.dryrun.step_prices import priced_rank
from jigsaw.errors import ShardingError
from jigsaw.ranks.mesh import axes_of_mesh
from jigsaw.stages.stage_cuts import cut_places
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals.fake_tensors import FakeTensorMode


@dataclass(frozen=True)
class PieceCost:
    """Costs of a piece of the model: seconds of a microbatch, forward and backward; bytes of its state and of a
    microbatch.  The former are its weights with their gradients and the optimizer's state; the latter what it keeps of
    a microbatch for the backward pass.
    """

    name: str
    seconds: float
    weight_bytes: int
    kept_bytes: int


def balanced_stages(
    model: nn.Module,
    example: Tile,
    mesh: DeviceMesh,
    *,
    axis: str,
    stages: int,
    microbatches: int,
) -> tuple[str, ...]:
    """Return the modules that begin the later stages of a pipeline on `mesh`, balanced by a dry run of one microbatch.
    Every rank finds the same.

    *Sends*: nothing.
    *Raises*: `ShardingError` for a model of fewer modules with parameters than stages, and one that does not run. Also
    for a batch that is not a multiple of the microbatches.
    """
    axes = {name: size for name, size in axes_of_mesh(mesh) if name != axis} or {"alone": 1}
    batch, *rest = example.layout.shape
    if batch % microbatches:
        raise ShardingError(f"example= has a batch of {batch}, which is no multiple of microbatches={microbatches}")
    spec = tuple(_without_axis(entry, axis) for entry in example.layout.spec)
    device = DEVICES["cpu" if mesh.device_type == "cpu" else "h100"]
    shapes, is_processor = ((batch // microbatches, *rest),), device.is_processor
    plan = StepPlan(model, shapes, spec, example.dtype, keeps_calls=False, on_processor=is_processor)
    pieces = piece_costs(plan, axes, stages, device, device.ranks_per_node)
    memory = torch.cuda.get_device_properties(0).total_memory if mesh.device_type == "cuda" else device.memory_bytes
    return tuple(pieces[at].name for at in balanced_cuts(pieces, stages, microbatches, memory))


def _without_axis(entry: Any, axis: str) -> Any:
    if isinstance(entry, tuple):
        left = tuple(name for name in entry if name != axis)
        return left if len(left) > 1 else next(iter(left), None)
    return None if entry == axis else entry


def piece_costs(
    plan: StepPlan, axes: Mapping[str, int], stages: int, device: Device, ranks_per_node: int
) -> list[PieceCost]:
    """Return the cost of each piece of a model that so many stages may begin with; of a row of equal blocks two are
    played.
    """
    with fake_mesh(axes, 0) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        model = prepared_model(plan, mesh)[0]
        row, names = longest_row(model), [name for name, _ in cut_places(model, stages)]
    blocks = [] if row is None else [f"{row[0]}.{at}" for at in range(row[1])]
    if row is not None and all(block in names for block in blocks):
        left_out = set(blocks[2:])
        plan = replace(plan, row=(row[0], 2), pieces=tuple(name for name in names if name not in left_out))
    else:
        blocks, plan = [], replace(plan, pieces=tuple(names))
    played = play_rank(plan, axes, 0)
    stopped = [remark for remark in played.remarks if remark.kind == "stopped"]
    if stopped:
        raise ShardingError(
            f"stages='balanced' needs a dry run of the model, which stops in {stopped[0].module or 'the model'}: "
            f"{stopped[0].reason}; name modules in stages="
        )
    costs = _costs_of(played, device, ranks_per_node, torch.Size(axes.values()).numel())
    # a block that was not played costs as much as the second one
    return [costs[name] if name in costs else replace(costs[blocks[1]], name=name) for name in names]


def _costs_of(played: PlayedRank, device: Device, ranks_per_node: int, ranks: int) -> dict[str, PieceCost]:
    costs: dict[str, PieceCost] = {}
    for piece in played.pieces:
        priced = priced_rank(replace(played, phases=piece.phases), device, ranks_per_node, ranks)
        seconds = sum(phase.seconds for phase in priced.phases.values())
        costs[piece.name] = PieceCost(piece.name, seconds, piece.weight_bytes, piece.kept_bytes)
    return costs


def balanced_cuts(pieces: Sequence[PieceCost], stages: int, microbatches: int, memory: float) -> list[int]:
    """Return where stages 1, 2, ... begin, so that the slowest stage is as fast as possible.  Each stage must fit into
    nine tenths of the memory; if none of the ways does, take that of the least memory.

    Of 1F1B's microbatches stage s of P has P - s under way, or all where these are fewer.

    >>> from jigsaw.dryrun.stage_balance import PieceCost, balanced_cuts
    >>> pieces = [PieceCost(str(at), seconds, 0, 0) for at, seconds in enumerate((1, 1, 1, 1, 1, 4))]
    >>> balanced_cuts(pieces, 3, 4, 1e9)
    [2, 5]
    """
    seconds, weights, kept = (
        [0, *accumulate(getattr(piece, what) for piece in pieces)] for what in ("seconds", "weight_bytes", "kept_bytes")
    )

    def cost(stage: int, begin: int, end: int) -> tuple[float, float]:
        under_way = min(stages - stage, microbatches)
        size = weights[end] - weights[begin] + under_way * (kept[end] - kept[begin])
        return max(size - 0.9 * memory, 0.0), seconds[end] - seconds[begin]

    # best[n]: for the first n pieces, the most memory that a stage so far lacks, their longest seconds, and where these
    # stages begin
    best = {n: (cost(0, 0, n), list[int]()) for n in range(1, len(pieces) + 1)}
    for stage in range(1, stages):
        best = {
            n: min(
                (tuple(max(a, b) for a, b in zip(best[m][0], cost(stage, m, n), strict=True)), [*best[m][1], m])
                for m in range(stage, n)
            )
            for n in range(stage + 1, len(pieces) + 1)
        }
    return best[len(pieces)][1]
