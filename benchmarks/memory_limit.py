"""A sample that is too big for one rank: whole-sample steps of a 3-D U-Net, of a weather net and of a net that pools
over a slide, each process with the same limit of memory; one JSON object a number of ranks, and the page's picture.

    python benchmarks/memory_limit.py --output benchmarks/results/memory-limit-MACHINE-MONTH.jsonl
    python benchmarks/memory_limit.py --draw benchmarks/results/memory-limit-MACHINE-MONTH.jsonl

The data lies in a store on disk, of which each rank reads its tile; the nets are plain torch:
`synthetic_scans.py`'s U-Net, that of `examples/weather`, and two convolutions before a mean over the slide.
Each rank counts what it reads of the slide's file: it is the stored bytes of the tiles that its rows touch.
`limit_bytes` is RLIMIT_DATA of every process, Python and torch included: the kernel refuses more private memory, as a
device would.  Without a limit (0) a run shows what each rank takes: `data_bytes` is the most private memory at a time
(VmData, looked at every 20 ms), `resident_bytes` the most that was resident (VmHWM), of the rank that has the most.
`step_s` and `cpu_s` are the median step's, the slowest rank's, with one thread a rank; `losses` those of the steps.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

ROOT = Path(__file__).resolve().parents[1]
LIMITS = {"volume": 2.0, "weather": 3.0, "slide": 4.0}  # GiB of a process
SHAPE, WIDTH = (160, 160, 128), 16  # of the volume, of its U-Net
WIDTHS = (48, 64, 96, 128)  # of the weather net
TIFF_TILE = 512  # rows and columns
STEPS = 3

# -- one rank --------------------------------------------------------------------------------------------------------


def volume_steps(folder: Path, mesh: Any, small: bool) -> Iterator[Any]:
    """The loss of each step on a whole volume: its image is read by tiles, and never on one rank."""
    import torch
    import torch.nn.functional as F
    from synthetic_scans import CLASSES, UNet, scans

    import jigsaw

    images, labels = scans(folder / ("small" if small else "scans"), 1, volume_shape(small), writes=False)
    volumes = jigsaw.io.open_volumes(images, labels, mesh=mesh, crop=None)
    model = jigsaw.parallelize(UNet(1, CLASSES, 4 if small else WIDTH), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(STEPS):
        for batch in jigsaw.io.VolumeLoader(volumes, batch_size=1):
            loss = F.cross_entropy(model(batch.image), batch.label[:, 0])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss


def weather_steps(folder: Path, mesh: Any, small: bool) -> Iterator[Any]:
    """The loss of each step on states of 721 x 1440 points and 69 channels."""
    import torch
    from model import GlobeModel
    from train import season

    import jigsaw

    train = jigsaw.io.open(
        folder / "quarter_degree.zarr",
        mesh=mesh,
        fields=["t2m", "msl"] if small else None,
        spec={"lat": "lat", "lon": None},
        boundary={"lon": "periodic"},
        inputs=[0],
        targets=[1],
        normalize=None,
    )
    lat, lon = train.whole_coords["lat"], train.whole_coords["lon"]
    channels = len(train.channels)
    model = jigsaw.parallelize(GlobeModel(1, channels, (len(lat), len(lon)), (8, 8, 8) if small else WIDTHS), mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(STEPS):
        for batch in jigsaw.io.DataLoader(train, 1):
            forecast = model(batch.input, season(batch.target_times))
            loss = (forecast - batch.target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss


def slide_net() -> Any:
    """Two convolutions, the mean over the whole slide, and two classes."""
    from torch import nn

    return nn.Sequential(
        nn.Conv2d(3, 8, 7, stride=4, padding=3), nn.GroupNorm(2, 8), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2),
    )  # fmt: skip


def slide_steps(folder: Path, mesh: Any, small: bool) -> Iterator[Any]:
    """The loss of each step on a whole slide, of whose TIFF each rank reads the tiles that its rows touch."""
    import tifffile
    import torch
    import zarr

    import jigsaw

    class CountedFile(io.FileIO):
        """A file that counts what is read of it."""

        bytes_read = 0

        def read(self, size: int | None = -1, /) -> bytes:
            values = super().read(size)
            self.bytes_read += len(values)
            return values

    file = CountedFile(folder / slide_file(small))
    page = tifffile.TiffFile(file).pages[0]
    tile_bytes = torch.tensor(page.databytecounts).unflatten(0, (-(-page.shape[0] // TIFF_TILE), -1))
    slides = jigsaw.io.open_volumes(
        [zarr.open(page.aszarr(), mode="r")], mesh=mesh, crop=None, dims=("y", "x", "channel"), window=(0, 255),
        mode="independent",
    )  # fmt: skip
    model = jigsaw.parallelize(slide_net(), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    loader = jigsaw.io.VolumeLoader(slides, batch_size=1)  # reads two tiles, to learn what one takes
    for _ in range(STEPS):
        before = file.bytes_read
        for batch in loader:
            layout = batch.image.layout
            first, stop = layout.owned(layout.coord(mesh.get_rank()))[2]
            wanted = tile_bytes[first // TIFF_TILE : -(-stop // TIFF_TILE)].sum().item()
            assert file.bytes_read - before == wanted, f"{file.bytes_read - before} bytes instead of {wanted}"
            loss = torch.nn.functional.cross_entropy(model(batch.image), torch.tensor([1]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss


CASES = {
    "volume": (volume_steps, "benchmarks", "z"),
    "weather": (weather_steps, "examples/weather", "lat"),
    "slide": (slide_steps, "benchmarks", "y"),
}


class DataWatch(threading.Thread):
    """The most private memory that the process had, of which the limit speaks."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self._ended = 0, threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.02):
            self.most = max(self.most, status_bytes("VmData"))

    def end(self) -> int:
        self._ended.set()
        self.join()
        return max(self.most, status_bytes("VmData"))


def status_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def run_rank(name: str, folder: Path, small: bool) -> None:
    """One rank of a run; the first prints what all of them found."""
    steps, nets, axis = CASES[name]
    sys.path.insert(0, str(ROOT / nets))
    import torch
    import torch.distributed as dist

    import jigsaw
    from jigsaw import comm

    torch.manual_seed(0)
    mesh = jigsaw.init_mesh(**{axis: int(os.environ.get("WORLD_SIZE", "1"))})
    watch = DataWatch()
    watch.start()
    losses, walls, busy = list[float](), list[float](), list[float]()
    since, spent = time.perf_counter(), time.process_time()
    for loss in steps(folder, mesh, small):
        losses.append(loss.item())
        walls.append(time.perf_counter() - since)
        busy.append(time.process_time() - spent)
        since, spent = time.perf_counter(), time.process_time()
    mine = {
        "data_bytes": watch.end(),
        "resident_bytes": status_bytes("VmHWM"),
        "step_s": round(statistics.median(walls), 2),
        "cpu_s": round(statistics.median(busy), 2),
    }
    of_all = comm.all_gather_object(mesh, mine) if mesh.size() > 1 else [mine]
    if dist.get_rank() == 0:
        most = {field: max(each[field] for each in of_all) for field in mine}
        print(json.dumps(most | {"losses": [round(loss, 5) for loss in losses]}), flush=True)
    dist.destroy_process_group()


# -- all of them -----------------------------------------------------------------------------------------------------


def volume_shape(small: bool) -> tuple[int, ...]:
    return (32, 32, 32) if small else SHAPE


def slide_file(small: bool) -> str:
    return f"slide-{1500 if small else 20_000}.tif"


def write_slide(path: Path) -> None:
    """Write a tiled TIFF of deflated colors without noise, tile by tile: a wave, other in each tile."""
    import numpy as np
    import tifffile

    rows = int(path.stem.split("-")[1])
    across = np.arange(TIFF_TILE)
    wave = 100 + 60 * np.sin(across[:, None, None] / 37) + 60 * np.cos(across[:, None] / 53) + [0, 15, 35]
    tiles = ((wave + number % 97).astype("u1") for number in range((-(-rows // TIFF_TILE)) ** 2))
    kind = {"tile": (TIFF_TILE, TIFF_TILE), "photometric": "rgb", "compression": "zlib"}
    tifffile.imwrite(path, tiles, shape=(rows, rows, 3), dtype="u1", **kind)


def make_data(name: str, folder: Path, small: bool) -> None:
    sys.path.insert(0, str(ROOT / CASES[name][1]))
    if name == "volume":
        import synthetic_scans

        synthetic_scans.scans(folder / ("small" if small else "scans"), 1, volume_shape(small), writes=True)
    elif name == "slide":
        write_slide(folder / slide_file(small))
    elif not (folder / "quarter_degree.zarr").exists():
        import quarter_degree

        quarter_degree.write(folder / "quarter_degree.zarr")
    sys.path.pop(0)
    for module in ("data", "train", "model"):
        sys.modules.pop(module, None)


def measure(name: str, ranks: int, limit: int, folder: Path, small: bool) -> dict[str, Any]:
    """A run of as many processes; one that memory is refused to says so in `failed`."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += [str(Path(__file__)), "--rank-of", name, "--data", str(folder), *(["--small"] if small else [])]

    return {"case": name, "ranks": ranks, "limit_bytes": limit} | run_limited(command, limit)


def run_limited(command: Sequence[str], limit: int) -> dict[str, Any]:
    """Run a command whose processes may have `limit` bytes of private memory each, or any (0).

    Returns the last JSON object that it prints, or in `failed` what a process said that was refused memory.
    """

    def limit_memory() -> None:
        if limit:
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    ran = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit_memory, check=False)
    told = [text for text in ran.stdout.splitlines() if text.startswith("{")]
    if ran.returncode == 0 and told:
        return json.loads(told[-1])
    causes = [text.strip() for text in ran.stderr.splitlines() if "allocate" in text or "MemoryError" in text]
    if not causes:
        raise RuntimeError(f"{' '.join(command)} ended with {ran.returncode}:\n{ran.stderr[-4000:]}")
    return {"failed": causes[0][-200:]}


def draw(lines: Sequence[dict[str, Any]], path: Path) -> None:
    """Private memory of a rank without a limit, and the limit."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [name for name in CASES if any(line.get("case") == name for line in lines)]
    figure, places = plt.subplots(1, len(names), figsize=(3.6 * len(names), 2.8), squeeze=False)
    for place, name in zip(places[0], names, strict=True):
        mine = [line for line in lines if line.get("case") == name]
        free = [line for line in mine if not line["limit_bytes"]]
        limit = max(line["limit_bytes"] for line in mine) / 2**30
        fits = {line["ranks"]: "failed" not in line for line in mine if line["limit_bytes"]}
        labels = [f"{line['ranks']}" for line in free]
        colors = ["tab:green" if fits.get(line["ranks"]) else "tab:red" for line in free]
        place.bar(labels, [line["data_bytes"] / 2**30 for line in free], color=colors)
        place.axhline(limit, color="black", linestyle="--", linewidth=1)
        place.text(len(free) - 0.5, limit, f"limit {limit:g} GiB", ha="right", va="bottom", fontsize=8)
        title = {
            "volume": "whole volume, 3-D U-Net",
            "weather": "721 x 1440 x 69, weather net",
            "slide": "slide, pooled",
        }[name]
        place.set(title=title, xlabel="ranks", ylabel="GiB of a rank")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--limit", type=float, help="GiB of a process; by default 2, 3 and 4")
    parser.add_argument("--data", type=Path, help="where the stores are made, and kept for the next time")
    parser.add_argument("--output", type=Path, help="a file that the lines are added to")
    parser.add_argument("--draw", type=Path, help="make the picture of docs/memory.md of this file instead")
    parser.add_argument("--small", action="store_true", help="toy sizes, as the tests run it")
    parser.add_argument("--rank-of", choices=sorted(CASES), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank_of:
        run_rank(chosen.rank_of, chosen.data, chosen.small)
        return
    if chosen.draw:
        lines = [json.loads(text) for text in chosen.draw.read_text().splitlines()]
        draw(lines, ROOT / "docs" / "memory_limit.png")
        return
    with tempfile.TemporaryDirectory() as made:
        folder = chosen.data or Path(made)
        folder.mkdir(parents=True, exist_ok=True)
        for name in chosen.case:
            make_data(name, folder, chosen.small)
            limit = int((chosen.limit or LIMITS[name]) * 2**30)
            for ranks in chosen.ranks:
                for bytes_ in (0, limit):
                    text = json.dumps(measure(name, ranks, bytes_, folder, chosen.small))
                    print(text, flush=True)
                    if chosen.output:
                        with chosen.output.open("a") as file:
                            file.write(text + "\n")


if __name__ == "__main__":
    main()
