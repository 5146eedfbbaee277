"""Forms in which values travel: as bytes, or as values that a backend can combine.

>>> from jigsaw.comm.wire_values import order_as_integers
>>> order_as_integers(torch.tensor([-1.0, 0.0, torch.inf, torch.nan]), nan_last=True).diff() > 0
tensor([True, True, True])
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jigsaw.errors import ShardingError
from jigsaw.torch_internals.autograd import is_zero_tensor, memory_id
from jigsaw.torch_internals.dispatch import without_modes

# Types that a backend cannot combine well travel as others: exact for max and min, with less rounding for sums.
_WIRE = {
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.int16: torch.int32,
    **{t: t for t in (torch.float32, torch.float64, torch.uint8, torch.int8, torch.int32, torch.int64)},
}


def is_narrow(dtype: torch.dtype) -> bool:
    """Say whether sums of the dtype are taken in float32."""
    return dtype in (torch.bfloat16, torch.float16)


def wire_dtype(dtype: torch.dtype, op: str) -> torch.dtype:
    """Return the dtype in which `op` is taken over ranks."""
    if op in ("sum", "max", "min", "prod") and dtype in _WIRE:
        return _WIRE[dtype]
    if (dtype.is_complex and op == "sum") or (dtype == torch.bool and op in ("max", "min")):
        return dtype
    raise ShardingError(f"all_reduce cannot take op={op!r} of {dtype} over ranks; cast to int64 or float32 first")


def order_as_integers(x: Tensor, nan_last: bool) -> Tensor:
    """Return integers in the order of the floats `x`, NaN above (or below) all, because backends lose NaN in their max
    and min.
    """
    bits = torch.where(x.isnan(), torch.nan, x).view(torch.int32 if x.dtype == torch.float32 else torch.int64)
    rising = torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits)
    return rising if nan_last else torch.where(x.isnan(), torch.iinfo(bits.dtype).min, rising)


def floats_from_order(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the floats that `order_as_integers` was given."""
    # the integer below all others decodes to a NaN too, a negative one
    return torch.where(bits < 0, bits ^ torch.iinfo(bits.dtype).max, bits).view(dtype)


def byte_view(x: Tensor) -> Tensor:
    """Return a flat byte view of contiguous memory, so that any dtype travels as it is over any backend."""
    if not x.is_contiguous():
        raise ShardingError(f"a buffer of shape {tuple(x.shape)} and strides {x.stride()} must be contiguous")
    # a single element counts as contiguous with any stride, but only stride 1 is viewed as bytes
    flat = x if x.ndim == 1 and x.stride(0) == 1 else x.as_strided((x.numel(),), (1,))
    return flat if flat.dtype == torch.uint8 else flat.view(torch.uint8)


def plain_memory(x: Tensor) -> Tensor:
    """Return contiguous memory with the values of `x`.  A lazy conjugate or negative is carried out, and zeros without
    memory (the gradient of `torch.sgn`) get some.
    """
    x = x.clone() if is_zero_tensor(x) else x
    return x.detach().resolve_conj().resolve_neg().contiguous()


_PIECE_BYTES = 2**20


def checksum_of_bits(x: Tensor) -> int:
    """Return a number of the bits of `x`, element after element: NaN equals a NaN of the same bits, and 0.0 is not
    -0.0.

    On a GPU its bytes are summed by columns and by rows of 8 kB, so that few bytes leave it.
    """
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if is_on_accelerator(flat):
        words = torch.nn.functional.pad(flat, (0, -flat.numel() % 8192)).view(torch.int64).view(-1, 1024)
        flat = torch.cat([words.sum(0), words.sum(1)]).view(torch.uint8)
    checksum = 0
    for piece in flat.split(_PIECE_BYTES):
        # a copy, because memory that numpy has seen cannot be resized again, as FSDP2 does to gathered weights
        checksum = zlib.crc32(piece.to("cpu", copy=True).numpy().data, checksum)
    return checksum


def is_on_accelerator(x: Tensor) -> bool:
    """Say whether the host would wait for a device to read values of `x`."""
    return x.device.type not in ("cpu", "meta")


def values_on_device(values: Sequence[Any] | Tensor, dtype: torch.dtype | None, device: torch.device | str) -> Tensor:
    """Return numbers of the host on a device; a GPU gets them from pinned memory, for which the host does not wait."""
    on_host = torch.as_tensor(values, dtype=dtype)
    if on_host.device.type != "cpu" or torch.device(device).type in ("cpu", "meta") or torch.compiler.is_compiling():
        return on_host.to(device)
    return on_host.pin_memory().to(device, non_blocking=True)


def places_with_values(places: NDArray[np.int64], device: torch.device) -> Tensor:
    """Return places of the host on a device, with their values in a dry run, too: what keeps them outlives it."""
    with without_modes():
        return torch.from_numpy(places).to(device)


def wire_memory(like: Tensor, shape: Sequence[int], dtype: torch.dtype | None = None) -> Tensor:
    """Return contiguous memory for what arrives, on the device of `like`, and of its dtype by default.

    Every message lands in memory from here, so that a pool, or memory that copy engines reach, has one place.
    """
    return _wire_memory_makers[-1](like, shape, dtype or like.dtype)


_wire_memory_makers: list[Callable[[Tensor, Sequence[int], torch.dtype], Tensor]] = [
    lambda like, shape, dtype: like.new_empty(shape, dtype=dtype)
]


@contextmanager
def wire_memory_by(make: Callable[[Tensor, Sequence[int], torch.dtype], Tensor]) -> Generator[None]:
    """Let ``make(like, shape, dtype)`` give the memory for what arrives within the block."""
    _wire_memory_makers.append(make)
    try:
        yield
    finally:
        _wire_memory_makers.pop()


def lie_in_one_memory(x: Tensor, y: Tensor) -> bool:
    """Say whether one is made of the other's memory; tensors without values, as of graphs, have no addresses."""
    return memory_id(x.untyped_storage()) == memory_id(y.untyped_storage())
