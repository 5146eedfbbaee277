"""Files and folders that are whole or absent: written beside their place, under unpredictable names.

In a folder that others write to, someone may have made a predictable name a link to any file of the user.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

_DRAFT_NAME = re.compile(r"\.(?P<final>.+)\.[0-9a-f]{16}\.(draft|replaced)", re.DOTALL)


@contextmanager
def draft_of(path: Path, mode: int = 0o666) -> Generator[BinaryIO]:
    """Open a new file that takes the place of `path` when the block ends, and is gone when it fails.

    What is at `path` is replaced at once: a reader meets the old file or the new one.  The user's umask takes from
    `mode`, the permissions.
    """
    draft = unforeseen_name(path)
    handle = open_unlinked(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def begin_draft_file(path: Path) -> Path:
    """Make an empty new file beside `path`, which one process or several fill (by `open_unlinked`) and one renames."""
    draft = unforeseen_name(path)
    os.close(open_unlinked(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    return draft


def begin_draft_folder(path: Path) -> Path:
    """Make an empty new folder beside `path`, which is filled and then renamed."""
    draft = unforeseen_name(path)
    draft.mkdir()
    return draft


def unforeseen_name(path: Path, kind: str = "draft") -> Path:
    """Return a name beside `path` for a draft of it, or for what is ``replaced`` by one until that has its name."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{kind}")


def path_of_draft(draft: Path) -> Path | None:
    """Return the path that a name from `unforeseen_name` belongs to; None for any other name."""
    name = _DRAFT_NAME.fullmatch(draft.name)
    return None if name is None else draft.with_name(name["final"])


def open_unlinked(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """Open a file by `os.open` with the user's umask, and never through a symbolic link.  In a folder that others write
    to, a link may lead anywhere.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
