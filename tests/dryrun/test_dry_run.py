"""A dry run beside the real one: messages counted, memory measured; and what it says of nets that would not run."""

import pytest
import torch
from small_nets import NETS, counted_step, dry_step
from torch import nn

import jigsaw
from jigsaw.cut import ShardingError
from jigsaw.testing import run_on_ranks

MESHES = [{"lat": 1}, {"lat": 2}, {"lat": 2, "lon": 2}, {"lon": 4}]


def _counted_on_ranks(axes):
    return {name: counted_step(name, axes) for name in NETS}


def _assert_same_messages(axes):
    ranks = torch.Size(axes.values()).numel()
    real = run_on_ranks(ranks, _counted_on_ranks, axes)
    for name in NETS:
        report = dry_step(name, axes, ranks=range(ranks))
        assert report.is_complete
        for played, counted in zip(report.ranks, real, strict=True):
            for phase in ("forward", "backward"):
                found = {kind: (t.sent_bytes, t.messages) for kind, t in played.phases[phase].traffic.items()}
                assert found == counted[name][phase], (name, axes, played.rank, phase)
        assert report.sent_bytes == max(sum(b for p in c[name].values() for b, _ in p.values()) for c in real)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_messages_are_those_of_real_ranks(axes):
    _assert_same_messages(axes)
