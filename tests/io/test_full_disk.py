"""A full disk: what is told of it, what is kept, and how it goes on once there is room."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
import xarray as xr
from globe_store import globe
from small_disk import no_space

import jigsaw
import jigsaw.io as jio
from jigsaw.__main__ import main
from jigsaw.errors import WriteError
from jigsaw.io.conversion.convert import convert, is_complete_store, verify
from jigsaw.io.conversion.journal import ConversionJournal
from jigsaw.io.writing.write import Writer, completeness, write
from jigsaw.testing import world_mesh

TIMES = np.datetime64("2020-01-01", "ns") + np.arange(8) * np.timedelta64(6, "h")
OPTIONS = {"dims": ("time", "lat", "lon"), "append_dim": "time"}


# -- statistics ------------------------------------------------------------------------------------------------------


def opened(wb2):
    return jio.open(wb2, mesh=world_mesh(lat=1), fields=["temperature"])


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["nc", "npz", "json"])
def test_statistics_are_whole_or_as_they_were(tmp_path, wb2, suffix):
    found, path = jio.statistics(opened(wb2)), tmp_path / f"s.{suffix}"
    for older in (None, replace(found, attrs={"title": "an older file"})):
        if older:
            older.write(path)
        before = [at.read_bytes() for at in tmp_path.iterdir()]
        for size in (0, 100, 700):
            with no_space(size), pytest.raises(WriteError, match=rf"s\.{suffix} could not be .* write again: what was"):
                found.write(path)
            assert [at.read_bytes() for at in tmp_path.iterdir()] == before
    found.write(path)
    again = jio.Statistics.read(path)
    assert again.fields == found.fields and [p.name for p in tmp_path.iterdir()] == [path.name]
    for name, values in found.columns.items():
        np.testing.assert_array_equal(again.columns[name], values)


def test_the_command_tells_it_in_one_line(tmp_path, wb2, capsys):
    argv = ["stats", str(wb2), "--fields", "temperature", "--output", str(tmp_path / "s.nc"), "--no-progress"]
    with no_space(100):
        assert main(argv) == 1
    told = capsys.readouterr().err
    assert told.startswith("WriteError: ") and told.count("\n") == 1 and "s.nc.part could not be written" in told
    assert main([*argv, "--resume"]) == 0


def test_statistics_go_on_from_the_last_checkpoint_that_was_whole(tmp_path, wb2):
    at, block = tmp_path / "c.part", 3
    whole, reports = jio.statistics(opened(wb2), block=block), []
    limit = no_space(100)

    def report(done, _):
        reports.append(done)
        if len(reports) == 2:
            limit.__enter__()

    try:
        with pytest.raises(WriteError, match=r"c\.part could not be written .* run it again with resume=True"):
            jio.statistics(opened(wb2), block=block, checkpoint=at, progress=report)
    finally:
        limit.__exit__(None, None, None)
    assert reports == [3, 6] and [p.name for p in tmp_path.iterdir()] == [at.name]
    found = jio.statistics(
        opened(wb2), block=block, checkpoint=at, resume=True, progress=lambda d, _: reports.append(d)
    )
    assert reports == [3, 6, 9, 10]
    for name, values in whole.columns.items():
        np.testing.assert_array_equal(found.columns[name], values)


# -- conversion ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def source():
    data, r = globe()[["temperature", "2m_temperature"]], np.random.default_rng(0)
    for name in data.data_vars:
        data[name].values[:] = r.normal(size=data[name].shape)
    data.attrs["title"] = "a globe"
    return data


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 60, 500, 1500, 3000])
def test_a_conversion_goes_on_once_there_is_room(tmp_path, source, size):
    made, chunks = tmp_path / "made.zarr", {"time": 1, "level": 1, "lat": 5, "lon": 8}
    with (
        no_space(size),
        pytest.raises(WriteError, match=r"made\.zarr.* could not be .* convert again with the"),
    ):
        convert(source, made, chunks=chunks, shards=chunks, threads=2)
    left = {"made.zarr", "made.zarr.journal"}
    assert {p.name for p in tmp_path.iterdir()} <= left and not is_complete_store(made)
    if (made / "zarr.json").exists():
        assert not completeness(made).closed and not xr.open_zarr(made, consolidated=True).variables
    assert not [p for p in tmp_path.rglob("*") if p.suffix in (".draft", ".partial", ".part")]
    found = convert(source, made, chunks=chunks, shards=chunks)
    assert found.kept > 0 or size < 1500  # where the journal, of so many regions, was the first that had no room
    back = xr.open_zarr(made).load()
    for name in source.variables:
        np.testing.assert_array_equal(back[name].values, source[name].values)
    assert all(verify(made).values()) and {p.name for p in tmp_path.iterdir()} == {"made.zarr"}


def test_a_journal_has_whole_lines(tmp_path):
    journal = ConversionJournal(tmp_path / "j", "one")
    with no_space(100), pytest.raises(WriteError, match="j could not be written"):
        for i in range(9):
            journal.add([(("a", (i,)), "digest")])
    written = len(journal.done)
    journal.add([(("a", (99,)), "digest")])
    assert ConversionJournal(tmp_path / "j", "one").done == journal.done and written + 1 == len(journal.done)
    (tmp_path / "j").write_text('{"conversion": "one"}\n{"array": "a", "un{"array": 1}\n')
    with pytest.raises(WriteError, match=r"j is damaged \(.*\); start again with replace=True"):
        ConversionJournal(tmp_path / "j", "one")


# -- forecasts -------------------------------------------------------------------------------------------------------


def tile(x):
    return jigsaw.shard(x, world_mesh(lat=1), (None, "lat", None))


def grown(path, x, **how):
    """Append step by step; how many were complete when it ended."""
    with Writer(path, **OPTIONS, **how) as out:
        for step in range(out.steps, len(x)):
            out.append({"u": tile(x[step : step + 1])}, {"time": TIMES[step : step + 1]})


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["nc", "zarr"])
@pytest.mark.parametrize("room", range(300_000, 1_600_000, 118_000))
def test_a_forecast_keeps_the_steps_that_were_complete(tmp_path, suffix, room):
    if suffix == "zarr":  # a file a step
        room = 4000 if room % 4 else 300_000
    x, path = torch.randn(6, 256, 256, generator=torch.Generator().manual_seed(0)), tmp_path / f"a.{suffix}"
    told = ""
    try:
        with no_space(room):
            grown(path, x)
    except WriteError as error:
        told = str(error)
    if told:
        assert f"{path} could not be written (" in told and "see that its disk has room" in told
    left = path if path.exists() else tmp_path / f"a.{suffix}.part"
    steps = 0
    if left.exists():
        steps = completeness(path).steps
        assert completeness(path).closed == (not told)
        with xr.open_dataset(left, engine="netcdf4" if suffix == "nc" else "zarr") as ds:
            assert ds.sizes.get("time", 0) == steps
            if steps:
                np.testing.assert_array_equal(ds["u"].values, x[:steps].numpy())
                np.testing.assert_array_equal(ds["time"].values, TIMES[:steps])
    if suffix == "nc" and 0 < steps < 6:
        assert f"go on with mode='a': the {steps} complete steps are in {left}" in told
        with pytest.raises(WriteError, match=rf"part holds {steps} complete steps of a run that ended; go on"):
            grown(path, x)
    with Writer(path, mode="a", **OPTIONS) as out:
        for step in range(steps, 6):
            out.append({"u": tile(x[step : step + 1])}, {"time": TIMES[step : step + 1]})
    if steps < 6:
        with xr.open_dataset(path, engine="netcdf4" if suffix == "nc" else "zarr") as ds:
            np.testing.assert_array_equal(ds["u"].values, x.numpy())
            np.testing.assert_array_equal(ds["time"].values, TIMES[:6])
        assert completeness(path).closed and not (tmp_path / "a.nc.part").exists()


def test_what_is_appended_to_a_file_is_kept_beside_it(tmp_path):
    x, path, part = torch.randn(6, 256, 256), tmp_path / "a.nc", tmp_path / "a.nc.part"
    grown(path, x[:2])
    before = path.read_bytes()
    with no_space(len(before) + 100_000), pytest.raises(WriteError, match=r"a\.nc could not be written"):
        grown(path, x[2:5], mode="a")  # no room to begin with
    assert path.read_bytes() == before and not part.exists()
    with (
        no_space(len(before) + 850_000),
        pytest.raises(WriteError, match=r"the \d complete steps are in .*a\.nc\.part"),
        Writer(path, mode="a", **OPTIONS) as out,
    ):
        for step in range(2, 6):
            out.append({"u": tile(x[step : step + 1])}, {"time": TIMES[step : step + 1]})
    assert path.read_bytes() == before and completeness(path).steps == 2
    kept = completeness(part).steps
    assert 2 < kept < 6 and out.steps >= kept
    write(path, {"u": tile(x[kept:])}, mode="a", coords={"time": TIMES[kept:6]}, **OPTIONS)
    with xr.open_dataset(path) as ds:
        np.testing.assert_array_equal(ds["u"].values, x.numpy())
        assert "jigsaw_grew_from" not in ds.attrs
    # a part of a file that is another one now counts for nothing
    with pytest.raises(KeyError), Writer(path, mode="a", **OPTIONS) as out:
        out.append({"u": tile(x[:1])}, {"time": TIMES[6:7]})
        raise KeyError
    os.utime(path, ns=(1, 1))
    write(path, {"u": tile(x[:2])}, mode="a", coords={"time": TIMES[6:8]}, **OPTIONS)
    assert completeness(path).steps == 8


def test_a_new_file_replaces_what_a_run_left(tmp_path):
    x, path = torch.randn(2, 64, 64), tmp_path / "a.nc"
    with pytest.raises(KeyError), Writer(path, **OPTIONS) as out:
        out.append({"u": tile(x)}, {"time": TIMES[:2]})
        raise KeyError
    assert completeness(path).steps == 2 and not path.exists()
    grown(path, x[:1], mode="w")
    assert completeness(path).steps == 1 and not (tmp_path / "a.nc.part").exists()
