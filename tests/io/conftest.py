"""Stores like those of weather centres, in small: 10 six-hourly steps, 3 levels, 13 x 16 rows."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from numcodecs import Zstd

STEPS, LEVELS, LAT, LON = 10, (500, 700, 850), 13, 16


def globe(steps=STEPS, lat=LAT, lon=LON, gap=None):
    """A dataset with variables at levels, at the surface, and without time; values name their place."""
    r = np.random.default_rng(0)
    times = np.datetime64("2020-01-01", "ns") + np.arange(steps) * np.timedelta64(6, "h")
    if gap is not None:
        times[gap + 1 :] += np.timedelta64(24, "h")
    space = {"latitude": np.linspace(90, -90, lat), "longitude": np.arange(lon) * (360.0 / lon)}
    return xr.Dataset(
        {
            "geopotential": (("time", "level", "latitude", "longitude"), r.normal(5e4, 1e3, (steps, 3, lat, lon)).astype("f4")),
            "temperature": (("time", "level", "latitude", "longitude"), r.normal(270, 10, (steps, 3, lat, lon)).astype("f4")),
            "2m_temperature": (("time", "latitude", "longitude"), r.normal(280, 10, (steps, lat, lon)).astype("f4")),
            "land_sea_mask": (("latitude", "longitude"), r.uniform(0, 1, (lat, lon)).astype("f4")),
        },
        coords={"time": times, "level": list(LEVELS), **space},
    )  # fmt: skip


@dataclass(frozen=True)
class Written:
    """A store and what it holds; picklable, so that a test can hand it to its ranks."""

    path: str

    @property
    def truth(self):
        return xr.open_zarr(self.path, consolidated=False).load()


def write(path: Path, data: xr.Dataset, layout: str = "v3", chunk=(1, None, None, None)) -> Written:
    """Write `data` as zarr v2, v3 or sharded v3, chunked by (time, level, lat, lon), None for the whole dim."""
    sizes = {"time": chunk[0], "level": chunk[1], "latitude": chunk[2], "longitude": chunk[3]}
    encoding = {}
    for name in data.data_vars:
        inner = tuple(min(sizes[d] or n, n) for d, n in data[name].sizes.items())
        encoding[name] = {"chunks": inner}
        if layout == "sharded":
            encoding[name]["shards"] = tuple(-(-n // c) * c for n, c in zip(data[name].shape, inner, strict=True))
        if name == "2m_temperature":
            encoding[name] |= {"dtype": "int16", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768}
        if layout == "v2":
            encoding[name]["compressors"] = Zstd(1)
    data.to_zarr(path, zarr_format=2 if layout == "v2" else 3, encoding=encoding, consolidated=False)
    return Written(str(path))


@pytest.fixture(scope="session")
def wb2(tmp_path_factory):
    """The whole globe a chunk, like WeatherBench2."""
    return write(tmp_path_factory.mktemp("wb2") / "wb2.zarr", globe())


@pytest.fixture(scope="session", params=["v2", "v3", "sharded"])
def tiled(request, tmp_path_factory):
    """Small chunks in each zarr format."""
    chunk = (3, 2, 5, 7)
    return write(tmp_path_factory.mktemp("tiled") / f"{request.param}.zarr", globe(), request.param, chunk)


@pytest.fixture(scope="session")
def gappy(tmp_path_factory):
    """A day is missing after step 4."""
    return write(tmp_path_factory.mktemp("gap") / "gap.zarr", globe(gap=4))
