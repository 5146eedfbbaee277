"""Plans of `parallelize(tensor=)`: blocks cut as columns and rows send what Megatron's formula says."""

import pytest
import torch
import torch.nn.functional as F
from plan_blocks import CHECKPOINTING, HEADS, KEY_HEADS, MARKS, SAMPLES, TOKENS, WIDTH, trained_beside_whole
from torch import nn
from torch.distributed.tensor import DTensor

import jigsaw
from jigsaw.errors import ShardingError
from jigsaw.testing import run_on_ranks, world_mesh

PLAN = {"*.query": "column", "*.key": "column", "*.value": "column", "*.out": "row"}
PLAN |= {"*.up": "column", "*.down": "row"}


class LlamaBlock(nn.Module):
    """Grouped heads with rotary embeddings, RMSNorm, and a gated MLP."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(WIDTH, KEY_HEADS * WIDTH // HEADS, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(WIDTH, 4 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(4 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        h = self.first(x)
        query, key = (turned(_heads(y)) for y in (self.query(h), self.key(h)))
        y = F.scaled_dot_product_attention(query, key, _heads(self.value(h)), is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(*x.shape[:2], -1))
        h = self.second(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class ConditionedBlock(nn.Module):
    """Attention by hand with biases, and norms that a vector for each sample scales and shifts, as in DiT."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.condition = nn.Parameter(torch.randn(SAMPLES, 4, 1, WIDTH) * 0.2)

    def forward(self, x):
        scale, shift, gate, last_gate = self.condition.unbind(1)
        h = self.norm(x) * (1 + scale) + shift
        query, key, value = (_heads(layer(h)) for layer in (self.query, self.key, self.value))
        weights = (query @ key.transpose(-2, -1) / 2).softmax(-1)
        x = x + gate * self.out((weights @ value).transpose(1, 2).flatten(2))
        return x + last_gate * self.down(F.gelu(self.up(self.norm(x))))


def _heads(y):
    return y.view(*y.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)


def turned(x):
    places = torch.arange(x.shape[2])[:, None] * torch.arange(1, x.shape[-1] // 2 + 1) / 7.0
    a, b = x.chunk(2, -1)
    return torch.cat([a * places.cos() - b * places.sin(), a * places.sin() + b * places.cos()], -1)


PLANS = {LlamaBlock: PLAN | {"*.gate": "column"}, ConditionedBlock: PLAN}


@pytest.mark.parametrize("tokens", [None, "channel"])
@pytest.mark.parametrize("block", PLANS)
def test_a_block_sends_four_sums(block, tokens):
    for forward, backward, held, plain in run_on_ranks(
        2, trained_beside_whole, block, {"channel": 2}, (None, tokens, None), PLANS[block]
    ):
        assert set(held.values()) == {0.5}
        one_sum = SAMPLES * TOKENS * WIDTH * 8  # a ring of two sends as much as it holds, an exchange twice a half
        assert 0 <= forward - 2 * 2 * one_sum <= MARKS
        # the gradients of weights that are whole on each rank travel as well
        assert 0 <= backward - 2 * 2 * one_sum - plain <= MARKS


@pytest.mark.parametrize("block", PLANS)
def test_a_block_that_gathers_its_tokens_again_sends_two_gathers_more(block):
    for forward, backward, _, plain in run_on_ranks(
        2, trained_beside_whole, block, {"channel": 2}, (None, "channel", None), PLANS[block], gather_again=True
    ):
        one_sum = SAMPLES * TOKENS * WIDTH * 8
        assert 0 <= forward - 2 * 2 * one_sum <= MARKS
        assert 0 <= backward - 2 * (2 * one_sum + 2 * one_sum // 2) - plain <= MARKS


OTHERS = [
    ({"channel": 3}, (None, None, None)),
    ({"data": 2, "channel": 2}, ("data", "channel", None)),
    pytest.param({"channel": 4}, (None, None, None), marks=pytest.mark.slow),
    pytest.param({"lat": 2, "channel": 2}, (None, "lat", None), marks=pytest.mark.slow),
    pytest.param({"lat": 2, "channel": 2}, (None, ("lat", "channel"), None), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("axes", "spec"), OTHERS)
@pytest.mark.parametrize("block", PLANS)
def test_it_is_exact_on_other_meshes(block, axes, spec):
    plan = dict(PLANS[block])
    if axes["channel"] == 3 and block is LlamaBlock:  # two heads of keys are eight channels
        plan |= {"*.key": "whole", "*.value": "whole"}
    ranks = torch.Size(axes.values()).numel()
    run_on_ranks(ranks, trained_beside_whole, block, axes, spec, plan)


@pytest.mark.parametrize("tokens", [None, "channel"])
@pytest.mark.parametrize("way", CHECKPOINTING)
def test_blocks_that_are_computed_again_are_exact(way, tokens):
    for _, backward, _, plain in run_on_ranks(
        2, trained_beside_whole, LlamaBlock, {"channel": 2}, (None, tokens, None), PLANS[LlamaBlock], way
    ):
        if way != "reentrant" and tokens is None:
            # a second forward pass sends its sums again, but the last of a block, behind which nothing is saved
            one_sum = SAMPLES * TOKENS * WIDTH * 8
            assert 0 <= backward - 2 * (1 + 2) * one_sum - plain <= MARKS


@pytest.mark.parametrize("way", CHECKPOINTING)
def test_blocks_that_are_computed_again_may_gather_again(way):
    arguments = LlamaBlock, {"channel": 2}, (None, "channel", None), PLANS[LlamaBlock], way
    sent = [run_on_ranks(2, trained_beside_whole, *arguments, gather_again=again)[0][1] for again in (False, True)]
    # the second forward pass has gathered the tokens; only that of a reentrant call is an ordinary one
    assert (sent[0] < sent[1]) == (way == "reentrant")


class _Changes(nn.Module):
    """Two columns take one tensor, which is changed in place between them."""

    def __init__(self, is_changed):
        super().__init__()
        self.one, self.other, self.is_changed = nn.Linear(8, 8), nn.Linear(8, 8), is_changed

    def forward(self, x):
        x = x * 1.5
        y = self.one(x)
        if self.is_changed:
            x.mul_(2)
        return (y * self.other(x)).sum()


def _changed(is_changed):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, whole = _Changes(is_changed).requires_grad_(False), _Changes(is_changed)
    whole.load_state_dict(model.state_dict())
    x = torch.randn(5, 8, requires_grad=True)
    right = whole.requires_grad_(False)(x)
    (expected,) = torch.autograd.grad(right, x)
    mesh = world_mesh(channel=2)
    jigsaw.parallelize(model, mesh, tensor={"o*": "column"})
    tile = jigsaw.shard(x.detach(), mesh, (None, None)).requires_grad_()
    loss = model(tile)
    with jigsaw.comm.count() as sent:
        loss.backward()
    torch.testing.assert_close(loss.detach(), right.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(tile.grad.full_tensor(), expected, rtol=1e-12, atol=1e-13)
    return sum(call.kind == "all_reduce" and call.sent_bytes >= x.nbytes for call in sent.calls)


@pytest.mark.parametrize("is_changed", [False, True])
def test_an_input_that_changes_is_summed_twice(is_changed):
    assert run_on_ranks(2, _changed, is_changed) == [1 + is_changed] * 2


def _refused(plan):
    net = nn.Sequential()
    net.add_module("wide", nn.Linear(6, 9))
    net.add_module("grouped", nn.Conv2d(4, 4, 3, groups=2))
    with pytest.raises(ShardingError) as error:
        jigsaw.parallelize(net, world_mesh(channel=2), tensor=plan)
    assert isinstance(net.wide.weight, nn.Parameter) and not isinstance(net.wide.weight, DTensor)
    return str(error.value)


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"wide": "col"}, "tensor={'wide': 'col'}: a layer is cut as 'column'"),
        ({"narrow": "row"}, "no module has such a name"),
        ({"wide": "column"}, "wide has 9 output channels, which 2 ranks do not divide"),
        ({"grouped": "row"}, "grouped (Conv2d) cannot be cut as 'row'"),
    ],
)
def test_a_plan_that_cannot_be_followed_is_refused_by_every_rank(plan, words):
    assert all(words in text for text in run_on_ranks(2, _refused, plan))


def _differing():
    mesh = world_mesh(channel=2)
    plan = {"0": "column"} if mesh.get_local_rank() == 0 else {"0": "whole"}
    with pytest.raises(ShardingError, match="same model and plan on every rank"):
        jigsaw.parallelize(nn.Sequential(nn.Linear(4, 4)), mesh, tensor=plan)


def test_plans_that_differ_by_rank_are_refused():
    run_on_ranks(2, _differing)


def test_words_of_other_plans_are_understood():
    run_on_ranks(2, _of_transformers)


def _of_transformers():
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Linear(4, 6))
    words = {"0": "colwise", "1": "replicated_with_grad_allreduce", "2": "rowwise", "3": "colwise_gather_output"}
    mesh = world_mesh(channel=2)
    jigsaw.parallelize(model, mesh, tensor=words)
    held = [tuple(p.to_local().shape) if isinstance(p, DTensor) else tuple(p.shape) for p in model.parameters()]
    assert held == [(4, 4), (4,), (8,), (8,), (4, 4), (4,), (3, 4), (3,)]
    assert model(jigsaw.shard(torch.randn(3, 4), mesh, (None, None))).layout.cut_axes == ()


def test_a_dry_run_counts_what_the_ranks_send():
    forward, backward, *_ = run_on_ranks(
        2, trained_beside_whole, LlamaBlock, {"channel": 2}, (None, None, None), PLANS[LlamaBlock]
    )[0]
    net = nn.Sequential(LlamaBlock(), LlamaBlock()).double()
    report = jigsaw.dry_run(
        net, (SAMPLES, TOKENS, WIDTH), {"channel": 2}, spec=(None, None, None), tensor=PLANS[LlamaBlock], optimizer=None
    )
    assert report.is_complete and not report.remarks
    assert abs(report.sent_bytes - forward - backward) <= MARKS
    staged = jigsaw.dry_run(
        net, (1, TOKENS, WIDTH), {"pipe": 2, "channel": 2}, spec=(None, None, None), tensor=PLANS[LlamaBlock]
    )
    assert staged.is_complete and not staged.remarks


def _staged(tokens):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    model, whole = (nn.Sequential(LlamaBlock(), LlamaBlock()) for _ in range(2))
    whole.load_state_dict(model.state_dict())
    x, y = torch.randn(2, SAMPLES, TOKENS, WIDTH)
    right = F.mse_loss(whole(x), y)
    right.backward()
    mesh = world_mesh(pipe=2, channel=2)
    options = {"tensor": PLANS[LlamaBlock], "gather_again": tokens is not None}
    pipe = jigsaw.pipeline(model, mesh, loss=F.mse_loss, microbatches=2, **options)
    loss = pipe.step(*(jigsaw.shard(z, mesh, (None, tokens, None)) for z in (x, y)))
    torch.testing.assert_close(loss, right.detach(), rtol=1e-12, atol=0)
    held = dict(pipe.named_parameters())
    for name, p in held.items():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        torch.testing.assert_close(grad, whole.get_parameter(name).grad, rtol=1e-11, atol=1e-13)
    return {name.split(".")[1]: tuple(p.to_local().shape) for name, p in held.items() if isinstance(p, DTensor)}


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [None, "channel"])
def test_stages_of_a_pipeline_follow_the_plan(tokens):
    for shapes in run_on_ranks(4, _staged, tokens):
        assert (shapes["query"], shapes["out"]) == ((WIDTH // 2, WIDTH), (WIDTH, WIDTH // 2))
        assert (shapes["gate"], shapes["down"]) == ((2 * WIDTH, WIDTH), (WIDTH, 2 * WIDTH))
