"""Files of a checkpoint: tensors as torch's distributed checkpoints have them, written and read by all ranks.

A checkpoint of others cannot run code, because its files are read as JSON, and tensors by
``torch.load(weights_only=True)``.  Torch's ``.metadata``, a pickle, is written for torch's own tools and not read.
"""

from __future__ import annotations

import io
import os
import secrets
import zlib
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.tensor import DTensor

from jigsaw.checkpoint.checkpoint_folder import (
    CheckpointContents,
    FileSum,
    checkpoint_contents,
    read_regular_file,
    whole_checkpoint,
    write_new_file,
)
from jigsaw.checkpoint.checkpoint_index import (
    TENSOR_INDEX_FILE,
    TORCH_INDEX_FILE,
    TensorIndex,
    count_pieces,
    file_of_rank,
    index_as_json,
    index_from_json,
    index_from_torch,
    listed_tensors,
    torch_index_of,
    whole_torch_index,
)
from jigsaw.checkpoint.parted_tensors import boxes_of_rank, with_parts_apart
from jigsaw.checkpoint.piece_places import PiecePlaces, append_places, read_places
from jigsaw.checkpoint.piece_writers import PieceWriters, kinds_of_tensors
from jigsaw.comm.agreement import (
    decide_on_first_rank,
    first_rank_where,
    is_alike_in_job,
    told_by_rank,
    told_in_job_where_different,
)
from jigsaw.drafts import open_unlinked, path_of_draft
from jigsaw.errors import CheckpointError

T = TypeVar("T")
_AT_ONCE = 1 << 24


def fail_together(work: Callable[[], T], of_first: bool = False, what: str = "") -> T:
    """Return the result of `work` on this rank; where it fails on any rank, raise the first such rank's error on all.

    With `of_first` only the first rank works, and all have its result.  `what` precedes errors of the system.

    *Sends*: an all-reduce of 8 bytes, and the message of a failure down a tree; `of_first`, the result, down a tree.
    """
    result, failure = None, None
    is_idle = of_first and dist.is_initialized() and dist.get_rank() != 0
    try:
        result = None if is_idle else work()
    except CheckpointError as e:
        failure = e
    except Exception as e:  # other ranks wait for this one, so any error must be handed on
        reason = str(e) if isinstance(e, OSError) and str(e) else repr(e)
        failure = CheckpointError(f"{what}: {reason}" if what else reason)
        failure.__cause__ = e
    message = "" if failure is None else str(failure)
    if of_first:
        message, result = told_by_rank((message, result), 0)
    else:
        first_failed = first_rank_where(bool(message))
        message = "" if first_failed is None else told_by_rank(message, first_failed)
    if message:
        raise CheckpointError(message) from failure
    return result  # pyright: ignore[reportReturnType]


def check_same_arguments(path: Path, **others: Any) -> None:
    """Refuse a name of a checkpoint, or another argument, that differs between the ranks of the job.

    Folders may be mounted elsewhere on other hosts, so the name alone is compared.

    *Sends*: an all-reduce of 32 bytes; where ranks differ, their arguments.
    """
    every = told_in_job_where_different("checkpoint", {"path": path.name, **others})
    for argument in every[0] if every else ():
        values = [theirs[argument] for theirs in every]
        rank = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if rank is not None:
            raise CheckpointError(
                f"{argument}= is {values[0]!r} on rank 0 of the job and {values[rank]!r} on rank {rank}; give every "
                "rank the same: a name with a time or a number of the rank in it is made on one and told to all"
            )


def check_readable_in_place(tensors: Mapping[str, Any]) -> None:
    """Refuse tensors without memory, and those of which several elements lie at one place, before any is changed."""
    for name, x in tensors.items():
        local = x.to_local() if isinstance(x, DTensor) else x
        if local.is_meta:
            raise CheckpointError(
                f"{name!r} of shape {tuple(local.shape)} is on the device meta, where it has no memory to read into; "
                "call model.to_empty(device=...) before"
            )
        if local.numel() and any(n > 1 and step == 0 for n, step in zip(local.shape, local.stride(), strict=True)):
            raise CheckpointError(
                f"{name!r} of shape {tuple(local.shape)} is expanded: several of its elements are one in memory, so it "
                "cannot be read in place; make it x.contiguous() before it becomes a buffer or a weight"
            )


# -- writing ----------------------------------------------------------------------------------------------------------


class _SummedFile(io.BufferedWriter):
    """File whose checksum is that of the bytes written to it, not of what the disk made of them."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(open_unlinked(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb"))
        self.sum = FileSum(0, 0)

    def write(self, data: Any, /) -> int:
        done = super().write(data)
        self.sum = FileSum(self.sum.size + done, zlib.crc32(data, self.sum.crc32))
        return done


class _SummingFileSystem(FileSystem):
    def __init__(self) -> None:
        self.sums: dict[str, FileSum] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _SummedFile(path) as summed:
            yield summed
        # torch writes front to back; if it ever went back, the checksum of its writes would not be the file's
        in_order = summed.sum.size == os.path.getsize(path)
        self.sums[Path(path).name] = summed.sum if in_order else _sum_of(Path(path))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _TensorWriter(dcp.FileSystemWriter):
    """Torch's writer, without the path that it wrote to in its output."""

    def storage_meta(self) -> StorageMeta | None:
        return None


class _CopyingPlanner(dcp.DefaultSavePlanner):
    """Torch's planner, which can copy what this rank writes, and then no longer needs the tensors themselves."""

    def keep_copies(self, plan: dcp.SavePlan) -> int:
        tensors = {item.index: self.lookup_object(item.index).detach() for item in plan.items}
        self._copies = {index: x.to("cpu", copy=True) for index, x in tensors.items()}
        self.state_dict = {}
        return sum(x.nbytes for x in self._copies.values())

    def lookup_object(self, index: MetadataIndex) -> Any:
        copies: dict[MetadataIndex, torch.Tensor] = getattr(self, "_copies", {})
        return copies[index] if index in copies else super().lookup_object(index)


class WrittenTensors(NamedTuple):
    """Record of what a rank has written: its files, and where pieces lie whose places the first rank has to know."""

    pieces: list[WriteResult]
    sums: dict[str, FileSum]


class _AgreedPlan(NamedTuple):
    """Plan that all ranks made together: a number of its own, and this rank's part.

    `placed` are the names of those of its tensors whose places the first rank has to know: all, where torch's index can
    have them, or else those of types that only torch's planner knows.  The first rank has the `tensors` of the index
    that are cut by rules, and the index of torch for all in `placed`.
    """

    number: str
    part: dcp.SavePlan
    placed: frozenset[str]
    tensors: TensorIndex | None
    torch_index: Metadata | None


# plans of the last two kinds of state that were saved, such as all of a run, and the weights of its best step
_agreed_plans: dict[object, _AgreedPlan] = {}
_MOST_PLANS = 2
_MOST_PIECES_FOR_TORCH = 1 << 16
"""Pieces that the first rank hears of and lists in torch's index; with more, their number decides what a save costs."""


class PlannedTensors:
    """The part of the tensors of all ranks that this one writes: planned by all together, written by each alone.

    Which ranks have which rows follows from shapes and placements, which all ranks tell each other where they differ.
    So each rank finds its own part (`PieceWriters`).  Of types that only torch's planner knows the first rank plans all
    parts.  Making the plan is collective.  The plan of the last save is taken again where no rank's names, shapes,
    types or cuts have changed since: all ranks compare the number of the plan that each would take.

    *Sends*: an all-reduce of 32 bytes; for a new plan 32 bytes more, its number, and kinds of tensors where ranks have
    different ones; plans, of types that only torch knows; no tensors.
    *Raises*: `CheckpointError` on every rank, where any cannot plan.
    """

    def __init__(self, part: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self._writer, self._planner = _TensorWriter(part), _CopyingPlanner()
        self._part, self._index_path = part, part / TENSOR_INDEX_FILE
        self._writer.fs = self._files = _SummingFileSystem()
        kind = _kind_of_state(tensors)
        agreed = None if kind is None else _agreed_plans.pop(kind, None)
        if is_alike_in_job(agreed and agreed.number) and agreed is not None:
            self._planner.state_dict = with_parts_apart(tensors)
            self._writer.set_up_storage_writer(agreed.tensors is not None)
        else:
            agreed = self._plan_anew(tensors)
        if kind is not None:
            _agreed_plans[kind] = agreed
            for oldest in [*_agreed_plans][:-_MOST_PLANS]:
                del _agreed_plans[oldest]
        self._plan = agreed

    def _plan_anew(self, tensors: Mapping[str, torch.Tensor]) -> _AgreedPlan:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        what = f"the tensors of {path_of_draft(self._part) or self._part} cannot be written"
        kinds = kinds_of_tensors(tensors)
        every = told_in_job_where_different("checkpoint", kinds) or [kinds] * ranks
        writers = PieceWriters(every)
        own = {key: x for key, x in tensors.items() if key not in kinds.tensors or writers.writes(rank, key)}
        plan = fail_together(lambda: self._local_plan(own), what=what)
        stored: list[TensorIndex] = []

        def number_plan() -> tuple[str, bool]:
            stored.append(writers.stored_tensors())
            return secrets.token_hex(8), count_pieces(stored[0]) <= _MOST_PIECES_FOR_TORCH

        number, is_small = fail_together(number_plan, of_first=True, what=what)
        index = whole_torch_index(stored[0] if is_small else {}) if stored else None
        [*_, part] = self._writer.prepare_global_plan([dcp.SavePlan([])] * rank + [plan])  # with this rank's file
        if any(each.has_others for each in every):
            part, of_others = self._plan_others(part, kinds.tensors, what)
            if index is not None and of_others is not None:
                index.state_dict_metadata |= of_others.state_dict_metadata
        placed = frozenset(tensors if is_small else tensors.keys() - kinds.tensors.keys())
        return _AgreedPlan(number, self._planner.finish_plan(part), placed, stored[0] if stored else None, index)

    def _plan_others(
        self, part: dcp.SavePlan, known: Collection[str], what: str
    ) -> tuple[dcp.SavePlan, Metadata | None]:
        """Let the first rank plan tensors that are not `known`; return this rank's part with them, and their index."""
        own = [item for item in part.items if item.index.fqn in known]
        others = [item for item in part.items if item.index.fqn not in known]
        index: list[Metadata] = []

        def plan_all(plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
            plans, index_of_all = self._planner.create_global_plan(plans)
            index.append(index_of_all)
            return plans

        shared = decide_on_first_rank(lambda: replace(part, items=others), plan_all, what, CheckpointError)
        return replace(part, items=[*own, *shared.items]), index[0] if index else None

    def _local_plan(self, tensors: Mapping[str, torch.Tensor]) -> dcp.SavePlan:
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._planner.set_up_planner(with_parts_apart(tensors), self._writer.storage_meta(), is_first)
        self._writer.set_up_storage_writer(is_first)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def copy(self) -> int:
        """Copy what this rank writes, so that the tensors may change before; return the bytes of the copies."""
        return self._planner.keep_copies(self._plan.part)

    def write(self) -> WrittenTensors:
        """Write this rank's part; it sends nothing."""
        self._files.mkdir(self._part)  # of a plan that was made for another folder
        results = self._writer.write_data(self._plan.part, self._planner).wait()
        places: dict[str, list[int]] = {}
        for each in sorted(results, key=lambda each: tuple(each.index.offset or ())):  # in the order of the grid
            places.setdefault(each.index.fqn, []).extend((each.storage_data.offset, each.storage_data.length))
        for name in {each.storage_data.relative_path for each in results}:
            self._files.sums[name] = append_places(self._part / name, places, self._files.sums[name])
        return WrittenTensors([each for each in results if each.index.fqn in self._plan.placed], dict(self._files.sums))

    def write_index(self, written: Sequence[WrittenTensors]) -> dict[str, FileSum]:
        """Write the index of what all ranks have written, ours and torch's, on the first rank; return all files."""
        tensors, index = self._plan.tensors, self._plan.torch_index
        assert tensors is not None
        assert index is not None
        sums = {name: each for rank in written for name, each in rank.sums.items()}
        index.storage_data = {piece.index: piece.storage_data for rank in written for piece in rank.pieces}
        if tensors.keys() <= index.state_dict_metadata.keys():
            self._writer.finish(index, [each.pieces for each in written])
            sums |= self._files.sums
        others = {name: each for name, each in index.state_dict_metadata.items() if name not in tensors}
        listed = listed_tensors(replace(index, state_dict_metadata=others))
        return sums | {TENSOR_INDEX_FILE: write_new_file(self._index_path, index_as_json({**tensors, **listed}))}


def _kind_of_state(tensors: Mapping[str, torch.Tensor]) -> object:
    """Return all that this rank's part of a plan follows from, but for other ranks; None for types not known here."""
    kinds: list[object] = []
    for key, x in tensors.items():
        is_cut = isinstance(x, DTensor)
        if not is_cut and type(x) not in (torch.Tensor, torch.nn.Parameter):
            return None
        with torch.no_grad():
            local = x.to_local() if is_cut else x
        about = (local.dtype, local.layout, local.requires_grad, local.is_pinned())
        kinds.append((key, type(x), x.shape, *about, (x.device_mesh, x.placements) if is_cut else None))
    place = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    return (place, *kinds)


@contextmanager
def torch_failures_named(what: str) -> Generator[None]:
    """Raise torch's error of a failed rank, which has every rank's traceback, as a `CheckpointError`."""
    try:
        yield
    except dcp.CheckpointException as e:
        rank, (failure, *_) = next(iter(e.failures.items()))
        raise CheckpointError(f"{what} cannot be read: rank {rank}: {failure!r}") from e


# -- reading ----------------------------------------------------------------------------------------------------------


class OpenedCheckpoint(NamedTuple):
    """A checkpoint that was opened: its folder, small state as JSON, files to be compared, and tensors."""

    path: Path
    state: dict[str, Any]
    files: dict[str, FileSum]
    tensors: TensorIndex


def open_together(final: Path) -> OpenedCheckpoint:
    """Open a checkpoint on every rank of the job, as far as small files describe it; the first rank reads them.

    *Sends*: the files, down a tree.
    *Raises*: `CheckpointError` for one that does not exist or is not whole, and for a damaged or foreign file.
    """
    path, contents, raw = fail_together(lambda: _small_files(final), of_first=True)
    # relative to this rank's working folder
    return fail_together(lambda: _opened(final.with_name(path.name), contents, raw))


def _small_files(final: Path) -> tuple[Path, CheckpointContents, bytes]:
    """Return the folder of a checkpoint, what its ``jigsaw.json`` says, and the index."""
    path = whole_checkpoint(final)
    contents = checkpoint_contents(path)
    name = contents.index_file()
    _check_is_there(path, name)
    if (size := (path / name).stat().st_size) != contents.files[name].size:
        _check_sum(path / name, FileSum(size, 0), contents.files[name])
    raw = read_regular_file(path / name, size)
    _check_sum(path / name, FileSum(len(raw), zlib.crc32(raw)), contents.files[name])
    return path, contents, raw


def _opened(path: Path, contents: CheckpointContents, raw: bytes) -> OpenedCheckpoint:
    name = contents.index_file()
    others = {each: saved for each, saved in contents.files.items() if each != name}
    try:
        tensors = (index_from_torch if name == TORCH_INDEX_FILE else index_from_json)(raw, others)
    except Exception as e:  # bytes that are not an index may raise any error
        raise CheckpointError(f"{path / name} is not an index of tensors: {e}") from e
    return OpenedCheckpoint(path, contents.state, others, tensors)


def check_file_share(checkpoint: OpenedCheckpoint, rank: int, ranks: int) -> None:
    """Compare this rank's share of the files of tensors with what was saved; the ranks together read each file once.

    Raises: `CheckpointError` that names the first file that differs.
    """
    names = sorted(checkpoint.files, key=lambda name: (-checkpoint.files[name].size, name))
    for name in names[rank::ranks]:
        _check_is_there(checkpoint.path, name)
        file, saved = checkpoint.path / name, checkpoint.files[name]
        size = file.stat().st_size
        _check_sum(file, _sum_of(file) if size == saved.size else FileSum(size, 0), saved)


def read_tensors(checkpoint: OpenedCheckpoint, state: dict[str, torch.Tensor]) -> None:
    """Fill the tensors of `state`, each rank its own rows.

    *Sends*: whether all have; each rank plans for itself what it reads, so that no rank hears of all.
    *Raises*: `CheckpointError` on every rank, where one cannot read.
    """

    def read() -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        try:
            _read_rows(checkpoint, dict(state))
        except Exception as e:  # files that are not tensors may raise any error
            raise CheckpointError(f"the tensors of {checkpoint.path} cannot be read: rank {rank}: {e!r}") from e

    if state:
        fail_together(read)


def _read_rows(checkpoint: OpenedCheckpoint, state: dict[str, Any]) -> None:
    apart = with_parts_apart(state)
    boxes = {name: boxes_of_rank(x) for name, x in apart.items()}

    @cache
    def places_of_rank(rank: int) -> PiecePlaces:
        return read_places(checkpoint.path / file_of_rank(rank))

    metadata = torch_index_of(checkpoint.tensors, boxes, places_of_rank)
    reader, planner = dcp.FileSystemReader(checkpoint.path), dcp.DefaultLoadPlanner()
    planner.set_up_planner(apart, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    [plan] = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    [plan] = reader.prepare_global_plan([plan])
    reader.read_data(planner.finish_plan(plan), planner).wait()


def _check_is_there(path: Path, name: str) -> None:
    if not (path / name).is_file():
        raise CheckpointError(f"{path} has no file {name!r}, which was saved with it; bring it back, or load another")


def _check_sum(file: Path, file_sum: FileSum, saved: FileSum) -> None:
    if file_sum == saved:
        return
    why = f"it has {file_sum.size} bytes and was saved with {saved.size}"
    if file_sum.size == saved.size:
        why = "its CRC-32 is not that of what was saved"
    raise CheckpointError(
        f"{file} is damaged, or of another checkpoint: {why}; bring back the one that was saved, or load another"
    )


def _sum_of(path: Path) -> FileSum:
    size, crc, memory = 0, 0, memoryview(bytearray(_AT_ONCE))
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(memory):
            size, crc = size + got, zlib.crc32(memory[:got], crc)
    return FileSum(size, crc)
