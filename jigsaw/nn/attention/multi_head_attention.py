"""`nn.MultiheadAttention` on tiles: projections of tokens, masks in torch's sense, attention over cut tokens.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> x = jigsaw.shard(torch.randn(2, 16, 8), mesh, (None, "lat", None))
>>> torch.nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x, need_weights=False)[0].shape
torch.Size([2, 16, 8])
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw.errors import ShardingError
from jigsaw.nn.attention.heads import head_axes, project_heads_in, project_heads_out, weights_of_heads
from jigsaw.nn.attention.scaled_dot_product import (
    AttentionCall,
    as_whole_tile,
    attend_to_keys,
    attention_weights,
    mix_values,
)
from jigsaw.tile.tile import implements_torch, tiles_in


def _masks_of_scores(mask: Any, padding: Any, heads: int) -> list[Any]:
    """Return torch's masks (True: may not attend) as those of scaled_dot_product_attention, [batch, heads, L, S]."""
    masks: list[Any] = []
    if mask is not None:
        masks.append(mask.unflatten(0, (-1, heads)) if mask.ndim == 3 else mask)
    if padding is not None:
        masks.append(padding[..., None, None, :] if padding.ndim == 2 else padding[None, None, None, :])
    return [~m if m.dtype == torch.bool else m for m in masks]


def _with_more_tokens(q: Any, k: Any, v: Any, bias_k: Any, bias_v: Any, zeros: bool) -> tuple[Any, Any, Any]:
    rows: list[tuple[Any, Any]] = [] if bias_k is None else [(as_whole_tile(bias_k, k), as_whole_tile(bias_v, v))]
    if zeros:
        nothing = torch.zeros(1, 1, k.shape[-1], dtype=k.dtype, device=k.device)
        rows.append((as_whole_tile(nothing, k), as_whole_tile(nothing, v)))
    wide = [(a.expand(1, *k.shape[1:]).to(k.dtype), b.expand(1, *v.shape[1:]).to(v.dtype)) for a, b in rows]
    return q, torch.cat([k, *(a for a, _ in wide)]), torch.cat([v, *(b for _, b in wide)])


@implements_torch(F.multi_head_attention_forward, either=("query", "key", "value", "key_padding_mask", "attn_mask"))
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
    """Answer the function of `nn.MultiheadAttention`: projections, attention over cut tokens, output projection.

    *Shapes*: query [L, batch, E] (or [L, E]), key and value [S, batch, E]; tokens and batch may be cut, masks are tiles
    or plain. Where E or the rows of the weights are cut, the heads are (`jigsaw.nn.attention.heads`).
    *Sends*: as `scaled_dot_product_attention`, and as the projections do; weights of fewer heads than ranks, and those
    that are not packed, are gathered.
    *Raises*: `ShardingError` for static_k and static_v.
    """
    if static_k is not None or static_v is not None:
        raise ShardingError(
            "MultiheadAttention on tiles has no static_k or static_v: pass key= and value=, which may be tiles"
        )
    like = next(tiles_in((query, key, value)))
    # one tensor stays one, so a packed projection is made once
    tiles = {id(x): as_whole_tile(x, like) for x in (query, key, value)}
    query, key, value = (tiles[id(x)] for x in (query, key, value))
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
    more = (bias_k is not None) + add_zero_attn
    if more:
        q, k, v = projected
        projected = _with_more_tokens(q, k, v, bias_k, bias_v, add_zero_attn)
        attn_mask, key_padding_mask = (
            None if m is None else F.pad(m, (0, more)) for m in (attn_mask, key_padding_mask)
        )
    # [tokens, batch, features] as [batch, heads, tokens, features of a head]
    q, k, v = (x.unflatten(-1, (num_heads, x.shape[-1] // num_heads)).permute(1, 2, 0, 3) for x in projected)
    weights, rate = None, dropout_p if training else 0.0
    # torch passes is_causal as a hint beside the mask that it describes
    hint = is_causal and not more and attn_mask is not None and key_padding_mask is None and not need_weights
    masks = [] if hint else _masks_of_scores(attn_mask, key_padding_mask, num_heads)
    if need_weights:
        weights = attention_weights(q, k, masks, False, None, q)
        mixed = mix_values(cast(Any, F.dropout(cast(Any, weights), rate, training)), v)
    else:
        mixed = attend_to_keys(q, k, v, AttentionCall(masks, rate, is_causal=hint))
    mixed = mixed.permute(2, 0, 1, 3).flatten(2)
    out = (
        project_heads_out(mixed, out_proj_weight, out_proj_bias, query)
        if axes
        else F.linear(mixed, out_proj_weight, out_proj_bias)
    )
    if weights is not None and need_weights and average_attn_weights:
        weights = weights.mean(1)
    return out, weights if need_weights else None
