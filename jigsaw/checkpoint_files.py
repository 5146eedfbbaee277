"""The files of a checkpoint: torch's own, and ``jigsaw.json``, which is written last and says what all of them are.

It has the small state, and the size and CRC-32 of every file.  A checksum finds damage, and files of two checkpoints
mixed; it is no signature.  That a checkpoint of others runs no code is seen to by how its files are read: JSON, tensors
by ``torch.load(weights_only=True)``, and torch's ``.metadata``, a pickle, by an unpickler that makes nothing but what
such an index is made of.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import zlib
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata
from torch.distributed.checkpoint.storage import WriteResult

from jigsaw import comm
from jigsaw.agreement import decide_on_first_rank
from jigsaw.checkpoint_state import CheckpointError

T = TypeVar("T")
_LAST = "jigsaw.json"
_INDEX = ".metadata"
_FORMAT = 1
_AT_ONCE = 1 << 24
_OF_TORCH = "torch.distributed.checkpoint"
_IN_AN_INDEX = {
    (f"{_OF_TORCH}.metadata", name)
    for name in (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "ChunkStorageMetadata",
        "BytesStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    )
} | {(f"{_OF_TORCH}.filesystem", "_StorageInfo"), ("torch", "Size"), ("torch.serialization", "_get_layout")}


class FileSum(NamedTuple):
    """How many bytes a file has, and their CRC-32."""

    size: int
    crc32: int


def fail_together(work: Callable[[], T], of_first: bool = False) -> T:
    """What `work` returns on this rank; where it fails on any rank, all of them raise what the first such rank found.

    With `of_first` only the first rank works, and all have what it found.

    *Sends*: the message of a failure, to all ranks; `of_first`, what was found.
    """
    found, failure = None, None
    is_idle = of_first and dist.is_initialized() and dist.get_rank() != 0
    try:
        found = None if is_idle else work()
    except (CheckpointError, OSError) as e:
        failure = e
    mine = "" if failure is None else str(failure) or repr(failure), found if of_first else None
    every = comm.all_gather_in_job(mine)
    told = next((why for why, _ in every if why), None)
    if told is not None:
        raise CheckpointError(told) from failure
    return every[0][1] if of_first else found  # pyright: ignore[reportReturnType]


# -- where ------------------------------------------------------------------------------------------------------------


def part_folder(final: Path) -> Path:
    """Where a checkpoint is written before it takes its name."""
    return final.with_name(f"{final.name}.part")


def _replaced_folder(final: Path) -> Path:
    return final.with_name(f"{final.name}.part.old")


def whole_checkpoint(final: Path) -> Path:
    """The folder of a checkpoint: `final`, or what a save that was killed left before it could take that name.

    Raises: `CheckpointError` when there is none, or `final` is not whole.
    """
    if final.exists():
        if not (final / _LAST).exists():
            raise CheckpointError(
                f"the checkpoint {final} is not whole: it has no {_LAST}, which is written last; jigsaw reads what "
                "jigsaw.save of this version wrote"
            )
        return final
    left = [each for each in (part_folder(final), _replaced_folder(final)) if each.exists()]
    whole = next((each for each in left if (each / _LAST).exists()), None)
    if whole is None:
        why = f"; {left[0]} is there, but not whole: the save was ended before it had written all" if left else ""
        raise CheckpointError(f"the checkpoint {final} does not exist{why}")
    return whole


def is_whole_checkpoint(folder: Path) -> bool:
    """Whether a folder has a checkpoint with all its files, each of its size; their content is not read."""
    try:
        files = json.loads((folder / _LAST).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, (size, _) in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def begin_checkpoint(final: Path) -> None:
    """Make room for a new checkpoint; what a killed save left whole takes the name that it was to have first."""
    if not final.exists():
        left = next((each for each in (part_folder(final), _replaced_folder(final)) if (each / _LAST).exists()), None)
        if left is not None:
            left.rename(final)
    for each in (part_folder(final), _replaced_folder(final)):
        shutil.rmtree(each, ignore_errors=True)


def commit_checkpoint(final: Path, state: Mapping[str, Any], sums: Mapping[str, FileSum]) -> None:
    """Close the new checkpoint, and put it in the place of the old one.

    A kill between the two renames leaves both beside `final`, where `whole_checkpoint` and `begin_checkpoint` find
    them.
    """
    part, old = part_folder(final), _replaced_folder(final)
    content: dict[str, Any] = {"format": _FORMAT, "state": state, "files": dict(sorted(sums.items()))}
    with (part / _LAST).open("w") as out:
        json.dump({"crc32": _crc_of_json(content), **content}, out)
        out.flush()
        os.fsync(out.fileno())
    if final.exists():
        final.rename(old)
    part.rename(final)
    shutil.rmtree(old, ignore_errors=True)


def _crc_of_json(content: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps(content).encode())


# -- writing ----------------------------------------------------------------------------------------------------------


class _SummedFile(io.BufferedWriter):
    """A file whose checksum is taken of what is written to it, not of what the disk made of that."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self.sum = FileSum(0, 0)

    def write(self, data: Any, /) -> int:
        done = super().write(data)
        self.sum = FileSum(self.sum.size + done, zlib.crc32(data, self.sum.crc32))
        return done


class _SummingFileSystem(FileSystem):
    """Torch's way to files, with the checksum of each that it writes."""

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
        # torch writes front to back; if it once went back, the sum of what it wrote would not be the file's
        in_order = summed.sum.size == os.path.getsize(path)
        self.sums[Path(path).name] = summed.sum if in_order else _sum_of(Path(path))

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[Path(new_path).name] = self.sums.pop(Path(path).name)


class _TensorWriter(dcp.FileSystemWriter):
    """Torch's writer, which keeps what it writes free of the path that it wrote to."""

    def storage_meta(self) -> StorageMeta | None:
        return None


class _CopyingPlanner(dcp.DefaultSavePlanner):
    """Torch's planner, which can copy what this rank writes, and then needs the tensors themselves no more."""

    def keep_copies(self, plan: dcp.SavePlan) -> int:
        found = {item.index: self.lookup_object(item.index).detach() for item in plan.items}
        self._copies = {index: x.to("cpu", copy=True) for index, x in found.items()}
        self.state_dict = {}
        return sum(x.nbytes for x in self._copies.values())

    def lookup_object(self, index: MetadataIndex) -> Any:
        copies: dict[MetadataIndex, torch.Tensor] = getattr(self, "_copies", {})
        return copies[index] if index in copies else super().lookup_object(index)


class WrittenTensors(NamedTuple):
    """What a rank has written: where each piece lies, and its files."""

    pieces: list[WriteResult]
    sums: dict[str, FileSum]


class PlannedTensors:
    """The part of the tensors of all ranks that this one writes: planned by all together, written by each alone.

    Torch's planner has what ranks hold alike written by one of them, and gives each about as many bytes of it.  Making
    the plan is collective.

    *Sends*: plans, and no tensors.
    *Raises*: `CheckpointError` on every rank, where any cannot plan.
    """

    def __init__(self, part: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self._writer, self._planner, self._index = _TensorWriter(part), _CopyingPlanner(), None
        self._writer.fs = self._files = _SummingFileSystem()
        what = f"the tensors of {part} cannot be written"
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
        """Copy what this rank writes, so that the tensors may change before it is written; the bytes of the copies."""
        return self._planner.keep_copies(self._plan)

    def write(self) -> WrittenTensors:
        """Write this rank's part; it talks to nobody."""
        pieces = self._writer.write_data(self._plan, self._planner).wait()
        return WrittenTensors(pieces, dict(self._files.sums))

    def write_index(self, written: Sequence[WrittenTensors]) -> dict[str, FileSum]:
        """Write the index of what all ranks have written, on the first rank; the files of all."""
        assert self._index is not None
        self._writer.finish(self._index, [each.pieces for each in written])
        return {name: each for rank in written for name, each in rank.sums.items()} | self._files.sums


@contextmanager
def _as_checkpoint_error(path: Path) -> Generator[None]:
    """What torch raises on all ranks when one of them fails is no `Exception`, and has every rank's traceback."""
    try:
        yield
    except dcp.CheckpointException as e:
        rank, (failure, *_) = next(iter(e.failures.items()))
        raise CheckpointError(f"the tensors of {path} cannot be read: rank {rank}: {failure!r}") from e


# -- reading ----------------------------------------------------------------------------------------------------------


class OpenedCheckpoint(NamedTuple):
    """A checkpoint that was opened: its folder, small state as JSON, files, and the index of its tensors."""

    path: Path
    state: dict[str, Any]
    files: dict[str, FileSum]
    tensors: Metadata


def open_checkpoint(final: Path) -> OpenedCheckpoint:
    """A checkpoint, as far as small files say what it is.

    Raises: `CheckpointError` for one that is not there or not whole, and for a damaged or foreign file.
    """
    path = whole_checkpoint(final)
    try:
        told = json.loads((path / _LAST).read_text())
        crc, form = told.pop("crc32"), told["format"]
        sound = crc == _crc_of_json(told)
        state, files = dict(told["state"]), {name: FileSum(*each) for name, each in told["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{path / _LAST} is damaged: it does not say what the checkpoint has ({e!r})") from e
    if not sound or form != _FORMAT:
        why = (
            "damaged: its CRC-32 does not match" if not sound else f"of format {form}, and this jigsaw reads {_FORMAT}"
        )
        raise CheckpointError(f"{path / _LAST} is {why}")
    _check_saved_file(path, _INDEX, files.get(_INDEX, FileSum(0, 0)))
    return OpenedCheckpoint(path, state, files, _tensor_index(path, files))


def check_file_share(found: OpenedCheckpoint, rank: int, ranks: int) -> None:
    """Compare this rank's share of the files of tensors with what was saved; among all ranks each is read once.

    Raises: `CheckpointError` that names the first that differs.
    """
    names = sorted((name for name in found.files if name != _INDEX), key=lambda name: (-found.files[name].size, name))
    for name in names[rank::ranks]:
        _check_saved_file(found.path, name, found.files[name])


def read_tensors(found: OpenedCheckpoint, state: dict[str, torch.Tensor]) -> None:
    """Fill the tensors of `state`, each rank its own rows."""
    if state:
        with _as_checkpoint_error(found.path):
            dcp.load(dict(state), storage_reader=_TensorReader(found), no_dist=not dist.is_initialized())


class _TensorReader(dcp.FileSystemReader):
    """Torch's reader, with an index that was read already: its own way is `pickle.load`."""

    def __init__(self, found: OpenedCheckpoint) -> None:
        super().__init__(found.path)
        self._index = found.tensors

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        self._index.storage_meta = StorageMeta(load_id=self.load_id)
        return self._index


class _IndexUnpickler(pickle.Unpickler):
    """What an index of tensors is made of, and nothing else: a pickle may name any function, and it is then called."""

    def find_class(self, module: str, name: str, /) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if (module, name) in _IN_AN_INDEX:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors needs")


def _tensor_index(path: Path, files: Mapping[str, FileSum]) -> Metadata:
    """The index of a checkpoint's tensors, all of which lie in its own files."""
    try:
        index = _IndexUnpickler(io.BytesIO((path / _INDEX).read_bytes())).load()
        tensors = all(isinstance(each, TensorStorageMetadata) for each in index.state_dict_metadata.values())
        strays = {each.relative_path for each in index.storage_data.values()} - set(files)
    except Exception as e:  # what is no index may end in anything
        raise CheckpointError(f"{path / _INDEX} is no index of tensors: {e}") from e
    if not tensors or strays:
        why = f"files that the checkpoint does not have: {sorted(strays)[:3]}" if strays else "values that are pickled"
        raise CheckpointError(f"{path / _INDEX} names {why}")
    return index


def _check_saved_file(path: Path, name: str, saved: FileSum) -> None:
    """Raises: `CheckpointError` when a file is not the one that was saved."""
    if name != os.path.basename(name) or not (path / name).is_file():
        raise CheckpointError(f"{path} has no file {name!r}, which was saved with it; bring it back, or load another")
    here = (path / name).stat().st_size
    if here != saved.size:
        why = f"it has {here} bytes and was saved with {saved.size}"
    elif _sum_of(path / name) != saved:
        why = "its CRC-32 is not that of what was saved"
    else:
        return
    raise CheckpointError(
        f"{path / name} is damaged, or of another checkpoint: {why}; bring back the one that was saved, or load another"
    )


def _sum_of(path: Path) -> FileSum:
    size, crc, memory = 0, 0, memoryview(bytearray(_AT_ONCE))
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(memory):
            size, crc = size + got, zlib.crc32(memory[:got], crc)
    return FileSum(size, crc)
