"""Random programs on real ranks: each statement on tiles and on whole tensors in turn, and what became of them.

The verdicts: `exact`; `refused`, where statements ended in a typed error and the others were exact; `wrong`;
`untyped`, any other error; `apart`, ranks that end differently; `hang`; `crash`.
"""

from __future__ import annotations

import json
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
from fuzz_posed import draw_from_start, reads_changed_values, rounding_of, value_spread
from fuzz_programs import AXES, Program, ProgramInput, Statement, loss_of, make_program, names_in, plain_state

import jigsaw
from jigsaw import comm
from jigsaw.comm.exchange import redistribute_rows
from jigsaw.errors import RanksDifferError, ReadError, ShardingError
from jigsaw.geometry.cut import box_slices
from jigsaw.geometry.layout import Layout
from jigsaw.ranks.mesh import axes_of_mesh
from jigsaw.ranks.waiting_ranks import WaitError
from jigsaw.testing import run_on_ranks
from jigsaw.testing.failure import RankFailedError
from jigsaw.tile.tile import Tile

BAD = ("wrong", "untyped", "apart", "hang", "crash")
_REFUSALS = (ShardingError, ReadError)


@dataclass
class ProgramVerdict:
    """What became of a program: `key` names the statement that is to blame, `text` says what differs."""

    seed: int
    verdict: str = "exact"
    key: str = ""
    text: str = ""
    answered: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    refusal: str = ""
    chaotic: int = 0
    blamed_after: int = 0
    parts: dict[str, Any] = field(default_factory=dict, repr=False)
    whole_gradients: dict[str, Any] = field(default_factory=dict, repr=False)

    def as_line(self) -> str:
        told = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("parts", "whole_gradients")}
        return json.dumps(told) + "\n"


# -- on a rank ---------------------------------------------------------------------------------------------------------


@cache
def _program_mesh(axes: tuple[tuple[str, int], ...], seconds: float) -> Any:
    return jigsaw.init_mesh(device="cpu", timeout=timedelta(seconds=seconds), **dict(axes))


def run_seeds(seeds: Sequence[int], folder: str, seconds: float) -> int:
    """Run the programs of these seeds; rank 0 writes the verdicts to the folder, one a line."""
    world = torch.distributed.get_world_size()
    mesh = _program_mesh(tuple(AXES[world][0].items()), seconds)
    mine = [make_program(seed) for seed in seeds[mesh.get_rank() :: world]]
    shared = comm.all_gather_object(mesh, mine)
    programs = [shared[at % world][at // world] for at in range(len(seeds))]
    return run_programs(programs, folder, seconds)


def run_programs(programs: Iterable[Program], folder: str, seconds: float) -> int:
    """Run programs, as `run_seeds` does."""
    _program_mesh.cache_clear()  # after each job a world gives its group the world's own time-out back
    warnings.simplefilter("ignore")
    rank, count = torch.distributed.get_rank(), 0
    journal = os.open(Path(folder) / f"rank{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    results = os.open(Path(folder) / "results", os.O_WRONLY | os.O_CREAT | os.O_APPEND) if rank == 0 else None
    for program in programs:
        os.write(journal, f"seed {program.seed}\n".encode())
        mesh = _program_mesh(tuple(program.axes.items()), seconds)
        verdict = _agreed_verdict(_ProgramRun(program, mesh, journal))
        if verdict.verdict == "wrong":
            closer = _agreed_verdict(_ProgramRun(program, mesh, journal, every=True))
            if closer.verdict == "wrong":
                verdict.key, verdict.text = closer.key, closer.text
        if results is not None:
            os.write(results, verdict.as_line().encode())
        count += 1
    os.close(journal)
    return count


def _agreed_verdict(run: _ProgramRun) -> ProgramVerdict:
    mine = run.run()
    heard: list[ProgramVerdict] = comm.all_gather_object(run.mesh, mine)
    kinds = [(v.verdict == "untyped", v.refused) for v in heard]
    if any(kind != kinds[0] for kind in kinds):
        said = "; ".join(f"rank {at}: {v.verdict} {v.text[:150]} refused {v.refused}" for at, v in enumerate(heard))
        return ProgramVerdict(mine.seed, "apart", mine.key, said)
    run.compare_parts(heard)
    heard[run.mesh.get_rank()] = mine
    bad = [v for v in heard if v.verdict in BAD]  # one rank may see first what another sees later
    return min(bad, key=lambda v: v.blamed_after) if bad else heard[0]


class _ProgramRun:
    """One program on this rank, in two states: of whole tensors, and of tiles."""

    def __init__(self, program: Program, mesh: Any, journal: int, *, every: bool = False) -> None:
        self.program, self.mesh, self.journal, self.every = program, mesh, journal, every
        self.verdict = ProgramVerdict(program.seed)
        self.done: list[Statement] = []
        self.whole = plain_state(list(program.inputs))
        self.tiles = plain_state([])
        self.leaves = {x.name: {x.name} for x in program.inputs if x.spec is None and x.has_grad}
        """The plain leaves that a plain value was made of."""
        self.spoilt: set[str] = set()
        for x in program.inputs:
            self.tiles[x.name] = self._cut(x)

    def _cut(self, x: ProgramInput) -> Any:
        made = plain_state([replace(x, has_grad=False)])[x.name]
        if x.spec is not None:  # as `shard` does, without its messages
            rules = {"split": x.split or "balanced", "halo": x.halo, "periodic": x.periodic}
            layout = Layout.of(x.shape, x.spec, axes_of_mesh(self.mesh), **rules)
            uncut = Layout.of(x.shape, (None,) * len(x.shape), layout.axes)
            made = Tile(redistribute_rows(made, uncut, layout, self.mesh).clone(), layout, self.mesh)
        return made.requires_grad_() if x.has_grad else made

    def run(self) -> ProgramVerdict:
        draw_from_start()
        for statement in self.program.statements:
            if not self._step(statement):
                return self.verdict
        self._compare_values("at the end")
        self._compare_one_whole()
        if self.program.outputs:  # also where this rank's rows were wrong: the others wait for it
            self._compare_gradients()
        if self.verdict.verdict == "exact" and self.verdict.refused:
            self.verdict.verdict = "refused"
        return self.verdict

    def _step(self, statement: Statement) -> bool:
        """Run one statement on both; False where the program ends here."""
        try:
            exec(statement.text, self.tiles)
        except NameError:
            return True  # it needs the answer of one that was refused
        except (RanksDifferError, WaitError):
            self._note(statement, "ranks differ")
            raise
        except _REFUSALS as error:
            self._note(statement, f"refused: {error}")
            self.verdict.refused.append(statement.key)
            self.verdict.refusal = str(error)
            if statement.writes:
                self._compare_values(f"after {statement.text!r} was refused", statement)
            return True
        except Exception as error:
            mine: Exception | None = error
        else:
            mine = None
        draw_from_start()
        try:
            exec(statement.text, self.whole)
        except Exception:  # what torch refuses too says nothing about tiles
            if mine is not None:
                return True
            self._note(statement, "answered what torch refuses")
            # as where another statement was refused, or was left out when the program was made shorter
            self.verdict.chaotic += 1
            return False
        if mine is not None:
            self._note(statement, f"untyped: {mine!r}")
            return self._blame("untyped", statement, f"{statement.text}: {type(mine).__name__}: {mine}")
        self._follow_leaves(statement)
        self.done.append(statement)
        self.verdict.answered.append(statement.key)
        self._compare_metadata(statement)
        if self.every or statement.writes:
            self._compare_values(f"after {statement.text!r}", statement)
        return True  # also where a value is wrong: the other ranks, which see other rows, go on

    def _follow_leaves(self, statement: Statement) -> None:
        """A plain leaf that meets a plain tensor that left a tile has its whole gradient on each rank, not its part."""
        names = [n for n in names_in(statement.text) if n not in statement.names]
        if any(isinstance(self.tiles[n], Tile) for n in names):
            return
        leaves = set().union(*(self.leaves.get(n, set()) for n in names))
        if not all(n in self.leaves or not _has_grad(self.tiles[n]) for n in names):
            self.spoilt |= leaves
            return
        self.leaves |= dict.fromkeys(names[:1] if statement.writes else statement.names, leaves)

    def _note(self, statement: Statement, what: str) -> None:
        """What a rank says alone, in case the others wait for it."""
        os.write(self.journal, f"  {statement.key} {what}\n".replace("\n", " ").encode() + b"\n")

    def _blame(self, kind: str, statement: Statement | None, text: str) -> bool:
        if self.verdict.verdict == "exact":
            self.verdict.verdict, self.verdict.text = kind, text
            self.verdict.blamed_after = len(self.done)
            self.verdict.key = statement.key if statement is not None else "backward"
        return False

    def _compare_metadata(self, statement: Statement) -> None:
        for name in statement.names:
            right, got = self.whole[name], self.tiles[name]
            if not isinstance(right, torch.Tensor):
                if isinstance(right, (bool, int, torch.Size, torch.dtype)) and (type(got), got) != (type(right), right):
                    self._blame("wrong", statement, f"{statement.text}: {got!r}, not {right!r}")
            elif not isinstance(got, torch.Tensor):
                self._blame("wrong", statement, f"{statement.text}: a {type(got).__name__}, not a tensor")
            else:
                facts = [(tuple(v.shape), v.dtype, v.requires_grad) for v in (got, right)]
                if facts[0][1:] != facts[1][1:] or (facts[0] != facts[1] and not self._has_any_shape(name)):
                    self._blame("wrong", statement, f"{statement.text}: {facts[0]}, not {facts[1]}")

    def _compare_values(self, when: str, statement: Statement | None = None) -> None:
        """This rank's rows of all values that are alive; nothing is sent."""
        for name in [n for n in self.whole if n[1:].isdigit()]:
            right, got = self.whole[name], self.tiles[name]
            if isinstance(right, torch.Tensor) and isinstance(got, torch.Tensor):
                try:
                    read = got.detach()
                except _REFUSALS as error:  # of a view of a plain tensor that was changed since
                    self.verdict.refused.append("read")
                    self.verdict.refusal = str(error)
                    continue
                self._compare(name, read, right.detach(), when, statement or self._maker(name))

    def _compare_one_whole(self) -> None:
        """One value by `full_tensor`, on every rank, whatever is wrong."""
        names = [n for n, v in self.tiles.items() if isinstance(v, Tile)]
        if names:
            name = names[self.program.seed % len(names)]
            try:
                with torch.no_grad():
                    whole = self.tiles[name].full_tensor()
            except ShardingError:  # counted where the value was read
                return
            self._compare(name, whole, self.whole[name].detach(), "in full_tensor", self._maker(name))

    def _maker(self, name: str) -> Statement | None:
        return next((s for s in self.program.statements if name in s.names), None)

    def _compare(self, name: str, got: Any, right: Any, when: str, statement: Statement | None) -> None:
        if (got.shape, got.dtype) != (right.shape, right.dtype):
            if got.dtype == right.dtype and self._has_any_shape(name):
                return
            found = f"{tuple(got.shape)} {got.dtype}, not {tuple(right.shape)} {right.dtype}"
            self._blame("wrong", statement, f"{name} is {found} {when}")
            return
        mine = _owned_rows(got, right)
        if mine[0].shape != mine[1].shape:
            self._blame("wrong", statement, f"{name} {when}: local {tuple(mine[0].shape)}, not {tuple(mine[1].shape)}")
        elif not _is_close(*mine, 0.0, self._coarsest()):
            spread = self._spread(name)
            if isinstance(spread, torch.Tensor) and isinstance(got, Tile):
                spread = _owned_rows(got, spread)[1]
            if not _is_close(*mine, spread, self._coarsest()):
                self._blame("wrong", statement, f"{name} {when}: {_said(mine[0])}, not {_said(mine[1])}")

    def _coarsest(self) -> float:
        """The rounding of the coarsest dtype that the program computes in."""
        tensors = [v for v in self.whole.values() if isinstance(v, torch.Tensor)]
        return max((rounding_of(v) for v in tensors), default=0.0)

    def _spread(self, name: str) -> Any:
        """How far small errors in every statement move a value: of a step, or a tie, anywhere."""
        self.verdict.chaotic += 1
        return value_spread(self.program, self.done, name)

    def _has_any_shape(self, name: str) -> bool:
        """Whether small errors change the shape of a value, as that of what a mask picks."""
        return isinstance(self._spread(name), float)

    def _compare_gradients(self) -> None:
        outputs = [n for n in self.program.outputs if n in self.whole and _has_grad(self.whole[n])]
        statement = Statement("backward", "loss.backward()")
        for n in outputs:  # a leaf that met a number of a tile, and no tile, has its whole gradient on each rank
            self.spoilt |= set() if isinstance(self.tiles[n], Tile) else self.leaves.get(n, set())
        mine: Exception | None = None
        try:
            loss_of(*(self.tiles[n] for n in outputs)).backward()
        except (RanksDifferError, WaitError):
            self._note(statement, "ranks differ")
            raise
        except _REFUSALS as error:
            self._note(statement, f"refused: {error}")
            self.verdict.refused.append("backward")
            self.verdict.refusal = str(error)
            return
        except Exception as error:
            mine = error
        try:
            loss_of(*(self.whole[n] for n in outputs)).backward()
        except Exception:  # where another statement was refused, or left out
            return
        if mine is not None and reads_changed_values(self.program, self.done):
            self.verdict.chaotic += 1  # on tiles torch may see that they were changed
            return
        if mine is not None:
            self._note(statement, f"untyped: {mine!r}")
            self._blame("untyped", statement, f"backward: {type(mine).__name__}: {mine}")
            return
        for x in self.program.inputs:
            if not x.has_grad:
                continue
            leaf, right = self.tiles[x.name], _gradient_of(self.whole[x.name])
            if not isinstance(leaf, Tile):  # each rank has its part
                self.verdict.parts[x.name] = _gradient_of(leaf)
                self.verdict.whole_gradients[x.name] = right
                continue
            if leaf.layout.has_halo:  # each rank has its part of the rows that several hold
                self.verdict.parts[x.name] = _spread_out(leaf)
                self.verdict.whole_gradients[x.name] = right
                continue
            got = leaf.grad
            got = Tile(torch.zeros_like(leaf.local), leaf.layout, leaf.mesh) if got is None else got
            self._compare(f"{x.name}.grad", got.detach(), right, "in the backward pass", statement)

    def compare_parts(self, heard: Sequence[ProgramVerdict]) -> None:
        """The gradients of plain leaves: what the ranks have of them adds up."""
        for name, right in self.verdict.whole_gradients.items():
            if name not in self.spoilt and all(name in v.parts for v in heard):
                total = torch.stack([v.parts[name] for v in heard]).sum(0)
                statement = Statement("backward", "loss.backward()")
                self._compare(f"{name}.grad", total, right, "in the backward pass", statement)


def _has_grad(v: Any) -> bool:
    return isinstance(v, torch.Tensor) and v.requires_grad


def _gradient_of(leaf: Any) -> Any:
    # autograd's zeros without memory, as those of torch.sgn, cannot be sent: a clone has some
    return torch.zeros_like(leaf).detach() if leaf.grad is None else leaf.grad.clone()


def _spread_out(leaf: Tile) -> Any:
    """This rank's part of the gradient, in a whole tensor; ranks that hold it alike have a share each."""
    part = _gradient_of(leaf.local) / leaf.layout.replicas
    for dim, (start, stop) in enumerate(leaf.layout.held(leaf.coordinate)):
        rows = torch.arange(start, stop) % max(leaf.shape[dim], 1)
        shape = (*part.shape[:dim], leaf.shape[dim], *part.shape[dim + 1 :])
        part = part.new_zeros(shape).index_add(dim, rows, part)
    return part


def _owned_rows(got: Any, right: Any) -> tuple[Any, Any]:
    """What this rank owns, as it is and as it should be."""
    if not isinstance(got, Tile):
        return got, right
    with torch.no_grad():
        mine = got.owned()
    layout = mine.layout
    cut = right.reshape([c.size for c in layout.cuts])[box_slices(layout.owned(got.coordinate))]
    return mine.local, cut.reshape(layout.local_shape(got.coordinate))


def _said(v: Any) -> str:
    text = str(v.tolist())
    return text if len(text) < 160 else f"{text[:157]}..."


def _is_close(got: Any, right: Any, spread: Any, rounding: float) -> bool:
    if not right.numel():
        return True
    if not (right.is_floating_point() or right.is_complex()):
        return torch.equal(got, right) or (isinstance(spread, torch.Tensor) and bool((spread > 0).any()))
    tolerance = 1000 * rounding
    known = right.isfinite()
    scale = right[known].abs().max().item() if bool(known.any()) else 1.0
    off = torch.where(known, got.to(right.dtype) - right, 0).abs().double()
    allowed = tolerance * max(scale, 1.0) + 10 * spread
    # where plain torch has a NaN or an infinity it is not compared: 0 * inf follows from the order of operations
    return bool((off.nan_to_num(float("inf")) <= allowed).all())


# -- in the test's own process -----------------------------------------------------------------------------------------


def verdicts_of_seeds(
    ranks: int, seeds: Sequence[int], folder: Path, *, seconds: float = 30.0, batch: int = 100
) -> Iterator[ProgramVerdict]:
    """The verdict of each seed; ranks that wait for each other, or die, are replaced and the next seed goes on.

    A program after which ranks waited is run once more alone: on a busy machine they may only have been slow.
    """
    seeds = list(seeds)
    while seeds:
        part = seeds[:batch]
        error = _run_or_error(ranks, run_seeds, part, folder, seconds)
        done = _read_results(folder)
        yield from done.values()
        if error is None:
            assert set(done) == set(part)
        else:
            rest = [seed for seed in part if seed not in done]
            first = _verdict_of_end(rest[0], ranks, folder, error)
            again = verdict_of_program(ranks, make_program(rest[0]), folder, 2 * seconds)
            if again.verdict not in BAD:
                print(f"seed {rest[0]}: {first.verdict} ({first.text[:300]}), but {again.verdict} when it ran alone")
            yield again
            part = part[: part.index(rest[0]) + 1]
        seeds = seeds[len(part) :]


def verdict_of_program(ranks: int, program: Program, folder: Path, seconds: float = 8.0) -> ProgramVerdict:
    """What becomes of one program."""
    error = _run_or_error(ranks, run_programs, [program], folder, seconds)
    done = _read_results(folder)
    return _verdict_of_end(program.seed, ranks, folder, error) if error is not None else done[program.seed]


def _run_or_error(ranks: int, function: Any, work: Sequence[Any], *arguments: Any) -> RankFailedError | None:
    folder, seconds = arguments[-2:]
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    try:
        patience = 4 * seconds + 5.0 * len(work) + 60
        run_on_ranks(ranks, function, work, *arguments[:-2], str(folder), seconds, timeout=patience)
    except RankFailedError as error:
        return error
    return None


def _read_results(folder: Path) -> dict[int, ProgramVerdict]:
    path = folder / "results"
    lines = path.read_text().splitlines() if path.exists() else []
    verdicts = [ProgramVerdict(**json.loads(line)) for line in lines if line.endswith("}")]
    return {v.seed: v for v in verdicts}


def _verdict_of_end(seed: int, ranks: int, folder: Path, error: RankFailedError) -> ProgramVerdict:
    """Of a program that ended the world: what each rank had said of it alone."""
    said = []
    for rank in range(ranks):
        path = folder / f"rank{rank}"
        parts = path.read_text().split("seed ") if path.exists() else [""]
        lines = parts[-1].splitlines()[1:] if parts[-1].startswith(f"{seed}\n") else []
        said.append([line.strip() for line in lines])
    text = str(error)
    ended = [f.summary for f in error.failures]
    if "ended without a word" in text:
        return ProgramVerdict(seed, "crash", text=text[:2000])
    kind = "hang" if all(lines == said[0] for lines in said) else "apart"
    waits = any("WaitError" in each or "still running" in each for each in ended)
    if not waits and "RanksDifferError" not in text:
        kind = "untyped"  # of what this file does around the statements: full_tensor, a gradient, shard
    told = "; ".join(f"rank {rank}: {lines[-1] if lines else 'waits'}" for rank, lines in enumerate(said))
    key = next((line.rsplit(" untyped:")[0].rsplit(" refused:")[0] for lines in said for line in lines[-1:]), "")
    return ProgramVerdict(seed, kind, key.removesuffix(" ranks differ"), f"{told} | {text[-1500:]}")
