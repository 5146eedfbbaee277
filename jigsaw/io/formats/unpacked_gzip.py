"""Files that are compressed as a whole, decompressed once into a cache: from then on any part of them can be read.

The cache is a directory, ``$JIGSAW_CACHE`` or ``~/.cache/jigsaw``, of at most ``$JIGSAW_CACHE_BYTES`` (64e9), which
indices of HDF5 files share. An entry is named by the file's path, size and modification time (an object's URL, size and
ETag), so a changed file gets another entry. It ends with checksums of its blocks, which are compared before their first
use.
"""

from __future__ import annotations

import gzip
import os
import shutil
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, BinaryIO

import numpy as np

from jigsaw.errors import UnsupportedStoreError
from jigsaw.io.cache_folder import CacheFolder, user_cache_folder
from jigsaw.io.chunks.files import (
    BadChunkError,
    ByteAllocator,
    ByteArray,
    FillTarget,
    LocalFiles,
    ShortChunkError,
    StoreFiles,
    check_object_size,
    fill_from_file,
    fresh_memory,
    size_and_change,
)
from jigsaw.io.chunks.remote_files import RemoteFiles

_HEAD_FETCHED_BYTES, _BODY_FETCHED_BYTES = 1 << 16, 1 << 23
"""Stored bytes that are read at a time: for a header, and for the whole file."""
_MOST_RATIO = 1032  # deflate compresses by this ratio at most, so a file that claims more lies
_MOST_PADDING = 1 << 16  # bytes of padding that may follow the values
_MOST_TRIES = 8
_CHECKED_BLOCK_BYTES = 1 << 20
_DIGEST_BYTES = 16


@dataclass(frozen=True)
class FileStamp:
    """Path or URL of a file, and its size and version when it was opened."""

    name: str
    size: int
    changed: int | str

    @classmethod
    def of(cls, files: StoreFiles, path: str) -> FileStamp:
        if isinstance(files, RemoteFiles):
            known = files.stamp(path)
            if known is None:
                raise UnsupportedStoreError(f"there is no object {path!r} in {files.name}")
            return cls(f"{files.name}/{path}", *known)
        place = files.absolute_path(path) if isinstance(files, LocalFiles) else os.path.abspath(path)
        state = size_and_change(place)
        if state is None:
            raise UnsupportedStoreError(f"there is no file {path!r}")
        if os.path.isdir(place):
            raise UnsupportedStoreError(f"{path!r} is a directory, and a file is expected")
        return cls(place, *state)

    @property
    def entry(self) -> str:
        key = blake2b(repr((self.name, self.size, self.changed)).encode(), digest_size=16)
        return f"{key.hexdigest()}.raw"

    @property
    def folder(self) -> CacheFolder:
        cache = user_cache_folder()
        if cache is None:
            raise UnsupportedStoreError(
                f"JIGSAW_CACHE='' names no folder, and {self.name} is compressed as a whole: it is read from a "
                "decompressed copy; set JIGSAW_CACHE to a folder, or decompress the file yourself"
            )
        return cache


class UnpackedFile:
    """One gzip file of `packed` as `StoreFiles`: its ranges are those of the `length` bytes that it holds."""

    far = False
    gap = LocalFiles.gap

    def __init__(self, packed: StoreFiles, path: str, stamp: FileStamp, length: int) -> None:
        if length > _MOST_RATIO * stamp.size:
            raise BadChunkError(f"its header claims {length} bytes, more than {stamp.size} compressed ones can hold")
        self._packed, self._path, self.stamp, self.length = packed, path, stamp, length
        self._entry: _KeptEntry | None = None
        self._making = threading.Lock()

    def __getstate__(self) -> tuple[StoreFiles, str, FileStamp, int]:
        return self._packed, self._path, self.stamp, self.length

    def __setstate__(self, state: tuple[StoreFiles, str, FileStamp, int]) -> None:
        self.__init__(*state)

    def size(self, path: str) -> int | None:
        return self.length

    def whole(self, path: str, room: ByteAllocator, most: int | None = None) -> ByteArray | None:
        check_object_size(self.length, most)
        raw = room(self.length)
        self.ranges(path, [(0, raw)])
        return raw

    def ranges(self, path: str, targets: Sequence[FillTarget]) -> bool:
        """Read ranges of the decompressed file.

        An entry that is damaged, or that the cache has since removed, is made again, unless other processes always need
        its room.
        """
        for _ in range(_MOST_TRIES):
            if self._kept(targets):
                return True
            with self._making:
                self.make()
        folder = self.stamp.folder.path
        raise BadChunkError(f"the cache {folder} is too small for all who use it; set JIGSAW_CACHE_BYTES")

    def _kept(self, targets: Sequence[FillTarget]) -> bool:
        """Fill every target from the entry; False when it is not there as a whole."""
        entry = self._entry or _KeptEntry.of(self.stamp.folder, self.stamp.entry, self.length)
        if entry is None:
            return False
        try:
            for offset, memory in targets:
                entry.fill(offset, memory)
        except BadChunkError:
            self._entry = None
            self.stamp.folder.remove(self.stamp.entry)
            return False
        self._entry = entry
        return True

    def make(self) -> None:
        """Decompress the file into its entry, unless it exists; one process of this machine does so."""
        folder, entry = self.stamp.folder, self.stamp.entry
        with folder.locked(entry) as beat:
            if _KeptEntry.of(folder, entry, self.length) is None:
                if FileStamp.of(self._packed, self._path) != self.stamp:
                    raise BadChunkError("the file has changed since it was opened; open the store again")
                self._unpack(folder, entry, beat)
            folder.mark_used(entry)

    def _unpack(self, folder: CacheFolder, entry: str, beat: Callable[[], None]) -> None:
        """Make the entry, or none when other processes need the room of its draft."""
        size = self.length + _seal_bytes(self.length)
        self._check_room(folder, size <= folder.limit)
        with suppress(FileNotFoundError), folder.draft(entry, size) as file:
            self._check_room(folder, size <= shutil.disk_usage(folder.path).free)
            checksums, done = list[int](), 0
            blocks = _unpacked_blocks(
                self._packed, self._path, self.stamp.size, _BODY_FETCHED_BYTES, _CHECKED_BLOCK_BYTES
            )
            for block in blocks:  # read to the end of the stream, because gzip's checksum is compared there
                if kept := block[: max(0, self.length - done)]:
                    file.write(kept)
                    checksums.append(zlib.crc32(kept))
                done += len(block)
                if done > self.length + _MOST_PADDING:
                    raise BadChunkError(
                        f"it decompresses to more than the {self.length} bytes that its header describes"
                    )
                beat()
            if done < self.length:
                raise ShortChunkError(f"it decompresses to {done} bytes and its header describes {self.length}")
            table = np.array(checksums, "<u4").tobytes()
            file.write(table + _table_digest(entry, table))

    def _check_room(self, folder: CacheFolder, fits: bool) -> None:
        if not fits:
            raise UnsupportedStoreError(
                f"{self.stamp.name} decompresses to {self.length} bytes, and the cache {folder.path} may have "
                f"{folder.limit}, with {shutil.disk_usage(folder.path).free} free on its disk; set JIGSAW_CACHE and "
                "JIGSAW_CACHE_BYTES, or decompress the file yourself"
            )


def _seal_bytes(length: int) -> int:
    return 4 * -(-length // _CHECKED_BLOCK_BYTES) + _DIGEST_BYTES


def _table_digest(entry: str, table: bytes) -> bytes:
    return blake2b(entry.encode() + table, digest_size=_DIGEST_BYTES).digest()


class _KeptEntry:
    """An entry that is open for reading; each block is compared with its checksum before it is first used."""

    def __init__(self, file: BinaryIO, length: int, table: bytes) -> None:
        self._file, self._length = file, length
        self._checksums: list[int] = np.frombuffer(table, "<u4").tolist()
        self._sound: set[int] = set()

    @classmethod
    def of(cls, folder: CacheFolder, entry: str, length: int) -> _KeptEntry | None:
        file = folder.opened(entry)
        if file is None:
            return None
        seal = os.pread(file.fileno(), _seal_bytes(length), length)
        table = seal[:-_DIGEST_BYTES]
        size = os.fstat(file.fileno()).st_size
        if size != length + _seal_bytes(length) or seal[len(table) :] != _table_digest(entry, table):
            file.close()
            return None
        return cls(file, length, table)

    def fill(self, offset: int, memory: ByteArray) -> None:
        if offset + memory.size > self._length:
            raise ShortChunkError(f"it should have {memory.size} bytes at {offset} and has {self._length}")
        first, last = offset // _CHECKED_BLOCK_BYTES, -(-(offset + memory.size) // _CHECKED_BLOCK_BYTES)
        for block in range(first, last):
            if block not in self._sound:
                self._check(block)
        fill_from_file(self._file.fileno(), offset, memory)

    def _check(self, block: int) -> None:
        start = block * _CHECKED_BLOCK_BYTES
        raw = os.pread(self._file.fileno(), min(_CHECKED_BLOCK_BYTES, self._length - start), start)
        if zlib.crc32(raw) != self._checksums[block]:
            raise BadChunkError(f"block {block} of the entry is damaged")
        self._sound.add(block)


def unpacked_head(files: StoreFiles, path: str, size: int, length: int) -> bytes:
    """Return the first decompressed bytes of a file of `size`, `length` of them or as many as there are."""
    return next(_unpacked_blocks(files, path, size, _HEAD_FETCHED_BYTES, length), b"")


def _unpacked_blocks(files: StoreFiles, path: str, size: int, fetched: int, length: int) -> Iterator[bytes]:
    """Yield the decompressed bytes of a file of `size`, `length` at a time; of the stored ones `fetched` at a time."""
    packed: Any = _PackedStream(files, path, size, fetched)
    with gzip.GzipFile(fileobj=packed) as stream:
        try:
            while block := stream.read(length):
                yield block
        except EOFError as e:
            raise ShortChunkError("its gzip stream ends early") from e
        except (zlib.error, gzip.BadGzipFile) as e:
            raise BadChunkError(f"its gzip stream is damaged: {e}") from e


class _PackedStream:
    """The stored bytes of a file of that size in blocks of `fetched` bytes; a read gives what is left of one.

    Python's own buffers would ask for as much as gzip wants at a time, which differs by version.
    """

    def __init__(self, files: StoreFiles, path: str, size: int, fetched: int) -> None:
        self._files, self._path, self._size, self._fetched = files, path, size, fetched
        self._block, self._place, self._end = b"", 0, 0

    def read(self, size: int = -1) -> bytes:
        if self._place == len(self._block):
            raw = fresh_memory(min(self._fetched, self._size - self._end))
            if raw.size and not self._files.ranges(self._path, [(self._end, raw)]):
                raise BadChunkError("the file is gone since it was opened; open the store again")
            self._block, self._place, self._end = raw.tobytes(), 0, self._end + raw.size
        start, self._place = self._place, len(self._block) if size < 0 else min(self._place + size, len(self._block))
        return self._block[start : self._place]
