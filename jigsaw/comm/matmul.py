"""Matmul core: ``Y = X Wᵀ``, ``G W`` and ``Gᵀ X`` are one engine that gathers, multiplies and reduces around rings.

A `jigsaw.geometry.matmul_grid.MatmulGrid` has the cuts and the cost; this file moves the parts.  A gathered operand
arrives part by part: the next one travels while the present one is multiplied.  A reduced result leaves part by part: a
partial sum travels while the next one is computed.  After Agarwal et al. (1995) and Kieckhefen et al. (arXiv
2507.05753); see `jigsaw.geometry.matmul_grid`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm import collectives, debug
from jigsaw.comm.graph_calls import graph_call
from jigsaw.comm.wire_values import is_narrow, is_on_accelerator, wire_memory
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Box, Interval, box_elements, box_shape, box_slices, cut_points, interval_overlap
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.geometry.matmul_grid import OPERAND_DIMS, MatmulGrid, MatmulRing
from jigsaw.ranks.mesh import axes_of_mesh, mesh_coordinate

RING_STEP_BYTES = 8 << 20
# A rank waits for a sum, sent after one product, after the next product.  At half the size it has half of that product
# to spare, so a slightly late rank or link delays no other.  Below this size, messages determine the cost.
_SLACK_BYTES = 1 << 20


def grid_matmul(x: Tensor, w: Tensor, grid: MatmulGrid, mesh: DeviceMesh, chunk_bytes: int = RING_STEP_BYTES) -> Tensor:
    """Return Y[M,N] = X[M,K] W[N,K]ᵀ on the grid; `x`, `w` and the result are this rank's parts at rest.

    bfloat16 and float16 are accumulated in float32, also between ranks: a rank's partial sum is rounded once, to
    travel, and so is the result.  Parts larger than `chunk_bytes` travel in chunks.

    *Shapes*: global X [M,K], W [N,K], Y [M,N]; per rank the boxes of ``grid.x``, ``grid.w`` and ``grid.y``, 1/P of
    each.
    *Sends*: forward X around its ring, ``(1-1/p3) MK/(p1 p2)`` elements received a rank, W likewise ``(1-1/p1) KN/(p2
    p3)``, partial sums of Y ``(1-1/p2) MN/(p1 p3)``; backward G once, X and W again, and their gradients' partial
    sums: ``grid.received`` and ``grid.received_backward`` are the exact integers for uneven blocks (of narrow types,
    whose sums go to their owners at once, where these are even).
    *Raises*: `ShardingError` when the grid does not fit the mesh, or a part its layout.

    A tensor that the grid holds alike along axes of its third dim is not gathered over them; its gradient then stays
    this rank's part along them. Pass the tensor through `collectives.use_in_parts`, which sums it, where that is not
    meant.
    """
    coordinate = mesh_coordinate(mesh)
    coord = grid.coord(Layout((), axes_of_mesh(mesh)).index(coordinate))
    _check_operands(x, w, grid, mesh, coord)
    if all(grid.ring(name, coord).size == 1 for name in OPERAND_DIMS):
        return torch.nn.functional.linear(x, w)
    return _GridMatmul.apply(x, w, MatmulEngine(grid, mesh, coord, chunk_bytes))


def _check_operands(x: Tensor, w: Tensor, grid: MatmulGrid, mesh: DeviceMesh, coord: MeshCoordinate) -> None:
    if grid.x.ranks != mesh.size():
        raise ShardingError(
            f"a grid of {grid.p[0]} x {grid.p[1]} x {grid.p[2]} on axes {dict(grid.x.axes)} needs {grid.x.ranks} "
            f"ranks, the mesh has {mesh.size()}"
        )
    for name, part, layout in (("x", x, grid.x), ("w", w, grid.w)):
        if tuple(part.shape) != layout.local_shape(coord):
            raise ShardingError(
                f"matmul: {name} has shape {tuple(part.shape)} here, but {layout} gives this rank "
                f"{layout.local_shape(coord)}"
            )
    if x.dtype != w.dtype or not (x.dtype.is_floating_point or x.dtype.is_complex):
        raise ShardingError(f"matmul: x is {x.dtype} and w is {w.dtype}; both must be of one floating or complex dtype")


class _GridMatmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, engine: MatmulEngine) -> Tensor:
        debug.compare_calls(engine.mesh, "matmul", engine.grid.x, engine.grid.w, engine.grid.y)
        ctx.save_for_backward(x, w)
        ctx.engine = engine
        return _product_on_grid(x, w, engine)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  # the decorator's type
        ctx: Any, *grads: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        engine: MatmulEngine = ctx.engine
        debug.compare_calls(engine.mesh, "gradient of a matmul", engine.grid.x, engine.grid.w, engine.grid.y)
        return *_gradients_on_grid(grads[0], x, w, ctx.needs_input_grad[:2], engine), None


def _like_product(x: Tensor, w: Tensor, engine: MatmulEngine) -> Tensor:
    return x.new_empty(engine.grid.y.local_shape(engine.coord))


@graph_call(_like_product)
def _product_on_grid(x: Tensor, w: Tensor, engine: MatmulEngine) -> Tensor:
    return engine.product(engine.block("x", x), engine.block("w", w), "y").contiguous()


def _like_operands(
    grad: Tensor, x: Tensor, w: Tensor, needed: tuple[bool, bool], engine: MatmulEngine
) -> tuple[Tensor | None, Tensor | None]:
    return x.new_empty(x.shape) if needed[0] else None, w.new_empty(w.shape) if needed[1] else None


@graph_call(_like_operands)
def _gradients_on_grid(
    grad: Tensor, x: Tensor, w: Tensor, needed: tuple[bool, bool], engine: MatmulEngine
) -> tuple[Tensor | None, Tensor | None]:
    # the gradient of Y is gathered once and kept where both products need it; X and W are gathered again, because
    # keeping their blocks from the forward pass would replicate them
    for_x, for_w = needed
    g = engine.block("y", grad, keep=for_x and for_w)
    dx = engine.product(g, engine.block("w", _conjugate(w)), "x").contiguous() if for_x else None
    dw = engine.product(g, engine.block("x", _conjugate(x)), "w").contiguous() if for_w else None
    return dx, dw


def _conjugate(x: Tensor) -> Tensor:
    return x.conj().resolve_conj() if x.is_complex() else x


# -- the engine -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MatmulEngine:
    """Products of a grid on one rank; parts larger than `chunk` bytes travel in chunks."""

    grid: MatmulGrid
    mesh: DeviceMesh
    coord: MeshCoordinate
    chunk: int

    def block(self, name: str, local: Tensor, keep: bool = False) -> ProductBlock:
        """Return the block of X, W or Y (or a gradient of that shape) that this rank's part belongs to."""
        ring = self.grid.ring(name, self.coord)
        # an operand that stays is multiplied as it lies: part of a whole weight, or tokens that were channels-last
        return ProductBlock(name, local if ring.size == 1 else local.contiguous(), ring, self, keep)

    def product(self, a: ProductBlock, b: ProductBlock, out: str) -> Tensor:
        """Return a b, contracted over the dim that `out` lacks and reduced to this rank's part of `out`."""
        ring = self.grid.ring(out, self.coord)
        stream, kept = (a, b) if self.grid.stream(a.name, b.name) == a.name else (b, a)
        kept.keep = True
        stream.keep = stream.keep or ring.size > 1
        dtype = a.local.dtype
        wide = torch.float32 if is_narrow(dtype) else dtype
        pieces, chunks = _ring_step_boxes(ring, self.chunk, wide.itemsize, _SLACK_BYTES)
        steps = [divmod(i, chunks) for i in range(ring.size * chunks)]

        def partial_sum(box: Box) -> Tensor:
            return _partial_product(a, b, stream, kept, out, box, wide, finish=ring.size == 1)

        with torch.autocast(a.local.device.type, enabled=False):
            if ring.size == 1:
                return partial_sum(ring.boxes[0]).to(dtype)
            if is_narrow(dtype):
                return self._collected(partial_sum, ring, pieces, steps, dtype)
            return self._reduced(partial_sum, ring, pieces, steps)

    def _collected(
        self,
        partial_sum: Callable[[Box], Tensor],
        ring: MatmulRing,
        pieces: list[list[Box]],
        steps: list[tuple[int, int]],
        dtype: torch.dtype,
    ) -> Tensor:
        """Reduce-scatter narrow types: a rounded partial goes to its owner, who adds up in the wider type.

        Around a ring the sum would be rounded at every rank, or be twice as many bytes.
        """
        # Four ranks: in step s rank r works on the part of rank (r + 1 + s) mod 4, and in the last one on its own; its
        # own sum of step s comes from rank (r - 1 - s) mod 4.
        arriving: dict[tuple[int, int], tuple[Tensor, collectives.PendingWork]] = {}
        totals: dict[int, Tensor] = {}
        for step, t in steps:
            part = partial_sum(pieces[(ring.me + 1 + step) % ring.size][t])
            if step:
                # waited for only after this rank's own product, which hides the message
                arrived, pending = arriving.pop((step, t))
                pending.wait()
                totals[t] = totals[t].add_(arrived) if t in totals else arrived.to(part.dtype)
            if step == ring.size - 1:
                totals[t] = part.add_(totals[t])
                continue
            owner, giver = ring.peers[(ring.me + 1 + step) % ring.size], ring.peers[(ring.me - 1 - step) % ring.size]
            buffer = wire_memory(part, box_shape(pieces[ring.me][t]), dtype)
            pending = collectives.swap_messages(self.mesh, [(owner, part.to(dtype))], [(giver, buffer)], "matmul")
            arriving[step + 1, t] = buffer, pending
        return torch.cat(list(totals.values())).to(dtype)

    def _reduced(
        self,
        partial_sum: Callable[[Box], Tensor],
        ring: MatmulRing,
        pieces: list[list[Box]],
        steps: list[tuple[int, int]],
    ) -> Tensor:
        """Reduce-scatter on a ring: a sum starts one place after its owner and takes each rank's partial on the way
        there.
        """
        # Four ranks: the sum that rank 3 will own starts at rank 0 and goes by 1 and 2, each adding its part; so in
        # step s rank r works on the part of rank (r - 1 - s) mod 4, and in the last step, 3, on its own.
        own: list[Tensor] = []
        arriving: dict[tuple[int, int], tuple[Tensor, collectives.PendingWork]] = {}
        for step, t in steps:
            total = partial_sum(pieces[(ring.me - 1 - step) % ring.size][t])
            if step:
                # waited for only after this rank's own product, which hides the message
                arrived, pending = arriving.pop((step, t))
                pending.wait()
                total += arrived
            if step == ring.size - 1:
                own.append(total)
                continue
            buffer = wire_memory(total, box_shape(pieces[(ring.me - 2 - step) % ring.size][t]))
            arriving[step + 1, t] = buffer, self.pass_on(ring, total, buffer)
        return own[0] if len(own) == 1 else torch.cat(own)

    def pass_on(self, ring: MatmulRing, sent: Tensor, taken: Tensor) -> collectives.PendingWork:
        """Start one step of a ring."""
        after, before = ring.peers[(ring.me + 1) % ring.size], ring.peers[(ring.me - 1) % ring.size]
        return collectives.swap_messages(self.mesh, [(after, sent)], [(before, taken)], "matmul")


class ProductBlock:
    """Operand of a product: this rank's part, and the others of its block as they come around the ring.

    The first use lets its parts travel; a kept block is whole afterwards and comes as one part.
    """

    def __init__(self, name: str, local: Tensor, ring: MatmulRing, engine: MatmulEngine, keep: bool) -> None:
        self.name, self.local, self.keep = name, local, keep
        self.ring, self._engine = ring, engine
        self._whole: Tensor | None = local if ring.size == 1 else None

    def parts(self) -> Iterator[tuple[Box, Tensor]]:
        """Iterate over every part with its box in the block, this rank's own first; the next ones travel meanwhile."""
        if self._whole is not None:
            rows, columns = self._whole.shape
            yield ((0, rows), (0, columns)), self._whole
            return
        # Four ranks pass parts on to the next: in step s rank r has the part of rank (r - s) mod 4, and sends it on
        # while that of (r - 1 - s) mod 4 arrives.  Each part is sent three times, by one neighbor to the next.
        ring = self.ring
        pieces, chunks = _ring_step_boxes(ring, self._engine.chunk, self.local.element_size())
        whole = wire_memory(self.local, ring.block) if self.keep else None
        first = ring.boxes[ring.me][0][0]
        arriving: dict[int, tuple[Tensor, collectives.PendingWork]] = {}
        for i in range(ring.size * chunks):
            step, t = divmod(i, chunks)
            box = pieces[(ring.me - step) % ring.size][t]
            if step:
                part, pending = arriving.pop(i)
                pending.wait()
            else:
                part = self.local[box[0][0] - first : box[0][1] - first]
            if step < ring.size - 1:
                # started before `part` is handed out, so that it travels while the caller multiplies
                buffer = self._buffer(pieces[(ring.me - 1 - step) % ring.size][t], whole)
                arriving[i + chunks] = buffer, self._engine.pass_on(ring, part, buffer)
            if whole is not None:
                place = whole[box_slices(box)]
                if not collectives.begin_at_one_place(place, part):
                    place.copy_(part)
            yield box, part
        self._whole = whole

    def _buffer(self, box: Box, whole: Tensor | None) -> Tensor:
        """Return where a part arrives: in its place of the kept block where that is contiguous."""
        place = None if whole is None else whole[box_slices(box)]
        return place if place is not None and place.is_contiguous() else wire_memory(self.local, box_shape(box))


def _ring_step_boxes(
    ring: MatmulRing, chunk: int, itemsize: int, halved: float = math.inf
) -> tuple[list[list[Box]], int]:
    """Return the box of every member of a ring cut into chunks of rows, equally many for each; at least two of `halved`
    bytes.
    """
    # the number of chunks follows from the largest part and is the same on all members, because they count the same
    # steps; a member with fewer rows has empty chunks, which are not sent
    largest = max(map(box_elements, ring.boxes)) * itemsize
    chunks = max(1, min(max(-(-largest // chunk), 1 + (largest >= halved)), max(r[1] - r[0] for r, _ in ring.boxes)))

    def rows(start: int, stop: int) -> list[Interval]:
        points = cut_points(stop - start, chunks)
        return [(start + p, start + q) for p, q in pairwise(points)]

    return [[(part, columns) for part in rows(*box_rows)] for box_rows, columns in ring.boxes], chunks


# -- products of parts ------------------------------------------------------------------------------------------------


def _partial_product(
    a: ProductBlock,
    b: ProductBlock,
    stream: ProductBlock,
    kept: ProductBlock,
    out: str,
    box: Box,
    wide: torch.dtype,
    finish: bool,
) -> Tensor:
    """Return this rank's partial sum of one box of the result, in `wide`; a `finish`-ed sum of one product keeps the
    operands' dtype.
    """
    (r, c), shape = OPERAND_DIMS[out], box_shape(box)
    inner = next(d for d in OPERAND_DIMS[a.name] if d != r)
    depth = _block_extent(stream, inner)
    total: Tensor | None = None
    for s_box, s in stream.parts():
        for k_box, k in kept.parts():
            (a_box, a_part), (b_box, b_part) = ((s_box, s), (k_box, k)) if stream is a else ((k_box, k), (s_box, s))
            at_a, at_b = (
                dict(zip(OPERAND_DIMS[a.name], a_box, strict=True)),
                dict(zip(OPERAND_DIMS[b.name], b_box, strict=True)),
            )
            rows, columns, along = (
                interval_overlap(at_a[r], box[0]),
                interval_overlap(at_b[c], box[1]),
                interval_overlap(at_a[inner], at_b[inner]),
            )
            if any(start >= stop for start, stop in (rows, columns, along)):
                continue
            left = _oriented_rows(a_part, a.name, r, at_a, {r: rows, inner: along})
            right = _oriented_rows(b_part, b.name, inner, at_b, {c: columns, inner: along})
            # a product that covers the whole box needs no zeros to add to; alone, it needs no wider sum either
            if (rows, columns) == box and total is None:
                alone = finish and along == (0, depth)
                total = torch.mm(left, right) if alone else _multiply_wide(left, right, wide)
                continue
            if total is None:
                total = left.new_zeros(shape, dtype=wide)
            _add_product(total[box_slices((rows, columns), box)], left, right)
    return a.local.new_zeros(shape, dtype=wide) if total is None else total


def _block_extent(block: ProductBlock, dim: str) -> int:
    """Return the extent of a block's dim."""
    return block.ring.block[OPERAND_DIMS[block.name].index(dim)]


def _oriented_rows(
    part: Tensor, name: str, first: str, box: dict[str, Interval], wanted: dict[str, Interval]
) -> Tensor:
    """Return the wanted rows of a part as a matrix whose rows are the dim `first`."""
    dims = OPERAND_DIMS[name]
    view = part[box_slices(tuple(wanted[d] for d in dims), tuple(box[d] for d in dims))]
    return view if OPERAND_DIMS[name][0] == first else view.t()


def _multiply_wide(left: Tensor, right: Tensor, wide: torch.dtype) -> Tensor:
    if left.dtype == wide:
        return torch.mm(left, right)
    if is_on_accelerator(left) or _accelerators_played:
        return torch.mm(left, right, out_dtype=wide)
    return torch.mm(left.to(wide), right.to(wide))


_accelerators_played: list[None] = []


@contextmanager
def products_of_accelerators() -> Generator[None]:
    """Treat products of narrow types within the block as those of a GPU, which adds up in the wider type by itself.
    This is for a dry run, whose tensors have no values and lie on the CPU.
    """
    _accelerators_played.append(None)
    try:
        yield
    finally:
        _accelerators_played.pop()


def _add_product(target: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype == target.dtype:
        torch.addmm(target, left, right, out=target)
    else:
        target += _multiply_wide(left, right, target.dtype)
