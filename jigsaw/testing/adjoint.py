"""The adjoint test: a linear op on tiles and its backward pass are transposes of each other."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jigsaw.geometry.layout import LayoutSpec
from jigsaw.testing.rank import world_mesh
from jigsaw.testing.world import run_on_ranks
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

_USUAL_MESHES = ({"lat": 1}, {"lat": 2}, {"lat": 3}, {"lat": 4}, {"lat": 2, "lon": 2})


def assert_adjoint(
    op: Callable[[Tile], Any],
    shape: Sequence[int],
    meshes: Sequence[Mapping[str, int]] = _USUAL_MESHES,
    *,
    spec: LayoutSpec,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-10,
    timeout: float = 60.0,
    **cut: Any,
) -> None:
    """Assert ``<F x, y> = <x, F* y>`` for the linear `op` F on tiles and its backward pass F*, on every mesh.

    x is a random tensor of the global `shape`, cut by `spec` (and split=, align=, halo=, periodic=, as in
    `jigsaw.shard`). y is random on what each rank holds of F x. The products are sums over the ranks, in which a part
    that several ranks hold counts once. `op` returns a Tile, or a tensor that is the same on every rank; it must
    pickle. The error may be ``rtol * |F x| |y|``.

    Source: Hewett and Grady, A linear algebraic approach to model parallelism in deep learning, arXiv 2006.03108.

    Raises: `AssertionError` with both products; `RankFailedError` when a rank raises.

    >>> blur = torch.nn.Conv2d(1, 1, 3, padding=1, bias=False, dtype=torch.float64)
    >>> jigsaw.testing.assert_adjoint(blur, (2, 1, 7, 5), [{"lat": 2}], spec=(None, None, "lat", None))
    """
    for axes in meshes:
        ranks = math.prod(axes.values())
        products = run_on_ranks(
            ranks, _adjoint_products, op, tuple(shape), dict(axes), spec, dtype, cut, timeout=timeout
        )
        forward, backward, fx, y = (math.fsum(column) for column in zip(*products, strict=True))
        where = ", ".join(f"{name}={size}" for name, size in axes.items())
        if not forward or abs(forward - backward) > rtol * math.sqrt(fx * y):
            raise AssertionError(
                f"{getattr(op, '__name__', op)} on the mesh {where}, shape {tuple(shape)}: "
                f"<F x, y> = {forward!r}, but <x, F* y> = {backward!r}"
                + ("" if forward else "; F x is zero everywhere")
            )


def _adjoint_products(
    op: Callable[[Tile], Any],
    shape: tuple[int, ...],
    axes: dict[str, int],
    spec: LayoutSpec,
    dtype: torch.dtype,
    cut: dict[str, Any],
) -> tuple[float, float, float, float]:
    """Return this rank's share of <F x, y>, <x, F* y>, |F x|² and |y|²."""
    mesh = world_mesh(**axes)
    x = shard(torch.randn(shape, dtype=dtype), mesh, spec, **cut)
    x.local.requires_grad_()
    out = op(x)
    fx: Tensor = out.local if isinstance(out, Tile) else out
    box = out.layout.held(out.coordinate) if isinstance(out, Tile) else ()
    # ranks that hold the same box draw the same y, because gradients of equal parts are equal
    y = torch.randn(fx.shape, generator=torch.Generator().manual_seed(hash(box) % 2**63), dtype=fx.dtype)
    gradient = torch.autograd.grad(fx, x.local, y, allow_unused=True)[0] if fx.requires_grad else None
    gradient = torch.zeros_like(x.local) if gradient is None else gradient
    once_y = 1 / (out.layout.replicas if isinstance(out, Tile) else mesh.size())
    once_x = 1 / x.layout.replicas
    fx = fx.detach()
    return (
        once_y * (fx * y).sum().item(),
        once_x * (x.local.detach() * gradient).sum().item(),
        once_y * fx.square().sum().item(),
        once_y * y.square().sum().item(),
    )
