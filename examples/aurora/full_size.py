"""What Aurora would need at its full size: 1.3 billion weights, 721 x 1440 points, found by dry runs on one CPU.

    python examples/aurora/full_size.py                     # the table of README.md
    python examples/aurora/full_size.py --mesh lat=4,lon=4 --size small --degrees 1

The step is that of `train.py`: two states of 72 channels in, 69 out, AdamW, on tensors without values.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import aurora.batch
import globe
import numpy as np
import torch
import train
from aurora.model import fourier
from torch import Tensor, nn

import jigsaw

MESHES = ["lat=1", "lat=2,lon=2", "lat=4,lon=2", "lat=4,lon=4", "lat=8,lon=8"]


class OnChannels(nn.Module):
    """The net as a function of channels [B, T, C, lat, lon], its forecast as a dict."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        for module in net.modules():
            if hasattr(module, "drop_path"):  # the rate is 0, which a dry run cannot read
                module.drop_path = nn.Identity()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        rows, columns = x.shape[-2:]
        coords = {"lat": np.linspace(90, -90, rows), "lon": np.arange(columns) * (360 / columns)}
        forecast = self.net(train.as_batch(x, coords, np.array([["2020-01-01"]], dtype="datetime64[s]")))
        return {f"surface {k}": v for k, v in forecast.surf_vars.items()} | forecast.atmos_vars


def without_looks_at_values() -> None:
    """A dry run has no values: leave out what Aurora asserts of its coordinates, and begin anew without `assert`."""
    if __debug__:
        os.execv(sys.executable, [sys.executable, "-O", *sys.argv])
    aurora.batch.Metadata.__post_init__ = lambda self: None
    for expansion in vars(fourier).values():
        if isinstance(expansion, fourier.FourierExpansion):
            expansion.assert_range = False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mesh", nargs="+", default=MESHES)
    parser.add_argument("--size", choices=train.SIZES, default="full")
    parser.add_argument("--degrees", type=float, default=0.25)
    parser.add_argument("--device", default="h100")
    args = parser.parse_args()
    without_looks_at_values()
    channels = len(globe.SURFACE) + len(globe.AIR) * len(globe.LEVELS) + len(globe.STATIC)
    shape = (1, 2, channels, round(180 / args.degrees) + 1, round(360 / args.degrees))
    print("| ranks | mesh | weights | blocks computed twice | GiB a rank | of it activations | GB sent a step |")
    print("|---|---|---|---|---|---|---|")
    for mesh in args.mesh:
        axes = {name: int(size) for name, size in (axis.split("=") for axis in mesh.split(","))}
        for saving in (False, True):
            report = dry_step(argparse.Namespace(size=args.size, checkpoint=saving), shape, axes, saving, args.device)
            row(mesh, axes, saving, report)


def dry_step(given: Any, shape: tuple[int, ...], axes: dict[str, int], cut: bool, device: str) -> Any:
    return jigsaw.dry_run(
        lambda: OnChannels(train.make_net(given)),
        shape,
        mesh=axes,
        spec=(None, None, None, *(dim if dim in axes else None for dim in ("lat", "lon"))),
        align=train.PATCH,
        shard_weights=cut,
        device=device,
        ranks=[0],  # of uneven parts it has the largest
    )


def row(mesh: str, axes: dict[str, int], cut: bool, twice: bool, report: Any) -> None:
    print(report.remarks[:3], file=sys.stderr)
    cells = [int(np.prod(list(axes.values()))), mesh, "cut" if cut else "whole", "yes" if twice else "no"]
    cells += [f"{report.peak_bytes / 2**30:.1f}", f"{report.peak['activations'] / 2**30:.1f}", f"{report.sent_bytes / 1e9:.1f}"]
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)


if __name__ == "__main__":
    main()
