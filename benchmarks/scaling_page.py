"""Makes the tables and pictures of `docs/scaling.md` from the results of `scaling.py`.

What stands between the markers of the page is replaced; the rest of it is left.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from markdown_table import table_lines

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- begin: made by benchmarks/scaling.py -->", "<!-- end: made by benchmarks/scaling.py -->"
WAYS = {1: "1-way: the batch alone", 2: "2-way: lat=2", 4: "4-way: lat=2, channel=2"}
# of the abstract, at 256 GPUs: efficiency and PFLOP/s; which of the two is 2-way it does not say
PUBLISHED = {1: ("51 %", ""), 2: ("68 or 72 %", "9 or 11"), 4: ("68 or 72 %", "9 or 11")}
CAPTION = "0.98 billion parameters. Stars: published. To the right blue is rows cut by `lat`, red with `channel`."
SAMPLE_BYTES = 2 * 69 * 721 * 1440 * 4  # a state and the next one
Result = dict[str, Any]


def _mesh(r: Result) -> str:
    return " ".join(f"{name}={size}" for name, size in r["mesh"].items()) if r["gpus"] > 1 else "one GPU"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _billions(r: Result) -> str:
    return f"{r['parameters'] / 1e9:.2f}"


def _way(r: Result) -> int:
    return r["gpus"] // r["mesh"].get("data", 1)


def _rate(r: Result) -> float:
    return r["batch"] / r["seconds"]


def _alone(r: Result, results: Sequence[Result]) -> Result:
    """The same model on one GPU."""
    return next(one for one in results if one["parameters"] == r["parameters"] and one["gpus"] == 1)


def _efficiency(r: Result, results: Sequence[Result]) -> float:
    return _rate(r) / (r["gpus"] * _rate(_alone(r, results)))


# -- tables -----------------------------------------------------------------------------------------------------------


def _weak(results: Sequence[Result]) -> Iterator[str]:
    rows: list[list[str]] = []
    at_end = [r for r in results if r["gpus"] == 256]
    largest = max(r["parameters"] for r in at_end)
    for r in sorted(at_end, key=lambda r: (-r["parameters"], _way(r))):
        efficiency, power = PUBLISHED[_way(r)] if r["parameters"] == largest else ("", "")
        rows.append(
            [_billions(r), WAYS[_way(r)], efficiency, f"{100 * _efficiency(r, results):.0f} %", power,
             f"{r['flop'] / r['seconds'] / 1e15:.1f}", _seconds(r["seconds"]), _seconds(r["messages_s"]),
             f"{_rate(r) * SAMPLE_BYTES / 1e9:.0f}"]
        )  # fmt: skip
    yield from table_lines(
        ("billions", "way", "efficiency published", "predicted", "PFLOP/s published", "predicted", "step",
         "of it messages", "to be read, GB/s"), rows,
    )  # fmt: skip


def _strong(results: Sequence[Result]) -> Iterator[str]:
    one = next(r for r in results if r["gpus"] == 1)
    rows = [
        [str(r["gpus"]), _mesh(r), _seconds(r["seconds"]), _seconds(r["messages_s"]),
         f"{one['seconds'] / r['seconds']:.2f}", "6.4" if r["gpus"] == 8 else "", r["bound"],
         f"{r['peak_bytes'] / 2**30:.1f}"]
        for r in results
    ]  # fmt: skip
    yield from table_lines(
        ("GPUs", "mesh", "step", "of it messages", "speed-up, predicted", "published", "bound", "peak, GiB"), rows
    )


def _best(results: Sequence[Result]) -> Iterator[str]:
    rows: list[list[str]] = []
    for parameters in sorted({r["parameters"] for r in results}):
        able = [r for r in results if r["parameters"] == parameters and r["fits"]]
        able.sort(key=lambda r: r["seconds"])
        firsts = {r["weights"]: place for place, r in reversed(list(enumerate(able)))}
        for place in sorted({0, 1, *firsts.values()}):
            r = able[place]
            rows.append(
                [_billions(r), f"{place + 1} of {len(able)}", _mesh(r), r["weights"], _seconds(r["seconds"]),
                 _seconds(r["messages_s"]), r["bound"], f"{r['peak_bytes'] / 2**30:.1f}"]
            )  # fmt: skip
    yield from table_lines(
        ("billions", "place", "mesh", "weights", "step", "of it messages", "bound", "peak, GiB"), rows
    )


def _four_billion(results: Sequence[Result]) -> Iterator[str]:
    rows: list[list[str]] = []
    for device in dict.fromkeys(r["device"] for r in results):
        for mesh in dict.fromkeys(_mesh(r) for r in results):
            ways = [r for r in results if r["device"] == device and _mesh(r) == mesh]
            able = sorted((r for r in ways if r["fits"]), key=lambda r: r["seconds"])
            too_big = [f"{_strategy(r)} ({r['peak_bytes'] / 2**30:.0f} GiB)" for r in ways if not r["fits"]]
            first = able[0] if able else None
            told = ["nothing", "", "", "", ""]
            if first is not None:
                each = _seconds(first["seconds"] / first["batch"])
                peak = f"{first['peak_bytes'] / 2**30:.0f} of {first['memory_bytes'] / 2**30:.0f}"
                told = [_strategy(first), _seconds(first["seconds"]), each, first["bound"], peak]
            rows.append([device, mesh, str(ways[0]["batch"]), *told, ", ".join(too_big)])
    yield from table_lines(
        ("8 of", "mesh", "batch", "fastest that fits", "step", "a sample", "bound", "peak, GiB", "does not fit"), rows
    )


def _planning(results: Sequence[Result]) -> Iterator[str]:
    one = results[0]
    yield f"`advise` for {_billions(one)} billion parameters, {one['batch']} samples on {one['gpus']} H100 in nodes of"
    yield f"eight, looked at {one['options']} meshes and strategies, in {one['cpu_s']:.0f} s of one core."
    yield "The best five, and behind them the first with each axis:"
    yield ""
    rows = [
        [str(r["place"]), _mesh(r), r["strategy"], _seconds(r["seconds"]), r["bound"], f"{r['peak_bytes'] / 2**30:.0f}"]
        for r in results
    ]
    yield from table_lines(("place", "mesh", "strategy", "step", "bound", "peak, GiB"), rows)


def _strategy(r: Result) -> str:
    return f"{r['weights']} weights" + ", blocks twice" * r["checkpoint"]


# -- pictures ---------------------------------------------------------------------------------------------------------


def _draw(results: Sequence[Result], folder: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    colors = {1: "#9aa5b1", 2: "#3d87ad", 4: "#c0392b"}
    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    weak = [r for r in results if r["case"] == "weak"]
    largest = max(r["parameters"] for r in weak)
    for way, name in WAYS.items():
        mine = [r for r in weak if _way(r) == way and r["parameters"] == largest]
        mine.sort(key=lambda r: r["gpus"])
        left.plot([r["gpus"] for r in mine], [100 * _efficiency(r, weak) for r in mine], "o-", ms=3,
                  color=colors[way], label=f"{name}, predicted")  # fmt: skip
    left.plot([256], [51], "*", ms=11, color=colors[1], mec="k", label="published, 1-way")
    left.plot([256, 256], [68, 72], "*", ms=11, color="w", mec="k", label="published, 2- and 4-way")
    left.set(xscale="log", xlabel="GPUs, as many samples", ylabel="efficiency [%]", ylim=(0, 108))
    left.set_xticks([4**n for n in range(5)], [str(4**n) for n in range(5)])
    strong = [r for r in results if r["case"] == "strong"]
    one = next(r for r in strong if r["gpus"] == 1)["seconds"]
    for r in strong:
        color = colors[4] if "channel" in r["mesh"] else colors[2]
        right.plot(r["gpus"], one / r["seconds"], "o", ms=5, color=color)
    right.plot([1, 8], [1, 8], ":", color="#9aa5b1")
    right.plot(8, 6.4, "*", ms=11, color="w", mec="k")
    right.set(xlabel="GPUs, one sample", ylabel="speed-up")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    left.legend(fontsize=6, loc="lower left")
    figure.savefig(folder / "scaling.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


# -- the page ---------------------------------------------------------------------------------------------------------


def page_text(before: str, results: Sequence[Result], header: Result, file: str) -> str:
    """The page with its tables made anew."""
    parts = {case: [r for r in results if r["case"] == case] for case in dict.fromkeys(r["case"] for r in results)}
    picture = "predicted efficiency on 1 to 256 GPUs, and speed-up on 1 to 8"
    sections = [
        (f"![{picture}](scaling.png)", (CAPTION, "")),
        ("### Weak scaling: 256 samples on 256 GPUs", _weak(parts["weak"])),
        ("### Strong scaling, 0.98 billion parameters", _strong(parts["strong"])),
        ("## Ours: the best mesh of 256", _best(parts["best"])),
        ("## Four billion parameters on eight GPUs", _four_billion(parts["four-billion"])),
        ("### Every strategy on eight H100, eight samples", _planning(parts["eight"])),
        ("## What planning costs (the goal is 60 s)", _planning(parts["planning"])),
    ]
    lines = [""]
    for heading, rows in sections:
        lines += [heading, "", *rows]
    lines += [
        f"[{file}](../benchmarks/results/{file}): {header['hardware']}; {header['date']}; `{header['command']}`.",
        "",
    ]
    above, rest = before.split(BEGIN)
    return f"{above}{BEGIN}\n" + "\n".join(lines) + f"\n{END}{rest.split(END)[1]}"


def write(file: Path) -> None:
    """Make tables and pictures anew."""
    page = ROOT / "docs" / "scaling.md"
    header, *results = [json.loads(line) for line in file.read_text().splitlines()]
    page.write_text(page_text(page.read_text(), results, header, file.name))
    _draw(results, page.parent)
