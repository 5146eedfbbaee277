"""A step of the same model by jigsaw and by others that cut it, each asserted correct first: one JSON object a case.

    sudo python benchmarks/computing.py --output benchmarks/results/computing-MACHINE-MONTH.jsonl
    python benchmarks/computing.py --page              # makes docs/computing.md of the newest result files

A case is a model, an input, and contenders (`computing_sides.py`) on the same four ranks, one thread each.  The result
and the gradients of the input and of all parameters are compared with plain torch on the whole input; `max_rel_err` is
the largest difference, over the largest value.  One that is wrong or raises is told with what it said, and not timed.
Then they take turns: `cpu_s` is user and system time of all ranks for a step (forward and backward), `wall_s` that of
the slowest, medians over `--rounds`.  `sent_bytes` is what went through the loopback device in one step, of all ranks,
headers included: the ranks are in a network namespace of their own, so that the same counter counts everybody's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import computing_page
import computing_sides as sides
import torch
import torch.distributed as dist
from result_file import ResultFile, add_result_options
from torch import nn

from jigsaw.testing import RankFailedError, run_on_ranks

RANKS, TIMEOUT = 4, 600.0
ONE, FOUR = {"lat": RANKS}, {"lat": 2, "lon": 2}
IN_NAMESPACE = "JIGSAW_OWN_LOOPBACK"
CLOSE = 1e-3


@dataclass(frozen=True)
class Case:
    """A model and its input, of a size; the contenders, each with the axes of its mesh."""

    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    contenders: dict[str, tuple[sides.Axes, Callable[..., sides.Side]]]


def _transforms(small: bool, is_vector: bool) -> Case:
    points, fields = ((16, 32), 4) if small else ((128, 256), 16)
    shape = (fields, 2, *points) if is_vector else (1, fields, *points)
    spec = (None, None, "lat", "lon")
    return Case(
        lambda: sides.harmonics(points, is_vector, "jigsaw"),
        shape,
        {
            "jigsaw, 4 bands": (ONE, sides.on_tiles((None, None, "lat", None))),
            "torch-harmonics, 4 bands": (ONE, sides.distributed_harmonics(is_vector)),
            "jigsaw, 2 x 2": (FOUR, sides.on_tiles(spec)),
            "torch-harmonics, 2 x 2": (FOUR, sides.distributed_harmonics(is_vector)),
        },
    )


def cases(small: bool) -> dict[str, Case]:
    """All of them, at full or at toy size."""
    width, tokens, heads = (32, 64, 4) if small else (512, 2048, 8)
    lines, channels = (32, 8) if small else (240, 32)
    cut, cut_tokens = ("lat", None), (None, "lat", None)
    along_channel, keys = {"channel": RANKS}, (None, None, None, "lat", None)
    return {
        "mlp": Case(
            lambda: sides.mlp(width),
            (tokens, width),
            {
                "jigsaw, tokens cut": (ONE, sides.on_tiles(cut)),
                "jigsaw, tokens cut, weights 1/P": (ONE, sides.on_tiles(cut, shard_weights=True)),
                "jigsaw, channels cut": (along_channel, sides.on_tiles((None, None))),
                "jigsaw, channels and tokens cut": (along_channel, sides.on_tiles(("channel", None))),
                "DTensor, tensor parallel": (along_channel, sides.tensor_parallel(False)),
                "DTensor, sequence parallel": (along_channel, sides.tensor_parallel(True)),
            },
        ),
        "block": Case(
            lambda: sides.Block(width, heads),
            (1, tokens // 2, width),
            {
                "jigsaw, tokens cut": (ONE, sides.on_tiles(cut_tokens)),
                "jigsaw, channels cut": (along_channel, sides.on_tiles((None, None, None))),
                "jigsaw, channels and tokens cut": (along_channel, sides.on_tiles((None, "channel", None))),
                "DTensor, tensor parallel": (along_channel, sides.tensor_parallel(False)),
                "DTensor, sequence parallel": (along_channel, sides.tensor_parallel(True)),
            },
        ),
        "attention": Case(
            sides.Attention,
            (3, 1, heads, tokens // 2, width // heads),
            {
                "jigsaw, ring": (ONE, sides.on_tiles(keys, "ring")),
                "jigsaw, heads": (ONE, sides.on_tiles(keys, "heads")),
                "jigsaw, gathered": (ONE, sides.on_tiles(keys, "gathered")),
                "context_parallel": (ONE, sides.context_parallel("MATH")),
            },
        ),
        "convolutions": Case(
            lambda: sides.convolutions(channels),
            (1, channels, lines, 2 * lines),
            {
                "jigsaw": (ONE, sides.on_tiles((None, None, "lat", None))),
                "ShardTensor": (ONE, sides.shard_tensor(False)),
                "ShardTensor, registered by hand": (ONE, sides.shard_tensor(True)),
            },
        ),
        "transform": _transforms(small, False),
        "vector transform": _transforms(small, True),
    }


# -- on every rank ---------------------------------------------------------------------------------------------------

_made: dict[str, sides.Side] = {}


def prepare(name: str, contender: str, small: bool) -> tuple[float, str]:
    """Make the contender, and its largest relative error."""
    case = cases(small)[name]
    axes, make = case.contenders[contender]
    torch.manual_seed(0)
    model, x = case.model(), torch.randn(case.shape)
    expected = sides.plain(model, x, axes)
    expected.step()
    side = make(model, x, axes)
    side.step()
    worst, found = 0.0, list(expected.answer())
    # a gradient that is none but for rounding, as that of a bias of keys, is measured by the others
    least = 1e-3 * min(right.abs().max().item() for right in found[:2])
    for got, right in zip(side.answer(), found, strict=True):
        if got.shape != right.shape:
            return float("inf"), f"a result of shape {tuple(got.shape)} in place of {tuple(right.shape)}"
        worst = max(worst, (got - right).abs().max().item() / max(right.abs().max().item(), least))
    side.step()
    _made[contender] = side
    return worst, ""


def timed(contender: str) -> tuple[float, float]:
    """Wall and processor seconds of a step."""
    side = _made[contender]
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    side.step()
    return time.perf_counter() - start, time.process_time() - busy


def forget() -> None:
    """Free the contenders of a case."""
    _made.clear()


def loopback_bytes() -> int:
    """What has gone through this namespace's loopback device."""
    with open("/proc/net/dev") as f:
        return next(int(line.split()[9]) for line in f if line.strip().startswith("lo:"))


# -- taking turns ----------------------------------------------------------------------------------------------------


def compared(name: str, chosen: argparse.Namespace) -> list[dict[str, Any]]:
    """The result of every contender of a case."""
    case = cases(chosen.small)[name]
    fields: dict[str, dict[str, Any]] = {}
    for contender, (axes, _) in case.contenders.items():
        facts = {"case": name, "engine": contender, "ranks": RANKS, "mesh": axes, "shape": case.shape}
        try:
            found = run_on_ranks(RANKS, prepare, name, contender, chosen.small, timeout=TIMEOUT)
            error, what = max(found)
            facts["max_rel_err"] = error if error < float("inf") else None
            if not error < CLOSE:
                # values that lie elsewhere are not known to be wrong
                facts["refused"] = f"not compared: {what}" if what else f"wrong: an error of {error:.2g}"
        except RankFailedError as failed:
            facts["refused"] = last_words(str(failed))
        fields[contender] = facts
    able = [contender for contender, facts in fields.items() if "refused" not in facts]
    if any("refused" in facts for facts in fields.values()):  # after a failure the ranks are new ones
        for contender in able:
            run_on_ranks(RANKS, prepare, name, contender, chosen.small, timeout=TIMEOUT)
    times: dict[str, list[tuple[float, float]]] = {contender: [] for contender in able}
    sent: dict[str, list[int]] = {contender: [] for contender in able}
    for turn in range(chosen.rounds if able else 0):
        for contender in (*able[turn % len(able) :], *able[: turn % len(able)]):
            before = loopback_bytes()
            ranks = run_on_ranks(RANKS, timed, contender, timeout=TIMEOUT)
            sent[contender].append(loopback_bytes() - before)
            times[contender].append((max(wall for wall, _ in ranks), sum(busy for _, busy in ranks)))
    run_on_ranks(RANKS, forget)
    for contender in able:
        fields[contender] |= {
            "cpu_s": round(statistics.median(busy for _, busy in times[contender]), 4),
            "wall_s": round(statistics.median(wall for wall, _ in times[contender]), 4),
            "sent_bytes": min(sent[contender]) if os.environ.get(IN_NAMESPACE) else None,
            "rounds": chosen.rounds,
        }
    return list(fields.values())


def last_words(text: str) -> str:
    """The error in a rank's traceback."""
    lines = [line.strip() for line in text.splitlines()]
    said = [line for line in lines if line.partition(":")[0].endswith(("Error", "Exception")) and " " in line]
    return (said[0] if said else lines[0])[:300]


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found: dict[str, str] = {}
    for package in ("torch", "jigsaw-torch", "torch-harmonics", "nvidia-physicsnemo"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def in_own_namespace() -> None:
    """Begin again where only this benchmark uses the loopback device; without root, bytes are not counted."""
    if os.environ.get(IN_NAMESPACE) or os.geteuid() != 0:
        return
    os.environ[IN_NAMESPACE] = "1"
    inside = 'ip link set lo up && exec "$0" "$@"'
    os.execvp("unshare", ["unshare", "--net", "sh", "-c", inside, sys.executable, *sys.argv])


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--case", nargs="+", choices=list(cases(True)), default=list(cases(True)))
    made.add_argument("--rounds", type=int, default=9)
    made.add_argument("--small", action="store_true", help="toy size, as the tests run it")
    add_result_options(made)
    made.add_argument("--page", action="store_true", help="only make the page of the result files")
    return made


def main() -> None:
    chosen = parser().parse_args()
    if not chosen.page:
        in_own_namespace()
        words = f"--case {' '.join(map(repr, chosen.case))} --rounds {chosen.rounds}"
        results = ResultFile(chosen, f"python benchmarks/computing.py {words}")
        for name in chosen.case:
            for result in compared(name, chosen):
                results.add(result | {"versions": _versions()})
    if chosen.page or chosen.output:
        computing_page.write()


if __name__ == "__main__":
    main()
