"""Bytes that nobody wrote: what the reader makes of them is what the library makes of them, or a typed error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzz_targets import TARGETS
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

QUICK = {"deadline": None, "suppress_health_check": list(HealthCheck)}
edits = st.builds(lambda head, body: head + body, st.binary(min_size=3, max_size=3), st.binary(max_size=24))
# the same search every time; a longer one, from another seed, is `python tests/io/fuzz_targets.py hdf5 -seed=2`
SECONDS, RUNS, SEED = 40, 60_000, 1


@settings(max_examples=400, **QUICK)
@given(edits)
@example(bytes([0, 0, 255, 0, 0, 3, 0]))  # elements of 0 bytes
@example(bytes([3, 0, 255, 0, 0, 8, 1]))  # blocks of no whole number of elements
@example(bytes([0, 0, 255, 0, 0, 16, 1]))  # a block inside the table
@example(bytes([0, 0, 255, 0, 0, 19, 127]))  # a block beyond the frame
def test_blosc_frames_and_parts_of_them(data):
    TARGETS["blosc"](data)


@settings(max_examples=80, **QUICK)
@given(edits)
def test_shard_indices(data):
    TARGETS["shard"](data)


@settings(max_examples=400, **QUICK)
@given(edits)
@example(bytes.fromhex("0346464646464646460000040401"))  # a Zstandard frame that does not say its size
def test_hdf5_filters(data):
    TARGETS["hdf5"](data)


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_a_search_guided_by_coverage_finds_nothing(tmp_path, name):
    """In a process of its own: a crash is a failure too, and the input that caused it is in the message."""
    pytest.importorskip("atheris")  # has wheels for Linux on x86 alone
    corpus = Path(os.environ.get("JIGSAW_TEST_CORPUS", tmp_path)).resolve() / name  # that kept for the next search
    corpus.mkdir(parents=True, exist_ok=True)
    for i in range(64):
        (corpus / str(i)).write_bytes(bytes([i, 3 * i, 255 - i, 0, 0, i, 17 * i % 256]))
    command = [sys.executable, str(Path(__file__).with_name("fuzz_targets.py")), name, str(corpus)]
    search = [f"-max_total_time={SECONDS}", f"-runs={RUNS}", f"-seed={SEED}"]
    limits = [*search, "-max_len=64", "-timeout=20", "-rss_limit_mb=3000"]
    # netCDF4, where it is loaded here, names a folder of plugins that h5py's libhdf5 cannot use
    env = {name: value for name, value in os.environ.items() if name != "HDF5_PLUGIN_PATH"}
    env |= {"PYTHONPATH": str(Path(__file__).parents[2]), "PYTHONFAULTHANDLER": "1"}
    log = tmp_path / "log"
    with open(log, "wb") as file:
        done = subprocess.run(
            [*command, *limits, f"-artifact_prefix={corpus}/"],  # the next search tries it first
            stdout=file,
            stderr=file,
            timeout=SECONDS + 100,
            env=env,
            check=False,
        )
    told = log.read_text(errors="replace")
    found = {p.name: p.read_bytes().hex() for p in corpus.glob("*-*") if p.is_file()}
    assert done.returncode == 0, f"{found}\n{told[-4000:]}"
    assert "DONE" in told or "Done" in told, told[-4000:]
