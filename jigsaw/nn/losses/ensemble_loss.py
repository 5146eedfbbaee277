"""The continuous ranked probability score of an ensemble, whose members an axis of the mesh may cut.

M - 1 passes over the tile compare all pairs of members; only the members are kept for the backward pass.  Sorted
members would need one pass.  But sorting is slower up to a dozen members, and its gradient pushes one of equal members
(no rain) up and another down.

Example: four ranks on ensemble=2, lat=2, eight members of 33 rows: each rank has four members of 17 or 16 rows.  One
exchange gives it eight members of 9 or 8 rows, half of which it had. The rank already has those rows of the target, so
cutting it needs no message.

>>> x, y = torch.tensor([[0.0, 1.0, 5.0]]), torch.tensor([2.0])
>>> [round(jigsaw.nn.crps_loss(x, y, alpha=alpha).item(), 3) for alpha in (0.0, 0.95, 1.0)]
[0.889, 0.361, 0.333]
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jigsaw.errors import ShardingError
from jigsaw.nn.losses.loss import LossValues, as_wide_floats, reduce_weighted
from jigsaw.ops.whole_dims import with_whole_dims
from jigsaw.tile.tile import Tile


def crps_loss(
    input: LossValues,
    target: LossValues,
    member_dim: int = 1,
    *,
    alpha: float = 0.95,
    weight: LossValues | None = None,
    reduction: str = "mean",
) -> Any:
    """``y = sum_j |x_j - t| / M - (1 - (1 - alpha) / M) sum_j<k |x_j - x_k| / (M (M - 1))``, then reduced.

    The sums are over M members. `alpha` 0 is the CRPS of the ensemble as it is (biased by its size). 1 is the fair one,
    whose expectation does not depend on M. The fair one leaves one member free where all others are right, so people
    train with a little less ("almost fair": Lang et al., AIFS-CRPS, arXiv 2412.15832). `weight` (of area, of channels)
    broadcasts to the target; ``"mean"`` is divided by the sum of the weights. Missing values (NaN) make NaN. bfloat16
    and float16 are computed in float32.

    *Shapes*: input ``[batch, member, *rest]``, or members along another `member_dim`; target ``[batch, *rest]``; any
    dim may be cut.  With ``reduction="none"`` the result is the target's shape, cut finer by the axes of the members.
    *Sends*: where P ranks cut the members, (P-1)/P of the input's bytes on a rank, and as many backward; the
    all-reduces of the mean.
    *Raises*: `ShardingError` for other shapes, and for a single member unless `alpha` is 0.

    >>> forecast, truth = torch.tensor([[[1.0, 5.0], [3.0, 5.0]]]), torch.tensor([[2.0, 4.0]])
    >>> jigsaw.nn.crps_loss(forecast, truth, alpha=0.0, reduction="none")
    tensor([[0.5000, 1.0000]])
    """
    return reduce_weighted(ensemble_crps("crps_loss", input, target, member_dim, alpha), weight, reduction)


def ensemble_crps(name: str, input: LossValues, target: LossValues, member_dim: int, alpha: float) -> Any:
    """Return the score at each element of the target."""
    dim = _checked_member_dim(name, input, target, member_dim, alpha)
    members = input.shape[dim]
    input, target = as_wide_floats(input), as_wide_floats(target)
    if isinstance(input, Tile):
        input = with_whole_dims(input, (dim,)) if input.layout.is_cut(dim) else input.owned()
        apart = Tile(_PairDistances.apply(input.local, dim), input.layout.drop((dim,)), input.mesh)
    else:
        apart = _PairDistances.apply(input, dim)
    of_pairs = (1 - (1 - alpha) / members) / max(members * (members - 1), 1)
    return (input - target.unsqueeze(dim)).abs().mean(dim) - apart * of_pairs


class _PairDistances(torch.autograd.Function):
    """The sum of all |x_j - x_k| with j < k along a dim, taken over members that lie s apart, for each s."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.dim = dim
        total = torch.zeros_like(x.select(dim, 0))
        for s in range(1, x.shape[dim]):
            total += (x.narrow(dim, s, x.shape[dim] - s) - x.narrow(dim, 0, x.shape[dim] - s)).abs_().sum(dim)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (x,), dim = ctx.saved_tensors, ctx.dim
        signs = torch.zeros_like(x)
        for s in range(1, x.shape[dim]):
            upper, lower = ((dim, s, x.shape[dim] - s), (dim, 0, x.shape[dim] - s))
            sign = (x.narrow(*upper) - x.narrow(*lower)).sign_()
            signs.narrow(*upper).add_(sign)
            signs.narrow(*lower).sub_(sign)
        return signs.mul_(grads[0].unsqueeze(dim)), None


def _checked_member_dim(name: str, input: LossValues, target: LossValues, member_dim: int, alpha: float) -> int:
    shape = list(input.shape)
    if not -len(shape) <= member_dim < len(shape):
        raise ShardingError(f"{name}(member_dim={member_dim}): input {tuple(shape)} has no such dim")
    dim = member_dim % len(shape)
    members = shape.pop(dim)
    if tuple(target.shape) != tuple(shape):
        raise ShardingError(
            f"{name}: target {tuple(target.shape)} must be the input's shape {tuple(input.shape)} without its members, "
            f"dim {dim}; name another member_dim="
        )
    if members == 0 or (members == 1 and alpha != 0):
        raise ShardingError(
            f"{name}(alpha={alpha:g}): {members} member(s) have no spread to be fair about; give two or more, or "
            "alpha=0"
        )
    return dim
