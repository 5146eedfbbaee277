"""Writers of a checkpoint's pieces: which rank writes which, found by every rank alone from what all ranks have told.

A DTensor's placements say which rank has which rows, so no rank has to be asked.  Four ranks, data=2 and lat=2, and a
weight that lat cuts: ranks 0 and 2 have its first rows, 1 and 3 the others.  Ranks 0 and 1 write this weight, and 2 and
3 the next one of as many bytes.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.tensor import DTensor

from jigsaw.checkpoint.checkpoint_folder import FileSum
from jigsaw.checkpoint.checkpoint_index import StoredTensor
from jigsaw.checkpoint.parted_tensors import cuts_of_tensor
from jigsaw.checkpoint.piece_grid import PieceGrid, grid_of_ranks
from jigsaw.comm.agreement import told_in_job_where_different
from jigsaw.comm.wire_values import checksum_of_bits
from jigsaw.errors import CheckpointError


def check_equal_copies(tensors: Mapping[str, torch.Tensor]) -> None:
    """Compare the plain tensors of all ranks, of which one rank's are written, by bytes and checksums.

    Raises: `CheckpointError` on every rank, where they differ.
    """
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    plain = {key: x for key, x in tensors.items() if type(x) in (torch.Tensor, torch.nn.Parameter)}
    own_sums = {key: FileSum(x.nbytes, checksum_of_bits(x) if ranks > 1 else 0) for key, x in plain.items()}
    every = told_in_job_where_different("save", own_sums) or [own_sums] * ranks
    first_ranks = {id(theirs): rank for rank, theirs in reversed([*enumerate(every)])}
    known: dict[str, tuple[int, FileSum]] = {}
    differing: dict[str, tuple[int, int]] = {}
    for rank in sorted(first_ranks.values()):
        for key, each in every[rank].items():
            first, of_first = known.setdefault(key, (rank, each))
            if each != of_first:
                differing.setdefault(key, (rank, first))
    if differing:
        key, (rank, first) = min(differing.items())
        raise CheckpointError(
            f"{key!r} differs between ranks ({rank} and {first} among them), and only one rank's would be saved; every "
            "rank must hold it alike: look for a step that a rank left out, an initialization by rank, or a model that "
            "did not go through jigsaw.parallelize"
        )


class RankMesh(NamedTuple):
    """Mesh of ranks of the job."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


class TensorKind(NamedTuple):
    """Type and shape of a tensor, and for a DTensor its mesh, and which dim of how many parts each axis cuts."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    mesh: int | None = None  # a number among the meshes of `TensorKinds`
    cuts: tuple[tuple[int, int] | None, ...] = ()

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorKinds(NamedTuple):
    """Kinds of the tensors of a rank; `has_others` where torch's planner alone knows how some of them are cut."""

    meshes: tuple[RankMesh, ...]
    tensors: dict[str, TensorKind]
    has_others: bool


def kinds_of_tensors(tensors: Mapping[str, torch.Tensor]) -> TensorKinds:
    """Return the kinds of plain tensors and DTensors, for all ranks to hear of."""
    meshes: dict[Any, int] = {}
    kinds: dict[str, TensorKind] = {}
    for name, x in tensors.items():
        cuts = cuts_of_tensor(x)
        if type(x) in (torch.Tensor, torch.nn.Parameter):
            kinds[name] = TensorKind(x.dtype, tuple(x.shape))
        elif isinstance(x, DTensor) and cuts is not None:
            number = meshes.setdefault(x.device_mesh, len(meshes))
            kinds[name] = TensorKind(x.dtype, tuple(x.shape), number, cuts)
    of_ranks = tuple(RankMesh(tuple(mesh.shape), tuple(mesh.mesh.reshape(-1).tolist())) for mesh in meshes)
    return TensorKinds(of_ranks, kinds, len(kinds) < len(tensors))


class PieceWriters:
    """Ranks that write each tensor, the same on all ranks, from the `TensorKinds` of `every` rank.

    Ranks with the same kinds are given by one object.  A tensor that any rank has whole is written by one of those.
    Another is written by the ranks of its mesh; where several have the same rows, by one of them.

    Raises: `CheckpointError` for a tensor that only some ranks of its mesh have so.
    """

    def __init__(self, every: Sequence[TensorKinds]) -> None:
        firsts = {id(kinds): rank for rank, kinds in reversed([*enumerate(every)])}
        plain = {
            id_of: {name: FileSum(kind.nbytes, 0) for name, kind in every[rank].tensors.items() if kind.mesh is None}
            for id_of, rank in firsts.items()
        }
        self.of_whole = writers_of_plain([plain[id(kinds)] for kinds in every])
        self._every = every
        self._kinds = {name: every[rank].tensors[name] for name, rank in self.of_whole.items()}
        self._of_cut: dict[str, tuple[RankMesh, int]] = {}
        self._ranks: dict[Any, tuple[NDArray[Any], frozenset[int]]] = {}
        loads: dict[tuple[RankMesh, tuple[int, ...]], list[int]] = {}
        for rank in sorted(firsts.values()):
            for name, kind in every[rank].tensors.items():
                if name in self._kinds or kind.mesh is None:
                    continue
                mesh = every[rank].meshes[kind.mesh]
                self._kinds[name] = kind
                free = tuple(at for at, cut in enumerate(kind.cuts) if cut is None)
                load = loads.setdefault((mesh, free), [0] * math.prod(mesh.shape[at] for at in free))
                copy = load.index(min(load))
                load[copy] += max(kind.nbytes, 1)
                self._of_cut[name] = mesh, copy
        if len(firsts) > 1:
            self._check_meshes()

    def _check_meshes(self) -> None:
        distinct: dict[RankMesh, dict[int, tuple[int, TensorKinds]]] = {}
        for name, (mesh, _) in self._of_cut.items():
            if mesh not in distinct:
                distinct[mesh] = {id(self._every[rank]): (rank, self._every[rank]) for rank in mesh.ranks}
            kind = self._kinds[name]._replace(mesh=None)
            for rank, kinds in distinct[mesh].values():
                theirs = kinds.tensors.get(name)
                is_alike = theirs is not None and theirs.mesh is not None and kinds.meshes[theirs.mesh] == mesh
                if theirs is None or not is_alike or theirs._replace(mesh=None) != kind:
                    raise CheckpointError(
                        f"rank {rank} is on the mesh of {name!r}, and has no tensor of this name with {kind.dtype}, "
                        f"shape {kind.shape} and these cuts; every rank of a mesh has to save its part"
                    )

    def writes(self, rank: int, name: str) -> bool:
        """Say whether a rank writes what it has of a tensor."""
        if name in self.of_whole:
            return self.of_whole[name] == rank
        return name in self._of_cut and rank in self._writers_of_cut(name)[1]

    def _writers_of_cut(self, name: str) -> tuple[NDArray[Any], frozenset[int]]:
        """Return the ranks that write a tensor, by the axes that cut it, and all of them."""
        mesh, copy = self._of_cut[name]
        free = [at for at, cut in enumerate(self._kinds[name].cuts) if cut is None]
        key = id(mesh), copy, tuple(free)
        if key not in self._ranks:
            place: list[Any] = [slice(None)] * len(mesh.shape)
            for at, number in zip(
                free, np.unravel_index(copy, [mesh.shape[at] for at in free]) if free else (), strict=True
            ):
                place[at] = int(number)
            ranks = np.array(np.array(mesh.ranks).reshape(mesh.shape)[tuple(place)])
            self._ranks[key] = ranks, frozenset(ranks.reshape(-1).tolist())
        return self._ranks[key]

    def stored_tensors(self) -> dict[str, StoredTensor]:
        """Return which file has which piece of every tensor; each rank's file has its number."""
        stored: dict[str, StoredTensor] = {}
        for name, kind in self._kinds.items():
            if name in self._of_cut:
                grid = self._grid_of_cut(name, kind)
            else:
                begins = tuple(range(0, max(size, 1), max(size, 1)) for size in kind.shape)
                files = ((self.of_whole[name], 1, 1),) if math.prod(kind.shape) else ()
                grid = PieceGrid(kind.shape, begins, files)
            stored[name] = StoredTensor(kind.dtype, kind.shape, grid)
        return stored

    def _grid_of_cut(self, name: str, kind: TensorKind) -> PieceGrid:
        ranks, _ = self._writers_of_cut(name)
        cuts = [cut for cut in kind.cuts if cut is not None]
        axes_of_dims = [
            [at for at, (cut_dim, _) in enumerate(cuts) if cut_dim == dim] for dim in range(len(kind.shape))
        ]
        return grid_of_ranks(kind.shape, axes_of_dims, [parts for _, parts in cuts], ranks)


def writers_of_plain(every: Sequence[Mapping[str, FileSum]]) -> dict[str, int]:
    """Return which rank writes each plain tensor, by the names and sizes that each rank has: about as many bytes each.

    All ranks find the same, without a message.  Ranks that have the same are given by one object.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, theirs in enumerate(every):
        ranks_of.setdefault(id(theirs), []).append(rank)
    groups = [(every[ranks[0]], ranks) for ranks in ranks_of.values()]
    sizes = {key: each.size for theirs, _ in groups for key, each in theirs.items()}
    written, writers = [0] * len(every), dict[str, int]()
    heaps: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    for key in sorted(sizes, key=lambda key: (-sizes[key], key)):
        holders = tuple(at for at, (theirs, _) in enumerate(groups) if key in theirs)
        heap = heaps.setdefault(holders, [])
        if not heap:
            heap += sorted((written[rank], rank) for at in holders for rank in groups[at][1])
        while heap[0][0] != written[heap[0][1]]:  # it has been given one of other holders since
            heapq.heapreplace(heap, (written[heap[0][1]], heap[0][1]))
        rank = writers[key] = heap[0][1]
        written[rank] += max(sizes[key], 1)
        heapq.heapreplace(heap, (written[rank], rank))
    return writers
