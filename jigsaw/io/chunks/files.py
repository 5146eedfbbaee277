"""Files of stored bytes: named objects, read whole or by ranges straight into the caller's memory, and that memory."""

from __future__ import annotations

import errno
import os
import stat
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import ReadError, UnsupportedStoreError

ByteArray = NDArray[np.uint8]
ByteAllocator = Callable[[int], ByteArray]
"""Function that returns memory of a number of bytes."""
FillTarget = tuple[int, ByteArray]
"""An offset within an object, and the memory that the bytes from there on fill."""
ByteRange = tuple[int, int]
"""(start, stop) of an object's bytes."""

_FILES_KEPT_OPEN = 128
_STAMPS_REMEMBERED = 1 << 16
_FOLDERS_REMEMBERED = 1 << 16
_MOST_AT_ONCE = 1 << 30  # macOS refuses to read 2 GiB and more in one call

_SCRATCH_GRAIN = 1 << 20
"""Bytes that scratch memory grows by: sizes that differ by little would leave holes in the heap."""
_CACHE_LINE = 64
"""Bytes of a cache line: arithmetic on memory that begins amid one takes a tenth longer."""


class BadChunkError(Exception):
    """Reason why a chunk cannot be decoded; the caller adds the chunk's name."""


class ShortChunkError(BadChunkError):
    """A chunk whose stored bytes end too early."""


def size_and_change(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return the size and modification time (ns) of a file, by which a change is noticed; None if it is missing."""
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_size, state.st_mtime_ns


def local_paths(places: Iterable[str]) -> list[Path]:
    """Return the paths among places that values come from, resolved; URLs of other machines are left out."""
    paths = (place.removeprefix("file://") for place in places)
    return [Path(path).resolve() for path in paths if "://" not in path]


def holds_place_read(path: Path, places: Iterable[str]) -> bool:
    """Say whether a path is one of the places that values come from, or a folder that one lies in."""
    return any(path.resolve() in (place, *place.parents) for place in local_paths(places))


class StoreFiles(Protocol):
    """Objects of bytes by name.

    `far` says that a request costs a round trip, so that many must be under way at a time. `gap` is how many unwanted
    bytes are cheaper to read than a second request. A missing object is None or False, never an error. One that ends
    before a range does is a `ShortChunkError`. One that has changed is a `BadChunkError`, as is one of which `whole`
    would read more than `most` bytes.
    """

    far: bool
    gap: int

    def size(self, path: str) -> int | None: ...

    def whole(self, path: str, room: ByteAllocator, most: int | None = None) -> ByteArray | None: ...

    def ranges(self, path: str, targets: Sequence[FillTarget]) -> bool: ...


class ObjectIdentity(NamedTuple):
    """Identity that distinguishes an object from all others, also in another process. Its `state`, as far as known,
    distinguishes it from its own earlier versions.
    """

    place: str
    state: str = ""


@runtime_checkable
class IdentifiedFiles(Protocol):
    """Files that know the identity of their objects; None for an object without one."""

    def identity(self, path: str) -> ObjectIdentity | None: ...


@runtime_checkable
class CachingFiles(Protocol):
    """Files that keep fetched bytes; those of an object can be dropped."""

    def forget(self, path: str) -> None: ...


def identity_of_object(files: StoreFiles, path: str) -> ObjectIdentity | None:
    """Return the identity of an object; None where `files` do not know it."""
    return files.identity(path) if isinstance(files, IdentifiedFiles) else None


def check_object_size(size: int, most: int | None) -> None:
    """Refuse an object that is larger than its values can be, before memory is allocated for it."""
    if most is not None and size > most:
        raise BadChunkError(f"it has {size} bytes or more, and at most {most} can be right")


def fill_targets(
    targets: Sequence[FillTarget], parts: Sequence[tuple[int, int]], contents: Sequence[ByteArray | None]
) -> bool:
    """Fill targets from the `contents` of parts (start, stop, rising); False when the object was missing."""
    starts = [start for start, _ in parts]
    for offset, memory in targets:
        at = bisect_right(starts, offset) - 1
        raw = contents[at]
        if raw is None:
            return False
        memory[:] = raw[offset - starts[at] : offset - starts[at] + memory.size]
    return True


class StoreBounds:
    """The folders that the files of a store may lie in, wherever names and symbolic links lead: its own, `root`, and
    those that the user names.

    A name of a file is looked at each time, a folder once. This protects from what a store holds when it is read, and
    not from others who may write to it meanwhile.
    """

    def __init__(self, root: str, others: Sequence[str] = ()) -> None:
        self.root, self.others = os.path.abspath(root), tuple(map(os.path.abspath, others))
        self._within = tuple(os.path.realpath(folder) for folder in (self.root, *self.others))
        self._sound: dict[str, bool] = {}

    def __getstate__(self) -> tuple[str, tuple[str, ...]]:
        return self.root, self.others

    def __setstate__(self, state: tuple[str, tuple[str, ...]]) -> None:
        self.__init__(*state)

    def opened(self, path: str, flags: int) -> int:
        """Open a file within the bounds by `os.open`.

        Raises: `UnsupportedStoreError` for a file that lies elsewhere.
        """
        folder, name = os.path.split(path)
        # ".." is not a link, so that O_NOFOLLOW would let it lead out of a sound folder.
        if name != os.pardir and self._is_sound(folder):
            try:
                return os.open(path, flags | os.O_NOFOLLOW)
            except OSError as e:
                if e.errno != errno.ELOOP:
                    raise
        real = os.path.realpath(path)
        if not self._holds(real):
            raise self._refusal(path)
        return os.open(real, flags | os.O_NOFOLLOW)

    def _is_sound(self, folder: str) -> bool:
        known = self._sound.get(folder)
        if known is None:
            known = folder == self.root or self._lies_within(folder)
            if len(self._sound) >= _FOLDERS_REMEMBERED:
                self._sound.clear()
            self._sound[folder] = known
        return known

    def _lies_within(self, folder: str) -> bool:
        plain = folder.startswith(f"{self.root}{os.sep}") and os.pardir not in folder.split(os.sep)
        if plain and not os.path.islink(folder) and self._is_sound(os.path.dirname(folder)):
            return True
        return self._holds(os.path.realpath(folder))

    def _holds(self, real: str) -> bool:
        return any(real == folder or real.startswith(folder.rstrip(os.sep) + os.sep) for folder in self._within)

    def _refusal(self, path: str) -> UnsupportedStoreError:
        real = os.path.realpath(path)
        return UnsupportedStoreError(
            f"{path} leads to {real}, outside of the store {self.root}; if you trust the store, open it with "
            f"options={{'outside': [{os.path.dirname(real)!r}]}}, the folders that it may lead to, or copy it without "
            "links"
        )


class LocalFiles:
    """Files on disk.

    `bounds` refuses those that a store may not lead to.  `keep` holds them open (those of many chunks: shards, NetCDF),
    the 128 that were used last.  A file that is held open and changes under the reader is refused.  A relative path
    is that of the working folder in which this was made, wherever the process goes later: a chunk that is looked for
    elsewhere would be a missing one, which reads as fill.
    """

    far = False
    gap = 1 << 14

    def __init__(self, keep: bool = False, folder: str | None = None, bounds: StoreBounds | None = None) -> None:
        self._folder, self._bounds = _working_folder() if folder is None else folder, bounds
        self._open: OrderedDict[str, _OpenFile] | None = OrderedDict() if keep else None
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._lock = threading.Lock()

    def __getstate__(self) -> tuple[bool, str, StoreBounds | None]:
        return self._open is not None, self._folder, self._bounds

    def __setstate__(self, state: tuple[bool, str, StoreBounds | None]) -> None:
        self.__init__(*state)

    def absolute_path(self, path: str) -> str:
        """Return the absolute path of a file."""
        return os.path.abspath(os.path.join(self._folder, path))

    def size(self, path: str) -> int | None:
        whole = os.path.join(self._folder, path)
        try:
            return os.stat(whole).st_size
        except (FileNotFoundError, NotADirectoryError):
            self._check_not_seen(whole)
            return None

    def _check_not_seen(self, path: str) -> None:
        """Refuse a file that existed before and is gone now: it is not a chunk that was never written."""
        if hash(path) in self._seen:
            raise BadChunkError("the file is gone since it was opened; restore it")

    def identity(self, path: str) -> ObjectIdentity:
        """Return its absolute path, its size and its modification time."""
        path = self.absolute_path(path)
        stamp = size_and_change(path)
        return ObjectIdentity(path, "" if stamp is None else f"{stamp[0]} {stamp[1]}")

    def whole(self, path: str, room: ByteAllocator, most: int | None = None) -> ByteArray | None:
        file = self._file(path)
        if file is None:
            return None
        check_object_size(file.size, most)
        raw = room(file.size)
        file.read(0, raw)
        return raw

    def ranges(self, path: str, targets: Sequence[FillTarget]) -> bool:
        file = self._file(path)
        if file is None:
            return False
        for offset, memory in targets:
            file.read(offset, memory)
        return True

    def _file(self, path: str) -> _OpenFile | None:
        path = os.path.join(self._folder, path)
        try:
            if self._open is None:
                return _OpenFile(path, self._bounds)
            with self._lock:
                if path not in self._open:
                    self._open[path] = self._as_before(path, _OpenFile(path, self._bounds))
                    if len(self._open) > _FILES_KEPT_OPEN:
                        self._open.popitem(last=False)
                self._open.move_to_end(path)
                file = self._open[path]
        except (FileNotFoundError, NotADirectoryError):
            self._check_not_seen(path)
            return None
        file.check()
        return file

    def _as_before(self, path: str, file: _OpenFile) -> _OpenFile:
        """Check a file that is opened once more, because indices that were read from it are kept elsewhere."""
        at, stamp = hash(path), hash(file.stamp)
        if self._seen.setdefault(at, stamp) != stamp:
            raise BadChunkError(_FILE_CHANGED)
        self._seen.move_to_end(at)
        if len(self._seen) > _STAMPS_REMEMBERED:
            self._seen.popitem(last=False)
        return file


def _working_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # the folder was removed, so no path can be relative to it
        return ""


_FILE_CHANGED = "the file has changed since it was opened; open the store again"


class _OpenFile:
    def __init__(self, path: str, bounds: StoreBounds | None) -> None:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # opening a pipe would wait for a writer
        self._fd = os.open(path, flags) if bounds is None else bounds.opened(path, flags)
        state = os.fstat(self._fd)
        if not stat.S_ISREG(state.st_mode):
            raise BadChunkError("it is a folder, pipe or device, and a file is expected")
        self.size, self._changed = state.st_size, state.st_mtime_ns
        self.stamp = (state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def check(self) -> None:
        state = os.fstat(self._fd)
        if state.st_size < self.size:
            raise ShortChunkError(f"the file had {self.size} bytes when it was opened and has {state.st_size} now")
        if state.st_mtime_ns != self._changed:
            raise BadChunkError(_FILE_CHANGED)

    def read(self, offset: int, memory: ByteArray) -> None:
        if offset + memory.size > self.size:
            raise ShortChunkError(f"it should have {memory.size} bytes at {offset} and the file has {self.size}")
        fill_from_file(self._fd, offset, memory)


def fill_from_file(fd: int, offset: int, memory: ByteArray) -> None:
    """Fill memory with the bytes of an open file from an offset on; a file that ends before is a `ShortChunkError`."""
    view, done, length = memory.data, 0, memory.size
    while done < length:
        count = os.preadv(fd, [view[done : done + _MOST_AT_ONCE]], offset + done)
        if count == 0:
            raise ShortChunkError(f"the file ends after {done} of its {length} bytes")
        done += count


class ScratchMemory(threading.local):
    """Memory of each thread, which the next call uses again."""

    def __init__(self) -> None:
        self._room = fresh_memory(0)

    def __call__(self, size: int) -> NDArray[np.uint8]:
        if self._room.size < size:
            self._room = fresh_memory(0)  # free the old memory before the larger one is made
            self._room = fresh_memory(-(-size // _SCRATCH_GRAIN) * _SCRATCH_GRAIN)
        return self._room[:size]


def fresh_memory(size: int) -> NDArray[np.uint8]:
    """Return uninitialized memory that begins at a cache line; a `ReadError` when there is not enough."""
    try:
        room = np.empty(size + _CACHE_LINE - 1, np.uint8)
        start = -room.ctypes.data % _CACHE_LINE
        return room[start : start + size]
    except (MemoryError, ValueError) as e:  # ValueError: more than an address can reach
        raise ReadError(f"there is no memory for {size} bytes; use smaller chunks, or the store's metadata lies") from e


def merge_ranges(parts: Iterable[tuple[int, int]], gap: int = 0) -> list[tuple[int, int]]:
    """Return the intervals in rising order, with those that overlap, touch or lie at most `gap` apart as one."""
    merged: list[ByteRange] = []
    for start, stop in sorted(parts):
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = merged[-1][0], max(stop, merged[-1][1])
        else:
            merged.append((start, stop))
    return merged
