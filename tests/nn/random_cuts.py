"""Functions of several operands, each cut anyhow or plain, against those of the whole tensors."""

from __future__ import annotations

import torch

from jigsaw import comm
from jigsaw.ranks.mesh import axes_of_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard


def any_spec(generator, shape, axes):
    """None (a plain tensor), or a spec that has each of the axes in some dim, or in none."""
    if generator.random() < 0.15:
        return None
    places = [generator.randrange(-1, len(shape)) for _ in axes]
    return tuple(tuple(a for a, p in zip(axes, places, strict=True) if p == d) or None for d in range(len(shape)))


def assert_as_the_whole(function, shapes, specs, mesh, **tolerances):
    """Call it on every rank: the value and all gradients of `function` of random tensors of these shapes."""
    wholes = [torch.randn(s, dtype=torch.float64).requires_grad_() for s in shapes]
    expected = function(*wholes)
    weights = torch.randn(expected.shape, dtype=torch.float64)
    (expected * weights).sum().backward()
    leaves = [x.detach() if s is None else shard(x.detach(), mesh, s) for x, s in zip(wholes, specs, strict=True)]
    for x in leaves:
        (x.local if isinstance(x, Tile) else x).requires_grad_()
    found = function(*leaves)
    (found * weights).sum().backward()
    case = f"{function} {shapes} {specs}"
    whole = found.full_tensor() if isinstance(found, Tile) else found
    torch.testing.assert_close(whole, expected, **tolerances, msg=lambda m: f"{case}: {m}")
    for x, reference in zip(leaves, wholes, strict=True):
        if isinstance(x, Tile):
            gradient = Tile(_gradient_of(x.local), x.layout, mesh).full_tensor()
        else:  # each rank has its part
            gradient = comm.all_reduce(_gradient_of(x), mesh, [name for name, _ in axes_of_mesh(mesh)])
        torch.testing.assert_close(
            gradient, _gradient_of(reference), **tolerances, msg=lambda m: f"gradient of {case}: {m}"
        )


def _gradient_of(x):
    """Zeros for what the function has only looked at, as at labels."""
    return torch.zeros_like(x) if x.grad is None else x.grad
