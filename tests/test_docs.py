"""The documentation: every public name is told and shown, links lead somewhere, the site builds without a warning."""

from __future__ import annotations

import doctest
import importlib
import inspect
import pkgutil
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

import jigsaw
import jigsaw.dryrun
import jigsaw.io
import jigsaw.metrics
import jigsaw.nn
import jigsaw.ops
import jigsaw.testing

ROOT = Path(__file__).parents[1]
PACKAGES = (jigsaw, jigsaw.nn, jigsaw.metrics, jigsaw.ops, jigsaw.io, jigsaw.dryrun, jigsaw.testing)
PAGES = sorted(page for kind in ("*.md", "docs/**/*.md", "examples/**/README.md") for page in ROOT.glob(kind))
SOURCES = sorted((ROOT / "jigsaw").rglob("*.py"))
PUBLIC = {f"{package.__name__}.{name}": getattr(package, name) for package in PACKAGES for name in package.__all__}
OURS = {path: value for path, value in PUBLIC.items() if not getattr(value, "__module__", "").startswith("torch.")}
SHOWN = {
    path: value
    for path, value in OURS.items()
    if not hasattr(value, "__path__") and not (isinstance(value, type) and issubclass(value, Exception))
}

# -- docstrings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", OURS)
def test_every_public_name_has_a_docstring(path):
    told = vars(OURS[path]).get("__doc__") if isinstance(OURS[path], type) else OURS[path].__doc__
    assert told, "its own, not its base's"


def _is_there(path):
    try:
        pkgutil.resolve_name(path)
    except (ImportError, AttributeError):
        return False
    return True


def test_names_in_the_text_are_those_of_the_code():
    named = {path: file for file in (*SOURCES, *PAGES) for path in re.findall(r"`(jigsaw(?:\.\w+)+)", file.read_text())}
    del named["jigsaw.json"]  # a file of a checkpoint
    text = {file: file.read_text() for file in (*SOURCES, *PAGES)}
    named |= {f"jigsaw.{path}": file for file in text for path in re.findall(r"`(comm\.(?!py\b)\w+)", text[file])}
    assert not {path: str(file) for path, file in named.items() if not _is_there(path)}
    assert not _is_there("jigsaw.io.opne")


def test_files_in_the_text_are_there():
    files = {
        file.name for folder in ("jigsaw", "tests", "examples", "benchmarks") for file in (ROOT / folder).rglob("*.py")
    }
    named = {name for page in PAGES for name in re.findall(r"`(?:[\w/]+/)?(\w+\.py)`", page.read_text())}
    assert len(named) > 50
    assert not named - files - {"NAME.py"}


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """The stores that examples read: a globe, the same in two files, cells of HEALPix, a scan and its labels."""
    path = tmp_path_factory.mktemp("stores")
    times = np.datetime64("2020-01-01", "ns") + np.arange(8) * np.timedelta64(6, "h")
    coords = {"time": times, "latitude": np.linspace(90, -90, 9), "longitude": np.arange(16) * 22.5}
    dims, values = ("time", "latitude", "longitude"), np.zeros((8, 9, 16), "f4")
    t2m = (dims, values + np.arange(280, 288, dtype="f4")[:, None, None], {"units": "K"})
    globe = xr.Dataset({"2m_temperature": t2m, "10m_u_component_of_wind": (dims, values, {"units": "m s-1"})}, coords)
    globe.to_zarr(
        path / "globe.zarr",
        zarr_format=2,
        write_empty_chunks=True,
        encoding={name: {"chunks": (1, 9, 16)} for name in globe},
    )
    for name, part in (("globe-01.nc", slice(0, 4)), ("globe-02.nc", slice(4, 8))):
        globe.isel(time=part).to_netcdf(path / name, engine="h5netcdf")
    healpix = {"grid_mapping_name": "healpix", "refinement_level": 1, "indexing_scheme": "nested"}
    cells = {"time": times, "crs": ((), 0, healpix)}
    t2m = (("time", "cell"), np.full((8, 48), 280, "f4"), {"grid_mapping": "crs"})
    xr.Dataset({"t2m": t2m}, cells).to_zarr(path / "cells.zarr", zarr_format=2)
    scan, label = np.arange(33 * 20 * 24, dtype="f4").reshape(33, 20, 24), np.zeros((33, 20, 24), "u1")
    label[10:14, 5:9, 6:12] = 1
    for name, array in (("scan", scan), ("label", label)):
        volume = xr.Dataset({name: (("z", "y", "x"), array)})
        volume.to_zarr(
            path / f"{name}.zarr", zarr_format=2, write_empty_chunks=True, encoding={name: {"chunks": (8, 20, 24)}}
        )
    return path


def _examples(path):
    """The examples of one docstring, of a class and its methods, or of a module and its functions."""
    names = {"jigsaw": jigsaw, "np": np, "torch": torch}
    return [found for found in doctest.DocTestFinder().find(OURS[path], path, globs=names) if found.examples]


@pytest.mark.parametrize("path", SHOWN)
def test_every_public_name_has_an_example(path):
    assert any(found.name == path for found in _examples(path))


@pytest.mark.parametrize("path", [path for path in OURS if _examples(path)])
def test_examples_run(path, stores, tmp_path, monkeypatch, capsys):
    shutil.copytree(stores, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for found in _examples(path):
        torch.manual_seed(0)
        ran = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(found)
        assert not ran.failed, capsys.readouterr().out


BLOCKS = {page: re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL) for page in PAGES}
SESSIONS = {page: blocks for page, blocks in BLOCKS.items() if any(block.startswith(">>> ") for block in blocks)}


@pytest.mark.parametrize("page", SESSIONS, ids=lambda page: page.name)
def test_sessions_of_a_page_run(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    session = doctest.DocTestParser().get_doctest("\n".join(SESSIONS[page]), {}, page.name, str(page), 0)
    assert session.examples
    ran = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(session)
    assert not ran.failed, capsys.readouterr().out


def test_every_argument_of_open_has_its_place():
    headings = " ".join(re.findall(r"^## .*$", (ROOT / "docs" / "open.md").read_text(), re.MULTILINE))
    arguments = set(inspect.signature(jigsaw.io.open).parameters) - {"store", "mesh"}
    assert arguments == set(re.findall(r"`(\w+)`", headings))


# -- links ------------------------------------------------------------------------------------------------------------


def _anchors(page):
    """The targets that GitHub and the site make of a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for heading in re.findall(r"^#+ +(.*?) *$", text, re.MULTILINE):
        yield re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _broken_links(page):
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        if "://" in link:
            continue
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    assert not list(_broken_links(page))


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# Some `words`, here\n[a](page.md) [b](#some-words-here) [c](#no) [d](no.md) [e](https://x.org/no)\n"
    )
    assert list(_broken_links(page)) == ["#no", "no.md"]


def test_every_decision_is_listed():
    listed = re.findall(
        r"\]\(decisions/([\w.-]+)\)", (ROOT / "docs" / "design.md").read_text().split("## All decisions")[1]
    )
    pages = sorted(page.name for page in (ROOT / "docs" / "decisions").iterdir())
    assert sorted(listed) == pages
    assert [int(name[:4]) for name in pages] == list(range(1, len(pages) + 1)), "each has a number of its own"


def test_every_result_file_stands_in_the_benchmarks():
    told = (ROOT / "docs" / "benchmarks.md").read_text()
    results = {file.name for file in (ROOT / "benchmarks" / "results").glob("*.jsonl")}
    assert results
    assert not {name for name in results if name not in told}


# -- the files --------------------------------------------------------------------------------------------------------


def _tree():
    """The paths of the tree in docs/files.md, from its indentation; a * stands for several files."""
    text = (ROOT / "docs" / "files.md").read_text()
    block = re.search(r"^```\njigsaw/\n.*?^```$", text, re.MULTILINE | re.DOTALL).group(0)
    folders = []
    for line in block.splitlines()[1:-1]:
        depth = (len(line) - len(line.lstrip())) // 2
        name, *about = line.split(maxsplit=1)
        folders[depth:] = [name]
        yield "".join(folders), about


def test_the_tree_is_there():
    for path, _ in _tree():
        assert list(ROOT.glob(path.rstrip("/"))), f"{path} of docs/files.md does not exist"


def test_the_tree_says_what_each_file_is_for():
    assert not [path for path, about in _tree() if not path.endswith("/") and not about]


def test_the_tree_is_complete():
    named = {path for path, _ in _tree()}
    rooms = [f"{file.parent}/" for file in [*ROOT.glob("jigsaw/*/__init__.py"), *ROOT.glob("jigsaw/io/*/__init__.py")]]
    sources = [*rooms, *ROOT.glob("jigsaw/*.py"), *ROOT.glob("jigsaw/io/[a-z]*.py")]
    missing = {str(source).removeprefix(f"{ROOT}/") for source in sources} - named
    assert not missing, f"add to docs/files.md: {sorted(missing)}"


# -- the site ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The site, built as `make docs` builds it, but elsewhere."""
    folder, makefile = tmp_path_factory.mktemp("site"), (ROOT / "Makefile").read_text()
    (recipe,) = re.findall(r"^docs:.*\n\t\$\(BIN\)/python (.*) -d build/doctrees \. site$", makefile, re.MULTILINE)
    command = [sys.executable, *recipe.split(), "-d", folder / "doctrees", ".", folder / "html"]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder / "html"


@pytest.mark.slow
def test_the_reference_is_complete(site):
    inventory = importlib.import_module("sphinx.util.inventory").InventoryFile
    told = inventory.loads((site / "objects.inv").read_bytes(), uri="").data
    names = {name for kind, entries in told.items() if kind.startswith("py:") for name in entries}
    assert not OURS.keys() - names
    for page in (site / "docs" / "reference").rglob("*.html"):  # *space] would pair with the next *
        assert not re.findall(r"\*(?:Shapes|Sends|Raises)", page.read_text()), page
    assert {"jigsaw.nn", "jigsaw.io", "jigsaw.testing", "jigsaw.Tile.full_tensor", "jigsaw.io.Dataset.plan"} <= names


@pytest.mark.slow
def test_the_site_opens_from_the_disk(site):
    texts = {page: page.read_text() for page in site.rglob("*.html")}
    assert site / "index.html" in texts
    assert all((site / page.relative_to(ROOT)).with_suffix(".html") in texts for page in PAGES)
    for page, text in texts.items():
        assert not re.findall(r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//[^"]*"', text), page
        assert not re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="(?:https?:)?//[^"]*"', text), page
        for link in re.findall(r'<(?:a|img|script|link)[^>]* (?:href|src)="([^":]*)"', text):
            file, _, anchor = link.partition("#")
            assert not file.startswith("/"), f"{page}: {link} holds on a server alone"
            target = (page.parent / file.partition("?")[0]).resolve() if file else page
            assert target.is_file(), f"{page}: {link}"
            assert not anchor or f'id="{anchor}"' in texts[target], f"{page}: {link}"
