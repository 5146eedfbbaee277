"""Makes the tables and pictures of `docs/scaling.md` from the results of `scaling.py`.

What stands between the markers of the page is replaced; the rest of it is left.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from markdown_table import table_lines

ROOT = Path(__file__).parents[1]
BEGIN, END = "<!-- begin: made by benchmarks/scaling.py -->", "<!-- end: made by benchmarks/scaling.py -->"
WAYS = {1: "1-way: the batch alone", 2: "2-way: lat=2", 4: "4-way: lat=2, channel=2"}
# of the authors' logs (docs/scaling.md has the source), by the GPUs that have one model: seconds of a step by the GPUs
# of the job, and 10^12 operations of a forward pass by their own count
PUBLISHED = {
    1: {1: 0.7136, 8: 1.0431, 16: 1.0749, 64: 1.1385, 256: 1.3518},
    2: {2: 0.7460, 8: 0.8322, 16: 0.9596, 64: 1.0152, 256: 1.1109},
    4: {4: 0.9395, 8: 0.9998, 256: 1.2976},
}
PUBLISHED_TERAFLOP = {1: 13.566, 2: 32.283, 4: 63.972}
# speed-ups of one sample without reading, from their logs; that on 8 GPUs is of another machine, by the poster
PUBLISHED_SPEED_UPS = {2: "1.66", 4: "2.26", 8: "6.4"}
CAPTION = "Stars: published, of the same nets. To the right blue is rows cut by `lat`, red with `channel`."
SAMPLE_BYTES = 2 * 69 * 720 * 1440 * 4  # a state and the next one
# bytes a second, where all GPUs of two nodes read samples of their own
READ_A_NODE = 4 * SAMPLE_BYTES / PUBLISHED[1][8]
Result = dict[str, Any]


def _mesh(r: Result) -> str:
    return " ".join(f"{name}={size}" for name, size in r["mesh"].items()) if r["gpus"] > 1 else "one GPU"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _billions(r: Result) -> str:
    return f"{r['parameters'] / 1e9:.2f}"


def _way(r: Result) -> int:
    return r["gpus"] // r["mesh"].get("data", 1)


def _alone(r: Result, results: Sequence[Result]) -> Result:
    """The same model on the fewest GPUs."""
    return min((one for one in results if one["parameters"] == r["parameters"]), key=lambda one: one["gpus"])


def _with_reader(r: Result) -> float:
    """The seconds of a step that waits for as many bytes a second as a node was seen to read."""
    samples_of_node = 4 / _way(r) if r["gpus"] >= 4 else r["gpus"] / _way(r)
    return max(r["seconds"], samples_of_node * SAMPLE_BYTES / READ_A_NODE)


# -- tables -----------------------------------------------------------------------------------------------------------


def _weak(results: Sequence[Result]) -> Iterator[str]:
    rows: list[list[str]] = []
    for r in sorted(results, key=lambda r: (_way(r), r["gpus"])):
        way, alone, steps = _way(r), _alone(r, results)["seconds"], PUBLISHED[_way(r)]
        published = steps.get(r["gpus"])
        shown = ["", "", ""]
        if published is not None:
            petaflop = 3 * PUBLISHED_TERAFLOP[way] * r["batch"] / published / 1e3
            shown = [_seconds(published), f"{100 * steps[way] / published:.0f} %", f"{petaflop:.2g}"]
        rows.append(
            [WAYS[way], _billions(r), str(r["gpus"]), shown[0], _seconds(r["seconds"]), _seconds(r["messages_s"]),
             _seconds(_with_reader(r)), shown[1], f"{100 * alone / r['seconds']:.0f} %",
             f"{100 * alone / _with_reader(r):.0f} %", shown[2], f"{r['flop'] / r['seconds'] / 1e15:.2g}"]
        )  # fmt: skip
    yield from table_lines(
        ("way", "billions", "GPUs", "step, published", "predicted", "of it messages", "with reading",
         "efficiency, published", "predicted", "with reading", "PFLOP/s, published", "predicted"), rows,
    )  # fmt: skip


def _strong(results: Sequence[Result]) -> Iterator[str]:
    one = next(r for r in results if r["gpus"] == 1)
    rows = [
        [str(r["gpus"]), _mesh(r), r["weights"], str(r["per_node"]), _seconds(r["seconds"]), _seconds(r["messages_s"]),
         f"{one['seconds'] / r['seconds']:.2f}", PUBLISHED_SPEED_UPS.get(r["gpus"], ""), r["bound"],
         f"{r['peak_bytes'] / 2**30:.1f}"]
        for r in results
    ]  # fmt: skip
    yield from table_lines(
        ("GPUs", "mesh", "weights", "GPUs a node", "step", "of it messages", "speed-up, predicted", "published",
         "bound", "peak, GiB"), rows,
    )  # fmt: skip


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
    for way, name in WAYS.items():
        mine = sorted((r for r in weak if _way(r) == way), key=lambda r: r["gpus"])
        alone, steps = mine[0]["seconds"], PUBLISHED[way]
        left.plot([r["gpus"] for r in mine], [100 * alone / r["seconds"] for r in mine], "o-", ms=3,
                  color=colors[way], label=f"{name}, predicted")  # fmt: skip
        left.plot([r["gpus"] for r in mine], [100 * alone / _with_reader(r) for r in mine], ":", color=colors[way])
        left.plot(list(steps), [100 * steps[way] / each for each in steps.values()], "*", ms=9, color=colors[way],
                  mec="k")  # fmt: skip
    left.plot([], [], ":", color="k", label="with reading")
    left.plot([], [], "*", ms=9, color="w", mec="k", label="published")
    left.set(xscale="log", xlabel="GPUs", ylabel="efficiency [%]", ylim=(0, 108))
    left.set_xticks([4**n for n in range(5)], [str(4**n) for n in range(5)])
    strong = [r for r in results if r["case"] == "strong"]
    one = next(r for r in strong if r["gpus"] == 1)["seconds"]
    for r in strong:
        color = colors[4] if "channel" in r["mesh"] else colors[2]
        right.plot(r["gpus"], one / r["seconds"], "o", ms=5, color=color)
    right.plot([1, 8], [1, 8], ":", color="#9aa5b1")
    published = [(gpus, float(text)) for gpus, text in PUBLISHED_SPEED_UPS.items()]
    right.plot(*zip(*published, strict=True), "*", ms=11, color="w", mec="k")
    right.set(xlabel="GPUs, one sample", ylabel="speed-up")
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    left.legend(fontsize=6, loc="lower left")
    figure.savefig(folder / "scaling.png", dpi=110, metadata={"Software": None})
    plt.close(figure)


# -- the page ---------------------------------------------------------------------------------------------------------

SECTIONS: dict[str, tuple[str, Callable[[Sequence[Result]], Iterable[str]]]] = {
    "weak": ("### Weak scaling: one sample a model, as many models as fit the GPUs", _weak),
    "strong": ("### Strong scaling: one sample, 1.10 billion parameters", _strong),
    "best": ("## Ours: the best mesh of 256", _best),
    "four-billion": ("## Four billion parameters on eight GPUs", _four_billion),
    "eight": ("### Every strategy on eight H100, eight samples", _planning),
    "planning": ("## What planning costs: 256 GPUs (the goal is 30 s)", _planning),
    "planning-4096": ("### 4096 GPUs (the goal is 120 s)", _planning),
}


def page_text(before: str, results: Sequence[Result], header: Result, file: str) -> str:
    """The page with its tables made anew."""
    parts = {case: [r for r in results if r["case"] == case] for case in dict.fromkeys(r["case"] for r in results)}
    picture = "predicted efficiency on 1 to 256 GPUs, and speed-up on 1 to 8"
    sections = [(f"![{picture}](scaling.png)", (CAPTION, ""))]
    sections += [(heading, rows(parts[case])) for case, (heading, rows) in SECTIONS.items() if case in parts]
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
