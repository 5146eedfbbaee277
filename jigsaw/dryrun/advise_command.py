"""``python -m jigsaw advise``: recommend a mesh and a strategy for a model, by dry runs.  It needs no ranks."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from jigsaw.dryrun.calibration import load_device, measure_device, save_device
from jigsaw.dryrun.devices import DEVICES, Device
from jigsaw.dryrun.mesh_search import StepOption, advice_text, advise_mesh, ranked_options
from jigsaw.dryrun.report import seconds_text, size_text
from jigsaw.errors import ReadError, ShardingError
from jigsaw.geometry.axis_names import DATA_AXIS, REPLICATE_AXIS, space_dims
from jigsaw.stages.own_stages import PIPE_SCHEDULES


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("model", nargs="?", metavar="MODULE:MODEL", help="a torch model, or what makes one when called")
    sizes: dict[str, Any] = {"type": _parse_sizes, "metavar": "1,69,721,1440"}
    parser.add_argument(
        "--input",
        **sizes,
        help="the global shape of the input: N, C, lat, lon or N, C, z, y, x or N, tokens or N, C, cells",
    )
    cells = "axes of space and the dims that they cut, of cells or tokens (lat, lon or z, y, x: the last dims)"
    parser.add_argument("--axes", type=_parse_dims, metavar="cell=-1", help=cells)
    parser.add_argument("--devices", type=int, default=8, metavar="8", help="how many (8)")
    known = f"{', '.join(DEVICES)}, or a file of --calibrate (h100)"
    parser.add_argument("--device", default="h100", metavar="h100", help=known)
    dtypes = "float32", "bfloat16", "float16", "float64", "int64"
    parser.add_argument(
        "--dtype", choices=dtypes, help="of weights and input (the weights' own); int64 of an input of words alone"
    )
    align = "rows of the cut dims that stay together: the patch, or the product of strides (1)"
    parser.add_argument("--align", type=int, default=1, metavar="4", help=align)
    parser.add_argument(
        "--passes", type=int, default=1, metavar="4", help="gradients of so many are added up a step (1)"
    )
    parser.add_argument("--schedule", default="1f1b", metavar="1f1b", help=f"of pipelines: {', '.join(PIPE_SCHEDULES)}")
    parser.add_argument("--ranks-per-node", type=int, metavar="8", help="for links (the device's usual number)")
    parser.add_argument("--store", help="what jigsaw.io.open takes: adds the time of its reader")
    parser.add_argument("--fields", type=lambda text: text.split(","), metavar="t2m,z500", help="of the store (all)")
    measured = "measure this machine's processor, write it to a file, and use it"
    parser.add_argument("--calibrate", metavar="cpu.json", help=measured)


def run(args: argparse.Namespace) -> int:
    """Print the best five options and what would be better; return 1, with the reason, when there is none."""
    tried: list[StepOption] = []
    try:
        device = _chosen_device(args)
        if args.model is None and args.calibrate:
            return 0
        if args.model is None or args.input is None:
            raise ShardingError("advise needs MODULE:MODEL and --input, or --calibrate FILE alone")
        arguments_of_run: dict[str, Any] = (
            {} if args.store is None else {"store": {"store": args.store, "fields": args.fields}}
        )
        if args.axes is not None:
            arguments_of_run["spec"] = _spec_of_axes(args.axes, len(args.input))
        if args.dtype is not None:
            arguments_of_run["dtype"] = getattr(torch, args.dtype)
        if args.align != 1:
            cut_dims = space_dims(args.input, arguments_of_run.get("spec")).values()
            arguments_of_run["align"] = dict.fromkeys(cut_dims, args.align)
        options = advise_mesh(
            _found_model(args.model),
            args.input,
            args.devices,
            device=device,
            ranks_per_node=args.ranks_per_node,
            passes=args.passes,
            schedule=args.schedule,
            progress=partial(_tell_progress, tried),
            **arguments_of_run,
        )
    except KeyboardInterrupt:
        options = ranked_options([option for option in tried if option.blocks is None])
        print("the search was interrupted; this ranks what was tried so far", file=sys.stderr)
    except (ShardingError, ReadError, OSError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print(advice_text(options))
    return 0 if any(option.works for option in options) else 1


def _tell_progress(tried: list[StepOption], option: StepOption) -> None:
    """Print each tried option to stderr, so that a search of minutes shows that it goes on, and the fastest so far."""
    tried.append(option)
    if option.report is None or not option.report.is_complete:
        outcome = "does not run"
    else:
        memory = f"{size_text(option.report.peak_bytes)} of {size_text(option.report.device_memory)}"
        outcome = f"{seconds_text(option.report.seconds)} a step, {memory} a device"
    if option.blocks is None and option.works and ranked_options(o for o in tried if o.blocks is None)[0] is option:
        outcome += ", the fastest so far"
    print(f"tried {option}: {outcome}", file=sys.stderr, flush=True)


def _chosen_device(args: argparse.Namespace) -> Device:
    if args.calibrate:
        folder = os.path.dirname(os.path.abspath(args.calibrate))
        if not os.path.isdir(folder):  # told before a measurement of 40 seconds
            raise ShardingError(f"--calibrate {args.calibrate}: the folder {folder} does not exist; make it first")
        if os.path.lexists(args.calibrate):
            load_device(args.calibrate)  # raises for another file, which is not replaced
        device = measure_device()
        save_device(device, args.calibrate)
        print(f"measured: {json.dumps(json.loads(Path(args.calibrate).read_text()))}")
        return device
    if args.device in DEVICES:
        return DEVICES[args.device]
    if os.path.isfile(args.device):
        return load_device(args.device)
    raise ShardingError(f"--device {args.device} is none of {', '.join(DEVICES)}, nor a file of --calibrate")


def _found_model(named: str) -> Any:
    module, _, name = named.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        raise ShardingError(
            f"{named!r} names no model ({error}); write MODULE:MODEL, as in nets.weather:Net, importable from here"
        ) from error
    finally:
        sys.path.remove(os.getcwd())


def _parse_sizes(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape; write numbers, as in 1,69,721,1440") from error


def _parse_dims(text: str) -> dict[str, int]:
    try:
        return {name: int(dim) for name, dim in (pair.split("=") for pair in text.split(","))}
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} names no axes; write NAME=DIM, as in cell=-1") from error


def _spec_of_axes(axes: dict[str, int], dims: int) -> tuple[tuple[str, ...], ...]:
    """Return the spec of an input whose axes of space cut these dims; the batch is cut where none of them cuts it."""
    spec: list[tuple[str, ...]] = [()] * dims
    for name, dim in axes.items():
        if not -dims <= dim < dims:
            raise ShardingError(f"--axes {name}={dim}: the input has the dims {-dims} to {dims - 1}")
        spec[dim] = *spec[dim], name
    return (spec[0] or (REPLICATE_AXIS, DATA_AXIS), *spec[1:])
