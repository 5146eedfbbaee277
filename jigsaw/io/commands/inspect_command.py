"""``python -m jigsaw inspect``: the contents of a store, as a person wants to see them."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from math import prod
from typing import Any

from jigsaw.errors import FieldError
from jigsaw.io.commands import parse_options as options
from jigsaw.io.formats.store import open_store
from jigsaw.io.reading.plan_text import align_columns, bytes_text
from jigsaw.io.reports.pictures import draw_field_map, picture_place
from jigsaw.io.reports.summary import DimSummary, StoreSummary, TimeSummary, summarize_store

_TEXT_WIDTH = 70
_ATTRIBUTES_SHOWN = 12
_PLACE_ATTRIBUTES = ("affine", "zooms", "space_units")
"""Attributes that are described in words where there is an affine."""
_WORLD_WORDS = {"L": "left", "R": "right", "P": "back", "A": "front", "I": "feet", "S": "head"}


def arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    options.add_shared_options(parser, "store", "--fields", "--dims", "--select", "--outside")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--plot", metavar="map.png", help="draw a map of the first field")
    parser.add_argument("--step", type=int, default=0, metavar="0", help="which step is drawn; -1 is the last")


@options.report_refusals
def run(args: argparse.Namespace) -> int:
    """Print what a store has; return 1 and print the reason when it cannot be read."""
    if args.select and not args.plot:
        raise FieldError("--select says what --plot draws; give --plot FILE too, or leave --select out")
    reach = {"outside": args.outside}
    summary = summarize_store(args.store, args.fields, args.dims, reach)
    print(_json_of(summary) if args.json else inspection_report(summary))
    if args.plot:
        drawn = draw_field_map(open_store(args.store, reach), args.plot, args.fields, args.step, args.select, args.dims)
        print(f"\n{drawn}, drawn to {picture_place(args.plot)}", file=sys.stderr if args.json else sys.stdout)
    return 0


def _json_of(summary: StoreSummary) -> str:
    return json.dumps(_numbers_of_json(summary.as_dict()), indent=1, default=str, allow_nan=False)


def _numbers_of_json(value: Any) -> Any:
    """Return dicts and lists with None for NaN and infinity, which JSON lacks."""
    if isinstance(value, dict):
        return {key: _numbers_of_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers_of_json(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def inspection_report(summary: StoreSummary) -> str:
    """Return the summary as text: the store, its grids, times and variables, how they are stored, attributes."""
    parts: tuple[Callable[[StoreSummary], Iterable[str]], ...] = (
        _summary_lines,
        _volume_lines,
        _variable_table,
        _storage_table,
        _packing_lines,
        _level_lines,
        _other_lines,
    )
    return "\n\n".join("\n".join(lines) for lines in (part(summary) for part in parts) if lines)


def _summary_lines(summary: StoreSummary) -> list[str]:
    whole = sum(v.decoded_bytes for v in summary.variables)
    stored = [v.stored_bytes for v in summary.variables]
    known = [n for n in stored if n is not None]
    held = f", about {bytes_text(sum(known))} stored" if known and len(known) == len(stored) else ""
    lines = [summary.url, f"{summary.format}: {len(summary.variables)} variables, {bytes_text(whole)} decoded{held}"]
    lines += [summary.complete] if summary.complete else []
    lines += [f"note: {note}" for note in summary.notes]
    for i, grid in enumerate(summary.grids):
        label = f"grid {i}" if len(summary.grids) > 1 else "grid"
        facts = ", ".join(part for part in (grid.extent, grid.order) if part)
        lines.append(f"{label}: {' x '.join(map(_axis_text, grid.axes))}; {facts}")
    for i, times in enumerate(summary.times):
        lines += _time_lines(f"time {i}" if len(summary.times) > 1 else "time", times)
    return lines


def _volume_lines(summary: StoreSummary) -> Iterator[str]:
    for v in summary.volumes:
        count, dtype = " x ".join(map(str, v.shape)), next(a.dtype for a in summary.variables if a.name == v.name)
        sizes = " x ".join(f"{step:g}" for step in v.spacing)
        ends = ", ".join(f"{d} to the {_WORLD_WORDS[code]}" for d, code in zip("xyz", v.orientation, strict=False))
        yield f"{v.name}: {count} voxels (x, y, z) of {dtype}, {sizes} {v.units or 'units of the file'} apart"
        yield f"  {v.orientation}: {ends}; the first voxel is at {', '.join(f'{at:g}' for at in v.origin)}"


def _axis_text(axis: DimSummary) -> str:
    units = {"degrees_north": "°", "degrees_east": "°"}.get(axis.units, f" {axis.units}" if axis.units else "")
    step = "unevenly" if axis.step is None else f"by {axis.step:g}{units}"
    return f"{axis.name} {axis.size} ({axis.first:g} to {axis.last:g}{units} {step})"


def _time_lines(label: str, times: TimeSummary) -> Iterator[str]:
    every = f" every {times.step}" if times.step else ""
    calendar = f", calendar {times.calendar}" if times.calendar else ""
    yield f"{label}: {times.count} steps{every}, {_short_stamp(times.first)} to {_short_stamp(times.last)}{calendar}"
    for before, after in times.gaps:
        yield f"  gap between {_short_stamp(before)} and {_short_stamp(after)}"
    if times.gap_count > len(times.gaps):
        yield f"  and {times.gap_count - len(times.gaps)} more gaps"


def _short_stamp(text: str) -> str:
    return text.removesuffix(".000000").removesuffix(":00")


def _variable_table(summary: StoreSummary) -> list[str]:
    if not summary.variables:
        return []
    lines = [["variable", "", "dims", "units", "what"]]
    for v in summary.variables:
        short = v.short_name if v.short_name != v.name else ""
        dims = ", ".join(f"{role} {n}" for role, n in v.dims.items())
        lines.append([v.name, short, dims, v.units, _shorten_text(v.long_name)])
    return align_columns(lines, left=True)


def _storage_table(summary: StoreSummary) -> list[str]:
    if not summary.variables:
        return []
    lines = [["stored", "dtype", "chunks", "shards", "codec", "a chunk", "decoded", "stored about"]]
    for v in summary.variables:
        shards = _shape_text(v.shards) if v.shards else "-"
        count = max(v.chunk_count, 1)
        chunks = f"{count} of {_shape_text(v.chunks)}"
        chunk_bytes = v.decoded_bytes // max(1, prod(v.dims.values())) * prod(v.chunks)
        sizes = map(bytes_text, (chunk_bytes, v.decoded_bytes, v.stored_bytes))
        lines.append([v.name, v.dtype, chunks, shards, v.codec, *sizes])
    return align_columns(lines, left=True)


def _shape_text(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes)) or "1"


def _packing_lines(summary: StoreSummary) -> list[str]:
    lines: list[str] = []
    for v in summary.variables:
        packed = f"value = stored * {v.scale:g} + {v.offset:g}" if (v.scale, v.offset) != (1.0, 0.0) else ""
        missing = f"missing where stored is {', '.join(f'{m:g}' for m in v.missing)}" if v.missing else ""
        facts = "; ".join(part for part in (packed, missing) if part)
        lines += [f"{v.name}: {facts}"] if facts else []
    return lines


def _level_lines(summary: StoreSummary) -> list[str]:
    by_levels: dict[tuple[tuple[float, ...] | tuple[str, ...], str], list[str]] = {}
    for v in summary.variables:
        if v.levels:
            by_levels.setdefault((v.levels, v.level_units), []).append(v.name)
    return [
        f"levels{f' in {units}' if units else ''} of {', '.join(names)}: "
        f"{' '.join(x if isinstance(x, str) else f'{x:g}' for x in levels)}"
        for (levels, units), names in by_levels.items()
    ]


def _other_lines(summary: StoreSummary) -> list[str]:
    lines = (
        [f"also: {', '.join(f'{name} {shape}' for name, shape in summary.others.items())}"] if summary.others else []
    )
    attrs = {k: v for k, v in summary.attrs.items() if not (summary.volumes and k in _PLACE_ATTRIBUTES)}
    shown = list(attrs.items())[:_ATTRIBUTES_SHOWN]
    lines += [f"{key}: {_shorten_text(str(value))}" for key, value in shown]
    more = len(attrs) - len(shown)
    return lines + ([f"and {more} more attributes"] if more else [])


def _shorten_text(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _TEXT_WIDTH else flat[: _TEXT_WIDTH - 1] + "…"
