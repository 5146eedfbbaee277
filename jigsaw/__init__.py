"""jigsaw: train PyTorch models on samples too big for one device."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jigsaw import io, nn, testing
    from jigsaw.layout import Cut, Layout, ShardingError
    from jigsaw.mesh import init_mesh
    from jigsaw.parallel import parallelize
    from jigsaw.tile import Tile, from_local, shard

__version__ = "0.1.0"

__all__ = [
    "Cut",
    "Layout",
    "ShardingError",
    "Tile",
    "from_local",
    "init_mesh",
    "io",
    "nn",
    "parallelize",
    "shard",
    "testing",
]

_HOME = {
    "Cut": "jigsaw.layout",
    "Layout": "jigsaw.layout",
    "ShardingError": "jigsaw.layout",
    "Tile": "jigsaw.tile",
    "from_local": "jigsaw.tile",
    "init_mesh": "jigsaw.mesh",
    "parallelize": "jigsaw.parallel",
    "shard": "jigsaw.tile",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
    elif name in __all__:
        value = importlib.import_module(f"jigsaw.{name}")
    else:
        raise AttributeError(f"module 'jigsaw' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
