"""Datasets and loaders that travel to other processes under `spawn`."""

import multiprocessing
import pickle
import shutil
import time

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray as xr
from globe_store import stacked

import jigsaw
from jigsaw.errors import ReadError
from jigsaw.io.datasets import samples
from jigsaw.testing import on_ranks, world_mesh

LONG = ["2m_temperature", "geopotential@500"]


def opened(store, mesh):
    return jigsaw.io.open(store, mesh=mesh, fields=["t2m", "z500"], inputs=[-1, 0], targets=[1, 2])


def read_elsewhere(pickled):
    """In a process of its own: a sample, and what is left of the loader's epoch."""
    dataset, loader = pickle.loads(pickled)
    sample = dataset[3]
    batches = [(b.samples, b.input.local.numpy()) for b in loader]
    loader.close()
    return sample.input.local.numpy(), batches, loader.state_dict()


@pytest.mark.slow
def test_a_dataset_and_a_loader_in_mid_epoch_go_on_in_a_spawned_process(wb2):
    ds = opened(wb2, world_mesh(lat=1, lon=1))
    loader = jigsaw.io.DataLoader(ds, batch_size=2, shuffle=True, seed=5, rollout={0: 1})
    running = iter(loader)
    first = next(running)
    pickled = pickle.dumps((ds, loader))
    want = [(b.samples, b.input.local.numpy()) for b in running]
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        sample, batches, state = pool.apply(read_elsewhere, (pickled,))
    np.testing.assert_allclose(sample, stacked(wb2, LONG)[3:5], rtol=1e-6)
    assert [samples for samples, _ in batches] == [samples for samples, _ in want]
    assert first.samples not in [samples for samples, _ in batches]
    for (_, here), (_, there) in zip(want, batches, strict=True):
        np.testing.assert_array_equal(here, there)
    assert state == loader.state_dict() == {"seed": 5, "epoch": 1, "next_sample": 0}


@on_ranks(2)
def test_unpickled_on_every_rank_they_join_the_mesh(wb2):
    ds = opened(wb2, world_mesh(lat=2))
    again = pickle.loads(pickle.dumps(ds))
    assert "store" not in vars(again.source)
    assert len(again) == len(ds)
    torch.testing.assert_close(again[2].input.local, ds[2].input.local, rtol=0, atol=0)
    loader = pickle.loads(pickle.dumps(jigsaw.io.DataLoader(again, batch_size=3, rollout={0: 2, 3: 1}, seed=4)))
    assert loader.bytes_read == 0
    assert [b.samples for b in loader] == [(0, 1, 2), (3, 4, 5), (6,)]
    assert loader.state_dict()["seed"] == 4


@on_ranks(2)
def test_an_unpickled_loader_joins_the_mesh_once_however_long_rollouts_are(wb2):
    ds = pickle.loads(pickle.dumps(opened(wb2, world_mesh(lat=2))))
    loader = pickle.loads(pickle.dumps(jigsaw.io.DataLoader(ds, batch_size=3, rollout={0: 1, 1: 2})))
    made, joined = [], samples.init_mesh
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "init_mesh", lambda **axes: made.append(axes) or joined(**axes))
        assert [batch.target.shape[1] for _ in range(2) for batch in loader] == [1, 1, 1, 2, 2, 2]
    assert made == [{"device": "cpu", "lat": 2}]
    shorter, part = loader.dataset.rollout(1), jigsaw.io.split(loader.dataset, train=(0, 6))["train"]
    assert shorter.device_mesh() is part.device_mesh() is loader.dataset.device_mesh()
    loader.close()


def test_a_plan_of_integers_and_a_dataset_of_xarray_pickle_too(wb2):
    planned = pickle.loads(pickle.dumps(opened(wb2, {"lat": 4})))
    assert planned.plan(1).ranks == 4
    with pytest.raises(ReadError, match="it can plan, not read"):
        planned[0]
    computed = opened(xr.open_zarr(wb2, consolidated=False), world_mesh(lat=1))
    again = pickle.loads(pickle.dumps(computed))
    torch.testing.assert_close(again[0].input.local, computed[0].input.local)


def test_an_opened_store_does_not_travel(wb2):
    ds = opened(jigsaw.io.open_store(wb2), world_mesh(lat=1))
    with pytest.raises(ReadError, match=r"cannot be pickled.*give jigsaw.io.open the path or URL"):
        pickle.dumps(ds)


@on_ranks(2)
@pytest.mark.parametrize("loads", [False, True])
def test_a_store_that_one_rank_does_not_have_is_refused_on_all(wb2, tmp_path, loads):
    rank = dist.get_rank()
    own_copy = shutil.copytree(wb2, tmp_path / f"rank-{rank}" / "store.zarr")
    pickled = pickle.dumps(opened(str(own_copy), world_mesh(lat=2)))
    if rank == 1:
        shutil.rmtree(own_copy)
    again, began = pickle.loads(pickled), time.monotonic()
    with pytest.raises(ReadError, match=r"rank 1 of those that read together cannot look at|does not exist"):
        next(iter(jigsaw.io.DataLoader(again))) if loads else again[0]
    assert time.monotonic() - began < 20


@on_ranks(2)
@pytest.mark.parametrize("reads", ["sample", "whole", "batch"])
def test_volumes_that_one_rank_does_not_have_are_refused_on_all(tmp_path, reads):
    rank = dist.get_rank()
    scan = tmp_path / f"rank-{rank}.npy"
    np.save(scan, np.zeros((8, 8, 8), "float32"))
    volumes = jigsaw.io.open_volumes([str(scan)], mesh=world_mesh(z=2), crop=(4, 4, 4))
    pickled = pickle.dumps(volumes)
    if rank == 1:
        scan.unlink()
    again, began = pickle.loads(pickled), time.monotonic()
    with pytest.raises(ReadError, match=r"rank 1 of those that read together cannot look at|there is no file"):
        if reads == "batch":
            next(iter(jigsaw.io.VolumeLoader(again)))
        else:
            _ = again[0] if reads == "sample" else again.whole(0)
    assert time.monotonic() - began < 20
