"""The zoo: every net on tiles against one process, on every mesh.

    python tests/zoo/run.py                     # all nets; a table, zoo.json and docs/models.md
    python tests/zoo/run.py monai/ timm/Swin    # nets whose key has one of these words
    python tests/zoo/run.py --mesh 2            # on two ranks alone; 3, 2x2
    python tests/zoo/run.py --strict no         # parallelize(..., strict=False)

Every net runs on real ranks with a time-out; ranks that fail are replaced. The verdicts: `exact`; `refused`, a typed
error, alike on every rank; `untyped`, any other error; `apart`, ranks that end differently; `hang`; `wrong`;
`unbuilt`, a net that fails on whole tensors in one process; `absent`, a package that is not installed.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from zoo_net import ZooNet
from zoo_table import ZOO, installed_version
from zoo_training import RankVerdict, import_package, train_on_tiles, train_whole

from jigsaw.testing import run_on_ranks
from jigsaw.testing.world import _worlds

ROOT = Path(__file__).parents[2]
MESH_NAMES = ["2", "3", "2x2"]
SECONDS = 60.0  # a net on one mesh, beside other work
IMPORT_SECONDS = 180.0  # its package, on a busy machine


def mesh_name(axes: dict[str, int]) -> str:
    return "x".join(str(n) for n in axes.values())


def try_net(
    net: ZooNet, axes: dict[str, int], options: dict[str, Any], folder: str, seconds: float = SECONDS
) -> RankVerdict:
    """The verdict of all ranks; `folder` has the run on whole tensors."""
    ranks = 1
    for n in axes.values():
        ranks *= n
    named = net.key if net.key in ZOO else net
    return verdict_of_world(
        ranks,
        folder,
        lambda: run_on_ranks(ranks, import_package, named, timeout=IMPORT_SECONDS),
        lambda: run_on_ranks(ranks, train_on_tiles, named, axes, options, folder, timeout=seconds),
    )


def verdict_of_world(
    ranks: int, folder: str, prepare: Callable[[], object], run: Callable[[], list[RankVerdict]]
) -> RankVerdict:
    """The verdict of all ranks, each of which leaves its own in `folder`; a world that fails is ended."""
    for old in Path(folder).glob("rank*"):
        old.unlink()
    try:
        prepare()
        found = run()
    except Exception as error:
        return _of_failed_world(error, folder, ranks)
    verdict = _of_all_ranks(found)
    if verdict.verdict not in ("exact", "wrong", "refused"):
        end_world(ranks)  # messages that nobody waits for may be left behind
    return verdict


def end_world(ranks: int) -> None:
    for kind in [kind for kind in _worlds if kind.ranks == ranks]:
        _worlds.pop(kind).kill()


def _of_all_ranks(found: list[RankVerdict]) -> RankVerdict:
    first = next((v for v in found if v.verdict not in ("exact",)), found[0])
    if len({v.verdict for v in found}) > 1 and {v.verdict for v in found} != {"exact", "wrong"}:
        told = "; ".join(f"rank {r}: {v.verdict} {v.cause[:80]}" for r, v in enumerate(found))
        return RankVerdict("apart", told, first.function, first.place, first.detail)
    first.worst = max(v.worst for v in found)
    first.seconds = max(v.seconds for v in found)
    first.said = sorted({line for v in found for line in v.said})
    for name in ("sent", "sent_last"):
        by_rank: list[dict[str, int]] = [getattr(v, name) for v in found]
        setattr(first, name, {kind: max(sent.get(kind, 0) for sent in by_rank) for each in by_rank for kind in each})
    return first


def _of_failed_world(error: BaseException, folder: str, ranks: int) -> RankVerdict:
    """A rank died, or one is still busy: what those said that did end is the cause."""
    ended = [RankVerdict(**json.loads(file.read_text())) for file in sorted(Path(folder).glob("rank*"))]
    text = str(error)
    words = ("still running", "ended without a word", "Error")
    summary = next((x for x in text.splitlines() if any(w in x for w in words)), text[:200]).strip()
    if ended and len(ended) < ranks:
        told = f"{ended[0].verdict} on {len(ended)} of {ranks} ranks, the others wait: {ended[0].cause}"
        return RankVerdict("hang", told, ended[0].function, ended[0].place, text)
    kind = "hang" if "still running" in summary else "untyped"  # one that died leaves others running, too
    places = re.findall(r'File "([^"]+)", line (\d+) in (\w+)', text)
    place = next((f"{f.split('site-packages/')[-1]}:{n} {w}" for f, n, w in places if "site-packages" in f
                  and "/torch/" not in f), "")  # fmt: skip
    return RankVerdict(kind, summary, "", place, text[-4000:])


def run_zoo(
    nets: list[ZooNet],
    meshes: list[str],
    options: dict[str, Any],
    after: Callable[[Any], object] = lambda _: None,
    seconds: float = SECONDS,
) -> dict[str, dict[str, Any]]:
    """Every net on every mesh, mesh by mesh, so that few ranks live at once; a net that is not exact on one is not
    tried on the next. `after` is called with the results so far.
    """
    results: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
        for mesh in meshes:
            for net in nets:
                row = results.setdefault(
                    net.key, {"package": net.package, "version": installed_version(net), "meshes": {}}
                )
                axes = next((a for a in net.meshes if mesh_name(a) == mesh), None)
                done = row["meshes"].values()
                if axes is None or any(v["verdict"] != "exact" for v in done):
                    continue
                own = Path(folder) / net.key.replace("/", "-").replace(" ", "_")
                started = time.monotonic()
                row["meshes"][mesh] = found = asdict(run_one(net, axes, options, own, seconds))
                took = time.monotonic() - started
                after(results)
                print(
                    f"{net.key:45} {mesh:4} {found['verdict']:8} {found['worst']:8.1e} {took:5.1f} s  "
                    f"{found['function']:20} {found['cause'][:150]}",
                    flush=True,
                )
            for ranks in {kind.ranks for kind in _worlds}:
                end_world(ranks)
    return results


def run_one(
    net: ZooNet, axes: dict[str, int], options: dict[str, Any], folder: Path, seconds: float = SECONDS
) -> RankVerdict:
    """A net on one mesh; `folder` keeps its run on whole tensors for the next mesh."""
    if installed_version(net) is None:
        return RankVerdict("absent", f"{net.package} is not installed")
    if not (folder / "whole").exists():
        folder.mkdir(exist_ok=True)
        try:
            import_package(net)  # in float32 as on ranks, because modules make constants as they are imported
            torch.save(train_whole(net), folder / "whole")
        except ImportError as error:
            return RankVerdict("absent", f"{net.package} needs what is not installed: {error}")
        except Exception as error:
            return RankVerdict("unbuilt", f"{type(error).__name__}: {str(error)[:300]}")
    return try_net(net, axes, options, str(folder), seconds)


# -- telling ----------------------------------------------------------------------------------------------------------


def final_verdict(row: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The verdict of the first mesh that is not exact, or of the last."""
    for mesh, found in row["meshes"].items():
        if found["verdict"] != "exact":
            return mesh, found
    return list(row["meshes"].items())[-1]


def short_cause(found: dict[str, Any]) -> str:
    """A cause without its numbers, so that alike causes are counted together."""
    text = re.sub(r"(Tile|Layout)\([^()]*(\([^()]*\)[^()]*)*\)", r"\1", found["cause"])
    text = re.sub(r"[\[(][^\[\]()]*\d[^\[\]()]*[\])]", "(…)", text)
    text = re.sub(r"-?\d+(\.\d+)?(e[+-]?\d+)?", "n", text)
    return text[:170]


def causes_table(results: dict[str, dict[str, Any]]) -> str:
    """Verdicts counted, then causes, the most frequent first, each with its nets."""
    verdicts = collections.Counter(final_verdict(row)[1]["verdict"] for row in results.values())
    lines = [", ".join(f"{n} {verdict}" for verdict, n in verdicts.most_common()), ""]
    groups: dict[tuple[str, str, str], list[str]] = {}
    for key, row in results.items():
        mesh, found = final_verdict(row)
        if found["verdict"] != "exact":
            told = (found["verdict"], found["function"], short_cause(found))
            groups.setdefault(told, []).append(f"{key} ({mesh}) at `{found['place'][:110]}`")
    by_function = collections.Counter()
    for (verdict, function, _), nets in groups.items():
        by_function[verdict, function] += len(nets)
    lines += ["| nets | verdict | function |", "|---|---|---|"]
    lines += [f"| {n} | {verdict} | `{function}` |" for (verdict, function), n in by_function.most_common()]
    lines.append("")
    for (verdict, function, cause), nets in sorted(groups.items(), key=lambda g: -len(g[1])):
        lines.append(f"- **{len(nets)}** {verdict}, `{function}`: {cause}")
        lines += [f"    - {net}" for net in nets]
    return "\n".join(lines)


def models_page(results: dict[str, dict[str, Any]]) -> str:
    """docs/models.md: what runs, what it sends, what had to be said."""
    lines = [
        "# Models",
        "",
        "Published nets, small, as they are installed: forward, loss, all gradients and three optimizer steps on tiles",
        "are those of one process, dropout and noise included. Made by `tests/zoo/run.py`, as `make zoo` calls it.",
        "*Sent* are the bytes that the busiest rank sends in the first step on the largest mesh, by kind. Of nets that",
        "exchange neighbors by planned indices, those of the third step follow where they are others: an index that is",
        "made anew in each step is planned from the second on. *Said* is what the user had to say beyond",
        "`parallelize`.",
        "",
    ]
    for package in dict.fromkeys(row["package"] for row in results.values()):
        rows = {key: row for key, row in results.items() if row["package"] == package}
        version = next(iter(rows.values()))["version"]
        lines += [f"## {package}" + (f" {version}" if version not in (None, "-") else ""), ""]
        lines += ["| net | meshes | worst difference | sent | said |", "|---|---|---|---|---|"]
        for key, row in rows.items():
            _, found = final_verdict(row)
            exact = [mesh for mesh, v in row["meshes"].items() if v["verdict"] == "exact"]
            name = key.split("/", 1)[1]
            if found["verdict"] != "exact":
                told = f"{found['verdict']}: `{found['function']}` {short_cause(found)}".replace("|", "/")
                lines.append(f"| {name} | {', '.join(exact) or '-'} | | | {told} |")
                continue
            sent, last = (_bytes_by_kind(found.get(name, {})) for name in ("sent", "sent_last"))
            if "neighbors" in found.get("sent_last", {}) and last != sent:
                sent += f"; third step: {last}"
            said = "; ".join(found["said"]).replace("|", "/") or "nothing"
            lines.append(f"| {name} | {', '.join(exact)} | {found['worst']:.0e} | {sent} | {said} |")
        lines.append("")
    return "\n".join(lines)


def _bytes_by_kind(sent: dict[str, int]) -> str:
    return ", ".join(f"{kind} {n:,}" for kind, n in sorted(sent.items(), key=lambda k: -k[1]) if n)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("words", nargs="*", help="parts of keys, package/name; all nets by default")
    parser.add_argument("--mesh", action="append", choices=MESH_NAMES, help="all three by default")
    parser.add_argument("--strict", choices=["yes", "no"], default="yes")
    parser.add_argument("--json", type=Path, default=Path("zoo.json"))
    parser.add_argument("--page", type=Path, help="write docs/models.md here")
    parser.add_argument("--causes", type=Path, help="write what stops nets here")
    parser.add_argument("--keep", action="store_true", help="keep what --json has of nets and meshes not run")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="patience with a net on one mesh")
    parser.add_argument("--heavy", action="store_true", help="the heavy ones too")
    given = parser.parse_args(arguments)
    nets = [n for n in ZOO.values() if not given.words or any(w in n.key for w in given.words)]
    nets = [n for n in nets if given.heavy or not n.heavy]
    options = {} if given.strict == "yes" else {"strict": False}
    earlier = json.loads(given.json.read_text()) if given.keep and given.json.exists() else {}

    def write(results: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        tried = earlier | {key: row for key, row in results.items() if row["meshes"]}
        for key in earlier.keys() & tried.keys():
            known = earlier[key]["meshes"] | tried[key]["meshes"]
            tried[key] = tried[key] | {"meshes": {mesh: known[mesh] for mesh in MESH_NAMES if mesh in known}}
        ordered = {key: tried[key] for key in ZOO if key in tried}
        given.json.write_text(json.dumps(ordered, indent=1))
        return ordered

    results = write(run_zoo(nets, given.mesh or MESH_NAMES, options, write, given.seconds))
    told = causes_table(results)
    if given.causes:
        given.causes.write_text(told + "\n")
    if given.page:
        given.page.write_text(models_page(results))
    print(told)
    return int(any(final_verdict(row)[1]["verdict"] not in ("exact", "absent") for row in results.values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
