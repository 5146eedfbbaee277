"""What agreement costs one rank of many: processor seconds and bytes, no ranks needed; a JSON object a call.

    python benchmarks/control_plane.py --ranks 64 512 1024 4096

One process plays the first rank, then the last one; `played_ranks` answers for the others, which pass what this one
does.  `cpu_s` is the processor time of the last rank and `first_cpu_s` that of the first, with pickling what they send
and reading what they are sent.  `sent` and `received` are bytes by the usual algorithms, `messages` how many a rank
sends.  `groups` are the communicators that a rank is in by then, `files` those that the call has written to a
checkpoint.  `open_files` and `store_requests` are those of a rank of a job of GPUs that has made its mesh and the group
of a save in the background: on paper, by the rules of `open_files`, which measures them on real ranks.

`pairs` are those of the messages that go to one rank each, outside of collectives.

Calls: `mesh`, `init_mesh` with two axes.  `shard` and `from_local`, of a small tensor that both axes cut; `copies`,
`from_local` of one that only the second cuts, so that ranks are compared.  `step`, a training step of two weights over
a token a rank; `block_messages` are those of blocks of their gradients.  `parallelize`, of a model of `--entries`
parameters.  `save` and `load`, of that model and Adam's state, on a local disk; `save again` to the next name.  There
weights are whole on every rank.  `save cut`, `save cut again` and `load cut` are of as many weights with two moments
each, of which every rank has one row, as FSDP2 cuts them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from open_files import connections_of_rank
from played_ranks import PlayedJob, played_job
from result_file import ResultFile, add_result_options
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo  # pyright: ignore[reportPrivateUsage]
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.storage import WriteResult
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import jigsaw
from jigsaw import comm
from jigsaw.checkpoint import checkpoints
from jigsaw.checkpoint.checkpoint_files import WrittenTensors
from jigsaw.checkpoint.checkpoint_folder import FileSum, checkpoint_contents
from jigsaw.checkpoint.piece_writers import writers_of_plain

Row = dict[str, Any]


class _Meter:
    """Rows of one rank, a call each."""

    def __init__(self, job: PlayedJob) -> None:
        self.job, self.rows = job, dict[str, Row]()

    @contextmanager
    def measure(self, call: str) -> Generator[None]:
        job = self.job
        sent, received, messages, pairs, aside = job.sent, job.received, job.messages, job.pairs, job.aside
        began = time.process_time()
        yield
        self.rows[call] = {
            "cpu_s": round(time.process_time() - began - (job.aside - aside), 4),
            "sent": job.sent - sent,
            "received": job.received - received,
            "messages": job.messages - messages,
            "pairs": job.pairs - pairs,
            "groups": job.groups,
            "files": 0,
        }

    def count_files(self, call: str, checkpoint: Path) -> None:
        self.rows[call]["files"] = 1 + len(checkpoint_contents(checkpoint).files)


class _TokenMixer(nn.Module):
    """Two weights of 1 MiB over a token a rank, of use to each rank in a column or a row."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        hidden = (1 << 18) // tokens
        self.into, self.back = nn.Linear(tokens, hidden, bias=False), nn.Linear(hidden, tokens, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.back(torch.tanh(self.into(x.flatten(1))))


def _play_step(meter: _Meter, mesh: DeviceMesh, sides: tuple[int, int]) -> None:
    model = jigsaw.parallelize(_TokenMixer(meter.job.ranks), mesh)
    tile = jigsaw.shard(torch.ones(4, *sides), mesh, (None, "lat", "lon"))
    with meter.measure("step"), comm.count() as traffic:
        model(tile).square().mean().backward()
    blocks = [call.messages for call in traffic.calls if call.kind == "blocks of gradients"]
    meter.rows["step"]["block_messages"] = sum(blocks)


def _small_model(entries: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(2, 2) for _ in range(entries // 2)])


def _mesh_sides(ranks: int) -> tuple[int, int]:
    second = 1 << (ranks.bit_length() // 2)
    return ranks // second, second


def _others_of_save(job: PlayedJob, tensors: dict[str, Any]) -> Callable[[int, Any], Any]:
    """Return what other ranks pass when the first one gathers what all have written of tensors that are whole."""
    writers = writers_of_plain([{key: FileSum(x.nbytes, 0) for key, x in tensors.items()}] * job.ranks)

    def pass_value(rank: int, mine: Any) -> Any:
        value, why = mine if isinstance(mine, tuple) else (mine, None)
        if not isinstance(value, WrittenTensors):
            return mine
        file, names = f"__{rank}_0.distcp", [key for key, writer in writers.items() if writer == rank]
        pieces = [
            WriteResult(MetadataIndex(key, [0] * tensors[key].ndim), 100, _StorageInfo(file, 100 * at, 100))
            for at, key in enumerate(names)
        ]
        return WrittenTensors(pieces, {file: FileSum(100 * len(names), 0)} if names else {}), why

    return pass_value


def _with_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return optimizer


def _play_saves(meter: _Meter, folder: Path, model: nn.Module) -> None:
    optimizer = _with_optimizer(model)
    tensors = checkpoints._checkpoint_state(model, optimizer, {})[0]  # pyright: ignore[reportPrivateUsage]
    meter.job.others = _others_of_save(meter.job, tensors)
    for step, call in ((1, "save"), (2, "save again")):
        with meter.measure(call):
            jigsaw.save(folder / f"step-{step}", model=model, optimizer=optimizer)
        meter.count_files(call, folder / f"step-{step}")
    with meter.measure("load"):
        jigsaw.load(folder / "whole", model=model, optimizer=optimizer)


def _cut_model(entries: int, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return a model of cut weights, of which a rank has a row, and an optimizer with two moments of each."""

    def cut_zeros() -> DTensor:
        row = torch.zeros(1, 2)
        return DTensor.from_local(
            row, mesh, [Shard(0)], run_check=False, shape=torch.Size((mesh.size(), 2)), stride=(2, 1)
        )

    model = nn.Module()
    for at in range(entries):
        model.register_parameter(f"weight_{at}", nn.Parameter(cut_zeros()))
    optimizer = torch.optim.Adam(model.parameters())
    for p in model.parameters():
        optimizer.state[p] = {"exp_avg": cut_zeros(), "exp_avg_sq": cut_zeros()}
    return model, optimizer


def _as_first_rank(rank: int, mine: Any) -> Any:
    """Return what a rank passes that has written pieces of the shapes of this one's."""
    value, why = mine if isinstance(mine, tuple) else (mine, None)
    if not isinstance(value, WrittenTensors):
        return mine
    file, pieces = f"__{rank}_0.distcp", list[WriteResult]()
    for piece in value.pieces:
        index = MetadataIndex(piece.index.fqn, [rank, *(piece.index.offset or ())[1:]])
        pieces.append(replace(piece, index=index, storage_data=replace(piece.storage_data, relative_path=file)))
    [file_sum] = value.sums.values()
    return WrittenTensors(pieces, {file: file_sum}), why


def _play_cut_saves(meter: _Meter, folder: Path, entries: int) -> None:
    job = meter.job
    model, optimizer = _cut_model(entries, jigsaw.init_mesh(lat=job.ranks, device="cpu"))
    job.others = _as_first_rank
    for step, call in ((1, "save cut"), (2, "save cut again")):
        with meter.measure(call):
            jigsaw.save(folder / f"cut-{step}", model=model, optimizer=optimizer)
        meter.count_files(call, folder / f"cut-{step}")
    with meter.measure("save weights"):
        jigsaw.save_weights(folder / "cut.safetensors", model)
    for rank in range(1, job.ranks) if job.rank == 0 else ():  # rows of one shape have files of one size
        os.link(folder / "cut-2" / "__0_0.distcp", folder / "cut-2" / f"__{rank}_0.distcp")
    with meter.measure("load cut"):
        jigsaw.load(folder / "cut-2", model=model, optimizer=optimizer)


def play_rank(
    rank: int, ranks: int, entries: int, folder: Path, first: PlayedJob | None = None, most_of_saves: int = 4096
) -> _Meter:
    """Let one rank make every call."""
    with played_job(rank, ranks, first) as job:
        meter, (rows, columns) = _Meter(job), _mesh_sides(ranks)
        with meter.measure("mesh"):
            mesh = jigsaw.init_mesh(lat=rows, lon=columns, device="cpu")
        jigsaw.shard(torch.ones(1), mesh, (None,))  # what a mesh makes once
        with meter.measure("shard"):
            jigsaw.shard(torch.ones(rows, columns), mesh, ("lat", "lon"))
        with meter.measure("from_local"):
            jigsaw.from_local(torch.ones(1, 1), mesh, ("lat", "lon"), (rows, columns))
        with meter.measure("copies"):
            jigsaw.from_local(torch.ones(4, 1), mesh, (None, "lon"), (4, columns))
        _play_step(meter, mesh, (rows, columns))
        model = _small_model(entries)
        with meter.measure("parallelize"):
            model = jigsaw.parallelize(model, mesh)
        if ranks <= most_of_saves:
            _play_saves(meter, folder, model)
            _play_cut_saves(meter, folder, entries)
        return meter


def play_ranks(ranks: int, entries: int, folder: Path, most_of_saves: int = 4096) -> dict[str, tuple[Row, Row]]:
    """Return what each call costs the last rank and the first one."""
    model = _small_model(entries)
    jigsaw.save(folder / "whole", model=model, optimizer=_with_optimizer(model))  # of one rank, to load
    first = play_rank(0, ranks, entries, folder, None, most_of_saves)
    last = play_rank(ranks - 1, ranks, entries, folder, first.job, most_of_saves)
    return {call: (row, first.rows[call]) for call, row in last.rows.items()}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 512, 1024, 4096])
    parser.add_argument("--entries", type=int, default=100, help="parameters of the model, an even number")
    parser.add_argument("--saves-up-to", type=int, default=4096, help="ranks of the largest job that saves and loads")
    add_result_options(parser)
    args = parser.parse_args()
    asked = f"--ranks {' '.join(map(str, args.ranks))} --entries {args.entries}"
    results = ResultFile(args, f"python -W ignore benchmarks/control_plane.py {asked}")
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            rows = play_ranks(ranks, args.entries, Path(folder), args.saves_up_to)
        connections = connections_of_rank(ranks)
        del connections["store_keys"]
        for call, (last, first) in rows.items():
            of_first = {f"first_{key}": value for key, value in first.items() if key not in ("groups", "files")}
            results.add({"what": call, "ranks": ranks, **last, **of_first, **connections})


if __name__ == "__main__":
    main()
