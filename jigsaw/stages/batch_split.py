"""Microbatches of a batch: equal parts of the rows of dim 0 that each rank holds, on the mesh of a stage.

With 8 samples cut by `data` at 0, 4, 8 and two microbatches, the first has samples 0, 1, 4 and 5: nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut
from jigsaw.geometry.layout import Layout
from jigsaw.ranks.mesh import axes_of_mesh, is_same_mesh
from jigsaw.stages.stage_calls import TileOnPaper
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals import pytree


class BatchSplit:
    """Split of the inputs and targets of a step into microbatches.

    The first tensor that has dims is the batch in its dim 0.  Every microbatch gets the whole of an input with another
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
            # whole: the samples that the ranks' parts have, in their order
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
    """Return the layout of a microbatch: its dim 0 has one of so many parts of every rank's rows."""
    (cut,) = layout.dim(0)
    return layout.replace_dim(0, Cut(cut.size // parts, tuple(p // parts for p in cut.points), cut.axes))


def as_on_paper(args: Any) -> Any:
    """Return the tiles of a microbatch as all that is known before they have values."""
    return pytree.tree_map_only(Tile, lambda tile: TileOnPaper(-1, tile.layout, tile.dtype), args)
