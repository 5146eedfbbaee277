"""``JIGSAW_DEBUG=1``: the ranks compare their calls before every message.

Every rank of a mesh runs the same program, so the n-th message of each is the same call on the same global shapes.  A
branch on local values breaks this, as do a step that one rank skips, another order, and an argument that depends on the
rank.  It shows as a wait until the time-out, far from the place.  Here each rank first tells the others its call, with
its function, module and line.  Where they differ, all of them raise, with the places of both.

Example: of four ranks, rank 2 skips a layer.  At the first different message it tells the others "all_reduce in
mse_loss, train.py:31", and they tell it "exchange in conv2d, UNet > Conv2d, model.py:12".  Each compares all four and
names the first that differs from the first rank.

Calls that send nothing are noted (`jigsaw.tile.noted_calls`), with checksums of their plain tensors, and compared at
the next message: its word carries a checksum of the notes since the last one, and where these differ the notes follow.

When off (the default), it costs one read of a name.
"""

from __future__ import annotations

import os
import threading
import zlib
from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm.first_meetings import forget_meetings, meet_tensor
from jigsaw.comm.wire_values import checksum_of_bits
from jigsaw.errors import RanksDifferError
from jigsaw.ranks.call_places import place_of_call
from jigsaw.ranks.launcher import DEBUG_VARIABLE, debug_interval
from jigsaw.ranks.mesh import axes_in_mesh_order, axes_of_mesh, groups_along, mesh_coordinate
from jigsaw.ranks.model_world import job_rank
from jigsaw.ranks.slab_mesh import SlabMesh
from jigsaw.ranks.waiting_ranks import OpenWait

IS_DEBUGGING = debug_interval(os.environ) > 0
_MOST_NOTES = 10_000


class _DebuggedThread(threading.local):
    is_silent = False
    is_within_call = False

    def __init__(self) -> None:
        self.notes: WeakKeyDictionary[DeviceMesh, list[tuple[str, str]]] = WeakKeyDictionary()


_this_thread = _DebuggedThread()


@contextmanager
def without_comparing() -> Generator[None]:
    """Let this thread play imaginary ranks within the block, and compare nothing; other threads go on."""
    before, _this_thread.is_silent = _this_thread.is_silent, True
    try:
        yield
    finally:
        _this_thread.is_silent = before


def is_comparing() -> bool:
    """Say whether this thread compares its messages with the other ranks."""
    return IS_DEBUGGING and not _this_thread.is_silent


_message_numbers: WeakKeyDictionary[DeviceMesh, int] = WeakKeyDictionary()


def hash_interval() -> int:
    """Return after how many forward passes the parameters are compared: ``JIGSAW_DEBUG_EVERY``, 10 by default."""
    return debug_interval({**os.environ, DEBUG_VARIABLE: "1"})


def compare_calls(
    mesh: DeviceMesh, kind: str, *alike: Hashable, axes: str | Sequence[str] = (), shape: Sequence[int] = ()
) -> None:
    """Compare, when debugging, what the ranks of the mesh are about to send.

    `alike`, such as layouts, must be the same on every rank; the local `shape` on those along `axes`.  Every rank of
    the mesh calls this, even one that will send nothing.

    *Sends*: a few hundred bytes to every other rank, not counted.
    *Raises*: `RanksDifferError` on every rank, with the places of two that differ.
    """
    if not (IS_DEBUGGING and is_comparing()) or isinstance(mesh, SlabMesh) or mesh.size() == 1:
        return
    number = _message_numbers[mesh] = _message_numbers.get(mesh, 0) + 1
    function, where = place_of_call()
    call = f"{kind} {', '.join(map(str, alike))}".strip(), function
    names = axes_in_mesh_order(mesh, axes)
    coordinate = zip(axes_of_mesh(mesh), mesh_coordinate(mesh), strict=True)
    along = tuple(c for (name, _), c in coordinate if name not in names)
    notes = _this_thread.notes.pop(mesh, [])
    checksum = zlib.crc32(repr([call for call, _ in notes]).encode())
    own_call = job_rank(), number, call, (along, tuple(shape)), where, checksum
    every = _told_by_all(mesh, own_call)
    shapes = {each[3][0]: each for each in reversed(every)}
    for each in every:
        for other, part in ((every[0], slice(1, 3)), (shapes[each[3][0]], slice(3, 4))):
            if each[part] != other[part]:
                raise RanksDifferError(
                    f"the ranks do different things at message {min(each[1], other[1])} of {mesh}: "
                    f"{_described(other)}; {_described(each)}; every rank must make the same calls in the same "
                    "order, with the same arguments: look for a branch on local values or on the rank"
                )
    if any(each[5] != every[0][5] for each in every):
        _raise_first_difference(
            mesh, _told_by_all(mesh, (job_rank(), notes)), f"before message {number} ({call[0]} in {function}, {where})"
        )


def is_outermost_call() -> bool:
    """Return whether no function on tiles is under way in this thread; only the outermost one is noted."""
    return not _this_thread.is_within_call


@contextmanager
def within_call() -> Generator[None]:
    """Within it a function on tiles is under way."""
    before, _this_thread.is_within_call = _this_thread.is_within_call, True
    try:
        yield
    finally:
        _this_thread.is_within_call = before


def note_call(mesh: DeviceMesh, call: str) -> tuple[str, str] | None:
    """Note, when debugging, what every rank of the mesh is to do alike; it is compared at the next message.

    Returns the note, None where none was made.
    """
    if not is_comparing() or isinstance(mesh, SlabMesh) or mesh.size() == 1:
        return None
    notes = _this_thread.notes.setdefault(mesh, [])
    if len(notes) == _MOST_NOTES:  # many calls without a message: keep a checksum in place of the older ones
        notes[:] = [(f"{len(notes)} calls of checksum {zlib.crc32(repr([s for s, _ in notes]).encode()):08x}", "")]
    note = call, place_of_call()[1]
    notes.append(note)
    return note


def drop_note(mesh: DeviceMesh, note: tuple[str, str]) -> None:
    """Forget a note of what turned out to give nothing, unless more has happened since."""
    notes = _this_thread.notes.get(mesh)
    if notes and notes[-1] is note:
        del notes[-1]


def meet_left_gradient(mesh: DeviceMesh, gradient: Tensor) -> None:
    """Note the gradient of a plain tensor that left a tile, which is whole on every rank."""
    meet_tensor(gradient, mesh)
    if IS_DEBUGGING:
        note_call(mesh, f"gradient of what left a tile: {described_plain(gradient)}")


def described_plain(x: Tensor) -> str:
    """Describe a plain tensor by a checksum of its bits; one in parts, or without values, by its shape."""
    kind = f"{list(x.shape)} {x.dtype}"
    if type(x) not in (Tensor, nn.Parameter) or x.layout != torch.strided or x.is_meta:
        return f"{type(x).__name__} {kind}"
    return f"tensor {kind} of checksum {checksum_of_bits(x):08x}"


def _raise_first_difference(
    mesh: DeviceMesh, notes_by_rank: Sequence[tuple[int, list[tuple[str, str]]]], found_at: str
) -> None:
    """Raise a `RanksDifferError` with the first notes that differ, and the ranks that have each of them."""
    nothing = "no further call", ""
    for notes in zip_longest(*(notes for _, notes in notes_by_rank), fillvalue=nothing):
        if any(call != notes[0][0] for call, _ in notes):
            forget_meetings(mesh)
            by_call: dict[str, tuple[str, list[int]]] = {}
            for (call, place), (rank, _) in zip(notes, notes_by_rank, strict=True):
                by_call.setdefault(call, (place, []))[1].append(rank)
            each = [
                f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}: {call}{', ' * bool(place)}{place}"
                for call, (place, ranks) in by_call.items()
            ]
            raise RanksDifferError(
                f"the ranks do different things with tiles of {mesh} {found_at}: {'; '.join(each)}; every rank must "
                "call the same functions, with plain tensors and numbers that are alike: seed the ranks alike "
                "(torch.manual_seed, random.seed), draw on the tile (torch.randn_like(tile)), branch on global values, "
                "change tiles by torch's functions; what one rank alone computes for a log is computed of tile.local"
            )


def compare_parameters(mesh: DeviceMesh, named: Sequence[tuple[str, int, Sequence[str]]]) -> None:
    """Compare parameters (name, checksum of the local part, axes along which it is the same) over the ranks of the
    mesh.

    *Raises*: `RanksDifferError` on every rank, with the name of the first that differs and the ranks.
    """
    names = [name for name, _ in axes_of_mesh(mesh)]
    own_sums: list[tuple[tuple[int, ...], int]] = []
    for _, checksum, axes in named:
        off = tuple(c for a, c in zip(names, mesh_coordinate(mesh), strict=True) if a not in axes)
        own_sums.append((off, checksum))
    every = _told_by_all(mesh, (job_rank(), own_sums))
    for at, (name, _, _) in enumerate(named):
        first: dict[Any, tuple[int, int]] = {}
        for rank, sums in every:
            off, checksum = sums[at]
            other, first_sum = first.setdefault(off, (rank, checksum))
            if first_sum != checksum:
                # drop notes of calls with that parameter, which differ for the same reason
                _this_thread.notes.pop(mesh, None)
                forget_meetings(mesh)
                raise RanksDifferError(
                    f"parameter {name!r} differs between rank {other} and rank {rank}, which must hold it alike: look "
                    "for an optimizer or an initialization that depends on the rank, or a gradient that was changed "
                    "on some ranks (clip by jigsaw.clip_grad_norm_)"
                )


def told_by_ranks(mesh: DeviceMesh, axes: str | Sequence[str], value: Any, kind: str) -> list[Any]:
    """Return the values of every rank along `axes`, in mesh order; `kind` is the name of the wait for them.

    *Sends*: `value`, pickled, to each of them, not counted.
    """
    values = [value]
    for group, ranks in reversed(groups_along(mesh, axes)):
        parts: list[Any] = [None] * group.size()
        with OpenWait(kind, ranks):
            dist.all_gather_object(parts, values, group=group)
        values = [each for part in parts for each in part]
    return values


def _told_by_all(mesh: DeviceMesh, value: Any) -> list[Any]:
    """Return the values of every rank of the mesh, in the order of ranks."""
    axes = [name for name, _ in axes_of_mesh(mesh)]
    return sorted(told_by_ranks(mesh, axes, value, "the comparison of JIGSAW_DEBUG"), key=lambda each: each[0])


def _described(call: Any) -> str:
    rank, number, (what, function), (_, shape), where, _ = call
    of = f" of a local shape {list(shape)}" if shape else ""
    return f"rank {rank}, message {number}: {what}{of} in {function}, {where}"
