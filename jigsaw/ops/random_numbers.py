"""Random numbers that are a function of the global position, so that they are the same on every mesh.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) with the finaliser of
splitmix64 (Steele et al., OOPSLA 2014): each element hashes its global row-major index with two keys of the call, one
before the first round and one before the second, so that no call has the numbers of another at shifted places.  The
seed of the keys comes from torch's default generator of the mesh's first rank, so `torch.manual_seed` fixes the
numbers; they are not those of plain torch.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from jigsaw import comm
from jigsaw.graph_calls import refuse_in_graph
from jigsaw.layout import Layout, MeshCoordinate
from jigsaw.slab_mesh import SlabMesh
from jigsaw.tile import Tile

_SIGN = -(1 << 63)


def _signed_int64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) + _SIGN


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical, where torch's shift of int64 is arithmetic."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


_GOLDEN, _FIRST, _SECOND = map(_signed_int64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def _splitmix_bits(x: Tensor, seed: int) -> Tensor:
    """63 and more random bits for each counter in `x`, which is changed."""
    x.mul_(_GOLDEN).add_(_signed_int64(seed))
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_FIRST).add_(_signed_int64(seed * 0xD1342543DE82EF95 + 1))
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shift_right(x, 31))


def global_index(tile: Tile, dims: int) -> Tensor:
    """The row-major global index over the first `dims` dims of every local element, size 1 in the others."""
    device, stride = tile.device, 1
    index: Tensor | None = None
    for start, stop, size in reversed(_index_runs(tile.layout, dims, tile.coordinate)):
        rows = torch.arange(start, stop, device=device)
        rows = rows.remainder_(size) if start < 0 or stop > size else rows
        rows = rows.mul_(stride) if stride != 1 else rows
        index = rows if index is None else rows.reshape(-1, *(1,) * index.ndim) + index
        stride *= size
    index = torch.zeros(1, dtype=torch.int64, device=device) if index is None else index
    return index.reshape([n if d < dims else 1 for d, n in enumerate(tile.local.shape)])


@lru_cache(maxsize=1024)
def _index_runs(layout: Layout, dims: int, coord: MeshCoordinate) -> tuple[tuple[int, int, int], ...]:
    """(start, stop, size) of consecutive indices, major to minor: a cut with all whole ones that follow it is one."""
    # row-major over the cuts, not the dims: of flattened dims each has rows of its own, and 2 x 3 of them are six
    # indices that need not follow each other
    runs: list[tuple[int, int, int]] = []
    for cut in (c for d in range(dims) for c in layout.dim(d)):
        start, stop = cut.held[layout.piece(cut, coord)]
        if runs and (start, stop) == (0, cut.size):
            above, below, rows = runs.pop()
            runs.append((above * cut.size, below * cut.size, rows * cut.size))
        else:
            runs.append((start, stop, cut.size))
    return tuple(runs)


def shared_seed(tile: Tile) -> int:
    """A seed from the first rank's generator. *Sends*: its 8 bytes."""
    refuse_in_graph("a random number that ranks share (dropout in training, random tensors like a tile)")
    # every rank draws, so that their generators stay in step, but the first rank's number is taken
    seed = torch.randint(1 << 62, (1,))
    if tile.mesh.device_type == "cuda":
        seed = seed.to(tile.device)
    # slabs are run by all ranks in one order, and with the same states of their generators
    mesh = tile.mesh.real if isinstance(tile.mesh, SlabMesh) else tile.mesh
    if mesh is not None:
        comm.broadcast_first(seed, mesh, [name for name, _ in tile.layout.axes])
    return int(seed)


def global_uniform(tile: Tile, dims: int) -> Tensor:
    """Numbers in [0, 1) for every local element (of the first `dims` dims), the same for a global position on every
    mesh.

    *Sends*: one seed of 8 bytes from the first rank.
    """
    mixed = _splitmix_bits(global_index(tile, dims), shared_seed(tile))
    return _shift_right(mixed, 11).to(torch.float64).mul_(2.0**-53)


def global_chances(tile: Tile, dims: int, p: float) -> Tensor:
    """Whether each element has a number of at least `p`, as of `global_uniform`, without making the numbers."""
    return chances_at(global_index(tile, dims), shared_seed(tile), p)


def chances_at(index: Tensor, seed: int, p: float) -> Tensor:
    """Whether the elements at these global indices, which are changed, have a number of at least `p`."""
    # the bits are integers from -2^63 to 2^63, all equally likely
    least = min(math.ceil(p * 2.0**64) + _SIGN, -_SIGN - 1)
    return _splitmix_bits(index, seed) >= least


def global_normal(tile: Tile, dims: int) -> Tensor:
    """Standard normal numbers for every local element, as `global_uniform`: the inverse of the normal distribution."""
    # of the 2^53 steps the first is 0, where the inverse is infinite
    return torch.special.ndtri(global_uniform(tile, dims).clamp_min(2.0**-54))


def random_states(tile: Tile) -> list[Tensor]:
    """The states of torch's generators that a function may draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(tile.device)] if tile.is_cuda else states
