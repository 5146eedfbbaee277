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

from jigsaw.io._memory import fresh
from jigsaw.io.errors import UnsupportedStoreError
from jigsaw.io.fetch.files import Files, Local, Room, Target
from jigsaw.io.fetch.objects import Remote
from jigsaw.io.formats.codecs import BadChunkError, Bytes, ShortChunkError

_BLOCK = 1 << 20
_HEAD, _FETCHED = 1 << 16, 1 << 23
"""Stored bytes that are read at a time: to look at a header, and of all."""
_RATIO = 1032
"""What deflate compresses at most: a file that claims more holds less."""
_BEYOND = 1 << 16
"""Bytes that may follow what the header describes: padding."""
_BYTES = 64 * 10**9
_TRIES = 8
_ABANDONED_S = 86_400
"""A draft of that age was left by a process that was killed."""


@dataclass(frozen=True)
class Stamp:
    """A file, by its whole path, or an object, by its URL, as it was when it was opened."""

    name: str
    size: int
    changed: int | str

    @classmethod
    def of(cls, files: Files, path: str) -> Stamp:
        """Raises: `UnsupportedStoreError` when there is no such file."""
        if isinstance(files, Remote):
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
        return directory() / f"{key}.raw"


def directory() -> Path:
    """Where decompressed files are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("JIGSAW_CACHE") or Path(base) / "jigsaw")


def most_bytes() -> int:
    """How many bytes the cache may have.

    Raises: `UnsupportedStoreError` when ``$JIGSAW_CACHE_BYTES`` is no number.
    """
    given = os.environ.get("JIGSAW_CACHE_BYTES")
    try:
        return _BYTES if given is None else int(float(given))
    except ValueError as e:
        raise UnsupportedStoreError(f"JIGSAW_CACHE_BYTES={given!r} must be a number of bytes") from e


class Unpacked:
    """One gzip file of `packed` as `Files`: its ranges are those of the `length` bytes that it holds.

    Raises: `BadChunkError` for a length that no file of that size can hold.
    """

    far = False
    gap = Local.gap

    def __init__(self, packed: Files, path: str, stamp: Stamp, length: int) -> None:
        if length > _RATIO * stamp.size:
            raise BadChunkError(f"its header claims {length} bytes, more than {stamp.size} compressed ones can hold")
        self._packed, self._path, self.stamp, self.length = packed, path, stamp, length
        self._local = Local(keep=True)
        self._making = threading.Lock()

    def __getstate__(self) -> tuple[Files, str, Stamp, int]:
        return self._packed, self._path, self.stamp, self.length

    def __setstate__(self, state: tuple[Files, str, Stamp, int]) -> None:
        self.__init__(*state)

    def size(self, path: str) -> int | None:
        """The decompressed length."""
        return self.length

    def whole(self, path: str, room: Room) -> Bytes | None:
        """All decompressed bytes."""
        raw = room(self.length)
        self.ranges(path, [(0, raw)])
        return raw

    def ranges(self, path: str, targets: Sequence[Target]) -> bool:
        """Fill every target; an entry that the cache has let go of meanwhile, or that was cut short, is made again.

        Raises: `ShortChunkError` when the gzip stream ends early, `BadChunkError` when it is damaged or has changed, or
        when other processes need the room of the cache each time that it is made.
        """
        for _ in range(_TRIES):
            if self._kept(targets):
                return True
            with self._making:
                self.make()
        raise BadChunkError(f"the cache {directory()} is too small for all who use it; set JIGSAW_CACHE_BYTES")

    def _kept(self, targets: Sequence[Target]) -> bool:
        """Fill every target from the entry; False when it is not there as a whole."""
        local = self._local
        try:
            return local.ranges(str(self.stamp.entry), targets)
        except ShortChunkError:
            self._local = Local(keep=True)  # which takes the one that is made next for no change
            return False

    def make(self) -> None:
        """Decompress the file into its entry, unless it is there; one process of this machine does.

        An object that is far away is fetched by that process alone, a block at a time.

        Raises: as `ranges`, and `UnsupportedStoreError` when there is no room for it.
        """
        entry = self.stamp.entry
        entry.parent.mkdir(parents=True, exist_ok=True)
        with _locked(entry.with_suffix(".lock")):
            if _size(entry) != self.length:
                if Stamp.of(self._packed, self._path) != self.stamp:
                    raise BadChunkError("the file has changed since it was opened; open the store again")
                _make_room(entry.parent, self.length, self.stamp.name)
                _write(entry, _contents(_blocks(self._packed, self._path, self.stamp.size, _FETCHED), self.length))
            # the time of use; that of change stays, by which a file that changes while it is read is known
            with suppress(FileNotFoundError):  # another process needed its room
                os.utime(entry, ns=(time.time_ns(), entry.stat().st_mtime_ns))


def _size(entry: Path) -> int | None:
    try:
        return entry.stat().st_size
    except FileNotFoundError:
        return None


@contextmanager
def _locked(path: Path) -> Generator[None]:
    with open(path, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process, however that ends
        yield


def _write(entry: Path, content: Iterator[bytes]) -> None:
    draft = entry.with_suffix(f".{os.getpid()}.part")
    draft.unlink(missing_ok=True)
    try:
        with open(draft, "xb") as file:  # a link that somebody left there, in a cache of many users, is not followed
            for block in content:
                file.write(block)
        os.replace(draft, entry)
    finally:
        draft.unlink(missing_ok=True)


def _make_room(folder: Path, length: int, path: str) -> None:
    """Remove what was used longest ago, until an entry of `length` bytes fits."""
    most = most_bytes()
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


def head_of(files: Files, path: str, size: int, length: int) -> bytes:
    """The first decompressed bytes of a file of `size`, `length` of them or as many as there are.

    Raises: `BadChunkError` for what is no gzip, `ShortChunkError` when the stream ends early.
    """
    head = b""
    for block in _stream(_blocks(files, path, size, _HEAD)):
        head += block
        if len(head) >= length:
            break
    return head[:length]


def _contents(packed: Iterator[bytes], length: int) -> Iterator[bytes]:
    """Exactly `length` decompressed bytes; the stream is read, and its checksum compared, to the end."""
    done = 0
    for block in _stream(packed):
        yield block[: max(0, length - done)]
        done += len(block)
        if done > length + _BEYOND:
            raise BadChunkError(f"it decompresses to more than the {length} bytes that its header describes")
    if done < length:
        raise ShortChunkError(f"it decompresses to {done} bytes and its header describes {length}")


def _blocks(files: Files, path: str, size: int, first: int) -> Iterator[bytes]:
    """The stored bytes of a file of that size, one block after the other; the first of `first` bytes."""
    start, length = 0, first
    while start < size:
        raw = fresh(min(length, size - start))
        if not files.ranges(path, [(start, raw)]):
            raise BadChunkError("the file is gone since it was opened; open the store again")
        yield raw.tobytes()
        start, length = start + raw.size, _FETCHED


def _stream(packed: Iterator[bytes]) -> Iterator[bytes]:
    """The decompressed bytes of all members, in blocks."""
    engine, rest = zlib.decompressobj(wbits=31), next(packed, b"")
    while rest:
        try:
            block = engine.decompress(rest, _BLOCK)
        except zlib.error as e:
            raise BadChunkError(f"its gzip stream is damaged: {e}") from e
        yield block
        rest = (engine.unused_data if engine.eof else engine.unconsumed_tail) or next(packed, b"")
        if engine.eof:
            rest = rest.lstrip(b"\0")
            engine = zlib.decompressobj(wbits=31) if rest else engine
    if not engine.eof:
        raise ShortChunkError("its gzip stream ends early")
