"""Speeds of devices, and the time that a rank's work and messages take on them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from jigsaw.errors import ShardingError


@dataclass(frozen=True)
class Device:
    """Peaks of a device as its maker states them, and the shares of them that count as reached.

    Products reach `flop_share` of `flop_per_second`, attention in one kernel reaches `attention_share` of it.
    `flop_per_second` by dtype (a dtype that is not there counts as float32), `memory_bytes`, `memory_bandwidth` in
    bytes a second.  A kernel takes at least `kernel_seconds`.  `node_bandwidth` is the bytes a second that one rank
    sends to ranks of its own node. `network_bandwidth` is those to others while its neighbors do so, too;
    `node_seconds` and `network_seconds` are the time of a message beside that.  `overlap` is the share of the computing
    that can hide sums of gradients and gathers of weights; `reader_cores` are the processor cores that read for a rank.
    One that `is_processor` widens bfloat16 before products of cut dims; a GPU adds them up in float32 by itself.

    Of a processor that was measured (`measure_device`): `host_seconds` is Python's time for an operator, by phase;
    ``"step of parts"`` is that of an optimizer of cut weights.  `call_seconds` are those of a call, and of a byte of
    it, by kind: ``"message"`` is an exchange with one rank, ``"further message"`` one with one more.  With
    `times_kernels` kernels run here and are timed, each by itself.  `crowding` is how many times as long they take in a
    step of so many ranks that share a machine's caches and memory. `host_crowding` is the same of Python and messages.

    >>> from dataclasses import replace
    >>> slow = replace(jigsaw.dryrun.DEVICES["h100"], name="mine", network_bandwidth=1e9)
    >>> slow.link_time("network", 750_000_000, messages=0)
    1.0
    """

    name: str
    flop_per_second: dict[torch.dtype, float]
    memory_bytes: float
    memory_bandwidth: float
    node_bandwidth: float
    network_bandwidth: float
    ranks_per_node: int
    kernel_seconds: float = 5e-6
    node_seconds: float = 8e-6
    network_seconds: float = 15e-6
    flop_share: float = 0.55
    attention_share: float = 0.2
    memory_share: float = 0.8
    link_share: float = 0.75
    overlap: float = 0.8
    reader_cores: int = 4
    host_seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    call_seconds: Mapping[str, tuple[float, float]] = field(default_factory=dict[str, tuple[float, float]])
    times_kernels: bool = False
    is_processor: bool = False
    crowding: Mapping[int, float] = field(default_factory=dict[int, float])
    host_crowding: Mapping[int, float] = field(default_factory=dict[int, float])

    def kernel_time(
        self, flop: int, moved_bytes: int, dtype: torch.dtype, is_attention: bool = False
    ) -> tuple[float, str]:
        """Return the seconds of one kernel, and their bound: ``"flop"``, ``"memory"`` or ``"kernels"``."""
        share = self.attention_share if is_attention else self.flop_share
        peak = self.flop_per_second.get(dtype, self.flop_per_second[torch.float32]) * share
        times = (
            (flop / peak, "flop"),
            (moved_bytes / (self.memory_bandwidth * self.memory_share), "memory"),
            (self.kernel_seconds, "kernels"),
        )
        return max(times)

    def call_time(self, kind: str, link: str, sent_bytes: int, messages: int) -> float:
        """Return the seconds of a call of a kind over a link, from measurements where there are any."""
        measured = self.call_seconds.get(kind, self.call_seconds.get("message")) if link == "node" else None
        if measured is None:
            return self.link_time(link, sent_bytes, messages)
        # a collective is one call, whose ring turns in threads of gloo; so is an exchange with several ranks
        start, each_byte = measured
        further = 0.0 if kind in self.call_seconds else self.call_seconds.get("further message", measured)[0]
        return min(messages, 1) * start + max(messages - 1, 0) * further + sent_bytes * each_byte

    def ring_time(self, sent_bytes: int, messages: int, ranks: int, nodes: int) -> float:
        """Return the seconds of a collective of `ranks` ranks on several nodes, of which each sends so much on a ring.

        This is NCCL's estimate for its choice between rings and trees (``src/graph/tuning.cc``).  A ring goes from node
        to node once a turn, with all adapters of the node's ranks that are on it.  A sum takes a tree where that is
        faster. It sends as many bytes as a ring over very many ranks, at 0.92 of its rate, with one start for each
        level.

        >>> h100 = jigsaw.dryrun.DEVICES["h100"]
        >>> on_ring, by_tree = (h100.ring_time(1000, n, ranks=64, nodes=8) for n in (63, 126))
        >>> round(on_ring * 1e6), round(by_tree * 1e6)
        (553, 202)
        """
        is_sum = messages == 2 * (ranks - 1)
        on_node = ranks / nodes
        bandwidth = min(self.node_bandwidth, on_node * self.network_bandwidth) * self.link_share
        between = (nodes - 1) * (2 if is_sum else 1)
        ring = sent_bytes / bandwidth + (messages - between) * self.node_seconds + between * self.network_seconds
        if not is_sum:
            return ring
        levels = 2 * ((on_node - 1) * self.node_seconds + math.ceil(math.log2(nodes)) * self.network_seconds)
        return min(ring, sent_bytes * ranks / (ranks - 1) / (0.92 * bandwidth) + levels)

    def link_time(self, link: str, sent_bytes: int, messages: int) -> float:
        """Return the seconds that messages of one rank take over a link, ``"node"`` or ``"network"``."""
        bandwidth = self.node_bandwidth if link == "node" else self.network_bandwidth
        start = self.node_seconds if link == "node" else self.network_seconds
        return sent_bytes / (bandwidth * self.link_share) + messages * start


def crowding_among(crowding: Mapping[int, float], ranks: int) -> float:
    """Return how many times as long something takes beside `ranks` ranks, on a line between the measured numbers. More
    ranks count as the most that were measured.

    >>> from jigsaw.dryrun.devices import crowding_among
    >>> crowding_among({1: 1.0, 2: 1.5, 4: 2.5}, 3)
    2.0
    """
    if not crowding:
        return 1.0
    below = max((n for n in crowding if n <= ranks), default=min(crowding))
    above = min((n for n in crowding if n >= ranks), default=max(crowding))
    share = (ranks - below) / (above - below) if above > below else 0.0
    return crowding[below] + share * (crowding[above] - crowding[below])


def _flops(float64: float, float32: float, sixteen: float) -> dict[torch.dtype, float]:
    return {torch.float64: float64, torch.float32: float32, torch.bfloat16: sixteen, torch.float16: sixteen}


_GB, _GIB, _TERA = 1e9, 2**30, 1e12

# Dense, without sparsity; float32 as torch computes by default, without tf32.  Links: one way, one rank.  Above each
# are the titles of the documents that the figures are in.  Shares are of published runs (docs/dry_run.md has the rule):
# of an A100 and an H100 that train; others have H100's part of the best product that was measured on them.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        # "NVIDIA A100 Tensor Core GPU" data sheet, 80GB SXM: 19.5 TFLOP/s float64 (tensor cores) and float32, 312 bf16,
        # 2039 GB/s, NVLink 600 GB/s both ways; HDR InfiniBand, 200 Gbit/s a GPU
        Device(
            "a100",
            _flops(19.5 * _TERA, 19.5 * _TERA, 312 * _TERA),
            80 * _GIB,
            2039 * _GB,
            300 * _GB,
            25 * _GB,
            8,
            flop_share=0.7,
            attention_share=0.3,
        ),
        # "NVIDIA H100 Tensor Core GPU" data sheet, SXM: 67 TFLOP/s float64 (tensor cores) and float32, 989 bf16, 3.35
        # TB/s, NVLink 900 GB/s both ways; NDR InfiniBand, 400 Gbit/s a GPU
        Device("h100", _flops(67 * _TERA, 67 * _TERA, 989 * _TERA), 80 * _GIB, 3350 * _GB, 450 * _GB, 50 * _GB, 8),
        # "NVIDIA H200 Tensor Core GPU" data sheet, SXM: as H100, with 141 GB of 4.8 TB/s
        Device("h200", _flops(67 * _TERA, 67 * _TERA, 989 * _TERA), 141 * _GB, 4800 * _GB, 450 * _GB, 50 * _GB, 8),
        # "NVIDIA Blackwell Architecture Technical Brief", HGX B200: 40 TFLOP/s float64, 80 float32, 2250 bf16, 8 TB/s,
        # NVLink 1.8 TB/s both ways; "NVIDIA DGX B200" data sheet: 1440 GB for eight; 400 Gbit/s a GPU
        Device(
            "b200",
            _flops(40 * _TERA, 80 * _TERA, 2250 * _TERA),
            180 * _GB,
            8000 * _GB,
            900 * _GB,
            50 * _GB,
            8,
            flop_share=0.53,
        ),
        # "NVIDIA GH200 Grace Hopper Superchip" data sheet: H100's peaks, 96 GB HBM3 of 4 TB/s; four to a node with
        # NVLink 150 GB/s to each other, 200 Gbit/s each, as in JUPITER and Alps (their user guides)
        Device(
            "gh200",
            _flops(67 * _TERA, 67 * _TERA, 989 * _TERA),
            96 * _GB,
            4000 * _GB,
            450 * _GB,
            25 * _GB,
            4,
            flop_share=0.57,
        ),
        # "AMD Instinct MI300X Accelerator" data sheet: 81.7 TFLOP/s float64, 163.4 float32 (vector), 1307 bf16, 192 GB
        # of 5.3 TB/s, Infinity Fabric 896 GB/s both ways to seven others together; 400 Gbit/s a GPU
        Device(
            "mi300x",
            _flops(81.7 * _TERA, 163.4 * _TERA, 1307 * _TERA),
            192 * _GB,
            5300 * _GB,
            448 * _GB,
            50 * _GB,
            8,
            flop_share=0.35,
        ),
        # One core a rank of a shared x86 server of two, an estimate: `--calibrate` measures the machine at hand;
        # messages by gloo over the loopback, which a rank's own core copies: nothing hides behind anything
        Device(
            "cpu",
            _flops(0.04 * _TERA, 0.08 * _TERA, 0.04 * _TERA),
            8 * _GIB,
            10 * _GB,
            1 * _GB,
            0.125 * _GB,
            2,
            kernel_seconds=4e-6,
            node_seconds=100e-6,
            network_seconds=200e-6,
            flop_share=1.0,
            attention_share=1.0,
            memory_share=1.0,
            link_share=1.0,
            overlap=0.0,
            reader_cores=1,
            is_processor=True,
        ),
    )
}


def device_named(device: str | Device) -> Device:
    """Return the device of a name, or the given device.

    >>> from jigsaw.dryrun.devices import device_named
    >>> device_named("a100").name
    'a100'
    """
    if isinstance(device, Device):
        return device
    if device not in DEVICES:
        raise ShardingError(f"device={device!r} is none of {', '.join(DEVICES)}; pass a jigsaw.dryrun.Device")
    return DEVICES[device]
