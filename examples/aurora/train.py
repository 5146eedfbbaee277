"""A large published weather net, Microsoft's Aurora, trained with its globe cut over ranks.

    torchrun --nproc-per-node 4 examples/aurora/train.py                       # 2 bands of latitude x 2 of longitude
    torchrun --nproc-per-node 4 examples/aurora/train.py --check               # beside one process
    torchrun --nproc-per-node 8 examples/aurora/train.py --size full --degrees 0.25 --checkpoint --shard-weights

The net is that of the package `microsoft-aurora`, with no line changed and its weights random.  A store is read by
tiles, and Aurora's own `Batch`, the forward pass, loss, backward pass and optimizer run on them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import globe
import numpy as np
import torch
import torch.distributed as dist
import xarray
from aurora import Aurora, Batch, Metadata
from aurora.model.film import AdaptiveLayerNorm
from aurora.model.perceiver import PerceiverResampler
from torch import Tensor, nn

import jigsaw

MESHES = {1: "lat=1", 2: "lat=2", 4: "lat=2,lon=2", 8: "lat=4,lon=2"}  # by the number of ranks
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "embed_dim": 64, "num_heads": 4, "encoder_depths": (2, 2, 2), "encoder_num_heads": (2, 4, 8),
        "decoder_depths": (2, 2, 2), "decoder_num_heads": (8, 4, 2),
    },
    "small": {
        "embed_dim": 256, "num_heads": 8, "encoder_depths": (2, 6, 2), "encoder_num_heads": (4, 8, 16),
        "decoder_depths": (2, 6, 2), "decoder_num_heads": (16, 8, 4),
    },
    "full": {},
}  # fmt: skip
PATCH = 4
# what is computed twice: parts beside each other, for tiles refuse a checkpoint within another
TWICE = ("Perceiver3DEncoder", "Swin3DTransformerBlock", "Perceiver3DDecoder")
WANTED = [*globe.SURFACE.values(), *(f"{name}@{level}" for name in globe.AIR.values() for level in globe.LEVELS)]
GIVEN = [*WANTED, *globe.STATIC.values()]
SEED, RATE, TOLERANCE = 0, 3e-4, 1e-9


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    parser.add_argument("--mesh", default=MESHES.get(ranks, f"lat={ranks}"), help="axes and sizes: lat=2,lon=2")
    parser.add_argument("--size", choices=SIZES, default="tiny", help="full has 1.3 billion weights")
    parser.add_argument("--degrees", type=float, default=1.5, help="between the points of the globe that is generated")
    parser.add_argument("--store", help="a WeatherBench2-style store with the same variables instead")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--checkpoint", action="store_true", help="compute each block twice rather than keep it")
    parser.add_argument("--shard-weights", action="store_true", help="weights and optimizer in 1/P a rank")
    parser.add_argument("--check", action="store_true", help="compare with one process, in float64")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    args = arguments(argv)
    mesh = jigsaw.init_mesh(**{name: int(size) for name, size in (axis.split("=") for axis in args.mesh.split(","))})
    store = args.store or globe.store(args.degrees, writes=dist.get_rank() == 0)
    dtype = torch.float64 if args.check else torch.float32

    data = jigsaw.io.open(
        store,
        mesh=mesh,
        fields=GIVEN,
        target_fields=WANTED,
        spec={"lat": "lat", "lon": "lon"},
        align=PATCH,
        inputs=[-1, 0],
        targets=[1],
        dtype=dtype,
        lat_order="north-first",
    )
    loader = jigsaw.io.DataLoader(data, batch_size=1)
    net = with_own_queries(make_net(args)).to(mesh.device_type, dtype)
    model = jigsaw.parallelize(net, mesh, shard_weights=args.shard_weights)
    before = peak_memory()
    found = train(model, over(loader), data.whole_coords, args.steps)
    show_ranks(found, before, loader, mesh)
    agree = True
    if args.check:
        gradients = gradients_of(model)
        if dist.get_rank() == 0:
            agree = compare(found["losses"], gradients, args, store, data.whole_coords)
        dist.barrier()
    dist.destroy_process_group()
    if not agree:
        raise SystemExit("the ranks differ from one process")


# -- the net and what it takes -----------------------------------------------------------------------------------------


def make_net(args: argparse.Namespace) -> Aurora:
    """Aurora with random weights, alike on every rank."""
    torch.manual_seed(SEED)
    net = Aurora(use_lora=False, **SIZES[args.size])
    for module in net.modules():  # all zero in a new net: no block of the backbone would have any part in the forecast
        if isinstance(module, AdaptiveLayerNorm):
            nn.init.trunc_normal_(module.ln_modulation[-1].weight, std=0.02)
    if args.checkpoint:
        net.configure_activation_checkpointing(TWICE)
    return net


def with_own_queries(net: Aurora) -> Aurora:
    """Aurora asks each place for its levels by queries that are alike at all places, a plain tensor of the whole globe;
    here each rank makes those of its own places.
    """

    def of_own_places(module: nn.Module, given: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        queries, x = given  # [places, levels, channels]
        return queries[:1] + torch.zeros_like(x[:, :1, :1]), x

    for module in net.modules():
        if isinstance(module, PerceiverResampler):
            module.register_forward_pre_hook(of_own_places)
    return net


def as_batch(x: Tensor, coords: dict[str, np.ndarray], times: np.ndarray) -> Batch:
    """Channels [B, T, C, lat, lon] as Aurora's variables: views, of whole tensors as of tiles.

    Latitudes and longitudes are given as matrices, which makes them tiles where `x` is one: what Aurora computes of
    each place is then cut as well.  Its patches leave out the row of the south pole.
    """
    x = x[..., : x.shape[-2] // PATCH * PATCH, :]
    surface, levels = len(globe.SURFACE), len(globe.LEVELS)
    air = {name: slice(surface + i * levels, surface + (i + 1) * levels) for i, name in enumerate(globe.AIR)}
    place = torch.zeros_like(x[0, 0, 0], dtype=torch.float32)
    lat, lon = (torch.tensor(coords[dim], dtype=torch.float32, device=place.device) for dim in ("lat", "lon"))
    static = range(len(WANTED), x.shape[2])  # the truth has none
    return Batch(
        surf_vars={name: x[:, :, i] for i, name in enumerate(globe.SURFACE)},
        static_vars={name: x[0, 0, i] for name, i in zip(globe.STATIC, static, strict=False)},
        atmos_vars={name: x[:, :, here] for name, here in air.items()},
        metadata=Metadata(
            lat=place + lat[: len(place), None],
            lon=place + lon,
            time=tuple(times[:, -1].astype("datetime64[s]").tolist()),
            atmos_levels=globe.LEVELS,
        ),
    )


def error_of(forecast: Batch, truth: Batch) -> Tensor:
    """The mean absolute error of the normalized variables, which Aurora was trained by; each counts alike."""
    found, wanted = forecast.normalise(surf_stats={}), truth.normalise(surf_stats={})
    pairs = [(found.surf_vars[name], wanted.surf_vars[name]) for name in wanted.surf_vars]
    pairs += [(found.atmos_vars[name], wanted.atmos_vars[name]) for name in wanted.atmos_vars]
    return torch.stack([(a - b).abs().mean() for a, b in pairs]).mean()


# -- training ----------------------------------------------------------------------------------------------------------


def train(model: nn.Module, batches: Iterator[Any], coords: dict[str, np.ndarray], steps: int) -> dict[str, Any]:
    """The loss of every step, and what the last one sent. Nothing here knows of tiles."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses, sent = [], 0
    for _, batch in zip(range(steps), batches, strict=False):
        since = time.perf_counter()
        optimizer.zero_grad()
        with jigsaw.comm.count() as counted:
            forecast = model(as_batch(batch.input, coords, batch.input_times))
            loss = error_of(forecast, as_batch(batch.target, coords, batch.target_times))
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
        sent = counted.sent_bytes
        if dist.get_rank() == 0:
            print(f"step {len(losses)}  loss {losses[-1]:.6f}  {time.perf_counter() - since:.1f} s", flush=True)
    return {"losses": losses, "sent": sent}


def over(loader: Any) -> Iterator[Any]:
    """Batches, epoch after epoch."""
    while True:
        yield from loader


def peak_memory() -> int:
    """The most memory that this process has had, in bytes; of a GPU its tensors."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def show_ranks(found: dict[str, Any], before: int, loader: Any, mesh: Any) -> None:
    """What every rank holds of the globe, reads and sends a step, and its memory before the steps and at the peak."""
    box = " x ".join(f"{a}:{b}" for a, b in loader.dataset.layout.owned(tuple(mesh.get_coordinate()))[2:])
    numbers = (loader.batch_bytes, loader.bytes_read / len(found["losses"]), found["sent"], before, peak_memory())
    rows: list[Any] = [None] * mesh.size()
    dist.all_gather_object(rows, f"{box:>18}" + "".join(f"{number / 2**20:>13.1f}" for number in numbers))
    if dist.get_rank() == 0:
        heads = "".join(f"{head:>13}" for head in ("a batch", "read a step", "sent a step", "before", "at the peak"))
        print(f"\nrank {'tile (lat x lon)':>18}{heads}   (MiB)")
        print("\n".join(f"{rank:>4} {row}" for rank, row in enumerate(rows)), flush=True)


# -- beside one process ------------------------------------------------------------------------------------------------


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """The whole gradient of every weight; where weights are cut, all ranks gather it."""
    found = {name: p.grad for name, p in model.named_parameters()}
    return {name: grad.full_tensor() if hasattr(grad, "full_tensor") else grad for name, grad in found.items()}


def compare(losses: list[float], gradients: dict[str, Tensor], args: Any, store: Any, coords: Any) -> bool:
    """Whether plain torch in this process, on the whole globe as xarray reads it, has the same losses and gradients."""
    print("\none process, plain torch on the whole globe:", flush=True)
    net = make_net(args).double()
    alone = train(net, whole_batches(store), coords, args.steps)["losses"]
    wanted = gradients_of(net)
    greatest = max(grad.abs().max().item() for grad in wanted.values())
    far = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
    off = max(  # of its own greatest number; what is nothing but rounding, such as a key's bias, of a millionth of all
        (gradients[name].cpu() - grad).abs().max().item() / max(grad.abs().max().item(), 1e-6 * greatest)
        for name, grad in wanted.items()
    )
    print(f"losses differ by {far:.0e} of them, the gradients of {len(wanted)} weights by {off:.0e} at most")
    return max(far, off) < TOLERANCE


def whole_batches(store: Any) -> Iterator[Any]:
    """The same batches without jigsaw: [1, T, C, lat, lon] in float64."""
    with xarray.open_zarr(store) as data:
        data = data.sortby("latitude", ascending=False)
        times = data["time"].values

        def channels(step: int) -> Tensor:
            state = data.isel(time=step).sel(level=list(globe.LEVELS))
            values = [
                state[name].values for table in (globe.SURFACE, globe.AIR, globe.STATIC) for name in table.values()
            ]
            return torch.from_numpy(np.concatenate([x.reshape(-1, *x.shape[-2:]) for x in values])).double()

        for now in itertools.cycle(range(1, len(times) - 1)):
            given = torch.stack([channels(now - 1), channels(now)])[None]
            wanted = channels(now + 1)[None, None, : len(WANTED)]
            here, later = times[None, now - 1 : now + 1], times[None, now + 1 : now + 2]
            yield SimpleNamespace(input=given, target=wanted, input_times=here, target_times=later)


if __name__ == "__main__":
    main()
