"""Folder of files that can be made again: of limited size, each file whole or absent, whoever writes them.

It belongs to this user alone: files that others put there are not read, and others cannot read its files. One that
several users share is requested explicitly (``DiskCache(..., shared=True)``, $JIGSAW_CACHE_SHARED): they trust each
other.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import socket
import stat
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from jigsaw.drafts import draft_of, open_unlinked
from jigsaw.errors import CacheError, UnsupportedStoreError

CACHE_COUNT_FILE = "count"
_USUAL_CACHE_BYTES = 64 * 10**9
_CHECKSUM_BYTES = 16
_USUAL_PATIENCE_SECONDS = 120.0
_LOCK_POLL_SECONDS = 0.001, 0.05
_BEAT_SECONDS = 1.0
_HOLDER_OFFSET, _HOLDER_BYTES = 64, 256
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_CACHE_FILE_PATTERN = re.compile(r"\.?(hdf5-)?[0-9a-f]{32}\S*\.(chunk|raw|npz|draft)")
"""Files that are counted and removed, drafts too: a folder that a user names may have others."""


@dataclass(frozen=True)
class CacheFolder:
    """Files of at most `limit` bytes together; those that were used longest ago make room for more.

    A folder that is full is emptied by `spare` bytes more at once, where looking through it takes long.
    """

    path: Path
    limit: int
    spare: int = 0
    shared: bool = False

    @property
    def file_mode(self) -> int:
        """The permissions of a file in it, before the umask."""
        return 0o666 if self.shared else 0o600

    def make_ready(self) -> None:
        """Make the folder, for this user alone unless it is `shared`.

        Raises: `CacheError` for a folder that others own or may write to; `OSError` where it cannot be made.
        """
        if self.shared:
            self.path.mkdir(parents=True, exist_ok=True)
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        folder = os.stat(self.path)
        if not stat.S_ISDIR(folder.st_mode):
            raise NotADirectoryError(f"{self.path} is a file")
        remedy = (
            "choose another folder (JIGSAW_CACHE, or the argument that names it), or, if you trust all who write to "
            "it, share it: JIGSAW_CACHE_SHARED=1, DiskCache(..., shared=True)"
        )
        if folder.st_uid != os.geteuid():
            raise CacheError(
                f"the cache {self.path} belongs to {_user_name(folder.st_uid)}, who may put anything there; {remedy}"
            )
        if folder.st_mode & _OTHERS_WRITE:
            raise CacheError(
                f"other users may write to the cache {self.path} (mode {stat.S_IMODE(folder.st_mode):o}), so what is "
                f"there may be theirs; chmod 700 it, {remedy}"
            )

    def opened(self, name: str) -> BinaryIO | None:
        """Open a file of the folder for reading; None where there is none that may be read."""
        handle = -1
        try:
            handle = open_unlinked(self.path / name, os.O_RDONLY | os.O_NONBLOCK)
            state = os.fstat(handle)
            if stat.S_ISREG(state.st_mode) and (self.shared or state.st_uid == os.geteuid()):
                return os.fdopen(handle, "rb")
        except OSError:
            return None
        os.close(handle)
        return None

    @contextmanager
    def draft(self, name: str, size: int) -> Generator[BinaryIO]:
        """Write a file of `size` bytes, for which room is made; it is named `name` when the block ends well."""
        self.make_ready()
        with ExitStack() as writing:
            with self._flock(CACHE_COUNT_FILE) as (count, _):
                used = self._used_with_room(_decode_count(count.read(8 + _CHECKSUM_BYTES)), size)
                count.seek(0)
                count.write(_encode_count(used + size))
                file = writing.enter_context(draft_of(self.path / name, self.file_mode))
                file.truncate(size)  # counted from now on
            yield file
            with self._flock(CACHE_COUNT_FILE):  # a file that is renamed while others are counted may be missed
                writing.close()

    @contextmanager
    def locked(self, name: str) -> Generator[Callable[[], None]]:
        """Hold a lock for one thread of one process at a time; it ends with the process, however that ends.

        The holder calls the yielded function now and then, because others wait no longer than $JIGSAW_CACHE_TIMEOUT
        seconds (120) without a sign of life. Names share 256 locks, which stay: removing one that another process holds
        or waits for would let a third in.

        Raises: `CacheError` for a lock that another process keeps; it names the holder.
        """
        self.make_ready()
        with self._flock(f"{blake2b(name.encode(), digest_size=1).hexdigest()}.lock") as (_, beat):
            yield beat

    def mark_used(self, name: str) -> None:
        """Set the time of use to now; the modification time stays, because it tells of a file that changes."""
        with suppress(OSError):  # another process needed its room
            place = self.path / name
            os.utime(place, ns=(time.time_ns(), place.stat().st_mtime_ns))

    def remove(self, prefix: str) -> None:
        """Remove every file whose name begins with the prefix."""
        for file, _ in self._files():
            if file.name.startswith(prefix):
                file.unlink(missing_ok=True)

    def _used_with_room(self, counted: int | None, size: int) -> int:
        """Return the bytes in the folder, after others made room for `size` more.

        The count is too high after a file was replaced or its writer killed, and is then found again from the folder.
        """
        if counted is not None and counted + size <= self.limit:
            return counted
        kept = sorted(self._files(), key=lambda each: max(each[1].st_atime_ns, each[1].st_mtime_ns))
        used = sum(state.st_size for _, state in kept)
        if used + size <= self.limit:
            return used
        for file, state in kept:
            if used + size <= self.limit - self.spare:
                break
            file.unlink(missing_ok=True)
            used -= state.st_size
        return used

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for file in self.path.iterdir():
            if _CACHE_FILE_PATTERN.fullmatch(file.name):
                with suppress(FileNotFoundError):  # a draft that is finished by now, or a file that made room
                    yield file, file.lstat()

    @contextmanager
    def _flock(self, name: str) -> Generator[tuple[BinaryIO, Callable[[], None]]]:
        with os.fdopen(self._open_lock(name), "r+b") as file:
            self._wait_for(file, name)
            holder = f"process {os.getpid()} of {_user_name(os.geteuid())} on {socket.gethostname()}"
            os.pwrite(file.fileno(), holder.encode()[:_HOLDER_BYTES].ljust(_HOLDER_BYTES, b"\0"), _HOLDER_OFFSET)
            yield file, _Heartbeat(file).beat

    def _open_lock(self, name: str) -> int:
        with suppress(FileNotFoundError):  # in folders with a sticky bit Linux opens no file of others to be created
            return open_unlinked(self.path / name, os.O_RDWR | os.O_NONBLOCK)
        handle = open_unlinked(self.path / name, os.O_RDWR | os.O_CREAT, 0o600)
        if self.shared:
            with suppress(PermissionError):
                os.fchmod(handle, 0o666)
        return handle

    def _wait_for(self, file: BinaryIO, name: str) -> None:
        patience = _number_of_environment("JIGSAW_CACHE_TIMEOUT", _USUAL_PATIENCE_SECONDS, "seconds")
        last, since = os.fstat(file.fileno()).st_mtime_ns, time.monotonic()
        pause, longest = _LOCK_POLL_SECONDS
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            now = os.fstat(file.fileno()).st_mtime_ns
            if now != last:
                last, since = now, time.monotonic()
            if time.monotonic() - since > patience:
                holder = os.pread(file.fileno(), _HOLDER_BYTES, _HOLDER_OFFSET).rstrip(b"\0").decode("utf-8", "replace")
                raise CacheError(
                    f"{holder or 'somebody who leaves no name'} holds the lock {self.path / name} and has shown no "
                    f"sign of life for {patience:g} s; end that process, give it longer (JIGSAW_CACHE_TIMEOUT, in "
                    "seconds), or choose another folder (JIGSAW_CACHE)"
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)


class _Heartbeat:
    """Signal by which the holder of a lock shows those that wait that it is still at work."""

    def __init__(self, lock: BinaryIO) -> None:
        self._lock, self._last = lock, time.monotonic()

    def beat(self) -> None:
        if time.monotonic() - self._last > _BEAT_SECONDS:
            with suppress(OSError):
                os.utime(self._lock.fileno())
            self._last = time.monotonic()


def _user_name(number: int) -> str:
    try:
        return f"user {pwd.getpwuid(number).pw_name!r}"
    except KeyError:
        return f"user {number}"


def _number_of_environment(name: str, usual: float, unit: str) -> float:
    text = os.environ.get(name)
    try:
        number = usual if text is None else float(text)
        if not number >= 0 or number == float("inf"):
            raise ValueError
    except ValueError as e:
        raise UnsupportedStoreError(f"{name}={text!r} must be a number of {unit}") from e
    return number


def user_cache_folder(chosen: str | os.PathLike[str] | None = None) -> CacheFolder | None:
    """Return the folder `chosen`, else $JIGSAW_CACHE, else ~/.cache/jigsaw; None for an empty name. It holds at most
    $JIGSAW_CACHE_BYTES.

    Others may write to it where $JIGSAW_CACHE_SHARED is 1.
    """
    if chosen is None:
        chosen = os.environ.get("JIGSAW_CACHE")
    if chosen is None:
        chosen = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jigsaw"
    if not os.fspath(chosen):
        return None
    limit = int(_number_of_environment("JIGSAW_CACHE_BYTES", _USUAL_CACHE_BYTES, "bytes"))
    return CacheFolder(Path(chosen), limit, shared=os.environ.get("JIGSAW_CACHE_SHARED", "0") not in ("", "0"))


def _encode_count(used: int) -> bytes:
    raw = used.to_bytes(8, "little")
    return raw + blake2b(raw, digest_size=_CHECKSUM_BYTES).digest()


def _decode_count(kept: bytes) -> int | None:
    used = int.from_bytes(kept[:8], "little")
    return used if _encode_count(used) == kept else None
