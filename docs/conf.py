"""Sphinx: the site that `make docs` builds from these pages, README.md and the docstrings.

The source folder is the root of the repository, so that a link that leads somewhere on disk leads there on the site.
"""

from __future__ import annotations

import importlib
import inspect
import re
import shutil
from pathlib import Path
from types import ModuleType

from docutils import nodes
from docutils.statemachine import StringList
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

import jigsaw

project = "jigsaw"
author = copyright = "The jigsaw developers"
version = release = jigsaw.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.autosummary"]
root_doc = "README"
include_patterns = ["*.md", "docs/*.md", "docs/reference/*.rst", "examples/**/README.md"]
include_patterns += ["docs/decisions/*.md", "docs/paper/*.md", "docs/reference/names/*.rst"]

html_theme = "furo"
html_title = f"jigsaw {release}"
html_copy_source = False
html_static_path = ["site.css"]
html_css_files = ["site.css"]

myst_heading_anchors = 3  # as on GitHub: a heading is the target of a link
default_role = "py:obj"  # `x` in a docstring is a link where x is documented, and code anywhere
autosummary_generate = False  # `write_name_pages` makes the pages that it would make, with the members that are ours
autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # a Tile has every method of torch.Tensor: torch documents them
maximum_signature_line_length = 100
python_use_unqualified_type_names = True

# The margin, in the order of README.md's tables, and with their kinds. It is added to README.md here, so that README.md
# stays plain Markdown.
PAGES = {
    "Tutorials": [
        "docs/training",
        "docs/forecasts",
        "docs/medical",
        "docs/physics",
        "docs/diffusion",
        "examples/*/README",
        "examples/*/data/README",
    ],
    "How-to guides": [
        *(f"docs/{name}" for name in ("open", "sources", "statistics", "local", "cells", "metrics", "parallelism")),
        *(f"docs/{name}" for name in ("memory", "compile", "dry_run", "failures", "gpus")),
        "CONTRIBUTING",
        "docs/SKILL",
    ],
    "Reference": [
        *(f"docs/reference/{name}" for name in ("jigsaw", "nn", "metrics", "ops", "io", "dryrun", "testing")),
        *(f"docs/{name}" for name in ("operators", "models", "works_with", "benchmarks", "files")),
        "CHANGELOG",
    ],
    "Explanation": [
        *(f"docs/{name}" for name in ("which_one", "pictures", "gradients", "attention", "spheres", "reading")),
        *(f"docs/{name}" for name in ("computing", "scaling", "security", "design", "project", "paper/paper")),
    ],
}

# What a function makes and nobody else: their arguments are not part of the interface.
MADE_BY_FUNCTIONS = {"Dataset", "Volumes"}

ABOUT_EXAMPLES = (
    "The examples run as they stand on one rank, after ``import jigsaw, torch`` and ``import numpy as np``; "
    "``tests/test_docs.py`` makes the small stores that they read, and runs them."
)


def add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    """Add to README.md and docs/design.md the tables of contents that the margin shows."""
    if page == root_doc:
        source[0] += "".join(contents_fence(pages, f":caption: {caption}") for caption, pages in PAGES.items())
    if page == "docs/design":
        source[0] += contents_fence(["decisions/*"])


def contents_fence(pages: list[str], *options: str) -> str:
    """A hidden table of contents, as MyST writes it."""
    return "\n".join(["", "```{toctree}", ":hidden:", ":glob:", *options, "", *pages, "```", ""])


def copy_start_page(app: Sphinx, failure: Exception | None) -> None:
    """README.html under the name that a browser or a server opens first."""
    if failure is None and app.builder.name == "html":
        shutil.copy(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))


class PublicNames(SphinxDirective):
    """Everything in the ``__all__`` of a package: ``.. public-names:: jigsaw.io``."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        package = importlib.import_module(self.arguments[0])
        names = {name: getattr(package, name) for name in package.__all__}
        modules = {name: value for name, value in names.items() if inspect.ismodule(value)}
        of_torch = [name for name, value in names.items() if getattr(value, "__module__", "").startswith("torch.")]
        lines = [f".. automodule:: {package.__name__}", "", ABOUT_EXAMPLES, ""]
        lines += [f".. currentmodule:: {package.__name__}", "", ".. autosummary::", "   :nosignatures:"]
        lines += ["   :toctree: names", "", *(f"   {name}" for name in names_with_page(package)), ""]
        if of_torch:
            lines += [f"Torch's own, which run on tiles as they are: ``{'``, ``'.join(of_torch)}``.", ""]
        parts = self.parsed(lines)
        return parts + [self.module_section(package, name, value) for name, value in modules.items()]

    def parsed(self, lines: list[str]) -> list[nodes.Node]:
        holder = nodes.container()
        self.state.nested_parse(StringList(lines, source=self.arguments[0]), 0, holder)
        return holder.children

    def module_section(self, package: ModuleType, name: str, module: ModuleType) -> nodes.Node:
        """A public module: some packages have a page; of `ops` only what the module says of itself is told."""
        path = f"{package.__name__}.{name}"
        if hasattr(module, "__path__") and Path(__file__).with_name("reference").joinpath(f"{name}.rst").exists():
            lines = [f"See :doc:`{name}`."]
        else:
            lines = [f".. automodule:: {path}"]
            if module.__name__ == path and package.__name__ != "jigsaw.ops":
                lines += ["   :members:", f"   :exclude-members: {','.join(package.__all__)}"]
        section = nodes.section(ids=[nodes.make_id(f"module {path}")])
        section += nodes.title(path, path)
        section += self.parsed(lines)
        return section


def names_with_page(package: ModuleType) -> list[str]:
    """The public names of a package that have a page: not its modules, and not what it hands on from torch."""
    values = {name: getattr(package, name) for name in package.__all__}
    return [
        name
        for name, value in values.items()
        if not inspect.ismodule(value) and not getattr(value, "__module__", "").startswith("torch.")
    ]


def write_name_pages(app: Sphinx) -> None:
    """A page for each public name of the packages of the reference, in a folder that git ignores."""
    folder = Path(__file__).with_name("reference") / "names"
    folder.mkdir(exist_ok=True)
    texts: dict[str, str] = {}
    for reference in folder.parent.glob("*.rst"):
        for path in re.findall(r"public-names:: (\S+)", reference.read_text()):
            package = importlib.import_module(path)
            for name in names_with_page(package):
                title, entry = f"{path}.{name}", entry_lines(f"{path}.{name}", getattr(package, name))
                texts[f"{title}.rst"] = "\n".join([title, "=" * len(title), "", *entry])
    for page in folder.glob("*.rst"):
        if page.name not in texts:
            page.unlink()  # of a name that went
    for name, text in texts.items():
        if not (folder / name).exists() or (folder / name).read_text() != text:
            (folder / name).write_text(text)


def entry_lines(path: str, value: object) -> list[str]:
    """A function, or a class with its documented members, those of its bases that are ours included."""
    if not isinstance(value, type):
        return [f".. autofunction:: {path}", ""]
    if issubclass(value, Exception):
        return [f".. autoexception:: {path}()", "   :show-inheritance:", ""]
    signature = "()" * (value.__name__ in MADE_BY_FUNCTIONS)
    foreign = [base.__name__ for base in value.__mro__ if not base.__module__.startswith("jigsaw")]
    return [f".. autoclass:: {path}{signature}", "   :members:", f"   :inherited-members: {','.join(foreign)}", ""]


def setup(app: Sphinx) -> None:
    """What Sphinx calls."""
    app.add_directive("public-names", PublicNames)
    app.connect("builder-inited", write_name_pages)
    app.connect("source-read", add_contents)
    app.connect("build-finished", copy_start_page)
