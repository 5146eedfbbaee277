"""The contenders: each a function that opens a store and gives back what reads its rank's box of samples.

``opened(task, folder)`` gives ``read(samples)``, which yields an array [T, C, *space] a sample, and the settings.  All
have the same thread budget, keep no decoded data, and read into memory in the shape that a model takes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import jigsaw_side
import numpy as np
from team import Task

Read = Callable[..., Iterator[Any]]
Opened = tuple[Read, dict[str, Any]]

ZARR = ("zarr", "zarr+zarrs", "tensorstore", "xarray", "xarray+dask", "full-read-then-slice")
LOADERS = ("xbatcher+DataLoader-0", "xbatcher+DataLoader-1", "xbatcher+DataLoader-2")
HDF5 = ("h5py", "h5netcdf", "netCDF4", "xarray", "xarray+dask")
VOLUMES = ("monai", "nibabel")


_open: list[Any] = []  # files whose variables do not keep them open


def opened(task: Task, folder: str) -> Opened:
    """Open a contender's store in this process."""
    if task.engine.startswith("jigsaw"):
        read, settings = jigsaw_side.opened(task, folder)
    else:
        name, _, workers = task.engine.partition("+DataLoader-")
        open_with = {
            "bare-loop": jigsaw_side.bare_loop,
            "bare-loop-kept": jigsaw_side.bare_loop,
            "zarr": zarr_slices,
            "zarr+zarrs": zarrs_slices,
            "tensorstore": tensorstore_slices,
            "xarray": xarray_slices,
            "xarray+dask": dask_slices,
            "xbatcher": xbatcher_batches,
            "full-read-then-slice": whole_then_slice,
            "h5py": h5py_slices,
            "h5netcdf": h5netcdf_slices,
            "netCDF4": netcdf4_slices,
            "monai": monai_crops,
            "nibabel": nibabel_crops,
        }[name]
        read, settings = open_with(task, int(workers)) if workers else open_with(task)
    return read, {"threads": task.threads, **settings}


def left(task: Task) -> None:
    """End what `opened` began."""
    if task.engine.startswith("jigsaw"):
        jigsaw_side.left()


def versions(*names: str) -> dict[str, str]:
    return {name: version(name) for name in names}


def steps(task: Task, sample: int) -> slice:
    return slice(sample * task.per_sample, (sample + 1) * task.per_sample)


def one_by_one(task: Task, read: Callable[[slice], np.ndarray]) -> Read:
    """What reads the steps of a sample, as what reads samples."""

    def samples(wanted: Sequence[int]) -> Iterator[np.ndarray]:
        for sample in wanted:
            yield read(steps(task, sample))

    return samples


def channels(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts, axis=1)


# -- Zarr ------------------------------------------------------------------------------------------------------------


def _zarr_group(task: Task, **config: Any) -> tuple[Any, dict[str, Any]]:
    import zarr
    from numcodecs import blosc  # pyright: ignore[reportAttributeAccessIssue]

    blosc.use_threads = task.threads > 1
    blosc.set_nthreads(task.threads)
    # its default of concurrent requests stays: while one chunk is decoded the next may be read
    config |= {"threading.max_workers": task.threads}
    zarr.config.set(config)
    settings = {**versions("zarr", "numcodecs"), **config, "async.concurrency": zarr.config.get("async.concurrency")}
    return zarr.open_group(task.path, mode="r"), settings | {"blosc.use_threads": blosc.use_threads}


def _zarr_reader(task: Task, group: Any) -> Read:
    arrays = [group[name] for name in task.variables]  # their metadata is read once
    if "image" in task.variables:
        import zarr

        scans = [zarr.open_group(path, mode="r")["image"] for path in task.paths]
        return lambda wanted: (scans[n][task.box].astype("f4")[None, None] for n in wanted)
    return one_by_one(task, lambda t: channels([array[(t, slice(None), *task.box)] for array in arrays]))


def zarr_slices(task: Task) -> Opened:
    """Slices of `zarr` arrays."""
    group, settings = _zarr_group(task)
    return _zarr_reader(task, group), settings


def zarrs_slices(task: Task) -> Opened:
    """Slices of `zarr` arrays through the codec pipeline of zarrs, which may not fall back to that of zarr."""
    pipeline = {"codec_pipeline.path": "zarrs.ZarrsCodecPipeline", "codec_pipeline.strict": True}
    group, settings = _zarr_group(task, **pipeline)
    return _zarr_reader(task, group), {**versions("zarrs"), **settings}


def whole_then_slice(task: Task) -> Opened:
    """The whole globe, of which the rank keeps its rows."""
    group, settings = _zarr_group(task)
    arrays = [group[name] for name in task.variables]
    box = (slice(None), slice(None), *task.box)
    return one_by_one(task, lambda t: channels([array[t] for array in arrays])[box].copy()), settings


def tensorstore_slices(task: Task) -> Opened:
    """Slices of tensorstore's arrays, all variables in flight at once."""
    import tensorstore as ts

    limits = {
        "data_copy_concurrency": {"limit": task.threads},
        "file_io_concurrency": {"limit": task.threads},
        "cache_pool": {"total_bytes_limit": 0},
    }
    context = ts.Context(limits)

    def array(name: str) -> Any:
        folder = os.path.join(task.path, name)
        driver = "zarr3" if os.path.exists(os.path.join(folder, "zarr.json")) else "zarr"
        return ts.open({"driver": driver, "kvstore": {"driver": "file", "path": folder}}, context=context).result()

    arrays = [array(name) for name in task.variables]

    def read(t: slice) -> np.ndarray:
        space = [rows.stop - rows.start for rows in task.box]
        levels = arrays[0].shape[1]
        out = np.empty((task.per_sample, levels * len(arrays), *space), "f4")
        under_way = [
            ts.array(out[:, n * levels : (n + 1) * levels], context=context).write(a[(t, slice(None), *task.box)])
            for n, a in enumerate(arrays)
        ]
        for each in under_way:
            each.result()
        return out

    return one_by_one(task, read), {**versions("tensorstore"), **limits}


# -- xarray ----------------------------------------------------------------------------------------------------------


def _dataset(task: Task, **how: Any) -> tuple[Any, dict[str, Any]]:
    import xarray as xr

    settings = versions("xarray")
    if task.path.endswith(".zarr"):
        settings |= _zarr_group(task)[1]
        how |= {"engine": "zarr", "consolidated": False}
    else:
        settings |= versions("h5netcdf", "h5py")
        how |= {"engine": "h5netcdf"}
        if task.variables == ("fields",):
            how |= {"phony_dims": "access", "decode_coords": False}
    how |= {"mask_and_scale": False, "cache": False}
    data = xr.open_dataset(task.path, **how)
    return data, settings | {f"open_dataset.{k}": v for k, v in how.items()}


def _parts(task: Task, data: Any) -> Callable[[slice], list[Any]]:
    """What makes a list of a sample's variables, not read yet."""

    def parts(t: slice) -> list[Any]:
        return [data[name][(t, slice(None), *task.box)] for name in task.variables]

    return parts


def xarray_slices(task: Task) -> Opened:
    """Slices of an `xarray.Dataset` without dask."""
    data, settings = _dataset(task, chunks=None)
    parts = _parts(task, data)
    return one_by_one(task, lambda t: channels([part.values for part in parts(t)])), settings


def dask_slices(task: Task) -> Opened:
    """An `xarray.Dataset` of dask arrays in the store's chunks, computed by dask's threads, all variables at once."""
    import dask

    dask.config.set(scheduler="threads", num_workers=task.threads)
    data, settings = _dataset(task, chunks={})
    parts = _parts(task, data)

    def read(t: slice) -> np.ndarray:
        return channels([part.values for part in dask.compute(*parts(t))])

    settings |= {**versions("dask"), "dask.scheduler": "threads", "dask.num_workers": task.threads}
    return one_by_one(task, read), settings


def stacked(batch: Any) -> Any:
    """The variables of an xbatcher batch as channels of one tensor."""
    import torch

    return torch.from_numpy(channels([batch[name].values for name in batch.data_vars]))


class OneThread:
    """What a worker of a `DataLoader` begins with: it is a process of its own, and has the same thread budget."""

    def __init__(self, threads: int) -> None:
        self.threads = threads

    def __call__(self, worker: int) -> None:
        import torch
        import zarr
        from numcodecs import blosc  # pyright: ignore[reportAttributeAccessIssue]

        torch.set_num_threads(self.threads)
        zarr.config.set({"threading.max_workers": self.threads})
        blosc.use_threads = self.threads > 1


def xbatcher_batches(task: Task, workers: int) -> Opened:
    """Batches of xbatcher through a `torch.utils.data.DataLoader` with `workers` spawned processes."""
    import torch
    import xbatcher
    from torch.utils.data import DataLoader
    from xbatcher.loaders.torch import MapDataset

    torch.set_num_threads(task.threads)
    data, settings = _dataset(task, chunks=None)
    mine = data[list(task.variables)].isel(dict(zip(("latitude", "longitude"), task.box, strict=True)))
    mine = mine.drop_vars(list(mine.coords))
    dims = {**mine.sizes, "time": task.per_sample}  # a dim that is not named would be stacked point by point
    batches = MapDataset(xbatcher.BatchGenerator(mine, input_dims=dims), transform=stacked)
    order: list[int] = []
    how: dict[str, Any] = {"num_workers": workers}
    if workers:
        how |= {"multiprocessing_context": "spawn", "persistent_workers": True, "prefetch_factor": 2}
    started = OneThread(task.threads) if workers else None
    loader = DataLoader(batches, batch_size=None, sampler=order, worker_init_fn=started, **how)

    def read(wanted: Sequence[int], step_s: float = 0.0) -> Iterator[Any]:
        order[:] = wanted
        return jigsaw_side.stepped((batch.numpy() for batch in loader), step_s)

    return read, {**versions("xbatcher", "torch"), **settings, **how}


# -- HDF5 ------------------------------------------------------------------------------------------------------------


def h5py_slices(task: Task) -> Opened:
    """Slices of datasets into memory that is allocated once a sample, as makani reads its year files."""
    import h5py

    f = h5py.File(task.path, "r", rdcc_nbytes=0)
    arrays = [f[name] for name in task.variables]
    pool = ThreadPoolExecutor(task.threads)

    def read(t: slice) -> np.ndarray:
        size = arrays[0].shape[1]
        out = np.empty((task.per_sample, size * len(arrays), *task.extents), "f4")

        def one(each: tuple[int, int]) -> None:
            n, step = each
            arrays[n].read_direct(out, np.s_[t.start + step, :, *task.box], np.s_[step, n * size : (n + 1) * size])

        list(pool.map(one, [(n, step) for n in range(len(arrays)) for step in range(task.per_sample)]))
        return out

    settings = {**versions("h5py"), "hdf5": h5py.version.hdf5_version, "rdcc_nbytes": 0, "read": "read_direct"}
    return one_by_one(task, read), settings


def h5netcdf_slices(task: Task) -> Opened:
    """Slices of h5netcdf's variables."""
    import h5netcdf

    f = h5netcdf.File(task.path, "r", phony_dims="access", rdcc_nbytes=0)
    _open.append(f)
    arrays = [f[name] for name in task.variables]
    read = one_by_one(task, lambda t: channels([array[(t, slice(None), *task.box)] for array in arrays]))
    return read, {**versions("h5netcdf", "h5py"), "rdcc_nbytes": 0}


def netcdf4_slices(task: Task) -> Opened:
    """Slices of netCDF4's variables, neither masked nor scaled."""
    import netCDF4

    f = netCDF4.Dataset(task.path)
    _open.append(f)
    f.set_auto_maskandscale(False)
    arrays = [f[name] for name in task.variables]
    for array in arrays:
        array.set_var_chunk_cache(0, 1, 0.0)
    read = one_by_one(task, lambda t: channels([np.asarray(a[(t, slice(None), *task.box)]) for a in arrays]))
    return read, {**versions("netCDF4"), "auto_maskandscale": False, "var_chunk_cache": 0}


# -- volumes ---------------------------------------------------------------------------------------------------------


def monai_crops(task: Task) -> Opened:
    """MONAI's `LoadImage` by its `NibabelReader`, then `SpatialCrop`."""
    import torch
    from monai.data import NibabelReader
    from monai.transforms import Compose, LoadImage, SpatialCrop

    torch.set_num_threads(task.threads)
    spatial = task.box[::-1]  # NIfTI's order
    transform = Compose([
        LoadImage(NibabelReader(), image_only=True, dtype=np.float32, ensure_channel_first=True),
        SpatialCrop(roi_start=[r.start for r in spatial], roi_end=[r.stop for r in spatial]),
    ])  # fmt: skip

    def read(wanted: Sequence[int]) -> Iterator[np.ndarray]:
        for scan in wanted:
            found: Any = transform(task.paths[scan])
            yield np.ascontiguousarray(found[0].numpy().transpose(2, 1, 0)[None, None])

    return read, versions("monai", "nibabel", "torch")


def nibabel_crops(task: Task) -> Opened:
    """Slices of nibabel's `dataobj`, which reads no more of an uncompressed file than it must."""
    import nibabel as nib

    images = [nib.load(path) for path in task.paths]

    def read(wanted: Sequence[int]) -> Iterator[np.ndarray]:
        for scan in wanted:
            image: Any = images[scan]
            values = np.asarray(image.dataobj[task.box[::-1]], np.float32)
            yield np.ascontiguousarray(values.transpose(2, 1, 0)[None, None])

    return read, versions("nibabel")
