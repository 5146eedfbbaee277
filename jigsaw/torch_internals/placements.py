"""Private names of torch.distributed.tensor: a dim of several parts, of which each rank has its piece of every part.

Public: `Shard`, whose pieces are intervals.  FSDP2 has the placement for weights that tensor parallelism has cut
before, so torch's optimizers, copies and gathers know it.  Their module is loaded when first needed.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from jigsaw.torch_internals.private_names import private_name

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement


@cache
def _shard_kinds() -> tuple[Any, Any]:
    module = "torch.distributed.tensor.placement_types"
    return private_name(f"{module}:Shard"), private_name(f"{module}:_StridedShard")


def shard_of_parts(dim: int, parts: int) -> Placement:
    """Return the placement of a dim of equal parts, each of which the ranks share out."""
    interval, of_parts = _shard_kinds()
    return interval(dim) if parts == 1 else of_parts(dim, split_factor=parts)


def dim_and_parts(placement: Any) -> tuple[int, int] | None:
    """Return the dim that a placement cuts, and of how many parts it consists; None for one that cuts none."""
    interval, of_parts = _shard_kinds()
    if type(placement) not in (interval, of_parts):
        return None
    return placement.dim, 1 if type(placement) is interval else placement.split_factor
