"""Files that are compressed as a whole, decompressed once into a cache: from then on any part of them can be read.

The cache is a directory, ``$JIGSAW_CACHE`` or ``~/.cache/jigsaw``, of at most ``$JIGSAW_CACHE_BYTES`` (64e9).  An entry
is named by the file's path, size and time of change (an object's URL, size and ETag), so a changed one gets another;
what was used longest ago goes first.  An entry is written beside its place and then renamed: it is whole or absent,
also after a kill.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import threading
import time
import zlib
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from jigsaw.errors import UnsupportedStoreError
from jigsaw.io.chunks.codecs import BadChunkError, ByteArray, ShortChunkError
from jigsaw.io.chunks.files import ByteAllocator, FillTarget, LocalFiles, StoreFiles
from jigsaw.io.chunks.memory import fresh_memory
from jigsaw.io.chunks.remote_files import RemoteFiles
from jigsaw.io.drafts import draft_of, open_unlinked

_INFLATED_BYTES = 1 << 20
_HEAD_FETCHED_BYTES, _BODY_FETCHED_BYTES = 1 << 16, 1 << 23
"""Stored bytes that are read at a time: to look at a header, and of all."""
_MOST_RATIO = 1032
"""What deflate compresses at most: a file that claims more holds less."""
_MOST_PADDING = 1 << 16
"""Bytes that may follow what the header describes: padding."""
_USUAL_CACHE_BYTES = 64 * 10**9
_MOST_TRIES = 8
_ABANDONED_S = 86_400
"""A draft of that age was left by a process that was killed."""


@dataclass(frozen=True)
class FileStamp:
    """A file, by its whole path, or an object, by its URL, as it was when it was opened."""

    name: str
    size: int
    changed: int | str

    @classmethod
    def of(cls, files: StoreFiles, path: str) -> FileStamp:
        """Raises: `UnsupportedStoreError` when there is no such file."""
        if isinstance(files, RemoteFiles):
            known = files.stamp(path)
            if known is None:
                raise UnsupportedStoreError(f"there is no object {path!r} in {files.name}")
            return cls(f"{files.name}/{path}", *known)
        try:
            found = os.stat(path)
        except OSError as e:
            raise UnsupportedStoreError(f"there is no file {path!r}: {e.strerror}") from e
        if os.path.isdir(path):
            raise UnsupportedStoreError(f"{path!r} is a directory, and a file is expected")
        return cls(os.path.abspath(path), found.st_size, found.st_mtime_ns)

    @property
    def entry(self) -> Path:
        """Where its decompressed bytes are kept."""
        key = blake2b(repr((self.name, self.size, self.changed)).encode(), digest_size=16).hexdigest()
        return unpacked_folder() / f"{key}.raw"


def unpacked_folder() -> Path:
    """Where decompressed files are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("JIGSAW_CACHE") or Path(base) / "jigsaw")


def most_unpacked_bytes() -> int:
    """How many bytes the cache may have.

    Raises: `UnsupportedStoreError` when ``$JIGSAW_CACHE_BYTES`` is no number.
    """
    given = os.environ.get("JIGSAW_CACHE_BYTES")
    try:
        return _USUAL_CACHE_BYTES if given is None else int(float(given))
    except ValueError as e:
        raise UnsupportedStoreError(f"JIGSAW_CACHE_BYTES={given!r} must be a number of bytes") from e


class UnpackedFile:
    """One gzip file of `packed` as `StoreFiles`: its ranges are those of the `length` bytes that it holds.

    Raises: `BadChunkError` for a length that no file of that size can hold.
    """

    far = False
    gap = LocalFiles.gap

    def __init__(self, packed: StoreFiles, path: str, stamp: FileStamp, length: int) -> None:
        if length > _MOST_RATIO * stamp.size:
            raise BadChunkError(f"its header claims {length} bytes, more than {stamp.size} compressed ones can hold")
        self._packed, self._path, self.stamp, self.length = packed, path, stamp, length
        self._local = LocalFiles(keep=True)
        self._making = threading.Lock()

    def __getstate__(self) -> tuple[StoreFiles, str, FileStamp, int]:
        return self._packed, self._path, self.stamp, self.length

    def __setstate__(self, state: tuple[StoreFiles, str, FileStamp, int]) -> None:
        self.__init__(*state)

    def size(self, path: str) -> int | None:
        """The decompressed length."""
        return self.length

    def whole(self, path: str, room: ByteAllocator) -> ByteArray | None:
        """All decompressed bytes."""
        raw = room(self.length)
        self.ranges(path, [(0, raw)])
        return raw

    def ranges(self, path: str, targets: Sequence[FillTarget]) -> bool:
        """Fill every target; an entry that the cache has let go of meanwhile, or that was cut short, is made again.

        Raises: `ShortChunkError` when the gzip stream ends early, `BadChunkError` when it is damaged or has changed, or
        when other processes need the room of the cache each time that it is made.
        """
        for _ in range(_MOST_TRIES):
            if self._kept(targets):
                return True
            with self._making:
                self.make()
        raise BadChunkError(f"the cache {unpacked_folder()} is too small for all who use it; set JIGSAW_CACHE_BYTES")

    def _kept(self, targets: Sequence[FillTarget]) -> bool:
        """Fill every target from the entry; False when it is not there as a whole."""
        local = self._local
        try:
            return local.ranges(str(self.stamp.entry), targets)
        except ShortChunkError:
            self._local = LocalFiles(keep=True)  # which takes the one that is made next for no change
            return False

    def make(self) -> None:
        """Decompress the file into its entry, unless it is there; one process of this machine does.

        An object that is far away is fetched by that process alone, a block at a time.

        Raises: as `ranges`, and `UnsupportedStoreError` when there is no room for it.
        """
        entry = self.stamp.entry
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _entry_lock(entry.with_suffix(".lock")):
            if _entry_size(entry) != self.length:
                if FileStamp.of(self._packed, self._path) != self.stamp:
                    raise BadChunkError("the file has changed since it was opened; open the store again")
                _make_room_for_entry(entry.parent, self.length, self.stamp.name)
                _write_entry(
                    entry,
                    _exact_contents(
                        _packed_blocks(self._packed, self._path, self.stamp.size, _BODY_FETCHED_BYTES), self.length
                    ),
                )
            # the time of use; that of change stays, by which a file that changes while it is read is known
            with suppress(FileNotFoundError):  # another process needed its room
                os.utime(entry, ns=(time.time_ns(), entry.stat().st_mtime_ns))


def _entry_size(entry: Path) -> int | None:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return None


@contextmanager
def _entry_lock(path: Path) -> Generator[None]:
    with os.fdopen(open_unlinked(path, os.O_RDWR | os.O_CREAT), "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process, however that ends
        yield


def _write_entry(entry: Path, content: Iterator[bytes]) -> None:
    with draft_of(entry, ".part") as file:
        for block in content:
            file.write(block)


def _make_room_for_entry(folder: Path, length: int, path: str) -> None:
    """Remove what was used longest ago, until an entry of `length` bytes fits."""
    most = most_unpacked_bytes()
    kept: list[tuple[float, int, Path]] = []
    for each in folder.iterdir():
        try:
            found = each.stat()
        except FileNotFoundError:  # a draft that another process has finished meanwhile, or an entry that it removed
            continue
        if each.suffix == ".part" and found.st_mtime < time.time() - _ABANDONED_S:
            each.unlink(missing_ok=True)
        elif each.suffix == ".raw":
            kept.append((found.st_atime, found.st_size, each))
    kept.sort(reverse=True)
    while kept and sum(size for _, size, _ in kept) + length > most:
        oldest = kept.pop()[2]
        oldest.unlink(missing_ok=True)
        oldest.with_suffix(".lock").unlink(missing_ok=True)
    free = shutil.disk_usage(folder).free
    if length > min(most, free):
        raise UnsupportedStoreError(
            f"{path} decompresses to {length} bytes, and the cache {folder} may have {most}, with {free} free on its "
            "disk; set JIGSAW_CACHE and JIGSAW_CACHE_BYTES, or decompress the file yourself"
        )


# -- gzip ------------------------------------------------------------------------------------------------------------


def unpacked_head(files: StoreFiles, path: str, size: int, length: int) -> bytes:
    """The first decompressed bytes of a file of `size`, `length` of them or as many as there are.

    Raises: `BadChunkError` for what is no gzip, `ShortChunkError` when the stream ends early.
    """
    head = b""
    for block in _unpacked_blocks(_packed_blocks(files, path, size, _HEAD_FETCHED_BYTES)):
        head += block
        if len(head) >= length:
            break
    return head[:length]


def _exact_contents(packed: Iterator[bytes], length: int) -> Iterator[bytes]:
    """Exactly `length` decompressed bytes; the stream is read, and its checksum compared, to the end."""
    done = 0
    for block in _unpacked_blocks(packed):
        yield block[: max(0, length - done)]
        done += len(block)
        if done > length + _MOST_PADDING:
            raise BadChunkError(f"it decompresses to more than the {length} bytes that its header describes")
    if done < length:
        raise ShortChunkError(f"it decompresses to {done} bytes and its header describes {length}")


def _packed_blocks(files: StoreFiles, path: str, size: int, first: int) -> Iterator[bytes]:
    """The stored bytes of a file of that size, one block after the other; the first of `first` bytes."""
    start, length = 0, first
    while start < size:
        raw = fresh_memory(min(length, size - start))
        if not files.ranges(path, [(start, raw)]):
            raise BadChunkError("the file is gone since it was opened; open the store again")
        yield raw.tobytes()
        start, length = start + raw.size, _BODY_FETCHED_BYTES


def _unpacked_blocks(packed: Iterator[bytes]) -> Iterator[bytes]:
    """The decompressed bytes of all members, in blocks."""
    engine, rest = zlib.decompressobj(wbits=31), next(packed, b"")
    while rest:
        try:
            block = engine.decompress(rest, _INFLATED_BYTES)
        except zlib.error as e:
            raise BadChunkError(f"its gzip stream is damaged: {e}") from e
        yield block
        rest = (engine.unused_data if engine.eof else engine.unconsumed_tail) or next(packed, b"")
        if engine.eof:
            rest = rest.lstrip(b"\0")
            engine = zlib.decompressobj(wbits=31) if rest else engine
    if not engine.eof:
        raise ShortChunkError("its gzip stream ends early")
