"""Calls on tiles that ranks compare when debugging, also those that send nothing (``JIGSAW_DEBUG=1``).

A note says the function, the tiles' shapes, a checksum of each plain tensor, and every number.  Only what a user's code
calls is noted, not what jigsaw calls within it.  Two ranks, of which rank 1 draws other noise [4]: ``tile + noise`` is
"add(Tile [4] float32, tensor [4] float32 of checksum 1c3a0f22)" on rank 0, and has another checksum on rank 1.

A change of `tile.local` in place is seen by autograd's own counter of changes. It is kept with the memory whenever a
call begins or ends.  What lies between was not changed by a function of tiles, and the next note says how often.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jigsaw.comm.debug import described_plain, drop_note, is_comparing, note_call, within_call
from jigsaw.geometry.layout import Layout
from jigsaw.tile.table import table
from jigsaw.tile.tile import Tile, tiles_in
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import tensor_version

_SEEN = "_jigsaw_changes_seen"  # attribute of a tile's memory: its number of changes when a call of tiles last saw it


def noted_call(call: Callable[..., Any], function: Any, args: Any, kwargs: Any) -> Any:
    """Answer a function on tiles by `call`, and note it."""
    tiles = list(tiles_in((args, kwargs)))
    name, note = getattr(function, "__name__", str(function)), None
    name = name[2:-2] if name.startswith("__") and name.endswith("__") else name
    if tiles and is_comparing():
        note = note_call(tiles[0].mesh, f"{name}{described_arguments(args, kwargs)}")
    before = [_changes_of(tile) for tile in tiles] if note else []
    with within_call():
        out = call(function, *args, **kwargs)
    if note is None:
        return out
    results = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, Tensor)]
    if not results and before == [_changes_of(tile) for tile in tiles]:
        drop_note(tiles[0].mesh, note)  # the call only read metadata, such as strides
    for tile in (*tiles, *results):
        if isinstance(tile, Tile):
            mark_changes(tile)
    return out


table.note_call = noted_call


def described_arguments(args: Any, kwargs: Any) -> str:
    """Describe the arguments of a call, as a text that all ranks have alike."""
    parts = [_described_argument(value) for value in args]
    return f"({', '.join([*parts, *(f'{name}={_described_argument(value)}' for name, value in kwargs.items())])})"


def _described_argument(value: Any) -> str:
    if isinstance(value, Tile):
        changes, seen = _changes_of(value), getattr(_shell_rows(value).untyped_storage(), _SEEN, None)
        outside = f", whose local was changed {changes - seen} times" if seen is not None and changes != seen else ""
        return f"Tile {list(value.shape)} {value.dtype}{outside}"
    if isinstance(value, Tensor):
        return described_plain(value)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_described_argument, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name}: {_described_argument(x)}' for name, x in value.items())}}}"
    if isinstance(value, (np.ndarray, np.generic)):
        return f"{type(value).__name__} {list(value.shape)} {value.dtype} of checksum {zlib.crc32(value.tobytes()):08x}"
    if isinstance(value, (int, float, complex, bool, str, range, slice, Layout, torch.dtype, torch.device, type(None))):
        return repr(value)
    return getattr(value, "__qualname__", type(value).__name__)  # the repr of other values may contain an address


def mark_changes(tile: Tile) -> None:
    """Remember how often the memory of a tile was changed so far."""
    setattr(_shell_rows(tile).untyped_storage(), _SEEN, _changes_of(tile))


def _changes_of(tile: Tile) -> int:
    rows = _shell_rows(tile)
    return -1 if rows.is_inference() else tensor_version(rows)


def _shell_rows(tile: Tile) -> Tensor:
    """Return the memory of a tile without a look at `local`, which a view that autograd is making must not have yet."""
    state = tile.__dict__
    rows = state.get("local", state.get("_rows"))
    return tile.local if rows is None else rows
