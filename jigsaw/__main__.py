"""The command line: ``python -m jigsaw <command>``. A command is a module with `arguments(parser)` and `run(args)`."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

# name -> (module, one line of help); a module is loaded only when its command is the one that runs
COMMANDS = {
    "plan": (
        "jigsaw.io.commands.plan_command",
        "what each rank of a mesh would read of a store: bytes stored, decoded and useful, and who decodes what",
    ),
    "stats": (
        "jigsaw.io.commands.stats_command",
        "mean, standard deviation and range of each channel and of its differences between steps, in one pass",
    ),
    "convert": (
        "jigsaw.io.commands.convert_command",
        "anything that xarray opens as a sharded Zarr store for training, restartable, verified by checksum",
    ),
    "inspect": (
        "jigsaw.io.commands.inspect_command",
        "what is in a store: variables, levels, time, grid, chunks, sizes; a map of a field",
    ),
    "advise": (
        "jigsaw.dryrun.advise_command",
        "which mesh and strategy to take for a model on a number of devices: memory, time and messages of dry runs",
    ),
    "check": (
        "jigsaw.testing.check",
        "versions, backends, and a parity test of tiles against plain torch on real ranks",
    ),
}


_BROKEN_PIPE = 128 + 13  # the status that a shell shows for SIGPIPE


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return exit status 0 when it succeeded."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="python -m jigsaw", description="Samples too big for one device, cut once.")
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)
    for name, (module, summary) in COMMANDS.items():
        command = commands.add_parser(name, help=summary, description=summary)
        if name in argv[:1]:
            importlib.import_module(module).arguments(command)
    args = parser.parse_args(argv)
    try:
        status = int(importlib.import_module(COMMANDS[args.command][0]).run(args))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of the pipe has enough, as head does: end like any other tool
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE
    return status


if __name__ == "__main__":
    sys.exit(main())
