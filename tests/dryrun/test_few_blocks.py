"""Steps of many blocks from those of one and two: to the byte those of all blocks, or not taken."""

from functools import partial

import pytest
import small_nets
import torch
from torch import nn

import jigsaw
from jigsaw.dryrun.bare_models import made_once
from jigsaw.dryrun.counted_steps import CountedPhase, are_same_steps, phase_of_more_blocks
from jigsaw.dryrun.few_blocks import play_few_blocks
from jigsaw.dryrun.rank_playing import StepPlan

SHAPE = (2, 3, 32, 40)


def _plan(make, **how):
    return StepPlan(made_once(make), (SHAPE,), align={2: 4, 3: 4}, **how)


class _Rows(nn.Module):
    """Eight blocks, whose pass around them is that of `step`."""

    def __init__(self, step, width=2600):
        super().__init__()
        self.step = step
        self.first, self.last = nn.Conv2d(3, width, 1), nn.Conv2d(width, 3, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(width, width, 1), nn.GELU()) for _ in range(8))

    def forward(self, x):
        x = kept = self.first(x)
        for at, block in enumerate(self.blocks):
            x, kept = self.step(at, block, x, kept)
        return self.last(x)


def _alike(at, block, x, kept):
    return x + block(x), kept


def _skipping(at, block, x, kept):
    return block(x) + (kept if at == 6 else x), kept


def _keeping(at, block, x, kept):
    return block(x) + (kept if at == 7 else x), x if at == 5 else kept


def _in_turn(at, block, x, kept):
    return block(x.movedim(-1, -2) if at % 2 else x), kept


def _with_more(net, at, attribute, value):
    setattr(net.blocks[at][1], attribute, value)
    return net


def _frozen():
    net = _Rows(_alike)
    net.blocks[4].requires_grad_(False)
    return net


# each block has weights that fill a bucket of gradients, or half of one
LARGE = partial(_Rows, _alike)
DEEP = partial(small_nets.SmallTransformer, 1664, 4, 8)
WAYS = [
    (LARGE, {"lat": 2}, {"checkpoint": "blocks"}, True),
    (LARGE, {"data": 2, "lat": 2}, {"shard_weights": True, "replicate": "data"}, True),
    pytest.param(DEEP, {"lat": 2}, {}, True, marks=pytest.mark.slow),
    pytest.param(DEEP, {"lat": 2}, {"shard_weights": True, "checkpoint": "blocks"}, True, marks=pytest.mark.nightly),
    pytest.param(LARGE, {"lat": 2, "channel": 2}, {}, False, marks=pytest.mark.slow),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "axes", "how", "is_short"), WAYS)
def test_few_blocks_say_what_all_do(make, axes, how, is_short):
    given = {"mesh": axes, "ranks": [1], "align": 4, **how}
    short, whole = (jigsaw.dry_run(make, SHAPE, **given, every_block=every) for every in (False, True))
    assert short == whole
    how = how | {"replicate": (how["replicate"],)} if "replicate" in how else how
    assert (play_few_blocks(_plan(make, **how), axes, 1) is not None) == is_short


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "is_short"),
    [
        (partial(_Rows, _alike), True),
        (partial(_Rows, _skipping), False),
        (partial(_Rows, _keeping), False),
        (partial(_Rows, _in_turn), False),
        (lambda: _with_more(_Rows(_alike), 5, "approximate", "tanh"), False),
        (_frozen, False),
        # buckets of gradients end within some blocks and not in others
        (partial(_Rows, _alike, 600), False),
    ],
    ids=["alike", "skip", "kept", "turns", "attribute", "frozen", "small"],
)
def test_what_is_not_the_same_at_each_block_is_played_whole(make, is_short):
    found = play_few_blocks(_plan(make), {"lat": 2}, 0)
    assert (found is not None) == is_short


def test_stretches_and_numbers_on_a_line():
    def phase(blocks):
        norms = [("temporary", 8)] * blocks
        each = [("activations", 5), ("temporary", 7), ("temporary", -7)] * blocks
        return CountedPhase(
            changes=[("temporary", 100 + 8 * blocks), *norms, ("gradients", 3), *each, ("temporary", -100 - 8 * blocks)]
        )

    found = phase_of_more_blocks(phase(1), phase(2), 6)
    assert found == phase(7)
    turned = CountedPhase(changes=[*phase(7).changes[:-2], phase(7).changes[-1], phase(7).changes[-2]])
    assert turned != found and are_same_steps(turned, found)  # what ends at one time does so in any order
    other = CountedPhase(changes=[change for change in phase(2).changes if change[0] != "gradients"])
    assert phase_of_more_blocks(phase(1), other, 6) is None


def test_what_ends_at_one_time_in_any_order_is_compared_by_size():
    def phase(blocks, turned):
        ends = [("temporary", -100), *[("temporary", -4)] * blocks]
        return CountedPhase(
            changes=[("temporary", 100), *[("temporary", 4)] * blocks, *(reversed(ends) if turned else ends)]
        )

    in_order = phase_of_more_blocks(phase(1, False), phase(2, True), 6)
    by_size = phase_of_more_blocks(phase(1, False), phase(2, True), 6, by_size=True)
    assert in_order is None or not are_same_steps(in_order, phase(7, False))
    assert by_size is not None
    assert are_same_steps(by_size, phase(7, False))
    assert are_same_steps(by_size, phase(7, True))


def test_hybrid_weights_are_gathered_in_the_node_and_summed_between():
    net = nn.Linear(8, 64, bias=False)
    size = 8 * 64 * 4
    report = jigsaw.dry_run(
        net, (4, 6, 8), {"data": 2, "lat": 2}, spec=("data", "lat", None), ranks=[0], ranks_per_node=2,
        shard_weights=True, replicate="data",
    )  # fmt: skip
    forward, backward = (report.ranks[0].phases[name] for name in ("forward", "backward"))
    assert forward.traffic["gathered weights"].sent_bytes == size // 2
    assert forward.links["node"].sent_bytes >= size // 2
    # half a weight is scattered over two ranks of the node, and half a weight summed over two nodes
    assert backward.traffic["gradients"].sent_bytes == size // 2 + 2 * (size // 2) // 2
    assert backward.links["network"].sent_bytes == size // 2
    parts = jigsaw.dry_run(net, (4, 6, 8), {"data": 2, "lat": 2}, ranks=[0], shard_weights=True, optimizer=None)
    assert report.ranks[0].phases["forward"].peak["weights"] == size // 2
    assert parts.ranks[0].phases["forward"].peak["weights"] == size // 4
    both = jigsaw.dry_run(
        net, (4, 8), {"replicate": 2, "data": 2}, ranks=[0], shard_weights=True, replicate="replicate"
    )
    assert both.is_complete
    assert torch.Size(both.mesh.values()).numel() == 4
