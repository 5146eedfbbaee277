"""Ranks that srun and mpirun start: the variables that they set, in processes of their own."""

from __future__ import annotations

import os
import pty
import random
import socket
import subprocess
import sys
import threading
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from jigsaw.errors import ShardingError
from jigsaw.ranks import restart_store
from jigsaw.ranks.launcher import torchrun_variables
from jigsaw.testing.check import JobPlace, check_nodes

ROOT = Path(__file__).parents[2]
SUM = """
import os, jigsaw, torch, torch.distributed as dist
mesh = jigsaw.init_mesh(lat=-1)
total = torch.tensor(dist.get_rank() + 1)
dist.all_reduce(total)
print("mesh", mesh.shape, "total", int(total), flush=True)
os._exit(0)  # how a process ends whose gloo has just worked is not asked here
"""


def step(rank=0, ranks=2, **more):
    """What srun gives a task, as far as it is read; Slurm 23.11."""
    given = {
        "SLURM_JOB_ID": "4711", "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_NTASKS": str(ranks),
        "SLURM_STEP_NUM_TASKS": str(ranks), "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
        "SLURM_NODEID": "0", "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_TASKS_PER_NODE": str(ranks),
    }  # fmt: skip
    return given | more


def started(code, given):
    """A process with these variables and none of another launcher."""
    ours = ("RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "JIGSAW_JOB")
    clean = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    env = clean | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"} | given
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=subprocess.STDOUT, text=True
    )


def told(code, *environments):
    """What each of several processes printed; they have all ended well."""
    processes = [started(code, given) for given in environments]
    try:
        printed = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * len(processes), printed
    return printed


def free_job():
    """A job whose port nobody listens on, nor is likely to: other runs of these tests may be under way."""
    for job in random.SystemRandom().sample(range(10000), 100):
        with socket.socket() as tried:
            if tried.connect_ex(("127.0.0.1", 15000 + job)):
                return str(job)
    raise AssertionError("no port is free")


def test_tasks_of_srun_are_ranks_of_one_job():
    job = free_job()
    printed = told(SUM, *(step(rank, SLURM_JOB_ID=job) for rank in range(2)))
    assert ["mesh (2,) total 3" in text for text in printed] == [True, True], printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "given",
    [
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4"},
        {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
        step(0, 4, SLURM_STEP_ID=str(2**32 - 6), SLURM_STEPID=str(2**32 - 6)),
        step(0, 4, SLURM_STEP_NUM_TASKS="1"),
    ],
    ids=["salloc", "batch script", "salloc with an interactive step", "one task of the job's four"],
)
def test_what_slurm_runs_without_tasks_is_alone(given):
    assert torchrun_variables(given) == {}
    assert "mesh (1,) total 1" in told(SUM, given)[0]


@pytest.mark.slow
def test_ranks_of_mpirun_meet_where_they_are_told():
    job = free_job()
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(15000 + int(job))}
    names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK")
    ranks = [{"OMPI_COMM_WORLD_SIZE": "2", **dict.fromkeys(names, str(rank)), **where} for rank in range(2)]
    assert all("mesh (2,) total 3" in text for text in told(SUM, *ranks))


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"}, "mpirun"),
        ({"PMI_RANK": "1", "PMI_SIZE": "4", "MASTER_PORT": "29500"}, "mpirun"),
        ({**step(0, 1), "PMI_RANK": "1", "PMI_SIZE": "4"}, "mpirun"),
        (step(1, 4, SLURM_HET_SIZE="2"), "srun"),
        (step(1, 4, SLURM_STEP_NODELIST=""), "srun"),
    ],
    ids=["Open MPI", "MPICH", "MPICH inside a step", "heterogeneous job", "no nodes"],
)
def test_ranks_that_cannot_find_each_other(given, named):
    what = rf"{named} started this process as rank 1 of 4, and they do not know where to meet; set MASTER_ADDR to"
    with pytest.raises(ShardingError, match=what):
        torchrun_variables(given)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu3", "gpu3"),
        ("tux[007-09,12],gpu1", "tux007"),
        ("n[4],m", "n4"),
        ("a[1-2]b[5,9]-ib", "a1b5-ib"),
        ("a,b", "a"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert torchrun_variables(step(SLURM_STEP_NODELIST=nodes))["MASTER_ADDR"] == first
    without = {k: v for k, v in step().items() if k != "SLURM_STEP_NODELIST"}
    assert torchrun_variables(without | {"SLURM_NODELIST": nodes})["MASTER_ADDR"] == first


def test_variables_of_a_step_of_three_nodes():
    here = step(9, 11, SLURM_LOCALID="1", SLURM_NODEID="2", SLURM_STEP_TASKS_PER_NODE="4(x2),3", SLURM_STEP_ID="2")
    assert torchrun_variables(here) == {
        "RANK": "9", "WORLD_SIZE": "11", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "localhost",
        "MASTER_PORT": "19913", "JIGSAW_JOB_SECRET": f"slurm - 4711 2 {os.getuid()}",
    }  # fmt: skip
    told = torchrun_variables(here | {"MASTER_ADDR": "head", "MASTER_PORT": "29500"})
    assert (told["MASTER_ADDR"], told["MASTER_PORT"]) == ("head", "29500")


def test_torchrun_and_srun_that_speaks_pmi():
    assert torchrun_variables(step() | {"RANK": "0", "WORLD_SIZE": "8"}) == {}
    assert torchrun_variables(step(1) | {"PMI_RANK": "1", "PMI_SIZE": "2"})["MASTER_ADDR"] == "localhost"


def test_a_variable_that_is_no_number():
    with pytest.raises(ShardingError, match=r"the environment has SLURM_PROCID='zero', which should be a number"):
        torchrun_variables(step() | {"SLURM_PROCID": "zero"})


def test_a_terminal_in_a_step_of_several_tasks(monkeypatch):
    master, terminal = pty.openpty()
    with os.fdopen(terminal) as stdin:
        monkeypatch.setattr(sys, "stdin", stdin)
        with pytest.raises(ShardingError, match=r"a terminal in a step of 4 tasks, .* by srun --ntasks=1 --pty"):
            torchrun_variables(step(0, 4))
        assert torchrun_variables(step(0, 1)) == {}
    os.close(master)


# -- jobs that meet at one port --------------------------------------------------------------------------------------

HOLD = SUM.replace("os._exit(0)", "print('joined', flush=True); import time; time.sleep(100)")


def ended(process):
    """The output and exit status of a process that must end by itself, long before the mesh's time-out."""
    try:
        printed = process.communicate(timeout=100)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return printed, process.returncode


@pytest.mark.slow
def test_a_second_job_at_the_same_port_is_refused_and_the_first_goes_on():
    """Numbers of jobs repeat modulo 10,000; whichever rank of the second comes, it is told at once."""
    job = free_job()
    second = {"SLURM_JOB_ID": str(int(job) + 10000)}
    assert (
        torchrun_variables(step(**second))["MASTER_PORT"] == torchrun_variables(step(SLURM_JOB_ID=job))["MASTER_PORT"]
    )
    first = [started(HOLD, step(0, SLURM_JOB_ID=job))]
    try:
        # while the first waits for its own rank 1, a rank 1 of another job comes
        early, status = ended(started(SUM, step(1, **second)))
        assert status and "the store of another job, which has another secret" in early and "MASTER_PORT" in early
        first.append(started(HOLD, step(1, SLURM_JOB_ID=job)))
        for process in first:
            assert "total 3" in process.stdout.readline()
        for rank, said in enumerate(["rank 0 cannot listen at localhost, port", "the store of another job"]):
            late, status = ended(started(SUM, step(rank, **second)))
            assert status and "ShardingError" in late and said in late, late
        assert [process.poll() for process in first] == [None, None]
    finally:
        for process in first:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("secrets", [("one", "two"), ("one", None)])
def test_another_secret_is_refused_within_one_numbering(secrets):
    job = free_job()
    given = [
        step(rank, SLURM_JOB_ID=job) | ({"JIGSAW_JOB_SECRET": secret} if secret else {})
        for rank, secret in enumerate(secrets)
    ]
    first = started(HOLD, given[0])
    try:
        printed, status = ended(started(SUM, given[1]))
        assert status and "which has another secret (JIGSAW_JOB_SECRET" in printed
        assert "one" not in printed.partition("ShardingError")[2].split()  # secrets are not shown
    finally:
        first.kill()
        first.wait()


def test_a_store_that_proves_nothing_is_refused(monkeypatch):
    monkeypatch.setattr(restart_store, "_KEEPER_PATIENCE", timedelta(seconds=1))
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "RANK": "1", "WORLD_SIZE": "2"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ShardingError, match=r"listens at 127\.0\.0\.1, port \d+ is the store of another job, or of a"):
        restart_store.joined_job_store("mine", timedelta(seconds=60))
    store.set("jigsaw.start/keeper", "salt and what is no proof")
    with pytest.raises(ShardingError, match="which has another secret"):
        restart_store.joined_job_store("mine", timedelta(seconds=60))


@contextmanager
def _listener(answer):
    """A program that takes connections and is not a store; it says nothing, says something else, or hangs up."""
    listener, taken = socket.create_server(("127.0.0.1", 0)), []

    def serve():
        with suppress(OSError):  # of `accept`, once nobody listens any more
            while True:
                connection, _ = listener.accept()
                taken.append(connection)
                if answer is None:
                    connection.close()
                else:
                    with suppress(OSError):  # who called may have hung up
                        connection.sendall(answer)

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield listener.getsockname()
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        server.join()
        for connection in [listener, *taken]:
            connection.close()
        for thread in threading.enumerate():  # in torch, which tries again until its time is over
            if thread.name == "jigsaw-join":
                thread.join(30)


@pytest.mark.parametrize(
    "answer",
    [b"", *(pytest.param(words, marks=pytest.mark.slow) for words in (b"HTTP/1.1 400 Bad Request\r\n\r\n", None))],
)
def test_what_listens_and_is_no_store_is_refused(monkeypatch, answer):
    """Torch waits without end for a listener that says nothing."""
    monkeypatch.setattr(restart_store, "_KEEPER_PATIENCE", timedelta(seconds=1))
    with _listener(answer) as (host, port):
        for name, value in {"MASTER_ADDR": host, "MASTER_PORT": port, "RANK": 1, "WORLD_SIZE": 2}.items():
            monkeypatch.setenv(name, str(value))
        others = r"listens at 127\.0\.0\.1, port \d+ is the store of another job, or of a"
        with pytest.raises(ShardingError, match=others):
            restart_store.joined_job_store("mine", timedelta(seconds=3))
        place = JobPlace(rank=1, ranks=2, host=host, port=port, is_kept=False)
        (wrong,) = check_nodes(place, {"host": "here"}, 4)
        assert "what listens there is not the store of rank 0" in wrong


@pytest.mark.parametrize("patience", [15, 0.1], ids=["torch gives up first", "torch may still try"])
def test_a_store_that_nobody_keeps_is_waited_for(patience):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(dist.DistNetworkError, match=r"nobody listens at 127\.0\.0\.1, port \d+, after 1 s"):
        restart_store.store_that_answers("127.0.0.1", port, 2, timedelta(seconds=1), timedelta(seconds=patience))


@pytest.mark.parametrize(
    ("host", "is_far", "bound"), [("127.0.0.2", False, "127.0.0.2"), ("127.0.0.1", True, "0.0.0.0")]
)
def test_the_store_listens_at_the_address_of_its_host_alone(host, is_far, bound):
    with restart_store._listen_at(host, 0, is_far) as listener:
        assert listener.getsockname()[0] == bound


@settings(max_examples=200)
@drawn(
    st.binary(max_size=60),
    st.lists(st.text(st.characters(exclude_characters=" ", codec="utf-8")), max_size=3),
    st.binary(max_size=60),
)
def test_a_proof_is_for_its_key_and_words_alone(key, words, other):
    """Which have no spaces where ranks say them: numbers and hexadecimal digits."""
    proof = restart_store._proof(key, *words)
    assert (restart_store._proof(other, *words) == proof) == (other.rstrip(b"\0") == key.rstrip(b"\0") or other == key)
    assert restart_store._proof(key, *words, "more") != proof


_LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 1000))
from jigsaw.ranks.launcher import allow_open_files
keeps_store, connects_late = (word == "True" for word in sys.argv[1:3])
for ranks in map(int, sys.argv[3:]):
    try:
        allow_open_files(ranks, keeps_store, connects_late)
    except ValueError:
        print(ranks, "refused")
    else:
        print(ranks, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("keeps_store", "connects_late", "limits"),
    [
        (False, False, ["16 200", "100 1000", "500 1000", "1000 refused"]),
        (True, False, ["10 200", "100 1000", "290 1000", "300 refused"]),
        (False, True, ["4096 200"]),
        (True, True, ["290 1000", "300 refused"]),  # all ranks talk with the first
    ],
)
def test_the_limit_of_open_files_is_raised_for_many_ranks_alone(keeps_store, connects_late, limits):
    words = [keeps_store, connects_late, *(line.split()[0] for line in limits)]
    ran = subprocess.run([sys.executable, "-c", _LIMITED, *map(str, words)], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines() == limits


def test_a_mesh_of_more_ranks_than_open_files_is_refused_before_it_waits():
    limited = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 1000)); "
    code = limited + "import jigsaw; jigsaw.init_mesh(lat=-1, device='cpu')"
    job = {"RANK": "0", "WORLD_SIZE": "4096", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    command, environment = [sys.executable, "-c", code], {**os.environ, **job}
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ran.returncode
    assert "ShardingError: a job of 4096 ranks" in ran.stderr
    assert "raise the hard limit to 20608 or more" in ran.stderr


DIFFERENT = [
    ("lat=2", "lat=2", None),
    ("lat=2", "lon=2", "different meshes: rank 0: init_mesh(lat=2, device='cpu'); rank 1: init_mesh(lon=2, "),
    ("lat=2", "lat=3", "different meshes: "),
    ("lat=2, backend='gloo'", "lat=2, backend='cpu:gloo'", "start in different ways: rank "),
]


@pytest.mark.parametrize(("first", "second", "words"), DIFFERENT)
def test_ranks_that_start_in_different_ways_are_all_told(first, second, words):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    job = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    codes = [f"import jigsaw; jigsaw.init_mesh({arguments}, device='cpu')" for arguments in (first, second)]
    ranks = [
        subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True, env={**job, "RANK": str(n)})
        for n, code in enumerate(codes)
    ]
    errors = [rank.communicate(timeout=120)[1] for rank in ranks]
    if words is None:
        assert [rank.returncode for rank in ranks] == [0, 0]
    else:
        assert all("RanksDifferError: ranks of one job" in error and words in error for error in errors)
