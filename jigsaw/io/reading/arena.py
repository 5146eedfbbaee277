"""Shared memory in which the ranks of one machine hand each other decoded chunks; the memory that samples are read to.

It is one anonymous file (`memfd_create`) that every rank maps. It has no name, so nothing is left behind however a rank
ends, and it does not count against the size of ``/dev/shm``. The first rank makes it, and the others open it through
``/proc``. That path may show another process under the number, or one of another machine. So before anything is
written, device, inode and a random word in the header are compared with what the maker sent.

The file begins with a header of 64-bit words and messages; slots of bytes follow. With four ranks the words are:

- 8m .. 8m+5, stored by rank m alone: the read that it has started, finished and left, and the digest of its plan. Then
  the last read in which it failed, and the length of the message that says why.  8m+6 and 8m+7 are not used;
- 32: the last read in which any rank failed, stored by each that fails: all of one read store the same;
- 33: the random word, stored once by who makes the file;
- 34 .. 2081: a message of 4096 bytes (512 words) for each rank, stored by that rank;
- 2082+5s: the ticket of the section that lies in slot s, stored by the rank that put it there;
- 2083+5s+m: the last ticket that rank m has taken out of slot s, stored by m alone.

Every rank knows from the plan (`sections_in_slot_order`) which section lies where. The section at place p of this order
comes into slot p modulo the number of slots, under the *ticket* read * 2^32 + p + 1. Tickets of a slot only grow, so no
word is ever reset. With 8 slots, slot 2 has in read 5 the tickets 5 * 2^32 + 3, + 11, + 19.... Every ticket left from
read 4 is smaller. Ranks wait by polling with short sleeps; every poll sees a rank that failed, and every tenth of a
second one that died.

**The order that this relies on.** An aligned word is stored and loaded whole. Every word is stored by `_tell`, behind a
barrier (`jigsaw.io.reading.arena`). A rank that sees the word therefore sees all that its writer wrote before it, and
the writer has finished all earlier loads. Take four ranks and one slot s. Rank 1 decodes the section of ticket t for
ranks 0 and 3. Rank 2 is to decode the next in this slot, of ticket u:

1. rank 1 writes the bytes of slot s; barrier; it stores t in the slot's first word;
2. ranks 0 and 3 poll that word.  Once it is t, they copy their boxes: the bytes are there, because of the barrier;
3. rank 0: barrier; it stores t in the slot's word 1 + 0; rank 3 likewise in word 1 + 3: their copies are made by then;
4. rank 2, which has polled those two words until both were t, writes the bytes of u: nobody reads those of t any more;
   barrier; it stores u in the slot's first word.  The slot's next loader alone ever stores that word.

A read begins and ends alike: each rank stores its digest; barrier; *started*. When all is taken: barrier; *finished*;
it polls those of all ranks and compares digests; barrier; *left*. The next read, which first polls *left* of all ranks,
may lay out the slots anew. A rank that fails writes its message and length; barrier; *failed*; barrier; then the one
word that all ranks poll. Any rank may store that word, because all store the same.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import select
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from jigsaw import errors
from jigsaw.errors import PeerError, ReadError
from jigsaw.io.chunks.files import fresh_memory
from jigsaw.io.reading.peers import HomeProcess, PeerGroup
from jigsaw.ranks.waiting_ranks import first_failure

MAX_ARENA_SLOTS = 64
_MESSAGE_BYTES = 4096
_PAGE_BYTES = 1 << 16
_TICKETS_PER_READ = 1 << 32
_STARTED, _FINISHED, _LEFT, _DIGEST, _FAILED, _LENGTH = range(6)
_WORDS_PER_RANK = 8
_CLOSED_READER = 2**62
_ORDERED = frozenset({"x86_64", "amd64", "i386", "i686"})
_MEMBARRIER = {"x86_64": 324, "aarch64": 283, "riscv64": 283, "ppc64le": 365, "s390x": 356}
_BARRIER, _JOIN = 1 << 1, 1 << 2


class Arena:
    """The shared memory of the ranks of one machine; `me` counts among them."""

    def __init__(
        self, fd: int, me: int, names: Sequence[int], pids: Sequence[int], timeout: float, barrier: Callable[[], None]
    ) -> None:
        self._fd, self.me, self.size = -1, me, len(pids)
        self._names, self._pids, self._timeout = names, pids, timeout
        self._barrier, self._home = barrier, HomeProcess("this memory")
        self._header_bytes = arena_header_bytes(self.size)
        # Two maps: words and messages stay where they are, the slots move to a larger map when a read needs more room.
        self._map = mmap.mmap(fd, self._header_bytes)
        self._words = memoryview(self._map).cast("q")
        self._messages = _mark_at(self.size) + 8
        self._slots = self._messages // 8 + self.size * _MESSAGE_BYTES // 8
        self._data: mmap.mmap | None = None
        self._slot_bytes = self.slots = 0
        # opened now, and kept: the number of a process that ends may be another's later, what a pidfd means stays
        watched = [(_open_pidfd(pid), m) for m, pid in enumerate(pids) if m != me]
        self._deaths = {handle: m for handle, m in watched if handle is not None}
        self._fd = fd  # from here on `close` has something to close

    def _of(self, member: int, word: int) -> int:
        return member * _WORDS_PER_RANK + word

    def _slot(self, slot: int) -> int:
        return self._slots + slot * (self.size + 1)

    def _tell(self, at: int, value: int) -> None:
        """Store a word, after all that this rank has loaded and stored before."""
        self._barrier()
        self._words[at] = value

    def _all_at(self, word: int, read: int) -> bool:
        return all(self._words[self._of(m, word)] >= read for m in range(self.size))

    def await_turn(self, read: int) -> None:
        """Wait until all ranks have left the read before: they would take a failure in this one for theirs."""
        # slots are free then, too: no rank copies from a slot after it has left
        self.wait(lambda: self._all_at(_LEFT, read - 1), read - 1, _LEFT)

    def start(self, read: int, digest: int, slot_bytes: int, slots: int) -> None:
        if slots:
            self._lay_out(slot_bytes, slots)
        # stored before *started*: a rank that sees *started* may compare the digest
        self._words[self._of(self.me, _DIGEST)] = digest
        self._tell(self._of(self.me, _STARTED), read)

    def _lay_out(self, slot_bytes: int, slots: int) -> None:
        self._slot_bytes = -(-slot_bytes // _PAGE_BYTES) * _PAGE_BYTES
        self.slots = slots
        need = self._header_bytes + self._slot_bytes * slots
        # Every rank comes here by itself, before it says *started*.  A byte past the end makes the file larger, never
        # smaller: a rank that reads something else, which the digests will tell, may have made it larger already.
        if os.fstat(self._fd).st_size < need:
            os.pwrite(self._fd, b"\0", need)
        if self._data is None or len(self._data) < need:
            self._data = mmap.mmap(self._fd, need)

    def finish(self, read: int) -> None:
        """End a read that went well on this rank: wait until all ranks have finished it."""
        self._tell(self._of(self.me, _FINISHED), read)
        self.wait(lambda: self._all_at(_FINISHED, read), read)
        # the digests are still those of this read, because no rank begins the next before this rank has left
        self.check_digests(read)

    def leave(self, read: int) -> None:
        # the barrier is for loads: what this rank copied out of slots is copied before others write there anew
        self._tell(self._of(self.me, _LEFT), read)

    def memory(self, slot: int, size: int) -> NDArray[np.uint8]:
        assert self._data is not None
        return np.frombuffer(self._data, np.uint8, size, self._header_bytes + slot * self._slot_bytes)

    def is_published(self, slot: int, ticket: int) -> bool:
        return self._words[self._slot(slot)] == ticket

    def any_published(self, pairs: Sequence[tuple[int, int]]) -> Callable[[], bool]:
        """Return a quick test, to be polled, that is true once any of these (slot, ticket) pairs is published."""
        words, places = self._words, [(self._slot(slot), ticket) for slot, ticket in pairs]

        return lambda: any(words[at] == ticket for at, ticket in places)

    def publish(self, slot: int, ticket: int) -> None:
        self._tell(self._slot(slot), ticket)

    def release(self, slot: int, ticket: int) -> None:
        self._tell(self._slot(slot) + 1 + self.me, ticket)

    def is_free(self, slot: int, ticket: int, readers: Sequence[int]) -> bool:
        at = self._slot(slot) + 1
        return all(self._words[at + m] >= ticket for m in readers)

    def fail(self, read: int, error: BaseException) -> None:
        """Tell other ranks that this one failed in a read, and why; unless it failed because another rank did."""
        if getattr(error, "heard", False):
            return
        # Ranks 1 and 2 fail at the same time: each writes its own message, length and *failed*, and both write one
        # number into the word that all poll. Rank 0 sees that word and takes rank 1's message, or rank 2's if rank 1's
        # has not arrived yet; both are true. The number only grows: no rank begins a read before all have left the
        # last.
        text = f"{type(error).__name__}\n{error}".encode(errors="replace")[:_MESSAGE_BYTES]
        at = self._messages + self.me * _MESSAGE_BYTES
        self._map[at : at + len(text)] = text
        self._words[self._of(self.me, _LENGTH)] = len(text)
        self._tell(self._of(self.me, _FAILED), read)
        self._tell(self._of(self.size, 0), read)  # looked at in every poll; all failures of a read write the same

    def check(self, read: int) -> None:
        if self._words[self._of(self.size, 0)] < read:
            return
        for m in range(self.size):
            if m != self.me and self._words[self._of(m, _FAILED)] >= read:
                at = self._messages + m * _MESSAGE_BYTES
                text = self._map[at : at + self._words[self._of(m, _LENGTH)]].decode(errors="replace")
                kind, _, message = text.partition("\n")
                raise error_from_rank(kind, message, self._names[m])

    def check_digests(self, read: int) -> None:
        digest = self._words[self._of(self.me, _DIGEST)]
        for m in range(self.size):
            if self._words[self._of(m, _STARTED)] == read and self._words[self._of(m, _DIGEST)] != digest:
                raise PeerError(
                    f"rank {self._names[m]} of the domain group reads another sample or sees other chunks than rank "
                    f"{self._names[self.me]}; every rank must ask for the same samples in the same order"
                )

    def wait(self, ready: Callable[[], bool], read: int, word: int = _FINISHED) -> None:
        """Poll until `ready`, which depends on ranks whose `word` has not reached `read` yet.

        Raises: what another rank failed with in this read; `PeerError` when one died, or the time is over.
        """
        # No futex: it would need one word for all that is waited for here, and a rank that is killed never wakes it.
        # Sleeps grow from 0.2 to 2 ms, so that ranks that wait leave their cores to those that decode.
        pause, slept, since = 2e-4, 0.0, time.monotonic()
        while not ready():
            if word == _FINISHED:  # while it waits for *left*, the read before is over, and so is its failure
                self.check(read)
            if slept > 0.1:
                self._look_around(read, word, since)
                slept = 0.0
            time.sleep(pause)
            slept += pause
            pause = min(1.5 * pause, 2e-3)

    def _look_around(self, read: int, word: int, since: float) -> None:
        if word == _FINISHED:
            self.check_digests(read)
        # A rank that is gone does not keep others waiting if it had come this far: rank 3 may end after its last
        # *finished* while rank 0 still waits for rank 1. A killed rank is seen by its pidfd, a closed one by its
        # *left*.
        watch = select.poll()  # made in each call: threads wait at the same time, and a poll object serves one thread
        for handle in self._deaths:
            watch.register(handle, select.POLLIN)
        dead = {self._deaths[handle] for handle, _ in watch.poll(0)}
        for m in range(self.size):
            closed = self._words[self._of(m, _LEFT)] == _CLOSED_READER
            if (m in dead or closed) and self._words[self._of(m, word)] < read:
                gone = "has ended" if m in dead else "has closed its reader"
                who = f"rank {self._names[m]} of the domain group (process {self._pids[m]})"
                raise PeerError(f"{who} {gone}{first_failure()}")
        if time.monotonic() - since > self._timeout:
            late = [self._names[m] for m in range(self.size) if m != self.me and self._words[self._of(m, word)] < read]
            raise PeerError(f"waited {self._timeout:g} s for ranks {late} of the domain group to read their part")

    def close(self) -> None:
        """Release the memory, which is freed when the last rank releases it."""
        if self._fd < 0:
            return
        if self._home.is_here:  # a forked process is not a rank: what it lets go of is not closed
            self.leave(_CLOSED_READER)
        for fd in self._deaths:
            os.close(fd)
        os.close(self._fd)
        self._fd, self._data = -1, None

    def __del__(self) -> None:
        self.close()  # a reader that was not closed lets go of its memory with its last reference


def slot_ticket(read: int, place: int) -> int:
    """Return the ticket under which the section at a place in the order of slots is published; 0 is never one."""
    return read * _TICKETS_PER_READ + place + 1


def arena_header_bytes(size: int) -> int:
    """Return the size of the header for a number of ranks."""
    words = MAX_ARENA_SLOTS * (size + 1)
    return -(-(_mark_at(size) + 8 + size * _MESSAGE_BYTES + 8 * words) // _PAGE_BYTES) * _PAGE_BYTES


def _mark_at(size: int) -> int:
    """Return the offset of the random word: behind the words of each rank and the one that reports failures."""
    return 8 * (_WORDS_PER_RANK * size + 1)


def error_from_rank(kind: str, message: str, rank: int) -> ReadError:
    """Make the error that another rank reported, as the same type where it is one of the reader's."""
    type_of_error = getattr(errors, kind, None)
    if isinstance(type_of_error, type) and issubclass(type_of_error, ReadError):
        error = type_of_error(f"{message} [rank {rank}]")
    else:
        error = PeerError(f"rank {rank} of the domain group failed: {kind}: {message}")
    error.heard = True
    return error


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None


def attach_arena(peers: PeerGroup, timeout: float) -> Arena | None:
    """Attach to the arena of this rank's machine; collective over the peers.

    Returns None when this rank is alone on its machine. Where some rank cannot map another's memory, finds other memory
    in its place, or has no barrier, each counts as a machine of its own. Chunks then travel over the network.
    """
    near = peers.neighbors
    # Both gatherings are reached by every rank, whatever it could not do before: what fails is a value, not an error.
    leader, barrier = min(near), memory_barrier()
    fd = _create_memory_file(len(near)) if peers.me == leader and len(near) > 1 else -1
    offered = peers.gather(_MemoryMark.of(fd, len(near)))[leader]
    if peers.me != leader and offered is not None:
        fd = _open_memory_file(f"/proc/{peers.pids[leader]}/fd/{offered.fd}", offered, len(near))
    shares = all(peers.gather((fd >= 0 and barrier is not None) or len(near) == 1))
    if shares and len(near) > 1 and barrier is not None:
        return Arena(fd, near.index(peers.me), near, [peers.pids[m] for m in near], timeout, barrier)
    if fd >= 0:
        os.close(fd)
    if not shares:
        peers.separate()
    return None


class _MemoryMark(NamedTuple):
    """Marks that tell an arena's memory from other files: the descriptor, device, inode and random word."""

    fd: int
    device: int
    inode: int
    mark: bytes

    @classmethod
    def of(cls, fd: int, size: int) -> _MemoryMark | None:
        if fd < 0:
            return None
        state = os.fstat(fd)
        return cls(fd, state.st_dev, state.st_ino, os.pread(fd, 8, _mark_at(size)))

    def is_at(self, state: os.stat_result) -> bool:
        """Say whether this is the file; on a copy of the machine another file may have its numbers."""
        return (state.st_dev, state.st_ino) == (self.device, self.inode)


def _create_memory_file(size: int) -> int:
    try:
        fd = os.memfd_create("jigsaw", os.MFD_CLOEXEC)
        os.ftruncate(fd, arena_header_bytes(size))
        os.pwrite(fd, os.urandom(8), _mark_at(size))
    except (AttributeError, OSError):
        return -1
    return fd


def _open_memory_file(path: str, mark: _MemoryMark, size: int) -> int:
    """Open the memory with this `mark` for writing; -1 where the path leads elsewhere or may not be opened."""
    try:
        if not mark.is_at(os.stat(path)):  # anything else, such as a pipe, is not even opened
            return -1
        probe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            is_meant = mark.is_at(os.fstat(probe)) and os.pread(probe, 8, _mark_at(size)) == mark.mark
            # through what was looked at, not the path, which may lead elsewhere by now
            return os.open(f"/proc/self/fd/{probe}", os.O_RDWR | os.O_CLOEXEC) if is_meant else -1
        finally:
            os.close(probe)
    except OSError:
        return -1


# Python does not have fences. Processors of the x86 family need none: they show stores in order and load in order
# (memcpy, whose streaming stores are the exception, ends them with a fence). Others, such as ARM's, promise neither.
# There the kernel is asked for a full barrier on every thread of every process that has joined (``membarrier(2)``,
# ``GLOBAL_EXPEDITED``). The process that is about to store a word calls it; those that poll words need nothing.
def memory_barrier() -> Callable[[], None] | None:
    """Return the barrier to call between writing data and storing the word that announces it; None if there is none."""
    return (lambda: None) if platform.machine().lower() in _ORDERED else kernel_barrier()


def kernel_barrier() -> Callable[[], None] | None:
    """Join the kernel's barrier and return it; None where the kernel lacks it or does not permit it."""
    number = _MEMBARRIER.get(platform.machine())
    if number is None or platform.system() != "Linux":
        return None
    # The kernel interrupts those who joined, wherever they run, and so orders the loads of those who poll as well: they
    # need no call of their own, and a poll costs nothing.
    call = ctypes.CDLL(None, use_errno=True).syscall
    if call(number, _JOIN, 0, 0) != 0:
        return None

    def barrier() -> None:
        if call(number, _BARRIER, 0, 0) != 0:
            raise ReadError(f"the kernel's memory barrier has failed (error {ctypes.get_errno()}), which it never does")

    return barrier


_PATIENCE_S, _PAUSE_S = 0.02, 5e-4


def _pinned_memory(size: int) -> NDArray[np.uint8]:
    import torch

    return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()


class _MemoryLease:
    """Owner of an array's memory: numpy and torch views keep it alive, and its end gives the memory back."""

    def __init__(self, memory: NDArray[np.uint8], home: MemoryPool) -> None:
        self.__array_interface__ = memory.__array_interface__
        self._memory, self._home = memory, home

    def __del__(self) -> None:
        self._home.take_back(id(self), self._memory)


class MemoryPool:
    """Uninitialized arrays whose memory is used again; at most `kept` pieces lie idle.

    While that many are in use, a new array waits a moment for one that is about to come back: a loop lets go of its
    last batch only once it has the next. `pinned` memory is locked in place, so that a GPU copies from it while it
    computes.
    """

    def __init__(self, kept: int = 4, pinned: bool = False) -> None:
        self._fresh = _pinned_memory if pinned else fresh_memory
        self._lent: set[int] = set()
        self._idle: deque[NDArray[np.uint8]] = deque()
        self.keep(kept)

    def keep(self, pieces: int) -> None:
        self._idle = deque(self._idle, maxlen=pieces)
        self._most = pieces

    def empty(self, shape: Sequence[int], dtype: np.dtype[Any]) -> NDArray[Any]:
        """Return an uninitialized array; its memory returns when its last view is gone."""
        size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if size == 0:
            return np.empty(shape, dtype)
        lease = _MemoryLease(self._find(size), self)
        self._lent.add(id(lease))
        return np.asarray(lease).view(dtype).reshape(shape)

    def take_back(self, lease: int, memory: NDArray[np.uint8]) -> None:
        """Take back the memory of a lease that ends, in any thread, at any moment, by atomic steps alone."""
        # No lock: a lease may end in the midst of `_find`, in this very thread, whenever Python collects garbage.
        self._lent.discard(lease)
        self._idle.append(memory)

    def _find(self, size: int) -> NDArray[np.uint8]:
        until = time.monotonic() + _PATIENCE_S
        while (memory := self._pick(size)) is None:
            if len(self._lent) + len(self._idle) < self._most:
                return self._fresh(size)
            if self._idle:  # of another size, from before the batch size or the rollout changed
                self._pick(None)
            elif time.monotonic() < until:
                time.sleep(_PAUSE_S)
            else:
                self._most *= 2  # the loop keeps that many batches on purpose
        return memory

    def _pick(self, size: int | None) -> NDArray[np.uint8] | None:
        for _ in range(len(self._idle)):
            try:
                memory = self._idle.popleft()
            except IndexError:  # another thread was faster
                return None
            if size in (None, memory.size):
                return memory
            self._idle.append(memory)
        return None
