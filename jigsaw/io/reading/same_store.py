"""Check that ranks that read together have opened the same store, by what each sees of it.

Paths differ where nodes have their own copies, and modification times differ where a network shows them late, so
neither counts. The arrays' descriptions count, and for a few chunks their sizes and some of their stored bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from typing import Any, NamedTuple

from jigsaw.errors import PeerError, ReadError
from jigsaw.io.chunks.array_table import ArrayTable
from jigsaw.io.chunks.chunk_grid import ChunkIndex
from jigsaw.io.chunks.files import fresh_memory
from jigsaw.io.chunks.remote_files import RemoteFiles, ask_at_once

_CHUNKS_COMPARED = 8
_BYTES_COMPARED = 1024
"""Bytes from the middle of a chunk: its beginning may be a header that many chunks share."""


class StoreIdentity(NamedTuple):
    """View that a rank has of its store: digests of the arrays' descriptions and of some chunks, or the reason for its
    failure.
    """

    url: str
    arrays: str = ""
    chunks: str = ""
    failure: str = ""


def look_at_store(url: str, tables: Callable[[], Sequence[ArrayTable]], more: Hashable = None) -> StoreIdentity:
    """Return the identity of what a rank reads: of these arrays, and of `more` that is known of them.

    It never raises, because other ranks wait to hear of it.
    """
    try:
        return _identity_of_tables(url, tables(), more)
    except Exception as e:  # a store may raise anything
        return StoreIdentity(url, failure=f"{type(e).__name__}: {e}")


def check_same_store(seen: Sequence[StoreIdentity]) -> None:
    """Raise `ReadError` where a rank could not look, `PeerError` where stores differ; alike on all ranks."""
    for rank, each in enumerate(seen):
        if each.failure:
            raise ReadError(f"rank {rank} of those that read together cannot look at {each.url}: {each.failure}")
    first = seen[0]
    for rank, each in enumerate(seen):
        if each[1:] != first[1:]:
            differ = "its arrays, coordinates or times" if each.arrays != first.arrays else "the bytes of its chunks"
            raise PeerError(
                f"ranks read different stores: of {first.url} on rank 0 and {each.url} on rank {rank}, {differ} "
                "differ; all ranks must open the same data, so give one path, or copy the store to each node anew"
            )


def _identity_of_tables(url: str, tables: Sequence[ArrayTable], more: Hashable) -> StoreIdentity:
    facts = [
        (t.name, t.shape, t.dims, t.dtype, t.chunks, t.scale, t.offset, t.masks, repr(t.fill_value)) for t in tables
    ]
    step = max(1, -(-len(tables) // _CHUNKS_COMPARED))
    picked = [(table, index) for table in tables[::step] for index in _some_chunks(table, 2 if len(tables) < 4 else 1)]
    found: dict[int, Any] = {}
    ask_at_once(lambda n: found.update({n: _seen_of_chunk(*picked[n])}), range(len(picked)))
    return StoreIdentity(url, _digest_of(facts, more), _digest_of([found[n] for n in range(len(picked))], None))


def _digest_of(facts: Sequence[Any], more: Hashable) -> str:
    return blake2b(repr((facts, more)).encode(), digest_size=16).hexdigest()


def _some_chunks(table: ArrayTable, count: int) -> list[ChunkIndex]:
    counts = table.grid.counts
    if 0 in counts:
        return []
    return list(dict.fromkeys(tuple(n * k // (count + 1) for n in counts) for k in range(count, 0, -1)))


def _seen_of_chunk(table: ArrayTable, index: ChunkIndex) -> tuple[Any, ...]:
    """Return the size of a stored chunk and some of its bytes; nothing for one that is missing or lies in no file."""
    ref, files = table.finder.locate(index), table.places.files
    if ref is None:
        return ()
    if ref.length is None and isinstance(files, RemoteFiles):
        found = files.edge(ref.path, _BYTES_COMPARED, at_end=True)  # one request, where a size takes another
        return () if found is None else (found[1], found[0].tobytes())
    length = files.size(ref.path) if ref.length is None else ref.length
    if length is None:
        return ()
    raw = fresh_memory(min(_BYTES_COMPARED, length))
    there = files.ranges(ref.path, [(ref.offset + (length - raw.size) // 2, raw)])
    return (length, raw.tobytes()) if there else ()
