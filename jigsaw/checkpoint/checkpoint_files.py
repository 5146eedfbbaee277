"""Files of a checkpoint: tensors as torch's distributed checkpoints have them, written and read by all ranks.

A checkpoint of others cannot run code, because its files are read as JSON, and tensors by
``torch.load(weights_only=True)``.  Torch's ``.metadata``, a pickle, is written for torch's own tools and not read.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.storage import WriteResult

from jigsaw import comm
from jigsaw.checkpoint.checkpoint_folder import (
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
    index_as_json,
    index_from_json,
    index_from_torch,
    torch_index_of,
)
from jigsaw.comm.agreement import decide_on_first_rank
from jigsaw.drafts import open_unlinked, path_of_draft
from jigsaw.errors import CheckpointError

T = TypeVar("T")
_AT_ONCE = 1 << 24


def fail_together(work: Callable[[], T], of_first: bool = False, what: str = "") -> T:
    """Return the result of `work` on this rank; where it fails on any rank, raise the first such rank's error on all.

    With `of_first` only the first rank works, and all have its result.  `what` precedes errors of the system.

    *Sends*: the message of a failure, to all ranks; `of_first`, the result.
    """
    result, failure = None, None
    is_idle = of_first and dist.is_initialized() and dist.get_rank() != 0
    try:
        result = None if is_idle else work()
    except CheckpointError as e:
        failure = e
    except Exception as e:  # other ranks wait for this one, whatever it failed with
        reason = str(e) if isinstance(e, OSError) and str(e) else repr(e)
        failure = CheckpointError(f"{what}: {reason}" if what else reason)
        failure.__cause__ = e
    outcome = "" if failure is None else str(failure), result if of_first else None
    every = comm.all_gather_in_job(outcome)
    message = next((why for why, _ in every if why), None)
    if message is not None:
        raise CheckpointError(message) from failure
    return every[0][1] if of_first else result  # pyright: ignore[reportReturnType]


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
    """Record of what a rank has written: where each piece lies, and its files."""

    pieces: list[WriteResult]
    sums: dict[str, FileSum]


class PlannedTensors:
    """The part of the tensors of all ranks that this one writes: planned by all together, written by each alone.

    For equal tensors torch's planner lets one rank write, and gives each rank about as many bytes.  Making the plan is
    collective.

    *Sends*: plans, but no tensors.
    *Raises*: `CheckpointError` on every rank, where any cannot plan.
    """

    def __init__(self, part: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self._writer, self._planner, self._index = _TensorWriter(part), _CopyingPlanner(), None
        self._index_path = part / TENSOR_INDEX_FILE
        self._writer.fs = self._files = _SummingFileSystem()
        what = f"the tensors of {path_of_draft(part) or part} cannot be written"
        plan = decide_on_first_rank(lambda: self._local_plan(tensors), self._global_plans, what, CheckpointError)
        self._plan = self._planner.finish_plan(plan)

    def _local_plan(self, tensors: Mapping[str, torch.Tensor]) -> dcp.SavePlan:
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        self._planner.set_up_planner(dict(tensors), self._writer.storage_meta(), is_first)
        self._writer.set_up_storage_writer(is_first)
        return self._writer.prepare_local_plan(self._planner.create_local_plan())

    def _global_plans(self, plans: list[dcp.SavePlan]) -> list[dcp.SavePlan]:
        plans, self._index = self._planner.create_global_plan(plans)
        return self._writer.prepare_global_plan(plans)

    def copy(self) -> int:
        """Copy what this rank writes, so that the tensors may change before; return the bytes of the copies."""
        return self._planner.keep_copies(self._plan)

    def write(self) -> WrittenTensors:
        """Write this rank's part; it sends nothing."""
        pieces = self._writer.write_data(self._plan, self._planner).wait()
        return WrittenTensors(pieces, dict(self._files.sums))

    def write_index(self, written: Sequence[WrittenTensors]) -> dict[str, FileSum]:
        """Write the index of what all ranks have written, ours and torch's, on the first rank; return all files."""
        assert self._index is not None
        self._writer.finish(self._index, [each.pieces for each in written])
        ours = write_new_file(self._index_path, index_as_json(self._index))
        sums = {name: each for rank in written for name, each in rank.sums.items()}
        return sums | self._files.sums | {TENSOR_INDEX_FILE: ours}


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


def open_checkpoint(final: Path) -> OpenedCheckpoint:
    """Open a checkpoint, as far as small files describe it.

    Raises: `CheckpointError` for one that does not exist or is not whole, and for a damaged or foreign file.
    """
    path = whole_checkpoint(final)
    contents = checkpoint_contents(path)
    name = contents.index_file()
    others = {each: saved for each, saved in contents.files.items() if each != name}
    _check_is_there(path, name)
    if (size := (path / name).stat().st_size) != contents.files[name].size:
        _check_sum(path / name, FileSum(size, 0), contents.files[name])
    raw = read_regular_file(path / name, size)
    _check_sum(path / name, FileSum(len(raw), zlib.crc32(raw)), contents.files[name])
    try:
        tensors = (index_from_torch if name == TORCH_INDEX_FILE else index_from_json)(raw, others)
    except Exception as e:  # bytes that are not an index may raise anything
        raise CheckpointError(f"{path / name} is no index of tensors: {e}") from e
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
    """Fill the tensors of `state`, each rank its own rows."""
    if state:
        with torch_failures_named(f"the tensors of {checkpoint.path}"):
            reader = _TensorReader(checkpoint.path, torch_index_of(checkpoint.tensors, state))
            dcp.load(dict(state), storage_reader=reader, no_dist=not dist.is_initialized())


class _TensorReader(dcp.FileSystemReader):
    """Torch's reader, with an index that was read already: its own method is `pickle.load`."""

    def __init__(self, path: Path, index: Metadata) -> None:
        super().__init__(path)
        self._index = index

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        self._index.storage_meta = StorageMeta(load_id=self.load_id)
        return self._index


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
