"""One training step at a quarter of a degree: 721 x 1440 points, 69 channels, 286 MB a state in float32.

    torchrun --nproc-per-node 4 examples/weather/quarter_degree.py

It generates two states in the shape and chunks of WeatherBench2's ERA5 (a chunk holds the whole globe and all levels of
a variable), runs one step of `train.py` on them, and prints what one rank would read, what each of these has read,
decoded and handed over, why so, and its peak memory.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import data
import numpy as np
import train
import zarr

STORE = data.HERE / "data" / "cache" / "quarter_degree.zarr"
STATES, LEVELS, ROWS, COLUMNS = 2, (50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000), 721, 1440
UPPER_AIR = ("geopotential", "temperature", "u_component_of_wind", "v_component_of_wind", "specific_humidity")
SURFACE = ("2m_temperature", "10m_u_component_of_wind", "10m_v_component_of_wind", "mean_sea_level_pressure")
FLAGS = ["--widths", "32,64,96,128", "--batch", "1", "--steps", "1"]


def waves(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Smooth random fields [*shape, lat, lon], periodic along longitude, of few significant bits, as if packed."""
    lat = np.linspace(np.pi / 2, -np.pi / 2, ROWS, dtype=np.float32)
    lon = np.linspace(0, 2 * np.pi, COLUMNS, endpoint=False, dtype=np.float32)
    field = np.zeros((*shape, ROWS, COLUMNS), dtype=np.float32)
    for k in range(1, 6):
        phase = generator.uniform(0, 2 * np.pi, (2, *shape, 1)).astype(np.float32)
        field += (np.sin(k * lat + phase[0]) * np.cos(lat))[..., :, None] * np.sin(k * lon + phase[1])[..., None, :] / k
    return np.rint(field * 1024) / 1024


def write(path: Path) -> None:
    """The store: variables [time, (level,) latitude, longitude], a chunk a state and variable."""
    generator = np.random.default_rng(0)
    group = zarr.open_group(path, mode="w", zarr_format=2)
    space = {"latitude": np.linspace(90, -90, ROWS), "longitude": np.arange(COLUMNS) * (360 / COLUMNS)}
    coordinates = {"time": np.arange(STATES) * 6, "level": np.array(LEVELS), **space}
    attributes = {"time": {"units": "hours since 2020-01-01"}, "level": {"units": "hPa"}}
    attributes |= {"latitude": {"units": "degrees_north"}, "longitude": {"units": "degrees_east"}}
    for name, values in coordinates.items():
        # xarray reads version 2's fill value as missing, and zarr's default is 0: the first time, the equator
        shape = values.shape
        array = group.create_array(name, shape=shape, dtype=values.dtype, chunks=shape, fill_value=None)
        array[:] = values
        array.attrs.update({"_ARRAY_DIMENSIONS": [name], **attributes[name]})
    for name in (*UPPER_AIR, *SURFACE):
        levels = (len(LEVELS),) if name in UPPER_AIR else ()
        shape = (STATES, *levels, ROWS, COLUMNS)
        array = group.create_array(name, shape=shape, dtype="float32", chunks=(1, *shape[1:]), fill_value=None)
        dims = ["time", *(["level"] if levels else []), "latitude", "longitude"]
        array.attrs.update({"_ARRAY_DIMENSIONS": dims})
        for step in range(STATES):
            array[step] = waves(levels, generator)
    zarr.consolidate_metadata(path, zarr_format=2)


if __name__ == "__main__":
    store = data.once(STORE, write, writes=int(os.environ.get("RANK", "0")) == 0)
    train.main(["--store", str(store), "--fields", ",".join((*UPPER_AIR, *SURFACE)), *FLAGS, *sys.argv[1:]])
