"""Places of the chunks of HDF5 datasets: libhdf5 is asked once, and the answer is kept in a cache directory.

libhdf5 is not thread safe, and h5py holds one lock around all of it: everything here that calls it holds
`LIBHDF5_LOCK`. A file of any `StoreFiles` is opened as a `SeekableObject`; garbage collection pauses meanwhile.
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext, suppress
from hashlib import blake2b
from io import BytesIO
from math import prod
from typing import Any

import h5py
import numpy as np
from h5py._objects import phil
from numpy.typing import NDArray

from jigsaw.errors import CacheError, CorruptChunkError, TruncatedError, UnsupportedStoreError
from jigsaw.io.cache_folder import CacheFolder
from jigsaw.io.chunks.chunk import ChunkIndex, ChunkRef
from jigsaw.io.chunks.files import (
    BadChunkError,
    ByteArray,
    LocalFiles,
    ShortChunkError,
    StoreFiles,
    fresh_memory,
    size_and_change,
)

LIBHDF5_LOCK = threading.RLock()

_EDGES_ARE_LEFT = 2  # H5D_CHUNK_DONT_FILTER_PARTIAL_CHUNKS
_EXTENSIBLE_ARRAY = 4  # H5D_CHUNK_IDX_EARRAY
_INDEX_COLUMNS = 4  # place in the grid, offset, length, mask
_FEWEST_CHUNKS_KEPT = 4096  # smallest index that is kept: asking for a smaller one again takes a few milliseconds
_INDEX_FORMAT = 1
SEEKABLE_BLOCK_BYTES = 1 << 18
_SEEKABLE_BLOCKS_KEPT = 64

_LOOK_AGAIN_S = 0.001
_pause_lock = threading.Lock()
_pauses = 0
_was_enabled = False


class Hdf5File:
    """One HDF5 file: bytes come through `files`, metadata through h5py, and a file that has changed since is refused.

    `cache` is the folder of indices, or None.

    Raises: `UnsupportedStoreError` when the file does not exist, or h5py cannot open it.
    """

    def __init__(self, path: str, files: StoreFiles, cache: CacheFolder | None = None) -> None:
        self.path, self.files, self.cache = path, files, cache
        self.is_local = isinstance(files, LocalFiles)
        self._place = files.absolute_path(path) if isinstance(files, LocalFiles) else path
        stamp = self._stamp()
        if stamp is None:
            raise UnsupportedStoreError(f"{path!r} does not exist")
        self.size, self.changed = stamp
        self._slow: Any = None

    def _stamp(self) -> tuple[int, int] | None:
        if not self.is_local:
            size = self.files.size(self.path)
            return None if size is None else (size, 0)
        return size_and_change(self._place)

    def check(self) -> None:
        """Refuse a file on disk that is not the one that was opened."""
        if not self.is_local:
            return
        stamp = self._stamp()
        if stamp is not None and stamp[0] < self.size:
            raise ShortChunkError(
                f"the file had {self.size} bytes when it was opened and has {stamp[0]} now; open the store again"
            )
        if stamp != (self.size, self.changed):
            raise BadChunkError("the file has changed since it was opened; open the store again")

    def has(self, offset: int, length: int) -> None:
        """Refuse bytes beyond the file's end: before anybody makes room for them."""
        if offset + length > self.size:
            raise ShortChunkError(f"it should have {length} bytes at {offset} and the file has {self.size}")

    @contextmanager
    def opened(self) -> Generator[h5py.File]:
        """Open the file in h5py, under the lock, and close it afterwards."""
        with self._calls_libhdf5():
            file = self._open()
            try:
                yield file
            finally:
                file.close()

    def _open(self) -> h5py.File:
        try:
            self.check()
            if self.is_local:
                return h5py.File(self._place, "r", locking="best-effort")  # some shared file systems lack locks
            return h5py.File(SeekableObject(self.files, self.path), "r")
        except (OSError, BadChunkError) as e:
            kind = TruncatedError if "truncated" in str(e) or isinstance(e, ShortChunkError) else UnsupportedStoreError
            raise kind(f"{self.path!r} cannot be opened as HDF5: {e}") from e

    def slowly(self, name: str, box: tuple[Any, ...]) -> NDArray[Any]:
        """Read values by libhdf5, one caller at a time; the file stays open for the next."""
        with self._calls_libhdf5():
            if self._slow is None:
                self._slow = self._open()  # h5py closes it when it is collected: a finalizer must not wait for the lock
            self.check()
            return np.asarray(self._slow[name][box])

    @contextmanager
    def _calls_libhdf5(self) -> Generator[None]:
        with nullcontext() if self.is_local else paused_collections(), LIBHDF5_LOCK:
            yield


class Hdf5Places:
    """An array whose values lie in one HDF5 file."""

    def __init__(self, source: Hdf5File) -> None:
        self._source = source

    @property
    def files(self) -> StoreFiles:
        return self._source.files

    def path(self, index: ChunkIndex) -> str:
        return self._source.path


class Hdf5ChunkPlaces(Hdf5Places):
    """The chunks of a dataset that is stored in chunks.

    `exact` is the size that every chunk must have, for values that are stored as they are: the next chunk's bytes would
    fill up a shorter one. `edges` is the mask of filters that chunks beyond the shape were left without.
    """

    def __init__(
        self, source: Hdf5File, name: str, shape: ChunkIndex, chunks: ChunkIndex, exact: int | None, edges: int = 0
    ) -> None:
        super().__init__(source)
        self._name, self._chunks, self._exact = name, chunks, exact
        self._shape, self._edges = shape, edges
        self._grid = tuple(-(-n // c) for n, c in zip(shape, chunks, strict=True))
        self._rows: NDArray[np.int64] | None = None
        self._lock = threading.Lock()

    def locate(self, index: ChunkIndex) -> ChunkRef | None:
        """Return where a chunk lies. Raises `BadChunkError` for a changed file, or a chunk that does not fit in it."""
        self._source.check()
        rows = self._rows if self._rows is not None else self._index()
        flat = 0  # the chunk's number in C order, which is its row where no chunk is missing
        for i, n in zip(index, self._grid, strict=True):
            flat = flat * n + i
        at = flat if len(rows) == prod(self._grid) else int(np.searchsorted(rows[:, 0], flat))
        if at >= len(rows) or rows[at, 0] != flat:
            return None
        _, offset, length, mask = rows[at].tolist()
        self._source.has(offset, length)
        if self._exact is not None and length != self._exact:
            raise BadChunkError(f"it has {length} bytes and the chunk has {self._exact}")
        return ChunkRef(self._source.path, offset, length, self._edges if self._is_cut(index) else mask)

    def _is_cut(self, index: ChunkIndex) -> bool:
        return self._edges != 0 and any(
            (i + 1) * c > n for i, c, n in zip(index, self._chunks, self._shape, strict=True)
        )

    def _index(self) -> NDArray[np.int64]:
        with self._lock:
            if self._rows is None:
                self._rows = _cached_index(self._source, self._name, self._grid, self._ask)
            return self._rows

    def _ask(self) -> NDArray[np.int64]:
        chunk_rows: list[tuple[Any, ...]] = []
        array_text = f"array {self._name!r} in {self._source.path}"
        with self._source.opened() as file:
            try:
                dataset: Any = file[self._name].id

                def note(c: Any) -> None:
                    chunk_rows.append((*c.chunk_offset, c.byte_offset, c.size, c.filter_mask))

                if hasattr(dataset, "chunk_iter"):
                    dataset.chunk_iter(note)
                else:  # before libhdf5 1.12.3
                    for i in range(dataset.get_num_chunks()):
                        note(dataset.get_chunk_info(i))
                table = np.array(chunk_rows, np.int64).reshape(len(chunk_rows), len(self._grid) + 3)
                return _sorted_index(table, self._chunks, self._grid, array_text)
            except (OSError, RuntimeError, KeyError, ValueError, OverflowError) as e:
                raise CorruptChunkError(f"{array_text}: its index of chunks is damaged: {e}") from e


def has_unfiltered_edges(plist: Any) -> bool:
    """Say whether chunks that reach beyond the shape are stored unfiltered, which their filter masks do not show."""
    return bool(_ask_libhdf5("H5Pget_chunk_opts", plist.id) & _EDGES_ARE_LEFT)


def has_misplaced_chunks(dataset: Any) -> bool:
    """Say whether libhdf5 returns wrong places for the chunks of a dataset.

    An index that is an extensible array has the one unlimited dim outermost, wherever it is in the dataset. Libhdf5
    (up to 2.0.0 at least) lists its chunks as if it counted through the dims in their order. Its reads are right.
    """
    unlimited = [d for d, most in enumerate(dataset.maxshape) if most is None]
    outer = [] if len(unlimited) != 1 else zip(dataset.maxshape[: unlimited[0]], dataset.chunks, strict=False)
    if all(n <= c for n, c in outer):
        return False
    return _ask_libhdf5("H5Dget_chunk_index_type", dataset.id.id) == _EXTENSIBLE_ARRAY


def _ask_libhdf5(function: str, number: int) -> int:
    """Return the number that a C function of h5py's libhdf5 gives for an object, asked with the GIL held."""
    ask, answer = getattr(ctypes.PyDLL(str(h5py.h5p.__file__)), function), ctypes.c_uint(0)
    ask.argtypes = [ctypes.c_int64, ctypes.POINTER(ctypes.c_uint)]
    with LIBHDF5_LOCK, phil:
        failed = ask(number, ctypes.byref(answer)) < 0
    if failed:
        raise RuntimeError(f"libhdf5 fails in {function}")
    return answer.value


def _sorted_index(table: NDArray[np.int64], chunks: ChunkIndex, grid: ChunkIndex, array_text: str) -> NDArray[np.int64]:
    """Sort the index by place in the grid; chunks off it, outside of it, or twice at one place are refused."""
    corners = table[:, : len(grid)]
    places, rests = np.divmod(corners, np.array(chunks, np.int64))
    if rests.any() or (places < 0).any() or (places >= np.array(grid, np.int64)).any() or (table < 0).any():
        raise CorruptChunkError(f"{array_text}: its index of chunks has places that its grid {grid} does not have")
    flat = np.zeros(len(table), np.int64)
    for d, n in enumerate(grid):
        flat = flat * n + places[:, d]
    rows = np.column_stack([flat, table[:, len(grid) :]])[np.argsort(flat, kind="stable")]
    if (np.diff(rows[:, 0]) == 0).any():
        raise CorruptChunkError(f"{array_text}: its index has two chunks at one place")
    return rows


def _cached_index(
    source: Hdf5File, name: str, grid: ChunkIndex, ask: Callable[[], NDArray[np.int64]]
) -> NDArray[np.int64]:
    """Return the index of a dataset from the cache; else ask for it, and keep it when it is long.

    A cached index is for one path, size, modification time and grid; one that is damaged or for another file is
    replaced. The cache is never required: what cannot be read or written is passed over.
    """
    folder, digest = source.cache, blake2b(f"{os.path.abspath(source.path)}\0{name}".encode(), digest_size=16)
    if folder is None or not source.is_local:
        return ask()
    entry = f"hdf5-{digest.hexdigest()}.npz"
    key = np.array([_INDEX_FORMAT, source.size, source.changed, *grid], np.int64)
    kept_rows = _read_cached_index(folder, entry, key)
    if kept_rows is not None:
        folder.mark_used(entry)
        return kept_rows
    rows, packed = ask(), BytesIO()
    if len(rows) >= _FEWEST_CHUNKS_KEPT:
        np.savez_compressed(packed, key=key, rows=rows)
        if packed.tell() <= folder.limit:
            with suppress(OSError, CacheError), folder.draft(entry, packed.tell()) as out:
                out.write(packed.getbuffer())
    return rows


def _read_cached_index(folder: CacheFolder, entry: str, own_key: NDArray[np.int64]) -> NDArray[np.int64] | None:
    file = folder.opened(entry)
    if file is None:
        return None
    try:
        with file, np.load(file, allow_pickle=False) as kept:
            key, rows = kept["key"], kept["rows"]
    except Exception:  # the archive has checksums of its own, and a damaged one may raise anything
        return None
    sound = rows.dtype == np.int64 and rows.ndim == 2 and rows.shape[1] == _INDEX_COLUMNS
    return rows if sound and np.array_equal(key, own_key) else None


@contextmanager
def paused_collections() -> Generator[None]:
    """Pause collections: inside, no thread starts one by itself, and none is under way.

    h5py holds its lock while it reads a far file, and its objects take that lock when they are freed. A thread that
    contributes to the answer (one of a pool, or the loop of zarr's stores) may collect such an object. It would then
    wait for the lock, and the read for that thread, forever: h5py documents this for file-like objects (h5py #2019,
    #2021). So this is entered before the lock is taken.
    """
    global _pauses, _was_enabled
    with _pause_lock:
        _was_enabled = gc.isenabled() if _pauses == 0 else _was_enabled
        gc.disable()
        _pauses += 1
    try:
        while _another_thread_collects():
            time.sleep(_LOOK_AGAIN_S)
        yield
    finally:
        with _pause_lock:
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()


def _another_thread_collects() -> bool:
    """Say whether a collection is under way: Python runs one at a time, and skips one that is requested meanwhile."""
    collected: list[str] = []
    own_thread = threading.get_ident()

    def note(phase: str, _: dict[str, Any]) -> None:
        if threading.get_ident() == own_thread:
            collected.append(phase)

    gc.callbacks.append(note)
    try:
        gc.collect(0)
    finally:
        gc.callbacks.remove(note)
    return not collected


class SeekableObject(io.RawIOBase):
    """One object as a read-only file; reads fetch whole blocks, and those that lie together at once."""

    def __init__(self, files: StoreFiles, path: str) -> None:
        size = files.size(path)
        if size is None:
            raise FileNotFoundError(path)
        self._files, self._path, self._size, self._at = files, path, size, 0
        self._blocks: OrderedDict[int, ByteArray] = OrderedDict()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = max(0, base + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        out = np.frombuffer(memoryview(buffer).cast("B"), np.uint8)
        stop = min(self._at + out.size, self._size)
        if stop <= self._at:
            return 0
        first, last = self._at // SEEKABLE_BLOCK_BYTES, -(-stop // SEEKABLE_BLOCK_BYTES)
        self._fetch([n for n in range(first, last) if n not in self._blocks])
        for n in range(first, last):
            begin = n * SEEKABLE_BLOCK_BYTES
            low, high = max(self._at, begin), min(stop, begin + SEEKABLE_BLOCK_BYTES)
            out[low - self._at : high - self._at] = self._blocks[n][low - begin : high - begin]
        done, self._at = stop - self._at, stop
        while len(self._blocks) > _SEEKABLE_BLOCKS_KEPT:
            self._blocks.popitem(last=False)
        return done

    def _fetch(self, missing: list[int]) -> None:
        targets = [
            (n * SEEKABLE_BLOCK_BYTES, fresh_memory(min(SEEKABLE_BLOCK_BYTES, self._size - n * SEEKABLE_BLOCK_BYTES)))
            for n in missing
        ]
        try:
            is_there = not targets or self._files.ranges(self._path, targets)
        except ShortChunkError as e:
            raise OSError(f"{self._path}: {e}") from e
        if not is_there:
            raise FileNotFoundError(self._path)
        self._blocks.update(zip(missing, (memory for _, memory in targets), strict=True))
