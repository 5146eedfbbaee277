"""Losses of whole fields: of ensembles, whose members an axis of the mesh may cut, of masks, and of spectra.

**Ensembles.**  M - 1 passes over the tile compare all pairs of members; only the members are kept for the backward
pass.  Sorted members would need one pass.  But sorting is slower up to a dozen members, and its gradient pushes one of
equal members (no rain) up and another down.

Example: four ranks on ensemble=2, lat=2, eight members of 33 rows: each rank has four members of 17 or 16 rows.  One
exchange gives it eight members of 9 or 8 rows, half of which it had. The rank already has those rows of the target, so
cutting it needs no message.

>>> x, y = torch.tensor([[0.0, 1.0, 5.0]]), torch.tensor([2.0])
>>> [round(jigsaw.nn.crps_loss(x, y, alpha=alpha).item(), 3) for alpha in (0.0, 0.95, 1.0)]
[0.889, 0.361, 0.333]
>>> truth = torch.tensor([[[1.0, 1.0, 0.0, 0.0]]])
>>> round(jigsaw.nn.dice_loss(torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]), truth).item(), 4)
0.3333
>>> x = torch.arange(8.0).sin()
>>> jigsaw.nn.spectral_loss(x, x.roll(3)) < 1e-12, torch.nn.functional.mse_loss(x, x.roll(3)) > 0.5
(tensor(True), tensor(True))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw.errors import ShardingError
from jigsaw.nn.losses.loss import LossValues, as_wide_floats, check_same_shape, reduce_losses, reduce_weighted
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


# -- overlap of masks -------------------------------------------------------------------------------------------------


def tversky_loss(
    input: LossValues,
    target: LossValues,
    *,
    alpha: float = 0.5,
    beta: float = 0.5,
    weight: LossValues | None = None,
    over_batch: bool = False,
    smooth: float = 1e-5,
    reduction: str = "mean",
) -> Any:
    """Return y = 1 - (TP + smooth) / (TP + alpha FP + beta FN + smooth) of each class, sums over space, then reduced.

    TP = sum p t, FP = sum p (1 - t), FN = sum (1 - p) t of probabilities p and targets t, each voxel times its
    `weight`.  With `over_batch` the sums are over the batch as well.  Missing values (NaN) make NaN of their class;
    a weight of 0 does not hide them.  bfloat16 and float16 are computed in float32.  (Salehi et al., arXiv 1706.05721.)

    *Shapes*: input ``[batch, class, *space]`` of probabilities (after a sigmoid or softmax), target of one shape (after
    `one_hot`); any dim may be cut.  ``reduction="none"`` gives ``[batch, class]``.
    *Sends*: three all-reduces of [batch, class]; backward nothing.
    *Raises*: `ShardingError` for two different shapes, and without space.

    >>> found, truth = torch.tensor([[[1.0, 1.0, 0.0]]]), torch.tensor([[[1.0, 0.0, 0.0]]])
    >>> round(jigsaw.nn.tversky_loss(found, truth, alpha=0.3, beta=0.7).item(), 4)
    0.2308
    """
    check_same_shape("tversky_loss", input, target)
    if input.ndim < 3:
        raise ShardingError(f"tversky_loss: input {tuple(input.shape)} must be [batch, class, *space]; unsqueeze it")
    answer, truth = as_wide_floats(input), target.to(as_wide_floats(input).dtype)
    space = tuple(d for d in range(0 if over_batch else 2, input.ndim) if d != 1)
    weighted = answer if weight is None else answer * weight
    both, all_found = (weighted * truth).sum(space), weighted.sum(space)
    all_true = (truth if weight is None else truth * weight).sum(space)
    missed = alpha * (all_found - both) + beta * (all_true - both)
    return reduce_losses(1 - (both + smooth) / (both + missed + smooth), reduction)


def dice_loss(
    input: LossValues,
    target: LossValues,
    *,
    weight: LossValues | None = None,
    over_batch: bool = False,
    smooth: float = 1e-5,
    reduction: str = "mean",
) -> Any:
    """Return y = 1 - (2 sum p t + smooth) / (sum p + sum t + smooth) of each class, then reduced.

    The soft Dice loss of Milletari et al. (arXiv 1606.04797), without squares; arguments, shapes and messages as in
    `tversky_loss`, of which it is the case alpha = beta = 1/2.

    >>> truth = torch.nn.functional.one_hot(torch.tensor([[0, 1, 1, 0]]), 2).movedim(-1, 1)
    >>> round(jigsaw.nn.dice_loss(torch.full((1, 2, 4), 0.5), truth).item(), 4)
    0.5
    """
    return tversky_loss(input, target, weight=weight, over_batch=over_batch, smooth=smooth / 2, reduction=reduction)


def focal_loss(
    input: LossValues,
    target: LossValues,
    *,
    gamma: float = 2.0,
    alpha: float | None = None,
    weight: LossValues | None = None,
    reduction: str = "mean",
) -> Any:
    """Return y = -(1 - q)^gamma log q, where q is the predicted probability of the truth, then reduced.

    The sigmoid focal loss (Lin et al., arXiv 1708.02002): `input` is logits, `target` 0 or 1 (or between) of each
    class; with `alpha` true classes count alpha times, others 1 - alpha.  `weight` of voxels or area broadcasts to the
    input; ``"mean"`` is divided by its sum.  Missing values (NaN) make NaN.

    *Shapes*: input and target of one shape, any dim cut.
    *Sends*: the all-reduces of the mean; backward nothing.
    *Raises*: `ShardingError` for two shapes.

    >>> jigsaw.nn.focal_loss(torch.tensor([0.0, 4.0]), torch.tensor([1.0, 1.0]), reduction="none")
    tensor([1.7329e-01, 5.8716e-06])
    """
    check_same_shape("focal_loss", input, target)
    logits = as_wide_floats(input)
    truth = target.to(logits.dtype)
    answer = torch.sigmoid(logits)
    # Never 0, where the slope of a power below 1 has no end: a sigmoid rounds to 1 from 17 on.
    wrong = (answer * (1 - truth) + (1 - answer) * truth).clamp_min(torch.finfo(logits.dtype).tiny)
    losses = F.binary_cross_entropy_with_logits(logits, truth, reduction="none") * wrong**gamma
    if alpha is not None:
        losses = losses * (alpha * truth + (1 - alpha) * (1 - truth))
    return reduce_weighted(losses, weight, reduction)


# -- spectra ----------------------------------------------------------------------------------------------------------

SPECTRAL_QUANTITIES = ("amplitude", "power", "log_power")


def spectral_loss(
    input: LossValues,
    target: LossValues,
    dim: int | Sequence[int] = -1,
    *,
    quantity: str = "amplitude",
    weight: LossValues | None = None,
    eps: float = 1e-8,
    reduction: str = "mean",
) -> Any:
    """Return y = (a(F x) - a(F t))² of every mode, then reduced, where F is the orthonormal Fourier transform along
    `dim`.

    `quantity`: a is ``"amplitude"`` (abs F), ``"power"`` (its square), or ``"log_power"`` (log of that plus eps). `dim`
    is longitude, or (-2, -1) for both dims of a plane. Modes of a real field come in pairs. One of each pair is
    computed and counted twice. So the sum and the mean are those over the full spectrum. `weight` (of latitudes, of
    modes) broadcasts to the modes that are computed; the mean is divided by its sum. Missing values (NaN) make NaN.

    *Shapes*: real input and target of one shape, any dim cut; with ``reduction="none"`` the last of `dim` has n // 2 +
    1 modes.
    *Sends*: of input and target where `dim` is cut, what `torch.fft.rfftn` of a tile sends; the all-reduces of the
    mean.
    *Raises*: `ShardingError` for two different shapes, `ValueError` for another quantity.

    >>> x = torch.tensor([0.0, 1.0, 0.0, -1.0])
    >>> jigsaw.nn.spectral_loss(2 * x, x, quantity="power", reduction="none")
    tensor([0., 9., 0.])
    """
    check_same_shape("spectral_loss", input, target)
    if quantity not in SPECTRAL_QUANTITIES:
        raise ValueError(f"spectral_loss(quantity={quantity!r}): use one of {', '.join(SPECTRAL_QUANTITIES)}")
    dims = [d % input.ndim for d in ([dim] if isinstance(dim, int) else dim)]
    spectra = [_mode_values(as_wide_floats(x), dims, quantity, eps) for x in (input, target)]
    losses = (spectra[0] - spectra[1]).square()
    if reduction == "none":
        return losses if weight is None else losses * weight
    size, last = input.shape[dims[-1]], dims[-1]
    twins = torch.full((size // 2 + 1,), 2.0, dtype=losses.dtype, device=losses.device)
    twins[0] = 1.0
    if size % 2 == 0:
        twins[-1] = 1.0
    twins = twins.view(-1, *(1,) * (input.ndim - 1 - last))
    return reduce_weighted(losses, twins if weight is None else twins * weight, reduction)


def _mode_values(field: Any, dims: Sequence[int], quantity: str, eps: float) -> Any:
    modes = torch.fft.rfftn(field, dim=tuple(dims), norm="ortho")
    if quantity == "amplitude":
        return modes.abs()
    power = torch.view_as_real(modes).square().sum(-1)
    return power if quantity == "power" else (power + eps).log()
