"""jigsaw.compile: one graph with the messages in it, exact, made anew for other layouts alone."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from functools import partial

import pytest
import torch
import torch._dynamo
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw import comm
from jigsaw.comm import graph_calls
from jigsaw.comm.exchange import RowExchange
from jigsaw.errors import ShardingError
from jigsaw.geometry.transfers import plan_exchange
from jigsaw.testing import on_ranks, world_mesh

SPACE = (None, None, "lat", "lon")


class SmallUNet(nn.Module):
    """Two levels, a skip, a stride, a transposed convolution, rows picked again; batch norm, which has buffers."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.GELU())
        self.down = nn.Sequential(nn.Conv2d(6, 8, 3, stride=2, padding=1), nn.GroupNorm(2, 8), nn.SiLU())
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.leave = nn.Conv2d(12, 3, 3, padding=1, padding_mode="circular")

    def forward(self, x):
        high = self.enter(x)
        low = self.down(high)
        high = high + F.interpolate(low[:, :6], size=high.shape[-2:])
        return self.leave(torch.cat([high, self.up(low)[:, :, : x.shape[2], : x.shape[3]]], 1))


class ConvNeXt(nn.Module):
    """One block, with a large kernel and a scale."""

    def __init__(self):
        super().__init__()
        self.far, self.norm = nn.Conv2d(3, 3, 7, padding=3, groups=3), nn.LayerNorm(3)
        self.wide, self.narrow = nn.Linear(3, 12), nn.Linear(12, 3)
        self.scale = nn.Parameter(torch.full((3,), 0.5))

    def forward(self, x):
        y = self.norm(self.far(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.narrow(F.gelu(self.wide(y)))).permute(0, 3, 1, 2)


class TokenBlock(nn.Module):
    """Patches, attention over all tokens, a mean over the globe: plain and tile results."""

    def __init__(self):
        super().__init__()
        self.patch, self.norm = nn.Conv2d(3, 8, 1), nn.LayerNorm(8)
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x, shift=None, *, gain=1.0):
        tokens = self.patch(x).flatten(2).transpose(1, 2)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.norm(tokens)).chunk(3, -1))
        y = tokens + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = y if shift is None else y + shift
        return {"tokens": y * gain, "mean": y.square().mean(), "gain": gain}


class Deep(nn.Module):
    """Rows enough for halo strips beside the rows at hand."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x):
        return self.second(F.gelu(self.first(x)))


class Picks(nn.Module):
    """Rows by index, of a cut dim and another, picked and added to."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        y = self.conv(x[:, [2, 0, 1]])
        rows = torch.tensor([6, 0, 6])
        return y.index_add(1, rows % 3, y * 2) + y.index_select(2, rows).mean(2, keepdim=True)


class LowModes(nn.Module):
    """Rows written among zeros that are whole on every rank, as Fourier neural operators keep low modes."""

    def __init__(self):
        super().__init__()
        self.lift, self.out = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)

    def forward(self, x):
        y = self.lift(x)
        low = torch.zeros(y.shape, dtype=y.dtype)
        low[:, :, :5, :4] = 2 * y[:, :, :5, :4]
        low += y
        return self.out(low) + x


NETS = {
    "low modes": (LowModes, 7, 10),
    "picks": (Picks, 7, 10),
    "unet": (SmallUNet, 13, 10),
    "convnext": (ConvNeXt, 33, 10),
    "tokens": (TokenBlock, 7, 10),
    "deep": (Deep, 133, 6),
}


def _step(model, x):
    """The results by name, and the gradients, of one step."""
    out = model(x)
    out = out if isinstance(out, dict) else {"out": out}
    loss = sum(value.square().mean() for value in out.values() if isinstance(value, torch.Tensor))
    loss.backward()
    return {name: value for name, value in out.items() if isinstance(value, torch.Tensor)} | {"loss": loss}


def _assert_close(found, expected, what):
    found = found.full_tensor() if isinstance(found, jigsaw.Tile) else found
    torch.testing.assert_close(found.detach(), expected.detach(), rtol=1e-9, atol=1e-12, msg=lambda m: f"{what}: {m}")


def _check_nets(*names, backend="aot_eager", **axes):
    mesh = world_mesh(**axes)
    for name in names:
        kind, *size = NETS[name]
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        whole, x = kind().double(), torch.randn(2, 3, *size, dtype=torch.float64)
        eager, compiled = (jigsaw.parallelize(copy.deepcopy(whole), mesh) for _ in range(2))
        compiled = jigsaw.compile(compiled, backend=backend)
        leaf = x.clone().requires_grad_()
        expected = _step(whole, leaf)
        sent = []
        for model in (compiled, eager):  # in this order: what a first call finds out, a graph must find out
            tile = jigsaw.shard(x, mesh, SPACE[: 3 + ("lon" in axes)] + (None,) * ("lon" not in axes))
            tile.local.requires_grad_()
            with comm.count() as traffic:
                found = _step(model, tile)
            sent.append([(c.kind, c.sent_bytes) for c in traffic.calls])
            for key, value in expected.items():
                _assert_close(found[key], value, f"{name} {key}")
            _assert_close(tile.grad, leaf.grad, f"{name} gradient of the input")
            for (key, p), q in zip(whole.named_parameters(), model.parameters(), strict=True):
                _assert_close(q.grad, p.grad, f"{name} gradient of {key}")
            for (key, b), c in zip(whole.named_buffers(), model.buffers(), strict=True):
                _assert_close(c, b, f"{name} buffer {key}")
        assert sum(b for _, b in sent[0]) == sum(b for _, b in sent[1]), name
        assert sorted(sent[0]) == sorted(sent[1]), name
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        assert not torch._dynamo.utils.counters["graph_break"]


@on_ranks(2, timeout=240)
def test_nets_are_exact_and_send_what_they_send_without_a_graph():
    _check_nets("unet", "tokens", "low modes", lat=2)


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_more_nets_on_two_ranks():
    _check_nets("convnext", "deep", "picks", lat=2)


@pytest.mark.slow
@on_ranks(1, timeout=240)
def test_nets_on_one_rank():
    _check_nets(*NETS, lat=1)


@pytest.mark.slow
@pytest.mark.nightly
@on_ranks(3, timeout=240)
def test_nets_on_three_ranks():
    _check_nets(*NETS, lat=3)


@pytest.mark.slow
@on_ranks(4, timeout=240)
def test_nets_on_two_by_two_ranks():
    _check_nets(*NETS, lat=2, lon=2)


# -- when a graph is made ---------------------------------------------------------------------------------------------


def _graphs():
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_another_layout_makes_another_graph_and_nothing_else_does():
    mesh = world_mesh(lat=2)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    net = TokenBlock().double()
    names = list(net.state_dict())
    assert jigsaw.compile(net, backend="aot_eager") is net and list(net.state_dict()) == names
    plain = TokenBlock().double()
    plain.load_state_dict(net.state_dict())
    plain, net = jigsaw.parallelize(plain, mesh), jigsaw.parallelize(net, mesh)

    def run(size, spec=(None, None, "lat", None), **options):
        x = torch.randn(1, 3, *size, dtype=torch.float64)
        tile = jigsaw.shard(x, mesh, spec)
        found, expected = (m(tile, **options) for m in (net, plain))
        assert found["gain"] == expected["gain"] and found["tokens"].layout == expected["tokens"].layout
        _assert_close(found["tokens"], expected["tokens"].full_tensor(), "tokens")
        _assert_close(found["mean"], expected["mean"], "mean")
        return _graphs()

    assert run((7, 10)) == 1
    assert run((7, 10)) == 1  # other values
    shift = torch.randn(8, dtype=torch.float64)
    assert run((7, 10), shift=shift) == 2
    assert run((7, 10), shift=shift + 1) == 2
    assert run((10, 7)) == 3
    assert run((7, 10), (None, None, None, "lat")) == 4
    assert run((7, 10), gain=2.0) == 5
    net.eval()
    assert run((7, 10)) == 6
    with torch.no_grad():
        assert run((7, 10)) == 7
        assert run((7, 10)) == 7
    net.train()
    assert run((7, 10)) == 7
    assert run((10, 7)) == 7
    assert not torch._dynamo.utils.counters["graph_break"]
    # a result that left a tile is known as one afterwards
    tile = jigsaw.shard(torch.randn(1, 3, 7, 10, dtype=torch.float64), mesh, (None, None, "lat", None))
    grads = []
    for model in (net, plain):
        model.zero_grad()
        (tile * model(tile)["mean"]).square().mean().backward()
        grads.append(model.qkv.weight.grad)
    _assert_close(*grads, "gradient by way of a mean")
    # a copy makes graphs of its own, and one that goes to another process, too
    for other in (copy.deepcopy(net), pickle.loads(pickle.dumps(TokenBlock().double()))):
        other.load_state_dict(net.state_dict())
        assert other(tile)["mean"] == net(tile)["mean"]
    before = net(tile)["mean"].item()
    with torch.no_grad():
        net.patch.weight.mul_(2)
    assert net(tile)["mean"].item() != before


# -- random numbers, and cut weights ----------------------------------------------------------------------------------


class Drops(nn.Module):
    """Dropout of elements, channels and attention weights, and noise."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 3, padding=1)
        self.elements, self.channels = nn.Dropout(0.3), nn.Dropout2d(0.4)

    def forward(self, x):
        x = self.leave(self.channels(F.gelu(self.elements(self.enter(x)))))
        tokens = (x + torch.rand_like(x)).flatten(2).transpose(1, 2)
        return F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=0.2)


class Channels(nn.Module):
    """Layers whose weights `parallelize` cuts along `channel`, a buffer, and tokens whose rows change their rank."""

    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Conv2d(8, 6, 3, padding=1)
        self.group, self.c = nn.GroupNorm(2, 6), nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.layer, self.wide, self.narrow = nn.LayerNorm(4), nn.Linear(4, 10), nn.Linear(10, 4)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = self.c(F.gelu(self.group(self.b(F.gelu(self.norm(self.a(x)))))))
        tokens = self.layer(x.flatten(2).transpose(1, 2))
        tokens = tokens + self.narrow(F.gelu(self.wide(tokens)))
        return self.attend(tokens, tokens, tokens, need_weights=False)[0]


def _check_like_eager(kind, backend="aot_eager", run=lambda model, tile: model(tile), **axes):
    """Three steps that are those of the module without a graph, values, gradients, buffers and bytes."""
    mesh = world_mesh(**axes)
    torch._dynamo.reset()
    torch.manual_seed(3)
    whole, x = kind().double(), torch.randn(2, 3, 9, 6, dtype=torch.float64)
    eager, compiled = (jigsaw.parallelize(copy.deepcopy(whole), mesh) for _ in range(2))
    found = []
    for model in (jigsaw.compile(compiled, backend=backend), eager):
        torch.manual_seed(5 + mesh.get_rank())  # the first rank's counts
        found.append([])
        for _ in range(3):
            model.zero_grad()
            tile = jigsaw.shard(x, mesh, (None, None, "lat" if "lat" in axes else None, None))
            tile.local.requires_grad_()
            with comm.count() as traffic:
                out = run(model, tile)
                out.square().mean().backward()
            values = [out, tile.grad, *(p.grad for p in model.parameters()), *model.buffers()]
            values = [v.full_tensor() if hasattr(v, "full_tensor") else v.clone() for v in values]
            found[-1].append((values, sorted((c.kind, c.sent_bytes) for c in traffic.calls)))
    for (values, compiled_sent), (expected, sent) in zip(*found, strict=True):
        torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-12)
        assert sent == compiled_sent
    return found[0]


def _check_random_numbers(**axes):
    with jigsaw.nn.attention_way("gathered"):
        steps = _check_like_eager(Drops, **axes)
        assert not torch.equal(steps[0][0][0], steps[1][0][0])  # drawn anew in each step
        # in a checkpoint the numbers come again
        _check_like_eager(Drops, run=lambda model, tile: checkpoint(model, tile, use_reentrant=False), **axes)


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_random_numbers_are_those_of_the_module_without_a_graph():
    _check_random_numbers(lat=2)


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_cut_weights_on_two_ranks():
    _check_like_eager(Channels, channel=2)


class Attends(nn.Module):
    """Causal attention of two heads, some of its weights dropped."""

    def __init__(self, is_causal=True):
        super().__init__()
        self.qkv, self.is_causal = nn.Conv2d(3, 24, 1), is_causal

    def forward(self, x):
        heads = self.qkv(x).flatten(2).transpose(1, 2).unflatten(-1, (2, 12)).transpose(1, 2)
        y = F.scaled_dot_product_attention(*heads.split(4, -1), dropout_p=0.2, is_causal=self.is_causal)
        return y.transpose(1, 2).flatten(2)


@on_ranks(2, timeout=240)
def test_keys_go_around_a_ring_on_two_ranks():
    with jigsaw.nn.attention_way("ring"):
        _check_like_eager(Attends, lat=2)


@pytest.mark.slow
@pytest.mark.nightly
@on_ranks(4, timeout=240)
def test_ways_of_attention_on_four_ranks():
    for way in ("ring", "heads", "heads+ring"):  # the last makes a mesh of its own while the graph is made
        with jigsaw.nn.attention_way(way):
            _check_like_eager(partial(Attends, False), lat=4)
            _check_like_eager(Attends, lat=4)


@pytest.mark.slow
@on_ranks(1, timeout=240)
def test_random_numbers_on_one_rank():
    _check_random_numbers(lat=1)


@pytest.mark.slow
@on_ranks(3, timeout=240)
def test_random_numbers_and_cut_weights_on_three_ranks():
    _check_random_numbers(lat=3)
    _check_like_eager(Channels, channel=3)


@pytest.mark.slow
@pytest.mark.nightly
@on_ranks(4, timeout=240)
def test_random_numbers_and_cut_weights_on_two_by_two_ranks():
    _check_random_numbers(lat=2, lon=2)
    _check_like_eager(Channels, channel=2, lat=2)


# -- what stands around it --------------------------------------------------------------------------------------------


class TwoBlocks:
    """A net of two blocks on two ranks, the whole one's results, and how another one is compared with them."""

    def __init__(self):
        self.mesh = world_mesh(lat=2)
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.whole, x = nn.Sequential(Deep(), Deep()).double(), torch.randn(2, 3, 64, 6, dtype=torch.float64)
        self.tile = jigsaw.shard(x, self.mesh, (None, None, "lat", None))
        self.expected = _step(self.whole, x.clone())

    def copied(self, **options):
        model = copy.deepcopy(self.whole)
        return jigsaw.parallelize(model, self.mesh, **options, **({"units": list(model)} if options else {}))

    def blocks(self, **options):
        model = self.copied(**options)
        for block in model:
            assert jigsaw.compile(block, backend="aot_eager") is block
        return model

    def check(self, model, what, run=None):
        found = _step(run or model, self.tile)
        _assert_close(found["out"], self.expected["out"], what)
        for p, q in zip(self.whole.parameters(), model.parameters(), strict=True):
            _assert_close(q.grad.full_tensor() if hasattr(q.grad, "full_tensor") else q.grad, p.grad, what)


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_block_by_block_and_in_checkpoints():
    blocks = TwoBlocks()
    model, again = blocks.blocks(), blocks.blocks()
    with comm.count() as plain:
        blocks.check(model, "block by block")
    with comm.count() as kept:
        blocks.check(again, "a checkpoint of a block", lambda t: checkpoint(again, t, use_reentrant=False))
    assert kept.sent_bytes == plain.sent_bytes


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_in_wrappers_of_torch():
    blocks = TwoBlocks()
    wrapped = jigsaw.compile(blocks.copied(reduce=False), backend="aot_eager")
    blocks.check(DistributedDataParallel(wrapped), "DistributedDataParallel")
    blocks.check(blocks.blocks(shard_weights=True), "fully_shard")


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_within_autocast():
    blocks = TwoBlocks()
    eager, compiled, single = blocks.copied().float(), blocks.copied().float(), blocks.tile.float()
    jigsaw.compile(compiled, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = compiled(single), eager(single)
    assert found.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(found.local, expected.local, rtol=0.05, atol=0.05)
    _ = [y.float().square().mean().backward() for y in (found, expected)]
    for p, q in zip(compiled.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0.1, atol=0.05)


# -- tensors in attributes --------------------------------------------------------------------------------------------


class Tables(nn.Module):
    """Tensors as plain attributes, in a list, a dict in it, and a tuple."""

    def __init__(self):
        super().__init__()
        self.conv, self.grid = nn.Conv2d(3, 3, 3, padding=1), torch.rand(6).double()
        self.tables = [torch.rand(3, 1, 1).double(), {"shift": torch.rand(6).double()}]
        self.pair = torch.rand(6).double(), 2.0

    def forward(self, x):
        first, rest = self.tables
        return self.conv(x) * first + self.grid * rest["shift"] + self.pair[0] * self.pair[1]


class Caches(nn.Module):
    """Tensors that the first forward pass keeps: an attribute behind a flag, one in a dict, and a tile."""

    def __init__(self):
        super().__init__()
        self.conv, self.is_ready, self.kept, self.field = nn.Conv2d(3, 3, 3, padding=1), False, {}, None

    def forward(self, x):
        if not self.is_ready:
            self.grid, self.is_ready = torch.linspace(0, 1, x.shape[-1], dtype=x.dtype), True
        if x.shape not in self.kept:
            self.kept[x.shape] = torch.arange(x.shape[-1])
        if self.field is None:
            self.field = x.detach() * 2
        return self.conv(x) + self.grid * self.kept[x.shape] + self.field


class Remembers(nn.Module):
    """What a forward pass leaves for the next one, and for a loss."""

    def __init__(self):
        super().__init__()
        self.conv, self.mean, self.seen = nn.Conv2d(3, 3, 3, padding=1), None, []

    def forward(self, x):
        now = x.detach().mean((0, 2, 3), keepdim=True)
        self.mean = now if self.mean is None else 0.5 * self.mean + 0.5 * now
        self.penalty = self.conv.weight.square().sum()
        self.seen = [*self.seen[-1:], now.sum()]
        return self.conv(x) + self.mean + sum(self.seen)


class Normed(nn.Module):
    """The old spectral norm, which computes its weight anew into an attribute."""

    def __init__(self):
        super().__init__()
        self.conv = torch.nn.utils.spectral_norm(nn.Conv2d(3, 3, 3, padding=1))

    def forward(self, x):
        return self.conv(x)


def _check_attributes(kind, graphs):
    mesh = world_mesh(lat=2)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    whole = kind().double()
    model = jigsaw.compile(jigsaw.parallelize(copy.deepcopy(whole), mesh), backend="aot_eager")
    for step in range(4):
        x = torch.randn(1, 3, 7, 6, dtype=torch.float64)
        found, expected = model(jigsaw.shard(x, mesh, (None, None, "lat", None))), whole(x)
        _assert_close(found, expected, f"{kind.__name__} {step}")
        for net, out in ((model, found), (whole, expected)):
            net.zero_grad()
            (out.square().mean() + getattr(net, "penalty", 0)).backward()
        for p, q in zip(model.parameters(), whole.parameters(), strict=True):
            _assert_close(p.grad, q.grad, f"{kind.__name__} {step}: gradient")
        if step == 2 and kind is Tables:
            for net in (model, whole):
                net.grid, net.tables[1]["shift"] = net.grid + 1, net.grid  # read at each call
    assert _graphs() == graphs, kind
    for name in ("mean", "grid", "field"):
        if getattr(whole, name, None) is not None:
            _assert_close(getattr(model, name), getattr(whole, name), name)


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_tensors_in_attributes_are_inputs_and_results_of_the_graph():
    for kind, graphs in ((Tables, 1), (Caches, 2), (Remembers, 3), (Normed, 2)):
        _check_attributes(kind, graphs)


class TwoNames(nn.Module):
    """A layer with two names, and a weight in two layers; a buffer."""

    def __init__(self):
        super().__init__()
        self.conv, self.other = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(2))
        self.conv.register_buffer("gain", torch.full((3, 1, 1), 0.5), persistent=False)
        self.other.weight = self.conv.weight
        self.layers = nn.ModuleList([self.conv, self.other])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x) * self.conv.gain
        return x


@on_ranks(2, timeout=240)
def test_a_layer_with_two_names_is_compiled_and_called_again():
    mesh = world_mesh(lat=2)
    torch.manual_seed(0)
    whole, x = TwoNames().double(), torch.randn(2, 3, 9, 8, dtype=torch.float64)
    model = jigsaw.parallelize(copy.deepcopy(whole), mesh)
    kept = dict(model.named_parameters()) | dict(model.named_buffers())
    model = jigsaw.compile(model, backend="aot_eager")
    expected = _step(whole, x)
    for _ in range(2):
        model.zero_grad()
        found = _step(model, jigsaw.shard(x, mesh, (None, None, "lat", None)))
        _assert_close(found["out"], expected["out"], "output")
        for (name, p), q in zip(whole.named_parameters(), model.parameters(), strict=True):
            _assert_close(q.grad, p.grad, f"gradient of {name}")
        held = dict(model.named_parameters()) | dict(model.named_buffers())
        assert all(held[name] is x for name, x in kept.items())


# -- what cannot be in a graph ----------------------------------------------------------------------------------------


class Reads(nn.Module):
    def forward(self, x):
        return x * x.mean().item()


class Cholesky(nn.Module):
    def forward(self, x):
        return torch.linalg.cholesky(x)


class Replaces(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen = self.seen + 1
        return x + self.seen


class Branches(nn.Module):
    def forward(self, x):
        return x if x.mean() > 0 else -x


class Sizes(nn.Module):
    def forward(self, x):
        kept = torch.tensor([1, 0, 1]).nonzero()
        return x[:, : kept.shape[0]]


GRID = torch.ones(4)


class ReadsGlobal(nn.Module):
    def forward(self, x):
        return x + GRID


@dataclass
class UnknownResult:
    doubled: object


@dataclass
class KnownResult:
    doubled: object


class Wraps(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        return self.kind(2 * x)


class Buffered(nn.Module):
    def forward(self, x):
        return x + self.grid


@on_ranks(2, timeout=240)
def test_what_cannot_be_in_a_graph_is_an_error_on_every_rank():
    mesh = world_mesh(lat=2)
    tile = jigsaw.shard(torch.randn(2, 3, 8, 4), mesh, (None, None, "lat", None))
    compiled = partial(jigsaw.compile, backend="aot_eager")
    with pytest.raises(ShardingError, match="a value or a size that is known only when it runs"):
        compiled(Reads())(tile)
    with pytest.raises(ShardingError, match="'seen' of Replaces is replaced in the forward pass"):
        compiled(Replaces())(tile)
    with pytest.raises(ShardingError, match=r"not an argument, .*test_compile.py:\d+ in forward: return x \+ GRID"):
        compiled(ReadsGlobal())(tile)
    for kind, code in ((Branches, "return x if x.mean\\(\\) > 0 else -x"), (Sizes, "return x\\[:, : kept.shape")):
        with pytest.raises(
            ShardingError, match=rf"known only when it runs, at \S*test_compile.py:\d+ in forward: {code}"
        ):
            compiled(kind())(tile)
    with pytest.raises(ShardingError, match="an argument of Identity has a object, which a graph cannot"):
        compiled(nn.Identity())(tile, object())
    unknown = Wraps(UnknownResult)
    for _ in range(2):
        with pytest.raises(ShardingError, match=r"Wraps returns a UnknownResult, .*register_dataclass\(UnknownResult"):
            compiled(unknown)(tile)
    torch.export.register_dataclass(KnownResult)
    result = compiled(Wraps(KnownResult))(tile)
    assert isinstance(result, KnownResult) and torch.equal(result.doubled.local, 2 * tile.local)
    with pytest.raises(ShardingError, match=r"takes a torch.nn.Module, not a function"):
        compiled(lambda x: x)
    with pytest.raises(ShardingError, match="cholesky"):  # as without a graph
        compiled(Cholesky())(tile)
    units = nn.Sequential(nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1))
    fully_shard(units[0], mesh=mesh)
    with pytest.raises(ShardingError, match="'0' in Sequential is a unit of fully_shard"):
        compiled(units)(tile)
    held = Buffered()
    held.register_buffer("grid", tile)
    with pytest.raises(ShardingError, match="'grid' of Buffered is a Tile, which a graph cannot be made with"):
        compiled(held)(tile)


# -- the operator -----------------------------------------------------------------------------------------------------


@on_ranks(2, timeout=240)
def test_the_operator_passes_torchs_checks():
    mesh = world_mesh(lat=2)
    torch._dynamo.reset()
    sizes, run = {}, graph_calls.GraphCall.run

    def note(call, function, tensors):
        name = next(n for n, c in graph_calls._calls.items() if c is call)
        sizes[name] = [tuple(x.shape) for x in tensors]
        return run(call, function, tensors)

    graph_calls.GraphCall.run = note
    tile = jigsaw.shard(torch.randn(1, 3, 64, 4), mesh, (None, None, "lat", None))
    _step(jigsaw.compile(nn.Sequential(Deep(), nn.GroupNorm(1, 3)), backend="aot_eager"), tile)
    few = jigsaw.shard(torch.randn(1, 3, 8, 4), mesh, (None, None, "lat", None))
    _step(jigsaw.compile(nn.Conv2d(3, 3, 7, padding=3), backend="aot_eager"), few)
    graph_calls.GraphCall.run = run
    kinds = {name.split(":")[0].rpartition(".")[2] for name in sizes}
    expected = "_fetch_rows", "all_reduce", "_convolve_with_strips", "_gradients_with_strips"
    assert kinds == set(expected), kinds
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for name, shapes in sizes.items():
        given = [torch.randn(shape) for shape in shapes], torch.empty(0), name
        torch.library.opcheck(torch.ops.jigsaw.communicate.default, given, test_utils=tests)


@on_ranks(2)
def test_a_call_is_named_by_the_ranks_of_its_mesh():
    # torch describes both meshes alike, and compiled graphs are kept on disk by the names of their calls
    source = jigsaw.Layout.of((4,), ("lat",), {"lat": 2})
    plan = plan_exchange(source, source, (0,))
    meshes = [DeviceMesh("cpu", ranks, mesh_dim_names=("lat",)) for ranks in ([0, 1], [1, 0])]
    one, other = (graph_calls._described_value(RowExchange(plan, mesh)) for mesh in meshes)
    assert one != other
    assert one == graph_calls._described_value(RowExchange(plan, meshes[0]))


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_nets_are_exact_by_inductor():
    _check_nets("deep", backend="inductor", lat=2)


class Mixing(nn.Module):
    """As spectral convolutions of torch-harmonics: a method that its author compiled meets the tiles of the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.weight = nn.Conv2d(3, 4, 3, padding=1), nn.Parameter(torch.randn(4, 5))

    @torch.compile(backend="eager")
    def mix(self, x, weight):
        return torch.einsum("bcxy,co->boxy", x.sin(), weight) * x.shape[2]

    def forward(self, x):
        return self.mix(self.conv(x), self.weight)


@on_ranks(2, timeout=240)
def test_a_method_that_its_author_compiled_runs_as_it_is_on_tiles():
    torch.manual_seed(0)
    mesh, x = world_mesh(lat=2), torch.randn(2, 3, 7, 6, dtype=torch.float64)
    plain = Mixing().double()
    want = plain(x)
    want.square().sum().backward()
    net = jigsaw.parallelize(copy.deepcopy(plain), mesh)
    net.zero_grad()
    got = net(jigsaw.shard(x, mesh, (None, None, "lat", None)))
    got.square().sum().backward()
    torch.testing.assert_close(got.full_tensor(), want)
    for mine, theirs in zip(net.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    whole = torch.compile(lambda t: t + 1, backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"jigsaw\.compile\(module\)"):
        whole(jigsaw.shard(x, mesh, (None, None, "lat", None)))


class Changes(nn.Module):
    """Changes what it computed in place, as `how` says."""

    def __init__(self, how):
        super().__init__()
        self.how, self.scale = how, nn.Parameter(torch.ones(()))

    def forward(self, x):
        y = x * self.scale
        CHANGES_OF_ELEMENTS[self.how][0](y)
        return y * 2


def _read_late(y):
    element = y[0, 3]
    y.mul_(2)
    y[0, 4] = element


CHANGES_OF_ELEMENTS = {
    "add_": (lambda y: y[0, 3].add_(5), "add_ of an element of a Tile"),
    "fill_": (lambda y: y[1, 5].fill_(9), "fill_ of an element of a Tile"),
    "select": (lambda y: y.select(0, 0).select(0, 2).zero_(), "zero_ of an element of a Tile"),
    "+=": (lambda y: y.__setitem__((0, 3), y[0, 3].__iadd__(5)), r"write tile\[0, 3\] = tile\[0, 3\] \+ 5"),
    "late": (_read_late, "an element of a Tile is read after the tile was changed"),
    "set": (lambda y: y.__setitem__((0, 3), y[0, 3] + 5), None),
    "flat": (lambda y: y.view(-1).__setitem__(0, 1.0), None),
    "row": (lambda y: y[:, 3].mul_(y[0, 2].clone()), None),
}


@pytest.mark.parametrize("how", CHANGES_OF_ELEMENTS)
@on_ranks(2)
def test_elements_changed_in_place_are_refused_in_a_graph_or_exact(how):
    torch.compiler.reset()
    whole, mesh, refusal = torch.arange(12.0).reshape(2, 6), world_mesh(lat=2), CHANGES_OF_ELEMENTS[how][1]
    alone, net = Changes(how), jigsaw.compile(jigsaw.parallelize(Changes(how), mesh), backend="aot_eager")
    expected = alone(whole)
    (expected * whole).sum().backward()
    tile = jigsaw.shard(whole, mesh, (None, "lat"))
    if refusal is not None:
        with pytest.raises(ShardingError, match=refusal):
            net(tile)
        return
    out = net(tile)
    (out * tile).sum().backward()
    assert torch.equal(out.detach().full_tensor(), expected.detach())
    torch.testing.assert_close(net.scale.grad, alone.scale.grad)


class PicksRows(nn.Module):
    def forward(self, x, index):
        return x.index_select(0, index)


@on_ranks(2)
def test_an_argument_of_another_shape_makes_another_graph():
    x = torch.randn(6, 40, dtype=torch.float64)
    net = jigsaw.compile(PicksRows(), backend="aot_eager")
    for rows in (3, 2, 3):
        out = net(jigsaw.shard(x, world_mesh(cell=2), (None, "cell")), torch.arange(rows))
        assert torch.equal(out.full_tensor(), x[:rows])
