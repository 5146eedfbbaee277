"""Attention of some queries to one block of keys, as a part of attention to several: one step of a ring.

Matrix products serve any device, dtype, mask and dropout; torch's fused kernel serves CPUs (`has_fused_kernel`) in half
the time forward, two thirds backward, without scores in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jigsaw.comm.wire_values import values_on_device
from jigsaw.torch_internals.dispatch import CPU_ATTENTION, CPU_ATTENTION_BACKWARD


@dataclass(frozen=True)
class BlockRows:
    """Some rows of queries, the keys at the global places `at`, and the masks and factors of their scores."""

    rows: slice
    columns: slice
    at: Tensor
    # [..., 1 or rows, 1 or keys], bool (True: may attend) or numbers that are added to the scores
    mask: Tensor | None = None
    places: Tensor | None = None  # places of the queries, where some keys come later than a query
    is_triangle: bool = False  # True where queries and keys have the same places
    kept: Tensor | None = None  # with dropout, the factor of each weight

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scores = torch.matmul(q, k.mT)
        if self.mask is not None and self.mask.dtype != torch.bool:
            scores = scores.add_(self.mask)
        elif self.mask is not None:
            scores = scores.masked_fill_(~self.mask, -math.inf)
        return scores if self.places is None else scores.masked_fill_(self._later(), -math.inf)

    @property
    def is_causal(self) -> bool:
        return self.is_triangle and self.mask is None

    def added(self, like: Tensor) -> Tensor | None:
        if self.is_causal or (self.mask is None and self.places is None):
            return None
        added = like.new_zeros(self.rows.stop - self.rows.start, len(self.at))
        if self.mask is not None:
            is_boolean = self.mask.dtype == torch.bool
            added = added.masked_fill(~self.mask, -math.inf) if is_boolean else added + self.mask.to(like.dtype)
        if self.places is not None:
            added = added.masked_fill_(self._later(), -math.inf)
        return _in_four_dims(added, added.shape[:-2])

    def _later(self) -> Tensor:
        assert self.places is not None
        return self.at > values_on_device(self.places, None, self.at.device)[:, None]


@dataclass(frozen=True)
class BlockSums:
    """Highest score of each query, and the sums of exp(score - highest), alone and times the values."""

    highest: Tensor
    total: Tensor
    mixed: Tensor


@dataclass(frozen=True)
class BlockGradients:
    """The share of a block in the gradients, and the gradient of the scores where they were made."""

    q: Tensor
    k: Tensor
    v: Tensor
    scores: Tensor | None = None


def has_fused_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Say whether torch's fused kernel can do blocks of these, without a gradient of the mask and without dropout."""
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    if q.device.type != "cpu" or not 0 < k.shape[-1] == v.shape[-1] or 0 in batch:
        return False
    # the kernel takes four dims: all batch dims but the last are flattened, so a mask must have all of them or none
    of_mask = (1,) * len(batch) if mask is None else (*(1,) * (len(batch) + 2 - mask.ndim), *mask.shape[:-2])
    return all(n == 1 for n in of_mask[:-1]) or of_mask[:-1] == batch[:-1]


def sum_block(part: BlockRows, q: Tensor, k: Tensor, v: Tensor, is_fused: bool) -> BlockSums:
    """Return the sums of these rows of scaled queries over one block of keys and values."""
    if is_fused:
        return _sum_block_fused(part, q, k, v)
    scores = part.scores(q, k)
    highest = scores.amax(-1)
    weights = scores.sub_(highest.masked_fill(highest == -math.inf, 0.0)[..., None]).exp_()
    total = weights.sum(-1)
    return BlockSums(highest, total, torch.matmul(weights if part.kept is None else weights.mul_(part.kept), v))


def block_gradients(
    part: BlockRows, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, grad: Tensor, is_fused: bool
) -> BlockGradients:
    """Return the gradients from one block; `out` and `log_sum` are of all blocks, dS = P (dP - sum(dY Y))."""
    if is_fused:
        return _block_gradients_fused(part, q, k, v, out, log_sum, grad)
    weights = part.scores(q, k).sub_(log_sum[..., None]).exp_()
    by_weights = torch.matmul(grad, v.mT)
    if part.kept is not None:
        by_weights *= part.kept
    by_scores = by_weights.sub_((grad * out).sum(-1, keepdim=True)).mul_(weights)
    kept = weights if part.kept is None else weights.mul_(part.kept)
    return BlockGradients(
        torch.matmul(by_scores, k), torch.matmul(by_scores.mT, q), torch.matmul(kept.mT, grad), by_scores
    )


def _in_four_dims(x: Tensor, batch: torch.Size) -> Tensor:
    """Return x with two batch dims and contiguous rows, which the kernel assumes."""
    x = x.expand(*batch, *x.shape[-2:]).reshape(math.prod(batch[:-1]), *(batch[-1:] or (1,)), *x.shape[-2:])
    return x if x.stride(-1) == 1 else x.contiguous()


def _sum_block_fused(part: BlockRows, q: Tensor, k: Tensor, v: Tensor) -> BlockSums:
    batch, added = q.shape[:-2], part.added(q)
    y, log_sum = CPU_ATTENTION(
        *(_in_four_dims(x, batch) for x in (q, k, v)), 0.0, part.is_causal, attn_mask=added, scale=1.0
    )
    total = torch.ones_like(log_sum)
    if added is not None:
        # where all keys are hidden, the kernel's output is of no use
        is_dead = (added == -math.inf).all(-1)
        y, total = y.masked_fill(is_dead[..., None], 0.0), total.masked_fill_(is_dead, 0.0)
        log_sum = log_sum.masked_fill(is_dead, -math.inf)
    return BlockSums(*(x.reshape(*batch, *x.shape[2:]) for x in (log_sum, total, y)))


def _block_gradients_fused(
    part: BlockRows, q: Tensor, k: Tensor, v: Tensor, out: Tensor, log_sum: Tensor, grad: Tensor
) -> BlockGradients:
    batch = q.shape[:-2]
    wide = [_in_four_dims(x, batch) for x in (grad, q, k, v, out)]
    # the kernel expects these in the memory order that its forward pass makes, with heads last
    log_sum = _in_four_dims(log_sum[..., None], batch)[..., 0].transpose(1, 2).contiguous().transpose(1, 2)
    gradients = CPU_ATTENTION_BACKWARD(*wide, log_sum, 0.0, part.is_causal, attn_mask=part.added(q), scale=1.0)
    return BlockGradients(*(x.reshape(*batch, *x.shape[2:]) for x in gradients))
