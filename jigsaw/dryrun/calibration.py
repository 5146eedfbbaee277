"""Measured speed of this machine's processor: a `Device` for dry runs of CPU ranks."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.drafts import draft_of
from jigsaw.dryrun.devices import DEVICES, Device
from jigsaw.dryrun.dry_runs import dry_run
from jigsaw.dryrun.kernel_clock import forget_kernels
from jigsaw.dryrun.report import PHASES
from jigsaw.errors import ShardingError
from jigsaw.parallel.parallelize import parallelize
from jigsaw.tile.tile_making import shard

_DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def measure_device(ranks: int = 2, rounds: int = 3) -> Device:
    """Measure this machine's processor, one thread a rank: its peaks, Python's cost for an operator, and messages.

    Kernels are timed as they are called, each by itself, so the device is valid for dry runs on this machine.  Each of
    the `rounds`, of some ten seconds, measures how much longer everything takes in steps of one, `ranks` and twice as
    many ranks.  The measure is processor seconds of the working thread, which other processes and ranks disturb little;
    gloo's own threads come on top (docs/dry_run.md).
    """
    from jigsaw.testing import run_on_ranks

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        flop = {dtype: _product_rate(dtype) for dtype in _DTYPES}
        bandwidth, kernel = _copy_rate(), _kernel_seconds()
        host = _host_seconds(run_on_ranks(1, _tiny_step_seconds)[0])
    finally:
        torch.set_num_threads(threads)
    calls, more = run_on_ranks(ranks, _call_seconds)[0]
    calls |= _beside_kernels(calls, more, host, kernel, ranks)
    step = dry_run(_TinyNet(), _TINY, {"lat": 1}).ranks[0].phases["step"]
    host["step of parts"] = host["step"] + max(more["step of parts"], 0.0) / step.kernels
    start, seconds_a_byte = calls["message"]
    device = replace(
        DEVICES["cpu"],
        name="this machine",
        flop_per_second=flop,
        memory_bandwidth=bandwidth,
        node_bandwidth=1 / seconds_a_byte,
        kernel_seconds=kernel,
        node_seconds=start,
        host_seconds=host,
        call_seconds=calls,
        times_kernels=True,
    )
    crowding, of_host = _crowding(device, sorted({1, ranks, 2 * ranks}), rounds)
    return replace(device, crowding=crowding, host_crowding=of_host)


def _best_time(work: Callable[[], object], times: int = 5) -> float:
    """Return the least processor seconds of this thread in some runs."""
    return max(min(_times_of(work, times)), 1e-9)


def _times_of(work: Callable[[], object], times: int) -> list[float]:
    work()
    seconds: list[float] = []
    for _ in range(times):
        since = time.thread_time()
        work()
        seconds.append(time.thread_time() - since)
    return seconds


def _usual_time(work: Callable[[], object], times: int = 15) -> float:
    """Return the median of the processor seconds of this thread."""
    work()
    return statistics.median(_times_of(work, times))


def _product_rate(dtype: torch.dtype, size: int = 512) -> float:
    x = torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / _best_time(lambda: x @ x)


def _copy_rate(size: int = 2**24) -> float:
    # a net's kernels move data that lies partly in caches; so does an addition of 16 MiB
    x = torch.ones(size // 4)
    return 3 * size / _best_time(lambda: x + x)


def _kernel_seconds(times: int = 2000) -> float:
    x = torch.ones(8)

    def work() -> None:
        for _ in range(times):
            torch.add(x, x)

    return _best_time(work) / times


# -- Python -----------------------------------------------------------------------------------------------------------


class _TinyNet(nn.Module):
    """Layers of usual nets, so small that a step is only Python and the starts of kernels."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.GroupNorm(2, width), nn.SiLU(), nn.Conv2d(width, width, 1)
        )
        self.norm, self.qkv = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.mlp = nn.Sequential(nn.Linear(width, width), nn.GELU(), nn.Linear(width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolutions(x).flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 1, -1)).permute(2, 0, 3, 1, 4)
        x = x + nn.functional.scaled_dot_product_attention(q, k, v).squeeze(1)
        return x + self.mlp(x)


_TINY = 1, 8, 8, 8
_ROWS_SPEC = None, None, "lat", None


def _tiny_step_seconds() -> dict[str, float]:
    from jigsaw.testing import world_mesh

    mesh = world_mesh(lat=1)
    model = parallelize(_TinyNet(), mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tile = shard(torch.randn(_TINY), mesh, _ROWS_SPEC)
    times_by_phase: dict[str, list[float]] = {name: [] for name in PHASES}
    for _ in range(30):
        optimizer.zero_grad()
        at = [time.thread_time()]
        loss = model(tile).square().mean()
        at.append(time.thread_time())
        loss.backward()
        at.append(time.thread_time())
        optimizer.step()
        at.append(time.thread_time())
        for name, since, until in zip(PHASES, at, at[1:], strict=False):
            times_by_phase[name].append(until - since)
    return {name: statistics.median(times) for name, times in times_by_phase.items()}


def _host_seconds(measured: Mapping[str, float]) -> dict[str, float]:
    report = dry_run(_TinyNet(), _TINY, {"lat": 1}, device=replace(DEVICES["cpu"], times_kernels=True))
    seconds_by_phase: dict[str, float] = {}
    for name, phase in report.ranks[0].phases.items():
        seconds_by_phase[name] = max(measured[name] - phase.seconds, 0.0) / phase.kernels
    return seconds_by_phase


# -- kernels beside others --------------------------------------------------------------------------------------------


class _UsualNet(nn.Module):
    """Convolutions, attention over patches, and layers over channels, of sizes at which kernels dominate a step."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(4, width, 5, padding=2),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.AvgPool2d(2),
        )
        self.patches = nn.Conv2d(width, 4 * width, 2, stride=2)
        self.tokens = nn.TransformerEncoderLayer(4 * width, 4, 8 * width, 0.0, batch_first=True, norm_first=True)
        self.rise = nn.ConvTranspose2d(4 * width, 4, 4, stride=4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(self.convolutions(x))
        x = self.tokens(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])
        return self.rise(x)


_USUAL = 2, 4, 80, 112


def _usual_step_seconds() -> tuple[float, float]:
    """Return on each rank the processor seconds of a training step of its own, and of one that all take, on tiles."""
    from jigsaw.testing import world_mesh

    mesh = world_mesh(lat=dist.get_world_size())
    x = torch.randn(_USUAL)
    cases = (_UsualNet(), x), (parallelize(_UsualNet(), mesh), shard(x, mesh, _ROWS_SPEC, align=4))
    steps: list[Callable[[], None]] = []
    for net, net_input in cases:
        steps.append(partial(_train, net, torch.optim.AdamW(net.parameters()), net_input))
    times_by_net: list[list[float]] = [[], []]
    for _ in range(3):
        for step, seconds in zip(steps, times_by_net, strict=True):
            dist.barrier()
            seconds += _times_of(step, 4)
    return statistics.median(times_by_net[0]), statistics.median(times_by_net[1])


def _train(net: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    net(x).square().mean().backward()
    optimizer.step()


def _crowding(device: Device, counts: Sequence[int], rounds: int) -> tuple[dict[int, float], dict[int, float]]:
    """Return the slow-down of kernels, and of Python and messages, in a step of each number of ranks in `counts`.

    Arguments come from other kernels, memory is new, and ranks share caches.  Both sides are measured by turns, because
    a machine's speed changes from minute to minute.
    """
    from jigsaw.testing import run_on_ranks

    of_kernels: dict[int, list[float]] = {n: [] for n in counts}
    of_host: dict[int, list[float]] = {n: [] for n in counts if n > 1}
    for _ in range(rounds):
        forget_kernels()
        alone = _priced_usual_step(device, 1)
        for ranks in counts:
            plain, cut = (max(of) for of in zip(*run_on_ranks(ranks, _usual_step_seconds), strict=True))
            of_kernels[ranks].append((plain - alone[1]) / alone[0])
            if ranks > 1:
                itself, beside = _priced_usual_step(device, ranks)
                of_host[ranks].append((cut - itself * of_kernels[ranks][-1]) / beside)
    kernels, host = ({n: max(statistics.median(x), 1.0) for n, x in of.items()} for of in (of_kernels, of_host))
    return kernels, host


def _priced_usual_step(device: Device, ranks: int) -> tuple[float, float]:
    mesh, spec = {"lat": ranks}, _ROWS_SPEC
    report = dry_run(_UsualNet(), _USUAL, mesh, spec=spec, align=4, device=device, ranks=[0], ranks_per_node=ranks)
    phases = report.ranks[0].phases
    python = sum(phase.kernels * device.host_seconds[name] for name, phase in phases.items())
    messages = sum(phase.message_seconds for phase in phases.values())
    return sum(phase.seconds for phase in phases.values()) - python - messages, python + messages


# -- messages ---------------------------------------------------------------------------------------------------------

_LARGE = 2**23


def _call_seconds() -> tuple[dict[str, tuple[float, float]], dict[str, float]]:
    """Return processor seconds of each kind of call, and of a byte, and the extra seconds of layers that send."""
    from jigsaw.testing import world_mesh

    ranks = dist.get_world_size()
    mesh = world_mesh(lat=ranks)
    other = (dist.get_rank() + 1) % ranks

    def swap(x: Tensor, messages: int = 1) -> object:
        outgoing, incoming = [(other, x)] * messages, [(other, torch.empty_like(x)) for _ in range(messages)]
        return comm.swap_messages(mesh, outgoing, incoming).wait()

    def gather(x: Tensor) -> object:
        return dist.all_gather_single(x.new_empty(ranks * x.numel()), x)

    def scatter(x: Tensor) -> object:
        return dist.reduce_scatter_single(x, x.new_ones(ranks * x.numel()))

    ways: dict[str, Callable[[Tensor], object]] = {
        "message": swap,
        "all_reduce": lambda x: comm.all_reduce(x, mesh, "lat"),
        "all_gather": lambda x: comm.all_gather(x, mesh, "lat"),
        "gathered weights": gather,
        "gradients": scatter,
    }
    costs: dict[str, tuple[float, float]] = {}
    for name, way in ways.items():
        small, large = (_times_of(partial(way, torch.ones(size // 4)), 15) for size in (64, _LARGE))
        sent = 2 * (ranks - 1) * _LARGE // ranks if name == "all_reduce" else (ranks - 1) * _LARGE
        costs[name] = statistics.median(small), max(min(large) - min(small), 1e-6) / sent
    more = statistics.median(_times_of(partial(swap, torch.ones(16), 4), 15)) - costs["message"][0]
    costs["further message"] = max(more / 3, 0.0), costs["message"][1]
    return costs, _more_of_layers(mesh)


_ROWS = 8  # rows of a rank


def _more_of_layers(mesh: DeviceMesh) -> dict[str, float]:
    """Return the extra seconds of layers that send: a halo, a cut convolution's messages, a step of parts."""
    x = torch.randn(1, 4, _ROWS * mesh.size(), 8)
    halves = shard(x, mesh, _ROWS_SPEC), shard(x, mesh, (None, None, None, None))
    conv = parallelize(_convolution(3), mesh)
    with torch.no_grad():
        cut, whole = (_usual_time(partial(conv, t)) for t in halves)

    def step(model: nn.Module) -> None:
        model(halves[0]).sum().backward()

    weights = [parallelize(_convolution(1), mesh, shard_weights=is_cut) for is_cut in (False, True)]
    plain, parted = (_usual_time(partial(step, model)) for model in weights)
    steps: list[float] = []
    for is_cut in (False, True):
        model = parallelize(_TinyNet(), mesh, shard_weights=is_cut)
        model(shard(torch.randn(_TINY), mesh, _ROWS_SPEC)).square().mean().backward()
        steps.append(_usual_time(torch.optim.AdamW(model.parameters()).step))
    return {"message": cut - whole, "parts": parted - plain, "step of parts": steps[1] - steps[0]}


def _convolution(kernel: int) -> nn.Module:
    return nn.Conv2d(4, 4, kernel, padding=kernel // 2)


def _beside_kernels(
    calls: Mapping[str, tuple[float, float]],
    more: Mapping[str, float],
    host: Mapping[str, float],
    kernel: float,
    ranks: int,
) -> dict[str, tuple[float, float]]:
    """Return the seconds of messages in layers, beside their bytes and the kernels (and Python) around them."""

    def kernels(model: nn.Module, spec: tuple[str | None, ...], **options: Any) -> dict[str, int]:
        size = 1, 4, _ROWS * ranks, 8
        phases = dry_run(model, size, {"lat": ranks}, spec=spec, optimizer=None, ranks=[0], **options).ranks[0].phases
        return {name: phase.kernels for name, phase in phases.items()}

    cut, whole = (kernels(_convolution(3), (None, None, name, None)) for name in ("lat", None))
    message = more["message"] - (cut["forward"] - whole["forward"]) * (host["forward"] + kernel)
    parted, plain = (kernels(_convolution(1), _ROWS_SPEC, shard_weights=is_cut) for is_cut in (True, False))
    seconds = more["parts"] + calls["all_reduce"][0]  # the collective that sums gradients of whole weights
    seconds -= sum((parted[name] - plain[name]) * (host[name] + kernel) for name in plain)
    each = max(seconds, 0.0) / 2
    starts = {"message": max(message, calls["message"][0]), "gathered weights": each, "gradients": each}
    return {name: (start, calls[name][1]) for name, start in starts.items()}


# -- on disk ----------------------------------------------------------------------------------------------------------


def save_device(device: Device, path: str | Path) -> None:
    """Write a device as JSON, which `load_device` and ``--device`` read."""
    fields = asdict(device)
    fields["flop_per_second"] = {
        str(dtype).removeprefix("torch."): rate for dtype, rate in device.flop_per_second.items()
    }
    with draft_of(Path(path)) as file:
        file.write(f"{json.dumps(fields, indent=1)}\n".encode())


def load_device(path: str | Path) -> Device:
    """Load a device that `save_device` wrote.

    Raises: `ShardingError` for any other file.

    >>> from jigsaw.dryrun.calibration import load_device, save_device
    >>> save_device(jigsaw.dryrun.DEVICES["h100"], "mine.json")
    >>> load_device("mine.json") == jigsaw.dryrun.DEVICES["h100"]
    True
    """
    try:
        fields = json.loads(Path(path).read_text())
        fields["flop_per_second"] = {getattr(torch, dtype): rate for dtype, rate in fields["flop_per_second"].items()}
        for crowding in ("crowding", "host_crowding"):
            fields[crowding] = {int(ranks): times for ranks, times in fields.get(crowding, {}).items()}
        fields["call_seconds"] = {kind: tuple(seconds) for kind, seconds in fields.get("call_seconds", {}).items()}
        return Device(**fields)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ShardingError(f"{path} was not written by save_device or advise --calibrate: {error}") from error
