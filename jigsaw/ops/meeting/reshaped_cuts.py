"""Cuts of a reshaped tensor, derived from its own: dims flatten together and split again.  Integers only.

**The rule.**  A view keeps every row where it lies; where it cannot, the fewest rows move before it.

1. Dims that flatten together keep their cuts; a cut dim splits where its cut points lie on multiples.
2. Cut points that lie between go to the nearest multiples, of two to the larger one.  Ranks may then have no row: 3
   windows on 4 ranks.  Where all rows would go to one rank, the multiples are shared out evenly instead.
3. Where no multiples leave rows to several ranks, the axes that are in the way move to the dim of most rows (of equals
   the first).  It is cut evenly, by one exchange, counted as "recut".
4. Where no other dim can be cut either, the first rank along these axes gets what lies in the way, the others nothing;
   a warning says so where it is much.

[2, 12, 10] with 12 rows cut at 0, 4, 12 as (2, 3, 4, 10) is cut at 0, 1, 3 windows of 4 rows.  Cut at 0, 5, 12 a window
would lie on two ranks: then the rows first move to the nearest multiples, here 0, 4, 12.  As (2, 5, 24) every new row
has parts of three or four old ones: 2 is cut instead.  A single window of 12 rows, (2, 1, 12, 10), stays cut inside.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import combinations

from jigsaw.geometry.cut import Cut, Interval, cut_points, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.meeting.common_cuts import cut_at_multiples, pieces_with_rows


@lru_cache(maxsize=4096)
def plan_reshape(layout: Layout, shape: tuple[int, ...]) -> tuple[Layout, Layout]:
    """Return the layout that a tensor must have before it is reshaped (its own, or one by the rule), and the reshaped
    one.  `shape` has equally many elements, and not zero.
    """
    after = _reshaped_layout(layout, shape)
    if after is not None:
        return layout, after
    for before in _layouts_to_try(layout, shape):
        after = _reshaped_layout(before, shape)
        if after is not None:
            return before, after
    raise AssertionError(f"{layout} as {shape}: nothing cuts inside the first dim")


def _reshaped_layout(layout: Layout, shape: Sequence[int]) -> Layout | None:
    dims = _reshaped_dims(layout.cuts, shape) or _reshaped_dims(merge_cut_group(layout.cuts), shape)
    return None if dims is None else Layout.from_dims(dims, layout.axes)


def _layouts_to_try(layout: Layout, shape: tuple[int, ...]) -> Iterator[Layout]:
    """Layouts by the rule, the one for which the fewest rows move first."""
    at_multiples = _layout_to_split(layout, shape)
    if at_multiples is not None:
        yield at_multiples
    bare = layout.without_halo()
    if bare is not layout:
        yield bare
    # try to give up as few cuts as possible, so that the others can stay
    cut = [k for k, c in enumerate(bare.cuts) if c.is_cut]
    for taken in (some for n in range(1, len(cut) + 1) for some in combinations(cut, n)):
        axes = tuple(axis for k in taken for axis in bare.cuts[k].axes)
        free = _with_cuts(bare, {k: whole_dim(bare.cuts[k].size) for k in taken})
        if _split_layout(free, shape) is None:
            continue
        pieces = math.prod(bare.cuts[k].pieces for k in taken)
        others = [k for k, c in enumerate(free.cuts) if c.size > 1 and not c.is_cut]
        for k in sorted(others, key=lambda k: -free.cuts[k].size):
            n = free.cuts[k].size
            moved = _split_layout(_with_cuts(free, {k: Cut(n, cut_points(n, pieces), axes)}), shape)
            if moved is not None and any(pieces_with_rows(c.points) > 1 for c in moved.cuts if c.axes == axes):
                yield moved
        first = others[0] if others else None
        rows = 1 if first is None else free.cuts[first].size
        yield free if first is None else _with_cuts(free, {first: Cut(rows, (0, *[rows] * pieces), axes)})


def _with_cuts(layout: Layout, new: dict[int, Cut]) -> Layout:
    return Layout(tuple(new.get(k, c) for k, c in enumerate(layout.cuts)), layout.axes, layout.groups)


def _split_layout(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """Return the layout itself where it can be reshaped, or with its points at multiples, or None."""
    if _reshaped_layout(layout, shape) is not None:
        return layout
    moved = _layout_to_split(layout, shape)
    return None if moved is None or _reshaped_layout(moved, shape) is None else moved


def _split_inner(cut: Cut, inner: int) -> tuple[Cut, Cut] | None:
    """One cut as (outer, whole inner), when every edge lies on a multiple of `inner`."""
    if cut.size % inner or any(e % inner for e in (*cut.points, *(e for held in cut.held for e in held))):
        return None
    held = [(a // inner, b // inner) for a, b in cut.held]
    points = tuple(p // inner for p in cut.points)
    return Cut(cut.size // inner, points, cut.axes, tuple(held), wraps=cut.wraps, by_index=cut.by_index), whole_dim(
        inner
    )


def merge_cut_group(cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """Return the cuts of a flattened dim in canonical form: a cut followed by a whole one is one cut; whole dims of
    size 1 vanish.
    """
    merged: list[Cut] = []
    for cut in cuts:
        if cut.size == 1 and not cut.is_cut and not cut.has_halo:
            continue
        if merged and not cut.is_cut and not cut.has_halo:
            outer, n = merged.pop(), cut.size
            held: list[Interval] = [(a * n, b * n) for a, b in outer.held]
            points = tuple(p * n for p in outer.points)
            cut = Cut(outer.size * n, points, outer.axes, tuple(held), wraps=outer.wraps, by_index=outer.by_index)
        merged.append(cut)
    return tuple(merged) or (whole_dim(1),)


def _reshaped_dims(cuts: Sequence[Cut], shape: Sequence[int]) -> list[tuple[Cut, ...]] | None:
    """Return the cuts of each dim of a reshaped tensor, or None when a dim would take a part of a cut one."""
    single = _dims_of_single_rows(cuts, shape)
    left = [c for k, c in enumerate(cuts) if (c.size != 1 or c.is_cut or c.has_halo) and k not in single.values()]
    dims: list[tuple[Cut, ...]] = []
    for d, size in enumerate(shape):
        taken: list[Cut] = [cuts[single[d]]] if d in single else []
        missing = size
        while missing > 1:
            if not left:
                return None
            cut = left.pop(0)
            if missing % cut.size == 0:
                missing //= cut.size
                taken.append(cut)
                continue
            halves = _split_inner(cut, cut.size // missing) if cut.size % missing == 0 else None
            if halves is None:
                return None
            taken.append(halves[0])
            left.insert(0, halves[1])
            missing = 1
        dims.append(merge_cut_group(taken))
    return None if left else dims


def _dims_of_single_rows(cuts: Sequence[Cut], shape: Sequence[int]) -> dict[int, int]:
    """Return the new dim of each cut of a single row (a class token), so that it does not cut the dims beside it."""
    places: dict[int, int] = {}
    for k, cut in enumerate(cuts):
        if cut.size != 1 or not cut.is_cut or cut.has_halo:
            continue
        before = math.prod(c.size for c in cuts[:k])
        # dims of size 1 that have as many elements before them are in one place; theirs is the order among these
        same = [j for j in range(len(cuts)) if cuts[j].size == 1 and math.prod(c.size for c in cuts[:j]) == before]
        ones = [d for d, n in enumerate(shape) if n == 1 and d not in places]
        beside = [d for d in ones if math.prod(shape[:d]) == before]
        # where the dim that follows is split (heads, then the row), the row waits; where it stays whole, it flattens
        follows = next((c.size for c in cuts[k:] if c.size > 1), 1)
        joined = next((n for d, n in enumerate(shape) if n > 1 and math.prod(shape[:d]) == before), 1)
        after = [d for d in ones if math.prod(shape[:d]) > before] if joined % follows else []
        at = same.index(k)
        if at == len(same) - 1 > 0 and len(beside) > len(same):
            places[beside[-1]] = k
        elif at < len(beside):
            places[beside[at]] = k
        elif after:
            places[after[0]] = k
    return places


def _layout_to_split(layout: Layout, shape: Sequence[int]) -> Layout | None:
    """Return the layout with its points at the multiples that `shape` needs; None where it would part a cut dim."""
    # [2, 12 (cut at 0, 5, 12), 10] as (2, 3, 4, 10): the dims that follow a cut one count as its rows, 120 of them with
    # 10 to each, and 3 x 40 of these split at every 4th row of the 12: 0, 4, 12
    cuts = list(layout.cuts)
    origins = [k for k, c in enumerate(cuts) if c.is_cut or c.has_halo]
    left = [c for c in merge_cut_group(cuts) if c.size != 1 or c.is_cut or c.has_halo]
    places: list[int | None] = []
    for cut in left:
        places.append(origins.pop(0) if cut.is_cut or cut.has_halo else None)
    for size in shape:
        missing = size
        while missing > 1:
            if not left:
                return None
            cut, place = left.pop(0), places.pop(0)
            if missing % cut.size == 0:
                missing //= cut.size
                continue
            if cut.size % missing:
                return None
            inner = cut.size // missing
            if place is not None:
                rows = inner // math.gcd(inner, cut.size // cuts[place].size)
                moved = cut_at_multiples(cuts[place], rows)
                if moved is None:
                    return None
                cuts[place] = moved
            left.insert(0, whole_dim(inner))
            places.insert(0, None)
            missing = 1
    return Layout(tuple(cuts), layout.axes, layout.groups)
