"""Functions of two operands of which one is repeated along a dim, cut anyhow or plain: what they give is that of the
whole tensors.
"""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from random_cuts import any_spec, assert_as_the_whole

from jigsaw.testing import on_ranks, world_mesh

FUNCTIONS = {
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y, -1) + F.cosine_similarity(x, y, 1).sum(),
    "cosine_similarity of a small one": lambda x, y: F.cosine_similarity(x, y * 1e-3, -1, 0.1),
    "pairwise_distance": F.pairwise_distance,
    "dist": lambda x, y: torch.dist(x, y, 3),
    "vecdot": torch.linalg.vecdot,
    "trapezoid": lambda x, y: torch.trapezoid(x, y.cumsum(-1), dim=-1),
    "logaddexp": torch.logaddexp,
    "einsum": lambda x, y: torch.einsum("...j,...j->...", x, y),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "where": lambda x, y: torch.where(x > 0, x, y).softmax(-1),
    "hypot": lambda x, y: torch.hypot(x, y).mean(-1),
}
SHAPES = [((2, 5, 7), (2, 5, 1)), ((2, 5, 7), (1, 7)), ((2, 5, 1), (5, 7)), ((1, 5, 1), (2, 1, 7)), ((2, 5, 7), (7,))]


def _check(mesh, seed):
    generator = random.Random(seed)
    torch.manual_seed(0)
    for name, function in FUNCTIONS.items():
        for shapes in SHAPES:
            if name == "trapezoid" and (shapes[0][-1] == 1 or shapes[1][-1] == 1):
                continue
            specs = [any_spec(generator, s, mesh.mesh_dim_names) for s in shapes]
            if all(s is None for s in specs):
                continue
            assert_as_the_whole(function, shapes, specs, mesh)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@on_ranks(3)
def test_one_axis(seed):
    _check(world_mesh(lat=3), seed)


@pytest.mark.slow
@on_ranks(4)
def test_two_axes():
    _check(world_mesh(lat=2, lon=2), 2)
