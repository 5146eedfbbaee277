"""Other files and objects that a Zarr store leads to: by links in its folder, or by references.

A store from somebody else must not make its reader open what the store names: a file of the reader's own, or a server
that only the reader can reach. What lies in its folder, or in that of its references, may be read. The user names all
else: ``options={"outside": ["s3://bucket/archive", "/data"]}``, or True for any place.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import pickle
import posixpath
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import unquote, urljoin, urlsplit
from zipfile import is_zipfile

import zarr
from numpy import ndarray
from zarr.abc.buffer import Buffer, BufferPrototype
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store
from zarr.buffer import default_buffer_prototype
from zarr.storage import FsspecStore, LocalStore, WrapperStore, ZipStore

from jigsaw.errors import FetchError, UnsupportedStoreError, cause_without_secrets, redacted_text
from jigsaw.io.chunks.chunk_finder import missing_chunk_error, vanished_array_error
from jigsaw.io.chunks.files import BadChunkError, LocalFiles, StoreBounds, fresh_memory
from jigsaw.io.chunks.redirects import private_address
from jigsaw.io.chunks.remote_files import MOST_OBJECT_BYTES

OutsidePlaces = bool | tuple[str, ...]
"""Places that a store may lead to beyond its own folder: nothing, anything (True), or what lies below these."""

_LOCAL_PROTOCOLS = ("file", "local")
_MOST_REDIRECTS = 10

AnyStore = TypeVar("AnyStore", bound=Store)


def checked_outside(outside: Any) -> OutsidePlaces:
    """Check ``options["outside"]`` and return it. Raises: `UnsupportedStoreError` unless it names places."""
    if isinstance(outside, bool | None):
        return bool(outside)
    places = (outside,) if isinstance(outside, str | os.PathLike) else outside
    if not isinstance(places, list | tuple) or not all(isinstance(each, str | os.PathLike) for each in places):
        raise UnsupportedStoreError(
            f"options={{'outside': {outside!r}}} must be a list of folders and URLs that the store may lead to, or True"
        )
    return tuple(os.fspath(each) for each in places)


class BoundedLocalStore(LocalStore):
    """Zarr's store of a folder, which reads no file that a link puts elsewhere."""

    def __init__(self, root: Any, *, read_only: bool = True, outside: OutsidePlaces = False) -> None:
        super().__init__(root, read_only=True)
        self.outside = outside
        bounds = None if outside is True else StoreBounds(str(self.root), outside or ())
        # files that change are refused, because what is known of them is kept
        self.files = LocalFiles(keep=True, bounds=bounds)
        self._metadata = LocalFiles(bounds=bounds)

    def with_read_only(self, read_only: bool = False) -> BoundedLocalStore:
        return self

    async def get(
        self, key: str, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        return await asyncio.to_thread(self.get_sync, key, prototype=prototype, byte_range=byte_range)

    def get_sync(
        self, key: str, *, prototype: BufferPrototype | None = None, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        path = str(self.root / key)
        if os.path.isdir(path):
            return None
        raw = self._metadata.whole(path, fresh_memory)
        if raw is None:
            return None
        if isinstance(byte_range, RangeByteRequest):
            raw = raw[byte_range.start : byte_range.end]
        elif byte_range is not None:
            raw = raw[byte_range.offset if isinstance(byte_range, OffsetByteRequest) else -byte_range.suffix :]
        return (prototype or default_buffer_prototype()).buffer.from_bytes(raw.tobytes())

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, part) for key, part in key_ranges]


class ReadThroughStore(WrapperStore[AnyStore]):
    """Store that reads another one, each part of it by its own `get`."""

    def __init__(self, store: AnyStore) -> None:
        super().__init__(store)
        self.inner = store

    def with_read_only(self, read_only: bool = False) -> Self:
        return self

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        return [await self.get(key, prototype, part) for key, part in key_ranges]


class BoundedReferences(ReadThroughStore[FsspecStore]):
    """A store of references (kerchunk's), which follows none that leads elsewhere."""

    def __init__(self, store: FsspecStore, outside: OutsidePlaces = False) -> None:
        super().__init__(store)
        self.outside = outside
        self._reach = ReferenceReach(store.fs, outside)

    def __getstate__(self) -> tuple[FsspecStore, OutsidePlaces]:
        return self.inner, self.outside

    def __setstate__(self, state: tuple[FsspecStore, OutsidePlaces]) -> None:
        self.__init__(*state)

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        self._reach.check_key(f"{self.inner.path}/{key}")
        part = self._reach.http_part(f"{self.inner.path}/{key}", byte_range)
        if part is None:
            return await self.inner.get(key, prototype, byte_range)
        return prototype.buffer.from_bytes(await part.read())

    async def getsize(self, key: str) -> int:
        self._reach.check_key(f"{self.inner.path}/{key}")
        return await self.inner.getsize(key)


class ReferenceReach:
    """Places that the references of an fsspec file system may name: in or below their folder, and those that the user
    names.

    References given as a dictionary do not lie in a folder.
    """

    def __init__(self, system: Any, outside: OutsidePlaces) -> None:
        self._system, self._outside = system, outside
        origin = system.storage_options.get("fo", next(iter(system.storage_args), None))
        self._home = None
        if isinstance(origin, str):
            self._home = posixpath.dirname(origin.rpartition("::")[2].rstrip("/")) or "."
        named = () if isinstance(outside, bool) else outside
        self._allowed = [_canonical_place(place) for place in (*filter(None, [self._home]), *named)]
        self._sound: set[Any] = set()

    def check_key(self, key: str) -> None:
        if self._outside is True:
            return
        with suppress(KeyError):
            self._check(self._system.references[key.strip("/")], key.strip("/"))

    def check_all(self) -> None:
        if self._outside is True:
            return
        for key in self._system.references:
            self.check_key(key)

    def http_part(self, key: str, asked: ByteRequest | None) -> HttpPart | None:
        """Return the part of an HTTP server's object that a part of a key means; None where it lies elsewhere."""
        reference = self._system.references.get(key.strip("/"))
        if not isinstance(reference, list | tuple):
            return None
        url = self._system.target if reference[0] is None else reference[0]
        system = self._system.fss.get(url.partition("://")[0]) if "://" in url else self._system.fss[None]
        if not _is_file_system(system, "http", "HTTPFileSystem"):
            return None
        offset, size = reference[1:] if len(reference) == 3 else (0, None)
        start, stop = offset, None if size is None else offset + size
        if isinstance(asked, RangeByteRequest):
            start, stop = offset + asked.start, min(offset + asked.end, offset + asked.end if stop is None else stop)
        elif isinstance(asked, OffsetByteRequest):
            start = offset + asked.offset
        elif asked is not None:
            start = -asked.suffix if stop is None else max(offset, stop - asked.suffix)
        return HttpPart(system, url, start, stop, self)

    def check_redirect(self, url: str, target: str) -> None:
        """Check where a server leads.  Raises: `FetchError` for a private host that is neither its own nor allowed."""
        host = urlsplit(target).hostname or ""
        place = _canonical_place(target)
        named = self._outside is True or any(_lies_below(place, allowed) for allowed in self._allowed)
        if not named and host != urlsplit(url).hostname and (address := private_address(host)) is not None:
            raise FetchError(
                f"{redacted_text(url)} leads by a redirect to {host}, {address}, which is not a public "
                f"internet address; if you trust the server, open the references with options={{'outside': ['http://{host}']}}"
            )

    def _check(self, reference: Any, key: str) -> None:
        if not isinstance(reference, list | tuple):
            return  # the bytes themselves
        url = reference[0] if reference and reference[0] is not None else self._system.target
        if url in self._sound:
            return
        place = _canonical_place(url, self._usual_protocol())
        if not any(_lies_below(place, allowed) for allowed in self._allowed):
            raise UnsupportedStoreError(
                f"the reference {key!r} leads to {redacted_text(str(url))}, outside of "
                f"{redacted_text(self._home or 'what is given')}; "
                "if you trust the references, open them with options={'outside': […]}, the folders and URLs that they "
                "may lead to"
            )
        self._sound.add(url)

    def _usual_protocol(self) -> str:
        protocol = self._system.fss[None].protocol
        return str(protocol if isinstance(protocol, str) else protocol[0])


class HttpPart(NamedTuple):
    """Bytes of an object that fsspec reads from an HTTP server, to its end where `stop` is None."""

    system: Any
    url: str
    start: int
    stop: int | None
    reach: ReferenceReach

    async def read(self) -> bytes:
        """Read the bytes.

        Raises: `BadChunkError` for an answer without a size, or with more bytes than were asked for; its body is not
        read. `FetchError` for any other failure, and for redirects to private addresses.
        """
        part = self
        for _ in range(_MOST_REDIRECTS):
            try:
                return await part._read_from_host()
            except _RedirectedError as led:
                target = led.target
            finally:
                if part.system is not self.system:
                    await (await part.system.set_session()).close()
            # in a thread, because it asks for the host's address
            await asyncio.to_thread(self.reach.check_redirect, self.url, target)
            part = self._led_to(target)
        raise FetchError(f"{redacted_text(self.url)} leads by redirects to more than {_MOST_REDIRECTS} others")

    def _led_to(self, target: str) -> HttpPart:
        """Return the same bytes at another URL, which gets no secrets of this one if it has another origin."""
        system, before, after = self.system, urlsplit(self.url), urlsplit(target)
        if (before.scheme, before.netloc) != (after.scheme, after.netloc):
            asking, client = _without_credentials(system.kwargs), _without_credentials(system.client_kwargs)
            if (asking, client) != (system.kwargs, system.client_kwargs):
                loop = {"asynchronous": True, "loop": asyncio.get_running_loop(), "skip_instance_cache": True}
                system = type(system)(client_kwargs=client, get_client=system.get_client, **loop, **asking)
        return self._replace(system=system, url=target)

    async def _read_from_host(self) -> bytes:
        if self.stop is not None and self.start >= self.stop:
            return b""
        headers = {**self.system.kwargs.get("headers", {}), "Accept-Encoding": "identity"}
        part = {} if (self.start, self.stop) == (0, None) else {"start": self.start, "end": self.stop}
        try:
            # the client asks this before it reads the body
            asked = {**part, "headers": headers, "allow_redirects": False}
            return await self.system._cat_file(self.url, **asked, raise_for_status=self._check_answer)
        except (BadChunkError, _RedirectedError):
            raise
        except Exception as e:  # the client, and the server's own answer, may raise anything
            why = redacted_text(str(e) or type(e).__name__)
            raise FetchError(f"{redacted_text(self.url)} cannot be read: {why}") from cause_without_secrets(e)

    async def _check_answer(self, answer: Any) -> None:
        if 300 <= answer.status < 400 and "Location" in answer.headers:
            raise _RedirectedError(urljoin(str(answer.url), answer.headers["Location"]))
        answer.raise_for_status()
        size, most = answer.content_length, MOST_OBJECT_BYTES if self.stop is None else self.stop - self.start
        if size is None or answer.headers.get("Content-Encoding", "identity") != "identity":
            raise BadChunkError("the server does not say how many bytes it sends; serve the file as it is")
        if size > most:
            raise BadChunkError(f"the server says that it sends {size} bytes, and at most {most} can be right")


def _without_credentials(options: dict[str, Any]) -> dict[str, Any]:
    """Return options of requests or of their client without credentials, for a server that the user did not name."""
    kept = {name: value for name, value in options.items() if name not in ("auth", "cookies")}
    if "headers" in kept:
        headers = dict(kept["headers"])
        kept["headers"] = {k: v for k, v in headers.items() if k.lower() not in ("authorization", "cookie")}
    return kept


class _RedirectedError(Exception):
    """Answer of a server that leads to another URL, which no request has been sent to."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.target = target


def _is_file_system(system: Any, kind: str, name: str) -> bool:
    """Say whether a file system is of a class of fsspec, which is not imported for this."""
    module = sys.modules.get(f"fsspec.implementations.{kind}")
    return module is not None and isinstance(system, getattr(module, name))


def _canonical_place(url: Any, usual: str = "file") -> tuple[str, str] | None:
    """Return protocol and path of a place, by which it is compared with others; None for one that may lead anywhere."""
    if not isinstance(url, str) or "::" in url:
        return None
    protocol, mark, path = url.rpartition("://")
    protocol = protocol.lower() if mark else usual
    if protocol in _LOCAL_PROTOCOLS:
        return "file", os.path.realpath(path)
    parts = unquote(path.partition("?")[0]).replace("\\", "/").split("/")
    return None if ".." in parts or "." in parts else (protocol, "/".join(parts).rstrip("/"))


def _lies_below(place: tuple[str, str] | None, allowed: tuple[str, str] | None) -> bool:
    if place is None or allowed is None or place[0] != allowed[0]:
        return False
    return place[1] == allowed[1] or place[1].startswith(f"{allowed[1].rstrip('/')}/")


def _bounded_store(store: Any, outside: OutsidePlaces) -> Any:
    """Return a zarr store that leads only to its own place and those that `outside` allows.

    It is `store` itself where that is bounded, or of a kind that leads nowhere or has its own rules, as Icechunk does.
    """
    if isinstance(store, BoundedLocalStore | BoundedReferences):
        return store
    if isinstance(store, LocalStore):
        return BoundedLocalStore(store.root, outside=outside)
    if isinstance(store, FsspecStore):
        if _is_reference_system(store.fs):
            return BoundedReferences(store, outside)
        if {store.fs.protocol} & {*_LOCAL_PROTOCOLS, _LOCAL_PROTOCOLS}:
            return BoundedLocalStore(store.path, outside=outside)
    return store


ZarrNode = zarr.Group | zarr.Array[Any]


def bounded_node(node: ZarrNode, outside: OutsidePlaces) -> ZarrNode:
    """Return the group or array with a store that leads to no other place."""
    store = _bounded_store(node.store, outside)
    if store is node.store:
        return node
    with zarr.config.set({"array.rectilinear_chunks": True}):
        opener = zarr.open_array if isinstance(node, zarr.Array) else zarr.open_group
        return opener(store, path=node.path, mode="r")


def local_zarr_store(url: Any, outside: OutsidePlaces) -> Any:
    """Return the store of a folder, which leads to no other place, or of a zip file; anything else as it is."""
    path = url.removeprefix("file://") if isinstance(url, str) else url
    if not isinstance(path, str | os.PathLike):
        return url
    if os.path.isdir(path):
        return BoundedLocalStore(path, outside=outside)
    return ZipStore(Path(path), mode="r") if os.path.isfile(path) and is_zipfile(path) else url


def _is_reference_system(system: Any) -> bool:
    return _is_file_system(system, "reference", "ReferenceFileSystem")


def check_reference_file(path: str, outside: OutsidePlaces) -> None:
    """Refuse a file or folder of references if one of them leads to another place."""
    system = importlib.import_module("fsspec").filesystem("reference", fo=path)
    ReferenceReach(system, outside).check_all()


def check_references_within(held: Iterable[Any], outside: OutsidePlaces) -> None:
    """Refuse objects that would read references that lead elsewhere, such as an xarray variable over such a store.

    Found are those that such an object would take with it to another process.
    """
    if outside is True or "fsspec.implementations.reference" not in sys.modules:
        return
    for system in _reference_systems(held):
        ReferenceReach(system, outside).check_all()


def _reference_systems(held: Iterable[Any]) -> Iterator[Any]:
    systems: dict[int, Any] = {}

    class Seen(pickle.Pickler):
        def reducer_override(self, obj: Any) -> Any:
            if _is_reference_system(obj):
                systems[id(obj)] = obj
            # values cannot lead to a store, and may be many
            return (int, ()) if isinstance(obj, ndarray) else NotImplemented

    pickler = Seen(_Discarded(), protocol=5)
    for each in held:
        with suppress(Exception):  # what cannot be pickled raises anything
            pickler.dump(each)
    yield from systems.values()


class _Discarded:
    def write(self, data: Any) -> int:
        return len(data)


_METADATA_NAMES = {"zarr.json", ".zarray", ".zattrs", ".zgroup", ".zmetadata"}


class WatchedStore(ReadThroughStore[Store]):
    """Zarr store whose missing chunks are errors, except for `filled_arrays`, where they are counted.

    A single value may be missing: Zarr leaves out one that is the fill value.
    """

    def __init__(self, store: Store, arrays: Mapping[str, tuple[str, int]]) -> None:
        super().__init__(store)
        self.arrays = arrays
        self.filled_arrays: frozenset[str] = frozenset()
        self._filled: set[str] = set()
        self._lock = threading.Lock()

    @classmethod
    def of(cls, store: Store, arrays: Mapping[str, zarr.Array[Any]]) -> WatchedStore:
        """Watch a store; `arrays` are its arrays by path."""
        kinds = {2: ".zarray", 3: "zarr.json"}
        facts = {p: (f"{p}/{kinds[a.metadata.zarr_format]}", prod(a.shape)) for p, a in arrays.items()}
        return cls(store, facts)

    def take_filled(self) -> set[str]:
        """Return the keys of the chunks that were read as fill values in this process since the last call."""
        with self._lock:
            taken, self._filled = self._filled, set()
        return taken

    def __getstate__(self) -> tuple[Any, ...]:
        return self.inner, self.arrays, self.filled_arrays

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        store, arrays, filled = state
        self.__init__(store, arrays)
        self.filled_arrays = filled

    async def get(self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None) -> Buffer | None:
        answer = await self.inner.get(key, prototype, byte_range)
        if answer is None and key.rpartition("/")[2] not in _METADATA_NAMES:
            await self._account_for(key)
        return answer

    async def _account_for(self, key: str) -> None:
        """Raise `MissingArrayError` or `MissingChunkError` for a chunk that is not read as fill values."""
        parts = key.split("/")
        name = next((p for n in range(len(parts), 0, -1) if (p := "/".join(parts[:n])) in self.arrays), None)
        if name is None:
            return
        metadata, count = self.arrays[name]
        if await self.inner.get(metadata, default_buffer_prototype()) is None:
            raise vanished_array_error(name, metadata)
        if name not in self.filled_arrays and count > 1:
            raise missing_chunk_error(key[len(name) + 1 :], name, key)
        with self._lock:
            self._filled.add(key)
