"""All that reading and writing refuse, as types.  Each message names what was asked, what there is, and the remedy."""

from __future__ import annotations

from jigsaw.io.redacted import redacted
from jigsaw.layout import ShardingError


class _ToldError(Exception):
    """What it says is shown and logged: secrets of URLs and options are taken out, whoever wrote the message."""

    def __init__(self, *told: object) -> None:
        super().__init__(*(redacted(each) if isinstance(each, str) else each for each in told))


class ReadError(_ToldError):
    """Reading failed; the base of all errors of `jigsaw.io`.  `heard` marks what another rank failed with."""

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


class FetchError(ReadError):
    """A store that refuses a request or does not answer it; names the object and the last answer."""


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


class WriteError(_ToldError):
    """Writing failed or was refused, on whichever rank: raised alike on every rank, naming that rank and its reason."""
