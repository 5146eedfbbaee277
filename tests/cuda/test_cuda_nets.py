"""Nets on tiles of a GPU: exact, in plain torch's memory and formats, in mixed precision, compiled and captured."""

from __future__ import annotations

import contextlib
import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from device_under_test import DEVICE, device_mesh, has_nccl_for, on_ranks, refused_waits, settle
from torch import nn

import jigsaw
from jigsaw.errors import ShardingError
from jigsaw.testing.played_device import PLAYED_DEVICE

SPEC = (None, None, "lat", "lon")
gpu_only = pytest.mark.gpu_only
played_only = pytest.mark.skipif(DEVICE != PLAYED_DEVICE, reason="gloo on GPUs copies to the host")
by_nccl = pytest.mark.skipif(not has_nccl_for(2), reason="fewer GPUs than ranks, and NCCL is older than 2.30")


class UNet(nn.Module):
    """Two levels with a skip that `interpolate` meets at an odd size."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU())
        self.down = nn.Sequential(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.SiLU())
        self.leave = nn.Conv2d(24, 3, 3, padding=1, padding_mode="circular")

    def forward(self, x):
        high = self.enter(x)
        return self.leave(torch.cat([high, F.interpolate(self.down(high), size=high.shape[-2:])], 1))


class Tokens(nn.Module):
    """Patches, a class token, attention over all tokens."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 2, stride=2)
        self.head = nn.Parameter(torch.randn(1, 1, 16))
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True) for _ in range(2)])

    def forward(self, x):
        x = torch.cat([self.head.expand(x.shape[0], -1, -1), self.patch(x).flatten(2).transpose(1, 2)], 1)
        for block in self.blocks:
            x = block(x)
        return x.mean(1)


class Mixer(nn.Module):
    """Every row meets every other in one product."""

    def __init__(self):
        super().__init__()
        self.rows, self.fields = nn.Parameter(torch.randn(18, 18)), nn.Linear(3, 5)

    def forward(self, x):
        x = torch.einsum("bchw,hk->bckw", x, self.rows) + torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:])
        return self.fields(x.permute(0, 2, 3, 1))


NETS = {"unet": UNet, "tokens": Tokens, "mixer": Mixer}


def _pair(name, mesh, rows=18, dtype=torch.float64, **options):
    torch.manual_seed(0)
    whole = NETS[name]().to(DEVICE, dtype)
    tiled = jigsaw.parallelize(copy.deepcopy(whole), mesh, **options)
    x = torch.randn(2, 3, rows, 12, dtype=dtype).to(DEVICE)
    spec = tuple(a if a in (mesh.mesh_dim_names or ()) else None for a in SPEC)
    return whole, tiled, x, jigsaw.shard(x, mesh, spec)


def _check_step(name, axes, rows=18, **options):
    whole, tiled, x, tile = _pair(name, device_mesh(**axes), rows, **options)
    expected, found = whole(x), tiled(tile)
    expected.square().mean().backward()
    found.square().mean().backward()
    found = found.full_tensor() if isinstance(found, jigsaw.Tile) else found
    assert found.device.type == DEVICE
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    for (parameter, ours), theirs in zip(tiled.named_parameters(), whole.parameters(), strict=True):
        grad = ours.grad.full_tensor() if hasattr(ours.grad, "full_tensor") else ours.grad
        torch.testing.assert_close(grad, theirs.grad, rtol=1e-9, atol=1e-11, msg=parameter)
    settle()


@pytest.mark.parametrize("name", NETS)
@on_ranks(1)
def test_a_step_on_one_gpu(name):
    _check_step(name, {"lat": 1})


@pytest.mark.parametrize("name", NETS)
@on_ranks(2)
def test_a_step_of_ranks_that_share_a_gpu(name):
    _check_step(name, {"lat": 2})


@gpu_only
@by_nccl
@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("shard_weights", [False, True])
@on_ranks(2, backend="nccl")
def test_a_step_over_nccl(name, shard_weights):
    _check_step(name, {"lat": 2}, shard_weights=shard_weights)


@gpu_only
@on_ranks(2, backend="gloo")
def test_weights_are_not_cut_over_gloo_on_gpus():
    with pytest.raises(ShardingError, match="FSDP2 needs a backend of its own"):
        jigsaw.parallelize(UNet().to(DEVICE), device_mesh(lat=2), shard_weights=True)


@pytest.mark.parametrize("name", NETS)
@on_ranks(4)
def test_a_step_on_two_by_two(name):
    _check_step(name, {"lat": 2, "lon": 2})


@pytest.mark.parametrize("way", ["ring", "heads"])
@on_ranks(3)
def test_ways_of_attention(way):
    mesh = device_mesh(lat=3)
    torch.manual_seed(0)
    whole = [torch.randn(1, 4, 19, 8, dtype=torch.float64).to(DEVICE).requires_grad_() for _ in range(3)]
    tiles = [jigsaw.shard(x.detach(), mesh, (None, None, "lat", None)) for x in whole]
    for tile in tiles:
        tile.local.requires_grad_()
    weights = torch.randn(1, 4, 19, 8, dtype=torch.float64).to(DEVICE)
    expected = F.scaled_dot_product_attention(*whole, is_causal=True)
    (expected * weights).sum().backward()
    with jigsaw.nn.attention_way(way):
        found = F.scaled_dot_product_attention(*tiles, is_causal=True)
    (found * weights).sum().backward()
    torch.testing.assert_close(found.full_tensor(), expected, rtol=1e-9, atol=1e-11)
    for tile, x in zip(tiles, whole, strict=True):
        grad = jigsaw.Tile(tile.local.grad, tile.layout, mesh).full_tensor()
        torch.testing.assert_close(grad, x.grad, rtol=1e-9, atol=1e-11)


@on_ranks(2)
def test_dropout_is_that_of_the_cpu():
    def kept(device):
        torch.manual_seed(3)
        mesh = jigsaw.init_mesh(device=device, lat=2)
        return F.dropout(jigsaw.shard(torch.ones(9, 4).to(device), mesh, ("lat", None)), 0.5).full_tensor().cpu()

    assert torch.equal(kept(DEVICE), kept("cpu"))


@on_ranks(1)
def test_channels_last_stays():
    whole, tiled, x, _ = _pair("unet", device_mesh(lat=1), dtype=torch.float32)
    x = x.to(memory_format=torch.channels_last)
    tile = jigsaw.shard(x, device_mesh(lat=1), (None, None, "lat", None))
    assert tile.local.is_contiguous(memory_format=torch.channels_last)
    for net in (whole, tiled):
        net.to(memory_format=torch.channels_last)
    found, expected = tiled.enter[0](tile).local, whole.enter[0](x)
    assert found.stride() == expected.stride()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NETS)
@on_ranks(2)
def test_autocast_rounds_as_plain_torch(name):
    whole, tiled, x, tile = _pair(name, device_mesh(lat=2), rows=18, dtype=torch.float32)
    exact = copy.deepcopy(whole).double()(x.double())
    with torch.autocast(DEVICE, torch.bfloat16):
        expected, found = whole(x), tiled(tile)
    found = found.full_tensor() if isinstance(found, jigsaw.Tile) else found
    assert found.dtype == expected.dtype
    theirs, ours = (expected - exact).abs().max(), (found - exact).abs().max()
    assert ours <= 2 * theirs + 1e-3


@gpu_only
@pytest.mark.parametrize("tf32", [True, False])
@on_ranks(1)
def test_tf32_is_torchs_switch(tf32):
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
    whole, tiled, x, tile = _pair("mixer", device_mesh(lat=1), dtype=torch.float32)
    torch.testing.assert_close(tiled(tile).local, whole(x), rtol=0, atol=0 if tf32 else 1e-5)


@gpu_only
@pytest.mark.parametrize("name", NETS)
@on_ranks(1)
def test_memory_is_that_of_plain_torch(name):
    def peak(net, given):
        net(given).square().mean().backward()  # what is kept after a first step is not part of it
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        net(given).square().mean().backward()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - base

    torch.manual_seed(0)
    mesh = device_mesh(lat=1)
    whole, tiled, _, _ = _pair(name, mesh, dtype=torch.float32)
    x = torch.randn(2, 3, 18, 4000 if name != "tokens" else 300, device=DEVICE)
    theirs, ours = peak(whole, x), peak(tiled, jigsaw.shard(x, mesh, (None, None, "lat", None)))
    assert ours <= 1.05 * theirs + 2**20


def _check_that_no_step_waits(name, ranks):
    _, tiled, _, tile = _pair(name, device_mesh(lat=ranks), dtype=torch.float32)
    optimizer = torch.optim.AdamW(tiled.parameters())
    for step in range(3):
        # what is made once may wait
        with refused_waits() if step == 2 else contextlib.nullcontext():
            tiled(tile).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("name", NETS)
@on_ranks(1)
def test_the_host_waits_for_no_step_on_one_gpu(name):
    _check_that_no_step_waits(name, 1)


@played_only
@pytest.mark.parametrize("name", NETS)
@on_ranks(2)
def test_the_host_waits_for_no_step_of_ranks(name):
    _check_that_no_step_waits(name, 2)


@gpu_only
@by_nccl
@pytest.mark.parametrize("name", NETS)
@on_ranks(2, backend="nccl")
def test_the_host_waits_for_no_step_over_nccl(name):
    _check_that_no_step_waits(name, 2)


@gpu_only
@on_ranks(1)
def test_a_forward_pass_in_a_cuda_graph():
    whole, tiled, x, tile = _pair("unet", device_mesh(lat=1), dtype=torch.float32)
    whole.eval(), tiled.eval()
    side = torch.cuda.Stream()
    with torch.no_grad(), torch.cuda.stream(side):
        for _ in range(3):
            tiled(tile)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        found = tiled(tile)
    tile.local.copy_(2 * x)
    graph.replay()
    torch.cuda.synchronize()
    with torch.no_grad():
        torch.testing.assert_close(found.local, whole(2 * x), rtol=1e-4, atol=1e-4)


@gpu_only  # no compiler knows the played device
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["unet", "tokens"])
@on_ranks(2, timeout=400)
def test_compiled(name):
    mesh = device_mesh(lat=2)
    whole, tiled, x, tile = _pair(name, mesh, dtype=torch.float32)
    compiled = jigsaw.compile(tiled)
    found = compiled(tile)
    found.square().mean().backward()
    expected = whole(x)
    expected.square().mean().backward()
    found = found.full_tensor() if isinstance(found, jigsaw.Tile) else found
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=2e-3)
    for (parameter, ours), theirs in zip(tiled.named_parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-2, atol=2e-3, msg=parameter)


@pytest.mark.parametrize(
    "maker",
    [
        torch.optim.AdamW,
        torch.optim.Adafactor,
        pytest.param(functools.partial(torch.optim.AdamW, fused=True), marks=gpu_only),
        pytest.param(functools.partial(torch.optim.AdamW, capturable=True), marks=gpu_only),
    ],
    ids=["AdamW", "Adafactor", "fused", "capturable"],
)
@on_ranks(1)
def test_the_state_of_an_optimizer_lies_where_it_lay(tmp_path, maker):
    device_mesh(lat=1)
    x = torch.randn(5, 4).to(DEVICE)
    models = [nn.Linear(4, 6).to(DEVICE) for _ in range(2)]
    optimizers = [maker(model.parameters()) for model in models]
    models[0](x).square().mean().backward()
    optimizers[0].step()
    jigsaw.save(tmp_path / "it", model=models[0], optimizer=optimizers[0])
    jigsaw.load(tmp_path / "it", model=models[1], optimizer=optimizers[1])
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        lay, lies = optimizers[0].state[p], optimizers[1].state[q]
        assert {n: v.device for n, v in lay.items()} == {n: v.device for n, v in lies.items()}
    for model, optimizer in zip(models, optimizers, strict=True):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True))
