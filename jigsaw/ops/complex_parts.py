"""Complex tiles: as pairs of real numbers and back, and the marks of a lazy conjugate.

``abs``, ``angle``, ``conj``, ``torch.polar`` and ``torch.complex`` are pointwise.

>>> tile = jigsaw.shard(torch.ones(2, 9, dtype=torch.complex64), jigsaw.init_mesh(lat=1), (None, "lat"))
>>> torch.view_as_real(tile).shape, torch.view_as_complex(torch.view_as_real(tile)).dtype
(torch.Size([2, 9, 2]), torch.complex64)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jigsaw.geometry.cut import whole_dim
from jigsaw.ops.apart_copies import copied_to
from jigsaw.ops.pointwise import run_copy, run_on_tiles
from jigsaw.ops.whole_strides import whole_strides, with_strides
from jigsaw.tile.tile import Tile, implements_torch, refusal_error


@implements_torch(torch.view_as_real)
def _view_as_real(input: Tile) -> Tile:
    """Return [...] as [..., 2], whose last dim nothing cuts; a halo stays."""
    input = _resolve_conj(input)
    pairs = Tile(torch.view_as_real(input.local), input.layout.insert(input.ndim, 2), input.mesh)
    return with_strides(pairs, (*_strides_of_parts(input), 1), input)


def _strides_of_parts(tile: Tile) -> tuple[int, ...]:
    """Return the strides of the real or the imaginary parts, in real numbers."""
    return tuple([2 * n for n in whole_strides(tile)])


def _answer_part(function: Any) -> None:
    def part(input: Tile) -> Any:
        if not input.dtype.is_complex:
            function(input.local)  # the imaginary part of a real number is an error
            return input
        return with_strides(run_on_tiles(function, input), _strides_of_parts(input), input)

    implements_torch(function)(part)


_answer_part(torch.real)
_answer_part(torch.imag)


@implements_torch(torch.view_as_complex)
def _view_as_complex(input: Tile) -> Tile:
    """Return [..., 2] as [...]."""
    last = input.ndim - 1
    if last < 0 or input.shape[last] != 2:
        raise RuntimeError(
            f"view_as_complex of a Tile of shape {tuple(input.shape)}: its last dim must have size 2, for the real and "
            "the imaginary part"
        )
    if input.layout.dim(last) != (whole_dim(2),):
        if input.layout.is_cut(last):
            raise refusal_error(
                torch.view_as_complex,
                input,
                "its last dim, the real and the imaginary part, is cut",
                "redistribute the tile so that another dim is cut",
            )
        input = input.with_layout(input.layout.replace_dim(last, whole_dim(2)))
    strides, source, local = whole_strides(input), input, input.local
    if local.stride(last) != 1 or any(n % 2 for n in (*local.stride()[:-1], local.storage_offset())):
        # rows that came from other ranks may have other strides
        local = copied_to(input, input.layout).local.contiguous()
    out = Tile(torch.view_as_complex(local), input.layout.drop((last,)), input.mesh)
    return with_strides(out, tuple([n // 2 for n in strides[:-1]]), source)


@implements_torch(Tensor.resolve_conj, torch.resolve_conj)
def _resolve_conj(input: Tile) -> Tile:
    return run_copy(Tensor.resolve_conj, input)


@implements_torch(Tensor.resolve_neg, torch.resolve_neg)
def _resolve_neg(input: Tile) -> Tile:
    return run_copy(Tensor.resolve_neg, input)
