"""Runs of checkpointed calls: which one is under way, and what the first run notes for the later ones.

``torch.utils.checkpoint(use_reentrant=False)`` makes a frame for each call, which lives as long as the graph behind it.
The function runs once forward, and again in the backward pass.  Each run has hooks of its own for saved tensors, by
which it is known here.  A call within another one is part of it: when the outer one runs again, so does the inner one.
"""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, ref

from jigsaw.torch_internals.autograd import saved_tensor_hooks

_by_hook: WeakKeyDictionary[Any, tuple[ReferenceType[Any], Any]] = WeakKeyDictionary()
# for a frame that began within another frame: the outer frame, and which of its runs
_outer: WeakKeyDictionary[Any, tuple[ReferenceType[Any], Any]] = WeakKeyDictionary()


def _checkpoint_frame() -> tuple[Any, Any]:
    """Return the frame of the checkpoint that is being computed, if any, and which of its later runs this is (None: the
    first).
    """
    # found by autograd's innermost hooks for saved tensors, which may be others, such as those of `save_on_cpu`
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
        # for each later run, the number of notes that it has taken
        self._taken: WeakKeyDictionary[Any, dict[Any, int]] = WeakKeyDictionary()

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
