"""Trainers and forecast tools of weather: the blocks of docs/works_with.md, on ranks as in one process."""

from __future__ import annotations

import contextlib
import datetime
import inspect
from importlib.util import find_spec

import numpy as np
import pytest
import torch

if find_spec("xarray") is None or find_spec("zarr") is None:
    pytest.skip("xarray and zarr are not installed: make zoo, make test-weather-tools", allow_module_level=True)

import xarray as xr
from nets_graphs import NODES, save_anemoi_checkpoint
from test_works_with import run_page
from zoo_net import define_missing_operators

from jigsaw.testing import run_on_ranks, world_mesh

define_missing_operators()
pytestmark = [pytest.mark.zoo, pytest.mark.timeout(900)]
RANKS = (1, 2)
SECONDS = 300.0  # these packages take long to import


def has_module(name):
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the package around it
        return False


def needs(*modules):
    absent = [name for name in modules if not has_module(name)]
    return pytest.mark.skipif(bool(absent), reason=f"{absent} not installed: make zoo, make test-weather-tools")


def write_globe(folder, rows):
    """Eight steps of two fields, as the page's loader reads them."""
    folder.mkdir(exist_ok=True)
    draw, dims = np.random.default_rng(0), ("time", "latitude", "longitude")
    fields = {"2m_temperature": (280, 10), "10m_u_component_of_wind": (0, 5)}
    coords = {
        "time": np.datetime64("2020-01-01", "ns") + np.arange(8) * np.timedelta64(6, "h"),
        "latitude": np.linspace(90, -90, rows),
        "longitude": np.arange(64) * 5.625,
    }
    values = {name: (dims, draw.normal(*spread, (8, rows, 64)).astype("f4")) for name, spread in fields.items()}
    xr.Dataset(values, coords).to_zarr(folder / "globe.zarr", zarr_format=2)
    return folder


def whole_batches(page, folder):
    """The batches of the page as plain tensors [batch, channel, lat, lon], epoch after epoch."""
    with contextlib.chdir(folder):
        loader = page["batches"](world_mesh(lat=1))
    while True:
        for batch in loader:
            yield batch.input.full_tensor()[:, 0], batch.target.full_tensor()[:, 0]


# -- CREDIT -----------------------------------------------------------------------------------------------------------


def _credit_epoch(folder):
    return dict(run_page(folder, "CREDIT")[0]["told"])


def _plain_credit(folder):
    """The losses and errors of the same epoch in plain torch, on one rank."""
    page = run_page(folder, "CREDIT")[0]
    torch.manual_seed(0)
    net, losses, errors = page["load_model"](page["conf"]).train(), [], []
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001)
    for _, (x, y) in zip(range(4), whole_batches(page, folder), strict=False):
        forecast = net(x[:, :, None]).flatten(1, 2)
        loss = torch.nn.functional.mse_loss(forecast, y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        errors.append((forecast - y).abs().mean().item())
    return losses, errors


@needs("credit", "optuna")
def test_an_epoch_of_credits_trainer(tmp_path):
    folder = write_globe(tmp_path, 33)
    ((losses, errors),) = run_on_ranks(1, _plain_credit, folder, timeout=SECONDS)
    assert len(set(losses)) == 4
    for ranks in RANKS:
        for told in run_on_ranks(ranks, _credit_epoch, folder, timeout=SECONDS):
            np.testing.assert_allclose(told["train_loss"], losses, rtol=2e-5)
            np.testing.assert_allclose(told["train_mae"], errors, rtol=2e-5)


# -- ClimaX -----------------------------------------------------------------------------------------------------------


def _climax_scores(folder):
    told = run_page(folder, "ClimaX")[0]["trainer"].callback_metrics
    return {name: float(value) for name, value in told.items()}


def _plain_climax(folder):
    """The last loss of training, and the scores of the last validation, of ClimaX's module in a plain loop."""
    page = run_page(folder, "ClimaX")[0]
    torch.manual_seed(0)
    net = page["ClimaX"](page["NAMES"], drop_path=0.0, drop_rate=0.0, **page["sizes"])
    module = page["GlobalForecastModule"](net, lr=0.01, warmup_epochs=2, max_epochs=20)
    for name in ("lat", "lon", "denormalization", "pred_range", "val_clim"):
        setattr(module, name, getattr(page["model"], name))
    told: dict[str, list[float]] = {}
    module.log = lambda name, value, **_: told.setdefault(name, []).append(float(value))
    made = module.configure_optimizers()
    optimizer, schedule = made["optimizer"], made["lr_scheduler"]["scheduler"]
    whole = whole_batches(page, folder)
    more = torch.full((2,), 0.06), page["NAMES"], page["NAMES"]
    sizes = [2, 2, 2, 1] * 2
    for number, size in enumerate(sizes):
        x, y = next(whole)
        loss = module.training_step((x, y, more[0][:size], *more[1:]), number)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    module.eval()
    whole = whole_batches(page, folder)
    with torch.no_grad():
        for number, size in enumerate(sizes[:4] * 2):  # the loader of validation is in its second epoch by then
            x, y = next(whole)
            if number == 4:
                told = {name: values for name, values in told.items() if name.startswith("train")}
            module.validation_step((x, y, more[0][:size], *more[1:]), number)
    means = {name: np.average(v, weights=sizes[:4]) for name, v in told.items() if name.startswith("val")}
    return means | {name: v[-1] for name, v in told.items() if name.startswith("train")}


@needs("climax.arch", "pytorch_lightning", "timm")
def test_climax_trains_and_validates(tmp_path):
    folder = write_globe(tmp_path, 32)
    (want,) = run_on_ranks(1, _plain_climax, folder, timeout=SECONDS)
    assert len(want) == 11 + 1
    for ranks in RANKS:
        for told in run_on_ranks(ranks, _climax_scores, folder, timeout=SECONDS):
            assert {name: told[name] for name in want} == pytest.approx(want, rel=2e-5, abs=1e-6)


# -- anemoi-inference -------------------------------------------------------------------------------------------------


def _run_anemoi(folder, is_cut):
    """The fields of each lead, from a random state."""
    page = run_page(folder, "anemoi-inference")[0]
    runner = page["CutRunner" if is_cut else "SimpleRunner"]
    draw = np.random.default_rng(0)
    spread = {"t": (280, 10), "q": (5, 2), "z": (5e4, 1e3), "lsm": (0.3, 0.2)}
    state = {
        "date": datetime.datetime(2020, 1, 1),
        "latitudes": draw.uniform(-90, 90, NODES),
        "longitudes": draw.uniform(0, 360, NODES),
        "fields": {name: draw.normal(*s, (2, NODES)).astype("f4") for name, s in spread.items()},
    }
    state["fields"]["lsm"][1] = state["fields"]["lsm"][0]
    states = runner(str(folder / "inference.ckpt"), device="cpu", precision="float32").run(
        input_states=state, lead_time="24h"
    )
    return [{name: x.copy() for name, x in state["fields"].items()} for state in states]


@needs("anemoi.inference", "anemoi.models", "torch_geometric")
def test_a_cut_checkpoint_gives_the_runners_forecast(tmp_path):
    save_anemoi_checkpoint(tmp_path / "inference.ckpt")
    (want,) = run_on_ranks(1, _run_anemoi, tmp_path, False, timeout=SECONDS)
    assert len(want) == 4 and set(want[0]) == {"t", "q", "z", "tp"}
    assert all(np.ptp(one[name]) > 0 for one in want for name in one)
    assert np.abs(want[3]["t"] - want[0]["t"]).max() > 0.1
    for ranks in (*RANKS, 3):
        for got in run_on_ranks(ranks, _run_anemoi, tmp_path, True, timeout=SECONDS):
            for one, other in zip(got, want, strict=True):
                np.testing.assert_equal(one, other)


# -- earth2studio -----------------------------------------------------------------------------------------------------


def run_earth2studio(folder):
    """Run the blocks.  At its import earth2studio asks hundreds of times for the whole stack and the modules in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(inspect, "getmodule", lambda *_: None)
        import earth2studio.run  # noqa: F401
    return run_page(folder, "earth2studio")[0]


def _is_a_prognostic_model(folder):
    page = run_earth2studio(folder)
    from earth2studio.models.px import PrognosticModel

    return isinstance(page["model"], PrognosticModel)


def _plain_steps(folder):
    page = run_page(folder, "")[0]
    globe = xr.open_zarr(folder / "globe.zarr")
    state = torch.from_numpy(np.stack([globe[name][0].values for name in globe]))[None]
    order = [list(globe).index(name) for name in ("2m_temperature", "10m_u_component_of_wind")]
    net, steps = page["Net"](), [state[:, order]]
    with torch.inference_mode():
        for _ in range(3):
            steps.append(net(steps[-1]))
    return torch.cat(steps).numpy()


@needs("earth2studio")
def test_a_workflow_of_earth2studio(tmp_path):
    (want,) = run_on_ranks(1, _plain_steps, write_globe(tmp_path / "data", 33), timeout=SECONDS)
    for ranks in RANKS:
        folder = tmp_path / str(ranks)
        folder.mkdir()
        (folder / "globe.zarr").symlink_to(tmp_path / "data" / "globe.zarr")
        assert all(run_on_ranks(ranks, _is_a_prognostic_model, folder, timeout=SECONDS))
        written = xr.open_zarr(folder / "forecast.zarr", consolidated=False)
        got = np.stack([written[name].values[0] for name in ("t2m", "u10m")], axis=1)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


class FewChannels(torch.nn.Module):
    """A small net in place of FourCastNet: 26 channels by one convolution."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(26, 26, 3, padding=1, groups=26)

    def forward(self, x):
        return self.conv(x)


def _published_step(folder, is_cut):
    """A step of earth2studio's FourCastNet, whose net is replaced by a small one."""
    page = run_earth2studio(folder)
    from earth2studio.models.px import FCN

    published = FCN(FewChannels(), torch.full((1, 26, 1, 1), 2.0), torch.full((1, 26, 1, 1), 3.0))
    if is_cut:
        published.model = page["CutNet"](published.model, page["mesh"], (None, None, "lat", None))
    coords = published.input_coords() | {"batch": np.arange(1)}
    x = torch.randn(1, 1, 26, 720, 1440, generator=torch.Generator().manual_seed(0))
    return published(x, coords)[0][..., ::60, ::60].clone()


@needs("earth2studio")
def test_a_model_of_earth2studio_with_a_cut_net(tmp_path):
    (want,) = run_on_ranks(1, _published_step, write_globe(tmp_path / "whole", 33), False, timeout=SECONDS)
    for got in run_on_ranks(2, _published_step, write_globe(tmp_path / "cut", 33), True, timeout=SECONDS):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
