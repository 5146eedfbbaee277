"""Torch's trees of lists, tuples and dicts, with the kinds that users register.

Public: nothing in torch, and the package optree knows none of those kinds.
"""

from __future__ import annotations

from jigsaw.torch_internals.private_names import torch_imports

with torch_imports():
    from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

__all__ = ["TreeSpec", "tree_flatten", "tree_leaves", "tree_map", "tree_map_only", "tree_unflatten"]
