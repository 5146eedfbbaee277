"""Folder of a checkpoint: it gets its name once it is whole, and only known parts of it are replaced or removed.

``jigsaw.json`` is written last and lists what the checkpoint has: its small state, and the size and CRC-32 of every
file.  A checksum finds damage and mixed files of two checkpoints; it is not a signature.

Only a folder in which that file is intact and names every other is replaced or removed.  Anything else belongs to the
user.  A draft is known by its name (`unforeseen_name`), and by its files, which all have names of a checkpoint's.
"""

from __future__ import annotations

import json
import os
import re
import stat
import zlib
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from jigsaw.checkpoint.checkpoint_index import TENSOR_INDEX_FILE, TORCH_INDEX_FILE
from jigsaw.checkpoint.checkpoint_state import parse_strict_json
from jigsaw.drafts import begin_draft_folder, open_unlinked, path_of_draft, unforeseen_name
from jigsaw.errors import CheckpointError

_LAST = "jigsaw.json"
_FORMAT = 3
_LARGEST_LAST = 1 << 30
_INDEX_OF_FORMAT = {1: TORCH_INDEX_FILE, 2: TENSOR_INDEX_FILE, 3: TENSOR_INDEX_FILE}
_NAME_OF_FILE = re.compile(r"__\d+_\d+\.distcp|\.metadata(\.tmp)?|tensors\.json|jigsaw\.json")


class FileSum(NamedTuple):
    """Size of a file in bytes, and their CRC-32."""

    size: int
    crc32: int


class CheckpointContents(NamedTuple):
    """Contents of ``jigsaw.json``: `order` counts the saves to a folder of numbered ones, and to one name."""

    format: int
    order: int
    state: dict[str, Any]
    files: dict[str, FileSum]

    def index_file(self) -> str:
        """Return the file that says where the tensors are.

        Raises: `CheckpointError` for a format that this jigsaw cannot read.
        """
        if self.format not in _INDEX_OF_FORMAT:
            known = f"{min(_INDEX_OF_FORMAT)} to {max(_INDEX_OF_FORMAT)}"
            raise CheckpointError(f"the checkpoint is of format {self.format}, and this jigsaw reads {known}")
        return _INDEX_OF_FORMAT[self.format]


class CheckpointDraft(NamedTuple):
    """A checkpoint that is being written: the name that it will have, the folder that it has, and its order."""

    final: Path
    folder: Path
    order: int


def read_regular_file(path: Path, largest: int) -> bytes:
    """Return the content of a file of at most `largest` bytes.

    Raises: `CheckpointError` for anything but a file, such as a pipe, on which a read would wait, and for a larger one.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise CheckpointError(f"{path} is not a regular file, so it is not of a checkpoint")
        if status.st_size > largest:
            raise CheckpointError(f"{path} has {status.st_size} bytes, and is damaged if it has more than {largest}")
        with open(handle, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(handle)


def checkpoint_contents(folder: Path) -> CheckpointContents:
    """Return what a checkpoint's ``jigsaw.json`` says.

    Raises: `CheckpointError` where that is damaged or missing.
    """
    try:
        document = parse_strict_json(read_regular_file(folder / _LAST, _LARGEST_LAST))
        crc = document.pop("crc32")
        if crc != _crc_of_json(document):
            raise CheckpointError(f"{folder / _LAST} is damaged: its CRC-32 does not match")
        files = {name: FileSum(*each) for name, each in document["files"].items()}
        contents = CheckpointContents(document["format"], document.get("order", 0), dict(document["state"]), files)
        numbers = [contents.format, contents.order, *(each for file in files.values() for each in file)]
        strays = [name for name in files if name != os.path.basename(name) or name in ("", ".", "..", _LAST)]
        if strays or not all(type(each) is int and each >= 0 for each in numbers):
            raise ValueError(f"it names a file {strays[0]!r}" if strays else "it has a number that is none")
        if contents.format in _INDEX_OF_FORMAT and contents.index_file() not in files:
            raise ValueError(f"it names no {contents.index_file()}")
    except CheckpointError:
        raise
    except OSError as e:
        raise CheckpointError(f"{folder / _LAST} cannot be read: {e}") from e
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{folder / _LAST} is damaged: it does not say what the checkpoint has ({e!r})") from e
    return contents


def contents_of_whole(folder: Path) -> CheckpointContents | None:
    """Return the contents of a checkpoint with all its files, each of its size (unread); None where it is not whole."""
    try:
        contents = checkpoint_contents(folder)
        whole = all((folder / name).stat().st_size == each.size for name, each in contents.files.items())
    except (CheckpointError, OSError, ValueError):  # the last for a name that no file can have
        return None
    return contents if whole else None


def whole_checkpoint(final: Path) -> Path:
    """Return the folder of a checkpoint: `final`, or what a killed save left before it could take that name.

    Raises: `CheckpointError` when there is none, or `final` is not whole.
    """
    if final.exists():
        if not (final / _LAST).exists():
            raise CheckpointError(
                f"the checkpoint {final} is not whole: it has no {_LAST}, which is written last; jigsaw reads what "
                "jigsaw.save wrote"
            )
        return final
    whole = _whole_leftover(final)
    if whole is None:
        left = _leftovers(final)
        why = f"; {left[0]} is there, but not whole: the save was ended before it had written all" if left else ""
        raise CheckpointError(f"the checkpoint {final} does not exist{why}")
    return whole


def _leftovers(final: Path) -> list[Path]:
    beside = final.parent.iterdir() if final.parent.is_dir() else ()
    return [each for each in beside if path_of_draft(each) == final and each.is_dir() and not each.is_symlink()]


def _whole_leftover(final: Path) -> Path | None:
    """Return the newest of them that is whole: a kill between two renames leaves the old checkpoint and the new one."""
    leftovers = [(contents.order, each) for each in _leftovers(final) if (contents := contents_of_whole(each))]
    return max(leftovers)[1] if leftovers else None


def begin_checkpoint(final: Path, order: int) -> CheckpointDraft:
    """Make an empty draft of a new checkpoint.  A whole one that a killed save left first takes its intended name.

    Raises: `CheckpointError` where `final` is something that may not be replaced.
    """
    if not final.name or final.name == "..":
        raise CheckpointError(f"{os.fspath(final)!r} names no folder of its own that a checkpoint could be")
    if not os.path.lexists(final) and (left := _whole_leftover(final)) is not None:
        left.rename(final)
    _check_replaceable(final)
    for each in _leftovers(final):
        remove_leftover(each)
    final.parent.mkdir(parents=True, exist_ok=True)
    return CheckpointDraft(final, begin_draft_folder(final), order)


def commit_checkpoint(draft: CheckpointDraft, state: Mapping[str, Any], sums: Mapping[str, FileSum]) -> None:
    """Complete the new checkpoint, and put it in the place of the old one.

    A kill between the two renames leaves both beside `final`, where `whole_checkpoint` and `begin_checkpoint` find
    them.
    """
    content = {"format": _FORMAT, "order": draft.order, "state": state, "files": dict(sorted(sums.items()))}
    text = json.dumps({"crc32": _crc_of_json(content), **content})
    _check_replaceable(draft.final)
    write_new_file(draft.folder / _LAST, text.encode())
    replaced = unforeseen_name(draft.final, "replaced")
    with suppress(FileNotFoundError):
        draft.final.rename(replaced)
    draft.folder.rename(draft.final)
    remove_leftover(replaced)


@contextmanager
def removed_on_failure(draft: CheckpointDraft, is_first: bool) -> Generator[None]:
    """Remove the draft, on the first rank, after a block in which all ranks fail, or none."""
    try:
        yield
    except CheckpointError:
        if is_first:
            remove_leftover(draft.folder)
        raise


def write_new_file(path: Path, content: bytes) -> FileSum:
    """Write a file that does not exist yet, and wait for the disk."""
    with open(open_unlinked(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())
    return FileSum(len(content), zlib.crc32(content))


def _crc_of_json(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


def remove_checkpoint(folder: Path) -> None:
    """Remove a checkpoint that jigsaw wrote.

    Raises: `CheckpointError` for a folder that is not one, or has anything else in it; it stays as it is.
    """
    _remove_files(folder, files_of_checkpoint(folder))


def remove_leftover(folder: Path) -> None:
    """Remove a draft, or what one has replaced, unless there is anything else in it."""
    with suppress(OSError):
        names = os.listdir(folder)
        if not _foreign_entries(folder, [name for name in names if _NAME_OF_FILE.fullmatch(name)]):
            _remove_files(folder, names)


def _check_replaceable(final: Path) -> None:
    """Raise `CheckpointError` unless `final` is free, an empty folder, or a checkpoint that jigsaw wrote."""
    try:
        if os.path.lexists(final) and (final.is_symlink() or not final.is_dir() or os.listdir(final)):
            files_of_checkpoint(final)
    except CheckpointError as e:
        raise CheckpointError(
            f"{final} is there, and is replaced only where it is a checkpoint of jigsaw and nothing else: {e}; save to "
            "another name, or move away what is there"
        ) from e


def files_of_checkpoint(folder: Path) -> set[str]:
    """Return the names of everything in a checkpoint of jigsaw.  Raises: `CheckpointError` for any other file."""
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError("it is not a folder")
    contents = checkpoint_contents(folder)
    _ = contents.index_file()
    ours = {*contents.files, _LAST}
    if strays := _foreign_entries(folder, ours):
        raise CheckpointError(f"it has {strays[0]!r}, which jigsaw did not write")
    return ours


def _foreign_entries(folder: Path, ours: Collection[str]) -> list[str]:
    with os.scandir(folder) as entries:
        return [each.name for each in entries if each.name not in ours or not each.is_file(follow_symlinks=False)]


def _remove_files(folder: Path, names: Collection[str]) -> None:
    """Remove files, the one that marks a checkpoint last, and their folder, if nothing else is in it by then."""
    _unlink_files(folder, sorted(names, key=lambda name: name == _LAST))
    folder.rmdir()


def remove_tensor_files(folder: Path, names: Collection[str]) -> None:
    """Remove files of a checkpoint, but not the one that marks it."""
    _unlink_files(folder, [name for name in names if name != _LAST])


def _unlink_files(folder: Path, names: Sequence[str]) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in names:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=handle)
    finally:
        os.close(handle)
