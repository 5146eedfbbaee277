"""A mixture of experts: each token goes to a few of many small networks, which lie on different ranks.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.randn(2, 9, 8), mesh, (None, "lat", None))
>>> jigsaw.nn.MoE(8, 16, experts=4, top_k=2, mesh=mesh, axis="lat")(tile).shape
torch.Size([2, 9, 8])
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.comm.debug import compare_calls
from jigsaw.comm.graph_calls import is_shape_run, refuse_in_graph
from jigsaw.comm.wire_values import wire_memory
from jigsaw.errors import ShardingError
from jigsaw.geometry.axis_names import EXPERT_AXIS
from jigsaw.geometry.cut import Cut, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.matmul_grid import refine_cut
from jigsaw.nn.products.contraction import in_autocast_dtype
from jigsaw.nn.rank_order import coordinates_along
from jigsaw.nn.weights import cut_parameter, local_weight, weight_layout
from jigsaw.ops.random_numbers import global_index
from jigsaw.ops.reductions import reduce_mean
from jigsaw.ranks.mesh import axes_of_mesh
from jigsaw.tile.tile import Tile

_DIGIT_BITS = 8

_is_even: ContextVar[bool] = ContextVar("_is_even", default=False)


@contextmanager
def even_choices() -> Generator[None]:
    """Take each expert as chosen by as many rows as any other within the block, for runs without values: nothing is
    dropped, and what ranks compare to find out is not sent.
    """
    token = _is_even.set(True)
    try:
        yield
    finally:
        _is_even.reset(token)


@dataclass(frozen=True, eq=False)
class ExpertRoute:
    """Route of rows along the axes that cut the experts: `gives` and `takes` rows to and from each mesh position.  One
    that `returns` is the way back, its adjoint.

    `order` has the places of this rank's rows by expert, and `arrived` those of the rows that arrived. Each expert of
    this rank gets `counts` of them.

    Example: five experts on four ranks, 2, 2, 1 and 0.  Three tokens of rank 1 chose (0, 4), (2, 0) and (3, 1).  By
    expert its rows are those of tokens 0, 1, 2, 1, 2, 0: rank 0 gets three, rank 1 keeps two, and rank 2 gets one.
    Rows arrive by rank, then by expert, and are sorted by expert.
    """

    mesh: DeviceMesh
    peers: tuple[int, ...]
    here: int
    gives: tuple[int, ...]
    takes: tuple[int, ...]
    order: Tensor
    arrived: Tensor
    counts: tuple[int, ...]
    returns: bool = False

    def back(self) -> ExpertRoute:
        return replace(self, gives=self.takes, takes=self.gives, returns=not self.returns)

    def to_experts(self, rows: Tensor) -> Tensor:
        """Return the rows of this rank's experts, one expert's after the other's, from the ranks' `rows` in `order`.

        *Sends*: the rows of other ranks' experts, one message a rank; backward, their gradients return.
        """
        return _ExpertSwap.apply(rows, self).index_select(0, self.arrived)

    def from_experts(self, rows: Tensor) -> Tensor:
        """Return the experts' results for this rank's rows, in `order`: the adjoint of `to_experts`, as many bytes."""
        return _ExpertSwap.apply(rows.index_select(0, self.arrived.argsort()), self.back())


class _ExpertSwap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, route: ExpertRoute) -> Tensor:
        ctx.route = route
        compare_calls(route.mesh, "experts", route.returns)
        out = wire_memory(rows, (sum(route.takes), *rows.shape[1:]))
        sent, taken = rows.split(route.gives), out.split(route.takes)
        others = [at for at in range(len(route.peers)) if at != route.here]
        sends = [(route.peers[at], sent[at]) for at in others]
        under_way = comm.swap_messages(route.mesh, sends, [(route.peers[at], taken[at]) for at in others], "experts")
        taken[route.here].copy_(sent[route.here])
        under_way.wait()
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _ExpertSwap.apply(grads[0], ctx.route.back()), None


def plan_expert_route(chosen: Tensor, experts: Cut, tile: Tile) -> ExpertRoute:
    """Plan the route of rows that go to the experts in `chosen`, on the mesh of `tile`.

    *Sends*: the number of rows that each expert gets from this rank, 8 bytes each, to every other rank along the axes.
    """
    own_piece = tile.layout.piece(experts, tile.coordinate)
    positions = [tile.layout.index(at) for at in coordinates_along(tile.layout, experts.axes, tile.coordinate)]
    counts = comm.all_gather(_counts_of(chosen, experts.size), tile.mesh, experts.axes)
    if _is_even.get():
        each, more = divmod(len(chosen), experts.size)
        counts_by_rank = [[each + (at < more) for at in range(experts.size)]] * len(counts)
    else:
        counts_by_rank: list[list[int]] = torch.stack(counts).tolist()
    low, high = experts.owned(own_piece)
    came = [row[low:high] for row in counts_by_rank]
    rows_of_came = torch.tensor([n for row in came for n in row], dtype=torch.int64)
    expert_of_came = torch.arange(high - low).repeat(len(counts_by_rank))
    expert_of_came = expert_of_came.repeat_interleave(rows_of_came, output_size=sum(map(sum, came)))
    return ExpertRoute(
        tile.mesh,
        tuple(positions),
        own_piece,
        tuple(sum(counts_by_rank[own_piece][slice(*experts.owned(at))]) for at in range(experts.pieces)),
        tuple(map(sum, came)),
        chosen.argsort(stable=True),
        expert_of_came.argsort(stable=True).to(chosen.device),
        tuple(map(sum, zip(*came, strict=True))),
    )


def _counts_of(chosen: Tensor, experts: int) -> Tensor:
    """Return how often each expert is chosen; of a size that follows from no value, as that of `bincount` may."""
    counts = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    return counts.index_add_(0, chosen, torch.ones_like(chosen))


def kept_by_capacity(
    chosen: Tensor, place: Tensor, places: int, capacity: int, experts: int, mesh: DeviceMesh, axes: Sequence[str]
) -> Tensor:
    """Say of each row whether it is among the first `capacity` of its expert, by `place`, over all ranks along `axes`.

    Places are integers below `places`, no two alike.  The first place that is left out is found for all experts at
    once, digit by digit from the highest.  The ranks sum how many rows have each digit; the next digit is the one where
    the rows no longer fit.  So it does not matter which rank has which tokens, and no rank sees them all.

    *Sends*: for each byte of `places` one all-reduce of 256 counts an expert.
    """
    first_out = torch.zeros(experts, dtype=torch.int64, device=chosen.device)
    room = torch.full_like(first_out, capacity)
    for shift in reversed(range(0, max(places - 1, 1).bit_length(), _DIGIT_BITS)):
        above, digit = place >> (shift + _DIGIT_BITS), (place >> shift) % 2**_DIGIT_BITS
        undecided = (chosen * 2**_DIGIT_BITS + digit)[above == first_out[chosen]]
        counts = torch.bincount(undecided, minlength=experts * 2**_DIGIT_BITS).view(experts, -1)
        up_to = comm.all_reduce(counts, mesh, axes).cumsum(1)
        # 2^8 if all fit, which can only happen at the highest digit; then later digits match nothing
        fitting = (up_to <= room[:, None]).sum(1, keepdim=True)
        room = room - torch.where(fitting > 0, up_to.gather(1, (fitting - 1).clamp_min(0)), 0).squeeze(1)
        first_out = first_out * 2**_DIGIT_BITS + fitting.squeeze(1)
    return place < first_out[chosen]


class MoE(nn.Module):
    """Layer y = sum over the `top_k` best experts e of p_e(x) W2_e (silu(W1_e x) * W3_e x), for each token x by itself.

    Experts are cut along `axis`: one axis of the mesh, or several.  These are axes that also cut tokens, the data's or
    space's (``axis=("data", "lat")``), so that experts need no ranks of their own.  Along an axis that cuts no tokens,
    such as a separate axis `expert`, the ranks have the same tokens, and each takes a share.  Along the mesh's other
    axes every rank has the same experts.  The experts need not divide (5 on 4 ranks are 2, 2, 1 and 0, torch.chunk's
    rule).

    - *Router*: p = softmax(R x) over all experts, in float32 or better (Switch); the `top_k` largest, which with
      `normalize` are divided by their sum.  That is Mixtral's; by default it is so for ``top_k > 1`` alone, because a
      weight that is always 1 teaches the router nothing (Switch).  ``normalize=False`` is DeepSeekMoE's.
    - *Experts*: gated as in Mixtral and DeepSeekMoE, without bias.  `shared_experts` that each token goes to, too, are
      one network of `shared_experts` times `hidden` features (DeepSeekMoE).
    - *Capacity*: without `capacity_factor` every expert takes all tokens that chose it, and none is dropped.  With it,
      it takes the first ``ceil(capacity_factor * tokens * top_k / experts)`` of them, and the others get nothing of it
      (GShard, Switch). All first choices come before all second ones. Of equal ones the row-major place of the token in
      the *whole* tensor counts. So the same tokens are dropped on every mesh.
    - *Losses*: after a forward pass, ``balance_loss`` is experts * sum_e f_e P_e. f_e is the share of choices that went
      to e (before any is dropped), and P_e the mean of p_e (Switch, equation 4). ``z_loss`` is the mean of logsumexp(R
      x)^2 (ST-MoE, equation 5).  Both are over all tokens of the mesh, not means over ranks, and equal on every rank.
      Qiu et al. saw experts specialize only so.  Add them to the loss, times 1e-2 and 1e-3 in these papers.

    *Shapes*: x and y [..., dim], cut as they come. w1 and w3 [experts, hidden, dim], w2 [experts, dim, hidden], as
    DTensors, per rank those of its experts. Router [experts, dim] and shared weights whole.
    *Sends*: forward, for each row whose expert lies on another rank (``top_k`` a token, without those dropped), its
    `dim` values and as many back. This is one exchange each way, counted as ``experts``. Backward the same.  Besides, 8
    bytes an expert to each rank along `axis`, and three all-reduces of one or two numbers an expert for the losses.
    With a capacity, also one of 2 KB an expert for each byte of ``tokens * top_k``.  Tokens that are not cut along
    `axis`, or whose features are cut, are cut anew, and y brought back: an exchange each.
    *Raises*: `ShardingError` for sizes that do not fit.

    With activation checkpointing take ``use_reentrant=False``, or the losses have no gradient.

    After Shazeer et al., arXiv 1701.06538; Lepikhin et al., GShard, 2006.16668; Fedus et al., Switch Transformer,
    2101.03961; Zoph et al., ST-MoE, 2202.08906; Jiang et al., Mixtral, 2401.04088; Dai et al., DeepSeekMoE, 2401.06066;
    Qiu et al., 2501.11873.

    >>> mesh = jigsaw.init_mesh(data=1, lat=1)
    >>> layer = jigsaw.nn.MoE(8, 16, experts=6, top_k=2, mesh=mesh, axis=("data", "lat"), shared_experts=1)
    >>> y = layer(jigsaw.shard(torch.randn(2, 9, 8), mesh, ("data", "lat", None)))
    >>> loss = y.square().mean() + 0.01 * layer.balance_loss + 0.001 * layer.z_loss
    >>> loss.backward()
    >>> layer.w1.grad.shape
    torch.Size([6, 16, 8])
    """

    balance_loss: Tensor
    z_loss: Tensor

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        mesh: DeviceMesh,
        axis: str | Sequence[str] = EXPERT_AXIS,
        shared_experts: int = 0,
        capacity_factor: float | None = None,
        normalize: bool | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_sizes(dim, hidden, experts, top_k, shared_experts, capacity_factor)
        self.dim, self.hidden, self.experts, self.top_k = dim, hidden, experts, top_k
        self.capacity_factor = capacity_factor
        self.normalize = top_k > 1 if normalize is None else normalize
        self._mesh = mesh
        shapes = {"w1": (experts, hidden, dim), "w2": (experts, dim, hidden), "w3": (experts, hidden, dim)}
        for name, shape in shapes.items():
            setattr(self, name, cut_parameter(_drawn_weight(shape, device, dtype), mesh, axis))
        self.router = nn.Parameter(_drawn_weight((experts, dim), device, dtype))
        wide = shared_experts * hidden
        shared = {"shared_w1": (wide, dim), "shared_w2": (dim, wide), "shared_w3": (wide, dim)} if wide else {}
        for name, shape in shared.items():
            setattr(self, name, nn.Parameter(_drawn_weight(shape, device, dtype)))

    def extra_repr(self) -> str:
        return (
            f"dim={self.dim}, hidden={self.hidden}, experts={self.experts}, top_k={self.top_k}, "
            f"capacity_factor={self.capacity_factor}, normalize={self.normalize}"
        )

    def __getstate__(self) -> dict[str, Any]:
        # the losses hold a graph, which cannot be copied or pickled, as when weights are averaged over a copy of the
        # model
        return {name: value for name, value in self.__dict__.items() if name not in ("balance_loss", "z_loss")}

    def forward(self, input: Any) -> Any:
        refuse_in_graph("MoE, whose messages depend on values,")
        if not isinstance(input, Tile):  # a plain input is the same on every rank
            whole = Layout(tuple(map(whole_dim, input.shape)), axes_of_mesh(self._mesh))
            return self.forward(Tile(input, whole, self._mesh)).full_tensor()
        if input.ndim < 2 or input.shape[-1] != self.dim:
            raise ShardingError(
                f"MoE takes tokens of {self.dim} features, the last of at least 2 dims, but the Tile has shape "
                f"{tuple(input.shape)}; move the features there, x.movedim(1, -1), or make the layer for another dim"
            )
        if not input.dtype.is_floating_point:
            raise ShardingError(
                f"MoE takes tokens of floats, but the Tile has {input.dtype}; convert them: x.to(torch.float32)"
            )
        if is_shape_run():  # without values there is no route of a token
            self.balance_loss = self.z_loss = input.local.new_zeros(())
            tile = input.owned()
            return Tile(in_autocast_dtype(tile.local).clone(), tile.layout, tile.mesh)
        weights = dict(self.named_parameters(recurse=False))
        stored = weight_layout(weights["w1"], input).dim(0)[0]
        tokens = input.with_layout(_layout_of_tokens(input.layout, stored.axes))
        w = {name: local_weight(p, tokens, tokens.layout) for name, p in weights.items()}
        rows = tokens.local.flatten(0, -2)
        p, chosen = self._choose_experts(rows, w["router"], tokens)
        if _is_even.get():
            token_of = torch.arange(len(rows), device=rows.device).repeat_interleave(self.top_k)
            expert_of, p = chosen.flatten(), p.flatten()
        else:
            kept = self._kept_choices(chosen, tokens)
            token_of, expert_of, p = kept.nonzero()[:, 0], chosen[kept], p[kept]
        route = plan_expert_route(expert_of, stored, tokens)
        token_of, p = token_of[route.order], p[route.order]
        expert_rows = route.to_experts(in_autocast_dtype(rows).index_select(0, token_of))
        results = _run_experts(expert_rows, route.counts, w["w1"], w["w2"], w["w3"])
        back = route.from_experts(results)
        y = back.new_zeros(rows.shape).index_add(0, token_of, back * p.to(back.dtype).unsqueeze(1))
        if "shared_w1" in w:
            y = y + _gated_network(rows, w["shared_w1"], w["shared_w2"], w["shared_w3"])
        out = Tile(y.reshape(tokens.local.shape), tokens.layout, tokens.mesh)
        return out.with_layout(input.layout.without_halo())

    def _choose_experts(self, rows: Tensor, router: Tensor, tokens: Tile) -> tuple[Tensor, Tensor]:
        """Return the weights and numbers of each token's experts [tokens, top_k], and set the losses: before the
        experts, so that FSDP2, which gathers weights for y's backward pass, comes to them first.
        """
        wide = torch.float32 if rows.dtype in (torch.bfloat16, torch.float16) else rows.dtype
        with torch.autocast(rows.device.type, enabled=False):
            logits = F.linear(rows.to(wide), router.to(wide))
        p = logits.softmax(-1)
        best, chosen = p.topk(self.top_k, dim=-1)
        leading = tuple(range(tokens.ndim - 1))
        as_tile = tokens.layout.replace_dim(tokens.ndim - 1, whole_dim(self.experts))
        by_expert = reduce_mean(Tile(p.reshape(as_tile.local_shape(tokens.coordinate)), as_tile, tokens.mesh), leading)
        counts = _counts_of(chosen.flatten(), self.experts)
        counts = comm.all_reduce(counts, tokens.mesh, tokens.layout.cut_axes).to(wide)
        self.balance_loss = (by_expert * (self.experts / max(self._choices(tokens), 1) * counts)).sum()
        squares = logits.logsumexp(-1).square().reshape(tokens.local.shape[:-1])
        self.z_loss = reduce_mean(Tile(squares, tokens.layout.drop((tokens.ndim - 1,)), tokens.mesh))
        return best / best.sum(-1, keepdim=True) if self.normalize else best, chosen

    def _choices(self, tokens: Tile) -> int:
        return math.prod(tokens.shape[:-1]) * self.top_k

    def _kept_choices(self, chosen: Tensor, tokens: Tile) -> Tensor:
        if self.capacity_factor is None:
            return torch.ones_like(chosen, dtype=torch.bool)
        choices = self._choices(tokens)
        capacity = math.ceil(self.capacity_factor * choices / self.experts)
        place = global_index(tokens, tokens.ndim - 1).reshape(-1, 1)
        place = place + torch.arange(self.top_k, device=chosen.device) * (choices // self.top_k)
        axes = tokens.layout.cut_axes
        return kept_by_capacity(
            chosen.flatten(), place.flatten(), choices, capacity, self.experts, tokens.mesh, axes
        ).reshape(chosen.shape)


def _check_sizes(dim: int, hidden: int, experts: int, top_k: int, shared: int, capacity_factor: float | None) -> None:
    sizes = {"dim": dim, "hidden": hidden, "experts": experts}
    for name, size in (*sizes.items(), ("top_k", top_k), ("shared_experts", shared)):
        if not isinstance(size, Integral):
            raise ShardingError(f"MoE with {name}={size!r}: give a whole number")
    small = [f"{name}={size}" for name, size in sizes.items() if size < 1]
    if small or shared < 0:
        raise ShardingError(f"MoE with {', '.join(small) or f'shared_experts={shared}'}: sizes are at least 1")
    if not 1 <= top_k <= experts:
        raise ShardingError(f"MoE with top_k={top_k}: a token goes to 1 to {experts} of {experts} experts")
    if capacity_factor is not None and not 0 < capacity_factor < math.inf:
        raise ShardingError(
            f"MoE with capacity_factor={capacity_factor}: it is above 0, 1.25 for instance; None drops no token"
        )


def _drawn_weight(shape: tuple[int, ...], device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """Draw a weight as `torch.nn.Linear` does, for each expert by itself."""
    bound = 1 / math.sqrt(shape[-1])
    return torch.empty(shape, device=device, dtype=dtype).uniform_(-bound, bound)


def _layout_of_tokens(layout: Layout, axes: Sequence[str]) -> Layout:
    """Return the layout with whole features, and tokens that all of `axes` cut, and those that cut the features; axes
    that cut no tokens before cut the dim with the longest pieces.
    """
    bare, last = layout.without_halo(), layout.ndim - 1
    free = [a for a in (*bare.dim_axes(last), *axes) if not any(a in bare.dim_axes(d) for d in range(last))]
    names = [name for name, _ in bare.axes if name in free]
    dims = [list(group) for group in bare.dims()]
    dims[last] = [c.uncut() for c in dims[last]]
    if names:
        lengths = {(d, k): c.points[1] - c.points[0] for d in range(last) for k, c in enumerate(dims[d])}
        d, k = max(lengths, key=lambda at: lengths[at])
        dims[d][k] = refine_cut(dims[d][k], names, dict(bare.axes))
    return Layout.from_dims(dims, bare.axes)


def _gated_network(x: Tensor, w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)


def _run_experts(rows: Tensor, counts: Sequence[int], w1: Tensor, w2: Tensor, w3: Tensor) -> Tensor:
    if not counts:
        # no expert lies here, but the result belongs to the graph, because others wait for this rank backward
        return torch.cat([rows, *(w.reshape(0, rows.shape[1]) for w in (w1, w2, w3))])
    weights = zip(w1.unbind(0), w2.unbind(0), w3.unbind(0), strict=True)
    return torch.cat([_gated_network(x, *w) for x, w in zip(rows.split(counts), weights, strict=True)])
