"""How far statistics have come: the moments of the steps so far, and the checkpoint that they go on from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from jigsaw.io.errors import StateError
from jigsaw.io.stats.files import npz_of, replace
from jigsaw.io.stats.moments import Moments

Tables = NDArray[np.float64]
_FORMAT = "jigsaw statistics checkpoint 1"


@dataclass(frozen=True)
class Block:
    """The moments of some steps up to `stop`, one by one: `values`, and `differences` to the step before each."""

    stop: int
    values: Sequence[Moments]
    differences: Sequence[Moments]


@dataclass
class State:
    """The moments of all `done` steps."""

    done: int
    values: Moments
    differences: Moments

    @classmethod
    def fresh(cls, channels: int) -> State:
        return cls(0, Moments.nothing(channels), Moments.nothing(channels))

    @classmethod
    def of(cls, done: int, tables: Tables) -> State:
        """From `tables` [2, 7, C]."""
        return cls(done, Moments(tables[0]), Moments(tables[1]))

    @property
    def tables(self) -> Tables:
        """[2, 7, C]: of the values, of the differences."""
        return np.stack([self.values.table, self.differences.table])

    def add(self, block: Block) -> None:
        """Go on by one block.  Step by step, so that the sizes of blocks do not change a bit."""
        self.values = self.values.add(block.values)
        self.differences = self.differences.add(block.differences)
        self.done = block.stop

    def merge(self, other: State) -> State:
        return State(self.done, self.values.merge(other.values), self.differences.merge(other.differences))


def save(path: Path, identity: Mapping[str, Any], done: int, tables: Tables) -> None:
    """Put a checkpoint in place, whole: `tables` is [ranks, 2, 7, C].

    Raises: `WriteError` when it cannot be written; the one before stays.
    """
    about = json.dumps({"format": _FORMAT, "done": done, "of": dict(identity)})
    remedy = "run it again with resume=True (--resume): it goes on from the last checkpoint"
    replace(path, npz_of({"about": np.array(about), "tables": tables}), remedy)


def load(path: Path, identity: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, Tables] | None:
    """The steps done and the tables of a checkpoint; None when there is none yet.

    Raises: `StateError` for a file that is no checkpoint, or one of other statistics, naming what differs.
    """
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            about, tables = json.loads(str(file["about"])), np.asarray(file["tables"], dtype=np.float64)
        done, of = int(about["done"]), dict(about["of"])
        known = about["format"] == _FORMAT
    except (OSError, ValueError, KeyError, TypeError, EOFError, BadZipFile) as broken:
        raise StateError(f"checkpoint {str(path)!r} cannot be read ({broken}); remove it to begin anew") from broken
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
