"""Tensors of several parts, each cut by itself, as torch's checkpoints take them: a rank has a piece of every part.

Two ranks and rows 0 to 5 in three parts: rank 0 has rows 0, 2 and 4.  A file has them as pieces at these rows of the
whole tensor, so it is read on any number of ranks.  Torch would take what a rank has for one interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from jigsaw.geometry.cut import Interval
from jigsaw.torch_internals.placements import dim_and_parts


def with_parts_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors for torch's planner, which reads and writes those of several parts in place."""
    return {name: _PartedTensor.of(x) if _has_parts(x) else x for name, x in tensors.items()}


def _has_parts(x: Tensor) -> bool:
    return isinstance(x, DTensor) and any((dim_and_parts(p) or (0, 1))[1] > 1 for p in x.placements)


class _PartedTensor(Tensor):
    """Pieces of a DTensor by their places, with the methods that torch's planner calls on a tensor."""

    pieces: dict[tuple[int, ...], Tensor]  # sorted by the first row, then column and so on

    @staticmethod
    def of(x: Tensor) -> _PartedTensor:
        assert isinstance(x, DTensor)
        # expanded from one number, because torch's planner replaces tensors without memory
        empty = torch.zeros((), dtype=x.dtype).expand(x.shape).as_subclass(_PartedTensor)
        local, runs = x.to_local().detach(), [_runs_of_rows(x, d) for d in range(x.ndim)]
        empty.pieces = {}
        for box in product(*runs):
            own = tuple(slice(at, at + stop - start) for at, (start, stop) in box)
            empty.pieces[tuple(start for _, (start, _) in box)] = local[own]
        return empty

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties.create_from_tensor(piece), self.size()),
            )
            for chunk, piece in zip(self.__create_chunk_list__(), self.pieces.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(at), piece.size()) for at, piece in self.pieces.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.pieces[tuple(index.offset or ())]


def _runs_of_rows(x: DTensor, dim: int) -> Sequence[tuple[int, Interval]]:
    """Return the consecutive rows of the whole that this rank has of a dim, each with its place on the rank."""
    rows, mesh = torch.arange(x.shape[dim]), x.device_mesh
    coordinate: Any = mesh.get_coordinate()  # never None: a rank that has a part is on the mesh
    for size, at, placement in zip(mesh.shape, coordinate, x.placements, strict=True):
        cut = dim_and_parts(placement)
        if cut is not None and cut[0] == dim:
            rows = torch.cat([_piece(part, size, at) for part in rows.tensor_split(cut[1])])
    begins = [0, *((rows.diff() != 1).nonzero().flatten() + 1).tolist(), len(rows)]
    return [(a, (int(rows[a]), int(rows[b - 1]) + 1)) for a, b in pairwise(begins) if a < b]


def _piece(rows: Tensor, count: int, at: int) -> Tensor:
    pieces = rows.chunk(count)  # cut as torch does: the last pieces may have fewer rows, or none
    return pieces[at] if at < len(pieces) else rows[:0]
