"""Layers whose result is several parts side by side: each rank has its piece of every part, and the file the whole."""

import pytest
import torch
import torch.nn.functional as F
from plan_blocks import CHECKPOINTING, WIDTH, Encoder, GPTBlock, MetaLlamaBlock, trained_beside_whole
from torch import nn
from torch.distributed.tensor import DTensor

import jigsaw
from jigsaw.errors import ShardingError
from jigsaw.parallel.channel_parallel import found_tensor_plan
from jigsaw.testing import run_on_ranks, world_mesh

BLOCKS = [GPTBlock, MetaLlamaBlock, Encoder]


@pytest.fixture(autouse=True)
def _usual_dtype():
    yield
    torch.set_default_dtype(torch.float32)


def _net(block, seed):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(seed)
    return nn.Sequential(block(), block())


def _full(x):
    return x.full_tensor() if isinstance(x, DTensor) else x


def _train(model, x, optimizer, steps):
    norms = []
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        norms.append(jigsaw.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
    return norms


def _adam(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3, foreach=False)


def _trained(block, steps):
    whole = _net(block, 3)
    optimizer, x = _adam(whole), torch.randn(4, 12, WIDTH, generator=torch.Generator().manual_seed(1))
    return whole, optimizer, x, _train(whole, x, optimizer, steps)


def _assert_same_weights(model, whole):
    for name, q in whole.state_dict().items():
        torch.testing.assert_close(_full(model.state_dict()[name].detach()), q, rtol=1e-12, atol=1e-13)


def _begin(path, block, axes, options):
    """Train on ranks beside one process, and save what both have."""
    whole, _, x, expected = _trained(block, 3)
    mesh = world_mesh(**axes)
    model = jigsaw.parallelize(_net(block, 3), mesh, unit_bytes=1, **options)
    optimizer = _adam(model)
    norms = _train(model, jigsaw.shard(x, mesh, (None, "lat" if "lat" in axes else None, None)), optimizer, 3)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected), rtol=1e-12, atol=0)
    _assert_same_weights(model, whole)
    with torch.no_grad():
        changed = {name: p.clone() for name, p in model.named_parameters()}
        for p in model.parameters():
            p.mul_(2)
        jigsaw.save(path / "checkpoint", model=model, optimizer=optimizer)
        for name, p in model.named_parameters():
            p.copy_(changed[name])
    jigsaw.save(path / "checkpoint", model=model, optimizer=optimizer)  # by the plan of the save before
    jigsaw.save_weights(path / "weights.safetensors", model)


def _go_on(path, block, axes, options):
    """Load on another mesh, and train on: as one process does that was never stopped."""
    whole, _, x, expected = _trained(block, 5)
    mesh = world_mesh(**axes)
    loaded = jigsaw.parallelize(_net(block, 5), mesh, unit_bytes=1, **options)
    jigsaw.load_weights(path / "weights.safetensors", loaded)
    _assert_same_weights(loaded, _trained(block, 3)[0])
    model = jigsaw.parallelize(_net(block, 6), mesh, unit_bytes=1, **options)
    optimizer = _adam(model)
    jigsaw.load(path / "checkpoint", model=model, optimizer=optimizer)
    norms = _train(model, jigsaw.shard(x, mesh, (None, "lat" if "lat" in axes else None, None)), optimizer, 2)
    torch.testing.assert_close(torch.tensor(norms), torch.tensor(expected[3:]), rtol=1e-12, atol=0)
    _assert_same_weights(model, whole)


TWO, THREE, FOUR = {"channel": 2}, {"channel": 3}, {"lat": 2, "channel": 2}
WAYS = [
    (GPTBlock, TWO, {}),
    pytest.param(GPTBlock, THREE, {}, marks=pytest.mark.slow),
    pytest.param(GPTBlock, FOUR, {}, marks=pytest.mark.slow),
    (GPTBlock, FOUR, {"shard_weights": True}),
    pytest.param(MetaLlamaBlock, THREE, {}, marks=pytest.mark.slow),
    pytest.param(Encoder, FOUR, {"shard_weights": True}, marks=pytest.mark.slow),
    *(pytest.param(b, axes, {}, marks=pytest.mark.nightly) for b in (MetaLlamaBlock, Encoder) for axes in (TWO, FOUR)),
]


@pytest.mark.parametrize(("block", "axes", "options"), WAYS)
def test_it_is_trained_saved_and_loaded_as_by_one_process(tmp_path, block, axes, options):
    ranks = torch.Size(axes.values()).numel()
    run_on_ranks(ranks, _begin, tmp_path, block, axes, options)
    model, _, _, _ = _trained(block, 3)
    alone = _net(block, 4)
    jigsaw.load(tmp_path / "checkpoint", model=alone)
    _assert_same_weights(alone, model)
    jigsaw.save_weights(tmp_path / "alone.safetensors", alone)
    assert (tmp_path / "alone.safetensors").read_bytes() == (tmp_path / "weights.safetensors").read_bytes()
    run_on_ranks(2, _go_on, tmp_path, block, {"channel": 2}, {})
    if ranks > 2:
        run_on_ranks(4, _go_on, tmp_path, block, {"lat": 2, "channel": 2}, {"shard_weights": True})


def _shapes(block):
    model = jigsaw.parallelize(_net(block, 3), world_mesh(channel=2))
    return {n.removeprefix("0."): tuple(p.to_local().shape) for n, p in model.named_parameters() if n.startswith("0.")
            and isinstance(p, DTensor)}  # fmt: skip


def test_each_rank_has_half_of_every_part():
    half = WIDTH // 2
    for shapes in run_on_ranks(2, _shapes, GPTBlock):
        assert shapes["c_attn.weight"] == (3 * half, WIDTH) and shapes["c_attn.bias"] == (3 * half,)
        assert shapes["c_proj.weight"] == (WIDTH, half)
    for shapes in run_on_ranks(2, _shapes, Encoder):
        assert shapes["layer.self_attn.in_proj_weight"] == (3 * half, WIDTH)
        assert shapes["layer.self_attn.out_proj.weight"] == (WIDTH, half)


def _parts_of_a_column():
    mesh, layer = world_mesh(channel=2), nn.Linear(8, 24)
    torch.manual_seed(0)
    layer = nn.Linear(8, 24)
    x = torch.randn(5, 8)
    right = layer(x).detach()
    jigsaw.parallelize(layer, mesh, tensor={"": "3 columns"})
    torch.testing.assert_close(layer(x), right)  # a plain input gives a plain result, in the order of the whole
    y = layer(jigsaw.shard(x, mesh, (None, None)))
    with jigsaw.comm.count() as sent:
        found = [
            *y.chunk(3, -1),
            *y.split([8, 16], -1),
            y[:, 8:16],
            y.narrow(1, 8, 16),
            y.view(5, 3, 8)[:, 1],
            *y.split(8, 1),
        ]
    assert not sent.messages
    wanted = [*right.chunk(3, -1), *right.split([8, 16], -1), right[:, 8:16], right.narrow(1, 8, 16), right[:, 8:16]]
    for tile, whole in zip(found, [*wanted, *right.split(8, 1)], strict=True):
        assert torch.equal(tile.full_tensor(), whole) and tile.local.shape[1] == whole.shape[1] // 2
    for tile, whole in zip(y.split([7, 17], -1), right.split([7, 17], -1), strict=True):  # parts of parts move
        assert torch.equal(tile.full_tensor(), whole)
    with jigsaw.comm.count() as sent:
        gated = F.glu(y[:, :16], -1)
    assert not sent.messages
    torch.testing.assert_close(gated.full_tensor(), F.glu(right[:, :16], -1))


def test_parts_of_a_column_are_at_hand():
    run_on_ranks(2, _parts_of_a_column)


def _refused(plan):
    model = nn.Sequential(nn.Linear(4, 8), nn.Conv2d(4, 8, 3))
    with pytest.raises(ShardingError) as error:
        jigsaw.parallelize(model, world_mesh(channel=2), tensor=plan)
    return str(error.value)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"0": "3 columns"}, "0 has 8 output channels in 3 parts, which 2 ranks do not divide"),
        ({"1": "2 columns"}, "1 (Conv2d) cannot be cut as '2 columns'"),
        ({"0": "1 columns"}, "'2 columns' (two parts side by side, each cut so)"),
    ],
)
def test_parts_that_cannot_be_cut_are_refused(plan, words):
    assert all(words in text for text in run_on_ranks(2, _refused, plan))


def test_a_plan_says_how_many_parts():
    assert found_tensor_plan(GPTBlock(), 2).cuts["c_attn"] == "3 columns"
    assert found_tensor_plan(MetaLlamaBlock(), 2).cuts["up_proj"] == "2 columns"


@pytest.mark.parametrize("tokens", [None, "channel"])
@pytest.mark.parametrize("way", CHECKPOINTING)
def test_blocks_that_are_computed_again_are_exact(way, tokens):
    run_on_ranks(2, trained_beside_whole, GPTBlock, {"channel": 2}, (None, tokens, None), None, way)


def _compiled(block):
    torch.manual_seed(0)
    whole = _net(block, 3)
    x = torch.randn(4, 12, WIDTH)
    expected = whole(x)
    expected.square().mean().backward()
    mesh = world_mesh(channel=2)
    model = jigsaw.compile(jigsaw.parallelize(_net(block, 3), mesh), backend="aot_eager")
    out = model(jigsaw.shard(x, mesh, (None, None, None)))
    out.square().mean().backward()
    torch.testing.assert_close(out.full_tensor(), expected, rtol=1e-12, atol=1e-12)
    for p, q in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(_full(p.grad), q.grad, rtol=1e-11, atol=1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("block", BLOCKS)
def test_a_compiled_block_is_exact(block):
    run_on_ranks(2, _compiled, block)
