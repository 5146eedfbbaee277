"""Tiles made like other tiles: of zeros, ones or a number, and of random numbers that are the same on every mesh.

>>> tile = jigsaw.shard(torch.ones(2, 5), jigsaw.init_mesh(lat=1), (None, "lat"))
>>> tile.new_zeros(3, 5).shape, torch.randn_like(tile).shape, torch.bernoulli(tile).sum().item()
(torch.Size([3, 5]), torch.Size([2, 5]), 10.0)
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw.comm.graph_calls import lacks_values
from jigsaw.comm.wire_values import is_on_accelerator
from jigsaw.geometry.cut import Cut, cut_of_cells, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.changing_rows import check_no_leaf
from jigsaw.ops.random_numbers import global_normal, global_uniform
from jigsaw.ops.unknown_functions import run_unknown_function
from jigsaw.ops.whole_strides import is_whole_contiguous, order_of_results, whole_strides, with_order
from jigsaw.tile.tile import Tile, implements_torch, refusal_error, tiles_in
from jigsaw.torch_internals.autograd import assert_on_device
from jigsaw.torch_internals.dispatch import without_modes

# -- of a number ------------------------------------------------------------------------------------------------------


def layout_like(tile: Tile, shape: Sequence[int]) -> Layout:
    """Return the layout of a new tensor of `shape`.  Counted from the last dim, each that has the size of the tile's
    lies as the tile's, without halo.  One that has the size of the cells which an index picked lies as these (zeros
    for `scatter_add_`).  All others are whole.
    """
    layout = tile.layout.without_halo()
    dims: list[Sequence[Cut]] = []
    for d, n in enumerate(shape, layout.ndim - len(shape)):
        cells = None if d < 0 else layout.dim(d) if n == layout.shape[d] else cut_of_cells(n, layout.dim(d))
        dims.append(cells or (whole_dim(n),))
    return Layout.from_dims(dims, layout.axes)


def _new_tile(tile: Tile, sizes: Sequence[Any], make: Callable[..., Tensor], named: dict[str, Any]) -> Tile:
    named = {"dtype": tile.dtype, "device": tile.device} | {k: v for k, v in named.items() if v is not None}
    named.pop("layout", None)
    layout = layout_like(tile, tuple(map(operator.index, sizes)))  # a size may be a tensor of no dims
    return Tile(make(layout.local_shape(tile.coordinate), **named), layout, tile.mesh)


def _answer_new(name: str, make: Callable[..., Tensor]) -> None:
    def answer(self: Tile, *size: Any, **named: Any) -> Tile:
        sizes = (named.pop("size"),) if "size" in named else size
        sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Sequence) else sizes
        return _new_tile(self, sizes, make, named)

    implements_torch(getattr(Tensor, name))(answer)


_answer_new("new_zeros", torch.zeros)
_answer_new("new_ones", torch.ones)
_answer_new("new_empty", torch.empty)


@implements_torch(Tensor.new_full, either=("fill_value",))
def _new_full(self: Tile, size: Sequence[int], fill_value: Any, **named: Any) -> Tile:
    def make(shape: Sequence[int], **options: Any) -> Tensor:
        return torch.full(tuple(shape), fill_value, **options)

    return _new_tile(self, size, make, named)


@implements_torch(Tensor.new_tensor, either=("self", "data"))
def _new_tensor(self: Any, data: Any, **named: Any) -> Any:
    """Return a tile that nothing cuts, because data is whole on every rank; of the tile's dtype, as in torch."""
    if not isinstance(self, Tile):
        return run_unknown_function(Tensor.new_tensor, self, data, **named)
    named = {"dtype": self.dtype, "device": self.device} | {k: v for k, v in named.items() if v is not None}
    if isinstance(data, Tile):
        copied = data.clone().detach().to(named["dtype"])
        return copied.requires_grad_(bool(named.get("requires_grad")))
    x = torch.empty(0, dtype=named["dtype"], device=named["device"]).new_tensor(data, **named)
    return Tile(x, Layout.of(x.shape, (None,) * x.ndim, self.layout.axes), self.mesh)


@implements_torch(Tensor.fill_, torch.fill_, either=("input", "value"))
def _fill_in_place(input: Any, value: Any) -> Any:
    if not isinstance(input, Tile) or isinstance(value, (Tile, Tensor)):
        input[...] = value  # write it like any value, so that it gets its gradient
        return input
    check_no_leaf(Tensor.fill_, input)
    input.local.fill_(value)
    return input


@implements_torch(Tensor.zero_, torch.zero_)
def _zero_in_place(input: Tile) -> Tile:
    return _fill_in_place(input, 0)


# -- of random numbers ------------------------------------------------------------------------------------------------


def _like(input: Tile, values: Tensor, named: dict[str, Any]) -> Tile:
    values = values.to(named.get("dtype") or input.dtype)
    if named.get("requires_grad"):
        values.requires_grad_()
    tile = Tile(values, input.layout, input.mesh)
    if named.get("memory_format", torch.preserve_format) is not torch.preserve_format or is_whole_contiguous(input):
        return tile
    return with_order(tile, order_of_results(input.layout.shape, ((input.layout.shape, whole_strides(input)),)))


def _uniform_numbers(tile: Tile, dtype: torch.dtype, low: float = 0.0, high: float = 1.0) -> Tensor:
    """Draw numbers from `low` to below `high`, also once they are rounded to the dtype; of complex ones both parts."""
    if dtype.is_complex:
        return torch.complex(*(_uniform_numbers(tile, dtype.to_real(), low, high) for _ in range(2)))
    drawn = global_uniform(tile, tile.ndim)
    drawn = drawn if dtype == torch.float64 else drawn.clamp_max(1 - torch.finfo(dtype).eps)
    return drawn * (high - low) + low


def _normal_numbers(tile: Tile, dtype: torch.dtype, mean: float = 0.0, std: float = 1.0) -> Tensor:
    """Draw normal numbers; of complex ones each part has the mean, and half of the variance."""
    if dtype.is_complex:
        return torch.complex(*(_normal_numbers(tile, torch.float64, mean, std * math.sqrt(0.5)) for _ in range(2)))
    return global_normal(tile, tile.ndim) * std + mean


@implements_torch(torch.rand_like)
def _rand_like(input: Tile, **named: Any) -> Tile:
    """Draw uniform numbers in [0, 1), a function of the global position.  *Sends*: one seed of 8 bytes."""
    return _like(input, _uniform_numbers(input, named.get("dtype") or input.dtype), named)


@implements_torch(torch.randn_like)
def _randn_like(input: Tile, **named: Any) -> Tile:
    """Draw standard normal numbers, as `torch.rand_like`."""
    return _like(input, _normal_numbers(input, named.get("dtype") or input.dtype), named)


@implements_torch(torch.randint_like)
def _randint_like(input: Tile, *bounds: int, low: int | None = None, high: int | None = None, **named: Any) -> Tile:
    """Draw integers from `low` to below `high`, as `torch.rand_like`."""
    if len(bounds) == 2:
        low, high = bounds
    elif bounds:
        low, high = (0, bounds[0]) if high is None else (bounds[0], high)
    return _like(input, _whole_numbers(input, low or 0, high or 0), named)


def _whole_numbers(input: Tile, low: int, high: int) -> Tensor:
    if high <= low:
        raise RuntimeError(f"random whole numbers from {low} to below {high}: there are none")
    return (global_uniform(input, input.ndim) * (high - low)).floor().to(torch.int64) + low


@implements_torch(torch.bernoulli)
def _bernoulli(input: Tile, p: float | None = None, *, generator: Any = None) -> Tile:
    """Return 1 with the probability that `input` has there (or `p`), else 0, as `torch.rand_like`."""
    _check_generator(torch.bernoulli, input, generator)
    if p is not None and not 0 <= p <= 1:
        raise RuntimeError(f"bernoulli expects p to be in [0, 1], but got p={p}")
    chance = input.local.detach() if p is None else p
    _check_drawn_from(chance, lambda x: (x >= 0) & (x <= 1), "bernoulli expects probabilities in [0, 1]")
    return Tile((global_uniform(input, input.ndim) < chance).to(input.dtype), input.layout, input.mesh)


def _check_drawn_from(values: Any, is_right: Callable[[Tensor], Tensor], rule: str) -> None:
    """Check the values of a distribution where torch does, which raises on the rank that has wrong ones."""
    if not isinstance(values, Tensor):
        return
    are_right = is_right(values.detach())
    if is_on_accelerator(values) or lacks_values():  # check on the device, so that the host does not wait
        assert_on_device(are_right.all())
    elif not are_right.all():
        raise RuntimeError(f"{rule}, and this rank has {values[~are_right][0]:g}")


def _check_generator(function: Any, tile: Tile, generator: Any) -> None:
    if generator is not None:
        raise refusal_error(
            function, tile, "a generator of one device draws other numbers on every mesh", "use torch.manual_seed"
        )


@implements_torch(torch.normal, either=("mean", "std"))
def _normal(mean: Any, std: Any = 1.0, *, generator: Any = None) -> Any:
    first = next(tiles_in((mean, std)))
    _check_generator(torch.normal, first, generator)
    _check_drawn_from(std.local if isinstance(std, Tile) else std, lambda x: x >= 0, "normal expects std >= 0")
    spread = mean * 0 + std if isinstance(mean, Tile) else std * 0 + mean
    with torch.no_grad():
        drawn = mean + std * torch.randn_like(spread)
    drawn = drawn + 0 * spread if spread.requires_grad else drawn  # torch's draws have zero gradients
    return drawn.contiguous()


def _answer_random_fill(name: str, draw: Callable[..., Tensor]) -> None:
    method = getattr(Tensor, name)

    def fill(self: Any, *args: Any, generator: Any = None, **named: Any) -> Any:
        if not isinstance(self, Tile):
            return run_unknown_function(method, self, *args, generator=generator, **named)
        _check_generator(method, self, generator)
        check_no_leaf(method, self)
        if not any(isinstance(value, Tensor) for value in (*args, *named.values())):
            with without_modes():  # an empty tensor, only to raise torch's own errors
                method(torch.empty(0, dtype=self.dtype, device=self.device), *args, **named)
        # copied in sight of autograd, so that the old values get no gradient
        self.local.copy_(draw(self, *args, **named))
        return self

    implements_torch(method, either=("self",))(fill)


def _draw_uniform(tile: Tile, a: float = 0.0, b: float = 1.0, **named: float) -> Tensor:
    return _uniform_numbers(tile, tile.dtype, named.get("from", a), named.get("to", b))


def _draw_normal(tile: Tile, mean: float = 0.0, std: float = 1.0) -> Tensor:
    return _normal_numbers(tile, tile.dtype, mean, std)


def _draw_log_normal(tile: Tile, mean: float = 1.0, std: float = 2.0) -> Tensor:
    return _draw_normal(tile, mean, std).exp()


def _draw_exponential(tile: Tile, lambd: float = 1.0) -> Tensor:
    return -torch.log1p(-global_uniform(tile, tile.ndim)) / lambd


def _draw_whole(tile: Tile, *bounds: int, to: int | None = None, **named: int) -> Tensor:
    low = named.get("from", bounds[0] if len(bounds) == 2 else 0)
    high = bounds[-1] if bounds else to
    if high is None:  # up to the largest integer that the dtype holds exactly
        is_float = tile.dtype.is_floating_point
        high = min(int(2 / torch.finfo(tile.dtype).eps), 2**53) if is_float else min(torch.iinfo(tile.dtype).max, 2**53)
    return _whole_numbers(tile, low, high)


def _draw_chance(tile: Tile, p: Any = 0.5) -> Tensor:
    chance = p.local if isinstance(p, Tile) else p
    _check_drawn_from(chance, lambda x: (x >= 0) & (x <= 1), "bernoulli_ expects probabilities in [0, 1]")
    return global_uniform(tile, tile.ndim) < chance


_answer_random_fill("uniform_", _draw_uniform)
_answer_random_fill("normal_", _draw_normal)
_answer_random_fill("exponential_", _draw_exponential)
_answer_random_fill("random_", _draw_whole)
_answer_random_fill("bernoulli_", _draw_chance)
_answer_random_fill("log_normal_", _draw_log_normal)


# -- dropout that keeps mean and variance, and other noise ------------------------------------------------------------

_ALPHA = 1.7580993408473766  # minus the limit of selu: the value of dropped elements (arXiv 1706.02515)


def _answer_alpha_dropout(function: Any, functional: Any, dims: int | None) -> None:
    def handler(
        input: Tile, p: float = 0.5, training: bool = False, inplace: bool = False, train: bool = False
    ) -> Tile:
        if not 0 <= p <= 1:
            raise ValueError(f"dropout probability has to be between 0 and 1, but got {p}")
        if not (training or train) or p == 0:
            return input
        if p == 1:
            return input.mul_(0) if inplace else input * 0
        factor = (global_uniform(input, dims or input.ndim) >= p).to(input.dtype)  # 0 where an element is dropped
        scale = 1 / math.sqrt((_ALPHA**2 * p + 1) * (1 - p))
        out = Tile(input.local * (factor * scale) + (factor - 1 + p) * (_ALPHA * scale), input.layout, input.mesh)
        return input.copy_(out) if inplace else out

    implements_torch(function, functional)(handler)


_answer_alpha_dropout(torch.alpha_dropout, F.alpha_dropout, None)
_answer_alpha_dropout(torch.feature_alpha_dropout, F.feature_alpha_dropout, 2)


@implements_torch(F.rrelu, torch.rrelu)
def _rrelu(
    input: Tile, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False, inplace: bool = False
) -> Any:
    """Return x where x > 0, else x times a number from `lower` to `upper`, which is random where `training`."""
    if lower > upper:
        raise RuntimeError(f"rrelu: lower={lower} should be less than or equal to upper={upper}")
    slope: Any = (lower + upper) / 2
    if training:
        slope = _like(input, _uniform_numbers(input, input.dtype, lower, upper), {})
    out = input.where(input > 0, input * slope)  # `> 0`, because at 0 the gradient is the slope
    return input.copy_(out) if inplace else out


@implements_torch(F.rrelu_)
def _rrelu_in_place(input: Tile, lower: float = 1 / 8, upper: float = 1 / 3, training: bool = False) -> Any:
    return _rrelu(input, lower, upper, training, inplace=True)


@implements_torch(F.gumbel_softmax)
def _gumbel_softmax(logits: Tile, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1) -> Any:
    """Return the softmax of logits with Gumbel noise by global position (Jang et al., arXiv 1611.01144)."""
    noise = -torch.log(-torch.log(global_uniform(logits, logits.ndim).clamp_min(2.0**-54)))
    noisy = Tile(noise.to(logits.dtype), logits.layout, logits.mesh)
    soft = ((logits + noisy) / tau).softmax(dim)
    if not hard:
        return soft
    still = soft.detach()
    return (still == still.amax(dim, keepdim=True)).to(soft.dtype) - still + soft


@implements_torch(torch.multinomial)
def _multinomial(input: Tile, num_samples: int, replacement: bool = False, *, generator: Any = None) -> Any:
    """Draw places by their weights along the last dim, the same on every mesh.  They are those of the largest weights
    over exponential numbers, which are drawn by global position.
    """
    if input.ndim not in (1, 2) or num_samples < 1 or (not replacement and num_samples > input.shape[-1]):
        raise RuntimeError(
            f"multinomial: {num_samples} samples (replacement={replacement}) of a Tile of shape {tuple(input.shape)}; "
            "it takes 1 or 2 dims, and no more samples than places without replacement"
        )
    _check_drawn_from(
        input.local, lambda x: (x >= 0) & (x < torch.inf), "multinomial expects weights from 0 to below infinity"
    )
    if not input.layout.is_cut(input.ndim - 1):
        _check_drawn_from(input.local.sum(-1), lambda x: x > 0, "multinomial expects a weight above 0 in each row")
    weights: Any = input.detach()
    if replacement:
        weights = weights.unsqueeze(-2).expand(*input.shape[:-1], num_samples, input.shape[-1])
    waits = -torch.log1p(-global_uniform(weights, weights.ndim)) + 2.0**-60
    raced = weights / Tile(waits.to(weights.dtype), weights.layout, weights.mesh)
    return raced.argmax(-1) if replacement else raced.topk(num_samples, -1).indices
