"""The archives that `make dist` makes, installed where nothing of the clone is, train a step."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

STEP = """
import importlib.metadata, sys, torch, zarr, jigsaw
assert jigsaw.__file__.startswith(sys.prefix), jigsaw.__file__
assert importlib.metadata.version("jigsaw-torch") == jigsaw.__version__
group = zarr.open_group("store.zarr", mode="w")
array = group.create_array("t", shape=(3, 9, 8), chunks=(1, 3, 8), dtype="f4", dimension_names=("time", "lat", "lon"))
array[...] = torch.linspace(0, 1, 216).view(3, 9, 8).numpy()
mesh = jigsaw.init_mesh(lat=1)
net = jigsaw.parallelize(torch.nn.Conv2d(1, 1, 3, padding=1), mesh)
tile = jigsaw.shard(torch.from_numpy(array[:1][None]), mesh, (None, None, "lat", None))
net(tile).square().mean().backward()
print(float(net.weight.grad.abs().sum()) > 0)
"""


@pytest.mark.slow
def test_archives_install_and_train_a_step(tmp_path):
    made = tmp_path / "dist"
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(made), str(ROOT)], check=True, capture_output=True)
    (wheel,), (archive,) = made.glob("*.whl"), made.glob("*.tar.gz")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert wheel.name == f"jigsaw_torch-{version}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    sources = {str(path.relative_to(ROOT)) for path in (ROOT / "jigsaw").rglob("*.py")}
    assert sources | {"jigsaw/py.typed"} <= names
    assert {name.split("/")[0] for name in names} == {"jigsaw", f"jigsaw_torch-{version}.dist-info"}
    with tarfile.open(archive) as file:
        inside = {name.partition("/")[2] for name in file.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "Makefile", "tests/conftest.py", "docs/design.md"} <= inside

    venv.create(tmp_path / "fresh", with_pip=True)
    python = tmp_path / "fresh" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", wheel], check=True)
    # what it depends on is this environment's, behind its own packages; the clone is not among them
    env = {**os.environ, "PYTHONPATH": sysconfig.get_path("purelib")}
    ran = subprocess.run([python, "-c", STEP], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert ran.stdout.strip() == "True", ran.stderr
    told = subprocess.run(
        [python, "-m", "jigsaw", "inspect", "store.zarr"],
        cwd=tmp_path,
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "lat" in told.stdout
