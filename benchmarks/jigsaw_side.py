"""jigsaw among the contenders, and the bare loop that its pipeline is held against."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from typing import Any

import numpy as np
from stores import VARIABLES
from team import Task

_open: list[Any] = []  # what `left` closes

NORMALIZE = {name: (mean, 0.08 * mean) for name, mean in VARIABLES.items()}


def opened(task: Task, folder: str) -> tuple[Any, dict[str, Any]]:
    """jigsaw on one rank of its mesh; `jigsaw-loader` reads through a `DataLoader`, the others sample by sample."""
    mesh = _mesh(task, folder)
    if task.engine == "jigsaw-loader":
        return _loader(task, mesh)
    mode = task.engine.partition("-")[2] or "auto"
    if mode == "normalized":
        return _samples(task, mesh, "auto", NORMALIZE)
    return _samples(task, mesh, mode, None)


def _mesh(task: Task, folder: str) -> Any:
    ranks = {"RANK": task.rank, "WORLD_SIZE": task.ranks, "LOCAL_RANK": task.rank, "LOCAL_WORLD_SIZE": task.ranks}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    import torch
    import torch.distributed as dist

    import jigsaw

    torch.set_num_threads(task.threads)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=task.rank, world_size=task.ranks)
    return jigsaw.init_mesh(device="cpu", **dict(task.mesh))


def left() -> None:
    import torch.distributed as dist

    for each in _open:
        each.close()
    dist.barrier()
    dist.destroy_process_group()


def fields_of(task: Task) -> list[str]:
    return list(task.variables)


def _samples(task: Task, mesh: Any, mode: str, normalize: Any) -> tuple[Any, dict[str, Any]]:
    import jigsaw

    how: dict[str, Any] = {"fields": fields_of(task), "mesh": mesh, "mode": mode, "normalize": normalize}
    if task.per_sample:
        how["inputs"] = range(task.per_sample)
    data = [jigsaw.io.open(path, **how) for path in task.paths]
    engines = [ds.new_engine(task.threads) for ds in data]
    _open.extend(engines)

    def read(wanted: Sequence[int]) -> Iterator[np.ndarray]:
        for sample in wanted:
            n, at = (0, sample * task.per_sample) if task.per_sample else (sample, 0)
            reading = data[n].reading([at])
            given, _, _ = data[n].unpack(data[n].read(engines[n], reading), reading)
            yield given[0].numpy()

    chosen = sorted(set(data[0].plan(0).modes.values()))
    return read, {**_versions(), "mode": mode, "chosen": chosen, "normalize": bool(normalize)}


def _versions() -> dict[str, str]:
    return {"jigsaw": version("jigsaw-torch"), "torch": version("torch"), "numcodecs": version("numcodecs")}


def _loader(task: Task, mesh: Any) -> tuple[Any, dict[str, Any]]:
    """Batches of consecutive steps, as many as a sample of the others has, in epochs of the whole store."""
    import jigsaw

    options = dict(task.options)
    ds = jigsaw.io.open(task.path, fields=fields_of(task), mesh=mesh)
    how = {"batch_size": task.per_sample, **options}
    loader = jigsaw.io.DataLoader(ds, threads=task.threads, **how)
    _open.append(loader)

    def read(wanted: Sequence[int], step_s: float = 0.0) -> Iterator[Any]:
        assert list(wanted) == [*range(len(loader))], "a loader reads its whole epoch"
        yield from stepped((batch.input.local.flatten(0, 1).numpy() for batch in loader), step_s)

    return read, {**_versions(), **how}


def stepped(batches: Iterator[Any], step_s: float) -> Iterator[Any]:
    """Batches with a step of so many seconds after each, and at last how long it waited for the second to the last.

    The step sleeps, as the CPU does while an accelerator computes.
    """
    waits: list[float] = []
    begun = 0.0
    while True:
        since = time.perf_counter()
        batch = next(batches, None)
        waits.append(time.perf_counter() - since)
        if len(waits) == 1:
            begun = time.perf_counter()  # nothing can be ready before it is asked for
        if batch is None:
            break
        yield batch
        if step_s:
            time.sleep(step_s)
    yield {"first_s": waits[0], "waited_s": sum(waits[1:-1]), "after_first_s": time.perf_counter() - begun}


def bare_loop(task: Task) -> tuple[Any, dict[str, Any]]:
    """Nothing but reading and decoding the chunks that a sample needs, one by one, into the same memory each time.

    `bare-loop-kept` decodes each to memory of its own, as large as a sample in all: what is decoded is then there to be
    used, as a chunk after the other.  Where the chunks lie is known before either begins.
    """
    from numcodecs import blosc  # pyright: ignore[reportAttributeAccessIssue]

    import jigsaw

    blosc.use_threads = False
    kept = task.engine.endswith("-kept")
    ds = jigsaw.io.open(task.path, fields=fields_of(task), mesh=dict(task.mesh), inputs=range(task.per_sample))
    tables = ds.store.arrays
    known: list[Any] = []
    for sample in range(dict(task.options)["samples"]):
        plan = ds.plan(sample * task.per_sample)
        known.append([(plan.ref(job.array, job.chunk), tables[job.array].grid.chunk_bytes) for job in plan.jobs])
    stored = np.empty(max(ref.length for refs in known for ref, _ in refs), np.uint8)
    decoded = np.empty(max((sum if kept else max)(size for _, size in refs) for refs in known), np.uint8)

    def read(wanted: Sequence[int]) -> Iterator[np.ndarray]:
        for sample in wanted:
            start = 0
            for ref, size in known[sample]:
                fd = os.open(ref.path, os.O_RDONLY)
                os.preadv(fd, [stored[: ref.length]], ref.offset)
                os.close(fd)
                blosc.decompress(stored[: ref.length], decoded[start : start + size])
                start += size if kept else 0
            yield decoded

    return read, {"numcodecs": version("numcodecs"), "blosc.use_threads": False}
