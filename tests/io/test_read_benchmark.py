"""The reading benchmark at toy size: contenders and stores give the same bits, and its page is that of its results."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks"
TIMES = {"wall_s", "cpu_s", "wall_runs_s", "cpu_runs_s"}
SIZES = {"stored_bytes", "decoded_bytes", "useful_bytes", "amplification", "peak_rss_bytes"}
FIELDS = {"case", "store", "engine", "ranks", "mesh", "threads", "checksum", "settings", *TIMES, *SIZES}


@pytest.fixture(scope="module")
def bench():
    """The benchmark's files, as its processes find them too."""
    sys.path.insert(0, str(FOLDER))
    yield importlib.import_module
    sys.path.remove(str(FOLDER))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stores")


def compared(bench, folder, store, engines, mesh=None, **how):
    cases = bench("cases")
    setting = cases.Setting(folder, small=True, repeat=1)
    return list(cases.compare("a case", setting, store, mesh or {"lat": 1}, engines, **how))


@pytest.mark.slow
def test_contenders_read_the_same(bench, folder):
    found = compared(bench, folder, "wb2", ("jigsaw-cooperative", "zarr"), {"lat": 2})
    assert all(set(result) == FIELDS for result in found)
    assert len({result["checksum"] for result in found}) == 1
    assert [result["amplification"] for result in found] == [1.0, 2.0]
    sample = 2 * 4 * 13 * 37 * 72 * 4
    assert {result["useful_bytes"] for result in found} == {sample}
    assert found[0]["decoded_bytes"] == sample
    assert all(len(result["settings"]) > 1 and result["settings"]["threads"] == 1 for result in found)


def globe_task(bench, folder, store="wb2", **more):
    """What one rank reads that has the whole globe."""
    paths = tuple(str(path) for path in bench("stores").made(folder, store, True))
    globe = (slice(0, 37), slice(0, 72))
    names = tuple(bench("stores").VARIABLES)
    task = bench("team").Task("jigsaw", store, paths, names, 2, (("lat", 1),), 1, (globe,))
    return bench("cases").replace(task, **more)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("store", ["wb2", "level", "tiles", "shard"])
def test_every_contender_reads_the_same_of_zarr(bench, folder, store):
    contenders = bench("contenders")
    found = compared(bench, folder, store, ("jigsaw", *contenders.ZARR, *contenders.LOADERS))
    assert len({result["checksum"] for result in found}) == 1


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("store", ["netcdf4", "makani"])
def test_every_contender_reads_the_same_of_hdf5(bench, folder, store):
    found = compared(bench, folder, store, ("jigsaw", *bench("contenders").HDF5), threads=2)
    assert len({result["checksum"] for result in found}) == 1


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("store", ["nifti", "nifti-gz"])
def test_every_contender_crops_the_same(bench, folder, store):
    found = compared(bench, folder, store, ("jigsaw", *bench("contenders").VOLUMES), {"z": 2, "y": 2})
    assert len({result["checksum"] for result in found}) == 1


@pytest.mark.slow
@pytest.mark.nightly
def test_every_store_holds_the_same(bench, folder):
    import h5py
    import zarr

    stores = bench("stores")
    wb2 = zarr.open_group(stores.made(folder, "wb2", True)[0], mode="r")
    for store in ("level", "tiles", "shard", "long"):
        other = zarr.open_group(stores.made(folder, store, True)[0], mode="r")
        for name in stores.VARIABLES:
            np.testing.assert_array_equal(other[name][: stores.STEPS], wb2[name][...])
    assert other["temperature"].shape[0] == stores.LONG
    with h5py.File(stores.made(folder, "netcdf4", True)[0]) as f:
        np.testing.assert_array_equal(f["temperature"][...], wb2["temperature"][...])
    with h5py.File(stores.made(folder, "makani", True)[0]) as f:
        np.testing.assert_array_equal(f["fields"][:, 13:26], wb2["temperature"][...])


def test_the_bare_loop_decodes_what_the_pipeline_does(bench, folder):
    import zarr

    task = globe_task(bench, folder, options=(("samples", 1),))
    read, _ = bench("jigsaw_side").bare_loop(task)
    (memory,) = read([0])
    wanted = zarr.open_group(task.path, mode="r")[task.variables[-1]][1]
    np.testing.assert_array_equal(memory.view("f4").reshape(wanted.shape), wanted)


@pytest.mark.slow
@pytest.mark.nightly
def test_memory_and_waiting(bench, folder):
    cases = bench("cases")
    setting = cases.Setting(folder, small=True, repeat=1)
    task = globe_task(bench, folder, "long", engine="jigsaw-loader")
    with cases.Team(task) as team:
        memory, waits = cases.peaks(team, setting), cases.waits(team, setting)
    assert memory["peak_pss_bytes"] > memory["idle_pss_bytes"] > 50e6
    assert 0 <= waits["waiting_share"] < 1 and waits["step_s"] > 0
    assert cases.bound_bytes(task, {"useful": 400e6, "chunk": 54e6}) == 3 * 400e6 + 54e6 + 150e6


def test_a_store_far_away(bench):
    found = bench("http_store").run("shard", latency=0.002, rate=50e6, steps=2, repeat=1)
    assert found["limit_bytes_per_s"] > 0 and found["share"] > 0 and found["cpu_s"] > 0
    assert found["reference_share"] == pytest.approx(found["limit_bytes_per_s"] / 50e6, abs=1e-3)


def test_a_rank_that_fails_says_why(bench, folder):
    task = globe_task(bench, folder, engine="zarr", variables=("nothing",))
    with pytest.raises(RuntimeError, match=r"zarr on wb2, rank 0: (.|\n)*KeyError"):
        bench("team").Team(task)


@pytest.mark.slow
@pytest.mark.nightly
def test_the_command(folder, tmp_path):
    result = tmp_path / "read-toy.jsonl"
    command = [sys.executable, str(FOLDER / "read.py"), "--small", "--data", str(folder), "--case", "tiles"]
    command += ["--engine", "zarr", "--repeat", "2", "--output", str(result)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    header, case = [json.loads(line) for line in result.read_text().splitlines()]
    assert header.keys() == {"hardware", "date", "command"} and str(folder) not in header["command"]
    assert json.loads(done.stdout) == case
    assert set(case) == {*FIELDS, "repeat"} and case["mesh"] == {"lat": 1} and len(case["cpu_runs_s"]) == 2


# -- the page ---------------------------------------------------------------------------------------------------------


def row(engine, **more):
    shared = {"case": "tiles", "store": "tiles", "ranks": 1, "mesh": {"lat": 1}, "threads": 1, "settings": {"v": "1"}}
    return {**shared, "engine": engine, "wall_s": 1.0, **more}


@pytest.mark.parametrize(
    ("ours", "verdict"), [(0.5, "yes"), (1.3, "loses")], ids=["it is better", "it is worse and the page says so"]
)
def test_the_report(bench, tmp_path, ours, verdict):
    report = bench("report")
    head = {"hardware": "2 cores", "date": "2020-01-01", "command": "x"}
    cases = [row("jigsaw", cpu_s=ours), row("zarr", cpu_s=2.0), row("tensorstore", cpu_s=1.0)]
    (tmp_path / "read-a.jsonl").write_text("\n".join(json.dumps(each) for each in (head, *cases)))
    made = report.page(f"a\n{report.BEGIN}\nold\n{report.END}\nb", [tmp_path / "read-a.jsonl"], tmp_path)
    assert made.startswith("a\n") and made.endswith("\nb") and "old" not in made
    first = next(line for line in made.splitlines() if line.startswith("| Small chunks"))
    assert f"{ours:.3g} s" in first and "1 s tensorstore" in first and verdict in first
    assert (tmp_path / "reading-tiles.png").stat().st_size > 1000
    assert made == report.page(made, [tmp_path / "read-a.jsonl"], tmp_path)


@pytest.mark.slow
def test_the_page_is_that_of_the_result_files(bench, tmp_path):
    report = bench("report")
    text = (ROOT / "docs" / "reading.md").read_text()
    assert report.page(text, report.newest(), tmp_path) == text
    for picture in tmp_path.iterdir():
        assert (ROOT / "docs" / picture.name).is_file()


@pytest.mark.slow
@pytest.mark.nightly
def test_the_benchmark_of_planning_runs():
    words = ["--integers", "--ranks", "8"]
    ran = subprocess.run([sys.executable, FOLDER / "planning.py", *words], capture_output=True, text=True, check=True)
    found = json.loads(ran.stdout)
    assert found["case"] == "integers" and found["ranks"] == 8
