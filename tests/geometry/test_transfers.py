"""The planner alone: the plans of all ranks, carried out in one process on numpy arrays, against wrapped indexing."""

from __future__ import annotations

import gc
import itertools
import sys
from itertools import pairwise
from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, box_shape, cut_points, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.transfers import holding_coarser, layouts_of_gather, plan_exchange, row_moves


def box_of(whole_array, box):
    """The box of an array, wrapped: what a rank must hold."""
    for dim, (size, interval) in enumerate(zip(whole_array.shape, box, strict=True)):
        rows = np.arange(*interval)
        whole_array = whole_array.take(rows % size if size else rows, axis=dim)
    return whole_array


def at(array, box):
    return array[(*(slice(*i) for i in box), ...)]


def carry_out(source, target):
    """Run every rank's plan; check each message, each cell and each count; return the plans."""
    sizes = tuple(c.size for c in source.cuts)
    array = np.arange(prod(sizes)).reshape(sizes)
    plans = {coord: plan_exchange(source, target, coord) for coord in source.coords()}
    by_index = {source.index(c): c for c in plans}
    for coord, todo in plans.items():
        wanted = box_of(array, target.held(coord))
        found, written = np.full(wanted.shape, -1), np.zeros(wanted.shape, int)
        mine = box_of(array, source.held(coord))
        assert (todo.source_shape, todo.target_shape) == (mine.shape, wanted.shape)
        for move in todo.kept:
            assert move.giver == source.index(coord)
            at(found, move.placed)[...] = at(mine, move.taken)
            at(written, move.placed)[...] += 1
        assert len({peer for peer, _ in todo.receives}) == len(todo.receives)
        for peer, boxes in todo.receives:
            there = plans[by_index[peer]]
            taken = dict(there.sends)[source.index(coord)]
            theirs = box_of(array, source.held(by_index[peer]))
            for take, place in zip(taken, boxes, strict=True):
                check_giver(source, coord, by_index[peer], take)
                assert at(theirs, take).shape == at(found, place).shape
                at(found, place)[...] = at(theirs, take)
                at(written, place)[...] += 1
        np.testing.assert_array_equal(found, wanted)
        assert (written == 1).all()
        assert received_cells(todo) == cells_lacked(source, target, coord)
    check_messages(plans, by_index)
    return plans


def check_giver(source, asker, giver, box):
    """Only owned rows are given, and along axes that cut nothing everybody asks at home."""
    assert giver != asker
    for (start, stop), held, owned in zip(box, source.held(giver), source.owned(giver), strict=True):
        assert owned[0] - held[0] <= start < stop <= owned[1] - held[0]
    for (axis, _), a, b in zip(source.axes, asker, giver, strict=True):
        assert axis in source.cut_axes or a == b


def check_messages(plans, by_index):
    sent = {(me, by_index[peer]) for me, todo in plans.items() for peer, _ in todo.sends}
    received = {(by_index[peer], me) for me, todo in plans.items() for peer, _ in todo.receives}
    assert sent == received
    for todo in plans.values():
        peers = [peer for peer, _ in todo.sends]
        assert peers == sorted(set(peers))


def received_cells(todo):
    return sum(prod(b - a for a, b in box) for _, boxes in todo.receives for box in boxes)


def cells_lacked(source, target, coord):
    """Brute force: how many of the needed cells are not in the held box, at any wrap."""
    needed = [range(*i) for i in target.held(coord)]
    has = [
        {r % c.size for r in range(*i)} if c.size else set()
        for c, i in zip(source.cuts, source.held(coord), strict=True)
    ]
    kept = [sum(r % c.size in rows for r in need) for c, rows, need in zip(source.cuts, has, needed, strict=True)]
    return prod(map(len, needed)) - prod(kept)


# -- every small case of one dim --------------------------------------------------------------------------------------


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("split", ["balanced", "chunk"])
@pytest.mark.parametrize("ranks", range(1, 7))
def test_halos_of_every_width(ranks, split, periodic):
    """Several hops wide, empty pieces included."""
    for size in (1, 2, 3, 7, 10):
        bare = Layout.of((size,), ("x",), {"x": ranks}, split=split)
        for below, above in itertools.product({0, 1, size // 2, size}, {0, 1, size - 1}):
            wide = Layout.of(
                (size,), ("x",), {"x": ranks}, split=split, halo={0: (below, above)}, periodic=(0,) * periodic
            )
            carry_out(bare, wide)
            carry_out(wide, bare)
            carry_out(wide, wide)


def test_a_halo_costs_one_message_for_each_neighbor():
    source = Layout.of((40, 40), ("lat", "lon"), {"lat": 4, "lon": 4})
    target = Layout.of((40, 40), ("lat", "lon"), {"lat": 4, "lon": 4}, halo={0: 2, 1: 3}, periodic=(1,))
    plans = carry_out(source, target)
    assert [len(plans[lat, 0].sends) for lat in range(4)] == [5, 8, 8, 5]
    assert received_cells(plans[1, 1]) == 14 * 16 - 10 * 10


def test_a_halo_that_spans_neighbors_comes_from_each():
    source = Layout.of((10,), ("x",), {"x": 5})
    target = source.replace_dim(0, source.cuts[0].with_halo(5, 0))
    assert [peer for peer, _ in carry_out(source, target)[4,].receives] == [1, 2, 3]


def test_a_halo_at_hand_costs_nothing():
    """A narrower halo, or a shift within the held rows, is cut from what is there."""
    wide = Layout.of((12, 9), ("x", None), {"x": 3}, halo={0: 3}, periodic=(0,))
    for held in ([(-1, 5), (3, 9), (7, 13)], [(-3, 1), (1, 5), (5, 9)], [(1, 3), (5, 7), (9, 11)]):
        for todo in carry_out(wide, wide.replace_dim(0, wide.cuts[0].holding(held))).values():
            assert todo.is_local
            assert todo.is_slice


def test_negative_margins_crop():
    source = Layout.of((12,), ("x",), {"x": 3})
    target = source.replace_dim(0, source.cuts[0].holding([(1, 3), (5, 8), (9, 9)]))
    plans = carry_out(source, target)
    assert all(todo.is_local for todo in plans.values())
    assert not plans[0,].keeps_all


def test_a_margin_may_be_negative_on_one_side():
    source = Layout.of((12,), ("x",), {"x": 3})
    plans = carry_out(source, source.replace_dim(0, source.cuts[0].holding([(2, 6), (6, 10), (10, 12)])))
    assert [len(p.sends) for p in plans.values()] == [0, 1, 1]


def test_a_dim_may_be_needed_many_times_over():
    for ranks in (1, 2, 3):
        source = Layout.of((4,), ("x",), {"x": ranks})
        carry_out(source, source.replace_dim(0, source.cuts[0].holding([(-9, 11)] * ranks)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_roll(ranks):
    for size, shift in itertools.product((1, 7, 10), range(-11, 12)):
        source = Layout.of((size,), ("x",), {"x": ranks})
        cut = source.cuts[0]
        carry_out(source, source.replace_dim(0, cut.holding([(a - shift, b - shift) for a, b in cut.held])))


# -- any layout to any other ------------------------------------------------------------------------------------------


@st.composite
def cuts(draw, size, pieces, axes, needs):
    """Cut anywhere; what a piece holds is any interval (`needs`), or one that has its own rows in it."""
    points = [0, *sorted(draw(st.lists(st.integers(0, size), min_size=pieces - 1, max_size=pieces - 1))), size]
    held = []
    for a, b in itertools.pairwise(points):
        if needs and size:
            start = draw(st.integers(-size - 1, 2 * size))
            held.append((start, start + draw(st.integers(0, size + 2))))
        else:
            reach = size if a < b else 0
            held.append((a - draw(st.integers(0, reach)), b + draw(st.integers(0, reach))))
    return Cut(size, tuple(points), axes, tuple(held))


@st.composite
def arrays_on(draw, sizes, axes, needs):
    free = draw(st.permutations(list(axes)))
    found = []
    for size in sizes:
        taken = tuple(free.pop() for _ in range(draw(st.integers(0, min(2, len(free))))))
        found.append(draw(cuts(size, prod(axes[a] for a in taken), taken, needs)))
    return Layout(tuple(found), tuple(axes.items()))


@st.composite
def pairs(draw):
    axes = draw(
        st.sampled_from([{"x": 3}, {"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 4, "y": 1}, {"x": 2, "y": 2, "z": 2}])
    )
    sizes = draw(st.lists(st.integers(0, 7), min_size=0, max_size=3))
    return draw(arrays_on(sizes, axes, needs=False)), draw(arrays_on(sizes, axes, needs=True))


@given(pairs())
@settings(max_examples=400, deadline=None)
def test_any_layout_to_any_need(pair):
    carry_out(*pair)


@pytest.mark.parametrize(
    "specs",
    list(
        itertools.product(
            [(None, None), ("x", None), (None, "y"), ("y", "x"), (("x", "y"), None), (None, ("y", "x"))], repeat=2
        )
    ),
)
def test_gather_cut_and_transpose(specs):
    axes = {"x": 2, "y": 3}
    source, target = (Layout.of((7, 10), spec, axes) for spec in specs)
    carry_out(source, target)


def test_what_is_held_alike_is_cut_without_a_message():
    axes = {"x": 2, "y": 3}
    source, target = Layout.of((7, 10), (None, "y"), axes), Layout.of((7, 10), ("x", "y"), axes)
    assert all(todo.is_slice for todo in carry_out(source, target).values())


def test_flattened_dims_move_as_the_dims_that_they_are():
    lat, lon = Cut(7, (0, 4, 7), ("lat",)), Cut(6, (0, 3, 6), ("lon",))
    axes = (("lat", 2), ("lon", 2))
    source = Layout.from_dims([[whole_dim(2)], [lat, lon]], axes)
    target = Layout.from_dims([[whole_dim(2)], [lat.with_halo(1, 1), lon.with_halo(2, 1, periodic=True)]], axes)
    todo = carry_out(source, target)[0, 0]
    assert (todo.source_tile, todo.source_shape) == ((2, 12), (2, 4, 3))
    assert (todo.target_tile, todo.target_shape) == ((2, 30), (2, 5, 6))


def test_moves_put_a_ranks_own_rows_first():
    source = Layout.of((8,), ("x",), {"x": 2})
    target = source.replace_dim(0, source.cuts[0].with_halo(2, 0, periodic=True))
    own, other = row_moves(source, target, (1,))
    assert (own.giver, own.taken, own.placed) == (1, ((0, 4),), ((2, 6),))
    assert (other.giver, other.taken, other.placed) == (0, ((2, 4),), ((0, 2),))


# -- what cannot be planned -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("coord", [(0,), (1,)])
def test_sizes_and_meshes_must_agree_on_every_rank(coord):
    source = Layout.of((8,), ("x",), {"x": 2})
    with pytest.raises(ShardingError, match=r"cannot exchange between .*: sizes and mesh must agree"):
        plan_exchange(source, Layout.of((9,), ("x",), {"x": 2}), coord)
    with pytest.raises(ShardingError, match=r"on mesh \{'x': 2\} and .* on mesh \{'y': 2\}: sizes and mesh must agree"):
        plan_exchange(source, Layout.of((8,), ("y",), {"y": 2}), coord)


@pytest.mark.parametrize("coord", [(0,), (1,)])
def test_rows_that_their_owner_lacks_are_refused_on_every_rank(coord):
    target = Layout.of((8,), ("x",), {"x": 2})
    source = target.replace_dim(0, target.cuts[0].holding([(0, 3), (4, 8)]))
    with pytest.raises(ShardingError, match=r"the source holds .* rows that their owner lacks cannot be exchanged"):
        plan_exchange(source, target, coord)


def test_an_empty_dim_cannot_wrap():
    source = Layout.of((0,), ("x",), {"x": 2})
    with pytest.raises(ShardingError, match=r"the target needs rows .* of a dim that has none"):
        plan_exchange(source, source.replace_dim(0, source.cuts[0].holding([(0, 0), (0, 1)])), (0,))


# -- what planning costs ----------------------------------------------------------------------------------------------


def calls_made(function, *args):
    """How many of jigsaw's functions run: a cost that does not depend on the machine, nor on what ran before.

    So once uncounted, for what a first call does, and without the collector, which may end other tests' objects here.
    """
    function(*args)
    count = 0

    def tally(frame, event, arg):
        nonlocal count
        count += event == "call" and frame.f_globals.get("__name__", "").startswith("jigsaw.")

    gc.disable()
    sys.setprofile(tally)
    try:
        function(*args)
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def halo_on(lat, lon):
    axes, shape = {"lat": lat, "lon": lon}, (69, 721, 1440)
    source = Layout.of(shape, (None, "lat", "lon"), axes)
    return source, Layout.of(shape, (None, "lat", "lon"), axes, halo={1: 2, 2: 2}, periodic=(2,))


def test_a_halo_on_1024_ranks_is_planned_by_looking_at_neighbors():
    small = calls_made(plan_exchange.__wrapped__, *halo_on(4, 4), (1, 1))
    large = calls_made(plan_exchange.__wrapped__, *halo_on(32, 32), (17, 5))
    assert len(plan_exchange(*halo_on(32, 32), (17, 5)).sends) == 8
    # one look at each of the pieces of a dim, and the rest as on 16 ranks
    assert large <= small + 4 * (32 - 4) * 2


def test_a_gather_on_1024_ranks_costs_a_few_steps_a_message():
    axes = {"lat": 32, "lon": 32}
    source, target = (Layout.of((721, 1440), spec, axes) for spec in (("lat", "lon"), (None, None)))
    assert calls_made(plan_exchange.__wrapped__, source, target, (3, 4)) < 40 * 1024


def test_rows_turned_to_columns_on_512_ranks_cost_a_few_steps_a_message():
    axes, shape = {"lat": 16, "lon": 32}, (1, 100, 721, 1440)
    source = Layout.of(shape, (None, None, ("lat", "lon"), None), axes)
    target = Layout.of(shape, (None, None, None, ("lat", "lon")), axes)
    assert len(plan_exchange(source, target, (8, 16)).sends) == 511
    assert calls_made(plan_exchange.__wrapped__, source, target, (8, 16)) < 110 * 511


def test_a_long_line_of_ranks_is_not_searched_for_every_row():
    cut = Cut(4096, cut_points(4096, 1024), ("x",))
    source = Layout((cut,), (("x", 1024),))
    target = source.replace_dim(0, cut.with_halo(9, 9, periodic=True))
    assert len(plan_exchange(source, target, (0,)).receives) == 6
    assert calls_made(plan_exchange.__wrapped__, source, target, (0,)) < 10 * 1024


def test_plans_kept_are_few():
    """The cache of plans is bounded, and nothing else in the planner is kept; tests of host calls hold it of each."""
    assert plan_exchange.cache_info().maxsize <= 512
    kept = [name for name, f in vars(sys.modules[row_moves.__module__]).items() if hasattr(f, "cache_info")]
    assert kept == ["plan_exchange", "_layouts_between", "_layouts_of_gather"]


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize("is_held", [False, True])
def test_whole_dims_come_from_many_ranks_along_one_axis_after_the_other(is_flat, is_held):
    """At once each rank would send 1023 messages; the bytes are the same."""
    sizes, axes = (33, 40), (("lat", 32), ("lon", 32))
    cuts = [Cut(n, cut_points(n, 32), (name,)) for n, name in zip(sizes, ("lat", "lon"), strict=True)]
    if is_flat:
        cuts = [Cut(1320, cut_points(1320, 1024), ("lat", "lon"))]
    source = Layout(tuple(cuts), axes)
    target = Layout(tuple(c.holding([(0, c.size)] * c.pieces) for c in cuts), axes) if is_held else source.uncut()
    passed = layouts_of_gather(source, target)
    steps = [(a, holding_coarser(a, b) if is_held else b) for a, b in pairwise((source, *passed))]
    assert [len(plan_exchange(*step, (15, 17)).sends) for step in steps] == [31, 31]
    assert len(plan_exchange(source, target, (15, 17)).sends) == 1023
    assert steps[-1][1].local_shape((15, 17)) == target.local_shape((15, 17))

    def rows_taken(steps):
        plans = [plan_exchange(*step, (15, 17)) for step in steps]
        return sum(prod(box_shape(box)) for plan in plans for _, boxes in plan.receives for box in boxes)

    assert rows_taken(steps) == rows_taken([(source, target)])
    few = Layout((Cut(33, cut_points(33, 4), ("lat",)), Cut(40, cut_points(40, 4), ("lon",))), (("lat", 4), ("lon", 4)))
    assert layouts_of_gather(few, few.uncut()) == ()
