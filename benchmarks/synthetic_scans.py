"""Synthetic scans: two kinds of bright bodies in noise, as Zarr stores of z, y, x with an affine; and a plain U-Net."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
import zarr
from torch import Tensor, nn

SPACING = (2.0, 1.0, 1.0)  # mm along z, y, x
CLASSES = 3  # background, balls, shells


def scan(number: int, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """An image (float32) and its label map (uint8); the same for the same number."""
    r = np.random.default_rng(number)
    grid = np.stack(np.meshgrid(*(np.arange(n, dtype="f4") for n in shape), indexing="ij"))
    label = np.zeros(shape, "u1")
    for body in range(6):
        center = np.array([r.uniform(6, n - 6) for n in shape]).reshape(3, 1, 1, 1)
        distance = np.sqrt(((grid - center) ** 2).sum(0))
        radius = r.uniform(4, 7)
        label[distance <= radius] = 1 + body % 2
        if body % 2:
            label[distance <= radius - 2.5] = 0  # a shell is empty inside
    image = np.array([0.0, 1.2, 0.8], "f4")[label] + r.normal(0, 0.4, shape).astype("f4")
    return image.astype("f4"), label


def write(folder: Path, count: int, shape: tuple[int, ...]) -> None:
    """`count` scans as ``image-0.zarr``, ``label-0.zarr``, ..."""
    affine = np.diag([*SPACING[::-1], 1.0]).tolist()
    for number in range(count):
        for name, values in zip(("image", "label"), scan(number, shape), strict=True):
            group = zarr.open_group(str(folder / f"{name}-{number}.zarr"), mode="w", zarr_format=3)
            group.attrs["affine"] = affine
            made = group.create_array(
                name,
                shape=shape,
                chunks=(16, 16, 16),
                dtype=values.dtype,
                dimension_names=("z", "y", "x"),
                config={"write_empty_chunks": True},
            )
            made[...] = values


def scans(folder: Path, count: int, shape: tuple[int, ...], writes: bool) -> tuple[list[str], list[str]]:
    """Their paths; the one process that `writes` makes them on first use, the others wait."""
    if writes and not folder.exists():
        draft = folder.with_name(f".{folder.name}")
        shutil.rmtree(draft, ignore_errors=True)
        write(draft, count, shape)
        draft.rename(folder)
    deadline = time.monotonic() + 300
    while not folder.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"no scans at {folder}; the rank that writes them has failed")
        time.sleep(0.05)
    return tuple([str(folder / f"{name}-{n}.zarr") for n in range(count)] for name in ("image", "label"))


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
