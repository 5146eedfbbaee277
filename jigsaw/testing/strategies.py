"""Strategies of hypothesis for tests of layers: tensors, meshes of few ranks, and cuts anywhere.

They need hypothesis: ``pip install 'jigsaw-torch[testing]'``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

__all__ = ["CutTensor", "axis_sizes", "cut_points_of", "cut_tensors"]


@dataclass(frozen=True)
class CutTensor:
    """A tensor, the sizes of a mesh's axes, and the arguments of `jigsaw.shard` that cut it on that mesh."""

    tensor: Tensor
    mesh: dict[str, int]
    spec: tuple[str | None, ...]
    split: dict[int, list[int]]

    def __repr__(self) -> str:
        return f"CutTensor(shape {tuple(self.tensor.shape)}, mesh={self.mesh}, spec={self.spec}, split={self.split})"


@st.composite
def axis_sizes(draw: st.DrawFn, names: Sequence[str], most_ranks: int = 4) -> dict[str, int]:
    """Draw sizes of mesh axes with these names; their product is at least 2 and at most `most_ranks`.

    >>> from hypothesis import find
    >>> find(axis_sizes(["lat", "lon"]), lambda mesh: mesh["lat"] > 1)
    {'lat': 2, 'lon': 1}
    """
    tried = itertools.product(range(1, most_ranks + 1), repeat=len(names))
    sizes = [size for size in tried if 2 <= math.prod(size) <= most_ranks]
    return dict(zip(names, draw(st.sampled_from(sizes)), strict=True))


@st.composite
def cut_points_of(draw: st.DrawFn, size: int, pieces: int) -> list[int]:
    """Draw the points that cut `size` rows into `pieces` pieces, which may be uneven or empty.

    >>> from hypothesis import find
    >>> find(cut_points_of(5, 2), lambda points: points[1] == 4)
    [0, 4, 5]
    """
    inner = st.lists(st.integers(0, size), min_size=pieces - 1, max_size=pieces - 1)
    return [0, *sorted(draw(inner)), size]


@st.composite
def cut_tensors(
    draw: st.DrawFn,
    dims: Sequence[int | str],
    sizes: tuple[int, int] = (1, 12),
    most_ranks: int = 4,
    dtype: torch.dtype = torch.float64,
) -> CutTensor:
    """Draw a tensor of normal values, a mesh, and where its axes cut the tensor.

    An entry of `dims` is the size of a dim that nothing cuts, or the name of the axis that cuts it; its size is then
    drawn from `sizes`, the least and the largest.

    >>> from hypothesis import given, settings
    >>> @settings(max_examples=2, deadline=None)
    ... @given(cut_tensors((1, 2, "lat", "lon"), most_ranks=2))
    ... def test_convolution(case):
    ...     layer = torch.nn.Conv2d(2, 3, 3, padding=1)
    ...     jigsaw.testing.assert_same_on_every_mesh(layer, case.tensor, [case.mesh], spec=case.spec, split=case.split)
    >>> test_convolution()
    """
    mesh = draw(axis_sizes([dim for dim in dims if isinstance(dim, str)], most_ranks))
    shape = [draw(st.integers(*sizes)) if isinstance(dim, str) else dim for dim in dims]
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    return CutTensor(
        torch.randn(shape, generator=random, dtype=dtype),
        mesh,
        tuple(dim if isinstance(dim, str) else None for dim in dims),
        {at: draw(cut_points_of(shape[at], mesh[dim])) for at, dim in enumerate(dims) if isinstance(dim, str)},
    )
