"""Who writes which chunk: every element once, by a rank that owns much of it, from ranks that own it."""

import numpy as np
import pytest

from jigsaw.geometry.cut import box_elements
from jigsaw.geometry.layout import Layout
from jigsaw.io.writing.write_units import WriteTarget, plan_units, write_rounds

AXES = [{"lat": 1}, {"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}, {"data": 2, "lat": 2}, {"lat": 2, "m": 2}]
SPEC = ("data", None, "lat", "lon")
SHAPE = (3, 4, 13, 10)
RUNS = {"none": (None, ()), "levels": (1, ((0, 2, 1), (3, 4, 0))), "one": (1, ((2, 3, 0),))}


def whole_of(target, units, layout, x):
    """The array that the parts make, each taken from a rank that owns it, NaN where nobody wrote."""
    found = np.full(tuple(n + 1 for n in target.shape), np.nan)
    coords = list(layout.coords())
    for unit in units:
        block = np.full([b - a for a, b in unit.box], np.nan)
        for part in unit.parts:
            owned = layout.owned(coords[part.giver])
            assert all(o[0] <= a and b <= o[1] for (a, b), o in zip(part.taken, owned, strict=True))
            at = tuple(slice(a, b) for a, b in part.placed)
            assert np.isnan(block[at]).all()
            block[at] = x[tuple(slice(a, b) for a, b in part.taken)]
        at = tuple(slice(a, b) for a, b in unit.box)
        assert np.isnan(found[at]).all()
        found[at] = block
        assert unit.is_full == (not np.isnan(block).any())
    return found


@pytest.mark.parametrize("phase", [0, 1])
@pytest.mark.parametrize("runs", RUNS)
@pytest.mark.parametrize("axes", AXES, ids=str)
def test_every_element_is_written_once(axes, runs, phase):
    layout = Layout.of(SHAPE, SPEC, axes)
    channel, taken = RUNS[runs]
    levels = {"none": 4, "levels": 3, "one": 1}[runs]
    target = WriteTarget((3, levels, 13, 10), (2, 2, 4, 3), channel, taken)
    x = np.arange(np.prod(SHAPE), dtype="f8").reshape(SHAPE)
    units = plan_units(layout, target, (phase, 0, 0, 0))
    wanted = np.full((4, levels + 1, 14, 11), np.nan)
    for first, end, level in taken or ((0, 4, 0),):
        wanted[phase : phase + 3, level : level + end - first, :13, :10] = x[:, first:end]
    np.testing.assert_array_equal(whole_of(target, units, layout, x), wanted)


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_writers_own_at_least_half_of_what_the_first_owner_owns(axes):
    layout = Layout.of(SHAPE, SPEC, axes)
    for unit in plan_units(layout, WriteTarget(SHAPE, (1, 4, 5, 10)), (0, 0, 0, 0)):
        owned = {}
        for at, coord in enumerate(layout.coords()):
            boxes = zip(layout.owned(coord), unit.box, strict=True)
            owned[at] = box_elements(tuple((max(a, c), max(a, c, min(b, d))) for (a, b), (c, d) in boxes))
        assert 2 * owned[unit.writer] >= max(owned.values())


def test_chunks_of_the_whole_globe_are_shared_out():
    layout = Layout.of((8, 1, 13, 10), SPEC, {"lat": 2, "lon": 2})
    units = plan_units(layout, WriteTarget((8, 1, 13, 10), (1, 1, 13, 10)), (0, 0, 0, 0))
    assert sorted(u.writer for u in units) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_replicas_share_the_work_and_send_nothing():
    layout = Layout.of(SHAPE, SPEC, {"lat": 2, "m": 2})
    units = plan_units(layout, WriteTarget(SHAPE, (1, 4, 7, 10)), (0, 0, 0, 0))
    assert {u.writer for u in units} == {0, 1, 2, 3}
    crossing = [p for u in units for p in u.parts if p.giver != u.writer]
    assert not crossing


def test_one_writer_takes_everything_a_budget_at_a_time():
    layout = Layout.of(SHAPE, SPEC, {"lat": 3})
    units = plan_units(layout, WriteTarget(SHAPE, (1, 2, 4, 10)), (0, 0, 0, 0), (0,))
    batches = list(write_rounds(units, 200))
    assert {u.writer for u in units} == {0}
    assert tuple(u for b in batches for u in b) == units
    assert all(sum(u.size for u in b) <= 200 for b in batches) and len(batches) > 5
    assert all(len(b) == 1 for b in write_rounds(units, 1))
