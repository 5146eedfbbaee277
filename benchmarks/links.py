"""How much of what travels is hidden by computing: two hosts of two ranks each, joined by a slow link.

    sudo python benchmarks/links.py --rounds 9 --output benchmarks/results/links-MACHINE-MONTH.jsonl

A host is a network namespace; a pair of `veth` devices joins them, and `tc ... tbf` limits what leaves either end (no
latency is added).  Four ranks lie along `lat`, ranks 0 and 1 on one host, 2 and 3 on the other; a step is a forward and
a backward pass.  So that four ranks do not share two cores, each has a device that is simulated: products and
convolutions are not carried out, their thread sleeps for as long as a device of so many operations a second would need
(`--computing sleep`; with `real` they are carried out).  All else, messages first of all, is what always happens.  A
round is a step over the open link and one over the slow link, in turns; the rate is such that the bytes of a step take
`--share` of the time that is computed.

    transfer_s = link_bytes / rate              link_bytes: what left an end of the link, the larger of the two, headers
                                                and acknowledgements included (/sys/class/net/*/statistics/tx_bytes)
    hidden     = 1 - (slow_s - open_s) / transfer_s

`open_s` and `slow_s` are medians over the rounds, of the slowest rank; `computing_s` is how long a step sleeps.
`hidden_of_least` is `hidden` of the fastest step over each link: where others have the cores too, a late step says
nothing of the link.  `counted_over_formula` is what `jigsaw.comm.count` says that all ranks send, over the formula of
the layer's docstring; `link_over_formula` is `link_bytes` over those bytes of the formula that go over the link.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.nn.functional as F
from result_file import ResultFile, add_result_options
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import flop_registry

import jigsaw
from jigsaw import comm

RANKS, FLOAT = 4, 4
HOSTS = (f"jigsaw-{os.getpid()}-a", f"jigsaw-{os.getpid()}-b")  # several runs may have theirs at a time
MTU = 9000
Step = Callable[[], Any]

# -- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A step, and the bytes of its formula: those that all ranks send, and those that go over the link one way."""

    make: Callable[[DeviceMesh, int], Step]
    sent: Callable[[int], float]
    crossing: Callable[[int], float]


def _leaf(x: Tensor, mesh: DeviceMesh, spec: tuple[str | None, ...]) -> jigsaw.Tile:
    """A tile whose gradient is asked for."""
    tile = jigsaw.shard(x, mesh, spec)
    return jigsaw.Tile(tile.local.clone().requires_grad_(), tile.layout, mesh)


def _trained(model: nn.Module, tile: Any) -> Step:
    def step() -> None:
        model.zero_grad()
        model(tile).square().mean().backward()

    return step


CONVOLUTIONS, CHANNELS, ROWS, WIDTH = 3, 32, 20, 1440


def _halos(mesh: DeviceMesh, scale: int) -> Step:
    """Convolutions 3 x 3; weights are not reduced, so that halos alone travel."""
    layers = [nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False) for _ in range(CONVOLUTIONS)]
    x = torch.randn(1, CHANNELS, RANKS * ROWS, WIDTH // scale)
    return _trained(nn.Sequential(*layers), jigsaw.shard(x, mesh, (None, None, "lat", None)))


def _halo_bytes(scale: int) -> float:
    # a row forward for each convolution, and a row backward for each but the first, whose input needs no gradient
    return (2 * CONVOLUTIONS - 1) * CHANNELS * (WIDTH // scale) * FLOAT


TOKENS, HEADS, FEATURES = 2048, 2, 512


def _attention(mesh: DeviceMesh, scale: int) -> Step:
    """Keys and values around a ring, and their gradients behind them."""
    x = torch.randn(3, 1, HEADS, TOKENS // scale, FEATURES)
    leaves = [_leaf(part, mesh, (None, None, "lat", None)) for part in x]

    def step() -> None:
        for leaf in leaves:
            leaf.local.grad = None
        with jigsaw.nn.attention_way("ring"):
            F.scaled_dot_product_attention(*leaves).square().mean().backward()

    return step


def _attention_bytes(scale: int) -> float:
    # P - 1 blocks of keys and values forward, as many backward, and their gradients
    return 3 * (RANKS - 1) * 2 * HEADS * (TOKENS // scale // RANKS) * FEATURES * FLOAT


LINEAR = 1024


def _weights(mesh: DeviceMesh, scale: int) -> Step:
    """y = x Wᵀ whose weight lies 1/P on each rank, along the axis that cuts the tokens: its rows go around."""
    model = jigsaw.nn.Linear(LINEAR // scale, LINEAR // scale, bias=False, mesh=mesh, axis="lat")
    return _trained(model, _leaf(torch.randn(4096 // scale, LINEAR // scale), mesh, ("lat", None)))


def _weight_bytes(scale: int) -> float:
    # (1 - 1/P) of W forward, of W again and of its gradient's partial sums backward
    return 3 * (RANKS - 1) * (LINEAR // scale) ** 2 // RANKS * FLOAT


def _sums(mesh: DeviceMesh, scale: int) -> Step:
    """A linear over tokens that are cut: partial sums of y go around, backward its gradient."""
    n = 2048 // scale
    torch.manual_seed(0)
    model = jigsaw.nn.Mix(n, n, bias=False, mesh=mesh)
    return _trained(model, _leaf(torch.randn(1, n, SUMMED // scale), mesh, (None, "lat", None)))


SUMMED = 512


def _sum_bytes(scale: int) -> float:
    # (1 - 1/P) R N forward, and as much backward, of R = 512 features of N = 2048 tokens
    return 2 * (RANKS - 1) * SUMMED // scale * (2048 // scale) // RANKS * FLOAT


LAYERS, WIDE = 12, 512


def _gradients(mesh: DeviceMesh, scale: int) -> Step:
    """Weights that every rank has: the gradients of a layer are a bucket."""
    layers = [nn.Sequential(nn.Linear(WIDE // scale, WIDE // scale, bias=False), nn.GELU()) for _ in range(LAYERS)]
    model = jigsaw.parallelize(nn.Sequential(*layers), mesh, bucket_bytes=FLOAT * (WIDE // scale) ** 2)
    return _trained(model, jigsaw.shard(torch.randn(2048 // scale, WIDE // scale), mesh, ("lat", None)))


def _gradient_bytes(scale: int) -> float:
    # 2 (P-1)/P of all weights, and of a flag for each
    return 2 * (RANKS - 1) / RANKS * LAYERS * ((WIDE // scale) ** 2 + 1) * FLOAT


CASES = {
    # three of the four ranks' neighbors below, and three above: six messages, one of them over the link each way
    "halos": Case(_halos, lambda scale: 6 * _halo_bytes(scale), _halo_bytes),
    # in a ring one of four ranks sends over the link each way
    "ring attention": Case(_attention, lambda scale: RANKS * _attention_bytes(scale), _attention_bytes),
    "matmul ring of weights": Case(_weights, lambda scale: RANKS * _weight_bytes(scale), _weight_bytes),
    "matmul ring of sums": Case(_sums, lambda scale: RANKS * _sum_bytes(scale), _sum_bytes),
    "gradients": Case(_gradients, lambda scale: RANKS * _gradient_bytes(scale), _gradient_bytes),
}

# -- a device --------------------------------------------------------------------------------------------------------


_aten = torch.ops.aten
# attention on CPUs, of which torch counts no operations, has those of the same on GPUs
_COUNTED_AS = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}


class SimulatedDevice(TorchDispatchMode):
    """Sleeps where torch would multiply or convolve, and gives zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.flops_per_s = 0, math.inf

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        counted = flop_registry.get(_COUNTED_AS.get(packet, packet))
        if counted is None:
            return func(*args, **(kwargs or {}))
        there, options = tree_map_only(Tensor, lambda x: x.to("meta"), (args, kwargs or {}))
        shapes = func(*there, **options)
        flops = counted(*args, **(kwargs or {}), out_val=shapes)
        self.flops += flops
        time.sleep(flops / self.flops_per_s)
        return tree_map_only(Tensor, lambda x: torch.zeros_like(x, device="cpu"), shapes)


# -- on a rank -------------------------------------------------------------------------------------------------------


def serve(rank: int, folder: str) -> None:
    """The life of a rank: join, then answer what comes by standard input, a JSON value a line."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "a parameter of shape")  # not reduced, so that one kind of message travels alone
    answers, sys.stdout = sys.stdout, sys.stderr
    store = dist.FileStore(f"{folder}/store", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    mesh = jigsaw.init_mesh(device="cpu", lat=RANKS)
    step: Step = list
    device = SimulatedDevice()
    print("0", file=answers, flush=True)
    for line in sys.stdin:
        answer: Any = 0
        match json.loads(line):
            case ["make", name, scale]:
                torch.manual_seed(0)
                step = CASES[name].make(mesh, scale)
                for _ in range(2):
                    step()
                with comm.count() as sent:
                    step()
                answer = sent.sent_bytes
            case ["compute", seconds]:
                device.flops, device.flops_per_s = 0, math.inf
                with device:
                    step()
                answer, device.flops_per_s = device.flops, device.flops / seconds
            case [is_simulated]:
                dist.barrier()
                since = time.perf_counter()
                with device if is_simulated else nullcontext():
                    step()
                answer = time.perf_counter() - since
        print(json.dumps(answer), file=answers, flush=True)


# -- the link --------------------------------------------------------------------------------------------------------


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip()} (root, iproute2 and veth are needed)")
    return done.stdout


@contextmanager
def linked_hosts() -> Iterator[None]:
    """Two namespaces with an end of a link each, which is called `wire` in both."""
    made: list[str] = []
    try:
        for host in HOSTS:
            _run("ip", "netns", "add", host)
            made.append(host)
        ends = [["name", "wire", "netns", host] for host in HOSTS]
        _run("ip", "link", "add", *ends[0], "type", "veth", "peer", *ends[1])
        for i, host in enumerate(HOSTS):
            inside = ("ip", "-n", host)
            _run(*inside, "addr", "add", f"10.77.0.{i + 1}/24", "dev", "wire")
            # frames as they would be on a wire: a device that splits them itself would count one header for many
            _run(*inside, "link", "set", "wire", "mtu", str(MTU), "up")
            _run(*inside, "link", "set", "lo", "up")
            # a connection that computing left idle keeps its window, as clusters have it
            _run("ip", "netns", "exec", host, "sysctl", "-w", "net.ipv4.tcp_slow_start_after_idle=0")
        yield
    finally:
        for host in made:
            _run("ip", "netns", "delete", host)


def limit_rate(bits_per_s: float | None) -> None:
    """Slow down both ends, or open them."""
    for host in HOSTS:
        there = ("tc", "-n", host, "qdisc")
        if bits_per_s is not None:
            how = ["rate", f"{round(bits_per_s)}bit", "burst", str(2 * MTU), "limit", "64mb"]
            _run(*there, "replace", "dev", "wire", "root", "tbf", *how)
        elif "tbf" in _run(*there, "show", "dev", "wire"):
            _run(*there, "delete", "dev", "wire", "root")


def bytes_out() -> list[int]:
    """What has left each end."""
    place = "/sys/class/net/wire/statistics/tx_bytes"
    return [int(_run("ip", "netns", "exec", host, "cat", place)) for host in HOSTS]


# -- the ranks, from outside -----------------------------------------------------------------------------------------


class Ranks:
    """Four ranks, two on each host."""

    def __init__(self, folder: str) -> None:
        environment = os.environ | {"GLOO_SOCKET_IFNAME": "wire", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, __file__, "--folder", folder, "--rank"]
        self.processes = [
            subprocess.Popen(
                ["ip", "netns", "exec", HOSTS[rank * len(HOSTS) // RANKS], *command, str(rank)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for rank in range(RANKS)
        ]  # fmt: skip
        self.answers()

    def ask(self, question: Any) -> list[Any]:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
        return self.answers()

    def answers(self) -> list[Any]:
        found: list[Any] = []
        for rank, process in enumerate(self.processes):
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                self.end()
                raise SystemExit(f"rank {rank} ended without an answer")
            found.append(json.loads(line))
        return found

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def measure(name: str, ranks: Ranks, chosen: argparse.Namespace) -> dict[str, Any]:
    """All about one case."""
    case, scale, is_simulated = CASES[name], 8 if chosen.small else 1, chosen.computing == "sleep"
    limit_rate(None)
    counted = sum(ranks.ask(["make", name, scale]))
    ranks.ask(["compute", chosen.seconds])
    computing_s = chosen.seconds if is_simulated else min(max(ranks.ask([False])) for _ in range(5))
    before = bytes_out()
    ranks.ask([is_simulated])
    link_bytes = max(now - then for now, then in zip(bytes_out(), before, strict=True))
    bits_per_s = 8 * link_bytes / (chosen.share * computing_s)
    rounds: list[tuple[float, float]] = []
    for _ in range(chosen.rounds):
        limit_rate(None)
        open_s = max(ranks.ask([is_simulated]))
        limit_rate(bits_per_s)
        rounds.append((open_s, max(ranks.ask([is_simulated]))))
    open_s, slow_s = (statistics.median(r[i] for r in rounds) for i in range(2))
    least = [min(r[i] for r in rounds) for i in range(2)]
    transfer_s = 8 * link_bytes / bits_per_s
    return {
        "case": name,
        "ranks": RANKS,
        "computing": chosen.computing,
        "computing_s": round(computing_s, 4),
        "open_s": round(open_s, 4),
        "slow_s": round(slow_s, 4),
        "transfer_s": round(transfer_s, 4),
        "mbit_per_s": round(bits_per_s / 1e6, 1),
        "hidden": round(1 - (slow_s - open_s) / transfer_s, 3),
        "hidden_of_least": round(1 - (least[1] - least[0]) / transfer_s, 3),
        "sent_bytes": counted,
        "link_bytes": link_bytes,
        "counted_over_formula": round(counted / case.sent(scale), 4),
        "link_over_formula": round(link_bytes / case.crossing(scale), 4),
        "rounds": chosen.rounds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--share", type=float, default=0.5, help="transfer, over computing")
    parser.add_argument("--computing", choices=["sleep", "real"], default="sleep")
    parser.add_argument("--seconds", type=float, default=0.6, help="how long the simulated device computes in a step")
    parser.add_argument("--small", action="store_true", help="toy size")
    add_result_options(parser)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        serve(chosen.rank, chosen.folder)
        return
    with linked_hosts(), tempfile.TemporaryDirectory() as folder:
        ranks = Ranks(folder)
        try:
            command = " ".join(
                ["python benchmarks/links.py", f"--rounds {chosen.rounds}", f"--share {chosen.share}"]
                + [f"--seconds {chosen.seconds}", f"--computing {chosen.computing}"]
            )
            results = ResultFile(chosen, command)
            for name in chosen.case:
                results.add(measure(name, ranks, chosen))
        finally:
            ranks.end()


if __name__ == "__main__":
    main()
