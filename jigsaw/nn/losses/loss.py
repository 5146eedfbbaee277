"""Losses on tiles: one global number, an ordinary scalar tensor that is equal on every rank.  Weights of area or voxels
are plain whole tensors or tiles.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> x, y = (jigsaw.shard(torch.full((2, 9, 16), value), mesh, (None, "lat", None)) for value in (1.0, 3.0))
>>> torch.nn.functional.mse_loss(x, y)
tensor(4.)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw import comm
from jigsaw.comm.graph_calls import lacks_values
from jigsaw.comm.wire_values import is_on_accelerator
from jigsaw.errors import ShardingError
from jigsaw.ops.along import shifted_by_global_max
from jigsaw.ops.meeting.common_cuts import bring_together
from jigsaw.ops.meeting.plain_operands import cut_whole_tensor
from jigsaw.ops.pointwise import align_tiles
from jigsaw.ops.reductions import ReducedDims, reduce_mean, reduce_sum
from jigsaw.tile.tile import Tile, implements_torch, leave_tile

# A Tile or a plain whole Tensor: torch's stubs know only the latter, so this stays open.
LossValues = Any


def reduce_losses(values: Any, reduction: str) -> Any:
    """Reduce elementwise losses as torch does: ``"none"``, ``"sum"`` or ``"mean"``."""
    _check_reduction(reduction)
    if reduction == "none":
        return values
    if reduction == "sum":
        return reduce_sum(values) if isinstance(values, Tile) else values.sum()
    return reduce_mean(values) if isinstance(values, Tile) else values.mean()


def _check_reduction(reduction: str) -> None:
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction!r} is not a valid value for reduction: use 'none', 'mean' or 'sum'")


def weighted_mean(values: Any, weight: LossValues, dim: ReducedDims = None) -> Any:
    """Return sum(weight * values) / sum(weight), over all elements of `values` or along `dim`: the area or voxel mean.

    *Shapes*: `weight` broadcasts to `values`, e.g. cos(latitude) as [lat, 1].
    *Sends*: two all-reduces of the result, of one number each without `dim`; backward nothing.
    *Raises*: `ShardingError` for a weight of another shape.

    >>> lat = torch.linspace(90, -90, 9)
    >>> error = jigsaw.shard(lat.abs()[:, None].expand(9, 16), jigsaw.init_mesh(lat=1), ("lat", None))
    >>> area = torch.cos(torch.deg2rad(lat))[:, None]
    >>> error.mean().item(), round(jigsaw.nn.losses.loss.weighted_mean(error, area).item(), 3)
    (50.0, 31.205)
    """
    _check_weight_shape(values, weight)
    spread = torch.ones_like(values) * weight
    return (values * weight).sum(dim) / spread.sum(dim)


def reduce_weighted(values: Any, weight: LossValues | None, reduction: str) -> Any:
    """Reduce elementwise losses times their weights, as torch does; the mean is divided by the sum of the weights."""
    if weight is None:
        return reduce_losses(values, reduction)
    _check_weight_shape(values, weight)
    return weighted_mean(values, weight) if reduction == "mean" else reduce_losses(values * weight, reduction)


def _check_weight_shape(values: Any, weight: LossValues) -> None:
    """Refuse weights to which torch would broadcast the values: [lat, 1] would weigh each of [lat] by all rows."""
    shape = tuple(weight.shape) if isinstance(weight, Tensor) else ()
    after = tuple(values.shape)[len(values.shape) - len(shape) :]
    if len(after) < len(shape) or any(own not in (1, n) for own, n in zip(shape, after, strict=True)):
        raise ShardingError(
            f"a weight of shape {shape} does not broadcast to the values, {tuple(values.shape)}; reshape it, with dims "
            "of size 1 where it is the same"
        )


def as_wide_floats(values: Any) -> Any:
    """Return narrow floats and integers in float32, long integers in float64.

    Sums of many elements overflow float16 and lose digits in bfloat16; differences of integers wrap around.
    """
    dtype = values.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return values.float() if dtype.itemsize < 4 else values
    return values.to(torch.float32 if dtype.itemsize < 4 else torch.float64)


def check_same_shape(name: str, input: LossValues, target: LossValues) -> None:
    """Raise where torch would broadcast one to the other."""
    if tuple(input.shape) != tuple(target.shape):
        raise ShardingError(
            f"{name}: input {tuple(input.shape)} and target {tuple(target.shape)} must have one shape; broadcast one "
            "explicitly"
        )


def refuse_old_arguments(name: str, size_average: object, reduce: object) -> None:
    """Raise for the arguments that torch had before ``reduction=``."""
    if size_average is not None or reduce is not None:
        raise ShardingError(f"{name}(size_average=, reduce=) on tiles is not supported: use reduction=")


def _answer_elementwise_loss(
    function: Callable[..., Any],
    difference: Callable[..., Any],
    *names: str,
    mean_by_weight: bool = False,
    reduced: Callable[[Any, str], Any] = reduce_losses,
) -> None:
    """Answer a torch loss that is pointwise in input and target, then reduced; torch has both kinds of weighted means,
    divided by the sum of weights (`mean_by_weight`) or by the number of elements.
    """

    def answer(input: LossValues, target: LossValues, *args: Any, **kwargs: Any) -> Any:
        options = dict(zip(names, args, strict=False)) | kwargs if args else kwargs
        refuse_old_arguments(function.__name__, options.pop("size_average", None), options.pop("reduce", None))
        reduction, weight = options.pop("reduction", "mean"), options.pop("weight", None)
        check_same_shape(function.__name__, input, target)
        values = difference(input, target, **options)
        if weight is None:
            return reduced(values, reduction)
        if reduction == "mean" and mean_by_weight:
            return weighted_mean(values, weight)
        return reduced(values * weight, reduction)

    implements_torch(function, either=("input", "target"))(answer)


def _widened_input(values: Any) -> Any:
    """Return narrow floats in float32 under autocast, where torch runs its own losses in float32."""
    narrow = values.dtype in (torch.bfloat16, torch.float16)
    return values.float() if narrow and torch.is_autocast_enabled(values.device.type) else values


def _absolute_error(input: Any, target: Any) -> Any:
    # torch 2.13's l1_loss leaves its weight= out when it dispatches, so only its frame has the caller's value
    frame = inspect.currentframe()
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back
    if frame is not None and frame.f_locals.get("weight") is not None:
        raise ShardingError(
            "l1_loss(weight=...) on tiles: torch drops the weight on its way; use ((input - target).abs() * weight)"
            ".sum() / weight.expand_as(input).sum()"
        )
    return _unreduced_loss(F.l1_loss)(input, target)


def _unreduced_loss(function: Callable[..., Tensor]) -> Callable[..., Tile]:
    def run(input: LossValues, target: LossValues, **options: Any) -> Tile:
        tiles = [t for t in (input, target) if isinstance(t, Tile)]
        layout, locals_ = align_tiles(tiles)
        ready = iter(locals_)
        parts = [next(ready) if isinstance(t, Tile) else cut_whole_tensor(t, tiles[0], layout) for t in (input, target)]
        # where a cut dim of size 1 meets an uncut one, ranks without its row have 0 and 1 rows; some losses do not
        # broadcast
        parts = torch.broadcast_tensors(*parts) if parts[0].shape != parts[1].shape else parts
        return Tile(function(*parts, reduction="none", **options), layout, tiles[0].mesh)

    return run


def _reduced_by_sample(values: Any, reduction: str) -> Any:
    return values.sum() / values.shape[0] if reduction == "batchmean" else reduce_losses(values, reduction)


_OLD = ("size_average", "reduce", "reduction")
_answer_elementwise_loss(F.mse_loss, _unreduced_loss(F.mse_loss), *_OLD, "weight", mean_by_weight=True)
_answer_elementwise_loss(F.l1_loss, _absolute_error, *_OLD, mean_by_weight=True)
_answer_elementwise_loss(F.smooth_l1_loss, _unreduced_loss(F.smooth_l1_loss), *_OLD, "beta")
_answer_elementwise_loss(F.huber_loss, _unreduced_loss(F.huber_loss), "reduction", "delta", "weight")
_answer_elementwise_loss(F.binary_cross_entropy, _unreduced_loss(F.binary_cross_entropy), "weight", *_OLD)
_answer_elementwise_loss(F.kl_div, _unreduced_loss(F.kl_div), *_OLD, "log_target", reduced=_reduced_by_sample)
_answer_elementwise_loss(F.soft_margin_loss, _unreduced_loss(F.soft_margin_loss), *_OLD)


@implements_torch(F.binary_cross_entropy_with_logits, either=("input", "target", "weight", "pos_weight"))
def binary_cross_entropy_with_logits(
    input: LossValues,
    target: LossValues,
    weight: LossValues | None = None,
    size_average: None = None,
    reduce: None = None,
    reduction: str = "mean",
    pos_weight: LossValues | None = None,
) -> Any:
    """Return y = (1 - t) x - log sigmoid x, with `pos_weight` for the positive class, then reduced."""
    refuse_old_arguments("binary_cross_entropy_with_logits", size_average, reduce)
    check_same_shape("binary_cross_entropy_with_logits", input, target)
    input, target = _widened_input(input), _widened_input(target)
    log_weight: Any = 1.0 if pos_weight is None else 1 + (pos_weight - 1) * target
    # torch computes in the memory of 1 - t, so the result has its dtype
    losses = ((1 - target) * input - log_weight * F.logsigmoid(input)).to((1 - target).dtype)
    return reduce_losses(losses if weight is None else losses * weight, reduction)


@implements_torch(F.cross_entropy, either=("target",))
def cross_entropy(
    input: Tile,
    target: LossValues,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Return y = -log softmax(input)[target] over the class dim 1, averaged over the global positions, by class weight
    if there is one.

    *Shapes*: input ``[batch, class, *space]``, target ``[batch, *space]`` of class indices, or of the input's shape of
    probabilities.
    *Sends*: forward, all-reduces of one or two numbers; backward, nothing.  Where the classes are cut, also the maximum
    over the ranks' classes at each position. Then the sum of exponentials and the target's logit together (with
    `label_smoothing`, the sum of logits too).  That is three all-reduces of positions, without logits; backward,
    nothing.  With probabilities of cut classes, as `log_softmax`, and one more of positions.  After Shoeybi et al.,
    arXiv 1909.08053.
    """
    refuse_old_arguments("cross_entropy", size_average, reduce)
    _check_reduction(reduction)
    if not 0 <= label_smoothing <= 1:
        raise RuntimeError(f"label_smoothing must be between 0.0 and 1.0. Got: {label_smoothing}")
    dim = 1 if input.ndim > 1 else 0
    if not input.layout.cut_axes and _lies_alike(input, target, dim):
        # no axis cuts the input, so each rank computes the whole answer
        out = F.cross_entropy(input.local, target.local, weight, None, ignore_index, None, reduction, label_smoothing)
        return leave_tile(out, input.mesh) if out.ndim == 0 else Tile(out, target.layout, input.mesh)
    input, is_soft = _widened_input(input), tuple(target.shape) == tuple(input.shape)
    log_p = input if input.layout.is_cut(dim) and not is_soft else F.log_softmax(input, dim)
    if is_soft:
        return _loss_with_probabilities(log_p, _widened_input(target), weight, reduction, label_smoothing, dim)
    return _loss_with_indices(log_p, target, weight, ignore_index, reduction, label_smoothing, dim)


def _loss_with_indices(
    log_p: Tile,
    target: LossValues,
    weight: Tensor | None,
    ignore: int,
    reduction: str,
    smoothing: float,
    dim: int,
    are_logits: bool = True,
) -> Any:
    if not _lies_alike(log_p, target, dim):
        log_p, target = _brought_beside(log_p, target, dim)
    if log_p.layout.is_cut(dim):
        losses = _losses_of_cut_classes(log_p, target.local, weight, ignore, smoothing, dim, are_logits)
    else:
        losses = _class_losses(log_p.local, target.local, weight, ignore, smoothing)
    if reduction == "none":
        return Tile(losses, target.layout, target.mesh)
    total = reduce_sum(Tile(losses, target.layout, target.mesh))
    if reduction == "sum":
        return total
    return total / reduce_sum(
        Tile(_class_weights(log_p.local, target.local, weight, ignore), target.layout, log_p.mesh)
    )


def _lies_alike(log_p: Tile, target: LossValues, dim: int) -> bool:
    layout = log_p.layout
    is_tile = type(target) is Tile and target.mesh is log_p.mesh
    return is_tile and not layout.has_halo and target.layout is layout.drop((dim,))


def _brought_beside(log_p: Tile, target: LossValues, dim: int) -> tuple[Tile, Tile]:
    rows = log_p
    if isinstance(target, Tile) and target.ndim == rows.ndim - 1:
        places = list(range(rows.ndim))
        rows, target = bring_together([rows, target], [places, [d for d in places if d != dim]])
    rows = rows.owned()
    layout = rows.layout.drop((dim,))
    anchor = Tile(rows.local.new_empty(layout.local_shape(rows.coordinate)), layout, rows.mesh)
    if tuple(target.shape) != tuple(anchor.shape):
        raise ShardingError(
            f"class losses: target {tuple(target.shape)} must be the input's shape without classes "
            f"{tuple(anchor.shape)}, or, for cross_entropy, with them {tuple(log_p.shape)}"
        )
    index = (
        align_tiles([target, anchor], stays=1)[1][0] if isinstance(target, Tile) else cut_whole_tensor(target, anchor)
    )
    return rows, Tile(index, anchor.layout, anchor.mesh)


def _class_weights(log_p: Tensor, index: Tensor, weight: Tensor | None, ignore: int) -> Tensor:
    counted = (index != ignore).to(log_p.dtype)
    return counted if weight is None else weight[index.clamp(0, len(weight) - 1)] * counted


def _class_losses(log_p: Tensor, index: Tensor, weight: Tensor | None, ignore: int, smoothing: float) -> Tensor:
    dim = 1 if log_p.ndim > 1 else 0
    losses = F.nll_loss(log_p, index, weight, ignore_index=ignore, reduction="none")
    if smoothing:
        ignored = index == ignore
        each = log_p if weight is None else log_p * weight.view(-1, *(1,) * (log_p.ndim - 1 - dim))
        # filled, not multiplied by zero, because an ignored value may be infinite
        losses = (1 - smoothing) * losses - smoothing / log_p.shape[dim] * each.sum(dim).masked_fill(ignored, 0.0)
    return losses


def _losses_of_cut_classes(
    x: Tile, index: Tensor, weight: Tensor | None, ignore: int, smoothing: float, dim: int, are_logits: bool
) -> Tensor:
    """Return the losses at the local positions, where each rank has the logits (or log probabilities) of own classes.

    What is added up is held alike, so its gradient is whole, and nothing is sent for that of x.
    """
    if len(x.layout.dim(dim)) > 1:
        raise ShardingError(
            f"class losses: the classes (dim {dim}) of {x.layout} were flattened together; unflatten them, or cut space"
        )
    (cut,) = x.layout.dim(dim)
    start, stop = cut.owned(x.layout.piece(cut, x.coordinate))
    counted = index != ignore
    if not (is_on_accelerator(index) or lacks_values()) and not (((index >= 0) & (index < cut.size)) | ~counted).all():
        raise IndexError(f"class losses: a target is out of range for {cut.size} classes")
    local = shifted_by_global_max(x, dim).local if are_logits else x.local
    has_target = counted & (index >= start) & (index < stop)
    places = (index - start).clamp(0, max(stop - start - 1, 0)).unsqueeze(dim)
    of_target = local.gather(dim, places).squeeze(dim) if stop > start else local.sum(dim)
    parts = [torch.where(has_target, of_target, 0.0)]
    if are_logits:
        parts.append(local.exp().sum(dim))
    if smoothing:
        weighted = local if weight is None else local * weight[start:stop].view(-1, *(1,) * (local.ndim - 1 - dim))
        parts.append(weighted.sum(dim).masked_fill(~counted, 0.0))
    sums = comm.sum_parts(torch.stack(parts), x.mesh, cut.axes, (x.layout, dim))
    log_sum = sums[1].log() if are_logits else torch.zeros_like(sums[0])
    losses = _class_weights(local, index, weight, ignore) * (log_sum - sums[0])
    if smoothing:
        all_classes = cut.size if weight is None else weight.sum()
        smooth = (all_classes * log_sum - sums[-1]).masked_fill(~counted, 0.0)
        losses = (1 - smoothing) * losses + smoothing / cut.size * smooth
    return losses.to(x.dtype)


def _loss_with_probabilities(
    log_p: Tile, target: LossValues, weight: Tensor | None, reduction: str, smoothing: float, dim: int
) -> Any:
    classes = log_p.shape[dim]
    soft = target * (1 - smoothing) + smoothing / classes if smoothing else target
    each = log_p * soft if weight is None else log_p * soft * weight.reshape(-1, *(1,) * (log_p.ndim - 1 - dim))
    losses = -each.sum(dim)
    if reduction == "none":
        return losses
    total = losses.sum()
    return total if reduction == "sum" else total / (log_p.numel() // classes)


@implements_torch(F.nll_loss, either=("target",))
def nll_loss(
    input: Tile,
    target: LossValues,
    weight: Tensor | None = None,
    size_average: None = None,
    ignore_index: int = -100,
    reduce: None = None,
    reduction: str = "mean",
) -> Any:
    """Return y = -input[target] over dim 1, reduced as `cross_entropy`; *Sends*: over cut classes, one sum more."""
    refuse_old_arguments("nll_loss", size_average, reduce)
    _check_reduction(reduction)
    dim = 1 if input.ndim > 1 else 0
    return _loss_with_indices(input, target, weight, ignore_index, reduction, 0.0, dim, are_logits=False)


@implements_torch(F.gaussian_nll_loss, either=("input", "target", "var"))
def gaussian_nll_loss(
    input: LossValues, target: LossValues, var: Any, full: bool = False, eps: float = 1e-6, reduction: str = "mean"
) -> Any:
    """Return y = (log var + (input - target)^2 / var) / 2, then reduced; `var` is at least `eps`."""
    spread = _raised_variances(input, var, eps)
    losses = 0.5 * (torch.log(spread) + (input - target).square() / spread)
    return reduce_losses(losses + 0.9189385332046727 if full else losses, reduction)


def _raised_variances(input: LossValues, var: Any, eps: float) -> LossValues:
    """Return the variances as torch takes them: one number, one an element, or one for all of the last dim."""
    if isinstance(var, (int, float)):
        var = torch.full_like(input, var)
    if not (var < 0).logical_not().all():  # NaN is not below 0
        raise ValueError("gaussian_nll_loss: var has negative entries")
    if tuple(var.shape) == tuple(input.shape)[:-1]:
        var = var.unsqueeze(-1)
    # clamped at eps, but with the gradient of the unclamped value, as in torch
    return var + (torch.clamp(var, min=eps) - var).detach()


@implements_torch(F.poisson_nll_loss, either=("input", "target"))
def _poisson_nll_loss(
    input: LossValues,
    target: LossValues,
    log_input: bool = True,
    full: bool = False,
    size_average: None = None,
    eps: float = 1e-8,
    reduce: None = None,
    reduction: str = "mean",
) -> Any:
    """Return y = exp x - t x of logarithms, or x - t log x, then reduced; `full` adds Stirling's log t! where t > 1."""
    refuse_old_arguments("poisson_nll_loss", size_average, reduce)
    check_same_shape("poisson_nll_loss", input, target)
    losses = torch.exp(input) - target * input if log_input else input - target * torch.log(input + eps)
    if full:
        factorial = target * torch.log(target) - target + 0.5 * torch.log(2 * torch.pi * target)
        losses = losses + factorial.masked_fill(target <= 1, 0)
    return reduce_losses(losses, reduction)
