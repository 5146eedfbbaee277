"""``python -m jigsaw plan``: the table, the picture, and what it says to wrong arguments."""

import json
import os
import re
import subprocess
import sys

import nibabel
import numpy as np
import pytest
from globe_store import globe, write

import jigsaw
from jigsaw.__main__ import main
from jigsaw.io.commands.parse_options import parse_boundary
from jigsaw.io.reports.pictures import plan_figure


def planned(capsys, *argv):
    assert main(["plan", *argv]) == 0
    return capsys.readouterr().out


def test_the_table_names_every_ranks_part(wb2, capsys):
    out = planned(
        capsys, wb2, "--mesh", "lat=2,lon=2", "--halo", "2", "--fields", "t2m,z500,z850", "--mode=cooperative"
    )
    assert "reads 2 steps of 3 channels (t2m, z500, z850), lat 13 x lon 16" in out
    assert "mesh lat=2, lon=2; halo lat 2, lon 2 (wraps round); cooperative reading" in out
    rows = [line.split() for line in out.splitlines() if re.match(r"\s+[0-3]\s", line)]
    assert [row[:7] for row in rows] == [
        ["0", "0", "0", "0:7", "-0+2", "0:8", "-2+2"],
        ["1", "0", "1", "0:7", "-0+2", "8:16", "-2+2"],
        ["2", "1", "0", "7:13", "-2+0", "0:8", "-2+2"],
        ["3", "1", "1", "7:13", "-2+0", "8:16", "-2+2"],
    ]
    assert sum(int(row[7]) for row in rows) == 4
    assert "amplification 1.00" in out
    assert re.search(r"all independent: 4\.00, 16 chunks", out)
    assert re.search(r"all cooperative: 1\.00, 4 chunks", out)
    assert re.search(r"geopotential: cooperative, chunks of \(1, 3, 13, 16\) = 2\.5 kB", out)
    assert sum(len(found.split()) for found in re.findall(r"rank \d, \d+: (.*)", out)) == 4


def test_one_rank_and_explicit_modes(wb2, capsys):
    out = planned(
        capsys, wb2, "--mesh", "lat=4", "--mode", "independent", "--fields", "t2m", "--inputs=-1,0", "--samples", "0,1"
    )
    assert "reads 4 steps of 1 channels" in out
    assert "independent reading" in out
    assert "amplification 4.00" in out
    assert "mesh one rank; halo none" in planned(capsys, wb2)


def test_an_axis_that_cuts_nothing_is_said(wb2, capsys):
    told = "axis latitude cuts none of the dims lat, lon: all ranks along it read the same"
    assert told in planned(capsys, wb2, "--mesh", "latitude=2,lon=2")
    assert "cuts none" not in planned(capsys, wb2, "--mesh", "latitude=2,lon=2", "--spec", "lat=latitude,lon=lon")
    assert "cuts none" not in planned(capsys, wb2, "--mesh", "data=2,lat=2,lon=1")


@pytest.mark.parametrize("ending", [".nii", ".nii.gz"])
def test_a_scan_is_planned_and_inspected(tmp_path, capsys, monkeypatch, ending):
    """It has one step, so none is a target; its affine is told in words."""
    monkeypatch.setenv("JIGSAW_CACHE", str(tmp_path / "cache"))
    path = str(tmp_path / f"scan{ending}")
    affine = np.array([[-2.0, 0, 0, 90], [0, 0, -1.5, 40], [0, 3, 0, -72], [0, 0, 0, 1]])
    scan = nibabel.Nifti1Image(np.arange(30 * 16 * 21, dtype="i2").reshape(30, 16, 21), affine)
    scan.header.set_slope_inter(0.5, -1024)
    scan.header.set_xyzt_units("mm")
    nibabel.save(scan, path)
    out = planned(capsys, path, "--mesh", "z=4", "--halo", "2")
    assert "reads 1 steps of 1 channels (image), z 21 x y 16 x x 30\nmesh z=4; halo z 2, y 2, x 2" in out
    assert main(["inspect", path]) == 0
    told = capsys.readouterr().out
    assert f"{path}\nNIfTI{', gzip' if ending == '.nii.gz' else ''}: 1 variables" in told
    assert "image: 30 x 16 x 21 voxels (x, y, z) of int16, 2 x 3 x 1.5 mm apart" in told
    assert "  LSP: x to the left, y to the head, z to the back; the first voxel is at 90, 40, -72" in told
    assert "image: value = stored * 0.5 + -1024" in told
    assert "affine" not in told
    assert main(["inspect", path, "--json"]) == 0
    (volume,) = json.loads(capsys.readouterr().out)["volumes"]
    assert (volume["orientation"], volume["spacing"], volume["shape"]) == ("LSP", [2, 3, 1.5], [30, 16, 21])


def test_a_region_does_not_wrap(tmp_path, capsys):
    data = globe().isel(longitude=slice(0, 8))
    path = write(tmp_path / "region.zarr", data)
    assert "lon 2;" in planned(capsys, path, "--mesh", "lon=2", "--halo", "lon=2", "--fields", "t2m")
    assert main(["plan", path, "--boundary", "lon=periodic"]) == 1
    assert "GridError: boundary={'lon': 'periodic'} needs 'lon' to go round once" in capsys.readouterr().err


def test_boundaries(wb2, capsys):
    beyond = ["--mesh", "lat=2", "--halo", "lat=2", "--fields", "t2m", "--boundary"]
    assert parse_boundary("lat=fill:-0.5,lon=periodic") == {"lat": ("fill", -0.5), "lon": "periodic"}
    assert "halo lat 2 (fill)" in planned(capsys, wb2, *beyond, "lat=fill:-0.5")
    assert "halo lat 2 (reflect)" in planned(capsys, wb2, *beyond, "lat=reflect,lon=periodic")
    assert main(["plan", wb2, *beyond, "lat=fill"]) == 1
    assert "('fill', number)" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["plan", wb2, *beyond, "lat=fill:much"])
    assert "lat=fill:much is not a rule like lat=fill:0 with a number" in capsys.readouterr().err


def test_a_missing_chunk_is_fill_and_nobody_decodes_it(tmp_path, capsys):
    data = globe()[["temperature"]]
    data["temperature"].values[0] = np.nan
    path = write(tmp_path / "sparse.zarr", data)
    out = planned(capsys, path, "--mesh", "lat=2", "--fields", "temperature", "--mode=cooperative")
    assert "missing (fill), 1: (0,0,0,0)" in out
    assert "1 of 2 chunks are missing, and stand for fill values; missing='error' refuses 1 of them" in out


@pytest.mark.parametrize("chunk", [(1, None, None, None), (2, 1, 5, 7)])
def test_the_picture_is_drawn(tmp_path, capsys, chunk):
    path = write(tmp_path / "store.zarr", globe(), chunk=chunk)
    picture = tmp_path / "plan.png"
    out = planned(capsys, path, "--mesh", "lat=2,lon=2", "--halo", "2", "--plot", str(picture))
    assert out.rstrip().endswith(f"drawn to {picture}")
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert picture.stat().st_size > 10_000


@pytest.mark.parametrize("ranks", [1, 4, 8])
@pytest.mark.parametrize("mode", ["cooperative", "independent"])
def test_nothing_hides_a_bar_of_the_picture(wb2, ranks, mode):
    ds = jigsaw.io.open(wb2, mesh={"lat": ranks}, fields=["t2m", "z500"], mode=mode)
    figure = plan_figure(ds, ds.plan(range(8)))
    figure.draw_without_rendering()
    bars = figure.axes[1]
    beside, within = bars.get_legend().get_window_extent(), bars.get_window_extent()
    assert len(bars.patches) == 4 * (ranks + (mode == "cooperative" and ranks > 1))
    assert beside.y0 >= within.y1 and beside.x0 >= 0 and beside.x1 <= figure.bbox.x1
    assert bars.title.get_window_extent().x1 <= figure.bbox.x1
    assert max(bar.get_height() for bar in bars.patches) < bars.get_ylim()[1]


def test_printing_a_plan_explains_it(wb2):
    how = {"fields": ["t2m", "z500"], "halo": 2, "boundary": {"lon": "periodic"}}
    told = str(jigsaw.io.open(wb2, mesh={"lat": 2, "lon": 2}, mode="cooperative", **how).plan(0))
    assert told.startswith("1 steps of 2 channels, latitude 13 x longitude 16, read by 4 ranks (lat=2, lon=2)")
    assert re.search(r"\n +0 +0 +0 +0:7 -0\+2 +0:8 -2\+2 +1 ", told)
    assert "2m_temperature: 1 chunk of 1 x 13 x 16 = 416 B, all of which several ranks need:" in told
    assert "by one rank, which hands the others their parts" in told
    assert "(cooperative reading, which mode='cooperative' asks for; predicted CPU ms of all ranks: independent" in told
    assert re.search(r"amplification 1\.00: .*\n  all independent: 4\.00, 8 chunks", told)
    alone = str(jigsaw.io.open(wb2, mesh={"lat": 2, "lon": 2}, **how).plan(0))
    assert "each rank reads and decodes for itself what it needs of them" in alone
    assert "(independent reading, the cheapest; predicted" in alone
    one = str(jigsaw.io.open(wb2, mesh={}, fields=["t2m"]).plan(0))
    assert "read by one rank" in one and "416 B, none of which two ranks need" in one


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["--fields", "t3m"], r"MissingArrayError: field 't3m' is not in the store; did you mean 't2m'"),
        (
            ["--mesh", "lat=2", "--halo", "lat=20"],
            r"HaloError: halo=\{'lat': 20\} is larger than the domain: 'lat' has 13 rows",
        ),
        (["--targets", "99"], r"WindowError: a window from offset 0 to 99"),
        (["--samples", "99"], r"IndexError: sample 99 of a dataset of 9"),
        (["--mesh", "lat=0"], r"ShardingError: mesh=\{'lat': 0\} must have axes of at least one rank each"),
        (["--plot", "plan.xyz"], r"UnsupportedStoreError: a picture is not written as 'plan.xyz'; its ending may be"),
    ],
)
def test_what_cannot_be_planned_is_one_line_and_status_1(wb2, capsys, argv, match):
    assert main(["plan", wb2, *argv]) == 1
    err = capsys.readouterr().err
    assert re.search(match, err)
    assert err.count("\n") == 1


def test_a_path_that_is_no_store(tmp_path, capsys):
    assert main(["plan", str(tmp_path / "nothing.zarr")]) == 1
    assert "UnsupportedStoreError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "match"),
    [
        (["--mesh", "lat"], "'lat' is not a list like lat=2"),
        (["--mesh", "lat=x"], "with whole numbers"),
        (["--samples", "a"], "not a list of whole numbers"),
        (["--samples="], "names no sample; give at least one, like 0"),
        (["--mesh", "lat=2,lat=3"], "'lat=2,lat=3' names lat twice"),
    ],
)
def test_options_are_checked(wb2, capsys, argv, match):
    with pytest.raises(SystemExit):
        main(["plan", wb2, *argv])
    assert match in capsys.readouterr().err


def test_it_recommends_in_short_and_in_full(wb2, capsys):
    out = planned(capsys, wb2, "--mesh", "lat=2,lon=2", "--fields", "t2m")
    assert re.search(r"recommended: mesh \S+, balanced cuts: no cheaper", out)
    assert re.search(r"chunks time=1,lat=\d+,lon=\d+ in shards time=10,", out)
    assert "\nmeshes\n" not in out
    full = planned(capsys, wb2, "--mesh", "lat=2,lon=2", "--fields", "t2m", "--recommend", "8")
    block = full.partition("\nmeshes\n")[2]
    assert {line.split()[0] for line in block.partition("\n\n")[0].splitlines()[1:]} == {
        "lat=8", "lon=8", "lat=2,lon=4", "lat=4,lon=2",
    }  # fmt: skip
    assert "chunks for mesh lat=2, lon=2" in full and "as stored" in full


def test_less_than_a_chunk_is_said_of_the_array(tmp_path, capsys):
    data = globe(steps=1, lat=256, lon=256)[["temperature", "land_sea_mask"]]
    encoding = {"temperature": {"chunks": (1, 3, 256, 256), "compressors": ()}}
    data.to_zarr(tmp_path / "plain.zarr", zarr_format=3, consolidated=False, encoding=encoding)
    out = planned(
        capsys,
        str(tmp_path / "plain.zarr"),
        "--mesh",
        "lat=4",
        "--mode=independent",
        "--targets=",
        "--fields=temperature",
    )
    assert re.search(r"temperature: .*; of 4 chunks a part: 197 kB read, 197 kB decoded of each", out)


@pytest.mark.slow
def test_it_ends_quietly_when_nobody_reads_on(wb2):
    """As `… | head` does: the reader closes the pipe before all is written."""
    command = [sys.executable, "-m", "jigsaw", "plan", wb2, "--mesh", "lat=2,lon=2"]
    read, write_end = os.pipe()
    os.close(read)
    found = subprocess.run(command, check=False, stdout=write_end, stderr=subprocess.PIPE, timeout=60)
    os.close(write_end)
    assert found.returncode == 141
    assert found.stderr == b""


def test_a_recommendation_for_no_ranks_is_refused(wb2, capsys):
    assert main(["plan", wb2, "--mesh", "lat=2", "--fields", "t2m", "--recommend", "0"]) == 1
    assert "--recommend 0 must be a number of ranks" in capsys.readouterr().err
