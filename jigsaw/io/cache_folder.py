"""A folder of files that can be made again: so many bytes at most, each file whole or absent, whoever writes them."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

from jigsaw.drafts import draft_of, open_unlinked
from jigsaw.errors import UnsupportedStoreError

CACHE_COUNT_FILE = "count"
_USUAL_CACHE_BYTES = 64 * 10**9
_CHECKSUM_BYTES = 16
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

    @contextmanager
    def draft(self, name: str, size: int) -> Generator[BinaryIO]:
        """A file of `size` bytes to be written, for which there is room; named `name` when the block ends well."""
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as writing:
            with self._flock(CACHE_COUNT_FILE) as count:
                used = self._used_with_room(_decode_count(count.read(8 + _CHECKSUM_BYTES)), size)
                count.seek(0)
                count.write(_encode_count(used + size))
                file = writing.enter_context(draft_of(self.path / name))
                file.truncate(size)  # counted from now on
            yield file
            with self._flock(CACHE_COUNT_FILE):  # a file that is renamed while others are counted may be missed
                writing.close()

    @contextmanager
    def locked(self, name: str) -> Generator[None]:
        """For one thread of one process at a time; ends with the process, however that ends.

        Names share 256 locks, which stay: who removes one that another holds or waits for lets a third in.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with self._flock(f"{blake2b(name.encode(), digest_size=1).hexdigest()}.lock"):
            yield

    def mark_used(self, name: str) -> None:
        """The time of use is now; that of change stays, by which a file that changes while it is read is known."""
        with suppress(OSError):  # another process needed its room
            place = self.path / name
            os.utime(place, ns=(time.time_ns(), place.stat().st_mtime_ns))

    def remove(self, prefix: str) -> None:
        """Every file whose name begins so."""
        for file, _ in self._files():
            if file.name.startswith(prefix):
                file.unlink(missing_ok=True)

    def _used_with_room(self, counted: int | None, size: int) -> int:
        """The bytes in the folder, after others made room for `size` more.

        The count is too high after a file was replaced or its writer killed, and then found again in the folder.
        """
        if counted is not None and counted + size <= self.limit:
            return counted
        kept = sorted(self._files(), key=lambda each: max(each[1].st_atime_ns, each[1].st_mtime_ns))
        used = sum(found.st_size for _, found in kept)
        if used + size <= self.limit:
            return used
        for file, found in kept:
            if used + size <= self.limit - self.spare:
                break
            file.unlink(missing_ok=True)
            used -= found.st_size
        return used

    def _files(self) -> Iterator[tuple[Path, os.stat_result]]:
        for file in self.path.iterdir():
            if _CACHE_FILE_PATTERN.fullmatch(file.name):
                with suppress(FileNotFoundError):  # a draft that is finished by now, or a file that made room
                    yield file, file.lstat()

    @contextmanager
    def _flock(self, name: str) -> Generator[BinaryIO]:
        with os.fdopen(open_unlinked(self.path / name, os.O_RDWR | os.O_CREAT), "r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file


def user_cache_folder(chosen: str | os.PathLike[str] | None = None) -> CacheFolder | None:
    """`chosen`, else $JIGSAW_CACHE, else ~/.cache/jigsaw, of at most $JIGSAW_CACHE_BYTES; an empty name is none."""
    if chosen is None:
        chosen = os.environ.get("JIGSAW_CACHE")
    if chosen is None:
        chosen = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jigsaw"
    if not os.fspath(chosen):
        return None
    given = os.environ.get("JIGSAW_CACHE_BYTES")
    try:
        return CacheFolder(Path(chosen), _USUAL_CACHE_BYTES if given is None else int(float(given)))
    except (ValueError, OverflowError) as e:
        raise UnsupportedStoreError(f"JIGSAW_CACHE_BYTES={given!r} must be a number of bytes") from e


def _encode_count(used: int) -> bytes:
    raw = used.to_bytes(8, "little")
    return raw + blake2b(raw, digest_size=_CHECKSUM_BYTES).digest()


def _decode_count(kept: bytes) -> int | None:
    """The count that is kept; None when it is damaged."""
    used = int.from_bytes(kept[:8], "little")
    return used if _encode_count(used) == kept else None
