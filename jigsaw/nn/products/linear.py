"""Linear layers on tiles: each rank by itself over a whole last dim, the matmul core over a cut one.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.randn(2, 144, 8), mesh, (None, "lat", None))
>>> torch.nn.Linear(8, 32)(tile).shape
torch.Size([2, 144, 32])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.comm.exchange import sum_held_rows
from jigsaw.comm.wire_values import lie_in_one_memory
from jigsaw.errors import ShardingError
from jigsaw.geometry.axis_names import CHANNEL_AXIS
from jigsaw.geometry.cut import cut_by_some_axes, cut_holding_along, have_same_rows, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.nn.products.contraction import plan_contraction
from jigsaw.nn.rank_order import CutGroup, axes_of_cuts, bare_cuts, rearrange_rows, take_owned_rows
from jigsaw.nn.shared_inputs import enter_in_parts, shared_results
from jigsaw.nn.weights import CutLayer, StoredWeight, cut_parameter, gathered_weight, local_weight, weight_layout
from jigsaw.ops.meeting.common_cuts import bring_to_cuts, bring_together
from jigsaw.ops.meeting.plain_operands import averaged_over
from jigsaw.tile.tile import Tile, implements_torch, refusal_error
from jigsaw.torch_internals.autograd import memory_id, saved_tensor_hooks, tensor_version
from jigsaw.torch_internals.placements import is_dtensor


@implements_torch(F.linear, either=("input", "weight", "bias"))
def tile_linear(input: Tile | Tensor, weight: StoredWeight, bias: StoredWeight | None = None) -> Tile:
    """Return y = x Wᵀ + b over the last dim of x, whatever cuts x and W.

    *Shapes*: x [..., K], W [N, K], b [N], y [..., N]; the leading dims of y are cut as those of x.  The last dim of y
    is

    - whole when that of x and both dims of W are (each rank by itself, halo rows included);
    - cut as W's rows when they are (column-cut: y stays cut along ``channel``);
    - whole when W is a DTensor cut along K as x is, or x whole (row-cut);
    - else cut by the axes that cut K. Where N = K, it has the same points. Where N is the size that x was made from, it
      has the points of that time. Else it is balanced.

    Where x holds the tokens of all ranks along the axes of W's rows (`gathered_tokens`), they are whole in y, which
    remembers their cuts. A row-cut W restores these cuts.

    *Sends*: with K whole and W whole or column-cut, nothing; backward, one all-reduce of the gradient of x over the
    axes of W's rows.  With W row-cut, one all-reduce of y; backward, one of the gradient of x, where x is whole.  With
    gathered tokens, a reduce-scatter of y, and backward a gather of its gradient.  Else the bytes of the core's grid
    (`jigsaw.comm.matmul.grid_matmul`). Over a cut K either the parts of x travel (column) or partial sums of y (row).
    The way that moves less in a training step is taken.  A W stored 1/P along the axes that cut the rows of x travels
    to them.  The input is never gathered on one rank, only passed around.
    *Raises*: `ShardingError` when the axes of x and W do not form a grid.
    """
    if not isinstance(input, Tile):
        return _linear_of_plain(input, weight, bias)
    n, k = weight.shape
    if input.shape[-1] != k:
        raise RuntimeError(
            f"linear: input {tuple(input.shape)} and weight {tuple(weight.shape)} cannot be multiplied "
            f"({input.shape[-1]} and {k})"
        )
    if isinstance(weight, Tile):
        input, weight = _bring_contracted_dim_together(input, weight)
    stored = weight_layout(weight, input) if isinstance(weight, Tile) or is_dtensor(weight) else None
    if stored is not None:
        input = bring_to_cuts(input, input.ndim - 1, stored.dim(1))
    if stored is not None and is_dtensor(weight) and _is_cut_by_inputs(input.layout, stored):
        return _sum_over_input_pieces(input, weight, bias, stored)
    if not (stored is not None and stored.cut_axes) and not input.layout.is_cut(input.ndim - 1):
        return _linear_by_itself(input, weight, bias, n)
    return linear_onto_cuts(input, weight, bias)


def linear_onto_cuts(
    input: Tile, weight: StoredWeight, bias: StoredWeight | None, last: CutGroup | None = None
) -> Tile:
    """Run `tile_linear` over cut dims; the result's last dim is cut as `last` where the axes allow a choice."""
    x = _without_halo_along_last(input)
    stored = weight_layout(weight, x)
    held = layout_of_held_tokens(x.layout, stored) if is_dtensor(weight) else None
    if held is not None:
        result = held if last is None else held.replace_dim(held.ndim - 1, *last)
        w = rearrange_rows(local_weight(weight, x, held), stored.dim(0), result.dim(result.ndim - 1), x)
        return add_bias(Tile(product_of_tokens(x, w), result, x.mesh), bias)
    job = plan_contraction(x.layout, stored, last)
    out = job.result(x.layout)
    if type(weight) is nn.Parameter:
        parameter = job.parameter_at_work(weight, x, averaged_over(weight) / out.replicas)
        if parameter is not None:
            return add_bias(job.run(x, parameter), bias)
        # take this rank's rows before the weight becomes an operand, so that only their gradient is scaled, not zeros
        return add_bias(job.run(x, local_weight(job.rows_at_work(weight, x), x, out)), bias)
    w = rearrange_rows(local_weight(weight, x, out), stored.dim(0), job.stored.dim(0), x)
    return add_bias(job.run(x, job.rows_at_work(w, x)), bias)


def _bring_contracted_dim_together(input: Tile, weight: Tile) -> list[Tile]:
    of_input, other = input.layout.dim(input.ndim - 1), weight.layout.dim(1)
    if [(c.size, c.axes) for c in of_input] != [(c.size, c.axes) for c in other]:
        return [input, weight]
    return bring_together([input, weight], [[None] * (input.ndim - 1) + ["k"], [None, "k"]])


def _is_cut_by_inputs(x: Layout, stored: Layout) -> bool:
    """Say whether each rank has the columns of W for its own features of x, or for a piece of those that it has."""
    last, axes = x.ndim - 1, stored.dim_axes(1)
    fits = not x.is_cut(last) or have_same_rows(x.dim(last), stored.dim(1))
    return stored.cut_dims == (1,) and fits and not any(set(axes) & set(x.dim_axes(d)) for d in range(last))


def _sum_over_input_pieces(input: Tile, weight: StoredWeight, bias: StoredWeight | None, stored: Layout) -> Tile:
    """Return y = sum over the ranks of x[:, mine] W[:, mine]ᵀ, plus b once; y is whole.

    One sum here, where the grid's reduce-scatter and a gather after it would be two calls of as many bytes.
    """
    x = _without_halo_along_last(input)
    last, axes, contracted = x.ndim - 1, stored.dim_axes(1), stored.dim(1)
    rows = x.local
    if not x.layout.is_cut(last):
        rows = take_owned_rows(enter_in_parts(x, axes), last, contracted, x.layout, x.coordinate)
    # each rank along `axes` has its own columns of W, so no gradient of W is divided among replicas
    partial = F.linear(rows, local_weight(weight, x, x.layout.replace_dim(last, *contracted)))
    out = x.layout.replace_dim(last, whole_dim(weight.shape[0]))
    home = layout_before_gather(out, axes, out.dim(last))
    if home is not None:
        parts = sum_held_rows(partial, _holding_tokens(home, axes), home, x.mesh)
        return add_bias(Tile(parts, home, x.mesh), bias)
    return add_bias(Tile(comm.sum_parts(partial, x.mesh, axes), out, x.mesh), bias)


# -- tokens that the axes of the weight cut ---------------------------------------------------------------------------
#
# Sequence parallelism (Korthikanti et al., "Reducing activation recomputation in large transformer models", arXiv
# 2205.05198).  Two ranks along channel, ten tokens x [10, 8] cut at 5, W1 [16, 8] cut by rows, W2 [8, 16] by columns:
#
#     x[0:5]        each rank gives its five tokens to the other, and holds all ten as a halo: a gather
#     h[:, 0:8]     = gelu(x W1[0:8]ᵀ), all tokens; its dim of tokens is whole, and remembers the cut at 5
#     y[0:5]        h[:, mine] W2[:, mine]ᵀ is a part of all ten; each rank gets the other's part of its own five, and
#                   adds it: a reduce-scatter
#
# Backward the gather of x becomes a reduce-scatter and that of y a gather.  An all-reduce is as many bytes as the two.
# A product keeps all ten for the gradient of W1, or its own five where the backward pass gathers them again (section
# 4.2.2 of that paper).


class GatheredTokens(NamedTuple):
    """A tile with the tokens of all ranks, and what gathers them again in the backward pass, if something does."""

    tile: Tile
    again: TokensAgain | None


class TokensAgain:
    """This rank's tokens, which products keep for the backward pass in place of those of all, and gather there.

    Its methods are hooks for saved tensors.  The products of one input gather once: the first that needs all tokens
    does so, and the last lets go of them.

    *Sends*: backward, this rank's tokens to the others.
    *Raises*: `RuntimeError` in the backward pass, as torch does, where the tokens were changed in place meanwhile.
    """

    def __init__(self, own: Tile, gathered: Tile) -> None:
        self._own = Tile(own.local.detach(), own.layout, own.mesh)
        self._version = tensor_version(self._own.local)
        self._layout, self._strides = gathered.layout, gathered.local.stride()
        self._offset = gathered.local.storage_offset()
        self._memory = memory_id(gathered.local.untyped_storage())
        self._uses = self._left = 0
        self._tokens: Tensor | None = None

    def keep(self, saved: Tensor) -> tuple[Any, ...]:
        """Return what is kept of a tensor: of all tokens only how a view lies in them."""
        if memory_id(saved.untyped_storage()) != self._memory:
            return saved, tensor_version(saved)
        self._uses += 1
        return saved.size(), saved.stride(), saved.storage_offset() - self._offset

    def restore(self, kept: tuple[Any, ...]) -> Tensor:
        """Return the tensor that was kept."""
        if isinstance(kept[0], Tensor):
            _check_unchanged(kept[0], kept[1])
            return kept[0]
        tokens = self._all_tokens()
        self._left -= 1
        if self._left <= 0:
            self._tokens = None
        size, strides, offset = kept
        return tokens.as_strided(size, strides, tokens.storage_offset() + offset)

    def _all_tokens(self) -> Tensor:
        if self._tokens is None:
            _check_unchanged(self._own.local, self._version)
            with torch.no_grad():
                tokens = self._own.with_layout(self._layout).local
                if tokens.stride() != self._strides:  # views of them were kept by their strides
                    tokens = tokens.new_empty_strided(tokens.shape, self._strides).copy_(tokens)
            self._tokens, self._left = tokens, self._uses
        return self._tokens


def _check_unchanged(saved: Tensor, version: int) -> None:
    if tensor_version(saved) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
            f"of shape {tuple(saved.shape)}, in the product of gathered tokens"
        )


def product_of_tokens(x: Tile, weight: Tensor) -> Tensor:
    """Return this rank's x Wᵀ of gathered tokens, of which its own are kept where they shall be gathered again."""
    again = _again_of(x)
    if again is None:
        return F.linear(x.local, weight)
    # in the order of memory: of dims in another one, such as tokens before samples, torch would keep a copy
    strides, last = x.local.stride(), x.ndim - 1
    order = [*sorted(range(last), key=lambda d: -strides[d]), last]
    with torch.autograd.graph.saved_tensors_hooks(again.keep, again.restore):
        product = F.linear(x.local.permute(order), weight)
    return product.permute([order.index(d) for d in range(last + 1)])


def _again_of(x: Tile) -> TokensAgain | None:
    # what saves tensors in another way, such as checkpointing, recomputes the gather or keeps tokens as it likes
    if not torch.is_grad_enabled() or torch.compiler.is_compiling() or saved_tensor_hooks(True):
        return None
    gathers = (result for result in shared_results() if isinstance(result, GatheredTokens))
    return next((each.again for each in gathers if lie_in_one_memory(each.tile.local, x.local)), None)


def gathered_tokens(x: Tile, axes: Sequence[str]) -> Tile:
    """Return the tile with the tokens of all ranks along `axes`, which cut one of its leading dims, as a halo.

    *Sends*: this rank's tokens to the others; backward, the gradients of theirs, which are added up.
    *Raises*: `ShardingError` where other axes cut the same dim finer.
    """
    return x.with_layout(_holding_tokens(x.layout, axes))


def _holding_tokens(layout: Layout, axes: Sequence[str]) -> Layout:
    sizes = dict(layout.axes)
    dims = [
        [cut_holding_along(c, axes, sizes) if set(axes) & set(c.axes) else c for c in group] for group in layout.dims()
    ]
    return Layout.from_dims(dims, layout.axes)


def layout_of_held_tokens(x: Layout, stored: Layout) -> Layout | None:
    """Return y's layout with own channels of all tokens along the axes of W's rows; None if x lacks these."""
    axes, sizes, last = stored.dim_axes(0), dict(x.axes), x.ndim - 1
    if stored.cut_dims != (0,) or not set(axes) <= set(x.cut_axes) or x.is_cut(last):
        return None
    dims = [list(group) for group in x.dims()]
    for d, group in enumerate(x.dims()):
        for k, c in enumerate(group):
            if set(axes) & set(c.axes):
                if not c.has_halo or not set(axes) <= set(c.axes) or c.held != cut_holding_along(c, axes, sizes).held:
                    return None
                whole = cut_by_some_axes(c, [a for a in c.axes if a not in axes], sizes)
                dims[d][k] = replace(whole, source=(c.bare(),))
    dims[last] = list(stored.dim(0))
    return Layout.from_dims(dims, x.axes)


def layout_before_gather(layout: Layout, axes: Sequence[str], last: CutGroup) -> Layout | None:
    """Return the layout before the tokens along `axes` were gathered, the last dim cut as `last`; None if unknown."""
    dims = [list(group) for group in (*layout.dims()[:-1], last)]
    for group in dims[:-1]:
        for k, c in enumerate(group):
            before = c.source[0] if len(c.source) == 1 else c
            if (*c.axes, *axes) == before.axes and before.size == c.size:
                group[k] = before
                return Layout.from_dims(dims, layout.axes)
    return None


def _linear_of_plain(input: Tensor, weight: StoredWeight, bias: StoredWeight | None) -> Tile:
    if not isinstance(weight, Tile) or input.ndim != 2:
        tile = next(t for t in (weight, bias) if isinstance(t, Tile))
        raise refusal_error(
            F.linear,
            tile,
            f"the input is a plain tensor of shape {tuple(input.shape)}",
            "make the input a Tile with jigsaw.shard",
        )
    return add_bias(tile_linear(weight, input).transpose(0, 1), bias)


def _linear_by_itself(input: Tile, weight: StoredWeight, bias: StoredWeight | None, n: int) -> Tile:
    if isinstance(bias, Tile) or is_dtensor(bias):
        return add_bias(_linear_by_itself(input, weight, None, n), bias)
    x = _without_halo_along_last(input)
    out = x.layout.replace_dim(x.layout.ndim - 1, whole_dim(n))
    plain = None if bias is None else local_weight(bias, x, out)
    return Tile(F.linear(x.local, local_weight(weight, x, out), plain), out, x.mesh)


def _without_halo_along_last(input: Tile) -> Tile:
    """Return the tile without halo rows along the contracted dim; those of other dims stay."""
    last = input.layout.ndim - 1
    cuts = input.layout.dim(last)
    if input.layout.complete_dims[last] or not any(c.has_halo for c in cuts):
        return input
    return input.with_layout(input.layout.replace_dim(last, *bare_cuts(cuts)))


def add_bias(y: Tile, bias: StoredWeight | None) -> Tile:
    """Return y + bias; a DTensor's rows go to where y is cut, or are gathered for a last dim that is whole."""
    if bias is None:
        return y
    if not is_dtensor(bias):
        return y + bias.to(y.dtype)
    stored, last = weight_layout(bias, y).dim(0), y.layout.dim(y.ndim - 1)
    if any(c.is_cut for c in stored) and not any(c.is_cut for c in last):
        return y + cast(Tensor, gathered_weight(bias, y)).to(y.dtype)
    local = local_weight(bias, y, y.layout)
    if any(c.is_cut for c in stored) and set(axes_of_cuts(stored)) != set(axes_of_cuts(last)):
        raise ShardingError(
            f"linear: the bias is cut by {axes_of_cuts(stored)}, but the last dim of the output by "
            f"{axes_of_cuts(last) or 'nothing'}; "
            f"cut the bias as the rows of the weight"
        )
    local = (
        rearrange_rows(local, stored, bare_cuts(last), y)
        if any(c.is_cut for c in stored)
        else take_owned_rows(local, 0, bare_cuts(last), y.layout, y.coordinate)
    )
    return Tile(y.local + local.to(y.dtype), y.layout, y.mesh)


# -- module -----------------------------------------------------------------------------------------------------------


class Linear(CutLayer, nn.Linear):
    """`torch.nn.Linear` whose weight and bias are cut along `axis`: y = x Wᵀ + b is cut along it as the rows of W are.

    Each rank holds 1/P of the weight, its gradient and its optimizer state, as a DTensor with torch's names and full
    shapes. The sizes need not divide.  On a mesh without that axis it is `torch.nn.Linear`.

    *Shapes*: weight [out, in], per rank [ceil(out / P), in] (the last ones may have fewer rows); x whole or cut along
    `axis`.
    *Sends*: see `tile_linear`; once, when it is made, the parts of the first rank's initial values.
    *Raises*: `ShardingError` for a plain tensor where the weights are cut.

    >>> mesh = jigsaw.init_mesh(channel=1)
    >>> layer = jigsaw.nn.Linear(8, 6, mesh=mesh)
    >>> layer(jigsaw.shard(torch.randn(5, 8), mesh, (None, None))).shape, layer.weight.shape
    (torch.Size([5, 6]), torch.Size([6, 8]))
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: DeviceMesh,
        axis: str | Sequence[str] = CHANNEL_AXIS,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.weight = cut_parameter(self.weight.detach(), mesh, axis)
        if bias:
            self.bias = cut_parameter(self.bias.detach(), mesh, axis)
