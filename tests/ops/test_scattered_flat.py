"""Rows and elements at places of flattened dims, whose rows lie in several runs on a rank."""

import torch

from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

SPACE = (None, "lat", "lon", None)
ROWS = torch.tensor([0, 7, 7, 13, 39, 22])


def places(x):
    flat = x.reshape(-1, 3)
    pairs = torch.stack([ROWS, ROWS.flip(0), (ROWS + 3) % 40], 1)
    added = torch.zeros_like(flat).index_add_(0, ROWS, flat[ROWS] * 2)
    written = flat.clone().index_copy_(0, ROWS[[0, 2, 3]], torch.ones(3, 3, dtype=x.dtype))
    return [
        added.reshape(x.shape),
        written.index_fill(0, torch.tensor([-1, 4]), 5.0),
        flat.gather(0, pairs),
        flat.scatter_add(0, pairs, flat[ROWS] ** 2),
        flat.scatter(0, pairs[:2], 3.0),
        torch.special.expit(x) + torch.special.ndtr(x),
    ]


def test_places_of_flattened_dims_are_those_of_the_whole():
    meshes = [{"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}]
    assert_same_on_every_mesh(places, torch.randn(2, 5, 4, 3, dtype=torch.float64), meshes, spec=SPACE)
    assert_same_on_every_mesh(places, torch.randn(4, 2, 5, 3, dtype=torch.float64), [{"lat": 4}], spec=SPACE)


@on_ranks(2)
def test_a_number_is_gathered_as_one_element():
    index = shard(torch.zeros(3, dtype=torch.int64), world_mesh(lat=2), ("lat",))
    assert torch.gather(torch.tensor(2.5), 0, index).full_tensor().tolist() == [2.5, 2.5, 2.5]


@on_ranks(2)
def test_rows_are_written_alike_where_a_rank_has_none():
    for name, more in (("index_add", ()), ("index_copy", ()), ("index_reduce", ("amax",))):
        whole, index = torch.randn(1, 4, 5, dtype=torch.float64), torch.tensor([0, 2])
        tile = shard(whole, world_mesh(lat=2), ("lat", None, None))
        written = getattr(torch, name)(tile, 1, index, torch.index_select(tile, 1, index) + 1, *more)
        expected = getattr(torch, name)(whole, 1, index, whole[:, index] + 1, *more)
        torch.testing.assert_close(written.full_tensor(), expected)
