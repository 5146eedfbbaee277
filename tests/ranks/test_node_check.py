"""`python -m jigsaw check` on several nodes: what is wrong is said, with what to do."""

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
from test_launcher import free_job, step, told

from jigsaw.testing.check import JobPlace, check_nodes, facts_of_node, place_in_job


def free_port():
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return tried.getsockname()[1]


def found_by(all_facts, ranks=None, port=None, seconds=20):
    """What each process finds; threads stand for them."""
    ranks, port = ranks or len(all_facts), port or free_port()
    places = [JobPlace(rank, ranks, "127.0.0.1", port) for rank in range(len(all_facts))]
    with ThreadPoolExecutor(len(places)) as pool:
        return list(pool.map(lambda place: check_nodes(place, all_facts[place.rank], seconds), places))


def test_nodes_are_compared(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    facts = facts_of_node(None)
    assert found_by([facts, facts]) == [[], []]
    older = {**facts, "torch": "1.0", "host": "old"}
    (wrong,), same = found_by([facts, older, facts])[:2]
    where = f"{facts['torch']} on ranks [0, 2] ({facts['host']}); 1.0 on ranks [1] (old)"
    assert wrong == f"torch must be the same on all, and readable: {where}"
    assert same == [wrong]
    lacking = {**facts, "store": facts_of_node(str(tmp_path / "none.zarr"))["store"]}
    assert "store must be the same on all, and readable: cannot be opened: " in found_by([lacking])[0][0]


@pytest.mark.slow
def test_who_does_not_come_is_named():
    facts = facts_of_node(None)
    assert found_by([facts], ranks=3, seconds=0.5) == [
        ["ranks [1, 2] of 3 did not come within 0.5 s; what do they say, on their nodes?"]
    ]
    (wrong,) = check_nodes(JobPlace(1, 2, "127.0.0.1", free_port()), facts, 1)
    assert "rank 1 on" in wrong and "cannot reach rank 0 at 127.0.0.1" in wrong and "firewall" in wrong
    (wrong,) = check_nodes(JobPlace(1, 2, "no-such-host.invalid", 1234), facts, 1)
    assert "rank 1 finds no address of 'no-such-host.invalid'" in wrong
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        (wrong,) = check_nodes(JobPlace(0, 2, "127.0.0.1", taken.getsockname()[1]), facts, 1)
    assert "rank 0 cannot listen at 127.0.0.1" in wrong and "set MASTER_PORT to another" in wrong


def test_the_place_of_a_process_in_its_job():
    assert place_in_job({}) is None
    assert place_in_job(step(1)) == JobPlace(1, 2, "localhost", 15000 + 4711)
    agent = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    assert place_in_job(agent | {"TORCHELASTIC_USE_AGENT_STORE": "True"}) == JobPlace(0, 2, "a", 5, True)


@pytest.mark.slow
def test_tasks_of_srun_check_their_nodes():
    code = "import sys; from jigsaw.__main__ import main; sys.exit(main(['check']))"
    job = free_job()
    first, second = told(code, *(step(rank, SLURM_JOB_ID=job) for rank in range(2)))
    assert "all 2 ranks reach each other, and have the same versions" in first
    assert "rank 1 of 2: host" in second and "WRONG" not in second
