"""Watcher of a run on paper, which finds pairs of column and row layers.

Every layer that takes whole channels begins as a column: each channel of its result gets a number. A watcher of torch's
functions follows the numbers through views, splits, rotary embeddings, gates and attention. Channels that a function
mixes are *tied*: they must lie on one rank. Example, six heads of four channels::

    q = linear(x)                  [2, 10, 24]      numbers 1 to 24; k has 25 to 48, v has 49 to 72
    q.view(2, 10, 6, 4)            [2, 10, 6, 4]    the same
    q @ k.transpose(-2, -1)        [2, 6, 10, 10]   one for each head: 1 to 4 are tied, and 25 to 28 to them
    weights @ v, as [2, 10, 24]    [2, 10, 24]      those of v: 49 to 52 are tied to 1, and so on
    linear(y)                                       a row of six groups of four channels, which ranks share out

A norm over all channels, a residual, the model's result and every function that is unknown here need whole channels:
their numbers are tied to 0. A layer whose channels are tied to 0 or reach no row stays as it is without a plan. What is
found decides where weights lie and what is sent, never what is computed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from jigsaw.nn.products.product import read_equation
from jigsaw.ops.pointwise import COPYING_FUNCTIONS, changes_in_place, functions_named, is_pointwise
from jigsaw.parallel.tied_numbers import (
    MOST_COPIED,
    NeedsWholeError,
    TiedNumbers,
    reshaped_numbers,
    shrunk_numbers,
    varied_dims,
    varies_along,
)
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.dispatch import without_modes

WHOLE = 0  # marks a channel that every rank needs

_RESHAPES = functions_named("view reshape flatten unflatten view_as reshape_as squeeze unsqueeze")
_MOVES = functions_named(
    "transpose permute swapaxes swapdims movedim moveaxis chunk split tensor_split split_with_sizes unbind select "
    "narrow expand t repeat_interleave __getitem__"
) | {Tensor.T.__get__, Tensor.mT.__get__}  # pyright: ignore[reportAttributeAccessIssue]
_SAME = COPYING_FUNCTIONS | functions_named("dropout dropout1d dropout2d dropout3d")
_JOINS = functions_named("cat concat concatenate")
# functions whose result has the input's shape and depends on all channels along a dim
_ALONG = functions_named("softmax log_softmax normalize")
_REDUCING = functions_named("mean sum var std amax amin logsumexp")
_NORMS = functions_named("layer_norm rms_norm")
_PRODUCTS = functions_named("matmul bmm __matmul__")
_SUMS_WITH_PRODUCTS = functions_named("addmm")


@dataclass
class FoundPairs:
    """Columns and rows by the names of layers, and why other linear layers are neither; `failure` of a call that the
    user named.
    """

    cuts: dict[str, str] = field(default_factory=dict[str, str])
    reasons: dict[str, str] = field(default_factory=dict[str, str])
    failure: str = ""


RESULT_HAS_THEM = (
    "its channels are in the model's result, so they are gathered; tensor={'*': 'found', LAYER: 'column'} leaves them "
    "cut, for a loss that takes cut classes"
)


@dataclass(frozen=True)
class PairCandidate:
    """A layer that may be cut: its channels out, and the number of dims after those of its channels."""

    channels_out: int
    dims_after: int = 0


class ChannelWatcher(TorchFunctionMode):
    """Watcher that follows the numbers of channels through a call of a model."""

    def __init__(
        self, weights: Mapping[int, str], able: Mapping[str, PairCandidate], ranks: int, whole: Collection[str]
    ) -> None:
        super().__init__()
        self._weights, self._able, self._ranks, self._whole = weights, able, ranks, frozenset(whole)
        # columns that have too few groups of channels, so that the columns paired with them cannot be cut
        self.too_few = set[str]()
        self._ties = TiedNumbers()
        self._count = 1
        self._starts: dict[str, int] = {}  # for each column, the number of its first channel
        self._rows: dict[str, list[Tensor]] = {}
        self._numbers: dict[int, Tensor] = {}
        self._active: set[int] = set()  # ids of tensors that are computed from inputs, not from weights alone
        self._alive: list[Any] = []
        self._reasons: dict[str, str] = {}

    # a call

    def begin(self, inputs: Iterator[Tensor]) -> Any:
        self._numbers, self._active, self._alive = {}, set(), []
        self._mark_active(inputs)
        return len(self._ties.pairs), self._count, dict(self._starts), {k: list(v) for k, v in self._rows.items()}

    def go_back(self, before: Any, why: str) -> None:
        """Forget a call that raised, for a reason that holds for all layers, or an empty text."""
        pairs, self._count, self._starts, self._rows = before
        del self._ties.pairs[pairs:]
        self._alive = []
        for name in self._able if why else ():
            self._reasons.setdefault(name, why)

    def end(self, out: Any) -> None:
        with without_modes():
            for x in pytree.tree_leaves(out):
                self._give_up(x, RESULT_HAS_THEM)
        self._alive = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        with without_modes():
            self._follow(func, args, kwargs, out)
        return out

    def _mark_active(self, tensors: Any) -> None:
        for x in tensors:
            self._active.add(id(x))
            self._alive.append(x)  # keep it alive, so that no other tensor gets its id

    def _follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        outs = [x for x in pytree.tree_leaves(out) if isinstance(x, Tensor)]
        numbered = [x for x in tensors if id(x) in self._numbers]
        at = 2 if func in _SUMS_WITH_PRODUCTS else 1  # the place of a layer's weight, behind its input
        layer = self._weights.get(id(args[at])) if len(args) > at else None
        if layer is not None and outs:
            self._call_layer(layer, args[at - 1], outs[0])
        elif numbered and (outs or changes_in_place(func)):
            try:
                results = _results_of(func)(self, func, args, kwargs, outs)
            except NeedsWholeError as error:
                results = []
                for x in (*numbered, *(x for x in outs if id(x) in self._numbers)):
                    self._give_up(x, f"{getattr(func, '__name__', func)}: {error}")
            for x, numbers in zip(outs, results, strict=False):
                self._numbers[id(x)] = numbers
        if layer is not None or func is F.embedding or any(id(x) in self._active for x in tensors):
            self._mark_active(outs)

    def _give_up(self, x: Any, why: str) -> None:
        numbers = self._numbers.pop(id(x), None)
        if numbers is not None:
            small = shrunk_numbers(numbers, varied_dims(numbers)).unique()
            self._ties.pairs.append((small, torch.full_like(small, WHOLE)))
            for name, start in self._starts.items():
                if start in small:
                    self._reasons[name] = why

    def _call_layer(self, name: str, x: Tensor, out: Tensor) -> None:
        of_layer = self._able[name]
        dim = out.ndim - 1 - of_layer.dims_after
        numbers = self._numbers.get(id(x))
        if numbers is not None and (varied_dims(numbers) != [dim] or name in self._starts):
            self._give_up(x, f"{name} takes them otherwise")
            numbers = None
        if numbers is not None:
            self._rows.setdefault(name, []).append(shrunk_numbers(numbers, [dim]).flatten())
        elif name in self._rows:
            self._ties.pairs += [(ids, torch.full_like(ids, WHOLE)) for ids in self._rows[name]]
        elif of_layer.channels_out % self._ranks == 0 and name not in self._whole:
            if name not in self._starts:
                self._starts[name] = self._count
                self._count += of_layer.channels_out
            start = self._starts[name]
            shape = [-1 if d == dim else 1 for d in range(out.ndim)]
            self._numbers[id(out)] = (start + torch.arange(of_layer.channels_out)).view(shape).expand(out.shape)
        else:
            self._reasons[name] = f"{self._ranks} ranks cannot share {of_layer.channels_out} channels, or their heads"

    # for results of functions: the numbers of their channels

    def numbers_of(self, x: Any) -> Tensor | None:
        return self._numbers.get(id(x))

    def pointwise(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[Tensor]:
        shape = outs[0].shape
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        numbered = [n.expand(shape) for n in map(self.numbers_of, tensors) if n is not None]
        best = self._tied(numbered)
        for x in tensors:
            varied = {d - len(shape) for d in varied_dims(best)}
            is_whole = id(x) in self._active and id(x) not in self._numbers
            if is_whole and any(-d <= x.ndim and x.shape[d] > 1 for d in varied):
                raise NeedsWholeError("it meets whole channels")
        return [best] * len(outs)

    def _tied(self, numbered: Sequence[Tensor]) -> Tensor:
        """Tie numbers of one shape, and return those of the result."""
        best = max(numbered, key=lambda n: len(varied_dims(n)))
        if any(not set(varied_dims(n)) <= set(varied_dims(best)) for n in numbered):
            raise NeedsWholeError("it meets channels along another dim")
        for n in numbered[1:]:
            self._ties.tie(numbered[0], n)
        return best

    def same(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[Tensor]:
        numbers = self.numbers_of(args[0])
        if numbers is None:
            raise NeedsWholeError("it meets channels")
        return [numbers]

    def reshape(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[Tensor]:
        (numbers,) = self.same(func, args, kwargs, outs)
        return [reshaped_numbers(numbers, outs[0].shape)]

    def move(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[Tensor]:
        (numbers,) = self.same(func, args, kwargs, outs)
        if any(isinstance(x, Tensor) for x in pytree.tree_leaves((args[1:], kwargs))):
            raise NeedsWholeError("it takes places of a tensor")
        if numbers.numel() > MOST_COPIED and func in functions_named("repeat_interleave"):
            raise NeedsWholeError("it copies many channels")
        return [x for x in pytree.tree_leaves(func(numbers, *args[1:], **kwargs)) if isinstance(x, Tensor)]

    def join(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[Tensor]:
        parts = [self.numbers_of(x) for x in args[0] if x.numel()]  # caches of keys and values begin empty
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0) % outs[0].ndim
        known = [n for n in parts if n is not None]
        if len(known) < len(parts):
            raise NeedsWholeError("it joins them with whole channels")
        if not any(varies_along(n, dim) for n in known):
            for n in known[1:]:
                self._ties.tie(shrunk_numbers(known[0], varied_dims(known[0])), shrunk_numbers(n, varied_dims(n)))
            return [known[0].narrow(dim, 0, 1).expand(outs[0].shape)]
        dims = sorted({dim, *(d for n in known for d in varied_dims(n))})
        return [torch.cat([shrunk_numbers(n, dims) for n in known], dim).expand(outs[0].shape)]

    def along(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[Tensor]:
        (numbers,) = self.same(func, args, kwargs, outs)
        if func is F.normalize:
            dims: Any = kwargs.get("dim", args[2] if len(args) > 2 else 1)
        else:
            dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        return [self._mixed_along(numbers, dims).expand(numbers.shape)]

    def norm(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[Tensor]:
        (numbers,) = self.same(func, args, kwargs, outs)
        shape = kwargs.get("normalized_shape", args[1] if len(args) > 1 else ())
        return [self._mixed_along(numbers, tuple(range(-len(shape), 0))).expand(numbers.shape)]

    def reduce(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[Tensor]:
        (numbers,) = self.same(func, args, kwargs, outs)
        mixed = self._mixed_along(numbers, kwargs.get("dim", args[1] if len(args) > 1 else None))
        return [reshaped_numbers(mixed, x.shape) for x in outs]

    def _mixed_along(self, numbers: Tensor, dims: Any) -> Tensor:
        named = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, (list, tuple)) else []
        if not named or not all(isinstance(d, int) for d in named):
            raise NeedsWholeError("it mixes all channels")
        return self._ties.tie_along(numbers, named)

    def contract(
        self, operands: Sequence[Any], labels: Sequence[Sequence[str]], result: Sequence[str], shape: torch.Size
    ) -> list[Tensor]:
        """Return the numbers of a sum of products of operands, whose dims have labels."""
        placed: list[Tensor] = []
        for x, its in zip(operands, labels, strict=True):
            numbers = self.numbers_of(x)
            if numbers is None:
                continue
            summed = [d for d, label in enumerate(its) if label not in result]
            left = self._ties.tie_along(numbers, summed) if any(varies_along(numbers, d) for d in summed) else numbers
            left = shrunk_numbers(left, [d for d in range(left.ndim) if d not in summed])
            kept = [label for label in its if label in result]
            left = left.permute(*(its.index(label) for label in (*kept, *(x for x in its if x not in result))))
            left = left.reshape(left.shape[: len(kept)])
            order = sorted(range(len(kept)), key=lambda d: result.index(kept[d]))
            left = left.permute(order)
            left = left[tuple(slice(None) if label in kept else None for label in result)]
            placed.append(left.expand(shape))
        return [self._tied(placed)]

    def product(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[Tensor]:
        a, b = args[:2]
        if a.ndim < 2 or b.ndim < 2:
            raise NeedsWholeError("it sums over channels")
        labels = [[*map(str, range(x.ndim - 2, 0, -1)), *ends] for x, ends in ((a, "mk"), (b, "kn"))]
        batch = max(labels, key=len)[:-2]
        return self.contract((a, b), labels, [*batch, "m", "n"], outs[0].shape)

    def einsum(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[Tensor]:
        equation, operands = args[0], args[1] if isinstance(args[1], (list, tuple)) else args[1:]
        if not isinstance(equation, str):
            raise NeedsWholeError("its equation is not text")
        labels, result = read_equation(equation, tuple(x.ndim for x in operands))
        return self.contract(operands, labels, result, outs[0].shape)

    def attention(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[Tensor]:
        named = inspect.signature(_attention_arguments).bind(*args, **kwargs).arguments
        operands = [named[name] for name in ("query", "key", "value")]
        mask = named.get("attn_mask")
        if mask is not None:
            operands.append(mask)
        if named.get("enable_gqa"):
            for at in (1, 2):
                times = operands[0].shape[-3] // operands[at].shape[-3]
                operands[at] = self._repeated(operands[at], times)
        batch = [*map(str, range(operands[0].ndim - 2, 0, -1))]
        ends = ("qd", "kd", "ke", "qk")
        labels = [[*batch[len(batch) - x.ndim + 2 :], *end] for x, end in zip(operands, ends, strict=False)]
        return self.contract(operands, labels, [*batch, "q", "e"], outs[0].shape)

    def _repeated(self, x: Tensor, times: int) -> Tensor:
        wide = x.repeat_interleave(times, -3)
        numbers = self.numbers_of(x)
        if id(x) in self._active:
            self._mark_active([wide])
        if numbers is not None:
            self._alive.append(wide)
            small = shrunk_numbers(numbers, [*varied_dims(numbers), x.ndim - 3])
            self._numbers[id(wide)] = small.repeat_interleave(times, -3).expand(wide.shape)
        return wide

    def as_complex(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[Tensor]:
        (numbers,) = self.same(func, args, kwargs, outs)
        return [self._ties.tie_along(numbers, [-1]).squeeze(-1).expand(outs[0].shape)]

    def as_real(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[Tensor]:
        (numbers,) = self.same(func, args, kwargs, outs)
        return [numbers.unsqueeze(-1).expand(outs[0].shape)]

    def glu(self, func: Any, args: Any, kwargs: Any, outs: Sequence[Tensor]) -> list[Tensor]:
        (numbers,) = self.same(func, args, kwargs, outs)
        one, other = numbers.chunk(2, kwargs.get("dim", args[1] if len(args) > 1 else -1))
        self._ties.tie(one, other)
        return [one]

    # what was found

    def pairs(self) -> FoundPairs:
        """Return the pairs in which each rank has the same whole groups of channels of the columns and the row."""
        while True:
            least = self._ties.groups(self._count)
            places, refused = torch.full((self._count,), -1), dict[str, tuple[Tensor, str]]()
            sizes = torch.ones(self._count, dtype=torch.int64)
            for name, calls in self._rows.items():
                groups = least[calls[0]]
                firsts = groups.unique_consecutive()
                why = "" if not any((least[ids] != groups).any() for ids in calls) else "its calls differ"
                why = why or self._why_no_row(groups, firsts, places)
                if why:
                    refused[name] = groups, why
                    if len(firsts) < self._ranks and WHOLE not in firsts:
                        self._note_too_few(least, firsts, len(groups))
                else:
                    places[firsts], sizes[firsts] = torch.arange(len(firsts)), len(firsts)
            parts = dict[str, int]()
            for name, start in self._starts.items():
                of_layer = self._able[name]
                groups = least[start : start + of_layer.channels_out]
                parts[name], why = _column_parts(places[groups], int(sizes[groups[0]]), self._ranks)
                if parts[name] > 1 and of_layer.dims_after:
                    why = "its channels are several parts"
                if why:
                    refused[name] = groups, why
            new = {name: (groups, why) for name, (groups, why) in refused.items() if (groups != WHOLE).any()}
            if not new:
                break
            for name, (groups, why) in new.items():
                self._reasons.setdefault(name, why)
                self._ties.pairs.append((groups, torch.full_like(groups, WHOLE)))
        cuts = {name: "row" for name in self._rows if name not in refused}
        cuts |= {name: word_of_columns(parts[name]) for name in self._starts if name not in refused}
        others = {
            name: self._reasons.get(name) or (refused[name][1] if name in refused else "it was not called")
            for name, layer in self._able.items()
            if name not in cuts and not layer.dims_after
        }
        return FoundPairs(cuts, others)

    def _note_too_few(self, least: Tensor, firsts: Tensor, channels: int) -> None:
        for name, start in self._starts.items():
            count = self._able[name].channels_out
            if count < channels and torch.isin(least[start : start + count], firsts).any():
                self.too_few.add(name)

    def _why_no_row(self, groups: Tensor, firsts: Tensor, places: Tensor) -> str:
        if (groups == WHOLE).any():
            return "it takes whole channels"
        known = places[firsts]
        if len(firsts) < self._ranks or len(groups) % self._ranks:
            return f"{self._ranks} ranks cannot share its {len(firsts)} groups of {len(groups)} channels"
        runs = groups.view(-1, len(groups) // len(firsts)) if len(groups) % len(firsts) == 0 else groups[None]
        if (runs != runs[:, :1]).any() or len(firsts.unique()) < len(firsts):
            return "the channels of a head do not lie together"
        if ((known != -1) & (known != torch.arange(len(firsts)))).any():
            return "another row takes the channels in another order"
        return ""


def word_of_columns(parts: int) -> str:
    """Return the word of a plan for a column layer whose result is `parts` parts side by side."""
    return "column" if parts == 1 else f"{parts} columns"


def _column_parts(places: Tensor, count: int, ranks: int) -> tuple[int, str]:
    """Return of how many parts a layer's result consists, each with `count` groups of channels; `places` of each.

    Second comes the reason why they cannot be cut between groups, or an empty text.
    """
    if (places == -1).any():
        return 0, "no row takes its channels"
    run = int((places != places[0]).int().argmax()) or len(places)
    order = torch.arange(count).repeat_interleave(run)
    if len(order) == 0 or len(places) % len(order) or (places.view(-1, len(order)) != order).any():
        return 0, "its channels lie in another order than the row takes them"
    if len(order) % ranks:
        return 0, f"{ranks} ranks cannot share its parts of {len(order)} channels"
    return len(places) // len(order), ""


def _attention_arguments(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False,
    scale: Any = None, enable_gqa: Any = False,
) -> None:  # fmt: skip
    """Names of the arguments of `F.scaled_dot_product_attention`, which has no signature."""


_RULES: tuple[tuple[frozenset[Any], Callable[..., list[Tensor]]], ...] = (
    (_RESHAPES, ChannelWatcher.reshape),
    (_MOVES, ChannelWatcher.move),
    (_SAME, ChannelWatcher.same),
    (_JOINS, ChannelWatcher.join),
    (_ALONG, ChannelWatcher.along),
    (_NORMS, ChannelWatcher.norm),
    (_REDUCING, ChannelWatcher.reduce),
    (_PRODUCTS, ChannelWatcher.product),
    (functions_named("einsum"), ChannelWatcher.einsum),
    (functions_named("scaled_dot_product_attention"), ChannelWatcher.attention),
    (functions_named("glu"), ChannelWatcher.glu),
    (functions_named("view_as_complex"), ChannelWatcher.as_complex),
    (functions_named("view_as_real"), ChannelWatcher.as_real),
)


def _results_of(func: Any) -> Callable[..., list[Tensor]]:
    for functions, rule in _RULES:
        if func in functions:
            return rule
    if is_pointwise(func):
        return ChannelWatcher.pointwise
    raise NeedsWholeError("it is not a function of single channels")
