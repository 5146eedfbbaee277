"""jigsaw: train PyTorch models on samples too big for one device."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

# Tile's closed table is filled here, so that the order of a user's imports does not matter
from jigsaw import nn, ops
from jigsaw.cut import Cut, ShardingError
from jigsaw.layout import Layout
from jigsaw.mesh import init_mesh
from jigsaw.nn.local_function import LocalFunction, local
from jigsaw.ops.whole_tensor import strict_mode
from jigsaw.random_state import RandomState
from jigsaw.stop_request import StopRequest
from jigsaw.tile import Tile
from jigsaw.tile_making import from_local, shard

if TYPE_CHECKING:
    from jigsaw import io, metrics, testing
    from jigsaw.checkpoint import CheckpointError, PendingSave, latest, load, save
    from jigsaw.compiled_forward import compile
    from jigsaw.dryrun import dry_run
    from jigsaw.model_pipeline import pipeline
    from jigsaw.parallel import clip_grad_norm_, no_sync, parallelize
    from jigsaw.whole_weights import load_weights, save_weights

__version__ = "0.1.0"

__all__ = [
    "CheckpointError",
    "Cut",
    "Layout",
    "LocalFunction",
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
    "parallelize": "jigsaw.parallel",
    "no_sync": "jigsaw.parallel",
    "clip_grad_norm_": "jigsaw.parallel",
    "compile": "jigsaw.compiled_forward",
    "pipeline": "jigsaw.model_pipeline",
    "CheckpointError": "jigsaw.checkpoint",
    "PendingSave": "jigsaw.checkpoint",
    "latest": "jigsaw.checkpoint",
    "save": "jigsaw.checkpoint",
    "load_weights": "jigsaw.whole_weights",
    "save_weights": "jigsaw.whole_weights",
    "load": "jigsaw.checkpoint",
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
