"""HDF5 and NetCDF-4 files of their own libraries, read without them: the same bits, and no more bytes than planned."""

import ctypes
import gc
import os
import subprocess
import sys
from dataclasses import replace

import h5py
import hdf5plugin
import netCDF4
import numpy as np
import pytest
import xarray as xr
from toy_store import held, request, sample
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore

import jigsaw
from jigsaw.io.formats.hdf5 import claims, open_hdf5_file
from jigsaw.io.formats.hdf5_index import SEEKABLE_BLOCK_BYTES, SeekableObject
from jigsaw.io.formats.zarr_places import ZarrKeyFiles
from jigsaw.io.reading.engine import ReadEngine
from jigsaw.io.reading.read_plan import plan_read
from jigsaw.testing import run_on_ranks, world_mesh

SHUFFLED = {"compression": "gzip", "shuffle": True}
FAST = {
    "plain": {},
    "deflate": {"compression": "gzip"},
    "shuffle": {"shuffle": True},
    "shuffle-deflate": SHUFFLED,
    "fletcher32": {"fletcher32": True},
    "shuffle-deflate-fletcher32": {**SHUFFLED, "fletcher32": True},
    "blosc-bits-zstd": hdf5plugin.Blosc("zstd", 5, hdf5plugin.Blosc.BITSHUFFLE),
    "blosc-lz4": hdf5plugin.Blosc("lz4", 1, hdf5plugin.Blosc.SHUFFLE),
    "zstd": hdf5plugin.Zstd(),
    "shuffle-zstd": {**hdf5plugin.Zstd(), "shuffle": True},
}
SLOW = {
    "lzf": {"compression": "lzf"},
    "blosc2": hdf5plugin.Blosc2(),
    "lz4": hdf5plugin.LZ4(),
    "bitshuffle": hdf5plugin.Bitshuffle(cname="none"),
    "bitshuffle-lz4": hdf5plugin.Bitshuffle(cname="lz4"),
    "bitshuffle-zstd-fletcher32": {**hdf5plugin.Bitshuffle(cname="zstd"), "fletcher32": True},
    "scaleoffset": {"scaleoffset": 3},
    "two-compressors": {"compression": "lzf", "fletcher32": True},
}
TYPES = ["f4", ">f4", "f8", "i2", ">i2", "u1", "i8", "f2", "?"]


def values(dtype, shape=(5, 7, 13, 20), seed=0):
    """Smooth enough to compress, with NaN and infinities where there are such."""
    x = np.random.default_rng(seed).normal(size=shape).cumsum(-1) * 10
    x = x.astype(dtype)
    if x.dtype.kind == "f":
        x.flat[3], x.flat[5] = np.nan, -np.inf
    return x


def bits(x):
    return np.ascontiguousarray(x).tobytes()


@pytest.mark.parametrize("form", [*FAST, *SLOW])
def test_every_filter_and_type_gives_the_bits_of_h5py(tmp_path, form):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as f:
        for dtype in TYPES if form != "scaleoffset" else ["f4", "i2"]:
            for chunks in ((2, 3, 5, 7), (1, 1, 13, 20), (5, 7, 13, 20)):
                f.create_dataset(f"{dtype}{chunks[0]}", data=values(dtype), chunks=chunks, **(FAST | SLOW)[form])
    store = open_hdf5_file(path)
    with h5py.File(path) as f:
        assert set(store.arrays) == set(f)
        for name, table in store.arrays.items():
            assert (table.decoder is None) == (form in SLOW)
            got, whole = store.read_small(name), f[name][...]
            assert (got.dtype, bits(got)) == (whole.dtype, bits(whole)), name


def test_filters_that_a_chunk_left_out(tmp_path):
    path, x = tmp_path / "x.h5", values("f4", (4, 6, 10))
    import zlib

    with h5py.File(path, "w") as f:
        d = f.create_dataset("x", x.shape, "f4", chunks=(1, 6, 10), **SHUFFLED)
        shuffled = [np.frombuffer(step.tobytes(), "u1").reshape(-1, 4).T.tobytes() for step in x]
        d.id.write_direct_chunk((0, 0, 0), zlib.compress(shuffled[0]), 0)
        d.id.write_direct_chunk((1, 0, 0), zlib.compress(x[1].tobytes()), 1)  # not shuffled
        d.id.write_direct_chunk((2, 0, 0), shuffled[2], 2)  # not deflated
        d.id.write_direct_chunk((3, 0, 0), x[3].tobytes(), 3)
    table = open_hdf5_file(path).arrays["x"]
    assert [table.finder.locate((i, 0, 0)).mask for i in range(4)] == [0, 1, 2, 3]
    assert bits(open_hdf5_file(path).read_small("x")) == bits(x)


@pytest.mark.parametrize("form", ["shuffle", "shuffle-deflate-fletcher32", "zstd", "blosc-lz4"])
@pytest.mark.parametrize("shape", [(20, 130), (16, 100), (5, 130)])
def test_edge_chunks_that_the_filters_were_not_applied_to(tmp_path, form, shape):
    path, x = tmp_path / "x.h5", values("f4", shape).round()
    with h5py.File(path, "w") as f:
        like = f.create_dataset("like", shape, "f4", chunks=(8, 50), maxshape=(None, None), **FAST[form])
        plist = like.id.get_create_plist()
        assert ctypes.CDLL(h5py.h5p.__file__).H5Pset_chunk_opts(ctypes.c_int64(plist.id), 2) == 0
        h5py.h5d.create(f.id, b"x", like.id.get_type(), like.id.get_space(), dcpl=plist)
        h5py.h5d.create(f.id, b"grown", like.id.get_type(), like.id.get_space(), dcpl=plist)
        f["x"][...] = x
        f["grown"][...] = x
        f["grown"].resize((24, 170))  # edges of before are now filtered, unless they are edges still
    store = open_hdf5_file(path)
    table = store.arrays["x"]
    assert table.decoder is not None
    edges = [i for i in table.grid.indices() if any((k + 1) * c > n for k, c, n in zip(i, (8, 50), shape, strict=True))]
    assert [i for i in table.grid.indices() if table.finder.locate(i).mask] == edges
    assert all(table.finder.locate(i).length == 8 * 50 * 4 for i in edges)
    assert bits(store.read_small("x")) == bits(x)
    with h5py.File(path) as f:
        assert bits(store.read_small("grown")) == bits(f["grown"][...])
        assert bits(f["grown"][: shape[0], : shape[1]]) == bits(x)


def test_chunks_that_were_never_written_are_the_fill_value(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as f:
        late = f.create_dataset("late", (6, 8), "f4", chunks=(2, 3), fillvalue=-7.0, **SHUFFLED)
        late[2:4, 1:2] = 1.0
        f.create_dataset("never", (6, 8), "i2", fillvalue=5)
        f.create_dataset("long", (6, 8), np.longdouble, chunks=(2, 3), fillvalue=np.nan)
        f.create_dataset("empty", (0, 8), "i2", chunks=(2, 4), maxshape=(None, 8))
        dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        dcpl.set_chunk((2, 3))
        dcpl.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
        dcpl.set_fill_value(np.array(3.0, "f4"))
        h5py.h5d.create(f.id, b"early", h5py.h5t.NATIVE_FLOAT, h5py.h5s.create_simple((6, 8)), dcpl)
    store = open_hdf5_file(path)
    late = store.arrays["late"]
    assert [i for i in late.grid.indices() if late.finder.locate(i)] == [(1, 0)]
    assert store.arrays["never"].finder.locate((0, 0)) is None
    with h5py.File(path) as f:
        for name in f:
            np.testing.assert_array_equal(store.read_small(name), f[name][...])


def test_chunks_that_libhdf5_lists_at_wrong_places(tmp_path):
    """One unlimited dim that is not the first: an index that has it outermost."""
    path, x = tmp_path / "x.h5", values("f4", (6, 40, 3))
    with h5py.File(path, "w", libver="latest") as f:
        for name, first in (("inner", 6), ("single", 2), ("outer", None)):
            most = (None, 40, 3) if first is None else (first, None, 3)
            made = f.create_dataset(name, (first or 6, 40, 3), "f4", chunks=(2, 1, 3), maxshape=most, **SHUFFLED)
            made[:, :2] = x[: first or 6, :2]  # few, so that the wrong places are all in the grid
    store = open_hdf5_file(path, cache="")
    assert [store.arrays[name].decoder is None for name in ("inner", "single", "outer")] == [True, False, False]
    with h5py.File(path) as f:
        for name in f:
            assert bits(store.read_small(name)) == bits(f[name][...]), name


@pytest.mark.parametrize(("dtype", "said", "fill"), [("i1", "true", -1), ("i2", "true", -7), ("u1", "false", 250)])
@pytest.mark.parametrize("written", [True, False])
def test_missing_values_of_the_other_sign(tmp_path, dtype, said, fill, written):
    path, dims = str(tmp_path / "x.nc"), {"time": 2, "lat": 4, "lon": 5}
    info = np.iinfo(dtype)
    with netCDF4.Dataset(path, "w") as f:
        for name, size in dims.items():
            f.createDimension(name, size)
        for name, chunks in (("whole", {"contiguous": True}), ("chunked", {"chunksizes": (1, 2, 5), "zlib": True})):
            made = f.createVariable(name, dtype, tuple(dims), fill_value=fill, **chunks)
            made.setncatts({"_Unsigned": said, "scale_factor": 0.5})
            made.set_auto_maskandscale(False)
            if written:
                made[:] = np.linspace(info.min, info.max, 40).astype(dtype).reshape(2, 4, 5)
                made[0, 1, 2] = fill
    ds = jigsaw.io.open(path, mesh=world_mesh(lat=1), fields=["whole", "chunked"])
    with xr.open_dataset(path, engine="netcdf4") as want:
        for step in range(2):
            for channel, name in enumerate(ds.fields):
                np.testing.assert_array_equal(ds[step].input.local[0, channel], want[name].values[step])
        assert np.isnan(want["whole"].values[0, 1, 2])


def test_contiguous_compact_scalar_and_offset_files(tmp_path):
    path, x = tmp_path / "x.h5", values(">f4", (4, 3, 200, 300))
    with h5py.File(path, "w", userblock_size=1024) as f:
        f["contiguous"] = x
        f["scalar"] = 3.5
        dcpl = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        dcpl.set_layout(h5py.h5d.COMPACT)
        d = h5py.h5d.create(f.id, b"compact", h5py.h5t.STD_I32BE, h5py.h5s.create_simple((7,)), dcpl)
        d.write(h5py.h5s.ALL, h5py.h5s.ALL, np.arange(7, dtype="i4"))
    assert claims(path)
    store = open_hdf5_file(path)
    assert store.arrays["contiguous"].chunks == (1, 3, 200, 300)
    assert bits(store.read_small("contiguous")) == bits(x)
    assert store.read_small("scalar") == 3.5
    np.testing.assert_array_equal(store.read_small("compact"), np.arange(7))
    assert store.arrays["compact"].decoder is None


def test_types_that_are_no_numbers_are_left_out(tmp_path):
    path = tmp_path / "x.h5"
    with h5py.File(path, "w") as f:
        f.create_dataset("complex", data=np.ones((3, 4), "c8"))
        f.create_dataset("compound", data=np.zeros((3, 4), [("a", "f4"), ("b", "i4")]))
        f.create_dataset("ragged", (3, 4), h5py.vlen_dtype(np.float32))
        f.create_dataset("texts", data=np.full((3, 4), "a", object), dtype=h5py.string_dtype())
        f.create_dataset("names", data=["u10", "t\u00e9"], dtype=h5py.string_dtype())
        f.create_dataset("fixed", data=np.array([b"t2m", b"msl"]))
        f.create_dataset("nothing", data=h5py.Empty("f4"))
        f.create_dataset("enum", data=np.array([[1, 0]], "u1"), dtype=h5py.enum_dtype({"SEA": 0, "LAND": 1}, "u1"))
        f["type"] = np.dtype("f4")
    store = open_hdf5_file(path)
    assert set(store.arrays) == {"names", "fixed", "enum"}
    assert store.read_small("names").tolist() == ["u10", "t\u00e9"]
    assert store.read_small("fixed").tolist() == ["t2m", "msl"]
    assert store.read_small("enum").tolist() == [[1, 0]]


# -- NetCDF-4 --------------------------------------------------------------------------------------------------------


def write_netcdf(path):
    with netCDF4.Dataset(path, "w") as f:
        f.title = "toy"
        for name, size in {"time": None, "lat": 13, "lon": 16, "bnds": 2, "y": 3, "x": 4}.items():
            f.createDimension(name, size)
        time = f.createVariable("time", "i4", ("time",))
        time.units, time.calendar = "hours since 2020-01-01", "noleap"
        time[:] = np.arange(5) * 6
        f.createVariable("time_bnds", "f8", ("time", "bnds"))[:] = 0.0
        lat, lon = f.createVariable("lat", "f4", ("lat",)), f.createVariable("lon", "f4", ("lon",))
        lat[:], lon[:] = np.linspace(90, -90, 13), np.arange(16) * 22.5
        lat.units, lon.units = "degrees_north", "degrees_east"
        packed = f.createVariable("packed", "i2", ("time", "lat", "lon"), zlib=True, fill_value=-999)
        packed.scale_factor, packed.add_offset, packed.valid_range = 0.5, 10.0, np.array([-5, 500], "i2")
        packed[:] = np.ma.masked_greater(np.arange(5 * 13 * 16).reshape(5, 13, 16) * 0.1, 80)
        plain = f.createVariable(
            "plain", ">f4", ("time", "lat", "lon"), endian="big", zlib=True, fletcher32=True, chunksizes=(2, 5, 7)
        )
        plain[:] = np.arange(5 * 13 * 16, dtype="f4").reshape(5, 13, 16)
        f.createVariable("y", "f4", ("x",))[:] = 1.0  # no coordinate of the dim y
        f.createVariable("x", "f4", ("y", "x"))[:] = 2.0  # a coordinate of two dims
        group = f.createGroup("model")
        group.createVariable("t", "f4", ("time", "lat", "lon"), contiguous=False)[:] = 4.0
    return path


def test_netcdf_dims_groups_and_attributes_are_those_of_xarray(tmp_path):
    path = write_netcdf(tmp_path / "x.nc")
    store = open_hdf5_file(path)
    with (
        xr.open_dataset(path, engine="netcdf4", decode_cf=False) as root,
        xr.open_dataset(path, engine="netcdf4", decode_cf=False, group="model") as model,
    ):
        expected = {**root.variables, "model/t": model["t"].variable}
        assert set(store.arrays) == set(expected)
        for name, variable in expected.items():
            table = store.arrays[name]
            assert (table.dims, table.shape) == (variable.dims, variable.shape), name
            np.testing.assert_array_equal(store.read_small(name), variable.values)
            assert set(table.attrs) == set(variable.attrs)
            for key, value in variable.attrs.items():
                np.testing.assert_array_equal(table.attrs[key], value, f"{name} {key}")
        assert store.attrs == root.attrs
    assert store.arrays["packed"].masks == (-999.0,)


def test_netcdf_samples_are_what_xarray_decodes(tmp_path):
    path = write_netcdf(tmp_path / "x.nc")
    ds = jigsaw.io.open(open_hdf5_file(path), mesh=world_mesh(lat=1), fields=["packed", "plain"], inputs=[0, 1])
    with xr.open_dataset(path, engine="netcdf4") as whole:
        for at in range(len(ds)):
            got = ds[at].input.local.numpy()
            np.testing.assert_allclose(got[:, 0], whole.packed[at : at + 2].values, rtol=1e-6)
            np.testing.assert_array_equal(got[:, 1], whole.plain[at : at + 2].values)


# -- makani ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("annotated", [False, True])
def test_the_layout_of_makani_opens_as_it_is(tmp_path, annotated):
    path, x = tmp_path / "2018.h5", values("f4", (6, 3, 13, 16))
    x[~np.isfinite(x)] = 0
    with h5py.File(path, "w") as f:
        d = f.create_dataset("fields", data=x, chunks=(1, 3, 13, 16))
        if annotated:
            start = np.datetime64("2018-01-01", "s").astype("f8")
            scales = {
                "timestamp": start + np.arange(6) * 21600.0,
                "channel": np.array([b"u10m", b"v10m", b"t2m"]),
                "lat": np.linspace(90, -90, 13, dtype="f4"),
                "lon": np.arange(16, dtype="f4") * 22.5,
            }
            for i, (name, scale) in enumerate(scales.items()):
                f[name] = scale
                f[name].make_scale(name)
                d.dims[i].attach_scale(f[name])
                d.dims[i].label = f"{name} of a sample"
    store = open_hdf5_file(path)
    assert store.arrays["fields"].dims == ("time", "channel", "lat", "lon")
    ds = jigsaw.io.open(store, mesh=world_mesh(lat=1), fields=["fields@2", "fields@0"], inputs=[0], targets=[1])
    np.testing.assert_array_equal(ds[4].target.local[0].numpy(), x[5, [2, 0]])
    if annotated:
        assert ds.input_times(1)[0] == np.datetime64("2018-01-01T06")
        assert store.read_small("channel").tolist() == ["u10m", "v10m", "t2m"]


# -- with an engine --------------------------------------------------------------------------------------------------


def write_toy(path, rows=(130, 100), chunk=(1, 3, 65, 100), how=SHUFFLED):
    r = np.random.default_rng(0)
    shapes = {"air": (4, 3, *rows), "t2m": (4, *rows), "mask": rows}
    stored = {name: r.normal(size=shape).astype("f4") for name, shape in shapes.items()}
    dims = ("time", "level", "lat", "lon")
    with h5py.File(path, "w") as f:
        f.create_dataset("air", data=stored["air"], chunks=chunk, **how)
        f.create_dataset("t2m", data=stored["t2m"], chunks=(chunk[0], *chunk[2:]), compression="lzf")
        f.create_dataset("mask", data=stored["mask"])
        for name, size in zip(dims, (4, 3, *rows), strict=True):
            f[name] = np.arange(size)
            f[name].make_scale(name)
        for name, along in {"air": dims, "t2m": ("time", *dims[2:]), "mask": dims[2:]}.items():
            for i, dim in enumerate(along):
                f[name].dims[i].attach_scale(f[dim])
    return stored


def body_reads(path, stored, axes, mesh=None, **more):
    store = open_hdf5_file(path)
    engine = ReadEngine(store, mesh, threads=2)
    try:
        for mode in ("cooperative", "independent"):
            for halo in (0, 2):
                asked = request(axes, (130, 100), halo, **more)
                plan, before = plan_read(asked, store.arrays, mode), replace(engine.stats)
                got = engine.read(plan)
                assert engine.stats == before + plan.rows[engine.peers.me]
                assert plan.total.fallback > 0
                coord = list(asked.layout.coords())[engine.peers.me]
                np.testing.assert_array_equal(got, held(sample(stored), asked.layout, coord))
    finally:
        engine.close()
    return store


def body_ranks(path, stored, axes):
    body_reads(path, stored, axes, world_mesh(**axes))


def test_ranks_read_their_tiles_as_planned(tmp_path):
    stored = write_toy(tmp_path / "x.h5")
    run_on_ranks(2, body_ranks, tmp_path / "x.h5", stored, {"lat": 2})


@pytest.mark.parametrize("how", [{}, FAST["blosc-lz4"], SHUFFLED], ids=["plain", "blosc", "deflate"])
def test_less_than_a_chunk_where_that_is_possible(tmp_path, how):
    stored = write_toy(tmp_path / "x.h5", chunk=(4, 3, 130, 100), how=how)
    store = body_reads(tmp_path / "x.h5", stored, {}, None)
    asked = request({"lat": 2}, (130, 100), 0, steps=(0,), levels=(0, 1))
    row = plan_read(asked, store.arrays, "independent").rows[0]
    whole, half = 4 * 3 * 130 * 100 * 4, 65 * 100 * 4
    air = row.decoded_bytes - 4 * 130 * 100 * 4 - 130 * 100 * 4  # t2m and the small mask are decoded whole
    assert row.useful_bytes == (2 + 1 + 1) * half
    assert air == 2 * half if not how else air == whole if how == SHUFFLED else 2 * half < air < 0.7 * whole


# -- far files -------------------------------------------------------------------------------------------------------


def far(path, key="data/x.h5"):
    """A file as an object of a store that is reached by requests."""
    store = MemoryStore()
    sync(store.set(key, default_buffer_prototype().buffer.from_bytes(path.read_bytes())))
    return ZarrKeyFiles(store)


def test_a_far_file_is_indexed_and_read_by_ranges(tmp_path):
    stored = write_toy(tmp_path / "x.h5")
    files = far(tmp_path / "x.h5")

    store = open_hdf5_file("data/x.h5", files)
    assert store.arrays["air"].far
    for name in stored:
        np.testing.assert_array_equal(store.read_small(name), stored[name])
    engine = ReadEngine(store, None, threads=2)
    plan = plan_read(request({}, (130, 100)), store.arrays, "independent")
    np.testing.assert_array_equal(engine.read(plan), sample(stored))
    engine.close()


class CollectingStore(MemoryStore):
    """Collects garbage where Python may: in the thread that zarr's stores answer in.  Some of it are h5py's objects."""

    garbage: list[list]

    async def get(self, *args, **kwargs):
        if self.garbage:
            self.garbage.pop()
        if gc.isenabled():
            gc.collect()
        return await super().get(*args, **kwargs)


def body_collecting_store(path):
    store = CollectingStore()
    store.garbage = [[h5py.File(path)] for _ in range(50)]
    for ring in store.garbage:
        ring.append(ring)
    sync(store.set("x.h5", default_buffer_prototype().buffer.from_bytes(path.read_bytes())))
    far = open_hdf5_file("x.h5", ZarrKeyFiles(store))
    near = open_hdf5_file(path)
    for name in near.arrays:
        np.testing.assert_array_equal(far.read_small(name), near.read_small(name))
    assert gc.isenabled()
    return len(store.garbage)


@pytest.mark.slow
def test_a_far_file_is_opened_while_another_thread_collects_garbage(tmp_path):
    """h5py holds its lock around all that it reads, and its objects take it when they go: a thread that collects them
    and is waited for under the lock would never answer."""
    write_toy(tmp_path / "x.h5")
    (garbage_left,) = run_on_ranks(1, body_collecting_store, tmp_path / "x.h5", timeout=60)
    assert garbage_left < 50


def test_a_far_object_reads_like_a_file(tmp_path):
    raw = np.random.default_rng(0).bytes(3 * SEEKABLE_BLOCK_BYTES + 17)
    (tmp_path / "x").write_bytes(raw)
    file = SeekableObject(far(tmp_path / "x", "x"), "x")
    for at, size in [
        (0, 10),
        (SEEKABLE_BLOCK_BYTES - 3, 7),
        (5, 2 * SEEKABLE_BLOCK_BYTES),
        (len(raw) - 4, 100),
        (len(raw) + 5, 3),
    ]:
        file.seek(at)
        assert file.read(size) == raw[at : at + size]
    assert file.seek(-2, os.SEEK_END) == len(raw) - 2
    assert (file.seek(-1, os.SEEK_CUR), file.tell()) == (len(raw) - 3, len(raw) - 3)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        SeekableObject(far(tmp_path / "x", "x"), "nowhere")


@pytest.mark.slow
def test_without_libdeflate_the_values_are_the_same(tmp_path):
    path, x = tmp_path / "x.h5", values("f4", (2, 30, 40))
    with h5py.File(path, "w") as f:
        f.create_dataset("x", data=x, chunks=(1, 30, 40), **SHUFFLED)
    program = (
        "import sys; sys.modules['deflate'] = None\n"
        "from jigsaw.io.formats.hdf5 import open_hdf5_file\n"
        "from jigsaw.io.formats.hdf5_filters import libdeflate_functions\n"
        "assert libdeflate_functions() is None\n"
        f"sys.stdout.buffer.write(open_hdf5_file({str(path)!r}).read_small('x').tobytes())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True, timeout=60)
    assert done.stdout == bits(x)


def body_netcdf(path):
    ds = jigsaw.io.open(open_hdf5_file(path), mesh=world_mesh(lat=2), fields=["plain"], inputs=[0], halo=1)
    whole = np.arange(5 * 13 * 16, dtype="f4").reshape(5, 13, 16)
    np.testing.assert_array_equal(ds[3].input.full_tensor()[0, 0].numpy(), whole[3])


def test_two_ranks_share_the_samples_of_a_netcdf_file(tmp_path):
    run_on_ranks(2, body_netcdf, write_netcdf(tmp_path / "x.nc"))
