"""Numbers of channels, and which of them are tied: they must lie on one rank.

A tensor of numbers has the shape of the tensor whose channels it numbers, and no memory along dims that do not matter
(stride 0).  So a view of it costs nothing, whatever the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MOST_COPIED = 2**24  # most numbers that a reshape may copy


class NeedsWholeError(Exception):
    """A function that needs channels whole; the reason follows."""


def varies_along(numbers: Tensor, dim: int) -> bool:
    """Say whether the numbers differ along a dim."""
    return numbers.shape[dim] > 1 and numbers.stride(dim) != 0


def varied_dims(numbers: Tensor) -> list[int]:
    """Return the dims along which numbers differ."""
    return [d for d in range(numbers.ndim) if varies_along(numbers, d)]


def shrunk_numbers(numbers: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the numbers with size 1 along all dims except some."""
    return numbers[tuple(slice(None) if d in dims else slice(0, 1) for d in range(numbers.ndim))]


def reshaped_numbers(numbers: Tensor, shape: torch.Size) -> Tensor:
    """Return the numbers of a reshaped tensor, without a copy where none is needed."""
    try:
        return numbers.view(shape)
    except RuntimeError as error:
        kept = 0  # number of leading dims that the reshape keeps
        for size, before in zip(shape, numbers.shape, strict=False):
            if size != before or varies_along(numbers, kept):
                break
            kept += 1
        small = shrunk_numbers(numbers, range(kept, numbers.ndim))
        if small.numel() > MOST_COPIED:
            raise NeedsWholeError("it copies many channels") from error
        small = small.reshape(*(1,) * kept, *shape[kept:])
        for d in range(kept, small.ndim):
            if bool((small == small.narrow(d, 0, 1)).all()):
                small = small.narrow(d, 0, 1)
        return small.expand(shape)


class TiedNumbers:
    """Pairs of numbers of channels that lie on one rank."""

    def __init__(self) -> None:
        self.pairs: list[tuple[Tensor, Tensor]] = []

    def tie(self, one: Tensor, other: Tensor) -> None:
        one, other = torch.broadcast_tensors(one, other)
        dims = sorted({*varied_dims(one), *varied_dims(other)})
        a, b = shrunk_numbers(one, dims).flatten(), shrunk_numbers(other, dims).flatten()
        apart = a != b
        self.pairs.append((a[apart], b[apart]))

    def tie_along(self, numbers: Tensor, dims: Sequence[int]) -> Tensor:
        """Tie the numbers along some dims, and return them with one place there."""
        if set(varied_dims(numbers)) <= {d % numbers.ndim for d in dims}:
            raise NeedsWholeError("it mixes all channels")
        first = numbers
        for d in dims:
            first = first.narrow(d, 0, 1)
        self.tie(numbers, first)
        return first

    def groups(self, count: int) -> Tensor:
        """Return for each number the least that it is tied to."""
        least = torch.arange(count)
        if not self.pairs:
            return least
        a, b = (torch.cat(side) for side in zip(*self.pairs, strict=True))
        while True:
            of_a, of_b = least[a], least[b]
            if torch.equal(of_a, of_b):
                return least
            low, high = torch.minimum(of_a, of_b), torch.maximum(of_a, of_b)
            least.scatter_reduce_(0, high, low, "amin")
            while not torch.equal(least, least[least]):
                least = least[least]
