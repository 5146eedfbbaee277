"""Stores of cells whose neighbors a table names: UGRID's meshes and ICON's grids, as their own writers make them."""

import pickle

import numpy as np
import pytest
import torch
import xarray as xr

import jigsaw
from jigsaw.__main__ import main
from jigsaw.errors import GridError
from jigsaw.geometry.curve import curve_order
from jigsaw.io.reading.chunk_readers import ReadCounts
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.reading.peers import meet_peers
from jigsaw.io.series.cell_grid import renumbered_cells
from jigsaw.testing import run_on_ranks, world_mesh

STEPS, CELLS = 9, 192
TIMES = np.datetime64("2020-01-01", "ns") + np.arange(STEPS) * np.timedelta64(6, "h")
SPLIT = [0, 0, 131, CELLS]  # of three ranks
T2M = np.random.default_rng(0).normal(280, 9, (STEPS, CELLS)).astype("f4")


def spread_points(count):
    """Points all over the globe, along a spiral: latitudes and longitudes in degrees."""
    at = np.arange(count) + 0.5
    return np.degrees(np.arcsin(1 - 2 * at / count)), (at * 180 * (3 - 5**0.5) + 180) % 360 - 180


def triangles():
    """A sphere of 192 triangles: corners of each, its neighbors across each side, and the corners' places."""
    lat, lon = spread_points(CELLS // 2 + 2)
    north, east = np.radians(lat), np.radians(lon)
    points = np.stack([np.cos(north) * np.cos(east), np.cos(north) * np.sin(east), np.sin(north)], -1)
    hull = pytest.importorskip("scipy.spatial").ConvexHull(points)
    assert hull.simplices.shape == (CELLS, 3)
    middle = points[hull.simplices].mean(1)
    places = np.degrees([np.arctan2(middle[:, 2], np.hypot(*middle[:, :2].T)), np.arctan2(middle[:, 1], middle[:, 0])])
    return hull.simplices, hull.neighbors, (lat, lon), places


def write_ugrid(path, start=0, fill=None, has_places=True, is_transposed=False, is_named=True):
    """Write a file of UGRID 1.0, as its text shows one; a neighbor of cell 3 is missing where there is a fill value.

    Fields that do not name their mesh lie along its dim of faces, as xugrid writes them.
    """
    corners, beside, nodes, places = triangles()
    beside = np.where(np.arange(3) == 1, -1, beside) if fill is not None else beside
    with pytest.importorskip("netCDF4").Dataset(path, "w") as out:
        for dim, size in {"time": None, "nMesh2_node": len(nodes[0]), "nMesh2_face": CELLS, "Three": 3}.items():
            out.createDimension(dim, size)
        mesh = out.createVariable("Mesh2", "i4")
        mesh.setncatts(
            {
                "cf_role": "mesh_topology",
                "topology_dimension": 2,
                "node_coordinates": "Mesh2_node_x Mesh2_node_y",
                "face_node_connectivity": "Mesh2_face_nodes",
                "face_face_connectivity": "Mesh2_face_links",
                **({"face_coordinates": "Mesh2_face_x Mesh2_face_y"} if has_places else {}),
                **({} if is_named else {"face_dimension": "nMesh2_face"}),
            }
        )
        dims = ("Three", "nMesh2_face") if is_transposed else ("nMesh2_face", "Three")
        links = out.createVariable("Mesh2_face_links", "i4", dims, fill_value=fill)
        links.setncatts({"cf_role": "face_face_connectivity", **({"start_index": start} if start else {})})
        values = np.where(beside < 0, -1 if fill is None else fill, beside + start)
        links[:] = values.T if is_transposed else values
        out.createVariable("Mesh2_face_nodes", "i4", ("nMesh2_face", "Three"))[:] = corners
        pairs = {"node": nodes, **({"face": places} if has_places else {})}
        for kind, (lat, lon) in pairs.items():
            for axis, values, name, units in (
                ("x", lon, "longitude", "degrees_east"),
                ("y", lat, "latitude", "degrees_north"),
            ):
                place = out.createVariable(f"Mesh2_{kind}_{axis}", "f8", (f"nMesh2_{kind}",))
                place.setncatts({"standard_name": name, "units": units})
                place[:] = values
        hours = out.createVariable("time", "f8", ("time",))
        hours.units, hours[:] = "hours since 2020-01-01", np.arange(STEPS) * 6
        t2m = out.createVariable("t2m", "f4", ("time", "nMesh2_face"), zlib=True, chunksizes=(1, 80))
        t2m.setncatts({"units": "K", **({"mesh": "Mesh2", "location": "face"} if is_named else {})})
        t2m[:] = T2M
    return beside, places


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"start": 1, "fill": -999},
        {"fill": 2**31 - 1, "is_transposed": True},
        {"has_places": False, "start": 1},
        {"has_places": False, "is_named": False},
    ],
    ids=str,
)
def test_meshes_of_ugrid(tmp_path, options):
    path = str(tmp_path / "mesh.nc")
    beside, places = write_ugrid(path, **options)
    samples = jigsaw.io.open(path, mesh=world_mesh(cell=1))
    assert samples.fields == ("t2m",)  # no table, no coordinate
    np.testing.assert_array_equal(samples[2].input.full_tensor()[0, 0], T2M[2])
    assert samples.grid.neighbors() == pickle.loads(pickle.dumps(samples)).grid.neighbors() == jigsaw.Neighbors(beside)
    if options.get("has_places", True):
        np.testing.assert_array_equal([samples.grid.lat, samples.grid.lon], places)
        assert samples.grid.neighbors(2) == jigsaw.Neighbors.of_points(*places, 2)
    else:
        with pytest.raises(GridError, match="does not say where its 192 cells lie"):
            _ = samples.grid.lat


def write_icon(path, start=1):
    """Write a file as ICON does, with the table of its grid file."""
    _, beside, _, (lat, lon) = triangles()
    with pytest.importorskip("netCDF4").Dataset(path, "w") as out:
        for dim, size in {"time": None, "ncells": CELLS, "vertices": 3, "nv": 3}.items():
            out.createDimension(dim, size)
        for name, values, long in (("clat", lat, "center latitude"), ("clon", lon, "center longitude")):
            place = out.createVariable(name, "f8", ("ncells",))
            place.setncatts({"standard_name": long.split()[1], "long_name": long, "units": "radian"})
            place.bounds = f"{name}_vertices"
            place[:] = np.radians(values)
            out.createVariable(f"{name}_vertices", "f8", ("ncells", "vertices"))[:] = 0
        table = out.createVariable("neighbor_cell_index", "i4", ("nv", "ncells"))
        table.setncatts({"long_name": "cell neighbor index", "units": "-"})
        table[:] = beside.T + start
        hours = out.createVariable("time", "f8", ("time",))
        hours.units, hours[:] = "hours since 2020-01-01", np.arange(STEPS) * 6
        t2m = out.createVariable("t2m", "f4", ("time", "ncells"))
        t2m.setncatts({"CDI_grid_type": "unstructured", "coordinates": "clat clon", "units": "K"})
        t2m[:] = T2M
    return beside, (lat, lon)


def test_a_file_of_icon(tmp_path):
    path = str(tmp_path / "icon.nc")
    beside, places = write_icon(path)
    for values, grid in run_on_ranks(3, read_t2m, path, {"cell": 3}, SPLIT):
        np.testing.assert_array_equal(values, T2M)
        np.testing.assert_allclose([grid.lat, grid.lon], places, atol=1e-12)
        assert grid.neighbors() == jigsaw.Neighbors(beside)
    write_icon(path, start=2)
    with pytest.raises(GridError, match=r"counts cells from 1: .* names cell 192, .*; give it the right start_index"):
        jigsaw.io.open(path, mesh={"cell": 2}).grid.neighbors()


def read_t2m(path, axes, split):
    samples = jigsaw.io.open(path, mesh=world_mesh(**axes), split=split)
    assert samples.fields == ("t2m",)
    values = np.concatenate([samples[i].input.full_tensor().numpy() for i in range(len(samples))])
    return values[:, 0], samples.grid


# -- writing, conversion -----------------------------------------------------------------------------------------------


MAKERS = {"ugrid": lambda path: write_ugrid(path, start=1, fill=-999), "icon": write_icon}


def write_targets(path, target, order="store", region=None):
    split = "balanced" if region else SPLIT
    samples = jigsaw.io.open(path, mesh=world_mesh(cell=3), targets=[1], split=split, order=order, region=region)
    with jigsaw.io.Writer(target, dims=("time", "channel", "cell"), like=samples, append_dim="time") as out:
        for i in range(3):
            out.append(samples[i].target, coords={"time": samples[i].target_times})


@pytest.mark.parametrize("suffix", ["zarr", "nc"])
@pytest.mark.parametrize("kind", MAKERS)
def test_forecasts_on_meshes_are_written_like_their_store(tmp_path, kind, suffix):
    path, target = str(tmp_path / "mesh.nc"), str(tmp_path / f"forecast.{suffix}")
    beside, places = MAKERS[kind](path)
    run_on_ranks(3, write_targets, path, target)
    ours = jigsaw.io.open(target, mesh=world_mesh(cell=1))
    np.testing.assert_array_equal(ours[1].input.full_tensor()[0, 0], T2M[2])
    np.testing.assert_allclose([ours.grid.lat, ours.grid.lon], places, atol=1e-12)
    assert ours.grid.neighbors() == jigsaw.Neighbors(beside)


@pytest.mark.parametrize("fields", [None, ["t2m"]])
@pytest.mark.parametrize("kind", MAKERS)
def test_meshes_are_converted_with_their_tables(tmp_path, kind, fields):
    path = str(tmp_path / "mesh.nc")
    beside, places = MAKERS[kind](path)
    made = jigsaw.io.convert(path, tmp_path / "made.zarr", fields=fields, mesh={"cell": 4})
    assert all(jigsaw.io.verify(made.path).values())
    ours = jigsaw.io.open(made.path, mesh=world_mesh(cell=1))
    np.testing.assert_array_equal(ours[3].input.full_tensor()[0, 0], T2M[3])
    np.testing.assert_allclose([ours.grid.lat, ours.grid.lon], places, atol=1e-12)
    assert ours.grid.neighbors() == jigsaw.Neighbors(beside)


# -- cells along a curve -----------------------------------------------------------------------------------------------


def write_points(path):
    """Write cells by circles of latitude, without a table."""
    lat, lon = np.repeat(np.linspace(82.5, -82.5, 12), 16), np.tile(np.arange(16) * 22.5, 12)
    data = xr.Dataset({"t2m": (("time", "station"), T2M)}, {"lat": ("station", lat), "lon": ("station", lon)})
    data.assign_coords(time=TIMES).to_netcdf(path)
    return None, (lat, lon)


def write_rings(path):
    """Write HEALPix cells along rings."""
    grid = xr.Dataset({"t2m": (("time", "cell"), T2M, {"grid_mapping": "crs"})})
    described = {"grid_mapping_name": "healpix", "refinement_level": 2, "indexing_scheme": "ring"}
    grid.assign_coords(crs=((), 0, described), time=TIMES).to_netcdf(path)
    places = pytest.importorskip("cdshealpix.ring").healpix_to_lonlat(np.arange(CELLS), 4)[::-1]
    return jigsaw.Neighbors.healpix(4, nested=False).rows_of(np.arange(CELLS)), [x.to_value("deg") for x in places]


IN_OTHER_ORDER = {**MAKERS, "points": write_points, "rings": write_rings}


@pytest.mark.parametrize("suffix", ["zarr", "nc"])
@pytest.mark.parametrize("fields", [None, ["t2m"]])
@pytest.mark.parametrize("kind", IN_OTHER_ORDER)
def test_cells_are_put_along_a_curve_and_back(tmp_path, kind, fields, suffix):
    path, target = str(tmp_path / "mesh.nc"), str(tmp_path / f"forecast.{suffix}")
    beside, places = IN_OTHER_ORDER[kind](path)
    made = jigsaw.io.convert(path, tmp_path / "made.zarr", fields=fields, order="curve", chunks={"cell": 50})
    assert all(jigsaw.io.verify(made.path).values())
    ours = jigsaw.io.open(made.path, mesh=world_mesh(cell=1))
    assert ours.fields == ("t2m",)
    was = ours.grid.source_places
    assert sorted(was) == list(range(CELLS)) and (np.diff(was) != 1).any()
    np.testing.assert_array_equal(ours[3].input.full_tensor()[0, 0], T2M[3][was])
    np.testing.assert_allclose([ours.grid.lat, ours.grid.lon], np.array(places)[:, was], atol=1e-12)
    if beside is not None:
        table = ours.grid.neighbors().rows_of(np.arange(CELLS))
        np.testing.assert_array_equal(np.where(table < 0, -1, was[table]), beside[was])
    run_on_ranks(3, write_targets, made.path, target)
    back = jigsaw.io.open(target, mesh=world_mesh(cell=1))
    assert back.grid.source_places is None
    np.testing.assert_array_equal(back[1].input.full_tensor()[0, 0], T2M[2])
    np.testing.assert_allclose([back.grid.lat, back.grid.lon], places, atol=1e-12)
    if beside is not None:
        np.testing.assert_array_equal(back.grid.neighbors().rows_of(np.arange(CELLS)), beside)


Z = np.random.default_rng(1).normal(size=(STEPS, 2, CELLS)).astype("f4")
LAND = np.random.default_rng(2).uniform(size=CELLS).astype("f4")
EVERY = np.concatenate([T2M[:, None], Z, np.broadcast_to(LAND, (STEPS, 1, CELLS))], 1)
CURVE_MESHES = {1: (0, CELLS), 2: (0, 50, CELLS), 3: (0, 0, 131, CELLS), 4: (0, 64, 64, 65, CELLS)}


def write_several(path, chunk):
    """Write points by circles: a field, one on levels, whose cells are not the last dim, and one without time."""
    write_points(path + ".nc")
    data = xr.open_dataset(path + ".nc").drop_encoding()
    data["z"] = ("time", "station", "level"), Z.transpose(0, 2, 1)
    data["land"] = "station", LAND
    codes = {"t2m": {"chunks": (1, chunk)}, "z": {"chunks": (1, chunk, 2)}, "land": {"chunks": (CELLS,)}}
    data.assign_coords(level=[500, 850]).to_zarr(path, zarr_format=3, consolidated=False, encoding=codes)


def read_along_curve(path, ranks, mode, options, per_machine=None):
    """Read all samples; return them whole with the grid, what was predicted and what was counted."""
    mesh = world_mesh(cell=ranks)
    data = jigsaw.io.open(path, mesh=mesh, order="curve", split=CURVE_MESHES[ranks], mode=mode, **options)
    if per_machine is not None:
        peers = meet_peers(mesh, host=f"machine {mesh.get_rank() // per_machine}")
        vars(data)["_engine"] = ReadEngine(data.store, peers)
    planned = ReadCounts()
    for sample in range(len(data)):
        planned += data.plan(sample).rows[mesh.get_rank()]
    values = np.concatenate([data[i].input.full_tensor().numpy() for i in range(len(data))])
    return values, data.grid, planned, data._engine.stats


@pytest.mark.parametrize(("mode", "per_machine"), [("cooperative", None), ("auto", None), ("cooperative", 2)])
@pytest.mark.parametrize("ranks", CURVE_MESHES)
@pytest.mark.parametrize("chunk", [50, CELLS])
def test_cells_are_read_along_a_curve(tmp_path, ranks, chunk, mode, per_machine):
    path = str(tmp_path / "points.zarr")
    write_several(path, chunk)
    options = {"fields": ["t2m", "z", "land"], "normalize": {"t2m": (280, 9), "z": (1, 2), "land": (0, 1)}}
    by_rank = run_on_ranks(ranks, read_along_curve, path, ranks, mode, options, per_machine)
    lat, lon = np.repeat(np.linspace(82.5, -82.5, 12), 16), np.tile(np.arange(16) * 22.5, 12)
    rows = curve_order(lat, lon)
    want = (EVERY[..., rows] - [[280], [1], [1], [0]]) / [[9], [2], [2], [1]]
    for values, grid, planned, counts in by_rank:
        np.testing.assert_allclose(values, want, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal([grid.lat, grid.lon], [lat[rows], lon[rows]])
        np.testing.assert_array_equal(grid.source_places, rows)
        assert planned == counts
    if mode == "cooperative":  # each chunk once
        assert sum(counts.chunks for *_, counts in by_rank) == STEPS * (2 * -(-CELLS // chunk) + 1)


@pytest.mark.parametrize("suffix", ["zarr", "nc"])
@pytest.mark.parametrize("kind", IN_OTHER_ORDER)
def test_forecasts_along_a_curve_are_written_in_the_order_of_the_store(tmp_path, kind, suffix):
    path, target = str(tmp_path / "mesh.nc"), str(tmp_path / f"forecast.{suffix}")
    beside, places = IN_OTHER_ORDER[kind](path)
    ours = jigsaw.io.open(path, mesh={"cell": 3}, order="curve")
    was = ours.grid.source_places
    np.testing.assert_allclose([ours.grid.lat, ours.grid.lon], np.array(places)[:, was], atol=1e-12)
    stored = jigsaw.io.open(path, mesh={"cell": 3}).grid
    np.testing.assert_allclose(ours.grid.area_weights, stored.area_weights[was])
    if beside is not None:
        table = ours.grid.neighbors().rows_of(np.arange(CELLS))
        np.testing.assert_array_equal(np.where(table < 0, -1, was[table]), beside[was])
    run_on_ranks(3, write_targets, path, target, "curve")
    back = jigsaw.io.open(target, mesh=world_mesh(cell=1))
    assert back.grid.source_places is None
    np.testing.assert_array_equal(back[1].input.full_tensor()[0, 0], T2M[2])
    np.testing.assert_allclose([back.grid.lat, back.grid.lon], places, atol=1e-12)
    if beside is not None:
        np.testing.assert_array_equal(back.grid.neighbors().rows_of(np.arange(CELLS)), beside)


def test_a_converted_store_that_is_opened_along_a_curve_still_knows_the_source(tmp_path):
    write_icon(str(tmp_path / "mesh.nc"))
    shuffled = np.random.default_rng(0).permutation(CELLS)
    made = jigsaw.io.convert(tmp_path / "mesh.nc", tmp_path / "made.zarr", order="curve")
    data = xr.open_zarr(made.path, consolidated=False).load().drop_encoding()
    dim = data["t2m"].dims[-1]
    # the order of a third program, which keeps where the cells were
    moved = data.isel({dim: shuffled})
    table = moved["neighbor_cell_index"]
    moved["neighbor_cell_index"] = table.copy(data=renumbered_cells(table.values, 1, np.argsort(shuffled)))
    moved.to_zarr(tmp_path / "moved.zarr", consolidated=False)
    run_on_ranks(3, write_targets, str(tmp_path / "moved.zarr"), str(tmp_path / "forecast.zarr"), "curve")
    back, want = (jigsaw.io.open(tmp_path / name, mesh={"cell": 1}).grid for name in ("forecast.zarr", "mesh.nc"))
    np.testing.assert_array_equal(back.lat, want.lat)
    assert back.neighbors() == want.neighbors()
    mesh = world_mesh(cell=1)
    np.testing.assert_array_equal(
        jigsaw.io.open(tmp_path / "forecast.zarr", mesh=mesh)[0].input.full_tensor()[0, 0], T2M[1]
    )


def read_beside(path, order):
    """Read samples with a halo and forcings, and the statistics of all."""
    mesh = world_mesh(cell=3)
    options = {"mesh": mesh, "order": order, "split": SPLIT}
    data = jigsaw.io.open(path, halo=4, forcings=["cos_zenith", "latlon"], **options)
    data = pickle.loads(pickle.dumps(data))
    tile = data[2].input
    whole, held = tile.full_tensor(), tile.layout.held(tile.coordinate)[-1]
    torch.testing.assert_close(tile.local, whole[..., slice(*held)])
    stats = jigsaw.io.statistics(jigsaw.io.open(path, **options), weights="area")
    return whole.numpy(), stats.columns["mean"], stats.columns["std"]


def test_forcings_halos_and_statistics_follow_the_order(tmp_path):
    path = str(tmp_path / "points.nc")
    _, places = write_points(path)
    rows = curve_order(*places)
    plain, along = (run_on_ranks(3, read_beside, path, order)[0] for order in ("store", "curve"))
    np.testing.assert_allclose(along[0], plain[0][..., rows], rtol=1e-6)
    np.testing.assert_allclose(along[1:], plain[1:], rtol=1e-6)


def test_all_cells_of_a_step_are_put_along_a_curve_at_once(tmp_path):
    write_points(str(tmp_path / "points.nc"))
    moved = []
    made = jigsaw.io.convert(
        str(tmp_path / "points.nc"),
        tmp_path / "made.zarr",
        order="curve",
        chunks={"cell": 50, "time": 1},
        shards={},
        progress=lambda done, whole: moved.append(done),
    )
    assert made.written == 4 * STEPS  # each of rows from all over the source
    assert len(moved) == STEPS


def test_a_second_curve_still_knows_the_source(tmp_path):
    _, (lat, _) = write_points(str(tmp_path / "points.nc"))
    data = xr.open_dataset(tmp_path / "points.nc").isel(station=slice(None, None, -1))
    first = jigsaw.io.convert(data, tmp_path / "first.zarr", order="curve")
    second = jigsaw.io.convert(first.path, tmp_path / "second.zarr", order="curve")
    grid = jigsaw.io.open(second.path, mesh={"cell": 2}).grid
    np.testing.assert_array_equal(grid.lat, lat[::-1][grid.source_places])


@pytest.mark.parametrize(
    ("kind", "order", "message"),
    [
        ("nested", "curve", r"'t2m' lies on CellGrid.192 cells, HEALPix nside 4, nested., which are along a curve"),
        ("globe", "curve", r"order='curve' is for cells, and array 't2m' lies on .'lat', 'lon'."),
        ("places", "curve", "does not say where its 192 cells lie"),
        ("globe", "hilbert", "order='hilbert'"),
    ],
)
def test_cells_without_an_order_of_points_are_refused(tmp_path, kind, order, message):
    described = {"grid_mapping_name": "healpix", "refinement_level": 2, "indexing_scheme": "nested"}
    on_cells = xr.Dataset({"t2m": (("time", "cell"), T2M, {"grid_mapping": "crs"} if kind == "nested" else {})})
    on_cells = on_cells.assign_coords(crs=((), 0, described)) if kind == "nested" else on_cells
    globe = {"lat": np.linspace(82.5, -82.5, 12), "lon": np.arange(16) * 22.5}
    on_globe = xr.Dataset({"t2m": (("time", "lat", "lon"), T2M.reshape(-1, 12, 16))}, globe)
    with pytest.raises(GridError, match=message):
        jigsaw.io.convert(on_globe if kind == "globe" else on_cells, tmp_path / "made.zarr", order=order)
    assert not (tmp_path / "made.zarr").exists()
    with pytest.raises(GridError, match=message):
        jigsaw.io.open(on_globe if kind == "globe" else on_cells, mesh={"cell": 2}, order=order)


def test_the_command_orders_cells(tmp_path):
    write_points(str(tmp_path / "points.nc"))
    asked = ["convert", str(tmp_path / "points.nc"), str(tmp_path / "made.zarr"), "--order", "curve"]
    assert main(asked) in (0, None)
    assert jigsaw.io.open(tmp_path / "made.zarr", mesh={"cell": 2}).grid.source_places is not None


def test_the_plan_of_cells_along_a_curve(tmp_path, capsys):
    path = str(tmp_path / "points.zarr")
    write_several(path, 50)
    assert main(["plan", path, "--mesh", "cell=3", "--order", "curve", "--recommend"]) == 0
    assert "cells along a curve" in capsys.readouterr().out


# -- some of the cells -------------------------------------------------------------------------------------------------


def steps_from_inside(beside, inside):
    """How many steps along the table lead to each cell from those inside, by brute force."""
    steps = np.where(inside, 0, CELLS)
    for _ in range(CELLS):
        for start, row in enumerate(beside):
            for cell in row[row >= 0]:
                steps[cell] = min(steps[cell], steps[start] + 1)
    return steps


def kilometers_from_inside(lat, lon, inside):
    """The distance on the sphere of each cell to the nearest inside, by brute force."""
    phi, theta = np.radians(lat), np.radians(lon)
    cosines = np.sin(phi[:, None]) * np.sin(phi) + np.cos(phi[:, None]) * np.cos(phi) * np.cos(theta[:, None] - theta)
    return 6371 * np.arccos(np.clip(cosines, -1, 1))[:, inside].min(1)


def limited_forecast(path, axes, region, order):
    """Two steps of a limited-area model: cells of the boundary keep the truth, and the loss is that of those inside."""
    mesh, options = world_mesh(**axes), {"fields": ["t2m"], "targets": [1], "dtype": "float64"}
    data = jigsaw.io.open(path, mesh=mesh, region=region, order=order, normalize={"t2m": (280, 9)}, **options)
    table, around = data.grid.neighbors(radius=24), torch.from_numpy(data.grid.boundary_mask)
    truth, forecast = data[2].target[:, 0], data[2].input[:, 0]
    start = forecast
    start.local.requires_grad_()
    for _ in range(2):
        near = jigsaw.nn.scatter_to_cells(jigsaw.nn.gather_neighbors(forecast, table), table, "mean")
        forecast = torch.where(around, truth, (1.5 * forecast - near).tanh())
    loss = ((forecast - truth).square() * ~around).sum() / (~around).sum()
    loss.backward()
    places = np.argsort(data.grid.source_places)
    grad = jigsaw.Tile(start.local.grad, start.layout, mesh)
    return loss.item(), *(x.full_tensor().detach()[:, places] for x in (forecast, grad))


def limited_forecast_of_one_process(lats, lons, distance):
    """The same in plain torch, of the cells of `write_points`."""
    lat, lon = np.repeat(np.linspace(82.5, -82.5, 12), 16), np.tile(np.arange(16) * 22.5, 12)
    inside = (lat >= lats[0]) & (lat <= lats[1]) & ((lon - lons[0]) % 360 <= lons[1] - lons[0])
    rows = np.flatnonzero(kilometers_from_inside(lat, lon, inside) <= distance)
    assert inside.sum() < len(rows) < CELLS
    near = [kilometers_from_inside(lat[rows], lon[rows], rows == row) <= np.radians(24) * 6371 for row in rows]
    near = torch.from_numpy(np.array(near) / np.sum(near, 1, keepdims=True))
    start, truth = (torch.from_numpy((T2M[step, rows].astype("f8") - 280) / 9) for step in (2, 3))
    around, forecast = torch.from_numpy(~inside[rows]), start.requires_grad_()
    for _ in range(2):
        forecast = torch.where(around, truth, (1.5 * forecast - near @ forecast).tanh())
    loss = (forecast - truth)[~around].square().mean()
    loss.backward()
    return loss.item(), forecast.detach(), start.grad


def read_region(path, ranks, region, order, fields=None):
    """Read a sample of some cells, with their grid and the number of chunks that this rank decoded."""
    data = jigsaw.io.open(
        path, mesh=world_mesh(cell=ranks), region=region, order=order, fields=fields, mode="cooperative"
    )
    values = data[3].input.full_tensor().numpy()[0, 0]
    return values, data.grid, data._engine.stats.chunks


@pytest.mark.parametrize("order", ["store", "curve"])
@pytest.mark.parametrize("kind", IN_OTHER_ORDER)
def test_some_of_the_cells_are_read(tmp_path, kind, order):
    path = str(tmp_path / "mesh.nc")
    beside, (lat, lon) = IN_OTHER_ORDER[kind](path)
    lat, lon = np.asarray(lat), np.asarray(lon)
    boxes = {
        "belt": ({"lat": (40, -10)}, (lat >= -10) & (lat <= 40)),
        "over the meridian": ({"lat": (-60, 60), "lon": (-50, 70)}, (abs(lat) <= 60) & ((lon + 50) % 360 <= 120)),
        "numbers": ({"cell": slice(20, 61)}, (np.arange(CELLS) >= 20) & (np.arange(CELLS) < 61)),
        "one": ({"cell": slice(7, 8)}, np.arange(CELLS) == 7),
    }
    for region, inside in boxes.values():
        rows = np.flatnonzero(inside)
        for ranks in (1, 3):
            for values, grid, _ in run_on_ranks(ranks, read_region, path, ranks, region, order):
                was = rows if grid.source_places is None else grid.source_places
                assert sorted(was) == rows.tolist()
                assert order == "store" or len(rows) < 9 or (was != rows).any()
                np.testing.assert_array_equal(values, T2M[3][was])
                np.testing.assert_allclose([grid.lat, grid.lon], np.array([lat, lon])[:, was], atol=1e-12)
                if beside is not None:  # a cell beyond the region is none
                    table = grid.neighbors().rows_of(np.arange(len(was)))
                    want = np.where(np.isin(beside[was], was) & (beside[was] >= 0), beside[was], -1)
                    np.testing.assert_array_equal(np.where(table < 0, -1, was[table]), want)


def test_only_the_chunks_of_these_cells_are_read(tmp_path):
    path = str(tmp_path / "points.zarr")
    write_several(path, 50)
    by_rank = run_on_ranks(2, read_region, path, 2, {"cell": slice(40, 110)}, "store", ["t2m"])
    assert sum(chunks for *_, chunks in by_rank) == 3  # which hold the cells 0 to 149


@pytest.mark.parametrize(
    ("region", "message"),
    [
        ({"cell": (0, 4)}, r"of cells must be two latitudes, two longitudes, or a slice of cells"),
        ({"lev": slice(0, 4)}, r"of cells must be two latitudes, two longitudes, or a slice of cells"),
        ({"lat": 4.0}, r"must be two coordinates"),
        ({"lat": (89.0, 90.0)}, r"holds none of the \d+ cells"),
    ],
)
def test_regions_without_cells_are_refused(tmp_path, region, message):
    write_points(str(tmp_path / "points.nc"))
    with pytest.raises(GridError, match=message):
        jigsaw.io.open(tmp_path / "points.nc", mesh={"cell": 2}, region=region)


@pytest.mark.parametrize("order", ["store", "curve"])
@pytest.mark.parametrize("kind", IN_OTHER_ORDER)
def test_cells_around_a_region_are_read_with_it(tmp_path, kind, order):
    path = str(tmp_path / "mesh.nc")
    beside, (lat, lon) = IN_OTHER_ORDER[kind](path)
    lat, lon = np.asarray(lat), np.asarray(lon)
    inside = (abs(lat) <= 40) & ((lon + 50) % 360 <= 120)
    steps = None if beside is None else steps_from_inside(beside, inside)
    far = kilometers_from_inside(lat, lon, inside)
    boundaries = {"1500 km": far <= 1500, "2400.5km": far <= 2400.5, "30000 km": far <= 30000, "1 km": inside}
    if steps is not None:
        boundaries |= {1: steps <= 1, 3: steps <= 3, 99: steps < CELLS}
    for boundary, wanted in boundaries.items():
        region = {"lat": (-40, 40), "lon": (-50, 70), "boundary": boundary}
        samples = jigsaw.io.open(path, mesh=world_mesh(cell=1), region=region, order=order)
        was = samples.grid.source_places
        assert sorted(was) == np.flatnonzero(wanted).tolist()
        np.testing.assert_array_equal(samples.grid.boundary_mask, ~inside[was])
        np.testing.assert_array_equal(samples[3].input.full_tensor()[0, 0], T2M[3][was])


@pytest.mark.parametrize("order", ["store", "curve"])
def test_a_limited_area_is_forecast_as_on_one_process(tmp_path, order):
    path = str(tmp_path / "points.nc")
    write_points(path)
    region = {"lat": (-40, 40), "lon": (-50, 70), "boundary": "2000 km"}
    loss, *wanted = limited_forecast_of_one_process((-40, 40), (-50, 70), 2000)
    for axes in ({"cell": 1}, {"cell": 2}, {"cell": 3}, {"cell": 4}, {"channel": 2, "cell": 2}):
        ranks = int(np.prod(list(axes.values())))
        for part, *values in run_on_ranks(ranks, limited_forecast, path, axes, region, order):
            assert part == pytest.approx(loss, rel=1e-12)
            for value, one in zip(values, wanted, strict=True):
                torch.testing.assert_close(value[0], one, rtol=1e-10, atol=1e-13)


def test_only_the_chunks_of_a_region_and_its_boundary_are_read(tmp_path):
    path = str(tmp_path / "points.zarr")
    write_several(path, 16)  # a circle of latitude a chunk
    for boundary, chunks in (("1600 km", 4), ("1700 km", 6)):  # circles are 15 degrees, 1668 km, apart
        region = {"lat": (-25, 25), "boundary": boundary}
        by_rank = run_on_ranks(2, read_region, path, 2, region, "store", ["t2m"])
        assert sum(decoded for *_, decoded in by_rank) == chunks


@pytest.mark.parametrize("boundary", [0, -1, 1.5, True, "300", "300 m", "-3 km", [2]])
def test_boundaries_that_are_none_are_refused(tmp_path, boundary):
    write_icon(str(tmp_path / "icon.nc"))
    with pytest.raises(GridError, match=r"must be a number of rings of neighbors, such as 2, or a distance"):
        jigsaw.io.open(tmp_path / "icon.nc", mesh={"cell": 2}, region={"lat": (0, 40), "boundary": boundary})


def test_a_boundary_of_no_area_is_refused(tmp_path):
    write_icon(str(tmp_path / "icon.nc"))
    with pytest.raises(GridError, match="adds cells around an area, and beside 'boundary' it names none"):
        jigsaw.io.open(tmp_path / "icon.nc", mesh={"cell": 2}, region={"boundary": 1})


def test_rings_around_points_are_refused(tmp_path):
    write_points(str(tmp_path / "points.nc"))
    with pytest.raises(GridError, match="needs neighbors of cells, and the store has their places alone"):
        jigsaw.io.open(tmp_path / "points.nc", mesh={"cell": 2}, region={"lat": (0, 40), "boundary": 2})


@pytest.mark.parametrize("kind", IN_OTHER_ORDER)
def test_forecasts_of_some_cells_are_written_with_their_places(tmp_path, kind):
    path, target = str(tmp_path / "mesh.nc"), str(tmp_path / "forecast.zarr")
    _, (lat, lon) = IN_OTHER_ORDER[kind](path)
    run_on_ranks(3, write_targets, path, target, "curve", {"lat": (-40, 40)})
    rows = np.flatnonzero(abs(np.asarray(lat)) <= 40)
    back = jigsaw.io.open(target, mesh=world_mesh(cell=1))
    np.testing.assert_array_equal(back[1].input.full_tensor()[0, 0], T2M[2][rows])
    np.testing.assert_allclose([back.grid.lat, back.grid.lon], np.array([lat, lon])[:, rows], atol=1e-12)
