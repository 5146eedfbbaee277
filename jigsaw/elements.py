"""What would take a tile apart element by element, in C code that knows it for a sequence, is refused or answered at
once.
"""

from __future__ import annotations

import opcode
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from jigsaw.layout import ShardingError

_BINARY_SUBSCRIPT = 26  # Python 3.14's number for a[b] among binary operators


def is_in_subscript() -> bool:
    """Whether the caller of the method that asks is at ``a[b]``, ``a[b] = c`` or ``del a[b]``.

    C code that takes an object for a sequence calls the same methods as Python code does.  But ``tile[0]`` is such an
    instruction of its caller and ``len(tile)`` is none; torch, which looks for a tuple in the index of ``plain[tile]``,
    asks for the length in one, and for items of what it makes a tensor of in a call.
    """
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    code, at = frame.f_code.co_code, frame.f_lasti
    while opcode.opname[code[at]] == "CACHE":  # which follow an instruction whose call Python has inlined
        at -= 2
    name = opcode.opname[code[at]]
    return name.endswith("_SUBSCR") or (name == "BINARY_OP" and code[at + 1] == _BINARY_SUBSCRIPT)


def refuse_element(shape: Sequence[int]) -> NoReturn:
    """Raise for a tile that was taken for a sequence; torch, which asks on its own behalf, then dispatches."""
    raise ShardingError(
        f"a Tile of shape {tuple(shape)} is no sequence of elements, which is what it was taken for; use "
        "tile.full_tensor() for the whole tensor, tile.local for this rank's part, or tile.select(0, i) for a row"
    )


class NoElementProtocols:
    """The protocols of arrays and numbers, for what has a `shape` and an `item()`."""

    shape: Any
    item: Any

    __array_priority__ = 1000  # an operator of an array and a tile is the tile's, as it is a tensor's

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> NoReturn:
        self._refuse("an array")

    def __dlpack__(self, **options: Any) -> NoReturn:
        self._refuse("a plain tensor")

    def __dlpack_device__(self) -> NoReturn:  # what torch.as_tensor and torch.tensor ask first
        self._refuse("a plain tensor")

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __complex__(self) -> complex:
        return complex(self.item())

    def _refuse(self, what: str) -> NoReturn:
        raise ShardingError(
            f"a Tile of shape {tuple(self.shape)} cannot become {what} by itself; use tile.full_tensor() for the whole "
            "tensor (with its gradient), or tile.local for this rank's part"
        )
