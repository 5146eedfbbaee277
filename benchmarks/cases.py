"""The cases of the reading benchmark: which contenders read which store on which mesh, and what is measured.

Every case is a function of a `Setting` that yields results, one object a contender.  Contenders have processes of
their own and take turns: each repetition gives every contender one turn, the order rotates from one repetition to the
next, and so do the samples.  A first turn opens files, warms the page cache and is not counted.  Times are medians over
the turns, for one sample.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import contenders
import stores
from team import Task, Team, Turn, pss_bytes

Result = dict[str, Any]
_ADDED = 150e6  # bytes a rank may take beside samples and chunks


@dataclass(frozen=True)
class Setting:
    """What the command line says."""

    data: Path
    small: bool = False
    repeat: int = 5
    engines: tuple[str, ...] = ()

    def chosen(self, engines: Sequence[str]) -> list[str]:
        return [e for e in engines if not self.engines or e in self.engines]


# -- plans -----------------------------------------------------------------------------------------------------------


def _planned(path: str, fields: Sequence[str], per_sample: int, mesh: Mapping[str, int], dims: int) -> dict[str, Any]:
    """Every rank's box of a sample, and what readers of it fetch and decode, by the kind of reader; no ranks needed."""
    import jigsaw

    steps = {"inputs": range(per_sample)} if per_sample else {}
    ds = {
        mode: jigsaw.io.open(path, fields=list(fields), mesh=dict(mesh), mode=mode, **steps)
        for mode in ("auto", "cooperative", "independent")
    }
    plans = {mode: each.plan(0) for mode, each in ds.items()}
    layout = ds["auto"].layout
    jobs, whole = plans["independent"].jobs, plans["independent"]
    size = {(j.array, j.chunk): (whole.ref(*j[:2]).length, whole.tables[j.array].grid.bytes_of(j.chunk)) for j in jobs}
    each = [size[job.array, job.chunk] for job in jobs]  # a library decodes every chunk that a box touches
    found = {f"jigsaw-{mode}": (p.total.stored_bytes, p.total.decoded_bytes) for mode, p in plans.items()}
    found["library"] = (sum(s for s, _ in each), sum(d for _, d in each))
    found["full"] = tuple(plans["auto"].ranks * sum(pair[i] for pair in size.values()) for i in (0, 1))
    once = sum(decoded for _, decoded in size.values())
    boxes = [tuple(slice(*rows) for rows in layout.held(coord)[-dims:]) for coord in layout.coords()]
    return {"boxes": boxes, "bytes": found, "once": once, "useful": plans["auto"].total.useful_bytes,
            "chunk": max(t.grid.chunk_bytes for name, t in plans["auto"].tables.items() if name in fields)}  # fmt: skip


def planned(*asked: Any) -> dict[str, Any]:
    """`_planned` in a process that ends: what it loads would be shared with the ranks whose memory is measured."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        found = pool.apply(_planned, asked)
        pool.close()
        pool.join()
    return found


def fields_of(store: str) -> tuple[str, ...]:
    if store in stores.VOLUMES:
        return ("image",)
    return ("fields",) if store == "makani" else tuple(stores.VARIABLES)


# -- turns -----------------------------------------------------------------------------------------------------------


def compare(
    case: str,
    setting: Setting,
    store: str,
    mesh: Mapping[str, int],
    engines: Sequence[str],
    threads: int = 1,
    **options: Any,
) -> Iterator[Result]:
    """Contenders that read the samples of a store in turn."""
    task, plan = task_of(setting, store, mesh, threads, **options)
    chosen = setting.chosen(engines)
    with ExitStack() as stack:
        teams = {e: stack.enter_context(Team(replace(task, engine=e))) for e in chosen}
        turns = take_turns(teams, setting.repeat, stores.samples_of(store))
        for engine in chosen:
            yield {
                **header(case, task, engine),
                **medians(turns[engine]),
                **sizes(engine, plan),
                "settings": teams[engine].settings,
            }


def task_of(
    setting: Setting, store: str, mesh: Mapping[str, int], threads: int, **options: Any
) -> tuple[Task, dict[str, Any]]:
    """What ranks read, and the plan of it."""
    paths = [str(path) for path in stores.made(setting.data, store, setting.small)]
    is_volume = store in stores.VOLUMES
    per_sample = 0 if is_volume else stores.PER_SAMPLE
    fields = fields_of(store)
    plan = planned(paths[0], fields, per_sample, dict(mesh), 3 if is_volume else 2)
    task = Task("", store, tuple(paths), fields, per_sample, tuple(mesh.items()), threads, tuple(plan["boxes"]),
                options=tuple(options.items()))  # fmt: skip
    return task, plan


def take_turns(teams: Mapping[str, Team], repeat: int, samples: int) -> dict[str, list[Turn]]:
    """`repeat` turns of every team."""
    every = list(range(samples))
    for team in teams.values():
        team.turn(every)
    turns: dict[str, list[Turn]] = {engine: [] for engine in teams}
    order = list(teams)
    for number in range(repeat):
        asked = _rotated(every, number)
        for engine in _rotated(order, number):
            turns[engine].append(teams[engine].turn(asked))
    return turns


def _rotated(items: Sequence[Any], by: int) -> list[Any]:
    by %= max(len(items), 1)
    return [*items[by:], *items[:by]]


def header(case: str, task: Task, engine: str) -> Result:
    return {"case": case, "store": task.store, "engine": engine, "ranks": task.ranks, "mesh": dict(task.mesh),
            "threads": task.threads}  # fmt: skip


def medians(turns: Sequence[Turn]) -> Result:
    """Of every kind of number over the turns; the checksum is that of all turns."""
    walls, cpus = ([round(getattr(turn, name), 4) for turn in turns] for name in ("wall_s", "cpu_s"))
    return {
        "wall_s": round(statistics.median(walls), 4),
        "cpu_s": round(statistics.median(cpus), 4),
        "wall_runs_s": walls,
        "cpu_runs_s": cpus,
        "peak_rss_bytes": max(turn.peak_rss_bytes for turn in turns),
        "checksum": f"{zlib.crc32(' '.join(turn.checksum for turn in turns).encode()):08x}",
    }


def sizes(engine: str, plan: dict[str, Any]) -> Result:
    """Bytes over all ranks; `amplification` is what they decode over the needed chunks decoded once."""
    if engine == "nibabel":  # it does not say
        return {"useful_bytes": plan["useful"]}
    kind = "full" if engine in ("full-read-then-slice", "monai") else "library"
    if engine.startswith("jigsaw"):
        kind = engine if engine in plan["bytes"] else "jigsaw-auto"
    stored, decoded = plan["bytes"][kind]
    return {"stored_bytes": stored, "decoded_bytes": decoded, "useful_bytes": plan["useful"],
            "amplification": round(decoded / plan["once"], 4)}  # fmt: skip


# -- the cases -------------------------------------------------------------------------------------------------------

_EVERY_ZARR = (*contenders.ZARR, *contenders.LOADERS)


def globe_2x2(setting: Setting) -> Iterator[Result]:
    """The whole globe a chunk, as WeatherBench2 has it, on four ranks, 2 x 2: CPU seconds."""
    return compare("globe-2x2", setting, "wb2", {"lat": 2, "lon": 2}, ("jigsaw", "jigsaw-independent", *_EVERY_ZARR))


def globe_bands(setting: Setting) -> Iterator[Result]:
    """The same on four bands of latitude: CPU seconds."""
    return compare("globe-bands", setting, "wb2", {"lat": 4}, ("jigsaw", "jigsaw-cooperative", *_EVERY_ZARR))


def small_chunks(setting: Setting) -> Iterator[Result]:
    """Chunks of 91 x 180 rows, on one rank: CPU seconds."""
    return compare("tiles", setting, "tiles", {"lat": 1}, ("jigsaw", *contenders.ZARR[:-1], *contenders.LOADERS))


def shards(setting: Setting) -> Iterator[Result]:
    """Such chunks of one level inside a shard a step, on one rank: CPU seconds."""
    return compare("shard", setting, "shard", {"lat": 1}, ("jigsaw", *contenders.ZARR[:-1], *contenders.LOADERS))


def hdf5(setting: Setting) -> Iterator[Result]:
    """Deflated and shuffled NetCDF-4, and HDF5 as makani has it, on one rank of one and of two threads: wall time."""
    engines = ("jigsaw", *contenders.HDF5)
    for store in stores.HDF5:
        for threads in (1, 2):
            yield from compare("hdf5", setting, store, {"lat": 1}, engines, threads)


def pipeline(setting: Setting) -> Iterator[Result]:
    """jigsaw's whole pipeline with normalization, held against reading and decoding the same chunks: CPU seconds."""
    for store in stores.CHUNKS:
        samples = stores.samples_of(store)
        engines = ("jigsaw-normalized", "bare-loop", "bare-loop-kept")
        for result in compare("pipeline", setting, store, {"lat": 1}, engines, samples=samples):
            del result["checksum"]  # jigsaw gives samples, the loops chunks
            yield result


def volumes(setting: Setting) -> Iterator[Result]:
    """A quarter of a scan for each of four ranks: NIfTI, compressed NIfTI, and Zarr in cubes."""
    for store, others in (
        ("nifti", contenders.VOLUMES),
        ("nifti-gz", contenders.VOLUMES),
        ("volume-zarr", ("zarr", "zarr+zarrs")),
    ):
        yield from compare("volumes", setting, store, {"z": 2, "y": 2}, ("jigsaw", *others))


# -- loaders ---------------------------------------------------------------------------------------------------------


AHEAD = 2  # batches


def memory(setting: Setting) -> Iterator[Result]:
    """The peak over the process tree of four ranks that read ahead two samples of 432 MB: bytes."""
    task, plan = task_of(setting, "long", {"lat": 2, "lon": 2}, 1)
    known = {"bound_bytes": bound_bytes(task, plan), "sample_bytes": plan["useful"], "chunk_bytes": plan["chunk"]}
    for engine in setting.chosen(("jigsaw-loader", contenders.LOADERS[1])):
        with Team(replace(task, engine=engine)) as team:
            found = {**header("memory", task, engine), **peaks(team, setting), **known, "ahead": AHEAD}
            yield {**found, "settings": team.settings}


def bound_bytes(task: Task, plan: dict[str, Any]) -> int:
    """(batches ahead + 1) samples, a chunk for each decoding thread, and `_ADDED` for each rank."""
    return round((AHEAD + 1) * plan["useful"] + task.ranks * (task.threads * plan["chunk"] + _ADDED))


def peaks(team: Team, setting: Setting) -> Result:
    """The most memory in the turns of a team, whose steps leave time to read ahead; before them it is idle."""
    pids = [process.pid for process in team.processes]
    idle, found = pss_bytes(pids), []
    for _ in range(setting.repeat):
        team.begin(range(stores.samples_of(team.task.store)), step_s=0.02 if setting.small else 0.5)
        found.append(_peak(team, pids))
        team.end()
    return {"peak_pss_bytes": max(found), "peak_runs_bytes": found, "idle_pss_bytes": idle}


def _peak(team: Team, pids: Sequence[Any]) -> int:
    """The most memory while a turn is under way, looked at twenty times a second."""
    peak = pss_bytes(pids)
    while not team.is_done():
        time.sleep(0.05)
        peak = max(peak, pss_bytes(pids))
    return peak


def waiting(setting: Setting) -> Iterator[Result]:
    """A training step as long as reading its batch: the share of time that it waits, on one rank and on four."""
    for mesh in ({"lat": 1}, {"lat": 2, "lon": 2}):
        task, _ = task_of(setting, "long", mesh, 1)
        for engine in setting.chosen(("jigsaw-loader", *contenders.LOADERS[1:])):
            with Team(replace(task, engine=engine)) as team:
                yield {**header("waiting", task, engine), **waits(team, setting), "settings": team.settings}


def waits(team: Team, setting: Setting) -> Result:
    every = range(stores.samples_of("long"))
    team.turn(every)
    shares: list[float] = []
    steps: list[float] = []
    for _ in range(setting.repeat):
        alone = team.turn(every)
        steps.append(alone.wall_s)
        said = team.turn(every, step_s=alone.wall_s).more
        shares.append(round(said["waited_s"] / said["after_first_s"], 5))
    return {"waiting_share": statistics.median(shares), "waiting_runs": shares,
            "step_s": round(statistics.median(steps), 4)}  # fmt: skip


# -- far away --------------------------------------------------------------------------------------------------------


def far(setting: Setting) -> Iterator[Result]:
    """Stores behind an HTTP server that answers after 20 ms: the share of the server's bandwidth that is reached."""
    import http_store

    for layout in http_store.CASES:
        found = http_store.run(layout, 0.02, 125e6, 4 if setting.small else 24, setting.repeat)
        yield {**found, "case": "far", "store": layout, "engine": "jigsaw-loader", "ranks": 1}


CASES: dict[str, Callable[[Setting], Iterator[Result]]] = {
    "globe-2x2": globe_2x2,
    "globe-bands": globe_bands,
    "tiles": small_chunks,
    "shard": shards,
    "hdf5": hdf5,
    "pipeline": pipeline,
    "memory": memory,
    "waiting": waiting,
    "far": far,
    "volumes": volumes,
}
