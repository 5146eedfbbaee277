"""Segment organs of a real CT with MONAI's net and loss, on crops that are cut over the ranks.

    make medical                                                           # one rank, then two
    python examples/medical/train.py                                       # one rank
    torchrun --nproc-per-node 2 examples/medical/train.py                  # each rank half of every crop
    torchrun --nproc-per-node 4 examples/medical/train.py --mesh data=2,z=2

The net learns on the right half of a body and segments the left one, window by window. No rank reads, holds or sends
more than its part of a crop, and of the whole half at the end. The loss is the same on every mesh. Curve, mask and
picture are written to `out/`.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import time
from pathlib import Path
from typing import Any

import baseline
import data
import nibabel
import numpy as np
import plot
import torch
import torch.distributed as dist
from monai.losses import DiceCELoss
from monai.networks.nets import UNet
from tqdm import tqdm

import jigsaw
from jigsaw.io import Foreground, VolumeLoader, augment, open_volumes, sliding_window

HERE = Path(__file__).parent
CROP, CROPS, BATCH, STEPS, RATE, SEED = (96, 96, 48), 40, 2, 200, 1e-2, 0
CHANNELS, STRIDES = (16, 32, 64, 128), (2, 2, 2)  # of the net
UNITS, WINDOW = (40.0, 80.0), (-3.0, 4.0)  # Hounsfield units that become 0 and 1 more; what the net sees of them
WEIGHT = (0.5, 3.0, 3.0, 1.0, 1.0)  # of the classes: lungs and kidneys are small
CHANGES = [
    augment.Flip(p=0.5, dims=("x",)),  # what makes a right half a left one
    augment.Affine(p=0.5, degrees=10, scale=(0.85, 1.15)),
    augment.Brightness(p=0.5, scale=(0.9, 1.1), shift=(-0.1, 0.1)),
    augment.Noise(p=0.5, std=(0, 0.1)),
]


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mesh", default=f"z={os.environ.get('WORLD_SIZE', '1')}", help="axes and sizes: data=2,z=2")
    parser.add_argument("--steps", type=int, default=STEPS, help="of the whole training")
    parser.add_argument("--first", type=int, help="stop after so many of them: a curve to compare, without a mask")
    parser.add_argument("--crop", type=int, nargs=3, default=CROP, help="voxels along z, y, x")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    args = parser.parse_args(argv)
    started = time.monotonic()
    torch.manual_seed(SEED)
    mesh = jigsaw.init_mesh(**{name: int(size) for name, size in (axis.split("=") for axis in args.mesh.split(","))})
    halves = data.halves(args.out / "halves")

    # Crops of the right half, cut over the ranks; which they are, and how they are augmented, follows from the seed
    how = {"mesh": mesh, "normalize": UNITS, "label_map": data.LABEL_MAP}
    volumes = open_volumes(
        [halves["right"].scan],
        [halves["right"].labels],
        crop=args.crop,
        crops=CROPS,
        foreground=Foreground(pos=3, neg=1, by="classes"),
        augment=CHANGES,
        **how,
    )
    loader = VolumeLoader(volumes, batch_size=BATCH, shuffle=True, seed=SEED)
    net = UNet(3, 1, len(data.CLASSES), channels=CHANNELS, strides=STRIDES, num_res_units=2)
    model = jigsaw.parallelize(torch.nn.Sequential(torch.nn.Hardtanh(*WINDOW), net), mesh)
    report = {"mesh": args.mesh, "ranks": mesh.size(), "settings": {"crop": list(args.crop), "steps": args.steps}}
    report |= fit(model, loader, args.steps, args.first or args.steps)
    show_ranks(loader, mesh)
    if dist.get_rank() == 0:
        (args.out / f"loss_{args.mesh.replace(',', '_')}.json").write_text(json.dumps(report))
    if len(report["losses"]) < args.steps:
        return report

    # The left half: each rank has its tile of it, of the answer and of the mask
    held = open_volumes([halves["left"].scan], [halves["left"].labels], crop=None, **how).whole(0)
    model.eval()
    found = sliding_window(model, held.image.unsqueeze(0), args.crop, overlap=0.5).argmax(1)[0]
    jigsaw.io.write_volume(args.out / "mask.nii.gz", found, like=held, dtype="uint8", mode="w")
    report |= {"held": list(held.image.local.shape), "net": scores(found, held.label[0], held.spacing)}
    report["total_s"] = time.monotonic() - started
    if dist.get_rank() == 0:
        cuts = {dim: cut.points for dim, cut in zip("zyx", held.label.layout.cuts[1:], strict=True)}
        conclude(report, halves, held.spacing, cuts, args.out)
    return report


def fit(model: torch.nn.Module, loader: VolumeLoader, steps: int, last: int) -> dict[str, Any]:
    """The loss of every step up to the last one. Nothing here knows of ranks."""
    how = {"to_onehot_y": True, "softmax": True, "include_background": False, "batch": True}
    loss_of = DiceCELoss(weight=torch.tensor(WEIGHT), **how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=max(steps, 2), pct_start=0.15)
    losses, started = [], time.monotonic()
    with tqdm(total=last, desc="training", unit="step", disable=dist.get_rank() != 0) as bar:
        while len(losses) < last:
            for batch in loader:
                loss = loss_of(model(batch.image), batch.label)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
                losses.append(loss.item())
                bar.set_postfix_str(f"loss {losses[-1]:.3f}")
                bar.update()
                if len(losses) == last:
                    break
    return {"losses": losses, "train_s": time.monotonic() - started}


def scores(found: Any, truth: Any, spacing: Any) -> dict[str, list[float]]:
    """Of each organ, Dice and the 95th percentile of the distances between surfaces, in mm: masks [z, y, x]."""
    one_hot = [torch.stack([x == k for k in range(1, len(data.CLASSES))]) for x in (found, truth)]
    dice = jigsaw.metrics.dice(*one_hot, dim=(1, 2, 3))
    return {"dice": dice.tolist(), "hd95": jigsaw.metrics.hausdorff95(*one_hot, spacing=spacing).tolist()}


def conclude(report: dict[str, Any], halves: dict[str, data.Half], spacing: Any, cuts: Any, out: Path) -> None:
    """The baseline, what is printed, and the picture: on the first rank, of whole halves."""
    stored = {half: [torch.tensor(nibabel.load(path).get_fdata().T) for path in halves[half]] for half in halves}
    renamed = torch.tensor([data.LABEL_MAP.get(n, 0) for n in range(118)])
    (scan, labels), (other, truth) = ((s.float(), renamed[n.long()]) for s, n in (stored["right"], stored["left"]))
    atlas = baseline.atlas(scan, labels, other.flip(2), len(data.CLASSES)).flip(2)  # a left half is a right one
    report["atlas"] = scores(atlas, truth, spacing)
    curves = plot.comparable(report, out)
    show(report, curves)
    mask = nibabel.load(out / "mask.nii.gz").get_fdata().T
    masks = {"truth": truth, "this net": mask, "atlas": atlas}
    plot.save(out / "medical.png", {name: np.asarray(m, "u1") for name, m in masks.items()}, cuts, report, curves)
    print(f"written: {out / 'mask.nii.gz'}, {out / 'medical.png'}")


def show_ranks(loader: VolumeLoader, mesh: Any) -> None:
    """What every rank holds of a crop, has read, and used of memory."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    box = loader.dataset.layout.owned(tuple(mesh.get_coordinate()))[1:]
    crop = " x ".join(f"{a}:{b}" for a, b in box)
    rows: list[Any] = [None] * mesh.size()
    dist.all_gather_object(rows, f"{crop:>24} {loader.bytes_read / 2**20:>9.1f} {peak / 2**20:>16.0f}")
    if dist.get_rank() == 0:
        print(f"\nrank {'of a crop (z x y x x)':>24} {'MiB read':>9} {'peak memory MiB':>16}")
        print("\n".join(f"{rank:>4} {row}" for rank, row in enumerate(rows)))


def show(report: dict[str, Any], curves: dict[str, list[float]]) -> None:
    print(f"\n{report['settings']['steps']} steps in {report['train_s']:.0f} s; all in {report['total_s']:.0f} s")
    if len(curves) > 1:
        steps, gap = min(map(len, curves.values())), plot.largest_gap(curves)
        print(f"the first {steps} losses of {' and '.join(curves)} differ by at most {gap:.0e} of their value")
    print(f"\nDice in the left half (distance of surfaces, 95 %) {'this net':>18} {'atlas':>18}")
    for k, name in enumerate(data.CLASSES[1:]):
        cells = [f"{report[who]['dice'][k]:.3f} ({report[who]['hd95'][k]:4.1f} mm)" for who in ("net", "atlas")]
        print(f"  {name:<48} {cells[0]:>18} {cells[1]:>18}")


if __name__ == "__main__":
    main()
