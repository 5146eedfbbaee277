"""Stores of others whose codecs would run what lies in the chunks: refused by name, and nothing has run."""

import json
import os
import pickle

import numcodecs
import numpy as np
import pytest
import torch.distributed as dist
import xarray as xr
import zarr
from zarr.codecs.numcodecs import _codecs as by_numcodecs
from zarr.registry import register_codec

import jigsaw
from jigsaw.errors import ReadError, UnsupportedStoreError
from jigsaw.io.conversion.selected_source import open_with_xarray
from jigsaw.io.formats.zarr_group import open_zarr
from jigsaw.testing import on_ranks, world_mesh


class Trap:
    """A pickle of it makes a folder where it is loaded."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.fixture(autouse=True)
def numcodecs_unpickles(monkeypatch):
    """As numcodecs did before it asked: so that what is refused here is refused by jigsaw."""
    monkeypatch.setattr("numcodecs.pickles.ALLOW_UNSAFE_PICKLE_DECODE", True, raising=False)


def _store(path, where, mark):
    """A zarr v2 store, whose array `where` is of objects that are pickled, with a trap for a chunk."""
    times = np.arange(4)
    data = {"t2m": (("time", "lat", "lon"), np.zeros((4, 5, 6), "f4"))}
    coords = {"time": times, "lat": np.linspace(2, -2, 5), "lon": np.arange(6.0)}
    xr.Dataset(data, coords).to_zarr(path, zarr_format=2, consolidated=False)
    told = json.loads((path / where / ".zarray").read_text())
    # zarr from 3.1 on knows no dtype of objects that are pickled, but looks at the first filter alone
    filters = [{"id": "vlen-utf8"}, {"id": "pickle", "protocol": 5}]
    told |= {"dtype": "|O", "filters": filters, "compressor": None, "fill_value": None}
    (path / where / ".zarray").write_text(json.dumps(told))
    for chunk in (path / where).iterdir():
        if not chunk.name.startswith("."):
            chunk.write_bytes(pickle.dumps(Trap(mark)))
    return path


def test_the_trap_works(tmp_path):
    """Zarr itself runs it, where numcodecs lets it."""
    path = _store(tmp_path / "it.zarr", "t2m", tmp_path / "ran")
    with pytest.raises((TypeError, ValueError, AttributeError)):  # of what is not text
        np.asarray(zarr.open_group(path, mode="r")["t2m"][...])
    if not (tmp_path / "ran").exists():
        pytest.skip(f"zarr {zarr.__version__} refuses it before it runs")


@pytest.mark.parametrize("where", ["t2m", "lat", "time"])
def test_a_pickled_array_of_zarr_v2_is_refused_by_name(tmp_path, where):
    path, mark = _store(tmp_path / "it.zarr", where, tmp_path / "ran"), tmp_path / "ran"
    store = open_zarr(str(path))
    for read in (lambda: store.read_small(where), lambda: store.arrays[where].load_slowly(((0, 4), (0, 5), (0, 6)))):
        with pytest.raises(UnsupportedStoreError, match=rf"array '{where}' in .* has the codec 'pickle', which runs"):
            read()
    with pytest.raises(ReadError):
        jigsaw.io.open(str(path), mesh=world_mesh(lat=1), fields=["t2m"])[0]
    with pytest.raises(UnsupportedStoreError, match="the codec 'pickle'"):
        open_with_xarray(str(path))
    assert not mark.exists()


def test_a_store_that_cannot_be_listed_is_not_handed_to_xarray(tmp_path):
    """Xarray looks at the arrays of the group alone: what is broken in a group below does not keep it from them."""
    path = _store(tmp_path / "it.zarr", "lat", tmp_path / "ran")
    (path / "notes" / "deep").mkdir(parents=True)
    (path / "notes" / ".zgroup").write_text('{"zarr_format": 2}')
    (path / "notes" / "deep" / ".zgroup").write_text("{")
    with pytest.raises(UnsupportedStoreError, match=r"arrays of .*it\.zarr cannot all be listed .*; remove or mend"):
        open_with_xarray(str(path))
    assert not (tmp_path / "ran").exists()


def test_other_arrays_of_such_a_store_are_read(tmp_path):
    path = _store(tmp_path / "it.zarr", "t2m", tmp_path / "ran")
    zarr.open_group(path)["u10"] = np.ones((4, 5, 6), "f4")
    assert open_zarr(str(path)).arrays["u10"].shape == (4, 5, 6)
    assert not (tmp_path / "ran").exists()


def test_a_compressor_that_pickles_is_refused(tmp_path):
    group = zarr.create_group(tmp_path / "it.zarr", zarr_format=2)
    group.create_array("a", shape=(4,), chunks=(4,), dtype="f4", compressors=numcodecs.Pickle())
    (tmp_path / "it.zarr" / "a" / "0").write_bytes(pickle.dumps(Trap(tmp_path / "ran")))
    with pytest.raises(UnsupportedStoreError, match="'pickle'"):  # which zarr from 3.1 on takes for one of objects
        open_zarr(str(tmp_path / "it.zarr")).arrays["a"].load_slowly(((0, 4),))
    assert not (tmp_path / "ran").exists()


class PickleOfV3(by_numcodecs._NumcodecsBytesBytesCodec, codec_name="pickle"):
    """What somebody may register: numcodecs' pickles under zarr v3."""


@pytest.mark.parametrize("sharded", [False, True])
def test_a_pickled_array_of_zarr_v3_is_refused_by_name(tmp_path, sharded):
    path, mark = tmp_path / "it.zarr", tmp_path / "ran"
    register_codec("numcodecs.pickle", PickleOfV3)
    group = zarr.create_group(path, zarr_format=3)
    shards = {"shards": (8,)} if sharded else {}
    group.create_array("a", shape=(8,), chunks=(4,), dtype="f4", **shards, filters=None, compressors=[PickleOfV3()])
    (path / "a" / "c").mkdir()
    for chunk in ("0", "1"):
        (path / "a" / "c" / chunk).write_bytes(pickle.dumps(Trap(mark)))
    store = open_zarr(str(path))
    with pytest.raises(UnsupportedStoreError, match=r"array 'a' in .* has the codec 'numcodecs\.pickle', which runs"):
        store.arrays["a"].load_slowly(((0, 8),))
    with pytest.raises(UnsupportedStoreError, match=r"numcodecs\.pickle"):
        store.read_small("a")
    assert not mark.exists()


def test_a_codec_of_zarr_v3_that_nobody_registered_is_named(tmp_path):
    path = tmp_path / "it.zarr"
    zarr.create_group(path, zarr_format=3).create_array("a", shape=(8,), chunks=(4,), dtype="f4")
    told = json.loads((path / "a" / "zarr.json").read_text())
    told["codecs"].append({"name": "numcodecs.dill", "configuration": {}})
    (path / "a" / "zarr.json").write_text(json.dumps(told))
    with pytest.raises(UnsupportedStoreError, match=r"numcodecs\.dill"):
        open_zarr(str(path))


@on_ranks(2)
def test_every_rank_is_told(tmp_path):
    path = tmp_path / "it.zarr"
    if dist.get_rank() == 0:
        _store(path, "t2m", tmp_path / "ran")
    dist.barrier()
    with pytest.raises(ReadError):
        jigsaw.io.open(str(path), mesh=world_mesh(lat=2), fields=["t2m"])[0]
    assert not (tmp_path / "ran").exists()
