"""Losses on tiles: one global number, an ordinary scalar tensor that is equal on every rank.  Area or voxel weights are
plain whole tensors or tiles.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw.along import log_softmax
from jigsaw.layout import ShardingError
from jigsaw.pointwise import align, cut_whole
from jigsaw.tile import Tile, implements

# A Tile or a plain whole Tensor: torch's stubs know only the latter, so this stays open.
Values = Any


def reduced(values: Any, reduction: str) -> Any:
    """Elementwise losses as torch reduces them: ``"none"``, ``"sum"`` or ``"mean"``."""
    if reduction == "none":
        return values
    if reduction == "sum":
        return values.sum()
    if reduction == "mean":
        return values.mean()
    raise ValueError(f"{reduction!r} is not a valid value for reduction: use 'none', 'mean' or 'sum'")


def weighted_mean(values: Any, weight: Values) -> Tensor:
    """sum(weight * values) / sum(weight), both over all elements of `values`: the area or voxel mean.

    *Shapes*: `weight` broadcasts to `values`, e.g. cos(latitude) as [lat, 1].
    *Sends*: two all-reduces of one number; backward nothing.
    """
    spread = torch.ones_like(values) * weight
    return (values * weight).sum() / spread.sum()


def _check_shapes(name: str, input: Values, target: Values) -> None:
    if tuple(input.shape) != tuple(target.shape):
        raise ShardingError(
            f"{name}: input {tuple(input.shape)} and target {tuple(target.shape)} must have one shape; broadcast one "
            "explicitly"
        )


def _refuse_old(name: str, size_average: object, reduce: object) -> None:
    if size_average is not None or reduce is not None:
        raise ShardingError(f"{name}(size_average=, reduce=) on tiles is not supported: use reduction=")


def _elementwise(
    function: Callable[..., Any],
    difference: Callable[..., Any],
    *names: str,
    mean_by_weight: bool = False,
    reduced: Callable[[Any, str], Any] = reduced,
) -> None:
    """Answer a torch loss that is a pointwise function of input and target, then reduced.

    With `mean_by_weight` the weighted mean is divided by the sum of weights, else by the number of elements: torch has
    both.
    """

    def answer(input: Values, target: Values, *args: Any, **kwargs: Any) -> Any:
        options = dict(zip(names, args, strict=False)) | kwargs
        _refuse_old(function.__name__, options.pop("size_average", None), options.pop("reduce", None))
        reduction, weight = options.pop("reduction", "mean"), options.pop("weight", None)
        _check_shapes(function.__name__, input, target)
        values = difference(input, target, **options)
        if weight is None:
            return reduced(values, reduction)
        if reduction == "mean" and mean_by_weight:
            return weighted_mean(values, weight)
        return reduced(values * weight, reduction)

    implements(function)(answer)


def _wide(values: Any) -> Any:
    """Narrow floats in float32 under autocast, which runs torch's own losses there."""
    narrow = values.dtype in (torch.bfloat16, torch.float16)
    return values.float() if narrow and torch.is_autocast_enabled(values.device.type) else values


def _squared(input: Any, target: Any) -> Any:
    return (_wide(input) - _wide(target)).square()


def _absolute(input: Any, target: Any) -> Any:
    # torch 2.13's l1_loss leaves its weight= out when it dispatches; what a caller passed can only be seen in its frame
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    if frame is not None and frame.f_locals.get("weight") is not None:
        raise ShardingError(
            "l1_loss(weight=...) on tiles: torch drops the weight on its way; use jigsaw.nn.loss.weighted_mean((input "
            "- target).abs(), weight)"
        )
    return (_wide(input) - _wide(target)).abs()


def _local(function: Callable[..., Tensor]) -> Callable[..., Tile]:
    """The unreduced torch loss, run on the rows that both tiles hold."""

    def run(input: Values, target: Values, **options: Any) -> Tile:
        tiles = [t for t in (input, target) if isinstance(t, Tile)]
        layout, locals_ = align(tiles)
        ready = iter(locals_)
        parts = [next(ready) if isinstance(t, Tile) else cut_whole(t, tiles[0], layout) for t in (input, target)]
        return Tile(function(*parts, reduction="none", **options), layout, tiles[0].mesh)

    return run


def _reduced_by_sample(values: Any, reduction: str) -> Any:
    return values.sum() / values.shape[0] if reduction == "batchmean" else reduced(values, reduction)


_OLD = ("size_average", "reduce", "reduction")
_elementwise(F.mse_loss, _squared, *_OLD, "weight", mean_by_weight=True)
_elementwise(F.l1_loss, _absolute, *_OLD, mean_by_weight=True)
_elementwise(F.smooth_l1_loss, _local(F.smooth_l1_loss), *_OLD, "beta")
_elementwise(F.huber_loss, _local(F.huber_loss), "reduction", "delta", "weight")
_elementwise(F.binary_cross_entropy, _local(F.binary_cross_entropy), "weight", *_OLD)
_elementwise(F.kl_div, _local(F.kl_div), *_OLD, "log_target", reduced=_reduced_by_sample)
_elementwise(F.soft_margin_loss, _local(F.soft_margin_loss), *_OLD)


@implements(F.binary_cross_entropy_with_logits)
def binary_cross_entropy_with_logits(
    input: Values,
    target: Values,
    weight: Values | None = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    pos_weight: Values | None = None,
) -> Any:
    """y = (1 - t) x - log sigmoid x, with `pos_weight` for the positive class, then reduced."""
    _refuse_old("binary_cross_entropy_with_logits", size_average, reduce)
    _check_shapes("binary_cross_entropy_with_logits", input, target)
    input, target = _wide(input), _wide(target)
    log_weight: Any = 1.0 if pos_weight is None else 1 + (pos_weight - 1) * target
    losses = (1 - target) * input - log_weight * F.logsigmoid(input)
    return reduced(losses if weight is None else losses * weight, reduction)


@implements(F.cross_entropy)
def cross_entropy(
    input: Tile,
    target: Values,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """y = -log softmax(input)[target] over the class dim 1, averaged over the global positions (by class weight where
    given).

    *Shapes*: input [batch, class, *space], target [batch, *space] of class indices, or of the input's shape of
    probabilities.
    *Sends*: forward all-reduces of one or two numbers; backward nothing.
    *Raises*: `ShardingError` when the class dim is cut.
    """
    _refuse_old("cross_entropy", size_average, reduce)
    dim = _class_dim("cross_entropy", input)
    log_p = log_softmax(_wide(input), dim)
    if tuple(target.shape) == tuple(input.shape):
        return _with_probabilities(log_p, _wide(target), weight, reduction, label_smoothing, dim)
    return _with_indices(log_p, target, weight, ignore_index, reduction, label_smoothing, dim)


def _class_dim(name: str, input: Tile) -> int:
    dim = 1 if input.ndim > 1 else 0
    if input.layout.is_cut(dim):
        raise ShardingError(
            f"{name} needs whole classes: dim {dim} ({input.shape[dim]} classes) is cut by "
            f"{input.layout.dim_axes(dim)}; cut space or batch instead"
        )
    return dim


def _with_indices(
    log_p: Tile, target: Values, weight: Tensor | None, ignore: int, reduction: str, smoothing: float, dim: int
) -> Any:
    rows = log_p.owned()
    anchor = Tile(rows.local.select(dim, 0), rows.layout.drop((dim,)), rows.mesh)
    if tuple(target.shape) != tuple(anchor.shape):
        raise ShardingError(
            f"class losses: target {tuple(target.shape)} must be the input's shape without classes "
            f"{tuple(anchor.shape)}, or, for cross_entropy, with them {tuple(log_p.shape)}"
        )
    index = align([target, anchor])[1][0] if isinstance(target, Tile) else cut_whole(target, anchor)
    losses, weights = _class_losses(rows.local, index, weight, ignore, smoothing)
    if reduction == "none":
        return Tile(losses, anchor.layout, anchor.mesh)
    total = Tile(losses, anchor.layout, anchor.mesh).sum()
    return total if reduction == "sum" else total / Tile(weights, anchor.layout, anchor.mesh).sum()


def _class_losses(
    log_p: Tensor, index: Tensor, weight: Tensor | None, ignore: int, smoothing: float
) -> tuple[Tensor, Tensor]:
    """(losses, their weights in the mean) at the local positions."""
    dim = 1 if log_p.ndim > 1 else 0
    losses = F.nll_loss(log_p, index, weight, ignore_index=ignore, reduction="none")
    ignored = index == ignore
    counted = (~ignored).to(log_p.dtype)
    weights = counted if weight is None else weight[index.clamp(0, len(weight) - 1)] * counted
    if smoothing:
        each = log_p if weight is None else log_p * weight.view(-1, *(1,) * (log_p.ndim - 1 - dim))
        # filled, not multiplied by zero: what is ignored may be infinite
        losses = (1 - smoothing) * losses - smoothing / log_p.shape[dim] * each.sum(dim).masked_fill(ignored, 0.0)
    return losses, weights


def _with_probabilities(
    log_p: Tile, target: Values, weight: Tensor | None, reduction: str, smoothing: float, dim: int
) -> Any:
    classes = log_p.shape[dim]
    soft = target * (1 - smoothing) + smoothing / classes if smoothing else target
    each = log_p * soft if weight is None else log_p * soft * weight.reshape(-1, *(1,) * (log_p.ndim - 1 - dim))
    losses = -each.sum(dim)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (log_p.numel() // classes)


@implements(F.nll_loss)
def nll_loss(
    input: Tile,
    target: Values,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
) -> Any:
    """y = -input[target] over the class dim 1, reduced as `cross_entropy`."""
    _refuse_old("nll_loss", size_average, reduce)
    dim = _class_dim("nll_loss", input)
    return _with_indices(input, target, weight, ignore_index, reduction, 0.0, dim)


@implements(F.gaussian_nll_loss)
def gaussian_nll_loss(
    input: Values, target: Values, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """y = (log var + (input - target)^2 / var) / 2, then reduced; `var` is not below `eps`."""
    spread = _spread(input, var, eps)
    losses = 0.5 * (torch.log(spread) + (input - target).square() / spread)
    return reduced(losses + 0.9189385332046727 if full else losses, reduction)


def _spread(input: Values, var: Any, eps: float) -> Values:
    """The variances as torch takes them: one number, one an element, or one for all of the last dim."""
    if isinstance(var, (int, float)):
        var = torch.full_like(input, var)
    if bool((var < 0).any()):
        raise ValueError("gaussian_nll_loss: var has negative entries")
    if tuple(var.shape) == tuple(input.shape)[:-1]:
        var = var.unsqueeze(-1)
    # raised to eps with the gradient of what it was, as in torch
    return var + (torch.clamp(var, min=eps) - var).detach()
