"""`DataLoader`: the same batches on every mesh, read ahead, resumed anywhere; its errors and its budget."""

import subprocess
import sys
import threading
import traceback
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from globe_store import globe, stacked, write

import jigsaw
from jigsaw.errors import CorruptChunkError, FieldError, PeerError, ReadError, StateError, WindowError
from jigsaw.io.datasets.epochs import BatchPrefetch
from jigsaw.io.reading import arena as _memory
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

FIELDS, LONG = ["z500", "t2m"], ["geopotential@500", "2m_temperature"]
WINDOW = {"inputs": [-1, 0], "targets": [1]}
MESHES = [
    {"lat": 1},
    {"data": 2},
    {"lat": 2},
    {"data": 3},
    {"lon": 3},
    {"data": 2, "lat": 2},
    {"lat": 2, "lon": 2},
    {"lat": 2, "data": 2},
]


def opened(path, mesh, **kwargs):
    return jigsaw.io.open(path, mesh=mesh, fields=FIELDS, halo=1, boundary={"lon": "periodic"}, **WINDOW, **kwargs)


def batches(path, axes, state=None, count=None, **kwargs):
    """Samples and whole input and target of every batch of an epoch, and the state after it."""
    loader = jigsaw.io.DataLoader(opened(path, world_mesh(**axes)), **kwargs)
    if state is not None:
        loader.load_state_dict(state)
    found = [(b.samples, b.input.full_tensor().numpy(), b.target.full_tensor().numpy()) for b in islice(loader, count)]
    return found, loader.state_dict()


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_batches_are_the_same_on_every_mesh(wb2, axes):
    whole = stacked(wb2, LONG)
    kwargs = {"batch_size": 3, "shuffle": True, "seed": 7}
    want_order = [b.samples for b in jigsaw.io.DataLoader(opened(wb2, world_mesh(lat=1)), **kwargs)]
    assert sorted(s for samples in want_order for s in samples) == list(range(8))
    for found, state in run_on_ranks(int(np.prod(list(axes.values()))), batches, wb2, axes, **kwargs):
        assert [samples for samples, _, _ in found] == want_order
        assert state == {"seed": 7, "epoch": 1, "next_sample": 0}
        for samples, given, target in found:
            anchor = np.array(samples) + 1
            np.testing.assert_allclose(given, np.stack([whole[anchor - 1], whole[anchor]], axis=1), rtol=1e-6)
            np.testing.assert_allclose(target, whole[anchor + 1][:, None], rtol=1e-6)


@on_ranks(4)
def test_data_groups_read_different_samples_and_domain_groups_the_same(wb2):
    mesh = world_mesh(data=2, lat=2)
    loader = jigsaw.io.DataLoader(opened(wb2, mesh), batch_size=4, drop_last=True)
    assert len(loader) == 2
    whole, (data, _) = stacked(wb2, LONG), mesh.get_coordinate()
    for k, batch in enumerate(loader):
        mine = 1 + 4 * k + 2 * data + np.arange(2)
        layout = batch.input.layout
        (top, bottom), (left, right) = layout.held(tuple(mesh.get_coordinate()))[-2:]
        want = np.stack([whole[mine - 1], whole[mine]], axis=1)[..., top:bottom, :].take(
            range(left, right), -1, mode="wrap"
        )
        np.testing.assert_allclose(batch.input.local, want, rtol=1e-6)
        assert layout.shape == (4, 2, 2, 13, 16)
        assert layout.dim_axes(0) == ("data",)
        assert batch.input_times.shape == (4, 2)


@pytest.mark.parametrize(
    ("before", "after"), [({"data": 2, "lat": 2}, {"lon": 2}), ({"lat": 1}, {"data": 2, "lon": 2})]
)
def test_a_run_resumes_in_mid_epoch_on_another_mesh(wb2, before, after):
    kwargs = {"batch_size": 2, "shuffle": True, "seed": 3}
    want, _ = batches(wb2, {"lat": 1}, **kwargs)
    first = run_on_ranks(int(np.prod(list(before.values()))), batches, wb2, before, count=1, **kwargs)
    states = [state for _, state in first]
    assert all(state.items() >= {"seed": 3, "epoch": 0, "next_sample": 2, "samples": 8}.items() for state in states)
    rest = run_on_ranks(
        int(np.prod(list(after.values()))), batches, wb2, after, state=states[0], **(kwargs | {"seed": 99})
    )
    for found, state in rest:
        assert [samples for samples, _, _ in found] == [samples for samples, _, _ in want[1:]]
        assert state == {"seed": 3, "epoch": 1, "next_sample": 0}
        for (_, given, _), (_, expected, _) in zip(found, want[1:], strict=True):
            np.testing.assert_array_equal(given, expected)


def test_an_epoch_goes_on_over_the_samples_that_it_began_with():
    def loader(steps, field="2m_temperature", **select):
        data = globe().rename(level="number").isel(time=slice(steps))
        dataset = jigsaw.io.open(data, mesh=world_mesh(lat=1), fields=[field], select=select)
        return jigsaw.io.DataLoader(dataset, 2, shuffle=True, seed=3)

    order = [batch.samples for batch in loader(7)]
    before, after = loader(7), loader(10)
    next(iter(before))
    state = before.state_dict()
    assert state.items() >= {"seed": 3, "epoch": 0, "next_sample": 2, "samples": 7}.items()
    after.load_state_dict(state)
    assert [batch.samples for batch in after] == order[1:]
    assert sorted(s for batch in after for s in batch.samples) == list(range(10))
    # samples of a member come after those of the one before it, so one more step gives others new numbers
    with pytest.raises(StateError, match=r"samples=7, but the dataset has 30 samples, in another order"):
        loader(10, "temperature", number="all").load_state_dict(state)


def test_a_state_of_another_period_or_order_is_refused_within_an_epoch():
    def loader(first, shuffle=True, **options):
        data = globe().isel(time=slice(first, first + 6))
        dataset = jigsaw.io.open(data, mesh=world_mesh(lat=1), fields=["2m_temperature"], **options)
        return jigsaw.io.DataLoader(dataset, 2, shuffle=shuffle, seed=3)

    before = loader(0)
    next(iter(before))
    state = before.state_dict()
    for other in (loader(1), loader(0, shuffle=False)):
        with pytest.raises(StateError, match=r"order=\d+, and this loader's is \d+: its first 6 samples are of"):
            other.load_state_dict(state)
        other.load_state_dict({"seed": 3, "epoch": 1, "next_sample": 0})
    again, order = loader(0, halo={"lat": 1}), [batch.samples for batch in loader(0)]
    for resumed in (state, {name: state[name] for name in state if name != "order"}):  # as it was saved before
        again.load_state_dict(resumed)
        assert next(iter(again)).samples == order[1]


@pytest.mark.parametrize("paired", [False, True])
def test_a_state_is_refused_where_samples_came_between_or_fell_out(paired):
    def loader(steps, **options):
        data = globe().rename(level="number").isel(time=steps)
        dataset = jigsaw.io.open(data, mesh=world_mesh(lat=1), fields=["2m_temperature"], **options)
        if paired:
            other = jigsaw.io.open(globe(), mesh=world_mesh(lat=1), fields=["2m_temperature"])
            dataset = jigsaw.io.pair(other, dataset)
        return jigsaw.io.DataLoader(dataset, 2, shuffle=True, seed=3)

    before = loader([0, 1, 2, 3, 6, 7])
    next(iter(before))
    state = before.state_dict()
    loader([0, 1, 2, 3, 6, 7, 8, 9]).load_state_dict(state)
    for other in (loader(range(10)), loader([0, 1, 2, 3, 6, 8]), loader(range(10), every=2)):
        with pytest.raises(StateError, match=r"samples are of other times|in another order"):
            other.load_state_dict(state)


@pytest.mark.parametrize("ahead", [None, 0, 1])
def test_an_iteration_that_was_taken_over_ends(wb2, ahead):
    loader = jigsaw.io.DataLoader(opened(wb2, world_mesh(lat=1)), 2, prefetch_bytes=ahead)
    old = iter(loader)
    next(old)
    state = loader.state_dict()
    next(old)
    loader.load_state_dict(state)
    with pytest.raises(ReadError, match="this iteration has ended: a newer one"):
        next(old)
    assert loader.state_dict() == state and next(iter(loader)).samples == (2, 3)


def test_every_epoch_has_its_own_order_and_leaving_one_early_ends_it(wb2):
    loader = jigsaw.io.DataLoader(opened(wb2, world_mesh(lat=1)), batch_size=2, shuffle=True)
    first, second = ([b.samples for b in loader] for _ in range(2))
    assert first != second
    list(islice(loader, 1))
    assert loader.state_dict().items() >= {"seed": 0, "epoch": 2, "next_sample": 2, "samples": 8}.items()
    next(iter(loader))
    assert loader.state_dict().items() >= {"seed": 0, "epoch": 3, "next_sample": 2, "samples": 8}.items()


def test_a_new_iteration_takes_over_from_one_that_is_left(wb2):
    loader = jigsaw.io.DataLoader(opened(wb2, world_mesh(lat=1)))
    old = iter(loader)
    next(old)
    new = iter(loader)
    assert next(new).samples == (0,)
    with pytest.raises(ReadError, match="this iteration has ended: a newer one"):
        next(old)
    assert next(new).samples == (1,)


@pytest.mark.parametrize("ahead", [None, 0])
@on_ranks(2)
def test_leaving_early_never_hangs_the_other_ranks(wb2, ahead):
    loader = jigsaw.io.DataLoader(
        opened(wb2, world_mesh(lat=2), mode="cooperative"), shuffle=True, prefetch_bytes=ahead
    )
    for epoch in range(5):
        seen = [batch.samples for batch in islice(loader, epoch + 1)]
        assert len(seen) == epoch + 1
    assert sorted(batch.samples[0] for batch in loader) == list(range(8))


def out_of_memory(loader, number):
    """Let a loader's device have no memory for its batch of that number, and for no other."""
    bring, brought = loader._carrier.bring, []

    def failing(tensors):
        brought.append(None)
        if len(brought) == number:
            raise MemoryError("of the device")
        return bring(tensors)

    loader._carrier.bring = failing


@pytest.mark.parametrize("ahead", [None, 0])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@on_ranks(3)
def test_what_fails_after_a_batch_was_read_fails_the_next_one_everywhere(wb2, ahead, cache_bytes):
    mesh = world_mesh(lat=3)
    loader = jigsaw.io.DataLoader(opened(wb2, mesh), batch_size=2, prefetch_bytes=ahead, cache_bytes=cache_bytes)
    running, failing = iter(loader), mesh.get_local_rank() == 1
    if failing:
        out_of_memory(loader, 2)
    next(running)
    if failing:
        with pytest.raises(MemoryError, match="of the device"):
            next(running)
    else:
        next(running)
        with pytest.raises(PeerError, match="rank 1 of the domain group failed: MemoryError: of the device"):
            next(running)
    assert [len(batch.samples) for batch in loader] == [2, 2, 2, 2]
    loader.close()
    with pytest.raises(ReadError, match="was closed"):
        next(iter(loader))


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
@on_ranks(2)
def test_what_fails_after_the_last_batch_was_read_fails_there_alone(wb2, cache_bytes):
    mesh = world_mesh(lat=2)
    loader = jigsaw.io.DataLoader(opened(wb2, mesh), batch_size=4, cache_bytes=cache_bytes)
    if mesh.get_local_rank() == 1:
        out_of_memory(loader, 2)
        with pytest.raises(MemoryError, match="of the device"):
            list(loader)
    else:
        assert len(list(loader)) == 2
    loader.load_state_dict({"seed": 0, "epoch": 1, "next_sample": 0})
    assert len(list(loader)) == 2


def test_a_step_that_windows_share_is_read_once(wb2):
    kwargs = {"batch_size": 8, "drop_last": True}
    ds = opened(wb2, world_mesh(lat=1))
    loader = jigsaw.io.DataLoader(ds, **kwargs)
    next(iter(loader))
    assert loader.read_counts == ds.plan(range(8)).total and loader.read_counts.useful_bytes > 0
    assert loader.bytes_read == loader.read_counts.stored_bytes
    assert ds.plan(range(8)).total.chunks == 20  # 10 steps of 2 variables, not 8 samples of 3 steps
    assert loader.waited_s > 0


@pytest.mark.slow
@on_ranks(3)
def test_a_batch_smaller_than_the_data_axis_leaves_ranks_empty(wb2):
    mesh = world_mesh(data=3)
    *_, last = jigsaw.io.DataLoader(opened(wb2, mesh), batch_size=7)
    assert last.samples == (7,)
    assert last.input.local.shape[0] == (1 if tuple(mesh.get_coordinate()) == (0,) else 0)
    np.testing.assert_allclose(last.input.full_tensor()[0], stacked(wb2, LONG)[7:9], rtol=1e-6)


def test_without_targets_there_is_none(wb2):
    ds = jigsaw.io.open(wb2, mesh=world_mesh(lat=1), fields=["t2m"])
    batch = next(iter(jigsaw.io.DataLoader(ds, batch_size=4)))
    assert batch.target is None
    assert batch.input.shape == (4, 1, 1, 13, 16)


def test_an_error_in_the_background_arrives_with_its_traceback(tmp_path):
    path = write(tmp_path / "broken.zarr", globe())
    chunk = Path(path) / "geopotential" / "c" / "5" / "0" / "0" / "0"
    chunk.write_bytes(chunk.read_bytes()[:40])
    seen = []
    with pytest.raises(
        CorruptChunkError, match=r"chunk \(5, 0, 0, 0\) of array 'geopotential' in .*/c/5/0/0/0 cannot be read"
    ) as caught:
        for batch in jigsaw.io.DataLoader(opened(path, world_mesh(lat=1))):
            seen.append(batch.samples)
    assert seen == [(0,), (1,), (2,)]
    frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert "_work" in frames
    assert "load" in frames


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({}, "has the keys"),
        ({"seed": 0, "epoch": 0, "next_sample": "3", "samples": 8}, "torn"),
        ({"seed": 0, "epoch": 0, "next_sample": 3, "samples": 9}, "dataset has 8 samples"),
    ],
)
def test_a_torn_state_is_refused_and_changes_nothing(wb2, state, match):
    loader = jigsaw.io.DataLoader(opened(wb2, world_mesh(lat=1)))
    with pytest.raises(StateError, match=match):
        loader.load_state_dict(state)
    assert loader.state_dict() == {"seed": 0, "epoch": 0, "next_sample": 0}


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"batch_size": 0}, "batch_size=0 must be a whole number, 1 or more"),
        ({"batch_size": 2.0}, r"batch_size=2.0 must be a whole number, 1 or more: the samples of a batch"),
        ({"batch_size": 9, "drop_last": True}, "leaves no batch of a dataset of 8 samples"),
        ({"seed": -1}, "seed=-1 must be a whole number, 0 or more"),
        ({"seed": "7"}, "seed='7' must be a whole number"),
        ({"shuffle": "no"}, "shuffle='no' must be True or False"),
        ({"drop_last": None}, "drop_last=None must be True or False"),
        ({"prefetch_bytes": 1e9}, r"prefetch_bytes=1000000000.0 must be a whole number"),
        ({"threads": 0}, "threads=0 must be a whole number, 1 or more"),
    ],
)
def test_numbers_that_make_no_loader(wb2, kwargs, match):
    with pytest.raises(FieldError, match=match):
        jigsaw.io.DataLoader(opened(wb2, world_mesh(lat=1)), **kwargs)


# -- reading ahead -----------------------------------------------------------------------------------------------------


def test_the_budget_counts_batches_on_the_largest_rank(wb2):
    ds = opened(wb2, world_mesh(lat=1))
    one = 4 * 2 * (2 * 13 * 18 + 13 * 16)  # float32, 2 channels, 2 input steps with halo in lon, 1 target step
    assert ds.sample_bytes() == one
    for budget, ahead in [(0, 0), (3 * one - 1, 0), (3 * one, 1), (7 * one, 2), (None, 2)]:
        assert jigsaw.io.DataLoader(ds, batch_size=3, prefetch_bytes=budget)._ahead == ahead


def test_reading_ahead_stops_at_the_budget():
    began, go = [], threading.Semaphore(0)

    def read(job):
        began.append(job)
        go.release()
        return job

    results = BatchPrefetch(read, iter(range(10)), ahead=3, alone=True)
    for _ in range(3):
        assert go.acquire(timeout=30)
    assert began == [0, 1, 2]
    assert next(results) == 0
    assert go.acquire(timeout=30)
    assert began == [0, 1, 2, 3]
    results.stop()
    results.join()
    assert began == [0, 1, 2, 3]


@pytest.mark.parametrize(("alone", "want"), [(False, [0, 1, 2, 3]), (True, [0])])
def test_after_a_stop_what_was_due_is_still_read_with_others(alone, want):
    began, entered, go = [], threading.Event(), threading.Event()

    def read(job):
        began.append(job)
        entered.set()
        assert go.wait(30)
        return job

    results = BatchPrefetch(read, iter(range(10)), ahead=4, alone=alone)
    assert entered.wait(30)
    results.stop()
    go.set()
    results.join()
    assert began == want


def test_batches_survive_the_ones_that_follow(wb2):
    loader = jigsaw.io.DataLoader(opened(wb2, world_mesh(lat=1)), batch_size=2)
    kept = list(loader)
    again = [b.input.local.clone() for b in loader]
    for batch, want in zip(kept, again, strict=True):
        torch.testing.assert_close(batch.input.local, want, rtol=0, atol=0)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_no_more_memory_is_made_than_batches_ahead_and_in_use(wb2, ahead, monkeypatch):
    if ahead:
        monkeypatch.setattr(_memory, "_PATIENCE_S", 60.0)  # however late the loop comes to let go of a batch
    data = opened(wb2, world_mesh(lat=1))
    loader = jigsaw.io.DataLoader(data, batch_size=2, prefetch_bytes=ahead * 2 * data.sample_bytes(), drop_last=True)
    made, make = [], loader._engine.memory._fresh
    loader._engine.memory._fresh = lambda size: made.append(size) or make(size)
    for _ in range(4):
        for batch in loader:
            batch.input.local.add_(1.0)
    loader.close()
    assert 0 < len(made) <= max(ahead + 1, 2), "without reading ahead, a batch is read while the loop has the last one"


def test_loading_a_state_ends_the_iteration_under_way(wb2):
    loader = jigsaw.io.DataLoader(opened(wb2, world_mesh(lat=1)))
    running = iter(loader)
    next(running)
    loader.load_state_dict({"seed": np.int64(0), "epoch": torch.tensor(4), "next_sample": 6, "samples": 8})
    with pytest.raises(ReadError, match="or a loaded state, took over its loader"):
        next(running)
    assert loader.state_dict() == {"seed": 0, "epoch": 4, "next_sample": 6, "samples": 8}
    assert [batch.samples for batch in loader] == [(6,), (7,)]
    loader.close()


# -- rollouts ----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_rollouts_grow_by_epoch_and_samples_stay(wb2):
    ds = jigsaw.io.open(wb2, mesh=world_mesh(lat=2), fields=FIELDS, targets=range(1, 5))
    loader = jigsaw.io.DataLoader(ds, batch_size=2, shuffle=True, seed=1, rollout={0: 1, 2: 4})
    whole, orders = stacked(wb2, LONG), []
    for steps in (1, 1, 4):
        batches = list(loader)
        for batch in batches:
            assert batch.target.shape[1] == batch.target_times.shape[1] == steps
            want = np.stack([whole[s + 1 : s + 1 + steps] for s in batch.samples])
            np.testing.assert_allclose(batch.target.full_tensor(), want, rtol=1e-6)
        orders.append(sorted(s for batch in batches for s in batch.samples))
    assert orders == [list(range(6))] * 3
    assert loader.state_dict() == {"seed": 1, "epoch": 3, "next_sample": 0}
    loader.load_state_dict({"seed": 1, "epoch": 1, "next_sample": 4, "samples": 6})
    assert [batch.target.shape[1] for batch in loader] == [1]
    assert [batch.target.shape[1] for batch in loader] == [4, 4, 4]


def test_a_short_rollout_reads_no_more_than_it_gives(wb2):
    ds = jigsaw.io.open(wb2, mesh=world_mesh(lat=1), fields=["t2m"], targets=[1, 2, 3])
    loader = jigsaw.io.DataLoader(ds, rollout=1, prefetch_bytes=0)
    next(iter(loader))
    assert loader.bytes_read == ds.rollout(1).plan(0).total.stored_bytes < ds.plan(0).total.stored_bytes


@pytest.mark.parametrize(
    ("rollout", "match"),
    [
        ({0: 1, 5: 4}, r"asks for 4 targets, but the dataset was opened with 1"),
        ({1: 1}, "must be targets by first epoch, from 0 on"),
        ({0: 0}, "asks for 0 targets"),
        ({0: 0.5}, "must be targets by first epoch"),
    ],
)
def test_rollouts_that_the_targets_cannot_give(wb2, rollout, match):
    with pytest.raises(WindowError, match=match):
        jigsaw.io.DataLoader(opened(wb2, world_mesh(lat=1)), rollout=rollout)


def rolling(path, axes, prefetch_bytes):
    """The chunks that a rank decodes for an epoch whose windows overlap, given that the batches are right."""
    ds = opened(path, world_mesh(**axes))
    loader = jigsaw.io.DataLoader(ds, batch_size=2, prefetch_bytes=prefetch_bytes)
    for batch in loader:
        whole = batch.input.full_tensor()
        for i, sample in enumerate(batch.samples):
            np.testing.assert_array_equal(whole[i], ds[sample].input.full_tensor())
        batch.input.local.zero_()  # the user's own: what is kept is a copy
    return loader._engine.stats.chunks


@pytest.mark.parametrize("axes", [{"lat": 1}, {"lat": 2}, {"data": 2}], ids=str)
@pytest.mark.parametrize("prefetch_bytes", [None, 0])
def test_steps_that_the_next_batch_needs_are_kept(wb2, axes, prefetch_bytes):
    ranks = int(np.prod(list(axes.values())))
    chunks = run_on_ranks(ranks, rolling, wb2, axes, prefetch_bytes)
    if "data" in axes:  # a rank's windows of three steps begin two apart: nine steps of two variables
        assert chunks == [18, 18]
    else:  # 10 steps of two variables, each chunk once
        assert chunks == [20] * ranks


def test_a_cache_serves_the_next_epoch(wb2):
    ds = opened(wb2, world_mesh(lat=1))
    step = ds.new_steps(1 << 40)._capacity
    assert step > 1000
    for cache_bytes, chunks in ((0, 40), (1 << 20, 20)):
        loader = jigsaw.io.DataLoader(ds, batch_size=2, cache_bytes=cache_bytes)
        first, second = ([b.input.full_tensor() for b in loader] for _ in range(2))
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        assert loader._engine.stats.chunks == chunks
    small = jigsaw.io.DataLoader(ds, batch_size=2, cache_bytes=(1 << 40) // step * 2)
    list(small)
    assert len(small._kept._known) <= 2
    with pytest.raises(FieldError, match="cache_bytes=-1 must be a whole number, 0 or more"):
        jigsaw.io.DataLoader(ds, cache_bytes=-1)


def test_fields_without_time_are_read_once(tmp_path):
    data = globe()
    data["land_sea_mask"] = data["2m_temperature"].isel(time=0, drop=True) * 2
    path = write(tmp_path / "static.zarr", data)
    ds = jigsaw.io.open(path, mesh=world_mesh(lat=1), fields=["t2m", "lsm"], inputs=[0])
    loader = jigsaw.io.DataLoader(ds, batch_size=3)
    for batch in loader:
        for i in range(len(batch.samples)):
            np.testing.assert_allclose(batch.input.full_tensor()[i, 0, 1], data["land_sea_mask"].values)
    assert loader._engine.stats.chunks == 10 + 1


@pytest.mark.slow
def test_reading_a_local_store_loads_no_library_that_it_does_not_use(wb2):
    others = ["sympy", "torch.distributed.tensor", "xarray", "pandas", "dask", "h5py", "netCDF4", "obstore", "scipy"]
    code = (
        "import sys, jigsaw\n"
        f"ds = jigsaw.io.open({str(wb2)!r}, mesh=jigsaw.init_mesh(device='cpu', lat=1), fields={FIELDS!r})\n"
        "batch = next(iter(jigsaw.io.DataLoader(ds)))\n"
        f"print(batch.input.ndim, [m for m in {others!r} if m in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split("\n")[0] == "5 []"


@pytest.mark.slow
def test_a_process_may_end_in_the_midst_of_an_iteration(wb2):
    """A thread that comes back from a decoder while Python ends would abort the process, now and then."""
    code = (
        "import jigsaw\n"
        f"ds = jigsaw.io.open({str(wb2)!r}, mesh=jigsaw.init_mesh(device='cpu', lat=1), fields={FIELDS!r})\n"
        "held = [iter(jigsaw.io.DataLoader(ds)) for _ in range(5)]\n"
        "next(held[0])"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@on_ranks(2)
def test_batches_are_regridded(wb2):
    ds = jigsaw.io.open(
        str(wb2),
        mesh=world_mesh(lat=2),
        inputs=[0],
        targets=[1],
        halo={"lat": 1, "lon": 1},
        boundary={"lon": "periodic"},
        forcings=["latlon"],
    )
    source = ds.whole_coords
    regridder = jigsaw.io.Regridder(source, (np.linspace(72, -72, 5), np.arange(6) * 60.0))
    loader = jigsaw.io.DataLoader(ds, batch_size=2)
    plain = jigsaw.io.DataLoader(ds, batch_size=2)
    for batch, before in zip(map(regridder.batch, loader), plain, strict=True):
        assert batch.samples == before.samples
        tiles = ((b.input, b.target, b.target_forcings) for b in (batch, before))
        for got, given in zip(*tiles, strict=True):
            assert got.shape == (*given.shape[:-2], 5, 6)
            want = regridder(given.full_tensor())
            torch.testing.assert_close(got.full_tensor(), want, rtol=1e-5, atol=1e-5, equal_nan=True)
    loader.close()
    plain.close()
