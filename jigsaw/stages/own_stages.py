"""The stages of a model that one rank of a pipeline has, by torch's schedules: weights of other stages go."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.ops.meeting.plain_operands import AVERAGED_MARK
from jigsaw.parallel.channel_parallel import PlannedCut
from jigsaw.parallel.gradient_buckets import axes_not_cutting
from jigsaw.parallel.parallelize import PIPE_MARK
from jigsaw.parallel.sharding import ShardingOptions
from jigsaw.ranks.mesh import axes_of_mesh, mesh_coordinate
from jigsaw.stages.stage_calls import CallWatch
from jigsaw.stages.stage_cuts import StageCuts, parallel_stage, stage_of_tensor
from jigsaw.stages.stage_plan import PaperModel
from jigsaw.stages.stage_runner import StageRunner
from jigsaw.torch_internals.placements import is_dtensor


@dataclass(frozen=True)
class PipeSchedule:
    """One of torch's schedules: how many stages a rank has (None: any number from 2), and its requirements."""

    make: Any
    per_rank: int | None
    is_v: bool = False
    parts_backward: bool = False  # True: gradients of inputs are computed first, those of weights later
    least_batches: int = 0  # microbatches needed for each stage

    def stages_at(self, place: int, ranks: int, stages: int) -> list[int]:
        """Return the stages of the rank at a place of the axis: they loop over the ranks, or go there and back."""
        return [place, stages - 1 - place] if self.is_v and ranks > 1 else [*range(place, stages, ranks)]


PIPE_SCHEDULES = {
    "gpipe": PipeSchedule(pipelining.ScheduleGPipe, 1),
    "1f1b": PipeSchedule(pipelining.Schedule1F1B, 1, least_batches=1),
    "interleaved_1f1b": PipeSchedule(pipelining.ScheduleInterleaved1F1B, None),
    "interleaved_zero_bubble": PipeSchedule(pipelining.ScheduleInterleavedZeroBubble, None, parts_backward=True),
    "zbv": PipeSchedule(pipelining.ScheduleZBVZeroBubble, 2, is_v=True, parts_backward=True),
    "dualpipev": PipeSchedule(pipelining.ScheduleDualPipeV, 2, is_v=True, parts_backward=True, least_batches=1),
}


def check_schedule(name: str, schedule: PipeSchedule, ranks: int, stages: int, batches: int) -> None:
    """Check the numbers of stages and microbatches.

    *Raises*: `ShardingError` for stages and microbatches that the schedule cannot have.
    """
    if not isinstance(batches, Integral) or batches < 1:
        raise ShardingError(f"microbatches={batches!r} must be a whole number, at least 1")
    if ranks == 1:
        return
    each = schedule.per_rank or max(stages // ranks, 2)
    if stages != each * ranks:
        wanted = f"{schedule.per_rank * ranks}" if schedule.per_rank else f"a multiple of {ranks}, at least {2 * ranks}"
        raise ShardingError(
            f"schedule={name!r} on {ranks} ranks has {wanted} stages, but stages= makes {stages}; name one module less "
            "than there are stages"
        )
    if batches < schedule.least_batches * stages:
        raise ShardingError(f"schedule={name!r} of {stages} stages needs microbatches >= {stages}, not {batches}")
    rounds = max(1, batches // ranks)
    if schedule.per_rank is None and batches % rounds:
        raise ShardingError(
            f"schedule={name!r} on {ranks} ranks: microbatches={batches} is not a multiple of its {rounds} rounds; "
            f"take a multiple of {ranks}"
        )


class PlacedStage(pipelining.PipelineStage):
    """A stage that may lie beside the next one on its rank, as in V-shaped schedules, in passes without backward, too.

    There torch's own stage has no gradient to hand over, and raises.
    """

    def get_local_bwd_output(self, mb_index: int) -> Any:
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)


class OwnStages:
    """Modules of a rank's own stages, and the parameters that every stage has (`shared`)."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        stage_mesh: DeviceMesh,
        axis: str,
        cuts: StageCuts,
        schedule: PipeSchedule,
    ) -> None:
        self.model, self.mesh, self.stage_mesh, self.axis, self.cuts = model, mesh, stage_mesh, axis, cuts
        self.ranks = dict(axes_of_mesh(mesh))[axis]
        self.place = mesh_coordinate(mesh)[[name for name, _ in axes_of_mesh(mesh)].index(axis)]
        self.numbers = schedule.stages_at(self.place, self.ranks, cuts.stages)
        within = {p for name in cuts.stage_of for p in model.get_submodule(name).parameters()}
        self.shared = {name: p for name, p in model.named_parameters() if p not in within}

    def keep(
        self,
        sharding: ShardingOptions | None,
        channel: str,
        planned: Mapping[nn.Module, PlannedCut],
        gather_again: bool = False,
    ) -> nn.Module:
        """Move the weights of other stages to the meta device, and return the module of those that stay
        (`parallel_stage`).

        *Sends*: the shared parameters, from the first rank; cut weights, as `jigsaw.parallelize` does.
        """
        # modules of several stages may share a module with tables, as spherical nets share their transforms
        own = [part for module in self._modules_of(*self.numbers) for part in module.modules()]
        tables = [(part, key, x) for part in own for key, x in part.named_buffers(recurse=False)]
        for name, stage in self.cuts.stage_of.items():
            if stage not in self.numbers:
                self.model.get_submodule(name).to("meta")
        for part, key, x in tables:
            setattr(part, key, x)
        if sharding is not None:
            self._join_groups(sharding, channel)
        with_weights = [m for m in self._modules_of(*self.numbers) if next(m.parameters(), None) is not None]
        holder = parallel_stage(with_weights, self.stage_mesh, sharding, channel, planned, gather_again)
        self._share_parameters()
        return holder

    def _modules_of(self, *numbers: int) -> list[nn.Module]:
        return [self.model.get_submodule(name) for name, stage in self.cuts.stage_of.items() if stage in numbers]

    def _share_parameters(self) -> None:
        axes = [name for name, _ in axes_of_mesh(self.mesh)]
        with torch.no_grad():
            for p in self.shared.values():
                whole_value = p.detach().contiguous()
                comm.broadcast_first(whole_value, self.mesh, axes)
                p.copy_(whole_value)
                setattr(p, AVERAGED_MARK, self.stage_mesh.size())
        for name, p in self.named_parameters():
            setattr(p, PIPE_MARK, (self.mesh, self.axis, name not in self.shared or self.place == 0))

    def _join_groups(self, sharding: ShardingOptions, channel: str) -> None:
        """Make the groups over which any stage cuts weights, because every rank of the job must make each group."""
        names = tuple(name for name, _ in axes_of_mesh(self.stage_mesh))
        cut = (axes_not_cutting(p, self.stage_mesh) for p in self.model.parameters() if is_dtensor(p))
        for axes in dict.fromkeys([names, tuple(name for name in names if name != channel), *cut]):
            if comm.rank_count(self.stage_mesh, [name for name in axes if name not in sharding.replicate]) > 1:
                sharding.mesh_along(self.stage_mesh, axes)

    def runners(
        self, paper: PaperModel, loss: Callable[[Any, Any], Tensor], sharding: ShardingOptions | None
    ) -> list[StageRunner]:
        elsewhere = {
            name
            for name, stage in self.cuts.stage_of.items()
            if stage not in self.numbers and next(self.model.get_submodule(name).parameters(), None) is not None
        }
        watch = CallWatch(self.model, self.cuts, elsewhere)
        runners = [StageRunner(watch, stage, self.stage_mesh, paper.mode, loss) for stage in self.numbers]
        if sharding is not None and sharding.replicate:
            for runner in runners:
                modules = (m for own in self._modules_of(runner.stage) for m in own.modules())
                runner.copied_units = [module for module in modules if isinstance(module, FSDPModule)]
                for unit in runner.copied_units:
                    # all parameters of a unit are summed in one tensor, whichever of them a microbatch uses
                    unit.set_reduce_scatter_unused_params(True, recurse=False)
        return runners

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, p in self.model.named_parameters():
            if name in self.shared or self.has(name):
                yield name, p

    def stage_of(self, name: str) -> int | None:
        return stage_of_tensor(name, self.cuts)

    def has(self, name: str) -> bool:
        stage = self.stage_of(name)
        return stage is None or stage in self.numbers
