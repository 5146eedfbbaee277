"""Every byte and message of a rank, counted while somebody asks (`jigsaw.comm.count`)."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TrafficCall:
    """One communication of this rank: what, and how many payload bytes and messages."""

    kind: str
    sent_bytes: int
    received_bytes: int
    messages: int


@dataclass
class TrafficCount:
    """What this rank communicated while the count was open; `messages` are those it sent."""

    calls: list[TrafficCall] = field(default_factory=list[TrafficCall])

    @property
    def sent_bytes(self) -> int:
        return sum(c.sent_bytes for c in self.calls)

    @property
    def received_bytes(self) -> int:
        return sum(c.received_bytes for c in self.calls)

    @property
    def messages(self) -> int:
        return sum(c.messages for c in self.calls)


_open_counts: list[TrafficCount] = []


@contextmanager
def count() -> Generator[TrafficCount]:
    """Count every byte and message that this rank sends and receives inside the block, in all threads."""
    mine = TrafficCount()
    _open_counts.append(mine)
    try:
        yield mine
    finally:
        # by identity: two counts with the same calls compare equal
        _open_counts[:] = [c for c in _open_counts if c is not mine]


def record_call(kind: str, sent: int, received: int, messages: int) -> None:
    """Note a communication in every count that is open."""
    for each in _open_counts:
        each.calls.append(TrafficCall(kind, sent, received, messages))
