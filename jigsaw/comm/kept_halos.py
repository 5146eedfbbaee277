"""Halo rows that activation checkpointing keeps, so that its second forward pass sends none.

``torch.utils.checkpoint(use_reentrant=False)`` makes a frame for each call, which lives as long as the graph behind it.
The frame keeps what a rank receives while the function runs for the first time, in the order of the messages; the
second run takes it from there.  So a backward pass sends the gradients of halos once, and nothing else for halos,
checkpointed or not.  A call within another one is part of it: received rows go into both lists, and when the outer one
runs again, its inner calls take theirs from the outer's list.

Only halos are kept: at most one row in eight of what the ranks hold, by layouts, which are the same on all.  Larger
messages are sent again, and so are those within savers of tensors in the function (``save_on_cpu``).

Example: two ranks with 32 rows each of [1, 4, 64, 16] in float64, three 3 x 3 convolutions in a checkpoint: each rank
keeps 3 rows of 512 bytes, beside an input of 16384.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from torch import Tensor

from jigsaw.geometry.cut import interval_overlap
from jigsaw.geometry.layout import Layout
from jigsaw.torch_internals.autograd import saved_tensor_hooks
from jigsaw.torch_internals.dispatch import count_modes, current_modes, modes_that_keep

_KEPT_SHARE = 8  # received rows are kept while they are at most one in so many


_by_hook: WeakKeyDictionary[Any, tuple[ReferenceType[Any], Any]] = WeakKeyDictionary()
# for a frame that began within another one: that one, and which of its runs
_outer: WeakKeyDictionary[Any, tuple[ReferenceType[Any], Any]] = WeakKeyDictionary()


def _checkpoint_frame() -> tuple[Any, Any]:
    """Return the frame of the checkpoint that is being computed, if any, and which of its later runs this is (None: the
    first).
    """
    # by the innermost hooks of autograd for saved tensors, which may be others, as those of `save_on_cpu`
    hooks = saved_tensor_hooks(True)
    frame, run = (_by_hook.get(hooks[0]) if hooks else None) or (None, None)
    return (None, None) if frame is None else (frame(), run)


def note_saving_hook(pack_hook: Any, frame: Any, run: Any) -> None:
    """Remember for which frame, and which of its later runs (None: the first), a hook saves tensors."""
    _by_hook[pack_hook] = ref(frame), run


_run_memories: WeakKeyDictionary[Any, dict[Any, Any]] = WeakKeyDictionary()


def memory_of_run() -> dict[Any, Any] | None:
    """Return what may be kept until the run of a checkpointed call that is under way ends; None outside of one."""
    hooks = saved_tensor_hooks(True)
    return _run_memories.setdefault(hooks[0], {}) if hooks and hooks[0] in _by_hook else None


def end_run(pack_hook: Any) -> None:
    """Let go of what one run of a checkpointed call has kept, whose hook saved tensors."""
    _run_memories.pop(pack_hook, None)


def begin_within_frame(frame: Any) -> None:
    """Remember within which other checkpoint, if any, this one begins."""
    outer, run = _checkpoint_frame()
    if outer is not None:
        _outer[frame] = ref(outer), run


def open_frames() -> tuple[list[Any], Any, Any]:
    """Return the checkpoints that are being computed for the first time, innermost first, and the one around them.
    That one, if any, runs again; the last value says which run that is.
    """
    frame, run = _checkpoint_frame()
    first: list[Any] = []
    while frame is not None and run is None:
        first.append(frame)
        outer, run = _outer.get(frame, (None, None))
        frame = None if outer is None else outer()
    return first, frame, run


class FrameNotes:
    """Notes that the first run of each checkpointed call makes, in order, for its later runs."""

    def __init__(self) -> None:
        self.of_frames: WeakKeyDictionary[Any, list[Any]] = WeakKeyDictionary()
        self._taken: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()  # numbers of notes, by later run

    def add(self, note: Any) -> None:
        """Note it for the later runs of all calls that run for the first time."""
        for frame in open_frames()[0]:
            self.of_frames.setdefault(frame, []).append(note)

    def next_note(self) -> Any:
        """Return what the first run noted at the same place; None outside of a later run, and for no note."""
        _, frame, run = open_frames()
        if frame is None:
            return None
        taken, notes = self._taken.setdefault(frame, {}), self.of_frames.get(frame, [])
        taken[run] = at = taken.get(run, -1) + 1
        return notes[at] if at < len(notes) else None


_received = FrameNotes()  # messages, each with its request, or None where it was too large


def results_are_kept() -> bool:
    """Say whether selective checkpointing keeps what operators return, by its policy: then no result may be changed in
    place.
    """
    return count_modes() > 0 and any(isinstance(mode, modes_that_keep()) for mode in current_modes())


@lru_cache(maxsize=4096)
def _is_small(source: Layout, target: Layout) -> bool:
    """Say whether what all ranks receive is little compared with what they hold."""
    if [c.axes for c in source.cuts] != [c.axes for c in target.cuts]:
        return False
    wanted_cells = math.prod(sum(b - a for a, b in c.held) for c in target.cuts)
    held_cells = math.prod(sum(b - a for a, b in c.held) for c in source.cuts)
    shared_cells = math.prod(
        sum(end - start for start, end in map(interval_overlap, s.held, t.held))
        for s, t in zip(source.cuts, target.cuts, strict=True)
    )
    return _KEPT_SHARE * (wanted_cells - shared_cells) <= held_cells


def kept_messages(what: object) -> list[tuple[int, Tensor]] | None:
    """Return what the first run of the same checkpointed call received for `what`; None where it has to be sent
    (again).
    """
    message = _received.next_note()
    if message is None or message[0] is not what:
        return None
    _received.add(message)
    return message[1]


def keep_messages(what: object, layouts: tuple[Layout, Layout], received: list[tuple[int, Tensor]]) -> None:
    """Keep what is received for `what`, an exchange between these layouts, if a checkpoint needs it again."""
    if open_frames()[0]:
        _received.add((what, received) if _is_small(*layouts) else None)
