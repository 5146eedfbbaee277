"""Reentrant activation checkpointing, ``torch.utils.checkpoint.checkpoint(..., use_reentrant=True)``, of tiles.

Torch's `CheckpointFunction` runs the forward pass without a graph, and in the backward pass once more with one.  It
sends the gradients through that by a backward pass of its own.  It looks into the graph of its arguments, where a tile
has none.  So it is given local tensors; tiles are made of them within, and of what comes out.

**Plain tensors among the arguments** are leaves in the inner pass, as if nothing had come before them.  Within they are
as a model's parameters are: marked, so that the mean over the ranks is their gradient, whether they meet tiles or plain
tensors only.  That mean, which every rank then has alike, goes on.  A plain tensor that comes out has left a tile.

**Inner passes** are part of the pass around them.  Work for the end of a backward pass waits for the end of the
outermost one (`at_end_of_pass`).  So gradients are reduced once and not in every inner pass.  FSDP2 waits, too; but a
unit that runs again once it was behind in the same backward pass loses gradients, also those of plain tensors (torch
2.13): `jigsaw.parallel.gradients` refuses that.

>>> from torch.utils.checkpoint import checkpoint
>>> tile = jigsaw.shard(torch.ones(2, 4), jigsaw.init_mesh(lat=1), (None, "lat"))
>>> tile.local.requires_grad_()[0, 0]
tensor(1., grad_fn=<SelectBackward0>)
>>> checkpoint(torch.exp, tile, use_reentrant=True).sum().backward()
>>> tile.grad.shape
torch.Size([2, 4])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import checkpoint as _torchs_checkpoint

from jigsaw.errors import ShardingError
from jigsaw.geometry.layout import Layout
from jigsaw.ops.meeting.plain_operands import AVERAGED_MARK, averaged_operand, averaged_over, graph_origins
from jigsaw.ranks.mesh import mesh_size
from jigsaw.ranks.model_world import is_one_process, within_model
from jigsaw.tile.shell_making import at_first_tile
from jigsaw.tile.tile import Tile, leave_tile, shared_mesh
from jigsaw.torch_internals.autograd import graph_task_id, queue_callback, will_engine_run
from jigsaw.torch_internals.private_names import replace_in_torch

# -- backward passes within others ------------------------------------------------------------------------------------

# backward passes around the running one, outermost first, and calls to make once the outermost one ends
_outer_passes: list[int] = []
_at_end: list[Callable[[], None]] = []
_recomputing: list[object] = []  # functions that run for the second time
_begun: list[object] = []  # functions that run for the first time


def outermost_pass() -> int:
    """Return which backward pass is under way, counting inner ones as the one around them; -1 for none."""
    return _outer_passes[0] if _outer_passes else innermost_pass()


def innermost_pass() -> int:
    """Return which backward pass is under way, counting an inner one by itself; -1 for none."""
    return graph_task_id()


def is_taken_from_pass(leaf: Tensor) -> bool:
    """Say whether the backward pass gives a leaf's gradient to `torch.autograd.grad`, not to its ``.grad``."""
    try:
        will_engine_run(get_gradient_edge(leaf).node)
    except RuntimeError:  # torch raises for leaves in such a pass
        return True
    return False


def at_end_of_pass(callback: Callable[[], None]) -> None:
    """Call it when the outermost backward pass that is under way ends."""
    if _outer_passes:
        _at_end.append(callback)
    else:
        queue_callback(callback)


def is_recomputing() -> bool:
    """Say whether a checkpointed function runs again, with a graph."""
    return bool(_recomputing) and torch.is_grad_enabled()


def is_first_run() -> bool:
    """Say whether a checkpointed function runs for the first time, without a graph."""
    return bool(_begun)


# -- the function -----------------------------------------------------------------------------------------------------

_TorchsFunction: Any = _torchs_checkpoint.CheckpointFunction


class _CheckpointTiles(_TorchsFunction):
    """Torch's own, of local tensors."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        as_model = within_model(ctx) if is_one_process() else nullcontext()  # the inner pass runs within the model, too
        _outer_passes.append(innermost_pass())
        try:
            with as_model:
                return _TorchsFunction.backward(ctx, *grads)
        finally:
            _outer_passes.pop()
            waiting = [] if _outer_passes else _at_end[:]
            if not _outer_passes:
                _at_end.clear()
            for callback in waiting:
                at_end_of_pass(callback)

    @classmethod
    def apply(cls, function: Any, keep_random_state: bool, *args: Any) -> Any:
        """Run the function.  *Sends*: what the function sends, forward, and again before its own backward pass; for
        each plain argument that requires grad one all-reduce of its gradient.
        *Raises*: `ShardingError` for a DTensor among the arguments.
        """
        tiles = [x for x in args if isinstance(x, Tile)]
        if not tiles:
            return super().apply(function, keep_random_state, *args)
        run = _OnLocals(function, [(x.layout if isinstance(x, Tile) else None) for x in args], shared_mesh(tiles))
        out = super().apply(run, keep_random_state, *[_as_given(x, tiles[0]) for x in args])
        return run.as_tiles(out)


def _as_given(x: Any, like: Tile) -> Any:
    """Return an argument as torch's function takes it."""
    if isinstance(x, Tile):
        x.check_no_history()
        return x.local
    if not isinstance(x, Tensor):
        return x
    if hasattr(x, "placements"):
        raise ShardingError(
            f"checkpoint(use_reentrant=True) of a Tile and a DTensor of shape {tuple(x.shape)}: its gradient would "
            "be lost; pass use_reentrant=False, or let the module that has it run within"
        )
    return averaged_operand(x, like)


class _OnLocals:
    """A function of tiles, and of any other values, as one of their local tensors."""

    def __init__(self, function: Any, layouts: Sequence[Layout | None], mesh: DeviceMesh) -> None:
        self.function, self.layouts, self.mesh = function, layouts, mesh
        self.results: list[Layout | None] = []  # layouts of the results, set by the first run

    def __call__(self, *args: Any) -> Any:
        again = torch.is_grad_enabled()
        arguments: list[Any] = []
        for x, layout in zip(args, self.layouts, strict=True):
            if again and layout is None and isinstance(x, Tensor) and x.requires_grad:
                setattr(x, AVERAGED_MARK, mesh_size(self.mesh))
            arguments.append(x if layout is None else Tile(x, layout, self.mesh))
        runs = _recomputing if again else _begun
        runs.append(self)
        try:
            out = self.function(*arguments)
        finally:
            runs.pop()
        values = out if isinstance(out, tuple) else (out,)
        if again:
            for x in values:
                _check_plain_result(x, self.mesh)
        self.results = [x.layout if isinstance(x, Tile) else None for x in values]
        locals_ = tuple(x.local if isinstance(x, Tile) else x for x in values)
        return locals_ if isinstance(out, tuple) else locals_[0]

    def as_tiles(self, out: Any) -> Any:
        values = out if isinstance(out, tuple) else (out,)
        tiles = tuple(self._as_tile(x, layout) for x, layout in zip(values, self.results, strict=True))
        return tiles if isinstance(out, tuple) else tiles[0]

    def _as_tile(self, x: Any, layout: Layout | None) -> Any:
        if layout is not None:
            return Tile(x, layout, self.mesh)
        return leave_tile(x, self.mesh) if isinstance(x, Tensor) else x


def _check_plain_result(x: Any, mesh: DeviceMesh) -> None:
    """Check that a plain result, whose gradient is whole, was not made of parameters alone that nobody averages."""
    if isinstance(x, Tile) or not isinstance(x, Tensor) or x.grad_fn is None or mesh_size(mesh) == 1:
        return
    left, leaves = graph_origins(x)
    if not left and any(isinstance(leaf, nn.Parameter) and averaged_over(leaf) == 1 for leaf in leaves):
        raise ShardingError(
            f"checkpoint(use_reentrant=True) of a Tile returns a plain tensor of shape {tuple(x.shape)} that was made "
            "of parameters alone, which no one averages over the ranks; pass the model through jigsaw.parallelize, or "
            "pass use_reentrant=False"
        )


@at_first_tile
def _change_reentrant_checkpointing() -> None:
    # `checkpoint` looks the class up when it is called, so earlier imports of the function use it, too
    replace_in_torch(_torchs_checkpoint, "CheckpointFunction", _CheckpointTiles)
