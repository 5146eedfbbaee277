"""The stores that the tests of the reader share."""

import importlib
from contextlib import suppress

import pytest
from globe_store import globe, write

# iris brings a PROJ library and ecCodes another: loaded after ecCodes, pyproj's aborts the process when it ends.
# Where hdf5plugin is loaded after netCDF4, h5py cannot write Blosc by it.
for each in ("pyproj", "hdf5plugin"):
    with suppress(ModuleNotFoundError):
        importlib.import_module(each)


@pytest.fixture(scope="session")
def wb2(tmp_path_factory):
    """The whole globe a chunk, like WeatherBench2."""
    return write(tmp_path_factory.mktemp("wb2") / "wb2.zarr", globe())


@pytest.fixture(scope="session", params=["v2", "v3", "sharded"])
def tiled(request, tmp_path_factory):
    """Small chunks in each zarr format."""
    chunk = (3, 2, 5, 7)
    return write(tmp_path_factory.mktemp("tiled") / f"{request.param}.zarr", globe(), request.param, chunk)


@pytest.fixture(scope="session")
def gappy(tmp_path_factory):
    """A day is missing after step 4."""
    return write(tmp_path_factory.mktemp("gap") / "gap.zarr", globe(gap=4))
