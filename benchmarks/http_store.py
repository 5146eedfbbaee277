"""Reads from an HTTP server that answers after 20 ms: one JSON object a case on stdout.

    python benchmarks/http_store.py --latency 0.02 --rate 125e6

nginx serves the stores, and a proxy in a process of its own waits before each answer and passes at most `--rate` bytes
a second in all, as a network would.  `limit` is what the same proxy gives to 32 threads that fetch the same objects
with plain obstore and do nothing else, `reference_share` its part of `--rate`; `share` is the part of it that
`jigsaw.io.DataLoader` reaches while it decodes every sample.  `cpu_s` are its CPU seconds over all samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

HELPERS = Path(__file__).parents[1] / "tests" / "io"
# rows, steps, chunks [time, level, lat, lon], shard or None
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...] | None]] = {
    "globe": ((1, 13, 181, 360), None),
    "level": ((1, 1, 181, 360), None),
    "shard": ((1, 1, 91, 180), (1, 13, 182, 360)),
}
VARIABLES = ("geopotential", "temperature", "u_component_of_wind", "specific_humidity")
ROWS = (181, 360)


def make_store(path: Path, case: str, steps: int) -> None:
    """Values of 16 bits in float32, as unpacked GRIB has them."""
    import zarr

    chunks, shard = CASES[case]
    group: Any = zarr.open_group(str(path), mode="w")
    rng = np.random.default_rng(0)
    blosc = zarr.codecs.BloscCodec(cname="lz4", clevel=5, shuffle="shuffle")
    for name in VARIABLES:
        made = _array(group, name, (steps, 13, *ROWS), chunks, "f4", ("time", "level", "latitude", "longitude"),
                      compressors=blosc, shards=shard)  # fmt: skip
        for t in range(steps):
            made[t] = 250 + rng.integers(0, 4096, (13, *ROWS)).astype("f4") / 64
    for name, values, units in (
        ("time", np.arange(steps) * 6, "hours since 2020-01-01"),
        ("level", np.arange(13) * 50 + 50, "hPa"),
        ("latitude", np.linspace(90, -90, ROWS[0]), "degrees_north"),
        ("longitude", np.arange(ROWS[1]) * 1.0, "degrees_east"),
    ):
        _array(group, name, values.shape, values.shape, values.dtype, (name,), attributes={"units": units})[:] = values
    zarr.consolidate_metadata(group.store)


def _array(group: Any, name: str, shape: Any, chunks: Any, dtype: Any, dims: Any, **more: Any) -> Any:
    return group.create_array(name, shape=shape, chunks=chunks, dtype=dtype, dimension_names=dims, **more)


class Server:
    """nginx behind the slow proxy, in processes of their own."""

    def __init__(self, root: Path, folder: Path, latency: float, rate: float) -> None:
        sys.path.insert(0, str(HELPERS))
        from remote_servers import nginx  # pyright: ignore[reportMissingImports]

        self._nginx = nginx(root, folder)
        upstream = self._nginx.__enter__()
        command = [sys.executable, str(HELPERS / "fault_proxy.py"), "--upstream", upstream]
        command += ["--latency", str(latency), "--rate", str(rate)]
        self._proxy = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._proxy.stdout is not None
        self.address = json.loads(self._proxy.stdout.readline())["address"]

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *error: Any) -> None:
        self._proxy.communicate("\n", timeout=20)
        self._nginx.__exit__(None, None, None)


def limit(store: Any, root: Path, case: str) -> float:
    """Bytes a second of 32 threads that fetch the case's chunks, whole objects in pieces of at most 2 MB."""
    import obstore

    paths = [p for p in sorted((root / case).rglob("*")) if p.is_file() and "c" in p.relative_to(root / case).parts]
    pieces = [
        (str(p.relative_to(root)), at, min(2 << 20, p.stat().st_size - at))
        for p in paths
        for at in range(0, p.stat().st_size, 2 << 20)
    ]

    def fetch(piece: tuple[str, int, int]) -> int:
        path, start, length = piece
        return len(obstore.get_range(store, path, start=start, length=length))

    with ThreadPoolExecutor(32) as pool:
        begun = time.perf_counter()
        return sum(pool.map(fetch, pieces)) / (time.perf_counter() - begun)


def reach(address: str, case: str) -> tuple[float, float]:
    """Bytes a second that a loader reads over one epoch, and its CPU seconds."""
    import jigsaw

    mesh = jigsaw.init_mesh(data=1, device="cpu")
    ds = jigsaw.io.open(f"http://{address}/{case}", mesh=mesh, fields=list(VARIABLES))
    loader = jigsaw.io.DataLoader(ds, batch_size=1, shuffle=False)
    begun, busy = time.perf_counter(), time.process_time()
    for batch in loader:
        assert float(batch.input.local[0, 0, 0, 0, 0]) >= 250
    taken, busy = time.perf_counter() - begun, time.process_time() - busy
    read = loader.bytes_read
    loader.close()
    return read / taken, busy


def run(case: str, latency: float, rate: float, steps: int, repeat: int) -> dict[str, Any]:
    """One case; medians of interleaved runs."""
    from obstore.store import HTTPStore

    with tempfile.TemporaryDirectory() as made:
        root, folder = Path(made, "www"), Path(made, "nginx")
        root.mkdir()
        folder.mkdir()
        make_store(root / case, case, steps)
        with Server(root, folder, latency, rate) as server:
            store = HTTPStore(f"http://{server.address}", client_options={"allow_http": True})
            limit(store, root, case)  # its connections, and the files in the page cache
            reach(server.address, case)
            runs = [(limit(store, root, case), *reach(server.address, case)) for _ in range(repeat)]
    limits, reached, busy = (statistics.median(each) for each in zip(*runs, strict=True))
    return {
        "case": case,
        "latency_s": latency,
        "rate_bytes_per_s": rate,
        "limit_bytes_per_s": round(limits),
        "reached_bytes_per_s": round(reached),
        "reference_share": round(limits / rate, 3),
        "share": round(statistics.median(one / other for other, one, _ in runs), 3),
        "cpu_s": round(busy, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--latency", type=float, default=0.02)
    parser.add_argument("--rate", type=float, default=125e6)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    for case in asked.case:
        print(json.dumps(run(case, asked.latency, asked.rate, asked.steps, asked.repeat)), flush=True)


if __name__ == "__main__":
    main()
