"""Result files of benchmarks: a line with hardware, date and command, then a JSON object a row."""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_result_options(parser: argparse.ArgumentParser) -> None:
    """Let a command take a result file, and the words that it begins with."""
    parser.add_argument("--output", type=Path, help="a result file")
    parser.add_argument("--hardware", default="?", help="what the result file says of the machine")


class ResultFile:
    """Rows that are printed, and written where the options name a file; those of a run that is ended stay there."""

    def __init__(self, options: argparse.Namespace, command: str, **versions: str) -> None:
        self._file = None if options.output is None else options.output.open("w")
        facts = {"hardware": options.hardware, "date": f"{datetime.date.today()}", "command": command, **versions}
        self._write(json.dumps(facts))

    def add(self, row: Mapping[str, Any]) -> None:
        line = json.dumps(row)
        print(line, flush=True)
        self._write(line)

    def _write(self, line: str) -> None:
        if self._file is not None:
            self._file.write(f"{line}\n")
            self._file.flush()
