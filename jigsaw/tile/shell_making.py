"""The making of shells, of tiles from pickles, and changes of torch that are made with the first of them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import ShardingError
from jigsaw.geometry.layout import Layout
from jigsaw.ranks.model_world import job_rank, job_size
from jigsaw.torch_internals.autograd import make_wrapper

# Types that autograd can differentiate.  Their shells require grad, so that an autograd.Function that meets a tile
# makes a node, which `check_no_history` finds.
_DIFFERENTIABLE = frozenset(
    d for d in vars(torch).values() if isinstance(d, torch.dtype) and (d.is_floating_point or d.is_complex)
)
META_DEVICE = torch.device("meta")  # on meta no kernel runs, and `x.data = tile` takes over no memory


def make_shell(cls: type, shape: torch.Size, dtype: torch.dtype, needs_node: bool = True) -> Any:
    """Return a shell of that class; C++ code that asks for its strides comes to ``__torch_dispatch__``."""
    return _make_shell(
        cls,
        shape,
        dtype=dtype,
        device=META_DEVICE,
        requires_grad=needs_node and dtype in _DIFFERENTIABLE,
        dispatch_sizes_strides_policy="strides",
    )


def tile_as_pickle(cls: type, local: Tensor, layout: Layout, mesh: DeviceMesh) -> Any:
    """Return what ``__reduce__`` does, for a tile of this rank."""
    return tile_from_pickle, (cls, local, layout, mesh, (job_rank(), job_size()))


def tile_from_pickle(cls: type, local: Tensor, layout: Layout, mesh: DeviceMesh, place: tuple[int, int]) -> Any:
    """Return the tile that a rank pickled, whose rank and number of ranks are `place`.

    *Raises*: `ShardingError` on another rank, whose part is another one.
    """
    rank, ranks = job_rank(), job_size()
    if (rank, ranks) != place and mesh.size() > 1:
        raise ShardingError(
            f"a Tile of shape {layout.shape} was pickled by rank {place[0]} of {place[1]}, whose part it has, and this "
            f"is rank {rank} of {ranks}; save and send whole tensors, of tile.full_tensor(), and cut them again "
            "with jigsaw.shard, or each rank's own file; jigsaw.save is for the state of training"
        )
    return cls(local, layout, mesh)


_patches: list[Callable[[], None]] = []


def at_first_tile(patch: Callable[[], None]) -> Callable[[], None]:
    """Register a change of torch that only tiles need, to be made with the process' first tile."""
    _patches.append(patch)
    return patch


def _make_first_shell(*args: Any, **kwargs: Any) -> Any:
    global _make_shell
    with _first_lock:
        while _patches:
            _patches.pop()()
        _make_shell = make_wrapper
    return make_wrapper(*args, **kwargs)


_make_shell: Any = _make_first_shell  # replaced by the first tile, so that later ones pay nothing for the check
_first_lock = threading.RLock()
