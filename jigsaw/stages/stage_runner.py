"""One stage of a pipeline: the part of the model's forward pass between two calls, on tiles that other stages send.

Each microbatch of a stage runs the model's own forward. Up to the call where the stage begins, it runs without values,
with the recorded results of other stages' modules.  From there it runs with values, and stops at the call where the
next stage begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from jigsaw.comm.exchange import redistribute_rows
from jigsaw.errors import ShardingError
from jigsaw.parallel.parallelize import one_process_backward
from jigsaw.stages.stage_calls import CallWatch, ModelInputs, RecordedCall, TileOnPaper, WatchedPass
from jigsaw.stages.stage_plan import PipelinePlan, PlainOpsAgain, on_paper
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import own_parameters
from jigsaw.torch_internals.fake_tensors import FakeTensorMode


class _EvenGradient(torch.autograd.Function):
    """Identity whose gradient lies in one piece of memory, as a message must."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return grads[0].contiguous()


class _StageEndError(BaseException):
    """Raised where the next stage begins, past every `except Exception` of the model."""


@dataclass
class StageBatch:
    """Microbatches of a step: the model's arguments, the same without values, and the further arguments of `loss`."""

    args: Sequence[Any]
    on_paper: Any
    targets: Sequence[Any]


class StagePass(WatchedPass):
    """The forward pass of one stage and microbatch."""

    def __init__(self, plan: PipelinePlan, stage: int, mesh: DeviceMesh, mode: FakeTensorMode) -> None:
        super().__init__(mesh, plan.as_tiles)
        self.plan, self.stage, self.mesh = plan, stage, mesh
        self.received: Sequence[Tensor] = ()
        self.kept: dict[int, Tile] = {}
        # tiles without values from calls of earlier stages, until this stage begins
        self._before: list[Tile] | None = [] if stage else None
        last = stage + 1 == len(plan.sent)
        self._sent = () if last else tuple(each.number for each in plan.sent[stage + 1])
        self._first, self._end = plan.first_calls[stage], None if last else plan.first_calls[stage + 1]
        self._mode, self._paper = mode, ExitStack()

    def keep(self, number: int, tile: Tile) -> None:
        if self._before is not None:
            self._before.append(tile)
        elif number in self._sent:
            self.kept[number] = tile

    def answer(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        at, self.calls = self.calls, self.calls + 1
        if at < self._first:
            return self._recorded_result(self.plan.calls[at])
        if at == self._first and self._before is not None:
            self._begin(self._before)
        if at == self._end:
            raise _StageEndError
        return self.call_inside(call, args, kwargs)

    def _recorded_result(self, recorded: RecordedCall) -> Any:
        leaves: list[Any] = []
        for leaf in recorded.leaves:
            if not isinstance(leaf, TileOnPaper):
                leaves.append(leaf)
                continue
            assert self._before is not None
            known = leaf.number < len(self._before)  # True if the module returned its argument
            with self._mode:  # making a tile without values runs plain operators, which need the mode
                leaves.append(self._before[leaf.number] if known else leaf.paper_tile(self.mesh))
        return pytree.tree_unflatten(leaves, recorded.spec)

    def _begin(self, before: list[Tile]) -> None:
        """End the pass without values: tiles that were sent get their values, other tiles never do."""
        self._paper.close()
        self._forget_paper()
        self._before = None
        self._check_tiles(len(before), self.stage)
        for tile in before:
            tile.__dict__.pop("local", None)
            tile.__dict__["awaited"] = _refuse_unsent
        for what, local in zip(self.plan.sent[self.stage], self.received, strict=True):
            tile = before[what.number]
            even = _EvenGradient.apply(local)
            tile.__dict__["local"] = redistribute_rows(even, what.sent_layout, tile.layout, self.mesh)
            self.keep(what.number, tile)

    def _forget_paper(self) -> None:
        """Empty the model's caches of tensors by their shapes, which now have no values."""
        for cache in self.plan.caches:
            cache.cache_clear()

    def _check_tiles(self, count: int, stage: int) -> None:
        left = self.plan.left_before[stage] if self.plan.has_given() else self.left
        if (count, self.left) != (self.plan.tiles_before[stage], left):
            raise ShardingError(
                f"the forward pass made {count} tiles before stage {stage}, and {self.plan.tiles_before[stage]} when "
                "the pipeline was planned: a branch that depends on values, on the rank or on earlier calls; leave it "
                "out, or keep it within one module"
            )

    def run(self, watch: CallWatch, inputs: ModelInputs) -> Any:
        """Return the result of the last stage; None for other stages, whose tiles are in `kept`."""
        try:
            if self.stage:
                self._paper.enter_context(on_paper(self._mode))
                inputs = pytree.tree_map_only(TileOnPaper, lambda x: x.paper_tile(self.mesh), inputs)
                self._paper.enter_context(PlainOpsAgain())
                self._lend_state(watch.model)
            out = watch.run(self, inputs)
        except _StageEndError:
            out = None
        finally:
            self._paper.close()
            if self._before is not None:
                self._forget_paper()
        if self._end is not None:
            self._check_tiles(self.tiles, self.stage + 1)
        return out

    def _lend_state(self, model: nn.Module) -> None:
        """Use weights without values in place of other stages' weights that are read outside of calls."""
        for name, x in self.plan.read_apart.items():
            parent, _, key = name.rpartition(".")
            held = own_parameters(model.get_submodule(parent))
            if key in held and held[key].is_meta:
                self._paper.callback(held.__setitem__, key, held[key])
                held[key] = x

    def outgoing(self) -> tuple[Tensor, ...]:
        tiles = [self.kept[number] for number in self._sent]
        for tile in tiles:
            tile.check_no_history()  # refused for the result of a custom Function whose gradient would be lost
        # cloned: the graph of a stage must not end in its own input, nor in a view of a tensor that it still changes
        return tuple(tile.owned().local.clone(memory_format=torch.contiguous_format) for tile in tiles)


def _refuse_unsent(tile: Tile) -> NoReturn:
    raise ShardingError(
        f"a tile of shape {tuple(tile.shape)} is read in another stage than when the pipeline was planned: the forward "
        "pass must be the same for every microbatch"
    )


class StageRunner(nn.Module):
    """Stage as torch's schedules run it: local tensors in, local tensors or the loss out."""

    def __init__(
        self, watch: CallWatch, stage: int, mesh: DeviceMesh, mode: FakeTensorMode, loss: Callable[..., Any]
    ) -> None:
        super().__init__()
        # not as submodules, because all stages of a rank share the model
        self.__dict__.update(watch=watch, owned={}, copied_units=())
        self.stage, self.mesh, self.mode, self.loss = stage, mesh, mode, loss
        self.plan, self.batch = PipelinePlan(), StageBatch((), (), ())
        self.autocast: tuple[Any, ...] = ()
        self.owned: Mapping[str, nn.Parameter]
        self.watch: CallWatch
        self.copied_units: Sequence[FSDPModule]
        """Units of the stage whose parts several ranks have (`replicate`), which sum their gradients once a step."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield from self.owned.items()

    def forward(self, *received: Tensor, place: Tensor) -> Any:
        at = int(place)
        run = StagePass(self.plan, self.stage, self.mesh, self.mode)
        run.received = received
        # no cache, because on paper a weight would be cast to a tensor without values, and kept
        with torch.autocast(*self.autocast, cache_enabled=False):
            out = run.run(self.watch, self.batch.on_paper if self.stage else self.batch.args[at])
            if self.stage + 1 < len(self.plan.sent):
                return self._with_sums_at_last(at, run.outgoing())
            loss = self.loss(out, self.batch.targets[at])
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ShardingError(
                f"loss= returned {type(loss).__name__} {tuple(getattr(loss, 'shape', ()))}; return the mean over the "
                "microbatch, a scalar tensor"
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise ShardingError(
                "loss= returned a tensor without a graph, so no stage would get a gradient: something detached it "
                "(.detach(), .item(), numpy, no_grad), or no weight requires one; for the loss alone call "
                "pipe.step within torch.no_grad()"
            )
        value = loss.full_tensor() if isinstance(loss, Tile) else loss
        (value,) = self._with_sums_at_last(at, (value.reshape(()) / len(self.batch.targets),))
        return value

    def _with_sums_at_last(self, at: int, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # backward passes come in the order of the microbatches; until the last one, FSDP2 adds up the parts
        is_last = at + 1 == len(self.batch.args)

        def begin_backward(gradient: Tensor) -> None:
            for unit in self.copied_units:
                unit.set_requires_all_reduce(is_last, recurse=False)

        with_grad = [x for x in outputs if x.requires_grad]
        one_process_backward(with_grad)
        for x in with_grad if self.copied_units else ():
            x.register_hook(begin_backward)
        copied = (p for unit in self.copied_units for p in cast(nn.Module, unit).parameters())
        if is_last and not with_grad and torch.is_grad_enabled() and any(p.requires_grad for p in copied):
            raise ShardingError(
                f"stage {self.stage} computes nothing with a gradient in the last microbatch, when replicate= sums "
                "what the others have found: use its parameters in each microbatch, or leave replicate= out"
            )
        return outputs
