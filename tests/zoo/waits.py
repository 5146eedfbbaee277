"""The zoo on a played device: for what the host waits in a training step, on tiles and in plain torch.

    PYTHONPATH=. python tests/zoo/waits.py                # all nets that are installed, on two ranks
    PYTHONPATH=. python tests/zoo/waits.py timm/ resnet   # nets whose key has one of these words

A JSON object a net.  `plain` counts for what the host waits in the third step of one process: what the net itself
does, such as ``float(tensor)``.  `tiles` counts that of the rank that waits most, of two; `place` is the first line
that waits.  Steps are forward, backward and SGD.  It ends with an error where tiles wait more often than plain torch,
but for `KNOWN_WAITS`.  Where the played device lacks what a net needs, or tiles refuse, `error` says it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from zoo_net import ZooNet, default_dtype
from zoo_table import ZOO, installed_version
from zoo_training import float_leaves

import jigsaw
from jigsaw.testing import RankFailedError, run_on_ranks, world_mesh
from jigsaw.testing.played_device import PLAYED_DEVICE, refuse_host_waits, take_host_waits

# Where tiles wait more, and for what: a net leaves this list when it no longer does.
KNOWN_WAITS = {"by hand/sparse experts": "rows chosen by value, in plain torch, too"}
STEPS_BEFORE = 2  # in which ranks compare what is new to them, and the optimizer makes its state


def host_waits(key: str, on_tiles: bool) -> dict[str, Any]:
    """The waits of this rank in the third step, by operator, and the place of the first one; or the error of a step."""
    net = ZOO[key]
    with default_dtype(net.dtype), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            step = _step_of(net, on_tiles)
            for _ in range(STEPS_BEFORE):
                step()
            take_host_waits()
            step()
            waits = Counter(take_host_waits())
            return {"waits": dict(waits), "place": _first_place(step) if waits else ""}
        except Exception as error:  # alike on all ranks, so the others do not wait for this one
            line = traceback.extract_tb(error.__traceback__)[-1]
            why = str(error).split("\n")[0][:200]
            return {"error": f"{type(error).__name__} at {Path(line.filename).name}:{line.lineno}: {why}"}


def _step_of(net: ZooNet, on_tiles: bool) -> Callable[[], None]:
    mesh = world_mesh(lat=torch.distributed.get_world_size())
    model = net.model().to(PLAYED_DEVICE)
    if on_tiles:
        model = jigsaw.parallelize(model, mesh)

    def placed(given: Any, x: Tensor) -> Any:
        x = x.to(PLAYED_DEVICE)
        return jigsaw.shard(x, mesh, given.spec) if on_tiles and given.spec is not None else x

    inputs = [placed(*pair) for pair in zip(net.inputs, net.draw_inputs(), strict=True)]
    targets = [placed(*pair) for pair in zip(net.targets, net.draw_targets(), strict=True)]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=1e-3, momentum=0.9, foreach=False)

    def step() -> None:
        optimizer.zero_grad()
        output = model(*inputs) if net.call is None else net.call(model, *inputs)
        leaves = [leaf for _, leaf in float_leaves(output)]
        loss = net.loss(output, *targets) if net.loss else sum((x * x.conj()).real.mean() for x in leaves)
        loss.backward()
        optimizer.step()

    return step


def _first_place(step: Callable[[], None]) -> str:
    try:
        with refuse_host_waits():
            step()
    except RuntimeError as error:
        lines = traceback.extract_tb(error.__traceback__)
        return " < ".join(f"{Path(line.filename).name}:{line.lineno}" for line in reversed(lines[-4:]))
    return ""


def net_waits(key: str, seconds: float = 120.0) -> dict[str, Any]:
    """What one net waits for, on whole tensors of one rank and on tiles of two."""
    row: dict[str, Any] = {"net": key}
    for ranks, name in ((1, "plain"), (2, "tiles")):
        try:
            every = run_on_ranks(ranks, host_waits, key, ranks > 1, timeout=seconds, device=PLAYED_DEVICE)
        except RankFailedError as error:  # a rank that hangs, or dies
            every = [{"error": str(error).split("\n")[0]}]
        failed = [told["error"] for told in every if "error" in told]
        if failed:
            return row | {"error": f"{name}: {failed[0]}"}
        worst = max(every, key=lambda told: sum(told["waits"].values()))
        row |= {name: worst["waits"], "place": worst["place"]}
    return row


def waits_more(row: dict[str, Any]) -> bool:
    return sum(row.get("tiles", {}).values()) > sum(row.get("plain", {}).values())


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*", help="parts of keys of nets")
    words = parser.parse_args().words
    os.environ["JIGSAW_TEST_DEVICE"] = PLAYED_DEVICE  # where nets then make their own tensors, too
    keys = [key for key, net in ZOO.items() if installed_version(net) and (not words or any(w in key for w in words))]
    rows: list[dict[str, Any]] = []
    for key in keys:
        rows.append(net_waits(key))
        print(json.dumps(rows[-1]), flush=True)
    errors, worse = [row["net"] for row in rows if "error" in row], [row["net"] for row in rows if waits_more(row)]
    print(json.dumps({"nets": len(rows), "not played": len(errors), "wait more than plain torch": worse}))
    return 1 if set(worse) - set(KNOWN_WAITS) else 0


if __name__ == "__main__":
    sys.exit(main())
