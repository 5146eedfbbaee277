"""The house rules that a machine can check: layers, sizes, declared dependencies, public names, commands."""

from __future__ import annotations

import ast
import functools
import graphlib
import io
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import grimp
import pytest

import jigsaw
from jigsaw.__main__ import COMMANDS, main

ROOT = Path(__file__).parents[1]
SOURCES = sorted((ROOT / "jigsaw").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# the import name of a distribution, where it is another
IMPORTED_AS = {
    "jigsaw-torch": "jigsaw",
    "import-linter": "importlinter",
    "pytest-timeout": "pytest_timeout",
    "google-crc32c": "google_crc32c",
}


@functools.cache
def _tree(file):
    return ast.parse(file.read_text(), str(file))


def _imported(file):
    """The top-level packages that a file imports, anywhere in it."""
    for node in ast.walk(_tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield (node.module or "").split(".")[0]


def _declared():
    """Every distribution that pyproject names, by its import name, with the extras and groups that bring it."""
    found = {}
    groups = {"": PROJECT["project"]["dependencies"], **PROJECT["project"]["optional-dependencies"]}
    for extra, requirements in (groups | PROJECT["dependency-groups"]).items():
        for requirement in requirements:
            if isinstance(requirement, dict):  # another group
                continue
            name = re.match(r"[A-Za-z0-9_.-]+", requirement).group()
            found.setdefault(IMPORTED_AS.get(name, name), set()).add(extra)
    return found


def test_files_import_only_from_rows_below_their_own():
    code = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache"]
    linted = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert linted.returncode == 0, linted.stdout + linted.stderr
    assert "0 broken" in linted.stdout


def test_every_import_is_declared():
    declared = _declared()
    undeclared = {
        f"{file.relative_to(ROOT)}: {name}"
        for file in SOURCES
        for name in _imported(file)
        if name not in sys.stdlib_module_names and name not in declared and name != "jigsaw"
    }
    assert not undeclared


def test_the_shipped_package_needs_no_developers_tool():
    declared = _declared()
    of_developers = {name for name, extras in declared.items() if extras <= set(PROJECT["dependency-groups"])}
    assert {"pytest", "ruff", "sphinx"} <= of_developers
    assert not {f"{f.name}: {name}" for f in SOURCES for name in _imported(f) if name in of_developers}


def test_all_brings_every_format():
    (everything,) = PROJECT["project"]["optional-dependencies"]["all"]
    named = set(re.search(r"\[(.*)\]", everything).group(1).split(","))
    # choices of the others, packages to work with, and what tests of one's own need
    of_fields = {"weather", "medical", "lightning", "aurora", "testing"}
    assert named == set(PROJECT["project"]["optional-dependencies"]) - {"all"} - of_fields


def test_one_noun_a_file_and_short_functions():
    long = []
    for file in SOURCES:
        lines = len(file.read_text().splitlines())
        if lines > 520:
            long.append(f"{file.relative_to(ROOT)}: {lines} lines (at most 520)")
        for node in ast.walk(_tree(file)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                body = node.body[1:] if ast.get_docstring(node) else node.body
                length = body[-1].end_lineno - body[0].lineno + 1 if body else 0
                if length > 60:
                    long.append(f"{file.relative_to(ROOT)}: {node.name} has {length} lines (at most 60)")
    assert not long


def test_no_room_for_everything():
    names = {"utils", "util", "common", "base", "registry", "config", "trainer", "manager", "helpers", "misc"}
    assert not [f for f in SOURCES if f.stem.lower() in names or f.parent.name.lower() in names]


@pytest.mark.parametrize("name", jigsaw.__all__)
def test_public_names_are_there(name):
    assert getattr(jigsaw, name) is getattr(jigsaw, name)
    assert name in dir(jigsaw)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="module 'jigsaw' has no attribute 'shrad'"):
        _ = jigsaw.shrad


def test_importing_jigsaw_reads_no_format_and_joins_no_group():
    heavy = ["zarr", "h5py", "netCDF4", "xarray", "dask", "matplotlib", "pytest", "sympy"]
    heavy += ["jigsaw.io", "jigsaw.metrics", "jigsaw.testing"]
    code = (
        "import sys, jigsaw, torch.distributed as dist\n"
        f"print([m for m in {heavy!r} if m in sys.modules], dist.is_initialized())"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.split("\n")[0] == "[] False"


def test_version_is_the_projects():
    assert jigsaw.__version__ == PROJECT["project"]["version"]
    assert f"## {jigsaw.__version__}" in (ROOT / "CHANGELOG.md").read_text()
    assert f"\nversion: {jigsaw.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_contributing_names_only_targets_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", makefile, re.MULTILINE))
    assert {"setup", "weather", "weather-025", "test", "check", "bench"} <= targets
    named = {t for f in ROOT.glob("*.md") for t in re.findall(r"`?make ([a-z0-9-]+)", f.read_text())}
    assert named <= targets | {"your"}, "a Markdown file names a make target that does not exist"


def test_contributing_names_what_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    files = set(re.findall(r"`((?:jigsaw|tests|benchmarks)/[\w/]+(?:\.py)?)/?`", text)) - {"jigsaw/io/formats/NAME.py"}
    assert len(files) > 20
    assert not {name for name in files if not (ROOT / name).exists()}
    code = "\n".join(file.read_text() for file in [*SOURCES, ROOT / "tests" / "ops" / "test_tile_ops.py"])
    names = set(re.findall(r"`(_?[A-Za-z]\w*_\w+|[A-Z]\w+)`", text)) - {"open_NAME"}
    assert not {name for name in names if not re.search(rf"\b{name}\b", code)}
    for name, quoted in re.findall(r"^```python\n# (jigsaw/\S+)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        assert quoted in (ROOT / name).read_text(), f"{name} has changed: quote it as it is"


def _made(*arguments, **variables):
    """What make prints with these variables, and none of a make that runs this test."""
    env = {k: v for k, v in os.environ.items() if k not in ("CI", "MAKEFLAGS", "MAKELEVEL", "MFLAGS")} | variables
    ran = subprocess.run(["make", *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


def test_only_ci_installs_what_is_no_python_package():
    for target in ("test", "check"):
        assert "apt-get" not in _made("--dry-run", target)
    assert "apt-get" in _made("--dry-run", "check", CI="true")


def test_without_a_newer_python_its_tests_are_left_out():
    assert "no Python 3.13, so no tests with the newest packages" in _made("test-newest", "PYTHON_NEWEST=")


def test_scripts_that_make_runs_exist():
    scripts = re.findall(r"\S+\.py(?!\w)", (ROOT / "Makefile").read_text())
    assert len(scripts) >= 4
    assert not [s for s in scripts if not (ROOT / s).is_file()]


def test_ci_fails_when_a_check_fails(tmp_path):
    """`.ci/run` hands on the status of `make check`."""
    ci = tmp_path / ".ci" / "run"
    ci.parent.mkdir()
    ci.write_text((ROOT / ".ci" / "run").read_text())
    for status in (0, 3):
        (tmp_path / "Makefile").write_text(f"check:\n\t@exit {status}\n")
        ran = subprocess.run(["bash", str(ci)], capture_output=True, check=False)
        assert (ran.returncode == 0) == (status == 0)


def test_check_passes(capsys):
    assert main(["check", "--ranks", "2"]) == 0
    printed = capsys.readouterr().out
    assert "backends: gloo" in printed
    assert re.search(r"parity: +tiles on 2 ranks give what plain torch gives", printed)
    assert re.search(r"torch +\d+\.\d+", printed)


def test_every_command_has_help(capsys):
    for name in COMMANDS:
        with pytest.raises(SystemExit, match="0"):
            main([name, "--help"])
        assert f"usage: python -m jigsaw {name}" in capsys.readouterr().out


def test_an_unknown_command_lists_what_there_is(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["chekc"])
    assert "check" in capsys.readouterr().err


# -- names ------------------------------------------------------------------------------------------------------------

# the same on purpose: what `python -m jigsaw` asks of every command, and `open_store` of every format
ALIKE_ON_PURPOSE = {"arguments", "run", "claims"}
# one word: the nouns of docs/design.md, torch's and pytest's own words, and `comm.count()`, which is public
ONE_WORD = {"arguments", "run", "count"}


def _module_names(kinds):
    """Every module-level name of a kind, without its underscores, and the files that define it (overloads: once)."""
    found = {}
    for file in SOURCES:
        for node in _tree(file).body:
            if isinstance(node, kinds):
                found.setdefault(node.name.lstrip("_"), set()).add(str(file.relative_to(ROOT)))
    return found


def test_no_class_name_twice():
    assert not {name: files for name, files in _module_names(ast.ClassDef).items() if len(files) > 1}


def test_no_function_name_in_two_files_unless_on_purpose():
    found = _module_names((ast.FunctionDef, ast.AsyncFunctionDef))
    assert {name for name, files in found.items() if len(files) > 1} == ALIKE_ON_PURPOSE


def _imported_names():
    """Names that a file imports from a file of jigsaw."""
    for file in SOURCES:
        for node in ast.walk(_tree(file)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("jigsaw"):
                yield from (alias.name for alias in node.names)


def _public_names():
    for package in ("", "dryrun", "io", "metrics", "nn", "ops", "testing"):
        yield from _imported_names_of(ROOT / "jigsaw" / package / "__init__.py")


def _imported_names_of(file):
    return (a.name for n in ast.walk(_tree(file)) if isinstance(n, ast.ImportFrom) for a in n.names)


def test_functions_that_other_files_use_have_names_of_several_words():
    defined = set(_module_names((ast.FunctionDef, ast.AsyncFunctionDef)))
    used = {name for name in _imported_names() if name in defined}
    assert {name for name in used if "_" not in name.strip("_")} <= {*_public_names(), *ONE_WORD}


def test_no_file_name_twice_in_io():
    stems = [file.stem for file in (ROOT / "jigsaw" / "io").rglob("*.py") if file.stem != "__init__"]
    assert len(stems) == len(set(stems))


def test_no_test_file_has_the_name_of_another():
    names = [file.name for file in (ROOT / "tests").rglob("test_*.py")]  # pytest imports them by their names alone
    assert len(names) == len(set(names))


def test_the_glossary_names_what_is_there():
    text = (ROOT / "docs" / "design.md").read_text().split("## Glossary")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    assert 30 <= len(rows) <= 40, "the words of the domain; a type says in its docstring what it is"
    words = [row[0] for row in rows]
    assert len(words) == len(set(words))
    everything = "\n".join(file.read_text() for file in SOURCES)
    for word, meaning, files in rows:
        for file in re.findall(r"`(\S+?)`", files):
            assert (ROOT / "jigsaw" / file).is_file(), f"{word}: {file}"
        for name in re.findall(r"`([A-Za-z_]\w*)`", meaning):
            assert re.search(rf"\b{name}\b", everything), f"{word}: {name}"


def test_files_import_each_other_in_no_circle():
    imported = grimp.build_graph("jigsaw", exclude_type_checking_imports=True, cache_dir=None)
    order = graphlib.TopologicalSorter()
    for file in imported.modules - {file for file in imported.modules if imported.find_children(file)}:
        order.add(file, *imported.find_modules_directly_imported_by(file))
    order.prepare()  # raises graphlib.CycleError, which names the files


# -- words ------------------------------------------------------------------------------------------------------------

MOST_WORDS = 25
FIRST_WORDS_THAT_ASK = {"what", "whether", "where", "who", "whom", "whose", "which", "of", "how", "when", "that", "why"}
NAMES_THAT_SAY_NOTHING = {"found", "given", "made", "mine", "how", "there", "told", "said", "here"}
BRITISH = re.compile(
    r"\b\w*(?:neighbour|normalis|initialis|specialis|serialis|factoris|organis|recognis|parallelis(?!m)|analyse(?!s)|synthesise"
    r"|behaviour|colour|honour|favour|centre|metres?\b|metres?_|labelled|travell|grey|towards)\w*",
    re.IGNORECASE,
)
IS_NO_NOUN = re.compile(r"(?<!here )\b(?:is|are) no (?!longer\b|more\b)\w+")


def _docstrings(files):
    """Every docstring, beside the place that it stands at."""
    for file in files:
        for node in ast.walk(_tree(file)):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield f"{file.relative_to(ROOT)}: {getattr(node, 'name', 'the module')}", ast.get_docstring(node) or ""


def _texts(source):
    """Every string and comment, with its line. An f-string has X for each value; comments on lines in a row are one."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "X" for part in node.values)
    comments = {
        t.start[0]: t.string[1:]
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type == tokenize.COMMENT
    }
    for line, text in comments.items():
        yield line, text + comments.get(line + 1, "")


def _asks(text):
    return re.split(r"\s", text)[0].strip("`*.,:;").lower() in FIRST_WORDS_THAT_ASK


def _hard_words(text):
    prose = " ".join(re.sub(r"`[^`]*`", "", text).split())
    return [*BRITISH.findall(prose), *IS_NO_NOUN.findall(prose)]


def _long_sentences(docstring):
    """The sentences of prose with more than 25 words; code, names and what is in parentheses count as one.

    Tables and pictures, which are indented or between lines, are not prose.
    """
    blocks = re.split(r"\n\s*\n|\n(?=- |\*\w+\*:|>>>)", docstring)
    for block in blocks:
        lines = block.split("\n")
        if re.match(r"\s|>>>|[=+|]", lines[0]) or any(line.startswith("==") for line in lines):
            continue
        text = re.sub(r"``[^`]*``|`[^`]*`|\"[^\"]*\"|\[[^\]]*\]|\([^)]*\)", "X", " ".join(block.split()))
        for sentence in re.split(r"(?<=[.!?:;])\s+", text):
            if len(re.findall(r"\S*\w\S*", sentence)) > MOST_WORDS:
                yield sentence


def _unclear_variables(tree):
    """The names of variables and arguments within functions that say nothing of what they hold."""
    for function in ast.walk(tree):
        if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            names = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
            names |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
            yield from names & NAMES_THAT_SAY_NOTHING


def test_docstrings_begin_with_a_verb_or_a_noun():
    assert _asks("Whether a tile is cut.")
    assert not _asks("Say whether a tile is cut.")
    assert not [place for place, text in _docstrings(SOURCES) if _asks(text)], "say Return, Say whether, Rows that"


def test_docstrings_have_no_hard_words():
    assert _hard_words("A mesh is no tensor of neighbours.") == ["neighbours", "is no tensor"]
    assert not _hard_words("There is no mesh, and a rank is no longer one of the `neighbours`.")
    assert not {place: words for place, text in _docstrings(SOURCES) if (words := _hard_words(text))}


def test_messages_and_comments_say_is_not_a():
    def is_no(source):
        return {(line, words) for line, text in _texts(source) for words in IS_NO_NOUN.findall(" ".join(text.split()))}

    assert is_no("# this is\n# no mesh\nraise E(f'{x} is '\n  'no tile')  # no more\n") == {
        (1, "is no mesh"),
        (3, "is no tile"),
    }
    assert not {(str(file.relative_to(ROOT)), *words) for file in SOURCES for words in is_no(file.read_text())}


def test_names_have_american_spelling():
    assert BRITISH.findall("x = self._analyse(_MILLIMETRES, analysis, parameters)") == ["_analyse", "_MILLIMETRES"]
    assert not {str(file.relative_to(ROOT)): words for file in SOURCES if (words := BRITISH.findall(file.read_text()))}


def test_sentences_of_docstrings_are_short():
    assert list(_long_sentences("A " + "very " * 24 + "`long name` indeed.")) == ["A " + "very " * 24 + "X indeed."]
    assert not list(_long_sentences("A short one; " + "word " * 20 + ".\n\n    " + "picture " * 30))
    assert not {place: long for place, text in _docstrings(SOURCES) if (long := list(_long_sentences(text)))}


def test_variables_are_nouns():
    assert set(_unclear_variables(ast.parse("def f(how):\n    found = [made for made in how]"))) == {
        "how",
        "found",
        "made",
    }
    unclear = {str(file.relative_to(ROOT)): sorted(_unclear_variables(_tree(file))) for file in SOURCES}
    assert not {name: words for name, words in unclear.items() if words}


CLOCKS_OF_THE_DAY = {
    ("time", "time"),
    ("time", "time_ns"),
    ("datetime", "now"),
    ("datetime", "utcnow"),
    ("date", "today"),
}


def test_no_clock_of_the_day_decides():
    """Those of hosts differ, and are set back; waits count by `time.monotonic`.  A disk cache alone asks when its files
    were used, for the order in which they leave.
    """
    asked = [
        f"{file.relative_to(ROOT)}:{node.lineno}"
        for file in SOURCES
        if file.name != "cache_folder.py"
        for node in ast.walk(_tree(file))
        if isinstance(node, ast.Attribute)
        and (getattr(node.value, "id", getattr(node.value, "attr", "")), node.attr) in CLOCKS_OF_THE_DAY
    ]
    assert not asked
