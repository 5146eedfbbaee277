"""Interpolation on tiles is that of the whole tensor."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 1, "lon": 1}, {"lat": 2}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}]


class Interpolate(torch.nn.Module):
    def __init__(self, **how):
        super().__init__()
        self.how = how

    def forward(self, x):
        return F.interpolate(x, **self.how)


SIZES = [
    {"scale_factor": 2},
    pytest.param({"scale_factor": 3.0}, marks=pytest.mark.slow),
    {"scale_factor": (0.5, 2)},
    {"scale_factor": 1.7},
    pytest.param({"scale_factor": 1.7, "recompute_scale_factor": True}, marks=pytest.mark.slow),
    {"size": (25, 7)},
    pytest.param({"size": (13, 30)}, marks=pytest.mark.slow),
    {"size": 6},
]


@pytest.mark.parametrize("how", SIZES, ids=str)
@pytest.mark.parametrize("mode", ["nearest", "nearest-exact", "bilinear", "corners"])
def test_interpolate(how, mode):
    more = {"mode": "bilinear", "align_corners": True} if mode == "corners" else {"mode": mode}
    layer = Interpolate(**how, **more)
    assert_same_on_every_mesh(layer, torch.randn(2, 3, 13, 10), MESHES, spec=SPACE)
    assert_same_on_every_mesh(layer, torch.randn(2, 3, 13, 10), [{"lat": 4}], spec=SPACE, split={2: (0, 1, 1, 12, 13)})
    assert_same_on_every_mesh(layer, torch.randn(2, 3, 13, 10), MESHES, spec=SPACE, halo={2: 2, 3: 1}, periodic=(3,))


@pytest.mark.parametrize("mesh", MESHES)
def test_ratios_that_divide(mesh):
    x = torch.randn(1, 2, 24, 36)
    for how in [{"scale_factor": 0.5}, {"size": (36, 24)}, {"scale_factor": (0.25, 1.5)}]:
        for mode in ("nearest", "bilinear", "bicubic", "area"):
            if mode != "area" or (how != {"size": (36, 24)} and how != {"scale_factor": (0.25, 1.5)}):
                assert_same_on_every_mesh(Interpolate(mode=mode, **how), x, [mesh], spec=SPACE)


def cubics(x):
    ways = [{"size": (20, 7)}, {"scale_factor": 1.7}, {"size": (26, 20)}, {"size": (5, 31)}, {"size": (1, 1)}]
    return [F.interpolate(x, mode="bicubic", align_corners=align, **how) for how in ways for align in (False, True)]


def test_bicubic_of_any_ratio():
    assert_same_on_every_mesh(cubics, torch.randn(1, 2, 13, 10), MESHES[1:], spec=SPACE)
    assert_same_on_every_mesh(cubics, torch.randn(1, 2, 13, 10), [{"lat": 4}], spec=SPACE, split={2: (0, 1, 1, 12, 13)})
    assert_same_on_every_mesh(cubics, torch.randn(1, 2, 13, 10), [{"lat": 2}], spec=SPACE, halo={2: 2})


def antialiased(x):
    ways = [{"size": (5, 7)}, {"scale_factor": (0.3, 1.7)}, {"size": (26, 3)}, {"size": (2, 10)}]
    made = [F.interpolate(x, mode=m, antialias=True, **how) for how in ways for m in ("bilinear", "bicubic")]
    return [*made, F.interpolate(x, (5, 20), mode="bicubic", antialias=True, align_corners=True)]


def test_antialias_of_any_ratio():
    assert_same_on_every_mesh(antialiased, torch.randn(1, 2, 13, 10), MESHES, spec=SPACE)
    assert_same_on_every_mesh(
        antialiased, torch.randn(1, 2, 13, 10), [{"lat": 4}], spec=SPACE, split={2: (0, 1, 1, 12, 13)}
    )
    assert_same_on_every_mesh(antialiased, torch.randn(1, 2, 13, 10), [{"lat": 2}], spec=SPACE, halo={2: 2})


def antialiased_rows(x):
    ways = [(size, mode) for size in ((3, 3), (7, 2)) for mode in ("bilinear", "bicubic")]
    return [F.interpolate(x, size, mode=mode, antialias=True) for size, mode in ways]


def test_antialias_where_a_rank_has_one_column():
    x, spec = torch.randn(2, 3, 4, 2), (None, None, None, "lon")
    assert_same_on_every_mesh(antialiased_rows, x, [{"lon": 2}, {"lon": 3}], spec=spec)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_one_and_three_dims(ranks):
    line, volume = torch.randn(2, 3, 33), torch.randn(1, 2, 10, 7, 5)
    for mode, align in [("nearest", None), ("linear", False), ("linear", True)]:
        assert_same_on_every_mesh(
            Interpolate(size=50, mode=mode, align_corners=align), line, [{"lat": ranks}], spec=(None, None, "lat")
        )
    for mode, align in [("nearest-exact", None), ("trilinear", False), ("trilinear", True)]:
        layer = Interpolate(scale_factor=2, mode=mode, align_corners=align)
        assert_same_on_every_mesh(layer, volume, [{"z": ranks}], spec=(None, None, "z", None, None))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic", "area"])
def test_an_empty_piece_of_a_dim_that_is_not_interpolated(mode):
    x, spec = torch.randn(2, 3, 4, 6), ("batch", "channel", None, None)
    for mesh, points in [({"batch": 3}, {0: (0, 0, 2, 2)}), ({"channel": 2}, {1: (0, 3, 3)})]:
        assert_same_on_every_mesh(Interpolate(size=(8, 3), mode=mode), x, [mesh], spec=spec, split=points)


@on_ranks(3)
def test_a_change_in_place_does_not_reach_the_input():
    x = torch.randn(1, 2, 12, 8)
    tile = shard(x, world_mesh(lat=3), SPACE, split={2: (0, 11, 11, 12)})
    F.relu(F.interpolate(tile, scale_factor=1.0), inplace=True)
    assert torch.equal(tile.full_tensor(), x)


def test_float32_agrees_where_positions_are_exact():
    torch.manual_seed(0)
    x = torch.randn(1, 2, 721, 8)
    for mode in ("nearest", "bilinear"):
        assert_same_on_every_mesh(
            Interpolate(scale_factor=2, mode=mode),
            x,
            [{"lat": 4}],
            spec=SPACE,
            dtype=torch.float32,
            rtol=1e-6,
            atol=2e-4,
        )


@on_ranks(2)
def test_bytes_of_doubling():
    tile = shard(torch.randn(1, 3, 12, 8), world_mesh(lat=2), SPACE)
    with comm.count() as sent:
        F.interpolate(tile, scale_factor=2)
    assert sent.messages == 0
    with comm.count() as sent:
        y = F.interpolate(tile, scale_factor=2, mode="bilinear")
    assert sent.sent_bytes == 3 * 8 * 4 and sent.messages == 1
    assert y.layout.dim(2)[0].points == (0, 12, 24)
    with comm.count() as sent:  # row 2 of 6 is the sum of rows 3 to 6, its neighbor's that of rows 5 to 8
        F.interpolate(tile, (6, 8), mode="bilinear", antialias=True)
    assert sent.sent_bytes == 3 * 8 * 4 and sent.messages == 1


@on_ranks(2)
def test_wrong_uses_name_the_rule():
    tile = shard(torch.randn(1, 2, 13, 8), world_mesh(lat=2), SPACE)
    with pytest.raises(ShardingError, match="mode='nearest', antialias=True along 2 dims is not answered on a cut dim"):
        F.interpolate(tile, (7, 4), mode="nearest", antialias=True)
    with pytest.raises(ShardingError, match="needs one of size and scale_factor"):
        F.interpolate(tile)
    with pytest.raises(ShardingError, match="every size must be at least 1"):
        F.interpolate(tile, scale_factor=0.01)
