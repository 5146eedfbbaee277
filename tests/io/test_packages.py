"""Packages that are not there, and those that are and fail: told apart, with what to install."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from jigsaw.errors import FieldError, UnsupportedStoreError, WriteError
from jigsaw.io.chunks.remote_files import files_of_url
from jigsaw.io.conversion.selected_source import open_with_xarray
from jigsaw.io.reports.pictures import draw_plan
from jigsaw.io.series.statistics import _open_statistics_nc
from jigsaw.io.series.times import _stamps_and_elapsed
from jigsaw.io.stats.cluster import dask_client
from jigsaw.io.stats.compute import _report_progress
from jigsaw.io.writing.netcdf_writer import _open_netcdf4

ROOT = Path(__file__).parents[2]
ASKED = {
    "netCDF4": (_open_statistics_nc, FieldError, r"s.nc needs netCDF4: pip install 'jigsaw-torch\[netcdf\]'"),
    "netCDF4 ": (lambda path: _open_netcdf4(path, "w"), WriteError, r"needs the package netCDF4: pip install"),
    "tqdm": (lambda _: _report_progress(True, True, 0, 1).__enter__(), FieldError, r"needs tqdm: pip install"),
    "cftime": (
        lambda _: _stamps_and_elapsed(np.zeros(1), "days since 1", "noleap"),
        UnsupportedStoreError,
        r"package cftime: pip",
    ),
    "xarray": (
        open_with_xarray,
        UnsupportedStoreError,
        r"converting needs xarray: pip install 'jigsaw-torch\[xarray\]'",
    ),
    "obstore": (lambda _: files_of_url("s3://a/b", {}), UnsupportedStoreError, r"s3://a/b needs obstore: pip install"),
    "matplotlib": (lambda path: draw_plan(None, None, path), UnsupportedStoreError, r"needs matplotlib: pip install"),
    "distributed": (lambda _: dask_client(None).__enter__(), FieldError, r"pip install 'dask\[distributed\]'"),
}


@pytest.mark.parametrize("name", ASKED)
def test_a_package_that_is_not_there(monkeypatch, tmp_path, name):
    asked, kind, message = ASKED[name]
    _forget(monkeypatch, name.strip(), "dask.distributed")
    monkeypatch.setitem(sys.modules, name.strip(), None)  # Python's own word for: not to be found
    with pytest.raises(kind, match=message) as told:
        asked(tmp_path / "s.nc")
    assert "is installed" not in str(told.value)


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_a_package_that_is_there_and_fails(monkeypatch, tmp_path, name):
    asked, kind, message = ASKED[name]
    package = name.strip()
    _forget(monkeypatch, package, "dask.distributed")
    (tmp_path / package).mkdir()
    (tmp_path / package / "__init__.py").write_text(f"from {package}.moved import gone\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(kind, match=rf"^{package} \d\S+ is installed, but its import fails: .*; install versions that"):
        asked(tmp_path / "s.nc")
    with pytest.raises(kind, match=message):
        asked(tmp_path / "s.nc")


def _forget(monkeypatch, *packages):
    for name in list(sys.modules):
        if any(name == package or name.startswith(f"{package}.") for package in packages):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.slow
def test_zarr_whose_insides_moved_is_not_called_absent(tmp_path):
    (tmp_path / "zarr").mkdir()
    (tmp_path / "zarr" / "__init__.py").write_text("from zarr.core.chunk_grids import RegularChunkGrid\n")
    code = "import jigsaw.io\ntry: jigsaw.io.open('globe.zarr', mesh={})\nexcept Exception as e: print(e)"
    env = {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    ran = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    what = r"zarr 3\.\S+ is installed, but its import fails: No module named 'zarr.core'; install versions that fit"
    assert re.match(what, ran.stdout), ran.stdout + ran.stderr


@pytest.mark.slow
def test_other_formats_are_read_without_zarr(tmp_path):
    np.save(tmp_path / "x.npy", np.arange(6.0).reshape(2, 3))
    code = (
        "import sys; sys.modules['zarr'] = None\n"
        "import jigsaw.io, jigsaw.io.conversion.convert, numpy as np\n"
        "print(jigsaw.io.open_store('x.npy').arrays)\n"
        "try: jigsaw.io.open_store('globe.zarr')\n"
        "except jigsaw.io.UnsupportedStoreError as e: print(e)\n"
        "try: jigsaw.io.conversion.convert.zarr_store_attrs('globe.zarr')\n"
        "except jigsaw.io.WriteError as e: print(e)\n"
    )
    env = {"PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    _, reading, writing = ran.stdout.strip().split("\n")
    assert reading == "reading this needs zarr: pip install 'jigsaw-torch[zarr]'"
    assert writing == "writing a Zarr store needs zarr: pip install 'jigsaw-torch[zarr]'"


def test_the_package_uses_no_private_module_of_zarr():
    private = {
        f"{file.name}: {node.module}"
        for file in (ROOT / "jigsaw").rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("zarr.core")
    }
    assert not private
