"""``JIGSAW_DEBUG=1``: before every message the ranks compare what they are about to do.

Every rank of a mesh runs the same program, so the n-th message of each is the same call on the same global shapes.  A
branch on local values, a step that one rank skips, another order or an argument that depends on the rank break this,
and show as a wait until the time-out, far from the place.  Here each rank says before a message which call it makes,
out of which function, module and line; where they differ, all of them raise, with the places of both.

Four ranks, of which rank 2 skips a layer: at the message where they first differ it tells the others "all_reduce in
mse_loss, train.py:31", and they tell it "exchange in conv2d, UNet > Conv2d, model.py:12".  Each compares all four and
names the first that differs from the first rank.

Off (the default), it costs one look at a name.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.cut import RanksDifferError
from jigsaw.mesh import axes_of_mesh, groups_along, mesh_coordinate
from jigsaw.slab_mesh import SlabMesh

DEBUG_VARIABLE = "JIGSAW_DEBUG"
EVERY_VARIABLE = "JIGSAW_DEBUG_EVERY"

IS_DEBUGGING = os.environ.get(DEBUG_VARIABLE, "0") not in ("", "0")

_PACKAGES = (*(str(Path(where).parent) + os.sep for where in (__file__, torch.__file__)), "<")
_message_numbers: WeakKeyDictionary[DeviceMesh, int] = WeakKeyDictionary()
_DISPATCHER = "_call_handler"


def hash_interval() -> int:
    """After how many forward passes the parameters are compared: ``JIGSAW_DEBUG_EVERY``, 10 by default."""
    return max(int(os.environ.get(EVERY_VARIABLE, "10")), 1)


def compare_calls(
    mesh: DeviceMesh, kind: str, *alike: Hashable, axes: Sequence[str] = (), shape: Sequence[int] = ()
) -> None:
    """Compare, when debugging, what the ranks of the mesh are about to send.

    `alike` every rank must have alike, as layouts; the local `shape` those along `axes`.  Every rank of the mesh calls
    this, also one that will send nothing.

    *Sends*: a few hundred bytes to every other rank, not counted.
    *Raises*: `RanksDifferError` on every rank, with the places of two that differ.
    """
    if not IS_DEBUGGING or isinstance(mesh, SlabMesh) or mesh.size() == 1:
        return
    number = _message_numbers[mesh] = _message_numbers.get(mesh, 0) + 1
    function, where = _place_of_call()
    said = f"{kind} {', '.join(map(str, alike))}".strip(), function
    along = tuple(c for (name, _), c in zip(axes_of_mesh(mesh), mesh_coordinate(mesh), strict=True) if name not in axes)
    mine = dist.get_rank(), number, said, (along, tuple(shape)), where
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
    """Compare parameters (name, checksum of the local part, axes along which it is alike) over the ranks of the mesh.

    *Raises*: `RanksDifferError` on every rank, with the name of the first that differs and the ranks.
    """
    names = [name for name, _ in axes_of_mesh(mesh)]
    mine: list[tuple[tuple[int, ...], int]] = []
    for _, checksum, axes in named:
        off = tuple(c for a, c in zip(names, mesh_coordinate(mesh), strict=True) if a not in axes)
        mine.append((off, checksum))
    every = _told_by_all(mesh, (dist.get_rank(), mine))
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
    """What every rank of the mesh says, in mesh order."""
    said = [mine]
    for group, _ in reversed(groups_along(mesh, [name for name, _ in axes_of_mesh(mesh)])):
        parts: list[Any] = [None] * group.size()
        dist.all_gather_object(parts, said, group=group)
        said = [each for part in parts for each in part]
    return sorted(said, key=lambda each: each[0])


def _described(told: Any) -> str:
    rank, number, (what, function), (_, shape), where = told
    of = f" of a local shape {list(shape)}" if shape else ""
    return f"rank {rank}, message {number}: {what}{of} in {function}, {where}"


# -- where a call comes from ------------------------------------------------------------------------------------------


def is_of_packages(file: str) -> bool:
    """Whether a file is one of jigsaw's or torch's, or none."""
    return file.startswith(_PACKAGES)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place_of_call() -> tuple[str, str]:
    """The torch function that is under way, and the modules and the line that called it."""
    # innermost first: the last dispatch that is found is the function that was called on tiles, the first module the
    # innermost, and the first frame outside jigsaw and torch the line of the caller's
    function, modules, line = "", list[str](), ""
    for frame in _frames():
        code = frame.f_code
        if code.co_name == _DISPATCHER and not line:
            called = frame.f_locals.get("function")
            function = getattr(called, "__name__", str(called))
        if code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module):
            modules.append(type(frame.f_locals["self"]).__name__)
        if not line and not is_of_packages(code.co_filename):
            line = f"{code.co_filename}:{frame.f_lineno}"
    if torch._C._current_graph_task_id() != -1:  # pyright: ignore[reportPrivateUsage]
        return "the backward pass", line or "called by autograd"
    return function or "no function of tiles", " > ".join([*reversed(modules), line])
