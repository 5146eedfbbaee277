"""The zoo as tests: every published net, unmodified, is on tiles what it is in one process."""

from __future__ import annotations

import dataclasses
import re
import time

import pytest
import torch
import torch.nn.functional as F
from run import SECONDS, causes_table, final_verdict, mesh_name, models_page, run_one, run_zoo, short_cause
from torch import Tensor, nn
from uses import NETS, USES, try_use, uses_table
from waits import net_waits, waits_more
from zoo_net import ZooNet, image
from zoo_table import KNOWN_REFUSALS, ZOO, installed_version
from zoo_training import RankVerdict, compare_records, measure_noise, right_norms

from jigsaw.testing.played_device import why_not_played

FEW = ["by hand/UTransformer"]  # what `make test` runs


def verdicts(key: str, meshes: list[str]) -> dict[str, dict]:
    return run_zoo([ZOO[key]], meshes, {})[key]["meshes"]


@pytest.mark.parametrize("key", FEW)
def test_a_net_trains_on_tiles_as_in_one_process(key):
    found = verdicts(key, ["2"])["2"]
    assert found["verdict"] == "exact", found["cause"]
    assert found["worst"] < 1e-9
    assert sum(found["sent"].values()) > 0


LONGEST = {
    f"monai/{name}"
    for name in (
        "SwinUNETR", "VNet", "SegResNetDS", "BasicUNet", "SegResNetVAE", "BasicUNetPlusPlus", "UNETR", "AttentionUnet",
        "SPADEAutoencoderKL", "DiffusionModelUNet", "ViT", "RegUNet", "DynUNet deep supervision", "MedNeXt",
    )
}  # fmt: skip


@pytest.mark.skipif(bool(why_not_played()), reason=why_not_played() or "it may")
@pytest.mark.slow  # the device is compiled first
@pytest.mark.timeout(900)
@pytest.mark.parametrize("key", ["by hand/FourCastNet", "by hand/axial attention", "by hand/Perceiver"])
def test_the_host_waits_for_no_more_than_in_plain_torch(key):
    found = net_waits(key)
    assert "error" not in found, found
    assert not waits_more(found), found


def _marked_keys():
    """Of the nets every third is tried in `make check`, and those that are refused; all of them are nightly."""
    for at, key in enumerate(ZOO):
        is_chosen = key in KNOWN_REFUSALS or (at % 3 == 0 and key not in LONGEST)
        yield pytest.param(key, marks=pytest.mark.slow if is_chosen else pytest.mark.nightly)


@pytest.mark.parametrize("key", _marked_keys())
def test_every_net_trains_on_a_mesh_as_in_one_process(key):
    """On one of its meshes, each net on another: a net takes half a minute on all of them, which `make zoo` tries."""
    net = ZOO[key]
    if installed_version(net) is None:
        pytest.skip(f"{net.package} is not installed: make zoo")
    one = net.meshes[list(ZOO).index(key) % len(net.meshes)]
    found = verdicts(key, [mesh_name(m) for m in (net.meshes if key in KNOWN_REFUSALS else [one])])
    mesh, last = list(found.items())[-1]
    if last["verdict"] == "absent":
        pytest.skip(f"{last['cause']}: make zoo")
    if key in KNOWN_REFUSALS:
        assert last["verdict"] == "refused", f"on {mesh}: {last['verdict']}; take it out of KNOWN_REFUSALS if exact"
        assert KNOWN_REFUSALS[key] in (last["function"], last["cause"].split()[0].strip(":"))
    else:
        assert last["verdict"] == "exact", f"on {mesh}: {last['cause']} at {last['place']}\n{last['detail']}"


def test_the_table_names_each_net_once_and_is_known():
    assert len(ZOO) > 120
    assert set(KNOWN_REFUSALS) <= set(ZOO)
    for net in ZOO.values():
        assert net.inputs
        assert any(given.spec is not None for given in net.inputs)


def test_the_oracle_of_batch_norm_is_right_at_batch_1():
    """torch's own gradient is wrong where it comes back channels-last; the mended one is that of the formula."""
    torch.manual_seed(0)
    x, g = torch.randn(1, 3, 8, 6, dtype=torch.float64), torch.randn(1, 48, 3, dtype=torch.float64)

    def gradient(norm) -> Tensor:
        own = x.clone().requires_grad_()
        norm(own).flatten(2).transpose(1, 2).backward(g)
        return own.grad

    def formula(own: Tensor) -> Tensor:
        mean, var = own.mean((0, 2, 3), keepdim=True), own.var((0, 2, 3), unbiased=False, keepdim=True)
        return (own - mean) / (var + 1e-5).sqrt()

    want = gradient(formula)
    with right_norms():
        got = gradient(lambda own: F.batch_norm(own, None, None, training=True))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-14)
    assert F.batch_norm.__module__ == "torch.nn.functional"


class OtherOnTiles(nn.Module):
    """Wrong on purpose on tiles: it adds one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + float(type(x) is not Tensor)


class OwnError(OtherOnTiles):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * {Tensor: 1.0}[type(x)]


class Branching(OtherOnTiles):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y if bool(y[0, 0, 0, 0] > y[0, 0, 1, 0]) or type(x) is Tensor else y if bool(x) else -y


class OneSleeps(OtherOnTiles):
    def forward(self, x: Tensor) -> Tensor:
        if type(x) is not Tensor and x.coordinate[0] == 1:
            time.sleep(1000)
        return self.conv(x)


class Dropping(nn.Module):
    """Every kind of dropout that nets have, switched on: as modules, by hand, by sample, in attention; and noise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.drop = nn.Conv2d(1, 8, 3, padding=1), nn.Sequential(nn.Dropout(0.2), nn.Dropout2d(0.3))
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.time = nn.Parameter(torch.randn(2, 8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.conv(x))
        y = y + F.dropout(self.time, 0.5)[:, :, None, None]
        y = F.dropout(y, 0.1, training=True) + torch.randn_like(y) + torch.rand(2, 1, 1, 1)
        tokens = y.flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        q = tokens.unflatten(2, (2, 4)).transpose(1, 2)
        kept = q.new_empty(2, 1, 1, 1).bernoulli_(0.8) * torch.empty(2, 1, 1, 1).bernoulli_(0.5)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.3) * (0.1 + kept) + F.alpha_dropout(q, 0.1, True)


class Casting(OtherOnTiles):
    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return y.float().var(1, keepdim=True).to(x.dtype) + y.to(torch.float32).mean().to(x.dtype)


@pytest.mark.slow
def test_casts_to_float32_are_left_out_in_both_runs(tmp_path):
    net = ZooNet("by test", "by hand", Casting, [image(1, 1, 24, 16)], casts=True)
    found = run_one(net, {"lat": 2}, {}, tmp_path / "net")
    assert (found.verdict, found.cause) == ("exact", "")
    assert found.worst < 1e-12  # their rounding is 1e-7
    assert torch.float32 != torch.float64


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"lat": 2}, {"lat": 2, "lon": 2}])
def test_what_a_net_draws_is_the_same_on_tiles(axes, tmp_path):
    net = ZooNet("by test", "by hand", Dropping, [image(2, 1, 8, 6)])
    found = run_one(net, axes, {}, tmp_path / "net")
    assert (found.verdict, found.cause) == ("exact", "")
    assert found.worst < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("build", "verdict", "cause", "seconds"),
    [
        (OtherOnTiles, "wrong", "off by", SECONDS),
        (OwnError, "untyped", "KeyError", SECONDS),
        (Branching, "refused", "ambiguous|bool|become", SECONDS),
        (OneSleeps, "hang", "still running", 5.0),  # the others end by themselves, however busy the machine is
    ],
)
def test_the_runner_tells_how_a_net_ends(build, verdict, cause, seconds, tmp_path):
    net = ZooNet("by test", "by hand", build, [image(1, 1, 8, 6)])
    found = run_one(net, {"lat": 2}, {}, tmp_path / "net", seconds)
    assert found.verdict == verdict, found
    assert re.search(cause, found.cause)


def test_causes_are_counted_without_their_numbers():
    def row(verdict: str, cause: str) -> dict:
        found = dataclasses.asdict(RankVerdict(verdict, cause, "cat", "net.py:3: x = cat(y)"))
        return {"package": "p", "version": "1", "meshes": {"2": found}}

    results = {"p/a": row("refused", "cat: [0, 3, 7] and (0, 4)"), "p/b": row("refused", "cat: [0, 9] and (1, 2)")}
    results["p/c"] = row("exact", "")
    told = causes_table(results)
    assert "2 refused, 1 exact" in told
    assert "**2** refused, `cat`: cat: (…) and (…)" in told
    assert "net.py:3" in told
    assert short_cause({"cause": "off by 3e-05"}) == "off by n"
    page = models_page(results)
    assert "| c | 2 | 0e+00 |" in page
    assert "refused: `cat`" in page
    assert final_verdict(results["p/c"])[1]["verdict"] == "exact"


@pytest.mark.parametrize("use", ["checkpointing", "channel", pytest.param("dry run", marks=pytest.mark.slow)])
def test_a_net_in_harder_use_is_exact(use, tmp_path):
    found = try_use(ZOO["by hand/UTransformer"], use, tmp_path)
    assert (found.verdict, found.cause) == ("exact", "")


def test_a_net_in_harder_use_may_differ_by_its_own_noise_alone(tmp_path):
    net = ZOO["by hand/UTransformer"]
    want = {"output": torch.tensor([1.0, 2.0]), "loss 0": torch.tensor(3.0)}
    torch.save(want, tmp_path / "whole")
    got = want | {"output": torch.tensor([1.0, 2.0 + 9e-4])}
    assert compare_records(net, got, str(tmp_path)).verdict == "wrong"
    torch.save(([want | {"output": torch.tensor([1.0, 2.0 + 4e-4])}, want], None), tmp_path / "noise")
    assert compare_records(net, got, str(tmp_path)).verdict == "exact"
    assert compare_records(net, got | {"loss 0": torch.tensor(3.1)}, str(tmp_path)).verdict == "wrong"
    assert compare_records(net, {"loss 0": torch.tensor(3.0)}, str(tmp_path)).verdict == "wrong"
    assert compare_records(net, {"loss 0": torch.tensor(3.0)}, str(tmp_path), is_part=True).verdict == "exact"


def test_a_net_may_be_as_near_to_float64_as_one_process_is(tmp_path):
    """A scalar that one process sums up in bfloat16: its runs agree with each other, and are off alike."""
    net = ZOO["by hand/UTransformer"]

    def verdict(of_ranks: float) -> str:
        got = {"output": torch.tensor([of_ranks])}
        return compare_records(net, got, str(tmp_path)).verdict

    torch.save({"output": torch.tensor([1.02])}, tmp_path / "whole")
    nearby = [{"output": torch.tensor([1.021])}] * 4
    torch.save((nearby, None), tmp_path / "noise")
    assert verdict(1.0) == "wrong"
    torch.save((nearby, {"output": torch.tensor([1.0], dtype=torch.float64)}), tmp_path / "noise")
    assert [verdict(x) for x in (1.0, 1.01, 0.985, 0.97, 1.03)] == ["exact", "exact", "exact", "wrong", "wrong"]


class DrawingByShape(nn.Module):
    """Draws other numbers in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * torch.rand(1, 2, 1, 1).mul(5)


def test_the_float64_run_has_the_weights_of_the_narrow_one():
    net = dataclasses.replace(ZOO["by hand/UTransformer"], dtype=torch.float32)
    wide = dataclasses.replace(net, dtype=torch.float64, drawn=torch.float32)
    for a, b in zip(net.model().parameters(), wide.model().parameters(), strict=True):
        assert b.dtype == torch.float64
        assert torch.equal(a.double(), b)
    assert torch.equal(net.draw_inputs()[0].double(), wide.draw_inputs()[0])
    small = ZooNet("by test", "by hand", OtherOnTiles, [image(1, 1, 8, 6)], dtype=torch.float32)
    noise = measure_noise(small, 2.0**-23, exists_in_float64=True)
    assert len(noise.nearby) == 4
    assert noise.reference is not None
    torch.testing.assert_close(noise.reference["loss 0"].float(), noise.nearby[0]["loss 0"])
    drawing = dataclasses.replace(small, build=DrawingByShape)
    assert measure_noise(drawing, 2.0**-23, exists_in_float64=True).reference is None


def test_the_table_of_uses_has_a_column_a_use_and_says_what_stops_nets():
    rows = {NETS[0]: {"train": dataclasses.asdict(RankVerdict("exact"))}}
    rows[NETS[0]]["channel"] = dataclasses.asdict(RankVerdict("refused", "no channels"))
    told = uses_table(rows)
    assert f"| {NETS[0]} | exact | - | - | - | - | - | refused |" in told
    assert f"- {NETS[0]}, channel: no channels" in told
    assert len(NETS) == 13
    assert len(USES) == 10
    assert set(NETS) <= set(ZOO)
