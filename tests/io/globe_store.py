"""Stores like those of weather centers, in small: 10 six-hourly steps, 3 levels, 13 x 16 rows."""

from pathlib import Path

import numpy as np
import xarray as xr
from numcodecs import Zstd

STEPS, LEVELS, LAT, LON = 10, (500, 700, 850), 13, 16


def globe(steps=STEPS, lat=LAT, lon=LON, gap=None):
    """A dataset with variables at levels, at the surface, and without time; values name their place."""
    r = np.random.default_rng(0)
    times = np.datetime64("2020-01-01", "ns") + np.arange(steps) * np.timedelta64(6, "h")
    if gap is not None:
        times[gap + 1 :] += np.timedelta64(24, "h")
    upper, lower = ("time", "level", "latitude", "longitude"), ("time", "latitude", "longitude")
    space = {"latitude": np.linspace(90, -90, lat), "longitude": np.arange(lon) * (360.0 / lon)}
    return xr.Dataset(
        {
            "geopotential": (upper, r.normal(5e4, 1e3, (steps, 3, lat, lon)).astype("f4")),
            "temperature": (upper, r.normal(270, 10, (steps, 3, lat, lon)).astype("f4")),
            "2m_temperature": (lower, r.normal(280, 10, (steps, lat, lon)).astype("f4")),
            "land_sea_mask": (("latitude", "longitude"), r.uniform(0, 1, (lat, lon)).astype("f4")),
        },
        coords={"time": times, "level": list(LEVELS), **space},
    )  # fmt: skip


def truth(path):
    """What xarray reads of a store: the oracle."""
    return xr.open_zarr(path, consolidated=False).load()


def stacked(path, fields):
    """The whole series [steps, C, lat, lon] of ``variable`` or ``variable@level`` names, float64."""
    data = truth(path)
    columns = []
    for field in fields:
        name, _, level = field.partition("@")
        values = data[name].sel(level=float(level)) if level else data[name]
        columns.append(np.broadcast_to(values.values, (data.sizes["time"], *values.shape[-2:])))
    return np.stack(columns, axis=1).astype("f8")


def write(path: Path, data: xr.Dataset, layout: str = "v3", chunk=(1, None, None, None)) -> str:
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
    return str(path)
