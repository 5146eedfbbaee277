"""Objects of S3, Google Cloud Storage, Azure and HTTP servers, read with `obstore`, which does not hold the GIL.

Every request is tried again after a growing pause (exponential backoff with jitter) where the next try may succeed:
408, 429 and 5xx, connections that fail or stall, bodies that end early, wrong ranges. Permanent failures (401, 403,
other 4xx, a server without ranges) are errors at once. Nothing is tried again for a read that was given up.
"""

from __future__ import annotations

import os
import random
import re
import threading
import time
from base64 import standard_b64encode
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from itertools import count
from typing import Any, TypeVar
from urllib.parse import SplitResult, unquote, urlsplit

import numpy as np

from jigsaw.errors import FetchError, ReadError, UnsupportedStoreError, imports_needed, redacted_text
from jigsaw.io.arguments import checked_mapping, is_real_number
from jigsaw.io.chunks.files import (
    BadChunkError,
    ByteAllocator,
    ByteArray,
    ByteRange,
    FillTarget,
    ObjectIdentity,
    ShortChunkError,
    fill_targets,
    fresh_memory,
    merge_ranges,
)
from jigsaw.io.chunks.redirects import GuardedHttp

T = TypeVar("T")
R = TypeVar("R")

REMOTE_SCHEMES = ("s3", "s3a", "gs", "az", "abfs", "abfss", "http", "https")
OWN_OPTIONS = ("arrays", "outside")
"""Options that are jigsaw's, not obstore's."""

_STAMPS_KEPT = 1024
_LOOK_EVERY_S = 0.1
_PIECE_BYTES = 1 << 23
MOST_OBJECT_BYTES = 1 << 31
"""Limit for objects of unknown size: metadata, and chunks that zarr decodes."""
_STATUS_PATTERN = re.compile(r"status code: (\d{3})\b ?([^:\n]*)")
_ERROR_CODE_PATTERN = re.compile(r"<Code>(\w+)</Code>")
_TIMED_OUT_PATTERN = re.compile(r"TimedOut|\btimed? ?out\b", re.IGNORECASE)
_URL_PATTERN = re.compile(r"\b\w+://\S+")
_ENDPOINT_VARIABLES = re.compile(r"(AWS|AZURE|GOOGLE)_\w*(ENDPOINT|ACCOUNT_NAME|BASE_URL)\w*")
"""Names of environment variables that say where a bucket lies."""
_PASSING_STATUSES = ("408", "429")
_CLIENT_OPTIONS = {"connect_timeout": "10s", "read_timeout": "20s", "timeout": "120s"}

REQUESTS_IN_FLIGHT = 32
_idle_pool = ThreadPoolExecutor(1, thread_name_prefix="jigsaw-idle")
_waits_for_answer: ContextVar[Callable[[], bool] | None] = ContextVar("jigsaw_somebody_waits", default=None)


def is_remote_url(url: Any) -> bool:
    """Say whether it is a URL that `obstore` reads."""
    return isinstance(url, str) and url.partition("://")[0] in REMOTE_SCHEMES and "://" in url


def files_of_url(url: str, options: Mapping[str, Any] | None = None) -> tuple[RemoteFiles, str]:
    """Return the store that a URL lies in, and the name of the object, or the prefix of the objects, there.

    `options` go to obstore's store of that kind, such as ``region``, ``endpoint``, ``skip_signature`` or
    ``client_options``; ``retry_config`` is obstore's too, and carried out by `RemoteFiles`. ``redirects`` names hosts
    with private addresses that an HTTP server may lead to (see `jigsaw.io.chunks.redirects`).

    Raises: `UnsupportedStoreError` for options that obstore refuses.
    """
    absent = f"reading {redacted_text(url)} needs obstore: pip install 'jigsaw-torch[remote]'"
    with imports_needed(UnsupportedStoreError, absent):
        from obstore import store as stores
        from obstore.exceptions import BaseError
    try:
        split = urlsplit(url)
    except ValueError as e:
        raise UnsupportedStoreError(f"{redacted_text(url)} is not a URL: {e}") from None
    settings: dict[str, Any] = {k: v for k, v in (options or {}).items() if k not in OWN_OPTIONS}
    retry = RetryPolicy.of(settings.pop("retry_config", None))
    client = checked_mapping(
        "client_options", settings.get("client_options"), "{'timeout': '120s'}", UnsupportedStoreError
    )
    # obstore refuses plain HTTP without this; left out, AWS_ALLOW_HTTP of the environment still counts
    plain = {"allow_http": True} if split.scheme == "http" or _has_plain_endpoint(settings) else {}
    settings["client_options"] = {**_CLIENT_OPTIONS, **plain, **client}
    settings["retry_config"] = {"max_retries": 0}  # each failure is seen, counted and tried again here
    root, redirects, guard = f"{split.scheme}://{split.netloc}", settings.pop("redirects", ()), None
    if split.scheme in ("http", "https") and split.username is not None:
        root = f"{split.scheme}://{split.netloc.rpartition('@')[2]}"
        settings["client_options"]["default_headers"] = _with_password(split, client.get("default_headers") or {})
    try:
        if split.scheme in ("http", "https"):
            query = f"?{split.query}" if split.query else ""
            guard = GuardedHttp(root + query, settings, redirects)
            store: Any = guard.open_store()
        else:
            store = stores.from_url(root, **settings)
    except (BaseError, TypeError, ValueError) as e:
        raise UnsupportedStoreError(
            f"{redacted_text(url)} cannot be opened with options {sorted(options or {})}: "
            f"{_without_urls(e, options)}; they "
            f"are those of obstore's store of this kind, such as region, endpoint, skip_signature, client_options"
        ) from None
    # elsewhere the part before @ is a password; here it is container@account
    host = split.netloc if split.scheme in ("abfs", "abfss") else split.netloc.rpartition("@")[2]
    return RemoteFiles(store, redacted_text(f"{split.scheme}://{host}"), retry, guard), unquote(split.path).strip("/")


def _has_plain_endpoint(settings: Mapping[str, Any]) -> bool:
    """Say whether the options or the environment name an endpoint without TLS; obstore has several names for it."""
    named = [str(value) for key, value in settings.items() if "endpoint" in key.lower()]
    around = [value for name, value in os.environ.items() if _ENDPOINT_VARIABLES.fullmatch(name)]
    return any(value.lower().startswith("http://") for value in named or around)


def _with_password(split: SplitResult, headers: Mapping[str, Any]) -> dict[str, Any]:
    """Return headers with the user and password of a URL, unless they authorize otherwise.

    Source: RFC 7617.
    """
    if any(name.lower() == "authorization" for name in headers):
        return dict(headers)
    user = f"{unquote(split.username or '')}:{unquote(split.password or '')}"
    return {**headers, "Authorization": f"Basic {standard_b64encode(user.encode()).decode()}"}


def _without_urls(error: BaseException, options: Mapping[str, Any] | None = None) -> str:
    return redacted_text(_URL_PATTERN.sub("…", str(error).split("\n")[0]), options)


@dataclass(frozen=True)
class RetryPolicy:
    """Number of tries of a request, and the seconds that they may take; pauses grow from `first` to `longest`."""

    tries: int = 10
    within: float = 60.0
    first: float = 0.1
    longest: float = 5.0
    base: float = 2.0

    @classmethod
    def of(cls, config: Mapping[str, Any] | None) -> RetryPolicy:
        """Make it from obstore's ``retry_config``.  Raises: `UnsupportedStoreError` for what it does not know."""
        example = "{'max_retries': 10, 'retry_timeout': timedelta(seconds=60), 'backoff': {'base': 2}}"
        known = checked_mapping("retry_config", config, example, UnsupportedStoreError)
        backoff = checked_mapping("backoff", known.get("backoff"), "{'base': 2}", UnsupportedStoreError)
        unknown = [*(known.keys() - _RETRY_NAMES), *(backoff.keys() - _BACKOFF_NAMES)]
        if unknown:
            raise UnsupportedStoreError(f"retry_config has {unknown}, and may have {sorted(_RETRY_NAMES)}: {example}")
        tries = known.get("max_retries", cls.tries)
        if not isinstance(tries, int) or isinstance(tries, bool) or tries < 0:
            raise UnsupportedStoreError(f"retry_config has max_retries={tries!r}, which must be a whole number >= 0")
        return cls(
            int(tries),
            _in_seconds("retry_timeout", known.get("retry_timeout", cls.within)),
            _in_seconds("init_backoff", backoff.get("init_backoff", cls.first)),
            _in_seconds("max_backoff", backoff.get("max_backoff", cls.longest)),
            _in_seconds("base", backoff.get("base", cls.base)),
        )

    def pause(self, failures: int) -> float:
        return min(self.longest, self.first * self.base ** (failures - 1)) * random.uniform(0.5, 1.0)


_RETRY_NAMES = {"max_retries", "retry_timeout", "backoff"}
_BACKOFF_NAMES = {"init_backoff", "max_backoff", "base"}


def _in_seconds(name: str, value: Any) -> float:
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if not is_real_number(seconds) or not seconds >= 0:
        raise UnsupportedStoreError(
            f"retry_config has {name}={value!r}, which must be a number >= 0, of seconds where it is a time, or a "
            "datetime.timedelta"
        )
    return float(seconds)


class _CutShortError(Exception):
    """An answer that ends before its own length."""


class RemoteFiles:
    """The objects of an obstore store as `StoreFiles`; `name` is how messages call the store."""

    far = True
    gap = 1 << 18

    def __init__(
        self, store: Any, name: str, retry: RetryPolicy | None = None, guard: GuardedHttp | None = None
    ) -> None:
        self.store, self.name, self.retry, self._guard = store, name, retry or RetryPolicy(), guard
        self._stamps: OrderedDict[str, Any] = OrderedDict()
        self._lock = threading.Lock()
        self._asks_by_get = False
        self._pool: ThreadPoolExecutor | None = None

    @classmethod
    def of(cls, store: Any) -> RemoteFiles:
        """Return the objects of a store that the user made."""
        return cls(store, redacted_text(repr(store)))

    @property
    def lists(self) -> bool:
        return type(self.store).__name__ != "HTTPStore"

    def __getstate__(self) -> tuple[Any, ...]:
        return None if self._guard else self.store, self.name, self.retry, self._guard

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        store, name, retry, guard = state
        self.__init__(store if guard is None else guard.open_store(), name, retry, guard)

    def size(self, path: str) -> int | None:
        """Return the size of an object, by one request."""
        meta = self._head(path)
        return None if meta is None else int(meta["size"])

    def _head(self, path: str) -> Any:
        """Return what the server says of an object; None when it is missing. Where it refuses, ask for a byte.

        A signed URL is for one method, which is GET, and some servers have no other.
        """
        if not self._asks_by_get:
            try:
                return self._tried(path, lambda: self._answer_of_head(path))
            except FetchError:
                if self.lists:
                    raise
                with suppress(ReadError, BadChunkError):
                    meta = self._tried(path, lambda: self._first_byte(path))
                    self._asks_by_get = True
                    return meta
                raise
        return self._tried(path, lambda: self._first_byte(path))

    def _answer_of_head(self, path: str) -> Any:
        import obstore

        try:
            return obstore.head(self.store, path)
        except FileNotFoundError as missing:  # so obstore calls a server without this method
            status, answer = _status_and_answer(missing)
            if status == "405":
                raise FetchError(f"{self._called(path)} cannot be read: the server answered {answer}") from None
            raise

    def _first_byte(self, path: str) -> Any:
        import obstore

        answer = obstore.get(self.store, path, options={"range": (0, 1)})
        _body_of_answer(answer, 1)
        return answer.meta

    def identity(self, path: str) -> ObjectIdentity | None:
        """Return its URL, server and the stamp of a part that was read; None for a store in memory. No request."""
        if type(self.store).__name__ == "MemoryStore":
            return None
        with self._lock:
            stamp = self._stamps.get(path)
        return ObjectIdentity(f"{self._place}/{path}", "" if stamp is None else repr(stamp))

    @cached_property
    def _place(self) -> str:
        """Text that identifies the store: buckets of one name may lie on several servers or in several accounts."""
        config: Mapping[str, Any] = getattr(self.store, "config", {})
        settings = [config.get(key) for key in ("endpoint", "account_name")]
        around = sorted(item for item in os.environ.items() if _ENDPOINT_VARIABLES.fullmatch(item[0]))
        url, prefix = getattr(self.store, "url", None), getattr(self.store, "prefix", None)
        # headers may choose what a server answers; who authorizes says nothing of it, and does so anew each time
        headers: Mapping[str, Any] = (getattr(self.store, "client_options", None) or {}).get("default_headers") or {}
        chosen = sorted((k.lower(), repr(v)) for k, v in headers.items() if k.lower() != "authorization")
        settings += [chosen] if chosen else []
        return repr((type(self.store).__name__, self.name, url, prefix and str(prefix), settings, around))

    def stamp(self, path: str) -> tuple[int, str] | None:
        """Return the size of an object and its version; None when it is missing. One request."""
        meta = self._head(path)
        return None if meta is None else (int(meta["size"]), repr(self._check_unchanged(path, meta)))

    def whole(self, path: str, room: ByteAllocator, most: int | None = None) -> ByteArray | None:
        """Read all bytes of an object into new memory; `room` is not used. One request.

        An object that claims more than `most` bytes (2 GiB) is refused before its body is read.
        """
        return self._tried(path, lambda: self._get(path, None, MOST_OBJECT_BYTES if most is None else most)[0])

    def ranges(self, path: str, targets: Sequence[FillTarget]) -> bool:
        """Fill the targets; those that lie at most `gap` bytes apart are one request."""
        parts = merge_ranges(((offset, offset + memory.size) for offset, memory in targets), self.gap)
        contents = [self._part(path, parts[0])] if len(parts) == 1 else self._at_once(path, parts)
        return fill_targets(targets, parts, contents)

    def edge(self, path: str, length: int, at_end: bool) -> tuple[ByteArray, int] | None:
        """Return the first or last bytes of an object, at most `length`, and its size; None when it is missing."""
        part: Any = {"suffix": length} if at_end else (0, length)
        answer = self._tried(path, lambda: self._get(path, part, length), at_end)
        if answer is not _NO_SUFFIX:
            return answer
        size = self.size(path)  # Azure does not serve the last n bytes by a range
        raw = None if size is None else self._part(path, (max(size - length, 0), size))
        return None if raw is None or size is None else (raw, size)

    def names(self, prefix: str) -> list[str]:
        import obstore

        listing: Any = self._tried(prefix, lambda: obstore.list_with_delimiter(self.store, prefix=prefix))
        below = [*listing["common_prefixes"], *(entry["path"] for entry in listing["objects"])] if listing else []
        return [path.rpartition("/")[2] for path in below]

    def _at_once(self, path: str, parts: Sequence[ByteRange]) -> list[ByteArray | None]:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(REQUESTS_IN_FLIGHT, thread_name_prefix="jigsaw-ranges")
        return list(ask_in_pool(self._pool, lambda part: self._part(path, part), parts))

    def _part(self, path: str, part: ByteRange) -> ByteArray | None:
        if part[0] == part[1]:
            return np.empty(0, np.uint8)
        answer = self._tried(path, lambda: self._get(path, part, part[1] - part[0]))
        if answer is None:
            return None
        raw, size = answer
        if raw.size < part[1] - part[0]:
            raise ShortChunkError(f"it should have {part[1] - part[0]} bytes at {part[0]} and the object has {size}")
        return raw

    def _get(self, path: str, part: ByteRange | dict[str, int] | None, most: int) -> tuple[ByteArray, int]:
        """Make one request: return its bytes, at most `most`, and the size of the object."""
        import obstore

        options: Any = {} if part is None else {"range": part}
        answer = obstore.get(self.store, path, options=options)
        start, stop = answer.range
        if not 0 <= stop - start <= most:
            raise BadChunkError(f"the server says that it sends {stop - start} bytes, and at most {most} can be right")
        raw, meta = _body_of_answer(answer, stop - start), answer.meta
        if part is not None:
            self._check_unchanged(path, meta)
        return raw, int(meta["size"])

    def _check_unchanged(self, path: str, meta: Any) -> Any:
        """Check that an object that is read in parts stays the one whose first part was read, and return its stamp."""
        stamp = (meta["e_tag"] or "").removeprefix("W/") or (meta["size"], meta["last_modified"])
        with self._lock:
            if self._stamps.setdefault(path, stamp) != stamp:
                raise BadChunkError("the object has changed since it was first read; open the store again")
            self._stamps.move_to_end(path)
            if len(self._stamps) > _STAMPS_KEPT:
                self._stamps.popitem(last=False)
        return stamp

    def _tried(self, path: str, step: Callable[[], T], suffix: bool = False) -> Any:
        """Make a request, repeat it while that may help, and return its result; None for a missing object."""
        from obstore.exceptions import BaseError, NotSupportedError

        begun = time.monotonic()
        for failures in count(1):
            try:
                return step()
            except FileNotFoundError:
                return None
            except NotSupportedError:
                if suffix:
                    return _NO_SUFFIX
                raise FetchError(
                    f"{self._called(path)} cannot be read in part: the server ignores ranges; serve the store from "
                    f"one that honors them, or copy it"
                ) from None
            except (BaseError, _CutShortError) as e:
                if self._guard is not None and self._guard.follow_new(self._called(path)):
                    self.store = self._guard.open_store()
                    continue
                self._refuse_or_wait(path, e, failures, begun)
        raise AssertionError

    def _refuse_or_wait(self, path: str, error: Exception, failures: int, begun: float) -> None:
        """Wait before the next try; raise if another try cannot help, or none is left."""
        from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

        status, answer = _status_and_answer(error)
        if status == "416":  # obstore has exception types for 401, 403 and 404 only
            raise ShortChunkError("the object ends before the range that it should have") from None
        is_forbidden = isinstance(error, PermissionDeniedError)
        refused = is_forbidden or isinstance(error, UnauthenticatedError) or status == "501"
        if refused or (status.startswith("4") and status not in _PASSING_STATUSES):
            refusal = FetchError(f"{self._called(path)} cannot be read: the server answered {answer}")
            refusal.is_forbidden = is_forbidden
            raise refusal from None
        pause, elapsed = self.retry.pause(failures), time.monotonic() - begun
        if failures > self.retry.tries or elapsed + pause > self.retry.within or not _wait_before_retry(pause):
            raise FetchError(
                f"{self._called(path)} cannot be read: given up after {failures} tries in {elapsed:.1f} s; "
                f"the last answer: {answer}"
            ) from None

    def _called(self, path: str) -> str:
        return f"{self.name}/{path}"


_NO_SUFFIX: Any = object()


def _body_of_answer(answer: Any, size: int) -> ByteArray:
    """Return the body of an answer that claims to have `size` bytes, and read no further than that."""
    raw, done = np.empty(0, np.uint8), 0
    for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
        more = np.frombuffer(memoryview(piece), np.uint8)
        if done + more.size > size:
            raise BadChunkError(f"the server sends more than the {size} bytes that it says it sends")
        if not done and more.size == size:
            return more
        if not done:
            raw = fresh_memory(size)
        raw[done : done + more.size] = more
        done += more.size
    if done < size:
        raise _CutShortError(f"{done} of {size} bytes")
    return raw


def _wait_before_retry(pause: float) -> bool:
    """Wait before the next try; return False at once when nobody waits for its result any more."""
    until = time.monotonic() + pause
    while is_waited_for() and (left := until - time.monotonic()) > 0:
        time.sleep(min(left, _LOOK_EVERY_S))
    return is_waited_for()


def _status_and_answer(error: Exception) -> tuple[str, str]:
    """Return the status of a failed request, if the server gave one, and the answer in words, without secrets.

    The body of an answer is left out except for S3's error code, because it may repeat the credentials of the request.
    """
    text = str(error)
    if match := _STATUS_PATTERN.search(text):
        code = _ERROR_CODE_PATTERN.search(text)
        return match[1], f"{match[1]} {match[2].strip()}" + (f" ({code[1]})" if code else "")
    if isinstance(error, _CutShortError):
        return "", f"a body that ended after {error}"
    if _TIMED_OUT_PATTERN.search(text):
        return "", "none within the time-out"
    return "", _without_urls(error).rpartition(" - ")[2]


# -- requests made many at a time, as long as a caller waits -----------------------------------------------------------


def ask_at_once(ask: Callable[[T], Any], items: Sequence[T]) -> None:
    """Ask for every item; raises the error of the first that fails."""
    if len(items) == 1:
        ask(items[0])
    if len(items) < 2:
        return
    with ThreadPoolExecutor(min(REQUESTS_IN_FLIGHT, len(items)), thread_name_prefix="jigsaw-ask") as pool:
        for _ in ask_in_pool(pool, ask, items):
            pass


def ask_in_pool(pool: ThreadPoolExecutor, ask: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
    """Yield the answers, in order, of requests made in a pool's threads for the caller that waits here."""

    def run(context: Context, item: T) -> R:
        return context.run(ask, item)

    return pool.map(run, [copy_context() for _ in items], items)  # each context is entered by one thread at a time


@contextmanager
def while_waited_for(waits: Callable[[], bool]) -> Generator[None]:
    """Retry requests made inside only while `waits()`."""
    before = _waits_for_answer.set(waits)
    try:
        yield
    finally:
        _waits_for_answer.reset(before)


def is_waited_for() -> bool:
    """Say whether another try is worthwhile."""
    waits = _waits_for_answer.get()
    return (waits is None or waits()) and not _is_python_ending()


def _is_python_ending() -> bool:
    """Say whether Python is ending, and waits for this thread: pools then take no more work."""
    try:
        _idle_pool.submit(int)
    except RuntimeError:
        return True
    return False
