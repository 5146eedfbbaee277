"""What a halo holds beyond the ends of a dim: the oracle is numpy.pad on the whole array, rolled across the poles."""

from __future__ import annotations

import functools
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr

import jigsaw
from jigsaw.errors import FieldError, ShardingError
from jigsaw.geometry.layout import Layout
from jigsaw.io import GridError, HaloError
from jigsaw.io.formats.store import open_store
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.series import forcings
from jigsaw.io.series.boundary import DimBoundary
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile import Tile

FIELDS = ["t2m", "u10", "v500", "land_sea_mask"]
SIGNS = np.array([1.0, -1.0, -1.0, 1.0])[:, None, None]
MEAN = {"t2m": (2.0, 3.0), "u10": (0.5, 2.0), "v500": (0.0, 4.0)}
STEPS, LEVELS, LAT, LON = 2, (500, 850), 11, 12


def globe(cells=False, lat=LAT, lon=LON):
    """Winds and temperature on rows that end at the poles, or half a step from them."""
    r = np.random.default_rng(0)
    rows = 90 - (np.arange(lat) + 0.5) * 180 / lat if cells else np.linspace(90, -90, lat)
    upper, lower = ("time", "level", "latitude", "longitude"), ("time", "latitude", "longitude")
    data = xr.Dataset(
        {
            "2m_temperature": (lower, r.integers(-99, 99, (STEPS, lat, lon)).astype("f4")),
            "10m_u_component_of_wind": (lower, r.integers(-99, 99, (STEPS, lat, lon)).astype("f8")),
            "v_component_of_wind": (upper, r.normal(size=(STEPS, 2, lat, lon)).astype("f4")),
            "land_sea_mask": (lower[1:], r.uniform(size=(lat, lon)).astype("f4")),
        },
        {
            "time": np.datetime64("2020-01-01", "ns") + np.arange(STEPS) * np.timedelta64(6, "h"),
            "level": list(LEVELS), "latitude": rows, "longitude": np.arange(lon) * (360 / lon),
        },
    )  # fmt: skip
    packed = {"dtype": "int16", "scale_factor": 0.5, "add_offset": 20.0, "_FillValue": -32768}
    return data, {"2m_temperature": packed, "10m_u_component_of_wind": packed}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Chunks smaller than tiles and halos; rows at the poles, and cells around them."""
    made = {}
    for kind in ("rows", "cells"):
        data, encoding = globe(kind == "cells")
        for name, v in data.data_vars.items():
            encoding[name] = {**encoding.get(name, {}), "chunks": (1, 1, 4, 5)[-v.ndim :]}
        made[kind] = str(tmp_path_factory.mktemp(kind) / "globe.zarr")
        data.to_zarr(made[kind], zarr_format=3, encoding=encoding, consolidated=False)
    return made


# -- the oracle -------------------------------------------------------------------------------------------------------

NUMPY = {"periodic": "wrap", "reflect": "reflect", "replicate": "edge"}


def padded(whole, halo, boundary, at_pole, signs):
    """`whole` [..., lat, lon] with its halo, first along lat, then along lon; and how far its first row moved."""
    for axis, dim in ((-2, "lat"), (-1, "lon")):
        rule, width = boundary.get(dim, "clip"), [(0, 0)] * whole.ndim
        width[axis] = halo[dim]
        if rule == "pole":
            low, high = halo[dim]
            opposite, shift = np.roll(whole, whole.shape[-1] // 2, -1) * signs, int(at_pole)
            n = whole.shape[-2]
            parts = [opposite[..., shift : shift + low, :][..., ::-1, :], whole]
            whole = np.concatenate([*parts, opposite[..., n - shift - high : n - shift, :][..., ::-1, :]], -2)
        elif isinstance(rule, tuple):
            whole = np.pad(whole, width, "constant", constant_values=rule[1])
        elif rule != "clip":
            whole = np.pad(whole, width, NUMPY[rule])
    return whole, [halo[d][0] if boundary.get(d, "clip") != "clip" else 0 for d in ("lat", "lon")]


def cut_out(whole, moved, layout, coord):
    """What a coordinate holds of a padded whole array."""
    spans = zip(layout.held(coord)[-2:], moved, strict=True)
    return whole[(..., *(slice(a + m, b + m) for (a, b), m in spans))]


@functools.cache
def truth(path, flip=False):
    data = xr.open_zarr(path, consolidated=False).load()
    v, mask = data["v_component_of_wind"].sel(level=500), data["land_sea_mask"].values
    fields = [data["2m_temperature"].values, data["10m_u_component_of_wind"].values, v.values]
    whole = np.stack([*fields, np.broadcast_to(mask, fields[0].shape)], 1).astype("f8")
    return whole[..., ::-1, :] if flip else whole


# -- reading ----------------------------------------------------------------------------------------------------------

CASES = {
    "poles": ({"lat": 2, "lon": 1}, {"lat": "pole", "lon": "periodic"}),
    "poles without a circle": ({"lat": (1, 3), "lon": 2}, {"lat": "pole"}),
    "wide poles": ({"lat": (9, 10), "lon": (7, 11)}, {"lat": "pole", "lon": "periodic"}),
    "one pole": ({"lat": (0, 2)}, {"lat": "pole"}),
    "reflect": ({"lat": (10, 3), "lon": (1, 4)}, {"lat": "reflect", "lon": "reflect"}),
    "replicate": ({"lat": (2, 11), "lon": 3}, {"lat": "replicate", "lon": "replicate"}),
    "fill": ({"lat": (1, 2), "lon": (3, 0)}, {"lat": ("fill", 7.5), "lon": ("fill", -1)}),
    "mixed": ({"lat": (5, 1), "lon": (6, 2)}, {"lat": "reflect", "lon": ("fill", 0.0)}),
    "poles and mirrors": ({"lat": 2, "lon": (3, 4)}, {"lat": "pole", "lon": "reflect"}),
    "clip": ({"lat": (5, 1), "lon": (0, 2)}, {"lon": "clip"}),
    "wrap all": ({"lat": (11, 4), "lon": 12}, {"lat": "periodic", "lon": "periodic"}),
}


def both(width):
    return (width, width) if isinstance(width, int) else width


def check(path, axes, names, at_pole, modes=("auto",), lat_order="store"):
    """In every mode a sample of each case equals the oracle, and the engine counts what the plan said."""
    mesh, whole = world_mesh(**axes), truth(path, lat_order == "south-first")
    engine = ReadEngine(open_store(path), mesh)
    for name in names:
        halo, boundary = CASES[name]
        asked = {"mesh": mesh, "fields": FIELDS, "halo": halo, "boundary": boundary, "dtype": "float64"}
        ds = jigsaw.io.open(path, **asked, lat_order=lat_order, inputs=[0, 1])
        wide, moved = padded(whole, {d: both(halo.get(d, 0)) for d in ("lat", "lon")}, boundary, at_pole, SIGNS)
        want = cut_out(wide, moved, ds.layout, tuple(mesh.get_coordinate()))
        for mode in modes:
            plan, before = replace(ds, mode=mode).plan(0), replace(engine.stats)
            local = torch.from_numpy(engine.read(plan))
            np.testing.assert_array_equal(local.numpy(), want, err_msg=f"{name} {mode}")
            assert engine.stats == before + plan.rows[engine.peers.me], (name, mode)
        tile = Tile(local, ds.layout, mesh)
        assert tile.shape == whole.shape
        np.testing.assert_array_equal(tile.full_tensor().numpy(), whole, err_msg=name)
    engine.close()


@pytest.mark.slow
@on_ranks(1)
def test_one_rank_holds_the_padded_whole(stores):
    check(stores["rows"], {"lat": 1}, CASES, True)
    check(stores["cells"], {"lat": 1}, ["poles", "wide poles", "one pole"], False)


@pytest.mark.slow
@on_ranks(2)
def test_two_bands(stores):
    check(stores["rows"], {"lat": 2}, CASES, True)


@pytest.mark.slow
@on_ranks(3)
def test_three_uneven_bands_with_latitudes_turned(stores):
    check(stores["cells"], {"lat": 3}, ["poles", "wide poles", "reflect", "mixed"], False, lat_order="south-first")


MODES = ("independent", "neighbors", "cooperative")


@pytest.mark.slow
@on_ranks(4)
def test_the_ways_of_reading_give_identical_tiles(stores):
    check(stores["rows"], {"lat": 2, "lon": 2}, CASES, True, MODES)


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"lon": 4}, {"lat": 4}], ids=str)
@on_ranks(4)
def test_halos_wider_than_a_piece_come_from_several_ranks(stores, axes):
    check(stores["rows"], axes, ["wide poles", "reflect", "replicate"], True, MODES)


@on_ranks(2)
def test_components_turn_before_they_are_normalized(stores):
    asked = {"fields": FIELDS, "halo": 1, "boundary": {"lat": "pole", "lon": "periodic"}, "dtype": "float64"}
    ds = jigsaw.io.open(stores["rows"], mesh=world_mesh(lat=2), normalize=MEAN | {"land_sea_mask": (0, 1)}, **asked)
    assert ds.vectors == (1, 2)
    wide, moved = padded(truth(stores["rows"])[:1], {"lat": (1, 1), "lon": (1, 1)}, asked["boundary"], True, SIGNS)
    mean, std = (np.array([*(m[i] for m in MEAN.values()), i])[:, None, None] for i in (0, 1))
    tile = ds[0].input
    want = cut_out((wide - mean) / std, moved, tile.layout, tuple(tile.coordinate))
    np.testing.assert_allclose(tile.local.numpy(), want, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@on_ranks(1)
def test_vectors_are_those_that_are_named(stores):
    def signs(**more):
        asked = {"fields": FIELDS, "halo": {"lat": 1}, "boundary": {"lat": "pole"}, "dtype": "float64"}
        top = jigsaw.io.open(stores["rows"], mesh=world_mesh(lat=1), **asked, **more)[0].input.local[0, :, 0]
        opposite = torch.from_numpy(np.roll(truth(stores["rows"])[0, :, 1], LON // 2, -1))
        return [int((a * b).sum().sign()) for a, b in zip(top, opposite, strict=True)]

    assert signs() == [1, -1, -1, 1]
    assert signs(vectors=["t2m", "v_component_of_wind"]) == [-1, 1, -1, 1]
    assert signs(vectors=[]) == [1, 1, 1, 1]


def test_standard_names_say_what_a_vector_is(tmp_path):
    data = globe()[0][["2m_temperature", "land_sea_mask"]].rename({"2m_temperature": "uas"})
    data.uas.attrs["standard_name"] = "eastward_wind"
    data.to_zarr(tmp_path / "s.zarr", consolidated=False)
    asked = {"mesh": {}, "fields": ["land_sea_mask", "uas"], "halo": 1}
    assert jigsaw.io.open(tmp_path / "s.zarr", boundary={"lat": "pole"}, **asked).vectors == (1,)
    assert jigsaw.io.open(tmp_path / "s.zarr", boundary={"lat": "reflect"}, **asked).vectors == ()


@on_ranks(2)
def test_batches_and_targets_have_the_same_rows(stores):
    asked = {"fields": FIELDS, "halo": 2, "boundary": {"lat": "pole", "lon": "reflect"}, "dtype": "float64"}
    ds = jigsaw.io.open(
        stores["rows"], mesh=world_mesh(lat=2), inputs=[0], targets=[1], target_fields=asked["fields"], **asked
    )
    batch, sample = next(iter(jigsaw.io.DataLoader(ds, batch_size=1))), ds[0]
    assert torch.equal(batch.input.local[0], sample.input.local)
    whole = torch.from_numpy(truth(stores["rows"]))
    a, b = sample.target.layout.owned(tuple(sample.target.coordinate))[2]
    assert torch.equal(sample.target.local, whole[1:, :, a:b])
    loss, want = F.mse_loss(sample.input, sample.target), F.mse_loss(whole[:1], whole[1:])
    torch.testing.assert_close(loss, want)


@on_ranks(2)
def test_a_volume_with_a_rule_a_dim():
    """Where a number and another rule meet, the number stands; of two numbers, that of the later dim."""
    values = np.random.default_rng(0).normal(size=(5, 7, 6)).astype("f4")
    data = xr.Dataset({"ct": (("z", "y", "x"), values)})
    halo = {"z": (1, 2), "y": (3, 1), "x": 2}
    for rules in (("fill", "reflect", "replicate"), ("replicate", "fill", "fill"), ("fill", "clip", "periodic")):
        boundary = {d: (r, float(i)) if r == "fill" else r for i, (d, r) in enumerate(zip("zyx", rules, strict=True))}
        tile = jigsaw.io.open(data, mesh=world_mesh(y=2), fields=["ct"], halo=halo, boundary=boundary)[0].input
        want = values
        for axis, (dim, rule) in enumerate(zip("zyx", rules, strict=True)):
            width = [both(halo[dim]) if i == axis and rule != "clip" else (0, 0) for i in range(3)]
            more = {"constant_values": axis} if rule == "fill" else {}
            want = np.pad(want, width, "constant" if rule in ("fill", "clip") else NUMPY[rule], **more)
        a, b = (x + 3 * (rules[1] != "clip") for x in tile.layout.held(tuple(tile.coordinate))[3])
        np.testing.assert_array_equal(tile.local[0, 0].numpy(), want[:, a:b])


ASKED = ["cos_zenith", "day_progress", "latlon"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["poles", "poles without a circle", "reflect", "mixed", "replicate"])
@on_ranks(4)
def test_forcings_follow_the_rows(stores, name):
    mesh, (halo, boundary) = world_mesh(lat=2, lon=2), CASES[name]
    asked = {"fields": ["t2m"], "halo": halo, "boundary": boundary, "dtype": "float64"}
    ds = jigsaw.io.open(stores["cells"], mesh=mesh, forcings=ASKED, **asked)
    sample, lat, lon = ds[1], ds.whole_coords["lat"], ds.whole_coords["lon"]
    zenith = forcings.cos_zenith(sample.input_times, lat, lon)[:, None]
    day = np.broadcast_to(forcings.day_progress(sample.input_times, lon)[:, :, None], (1, 2, LAT, LON))
    everything = np.concatenate([zenith, day, forcings.latlon(lat, lon)[None]], 1)
    wide, moved = padded(everything, {d: both(halo[d]) for d in ("lat", "lon")}, boundary, False, 1.0)
    want = cut_out(wide, moved, sample.input.layout, tuple(mesh.get_coordinate()))
    np.testing.assert_array_equal(sample.input.local[:, 1:].numpy(), want)


# -- models on such tiles ---------------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_convolution_without_padding_on_what_is_held_is_that_of_the_padded_whole(stores):
    halo, boundary = {"lat": (2, 2), "lon": (2, 2)}, {"lat": "pole", "lon": "periodic"}
    asked = {"fields": FIELDS, "halo": halo, "boundary": boundary, "dtype": "float64"}
    tile = jigsaw.io.open(stores["rows"], mesh=world_mesh(lat=2, lon=2), **asked)[0].input
    wide, _ = padded(truth(stores["rows"])[:1], halo, boundary, True, SIGNS)
    weight = torch.randn(3, 4, 5, 5, dtype=torch.float64)
    (a, b), (c, d) = tile.layout.owned(tuple(tile.coordinate))[2:]
    want = F.conv2d(torch.from_numpy(wide), weight)[..., a:b, c:d]
    torch.testing.assert_close(F.conv2d(tile.local, weight), want)


def beyond(x, below=2, above=3):
    """A tile with nonsense in rows beyond the ends of lat and lon; a whole tensor as it is."""
    if not isinstance(x, Tile):
        return x
    first = x.ndim - 2
    cuts = [c.with_beyond(below, above) for c in x.layout.without_halo().cuts[-2:]]
    for d, cut in enumerate(cuts):
        inner = cut.holding([cut.inside(i) for i in range(cut.pieces)])
        x = x.with_layout(x.layout.replace_dim(first + d, inner))
    local, layout = x.local, x.layout
    for d, cut in enumerate(cuts):
        (a, b), (c, e) = (cut.held[layout.piece(cut, x.coordinate)], cut.inside(layout.piece(cut, x.coordinate)))
        sizes = [c - a, b - e]
        junk = [local.new_full((*local.shape[: first + d], n, *local.shape[first + d + 1 :]), 1e4) for n in sizes]
        local, layout = torch.cat([junk[0], local, junk[1]], first + d), layout.replace_dim(first + d, cut)
    return Tile(local, layout, x.mesh)


class Behind(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(beyond(x))


def conv(mode, **more):
    return torch.nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode, **more)


def circles_alone(x):
    """A padding along lon leaves the rows beyond lat where they are, for the padding along lat to ignore."""
    return F.pad(F.pad(x, (2, 2, 0, 0), mode="circular"), (0, 0, 2, 2)).square()


FUNCTIONS = {
    "log": lambda x: (x * x + 1).log(),
    "positional": lambda x: x + torch.arange(70, dtype=x.dtype).reshape(7, 10) / 70,
    "two tiles": lambda x: x * x.mean(2, keepdim=True) + torch.maximum(x, x.flip(0)),
    "sums": lambda x: x.sum() + x.mean((2, 3)).square().sum() + x.std() + x.norm() + x.amax((2, 3)).sum(),
    "softmax": lambda x: x.softmax(2) + x.softmax(1),
    "tokens": lambda x: x.flatten(2).transpose(1, 2).unflatten(1, (7, 10)).permute(0, 3, 1, 2),
    "merged": lambda x: x.reshape(6, 7, 10).unsqueeze(1).transpose(2, 3),
    "slices": lambda x: x[:, 1:, 2:6, 3:] + x[:, :2, 2:6, 3:] * 2,
    "one row": lambda x: x[:, :, 3] * 2 + x[:, :, 0] + x[:, :, 6],
    "roll": lambda x: x.roll((3, -4), (2, 3)),
    "cat": lambda x: torch.cat([x, x * 2, torch.ones(2, 1, 7, 10, dtype=x.dtype)], 1),
    "repeat": lambda x: x.repeat(1, 2, 1, 1),
    "cast": lambda x: x.float().double().sum(1),
    "circles alone": circles_alone,
}
MODELS = {
    "zeros": lambda: conv("zeros"),
    "reflect": lambda: conv("reflect"),
    "replicate": lambda: conv("replicate"),
    "circular": lambda: conv("circular"),
    "stride": lambda: torch.nn.Conv2d(3, 4, 3, stride=2, padding=1),
    "valid": lambda: torch.nn.Conv2d(3, 4, 3),
    "pointwise": lambda: torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), torch.nn.GELU(), conv_of(4)),
    "norms": lambda: torch.nn.Sequential(torch.nn.GroupNorm(3, 3), torch.nn.BatchNorm2d(3)),
    "layer norm": lambda: torch.nn.LayerNorm((7, 10)),
    "pool": lambda: torch.nn.Sequential(torch.nn.AvgPool2d(3, 2, 1), torch.nn.Upsample(scale_factor=2)),
    "transposed": lambda: torch.nn.ConvTranspose2d(3, 4, 3, 2, 1),
    "linear": lambda: torch.nn.Linear(10, 6),
}
MESHES = [{"lat": 1}, {"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}]


def conv_of(channels):
    return torch.nn.Conv2d(channels, 2, 5, padding=2)


def _behind(name, x):
    return FUNCTIONS[name](beyond(x))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_ignore_rows_beyond(name):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 10)
    assert_same_on_every_mesh(functools.partial(_behind, name), x, MESHES, spec=(None, None, "lat", "lon"))


@pytest.mark.parametrize("name", MODELS)
def test_layers_ignore_rows_beyond(name):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 10)
    assert_same_on_every_mesh(Behind(MODELS[name]()), x, MESHES, spec=(None, None, "lat", "lon"))


@pytest.mark.parametrize("mode", ["zeros", "circular"])
def test_strips_ignore_rows_beyond(mode):
    """Long pieces are convolved by strips, which read what is held in place."""
    layer, x = Behind(torch.nn.Conv2d(2, 2, 3, padding=1, padding_mode=mode)), torch.randn(1, 2, 4, 201)
    assert_same_on_every_mesh(layer, x, [{"lon": 1}, {"lon": 2}], spec=(None, None, None, "lon"))


@on_ranks(2)
def test_views_and_casts_keep_rows_beyond_and_computing_leaves_them_out(stores):
    asked = {"fields": FIELDS, "halo": {"lat": 1}, "boundary": {"lat": ("fill", 0.0)}, "dtype": "float64"}
    tile = jigsaw.io.open(stores["rows"], mesh=world_mesh(lat=2), **asked)[0].input
    rows, (low, high) = tile.local.shape[2], tile.layout.held(tuple(tile.coordinate))[2]
    assert rows == high - low
    assert (low < 0) != (high > LAT)
    for kept in (tile.float(), tile.clone(), tile[:, 1:], tile.flatten(0, 1).unsqueeze(0), tile.transpose(2, 3)):
        assert rows in kept.local.shape
    for left in (tile * 2, tile.sqrt(), tile + tile, tile[:, :, 1:]):
        assert left.local.shape[2] < rows
    assert torch.equal(tile.with_layout(tile.layout).local, tile.local)
    with pytest.raises(ShardingError, match=r"add_ would change the layout of its target in place"):
        tile.add_(1)
    with pytest.raises(ShardingError, match=r"of a dim of 11 rows that does not wrap; rows beyond an end come from a"):
        (tile * 2).with_layout(tile.layout)


def test_a_number_beyond_an_end_spoils_no_gradient():
    x = (torch.rand(1, 3, 7, 10) + 0.5).requires_grad_()
    mesh = jigsaw.init_mesh(lat=1)
    layout = Layout.of(x.shape, (None,) * 4, {"lat": 1})
    cut = layout.cuts[2].with_beyond(1, 1)
    tile = Tile(F.pad(x, (0, 0, 1, 1)), layout.replace_dim(2, cut), mesh)
    tile.log().sum().backward()
    torch.testing.assert_close(x.grad, 1 / x.detach())


# -- refusals ---------------------------------------------------------------------------------------------------------

WRONG = [
    ({"boundary": {"lat": "mirror"}}, GridError, r"boundary=\{'lat': 'mirror'\} is not a rule: use 'periodic' \(wraps"),
    ({"boundary": {"lat": "fill"}}, GridError, r"'fill'\} is not a rule: .* \('fill', number\)"),
    ({"boundary": {"lat": ("fill", "0")}}, GridError, r"\('fill', '0'\)\} is not a rule"),
    (
        {"boundary": {"lat": "reflect"}, "halo": {"lat": (0, 11)}},
        HaloError,
        r"halo=\{'lat': \(0, 11\)\} is too wide for boundary=\{'lat': 'reflect'\}.* 'lat' has 11 rows; use at most 10",
    ),
    ({"boundary": {"lat": "pole"}, "halo": {"lat": 11}}, HaloError, r"too wide for boundary=\{'lat': 'pole'\}"),
    ({"boundary": {"lat": "replicate"}, "halo": {"lat": 12}}, HaloError, r"larger than the domain: 'lat' has 11 rows"),
    ({"boundary": {"lon": "pole"}}, GridError, r"boundary=\{'lon': 'pole'\} is for 'lat' on a grid with 'lon'"),
    ({"vectors": ["u10"]}, FieldError, r"vectors=\['u10'\] change sign across a pole; give boundary=\{'lat': 'pole'\}"),
    ({"vectors": ["z500"], "boundary": {"lat": "pole"}}, FieldError, r"vectors names 'z500', but the fields are"),
    ({"vectors": "u10", "boundary": {"lat": "pole"}}, FieldError, r"vectors='u10' is one string; give a list"),
]


@pytest.mark.parametrize(("asked", "error", "message"), WRONG)
def test_refusals(stores, asked, error, message):
    with pytest.raises(error, match=message):
        jigsaw.io.open(stores["rows"], mesh={"lat": 2}, fields=FIELDS, **asked)


REGIONS = [
    (globe(lon=13)[0], r"needs an even number of columns, but 'lon' has 13"),
    (globe()[0].isel(longitude=slice(0, 8)), r"boundary=\{'lat': 'pole'\} needs 'lon' to go round once, but its 8"),
    (globe()[0].isel(latitude=slice(1, 11)), r"'lat' runs from 72 to -90 in steps of 18, and 72 is 18 degrees from a"),
    (globe()[0].isel(latitude=slice(0, 9)), r"and -54 is 36 degrees from a pole; use 'replicate'"),
]


@pytest.mark.parametrize(("data", "message"), REGIONS)
def test_poles_need_the_globe(data, message):
    with pytest.raises(GridError, match=message):
        jigsaw.io.open(data, mesh={"lat": 2}, fields=["t2m"], halo=1, boundary={"lat": "pole"})


def test_a_hemisphere_has_one_pole():
    north = globe()[0].isel(latitude=slice(0, 6))
    ds = jigsaw.io.open(north, mesh={}, fields=["t2m"], halo={"lat": (2, 0)}, boundary={"lat": "pole"})
    assert ds.layout.held(())[2] == (-2, 6)


def test_rows_beyond_by_hand():
    def shown(boundary):
        return [boundary.show(x, 4) for x in (-2, -1, 0, 3, 4, 5)]

    assert [row for row, _ in shown(DimBoundary("reflect"))] == [2, 1, 0, 3, 2, 1]
    assert [row for row, _ in shown(DimBoundary("replicate"))] == [0, 0, 0, 3, 3, 3]
    assert [row for row, _ in shown(DimBoundary("periodic"))] == [2, 3, 0, 3, 0, 1]
    assert shown(DimBoundary("fill", 1.0)) == [None, None, (0, False), (3, False), None, None]
    assert shown(DimBoundary("pole", at_pole=(True, False))) == [
        *((2, True), (1, True), (0, False), (3, False), (3, True), (2, True))
    ]
    assert replace(DimBoundary("pole"), at_pole=(False, True)).show(-1, 4) == (0, True)
