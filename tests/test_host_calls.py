"""How many Python functions a torch function on tiles calls, which is what the host pays; and what is kept of it.

Counts, not times: `benchmarks/host_time.py` has these.  A bound leaves room for a few calls more.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import inspect
import math
import pkgutil
import sys
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jigsaw
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh
from jigsaw.testing.played_device import PLAYED_DEVICE, refuse_host_waits, why_not_played
from jigsaw.tile.tile_making import shard

SPACE = (None, None, "lat", None)


def _operands(mesh):
    torch.manual_seed(0)
    specs = {"tall": SPACE, "x": SPACE, "y": SPACE, "z": SPACE, "tokens": (None, "lat", None), "heads": SPACE}
    sizes = {"tall": (1, 4, 64, 8), "tokens": (1, 16, 4), "heads": (1, 2, 16, 4)}
    tiles = {k: shard(torch.randn(sizes.get(k, (1, 4, 8, 8))), mesh, spec) for k, spec in specs.items()}
    return tiles | {"labels": shard(torch.randint(4, (1, 8, 8)), mesh, (None, "lat", None))}


W, W3, B, SCALE = torch.randn(4, 4), torch.randn(4, 4, 3, 3), torch.randn(4), torch.randn(4, 1, 1)

# what is called, and how many Python functions it may call beyond those of the same call on plain tensors
CALLS: dict[str, tuple[int, Callable[[dict[str, Any]], Any]]] = {
    "x + y": (12, lambda t: t["x"] + t["y"]),
    "x * scale": (27, lambda t: t["x"] * SCALE),
    "z += y": (17, lambda t: t["z"].add_(t["y"])),
    "gelu": (12, lambda t: F.gelu(t["x"])),
    "mean": (15, lambda t: t["x"].mean(1)),
    "slice": (27, lambda t: t["x"][:, :2]),
    "flatten": (35, lambda t: t["x"].flatten(2)),
    "cat": (27, lambda t: torch.cat([t["x"], t["y"]], 1)),
    "stack": (36, lambda t: torch.stack([t["x"], t["y"]], 1)),
    "linear": (30, lambda t: F.linear(t["tokens"], W, B)),
    "layer_norm": (30, lambda t: F.layer_norm(t["tokens"], (4,), B, B)),
    "conv2d 1x1": (33, lambda t: F.conv2d(t["x"], W[:, :, None, None], B)),
}
ALONE: dict[str, tuple[int, Callable[[dict[str, Any]], Any]]] = {
    "conv2d 3x3": (33, lambda t: F.conv2d(t["x"], W3, B, padding=1)),
    "attention": (45, lambda t: F.scaled_dot_product_attention(t["heads"], t["heads"], t["heads"])),
    "einsum": (40, lambda t: torch.einsum("bchw,oc->bohw", t["x"], W)),
    "mse_loss": (45, lambda t: F.mse_loss(t["x"], t["y"])),
    "cross_entropy": (65, lambda t: F.cross_entropy(t["x"], t["labels"])),
}


# what sends, on two ranks: of a convolution of a small tile one exchange, of a large one strips
SENDING: dict[str, tuple[int, Callable[[dict[str, Any]], Any]]] = {
    "sum": (75, lambda t: t["x"].sum()),
    "group_norm": (210, lambda t: F.group_norm(t["x"], 2, B, B)),
    "conv2d 3x3": (195, lambda t: F.conv2d(t["x"], W3, B, padding=1)),
    "conv2d by strips": (280, lambda t: F.conv2d(t["tall"], W3, B, padding=1)),
}


def _calls_of(function: Callable[[], Any]) -> int:
    """The Python functions that the third call of a function calls: what is planned once was planned."""
    function()
    function()
    found = 0

    def notice(frame, event, argument):
        nonlocal found
        found += event == "call"

    before = sys.getprofile()
    # a collection within the call would count what it calls for the objects of earlier tests
    gc.collect()
    gc.disable()
    sys.setprofile(notice)
    try:
        function()
    finally:
        sys.setprofile(before)
        gc.enable()
    return found


def _too_many(mesh, cases):
    tiles = _operands(mesh)
    local = {k: tile.local for k, tile in tiles.items()}
    found = {}
    with torch.no_grad():
        for name, (most, call) in cases.items():
            added = _calls_of(lambda call=call: call(tiles)) - _calls_of(lambda call=call: call(local))
            if added > most:
                found[name] = f"{added} calls, at most {most}"
    return found


@on_ranks(1)
def test_calls_on_one_rank():
    found = _too_many(world_mesh(lat=1), CALLS | ALONE)
    assert not found, found


@on_ranks(2)
def test_calls_of_what_sends_nothing_on_two_ranks():
    found = _too_many(world_mesh(lat=2), CALLS)
    assert not found, found


@on_ranks(2)
def test_calls_of_what_sends():
    found = _too_many(world_mesh(lat=2), SENDING)
    assert not found, found


@on_ranks(2)
def test_calls_of_a_step_grow_as_its_parameters_do():
    mesh = world_mesh(lat=2)
    tile = shard(torch.randn(8, 4), mesh, ("lat", None))

    def step_calls(layers):
        model = jigsaw.parallelize(nn.Sequential(*(nn.Linear(4, 4) for _ in range(layers))), mesh)
        return _calls_of(lambda: model(tile).square().mean().backward())

    assert step_calls(60) < 2 * step_calls(30)


class _WholeNet(nn.Module):
    """Convolutions, norms, an odd resize, attention, an embedding, picked rows, and a loss of classes."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm = nn.Conv2d(4, 8, 3, padding=1, padding_mode="circular"), nn.BatchNorm2d(8)
        self.down, self.group = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8)
        self.attention = nn.TransformerEncoderLayer(16, 4, 16, 0.0, batch_first=True)
        self.places, self.leave = nn.Embedding(9, 16), nn.Linear(16, 4)
        self.register_buffer("rows", torch.tensor([3, 0, 2]))
        self.mask_token = nn.Parameter(torch.ones(16))  # never has a gradient, as in many published nets

    def forward(self, x, labels):
        high = F.gelu(self.norm(self.enter(x)))
        low = F.interpolate(self.group(self.down(high)), size=high.shape[-2:], mode="bilinear")
        x = torch.cat([high, low], 1).flatten(2).transpose(1, 2)
        x = self.attention(x + self.places.weight[:3].mean(0)) + self.places(labels.flatten(1))
        picked = self.leave(x.roll(1, 1))
        loss = F.cross_entropy(picked.transpose(1, 2), labels.flatten(1) % 4)
        return loss + F.mse_loss(x, x.detach() * 0.5) + x[:, :, self.rows].square().mean()


@pytest.mark.slow  # the device is compiled first, which takes minutes on a busy machine
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(why_not_played()), reason=why_not_played() or "it may")
@pytest.mark.parametrize("axes", [{"lat": 1}, {"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}])
def test_no_step_looks_at_values_that_a_gpu_has(axes):
    run_on_ranks(math.prod(axes.values()), _steps_without_looks, axes, device=PLAYED_DEVICE)


def _steps_without_looks(axes):
    mesh = world_mesh(**axes)
    torch.manual_seed(0)
    model = jigsaw.parallelize(_WholeNet().to(PLAYED_DEVICE), mesh)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    spec = (None, None, *("lat", "lon" if "lon" in axes else None))
    x = shard(torch.randn(2, 4, 9, 8).to(PLAYED_DEVICE), mesh, spec)
    labels = shard(torch.randint(9, (2, 9, 8)).to(PLAYED_DEVICE), mesh, (None, *spec[2:]))
    for step in range(3):
        # what is made once may wait, and the first steps are compared by rank
        with refuse_host_waits() if step == 2 else contextlib.nullcontext():
            model(x, labels).backward()
            jigsaw.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.slow  # the device is compiled first, which takes minutes on a busy machine
@pytest.mark.timeout(900)
@pytest.mark.skipif(bool(why_not_played()), reason=why_not_played() or "it may")
def test_who_has_a_gradient_may_change_at_each_step():
    run_on_ranks(3, _steps_of_a_spare_parameter, device=PLAYED_DEVICE)


def _steps_of_a_spare_parameter():
    mesh = world_mesh(lat=3)
    net = nn.Linear(4, 4)
    net.spare = nn.Parameter(torch.ones(2))
    model = jigsaw.parallelize(net.to(PLAYED_DEVICE), mesh)
    tile = shard(torch.randn(8, 4).to(PLAYED_DEVICE), mesh, ("lat", None))
    for step, ranks in enumerate([(1,), (), (), (1,), (0, 1, 2), (2,), (), (0, 1, 2)]):
        # from the second step without a gradient on, the hosts tell each other, also when there is one again
        with refuse_host_waits() if step in (2, 3, 4) else contextlib.nullcontext():
            loss = model(tile).square().mean()
            if mesh.get_rank() in ranks:
                loss = loss + model.spare.sum() * 6
            loss.backward()
        expected = torch.full((2,), 2.0 * len(ranks)) if ranks else None
        assert (model.spare.grad is None) == (not ranks), (step, ranks)
        torch.testing.assert_close(None if expected is None else model.spare.grad.cpu(), expected)
        assert model.weight.grad is not None
        model.zero_grad()


@on_ranks(1)
def test_what_is_kept_of_a_call_keeps_no_tensor():
    tiles = _operands(world_mesh(lat=1))
    for _, call in (CALLS | ALONE).values():
        call(tiles)
    left = [ref(tile.local) for tile in tiles.values()]
    tiles.clear()
    gc.collect()
    assert [alive() for alive in left] == [None] * len(left)


def _modules():
    for found in pkgutil.walk_packages(jigsaw.__path__, "jigsaw."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def test_every_cache_is_bounded():
    for module in _modules():
        for name, value in vars(module).items():
            if hasattr(value, "cache_parameters") and inspect.signature(value).parameters:
                assert value.cache_parameters()["maxsize"] is not None, f"{module.__name__}.{name} grows for ever"
