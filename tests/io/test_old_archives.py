"""Files of other tools and times: old NetCDF archives, and Zarr as it was and is written; xarray is the oracle."""

import json
from itertools import product

import netCDF4
import numcodecs
import numpy as np
import pytest
import scipy.io
import xarray as xr
import zarr
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec

import jigsaw
from jigsaw.testing import world_mesh

STEPS, LEVELS, ROWS, COLUMNS = 5, 3, 7, 10


def check_as_xarray(path, data, **how):
    """Every value of every field that xarray has on lat and lon, at every step, and the coordinates."""
    fields = {n: v for n, v in data.data_vars.items() if v.ndim >= 2 and v.dims[-2:] == ("lat", "lon")}
    assert fields
    ds = jigsaw.io.open(path, mesh=world_mesh(lat=1), fields=list(fields), **how)
    got = np.concatenate([ds[i].input.full_tensor() for i in range(len(ds))])
    columns = []
    for values in fields.values():
        timed = values if "time" in values.dims else values.expand_dims(time=data.time)
        columns.append(timed.values.reshape(len(ds), -1, *values.shape[-2:]))
    want = np.concatenate(columns, axis=1)
    assert got.shape == want.shape
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want.astype("f4"), rtol=2e-7)
    np.testing.assert_array_equal(ds.times.astype("M8[ns]"), data.time.values)
    for dim in ("lat", "lon"):
        np.testing.assert_array_equal(ds.whole_coords[dim], data[dim].values)
    return ds


# -- old NetCDF --------------------------------------------------------------------------------------------------------


def old_archive(path, form, **attrs):
    """As reanalyses of the nineties are stored: shorts, two kinds of missing value, times that count from year 1."""
    r = np.random.default_rng(0)
    with netCDF4.Dataset(path, "w", format=form) as file:
        file.set_auto_maskandscale(False)
        for dim, n in {"lon": COLUMNS, "lat": ROWS, "level": LEVELS, "time": None}.items():
            file.createDimension(dim, n)
        hours = 17522904.0 + 6 * np.arange(STEPS)  # from the first of the year 2000 on
        coords = {
            "level": (np.array([1000, 850, 500], "f4"), {"units": "millibar", "positive": "down"}),
            "lat": (np.linspace(90, -90, ROWS, dtype="f4"), {"units": "degrees_north"}),
            "lon": (np.arange(COLUMNS, dtype="f4") * 36, {"units": "degrees_east"}),
            "time": (hours, {"units": "hours since 1-1-1 00:00:0.0", "delta_t": "0000-00-00 06:00:00"}),
        }
        for name, (values, said) in coords.items():
            made = file.createVariable(name, values.dtype, (name,))
            made[:] = values
            made.setncatts(said)
        packing = {"scale_factor": np.float32(0.01), "add_offset": np.float32(477.65)}
        for name, dims in {"air": ("time", "level", "lat", "lon"), "slp": ("time", "lat", "lon")}.items():
            made = file.createVariable(name, "i2", dims, fill_value=np.int16(-32767))
            values = r.integers(
                -30000, 30000, [STEPS, LEVELS, ROWS, COLUMNS] if "level" in dims else [STEPS, ROWS, COLUMNS]
            )
            values.flat[:7], values.flat[20:25] = 32766, -32767
            made.set_auto_maskandscale(False)
            made[:] = values.astype("i2")
            made.setncatts(
                {**packing, "missing_value": np.int16(32766), "valid_range": np.array([-5, 5], "i2"), **attrs}
            )
        made = file.createVariable("flags", "i1", ("time", "lat", "lon"))
        made[:] = r.integers(-100, 100, (STEPS, ROWS, COLUMNS))
        made = file.createVariable("land", "f8", ("lat", "lon"), fill_value=1e20)
        land = r.normal(size=(ROWS, COLUMNS))
        land[2, 3:6] = 1e20
        made[:] = land
    return str(path)


@pytest.mark.filterwarnings("ignore:.*(multiple fill values|Ambiguous reference date|numpy.datetime64)")
@pytest.mark.parametrize(
    "form", ["NETCDF3_CLASSIC", "NETCDF3_64BIT_OFFSET", "NETCDF3_64BIT_DATA", "NETCDF4", "NETCDF4_CLASSIC"]
)
def test_a_reanalysis_of_the_nineties(tmp_path, form):
    path = old_archive(tmp_path / "air.nc", form)
    with xr.open_dataset(path) as data:
        ds = check_as_xarray(path, data)
        assert np.isnan(data.air.values).sum() == 12
    assert ds.fields[:3] == ("air@1000", "air@850", "air@500")


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("growing", [True, False])
def test_what_scipy_wrote(tmp_path, version, growing):
    path, r = str(tmp_path / "scipy.nc"), np.random.default_rng(1)
    with scipy.io.netcdf_file(path, "w", version=version) as file:
        for dim, n in {"time": None if growing else STEPS, "lat": ROWS, "lon": COLUMNS}.items():
            file.createDimension(dim, n)
        for name, values in {"time": np.arange(STEPS), "lat": np.arange(ROWS), "lon": np.arange(COLUMNS)}.items():
            file.createVariable(name, "i", (name,))[:] = values
        file.variables["time"].units = "days since 2001-02-03"
        for name, dtype in {"short": "h", "byte": "b", "float": "f", "double": "d"}.items():
            made = file.createVariable(name, dtype, ("time", "lat", "lon"))
            made[:] = r.integers(-99, 99, (STEPS, ROWS, COLUMNS)).astype(dtype)
            made.missing_value = np.array(made[0, 0, 0], dtype)
    with xr.open_dataset(path, engine="scipy") as data:
        check_as_xarray(path, data)


def test_coordinates_that_are_packed(tmp_path):
    with netCDF4.Dataset(tmp_path / "packed.nc", "w", format="NETCDF3_64BIT_OFFSET") as file:
        for dim, n in {"time": None, "lat": ROWS, "lon": COLUMNS}.items():
            file.createDimension(dim, n)
            made = file.createVariable(dim, "i2", (dim,))
            made.set_auto_maskandscale(False)
            made[:] = np.arange(n or STEPS)
        file["lat"].setncatts({"scale_factor": -30.0, "add_offset": 90.0})
        file["lon"].setncatts({"scale_factor": 36.0})
        file["time"].setncatts({"scale_factor": 6.0, "units": "hours since 2000-01-01"})
        made = file.createVariable("t", "f4", ("time", "lat", "lon"))
        made[:] = np.random.default_rng(0).normal(size=(STEPS, ROWS, COLUMNS))
    with xr.open_dataset(tmp_path / "packed.nc") as data:
        check_as_xarray(str(tmp_path / "packed.nc"), data)


# -- Zarr as it was and is written -------------------------------------------------------------------------------------


def values_of(*shape):
    return np.random.default_rng(2).normal(280, 10, shape).astype("f4")


def globe():
    space = {"lat": np.linspace(90, -90, ROWS), "lon": np.arange(COLUMNS) * 36.0}
    times = np.datetime64("2001-01-01", "ns") + np.arange(STEPS) * np.timedelta64(6, "h")
    air = values_of(STEPS, LEVELS, ROWS, COLUMNS)
    air[1, 1, 2:4, 5] = np.nan
    fields = {
        "air": (("time", "level", "lat", "lon"), air),
        "t": (("time", "lat", "lon"), values_of(STEPS, ROWS, COLUMNS)),
        "land": (("lat", "lon"), values_of(ROWS, COLUMNS)),
    }
    return xr.Dataset(fields, {"time": times, "level": [1000, 850, 500], **space})


V2_FILTERS = {
    "none": None,
    "delta": [numcodecs.Delta("f4")],
    "scaled": [numcodecs.FixedScaleOffset(280, 100, "f4", "i2")],
    "quantized": [numcodecs.Quantize(3, "f4")],
    "rounded, shuffled": [numcodecs.BitRound(12), numcodecs.Shuffle(4)],
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")
@pytest.mark.parametrize("filters", V2_FILTERS)
def test_zarr_2_with_filters(tmp_path, filters):
    data = globe().drop_vars("air") if filters == "scaled" else globe()  # whose integers have no NaN
    for order, separator in product("CF", "./") if filters == "none" else [("F", "/")]:
        made = str(tmp_path / f"{order}{ord(separator)}.zarr")
        data.to_zarr(made, zarr_format=2, consolidated=True)
        group = zarr.open_group(made, mode="a", zarr_format=2)
        for field in data.data_vars:
            array = group.create_array(
                field,
                shape=data[field].shape,
                chunks=tuple(-(-n // 2) for n in data[field].shape),
                dtype="f4",
                order=order,
                filters=V2_FILTERS[filters],
                compressors=numcodecs.Blosc("zstd", 3),
                chunk_key_encoding={"name": "v2", "separator": separator},
                fill_value=float("nan"),
                overwrite=True,
            )
            array[...] = data[field].values
            array.attrs["_ARRAY_DIMENSIONS"] = list(data[field].dims)
        zarr.consolidate_metadata(made, zarr_format=2)
        with xr.open_zarr(made, consolidated=True) as found:
            check_as_xarray(made, found)


def write_by_hand(folder, data, separator, order):
    """As zarr-python 2 wrote: metadata of its own spelling, chunks by numcodecs."""
    folder.mkdir()
    (folder / ".zgroup").write_text(json.dumps({"zarr_format": 2}))
    (folder / ".zattrs").write_text("{}")
    blosc = numcodecs.Blosc("lz4", 5, numcodecs.Blosc.SHUFFLE)
    for name, variable in data.variables.items():
        values, attrs = variable.values, {"_ARRAY_DIMENSIONS": list(variable.dims)}
        if values.dtype.kind == "M":
            values = (values - values[0]) // np.timedelta64(1, "h")
            attrs |= {"units": "hours since 2001-01-01", "calendar": "proleptic_gregorian"}
        chunks = tuple(max(1, n // 2) for n in values.shape)
        where = folder / name
        where.mkdir()
        described = {
            "chunks": chunks,
            "compressor": blosc.get_config(),
            "dtype": values.dtype.str,
            "fill_value": "NaN" if values.dtype.kind == "f" else None,
            "filters": None,
            "order": order,
            "shape": values.shape,
            "zarr_format": 2,
        }
        if separator == "/":
            described["dimension_separator"] = separator
        (where / ".zarray").write_text(json.dumps(described, indent=4))
        (where / ".zattrs").write_text(json.dumps(attrs))
        for index in np.ndindex(*(-(-n // c) for n, c in zip(values.shape, chunks, strict=True))):
            box = tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunks, strict=True))
            whole = np.zeros(chunks, values.dtype)
            part = values[box]
            whole[tuple(map(slice, part.shape))] = part
            path = where / separator.join(map(str, index))
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(blosc.encode(np.asarray(whole, order=order).tobytes(order="A")))


@pytest.mark.parametrize("separator", [".", "/"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_zarr_2_by_its_own_library(tmp_path, separator, order):
    write_by_hand(tmp_path / "two.zarr", globe(), separator, order)
    with xr.open_zarr(tmp_path / "two.zarr", consolidated=False) as data:
        np.testing.assert_array_equal(data.air.values, globe().air.values)
        check_as_xarray(str(tmp_path / "two.zarr"), data)


V3_CODECS = {
    "plain": {"compressors": None},
    "blosc": {"compressors": BloscCodec(cname="zstd", shuffle="bitshuffle")},
    "gzip, crc": {"compressors": (GzipCodec(), Crc32cCodec())},
    "zstd, big-endian": {"compressors": ZstdCodec(), "serializer": BytesCodec(endian="big")},
    "keys of v2": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    "keys with dots": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "column-major": {"filters": "reversed"},
}


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_zarr_3_with_and_without_shards(tmp_path, sharded):
    data = globe()
    for number, codecs in enumerate(V3_CODECS.values()):
        made = str(tmp_path / f"{number}.zarr")
        data.drop_vars(data.data_vars).to_zarr(made, zarr_format=3, consolidated=False)
        group = zarr.open_group(made, mode="a")
        for field in data.data_vars:
            shape, options = data[field].shape, dict(codecs)
            if "filters" in options:
                options["filters"] = TransposeCodec(order=tuple(range(len(shape)))[::-1])
            chunks = tuple(max(1, n // 3) for n in shape)
            array = group.create_array(
                field,
                shape=shape,
                chunks=chunks,
                shards=tuple(2 * c for c in chunks) if sharded else None,
                dtype="f4",
                dimension_names=data[field].dims,
                fill_value=0,
                attributes={"_FillValue": "AAAAAAAA+H8="},
                **options,
            )
            array[...] = data[field].values
        with xr.open_zarr(made, consolidated=False) as found:
            np.testing.assert_array_equal(found.air.values, data.air.values)
            check_as_xarray(made, found)
