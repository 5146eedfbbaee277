"""Forward pass of a pipeline's model that records calls of whole modules, and numbers the tiles between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut
from jigsaw.geometry.layout import Layout
from jigsaw.ranks.mesh import axes_of_mesh, is_same_mesh, mesh_coordinate
from jigsaw.ranks.model_world import within_model
from jigsaw.stages.stage_cuts import StageCuts
from jigsaw.tile.table import table
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import call_instead

# -- what stands for values -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileOnPaper:
    """A tile by its number in a forward pass, with its layout and dtype, before it has values."""

    number: int
    layout: Layout
    dtype: torch.dtype

    def paper_tile(self, mesh: DeviceMesh) -> Tile:
        """Return the tile, without values; called in a `FakeTensorMode`."""
        local = torch.empty(self.layout.local_shape(mesh_coordinate(mesh)), dtype=self.dtype, device=mesh.device_type)
        return Tile(local, self.layout, mesh)

    @property
    def sent_layout(self) -> Layout:
        return self.layout.without_halo()


@dataclass(frozen=True)
class RecordedCall:
    """A call of a whole module with its result, whose tiles are `TileOnPaper`."""

    name: str
    leaves: tuple[Any, ...]
    spec: pytree.TreeSpec


ModelInputs = tuple[Sequence[Any], Mapping[str, Any]]
"""Arguments of a model, by place and by name."""

PlainOrigin = tuple[int, int]
"""Origin of a plain tensor: the call of a whole module that returned it, and its place among the leaves; or
`GIVEN_BY_TILE`, and how many tensors tiles had given between modules.
"""

GIVEN_BY_TILE = -1


# -- a forward pass whose calls are watched ---------------------------------------------------------------------------


class WatchedPass:
    """One forward pass of a model: it counts the calls of whole modules, and numbers the tiles between them."""

    def __init__(self, mesh: DeviceMesh, as_tiles: frozenset[PlainOrigin]) -> None:
        self.calls, self.tiles = 0, 0
        self.is_inside = False  # whether a module that belongs to one stage is running
        self.left, self._mesh, self._as_tiles = 0, mesh, as_tiles
        self._serial, self._thread = object(), get_ident()

    def see(self, tile: Tile) -> None:
        if get_ident() == self._thread:
            self.number(tile)

    def number(self, tile: Tile) -> int:
        mark = tile.__dict__.get("numbered")
        if mark is not None and mark[0] is self._serial:
            return mark[1]
        at = self.tiles
        tile.__dict__["numbered"] = self._serial, at
        self.tiles += 1
        self.keep(at, tile)
        return at

    def keep(self, number: int, tile: Tile) -> None:
        """Note that a tile has this number."""

    def answer(self, name: str, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        raise NotImplementedError

    def call_inside(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        number = self.calls - 1
        self.is_inside = True
        table.see_new_tile = None
        try:
            out = call(*args, **kwargs)
        finally:
            self.is_inside = False
            table.see_new_tile = self.see
        leaves, spec = pytree.tree_flatten(out)
        plain = [at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and not isinstance(leaf, Tile)]
        for at in plain:
            leaves[at] = self._pass_on((number, at), leaves[at])
        for leaf in leaves:
            if isinstance(leaf, Tile):
                self.number(leaf)
        return pytree.tree_unflatten(leaves, spec) if plain else out

    def leave(self, x: Tensor) -> Tensor:
        """Return what a tile gives as a plain tensor."""
        if self.is_inside or get_ident() != self._thread:
            return x
        self.left += 1
        return self._pass_on((GIVEN_BY_TILE, self.left), x)

    def _pass_on(self, origin: PlainOrigin, x: Tensor) -> Tensor:
        if origin not in self._as_tiles:
            self.mark_plain(origin, x)
            return x
        return Tile(x, Layout.of(x.shape, (None,) * x.ndim, axes_of_mesh(self._mesh)), self._mesh)

    def mark_plain(self, origin: PlainOrigin, x: Tensor) -> None:
        """Note that a plain tensor has its origin here, and stays plain."""


class CallWatch:
    """Watch of the calls of the whole modules of a model; outside of a pass they run as usual."""

    def __init__(self, model: nn.Module, cuts: StageCuts, elsewhere: Collection[str] = ()) -> None:
        self.model, self.current, self._elsewhere = model, None, elsewhere
        for name in cuts.stage_of:
            module: Any = model.get_submodule(name)
            # before its hooks, which must not run for a module of another stage
            call_instead(module, partial(partial, self._call, name))

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

    def run(self, watched: WatchedPass, inputs: ModelInputs) -> Any:
        """Run the forward pass of the model on tiles."""
        self.current = watched
        for leaf in pytree.tree_leaves(inputs):
            if isinstance(leaf, Tile):
                watched.number(leaf)
        table.see_new_tile = watched.see
        table.see_left_tensor = watched.leave
        try:
            with within_model(self):
                return self.model(*inputs[0], **inputs[1])
        finally:
            table.see_new_tile = None
            table.see_left_tensor = None
            self.current = None


class BatchSplit:
    """Split of the inputs and targets of a step into microbatches.

    The first tensor that has dims is the batch in its dim 0.  Of 8 samples cut by `data` at 0, 4, 8 the first of two
    has samples 0, 1, 4 and 5: nothing is sent.  Every microbatch gets the whole of an input with another
    size there (a mask of places, one number).

    *Raises*: `ShardingError` for tiles of another mesh, and a batch of which some rank does not have a whole number of
    rows a microbatch. Also for an input of as many rows as a microbatch, and targets of another batch.
    """

    def __init__(self, mesh: DeviceMesh, stage_mesh: DeviceMesh, axis: str, parts: int, args: Sequence[Any]) -> None:
        self._mesh, self._stage_mesh, self._axis, self.parts = mesh, stage_mesh, axis, parts
        tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor) and x.ndim]
        if not tensors:
            raise ShardingError("pipe.step(x, y) needs a tensor or a tile as x, whose dim 0 is the batch")
        first = tensors[0]
        cut = first.layout.dim(0) if isinstance(first, Tile) else (Cut(len(first), (0, len(first))),)
        self._cut = cut[0]
        uneven = [p for p in self._cut.points if p % parts]
        if len(cut) > 1 or uneven or self._cut.has_halo:
            raise ShardingError(
                f"microbatches={parts}: dim 0 of x, of {self._cut.size} samples cut at {list(self._cut.points)} by "
                f"{list(self._cut.axes)}, is to be cut into {parts} equal parts on every rank; take a batch of a "
                f"multiple of {parts * self._cut.pieces} samples, or other microbatches="
            )

    def stage_tile(self, x: Any) -> Any:
        """Return an input on the mesh of the stages, with whole tensors as tiles that nothing cuts."""
        if not isinstance(x, Tensor):
            return x
        axes = axes_of_mesh(self._stage_mesh)
        if not isinstance(x, Tile):
            return Tile(x, Layout.of(x.shape, (None,) * x.ndim, axes), self._stage_mesh)
        if is_same_mesh(x.mesh, self._stage_mesh):
            return x
        if not is_same_mesh(x.mesh, self._mesh) or self._axis in x.layout.cut_axes:
            raise ShardingError(
                f"pipe.step: a tile of shape {tuple(x.shape)} lies on mesh {dict(axes_of_mesh(x.mesh))}, spec "
                f"{x.layout.spec}; make it on the pipeline's mesh {dict(axes_of_mesh(self._mesh))} with a spec without "
                f"{self._axis!r}, or on pipe.stage_mesh"
            )
        return Tile(x.local, Layout.from_dims(x.layout.dims(), axes), self._stage_mesh)

    def parts_of(self, values: Any, is_input: bool = False) -> list[Any]:
        """Return a nest of tiles, plain tensors and other values, for each microbatch."""
        leaves, spec = pytree.tree_flatten(values)
        by_leaf = [self._leaf_parts(leaf, is_input) for leaf in leaves]
        return [pytree.tree_unflatten([parts[at] for parts in by_leaf], spec) for at in range(self.parts)]

    def _leaf_parts(self, x: Any, is_input: bool) -> list[Any]:
        if not isinstance(x, Tensor):
            return [x] * self.parts
        rows, same = x.shape[0] if x.ndim else 1, x.ndim > 0 and x.shape[0] == self._cut.size
        if is_input and not same and (rows == 1 or rows * self.parts != self._cut.size):
            return [x] * self.parts
        if not same or (isinstance(x, Tile) and (x.layout.dim(0)[0].points, x.layout.dim(0)[0].held) != self._known):
            raise ShardingError(
                f"pipe.step: dim 0 of a tensor of shape {tuple(x.shape)} is not the batch of {self._cut.size} samples "
                f"cut at {list(self._cut.points)} that dim 0 of x is; cut x and y alike along dim 0"
            )
        if not isinstance(x, Tile):
            # a plain tensor has all samples, so take those of each rank's part, in the order of ranks
            pieces = [self._rows(x[a:b]) for a, b in zip(self._cut.points, self._cut.points[1:], strict=False)]
            return [torch.cat([piece[at] for piece in pieces]) for at in range(self.parts)]
        layout = micro_layout(x.layout, self.parts)
        return [Tile(local, layout, x.mesh) for local in self._rows(x.local)]

    @property
    def _known(self) -> tuple[Any, Any]:
        return self._cut.points, self._cut.held

    def _rows(self, x: Tensor) -> list[Tensor]:
        return list(x.split(len(x) // self.parts)) if len(x) else [x] * self.parts


def micro_layout(layout: Layout, parts: int) -> Layout:
    """Return the layout of a microbatch: along dim 0 it has one of `parts` equal parts of every rank's rows."""
    (cut,) = layout.dim(0)
    return layout.replace_dim(0, Cut(cut.size // parts, tuple(p // parts for p in cut.points), cut.axes))


def as_on_paper(args: Any) -> Any:
    """Return the tiles of a microbatch as all that is known before they have values."""
    return pytree.tree_map_only(Tile, lambda tile: TileOnPaper(-1, tile.layout, tile.dtype), args)
