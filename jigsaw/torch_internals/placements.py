"""Private names of torch.distributed.tensor, whose module is loaded when first needed.

A dim of several parts, of which each rank has its piece of every part.  Public: `Shard`, whose pieces are intervals.
FSDP2 has the placement for weights that tensor parallelism has cut before, so torch's optimizers, copies and gathers
know it.

The part and the cut of a DTensor, and the DTensor of a part.  Public: `to_local` and `from_local`, which are nodes of
autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor

from jigsaw.torch_internals.private_names import private_attribute, private_name

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


def answer_by_parts(run: Callable[..., Any], func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return a function of each element of DTensors that are all cut alike, by a `run` of their parts.

    NotImplemented where they are not, so that DTensor has to answer: it works out anew for each mesh and shape how the
    result is cut, which takes longer than all else that is run on paper.
    """
    from torch.distributed.tensor import DTensor

    cut = next(x for x in args if isinstance(x, DTensor))
    spec_of, part_of = private_attribute(cut, "_spec"), private_attribute(cut, "_local_tensor")
    spec = spec_of(cut)
    if any(isinstance(x, Tensor) and not (isinstance(x, DTensor) and spec_of(x) == spec) for x in args):
        return NotImplemented
    if any(placement.is_partial() for placement in spec.placements) or not cut.is_floating_point():
        return NotImplemented
    out = run(func, [part_of(x) if isinstance(x, DTensor) else x for x in args], kwargs)
    if out is part_of(cut):  # changed in place
        return cut
    return DTensor(out, spec, requires_grad=False)
