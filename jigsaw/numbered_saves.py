"""A folder of numbered checkpoints, ``step-100``, ``step-200``, ...: the last whole one, and the last n kept."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jigsaw.checkpoint_files import fail_together, is_whole_checkpoint
from jigsaw.checkpoint_state import CheckpointError, CheckpointPath

# what a save that was killed may have left has the last two names
_NAME = re.compile(r"(?P<stem>.*?)(?P<number>\d+)(\.part(\.old)?)?")


class _NumberedSave(NamedTuple):
    number: int
    final: Path
    found: Path


def latest(folder: CheckpointPath) -> Path | None:
    """The checkpoint with the highest number among those in `folder` that are whole; None where there is none.

    Those are folders whose names end in a number.  One that a save was killed in is passed over, and so is one of which
    a file is missing or of another size.  Every rank calls this and gets what the first found.

    *Raises*: `CheckpointError` where numbered checkpoints have names of several kinds.

    >>> model = torch.nn.Linear(4, 2)
    >>> for step in (90, 100, 110):
    ...     jigsaw.save(f"run/step-{step}", model=model, keep=2)
    >>> print(jigsaw.latest("run"))
    run/step-110
    """

    def look() -> Path | None:
        whole = sorted(each for each in _numbered_saves(Path(folder)) if _is_loaded(each))
        stems = sorted({_stem_of(each.final) for each in whole})
        if len(stems) > 1:
            raise CheckpointError(
                f"{folder} has numbered checkpoints of several names, {stems[0]!r} and {stems[1]!r} among them; which "
                "is the last their numbers do not say: give each a folder of its own"
            )
        return whole[-1].final if whole else None

    return fail_together(look, of_first=True)


def check_numbered(final: Path, keep: int | None) -> None:
    """Raises: `CheckpointError` where `keep` is no count, or there is no number to count by."""
    if keep is None:
        return
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise CheckpointError(f"keep={keep!r} must be how many checkpoints are kept: an integer of 1 or more")
    if _NAME.fullmatch(final.name) is None or not final.name[-1].isdigit():
        raise CheckpointError(
            f"keep={keep} keeps the checkpoints with the highest numbers, but {final.name!r} does not end in one; "
            f"save to names such as {final.name}-100"
        )


def remove_older_saves(final: Path, keep: int) -> None:
    """Remove what has a lower number than `final`, and the same name before it; the last `keep` whole ones stay."""
    mine = [each for each in _numbered_saves(final.parent) if _stem_of(each.final) == _stem_of(final)]
    here = next(each.number for each in mine if each.final == final)
    whole = sorted({each.number for each in mine if is_whole_checkpoint(each.found) and each.number <= here})
    kept = set(whole[-keep:])
    for each in mine:
        if each.number < here and each.number not in kept:
            shutil.rmtree(each.found, ignore_errors=True)


def _is_loaded(each: _NumberedSave) -> bool:
    """Whether `load` would read this one: what a killed save left stands in for a name that nobody has."""
    return is_whole_checkpoint(each.found) and (each.found == each.final or not each.final.exists())


def _stem_of(final: Path) -> str:
    return final.name.rstrip("0123456789")


def _numbered_saves(folder: Path) -> Iterator[_NumberedSave]:
    for found in folder.iterdir() if folder.is_dir() else ():
        name = _NAME.fullmatch(found.name)
        if name is not None and found.is_dir():
            yield _NumberedSave(int(name["number"]), found.with_name(name["stem"] + name["number"]), found)
