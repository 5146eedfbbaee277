"""Failures of a test on its ranks, and the one error that shows them all."""

from __future__ import annotations

import linecache
import pickle
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

# Errors that neighbors of a dead or failed rank report: true, but never the cause.
_ECHOES = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "Timed out waiting",
)


@dataclass(frozen=True)
class RankFailure:
    """Failure of one rank: `summary` in a line, `text` in full, `error` the exception where it pickles."""

    rank: int
    summary: str
    text: str
    error: bytes = b""
    moment: float = 0.0

    @property
    def is_echo(self) -> bool:
        """True where this is only the news that another rank is gone."""
        return any(words in self.summary for words in _ECHOES)

    def exception(self) -> BaseException | None:
        """Return the rank's own exception, or None where it had none or it does not pickle."""
        try:
            return pickle.loads(self.error) if self.error else None
        except Exception:  # an exception class whose __init__ does not take its own args; the text has everything
            return None

    @classmethod
    def of_exception(cls, rank: int, error: BaseException, skip_frames: int, file: str | None) -> RankFailure:
        """Return the failure of a rank whose body raised `error`; the locals are those of the last frame in `file`."""
        tb = error.__traceback__
        for _ in range(skip_frames):
            tb = tb.tb_next if tb is not None and tb.tb_next is not None else tb
        linecache.checkcache()
        text = "".join(traceback.format_exception(type(error), error, tb)) + _locals_text(tb, file)
        summary = traceback.format_exception_only(error)[-1].strip()
        try:
            pickled = pickle.dumps(error)
        except Exception:  # part of it does not pickle; the text has everything
            pickled = b""
        return cls(rank, summary, text, pickled, time.monotonic())


class RankFailedError(AssertionError):
    """A test body failed on a rank: the message opens with that rank's own traceback.

    `failures` has every rank's part, the cause first.
    """

    def __init__(self, message: str, failures: Sequence[RankFailure] = ()) -> None:
        super().__init__(message)
        self.failures = tuple(failures)

    def __reduce__(self) -> tuple[type[RankFailedError], tuple[str, tuple[RankFailure, ...]]]:
        return type(self), (str(self), self.failures)


def combined_error(name: str, size: int, failures: Sequence[RankFailure]) -> BaseException:
    """Return the error to raise in the test's own process: the first real cause, then one line for every other rank."""
    ordered = sorted(failures, key=lambda f: (f.is_echo, f.moment))
    first = ordered[0]
    cause = first.exception()
    if (
        first.summary.startswith("Skipped: ") and "pytest" in sys.modules
    ):  # belongs to the test, not the rank, and does not pickle
        return sys.modules["pytest"].skip.Exception(first.summary.removeprefix("Skipped: "))
    lines = [f"{name} failed on rank {first.rank} of {size}:", "", first.text.rstrip()]
    others = [f for f in ordered[1:] if f.summary != first.summary]
    same = sorted(f.rank for f in ordered[1:] if f.summary == first.summary)
    if same:
        lines += ["", f"the same on rank{'s' * (len(same) > 1)} {', '.join(map(str, same))}"]
    for other in others:
        lines += ["", f"rank {other.rank}: {other.text.rstrip() if other.text.startswith('still') else other.summary}"]
    error = RankFailedError("\n".join(lines), ordered)
    error.__cause__ = cause
    return error


def _locals_text(tb: TracebackType | None, file: str | None) -> str:
    """Return the local variables of the innermost frame of the test's own file, which show an assertion's values."""
    frame = None
    while tb is not None:
        if tb.tb_frame.f_code.co_filename == file:
            frame = tb.tb_frame
        tb = tb.tb_next
    if frame is None or not frame.f_locals:
        return ""
    lines = [f"  {name} = {_short_repr(value)}" for name, value in frame.f_locals.items() if not name.startswith("@")]
    return "\n".join([f"locals of {frame.f_code.co_name}:", *lines, ""])


def _short_repr(value: object, limit: int = 160) -> str:
    try:
        text = " ".join(repr(value).split())
    except Exception as error:  # a broken __repr__ must not hide the failure that we report
        text = f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text if len(text) <= limit else text[: limit - 1] + "…"
