"""Three ways of attention over cut tokens: what each sends and holds, and the rule that takes one.

P ranks cut the tokens of queries and keys.  *gathered*: each gets all keys and values, one message from each of the
others.  *ring*: keys and values go around the ranks block by block (`jigsaw.nn.ring_attention`).  *heads*: queries,
keys and values are exchanged so that each rank has all tokens of its share of the heads, and y goes back (Jacobs et
al., "DeepSpeed Ulysses", arXiv 2309.14509).

Four ranks, 1000 tokens of 8 heads of 64 features in bfloat16, 2 kB a token in k and v together.  Gathered, each rank
sends its 250 tokens to three others, 1.5 MB, and holds 2 MB.  Around the ring it sends as much, in three steps, and
holds three blocks, 1.5 MB.  By heads it sends 3/4 of its 250 tokens of q, k, v and y, 0.75 MB, and holds these and all
tokens of two heads, 1 MB.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Literal

from jigsaw.cut import ShardingError, cut_points

AttentionWay = Literal["gathered", "ring", "heads"]
_WAYS: tuple[AttentionWay, ...] = ("gathered", "ring", "heads")
# keys and values of fewer bytes than this are gathered: what counts then is the number of messages
SMALL_KEYS_BYTES = 1 << 20


@dataclass(frozen=True)
class AttentionSizes:
    """What the ranks that cut the tokens of an attention have: tokens of each of them, and elements of a token."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    key_heads: int  # those that the ranks could share out; 0 where there is no such dim
    query_row: int  # elements of a token in q and y together, of all heads and all of the batch that a rank has
    key_row: int  # in k and v together
    itemsize: int

    @classmethod
    def of_tokens(cls, tokens: int, ranks: int, heads: int, features: int, itemsize: int = 2) -> AttentionSizes:
        """Self-attention of so many heads of so many features, its tokens balanced."""
        rows = tuple([b - a for a, b in pairwise(cut_points(tokens, ranks))])
        return cls(rows, rows, heads, 2 * heads * features, 2 * heads * features, itemsize)


@dataclass(frozen=True)
class WayCost:
    """Bytes that one way sends forward and backward, by all ranks that cut the tokens, and keys and values that a rank
    holds at a time in the forward pass, its own included.
    """

    forward: int
    backward: int
    held: int


@dataclass(frozen=True)
class AttentionChoice:
    """The way that was taken and why, and what each way costs; ways that cannot be gone are left out."""

    way: AttentionWay
    why: str
    costs: tuple[tuple[AttentionWay, WayCost], ...] = ()

    def __str__(self) -> str:
        lines = [
            f"{way}: {cost.forward:,} bytes sent forward, {cost.backward:,} backward, by all ranks that cut the "
            f"tokens; {cost.held:,} bytes of keys and values on a rank"
            for way, cost in self.costs
        ]
        return "\n".join([f"{self.way}, {self.why}", *lines])


def way_costs(sizes: AttentionSizes) -> dict[AttentionWay, WayCost]:
    """What each way costs: integers, as `jigsaw.comm.count` has them."""
    ranks, every, largest = len(sizes.keys), sum(sizes.keys), max(sizes.keys)
    row = sizes.key_row * sizes.itemsize
    around = (ranks - 1) * every * row
    # gradients of bfloat16 and float16 are summed in float32 on their way
    returned = (ranks - 1) * every * sizes.key_row * max(sizes.itemsize, 4)
    costs: dict[AttentionWay, WayCost] = {
        "gathered": WayCost(around, around, every * row),
        "ring": WayCost(around, around + returned, 3 * largest * row),
    }
    if sizes.key_heads:
        heads = [b - a for a, b in pairwise(cut_points(sizes.key_heads, ranks))]
        # each rank sends of its tokens the heads that are not its own, and gets y of those back
        moved = sum(
            (q * sizes.query_row + k * sizes.key_row) * (sizes.key_heads - own) // sizes.key_heads
            for q, k, own in zip(sizes.queries, sizes.keys, heads, strict=True)
        )
        # y comes from the ranks of the other heads: the same sum, seen from the other side
        sent = moved * sizes.itemsize
        costs["heads"] = WayCost(sent, sent, largest * row + every * row * max(heads) // sizes.key_heads)
    return costs


@lru_cache(maxsize=1024)
def choose_attention_way(
    sizes: AttentionSizes, said: AttentionWay | None = None, is_mask_cut: bool = False
) -> AttentionChoice:
    """The way by the rule, or the one that was `said`.  The first that holds:

    1. *gathered* where all keys and values are at most a mebibyte: fewest messages;
    2. *heads* where there is a head of keys for each rank and no other way sends less, forward and backward together,
       and no axis cuts a mask, for whose rows all ranks would have to be asked;
    3. *ring* where all keys and values are more than what a rank has of queries, keys, values and results;
    4. *gathered*.

    *Raises*: `ShardingError` where heads were said and there is no dim of heads.

    A vision transformer of 4 billion parameters (42 layers, 2816 features in 44 heads) on 64,980 tokens in bfloat16,
    P = 8.  A rank sends a layer, forward and backward: gathered 640 and 640 MB, ring 640 and 1,921 MB, heads 160 and
    160 MB; it holds keys and values of 732, 274 and 191 MB.

    >>> from jigsaw.nn.attention_ways import AttentionSizes, choose_attention_way
    >>> choice = choose_attention_way(AttentionSizes.of_tokens(64_980, ranks=8, heads=44, features=64))
    >>> choice.way
    'heads'
    >>> [(way, cost.forward // 8, cost.backward // 8) for way, cost in choice.costs]
    [('gathered', 640442880, 640442880), ('ring', 640442880, 1921328640), ('heads', 160110592, 160110592)]
    >>> [cost.held for _, cost in choice.costs]
    [731934720, 274492416, 191306752]
    """
    costs = way_costs(sizes)
    ranks = len(sizes.keys)
    whole = costs["gathered"].held
    own = (max(sizes.queries) * sizes.query_row + max(sizes.keys) * sizes.key_row) * sizes.itemsize
    sent = {way: cost.forward + cost.backward for way, cost in costs.items()}
    way: AttentionWay
    if said is not None:
        if said not in costs:
            raise ShardingError(
                "attention_way('heads'): queries, keys and values have no dim of heads, a third one from the end that "
                "all have alike, for the ranks to share out; use attention_way('ring') or 'gathered'"
            )
        way, why = said, "as attention_way says"
    elif whole <= SMALL_KEYS_BYTES:
        way, why = "gathered", f"as all keys and values are {whole:,} bytes, at most {SMALL_KEYS_BYTES:,}"
    elif not is_mask_cut and sizes.key_heads >= ranks and sent["heads"] == min(sent.values()):
        way, why = "heads", f"as {sizes.key_heads} heads are enough for {ranks} ranks and no way sends less"
    elif whole > own:
        way, why = (
            "ring",
            f"as all keys and values, {whole:,} bytes, are more than a rank has in q, k, v and y, {own:,}",
        )
    else:
        way, why = "gathered", f"as all keys and values, {whole:,} bytes, are no more than a rank has, {own:,}"
    return AttentionChoice(way, why, tuple(costs.items()))


# -- what a user says -------------------------------------------------------------------------------------------------

# of the process, not of a thread: autograd runs a checkpointed layer again in threads of its own
_said: list[AttentionWay | None] = [None]


@contextmanager
def attention_way(way: AttentionWay | None) -> Generator[None]:
    """Within it, attention over cut tokens goes this way: ``"gathered"``, ``"ring"`` or ``"heads"``; None: by the rule
    (`jigsaw.nn.explain_attention` tells which).  All three are exact.

    Attention whose queries and keys no axis cuts both goes as it does.  Layers that are checkpointed run again in the
    backward pass, which then belongs within it, too.

    *Raises*: `ShardingError` for another word; where attention is called, for heads where there is no dim of heads.

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
    """What the innermost `attention_way` says."""
    return _said[-1]
