"""Dropout: the same mask on every mesh, halos included, and the rate that was asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

X = torch.ones(4, 6, 33, 20)


def _dropped(layer, halo=None, **axes):
    torch.manual_seed(3)
    tile = shard(X, world_mesh(**axes), ("data", None, "lat", "lon"), halo=halo, periodic=(3,))
    out = layer(tile)
    if halo:  # what a rank drew for a halo row is what the row's owner drew
        assert torch.equal(out.local, out.owned().with_layout(out.layout).local)
    return out.full_tensor()


LAYERS = {
    "elements": nn.Dropout(0.3),
    "channels": nn.Dropout2d(0.5),
    "tokens": lambda x: F.dropout(x.flatten(2), 0.3).unflatten(2, (33, 20)),
}


@on_ranks(4)
def _on_four(name):
    masks = [_dropped(LAYERS[name], **axes) for axes in ({"lat": 4}, {"lat": 2, "lon": 2}, {"data": 2, "lon": 2})]
    masks.append(_dropped(LAYERS[name], halo={2: 2, 3: (1, 2)}, lat=2, lon=2))
    return masks


@on_ranks(1)
def _on_one(name):
    return _dropped(LAYERS[name], lat=1)


@pytest.mark.parametrize("name", LAYERS)
def test_the_mask_is_the_same_on_every_mesh(name):
    (alone,) = _on_one(name)
    for masks in _on_four(name):
        assert all(torch.equal(mask, alone) for mask in masks)
    kept = alone != 0
    rate = 0.5 if name == "channels" else 0.7
    assert abs(kept.double().mean() - rate) < (0.25 if name == "channels" else 0.02)
    torch.testing.assert_close(alone[kept], torch.full((int(kept.sum()),), 1 / rate))
    if name == "channels":
        assert torch.equal(kept, kept[:, :, :1, :1].expand_as(kept))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
@on_ranks(2)
def test_all_that_is_dropped_keeps_its_dtype(dtype):
    tile = shard(torch.ones(5, dtype=dtype), world_mesh(lat=2), ("lat",))
    dropped = F.dropout(tile, 1.0).full_tensor()
    assert dropped.dtype == dtype and not dropped.any()


@on_ranks(2)
def test_evaluation_and_gradient():
    mesh = world_mesh(lat=2)
    tile = shard(X, mesh, (None, None, "lat", None))
    assert torch.equal(nn.Dropout(0.5).eval()(tile).local, tile.local)
    tile.local.requires_grad_()
    out = F.dropout(tile, 0.5)
    out.sum().backward()
    assert torch.equal(tile.local.grad, out.local)
    assert F.dropout(tile, 1.0).sum() == 0
    with pytest.raises(ValueError, match="between 0 and 1"):
        F.dropout(tile, 1.5)


IN_PLACE = {
    "elements": lambda x: F.dropout(x, 0.5, inplace=True),
    "channels": lambda x: F.dropout2d(x, 0.5, inplace=True),
    "alpha": lambda x: F.alpha_dropout(x, 0.5, training=True, inplace=True),
    "features": lambda x: F.feature_alpha_dropout(x, 0.5, training=True, inplace=True),
    "all": lambda x: F.alpha_dropout(x, 1.0, training=True, inplace=True),
}


@pytest.mark.parametrize("name", IN_PLACE)
@on_ranks(4)
def test_inplace_changes_the_tile(name):
    leaf = shard(X.clone(), world_mesh(lat=2, lon=2), (None, None, "lat", "lon"), halo={2: 1}).requires_grad_()
    x = leaf * 2
    out = IN_PLACE[name](x)
    assert out is x
    again = (x * 1).full_tensor()  # what a residual behind the layer sees
    assert torch.equal(again, out.full_tensor())
    assert not torch.equal(again, 2 * X)
    out.sum().backward()
    slope = leaf.grad.full_tensor() if leaf.grad is not None else leaf.local.grad
    assert (slope == 0).any()
