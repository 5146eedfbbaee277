"""Weights cut along a mesh axis, for `jigsaw.parallelize`: the layers, the dims, and where results lie.

A *column* layer holds rows of the weight, and makes a piece of the output channels. The pieces are gathered unless the
next layer takes them as they are.  A *row* layer holds columns: it takes a piece of the input channels, and the
products are summed.  After Shoeybi et al., "Megatron-LM", arXiv 1909.08053.

The layers stay torch's own.  Their parameters become DTensors with the names and full shapes that they had. `F.linear`,
the convolutions and `F.multi_head_attention_forward` take them with tiles (`jigsaw.nn`), as for layers made with
``mesh=``. Hooks before and after a layer decide where its result lies.

Four ranks, lat=2 x channel=2, and Sequential(Linear(8, 16), GELU(), Linear(16, 8)) on x [6, 8], cut ("lat", None)::

    rank (lat, channel)       (0, 0)        (0, 1)        (1, 0)        (1, 1)
    x                         x[0:3, :]     x[0:3, :]     x[3:6, :]     x[3:6, :]
    column, W1 [16, 8]        W1[0:8]       W1[8:16]      W1[0:8]       W1[8:16]
    h = x W1ᵀ + b1, no sends  h[0:3, 0:8]   h[0:3, 8:16]  h[3:6, 0:8]   h[3:6, 8:16]
    row, W2 [8, 16]           W2[:, 0:8]    W2[:, 8:16]   W2[:, 0:8]    W2[:, 8:16]
    h[:, mine] W2[:, mine]ᵀ   a part of y[0:3, :] each    a part of y[3:6, :] each
    all-reduce, + b2 once     y[0:3, :]     y[0:3, :]     y[3:6, :]     y[3:6, :]

Backward, each rank has the gradient of its pieces of W1 and W2 over its rows.  Those of x are sums of both ranks along
channel: one all-reduce.  Then `jigsaw.parallel.gradients` averages: W1[0:8] over ranks (0, 0) and (1, 0), along lat
alone; b2, which every rank has, over all four.  The column by itself would gather h: an all-gather of [3, 8] along
channel.

x may be cut along channel as well, ``(("lat", "channel"), None)`` (sequence parallelism). Norms, dropout and residuals
between the layers then work on 1/P of the tokens.  A column gathers x, a row's sum is a reduce-scatter onto the tokens
where they were, as many bytes together as the all-reduce (`jigsaw.nn.products.linear.gathered_tokens`).
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from glob import escape
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.nn.products.contraction import tile_in_autocast_dtype
from jigsaw.nn.products.linear import GatheredTokens, TokensAgain, gathered_tokens, layout_before_gather
from jigsaw.nn.rank_order import put_in_dim_order
from jigsaw.nn.shared_inputs import shared_result
from jigsaw.ops.reductions import stack_along_axes
from jigsaw.parallel.channel_watcher import FoundPairs, PairCandidate
from jigsaw.parallel.found_pairs import find_pairs
from jigsaw.ranks.mesh import axes_of_mesh, flat_submesh
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals.placements import dim_and_parts, read_whole_numbers, shard_of_parts

TensorPlan = Mapping[str, str]
FOUND = "found"
"""Word of a plan for layers whose cuts a run on paper finds."""
PlannedCut = str  # "column", "3 columns", "row", "gathered" or "whole"

_OWN_WORDS: dict[str, PlannedCut] = {"column": "column", "row": "row", "gathered": "gathered", "whole": "whole"}
_COLUMNS = re.compile(r"([2-9]|[1-9]\d+) columns")
# The words of transformers' plans (``model.tp_plan``), which begin with those of torch's styles.
_WORDS_OF_TRANSFORMERS: dict[str, PlannedCut] = {
    "colwise": "column",
    "rowwise": "row",
    # its input is whole, so its output is gathered, which sends half as much as a sum
    "rowwise_split_input": "gathered",
    "colwise_gather_output": "gathered",
    "packed_colwise": "2 columns",  # the gate and the up projection
    "replicate": "whole",
    "replicated_with_grad_allreduce": "whole",  # jigsaw averages the gradient of every whole weight over the ranks
    "embedding_rowwise": "whole",
}
_PLANNED_CUTS = _OWN_WORDS | _WORDS_OF_TRANSFORMERS

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Modules that may stand between a column and a row layer, because they work on each channel by itself.
_BETWEEN = (nn.Identity, nn.Dropout, nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh, nn.Sigmoid, nn.ELU, nn.LeakyReLU, nn.Softplus)
_INPUTS = ("input", "query", "key", "value")  # names of the tensors that these layers take


# -- around a layer ---------------------------------------------------------------------------------------------------


class ChannelHooks:
    """Hooks before and after a layer whose weights are cut along `axis`.

    Before it channels are checked, tokens that the axis cuts are gathered, and a plain input becomes a Tile that
    nothing cuts. After it channels are whole again with `gather`, tokens lie where they were, and plain inputs give
    plain results.  With `gather_again` the backward pass gathers the tokens once more.
    """

    def __init__(self, mesh: DeviceMesh, axis: str, gather: bool, gather_again: bool) -> None:
        self._mesh, self._axis, self._gather, self._gather_again = mesh, axis, gather, gather_again
        self._is_plain = False  # whether the running call has plain inputs alone

    def __deepcopy__(self, memo: dict[int, Any]) -> ChannelHooks:
        # a copy of a model runs on the same mesh
        return ChannelHooks(self._mesh, self._axis, self._gather, self._gather_again)

    def before(self, layer: nn.Module, args: Any, kwargs: Any) -> Any:
        inputs = [*args[:3], *(kwargs.get(name) for name in _INPUTS)]
        tiles = [x for x in inputs if isinstance(x, Tile)]
        self._is_plain = not tiles
        if tiles:
            # keyed by identity, so that query, key and value of self attention stay one tensor
            as_tile: dict[int, Tile] = {id(x): self._with_tokens(layer, x) for x in tiles}
        else:
            axes = axes_of_mesh(self._mesh)
            as_tile = {
                id(x): Tile(x, Layout(tuple(map(whole_dim, x.shape)), axes), self._mesh)
                for x in inputs
                if isinstance(x, Tensor)
            }
        return tuple(as_tile.get(id(x), x) for x in args), {name: as_tile.get(id(x), x) for name, x in kwargs.items()}

    def _with_tokens(self, layer: nn.Module, x: Tile) -> Tile:
        """Return a layer's input with the tokens of all ranks along the axis, if it cuts them; *Sends*: this rank's."""
        has_tokens = isinstance(layer, nn.Linear | nn.MultiheadAttention) or _is_turned_linear(layer)
        if has_tokens and any(self._axis in x.layout.dim_axes(d) for d in range(x.ndim - 1)):
            return shared_result(x, ("tokens", self._axis), lambda: self._gathered(tile_in_autocast_dtype(x))).tile
        if not isinstance(layer, nn.MultiheadAttention):
            _check_channels(x, _channel_dim(layer, x), self._axis)
        return x

    def _gathered(self, own: Tile) -> GatheredTokens:
        tile = gathered_tokens(own, (self._axis,))
        return GatheredTokens(tile, TokensAgain(own, tile) if self._gather_again else None)

    def after(self, layer: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(layer, nn.MultiheadAttention):  # the output is a plain tensor if the query is
            return tuple(y.full_tensor() if self._is_plain and y is not None else y for y in output)
        if self._gather or self._is_plain:
            output = _gather_channels(output, _channel_dim(layer, output), self._axis)
        # a copy, because `ReLU(inplace=True)` may come next, and torch forbids changing a view from inside a Function
        return output.full_tensor().clone() if self._is_plain else output


def _channel_dim(layer: nn.Module, tile: Tile) -> int:
    return tile.ndim - 1 - len(getattr(layer, "kernel_size", ()))


def _gather_channels(tile: Tile, dim: int, axis: str) -> Tile:
    """Return the tile with whole channels, halo rows included.

    *Sends*: its piece to the others, backward nothing; tokens that were gathered go to their rank alone, also backward.
    """
    if tile.layout.dim_axes(dim) != (axis,):
        return tile
    whole = tile.layout.replace_dim(dim, whole_dim(tile.shape[dim]))
    home = layout_before_gather(whole, (axis,), whole.dim(whole.ndim - 1))
    if home is not None:  # each rank gets all channels of its own tokens, rather than of all tokens
        return tile.with_layout(home)
    # pieces are even, and held rows the same along the axis: one all-gather, where `redistribute` would refetch halos
    local = torch.cat(stack_along_axes(tile.local, tile, (axis,)).unbind(0), dim)
    return Tile(put_in_dim_order(local, dim, tile.layout.dim(dim), tile.layout), whole, tile.mesh)


def _check_channels(tile: Tile, dim: int, axis: str) -> None:
    channel_axes = tile.layout.dim_axes(dim)
    if channel_axes not in ((), (axis,)) or any(axis in tile.layout.dim_axes(d) for d in range(tile.ndim) if d != dim):
        raise ShardingError(
            f"a layer whose weights are cut along {axis!r} takes channels (dim {dim}) that are whole or cut along "
            f"{axis!r}, which cuts no other dim, but the Tile is cut as {tile.layout.spec}; "
            f"use tile.redistribute, or another channel= in jigsaw.parallelize"
        )


# -- cutting the layers of a model ------------------------------------------------------------------------------------


def cut_channels(
    model: nn.Module, mesh: DeviceMesh, axis: str, plan: TensorPlan | None = None, gather_again: bool = False
) -> None:
    """Cut the weights of the plain linear, convolution and attention layers of `model` along `axis`, in place; those of
    transformers' `Conv1D`, too.

    Layers that `plan` names are cut as it says: the channels after a "column" stay cut, those after "gathered" do not.
    Of the others, two layers of a ``Sequential`` with only activations between them become a column and a row; the rest
    are columns whose channels are gathered. A layer stays whole when the ranks do not divide its channels. So does one
    that has groups, shares a parameter, or adds a token to keys and values.
    """
    ranks = comm.rank_count(mesh, axis)
    able = _able_layers(model)
    planned = planned_layers(model, plan or {})
    names = {module: name for name, module in model.named_modules()}
    for layer, cut in planned.items():
        _check_planned(names[layer], layer, cut, ranks, is_able=layer in able)
    if ranks == 1:
        return
    read_whole_numbers()
    line = flat_submesh(mesh, axis)
    free = [layer for layer in able if layer not in planned]
    pairs = [
        pair
        for module in model.modules()
        if type(module) is nn.Sequential
        for pair in _column_row_pairs(list(module), free, ranks)
    ]
    firsts, rows = {first for first, _ in pairs}, {second for _, second in pairs}
    firsts |= {layer for layer, cut in planned.items() if cut == "column" or _COLUMNS.fullmatch(cut)}
    rows |= {layer for layer, cut in planned.items() if cut == "row"}
    for layer in able:
        channels = _channel_counts(layer)
        # only even pieces: `fully_shard` on top of them needs that, and so does one gather of equal messages
        is_even = channels is not None and channels[0 if layer in rows else 1] % ranks == 0
        if is_even and planned.get(layer) != "whole":
            _cut_parameters(layer, layer in rows, line, _part_count(planned.get(layer)))
            if _is_turned_linear(layer):
                layer.forward = partial(_linear_of_turned, layer)
            hooks = ChannelHooks(mesh, axis, layer not in firsts, gather_again)
            layer.register_forward_pre_hook(hooks.before, with_kwargs=True)
            layer.register_forward_hook(hooks.after)


def _able_layers(model: nn.Module) -> list[nn.Module]:
    uses = Counter(p for m in model.modules() for p in m.parameters(recurse=False))
    return [m for m in model.modules() if all(uses[p] == 1 for p in m.parameters()) and _channel_counts(m)]


def found_tensor_plan(model: nn.Module, ranks: int, example: Any = None, **by_name: Any) -> FoundPairs:
    """Return a plan for a model that has none, by a run on paper with the arguments `example` (one, or a tuple)."""
    able = _able_layers(model) if ranks > 1 else []
    candidates = {
        name: PairCandidate(counts[1], len(getattr(layer, "kernel_size", ())))
        for name, layer in model.named_modules()
        if layer in able and type(layer) is not nn.MultiheadAttention and (counts := _channel_counts(layer))
    }
    by_place: Any = () if example is None else example if isinstance(example, tuple) else (example,)
    return find_pairs(model, candidates, ranks, (by_place, by_name) if by_place or by_name else None)


def completed_plan(
    model: nn.Module, plan: TensorPlan | None, ranks: int, example: Any = None, **by_name: Any
) -> tuple[TensorPlan, FoundPairs]:
    """Return a plan with what it leaves to be found, and all that was found; without a plan that is everything."""
    if plan is not None and FOUND not in plan.values():
        return plan, FoundPairs()
    pairs = found_tensor_plan(model, ranks, example, **by_name)
    completed: dict[str, str] = {}
    reasons = dict(pairs.reasons)
    for pattern, word in ({"*": FOUND} if plan is None else plan).items():
        names = list(_layers_named(model, pattern, word))
        if word == FOUND:
            cuts = {escape(name): pairs.cuts[name] for name in names if name in pairs.cuts}
        else:
            cuts = {pattern: word}
            reasons = {name: why for name, why in reasons.items() if name not in names}
        for name, cut in cuts.items():
            completed.pop(name, None)  # of two patterns the later one counts
            completed[name] = cut
    return completed, replace(pairs, reasons=reasons)


def planned_layers(model: nn.Module, plan: TensorPlan) -> dict[nn.Module, PlannedCut]:
    """Return the layers that `plan` names by patterns of `fnmatch`; of two patterns the later one counts.

    Raises: `ShardingError` for an unknown word, and a pattern that no module's name fits.
    """
    planned: dict[nn.Module, PlannedCut] = {}
    for pattern, word in plan.items():
        cut = word if _COLUMNS.fullmatch(word) else _PLANNED_CUTS.get(word)
        if cut is None:
            raise ShardingError(
                f"tensor={{{pattern!r}: {word!r}}}: a layer is cut as 'column' (its output channels, "
                f"which stay cut), '2 columns' (two parts side by side, each cut so), 'gathered' (gathered after it) "
                f"or 'row' (its input channels), stays 'whole', or is {FOUND!r}; use one of these words, or of "
                f"{', '.join(_WORDS_OF_TRANSFORMERS)}"
            )
        planned |= dict.fromkeys(_layers_named(model, pattern, word).values(), cut)
    return planned


def _layers_named(model: nn.Module, pattern: str, word: str) -> dict[str, nn.Module]:
    layers = {name: layer for name, layer in model.named_modules() if fnmatchcase(name, pattern)}
    if not layers:
        raise ShardingError(
            f"tensor={{{pattern!r}: {word!r}}}: no module has such a name; "
            f"model.named_modules() lists the names, and '*' stands for any part of one"
        )
    return layers


def _check_planned(name: str, layer: nn.Module, cut: str, ranks: int, is_able: bool) -> None:
    channels = _channel_counts(layer)
    if cut == "whole":
        return
    if not is_able or channels is None or isinstance(layer, nn.MultiheadAttention):
        raise ShardingError(
            f"tensor=: {name} ({type(layer).__name__}) cannot be cut as {cut!r}: only torch.nn.Linear, "
            f"transformers' Conv1D and convolutions without groups, whose parameters no other module shares, are cut "
            f"by a plan; "
            f"take a narrower pattern"
        )
    count, parts = channels[0 if cut == "row" else 1], _part_count(cut)
    if parts > 1 and type(layer) is not nn.Linear and not _is_turned_linear(layer):
        raise ShardingError(
            f"tensor=: {name} ({type(layer).__name__}) cannot be cut as {cut!r}: only the parts of a torch.nn.Linear, "
            f"or of transformers' Conv1D, are; say 'gathered'"
        )
    if count % (parts * ranks):
        raise ShardingError(
            f"tensor=: {name} has {count} {'input' if cut == 'row' else 'output'} channels"
            f"{f' in {parts} parts' if parts > 1 else ''}, which "
            f"{ranks} ranks do not divide; leave it out of the plan, or take another number of ranks"
        )


def _part_count(cut: str | None) -> int:
    columns = _COLUMNS.fullmatch(cut or "")
    return int(columns[1]) if columns else 1


def _channel_counts(module: nn.Module) -> tuple[int, int] | None:
    if type(module) is nn.Linear:
        return module.in_features, module.out_features
    if _is_turned_linear(module):
        inputs, outputs = cast(Tensor, module.weight).shape
        return inputs, outputs
    if type(module) in (*_CONVOLUTIONS, *_TRANSPOSED) and module.groups == 1:
        convolution = cast(nn.Conv2d, module)
        return convolution.in_channels, convolution.out_channels
    if type(module) is nn.MultiheadAttention and module.bias_k is None and not module.add_zero_attn:
        return module.embed_dim, module.embed_dim
    return None


def _is_turned_linear(module: nn.Module) -> bool:
    """Say whether it is the linear layer of GPT-2 in transformers, whose weight is [in, out]."""
    package = sys.modules.get("transformers.pytorch_utils")
    return package is not None and type(module) is getattr(package, "Conv1D", None)


def _linear_of_turned(layer: nn.Module, x: Tensor) -> Tensor:
    weight = cast(DTensor, layer.weight)
    cut_of_weight = dim_and_parts(weight.placements[0])
    assert cut_of_weight is not None, "weights of a cut layer are cut along one dim"
    dim, parts = cut_of_weight
    rows = weight.to_local().t()
    cut = [shard_of_parts(1 - dim, parts)]
    shape = weight.shape[::-1]
    turned = DTensor.from_local(rows, weight.device_mesh, cut, run_check=False, shape=shape, stride=(1, shape[0]))
    return F.linear(x, turned, cast(Tensor, layer.bias))


def _column_row_pairs(
    layers: Sequence[nn.Module], able: Sequence[nn.Module], ranks: int
) -> Generator[tuple[nn.Module, nn.Module]]:
    first: nn.Module | None = None
    for layer in layers:
        known = _channel_counts(layer) if layer in able and type(layer) is not nn.MultiheadAttention else None
        if known is not None and first is not None and known[0] % ranks == 0:
            yield first, layer
            first = None
        elif known is not None:
            first = layer if known[1] % ranks == 0 else None
        elif not isinstance(layer, _BETWEEN):
            first = None


def _cut_parameters(layer: nn.Module, is_row: bool, line: DeviceMesh, parts: int) -> None:
    if type(layer) is nn.MultiheadAttention:
        # getattr, because torch's stub says that it is never None
        is_packed = getattr(layer, "in_proj_weight", None) is not None
        has_own_heads = is_packed and layer.num_heads >= line.size() and layer.embed_dim % line.size() == 0
        _cut_dims(layer, 0, line, 3 if has_own_heads else 1)
        _cut_dims(layer.out_proj, int(has_own_heads), line, 1)  # heads stay cut until this product sums over them
    else:
        _cut_dims(layer, int(is_row), line, parts)


def _cut_dims(owner: nn.Module, channels: int, line: DeviceMesh, parts: int) -> None:
    """Cut parameters by their output channels (0), `parts` side by side, or by their input channels (1)."""
    for name, p in owner.named_parameters(recurse=False):
        is_weight = p.ndim > 1  # a bias has output channels only
        is_turned = type(owner) in _TRANSPOSED or _is_turned_linear(owner)
        dim = int((channels == 1) != is_turned) if is_weight else 0
        # where outputs are summed over ranks, the bias stays whole, and is added once
        if (is_weight or channels == 0) and p.shape[dim] % (line.size() * parts) == 0:
            setattr(owner, name, _shard_parameter(p, dim, line, parts))


def _shard_parameter(p: nn.Parameter, dim: int, line: DeviceMesh, parts: int) -> nn.Parameter:
    pieces = [part.chunk(line.size(), dim)[line.get_local_rank()] for part in p.detach().chunk(parts, dim)]
    own_part = torch.cat(pieces, dim) if parts > 1 else pieces[0].clone(memory_format=torch.contiguous_format)
    cut = DTensor.from_local(
        own_part, line, [shard_of_parts(dim, parts)], run_check=False, shape=p.shape, stride=p.stride()
    )
    return nn.Parameter(cut, requires_grad=p.requires_grad)
