"""Random numbers that are a function of the global position, so that they are the same on every mesh.

A counter-based generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11) with the finalizer of
splitmix64 (Steele et al., OOPSLA 2014): each element hashes its global row-major index with two keys of the call, one
before the first round and one before the second.  So no call has the numbers of another at shifted places.  The seed of
the keys comes from torch's default generator of the mesh's first rank, so `torch.manual_seed` fixes the numbers; they
are not those of plain torch.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.comm.graph_calls import graph_call, lacks_values
from jigsaw.comm.wire_values import is_on_accelerator
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.ranks.mesh import mesh_size
from jigsaw.ranks.slab_mesh import SlabMesh
from jigsaw.tile.tile import Tile

_SIGN = -(1 << 63)


def _signed_int64(value: int) -> int:
    return (value + (1 << 63)) % (1 << 64) + _SIGN


_GOLDEN, _FIRST, _SECOND = map(_signed_int64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


_KEY_STEP = 0xD1342543DE82EF95
_LOW_33 = (1 << 33) - 1


def _splitmix_bits(x: Tensor, seed: int | Tensor, is_whole: bool = True) -> Tensor:
    """Return 63 and more random bits for each counter in `x`; unless `is_whole`, the lower 33 are not mixed."""
    if isinstance(seed, Tensor):  # int64 wraps around, as `_signed_int64` wraps Python's integers
        keys = (seed.reshape(()), seed.reshape(()) * _signed_int64(_KEY_STEP) + 1)
    else:
        keys = (_signed_int64(seed), _signed_int64(seed * _KEY_STEP + 1))
    # `rsub` with an alpha is a - alpha x, a product and a sum in one pass.  A shift of int64 is arithmetic in torch: it
    # fills up with the sign, so that two counters in 2^64 become one; only at the end that would be seen, as a sign
    x = torch.rsub(x, keys[0], alpha=-_GOLDEN)
    x.bitwise_xor_(x >> 30)
    x = torch.rsub(x, keys[1], alpha=-_FIRST)
    x.bitwise_xor_(x >> 27).mul_(_SECOND)
    return x.bitwise_xor_((x >> 31).bitwise_and_(_LOW_33)) if is_whole else x


def global_index(tile: Tile, dims: int) -> Tensor:
    """Return the row-major global index over the first `dims` dims of every local element, size 1 in the others; do not
    change it.
    """
    local = tile.local
    # a small tile's index is kept, because making it costs more; tensors of other types may have no values
    make = _small_index if local.numel() <= 4096 and type(local) is Tensor else _made_index
    return make(tile.layout, dims, tile.coordinate, tuple(local.shape), local.device)


def _made_index(
    layout: Layout, dims: int, coord: MeshCoordinate, shape: tuple[int, ...], device: torch.device
) -> Tensor:
    stride = 1
    index: Tensor | None = None
    for start, stop, size in reversed(_index_runs(layout, dims, coord)):
        rows = torch.arange(start, stop, device=device)
        rows = rows.remainder_(size) if start < 0 or stop > size else rows
        rows = rows.mul_(stride) if stride != 1 else rows
        index = rows if index is None else rows.reshape(-1, *(1,) * index.ndim) + index
        stride *= size
    index = torch.zeros(1, dtype=torch.int64, device=device) if index is None else index
    return index.reshape((*shape[:dims], *(1,) * (len(shape) - dims)))


_small_index = lru_cache(maxsize=64)(_made_index)


@lru_cache(maxsize=1024)
def _index_runs(layout: Layout, dims: int, coord: MeshCoordinate) -> tuple[tuple[int, int, int], ...]:
    """Return (start, stop, size) of runs of indices, major to minor: a cut and the whole ones behind it are one."""
    # row-major over cuts, not dims: each cut of a flattened dim has its own rows, and 2 x 3 of them are six
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


def shared_seed(tile: Tile) -> int | Tensor:
    """Return a seed from the first rank's generator; a tensor in a graph, and on a device that the host would wait for.

    *Sends*: its 8 bytes.
    """
    axes = tuple([name for name, _ in tile.layout.axes])
    seed = _seed_in_graph(tile.mesh, axes) if lacks_values() else _drawn_seed(tile.mesh, axes)
    return seed if lacks_values() or is_on_accelerator(seed) else int(seed)


def _drawn_seed(mesh: DeviceMesh, axes: tuple[str, ...]) -> Tensor:
    # every rank draws, so that their generators stay in step, but the first rank's number is taken
    seed = torch.randint(1 << 62, (1,))
    # all ranks run slabs in one order, with generators in the same state
    real = mesh.real if isinstance(mesh, SlabMesh) else mesh
    if real is not None and mesh_size(real) > 1:
        # `full` does not make the host wait, as a copy would
        seed = torch.full((1,), int(seed), device=real.device_type)
        comm.broadcast_first(seed, real, axes)
    return seed


def _seed_shape(mesh: DeviceMesh, axes: tuple[str, ...]) -> Tensor:
    return torch.empty(1, dtype=torch.int64, device=mesh.device_type if mesh_size(mesh) > 1 else "cpu")


_seed_in_graph = graph_call(_seed_shape)(_drawn_seed)


def global_uniform(tile: Tile, dims: int) -> Tensor:
    """Return numbers in [0, 1) for every local element (of the first `dims` dims), the same for a global position on
    every mesh.

    *Sends*: one seed of 8 bytes from the first rank.
    """
    if lacks_values():
        return _uniform_in_graph(tile.mesh, tile.layout, tuple(tile.local.shape), dims)
    mixed = _splitmix_bits(global_index(tile, dims), shared_seed(tile))
    return (mixed >> 11).bitwise_and_((1 << 53) - 1).to(torch.float64).mul_(2.0**-53)


def global_chances(tile: Tile, dims: int, p: float) -> Tensor:
    """Say of each element whether its number of `global_uniform` is at least `p`, up to 2^-31."""
    if lacks_values():
        return _chances_in_graph(tile.mesh, tile.layout, tuple(tile.local.shape), dims, p)
    return chances_at(global_index(tile, dims), shared_seed(tile), p)


# In a graph to draw is one call, like a message: the seed is drawn and read when the graph runs, and a compiler that
# takes the global index for an index of memory finds it too large once it is hashed.


def _uniform_shape(mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...], dims: int) -> Tensor:
    return torch.empty((*shape[:dims], *(1,) * (len(shape) - dims)), dtype=torch.float64, device=mesh.device_type)


def _chances_shape(mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...], dims: int, p: float) -> Tensor:
    return _uniform_shape(mesh, layout, shape, dims).bool()


@graph_call(_uniform_shape)
def _uniform_in_graph(mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...], dims: int) -> Tensor:
    return global_uniform(_tile_without_memory(mesh, layout, shape), dims)


@graph_call(_chances_shape)
def _chances_in_graph(mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...], dims: int, p: float) -> Tensor:
    return global_chances(_tile_without_memory(mesh, layout, shape), dims, p)


def _tile_without_memory(mesh: DeviceMesh, layout: Layout, shape: tuple[int, ...]) -> Tile:
    return Tile(torch.empty((), device=mesh.device_type).expand(shape), layout, mesh)


def chances_at(index: Tensor, seed: int | Tensor, p: float) -> Tensor:
    """Say of the elements at these global indices whether their number is at least `p`."""
    # the bits are integers from -2^63 to 2^63, all equally likely
    least = min(math.ceil(p * 2.0**64) + _SIGN, -_SIGN - 1)
    return _splitmix_bits(index, seed, is_whole=False) >= least


def global_normal(tile: Tile, dims: int) -> Tensor:
    """Return standard normal numbers for every local element: the inverse of the distribution at uniform ones."""
    # of the 2^53 steps the first is 0, where the inverse is infinite
    return torch.special.ndtri(global_uniform(tile, dims).clamp_min(2.0**-54))


def random_states(tile: Tile) -> list[Tensor]:
    """Return the states of torch's generators that a function may draw from."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(tile.device)] if tile.is_cuda else states
