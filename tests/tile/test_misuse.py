"""What a person is likely to forget is said aloud."""

import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import jigsaw
from jigsaw import ShardingError
from jigsaw.errors import CheckpointError
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile import misuse


def step(model, optimizer, x):
    model(x).square().mean().backward()
    optimizer.step()


@on_ranks(2)
def test_an_optimizer_of_before_parallelize_raises():
    mesh, model = world_mesh(lat=2), nn.Linear(4, 4)
    early = torch.optim.SGD(model.parameters(), 0.1)
    jigsaw.parallelize(model, mesh, shard_weights=True)
    x = jigsaw.shard(torch.ones(6, 4), mesh, ("lat", None))
    with pytest.raises(ShardingError, match=r"SGD was made before jigsaw.parallelize.*model.parameters\(\) after"):
        step(model, early, x)
    step(model, torch.optim.SGD(model.parameters(), 0.1), x)


@on_ranks(2)
def test_one_made_before_is_right_where_nothing_is_replaced():
    mesh, model = world_mesh(lat=2), nn.Linear(4, 4)
    early = torch.optim.SGD(model.parameters(), 0.1)
    jigsaw.parallelize(model, mesh)
    before = model.weight.detach().clone()
    step(model, early, jigsaw.shard(torch.ones(6, 4), mesh, ("lat", None)))
    assert not torch.equal(model.weight, before)


@on_ranks(2)
def test_a_module_without_parallelize_warns_once():
    misuse._warned.clear()
    model = nn.Linear(4, 4)
    x = jigsaw.shard(torch.ones(6, 4), world_mesh(lat=2), ("lat", None))
    with pytest.warns(UserWarning, match=r"of shape \(4.*meets a tile that is cut.*call jigsaw.parallelize"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
    misuse._warned.clear()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        model(x)
    jigsaw.parallelize(model, world_mesh(lat=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


@on_ranks(4)
def test_an_axis_that_cuts_nothing_warns_once():
    misuse._warned.clear()
    mesh = world_mesh(lat=2, lon=2)
    model = jigsaw.parallelize(nn.Linear(4, 4), mesh)
    x = jigsaw.shard(torch.ones(6, 6, 4), mesh, ("lat", None, None))
    with pytest.warns(UserWarning, match=r"mesh axes 'lon' \(2 ranks\) cut no input of Linear and no weight"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)
        model(jigsaw.shard(torch.ones(6, 6, 4), mesh, ("lat", "lon", None)))
    misuse._warned.clear()
    with_channels = world_mesh(lat=2, channel=2)
    cut = jigsaw.parallelize(nn.Linear(4, 4), with_channels)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cut(jigsaw.shard(torch.ones(6, 6, 4), with_channels, ("lat", None, None)))


@on_ranks(2)
def test_gradients_that_no_wrapper_averages_warn_once():
    misuse._warned.clear()
    mesh = world_mesh(lat=2)
    x = jigsaw.shard(torch.ones(6, 4), mesh, ("lat", None))
    model = jigsaw.parallelize(nn.Linear(4, 4), mesh, reduce=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nn.parallel.DistributedDataParallel(model)(x).sum().backward()
        nn.parallel.DistributedDataParallel(nn.Sequential(model))(x).sum().backward()
        with torch.no_grad():
            model(x)
    with pytest.warns(UserWarning, match=r"Linear went through .*reduce=False.*no DistributedDataParallel is around"):
        model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x)


@on_ranks(2)
def test_weights_that_differ_are_not_saved(tmp_path):
    model = jigsaw.parallelize(nn.Linear(4, 4), world_mesh(lat=2))
    jigsaw.save(tmp_path / "good", model=model)
    with torch.no_grad():
        model.bias[2] += dist.get_rank()
    with pytest.raises(CheckpointError, match=r"'model.bias' differs between ranks \(1 and 0 among them\)"):
        jigsaw.save(tmp_path / "bad", model=model)
    with pytest.raises(CheckpointError, match=r"'bias' differs between ranks \(1 and 0 among them\)"):
        jigsaw.save_weights(tmp_path / "bad.safetensors", model)
    assert [each.name for each in tmp_path.iterdir()] == ["good"]
