"""Dtypes for which torch has no kernel, refused by torch's own error on every rank, before anything is sent.

Torch looks for a kernel only where there are rows, so a rank without any would go on, and wait for those that raised.
Therefore functions of `_SAMPLES` are first called on a sample: zeros of the operands' dtypes, at most two in each dim.
Operands that all have float32, or all float64, need none, and one sample is enough for all later calls alike.

>>> tile = jigsaw.shard(torch.ones(2, 2, dtype=torch.bool), jigsaw.init_mesh(lat=1), ("lat", None))
>>> tile @ tile
Traceback (most recent call last):
NotImplementedError: "addmm_impl_cpu_" not implemented for 'Bool'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache, wraps
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw.ops.pointwise import functions_named
from jigsaw.tile.table import table
from jigsaw.tile.tile import TileHandler, tiles_in
from jigsaw.torch_internals.dispatch import without_modes

_Sample = Callable[..., Any]

# -- samples: each calls the function with operands of two rows in each dim ------------------------------------------


def _as_called(function: Any, *args: Any, **kwargs: Any) -> Any:
    return function(*args, **kwargs)


def _with_one_group(
    function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None, *_: Any, **__: Any
) -> Any:
    return function(input, weight, bias)


def _with_one(function: Any, input: Tensor, *_: Any, **__: Any) -> Any:
    """Call it with windows of one row, one group, or one bin."""
    return function(input, 1)


def _adaptive(function: Any, input: Tensor, output_size: Any, *_: Any, **__: Any) -> Any:
    """Call an adaptive pool; one window of all rows is a mean to torch, for which it has more kernels."""
    sizes = (output_size,) * 3 if output_size is None or isinstance(output_size, int) else tuple(output_size)
    return function(input, [1 if n == 1 else 2 for n in sizes[: _ADAPTIVE_DIMS[function]]])


def _padded(function: Any, input: Tensor, pad: Sequence[int], mode: str = "constant", *_: Any, **__: Any) -> Any:
    return function(input, [1] * len(pad), mode)


def _resampled(
    function: Any,
    input: Tensor,
    size: Any = None,
    scale_factor: Any = None,
    mode: str = "nearest",
    align_corners: bool | None = None,
    recompute_scale_factor: bool | None = None,
    antialias: bool = False,
) -> Any:
    return function(input, [3] * (input.ndim - 2), None, mode, align_corners, None, antialias)


def _sampled(function: Any, input: Tensor, grid: Tensor, *args: Any, **kwargs: Any) -> Any:
    return function(input, grid[..., :1].expand(*grid.shape[:-1], grid.ndim - 2), *args, **kwargs)


def _normalized(function: Any, input: Tensor, *_: Any, **__: Any) -> Any:
    return function(input)


def _normalized_by_batch(function: Any, input: Tensor, *_: Any, **__: Any) -> Any:
    return function(input, None, None, training=True)


def _normalized_by_layer(function: Any, input: Tensor, *_: Any, **__: Any) -> Any:
    return function(input, [2])


_ADAPTIVE_DIMS = {
    function: dims
    for dims in (1, 2, 3)
    for kind in ("avg", "max")
    for function in functions_named(f"adaptive_{kind}_pool{dims}d adaptive_{kind}_pool{dims}d_with_indices")
}
_BY_DIMS = [f"{dims}d" for dims in (1, 2, 3)]
_SAMPLES: dict[Any, _Sample] = {
    function: sample
    for sample, functions in (
        (
            _as_called,
            functions_named("matmul mm bmm mv inner addmm addbmm baddbmm addmv tensordot einsum linear bilinear")
            | {
                Tensor.__matmul__,
                Tensor.__rmatmul__,
                F.scaled_dot_product_attention,
                F.multilabel_margin_loss,
                torch.histogram,
            }
            | functions_named("gather take_along_dim bucketize searchsorted cdist pdist")
            | functions_named("index_add index_copy index_reduce scatter scatter_add scatter_reduce", ends=("", "_")),
        ),
        (_with_one_group, functions_named("conv conv_transpose", ends=_BY_DIMS)),
        (_with_one, functions_named("avg_pool max_pool", ends=_BY_DIMS) | {F.unfold}),
        (_with_one, {F.local_response_norm, F.group_norm, torch.histogramdd}),
        (_with_one, {F.max_pool1d_with_indices, F.max_pool2d_with_indices, F.max_pool3d_with_indices}),
        (_adaptive, _ADAPTIVE_DIMS),
        (_padded, {F.pad}),
        (_resampled, {F.interpolate}),
        (_sampled, functions_named("grid_sample")),
        (_normalized, {F.instance_norm}),
        (_normalized_by_batch, {F.batch_norm}),
        (_normalized_by_layer, {F.layer_norm, F.rms_norm}),
    )
    for function in functions
}


# -- before a call ----------------------------------------------------------------------------------------------------


class _Operand(NamedTuple):
    """Dtype of a tensor, and its sizes as a sample has them: 0, 1, or 2 for more."""

    dtype: torch.dtype
    sizes: tuple[int, ...]


def _with_check(function: Any, handler: TileHandler) -> TileHandler:
    """Return the handler of a function, which is called on a sample first where its operands are not alike floats."""
    if function not in _SAMPLES:
        return handler

    @wraps(handler)
    def checked(*args: Any, **kwargs: Any) -> Any:
        first = None
        for x in (*args, *kwargs.values()) if kwargs else args:
            dtypes = [y.dtype for y in x if isinstance(y, Tensor)] if type(x) in (list, tuple) else ()
            for dtype in (x.dtype,) if isinstance(x, Tensor) else dtypes:
                if dtype is not first and (first is not None or dtype not in _HAVE_ALL_KERNELS):
                    _check_kernel(function, args, kwargs)
                    return handler(*args, **kwargs)
                first = dtype
        return handler(*args, **kwargs)

    return checked


table.with_check = _with_check
_HAVE_ALL_KERNELS = frozenset((torch.float32, torch.float64))


def _check_kernel(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    device = next(tiles_in((args, kwargs))).device.type
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    _try_kernel(function, device, cast, tuple(map(_as_operand, (*args, *kwargs.values()))), tuple(kwargs))


def _as_operand(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _Operand(value.dtype, tuple([min(n, 2) for n in value.shape]))
    return tuple(map(_as_operand, value)) if type(value) in (list, tuple) else value


@lru_cache(maxsize=1024)
def _try_kernel(
    function: Any, device: str, cast: torch.dtype | None, values: tuple[Any, ...], names: tuple[str, ...]
) -> None:
    """Call the function on a sample, as torch is set: `cast` is the dtype of autocast.

    *Raises*: what torch raises, unless it refuses the sample whatever its dtypes are.
    """
    dtypes = [x.dtype for x in _operands_in(values)]
    try:
        _call_on_sample(function, device, values, names, dtypes)
    except Exception:
        for others in product(_DATA_OR_INDEX, repeat=len(dtypes)):
            with suppress(Exception):
                _call_on_sample(function, device, values, names, others)
                break
        else:
            return
        raise


def _call_on_sample(
    function: Any, device: str, values: tuple[Any, ...], names: tuple[str, ...], dtypes: Sequence[torch.dtype]
) -> None:
    sample, remaining = _SAMPLES[function], iter(dtypes)

    def made(value: Any) -> Any:
        if isinstance(value, _Operand):
            sizes = value.sizes if sample is _as_called else [n and 2 for n in value.sizes]
            return torch.zeros(sizes, dtype=next(remaining), device=device)
        return list(map(made, value)) if type(value) is tuple else value

    count = len(values) - len(names)
    # outside a dry run, which would count the sample and make its tensors without values
    with without_modes(), torch.no_grad():
        operands = list(map(made, values))
        sample(function, *operands[:count], **dict(zip(names, operands[count:], strict=True)))


def _operands_in(values: Sequence[Any]) -> Iterator[_Operand]:
    for value in values:
        if isinstance(value, _Operand):
            yield value
        elif type(value) is tuple:
            yield from _operands_in(value)


_DATA_OR_INDEX = torch.float32, torch.int64
