"""A program that fails, made shorter while it fails in the same way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from fuzz_programs import Program, names_in, with_outputs
from fuzz_ranks import ProgramVerdict, verdict_of_program

_MOST_TRIES = {"hang": 8, "apart": 10, "crash": 8}


def shorter_program(program: Program, verdict: ProgramVerdict, folder: Path) -> tuple[Program, ProgramVerdict]:
    """The shortest program found that has the same verdict."""
    ranks = 1
    for n in program.axes.values():
        ranks *= n
    tries = _MOST_TRIES.get(verdict.verdict, 60)
    is_shorter = True
    while is_shorter and tries > 0:
        is_shorter = False
        for candidate in _shorter_ones(program):
            tries -= 1
            found = verdict_of_program(ranks, candidate, folder)
            if found.verdict == verdict.verdict and (found.key == verdict.key or verdict.key == "backward"):
                program, verdict, is_shorter = candidate, found, True
                break
            if tries <= 0:
                break
    return program, verdict


def _shorter_ones(program: Program) -> Iterator[Program]:
    """Programs that lack something: the last statements first, which most often only use the wrong value."""
    for at in reversed(range(len(program.statements))):
        rest = program.statements[:at] + program.statements[at + 1 :]
        yield _with(program, statements=_that_still_run(rest, program.statements[at].names))
    if program.outputs:
        yield replace(program, outputs=())
    used = " ".join(s.text for s in program.statements)
    for at, x in enumerate(program.inputs):
        others = program.inputs[:at] + program.inputs[at + 1 :]
        if x.name not in used and others:
            yield _with(program, inputs=others)
        for simpler in (
            {"has_grad": False},
            {"halo": None, "periodic": ()},
            {"split": None},
            {"spec": None, "split": None, "halo": None, "periodic": ()},
        ):
            plain = replace(x, **simpler)
            if plain != x and (plain.spec is not None or any(o.spec for o in others)):
                yield _with(program, inputs=(*program.inputs[:at], plain, *program.inputs[at + 1 :]))


def _that_still_run(statements: tuple, lost: tuple[str, ...]) -> tuple:
    kept, gone = [], set(lost)
    for s in statements:
        if gone.intersection(names_in(s.text)):
            gone |= set(s.names)
        else:
            kept.append(s)
    return tuple(kept)


def _with(program: Program, **changes: object) -> Program:
    made = replace(program, **changes)
    return with_outputs(made) if program.outputs else made
