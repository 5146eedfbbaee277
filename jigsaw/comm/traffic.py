"""Count of a rank's communication: every call with its bytes and messages, while a count is open."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TrafficCall:
    """One communication of this rank: its kind, payload bytes and messages, the bytes to each rank of the job, and
    whether work hides it.  For a collective that turns in a ring, `ring` are its ranks.
    """

    kind: str
    sent_bytes: int
    received_bytes: int
    messages: int
    sent_to: tuple[tuple[int, int], ...] = field(default=(), compare=False)
    is_behind: bool = field(default=False, compare=False)
    ring: tuple[int, ...] = field(default=(), compare=False)


@dataclass
class TrafficCount:
    """Communication of this rank while the count was open; `messages` are those it sent."""

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


open_counts: list[TrafficCount] = []


@contextmanager
def count() -> Generator[TrafficCount]:
    """Count every byte and message that this rank sends and receives inside the block, in all threads."""
    traffic = TrafficCount()
    open_counts.append(traffic)
    try:
        yield traffic
    finally:
        # by identity, because two counts with the same calls compare equal
        open_counts[:] = [c for c in open_counts if c is not traffic]


def record_call(
    kind: str,
    sent: int,
    received: int,
    messages: int,
    sent_to: Sequence[tuple[int, int]] = (),
    is_behind: bool = False,
    ring: Sequence[int] = (),
) -> None:
    """Add a call to every open count; see `TrafficCall`."""
    for each in open_counts:
        each.calls.append(TrafficCall(kind, sent, received, messages, tuple(sent_to), is_behind, tuple(ring)))
