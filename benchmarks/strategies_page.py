"""Makes the tables of `docs/parallelism.md` from the newest result files of `strategies.py`, `tensor_blocks.py`,
`pipeline_waits.py` and `expert_load.py`.

What stands between the markers of the page is replaced; the rest of it is left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown_table import table_lines

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- begin: made by benchmarks/strategies.py -->", "<!-- end: made by benchmarks/strategies.py -->"
NETS = {
    "transformer": "Four transformer blocks",
    "unet": "A U-Net of three levels",
    "mixer": "A mixer of tokens and of channels",
    "experts": "Two blocks of eight experts, two a token",
}
Result = dict[str, Any]


def _newest(pattern: str) -> tuple[list[Result], str]:
    """The results of the newest file of a name, and where they come from."""
    files = [(json.loads(f.open().readline())["date"], f) for f in (ROOT / "benchmarks/results").glob(pattern)]
    if not files:
        return [], ""
    file = max(files)[1]
    header, *results = [json.loads(line) for line in file.read_text().splitlines()]
    where = f"- [{file.name}](../benchmarks/results/{file.name})"
    return results, f"{where}: {header['hardware']}; {header['date']}; `{header['command']}`"


def _ways(results: list[Result]) -> Iterator[str]:
    for net, title in NETS.items():
        rows = [r for r in results if r["case"] == net]
        if not rows:
            continue
        yield from (f"**{title}**, input {' x '.join(map(str, rows[0]['shape']))}, {rows[0]['ranks']} ranks", "")
        able = sorted((r for r in rows if "refused" not in r), key=lambda r: r["cpu_s"])
        yield from table_lines(
            ("way", "CPU s", "wall s", "sent MB", "weights and optimizer MB", "peak MB", "largest error"),
            [
                [
                    f"**{r['engine']}**" if r["engine"].startswith("jigsaw") else r["engine"],
                    f"{r['cpu_s']:.3g}", f"{r['wall_s']:.3g}", f"{r['sent_bytes'] / 1e6:.1f}",
                    f"{r['state_bytes'] / 1e6:.1f}", f"{r['peak_bytes'] / 1e6:.0f}", f"{r['max_rel_err']:.0e}",
                ]
                for r in able
            ],
        )  # fmt: skip
        for r in rows:
            if "refused" in r:
                yield from (f"- *{r['engine']}*: `{r['refused']}`", "")


def _blocks(results: list[Result]) -> Iterator[str]:
    rows = list[list[str]]()
    for block, tokens in dict.fromkeys((r["block"], r["tokens"]) for r in results):
        of_ranks = [r for r in results if (r["block"], r["tokens"]) == (block, tokens)]
        names = "flop", "bytes", "activations"
        rows.append([block, tokens, *(_in_turn(of_ranks, name) for name in names)])
    yield from table_lines(("block", "tokens", "FLOP", "bytes", "activations"), rows)


def _in_turn(results: list[Result], name: str) -> str:
    return ", ".join(f"{r[name]:.2f}" for r in results)


def _waits(results: list[Result]) -> Iterator[str]:
    rows = [
        [
            r["schedule"], str(r["ranks"]), str(r["stages"]), str(r["microbatches"]), f"{100 * r['waits']:.0f} %",
            "" if r["theory"] is None else f"{100 * r['theory']:.0f} %",
        ]
        for r in results
    ]  # fmt: skip
    yield from table_lines(("schedule", "ranks", "stages", "microbatches", "a rank waits", "theory"), rows)


def _loads(results: list[Result]) -> Iterator[str]:
    rows = [
        [
            f"{r['balance']:g}", str(r["steps"]), f"{r['loss']:.3g}", f"{r['busiest_expert']:.2f}",
            *(f"{r['busiest_rank'][ranks]:.2f}" for ranks in ("2", "4", "8")), f"{100 * r['dropped']:.1f} %",
        ]
        for r in results
    ]  # fmt: skip
    head = (
        "times the loss of balance",
        "steps",
        "loss",
        "busiest expert",
        "rank of 2",
        "of 4",
        "of 8",
        "dropped at 1.25",
    )
    yield from table_lines(head, rows)


_TITLES = {
    _blocks: "### Blocks of transformers beside Megatron's formula, with 2, 4 and 8 ranks",
    _waits: "### How long stages wait",
    _loads: "### How unevenly experts are asked",
}


def write_tables() -> None:
    """Make them anew."""
    page = ROOT / "docs" / "parallelism.md"
    text, lines, sources = page.read_text(), list[str](), list[str]()
    for pattern, told in (
        ("strategies-2-ranks-*.jsonl", _ways), ("strategies-4-ranks-*.jsonl", _ways),
        ("tensor-ways-2-ranks-*.jsonl", _ways), ("tensor-blocks-*.jsonl", _blocks), ("pipeline-waits-*.jsonl", _waits),
        ("expert-load-*.jsonl", _loads),
    ):  # fmt: skip
        results, where = _newest(pattern)
        title = "### Tensor parallel beside DTensor's" if pattern.startswith("tensor-ways") else _TITLES.get(told)
        lines += [title, ""] if title and results else []
        lines += told(results) if results else []
        sources += [where] if where else []
    before, rest = text.split(BEGIN)
    made = "\n".join(["", *lines, *sources, ""])
    page.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.split(END)[1]}")
