"""Engine of all stencils: output cuts -> needed rows -> exchange -> a plain torch op without padding.

Convolution, pooling, padding and interpolation name the `StencilRule` of each of their dims.  Here the rules of a
tile's cut dims become one exchange.  Then every rank holds the input rows of its output rows, in one copy that includes
the padding. Dims that nothing cuts are left to the op.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from jigsaw.comm.exchange import CutMargins, exchange_rows
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, FrozenValue, whole_dim
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.geometry.stencil_rules import DerivedCut, StencilRule, derive_cut
from jigsaw.tile.tile import Tile


@dataclass(frozen=True, eq=False)
class DimStencil(FrozenValue):
    """Stencil along a dim: its rule, whether it wraps, how many more output rows a side to hold; `always`: pad uncut
    dims, too.
    """

    dim: int
    rule: StencilRule
    wrap: bool = False
    grow: tuple[int, int] = (0, 0)
    always: bool = False


@dataclass(frozen=True)
class StencilPlan:
    """Stencil of one rank. `out` is the layout of the result, `target` that of the input that every rank needs.
    `margins` are rows of padding around its part, an entry a cut; `derived` has each touched dim, its arithmetic, and
    this rank's
    piece.
    """

    out: Layout
    target: Layout
    margins: CutMargins
    shape: tuple[int, ...]
    derived: tuple[tuple[int, DerivedCut, int], ...]

    @property
    def is_empty(self) -> bool:
        return 0 in self.shape


def is_cut_or_haloed(layout: Layout, dim: int) -> bool:
    """Say whether the engine has work along `dim`: something cuts it, or it has halo rows."""
    return not layout.complete_dims[dim]


def resized_layout(layout: Layout, sizes: Mapping[int, int]) -> Layout:
    """Return the layout with other sizes of some dims, which nothing cuts."""
    for d, n in sizes.items():
        layout = layout.replace_dim(d, whole_dim(n))
    return layout


def single_cut(layout: Layout, dim: int, name: str) -> Cut:
    """Return the one cut of a dim that a stencil slides along.  Raises: `ShardingError` for flattened dims."""
    cuts = layout.dim(dim)
    if len(cuts) != 1:
        raise ShardingError(
            f"{name} slides along dim {dim} of {layout}, which is {len(cuts)} dims flattened together; "
            f"unflatten it to {tuple(c.size for c in cuts)} first"
        )
    return cuts[0]


@lru_cache(maxsize=4096)
def plan_stencil(layout: Layout, along: tuple[DimStencil, ...], coord: MeshCoordinate, name: str) -> StencilPlan:
    """Plan what the rank at `coord` needs, gets and gives; dims that are not `is_cut_or_haloed` only change their size.

    Raises: `ShardingError` for dims that were flattened together, or a window that does not fit.
    """
    out = target = layout
    margins: dict[int, tuple[int, int]] = dict.fromkeys(range(layout.ndim), (0, 0))
    derived: list[tuple[int, DerivedCut, int]] = []
    # Example: four ranks on 33 rows cut at 0, 9, 17, 25, 33, kernel 3, stride 2, padding 1: 17 outputs cut at 0, 5, 9,
    # 13, 17. Rank 1 makes outputs 5:9 and reads rows 9:18, of which it lacks 17; rank 0 reads 0:10, and one row of
    # padding.
    for a in along:
        cut = single_cut(layout, a.dim, name)
        if not (a.always or is_cut_or_haloed(layout, a.dim)):
            out = out.replace_dim(a.dim, whole_dim(a.rule.size(cut.size)))
            continue
        derivation = derive_cut(cut, a.rule, a.wrap, a.grow)
        piece = layout.piece(cut, coord)
        out = out.replace_dim(a.dim, derivation.out)
        target = target.replace_dim(a.dim, cut.holding(derivation.needs))
        margins[a.dim] = derivation.margins[piece]
        derived.append((a.dim, derivation, piece))
    # an exchange takes margins for each cut; dims of several cuts have none, because no stencil slides along them
    by_cut = tuple(m for d, group in enumerate(layout.dims()) for m in [margins[d]] * len(group))
    return StencilPlan(out, target, by_cut, out.local_shape(coord), tuple(derived))


def gather_input_rows(x: Tile, to: StencilPlan, fill: float = 0.0) -> Tensor:
    """Return the input rows of this rank's output rows, padding included.

    *Sends*: forward, the rows that neighbors need and do not hold; backward, their gradients.
    """
    if not to.derived and to.target == x.layout:  # no row or channel is missing
        return x.local
    return exchange_rows(x.local, x.layout, to.target, x.mesh, margins=to.margins, fill=fill)


class _EmptyResult(torch.autograd.Function):
    """Zeros that still pass (zero) gradients to their sources, whose exchanges other ranks wait for."""

    @staticmethod
    def forward(ctx: Any, shape: Sequence[int], saved: int, *sources: Tensor) -> Tensor:
        # keep the graph: without it this rank would skip the backward exchange of `sources`, and neighbors would wait
        ctx.shapes = [s.shape for s in sources]
        # torch raises if a saved tensor was changed since, so save only the tensors that torch's own function saves
        ctx.save_for_backward(*sources[:saved])
        return sources[0].new_zeros(shape)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        again: tuple[Tensor, ...] = ctx.saved_tensors
        saved = len(again) and 1 + len(again)
        return None, None, *(_EmptyResult.apply(s, saved, grads[0], *again) for s in ctx.shapes)


def empty_result(shape: Sequence[int], *sources: Tensor | None, saved: int | None = None) -> Tensor:
    """Return the result of a stencil on a rank that has no output element, or nothing to make one of.

    `saved` is how many of the first sources torch's function keeps for its backward pass; None means all.  A second
    derivative then passes the same exchanges everywhere, and a change of them in place is an error everywhere.
    """
    tensors = [s for s in sources if s is not None]
    return _EmptyResult.apply(tuple(shape), len(tensors) if saved is None else saved, *tensors)


def nonempty_like(x: Tensor) -> Tensor:
    """Return one row for every dim of an empty tensor, so that plain ops that refuse it raise as on other ranks."""
    return x.new_empty([max(n, 1) for n in x.shape])


def entry_per_dim(value: int | Sequence[int], dims: int, name: str) -> tuple[int, ...]:
    """Return an integer or a sequence as one entry a spatial dim, as torch reads it."""
    values = (value,) * dims if isinstance(value, int) else tuple(value)
    if len(values) == 1:
        values *= dims
    if len(values) != dims:
        raise ShardingError(f"{name}={value} has {len(values)} entries for {dims} spatial dims; give one, or one a dim")
    return values
