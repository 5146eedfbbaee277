"""Random programs of torch functions on random cuts, against plain torch: exact, or refused alike on every rank."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.nn.functional as F
from fuzz_functions import reads_what_it_writes
from fuzz_posed import reads_changed_values, value_spread
from fuzz_programs import Program, ProgramInput, Statement, loss_of, make_program, ranks_of_seed, values
from fuzz_ranks import BAD, verdict_of_program, verdicts_of_seeds

MINUTES = float(os.environ.get("JIGSAW_FUZZ_MINUTES", "0"))


def _faults(seeds, folder, end=float("inf")):
    """The programs that were neither exact nor refused alike, as scripts."""
    said, programs = [], 0
    for ranks in (2, 4):
        part = [seed for seed in seeds if ranks_of_seed(seed) == ranks]
        for verdict in verdicts_of_seeds(ranks, part, folder):
            programs += 1
            if verdict.verdict in BAD:
                title = f"{verdict.verdict} (seed {verdict.seed}): {verdict.key}: {verdict.text}"
                said.append(make_program(verdict.seed).text(title))
            if time.monotonic() > end:
                break
    assert programs
    return "\n".join(said)


# of long runs: a scattered diagonal that was viewed, circular pads written through contiguous() and without rows, ties
# of rounded values, the dtype of a similarity, a norm of two values of float32, an adaptive pool that
# changes no size, a copy of a tile into its own detached memory, a histogram of bfloat16
FOUND = (24314, 27091, 30872, 31666, 40189, 41066, 52411, 60224, 60488)


@pytest.mark.parametrize("programs", [range(120), pytest.param(range(120, 360), marks=pytest.mark.slow)], ids=len)
@pytest.mark.parametrize("ranks", [2, 4])
def test_random_programs_are_exact_or_refused(ranks, programs, tmp_path):
    seeds = [seed for seed in (*FOUND, *programs) if ranks_of_seed(seed) == ranks]
    assert not _faults(seeds, tmp_path / "verdicts")


@pytest.mark.slow
@pytest.mark.skipif(not MINUTES, reason="new programs each time: JIGSAW_FUZZ_MINUTES=60, or make fuzz")
@pytest.mark.timeout(60 * MINUTES + 600)
def test_new_random_programs_are_exact_or_refused(tmp_path):
    first = int(time.time()) * 100
    end = time.monotonic() + 60 * MINUTES
    while time.monotonic() < end:
        print(f"python tests/fuzz/run.py --seed {first} --programs 200")
        assert not _faults(range(first, first + 200), tmp_path / "verdicts")
        first += 200


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        ("x[None, 2:4, :5] = x[1:6, 1]", True),
        ("x[2:4] = x[1:3]", True),
        ("x[:2] = x[:2]", False),
        ("x[:2] = x[2:4]", False),
        ("x[:2] = x[:2].clone()", False),
        ("x[0] = 3", False),
    ],
)
def test_an_assignment_thatreads_what_it_writes_is_no_program(text, is_one):
    assert reads_what_it_writes(text, {"x": torch.zeros(7, 8, 2)}) is is_one


def test_a_program_is_the_same_from_the_same_seed():
    assert make_program(5) == make_program(5)


IS_TILE, ON_FIRST = "(type(x0).__name__ == 'Tile')", "torch.distributed.get_rank() == 0"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        (f"v0 = x0 + {IS_TILE}", "wrong"),
        (f"v0 = x0.double() if {IS_TILE} else x0", "wrong"),
        (f"v0 = x0.detach() if {IS_TILE} else x0 * 1", "wrong"),
        (f"v0 = x0 / (1 if {IS_TILE} else 2)", "wrong"),
        (f"v0 = x0 * (1 + 1 / (not {IS_TILE}))", "untyped"),
        (f"v0 = x0 + 1 / (not ({IS_TILE} and {ON_FIRST}))", "apart"),
        (f"v0 = torch.zeros(2) if {IS_TILE} and {ON_FIRST} else x0.sum() + 0 * x0.sum(0)[:2]", "apart"),
    ],
)
def test_faults_are_noticed(text, verdict, tmp_path):
    x = ProgramInput("x0", (7, 3), "float32", spec=("lat", None), has_grad=True)
    program = Program(0, {"lat": 2}, (x,), (Statement("mine", text, ("v0",)),))
    seconds = 6 if verdict == "apart" else 30  # ranks that part wait for each other all that time
    found = verdict_of_program(2, program, tmp_path / "verdicts", seconds)
    assert (found.verdict, found.key) == (verdict, "mine")


def test_a_rank_whose_rows_are_wrong_takes_part_in_the_backward_pass(tmp_path):
    x = ProgramInput("x0", (7, 3), spec=("lat", None), has_grad=True)
    text = f"v0 = x0.neg() if {IS_TILE} and {ON_FIRST} else x0.clone()"
    program = Program(0, {"lat": 2}, (x,), (Statement("mine", text, ("v0",)),), ("v0",))
    found = verdict_of_program(2, program, tmp_path / "verdicts", 30)
    assert (found.verdict, found.key) == ("wrong", "mine"), found.text


def _program_of(*lines, outputs=("v0",), dtype="float64"):
    x = ProgramInput("x0", (6, 6), dtype, spec=("lat", None))
    statements = tuple(Statement(line, line, ("v0",) if line.startswith("v0 =") else ()) for line in lines)
    return Program(0, {"lat": 2}, (x, ProgramInput("p1", (6, 6), dtype, seed=3, has_grad=True)), statements, outputs)


@pytest.mark.parametrize(
    ("change", "is_posed"),
    [("x0.add_(1)", False), ("p1.data.add_(1)", True), ("v0.data.add_(1)", True)],
)
def test_gradients_of_values_that_were_changed_since_are_no_oracle(change, is_posed, tmp_path):
    program = _program_of("v0 = torch.kron(x0, p1)", change)
    assert reads_changed_values(program, program.statements) is not is_posed
    assert verdict_of_program(2, program, tmp_path / "verdicts", 3).verdict == "exact"


@pytest.mark.parametrize("value", [0.75, 1.0, 1.25])
def test_errors_of_rounding_show_both_sides_of_a_step(value):
    key = "F.instance_norm({f4})"  # whose results are rounded, also where they come out whole
    shape = (2, 8, 1, 1)
    x = ProgramInput("x0", (2, 8), "float64", has_grad=False)
    steps = (
        Statement(key, f"v0 = torch.full({shape}, {value})", ("v0",)),
        Statement("ceil", "v2 = v0.ceil()", ("v2",)),
    )
    spread = value_spread(Program(0, {"lat": 2}, (x,), steps), steps, "v2")
    assert spread.shape == shape
    assert bool((spread == (value == 1)).all())


def test_where_plain_torch_is_far_from_float64_is_no_fault():
    x = ProgramInput("x0", (7, 2), "float32", seed=79, whole=False, spec=("lat", None), has_grad=True)
    step = Statement("mine", "v0 = F.group_norm(x0, 1)", ("v0",))  # the two values of a row are nearly alike
    program = Program(0, {"lat": 2}, (x,), (step,), ("x0", "v0"))
    plain, wide = (_gradient_of_norm(dtype) for dtype in (torch.float32, torch.float64))
    spread = value_spread(program, (step,), "x0.grad")
    assert bool((spread >= 0.99 * (plain - wide).abs()).all())
    assert spread.max().item() < 0.1


def _gradient_of_norm(dtype):
    x = values((7, 2), "float32", seed=79, whole=False).to(dtype).requires_grad_()
    loss_of(x, F.group_norm(x, 1)).backward()
    return x.grad


def test_rows_of_an_expanded_value_have_one_error():
    x = ProgramInput("x0", (3,), "float64", whole=False)
    step = Statement("mine", "v0 = x0[:, None].expand(3, 2)", ("v0",))
    spread = value_spread(Program(0, {"lat": 2}, (x,), (step,)), (step,), "v0")
    assert bool((spread[:, 0] == spread[:, 1]).all())
    assert bool((spread > 0).all())
