"""Attention around a ring: queries stay, keys and values travel block by block, and no rank ever holds all of them.

After Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (arXiv 2310.01889). The work on
a block is that of Dao, "FlashAttention-2" (arXiv 2307.08691).  Forward, a softmax continues from block to block;
backward, the weights are made again from the scores and their log-sum-exp.

Example: four ranks, blocks 0 to 3.  In step s rank r has the block of rank (r - s) mod 4.  It passes the block on to
rank r + 1 while it works on it, so that the next one has arrived when it is done.

            rank 0   rank 1   rank 2   rank 3
    step 0    0        1        2        3
    step 1    3        0        1        2
    step 2    2        3        0        1
    step 3    1        2        3        0

Backward, the blocks go around again.  Their gradients follow a step later, because each rank first adds its part. Those
of block 0 begin at rank 1 in step 1. After step 3 they go from rank 3 to rank 0, where the part of step 0 waits.  No
block travels with that last message, so each rank keeps half of its queries of step 0 for then.

**Equal work.**  In causal attention a query attends to earlier tokens, so of P blocks of keys the ranks need 1, 2, ...
P.  Rank r exchanges the second half of its queries with rank P-1-r, and y goes back.  Example: four ranks, by their
halves of queries 0 to 7 and the blocks of keys that these need:

    rank       0        1        2        3
    its own    0, 1     2, 3     4, 5     6, 7
    blocks     1 + 1    2 + 2    3 + 3    4 + 4
    mirrored   0, 7     2, 5     4, 3     6, 1
    blocks     1 + 4    2 + 3    3 + 2    4 + 1

After the zigzag order of context parallel training (Dubey et al., "The Llama 3 herd of models", arXiv 2407.21783). Its
keys and values lie in that order, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.comm import debug
from jigsaw.comm.graph_calls import graph_call
from jigsaw.comm.wire_values import values_on_device, wire_memory
from jigsaw.geometry.cut import Interval
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.nn.attention.block_attention import BlockRows, block_gradients, has_fused_kernel, sum_block
from jigsaw.nn.rank_order import CutGroup, axes_of_cuts, coordinates_along, host_values, size_of_cuts, take_owned_rows
from jigsaw.ops.random_numbers import chances_at

# -- rings, and equal work --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class KeyRing:
    """A ring as one of its ranks sees it: the cut of the keys' tokens, and the place of each rank."""

    keys: CutGroup
    layout: Layout
    places: tuple[MeshCoordinate, ...]
    me: int

    @classmethod
    def through(cls, keys: CutGroup, layout: Layout, coord: MeshCoordinate) -> KeyRing:
        places = tuple(coordinates_along(layout, axes_of_cuts(keys), coord))
        return cls(keys, layout, places, places.index(coord))

    @property
    def size(self) -> int:
        return len(self.places)

    def rows(self, member: int) -> int:
        owned = (c.owned(self.layout.piece(c, self.places[member])) for c in self.keys)
        return math.prod(stop - start for start, stop in owned)

    def positions(self, member: int) -> Tensor:
        return take_owned_rows(torch.arange(size_of_cuts(self.keys)), 0, self.keys, self.layout, self.places[member])

    def pass_on(self, mesh: DeviceMesh, sent: Tensor, taken: Tensor) -> comm.PendingWork:
        after, before = (self.layout.index(self.places[(self.me + d) % self.size]) for d in (1, -1))
        return comm.swap_messages(mesh, [(after, sent)], [(before, taken)], "ring attention")


# a rank with fewer queries has less work than messages
MIRRORED_QUERIES = 256


def mirrored_counts(queries: Sequence[int]) -> tuple[int, ...]:
    """Return how many of its `queries` each rank of a ring gives away."""
    if max(queries) < MIRRORED_QUERIES:
        return (0,) * len(queries)
    # the rank in the middle of an odd number is its own mirror
    return tuple([n // 2 if 2 * r + 1 != len(queries) else 0 for r, n in enumerate(queries)])


@dataclass(frozen=True, slots=True)
class LastRowSwap:
    """Swap of the last rows with the rank at the position `peer` of the mesh, by numbers of rows sent and taken."""

    mesh: DeviceMesh
    peer: int
    sent: int
    taken: int

    def back(self) -> LastRowSwap:
        return LastRowSwap(self.mesh, self.peer, self.taken, self.sent)


@dataclass(frozen=True)
class QueryMirror:
    """Swap of queries with a rank of a ring. `places` are the global places of the queries that are here then."""

    swap: LastRowSwap
    places: tuple[Tensor, Tensor]

    @classmethod
    def through(cls, queries: CutGroup, ring: KeyRing, mesh: DeviceMesh) -> QueryMirror:
        with host_values():
            every = torch.arange(size_of_cuts(queries))
            rows = [take_owned_rows(every, 0, queries, ring.layout, at) for at in ring.places]
            counts, other = mirrored_counts([len(r) for r in rows]), ring.size - 1 - ring.me
            kept, taken = len(rows[ring.me]) - counts[ring.me], len(rows[other]) - counts[other]
            places = rows[ring.me][:kept], rows[other][taken:]
        peer = ring.layout.index(ring.places[other])
        return cls(LastRowSwap(mesh, peer, counts[ring.me], len(places[1])), places)

    def exchange(self, q: Tensor) -> Tensor:
        """Return the queries [..., L, E] that this rank works on.

        *Sends*: forward, half of its own; backward, the gradients of those that it took.
        """
        return _MirroredRows.apply(q, self.swap)

    def give_back(self, y: Tensor) -> Tensor:
        return _MirroredRows.apply(y, self.swap.back())


@graph_call()
def _swap_last_rows(x: Tensor, swap: LastRowSwap) -> Tensor:
    arriving = wire_memory(x, (*x.shape[:-2], swap.taken, x.shape[-1]))
    kept, leaving = x.split([x.shape[-2] - swap.sent, swap.sent], -2)
    comm.swap_messages(swap.mesh, [(swap.peer, leaving)], [(swap.peer, arriving)], "ring attention").wait()
    return torch.cat([kept, arriving], -2)


class _MirroredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, swap: LastRowSwap) -> Tensor:
        ctx.swap = swap
        debug.compare_calls(swap.mesh, "mirrored queries")
        return _swap_last_rows(x, swap)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _MirroredRows.apply(grads[0], ctx.swap.back()), None


# -- attention around a ring ------------------------------------------------------------------------------------------

# scores of a block, or its mask, are made for as many queries at a time as fit in this
SCORE_BYTES = 64 << 20


class RingOptions(NamedTuple):
    """Options that the forward and the backward pass share."""

    scale: float
    # for causal attention, places of the queries in runs; a run skips the blocks that it cannot see
    query_places: tuple[Tensor, ...] = ()
    dropout: float = 0.0
    seed: int | Tensor = 0
    # with dropout, the global place [..., L] of each row of weights; a weight's place along S is added to it
    places_of_weights: Tensor | None = None


def ring_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, ring: KeyRing, mesh: DeviceMesh, options: RingOptions
) -> Tensor:
    """Return y = softmax(q k^T scale + mask) v of this rank's queries and all keys of the ring.

    Scores, the softmax and sums are in float32 or better.  A query that may attend to no key has zeros.

    *Shapes*: per rank q [..., L/P, E], k [..., S/P, E], v [..., S/P, Ev], mask [..., L/P, S], y [..., L/P, Ev]; dims
    before the last two broadcast.  Held at a time: this rank's keys and values, two more blocks, and scores of one
    block and the queries that fit in `SCORE_BYTES`. Backward, also gradients of three blocks.
    *Sends*: forward, P-1 blocks of keys and values; backward, these again, and P-1 blocks of their gradients (in
    float32 for narrower types).
    """
    makes_scores = options.places_of_weights is not None or (mask is not None and mask.requires_grad)
    is_fused = not makes_scores and has_fused_kernel(q, k, v, mask)
    return _RingAttention.apply(q, k, v, mask, _RingCall(ring, mesh, is_fused, options))


class _RingCall(NamedTuple):
    ring: KeyRing
    mesh: DeviceMesh
    is_fused: bool
    options: RingOptions


class _SeenBlock(NamedTuple):
    """Rows of queries, and the keys that they see; `order` are the queries' places where these hide keys."""

    rows: slice
    columns: slice
    at: Tensor
    order: Tensor | None
    is_triangle: bool


class _RingPass:
    def __init__(self, call: _RingCall, k: Tensor, v: Tensor) -> None:
        self.ring, self.mesh, self.is_fused, self.options = call
        self.key_shape, self.value_shape = k.shape, v.shape

    def unpack(self, packed: Tensor, member: int) -> tuple[Tensor, Tensor]:
        rows = self.ring.rows(member)
        shapes = [(*shape[:-2], rows, shape[-1]) for shape in (self.key_shape, self.value_shape)]
        keys, values = packed.split([math.prod(shape) for shape in shapes])
        return keys.view(shapes[0]), values.view(shapes[1])

    def size_of(self, member: int) -> int:
        return self.ring.rows(member) * sum(
            math.prod((*shape[:-2], shape[-1])) for shape in (self.key_shape, self.value_shape)
        )

    def blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Iterate over (member, its keys and values), this rank's own first; the next one travels meanwhile."""
        ring, block = self.ring, torch.cat([k.reshape(-1), v.reshape(-1)])
        for step in range(ring.size):
            member = (ring.me - step) % ring.size
            arriving = None
            if step < ring.size - 1:
                buffer = wire_memory(block, (self.size_of((member - 1) % ring.size),))
                arriving = buffer, ring.pass_on(self.mesh, block, buffer)
            yield member, block
            if arriving is not None:
                block, pending = arriving
                pending.wait()

    def parts(
        self, q: Tensor, mask: Tensor | None, member: int, queries: Interval | None = None
    ) -> Iterator[BlockRows]:
        """Iterate over queries, all or an interval, some at a time, with those of a member's keys that they see."""
        for rows, columns, key_places, order, is_triangle in self._blocks_seen(q, mask, member, queries):
            at = values_on_device(key_places, None, q.device)
            some = None if mask is None else mask if mask.shape[-2] == 1 else mask[..., rows, :]
            some = some if some is None or some.shape[-1] == 1 else some.index_select(-1, at)
            yield BlockRows(rows, columns, at, some, order, is_triangle, self._kept(rows, at, q.dtype))

    def _blocks_seen(self, q: Tensor, mask: Tensor | None, member: int, queries: Interval | None) -> list[_SeenBlock]:
        seen: list[_SeenBlock] = []
        with host_values():  # on the host, because the places decide which keys are visible
            places = self.ring.positions(member)
            for rows, order in self._some_rows(q, len(places), mask, queries or (0, q.shape[-2])):
                for columns, is_hidden in _seen_columns(places, order):
                    at, hides = places[columns], order if is_hidden else None
                    seen.append(_SeenBlock(rows, columns, at, hides, hides is not None and torch.equal(at, hides)))
        return seen

    def _some_rows(
        self, q: Tensor, keys: int, mask: Tensor | None, queries: Interval
    ) -> Iterator[tuple[slice, Tensor | None]]:
        start, order = 0, self.options.query_places
        batch = q.shape[:-2] if not self.is_fused else () if mask is None else mask.shape[:-2]
        step = max(1, SCORE_BYTES // max(1, math.prod(batch) * keys * q.itemsize))
        step = max(1, q.shape[-2]) if self.is_fused and mask is None and not order else step
        for places in order or (None,):
            end = start + (q.shape[-2] if places is None else len(places))
            stop = min(end, queries[1])
            for low in range(max(start, queries[0]), stop, step):
                rows = slice(low, min(low + step, stop))
                yield rows, None if places is None else places[rows.start - start : rows.stop - start]
            start = end

    def _kept(self, rows: slice, at: Tensor, dtype: torch.dtype) -> Tensor | None:
        p, index = self.options.dropout, self.options.places_of_weights
        if index is None:
            return None
        places = index[..., rows, None] * size_of_cuts(self.ring.keys) + at
        return chances_at(places, self.options.seed, p).to(dtype).mul_(0.0 if p == 1 else 1 / (1 - p))


def _seen_columns(places: Tensor, order: Tensor | None) -> Iterator[tuple[slice, bool]]:
    low = high = len(places)
    if order is not None:
        low, high = int((places < order.min()).sum()), int((places <= order.max()).sum())
    if low:
        yield slice(0, low), False
    if high > low:
        yield slice(low, high), True


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: _RingCall) -> Tensor:
        debug.compare_calls(call.mesh, "ring attention", call.ring.layout)
        with torch.autocast(q.device.type, enabled=False):
            out, log_sum = _attend_to_blocks(q, k, v, mask, call)
        ctx.save_for_backward(q, k, v, mask, out, log_sum)
        ctx.call = call
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, None]:
        call: _RingCall = ctx.call
        debug.compare_calls(call.mesh, "gradient of ring attention", call.ring.layout)
        with torch.autocast(grads[0].device.type, enabled=False):
            saved = _SavedOperands(*ctx.saved_tensors)
            gradients = _gradients_around(saved, grads[0], call, ctx.needs_input_grad[:4])
        return *gradients, None


class _SavedOperands(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    out: Tensor
    log_sum: Tensor


def _result_of_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: _RingCall) -> tuple[Tensor, Tensor]:
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    rows = *batch, q.shape[-2]
    return q.new_empty((*rows, v.shape[-1])), q.new_empty(rows, dtype=_wide_dtype(q))


@graph_call(_result_of_blocks)
def _attend_to_blocks(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, call: _RingCall) -> tuple[Tensor, Tensor]:
    """Return y, and the log-sum-exp of each query's scores: infinite for one that may attend to no key."""
    way, wide = _RingPass(call, k, v), _wide_dtype(q)
    batch = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    sums = q.new_zeros((*batch, q.shape[-2], v.shape[-1]), dtype=wide)
    totals = q.new_zeros((*batch, q.shape[-2]), dtype=wide)
    highest = torch.full_like(totals, -math.inf)
    scaled = (q.to(wide) * way.options.scale).expand(*batch, *q.shape[-2:])
    for member, block in way.blocks(k, v):
        keys, values = (x.to(wide) for x in way.unpack(block, member))
        for part in way.parts(scaled, mask, member):
            some = keys[..., part.columns, :], values[..., part.columns, :]
            block_sum = sum_block(part, scaled[..., part.rows, :], *some, way.is_fused)
            # scale old and new sums to one maximum; where it is -inf, no key was seen yet
            before, total, y = highest[..., part.rows], totals[..., part.rows], sums[..., part.rows, :]
            now = torch.maximum(before, block_sum.highest)
            shift = now.masked_fill(now == -math.inf, 0.0)
            factor, new = (before - shift).exp_(), (block_sum.highest - shift).exp_()
            total.mul_(factor).addcmul_(block_sum.total, new)
            y.mul_(factor[..., None]).addcmul_(block_sum.mixed, new[..., None])
            before.copy_(now)
    is_dead = totals == 0
    out = sums.div_(totals.masked_fill(is_dead, 1.0)[..., None]).to(q.dtype)
    return out, (highest + totals.log()).masked_fill(is_dead, math.inf)


RingGradients = tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]


def _like_operands_of_ring(
    saved: _SavedOperands, grad: Tensor, call: _RingCall, needs: tuple[bool, ...]
) -> RingGradients:
    # keys and values travel as one block, and so do their gradients: if one is needed, both are made
    needs = needs[0], needs[1] or needs[2], needs[1] or needs[2], needs[3]
    kept = saved.q, saved.k.contiguous(), saved.v.contiguous(), saved.mask
    buffers = [torch.empty_like(x) if x is not None and need else None for x, need in zip(kept, needs, strict=True)]
    return buffers[0], buffers[1], buffers[2], buffers[3]


@graph_call(_like_operands_of_ring)
def _gradients_around(saved: _SavedOperands, grad: Tensor, call: _RingCall, needs: tuple[bool, ...]) -> RingGradients:
    return _RingGradients(saved, grad, _RingPass(call, saved.k, saved.v), needs).all_of_them()


class _RingGradients:
    def __init__(self, saved: _SavedOperands, grad: Tensor, way: _RingPass, needs: tuple[bool, ...]) -> None:
        self.way = way
        self.q, self.k, self.v, self.mask, out, self.log_sum = saved
        self.for_q, for_k, for_v, for_mask = needs
        self.for_keys = for_k or for_v
        wide = _wide_dtype(self.q)
        self.grad = grad.to(wide)
        self.scaled = (self.q.to(wide) * self.way.options.scale).expand(*grad.shape[:-1], self.q.shape[-1])
        self.out = out.to(wide)
        self.dq = torch.zeros_like(self.q, dtype=wide) if self.for_q else None
        self.dmask = torch.zeros_like(self.mask, dtype=wide) if for_mask and self.mask is not None else None

    def all_of_them(self) -> RingGradients:
        way, ring = self.way, self.way.ring
        count = self.q.shape[-2]
        own = self._zeros_like_block(ring.me)
        arriving: tuple[Tensor, comm.PendingWork] | None = None
        for member, block in way.blocks(self.k, self.v):
            keys, values = way.unpack(block, member)
            if member == ring.me:
                # the rest of the own queries, while gradients of the other ranks are on their way
                self._add_block(member, keys, values, (0, count // 2), own)
                continue
            part = self._zeros_like_block(member)
            self._add_block(member, keys, values, (0, count), part)
            if arriving is not None:
                arriving[1].wait()
                part += arriving[0]
            if self.for_keys:
                buffer = wire_memory(part, (way.size_of((member - 1) % ring.size),))
                arriving = buffer, ring.pass_on(way.mesh, part, buffer)
        self._add_block(ring.me, self.k, self.v, (count // 2, count), own)
        dk = dv = None
        if self.for_keys:
            if arriving is not None:
                arriving[1].wait()
                own += arriving[0]
            dk, dv = (x.to(self.k.dtype) for x in way.unpack(own, ring.me))
        dq = None if self.dq is None else self.dq.mul_(way.options.scale).to(self.q.dtype)
        return dq, dk, dv, None if self.dmask is None or self.mask is None else self.dmask.to(self.mask.dtype)

    def _zeros_like_block(self, member: int) -> Tensor:
        return self.scaled.new_zeros(self.way.size_of(member) if self.for_keys else 0)

    def _add_block(self, member: int, keys: Tensor, values: Tensor, queries: Interval, into: Tensor) -> None:
        """Add the share of some queries and a member's keys and values to the gradients here and in `into`."""
        keys, values = (x.to(self.scaled.dtype) for x in (keys, values))
        for part in self.way.parts(self.scaled, self.mask, member, queries):
            rows, k, v = part.rows, keys[..., part.columns, :], values[..., part.columns, :]
            q, grad, out = (x[..., rows, :] for x in (self.scaled, self.grad, self.out))
            gradients = block_gradients(part, q, k, v, out, self.log_sum[..., rows], grad, self.way.is_fused)
            if self.dq is not None:
                dq = self.dq[..., rows, :]
                dq += gradients.q.sum_to_size(dq.shape)
            if self.for_keys:
                dk, dv = (x[..., part.columns, :] for x in self.way.unpack(into, member))
                dk += gradients.k.sum_to_size(dk.shape)
                dv += gradients.v.sum_to_size(dv.shape)
            if gradients.scores is not None and self.dmask is not None:
                self._add_to_mask(part, gradients.scores)

    def _add_to_mask(self, part: BlockRows, by_scores: Tensor) -> None:
        assert self.dmask is not None
        into = self.dmask if self.dmask.shape[-2] == 1 else self.dmask[..., part.rows, :]
        columns = 1 if into.shape[-1] == 1 else len(part.at)
        part_sum = by_scores.sum_to_size((*into.shape[:-1], columns))
        if columns == into.shape[-1] == 1:
            into += part_sum
        else:
            _ = into.index_add_(-1, part.at, part_sum)
