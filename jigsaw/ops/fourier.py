"""Fourier transforms: every transform of `torch.fft`, over dims that are cut or not.

A transform along a dim needs the whole of it, and one over several dims is one along each.  So the axes that cut a dim
go to another dim by one exchange (a pencil decomposition), and every rank transforms its own rows with torch.  The
layout of the result follows from that of the input alone:

- *No transformed dim is cut*: each rank by itself, nothing is sent.
- *Real, over several dims* (``rfftn irfftn hfftn ihfftn`` and their 2-d names): the axes go from one transformed dim
  to another whose turn has passed, and **stay** there.  The half spectrum is cut along its modes, so that weights of
  modes multiply it, and low modes are sliced off it, without a message.  The inverse does the same backwards and
  brings the result home, because the cut of the modes remembers (`Cut.source`) where the dims were cut.  So
  ``x + irfftn(f(rfftn(x)))`` meets, and costs one exchange each way where one dim is cut.
- *Complex, or along one dim*: the result is cut as the input was (``x + fft(x).real`` meets).  The axes visit a dim
  that is not transformed, all dims are transformed there, and the axes come back: two exchanges.  The dim they visit
  is the one whose rows they share out best, the first of those (batch, then channels).  Where none has a row for each
  rank, they visit the other transformed dims one after the other; where no dim has two rows, every rank gathers what
  is to be transformed and keeps its own rows.

Four ranks on lat=4, x [1, 8, 32, 64] cut at rows 0, 8, 16, 24, 32: ``rfft2(x)`` transforms the rows of 64 here, which
makes 33 columns of modes; one exchange makes [1, 8, 8, 33] to [1, 8, 32, 9 or 8], 3/4 of which other ranks had; columns
are transformed there.  Of ``x_ft[..., :12, :12]`` the first rank has modes 0 to 8 and the second 9 to 11; they multiply
them by their own part of a weight [8, 8, 12, 12].  ``irfft2`` transforms the columns, takes the rows 0, 8, 16, 24, 32
back, and transforms them.  On lat=2, lon=2, x cut in both: lon goes to the rows of 32 (now 8 a rank), then lat and lon
together to the 33 columns; ``irfft2`` takes them to rows of 8, and lon from there back to the columns of 64.

>>> tile = jigsaw.shard(torch.randn(1, 8, 33, 64), jigsaw.init_mesh(lat=1, lon=1), (None, None, "lat", "lon"))
>>> modes = torch.fft.rfft2(tile)
>>> modes.shape, torch.allclose(torch.fft.irfft2(modes, s=(33, 64)), tile, atol=1e-5)
(torch.Size([1, 8, 33, 33]), True)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw.comm.exchange import redistribute_rows
from jigsaw.comm.graph_calls import lacks_values
from jigsaw.geometry import transfers
from jigsaw.geometry.cut import Cut, cut_points, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.matmul_grid import refine_cut
from jigsaw.ops.reductions import reduced_dims
from jigsaw.ops.shapes import slice_dim
from jigsaw.ops.whole_strides import whole_strides, with_order
from jigsaw.tile.tile import Tile, implements_torch, refusal_error
from jigsaw.torch_internals.dispatch import without_modes

DimCuts = tuple[Cut, ...]


@dataclass(frozen=True)
class TransformKind:
    """One of torch's six families: `whole` transforms the last dim among others, `others` those before it alone.

    ``makes_half``: the last dim goes first and becomes a half spectrum (rfft, ihfft).  ``takes_half``: it goes last
    (irfft, hfft).  Neither: complex, in any order.
    """

    whole: str
    others: str
    makes_half: bool = False
    takes_half: bool = False

    @property
    def is_complex(self) -> bool:
        return not (self.makes_half or self.takes_half)


@dataclass(frozen=True)
class TransformPlan:
    """Steps of a transform: a layout to bring the tile to, and the dims that are whole there and transformed; then it
    goes to `out`.

    The layout of a step has the sizes that the dims have before it.
    """

    steps: tuple[tuple[Layout, tuple[int, ...]], ...]
    out: Layout


# -- where the axes go, in integers -----------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def plan_transform(
    x: Layout, asked: Layout, kind: TransformKind, dims: tuple[int, ...], sizes: tuple[int, ...]
) -> TransformPlan:
    """Plan how a tile of layout `x` is transformed along `dims`, the last of them being the real one, to `sizes` rows.

    `asked` is the layout that it came with; `x` lacks its halo, and rows that the transform does not take.
    """
    counts = dict(zip(dims, sizes, strict=True))
    if not any(x.is_cut(d) for d in dims):
        return TransformPlan(((x, dims),), _with_dims(x, {d: (whole_dim(n),) for d, n in counts.items()}))
    # a half spectrum stays cut where the axes are at the end
    is_plain = all(len(x.dim(d)) == 1 for d in dims)
    if len(dims) > 1 and is_plain and kind.makes_half:
        return _plan_between_transformed_dims(x, asked, kind, counts, {d: (whole_dim(n),) for d, n in counts.items()})
    home = _home_cuts(asked, kind, dims, counts)
    if len(dims) > 1 and is_plain and kind.takes_half:
        return _plan_between_transformed_dims(x, asked, kind, counts, home)
    visited = _visited_dim(x, dims, enough=len(dims) > 1 and is_plain)
    if visited is None and len(dims) > 1 and is_plain:
        return _plan_between_transformed_dims(x, asked, kind, counts, home)
    whole = _with_dims(x, {d: (whole_dim(x.shape[d]),) for d in dims})
    if visited is not None:
        axes = tuple(a for d in dims for a in x.dim_axes(d))
        whole = whole.replace_dim(visited, refine_cut(x.dim(visited)[0], axes, dict(x.axes)))
    out = _with_dims(x, home)
    return TransformPlan(((whole, dims),), _remembering(out, asked, dims) if kind.makes_half else out)


def _plan_between_transformed_dims(
    x: Layout, asked: Layout, kind: TransformKind, counts: dict[int, int], home: dict[int, DimCuts]
) -> TransformPlan:
    """Plan to transform whole dims; then let the axes of one dim go to another, which has had its turn if any has."""
    dims = tuple(counts)
    now, todo, steps = x, list(dims), list[tuple[Layout, tuple[int, ...]]]()
    while todo:
        ready = _ready_dims(now, kind, todo, dims[-1])
        if ready:
            steps.append((now, ready))
            now = _with_dims(now, {d: _cut_of_size(now.dim(d), counts[d]) for d in ready})
            todo = [d for d in todo if d not in ready]
            continue
        # the dim of the half spectrum is transformed first forward, last backward
        source = next((d for d in todo if d != dims[-1]), todo[0]) if kind.takes_half else todo[-1]
        target = _receiving_dim(now, source, todo, dims, home)
        cut = _receiving_cut(now, target, now.dim_axes(source), home)
        now = _with_dims(now, {source: (whole_dim(now.shape[source]),), target: (cut,)})
    if kind.makes_half:
        return TransformPlan(tuple(steps), _remembering(now, asked, dims))
    axes_at_home, axes_now = (
        sorted(a for d in dims for a in layout.dim_axes(d)) for layout in (_with_dims(now, home), now)
    )
    return TransformPlan(tuple(steps), _with_dims(now, home) if axes_at_home == axes_now else now)


def _ready_dims(now: Layout, kind: TransformKind, todo: Sequence[int], last: int) -> tuple[int, ...]:
    """Return the dims that can be transformed at once: whole ones, in an order that the kind allows."""
    whole = [d for d in todo if not now.is_cut(d)]
    if kind.makes_half and last in todo and last not in whole:
        return ()
    if kind.takes_half and len(whole) < len(todo):
        whole = [d for d in whole if d != last]
    return tuple(whole)


def _receiving_dim(now: Layout, source: int, todo: Sequence[int], dims: Sequence[int], home: dict[int, DimCuts]) -> int:
    """Choose the dim to which the axes of `source` go: their home, one that is done, well shared out, the last."""
    axes = now.dim_axes(source)

    def order(d: int) -> tuple[bool, bool, float, int]:
        is_home = any(a in axes for c in home[d] for a in c.axes)
        return not is_home, d in todo, _busiest_share(now, d, axes), -dims.index(d)

    return min((d for d in dims if d != source), key=order)


def _receiving_cut(now: Layout, target: int, axes: tuple[str, ...], home: dict[int, DimCuts]) -> Cut:
    """Return `target`, cut by `axes` as well: where some of them return to it, at the points that it has there."""
    cut = now.dim(target)[0]
    if math.prod(map(now.size_of, axes)) > transfers.MOST_PEERS_AT_ONCE:
        axes = axes[::-1]  # the axes move one by one, the minor one first, which then becomes the major one
    if cut.is_cut:
        return refine_cut(cut, axes, dict(now.axes))
    known = home[target][0]
    if len(home[target]) == 1 and known.is_cut and known.size == cut.size and set(known.axes) <= set(axes):
        return refine_cut(known, [a for a in axes if a not in known.axes], dict(now.axes))
    return Cut(cut.size, cut_points(cut.size, math.prod(now.size_of(a) for a in axes)), axes)


def _visited_dim(x: Layout, dims: Sequence[int], enough: bool) -> int | None:
    """Return the dim that is not transformed whose rows the axes share out best; with `enough`, a row for each rank."""
    axes = tuple(a for d in dims for a in x.dim_axes(d))
    ranks = math.prod(x.size_of(a) for a in axes)
    others = [d for d in range(x.ndim) if d not in dims and len(x.dim(d)) == 1]
    best = min(others, key=lambda d: _busiest_share(x, d, axes), default=None)
    if best is None or _busiest_share(x, best, axes) >= ranks:
        return None
    return None if enough and x.shape[best] < x.dim(best)[0].pieces * ranks else best


def _busiest_share(x: Layout, dim: int, axes: Sequence[str]) -> float:
    """Return the busiest rank's rows as a multiple of the mean, if `axes` also cut `dim`."""
    pieces = x.dim(dim)[0].pieces * math.prod(x.size_of(a) for a in axes)
    return -(-x.shape[dim] // pieces) * pieces / max(x.shape[dim], 1) or float(pieces)


def _home_cuts(asked: Layout, kind: TransformKind, dims: tuple[int, ...], counts: dict[int, int]) -> dict[int, DimCuts]:
    """Return the cuts of the result's transformed dims: the input's, or those before a half spectrum."""
    home = {d: asked.dim(d) for d in dims}
    if kind.takes_half:
        sources = [c.source for d in dims for c in asked.dim(d) if c.is_cut and 0 < len(c.source) <= len(dims)]
        for source in sources[:1]:
            was = home | {d: (c,) for d, c in zip(dims[-len(source) :], source, strict=True)}
            before, after = (
                sorted(a for group in cuts.values() for c in group for a in c.axes) for cuts in (was, home)
            )
            if before == after:
                home = was
    return {d: _cut_of_size(group, counts[d]) for d, group in home.items()}


def _cut_of_size(group: DimCuts, size: int) -> DimCuts:
    """Return the same cuts for a dim of another size: by the same axes, at balanced points."""
    if math.prod(c.size for c in group) == size:
        return tuple(c.bare() for c in group)
    axes, pieces = tuple(a for c in group for a in c.axes), math.prod(c.pieces for c in group)
    return (Cut(size, cut_points(size, pieces), axes),) if pieces > 1 else (whole_dim(size),)


def _remembering(spectrum: Layout, before: Layout, dims: Sequence[int]) -> Layout:
    """Return a half spectrum whose cuts know those of the dims before."""
    if any(len(before.dim(d)) > 1 for d in dims):
        return spectrum
    was = tuple(replace(before.dim(d)[0].bare(), source=()) for d in dims)
    return _with_dims(
        spectrum, {d: tuple(replace(c, source=was) for c in spectrum.dim(d)) for d in dims if spectrum.is_cut(d)}
    )


def _with_dims(layout: Layout, dims: dict[int, DimCuts]) -> Layout:
    return Layout.from_dims([dims.get(d, group) for d, group in enumerate(layout.dims())], layout.axes)


# -- carried out ------------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1024)
def _result_of(
    function: Any, shape: tuple[int, ...], dtype: torch.dtype, sizes: Any, dim: Any, norm: str | None
) -> torch.Size:
    """Return the shape of torch's result, or raise torch's own error on every rank, before anything is sent."""
    with without_modes():  # a dry run would count the memory of the whole, and in its first step alone
        return function(torch.empty(shape, dtype=dtype, device="meta"), sizes, dim, norm).shape


def _transform(
    function: Any, kind: TransformKind, input: Tile, sizes: Any, dim: Any, dims: tuple[int, ...], norm: str | None
) -> Tile:
    if (
        input.dtype in (torch.bfloat16, torch.float16)
        and input.device.type == "cpu"
        and torch.is_autocast_enabled("cpu")
    ):
        input = input.float()  # as torch's autocast does, on CPUs only
    shape = _result_of(function, tuple(input.shape), input.dtype, sizes, dim, norm)
    if not dims:
        return Tile(function(input.local, sizes, dim, norm), input.layout, input.mesh)
    counts = {d: shape[d] for d in dims}
    asked_sizes = [-1] * len(dims) if sizes is None else [sizes] if isinstance(sizes, int) else sizes
    asked_lengths = dict(zip(dims, asked_sizes, strict=True))
    lengths = {d: n if n != -1 else input.shape[d] for d, n in asked_lengths.items()}
    if kind.takes_half:
        lengths[dims[-1]] = counts[dims[-1]]
    tile = _without_halo_of(input, dims)
    if any(tile.layout.is_cut(d) for d in dims):
        for d in dims:  # drop rows that are not transformed before they travel
            takes = lengths[d] // 2 + 1 if kind.takes_half and d == dims[-1] else lengths[d]
            tile = slice_dim(tile, d, 0, takes) if takes < tile.shape[d] else tile
    plan = plan_transform(tile.layout, input.layout, kind, dims, tuple(counts.values()))
    for layout, now in plan.steps:
        tile = _brought_to(tile, layout)
        local = _transform_local(tile.local, kind, now, [lengths[d] for d in now], norm, dims[-1])
        tile = Tile(local, _with_dims(layout, {d: _cut_of_size(layout.dim(d), counts[d]) for d in now}), tile.mesh)
    out = _brought_to(tile, plan.out)
    if lacks_values():
        return out
    small = tuple(_small_length(kind, d == dims[-1], input.shape[d], n) for d, n in asked_lengths.items())
    dtype, strides = _WIDER.get(input.dtype, input.dtype), whole_strides(input)
    order = _order_of_transform(function, isinstance(dim, int), strides, dims, small, dtype, input.local.device)
    return with_order(out, order)


_SMALL, _WIDER = 4, {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.complex32: torch.complex64}


def _small_length(kind: TransformKind, is_last: bool, rows: int, length: int) -> int:
    """Return the length of a small transform that crops or pads `_SMALL` rows as the real one does its rows."""
    is_half = kind.takes_half and is_last
    takes = rows if length == -1 else length // 2 + 1 if is_half else length
    small = _SMALL + (takes > rows) - (takes < rows)
    return 2 * (small - 1) if is_half else small


@lru_cache(maxsize=1024)
def _order_of_transform(
    function: Any,
    is_one: bool,
    strides: tuple[int, ...],
    dims: tuple[int, ...],
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[int, ...]:
    """Return strides in the order of those of torch's result, by a small transform: the device's library decides."""
    places = sorted(range(len(strides)), key=lambda d: -strides[d])
    sizes = [_SMALL if d in dims else 2 for d in places]
    with torch.no_grad(), without_modes():
        rows = torch.zeros(sizes, dtype=dtype, device=device).permute([places.index(d) for d in range(len(places))])
        return (function(rows, lengths[0], dims[0]) if is_one else function(rows, lengths, dims)).stride()


def _without_halo_of(input: Tile, dims: Sequence[int]) -> Tile:
    """Return the tile without halo rows of `dims`; those of other dims stay where nothing has to move."""
    if any(input.layout.is_cut(d) for d in dims):
        return input.owned()
    if any(c.has_halo for d in dims for c in input.layout.dim(d)):
        bare = {d: tuple(c.bare() for c in input.layout.dim(d)) for d in dims}
        return input.with_layout(_with_dims(input.layout, bare))
    return input


def _brought_to(tile: Tile, layout: Layout) -> Tile:
    """Return the tile in another layout; a dim that was flattened from several may be whole in between.

    *Sends*: the rows that other ranks will hold and this rank owns; backward likewise, the other way.
    """
    if tile.layout == layout:
        return tile
    source, target = list(tile.layout.dims()), list(layout.dims())
    for d, (before, after) in enumerate(zip(source, target, strict=True)):
        if len(before) > len(after):
            target[d] = tuple(c.uncut() for c in before)
        elif len(after) > len(before):
            source[d] = tuple(c.uncut() for c in after)
    axes = layout.axes
    rows = redistribute_rows(tile.local, Layout.from_dims(source, axes), Layout.from_dims(target, axes), tile.mesh)
    return Tile(rows, layout, tile.mesh)


def _transform_local(
    x: Tensor, kind: TransformKind, dims: Sequence[int], lengths: Sequence[int], norm: str | None, last: int
) -> Tensor:
    function = getattr(torch.fft, kind.whole if last in dims else kind.others)
    empty = [d for d, n in enumerate(x.shape) if not n and d not in dims]
    # the library refuses empty tensors, so a rank without rows transforms zeros and drops the result
    padded = F.pad(x, [1 if side and d in empty else 0 for d in reversed(range(x.ndim)) for side in (0, 1)])
    y = function(padded if empty else x, lengths, dims, norm)
    for d in empty:
        y = y.narrow(d, 0, 0)
    return y


# -- torch's names ----------------------------------------------------------------------------------------------------

_KINDS = {
    "fft": TransformKind("fftn", "fftn"),
    "ifft": TransformKind("ifftn", "ifftn"),
    "rfft": TransformKind("rfftn", "fftn", makes_half=True),
    "irfft": TransformKind("irfftn", "ifftn", takes_half=True),
    "hfft": TransformKind("hfftn", "fftn", takes_half=True),
    "ihfft": TransformKind("ihfftn", "ifftn", makes_half=True),
}


def transform_dim(
    function: Any, kind: TransformKind, input: Tile, n: int | None = None, dim: int = -1, norm: str | None = None
) -> Tile:
    """Run `torch.fft.fft`, `ifft`, `rfft`, `irfft`, `hfft`, `ihfft`.

    *Shapes*: as in torch; per rank cut as the input, a dim of another size by the same axes.
    *Sends*: nothing, or where the dim is cut two exchanges: of the input, and of the result; backward the same, of the
    gradients.  Where no other dim has two rows, one all-gather by messages in place of both.
    """
    return _transform(function, kind, input, n, dim, reduced_dims(input, dim), norm)


def transform_two_dims(
    function: Any, kind: TransformKind, input: Tile, s: Any = None, dim: Any = (-2, -1), norm: str | None = None
) -> Tile:
    """Run `torch.fft.fft2` and its like; see `transform_dims`."""
    return transform_dims(function, kind, input, s, dim, norm)


def transform_dims(
    function: Any, kind: TransformKind, input: Tile, s: Any = None, dim: Any = None, norm: str | None = None
) -> Tile:
    """Run `torch.fft.fftn`, `rfftn` and so on.

    *Shapes*: as in torch; where the result is cut: the head of this file.
    *Sends*: nothing, or where a transformed dim is cut, real: one exchange for each dim that is cut; complex: two, of
    the input and the result.  Backward the same, of the gradients.
    """
    s = (s,) if isinstance(s, int) else None if s is None else tuple(s)
    dim = (dim,) if isinstance(dim, int) else None if dim is None else tuple(dim)
    if dim is None:
        dims = tuple(range(input.ndim - len(s) if s else 0, input.ndim)) if s != () else ()
    else:
        dims = reduced_dims(input, dim) if dim else ()
    return _transform(function, kind, input, s, dim, dims, norm)


def _rolled_by_half(input: Tile, dim: Any, more: int) -> Any:
    dims = reduced_dims(input, dim) if dim != () else ()
    return input.roll([(input.shape[d] + more) // 2 for d in dims], dims) if dims else input


@implements_torch(torch.fft.fftshift)
def _fftshift(input: Tile, dim: Any = None) -> Any:
    """Shift the modes.  *Sends*: the rows of cut dims that change owner."""
    return _rolled_by_half(input, dim, 0)


@implements_torch(torch.fft.ifftshift)
def _ifftshift(input: Tile, dim: Any = None) -> Any:
    """Shift the modes back.  *Sends*: the rows of cut dims that change owner."""
    return _rolled_by_half(input, dim, 1)


for _name, _kind in _KINDS.items():
    for _ending, _handler in (("", transform_dim), ("2", transform_two_dims), ("n", transform_dims)):
        _function = getattr(torch.fft, _name + _ending)
        implements_torch(_function)(partial(_handler, _function, _kind))


# -- of short times ---------------------------------------------------------------------------------------------------


def _window_of(window: Any, input: Tile, n_fft: int, win_length: int | None) -> Any:
    """Return the window of `n_fft` numbers, with zeros around a shorter one."""
    length = n_fft if win_length is None else win_length
    like = input.local.real if input.dtype.is_complex else input.local
    window = torch.ones(length, dtype=like.dtype, device=like.device) if window is None else window
    if not 0 < length <= n_fft or tuple(window.shape) != (length,):
        raise RuntimeError(
            f"a window of shape {tuple(window.shape)}, win_length={win_length} and n_fft={n_fft}: the window has "
            "win_length numbers, at most n_fft"
        )
    left = (n_fft - length) // 2
    return F.pad(window, (left, n_fft - length - left))


@implements_torch(torch.stft, either=("window",))
def _stft(
    input: Tile,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    pad_mode: str = "reflect",
    normalized: bool = False,
    onesided: bool | None = None,
    return_complex: bool | None = None,
    align_to_window: bool | None = None,
) -> Any:
    """Return the transform of a window that moves along time, the last dim.

    *Shapes*: [B?, L] to [B?, frequencies, frames]; a cut of time is one of frames.
    *Sends*: the rows of time that windows need beside a border.
    """
    hop = n_fft // 4 if hop_length is None else hop_length
    wide = _window_of(window, input, n_fft, win_length)
    is_complex = input.dtype.is_complex or wide.dtype.is_complex
    if (return_complex is None and not is_complex) or align_to_window or input.ndim not in (1, 2) or hop < 1:
        raise refusal_error(
            torch.stft, input, "it takes 1 or 2 dims, a hop of 1 or more, and no align_to_window", "say return_complex="
        )
    x: Any = F.pad(input.unsqueeze(0), (n_fft // 2,) * 2, pad_mode).squeeze(0) if center else input
    frames = x.unfold(-1, n_fft, hop) * wide
    is_half = not is_complex if onesided is None else onesided
    norm = "ortho" if normalized else "backward"
    out = (torch.fft.rfft if is_half else torch.fft.fft)(frames, dim=-1, norm=norm).transpose(-1, -2)
    return torch.view_as_real(out) if return_complex is False else out


@implements_torch(torch.istft, either=("window",))
def _istft(
    input: Tile,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: Any = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> Any:
    """Return the signal whose windows have these transforms best: their overlapping sum over that of the squared
    window.

    *Sends*: the rows of time that windows on another rank reach.
    """
    hop = n_fft // 4 if hop_length is None else hop_length
    if return_complex or not input.dtype.is_complex or input.ndim not in (2, 3) or hop < 1:
        raise refusal_error(
            torch.istft, input, "it takes complex [B?, frequencies, frames] of a real signal", "pass torch.complex(...)"
        )
    wide = _window_of(window, input, n_fft, win_length)
    is_half = input.shape[-2] != n_fft if onesided is None else onesided
    norm = "ortho" if normalized else "backward"
    spectra: Any = (input if input.ndim == 3 else input.unsqueeze(0)).transpose(-1, -2)
    # torch takes the first half of a whole spectrum, even where the second is not its mirror
    half = spectra if is_half else spectra[..., : n_fft // 2 + 1]
    rows = torch.fft.irfft(half, n_fft, norm=norm)
    total, frames = n_fft + hop * (input.shape[-1] - 1), input.shape[-1]
    options: dict[str, Any] = {"output_size": (1, total), "kernel_size": (1, n_fft), "stride": (1, hop)}
    signal = F.fold((rows * wide).transpose(-1, -2), **options)[:, 0, 0]
    weight = F.fold(wide.square()[None, :, None].expand(1, n_fft, frames), **options)[0, 0, 0]
    start = n_fft // 2 if center else 0
    stop = total - start if length is None else min(start + length, total)
    if stop <= start or weight[start:stop].abs().min() < 1e-11:
        raise RuntimeError(f"istft: windows of shape {tuple(wide.shape)} with a hop of {hop} leave places without any")
    out = signal[:, start:stop] / weight[start:stop]
    if length is not None and stop < start + length:
        out = F.pad(out, (0, start + length - stop))
    return out if input.ndim == 3 else out.squeeze(0)
