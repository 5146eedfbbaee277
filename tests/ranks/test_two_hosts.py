"""Ranks on two hosts, started as srun starts them: they train as one process does, send what is planned, and end."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import xarray as xr
from torch import nn
from two_hosts import linked_hosts, why_not_two_hosts

pytestmark = pytest.mark.skipif(bool(why_not_two_hosts()), reason=why_not_two_hosts() or "it may")

ROWS, STEPS, FIELDS, WIDTH, RATE = (121, 720), 5, ("a", "b", "c", "d"), 24, 1e-2
NET = f"""
def make_net():
    torch.manual_seed(0)
    first, last = nn.Conv2d({len(FIELDS)}, {WIDTH}, 3, padding=1), nn.Conv2d({WIDTH}, {len(FIELDS)}, 3, padding=1)
    return nn.Sequential(first, nn.GELU(), last).double()
"""

TRAIN = f"""
import torch, jigsaw, jigsaw.io
from torch import nn
{NET}
mesh = jigsaw.init_mesh(device="cpu", lat=4, timeout=TIMEOUT)
how = dict(mesh=mesh, fields={list(FIELDS)}, targets=[1], dtype="float64", mode="cooperative")
data = jigsaw.io.open("STORE", **how)
net = jigsaw.parallelize(make_net(), mesh)
optimizer = torch.optim.SGD(net.parameters(), {RATE})
data._engine  # meets the others
def step(sample):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(net(sample.input), sample.target)
    loss.backward()
    optimizer.step()
    return float(loss)
"""

COUNTED = """
sample = data[0]
for plan in [data.plan(0)]:
    crossing = [0, 0]
    for job in plan.shared:
        for reader in job.readers:
            if reader // 2 != job.owner // 2:
                crossing[job.owner // 2] += plan.box_bytes(job, reader)
    print("crossing", *crossing)
print("losses", step(sample), flush=True)
meet("reading")
samples = [data[i] for i in range(1, len(data))]
meet("read")
print("losses", *(step(each) for each in samples))
meet("trained")
print("machines", len(set(data._engine.peers.hosts)), "uid", os.getuid(), "host", os.uname().nodename)
meet("done")
os._exit(0)
"""


@pytest.fixture
def store(tmp_path):
    r = np.random.default_rng(0)
    space = {"latitude": np.linspace(90, -90, ROWS[0]), "longitude": np.arange(ROWS[1]) * 0.5}
    times = np.datetime64("2020-01-01", "ns") + np.arange(STEPS) * np.timedelta64(6, "h")
    values = {name: (("time", *space), r.normal(size=(STEPS, *ROWS)).astype("f8")) for name in FIELDS}
    path = tmp_path / "globe.zarr"
    encoding = {name: {"chunks": (1, *ROWS)} for name in FIELDS}
    xr.Dataset(values, {"time": times, **space}).to_zarr(path, encoding=encoding, consolidated=False, zarr_format=2)
    return str(path), np.stack([values[name][1] for name in FIELDS], 1)


def losses_of_one_process(values):
    made = {"nn": nn, "torch": torch}
    exec(NET, made)
    net, x = made["make_net"](), torch.from_numpy(values)
    optimizer, found = torch.optim.SGD(net.parameters(), RATE), []
    for i in range(STEPS - 1):
        optimizer.zero_grad()
        loss = F.mse_loss(net(x[i : i + 1]), x[i + 1 : i + 2])
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.slow
def test_two_hosts_train_as_one_process_and_send_what_is_planned(tmp_path, store):
    """Over 100 Mbit/s; ranks of a host share a user and memory, and no rank that of the other host."""
    path, values = store
    with linked_hosts() as hosts:
        hosts.slow_down(100_000_000)
        code = (TRAIN + COUNTED).replace("STORE", path).replace("TIMEOUT", "100")
        hosts.start(tmp_path, code, users=(1001, 1001, 2001, 2001), job=1)
        sent = []
        for name in ("reading", "read", "trained"):
            hosts.await_meeting(name)
            sent.append(hosts.bytes_out())
            hosts.let_go(name)
        hosts.await_meeting("done")
        hosts.let_go("done")
        told = hosts.await_end()
    expected, samples = losses_of_one_process(values), STEPS - 2
    for rank, said in enumerate(told):
        lines = [line.split() for line in said.splitlines()]
        losses = [float(word) for words in lines if words[0] == "losses" for word in words[1:]]
        assert losses == pytest.approx(expected, rel=1e-12), said
        assert lines[-1] == ["machines", "2", "uid", str(1001 if rank < 2 else 2001), "host", "node"]
    reading, training = np.diff(np.array(sent), axis=0)
    planned = [int(word) for line in told[0].splitlines() if line.startswith("crossing") for word in line.split()[1:]]
    # half of each chunk goes to the other host, and all samples are alike: their steps and fields are
    assert sum(planned) == len(FIELDS) * 2 * ROWS[0] * ROWS[1] * 8 / 2
    assert 1.0 < (reading / samples / planned).max() < 1.06, (reading, planned)
    # a row of the input forward, and one of the width both ways; of the gradients what a ring of four gives on
    halos, weights = (len(FIELDS) + 2 * WIDTH) * ROWS[1] * 8, (2 * 9 * len(FIELDS) + 1) * WIDTH + len(FIELDS)
    step = halos + 2 * 3 / 4 * weights * 8
    assert 1.0 < (training / samples / step).max() < 1.1, (training, step)


@pytest.mark.slow
def test_ranks_end_when_the_link_goes_down(tmp_path, store):
    """Each of another user; all are told within the time of the mesh, and for whom they waited."""
    with linked_hosts() as hosts:
        code = (
            TRAIN
            + """
from jigsaw.ranks.waiting_ranks import WaitError
sample = data[0]
step(sample)
meet("cut")
began = time.monotonic()
try:
    for _ in range(10**6):
        step(sample)
except WaitError as e:
    print("told", round(time.monotonic() - began, 1), e, flush=True)
    meet("end")
os._exit(0)
"""
        )
        code = code.replace("STORE", store[0]).replace("TIMEOUT", "6")
        hosts.start(tmp_path, code, users=(1001, 1002, 1003, 1004), job=2)
        hosts.await_meeting("cut")
        hosts.cut_link()
        hosts.let_go("cut")
        hosts.await_meeting("end", 120)
        hosts.let_go("end")
        told = hosts.await_end()
    for rank, said in enumerate(told):
        seconds, ranks = re.search(r"told (\S+) \w+ waited \S+ s for ranks \[(.*?)\]: they have ended", said).groups()
        assert 5 < float(seconds) < 30, said
        named = {int(each) for each in ranks.split(",")}
        assert rank not in named
        assert {1: 2, 2: 1}.get(rank, min(named)) in named, said  # those next to the cut name who is beyond it
