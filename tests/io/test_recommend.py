"""Recommended meshes, cuts and chunks: their costs are those of plans of real stores that are made so."""

import numpy as np
import pytest
import xarray as xr
from globe_store import globe, write

import jigsaw.io as jio
from jigsaw.errors import ShardingError
from jigsaw.io.reports.recommend import ReadFigures, recommend, shard_shape_of


@pytest.fixture(scope="module")
def bands(tmp_path_factory):
    """Large chunks that are latitude bands: a mesh of longitudes reads all of them on every rank."""
    r = np.random.default_rng(0)
    data = xr.Dataset(
        {"t": (("time", "level", "lat", "lon"), r.normal(size=(3, 4, 96, 96)).astype("f4"))},
        coords={"time": np.arange(3), "level": [1, 2, 3, 4], "lat": np.linspace(80, -80, 96), "lon": np.arange(96.0)},
    )
    path = tmp_path_factory.mktemp("bands") / "bands.zarr"
    data.to_zarr(path, zarr_format=3, consolidated=False, encoding={"t": {"chunks": (1, 4, 24, 96), "compressors": ()}})
    return str(path)


def test_the_best_mesh_cuts_along_the_chunks(bands):
    found = recommend(bands, mesh={"lon": 4}, mode="independent")
    assert found.meshes[0].axes == {"lat": 4}
    assert {tuple(sorted(o.axes.items())) for o in found.meshes} == {
        (("lat", 4),),
        (("lon", 4),),
        (("lat", 2), ("lon", 2)),
    }
    seconds = [o.figures.seconds for o in found.meshes]
    assert found.mesh_gain == pytest.approx(found.now.seconds / seconds[0])
    assert found.mesh_gain >= 1


def test_the_figures_of_a_mesh_are_those_of_its_plan(bands):
    found = recommend(bands, mesh={"lat": 2, "lon": 2}, ranks=6, halo=1)
    assert {np.prod(list(o.axes.values())) for o in found.meshes} == {6}
    for option in found.meshes:
        dataset = jio.open(bands, mesh=option.axes, halo=1, split=option.split)
        assert ReadFigures.of(dataset.plan(len(dataset) // 2)) == option.figures
        assert option.largest_tile == max(np.prod(dataset.layout.local_shape(c)[2:]) for c in dataset.layout.coords())


def test_cuts_move_to_the_edges_of_chunks_where_tiles_stay_alike(tmp_path):
    data = globe(lat=41, lon=40)
    path = write(tmp_path / "edges.zarr", data, chunk=(1, None, 10, 20))
    found = recommend(path, mesh={"lat": 2}, ranks=4, fields=["temperature"])
    split = {o.split["lat"] for o in found.meshes if o.axes == {"lat": 4}}
    assert split == {"balanced", (0, 10, 20, 30, 41)}
    edged = next(o for o in found.meshes if o.axes == {"lat": 4} and o.split["lat"] != "balanced")
    plain = next(o for o in found.meshes if o.axes == {"lat": 4} and o.split["lat"] == "balanced")
    assert edged.figures.decoded_bytes < plain.figures.decoded_bytes
    uneven = recommend(path, mesh={}, ranks=3, fields=["temperature"])
    assert all(rule == "balanced" for o in uneven.meshes for rule in o.split.values() if "lat" in o.axes)


def test_the_data_axis_stays(bands):
    found = recommend(bands, mesh={"data": 2, "lat": 2})
    assert {tuple(o.axes.items()) for o in found.meshes} == {(("data", 2), ("lat", 2)), (("data", 2), ("lon", 2))}


def test_an_axis_that_cuts_no_space_does_not_count(bands):
    found = recommend(bands, mesh={"lat": 2, "channel": 3}, spec={"lat": "lat"})
    assert {tuple(o.axes.items()) for o in found.meshes} == {(("lat", 2),), (("lon", 2),)}


@pytest.mark.slow
def test_chunks_are_as_cheap_in_a_store_that_has_them(tmp_path):
    steps, lat, lon = 2, 128, 256
    r = np.random.default_rng(1)
    space = {"lat": np.linspace(90, -90, lat), "lon": np.arange(lon) * 360.0 / lon}
    data = xr.Dataset(
        {n: (("time", "level", "lat", "lon"), r.normal(size=(steps, 4, lat, lon)).astype("f4")) for n in ("t", "q")},
        coords={"time": np.arange(steps), "level": [1, 2, 3, 4], **space},
    )
    small = {n: {"chunks": (2, 1, 16, 16)} for n in ("t", "q")}
    path = tmp_path / "small.zarr"
    data.to_zarr(path, zarr_format=3, consolidated=False, encoding=small)
    found = recommend(str(path), mesh={"lat": 2})
    best = found.chunks[0]
    assert found.chunk_gain > 3
    assert best.chunks["time"] == 1 and set(best.chunks) == {"time", "level", "lat", "lon"}
    assert all(s % best.chunks[d] == 0 for d, s in best.shards.items())
    assert best.shards["time"] >= steps  # one file an array, for they are small

    from zarr.codecs import BloscCodec

    shape = tuple(best.chunks.values())
    compressors = BloscCodec(cname="zstd", clevel=3, shuffle="shuffle")
    made = tmp_path / "made.zarr"
    data.to_zarr(
        made,
        zarr_format=3,
        consolidated=False,
        encoding={n: {"chunks": shape, "compressors": compressors} for n in ("t", "q")},
    )
    real = ReadFigures.of(jio.open(str(made), mesh={"lat": 2}).plan(1))
    assert real.decoded_bytes == best.decoded_bytes
    assert real.seconds == pytest.approx(best.seconds, rel=0.3)
    assert real.seconds < found.now.seconds / 3


def test_no_more_is_decoded_than_is_asked_for():
    data = xr.Dataset(
        {"t": (("time", "level", "lat", "lon"), np.zeros((2, 16, 256, 256), "f4"))},
        coords={"time": [0, 1], "level": np.arange(16), "lat": np.linspace(80, -80, 256), "lon": np.arange(256.0)},
    )
    one, every = (recommend(data, mesh={}, fields=[field]).chunks for field in ("t@3", "t"))
    assert one[0].decoded_bytes == 256 * 256 * 4
    assert every[0].decoded_bytes == 16 * 256 * 256 * 4
    assert every[0].chunks["level"] == 16


@pytest.mark.parametrize(
    ("ranks", "match"), [(0, r"ranks=0 must be at least 1"), (101, r"no mesh of 101 ranks cuts lat 96, lon 96")]
)
def test_what_cannot_be_cut_is_refused(bands, ranks, match):
    with pytest.raises(ShardingError, match=match):
        recommend(bands, ranks=ranks)


def test_shards_hold_whole_chunks_within_their_size():
    dims = [("time", "time", 400), ("lat", "lat", 361), ("lon", "lon", 720)]
    assert shard_shape_of(dims, 4, (1, 361, 360)) == (128, 361, 720)
    assert shard_shape_of(dims, 4, (1, 100, 100)) == (64, 400, 800)
    assert shard_shape_of(dims[1:], 4, (361, 720), most=1000) == (361, 720)  # a chunk that is larger is its own shard
    assert shard_shape_of([("time", "time", 3), *dims[1:]], 4, (1, 361, 720)) == (3, 361, 720)
