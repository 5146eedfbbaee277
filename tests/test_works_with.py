"""What people bring: their trainers, metrics, loggers and notebooks.  The code is that of docs/works_with.md."""

from __future__ import annotations

import contextlib
import importlib
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

import jigsaw
from jigsaw import ShardingError
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "works_with.md").read_text()
EPOCHS, STEPS = 3, 4


def blocks(heading):
    """The code that all sections share, then that of one."""
    head, *rest = re.split(r"^## (.*)\n", TEXT, flags=re.MULTILINE)
    sections = dict(zip(rest[::2], rest[1::2], strict=True)) | {"": ""}
    return [re.findall(r"^```python\n(.*?)^```", part, re.MULTILINE | re.DOTALL) for part in (head, sections[heading])]


def run_page(folder, heading, changes=()):
    """Run a section's blocks as torchrun would; the names that they leave, and the loss of every step."""
    shared, own = blocks(heading)
    left, losses = {"__name__": "works_with"}, []
    with as_torchrun(folder):
        for code in shared:
            exec(compile(code, "docs/works_with.md", "exec"), left)
        plain = left["loss_of"]

        def recorded(net, batch):
            loss = plain(net, batch)
            losses.append(loss.item())
            return loss

        left["loss_of"] = recorded
        for code in own:
            for before, after in changes:
                assert before in "".join(own)
                code = code.replace(before, after)
            exec(compile(code, "docs/works_with.md", "exec"), left)
    return left, losses


@contextlib.contextmanager
def as_torchrun(folder):
    """In a folder of data, with the variables that a rank of the tests' world lacks; its process group is there."""
    more = {"TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        for name, value in more.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def globe(tmp_path_factory):
    """A folder with a globe of 33 x 64 points and 8 steps: 7 samples, 4 batches of two."""
    path, r = tmp_path_factory.mktemp("works"), np.random.default_rng(0)
    dims, coords = (
        ("time", "latitude", "longitude"),
        {
            "time": np.datetime64("2020-01-01", "ns") + np.arange(8) * np.timedelta64(6, "h"),
            "latitude": np.linspace(90, -90, 33),
            "longitude": np.arange(64) * 5.625,
        },
    )
    names = {"2m_temperature": (280, 10), "10m_u_component_of_wind": (0, 5)}
    made = {n: (dims, r.normal(*how, (8, 33, 64)).astype("f4")) for n, how in names.items()}
    xr.Dataset(made, coords).to_zarr(
        path / "globe.zarr", zarr_format=2, encoding={n: {"chunks": (1, 33, 64)} for n in names}
    )
    return path


@cache
def plain_losses(folder):
    """The loss of each step of a plain loop in plain torch, on whole tensors."""
    left, _ = run_page(folder, "")
    net, losses = left["Net"](), []
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    with contextlib.chdir(folder):
        loader = left["batches"](world_mesh(lat=1))
    for batch in (batch for _ in range(EPOCHS) for batch in loader):
        given, target = (x.full_tensor()[:, 0] for x in (batch.input, batch.target))
        loss = torch.nn.functional.mse_loss(net(given), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    loader.close()
    assert len(losses) == EPOCHS * STEPS and losses[-1] < 0.99 * losses[0]
    return losses


# -- trainers ---------------------------------------------------------------------------------------------------------


def losses_on(ranks, globe, folder, heading, changes=()):
    """What each rank's blocks of a section lost, step by step, in a folder of their own."""
    folder.mkdir(exist_ok=True)
    (folder / "globe.zarr").symlink_to(globe / "globe.zarr")
    return run_on_ranks(ranks, _losses, folder, heading, changes, timeout=120)


def _losses(folder, heading, changes):
    return run_page(folder, heading, changes)[1]


@pytest.mark.slow
def test_lightning_trains_as_the_plain_loop(globe, tmp_path):
    """Whole weights, then cut ones; a checkpoint of two ranks goes on on one, and of one on two."""
    pytest.importorskip("lightning", reason="a package of dev that is not installed")
    plain = plain_losses(globe)
    for ranks in (1, 2):
        for losses in losses_on(ranks, globe, tmp_path / str(ranks), "Lightning"):
            np.testing.assert_allclose(losses, plain[: 2 * STEPS] * 2, rtol=2e-5)
    # on one rank no weight is cut, and ModelParallelStrategy loads into no model without cut weights
    for saved, ranks, kinds in ((1, 2, ["Forecast", "CutForecast"]), (2, 1, ["Forecast"])):
        changes = [("max_epochs=2", "max_epochs=3")]
        for kind, kept in (("Forecast", "lightning"), ("CutForecast", "cut")):
            (path,) = (tmp_path / str(saved) / kept).rglob("*.ckpt")
            goes_on = f"trainer.fit({kind}(), ckpt_path={str(path)!r})" if kind in kinds else ""
            changes.append((f"trainer.fit({kind}())", goes_on))
        for losses in losses_on(ranks, globe, tmp_path / f"{saved} to {ranks}", "Lightning", changes):
            np.testing.assert_allclose(losses, plain[2 * STEPS :] * len(kinds), rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("trainer", ["Fabric", "Accelerate"])
def test_fabric_and_accelerate_train_as_the_plain_loop(globe, tmp_path, trainer):
    package = "lightning" if trainer == "Fabric" else "accelerate"
    pytest.importorskip(package, reason="a package of dev that is not installed")
    for ranks in (1, 2):
        for losses in losses_on(ranks, globe, tmp_path / str(ranks), trainer):
            np.testing.assert_allclose(losses, plain_losses(globe)[: 2 * STEPS], rtol=2e-5)


# -- metrics and transforms -------------------------------------------------------------------------------------------

FIELDS = {"regression": "MeanSquaredError MeanAbsoluteError MeanAbsolutePercentageError"}
FLAT = {"regression": "R2Score PearsonCorrCoef SpearmanCorrCoef ExplainedVariance ConcordanceCorrCoef LogCoshError"}
CLASSES = {"classification": "MulticlassAccuracy MulticlassF1Score MulticlassJaccardIndex MulticlassConfusionMatrix"}
YES_NO = {"classification": "BinaryF1Score BinaryStatScores BinaryAUROC BinaryAveragePrecision BinaryCalibrationError"}
MASKS = {"segmentation": "DiceScore GeneralizedDiceScore MeanIoU"}
IMAGES = {"image": "StructuralSimilarityIndexMeasure PeakSignalNoiseRatio UniversalImageQualityIndex"}
ONE = {"aggregation": "MeanMetric SumMetric MaxMetric CatMetric"}
REFUSED_METRICS = {"BinaryCalibrationError"}


def cut(x, mesh, dim=-2):
    (axis,) = mesh.mesh_dim_names
    return jigsaw.shard(x, mesh, tuple(axis if d == x.ndim + dim else None for d in range(x.ndim)))


def assert_whole(found, want):
    """What a function of a tile gave is what it gave for the whole tensor."""
    if isinstance(want, (list, tuple)):
        for one, other in zip(found, want, strict=True):
            assert_whole(one, other)
    else:
        found = found.full_tensor() if isinstance(found, jigsaw.Tile) else found
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-6, equal_nan=True)


def _metric_cases():
    r = torch.Generator().manual_seed(0)
    two = torch.randn(2, 2, 3, 13, 10, generator=r)
    classes = torch.randint(4, (2, 2, 13, 10), generator=r)
    scores = torch.rand(2, 4, 13, 10, generator=r).softmax(1)
    masks = torch.nn.functional.one_hot(classes, 4).movedim(-1, 2)
    chance, images = torch.rand(2, 13, 10, generator=r), torch.rand(2, 2, 3, 33, 20, generator=r)
    yield FIELDS, {}, tuple(two), None
    yield FLAT, {}, tuple(two), torch.Tensor.flatten
    yield CLASSES, {"num_classes": 4}, (scores, classes[0]), None
    yield YES_NO, {}, (chance, classes[0] % 2), None
    yield MASKS, {"num_classes": 4}, tuple(masks), None
    yield IMAGES, {"data_range": 1.0}, tuple(images), None
    yield ONE, {}, (two[0],), None


@pytest.mark.slow
@on_ranks(2)
def test_torchmetrics_of_tiles():
    """Each metric, updated twice, is that of the whole tensors; what it cannot do on tiles is a typed error."""
    torchmetrics = pytest.importorskip("torchmetrics", reason="a package of dev that is not installed")
    mesh, refused, tried = world_mesh(lat=2), set(), 0
    for kinds, options, whole, before in _metric_cases():
        ((room, names),) = kinds.items()
        room = importlib.import_module(f"torchmetrics.{room}")
        for name in names.split():
            how = options if name != "UniversalImageQualityIndex" else {}
            plain, metric = (getattr(room, name)(sync_on_compute=False, **how) for _ in "ab")
            tried += 1
            try:
                for times in (1, 2):
                    parts = [x * times if x.is_floating_point() else x for x in whole]
                    parts = [x.clamp(max=1) if name in YES_NO["classification"] else x for x in parts]
                    plain.update(*[before(x) if before else x for x in parts])
                    metric.update(*[before(cut(x, mesh)) if before else cut(x, mesh) for x in parts])
                want = plain.compute()
                assert_whole(metric.compute(), want)
            except ShardingError:
                refused.add(name)
    assert tried > 20 and refused == REFUSED_METRICS
    added = torchmetrics.SumMetric()
    added.update(cut(torch.ones(4, 10), mesh))
    assert added.compute() == 80  # as the page says of sync_on_compute


RUN_AS_THEY_ARE = {
    "Flip": (0,), "Rotate90": (1, (0, 1)), "NormalizeIntensity": (), "ScaleIntensity": (), "AdjustContrast": (2.0,),
    "ScaleIntensityRange": (0, 1, -1, 1, True), "ScaleIntensityRangePercentiles": (5, 95, 0, 1), "Zoom": (0.7,),
    "StdShiftIntensity": (0.1,), "SpatialPad": ((16, 16, 16),), "DivisiblePad": (8,), "CenterSpatialCrop": ((6, 5, 4),),
    "CropForeground": (lambda x: x > 0.5,), "Resize": ((8, 9, 7),), "GaussianSmooth": (1.0,),
    "MedianSmooth": (1,), "SobelGradients": (), "AsDiscrete": (True, 2), "Activations": (True,), "LabelToContour": (),
    "RandFlip": (1.0, 0), "RandGaussianNoise": (1.0,), "RandAffine": (1.0, (0.2, 0, 0)),
    "RandSpatialCrop": ((6, 6, 6), None, True, False), "RandZoom": (1.0,), "GibbsNoise": (0.5,), "EnsureType": (),
}  # fmt: skip
REFUSED_TRANSFORMS = {"ThresholdIntensity": (0.5,), "HistogramNormalize": (), "FillHoles": ()}


@pytest.mark.slow
@on_ranks(2)
def test_monai_of_tiles():
    """Transforms and metrics of a volume cut along z are those of the whole one, or a typed error."""
    transforms, data = pytest.importorskip("monai.transforms"), pytest.importorskip("monai.data")
    metrics = pytest.importorskip("monai.metrics")
    mesh, x = world_mesh(z=2), torch.rand(2, 13, 12, 10, generator=torch.Generator().manual_seed(0))
    data.set_track_meta(False)
    try:
        for name, arguments in RUN_AS_THEY_ARE.items():
            made = [getattr(transforms, name)(*arguments) for _ in range(2)]
            found = []
            for one, given in zip(made, (cut(x, mesh, -3), x.clone()), strict=True):
                torch.manual_seed(0)
                if isinstance(one, transforms.Randomizable):
                    one.set_random_state(0)
                found.append(one(given))
            assert isinstance(found[0], jigsaw.Tile), name
            assert_whole(*found)
        for name, arguments in REFUSED_TRANSFORMS.items():
            with pytest.raises(ShardingError, match="full_tensor"):
                getattr(transforms, name)(*arguments)(cut(x, mesh, -3))
        data.set_track_meta(True)
        with pytest.raises(ShardingError, match="as_subclass"):
            transforms.Flip(0)(cut(x, mesh, -3))
    finally:
        data.set_track_meta(True)
    masks = [torch.nn.functional.one_hot((n * x[:, None]).long() % 3, 3).movedim(-1, 1)[:, :, 0] for n in (3, 5)]
    images = [x[:, None], x[:, None].square()]
    for name, options, pair in [
        ("DiceMetric", {"include_background": False}, masks), ("MeanIoU", {}, masks), ("MSEMetric", {}, images),
        ("GeneralizedDiceScore", {}, masks), ("ConfusionMatrixMetric", {}, masks),
        ("PSNRMetric", {"max_val": 1}, images), ("SSIMMetric", {"spatial_dims": 3, "win_size": 5}, images),
    ]:  # fmt: skip
        of_tiles, of_whole = (getattr(metrics, name)(**options) for _ in range(2))
        assert_whole(of_tiles(*[cut(m, mesh, -3) for m in pair]), of_whole(*pair))
        assert_whole(of_tiles.aggregate(), of_whole.aggregate())
    with pytest.raises(ShardingError, match="full_tensor"):
        metrics.HausdorffDistanceMetric()(*[cut(m, mesh, -3) for m in masks])


# -- what shows a run -------------------------------------------------------------------------------------------------


def _shown(folder, heading):
    left, _ = run_page(folder, heading)
    return left.get("number")


@pytest.mark.slow
def test_tensorboard_shows_what_tiles_are(globe):
    pytest.importorskip("tensorboard", reason="a package of dev that is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (mean, *others) = run_on_ranks(2, _shown, globe, "TensorBoard and wandb")
    assert others == [mean]
    board = EventAccumulator(str(globe / "board"))
    board.Reload()
    (number,), (picture,) = board.Scalars("mean"), board.Images("t2m")
    assert number.value == pytest.approx(mean, rel=1e-6)
    assert (picture.height, picture.width) == (33, 64)


@pytest.mark.slow
def test_the_profiler_names_modules_and_messages(globe):
    run_on_ranks(2, _shown, globe, "Profiler")
    for rank in (0, 1):
        events = json.loads((globe / f"trace-{rank}.json").read_text())["traceEvents"]
        names = {str(event.get("name")) for event in events}
        assert {"nn.Module: Net_0", "nn.Module: Conv2d_0", "nn.Module: Conv2d_1", "nn.Module: GELU_0"} <= names
        assert any(name.startswith("gloo:") for name in names)


@on_ranks(2)
def test_torchinfo_counts_the_whole():
    torchinfo = pytest.importorskip("torchinfo", reason="a package of dev that is not installed")
    nets = [torch.nn.Sequential(torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.GELU()) for _ in range(2)]
    jigsaw.parallelize(nets[0], world_mesh(lat=2))
    one, plain = (torchinfo.summary(net, input_size=(1, 2, 13, 10), verbose=0) for net in nets)
    assert str(one) == str(plain) and one.total_mult_adds > 0
    with pytest.raises(ShardingError, match="untyped_storage on a Tile"):
        torchinfo.summary(nets[0], input_data=cut(torch.ones(1, 2, 13, 10), world_mesh(lat=2)), verbose=0)


AVERAGES = {
    "lat": {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)},
    "channel": {"avg_fn": torch.optim.swa_utils.get_ema_avg_fn(0.9)},  # one weight at a time, because kinds are mixed
}


@pytest.mark.parametrize("axis", AVERAGES)
@on_ranks(2)
def test_averaged_models_and_schedules(axis):
    """An exponential average, and a one-cycle schedule: the weights of every step are those of one process."""
    mesh, x = world_mesh(**{axis: 2}), torch.randn(2, 2, 13, 10)
    spec = (None, None, "lat" if axis == "lat" else None, None)
    found = []
    for parallel in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Sequential(
            torch.nn.Conv2d(2, 4, 3, padding=1), torch.nn.BatchNorm2d(4), torch.nn.Conv2d(4, 1, 1)
        )
        net = jigsaw.parallelize(net, mesh) if parallel else net
        average = torch.optim.swa_utils.AveragedModel(net, **AVERAGES[axis])
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5)
        given, rates = jigsaw.shard(x, mesh, spec) if parallel else x, []
        for _ in range(4):
            optimizer.zero_grad()
            net(given).square().mean().backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(net)
            rates.append(schedule.get_last_lr())
        torch.optim.swa_utils.update_bn([given], average)
        with torch.no_grad():
            weights = [p.detach() for p in (*average.parameters(), *average.buffers())]
            weights = [p.full_tensor() if isinstance(p, DTensor) else p for p in weights]
            found.append((weights, rates, average(given)))
    (parts, rates, shown), (want, want_rates, want_shown) = found
    assert rates == want_rates
    torch.testing.assert_close(parts, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(shown.full_tensor(), want_shown, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@on_ranks(3)
def test_the_optimizer_of_zero_1_holds_its_part():
    """torch's `ZeroRedundancyOptimizer`: weights are whole on each rank, moments of an optimizer on one."""
    torch.set_default_dtype(torch.float64)
    mesh, (x, y) = world_mesh(lat=3), torch.randn(2, 2, 3, 13, 10)
    nets, states = [], []
    for parallel in (True, False):
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Conv2d(3, 6, 3, padding=1), torch.nn.GELU(), torch.nn.Conv2d(6, 3, 1))
        net = jigsaw.parallelize(net, mesh) if parallel else net
        if parallel:
            optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-2)
        else:
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        pair = [cut(z, mesh) if parallel else z for z in (x, y)]
        for _ in range(4):
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(pair[0]), pair[1]).backward()
            optimizer.step()
        nets.append(net)
        own = optimizer.optim if parallel else optimizer
        states.append(sum(v.numel() for state in own.state.values() for v in state.values()))
    torch.testing.assert_close(*(list(net.parameters()) for net in nets), rtol=1e-12, atol=1e-13)
    assert states[0] < states[1]
    held = [None] * 3
    torch.distributed.all_gather_object(held, states[0])
    assert sum(held) == states[1]


# -- data -------------------------------------------------------------------------------------------------------------


def _windows(folder):
    left, _ = run_page(folder, "torch's DataLoader and xbatcher")
    return left["tile"].full_tensor().numpy(), tuple(left["tile"].local.shape)


@pytest.mark.slow
def test_xbatcher_batches_become_tiles(globe):
    pytest.importorskip("xbatcher", reason="a package of dev that is not installed")
    want = xr.open_zarr(globe / "globe.zarr")["2m_temperature"].values[None, 6:]
    for (found, shape), rows in zip(run_on_ranks(2, _windows, globe), (17, 16), strict=True):
        np.testing.assert_array_equal(found, want)
        assert shape == (1, 2, rows, 64)


@pytest.mark.slow
def test_a_dask_cluster_is_read(globe):
    distributed = pytest.importorskip("distributed", reason="a package of dev that is not installed")
    here = {"n_workers": 1, "threads_per_worker": 1, "processes": False, "dashboard_address": None}
    with distributed.LocalCluster(**here) as cluster, distributed.Client(cluster):
        lazy = xr.open_zarr(globe / "globe.zarr").chunk(time=2) + 1
        data = jigsaw.io.open(lazy, mesh=world_mesh(lat=1), fields=["t2m"], targets=[1])
        found = [batch.target.local for batch in jigsaw.io.DataLoader(data, batch_size=4)]
    want = xr.open_zarr(globe / "globe.zarr")["2m_temperature"].values[1:, None, None] + 1
    np.testing.assert_allclose(torch.cat(found).numpy(), want, rtol=1e-6)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, monkeypatch):
    """On one rank in the kernel, then on two by torchrun, with the loss of plain torch."""
    nbclient = pytest.importorskip("nbclient", reason="a package of dev that is not installed")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    notebook = nbformat.read(ROOT / "examples" / "notebook" / "tiles.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    nbclient.NotebookClient(notebook, timeout=120, resources={"metadata": {"path": tmp_path}}).execute()
    told = ["".join(o.get("text", "") for o in cell.get("outputs", ())) for cell in notebook.cells]
    first, last = map(float, re.search(r"loss (\S+), then (\S+)", "".join(told)).groups())
    assert last < 0.1 * first
    torch.manual_seed(0)
    layer = torch.nn.Conv2d(1, 1, 3, padding=1)
    wave = torch.from_numpy(xr.open_zarr(tmp_path / "wave.zarr").wave.values)[:, None]
    made = layer(wave[:4])
    loss = torch.nn.functional.mse_loss(made, wave[1:5]).item()
    for rank, rows in enumerate((17, 16)):
        assert f"rank {rank} has (4, 1, 1, {rows}, 64) of (4, 1, 1, 33, 64), loss {loss:.3f}" in told[-1], told[-1]


# -- the page ---------------------------------------------------------------------------------------------------------


def test_the_page_names_tests_that_there_are():
    named = [re.findall(r"`((?:test_|tests/)\w[^`]*)`", row) for row in TEXT.splitlines() if row.startswith("| ")][1:]
    named = [name for row in named for name in row]
    assert len(named) > 14
    assert not [name for name in named if not ((ROOT / name).is_file() if "/" in name else name in globals())]


@pytest.mark.slow
def test_code_of_the_pages_has_types(tmp_path):
    """README's blocks, this page's and expressions of tiles, as a user's editor checks them."""
    readme = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    page = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    more = """
    weights = torch.ones(33, 1)
    error = ((model(now) - later).square() * weights).mean() + 0.1 * now.abs().sum()
    rows: torch.Tensor = torch.cat([-now, 2 * later[:, :1] / 3], dim=1) > 0
    moved = batch.to("cuda", non_blocking=True).target.redistribute((None,) * 5).full_tensor().numpy()
    batch.inptu
"""
    (tmp_path / "page.py").write_text("\n".join(page))
    for number, code in enumerate([*readme, readme[1] + more]):
        (tmp_path / f"readme{number}.py").write_text(code)
    # packages of other environments, whose blocks tests/zoo/test_weather_tools.py runs
    settings = {"extraPaths": [str(ROOT)], "pythonVersion": "3.11", "reportMissingImports": "none"}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "-p", "."]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert "\n1 error," in checked.stdout and 'attribute "inptu"' in checked.stdout, checked.stdout + checked.stderr
