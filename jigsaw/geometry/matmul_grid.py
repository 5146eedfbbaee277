"""Grid of a matmul: ``Y[M,N] = X[M,K] W[N,K]ᵀ`` on p1 x p2 x p3 ranks over (M, K, N), and its cost.  Integers only.

Every tensor is stored 1/P at rest.  X is gathered over the axes that cut N, W over those that cut M, and Y is
reduce-scattered over those that cut K. The two backward products are the same with the roles turned.  Elements that a
rank receives: ``vX = (1-1/p3) MK/(p1 p2)``, ``vW = (1-1/p1) KN/(p2 p3)``, ``vY = (1-1/p2) MN/(p1 p3)``.

Special cases are names, not code: (P,1,1) domain parallelism with ZeRO weights, (1,1,P) column and (1,P,1) row
parallelism, (q,1,q) SUMMA.

Example: four ranks, M = 8, K = 6, N = 4, as (2,1,2).  Rank 0 works on rows 0:4 of Y and its columns 0:2.  It needs
X[0:4]: it has X[0:2], and rank 1 has X[2:4].  It needs W[0:2]: it has W[0:1], and rank 2 has W[1:2].  So it receives 12
elements of X around the ring (0, 1) and 6 of W around (0, 2), and none of Y.  As (1,4,1) each rank multiplies its own
columns of X and W into all of Y, 32 elements. The ring (0, 1, 2, 3) sums these: 24 elements of Y received, none of X
and W.

Sources: Agarwal, Balle, Gustavson, Joshi and Palkar, "A three-dimensional approach to parallel matrix multiplication",
IBM J. Res. Dev. 39 (1995); Al Daas, Ballard, Grigori, Kumar and Rouse, "Tight memory-independent parallel matrix
multiplication communication lower bounds", arXiv 2205.13407; Kieckhefen et al., "Jigsaw: training
multi-billion-parameter AI weather models with optimized model parallelism", arXiv 2507.05753.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Box, Cut, SplitRule, box_elements, cut_points, whole_dim
from jigsaw.geometry.layout import AxisSizes, Layout, MeshCoordinate, values_over_mesh

OPERAND_DIMS = {"x": "mk", "w": "nk", "y": "mn"}


@dataclass(frozen=True)
class MatmulRing:
    """Ranks that hold the parts of one block, in order: mesh positions, the box of each within the block, and
    my place.
    """

    peers: tuple[int, ...]
    boxes: tuple[Box, ...]
    me: int

    @property
    def size(self) -> int:
        return len(self.peers)

    @property
    def block(self) -> tuple[int, int]:
        """Shape of the block that the parts make up."""
        return max(b[0][1] for b in self.boxes), max(b[1][1] for b in self.boxes)


@dataclass(frozen=True, eq=False)
class RingElements:
    """Numbers of elements of one operand, each an array over the mesh.  They are those of a rank's `own` part, and of
    the rank `before` it in its ring of `size` ranks. Then those of the whole `block`, and of its `largest` part.
    """

    size: int
    own: NDArray[np.int64]
    before: NDArray[np.int64]
    block: NDArray[np.int64]
    largest: NDArray[np.int64]

    @property
    def gathered(self) -> NDArray[np.int64]:
        """Elements that a rank receives when the block is gathered."""
        return self.block - self.own

    @property
    def scattered(self) -> NDArray[np.int64]:
        """Elements that a rank receives when the block is reduce-scattered: every part but the one that it starts."""
        # the sum that this rank starts is the one that ends at the rank before it, so that it goes all the way round
        return self.block - self.before


@dataclass(frozen=True)
class MatmulGrid:
    """Axes that cut M, K and N into blocks, and the cuts of X [M,K], W [N,K] and Y [M,N] at rest.

    `m`, `k` and `n` are the block cuts; their pieces are p1, p2 and p3.  A layout at rest has the block cuts of its two
    dims, refined by axes of the third. Each axis is cut into one dim of the block.  Where it is not refined, the tensor
    is the same along these axes: nothing is gathered, and sums over them stay each rank's part.

    Raises: `ShardingError` when an axis has two roles or a layout at rest does not refine its block.
    """

    m: Cut
    k: Cut
    n: Cut
    x: Layout
    w: Layout
    y: Layout

    def __post_init__(self) -> None:
        used = [*self.m.axes, *self.k.axes, *self.n.axes]
        if len(set(used)) != len(used):
            raise ShardingError(
                f"grid over M by {self.m.axes}, K by {self.k.axes}, N by {self.n.axes}: an axis has one role only"
            )
        for name in OPERAND_DIMS:
            self._check(name)

    def _check(self, name: str) -> None:
        layout: Layout = getattr(self, name)
        blocks = self.blocks(name)
        if layout.axes != self.x.axes or layout.shape != tuple(b.size for b in blocks) or len(layout.cuts) != 2:
            raise ShardingError(
                f"grid: {name.upper()} at rest, {layout}, must have shape {tuple(b.size for b in blocks)} on the "
                f"axes {dict(self.x.axes)}"
            )
        spare = set(self.spare(name).axes)
        for cut, block in zip(layout.cuts, blocks, strict=True):
            # the axes beyond the block's are its minor ones, so every n-th point at rest is a point of the block:
            # 0, 2, 4, 6, 8 at rest by (m, n) of 2 x 2 refines 0, 4, 8 by (m)
            every = math.prod(layout.size_of(a) for a in cut.axes[len(block.axes) :])
            refines = cut.axes[: len(block.axes)] == block.axes and cut.points[::every] == block.points
            if not refines or not set(cut.axes[len(block.axes) :]) <= spare:
                raise ShardingError(
                    f"grid: {name.upper()} at rest, {layout}, must refine blocks cut by {block.axes} at "
                    f"{block.points}, by axes among {sorted(spare)} only"
                )

    @classmethod
    def of(
        cls,
        shape: tuple[int, int, int],
        p: tuple[int, int, int],
        rest: str = "mnm",
        split: Mapping[str, SplitRule] | None = None,
    ) -> MatmulGrid:
        """Return the grid p1 x p2 x p3 over all ranks of a mesh, row-major, whatever its axes are called.

        `rest` names the dims of X, W and Y that their 1/P parts cut (``"m"`` or ``"k"``, ``"n"`` or ``"k"``, ``"m"`` or
        ``"n"``, in this order); `split` gives cut points of M, K and N other than balanced ones, by ``"m"``, ``"k"``,
        ``"n"``.
        """
        return cls.by(shape, tuple(zip("mkn", p, strict=True)), "m", "k", "n", rest, split)

    @classmethod
    def by(
        cls,
        shape: tuple[int, int, int],
        axes: Mapping[str, int] | AxisSizes,
        m: str | Sequence[str] = (),
        k: str | Sequence[str] = (),
        n: str | Sequence[str] = (),
        rest: str = "mnm",
        split: Mapping[str, SplitRule] | None = None,
    ) -> MatmulGrid:
        """Return the grid whose M, K and N are cut by the named axes of a mesh; along other axes everything is the
        same.
        """
        sizes = dict(axes)
        _check_rest(rest)
        blocks: dict[str, Cut] = {}
        for dim, size, asked in zip("mkn", shape, (m, k, n), strict=True):
            named = tuple(a for a in ((asked,) if isinstance(asked, str) else asked) if sizes.get(a, 1) > 1)
            pieces = math.prod(sizes[a] for a in named)
            points = cut_points(size, pieces, (split or {}).get(dim, "balanced"))
            blocks[dim] = Cut(size, points, named) if named else whole_dim(size)
        layouts: list[Layout] = []
        for dims, refined in zip(OPERAND_DIMS.values(), rest, strict=True):
            spare = next(d for d in "mkn" if d not in dims)
            cuts = [refine_cut(blocks[d], blocks[spare].axes, sizes) if d == refined else blocks[d] for d in dims]
            layouts.append(Layout(tuple(cuts), tuple(sizes.items())))
        return cls(blocks["m"], blocks["k"], blocks["n"], *layouts)

    # -- shape --------------------------------------------------------------------------------------------------------

    @property
    def p(self) -> tuple[int, int, int]:
        return self.m.pieces, self.k.pieces, self.n.pieces

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.m.size, self.k.size, self.n.size

    @property
    def name(self) -> str:
        """Name of the grid in the literature."""
        p1, p2, p3 = self.p
        names = {
            (False, False, False): "local",
            (True, False, False): "domain",
            (False, True, False): "row",
            (False, False, True): "column",
        }
        summa = "SUMMA" if p2 == 1 and p1 == p3 else "2-D" if min(self.p) == 1 else "3-D"
        return names.get((p1 > 1, p2 > 1, p3 > 1), summa)

    def blocks(self, name: str) -> tuple[Cut, Cut]:
        """Return the block cuts of the two dims of X, W or Y."""
        first, second = OPERAND_DIMS[name]
        return getattr(self, first), getattr(self, second)

    def spare(self, name: str) -> Cut:
        """Return the cut of the dim that X, W or Y does not have: its axes hold the parts of one block."""
        return getattr(self, next(d for d in "mkn" if d not in OPERAND_DIMS[name]))

    def coords(self) -> Iterator[MeshCoordinate]:
        return self.x.coords()

    def coord(self, position: int) -> MeshCoordinate:
        """Return the grid coordinate of a row-major mesh position."""
        return self.x.coord(position)

    def ring(self, name: str, coord: MeshCoordinate) -> MatmulRing:
        """Return the ranks that hold the parts of the block of X, W or Y that the rank at `coord` works on."""
        return _matmul_ring(self, name, coord)

    # -- cost ---------------------------------------------------------------------------------------------------------

    def received(self, coord: MeshCoordinate) -> dict[str, int]:
        """Return the elements of X, W and Y that a rank receives in the forward pass, exactly."""
        return {name: int(self._received[name][coord]) for name in OPERAND_DIMS}

    def received_backward(self, coord: MeshCoordinate) -> dict[str, int]:
        """Return the elements of X, W and Y (or their gradients) that a rank receives in the backward pass, exactly.

        X and W are gathered again and their gradients reduce-scattered; the gradient of Y is gathered once for both.
        """
        return {name: int(self._received_backward[name][coord]) for name in OPERAND_DIMS}

    @cached_property
    def _received(self) -> dict[str, NDArray[np.int64]]:
        rings = self._elements
        return {"x": rings["x"].gathered, "w": rings["w"].gathered, "y": rings["y"].scattered}

    @cached_property
    def _received_backward(self) -> dict[str, NDArray[np.int64]]:
        x, w, y = (self._elements[name] for name in OPERAND_DIMS)
        return {"x": x.gathered + x.scattered, "w": w.gathered + w.scattered, "y": y.gathered}

    @cached_property
    def _elements(self) -> dict[str, RingElements]:
        return {name: self._count_elements(name) for name in OPERAND_DIMS}

    def _count_elements(self, name: str) -> RingElements:
        layout: Layout = getattr(self, name)
        axes = [axis for axis, _ in layout.axes]
        rows, columns = (_lengths_over_mesh(layout, cut) for cut in layout.cuts)
        own = np.broadcast_to(rows * columns, tuple(size for _, size in layout.axes))
        around = tuple(axes.index(axis) for axis in self.ring_axes(name))
        # the ring's axes last, as one: the rank before is one place down along them, the last one before the first
        turned = np.moveaxis(own, around, range(-len(around), 0))
        before = np.roll(turned.reshape(*turned.shape[: len(axes) - len(around)], -1), 1, -1).reshape(turned.shape)
        return RingElements(
            math.prod(own.shape[axis] for axis in around),
            own,
            np.moveaxis(before, range(-len(around), 0), around),
            own.sum(around, keepdims=True),
            own.max(around, keepdims=True),
        )

    def ring_axes(self, name: str) -> list[str]:
        """Return the axes along which the parts of a block lie, major to minor."""
        # those of the dim that the operand lacks (X has no N), as far as they refine it at rest; along the others it is
        # the same, and no rank has anything to pass on
        layout: Layout = getattr(self, name)
        return [axis for axis in self.spare(name).axes if axis in layout.cut_axes]

    def work(self, coord: MeshCoordinate) -> int:
        """Return the multiply-adds of one of the three products on a rank."""
        return math.prod(b - a for a, b in (c.owned(self.x.piece(c, coord)) for c in (self.m, self.k, self.n)))

    @cached_property
    def most_work(self) -> int:
        """Most multiply-adds of one of the three products on any rank."""
        # each axis cuts one of M, K and N, so some rank has the longest piece of all three
        return math.prod(max(b - a for a, b in pairwise(cut.points)) for cut in (self.m, self.k, self.n))

    @cached_property
    def worst(self) -> int:
        """Most elements that a rank receives, forward and backward."""
        return int(sum((*self._received.values(), *self._received_backward.values()), np.zeros((), np.int64)).max())

    def products(self, coord: MeshCoordinate) -> int:
        """Return how many pairs of non-empty parts of X and W a rank multiplies in the forward pass."""
        x, w = self.ring("x", coord), self.ring("w", coord)
        return sum(map(bool, map(box_elements, x.boxes))) * sum(map(bool, map(box_elements, w.boxes)))

    def stream(self, a: str, b: str) -> str:
        """Return which of two operands passes through in parts while the other's block is kept: the one that moves,
        else the larger.
        """
        # a moving operand arrives in parts anyhow; keeping the other costs one block of memory and saves another gather
        # for each part
        moving = [name for name in (a, b) if self._moves(name)]
        return max(moving or (a, b), key=lambda name: math.prod(c.size / c.pieces for c in self.blocks(name)))

    def _moves(self, name: str) -> bool:
        return not set(self.spare(name).axes).isdisjoint(getattr(self, name).cut_axes)

    def transient(self, coord: MeshCoordinate) -> int:
        """Return the most elements that a rank holds beyond its tensors at rest, in the worst of the three products.

        These are a kept block, two parts of the operand that streams through, and two of the result.
        """
        return int(np.broadcast_to(self._transient, self._elements["x"].own.shape)[coord])

    @cached_property
    def _transient(self) -> NDArray[np.int64]:
        # forward, then the gradients of X and of W: both need that of Y, which is gathered once and kept
        plans = (("x", "w", "y", ()), ("y", "w", "x", ("y",)), ("y", "x", "w", ("y",)))
        elements = [self._transient_of(a, b, out, kept) for a, b, out, kept in plans]
        return np.maximum(np.maximum(*elements[:2]), elements[2])

    def _transient_of(self, a: str, b: str, out: str, kept: Sequence[str]) -> NDArray[np.int64]:
        # while a result is reduced, its parts are made one by one, so both operands must be whole by then
        reducing = self._moves(out)
        held = 2 * self._elements[out].largest if reducing else np.zeros((), np.int64)
        for name in (a, b):
            ring = self._elements[name]
            keeps = reducing or name in kept or name != self.stream(a, b)
            if ring.size > 1:
                held = held + (ring.block + ring.largest if keeps else 2 * ring.largest)
        return held

    @cached_property
    def most_transient(self) -> int:
        """Most transient elements on any rank."""
        return int(self._transient.max())


def _lengths_over_mesh(layout: Layout, cut: Cut) -> NDArray[np.int64]:
    """Return the rows of a cut that each rank owns."""
    return values_over_mesh(layout.axes, cut.axes, np.diff(np.array(cut.points, np.int64)))


def _check_rest(rest: str) -> None:
    if len(rest) != 3 or any(d not in dims for d, dims in zip(rest, OPERAND_DIMS.values(), strict=True)):
        raise ShardingError(
            f"rest={rest!r} must name a dim of X ('m' or 'k'), of W ('n' or 'k') and of Y ('m' or 'n'), as in 'mnm'"
        )


def refine_cut(cut: Cut, axes: Sequence[str], sizes: Mapping[str, int], split: str = "balanced") -> Cut:
    """Return `cut` with every piece cut again by `axes`, which become its minor axes."""
    parts = math.prod(sizes[a] for a in axes)
    if parts == 1:
        return cut
    # each piece by itself, not the whole dim anew: a part at rest must lie inside its block, however uneven
    points = [0]
    lengths = {stop - start for start, stop in pairwise(cut.points)}
    # a balanced cut has pieces of two lengths, so each is computed once
    within = {length: cut_points(length, parts, split)[1:] for length in lengths}
    for start, stop in pairwise(cut.points):
        points += [start + p for p in within[stop - start]]
    return Cut(cut.size, tuple(points), (*cut.axes, *axes))


@lru_cache(maxsize=4096)
def _matmul_ring(grid: MatmulGrid, name: str, coord: MeshCoordinate) -> MatmulRing:
    layout: Layout = getattr(grid, name)
    axes = grid.ring_axes(name)
    corner = [block.owned(layout.piece(block, coord))[0] for block in grid.blocks(name)]
    names = [axis for axis, _ in layout.axes]
    at = dict(zip(names, coord, strict=True))
    peers: list[int] = []
    boxes: list[Box] = []
    for places in product(*(range(layout.size_of(a)) for a in axes)):
        # ranks with this rank's place on all other axes; boxes count from the block's corner, as the engine does
        peer_coord = tuple({**at, **dict(zip(axes, places, strict=True))}[axis] for axis in names)
        peers.append(layout.index(peer_coord))
        boxes.append(tuple((a - c, b - c) for (a, b), c in zip(layout.owned(peer_coord), corner, strict=True)))
    return MatmulRing(tuple(peers), tuple(boxes), peers.index(layout.index(coord)))


# -- choosing ---------------------------------------------------------------------------------------------------------


def candidate_grids(shape: tuple[int, int, int], ranks: int | Mapping[str, int]) -> list[MatmulGrid]:
    """Return every grid: all p1 x p2 x p3 = ranks, or, on named axes, every way to give each axis to M, K or N."""
    if isinstance(ranks, int):
        triples = ((a, b, ranks // (a * b)) for a in _divisors(ranks) for b in _divisors(ranks // a))
        return [MatmulGrid.of(shape, p) for p in triples]
    axes = tuple(ranks.items())
    roles = product("mkn", repeat=len(axes))
    named = ({d: tuple(a for (a, _), r in zip(axes, role, strict=True) if r == d) for d in "mkn"} for role in roles)
    return [MatmulGrid.by(shape, axes, by["m"], by["k"], by["n"]) for by in named]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def choose_grid(grids: Iterable[MatmulGrid], memory: int | None = None) -> MatmulGrid:
    """Choose the grid that moves the fewest elements in a training step on the busiest rank, then needs the least
    transient memory.

    `memory` is the most transient elements a rank may hold.  Among equals, the one that leaves the largest of X, W and
    Y in place wins.

    Raises: `ShardingError` when no grid fits in `memory`.
    """
    every = list(grids)
    fitting = [g for g in every if memory is None or g.most_transient <= memory]
    if not fitting:
        least = min((g.most_transient for g in every), default=0)
        raise ShardingError(
            f"memory={memory} elements: every one of {len(every)} grids needs more; the least is {least}; raise "
            "memory or use more ranks"
        )
    # ranks without work first (8 ranks over a K of 3 rows), then bytes; otherwise a grid where one rank does all the
    # work and nothing moves would win
    return min(fitting, key=lambda g: (_work_imbalance(g), g.worst, _is_largest_moved(g), g.most_transient))


def _work_imbalance(grid: MatmulGrid) -> int:
    """Return how often the busiest rank's work exceeds the mean, in whole times: ranks without work are worse than any
    traffic.
    """
    mean = math.prod(grid.shape) / max(grid.x.ranks, 1)
    return int(grid.most_work / mean) if mean else 0


def _is_largest_moved(grid: MatmulGrid) -> bool:
    largest = max(OPERAND_DIMS, key=lambda name: math.prod(getattr(grid, name).shape))
    return grid.spare(largest).pieces > 1
