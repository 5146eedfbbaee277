"""Reference stores: kerchunk's index of a NetCDF-4 file, as a zarr store of zarr's own and through xarray."""

import json

import fsspec
import numpy as np
import pytest
import xarray as xr
from globe_store import globe
from kerchunk.hdf import SingleHdf5ToZarr
from zarr.storage import FsspecStore

import jigsaw
from jigsaw.errors import ReadError
from jigsaw.testing import on_ranks, world_mesh


@pytest.fixture
def archive(tmp_path):
    """A NetCDF-4 file with packed integers and deflated chunks of 4 steps."""
    encoding = {
        "2m_temperature": {"dtype": "int16", "scale_factor": 0.01, "add_offset": 280.0, "_FillValue": -32768},
        "geopotential": {"zlib": True, "shuffle": True, "chunksizes": (4, 3, 13, 16)},
    }
    globe().to_netcdf(tmp_path / "globe.nc", engine="h5netcdf", encoding=encoding)
    return tmp_path / "globe.nc"


@pytest.fixture
def references(archive):
    """The references to it, as kerchunk writes them."""
    path = archive.with_suffix(".json")
    path.write_text(json.dumps(SingleHdf5ToZarr(str(archive)).translate()))
    return str(path)


def of_zarr(references):
    far = {"remote_protocol": "file", "remote_options": {"asynchronous": True}}
    return FsspecStore(fsspec.filesystem("reference", fo=references, asynchronous=True, **far), read_only=True, path="")


def of_xarray(references):
    found = {"consolidated": False, "storage_options": {"fo": references}}
    return xr.open_dataset("reference://", engine="zarr", backend_kwargs=found)


@pytest.mark.parametrize("opened", [of_zarr, of_xarray])
@on_ranks(2)
def test_the_file_that_is_referred_to(opened, references, archive):
    fields = ["t2m", "geopotential@500", "temperature@850"]
    ds = jigsaw.io.open(opened(references), mesh=world_mesh(lat=2), fields=fields, targets=[1], halo=1)
    plain = jigsaw.io.open(archive, mesh=world_mesh(lat=2), fields=fields, targets=[1], halo=1)
    assert len(ds) == len(plain) == 9
    for i in (0, 4):
        np.testing.assert_allclose(ds[i].input.local, plain[i].input.local, rtol=1e-6)
        np.testing.assert_allclose(ds[i].target.full_tensor(), plain[i].target.full_tensor(), rtol=1e-6)


@pytest.mark.parametrize("opened", [of_zarr, of_xarray])
def test_a_file_that_is_cut_short(opened, references, archive):
    ds = jigsaw.io.open(opened(references), mesh=world_mesh(lat=1), fields=["geopotential@500"])
    archive.write_bytes(archive.read_bytes()[:12000])
    with pytest.raises(ReadError, match="geopotential"):
        ds[5]
