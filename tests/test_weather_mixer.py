"""WeatherMixer of the weather example: trained on every mesh as in one process, and counted by a dry run as it is."""

import importlib.util
from pathlib import Path

import pytest
import torch

import jigsaw
from jigsaw import comm
from jigsaw.testing import run_on_ranks, world_mesh

EXAMPLE = Path(__file__).parents[1] / "examples" / "weather" / "mixer.py"
SHAPE, PATCH = (2, 3, 21, 24), 4  # six rows of patches, the last with a single row of the globe
BOTH = (None, None, ("lat", "channel"), None)
CASES = {
    2: [
        ({"lat": 2}, (None, None, "lat", None), {}),
        ({"channel": 2}, (None, None, "channel", None), {}),
    ],
    4: [
        ({"lat": 2, "channel": 2}, BOTH, {}),
        ({"lat": 2, "channel": 2}, BOTH, {"shard_weights": True}),
        ({"lat": 2, "channel": 2}, (None, None, "lat", None), {}),
        ({"data": 2, "lat": 2}, ("data", None, "lat", None), {}),
        ({"lat": 4}, (None, None, "lat", None), {}),
    ],
}


def made_mixer():
    spec = importlib.util.spec_from_file_location("weather_mixer_example", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.WeatherMixer(3, SHAPE[2:], width=10, blocks=2, patch=PATCH).double()


def trained(model, states, cut=lambda x: x):
    """The losses of a few steps, each from one state to the next."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    losses = []
    for now, then in zip(states, states[1:], strict=False):
        optimizer.zero_grad()
        loss = (model(cut(now)) - cut(then)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained_on_ranks(cases, states):
    found = []
    for axes, spec, how in cases:
        mesh = world_mesh(**axes)
        model = jigsaw.parallelize(made_mixer(), mesh, **how)
        with comm.count() as counted:
            losses = trained(model, states, lambda x: jigsaw.shard(x, mesh, spec, align={2: PATCH}))  # noqa: B023
        weights = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
        found.append((losses, {n: p.detach() for n, p in weights.items()}, counted.sent_bytes))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_it_trains_as_in_one_process(ranks):
    torch.manual_seed(1)
    states = [torch.randn(SHAPE, dtype=torch.float64) for _ in range(4)]
    whole = made_mixer()
    losses = trained(whole, states)
    assert losses[-1] != pytest.approx(losses[0], rel=1e-3)
    found = run_on_ranks(ranks, trained_on_ranks, CASES[ranks], states)
    for rank in found:
        for (axes, _, how), (theirs, weights, _) in zip(CASES[ranks], rank, strict=True):
            assert theirs == pytest.approx(losses, rel=1e-9, abs=1e-9), (axes, how)
            for name, p in whole.named_parameters():
                torch.testing.assert_close(weights[name], p.detach(), rtol=1e-9, atol=1e-9)
    for at, (axes, spec, how) in enumerate(CASES[ranks]):
        if not how:  # what FSDP2 sends goes by jigsaw.comm
            like = {"spec": spec, "align": {2: PATCH}, "optimizer": None}
            report = jigsaw.dry_run(made_mixer(), SHAPE, axes, ranks=range(ranks), **like)
            assert report.remarks == ()
            for rank in report.ranks:
                assert 3 * rank.sent_bytes == pytest.approx(found[rank.rank][at][2], abs=64), axes
