"""What travels between the stages of a pipeline, found by one forward pass on paper: no rank computes or sends.

The forward pass of a net is one Python function, and a stage is a part of it: from the first call of the module that
begins the stage to that of the module which begins the next.  What that part needs of what was before are tiles, the
arguments of the call or any other that the function still holds (the skips of a U-Net).  The pass on paper has all of
them: tiles whose local tensors have no values (`FakeTensorMode`), in functions that send nothing (`shape_run`).  It
numbers the tiles that are made between calls of whole modules, or returned by one.  Where a stage begins, it hides
their local tensors; whose local tensor is read again within the stage has to travel there, through the stages between.

For example stem, down, up, head with ``head(up(down(a)) + a)``, ``a = stem(x)``, cut at `up`.  Tiles: 0 is x, 1 is a,
2 what `down` returns.  Stage 1 begins; `up` reads 2, the sum reads 1, nobody reads 0.  So 1 and 2 are sent.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from jigsaw import debug
from jigsaw.cut import ShardingError
from jigsaw.graph_calls import shape_run
from jigsaw.kept_halos import open_frames
from jigsaw.layout import Layout
from jigsaw.mesh import mesh_coordinate
from jigsaw.model_world import within_model
from jigsaw.nn.weights import is_dtensor
from jigsaw.ops.plain_operands import AVERAGED_MARK
from jigsaw.pipeline_stages import StageCuts
from jigsaw.tile import Tile, watch_new_tiles

# -- what stands for values -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileOnPaper:
    """A tile by its number in a forward pass, and all that is known of it before it has values."""

    number: int
    layout: Layout
    dtype: torch.dtype

    def paper_tile(self, mesh: DeviceMesh) -> Tile:
        """The tile, without values; called in a `FakeTensorMode`."""
        local = torch.empty(self.layout.local_shape(mesh_coordinate(mesh)), dtype=self.dtype, device=mesh.device_type)
        return Tile(local, self.layout, mesh)

    @property
    def sent_layout(self) -> Layout:
        """As it travels: halos stay behind."""
        return self.layout.without_halo()


@dataclass(frozen=True)
class RecordedCall:
    """A call of a whole module: what it returns, tiles as `TileOnPaper`."""

    name: str
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec


@dataclass
class PipelinePlan:
    """Calls of whole modules in their order; where each stage begins: its call, how many tiles there were before, and
    which of them it is sent.
    """

    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])
    first_calls: list[int] = field(default_factory=lambda: [0])
    tiles_before: list[int] = field(default_factory=lambda: [0])
    sent: list[list[TileOnPaper]] = field(default_factory=lambda: [[]])


# -- a forward pass whose calls are watched ---------------------------------------------------------------------------


class WatchedPass:
    """One forward pass of a model: it counts the calls of whole modules, and numbers the tiles between them."""

    def __init__(self) -> None:
        self.calls, self.tiles = 0, 0
        self.is_inside = False  # of a whole module
        self._serial, self._thread = object(), get_ident()

    def see(self, tile: Tile) -> None:
        """Number a tile that is made between modules; those of other threads, as a loader's, are nothing of ours."""
        if get_ident() == self._thread:
            self.number(tile)

    def number(self, tile: Tile) -> int:
        """The number of a tile; one that has none yet gets the next."""
        mark = tile.__dict__.get("numbered")
        if mark is not None and mark[0] is self._serial:
            return mark[1]
        at = self.tiles
        tile.__dict__["numbered"] = self._serial, at
        self.tiles += 1
        self.keep(at, tile)
        return at

    def keep(self, number: int, tile: Tile) -> None:
        """A tile has got this number."""

    def answer(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a call of a whole module returns."""
        raise NotImplementedError

    def call_inside(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """What a whole module returns, its tiles numbered; those that it made within are not."""
        self.is_inside = True
        watch_new_tiles(None)
        try:
            out = call(*args, **kwargs)
        finally:
            self.is_inside = False
            watch_new_tiles(self.see)
        for leaf in pytree.tree_leaves(out):
            if isinstance(leaf, Tile):
                self.number(leaf)
        return out


class CallWatch:
    """Calls of the whole modules of a model; outside of a pass they are what they are without it."""

    def __init__(self, model: nn.Module, cuts: StageCuts, elsewhere: Collection[str] = ()) -> None:
        self.model, self.current, self._elsewhere = model, None, elsewhere
        for name in cuts.stage_of:
            module: Any = model.get_submodule(name)
            # before its hooks: where another stage's module is called, they must not run
            module._compiled_call_impl = partial(self._call, name, module._compiled_call_impl or module._call_impl)

    current: WatchedPass | None

    def _call(self, name: str, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        run = self.current
        if run is None and name in self._elsewhere:
            raise ShardingError(
                f"module {name!r} of another rank's stage is called outside of a step: by what is checkpointed and has "
                "a cut within it (cut between checkpointed modules: stages=), or by the model itself (call pipe.step)"
            )
        if run is None or run.is_inside:
            return call(*args, **kwargs)
        return run.answer(name, call, args, kwargs)

    def run(self, watched: WatchedPass, args: Sequence[Any]) -> Any:
        """The forward pass of the model on tiles."""
        self.current = watched
        for leaf in pytree.tree_leaves(args):
            if isinstance(leaf, Tile):
                watched.number(leaf)
        watch_new_tiles(watched.see)
        try:
            with within_model(self):
                return self.model(*args)
        finally:
            watch_new_tiles(None)
            self.current = None


@contextmanager
def on_paper(mode: FakeTensorMode) -> Generator[None]:
    """Within it tensors have no values, and nothing is sent or compared."""
    with mode, shape_run(), debug.without_comparing():
        yield


# -- the model on paper -----------------------------------------------------------------------------------------------


class PaperModel:
    """A copy of a model whose parameters and buffers have no values, made before its stages are parted.

    One whose tensors have none already, in a mode that is given, is taken as it is.
    """

    def __init__(self, model: nn.Module, cuts: StageCuts, mesh: DeviceMesh, mode: FakeTensorMode | None = None) -> None:
        self.cuts, self.mesh = cuts, mesh
        self.mode = mode or FakeTensorMode(allow_non_fake_inputs=True)
        self.model = self._copy_without_values(model) if mode is None else model
        for p in self.model.parameters():
            setattr(p, AVERAGED_MARK, mesh.size())  # as that of a stage
        self.watch = CallWatch(self.model, cuts)
        # what has neither is the same in every stage
        self._with_state = frozenset(n for n in cuts.stage_of if _tensors_of(self.model.get_submodule(n)))

    def _copy_without_values(self, model: nn.Module) -> nn.Module:
        with self.mode:
            memo: dict[int, Any] = {id(x): _without_values(x, self.mesh) for x in _tensors_of(model)}
        try:
            return copy.deepcopy(model, memo)
        except Exception as error:
            raise ShardingError(
                f"pipeline needs a copy of {type(model).__name__} without values, but copy.deepcopy(model) fails: "
                f"{error}; keep what cannot be copied out of the model's attributes"
            ) from error

    def plan(self, args: Sequence[Any], training: Mapping[str, bool]) -> PipelinePlan:
        """What travels for a microbatch of these arguments (tiles on paper)."""
        for name, module in self.model.named_modules():
            module.training = training[name]
        with on_paper(self.mode), torch.random.fork_rng(devices=[]):
            run = _PlanningPass(self.cuts, self._with_state)
            with _PlainTensorWatch(run):
                tiles = pytree.tree_map_only(TileOnPaper, lambda x: x.paper_tile(self.mesh), tuple(args))
                try:
                    self.watch.run(run, tiles)
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
        return run.finished_plan()


def _tensors_of(model: nn.Module) -> list[Tensor]:
    return [*model.parameters(), *model.buffers()]


def _without_values(x: Tensor, mesh: DeviceMesh) -> Tensor:
    if is_dtensor(x):
        dtensor: Any = type(x.detach())  # whose module is loaded where there is one
        local, how = _without_values(x.to_local().detach(), mesh), (x.device_mesh, x.placements)
        made: Tensor = dtensor.from_local(local, *how, run_check=False, shape=x.shape, stride=x.stride())
    else:
        made = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=mesh.device_type)
    return nn.Parameter(made, requires_grad=x.requires_grad) if isinstance(x, nn.Parameter) else made


class _PlanningPass(WatchedPass):
    def __init__(self, cuts: StageCuts, with_state: frozenset[str]) -> None:
        super().__init__()
        self.cuts, self.with_state, self.stage, self.inside_of = cuts, with_state, 0, ""
        self.made = PipelinePlan()
        self._tiles: list[tuple[Tile, torch.dtype]] = []
        self._found: list[dict[int, TileOnPaper]] = []  # the tiles where each stage after the first begins
        self._read: list[set[int]] = [set()]
        self._stage_of_frame: dict[Any, int] = {}  # of what is checkpointed

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

    def keep(self, number: int, tile: Tile) -> None:
        # of one that a custom Function is about to return `local` must not be read: it has no node yet
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
        # a new tensor: it comes from another rank; a view of it, for one without a node would be traced back to what a
        # custom Function of another stage was given
        local = torch.empty_strided(shape, stride, dtype=dtype, device=device)
        needs = torch.is_grad_enabled() and dtype.is_floating_point
        local = tile.__dict__["local"] = local.requires_grad_(needs).view_as(local)
        return local

    def _check_order(self, name: str) -> None:
        owner = self.cuts.stage_of[name]
        if owner != self.stage and name in self.with_state:
            raise ShardingError(
                f"module {name!r} lies in stage {owner}, where the model has it, but the forward pass calls it in "
                f"stage {self.stage} of stages={list(self.cuts.begins)!r}; cut the model elsewhere, or register its "
                "modules in the order in which it calls them"
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
        for stage, found in enumerate(self._found, start=1):
            needed = {n for read in self._read[stage:] for n in read if n in found}
            self.made.sent.append([found[n] for n in sorted(needed)])
        self.made.tiles_before.append(self.tiles)
        self.made.first_calls.append(self.calls)
        return self.made


class _PlainTensorWatch(TorchDispatchMode):
    """Marks plain tensors with the stage that makes them.

    *Raises*: `ShardingError` where a later stage takes one: tiles alone can be told apart, and are sent.
    """

    def __init__(self, run: _PlanningPass) -> None:
        super().__init__()
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in pytree.tree_leaves((args, kwargs)):
            made_in = getattr(x, _MADE_IN, None) if isinstance(x, Tensor) else None
            if made_in is not None and made_in[0] is self._run and made_in[1] != self._run.stage:
                raise ShardingError(
                    f"a plain tensor of shape {tuple(x.shape)} that stage {made_in[1]} makes is used in stage "
                    f"{self._run.stage}, by {func} after the call of {self._run.inside_of!r}; only tiles are sent from "
                    "stage to stage: compute it in the module that uses it, or cut the model elsewhere (stages=)"
                )
        out = func(*args, **(kwargs or {}))
        for x in pytree.tree_leaves(out):
            if isinstance(x, Tensor) and not isinstance(x, nn.Parameter):
                mark = getattr(x, _MADE_IN, None)
                if mark is None or mark[0] is not self._run:
                    setattr(x, _MADE_IN, (self._run, self._run.stage))
        return out


_MADE_IN = "_jigsaw_made_in_stage"
