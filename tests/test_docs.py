"""The documentation: every public name is told and shown, links lead somewhere, the site builds without a warning."""

from __future__ import annotations

import doctest
import importlib
import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest

import jigsaw
import jigsaw.io
import jigsaw.nn
import jigsaw.testing

ROOT = Path(__file__).parents[1]
PACKAGES = (jigsaw, jigsaw.nn, jigsaw.io, jigsaw.testing)
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/README.md")])
PUBLIC = {f"{package.__name__}.{name}": getattr(package, name) for package in PACKAGES for name in package.__all__}
OURS = {path: value for path, value in PUBLIC.items() if not getattr(value, "__module__", "").startswith("torch.")}
SHOWN = {
    path: value
    for path, value in OURS.items()
    if not inspect.ismodule(value) and not (isinstance(value, type) and issubclass(value, Exception))
}

# -- docstrings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", OURS)
def test_every_public_name_has_a_docstring(path):
    told = vars(OURS[path]).get("__doc__") if isinstance(OURS[path], type) else OURS[path].__doc__
    assert told, "its own, not its base's"


def _examples(path, value):
    """The examples of one docstring, or of a class and its methods."""
    finder = doctest.DocTestFinder()
    return [found for found in finder.find(value, path, globs={"jigsaw": jigsaw}) if found.examples]


@pytest.mark.parametrize("path", [path for path, value in OURS.items() if _examples(path, value)])
def test_examples_run(path):
    for found in _examples(path, OURS[path]):
        ran = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE).run(found)
        assert not ran.failed, f"{found.name}: see the difference above"


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


def test_every_result_file_stands_in_the_benchmarks():
    told = (ROOT / "docs" / "benchmarks.md").read_text()
    results = {file.name for file in (ROOT / "benchmarks" / "results").glob("*.jsonl")}
    assert results
    assert not {name for name in results if name not in told}


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
