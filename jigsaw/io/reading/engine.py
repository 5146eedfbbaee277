"""Engine that carries out read plans, together with the ranks that share a sample.

A pool of threads loads this rank's chunks. A chunk that others need too goes into the arena, section by section, where
every rank of the machine takes its boxes. A chunk that only this rank needs goes into scratch memory. Ranks on other
machines get their boxes by one all-to-all. A read ends well on all ranks, or raises on all of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b
from typing import Any, NamedTuple, TypeVar

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import PeerError, ReadError
from jigsaw.geometry.axis_names import DATA_AXIS
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable
from jigsaw.io.chunks.chunk import ChunkIndex
from jigsaw.io.chunks.chunk_finder import LookupCounts, total_lookups
from jigsaw.io.chunks.files import fresh_memory
from jigsaw.io.chunks.remote_files import RemoteFiles, ask_at_once
from jigsaw.io.reading.arena import MemoryPool, attach_arena
from jigsaw.io.reading.chunk_readers import ReadCounts
from jigsaw.io.reading.chunk_sections import fair_thread_count
from jigsaw.io.reading.fetch_ahead import FetchAhead
from jigsaw.io.reading.peers import HomeProcess, PeerGroup, meet_peers
from jigsaw.io.reading.placing import AnyArray
from jigsaw.io.reading.read_plan import ReadPlan
from jigsaw.io.reading.running_read import ReadingRank, RunningRead

T = TypeVar("T")


class ReadEngine:
    """Reads samples of a store for one rank of a domain group.

    Making one is collective over `mesh` (ranks along the axes `apart` read other samples).  `threads` load chunks at
    the same time; by default the cores of this machine are shared among its ranks.  `budget`, the same on every rank,
    bounds the bytes in flight, down to one chunk. These are the shared memory of a machine, a chunk for each thread,
    and the bytes that this rank has fetched and not decoded yet.  Ranks wait `timeout` seconds for each other, by
    default as long as in the mesh.  They tell each other the `identity` of what they have opened, and do not read
    different stores together.  `stats` adds up what it did, and equals its row of the plans.
    """

    def __init__(
        self,
        store: ArrayStore,
        mesh: DeviceMesh | PeerGroup | None = None,
        threads: int | None = None,
        *,
        apart: tuple[str, ...] = (DATA_AXIS,),
        budget: int = 1 << 29,
        timeout: float | None = None,
        identity: Callable[[], StoreIdentity] | None = None,
    ) -> None:
        self.store, self.home = store, HomeProcess("this reader")
        self.peers = mesh if isinstance(mesh, PeerGroup) else meet_peers(mesh, apart, timeout=timeout)
        self.arena = attach_arena(self.peers, timeout or self.peers.timeout)
        self.memory = MemoryPool(pinned=isinstance(mesh, DeviceMesh) and mesh.device_type == "cuda")
        # What is collective comes in this order on every rank: the group, the arena over it, then the lanes.  A rank
        # that dies in between is a `PeerError` of the others' next message.
        self.stats, self.reads = ReadCounts(), 0
        self.threads = threads or fair_thread_count(len(self.peers.neighbors))
        own_identity = identity() if identity is not None and self.peers.size > 1 else StoreIdentity(store.url)
        lanes, identities = zip(*self.peers.gather((self.threads, own_identity)), strict=True)
        self._busy, self._is_closed = threading.Lock(), False
        self.ahead = FetchAhead(self.peers.me, budget) if any(t.far for t in store.arrays.values()) else None
        self.pool = ThreadPoolExecutor(self.threads, thread_name_prefix="jigsaw-read")
        self.rank = ReadingRank(self.peers, self.arena, self.ahead, self.memory, self.pool, lanes, budget)
        if identity is not None:
            try:
                check_same_store(identities)
            except ReadError:
                self.close()
                raise

    def read(self, plan: ReadPlan, out: AnyArray | None = None) -> AnyArray:
        """Read this rank's held box of the sample [T, C, \\*space], into `out` when given.

        Every rank of the domain group reads the same plans in the same order.

        *Sends*: nothing on one machine; else one all-to-all of the boxes that other machines need, in the stored dtype.

        Raises: a `ReadError` on every rank when it fails on any; of an engine that was closed; `ForkedError`.
        """
        self.home.check_home()
        # One read at a time: ranks pair their reads by number alone, and two threads of a rank that read at once would
        # be two reads in another order elsewhere.
        with self._busy:
            if self._is_closed:
                raise ReadError("this reader was closed; make a new dataset or loader to read on")
            self.reads += 1
            running = RunningRead(self.rank, plan, self.reads)
            try:
                return running.run(out)
            except BaseException as e:
                vars(e)["heard"] = True  # the failed rank has reported it: `refuse` must not join another read
                raise
            finally:
                self.stats = self.stats + running.counts

    def plan(self, make: Callable[[], ReadPlan], key: Hashable = None) -> ReadPlan:
        """Return the plan of the next read: the one that `ahead` expected under `key`, or else one made now.

        Raises: as `prepared`.
        """
        return self.prepared(lambda: (self.ahead and self.ahead.planned(key)) or make())

    def prepared(self, step: Callable[[], T]) -> T:
        """Return the result of a step before a read.

        Raises: `ForkedError`; what the step raises. A store may fail on one rank alone: the other ranks are told, and
        raise in their `read`.
        """
        self.home.check_home()
        try:
            return step()
        except BaseException as e:
            self.refuse(e)
            raise

    def refuse(self, error: BaseException) -> None:
        """Take part in the next read as one that has failed, so that others do not wait for this rank."""
        # nothing to do if the other ranks have heard of the error, from the read that failed with it
        if self._is_closed or getattr(error, "heard", False):
            return
        with self._busy, suppress(PeerError):
            self.reads += 1  # the others are in this read, or will be: it is the same number on every rank
            try:
                if self.arena is not None:
                    # told before the turn has come, it would be taken for a failure of the read before
                    self.arena.await_turn(self.reads)
                    self.arena.fail(self.reads, error)
                # this answers the first `RunningRead._agree` of the other ranks, which then leave the read
                if self.peers.is_spread:
                    self.peers.gather(((type(error).__name__, str(error)), 0))
            finally:
                vars(error)["heard"] = True
                if self.arena is not None:
                    self.arena.leave(self.reads)

    @property
    def looked_up(self) -> LookupCounts:
        """The lookups that planning took since the store was opened; joined files keep counts of their own."""
        return total_lookups(table.finder.looked_up for table in self.store.arrays.values())

    def close(self) -> None:
        """End the threads and let go of the shared memory; nothing can be read afterwards."""
        self._is_closed = True
        if not self.home.is_here:
            return  # its threads are those of another process
        self.pool.shutdown()
        if self.ahead is not None:
            self.ahead.close()
        if self.arena is not None:
            self.arena.close()
        self.peers.close()


_CHUNKS_COMPARED = 8
_BYTES_COMPARED = 1024
"""Bytes from the middle of a chunk: its beginning may be a header that many chunks share."""


class StoreIdentity(NamedTuple):
    """View that a rank has of its store: digests of descriptions and of some chunks, or the reason for its failure.

    Of volumes, `listing` is a digest of the whole list, and of the arguments with which they were opened.
    """

    url: str
    arrays: str = ""
    chunks: str = ""
    failure: str = ""
    listing: str = ""


def look_at_store(
    url: Callable[[], str], tables: Callable[[], Sequence[ArrayTable]], more: Hashable = None
) -> StoreIdentity:
    """Return the identity of what a rank reads: of these arrays, and of `more` that is known of them.

    It never raises, because other ranks wait to hear of it. `url` and `tables` may open the store.
    """
    try:
        return _identity_of_tables(url(), tables(), more)
    except Exception as e:  # a store may raise anything
        return StoreIdentity("", failure=f"{type(e).__name__}: {e}")


def check_same_store(identities: Sequence[StoreIdentity]) -> None:
    """Raise `ReadError` where a rank could not look, `PeerError` where stores differ; alike on all ranks."""
    for rank, view in enumerate(identities):
        if view.failure:
            raise ReadError(f"rank {rank} of those that read together cannot look at its store: {view.failure}")
    first = identities[0]
    for rank, view in enumerate(identities):
        if view.listing != first.listing:
            raise PeerError(
                f"rank {rank} opened other volumes than rank 0, in another order, or with other arguments; give all "
                "ranks the same, like images=sorted(glob('*.nii.gz'))"
            )
        if view[1:] != first[1:]:
            differ = "its arrays, coordinates or times" if view.arrays != first.arrays else "the bytes of its chunks"
            raise PeerError(
                f"ranks read different stores: of {first.url} on rank 0 and {view.url} on rank {rank}, {differ} "
                "differ; all ranks must open the same data, so give one path, or copy the store to each node anew"
            )


def _identity_of_tables(url: str, tables: Sequence[ArrayTable], more: Hashable) -> StoreIdentity:
    facts = [
        (t.name, t.shape, t.dims, t.dtype, t.chunks, t.scale, t.offset, t.masks, repr(t.fill_value)) for t in tables
    ]
    step = max(1, -(-len(tables) // _CHUNKS_COMPARED))
    picked = [(table, index) for table in tables[::step] for index in _some_chunks(table, 2 if len(tables) < 4 else 1)]
    contents: dict[int, Any] = {}
    ask_at_once(lambda n: contents.update({n: _seen_of_chunk(*picked[n])}), range(len(picked)))
    return StoreIdentity(url, _digest_of(facts, more), _digest_of([contents[n] for n in range(len(picked))], None))


def _digest_of(facts: Sequence[Any], more: Hashable) -> str:
    return blake2b(repr((facts, more)).encode(), digest_size=16).hexdigest()


def _some_chunks(table: ArrayTable, count: int) -> list[ChunkIndex]:
    counts = table.grid.counts
    if 0 in counts:
        return []
    return list(dict.fromkeys(tuple(n * k // (count + 1) for n in counts) for k in range(count, 0, -1)))


def _seen_of_chunk(table: ArrayTable, index: ChunkIndex) -> tuple[Any, ...]:
    """Return the size of a stored chunk and some of its bytes, or some values of one in no file; nothing for a missing
    one.
    """
    ref, files = table.finder.locate(index), table.places.files
    if ref is None:
        return ()
    if ref.length is None and isinstance(files, RemoteFiles):
        edge = files.edge(ref.path, _BYTES_COMPARED, at_end=True)  # one request; asking for the size would be another
        return () if edge is None else (edge[1], edge[0].tobytes())
    length = files.size(ref.path) if ref.length is None else ref.length
    if length is None:
        return _seen_of_values(table, index) if table.compared else ()
    raw = fresh_memory(min(_BYTES_COMPARED, length))
    is_present = files.ranges(ref.path, [(ref.offset + (length - raw.size) // 2, raw)])
    return (length, raw.tobytes()) if is_present else ()


def _seen_of_values(table: ArrayTable, index: ChunkIndex) -> tuple[Any, ...]:
    """Return a few values from the middle of a chunk of an `xarray.Dataset`."""
    middles = [(start, stop, (start + stop) // 2) for start, stop in table.grid.box_of(index)]
    some = _BYTES_COMPARED // 2 // np.dtype(table.dtype).itemsize
    *rows, (start, stop, middle) = middles or [(0, 1, 0)]
    along = (max(start, middle - some), min(stop, middle + some))
    box = (*((row, row + 1) for _, _, row in rows), along) if middles else ()
    return (table.load_slowly(box).tobytes(),)
