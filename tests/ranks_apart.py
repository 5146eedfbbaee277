"""Ranks that are processes of their own, for tests after which no group is whole: started, joined, and ended."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]

_JOIN = """
import faulthandler, os, sys, time
rank, size, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
faulthandler.enable()  # tells where it hangs, if it does: no timer, for a process forked beside one would wait for it
import torch, torch.distributed as dist
from datetime import timedelta
import jigsaw

def join(**how):
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size, **how)

def leave():
    "Wait for the others without a message: a rank that ends after its last one may break it for those behind."
    open(f"{folder}/left{rank}", "w").close()
    while not all(os.path.exists(f"{folder}/left{r}") for r in range(size)):
        time.sleep(0.05)
"""


def run_apart(folder, ranks, code, *, before=(), seconds=150):
    r"""The (exit status, output) of each rank that ran `code`, which may `join()` the others.

    `before` is what starts a rank, with {rank} for its number, instead of Python itself.
    """
    meet = Path(folder) / "meet"
    meet.touch()
    meet.chmod(0o666)
    Path(folder).chmod(0o777)
    told = [Path(folder) / f"told{rank}" for rank in range(ranks)]
    (Path(folder) / "body.py").write_text(_JOIN + code)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    # unbuffered, for bodies end by os._exit and are forked: what was said is told, and told once
    environment |= {"CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}
    started = []
    for rank in range(ranks):
        starter = [word.format(rank=rank) for word in before]
        command = [*starter, sys.executable, "-W", "ignore", f"{folder}/body.py", str(rank), str(ranks), str(folder)]
        with open(told[rank], "w") as out:
            started.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment))
    until = time.monotonic() + seconds
    try:
        for each in started:
            each.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired as e:
        for each in started:
            each.send_signal(signal.SIGABRT)
        time.sleep(2)
        every = "\n".join(f"rank {r}, status {each.poll()}:\n{told[r].read_text()}" for r, each in enumerate(started))
        raise AssertionError(f"not all ranks ended within {seconds} s\n{every}") from e
    finally:
        for each in started:
            each.kill()
            each.wait()
    return [(each.returncode, path.read_text()) for each, path in zip(started, told, strict=True)]
