"""Sinks, which formats offer to a writer, and boxes on their way to them: a failure on one rank fails on all."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm.agreement import decide_on_first_rank
from jigsaw.comm.exchange import PackedSwap
from jigsaw.errors import ReadError, WriteError, writing_to
from jigsaw.geometry.cut import Box, box_shape, box_slices
from jigsaw.io.rank_results import results_of_ranks
from jigsaw.io.writing.outline import AppendOutline, GrowingStore, StoredArrays, StoredCoordinates, TileSource
from jigsaw.io.writing.write_units import WriteUnit, plan_units, write_rounds
from jigsaw.ranks.job_groups import host_group
from jigsaw.ranks.mesh import axes_of_mesh, job_patience, mesh_coordinate, ranks_along
from jigsaw.ranks.model_world import job_size

T = TypeVar("T")
_WRITER_THREADS = 4
_SHOWN_LETTERS = 200
# one thread for all writers of a process, so that the messages about their stores have one order on every rank
_behind_steps = ThreadPoolExecutor(1, thread_name_prefix="jigsaw-write")
# A program that ends without `close` still writes its last step. `atexit` would be too late, because by then no pool of
# threads takes work, not zarr's either: what is registered here runs before that.
threading._register_atexit(_behind_steps.shutdown)  # pyright: ignore[reportAttributeAccessIssue]


APPEND_DIM_ATTRIBUTE, COMPLETE_ATTRIBUTE, CLOSED_ATTRIBUTE = "jigsaw_append_dim", "jigsaw_complete", "jigsaw_closed"


@dataclass(frozen=True)
class StoreCompleteness:
    """Completeness of a store: whole steps along the dim that grows, and whether its writer came to its end."""

    append_dim: str | None
    steps: int
    closed: bool

    def attrs(self) -> dict[str, Any]:
        grows = {} if self.append_dim is None else {APPEND_DIM_ATTRIBUTE: self.append_dim}
        return {**grows, COMPLETE_ATTRIBUTE: self.steps, CLOSED_ATTRIBUTE: int(self.closed)}


def completeness_from_attrs(attrs: Mapping[str, Any]) -> StoreCompleteness | None:
    """Return the completeness in a store's attributes; None for a store that jigsaw did not write."""
    if COMPLETE_ATTRIBUTE not in attrs:
        return None
    dim = attrs.get(APPEND_DIM_ATTRIBUTE)
    return StoreCompleteness(
        None if dim is None else str(dim), int(attrs[COMPLETE_ATTRIBUTE]), bool(attrs.get(CLOSED_ATTRIBUTE, 0))
    )


def part_path(path: Path) -> Path:
    """Return where a file grows, unseen by others, until it is whole."""
    return path.with_name(f"{path.name}.part")


class FormatSink(Protocol):
    """One format.

    The first rank calls `find` or `create`, `check_untouched` and `commit`; every rank that writes calls `attach`,
    `put` and `close`.
    """

    path: Path

    @property
    def remedy(self) -> str:
        """Advice for when writing failed."""
        ...

    @property
    def writers(self) -> tuple[int, ...]:
        """The only mesh positions that write; empty where every rank may."""
        ...

    def find(self, append_dim: str) -> GrowingStore | None:
        """Return the existing store to append to, if any."""

    def stored_steps(self, append_dim: str) -> int:
        """Return the number of steps that `find` would find; any rank may ask, and nothing is changed."""
        ...

    def create(self, arrays: StoredArrays, coords: StoredCoordinates, attrs: Mapping[str, Any], replace: bool) -> None:
        """Make a store without a complete step."""

    def attach(self, arrays: StoredArrays) -> None:
        """Get ready to write boxes of arrays of these shapes, those of the whole store."""

    def put(self, name: str, box: Box, block: NDArray[Any]) -> None:
        """Write one box; nobody else writes to its units."""

    def check_untouched(self) -> None:
        """Raise `WriteError` where another writer has changed or removed the store since this sink's last commit."""

    def commit(self, coords: StoredCoordinates, start: int, done: StoreCompleteness) -> None:
        """Say that everything up to here is complete; `coords` are written, those that grow from step `start` on."""

    def close(self, done: bool) -> None:
        """Let go of the store; `done` when nothing failed."""


S = TypeVar("S", bound=FormatSink)
P = ParamSpec("P")


def failing_with_remedy(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Wrap a method of a sink so that each failure is a `WriteError` that names the store and the sink's remedy."""

    @wraps(method)
    def wrapped(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        with writing_to(self.path, self.remedy):
            return method(self, *args, **kwargs)

    return wrapped


def reading_growing_store(method: Callable[Concatenate[S, P], T]) -> Callable[Concatenate[S, P], T]:
    """Wrap a method of a sink that only reads, so that a store that cannot be read is a `WriteError` that names it."""

    @wraps(method)
    def wrapped(self: S, *args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return method(self, *args, **kwargs)
        except (OSError, ValueError, KeyError) as e:  # errors of netCDF4, and of zarr for groups and metadata
            raise WriteError(f"{self.path} cannot be read as a store to append to: {e}") from e

    return wrapped


def listed_coordinates(attrs: Iterable[Mapping[str, Any]]) -> set[str]:
    """Return the coordinates that the ``coordinates`` attributes of arrays name."""
    return {name for each in attrs for name in str(each.get("coordinates", "")).split()}


def gather_results(mesh: DeviceMesh, step: Callable[[], T]) -> list[T]:
    """Return what `step` returned on every rank, in mesh order; when it failed on any, all raise.

    *Sends*: the pickled result of `step`, to each of the other ranks.
    """
    return _hear_or_refuse(mesh, lambda: results_of_ranks(mesh, step, WriteError))


def agreed_arguments(mesh: DeviceMesh, tell: Callable[[], tuple[T, Mapping[str, Any]]]) -> list[T]:
    """Return the value that each rank tells, in mesh order, once the facts that it tells are the same on all.

    *Sends*: the pickled value and a digest of each fact, to each of the other ranks; facts that differ follow.
    *Raises*: `WriteError` on every rank, naming facts that differ; what `tell` raises on any.
    """
    values, different = _values_and_differences(mesh, tell)
    _refuse_differences(different)
    return values


def agreed_outline(mesh: DeviceMesh, steps: int, describe: Callable[[], AppendOutline]) -> AppendOutline:
    """Return the outline that every rank describes, once it is known to be the same on all, as are their `steps`."""

    def tell() -> tuple[None, Mapping[str, Any]]:
        outlines.append(describe())
        return None, {"outline": outlines[0].digest(), "Writer.steps": steps}

    outlines: list[AppendOutline] = []
    _, different = _values_and_differences(mesh, tell)
    if set(different) == {"outline"}:
        raise WriteError(
            "the ranks describe different arrays or coordinates; give each the same names, coordinates and options"
        )
    _refuse_differences(different)
    return outlines[0]


def _values_and_differences(
    mesh: DeviceMesh, tell: Callable[[], tuple[T, Mapping[str, Any]]]
) -> tuple[list[T], dict[str, list[str]]]:
    """Return the value of each rank, and each fact that is not the same on all, as text by rank."""
    texts: dict[str, str] = {}

    def value_and_digests() -> tuple[T, dict[str, bytes]]:
        value, facts = tell()
        texts.update({name: repr(fact) for name, fact in facts.items()})
        return value, {name: hashlib.sha256(text.encode()).digest()[:8] for name, text in texts.items()}

    every = gather_results(mesh, value_and_digests)
    digests = [each for _, each in every]
    names = dict.fromkeys(name for each in digests for name in each)
    different = [name for name in names if len({each.get(name) for each in digests}) > 1]
    shown = gather_results(mesh, lambda: {n: texts.get(n, "nothing") for n in different}) if different else []
    return [value for value, _ in every], {name: [each[name] for each in shown] for name in different}


def _refuse_differences(different: Mapping[str, Sequence[str]]) -> None:
    if not different:
        return
    lines: list[str] = []
    for name, texts in different.items():
        other = next(place for place, text in enumerate(texts) if text != texts[0])
        shown = [text if len(text) <= _SHOWN_LETTERS else f"{text[:_SHOWN_LETTERS]}…" for text in texts]
        lines.append(f"{name} is {shown[0]} at place 0 of the mesh and {shown[other]} at place {other}")
    raise WriteError(f"the ranks write different things: {'; '.join(lines)}; give every rank the same")


def _hear_or_refuse(mesh: DeviceMesh, talk: Callable[[], T]) -> T:
    """Return what `talk` returns; where another rank has ended, a `WriteError` on those that wait for it."""
    try:
        return talk()
    except RuntimeError as error:
        if mesh.size() == 1 or isinstance(error, ReadError):
            raise
        raise WriteError(f"another rank ended while they were writing together: {error}") from error


WriteJob = Callable[[], None]


def deliver_boxes(
    source: TileSource,
    mesh: DeviceMesh,
    sink: FormatSink,
    dim: str | None,
    done: int,
    budget: int,
    later: list[WriteJob] | None = None,
) -> None:
    """Bring every box of a tile to the rank that writes it, and write; `done` rows along `dim` are there already.

    With `later`, what this rank writes in the last round is copied, and a job that writes it is added there.

    *Sends*: the boxes of units that another rank writes, in the tile's dtype, a message a pair of ranks and round.
    *Raises*: `WriteError` on every rank when writing fails on any.
    """
    target, layout = source.target(), source.tile.layout
    whole = source.phase(dim, done)
    # the first unit may be begun already: `phase` of its rows are there, and boxes count from where it begins, `base`
    phase = tuple(n % u for n, u in zip(whole, target.units, strict=True))
    units = plan_units(layout, target, phase, sink.writers)
    base = [n - p for n, p in zip(whole, phase, strict=True)]
    itemsize = max(source.tile.local.element_size(), np.dtype(source.array.dtype).itemsize)
    me = layout.index(mesh_coordinate(mesh))
    threads = 1 if sink.writers else _WRITER_THREADS
    rounds = list(write_rounds(units, max(1, budget // itemsize)))
    with ThreadPoolExecutor(threads) as pool:
        for number, batch in enumerate(rounds, start=1):
            moved = _hear_or_refuse(mesh, lambda batch=batch: _swap_round(source, batch, mesh, me))
            own_units = [unit for unit in batch if unit.writer == me]
            if later is not None and number == len(rounds):
                # a copy that fails is raised by the job, which tells the other ranks
                copies = [pool.submit(_block_of_unit, source, unit, base, moved) for unit in own_units]
                later.append(partial(_put_blocks, source.array.name, copies, sink, threads))
                return  # once all are copied
            jobs = [pool.submit(_write_unit, source, unit, base, moved, sink) for unit in own_units]
            # if a rank's disk is full, all end here, before the next round's swap would wait for it
            gather_results(mesh, lambda jobs=jobs: _raise_first_failure(jobs))


class PendingStep:
    """Step that a thread writes behind the next one: `jobs` write this rank's blocks, then `commit` runs on the first.

    The ranks hear of each other in a group of their own.  On a group of the model their messages would mix with its
    own, differently on each rank.  A program that ends waits for the thread.
    """

    def __init__(self, path: Path, mesh: DeviceMesh, jobs: Sequence[WriteJob], commit: WriteJob) -> None:
        group = host_group("writes", job_patience()) if job_size() > 1 else None
        what = f"{path} could not be written behind a step"
        self._mesh, put, then = mesh, partial(_run_each, jobs), partial(_committed, commit)
        self._written = _behind_steps.submit(decide_on_first_rank, put, then, what, WriteError, group)

    def wait(self) -> None:
        """Return once the step is complete.  Raises: `WriteError` on every rank, where it failed on any."""
        _hear_or_refuse(self._mesh, self._written.result)


def check_mesh_of_all_ranks(mesh: DeviceMesh, path: Path) -> None:
    """Raise `WriteError` for a mesh of which no step can be written behind the next."""
    ranks = ranks_along(mesh, [name for name, _ in axes_of_mesh(mesh)])
    if ranks != tuple(range(job_size())):
        raise WriteError(
            f"wait=False with {path}: the thread talks in a group of all {job_size()} ranks of the job in their order, "
            f"and the tiles lie on the ranks {list(ranks)}; leave wait=False out, or write tiles of a mesh of all ranks"
        )


def _run_each(jobs: Sequence[WriteJob]) -> None:
    for job in jobs:
        job()


def _committed(commit: WriteJob, ranks: list[None]) -> list[None]:
    commit()
    return ranks


def _swap_round(source: TileSource, batch: Sequence[WriteUnit], mesh: DeviceMesh, me: int) -> dict[Box, Tensor]:
    """Return the boxes that this rank must write in one round, its own and those of others, by where they lie."""
    local, owned = source.tile.local, source.tile.layout.owned(mesh_coordinate(mesh))
    sends: dict[int, list[Tensor]] = {}
    receives: dict[int, list[Box]] = {}
    ready: dict[Box, Tensor] = {}
    for unit in batch:
        for part in unit.parts:
            if part.giver == me:
                rows = local[box_slices(part.taken, owned)]
                if unit.writer == me:
                    ready[part.taken] = rows
                else:
                    sends.setdefault(unit.writer, []).append(rows)
            elif unit.writer == me:
                receives.setdefault(part.giver, []).append(part.taken)
    # both ranks of a pair go through the units in one order, so boxes are packed in that order
    shapes = [(giver, [box_shape(box) for box in boxes]) for giver, boxes in receives.items()]
    swap = PackedSwap(mesh, sorted(sends.items()), shapes, local, "write")
    return ready | dict(zip((box for boxes in receives.values() for box in boxes), swap.wait(), strict=True))


def _write_unit(
    source: TileSource, unit: WriteUnit, base: Sequence[int], moved: dict[Box, Tensor], sink: FormatSink
) -> None:
    sink.put(source.array.name, *_block_of_unit(source, unit, base, moved))


def _block_of_unit(
    source: TileSource, unit: WriteUnit, base: Sequence[int], moved: dict[Box, Tensor]
) -> tuple[Box, NDArray[Any]]:
    """Return where a unit lies in the array, and a copy of its values."""
    block: NDArray[Any] = np.empty(box_shape(unit.box), source.array.dtype)
    if not unit.is_full:
        block[...] = source.array.fill
    for part in unit.parts:
        rows = moved[part.taken].reshape(box_shape(part.placed))
        rows = rows.cpu().resolve_conj().resolve_neg()
        values = (rows.float() if rows.dtype == torch.bfloat16 else rows).numpy()
        block[box_slices(part.placed)] = source.array.stored_values(values)
    box = tuple((a + n, b + n) for (a, b), n in zip(unit.box, base, strict=True))
    if source.dropped is not None:
        block, box = block.squeeze(source.dropped), (*box[: source.dropped], *box[source.dropped + 1 :])
    return box, block


def _put_blocks(name: str, copies: Sequence[Future[tuple[Box, NDArray[Any]]]], sink: FormatSink, threads: int) -> None:
    blocks = [copy.result() for copy in copies]
    with ThreadPoolExecutor(threads) as pool:
        _raise_first_failure([pool.submit(sink.put, name, box, block) for box, block in blocks])


def _raise_first_failure(jobs: Sequence[Future[None]]) -> None:
    for error in [job.exception() for job in jobs]:
        if error is not None:
            raise error
