"""Losses of segmentation that count how little prediction and truth overlap, or weigh what is hard to predict.

>>> truth = torch.tensor([[[1.0, 1.0, 0.0, 0.0]]])
>>> round(jigsaw.nn.dice_loss(torch.tensor([[[1.0, 0.0, 0.0, 0.0]]]), truth).item(), 4)
0.3333
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from jigsaw.errors import ShardingError
from jigsaw.nn.losses.loss import LossValues, as_wide_floats, check_same_shape, reduce_losses, reduce_weighted


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
    wrong = answer * (1 - truth) + (1 - answer) * truth
    losses = F.binary_cross_entropy_with_logits(logits, truth, reduction="none") * wrong**gamma
    if alpha is not None:
        losses = losses * (alpha * truth + (1 - alpha) * (1 - truth))
    return reduce_weighted(losses, weight, reduction)
