"""Private names of torch stand in one room, and a torch that lacks one is refused by an error that says so."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import jigsaw
from jigsaw.errors import TorchVersionError
from jigsaw.torch_internals import private_names
from jigsaw.torch_internals.private_names import LateName, private_attribute, private_name, replaced_in_torch

ROOT = Path(__file__).parents[2]
ROOM = ROOT / "jigsaw" / "torch_internals"
SOURCES = sorted(f for f in (ROOT / "jigsaw").rglob("*.py") if ROOM not in f.parents)
# private names of others than torch: of Python, of named tuples, of h5py, fsspec
OF_OTHERS = {
    "_getframe",
    "_current_frames",
    "_exit",
    "_register_atexit",
    "_replace",
    "_fields",
    "_objects",
    "_cat_file",
}
# names in files that torch writes, which no one looks up in torch
IN_FILES = {"_StorageInfo", "_MEM_FORMAT_ENCODING", "_get_layout"}


@functools.cache
def _tree(file):
    return ast.parse(file.read_text())


def _is_private(name):
    return name.startswith("_") and not name.startswith("__") and len(name) > 1


def _own_names():
    """Every name that jigsaw's files give to something."""
    for file in SOURCES:
        for node in ast.walk(_tree(file)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                yield node.name
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield from [node.attr] * (ast.unparse(node.value) in ("self", "cls", "ctx"))
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def _names_of_others(file, own):
    for node in ast.walk(_tree(file)):
        named = ()
        if isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("jigsaw"):
            named = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            named = [part for alias in node.names for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            named = [node.attr] * (ast.unparse(node.value) not in ("self", "super()"))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "hasattr"):
            named = [x.value for x in node.args if isinstance(x, ast.Constant) and isinstance(x.value, str)]
            named = [name for name in named if name not in own]
        yield from ((name, node.lineno) for name in named if _is_private(name))


def _names_in_room():
    for file in ROOM.glob("*.py"):
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " not in node.value:
                yield from (part for part in re.split(r"[.:]", node.value) if _is_private(part) and part.isidentifier())


def test_no_other_file_names_what_is_private_to_torch():
    own = set(_own_names())
    found = {
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in SOURCES
        for name, line in _names_of_others(file, own)
        if name not in OF_OTHERS
    }
    assert not found, "give it a line in jigsaw/torch_internals: its purpose, and why no public name will do"


def test_no_other_file_has_a_private_name_of_torch_as_text():
    room = set(_names_in_room()) - {"_timeout"}
    assert len(room) > 40
    texts = {
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.value}"
        for file in SOURCES
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in room - IN_FILES
    }
    assert not texts


def test_a_name_that_torch_lacks_is_told_with_the_versions_that_have_it():
    told = rf'jigsaw uses torch\._C\._gone, which torch {re.escape(torch.__version__)} does not have; .*"torch>=2\.13,<'
    with pytest.raises(TorchVersionError, match=told):
        private_name("torch._C:_gone")
    with pytest.raises(TorchVersionError, match=r"torch\._gone\.name"):
        LateName("torch._gone:name")()
    with pytest.raises(TorchVersionError, match=r"Tensor\._gone"):
        private_attribute(torch.Tensor, "_gone")


@pytest.mark.slow
def test_a_torch_without_a_name_is_refused_at_import():
    code = "import torch; del torch._C._current_graph_task_id; import jigsaw"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    last = ran.stderr.strip().splitlines()[-1]
    assert last.startswith("jigsaw.errors.TorchVersionError: jigsaw uses torch._C._current_graph_task_id, which torch")


_NAMES_AT_IMPORT = """
import sys, torch
names = set()
def note(frame, event, arg):
    code, values = frame.f_code, frame.f_locals
    if event == "call" and code.co_filename.endswith("torch_internals/private_names.py"):
        if code.co_name == "private_name":
            names.add(values["path"])
        elif code.co_name == "private_attribute":
            names.add((id(values["owner"]), values["name"]))
sys.setprofile(note)
import jigsaw
sys.setprofile(None)
print(len(names))
"""


def test_the_page_says_how_many_names_import_needs():
    ran = subprocess.run([sys.executable, "-c", _NAMES_AT_IMPORT], capture_output=True, text=True, check=True)
    page = (ROOT / "docs" / "decisions" / "0088-private-names-of-torch.md").read_text()
    assert f"`import jigsaw` needs {ran.stdout.strip()} of these names" in page


def test_every_name_is_in_this_torch():
    late = re.compile(r'(?:LateName|private_name)\("([^"]+)"\)')
    paths = [path for file in ROOM.glob("*.py") for path in late.findall(file.read_text())]
    assert len(paths) > 40
    assert len(paths) == len(set(paths)), "each name once"
    for path in paths:
        private_name(path)


def test_proven_versions_are_the_projects_and_those_that_make_runs():
    (needed,) = [
        d
        for d in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
        if d.startswith("torch")
    ]
    assert needed == "torch" + private_names.PROVEN_TORCH
    oldest, newest = re.findall(
        r"^TORCH(?:_NEWEST)? *\?= torch==2\.(\d+)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert f">=2.{oldest},<2.{int(newest) + 1}" == private_names.PROVEN_TORCH


_PATCHED = """
import torch, torch.masked
from torch.testing import _comparison
from torch.utils import checkpoint
owners = (checkpoint, "_CheckpointFrame"), (checkpoint, "CheckpointFunction"), (checkpoint, "_checkpoint_hook"), (
    _comparison, "TensorLikePair"), (torch.masked, "sum")
found = lambda: [getattr(owner, name) for owner, name in owners]
before = found()
import jigsaw
from jigsaw.torch_internals.private_names import without_patches
assert found() == before, "import changes nothing"
mesh = jigsaw.init_mesh(lat=1)
assert found() == before
jigsaw.shard(torch.ones(4), mesh, ("lat",))
assert not any(now is own for now, own in zip(found(), before))
with without_patches():
    assert found() == before
assert not any(now is own for now, own in zip(found(), before))
"""


def test_torch_is_changed_by_the_first_tile_and_not_by_import():
    subprocess.run([sys.executable, "-c", _PATCHED], check=True)


def test_a_replaced_name_comes_back():
    class Owner:
        value = staticmethod(len)

    with pytest.raises(ZeroDivisionError), replaced_in_torch(Owner, "value", 2):
        assert Owner.value == 2
        1 / 0  # noqa: B018
    assert Owner.value is len


def test_the_errors_type_is_an_import_error():
    assert issubclass(TorchVersionError, ImportError)
    assert jigsaw.errors.TorchVersionError is TorchVersionError
