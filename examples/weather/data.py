"""NCEP/NCAR near-surface air temperature: the packed copy beside this file, and the Zarr store that training reads.

The packed copy (`data/air.mon.mean.nc`, made by `pack`) is an ordinary CF file: int16, 0.01 K, deflate. `write_store`
turns it into a store chunked as such stores are, the whole globe a chunk, and adds the anomaly from the monthly
climatology of the training years. Nothing that the test years hold goes into that climatology.

Every rank needs rows of every chunk, as of WeatherBench2's. Ten years a chunk, not a month, because one month is 21 kB:
decoding that four times takes less than handing it over. A chunk is compressed month by month (its Blosc blocks), so
that a sample of thirteen months decodes thirteen of the 120.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import xarray as xr
from numcodecs import Blosc

HERE = Path(__file__).parent
PACKED = HERE / "data" / "air.mon.mean.nc"
STORE = HERE / "data" / "cache" / "ncep_air_decades.zarr"
TRAIN_YEARS = ("1948", "2008")  # the climatology is theirs too
TEST_YEARS = ("2009", "2025")
KELVIN = 0.01  # resolution of the int16 values
MONTHS = 120  # a chunk


def pack(source: str | Path, path: str | Path = PACKED) -> None:
    """The original `air.mon.mean.nc` of NOAA PSL (29 MB) -> int16 of 0.01 K, deflate (11.5 MB)."""
    original = xr.open_dataset(source)
    packed = xr.Dataset({"air": original["air"].drop_attrs()})
    packed["air"].attrs = {
        "standard_name": "air_temperature",
        "long_name": "monthly mean air temperature at sigma level 0.995",
        "units": "degC",
    }
    packed.attrs = {
        "title": "NCEP/NCAR Reanalysis 1, monthly mean near-surface air temperature, 1948-01 to 2026-02",
        "source": "NOAA PSL, ncep.reanalysis.derived/surface/air.mon.mean.nc; https://psl.noaa.gov",
        "references": "Kalnay et al. (1996), The NCEP/NCAR 40-year reanalysis project, Bull. Amer. Meteor. Soc. 77",
        "license": "public data of NOAA PSL, free to use; packed to 0.01 K",
    }
    months, rows, columns = packed["air"].shape
    code = {"dtype": "int16", "scale_factor": KELVIN, "_FillValue": -32768, "zlib": True, "shuffle": True}
    code |= {"complevel": 9, "chunksizes": (min(months, 120), rows, columns)}
    packed.to_netcdf(path, engine="netcdf4", encoding={"air": code})


def monthly_climatology(air: xr.DataArray) -> xr.DataArray:
    """The mean of each calendar month over `TRAIN_YEARS`: [month, latitude, longitude]."""
    return air.sel(time=slice(*TRAIN_YEARS)).groupby("time.month").mean()


def once(path: Path, write: Callable[[Path], None], *, writes: bool, patience: float = 300.0) -> Path:
    """`path`, written on first use by the one process that `writes`; the others wait until it is whole.

    It is written beside its final name, then renamed: whoever sees it sees all of it.
    """
    if writes and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        write(draft)
        try:
            draft.rename(path)
        except OSError:  # another run was faster: its store is the same
            shutil.rmtree(draft)
    deadline = time.monotonic() + patience
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no store at {path} after {patience:.0f} s; the rank that writes it has failed")
        time.sleep(0.05)
    return path


def store(path: str | Path = STORE, *, writes: bool = True) -> Path:
    """The Zarr store of the air temperature: the whole globe and ten years a chunk."""
    return once(Path(path), write_store, writes=writes)


def write_store(path: Path) -> None:
    """Temperature, its climatology of the training years, and the anomaly from it: int16 of 0.01 K, CF attributes."""
    with xr.open_dataset(PACKED) as packed:
        air = packed["air"].load()
        attrs = packed.attrs
    climatology = monthly_climatology(air)
    anomaly = (air.groupby("time.month") - climatology).drop_vars("month")
    anomaly.attrs = {"long_name": "anomaly of air from its monthly climatology of 1948-2008", "units": "K"}
    names = {"lat": "latitude", "lon": "longitude"}
    data = xr.Dataset({"air": air, "air_anomaly": anomaly}, attrs=attrs).rename(names)
    data["air_climatology"] = climatology.rename(names).assign_attrs(units="degC", long_name="mean of 1948-2008")

    by_month = Blosc("zstd", clevel=5, shuffle=Blosc.SHUFFLE, blocksize=air[0].size * np.dtype("int16").itemsize)
    code = {"dtype": "int16", "scale_factor": KELVIN, "_FillValue": np.int16(-32768)}
    code |= {"chunks": (MONTHS, *air.shape[1:]), "compressors": by_month}
    for variable in data.variables.values():
        variable.encoding = {}
    data.to_zarr(path, zarr_format=2, consolidated=True, encoding=dict.fromkeys(data.data_vars, code))
