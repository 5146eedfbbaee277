"""``python -m jigsaw inspect``: what is in a store, as a person wants to see it."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from jigsaw.io.commands import options
from jigsaw.io.reports.explain import aligned, size
from jigsaw.io.reports.summary import Axis, Described, Summary, Times, summarize
from jigsaw.io.reports.summary_map import draw_map
from jigsaw.io.store import open_store

_TEXT = 70
_ATTRIBUTES = 12


def arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("store", help="path or URL of the store")
    parser.add_argument("--fields", type=options.names, metavar="t2m,z500", help="by default every variable")
    parser.add_argument("--dims", type=options.pairs, metavar="lat=j,lon=i", help="what the store's dims are")
    parser.add_argument("--json", action="store_true", help="as JSON")
    parser.add_argument("--plot", metavar="map.png", help="draw a map of the first field")
    parser.add_argument("--step", type=int, default=0, metavar="0", help="which step is drawn; -1 is the last")
    parser.add_argument("--select", type=options.integers, metavar="number=0", help="the index in any other dim")


@options.refusing
def run(args: argparse.Namespace) -> int:
    """Print what there is; 1 with the reason when it cannot be read."""
    store = open_store(args.store)
    found = summarize(args.store, args.fields, args.dims)
    print(json.dumps(found.as_dict(), indent=1, default=str) if args.json else report(found))
    if args.plot:
        drawn = draw_map(store, args.plot, args.fields, args.step, args.select, args.dims)
        print(f"\n{drawn}, drawn to {args.plot}", file=sys.stderr if args.json else sys.stdout)
    return 0


def report(found: Summary) -> str:
    """The summary as text: the store, its grids, times and variables, how they are stored, attributes."""
    blocks = (_head(found), _table(found), _storage(found), _values(found), _levels(found), _rest(found))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _head(found: Summary) -> list[str]:
    whole = sum(v.decoded_bytes for v in found.variables)
    stored = [v.stored_bytes for v in found.variables]
    known = [n for n in stored if n is not None]
    held = f", about {size(sum(known))} stored" if known and len(known) == len(stored) else ""
    lines = [found.url, f"{found.format}: {len(found.variables)} variables, {size(whole)} decoded{held}"]
    lines += [found.complete] if found.complete else []
    lines += [f"note: {note}" for note in found.notes]
    for i, grid in enumerate(found.grids):
        label = f"grid {i}" if len(found.grids) > 1 else "grid"
        told = ", ".join(part for part in (grid.extent, grid.order) if part)
        lines.append(f"{label}: {' x '.join(map(_axis, grid.axes))}; {told}")
    for i, times in enumerate(found.times):
        lines += _times(f"time {i}" if len(found.times) > 1 else "time", times)
    return lines


def _axis(axis: Axis) -> str:
    units = {"degrees_north": "°", "degrees_east": "°"}.get(axis.units, f" {axis.units}" if axis.units else "")
    step = "unevenly" if axis.step is None else f"by {axis.step:g}{units}"
    return f"{axis.name} {axis.size} ({axis.first:g} to {axis.last:g}{units} {step})"


def _times(label: str, times: Times) -> Iterator[str]:
    every = f" every {times.step}" if times.step else ""
    calendar = f", calendar {times.calendar}" if times.calendar else ""
    yield f"{label}: {times.count} steps{every}, {_stamp(times.first)} to {_stamp(times.last)}{calendar}"
    for before, after in times.gaps:
        yield f"  gap between {_stamp(before)} and {_stamp(after)}"
    if times.gap_count > len(times.gaps):
        yield f"  and {times.gap_count - len(times.gaps)} more gaps"


def _stamp(text: str) -> str:
    return text.removesuffix(".000000").removesuffix(":00")


def _table(found: Summary) -> list[str]:
    lines = [["variable", "", "dims", "units", "what"]]
    for v in found.variables:
        short = v.short_name if v.short_name != v.name else ""
        dims = ", ".join(f"{role} {n}" for role, n in v.dims.items())
        lines.append([v.name, short, dims, v.units, _cut(v.long_name)])
    return aligned(lines, left=True)


def _storage(found: Summary) -> list[str]:
    lines = [["stored", "dtype", "chunks", "shards", "codec", "a chunk", "decoded", "stored about"]]
    for v in found.variables:
        shards = _shape(v.shards) if v.shards else "-"
        count = max(v.chunk_count, 1)
        lines.append([v.name, v.dtype, f"{count} of {_shape(v.chunks)}", shards, v.codec, *_sizes(v)])
    return aligned(lines, left=True)


def _sizes(v: Described) -> tuple[str, str, str]:
    elements = max(1, _product(v.dims))
    one = v.decoded_bytes // elements * _product(dict(enumerate(v.chunks)))
    return size(one), size(v.decoded_bytes), "unknown" if v.stored_bytes is None else size(v.stored_bytes)


def _product(sizes: Mapping[Any, int]) -> int:
    whole = 1
    for n in sizes.values():
        whole *= n
    return whole


def _shape(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes)) or "1"


def _values(found: Summary) -> list[str]:
    """How stored values are to be read, where that is not as they are."""
    lines: list[str] = []
    for v in found.variables:
        packed = f"value = stored * {v.scale:g} + {v.offset:g}" if (v.scale, v.offset) != (1.0, 0.0) else ""
        missing = f"missing where stored is {', '.join(f'{m:g}' for m in v.missing)}" if v.missing else ""
        told = "; ".join(part for part in (packed, missing) if part)
        lines += [f"{v.name}: {told}"] if told else []
    return lines


def _levels(found: Summary) -> list[str]:
    by_levels: dict[tuple[tuple[float, ...], str], list[str]] = {}
    for v in found.variables:
        if v.levels:
            by_levels.setdefault((v.levels, v.level_units), []).append(v.name)
    return [
        f"levels{f' in {units}' if units else ''} of {', '.join(names)}: {' '.join(f'{x:g}' for x in levels)}"
        for (levels, units), names in by_levels.items()
    ]


def _rest(found: Summary) -> list[str]:
    lines = [f"also: {', '.join(f'{name} {shape}' for name, shape in found.others.items())}"] if found.others else []
    shown = list(found.attrs.items())[:_ATTRIBUTES]
    lines += [f"{key}: {_cut(str(value))}" for key, value in shown]
    more = len(found.attrs) - len(shown)
    return lines + ([f"and {more} more attributes"] if more else [])


def _cut(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _TEXT else flat[: _TEXT - 1] + "…"
