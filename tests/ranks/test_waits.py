"""How long ranks wait for each other, and what those are told that wait in vain."""

import hashlib
import importlib
import re
import sys
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from ranks_apart import ROOT, run_apart
from torch.distributed.device_mesh import init_device_mesh

from jigsaw.errors import ShardingError
from jigsaw.ranks.mesh import flat_submesh, init_mesh, mesh_patience
from jigsaw.ranks.waiting_ranks import let_threads_rest, runs_of_ranks
from jigsaw.testing import on_ranks


@pytest.mark.slow
def test_a_mesh_by_itself_waits_for_five_minutes(tmp_path):
    code = """
from jigsaw.ranks.mesh import mesh_patience
join_alone = jigsaw.init_mesh(device="cpu", lat=1)
print("waits", mesh_patience(join_alone).total_seconds())
print("waits", mesh_patience(jigsaw.init_mesh(device="cpu", lat=1, timeout=7)).total_seconds())
"""
    ((status, told),) = run_apart(tmp_path, 1, code)
    assert (status, told.split()) == (0, ["waits", "300.0", "waits", "7.0"])


@on_ranks(4)
def test_all_groups_of_a_mesh_wait_alike():
    """Those of the axes, and the one that several axes are joined by: torch gives each new group its own 30 minutes."""
    of_the_job = mesh_patience(init_mesh(device="cpu", lat=4))
    assert of_the_job == timedelta(hours=1)
    mesh = init_mesh(device="cpu", data=1, lat=2, lon=2)
    assert {mesh_patience(mesh[name]) for name in ("lat", "lon")} == {of_the_job}
    assert mesh_patience(flat_submesh(mesh, ("lat", "lon"))) == of_the_job
    try:
        mesh = init_mesh(device="cpu", lat=2, lon=2, timeout=timedelta(minutes=2))
        assert {mesh_patience(m) for m in (mesh, mesh["lat"], mesh["lon"])} == {timedelta(minutes=2)}
    finally:
        init_mesh(device="cpu", lat=2, lon=2, timeout=of_the_job)


@on_ranks(2)
def test_a_mesh_of_ones_own_says_how_long_its_ranks_wait():
    before = mesh_patience(init_mesh(device="cpu", lat=2))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("lat",))
    assert mesh_patience(mesh) == before
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=40), mesh.get_group("lat"))
    assert mesh_patience(mesh) == timedelta(seconds=40)
    dist.distributed_c10d._set_pg_timeout(before, mesh.get_group("lat"))


@pytest.mark.parametrize("timeout", [0, -1.5, timedelta(0), float("inf"), float("nan"), "5 minutes", True])
def test_a_timeout_that_is_no_time(timeout):
    with pytest.raises(ShardingError, match=r"timeout=.* must be a time above 0: seconds, or a datetime\.timedelta"):
        init_mesh(device="cpu", lat=1, timeout=timeout)


@given(st.lists(st.integers(0, 60), unique=True))
def test_runs_are_the_ranks_in_their_order(ranks):
    assert [rank for run in runs_of_ranks(ranks) for rank in range(*run)] == ranks


def test_an_axis_of_thousands_of_ranks_is_one_run():
    assert runs_of_ranks(range(4096)) == [(0, 4096, 1)]
    assert runs_of_ranks(range(7, 4096, 64)) == [(7, 4040, 64)]


CALLS = {
    "agree": "comm.all_gather_object(mesh, 3)",
    "rows": 'comm.swap_messages(mesh, [], [(1, torch.ones(3))], "rows").wait()',
    "all_reduce": 'comm.start_sum(torch.ones(3), mesh, "lat").wait()',
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", CALLS)
def test_a_rank_that_waits_in_vain_is_told_for_what(tmp_path, kind):
    """Rank 1 never comes; rank 0 is told after the time that its mesh waits, not after torch's half an hour."""
    code = f"""
from jigsaw import comm
from jigsaw.ranks.waiting_ranks import WaitError
join()
mesh = jigsaw.init_mesh(device="cpu", lat=2, timeout=1.5)
if rank == 0:
    try:
        {CALLS[kind]}
    except WaitError as e:
        print("told:", e)
    open(folder + "/told", "w")
while not os.path.exists(folder + "/told"):
    time.sleep(0.1)
os._exit(0)
"""
    told = run_apart(tmp_path, 2, code)[0][1]
    assert f"told: {kind} waited " in told, told
    assert "s for ranks [1]: they have ended, or do not answer; init_mesh(timeout=) says how long ranks wait" in told


# Rank 2 leaves the loop, and the others enter it; then one rank makes a mistake of its own.
APART = """
import torch.nn as nn
join()
mesh = jigsaw.init_mesh(device="cpu", lat=3, timeout=6)
if True:
    class Net(nn.Module):
        def forward(self, x):
            return x.mean()
    x = jigsaw.shard(torch.ones(7, 4), mesh, ("lat", None))
    net = Net()
    net(x)
    def leave_and_sleep():
        {rank_2}
    if rank == 2:
        leave_and_sleep()
    try:
        net(x)
    except Exception as e:
        print("told:", e, flush=True)
        {after}
"""


@pytest.mark.slow
def test_all_that_wait_are_told_the_function_the_module_the_line_and_who_is_missing(tmp_path):
    stay = 'open(f"{folder}/told{rank}.done", "w"); [time.sleep(0.1) for _ in range(50)]; os._exit(0)'
    told = run_apart(tmp_path, 3, APART.format(rank_2="time.sleep(16); os._exit(0)", after=stay))
    for _, said in told[:2]:
        assert "all_reduce waited" in said, said
        assert "init_mesh(timeout=) says how long ranks wait; this was in mean, Net > /" in said, said
        (which,) = [entry for entry in said.split("; ") if "missing: rank" in entry]
        assert which.startswith("missing: rank 2, which was at /"), said
        at = int(re.search(r"body\.py:(\d+)", which).group(1))
        assert "time.sleep(16)" in (tmp_path / "body.py").read_text().splitlines()[at - 1]


@pytest.mark.slow
def test_a_rank_that_raises_ends_the_others_with_what_it_said(tmp_path):
    told = run_apart(tmp_path, 3, APART.format(rank_2='raise ValueError("no such field")', after="raise"))
    for _, said in told[:2]:
        assert "the first to fail was rank 2: ValueError: no such field" in said, said


@pytest.mark.slow
def test_a_stage_that_raises_ends_the_pipeline_with_its_own_words(tmp_path):
    code = """
from torch import nn
import torch.nn.functional as F
join()
mesh = jigsaw.init_mesh(device="cpu", pipe=2, timeout=20)

class Breaks(nn.Conv2d):
    calls = 0

    def forward(self, x):
        self.calls += rank == 1 and not isinstance(x.local, torch._subclasses.FakeTensor)
        if self.calls > 1:
            raise ValueError("the second microbatch is too hot")
        return super().forward(x)

x = torch.ones(4, 2, 4, 4)
pipe = jigsaw.pipeline(nn.Sequential(nn.Conv2d(2, 2, 1), Breaks(2, 2, 1)), mesh, loss=F.mse_loss, microbatches=4)
pipe.step(x, x)
"""
    (_, waited), (_, failed) = run_apart(tmp_path, 2, code)
    assert "ValueError: the second microbatch is too hot" in failed and "RuntimeError" not in failed
    assert "WaitError: a step of a pipeline waited" in waited and "for ranks [1]" in waited, waited
    assert "the first to fail was rank 1: ValueError: the second microbatch is too hot" in waited, waited


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "fault", "failing"),
    [
        (
            "load",
            "raises",
            1,
        ),  # rank 2 waits for rank 0 alone, which ends by the error of rank 1, and with it the store
        ("read of a sample", "raises", 1),
        ("statistics", "raises", 1),
        ("statistics", "silent", 0),  # the store, whose keeper is stopped, never answers
        ("backward pass, cut weights", "raises", 0),  # in messages of FSDP2
        ("blocks of gradients", "silent", 0),  # of which gloo closes the pairs
        ("step of a pipeline", "raises", 0),
        ("halos", "memory runs out", 1),  # no memory is left for the thread that tells others
    ],
)
def test_what_others_are_told_of_a_failure(monkeypatch, work, fault, failing):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    wait = 8.0 if fault == "silent" else 30.0
    seen = importlib.import_module("failures").seen(work, fault, wait, failing)
    assert seen["names_it"] and seen.get("tells_why", True), seen
    assert seen["seconds"] < 30, "as long as ranks wait for one that they know to have failed"


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells which threads run on Linux alone")
def test_the_end_waits_for_threads_that_still_run():
    done = []

    def work():
        for _ in range(8):
            hashlib.sha256(bytes(4_000_000))  # works without the interpreter
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    let_threads_rest()
    assert done == [True]
    thread.join()
