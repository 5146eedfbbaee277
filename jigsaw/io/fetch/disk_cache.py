"""A folder on a local disk that keeps what was fetched from a far store, within a limit of bytes."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from jigsaw.io._memory import fresh
from jigsaw.io.chunk import ChunkRef, Places
from jigsaw.io.chunk_grid import Index
from jigsaw.io.errors import FieldError
from jigsaw.io.fetch.files import Files, Room, Target
from jigsaw.io.formats.codecs import Bytes
from jigsaw.io.lookups import Indexed, Lookups
from jigsaw.io.table import ArrayTable, Store

_HEAD = 16
_SUFFIX = ".chunk"
_RECOUNT = 256


@dataclass(frozen=True)
class DiskCache:
    """What `jigsaw.io.open` keeps of a far store: stored bytes as they were fetched, at most `limit` bytes in `folder`.

    The ranks of a machine may share it, and so may runs: it outlives them.  It is for a store that does not change;
    remove the folder after one did.  A file of it that is damaged is fetched again.

    Raises: `FieldError` for a limit that is not positive.
    """

    folder: str | os.PathLike[str]
    limit: int

    def __post_init__(self) -> None:
        if self.limit <= 0:
            raise FieldError(f"limit={self.limit} must be positive: the bytes that {os.fspath(self.folder)!r} may take")

    def of(self, store: Store) -> Store:
        """The same store, read through the cache."""
        kept: dict[int, Files] = {}

        def cached(table: ArrayTable) -> ArrayTable:
            if table.decoder is None:  # its library fetches for itself
                return table
            files = table.places.files
            if id(files) not in kept:
                kept[id(files)] = _Kept(files, Path(self.folder), self.limit)
            if isinstance(table.places, Indexed):
                return replace(table, places=_CachedIndexed(table.places, table.places, kept[id(files)]))
            return replace(table, places=_Cached(table.places, kept[id(files)]))

        return replace(store, arrays={name: cached(table) for name, table in store.arrays.items()})


class _Cached:
    """The places of an array, read through the cache."""

    def __init__(self, places: Places, files: Files) -> None:
        self._places, self.files = places, files

    def path(self, index: Index) -> str:
        return self._places.path(index)

    def locate(self, index: Index) -> ChunkRef | None:
        return self._places.locate(index)


class _CachedIndexed(_Cached):
    """Those that are looked up in indices, which their array keeps itself."""

    def __init__(self, places: Places, indexed: Indexed, files: Files) -> None:
        super().__init__(places, files)
        self._indexed = indexed

    @property
    def made(self) -> Lookups:
        return self._indexed.made

    def index_of(self, index: Index) -> tuple[str, Lookups]:
        return self._indexed.index_of(index)


class _Kept:
    """`Files` whose answers are kept on disk: a file an answer, named by a digest of what was asked."""

    def __init__(self, files: Files, folder: Path, limit: int) -> None:
        self._files, self._folder, self._limit = files, folder, limit
        self.far, self.gap = files.far, files.gap
        self._lock = threading.Lock()
        self._written = _RECOUNT
        folder.mkdir(parents=True, exist_ok=True)

    def size(self, path: str) -> int | None:
        return self._files.size(path)

    def whole(self, path: str, room: Room) -> Bytes | None:
        """All bytes of an object, from the disk where they are."""
        file = self._file(path, "whole")
        if (found := _read(file)) is not None:
            return found
        raw = self._files.whole(path, room)
        if raw is not None:
            self._write(file, raw)
        return raw

    def ranges(self, path: str, targets: Sequence[Target]) -> bool:
        """Fill every target, those that are on the disk from there."""
        lacking: list[tuple[int, Bytes]] = []
        for offset, memory in targets:
            found = _read(self._file(path, f"{offset}+{memory.size}"))
            if found is None or found.size != memory.size:
                lacking.append((offset, memory))
            else:
                memory[:] = found
        if lacking and not self._files.ranges(path, lacking):
            return False
        for offset, memory in lacking:
            self._write(self._file(path, f"{offset}+{memory.size}"), memory)
        return True

    def _file(self, path: str, what: str) -> Path:
        asked = f"{getattr(self._files, 'name', '')}\n{path}\n{what}"
        return self._folder / (hashlib.blake2b(asked.encode(), digest_size=16).hexdigest() + _SUFFIX)

    def _write(self, file: Path, raw: Bytes) -> None:
        """Keep an answer, whole or not at all; a full disk is no reason to fail."""
        if raw.size > self._limit:
            return
        with contextlib.suppress(OSError):
            self._make_room(raw.size)
            handle, half = tempfile.mkstemp(dir=self._folder)
            try:
                with os.fdopen(handle, "wb") as f:
                    f.write(_digest(raw))
                    f.write(raw.data)
                os.replace(half, file)
            except BaseException:
                os.unlink(half)
                raise

    def _make_room(self, size: int) -> None:
        """Remove the files that were written first; other ranks write here too, so it counts again now and then."""
        with self._lock:
            self._written += 1
            if self._written < _RECOUNT and self._used + size <= self._limit:
                self._used += size
                return
            kept = sorted((s.st_mtime_ns, s.st_size, name) for s, name in self._entries())
            self._written, self._used = 0, sum(n for _, n, _ in kept) + size
            for _, n, name in kept:
                if self._used <= self._limit:
                    return
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name)
                self._used -= n

    def _entries(self) -> list[tuple[os.stat_result, str]]:
        found: list[tuple[os.stat_result, str]] = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.endswith(_SUFFIX):
                    with contextlib.suppress(FileNotFoundError):
                        found.append((entry.stat(), entry.path))
        return found

    _used = 0


def _digest(raw: Bytes) -> bytes:
    return hashlib.blake2b(raw.data, digest_size=_HEAD).digest()


def _read(file: Path) -> Bytes | None:
    """What is kept in a file; None when there is none, or a damaged one."""
    try:
        with open(file, "rb") as f:
            size = os.fstat(f.fileno()).st_size - _HEAD
            if size < 0:
                return None
            head, raw = f.read(_HEAD), fresh(size)
            if f.readinto(raw.data) != size or _digest(raw) != head:
                return None
    except OSError:
        return None
    return np.asarray(raw)
