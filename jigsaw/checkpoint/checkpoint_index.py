"""Index of a checkpoint's tensors: the type and shape of each, and which piece of it lies where in which file.

It is ``tensors.json``, a line a tensor::

    {
    "model.weight": {"dtype": "float32", "shape": [4, 2], "pieces": [[[0, 0], [4, 2], "__0_0.distcp", 0, 1337]]}
    }

A piece is its start in the tensor, its shape, its file, its start in that, and its bytes there.  Torch's own index,
``.metadata``, is a pickle, and lies beside it for torch's tools.  It is read only in checkpoints that are older than
our index.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from jigsaw.checkpoint.checkpoint_state import dtype_by_name, parse_strict_json

TENSOR_INDEX_FILE = "tensors.json"
TORCH_INDEX_FILE = ".metadata"
_MOST_CELLS_A_PIECE = 64


class StoredPiece(NamedTuple):
    """A box of a tensor, and its bytes; the names of the last four are those that torch's reader asks for."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    relative_path: str
    offset: int
    length: int
    transform_descriptors: None = None


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint; its pieces cover it, each element once."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: list[StoredPiece]


TensorIndex = Mapping[str, StoredTensor]


def index_as_json(torch_index: Metadata) -> bytes:
    """Return the index of a checkpoint that torch's writer has finished."""
    lines: list[str] = []
    for name, each in torch_index.state_dict_metadata.items():
        assert isinstance(each, TensorStorageMetadata)
        pieces: list[Any] = []
        for chunk in each.chunks:
            if math.prod(chunk.sizes):
                at = torch_index.storage_data[MetadataIndex(name, chunk.offsets)]
                place = [at.relative_path, at.offset, at.length]
                pieces.append([list(chunk.offsets), list(chunk.sizes), *place])
        about = {"dtype": str(each.properties.dtype).removeprefix("torch."), "shape": list(each.size), "pieces": pieces}
        lines.append(f"{json.dumps(name)}: {json.dumps(about)}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def index_from_json(raw: bytes, files: Collection[str]) -> TensorIndex:
    """Read what `index_as_json` wrote.

    Raises: any error, for anything else, and for pieces in other `files`.
    """
    index: dict[str, StoredTensor] = {}
    for name, each in parse_strict_json(raw).items():
        pieces = [StoredPiece(tuple(at), tuple(sizes), *place) for at, sizes, *place in each["pieces"]]
        index[name] = StoredTensor(dtype_by_name(each["dtype"]), tuple(each["shape"]), pieces)
    return _checked_index(index, files)


def torch_index_of(tensors: TensorIndex, names: Iterable[str]) -> Metadata:
    """Return torch's form of the index of the tensors `names`, which its planner uses."""
    metadata: dict[str, Any] = {}
    places: dict[MetadataIndex, StoredPiece] = {}
    for name in names:
        dtype, shape, pieces = tensors[name]
        boxes = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in pieces]
        metadata[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), boxes)
        places |= {MetadataIndex(name, each.offsets): each for each in pieces}
    return Metadata(metadata, storage_data=places)


def _checked_index(index: TensorIndex, files: Collection[str]) -> TensorIndex:
    for name, (_, shape, pieces) in index.items():
        numbers = [*shape]
        for each in pieces:
            numbers += [*each.offsets, *each.sizes, each.offset, each.length]
            if each.relative_path not in files:
                raise ValueError(f"{name!r} lies in {each.relative_path!r}, a file that the checkpoint does not have")
        if not all(type(each) is int and 0 <= each < 1 << 63 for each in numbers):
            raise ValueError(f"{name!r} has a size or place that is not a natural number")
        if not _cover_once(shape, pieces):
            raise ValueError(f"the pieces of {name!r} do not cover it, each element once")
    return index


def _cover_once(shape: tuple[int, ...], pieces: list[StoredPiece]) -> bool:
    """Say whether pieces cover a shape: each fills the cells that all their cut points together make."""
    if any(len(each.offsets) != len(shape) or len(each.sizes) != len(shape) for each in pieces):
        return False
    if len(pieces) < 2 or not shape:
        whole = not math.prod(shape) or (len(pieces) == 1 and pieces[0].sizes == shape and not any(pieces[0].offsets))
        return whole and len(pieces) < 2
    begins = np.array([each.offsets for each in pieces])
    ends = begins + np.array([each.sizes for each in pieces])
    cuts = [np.unique([0, *begins[:, dim], *ends[:, dim], size]) for dim, size in enumerate(shape)]
    counts = [len(each) - 1 for each in cuts]
    if any(each[-1] > size for each, size in zip(cuts, shape, strict=True)):
        return False
    if math.prod(counts) > _MOST_CELLS_A_PIECE * len(pieces):  # cuts that no mesh makes
        return False
    first, last = ([np.searchsorted(c, at[:, d]) for d, c in enumerate(cuts)] for at in (begins, ends))
    times = np.zeros(counts, np.int32)
    for box in zip(*first, *last, strict=True):
        times[tuple(map(slice, box[: len(shape)], box[len(shape) :]))] += 1
    return bool((times == 1).all())


# -- before there was an index of ours --------------------------------------------------------------------------------


def index_from_torch(raw: bytes, files: Collection[str]) -> TensorIndex:
    """Read the index in torch's ``.metadata`` without running any of it.

    Raises: any error, for anything else, and for pieces in other `files`.
    """
    about: Any = _TorchIndexUnpickler(io.BytesIO(raw)).load().state
    pieces: dict[Any, Any] = {}
    for key, place in about["storage_data"].items():
        pieces[key.state["fqn"], key.state.get("offset")] = place.state
    index: dict[str, StoredTensor] = {}
    for name, each in about["state_dict_metadata"].items():
        if not each.state:
            raise ValueError(f"{name!r} is a value that is pickled")
        dtype, *_ = each.state["properties"].state
        boxes = [(box.state["offsets"], box.state["sizes"]) for box in each.state["chunks"]]
        places = [(*box, pieces[name, box[0]]) for box in boxes if math.prod(box[1])]
        if not isinstance(dtype, torch.dtype):
            raise ValueError(f"{name!r} has no type")
        keys = ("relative_path", "offset", "length")
        pieces_of_tensor = [StoredPiece(at, sizes, *(place[key] for key in keys)) for at, sizes, place in places]
        index[name] = StoredTensor(dtype, each.state["size"], pieces_of_tensor)
    return _checked_index(index, files)


_OF_TORCH = "torch.distributed.checkpoint"
_MEMORY_FORMATS = ("TORCH_CONTIGUOUS_FORMAT", "TORCH_CHANNELS_LAST", "TORCH_PRESERVE_FORMAT")
_RECORDS = {
    (f"{_OF_TORCH}.metadata", name)
    for name in (
        *("Metadata", "MetadataIndex", "TensorStorageMetadata", "ChunkStorageMetadata", "BytesStorageMetadata"),
        *("TensorProperties", "StorageMeta"),
    )
} | {(f"{_OF_TORCH}.filesystem", "_StorageInfo")}


class _TorchIndexUnpickler(pickle.Unpickler):
    """Unpickler of only the classes of torch's index, because a pickle may name any function, and then calls it.

    Classes are stand-ins, made anew for each pickle, because it may also set attributes of anything that it can name.
    """

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self._records = {name: _pickle_record_class() for name in _RECORDS}
        self._memory_format = _pickle_record_class()

    def find_class(self, module: str, name: str, /) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) in self._records:
            return self._records[module, name]
        if (module, name) == (f"{_OF_TORCH}.metadata", "_MEM_FORMAT_ENCODING"):
            return self._memory_format
        if (module, name) == ("builtins", "getattr"):  # as Python 3.11.2 pickles a member of an enum
            return self._member
        if (module, name) == ("torch", "Size"):
            return tuple
        if (module, name) == ("torch.serialization", "_get_layout"):
            return _pickle_record_class()  # the layout is not needed
        raise pickle.UnpicklingError(f"it names {module}.{name}, which no index of tensors needs")

    def _member(self, owner: Any, member: Any) -> None:
        if owner is not self._memory_format or member not in _MEMORY_FORMATS:
            raise pickle.UnpicklingError(f"it names builtins.getattr for {member!r}, which no index of tensors needs")


class _Record:
    """An object as a pickle describes it: no arguments, then its state."""

    state: Any = None

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


def _pickle_record_class() -> type[_Record]:
    return type("_StandIn", (_Record,), {})
