"""Attention around a ring: queries stay, keys and values travel block by block, and no rank ever holds all of them.

After Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (arXiv 2310.01889); what is
done with a block is Dao, "FlashAttention-2" (arXiv 2307.08691): a softmax that goes on from block to block forward, and
backward the weights made again from the scores and their log-sum-exp.

Four ranks, blocks 0 to 3: in step s rank r has the block of rank (r - s) mod 4, and passes it on to rank r + 1 while it
works on it, so that the next one is there when it has done.

            rank 0   rank 1   rank 2   rank 3
    step 0    0        1        2        3
    step 1    3        0        1        2
    step 2    2        3        0        1
    step 3    1        2        3        0

Backward the blocks go around again, and their gradients behind them, a step later, for each rank first adds its part:
those of block 0 begin at rank 1 in step 1, and leave rank 3 for rank 0 after step 3, where the part of step 0 waited.
That last message has no block behind it: so each rank keeps half of its queries of step 0 for then.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm, debug
from jigsaw.cut import Interval
from jigsaw.layout import Layout, MeshCoordinate
from jigsaw.nn.rank_order import CutGroup, axes_of_cuts, coordinates_along, size_of_cuts, take_owned_rows
from jigsaw.ops.random_numbers import chances_at

# scores of a block are made for as many queries at a time as fit in here
SCORE_BYTES = 64 << 20


@dataclass(frozen=True)
class KeyRing:
    """The ranks that pass keys on to each other, as one of them sees it: how their tokens are cut, where each is."""

    keys: CutGroup
    layout: Layout
    places: tuple[MeshCoordinate, ...]
    me: int

    @classmethod
    def through(cls, keys: CutGroup, layout: Layout, here: MeshCoordinate) -> KeyRing:
        """The ring through the rank `here`, along the axes that cut the keys."""
        places = tuple(coordinates_along(layout, axes_of_cuts(keys), here))
        return cls(keys, layout, places, places.index(here))

    @property
    def size(self) -> int:
        return len(self.places)

    def rows(self, member: int) -> int:
        """How many keys a member has."""
        owned = (c.owned(self.layout.piece(c, self.places[member])) for c in self.keys)
        return math.prod(stop - start for start, stop in owned)

    def positions(self, member: int) -> Tensor:
        """The global places of its keys."""
        return take_owned_rows(torch.arange(size_of_cuts(self.keys)), 0, self.keys, self.layout, self.places[member])

    def pass_on(self, mesh: DeviceMesh, given: Tensor, taken: Tensor) -> comm.PendingWork:
        """Start one step."""
        after, before = (self.layout.index(self.places[(self.me + d) % self.size]) for d in (1, -1))
        return comm.swap_messages(mesh, [(after, given)], [(before, taken)], "ring attention")


@dataclass(frozen=True)
class RingOptions:
    """What is alike in the forward and the backward pass."""

    scale: float
    query_positions: Tensor | None = None  # where attention is causal
    dropout: float = 0.0
    seed: int = 0
    # of each weight [..., L, S] without the place along S: [..., L], where weights are dropped
    index: Tensor | None = None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: KeyRing, mesh: DeviceMesh, options: RingOptions
) -> Tensor:
    """y = softmax(q k^T scale + mask) v of this rank's queries and all keys of the ring.

    Scores, the softmax and sums are in float32 or better.  A query that may attend to no key has zeros.

    *Shapes*: per rank q [..., L/P, E], k [..., S/P, E], v [..., S/P, Ev], mask [..., L/P, S], y [..., L/P, Ev]; dims
    before the last two broadcast.  Held at a time: this rank's keys and values and two blocks more, no scores but
    those of one block and so many queries as fit in `SCORE_BYTES`; backward also gradients of three blocks.
    *Sends*: forward P-1 blocks of keys and values; backward these again, and P-1 blocks of their gradients (in float32
    for narrower types).
    """
    return _RingAttention.apply(q, k, v, mask, _RingPass(ring, mesh, options, k.shape, v.shape))


@dataclass(frozen=True)
class _RingPass:
    """One rank's way through the blocks."""

    ring: KeyRing
    mesh: DeviceMesh
    options: RingOptions
    key_shape: torch.Size
    value_shape: torch.Size

    def unpack(self, packed: Tensor, member: int) -> tuple[Tensor, Tensor]:
        """The keys and values (or their gradients) of a member out of one message."""
        rows = self.ring.rows(member)
        shapes = [(*shape[:-2], rows, shape[-1]) for shape in (self.key_shape, self.value_shape)]
        keys, values = packed.split([math.prod(shape) for shape in shapes])
        return keys.view(shapes[0]), values.view(shapes[1])

    def size_of(self, member: int) -> int:
        """The elements of a message of a member's keys and values."""
        return self.ring.rows(member) * sum(
            math.prod((*shape[:-2], shape[-1])) for shape in (self.key_shape, self.value_shape)
        )

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor]]:
        """(member, its keys and values), this rank's own first; the next is under way meanwhile."""
        ring, block = self.ring, torch.cat([k.reshape(-1), v.reshape(-1)])
        for step in range(ring.size):
            member = (ring.me - step) % ring.size
            arriving = None
            if step < ring.size - 1:
                buffer = block.new_empty(self.size_of((member - 1) % ring.size))
                arriving = buffer, ring.pass_on(self.mesh, block, buffer)
            yield member, block
            if arriving is not None:
                block, pending = arriving
                pending.wait()

    def scores(
        self, q: Tensor, k: Tensor, mask: Tensor | None, member: int, queries: Interval | None = None
    ) -> Iterator[_ScoreRows]:
        """The masked scores of all queries, or of an interval of them, and a member's keys, some queries at a time;
        those that the order of the tokens hides are left out.  `q` is scaled and, as `k`, wide.
        """
        (begin, end), keys = queries or (0, q.shape[-2]), k.shape[-2]
        if begin == end or not keys:
            return
        places = self.ring.positions(member)
        step = max(1, SCORE_BYTES // max(1, math.prod(q.shape[:-2]) * keys * q.itemsize))
        at, order = places.to(q.device), self.options.query_positions
        first, last = int(places.min()), int(places.max())
        for start in range(begin, end, step):
            rows = slice(start, min(start + step, end))
            if order is not None and first > int(order[rows].max()):
                continue
            scores = torch.matmul(q[..., rows, :], k.mT)
            if mask is not None:
                some = _rows_of(mask, rows)
                some = some if mask.shape[-1] == 1 else some.index_select(-1, at)
                scores = scores.masked_fill_(~some, -math.inf) if some.dtype == torch.bool else scores.add_(some)
            if order is not None and last > int(order[rows].min()):
                scores = scores.masked_fill_(at > order[rows].to(q.device)[:, None], -math.inf)
            yield _ScoreRows(rows, scores, at, self._kept(rows, at, q.dtype))

    def _kept(self, rows: slice, at: Tensor, dtype: torch.dtype) -> Tensor | None:
        """What the weights are multiplied by where some are dropped."""
        p, index = self.options.dropout, self.options.index
        if index is None:
            return None
        places = index[..., rows, None] * size_of_cuts(self.ring.keys) + at
        return chances_at(places, self.options.seed, p).to(dtype).mul_(0.0 if p == 1 else 1 / (1 - p))


@dataclass(frozen=True)
class _ScoreRows:
    """Scores of some rows of queries and the keys of one member, at the global places `at`."""

    rows: slice
    scores: Tensor
    at: Tensor
    kept: Tensor | None


def _rows_of(mask: Tensor, rows: slice) -> Tensor:
    return mask if mask.shape[-2] == 1 else mask[..., rows, :]


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, way: _RingPass) -> Tensor:
        debug.compare_calls(way.mesh, "ring attention", way.ring.layout)
        with torch.autocast(q.device.type, enabled=False):
            out, log_sum = _attend_to_blocks(q, k, v, mask, way)
        ctx.save_for_backward(q, k, v, mask, out, log_sum)
        ctx.way = way
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        way: _RingPass = ctx.way
        debug.compare_calls(way.mesh, "gradient of ring attention", way.ring.layout)
        with torch.autocast(grads[0].device.type, enabled=False):
            dq, dk, dv, dmask = _RingGradients(ctx, grads[0]).all_of_them()
        return dq, dk, dv, dmask, None


def _attend_to_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, way: _RingPass) -> tuple[Tensor, Tensor]:
    """y, and the log-sum-exp of each query's scores: infinite for one that may attend to no key."""
    wide = _wide_dtype(q)
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    sums = q.new_zeros((*batch, q.shape[-2], v.shape[-1]), dtype=wide)
    totals = q.new_zeros((*batch, q.shape[-2]), dtype=wide)
    highest = torch.full_like(totals, -math.inf)
    scaled = (q.to(wide) * way.options.scale).expand(*batch, *q.shape[-2:])
    for member, block in way.blocks(k, v):
        keys, values = (x.to(wide) for x in way.unpack(block, member))
        for part in way.scores(scaled, keys, mask, member):
            # what was summed so far is scaled to the new maximum; where that is -inf, there is nothing yet to scale
            before, total, y = highest[..., part.rows], totals[..., part.rows], sums[..., part.rows, :]
            now = torch.maximum(before, part.scores.amax(-1))
            shift = now.masked_fill(now == -math.inf, 0.0)
            weights = part.scores.sub_(shift[..., None]).exp_()
            factor = (before - shift).exp_()
            total.mul_(factor).add_(weights.sum(-1))
            kept = weights if part.kept is None else weights.mul_(part.kept)
            y.mul_(factor[..., None]).add_(torch.matmul(kept, values))
            before.copy_(now)
    is_dead = totals == 0
    out = sums.div_(totals.masked_fill(is_dead, 1.0)[..., None]).to(q.dtype)
    return out, (highest + totals.log()).masked_fill(is_dead, math.inf)


class _RingGradients:
    """The backward pass of one rank: dS = P * (dP - D), with dP = dY V^T and D the sum of dY * Y over features."""

    def __init__(self, ctx: Any, grad: Tensor) -> None:
        self.way: _RingPass = ctx.way
        self.q, self.k, self.v, self.mask, out, self.log_sum = ctx.saved_tensors
        self.for_q, for_k, for_v, for_mask, _ = ctx.needs_input_grad
        self.for_keys = for_k or for_v
        wide = _wide_dtype(self.q)
        self.grad = grad.to(wide)
        self.scaled = (self.q.to(wide) * self.way.options.scale).expand(*grad.shape[:-1], self.q.shape[-1])
        self.along = (self.grad * out).sum(-1, keepdim=True)
        self.dq = torch.zeros_like(self.q, dtype=wide) if self.for_q else None
        self.dmask = torch.zeros_like(self.mask, dtype=wide) if for_mask else None

    def all_of_them(self) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """The gradients of q, k, v and the mask."""
        way, ring = self.way, self.way.ring
        count = self.q.shape[-2]
        own = self._zeros_like_block(ring.me)
        arriving: tuple[Tensor, comm.PendingWork] | None = None
        for member, block in way.blocks(self.k, self.v):
            keys, values = way.unpack(block, member)
            if member == ring.me:
                # the rest when there is nothing else to do but to wait for what the others add
                self._add_block(member, keys, values, (0, count // 2), own)
                continue
            part = self._zeros_like_block(member)
            self._add_block(member, keys, values, (0, count), part)
            if arriving is not None:
                arriving[1].wait()
                part += arriving[0]
            if self.for_keys:
                buffer = part.new_empty(way.size_of((member - 1) % ring.size))
                arriving = buffer, ring.pass_on(way.mesh, part, buffer)
        self._add_block(ring.me, self.k, self.v, (count // 2, count), own)
        dk = dv = None
        if self.for_keys:
            if arriving is not None:
                arriving[1].wait()
                own += arriving[0]
            dk, dv = (x.to(self.k.dtype) for x in way.unpack(own, ring.me))
        dq = None if self.dq is None else self.dq.mul_(way.options.scale).to(self.q.dtype)
        return dq, dk, dv, None if self.dmask is None else self.dmask.to(self.mask.dtype)

    def _zeros_like_block(self, member: int) -> Tensor:
        return self.scaled.new_zeros(self.way.size_of(member) if self.for_keys else 0)

    def _add_block(self, member: int, keys: Tensor, values: Tensor, queries: Interval, into: Tensor) -> None:
        """Add what some queries and the keys and values of a member give to the gradients here, and to those of these
        keys and values, which are packed in `into`.
        """
        keys, values = (x.to(self.scaled.dtype) for x in (keys, values))
        for part in self.way.scores(self.scaled, keys, self.mask, member, queries):
            rows = part.rows
            grad, q = self.grad[..., rows, :], self.scaled[..., rows, :]
            weights = part.scores.sub_(self.log_sum[..., rows, None]).exp_()
            by_weights = torch.matmul(grad, values.mT)
            if part.kept is not None:
                by_weights *= part.kept
            by_scores = by_weights.sub_(self.along[..., rows, :]).mul_(weights)
            kept = weights if part.kept is None else weights.mul_(part.kept)
            if self.dq is not None:
                dq = self.dq[..., rows, :]
                dq += torch.matmul(by_scores, keys).sum_to_size(dq.shape)
            if self.for_keys:
                dk, dv = self.way.unpack(into, member)
                dk += torch.matmul(by_scores.mT, q).sum_to_size(dk.shape)
                dv += torch.matmul(kept.mT, grad).sum_to_size(dv.shape)
            if self.dmask is not None:
                self._add_to_mask(part, by_scores)

    def _add_to_mask(self, part: _ScoreRows, by_scores: Tensor) -> None:
        assert self.dmask is not None
        into = _rows_of(self.dmask, part.rows)
        columns = 1 if into.shape[-1] == 1 else len(part.at)
        found = by_scores.sum_to_size((*into.shape[:-1], columns))
        if columns == into.shape[-1] == 1:
            into += found
        else:
            _ = into.index_add_(-1, part.at, found)
