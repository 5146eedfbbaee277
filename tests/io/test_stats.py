"""`statistics`: on every mesh what numpy gives over the whole array; resumed, thinned, weighted, with gaps."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from globe_store import globe, stacked, write

import jigsaw
from jigsaw import comm
from jigsaw.errors import FieldError, GridError, StateError
from jigsaw.io.stats.compute import area_weights, statistics
from jigsaw.io.stats.moments import ChannelMoments
from jigsaw.testing import on_ranks, world_mesh

LONG = ["geopotential@500", "2m_temperature", "land_sea_mask", "temperature@850"]
PLAIN = ("mean", "std", "min", "max", "count", "missing")


@pytest.fixture(scope="module")
def holed(tmp_path_factory):
    """Missing values: a tenth of one variable, a whole level of another, one whole step of a third."""
    data, r = globe(), np.random.default_rng(1)
    geopotential, temperature = data.geopotential.values, data.temperature.values
    geopotential[r.uniform(size=geopotential.shape) < 0.1] = np.nan
    geopotential[4] = np.nan
    temperature[:, 2] = np.nan
    return write(tmp_path_factory.mktemp("holed") / "holed.zarr", data, chunk=(3, 2, 5, 7))


def opened(path, mesh, fields=LONG, **more):
    return jigsaw.io.open(path, mesh=mesh, fields=fields, **{"dtype": "float64", "missing": "fill", **more})


def expected(whole, follows=None, weights=None):
    """What numpy says of [steps, C, lat, lon]."""
    follows = np.ones(len(whole), bool) if follows is None else follows
    apart = np.diff(whole, axis=0)[follows[1:]]
    return {**_of(whole, weights), **{f"diff_{k}": v for k, v in _of(apart, weights).items()}}


def _of(x, weights):
    columns = np.moveaxis(x, 1, 0).reshape(x.shape[1], -1)
    w = np.broadcast_to(1.0 if weights is None else weights[:, None], x[:, 0].shape).reshape(-1)
    found = {name: np.full(len(columns), np.nan) for name in PLAIN}
    for c, column in enumerate(columns):
        valid = ~np.isnan(column)
        found["count"][c], found["missing"][c] = valid.sum(), (~valid).sum()
        if valid.any():
            v, u = column[valid], w[valid]
            found["mean"][c] = mean = np.average(v, weights=u)
            found["std"][c] = np.sqrt(np.average((v - mean) ** 2, weights=u))
            found["min"][c], found["max"][c] = v.min(), v.max()
    return found


def check(found, want):
    assert set(found.columns) == set(want)
    for name, values in want.items():
        exact = name.split("_")[-1] in ("min", "max", "count", "missing")
        np.testing.assert_allclose(found.columns[name], values, rtol=0 if exact else 1e-11, atol=1e-12, err_msg=name)


def on_mesh(path, axes, **more):
    mesh = world_mesh(**axes)
    found = statistics(opened(path, mesh, **{k: more.pop(k) for k in ("time", "halo", "every") if k in more}), **more)
    everybody = comm.all_gather_object(mesh, found.columns)
    for other in everybody:
        for name, values in other.items():
            np.testing.assert_array_equal(values, found.columns[name])
    return found


def test_one_rank_gives_what_numpy_gives(tiled):
    found = on_mesh(tiled, {"lat": 1}, block=4)
    check(found, expected(stacked(tiled, LONG)))
    assert found.fields == tuple(LONG)
    assert found["2m_temperature"]["missing"] == 0
    assert found.columns["diff_std"][2] == 0  # nothing changes in a field without time
    assert found.attrs["first"].startswith("2020-01-01T00") and found.attrs["steps"] == 10


@pytest.mark.slow
@on_ranks(2)
def test_two_ranks(holed):
    want = expected(stacked(holed, LONG))
    for axes, block in (({"lat": 2}, None), ({"data": 2}, 3)):
        check(on_mesh(holed, axes, block=block), want)


@on_ranks(4)
def test_four_ranks_missing_values_and_ranks_with_the_same_tile(holed):
    want = expected(stacked(holed, LONG))
    assert want["missing"].tolist()[3] == 10 * 13 * 16 and np.isnan(want["mean"][3])
    for axes in ({"lat": 2, "lon": 2}, {"data": 2, "lon": 2}, {"channel": 2, "lat": 2}):
        check(on_mesh(holed, axes, block=2), want)
    check(on_mesh(holed, {"lat": 4}, halo={"lat": 2}, block=4), want)


@pytest.mark.slow
@on_ranks(4)
def test_more_ranks_along_data_than_steps_are_left(holed):
    check(on_mesh(holed, {"data": 4}, block=3), expected(stacked(holed, LONG)))
    for steps in (5, 1):
        check(on_mesh(holed, {"data": 4}, block=1, time=(0, steps)), expected(stacked(holed, LONG)[:steps]))


def test_the_sizes_of_blocks_do_not_change_a_bit(holed):
    first, *others = (on_mesh(holed, {"lat": 1}, block=block) for block in (1, 3, 10))
    for other in others:
        for name, values in first.columns.items():
            np.testing.assert_array_equal(other.columns[name], values)


@on_ranks(2)
def test_only_the_last_tile_of_a_block_travels(wb2):
    mesh = world_mesh(data=2)
    ds = opened(wb2, mesh)
    with comm.count() as counted:
        statistics(ds, block=2)
    tile = 8 * 4 * 13 * 16
    carried = sum(c.sent_bytes for c in counted.calls if c.kind == "carry")
    # 10 steps in blocks of 2 x 2, 2 x 2 and 1 x 2: rank 0 hands on in each, and so does rank 1
    assert carried == 3 * tile
    gathered = [c.sent_bytes for c in counted.calls if c.kind == "all_gather"]
    assert gathered == [112 * 4]


def test_every_step_is_read_once(wb2, monkeypatch):
    loaders = []
    real = jigsaw.io.DataLoader
    monkeypatch.setattr(
        "jigsaw.io.stats.compute.DataLoader", lambda *a, **k: loaders.append(real(*a, **k)) or loaders[0]
    )
    ds = opened(wb2, world_mesh(lat=1), ["geopotential@500", "2m_temperature"])
    statistics(ds, block=3)
    assert loaders[0].bytes_read == ds.plan(range(10)).total.stored_bytes > 0


def test_area_weights_are_the_cells_of_the_sphere(tiled):
    rows = np.linspace(90, -90, 13)
    edges = np.clip(np.concatenate([rows + 7.5, [-90]]), -90, 90)
    cells = -np.diff(np.sin(np.deg2rad(edges)))
    np.testing.assert_allclose(area_weights(rows), cells / cells.mean(), rtol=1e-12)
    want = expected(stacked(tiled, LONG), weights=cells / cells.mean())
    check(on_mesh(tiled, {"lat": 1}, weights="area", block=3), want)


def test_the_outer_rows_of_a_gaussian_grid_reach_the_poles():
    lat = np.degrees(np.arcsin(np.polynomial.legendre.leggauss(8)[0]))
    middle = np.sin(np.deg2rad((lat[1:] + lat[:-1]) / 2))
    cells = np.diff([-1, *middle, 1])
    for rows, want in ((lat, cells), (lat[::-1], cells[::-1])):
        np.testing.assert_allclose(area_weights(rows), want / want.mean(), rtol=1e-12)


@pytest.mark.slow
@on_ranks(4)
def test_area_weights_on_tiles(holed):
    want = expected(stacked(holed, LONG), weights=area_weights(np.linspace(90, -90, 13)))
    check(on_mesh(holed, {"lat": 2, "lon": 2}, weights="area", block=3), want)


def test_no_difference_over_a_gap(gappy):
    follows = np.arange(10) != 5
    check(on_mesh(gappy, {"lat": 1}, block=2), expected(stacked(gappy, LONG), follows))


@pytest.mark.slow
@pytest.mark.parametrize("every", ["12h", 2])
def test_every_other_step(tiled, every):
    found = on_mesh(tiled, {"lat": 1}, every=every, time=("2020-01-01T06", "2020-01-03"))
    check(found, expected(stacked(tiled, LONG)[1::2]))


@pytest.mark.parametrize("weighted", [False, True])
def test_tiles_of_many_pieces(weighted):
    r = np.random.default_rng(2)
    whole = r.normal(3, 2, (1, 2, 300, 500)).astype("f4")
    whole[0, 0][r.uniform(size=(300, 500)) < 0.2] = np.nan
    whole[0, 1, 100:250] = np.nan  # whole pieces
    rows = r.uniform(0.1, 2, 300) if weighted else None
    weights = None if rows is None else np.repeat(rows[:, None], 500, axis=1)
    found, want = ChannelMoments.of(whole[0], weights).summary(), _of(whole.astype("f8"), rows)
    apart = ChannelMoments.of(whole[0], weights, minus=whole[0][:, ::-1]).summary()
    for got, by_numpy in ((found, want), (apart, _of((whole - whole[:, :, ::-1].astype("f8")), rows))):
        for name, values in by_numpy.items():
            np.testing.assert_allclose(got[name], values, rtol=1e-12, atol=1e-12, err_msg=name)


def test_members_follow_each_other_without_a_difference(tmp_path):
    data = globe()[["2m_temperature"]].expand_dims(number=[0, 1]).copy(deep=True)
    data["2m_temperature"].values[1] += 50
    data.to_zarr(tmp_path / "members.zarr", consolidated=False)
    ds = opened(str(tmp_path / "members.zarr"), world_mesh(lat=1), ["t2m"], select={"number": [0, 1]})
    whole = data["2m_temperature"].values.astype("f8").reshape(20, 1, 13, 16)
    check(statistics(ds, block=3), expected(whole, np.arange(20) != 10))


def test_what_never_varies_has_no_deviation():
    steps = [np.full((1, 40, 50), 101325.7)] * 3
    weights = np.linspace(0.1, 1.3, 2000).reshape(40, 50)
    for chosen in (None, weights):
        found = ChannelMoments.nothing(1).add(ChannelMoments.of(x, chosen) for x in steps).summary()
        assert (found["mean"][0], found["std"][0]) == (101325.7, 0.0)


def test_large_offsets_do_not_cancel():
    r = np.random.default_rng(0)
    values = 1e9 + r.normal(size=(20, 1, 50))
    whole = ChannelMoments.nothing(1).add(ChannelMoments.of(tile) for tile in values)
    np.testing.assert_allclose(whole.summary()["std"], values.std(), rtol=1e-7)


# -- going on ----------------------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
import jigsaw
from jigsaw.io.stats.compute import statistics

def report(done, steps):
    if done == 6:
        os.kill(os.getpid(), signal.SIGKILL)

how = {"fields": sys.argv[3].split(","), "dtype": "float64", "missing": "fill"}
ds = jigsaw.io.open(sys.argv[1], mesh=jigsaw.init_mesh(lat=1), **how)
statistics(ds, block=2, checkpoint=sys.argv[2], progress=report)
"""


def same_bits(found, want):
    for name, values in want.columns.items():
        np.testing.assert_array_equal(found.columns[name], values)


@pytest.mark.slow
def test_a_killed_run_goes_on_with_the_same_bits(holed, tmp_path):
    at = tmp_path / "s.part"
    killed = subprocess.run([sys.executable, "-c", KILLED, holed, str(at), ",".join(LONG)], check=False)
    assert killed.returncode == -9 and [p.name for p in tmp_path.iterdir()] == ["s.part"]
    seen = []
    ds = opened(holed, world_mesh(lat=1))
    found = statistics(ds, block=2, checkpoint=at, resume=True, progress=lambda done, steps: seen.append((done, steps)))
    assert seen == [(8, 10), (10, 10)]
    again = statistics(ds, block=2, checkpoint=at, resume=True, progress=lambda done, steps: seen.append(done))
    assert len(seen) == 2  # nothing was left to read
    same_bits(again, found)
    same_bits(found, statistics(ds, block=2))


class StopHereError(Exception):
    pass


def stopped(ds, at, after, **more):
    def report(done, steps):
        if done == after:
            raise StopHereError

    with pytest.raises(StopHereError):
        statistics(ds, checkpoint=at, progress=report, **more)


@pytest.mark.slow
@on_ranks(4)
def test_ranks_go_on_with_the_same_bits(holed, folder):
    at = Path(folder) / "ranks.part"
    for axes, after in (({"lat": 2, "lon": 2}, 4), ({"data": 2, "lat": 2}, 8)):
        mesh = world_mesh(**axes)
        ds = opened(holed, mesh)
        want = statistics(ds, block=2)
        stopped(ds, at, after, block=2)
        same_bits(statistics(ds, block=2, checkpoint=at, resume=True), want)
        stopped(ds, at, after, block=2)
        with pytest.raises(StateError, match=r"is of mesh .* this run of \[\['lat', 4\]\]; run it as before"):
            statistics(opened(holed, world_mesh(lat=4)), block=2, checkpoint=at, resume=True)


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path)


def test_a_checkpoint_of_something_else_is_refused(holed, tmp_path):
    at, mesh = tmp_path / "c", world_mesh(lat=1)
    stopped(opened(holed, mesh), at, 4, block=2)
    with pytest.raises(StateError, match=r"is of weights 'none', this run of 'area'"):
        statistics(opened(holed, mesh), checkpoint=at, resume=True, weights="area")
    with pytest.raises(StateError, match=r"is of fields .*, this run of \['t2m'\]"):
        statistics(opened(holed, mesh, ["t2m"]), checkpoint=at, resume=True)
    with pytest.raises(StateError, match=r"is of steps '10 .*, this run of '5 "):
        statistics(opened(holed, mesh, every=2), checkpoint=at, resume=True)
    with pytest.raises(StateError, match=r"is of places .*; run it as before"):
        statistics(opened(holed, mesh, lat_order="south-first"), checkpoint=at, resume=True)
    sums = [{"t2m": "12h", "z500": "24h"}, {"t2m": "24h", "z500": "12h"}]
    fields = ["t2m", "z500"]
    stopped(opened(holed, mesh, fields, sums=sums[0]), at, 1, block=1)
    with pytest.raises(StateError, match=r"is of rows of fields .*; run it as before"):
        statistics(opened(holed, mesh, fields, sums=sums[1]), checkpoint=at, resume=True, block=1)
    again = write(tmp_path / "again.zarr", globe())
    stopped(opened(again, mesh), at, 4, block=2)
    shutil.rmtree(again)
    write(tmp_path / "again.zarr", globe() + 1)
    with pytest.raises(StateError, match=r"is of stored bytes .*; run it as before, or remove the checkpoint"):
        statistics(opened(again, mesh), checkpoint=at, resume=True)
    at.write_bytes(at.read_bytes()[:100])
    with pytest.raises(StateError, match=r"cannot be read .* remove it to begin anew"):
        statistics(opened(holed, mesh), checkpoint=at, resume=True)


@pytest.mark.parametrize(
    ("opening", "asked", "error", "match"),
    [
        ({"inputs": [-1, 0]}, {}, FieldError, r"inputs=\[-1, 0\] and targets=\[\]; open it with inputs=\[0\]"),
        ({}, {"weights": "cos"}, FieldError, r"weights='cos' must be one of"),
        ({}, {"block": 0}, FieldError, r"block=0 must be a whole number, 1 or more: the steps"),
        ({}, {"block": "8"}, FieldError, r"block='8' must be a whole number"),
        ({}, {"checkpoint": "/no/such/folder/x"}, StateError, r"'/no/such/folder/x' is in a folder that is not there"),
        ({}, {"resume": True}, FieldError, r"resume=True needs checkpoint="),
    ],
)
def test_what_cannot_be_asked(wb2, opening, asked, error, match):
    with pytest.raises(error, match=match):
        statistics(opened(wb2, world_mesh(lat=1), **opening), **asked)


def test_volumes_have_no_area(tmp_path):
    data = xr.Dataset({"ct": (("z", "y", "x"), np.random.default_rng(0).normal(size=(5, 7, 9)).astype("f4"))})
    data.to_zarr(tmp_path / "v.zarr", consolidated=False)
    ds = jigsaw.io.open(str(tmp_path / "v.zarr"), mesh=world_mesh(lat=1), fields=["ct"])
    with pytest.raises(GridError, match=r"weights='area' needs a lat dim, and the fields have \('z', 'y', 'x'\)"):
        statistics(ds, weights="area")
    found = statistics(ds)
    np.testing.assert_allclose(found["ct"]["std"], data.ct.values.astype("f8").std(), rtol=1e-12)
    assert np.isnan(found["ct"]["diff_mean"]) and found["ct"]["diff_count"] == 0
