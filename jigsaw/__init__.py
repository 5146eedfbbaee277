"""jigsaw: train PyTorch models on samples too big for one device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jigsaw import nn
from jigsaw.layout import Cut, Layout, ShardingError
from jigsaw.mesh import init_mesh

# Every file of ops joins Tile's closed table here, so that the order of a user's imports never matters.
from jigsaw.ops import along, joining, pointwise, reductions, shapes
from jigsaw.tile import Tile, from_local, shard

if TYPE_CHECKING:
    from jigsaw import io, testing
    from jigsaw.checkpoint import CheckpointError, load, save
    from jigsaw.parallel import clip_grad_norm_, no_sync, parallelize

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Cut",
    "Layout",
    "ShardingError",
    "Tile",
    "along",
    "clip_grad_norm_",
    "from_local",
    "init_mesh",
    "io",
    "joining",
    "load",
    "nn",
    "no_sync",
    "parallelize",
    "pointwise",
    "reductions",
    "save",
    "shapes",
    "shard",
    "testing",
]

# What loads more than torch (zarr, multiprocessing, FSDP) is loaded when it is first named.
_LATER = {
    "io": "jigsaw.io",
    "testing": "jigsaw.testing",
    "parallelize": "jigsaw.parallel",
    "no_sync": "jigsaw.parallel",
    "clip_grad_norm_": "jigsaw.parallel",
    "CheckpointError": "jigsaw.checkpoint",
    "save": "jigsaw.checkpoint",
    "load": "jigsaw.checkpoint",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'jigsaw' has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    value = module if _LATER[name] == f"jigsaw.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
