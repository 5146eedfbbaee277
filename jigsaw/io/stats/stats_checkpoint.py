"""Progress of statistics: the moments of the steps so far, and the checkpoint to go on from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import StateError
from jigsaw.io.series.statistics_files import npz_bytes, replace_file
from jigsaw.io.stats.moments import ChannelMoments

MomentTables = NDArray[np.float64]
_CHECKPOINT_FORMAT = "jigsaw statistics checkpoint 1"


@dataclass(frozen=True)
class StepBlock:
    """The moments of some steps up to `stop`, one by one: `values`, and `differences` to the step before each."""

    stop: int
    values: Sequence[ChannelMoments]
    differences: Sequence[ChannelMoments]


@dataclass
class StatisticsState:
    """The moments of all `done` steps: `tables` is [2, 7, C], of the values and of the differences."""

    done: int
    tables: MomentTables

    def add(self, block: StepBlock) -> None:
        """Add one block, step by step, so that the sizes of blocks do not change a bit of the result."""
        pairs = zip(self.tables, (block.values, block.differences), strict=True)
        self.tables = np.stack([ChannelMoments(table).add(found).table for table, found in pairs])
        self.done = block.stop


def save_moments(path: Path, identity: Mapping[str, Any], done: int, tables: MomentTables) -> None:
    """Put a checkpoint in place, whole: `tables` is [ranks, 2, 7, C].

    Raises: `WriteError` when it cannot be written; the one before stays.
    """
    about = json.dumps({"format": _CHECKPOINT_FORMAT, "done": done, "of": dict(identity)})
    remedy = "run it again with resume=True (--resume): it goes on from the last checkpoint"
    replace_file(path, npz_bytes({"about": np.array(about), "tables": tables}), remedy)


def load_moments(path: Path, identity: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, MomentTables] | None:
    """Return the steps done and the tables of a checkpoint; None when it does not exist yet.

    Raises: `StateError` for a file that is not a checkpoint, or one of other statistics, naming what differs.
    """
    if not path.exists():
        return None
    about, tables = _read_checkpoint(path)
    done, of, known = about["done"], about["of"], about["format"] == _CHECKPOINT_FORMAT
    wanted = json.loads(json.dumps(dict(identity)))
    differing = [name for name in wanted if of.get(name) != wanted[name]]
    if differing:
        name = differing[0]
        raise StateError(
            f"checkpoint {str(path)!r} is of {name} {of.get(name)!r}, this run of {wanted[name]!r}; "
            "run it as before, or remove the checkpoint to begin anew"
        )
    if not known or tables.shape != shape:
        raise StateError(f"checkpoint {str(path)!r} has tables {list(tables.shape)}, not {list(shape)}; remove it")
    return done, tables


def check_moments(path: Path) -> None:
    """Raise `StateError` where a checkpoint would replace a file that is not a checkpoint of statistics."""
    if os.path.lexists(path) and not path.is_symlink():
        _ = _read_checkpoint(path)


def _read_checkpoint(path: Path) -> tuple[dict[str, Any], MomentTables]:
    try:
        with np.load(path, allow_pickle=False) as file:
            about, tables = json.loads(str(file["about"])), np.asarray(file["tables"], dtype=np.float64)
        return {"done": int(about["done"]), "of": dict(about["of"]), "format": str(about["format"])}, tables
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as broken:
        raise StateError(f"checkpoint {str(path)!r} cannot be read ({broken}); remove it to begin anew") from broken
