"""Segment volumes with a 3-D U-Net on crops that are cut over the ranks; infer whole volumes by sliding windows.

    python examples/medical/train.py                                       # one rank
    torchrun --nproc-per-node 2 examples/medical/train.py                  # each rank half of every crop
    torchrun --nproc-per-node 4 examples/medical/train.py --mesh data=2,z=2

No rank reads, holds or sends more than its part of a crop, and of a whole volume at the end. Which crops come depends
on the seed alone, so the loss is the same on every mesh. Writes `out/skill.json`.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import data
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import jigsaw
from jigsaw.io import Foreground, VolumeLoader, open_volumes, sliding_window

HERE = Path(__file__).parent
SHAPE, TRAIN, CROP, CROPS = (40, 48, 48), 5, (16, 24, 24), 4
EPOCHS, BATCH, RATE, WIDTH, SEED = 6, 2, 1e-2, 8, 0
WEIGHT = (0.1, 1.0, 1.0)  # of the classes: most voxels are background


def double(inputs: int, outputs: int) -> nn.Sequential:
    """Convolution, norm and ReLU, twice."""
    layers = [[nn.Conv3d(i, outputs, 3, padding=1), nn.GroupNorm(2, outputs), nn.ReLU()] for i in (inputs, outputs)]
    return nn.Sequential(*layers[0], *layers[1])


class UNet(nn.Module):
    """Plain torch: two halvings, two doublings, skips between. It knows nothing of ranks."""

    def __init__(self, channels: int, classes: int, width: int) -> None:
        super().__init__()
        widths = (width, 2 * width, 4 * width)
        self.down = nn.ModuleList(double(i, o) for i, o in zip((channels, *widths), widths, strict=False))
        self.up = nn.ModuleList(nn.ConvTranspose3d(2 * w, w, 2, stride=2) for w in widths[-2::-1])
        self.join = nn.ModuleList(double(2 * w, w) for w in widths[-2::-1])
        self.last = nn.Conv3d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, z, y, x] -> [B, classes, z, y, x]; z, y and x are multiples of 4."""
        skips = []
        for block in self.down[:-1]:
            skips.append(block(x))
            x = F.max_pool3d(skips[-1], 2)
        x = self.down[-1](x)
        for up, join in zip(self.up, self.join, strict=True):
            x = join(torch.cat([skips.pop(), up(x)], 1))
        return self.last(x)


def dice(prediction: Tensor, label: Tensor) -> list[float]:
    """Of each class of the foreground: twice the voxels in common over those of either."""
    found = []
    for k in range(1, data.CLASSES):
        mine, theirs = (prediction == k).float(), (label == k).float()
        found.append(float(2 * (mine * theirs).sum() / (mine.sum() + theirs.sum()).clamp(min=1)))
    return found


def main(argv: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mesh", default=f"z={os.environ.get('WORLD_SIZE', '1')}", help="axes and sizes: data=2,z=2")
    parser.add_argument("--epochs", type=int, default=EPOCHS)
    parser.add_argument("--volumes", type=int, default=TRAIN, help="to train on; one more is held out")
    parser.add_argument("--data", type=Path, default=HERE / "data" / "cache" / "scans")
    parser.add_argument("--out", type=Path, default=HERE / "out")
    args = parser.parse_args(argv)
    torch.manual_seed(SEED)
    axes = {name: int(size) for name, size in (axis.split("=") for axis in args.mesh.split(","))}
    mesh = jigsaw.init_mesh(**axes)
    first = dist.get_rank() == 0

    args.data.parent.mkdir(parents=True, exist_ok=True)
    images, labels = data.scans(args.data, args.volumes + 1, SHAPE, writes=first)
    volumes = open_volumes(
        images[:-1],
        labels[:-1],
        mesh=mesh,
        crop=CROP,
        crops=CROPS,
        foreground=Foreground(pos=3, neg=1, by="classes"),
    )
    loader = VolumeLoader(volumes, batch_size=BATCH, shuffle=True, seed=SEED)
    model = jigsaw.parallelize(UNet(1, data.CLASSES, WIDTH), mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    weight = torch.tensor(WEIGHT)
    losses = []
    for epoch in range(args.epochs):
        for batch in loader:
            loss = F.cross_entropy(model(batch.image), batch.label[:, 0], weight=weight)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        if first:
            print(f"epoch {epoch}: loss {sum(losses[-len(loader) :]) / len(loader):.3f}", flush=True)
    loader.close()

    held_out = open_volumes(images[-1:], labels[-1:], mesh=mesh, crop=CROP).whole(0)
    model.eval()
    scores = sliding_window(model, held_out.image.unsqueeze(0), CROP, overlap=0.5)
    skill = {"mesh": args.mesh, "losses": losses, "dice": dice(scores.argmax(1), held_out.label)}
    skill |= {"spacing": held_out.spacing, "held": list(held_out.image.local.shape)}
    if first:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "skill.json").write_text(json.dumps(skill))
        print(f"dice of balls and shells on a volume not seen: {', '.join(f'{d:.3f}' for d in skill['dice'])}")
    return skill


if __name__ == "__main__":
    main()
