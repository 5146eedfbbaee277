"""Nets of The Well on 256 x 256 x 256 points, planned on 1 to 64 devices by dry runs: memory, seconds, bytes of a step.

    python benchmarks/well_planned.py --output benchmarks/results/well-planned-MACHINE-MONTH.jsonl

The sample is one of MHD_256: four states of seven fields in, the next state out.  The sizes are those that The Well
publishes of its baselines (the packages of `make zoo` have them), in float32 with AdamW, cut weights and the
checkpoints that the nets have. The FNO is neuraloperator's, checkpointed where The Well's own is.  The rank in the
middle is played.
`planned_s` is how long the dry run took.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch
from result_file import ResultFile, add_result_options
from torch import nn

import jigsaw

SIZE, STEPS, FIELDS = 256, 4, 7
MESHES: dict[int, dict[str, int]] = {
    1: {"x": 1}, 4: {"x": 2, "y": 2}, 8: {"x": 2, "y": 2, "z": 2}, 16: {"x": 4, "y": 2, "z": 2},
    64: {"x": 4, "y": 4, "z": 4},
}  # fmt: skip
SLABS = {1: {"x": 1}, 4: {"x": 4}, 8: {"x": 8}, 16: {"x": 16}, 64: {"x": 16, "y": 4}}  # for Fourier transforms
CHECKPOINTS = {"FNO": ["lifting", "fno_blocks", "projection"]}


def planned_net(name: str) -> nn.Module:
    """Make a baseline with its published sizes."""
    if name == "FNO":
        from neuralop.models import FNO

        return FNO(n_modes=(16, 16, 16), in_channels=STEPS * FIELDS, out_channels=FIELDS, hidden_channels=128)
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "zoo"))
    from zoo_net import define_missing_operators

    define_missing_operators()
    from the_well.benchmark import models

    sizes: dict[str, Any] = {"UNetClassic": {"init_features": 48}, "UNetConvNext": {"init_features": 42}}
    sizes["UNetConvNext"]["blocks_per_stage"] = 2
    space = (SIZE,) * 3
    return getattr(models, name)(STEPS * FIELDS, FIELDS, 3, space, gradient_checkpointing=True, **sizes[name])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", choices=list(MESHES), default=list(MESHES))
    parser.add_argument("--device", default="h100", help="a name that jigsaw.dry_run knows")
    parser.add_argument("--net", nargs="+", default=["FNO", "UNetClassic", "UNetConvNext"])
    add_result_options(parser)
    options = parser.parse_args()
    command = f"python benchmarks/well_planned.py --net {' '.join(options.net)} --device {options.device}"
    command += f" --devices {' '.join(map(str, options.devices))}"
    file = ResultFile(options, command, torch=torch.__version__)
    for name in options.net:
        for devices in options.devices:
            mesh = (SLABS if name == "FNO" else MESHES)[devices]
            began = time.perf_counter()
            report = jigsaw.dry_run(
                lambda name=name: planned_net(name), (1, STEPS * FIELDS, SIZE, SIZE, SIZE), mesh,
                spec=(None, None, *(axis if axis in mesh else None for axis in "xyz")), shard_weights=True,
                checkpoint=CHECKPOINTS.get(name, "none"), device=options.device, ranks=[devices // 2],
            )  # fmt: skip
            assert report.is_complete, report.remarks
            file.add(
                {
                    "net": name, "weights": report.parameters, "devices": devices, "mesh": mesh,
                    "device": options.device, "peak_GiB": round(report.peak_bytes / 2**30, 1), "fits": report.fits,
                    "step_s": float(f"{report.seconds:.3g}"), "sent_MiB": round(report.sent_bytes / 2**20, 1),
                    "messages": report.messages, "planned_s": round(time.perf_counter() - began, 1),
                }
            )  # fmt: skip


if __name__ == "__main__":
    main()
