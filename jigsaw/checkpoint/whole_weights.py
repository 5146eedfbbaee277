"""Weights of a model as one file in the format of safetensors, written and read by all ranks, each its own rows.

A file begins with the length of a header, 8 bytes. The header is JSON, with the type, shape and place of each tensor.
Then come the tensors, row-major, one behind the other (https://github.com/huggingface/safetensors).  So the place of
each row follows from names and shapes alone, which every rank knows, and no rank needs a whole weight.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from jigsaw.checkpoint.checkpoint_files import (
    check_readable_in_place,
    check_same_arguments,
    fail_together,
    torch_failures_named,
)
from jigsaw.checkpoint.checkpoint_state import CheckpointPath, checked_path, is_converted_weight, parse_strict_json
from jigsaw.checkpoint.parted_tensors import with_parts_apart
from jigsaw.checkpoint.piece_writers import PieceWriters, check_equal_copies, kinds_of_tensors
from jigsaw.comm.agreement import decide_on_first_rank, told_in_job_where_different
from jigsaw.drafts import begin_draft_file, open_unlinked
from jigsaw.errors import CheckpointError, writing_to
from jigsaw.tile.tile import Tile

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "C64": torch.complex64,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_METADATA_NAME = "__metadata__"
_AGAIN = "save again; the file that was there is as it was"
FileNames = Mapping[str, str] | Callable[[str], str]
"""Names in a file, by the model's: a function of a name, or a mapping of those that differ."""
_LONGEST_HEADER = 100_000_000  # the limit of safetensors


class _StoredWeight(NamedTuple):
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in the file


# -- out --------------------------------------------------------------------------------------------------------------


def save_weights(path: CheckpointPath, model: nn.Module, names: FileNames | None = None) -> None:
    """Write the parameters and buffers of a model to one ``.safetensors`` file, under their names.

    Each rank writes the rows that it holds; one rank writes the rows that several hold.  The file takes its name once
    it is whole.  Every rank calls this, with a `path` that all of them see.  `names` turns names of the model into
    those of the file, for example into those of a checkpoint on Hugging Face.

    *Sends*: a few all-reduces of some bytes, and kinds of tensors where ranks have different ones; no tensors.
    *Raises*: `CheckpointError` on every rank, where a state is not a tensor or has a type that such a file cannot have.
    Also for tensors that should be the same on all ranks and are not, because the file would have those of one rank.
    Also where one rank cannot write, or `path` is a file of something else. Also for `names` that the model does not
    have, or that are alike.

    >>> model = torch.nn.Linear(4, 2)
    >>> jigsaw.save_weights("model.safetensors", model)
    >>> again = torch.nn.Linear(4, 2)
    >>> jigsaw.load_weights("model.safetensors", again)
    >>> torch.equal(again.weight, model.weight)
    True
    """
    final = checked_path(path)
    check_same_arguments(final)
    tensors = fail_together(lambda: _named_in_file(_whole_state(model), names))
    check_equal_copies(tensors)
    what = f"the weights of {final} cannot be written"
    draft = final.with_name(fail_together(lambda: _begin_file(final).name, of_first=True, what=what))
    header, weights = _header_of(draft, tensors)
    is_first = not dist.is_initialized() or dist.get_rank() == 0
    planner = dcp.DefaultSavePlanner()

    def write_header() -> None:
        with writing_to(final, _AGAIN), os.fdopen(open_unlinked(draft, os.O_WRONLY), "wb") as out:
            out.write(header)
            out.truncate(len(header) + sum(_size_of(each) for each in weights.values()))

    def write_own_pieces() -> None:
        with writing_to(final, _AGAIN):
            _write_pieces(planner, own_plan, weights, draft)

    def close(done: list[None]) -> list[None]:
        draft.replace(final)
        return done

    try:
        fail_together(write_header, of_first=True, what=what)
        own_plan = _own_part(planner, tensors, what)
        decide_on_first_rank(write_own_pieces, close, what, CheckpointError)
    except CheckpointError:  # raised on every rank, so no rank writes any more
        if is_first:
            draft.unlink(missing_ok=True)
        raise


def _begin_file(final: Path) -> Path:
    """Begin a draft.

    Raises: `CheckpointError` where it would replace a file of something else; an empty file, or a link, is replaced.
    """
    if final.is_file() and not final.is_symlink() and final.stat().st_size:
        try:
            _weights_of_file(final)
        except CheckpointError as e:
            raise CheckpointError(
                f"{final} is there, and is replaced only where it is a file of weights ({e}); save to another name, or "
                "move away what is there"
            ) from e
    return begin_draft_file(final)


def _unwrapped(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    state = dict(_unwrapped(model).state_dict())
    for name, x in state.items():
        if not isinstance(x, torch.Tensor) or isinstance(x, Tile) or x.dtype not in _NAMES:
            kind = f"a {type(x).__name__}" if not isinstance(x, torch.Tensor) else f"a Tile, or of {x.dtype}"
            raise CheckpointError(
                f"{name!r} is {kind}, which a file of weights cannot have; it has plain tensors and DTensors of "
                f"{', '.join(str(each).removeprefix('torch.') for each in _NAMES)}; jigsaw.save keeps more"
            )
    return state


def _named_in_file(tensors: Mapping[str, torch.Tensor], names: FileNames | None) -> dict[str, torch.Tensor]:
    if not (names is None or isinstance(names, Mapping) or callable(names)):
        raise CheckpointError(f"names={names!r} must be names of the file by those of the model, or a function of one")
    if isinstance(names, Mapping) and (unknown := names.keys() - tensors.keys()):
        raise CheckpointError(f"names= has {sorted(unknown)[:5]}, which the model does not have; leave them out")
    renamed: dict[str, torch.Tensor] = {}
    origins: dict[str, str] = {}
    for name, x in tensors.items():
        in_file: Any = _name_in_file(name, names)
        if not isinstance(in_file, str) or in_file == _METADATA_NAME:
            raise CheckpointError(
                f"names= gives {name!r} of the model the name {in_file!r}; names in a file are texts, and "
                f"{_METADATA_NAME!r} is that of the file's own description"
            )
        if in_file in renamed:
            raise CheckpointError(
                f"names= gives {origins[in_file]!r} and {name!r} of the model one name, {in_file!r}; each has its own"
            )
        renamed[in_file], origins[in_file] = x, name
    return renamed


def _name_in_file(name: str, names: FileNames | None) -> str:
    if names is None:
        return name
    return names.get(name, name) if isinstance(names, Mapping) else names(name)


def _header_of(path: Path, tensors: Mapping[str, torch.Tensor]) -> tuple[bytes, dict[str, _StoredWeight]]:
    """Return the header of a file, its length before it, and where each tensor lies behind it."""
    entries: dict[str, Any] = {_METADATA_NAME: {"format": "pt"}}
    at = 0
    for name, x in tensors.items():
        size = math.prod(x.shape) * x.dtype.itemsize
        entries[name] = {"dtype": _NAMES[x.dtype], "shape": list(x.shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)  # so that tensors lie at multiples of 8 bytes
    header = len(text).to_bytes(8, "little") + text
    starts = {name: len(header) + entries[name]["data_offsets"][0] for name in tensors}
    return header, {n: _StoredWeight(path, x.dtype, tuple(x.shape), starts[n]) for n, x in tensors.items()}


def _own_part(planner: dcp.DefaultSavePlanner, tensors: Mapping[str, torch.Tensor], what: str) -> dcp.SavePlan:
    """Return what this rank writes.  Each rank finds its own; of types that torch alone knows the first plans all."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    kinds = kinds_of_tensors(tensors)
    every = told_in_job_where_different("whole weights", kinds) or [kinds] * ranks
    is_known, own = not any(each.has_others for each in every), tensors
    if is_known:
        writers = PieceWriters(every)
        own = {name: x for name, x in tensors.items() if writers.writes(rank, name)}

    def plan() -> dcp.SavePlan:
        planner.set_up_planner(with_parts_apart(own), None, rank == 0)
        return planner.create_local_plan()

    if is_known:
        return fail_together(plan, what=what)
    return decide_on_first_rank(plan, lambda plans: planner.create_global_plan(plans)[0], what, CheckpointError)


def _write_pieces(
    planner: dcp.DefaultSavePlanner, plan: dcp.SavePlan, weights: Mapping[str, _StoredWeight], path: Path
) -> None:
    with os.fdopen(open_unlinked(path, os.O_WRONLY), "wb", buffering=0) as out:
        for item in plan.items:
            assert item.tensor_data is not None
            chunk, weight = item.tensor_data.chunk, weights[item.index.fqn]
            piece: Any = planner.resolve_data(item)
            raw = memoryview(piece.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()).cast("B")
            at = 0
            for start, size in _byte_runs(weight, chunk.offsets, chunk.sizes):
                while size:
                    done = os.pwrite(out.fileno(), raw[at : at + size], start)
                    start, at, size = start + done, at + done, size - done
        os.fsync(out.fileno())


# -- in ---------------------------------------------------------------------------------------------------------------


def load_weights(path: CheckpointPath, model: nn.Module, names: FileNames | None = None) -> None:
    """Read the parameters and buffers of a model from a ``.safetensors`` file, or from all such files of a folder.

    Each rank reads the rows that it holds, in place, and converts floats to the model's type.  Call
    `jigsaw.parallelize` before, if at all.  `names` turns names of the model into those of the file.  Of a weight that
    has several names in the model, one is enough.

    *Sends*: plans, and no tensors.
    *Raises*: `CheckpointError` on every rank, for a damaged file and a name in two files. Also for names, shapes or
    kinds of numbers that are not the model's, and for `names` as `save_weights`. Nothing is changed then.

    >>> jigsaw.save_weights("small.safetensors", torch.nn.Linear(4, 2))
    >>> jigsaw.load_weights("small.safetensors", torch.nn.Linear(4, 3))
    Traceback (most recent call last):
        ...
    jigsaw.errors.CheckpointError: small.safetensors is of another model: 'bias' has shape (2,), the...
    """
    final = checked_path(path)
    check_same_arguments(final)
    weights = fail_together(lambda: _stored_weights(final))
    tensors = fail_together(lambda: _named_in_file(_whole_state(model), names))
    tensors = _without_second_names(model, tensors, weights, names)
    wrong = [f"missing: {name!r}" for name in tensors if name not in weights]
    wrong += [f"left over: {name!r}" for name in weights if name not in tensors]
    for name in tensors.keys() & weights.keys():
        stored, x = weights[name], tensors[name]
        if stored.shape != tuple(x.shape):
            wrong.append(f"{name!r} has shape {stored.shape}, the model's {tuple(x.shape)}")
        elif not is_converted_weight(stored.dtype, x.dtype):
            wrong.append(f"{name!r} is {stored.dtype}, the model's {x.dtype}, which is not converted")
    if wrong:
        raise CheckpointError(f"{os.fspath(path)} is of another model: {'; '.join(sorted(wrong)[:5])}")
    fail_together(lambda: check_readable_in_place(tensors))
    with torch_failures_named(f"the weights of {os.fspath(path)}"):
        dcp.load(with_parts_apart(tensors), storage_reader=_WeightReader(weights), no_dist=not dist.is_initialized())


def _without_second_names(
    model: nn.Module,
    tensors: Mapping[str, torch.Tensor],
    weights: Mapping[str, _StoredWeight],
    names: FileNames | None,
) -> dict[str, torch.Tensor]:
    """Return the tensors by their names in the files, but for second names of shared weights that these leave out."""
    shared: dict[int, list[str]] = {}
    for name, x in _unwrapped(model).named_parameters(remove_duplicate=False):
        shared.setdefault(id(x), []).append(_name_in_file(name, names))
    left_out = {
        name
        for alike in shared.values()
        if any(other in weights for other in alike)
        for name in alike
        if name not in weights
    }
    return {name: x for name, x in tensors.items() if name not in left_out}


def _stored_weights(path: Path) -> dict[str, _StoredWeight]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(each.is_file() for each in files):
        raise CheckpointError(f"{path} is neither a .safetensors file nor a folder with some")
    weights: dict[str, _StoredWeight] = {}
    for file in files:
        of_file = _weights_of_file(file)
        if twice := sorted(of_file.keys() & weights.keys()):
            both = f"{weights[twice[0]].path.name} and {file.name}"
            raise CheckpointError(f"{both} of {path} both have {twice[0]!r}; read one file, or move the other away")
        weights |= of_file
    return weights


def _weights_of_file(file: Path) -> dict[str, _StoredWeight]:
    weights: dict[str, _StoredWeight] = {}
    try:
        whole = file.stat().st_size
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            if not 0 < length <= min(whole - 8, _LONGEST_HEADER):
                raise ValueError(f"its header would have {length} bytes")
            header = parse_strict_json(opened.read(length))
        for name, each in header.items():
            if name == _METADATA_NAME:
                continue
            begin, end = each["data_offsets"]
            if not all(type(number) is int and number >= 0 for number in (begin, end, *each["shape"])):
                raise ValueError(f"{name!r} has a size or place that is not a natural number")
            weight = _StoredWeight(file, _DTYPES[each["dtype"]], tuple(each["shape"]), 8 + length + begin)
            if end - begin != _size_of(weight):
                raise ValueError(f"{name!r} has another size than its shape and type")
            if weight.start > whole - _size_of(weight):
                raise ValueError(f"{name!r} lies outside of it")
            weights[name] = weight
        in_order = sorted((each.start, each.start + _size_of(each), name) for name, each in weights.items())
        for (_, end, before), (begin, _, name) in pairwise(in_order):
            if begin < end:
                raise ValueError(f"{name!r} lies in the bytes of {before!r}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise CheckpointError(f"{file} is damaged, or no file of weights: {e}") from e
    return weights


class _WeightReader(dcp.StorageReader):
    """Reader of whole tensors in files, for torch's planner."""

    def __init__(self, weights: Mapping[str, _StoredWeight]) -> None:
        self._weights = weights

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Keep nothing between loads."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        metadata: dict[str, Any] = {}
        for name, each in self._weights.items():
            whole = ChunkStorageMetadata(torch.Size([0] * len(each.shape)), torch.Size(each.shape))
            properties = TensorProperties(dtype=each.dtype)
            metadata[name] = TensorStorageMetadata(properties, torch.Size(each.shape), [whole])
        return Metadata(metadata)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: dcp.LoadPlan) -> dcp.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[dcp.LoadPlan]) -> list[dcp.LoadPlan]:
        return plans

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        for item in plan.items:
            index: MetadataIndex = item.storage_index
            room = planner.resolve_tensor(item).detach()
            room.copy_(_read_piece(self._weights[index.fqn], item.storage_offsets, item.lengths))
            planner.commit_tensor(item, room)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


def _read_piece(weight: _StoredWeight, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    values = torch.empty(tuple(sizes), dtype=weight.dtype)
    raw = values.reshape(-1).view(torch.uint8).numpy().data
    at = 0
    with weight.path.open("rb", buffering=0) as opened:
        for start, size in _byte_runs(weight, offsets, sizes):
            while size:
                piece = min(size, 1 << 30)  # macOS refuses to read 2 GiB and more in one call
                done = os.preadv(opened.fileno(), [raw[at : at + piece]], start)
                if not done:
                    raise CheckpointError(f"{weight.path} has ended before its weights did")
                start, at, size = start + done, at + done, size - done
    return values


def _size_of(weight: _StoredWeight) -> int:
    return math.prod(weight.shape) * weight.dtype.itemsize


def _byte_runs(weight: _StoredWeight, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Iterate over the runs of bytes of a box of a stored tensor, in order: where each starts in the file, and its
    length.

    Of a [4, 6] tensor the box [1:3, 2:4] is two runs of 2 elements, at the elements 8 and 14; [1:3, 0:6] is one of 12.
    """
    shape, item = weight.shape, weight.dtype.itemsize
    if 0 in sizes:
        return
    # the dims after the last cut one are contiguous
    last = max((dim for dim, (size, whole) in enumerate(zip(sizes, shape, strict=True)) if size != whole), default=0)
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    length = math.prod(sizes[last:]) * item
    for index in product(*(range(offsets[dim], offsets[dim] + sizes[dim]) for dim in range(last))):
        place = [*index, *offsets[last:]]
        yield weight.start + item * sum(at * stride for at, stride in zip(place, strides, strict=True)), length
