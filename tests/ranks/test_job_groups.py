"""Groups of a job: those of GPUs serve GPUs alone where asked to; those of the host connect as late as ranks talk.

Torch's fake backend plays GPUs here, whose groups send nothing.  What gloo holds beside it is real.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from test_launcher import free_job, step, told
from torch.distributed import device_mesh as meshes_of_torch

import jigsaw
from jigsaw.errors import ShardingError
from jigsaw.ranks import job_groups
from jigsaw.ranks.job_groups import JobOptions
from jigsaw.ranks.mesh import flat_submesh
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.torch_internals.groups import devices_of_group, group_of_host, splitting_device_alone

RANKS = 6
BOTH = "cpu:gloo,cuda:nccl"
_PLAYED_GPUS = """
import json, os, sys
import torch, torch.distributed as dist
import torch.testing._internal.distributed.fake_pg
import jigsaw
from jigsaw.ranks.mesh import flat_submesh, split_axis_mesh
from jigsaw.torch_internals.groups import devices_of_group

torch.cuda.device_count, torch.cuda.set_device = lambda: 6, lambda device: None
files = lambda: len(os.listdir("/proc/self/fd"))
before = files()
mesh = jigsaw.init_mesh(device="cuda", backend="cuda:fake", lat=2, lon=3, pipe=1)
flat = flat_submesh(mesh, ("lat", "pipe"))
split = split_axis_mesh(mesh, "lon", (("row", 1), ("column", 3)))
of_gpus = [*mesh.get_all_groups(), flat.get_group(), *split.get_all_groups()]
opened = files() - before
total = torch.ones(1)
dist.all_reduce(total)  # of the host, by the job's own group
every = [None] * 6
dist.all_gather_object(every, dist.get_rank())
of_host = jigsaw.init_mesh(device="cpu", lat=2, lon=3).get_group("lon")
rows = torch.ones(1)
dist.all_reduce(rows, group=of_host)
job = sorted(devices_of_group(dist.group.WORLD))
kinds = [sorted(devices_of_group(group)) for group in of_gpus]
print(json.dumps([opened, kinds, job, total.item(), every, rows.item()]), flush=True)
dist.barrier()
os._exit(0)
"""


@pytest.mark.slow
def test_groups_of_gpus_have_no_part_for_the_host_and_the_job_has_one():
    job = free_job()
    printed = told(_PLAYED_GPUS, *(step(rank, RANKS, SLURM_JOB_ID=job) for rank in range(RANKS)))
    reports = [json.loads(text.splitlines()[-1]) for text in printed]
    for _, kinds, job_kinds, total, every, rows in reports:
        assert kinds == [["cuda"]] * 8
        assert job_kinds == ["cpu", "cuda"]
        assert (total, every, rows) == (RANKS, list(range(RANKS)), 3)
    # to the store, and to five others for the host; a part of gloo for each of six groups would be 40 files
    assert all(report[0] <= 2 + 4 + 5 for report in reports[1:]), [report[0] for report in reports]


def _connections():
    """Connections of this process by TCP, of which a group of gloo has one a pair of ranks that have talked.

    The store has others for some milliseconds, so the number is that of most of seven looks.
    """
    counts = []
    for _ in range(7):
        counts.append(_connections_now())
        time.sleep(0.05)
    return statistics.mode(counts)


def _connections_now():
    inodes = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this listing is closed by now
            inodes.add(os.readlink(f"/proc/self/fd/{name}"))
    lines = [line for table in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{table}").read_text().splitlines()[1:]]
    established = "01"
    return sum(f"socket:[{row[9]}]" in inodes for row in map(str.split, lines) if row[3] == established)


@on_ranks(4, backend="gloo")
def test_a_group_of_the_host_connects_when_its_ranks_talk():
    dist.barrier()  # connects the job's own group
    before = _connections()
    group = group_of_host("test of connections", dist.get_rank(), 4, timedelta(seconds=30))
    idle = _connections() - before
    dist.barrier()  # no rank talks in the new group before all have counted
    every = [None] * 4 if dist.get_rank() == 0 else None
    dist.gather_object(dist.get_rank(), every, dst=0, group=group)
    assert every in (None, [0, 1, 2, 3])
    connected = _connections() - before
    assert idle == 0
    assert 0 < connected <= 3  # neighbors, who compare sizes, and the first rank
    assert dist.get_process_group_ranks(group) == [0, 1, 2, 3]
    dist.barrier()


@on_ranks(4, backend="gloo")
def test_saves_in_the_background_share_a_group_that_others_do_not_use(tmp_path):
    model = torch.nn.Linear(2, 2)
    groups = []
    for at in range(2):
        pending = jigsaw.save(tmp_path / f"at-{at}", model=model, wait=False)
        groups.append(pending._group)
        pending.wait()
    assert groups[0] is groups[1] is not dist.group.WORLD


@on_ranks(4, backend="gloo")
def test_options_of_the_job_are_refused_where_it_has_begun():
    with pytest.raises(ShardingError, match=r"init_mesh\(backend='nccl'\) says how to make the process group"):
        jigsaw.init_mesh(device="cpu", backend="nccl", lat=4)
    with pytest.raises(ShardingError, match=r"init_mesh\(device_id=0\) says how to make the process group"):
        jigsaw.init_mesh(device="cpu", device_id=0, lat=4)


def test_options_of_gpus_are_refused_without_one(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ShardingError, match="device='cuda' needs a GPU, and torch sees none"):
        job_groups.join_job("cuda", timedelta(seconds=1), JobOptions())
    with pytest.raises(ShardingError, match="device_id=1 and pg_options=None are NCCL's, and device='cpu'"):
        job_groups.join_job("cpu", timedelta(seconds=1), JobOptions(device_id=1))


@pytest.mark.parametrize(
    ("device", "gpus", "variable", "backend"),
    [("cuda", 2, "0", BOTH), ("cuda", 1, "0", "gloo"), ("cuda", 1, "1", BOTH), ("cpu", 2, "1", "gloo")],
)
def test_ranks_that_share_a_gpu_use_nccl_where_it_is_told_to_let_them(monkeypatch, device, gpus, variable, backend):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", variable)
    monkeypatch.delenv("SLURM_GPUS_PER_TASK", raising=False)
    assert job_groups._usual_backend(device) == backend


def test_what_a_user_says_of_the_job_reaches_torch(monkeypatch):
    told_torch, chosen = {}, []

    def join(**arguments):
        told_torch.update(arguments)
        raise RuntimeError("joined")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "init_process_group", join)
    monkeypatch.delenv("RANK", raising=False)
    options = JobOptions("cuda:nccl", torch.device("cuda", 3), "of NCCL")
    with pytest.raises(RuntimeError, match="joined"):
        job_groups.join_job("cuda", timedelta(seconds=7), options)
    assert chosen == [torch.device("cuda", 3)]
    expected = {"backend": "cuda:nccl", "device_id": options.device_id, "pg_options": "of NCCL"}
    assert expected.items() <= told_torch.items()
    assert told_torch["timeout"] == timedelta(seconds=7)


class _BoundGroup:
    """A job that is bound to a GPU, as far as it is read."""

    bound_device_id = torch.device("cuda", 0)


def test_a_bound_job_splits_off_groups_for_the_device_alone(monkeypatch):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(dist, "split_group", lambda **arguments: arguments)
    job = _BoundGroup()
    with splitting_device_alone(job, "cuda"):
        assert meshes_of_torch.split_group(split_ranks=[[0, 1]]) == {"split_ranks": [[0, 1]], "backend": "cuda:nccl"}
    with splitting_device_alone(job, "cpu"):
        assert job.bound_device_id is None  # which all its ranks would have to split, and these alone do
    assert job.bound_device_id == torch.device("cuda", 0)


@on_ranks(4, backend="gloo")
def test_groups_on_cpus_are_those_of_torch():
    mesh = world_mesh(lat=2, lon=2)
    assert dist.get_backend(mesh.get_group("lat")) == "gloo"
    assert flat_submesh(mesh, ("lat", "lon")).get_group() is dist.group.WORLD
    assert "cpu" in devices_of_group(mesh.get_group("lon"))
