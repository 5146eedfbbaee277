"""Two writers of one store: the one that did not hear of the other's steps is refused, and overwrites nothing."""

import os
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xarray as xr

import jigsaw
from jigsaw.errors import WriteError
from jigsaw.io.writing.write import Writer, completeness, write
from jigsaw.testing import on_ranks, world_mesh

OPTIONS = {"dims": ("time", "lat"), "append_dim": "time"}


def step(number, mesh=None):
    """A tile of one step whose values are its number, and its coordinates."""
    tile = jigsaw.shard(torch.full((1, 9), float(number)), mesh or jigsaw.init_mesh(device="cpu", lat=1), (None, "lat"))
    return {"u": tile}, {"time": np.datetime64("2020-01-01", "ns") + np.array([number]) * np.timedelta64(6, "h")}


def steps_of(path):
    return xr.open_dataset(path).load().u.values[:, 0].tolist()


@pytest.mark.parametrize("wait", [True, False])
@on_ranks(2)
def test_a_step_of_another_writer_is_not_overwritten(tmp_path, wait):
    mesh, path = world_mesh(lat=2), tmp_path / "a.zarr"
    write(path, step(0, mesh)[0], coords=step(0, mesh)[1], **OPTIONS)
    first, second = (Writer(path, mode="a", wait=wait, **OPTIONS) for _ in range(2))
    first.append(*step(1, mesh))
    if not wait:
        first._end_pending_step()
    second.append(*step(2, mesh))
    if not wait:
        second._end_pending_step()
    match = r"has appended to .*a\.zarr, or replaced it: it has 3 complete steps and this writer knows of 2; .*mode='a'"
    with pytest.raises(WriteError, match=match):
        first.append(*step(3, mesh))
    second.append(*step(4, mesh))
    first.close()
    second.close()
    dist.barrier()
    assert steps_of(path) == [0, 1, 2, 4] and completeness(path).closed


def test_a_step_that_another_writer_commits_meanwhile_is_not_overwritten(tmp_path, monkeypatch):
    path = tmp_path / "a.zarr"
    first, second = (Writer(path, mode="a", **OPTIONS) for _ in range(2))
    first.append(*step(0))
    put = first._sink.put

    def put_late(*args):
        monkeypatch.undo()
        second.append(*step(1))
        put(*args)

    monkeypatch.setattr(first._sink, "put", put_late)
    with pytest.raises(WriteError, match="it has 2 complete steps and this writer knows of 1"):
        first.append(*step(2))
    assert completeness(path).steps == 2


def test_a_store_that_was_replaced_or_removed_meanwhile(tmp_path):
    path = tmp_path / "a.zarr"
    first = Writer(path, **OPTIONS)
    first.append(*step(0))
    write(path, step(5)[0], coords=step(5)[1], mode="w", **OPTIONS)
    with pytest.raises(WriteError, match=r"another writer has changed .*a\.zarr since this writer's last step; only"):
        first.append(*step(1))
    assert steps_of(path) == [5]
    with Writer(path, mode="a", **OPTIONS) as second:
        second.append(*step(6))
        shutil.rmtree(path)
        with pytest.raises(WriteError, match=r"a\.zarr was removed while this writer had it open; write it again"):
            second.append(*step(7))
    assert not path.exists()


def test_steps_that_xarray_appends_meanwhile_are_not_overwritten(tmp_path):
    path, (tiles, coords) = tmp_path / "a.zarr", step(0)
    with Writer(path, **OPTIONS) as out:
        out.append(tiles, coords)
        theirs = xr.Dataset({"u": (("time", "lat"), np.full((1, 9), 1, "f4"))}, step(1)[1])
        theirs.to_zarr(path, append_dim="time", zarr_format=3, consolidated=True)
        with pytest.raises(WriteError, match="another writer has changed"):
            out.append(*step(2))
    assert steps_of(path) == [0, 1]


def test_one_writer_at_a_time_grows_a_netcdf_file(tmp_path):
    path = tmp_path / "a.nc"
    write(path, step(0)[0], coords=step(0)[1], **OPTIONS)
    for begun in (False, True):  # with steps of the first in the part, and without
        first, second = (Writer(path, mode="a", **OPTIONS) for _ in range(2))
        first._sink.find("time") if not begun else first.append(*step(1))
        with pytest.raises(WriteError, match=r"a\.nc\.part is open in another writer, .*close that one"):
            second.append(*step(2))
        first.close()
    assert steps_of(path) == [0, 1]


def test_a_part_that_was_replaced_meanwhile(tmp_path):
    path, part = tmp_path / "a.nc", tmp_path / "a.nc.part"
    first = Writer(path, **OPTIONS)
    first.append(*step(0))
    part.unlink()
    part.write_text("dear")
    with pytest.raises(WriteError, match=r"a\.nc\.part was removed or replaced while this writer had it open"):
        first.append(*step(1))
    assert part.read_text() == "dear" and os.listdir(tmp_path) == ["a.nc.part"]
