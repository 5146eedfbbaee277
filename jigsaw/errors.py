"""Errors of reading and writing, as types.  Each message names what was asked, what there is, and the remedy."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager

from jigsaw.cut import ShardingError
from jigsaw.redacted import redacted_text


class _RedactedError(Exception):
    """Error whose message is shown and logged without secrets of URLs and options, whoever wrote it."""

    def __init__(self, *told: object) -> None:
        super().__init__(*(redacted_text(each) if isinstance(each, str) else each for each in told))


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

    heard = True  # no rank waits for a process that is not one


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
