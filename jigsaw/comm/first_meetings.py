"""Plain values that every rank must have alike: a few elements are compared when they first meet a tile.

A plain tensor or number beside a tile is the whole one.  Noise that each rank draws with a seed of its own is not, and
the step goes on with wrong numbers.  So a rank folds 64 elements of each value that a tile meets for the first time
into one number.  The mark of a sum over ranks (`jigsaw.comm`) carries it, so that nothing more is sent.

Four ranks, of which rank 2 drew other noise [1, 2, 13, 6].  At the mean of the loss the marks do not add up to 0.  Each
of the four sees that, and only now do they tell each other what they met last.  The second value differs on rank 2, so
all of them raise, with the line and a few elements.

Two things make numbers differ though nothing is wrong.  One rank may meet more than the others, to plot it; and what
each rank computes for itself may differ in the last digits.  Then the ranks take up a common number and go on.

On GPUs nothing is compared, because the host would have to wait: `JIGSAW_DEBUG=1` is for them.
"""

from __future__ import annotations

import math
import sys
import threading
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm.graph_calls import lacks_values
from jigsaw.errors import RanksDifferError
from jigsaw.ranks.call_places import is_of_packages
from jigsaw.ranks.mesh import mesh_size
from jigsaw.ranks.model_world import job_rank
from jigsaw.ranks.slab_mesh import SlabMesh
from jigsaw.torch_internals.autograd import tensor_version
from jigsaw.torch_internals.dispatch import count_modes

_SAMPLE, _KEPT, _MOST_NUMBERS, _MOST_VIEWS = 64, 64, 4096, 16
_MARK = "_jigsaw_met"  # attribute of memory: versions of the tensors in it that met a tile, by shape and offset
_SAMPLED = {
    *(torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
}

numbers_met: set[Any] = set()
"""Plain numbers, and other arguments that are not tensors, which a tile met before."""


class MetValue(NamedTuple):
    """A plain value that a tile met: what it is, a few elements, and the line of the call."""

    kind: str
    sample: Any
    place: str


@dataclass
class _Meetings:
    """The meetings of a mesh in a thread: a number of all, how many since ranks had one number, and the last."""

    number: int = 0
    count: int = 0
    last: deque[MetValue] = field(default_factory=lambda: deque[MetValue](maxlen=_KEPT))

    def add(self, value: MetValue, bits: Any) -> None:
        self.number = zlib.crc32(bits, self.number)
        self.count += 1
        self.last.append(value)


class _ThreadMeetings(threading.local):
    def __init__(self) -> None:
        self.by_mesh: WeakKeyDictionary[DeviceMesh, _Meetings] = WeakKeyDictionary()


_this_thread = _ThreadMeetings()


def meet_tensor(x: Tensor, mesh: DeviceMesh) -> None:
    """Note a plain tensor beside a tile, unless it met one before as it is."""
    try:
        memory: Any = x.untyped_storage()
        version = tensor_version(x)
    except (NotImplementedError, RuntimeError):  # a tensor of torch.func, or one made in inference mode
        return
    known, view = getattr(memory, _MARK, None), (x.shape, x.storage_offset())
    if known is not None and known.get(view) == version:
        return
    if x.is_cpu and x.dtype in _SAMPLED and _is_compared(mesh):
        if known is None or len(known) >= _MOST_VIEWS:
            known = {}
            setattr(memory, _MARK, known)
        known[view] = version
        sample = torch.take(x.detach(), _sampled_places(x.numel()))
        met = MetValue(f"tensor {list(x.shape)} {x.dtype}", sample, _line_of_call())
        _meetings_of(mesh).add(met, sample.view(torch.uint8).numpy())


def meet_number(value: Any, mesh: DeviceMesh) -> None:
    """Note an argument that is not a tensor, unless a tile met it before."""
    if _is_compared(mesh):
        if len(numbers_met) >= _MOST_NUMBERS:
            numbers_met.clear()
        numbers_met.add(value)
        _meetings_of(mesh).add(MetValue(type(value).__name__, value, _line_of_call()), repr(value).encode())


def number_of_meetings(mesh: DeviceMesh) -> int:
    """Return a number of all that tiles of the mesh have met; alike on all ranks that met the same."""
    met = _this_thread.by_mesh.get(mesh)
    return 0 if met is None else met.number


def told_meetings(mesh: DeviceMesh) -> tuple[int, int, list[MetValue]]:
    """Return for the other ranks, where numbers differ, the rank, how many values it met, and the last of them."""
    met = _meetings_of(mesh)
    return job_rank(), met.count, [MetValue(kind, _as_plain(x), place) for kind, x, place in met.last]


def forget_meetings(mesh: DeviceMesh) -> None:
    """Begin anew, which all ranks of the mesh must do: once they have been told that they differ."""
    _this_thread.by_mesh.pop(mesh, None)


def settle_meetings(mesh: DeviceMesh, meetings: Sequence[tuple[int, int, list[MetValue]]], found_at: str) -> None:
    """Take up one number with those ranks that told what they met; `found_at` says where they are.

    *Raises*: `RanksDifferError` where they met the same kinds of values in the same order, and one differs by more than
    rounding.
    """
    common = zlib.crc32(repr([(rank, count) for rank, count, _ in meetings]).encode())
    _this_thread.by_mesh[mesh] = _Meetings(common)
    rank, count, first = meetings[0]
    if any((n, [met.kind for met in others]) != (count, [met.kind for met in first]) for _, n, others in meetings):
        return  # some rank met more tensors than others
    for at, value in enumerate(first):
        for other, _, others in meetings[1:]:
            if not _are_close(value.sample, others[at].sample):
                raise RanksDifferError(
                    f"a plain {value.kind} that meets a tile must be alike on every rank, but at {value.place} rank "
                    f"{rank} has {_shown(value.sample)} and rank {other} has {_shown(others[at].sample)}, at "
                    f"{others[at].place} (found at {found_at}); seed the ranks alike (torch.manual_seed, "
                    "random.seed), draw on the tile (torch.randn_like(tile)), or broadcast it from one rank"
                )


def _meetings_of(mesh: DeviceMesh) -> _Meetings:
    return _this_thread.by_mesh.setdefault(mesh, _Meetings())


def _is_compared(mesh: DeviceMesh) -> bool:
    return (
        mesh_size(mesh) > 1
        and mesh.device_type == "cpu"
        and not isinstance(mesh, SlabMesh)
        and not lacks_values()
        and count_modes() == 0  # modes may count calls
    )


@lru_cache(maxsize=1024)
def _sampled_places(size: int) -> Tensor:
    return torch.arange(min(size, _SAMPLE)) * size // max(min(size, _SAMPLE), 1)


def _line_of_call() -> str:
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and is_of_packages(frame.f_code.co_filename):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _as_plain(value: Any) -> Any:
    """Return a sample as numbers, with the rounding that is allowed: half of the digits of its dtype, because ranks may
    compute a value by other kernels.  All else is returned as a text.
    """
    if isinstance(value, Tensor):
        is_rounded = value.dtype.is_floating_point or value.dtype.is_complex
        return value.tolist(), math.sqrt(torch.finfo(value.dtype).eps) if is_rounded else 0.0
    return ([value], math.sqrt(sys.float_info.epsilon)) if isinstance(value, float) else ([repr(value)], 0.0)


def _are_close(sample: tuple[list[Any], float], other_sample: tuple[list[Any], float]) -> bool:
    (some, rounding), (others, _) = sample, other_sample
    if not rounding or len(some) != len(others):
        return some == others
    finite = [abs(x) for x in some if math.isfinite(abs(x))]
    bound = rounding * max(finite, default=0.0)
    return all(a == b or abs(a - b) <= bound or (a != a and b != b) for a, b in zip(some, others, strict=True))


def _shown(sample: tuple[list[Any], float]) -> str:
    shown = ", ".join(f"{x:.6g}" if isinstance(x, float) else str(x) for x in sample[0][:4])
    return f"{shown}, ..." if len(sample[0]) > 4 else shown
