"""Stores whose fields have one dim of cells, as the usual packages write them, read and trained on by every mesh."""

import importlib
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import jigsaw
from jigsaw.__main__ import main
from jigsaw.errors import FieldError, GridError
from jigsaw.testing import run_on_ranks, world_mesh

STEPS, NSIDE = 9, 4
CELLS = 12 * NSIDE**2
TIMES = np.datetime64("2020-01-01", "ns") + np.arange(STEPS) * np.timedelta64(6, "h")
DRAW = np.random.default_rng(0)
# what lasts of it from step to step can be learned
T2M = (280 + 9 * (DRAW.normal(size=CELLS) + 0.1 * DRAW.normal(size=(STEPS, CELLS)))).astype("f4")
Z = (DRAW.normal(size=(2, CELLS)) + 0.1 * DRAW.normal(size=(STEPS, 2, CELLS))).astype("f4")
LAND = DRAW.uniform(size=CELLS).astype("f4")
WHOLE = np.concatenate([T2M[:, None], Z, np.broadcast_to(LAND, (STEPS, 1, CELLS))], 1)
FIELDS = ["t2m", "z", "land"]
LEVEL_2 = {"grid_mapping_name": "healpix", "refinement_level": 2, "indexing_scheme": "nested"}
# points that leave ranks with more cells, with few, and with none
MESHES = {
    "1": ({"cell": 1}, "balanced"),
    "2": ({"cell": 2}, [0, 50, CELLS]),
    "3": ({"cell": 3}, [0, 0, 131, CELLS]),
    "4": ({"cell": 4}, [0, 64, 64, 65, CELLS]),
    "2 x 2": ({"data": 2, "cell": 2}, [0, 100, CELLS]),
}


def fields_on_cells(dim="cell", coords=None, **of_all):
    """Air temperature, geopotential on two levels, and land, on the given cells."""
    arrays = {
        "t2m": (("time", dim), T2M, {"units": "K", "long_name": "air temperature", **of_all}),
        "z": (("time", "level", dim), Z, of_all),
        "land": ((dim,), LAND, of_all),
    }
    return xr.Dataset(arrays, {"time": TIMES, "level": [500, 850], **(coords or {})})


def on_healpix(attrs=LEVEL_2):
    return fields_on_cells(coords={"crs": ((), 0, attrs)}, grid_mapping="crs")


NUMBERS = np.random.default_rng(1).permutation(12 * 8**2)[:CELLS]


def part_of_sphere():
    level_3 = {**LEVEL_2, "refinement_level": 3}
    coords = {"crs": ((), 0, level_3), "index": ("pixel", NUMBERS, {"standard_name": "healpix_index"})}
    return fields_on_cells("pixel", coords, grid_mapping="crs")


def written(folder, data, kind="v2", chunk=48):
    """Write a dataset in chunks of a step and some cells; return its path."""
    path = str(folder / ("cells.nc" if kind == "nc" else f"{kind}.zarr"))
    sizes = {"t2m": (1, chunk), "z": (1, 2, chunk), "land": (CELLS,)}
    if kind == "nc":
        data.to_netcdf(path, encoding={name: {"chunksizes": sizes[name], "zlib": True} for name in sizes})
    else:
        codes = {name: {"chunks": sizes[name]} for name in sizes}
        data.to_zarr(path, zarr_format=int(kind[1]), consolidated=kind == "v2", encoding=codes)
    return path


@pytest.fixture(scope="module")
def healpix(tmp_path_factory):
    return written(tmp_path_factory.mktemp("healpix"), on_healpix())


class CellConv(torch.nn.Module):
    """A 3 x 3 convolution: each cell and its eight neighbors."""

    def __init__(self, inputs, outputs, grid):
        super().__init__()
        self.grid, self.mix = grid, torch.nn.Conv2d(inputs, outputs, (1, 9), dtype=torch.float64)

    def forward(self, x):
        near = jigsaw.nn.gather_neighbors(x, self.grid)
        return self.mix(torch.cat([x.unsqueeze(-1), near], -1)).squeeze(-1)


def train(path, axes, split):
    """Losses of some steps from the store, the whole first batch, and the chunks that this rank has decoded."""
    mesh, shared = world_mesh(**axes), {"split": split, "mode": "cooperative", "dtype": "float64"}
    normalize = {"t2m": (280, 9), "z": (0, 1), "land": (0, 1)}
    samples = jigsaw.io.open(path, mesh=mesh, fields=FIELDS, targets=[1], normalize=normalize, **shared)
    loader = jigsaw.io.DataLoader(samples, 8, cache_bytes=1 << 20)
    torch.manual_seed(0)
    table = samples.grid.neighbors()
    net = torch.nn.Sequential(CellConv(4, 8, table), torch.nn.GELU(), CellConv(8, 3, table))
    net = jigsaw.parallelize(net, mesh)
    weights = torch.from_numpy(samples.grid.area_weights)
    optimizer = torch.optim.Adam(net.parameters(), 2e-2)
    losses, first = [], None
    for _ in range(12):
        for batch in loader:
            first = batch.input.full_tensor().numpy() if first is None else first
            loss = ((net(batch.input[:, 0]) - batch.target[:, 0]).square() * weights).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, first, loader.read_counts.chunks


def test_training_from_a_store_on_cells_is_the_same_on_every_mesh(healpix):
    (want, first, chunks), *_ = run_on_ranks(1, train, healpix, *MESHES["1"])
    np.testing.assert_allclose(first[:, 0], (WHOLE[:8] - [[280], [0], [0], [0]]) / [[9], [1], [1], [1]], rtol=1e-6)
    assert want[-1] < 0.8 * want[0]
    assert chunks == 2 * 4 * STEPS + 1  # of two arrays four pieces a step, and the land: each once
    for axes, split in list(MESHES.values())[1:]:
        ranks = run_on_ranks(int(np.prod(list(axes.values()))), train, healpix, axes, split)
        for losses, whole, _ in ranks:
            np.testing.assert_allclose(losses, want, rtol=1e-10)
            np.testing.assert_array_equal(whole, first)
        if "data" not in axes:
            assert sum(decoded for *_, decoded in ranks) == chunks


def read_whole(path, axes, split, **options):
    samples = jigsaw.io.open(path, mesh=world_mesh(**axes), fields=FIELDS, split=split, **options)
    return np.concatenate([samples[i].input.full_tensor().numpy() for i in range(len(samples))]), samples.grid


@pytest.mark.parametrize("kind", ["v2", "v3", "nc"])
def test_cells_of_each_format(tmp_path, kind):
    path = written(tmp_path, on_healpix(), kind, chunk=80)
    for values, grid in run_on_ranks(3, read_whole, path, *MESHES["3"]):
        np.testing.assert_array_equal(values, WHOLE)
        assert (grid.nside, grid.nested, grid.cells) == (NSIDE, True, CELLS)


HEALPIX = {
    "CF 1.13": LEVEL_2,
    "CF by xdggs": LEVEL_2,
    "nside": {"grid_mapping_name": "healpix", "healpix_nside": NSIDE, "healpix_order": "nest"},
    "ring": {"grid_mapping_name": "healpix", "healpix_nside": NSIDE, "healpix_order": "ring"},
}


@pytest.mark.parametrize("said", HEALPIX)
def test_descriptions_of_healpix(tmp_path, said):
    theirs = pytest.importorskip("cdshealpix.ring" if said == "ring" else "cdshealpix.nested")
    data = on_healpix(HEALPIX[said])
    if said == "CF by xdggs":
        data.t2m.attrs["grid_mapping"] = "healpix"
    grid = jigsaw.io.open(written(tmp_path, data), mesh={"cell": 2}, fields=["t2m"]).grid
    lon, lat = theirs.healpix_to_lonlat(np.arange(CELLS), NSIDE if said == "ring" else 2)
    np.testing.assert_allclose(grid.lat, lat.to_value("deg"), atol=1e-12)
    np.testing.assert_allclose(grid.lon, lon.to_value("deg"), atol=1e-12)
    assert grid.neighbors() == jigsaw.Neighbors.healpix(NSIDE, nested=said != "ring")
    np.testing.assert_array_equal(grid.area_weights, np.ones(CELLS))


@pytest.mark.parametrize("convention", ["CF", "xdggs"])
def test_a_part_of_the_sphere_has_neighbors_within_it(tmp_path, convention):
    if convention == "CF":
        data = part_of_sphere()
    else:
        described = {"grid_name": "healpix", "level": 3, "indexing_scheme": "nested"}
        data = fields_on_cells("pixel", {"cell_ids": ("pixel", NUMBERS, described)})
    samples = jigsaw.io.open(written(tmp_path, data), mesh=world_mesh(cell=1), fields=FIELDS)
    np.testing.assert_array_equal(samples[1].input.full_tensor()[0], WHOLE[1])
    whole = jigsaw.Neighbors.healpix(8).rows_of(NUMBERS)
    places = {number: at for at, number in enumerate(NUMBERS.tolist())} | {-1: -1}
    want = [[places.get(number, -1) for number in row] for row in whole.tolist()]
    np.testing.assert_array_equal(samples.grid.neighbors().rows_of(np.arange(CELLS)), want)
    assert samples.grid.lat.shape == (CELLS,)


DGGS = {"name": "healpix", "refinement_level": 2, "indexing_scheme": "nested", "spatial_dimension": "pixel"}


def with_dggs(numbers=None, on_arrays=False, **changes):
    """A store that describes its cells by zarr-conventions' attribute, of the group or of each array."""
    named = {} if numbers is None else {"coordinate": "cell_ids", "compression": "none"}
    described = {**DGGS, **named, **changes}
    coords = {} if numbers is None else {"cell_ids": ("pixel", numbers)}
    data = fields_on_cells("pixel", coords, **({"dggs": described} if on_arrays else {}))
    return data if on_arrays else data.assign_attrs(dggs=described)


@pytest.mark.parametrize("on_arrays", [False, True])
def test_zarr_conventions_describe_a_discrete_global_grid(tmp_path, on_arrays):
    whole = jigsaw.io.open(written(tmp_path, with_dggs(on_arrays=on_arrays), "v3"), mesh={"cell": 2})
    assert (whole.grid.nside, whole.grid.nested, whole.grid.numbers) == (4, True, None)
    assert set(whole.fields) >= {"t2m", "land"}
    part = with_dggs(NUMBERS, on_arrays, refinement_level=3, indexing_scheme="ring")
    samples = jigsaw.io.open(written(tmp_path, part, "v2"), mesh=world_mesh(cell=1), fields=["t2m", "z"], targets=[0])
    assert "cell_ids" not in jigsaw.io.open(str(tmp_path / "v2.zarr"), mesh={"cell": 2}).fields
    assert (samples.grid.nside, samples.grid.nested) == (8, False)
    np.testing.assert_array_equal(samples.grid.numbers, NUMBERS)
    out = str(tmp_path / "again.zarr")
    with jigsaw.io.Writer(out, dims=("time", "channel", "cell"), like=samples, append_dim="time") as writer:
        writer.append(samples[1].target, coords={"time": samples.target_times(1)})
    again = jigsaw.io.open(out, mesh=world_mesh(cell=1), fields=["t2m", "z"])
    np.testing.assert_array_equal(again.grid.numbers, NUMBERS)
    np.testing.assert_array_equal(again.grid.lat, samples.grid.lat)
    torch.testing.assert_close(again[0].input.local, samples[1].target.local, rtol=0, atol=0)


def test_numbers_that_are_compressed_are_refused(tmp_path):
    for kind, changes in (("v2", {"compression": "ranges"}), ("v3", {"coordinate": "others"})):
        with pytest.raises(GridError, match="the store must have it, with compression 'none'"):
            jigsaw.io.open(written(tmp_path, with_dggs(NUMBERS, **changes), kind), mesh={"cell": 2})
    (tmp_path / "other").mkdir()
    with pytest.raises(GridError, match="indexing_scheme 'zuniq'"):
        jigsaw.io.open(written(tmp_path / "other", with_dggs(indexing_scheme="zuniq")), mesh={"cell": 2})


@pytest.mark.parametrize(
    ("attrs", "message"),
    [
        ({"refinement_level": 3}, "has 192 cells, and HEALPix of nside 8 has 768; give the dim 'cell' a coordinate"),
        ({"indexing_scheme": "nested_unique"}, "indexing_scheme 'nested_unique'; give a level or nside, and one of"),
        ({"refinement_level": None}, "refinement_level None, nside None"),
    ],
)
def test_descriptions_that_contradict_are_refused(tmp_path, attrs, message):
    described = {key: value for key, value in {**LEVEL_2, **attrs}.items() if value is not None}
    with pytest.raises(GridError, match=message):
        jigsaw.io.open(written(tmp_path, on_healpix(described)), mesh={"cell": 2})


def test_a_dim_that_only_has_its_name(tmp_path):
    path = written(tmp_path, fields_on_cells("ncells"))
    samples = jigsaw.io.open(path, mesh=world_mesh(cell=1), fields=FIELDS)
    np.testing.assert_array_equal(samples[1].input.full_tensor()[0], WHOLE[1])
    for ask in (lambda: samples.grid.lat, lambda: samples.grid.area_weights, lambda: samples.grid.neighbors(4)):
        with pytest.raises(GridError, match="does not say where its 192 cells lie"):
            ask()
    with pytest.raises(GridError, match=r"needs their number: neighbors\(k=8\)"):
        samples.grid.neighbors()
    other = jigsaw.io.open(written(tmp_path, fields_on_cells("k"), "v3"), mesh={"cell": 2}, dims={"cell": "k"})
    assert other.layout.shape == (1, 4, CELLS)


# -- cells that are points ---------------------------------------------------------------------------------------------


def spread_points(count=CELLS):
    """Points all over the globe, along a spiral: latitudes and longitudes in degrees."""
    at = np.arange(count) + 0.5
    return np.degrees(np.arcsin(1 - 2 * at / count)), (at * 180 * (3 - 5**0.5) + 180) % 360 - 180


LAT, LON = spread_points()
NORTH, EAST = ({"standard_name": name} for name in ("latitude", "longitude"))
POINTS = {
    "icon": ("ncells", {"clat": np.radians(LAT), "clon": np.radians(LON)}, {"units": "radian"}),
    "cfgrib": ("values", {"latitude": LAT, "longitude": LON}, {"units": "degrees"}),
    "names alone": ("station", {"lat": LAT, "lon": LON}, None),
    "numbered": ("points", {"lat": LAT, "lon": LON, "points": np.arange(7, 7 + CELLS)}, {}),
}


@pytest.mark.parametrize("said", POINTS)
def test_cells_with_a_latitude_and_a_longitude_each(tmp_path, said):
    dim, coords, units = POINTS[said]
    attrs = {name: {} if units is None else {**(NORTH if "lat" in name else EAST), **units} for name in coords}
    attrs["points"] = {}
    coords = {name: (dim, values, attrs[name]) for name, values in coords.items()}
    if said == "icon":  # corners of cells, and areas in the grid file's words
        coords["clat_vertices"] = ((dim, "nv"), np.zeros((CELLS, 3)))
        coords["clat"][2]["bounds"] = "clat_vertices"
        coords["cell_area"] = (dim, np.arange(1.0, CELLS + 1))
    data = fields_on_cells(dim, coords, **({"cell_measures": "area: cell_area"} if said == "icon" else {}))
    path = written(tmp_path, data, "nc" if said == "icon" else "v2", chunk=80)
    for values, grid in run_on_ranks(2, read_whole, path, *MESHES["2"]):
        np.testing.assert_array_equal(values, WHOLE)
        np.testing.assert_allclose([grid.lat, grid.lon], [LAT, LON], atol=1e-12)
        assert grid.neighbors(5) == jigsaw.Neighbors.of_points(grid.lat, grid.lon, 5)
        assert grid.neighbors(radius=20) == jigsaw.Neighbors.of_points(grid.lat, grid.lon, radius=20)
        if said == "icon":
            np.testing.assert_allclose(grid.area_weights, np.arange(1.0, CELLS + 1) / (CELLS + 1) * 2)
        else:  # a spiral's points are nearly alike
            assert grid.area_weights.mean() == pytest.approx(1) and np.ptp(grid.area_weights) < 0.25


def test_areas_of_rows_are_their_shares_of_the_sphere(tmp_path):
    lat, lon = np.repeat(np.linspace(82.5, -82.5, 12), 16), np.tile(np.arange(16) * 22.5, 12)
    data = fields_on_cells("station", {"lat": ("station", lat), "lon": ("station", lon)})
    grid = jigsaw.io.open(written(tmp_path, data), mesh={"cell": 2}).grid
    edges = np.sin(np.radians(np.linspace(90, -90, 13)))
    want = (edges[:-1] - edges[1:]) * 6
    # straight borders of Voronoi regions against circles of latitude
    np.testing.assert_allclose(grid.area_weights.reshape(12, 16), np.repeat(want[:, None], 16, 1), rtol=0.05)


@pytest.mark.parametrize(
    ("lat", "message"),
    [
        (np.where(np.arange(CELLS) == 5, np.nan, LAT), "'lat' has nan for cell 5, and each of 192 cells needs degrees"),
        (LAT + 90, "'lat' has .* for cell 0, and each of 192 cells needs degrees of at most 90"),
        (45 + LAT / 9, "192 points do not lie all over the globe"),
        (np.zeros(CELLS), "192 points have no areas"),
    ],
)
def test_places_that_have_no_meaning_are_refused(tmp_path, lat, message):
    lon = np.zeros(CELLS) if not lat.any() else 40 + LON / 9
    data = fields_on_cells("station", {"lat": ("station", lat), "lon": ("station", lon)})
    with pytest.raises(GridError, match=message):
        _ = jigsaw.io.open(written(tmp_path, data), mesh={"cell": 2}).grid.area_weights


def test_a_track_and_cells_of_something_else_are_no_cells(tmp_path):
    track = xr.Dataset({"t2m": (("time", "level"), Z[:, :, 0])}, {"time": TIMES})
    track = track.assign_coords(lat=("time", LAT[:STEPS]), lon=("time", LON[:STEPS]))
    track.to_zarr(tmp_path / "track.zarr", zarr_format=2)
    with pytest.raises(FieldError, match="no variable on a lat-lon grid, on cells or in a volume"):
        jigsaw.io.open(tmp_path / "track.zarr", mesh={"cell": 2})
    grid = {"lat": np.linspace(60, 0, 6), "lon": np.arange(8.0)}
    kinds = xr.Dataset({"count": (("cell", "lat", "lon"), np.zeros((4, 6, 8), "f4"))}, grid)
    kinds.to_zarr(tmp_path / "kinds.zarr", zarr_format=2)
    assert jigsaw.io.open(tmp_path / "kinds.zarr", mesh={"lat": 2}, select={"cell": 1}).layout.shape == (1, 1, 6, 8)


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("unit", ["degrees", "radians"])
@pytest.mark.parametrize("ends", [(-0.3, 0.3), (359.7, 360.3), (359.7, 0.3)])
def test_cells_on_the_ends_of_a_region_are_in_it_however_they_are_rounded(dtype, unit, ends):
    degrees = np.arange(-9, 10) / 10  # 0.3 is 0.30000001 in float32, and -0.3 is 359.7
    lat, lon = (each.ravel() for each in np.meshgrid(degrees, degrees, indexing="ij"))
    stored = [np.deg2rad(each) if unit == "radians" else each for each in (lat, lon)]
    coords = {
        name: ("station", each.astype(dtype), {"units": unit if unit == "radians" else f"degrees_{side}"})
        for name, side, each in zip(("lat", "lon"), ("north", "east"), stored, strict=True)
    }
    data = xr.Dataset({"t": (("time", "station"), np.zeros((1, len(lat)), "f4"))}, coords)
    region = {"lat": (-0.3, 0.3), "lon": ends}
    assert jigsaw.io.open(data, mesh={"cell": 1}, fields=["t"], region=region).grid.cells == 49


# -- statistics, writing, conversion -----------------------------------------------------------------------------------


def summed_up(path, axes, split, **options):
    samples = jigsaw.io.open(path, mesh=world_mesh(**axes), fields=FIELDS, split=split, dtype="float64")
    return jigsaw.io.statistics(samples, **options)


def on_points():
    return fields_on_cells("station", {"lat": ("station", LAT), "lon": ("station", LON)})


@pytest.mark.parametrize("kind", ["healpix", "points"])
def test_statistics_of_cells(tmp_path, kind):
    path = written(tmp_path, on_healpix() if kind == "healpix" else on_points())
    area = jigsaw.io.open(path, mesh={"cell": 2}).grid.area_weights
    assert (np.ptp(area) > 0) == (kind == "points")
    mean = (WHOLE.astype("f8") * area).mean((0, 2)) / area.mean()
    std = np.sqrt((np.square(WHOLE - mean[:, None]) * area).mean((0, 2)))
    for axes, split in MESHES.values():
        for rank in run_on_ranks(int(np.prod(list(axes.values()))), summed_up, path, axes, split, weights="area"):
            np.testing.assert_allclose(rank.columns["mean"], mean, rtol=1e-12)
            np.testing.assert_allclose(rank.columns["std"], std, rtol=1e-9)
            np.testing.assert_array_equal(rank.columns["count"], STEPS * CELLS)


def test_statistics_normalize_cells(healpix):
    table = jigsaw.io.statistics(jigsaw.io.open(healpix, mesh=world_mesh(cell=1), fields=FIELDS))
    samples = jigsaw.io.open(healpix, mesh=world_mesh(cell=1), fields=FIELDS, normalize=table)
    values = np.concatenate([samples[i].input.full_tensor() for i in range(len(samples))])
    np.testing.assert_allclose(values.mean((0, 2)), np.zeros(4), atol=1e-4)
    np.testing.assert_allclose(values.std((0, 2)), np.ones(4), rtol=1e-4)


def write_targets(path, target, axes, split):
    samples = jigsaw.io.open(path, mesh=world_mesh(**axes), fields=["t2m", "z"], targets=[1], split=split)
    dims = ("time", "channel", "cell")
    with jigsaw.io.Writer(target, dims=dims, like=samples, append_dim="time", chunks={"cell": 50}) as out:
        for i in range(3):
            out.append(samples[i].target, coords={"time": samples[i].target_times})


@pytest.mark.parametrize("suffix", ["zarr", "nc"])
@pytest.mark.parametrize("kind", ["healpix", "points", "part"])
def test_forecasts_on_cells_are_written_like_their_store(tmp_path, kind, suffix):
    data = {"healpix": on_healpix, "points": on_points, "part": part_of_sphere}[kind]()
    path, target = written(tmp_path, data), str(tmp_path / f"forecast.{suffix}")
    run_on_ranks(3, write_targets, path, target, *MESHES["3"])
    with xr.open_dataset(target, decode_coords="all", engine="zarr" if suffix == "zarr" else None) as xarray_reads:
        np.testing.assert_array_equal(xarray_reads.t2m, T2M[1:4])
        assert xarray_reads.t2m.attrs["units"] == "K"
    ours = jigsaw.io.open(target, mesh=world_mesh(cell=1))
    np.testing.assert_array_equal(ours[1].input.full_tensor()[0], WHOLE[2, :3])
    own = jigsaw.io.open(path, mesh={"cell": 2}).grid
    np.testing.assert_array_equal([ours.grid.lat, ours.grid.lon], [own.lat, own.lon])
    k = 5 if kind == "points" else None
    assert ours.grid.neighbors(k) == own.neighbors(k)


@pytest.mark.parametrize("kind", ["healpix", "points", "part"])
@pytest.mark.parametrize("fields", [None, ["t2m", "z500"]])
def test_cells_are_converted_with_their_places(tmp_path, kind, fields):
    data = {"healpix": on_healpix, "points": on_points, "part": part_of_sphere}[kind]()
    path = written(tmp_path, data.reset_coords(["lat", "lon"]) if kind == "points" else data, "nc", chunk=80)
    made = jigsaw.io.convert(path, tmp_path / "made.zarr", fields=fields, mesh={"cell": 4})
    assert all(jigsaw.io.verify(made.path).values())
    ours = jigsaw.io.open(made.path, mesh=world_mesh(cell=1), fields=["t2m", "z500"])
    np.testing.assert_array_equal(ours[3].input.full_tensor()[0], WHOLE[3, :2])
    own = jigsaw.io.open(path, mesh={"cell": 2}).grid
    np.testing.assert_array_equal([ours.grid.lat, ours.grid.lon], [own.lat, own.lon])
    whole_chunks = {v.table.chunks[-1] for v in ours.variables}
    assert whole_chunks == {CELLS // 4}, "as the mesh reads them cheapest: a piece a chunk"


@pytest.mark.parametrize("kind", ["healpix", "points", "part"])
def test_inspect_says_what_the_cells_are(tmp_path, kind, capsys):
    data = {"healpix": on_healpix, "points": on_points, "part": part_of_sphere}[kind]()
    assert main(["inspect", written(tmp_path, data)]) in (0, None)
    told = {
        "healpix": "HEALPix of nside 4, nested",
        "points": "points, lat -84.",
        "part": "HEALPix of nside 8, nested, 192 of 768 cells",
    }
    assert told[kind] in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["healpix", "points"])
def test_cells_are_drawn(tmp_path, kind, monkeypatch, capsys):
    pictures, drawn = importlib.import_module("jigsaw.io.reports.pictures"), []
    draw = pictures._draw_cells
    monkeypatch.setattr(pictures, "_draw_cells", lambda values, *more: (drawn.append(values), draw(values, *more)))
    path = written(tmp_path, on_healpix() if kind == "healpix" else on_points())
    assert main(["inspect", path, "--fields", "z500", "--step", "3", "--plot", str(tmp_path / "map.png")]) in (0, None)
    np.testing.assert_array_equal(drawn[0], Z[3, 0])
    plan = ["plan", path, "--mesh", "cell=3", "--halo", "4", "--plot", str(tmp_path / "plan.png")]
    assert main(plan) in (0, None)
    assert "drawn to" in capsys.readouterr().out
    assert min((tmp_path / name).stat().st_size for name in ("map.png", "plan.png")) > 10_000


def test_a_map_of_cells_needs_their_places(tmp_path):
    pictures = importlib.import_module("jigsaw.io.reports.pictures")
    with pytest.raises(GridError, match="does not say where its 192 cells lie"):
        pictures.draw_field_map(written(tmp_path, fields_on_cells("ncells")), tmp_path / "map.png")


# -- other ways in -----------------------------------------------------------------------------------------------------


def test_files_along_time_make_one_series_of_cells(tmp_path):
    data, paths = on_points(), []
    for k, part in enumerate((slice(0, 4), slice(4, STEPS))):
        (folder := tmp_path / str(k)).mkdir()
        paths.append(written(folder, data.isel(time=part), "nc"))
    for values, grid in run_on_ranks(2, read_whole, paths, *MESHES["2"]):
        np.testing.assert_array_equal(values, WHOLE)
        np.testing.assert_array_equal([grid.lat, grid.lon], [LAT, LON])


def test_a_dataset_on_cells_of_xarray_keeps_its_grid_mapping(tmp_path):
    path = written(tmp_path, on_healpix().rename(cell="pix"))
    with xr.open_zarr(path, decode_coords="all") as opened:
        samples = jigsaw.io.open(opened, mesh=world_mesh(cell=1), fields=FIELDS)
        np.testing.assert_array_equal(samples[2].input.full_tensor()[0], WHOLE[2])
        assert samples.grid.nside == NSIDE


def test_a_pickled_dataset_has_its_cells(healpix):
    samples = pickle.loads(pickle.dumps(jigsaw.io.open(healpix, mesh=world_mesh(cell=1), fields=FIELDS)))
    assert samples.grid.neighbors() == jigsaw.Neighbors.healpix(NSIDE)
    np.testing.assert_array_equal(samples[2].input.full_tensor()[0], WHOLE[2])


PAGE = (Path(__file__).parents[2] / "docs" / "cells.md").read_text()


def test_the_page_runs_as_it_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    on_healpix().rename(z="geopotential").to_zarr("era5_healpix.zarr", zarr_format=2)
    names = {"__name__": "page", "jigsaw": jigsaw, "torch": torch, "np": np, "xarray": xr}
    for block in re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/cells.md", "exec"), names)
    assert 0 < names["around"].sum() < len(names["around"]) < CELLS and names["loss"].isfinite()
