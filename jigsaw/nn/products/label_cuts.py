"""Products by label: which label each mesh axis cuts, and how the operands move for it.

Each dim of each operand has a label, as in einsum.  An axis that cuts two labels would spread their products over the
ranks.  So it keeps one of them, and the operands that it cuts elsewhere move:

1. the label that comes first in the result keeps the axis; 2. where the result has none of them (all are summed), the
one for which fewer elements move, then the first operand's.

This follows from the layouts alone, so it is the same on every rank.  Example: four ranks on lat=2, lon=2, scores
"bid,bjd->bij" of tokens i and j that are both cut by lat and lon. i comes first. So queries stay, each rank gets all
keys, and the scores are cut along i.  Then "bij,bjd->bid": i keeps both axes again, and the values travel.  In
"bid,bie->bde" only i is cut: nothing moves, and the sums are added up.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from torch import Tensor

from jigsaw import comm
from jigsaw.comm.exchange import redistribute_rows
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, cut_by_some_axes, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.matmul_grid import refine_cut
from jigsaw.nn.rank_order import CutGroup, axes_of_cuts, bare_cuts, rearrange_rows, size_of_cuts, take_owned_rows
from jigsaw.ops.meeting.plain_operands import plain_operand, tell_of_repeats
from jigsaw.ops.meeting.reshaped_cuts import merge_cut_group
from jigsaw.tile.tile import Tile

DimLabels = Sequence[str]


@dataclass(frozen=True, eq=False)
class LabelCuts:
    """The cut of each label of a product during its computation; an axis cuts one of those that `work` has."""

    cuts: Mapping[str, CutGroup]
    work: Layout

    def bring_operand(self, operand: Tensor | Tile, labels: DimLabels, like: Tile) -> Tensor:
        """Return the local part of an operand with `labels` where the product needs it; a dim that broadcasts is whole.

        A plain tensor is the whole one, on the mesh of `like`.

        *Sends*: the rows of a tile that is cut otherwise, to each rank that works with them; backward, their gradients,
        which are added up.  One more all-reduce sums the gradient of a tile that lacks a cut label and is the same on
        the ranks along its axis. *Raises*: `ShardingError` where other axes cut this dim than those of the other
        operands, and it was flattened.
        """
        if isinstance(operand, Tile):
            own = operand.owned()
            return _bring_tile(own, _plan_operand_move(self, own.layout, tuple(labels)))
        wanted = _cuts_of_plain(self, operand.shape, tuple(labels))
        x = plain_operand(operand, like, self.work, is_whole=True)
        for d, group in wanted:
            x = take_owned_rows(x, d, group, self.work, like.coordinate)
        if wanted:
            tell_of_repeats(operand, x)
        return x

    def wanted_cuts(self, shape: Sequence[int], labels: DimLabels) -> tuple[CutGroup, ...]:
        sizes = [size_of_cuts(self.cuts[by]) for by in labels]
        if any(n not in (1, size) for n, size in zip(shape, sizes, strict=True)):
            raise RuntimeError(f"an operand of shape {tuple(shape)} does not broadcast to {tuple(sizes)}")
        return tuple(
            (whole_dim(1),) if n == 1 != size else self.cuts[by]
            for n, size, by in zip(shape, sizes, labels, strict=True)
        )

    def result_layout(self, out: DimLabels) -> Layout:
        return Layout.from_dims([merge_cut_group(self.cuts[by]) for by in out], self.work.axes)

    def axes_along(self, labels: DimLabels) -> list[str]:
        return [a for by in labels for a in axes_of_cuts(self.cuts[by])]


@lru_cache(maxsize=1024)
def _cuts_of_plain(
    cuts: LabelCuts, shape: tuple[int, ...], labels: tuple[str, ...]
) -> tuple[tuple[int, CutGroup], ...]:
    """Return the dims of a plain operand of which each rank takes its rows, and how they are cut."""
    wanted = cuts.wanted_cuts(shape, labels)
    return tuple((d, group) for d, group in enumerate(wanted) if any(c.is_cut for c in group))


def cuts_of_tile(tile: Tile, labels: DimLabels) -> LabelCuts:
    """Return the cuts that a tile has, for operands that are to meet it."""
    return LabelCuts(dict(zip(labels, tile.layout.dims(), strict=True)), tile.layout)


@lru_cache(maxsize=1024)
def choose_label_cuts(
    name: str,
    layouts: tuple[Layout | None, ...],
    shapes: tuple[tuple[int, ...], ...],
    labels: tuple[tuple[str, ...], ...],
    out: tuple[str, ...],
    whole: tuple[str, ...] = (),
) -> LabelCuts:
    """Choose the cuts of a product by the rule above; nothing is to cut the labels `whole`, and layouts None are plain.

    *Raises*: `RuntimeError` where the sizes of a label differ.
    """
    axes = next(layout.axes for layout in layouts if layout is not None)
    sizes = _label_sizes(name, shapes, labels)
    groups: dict[str, list[CutGroup]] = {by: [] for by in sizes}
    for layout, operand in zip(layouts, labels, strict=True):
        for d, by in enumerate(operand):
            # a dim of size 1 that broadcasts does not decide the label's cut
            if layout is not None and layout.shape[d] == sizes[by]:
                groups[by].append(bare_cuts(layout.dim(d)))
    owners: dict[str, str] = {}
    for axis, _ in axes:
        cut = [by for by in sizes if by not in whole and any(axis in axes_of_cuts(g) for g in groups[by])]
        if cut:
            named = [by for by in out if by in cut]
            owners[axis] = named[0] if named else min(cut, key=lambda by: _elements_moved(axis, by, layouts, labels))
    cuts = {by: _cuts_along(groups[by], n, [a for a in owners if owners[a] == by], axes) for by, n in sizes.items()}
    return LabelCuts(cuts, Layout.from_dims(list(cuts.values()), axes))


def _label_sizes(name: str, shapes: Sequence[Sequence[int]], labels: Sequence[DimLabels]) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for shape, operand in zip(shapes, labels, strict=True):
        for size, by in zip(shape, operand, strict=True):
            known = sizes.get(by, 1)
            if known != 1 and size not in (1, known):
                raise RuntimeError(f"{name}: dim {by!r} has sizes {known} and {size}")
            sizes[by] = size if known == 1 else known
    return sizes


def _elements_moved(axis: str, by: str, layouts: Sequence[Layout | None], labels: Sequence[DimLabels]) -> float:
    moved = 0.0
    for layout, operand in zip(layouts, labels, strict=True):
        cut = [] if layout is None else [label for d, label in enumerate(operand) if axis in layout.dim_axes(d)]
        if layout is not None and cut and by not in cut:
            # an operand with this label is cut along it instead; one without it is needed whole by all ranks along the
            # axis
            moved += math.prod(layout.shape) * (1 if by in operand else layout.size_of(axis))
    return moved


def _cuts_along(
    groups: Sequence[CutGroup], size: int, kept: Sequence[str], axes: Sequence[tuple[str, int]]
) -> CutGroup:
    """Return the cuts of a label by the axes that it keeps: as in the first of the operands that most of them cut."""
    thinned = [tuple(cut_by_some_axes(c, kept, dict(axes)) for c in group) for group in groups]
    return max(thinned, key=lambda group: len(axes_of_cuts(group)), default=(whole_dim(size),))


@dataclass(frozen=True)
class _OperandMove:
    """Move of an operand to where it is needed; `reordered` dims first take the order of other cuts."""

    source: Layout
    target: Layout
    reordered: tuple[tuple[int, CutGroup], ...]
    # axes along which the operand is then the same on all ranks, and each rank uses it for different results
    in_parts: tuple[str, ...]

    @cached_property
    def is_there(self) -> bool:
        return self.source == self.target and not self.reordered and not self.in_parts


def _bring_tile(x: Tile, move: _OperandMove) -> Tensor:
    local = x.local
    if move.is_there:
        return local
    for d, group in move.reordered:
        local = rearrange_rows(local.movedim(d, 0), bare_cuts(x.layout.dim(d)), group, x).movedim(0, d)
    local = redistribute_rows(local, move.source, move.target, x.mesh)
    return comm.use_in_parts(local, x.mesh, move.in_parts)


@lru_cache(maxsize=1024)
def _plan_operand_move(cuts: LabelCuts, layout: Layout, labels: tuple[str, ...]) -> _OperandMove:
    wanted, work = cuts.wanted_cuts(layout.shape, labels), cuts.work
    sources: list[CutGroup] = []
    targets: list[CutGroup] = []
    reordered: list[tuple[int, CutGroup]] = []
    for d, group in enumerate(wanted):
        own = bare_cuts(layout.dim(d))
        pair = _in_one_structure(own, group)
        if pair is None and set(axes_of_cuts(own)) == set(axes_of_cuts(group)):
            reordered.append((d, group))
            pair = group, group
        if pair is None:
            raise ShardingError(
                f"dim {d} of a Tile cut as {layout} cannot meet a dim cut as "
                f"{Layout(group, work.axes, (len(group),))}: they were flattened from other dims, and other axes cut "
                "them; bring one to the other's cuts with tile.redistribute before it is flattened"
            )
        sources.append(pair[0])
        targets.append(pair[1])
    kept = Layout.from_dims(targets, layout.axes).cut_axes
    # these axes cut the operand, and also a label that it lacks: so each rank needs all of it, for its own results
    shared = [a for a in layout.cut_axes if a not in kept and a in work.cut_axes]
    held = [
        [_held_along(cut, wanted_cut, shared, layout) for cut, wanted_cut in zip(source, target, strict=True)]
        for source, target in zip(sources, targets, strict=True)
    ]
    target = Layout.from_dims(held, layout.axes)
    in_parts = tuple(a for a in work.cut_axes if a not in target.cut_axes)
    return _OperandMove(Layout.from_dims(sources, layout.axes), target, tuple(reordered), in_parts)


def _held_along(cut: Cut, wanted: Cut, shared: Sequence[str], layout: Layout) -> Cut:
    """Return the cut `wanted`, its pieces as halos on all ranks along axes of `cut` that are `shared`."""
    axes = [a for a in cut.axes if a in shared]
    if not axes:
        return wanted
    fine = refine_cut(wanted, axes, dict(layout.axes))
    every = fine.pieces // wanted.pieces
    return fine.holding([wanted.owned(i // every) for i in range(fine.pieces)])


def _in_one_structure(cuts: CutGroup, wanted: CutGroup) -> tuple[CutGroup, CutGroup] | None:
    """Return pairs of cuts of the same sizes, as a dim lies and as it is wanted; None if its dims were flattened."""
    if not any(c.is_cut for c in wanted):
        return cuts, tuple(c.uncut() for c in cuts)
    if not any(c.is_cut for c in cuts):
        return tuple(c.uncut() for c in wanted), wanted
    for source, target in ((cuts, wanted), (merge_cut_group(cuts), merge_cut_group(wanted))):
        if [c.size for c in source] == [c.size for c in target]:
            return source, target
    return None
