"""Functions of `torch.masked` on tiles: masked-out values become neutral ones, then torch's own function answers.

These functions are Python code that does not dispatch, and reads ``tile.layout``, which is jigsaw's.  So each is
replaced, in `torch.masked`, by one that uses the table first.

>>> tile = jigsaw.shard(torch.arange(6.0).reshape(2, 3), jigsaw.init_mesh(lat=1), ("lat", None))
>>> torch.masked.mean(tile, 0, mask=tile != 0).local
tensor([3.0000, 2.5000, 3.5000])
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import torch
import torch.masked
import torch.nn.functional as F

from jigsaw.tile.shell_making import at_first_tile
from jigsaw.tile.tile import Tile, implements_torch, tiles_in
from jigsaw.torch_internals.private_names import replace_in_torch

Dims = int | Sequence[int] | None


def _answers_masked(
    function: Any, either: Sequence[str] = ("input", "mask")
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Answer a function of torch.masked with the decorated one, where a tile is among its arguments."""

    def register(handler: Callable[..., Any]) -> Callable[..., Any]:
        implements_torch(function, either=either)(handler)

        @wraps(function)
        def masked(*args: Any, **kwargs: Any) -> Any:
            if next(tiles_in((args, kwargs)), None) is None:
                return function(*args, **kwargs)
            return Tile.__torch_function__(function, (), args, kwargs)

        at_first_tile(partial(replace_in_torch, torch.masked, function.__name__, masked))
        return handler

    return register


def _broadcast_mask(input: Any, mask: Any) -> Any:
    """Return the mask in the shape of the input."""
    if mask.ndim > input.ndim:
        raise IndexError(f"a mask of shape {tuple(mask.shape)} has more dims than the input, {tuple(input.shape)}")
    return mask.to(torch.bool).broadcast_to(input.shape)


def _filled_outside(input: Any, mask: Any, value: float) -> Any:
    return input if mask is None else input.masked_fill(~_broadcast_mask(input, mask), value)


def _least(input: Any) -> float:
    is_whole = not (input.dtype.is_floating_point or input.dtype.is_complex)
    return torch.iinfo(input.dtype).min if is_whole else -math.inf


def _greatest(input: Any) -> float:
    return torch.iinfo(input.dtype).max if not input.dtype.is_floating_point else math.inf


def _all_dims(input: Any, dim: Dims) -> Any:
    """Return the dims that a function of torch.masked means: all for None and ()."""
    return tuple(range(input.ndim)) if dim is None or dim == () else (dim,) if isinstance(dim, int) else tuple(dim)


# -- reductions -------------------------------------------------------------------------------------------------------


@_answers_masked(torch.masked.sum)
def _masked_sum(input: Any, dim: Any = None, *, keepdim: Any = False, dtype: Any = None, mask: Any = None) -> Any:
    return torch.sum(_filled_outside(input, mask, 0), _all_dims(input, dim), bool(keepdim), dtype=dtype)


@_answers_masked(torch.masked.prod)
def _masked_prod(input: Any, dim: Any = None, *, keepdim: Any = False, dtype: Any = None, mask: Any = None) -> Any:
    out = _filled_outside(input, mask, 1)
    for d in sorted((d % max(input.ndim, 1) for d in _all_dims(input, dim)), reverse=True):
        out = out.prod(dim=d, keepdim=bool(keepdim), dtype=dtype)
    return out


def _answer_extreme(function: Any, plain_function: Any, neutral: Callable[[Any], float]) -> None:
    has_places = plain_function in (torch.argmax, torch.argmin)

    @_answers_masked(function)
    def handler(input: Any, dim: Any = None, *, keepdim: Any = False, dtype: Any = None, mask: Any = None) -> Any:
        dims = dim if has_places else _all_dims(input, dim)
        out = plain_function(_filled_outside(input, mask, neutral(input)), dims, bool(keepdim))
        return out.to(dtype=dtype or input.dtype)


_answer_extreme(torch.masked.amax, torch.amax, _least)
_answer_extreme(torch.masked.amin, torch.amin, _greatest)
_answer_extreme(torch.masked.argmax, torch.argmax, _least)
_answer_extreme(torch.masked.argmin, torch.argmin, _greatest)


def _counts(input: Any, dim: Any, keepdim: bool, mask: Any) -> Any:
    """Count how many elements each value is made of."""
    dims = _all_dims(input, dim)
    if mask is None:
        return math.prod(input.shape[d] for d in dims)
    return (torch.ones_like(input, dtype=torch.bool) & _broadcast_mask(input, mask)).sum(dims, keepdim)


@_answers_masked(torch.masked.mean)
def _masked_mean(input: Any, dim: Any = None, *, keepdim: Any = False, dtype: Any = None, mask: Any = None) -> Any:
    dtype = dtype or input.dtype
    if not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"masked mean: {dtype} is neither a floating point nor a complex dtype; pass dtype=")
    total = _masked_sum(input, dim, keepdim=keepdim, dtype=dtype, mask=mask)
    return total / _counts(input, dim, bool(keepdim), mask)


@_answers_masked(torch.masked.median)
def _masked_median(input: Any, dim: int = -1, *, keepdim: bool = False, dtype: Any = None, mask: Any = None) -> Any:
    is_float = input.dtype.is_floating_point
    values = _filled_outside(input if is_float else input.to(torch.float), mask, math.nan)
    out = torch.nanmedian(values, dim, keepdim).values
    if is_float:
        return out
    if out.isnan().any():
        raise ValueError(f"masked median of {input.dtype}: a row is masked out as a whole, and has none")
    return out.to(dtype=dtype or input.dtype)


@_answers_masked(torch.masked.logsumexp)
def _masked_logsumexp(
    input: Any, dim: Any = None, *, keepdim: bool = False, dtype: Any = None, mask: Any = None
) -> Any:
    out = torch.logsumexp(_filled_outside(input, mask, _least(input)), _all_dims(input, dim), keepdim)
    return out.to(dtype=dtype or input.dtype)


@_answers_masked(torch.masked.norm)
def _masked_norm(
    input: Any, ord: Any = 2.0, dim: Any = None, *, keepdim: Any = False, dtype: Any = None, mask: Any = None
) -> Any:
    values = _filled_outside(input, mask, math.inf if ord == -math.inf else 0)
    return torch.linalg.vector_norm(values, ord, _all_dims(input, dim), bool(keepdim), dtype=dtype or input.dtype)


@_answers_masked(torch.masked.var)
def _masked_var(
    input: Any,
    dim: Any = None,
    unbiased: bool | None = None,
    *,
    correction: Any = None,
    keepdim: Any = False,
    dtype: Any = None,
    mask: Any = None,
) -> Any:
    if unbiased is not None and correction is not None:
        raise ValueError("masked var and std: pass one of unbiased= and correction=")
    off = float(correction) if correction is not None else 1.0 if unbiased is None or unbiased else 0.0
    is_float = input.dtype.is_floating_point or input.dtype.is_complex
    dtype = dtype or (input.dtype if is_float else torch.float32)
    dims = _all_dims(input, dim)
    mean = _masked_sum(input, dims, keepdim=True, dtype=dtype, mask=mask) / _counts(input, dims, True, mask)
    from_mean = input - mean
    total = _masked_sum(from_mean * from_mean.conj(), dims, keepdim=keepdim, dtype=dtype, mask=mask)
    counts = _counts(input, dims, bool(keepdim), mask) - off
    return (total / (max(counts, 0) if mask is None else counts.clamp_min(0))).to(dtype=dtype)


@_answers_masked(torch.masked.std, either=())
def _masked_std(*args: Any, **kwargs: Any) -> Any:
    return torch.sqrt(_masked_var(*args, **kwargs))


# -- as large as the input --------------------------------------------------------------------------------------------


def _answer_along(function: Any, plain_function: Any, neutral: Callable[[Any], float]) -> None:
    @_answers_masked(function)
    def handler(input: Any, dim: int, *, dtype: Any = None, mask: Any = None) -> Any:
        return plain_function(_filled_outside(input, mask, neutral(input)), dim, dtype=dtype or input.dtype)


_answer_along(torch.masked.softmax, F.softmax, _least)
_answer_along(torch.masked.log_softmax, F.log_softmax, _least)
_answer_along(torch.masked.softmin, F.softmin, _greatest)
_answer_along(torch.masked.cumsum, torch.cumsum, lambda _: 0)
_answer_along(torch.masked.cumprod, torch.cumprod, lambda _: 1)


@_answers_masked(torch.masked.normalize)
def _masked_normalize(
    input: Any, ord: float, dim: int, *, eps: float = 1e-12, dtype: Any = None, mask: Any = None
) -> Any:
    lengths = _masked_norm(input, ord, dim, keepdim=True, dtype=dtype, mask=mask)
    return _filled_outside(input, mask, 0) / torch.maximum(lengths, torch.full((), eps, dtype=lengths.dtype))


@_answers_masked(torch.masked.logaddexp, either=("input", "other", "input_mask", "other_mask"))
def _masked_logaddexp(
    input: Any, other: Any, *, dtype: Any = None, input_mask: Any = None, other_mask: Any = None
) -> Any:
    first, second = _filled_outside(input, input_mask, _least(input)), _filled_outside(other, other_mask, _least(other))
    return torch.logaddexp(first, second).to(dtype=dtype or input.dtype)
