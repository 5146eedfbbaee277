"""Makes the tables and plots of `docs/reading.md` from the result files of `read.py`.

    python benchmarks/report.py                          # of the newest result file of each case
    python benchmarks/report.py --results FILE [FILE …]  # of these

What stands between the markers of the page is replaced; the rest of it is left.  Rows in which jigsaw is worse than the
best other, or misses its goal, say so.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- begin: made by benchmarks/report.py -->", "<!-- end: made by benchmarks/report.py -->"

Result = dict[str, Any]


@dataclass(frozen=True)
class Question:
    """What is asked of a case: its number, in which unit, over what, and the goal."""

    title: str
    field: str
    over: str  # "best other", "h5py", "bare-loop", or a field of the same result
    goal: dict[int, float]  # by threads; {0: …} for any
    ours: str = "jigsaw"
    factor: float = 1.0
    unit: str = "s"
    more_is_better: bool = False

    def goal_of(self, result: Result) -> float | None:
        return self.goal.get(result.get("threads", 0), self.goal.get(0))


QUESTIONS: dict[str, Question] = {
    "globe-2x2": Question("The globe a chunk, 4 ranks 2 × 2: CPU", "cpu_s", "best other", {0: 1 / 3.5}),
    "globe-bands": Question("The globe a chunk, 4 bands of latitude: CPU", "cpu_s", "best other", {0: 1 / 4}),
    "tiles": Question("Small chunks, 1 rank: CPU", "cpu_s", "best other", {0: 1.0}),
    "shard": Question("Shards of small chunks, 1 rank: CPU", "cpu_s", "best other", {0: 1.0}),
    "hdf5": Question("Deflated HDF5, 1 rank: wall time", "wall_s", "h5py", {1: 0.55, 2: 0.3}),
    "pipeline": Question(
        "The whole pipeline, over reading and decoding alone: CPU", "cpu_s", "bare-loop", {0: 1.15}, "jigsaw-normalized"
    ),
    "memory": Question(
        "Peak memory of 4 ranks, over its bound", "peak_pss_bytes", "bound_bytes", {0: 1.0}, "jigsaw-loader", 1e-9, "GB"
    ),
    "waiting": Question(
        "A step as long as its read: share of time waiting", "waiting_share", "", {0: 0.02}, "jigsaw-loader", 100, "%"
    ),
    "far": Question(
        "HTTP with 20 ms latency: MB/s, over the server's limit", "reached_bytes_per_s", "limit_bytes_per_s",
        {0: 0.8}, "jigsaw-loader", 1e-6, "MB/s", more_is_better=True,
    ),
    "volumes": Question("A quarter of a scan, 4 ranks: wall time", "wall_s", "best other", {0: 1.0}),
}  # fmt: skip


# -- results ---------------------------------------------------------------------------------------------------------


def read(files: Sequence[Path]) -> tuple[list[Result], dict[str, dict[str, str]]]:
    """The results of each case, from the last of the files that has it, and each case's header."""
    cases: dict[str, list[Result]] = {}
    headers: dict[str, dict[str, str]] = {}
    for file in files:
        header, *results = [json.loads(line) for line in file.read_text().splitlines()]
        here: dict[str, list[Result]] = {}
        for result in results:
            here.setdefault(result.get("case", ""), []).append(result)
        for case in (each for each in QUESTIONS if each in here):
            cases[case], headers[case] = here[case], {**header, "file": file.name}
    return [result for case in QUESTIONS for result in cases.get(case, [])], headers


def groups(results: Sequence[Result]) -> Iterator[list[Result]]:
    """The results that answer one question: of the same case, store, mesh and threads."""
    found: dict[str, list[Result]] = {}
    for result in results:
        key = json.dumps([result.get(k) for k in ("case", "store", "mesh", "threads")])
        found.setdefault(key, []).append(result)
    yield from found.values()


@dataclass(frozen=True)
class Answer:
    """jigsaw's number, what it is held against, and whose that is."""

    question: Question
    ours: Result
    other: str
    theirs: float | None
    ratio: float

    @property
    def verdict(self) -> str:
        goal, q = self.question.goal_of(self.ours), self.question
        worse = (lambda x, y: x < y) if q.more_is_better else (lambda x, y: x > y)
        if q.over in ("best other", "h5py") and worse(self.ratio, 1):
            return "**loses**"
        if goal is not None and worse(self.ratio, goal):
            return "**misses its goal**"
        return "yes"


def answer(group: Sequence[Result]) -> Answer | None:
    """None where jigsaw, or what it is held against, was not measured."""
    question = QUESTIONS[group[0]["case"]]
    ours = next((r for r in group if r["engine"] == question.ours), None)
    if ours is None:
        return None
    value = ours[question.field]
    if not question.over:
        return Answer(question, ours, "", None, value)
    if question.over in ours:
        return Answer(question, ours, "its bound" if question.over == "bound_bytes" else "the limit",
                      ours[question.over], value / ours[question.over])  # fmt: skip
    others = [r for r in group if not r["engine"].startswith("jigsaw") and question.over in (r["engine"], "best other")]
    if not others:
        return None
    best = min(others, key=lambda r: r[question.field])
    return Answer(question, ours, best["engine"], best[question.field], value / best[question.field])


# -- tables ----------------------------------------------------------------------------------------------------------


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows)]


def shown(x: float | None, q: Question) -> str:
    return "" if x is None else f"{x * q.factor:.3g} {q.unit}"


def summary(results: Sequence[Result]) -> list[str]:
    """A row a question: jigsaw, the other, their ratio, the goal, and whether it is reached."""
    rows: list[list[str]] = []
    for group in groups(results):
        found = answer(group)
        if found is None:
            continue
        q, goal = found.question, found.question.goal_of(found.ours)
        sign = "≥" if q.more_is_better else "≤"
        theirs = f"{shown(found.theirs, q)} {found.other}".strip()
        ratio, bound = (f"{x:.2f}" if q.over else f"{100 * x:.2g} %" for x in (found.ratio, goal or 0.0))
        rows.append([
            q.title, where(found.ours), shown(found.ours[q.field], q), theirs, ratio,
            f"{sign} {bound}" if goal is not None else "", found.verdict,
        ])  # fmt: skip
    return table(("case", "store", "jigsaw", "other", "ratio", "goal", "reached"), rows)


def where(result: Result) -> str:
    """The store, and the threads and ranks where they tell results of a case apart."""
    threads = f", {result['threads']} threads" if result.get("threads", 1) > 1 else ""
    return f"{result['store']}{threads}, {result['ranks']} rank{'s' * (result['ranks'] > 1)}"


def details(results: Sequence[Result]) -> Iterator[str]:
    """A table a case: every contender, the best first."""
    for group in groups(results):
        q = QUESTIONS[group[0]["case"]]
        ordered = sorted(group, key=lambda r: r[q.field], reverse=q.more_is_better)
        yield from ("", f"**{q.title}** ({where(group[0])})", "")
        columns = [(name, show) for name, show in _COLUMNS.items() if any(name in r for r in group)]
        rows = [
            [
                f"**{r['engine']}**" if r["engine"] == q.ours else r["engine"],
                *(show(r[k]) if k in r else "" for k, show in columns),
            ]
            for r in ordered
        ]
        yield from table(("contender", *(_HEADS[k] for k, _ in columns)), rows)


_COLUMNS: dict[str, Callable[[Any], str]] = {
    "cpu_s": lambda x: f"{x:.3g}",
    "wall_s": lambda x: f"{x:.3g}",
    "decoded_bytes": lambda x: f"{x / 1e6:.0f}",
    "peak_rss_bytes": lambda x: f"{x / 1e6:.0f}",
    "peak_pss_bytes": lambda x: f"{x / 1e6:.0f}",
    "idle_pss_bytes": lambda x: f"{x / 1e6:.0f}",
    "bound_bytes": lambda x: f"{x / 1e6:.0f}",
    "waiting_share": lambda x: f"{100 * x:.2g}",
    "step_s": lambda x: f"{x:.3g}",
    "reached_bytes_per_s": lambda x: f"{x / 1e6:.1f}",
    "limit_bytes_per_s": lambda x: f"{x / 1e6:.1f}",
}
_HEADS = {
    "cpu_s": "CPU s",
    "wall_s": "wall s",
    "decoded_bytes": "decoded MB",
    "peak_rss_bytes": "largest rank MB",
    "peak_pss_bytes": "peak MB",
    "idle_pss_bytes": "of that before reading MB",
    "bound_bytes": "bound MB",
    "waiting_share": "waiting %",
    "step_s": "step s",
    "reached_bytes_per_s": "MB/s",
    "limit_bytes_per_s": "limit MB/s",
}


def provenance(headers: dict[str, dict[str, str]], results: Sequence[Result]) -> Iterator[str]:
    """Where the numbers come from, and the contenders' settings."""
    for file in dict.fromkeys(header["file"] for header in headers.values()):
        header = next(h for h in headers.values() if h["file"] == file)
        named = f"[{file}](../benchmarks/results/{file})"
        yield f"- {named}: {header['hardware']}; {header['date']}; `{header['command']}`"
    yield ""
    yield from table(
        ("contender", "settings"), sorted({(r["engine"], _settings(r)) for r in results if "settings" in r})
    )


def _settings(result: Result) -> str:
    return ", ".join(f"{k} {v}" for k, v in result["settings"].items() if k != "threads")


# -- plots -----------------------------------------------------------------------------------------------------------


def plots(results: Sequence[Result], folder: Path) -> list[str]:
    """A picture a case with contenders: bars, the best at the top; the names of the files."""
    import matplotlib as mpl

    mpl.use("Agg")
    made: list[str] = []
    for case, q in QUESTIONS.items():
        found = [g for g in groups(results) if g[0]["case"] == case and len(g) > 1]
        if found:
            made.append(f"reading-{case}.png")
            _plot(found, q, folder / made[-1])
    return made


def _plot(found: Sequence[Sequence[Result]], q: Question, path: Path) -> None:
    import matplotlib.pyplot as plt

    rows = max(len(group) for group in found)
    figure, axes = plt.subplots(
        1, len(found), figsize=(max(5.0, 3.2 * len(found)), 0.6 + 0.26 * rows), squeeze=False, layout="constrained"
    )
    for axis, group in zip(axes[0], found, strict=True):
        ordered = sorted(group, key=lambda r: r[q.field], reverse=not q.more_is_better)
        colors = ["#c0392b" if r["engine"] == q.ours else "#9aa5b1" for r in ordered]
        bars = axis.barh([r["engine"] for r in ordered], [r[q.field] * q.factor for r in ordered], color=colors)
        axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
        axis.set_title(where(group[0]), fontsize=8)
        axis.set_xlabel(f"{_HEADS[q.field].rsplit(' ', 1)[0]} [{q.unit}]", fontsize=7)
        axis.tick_params(labelsize=7)
        axis.margins(x=0.15)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(q.title, fontsize=9)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


# -- the page --------------------------------------------------------------------------------------------------------


def page(text: str, files: Sequence[Path], folder: Path) -> str:
    """The page with its numbers made anew; the plots are written into `folder`."""
    results, headers = read(files)
    pictures = [f"![{name}]({name})" for name in plots(results, folder)]
    lines = ["", *summary(results), "", *pictures, "", "## Every contender", *details(results), "",
             "## Where the numbers come from", "", *provenance(headers, results), ""]  # fmt: skip
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}"


def newest() -> list[Path]:
    """The result files, the newest last."""

    def date(file: Path) -> str:
        with file.open() as f:
            return json.loads(f.readline())["date"]

    return sorted((ROOT / "benchmarks" / "results").glob("read-*.jsonl"), key=lambda file: (date(file), file.name))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, nargs="+", default=newest())
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "reading.md")
    args = parser.parse_args()
    args.page.write_text(page(args.page.read_text(), args.results, args.page.parent))


if __name__ == "__main__":
    main()
