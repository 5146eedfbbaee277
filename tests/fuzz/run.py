"""Random programs against plain torch, as many as one likes; a failure is made shorter and written as a script.

    python tests/fuzz/run.py --programs 20000            # seeds from the clock, printed
    python tests/fuzz/run.py --seed 7 --programs 100
    python tests/fuzz/run.py --minutes 5 --write failures

Ends with 1 where a program was wrong, ended untyped, or ended differently by rank.
"""

from __future__ import annotations

import argparse
import collections
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from fuzz_minimal import shorter_program
from fuzz_programs import make_program, ranks_of_seed
from fuzz_ranks import BAD, ProgramVerdict, verdicts_of_seeds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--programs", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after so many")
    parser.add_argument("--seed", type=int, default=None, help="the first seed; from the clock by default")
    parser.add_argument("--write", default=None, help="a folder for the scripts of failures")
    parser.add_argument("--whole", action="store_true", help="do not make failures shorter")
    args = parser.parse_args()
    first = int(time.time()) % 10**8 * 100 if args.seed is None else args.seed
    print(f"--seed {first} --programs {args.programs}", flush=True)
    report = FuzzReport(args.write, not args.whole)
    end, step = time.monotonic() + 60 * args.minutes, 400
    for start in range(first, first + args.programs, step):
        seeds = range(start, min(start + step, first + args.programs))
        report.run(seeds)
        if time.monotonic() > end:
            break
    report.print()
    return 1 if any(report.counts[kind] for kind in BAD) else 0


class FuzzReport:
    """What became of the programs so far."""

    def __init__(self, write: str | None, shorten: bool) -> None:
        self.write, self.shorten = write, shorten
        self.counts: collections.Counter[str] = collections.Counter()
        self.answered: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()
        self.faults: collections.Counter[str] = collections.Counter()
        self.reasons: dict[str, str] = {}
        self.chaotic = 0
        self.began = time.monotonic()

    def run(self, seeds: range) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for ranks in (2, 4):
                part = [seed for seed in seeds if ranks_of_seed(seed) == ranks]
                for verdict in verdicts_of_seeds(ranks, part, Path(folder) / "verdicts"):
                    self._add(verdict, Path(folder) / "shorter")
        done = sum(self.counts.values())
        rate = done / (time.monotonic() - self.began)
        print(f"{done} programs, {rate:.1f}/s: {dict(self.counts)}", flush=True)

    def _add(self, verdict: ProgramVerdict, folder: Path) -> None:
        self.counts[verdict.verdict] += 1
        self.chaotic += verdict.chaotic
        self.answered.update(verdict.answered)
        self.refused.update(verdict.refused)
        for key in verdict.refused:
            self.reasons[key] = verdict.refusal
        if verdict.verdict not in BAD:
            return
        self.faults[f"{verdict.verdict}: {verdict.key}"] += 1
        program = make_program(verdict.seed)
        is_new = self.faults[f"{verdict.verdict}: {verdict.key}"] <= 3
        if self.shorten and is_new:
            program, verdict = shorter_program(program, verdict, folder)
        title = f"{verdict.verdict} (seed {verdict.seed}): {verdict.key}: {verdict.text}"
        if self.write is None:
            print(program.text(title), flush=True)
        elif is_new:
            Path(self.write).mkdir(parents=True, exist_ok=True)
            (Path(self.write) / f"{verdict.verdict}-{verdict.seed}.py").write_text(program.text(title))
        print(title.replace("\n", " ")[:300], flush=True)

    def print(self) -> None:
        shares = {k: n / (n + self.answered[k]) for k, n in self.refused.items()}
        print(f"{sum(self.answered.values())} statements answered, {sum(self.refused.values())} refused, of these:")
        for key in sorted(shares, key=lambda k: (-self.refused[k], k)):
            print(f"  {self.refused[key]:5} {shares[key]:5.0%}  {key}   <- {self.reasons[key][:110]}")
        for key, n in self.faults.most_common():
            print(f"{n:5} {key}")
        print(
            f"{sum(self.counts.values())} programs: {dict(self.counts)}; {self.chaotic} comparisons with error bounds"
        )


if __name__ == "__main__":
    sys.exit(main())
