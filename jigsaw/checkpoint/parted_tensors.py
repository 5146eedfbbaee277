"""DTensors as torch's checkpoints take them, in pieces: of a tensor of several parts a rank has one of every part.

Two ranks and rows 0 to 5 in three parts: rank 0 has rows 0, 2 and 4.  A file has them as pieces at these rows of the
whole tensor, so it is read on any number of ranks.  Torch would take what a rank has for one interval.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from jigsaw.checkpoint.piece_grid import cut_rows
from jigsaw.geometry.cut import Box, Interval
from jigsaw.torch_internals.placements import dim_and_parts


def with_parts_apart(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors for torch's planner, which reads and writes the pieces of DTensors in place."""
    return {name: x if cuts_of_tensor(x) is None else _PartedTensor.of(x) for name, x in tensors.items()}


def cuts_of_tensor(x: Tensor) -> tuple[tuple[int, int] | None, ...] | None:
    """Return which dim of a DTensor each axis of its mesh cuts, and of how many parts that dim is; None where it cuts
    none.  None for a tensor that is not a DTensor, or one of sums that are still apart.
    """
    if not isinstance(x, DTensor):
        return None
    cuts = tuple(map(dim_and_parts, x.placements))
    known = all(cut is not None or placement.is_replicate() for cut, placement in zip(cuts, x.placements, strict=True))
    return cuts if known else None


def boxes_of_rank(x: Tensor) -> list[Box]:
    """Return the boxes of the whole tensor that this rank has, for what `with_parts_apart` returns."""
    if isinstance(x, _PartedTensor):
        return [
            tuple((start, start + size) for start, size in zip(at, piece.shape, strict=True))
            for at, piece in x.pieces.items()
        ]
    return [tuple((0, size) for size in x.shape)]


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
        is_here = x.device_mesh.get_coordinate() is not None
        for box in product(*runs) if is_here else ():
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
    mesh, cuts = x.device_mesh, cuts_of_tensor(x) or ()
    coordinate: Any = mesh.get_coordinate() or [0] * mesh.ndim
    axes = [(at, cut[1]) for at, cut in enumerate(cuts) if cut is not None and cut[0] == dim]
    own = 0
    for at, _ in axes:
        own = own * mesh.shape[at] + coordinate[at]
    size = x.shape[dim]
    begins, owners = cut_rows(size, tuple((mesh.shape[at], parts) for at, parts in axes))
    runs: list[tuple[int, Interval]] = []
    place = 0
    for piece in np.flatnonzero(owners == own).tolist():
        start, stop = begins[piece], begins[piece + 1] if piece + 1 < len(begins) else size
        if start < stop:
            runs.append((place, (start, stop)))
        place += stop - start
    return runs
