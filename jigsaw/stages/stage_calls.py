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
from jigsaw.geometry.layout import Layout
from jigsaw.ranks.mesh import axes_of_mesh, mesh_coordinate
from jigsaw.ranks.model_world import within_model
from jigsaw.stages.stage_cuts import StageCuts
from jigsaw.tile.table import table
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import call_instead

# -- what stands for values -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TileOnPaper:
    """A tile by its number in a forward pass, and all that is known of it before it has values."""

    number: int
    layout: Layout
    dtype: torch.dtype

    def paper_tile(self, mesh: DeviceMesh) -> Tile:
        """Return the tile, without values; called in a `FakeTensorMode`."""
        local = torch.empty(self.layout.local_shape(mesh_coordinate(mesh)), dtype=self.dtype, device=mesh.device_type)
        return Tile(local, self.layout, mesh)

    @property
    def sent_layout(self) -> Layout:
        """Layout as it travels, without halos."""
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
        self.is_inside = False  # of a whole module
        self.left, self._mesh, self._as_tiles = 0, mesh, as_tiles
        self._serial, self._thread = object(), get_ident()

    def see(self, tile: Tile) -> None:
        """Give a number to a tile that is made between modules, except in other threads, such as a loader's."""
        if get_ident() == self._thread:
            self.number(tile)

    def number(self, tile: Tile) -> int:
        """Return the number of a tile; one without a number gets the next."""
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
        """Return the result of a call of a whole module."""
        raise NotImplementedError

    def call_inside(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Return the result of a whole module, its tiles numbered; tiles that it made within are not."""
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
