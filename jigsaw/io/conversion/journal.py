"""Journal of a conversion, by which a stopped one goes on."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable
from io import FileIO
from pathlib import Path
from typing import Any

from jigsaw.drafts import open_unlinked
from jigsaw.errors import WriteError, writing_to

CONVERT_AGAIN = "convert again with the same arguments: it goes on with the regions that are missing"
UnitIndex = tuple[int, ...]
UnitKey = tuple[str, UnitIndex]
"""Array, and one of its units (shards, or chunks where there are none)."""


def remove_journal(path: Path) -> None:
    """Remove the journal of a conversion; of a symbolic link the link, not its target.

    Raises: `WriteError` for a file that is not one.
    """
    if path.exists() and not path.is_symlink():
        with path.open("rb") as file:
            begin = file.read(len(_BEGIN_OF_JOURNAL))
        if not _BEGIN_OF_JOURNAL.startswith(begin):
            raise WriteError(f"{path} is not a journal of a conversion, so it is not replaced; move it away")
    path.unlink(missing_ok=True)


_BEGIN_OF_JOURNAL = b'{"conversion": '


class ConversionJournal:
    """A file of lines that are appended to; a last line that was cut short by the end of its writer does not count.

    The first says which conversion it is of, the second that the store was made, the others which units are written.
    """

    def __init__(self, path: Path, identity: str) -> None:
        self._path, self.identity = path, identity
        self.done: dict[UnitKey, str] = {}
        self.is_made = False
        if path.exists():
            self._read()
        else:
            self._append([{"conversion": identity}])

    def _read(self) -> None:
        if self._path.is_symlink():
            raise WriteError(f"{self._path} is a symbolic link, so jigsaw did not write it; remove it yourself")
        whole = self._path.read_bytes()
        kept = whole[: whole.rfind(b"\n") + 1]
        try:
            lines = [json.loads(line) for line in kept.splitlines()]
        except ValueError as e:
            raise WriteError(f"{self._path} is damaged ({e}); start again with replace=True") from e
        if lines and lines[0].get("conversion") != self.identity:
            raise WriteError(
                f"{self._path} belongs to another conversion: other files, fields, times, chunks or shards, or files "
                "that have changed since; repeat its arguments, or start again with replace=True"
            )
        os.truncate(self._path, len(kept))
        if not lines:
            self._append([{"conversion": self.identity}])
        self.is_made = any("made" in line for line in lines)
        self.done = {(e["array"], tuple(e["unit"])): e["digest"] for e in lines if "array" in e}

    def made(self) -> None:
        self._append([{"made": True}])
        self.is_made = True

    def add(self, written: Iterable[tuple[UnitKey, str]]) -> None:
        new = list(written)
        self._append([{"array": name, "unit": unit, "digest": digest} for (name, unit), digest in new])
        self.done.update(new)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)

    def _append(self, entries: Iterable[Any]) -> None:
        """Append whole lines or none: a full disk takes part of a line, and the next would follow in its middle."""
        text = "".join(json.dumps(entry) + "\n" for entry in entries).encode()
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
        with writing_to(self._path, CONVERT_AGAIN), FileIO(open_unlinked(self._path, flags), "a") as out:
            before = os.fstat(out.fileno()).st_size
            if out.write(text) != len(text):
                os.ftruncate(out.fileno(), before)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
