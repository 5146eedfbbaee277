"""How long ranks wait for each other, and what those are told that wait in vain."""

from datetime import timedelta

import pytest
import torch.distributed as dist
from ranks_apart import run_apart
from torch.distributed.device_mesh import init_device_mesh

from jigsaw.cut import ShardingError
from jigsaw.mesh import flat_submesh, init_mesh, mesh_patience
from jigsaw.testing import on_ranks


def test_a_mesh_by_itself_waits_for_five_minutes(tmp_path):
    code = """
from jigsaw.mesh import mesh_patience
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
join()
mesh = jigsaw.init_mesh(device="cpu", lat=2, timeout=1.5)
if rank == 0:
    try:
        {CALLS[kind]}
    except comm.WaitError as e:
        print("told:", e)
    open(folder + "/told", "w")
while not os.path.exists(folder + "/told"):
    time.sleep(0.1)
os._exit(0)
"""
    told = run_apart(tmp_path, 2, code)[0][1]
    assert f"told: {kind} waited " in told, told
    assert "s for ranks [1]: they have ended, or do not answer; init_mesh(timeout=) says how long ranks wait" in told
