"""Losses of margins, distances and sequences, composed from functions that tiles answer.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> x, y = (jigsaw.shard(torch.tensor(rows), mesh, ("lat", None)) for rows in ([[1.0, 0.0]], [[0.0, 1.0]]))
>>> torch.nn.functional.triplet_margin_loss(x, x, y, margin=2.0)
tensor(0.5858)
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from jigsaw.nn.losses.loss import reduce_losses, refuse_old_arguments
from jigsaw.ops.whole_dims import rows_of_local, with_whole_dims
from jigsaw.tile.tile import Tile, implements_torch


def _answers_reduced(function: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Answer a loss of torch by its unreduced values, which the decorated function makes from torch's own arguments."""
    signature = inspect.signature(function)

    def register(values: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            options = bound.arguments
            refuse_old_arguments(function.__name__, options.pop("size_average", None), options.pop("reduce", None))
            reduction = options.pop("reduction")
            return reduce_losses(values(**options), reduction)

        implements_torch(function)(answer)
        return values

    return register


def _check_dims(function: Any, *operands: Any) -> None:
    if len({x.ndim for x in operands}) > 1:
        shapes = [tuple(x.shape) for x in operands]
        raise RuntimeError(f"{function.__name__}: operands of shapes {shapes} must have as many dims")


# -- of two or three operands -----------------------------------------------------------------------------------------


@_answers_reduced(F.margin_ranking_loss)
def _margin_ranking(input1: Any, input2: Any, target: Any, margin: float) -> Any:
    """Return max(0, -t (x1 - x2) + margin)."""
    _check_dims(F.margin_ranking_loss, input1, input2, target)
    return (-target * (input1 - input2) + margin).clamp_min(0)


@_answers_reduced(F.hinge_embedding_loss)
def _hinge_embedding(input: Any, target: Any, margin: float) -> Any:
    """Return x where t = 1, max(0, margin - x) where t = -1, and their sum elsewhere."""
    apart = torch.where(target != 1, (margin - input).clamp_min(0), 0.0)
    return apart + torch.where(target != -1, input, 0.0)


@_answers_reduced(F.cosine_embedding_loss)
def _cosine_embedding(input1: Any, input2: Any, target: Any, margin: float) -> Any:
    """Return 1 - cos where t = 1, max(0, cos - margin) where t = -1, else 0."""
    if target.ndim > 1 or input1.ndim != target.ndim + 1 or input2.ndim != input1.ndim:
        shapes = [tuple(x.shape) for x in (input1, input2, target)]
        raise RuntimeError(f"cosine_embedding_loss of shapes {shapes}: pass [batch, features] twice, and [batch]")
    along = target.ndim
    squares = [(x * x).sum(along) + 1e-12 for x in (input1, input2)]
    cosine = (input1 * input2).sum(along) / (squares[0] * squares[1]).sqrt()
    alike = torch.where(target == 1, 1 - cosine, 0.0)
    return alike + torch.where(target == -1, (cosine - margin).clamp_min(0), 0.0)


@_answers_reduced(F.triplet_margin_with_distance_loss)
def _triplet_by_distance(
    anchor: Any, positive: Any, negative: Any, distance_function: Any, margin: float, swap: bool
) -> Any:
    """Return max(0, margin + d(anchor, positive) - d(anchor, negative))."""
    _check_dims(F.triplet_margin_with_distance_loss, anchor, positive, negative)
    if margin <= 0:
        raise ValueError(f"margin must be greater than 0, got {margin}")
    distance = F.pairwise_distance if distance_function is None else distance_function
    near, far = distance(anchor, positive), distance(anchor, negative)
    if swap:
        far = torch.minimum(far, distance(positive, negative))
    return (margin + near - far).clamp_min(0)


@_answers_reduced(F.triplet_margin_loss)
def _triplet(anchor: Any, positive: Any, negative: Any, margin: float, p: float, eps: float, swap: bool) -> Any:
    return _triplet_by_distance(anchor, positive, negative, partial(F.pairwise_distance, p=p, eps=eps), margin, swap)


# -- of classes -------------------------------------------------------------------------------------------------------


@_answers_reduced(F.multi_margin_loss)
def _multi_margin(input: Any, target: Any, p: int, margin: float, weight: Any) -> Any:
    """Sum over classes k other than t of w[t] max(0, margin - x[t] + x[k])^p / classes."""
    if p not in (1, 2):
        raise ValueError(f"multi_margin_loss: p={p} is not 1 or 2")
    classes, places = input.shape[-1], target.reshape((*input.shape[:-1], 1))
    # relu, because its gradient at 0 is 0, as the loss has it
    losses = F.relu(margin - input.gather(-1, places) + input)
    losses = (losses if p == 1 else losses.square()) * (torch.arange(classes, device=input.device) != places)
    losses = losses if weight is None else losses * weight[places]
    return losses.sum(-1) / classes


@_answers_reduced(F.multilabel_margin_loss)
def _multilabel_margin(input: Any, target: Any) -> Any:
    """Sum over labels j before the first -1, and classes k that are none, of max(0, 1 - x[j] + x[k]) / classes."""
    input, target = (with_whole_dims(x, (x.ndim - 1,)) if isinstance(x, Tile) else x for x in (input, target))
    classes, places = input.shape[-1], target.clamp_min(0)
    is_label = ((target < 0).cumsum(-1) == 0).unsqueeze(-1)
    of_class = (places.unsqueeze(-1) == torch.arange(classes, device=input.device)) & is_label
    losses = F.relu(1 - input.gather(-1, places).unsqueeze(-1) + input.unsqueeze(-2))
    return (losses * is_label * ~of_class.any(-2, keepdim=True)).sum((-2, -1)) / classes


@_answers_reduced(F.multilabel_soft_margin_loss)
def _multilabel_soft_margin(input: Any, target: Any, weight: Any) -> Any:
    """Return the mean over classes of -t log sigmoid x - (1 - t) log sigmoid -x, times their weights."""
    losses = -(target * F.logsigmoid(input) + (1 - target) * F.logsigmoid(-input))
    losses = losses if weight is None else losses * weight
    return losses.sum(-1) / input.shape[-1]


# -- of sequences -----------------------------------------------------------------------------------------------------


@implements_torch(F.ctc_loss, either=("targets", "input_lengths", "target_lengths"))
def _ctc_loss(
    log_probs: Tile,
    targets: Any,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: str = "mean",
    zero_infinity: bool = False,
) -> Any:
    """Return -log of the sum of the probabilities of all alignments of a sequence with its labels.

    *Shapes*: log_probs ``[time, batch, classes]`` or ``[time, classes]``.  Time and classes become whole: the axes that
    cut them cut the batch instead.  Targets and lengths are integers, whole on every rank.
    *Sends*: the exchange that makes a cut dim whole, cut targets to every rank, and one all-reduce of the sum.
    """
    x: Any = log_probs if log_probs.ndim == 3 else log_probs.unsqueeze(1)
    x = with_whole_dims(x.owned(), (0, 2))
    steps, samples, classes = x.shape
    labels, of_input, of_target = (_on_every_rank(v, x) for v in (targets, input_lengths, target_lengths))
    of_input, of_target = of_input.reshape(-1), of_target.reshape(-1)
    # torch indexes memory by lengths and labels, so a wrong one would end the process, or fail on one rank alone
    limits = (of_input, steps), (of_target, labels.shape[-1])
    if not all(_are_counts(lengths, most) and len(lengths) == samples for lengths, most in limits) or (
        labels.ndim == 1 and of_target.sum() > len(labels)
    ):
        raise RuntimeError(
            f"ctc_loss: input_lengths {of_input.tolist()} and target_lengths {of_target.tolist()} for {samples} "
            f"sequences of {steps} steps: one integer each, none longer than the steps or the labels"
        )
    if labels.ndim == 1:  # the labels of all samples are concatenated
        labels = torch.nn.utils.rnn.pad_sequence(list(labels[: of_target.sum()].split(of_target.tolist())), True)
    is_label = torch.arange(labels.shape[1], device=x.device) < of_target[:, None]
    labels = labels.long().masked_fill(~is_label, blank)
    if not _are_counts(labels, classes - 1):
        raise RuntimeError(f"ctc_loss: targets {labels.tolist()} are to be labels from 0 to {classes - 1}")
    rows = rows_of_local(x.layout, x.coordinate, 1, x.device)
    own_labels = labels[rows], of_input[rows], of_target[rows]
    layout = x.layout.drop((0, 2))
    losses = F.ctc_loss(x.local, *own_labels, blank, "none", zero_infinity) if len(rows) else x.local.sum((0, 2))
    values: Any = Tile(losses, layout, x.mesh)
    if reduction == "mean":
        values = values / of_target.clamp_min(1)
    return reduce_losses(values if log_probs.ndim == 3 else values.sum(), reduction)


def _on_every_rank(values: Any, tile: Tile) -> torch.Tensor:
    return torch.as_tensor(values.full_tensor() if isinstance(values, Tile) else values, device=tile.device)


def _are_counts(values: torch.Tensor, most: int) -> bool:
    """Return True for integers from 0 to `most`."""
    is_integer = not (values.is_floating_point() or values.is_complex() or values.dtype is torch.bool)
    return is_integer and bool(((values >= 0) & (values <= most)).all())
