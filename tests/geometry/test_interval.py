"""The interval rule against brute force: every output row's reads are listed one by one."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, cut_points
from jigsaw.geometry.stencil_rules import InterpolationTable, StencilRule, StencilWindow, TransposedWindow, derive_cut

windows = st.builds(
    StencilWindow,
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    below=st.integers(-2, 5),
    above=st.integers(-2, 5),
    ceil=st.booleans(),
)
spreads = st.builds(
    TransposedWindow,
    kernel=st.integers(1, 5),
    stride=st.integers(1, 4),
    dilation=st.integers(1, 3),
    crop=st.integers(0, 4),
    extra=st.integers(0, 2),
)


def window_reads(rule: StencilWindow, o: int) -> set[int]:
    return {o * rule.stride - rule.below + k * rule.dilation for k in range(rule.kernel)}


def spread_reads(rule: TransposedWindow, o: int, n: int) -> set[int]:
    return {i for i in range(n) for k in range(rule.kernel) if i * rule.stride - rule.crop + k * rule.dilation == o}


def size_or_none(rule: StencilRule, n: int) -> int | None:
    try:
        return rule.size(n)
    except ShardingError:
        return None


@given(windows, st.integers(1, 20), st.data())
def test_window_needs_exactly_what_it_reads(rule: StencilWindow, n: int, data: st.DataObject) -> None:
    m = size_or_none(rule, n)
    assume(m is not None)
    start = data.draw(st.integers(0, m - 1))
    stop = data.draw(st.integers(start + 1, m))
    reads = set().union(*(window_reads(rule, o) for o in range(start, stop)))
    assert rule.need((start, stop), n) == (min(reads), max(reads) + 1)


@given(spreads, st.integers(1, 20), st.data())
def test_spread_needs_all_that_adds(rule: TransposedWindow, n: int, data: st.DataObject) -> None:
    m = size_or_none(rule, n)
    assume(m is not None)
    start = data.draw(st.integers(0, m - 1))
    stop = data.draw(st.integers(start + 1, m))
    low, high = rule.need((start, stop), n)
    assert 0 <= low < high <= n
    assert set().union(*(spread_reads(rule, o, n) for o in range(start, stop))) <= set(range(low, high))
    assert low * rule.stride - rule.crop <= start  # the plain op on these rows begins at or below the first output row
    tight = set().union(*(spread_reads(rule, o, n) for o in range(start, stop)))
    if tight:
        assert low >= min(tight) - 1 - rule.span // rule.stride
        assert high <= max(tight) + 2 + rule.span // rule.stride


@given(st.one_of(windows, spreads), st.integers(1, 20), st.data())
def test_reach_is_the_largest_interval_that_held_rows_give(rule: StencilRule, n: int, data: st.DataObject) -> None:
    m = size_or_none(rule, n)
    assume(m is not None)
    low = data.draw(st.integers(0, n - 1))
    high = data.draw(st.integers(low + 1, n))
    start, stop = rule.reach((low, high), n)

    def enough(a: int, b: int) -> bool:
        need = rule.need((a, b), 10**6 if isinstance(rule, TransposedWindow) else n)
        return low <= need[0] and need[1] <= high

    if isinstance(rule, TransposedWindow):  # rows below 0 add nothing, but `reach` must not rely on that
        assume(low > 0)
    inside = [(a, b) for a in range(m) for b in range(a + 1, m + 1) if enough(a, b)]
    if not inside:
        assert max(start, 0) >= min(stop, m)
    else:
        assert (max(start, 0), min(stop, m)) == (min(a for a, _ in inside), max(b for _, b in inside))


@given(st.one_of(windows, spreads), st.integers(1, 33), st.integers(1, 6), st.data())
@settings(max_examples=300)
def test_derived_cuts_partition_the_output_and_needs_cover_it(
    rule: StencilRule, n: int, pieces: int, data: st.DataObject
) -> None:
    m = size_or_none(rule, n)
    assume(m is not None)
    inner = sorted(data.draw(st.lists(st.integers(0, n), min_size=pieces - 1, max_size=pieces - 1)))
    cut = Cut(n, (0, *inner, n), ("lat",))
    halo = data.draw(st.tuples(st.integers(0, min(3, n)), st.integers(0, min(3, n))))
    cut = cut.with_halo(*halo, periodic=data.draw(st.booleans()))
    found = derive_cut(cut, rule)
    assert found.out.size == m and found.out.points[0] == 0 and found.out.points[-1] == m
    assert list(found.out.points) == sorted(found.out.points)
    for piece in range(cut.pieces):
        owned, held = found.out.owned(piece), found.out.held[piece]
        if owned[0] == owned[1]:
            assert held == owned and found.needs[piece][0] == found.needs[piece][1]
            continue
        assert held[0] <= owned[0] and owned[1] <= held[1] and held[0] >= 0 and held[1] <= m
        need, (below, above) = found.needs[piece], found.margins[piece]
        assert 0 <= need[0] <= need[1] <= n
        assert below + need[1] - need[0] + above == rule.need(held, n)[1] - rule.need(held, n)[0]
        wanted = window_reads if isinstance(rule, StencilWindow) else lambda r, o: spread_reads(r, o, n)
        reads = set().union(*(wanted(rule, o) for o in range(*held)))
        assert {r for r in reads if 0 <= r < n} <= set(range(*need))
        assert min((r for r in reads), default=0) >= 0 or below > 0
        extra = set(range(*held)) - set(range(*owned))
        kept = set(range(max(cut.held[piece][0], 0), min(cut.held[piece][1], n)))
        for o in extra:  # a row beyond the owned ones is never a reason to communicate
            assert {r for r in wanted(rule, o) if 0 <= r < n} <= kept


@pytest.mark.parametrize("n", [8, 12, 24, 48])
@pytest.mark.parametrize("pieces", [1, 2, 3, 4])
def test_multiples_of_the_stride_stay_aligned(n: int, pieces: int) -> None:
    for stride in (1, 2, 4):
        cut = Cut(n * stride, cut_points(n * stride, pieces, align=stride), ("lat",))
        down = tuple(p // stride for p in cut.points)
        for kernel in range(stride, 2 * stride + 4):
            for below in range((kernel - stride) // 2, (kernel - 1) // 2 + 1):
                above = max(kernel - stride - below, 0)
                assert derive_cut(cut, StencilWindow(kernel, stride, 1, below, above)).out.points == down
                extra = stride + 2 * below - kernel
                if 0 <= extra < stride:
                    coarse = Cut(n, down, ("lat",))
                    assert (
                        derive_cut(coarse, TransposedWindow(kernel, stride, 1, below, extra)).out.points == cut.points
                    )


def test_circular_padding_then_a_valid_window_cuts_like_zero_padding() -> None:
    cut = Cut(33, (0, 7, 20, 33), ("lon",))
    for kernel, stride in [(3, 1), (5, 1), (3, 2), (7, 2), (4, 2)]:
        below = (kernel - 1) // 2
        above = kernel - 1 - below
        padded = derive_cut(cut, StencilWindow(1, 1, 1, below, above), grow=(below, above)).out
        assert padded.points == (0, 7 + below, 20 + below, 33 + below + above)
        assert (
            derive_cut(padded, StencilWindow(kernel, stride)).out.points
            == derive_cut(cut, StencilWindow(kernel, stride, 1, below, above)).out.points
        )
        assert (
            derive_cut(padded, StencilWindow(kernel, stride)).needs[1][0] >= padded.held[1][0]
        )  # nothing is left to fetch


def test_a_halo_is_consumed_layer_by_layer() -> None:
    cut = Cut(24, (0, 12, 24), ("lat",)).with_halo(2, 2)
    once = derive_cut(cut, StencilWindow(3, 1, 1, 1, 1))
    assert once.out.held == ((0, 13), (11, 24)) and once.needs == cut.held and once.margins == ((1, 0), (0, 1))
    assert derive_cut(once.out, StencilWindow(3, 1, 1, 1, 1)).out.held == ((0, 12), (12, 24))


def test_a_periodic_halo_stays_periodic_where_the_strides_close_the_circle() -> None:
    cut = Cut(24, (0, 12, 24), ("lon",)).with_halo(2, 2, periodic=True)
    once = derive_cut(cut, StencilWindow(3, 1, 1, 1, 1), wrap=True)
    assert once.out.held == ((-1, 13), (11, 25)) and once.needs == cut.held and once.margins == ((0, 0), (0, 0))
    assert derive_cut(cut, StencilWindow(3, 1, 1, 1, 1)).out.held == ((0, 13), (11, 24))
    open_circle = derive_cut(cut, StencilWindow(4, 3, 1, 1, 1), wrap=True)
    assert open_circle.out.held[0][0] == 0


def test_a_table_reads_what_it_lists() -> None:
    rule = InterpolationTable((0, 0, 1, 1, 2, 2), (0, 1, 1, 2, 2, 2))
    assert rule.size(3) == 6 and rule.need((1, 4), 3) == (0, 3) and rule.reach((1, 3), 3) == (2, 6)
    assert derive_cut(Cut(3, (0, 1, 3), ("lat",)), rule).out.points == (0, 2, 6)


def test_a_window_that_does_not_fit_is_named() -> None:
    with pytest.raises(ShardingError, match=r"window of 5 rows .* 3 rows padded by \(0, 0\); pad more"):
        StencilWindow(5).size(3)
    with pytest.raises(ShardingError, match=r"transposed window .* lower padding"):
        TransposedWindow(2, crop=4).size(2)
