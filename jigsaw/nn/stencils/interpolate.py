"""Interpolation along cut dims: torch's nearest, nearest-exact, linear, bilinear, trilinear, bicubic and area modes.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.randn(2, 3, 9, 16), mesh, (None, None, "lat", None))
>>> torch.nn.functional.interpolate(tile, scale_factor=2, mode="bilinear").shape
torch.Size([2, 3, 18, 32])
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw.comm.exchange import memory_format_of
from jigsaw.comm.wire_values import values_on_device
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import FrozenValue
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.geometry.stencil_rules import InterpolationTable
from jigsaw.nn.stencils.pool import adaptive_avg_pool
from jigsaw.nn.stencils.stencil import (
    DimStencil,
    StencilPlan,
    empty_result,
    entry_per_dim,
    gather_input_rows,
    is_cut_or_haloed,
    nonempty_like,
    plan_stencil,
    resized_layout,
    single_cut,
)
from jigsaw.tile.tile import Tile, implements_torch, in_own_memory, refusal_error
from jigsaw.torch_internals.dispatch import without_modes

_NEAREST = ("nearest", "nearest-exact")
_LINEAR = ("linear", "bilinear", "trilinear")
_ANTIALIASED = ("bilinear", "bicubic")
_LARGEST_DENOMINATOR = (
    8  # the plain op runs on whole blocks of a ratio's denominator; rarer ratios are gathered row by row
)


@dataclass(frozen=True, eq=False)
class ResampledDim(FrozenValue):
    """One dim from `n` to `m` rows, which are n / m or, where a `scale` counts, 1 / scale input rows apart."""

    n: int
    m: int
    mode: str
    align_corners: bool = False
    scale: float | None = None
    antialias: bool = False

    @property
    def pace(self) -> float:
        if self.align_corners:
            return (self.n - 1) / (self.m - 1) if self.m > 1 else 0.0
        return self.n / self.m if self.scale is None else 1 / self.scale

    @property
    def ratio(self) -> tuple[int, int]:
        g = math.gcd(self.n, self.m)
        return self.n // g, self.m // g

    @property
    def is_regular(self) -> bool:
        """True where a block that begins at a multiple of the ratio interpolates alone as it does within the whole."""
        p, _ = self.ratio
        has_ratio = self.scale is None and not self.antialias and p <= _LARGEST_DENOMINATOR
        return has_ratio and not (self.align_corners and self.n != self.m)


@lru_cache(maxsize=512)
def _input_rows_read(r: ResampledDim, dtype: torch.dtype) -> tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]:
    """Return for every output row the first and last input row that it reads, and the weight of the second of two."""
    if r.mode in _NEAREST:
        # torch finds the row in floating point, so ask torch, to get the same rounding
        options: dict[str, Any] = {"size": r.m} if r.scale is None else {"scale_factor": r.scale}
        with without_modes():  # while a graph is traced, tensors have no values
            rows = torch.arange(r.n, dtype=dtype if dtype in (torch.float32, torch.float64) else torch.float32)
            first = tuple(int(i) for i in F.interpolate(rows[None, None], mode=r.mode, **options)[0, 0])
        return first, first, (0.0,) * r.m
    if r.antialias:
        reads = [(taps[0][0], taps[-1][0]) for taps in _antialias_taps(r)]
        return tuple(i for i, _ in reads), tuple(i for _, i in reads), (0.0,) * r.m
    source = [o * r.pace if r.align_corners else (o + 0.5) * r.pace - 0.5 for o in range(r.m)]
    if r.mode == "bicubic":
        at = [math.floor(s) for s in source]
        return tuple(max(i - 1, 0) for i in at), tuple(min(i + 2, r.n - 1) for i in at), (0.0,) * r.m
    source = [max(s, 0.0) for s in source]
    first = tuple(min(int(s), r.n - 1) for s in source)
    last = tuple(min(i + 1, r.n - 1) for i in first)
    return first, last, tuple(min(s - i, 1.0) for s, i in zip(source, first, strict=True))


@lru_cache(maxsize=512)
def _interpolation_table(r: ResampledDim, dtype: torch.dtype) -> InterpolationTable:
    first, last, _ = _input_rows_read(r, dtype)
    if not _can_run_plain(r, dtype):
        return InterpolationTable(first, last)
    p = r.ratio[0]
    return InterpolationTable(tuple(i - i % p for i in first), tuple(i - i % p + p - 1 for i in last))


@lru_cache(maxsize=512)
def _can_run_plain(r: ResampledDim, dtype: torch.dtype) -> bool:
    """Say whether the plain op on blocks gives the same; for nearest, which finds rows in floating point, try it."""
    if not r.is_regular or r.mode not in _NEAREST:
        return r.is_regular
    p, q = r.ratio
    first, _, _ = _input_rows_read(r, dtype)
    block, _, _ = _input_rows_read(ResampledDim(p, q, r.mode), dtype)
    return all(i == o // q * p + block[o % q] for o, i in enumerate(first))


@implements_torch(F.interpolate)
def interpolate(
    input: Tile,
    size: int | Sequence[int] | None = None,
    scale_factor: float | Sequence[float] | None = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Tile:
    """Return y[o] = `input` interpolated at (o + 0.5) n / m - 0.5 (or as torch does in the mode), n rows to m along
    each dim.

    *Shapes*: ``[batch, channel, *space]``, global as torch; per rank the output is cut at ceil(point m / n).
    *Sends*: forward, the one or two rows a side that the ends of a piece read (with `antialias`, once or twice n / m
    rows). Backward, their gradients.
    *Raises*: `ShardingError` along cut dims for other modes, and for integers that torch rounds along each dim.
    """
    dims = input.ndim - 2
    needed = _LINEAR.index(mode) + 1 if mode in _LINEAR else 2 if mode == "bicubic" else dims
    if dims != needed:
        raise NotImplementedError(f"Got {input.ndim}D input, but {mode} mode needs {needed + 2}D input")
    if mode in _NEAREST and align_corners is not None:
        raise ValueError(f"align_corners={align_corners} goes with the linear and cubic modes, not with {mode}")
    if not any(is_cut_or_haloed(input.layout, d) for d in range(2, input.ndim)):
        x = input.local if input.local.numel() else nonempty_like(input.local)
        y = F.interpolate(x, size, scale_factor, mode, align_corners, recompute_scale_factor, antialias)
        out = resized_layout(input.layout, dict(enumerate(y.shape[2:], 2)))
        if x is not input.local:
            # for one window torch calls mean, which saves nothing
            saved = int(mode == "area" and any(n != 1 for n in y.shape[2:]))
            y = empty_result(out.local_shape(input.coordinate), input.local, saved=saved)
        return Tile(y, out, input.mesh)
    sizes, scales = _sizes_and_scales(
        input, size, scale_factor, bool(recompute_scale_factor or align_corners) or mode == "area"
    )
    if mode == "area":
        return adaptive_avg_pool(input, dims, sizes)
    is_known = mode in (*_NEAREST, *_LINEAR, "bicubic") and not (antialias and (mode not in _ANTIALIASED or dims != 2))
    is_rounded = mode not in _NEAREST and not (input.dtype.is_floating_point or input.dtype.is_complex)
    if is_rounded or not is_known:
        options = f"mode={mode!r}, antialias={antialias} along {dims} dims"
        raise refusal_error(
            interpolate,
            input,
            f"{options} is not answered on a cut dim" + (f" of {input.dtype}" if is_rounded else ""),
            "redistribute so that the spatial dims are whole" + (", or use tile.float()" if is_rounded else ""),
        )
    along = tuple(sizes), tuple(scales)
    resampled = _dims_to_resample(input.layout.shape[2:], *along, mode, bool(align_corners), antialias)
    to = _plan_resampling(input.layout, resampled, input.dtype, input.coordinate)
    x = gather_input_rows(input, to.rows)
    if to.rows.is_empty:
        return Tile(empty_result(to.rows.shape, x, saved=0), to.rows.out, input.mesh)
    return Tile(in_own_memory(_resample_local(x, to), input), to.rows.out, input.mesh)


@lru_cache(maxsize=512)
def _dims_to_resample(
    rows: tuple[int, ...],
    sizes: tuple[int, ...],
    scales: tuple[float | None, ...],
    mode: str,
    align_corners: bool,
    antialias: bool,
) -> tuple[ResampledDim, ...]:
    return tuple(
        ResampledDim(n, m, mode, align_corners, scale, antialias)
        for n, m, scale in zip(rows, sizes, scales, strict=True)
    )


def _sizes_and_scales(
    input: Tile, size: int | Sequence[int] | None, scale_factor: float | Sequence[float] | None, recompute: bool
) -> tuple[list[int], list[float | None]]:
    """Return the output size of every spatial dim, and its scale if it is not their ratio, by torch's rules."""
    rows = list(input.shape[2:])
    if (size is None) == (scale_factor is None):
        raise ShardingError(
            f"interpolate needs one of size and scale_factor, got size={size}, scale_factor={scale_factor}"
        )
    scales: list[float | None] = [None] * len(rows)
    if size is not None:
        sizes = list(entry_per_dim(size, len(rows), "size"))
    else:
        factors = [scale_factor] * len(rows) if isinstance(scale_factor, (int, float)) else list(scale_factor or ())
        sizes = [int(n * s) for n, s in zip(rows, factors, strict=True)]
        scales = [None if recompute or m == n * s else s for n, m, s in zip(rows, sizes, factors, strict=True)]
    if min(sizes) < 1:
        raise ShardingError(
            f"interpolate of spatial dims {tuple(rows)} to {tuple(sizes)}: every size must be at least 1"
        )
    return sizes, scales


@dataclass(frozen=True)
class ResamplingPlan:
    """One rank's side: needed rows, sizes that the plain op makes of them (None: no call), the rows (dim, start,
    length) to keep, and dims that go row by row: how, the first input row at hand, which rows to make.
    """

    rows: StencilPlan
    sizes: list[int] | None
    how: dict[str, Any]
    crops: list[tuple[int, int, int]]
    by_row: list[tuple[int, ResampledDim, int, tuple[int, int]]]


@lru_cache(maxsize=512)
def _plan_resampling(
    layout: Layout, resampled: tuple[ResampledDim, ...], dtype: torch.dtype, coord: MeshCoordinate
) -> ResamplingPlan:
    by_dim = dict(enumerate(resampled, 2))
    for d in by_dim:
        single_cut(layout, d, "interpolate")
    along = tuple(DimStencil(d, _interpolation_table(r, dtype)) for d, r in by_dim.items())
    to = plan_stencil(layout, along, coord, "interpolate")
    touched_dims = {dim: (derived.needs[piece], derived.out.held[piece]) for dim, derived, piece in to.derived}
    rows = {d: touched_dims[d][0] if d in touched_dims else (0, r.n) for d, r in by_dim.items()}
    counts = [stop - start for start, stop in rows.values()]
    sizes, crops = list(counts), list[tuple[int, int, int]]()
    by_row: list[tuple[int, ResampledDim, int, tuple[int, int]]] = []
    for d, r in by_dim.items():
        p, q = r.ratio
        need, out = touched_dims.get(d, ((0, r.n), (0, r.m)))
        if d not in touched_dims and r.scale is None:
            sizes[d - 2] = r.m
        elif d in touched_dims and _can_run_plain(r, dtype):
            sizes[d - 2] = (need[1] - need[0]) // p * q
            crops.append((d, out[0] - need[0] // p * q, out[1] - out[0]))
        else:
            by_row.append((d, r, need[0], out))
    first = resampled[0]
    align = None if first.mode in _NEAREST else first.align_corners
    options = {"mode": first.mode, "align_corners": align, "antialias": first.antialias}
    return ResamplingPlan(to, None if sizes == counts else sizes, options, crops, by_row)


def _resample_local(x: Tensor, to: ResamplingPlan) -> Tensor:
    memory_format = memory_format_of(x) if to.by_row else None
    if to.sizes is not None:
        x = _interpolate_plain(x, to.sizes, to.how, [d for d, *_ in to.by_row])
    for d, start, length in to.crops:
        if x.shape[d] != length:
            x = x.narrow(d, start, length)
    for d, r, low, out in to.by_row:
        x = _interpolate_by_row(x, d, r, low, out)
    # picked rows lose the memory format of channels last
    return x if memory_format is None else x.contiguous(memory_format=memory_format)


def _interpolate_plain(x: Tensor, sizes: Sequence[int], options: dict[str, Any], later: Sequence[int]) -> Tensor:
    """Interpolate by torch, except along the dims `later`, whose rows stay."""
    # with antialias torch's kernel repeats a single column's first value, so a rank's single column is doubled
    thin = [d for d in later if options["antialias"] and x.shape[d] == 1]
    for d in thin:
        x = x.repeat_interleave(2, d)
    y = F.interpolate(x, [2 if d in thin else size for d, size in enumerate(sizes, 2)], **options)
    for d in thin:
        y = y.narrow(d, 0, 1)
    return y


def _interpolate_by_row(x: Tensor, dim: int, r: ResampledDim, low: int, out: tuple[int, int]) -> Tensor:
    """Return y[o] = x[first] + w (x[last] - x[first]) along one dim, or the sum of more rows."""
    if r.mode == "bicubic" or r.antialias:
        return _sum_weighted_rows(x, dim, r, low, out)
    first, last, weights = (values[out[0] : out[1]] for values in _input_rows_read(r, x.dtype))
    rows = values_on_device(first, torch.int64, x.device) - low
    y = x.index_select(dim, rows)
    if r.mode in _NEAREST:
        return y
    w = values_on_device(weights, x.dtype, x.device).reshape(-1, *(1,) * (x.ndim - dim - 1))
    return y.lerp(x.index_select(dim, values_on_device(last, torch.int64, x.device) - low), w)


@lru_cache(maxsize=512)
def _cubic_taps(r: ResampledDim) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Return for every output row the four input rows that it reads, with their weights (Keys, a = -0.75, as torch)."""
    taps: list[tuple[tuple[int, float], ...]] = []
    for o in range(r.m):
        at = o * r.pace if r.align_corners else (o + 0.5) * r.pace - 0.5
        first = math.floor(at)
        t = at - first
        near = [(1.25 * u - 2.25) * u * u + 1 for u in (t, 1 - t)]
        far = [((-0.75 * u + 3.75) * u - 6) * u + 3 for u in (1 + t, 2 - t)]
        rows = (min(max(first + k, 0), r.n - 1) for k in range(-1, 3))
        taps.append(tuple(zip(rows, (far[0], near[0], near[1], far[1]), strict=True)))
    return tuple(taps)


@lru_cache(maxsize=512)
def _antialias_taps(r: ResampledDim) -> tuple[tuple[tuple[int, float], ...], ...]:
    """Return for every output row the input rows under the filter, with weights, as torch's
    ``_compute_indices_min_size_weights_aa``: at least as wide as an output row (Keys, a = -0.5, for bicubic).
    """
    reach, weigh = (2, _keys_filter) if r.mode == "bicubic" else (1, _hat_filter)
    width = max(r.pace, 1.0)
    taps: list[tuple[tuple[int, float], ...]] = []
    for o in range(r.m):
        center = r.pace * (o + 0.5)
        start = max(int(center - reach * width + 0.5), 0)
        stop = min(int(center + reach * width + 0.5), r.n)
        weights = [weigh((i - center + 0.5) / width) for i in range(start, stop)]
        total = sum(weights) or 1.0
        taps.append(tuple((i, w / total) for i, w in enumerate(weights, start)))
    return tuple(taps)


def _hat_filter(t: float) -> float:
    return max(1 - abs(t), 0.0)


def _keys_filter(t: float) -> float:
    t = abs(t)
    if t < 1:
        return (1.5 * t - 2.5) * t * t + 1
    return ((-0.5 * t + 2.5) * t - 4) * t + 2 if t < 2 else 0.0


def _sum_weighted_rows(x: Tensor, dim: int, r: ResampledDim, low: int, out: tuple[int, int]) -> Tensor:
    """Sum the rows of each output row times their weights; one with fewer rows takes its first again, times 0."""
    reads = (_antialias_taps if r.antialias else _cubic_taps)(r)[out[0] : out[1]]
    most = max(map(len, reads))
    rows_read = [(*t, *((t[0][0], 0.0),) * (most - len(t))) for t in reads]
    taps = values_on_device(rows_read, torch.float64, x.device)
    shape = (-1, *(1,) * (x.ndim - dim - 1))
    y: Tensor | None = None
    for k in range(most):
        part = x.index_select(dim, taps[:, k, 0].long() - low) * taps[:, k, 1].to(x.dtype).reshape(shape)
        y = part if y is None else y + part
    assert y is not None  # each output row reads at least one input row
    return y
