"""``JIGSAW_DEBUG=1``: the ranks compare their calls before every message.

Every rank of a mesh runs the same program, so the n-th message of each is the same call on the same global shapes.  A
branch on local values, a step that one rank skips, another order or an argument that depends on the rank break this,
and show as a wait until the time-out, far from the place.  Here each rank first tells the others its call, with its
function, module and line.  Where they differ, all of them raise, with the places of both.

Example: of four ranks, rank 2 skips a layer.  At the first different message it tells the others "all_reduce in
mse_loss, train.py:31", and they tell it "exchange in conv2d, UNet > Conv2d, model.py:12".  Each compares all four and
names the first that differs from the first rank.

When off (the default), it costs one read of a name.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Hashable, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.call_places import place_of_call
from jigsaw.cut import RanksDifferError
from jigsaw.mesh import axes_in_mesh_order, axes_of_mesh, groups_along, mesh_coordinate
from jigsaw.model_world import job_rank
from jigsaw.slab_mesh import SlabMesh
from jigsaw.waiting_ranks import OpenWait

DEBUG_VARIABLE = "JIGSAW_DEBUG"
EVERY_VARIABLE = "JIGSAW_DEBUG_EVERY"

IS_DEBUGGING = os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")


class _SilentThread(threading.local):
    is_silent = False


_this_thread = _SilentThread()


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
    return max(int(os.environ.get(EVERY_VARIABLE, "10")), 1)


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
    said = f"{kind} {', '.join(map(str, alike))}".strip(), function
    names = axes_in_mesh_order(mesh, axes)
    here = zip(axes_of_mesh(mesh), mesh_coordinate(mesh), strict=True)
    along = tuple(c for (name, _), c in here if name not in names)
    mine = job_rank(), number, said, (along, tuple(shape)), where
    every = _told_by_all(mesh, mine)
    shapes = {theirs[3][0]: theirs for theirs in reversed(every)}
    for theirs in every:
        for other, asked in ((every[0], slice(1, 3)), (shapes[theirs[3][0]], slice(3, 4))):
            if theirs[asked] != other[asked]:
                raise RanksDifferError(
                    f"the ranks do different things at message {min(theirs[1], other[1])} of {mesh}: "
                    f"{_described(other)}; {_described(theirs)}; every rank must make the same calls in the same "
                    "order, with the same arguments: look for a branch on local values or on the rank"
                )


def compare_parameters(mesh: DeviceMesh, named: Sequence[tuple[str, int, Sequence[str]]]) -> None:
    """Compare parameters (name, checksum of the local part, axes along which it is the same) over the ranks of the
    mesh.

    *Raises*: `RanksDifferError` on every rank, with the name of the first that differs and the ranks.
    """
    names = [name for name, _ in axes_of_mesh(mesh)]
    mine: list[tuple[tuple[int, ...], int]] = []
    for _, checksum, axes in named:
        off = tuple(c for a, c in zip(names, mesh_coordinate(mesh), strict=True) if a not in axes)
        mine.append((off, checksum))
    every = _told_by_all(mesh, (job_rank(), mine))
    for at, (name, _, _) in enumerate(named):
        first: dict[Any, tuple[int, int]] = {}
        for rank, sums in every:
            off, checksum = sums[at]
            other, known = first.setdefault(off, (rank, checksum))
            if known != checksum:
                raise RanksDifferError(
                    f"parameter {name!r} differs between rank {other} and rank {rank}, which must hold it alike: look "
                    "for an optimizer or an initialisation that depends on the rank, or a gradient that was changed "
                    "on some ranks (clip by jigsaw.clip_grad_norm_)"
                )


def _told_by_all(mesh: DeviceMesh, mine: Any) -> list[Any]:
    """Return the values of every rank of the mesh, in mesh order."""
    said = [mine]
    for group, ranks in reversed(groups_along(mesh, [name for name, _ in axes_of_mesh(mesh)])):
        parts: list[Any] = [None] * group.size()
        with OpenWait("the comparison of JIGSAW_DEBUG", ranks):
            dist.all_gather_object(parts, said, group=group)
        said = [each for part in parts for each in part]
    return sorted(said, key=lambda each: each[0])


def _described(told: Any) -> str:
    rank, number, (what, function), (_, shape), where = told
    of = f" of a local shape {list(shape)}" if shape else ""
    return f"rank {rank}, message {number}: {what}{of} in {function}, {where}"
