"""Halo rows that activation checkpointing keeps, so that its second forward pass sends none.

The frame of a checkpointed call (`checkpoint_runs.py`) keeps what a rank receives in the first run of the function, in
the order of the messages.  The second run takes it from there.  So a backward pass sends the gradients of halos once,
and nothing else for halos, checkpointed or not.  A call within another one is part of it: received rows go into both
lists, and when the outer one runs again, its inner calls take theirs from the outer's list.

Only halos are kept: at most one row in eight of what the ranks hold, by layouts, which are the same on all.  Larger
messages are sent again, and so are those within savers of tensors in the function (``save_on_cpu``).

Example: two ranks with 32 rows each of [1, 4, 64, 16] in float64, three 3 x 3 convolutions in a checkpoint: each rank
keeps 3 rows of 512 bytes, beside an input of 16384.
"""

from __future__ import annotations

import math
from functools import lru_cache

from torch import Tensor

from jigsaw.comm.checkpoint_runs import FrameNotes, open_frames
from jigsaw.geometry.cut import interval_overlap
from jigsaw.geometry.layout import Layout
from jigsaw.torch_internals.dispatch import count_modes, current_modes, modes_that_keep

_KEPT_SHARE = 8  # received rows are kept if they are at most this fraction (1/8) of the rows


_received = FrameNotes()  # received messages with their requests, or None where one was too large


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
