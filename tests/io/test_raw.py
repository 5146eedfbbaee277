"""Raw and `.npy` files: the values of numpy, in both orders and any byte order; files that lie."""

import os

import numpy as np
import pytest

import jigsaw
from jigsaw.errors import CorruptChunkError, GridError, TruncatedError, UnsupportedStoreError
from jigsaw.io.formats.raw import claims, open_npy, open_raw
from jigsaw.io.formats.slab_arrays import read_table_box
from jigsaw.testing import world_mesh

SHAPES = [(7,), (5, 6), (4, 13, 10), (3, 2, 13, 10), ()]


def everything(table):
    return read_table_box(table, tuple((0, n) for n in table.shape))


@pytest.mark.parametrize("order", "CF")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [">f4", "<f8", "u1", ">i2", "?"])
def test_npy_is_what_numpy_loads(tmp_path, shape, dtype, order):
    x = np.asarray(np.random.default_rng(0).integers(0, 100, shape)).astype(dtype)
    np.save(tmp_path / "x.npy", np.asarray(x, order=order))
    assert claims(tmp_path / "x.npy")
    store = open_npy(tmp_path / "x.npy")
    table = store.arrays["data"]
    assert (table.shape, np.dtype(table.dtype)) == (shape, x.dtype)
    assert table.dims == ("time", "z", "y", "x")[4 - len(shape) :]
    np.testing.assert_array_equal(everything(table), np.load(tmp_path / "x.npy"))
    np.testing.assert_array_equal(store.read_small("data"), x)


@pytest.mark.parametrize("order", "CF")
def test_a_raw_file_behind_a_header(tmp_path, order):
    x = np.random.default_rng(0).normal(size=(6, 13, 10)).astype(">f4")
    (tmp_path / "x.bin").write_bytes(b"?" * 37 + x.tobytes(order) + b"rest")
    times = np.datetime64("2020-01-01") + np.arange(6)
    store = open_raw(
        tmp_path / "x.bin", x.shape, ">f4", ("time", "lat", "lon"), 37, order,
        attrs={"scale_factor": 2.0, "_FillValue": float(x[4, 2, 3])},
        coords={"time": times, "lat": (np.linspace(90, -90, 13), {"units": "degrees_north"})},
    )  # fmt: skip
    np.testing.assert_array_equal(everything(store.arrays["data"]), x)
    only = {"time": ("2020-01-03", None), "lat_order": "south-first"}
    ds = jigsaw.io.open(store, mesh=world_mesh(lat=1), fields=["data"], **only)
    expected = np.where(x == x[4, 2, 3], np.nan, 2 * x)[:, ::-1]
    assert len(ds) == 4 and ds.input_times(2)[0] == times[4]
    for i in range(4):
        np.testing.assert_array_equal(ds[i].input.local[0, 0], expected[2 + i])


@pytest.mark.parametrize("order", "CF")
def test_large_arrays_are_cut_into_slabs_and_read_by_rows(tmp_path, order):
    x = np.arange(64 * 96 * 128, dtype="i4").reshape(64, 96, 128)
    np.save(tmp_path / "x.npy", np.asarray(x, order=order))
    store = open_npy(tmp_path / "x.npy")
    table = store.arrays["data"]
    assert table.chunks == {"C": (21, 96, 128), "F": (64, 96, 42)}[order]
    np.testing.assert_array_equal(read_table_box(table, ((20, 43), (5, 90), (41, 85))), x[20:43, 5:90, 41:85])
    dim, size = {"C": ("z", 64), "F": ("x", 128)}[order]
    ds = jigsaw.io.open(store, mesh={dim: 8}, fields=["data"], spec={dim: dim}, mode="independent")
    assert [row.stored_bytes for row in ds.plan(0).rows] == [x.nbytes // 8] * 8
    assert all(row.requests <= 2 for row in ds.plan(0).rows) and size % 8 == 0


def test_rows_of_more_than_a_slab_are_cut_too(tmp_path):
    with open(tmp_path / "x.bin", "wb") as file:
        file.truncate(2 * 5000 * 4000)
    table = open_raw(tmp_path / "x.bin", (2, 5000, 4000), "u1", ("z", "y", "x")).arrays["data"]
    assert table.chunks == (1, 4194, 4000) and table.grid.counts == (2, 2, 1)
    assert table.finder.locate((1, 1, 0)).offset == 5000 * 4000 + 4194 * 4000
    assert table.finder.locate((1, 1, 0)).length == 806 * 4000


# -- faults ----------------------------------------------------------------------------------------------------------


def test_objects_are_never_unpickled(tmp_path):
    np.save(tmp_path / "o.npy", np.array([print], dtype=object), allow_pickle=True)
    with pytest.raises(UnsupportedStoreError, match="holds object; arrays of plain values can be read"):
        open_npy(tmp_path / "o.npy")


def test_truncated_and_lying_npy(tmp_path):
    path = str(tmp_path / "x.npy")
    np.save(path, np.zeros((4, 5), "f4"))
    os.truncate(path, 128 + 79)
    with pytest.raises(TruncatedError, match=rf"{path} cannot be read as an array: shape \(4, 5\) .* has 207"):
        open_npy(path)
    os.truncate(path, 100)
    with pytest.raises(TruncatedError, match="its header: EOF"):
        open_npy(path)
    with open(path, "wb") as file:
        np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": (2**40, 2**20)})
    with pytest.raises(TruncatedError, match="takes 4611686018427387904 bytes"):
        open_npy(path)
    for damage in (b"\xff{{{", b"{'a': 1}  }"):
        with open(path, "r+b") as file:
            file.seek(10)
            file.write(damage)
        with pytest.raises(CorruptChunkError, match=r"cannot be read as \.npy: its header"):
            open_npy(path)
    with open(path, "r+b") as file:
        file.seek(6)
        file.write(b"\x09")
    with pytest.raises(UnsupportedStoreError, match=r"version \(9, 0\)"):
        open_npy(path)


def test_a_file_cut_after_it_was_opened(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((4, 50, 50), "f4"))
    table = open_npy(tmp_path / "x.npy").arrays["data"]
    os.truncate(tmp_path / "x.npy", 3000)
    with pytest.raises(
        TruncatedError, match=r"chunk \(0, 0, 0\) of array 'data' in .*x\.npy cannot be read: the file had"
    ):
        everything(table)


def test_what_is_no_array_is_refused(tmp_path):
    (tmp_path / "x.bin").write_bytes(bytes(24))
    assert not claims(tmp_path / "x.bin")
    with pytest.raises(UnsupportedStoreError, match=r"is not a \.npy file"):
        open_npy(tmp_path / "x.bin")
    with pytest.raises(UnsupportedStoreError, match="is a directory"):
        open_npy(tmp_path)
    with pytest.raises(UnsupportedStoreError, match="there is no file"):
        open_raw(tmp_path / "y.bin", (2, 3), "f4", ("y", "x"))
    with pytest.raises(TruncatedError, match="takes 24 bytes from byte 1 on, and the file has 24"):
        open_raw(tmp_path / "x.bin", (2, 3), "f4", ("y", "x"), offset=1)
    with pytest.raises(UnsupportedStoreError, match="order='A' must be 'C'"):
        open_raw(tmp_path / "x.bin", (2, 3), "f4", ("y", "x"), order="A")
    with pytest.raises(GridError, match=r"dims=\('y',\) must name each dim of shape=\(2, 3\) once"):
        open_raw(tmp_path / "x.bin", (2, 3), "f4", ("y",))
    with pytest.raises(GridError, match="must not be negative"):
        open_raw(tmp_path / "x.bin", (2, -3), "f4", ("y", "x"))
    with pytest.raises(GridError, match=r"coords\['y'\] of .* has shape \(5,\)"):
        open_raw(tmp_path / "x.bin", (2, 3), "f4", ("y", "x"), coords={"y": range(5)})
