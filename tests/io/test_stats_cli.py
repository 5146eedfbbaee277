"""``python -m jigsaw stats``: alone, under torchrun, and on a dask cluster, whose bits are those of one rank."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import xarray as xr
from dask.distributed import Client, LocalCluster
from globe_store import globe, stacked, truth, write

import jigsaw
from jigsaw.__main__ import main
from jigsaw.errors import CorruptChunkError, FieldError
from jigsaw.io.series.statistics import Statistics
from jigsaw.io.stats.compute import statistics
from jigsaw.testing import world_mesh

FIELDS = ["z500", "t2m", "land_sea_mask"]
LONG = ["geopotential@500", "2m_temperature", "land_sea_mask"]


@pytest.fixture(scope="module")
def cluster():
    local = {"host": "127.0.0.1", "protocol": "tcp", "dashboard_address": "127.0.0.1:0", "processes": False}
    with LocalCluster(n_workers=2, threads_per_worker=1, **local) as made:
        yield made


def same_bits(found, want):
    assert found.fields == want.fields
    for name, values in want.columns.items():
        np.testing.assert_array_equal(found.columns[name], values)


def opened(path, **more):
    return jigsaw.io.open(path, mesh=world_mesh(lat=1), **{"fields": FIELDS, "dtype": "float64", **more})


def alone(path, **more):
    return statistics(opened(path), **more)


def test_the_command_writes_and_prints(wb2, tmp_path, capsys):
    out = tmp_path / "s.nc"
    argv = ["stats", wb2, "--fields", ",".join(FIELDS), "--time", "2020-01-01T12..2020-01-02", "--every", "12h"]
    assert main([*argv, "--weights", "none", "--output", str(out), "--block", "2"]) == 0
    printed = capsys.readouterr()
    assert re.search(r"3 steps of .*wb2.zarr, 2020-01-01T12:00.* to 2020-01-02T12:00", printed.out)
    assert "3/3" in printed.err  # the bar
    whole = stacked(wb2, LONG)[2:8:2]
    found = Statistics.read(out)
    assert os.listdir(tmp_path) == ["s.nc"]
    np.testing.assert_allclose(found.columns["mean"], whole.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(found.columns["diff_std"], np.diff(whole, axis=0).std((0, 2, 3)), rtol=1e-11)
    ds = jigsaw.io.open(wb2, mesh=world_mesh(lat=1), fields=["geopotential@500", "2m_temperature"], normalize=str(out))
    assert ds.scale == tuple(1 / found.columns["std"][:2])


@pytest.mark.parametrize(
    ("span", "steps"), [("2020..2020", 10), ("0..1000", 10), ("2..", 8), ("..4", 4), ("2020-01-02..2020-01-02", 4)]
)
def test_spans(wb2, tmp_path, span, steps):
    out = str(tmp_path / "s.json")
    assert main(["stats", wb2, "--fields", "t2m", "--time", span, "--output", out, "--no-progress"]) == 0
    assert Statistics.read(out).attrs["steps"] == steps


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["--time", "2020"], "'2020' is not a span like 1979..2015"),
        (["--dask", "-1"], "'-1' is not a whole number of at least 1"),
    ],
)
def test_options_are_checked(wb2, capsys, argv, match):
    with pytest.raises(SystemExit):
        main(["stats", wb2, "--output", "s.nc", *argv])
    assert match in capsys.readouterr().err


@pytest.mark.slow
def test_under_torchrun_each_rank_takes_its_tile(wb2, tmp_path):
    out = str(tmp_path / "s.npz")
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "jigsaw"]
    argv = ["stats", wb2, "--mesh", "lat=2", "--output", out, "--no-progress", "--weights", "area"]
    ran = subprocess.run([*ranks, *argv], capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.count("written to") == 1
    data = truth(wb2)["temperature"].sel(level=700).astype("f8")
    weights = np.cos(np.deg2rad(data.latitude)).clip(0)
    found = Statistics.read(out)["temperature@700"]
    np.testing.assert_allclose(found["mean"], float(data.weighted(weights).mean()), rtol=1e-3)
    assert found["max"] == data.values.max()


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["--output", "s.txt"], r"FieldError: statistics are written as .nc, .npz, .json, not 's.txt'"),
        (["--output", "s.nc", "--fields", "t3m"], r"MissingArrayError: field 't3m' is not in the store"),
        (["--output", "s.nc", "--every", "5h"], r"WindowError: every='5h'"),
        (["--output", "s.nc", "--every", "0"], r"WindowError: every=0 must be at least one step"),
        (["--output", "no/s.nc"], r"FieldError: statistics are to be written to 'no/s.nc', whose folder is not there"),
        (["--output", "s.npz", "--checkpoint", "./s.npz"], r"FieldError: --checkpoint ./s.npz is the file of --output"),
        (["--output", "s.nc", "--scheduler", "host"], r"FieldError: no dask scheduler answers at 'host'"),
        (["--output", "s.nc", "--mesh", "lat=2"], r"ShardingError: .* 1 ranks"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_1(wb2, tmp_path, monkeypatch, capsys, argv, match):
    monkeypatch.chdir(tmp_path)
    assert main(["stats", wb2, "--no-progress", *argv]) == 1
    assert re.search(match, capsys.readouterr().err)
    assert not os.listdir(tmp_path)


# -- dask --------------------------------------------------------------------------------------------------------------


def test_workers_give_the_bits_of_one_rank(wb2, gappy, cluster):
    with Client(cluster) as client:
        for path, weights, block in ((wb2, "area", 3), (wb2, "none", 10), (gappy, "none", 1)):
            want = alone(path, weights=weights, block=block)
            same_bits(statistics(opened(path), weights=weights, block=block, client=client), want)
        thin = opened(wb2, every=3, halo=1)
        same_bits(statistics(thin, block=2, client=client), statistics(thin))


class StopHereError(Exception):
    pass


def test_workers_go_on_from_a_checkpoint_of_a_rank_and_the_other_way_round(wb2, tmp_path, cluster):
    want, at = alone(wb2, block=2), tmp_path / "c"

    def report(done, steps):
        if done == 4:
            raise StopHereError

    with Client(cluster) as client:
        with pytest.raises(StopHereError):
            alone(wb2, block=2, checkpoint=at, progress=report)
        same_bits(statistics(opened(wb2), block=2, checkpoint=at, resume=True, client=client), want)
        with pytest.raises(StopHereError):
            statistics(opened(wb2), block=2, checkpoint=at, progress=report, client=client)
        same_bits(alone(wb2, checkpoint=at, resume=True), want)


def test_a_workers_error_arrives_as_it_is(tmp_path, cluster):
    path = write(tmp_path / "broken.zarr", globe())
    chunk = tmp_path / "broken.zarr" / "geopotential" / "c" / "5" / "0" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:40])
    with Client(cluster) as client, pytest.raises(CorruptChunkError, match=r"chunk \(5, 0, 0, 0\) of array 'geop"):
        statistics(opened(path), block=2, client=client)


def test_what_workers_cannot_open(wb2, cluster):
    with Client(cluster) as client:
        lazy = jigsaw.io.open(xr.open_zarr(wb2, consolidated=False), mesh=world_mesh(lat=1), fields=["t2m"])
        with pytest.raises(
            FieldError, match=r"needs a store that workers open by themselves, not an xarray dataset of"
        ):
            statistics(lazy, client=client)
        with pytest.raises(FieldError, match=r"the dataset's mesh is \{'lat': 2\}; open it on a mesh of one rank"):
            statistics(jigsaw.io.open(wb2, mesh={"lat": 2}, fields=["t2m"]), client=client)


@pytest.mark.slow
def test_the_command_starts_a_cluster(wb2, tmp_path):
    argv = ["stats", wb2, "--fields", ",".join(FIELDS), "--output", str(tmp_path / "s.json"), "--block", "3"]
    assert main([*argv, "--dask", "1"]) == 0
    same_bits(Statistics.read(tmp_path / "s.json"), alone(wb2))


def test_the_command_uses_a_cluster_that_is_there(wb2, tmp_path, capsys, cluster):
    argv = ["stats", wb2, "--fields", ",".join(FIELDS), "--output", str(tmp_path / "s.npz"), "--no-progress"]
    assert main([*argv, "--scheduler", cluster.scheduler_address]) == 0
    assert main([*argv, "--scheduler", cluster.scheduler_address, "--mesh", "lat=1"]) == 1
    assert "is for ranks of torchrun" in capsys.readouterr().err
    same_bits(Statistics.read(tmp_path / "s.npz"), alone(wb2))
