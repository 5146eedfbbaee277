"""Plans of how queries, keys and values are cut while attention is computed, in each of its ways."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from jigsaw.geometry.cut import Cut, cut_by_some_axes, whole_dim
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.geometry.matmul_grid import refine_cut
from jigsaw.nn.attention.attention_ways import AttentionSizes, splits_of_cuts
from jigsaw.nn.products.label_cuts import LabelCuts, choose_label_cuts
from jigsaw.nn.rank_order import CutGroup, axes_of_cuts, bare_cuts, coordinates_along, size_of_cuts
from jigsaw.ops.meeting.reshaped_cuts import merge_cut_group

ATTENTION_NAME = "scaled_dot_product_attention"
QUERY_LABEL, KEY_LABEL, FEATURE_LABEL, VALUE_FEATURE_LABEL = "query", "key", "feature", "value feature"
_KEY_HEAD_LABEL = "key head"

Shapes = tuple[tuple[int, ...], ...]
GivenLayouts = tuple[Layout | None, ...]


def labels_of_operand(ndim: int, batch: tuple[str, ...], *last: str) -> tuple[str, ...]:
    """Return the labels of an operand of `ndim` dims that ends in `last`, after some or all batch dims, heads last."""
    return (*batch, *last)[len(batch) + len(last) - ndim :]


def batch_labels(*ndims: int) -> tuple[str, ...]:
    """Return the labels of the batch dims of operands that have `ndims` dims."""
    return tuple([f"batch {d}" for d in range(max(ndims) - 2)])


@dataclass(frozen=True)
class AttentionPlan:
    """Cuts of queries, keys and values during the computation, and the labels of each."""

    cuts: LabelCuts
    labels: tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
    out: Layout
    keys_alone: bool  # True where an axis cuts keys or values and not queries
    shared_by: int = 1  # number of a rank's query heads that share one of its key heads
    # for a ring: keys cut by the axes that cut both queries and keys, queries by the others; None without such axes
    around: LabelCuts | None = None

    @property
    def moving(self) -> tuple[str, ...]:
        """Axes along which keys and values have to move to meet all queries."""
        return () if self.around is None else axes_of_cuts(self.around.cuts[KEY_LABEL])


@lru_cache(maxsize=1024)
def plan_attention(operands: GivenLayouts, sizes: Shapes, shared_by: int) -> AttentionPlan | None:
    """Return the plan for queries, keys and values, or None where query heads of a rank lack key heads of their own
    (`shared_by` query heads share each key head).
    """
    ndims = [len(size) for size in sizes]
    if min(ndims) > 1 and (sizes[0][-1] != sizes[1][-1] or sizes[1][-2] != sizes[2][-2]):
        raise RuntimeError(
            f"{ATTENTION_NAME} of shapes {[tuple(size) for size in sizes]}: queries and keys need the same last dim, "
            "keys and values the same second to last"
        )
    batch = batch_labels(*ndims)
    labels = (
        labels_of_operand(ndims[0], batch, QUERY_LABEL, FEATURE_LABEL),
        labels_of_operand(ndims[1], batch, KEY_LABEL, FEATURE_LABEL),
        labels_of_operand(ndims[2], batch, KEY_LABEL, VALUE_FEATURE_LABEL),
    )
    layouts, shapes = list(operands), list(sizes)
    for i in (1, 2) if shared_by > 1 else ():
        # plan as if each key head were repeated for every query head that shares it
        shapes[i] = (*shapes[i][:-3], shapes[i][-3] * shared_by, *shapes[i][-2:])
        layouts[i] = _with_longer_heads(layouts[i], shared_by)
    out = (*batch, QUERY_LABEL, VALUE_FEATURE_LABEL)
    whole = (KEY_LABEL, FEATURE_LABEL)
    plan = choose_label_cuts(ATTENTION_NAME, tuple(layouts), tuple(shapes), labels, out, whole)
    axes = [a for layout in operands[1:] if layout is not None for a in layout.dim_axes(layout.ndim - 2)]
    result, keys_alone = plan.result_layout(out), any(a not in plan.work.cut_axes for a in axes)
    if shared_by > 1:
        heads, *others = plan.cuts[batch[-1]]
        if others or any(p % shared_by for p in heads.points):
            return None
        of_keys = Cut(heads.size // shared_by, tuple(p // shared_by for p in heads.points), heads.axes)
        plan = LabelCuts({**plan.cuts, _KEY_HEAD_LABEL: (of_keys,)}, plan.work)
        of_key, of_value = ((*by[:-3], _KEY_HEAD_LABEL, *by[-2:]) for by in labels[1:])
        labels = labels[0], of_key, of_value
    around = None if keys_alone else _cuts_around_ring(operands, plan)
    return AttentionPlan(plan, labels, result, keys_alone, shared_by, around)


def _with_longer_heads(layout: Layout | None, times: int) -> Layout | None:
    if layout is None:
        return None
    group = [Cut(c.size, c.points, c.axes) for c in layout.dim(layout.ndim - 3)]
    last = group.pop()
    longer = Cut(last.size * times, tuple(p * times for p in last.points), last.axes)
    return layout.replace_dim(layout.ndim - 3, *group, longer)


def _cuts_around_ring(layouts: GivenLayouts, plan: LabelCuts) -> LabelCuts | None:
    of_queries, sizes = axes_of_cuts(plan.cuts[QUERY_LABEL]), dict(plan.work.axes)
    token_cuts = [bare_cuts(layout.dim(layout.ndim - 2)) for layout in layouts[1:] if layout is not None]
    groups = [tuple([cut_by_some_axes(c, of_queries, sizes) for c in group]) for group in token_cuts]
    keys = max(groups, key=lambda group: len(axes_of_cuts(group)), default=())
    moving = axes_of_cuts(keys)
    # keys and values that were flattened from different dims have no common blocks
    if not moving or not all(_have_blocks_of(group, keys) for group in token_cuts):
        return None
    others = [a for a in of_queries if a not in moving]
    queries = tuple([cut_by_some_axes(c, others, sizes) for c in plan.cuts[QUERY_LABEL]])
    cuts = {**plan.cuts, QUERY_LABEL: queries, KEY_LABEL: keys}
    # the dim of key heads is the dim of query heads with other numbers, so it is left out
    counted = [group for by, group in cuts.items() if by != _KEY_HEAD_LABEL]
    return LabelCuts(cuts, Layout.from_dims(counted, plan.work.axes))


def _have_blocks_of(group: CutGroup, keys: CutGroup) -> bool:
    sizes, wanted = ([c.size for c in merge_cut_group(cuts)] for cuts in (group, keys))
    return not any(c.is_cut for c in group) or sizes == wanted or set(axes_of_cuts(group)) == set(axes_of_cuts(keys))


def heads_of_keys(plan: AttentionPlan, shapes: Shapes) -> Cut | None:
    """Return the dim of key heads that ranks could share out; None where there is none."""
    head = plan.labels[1][-3:-2]
    if not head or min(map(len, shapes)) < 3 or len(plan.cuts.cuts[head[0]]) > 1:
        return None
    heads = plan.cuts.cuts[head[0]][0]
    wanted = (heads.size * plan.shared_by, heads.size, heads.size)
    return heads if tuple([shape[-3] for shape in shapes]) == wanted else None


@lru_cache(maxsize=1024)
def attention_sizes(
    plan: AttentionPlan, shapes: Shapes, itemsize: int, is_mirrored: bool = False, within_axes: bool = True
) -> AttentionSizes:
    """Return the sizes on the first rank along the axes that cut both queries and keys.  `is_mirrored`: queries change
    ranks in a ring; `within_axes`: an axis may be divided between heads and a ring.
    """
    assert plan.around is not None
    first = (0,) * len(plan.out.axes)
    places = list(coordinates_along(plan.out, plan.moving))
    queries, keys = plan.cuts.cuts[QUERY_LABEL], plan.around.cuts[KEY_LABEL]
    heads = heads_of_keys(plan, shapes)
    of_operands: list[int] = []
    for shape, labels in zip(shapes, plan.labels, strict=True):
        wanted = plan.cuts.wanted_cuts(shape, labels)
        of_operands.append(math.prod(_rows_at(g, plan.out, first) for g in (*wanted[:-2], wanted[-1])))
    of_result = math.prod(
        _rows_at(g, plan.out, first) for g in (*plan.out.dims()[:-2], plan.out.dim(plan.out.ndim - 1))
    )
    return AttentionSizes(
        tuple([_rows_at(queries, plan.out, at) for at in places]),
        tuple([_rows_at(keys, plan.out, at) for at in places]),
        0 if heads is None else _rows_at((heads,), plan.out, first),
        of_operands[0] + of_result,
        of_operands[1] + of_operands[2],
        itemsize,
        () if heads is None else splits_of_cuts(moving_cuts(plan), plan.out.axes, within_axes),
        is_mirrored,
    )


def moving_cuts(plan: AttentionPlan) -> CutGroup:
    """Return the cuts of the keys by the axes along which they move."""
    return () if plan.around is None else tuple([c for c in plan.around.cuts[KEY_LABEL] if c.axes])


def _rows_at(group: Sequence[Cut], layout: Layout, at: MeshCoordinate) -> int:
    owned = (c.owned(layout.piece(c, at)) for c in group)
    return math.prod(stop - start for start, stop in owned)


@lru_cache(maxsize=1024)
def layouts_by_heads(plan: AttentionPlan, axes: tuple[str, ...], layouts: GivenLayouts, shapes: Shapes) -> GivenLayouts:
    """Return the layouts once `axes` cut heads instead of tokens; operands that are plain, or cannot, stay."""
    heads = heads_of_keys(plan, shapes)
    assert heads is not None
    fine = refine_cut(heads, axes, dict(plan.out.axes))
    by_heads: list[Layout | None] = []
    for layout, times in zip(layouts, (plan.shared_by, 1, 1), strict=True):
        longer = Cut(fine.size * times, tuple(p * times for p in fine.points), fine.axes)
        by_heads.append(None if layout is None else _onto_heads(layout, longer))
    return tuple(by_heads)


def _onto_heads(layout: Layout, heads: Cut) -> Layout:
    layout, head, token = layout.without_halo(), layout.ndim - 3, layout.ndim - 2
    elsewhere = {a for d in range(layout.ndim) if d not in (head, token) for a in layout.dim_axes(d)}
    if elsewhere.intersection(heads.axes) or len(layout.dim(head)) > 1:
        return layout
    kept = [a for a in layout.dim_axes(token) if a not in heads.axes]
    tokens = [cut_by_some_axes(c, kept, dict(layout.axes)) for c in layout.dim(token)]
    return layout.replace_dim(token, *tokens).replace_dim(head, heads)


@lru_cache(maxsize=1024)
def layout_of_weights(plan: AttentionPlan, shapes: Shapes) -> Layout:
    """Return the layout of the weights [..., L, S] without S; dims that neither queries nor keys have are 1."""
    ndims = [len(size) for size in shapes[:2]]
    batch = batch_labels(*map(len, shapes))[-max(ndims) + 2 :] if max(ndims) > 2 else ()
    dims: list[CutGroup] = []
    for d, by in enumerate(reversed(batch)):
        longest = max(size[-3 - d] if len(size) > 2 + d else 1 for size in shapes[:2])
        group = plan.cuts.cuts[by]
        dims.insert(0, group if longest == size_of_cuts(group) else (whole_dim(1),))
    return Layout.from_dims([*dims, plan.cuts.cuts[QUERY_LABEL]], plan.out.axes)
