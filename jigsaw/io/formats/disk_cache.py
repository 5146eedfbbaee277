"""Folder on a local disk that keeps what was fetched from a far store, within a limit of bytes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from weakref import WeakKeyDictionary

import numpy as np

from jigsaw.errors import FieldError, UnsupportedStoreError
from jigsaw.io.arguments import is_real_number
from jigsaw.io.cache_folder import CacheFolder
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable
from jigsaw.io.chunks.files import (
    ByteAllocator,
    ByteArray,
    FillTarget,
    ObjectIdentity,
    StoreFiles,
    fresh_memory,
    identity_of_object,
)
from jigsaw.io.formats.array_source import wrap_places

_CHECKSUM_BYTES, _MARK_BYTES = 16, 8
_ANSWER_HEAD_BYTES = _CHECKSUM_BYTES + _MARK_BYTES
_UNKNOWN_STATE = bytes(_MARK_BYTES)
_ANSWER_SUFFIX = ".chunk"
_SPARE_FRACTION = 8
"""Inverse of the share of its limit that a full folder frees at once, because a look through it takes long."""


@dataclass(frozen=True)
class DiskCache:
    """Local copy of what `jigsaw.io.open` fetches from a far store: stored bytes, at most `limit` of them in `folder`.

    The ranks of a machine may share it, as may runs and stores: it outlives them. The folder belongs to this user
    alone, unless it is `shared`: then whoever may write to it decides what all others read, and they trust each other.
    It is for a store that does not change; remove the folder after a change. A damaged file in it is fetched again, and
    so is a chunk that could not be decoded. Arrays that nothing distinguishes from those of other stores (in memory, or
    in a writable Icechunk session) are not kept.

    Raises: `FieldError` for a limit that is not positive. A dataset that is opened with it raises `CacheError` for a
    folder that others own or may write to, unless it is `shared`. It also does so for a lock in it that is held too
    long.

    >>> cache = jigsaw.io.DiskCache("cache", limit=10_000_000_000)
    >>> data = jigsaw.io.open("globe.zarr", mesh={"lat": 1}, disk_cache=cache)    # in earnest, s3://…/globe.zarr
    >>> len(data)
    8
    """

    folder: str | os.PathLike[str]
    limit: int
    shared: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.folder, str | os.PathLike) or not os.fspath(self.folder):
            raise FieldError(f"folder={self.folder!r} must be the path of a folder, which is made where there is none")
        if not is_real_number(self.limit) or not 0 < self.limit < float("inf"):
            raise FieldError(
                f"limit={self.limit!r} must be a positive number: the bytes that {os.fspath(self.folder)!r} may take"
            )

    def of(self, store: ArrayStore) -> ArrayStore:
        folder = CacheFolder(Path(self.folder), self.limit, self.limit // _SPARE_FRACTION, self.shared)
        try:
            folder.make_ready()
        except OSError as e:
            raise UnsupportedStoreError(f"the folder {str(folder.path)!r} of the disk cache cannot be made: {e}") from e
        return replace(store, arrays=_CachedTables(store.arrays, KeptAnswers(folder)))


class _CachedTables(Mapping[str, ArrayTable]):
    """The arrays of a store, read through the cache; what is found by name and not listed (members) too."""

    def __init__(self, tables: Mapping[str, ArrayTable], answers: KeptAnswers) -> None:
        self._tables, self._answers = tables, answers
        self._cached: WeakKeyDictionary[ArrayTable, ArrayTable] = WeakKeyDictionary()

    def __getitem__(self, name: str) -> ArrayTable:
        table = self._tables[name]
        cached = self._cached.get(table)
        return self._cached.setdefault(table, self._of(table)) if cached is None else cached

    def __contains__(self, name: object) -> bool:
        return name in self._tables

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)

    def _of(self, table: ArrayTable) -> ArrayTable:
        if table.decoder is None or identity_of_object(table.places.files, "") is None:
            return replace(table)  # a library fetches the chunks, or versions of an object cannot be told apart
        files = _CachedFiles(table.places.files, self._answers)
        return replace(table, places=wrap_places(table.places, files))


class _CachedFiles:
    """`StoreFiles` that keep each answer in a file on disk, named by the object and the request."""

    def __init__(self, files: StoreFiles, answers: KeptAnswers) -> None:
        self._files, self._answers = files, answers
        self.far, self.gap = files.far, files.gap

    def size(self, path: str) -> int | None:
        return self._files.size(path)

    def whole(self, path: str, room: ByteAllocator, most: int | None = None) -> ByteArray | None:
        if (kept := self._answers.read(self._known(path), "whole")) is not None:
            return kept
        raw = self._files.whole(path, room, most)
        if raw is not None:
            self._answers.write(self._known(path), "whole", raw)
        return raw

    def ranges(self, path: str, targets: Sequence[FillTarget]) -> bool:
        lacking: list[tuple[int, ByteArray]] = []
        before = self._known(path)
        for offset, memory in targets:
            kept = self._answers.read(before, f"{offset}+{memory.size}")
            if kept is None or kept.size != memory.size:
                lacking.append((offset, memory))
            else:
                memory[:] = kept
        if lacking and not self._files.ranges(path, lacking):
            return False
        after = self._known(path)
        for offset, memory in lacking:
            self._answers.write(after, f"{offset}+{memory.size}", memory)
        return True

    def forget(self, path: str) -> None:
        """Keep nothing of an object any more: it could not be decoded."""
        self._answers.remove(self._known(path))

    def _known(self, path: str) -> ObjectIdentity:
        identity = identity_of_object(self._files, path)
        assert identity is not None  # only objects with an identity are cached
        return identity


class KeptAnswers:
    """The answers in a cache folder, with their checksums."""

    def __init__(self, folder: CacheFolder) -> None:
        self._folder = folder

    def read(self, known: ObjectIdentity, part: str) -> ByteArray | None:
        """Read an answer; None when it is not kept, damaged, or of another state of the object."""
        name = _answer_name(known, part)
        file = self._folder.opened(name)
        if file is None:
            return None
        try:
            with file as f:
                size = os.fstat(f.fileno()).st_size - _ANSWER_HEAD_BYTES
                if size < 0:
                    return None
                head, raw = f.read(_ANSWER_HEAD_BYTES), fresh_memory(size)
                whole = os.preadv(f.fileno(), [raw.data], _ANSWER_HEAD_BYTES) == size
                if not whole or _answer_checksum(name, head[_CHECKSUM_BYTES:], raw) != head[:_CHECKSUM_BYTES]:
                    return None
        except OSError:
            return None
        states = head[_CHECKSUM_BYTES:], _state_digest(known)
        return np.asarray(raw) if len(set(states)) == 1 or _UNKNOWN_STATE in states else None

    def write(self, known: ObjectIdentity, part: str, raw: ByteArray) -> None:
        """Keep an answer, whole or not at all; a full disk is not an error."""
        size, mark, name = _ANSWER_HEAD_BYTES + raw.size, _state_digest(known), _answer_name(known, part)
        if size > self._folder.limit:
            return
        with suppress(OSError), self._folder.draft(name, size) as file:
            file.write(_answer_checksum(name, mark, raw) + mark)
            file.write(raw.data)

    def remove(self, known: ObjectIdentity) -> None:
        with suppress(OSError):
            self._folder.remove(f"{_object_digest(known)}-")


def _answer_name(known: ObjectIdentity, part: str) -> str:
    return f"{_object_digest(known)}-{part}{_ANSWER_SUFFIX}"


def _object_digest(known: ObjectIdentity) -> str:
    return hashlib.blake2b(known.place.encode(), digest_size=16).hexdigest()


def _state_digest(known: ObjectIdentity) -> bytes:
    known_state = hashlib.blake2b(known.state.encode(), digest_size=_MARK_BYTES).digest()
    return known_state if known.state else _UNKNOWN_STATE


def _answer_checksum(name: str, mark: bytes, raw: ByteArray) -> bytes:
    checksum = hashlib.blake2b(name.encode() + mark, digest_size=_CHECKSUM_BYTES)
    checksum.update(raw.data)
    return checksum.digest()
