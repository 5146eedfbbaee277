"""Interval rules: the input rows that a box of output rows needs, and the output rows that a box of input rows gives.

One rule a dim: `StencilWindow` (convolution, pooling, padding), `TransposedWindow` (transposed convolution),
`InterpolationTable` (interpolation), `FoldedPadding` (padding that reflects or repeats). From it `derive_cut` makes the
output rows that every piece of a cut dim owns and holds, and the input rows that it needs. Integers only.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, FrozenValue, Interval


class StencilRule(Protocol):
    """One dim of a stencil; `n` is the global number of input rows.  All results are monotone in the rows."""

    def size(self, n: int) -> int:
        """Return the global number of output rows."""
        ...

    def need(self, out: Interval, n: int) -> Interval:
        """Return the input rows that a non-empty interval of output rows reads; may reach beyond [0, n)."""
        ...

    def reach(self, held: Interval, n: int) -> Interval:
        """Return the largest output interval whose `need` lies in `held`; ``start >= stop`` when there is none."""
        ...

    def point(self, at: int, n: int) -> int:
        """Return where the output is cut when the input is cut at row `at`: least margins, and multiples of a stride
        stay aligned.
        """
        ...


def ceil_div(a: int, b: int) -> int:
    """Return ceil(a / b), for b > 0."""
    return -(-a // b)


@dataclass(frozen=True, eq=False)
class StencilWindow(FrozenValue):
    """Rule that output row o reads the input rows ``o * stride - below + k * dilation``, 0 <= k < kernel.

    `below` and `above` rows of padding are added at the ends; negative ones crop.  `ceil` is the pools' ``ceil_mode``.
    """

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    below: int = 0
    above: int = 0
    ceil: bool = False

    @property
    def span(self) -> int:
        """Number of rows from the first to the last that a window covers."""
        return self.dilation * (self.kernel - 1) + 1

    def size(self, n: int) -> int:
        room = n + self.below + self.above - self.span
        if self.ceil:
            count = ceil_div(room, self.stride) + 1
            if (count - 1) * self.stride >= n + self.below:  # the last window must start inside the input or below it
                count -= 1
        else:
            count = room // self.stride + 1
        if count < 1:
            raise ShardingError(
                f"a window of {self.span} rows (kernel {self.kernel}, dilation {self.dilation}) does not fit into {n} "
                "rows padded by "
                f"({self.below}, {self.above}); pad more or take a smaller kernel"
            )
        return count

    def need(self, out: Interval, n: int) -> Interval:
        start, stop = out
        return start * self.stride - self.below, (stop - 1) * self.stride - self.below + self.span

    def reach(self, held: Interval, n: int) -> Interval:
        low, high = held
        return ceil_div(low + self.below, self.stride), (high + self.below - self.span) // self.stride + 1

    def point(self, at: int, n: int) -> int:
        # the first window whose middle row is `at` or later: margins are as wide below as above, and a cut at a
        # multiple of the stride stays one (8 rows cut at 4, kernel 3, stride 2, padding 1: 4 outputs cut at 2)
        return ceil_div(at + self.below - (self.span - 1) // 2, self.stride)


@dataclass(frozen=True, eq=False)
class TransposedWindow(FrozenValue):
    """Rule of a transposed convolution: input row i adds to output rows ``i * stride - crop + k * dilation``, 0 <= k <
    kernel.

    `crop` is torch's ``padding``, `extra` its ``output_padding``.
    """

    kernel: int
    stride: int = 1
    dilation: int = 1
    crop: int = 0
    extra: int = 0

    @property
    def span(self) -> int:
        return self.dilation * (self.kernel - 1) + 1

    def size(self, n: int) -> int:
        count = (n - 1) * self.stride - 2 * self.crop + self.span + self.extra
        if count < 1:
            raise ShardingError(
                f"a transposed window of {self.span} rows on {n} rows, stride {self.stride}, cropped by {self.crop} a "
                "side leaves no output row; "
                f"lower padding"
            )
        return count

    def need(self, out: Interval, n: int) -> Interval:
        """Return the needed rows, such that the plain op on them covers `out`; never beyond [0, n), where
        nothing adds.
        """
        # rows that add to an output: their first output is not beyond it and their last not before it.  The plain op on
        # these rows also has to reach as far as `out`, otherwise there would be nothing to narrow, hence min and max.
        start, stop = out[0] + self.crop, out[1] + self.crop
        low = min(ceil_div(start - self.span + 1, self.stride), start // self.stride)
        high = max((stop - 1) // self.stride, ceil_div(stop - self.span, self.stride)) + 1
        low = min(max(low, 0), n - 1)
        return low, max(min(high, n), low + 1)

    def reach(self, held: Interval, n: int) -> Interval:
        low, high = held
        # from the end of what the row before the first held one adds to, to the beginning of that of the row after the
        # last
        start = max(low * self.stride, (low - 1) * self.stride + self.span)
        stop = min(high * self.stride, (high - 1) * self.stride + self.span)
        return start - self.crop, stop - self.crop

    def point(self, at: int, n: int) -> int:
        # the center of what row `at` adds to, rounded to whole strides so that a strided convolution undoes it
        shift = self.span - self.stride - 2 * self.crop
        rounded = ceil_div(abs(shift) - self.stride, 2 * self.stride)
        return self.stride * (at + (rounded if shift > 0 else -rounded))


@dataclass(frozen=True, eq=False)
class InterpolationTable(FrozenValue):
    """Rule that output row o reads the input rows ``first[o] .. last[o]``, both included and both rising:
    interpolation.
    """

    first: tuple[int, ...]
    last: tuple[int, ...]

    def size(self, n: int) -> int:
        return len(self.first)

    def need(self, out: Interval, n: int) -> Interval:
        return self.first[out[0]], self.last[out[1] - 1] + 1

    def reach(self, held: Interval, n: int) -> Interval:
        # both tables rise, so the first output that reads no row before `held` and the first that reads one beyond it
        return bisect_left(self.first, held[0]), bisect_left(self.last, held[1])

    def point(self, at: int, n: int) -> int:
        return ceil_div(at * len(self.first), n)


@dataclass(frozen=True, eq=False)
class FoldedPadding(FrozenValue):
    """Rule that output row o reads input row o - below, folded back at the ends of the dim: mirrored, or the end row
    itself.
    """

    below: int
    above: int
    mirror: bool

    def row(self, o: int, n: int) -> int:
        """Return the one input row that output row `o` reads."""
        at = o - self.below
        if not self.mirror:
            return min(max(at, 0), n - 1)
        at = abs(at)
        return at if at < n else 2 * (n - 1) - at

    def size(self, n: int) -> int:
        most = n - 1 if self.mirror else n + abs(self.below) + abs(self.above)
        if n + self.below + self.above < 1 or max(self.below, self.above) > most or not n:
            raise ShardingError(
                f"cannot pad {n} rows by ({self.below}, {self.above}): a reflection has at most {n - 1} rows"
            )
        return n + self.below + self.above

    def need(self, out: Interval, n: int) -> Interval:
        # at a fold the order of rows reverses, so the ends of an interval that spans a fold do not give the lowest and
        # highest row (5 rows mirrored by 2: outputs 0 to 3 read 2, 1, 0, 1)
        turns = (self.below, self.below + n - 1)
        rows = [self.row(o, n) for o in (out[0], out[1] - 1, *(t for t in turns if out[0] <= t < out[1]))]
        return min(rows), max(rows) + 1

    def reach(self, held: Interval, n: int) -> Interval:
        return held[0] + self.below, held[1] + self.below

    def point(self, at: int, n: int) -> int:
        return at + self.below


@dataclass(frozen=True)
class DerivedCut:
    """Result of a rule on a cut dim: the output `cut`, the input rows that each piece needs, and how many it lacks.

    `needs` lie in [0, n) unless the dim wraps; `margins` are the rows below 0 and beyond n that a window also covers.
    """

    out: Cut
    needs: tuple[Interval, ...]
    margins: tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def derive_cut(cut: Cut, rule: StencilRule, wrap: bool = False, grow: tuple[int, int] = (0, 0)) -> DerivedCut:
    """Return the output cut of a stencil along a cut dim, and what each piece needs.

    Beyond its own output rows, a piece holds all that its input rows (halo included) allow, and `grow` rows a side if
    asked.  With `wrap` the input rows are those of a circle, and so are the output's where the strides close it.

    Raises: `ShardingError` when the rule leaves no output row.
    """
    n, m = cut.size, rule.size(cut.size)
    points = tuple(0 if at <= 0 else m if at >= n else min(max(rule.point(at, n), 0), m) for at in cut.points)
    # a circle of 10 rows under stride 4 gives 2 outputs that are 4 and 6 rows apart: no circle again
    closed = wrap and isinstance(rule, StencilWindow) and rule.stride * m == n
    held: list[Interval] = []
    needs: list[Interval] = []
    margins: list[tuple[int, int]] = []
    for piece in range(cut.pieces):
        out = _held_output(cut, piece, (points[piece], points[piece + 1]), rule, wrap, closed, grow)
        need = rule.need(out, n) if out[0] < out[1] else (cut.points[piece], cut.points[piece])
        inside, margin = (need, (0, 0)) if wrap else _inside_and_margins(need, n)
        held.append(out)
        needs.append(inside)
        margins.append(margin)
    return DerivedCut(Cut(m, points, cut.axes, tuple(held), by_index=cut.by_index), tuple(needs), tuple(margins))


def _held_output(
    cut: Cut, piece: int, owned: Interval, rule: StencilRule, wrap: bool, closed: bool, grow: tuple[int, int]
) -> Interval:
    """Return the output rows that a piece holds: owned and grown ones, joined with what its input rows give."""
    n, m = cut.size, rule.size(cut.size)
    if owned[0] >= owned[1]:
        return owned
    low, high = cut.inside(piece) if wrap else cut.between_ends(piece)
    start, stop = rule.reach((low, high), n) if low < high else owned
    if not wrap and low < high:  # nothing beyond an end of the dim is missing
        start, stop = (0 if low == 0 else start), (m if high == n else stop)
    want = owned[0] - grow[0], owned[1] + grow[1]
    # rows that the halo allows are held too, so that a deep halo serves several layers; not where they are apart from
    # the owned rows (a stride can leave a gap), because a piece holds one interval
    if start < stop and start <= want[1] and stop >= want[0]:
        want = min(want[0], start), max(want[1], stop)
    return want if closed else (max(want[0], 0), min(want[1], m))


def _inside_and_margins(need: Interval, n: int) -> tuple[Interval, tuple[int, int]]:
    """Return a needed interval as the rows inside [0, n) and the counts below and beyond."""
    start, stop = need
    inside = min(max(start, 0), n), max(min(stop, n), 0)
    if inside[0] >= inside[1]:
        # only padding, below 0 or beyond n: an empty interval of rows, and the counts still add up
        low = max(min(stop, 0) - start, 0)
        at = min(max(start, 0), n)
        return (at, at), (low, stop - start - low)
    return inside, (inside[0] - start, stop - inside[1])
