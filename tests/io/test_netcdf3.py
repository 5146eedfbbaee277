"""NetCDF-3 by byte ranges: the values of netCDF4, scipy and xarray; counted reads; files that lie."""

import os
import struct

import netCDF4
import numpy as np
import pytest
import scipy.io
import xarray as xr
from globe_store import globe

import jigsaw
from jigsaw.errors import CorruptChunkError, TruncatedError, UnsupportedStoreError
from jigsaw.io.formats.netcdf3 import claims, open_netcdf3
from jigsaw.io.formats.slab_arrays import read_table_box
from jigsaw.testing import on_ranks, world_mesh

FORMATS = ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA"]
FIELDS = ["t500", "t2m", "land_sea_mask"]


def write(path, form="NETCDF3_CLASSIC", data=None, unlimited=("time",)):
    data = globe() if data is None else data
    encoding = {"2m_temperature": {"dtype": "i2", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768}}
    with netCDF4.Dataset(path, "w", format=form) as file:
        file.set_auto_maskandscale(False)
        file.title = "a globe"
        file.setncattr("numbers", np.array([1, 2, 3], "i4"))
        for dim, n in data.sizes.items():
            file.createDimension(dim, None if dim in unlimited else n)
        for name, v in data.variables.items():
            packing = encoding.get(name, {})
            values = v.values
            if values.dtype.kind == "M":
                values = (values - values[0]) / np.timedelta64(1, "h")
                packing = {"units": "hours since 2020-01-01", "dtype": "f8"}
            elif packing:
                values = np.rint((values - 280.0) / 0.01).astype("i2")
                values[0, 0, :3] = -32768
            dtype = packing.get("dtype", "i4" if values.dtype.kind == "i" else values.dtype)
            made = file.createVariable(name, dtype, v.dims, fill_value=packing.get("_FillValue"))
            made.set_auto_maskandscale(False)
            made.setncatts({k: a for k, a in packing.items() if k not in ("dtype", "_FillValue")})
            made[...] = values
    return str(path)


@pytest.fixture(params=FORMATS)
def stored(request, tmp_path):
    return write(tmp_path / "globe.nc", request.param)


def stored_values(path):
    with netCDF4.Dataset(path) as file:
        file.set_auto_maskandscale(False)
        return {n: np.asarray(v[...]) for n, v in file.variables.items()}


def assert_alike(store, path):
    """Every value and every attribute, through the chunk table and as coordinates."""
    expected = stored_values(path)
    assert set(store.arrays) == set(expected)
    for name, x in expected.items():
        table = store.arrays[name]
        for values in (read_table_box(table, tuple((0, n) for n in table.shape)), store.read_small(name)):
            np.testing.assert_array_equal(values, x.view(values.dtype))
            assert values.dtype.isnative
    with netCDF4.Dataset(path) as file:
        for name, variable in file.variables.items():
            assert store.arrays[name].dims == variable.dimensions
            assert set(store.arrays[name].attrs) == set(variable.ncattrs())
            for key in variable.ncattrs():
                np.testing.assert_array_equal(store.arrays[name].attrs[key], variable.getncattr(key))


def test_values_are_those_of_the_library(stored):
    assert claims(stored)
    store = open_netcdf3(stored)
    assert store.attrs == {"title": "a globe", "numbers": [1, 2, 3]}
    assert_alike(store, stored)
    assert store.arrays["temperature"].dtype == ">f4"
    assert store.arrays["2m_temperature"].masks == (-32768.0,)


def test_each_record_is_a_chunk(stored):
    table = open_netcdf3(stored).arrays["temperature"]
    assert table.chunks == (1, 3, 13, 16) and table.grid.counts == (10, 1, 1, 1)
    offsets = [table.finder.locate((i, 0, 0, 0)).offset for i in range(3)]
    record = np.diff(offsets)
    assert record[0] == record[1] > table.grid.bytes_of((0, 0, 0, 0)) == table.finder.locate((0, 0, 0, 0)).length


@pytest.mark.parametrize("form", [("NETCDF3_CLASSIC", ()), ("NETCDF3_64BIT_DATA", ("time",))], ids=str)
def test_samples_are_those_of_xarray(tmp_path, form):
    path = write(tmp_path / "globe.nc", form[0], unlimited=form[1])
    data = xr.open_dataset(path).load()
    ds = jigsaw.io.open(open_netcdf3(path), mesh=world_mesh(lat=1), fields=FIELDS, inputs=[0, 2])
    got = ds[3].input.full_tensor().numpy()
    np.testing.assert_array_equal(got[:, 0], data.temperature.sel(level=500).values[[3, 5]])
    np.testing.assert_allclose(got[:, 1], data["2m_temperature"].values[[3, 5]], rtol=1e-6, atol=1e-4)
    np.testing.assert_array_equal(got[1, 2], data.land_sea_mask.values)
    first = ds[0].input.full_tensor().numpy()[0, 1]
    assert np.isnan(first[0, :3]).all() and np.isnan(first).sum() == 3
    assert ds.input_times(3)[1] == data.time.values[5]


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    return write(tmp_path_factory.mktemp("shared") / "globe.nc")


@on_ranks(2)
def test_planned_counts_are_what_the_engine_counts(shared):
    mesh = world_mesh(lat=2)
    ds = jigsaw.io.open(open_netcdf3(shared), mesh=mesh, fields=FIELDS, halo=1, inputs=[0, 1], targets=[])
    got = ds[2].input.full_tensor().numpy()
    data = xr.open_dataset(shared).load()
    np.testing.assert_array_equal(got[:, 0], data.temperature.sel(level=500).values[2:4])
    np.testing.assert_array_equal(got[:, 2], np.stack([data.land_sea_mask.values] * 2))
    planned = ds.plan(2).rows[mesh.get_rank()]
    assert ds._engine.stats == planned and planned.stored_bytes > 0


def test_only_the_needed_rows_are_read(tmp_path):
    wide = np.arange(3 * 256 * 512, dtype="f4").reshape(3, 256, 512)
    data = xr.Dataset({"a": (("time", "lat", "lon"), wide)})
    data.to_netcdf(tmp_path / "wide.nc", format="NETCDF3_64BIT", unlimited_dims=["time"])
    ds = jigsaw.io.open(open_netcdf3(tmp_path / "wide.nc"), mesh={"lat": 4}, fields=["a"], spec={"lat": "lat"})
    assert [(row.requests, row.stored_bytes) for row in ds.plan(1).rows] == [(1, 64 * 512 * 4)] * 4


def test_one_record_variable_has_no_padding(tmp_path):
    for name, dtype in (("b", "i1"), ("s", "i2"), ("c", "S1")):
        path = str(tmp_path / f"{name}.nc")
        values = (np.arange(35).reshape(7, 5) % 9).astype(dtype)
        with scipy.io.netcdf_file(path, "w", version=2) as file:
            file.createDimension("time", None)
            file.createDimension("x", 5)
            made = file.createVariable(name, dtype if dtype != "S1" else "c", ("time", "x"))
            made[:] = values
        table = open_netcdf3(path).arrays[name]
        np.testing.assert_array_equal(read_table_box(table, ((0, 7), (0, 5))), values)


def test_scipy_writes_them_too(tmp_path):
    path = str(tmp_path / "scipy.nc")
    with scipy.io.netcdf_file(path, "w") as file:
        file.history = "here"
        file.createDimension("time", None)
        for i, dtype in enumerate(("i1", "i2", "f8")):
            made = file.createVariable(f"v{i}", dtype, ("time",))
            made[:] = np.arange(3)
    store = open_netcdf3(path)
    assert store.attrs == {"history": "here"}
    assert_alike(store, path)


def test_unsigned_bytes(tmp_path):
    path = str(tmp_path / "u.nc")
    with netCDF4.Dataset(path, "w", format="NETCDF3_CLASSIC") as file:
        file.createDimension("x", 3)
        made = file.createVariable("a", "i1", ("x",), fill_value=np.int8(-1))
        made.set_auto_maskandscale(False)
        made.setncattr("_Unsigned", "true")
        made[:] = np.array([250, 3, 255], "u1").view("i1")
    table = open_netcdf3(path).arrays["a"]
    assert table.dtype == "|u1" and table.masks == (255.0,)
    expected = xr.open_dataset(path).a.values
    np.testing.assert_array_equal(expected, [250, 3, np.nan])
    assert read_table_box(table, ((0, 3),)).tolist() == [250, 3, 255]


def test_an_unsaid_number_of_records_is_that_of_the_file(tmp_path):
    path = write(tmp_path / "globe.nc")
    with open(path, "r+b") as file:
        file.seek(4)
        file.write(b"\xff" * 4)
    assert open_netcdf3(path).arrays["temperature"].shape[0] == 10


def test_empty_files(tmp_path):
    with netCDF4.Dataset(tmp_path / "none.nc", "w", format="NETCDF3_CLASSIC") as file:
        file.createDimension("time", None)
        file.createVariable("a", "f4", ("time",))
    store = open_netcdf3(tmp_path / "none.nc")
    assert store.arrays["a"].shape == (0,) and store.read_small("a").size == 0


# -- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [20, 300, 1200, -4])
def test_a_truncated_file_is_refused(tmp_path, cut):
    path = write(tmp_path / "globe.nc")
    os.truncate(path, cut if cut > 0 else os.path.getsize(path) + cut)
    with pytest.raises(TruncatedError, match=rf"{path} cannot be read as NetCDF-3: .* the file has"):
        open_netcdf3(path)


@pytest.mark.parametrize("form", FORMATS)
def test_every_count_of_the_header_is_checked(tmp_path, form):
    """Each four bytes of the header made huge: a typed error, or a file that is the same but for names and numbers."""
    path = write(tmp_path / "globe.nc", form)
    with open(path, "rb") as file:
        raw = file.read()
    refused = 0
    for at in range(4, 900, 4):
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(b"\x7f\xff\xff\xf0")
        try:
            store = open_netcdf3(path)
            assert all(t.places.end <= len(raw) for t in store.arrays.values())
        except (TruncatedError, CorruptChunkError):
            refused += 1
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(raw[at : at + 4])
    assert refused > 60


def test_a_lying_list_is_named(tmp_path):
    path = tmp_path / "lie.nc"
    path.write_bytes(b"CDF\x01" + struct.pack(">iii", 0, 10, 0x7FFFFFFF) + bytes(100))
    with pytest.raises(TruncatedError, match="claims 2147483647 entries at byte 16, more than fit"):
        open_netcdf3(path)
    path.write_bytes(b"CDF\x01" + struct.pack(">iii", 0, 12, 1) + bytes(100))
    with pytest.raises(CorruptChunkError, match="tag 12 at byte 16 where 10 or 0 belongs"):
        open_netcdf3(path)


def test_what_is_no_file_is_refused(tmp_path):
    assert not claims(tmp_path) and not claims(tmp_path / "no.nc") and not claims(3)
    with pytest.raises(UnsupportedStoreError, match="is a directory"):
        open_netcdf3(tmp_path)
    with pytest.raises(UnsupportedStoreError, match=r"there is no file .*no\.nc"):
        open_netcdf3(tmp_path / "no.nc")
    globe().to_netcdf(tmp_path / "four.nc", engine="netcdf4")
    with pytest.raises(UnsupportedStoreError, match="is not a NetCDF-3 file: it begins with"):
        open_netcdf3(tmp_path / "four.nc")


def test_a_file_that_vanishes_is_no_fill(tmp_path):
    path = write(tmp_path / "globe.nc")
    store = open_netcdf3(path)
    table = store.arrays["temperature"]
    os.remove(path)
    fresh = open_netcdf3(write(tmp_path / "other.nc")).arrays["temperature"]
    os.remove(tmp_path / "other.nc")
    for each in (table, fresh):
        each.places.files._files._open.clear()
        with pytest.raises(CorruptChunkError, match="the file is gone since it was opened"):
            read_table_box(each, ((0, 1), (0, 3), (0, 13), (0, 16)))


def test_values_that_begin_within_the_header_are_refused(tmp_path):
    with scipy.io.netcdf_file(tmp_path / "a.nc", "w") as file:
        file.createDimension("x", 4)
        file.createVariable("v", "i4", ("x",))[:] = 7
    raw = (tmp_path / "a.nc").read_bytes()
    begin = (len(raw) - 16).to_bytes(4, "big")
    (tmp_path / "a.nc").write_bytes(raw.replace(begin, (8).to_bytes(4, "big")))
    with pytest.raises(CorruptChunkError, match="begins at byte 8, within the header"):
        open_netcdf3(tmp_path / "a.nc")
