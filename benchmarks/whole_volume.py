"""A task that needs the whole volume: MONAI's U-Net on volumes cut over ranks, beside the same net on MONAI's patches.

    python benchmarks/whole_volume.py --output benchmarks/results/whole-volume-MACHINE-MONTH.jsonl

Balls lie in the lower third of a volume of noise, all of one class in it.  Which one says a cube near its upper end
alone, at least 92 slices away: it is bright or dark.  Patches have 64 slices, so no patch with a ball shows the cube.
All contenders have the same net, loss and optimizer, as many steps, and one limit of memory (RLIMIT_DATA) a process.
The first two rows, of three steps, are of one process without the limit and with it.

- `whole`: the volume as one sample, by `jigsaw.io.open_volumes` and `jigsaw.parallelize`, on one rank and on several;
- `patches`: MONAI's `RandCropByPosNegLabel`, three patches a step, in one process, and its `sliding_window_inference`.

A JSON object for each contender: `right`, the share of balls' voxels with the right class in volumes that were not
trained on, of which half of the volumes have either class; `data_bytes`, the most private memory of a process (VmData);
the last losses.  One that memory is refused to says so in `failed`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import nibabel
import numpy as np
import torch
import torch.nn.functional as F
from memory_limit import DataWatch, run_limited
from result_file import ResultFile, add_result_options
from torch import Tensor, nn

SHAPE, PATCH = (192, 96, 96), (64, 48, 48)
WEIGHTS = (0.1, 1.0, 1.0)  # of the classes in the loss: balls are small


def draw_scan(number: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the image and its labels, by z, y, x: class 1 in volumes of even numbers, 2 in those of odd ones."""
    draws, kind = np.random.default_rng(number), number % 2
    image, label = draws.normal(0, 0.3, SHAPE).astype("f4"), np.zeros(SHAPE, "u1")
    first = [draws.integers(low, high) for low, high in ((2, 8), (2, 74), (2, 74))]
    image[tuple(slice(n, n + 20) for n in first)] += 3 if kind else -3
    places = np.indices(SHAPE, sparse=True)
    for _ in range(12):
        center = [draws.integers(low, high) for low, high in ((128, 182), (10, 86), (10, 86))]
        ball = sum((place - n) ** 2 for place, n in zip(places, center, strict=True)) <= 8**2
        image[ball] = 1.5 + draws.normal(0, 0.3, int(ball.sum()))
        label[ball] = 1 + kind
    return image, label


def scan_paths(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"image-{number}.nii", folder / f"label-{number}.nii"


def write_scans(folder: Path, count: int) -> None:
    """Write volumes as NIfTI, whose arrays are by x, y, z."""
    for number in range(count):
        for path, values in zip(scan_paths(folder, number), draw_scan(number), strict=True):
            nibabel.save(nibabel.Nifti1Image(values.transpose(2, 1, 0), np.eye(4)), path)


def make_net() -> nn.Module:
    from monai.networks.nets import UNet

    torch.manual_seed(0)
    return UNet(3, 1, 3, channels=(8, 16, 32, 32, 32, 32), strides=(2, 2, 2, 2, (2, 1, 1)), num_res_units=2)


def _count_right(scores: Tensor, label: Tensor) -> Tensor:
    is_ball = label[:, 0] > 0
    return torch.stack([((scores.argmax(1) == label[:, 0]) & is_ball).sum(), is_ball.sum()])


def _loss(scores: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(scores, label[:, 0].long(), weight=torch.tensor(WEIGHTS))


def try_whole(folder: Path, steps: int, trained: int, tested: int) -> dict[str, Any]:
    """Train on whole volumes, each cut over the ranks along z, and count right voxels in others."""
    import jigsaw

    mesh = jigsaw.init_mesh(z=int(os.environ["WORLD_SIZE"]))

    def batches(first: int, stop: int) -> Any:
        images, labels = zip(*(scan_paths(folder, n) for n in range(first, stop)), strict=True)
        volumes = jigsaw.io.open_volumes(images, labels, mesh=mesh, crop=None)
        return jigsaw.io.VolumeLoader(volumes, batch_size=1, shuffle=False)

    net = jigsaw.parallelize(make_net(), mesh)
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=3e-3), list[float]()
    loader = batches(0, trained)
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for batch in itertools.islice(epochs, steps):
        loss = _loss(net(batch.image), batch.label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        counts = [_count_right(net(batch.image), batch.label) for batch in batches(trained, trained + tested)]
    right, balls = sum(counts).tolist()
    return {"right": right / balls, "losses": losses}


def try_patches(folder: Path, steps: int, trained: int, tested: int) -> dict[str, Any]:
    """Train on patches that MONAI draws, and count right voxels in other volumes, by MONAI's windows."""
    from monai.inferers import sliding_window_inference
    from monai.transforms import RandCropByPosNegLabeld

    def read(number: int) -> dict[str, Tensor]:
        image, label = (nibabel.load(path).get_fdata(dtype=np.float32).T for path in scan_paths(folder, number))
        return {"image": torch.from_numpy(image.copy())[None], "label": torch.from_numpy(label.copy())[None]}

    net = make_net()
    draw = RandCropByPosNegLabeld(["image", "label"], "label", PATCH, pos=2, neg=1, num_samples=3)
    draw.set_random_state(0)
    optimizer, losses = torch.optim.Adam(net.parameters(), lr=3e-3), list[float]()
    for step in range(steps):
        patches = draw(read(step % trained))
        image, label = (torch.stack([patch[name].as_tensor() for patch in patches]) for name in ("image", "label"))
        loss = _loss(net(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    counts: list[Tensor] = []
    with torch.no_grad():
        for number in range(trained, trained + tested):
            scan = read(number)
            scores = sliding_window_inference(scan["image"][None], PATCH, 1, net, overlap=0.5)
            counts.append(_count_right(scores, scan["label"][None]))
    right, balls = sum(counts).tolist()
    return {"right": right / balls, "losses": losses}


WAYS: dict[str, Callable[[Path, int, int, int], dict[str, Any]]] = {"whole": try_whole, "patches": try_patches}


def run_rank(way: str, folder: Path, sizes: list[int]) -> None:
    """Run one process of a contender; the first prints what it found."""
    watch = DataWatch()
    watch.start()
    row = WAYS[way](folder, *sizes)
    data_bytes = torch.tensor(watch.end())
    if torch.distributed.is_initialized():
        torch.distributed.all_reduce(data_bytes, torch.distributed.ReduceOp.MAX)
    if int(os.environ["RANK"]) == 0:
        losses = [round(loss, 4) for loss in row["losses"]]
        shown = {"first_losses": losses[:3], "last_losses": losses[-3:]}
        print(json.dumps({"right": round(row["right"], 3), "data_bytes": data_bytes.item(), **shown}), flush=True)


def try_way(way: str, ranks: int, limit: int, folder: Path, sizes: list[int]) -> dict[str, Any]:
    """Run a contender with as many processes, and with a limit of bytes for each, or none (0)."""
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), __file__, "--rank-of", way, "--data", str(folder)]
    command += ["--sizes", *map(str, sizes)]
    return {"way": way, "ranks": ranks, "limit_bytes": limit, "steps": sizes[0]} | run_limited(command, limit)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs=3, default=[160, 24, 8], help="steps, volumes trained on, tested on")
    parser.add_argument("--limit", type=float, default=1.15, help="GiB of a process")
    parser.add_argument("--ranks", type=int, default=4, help="of the cut volumes")
    parser.add_argument("--data", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank-of", choices=sorted(WAYS), help=argparse.SUPPRESS)
    add_result_options(parser)
    chosen = parser.parse_args()
    if chosen.rank_of:
        run_rank(chosen.rank_of, chosen.data, chosen.sizes)
        return
    limit = int(chosen.limit * 2**30)
    few_steps = [3, *chosen.sizes[1:]]  # without a limit, to tell what one process takes
    command = f"python benchmarks/whole_volume.py --sizes {' '.join(map(str, chosen.sizes))} --limit {chosen.limit}"
    results = ResultFile(chosen, command, torch=torch.__version__, monai=version("monai"))
    with tempfile.TemporaryDirectory() as made:
        write_scans(Path(made), sum(chosen.sizes[1:]))
        results.add(try_way("whole", 1, 0, Path(made), few_steps))
        results.add(try_way("whole", 1, limit, Path(made), few_steps))
        results.add(try_way("whole", chosen.ranks, limit, Path(made), chosen.sizes))
        results.add(try_way("patches", 1, limit, Path(made), chosen.sizes))


if __name__ == "__main__":
    main()
