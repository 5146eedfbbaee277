"""Rows beyond the ends of a dim: an integer map from rows beyond an end to stored rows.

With n rows, row -k (k = 1, 2, …) beyond the first end and row n - 1 + k beyond the last are

===================  ===============================  =======================================================
``"clip"``           nothing: the halo ends there     the default
``"periodic"``       row n - k; row k - 1             the rows of the other end
``"reflect"``        row k; row n - 1 - k             the edge row is not repeated, as numpy's and torch's "reflect"
``"replicate"``      row 0; row n - 1                 the edge row is repeated, as numpy's "edge"
``("fill", v)``      v                                a number of the result, that is after normalization
``"pole"``           row k or k - 1, turned           of ``lat``, where the grid goes round the globe in ``lon``
===================  ===============================  =======================================================

Across a pole a meridian continues half-way round the globe. The row is *turned*: its column j is column j + n_lon / 2.
The components of vectors change sign, because east and north have swapped sides with west and south. Where the first
row is the pole itself, the row beyond it is the row before it, row 1 (k = 1). Where the grid's cells end at the pole,
so that the first row lies about half a step from it, it is row 0. The same holds at the other pole.

Where rows and columns beyond meet, the map of each dim is taken by itself. Columns are turned last, and of two fills
that of the later dim stands.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError, GridError, HaloError
from jigsaw.geometry.cut import Interval
from jigsaw.io import arguments
from jigsaw.io.series.fields import SHORT_NAMES, FieldChannel, quantity_and_level

if TYPE_CHECKING:
    from numpy.typing import NDArray


BoundaryRule = str | tuple[str, float]

BOUNDARY_RULES = ("clip", "periodic", "pole", "reflect", "replicate", "fill")


class HeldRow(NamedTuple):
    """A held row: `target` counts from the first one held, `row` is the row of the array that it shows."""

    target: int
    row: int
    turned: bool = False


@dataclass(frozen=True)
class DimBoundary:
    """Boundary rule beyond the ends of one spatial dim.

    For ``pole``, `at_pole` says for the first and last row whether it is the pole; `circle` is the place of ``lon``
    among the spatial dims.
    """

    rule: str = "clip"
    value: float = 0.0
    at_pole: tuple[bool, bool] = (False, False)
    circle: int = -1

    @classmethod
    def of(cls, dim: str, rule: Any) -> DimBoundary:
        if isinstance(rule, str) and rule in BOUNDARY_RULES and rule != "fill":
            return cls(rule)
        pair: Any = cast(Any, rule) if isinstance(rule, tuple | list) else ()
        if len(pair) == 2 and pair[0] == "fill" and isinstance(pair[1], int | float) and not isinstance(pair[1], bool):
            return cls("fill", float(pair[1]))
        raise GridError(
            f"boundary={{{dim!r}: {rule!r}}} is not a rule: use 'periodic' (wraps round), 'pole', 'reflect', "
            "'replicate', ('fill', number) or 'clip' (ends)"
        )

    @property
    def is_beyond(self) -> bool:
        """True where rows beyond the ends are held that are not those of the other end."""
        return self.rule not in ("clip", "periodic")

    def check_width(self, dim: str, size: int, halo: tuple[int, int]) -> None:
        """Refuse a halo that reaches beyond what is reflected."""
        at = self.at_pole if self.rule == "pole" else (self.rule == "reflect",) * 2
        for width, apart in zip(halo, at, strict=True):
            if apart and width > size - 1:
                raise HaloError(
                    f"halo={{{dim!r}: {halo}}} is too wide for boundary={{{dim!r}: {self.rule!r}}}, which does not "
                    f"repeat the edge: {dim!r} has {size} rows; use at most {size - 1}"
                )

    def show(self, x: int, size: int) -> tuple[int, bool] | None:
        """Return the row that row `x` shows and whether it is turned; None where a number stands."""
        if 0 <= x < size:
            return x, False
        if self.rule == "fill":
            return None
        last, turned = size - 1, self.rule == "pole"
        if self.rule == "replicate":
            return min(max(x, 0), last), False
        if self.rule == "reflect" or turned:
            repeats = turned and not self.at_pole[x > 0]
            return (-x - repeats if x < 0 else 2 * last - x + repeats), turned
        return x % size, False

    def rows(self, held: Interval, size: int) -> Iterator[HeldRow]:
        for x in range(*held):
            shown = self.show(x, size)
            if shown is not None:
                yield HeldRow(x - held[0], *shown)


PERIODIC_BOUNDARY = DimBoundary("periodic")


def shown_rows(
    held: Sequence[Interval], sizes: Sequence[int], boundary: Sequence[DimBoundary]
) -> Iterator[tuple[tuple[slice, ...], list[list[int]]]]:
    """Yield the held rows as products: where each lies, and the rows of the array that it shows along each dim."""
    dims = [list(b.rows(span, n)) for b, span, n in zip(boundary, held, sizes, strict=True)]
    runs = [[(turned, list(run)) for turned, run in groupby(rows, lambda row: row.turned)] for rows in dims]
    for cell in product(*runs):
        where = tuple(slice(rows[0].target, rows[-1].target + 1) for _, rows in cell)
        rows_by_dim = [[row.row for row in rows] for _, rows in cell]
        for (turned, _), b in zip(cell, boundary, strict=True):
            if turned:
                n = sizes[b.circle]
                rows_by_dim[b.circle] = [(x + n // 2) % n for x in rows_by_dim[b.circle]]
        yield where, rows_by_dim


def fill_beyond_ends(
    out: NDArray[Any], held: Sequence[Interval], sizes: Sequence[int], boundary: Sequence[DimBoundary]
) -> None:
    r"""Put the numbers of ``fill`` where they stand in `out` [\*lead, \*held]."""
    lead = out.ndim - len(held)
    for d, ((start, stop), size, b) in enumerate(zip(held, sizes, boundary, strict=True)):
        if b.rule == "fill":
            at = (slice(None),) * (lead + d)
            out[(*at, slice(0, max(-start, 0)))] = b.value
            out[(*at, slice(size - start if stop > size else stop - start, None))] = b.value


_TURNING_NAMES = ("u10", "v10", "u100", "v100", "u", "v")
_TURNING_STANDARD_NAMES = ("eastward", "northward", "x_wind", "y_wind")
_AT_POLE_SHARE = 0.05  # share of a step: a first row that is nearer to the pole lies on it


def pole_boundary(values: NDArray[Any], columns: int, halo: tuple[int, int], circle: int) -> DimBoundary:
    """Return the rule ``pole`` for latitudes; ends that have a halo must be less than a step from a pole."""
    if columns % 2:
        raise GridError(
            f"boundary={{'lat': 'pole'}} goes on half-way round the globe, which needs an even number of columns, but "
            f"'lon' has {columns}; use 'replicate', or leave the boundary out"
        )
    lat = values.astype(np.float64)
    step = [abs(float(b - a)) for a, b in (lat[:2], lat[-2:])] if len(lat) > 1 else [0.0, 0.0]
    apart = [90.0 - abs(float(lat[0])), 90.0 - abs(float(lat[-1]))]
    for end, width, distance, size in zip((lat[0], lat[-1]), halo, apart, step, strict=True):
        if width and not -_AT_POLE_SHARE * size <= distance < (1 - _AT_POLE_SHARE) * size:
            raise GridError(
                f"boundary={{'lat': 'pole'}} needs rows up to the pole, but 'lat' runs from {lat[0]:g} to {lat[-1]:g} "
                f"in steps of {size:g}, and {end:g} is {distance:g} degrees from a pole; use 'replicate', or leave the "
                "boundary out"
            )
    first, last = (abs(distance) <= _AT_POLE_SHARE * size for distance, size in zip(apart, step, strict=True))
    return DimBoundary("pole", at_pole=(first, last), circle=circle)


def vector_channels(
    channels: Sequence[FieldChannel], vectors: Sequence[str] | None, attrs: Mapping[str, Mapping[str, Any]]
) -> tuple[int, ...]:
    """Return the channels that change sign across a pole.

    They are those of the fields or arrays `vectors`. Without it they are the components of wind, by name or by a CF
    standard name that says eastward or northward. `attrs` are those of each array.
    """
    names = [{c.name, c.field, c.array, c.array.rpartition("/")[2], c.name.partition("@")[0]} for c in channels]
    if vectors is None:
        known = {name for name, short in SHORT_NAMES.items() if short in _TURNING_NAMES}
        standard_names = [str(attrs.get(c.array, {}).get("standard_name", "")) for c in channels]
        return tuple(
            i
            for i, (own_names, standard) in enumerate(zip(names, standard_names, strict=True))
            if own_names & known
            or quantity_and_level(channels[i].name)[0] in _TURNING_NAMES
            or any(word in standard for word in _TURNING_STANDARD_NAMES)
        )
    wanted = arguments.checked_names("vectors", vectors)
    unknown = [name for name in wanted if not any(name in own_names for own_names in names)]
    if unknown:
        raise FieldError(f"vectors names {unknown[0]!r}, but the fields are {[c.name for c in channels]}")
    return tuple(i for i, own_names in enumerate(names) if own_names & set(wanted))
