"""Four ways of attention over cut tokens: what each sends and holds, and the rule that chooses one.

P ranks cut the tokens of queries and keys.  *gathered*: each rank gets all keys and values, in one message from each of
the others.  *ring*: keys and values go around the ranks block by block (`jigsaw.nn.attention.ring_attention`).
*heads*: an exchange of queries, keys and values gives each rank all tokens of its heads. Then y returns (Jacobs et al.,
"DeepSpeed Ulysses", arXiv 2309.14509).  *heads+ring*: neighbors share out heads, so that each has their tokens of its
share.  These go around the ranks that have the same share of other tokens (Fang and Zhao, "USP", arXiv 2405.07719; Gu
et al., "LoongTrain", arXiv 2406.18485).

Example: four ranks, 1000 tokens of 8 heads of 64 features in bfloat16, 2 kB a token in k and v together.  Gathered or
around the ring each rank sends its 250 tokens three times, 1.5 MB, and holds 2 or 1.5 MB.  By heads it sends 3/4 of its
250 tokens of q, k, v and y, 0.75 MB, and holds 1 MB.  By heads and rings of two it sends twice 0.5 MB.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise, product
from typing import Literal

from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, cut_points
from jigsaw.geometry.layout import AxisSizes, Layout
from jigsaw.nn.attention.ring_attention import mirrored_counts
from jigsaw.nn.rank_order import CutGroup
from jigsaw.ranks.mesh import split_axis_mesh
from jigsaw.tile.tile import Tile


@dataclass(frozen=True)
class RankSplit:
    """Number of pieces of each cut of the tokens, and how many neighboring pieces share out heads.

    Example: eight ranks, ``lat=4, lon=2``, and heads for four of them.  Ranks 0 to 3 share out the heads of the first
    half of the tokens, ranks 4 to 7 those of the second. Rings of two pass the halves on.  So the heads get lon and the
    minor half of lat, which becomes ``lat.ring=2, lat.heads=2``.
    """

    pieces: tuple[int, ...]
    shares: tuple[int, ...]

    @property
    def head_ranks(self) -> int:
        return math.prod(self.shares)

    @property
    def ring_ranks(self) -> int:
        return math.prod(self.pieces) // self.head_ranks

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Place of each rank in its ring, and its share of the heads."""
        coordinates: list[tuple[int, int]] = []
        for at in product(*map(range, self.pieces)):
            in_ring = of_heads = 0
            for place, pieces, share in zip(at, self.pieces, self.shares, strict=True):
                in_ring = in_ring * (pieces // share) + place // share
                of_heads = of_heads * share + place % share
            coordinates.append((in_ring, of_heads))
        return tuple(coordinates)

    def summed_by_ring(self, rows: Sequence[int]) -> tuple[int, ...]:
        sums = [0] * self.ring_ranks
        for count, (at, _) in zip(rows, self.places, strict=True):
            sums[at] += count
        return tuple(sums)

    def __str__(self) -> str:
        return f"rings of {self.ring_ranks} ranks, heads shared out by {self.head_ranks}"


@lru_cache(maxsize=1024)
def splits_of_cuts(cuts: CutGroup, sizes: AxisSizes, within_axes: bool) -> tuple[RankSplit, ...]:
    """Return every split of the ranks, minor axes first to the heads; `within_axes`: an axis may be divided, too."""
    known = dict(sizes)

    def is_possible(split: RankSplit) -> bool:
        of_each = zip(cuts, split.shares, strict=True)
        return all(_axes_of_share(c.axes, share, known, within_axes) is not None for c, share in of_each)

    return tuple([split for split in splits_of_pieces(tuple([c.pieces for c in cuts])) if is_possible(split)])


def splits_of_pieces(pieces: tuple[int, ...]) -> tuple[RankSplit, ...]:
    """Return every split of ranks that cut tokens into `pieces`, a number for each dim."""
    shares = [[n for n in range(1, count + 1) if count % n == 0] for count in pieces]
    splits = [RankSplit(pieces, some) for some in product(*shares)]
    return tuple([split for split in splits if min(split.head_ranks, split.ring_ranks) > 1])


def _axes_of_share(
    axes: Sequence[str], share: int, sizes: Mapping[str, int], within_axes: bool
) -> tuple[tuple[str, int], ...] | None:
    """Return how many places of each axis make `share` neighboring pieces, minor axes first, or None where none do."""
    shares: list[tuple[str, int]] = []
    for axis in reversed(axes):
        size = sizes[axis]
        part = math.gcd(size, share)
        if share > 1 and part not in (size, share):
            return None
        if 1 < part < size and not within_axes:
            return None
        shares.append((axis, part))
        share //= part
    return tuple(shares) if share == 1 else None


@dataclass(frozen=True)
class SplitAxes:
    """Axes of the tokens, each going to heads or to rings; an axis that went both ways has become two."""

    heads: tuple[str, ...]
    parted: tuple[tuple[str, AxisSizes], ...]

    @classmethod
    def of(cls, split: RankSplit, cuts: CutGroup, sizes: AxisSizes) -> SplitAxes:
        known, heads = dict(sizes), list[str]()
        parted: list[tuple[str, AxisSizes]] = []
        for cut, share in zip(cuts, split.shares, strict=True):
            for axis, count in reversed(_axes_of_share(cut.axes, share, known, within_axes=True) or ()):
                if count == known[axis]:
                    heads.append(axis)
                elif count > 1:
                    parted.append((axis, ((f"{axis}.ring", known[axis] // count), (f"{axis}.heads", count))))
                    heads.append(f"{axis}.heads")
        return cls(tuple(heads), tuple(parted))

    def mesh(self, mesh: DeviceMesh) -> DeviceMesh:
        for axis, parts in self.parted:
            mesh = split_axis_mesh(mesh, axis, parts)
        return mesh

    def tile(self, x: Tile) -> Tile:
        own = x.owned()
        return Tile(own.local, _layout_by_parts(own.layout, self.parted), self.mesh(x.mesh)) if self.parted else own


@lru_cache(maxsize=1024)
def _layout_by_parts(layout: Layout, parted: tuple[tuple[str, AxisSizes], ...]) -> Layout:
    parts = dict(parted)

    def names(axis: str) -> tuple[str, ...]:
        return tuple([name for name, _ in parts[axis]]) if axis in parts else (axis,)

    dims = [
        [Cut(c.size, c.points, tuple([n for a in c.axes for n in names(a)])) for c in group] for group in layout.dims()
    ]
    axes = tuple([new for axis, size in layout.axes for new in parts.get(axis, ((axis, size),))])
    return Layout.from_dims(dims, axes)


AttentionWay = Literal["gathered", "ring", "heads", "heads+ring"]
_WAYS: tuple[AttentionWay, ...] = ("gathered", "ring", "heads", "heads+ring")
# keys and values of at most these bytes are gathered, because the number of messages decides their cost
SMALL_KEYS_BYTES = 1 << 20


@dataclass(frozen=True)
class AttentionSizes:
    """Sizes on the ranks that cut the tokens of an attention: tokens of each of them, and elements of a token."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    key_heads: int  # heads that the ranks could share out; 0 where there is no such dim
    query_row: int  # elements of a token in q and y together, over a rank's heads and batch
    key_row: int  # the same in k and v together
    itemsize: int
    splits: tuple[RankSplit, ...] = ()  # the ways to split these ranks into head ranks and ring ranks
    is_mirrored: bool = False  # True where ranks of a ring exchange queries (`jigsaw.nn.attention.ring_attention`)

    @classmethod
    def of_tokens(
        cls, tokens: int, ranks: int, heads: int, features: int, itemsize: int = 2, is_mirrored: bool = False
    ) -> AttentionSizes:
        """Return the sizes of self-attention with `heads` heads of `features` features each, and balanced tokens."""
        rows = tuple([b - a for a, b in pairwise(cut_points(tokens, ranks))])
        row, splits = 2 * heads * features, splits_of_pieces((ranks,))
        return cls(rows, rows, heads, row, row, itemsize, splits, is_mirrored)


@dataclass(frozen=True)
class WayCost:
    """Bytes that one way sends, on all ranks that cut the tokens, and bytes of keys and values that a rank holds."""

    forward: int
    backward: int
    held: int

    @property
    def sent(self) -> int:
        return self.forward + self.backward


@dataclass(frozen=True)
class AttentionChoice:
    """The way that was chosen and why, the cost of each possible way, and, for heads and rings, how ranks are split."""

    way: AttentionWay
    why: str
    costs: tuple[tuple[AttentionWay, WayCost], ...] = ()
    split: RankSplit | None = None

    def __str__(self) -> str:
        lines = [
            f"{way}: {cost.forward:,} bytes sent forward, {cost.backward:,} backward, by all ranks that cut the "
            f"tokens; {cost.held:,} bytes of keys and values on a rank"
            for way, cost in self.costs
        ]
        return "\n".join([f"{self.way}, {self.why}", *lines])


@lru_cache(maxsize=1024)
def _costs_and_split(sizes: AttentionSizes) -> tuple[dict[AttentionWay, WayCost], RankSplit | None]:
    """Return the cost of each way, in integers, as `jigsaw.comm.count` has them, and the best split."""
    ranks, every, largest = len(sizes.keys), sum(sizes.keys), max(sizes.keys)
    row = sizes.key_row * sizes.itemsize
    around = (ranks - 1) * every * row
    costs: dict[AttentionWay, WayCost] = {
        "gathered": WayCost(around, around, every * row),
        "ring": _ring_cost(sizes, sizes.queries, sizes.keys),
    }
    if not sizes.key_heads:
        return costs, None
    sent = _bytes_by_heads(sizes, range(ranks), ranks)
    whole = every * row * _most_heads(sizes, ranks) // sizes.key_heads
    costs["heads"] = WayCost(sent, sent, largest * row + whole)
    if not sizes.splits:
        return costs, None
    both = {split: _split_cost(sizes, split) for split in sizes.splits}
    # where no split has enough heads, take the one that leaves the fewest ranks without a head
    split = min(both, key=lambda s: (max(s.head_ranks - sizes.key_heads, 0), both[s].sent))
    costs["heads+ring"] = both[split]
    return costs, split


def _ring_cost(sizes: AttentionSizes, queries: Sequence[int], keys: Sequence[int]) -> WayCost:
    """Return the cost of rings whose ranks have these numbers of tokens, over all shares of the heads."""
    around = (len(keys) - 1) * sum(keys) * sizes.key_row
    # gradients of bfloat16 and float16 are summed in float32 on their way
    returned = around * max(sizes.itemsize, 4)
    mirrored = sum(mirrored_counts(queries)) * sizes.query_row if sizes.is_mirrored else 0
    forward = (around + mirrored) * sizes.itemsize
    return WayCost(forward, forward + returned, 3 * max(keys) * sizes.key_row * sizes.itemsize)


def _most_heads(sizes: AttentionSizes, ranks: int) -> int:
    return max(b - a for a, b in pairwise(cut_points(sizes.key_heads, ranks)))


def _bytes_by_heads(sizes: AttentionSizes, shares: Sequence[int], ranks: int) -> int:
    """Return the bytes that bring each of `ranks` ranks its share of the heads, and take the result back."""
    heads = [b - a for a, b in pairwise(cut_points(sizes.key_heads, ranks))]
    # for its tokens, a rank sends heads that are not its share and gets their y back: over all, as many bytes as q
    moved = sum(
        (q * sizes.query_row + k * sizes.key_row) * (sizes.key_heads - heads[share]) // sizes.key_heads
        for q, k, share in zip(sizes.queries, sizes.keys, shares, strict=True)
    )
    return moved * sizes.itemsize


def _split_cost(sizes: AttentionSizes, split: RankSplit) -> WayCost:
    moved = _bytes_by_heads(sizes, [share for _, share in split.places], split.head_ranks)
    rings = _ring_cost(sizes, split.summed_by_ring(sizes.queries), split.summed_by_ring(sizes.keys))
    own = max(sizes.keys) * sizes.key_row * sizes.itemsize
    held = own + rings.held * _most_heads(sizes, split.head_ranks) // sizes.key_heads
    return WayCost(moved + rings.forward, moved + rings.backward, held)


@lru_cache(maxsize=1024)
def choose_attention_way(
    sizes: AttentionSizes, asked_way: AttentionWay | None = None, is_mask_cut: bool = False
) -> AttentionChoice:
    """Choose the way by the rule, or take the user's `asked_way`. The first of these that holds:

    1. *gathered* where all keys and values are at most a mebibyte, because it has the fewest messages; 2. *heads* or
    *heads+ring* where each rank that shares out heads has a head of keys, and no other way sends less (forward and
    backward together). Also no axis may cut a mask, because all ranks would have to be asked for its rows; 3. *ring*
    where all keys and values are more than what a rank has of queries, keys, values and results; *heads+ring* where
    that sends less, under the conditions of 2; 4. *gathered*.

    *Raises*: `ShardingError` for heads without a dim of heads, and heads+ring on ranks that cannot go both ways.

    A vision transformer of 4 billion parameters, 2816 features in 44 heads, 64,980 tokens in bfloat16, P = 8:

    >>> from jigsaw.nn.attention.attention_ways import AttentionSizes, choose_attention_way
    >>> choice = choose_attention_way(AttentionSizes.of_tokens(64_980, ranks=8, heads=44, features=64))
    >>> choice.way
    'heads'
    >>> for way, cost in choice.costs:
    ...     print(way, cost.forward // 8, cost.backward // 8, cost.held)
    gathered 640442880 640442880 731934720
    ring 640442880 1921328640 274492416
    heads 160110592 160110592 191306752
    heads+ring 228729600 411713280 365989888
    >>> choice = choose_attention_way(AttentionSizes.of_tokens(64_980, ranks=64, heads=44, features=64))
    >>> choice.way, str(choice.split)
    ('heads+ring', 'rings of 2 ranks, heads shared out by 32')
    """
    costs, split = _costs_and_split(sizes)
    ranks = len(sizes.keys)
    whole = costs["gathered"].held
    own = (max(sizes.queries) * sizes.query_row + max(sizes.keys) * sizes.key_row) * sizes.itemsize
    for_heads: dict[AttentionWay, int] = {"heads": ranks}
    if split is not None:
        for_heads["heads+ring"] = split.head_ranks
    # the splits that leave no rank without a head
    usable: list[AttentionWay] = [
        by for by, n in for_heads.items() if not is_mask_cut and by in costs and sizes.key_heads >= n
    ]
    best: AttentionWay | None = min(usable, key=lambda by: costs[by].sent, default=None)
    way: AttentionWay
    if asked_way is not None:
        _check_said(asked_way, costs, sizes)
        way, why = asked_way, "as attention_way says"
    elif whole <= SMALL_KEYS_BYTES:
        way, why = "gathered", f"as all keys and values are {whole:,} bytes, at most {SMALL_KEYS_BYTES:,}"
    elif best is not None and costs[best].sent <= min(costs["gathered"].sent, costs["ring"].sent):
        way = best
        why = f"as {sizes.key_heads} heads are enough for {for_heads[best]} ranks and no way sends less"
    elif whole > own:
        is_less = split is not None and "heads+ring" in usable and costs["heads+ring"].sent < costs["ring"].sent
        way = "heads+ring" if is_less else "ring"
        why = f"as all keys and values, {whole:,} bytes, are more than a rank has in q, k, v and y, {own:,}"
    else:
        way, why = "gathered", f"as all keys and values, {whole:,} bytes, are no more than a rank has, {own:,}"
    if way == "heads+ring":
        why = f"{split}, {why}"
    return AttentionChoice(way, why, tuple(costs.items()), split if way == "heads+ring" else None)


def _check_said(way: AttentionWay, costs: dict[AttentionWay, WayCost], sizes: AttentionSizes) -> None:
    if way in costs:
        return
    if not sizes.key_heads:
        raise ShardingError(
            f"attention_way({way!r}): queries, keys and values have no dim of heads, a third one from the end that "
            "all have alike, for the ranks to share out; use attention_way('ring') or 'gathered'"
        )
    raise ShardingError(
        f"attention_way({way!r}): the {len(sizes.keys)} ranks that cut the tokens cannot go both ways: their number "
        "must have a divisor, and where the mesh leaves out ranks of the job an axis goes one way; use "
        "attention_way('ring'), 'heads' or 'gathered'"
    )


# a value of the process, not of a thread, because autograd runs a checkpointed layer again in its own threads
_said: list[AttentionWay | None] = [None]


@contextmanager
def attention_way(way: AttentionWay | None) -> Generator[None]:
    """Let attention over cut tokens go ``"gathered"``, ``"ring"``, ``"heads"`` or ``"heads+ring"`` within the block.
    None: by the rule (`jigsaw.nn.explain_attention` tells which).  All ways are exact.

    This changes nothing where no axis cuts both queries and keys.  Checkpointed layers run again in the backward pass,
    which then belongs within the block, too.

    *Raises*: `ShardingError` for another word. So does a call for heads without a dim of heads, and for heads and rings
    where a prime number of ranks cuts the tokens.

    >>> mesh = jigsaw.init_mesh(lat=1)
    >>> q = jigsaw.shard(torch.randn(2, 4, 16, 8), mesh, (None, None, "lat", None))
    >>> with jigsaw.nn.attention_way("ring"):
    ...     torch.nn.functional.scaled_dot_product_attention(q, q, q).shape
    torch.Size([2, 4, 16, 8])
    """
    if way is not None and way not in _WAYS:
        raise ShardingError(f"attention_way({way!r}): use one of {_WAYS}, or None for the rule")
    _said.append(way)
    try:
        yield
    finally:
        _said.pop()


def said_attention_way() -> AttentionWay | None:
    """Return the way that the innermost `attention_way` sets."""
    return _said[-1]
