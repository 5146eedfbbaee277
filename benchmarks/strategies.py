"""A training step of the same net by every way to cut it that fits, beside torch's own: one JSON object a case.

    sudo python benchmarks/strategies.py --ranks 2 --output benchmarks/results/strategies-2-ranks-MACHINE-MONTH.jsonl
    python benchmarks/strategies.py --page             # makes the tables of docs/parallelism.md of the result files

A step is forward, mean squared error, backward and AdamW.  The losses of three steps, and the gradients of all
parameters in the first, are compared with one process of plain torch; `max_rel_err` is the largest difference, over the
largest value.  One that is wrong or raises is told with what it said, and not timed.  Then they take turns: `cpu_s` is
user and system time of all ranks, `wall_s` that of the slowest, medians over `--rounds`; `sent_bytes` is what went
through the loopback device in one step, of all ranks, headers included, as in `computing.py`.  `state_bytes` is what
the rank that holds most has of weights and optimizer, `peak_bytes` that and the highest sum of live allocations during
a step: gradients, activations, temporaries.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import layers
import strategies_page
import torch
import torch.distributed as dist
import torch.nn.functional as F
from computing import IN_NAMESPACE, in_own_namespace, last_words, loopback_bytes
from computing_sides import Block
from result_file import ResultFile, add_result_options
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw.testing import RankFailedError, run_on_ranks, world_mesh

TIMEOUT, CLOSE = 600.0, 1e-3
Axes = dict[str, int]
Spec = tuple[Any, ...]


# -- nets ------------------------------------------------------------------------------------------------------------


class ExpertBlock(nn.Module):
    """A transformer's MLP as a mixture of eight experts, two a token, with its losses of balance."""

    def __init__(self, width: int, mesh: Any, axis: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.experts = jigsaw.nn.MoE(width, 2 * width, 8, 2, mesh=mesh, axis=axis)

    def forward(self, x: Any) -> Any:
        return x + self.experts(self.norm(x))


@dataclass(frozen=True)
class Net:
    """How a model is made, on a mesh where that matters; its input; what is cut where, and what a unit of it is."""

    make: Callable[[Any, Any], nn.Module]
    shape: tuple[int, ...]
    space: Spec
    """The spec of a tile with rows (of tokens, of the image) along `lat`."""
    align: int = 1
    """Rows that the net's strides keep together."""
    units: type[nn.Module] | tuple[type[nn.Module], ...] = Block
    experts: bool = False
    target: Callable[[Any], Any] = lambda y: y
    """What the output is compared with, of a tensor or tile that is shaped as the input."""

    def cut_as(self, rows: Any, batch: str | None = None) -> Spec:
        """The spec of a tile with rows along the axes `rows`."""
        return (batch, *((rows or None) if a == "lat" else a for a in self.space[1:]))


def nets(small: bool) -> dict[str, Net]:
    """All of them, at full or at toy size."""
    width, tokens, batch = (32, 64, 4) if small else (256, 512, 8)
    lines, unet_width = (16, 4) if small else (180, 16)
    rows, columns, channels = (4, 8, 16) if small else (45, 90, 128)
    return {
        "transformer": Net(
            lambda mesh, axis: nn.Sequential(*(Block(width, 8) for _ in range(4))),
            (batch, tokens, width), (None, "lat", None),
        ),
        "unet": Net(
            lambda mesh, axis: layers.UNet(unet_width), (batch, 8, lines, 2 * lines), (None, None, "lat", None), 4,
            (nn.Sequential, nn.ConvTranspose2d),
        ),
        "mixer": Net(
            lambda mesh, axis: layers.Mixer(rows * columns, channels, 512), (batch, channels, rows, columns),
            (None, None, "lat", None), 1, nn.Sequential, target=lambda y: y.flatten(2).transpose(1, 2),
        ),
        "experts": Net(
            lambda mesh, axis: nn.Sequential(*(ExpertBlock(width, mesh, axis) for _ in range(2))),
            (batch, tokens, width), (None, "lat", None), 1, ExpertBlock, True,
        ),
    }  # fmt: skip


# -- ways ------------------------------------------------------------------------------------------------------------


@dataclass
class Training:
    """A model under an optimizer on this rank, ready to step."""

    model: Any
    loss: Callable[[], Tensor]
    """Forward and backward; the loss of the whole batch."""
    last_loss: Tensor = field(default_factory=lambda: torch.zeros(()))

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)

    def step(self) -> None:
        self.model.zero_grad()
        self.last_loss = self.loss()
        self.optimizer.step()

    def gradients(self) -> dict[str, Tensor]:
        """Those of the last step, whole, on every rank; a stage has its own."""
        found = {
            name.removeprefix("module."): p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
            for name, p in self.model.named_parameters()
        }
        parts: list[Any] = [found]
        if dist.is_initialized() and dist.get_world_size() > 1:
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, found)
        return {name: gradient for part in parts for name, gradient in part.items()}

    def state_bytes(self) -> int:
        """Of weights and of the optimizer's moments, on this rank."""
        held = [*self.model.parameters()]
        held += [t for of_one in self.optimizer.state.values() for t in of_one.values() if isinstance(t, Tensor)]
        return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in held)


Way = Callable[[Net, Tensor, Tensor, Axes], Training]


def _recomputed(model: nn.Module, units: Any) -> nn.Module:
    """The model with each of its units under activation checkpointing; no name changes."""
    for module in [*model.modules()]:
        if module is not model and isinstance(module, units):
            module.forward = partial(checkpoint, module.forward, use_reentrant=False)
    return model


def _loss_of(model: Any, x: Any, y: Any) -> Tensor:
    out = model(x)
    loss = F.mse_loss(out, y)
    for module in model.modules():
        if isinstance(module, jigsaw.nn.MoE):
            loss = loss + 0.01 * module.balance_loss
    loss.backward()
    return loss.detach()


def one_process(net: Net, x: Tensor, y: Tensor, axes: Axes) -> Training:
    """Plain torch."""
    model = net.make(world_mesh(lat=1) if net.experts else None, "lat")
    return Training(model, lambda: _loss_of(model, x, net.target(y)))


def on_tiles(
    batch: str | None = None, space: Spec = (), axis: Any = "lat", recomputed: bool = False, **options: Any
) -> Way:
    """Jigsaw: the batch cut along the axis `batch`, rows along those of `space`."""

    def make(net: Net, x: Tensor, y: Tensor, axes: Axes) -> Training:
        mesh = world_mesh(**axes)
        spec = net.cut_as(space, batch)
        model = net.make(mesh, axis)
        model = _recomputed(model, net.units) if recomputed else model
        if "shard_weights" in options:
            options["units"] = [m for m in model.modules() if m is not model and isinstance(m, net.units)]
        model = jigsaw.parallelize(model, mesh, **options)
        into, target = (jigsaw.shard(t, mesh, spec, align={2: net.align}) for t in (x, y))
        return Training(model, lambda: _loss_of(model, into, net.target(target)))

    return make


def in_stages(schedule: str, space: Spec = ()) -> Way:
    """Jigsaw: layers along `pipe`, eight microbatches."""

    def make(net: Net, x: Tensor, y: Tensor, axes: Axes) -> Training:
        mesh = world_mesh(**axes)
        spec = net.cut_as(space)
        model = net.make(mesh, "lat")
        pipe = jigsaw.pipeline(model, mesh, loss=F.mse_loss, microbatches=x.shape[0], schedule=schedule)
        into, target = (jigsaw.shard(t, mesh, spec, align={2: net.align}) for t in (x, y))
        return Training(pipe, lambda: pipe.step(into, net.target(target)))

    return make


def _share(x: Tensor) -> Tensor:
    return x.chunk(dist.get_world_size())[dist.get_rank()]


def _mean_over_ranks(loss: Tensor) -> Tensor:
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def ddp(net: Net, x: Tensor, y: Tensor, axes: Axes) -> Training:
    """torch's DistributedDataParallel."""
    model = DistributedDataParallel(net.make(None, None))
    into, target = _share(x), _share(y)
    return Training(model, lambda: _mean_over_ranks(_loss_of(model, into, net.target(target))))


def fsdp2(recomputed: bool = False) -> Way:
    """torch's fully_shard, a unit a block."""

    def make(net: Net, x: Tensor, y: Tensor, axes: Axes) -> Training:
        model, mesh = net.make(None, None), init_device_mesh("cpu", (dist.get_world_size(),))
        model = _recomputed(model, net.units) if recomputed else model
        for module in [*model.modules()]:
            if module is not model and isinstance(module, net.units):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
        into, target = _share(x), _share(y)
        return Training(model, lambda: _mean_over_ranks(_loss_of(model, into, net.target(target))))

    return make


def tensor_parallel(is_sequence_cut: bool) -> Way:
    """torch's `parallelize_module`, as its tutorial has it: columns, then rows; tokens whole, or cut between."""

    def make(net: Net, x: Tensor, y: Tensor, axes: Axes) -> Training:
        mesh, model = init_device_mesh("cpu", (dist.get_world_size(),)), net.make(None, None)
        tokens = Shard(1) if is_sequence_cut else Replicate()
        for block in model:
            plan: dict[str, Any] = dict.fromkeys(("q", "k", "v", "mlp.0"), ColwiseParallel())
            plan |= dict.fromkeys(("out", "mlp.2"), RowwiseParallel(output_layouts=tokens))
            if is_sequence_cut:
                plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
                whole = PrepareModuleInput(input_layouts=tokens, desired_input_layouts=Replicate())
                plan |= {"q": ColwiseParallel(input_layouts=tokens), "k": ColwiseParallel(input_layouts=tokens)}
                plan |= {"v": ColwiseParallel(input_layouts=tokens), "mlp": whole}
            parallelize_module(block, mesh, plan)
        into, target = (t.chunk(dist.get_world_size(), 1)[dist.get_rank()] if is_sequence_cut else t for t in (x, y))

        if not is_sequence_cut:
            return Training(model, lambda: _loss_of(model, into, target))

        def loss() -> Tensor:
            found = F.mse_loss(model(into), target) / dist.get_world_size()
            found.backward()
            return _mean_over_ranks(found.detach()) * dist.get_world_size()

        return Training(model, loss)

    return make


def ways(name: str, ranks: int) -> dict[str, tuple[Axes, Way]]:
    """The ways to cut a net over so many ranks, each with its mesh."""
    one = {"lat": ranks}
    if name == "experts":
        found: dict[str, tuple[Axes, Way]] = {
            "jigsaw: batch and experts": ({"data": ranks}, on_tiles("data", axis="data")),
            "jigsaw: space and experts": (one, on_tiles(space=("lat",))),
        }
        if ranks == 4:
            both = on_tiles("data", space=("lat",), axis=("data", "lat"))
            found["jigsaw: batch, space and experts"] = ({"data": 2, "lat": 2}, both)
        return found
    found = {
        "torch: DDP": ({}, ddp),
        "jigsaw: batch": ({"data": ranks}, on_tiles("data")),
        "torch: FSDP2": ({}, fsdp2()),
        "jigsaw: batch, weights 1/P": ({"data": ranks}, on_tiles("data", shard_weights=True)),
        "torch: FSDP2, recomputed": ({}, fsdp2(True)),
        "jigsaw: space": (one, on_tiles(space=("lat",))),
        "jigsaw: space, weights 1/P": (one, on_tiles(space=("lat",), shard_weights=True)),
        "jigsaw: space, weights 1/P, recomputed": (one, on_tiles(space=("lat",), recomputed=True, shard_weights=True)),
        "jigsaw: channels": ({"channel": ranks}, on_tiles()),
    }
    if name == "transformer":
        found |= {
            "jigsaw: channels and tokens": ({"channel": ranks}, on_tiles(space=("channel",))),
            "torch: tensor parallel": ({}, tensor_parallel(False)),
            "torch: sequence parallel": ({}, tensor_parallel(True)),
        }
    if name != "mixer":  # it is one layer
        found |= {"jigsaw: stages, 1F1B": ({"pipe": ranks}, in_stages("1f1b"))}
    if ranks == 4:
        found |= {
            "jigsaw: batch x space": ({"data": 2, "lat": 2}, on_tiles("data", space=("lat",))),
            "jigsaw: space x channels": ({"lat": 2, "channel": 2}, on_tiles(space=("lat",))),
        }
        if name != "mixer":
            found |= {"jigsaw: stages x space": ({"pipe": 2, "lat": 2}, in_stages("1f1b", ("lat",)))}
    return found


# -- on every rank ---------------------------------------------------------------------------------------------------

_made: dict[str, Training] = {}


def _training(name: str, way: Way, axes: Axes, small: bool) -> Training:
    net = nets(small)[name]
    torch.manual_seed(0)
    x, y = torch.randn(net.shape), torch.randn(net.shape)
    torch.manual_seed(1)
    return way(net, x, y, axes)


def prepare(name: str, contender: str, ranks: int, small: bool, reference: dict[str, Any]) -> dict[str, Any]:
    """Make the contender, how far it is from the reference, and what it holds."""
    axes, way = ({}, one_process) if ranks == 1 else ways(name, ranks)[contender]
    mine = _training(name, way, axes, small)
    losses, gradients = [], {}
    for _ in range(3):
        mine.step()
        losses.append(mine.last_loss.item())
        gradients = gradients or copy.deepcopy(mine.gradients())
    facts: dict[str, Any] = {"state_bytes": mine.state_bytes()}
    facts["peak_bytes"] = facts["state_bytes"] + layers.peak_bytes(mine)
    _made[contender] = mine
    if ranks == 1:
        return facts | {"losses": losses, "gradients": gradients}
    return facts | {"max_rel_err": max(_errors(losses, gradients, reference))}


def _errors(losses: list[float], gradients: dict[str, Tensor], reference: dict[str, Any]) -> Iterator[float]:
    for mine, right in zip(losses, reference["losses"], strict=True):
        yield abs(mine - right) / abs(right)
    # a gradient that is none but for rounding, as that of a bias of keys, is measured by the others
    least = 1e-3 * max(g.abs().max().item() for g in reference["gradients"].values())
    assert gradients.keys() == reference["gradients"].keys()
    for name, right in reference["gradients"].items():
        yield (gradients[name] - right).abs().max().item() / max(right.abs().max().item(), least)


def timed(contender: str) -> tuple[float, float]:
    """Wall and processor seconds of a step."""
    mine = _made[contender]
    if dist.is_initialized():
        dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    mine.step()
    return time.perf_counter() - start, time.process_time() - busy


def forget() -> None:
    """Free the contenders of a net."""
    _made.clear()


# -- taking turns ----------------------------------------------------------------------------------------------------


def compared(name: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """The result of every way to cut a net."""
    ranks, small, plain = chosen.ranks, chosen.small, "torch: one process"
    shape = nets(small)[name].shape
    (reference,) = run_on_ranks(1, prepare, name, plain, 1, small, {}, timeout=TIMEOUT)
    facts = {"case": name, "ranks": ranks, "shape": shape}
    held = {key: reference[key] for key in ("state_bytes", "peak_bytes")}
    fields: dict[str, dict[str, Any]] = {plain: facts | {"engine": plain, "max_rel_err": 0.0, "mesh": {}} | held}
    for contender, (axes, _) in ways(name, ranks).items():
        if not any(part in contender for part in chosen.way):
            continue
        fields[contender] = facts | {"engine": contender, "mesh": axes}
        try:
            found = run_on_ranks(ranks, prepare, name, contender, ranks, small, reference, timeout=TIMEOUT)
            most = {key: max(one[key] for one in found) for key in found[0]}
            fields[contender] |= most
            if not most["max_rel_err"] < CLOSE:
                fields[contender]["refused"] = f"wrong: an error of {most['max_rel_err']:.2g}"
        except RankFailedError as failed:
            fields[contender]["refused"] = last_words(str(failed))
    able = [contender for contender, told in fields.items() if "refused" not in told]
    if len(able) < len(fields):  # after a failure the ranks are new ones
        for contender in able[1:]:
            run_on_ranks(ranks, prepare, name, contender, ranks, small, reference, timeout=TIMEOUT)
    times: dict[str, list[tuple[float, float]]] = {contender: [] for contender in able}
    sent: dict[str, list[int]] = {contender: [] for contender in able}
    for turn in range(chosen.rounds):
        for contender in (*able[turn % len(able) :], *able[: turn % len(able)]):
            before = loopback_bytes()
            of_ranks = run_on_ranks(1 if contender == plain else ranks, timed, contender, timeout=TIMEOUT)
            sent[contender].append(loopback_bytes() - before)
            times[contender].append((max(wall for wall, _ in of_ranks), sum(busy for _, busy in of_ranks)))
    for count in {1, ranks}:
        run_on_ranks(count, forget)
    for contender in able:
        fields[contender] |= {
            "cpu_s": round(statistics.median(busy for _, busy in times[contender]), 4),
            "wall_s": round(statistics.median(wall for wall, _ in times[contender]), 4),
            "sent_bytes": min(sent[contender]) if os.environ.get(IN_NAMESPACE) else None,
            "rounds": chosen.rounds,
        }
    return list(fields.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--net", nargs="+", choices=list(nets(True)), default=list(nets(True)))
    parser.add_argument("--way", nargs="+", default=[""], help="parts of the names of ways; all by default")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--small", action="store_true", help="toy size, as the tests run it")
    add_result_options(parser)
    parser.add_argument("--page", action="store_true", help="only make the tables of the result files")
    chosen = parser.parse_args()
    if not chosen.page:
        in_own_namespace()
        words = f"--ranks {chosen.ranks} --net {' '.join(chosen.net)} --rounds {chosen.rounds}"
        words += f" --way {' '.join(chosen.way)}" if any(chosen.way) else ""
        results = ResultFile(chosen, f"python benchmarks/strategies.py {words}")
        for name in chosen.net:
            for result in compared(name, chosen):
                results.add(result)
    if chosen.page or chosen.output:
        strategies_page.write_tables()


if __name__ == "__main__":
    main()
