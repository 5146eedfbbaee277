"""`jigsaw.local`: your own function, whose output rows each need a few input rows, on tiles.

The function is written for the whole tensor.  Each rank gives it the rows that its output rows need, and keeps its own
rows of the result.  At the ends of its rows the function may pad, wrap or take one-sided differences.  That is right at
the ends of the array, where it is kept; elsewhere it lies in rows that are cut off.

Example: four ranks, 33 rows cut at 0, 9, 17, 25, 33, reach (2, 1).  Rank 1 owns 9:17 and gives the function rows 7:18;
of the eleven results the first two and the last are cut off.  Rank 3 gives 23:33 and cuts off two: row 32 is the
array's last, where the function does the same as on the whole.  With stride 2 the 17 outputs are cut at 0, 5, 9, 13,
17: rank 1 makes 5:9, which need rows 8:18.  The function begins at row 8, a multiple of the stride, so its first output
is 4.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.arange(5.0), mesh, ("lat",))
>>> jigsaw.local(lambda x: x.diff(append=x[-1:]), reach={0: (0, 1)})(tile).full_tensor()
tensor([1., 1., 1., 1., 0.])
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from jigsaw import comm
from jigsaw.comm import debug
from jigsaw.comm.exchange import exchange_rows
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Interval, whole_dim
from jigsaw.geometry.neighbors import Neighbors
from jigsaw.geometry.stencil_rules import ceil_div
from jigsaw.nn.cells.gather import gather_neighbors
from jigsaw.nn.stencils.stencil import DimStencil, StencilPlan, empty_result, is_cut_or_haloed, plan_stencil
from jigsaw.nn.weights import call_with_tensors
from jigsaw.ops.meeting.common_cuts import bring_together
from jigsaw.ops.meeting.plain_operands import AVERAGED_MARK, averaged_over, plain_operand
from jigsaw.ops.pointwise import replace_tensors
from jigsaw.ops.random_numbers import random_states
from jigsaw.tile.noted_calls import described_arguments
from jigsaw.tile.tile import Tile, tiles_in
from jigsaw.torch_internals.autograd import tensor_version
from jigsaw.torch_internals.placements import is_dtensor

T = TypeVar("T")


def local(
    op: Callable[..., Any],
    reach: Mapping[int, int | tuple[int, int]] | Neighbors,
    *,
    stride: Mapping[int, int] | None = None,
    wrap: Collection[int] = (),
    rows: Mapping[int, int] | None = None,
) -> LocalFunction:
    """Make `op`, a function or a module that runs on whole tensors, run on tiles too, with the same result.

    y = op(x) where row o of y along dim d depends on no other rows of x than ``o * stride[d] - below`` to ``o *
    stride[d] + above``. There ``reach[d] = (below, above)`` (one number for both).  Near the ends of a dim `op` does
    the same as on the whole tensor; a dim in `wrap` continues at its other end.  Along a cut dim without a reach `op`
    works row by row.  ``rows[d]`` is how many rows `op` makes of the whole dim, by default size / stride, rounded up.

    Of cells `reach` is a table of neighbors: `op` gets the neighbors of each target cell, [..., targets, k], in place
    of its first argument [..., sources], and makes [..., targets, m] of them, cell by cell; a neighbor -1 is 0.

    All arguments are allowed.  Tiles meet as in ``x + y`` (all have the rows that `op` reaches for, or one row).  Plain
    tensors are whole, and `op` gets them as they are.  Parameters of `op`, where it is a module, and plain arguments
    get their gradients as with any layer.

    *Shapes*: global those of ``op(whole)``, with as many dims as the tile; per rank cut at the same rows / stride.
    *Sends*: forward, the rows within reach that neighbors hold; backward, their gradients. Of a table as
    `jigsaw.nn.gather_neighbors`.
    *Raises*: `ShardingError` for a dim that the tile lacks, or a stride that does not close a circle. Also for a
    changed argument, random numbers, or a parameter that is not an argument.  Also for a result with another number of
    rows than reach, stride and rows say.  With a table for a stride, wrap or rows, and for a table of edges.

    >>> mesh = jigsaw.init_mesh(lat=1, lon=1)
    >>> tile = jigsaw.shard(torch.randn(2, 3, 9, 16), mesh, (None, None, "lat", "lon"))
    >>> def laplacian(x):
    ...     return x.roll(1, -1) + x.roll(-1, -1) - 2 * x
    >>> jigsaw.local(laplacian, reach={-1: 1}, wrap=(-1,))(tile).shape
    torch.Size([2, 3, 9, 16])
    """
    if isinstance(reach, Neighbors):
        if stride or wrap or rows or reach.degree is None:
            what = (
                f"{reach}, whose cells have any number of edges" if reach.degree is None else f"{reach} beside others"
            )
            raise ShardingError(
                f"jigsaw.local: reach={what}; give a table of k neighbors each, without stride, wrap and rows, or call "
                "jigsaw.nn.gather_neighbors and scatter_to_cells"
            )
        return NeighborhoodFunction(op, reach)
    sides = {d: (r, r) if isinstance(r, int) else (int(r[0]), int(r[1])) for d, r in reach.items()}
    for d, (below, above) in sides.items():
        if min(below, above) < 0:
            raise ShardingError(
                f"jigsaw.local: reach={dict(reach)} of dim {d}: rows are counted from the output's own, below "
                "and above, 0 or more"
            )
    for d, step in (stride or {}).items():
        if step < 1:
            raise ShardingError(f"jigsaw.local: stride={step} of dim {d} must be 1 or more")
    return LocalFunction(op, sides, dict(stride or {}), tuple(wrap), dict(rows or {}))


@dataclass(frozen=True)
class ReachRule:
    """Rule that output row o reads the input rows ``o * stride - below`` to ``o * stride + above``, both included.

    The function makes `rows` output rows of the whole dim.  Its rows begin at a multiple of the stride, so that its
    first output is a row of the whole result.
    """

    below: int
    above: int
    stride: int
    rows: int

    def size(self, n: int) -> int:
        return self.rows

    def need(self, out: Interval, n: int) -> Interval:
        start = out[0] * self.stride - self.below
        return start - start % self.stride, (out[1] - 1) * self.stride + self.above + 1

    def reach(self, held: Interval, n: int) -> Interval:
        first = ceil_div(held[0], self.stride) + ceil_div(self.below, self.stride)
        return first, (held[1] - self.above - 1) // self.stride + 1

    def point(self, at: int, n: int) -> int:
        return min(ceil_div(at, self.stride), self.rows)


class LocalFunction(nn.Module):
    """The result of `jigsaw.local`: call it like the function itself.  It has the parameters of a function that is a
    module.

    >>> jigsaw.local(torch.nn.Conv1d(2, 2, 3, padding=1), reach={-1: 1})(torch.ones(1, 2, 9)).shape
    torch.Size([1, 2, 9])
    """

    def __init__(
        self,
        op: Callable[..., Any],
        reach: Mapping[int, tuple[int, int]],
        stride: Mapping[int, int],
        wrap: Collection[int],
        rows: Mapping[int, int],
    ) -> None:
        super().__init__()
        self.op = op
        self.reach, self.stride, self.wrap, self.rows = reach, stride, wrap, rows

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tiles = list(tiles_in((args, kwargs)))
        if not tiles:
            return self.op(*args, **kwargs)
        together = bring_together(tiles)
        first = max(together, key=lambda t: t.ndim)
        for t in together:
            if any(n not in (1, m) for n, m in zip(reversed(t.shape), reversed(first.shape), strict=False)):
                raise ShardingError(
                    f"{_NAME}: tiles of shapes {tuple(first.shape)} and {tuple(t.shape)} do not broadcast; give tiles "
                    "of one size, or of one row"
                )
        if debug.is_comparing():
            debug.note_call(first.mesh, f"{_NAME} of {_name_of(self.op)}{described_arguments(args, kwargs)}")
        along = self._stencils(first)
        to = plan_stencil(first.layout, along, first.coordinate, _NAME)
        plain: list[Tensor] = []

        def as_operand(x: Tensor) -> Tensor:
            plain.append(plain_operand(x, first, to.out, is_whole=True))
            return plain[-1]

        parameters = self._parameter_operands(as_operand)
        # a tile is the same along an axis that does not cut it, and each rank's gradient is that of its own rows
        axes = [[a for a in to.out.cut_axes if a not in t.layout.cut_axes] for t in together]
        needed = [_rows_within_reach(t, first, along) for t in together]
        sources = [comm.use_in_parts(x, first.mesh, alike) for x, alike in zip(needed, axes, strict=True)]
        # a rank without output rows calls the function too, on a few zeros, to learn what it makes of the other dims
        inputs = [_stand_in(x, first, along) for x in sources] if to.is_empty else sources
        by_tile = {id(t): x for t, x in zip(tiles, inputs, strict=True)}
        args, kwargs = replace_tensors((args, kwargs), lambda t: by_tile[id(t)], as_operand)
        versions, numbers = [tensor_version(x) for x in inputs], random_states(first)
        if parameters:
            out = call_with_tensors(cast(nn.Module, self.op), parameters, args, kwargs)
        else:
            out = self.op(*args, **kwargs)
        if versions != [tensor_version(x) for x in inputs]:
            raise ShardingError(f"{_NAME}: {_name_of(self.op)} changes an argument in place; let it make a new tensor")
        if any(not torch.equal(a, b) for a, b in zip(numbers, random_states(first), strict=True)):
            raise ShardingError(
                f"{_NAME}: {_name_of(self.op)} draws random numbers, which differ with the mesh; draw them outside, as "
                "torch.rand_like(tile), and pass them"
            )

        def keep(y: Tensor) -> Tile:
            reached = self._reached_tensors(y, [*inputs, *plain])
            return self._kept_rows(y, to, first, along, [sources[k] for k in reached if k < len(sources)])

        return replace_tensors(out, lambda t: t.local, keep)

    def _stencils(self, first: Tile) -> tuple[DimStencil, ...]:
        n = first.ndim
        by_argument = {"reach": self.reach, "stride": self.stride, "wrap": self.wrap, "rows": self.rows}
        wrong = [f"{name} names dim {d}" for name, dims in by_argument.items() for d in dims if not -n <= d < n]
        if wrong:
            raise ShardingError(f"{_NAME}: {wrong[0]} of a Tile of shape {tuple(first.shape)}, which has {n} dims")
        stencils: list[DimStencil] = []
        for d in sorted({d % n for dims in by_argument.values() for d in dims}):
            size, step, wrap = first.shape[d], _of_dim(self.stride, d, n, 1), d in {w % n for w in self.wrap}
            if wrap and size % step:
                raise ShardingError(
                    f"{_NAME}: dim {d} of {size} rows is in wrap={tuple(self.wrap)}, but steps of stride={step} do not "
                    f"close that circle; pad it to {ceil_div(size, step) * step} rows, or leave it out of wrap"
                )
            rule = ReachRule(*_of_dim(self.reach, d, n, (0, 0)), step, _of_dim(self.rows, d, n, ceil_div(size, step)))
            stencils.append(DimStencil(d, rule, wrap))
        return tuple(stencils)

    def _parameter_operands(self, as_operand: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        operands: dict[str, Tensor] = {}
        for name, parameter in self.op.named_parameters() if isinstance(self.op, nn.Module) else ():
            if is_dtensor(parameter):
                raise ShardingError(
                    f"{_NAME}: parameter {name!r} of {_name_of(self.op)} is cut (a DTensor), but its function runs on "
                    "plain tensors; call parallelize without shard_weights for this module"
                )
            operands[name] = as_operand(parameter)
            if hasattr(parameter, AVERAGED_MARK):  # `jigsaw.parallelize` looks for it before every forward
                setattr(operands[name], AVERAGED_MARK, averaged_over(parameter))
        return operands

    def _kept_rows(
        self, y: Tensor, to: StencilPlan, first: Tile, along: Sequence[DimStencil], sources: Sequence[Tensor]
    ) -> Tile:
        if y.ndim != first.ndim:
            raise ShardingError(
                f"{_NAME}: {_name_of(self.op)} makes {y.ndim} dims of a Tile of {first.ndim}; keep them (keepdim=True) "
                "and drop or add dims outside"
            )
        out, shape = to.out, list(to.shape)
        kept = {d: (derived, piece) for d, derived, piece in to.derived}
        steps = {a.dim: (a.rule.stride, a.wrap) for a in along if isinstance(a.rule, ReachRule)}
        for d in range(y.ndim):
            if d in kept:
                derived, piece = kept[d]
                (start, stop), (step, wrap) = derived.out.held[piece], steps[d]
                skip = start - derived.needs[piece][0] // step
                more = y.shape[d] - skip - (stop - start)
                # the last piece ends at the array's last row, so it may have no row too many
                if not to.is_empty and (more < 0 or (more and stop == derived.out.size and not wrap)):
                    raise self._rows_error(y, d, derived.out.size + more)
                y = y if to.is_empty else y.narrow(d, skip, stop - start)
            elif not out.is_cut(d):
                out, shape[d] = out.replace_dim(d, whole_dim(y.shape[d])), y.shape[d]
            elif y.shape[d] != max(shape[d], 1 if to.is_empty else 0):
                raise self._rows_error(y, d, None)
        if to.is_empty:
            y = empty_result(shape, *sources) if sources else y.new_zeros(shape)
        return Tile(y, out, first.mesh)

    def _rows_error(self, y: Tensor, dim: int, rows: int | None) -> ShardingError:
        of_all = f", {rows} of the whole" if rows is not None else ""
        return ShardingError(
            f"{_NAME}: {_name_of(self.op)} makes {y.shape[dim]} rows of a rank's along dim {dim}{of_all}, not what "
            f"reach={dict(self.reach)}, stride={dict(self.stride)} and rows={dict(self.rows)} say; rows={{{dim}: ...}} "
            "is how many it makes of the whole dim"
        )

    def _reached_tensors(self, y: Tensor, known: Sequence[Tensor]) -> set[int]:
        """Return the places of the arguments that the gradient of `y` reaches; another leaf is refused."""
        at = {get_gradient_edge(x).node: k for k, x in enumerate(known) if x.requires_grad}
        reached, seen = set[int](), set[Any]()
        todo: list[Any] = [get_gradient_edge(y).node] if y.requires_grad else []
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            if node in at:
                reached.add(at[node])
            elif hasattr(node, "variable"):
                raise ShardingError(
                    f"{_NAME}: {_name_of(self.op)} uses a parameter of shape {tuple(node.variable.shape)} that it was "
                    "not given; pass it as an argument, or make the function a torch.nn.Module that has it"
                )
            else:
                todo.extend(before for before, _ in node.next_functions)
        return reached


class NeighborhoodFunction(LocalFunction):
    """The result of `jigsaw.local` with a table of neighbors."""

    def __init__(self, op: Callable[..., Any], table: Neighbors) -> None:
        super().__init__(op, {}, {}, (), {})
        self.table = table

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(gather_neighbors(x, self.table), *args, **kwargs)


_NAME = "jigsaw.local"


def _name_of(op: Callable[..., Any]) -> str:
    return getattr(op, "__name__", type(op).__name__)


def _of_dim(by_dim: Mapping[int, T], dim: int, ndim: int, default: T) -> T:
    return by_dim.get(dim, by_dim.get(dim - ndim, default))


def _rows_within_reach(tile: Tile, first: Tile, along: Sequence[DimStencil]) -> Tensor:
    """Return the rows of a tile that this rank's output rows need; an uncut dim of one row broadcasts."""
    lead = first.ndim - tile.ndim
    own_dims = [(a, a.dim - lead) for a in along if a.dim >= lead]
    moved = tuple(DimStencil(d, a.rule, a.wrap) for a, d in own_dims if is_cut_or_haloed(tile.layout, d))
    to = plan_stencil(tile.layout, moved, tile.coordinate, _NAME)
    return exchange_rows(tile.local, tile.layout, to.target, tile.mesh)


def _stand_in(x: Tensor, first: Tile, along: Sequence[DimStencil]) -> Tensor:
    """Return zeros, enough for the function to return a result, with a gradient where `x` has one."""
    shape = [max(n, 1) for n in x.shape]
    for a in along:
        d = a.dim - first.ndim + x.ndim
        if d >= 0 and x.shape[d] == 0 and isinstance(a.rule, ReachRule):
            shape[d] = min(first.shape[a.dim], a.rule.below + a.rule.above + a.rule.stride)
    return x.new_zeros(shape).requires_grad_(x.requires_grad)
