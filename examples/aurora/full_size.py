"""What Aurora would need at its full size: 1.3 billion weights, 721 x 1440 points, found by dry runs on one CPU.

    python examples/aurora/full_size.py                     # the table of README.md
    python examples/aurora/full_size.py --mesh lat=4,lon=4 --size small --degrees 1

The step is that of `train.py`: two states of 72 channels in, 69 out, AdamW, on tensors without values.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from typing import Any

import globe
import numpy as np
import train
from aurora import batch
from aurora.model import fourier
from torch import Tensor, nn

import jigsaw

MESHES = ["lat=1", "lat=2,lon=2", "lat=4,lon=2", "lat=4,lon=4"]
KINDS = ("weights", "gradients", "optimizer", "activations", "temporary")


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
    batch.Metadata.__post_init__ = lambda self: None
    for expansion in vars(fourier).values():
        if isinstance(expansion, fourier.FourierExpansion):
            expansion.assert_range = False


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--mesh", nargs="+", default=MESHES)
    parser.add_argument("--size", choices=train.SIZES, default="full")
    parser.add_argument("--degrees", type=float, default=0.25)
    parser.add_argument("--ways", nargs="+", choices=("plain", "saving"), default=("plain", "saving"))
    args = parser.parse_args()
    without_looks_at_values()
    channels = len(globe.SURFACE) + len(globe.AIR) * len(globe.LEVELS) + len(globe.STATIC)
    shape = (1, 2, channels, round(180 / args.degrees) + 1, round(360 / args.degrees))
    print(f"| ranks | mesh | | peak | {' | '.join(KINDS)} | sent a step |  (GiB a rank)")
    print("|---" * (len(KINDS) + 5) + "|")
    for mesh in args.mesh:
        axes = {name: int(size) for name, size in (axis.split("=") for axis in mesh.split(","))}
        for saving in (way == "saving" for way in args.ways):
            report = dry_step(argparse.Namespace(size=args.size, checkpoint=saving), shape, axes, saving)
            row(mesh, axes, saving, report)


def dry_step(given: Any, shape: tuple[int, ...], axes: dict[str, int], cut: bool) -> Any:
    return jigsaw.dry_run(
        lambda: OnChannels(train.with_own_queries(train.make_net(given))),
        shape,
        mesh=axes,
        spec=(None, None, None, *(dim if dim in axes else None for dim in ("lat", "lon"))),
        align=train.PATCH,
        shard_weights=cut,
        ranks=[0],  # of uneven parts it has the largest
    )


def row(mesh: str, axes: dict[str, int], saving: bool, report: Any) -> None:
    """A line of the table, and below it what would be refused, or has ended the dry run."""
    cells = [math.prod(axes.values()), mesh, "saving" if saving else "plain"]
    cells += [
        f"{number / 2**30:.1f}" for number in (report.peak_bytes, *map(report.peak.get, KINDS), report.sent_bytes)
    ]
    print("| " + " | ".join(map(str, cells)) + " |", flush=True)
    for remark in report.remarks:
        if remark.kind in ("refused", "stopped"):
            print(f"  {remark}")


if __name__ == "__main__":
    main()
