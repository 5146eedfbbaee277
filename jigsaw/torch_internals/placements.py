"""Private names of torch.distributed.tensor, whose module is loaded when first needed.

A dim of several parts, of which each rank has its piece of every part.  Public: `Shard`, whose pieces are intervals.
FSDP2 has the placement for weights that tensor parallelism has cut before, so torch's optimizers, copies and gathers
know it.

The number that Python reads of a DTensor (``item``, ``float``, ``if``): of one whose parts are yet to be summed torch
reads this rank's part.  Public: `full_tensor` before each of them.

The part and the cut of a DTensor, and the DTensor of a part.  Public: `to_local` and `from_local`, which are nodes of
autograd.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from jigsaw.torch_internals.private_names import private_attribute, private_name

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
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


def axes_cutting_tensor(x: Any) -> dict[str, int]:
    """Return the mesh axes that cut a DTensor, and how many ranks each has; none for another tensor."""
    return _cutting_axes(x.device_mesh, x.placements) if is_dtensor(x) else {}


def whole_of_dtensor(x: Tensor) -> Tensor:
    """Return the whole plain tensor of a DTensor; any other tensor as it is.  *Sends*: what ``full_tensor`` does."""
    return x.full_tensor() if is_dtensor(x) else x


@cache
def read_whole_numbers() -> None:
    """Let Python read whole numbers of DTensors from now on: each read sends what ``full_tensor`` does."""
    from torch.distributed.tensor import DTensor, Replicate

    part_of = private_attribute(DTensor, "_local_tensor")

    def read(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
        x = args[0]
        if not all(placement.is_replicate() for placement in x.placements):
            x = x.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
        return func(part_of(x))

    dispatcher = private_attribute(DTensor, "_op_dispatcher")(DTensor)
    private_attribute(dispatcher, "_custom_op_handlers")(dispatcher)[torch.ops.aten._local_scalar_dense.default] = read


def is_dtensor(value: object) -> TypeGuard[DTensor]:
    """Say whether it is a DTensor.

    Their module loads sympy, 40 MB a rank, so this does not load it: while no one has loaded it, there are none.
    """
    if type(value) is nn.Parameter or type(value) is Tensor:
        return False
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def axes_cutting_exit(node: Any) -> dict[str, int] | None:
    """Return the axes that cut a DTensor where a node of its graph made it plain; None for other nodes.

    Also None where the caller of ``to_local`` or ``full_tensor`` has said what the gradient is.
    """
    if not isinstance(node, _exit_class()):
        return None
    spec, gradient = private_attribute(node, "dtensor_spec")(node), private_attribute(node, "grad_placements")(node)
    return _cutting_axes(spec.mesh, spec.placements) if gradient is None else None


@cache
def _exit_class() -> type:
    function = private_name("torch.distributed.tensor._api:_ToTorchTensor")
    return private_attribute(function, "_backward_cls")(function)


def _cutting_axes(mesh: Any, placements: Sequence[Any]) -> dict[str, int]:
    axes = zip(mesh.mesh_dim_names or (), mesh.shape, placements, strict=False)
    return {name: size for name, size, placement in axes if size > 1 and not placement.is_replicate()}


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
