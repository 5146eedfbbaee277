"""`nn.MultiheadAttention` on tiles, and with heads cut along a mesh axis: projections, masks, attention.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> x = jigsaw.shard(torch.randn(2, 16, 8), mesh, (None, "lat", None))
>>> torch.nn.MultiheadAttention(8, 2, batch_first=True)(x, x, x, need_weights=False)[0].shape
torch.Size([2, 16, 8])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.geometry.axis_names import CHANNEL_AXIS
from jigsaw.geometry.cut import Cut, cut_points, whole_dim
from jigsaw.nn.attention.scaled_dot_product import (
    AttentionCall,
    as_whole_tile,
    attend_to_keys,
    attention_weights,
    mix_values,
)
from jigsaw.nn.products.contraction import plan_contraction
from jigsaw.nn.products.linear import (
    add_bias,
    layout_before_gather,
    layout_of_held_tokens,
    linear_onto_cuts,
    product_of_tokens,
    tile_linear,
)
from jigsaw.nn.rank_order import CutGroup, rearrange_rows
from jigsaw.nn.weights import CutLayer, StoredWeight, cut_parameter, gathered_weight, local_weight, weight_layout
from jigsaw.tile.tile import Tile, implements_torch, tiles_in


def head_axes(query: Tile, in_weight: StoredWeight) -> tuple[str, ...]:
    """Return the axes that are to cut the heads: those along which the projection is stored, or the features arrive."""
    return weight_layout(in_weight, query).dim_axes(0) or query.layout.dim_axes(query.ndim - 1)


def weights_of_heads(
    query: Tile, heads: int, in_weight: Tensor | None, *others: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Return the weights, gathered for fewer heads than ranks, and for separate weights of queries, keys and values.

    *Sends*: nothing for packed weights and enough heads; else as `jigsaw.nn.weights.gathered_weight`.
    """
    if in_weight is not None and comm.rank_count(query.mesh, weight_layout(in_weight, query).dim_axes(0)) <= heads:
        return in_weight, *others
    return tuple(gathered_weight(w, query) for w in (in_weight, *others))


def project_heads_in(
    inputs: Sequence[Tile], weight: StoredWeight, bias: StoredWeight | None, heads: int, axes: tuple[str, ...]
) -> tuple[Tile, ...]:
    """Return q, k and v [..., E] of x W[:E]ᵀ, x W[E:2E]ᵀ and x W[2E:]ᵀ, each cut between whole heads along `axes`.

    *Sends*: the rows of the weight and bias that belong to heads of other ranks; else as `tile_linear`, once where one
    tensor is all inputs.
    *Raises*: `ShardingError` when there are fewer heads than ranks along the axes.
    """
    first = inputs[0]
    embed = weight.shape[0] // 3
    ranks = comm.rank_count(first.mesh, axes)
    if heads < ranks:
        raise ShardingError(
            f"MultiheadAttention cuts {heads} heads along {axes}, which have {ranks} ranks; use more heads or fewer "
            "ranks"
        )
    of_heads = Cut(embed, tuple(p * (embed // heads) for p in cut_points(heads, ranks)), axes)
    packed = (whole_dim(3), of_heads)
    if all(x is first for x in inputs):
        y = linear_onto_cuts(first, weight, bias, packed).unflatten(-1, (3, embed))
        return tuple(y.select(-2, i) for i in range(3))
    return tuple(_project_one_of_three(x, i, weight, bias, packed) for i, x in enumerate(inputs))


def _project_one_of_three(x: Tile, i: int, weight: StoredWeight, bias: StoredWeight | None, packed: CutGroup) -> Tile:
    if not weight_layout(weight, x).is_cut(0):
        embed = packed[1].size
        part_of_bias = None if bias is None else bias[i * embed : (i + 1) * embed]
        return linear_onto_cuts(x, weight[i * embed : (i + 1) * embed], part_of_bias, packed[1:])
    stored = weight_layout(weight, x)
    out = layout_of_held_tokens(x.layout, stored)
    if out is not None:
        out = out.replace_dim(out.ndim - 1, packed[1])
        w = rearrange_rows(local_weight(weight, x, out), stored.dim(0), packed, x)
        y = Tile(product_of_tokens(x, w.unflatten(0, (3, -1))[i]), out, x.mesh)
    else:
        job = plan_contraction(x.layout, stored.replace_dim(0, packed[1]), packed[1:])
        out = job.result(x.layout)
        w = rearrange_rows(local_weight(weight, x, out), stored.dim(0), packed, x)
        y = job.run(x, job.rows_at_work(w.unflatten(0, (3, -1))[i], x))
    if bias is None:
        return y
    b = rearrange_rows(local_weight(bias, y, out), weight_layout(bias, y).dim(0), packed, y).unflatten(0, (3, -1))[i]
    return Tile(y.local + b.to(y.dtype), y.layout, y.mesh)


def project_heads_out(mixed: Tile, weight: StoredWeight, bias: StoredWeight | None, query: Tile) -> Tile:
    """Return y = x Wᵀ + b, cut along the features as the query is; a whole query gets a whole y.

    *Sends*: as `tile_linear`; where W is cut by outputs, then a rank's part of y for a whole query, to the owners of
    gathered tokens alone.
    """
    if weight_layout(weight, mixed).is_cut(1):
        return tile_linear(mixed, weight, bias)
    last = query.layout.dim(query.ndim - 1)
    y = add_bias(linear_onto_cuts(mixed, weight, None, last), bias)
    if tuple(y.layout.dim(y.ndim - 1)) == tuple(last):
        return y
    home = layout_before_gather(y.layout, y.layout.dim_axes(y.ndim - 1), last)
    return y.with_layout(home or y.layout.replace_dim(y.ndim - 1, *last))


class MultiheadAttention(CutLayer, nn.MultiheadAttention):
    """`torch.nn.MultiheadAttention` whose heads and weights are cut along `axis`; others may cut tokens and batch.

    Each rank holds 1/P of the weights, as DTensors with torch's names and full shapes, and works on its own heads.
    Query, key and value have whole features, or features cut along `axis`; so has the output.  On a mesh without that
    axis it is `torch.nn.MultiheadAttention`.

    *Shapes*: in_proj_weight [3 E, E] and out_proj.weight [E, E], per rank 1/P of their rows, E / P features of heads.
    *Sends*: the rows of in_proj_weight whose heads lie elsewhere, at most its part. Keys and values go to the ranks
    that cut their tokens (`jigsaw.nn.attention.scaled_dot_product`). Forward, heads' outputs and y travel along `axis`,
    ``(1-1/P)`` of each. Backward, their gradients do.
    *Raises*: `ShardingError` for kdim, vdim, add_bias_kv and add_zero_attn, and fewer heads than ranks along the axis.

    >>> mesh = jigsaw.init_mesh(channel=1)
    >>> layer = jigsaw.nn.MultiheadAttention(8, 2, batch_first=True, mesh=mesh)
    >>> x = jigsaw.shard(torch.randn(2, 16, 8), mesh, (None, None, None))
    >>> layer(x, x, x, need_weights=False)[0].shape
    torch.Size([2, 16, 8])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: DeviceMesh,
        axis: str | Sequence[str] = CHANNEL_AXIS,
    ) -> None:
        if add_bias_kv or add_zero_attn or kdim not in (None, embed_dim) or vdim not in (None, embed_dim):
            raise ShardingError(
                f"MultiheadAttention(add_bias_kv={add_bias_kv}, add_zero_attn={add_zero_attn}, kdim={kdim}, "
                f"vdim={vdim}) cannot be cut "
                f"along heads: keys and values need {embed_dim} features and no extra token; use "
                "torch.nn.MultiheadAttention"
            )
        super().__init__(embed_dim, num_heads, dropout, bias, batch_first=batch_first, device=device, dtype=dtype)
        ranks = comm.rank_count(mesh, (axis,) if isinstance(axis, str) else axis)
        if num_heads < ranks:
            raise ShardingError(
                f"MultiheadAttention has {num_heads} heads for {ranks} ranks along {axis!r}; use more heads or fewer "
                "ranks"
            )
        assert self.in_proj_weight is not None
        self.in_proj_weight = cut_parameter(self.in_proj_weight.detach(), mesh, axis)
        self.out_proj.weight = cut_parameter(self.out_proj.weight.detach(), mesh, axis)
        if bias:
            self.in_proj_bias = cut_parameter(self.in_proj_bias.detach(), mesh, axis)
            self.out_proj.bias = cut_parameter(self.out_proj.bias.detach(), mesh, axis)


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


def _packed_projection(tokens: Tile, weight: Tensor, bias: Tensor | None) -> list[Tile]:
    """Project tokens to queries, keys and values in one product, as torch does: one copy in autocast's type."""
    packed = cast(Tile, F.linear(tokens, weight, bias))
    features = weight.shape[0] // 3
    layout = packed.narrow(-1, 0, features).layout
    # split, not narrowed, so that their gradients are joined in one copy
    return [Tile(x, layout, packed.mesh) for x in packed.local.split(features, -1)]


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
    or plain. Where E or the rows of the weights are cut, the heads are (`jigsaw.nn.attention.multi_head_attention`).
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
    elif in_proj_weight is not None and query is key is value:
        projected = _packed_projection(query, in_proj_weight, in_proj_bias)
    else:
        separate = q_proj_weight, k_proj_weight, v_proj_weight
        weights_in: Any = separate if in_proj_weight is None else in_proj_weight.chunk(3)
        biases: Any = (None,) * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
        projected = (F.linear(x, w, b) for x, w, b in zip((query, key, value), weights_in, biases, strict=True))
    more = (bias_k is not None) + add_zero_attn
    if more:
        q, k, v = projected
        projected = _with_more_tokens(q, k, v, bias_k, bias_v, add_zero_attn)
        attn_mask, key_padding_mask = (m if m is None else F.pad(m, (0, more)) for m in (attn_mask, key_padding_mask))
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
