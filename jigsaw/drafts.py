"""Files and folders that are whole or absent: written beside their place, under names that nobody can foresee.

In a folder that others write to, a name that can be foreseen may be a link to any file of the user's by then.
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
    """A new file that takes the place of `path` when the block ends, and is gone when it fails.

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
    """An empty new file beside `path`, which one process or several fill (by `open_unlinked`) and one renames."""
    draft = unforeseen_name(path)
    os.close(open_unlinked(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL))
    return draft


def begin_draft_folder(path: Path) -> Path:
    """An empty new folder beside `path`, which is filled and then renamed."""
    draft = unforeseen_name(path)
    draft.mkdir()
    return draft


def unforeseen_name(path: Path, kind: str = "draft") -> Path:
    """A name beside `path` for a draft of it, or for what is ``replaced`` by one until that has its name."""
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.{kind}")


def path_of_draft(draft: Path) -> Path | None:
    """What a name that `unforeseen_name` made belongs to; None for any other name."""
    name = _DRAFT_NAME.fullmatch(draft.name)
    return None if name is None else draft.with_name(name["final"])


def open_unlinked(path: str | os.PathLike[str], flags: int, mode: int = 0o666) -> int:
    """`os.open` of a file that is made as the user's umask says, and never through a symbolic link: in a folder that
    others write to, one may lead anywhere.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
