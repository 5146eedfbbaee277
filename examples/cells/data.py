"""The air temperature of the weather example on HEALPix cells: a Zarr store as CF 1.13 describes it.

Values of the 2.5 degree grid are interpolated linearly to the center of each cell.  What is forecast is the anomaly
from the monthly climatology of the training years; nothing that the test years hold goes into it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import xarray as xr
from numpy.typing import NDArray

import jigsaw.io

HERE = Path(__file__).parent
PACKED = HERE.parent / "weather" / "data" / "air.mon.mean.nc"
STORE = HERE / "data" / "cache" / "air_healpix.zarr"
LEVEL = 4  # 12 * 4^4 = 3072 cells, 3.7 degrees apart
TRAIN_YEARS = ("1948", "2008")
MONTHS = 120  # a chunk


def to_cells(values: NDArray[np.float32], lat: NDArray[np.float32], lon: NDArray[np.float32]) -> NDArray[np.float32]:
    """Interpolate [..., lat, lon], north first and once round the globe, to cells: [..., cells]."""
    cells = jigsaw.io.CellGrid(12 * 4**LEVEL, nside=2**LEVEL, nested=True)
    rows = (lat[0] - cells.lat) / (lat[0] - lat[1])
    columns = (cells.lon - lon[0]) / (lon[1] - lon[0])
    north = np.clip(np.floor(rows).astype(int), 0, len(lat) - 2)
    west = np.floor(columns).astype(int) % len(lon)
    down, right = (rows - north).astype("f4"), (columns - np.floor(columns)).astype("f4")
    upper, lower = (
        values[..., row, west] * (1 - right) + values[..., row, (west + 1) % len(lon)] * right
        for row in (north, north + 1)
    )
    return upper * (1 - down) + lower * down


def write_store(path: str | Path = STORE) -> Path:
    """Write the store where there is none yet: all cells and ten years a chunk. It is renamed once it is whole."""
    path = Path(path)
    if path.exists():
        return path
    with xr.open_dataset(PACKED) as packed:
        air = packed["air"].load()
    values = to_cells(air.values.astype("f4"), air["lat"].values, air["lon"].values)
    cells = xr.DataArray(values, dims=("time", "cell"), coords={"time": air["time"]})
    climatology = cells.sel(time=slice(*TRAIN_YEARS)).groupby("time.month").mean()
    anomaly = (cells.groupby("time.month") - climatology).drop_vars("month").astype("f4")
    data = xr.Dataset({"air": cells, "air_anomaly": anomaly})
    for name, unit in (("air", "degC"), ("air_anomaly", "K")):
        data[name].attrs = {"units": unit, "grid_mapping": "crs"}
    described = {"grid_mapping_name": "healpix", "refinement_level": LEVEL, "indexing_scheme": "nested"}
    data = data.assign_coords(crs=((), 0, described))
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    chunks = {name: {"chunks": (MONTHS, values.shape[1])} for name in ("air", "air_anomaly")}
    data.to_zarr(draft, zarr_format=2, consolidated=True, encoding=chunks)
    try:
        draft.rename(path)
    except OSError:  # another run was faster: its store is the same
        shutil.rmtree(draft)
    return path
