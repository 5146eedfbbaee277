"""Activation checkpointing, ``torch.utils.checkpoint.checkpoint(..., use_reentrant=False)``, of tiles.

Torch makes a frame for each call, and saves its arguments as autograd saves tensors.  Within another call, or within
``save_on_cpu``, these are not kept but made again, or brought back, as other tensors.  For a tile only its local tensor
can be.

>>> from torch.utils.checkpoint import checkpoint
>>> tile = jigsaw.shard(torch.ones(2, 4), jigsaw.init_mesh(lat=1), (None, "lat"))
>>> tile.requires_grad_().local.is_leaf
True
>>> again = lambda x: checkpoint(torch.exp, x.sin(), use_reentrant=False)
>>> checkpoint(again, tile, use_reentrant=False).sum().backward()
>>> tile.grad.shape
torch.Size([2, 4])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm.checkpoint_runs import begin_within_frame, end_run, note_saving_hook
from jigsaw.comm.graph_calls import is_shape_run
from jigsaw.geometry.layout import Layout
from jigsaw.tile.shell_making import at_first_tile
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals.dispatch import Checkpointing
from jigsaw.torch_internals.private_names import replace_in_torch

_torchs = Checkpointing()
_TorchsFrame: Any = _torchs.frame
_TorchsFirstHook: Any = _torchs.first_hook
_TorchsLaterHook: Any = _torchs.later_hook


@dataclass(frozen=True)
class _SavedTile:
    local: Any  # the object that torch saves for the local tensor
    layout: Layout
    mesh: DeviceMesh
    on_paper: Tile | None

    def unpack(self) -> Tile:
        if self.on_paper is not None:
            return self.on_paper
        return Tile(self.local.unpack(), self.layout, self.mesh)


class _FrameOfTiles(_TorchsFrame):
    """Torch's own frame, which saves the local tensors of tiles."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        begin_within_frame(self)

    def save_inputs(self, *args: Any) -> None:
        super().save_inputs(*[_as_saved(x) for x in args])

    def get_inputs(self) -> list[Any]:
        return [x.unpack() if isinstance(x, _SavedTile) else x for x in super().get_inputs()]


def _as_saved(x: Any) -> Any:
    # a tile of another stage of a pipeline has no values to save, so it is saved unchanged
    if not isinstance(x, Tile) or ("awaited" in x.__dict__ and "local" not in x.__dict__):
        return x
    x.check_no_history()
    # Where a stage of a pipeline begins with a checkpointed part, its tiles get their values once the call has begun.
    # Torch's saved value of one on paper stands for it in the count of a call around this one.
    on_paper = x if is_shape_run() else None
    return _SavedTile(_torchs.save_tensor(x.local, is_output=False), x.layout, x.mesh, on_paper)


class _FirstHook(_TorchsFirstHook):
    """Torch's own hooks while the function runs for the first time."""

    def __init__(self, frame: Any) -> None:
        super().__init__(frame)
        note_saving_hook(self.pack_hook, frame, None)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        end_run(self.pack_hook)


class _LaterHook(_TorchsLaterHook):
    """Torch's own hooks while the function runs again."""

    def __init__(self, frame: Any, run: Any) -> None:
        super().__init__(frame, run)
        note_saving_hook(self.pack_hook, frame(), run)

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        end_run(self.pack_hook)


@at_first_tile
def _change_checkpointing() -> None:
    # looked up when a call begins, so that earlier imports of `checkpoint` use them, too
    replace_in_torch(_torchs.module, _torchs.FRAME, _FrameOfTiles)
    replace_in_torch(_torchs.module, _torchs.FIRST_HOOK, _FirstHook)
    replace_in_torch(_torchs.module, _torchs.LATER_HOOK, _LaterHook)
