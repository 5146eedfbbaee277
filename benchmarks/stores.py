"""The data that the reading benchmark reads: written once, kept in a folder, the same bits in every layout.

A sample is two consecutive steps of four variables of 13 levels, 432 MB at full size; `STEPS` hold several samples that
share nothing, so that a store is larger than what a reader may have kept of the sample before.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

VARIABLES = {"geopotential": 54e3, "temperature": 250.0, "u_component_of_wind": 10.0, "specific_humidity": 3e-3}
STEPS, PER_SAMPLE, LEVELS = 6, 2, 13
LONG = 24  # steps of the store that loaders go through: those of `wb2` again and again
ROWS = {False: (721, 1440), True: (37, 72)}
DIMS = ("time", "level", "latitude", "longitude")
# chunks [time, level, lat, lon] at full size and at toy size; a shard is a whole step
CHUNKS = {
    "wb2": ((1, 13, 721, 1440), (1, 13, 37, 72)),
    "level": ((1, 1, 721, 1440), (1, 1, 37, 72)),
    "tiles": ((1, 13, 91, 180), (1, 13, 10, 18)),
    "shard": ((1, 1, 91, 180), (1, 1, 10, 18)),
}
ZARR = (*CHUNKS, "long")
HDF5 = ("netcdf4", "makani")
VOLUMES = ("nifti", "nifti-gz", "volume-zarr")
SCANS = 3  # files of a store of volumes: a sample is one of them
VOXELS = {False: (256, 512, 512), True: (20, 33, 40)}  # z, y, x
_ENDINGS = {"netcdf4": "nc", "makani": "h5", "nifti": "nii", "nifti-gz": "nii.gz", "volume-zarr": "zarr"}


def path_of(folder: Path, store: str, small: bool, scan: int = 0) -> Path:
    """Where a store lies, or one scan of a store of volumes."""
    size = "toy" if small else "full"
    number = f"-{scan}" if store in VOLUMES else f"-{LONG if store == 'long' else STEPS}"
    return folder / f"{store}-{size}{number}.{_ENDINGS.get(store, 'zarr')}"


def paths_of(folder: Path, store: str, small: bool) -> list[Path]:
    return [path_of(folder, store, small, scan) for scan in range(SCANS if store in VOLUMES else 1)]


def samples_of(store: str) -> int:
    """How many samples a store has."""
    return SCANS if store in VOLUMES else (LONG if store == "long" else STEPS) // PER_SAMPLE


def made(folder: Path, store: str, small: bool) -> list[Path]:
    """The paths of a store, which is written if it is not there: whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = paths_of(folder, store, small)
    for scan, path in enumerate(paths):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as room:
                half = Path(room, path.name)
                _write(half, folder, store, small, scan)
                half.rename(path)
    return paths


def remove(folder: Path, store: str, small: bool) -> None:
    for path in paths_of(folder, store, small):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def _write(path: Path, folder: Path, store: str, small: bool, scan: int) -> None:
    if store in VOLUMES:
        write_volume(path, small, scan)
    elif store == "long":
        _repeat(made(folder, "wb2", small)[0], path)
    elif store in HDF5:
        (write_netcdf4 if store == "netcdf4" else write_makani)(path, _written(folder, small))
    else:
        write_zarr(path, store, small, None if store == "wb2" else _written(folder, small))


def _written(folder: Path, small: bool) -> Any:
    """The store that the others are copied from."""
    import zarr

    return zarr.open_group(str(made(folder, "wb2", small)[0]), mode="r")


# -- values ----------------------------------------------------------------------------------------------------------


def field(rng: np.random.Generator, rows: tuple[int, int], mean: float) -> np.ndarray:
    """A field with the k^-3 energy spectrum of large-scale flow up to wavenumber 639, packed to 16 bits as GRIB packs.

    GRIB's simple packing is reference + integer * power of two: what float32 ERA5 holds, and why it compresses.
    """
    ky, kx = np.fft.fftfreq(rows[0]) * rows[0], np.fft.rfftfreq(rows[1]) * rows[1]
    k = np.hypot(ky[:, None], kx)
    k[0, 0] = np.inf
    amplitude = np.where(k <= 639 * rows[1] / 1440, k**-2.0, 0.0)
    noise = rng.standard_normal(k.shape) + 1j * rng.standard_normal(k.shape)
    x = np.fft.irfft2(noise * amplitude, rows)
    x = mean * (1 + 0.08 * x / x.std())
    low = float(np.float32(x.min()))
    step = 2.0 ** np.ceil(np.log2((x.max() - low) / 65535))
    return (low + np.round((x - low) / step) * step).astype(np.float32)


def coordinates(rows: tuple[int, int], steps: int) -> list[tuple[str, np.ndarray, dict[str, str]]]:
    return [
        ("time", np.arange(steps, dtype="i8") * 6, {"units": "hours since 2020-01-01", "calendar": "standard"}),
        ("level", np.arange(LEVELS, dtype="i8") * 50 + 50, {"units": "hPa"}),
        ("latitude", np.linspace(90, -90, rows[0]), {"units": "degrees_north"}),
        ("longitude", np.arange(rows[1]) * (360 / rows[1]), {"units": "degrees_east"}),
    ]


# -- Zarr ------------------------------------------------------------------------------------------------------------


def write_zarr(path: Path, layout: str, small: bool, source: Any = None, steps: int = STEPS) -> None:
    """One store, of generated fields or copied from another."""
    import zarr
    from numcodecs import Blosc

    rows, chunks = ROWS[small], CHUNKS[layout][small]
    group: Any = zarr.open_group(str(path), mode="w", zarr_format=3 if layout == "shard" else 2)
    more: dict[str, Any] = {"compressors": Blosc("lz4", 5, Blosc.SHUFFLE)}  # zarr v2's default, WeatherBench2's
    if layout == "shard":
        tile = tuple(-(-n // c) * c for n, c in zip(rows, chunks[2:], strict=True))
        blosc = zarr.codecs.BloscCodec(cname="lz4", clevel=5, shuffle="shuffle")
        more = {"compressors": blosc, "shards": (1, 13, *tile)}
    for n, (name, mean) in enumerate(VARIABLES.items()):
        array = _array(group, name, (steps, LEVELS, *rows), chunks, "f4", DIMS, {}, **more)
        rng = np.random.default_rng(n)
        for t in range(steps):
            array[t] = source[name][t] if source else np.stack([field(rng, rows, mean) for _ in range(LEVELS)])
    for name, values, attributes in coordinates(rows, steps):
        _array(group, name, values.shape, values.shape, values.dtype, (name,), attributes)[...] = values


def _array(group: Any, name: str, shape: Any, chunks: Any, dtype: Any, dims: Any, attrs: Any, **more: Any) -> Any:
    """An array without a fill value, so that nobody looks for missing data."""
    if group.metadata.zarr_format == 2:
        more |= {"attributes": {**attrs, "_ARRAY_DIMENSIONS": list(dims)}, "fill_value": None}
    else:
        more |= {"attributes": attrs, "dimension_names": dims, "fill_value": 0}
    return group.create_array(name, shape=shape, chunks=chunks, dtype=dtype, **more)


def _repeat(short: Path, path: Path) -> None:
    """A store of `LONG` steps, whose chunks are links to those of a shorter one: long epochs, little disk."""
    import zarr

    source: Any = zarr.open_group(str(short), mode="r")
    group: Any = zarr.open_group(str(path), mode="w", zarr_format=2)
    rows = source[next(iter(VARIABLES))].shape[2:]
    for name in VARIABLES:
        like = source[name]
        _array(group, name, (LONG, *like.shape[1:]), like.chunks, "f4", DIMS, {}, compressors=like.compressors)
        for t in range(LONG):
            os.link(short / name / f"{t % STEPS}.0.0.0", path / name / f"{t}.0.0.0")
    for name, values, attributes in coordinates(rows, LONG):
        _array(group, name, values.shape, values.shape, values.dtype, (name,), attributes)[...] = values


# -- HDF5 ------------------------------------------------------------------------------------------------------------


def write_netcdf4(path: Path, source: Any) -> None:
    """Variables [time, level, lat, lon], a level of the globe a chunk, shuffled and deflated."""
    import netCDF4

    rows = source[next(iter(VARIABLES))].shape[2:]
    with netCDF4.Dataset(str(path), "w") as f:
        for name, values, attributes in coordinates(rows, STEPS):
            f.createDimension(name, values.size)
            made = f.createVariable(name, values.dtype, (name,))
            made.setncatts(attributes)
            made[:] = values
        for name in VARIABLES:
            made = f.createVariable(
                name, "f4", DIMS, zlib=True, complevel=4, shuffle=True, chunksizes=(1, 1, *rows), fill_value=False
            )
            for t in range(STEPS):
                made[t] = source[name][t]


def write_makani(path: Path, source: Any) -> None:
    """``fields[time, channel, lat, lon]``, a channel of the globe a chunk, shuffled and deflated."""
    import h5py

    rows = source[next(iter(VARIABLES))].shape[2:]
    with h5py.File(path, "w") as f:
        shape = (STEPS, len(VARIABLES) * LEVELS, *rows)
        how: dict[str, Any] = {"compression": "gzip", "compression_opts": 4, "shuffle": True}
        fields = f.create_dataset("fields", shape, "f4", chunks=(1, 1, *rows), **how)
        for t in range(STEPS):
            fields[t] = np.concatenate([source[name][t] for name in VARIABLES])


# -- volumes ---------------------------------------------------------------------------------------------------------


def voxels(small: bool, scan: int) -> np.ndarray:
    """Hounsfield units [z, y, x] of something like a scan: smooth inside a body, noise, air around."""
    shape, rng = VOXELS[small], np.random.default_rng(scan)
    z, y, x = np.meshgrid(*(np.linspace(-1, 1, n, dtype="f4") for n in shape), indexing="ij", sparse=True)
    body = (x / 0.8) ** 2 + (y / 0.6) ** 2 < 1 - 0.2 * z**2
    inside = 40 + 300 * np.sin(7 * x + scan) * np.cos(5 * y) * np.cos(4 * z)
    noise = rng.normal(0, 12, shape).astype("f4")
    return np.where(body, inside + noise, -1000 + noise / 4).astype("i2")


def write_volume(path: Path, small: bool, scan: int) -> None:
    values = voxels(small, scan)
    if path.suffix == ".zarr":
        import zarr
        from numcodecs import Blosc

        group: Any = zarr.open_group(str(path), mode="w", zarr_format=2)
        chunks = tuple(min(64, n) for n in values.shape)
        more = {"compressors": Blosc("lz4", 5, Blosc.SHUFFLE)}
        _array(group, "image", values.shape, chunks, "i2", ("z", "y", "x"), {}, **more)[...] = values
        return
    import nibabel as nib

    image = nib.Nifti1Image(values.T, np.diag([0.7, 0.7, 1.5, 1.0]))
    nib.save(image, path)
