"""Functions of a tile against those of the whole tensor: forward and gradients, on meshes of 1, 3 and 4 ranks."""

import torch

from jigsaw.testing import assert_same_on_every_mesh
from jigsaw.testing.oracle import random_functional

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 1}, {"lat": 3}, {"lat": 4}, {"lat": 2, "lon": 2}]


def _loss(outputs):
    outputs = outputs if isinstance(outputs, list) else [outputs]
    return random_functional([y if y.is_floating_point() else y.to(torch.float64) for y in outputs])


def assert_answers_as_the_whole(function):
    torch.manual_seed(0)
    assert_same_on_every_mesh(function, torch.randn(2, 3, 7, 10), MESHES, spec=SPACE, loss=_loss)
