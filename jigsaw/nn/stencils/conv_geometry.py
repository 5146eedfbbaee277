"""Geometry of a convolution, read from torch's arguments, and what follows from it for the layouts: integers only.

>>> from jigsaw.nn.stencils.conv_geometry import read_convolution
>>> read_convolution((3, 3), 1, "same", 2, 1, False).padding
((2, 2), (2, 2))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import FrozenValue, whole_dim
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.geometry.stencil_rules import StencilRule, StencilWindow, TransposedWindow
from jigsaw.nn.stencils.stencil import DimStencil, StencilPlan, entry_per_dim, plan_stencil

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
    # a fact of all ranks, not of this one, because a rank that exchanges waits for the others
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
