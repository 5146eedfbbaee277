"""Makes the tables of `docs/computing.md` from the result files of `computing.py` and `links.py`.

What stands between the markers of the page is replaced; the rest of it is left.  Rows in which another takes less
processor time, or sends fewer bytes, than the best of jigsaw on as many ranks say so.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from markdown_table import table_lines

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- begin: made by benchmarks/computing.py -->", "<!-- end: made by benchmarks/computing.py -->"
TITLES = {
    "mlp": "An MLP",
    "block": "A transformer block",
    "attention": "Attention over cut tokens",
    "convolutions": "Three convolutions 3 x 3, rows cut",
    "transform": "Spherical harmonics there and back",
    "vector transform": "Vector spherical harmonics there and back",
}
Result = dict[str, Any]


def _read(pattern: str, every: bool = False) -> tuple[list[Result], list[str]]:
    """The results of the newest files (each case of the last one that has it, or of `every` one), and where they come
    from.
    """
    found: dict[str, list[Result]] = {}
    told: dict[str, str] = {}
    files = [(json.loads(file.open().readline())["date"], file) for file in (ROOT / "benchmarks/results").glob(pattern)]
    for _, file in sorted(files):
        header, *results = [json.loads(line) for line in file.read_text().splitlines()]
        where = f"- [{file.name}](../benchmarks/results/{file.name})"
        for case in dict.fromkeys(r["case"] for r in results):
            key = f"{case} {file.name}" if every else case
            found[key] = [r for r in results if r["case"] == case]
            told[key] = f"{where}: {header['hardware']}; {header['date']}; `{header['command']}`"
    return [r for results in found.values() for r in results], list(dict.fromkeys(told.values()))


def _compared(results: Sequence[Result]) -> Iterator[str]:
    for case, title in TITLES.items():
        rows = [r for r in results if r["case"] == case]
        if not rows:
            continue
        yield from (f"**{title}**, input {' x '.join(map(str, rows[0]['shape']))}", "")
        able = [r for r in rows if "refused" not in r]
        yield from table_lines(
            ("contender", "CPU s", "wall s", "sent MB", "largest error", ""),
            [_row(r, able) for r in sorted(able, key=lambda r: r["cpu_s"])],
        )
        for r in rows:
            if "refused" in r:
                yield from (f"- *{r['engine']}*: `{r['refused']}`", "")


def _row(r: Result, able: Sequence[Result]) -> list[str]:
    is_ours = r["engine"].startswith("jigsaw")
    ours = [o for o in able if o["engine"].startswith("jigsaw") and _mesh_of(o) == _mesh_of(r)]
    wins: list[str] = []
    if not is_ours and ours:
        wins += ["less CPU"] * (r["cpu_s"] < min(o["cpu_s"] for o in ours))
        wins += ["fewer bytes"] * (r["sent_bytes"] < min(o["sent_bytes"] for o in ours))
    name = f"**{r['engine']}**" if is_ours else r["engine"]
    loses = f"**jigsaw loses: {' and '.join(wins)}**" if wins else ""
    numbers = [f"{r['cpu_s']:.3g}", f"{r['wall_s']:.3g}", f"{r['sent_bytes'] / 1e6:.1f}"]
    return [name, *numbers, f"{r['max_rel_err']:.0e}", loses]


def _mesh_of(r: Result) -> tuple[int, ...]:
    return tuple(r["mesh"].values())


def _links(results: Sequence[Result]) -> Iterator[str]:
    rows = [
        [
            r["case"], f"{r['computing_s']:.2f}", f"{r['transfer_s']:.2f}", f"{r['open_s']:.3f}", f"{r['slow_s']:.3f}",
            f"{100 * r['hidden']:.0f} %" + ("" if r["hidden"] >= 0.8 else " **misses 80 %**"),
            f"{r['counted_over_formula']:.3f}", f"{r['link_over_formula']:.3f}",
        ]
        for r in sorted(results, key=lambda r: r["case"])
    ]  # fmt: skip
    yield from table_lines(
        ("what travels", "computing s", "transfer s", "open link s", "slow link s", "hidden", "counted / formula",
         "on the link / formula"), rows,
    )  # fmt: skip


def write() -> None:
    """Make the page anew."""
    page = ROOT / "docs" / "computing.md"
    text = page.read_text()
    beside, where = _read("computing-*.jsonl")
    slow, where_slow = _read("links-*.jsonl", every=True)
    versions = beside[0]["versions"] if beside else {}
    lines = ["", "## Beside others", "", *_compared(beside), "## What a slow link costs", "", *_links(slow),
             "## Where the numbers come from", "", *where, *where_slow, "",
             ", ".join(f"{name} {number}" for name, number in versions.items()) + ".", ""]  # fmt: skip
    before, rest = text.split(BEGIN)
    page.write_text(f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}")
