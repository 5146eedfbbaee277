"""Boxes on their way from the tiles that own them to the ranks that write them; failures are everybody's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.io.errors import ReadError, WriteError
from jigsaw.io.writing.outline import Outline, Source
from jigsaw.io.writing.pieces import Part, Unit, plan_pieces, rounds, volume
from jigsaw.io.writing.sink import Sink
from jigsaw.layout import Box, ShardingError, slices
from jigsaw.mesh import coordinate
from jigsaw.tile import Tile

T = TypeVar("T")
_THREADS = 4


# -- one outcome -----------------------------------------------------------------------------------------------------


def together(mesh: DeviceMesh, step: Callable[[], T]) -> list[T]:
    """What `step` returned on every rank, in mesh order; when it failed on any, all raise.

    A failure that is no refusal of ours (a full disk, whatever a library raises) becomes a `WriteError` that names the
    rank.

    *Sends*: what it returned, pickled, to each of the other ranks.
    """
    value, problem = None, None
    try:
        value = step()
    except (ReadError, ShardingError, WriteError) as error:
        problem = error
    except Exception as error:  # a library may raise anything
        problem = WriteError(f"{type(error).__name__}: {error}")
        problem.__cause__ = error
    told = _heard(mesh, lambda: comm.agree(mesh, (value, None if problem is None else (type(problem), str(problem)))))
    failed = [(rank, *why) for rank, (_, why) in enumerate(told) if why is not None]
    if not failed:
        return [found for found, _ in told]
    rank, kind, text = failed[0]
    where = "" if mesh.size() == 1 or len(failed) == mesh.size() else f"rank {rank} of the mesh: "
    raise kind(f"{where}{text}") from problem


def alike(mesh: DeviceMesh, describe: Callable[[], Outline]) -> Outline:
    """What every rank describes, once it is known to be the same on all."""
    found: list[Outline] = []

    def digest() -> str:
        found.append(describe())
        return found[0].digest()

    if len(set(together(mesh, digest))) > 1:
        raise WriteError(
            "the ranks describe different arrays or coordinates; give each the same names, coordinates and options"
        )
    return found[0]


def _heard(mesh: DeviceMesh, talk: Callable[[], T]) -> T:
    """The outcome of a communication; a rank that has ended is a `WriteError` of those that wait for it."""
    try:
        return talk()
    except RuntimeError as error:
        if mesh.size() == 1:
            raise
        raise WriteError(f"another rank ended while they were writing together: {error}") from error


# -- boxes -----------------------------------------------------------------------------------------------------------


def deliver(source: Source, mesh: DeviceMesh, sink: Sink, dim: str | None, done: int, budget: int) -> None:
    """Bring every box of a tile to the rank that writes it, and write; `done` rows along `dim` are there already.

    *Sends*: the boxes of units that another rank writes, in the tile's dtype, a message a pair of ranks and round.
    *Raises*: `WriteError` on every rank when writing fails on any.
    """
    target, layout = source.target(), source.tile.layout
    whole = source.phase(dim, done)
    phase = tuple(n % u for n, u in zip(whole, target.units, strict=True))
    units = plan_pieces(layout, target, phase, sink.writers)
    base = [n - p for n, p in zip(whole, phase, strict=True)]
    itemsize = max(source.tile.local.element_size(), np.dtype(source.array.dtype).itemsize)
    me = layout.index(coordinate(mesh))
    with ThreadPoolExecutor(1 if sink.writers else _THREADS) as pool:
        for batch in rounds(units, max(1, budget // itemsize)):
            moved = _heard(mesh, lambda batch=batch: _swapped(source, batch, mesh, me))
            jobs: list[Future[None]] = []
            for unit in batch:
                if unit.writer == me:
                    jobs.append(pool.submit(_put, source, unit, base, moved, sink))
            together(mesh, lambda jobs=jobs: _finish(jobs))


def _rows(tile: Tile, owned: Box, box: Box) -> Tensor:
    """A box of this rank's own tile."""
    return tile.local[slices(box, owned)]


def _swapped(source: Source, batch: Sequence[Unit], mesh: DeviceMesh, me: int) -> dict[Box, Tensor]:
    """The boxes of one round that this rank needs to write, its own and those of others, by where they lie."""
    tile, owned = source.tile, source.tile.layout.owned(coordinate(mesh))
    sends: dict[int, list[Tensor]] = {}
    wanted: dict[int, list[Part]] = {}
    ready: dict[Box, Tensor] = {}
    for unit in batch:
        for part in unit.parts:
            if part.giver == me and unit.writer == me:
                ready[part.taken] = _rows(tile, owned, part.taken)
            elif part.giver == me:
                sends.setdefault(unit.writer, []).append(_rows(tile, owned, part.taken).reshape(-1))
            elif unit.writer == me:
                wanted.setdefault(part.giver, []).append(part)
    received = [(giver, tile.local.new_empty(sum(volume(p.taken) for p in parts))) for giver, parts in wanted.items()]
    comm.swap(mesh, [(to, torch.cat(boxes)) for to, boxes in sorted(sends.items())], received, "write").wait()
    for giver, flat in received:
        sizes = [volume(p.taken) for p in wanted[giver]]
        ready |= {p.taken: rows for p, rows in zip(wanted[giver], flat.split(sizes), strict=True)}
    return ready


def _put(source: Source, unit: Unit, base: Sequence[int], moved: dict[Box, Tensor], sink: Sink) -> None:
    """Put one unit together and write it."""
    shape = [b - a for a, b in unit.box]
    block: NDArray[Any] = np.empty(shape, source.array.dtype)
    if not unit.is_full:
        block[...] = source.array.fill
    for part in unit.parts:
        rows = moved[part.taken].reshape([b - a for a, b in part.placed])
        block[slices(part.placed)] = _numpy(rows)
    box = tuple((a + n, b + n) for (a, b), n in zip(unit.box, base, strict=True))
    if source.dropped is not None:
        block, box = block.squeeze(source.dropped), (*box[: source.dropped], *box[source.dropped + 1 :])
    sink.put(source.array.name, box, block)


def _numpy(rows: Tensor) -> NDArray[Any]:
    rows = rows.cpu().resolve_conj().resolve_neg()
    return (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()


def _finish(jobs: Sequence[Future[None]]) -> None:
    """Wait for all, then raise the first failure."""
    for error in [job.exception() for job in jobs]:
        if error is not None:
            raise error
