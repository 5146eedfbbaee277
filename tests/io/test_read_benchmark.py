"""The reading benchmark at toy size: every engine and every store give the same bits, and the bytes are as promised."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from jigsaw.testing import run_on_ranks, world_mesh

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "read.py"
SIZES = {"wall_s", "cpu_s", "stored_bytes", "decoded_bytes", "useful_bytes", "amplification", "peak_rss_bytes"}
FIELDS = {"engine", "store", "ranks", "mesh", "checksum", *SIZES}
ENGINES = ("jigsaw", "jigsaw-independent", "zarr", "xarray", "full-read-then-slice")
STORES = ("wb2", "level", "tiles", "shard")


def script():
    spec = importlib.util.spec_from_file_location("read_benchmark", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("stores")
    for store in STORES:
        script().make_store(made / f"{store}-small.zarr", store, small=True)
    return made


def body(folder, cases):
    mesh = {"lat": 2, "lon": 2}
    paths = {store: f"{folder}/{store}-small.zarr" for store in STORES}
    made = [
        {"engine": engine, "store": store, "path": paths[store], "mesh": mesh, "repeat": 1, "small": True}
        for engine, store in cases
    ]
    return [script().run_case(case, world_mesh(**mesh)) for case in made]


def test_every_engine_reads_the_same(folder):
    found = run_on_ranks(4, body, str(folder), [(engine, "wb2") for engine in ENGINES])[0]
    assert all(set(case) == FIELDS for case in found)
    assert len({case["checksum"] for case in found}) == 1
    assert [case["amplification"] for case in found] == [1.0, 4.0, 4.0, 4.0, 4.0]
    sample = 2 * 4 * 13 * 73 * 144 * 4
    assert {case["useful_bytes"] for case in found} == {sample}
    assert found[0]["decoded_bytes"] == sample


def test_every_store_holds_the_same(folder):
    found = run_on_ranks(4, body, str(folder), [("jigsaw", store) for store in STORES])[0]
    assert len({case["checksum"] for case in found}) == 1
    assert [case["amplification"] for case in found[:2]] == [1.0, 1.0]
    assert all(case["amplification"] <= 1.2 for case in found)


def test_the_command(folder):
    command = [sys.executable, str(SCRIPT), "--small", "--ranks", "1", "--data", str(folder), "--engine", "jigsaw"]
    done = subprocess.run([*command, "--store", "wb2"], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    (case,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert set(case) == FIELDS and case["mesh"] == {"lat": 1}
