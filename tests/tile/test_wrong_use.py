"""Ranks that disagree: a typed error on every rank, at once, and the ranks can go on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.tile_making import from_local, shard

SPEC = ("lat", None)

# what the last rank passes, as a change of what the others do
DISAGREE = {
    "shape": {"shape": (9, 6)},
    "ndim": {"shape": (8, 6, 2), "spec": ("lat", None, None)},
    "dtype": {"dtype": torch.bfloat16},
    "requires_grad": {"requires_grad": True},
    "spec": {"spec": (None, "lat")},
    "spec of another length": {"spec": ("lat",)},
    "split": {"split": "chunk"},
    "points": {"split": [0, 1, 8]},
    "align": {"align": 2},
    "halo": {"halo": {0: 1}},
    "periodic": {"periodic": (0,)},
    "mesh": {"mesh": {"lat": 1, "lon": 2}},
    "order of axes": {"mesh": {"lon": 1, "lat": 2}},
}


def arguments(mesh=None, shape=(8, 6), dtype=torch.float32, requires_grad=False, spec=SPEC, **options):
    mesh = world_mesh(**(mesh or {"lat": 2, "lon": 1}))
    return mesh, torch.ones(shape, dtype=dtype, requires_grad=requires_grad), spec, options


@pytest.mark.parametrize("name", DISAGREE)
@on_ranks(2)
def test_shard_with_different_arguments(name):
    for one in (DISAGREE[name], {}) if "mesh" in DISAGREE[name] else ({},):
        arguments(**one)  # making a mesh is something that all ranks do
    mesh, x, spec, options = arguments(**(DISAGREE[name] if dist.get_rank() == 1 else {}))
    with pytest.raises(ShardingError, match=r"shard: the ranks must agree on \w+, but at place 1 of the mesh it is"):
        shard(x, mesh, spec, **options)
    mesh, x, spec, options = arguments()
    assert shard(x, mesh, spec, **options).sum().item() == 48


@pytest.mark.parametrize("name", DISAGREE)
@on_ranks(2)
def test_from_local_with_different_arguments(name):
    for one in (DISAGREE[name], {}) if "mesh" in DISAGREE[name] else ({},):
        arguments(**one)
    mesh, x, spec, options = arguments(**(DISAGREE[name] if dist.get_rank() == 1 else {}))
    with pytest.raises(
        ShardingError, match=r"from_local: the ranks must agree on \w+, but at place 1 of the mesh it is"
    ):
        from_local(x[:4], mesh, spec, tuple(x.shape), **options)
    mesh, x, spec, options = arguments()
    assert from_local(x[:4], mesh, spec, (8, 6), **options).sum().item() == 48


@on_ranks(3)
def test_one_part_that_does_not_fit():
    mesh = world_mesh(lat=3)
    part = torch.ones(3 if dist.get_rank() == 2 else 4 - dist.get_rank(), 6)
    with pytest.raises(
        ShardingError, match=r"at \(1,\) passed a local tensor of shape \(3, 6\), but .* gives it \(4, 6\)"
    ):
        from_local(part, mesh, SPEC, (12, 6))
    assert comm.all_gather_object(mesh, dist.get_rank()) == [0, 1, 2]


@on_ranks(2)
def test_tiles_of_different_meshes_are_refused_before_anything_is_sent():
    mesh, other = world_mesh(lat=2, lon=1), world_mesh(lat=1, lon=2)
    x = torch.ones(8, 6)
    tile, across = shard(x, mesh, SPEC), shard(x, mesh, (None, "lat"))
    there = shard(x, other, ("lon", None))
    with comm.count() as counted, pytest.raises(ShardingError, match="different meshes"):
        torch.cat([tile, there], dim=1)
    assert counted.calls == []
    assert (tile + across).sum().item() == 96


# arguments that torch checks only where there are rows
WRONG_ARGUMENTS = {
    "dilation of a pool": lambda x: F.max_pool2d(x, 2, dilation=0),
    "stride of a pool": lambda x: F.avg_pool2d(x, 2, -1),
    "divisor of a pool": lambda x: F.avg_pool2d(x, 2, divisor_override=0),
    "mode of other dims": lambda x: F.interpolate(x, 3, mode="linear"),
    "corners of rows": lambda x: F.interpolate(x, 3, align_corners=True),
    "groups": lambda x: F.conv2d(x, torch.ones(3, 2, 1, 1), groups=2),
    "no groups": lambda x: F.conv2d(x, torch.ones(3, 4, 1, 1), groups=0),
    "negative padding": lambda x: F.conv2d(x, torch.ones(3, 4, 1, 1), padding=-1),
    "dilation": lambda x: F.conv2d(x, torch.ones(3, 4, 3, 1), dilation=0),
    "bias": lambda x: F.conv2d(x, torch.ones(3, 4, 1, 1), torch.ones(2)),
    "bias of a transposed convolution": lambda x: F.conv_transpose2d(x, torch.ones(4, 3, 2, 2), torch.ones(2)),
    "running statistics": lambda x: F.batch_norm(x, torch.zeros(3), torch.ones(3)),
    "channels of a local norm": lambda x: F.local_response_norm(x, 0),
    "places of other dims": lambda x: F.grid_sample(x, torch.zeros(1, 2, 2, 3)),
    "range of a histogram": lambda x: torch.histc(x / 0, 3),
    "range of slopes": lambda x: F.rrelu(x, 1.0, 0.0, True),
    "chance": lambda x: torch.bernoulli(x, 2.0),
    "smoothing": lambda x: F.cross_entropy(x, torch.zeros(1, 3, 6).long(), label_smoothing=2.0),
}


@pytest.mark.parametrize("name", WRONG_ARGUMENTS)
@on_ranks(4)
def test_wrong_arguments_raise_on_ranks_without_rows_too(name):
    with pytest.raises((RuntimeError, ValueError)):
        WRONG_ARGUMENTS[name](torch.ones(1, 4, 3, 6))
    with pytest.raises((RuntimeError, ValueError, ShardingError)):
        WRONG_ARGUMENTS[name](shard(torch.ones(1, 4, 3, 6), world_mesh(lat=4), (None, None, "lat", None)))


@on_ranks(2)
def test_what_cannot_be_cut():
    mesh = world_mesh(lat=2)
    tile = shard(torch.ones(8, 6), mesh, SPEC)
    for x, place, spec, why in [
        (torch.ones(8, 6, 3), mesh, "lat", "spec='lat' is one string; give one entry a dim"),
        (np.ones((8, 6)), mesh, SPEC, "shard takes a tensor, not ndarray"),
        ([1.0, 2.0], mesh, SPEC, "shard takes a tensor, not list"),
        (torch.ones(8, 6), {"lat": 2}, SPEC, "must be a DeviceMesh, as jigsaw.init_mesh"),
        (tile, mesh, SPEC, "this is a Tile, which redistribute"),
    ]:
        with pytest.raises(ShardingError, match=why):
            shard(x, place, spec)
    with pytest.raises(ShardingError, match="must be a DeviceMesh"):
        jigsaw.parallelize(torch.nn.Linear(2, 2), {"lat": 2})
    with pytest.raises(ShardingError, match="parallelize takes a model, not Tensor"):
        jigsaw.parallelize(torch.ones(2), mesh)
