"""jigsaw: train PyTorch models on samples too big for one device."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

# Tile's closed table is filled here, so that the order of a user's imports does not matter
from jigsaw import nn, ops
from jigsaw.checkpoint.checkpoint_state import RandomState
from jigsaw.comm.stop_request import StopRequest
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.neighbors import Neighbors
from jigsaw.nn.local_function import LocalFunction, local
from jigsaw.ops.into_torch.whole_tensor import strict_mode
from jigsaw.ranks.mesh import init_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import from_local, shard

if TYPE_CHECKING:
    from jigsaw import io, metrics, testing
    from jigsaw.checkpoint.checkpoints import PendingSave, latest, load, save
    from jigsaw.checkpoint.whole_weights import load_weights, save_weights
    from jigsaw.dryrun import dry_run
    from jigsaw.errors import CheckpointError
    from jigsaw.model_pipeline import pipeline
    from jigsaw.parallel.compiled_forward import compile
    from jigsaw.parallel.parallelize import clip_grad_norm_, no_sync, parallelize

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Cut",
    "Layout",
    "LocalFunction",
    "Neighbors",
    "PendingSave",
    "RandomState",
    "ShardingError",
    "StopRequest",
    "Tile",
    "clip_grad_norm_",
    "compile",
    "dry_run",
    "from_local",
    "init_mesh",
    "io",
    "latest",
    "load",
    "load_weights",
    "local",
    "metrics",
    "nn",
    "no_sync",
    "ops",
    "parallelize",
    "pipeline",
    "save",
    "save_weights",
    "shard",
    "strict_mode",
    "testing",
]

# Modules that load more than torch (zarr, multiprocessing, FSDP) load at first use.
_LATER = {
    "io": "jigsaw.io",
    "metrics": "jigsaw.metrics",
    "testing": "jigsaw.testing",
    "parallelize": "jigsaw.parallel.parallelize",
    "no_sync": "jigsaw.parallel.parallelize",
    "clip_grad_norm_": "jigsaw.parallel.parallelize",
    "compile": "jigsaw.parallel.compiled_forward",
    "pipeline": "jigsaw.model_pipeline",
    "CheckpointError": "jigsaw.errors",
    "PendingSave": "jigsaw.checkpoint.checkpoints",
    "latest": "jigsaw.checkpoint.checkpoints",
    "save": "jigsaw.checkpoint.checkpoints",
    "load_weights": "jigsaw.checkpoint.whole_weights",
    "save_weights": "jigsaw.checkpoint.whole_weights",
    "load": "jigsaw.checkpoint.checkpoints",
    "dry_run": "jigsaw.dryrun",
}


# opt_einsum asks the package of a tensor's class for these; for a Tile they are torch's.
_OF_OPT_EINSUM = ("einsum", "tensordot", "transpose")


def __getattr__(name: str) -> Any:
    if name in _OF_OPT_EINSUM and "opt_einsum" in sys.modules:
        return getattr(importlib.import_module("opt_einsum.backends.torch"), name)
    if name not in _LATER:
        raise AttributeError(f"module 'jigsaw' has no attribute {name!r}")
    module = importlib.import_module(_LATER[name])
    value = module if _LATER[name] == f"jigsaw.{name}" else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
