"""Attention over cut tokens: every rank keeps its queries and sees all keys and values.

The keys and values of the other ranks are a halo as wide as the dim, so the planner that fetches halos fetches them,
and its adjoint brings their gradients back.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> q, k, v = (jigsaw.shard(torch.randn(2, 4, 16, 8), mesh, (None, None, "lat", None)) for _ in range(3))
>>> torch.nn.functional.scaled_dot_product_attention(q, k, v).shape
torch.Size([2, 4, 16, 8])
"""

from __future__ import annotations

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw import comm
from jigsaw.exchange import exchange_rows
from jigsaw.layout import Layout, ShardingError, have_same_rows, whole_dim
from jigsaw.nn.heads import head_axes, project_heads_in, project_heads_out, weights_of_heads
from jigsaw.nn.rank_order import CutGroup, take_owned_rows
from jigsaw.ops.pointwise import align_tiles, cut_whole_tensor
from jigsaw.tile import Tile, implements_torch, refusal_error

AttentionMask = Tile | Tensor | None


def _all_tokens(x: Tile, query: Layout, grouped: bool = False) -> Tensor:
    """The local part of keys or values with all tokens, in global order, for a result cut as `query`.

    *Sends*: this rank's tokens to each rank that shares its batch and heads; backward their gradients, once back.
    *Raises*: `ShardingError` where batch or heads are cut otherwise than those of the queries.
    """
    lead = _leading_cuts(x, query, grouped)
    dim = x.ndim - 2
    cuts = x.layout.dim(dim)
    axes = [a for c in cuts for a in c.axes]
    if any(a not in query.cut_axes for a in axes):
        # the queries are alike along these axes, and so is what they are to see
        layout = x.layout.replace_dim(dim, *(c.uncut() for c in cuts))
        local = x.with_layout(layout).local
    else:
        layout = x.layout.replace_dim(dim, *(c.holding([(0, c.size)] * c.pieces) for c in cuts))
        local = exchange_rows(x.local, x.layout, layout, x.mesh)
    local = comm.use_in_parts(local, x.mesh, [a for a in query.cut_axes if a not in layout.cut_axes])
    for d, group in lead.items():
        local = take_owned_rows(local, d, group, query, x.coordinate)
    return local


def _leading_cuts(x: Tile, query: Layout, grouped: bool) -> dict[int, CutGroup]:
    """The dims of batch and heads that are cut in the queries and whole in keys or values, and how they are cut there.

    With `grouped` heads several of the queries share one of the keys.
    """
    found: dict[int, CutGroup] = {}
    for d in range(x.ndim - 2):
        at = d + query.ndim - x.ndim
        wanted = tuple(c.bare() for c in query.dim(at)) if at >= 0 else (whole_dim(1),)
        mine, size = tuple(c.bare() for c in x.layout.dim(d)), query.shape[at] if at >= 0 else 1
        is_alone = x.shape[d] == 1 and not x.layout.is_cut(d)  # it meets any number
        is_shared = grouped and d == x.ndim - 3 and _is_grouped_alike(mine, wanted)
        if have_same_rows(mine, wanted) or is_alone or is_shared:
            continue
        if x.shape[d] != size or x.layout.is_cut(d):
            raise refusal_error(
                F.scaled_dot_product_attention,
                x,
                f"dim {d} of keys or values does not match dim {at} of the queries, which has {size} rows, "
                f"{'cut otherwise' if query.is_cut(at) else 'uncut'}",
                "bring both to the same cuts with tile.redistribute",
            )
        found[d] = wanted
    return found


def _is_grouped_alike(keys: CutGroup, queries: CutGroup) -> bool:
    """Whether the heads of every rank's queries are those that share the heads of its keys."""
    if [c.axes for c in keys] != [c.axes for c in queries] or len(keys) != 1:
        return not any(c.is_cut for c in (*keys, *queries))
    (k,), (q,) = keys, queries
    return [a * q.size for a in k.points] == [b * k.size for b in q.points]


def _scores_layout(query: Tile, keys: int) -> Layout:
    """[..., queries, keys]: the rows are cut as the queries are."""
    return query.layout.replace_dim(query.ndim - 1, whole_dim(keys))


def _query_positions(query: Tile) -> Tensor:
    """The global positions of this rank's queries."""
    length = query.shape[-2]
    anchor = Layout.from_dims([query.layout.dim(query.ndim - 2)], query.layout.axes)
    return cut_whole_tensor(torch.arange(length, device=query.device), query, anchor)


def _local_mask(query: Tile, keys: int, mask: AttentionMask, is_causal: bool) -> Tensor | None:
    if is_causal and mask is not None:
        raise RuntimeError("scaled_dot_product_attention: attn_mask must not be set when is_causal=True")
    if is_causal:
        return torch.arange(keys, device=query.device) <= _query_positions(query)[:, None]
    if isinstance(mask, Tile):
        scores = _scores_layout(query, keys)
        shape = query.local.shape[:-1] + (keys,)
        anchor = Tile(query.local.new_empty(()).expand(shape), scores, query.mesh)
        return align_tiles([mask, anchor])[1][0]
    return None if mask is None else cut_whole_tensor(mask, query, _scores_layout(query, keys))


def _check_attention(query: Tile, key: Any, value: Any, dropout_p: float) -> None:
    for name, x in (("key", key), ("value", value)):
        if not isinstance(x, Tile):
            raise refusal_error(
                F.scaled_dot_product_attention,
                query,
                f"{name} is a plain tensor of shape {tuple(x.shape)}",
                "make it a Tile with jigsaw.shard (uncut, if every rank has it)",
            )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.layout.is_cut(x.ndim - 1):
            raise refusal_error(
                F.scaled_dot_product_attention,
                x,
                f"{name} is cut along the features of a head",
                "cut along heads, tokens or batch instead",
            )
    if dropout_p:
        raise refusal_error(
            F.scaled_dot_product_attention,
            query,
            f"dropout_p={dropout_p} would draw another mask on every mesh",
            "use dropout_p=0 and drop the output instead",
        )


@implements_torch(F.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Tile | Tensor,
    key: Any,
    value: Any,
    attn_mask: AttentionMask = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tile:
    """y = softmax(q k^T scale + mask) v, exact over tokens that are cut by one axis or several.

    *Shapes*: q [..., L, E], k [..., S, E], v [..., S, Ev], y [..., L, Ev]; L and S may be cut (flattened lat x lon
    tokens too), heads and batch as well. Per rank y has its own queries' rows. A plain mask is whole, [..., L, S].
    *Sends*: forward its own keys and values to each rank that shares batch and heads; backward the same, reversed. A
    rank holds all S keys and values of its batch and heads meanwhile, and scores as torch's own kernel does.
    *Raises*: `ShardingError` for features of a head that are cut, plain keys or values, dropout, and batch or heads of
    keys or values that are cut otherwise than the queries' (uncut ones are cut to them).
    """
    if not isinstance(query, Tile):
        others: tuple[Any, ...] = (key, value, attn_mask)
        tile = next(t for t in others if isinstance(t, Tile))
        raise refusal_error(
            F.scaled_dot_product_attention, tile, "query is a plain tensor", "make it a Tile with jigsaw.shard"
        )
    query = query.owned()
    _check_attention(query, key, value, dropout_p)
    mask = _local_mask(query, key.shape[-2], attn_mask, is_causal)
    k, v = (_all_tokens(x.owned(), query.layout, enable_gqa) for x in (key, value))
    out = F.scaled_dot_product_attention(query.local, k, v, mask, scale=scale, enable_gqa=enable_gqa)
    return Tile(out, query.layout.replace_dim(query.ndim - 1, whole_dim(value.shape[-1])), query.mesh)


def attention_weights(query: Tile, key: Tile, attn_mask: AttentionMask = None, scale: float | None = None) -> Tile:
    """softmax(q k^T scale + mask): [..., L, S], rows cut as the queries, columns whole. *Sends*: as the keys of
    attention.
    """
    query = query.owned()
    _check_attention(query, key, key, 0.0)
    scores = query.local @ _all_tokens(key.owned(), query.layout).mT
    scores = scores * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    mask = _local_mask(query, key.shape[-2], attn_mask, False)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    return Tile(scores.softmax(-1), _scores_layout(query, key.shape[-2]), query.mesh)


# -- nn.MultiheadAttention --------------------------------------------------------------------------------------------


def _split_heads(x: Tile, heads: int) -> Tile:
    """[tokens, batch, features] -> [batch, heads, tokens, features of a head]."""
    return x.unflatten(-1, (heads, x.shape[-1] // heads)).permute(1, 2, 0, 3)


def _joint_mask(mask: Any, padding: Any, heads: int, like: Tile) -> Any:
    """torch's masks (True or -inf: may not attend) as one additive or boolean mask of scaled_dot_product_attention."""
    if mask is not None and mask.ndim == 3:
        mask = mask.unflatten(0, (-1, heads))
    if padding is None:
        return None if mask is None else ~mask if mask.dtype == torch.bool else mask
    columns = padding[..., None, None, :] if padding.ndim == 2 else padding[None, None, None, :]
    return _additive_mask(columns, like) if mask is None else _additive_mask(mask, like) + _additive_mask(columns, like)


def _additive_mask(mask: Any, like: Tile) -> Any:
    return torch.zeros_like(mask, dtype=like.dtype).masked_fill(mask, -math.inf) if mask.dtype == torch.bool else mask


@implements_torch(F.multi_head_attention_forward)
def multi_head_attention_forward(
    query: Any,
    key: Any,
    value: Any,
    embed_dim_to_check: int,
    num_heads: int,
    in_proj_weight: Tensor | None,
    in_proj_bias: Tensor | None,
    bias_k: Tensor | None,
    bias_v: Tensor | None,
    add_zero_attn: bool,
    dropout_p: float,
    out_proj_weight: Tensor,
    out_proj_bias: Tensor | None,
    training: bool = True,
    key_padding_mask: Any = None,
    need_weights: bool = True,
    attn_mask: Any = None,
    use_separate_proj_weight: bool = False,
    q_proj_weight: Tensor | None = None,
    k_proj_weight: Tensor | None = None,
    v_proj_weight: Tensor | None = None,
    static_k: Tensor | None = None,
    static_v: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Any, Any]:
    """What `nn.MultiheadAttention` calls: projections, attention over cut tokens, output projection.

    *Shapes*: query [L, batch, E] (or [L, E]), key and value [S, batch, E]; tokens and batch may be cut. Where E or the
    rows of the weights are cut, the heads are (`jigsaw.nn.heads`).
    *Sends*: as `scaled_dot_product_attention`, and as the projections do; weights of fewer heads than ranks, and those
    that are not packed, are gathered.
    *Raises*: `ShardingError` for bias_k, bias_v, add_zero_attn, static_k, static_v, and for dropout in training where
    the queries are cut and no weights are asked for.
    """
    if bias_k is not None or bias_v is not None or add_zero_attn or static_k is not None or static_v is not None:
        raise ShardingError(
            "MultiheadAttention on tiles has no add_bias_kv, add_zero_attn, static_k or static_v: "
            "they append a token to cut ones; append it to the input before it is cut"
        )
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, Tile):
            raise ShardingError(
                f"MultiheadAttention: {name} is a plain tensor of shape {tuple(x.shape)}, but another argument is a "
                "Tile; make it a Tile with jigsaw.shard (uncut, if every rank has it)"
            )
    if query.ndim == 2:
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        out, weights = multi_head_attention_forward(
            query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v,
            add_zero_attn, dropout_p, out_proj_weight, out_proj_bias, training, key_padding_mask, need_weights,
            attn_mask, use_separate_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight, static_k,
            static_v, average_attn_weights, is_causal,
        )  # fmt: skip
        return out.squeeze(1), None if weights is None else weights.squeeze(0)
    if query.shape[-1] != embed_dim_to_check:
        raise ShardingError(f"MultiheadAttention was made for {embed_dim_to_check} features, not {query.shape[-1]}")
    in_proj_weight, in_proj_bias, q_proj_weight, k_proj_weight, v_proj_weight, out_weight, out_proj_bias = (
        weights_of_heads(query, num_heads, in_proj_weight, in_proj_bias, q_proj_weight, k_proj_weight, v_proj_weight,
                         out_proj_weight, out_proj_bias)
    )  # fmt: skip
    out_proj_weight = cast(Tensor, out_weight)
    axes = () if in_proj_weight is None else head_axes(query, in_proj_weight)
    if in_proj_weight is not None and axes:
        projected: Any = project_heads_in((query, key, value), in_proj_weight, in_proj_bias, num_heads, axes)
    else:
        weights_in: Any = (
            in_proj_weight.chunk(3) if in_proj_weight is not None else (q_proj_weight, k_proj_weight, v_proj_weight)
        )
        biases: Any = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        projected = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights_in, biases, strict=True))
    q, k, v = (_split_heads(x, num_heads) for x in projected)
    rate = dropout_p if training else 0.0
    weights = None
    if need_weights or (rate and not query.layout.cut_axes):
        mask = _joint_mask(attn_mask, key_padding_mask, num_heads, q)
        weights = attention_weights(q, k, mask)
        dropped: Any = F.dropout(cast(Any, weights), rate, training)
        mixed = _mix_values(dropped, v)
    else:
        # torch passes is_causal as a hint beside the mask that it describes
        hint = is_causal and attn_mask is not None and key_padding_mask is None
        mask = None if hint else _joint_mask(attn_mask, key_padding_mask, num_heads, q)
        mixed = scaled_dot_product_attention(q, k, v, mask, rate, is_causal=hint)
    mixed = mixed.permute(2, 0, 1, 3).flatten(2)
    out = (
        project_heads_out(mixed, out_proj_weight, out_proj_bias, query)
        if axes
        else F.linear(mixed, out_proj_weight, out_proj_bias)
    )
    if weights is not None and need_weights and average_attn_weights:
        weights = weights.mean(1)
    return out, weights if need_weights else None


def _mix_values(weights: Tile, value: Tile) -> Tile:
    out = weights.local @ _all_tokens(value.owned(), weights.layout)
    return Tile(out, weights.layout.replace_dim(weights.ndim - 1, whole_dim(value.shape[-1])), weights.mesh)
