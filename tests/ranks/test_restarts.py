"""A job that is killed, or asked to end, goes on from its last checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from two_hosts import FIRST_ADDRESS, linked_hosts, why_not_two_hosts

import jigsaw
from jigsaw.testing import on_ranks, world_mesh

ROOT = Path(__file__).parents[2]

# A small training that tells its losses, and is killed on rank 1 at the n-th place when it is started the n-th time.
TRAIN = """
import json, os, signal, sys, time
from pathlib import Path
import numpy as np, torch, torch.distributed as dist, xarray as xr
import jigsaw

torch.set_default_dtype(torch.float64)
folder, steps, places = Path(sys.argv[1]), 14, sys.argv[2].split(",")
mesh = jigsaw.init_mesh(lat=-1, device="cpu", timeout=30)
start = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
place = places[start] if start < len(places) and dist.get_rank() == 1 else ""
torch.manual_seed(5)

values = np.random.default_rng(0).normal(size=(9, 1, 13, 10))
data = xr.Dataset({"t": (("time", "level", "lat", "lon"), values)}, {
    "time": np.datetime64("2020-01-01") + np.arange(9) * np.timedelta64(6, "h"), "level": [500],
    "lat": np.linspace(60, -60, 13), "lon": np.arange(10) * 36.0})
samples = jigsaw.io.open(data, mesh=mesh, fields=["t@500"], inputs=[0], targets=[1], spec={"lat": "lat"})
loader = jigsaw.io.DataLoader(samples, batch_size=2, shuffle=True, seed=3)
model = torch.nn.Sequential(torch.nn.Conv2d(1, 6, 3, padding=1), torch.nn.Dropout(0.3), torch.nn.Conv2d(6, 1, 1))
model = jigsaw.parallelize(model.double(), mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
done = 0

def die(at, due):
    if place == at and due:
        if "LOSES_HOST" in os.environ:
            os.kill(os.getppid(), signal.SIGKILL)  # torchrun's agent
        os.kill(os.getpid(), signal.SIGKILL)

class Told(list):
    def state_dict(self):
        die("save", done >= 5 + start)
        return {"losses": list(self)}
    def load_state_dict(self, state):
        self[:] = state["losses"]

def opened(event, arguments):
    if event == "open" and "__1_0.distcp" in str(arguments[0]) and "step-" in str(arguments[0]):
        die("write", done >= 5 + start)

sys.addaudithook(opened)
model[0].register_forward_hook(lambda *_: die("forward", done == 4 + start))
model[0].weight.register_hook(lambda g: die("backward", done == 4 + start))
optimizer.register_step_post_hook(lambda *_: die("optimizer", done == 4 + start))
losses = Told()
state = dict(model=model, optimizer=optimizer, loader=loader, losses=losses, random=jigsaw.RandomState())
last = jigsaw.latest(folder / "saves")
if last:
    jigsaw.load(last, **state)
if dist.get_rank() == 0:
    print("begins at", len(losses), "start", start, flush=True)
with jigsaw.StopRequest(mesh) as stop:
    while len(losses) < steps and not stop.heard():
        for batch in loader:
            done = len(losses)
            loss = (model(batch.input[:, 0].double()) - batch.target[:, 0].double()).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            done = len(losses)
            if len(sys.argv) > 3:
                time.sleep(0.2)
            if stop.heard():
                break
            jigsaw.save(folder / "saves" / f"step-{done}", keep=2, wait=False, **state)
            if done == steps:
                break
jigsaw.save(folder / "saves" / f"step-{len(losses)}", keep=2, **state)
if dist.get_rank() == 0:
    print("ends at", len(losses), flush=True)
    (folder / "losses.json").write_text(json.dumps(losses))
dist.destroy_process_group()
"""


def _start(folder, ranks, places, *more, flags=(), within=(), **variables):
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(TRAIN)
    flags = ["--nproc-per-node", str(ranks), *(() if variables else ("--standalone",)), *flags]
    launch = ["-m", "torch.distributed.run", *flags] if ranks > 1 or variables else []
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", **variables}
    command = [*within, sys.executable, "-W", "ignore", *launch, str(folder / "train.py"), str(folder), places, *more]
    with (folder / "told").open("a") as out:
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)


def _ended(started, folder, seconds=260):
    try:
        status = started.wait(seconds)
    finally:
        started.kill()
    return status, (folder / "told").read_text()


def _losses(folder):
    return json.loads((folder / "losses.json").read_text())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The losses of one rank that nothing happens to."""
    folder = tmp_path_factory.mktemp("undisturbed")
    status, told = _ended(_start(folder, 1, "none"), folder)
    assert status == 0, told
    assert len(_losses(folder)) == 14
    return _losses(folder)


PLACES = ["forward", "backward", "optimizer", "save", "write"]


@pytest.mark.slow
@pytest.mark.parametrize("places", [["backward", "write"], pytest.param(PLACES, marks=pytest.mark.nightly)], ids=len)
def test_a_job_whose_rank_is_killed_goes_on_and_its_losses_are_those_of_a_job_without_faults(
    tmp_path, undisturbed, places
):
    started = _start(tmp_path, 2, ",".join(places), flags=("--max-restarts", "5"))
    status, told = _ended(started, tmp_path)
    assert status == 0, told
    begun = [line.split()[2:5:2] for line in told.splitlines() if line.startswith("begins at")]
    assert [int(start) for _, start in begun] == list(range(len(places) + 1)), told
    assert all(int(at) >= 2 + int(start) for at, start in begun[1:]), (
        begun
    )  # each went on from one of its last two saves
    np.testing.assert_allclose(_losses(tmp_path), undisturbed, rtol=1e-10)
    assert len(list((tmp_path / "saves").iterdir())) == 2


@contextmanager
def _hosts(are_linked):
    """Addresses, what runs a command on each, and the interface: of two hosts, or of this machine for both."""
    if not are_linked:
        yield ["127.0.0.1"] * 2, [(), ()], "lo"
        return
    with linked_hosts() as hosts:
        yield [f"{FIRST_ADDRESS[:-1]}{n}" for n in (1, 2)], [("ip", "netns", "exec", n) for n in hosts.names], "wire"


TWO_HOSTS = pytest.param(
    "backward",
    True,
    marks=[pytest.mark.nightly, pytest.mark.skipif(bool(why_not_two_hosts()), reason=why_not_two_hosts() or "it may")],
    id="backward, hosts in namespaces",
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "are_linked"), [("backward", False), pytest.param("write", False, marks=pytest.mark.nightly), TWO_HOSTS]
)
def test_a_job_that_loses_a_host_goes_on_with_the_ranks_of_the_other(tmp_path, undisturbed, place, are_linked):
    with _hosts(are_linked) as (addresses, within, interface):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{addresses[0]}:{port}", "--rdzv-id", "job"]
        how = ["last_call_timeout=20", "keep_alive_interval=1", "keep_alive_max_attempt=3"]
        hosts = []
        for number, address in enumerate(addresses):
            flags = ["--nnodes", "1:2", "--max-restarts", "3", "--local-addr", address, *meeting]
            flags += ["--rdzv-conf", ",".join([*how, f"is_host={int(number == 0)}"])]
            variables = {"LOSES_HOST": "1", "GLOO_SOCKET_IFNAME": interface}
            hosts.append(_start(tmp_path, 1, place, flags=flags, within=within[number], **variables))
        status, told = _ended(hosts[0], tmp_path)
        hosts[1].kill()
        assert hosts[1].wait() == -signal.SIGKILL
    assert status == 0, told
    assert "ends at 14" in told
    begun = [int(line.split()[2]) for line in told.splitlines() if line.startswith("begins at")]
    assert begun[0] == 0 < begun[-1], told  # with two ranks, then from a save with one
    np.testing.assert_allclose(_losses(tmp_path), undisturbed, rtol=1e-10)


@pytest.mark.slow
def test_a_job_that_is_asked_to_end_saves_and_another_goes_on(tmp_path, undisturbed):
    signals = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
    for each in (signal.SIGUSR1, signal.SIGTERM):
        started = _start(tmp_path, 2, "none", "slowly", flags=signals)
        at = len(list((tmp_path / "saves").iterdir())) if (tmp_path / "saves").exists() else 0
        before = jigsaw.latest(tmp_path / "saves")
        until = time.monotonic() + 100
        while jigsaw.latest(tmp_path / "saves") == before and time.monotonic() < until:
            time.sleep(0.1)
        started.send_signal(each)
        _, told = _ended(started, tmp_path)
        assert f"ends at {len(_losses(tmp_path))}\n" in told, told
        assert at < len(_losses(tmp_path)) < 14
        assert jigsaw.latest(tmp_path / "saves").name == f"step-{len(_losses(tmp_path))}"
    status, told = _ended(_start(tmp_path, 1, "none"), tmp_path)  # on fewer ranks
    assert status == 0, told
    np.testing.assert_allclose(_losses(tmp_path), undisturbed, rtol=1e-10)


@on_ranks(3)
def test_one_rank_is_asked_and_all_hear_it_at_the_same_step():
    mesh = world_mesh(lat=3)
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGUSR1)}
    for each in before:
        with jigsaw.StopRequest(mesh) as stop:
            for step in range(9):
                if step == 4 and torch.distributed.get_rank() == 1:
                    os.kill(os.getpid(), each)
                if stop.heard():
                    break
            assert step == 4
    assert {each: signal.getsignal(each) for each in before} == before


def test_every_generator_goes_on(tmp_path):
    state = jigsaw.RandomState()
    random.gauss(0, 1)  # of which one half is kept for the next
    np.random.standard_normal()  # noqa: NPY002
    jigsaw.save(tmp_path / "it", random=state)

    def drawn():
        return [torch.rand(3).tolist(), random.gauss(0, 1), np.random.standard_normal(3).tolist()]  # noqa: NPY002

    expected = drawn()
    jigsaw.load(tmp_path / "it", random=state)
    assert drawn() == expected
