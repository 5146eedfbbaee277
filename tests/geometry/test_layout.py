"""Layout against brute force: every array of small size, cut by every rule over every small mesh."""

from __future__ import annotations

import dataclasses
import itertools
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jigsaw
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, box_elements, box_overlap, box_shape, cut_points, have_same_rows, whole_dim
from jigsaw.geometry.layout import Layout

SIZES = range(33)
PIECES = range(1, 9)


def lengths(points):
    return [b - a for a, b in itertools.pairwise(points)]


@st.composite
def meshes(draw, most=4):
    names = draw(st.lists(st.sampled_from(["data", "lat", "lon", "channel"]), unique=True, max_size=3))
    return {name: draw(st.integers(1, most)) for name in names}


@st.composite
def layouts(draw, most_dims=3, most=4):
    """An array of any shape, its dims cut anywhere by any axes, also several, also ones that the mesh lacks."""
    axes = draw(meshes(most))
    free = draw(st.permutations([*axes, "absent"]))
    shape, spec, split = [], [], {}
    for dim in range(draw(st.integers(0, most_dims))):
        taken = [free.pop() for _ in range(draw(st.integers(0, min(2, len(free)))))]
        size = draw(st.integers(0, 12))
        pieces = int(np.prod([axes.get(a, 1) for a in taken]))
        points = st.lists(st.integers(0, size), min_size=pieces - 1, max_size=pieces - 1).map(sorted)
        split[dim] = draw(st.one_of(st.sampled_from(["balanced", "chunk"]), points.map(lambda p, n=size: [0, *p, n])))
        shape.append(size)
        spec.append(None if not taken else taken[0] if len(taken) == 1 else tuple(taken))
        if not taken:
            split.pop(dim)
    return Layout.of(shape, spec, axes, split=split)


# -- cut points -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", PIECES)
def test_balanced_pieces_differ_by_at_most_one_and_the_larger_come_first(pieces):
    for size in SIZES:
        found = lengths(cut_points(size, pieces))
        assert len(found) == pieces
        assert sum(found) == size
        assert max(found) - min(found) <= 1
        assert found == sorted(found, reverse=True)


@pytest.mark.parametrize("pieces", PIECES)
def test_chunk_is_the_rule_of_torch(pieces):
    for size in SIZES:
        theirs = [len(c) for c in torch.arange(size).chunk(pieces)] if size else []
        theirs += [0] * (pieces - len(theirs))
        assert lengths(cut_points(size, pieces, "chunk")) == theirs


@pytest.mark.parametrize("split", ["balanced", "chunk"])
@pytest.mark.parametrize("pieces", PIECES)
def test_align_cuts_the_blocks_as_if_they_were_rows(pieces, split):
    for size, align in itertools.product(SIZES, range(1, 6)):
        blocks = cut_points(-(-size // align), pieces, split)
        assert cut_points(size, pieces, split, align) == tuple(min(align * b, size) for b in blocks)


def test_the_last_block_of_an_align_may_be_shorter():
    assert cut_points(121, 4, align=4) == (0, 32, 64, 96, 121)
    assert cut_points(5, 4, align=4) == (0, 4, 5, 5, 5)
    assert cut_points(5, 3, [0, 4, 5, 5], align=4) == (0, 4, 5, 5)
    assert Layout.of((121,), ("lat",), {"lat": 2}, align=8).cuts[0].points == (0, 64, 121)


def test_the_published_cuts_of_721_rows():
    assert lengths(cut_points(721, 8, "chunk")) == [91] * 7 + [84]
    assert lengths(cut_points(721, 8)) == [91] + [90] * 7


def test_explicit_points_are_kept_and_checked():
    assert cut_points(7, 3, [0, 2, 2, 7]) == (0, 2, 2, 7)
    assert cut_points(9, 3, np.array([0, 4, 8, 9]), align=4) == (0, 4, 8, 9)
    for points in ([0, 7], [0, 3, 2, 7], [1, 2, 3, 7], [0, 2, 3, 6], [0, 2, 3, 4, 7]):
        with pytest.raises(ShardingError, match=r"cut points .* must be 4 non-decreasing integers from 0 to 7"):
            cut_points(7, 3, points)
    with pytest.raises(ShardingError, match=r"cut points \(0, 3, 8\) must be multiples of align=2"):
        cut_points(8, 2, [0, 3, 8], align=2)


@pytest.mark.parametrize("spec", [("lat",), (None,)])
def test_rules_that_are_none_are_refused_where_nothing_is_cut_too(spec):
    for split in ("even", None, 5, [0, 1.5, 4], {0: "even"}):
        with pytest.raises(ShardingError, match=r"split=.* is not a rule: use 'balanced', 'chunk' or"):
            Layout.of((4,), spec, {"lat": 2}, split=split)
    for align in (0, -1, None, 1.5, "2", {0: 0}):
        with pytest.raises(ShardingError, match=r"align=.* must be a whole number, 1 or more"):
            Layout.of((4,), spec, {"lat": 2}, align=align)


@pytest.mark.parametrize(("size", "pieces", "align"), [(-1, 2, 1), (4, 0, 1)])
def test_impossible_cuts(size, pieces, align):
    with pytest.raises(ShardingError, match=f"cannot cut {size} rows into {pieces} pieces of {align}-row blocks"):
        cut_points(size, pieces, "balanced", align)


def test_an_unknown_rule_is_named():
    with pytest.raises(ShardingError, match="split='even' is not a rule: use 'balanced', 'chunk' or 3 explicit"):
        cut_points(4, 2, "even")


@given(st.tuples(*[st.integers(-5, 9)] * 4))
def test_what_intervals_share(ends):
    a, b = sorted(ends[:2]), sorted(ends[2:])
    shared = box_overlap((tuple(a),), (tuple(b),))
    assert set(range(*shared[0])) == set(range(*a)) & set(range(*b))
    assert box_shape(shared) == (box_elements(shared),) == (len(range(*shared[0])),)


# -- a cut ------------------------------------------------------------------------------------------------------------


def test_what_a_cut_was_made_from_is_part_of_it_but_keeps_no_tiles_apart():
    alone, made = Cut(6, (0, 3, 6), ("lat",)), Cut(6, (0, 3, 6), ("lat",), source=(Cut(10, (0, 3, 10), ("lat",)),))
    assert alone != made and alone.has_same_rows(made.with_halo(1, 1))
    assert have_same_rows([alone, made], [made, alone]) and not have_same_rows([alone], [alone, made])
    assert not any(alone.has_same_rows(c) for c in (whole_dim(6), Cut(6, (0, 2, 6), ("lat",)), made.source[0]))


@pytest.mark.parametrize("periodic", [False, True])
@pytest.mark.parametrize("pieces", [1, 2, 3, 5])
def test_a_halo_is_the_rows_within_reach(pieces, periodic):
    """Also wider than a neighbor, and up to the whole dim."""
    for size, below, above in itertools.product((1, 2, 7, 10), (0, 1, 3, 7), (0, 2, 7)):
        cut = Cut(size, cut_points(size, pieces), ("x",) if pieces > 1 else ())
        if max(below, above) > size:
            with pytest.raises(ShardingError, match=rf"halo \({below}, {above}\) must lie within 0..{size}"):
                cut.with_halo(below, above, periodic)
            continue
        wide = cut.with_halo(below, above, periodic)
        assert wide.bare() == cut
        for piece in range(pieces):
            owned = range(*cut.owned(piece))
            reach = {r + s for r in owned for s in range(-below, above + 1)}
            wanted = sorted(reach if periodic else reach & set(range(size)))
            assert list(range(*wide.held[piece])) == wanted
        assert wide.has_halo == any(wide.held[p] != cut.owned(p) for p in range(pieces))


def test_a_negative_halo_is_refused():
    with pytest.raises(ShardingError, match=r"halo \(-1, 0\) must lie within 0..4"):
        whole_dim(4).with_halo(-1, 0)


@pytest.mark.parametrize(
    ("points", "held", "words"),
    [
        ((0, 3), (), "must be 2 non-decreasing integers from 0 to 4"),
        ((0, 3, 2, 4), (), "must be 4 non-decreasing"),
        ((0, 2, 4), ((0, 2),), "must be one interval"),
        ((0, 2, 4), ((0, 2), (4, 2)), "must be one interval"),
    ],
)
def test_a_cut_checks_itself(points, held, words):
    with pytest.raises(ShardingError, match=words):
        Cut(4, points, ("x",), held)


# -- a layout ---------------------------------------------------------------------------------------------------------


@given(layouts())
def test_owned_boxes_partition_the_array(layout):
    owners = np.zeros(layout.shape, int)
    for coord in layout.coords():
        box = layout.owned(coord)
        assert layout.held(coord) == box
        assert layout.local_shape(coord) == tuple(b - a for a, b in box)
        owners[tuple(slice(*i) for i in box)] += 1
    assert (owners == layout.replicas).all()


@pytest.mark.parametrize("split", ["balanced", "chunk"])
@pytest.mark.parametrize("ranks", PIECES)
def test_every_size_is_partitioned_and_ranks_may_be_empty(ranks, split):
    for size in SIZES:
        layout = Layout.of((size, 3), ("x", None), {"x": ranks}, split=split)
        rows = [r for coord in layout.coords() for r in range(*layout.owned(coord)[0])]
        assert rows == list(range(size))
        if size < ranks:
            assert any(layout.local_shape(c) == (0, 3) for c in layout.coords())


@given(layouts())
def test_index_is_the_inverse_of_coords(layout):
    assert [layout.index(c) for c in layout.coords()] == list(range(layout.ranks))


def test_several_axes_on_one_dim_count_major_to_minor():
    layout = Layout.of((12,), (("lon", "lat"),), {"lat": 2, "lon": 3})
    for lat, lon in layout.coords():
        piece = lon * 2 + lat
        assert layout.owned((lat, lon)) == ((2 * piece, 2 * piece + 2),)
    assert layout.spec == (("lon", "lat"),)
    assert layout.dim_axes(0) == ("lon", "lat")
    assert layout.cut_axes == ("lat", "lon")


def test_an_axis_that_the_mesh_lacks_counts_as_one():
    layout = Layout.of((4, 6), ("data", "lat"), {"lat": 2, "lon": 3})
    assert layout.spec == (None, "lat")
    assert layout.cut_dims == (1,)
    assert layout.replicas == 3
    assert layout.size_of("data") == 1


def test_what_replicates():
    layout = Layout.of((4, 6), (None, "lat"), {"data": 1, "lat": 2, "lon": 3})
    assert layout.cut_axes == ("lat",)
    assert [layout.owned((0, 1, lon)) for lon in range(3)] == [((0, 4), (3, 6))] * 3


def test_options_by_dim_and_negative_dims():
    layout = Layout.of(
        (2, 8, 9),
        (None, "lat", "lon"),
        {"lat": 2, "lon": 2},
        split={-1: [0, 7, 9], 1: "chunk"},
        align={1: 2},
        halo={-1: 1, -2: (2, 0)},
        periodic=(-1,),
    )
    assert [c.points for c in layout.cuts] == [(0, 2), (0, 4, 8), (0, 7, 9)]
    assert layout.cuts[1].held == ((0, 4), (2, 8))
    assert layout.cuts[2].held == ((-1, 8), (6, 10))
    assert layout.held((1, 0)) == ((0, 2), (2, 8), (-1, 8))
    assert layout.local_shape((1, 0)) == (2, 6, 9)
    assert layout.has_halo
    assert not layout.without_halo().has_halo
    assert layout.without_halo().without_halo() == layout.without_halo()


def test_an_align_for_all_dims_spares_those_that_nothing_cuts():
    assert Layout.of((3, 8), (None, "x"), {"x": 2}, align=4).cuts[1].points == (0, 4, 8)


@pytest.mark.parametrize("axis", ["data", "replicate", "ensemble"])
def test_an_align_for_all_dims_is_for_space(axis, recwarn):
    axes = {axis: 4, "lat": 2}
    layout = Layout.of((4, 3, 16), (axis, None, "lat"), axes, align=8)
    assert [c.points for c in layout.cuts] == [(0, 1, 2, 3, 4), (0, 3), (0, 8, 16)]
    assert Layout.of((16, 3), ((axis, "lat"), None), axes, align=4).cuts[0].points == tuple(range(0, 18, 2))
    assert Layout.of((5, 3), (axis, None), axes, split={0: [0, 1, 2, 3, 5]}, align=4).cuts[0].points == (0, 1, 2, 3, 5)
    assert Layout.of((4, 3), (axis, None), axes, align={0: 4}).cuts[0].points == (0, 4, 4, 4, 4)
    assert Layout.of((5, 3), (axis, None), axes, split="chunk", align=4).cuts[0].points == (0, 2, 4, 5, 5)
    with pytest.raises(ShardingError, match="align=0 must be a whole number"):
        Layout.of((4, 3), (axis, None), axes, align=0)
    assert not recwarn.list


def test_a_batch_that_an_unknown_axis_cuts_in_blocks_is_told(recwarn):
    words = (
        r"align=4 leaves 3 of the 4 pieces of dim 0 \(4 rows, cut by \('batch',\)\) without rows, although it has rows"
    )
    with pytest.warns(UserWarning, match=words):
        Layout.of((4, 16), ("batch", "lat"), {"batch": 4, "lat": 2}, align=4)
    Layout.of((4, 16), ("batch", "lat"), {"batch": 4, "lat": 2}, align={0: 4})  # said by dim
    Layout.of((3, 16), ("batch", "lat"), {"batch": 4, "lat": 2}, align=4)  # too few rows for all in any case
    Layout.of((4,), ("batch",), {"batch": 4}, split=[0, 4, 4, 4, 4], align=4)
    assert not recwarn.list


def test_a_halo_on_a_dim_that_nothing_cuts_wraps():
    layout = Layout.of((4,), (None,), {"x": 2}, halo={0: 1}, periodic=(0,))
    assert layout.held((1,)) == ((-1, 5),)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"spec": ("lat",)}, r"spec \('lat',\) has 1 entries for 2 dims of shape \(7, 8\); give one entry a dim"),
        ({"spec": ("lat", "lat")}, "uses axis 'lat' more than once"),
        ({"spec": (("lat", "lat"), None)}, "uses axis 'lat' more than once"),
        ({"split": {2: "chunk"}}, r"split names dim 2, but shape \(7, 8\) has 2 dims, -2 to 1"),
        ({"align": {-3: 2}}, r"align names dim -3, but"),
        ({"halo": {5: 2}}, r"halo names dim 5, but"),
        ({"periodic": (9,)}, r"periodic names dim 9, but"),
        ({"halo": {0: 8}}, r"dim 0 of shape \(7, 8\), spec 'lat': halo \(8, 8\) must lie within 0..7"),
        ({"split": {0: [0, 3, 5, 7]}}, r"dim 0 .*cut points \(0, 3, 5, 7\) must be 3 non-decreasing"),
        ({"spec": ("absent", None), "split": {0: [0, 3, 7]}}, r"cut points \(0, 3, 7\) must be 2 non-decreasing"),
        ({"shape": (-1, 8), "spec": (None, None)}, "dim 0 of shape .* cannot cut -1 rows"),
    ],
)
def test_what_does_not_fit_is_named(options, words):
    options = {"shape": (7, 8), "spec": ("lat", None), "axes": {"lat": 2, "lon": 3}, **options}
    with pytest.raises(ShardingError, match=words):
        Layout.of(**options)


@pytest.mark.parametrize(
    ("cuts", "groups", "words"),
    [
        ((Cut(4, (0, 2, 4), ("y",)),), (), r"has 2 pieces, but the axes \('y',\) that cut it have 3 places"),
        ((Cut(4, (0, 2, 4)),), (), r"has 2 pieces, but the axes \(\) that cut it have 1 places"),
        ((Cut(4, (0, 2, 4), ("x",)),) * 2, (), "axis 'x' cuts two dims"),
        ((whole_dim(4),), (2,), r"groups \(2,\) must share out the 1 cuts, at least one a dim"),
        ((whole_dim(4), whole_dim(4)), (2, 0), "at least one a dim"),
    ],
)
def test_a_layout_checks_itself(cuts, groups, words):
    with pytest.raises(ShardingError, match=words):
        Layout(cuts, (("x", 2), ("y", 3)), groups)


# -- layouts from layouts ---------------------------------------------------------------------------------------------


def made():
    return Layout.of((2, 7, 10), ("data", "lat", "lon"), {"data": 2, "lat": 2, "lon": 3}, halo={1: 1})


def test_permute_drop_insert_replace():
    layout = made()
    assert layout.permute((2, 0, 1)).spec == ("lon", "data", "lat")
    assert layout.drop([1]).shape == (2, 10)
    assert layout.drop([-2]) == layout.drop([1])
    assert layout.drop([0, 1], keepdim=True).shape == (1, 1, 10)
    assert layout.drop([0, 1], keepdim=True).spec == (None, None, "lon")
    assert layout.insert(0, 5).shape == (5, 2, 7, 10)
    assert layout.insert(3).shape == (2, 7, 10, 1)
    assert layout.replace_dim(1, whole_dim(4)).spec == ("data", None, "lon")
    assert layout.replace_dim(-1, whole_dim(4)) == layout.replace_dim(2, whole_dim(4))


def test_dims_that_were_flattened_together():
    lat, lon = Cut(7, (0, 4, 7), ("lat",)), Cut(6, (0, 3, 6), ("lon",))
    layout = Layout.from_dims([[whole_dim(2)], [lat, lon]], (("lat", 2), ("lon", 2)))
    assert layout.ndim == 2
    assert layout.shape == (2, 42)
    assert layout.dim(1) == layout.dim(-1) == (lat, lon)
    assert layout.local_shape((1, 0)) == (2, 9)
    assert layout.owned((1, 0)) == ((0, 2), (4, 7), (0, 3))
    assert layout.spec == (None, ("lat", "lon"))
    assert layout.cut_dims == (1,)
    assert layout.is_cut(1)
    assert not layout.is_cut(0)
    assert str(layout) == "[2, 7/lat[0, 4, 7]·6/lon[0, 3, 6]]"


def test_a_layout_of_a_scalar():
    layout = Layout.of((), (), {"x": 2})
    assert layout.shape == layout.local_shape((1,)) == ()
    assert layout.replicas == 2


@given(layouts())
def test_layouts_are_values(layout):
    again = pickle.loads(pickle.dumps(layout))
    assert again == layout
    assert hash(again) == hash(layout)


@given(layouts())
def test_layouts_that_differ_never_look_alike(layout):
    variants = [layout]
    for d in range(layout.ndim):
        (cut,) = layout.dim(d)
        held = tuple((start - 1, stop + 1) for start, stop in cut.held)
        changes = [{"held": held}, {"held": held, "wraps": False}, {"by_index": True}, {"source": (cut,)}]
        variants += [layout.replace_dim(d, dataclasses.replace(cut, **change)) for change in changes]
    assert len(set(variants)) == len(set(map(str, variants))) == 1 + 4 * layout.ndim


def test_a_layout_needs_no_torch():
    code = (
        "import sys, types; sys.modules['torch'] = sys.modules['numpy'] = None; "
        "package = sys.modules['jigsaw'] = types.ModuleType('jigsaw'); package.__path__ = [sys.argv[1]]; "
        "import jigsaw.geometry.layout"
    )
    subprocess.run([sys.executable, "-c", code, Path(jigsaw.__file__).parent], check=True, timeout=60)
