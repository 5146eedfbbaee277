"""Plan of what travels between the stages of a pipeline, found by one forward pass on paper: no rank computes or sends.

The forward pass of a net is one Python function, and a stage is a part of it. It goes from the first call of the module
that begins the stage to that of the module which begins the next.  From before that part, it needs tiles: the arguments
of the call or others that the function still holds (the skips of a U-Net).  The pass on paper has all of them: tiles
whose local tensors have no values (`FakeTensorMode`), in functions that send nothing (`shape_run`).  It numbers the
tiles that are made between calls of whole modules, or returned by one.  Where a stage begins, it hides their local
tensors. A tile whose local tensor is read again within the stage has to travel there, through the stages between.

Plain tensors cannot be hidden.  Every stage makes again those that come from constants, buffers and the net's own
parameters between modules.  Any other that a later stage uses travels as a tile that nothing cuts. It comes from its
origin: a module returned it, or a tile gave it (a mean).  The pass on paper runs again with those as tiles.

For example stem, down, up, head with ``head(up(down(a)) + a)``, ``a = stem(x)``, cut at `up`.  Tiles: 0 is x, 1 is a, 2
what `down` returns.  Stage 1 begins; `up` reads 2, the sum reads 1, nothing reads 0.  So 1 and 2 are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm import debug
from jigsaw.comm.checkpoint_runs import open_frames
from jigsaw.comm.graph_calls import shape_run
from jigsaw.errors import ShardingError
from jigsaw.ops.meeting.plain_operands import AVERAGED_MARK
from jigsaw.parallel.models_on_paper import caches_on_paper, copy_without_values, unchanged_draws
from jigsaw.stages.stage_calls import (
    GIVEN_BY_TILE,
    CallWatch,
    ModelInputs,
    PlainOrigin,
    RecordedCall,
    TileOnPaper,
    WatchedPass,
)
from jigsaw.stages.stage_cuts import StageCuts, stage_of_tensor
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import memory_id, tensor_version
from jigsaw.torch_internals.dispatch import operator_schema, without_modes
from jigsaw.torch_internals.fake_tensors import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    PaperMode,
    TorchDispatchMode,
)

# -- the plan ----------------------------------------------------------------------------------------------------------


@dataclass
class PipelinePlan:
    """Calls of whole modules in their order; where each stage begins: its call, and the numbers of tiles before it and
    of plain tensors that these had given; the tiles that it is sent; the plain tensors that travel `as_tiles`; and
    `read_apart`, parameters and buffers that are read outside of calls of their stage's modules, without values.
    `caches` are those of functions of the model that kept tensors without values.
    """

    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])
    first_calls: list[int] = field(default_factory=lambda: [0])
    tiles_before: list[int] = field(default_factory=lambda: [0])
    left_before: list[int] = field(default_factory=lambda: [0])
    sent: list[list[TileOnPaper]] = field(default_factory=lambda: [[]])
    as_tiles: frozenset[PlainOrigin] = frozenset()
    read_apart: dict[str, Tensor] = field(default_factory=dict[str, Tensor])
    caches: tuple[Any, ...] = ()

    def has_given(self) -> bool:
        return any(call == GIVEN_BY_TILE for call, _ in self.as_tiles)


@contextmanager
def on_paper(mode: FakeTensorMode) -> Generator[None]:
    """Run the block with tensors without values, and send and compare nothing."""
    with mode, shape_run(), debug.without_comparing():
        yield


# -- the model on paper -----------------------------------------------------------------------------------------------


class PaperModel:
    """A copy of a model without values, made before its stages are parted; one that has none in the given mode is not
    copied.
    """

    def __init__(self, model: nn.Module, cuts: StageCuts, mesh: DeviceMesh, mode: FakeTensorMode | None = None) -> None:
        self.cuts, self.mesh = cuts, mesh
        self.mode = mode or PaperMode()
        self.model = self._copy_without_values(model) if mode is None else model
        for p in self.model.parameters():
            setattr(p, AVERAGED_MARK, mesh.size())  # marked like the parameters of a stage
        self.watch = CallWatch(self.model, cuts)
        # names of modules with parameters or buffers; any other module is the same in every stage
        self.with_state = frozenset(n for n in cuts.stage_of if _tensors_of(self.model.get_submodule(n)))
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        self.names = {id(x): name for name, x in named}

    def stage_of(self, name: str) -> int | None:
        return stage_of_tensor(name, self.cuts)

    def names_of_buffer(self, name: str) -> list[str]:
        by_name = dict(self.model.named_buffers(remove_duplicate=False))
        return [other for other, x in by_name.items() if x is by_name[name]]

    def _copy_without_values(self, model: nn.Module) -> nn.Module:
        try:
            return copy_without_values(model, self.mode, self.mesh.device_type)
        except Exception as error:
            raise ShardingError(
                f"pipeline needs a copy of {type(model).__name__} without values, but copy.deepcopy(model) fails: "
                f"{error}; keep what cannot be copied out of the model's attributes"
            ) from error

    def plan(self, inputs: ModelInputs, training: Mapping[str, bool]) -> PipelinePlan:
        for name, module in self.model.named_modules():
            module.training = training[name]
        as_tiles = frozenset[PlainOrigin]()
        while True:
            run = _PlanningPass(self, as_tiles)
            self._pass_on_paper(run, inputs)
            run.made.caches = caches_on_paper()
            for cache in run.made.caches:
                cache.cache_clear()
            if run.crossing <= as_tiles:
                return run.finished_plan()
            as_tiles |= run.crossing

    def order_of_calls(self, inputs: ModelInputs) -> list[str]:
        run = _OrderPass(self.mesh, frozenset())
        self._pass_on_paper(run, inputs)
        for cache in caches_on_paper():
            cache.cache_clear()
        return run.order

    def _pass_on_paper(self, run: _PaperPass, inputs: ModelInputs) -> None:
        with on_paper(self.mode), unchanged_draws():
            tiles = pytree.tree_map_only(TileOnPaper, lambda x: x.paper_tile(self.mesh), inputs)
            try:
                with run.watch_of_plain() as plain:
                    out = self.watch.run(run, tiles)
                for x in pytree.tree_leaves(out):  # the loss reads the result of the model
                    if isinstance(x, Tile):
                        x.local  # noqa: B018 (to read it is to note that it is used)
                    elif isinstance(x, Tensor) and plain is not None:
                        plain.mark_of(x, "the loss")
            except DataDependentOutputException as error:
                raise ShardingError(
                    f"pipeline: in module {run.inside_of!r} Python reads a value ({error}), which there is none on "
                    "paper; leave it to tensor functions"
                ) from error
            except DynamicOutputShapeException as error:
                raise ShardingError(
                    f"pipeline: in module {run.inside_of!r}, or after it, a shape hangs on values ({error}), of "
                    "which there are none on paper: a mask as an index, or rows of a cut dim that are written to "
                    "by index; use torch.where"
                ) from error


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


class _PaperPass(WatchedPass):
    inside_of = ""  # the whole module that was called last

    def watch_of_plain(self) -> AbstractContextManager[Any]:
        return nullcontext()


class _OrderPass(_PaperPass):
    def __init__(self, mesh: DeviceMesh, as_tiles: frozenset[PlainOrigin]) -> None:
        super().__init__(mesh, as_tiles)
        self.order: list[str] = []

    def answer(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        self.inside_of = name
        self.calls += 1
        if name not in self.order:
            self.order.append(name)
        return self.call_inside(call, args, kwargs)


class _PlanningPass(_PaperPass):
    def __init__(self, paper: PaperModel, as_tiles: frozenset[PlainOrigin]) -> None:
        super().__init__(paper.mesh, as_tiles)
        self.paper, self.cuts, self.with_state, self.stage = paper, paper.cuts, paper.with_state, 0
        self.made = PipelinePlan(as_tiles=as_tiles)
        self.crossing = set[PlainOrigin]()
        self._versions = {name: tensor_version(x) for name, x in paper.model.named_buffers()}
        self._tiles: list[tuple[Tile, torch.dtype]] = []
        self._found: list[dict[int, TileOnPaper]] = []  # the tiles where each stage after the first begins
        self._read: list[set[int]] = [set()]
        self._stage_of_frame: dict[Any, int] = {}  # keyed by the frame of a checkpointed part

    def see(self, tile: Tile) -> None:
        super().see(tile)
        self._check_checkpoint()

    def _check_checkpoint(self) -> None:
        frames, _, _ = open_frames()
        if any(self._stage_of_frame.setdefault(frame, self.stage) != self.stage for frame in frames):
            raise ShardingError(
                f"stages={list(self.cuts.begins)!r}: {self.cuts.begins[self.stage - 1]!r} begins a stage within what "
                "is checkpointed, and no stage could run that again in its backward pass; cut between checkpointed "
                "modules: stages="
            )

    def watch_of_plain(self) -> AbstractContextManager[Any]:
        return _PlainTensorWatch(self)

    def mark_plain(self, origin: PlainOrigin, x: Tensor) -> None:
        setattr(x, _MADE_IN, _PlainMark(self, self.stage, False, frozenset((origin,))))

    def keep(self, number: int, tile: Tile) -> None:
        # if a custom Function is about to return it, `local` must not be read, because it has no node yet
        rows: Tensor | None = tile.__dict__.get("_rows")
        self._tiles.append((tile, (tile.local if rows is None else rows).dtype))

    def answer(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if name in self.cuts.begins[self.stage :]:
            self._begin_stage(name)
        self._check_checkpoint()
        self._check_order(name)
        self.inside_of = name
        self.calls += 1
        out = self.call_inside(call, args, kwargs)
        leaves, spec = pytree.tree_flatten(out)
        self.made.calls.append(RecordedCall(name, tuple(self._recorded(name, leaf) for leaf in leaves), spec))
        return out

    def _begin_stage(self, name: str) -> None:
        if name != self.cuts.begins[self.stage]:
            raise ShardingError(
                f"stages={list(self.cuts.begins)!r}: the model calls {name!r} before {self.cuts.begins[self.stage]!r}; "
                "name modules in the order of their calls"
            )
        tiles = enumerate(tile for tile, _ in self._tiles)
        known = {n: tile.local for n, tile in tiles if "local" in tile.__dict__ or "awaited" not in tile.__dict__}
        self.stage += 1
        self.made.first_calls.append(self.calls)
        self.made.tiles_before.append(self.tiles)
        self.made.left_before.append(self.left)
        self._found.append({n: TileOnPaper(n, tile.layout, dtype) for n, (tile, dtype) in enumerate(self._tiles)})
        self._read.append(set())
        for number, local in known.items():
            where = local.shape, local.stride(), local.dtype, local.device
            state = self._tiles[number][0].__dict__
            state["awaited"] = partial(self._read_again, number, where)
            del state["local"]

    def _read_again(self, number: int, where: Any, tile: Tile) -> Tensor:
        shape, stride, dtype, device = where
        self._read[self.stage].add(number)
        # new, as it comes from another rank; a view, as without a node it would be traced back into another stage
        local = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        needs = torch.is_grad_enabled() and dtype.is_floating_point
        local = tile.__dict__["local"] = local.requires_grad_(needs).view_as(local)
        setattr(local, _MADE_IN, _PlainMark(self, self.stage, False, frozenset()))
        return local

    def _check_order(self, name: str) -> None:
        owner = self.cuts.stage_of[name]
        if owner != self.stage and name in self.with_state:
            raise ShardingError(
                f"module {name!r} lies in stage {owner}, where the model has it, but the forward pass calls it in "
                f"stage {self.stage} of stages={list(self.cuts.begins)!r}; pass example=, a tile like the input, which "
                "finds the order of the calls, or cut the model elsewhere"
            )

    def _recorded(self, name: str, leaf: Any) -> Any:
        if isinstance(leaf, Tile):
            number = self.number(leaf)
            return TileOnPaper(number, leaf.layout, self._tiles[number][1])
        if isinstance(leaf, Tensor) or leaf is None or isinstance(leaf, bool | int | float | str):
            return leaf
        raise ShardingError(
            f"module {name!r} returns a {type(leaf).__name__}, which a pipeline cannot pass on; return tensors, or "
            "lists, tuples and dicts of them, or cut the model elsewhere"
        )

    def finished_plan(self) -> PipelinePlan:
        if self.stage + 1 < self.cuts.stages:
            raise ShardingError(
                f"stages={list(self.cuts.begins)!r}: the forward pass does not call {self.cuts.begins[self.stage]!r}; "
                "name modules that it calls"
            )
        for stage, tiles in enumerate(self._found, start=1):
            needed = {n for read in self._read[stage:] for n in read if n in tiles}
            self.made.sent.append([tiles[n] for n in sorted(needed)])
        self.made.tiles_before.append(self.tiles)
        self.made.left_before.append(self.left)
        self.made.first_calls.append(self.calls)
        for name, x in self.paper.model.named_buffers():
            if name in self.made.read_apart and tensor_version(x) != self._versions[name]:
                raise ShardingError(
                    f"buffer {name!r} of stage {self.paper.stage_of(name)} is changed in the forward pass, and read "
                    "outside of the call of its module, where another stage would not see that; read it within"
                )
        return self.made


@dataclass(frozen=True)
class _PlainMark:
    """Mark of a plain tensor: the stage that makes it, whether every stage can make it again, and its sources."""

    run: _PlanningPass
    stage: int
    is_again: bool
    origins: frozenset[PlainOrigin]


class _PlainTensorWatch(TorchDispatchMode):
    """Watch that marks plain tensors, and notes those of whole modules that are read outside of their calls; raises
    `ShardingError` where a later stage takes one that can neither be made again nor sent, or another's parameter.
    """

    def __init__(self, run: _PlanningPass) -> None:
        super().__init__()
        self._run, self._changed = run, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        marks = [self.mark_of(x, func) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        out = func(*args, **(kwargs or {}))
        run = self._run
        is_again = not run.is_inside and not _draws(func) and all(mark.is_again for mark in marks)
        if operator_schema(func).is_mutable and not is_again:
            self._changed.update(_marked_memory(x) for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        result_mark = _PlainMark(run, run.stage, is_again, frozenset().union(*(mark.origins for mark in marks)))
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter):
                mark = getattr(x, _MADE_IN, None)
                if mark is None or mark.run is not run:
                    setattr(x, _MADE_IN, result_mark)
        return out

    def mark_of(self, x: Tensor, func: Any) -> _PlainMark:
        run = self._run
        name = run.paper.names.get(id(x))
        if name is not None:
            return self._mark_of_state(name, x)
        mark: _PlainMark | None = getattr(x, _MADE_IN, None)
        if mark is None or mark.run is not run:
            return _PlainMark(run, run.stage, not isinstance(x, FakeTensor), frozenset())
        if mark.is_again and _marked_memory(x) in self._changed:
            mark = replace(mark, is_again=False)
        if mark.stage != run.stage and not mark.is_again:
            run.crossing |= mark.origins
            if not mark.origins:
                raise ShardingError(
                    f"a plain tensor of shape {tuple(x.shape)} that stage {mark.stage} makes is used in stage "
                    f"{run.stage}, by {func} after the call of {run.inside_of!r}, and is not made of constants and "
                    "buffers alone (random numbers, a parameter, or a tile's local rows): make it in the module that "
                    "uses it, or cut the model elsewhere (stages=)"
                )
        return mark

    def _mark_of_state(self, name: str, x: Tensor) -> _PlainMark:
        run, stage = self._run, self._run.paper.stage_of(name)
        is_apart = stage is not None and (not run.is_inside or stage != run.stage)
        is_weight = isinstance(x, nn.Parameter)
        if is_apart:
            run.made.read_apart[name] = x
            if is_weight and stage != run.stage:
                raise ShardingError(
                    f"parameter {name!r} of stage {stage} is read in stage {run.stage}, after the call of "
                    f"{run.inside_of!r}; cut the model where both are in one stage"
                )
        return _PlainMark(run, run.stage, not (is_apart and is_weight), frozenset())


def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def _marked_memory(x: Tensor) -> int:
    return memory_id(x.untyped_storage())


class PlainOpsAgain(TorchDispatchMode):
    """Mode within a stage's part on paper: operators that need no tile's values have their own, and are computed."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if _draws(func) or any(isinstance(x, FakeTensor) or x.is_meta for x in tensors):
            return func(*args, **(kwargs or {}))
        with without_modes():
            return func(*args, **(kwargs or {}))


_MADE_IN = "_jigsaw_made_in_stage"
