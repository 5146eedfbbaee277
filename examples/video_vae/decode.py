"""A clip that one process cannot decode in a limit of memory, and four ranks can: Wan's video autoencoder of diffusers.

    python examples/video_vae/decode.py                      # the table: one process, four ranks, tiles that overlap
    torchrun --nproc-per-node 4 examples/video_vae/decode.py --clip clip.pt
    torchrun --nproc-per-node 4 examples/video_vae/decode.py --gradient

The net is that of the package, with no line changed; its weights are random and its blocks narrower than published, so
that two cores decode a clip in a minute (`--width 96` is the published one).  The limit is RLIMIT_DATA of each
process, Python and torch included: beyond it memory is refused, as a device would refuse it.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

MESHES = {1: {"y": 1}, 2: {"y": 2}, 4: {"y": 2, "x": 2}}  # by the number of ranks
LATENTS = {"latents_mean": [0.0] * 16, "latents_std": [1.0] * 16}


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--width", type=int, default=24, help="channels of the first block (96 as published)")
    parser.add_argument("--latents", type=int, nargs=3, default=(3, 30, 52), help="frames, height and width of latents")
    parser.add_argument("--gradient", action="store_true", help="of a loss of the clip, for latents and weights, too")
    parser.add_argument("--overlapping", action="store_true", help="decode by diffusers' own tiles, in one process")
    parser.add_argument("--limit", type=float, default=0.0, help="GiB of private memory a process; 0 for none")
    parser.add_argument("--clip", type=Path, help="a file for the clip, and for gradients")
    parser.add_argument("--ranks", type=int, default=4, help="of the table's second row")
    return parser.parse_args(argv)


# -- one rank ----------------------------------------------------------------------------------------------------------


def decode(args: argparse.Namespace) -> None:
    """Decode on the mesh of this job, and keep the whole clip on its first rank."""
    import torch
    from diffusers import AutoencoderKLWan

    import jigsaw

    torch.set_num_threads(1)
    if args.limit:
        resource.setrlimit(resource.RLIMIT_DATA, (int(args.limit * 2**30),) * 2)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    mesh = jigsaw.init_mesh(device="cpu", **MESHES.get(ranks, {"y": ranks}))
    watch = MemoryWatch()
    watch.start()
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=args.width, **LATENTS)
    latents = torch.randn(1, 16, *args.latents)
    began = time.perf_counter()
    if args.overlapping:
        vae.enable_tiling(128, 128, 96, 96)
        given: Any = latents
    else:
        vae = jigsaw.parallelize(vae, mesh)
        given = jigsaw.shard(
            latents, mesh, (None, None, None, "y", "x" if "x" in (mesh.mesh_dim_names or ()) else None)
        )
        given.local.requires_grad_(args.gradient)
    with torch.set_grad_enabled(args.gradient):
        clip = vae.decode(given).sample
    kept = {"clip": clip}
    if args.gradient:
        clip.square().mean().backward()
        kept |= {"gradient of latents": jigsaw.Tile(given.local.grad, given.layout, given.mesh)}
        kept |= {name: p.grad for name, p in vae.named_parameters() if p.grad is not None}
    seconds = time.perf_counter() - began
    whole = {name: (x.full_tensor() if hasattr(x, "full_tensor") else x).detach() for name, x in kept.items()}
    if os.environ.get("RANK", "0") == "0":
        if args.clip:
            torch.save(whole, args.clip)
        print(f"{watch.most_kib / 2**20:.2f} GiB  {seconds:.1f} s", flush=True)


class MemoryWatch(threading.Thread):
    """The most private memory of this process (VmData), which is what the limit refuses; looked at every 20 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most_kib = 0

    def run(self) -> None:
        while True:
            lines = Path("/proc/self/status").read_text().splitlines()
            self.most_kib = max(self.most_kib, *(int(line.split()[1]) for line in lines if line.startswith("VmData")))
            time.sleep(0.02)


# -- the table ---------------------------------------------------------------------------------------------------------


def launched(ranks: int, options: list[str]) -> subprocess.CompletedProcess[str]:
    start = [sys.executable]
    if ranks > 1:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return subprocess.run(
        [*start, __file__, *options],
        env=os.environ | {"JIGSAW_VAE_ROW": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def compare(args: argparse.Namespace) -> int:
    """Print a row a way: the most memory of the first rank, seconds, and the largest difference to one process."""
    import torch

    sizes = ["--width", str(args.width), "--latents", *map(str, args.latents), *["--gradient"] * args.gradient]
    with tempfile.TemporaryDirectory() as folder:
        ways = {"one process": (1, []), f"{args.ranks} ranks": (args.ranks, [])}
        if not args.gradient:
            ways["one process, overlapping tiles"] = (1, ["--overlapping"])
        whole: dict[str, Any] = {}
        peaks: list[float] = []
        for name, (ranks, options) in ways.items():
            file = Path(folder) / "clip.pt"
            ran = launched(ranks, [*sizes, *options, "--clip", str(file)])
            if ran.returncode:
                sys.stderr.write(ran.stderr)
                return 1
            told = ran.stdout.strip().splitlines()[-1]
            peaks.append(float(told.split()[0]))
            results = torch.load(file)
            whole = whole or results
            worst = max(
                float((results[key] - x).abs().max() / x.abs().max().clamp(min=1e-30)) for key, x in whole.items()
            )
            print(f"{name:32} {told:>18}  off by {worst:.1e} of the largest value", flush=True)
        limit = args.limit or round((peaks[0] + peaks[1]) / 2, 2)
        for name, (ranks, options) in list(ways.items())[:2]:
            ran = launched(ranks, [*sizes, *options, "--limit", str(limit)])
            words = (ran.stderr if ran.returncode else ran.stdout).strip().splitlines()
            print(f"{name} within {limit} GiB each: {'ended by ' * bool(ran.returncode)}{words[-1]}", flush=True)
    return int(ran.returncode != 0)  # of the ranks, which the limit must not end


if __name__ == "__main__":
    options = arguments()
    if "WORLD_SIZE" in os.environ or "JIGSAW_VAE_ROW" in os.environ:
        decode(options)
    else:
        sys.exit(compare(options))
