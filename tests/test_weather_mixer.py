"""WeatherMixer of the weather example: trained on every mesh as in one process, and counted by a dry run as it is."""

import importlib.util
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import jigsaw
from jigsaw import comm
from jigsaw.testing import run_on_ranks, world_mesh

EXAMPLE = Path(__file__).parents[1] / "examples" / "weather" / "mixer.py"
SHAPE, PATCH = (2, 3, 21, 24), 4  # six rows of patches, the last with a single row of the globe
BOTH = (None, None, ("lat", "channel"), None)
CASES = [
    ({"lat": 2, "channel": 2}, BOTH, {}),
    ({"lat": 2, "channel": 2}, BOTH, {"shard_weights": True}),
    ({"data": 2, "lat": 2}, ("data", None, "lat", None), {}),
    ({"data": 2, "channel": 2}, ("data", None, "channel", None), {}),
]
MORE = [
    ({"lat": 2, "channel": 2}, (None, None, "lat", None), {}),
    ({"lat": 4}, (None, None, "lat", None), {}),
]
PAIRS = [({"lat": 2}, (None, None, "lat", None), {}), ({"channel": 2}, (None, None, "channel", None), {})]


def made_mixer():
    spec = importlib.util.spec_from_file_location("weather_mixer_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.WeatherMixer(3, SHAPE[2:], width=10, blocks=2, patch=PATCH).double()


def trained(model, states, cut=lambda x: x):
    """The losses of a few steps, each from one state to the next, and the bytes that this rank sent in the last."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for now, then in pairwise(states):
        before, after = cut(now), cut(then)
        optimizer.zero_grad()
        with comm.count() as counted:
            loss = (model(before) - after).square().mean()
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, counted.sent_bytes


def trained_on_ranks(cases, states):
    found = []
    for axes, spec, how in cases:
        mesh = world_mesh(**axes)
        model = jigsaw.parallelize(made_mixer(), mesh, **how)
        losses, sent = trained(model, states, partial(jigsaw.shard, mesh=mesh, spec=spec, align={2: PATCH}))
        weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
        found.append((losses, {n: p.detach() for n, p in weights.items()}, sent))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [pytest.param(CASES, marks=pytest.mark.nightly), MORE, PAIRS], ids=["four", "more", "two"]
)
def test_it_trains_as_in_one_process(cases):
    ranks = torch.Size(cases[0][0].values()).numel()
    torch.manual_seed(1)
    states = [torch.randn(SHAPE, dtype=torch.float64) for _ in range(4)]
    whole = made_mixer()
    losses, _ = trained(whole, states)
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)
    found = run_on_ranks(ranks, trained_on_ranks, cases, states)
    for rank in found:
        for (axes, _, how), (theirs, weights, _) in zip(cases, rank, strict=True):
            assert theirs == pytest.approx(losses, rel=1e-9, abs=1e-9), (axes, how)
            for name, p in whole.named_parameters():
                torch.testing.assert_close(weights[name], p.detach(), rtol=1e-9, atol=1e-9)
    for at, (axes, spec, how) in enumerate(cases):
        if not how:  # what FSDP2 sends goes by jigsaw.comm
            like = {"spec": spec, "align": {2: PATCH}, "optimizer": None}
            report = jigsaw.dry_run(made_mixer(), SHAPE, axes, ranks=range(ranks), **like)
            assert {remark.kind for remark in report.remarks} <= {"gathered"}  # products that have no partner
            for rank in report.ranks:
                assert rank.sent_bytes == found[rank.rank][at][2], axes
