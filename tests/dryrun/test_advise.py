"""`python -m jigsaw advise`: the meshes that are searched, and what is said of them."""

import re
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import small_nets
import torch
import xarray as xr
from small_nets import NETS
from torch import nn

import jigsaw
from jigsaw.__main__ import main
from jigsaw.dryrun import DEVICES, DryRunReport, Traffic, advice_text, advise_mesh, dry_run
from jigsaw.dryrun.calibration import load_device, measure_device, save_device
from jigsaw.dryrun.kernel_clock import timed_kernel
from jigsaw.dryrun.mesh_search import _MeshSearch, possible_meshes
from jigsaw.dryrun.pipeline_estimate import StageShare, pipelined_report
from jigsaw.dryrun.rank_playing import StepPlan, mean_square_of_tiles, play_rank
from jigsaw.errors import ShardingError
from jigsaw.geometry.axis_names import space_dims

SHAPE = (1, 3, 32, 40)


def test_meshes_are_searched_without_those_that_are_the_same():
    meshes = [tuple(axes.values()) for axes in possible_meshes((2, 3, 32, 40), None, 4)]
    assert meshes == [(1, 1, 4), (1, 2, 2), (1, 4, 1), (2, 1, 2), (2, 2, 1)]
    # a cube looks the same from three sides
    assert [tuple(axes.values()) for axes in possible_meshes((1, 1, 8, 8, 8), None, 4)] == [(1, 1, 1, 4), (1, 1, 2, 2)]
    # no batch of 1 is cut, nor rows of which a rank would have one
    assert [tuple(axes.values()) for axes in possible_meshes((1, 1, 7, 100), None, 8)] == [(1, 1, 8), (1, 2, 4)]
    # tokens have no space: the batch alone is cut
    assert list(possible_meshes((4, 7), None, 2)) == [{"data": 2}]
    with pytest.raises(ShardingError, match=r"3 dims is cut along its batch alone, .* 1 samples, no multiple of"):
        list(possible_meshes((1, 2, 3), None, 2))


def test_meshes_cut_what_a_spec_names():
    cells = (("replicate", "data"), None, "cell")
    assert list(possible_meshes((2, 4, 3072), cells, 4)) == [{"data": 1, "cell": 4}, {"data": 2, "cell": 2}]
    assert list(possible_meshes((3072, 4), ("cell", None), 4)) == [{"data": 1, "cell": 4}]
    assert list(possible_meshes((1, 4, 10), ("data", None, "cell"), 4, {2: 5})) == []  # two pieces of five cells
    assert space_dims((1, 2, 8, 9), ("data", "channel", ("lat", "z"), None)) == {"lat": 2, "z": 2}
    with pytest.raises(ShardingError, match=r"must say of each dim of x_shape=\(2, 4, 3072\)"):
        list(possible_meshes((2, 4, 3072), ("data", "cell"), 4))


class _CellNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.from_numpy(jigsaw.Neighbors.healpix(4).rows_of(np.arange(192))))
        self.mix = nn.Conv1d(3, 3, 1)

    def forward(self, x):
        return self.mix(x) + x[..., self.table].mean(-1)


def test_a_net_on_cells_gets_advice(capsys, monkeypatch):
    options = advise_mesh(_CellNet(), (1, 3, 192), 2, spec=("data", None, "cell"), device="a100")
    by_cells = next(o for o in options if o.mesh.get("cell") == 2)
    assert by_cells.works
    row_bytes = 3 * 4
    assert 0 < by_cells.report.ranks[0].phases["forward"].sent_bytes < 96 * row_bytes  # of the border alone
    monkeypatch.setitem(sys.modules, "nets_on_cells", sys.modules[__name__])
    asked = ["advise", "nets_on_cells:_CellNet", "--input", "1,3,192", "--devices", "1", "--device", "cpu"]
    assert main([*asked, "--axes", "cell=-1"]) == 0
    assert "1. one rank: " in capsys.readouterr().out
    assert main([*asked, "--axes", "cell=3"]) == 1
    assert "--axes cell=3: the input has the dims -3 to 2" in capsys.readouterr().err


class _WideMlp(nn.Module):
    """Weights of 32 MiB, with gradients and the optimizer's state four times that; hardly any activations."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2048, 2048, bias=False) for _ in range(2)])

    def forward(self, x):
        x = x.movedim(1, -1)
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.slow
def test_what_does_not_fit_is_no_advice_but_said():
    how = _WideMlp, (1, 2048, 4, 6), 2
    roomy = advise_mesh(*how, device="a100")
    assert all(option.works for option in roomy)
    plain = [option for option in roomy if "channel" not in option.mesh]
    peaks = {cut: [o.report.peak_bytes for o in plain if o.shard_weights is cut] for cut in (False, True)}
    assert max(peaks[True]) < min(peaks[False])
    between = (max(peaks[True]) + min(peaks[False])) / 2 / 0.9
    found = advise_mesh(*how, device=replace(DEVICES["a100"], memory_bytes=between))
    working = [option for option in found if option.works]
    assert all(option.shard_weights or "channel" in option.mesh for option in working)
    assert [o.report.seconds for o in working] == sorted(o.report.seconds for o in working)
    text = advice_text(found)
    assert text.startswith(f"1. {working[0]}")
    fastest = min(found, key=lambda option: option.report.seconds)
    is_told = re.search(r"next better: .*whole weights.* it would need .* more memory a device", text) is not None
    assert is_told == (not fastest.works)
    nowhere = advice_text(advise_mesh(*how, device=replace(DEVICES["a100"], memory_bytes=1e6)))
    assert nowhere.startswith("none of the meshes works:\nnext better: ")


def test_the_model_runs_on_one_device_first_and_progress_is_told():
    tried = []
    found = advise_mesh(lambda: nn.Conv2d(3, 4, 3, padding=1), (2, 3, 8, 16), 2, progress=tried.append)
    assert str(tried[0]) == "one rank: whole weights"
    assert {id(option) for option in found} <= {id(option) for option in tried}
    tried.clear()
    with pytest.raises(ShardingError, match=r"on one device with an input of shape \(2, 5, 8, 16\).*takes 3 channels"):
        advise_mesh(nn.Conv2d(3, 4, 3, padding=1), (2, 5, 8, 16), 2, progress=tried.append)
    assert len(tried) == 1


def test_a_file_of_others_is_not_replaced_by_a_calibration(tmp_path, capsys):
    path = tmp_path / "mine.json"
    path.write_text('{"a": 1}')
    assert main(["advise", "--calibrate", str(path)]) == 1
    assert "was not written by save_device" in capsys.readouterr().err
    assert path.read_text() == '{"a": 1}'


class _Timed(nn.Module):
    """A row of blocks that take an image, a condition and a time."""

    def __init__(self):
        super().__init__()
        self.stem, self.condition, self.time = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(1, 8, 1), nn.Linear(1, 8)
        self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(4))

    def forward(self, x, condition, time):
        x = self.stem(x) + self.condition(condition) + self.time(time)[..., None, None]
        for block in self.blocks:
            x = x + block(x)
        return x


def test_several_inputs():
    shapes, image = [(4, 3, 16, 16), (4, 1, 16, 16), (4, 1)], ("data", None, "lat", "lon")
    found = advise_mesh(_Timed, shapes, 2, spec=[image, image, ("data", None)])
    assert all(option.works for option in found) and {"data": 2, "lat": 1, "lon": 1} in [o.mesh for o in found]
    assert any("pipe" in option.mesh for option in found)
    assert {str(o) for o in advise_mesh(_Timed, shapes, 2)} == {str(o) for o in found}
    two, alike = [(4, 3, 16, 16), (4, 3, 16, 16)], ("data", None, "lat", None)
    meshes = [dict(o.mesh) for o in advise_mesh(_Sum, two, 2, spec=alike)]
    assert {"data": 1, "lat": 2} in meshes and all("lon" not in axes for axes in meshes)
    with pytest.raises(ShardingError, match="must be the global shape of the input"):
        advise_mesh(_Sum, [(4, 3, 16, 16), 4], 2)


class _Sum(nn.Conv2d):
    def __init__(self):
        super().__init__(3, 4, 3, padding=1)

    def forward(self, x, y):
        return super().forward(x + y)


@pytest.mark.parametrize("devices", [1, 2])
def test_no_option_is_listed_twice(devices):
    found = advise_mesh(nn.Conv2d(3, 4, 3, padding=1), (2, 3, 8, 16), devices)
    assert len({str(option) for option in found}) == len(found)
    assert not any(option.checkpoint for option in found)  # there are no blocks to compute twice


@pytest.mark.slow
def test_the_command_prints_the_best(capsys, monkeypatch, tmp_path):
    (tmp_path / "nets_of_a_user.py").write_text("from small_nets import SmallUNet as Net\n")
    monkeypatch.syspath_prepend(tmp_path)
    size = ",".join(map(str, SHAPE))
    asked = ["--input", size, "--devices", "2", "--device", "cpu", "--align", "2"]
    assert main(["advise", "nets_of_a_user:Net", *asked]) == 0
    printed = capsys.readouterr().out
    assert re.match(r"1\. (lat|lon|channel)=2: ", printed)
    assert "a step; bound by" in printed
    assert len(re.findall(r"^\d\. ", printed, re.MULTILINE)) == 5
    assert main(["advise", "nets_of_a_user:Nut", *asked]) == 1
    assert "names no model" in capsys.readouterr().err
    assert main(["advise", "nets_of_a_user:Net", "--input", size, "--device", "abacus"]) == 1
    assert "--device abacus is none of a100" in capsys.readouterr().err
    (tmp_path / "no.json").write_text("[")
    assert main(["advise", "nets_of_a_user:Net", "--input", size, "--device", str(tmp_path / "no.json")]) == 1
    assert "no.json was not written by save_device" in capsys.readouterr().err
    assert main(["advise", "nets_of_a_user:Net", "--input", size, "--devices", "0"]) == 1
    assert "devices=0 must be a whole number, 1 or more" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["advise", "nets_of_a_user:Net", "--input", "1,x"])
    assert "'1,x' is not a shape; write numbers" in capsys.readouterr().err
    assert main(["advise"]) == 1
    assert "needs MODULE:MODEL and --input" in capsys.readouterr().err


class _Blocks(nn.Module):
    """A row of blocks that are alike, between two layers that are not."""

    def __init__(self, blocks=6, width=8):
        super().__init__()
        self.first = nn.Conv2d(3, width, 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, 2 * width, 1), nn.GELU(), nn.Conv2d(2 * width, width, 1))
            for _ in range(blocks)
        )
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


def test_a_few_blocks_tell_of_all():
    found = [jigsaw.dry_run(_Blocks(), SHAPE, {"lat": 2}, ranks=[0], blocks=n) for n in (1, 2, None)]
    assert [report.blocks for report in found] == [6, 6, 6]
    one, two, all_of_them = [report.flop for report in found]
    assert one + 5 * (two - one) == all_of_them
    assert jigsaw.dry_run(nn.Conv2d(3, 3, 1), SHAPE, {"lat": 2}, ranks=[0], blocks=1).blocks == 0


def test_a_pipeline_waits_as_the_formula_says():
    how = {"ranks": [0], "device": replace(DEVICES["a100"], node_seconds=0)}
    one = jigsaw.dry_run(_Blocks(), SHAPE, {"pipe": 3, "lat": 2}, **how)
    shares, border = [StageShare(1 / 3, 1 / 3, 1 / 3)] * 3, (DEVICES["a100"], 8)
    report = pipelined_report(one, shares, [[]] * 3, 4, *border)
    assert [(r.rank, r.coordinate) for r in report.ranks] == [(0, (0, 0)), (2, (1, 0)), (4, (2, 0))]
    whole, staged = (r.ranks[0].phases for r in (one, report))
    once = whole["sums"].seconds / 3 + whole["shared"].seconds
    for name in ("forward", "backward"):
        seconds = staged[name].seconds - (once if name == "backward" else 0)
        assert seconds == pytest.approx(whole[name].seconds * (4 + 3 - 1) / 3)
        assert staged[name].seconds_by_bound["bubble"] / seconds == pytest.approx(2 / 6)
        # three microbatches are under way in the first stage, each with a third of the net
        assert staged[name].peak["activations"] == whole[name].peak["activations"]
        assert staged[name].peak["weights"] == round(whole[name].peak["weights"] / 3)
    assert staged["forward"].flop == round(whole["forward"].flop * 4 / 3)
    assert staged["step"].seconds == pytest.approx(whole["step"].seconds / 3)
    assert sum(report.seconds_by_bound.values()) == pytest.approx(report.seconds)
    # all wait for the slowest stage
    uneven = [StageShare(n / 6, n / 6, n / 6) for n in (1, 3, 2)]
    waiting = [r.phases["forward"] for r in pipelined_report(one, uneven, [[]] * 3, 4, *border).ranks]
    assert [phase.seconds for phase in waiting] == pytest.approx([whole["forward"].seconds * 6 / 2] * 3)
    assert [phase.peak["activations"] / whole["forward"].peak["activations"] for phase in waiting] == pytest.approx(
        [3 / 6, 6 / 6, 2 / 6], abs=1e-3
    )


@pytest.mark.slow
@pytest.mark.nightly
def test_weights_of_stages_are_cut_within_nodes():
    search = _MeshSearch(_Blocks(width=32), ((8, 3, 8, 8),), replace(DEVICES["a100"], ranks_per_node=2), None, {})
    plain = search.attempt({"pipe": 2, "data": 4, "lat": 1, "lon": 1}, microbatches=2)
    found = {(o.shard_weights, o.checkpoint, o.replicate): o for o in search.tried_ways([plain], 2)}
    assert all(option.works for option in found.values())
    hybrid, cut = found[True, False, ("replicate",)], found[True, False, ()]
    assert hybrid.mesh == {"pipe": 2, "replicate": 2, "data": 2, "lat": 1, "lon": 1}
    assert "replicate='replicate'" in str(hybrid)
    assert [r.rank for r in hybrid.report.ranks] == [3, 7]
    sent = [sum((phase.links.get("network", Traffic()) for phase in o.report.ranks[1].phases.values()), Traffic())
            for o in (hybrid, cut)]  # fmt: skip
    assert sent[0].messages < sent[1].messages
    # a sum of what each rank keeps, in place of gathers of weights and of their gradients in parts
    # (of both stages: in which of them a block is may differ)
    kinds = [
        sum(rank.phases["forward"].traffic["gathered weights"].sent_bytes for rank in o.report.ranks)
        for o in (hybrid, cut)
    ]
    assert kinds[0] / kinds[1] == pytest.approx((1 / 2) / (3 / 4), rel=0.02)


@pytest.mark.slow
@pytest.mark.nightly
def test_weights_and_stages_are_cut_as_well():
    found = advise_mesh(_Blocks(), (4, 3, 8, 8), 4, device="a100")
    meshes = [{name: size for name, size in o.mesh.items() if size > 1} for o in found if o.works]
    assert {"lon": 2, "channel": 2} in meshes or {"lat": 2, "channel": 2} in meshes
    pipes = [option for option in found if "pipe" in option.mesh]
    assert pipes
    assert all(option.works and option.microbatches == 4 for option in pipes if option.mesh["pipe"] == 4)
    assert "microbatches (1F1B)" in str(pipes[0])
    cut = next(o for o in found if o.mesh.get("channel") == 4 and not o.shard_weights)
    whole = next(o for o in found if "channel" not in o.mesh and "pipe" not in o.mesh and not o.shard_weights)
    assert cut.report.peak["weights"] < whole.report.peak["weights"]


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_every_kernel_can_be_timed(name):
    make, shape, align = NETS[name]
    rest = mean_square_of_tiles, torch.optim.AdamW, False, "none"
    plan = StepPlan(make, (shape,), small_nets.SPEC, None, "balanced", {2: align, 3: align}, *rest)
    played = play_rank(plan, {"lat": 2, "lon": 1}, 0)
    for phase in played.phases.values():
        for cost in phase.kernels:
            seconds = timed_kernel(cost.call)
            assert seconds is not None, cost.call
            assert seconds > 0


def test_seconds_of_a_measured_processor():
    measured = {"message": (1e-3, 1e-9), "all_reduce": (2e-3, 2e-9)}
    crowding = {1: 1.0, 2: 3.0}
    device = replace(DEVICES["cpu"], host_seconds={"forward": 0.5}, call_seconds=measured, crowding=crowding)
    assert device.call_time("exchange", "node", 1000, 2) == pytest.approx(2e-3 + 1e-6)
    cheap = replace(device, call_seconds=measured | {"further message": (1e-4, 1e-9)})
    assert cheap.call_time("exchange", "node", 1000, 3) == pytest.approx(1e-3 + 2e-4 + 1e-6)
    assert device.call_time("all_reduce", "node", 1000, 6) == pytest.approx(2e-3 + 2e-6)
    assert device.call_time("all_reduce", "network", 1000, 2) == device.link_time("network", 1000, 2)
    how = {"optimizer": None, "ranks": [0]}
    forward = [
        jigsaw.dry_run(nn.Conv2d(3, 3, 1), (2, 3, 8, 8), {"data": ranks}, device=d, **how).ranks[0].phases["forward"]
        for ranks, d in (
            (1, replace(device, host_seconds={})),
            (1, device),
            (2, device),
            (2, replace(device, crowding={})),
            (2, replace(device, host_crowding={2: 2.0})),
        )
    ]
    alone, slow, crowded, quiet, slower_host = forward
    assert slow.seconds - alone.seconds == pytest.approx(0.5 * slow.kernels)
    added = 0.5 * crowded.kernels
    kernels = [sum(phase.seconds_by_bound.values()) - added for phase in (crowded, quiet)]
    assert kernels[0] == pytest.approx(3 * kernels[1])
    assert slower_host.seconds - crowded.seconds == pytest.approx(added + crowded.message_seconds)


def test_wrong_words_of_the_command_are_refused_by_name(tmp_path, capsys):
    path = tmp_path / "device.json"
    for content in ("{", "[]", '{"flop_per_second": {"float32": 1e9}}', '{"flop_per_second": {"nope": 1}}'):
        path.write_text(content)
        assert main(["advise", "torch.nn:Identity", "--input", "1,2,8,8", "--device", str(path)]) == 1
        assert f"ShardingError: {path} was not written by save_device" in capsys.readouterr().err
    for model in (":Net", ".nets:Net", "torch.nn:Nothing"):
        assert main(["advise", model, "--input", "1,2,8,8"]) == 1
        assert f"{model!r} names no model" in capsys.readouterr().err
    assert main(["advise", "--calibrate", str(tmp_path / "none" / "cpu.json")]) == 1
    assert f"the folder {tmp_path / 'none'} does not exist" in capsys.readouterr().err


@pytest.mark.slow
def test_calibration_measures_this_machine(tmp_path, capsys, monkeypatch):
    path = tmp_path / "cpu.json"
    monkeypatch.setattr("jigsaw.dryrun.advise_command.measure_device", partial(measure_device, rounds=1))
    assert main(["advise", "--calibrate", str(path)]) == 0
    device = load_device(path)
    assert device.name == "this machine"
    assert 1e8 < device.flop_per_second[torch.float64] < 1e13
    assert 1e8 < device.node_bandwidth < 1e12
    assert 1e-8 < device.kernel_seconds < 1e-2
    assert set(device.host_seconds) == {"forward", "backward", "step", "step of parts"}
    assert {"message", "all_reduce", "gathered weights", "gradients"} <= set(device.call_seconds)
    assert device.times_kernels
    assert set(device.crowding) == {1, 2, 4}
    assert set(device.host_crowding) == {2, 4}
    assert all(times >= 1 for of in (device.crowding, device.host_crowding) for times in of.values())
    save_device(device, path)
    assert load_device(path) == device


def test_the_reader_bounds_a_step(tmp_path):
    times = np.datetime64("2020-01-01", "ns") + np.arange(4) * np.timedelta64(6, "h")
    coords = {"time": times, "latitude": np.linspace(90, -90, 33), "longitude": np.arange(64) * 5.625}
    values = (("time", "latitude", "longitude"), np.zeros((4, 33, 64), "f4"))
    xr.Dataset({"2m_temperature": values}, coords).to_zarr(tmp_path / "globe.zarr", zarr_format=2)
    dataset = jigsaw.io.open(str(tmp_path / "globe.zarr"), mesh={"lat": 2}, fields=["t2m"], spec={"lat": "lat"})
    plan = dataset.plan(len(dataset) // 2)
    work = sum(plan.cost(name, mode) for name, mode in plan.modes.items())
    how = {"mesh": {"lat": 2}, "ranks": [0], "optimizer": None, "dataset": dataset}
    report = jigsaw.dry_run(nn.Conv2d(1, 1, 1), (8, 1, 33, 64), device="b200", **how)
    assert report.reader_seconds == pytest.approx(8 * work / (2 * DEVICES["b200"].reader_cores))
    many = replace(DEVICES["b200"], reader_cores=1e-6)
    waiting = jigsaw.dry_run(nn.Conv2d(1, 1, 1), (8, 1, 33, 64), device=many, **how)
    assert waiting.bound == "reader"
    assert waiting.seconds == waiting.reader_seconds > report.seconds
    (option, *_) = advise_mesh(nn.Conv2d(1, 1, 1), (1, 1, 33, 64), 1, store=str(tmp_path / "globe.zarr"))
    by_channel = advise_mesh(nn.Conv2d(1, 2, 1), (1, 1, 33, 64), 2, store=str(tmp_path / "globe.zarr"))
    assert any(option.works and option.mesh.get("channel") == 2 for option in by_channel)
    assert option.report.reader_seconds > 0


def test_the_page_runs(capsys):
    page = (Path(__file__).parents[2] / "docs" / "dry_run.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    exec(compile(block, "docs/dry_run.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "on lat=4 x lon=2, h100: one training step" in printed
    named = set(re.findall(r"`report\.(\w+)", page))
    assert all(hasattr(DryRunReport, name) or name in DryRunReport.__dataclass_fields__ for name in named)
    assert {f"`{name}`" for name in DEVICES} <= set(re.findall(r"`\w+`", page))


class _Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(2)])

    def forward(self, words):
        x = self.embedding(words)
        for block in self.blocks:
            x = block(x)
        return x


def test_tokens_get_advice_that_ends_with_lines_to_paste():
    options = advise_mesh(_Words, (8, 33), 2, dtype=torch.int64, device="a100")
    assert options[0].works
    pasted = advice_text(options).split(f"to have {options[0]}:\n")[1]
    assert [line.strip() for line in pasted.splitlines()] == list(options[0].lines_to_paste)
    cut = next(o for o in options if o.shard_weights and o.checkpoint and o.mesh["data"] == 2)
    assert cut.lines_to_paste == (
        "torchrun --nnodes=1 --nproc-per-node=2 train.py",
        "mesh = jigsaw.init_mesh(data=2)",
        "for block in blocks:  # the ModuleList, or the outermost Sequential",
        "    block.forward = partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False)",
        "model = jigsaw.parallelize(model, mesh, shard_weights=True)",
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"passes": "2"}, "passes='2' must be a whole number, 1 or more"),
        ({"passes": 1.5}, "passes=1.5 must be a whole number"),
        ({"ranks_per_node": "8"}, "ranks_per_node='8' must be a whole number"),
        ({"blocks": -1}, "blocks=-1 must be a whole number"),
        ({"replicate": 3}, "replicate=3 must be the name of an axis"),
        ({"spec": 5}, "spec=5 must be the axis of each dim"),
        ({"mp_policy": "x", "shard_weights": True}, "mp_policy='x' must be a torch.distributed.fsdp.MixedPrecision"),
        ({"tensor": "x"}, "tensor='x' must be words by patterns"),
        ({"tensor": {"0": None}}, "must be words by patterns"),
        ({"optimizer": lambda p: None}, "must make a torch.optim.Optimizer of parameters, and made None"),
    ],
)
def test_wrong_arguments_of_a_dry_run(options, said):
    with pytest.raises(ShardingError, match=re.escape(said)):
        dry_run(nn.Conv2d(3, 3, 3, padding=1), (1, 3, 16, 16), {"lat": 2}, **options)


@pytest.mark.parametrize(
    ("devices", "options", "said"),
    [
        ("2", {}, "devices='2' must be a whole number"),
        (None, {}, "devices=None must be a whole number"),
        (2, {"mesh": {"lat": 2}}, "does not take ['mesh'], as it tries them itself: ['mesh']; it takes"),
        (2, {"microbatches": 2}, "does not take ['microbatches']; it takes"),
        (2, {"ranks": (9,)}, "does not take ['ranks'], as it tries them itself"),
    ],
)
def test_wrong_arguments_of_a_search(devices, options, said):
    with pytest.raises(ShardingError, match=re.escape(said)):
        advise_mesh(nn.Conv2d(3, 3, 3, padding=1), (1, 3, 16, 16), devices, **options)


def test_a_net_without_blocks_is_not_offered_with_blocks_checkpointed():
    class Single(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 3, padding=1)

        def forward(self, x):
            return self.layer(x)

    tried = []
    options = advise_mesh(Single(), (2, 3, 16, 16), 2, device="a100", progress=tried.append)
    assert tried[0].mesh == {"data": 1, "lat": 1, "lon": 1}  # one device first
    assert not any(option.checkpoint for option in (*tried, *options))
    assert any(option.shard_weights for option in options)


def test_an_interrupted_search_ranks_what_it_has(monkeypatch, capsys, tmp_path):
    (tmp_path / "small_net_here.py").write_text("from torch import nn\nnet = nn.Conv2d(3, 3, 3, padding=1)\n")
    monkeypatch.chdir(tmp_path)
    attempts = []
    attempt = _MeshSearch.attempt

    def until_the_third(self, axes, *args, **more):
        attempts.append(axes)
        if len(attempts) > 2:
            raise KeyboardInterrupt
        return attempt(self, axes, *args, **more)

    monkeypatch.setattr(_MeshSearch, "attempt", until_the_third)
    assert main(["advise", "small_net_here:net", "--input", "2,3,16,16", "--devices", "2"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("1. ") and "\n2. " in said.out and "to have " in said.out
    assert "the fastest so far" in said.err and "interrupted" in said.err
