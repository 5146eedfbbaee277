"""What planning costs one rank of many: processor milliseconds of one process, no ranks needed; one JSON object a case.

    python benchmarks/planning.py --output benchmarks/results/planning-MACHINE-MONTH.jsonl

A sample is one step of 100 fields of 721 x 1440 with a halo of 2, wrapped in longitude: 8 variables of 10 levels and
20 of one.  Stores (`--store`): `globe`, Zarr in chunks of one level's globe, Blosc's lz4; `tiles`, Zarr in 8 x 8 chunks
a level, Blosc too, 6400 files a sample; `hdf5`, chunks of the globe, deflated.  All chunks hold the same bytes, as
links to one file or a copy.  The mesh is given as sizes, lat x lon as square as they go, and the rank is the one in its
middle.

`open_ms` is `jigsaw.io.open`, with the plan of sample 0 that it makes; `first_ms` the plan of the first sample that is
read, `next_ms` that of each sample after it, the median.  A plan is all that a rank works out before it loads: who
loads what, the number that ranks compare, and its own chunks and boxes.  The other rows (`--integers`) are what layers
ask: `layout`, the boxes of all ranks; `exchange`, one rank's plan of a halo; `redistribute`, of rows to columns; `grid`
and `every_grid`, the choice of a matrix product's grid on these axes, and on any.  `busiest` is what the busiest rank
loads over the mean, of 100 fields in 64 tiles whose sizes differ by tile (a fifth of them 20-fold) and field: where
each is asked for its size, and where they are too many to be asked.  Each case runs in a process of its
own, so nothing is kept from the case before.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from stores import coordinates, field

import jigsaw
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.matmul_grid import candidate_grids, choose_grid
from jigsaw.geometry.transfers import plan_exchange
from jigsaw.io.reading.chunk_readers import NO_OWNER, owners_of_jobs
from jigsaw.io.reading.read_plan import ReadPlan

STORES = ("globe", "tiles", "hdf5")
MESHES = {1: (1, 1), 8: (2, 4), 64: (8, 8), 512: (16, 32), 4096: (64, 64)}
STEPS, DEEP, FLAT, LEVELS = 6, 8, 20, 10
ROWS, TILE = (721, 1440), (91, 180)


# -- stores ----------------------------------------------------------------------------------------------------------


def write_store(folder: Path, store: str) -> Path:
    """Write a store, if it is not there."""
    path = folder / f"{store}.{'h5' if store == 'hdf5' else 'zarr'}"
    if not path.exists():
        values = field(np.random.default_rng(0), ROWS, 250.0)
        (_write_hdf5 if store == "hdf5" else _write_zarr)(path, values, TILE if store == "tiles" else ROWS)
    return path


def _names() -> dict[str, tuple[str, ...]]:
    """The arrays and their dims before space."""
    deep = {f"deep{i}": ("time", "level") for i in range(DEEP)}
    return deep | {f"flat{i}": ("time",) for i in range(FLAT)}


def _write_zarr(path: Path, values: Any, tile: tuple[int, int]) -> None:
    import zarr
    from numcodecs import Blosc

    group, kept = zarr.open_group(path, mode="w", zarr_format=2), Path(f"{path}-chunk")
    sizes = {"time": STEPS, "level": LEVELS}
    kept.write_bytes(Blosc("lz4", 5, 1).encode(np.ascontiguousarray(values[: tile[0], : tile[1]])))
    for name, dims in _names().items():
        shape = *(sizes[d] for d in dims), *ROWS
        chunks = *(1 for _ in dims), *tile
        array = group.create_array(name, shape=shape, chunks=chunks, dtype="f4", compressors=Blosc("lz4", 5, 1))
        array.attrs["_ARRAY_DIMENSIONS"] = (*dims, "latitude", "longitude")
        for at in np.ndindex(*(-(-n // c) for n, c in zip(shape, chunks, strict=True))):
            os.link(kept, path / name / ".".join(map(str, at)))
    for name, points, attrs in coordinates(ROWS, STEPS):
        points = points[:LEVELS] if name == "level" else points
        array = group.create_array(name, shape=points.shape, dtype=points.dtype)
        array[:] = points
        array.attrs.update(attrs | {"_ARRAY_DIMENSIONS": (name,)})
    zarr.consolidate_metadata(path)


def _write_hdf5(path: Path, values: Any, _: tuple[int, int]) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for name, points, attrs in coordinates(ROWS, STEPS):
            file[name] = points[:LEVELS] if name == "level" else points
            file[name].make_scale(name)
            file[name].attrs.update(attrs)
        packed = None
        for name, dims in _names().items():
            shape = *(len(file[d]) for d in dims), *ROWS
            how = {"chunks": (*(1 for _ in dims), *ROWS), "compression": "gzip", "compression_opts": 1}
            array = file.create_dataset(name, shape, "f4", **how)
            for d, dim in enumerate((*dims, "latitude", "longitude")):
                array.dims[d].attach_scale(file[dim])
            if packed is None:
                array[(0,) * len(dims)] = values
                packed = array.id.read_direct_chunk((0,) * len(shape))[1]
            for at in np.ndindex(*shape[:-2]):
                array.id.write_direct_chunk((*at, 0, 0), packed)


# -- cases -----------------------------------------------------------------------------------------------------------


def milliseconds(call: Callable[[], Any]) -> tuple[Any, float]:
    """What a call gives, and the processor milliseconds of this process in it."""
    began = time.process_time()
    return call(), round((time.process_time() - began) * 1e3, 3)


def read_case(path: Path, ranks: int, mode: str) -> dict[str, Any]:
    """What planning costs the rank in the middle."""
    lat, lon = MESHES[ranks]
    member = (lat // 2) * lon + lon // 2

    def opened() -> Any:
        how = {"halo": 2, "boundary": {"lon": "periodic"}, "mode": mode}
        return jigsaw.io.open(path, mesh={"lat": lat, "lon": lon}, **how)

    def planned(data: Any, sample: int) -> ReadPlan:
        plan = data.plan_of(data.reading([sample]))
        assert plan.digest
        mine = [*plan.private(member), *plan.shared.read_by(member)]
        assert sum(len(plan.boxes(job, member)) for job in mine) >= 100
        return plan

    data, open_ms = milliseconds(opened)
    plan, first_ms = milliseconds(lambda: planned(data, 1))
    later = [milliseconds(lambda sample=sample: planned(data, sample))[1] for sample in range(2, STEPS)]
    return {
        "chunks": sum(map(len, plan.needed.readers.values())),
        "modes": sorted(set(plan.modes.values())),
        "open_ms": open_ms,
        "first_ms": first_ms,
        "next_ms": round(statistics.median(later), 3),
    }


def integer_case(ranks: int) -> dict[str, float]:
    """What layers ask of layouts, exchanges and grids."""
    axes = dict(zip(("lat", "lon"), MESHES[ranks], strict=True))
    spec, shape = (None, None, "lat", "lon"), (1, 100, *ROWS)

    def boxes() -> Any:
        layout = Layout.of(shape, spec, axes, halo={2: 2, 3: 2}, periodic=(3,))
        return [(layout.held(c), layout.local_shape(c)) for c in layout.coords()]

    rows, columns = (
        Layout.of(shape, (None, None, *cut), axes) for cut in ((("lat", "lon"), None), (None, ("lat", "lon")))
    )
    wide, bare = Layout.of(shape, spec, axes, halo={2: 2, 3: 2}, periodic=(3,)), Layout.of(shape, spec, axes)
    middle = tuple(size // 2 for size in axes.values())
    product = (721 * 1440, 1024, 4096)
    return {
        "layout_ms": milliseconds(boxes)[1],
        "exchange_ms": milliseconds(lambda: plan_exchange(bare, wide, middle))[1],
        "redistribute_ms": milliseconds(lambda: plan_exchange(rows, columns, middle))[1],
        "grid_ms": milliseconds(lambda: choose_grid(candidate_grids(product, axes)))[1],
        "every_grid_ms": milliseconds(lambda: choose_grid(candidate_grids(product, ranks)))[1],
        **busiest_rank(ranks),
    }


def busiest_rank(ranks: int) -> dict[str, float]:
    """What the busiest rank loads, in bytes over the mean: of tiles asked for their sizes, or taken as equal."""
    r = np.random.default_rng(0)
    by_tile, by_field = r.uniform(0.4, 1.6, 64), r.uniform(0.5, 1.5, 100)
    by_tile[r.permutation(64)[:12]] /= 20  # an ocean's
    sizes = (40_000 * by_field[:, None] * by_tile * r.uniform(0.9, 1.1, (100, 64))).astype(np.int64).ravel()
    found: dict[str, float] = {}
    for case, weights in (("busiest_asked", sizes), ("busiest_unasked", np.full_like(sizes, 65520))):
        owners = owners_of_jobs(weights, [NO_OWNER] * len(sizes), [0] * ranks)
        loads = np.bincount(owners, sizes, ranks)
        found[case] = round(float(loads.max() / loads.mean()), 3)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--store", action="append", choices=STORES, help="by default all")
    parser.add_argument("--ranks", action="append", type=int, choices=list(MESHES), help="by default all")
    parser.add_argument("--mode", default="auto")
    parser.add_argument("--integers", action="store_true", help="layouts, exchanges and grids alone")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "jigsaw-planning"))
    parser.add_argument("--hardware", default="")
    parser.add_argument("--output", type=Path, help="a result file, begun anew")
    parser.add_argument("--here", action="store_true", help="run the case in this process")
    args = parser.parse_args()
    ranks, stores = args.ranks or list(MESHES), [] if args.integers else args.store or STORES
    if args.here:
        found = (
            read_case(write_store(args.folder, stores[0]), ranks[0], args.mode) if stores else integer_case(ranks[0])
        )
        print(json.dumps({"case": stores[0] if stores else "integers", "ranks": ranks[0]} | found), flush=True)
        return
    args.folder.mkdir(parents=True, exist_ok=True)
    for store in stores:
        write_store(args.folder, store)
    cases = [[f"--store={store}"] for store in stores] + ([] if args.store else [["--integers"]])
    head = {
        "hardware": args.hardware,
        "date": str(datetime.date.today()),
        "command": f"python benchmarks/planning.py --mode {args.mode}",
    }
    lines = [json.dumps(head)]
    for case in cases:
        for count in ranks:
            words = [*case, f"--ranks={count}", f"--mode={args.mode}", f"--folder={args.folder}", "--here"]
            ran = subprocess.run([sys.executable, __file__, *words], stdout=subprocess.PIPE, text=True, check=True)
            print(ran.stdout, end="", flush=True)
            lines.append(ran.stdout.strip())
    if args.output:
        args.output.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
