"""Convolution that never copies its input: that of the rows at hand, plus what the halo adds to the rows at the edges.

A convolution is linear, so rows that a neighbor holds can be convolved by themselves, a strip a side, and added.  The
large tensor is not padded, copied or kept alive twice, forward or backward.  Strips travel while it is convolved.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm.exchange import AsyncExchange, AsyncExchangeAdjoint, memory_format_of
from jigsaw.comm.graph_calls import graph_call
from jigsaw.comm.kept_halos import results_are_kept
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, FrozenValue, Interval, whole_dim
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.geometry.stencil_rules import DerivedCut, StencilRule, StencilWindow, TransposedWindow, ceil_div
from jigsaw.nn.stencils.stencil import DimStencil, StencilPlan, entry_per_dim, plan_stencil

# -- geometry ---------------------------------------------------------------------------------------------------------

ConvSize = int | Sequence[int]


@dataclass(frozen=True, eq=False)
class ConvGeometry(FrozenValue):
    """Geometry of a convolution, an entry a spatial dim; `padding` is (below, above)."""

    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    output_padding: tuple[int, ...]
    groups: int
    transposed: bool
    wrap: bool = False

    @property
    def dims(self) -> int:
        return len(self.stride)

    def rule(self, i: int, kernel: int) -> StencilRule:
        low, high = self.padding[i]
        if self.transposed:
            return TransposedWindow(kernel, self.stride[i], self.dilation[i], low, self.output_padding[i])
        return StencilWindow(kernel, self.stride[i], self.dilation[i], low, high)

    def even(self, i: int) -> bool:
        return self.padding[i][0] == self.padding[i][1] and not self.wrap


@lru_cache(maxsize=4096)
def conv_dim_stencils(first: int, kernel: tuple[int, ...], conv: ConvGeometry) -> tuple[DimStencil, ...]:
    """Return the stencil along each spatial dim, of which `first` is the first."""
    return tuple(
        DimStencil(first + i, conv.rule(i, k), conv.wrap, always=not conv.even(i)) for i, k in enumerate(kernel)
    )


@dataclass(frozen=True)
class ConvPlan:
    """Convolution of one rank: the stencil of each dim, the rows and channels `to` which its input is brought, and the
    layout `out` of its result.  `padding` is the op's own where all ranks have what they need, and no more, else None.
    """

    conv: ConvGeometry
    along: tuple[DimStencil, ...]
    to: StencilPlan
    out: Layout
    padding: tuple[int, ...] | None = None


@lru_cache(maxsize=4096)
def plan_of_whole_channels(
    layout: Layout, shape: tuple[int, ...], conv: ConvGeometry, coord: MeshCoordinate
) -> ConvPlan | None:
    """Return the plan for a plain weight of that `shape`, whole channels and no flattened dim; None for any other."""
    channels = shape[0] if conv.transposed else shape[1] * conv.groups
    if layout.groups != (1,) * (conv.dims + 2) or layout.shape[1] != channels:
        return None
    if not layout.complete_dims[1]:
        return None
    along = conv_dim_stencils(2, shape[2:], conv)
    to = plan_stencil(layout, along, coord, "convolution")
    out = to.out.replace_dim(1, whole_dim(channels_of_result(shape, conv)))
    moved = {d for d, _, _ in to.derived}
    has_margins = any(low or high for _, derived, _ in to.derived for low, high in derived.margins)
    is_empty = 0 in shape or any(0 in out.local_shape(at) for at in out.coords())
    # decided from facts of all ranks, because all of them must exchange or none
    at_hand = not is_empty and (not moved or (to.target == layout and not has_margins and not conv.transposed))
    padding = tuple(0 if 2 + i in moved else low for i, (low, _) in enumerate(conv.padding))
    return ConvPlan(conv, along, to, out, padding if at_hand else None)


def _padding_per_dim(
    padding: str | ConvSize, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    if not isinstance(padding, str):
        return tuple((p, p) for p in entry_per_dim(padding, len(kernel), "padding"))
    if padding == "valid":
        return ((0, 0),) * len(kernel)
    if padding != "same":
        raise ShardingError(f"padding={padding!r}: use 'same', 'valid' or integers")
    if any(s != 1 for s in stride):
        raise ShardingError(f"padding='same' needs stride 1, got {tuple(stride)}")
    both = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    return tuple((b // 2, b - b // 2) for b in both)


@lru_cache(maxsize=4096, typed=True)
def read_convolution(
    kernel: tuple[int, ...], stride: ConvSize, padding: str | ConvSize, dilation: ConvSize, groups: int, wrap: bool
) -> ConvGeometry:
    """Read the geometry from the arguments of `torch.conv2d`, for a kernel of these sizes."""
    dims = len(kernel)
    strides, dilations = entry_per_dim(stride, dims, "stride"), entry_per_dim(dilation, dims, "dilation")
    pads = _padding_per_dim(padding, kernel, strides, dilations)
    _check_steps(strides, pads, dilations, groups)
    return ConvGeometry(strides, pads, dilations, (0,) * dims, groups, False, wrap)


def _check_steps(
    strides: Sequence[int], pads: Sequence[tuple[int, int]], dilations: Sequence[int], groups: int
) -> None:
    """Check what torch itself checks only on ranks that have rows."""
    if min(*strides, *dilations, groups) < 1 or min(low for low, _ in pads) < 0:
        raise ShardingError(
            f"a convolution with stride={tuple(strides)}, padding={tuple(low for low, _ in pads)}, "
            f"dilation={tuple(dilations)} and groups={groups}: padding must be 0 or more, the others 1 or more"
        )


@lru_cache(maxsize=4096, typed=True)
def read_transposed_convolution(
    dims: int, stride: ConvSize, padding: ConvSize, output_padding: ConvSize, groups: int, dilation: ConvSize
) -> ConvGeometry:
    """Read the geometry from the arguments of `torch.conv_transpose2d`."""
    strides, dilations = entry_per_dim(stride, dims, "stride"), entry_per_dim(dilation, dims, "dilation")
    extra, pads = entry_per_dim(output_padding, dims, "output_padding"), entry_per_dim(padding, dims, "padding")
    for e, s, d in zip(extra, strides, dilations, strict=True):
        if not 0 <= e < max(s, d):
            raise ShardingError(f"output_padding={e} must be smaller than stride {s} or dilation {d}")
    both = tuple((p, p) for p in pads)
    _check_steps(strides, both, dilations, groups)
    return ConvGeometry(strides, both, dilations, extra, groups, True)


def channels_of_result(shape: Sequence[int], conv: ConvGeometry) -> int:
    """Return the number of output channels for a weight of that shape.

    Raises: `ShardingError` where the groups do not share them out evenly.
    """
    if conv.transposed:
        return shape[1] * conv.groups
    if shape[0] % conv.groups:
        raise ShardingError(
            f"a convolution with weight {tuple(shape)} makes {shape[0]} channels, which groups={conv.groups} cannot "
            "share out evenly"
        )
    return shape[0]


# -- the halo apart ---------------------------------------------------------------------------------------------------

# Example: four ranks with 8 rows each of 32, kernel 3: rank 1 has 8:16 and needs 7:17.  It convolves 8:16 as if zeros
# lay around them while rows 7 and 16 travel; row 7 alone, convolved, is what the zeros below left out of output 8, and
# is added to it, and row 16 to output 15.  Neither 7:17 nor its gradient is ever put together.
_STRIP_SHARE = 8  # strips pay while they touch less than this fraction (1/8) of the rows


# -- one dim: integers ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StripRows:
    """Rows of a neighbor: `rows` of the dim, padded by `pads`, add to `count` output rows from `first`."""

    rows: Interval
    pads: tuple[int, int]
    first: int
    count: int


@dataclass(frozen=True)
class DimSplit:
    """One dim of one piece, in intervals: rows at hand (`box`), and strips below and above.  The plain op pads the box
    by `padding`; `count` of its output rows, from `skip`, are wanted.
    """

    box: Interval
    need: Interval
    inside: Interval
    padding: int
    skip: int
    count: int
    low: StripRows
    high: StripRows


@lru_cache(maxsize=4096)
def split_dim(cut: Cut, rule: StencilWindow, derived: DerivedCut, piece: int, wrap: bool) -> DimSplit:
    """Divide what a piece needs into rows at hand and strips."""
    inside, (below, above) = derived.needs[piece], derived.margins[piece]
    need = inside[0] - below, inside[1] + above
    held = cut.inside(piece) if wrap else cut.between_ends(piece)
    box = max(inside[0], held[0]), min(inside[1], held[1])
    if box[0] >= box[1]:
        box = inside[0], inside[0]
    out = derived.out.held[piece]
    count = out[1] - out[0]
    # the op pads both sides by the same amount, but a piece at the array's edge may need more above than below
    padding, skip = _covering_padding(rule, box, need)
    if box[1] < held[1]:  # keep rows that no window reads rather than cut them off, because they cost nothing
        longer, more = (box[0], held[1]), _covering_padding(rule, (box[0], held[1]), need)
        if (held[1] - box[0] + 2 * more[0] - rule.span) // rule.stride + 1 - more[1] == count:
            box, (padding, skip) = longer, more
    return DimSplit(box, need, inside, padding, skip, count, *_strip_rows(rule, box, need, inside, count))


def _covering_padding(rule: StencilWindow, box: Interval, need: Interval) -> tuple[int, int]:
    """Return the op's symmetric padding that covers `need`, and how many more output rows it makes below."""
    below, above = box[0] - need[0], need[1] - box[1]
    skip = max(ceil_div(above - below, rule.stride), 0)
    return below + skip * rule.stride, skip


def _strip_rows(
    rule: StencilWindow, box: Interval, need: Interval, inside: Interval, count: int
) -> tuple[StripRows, StripRows]:
    # windows that begin before the box read the strip below; those that end after it read the one above
    windows = min(ceil_div(box[0] - need[0], rule.stride), count)
    rows = inside[0], box[0]
    stop = need[0] + (windows - 1) * rule.stride + rule.span
    low = StripRows(rows, (rows[0] - need[0], stop - rows[1]), 0, windows)
    first = min(max(ceil_div(box[1] - rule.span + 1 - need[0], rule.stride), 0), count)
    rows = box[1], max(inside[1], box[1])
    high = StripRows(rows, (rows[0] - need[0] - first * rule.stride, need[1] - rows[1]), first, count - first)
    none = StripRows((box[1], box[1]), (0, 0), 0, 0)
    return low if low.rows[0] < low.rows[1] else none, high if high.rows[0] < high.rows[1] else none


# -- all dims of one rank ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HaloStrip:
    """A strip along one dim, as wide as the whole halo in later dims and as the box in earlier ones.

    `shape` is this rank's, `pads` are as of `torch.nn.functional.pad`, and it adds at `place` of the output, if it
    `adds`. Of each cut dim it has `rows`, and the output at `place` reads `window`.
    """

    target: Layout
    shape: tuple[int, ...]
    pads: tuple[int, ...]
    place: tuple[slice, ...]
    adds: bool
    rows: tuple[Interval, ...]
    window: tuple[Interval, ...]


@dataclass(frozen=True)
class HaloPlan:
    """Convolution of one rank: the `box` of its local rows, the op's `padding`, `wanted` output rows, and slabs, padded
    by `own`: the op's padding along whole dims, 0 along those that strips pad. Of the cut `dims` the box has `rows`.
    """

    dims: tuple[int, ...]
    rows: tuple[Interval, ...]
    box: tuple[slice, ...]
    padding: tuple[int, ...]
    own: tuple[int, ...]
    wanted: tuple[slice, ...]
    slabs: tuple[HaloStrip, ...]


@lru_cache(maxsize=1024)
def plan_halo(layout: Layout, along: tuple[DimStencil, ...], coord: MeshCoordinate) -> HaloPlan | None:
    """Plan how this rank convolves by strips; None where they would not pay on every rank (`_STRIP_SHARE`)."""
    derived = {
        d: (derivation, piece) for d, derivation, piece in plan_stencil(layout, along, coord, "convolution").derived
    }
    ways = {a.dim: a for a in along}
    cuts = {d: layout.dim(d)[0] for d in derived}
    # from every piece, not this rank's alone, because all ranks must make the same decision to send
    splits: dict[int, list[DimSplit]] = {}
    for d, (derivation, _) in derived.items():
        rule = cast(StencilWindow, ways[d].rule)
        splits[d] = [split_dim(cuts[d], rule, derivation, i, ways[d].wrap) for i in range(cuts[d].pieces)]
        if not all((s.box[0] < s.box[1] and _STRIP_SHARE * (s.low.count + s.high.count) <= s.count) for s in splits[d]):
            return None
    own_splits = {d: splits[d][piece] for d, (_, piece) in derived.items()}
    rules = [cast(StencilWindow, ways[d].rule) for d in derived]
    slabs = [
        _halo_strip(layout, at, high, splits, own_splits, coord, rules[at])
        for at in range(len(own_splits))
        for high in (False, True)
    ]
    box, wanted = [slice(None)] * layout.ndim, [slice(None)] * layout.ndim
    own = [0 if a.dim in own_splits else cast(StencilWindow, a.rule).below for a in along]
    padding = [own_splits[a.dim].padding if a.dim in own_splits else p for a, p in zip(along, own, strict=True)]
    for d, (_, piece) in derived.items():
        low, s = cuts[d].held[piece][0], own_splits[d]
        box[d] = slice(s.box[0] - low, s.box[1] - low)
        wanted[d] = slice(s.skip, s.skip + s.count)
    slices = tuple(box), tuple(padding), tuple(own), tuple(wanted)
    rows = tuple(s.box for s in own_splits.values())
    return HaloPlan(tuple(derived), rows, *slices, tuple(s for s in slabs if s is not None))


def _halo_strip(
    layout: Layout,
    at: int,
    high: bool,
    splits: dict[int, list[DimSplit]],
    own_splits: dict[int, DimSplit],
    coord: MeshCoordinate,
    rule: StencilWindow,
) -> HaloStrip | None:
    def strip(s: DimSplit) -> StripRows:
        return s.high if high else s.low

    dim = list(splits)[at]
    if all(strip(s).rows[0] == strip(s).rows[1] for s in splits[dim]):
        return None
    pads, place = [(0, 0)] * layout.ndim, [slice(None)] * layout.ndim
    target, own_rows, window = layout, list[Interval](), list[Interval]()
    for i, d in enumerate(splits):
        s = own_splits[d]
        # a corner belongs to one strip, that of the first dim.  The rows of lat's strips reach over all that lon needs,
        # lon's only over the box of lat; otherwise the corner's rows would be added twice
        rows = [strip(p).rows if i == at else p.box if i < at else p.inside for p in splits[d]]
        target = target.replace_dim(d, layout.dim(d)[0].holding(rows))
        own_rows.append(strip(s).rows if i == at else s.box if i < at else s.inside)
        window.append(s.need)
        if i == at:
            first = s.need[0] + strip(s).first * rule.stride
            window[i] = first, first + (strip(s).count - 1) * rule.stride + rule.span
            pads[d] = strip(s).pads
            place[d] = slice(s.skip + strip(s).first, s.skip + strip(s).first + strip(s).count)
        else:
            inner = s.box if i < at else s.inside
            pads[d] = inner[0] - s.need[0], s.need[1] - inner[1]
            place[d] = slice(s.skip, s.skip + s.count)
    flat = tuple(p for d in reversed(range(2, layout.ndim)) for p in pads[d])
    adds = strip(own_splits[dim]).count > 0
    return HaloStrip(target, target.local_shape(coord), flat, tuple(place), adds, tuple(own_rows), tuple(window))


# -- carrying it out --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HaloConvolution:
    """Convolution of the local rows of `layout` and the halo that this rank lacks; `again` is differentiable."""

    conv: ConvGeometry
    halo: HaloPlan
    layout: Layout
    mesh: DeviceMesh
    again: Callable[[Tensor, Tensor, Tensor | None], Tensor] = field(repr=False, compare=False)

    def plain(self, x: Tensor, weight: Tensor, bias: Tensor | None, padding: Sequence[int]) -> Tensor:
        conv, none = self.conv, (0,) * self.conv.dims
        return torch.convolution(x, weight, bias, conv.stride, padding, conv.dilation, False, none, conv.groups)

    def plain_gradients(
        self, grad: Tensor, x: Tensor, weight: Tensor, padding: Sequence[int], mask: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        conv, none = self.conv, (0,) * self.conv.dims
        sizes = [weight.shape[0]]
        return torch.ops.aten.convolution_backward(
            grad, x, weight, sizes, conv.stride, padding, conv.dilation, False, none, conv.groups, mask
        )


@graph_call()
def _convolve_with_strips(
    x: Tensor, weight: Tensor, bias: Tensor | None, op: HaloConvolution
) -> tuple[Tensor, list[Tensor | None]]:
    halo = op.halo
    # started first, so that strips travel while the rows at hand, by far the most, are convolved
    strips = AsyncExchange(x, op.layout, [s.target for s in halo.slabs], op.mesh)
    out = op.plain(x[halo.box], weight, bias, halo.padding)
    if results_are_kept():
        out = out.clone()
    padded, arrived = list[Tensor | None](), strips.wait()
    for slab, strip in zip(halo.slabs, arrived, strict=True):
        padded.append(F.pad(strip, slab.pads) if slab.adds else None)
        if slab.adds and x.dtype in _NARROW:
            out[slab.place] = op.plain(_rows_of_window(halo, slab, x, arrived), weight, bias, halo.own)
        elif slab.adds:
            out[slab.place].add_(op.plain(cast(Tensor, padded[-1]), weight, None, halo.own))
    return out, padded


_NARROW = (torch.bfloat16, torch.float16)


def _rows_of_window(halo: HaloPlan, slab: HaloStrip, x: Tensor, strips: Sequence[Tensor]) -> Tensor:
    """Return all rows that the output rows of a slab read: those at hand, of strips, and zeros beyond the array.

    Two narrow sums, each rounded, would lie three roundings off where one process rounds once, at every border of
    ranks. So these few rows are convolved again, whole.
    """
    shape = list(x.shape)
    for d, (start, stop) in zip(halo.dims, slab.window, strict=True):
        shape[d] = stop - start
    window = x.new_zeros(shape).contiguous(memory_format=memory_format_of(x))
    parts = [(halo.rows, x[halo.box]), *((s.rows, strip) for s, strip in zip(halo.slabs, strips, strict=True))]
    for rows, part in parts:
        place, taken = [slice(None)] * x.ndim, [slice(None)] * x.ndim
        for d, (start, stop), (first, end) in zip(halo.dims, slab.window, rows, strict=True):
            low = max(start, first)
            high = max(low, min(stop, end))
            place[d], taken[d] = slice(low - start, high - start), slice(low - first, high - first)
        window[tuple(place)] = part[tuple(taken)]
    return window


@graph_call()
def _gradients_with_strips(
    grad: Tensor, x: Tensor, weight: Tensor, padded: Sequence[Tensor | None], mask: Sequence[bool], op: HaloConvolution
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the input, the weight and the bias, where `mask` asks for them."""
    halo = op.halo
    slabs = [
        _strip_gradients(op, slab, strip, grad, weight, mask) for slab, strip in zip(halo.slabs, padded, strict=True)
    ]
    # the strips' gradients come first, because others wait for them; the large one is computed while they travel
    pending = None
    if mask[0]:
        of_strips, targets = [cast(Tensor, gx) for gx, _ in slabs], [s.target for s in halo.slabs]
        pending = AsyncExchangeAdjoint(of_strips, op.layout, targets, op.mesh)
    gx, gw, gb = op.plain_gradients(grad, x[halo.box], weight, halo.padding, mask)
    if pending is not None:
        gx = _into_local_rows(cast(Tensor, gx), x, halo)
        pending.wait(gx)
    for _, more in slabs:
        gw = gw.add_(more) if gw is not None and more is not None else gw
    return gx, gw, gb


class _ConvolveWithHalo(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, op: HaloConvolution) -> Tensor:
        out, padded = _convolve_with_strips(x, weight, bias, op)
        ctx.save_for_backward(x, weight, bias, *padded)
        ctx.op = op
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, *padded = ctx.saved_tensors
        op: HaloConvolution = ctx.op
        mask = list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # to be differentiable twice, exchange the rows again
            wanted = [v for v, needs in zip((x, weight, bias), mask, strict=True) if needs]
            gradients = iter(
                torch.autograd.grad(op.again(x, weight, bias), wanted, grads[0][op.halo.wanted], create_graph=True)
            )
            return *(next(gradients) if needs else None for needs in mask), None
        return *_gradients_with_strips(grads[0], x, weight, padded, mask, op), None


def _strip_gradients(
    op: HaloConvolution, slab: HaloStrip, strip: Tensor | None, grad: Tensor, weight: Tensor, mask: Sequence[bool]
) -> tuple[Tensor | None, Tensor | None]:
    if strip is None:
        # no output row reads this strip, but its owner still waits for a gradient
        return grad.new_zeros(slab.shape), None
    gx, gw, _ = op.plain_gradients(grad[slab.place], strip, weight, op.halo.own, (*mask[:2], False))
    return (None if gx is None else F.pad(gx, [-p for p in slab.pads])), gw


def _into_local_rows(gx: Tensor, x: Tensor, halo: HaloPlan) -> Tensor:
    if gx.shape == x.shape:
        return gx
    whole = torch.zeros_like(x, memory_format=memory_format_of(x))
    whole[halo.box] = gx
    return whole


def convolve_with_halo(x: Tensor, weight: Tensor, bias: Tensor | None, op: HaloConvolution) -> Tensor:
    """Convolve the local rows `x` and the halo that this rank lacks.

    *Sends*: forward, the rows that neighbors lack, one message a strip and neighbor; backward, their gradients.
    """
    out = cast(Tensor, _ConvolveWithHalo.apply(x, weight, bias, op))
    for d in range(2, x.ndim):
        wanted = op.halo.wanted[d]
        if wanted.start is not None and (wanted.start, wanted.stop) != (0, out.shape[d]):
            out = out.narrow(d, wanted.start, wanted.stop - wanted.start)
    return out
