"""Index of a checkpoint's tensors: the type and shape of each, and which file has which piece of it.

It is ``tensors.json``, a line a tensor::

    {
    "model.weight": {"dtype": "float32", "shape": [4, 2], "cuts": [1, 2], "files": [[0, 4, 1]]}
    }

Pieces of this one have a row and two columns each, and lie in the files of ranks 0 to 3 (`piece_grid`).  Its places in
these stand at their ends (`piece_places`), so that the index is as long for a thousand ranks as for one.  Tensors of
types that only torch's planner knows have a list instead, as all had before::

    "other": {"dtype": "float32", "shape": [4, 2], "pieces": [[[0, 0], [4, 2], "__0_0.distcp", 0, 1337]]}

Such a piece is its start in the tensor, its shape, its file, its start in that, and its bytes there.  Torch's own
index, ``.metadata``, is a pickle, and lies beside ours for torch's tools, where there are not too many pieces for it.
It is read only in checkpoints that are older than our index.
"""

from __future__ import annotations

import io
import json
import math
import pickle
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
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
from jigsaw.checkpoint.piece_grid import FileRange, PieceGrid, grid_from_json
from jigsaw.geometry.cut import Box, box_shape

TENSOR_INDEX_FILE = "tensors.json"
TORCH_INDEX_FILE = ".metadata"
_MOST_CELLS_A_PIECE = 64
_MOST_PIECES_A_FILE = 4096


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
    pieces: PieceGrid | list[StoredPiece]


TensorIndex = Mapping[str, StoredTensor]


def file_of_rank(rank: int) -> str:
    """Return the name of the file of tensors that a rank writes."""
    return f"__{rank}_0.distcp"


def count_pieces(tensors: TensorIndex) -> int:
    """Return the number of pieces of all tensors."""
    return sum(
        pieces.piece_count if isinstance(pieces, PieceGrid) else len(pieces) for _, _, pieces in tensors.values()
    )


def index_as_json(tensors: TensorIndex) -> bytes:
    """Return the index as the text of its file."""
    lines: list[str] = []
    for name, (dtype, shape, pieces) in tensors.items():
        cut = pieces.as_json() if isinstance(pieces, PieceGrid) else {"pieces": [each[:5] for each in pieces]}
        about = {"dtype": str(dtype).removeprefix("torch."), "shape": list(shape), **cut}
        lines.append(f"{json.dumps(name)}: {json.dumps(about)}")
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def index_from_json(raw: bytes, files: Collection[str]) -> TensorIndex:
    """Read what `index_as_json` wrote.

    Raises: any error, for anything else, and for pieces in other `files`.
    """
    index: dict[str, StoredTensor] = {}
    for name, each in parse_strict_json(raw).items():
        shape = tuple(each["shape"])
        if not _are_natural(shape):
            raise ValueError(f"{name!r} has a size or place that is not a natural number")
        if "pieces" in each:
            pieces = [StoredPiece(tuple(at), tuple(sizes), *place) for at, sizes, *place in each["pieces"]]
        else:
            try:
                pieces = grid_from_json(shape, each["cuts"], each["files"], _MOST_PIECES_A_FILE * len(files))
            except ValueError as e:
                raise ValueError(f"the pieces of {name!r} do not cover it, each element once: {e}") from e
        index[name] = StoredTensor(dtype_by_name(each["dtype"]), shape, pieces)
    return _checked_index(index, files)


def _are_natural(numbers: Sequence[Any]) -> bool:
    return set(map(type, numbers)) <= {int} and (not numbers or (min(numbers) >= 0 and max(numbers) < 1 << 63))


PlacesOfFile = Callable[[int], Mapping[str, Sequence[int]]]


def torch_index_of(tensors: TensorIndex, boxes: Mapping[str, Sequence[Box]], places: PlacesOfFile) -> Metadata:
    """Return torch's form of the index, which its planner uses, of those pieces that share elements with boxes.

    Raises: `KeyError` that names a file whose `places` have no such piece.
    """
    metadata: dict[str, Any] = {}
    stored: dict[MetadataIndex, StoredPiece] = {}
    for name, wanted in boxes.items():
        dtype, shape, pieces = tensors[name]
        listed = pieces if isinstance(pieces, list) else _placed_pieces(name, pieces, wanted, places)
        needed = {each.offsets: each for each in listed if any(_overlap(each, box) for box in wanted)}
        chunks = [ChunkStorageMetadata(torch.Size(each.offsets), torch.Size(each.sizes)) for each in needed.values()]
        metadata[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
        stored |= {MetadataIndex(name, each.offsets): each for each in needed.values()}
    return Metadata(metadata, storage_data=stored)


def _placed_pieces(name: str, grid: PieceGrid, boxes: Sequence[Box], places: PlacesOfFile) -> Iterator[StoredPiece]:
    for box in boxes:
        for piece in grid.pieces_in(box):
            place = places(piece.file).get(name, ())[2 * piece.number : 2 * piece.number + 2]
            if len(place) < 2:
                raise KeyError(f"{file_of_rank(piece.file)} has no piece {piece.number} of {name!r}")
            starts = tuple(start for start, _ in piece.box)
            yield StoredPiece(starts, box_shape(piece.box), file_of_rank(piece.file), place[0], place[1])


def _overlap(piece: StoredPiece, box: Box) -> bool:
    return all(a < stop and start < a + n for a, n, (start, stop) in zip(piece.offsets, piece.sizes, box, strict=True))


def whole_torch_index(tensors: TensorIndex) -> Metadata:
    """Return torch's index of whole tensors, in which its writer will say where pieces lie."""
    metadata: dict[str, Any] = {}
    for name, (dtype, shape, grid) in tensors.items():
        assert isinstance(grid, PieceGrid)
        boxes = [each.box for each in grid.pieces_in(tuple((0, size) for size in shape))]
        chunks = [ChunkStorageMetadata(torch.Size([a for a, _ in box]), torch.Size(box_shape(box))) for box in boxes]
        metadata[name] = TensorStorageMetadata(TensorProperties(dtype=dtype), torch.Size(shape), chunks)
    return Metadata(metadata, planner_data={name: (name,) for name in tensors})


def listed_tensors(torch_index: Metadata) -> TensorIndex:
    """Return the tensors of an index that torch's writer has finished, with lists of their pieces."""
    index: dict[str, StoredTensor] = {}
    for name, each in torch_index.state_dict_metadata.items():
        assert isinstance(each, TensorStorageMetadata)
        pieces: list[StoredPiece] = []
        for chunk in each.chunks:
            if math.prod(chunk.sizes):
                at = torch_index.storage_data[MetadataIndex(name, chunk.offsets)]
                place = at.relative_path, at.offset, at.length
                pieces.append(StoredPiece(tuple(chunk.offsets), tuple(chunk.sizes), *place))
        index[name] = StoredTensor(each.properties.dtype, tuple(each.size), pieces)
    return index


def _checked_index(index: TensorIndex, files: Collection[str]) -> TensorIndex:
    known_ranges: set[tuple[FileRange, ...]] = set()
    for name, (_, shape, pieces) in index.items():
        if isinstance(pieces, PieceGrid):
            if pieces.files not in known_ranges:
                _check_files(
                    name, (file_of_rank(a + n * step) for a, count, step in pieces.files for n in range(count)), files
                )
                known_ranges.add(pieces.files)
            continue
        _check_files(name, (each.relative_path for each in pieces), files)
        numbers = [*shape]
        for each in pieces:
            numbers += [*each.offsets, *each.sizes, each.offset, each.length]
        if not _are_natural(numbers):
            raise ValueError(f"{name!r} has a size or place that is not a natural number")
        if not _cover_once(shape, pieces):
            raise ValueError(f"the pieces of {name!r} do not cover it, each element once")
    return index


def _check_files(name: str, named: Iterable[str], files: Collection[str]) -> None:
    for each in named:
        if each not in files:
            raise ValueError(f"{name!r} lies in {each!r}, a file that the checkpoint does not have")


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
    corners = [[np.searchsorted(c, at[:, d]) for d, c in enumerate(cuts)] for at in (begins, ends)]
    # one more at a box's first corner, and by the rule of inclusion and exclusion at the others: sums are the times
    times = np.zeros([count + 1 for count in counts], np.int64)
    for ends_of_dims in product((0, 1), repeat=len(shape)):
        at = tuple(corners[end][dim] for dim, end in enumerate(ends_of_dims))
        np.add.at(times, at, (-1) ** sum(ends_of_dims))
    for dim in range(len(shape)):
        times = times.cumsum(dim)
    return bool((times[tuple(slice(count) for count in counts)] == 1).all())


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
