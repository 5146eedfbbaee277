"""Places of pieces within a file of tensors, which stand at its end: a rank reads those of the files that it reads.

The file is torch's, and torch's tools, which read each piece at its place, do not see the end of it::

    tensor, tensor, ...    each as `torch.save` writes it
    {"model.weight": [0, 1337], "model.bias": [1337, 1209]}
    "jigsaw", the length of that JSON, 8 bytes each

Of each tensor it has where pieces begin and how many bytes they have, one after the other, in the order of the grid.
"""

from __future__ import annotations

import json
import os
import stat
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jigsaw.checkpoint.checkpoint_folder import FileSum
from jigsaw.checkpoint.checkpoint_state import parse_strict_json
from jigsaw.drafts import open_unlinked
from jigsaw.errors import CheckpointError

PiecePlaces = Mapping[str, Sequence[int]]
_MARK = b"jigsaw\0\0"
_TAIL = len(_MARK) + 8
_LONGEST = 1 << 30


def append_places(path: Path, places: PiecePlaces, before: FileSum) -> FileSum:
    """Write the places of pieces at the end of a file, wait for the disk, and return the size and sum of all of it."""
    text = json.dumps(places).encode()
    end = text + _MARK + len(text).to_bytes(8, "little")
    with open(open_unlinked(path, os.O_WRONLY | os.O_APPEND), "ab") as out:
        out.write(end)
        out.flush()
        os.fsync(out.fileno())
    return FileSum(before.size + len(end), zlib.crc32(end, before.crc32))


def read_places(path: Path) -> dict[str, list[int]]:
    """Return the places of pieces that stand at the end of a file.

    Raises: `CheckpointError` for a file that ends otherwise, and for places that are not within it.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file, so it is not of a checkpoint")
        begin = status.st_size - _TAIL
        tail = os.pread(handle, _TAIL, max(begin, 0))
        length = int.from_bytes(tail[len(_MARK) :], "little")
        if not tail.startswith(_MARK) or length > min(begin, _LONGEST):
            raise CheckpointError(f"{path} does not end with the places of its pieces, as a save of ours does")
        text = os.pread(handle, length, begin - length)
    finally:
        os.close(handle)
    try:
        return _checked_places(parse_strict_json(text), begin - length)
    except (ValueError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{path} does not say where its pieces are: {e}") from e


def _checked_places(places: Any, size: int) -> dict[str, list[int]]:
    for name, numbers in places.items():
        if type(numbers) is not list or not all(type(each) is int and each >= 0 for each in numbers):
            raise ValueError(f"the places of {name!r} are not natural numbers")
        if len(numbers) % 2 or any(a + b > size for a, b in zip(numbers[::2], numbers[1::2], strict=True)):
            raise ValueError(f"the places of {name!r} are not within {size} bytes")
    return places
