"""Attention over cut tokens: every rank's queries meet all keys and values, in one of four ways (`attention_ways`).

Gathered keys and values are a halo as wide as the dim.  Axes may cut the keys alone, as with a few queries that every
rank has over the tokens of a globe.  Then the keys stay, and the softmax is taken over the ranks.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> q, k, v = (jigsaw.shard(torch.randn(2, 4, 16, 8), mesh, (None, None, "lat", None)) for _ in range(3))
>>> torch.nn.functional.scaled_dot_product_attention(q, k, v).shape
torch.Size([2, 4, 16, 8])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw.comm.exchange import redistribute_rows
from jigsaw.comm.wire_values import values_on_device
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.nn.attention.attention_plan import (
    ATTENTION_NAME,
    FEATURE_LABEL,
    KEY_LABEL,
    QUERY_LABEL,
    VALUE_FEATURE_LABEL,
    AttentionPlan,
    attention_sizes,
    batch_labels,
    labels_of_operand,
    layout_of_weights,
    layouts_by_heads,
    moving_cuts,
    plan_attention,
)
from jigsaw.nn.attention.attention_ways import (
    AttentionChoice,
    RankSplit,
    SplitAxes,
    choose_attention_way,
    said_attention_way,
)
from jigsaw.nn.attention.ring_attention import KeyRing, QueryMirror, RingOptions, ring_attention
from jigsaw.nn.products.contraction import in_autocast_dtype, tile_in_autocast_dtype
from jigsaw.nn.products.label_cuts import LabelCuts, cuts_of_tile
from jigsaw.nn.products.product import contract_labels
from jigsaw.nn.rank_order import host_values, take_owned_rows
from jigsaw.nn.slab_statistics import keys_of_all_slabs, slabs_cut
from jigsaw.ops.meeting.plain_operands import plain_operand
from jigsaw.ops.random_numbers import global_index, shared_seed
from jigsaw.ranks.mesh import has_every_rank
from jigsaw.ranks.slab_mesh import SlabMesh
from jigsaw.tile.tile import Tile, implements_torch, shared_mesh, tiles_in

AttentionMask = Tile | Tensor | None


def _repeat_heads(x: Any, times: int) -> Any:
    heads = x.unsqueeze(-3)
    return heads.expand(*heads.shape[:-3], times, *heads.shape[-2:]).flatten(-4, -3)


def as_whole_tile(x: Any, like: Tile) -> Tile:
    """Return a plain tensor, which every rank has, as an uncut tile on the mesh of `like`."""
    if isinstance(x, Tile):
        return x
    axes = like.layout.axes
    return Tile(
        plain_operand(x, like, Layout((), axes), is_whole=True), Layout.of(x.shape, (None,) * x.ndim, axes), like.mesh
    )


# -- masks ------------------------------------------------------------------------------------------------------------


def _local_mask(
    masks: Sequence[Any], is_causal: bool, plan: LabelCuts, sizes: Sequence[int], like: Tile
) -> Tensor | None:
    """Return this rank's part of all masks [..., L, S] together: True where a query may attend, or numbers to add.
    Each may be plain or a tile, cut in any way; a causal one is made from the global positions.
    """
    batch = tuple(by for by in plan.cuts if by.startswith("batch"))
    parts = [plan.bring_operand(m, labels_of_operand(m.ndim, batch, QUERY_LABEL, KEY_LABEL), like) for m in masks]
    if is_causal:
        rows, columns = (
            values_on_device(_places_along(by, n, plan, like), None, like.device)
            for n, by in zip(sizes, (QUERY_LABEL, KEY_LABEL), strict=True)
        )
        parts.append(columns <= rows[:, None])
    if len(parts) < 2:
        return parts[0] if parts else None
    first, *others = (_additive_mask(m, like.dtype) for m in parts)
    return sum(others, first)


def _places_along(label: str, size: int, plan: LabelCuts, like: Tile) -> Tensor:
    with host_values():
        return take_owned_rows(torch.arange(size), 0, plan.cuts[label], plan.work, like.coordinate)


def _additive_mask(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros_like(mask, dtype=dtype).masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask


# -- the kernel -------------------------------------------------------------------------------------------------------


@implements_torch(F.scaled_dot_product_attention, either=("query", "key", "value", "attn_mask"))
def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: AttentionMask = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tile:
    """Return y = softmax(q k^T scale + mask) v, exact over tokens that are cut by one axis or several.

    *Shapes*: q [..., L, E], k [..., S, E], v [..., S, Ev], y [..., L, Ev]. Each of them, and the mask [..., L, S], is
    either a Tile, cut in any dim, or a plain whole tensor.  An axis keeps the first dim of y that it cuts in q, k or v
    (`jigsaw.nn.products.label_cuts`). So where tokens are cut, y is cut as q is.  Along an axis that cuts no dim of y
    (S alone, or E), y is held alike. *Sends*: where axes cut L and S both, one of four ways
    (`jigsaw.nn.attention.attention_ways`), which `jigsaw.nn.explain_attention` tells, with bytes.  Where axes cut S
    alone, keys and values stay: three all-reduces, of y, and of a maximum and a sum for each query and head.  A mask
    that is cut along S sends its rows. Dropout needs the scores [..., L, S] in memory, cut as y; in a ring, those of
    one block. *Raises*: `ShardingError` where only the mask is a Tile.

    The dropout mask is that of `jigsaw.nn.dropout`: the same on every mesh, but not that of plain torch.
    """
    if is_causal and attn_mask is not None:
        raise RuntimeError(f"{ATTENTION_NAME}: attn_mask must not be set when is_causal=True")
    masks = [] if attn_mask is None else [attn_mask]
    return attend_to_keys(query, key, value, AttentionCall(masks, dropout_p, is_causal, scale), enable_gqa)


@dataclass(frozen=True)
class AttentionCall:
    """Arguments of a call of `scaled_dot_product_attention`, except its tensors."""

    masks: Sequence[Any]
    dropout: float = 0.0
    is_causal: bool = False
    scale: float | None = None

    @property
    def is_mirrored(self) -> bool:
        """True where queries change ranks in a ring, so that all ranks have as much to do."""
        return self.is_causal and not self.masks and not self.dropout


def attend_to_keys(query: Any, key: Any, value: Any, call: AttentionCall, enable_gqa: bool = False) -> Tile:
    """Run `scaled_dot_product_attention` with several masks, in the way that the user names or the rule chooses."""
    shared_by = _check_head_counts(query, key, value) if enable_gqa else 1
    slabs = [x for x in (key, value) if isinstance(x, Tile) and isinstance(x.mesh, SlabMesh)]
    if slabs and any(slabs_cut(x, x.ndim - 2) for x in slabs):
        return _attend_over_slabs((query, key, value), call, shared_by)
    plan = _plan_of((query, key, value), call.masks, shared_by)
    if plan is None or (shared_by > 1 and (plan.keys_alone or call.dropout)):
        key, value = (_repeat_heads(x, shared_by) for x in (key, value))
        return attend_to_keys(query, key, value, call)
    if plan.around is not None:
        query, key, value = (tile_in_autocast_dtype(x) for x in (query, key, value))
        choice = _choose_way((query, key, value), call, plan)
        if choice.way == "ring":
            return _attend_around_ring((query, key, value), call, plan)
        if choice.way == "heads":
            return _attend_by_heads((query, key, value), call, plan, plan.moving)
        if choice.split is not None:
            return _attend_both_ways((query, key, value), call, plan, choice.split)
    return _attend_to_gathered((query, key, value), call, plan)


def _plan_of(operands: Sequence[Any], masks: Sequence[Any], shared_by: int) -> AttentionPlan | None:
    tiles = [x for x in operands if isinstance(x, Tile)]
    if not tiles:
        raise ShardingError(
            f"{ATTENTION_NAME}: attn_mask is a Tile, but query, key and value are plain tensors; make the query a Tile "
            "with jigsaw.shard (uncut, if every rank has it)"
        )
    shared_mesh([*tiles, *tiles_in(masks)] if masks else tiles)
    return plan_attention(_layouts_of(operands), _shapes_of(operands), shared_by)


def _layouts_of(operands: Sequence[Any]) -> tuple[Layout | None, ...]:
    return tuple([x.layout if isinstance(x, Tile) else None for x in operands])


def _shapes_of(operands: Sequence[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple([tuple(x.shape) for x in operands])


def _choose_way(operands: Sequence[Any], call: AttentionCall, plan: AttentionPlan) -> AttentionChoice:
    like = next(tiles_in(tuple(operands)))
    itemsize = in_autocast_dtype(like.local.new_empty(0)).itemsize
    is_mask_cut = any(not set(plan.moving).isdisjoint(m.layout.cut_axes) for m in tiles_in(tuple(call.masks)))
    sizes = attention_sizes(plan, _shapes_of(operands), itemsize, call.is_mirrored, has_every_rank(like.mesh))
    return choose_attention_way(sizes, said_attention_way(), is_mask_cut)


def explain_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: AttentionMask = None,
    enable_gqa: bool = False,
    *,
    dropout_p: float = 0.0,
    is_causal: bool = False,
) -> AttentionChoice:
    """Say which way `scaled_dot_product_attention` of these goes, why, and what each way costs; nothing is sent.

    >>> mesh = jigsaw.init_mesh(lat=1)
    >>> q = jigsaw.shard(torch.randn(2, 4, 16, 8), mesh, (None, None, "lat", None))
    >>> print(jigsaw.nn.explain_attention(q, q, q))
    gathered, as no axis cuts queries and keys both
    """
    masks = [] if attn_mask is None else [attn_mask]
    shared_by = _check_head_counts(query, key, value) if enable_gqa else 1
    plan = _plan_of((query, key, value), masks, shared_by)
    if plan is None:
        key, value = (_repeat_heads(x, shared_by) for x in (key, value))
        return explain_attention(query, key, value, attn_mask, dropout_p=dropout_p, is_causal=is_causal)
    if plan.around is None:
        return AttentionChoice("gathered", "as no axis cuts queries and keys both")
    return _choose_way((query, key, value), AttentionCall(masks, dropout_p, is_causal), plan)


def _attend_to_gathered(operands: Sequence[Any], call: AttentionCall, plan: AttentionPlan) -> Tile:
    query, key, value = operands
    like = next(tiles_in(tuple(operands)))
    if plan.keys_alone or call.dropout:
        weights = attention_weights(query, key, call.masks, call.is_causal, call.scale, like, without_nan=True)
        return mix_values(cast(Any, F.dropout(cast(Any, weights), call.dropout)), value)
    q, k, v = [plan.cuts.bring_operand(x, by, like) for x, by in zip(operands, plan.labels, strict=True)]
    # pass is_causal on where queries are whole, because torch's kernels then skip hidden blocks
    is_whole = not any(c.is_cut for c in plan.cuts.cuts[QUERY_LABEL])
    makes_causal = call.is_causal and not (is_whole and not call.masks)
    sizes = query.shape[-2], key.shape[-2]
    mask = _local_mask(call.masks, makes_causal, plan.cuts, sizes, like) if call.masks or makes_causal else None
    out = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=call.is_causal and mask is None, scale=call.scale, enable_gqa=plan.shared_by > 1
    )
    if (out.numel() == 0 or q.ndim < k.ndim) and 0 in (shape := plan.out.local_shape(like.coordinate)):
        # without rows torch's kernels leave no graph behind, but other ranks still wait for this one in the backward
        # pass of keys and values; relu saves its operand, as the kernels do, because a checkpoint runs again, and
        # sends, only where something was saved.  Queries of fewer dims than keys without a batch give rows that are not
        # there.
        out = out.new_zeros(shape)
        out = out + sum(x.relu().sum() for x in (q, k, v, mask) if x is not None and x.is_floating_point())
    return Tile(out, plan.out, like.mesh)


def _attend_over_slabs(operands: Sequence[Any], call: AttentionCall, shared_by: int) -> Tile:
    query, key, value = operands
    alike = all(isinstance(x, Tile) and x.layout.dims()[:-2] == query.layout.dims()[:-2] for x in operands)
    if not alike or call.dropout or any(not x.layout.complete_dims[-1] for x in operands):
        raise ShardingError(
            f"{ATTENTION_NAME} over slabs (jigsaw.nn.chunked): query, key and value are to be tiles with the same "
            f"batch and heads, whole features, and dropout 0, not {call.dropout}; chunk the modules before and after it"
        )
    query = query.owned()
    whole, attach = keys_of_all_slabs(key, value)
    layouts = (query.layout, *(layout for _, layout in whole))
    plan = plan_attention(layouts, _shapes_of(operands), shared_by)
    assert plan is not None
    sizes = query.shape[-2], key.shape[-2]
    has_mask = bool(call.masks) or call.is_causal
    mask = _local_mask(call.masks, call.is_causal, plan.cuts, sizes, query) if has_mask else None
    k, v = (x for x, _ in whole)
    y = F.scaled_dot_product_attention(query.local, k, v, mask, scale=call.scale, enable_gqa=shared_by > 1)
    return Tile(attach(y), query.layout.replace_dim(query.ndim - 1, whole_dim(v.shape[-1])), query.mesh)


def _attend_around_ring(operands: Sequence[Any], call: AttentionCall, plan: AttentionPlan) -> Tile:
    assert plan.around is not None
    like, around, shared_by = next(tiles_in(tuple(operands))), plan.around, plan.shared_by
    q, k, v = [
        in_autocast_dtype(cuts.bring_operand(x, by, like))
        for x, by, cuts in zip(operands, plan.labels, (plan.cuts, around, around), strict=True)
    ]
    sizes = operands[0].shape[-2], operands[1].shape[-2]
    mask = _local_mask(call.masks, False, plan.cuts, sizes, like) if call.masks else None
    ring = KeyRing.through(around.cuts[KEY_LABEL], Layout((), like.layout.axes), like.coordinate)
    order = (_places_along(QUERY_LABEL, sizes[0], plan.cuts, like),) if call.is_causal else ()
    options = RingOptions(1 / math.sqrt(q.shape[-1]) if call.scale is None else call.scale, order)
    if call.dropout:
        layout = layout_of_weights(plan, _shapes_of(operands))
        # a tile of these rows without memory of its own, because only the global places are read
        rows = Tile(q.new_empty(()).expand(layout.local_shape(like.coordinate)), layout, like.mesh)
        seed, index = shared_seed(rows), global_index(rows, rows.ndim)
        options = options._replace(dropout=call.dropout, seed=seed, places_of_weights=index)
    mirror = None
    if call.is_mirrored:
        mirror = QueryMirror.through(plan.cuts.cuts[QUERY_LABEL], ring, like.mesh)
        q, options = mirror.exchange(q), options._replace(query_places=mirror.places)
    if shared_by > 1:
        if mask is not None and mask.ndim > 2:
            mask = mask.unsqueeze(-3) if mask.shape[-3] == 1 else mask.unflatten(-3, (k.shape[-3], shared_by))
        q, k, v = q.unflatten(-3, (k.shape[-3], shared_by)), k.unsqueeze(-3), v.unsqueeze(-3)
    out = ring_attention(q, k, v, mask, ring, like.mesh, options)
    out = out.flatten(-4, -3) if shared_by > 1 else out
    return Tile(out if mirror is None else mirror.give_back(out), plan.out, like.mesh)


def _attend_by_heads(operands: Sequence[Any], call: AttentionCall, plan: AttentionPlan, axes: tuple[str, ...]) -> Tile:
    """Attend with a share of the heads: one exchange brings each operand, one takes y back; a ring may be between."""
    layouts = layouts_by_heads(plan, axes, _layouts_of(operands), _shapes_of(operands))
    query, key, value = [
        x if layout is None else _exchanged_heads(x.owned(), layout)
        for x, layout in zip(operands, layouts, strict=True)
    ]
    by_heads = plan_attention(_layouts_of((query, key, value)), _shapes_of(operands), plan.shared_by)
    assert by_heads is not None
    is_ring = by_heads.around is not None and axes != plan.moving
    y = (_attend_around_ring if is_ring else _attend_to_gathered)((query, key, value), call, by_heads)
    # queries may be flattened from several dims, which the result of whole queries no longer has
    dim = y.ndim - 2
    y = Tile(y.local, y.layout.replace_dim(dim, *by_heads.cuts.cuts[QUERY_LABEL]), y.mesh)
    by_tokens = plan.out.replace_dim(dim, *plan.cuts.cuts[QUERY_LABEL])
    return Tile(_exchanged_heads(y, by_tokens).local, plan.out, y.mesh)


def _attend_both_ways(operands: Sequence[Any], call: AttentionCall, plan: AttentionPlan, split: RankSplit) -> Tile:
    axes = SplitAxes.of(split, moving_cuts(plan), plan.out.axes)
    mesh = next(tiles_in(tuple(operands))).mesh
    parted = [axes.tile(x) if isinstance(x, Tile) else x for x in operands]
    masks = [axes.tile(m) if isinstance(m, Tile) else m for m in call.masks]
    by_axes = plan_attention(_layouts_of(parted), _shapes_of(parted), plan.shared_by)
    assert by_axes is not None
    y = _attend_by_heads(parted, replace(call, masks=masks), by_axes, axes.heads)
    return Tile(y.local, plan.out, mesh)


def _exchanged_heads(x: Tile, layout: Layout) -> Tile:
    return Tile(redistribute_rows(x.local, x.layout, layout, x.mesh, "heads"), layout, x.mesh)


def _check_head_counts(query: Any, key: Any, value: Any) -> int:
    of_query, *of_others = (x.shape[-3] if x.ndim > 2 else 1 for x in (query, key, value))
    if of_others[0] != of_others[1] or not of_others[0] or of_query % of_others[0]:
        raise RuntimeError(
            f"{ATTENTION_NAME}(enable_gqa=True): {of_query} heads of queries, {of_others[0]} of keys and "
            f"{of_others[1]} of values; keys and values need as many, a divisor of the queries'"
        )
    return of_query // of_others[0]


def attention_weights(
    query: Any,
    key: Any,
    masks: Sequence[Any],
    is_causal: bool,
    scale: float | None,
    like: Tile,
    without_nan: bool = False,
) -> Tile:
    """Return softmax(q k^T scale + masks) [..., L, S], cut as queries, and along S by axes that cut the keys alone.

    A query that may attend to no key has NaN, or zeros where `without_nan`, as torch has with and without weights.

    *Sends*: the keys, as attention does; over a cut S, a maximum and a sum for each query and head, and 1 byte more
    where `without_nan`.
    """
    batch = batch_labels(query.ndim, key.ndim)
    out = (*batch, QUERY_LABEL, KEY_LABEL)
    labels = [
        labels_of_operand(query.ndim, batch, QUERY_LABEL, FEATURE_LABEL),
        labels_of_operand(key.ndim, batch, KEY_LABEL, FEATURE_LABEL),
    ]
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if not isinstance(query, Tile) and not isinstance(key, Tile):
        query = as_whole_tile(query, like)

    def multiply(q: Tensor, k: Tensor) -> Tensor:
        return torch.matmul(q * factor, k.mT)

    scores = contract_labels(ATTENTION_NAME, multiply, (query, key), labels, out)
    mask = _local_mask(masks, is_causal, cuts_of_tile(scores, out), scores.shape[-2:], scores)
    if mask is None:
        return scores.softmax(-1)
    local = scores.local.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores.local + mask
    scores = Tile(local, scores.layout, scores.mesh)
    if not without_nan:
        return scores.softmax(-1)
    dead: Any = (scores.detach() == -math.inf).all(-1, keepdim=True)
    return scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)


def mix_values(weights: Tile, value: Any) -> Tile:
    """Return weights v [..., L, Ev].  *Sends*: the values, where the weights are whole along S; else one all-reduce."""
    batch = batch_labels(weights.ndim, value.ndim)
    labels = [
        labels_of_operand(weights.ndim, batch, QUERY_LABEL, KEY_LABEL),
        labels_of_operand(value.ndim, batch, KEY_LABEL, VALUE_FEATURE_LABEL),
    ]
    return contract_labels(
        ATTENTION_NAME, torch.matmul, (weights, value), labels, (*batch, QUERY_LABEL, VALUE_FEATURE_LABEL)
    )
