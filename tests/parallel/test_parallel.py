"""`parallelize`: every step on every mesh is the step of one process, with whole weights and with cut ones."""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import pickle

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.nn.products.linear import Linear
from jigsaw.parallel.parallelize import clip_grad_norm_, no_sync, parallelize
from jigsaw.parallel.sharding import sharding_units
from jigsaw.ranks.mesh import flat_submesh
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

SPEC = ("data", None, "lat", "lon")
MESHES = [
    {"lat": 1},
    {"lat": 2},
    {"lon": 3},
    {"data": 4},
    {"lat": 4},
    {"lat": 2, "lon": 2},
    {"data": 2, "lat": 2},
    {"data": 2, "spare": 2},
]
MODES = {"whole": {}, "cut": {"shard_weights": True, "unit_bytes": 1}}


def _name(axes):
    return "x".join(f"{name}{size}" for name, size in axes.items())


def on_meshes(meshes=MESHES):
    return pytest.mark.parametrize("axes", meshes, ids=_name)


def on_modes():
    return pytest.mark.parametrize("mode", list(MODES))


def _ranks(axes):
    n = 1
    for size in axes.values():
        n *= size
    return n


class Block(nn.Module):
    """Norms and pointwise weights; two of the modules are only reached through their parameters."""

    def __init__(self, channels, rows, columns):
        super().__init__()
        self.norm = nn.GroupNorm(1, channels)
        self.gain = nn.Parameter(torch.randn(channels, 1, 1))
        self.position = nn.Parameter(torch.randn(rows, columns))
        self.layer_norm = nn.LayerNorm((rows, columns))

    def forward(self, x):
        x = self.norm(x) * self.gain + self.position
        return x + torch.tanh(F.layer_norm(x, (7, 10), self.layer_norm.weight, self.layer_norm.bias))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.Sequential(Block(6, 7, 10), Block(6, 7, 10))
        self.batch_norm = nn.BatchNorm2d(6)
        self.noise = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return self.batch_norm(self.blocks(x))


def _batch(dtype=torch.float64, samples=6):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(samples, 6, 7, 10, generator=generator, dtype=dtype) for _ in range(2)]


def _full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def plain_loss(model, x, y):
    return (model(x) - y).square().mean()


def learned_loss(model, x, y):
    """A loss of all kinds: through tiles, of a scalar that left a tile times a parameter, of parameters alone."""
    own = getattr(model, "module", model)
    decay = sum(_full(block.gain).square().sum() + _full(block.position).abs().mean() for block in own.blocks)
    return plain_loss(model, x, y) * torch.exp(-own.noise) + own.noise + 0.01 * decay


def _train(model, batch, loss=learned_loss, steps=10, clip=1.0, optimizer=None):
    """Losses and gradient norms of AdamW steps."""
    # one weight after the other: on a GPU torch would update DTensors and plain weights together, which it cannot
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4, foreach=False)
    seen = []
    for _ in range(steps):
        optimizer.zero_grad()
        value = loss(model, *batch)
        value.backward()
        norm = clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        seen.append((value.item(), norm.item()))
    return torch.tensor(seen, dtype=torch.float64)


def _assert_same_state(model, expected, rtol=1e-9):
    found = {name: _full(x.detach()) for name, x in model.state_dict().items()}
    wanted = expected.state_dict()
    assert list(found) == list(wanted)
    for name, x in wanted.items():
        bound = rtol * max(x.abs().max().item(), 1.0)
        torch.testing.assert_close(found[name], x, rtol=0, atol=bound, msg=lambda m, n=name: f"{n}: {m}")


def _pair(make, axes, mode="whole", dtype=torch.float64, **options):
    """The model as one process has it, and parallelized from another start on the other ranks."""
    torch.set_default_dtype(dtype)
    torch.manual_seed(3)
    expected = make()
    model = copy.deepcopy(expected)
    if dist.get_rank():
        with torch.no_grad():
            for x in model.parameters():
                x.add_(1)
    mesh = world_mesh(**axes)
    names = [name for name, _ in model.named_parameters()]
    found = parallelize(model, mesh, **(MODES[mode] | options))
    assert found is model
    assert [name for name, _ in model.named_parameters()] == names
    assert [p.shape for p in model.parameters()] == [p.shape for p in expected.parameters()]
    return model, expected, mesh


def _tiles(batch, mesh, spec=SPEC):
    return [jigsaw.shard(x, mesh, spec) for x in batch]


# -- ten steps --------------------------------------------------------------------------------------------------------


def _ten_steps(axes, mode, dtype, rtol):
    model, expected, mesh = _pair(Net, axes, mode, dtype)
    batch = _batch(dtype)
    torch.testing.assert_close(_train(model, _tiles(batch, mesh)), _train(expected, batch), rtol=rtol, atol=0)
    _assert_same_state(model, expected, rtol)
    if mode == "cut" and _ranks(axes) > 1:
        assert all(isinstance(p, DTensor) for name, p in model.named_parameters() if name != "noise")


@on_modes()
@on_meshes([m if m not in ({"lat": 4}, {"data": 4}) else pytest.param(m, marks=pytest.mark.slow) for m in MESHES])
def test_ten_steps_are_those_of_one_process(axes, mode):
    run_on_ranks(_ranks(axes), _ten_steps, axes, mode, torch.float64, 1e-9)


HYBRIDS = [
    ({"data": 2, "lat": 2}, {"replicate": "data"}),
    ({"data": 2, "lat": 2}, {"replicate": "lat", "shard_weights": "keep"}),
    ({"lat": 2, "spare": 1, "channel": 2}, {"shard_weights": "keep", "replicate": ["spare"]}),
    ({"lat": 3}, {"shard_weights": "keep"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "options"), HYBRIDS, ids=["copies of data", "kept copies", "channel", "kept"])
def test_ten_steps_with_hybrid_sharding(axes, options, tmp_path):
    run_on_ranks(_ranks(axes), _ten_hybrid_steps, axes, options, tmp_path / "saved")
    run_on_ranks(2, _loads_whole, tmp_path / "saved")


def _ten_hybrid_steps(axes, options, path):
    options = {"shard_weights": True, "unit_bytes": 1} | options
    model, expected, mesh = _pair(Net, axes, "whole", **options)
    batch = _batch()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    found = _train(model, _tiles(batch, mesh), optimizer=optimizer)
    torch.testing.assert_close(found, _train(expected, batch), rtol=1e-9, atol=0)
    _assert_same_state(model, expected, 1e-9)
    parts = _ranks(axes) // (2 if options.get("replicate") in ("data", "lat") else 1)
    assert model.blocks[0].position.to_local().shape[0] <= -(-7 // parts)
    jigsaw.save(path, model=model, optimizer=optimizer)


def _loads_whole(path):
    model, _, mesh = _pair(Net, {"lat": 2})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    jigsaw.load(path, model=model, optimizer=optimizer)
    torch.manual_seed(3)
    expected, batch = Net(), _batch()
    theirs = torch.optim.AdamW(expected.parameters(), lr=3e-3, eps=1e-4)
    _train(expected, batch, optimizer=theirs)
    _assert_same_state(model, expected)
    more = _train(model, _tiles(batch, mesh), steps=2, optimizer=optimizer)
    torch.testing.assert_close(more, _train(expected, batch, steps=2, optimizer=theirs), rtol=1e-9, atol=0)


@pytest.mark.slow
@on_ranks(4)
def test_policies_of_cut_weights_are_torchs():
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    options = {"shard_weights": True, "unit_bytes": 1, "replicate": "data", "mp_policy": policy}
    options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model, expected, mesh = _pair(Net, {"data": 2, "lat": 2}, "whole", torch.float32, **options)
    seen = []
    model.blocks[0].register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    batch = _batch(torch.float32)
    loss, right = plain_loss(model, *_tiles(batch, mesh)), plain_loss(expected, *batch)
    loss.backward(), right.backward()
    assert seen == [torch.bfloat16] and abs(loss.item() - right.item()) < 0.02 * right.item()
    grad, wanted = model.blocks[0].gain.grad, expected.blocks[0].gain.grad
    whole = grad.full_tensor().to(wanted.device)  # offloaded, so on the host
    assert grad.dtype == torch.float32 and (whole - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("reduce", [False, True], ids=["left to it", "twice"])
@on_ranks(4)
def test_ddp_around_it(reduce):
    model, expected, mesh = _pair(Net, {"lat": 2, "lon": 2}, reduce=reduce, bucket_bytes=1)
    wrapped = DistributedDataParallel(model)
    batch = _batch()
    with pytest.MonkeyPatch.context() as patch:  # as if each gradient were large
        patch.setattr("jigsaw.parallel.gradient_buckets._LENT_BYTES", 1)
        torch.testing.assert_close(_train(wrapped, _tiles(batch, mesh)), _train(expected, batch), rtol=1e-9, atol=0)
    _assert_same_state(model, expected)


@on_ranks(4)
def test_fully_shard_around_it():
    model, expected, mesh = _pair(Net, {"data": 2, "lat": 2}, reduce=False)
    model.noise.requires_grad_(False)
    flat = flat_submesh(mesh, mesh.mesh_dim_names)
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=flat, ignored_params={model.noise}).set_force_sum_reduction_for_comms(True)
    batch = _batch()
    expected.noise.requires_grad_(False)
    torch.testing.assert_close(_train(model, _tiles(batch, mesh)), _train(expected, batch), rtol=1e-9, atol=0)
    _assert_same_state(model, expected)


# -- a model of layers, and weights cut along channel -----------------------------------------------------------------


class Forecast(nn.Module):
    """A strided encoder, mixing of tokens, a decoder; channels that 2, 3 and 4 ranks can share."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(
            nn.Conv2d(6, 12, 3, padding=1, stride=2), nn.GELU(), nn.Conv2d(12, 12, 3, padding=1)
        )
        self.norm = nn.GroupNorm(3, 12)
        self.token_norm = nn.LayerNorm(12)
        self.mixer = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Identity(), nn.Linear(24, 12), nn.Tanh())
        self.gate = nn.Linear(12, 12)
        self.attention = nn.MultiheadAttention(12, 12, batch_first=True)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.batch_norm = nn.BatchNorm2d(12)
        self.up = nn.ConvTranspose2d(12, 12, 2, stride=2)
        self.head = nn.Conv2d(12, 7, 1)  # 7 channels, which ranks cannot share

    def forward(self, x):
        x = self.norm(self.encoder(x))
        tokens = self.token_norm(x.flatten(2).transpose(1, 2))
        tokens = tokens + self.mixer(tokens) * torch.sigmoid(self.gate(tokens))
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        x = x + tokens.transpose(1, 2).unflatten(2, x.shape[2:])
        return self.head(self.up(self.batch_norm(self.depthwise(x))))


CHANNEL_MESHES = [
    {"channel": 2},
    {"channel": 3},
    {"channel": 4},
    {"data": 2, "channel": 2},
    {"lat": 2, "channel": 2},
    {"channel": 2, "lon": 2},
]


def forecast_loss(model, x, y):
    return (model(x) - y).square().mean() + 0.01 * _full(model.norm.weight).square().sum()


def _forecast(axes, mode, dtype, rtol):
    model, expected, mesh = _pair(Forecast, axes, mode, dtype)
    x = _batch(dtype)[0]
    y = torch.randn(6, 7, 8, 10, generator=torch.Generator().manual_seed(2), dtype=dtype)
    found = _train(model, [jigsaw.shard(x, mesh, SPEC), y], forecast_loss)
    torch.testing.assert_close(found, _train(expected, [x, y], forecast_loss), rtol=rtol, atol=0)
    _assert_same_state(model, expected, rtol)


FIRST = [{"lat": 2, "lon": 2}, {"lat": 2, "channel": 2}]


@pytest.mark.slow
@on_modes()
@on_meshes(FIRST)
def test_ten_steps_of_a_forecast(axes, mode):
    run_on_ranks(_ranks(axes), _forecast, axes, mode, torch.float64, 1e-9)


@pytest.mark.slow
@pytest.mark.nightly
@on_modes()
@on_meshes([axes for axes in [*MESHES, *CHANNEL_MESHES] if axes not in FIRST])
def test_ten_steps_of_a_forecast_on_other_meshes(axes, mode):
    run_on_ranks(_ranks(axes), _forecast, axes, mode, torch.float64, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("replicate", [pytest.param("data", marks=pytest.mark.nightly), "lat"])
def test_hybrid_sharding_of_weights_that_channel_cuts(replicate):
    run_on_ranks(8, _hybrid_forecast, replicate, timeout=120)


def _hybrid_forecast(replicate):
    options = {"shard_weights": True, "unit_bytes": 1, "replicate": replicate}
    model, expected, mesh = _pair(Forecast, {"data": 2, "lat": 2, "channel": 2}, "whole", **options)
    wide = model.get_parameter("mixer.0.weight")
    assert wide.to_local().numel() * 4 == wide.numel()  # by channel, and by the axis that is left
    x = torch.randn(4, 6, 12, 8)
    y = torch.randn(4, 7, 12, 8)
    found = _train(model, _tiles((x, y), mesh, ("data", None, "lat", None)), plain_loss)
    torch.testing.assert_close(found, _train(expected, (x, y), plain_loss), rtol=1e-9, atol=0)
    _assert_same_state(model, expected)


@pytest.mark.slow
@on_modes()
@on_meshes([m if m in FIRST else pytest.param(m, marks=pytest.mark.nightly) for m in [*MESHES, *CHANNEL_MESHES]])
def test_ten_steps_of_a_forecast_in_float32(axes, mode):
    run_on_ranks(_ranks(axes), _forecast, axes, mode, torch.float32, 1e-4)


@on_modes()
@on_ranks(4)
def test_weights_cut_along_channel_are_a_part_a_rank(mode):
    model, expected, _ = _pair(Forecast, {"lat": 2, "channel": 2}, mode)
    parts = 2 if mode == "whole" else 4
    wanted = dict(expected.named_parameters())
    for name in (
        "encoder.0.weight",
        "encoder.2.weight",
        "mixer.0.weight",
        "mixer.3.weight",
        "gate.weight",
        "up.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
    ):
        p = model.get_parameter(name)
        assert isinstance(p, DTensor)
        assert _local_bytes([p]) * parts == wanted[name].nbytes
    assert isinstance(model.head.weight, DTensor)  # 7 channels out, but a row: it takes those of `up` as they are


@on_ranks(2)
def test_a_pair_of_layers_sends_one_sum():
    torch.manual_seed(3)
    mesh = world_mesh(channel=2)
    pair = parallelize(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), mesh)
    alone = parallelize(nn.ModuleDict({"a": nn.Linear(8, 16)}), mesh)["a"]
    tile = jigsaw.shard(torch.randn(5, 8), mesh, (None, None))
    with comm.count() as sent:
        pair(tile)
    assert [(c.kind, c.sent_bytes) for c in sent.calls] == [("all_reduce", 5 * 8 * 4)]
    with comm.count() as sent:
        alone(tile)
    assert [(c.kind, c.sent_bytes) for c in sent.calls] == [("all_gather", 5 * 8 * 4)]


class Attends(nn.Module):
    def __init__(self, heads, kdim):
        super().__init__()
        self.attention = nn.MultiheadAttention(12, heads, kdim=kdim, vdim=kdim, batch_first=True)

    def forward(self, x):
        keys = x[..., : self.attention.kdim]
        return self.attention(x, keys, keys, need_weights=False)[0]


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize(("heads", "kdim"), [(1, None), (4, None), (4, 6)])
@on_modes()
@on_ranks(4)
def test_attention_cut_along_channel(mode, heads, kdim, plain):
    model, expected, mesh = _pair(lambda: Attends(heads, kdim), {"lat": 2, "channel": 2}, mode)
    x, y = torch.randn(2, 7, 12), torch.randn(2, 7, 12)
    batch = [x, y] if plain else _tiles([x, y], mesh, (None, "lat", None))
    found = _train(model, batch, plain_loss, steps=3)
    torch.testing.assert_close(found, _train(expected, [x, y], plain_loss, steps=3), rtol=1e-9, atol=0)
    _assert_same_state(model, expected)


class Own(nn.Module):
    """Layers that cut their weights by themselves: over the axes of the data, too."""

    def __init__(self, mesh):
        super().__init__()
        self.inner = Linear(12, 24, mesh=mesh)
        self.stored = Linear(24, 12, bias=False, mesh=mesh, axis="data")
        self.norm = nn.LayerNorm(12)

    def forward(self, x):
        return self.norm(self.stored(torch.tanh(self.inner(x))))


class Plain(nn.Module):
    forward = Own.forward

    def __init__(self):
        super().__init__()
        self.inner, self.stored, self.norm = nn.Linear(12, 24), nn.Linear(24, 12, bias=False), nn.LayerNorm(12)


@on_modes()
@pytest.mark.parametrize("axes", [{"data": 4}, {"data": 2, "channel": 2}], ids=_name)
@on_ranks(4)
def test_layers_that_are_cut_already(axes, mode):
    torch.set_default_dtype(torch.float64)
    mesh = world_mesh(**axes)
    model, expected = Own(mesh), Plain()
    torch.manual_seed(4)
    values = {name: torch.randn(x.shape) for name, x in expected.state_dict().items()}
    expected.load_state_dict(values)
    for p, value in zip(model.parameters(), values.values(), strict=True):
        cut = distribute_tensor(value, p.device_mesh, p.placements) if isinstance(p, DTensor) else value
        p.data.copy_(cut)
    parallelize(model, mesh, **MODES[mode])
    x, y = torch.randn(8, 12), torch.randn(8, 12)

    def loss(model, x, y):
        return (
            (model(x).redistribute(("data", None)) - y).square().mean()
            if isinstance(x, jigsaw.Tile)
            else plain_loss(model, x, y)
        )

    found = _train(model, _tiles([x, y], mesh, ("data", None)), loss, steps=4)
    torch.testing.assert_close(found, _train(expected, [x, y], loss, steps=4), rtol=1e-9, atol=0)
    _assert_same_state(model, expected)


@on_ranks(4)
def test_layers_cut_along_channel_stay_torchs():
    model, expected, mesh = _pair(Forecast, {"lat": 2, "channel": 2}, dtype=torch.float32, tensor={})
    assert [type(m) for m in model.modules()] == [type(m) for m in expected.modules()]
    x = jigsaw.shard(_batch(torch.float32)[0], mesh, SPEC, halo={2: 1})
    up, copied = model.up, copy.deepcopy(model.up)
    wide = jigsaw.shard(torch.randn(6, 12, 8, 10), mesh, SPEC, halo={2: 1})
    for layer in (up, copied):
        with comm.count() as sent:
            y = layer(wide)
        assert [c.kind for c in sent.calls] == ["all_gather"]  # with the rows of the halo: none is asked for again
        assert y.layout.has_halo
        assert not y.layout.is_cut(1)
        torch.testing.assert_close(y.full_tensor(), expected.up(wide.full_tensor()))
    with torch.autocast("cpu", torch.bfloat16):
        assert model.encoder(x).dtype == model.gate(torch.randn(3, 12)).dtype == torch.bfloat16


@on_ranks(4)
def test_attention_that_takes_plain_tensors_only():
    def make():
        options = {"add_bias_kv": True}, {"add_zero_attn": True}, {"dropout": 0.5}
        return nn.ModuleList(nn.MultiheadAttention(12, 2, batch_first=True, **how) for how in options)

    model, expected, mesh = _pair(make, {"lat": 2, "channel": 2})
    x = torch.randn(2, 7, 12)
    for layer, wanted in zip(model[:2], expected[:2], strict=True):
        assert not any(isinstance(p, DTensor) for p in layer.parameters())  # they append a token: they stay whole
        torch.testing.assert_close(layer(x, x, x), wanted(x, x, x))
    dropped, weights = model[2](x, x, x, need_weights=False)
    assert weights is None
    for theirs in comm.all_gather_object(mesh, dropped.tolist()):
        assert theirs == dropped.tolist()  # one mask on all ranks
    for net in (model, expected):
        net.eval()
    torch.testing.assert_close(model[2](x, x, x), expected[2](x, x, x))


@on_ranks(2)
def test_layers_cut_along_channel_take_plain_tensors():
    model, expected, _ = _pair(Head, {"channel": 2}, unit_bytes=2**20)
    assert isinstance(model.back.weight, DTensor)
    pooled = torch.randn(4, 6)

    def loss(model, x):
        return torch.tanh(model.back(torch.tanh(model.head(x)))).square().mean()

    found = _train(model, [pooled], loss, steps=3)
    torch.testing.assert_close(found, _train(expected, [pooled], loss, steps=3), rtol=1e-9, atol=0)
    _assert_same_state(model, expected)


# -- memory and messages ----------------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.LayerNorm((64, 10)) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def _local_bytes(tensors):
    return sum((x.to_local() if isinstance(x, DTensor) else x).nbytes for x in tensors)


@on_ranks(4)
def test_weights_gradients_and_optimizer_state_are_one_part_in_p():
    model, expected, mesh = _pair(Wide, {"data": 2, "lat": 2}, "cut")
    optimizer = torch.optim.AdamW(model.parameters())
    batch = [torch.randn(4, 3, 64, 10) for _ in range(2)]
    _train(model, _tiles(batch, mesh), plain_loss, steps=1, optimizer=optimizer)
    whole = _local_bytes(expected.parameters())
    assert _local_bytes(model.parameters()) == whole // 4
    assert _local_bytes(p.grad for p in model.parameters()) == whole // 4
    state = [x for s in optimizer.state.values() for x in s.values() if x.ndim]
    assert _local_bytes(state) == 2 * whole // 4


@pytest.mark.parametrize(("bucket_bytes", "buckets"), [(25 * 2**20, 1), (2 * 64 * 10 * 8, 4), (1, 8)])
@on_ranks(4)
def test_gradients_travel_in_buckets(bucket_bytes, buckets):
    model, expected, mesh = _pair(Wide, {"data": 4}, bucket_bytes=bucket_bytes)
    tile = jigsaw.shard(torch.randn(4, 3, 64, 10), mesh, SPEC)
    loss = model(tile).square().mean()
    with comm.count() as sent:
        loss.backward()
    assert [call.kind for call in sent.calls] == ["all_reduce"] * buckets
    flags = 8  # one number a parameter says whether it has a gradient
    numbers = sum(p.numel() for p in expected.parameters()) + flags
    assert sent.sent_bytes == 2 * 3 * numbers * 8 // 4


@on_ranks(2)
def test_buckets_leave_while_the_backward_pass_goes_on():
    model, _, mesh = _pair(Wide, {"data": 2}, bucket_bytes=1)
    tile = jigsaw.shard(torch.randn(2, 3, 64, 10), mesh, SPEC)
    left_before_first_block = []
    with comm.count() as sent:
        y = model.blocks[0](tile)
        y.local.register_hook(lambda grad: left_before_first_block.append(len(sent.calls)))
        for block in model.blocks[1:]:
            y = block(y)
        y.square().mean().backward()
    assert left_before_first_block == [6 + 1]  # six weights and biases, and the sum of the loss


class Mlps(nn.Module):
    """Weights that `channel` cuts, and norms and last biases that it leaves whole, in turn."""

    def __init__(self):
        super().__init__()
        mlps = (nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(6), mlp) for mlp in mlps)

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("bucket_bytes", [25 * 2**20, 500])
@pytest.mark.parametrize("axes", [{"channel": 2}, {"channel": 3}, {"data": 2, "channel": 2}], ids=str)
def test_whole_weights_share_a_bucket_past_cut_ones(axes, bucket_bytes):
    run_on_ranks(math.prod(axes.values()), _trained_past_cut_ones, axes, bucket_bytes)


def _trained_past_cut_ones(axes, bucket_bytes):
    model, expected, mesh = _pair(Mlps, axes, bucket_bytes=bucket_bytes)
    whole = torch.randn(4, 5, 6)
    tile = jigsaw.shard(whole, mesh, ("data" if "data" in axes else None, None, None))
    with comm.count() as sent:
        model(tile).square().mean().backward()
    expected(whole).square().mean().backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(_full(p.grad), q.grad, rtol=1e-12, atol=1e-12)
    sums = [call for call in sent.calls if call.is_behind]
    names = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    if bucket_bytes > 500:  # a bucket of whole weights, and one of cut ones where ranks have the same parts
        assert len(sums) == 1 + ("data" in axes)
    if "data" not in axes:
        numbers = sum(expected.get_parameter(name).numel() + 1 for name in names)  # and a flag each
        sent_bytes = sum(call.sent_bytes for call in sums)
        # a rank's share of each sum is a whole number of bytes, and may round by some
        assert abs(sent_bytes - 2 * (mesh.size() - 1) * numbers * 8 / mesh.size()) < 16 * len(sums)


@pytest.mark.parametrize("bucket_bytes", [0, -5, 1.5, "x", None, True], ids=repr)
def test_sizes_of_buckets_that_are_none(bucket_bytes):
    with pytest.raises(ShardingError, match=f"bucket_bytes={bucket_bytes!r} must be a whole number, 1 or more"):
        parallelize(nn.Linear(2, 2), world_mesh(lat=1), bucket_bytes=bucket_bytes)


# -- accumulation -----------------------------------------------------------------------------------------------------


def _accumulate(axes, mode, synced):
    model, expected, mesh = _pair(Net, axes, mode)
    batches = [[x + k for x in _batch()] for k in range(3)]
    for k, batch in enumerate(batches):
        plain_loss(expected, *batch).backward()
        if synced or k == 2:
            plain_loss(model, *_tiles(batch, mesh)).backward()
        else:
            with no_sync(model):
                plain_loss(model, *_tiles(batch, mesh)).backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        if q.grad is None:
            assert p.grad is None
        else:
            torch.testing.assert_close(_full(p.grad), q.grad, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("synced", [True, False], ids=["reduced each time", "no_sync"])
@on_modes()
@pytest.mark.parametrize("axes", [{"lat": 2, "lon": 2}, {"data": 3}], ids=_name)
def test_gradients_accumulate(axes, mode, synced):
    run_on_ranks(_ranks(axes), _accumulate, axes, mode, synced)


@on_ranks(2)
def test_no_sync_sends_no_gradients():
    model, _, mesh = _pair(Wide, {"data": 2})
    tile = jigsaw.shard(torch.randn(2, 3, 64, 10), mesh, SPEC)
    loss = model(tile).square().mean()
    with comm.count() as sent, no_sync(model):
        loss.backward()
    assert sent.sent_bytes == 0


# -- parameters of every kind -----------------------------------------------------------------------------------------


@pytest.mark.slow
@on_modes()
@on_ranks(4)
def test_several_forward_passes_before_one_backward(mode):
    model, expected, mesh = _pair(Net, {"lat": 2, "lon": 2}, mode)

    def rollout(model, x, y):
        once = model(x)
        twice = model(once)
        return (once - y).square().mean() + (twice - y).square().mean()

    batch = _batch()
    found = _train(model, _tiles(batch, mesh), rollout, steps=3)
    torch.testing.assert_close(found, _train(expected, batch, rollout, steps=3), rtol=1e-9, atol=0)


class Head(nn.Module):
    """Leaves the tiles in the middle: the rest of the model is plain torch on plain tensors."""

    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(6, 1, 1))
        self.head = nn.Linear(6, 3)
        self.back = nn.Linear(3, 6)

    def forward(self, x):
        x = x * self.gain
        pooled = x.square().mean((2, 3))
        pooled = pooled.full_tensor() if isinstance(pooled, jigsaw.Tile) else pooled
        features = torch.tanh(self.back(torch.tanh(self.head(pooled))))
        return x * features[:, :, None, None]  # a plain tensor of parameters and of a global statistic


@on_modes()
@pytest.mark.parametrize("spec", [SPEC, (None, None, "lat", "data")])
@on_ranks(4)
def test_a_head_on_plain_tensors(spec, mode):
    model, expected, mesh = _pair(Head, {"data": 2, "lat": 2}, mode, unit_bytes=2**20)
    batch = _batch()
    found = _train(model, _tiles(batch, mesh, spec), plain_loss, steps=4)
    torch.testing.assert_close(found, _train(expected, batch, plain_loss, steps=4), rtol=1e-9, atol=0)
    _assert_same_state(model, expected)


@on_modes()
@on_ranks(2)
def test_frozen_unused_and_tied(mode):
    def make():
        net = Net()
        net.blocks[1].position = net.blocks[0].position
        net.blocks[0].gain.requires_grad_(False)
        net.spare = nn.Parameter(torch.ones(3))
        return net

    model, expected, mesh = _pair(make, {"lat": 2}, mode)
    batch = _batch()
    found = _train(model, _tiles(batch, mesh), plain_loss, steps=3)
    torch.testing.assert_close(found, _train(expected, batch, plain_loss, steps=3), rtol=1e-9, atol=0)
    assert model.spare.grad is None
    assert model.blocks[0].gain.grad is None
    assert model.blocks[0].position is model.blocks[1].position
    _assert_same_state(model, expected)


@on_ranks(2)
def test_a_parameter_can_be_unfrozen_later():
    def make():
        net = Net()
        net.blocks[0].gain.requires_grad_(False)
        return net

    model, expected, mesh = _pair(make, {"lat": 2})
    batch = _batch()
    for net in (model, expected):
        net.blocks[0].gain.requires_grad_()
    torch.testing.assert_close(
        _train(model, _tiles(batch, mesh), steps=2), _train(expected, batch, steps=2), rtol=1e-9, atol=0
    )
    _assert_same_state(model, expected)


@on_ranks(2)
def test_a_parameter_used_on_one_rank_only():
    model, _, mesh = _pair(Net, {"lat": 2})
    tiles = _tiles(_batch(), mesh)
    loss = plain_loss(model, *tiles)
    if dist.get_rank() == 1:
        loss = loss + 0 * loss.detach() * model.noise
    loss.backward()
    assert model.noise.grad is not None  # on both


class _Signs(nn.Module):
    """A weight of which only the sign is used: autograd has zeros without memory for it."""

    def __init__(self, size):
        super().__init__()
        self.weight, self.conv = nn.Parameter(torch.linspace(-1, 1, size)), nn.Conv2d(1, 1, 1)

    def forward(self, x):
        return (self.conv(x) * torch.sgn(self.weight).mean()).mean()


@pytest.mark.parametrize("size", [3, 1 << 18])
@on_ranks(2)
def test_gradients_that_are_zeros_without_memory(size):
    mesh = world_mesh(lat=2)
    model = parallelize(_Signs(size), mesh, bucket_bytes=1)
    for _ in range(2):
        model(jigsaw.shard(torch.ones(1, 1, 4, 4), mesh, (None, None, "lat", None))).backward()
        assert torch.equal(model.weight.grad, torch.zeros(size))
    model.weight.grad.add_(1)


@on_ranks(2)
def test_a_copy_trains_too():
    model, expected, mesh = _pair(Net, {"lat": 2})
    twin = copy.deepcopy(model)
    batch = _batch()
    found = _train(twin, _tiles(batch, mesh), steps=3)
    torch.testing.assert_close(found, _train(expected, batch, steps=3), rtol=1e-9, atol=0)


@on_ranks(2)
def test_after_a_backward_pass_that_raised():
    model, expected, mesh = _pair(Net, {"lat": 2}, bucket_bytes=1)
    tiles = _tiles(_batch(), mesh)

    def fail(grad):
        raise KeyError("on purpose")

    y = model.blocks[0](tiles[0])
    y.local.register_hook(fail)
    with pytest.raises(KeyError, match="on purpose"):
        model.batch_norm(model.blocks[1](y)).square().mean().backward()
    for net in (model, expected):
        net.zero_grad()
        net.batch_norm.reset_running_stats()
    found = _train(model, tiles, steps=2)
    torch.testing.assert_close(found, _train(expected, _batch(), steps=2), rtol=1e-9, atol=0)
    _assert_same_state(model, expected)


# -- with the rest of torch -------------------------------------------------------------------------------------------


def _saves_products(context, op, *args, **kwargs):
    saves = op in (torch.ops.aten.mul.Tensor, torch.ops.aten.native_layer_norm.default)
    return CheckpointPolicy.MUST_SAVE if saves else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(Net):
    def forward(self, x):
        # an input that is also used beside the block, where it is saved twice; then by torch's policies
        x = x + checkpoint(self.blocks[0], x, use_reentrant=False)
        contexts = functools.partial(create_selective_checkpoint_contexts, _saves_products)
        x = x + checkpoint(self.blocks[1], x, use_reentrant=False, context_fn=contexts)
        with torch.autograd.graph.save_on_cpu(pin_memory=False):
            return self.batch_norm(x)


@pytest.mark.slow
@on_modes()
@on_ranks(4)
def test_activation_checkpointing(mode):
    model, expected, mesh = _pair(Checkpointed, {"lat": 2, "lon": 2}, mode)
    batch = _batch()
    found = _train(model, _tiles(batch, mesh), steps=3)
    torch.testing.assert_close(found, _train(expected, batch, steps=3), rtol=1e-9, atol=0)
    _assert_same_state(model, expected)


@on_modes()
@on_ranks(4)
def test_autocast(mode):
    model, expected, mesh = _pair(Head, {"data": 2, "lat": 2}, mode, torch.float32, unit_bytes=2**20)
    batch = _batch(torch.float32)

    def loss(model, x, y):
        with torch.autocast("cpu", torch.bfloat16):
            return plain_loss(model, x, y)

    found = _train(model, _tiles(batch, mesh), loss, steps=3)
    torch.testing.assert_close(found, _train(expected, batch, loss, steps=3), rtol=2e-2, atol=0)
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


class OfDtype(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.gain = nn.Parameter(torch.randn(3, 1, 1, dtype=dtype))
        self.offset = nn.Parameter(torch.randn(7, 10, dtype=dtype))

    def forward(self, x):
        return (x * self.gain + self.offset).abs()


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.bfloat16, 2e-2), (torch.complex128, 1e-9)], ids=str)
@on_modes()
@on_ranks(3)
def test_gradients_of_other_dtypes(mode, dtype, rtol):
    model, expected, mesh = _pair(lambda: OfDtype(dtype), {"lat": 3}, mode)
    x = torch.randn(2, 3, 7, 10, dtype=dtype)
    expected(x).square().mean().backward()
    model(jigsaw.shard(x, mesh, (None, None, "lat", None))).square().mean().backward()
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        assert p.grad.dtype == dtype
        torch.testing.assert_close(_full(p.grad), q.grad, rtol=rtol, atol=rtol * q.grad.abs().max().item())


# -- clipping ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@on_modes()
@on_ranks(4)
def test_clipping_is_by_the_norm_of_the_whole_gradient(mode, norm_type):
    model, expected, mesh = _pair(Net, {"lat": 2, "lon": 2}, mode)
    batch = _batch()
    learned_loss(expected, *batch).backward()
    learned_loss(model, *_tiles(batch, mesh)).backward()
    wanted = nn.utils.clip_grad_norm_(expected.parameters(), 0.1, norm_type)
    torch.testing.assert_close(clip_grad_norm_(model, 0.1, norm_type), wanted, rtol=1e-12, atol=0)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(_full(p.grad), q.grad, rtol=1e-9, atol=1e-13)


@on_modes()
@on_ranks(2)
def test_torch_clips_right_too(mode):
    model, expected, mesh = _pair(Wide, {"lat": 2}, mode)
    batch = [torch.randn(2, 3, 64, 10) for _ in range(2)]
    plain_loss(expected, *batch).backward()
    plain_loss(model, *_tiles(batch, mesh)).backward()
    wanted = nn.utils.clip_grad_norm_(expected.parameters(), 0.1)
    torch.testing.assert_close(_full(nn.utils.clip_grad_norm_(model.parameters(), 0.1)), wanted, rtol=1e-12, atol=0)
    for p, q in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(_full(p.grad), q.grad, rtol=1e-9, atol=1e-13)


def test_clipping_of_what_is_not_finite():
    p = nn.Parameter(torch.ones(2))
    p.grad = torch.tensor([1.0, torch.inf])
    with pytest.raises(RuntimeError, match=r"norm of order 2\.0 is inf.*error_if_nonfinite=False"):
        clip_grad_norm_([p], 1.0, error_if_nonfinite=True)
    assert clip_grad_norm_(p, 1.0).isinf()
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0
    with pytest.raises(ValueError, match="norm_type=0 must be positive"):
        clip_grad_norm_([p], 1.0, 0)


# -- units ------------------------------------------------------------------------------------------------------------


def test_units_are_elements_of_sequences_that_are_big_enough():
    net = Net()
    assert sharding_units(net, 1) == list(net.blocks)
    assert sharding_units(net, 10**6) == []
    net.blocks[1].position = net.blocks[0].position
    assert sharding_units(net, 1) == []  # a tied parameter is gathered with all that use it
    deep = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    assert sharding_units(deep, 1) == [*deep[0], deep[1]]
    assert sharding_units(deep, 8 * 6) == [deep[0]]


# -- misuse -----------------------------------------------------------------------------------------------------------


def _replaces_a_parameter():
    model, _, mesh = _pair(Net, {"lat": 2})
    model.blocks[0].gain = nn.Parameter(torch.ones(6, 1, 1))
    model(jigsaw.shard(_batch()[0], mesh, SPEC))


def _replaces_a_layer(**options):
    mesh = world_mesh(lat=2)
    model = parallelize(nn.Sequential(nn.ModuleDict(), nn.Linear(3, 3)), mesh, **options)
    model.forward = lambda x: model[0].head(model[1](x))
    model[0].head = nn.Linear(3, 3)
    tile = jigsaw.shard(torch.ones(4, 3), mesh, ("lat", None))
    with torch.no_grad():
        model(tile)
    model[0].head.requires_grad_(False)
    model(tile)
    model[0].head.requires_grad_()
    model(tile)


def _replaces_a_layer_of_cut_weights():
    _replaces_a_layer(shard_weights=True)


def _adds_a_parameter_to_cut_weights():
    mesh = world_mesh(lat=2)
    model = parallelize(nn.Linear(3, 3), mesh, shard_weights=True)
    model.gain = nn.Parameter(torch.ones(3))
    model(jigsaw.shard(torch.ones(4, 3), mesh, ("lat", None)))


def _different_models():
    parallelize(nn.Linear(2, 2 + dist.get_rank()), world_mesh(lat=2))


def _twice():
    mesh = world_mesh(lat=2)
    parallelize(parallelize(nn.Linear(2, 2), mesh), mesh)


def _copies_of_whole_weights():
    parallelize(nn.Linear(2, 2), world_mesh(lat=2), replicate="lat")


def _copies_of_everything():
    parallelize(nn.Linear(2, 2), world_mesh(lat=2), shard_weights=True, replicate="lat")


def _another_sharding():
    parallelize(nn.Linear(2, 2), world_mesh(lat=2), shard_weights="always")


def _state_alone():
    parallelize(nn.Linear(2, 2), world_mesh(lat=2), shard_weights="optimizer")


def _sparse():
    parallelize(nn.Sequential(nn.Embedding(3, 2, sparse=True)), world_mesh(lat=2))


def _pickles():
    pickle.dumps(parallelize(nn.Linear(2, 2), world_mesh(lat=2)))


class _Queries(nn.Module):
    """Queries that begin as zeros which require grad, as in the decoders of DETR and MaskFormer."""

    def __init__(self):
        super().__init__()
        self.query = nn.Parameter(torch.randn(2, 3, 6, dtype=torch.float64))
        self.mixed = nn.Linear(6, 6).double()

    def forward(self, x, start=None):
        start = torch.zeros_like(self.query, requires_grad=True) if start is None else start
        tokens = x.flatten(2).transpose(1, 2)
        asked = nn.functional.scaled_dot_product_attention(self.mixed(start + self.query), tokens, tokens)
        return nn.functional.scaled_dot_product_attention(start + asked, tokens, tokens)


class _TimeBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.shift = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(4, 3)

    def forward(self, x, time):
        return x + self.conv(x) * self.shift(time)[:, :, None, None]


class _TimeNet(nn.Module):
    """Every block takes what one layer made of the time, as in diffusion models."""

    def __init__(self):
        super().__init__()
        self.time, self.blocks = nn.Linear(2, 4), nn.ModuleList([_TimeBlock(), _TimeBlock()])

    def forward(self, x, time):
        time = self.time(time)
        for block in self.blocks:
            x = block(x, time)
        return x


@on_ranks(4)
def test_units_take_plain_tensors_with_a_gradient_beside_tiles():
    torch.manual_seed(0)
    model, x = _TimeNet().double(), torch.randn(1, 3, 9, 8, dtype=torch.float64)
    time = torch.randn(1, 2, dtype=torch.float64)
    for axes in ({"lat": 4}, {"lat": 2, "lon": 2}):
        whole, tiled = copy.deepcopy(model), copy.deepcopy(model)
        mesh = world_mesh(**axes)
        parallelize(tiled, mesh, shard_weights=True, units=list(tiled.blocks))
        spec = (None, None, "lat", "lon" if "lon" in axes else None)
        tiled(jigsaw.shard(x, mesh, spec), time).square().mean().backward()
        whole(x, time).square().mean().backward()
        for (name, ours), theirs in zip(tiled.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-12, atol=1e-14, msg=name)


class _ChangedInPlace(nn.Module):
    """Units that end with a view, and a change in place behind each; of a table, and of a tile."""

    def __init__(self, norm):
        super().__init__()
        self.table, self.enter = nn.Parameter(torch.randn(1, 5, 3)), nn.Linear(3, 3)
        self.ones, self.twos = (
            nn.Sequential(norm(nn.Linear(3, 16)), nn.ReLU(inplace=True), norm(nn.Linear(16, 3))) for _ in range(2)
        )

    def forward(self, x):
        return self.twos(self.enter(x)) + self.ones(self.enter(self.table)).mean(1)


@on_ranks(2)
def test_results_of_units_are_changed_in_place():
    mesh, x = world_mesh(lat=2), torch.randn(1, 7, 4, 3, dtype=torch.float64)
    for norm in (nn.utils.spectral_norm, lambda module: module):  # of the first, both ranks had a segmentation fault
        torch.manual_seed(0)
        whole = _ChangedInPlace(norm).double()
        tiled = copy.deepcopy(whole)
        parallelize(tiled, mesh, shard_weights=True, units=[tiled.ones[0], tiled.ones[2], tiled.twos[0]])
        tiled(jigsaw.shard(x, mesh, (None, "lat", None, None))).square().mean().backward()
        whole(x).square().mean().backward()
        for (name, ours), theirs in zip(tiled.named_parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-10, atol=1e-13, msg=name)


@on_ranks(4)
def test_tensors_that_require_grad_beside_parameters():
    torch.manual_seed(0)
    model, x = _Queries(), torch.randn(2, 6, 7, 5, dtype=torch.float64)
    start = torch.randn(2, 3, 6, dtype=torch.float64)
    for axes in ({"lat": 4}, {"lat": 2, "lon": 2}, {"data": 2, "lat": 2}):
        for given in (None, start):
            whole, tiled = copy.deepcopy(model), copy.deepcopy(model)
            mine, own = (None if given is None else given.clone().requires_grad_() for _ in range(2))
            whole(x, mine).square().mean().backward()
            mesh = world_mesh(**axes)
            tile = jigsaw.shard(x, mesh, ("data" if "data" in axes else None, None, "lat", "lon"))
            parallelize(tiled, mesh)(tile, own).square().mean().backward()
            for p, right in zip(tiled.parameters(), whole.parameters(), strict=True):
                torch.testing.assert_close(p.grad, right.grad)
            if given is not None:  # the parts of what is not a parameter are summed
                torch.testing.assert_close(comm.all_reduce(own.grad, mesh, list(axes)), mine.grad)


def _mixes_summed_and_averaged():
    model, _, mesh = _pair(Net, {"lat": 2})
    stray = nn.Parameter(torch.ones(6, 1, 1))
    _ = jigsaw.shard(_batch()[0], mesh, SPEC) * (model.blocks[0].gain * stray)


def _cuts_rows_and_channels_by_one_axis():
    mesh = world_mesh(channel=2)
    layer = parallelize(nn.Conv1d(4, 4, 3), mesh)
    layer(jigsaw.shard(torch.ones(2, 4, 8), mesh, (None, None, "channel")))


def _weights_elsewhere():
    other = dist.device_mesh.init_device_mesh(world_mesh(lat=2).device_type, (1, 2), mesh_dim_names=("a", "b"))["a"]
    model = nn.Linear(2, 2)
    model.weight = nn.Parameter(DTensor.from_local(model.weight.detach(), other, [dist.tensor.Shard(0)]))
    parallelize(model, world_mesh(lat=2), shard_weights=True)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (
            _replaces_a_parameter,
            "'gain' of Block was replaced or added after parallelize.*call jigsaw.parallelize last",
        ),
        (_replaces_a_layer, "'weight' of Linear was replaced or added after parallelize"),
        (_replaces_a_layer_of_cut_weights, "'weight' of Linear was replaced or added after parallelize"),
        (_adds_a_parameter_to_cut_weights, "'gain' of FSDPLinear was replaced or added after parallelize"),
        (_different_models, r"same model and plan on every rank, but rank \d of the mesh.*weight"),
        (_twice, "Linear went through jigsaw.parallelize before; call it once"),
        (_sparse, "module '0' makes sparse gradients.*sparse=False"),
        (_copies_of_whole_weights, "replicate=.*pass shard_weights=True"),
        (_copies_of_everything, "some, not all, of the axes"),
        (_another_sharding, "shard_weights=.always. must be"),
        (_state_alone, "shard_weights=.optimizer. must be.*pass False.*ZeroRedundancyOptimizer.model.parameters"),
        (_pickles, "cannot be pickled.*state_dict"),
        (
            _cuts_rows_and_channels_by_one_axis,
            "weights are cut along 'channel' takes channels .dim 1.*use tile.redistribute",
        ),
        (_weights_elsewhere, "lies on ranks .*, which are not axes of the mesh"),
        (_mixes_summed_and_averaged, "leaves that are summed and leaves that are averaged"),
    ],
)
@on_ranks(2)
def test_misuse_is_told(body, message):
    with pytest.raises((ShardingError, TypeError), match=f"(?s){message}"):
        body()


class _BackwardWithin(torch.autograd.Function):
    """The identity, whose gradient makes another backward pass to the same weight."""

    @staticmethod
    def forward(ctx, x, again):
        ctx.again = again
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        with torch.enable_grad():
            ctx.again().backward()
        return grads[0], None


@on_ranks(2)
def test_a_large_gradient_is_summed_where_it_lies():
    net = nn.Linear(400, 400).double()  # 1.28 MB, alone in its bucket
    torch.manual_seed(0)
    x = torch.randn(10, 400, dtype=torch.float64)
    mesh = world_mesh(lat=2)
    model = jigsaw.parallelize(copy.deepcopy(net), mesh, bucket_bytes=1)
    tile = jigsaw.shard(x, mesh, ("lat", None))
    model.weight.grad = mine = torch.zeros_like(model.weight)
    for times in (1, 2):  # the second adds to the first
        model(tile).square().mean().backward()
        net(x).square().mean().backward()
        assert model.weight.grad is mine
        torch.testing.assert_close(mine, net.weight.grad)
        torch.testing.assert_close(model.bias.grad, net.bias.grad, msg=f"after {times}")
    # a part that comes when the sum is under way
    model.zero_grad()
    net.zero_grad()
    tile.local.requires_grad_()
    inside = _BackwardWithin.apply(tile.local * 1.0, lambda: model(tile).square().mean())
    model(jigsaw.from_local(inside, mesh, ("lat", None), (10, 400))).square().mean().backward()
    (2 * net(x).square().mean()).backward()
    torch.testing.assert_close(model.weight.grad, net.weight.grad)
    torch.testing.assert_close(model.bias.grad, net.bias.grad)


@on_ranks(2)
def test_the_old_spectral_norm_of_a_weight_that_channel_cuts_is_refused():
    model = nn.Sequential(nn.utils.spectral_norm(nn.Conv2d(3, 8, 3, padding=1)), nn.Conv2d(8, 4, 1))
    with pytest.raises(ShardingError, match=r"module '0' has torch.nn.utils.spectral_norm, .*parametrizations"):
        parallelize(model, world_mesh(lat=1, channel=2))


def _spectral_net():
    norm = nn.utils.parametrizations.spectral_norm
    return nn.Sequential(norm(nn.Conv2d(6, 8, 3, padding=1)), nn.Tanh(), norm(nn.Conv2d(8, 6, 1)))


@pytest.mark.parametrize("axes", [{"channel": 2}, {"lat": 2, "channel": 2}], ids=_name)
def test_the_parametrized_spectral_norm_beside_a_channel_axis(axes):
    run_on_ranks(_ranks(axes), _train_spectral, axes)


def _train_spectral(axes):
    for mode in MODES:
        model, expected, mesh = _pair(_spectral_net, axes, mode)
        batch = _batch()
        found = _train(model, _tiles(batch, mesh), plain_loss, steps=3)
        torch.testing.assert_close(found, _train(expected, batch, plain_loss, steps=3), rtol=1e-9, atol=0)
        for (name, buffer), other in zip(model.named_buffers(), expected.buffers(), strict=True):
            torch.testing.assert_close(buffer, other, msg=name)


class Branches(nn.Module):
    """Three units take the same tile, whose gradient is the sum of theirs."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(6, 6, 3, padding=1)
        self.units = nn.ModuleList([nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(6, 6, 1), nn.Conv2d(6, 6, 1)])

    def forward(self, x):
        x = self.first(x)
        return sum(unit(x) for unit in self.units)


@pytest.mark.parametrize("axes", [{"lat": 2}, {"lat": 2, "lon": 2}], ids=_name)
def test_units_that_take_the_same_tile(axes):
    run_on_ranks(_ranks(axes), _train_branches, axes)


def _train_branches(axes):
    model, expected, mesh = _pair(Branches, axes, "cut")
    batch = _batch()
    losses = _train(model, _tiles(batch, mesh), plain_loss, steps=2)
    torch.testing.assert_close(losses, _train(expected, batch, plain_loss, steps=2), rtol=1e-9, atol=0)
    _assert_same_state(model, expected, 1e-9)


class BiasOfTable(nn.Module):
    """A bias made of a plain table, by layers that `channel` cuts, with a change in place between them."""

    def __init__(self):
        super().__init__()
        self.table_layers = nn.Sequential(nn.Linear(2, 8), nn.ReLU(inplace=True), nn.Linear(8, 4, bias=False))
        self.register_buffer("table", torch.randn(5, 2))

    def forward(self, x):
        return x + self.table_layers(self.table)


@on_ranks(2)
def test_what_a_cut_layer_makes_of_a_plain_tensor_may_be_changed_in_place():
    torch.manual_seed(0)
    net, mesh, x = BiasOfTable().double(), world_mesh(channel=2), torch.randn(5, 4, dtype=torch.float64)
    model = jigsaw.parallelize(copy.deepcopy(net), mesh)
    expected, found = net(x), model(jigsaw.shard(x, mesh, (None, None)))
    torch.testing.assert_close(found.full_tensor(), expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    for p, q in zip(net.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad, p.grad)


@on_ranks(2)
def test_gradients_from_outside_a_unit_wait_for_its_own():
    """On a GPU FSDP2 writes gradients on streams of its own: what autograd adds to them must wait for these."""
    mesh, waits = world_mesh(lat=2), []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    parallelize(model, mesh, shard_weights=True, units=list(model))
    weight = model[1].weight  # of a unit that is done before the end of the backward pass

    class WatchedStream(torch.cpu.Stream):
        def wait_stream(self, stream):
            if weight.grad is not None:  # before that FSDP2 waits for gathers
                waits.append((stream, weight.grad.to_local().clone()))

    decay = weight.full_tensor().square().sum()  # before the model runs, so behind it in the backward pass
    loss = model(jigsaw.shard(torch.randn(5, 4), mesh, ("lat", None))).square().mean() + decay
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "current_stream", lambda device=None: WatchedStream())
        loss.backward()
    assert len(waits) == 2  # for what reduces and scatters, and for what reduces copies
    for stream, gradient in waits:
        assert isinstance(stream, torch.cpu.Stream)
        torch.testing.assert_close(weight.grad.to_local() - gradient, 2 * weight.to_local().detach())


class _Autoencoder(nn.Module):
    """Its parts are called one by one, as users of VAEs do, and never by its own forward pass."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(1, 4))
        self.decoder = nn.Sequential(nn.LayerNorm(8), nn.Conv2d(4, 3, 3, padding=1))

    def encode(self, x):
        return self.encoder(x)

    def decode(self, x):
        return self.decoder(x)


@on_ranks(2)
def test_methods_of_a_model_with_cut_weights_need_units():
    mesh, net, x = world_mesh(lat=2), _Autoencoder(), torch.randn(1, 3, 9, 8)
    tile = jigsaw.shard(x, mesh, (None, None, "lat", None))
    for parts in (), ("encoder",):  # a convolution meets cut weights first, and then a norm
        cut = copy.deepcopy(net)
        parallelize(cut, mesh, shard_weights=True, units=[getattr(cut, part) for part in parts])
        with pytest.raises(ShardingError, match=r"call the model itself.*units="):
            cut.decode(cut.encode(tile))
    cut = copy.deepcopy(net)
    parallelize(cut, mesh, shard_weights=True, units=[cut.encoder, cut.decoder])
    for model, image in ((net, x), (cut, tile)):
        model.decode(model.encode(image)).square().mean().backward()
    for p, q in zip(net.parameters(), cut.parameters(), strict=True):
        torch.testing.assert_close(q.grad.full_tensor(), p.grad)


def _small_net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(11, 8), nn.GELU(), nn.Linear(8, 4)).double()


def _points(mesh):
    torch.manual_seed(4)
    return jigsaw.shard(
        torch.randn(13, 11, dtype=torch.float64), mesh, ("lat" if "lat" in mesh.mesh_dim_names else None, None)
    )


def _losses_after_validation(model, x, frozen):
    model.requires_grad_(not frozen)
    with torch.set_grad_enabled(frozen):
        model(x)
    model.requires_grad_(True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            model(x)
        losses += [loss.item(), clip_grad_norm_(model, 0.1).item()]
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("way", [True, "keep"])
@pytest.mark.parametrize("frozen", [False, True])
@on_ranks(2)
def test_validation_leaves_parameters_as_they_are(way, frozen):
    mesh = world_mesh(lat=2)
    x = _points(mesh)
    expected = _losses_after_validation(_small_net(), x.full_tensor(), frozen)
    model = parallelize(_small_net(), mesh, shard_weights=way, unit_bytes=1)
    assert _losses_after_validation(model, x, frozen) == pytest.approx(expected, rel=1e-12)


def _losses_of_steps_within_passes(model, x):
    """What may be done to weights between a forward pass and its backward pass, and with one that has none."""
    model(x)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1.5)
    losses = []
    for step in range(4):
        model[0].requires_grad_(step != 1)
        loss = model(x).square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters() if p.ndim > 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[0].requires_grad_(True)
        model.zero_grad()
        if step == 2:
            model[2].requires_grad_(False)
        loss.backward()
        model[2].requires_grad_(True)
        losses += [loss.item(), clip_grad_norm_(model, 0.1).item()]
        optimizer.step()
    return losses


WAYS_OF_STEPS = [
    ({"lat": 2}, {"shard_weights": True}),
    ({"lat": 2}, {"shard_weights": True, "unit_bytes": 1}),
    ({"lat": 2}, {"shard_weights": "keep", "unit_bytes": 1}),
    ({"channel": 2}, {}),
    ({"lat": 2}, {}),
]


def _steps_within_passes(axes, options):
    mesh = world_mesh(**axes)
    x = _points(mesh)
    expected = _losses_of_steps_within_passes(_small_net(), x.full_tensor())
    model = parallelize(_small_net(), mesh, **options)
    assert _losses_of_steps_within_passes(model, x) == pytest.approx(expected, rel=1e-12)
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(("axes", "options"), WAYS_OF_STEPS, ids=str)
def test_weights_between_a_forward_and_its_backward_pass_are_the_models_own(axes, options):
    run_on_ranks(_ranks(axes), _steps_within_passes, axes, options)


@on_ranks(2)
def test_what_would_use_other_weights_than_the_cut_ones_is_refused():
    mesh = world_mesh(lat=2)
    model = parallelize(_small_net(), mesh, shard_weights=True)
    x = _points(mesh)
    zeros = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for _ in range(2):
        with pytest.raises(ShardingError, match=r"called with another tensor as 'weight', as torch\.func"):
            torch.func.functional_call(model, zeros, (x,))
        model(x).square().mean().backward()
    within = []
    model[0].register_forward_hook(lambda module, args, output: within.append(module.weight))
    loss = model(x).square().mean()
    with pytest.raises(ShardingError, match=r"or torch\.autograd\.grad of it, would see a part"):
        torch.autograd.grad(loss, within)


@on_ranks(2)
def test_copies_and_containers_of_cut_weights_are_refused():
    mesh = world_mesh(lat=2)
    model = parallelize(_small_net(), mesh, shard_weights=True)
    with pytest.raises(ShardingError, match="deepcopy of FSDPSequential, whose weights are cut"):
        torch.optim.swa_utils.AveragedModel(model)
    with pytest.raises(ShardingError, match="of a ModuleDict, which has no forward pass"):
        parallelize(nn.ModuleDict({"a": nn.Linear(2, 2)}), mesh, shard_weights=True)


@on_modes()
@on_ranks(2)
def test_gradients_held_back_of_a_layer_that_is_frozen_since(mode):
    mesh = world_mesh(lat=2)
    x = _points(mesh)

    def gradients(model, x, held_back):
        with held_back(model):
            model(x).square().mean().backward()
        model[2].requires_grad_(False)
        model(x).square().mean().backward()
        model[2].requires_grad_(True)
        return [g.full_tensor() if isinstance(g := p.grad, DTensor) else g for p in model.parameters()]

    expected = gradients(_small_net(), x.full_tensor(), lambda model: contextlib.nullcontext())
    found = gradients(parallelize(_small_net(), mesh, **MODES[mode]), x, no_sync)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-14)
