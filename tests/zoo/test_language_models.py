"""Language models of transformers: their columns and rows are found, and trained as in one process."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from torch.distributed.tensor import DTensor

if find_spec("transformers") is None:
    pytest.skip("transformers is not installed: make zoo", allow_module_level=True)

from zoo_net import default_dtype, define_missing_operators

import jigsaw
from jigsaw import comm
from jigsaw.parallel.channel_parallel import found_tensor_plan
from jigsaw.testing import run_on_ranks, world_mesh

pytestmark = [pytest.mark.zoo, pytest.mark.timeout(900)]
SAMPLES, TOKENS, WIDTH, WORDS, BLOCKS = 4, 12, 24, 40, 2


def gpt2():
    define_missing_operators()
    import transformers

    sizes = {"n_embd": WIDTH, "n_layer": BLOCKS, "n_head": 6, "n_positions": 32}
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    names = {"bos_token_id": 0, "eos_token_id": 0, "tie_word_embeddings": False}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(vocab_size=WORDS, **sizes, **drops, **names))


def mixtral():
    define_missing_operators()
    import transformers

    sizes = {"hidden_size": WIDTH, "intermediate_size": 48, "num_hidden_layers": BLOCKS, "num_local_experts": 4}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return transformers.MixtralForCausalLM(transformers.MixtralConfig(vocab_size=WORDS, **sizes, **heads))


def test_the_layers_of_gpt2_are_columns_and_rows():
    pairs = found_tensor_plan(gpt2(), 2)
    block = {"attn.c_attn": "3 columns", "attn.c_proj": "row", "mlp.c_fc": "column", "mlp.c_proj": "row"}
    assert pairs.cuts == {f"transformer.h.{at}.{name}": cut for at in range(BLOCKS) for name, cut in block.items()}
    assert set(pairs.reasons) == {"lm_head"}


@pytest.mark.parametrize("example", [None, torch.zeros(2, 8, dtype=torch.int64)], ids=["guessed", "example"])
def test_attention_is_found_beside_experts_that_do_not_run_on_paper(example):
    pairs = found_tensor_plan(mixtral(), 2, example)
    cuts = {"q_proj": "column", "k_proj": "column", "v_proj": "column", "o_proj": "row"}
    blocks = [f"model.layers.{at}" for at in range(BLOCKS)]
    assert pairs.cuts == {f"{block}.self_attn.{name}": cut for block in blocks for name, cut in cuts.items()}
    assert set(pairs.reasons) == {"lm_head", *(f"{block}.mlp.experts" for block in blocks)}
    assert "its weights stay whole" in pairs.reasons["model.layers.0.mlp.experts"]
    assert not pairs.failure


def _gpt2_beside_one_process(axes, spec):
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        whole, cut = gpt2(), gpt2()
        cut.load_state_dict(whole.state_dict())
        mesh = world_mesh(**axes)
        cut = jigsaw.parallelize(cut, mesh)
        words = torch.randint(0, WORDS, (SAMPLES, TOKENS))
        want = whole(words, use_cache=False).logits
        want.square().mean().backward()
        with comm.count() as counted:
            y = cut(jigsaw.shard(words, mesh, spec), use_cache=False).logits
        sent = counted.sent_bytes
        y.square().mean().backward()
    torch.testing.assert_close(y.full_tensor(), want, rtol=1e-12, atol=1e-13)
    for one, other in zip(cut.parameters(), whole.parameters(), strict=True):
        grad = one.grad.full_tensor() if isinstance(one.grad, DTensor) else one.grad
        torch.testing.assert_close(grad, other.grad, rtol=1e-12, atol=1e-14)
    return sent


@pytest.mark.parametrize(
    ("axes", "spec"),
    [
        ({"channel": 2}, (None, None)),
        ({"channel": 2}, (None, "channel")),
        ({"channel": 3}, (None, None)),
        ({"data": 2, "channel": 2}, ("data", None)),
    ],
    ids=str,
)
def test_gpt2_is_trained_as_in_one_process(axes, spec):
    ranks, parts = torch.Size(axes.values()).numel(), axes["channel"]
    rows = SAMPLES // axes.get("data", 1) * TOKENS
    one_sum = 2 * (parts - 1) * rows * WIDTH * 8 // parts
    of_classes = rows * WORDS * 8 if WORDS % parts == 0 else 0  # those of the head are gathered
    for sent in run_on_ranks(ranks, _gpt2_beside_one_process, axes, spec):
        assert sent <= 1.02 * (2 * BLOCKS * one_sum + of_classes), (sent, one_sum)
