"""torch.gradient of tiles is that of the whole tensor."""

import pytest
import torch

from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

SPACE = (None, "lat", "lon")
MESHES = [{"lat": 2}, {"lat": 3}]
PLACES = torch.tensor([0.0, 1.0, 3.0, 3.5, 6.0, 7.0, 9.0], dtype=torch.float64)


def gradients(x):
    places = torch.linspace(0, 1, x.shape[2], dtype=x.dtype) ** 2
    return [
        *torch.gradient(x),
        *torch.gradient(x, dim=(1, 2), spacing=[0.5, 2.0], edge_order=2),
        *torch.gradient(x, dim=1, spacing=(PLACES[: x.shape[1]],), edge_order=2),
        *torch.gradient(x, dim=[2, 1], spacing=(places, PLACES[: x.shape[1]])),
        torch.gradient(x.flatten(1), dim=1)[0],
    ]


def test_gradient_is_that_of_the_whole():
    assert_same_on_every_mesh(gradients, torch.randn(2, 7, 10), [*MESHES, {"lat": 2, "lon": 2}], spec=SPACE)
    assert_same_on_every_mesh(gradients, torch.randn(2, 4, 3), [{"lat": 4}], spec=SPACE)
    assert_same_on_every_mesh(gradients, torch.randn(2, 7, 5), [{"lat": 4}], spec=SPACE, split={1: (0, 1, 1, 2, 7)})


@on_ranks(2)
def test_gradient_needs_rows_and_places_that_fit():
    tile = shard(torch.randn(2, 2, 3), world_mesh(lat=2), SPACE[:2] + (None,))
    with pytest.raises(RuntimeError, match="2 rows: edge_order=2 needs one more"):
        torch.gradient(tile, dim=1, edge_order=2)
    with pytest.raises(RuntimeError, match="along 2 dims: spacing= has 1 entries"):
        torch.gradient(tile, dim=(1, 2), spacing=[1.0])
    with pytest.raises(RuntimeError, match=r"\(7,\) places for the 2 rows of dim 1"):
        torch.gradient(tile, dim=1, spacing=(PLACES,))
    with pytest.raises(RuntimeError, match="does not support uint8"):  # whose differences would go around
        torch.gradient(tile.to(torch.uint8), dim=2)


@on_ranks(2)
def test_redistribute_takes_the_word_of_dtensor_for_whole():
    from torch.distributed.tensor import Replicate, Shard

    x = torch.randn(2, 7, 3)
    tile = shard(x, world_mesh(lat=2), (None, "lat", None))
    whole = tile.redistribute(placements=[Replicate()])
    assert not whole.layout.cut_dims and torch.equal(whole.local, x)
    with pytest.raises(ShardingError, match=r"only Replicate\(\); pass a spec"):
        tile.redistribute(placements=[Shard(1)])
    with pytest.raises(ShardingError, match="needs a spec"):
        tile.redistribute()
