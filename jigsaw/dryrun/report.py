"""Report of a dry run: memory, operations, messages and seconds per rank and phase, and what would not run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

PHASES = ("forward", "backward", "step")
PHASES_AGAIN = {"forward": "forward again", "backward": "backward again"}
"""Phases of the second of several passes before a step, whose gradients are added to those of the first."""


@dataclass(frozen=True)
class Remark:
    """Something that a user should know before the job starts.

    `kind` is one of

    - ``"refused"``: jigsaw raises here at more than one rank; with ``parallelize(strict=False)`` the function runs
      whole on every rank and brings `sent_bytes` to it;
    - ``"re-cut"``: rows that lay at other cut points travel, `sent_bytes` of them;
    - ``"repeated"``: each rank computes the whole of a plain tensor (learned queries of each place) by a product, and
      takes its own rows of it. Nothing is sent. `sent_bytes` are those of other ranks' rows, a mebibyte or more;
    - ``"gathered"``: a linear layer is in no pair of a column and a row (`parallelize(tensor=)`), so its channels are
      gathered after it; the reason says what stands in the way;
    - ``"value"``: Python reads a value of a tensor; the dry run assumed 1, or False;
    - ``"skipped"``: Python asked for a value, and weights took no part in the step: what depends on the value, a branch
      or the turns of a loop, is not in the numbers;
    - ``"stopped"``: the dry run could not go on, and its numbers end there.

    >>> class Inverse(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.linalg.pinv(x)
    >>> (remark,) = jigsaw.dry_run(torch.nn.Sequential(Inverse()), (1, 1, 8, 4), mesh={"lat": 2}).remarks
    >>> remark.kind, remark.module, remark.function, remark.sent_bytes
    ('refused', '0', 'linalg_pinv', 64)
    """

    kind: str
    module: str
    function: str
    sent_bytes: int
    reason: str


@dataclass(frozen=True)
class Traffic:
    """Bytes and messages that a rank sends.

    >>> jigsaw.dryrun.Traffic(8, 1) + jigsaw.dryrun.Traffic(16, 2)
    Traffic(sent_bytes=24, messages=3)
    """

    sent_bytes: int = 0
    messages: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent_bytes + other.sent_bytes, self.messages + other.messages)


@dataclass(frozen=True)
class PhaseCost:
    """One phase of a rank's step: forward (with the loss), backward or the optimizer's step.

    `peak` are bytes alive at the phase's highest point, by kind: weights, gradients, optimizer, activations, temporary.
    Activations are what the forward pass keeps for the backward pass, and its inputs.  `traffic` is by kind of message,
    as `jigsaw.comm` counts them, `links` by link: node or network.  `seconds` is computing, messages that nothing
    hides, and the part of others that work does not hide.

    >>> report = jigsaw.dry_run(torch.nn.Linear(4, 2), (6, 4), mesh={"data": 2})
    >>> forward = report.ranks[0].phases["forward"]
    >>> forward.flop, forward.peak["weights"]
    (48, 40)
    """

    flop: int
    moved_bytes: int
    kernels: int
    peak: Mapping[str, int]
    traffic: Mapping[str, Traffic]
    links: Mapping[str, Traffic]
    seconds_by_bound: Mapping[str, float]
    message_seconds: float
    hidden_seconds: float
    seconds: float

    @property
    def peak_bytes(self) -> int:
        return sum(self.peak.values())

    @property
    def sent_bytes(self) -> int:
        return sum(t.sent_bytes for t in self.traffic.values())

    @property
    def messages(self) -> int:
        return sum(t.messages for t in self.traffic.values())


def part_of_phase(phase: PhaseCost, part: float) -> PhaseCost:
    """Return a part of all that a phase takes, or several times it."""
    return PhaseCost(
        round(phase.flop * part),
        round(phase.moved_bytes * part),
        round(phase.kernels * part),
        {kind: round(size * part) for kind, size in phase.peak.items()},
        {kind: part_of_traffic(t, part) for kind, t in phase.traffic.items()},
        {link: part_of_traffic(t, part) for link, t in phase.links.items()},
        {name: seconds * part for name, seconds in phase.seconds_by_bound.items()},
        phase.message_seconds * part,
        phase.hidden_seconds * part,
        phase.seconds * part,
    )


def phase_after_phase(first: PhaseCost, then: PhaseCost) -> PhaseCost:
    """Return what two phases take one after the other, with the higher of their two peaks."""
    bounds = {**then.seconds_by_bound, **first.seconds_by_bound}
    return PhaseCost(
        first.flop + then.flop,
        first.moved_bytes + then.moved_bytes,
        first.kernels + then.kernels,
        max(first, then, key=lambda phase: phase.peak_bytes).peak,
        _sum_of_traffic(first.traffic, then.traffic),
        _sum_of_traffic(first.links, then.links),
        {name: first.seconds_by_bound.get(name, 0.0) + then.seconds_by_bound.get(name, 0.0) for name in bounds},
        first.message_seconds + then.message_seconds,
        first.hidden_seconds + then.hidden_seconds,
        first.seconds + then.seconds,
    )


def _sum_of_traffic(first: Mapping[str, Traffic], then: Mapping[str, Traffic]) -> dict[str, Traffic]:
    return {kind: first.get(kind, Traffic()) + then.get(kind, Traffic()) for kind in {**first, **then}}


def part_of_traffic(traffic: Traffic, part: float) -> Traffic:
    """Return a part of what is sent, or several times it."""
    return Traffic(round(traffic.sent_bytes * part), round(traffic.messages * part))


@dataclass(frozen=True)
class RankCost:
    """Costs of one rank in a step, by phase.

    >>> report = jigsaw.dry_run(torch.nn.Linear(4, 2), (6, 4), mesh={"data": 2})
    >>> report.ranks[1].coordinate, list(report.ranks[1].phases)
    ((1,), ['forward', 'backward', 'step'])
    """

    rank: int
    coordinate: tuple[int, ...]
    phases: Mapping[str, PhaseCost]

    @property
    def highest(self) -> PhaseCost:
        return max(self.phases.values(), key=lambda phase: phase.peak_bytes)

    @property
    def flop(self) -> int:
        return sum(phase.flop for phase in self.phases.values())

    @property
    def sent_bytes(self) -> int:
        return sum(phase.sent_bytes for phase in self.phases.values())

    @property
    def messages(self) -> int:
        return sum(phase.messages for phase in self.phases.values())

    @property
    def seconds(self) -> float:
        return sum(phase.seconds for phase in self.phases.values())


@dataclass(frozen=True)
class DryRunReport:
    """Report of the ranks that were played; ``print(report)`` shows it as a table.  Over the ranks it has the busiest
    one's `sent_bytes`, `messages`, `peak_bytes`, `flop` and `seconds` of one training step, each by itself.  `blocks`
    of the model lie in rows of three or more equal ones, also where a dry run left some of them out.

    >>> report = jigsaw.dry_run(torch.nn.Linear(4, 2), (6, 4), mesh={"data": 2})
    >>> report.fits, report.bound
    (True, 'kernels')
    """

    mesh: Mapping[str, int]
    device: str
    device_memory: float
    parameters: int
    ranks: tuple[RankCost, ...]
    remarks: tuple[Remark, ...] = ()
    reader_seconds: float = 0.0
    assumptions: tuple[str, ...] = field(default=(), repr=False)
    blocks: int = 0

    @property
    def sent_bytes(self) -> int:
        return max(r.sent_bytes for r in self.ranks)

    @property
    def messages(self) -> int:
        return max(r.messages for r in self.ranks)

    @property
    def peak_bytes(self) -> int:
        return max(r.highest.peak_bytes for r in self.ranks)

    @property
    def peak(self) -> Mapping[str, int]:
        return max((r.highest for r in self.ranks), key=lambda phase: phase.peak_bytes).peak

    @property
    def flop(self) -> int:
        return max(r.flop for r in self.ranks)

    @property
    def seconds(self) -> float:
        """Seconds of a step: ranks wait for the slowest, and all of them for a reader that is slower still."""
        return max(*(r.seconds for r in self.ranks), self.reader_seconds)

    @property
    def bound(self) -> str:
        return max(self.seconds_by_bound.items(), key=lambda item: item[1])[0]

    @property
    def seconds_by_bound(self) -> Mapping[str, float]:
        """Seconds of the slowest rank by what bounds its kernels, of messages that show, and of a reader that it waits
        for.
        """
        slowest = max(self.ranks, key=lambda r: r.seconds)
        seconds_of: dict[str, float] = dict.fromkeys(("flop", "memory", "kernels", "messages"), 0.0)
        for phase in slowest.phases.values():
            for name, seconds in phase.seconds_by_bound.items():
                seconds_of[name] = seconds_of.get(name, 0.0) + seconds
            seconds_of["messages"] += phase.seconds - sum(phase.seconds_by_bound.values())
        return seconds_of | {"reader": self.reader_seconds if self.reader_seconds > slowest.seconds else 0.0}

    @property
    def fits(self) -> bool:
        """True where the highest point of memory is within nine tenths of the device's."""
        return self.peak_bytes <= 0.9 * self.device_memory

    @property
    def is_complete(self) -> bool:
        return not any(r.kind in ("stopped", "skipped") for r in self.remarks)

    def print(self) -> None:
        print(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{kind} {size_text(size)}" for kind, size in self.peak.items() if size)
        mesh = " x ".join(f"{name}={size}" for name, size in self.mesh.items())
        lines = [
            f"dry run of {self.parameters / 1e6:,.3f} million parameters on {mesh}, {self.device}: one training step",
            *_phase_table(max(self.ranks, key=lambda r: r.seconds)),
            f"memory   {size_text(self.peak_bytes)} of {size_text(self.device_memory)} at most"
            f"{'' if self.fits else ' - DOES NOT FIT'}: {parts}",
            f"time     {seconds_text(self.seconds)} a step, bound by {self.bound}: "
            + ", ".join(f"{name} {seconds_text(s)}" for name, s in self.seconds_by_bound.items() if s),
        ]
        lines += [f"{r.kind:<9}{r.module or 'the model'}: {r.function}: {r.reason}" for r in self.remarks]
        return "\n".join([*lines, *(f"assumed  {a}" for a in self.assumptions)])


def _phase_table(rank: RankCost) -> Iterable[str]:
    head = f"rank {rank.rank}", "seconds", "GFLOP", "kernels", "peak", "sent", "messages", "node", "network"
    rows: list[tuple[str, ...]] = [head]
    for name, phase in rank.phases.items():
        links = [size_text(phase.links.get(link, Traffic()).sent_bytes) for link in ("node", "network")]
        rows.append(
            (
                name,
                seconds_text(phase.seconds),
                f"{phase.flop / 1e9:,.2f}",
                str(phase.kernels),
                size_text(phase.peak_bytes),
                size_text(phase.sent_bytes),
                str(phase.messages),
                *links,
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(
            text.ljust(w) if at == 0 else text.rjust(w) for at, (text, w) in enumerate(zip(row, widths, strict=True))
        )
    for kind in sorted({kind for phase in rank.phases.values() for kind in phase.traffic}):
        both = sum((phase.traffic.get(kind, Traffic()) for phase in rank.phases.values()), Traffic())
        yield f"  sends {kind}: {size_text(both.sent_bytes)} in {both.messages} messages"


def size_text(size: float) -> str:
    """Write bytes in a unit that suits them.

    >>> from jigsaw.dryrun.report import size_text
    >>> size_text(3 * 2**20)
    '3.0 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def seconds_text(seconds: float) -> str:
    """Write seconds in a unit that suits them.

    >>> from jigsaw.dryrun.report import seconds_text
    >>> seconds_text(0.0123)
    '12.3 ms'
    """
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
