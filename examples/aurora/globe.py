"""A generated globe in the shape of ERA5: surface, upper air and static variables in their units, six-hourly states.

Chunks are those of WeatherBench2: a state of a variable, the whole globe and all its levels.
"""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import numpy as np
import torchvision_ops  # noqa: F401  before Aurora, which imports torchvision
import zarr
from aurora import normalisation
from aurora.normalisation import level_to_str

CACHE = Path(__file__).parent / "data" / "cache"
STATES = 6
LEVELS = (50, 100, 150, 200, 250, 300, 400, 500, 600, 700, 850, 925, 1000)
# Aurora's names, and those of the store
SURFACE = {
    "2t": "2m_temperature",
    "10u": "10m_u_component_of_wind",
    "10v": "10m_v_component_of_wind",
    "msl": "mean_sea_level_pressure",
}
AIR = {
    "z": "geopotential",
    "u": "u_component_of_wind",
    "v": "v_component_of_wind",
    "t": "temperature",
    "q": "specific_humidity",
}
STATIC = {"lsm": "land_sea_mask", "z": "geopotential_at_surface", "slt": "soil_type"}


def store(degrees: float, folder: Path = CACHE, *, writes: bool = True) -> Path:
    """The store of a grid, written on first use by the one process that `writes`; the others wait for it."""
    path = folder / f"globe_{degrees:g}.zarr"
    if writes and not path.exists():
        draft = path.with_name(f".{path.name}.{os.getpid()}")
        write(draft, degrees)
        try:
            draft.rename(path)
        except OSError:  # another run was faster: its store is the same
            shutil.rmtree(draft)
    deadline = time.monotonic() + 600
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no store at {path}: the rank that writes it has failed")
        time.sleep(0.05)
    return path


def write(path: Path, degrees: float) -> None:
    """All variables, [time,] [level,] latitude, longitude; both poles have a row."""
    lat, lon = np.linspace(90, -90, round(180 / degrees) + 1), np.arange(0, 360, degrees)
    generator = np.random.default_rng(0)
    group = zarr.open_group(path, mode="w", zarr_format=2)
    coordinates = {"time": np.arange(STATES) * 6, "level": np.array(LEVELS), "latitude": lat, "longitude": lon}
    units = {"time": "hours since 2020-01-01", "level": "hPa", "latitude": "degrees_north", "longitude": "degrees_east"}
    for name, values in coordinates.items():
        group.create_array(
            name, data=values, fill_value=None, attributes={"_ARRAY_DIMENSIONS": [name], "units": units[name]}
        )

    def add(name: str, states: int, location: np.ndarray, scale: np.ndarray) -> None:
        dims = ["time"] * bool(states) + ["level"] * location.ndim + ["latitude", "longitude"]
        one = (*location.shape, len(lat), len(lon))
        shape, chunks = ((states, *one), (1, *one)) if states else (one, one)
        named = {"_ARRAY_DIMENSIONS": dims}
        array = group.create_array(name, shape=shape, chunks=chunks, dtype="float32", fill_value=None, attributes=named)
        for step in range(max(states, 1)):
            values = location[..., None, None] + scale[..., None, None] * waves(location.shape, lat, lon, generator)
            array[step if states else ...] = values.astype("float32")

    for short, name in SURFACE.items():
        add(name, STATES, *statistics(short))
    for short, name in AIR.items():
        add(name, STATES, *statistics(short, LEVELS))
    for short, name in STATIC.items():
        add(name, 0, *statistics(short))
    zarr.consolidate_metadata(path, zarr_format=2)


def statistics(name: str, levels: tuple[int, ...] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of a variable, or of each of its levels, as Aurora knows them."""
    keys = name if levels is None else [f"{name}_{level_to_str(level)}" for level in levels]
    known = (normalisation.locations, normalisation.scales)
    return tuple(np.array(of[keys] if isinstance(keys, str) else [of[key] for key in keys]) for of in known)  # type: ignore[return-value]


def waves(levels: tuple[int, ...], lat: np.ndarray, lon: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """Smooth random fields [*levels, lat, lon], periodic along longitude."""
    rows, columns = np.deg2rad(lat, dtype="float32"), np.deg2rad(lon, dtype="float32")
    field = np.zeros((*levels, len(lat), len(lon)), dtype="float32")
    for k in range(1, 6):
        phase = generator.uniform(0, 2 * np.pi, (2, *levels, 1)).astype("float32")
        along = np.sin(k * rows + phase[0]) * np.cos(rows)
        field += along[..., :, None] * np.sin(k * columns + phase[1])[..., None, :] * (2 / k)
    return field
