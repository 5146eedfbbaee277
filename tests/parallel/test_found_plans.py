"""Blocks without a plan: `parallelize` finds their columns and rows, and they send what Megatron's formula says."""

import random
from typing import ClassVar

import numpy as np
import plan_blocks
import pytest
import torch
import torch.distributed as dist
from plan_blocks import BLOCKS, SAMPLES, WIDTH, trained_beside_whole
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.parallel.channel_parallel import completed_plan, found_tensor_plan
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

TOKENS = 16
# the others send the sums of Megatron alone; six vectors a sample are gathered, and windows of cut tokens travel
MORE_THAN_SUMS = {"DiTBlock": 1.25, "SwinBlock": 1.4}


def _share_of_four_sums(block, axes, spec):
    return trained_beside_whole(block, axes, spec, None, tokens=TOKENS)


@pytest.mark.parametrize("tokens", [None, "channel"])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_block_without_a_plan(block, tokens):
    one_sum = SAMPLES * TOKENS * WIDTH * 8
    for forward, backward, _, plain in run_on_ranks(
        2, _share_of_four_sums, block, {"channel": 2}, (None, tokens, None)
    ):
        shares = forward / (4 * one_sum), (backward - plain) / (4 * one_sum)
        assert max(shares) < MORE_THAN_SUMS.get(block.__name__, 1.01), shares


OTHERS = [
    pytest.param({"channel": 3}, (None, None, None), id="3"),
    pytest.param({"channel": 4}, (None, None, None), id="4", marks=pytest.mark.slow),
    pytest.param({"data": 2, "channel": 2}, ("data", "channel", None), id="2x2", marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "spec"), OTHERS)
@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_without_a_plan_are_exact_where_heads_do_not_divide(block, axes, spec):
    run_on_ranks(torch.Size(axes.values()).numel(), _share_of_four_sums, block, axes, spec)


class _Mixed(nn.Module):
    """Columns that must not be rows' partners: one is normed, one returned, one added to what is whole."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(WIDTH, 48), nn.Linear(48, WIDTH)
        self.norm, self.one, self.other = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.narrow(torch.tanh(self.wide(x)))
        return self.other(self.norm(self.one(x))) + x + y


def test_reasons_name_what_stands_in_the_way():
    pairs = found_tensor_plan(_Mixed(), 2)
    assert pairs.cuts == {"wide": "column", "narrow": "row"}
    assert pairs.reasons == {"one": "layer_norm: it mixes all channels", "other": "add: it meets whole channels"}
    report = jigsaw.dry_run(_Mixed(), (2, 8, WIDTH), {"channel": 2}, spec=(None, None, None), optimizer=None)
    assert [(r.kind, r.module) for r in report.remarks] == [("gathered", "one"), ("gathered", "other")]


class _Conditioned(nn.Module):
    """A block that no likely input fits: the pairs of its parts are found, and all with an example."""

    def __init__(self):
        super().__init__()
        self.block = plan_blocks.HFViTLayer()

    def forward(self, x, scales):
        return self.block(x) * scales["scale"]


def test_parts_are_run_where_the_model_cannot_be():
    example = torch.empty(2, 8, WIDTH), {"scale": torch.empty(2, 1, 1)}
    with_example = found_tensor_plan(_Conditioned(), 2, example)
    assert found_tensor_plan(_Conditioned(), 2).cuts == with_example.cuts
    assert set(with_example.cuts.values()) == {"row", "column"} and not with_example.reasons
    assert found_tensor_plan(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 1, torch.empty(2, 8)).cuts == {}


class _Routed(nn.Module):
    """Attention, and experts that take the tokens that are routed to them: their number is not known on paper."""

    def __init__(self):
        super().__init__()
        self.block, self.gate = plan_blocks.HFViTLayer(), nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH)) for _ in "ab")

    def forward(self, x):
        x = self.block(x)
        routed = self.gate(x).argmax(-1)
        y = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (routed == number).nonzero(as_tuple=True)
            y = y.index_put(rows, expert(x[rows]))
        return y


def test_parts_are_run_where_an_example_needs_values():
    pairs = found_tensor_plan(_Routed(), 2, torch.empty(2, 8, WIDTH))
    assert "Routed raises DynamicOutputShapeException" in pairs.failure
    assert set(pairs.reasons) == {"gate"}
    assert pairs.cuts["experts.1.0"] == "column" and pairs.cuts["experts.1.2"] == "row"
    assert {name for name in pairs.cuts if name.startswith("block.")} == {
        f"block.{name}" for name in found_tensor_plan(plan_blocks.HFViTLayer(), 2).cuts
    }


class _Experts(nn.Module):
    """Experts whose weights are stacked, so that none is a layer."""

    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(2, WIDTH, WIDTH))

    def forward(self, x, routed):
        y = torch.zeros_like(x)
        for number, weight in enumerate(self.weights):
            rows = (routed == number).nonzero(as_tuple=True)
            y = y.index_put(rows, x[rows] @ weight)
        return y


class _Mixture(nn.Module):
    """Two blocks with such experts, the second with layers as experts."""

    def __init__(self):
        super().__init__()
        self.block, self.gate, self.experts = plan_blocks.HFViTLayer(), nn.Linear(WIDTH, 2), _Experts()
        self.routed = _Routed()

    def forward(self, x):
        x = self.block(x)
        return self.routed(self.experts(x, self.gate(x).argmax(-1)))


@pytest.mark.parametrize("example", [None, torch.empty(2, 8, WIDTH)], ids=["guessed", "example"])
def test_experts_that_need_values_are_left_out(example):
    pairs = found_tensor_plan(_Mixture(), 2, example)
    block = {f"block.{name}" for name in found_tensor_plan(plan_blocks.HFViTLayer(), 2).cuts}
    experts = {f"experts.{at}.{layer}" for at in "01" for layer in "02"}
    assert set(pairs.cuts) == block | {f"routed.{name}" for name in block | experts}
    assert set(pairs.reasons) == {"experts", "gate", "routed.gate"} and not pairs.failure
    assert "its weights stay whole: on paper _Experts raises DynamicOutputShape" in pairs.reasons["experts"]
    report = jigsaw.dry_run(_Mixture(), (2, 8, WIDTH), {"channel": 2}, spec=(None, None, None), optimizer=None)
    assert "experts" in [remark.module for remark in report.remarks]


class _Optional(nn.Module):
    """A language model whose arguments all have defaults, as those of transformers."""

    def __init__(self):
        super().__init__()
        self.embed, self.block = nn.Embedding(32, WIDTH), plan_blocks.HFLlamaLayer()

    def forward(self, input_ids=None, attention_mask=None):
        return self.block(self.embed(input_ids))


def test_a_model_whose_arguments_have_defaults_is_given_the_first():
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert set(found_tensor_plan(_Optional(), 2).cuts) == {f"block.{name}" for name in names}


class _Language(_Optional):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, input_ids=None, attention_mask=None):
        return self.head(super().forward(input_ids))


HEAD_STAYS_CUT = {"*": "found", "head": "column"}


def _trained_language(plan):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    whole, model = _Language(), _Language()
    model.load_state_dict(whole.state_dict())
    tokens, labels = torch.randint(32, (2, 6)), torch.randint(32, (2, 6))
    right = nn.functional.cross_entropy(whole(tokens).flatten(0, 1), labels.flatten())
    right.backward()
    mesh = world_mesh(channel=2)
    jigsaw.parallelize(model, mesh, tensor=plan)
    out = model(jigsaw.shard(tokens, mesh, (None, None)))
    loss = nn.functional.cross_entropy(out.flatten(0, 1), jigsaw.shard(labels.flatten(), mesh, (None,)))
    loss.backward()
    torch.testing.assert_close(loss.detach(), right.detach(), rtol=1e-12, atol=0)
    for (name, x), y in zip(model.named_parameters(), whole.parameters(), strict=True):
        gradient = x.grad.full_tensor() if hasattr(x.grad, "full_tensor") else x.grad
        torch.testing.assert_close(gradient, y.grad, rtol=1e-11, atol=1e-13, msg=name)
    return out.local.shape[-1]


@pytest.mark.parametrize(("plan", "classes"), [(None, 32), (HEAD_STAYS_CUT, 16)])
def test_a_plan_may_name_some_layers_and_leave_others_to_be_found(plan, classes):
    assert run_on_ranks(2, _trained_language, plan) == [classes] * 2


def test_what_a_plan_names_is_no_longer_remarked():
    model, tokens = _Language(), torch.zeros(2, 6, dtype=torch.int64)
    found, pairs = completed_plan(model, None, 2, tokens)
    assert set(pairs.reasons) == {"head"} and "tensor={'*': 'found', LAYER: 'column'}" in pairs.reasons["head"]
    plan, rest = completed_plan(model, HEAD_STAYS_CUT, 2, tokens)
    assert plan == {**found, "head": "column"} and not rest.reasons
    assert completed_plan(model, {"head": "column", "block*": "found"}, 2, tokens)[0] == {"head": "column", **found}
    with pytest.raises(ShardingError, match="'heads': 'found'}: no module has such a name"):
        completed_plan(model, {"heads": "found"}, 2, tokens)


def test_a_run_on_paper_leaves_no_trace_in_the_model():
    model = plan_blocks.GPTBlock()
    before = {name: (id(x), x.clone()) for name, x in model.state_dict(keep_vars=True).items()}
    found_tensor_plan(model, 2)
    for name, x in model.state_dict(keep_vars=True).items():
        assert id(x) == before[name][0] and torch.equal(x, before[name][1])


class _Drawing(nn.Module):
    worlds: ClassVar = []

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        self.worlds.append(dist.get_world_size())
        total = x.sum()
        dist.all_reduce(total)
        factor = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002
        return self.narrow(self.wide(x).relu()) * total * factor


@on_ranks(2)
def test_a_run_on_paper_draws_and_sends_nothing():
    model = _Drawing()
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # noqa: NPY002
    with comm.count() as sent:
        assert found_tensor_plan(model, 2).cuts == {"wide": "column", "narrow": "row"}
    assert set(_Drawing.worlds) == {1} and not sent.messages
    assert random.getstate() == states[0] and np.random.get_state()[1].tolist() == states[1]  # noqa: NPY002
    assert torch.equal(torch.get_rng_state(), states[2])


@on_ranks(2)
def test_an_example_that_the_model_does_not_take_is_told():
    with pytest.warns(UserWarning, match=r"with example= on paper _Mixed raises .*; pass what it is called with"):
        jigsaw.parallelize(_Mixed(), world_mesh(channel=2), example=torch.empty(2, 8, WIDTH + 1))
