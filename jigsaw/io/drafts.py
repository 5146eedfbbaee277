"""Files that are whole or absent: written beside their place, under a name that nobody can lay a link under."""

from __future__ import annotations

import os
import secrets
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def draft_of(path: Path, suffix: str = ".draft") -> Generator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends, and is gone when it fails.

    What is at `path` is replaced at once: a reader meets the old file or the new one.
    """
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}{suffix}")
    handle = open_unlinked(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def open_unlinked(path: str | os.PathLike[str], flags: int) -> int:
    """`os.open` of a file that is made as the user's umask says, and never through a symbolic link: in a folder that
    others write to, one may lead anywhere.
    """
    return os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
