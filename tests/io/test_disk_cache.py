"""A cache of fetched bytes on a local disk: what it serves, its limit, and what damage to it does."""

import os
import pickle

import numpy as np
import pytest
from toy_store import request, sample, write

import jigsaw
from jigsaw.io.engine import Engine
from jigsaw.io.errors import FieldError
from jigsaw.io.fetch.disk_cache import DiskCache
from jigsaw.io.plan import plan_read
from jigsaw.io.store import open_store
from jigsaw.testing import world_mesh


def read(store, steps=(1, 3)):
    return Engine(store).read(plan_read(request({}, steps=steps), store.arrays))


@pytest.mark.parametrize("form", [("v2", "blosc"), ("v3", "plain"), ("sharded", "default")], ids="-".join)
def test_what_was_fetched_is_served_from_the_disk(tmp_path, form):
    path, values = write(tmp_path, form)
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    np.testing.assert_array_equal(read(cache.of(open_store(path))), sample(values))
    again = cache.of(open_store(path))
    plan = plan_read(request({}), again.arrays)
    kept = os.listdir(tmp_path / "cache")
    assert len(kept) >= plan.total.chunks
    for table in again.arrays.values():  # the store itself is not read any more
        table.places.files._files.whole = table.places.files._files.ranges = None
    np.testing.assert_array_equal(Engine(again).read(plan), sample(values))


def test_a_damaged_file_is_fetched_again(tmp_path):
    path, values = write(tmp_path)
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    read(cache.of(open_store(path)))
    for i, name in enumerate(sorted(os.listdir(tmp_path / "cache"))):
        file = tmp_path / "cache" / name
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw if i % 2 else raw[: len(raw) // 2])
    np.testing.assert_array_equal(read(cache.of(open_store(path))), sample(values))


def test_the_limit_holds(tmp_path):
    path, values = write(tmp_path)
    cache = DiskCache(tmp_path / "cache", 3000)
    store = cache.of(open_store(path))
    for steps in ((0,), (1,), (2,), (3,), (0,)):
        np.testing.assert_array_equal(read(store, steps), sample(values, steps))
        assert 0 < sum(f.stat().st_size for f in os.scandir(tmp_path / "cache")) <= 3000 + 16 * 64
    with pytest.raises(FieldError, match="limit=0 must be positive"):
        DiskCache(tmp_path, 0)


def test_through_open_and_pickled(wb2, tmp_path):
    cache = DiskCache(tmp_path / "cache", 1 << 20)
    ds = jigsaw.io.open(wb2, mesh=world_mesh(lat=1), fields=["z500"], disk_cache=cache)
    plain = jigsaw.io.open(wb2, mesh=world_mesh(lat=1), fields=["z500"])
    np.testing.assert_array_equal(ds[1].input.local, plain[1].input.local)
    assert os.listdir(tmp_path / "cache")
    assert pickle.loads(pickle.dumps(ds)).source.disk_cache == cache
