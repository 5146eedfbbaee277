"""Tables of neighbors and their plans, by enumeration."""

import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import jigsaw
from jigsaw.errors import ShardingError
from jigsaw.geometry.neighbors import OrderedLists, plan_neighbors


@st.composite
def tables(draw):
    """A table of random neighbors or edges, and cut points of its sources and targets."""
    sources, targets = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    pieces = draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 999)))
    if draw(st.booleans()):
        table = jigsaw.Neighbors(rng.integers(-1, sources, (targets, draw(st.integers(1, 4)))), sources)
    else:
        edges = draw(st.integers(0, 30))
        ends = rng.integers(0, sources, edges), rng.integers(0, targets, edges)
        table = jigsaw.Neighbors.of_edges(*ends, sources, targets)
    cuts = [(0, *sorted(rng.integers(0, n + 1, pieces - 1).tolist()), n) for n in (sources, targets)]
    return table, *cuts


@given(tables())
def test_plans_of_all_pieces_fit_each_other(case):
    table, sources, targets = case
    pieces = len(sources) - 1
    plans = [plan_neighbors(table, sources, targets, q) for q in range(pieces)]
    cells = np.arange(1, table.sources + 1) * 10.0
    whole = table.sources_of((0, table.targets))
    wanted = np.where(whole < 0, 0, cells[whole]) if len(whole) else np.empty(0)
    found = []
    for q, plan in enumerate(plans):
        own = cells[sources[q] : sources[q + 1]]
        arrived = []
        for peer, count in plan.receives:
            sent = dict(plans[peer].sends)[q]
            assert len(sent) == count
            assert len(np.unique(sent)) == count  # each row once
            arrived.append(cells[sources[peer] + sent])
        edges = own[plan.near] if len(own) else np.zeros(plan.edges)
        edges[plan.far] = np.concatenate([np.empty(0), *arrived])[plan.far_places]
        edges[plan.none] = 0
        found.append(edges)
        named = set(table.sources_of((targets[q], targets[q + 1])).tolist()) - {-1, *range(sources[q], sources[q + 1])}
        assert sum(count for _, count in plan.receives) == len(named)
    np.testing.assert_array_equal(np.concatenate(found), wanted)
    # the way back: each row gets the gradients of its edges in the order of all edges
    first = [table.first_edge(t) for t in targets]
    for q, plan in enumerate(plans):
        given_back = [np.arange(first[q], first[q + 1])]
        for peer, count in plan.back_receives:
            edges = dict(plans[peer].back_sends)[q]
            assert len(edges) == count
            given_back.append(first[peer] + edges)
        numbers = np.concatenate(given_back)
        for row, ends in enumerate(pairwise(plan.sums.ends)):
            listed = numbers[plan.sums.places[slice(*ends)]]
            assert listed.tolist() == np.flatnonzero(whole == sources[q] + row).tolist()


@pytest.mark.parametrize(("nside", "nested"), [(1, True), (2, True), (4, True), (8, True), (3, False), (4, False)])
def test_a_symmetric_table_asks_its_neighbors_alone(nside, nested):
    grid = jigsaw.Neighbors.healpix(nside, nested)
    table = jigsaw.Neighbors(grid.sources_of((0, grid.targets)).reshape(-1, 8))
    points = (0, 5, 5, grid.targets // 2 + 1, grid.targets)
    for piece in range(4):
        a, b = (plan_neighbors(t, points, points, piece) for t in (grid, table))
        assert a.receives == b.receives
        assert a.back_receives == b.back_receives
        for (q, rows), (other, theirs) in zip(a.sends, b.sends, strict=True):
            assert q == other
            np.testing.assert_array_equal(rows, theirs)
        np.testing.assert_array_equal(a.sums.places, b.sums.places)
        np.testing.assert_array_equal(a.sums.ends, b.sums.ends)


def test_values_are_listed_in_their_order():
    lists = OrderedLists.of(np.array([2, 0, 2, 2]), np.array([7, 3, 1, 5]), 4)
    assert [lists.places.tolist(), lists.ends.tolist()] == [[3, 7, 1, 5], [0, 1, 1, 4, 4]]
    assert [places.tolist() for places in lists.steps().turns] == [[7, 3], [1], [5]]
    assert lists.steps().restore.tolist() == [1, 2, 0, 3]
    assert lists.counts.tolist() == [1, 0, 3, 0]


def test_edges_are_sorted_by_target_then_source():
    graph = jigsaw.Neighbors.of_edges([4, 1, 0, 1], [2, 0, 2, 2], targets=4)
    assert (graph.sources, graph.targets, graph.edges) == (5, 4, 4)
    assert graph.order.tolist() == [1, 2, 3, 0]
    assert graph.sources_of((0, 4)).tolist() == [1, 0, 1, 4]
    assert graph.targets_of((1, 4)).tolist() == [1, 1, 1]
    assert graph == jigsaw.Neighbors.of_edges([0, 1, 4, 1], [2, 2, 2, 0], targets=4)
    assert graph != jigsaw.Neighbors.of_edges([0, 1, 4, 1], [2, 2, 2, 1], targets=4)


def test_nearest_points_are_those_of_the_great_circle():
    rng = np.random.default_rng(0)
    lat, lon = np.degrees(np.arcsin(rng.uniform(-1, 1, 40))), rng.uniform(-180, 360, 40)
    table = jigsaw.Neighbors.of_points(lat[:30], lon[:30], 3, sources=(lat, lon))
    phi, theta = np.radians(lat), np.radians(lon)
    cosines = np.sin(phi)[:30, None] * np.sin(phi) + np.cos(phi)[:30, None] * np.cos(phi) * np.cos(
        theta[:30, None] - theta
    )
    np.testing.assert_array_equal(table.sources_of((0, 30)).reshape(30, 3), np.argsort(-cosines, axis=1)[:, :3])
    assert (table.sources, table.targets) == (40, 30)


@pytest.mark.parametrize("radius", [4.0, 33.0, 100.0, 180.0])
def test_points_within_a_radius_are_those_of_the_great_circle(radius):
    rng = np.random.default_rng(1)
    lat, lon = np.degrees(np.arcsin(rng.uniform(-1, 1, 50))), rng.uniform(-180, 360, 50)
    table = jigsaw.Neighbors.of_points(lat[:13], lon[:13], radius=radius, sources=(lat[7:], lon[7:]))
    phi, theta = np.radians(lat), np.radians(lon)
    differences = theta[:13, None] - theta[7:]
    # the formula of Vincenty, which is right for points close by and opposite ones
    across = np.hypot(
        np.cos(phi[7:]) * np.sin(differences),
        np.cos(phi)[:13, None] * np.sin(phi[7:]) - np.sin(phi)[:13, None] * np.cos(phi[7:]) * np.cos(differences),
    )
    along = np.sin(phi)[:13, None] * np.sin(phi[7:]) + np.cos(phi)[:13, None] * np.cos(phi[7:]) * np.cos(differences)
    targets, sources = np.nonzero(np.degrees(np.arctan2(across, along)) <= radius)
    assert (table.sources, table.targets, table.edges) == (43, 13, len(sources))
    np.testing.assert_array_equal(table.sources_of((0, 13)), sources)
    np.testing.assert_array_equal(table.targets_of((0, 13)), targets)
    if radius == 4.0:
        assert 0 in np.bincount(targets, minlength=13)  # a point with no neighbor
        assert 6 <= len(sources) < 20  # of the points that are in both
    assert (radius == 180.0) == (len(sources) == 13 * 43)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: jigsaw.Neighbors([[0.5]]), "dtype float64"),
        (lambda: jigsaw.Neighbors([0, 1]), "integers of 2 dims"),
        (lambda: jigsaw.Neighbors([[0, 2]]), "names cell 2, but the cells are -1 to 0"),
        (lambda: jigsaw.Neighbors([[-2]]), "names cell -2"),
        (lambda: jigsaw.Neighbors.of_edges([0], [0, 1]), "give both of each edge"),
        (lambda: jigsaw.Neighbors.of_edges([-1], [0]), "source names cell -1"),
        (lambda: jigsaw.Neighbors.of_edges([0], [3], targets=2), "target names cell 3"),
        (lambda: jigsaw.Neighbors.of_points([0.0], [0.0], 2), "k=2 of 1 source points"),
        (lambda: jigsaw.Neighbors.of_points([0.0], [0.0]), "pass k, or radius in degrees, not k=None and radius=None"),
        (lambda: jigsaw.Neighbors.of_points([0.0], [0.0], 1, radius=2), "not k=1 and radius=2"),
        (lambda: jigsaw.Neighbors.of_points([0.0], [0.0], radius=-1), "radius=-1 must be above 0"),
        (lambda: jigsaw.Neighbors.of_points([float("nan")], [0.0], 1), "must be finite"),
        (lambda: jigsaw.Neighbors.of_points([9.97e36], [0.0], 1), "a latitude of 9.97e[+]36 is beyond a pole"),
        (lambda: jigsaw.Neighbors.of_points(np.ma.masked_equal([0.0, 1.0], 1), [0.0, 0.0], 1), "are masked"),
        (lambda: jigsaw.Neighbors(np.ma.masked_equal([[0, 1]], 1)), "index has masked values; leave these out"),
        (lambda: jigsaw.Neighbors.healpix(3), "nside=3 must be a power of two"),
        (lambda: jigsaw.Neighbors.healpix(0, nested=False), "nside=0 must be 1 or more"),
    ],
)
def test_what_is_no_table_is_refused(make, words):
    with pytest.raises(ShardingError, match=words):
        make()


def test_lists_of_many_values_are_steps_and_a_rest():
    rng = np.random.default_rng(0)
    rows = np.where(rng.uniform(size=2000) < 0.4, 3, rng.integers(0, 9, 2000))
    places = rng.permutation(2000)
    lists = OrderedLists.of(rows, places, 10).steps()
    assert len(lists.turns) == 256
    order = [[] for _ in range(10)]
    for step in lists.turns:
        for row, place in enumerate(step):
            order[row].append(place)
    for row, place in zip(lists.rest_rows, lists.rest_places, strict=True):
        order[row].append(place)
    for row in range(10):
        assert order[lists.restore[row]] == list(places[rows == row])


NONE = -999
BESIDE = np.array([[1, -1, 2], [0, 3, -1], [-1, 0, 3], [2, 1, -1]])  # of four cells in a square


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (BESIDE, {}),
        (np.where(BESIDE < 0, NONE, BESIDE + 1), {"start_index": 1, "missing": NONE}),
        (np.where(BESIDE < 0, 2**31 - 1, BESIDE).astype("i4"), {"missing": 2**31 - 1}),
        (np.where(BESIDE < 0, np.nan, BESIDE + 7.0), {"start_index": 7}),
        (np.ma.masked_array(np.where(BESIDE < 0, 2, BESIDE + 1), BESIDE < 0), {"start_index": 1}),  # as netCDF4 reads
        ((BESIDE + 1).T.astype("u1"), {"start_index": 1, "cell_dim": 1}),  # 0 for none, as ICON's
    ],
)
def test_tables_of_unstructured_grids(values, told):
    assert jigsaw.Neighbors.of_table(values, **told) == jigsaw.Neighbors(BESIDE)


@pytest.mark.parametrize(
    ("values", "told", "message"),
    [
        (BESIDE + 1, {}, "names cell 4, but the cells are -1 to 3"),
        (BESIDE + 0.5, {}, "must be whole numbers of 2 dims"),
        (BESIDE[0], {}, "of dtype int64 and shape .3,. must be whole numbers of 2 dims"),
        (BESIDE > 0, {}, "dtype bool"),
        (np.where(BESIDE < 0, NONE, BESIDE + 1), {"missing": 0}, "names cell 4"),
    ],
)
def test_tables_that_name_no_cells_are_refused(values, told, message):
    with pytest.raises(ShardingError, match=message):
        jigsaw.Neighbors.of_table(values, **told)


def test_tables_are_pickled_as_the_models_that_keep_them():
    edges = jigsaw.Neighbors.of_edges([2, 0, 1], [1, 1, 0])
    for table in (
        jigsaw.Neighbors([[1, 2], [0, -1], [1, 0]]),
        jigsaw.Neighbors.healpix(2),
        jigsaw.Neighbors.healpix(3, nested=False),
        edges,
    ):
        again = pickle.loads(pickle.dumps(table))
        assert again == table
        np.testing.assert_array_equal(again.sources_of((0, table.targets)), table.sources_of((0, table.targets)))
