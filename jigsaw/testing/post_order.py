"""NCCL's law, applied to what ranks posted: messages have no tags, and each communicator runs in the order of posting.

Ranks on gloo record what they post and what they wait for.  `check_posts` then plays the job as NCCL would run it.  It
raises where NCCL would hang, or would put a message into another one's buffer.  The law:

- A communicator runs the operations of a rank one after the other, in the order in which the rank posted them.
- A collective runs once it is the next one on every rank of its communicator.  Its kind and its size must be the same.
- A batch of messages runs as one operation.  It ends when the other side of each message has run.
- Messages from one rank to another meet in the order of posting, whatever their tags.
- A rank that waits posts nothing more to any communicator until what it waits for has ended.

For example rank 0 posts a sum and then a message to rank 1. Rank 1 first takes the message and then posts the sum. Gloo
completes both.  On NCCL the sum is next on rank 0, the message is next on rank 1, and both wait forever.

Source: NCCL user guide on group calls and point-to-point communication; torch's NCCL groups for the rest.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


class PostOrderError(AssertionError):
    """Ranks post messages or collectives that NCCL would not run, or would take for others."""


@dataclass(frozen=True, slots=True)
class PostedMessage:
    """One message of a batch: to or from the global rank `peer`."""

    is_sent: bool
    peer: int
    size: int
    tag: int = 0


@dataclass(frozen=True, slots=True)
class Post:
    """An operation that a rank posted.  A collective has a `signature`, a batch has `messages`.

    `number` counts the posts of the rank, in all its threads.
    """

    number: int
    communicator: str
    members: tuple[int, ...]
    signature: str = ""
    messages: tuple[PostedMessage, ...] = ()
    place: str = ""
    thread: int = 0

    def __str__(self) -> str:
        what = self.signature or "messages " + ", ".join(
            f"{'to' if m.is_sent else 'from'} {m.peer} ({m.size} bytes)" for m in self.messages
        )
        return f"{what} on {self.communicator!r}, posted {self.place or 'by torch'}"


@dataclass(frozen=True, slots=True)
class PostWait:
    """A wait for the end of the post of that number."""

    number: int
    thread: int = 0


def check_posts(ranks: Sequence[Sequence[Post | PostWait]]) -> None:
    """Raise `PostOrderError` unless NCCL would run what each rank recorded, and would run it as it was meant."""
    job = _Replay(ranks)
    while job.advance():
        pass
    job.check_end()


class _Replay:
    """The state of a job that is played: what each rank has reached, and what has ended."""

    def __init__(self, ranks: Sequence[Sequence[Post | PostWait]]) -> None:
        self._programs: dict[tuple[int, int], deque[Post | PostWait]] = defaultdict(deque)
        self._queues: dict[str, dict[int, deque[Post]]] = defaultdict(lambda: defaultdict(deque))
        self._reached: set[tuple[int, int]] = set()
        self._ended: set[tuple[int, int]] = set()
        self._open: dict[tuple[int, int], list[PostedMessage]] = {}  # messages of batches that have not met yet
        for rank, events in enumerate(ranks):
            for event in events:
                self._programs[rank, event.thread].append(event)
            posts = sorted((e for e in events if isinstance(e, Post)), key=lambda post: post.number)
            for post in posts:
                self._queues[post.communicator][rank].append(post)
                self._open[rank, post.number] = list(post.messages)

    def advance(self) -> bool:
        moved = [self._go_on(rank, program) for (rank, _), program in self._programs.items()]
        ran = [self._run_next(queues) for queues in self._queues.values()]
        return any(moved) or any(ran)

    def _go_on(self, rank: int, program: deque[Post | PostWait]) -> bool:
        """Let a thread of a rank post until it waits for a post that has not ended."""
        before = len(program)
        while program:
            event = program[0]
            if isinstance(event, PostWait) and (rank, event.number) not in self._ended:
                break
            self._reached.add((rank, event.number))
            program.popleft()
        return len(program) < before

    def _run_next(self, queues: Mapping[int, deque[Post]]) -> bool:
        heads = {rank: queue[0] for rank, queue in queues.items() if queue and (rank, queue[0].number) in self._reached}
        ended: set[int] = set()
        for rank, post in heads.items():
            if post.signature and rank not in ended and self._is_met(heads, post):
                ended.update(post.members)
        for rank, post in heads.items():
            if post.messages:
                self._meet(heads, rank, post)
        for rank, post in heads.items():
            if post.messages and not self._open[rank, post.number]:
                ended.add(rank)
        for rank in ended:
            self._ended.add((rank, queues[rank].popleft().number))
        return bool(ended)

    def _is_met(self, heads: Mapping[int, Post], post: Post) -> bool:
        """Say whether a collective is the next operation of all its ranks."""
        others = {rank: heads[rank] for rank in post.members if rank in heads}
        for rank, other in others.items():
            if other.signature and other.signature != post.signature:
                first = next(r for r, head in heads.items() if head is post)
                raise PostOrderError(
                    f"ranks post different collectives to one communicator: rank {first} {post}; rank {rank} {other}; "
                    "NCCL would take one for the other, so post them in the same order on every rank"
                )
        return len(others) == len(post.members) and all(other.signature for other in others.values())

    def _meet(self, heads: Mapping[int, Post], rank: int, post: Post) -> None:
        """Take the messages of a batch that this rank sends together with their other sides."""
        for message in [m for m in self._open[rank, post.number] if m.is_sent]:
            other = heads.get(message.peer)
            if other is None or not other.messages:
                continue
            waiting = self._open[message.peer, other.number]
            taken = next((m for m in waiting if not m.is_sent and m.peer == rank), None)
            if taken is None:
                continue
            if taken.size != message.size or taken.tag != message.tag:
                differing = "sizes" if taken.size != message.size else "tags"
                raise PostOrderError(
                    f"NCCL has no tags, so two messages of different {differing} would be taken for one another: rank "
                    f"{rank} sends {message.size} bytes (tag {message.tag}), {post}; rank {message.peer} takes "
                    f"{taken.size} (tag {taken.tag}), {other}; post both sides in one order, or on two groups"
                )
            waiting.remove(taken)
            self._open[rank, post.number].remove(message)

    def check_end(self) -> None:
        stuck = [
            f"rank {rank}: {queue[0]}"
            for queues in self._queues.values()
            for rank, queue in sorted(queues.items())
            if queue
        ]
        if stuck:
            raise PostOrderError(
                "on NCCL these operations would wait for each other forever, as each communicator runs in the order of "
                f"posting: {'; '.join(stuck[:_MOST_TOLD])}"
            )


_MOST_TOLD = 12
