"""What README.md says is true: its code runs, its numbers are those of the result files, each page is linked."""

import contextlib
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr

from jigsaw.testing import run_on_ranks

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
FIRST_SCREEN, _, REST = TEXT.partition("<!-- end of first screen -->")
BEFORE, AFTER, VOLUME = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
FENCED = r"^```.*?^```$"

# -- the code ---------------------------------------------------------------------------------------------------------


def _lines(code):
    return [line for line in code.splitlines() if line.strip()]


def test_twelve_lines_before_and_after():
    before, after = _lines(BEFORE), _lines(AFTER)
    assert len(before) == len(after) == 12
    assert before[-4:] == after[-4:], "the loop's body is the same"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A globe of 33 x 64 points and a scan of 33 x 20 x 24 voxels, a chunk a step and a few slices a chunk."""
    path, r = tmp_path_factory.mktemp("readme"), np.random.default_rng(0)
    dims, names = ("time", "latitude", "longitude"), ("2m_temperature", "10m_u_component_of_wind")
    coords = {
        "time": np.datetime64("2020-01-01", "ns") + np.arange(8) * np.timedelta64(6, "h"),
        "latitude": np.linspace(90, -90, 33),
        "longitude": np.arange(64) * 5.625,
    }
    globe = xr.Dataset({n: (dims, r.standard_normal((8, 33, 64)).astype("f4")) for n in names}, coords)
    globe.to_zarr(path / "globe.zarr", zarr_format=2, encoding={n: {"chunks": (1, 33, 64)} for n in names})
    scan = xr.Dataset({"scan": (("z", "y", "x"), r.standard_normal((33, 20, 24)).astype("f4"))})
    scan.to_zarr(path / "scan.zarr", zarr_format=2, encoding={"scan": {"chunks": (8, 20, 24)}})
    return path


def _run(code, folder):
    """Run a block of README in the folder; the names that it leaves."""
    torch.manual_seed(0)
    left = {}
    with contextlib.chdir(folder):
        exec(compile(code, "README.md", "exec"), left)
    return left


def _trained(code, folder):
    left = _run(code, folder)
    assert len(left["optimizer"].state) == 4  # it has stepped
    return left["loss"].item(), {n: p.detach().clone() for n, p in left["model"].named_parameters()}


def test_before_and_after_train_alike(folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    loss, weights = _trained(BEFORE, folder)
    for rank_loss, rank_weights in run_on_ranks(4, _trained, AFTER, folder):
        assert rank_loss == pytest.approx(loss, rel=1e-5)
        torch.testing.assert_close(rank_weights, weights, rtol=1e-4, atol=1e-5)


def _features(folder):
    left = _run(VOLUME, folder)
    tile = left["features"]
    whole = left["layer"](left["scan"].full_tensor())
    return tuple(tile.shape), tuple(tile.local.shape), (tile.full_tensor() - whole).abs().max().item()


def test_a_volume_through_an_unmodified_layer(folder):
    assert len(_lines(VOLUME)) == 5
    for (shape, local, error), rows in zip(run_on_ranks(4, _features, folder), (9, 8, 8, 8), strict=True):
        assert shape == (1, 8, 33, 20, 24)
        assert local == (1, 8, rows, 20, 24)
        assert error < 1e-5


# -- the words --------------------------------------------------------------------------------------------------------


def _prose(text):
    """What a reader sees as words: no code blocks, pictures, comments or link targets."""
    text = re.sub(FENCED, "", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"<!--.*?-->|!\[.*?\]\(.*?\)", "", text, flags=re.DOTALL)
    return re.sub(r"\]\(.*?\)", "]", text)


def test_the_first_screen_is_short():
    assert REST, "the marker is missing"
    words = [word for word in _prose(FIRST_SCREEN).split() if re.search(r"\w", word)]
    assert len(words) <= 450


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", TEXT)
    assert len(targets) > 8
    local = [t for t in targets if "://" not in t and not t.startswith("benchmarks/results")]
    assert not [t for t in local if not (ROOT / t).exists()]


def test_the_first_screen_says_what_runs_and_what_has_not():
    assert {"make weather", "make medical"} <= set(re.findall(r"^make \w+", FIRST_SCREEN, re.MULTILINE))
    assert "Several GPUs have not been tried" in FIRST_SCREEN


def test_every_page_is_linked():
    pages = {f"docs/{page.name}" for page in ROOT.glob("docs/*.md")}
    assert pages <= set(re.findall(r"\]\(([^)#]+)", TEXT))


def _linked_by_kind(text):
    """The pages that each table of the documentation links, by the head of the table."""
    tables = re.findall(r"^\| ([\w -]+) \| \|\n\|---\|---\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    return {kind: re.findall(r"\]\(([^)]+)\.md\)", rows) for kind, rows in tables}


def test_the_site_has_the_same_index():
    pages = runpy.run_path(str(ROOT / "docs" / "conf.py"))["PAGES"]
    one_by_one = {
        kind.lower(): [page for page in listed if "*" not in page and not page.startswith("docs/reference/")]
        for kind, listed in pages.items()
    }
    linked = _linked_by_kind(TEXT.partition("## Documentation")[2])
    examples = [page for page in linked["tutorials"] if page.startswith("examples/")]
    assert sorted(examples) == sorted(str(page)[:-3] for page in _below_root("examples/*/README.md"))
    linked["tutorials"] = [page for page in linked["tutorials"] if page not in examples]
    assert linked == one_by_one


def _below_root(pattern):
    return [page.relative_to(ROOT) for page in ROOT.glob(pattern)]


def test_as_many_nets_are_exact_as_it_says():
    (least,) = re.findall(r"over (\d+) published nets\]\(docs/models.md\) of sixteen packages", TEXT)
    published, _, _ = (ROOT / "docs" / "models.md").read_text().partition("\n## by hand\n")
    assert len(re.findall(r"^## ", published, re.MULTILINE)) == 16
    assert len(re.findall(r"^\| .* \| 2, 3, 2x2 \| .* \| nothing \|$", published, re.MULTILINE)) > int(least)


# -- the numbers ------------------------------------------------------------------------------------------------------
#
# A result file is JSON lines: first {"hardware", "date", "command"}, then a case a line as the script prints it.
# A cell of the table is a number, or … until it is measured, and a comment that says which: `field: key=value …` is
# that field of the one case with these values; `least field:` or `greatest field:` that of the best of several.

CELL = re.compile(
    r"(?P<shown>…|\d+(?:\.\d+)?)\s*<!--\s*(?:(?P<best>least|greatest) )?(?P<field>\w+):\s*(?P<of>.*?)\s*-->"
)
LESS_IS_BETTER = {
    **dict.fromkeys(("cpu_s", "wall_s", "step_s", "peak_rss_bytes", "cpu_of_limit"), True),
    "speedup": False,
}


def _rows(text):
    return [line for line in text.splitlines() if line.startswith("|") and "](benchmarks/results/" in line]


def _result(row, root):
    """The cases of the result file that a row of the table links to."""
    file = root / re.search(r"\]\((benchmarks/results/[^)]*)\)", row).group(1)
    assert file.is_file(), f"a number without its result file: {row}"
    header, *cases = [json.loads(line) for line in file.read_text().splitlines()]
    assert header.keys() - {"note"} == {"hardware", "date", "command"}
    assert all(isinstance(v, str) and v for v in header.values())
    return cases


def _value(cell, cases):
    wanted = [pair.split("=") for pair in cell["of"].split()]
    found = [c for c in cases if all(str(c.get(key)) in value.split(",") for key, value in wanted)]
    assert found, f"no case of {cell['of']}"
    if not cell["best"]:
        assert len(found) == 1, f"{len(found)} cases of {cell['of']}"
    return {"least": min, "greatest": max}.get(cell["best"], min)(c[cell["field"]] for c in found)


def _check_row(row, root):
    """Every number of a row is that of its result file, to the digits shown."""
    for cell in CELL.finditer(row):
        if cell["shown"] != "…":
            digits = len(cell["shown"].partition(".")[2])
            assert float(cell["shown"]) == round(_value(cell, _result(row, root)), digits), row


def _loses(row):
    """Whether the numbers of a row say that jigsaw is worse than the other, or slower than one rank."""
    cells = [(cell["field"], float(cell["shown"])) for cell in CELL.finditer(row)]
    field, ours = cells[0]
    other = cells[1][1] if len(cells) > 1 else 1.0
    return ours > other if LESS_IS_BETTER[field] else ours < other


@pytest.mark.parametrize("row", _rows(TEXT))
def test_numbers_are_those_of_the_result_files(row):
    assert re.search(r"\]\(benchmarks/\w+\.py\)", row), "a number has its script"
    assert CELL.search(row), "a number has a comment that says where it stands in the result file"
    _check_row(row, ROOT)


def test_three_numbers_and_one_that_loses():
    rows = _rows(TEXT)
    assert len(rows) >= 3
    losing = [row for row in rows if "loses" in row]
    assert losing
    for row in rows:
        if "…" not in CELL.search(row)["shown"]:
            assert _loses(row) == (row in losing)


def test_a_wrong_number_is_found(tmp_path):
    head = json.dumps({"hardware": "2 cores", "date": "2020-01-01", "command": "x"})
    cases = [json.dumps({"engine": e, "ranks": 4, "cpu_s": s}) for e, s in (("a", 1.26), ("b", 3.5), ("c", 2.0))]
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "r.jsonl").write_text("\n".join([head, *cases]))
    cells = "| x | {} <!-- cpu_s: engine=a ranks=4 --> | {} <!-- least cpu_s: engine=b,c --> |"
    row = cells + " [r](benchmarks/results/r.jsonl) |"
    _check_row(row.format("1.3", "2.00"), tmp_path)
    _check_row(row.format("…", "…"), tmp_path)
    assert not _loses(row.format("1.3", "2.00"))
    assert _loses("2.1 <!-- cpu_s: a=b --> 2.0 <!-- cpu_s: a=c -->")
    assert _loses("0.8 <!-- speedup: a=b -->")
    for shown in (("1.2", "2.0"), ("1.3", "3.5")):
        with pytest.raises(AssertionError):
            _check_row(row.format(*shown), tmp_path)
    with pytest.raises(AssertionError, match="no case"):
        _check_row(row.format("1.3", "2.0").replace("engine=a", "engine=d"), tmp_path)
    with pytest.raises(AssertionError, match="without its result file"):
        _check_row(row.format("1.3", "2.0").replace("r.jsonl", "s.jsonl"), tmp_path)


# -- the picture ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["pieces", "parallelism"])
def test_a_picture_is_what_its_script_draws(tmp_path, name):
    from matplotlib.image import imread  # here, because every rank imports this file

    kept, again = ROOT / "docs" / f"{name}.png", tmp_path / f"{name}.png"
    assert "](docs/pieces.png)" in FIRST_SCREEN
    assert kept.stat().st_size < 300_000
    subprocess.run([sys.executable, ROOT / "docs" / f"draw_{name}.py", "--out", again], check=True)
    old, new = imread(kept), imread(again)
    assert old.shape == new.shape
    assert np.abs(old - new).mean() < 0.01  # fonts differ a little
