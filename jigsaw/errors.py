"""Errors as types, with texts without secrets.  Each names what was asked, what there is, and the remedy."""

from __future__ import annotations

import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from importlib.util import find_spec
from typing import Any

_HIDDEN = "***"
_SHORTEST = 4
"""Shorter values of options are words such as "1" or "eu", which would be removed from the middle of others."""
_URL = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]*)://(?P<rest>(?:\[[\da-fA-F:.]*\]|(?!::)[^\s'\"<>`])*)")
"""URLs up to ``::``, by which fsspec chains them, except for that of an IPv6 address."""
_SECRET = re.compile(
    r"""(?P<key>['"]?\b[\w-]*(?:secret|passw|passphrase|token|credential|signature|authorization|
        api_?key|access_?key|account_?key|private_?key|sas_?key)[\w-]*['"]?\s*[=:]\s*)
        (?P<value>b?"[^"]*"|b?'[^']*'|(?:(?:Bearer|Basic)\s+)?[^\s,;&'"(){}\[\]]+)""",
    re.IGNORECASE | re.VERBOSE,
)
_CONTAINERS = ("abfs", "abfss")  # container@account is a place, not a user


class ShardingError(ValueError):
    """A layout, a mesh or an operation for which an exact result is impossible.

    Every rank raises the same, before any communication.
    """


class RanksDifferError(ShardingError):
    """Ranks that have, or do, different things where they must be the same.

    The one `ShardingError` that a rank may raise alone, or after messages were sent.
    """


class TorchVersionError(ImportError):
    """A torch that lacks what jigsaw needs of it; the message names the versions that have it."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, not whole, damaged or of another model, or a state that none can hold.

    Every rank raises the same.
    """


class _RedactedError(Exception):
    """Error whose message is shown and logged without secrets of URLs and options, whoever wrote it."""

    def __init__(self, *parts: object) -> None:
        super().__init__(*(redacted_text(each) if isinstance(each, str) else each for each in parts))


class ReadError(_RedactedError):
    """Reading failed; the base of all errors of `jigsaw.io`.  `heard` marks the failure of another rank."""

    heard = False


class MissingArrayError(ReadError, KeyError):
    """A variable that the store does not have; the message lists what it has."""

    __str__ = Exception.__str__  # KeyError would show the message quoted


class MissingLevelError(MissingArrayError):
    """A level that the variable does not have; the message lists its levels."""


class FieldError(ReadError, ValueError):
    """Fields, or statistics for them, that do not fit together."""


class GridError(ReadError, ValueError):
    """Coordinates that cannot be understood, or arrays that lie on different grids."""


class UnsupportedStoreError(ReadError):
    """A store, codec, calendar or unit that jigsaw does not read."""


class CorruptChunkError(ReadError):
    """A chunk that cannot be decoded; named by array, chunk index and file."""


class TruncatedError(CorruptChunkError):
    """A chunk or file that ends before its data does."""


class MissingChunkError(ReadError):
    """A chunk that is not in the store, where ``missing="error"`` reads no fill value in its place."""


class FetchError(ReadError):
    """A store that refuses a request or does not answer it; names the object and the last answer."""

    is_forbidden = False
    """True where the server answered 403, as some do for objects that are not there."""


class CacheError(ReadError):
    """A cache folder that others own or may write to, or a lock in it that another process holds."""


class NaNError(ReadError, ValueError):
    """A missing value where ``nan="raise"`` allows none."""


class HaloError(ReadError, ShardingError):
    """A halo that the domain cannot give."""


class WindowError(ReadError, ValueError):
    """A time window or selection that the series cannot give."""


class StateError(ReadError, ValueError):
    """A loader state that is torn, or belongs to something else."""


class PeerError(ReadError, RuntimeError):
    """Another rank that reads the same samples has ended, reads something else, or does not answer."""


class ForkedError(ReadError, RuntimeError):
    """A reader that a forked process inherited: only the process that made it can read with it."""

    heard = True  # a forked process is not a rank, so no rank waits for it


class WriteError(_RedactedError):
    """Writing failed or was refused on some rank: every rank raises the same, with that rank and its reason."""


@contextmanager
def writing_to(path: str | os.PathLike[str], remedy: str) -> Generator[None]:
    """Raise errors while `path` is written, such as a full disk, as a `WriteError`.

    It names the path and, after the advice for every failure, the `remedy`.
    """
    try:
        yield
    except (ReadError, ShardingError, WriteError):
        raise
    except Exception as error:  # a library may raise anything
        raise WriteError(
            f"{os.fspath(path)} could not be written ({type(error).__name__}: {error}); see that its disk has room and "
            f"that you may write there, then {remedy}"
        ) from error


def redacted_text(shown: object, options: Mapping[str, Any] | None = None) -> str:
    """Return a text that may be shown: users and query values of its URLs, and values of secret names, become ``***``.

    With `options`, their values are removed too, because other libraries repeat them in their messages.
    """
    text = str(shown)
    for value in sorted(_option_values(options), key=len, reverse=True):
        text = text.replace(value, _HIDDEN)
    return _SECRET.sub(_hide_value, _URL.sub(_hide_in_url, text))


def cause_without_secrets(error: BaseException, options: Mapping[str, Any] | None = None) -> BaseException | None:
    """Return the cause that a traceback may show: `error`, or None where it, or its own cause, has a secret."""
    cause: BaseException | None = error
    while cause is not None:
        if redacted_text(cause, options) != str(cause):
            return None
        cause = cause.__cause__ or cause.__context__
    return error


def _hide_in_url(url: re.Match[str]) -> str:
    scheme, rest = url["scheme"], url["rest"]
    where, mark, query = rest.partition("?")
    authority, slash, path = where.partition("/")
    user, _, host = authority.rpartition("@")
    port = host.rpartition(":")[2]
    if ":" in host and port and not port.isdecimal() and not host.startswith("["):  # a password with a slash in it
        return (
            f"{scheme}://{_HIDDEN}@{rest.rpartition('@')[2].partition('?')[0]}"
            if "@" in rest
            else f"{scheme}://{_HIDDEN}"
        )
    if user and (scheme not in _CONTAINERS or ":" in user):
        authority = f"{_HIDDEN}@{host}"
    return f"{scheme}://{authority}{slash}{path}{mark}" + "&".join(map(_hide_in_query, query.split("&")))


def _hide_in_query(part: str) -> str:
    key, equals, value = part.partition("=")
    return f"{key}={_HIDDEN}" if equals and value else _HIDDEN if part and not equals else part


def _hide_value(match: re.Match[str]) -> str:
    value = match["value"]
    quote = value[-1] if value[-1] in "'\"" else ""
    return f"{match['key']}{quote}{_HIDDEN}{quote}" if _HIDDEN not in value else match[0]


def _option_values(options: Any) -> Iterable[str]:
    """Iterate over the texts that options hold, at any depth."""
    if isinstance(options, Mapping):
        options = list(options.values())
    if isinstance(options, list | tuple | set):
        for each in options:
            yield from _option_values(each)
    elif isinstance(options, str | bytes):
        text = options.decode("utf-8", "replace") if isinstance(options, bytes) else options
        if len(text) >= _SHORTEST:
            yield text


@contextmanager
def imports_needed(kind: type[ReadError | WriteError], absent: str) -> Generator[None]:
    """Raise a failed import in the block as an error of a `kind`: `absent` where the package is not installed, else
    its version, and the error of its import.
    """
    try:
        yield
    except ImportError as error:
        names = [each.name.partition(".")[0] for each in _error_chain(error) if each.name]
        if any(find_spec(name) is None for name in names):
            raise kind(absent) from error
        version_text = f"{_installed_version(names[0])} is installed, but " if names else ""
        raise kind(f"{version_text}its import fails: {error}; install versions that fit together ({absent})") from error


def _error_chain(error: BaseException | None) -> Iterator[ImportError]:
    while error is not None:
        if isinstance(error, ImportError):
            yield error
        error = error.__cause__ or error.__context__


def _installed_version(name: str) -> str:
    project = packages_distributions().get(name, [name])[0]
    try:
        return f"{project} {version(project)}"
    except PackageNotFoundError:
        return name
