"""Prices of a rank's counts: seconds on a device.

A phase takes the sum of its kernels, each the longest of its operations, its bytes and the least time of a kernel.  It
also takes its messages, by link, except for those that work hides.  Messages between the ranks of a node go over its
links, others over the network; ranks lie on nodes in order.
"""

from __future__ import annotations

from collections import Counter, defaultdict

from jigsaw.comm import TrafficCall
from jigsaw.dryrun.devices import Device, crowding_among
from jigsaw.dryrun.kernel_clock import timed_kernel
from jigsaw.dryrun.rank_playing import PlayedRank
from jigsaw.dryrun.report import PHASES, PhaseCost, RankCost, Traffic


def priced_rank(played: PlayedRank, device: Device, ranks_per_node: int, ranks: int) -> RankCost:
    """Return the rank's step on the device, one of so many ranks, `ranks_per_node` to a node."""
    phases = {
        name: _priced_phase(played, name, device, ranks_per_node, ranks) for name in PHASES if name in played.phases
    }
    return RankCost(played.rank, played.coordinate, phases)


def _priced_phase(played: PlayedRank, name: str, device: Device, ranks_per_node: int, ranks: int) -> PhaseCost:
    count = played.phases[name]
    bounds: dict[str, float] = dict.fromkeys(("flop", "memory", "kernels"), 0.0)
    kernels = count.all_kernels
    beside = min(ranks, ranks_per_node)
    crowding, host_crowding = (crowding_among(of, beside) for of in (device.crowding, device.host_crowding))
    for cost, times in Counter(kernels).items():
        seconds, bound = device.kernel_time(cost.flop, cost.moved_bytes, cost.dtype)
        if device.times_kernels and cost.call is not None:
            seconds = timed_kernel(cost.call) or seconds
        bounds[bound] += times * seconds * crowding
    again = count.kernels_again
    host = device.host_seconds.get(name, 0.0)
    if name == "step":
        host += played.cut_share * (device.host_seconds.get("step of parts", host) - host)
    host = (len(kernels) - again) * host + again * device.host_seconds.get("forward", 0.0)
    bounds["kernels"] += host * host_crowding
    computing = sum(bounds.values())
    traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
    links: defaultdict[str, Traffic] = defaultdict(Traffic)
    waited = {True: 0.0, False: 0.0}
    for call in count.all_calls:
        traffic[call.kind] += Traffic(call.sent_bytes, call.messages)
        by_link = _split_by_link(call, played.rank // ranks_per_node, ranks_per_node)
        for link, part in by_link.items():
            links[link] += part
        nodes = len({rank // ranks_per_node for rank in call.ring})
        if nodes > 1:  # the slowest link holds up all ranks, even one that sends within its node
            seconds = device.ring_time(call.sent_bytes, call.messages, len(call.ring), nodes)
        else:
            seconds = sum(device.call_time(call.kind, link, x.sent_bytes, x.messages) for link, x in by_link.items())
        waited[call.is_behind] += host_crowding * seconds
    hidden = min(waited[True], device.overlap * computing)
    shown = waited[False] + waited[True] - hidden
    return PhaseCost(
        sum(cost.flop for cost in kernels),
        sum(cost.moved_bytes for cost in kernels),
        len(kernels),
        count.peak,
        dict(traffic),
        dict(links),
        bounds,
        waited[True] + waited[False],
        hidden,
        computing + shown,
    )


def _split_by_link(call: TrafficCall, node: int, ranks_per_node: int) -> dict[str, Traffic]:
    """Return the bytes and messages of a call over the links of the node and over the network."""
    traffic: defaultdict[str, Traffic] = defaultdict(Traffic)
    places = len(call.sent_to)
    for to, size in call.sent_to:
        # all messages of a ring go to one rank, else each rank has one
        traffic["node" if to // ranks_per_node == node else "network"] += Traffic(size, call.messages // places)
    return dict(traffic)
