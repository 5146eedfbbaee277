"""Folder of numbered checkpoints, ``step-100``, ``step-200``, ...: the last whole one, and the last n kept.

Each save writes its order into its checkpoint: one more than the highest there.  So the last is the one that was saved
last, even by a run that went back to an older one.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from jigsaw.checkpoint.checkpoint_files import fail_together
from jigsaw.checkpoint.checkpoint_folder import (
    checkpoint_contents,
    contents_of_whole,
    files_of_checkpoint,
    remove_checkpoint,
    remove_leftover,
    remove_tensor_files,
)
from jigsaw.checkpoint.checkpoint_state import CheckpointPath
from jigsaw.drafts import path_of_draft
from jigsaw.errors import CheckpointError

RemovalShare = list[tuple[str, list[str]]] | None
"""Files that a rank removes: for each folder its name, and theirs."""


class _NumberedSave(NamedTuple):
    """A folder that may be a checkpoint: `folder` is its name, or that of the remains of a killed save to `final`."""

    number: int
    final: Path
    folder: Path

    @property
    def is_loaded(self) -> bool:
        """True where `load` reads this one: the remains of a killed save stand in for a name that does not exist."""
        return self.folder == self.final or not self.final.exists()


def latest(folder: CheckpointPath) -> Path | None:
    """Return the checkpoint that was saved last, among those in `folder` that are whole; None where there is none.

    Those are folders whose names end in a number.  One of a killed save is skipped, and so is one with a file missing
    or of another size.  After a run has gone back to ``step-50`` and has saved ``step-60``, that is the last one,
    whatever higher numbers an abandoned run has left.  Checkpoints without an order, which are older than those with
    one, are sorted by their number.  Every rank calls this and gets the first one's result.

    *Raises*: `CheckpointError` where numbered checkpoints have names of several kinds.

    >>> model = torch.nn.Linear(4, 2)
    >>> for step in (90, 100, 110):
    ...     jigsaw.save(f"run/step-{step}", model=model, keep=2)
    >>> print(jigsaw.latest("run"))
    run/step-110
    """

    def look() -> Path | None:
        whole = _whole_saves(each for each in _saves_in(Path(folder)) if each.number >= 0 and each.is_loaded)
        stems = sorted({_stem_of(each.final) for each in whole})
        if len(stems) > 1:
            raise CheckpointError(
                f"{folder} has numbered checkpoints of several names, {stems[0]!r} and {stems[1]!r} among them; which "
                "is the last their numbers do not say: give each a folder of its own"
            )
        return whole[-1].final if whole else None

    return fail_together(look, of_first=True)


def check_numbered(final: Path, keep: int | None) -> None:
    """Raise `CheckpointError` for a `keep` that is not a number of checkpoints, or for a name without a number."""
    if keep is None:
        return
    if isinstance(keep, bool) or not isinstance(keep, int) or keep < 1:
        raise CheckpointError(f"keep={keep!r} must be how many checkpoints are kept: an integer of 1 or more")
    if _save_number(final) < 0:
        raise CheckpointError(
            f"keep={keep} keeps the last of numbered checkpoints, but {final.name!r} does not end in a number; save to "
            f"names such as {final.name}-100"
        )


def order_of_next(final: Path) -> int:
    """Return the order number of a save to `final`: one after all saves to its folder under numbered names."""
    orders = [0]
    for each in _family_of(final):
        try:
            orders.append(checkpoint_contents(each.folder).order)
        except CheckpointError:  # the folder is not a checkpoint
            continue
    return max(orders) + 1


def older_saves(final: Path, keep: int) -> list[Path]:
    """Return the checkpoints that are to be removed: those with a lower number than `final`, and the same name before
    it, except for the last `keep` whole ones.

    What killed saves left there is removed at once.  Folders that are not jigsaw's stay, and so, with a warning, do
    checkpoints with other files in them.
    """
    older = [each for each in _family_of(final) if 0 <= each.number <= _save_number(final)]
    kept = {each.final for each in _whole_saves(older)[-keep:]}
    removed: list[Path] = []
    for each in older:
        if each.final == final or each.final in kept or each.folder.is_symlink():
            continue
        try:
            if each.folder != each.final:
                remove_leftover(each.folder)
            else:
                _ = files_of_checkpoint(each.folder)
                removed.append(each.folder)
        except OSError as e:
            warnings.warn(f"{each.folder} is not removed: {e}", stacklevel=2)
        except CheckpointError as e:
            if contents_of_whole(each.folder) is not None:
                warnings.warn(f"{each.folder} is not removed, though keep={keep}: {e}", stacklevel=2)
    return removed


def removal_shares(older: Sequence[Path], ranks: int) -> list[RemovalShare]:
    """Return for each rank the files that it removes, by folder; None for all where there are none."""
    if not older:
        return [None] * ranks
    named = [(each.name, sorted(files_of_checkpoint(each))) for each in older]
    return [[(folder, names[rank::ranks]) for folder, names in named] for rank in range(ranks)]


def remove_share(beside: Path, share: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Remove this rank's files of older checkpoints, except the files that mark them as checkpoints."""
    for folder, names in share:
        with suppress(OSError):  # the first rank tries again, and raises
            remove_tensor_files(beside / folder, names)


def remove_folders(older: Iterable[Path], done: list[None], keep: int | None) -> list[None]:
    """Remove checkpoints of which all ranks have removed their files; what is still there, with a warning, stays."""
    for each in older:
        try:
            remove_checkpoint(each)
        except (OSError, CheckpointError) as e:
            warnings.warn(f"{each} is not removed, though keep={keep}: {e}", stacklevel=2)
    return done


def _whole_saves(saves: Iterable[_NumberedSave]) -> list[_NumberedSave]:
    """Return the whole checkpoints, the one that was saved last at the end."""
    whole = [(contents.order, each) for each in saves if (contents := contents_of_whole(each.folder)) is not None]
    return [each for _, each in sorted(whole)]


def _stem_of(final: Path) -> str:
    return final.name.rstrip("0123456789")


def _family_of(final: Path) -> list[_NumberedSave]:
    """Return the folders beside `final` that have its name, before the number if there is one."""
    return [each for each in _saves_in(final.parent) if _stem_of(each.final) == _stem_of(final)]


def _saves_in(folder: Path) -> Iterator[_NumberedSave]:
    for entry in folder.iterdir() if folder.is_dir() else ():
        if entry.is_dir():
            final = path_of_draft(entry) or entry
            yield _NumberedSave(_save_number(final), final, entry)


def _save_number(final: Path) -> int:
    digits = final.name[len(_stem_of(final)) :]
    return int(digits) if digits else -1
