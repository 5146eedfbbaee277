"""The world of ranks: bodies run, worlds are reused, and every way to fail is told with its own cause first."""

from __future__ import annotations

import ast
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from datetime import timedelta

import pytest
import scipy.stats
import torch
import torch.distributed as dist

from jigsaw.ranks.mesh import init_mesh, mesh_patience
from jigsaw.testing import RankFailedError, on_ranks, run_on_ranks, world_mesh
from jigsaw.testing.world import _live_world


@on_ranks(3)
def _gathered(value):
    parts = [torch.empty(2) for _ in range(3)]
    dist.all_gather(parts, torch.full((2,), float(dist.get_rank() + value)))
    return torch.stack(parts)


@on_ranks(2)
def _pid():
    return os.getpid()


@on_ranks(2, timeout=20)
def _fails_on(rank, how):
    if dist.get_rank() == rank:
        wanted = 3
        if how == "raise":
            raise KeyError(f"no such thing as {wanted}")
        if how == "exit":
            os._exit(7)
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "assert":
            assert wanted == 4
    dist.all_reduce(torch.ones(1))


@on_ranks(2, timeout=4)
def _hangs():
    if dist.get_rank() == 0:
        dist.all_reduce(torch.ones(1))
    else:
        _sleep_for_ever()


def _sleep_for_ever():
    time.sleep(1000)


@on_ranks(3)
def _all_raise():
    raise ValueError("a global fact")


@on_ranks(2)
def _returns_a_lambda():
    return lambda: 0


@on_ranks(2)
def _skips():
    pytest.skip("not here")


@on_ranks(2)
def _draws():
    torch.set_default_dtype(torch.float64)
    return torch.rand(3), torch.get_default_dtype()


@on_ranks(2)
def _default_dtype():
    return torch.get_default_dtype()


@on_ranks(2)
def _makes_a_group():
    group = dist.new_group([0, 1])
    total = torch.ones(1)
    dist.all_reduce(total, group=group)
    gc.collect()
    return total.item(), len(os.listdir("/proc/self/fd"))


def _plain(a, b=0):
    return a + b + dist.get_rank()


def test_each_rank_returns_its_value():
    for gathered in _gathered(5):
        assert gathered.tolist() == [[5.0, 5.0], [6.0, 6.0], [7.0, 7.0]]


@pytest.mark.slow
def test_run_on_ranks_takes_any_module_level_function():
    assert run_on_ranks(2, _plain, 10, b=5) == [15, 16]


def test_a_world_is_reused():
    first = _pid()
    assert _pid() == first
    assert len(set(first)) == 2
    assert os.getpid() not in first


@pytest.mark.slow
@pytest.mark.parametrize("size", [7, 10])
@on_ranks(4)
def test_parameters_and_fixtures_reach_the_ranks(size, tmp_path):
    assert size in (7, 10)
    (tmp_path / f"{dist.get_rank()}.txt").write_text(str(size))
    dist.barrier()
    assert len(list(tmp_path.iterdir())) == 4


class TestInAClass:
    @on_ranks(1)
    def test_methods_work(self):
        assert type(self).__name__ == "TestInAClass"
        assert dist.get_world_size() == 1


@on_ranks(4)
def test_a_mesh_is_made_once():
    mesh = world_mesh(lat=2, lon=2)
    assert mesh is world_mesh(lat=2, lon=2)
    assert mesh.mesh_dim_names == ("lat", "lon")
    assert tuple(mesh.get_coordinate()) == divmod(dist.get_rank(), 2)


def test_every_body_starts_with_the_same_seed_and_dtype():
    (a, dtype), (b, _) = _draws()
    assert torch.equal(a, b)
    assert dtype == torch.float64
    assert _default_dtype() == [torch.float32, torch.float32]
    assert torch.equal(_draws()[0][0], a)


@on_ranks(2)
def _draws_from_global_states():
    return float(scipy.stats.norm.rvs()), random.random()  # numpy's and Python's


def test_every_body_starts_with_the_same_global_states():
    first, second = _draws_from_global_states()
    assert first == second
    assert _draws_from_global_states()[0] == first


@on_ranks(2)
def _wait_before_and_after(minutes):
    before = mesh_patience(world_mesh(lat=2))
    init_mesh(device="cpu", lat=2, timeout=timedelta(minutes=minutes))
    return before, mesh_patience(world_mesh(lat=2))


def test_every_body_starts_with_the_same_time_out():
    (before, after), _ = _wait_before_and_after(7)
    assert (before, after) == (timedelta(hours=1), timedelta(minutes=7))
    assert _wait_before_and_after(8)[0][0] == before


def test_a_failing_rank_shows_its_own_traceback_first():
    with pytest.raises(RankFailedError) as info:
        _fails_on(1, "raise")
    message = str(info.value)
    assert message.startswith("_fails_on failed on rank 1 of 2:\n\nTraceback")
    assert 'raise KeyError(f"no such thing as {wanted}")' in message
    assert "rank 0: still running when the other failed; killed" in message
    assert isinstance(info.value.__cause__, KeyError)


@pytest.mark.slow
def test_a_failed_assertion_shows_the_locals():
    with pytest.raises(RankFailedError, match=r"(?s)assert wanted == 4.*locals of _fails_on:.*wanted = 3"):
        _fails_on(0, "assert")


@pytest.mark.slow
@pytest.mark.parametrize(("how", "words"), [("exit", "exit code 7"), ("kill", "killed by SIGKILL")])
def test_a_dying_rank_is_the_cause_whatever_its_neighbors_say(how, words):
    with pytest.raises(
        RankFailedError, match=rf"failed on rank 0 of 2:\n\nthe process of rank 0 ended without a word \({words}\)"
    ):
        _fails_on(0, how)


@pytest.mark.slow
def test_a_hang_shows_every_ranks_stack():
    _pid()  # the ranks import this file, which takes its time
    with pytest.raises(RankFailedError, match=r"still running after 4 s") as info:
        _hangs()
    assert "all_reduce" in str(info.value)
    assert "_sleep_for_ever" in str(info.value)


@pytest.mark.slow
def test_the_same_error_everywhere_is_told_once():
    with pytest.raises(RankFailedError, match=r"(?s)ValueError: a global fact.*the same on ranks \d, \d$") as info:
        _all_raise()
    assert str(info.value).count("Traceback") == 1
    assert len(info.value.failures) == 3


@pytest.mark.slow
def test_after_a_failure_the_next_test_has_a_fresh_world():
    before = _pid()
    with pytest.raises(RankFailedError):
        _fails_on(1, "raise")
    after = _pid()
    assert not set(before) & set(after)
    for pid in before:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.slow
@pytest.mark.nightly
def test_groups_left_behind_are_closed_in_time():
    told = [_makes_a_group()[0] for _ in range(100)]
    assert all(total == 2.0 for total, _ in told)
    files = [count for _, count in told]
    assert files[-1] < max(files)


def test_what_does_not_pickle_is_named():
    with pytest.raises(TypeError, match=r"_gathered: 'argument 0' \(function\) does not pickle.*pass plain values"):
        _gathered(lambda: 0)
    with pytest.raises(RankFailedError, match="_returns_a_lambda returned a function that does not pickle"):
        _returns_a_lambda()


def test_a_body_must_be_importable():
    with pytest.raises(ValueError, match="on_ranks needs a function at module level"):
        on_ranks(2)(lambda: 0)


def test_a_world_has_ranks():
    with pytest.raises(ValueError, match=r"on_ranks\(0\): a world has at least 1 rank"):
        run_on_ranks(0, _plain, 1)


@pytest.mark.slow
def test_a_world_inside_a_rank_is_refused():
    with pytest.raises(RankFailedError, match=r"on_ranks\(1\) was called inside a rank"):
        run_on_ranks(2, run_on_ranks, 1, _plain, 1)


@pytest.mark.slow
def test_a_skip_is_a_skip():
    with pytest.raises(pytest.skip.Exception, match="not here"):
        _skips()


@pytest.mark.slow
def test_ranks_end_with_their_parent(tmp_path):
    """A parent killed without a chance to clean up leaves no process, even when its ranks hang in a collective, or when
    they rest because another world was used last.
    """
    (tmp_path / "bodies.py").write_text(
        textwrap.dedent("""
        import os, pathlib, sys
        import torch, torch.distributed as dist

        def hang(folder):
            (pathlib.Path(folder) / f"pid{os.getpid()}").touch()
            if dist.get_rank() == 0:
                dist.all_reduce(torch.ones(1))
            dist.barrier() if dist.get_rank() == 5 else __import__("time").sleep(1000)

        def rest(folder):
            (pathlib.Path(folder) / f"pid{os.getpid()}").touch()
        """)
    )
    script = (
        f"from jigsaw.testing import run_on_ranks\nimport bodies\nrun_on_ranks(3, bodies.rest, {str(tmp_path)!r})\n"
        f"run_on_ranks(2, bodies.hang, {str(tmp_path)!r})"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=tmp_path)
    pids = _wait_for(lambda: [int(f.name[3:]) for f in tmp_path.glob("pid*")], 5)
    assert [_state(p) for p in pids].count("T") == 2
    parent.kill()
    parent.wait()
    _wait_for(lambda: [p for p in pids if not _exists(p)], 5)


def _rank_and_sum():
    ranks = torch.ones(1)
    dist.all_reduce(ranks)
    return dist.get_rank(), int(ranks)


def test_a_world_rests_while_another_works():
    world = _live_world(3)
    assert run_on_ranks(3, _rank_and_sum) == [(0, 3), (1, 3), (2, 3)]
    assert run_on_ranks(2, _rank_and_sum) == [(0, 2), (1, 2)]
    assert [_state(p) == "T" for p in world.pids] == [False, True, True]
    assert run_on_ranks(3, _rank_and_sum) == [(0, 3), (1, 3), (2, 3)]
    assert _live_world(3) is world


@pytest.mark.slow
def test_a_world_is_alive_until_killed():
    world = _live_world(2)
    assert world.alive
    pids = world.pids
    world.kill()
    assert not world.alive
    assert set(_pid()).isdisjoint(pids)


def _wait_for(find, count):
    end = time.monotonic() + 120
    while time.monotonic() < end:
        found = find()
        if len(found) == count:
            return found
        time.sleep(0.05)
    raise AssertionError(f"waited in vain for {count}, got {found}")


def _exists(pid):
    return _state(pid) not in ("", "Z")


def _state(pid):
    """The letter of a process's state in Linux, as T of one that is stopped; nothing where there is none."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return ""


@pytest.mark.slow
def test_a_script_that_is_called_by_way_of_another_folder(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "script.py").write_text(
        "import jigsaw.testing, torch.distributed as dist\n\n\ndef rank():\n    return dist.get_rank()\n\n\n"
        'if __name__ == "__main__":\n    print(jigsaw.testing.run_on_ranks(2, rank))\n'
    )
    ran = subprocess.run(
        [sys.executable, "../script.py"],
        cwd=tmp_path / "other",
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.stdout.strip() == "[0, 1]", ran.stderr


_MADE = """
import torch
from torch import nn
import jigsaw
from jigsaw.testing.played_device import make_tensors_on

make_tensors_on("meta")
made = {
    "own": torch.ones(2),
    "generated": torch.randn(2, generator=torch.Generator()),
    "module": nn.Linear(2, 2).weight,
    "told": torch.ones(2, device="cpu"),
    "of jigsaw": jigsaw.testing.oracle.random_functional(torch.ones(2, device="cpu")),
}
print({name: x.device.type for name, x in made.items()})
"""


def test_tensors_of_tests_are_made_on_the_device_and_jigsaws_are_not():
    found = subprocess.run([sys.executable, "-c", _MADE], capture_output=True, text=True, check=True, timeout=60).stdout
    assert ast.literal_eval(found) == {
        "own": "meta",
        "generated": "meta",
        "module": "meta",
        "told": "cpu",
        "of jigsaw": "cpu",
    }


@on_ranks(2, device="cpu", backend="gloo")
def test_a_world_of_a_kind_hides_gpus():
    assert not torch.cuda.is_available()
    assert world_mesh(lat=2).device_type == "cpu"
