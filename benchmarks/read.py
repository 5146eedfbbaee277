"""Reads one sample pair of ERA5-shaped data on several ranks, each its own tile: one JSON object a case on stdout.

    python benchmarks/read.py --ranks 4 --mesh lat=2,lon=2 --store wb2 --engine jigsaw

Every engine gives every rank the same tile of two consecutive steps of four variables (432 MB over the globe), which
the checksum shows.  `jigsaw` reads cooperatively, each chunk decoded once; left to itself it reads `tiles` and `shard`
as `jigsaw-independent` does, which is cheaper where few chunks are shared.  The stores hold the same bits in other
chunks: `wb2` the whole globe and all levels of a step, like WeatherBench2; `level` a level of the globe; `tiles` 91 x
180 rows of all levels; `shard` such tiles of one level inside a shard a step.  Interpreters, imports, opening and one
read that warms the page cache come first and are not counted; then `--repeat` reads are.  `wall_s` and `cpu_s` (user
and system, all threads of all ranks) are means of one read; `peak_rss_bytes` is that of the largest rank, shared memory
that it touched included.  Bytes are sums over the ranks, and `amplification` is what they decode over the needed chunks
decoded once.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

ENGINES = ("jigsaw", "jigsaw-independent", "zarr", "xarray", "full-read-then-slice")
VARIABLES = {"geopotential": 54e3, "temperature": 250.0, "u_component_of_wind": 10.0, "specific_humidity": 3e-3}
STEPS, LEVELS = 2, 13
ROWS = {False: (721, 1440), True: (73, 144)}
# chunks [time, level, lat, lon] at full size and at toy size; a shard is a whole step
CHUNKS = {
    "wb2": ((1, 13, 721, 1440), (1, 13, 73, 144)),
    "level": ((1, 1, 721, 1440), (1, 1, 73, 144)),
    "tiles": ((1, 13, 91, 180), (1, 13, 10, 18)),
    "shard": ((1, 1, 91, 180), (1, 1, 10, 18)),
}


# -- data ------------------------------------------------------------------------------------------------------------


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


def make_store(path: Path, layout: str, small: bool) -> None:
    """Write one store, whole or not at all; the same bits in every layout."""
    import zarr
    from numcodecs import Blosc

    rows = ROWS[small]
    chunks = CHUNKS[layout][small]
    path.parent.mkdir(parents=True, exist_ok=True)
    half = Path(tempfile.mkdtemp(dir=path.parent))
    group: Any = zarr.open_group(str(half), mode="w", zarr_format=3 if layout == "shard" else 2)
    more: dict[str, Any] = {"compressors": Blosc("lz4", 5, Blosc.SHUFFLE)}  # zarr v2's default, WeatherBench2's
    if layout == "shard":
        tile = tuple(-(-n // c) * c for n, c in zip(rows, chunks[2:], strict=True))
        blosc = zarr.codecs.BloscCodec(cname="lz4", clevel=5, shuffle="shuffle")
        more = {"compressors": blosc, "shards": (1, 13, *tile)}
    for n, (name, mean) in enumerate(VARIABLES.items()):
        shape = (STEPS, LEVELS, *rows)
        made = _array(group, name, shape, chunks, "f4", ("time", "level", "latitude", "longitude"), {}, **more)
        rng = np.random.default_rng(n)
        for t in range(STEPS):
            made[t] = np.stack([field(rng, rows, mean) for _ in range(LEVELS)])
    time_units = {"units": "hours since 2020-01-01", "calendar": "proleptic_gregorian"}
    for name, values, attributes in (
        ("time", np.arange(STEPS, dtype="i8") * 6, time_units),
        ("level", np.arange(LEVELS, dtype="i8") * 50 + 50, {"units": "hPa"}),
        ("latitude", np.linspace(90, -90, rows[0]), {"units": "degrees_north"}),
        ("longitude", np.arange(rows[1]) * (360 / rows[1]), {"units": "degrees_east"}),
    ):
        _array(group, name, values.shape, values.shape, values.dtype, (name,), attributes)[...] = values
    half.rename(path)


def _array(group: Any, name: str, shape: Any, chunks: Any, dtype: Any, dims: Any, attrs: Any, **more: Any) -> Any:
    """An array without a fill value, so that nobody looks for missing data."""
    if group.metadata.zarr_format == 2:
        more |= {"attributes": {**attrs, "_ARRAY_DIMENSIONS": list(dims)}, "fill_value": None}
    else:
        more |= {"attributes": attrs, "dimension_names": dims, "fill_value": 0}
    return group.create_array(name, shape=shape, chunks=chunks, dtype=dtype, **more)


# -- engines: each makes a function that reads this rank's tile [T, C, lat, lon] -------------------------------------


def jigsaw_reader(path: str, mesh: Any, mode: str) -> tuple[Callable[[], np.ndarray], Any]:
    import jigsaw

    ds = jigsaw.io.open(path, mesh=mesh, fields=list(VARIABLES), inputs=[0, 1], mode=mode)

    def read() -> np.ndarray:
        return ds[0].input.local.numpy()

    return read, ds.plan(0)


def tile_of(mesh: Any, rows: tuple[int, int]) -> tuple[slice, slice]:
    import jigsaw
    from jigsaw.mesh import axes_of, coordinate

    box = jigsaw.Layout.of(rows, ("lat", "lon"), axes_of(mesh)).owned(coordinate(mesh))
    return slice(*box[0]), slice(*box[1])


def channels(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts, axis=1)


def zarr_reader(path: str, mesh: Any, rows: tuple[int, int]) -> Callable[[], np.ndarray]:
    import zarr

    group: Any = zarr.open_group(path, mode="r")
    lat, lon = tile_of(mesh, rows)
    return lambda: channels([group[name][:, :, lat, lon] for name in VARIABLES])


def xarray_reader(path: str, mesh: Any, rows: tuple[int, int]) -> Callable[[], np.ndarray]:
    import xarray as xr

    data = xr.open_zarr(path, chunks=None, consolidated=False)
    lat, lon = tile_of(mesh, rows)
    return lambda: channels([data[name].isel(latitude=lat, longitude=lon).values for name in VARIABLES])


def full_reader(path: str, mesh: Any, rows: tuple[int, int]) -> Callable[[], np.ndarray]:
    import zarr

    group: Any = zarr.open_group(path, mode="r")
    lat, lon = tile_of(mesh, rows)
    return lambda: channels([group[name][...][:, :, lat, lon] for name in VARIABLES])


def reader(engine: str, path: str, mesh: Any, rows: tuple[int, int]) -> tuple[Callable[[], np.ndarray], dict[str, Any]]:
    """The read function of an engine, and the bytes that it reads on all ranks."""
    if engine in ("jigsaw", "jigsaw-independent"):
        read, plan = jigsaw_reader(path, mesh, "cooperative" if engine == "jigsaw" else "independent")
        return read, bytes_of(plan, plan.total)
    read = {"zarr": zarr_reader, "xarray": xarray_reader, "full-read-then-slice": full_reader}[engine](path, mesh, rows)
    _, plan = jigsaw_reader(path, mesh, "independent")  # a library decodes every chunk that a tile touches
    total = plan.total
    if engine == "full-read-then-slice":
        total.stored_bytes = sum(plan.ref(*key).length for key in {(j.array, j.chunk) for j in plan.jobs}) * plan.ranks
        total.decoded_bytes = plan.union_bytes * plan.ranks
    return read, bytes_of(plan, total)


def bytes_of(plan: Any, total: Any) -> dict[str, Any]:
    sizes = {name: getattr(total, name) for name in ("stored_bytes", "decoded_bytes", "useful_bytes")}
    return {**sizes, "amplification": round(total.decoded_bytes / plan.union_bytes, 4)}


# -- one case on its ranks -------------------------------------------------------------------------------------------


def on_rank(rank: int, ranks: int, folder: str, case: dict[str, Any]) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(ranks))
    import torch
    import torch.distributed as dist

    import jigsaw

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=ranks)
    result = run_case(case, jigsaw.init_mesh(device="cpu", **case["mesh"]))
    if rank == 0:
        Path(folder, "result").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def run_case(case: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """Read on every rank of the mesh; the result, on each of them."""
    import torch.distributed as dist

    read, sizes = reader(case["engine"], case["path"], mesh, ROWS[case["small"]])
    check = zlib.crc32(np.ascontiguousarray(read()))
    wall = cpu = 0.0
    for _ in range(case["repeat"]):
        dist.barrier()
        used, since = cpu_seconds(), time.perf_counter()
        tile = read()
        wall, cpu = wall + time.perf_counter() - since, cpu + cpu_seconds() - used
        del tile
    found: list[Any] = [None] * mesh.size()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    dist.all_gather_object(found, (wall / case["repeat"], cpu / case["repeat"], peak, check))
    walls, cpus, peaks, checks = zip(*found, strict=True)
    result = {"engine": case["engine"], "store": case["store"], "ranks": mesh.size(), "mesh": case["mesh"]}
    result |= {"wall_s": round(max(walls), 4), "cpu_s": round(sum(cpus), 4), **sizes}
    return result | {"peak_rss_bytes": max(peaks), "checksum": f"{zlib.crc32(repr(checks).encode()):08x}"}


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(case: dict[str, Any], ranks: int) -> dict[str, Any]:
    """One case on processes of its own."""
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        processes = [spawn.Process(target=on_rank, args=(rank, ranks, folder, case)) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(f"{case['engine']} on {case['store']}: exit codes {[process.exitcode for process in processes]}")
        return json.loads(Path(folder, "result").read_text())


def axes(text: str) -> dict[str, int]:
    return {name: int(size) for name, size in (pair.split("=") for pair in text.split(","))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--mesh", type=axes, default=None, help="such as lat=2,lon=2; by default the ranks cut lat")
    parser.add_argument("--store", choices=[*CHUNKS, "all"], default="all")
    parser.add_argument("--engine", choices=[*ENGINES, "all"], default="all")
    parser.add_argument("--repeat", type=int, default=3, help="reads that are measured")
    parser.add_argument("--data", type=Path, default=Path(__file__).parent / "data", help="where the stores are kept")
    parser.add_argument("--small", action="store_true", help="toy size")
    parser.add_argument("--fresh", action="store_true", help="make the stores again")
    args = parser.parse_args()
    args.mesh = args.mesh or ({"lat": 2, "lon": 2} if args.ranks == 4 else {"lat": args.ranks})
    for store in CHUNKS if args.store == "all" else [args.store]:
        path = args.data / f"{store}-{'small' if args.small else 'full'}.zarr"
        if args.fresh:
            shutil.rmtree(path, ignore_errors=True)
        if not path.exists():
            make_store(path, store, args.small)
        for engine in ENGINES if args.engine == "all" else [args.engine]:
            case = {"engine": engine, "store": store, "path": str(path), "mesh": args.mesh}
            print(json.dumps(measure(case | {"repeat": args.repeat, "small": args.small}, args.ranks)), flush=True)


if __name__ == "__main__":
    main()
