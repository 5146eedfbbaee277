"""Methods and attributes of torch.Tensor: facts, moves between devices, gradients; its memory is refused.

>>> tile = jigsaw.shard(torch.arange(6.0).reshape(3, 2), jigsaw.init_mesh(lat=1), ("lat", None))
>>> tile.T.shape, tile.detach().cpu().is_contiguous(), tile.nbytes
(torch.Size([2, 3]), True, 24)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

from jigsaw.errors import ShardingError
from jigsaw.ops.meeting.plain_operands import cut_whole_tensor
from jigsaw.ops.reductions import reduced_dims
from jigsaw.ops.whole_strides import has_strides, is_whole_contiguous, whole_strides, with_strides
from jigsaw.tile.tensor_shell import as_plain_tensors
from jigsaw.tile.tile import Tile, implements_torch, refusal_error, tiles_in
from jigsaw.torch_internals.autograd import METHODS_OF_MEMORY, keep_alive, old_grad

# -- facts ------------------------------------------------------------------------------------------------------------


def _ask_the_local_tensor(name: str) -> None:
    """Answer a method whose result for the local tensor is that for the whole one."""
    method = getattr(Tensor, name)

    def handler(input: Tile, *args: Any, **kwargs: Any) -> Any:
        return method(input.local, *args, **kwargs)

    implements_torch(method, *([getattr(torch, name)] if hasattr(torch, name) else []))(handler)


for _name in (
    "is_pinned is_shared is_conj is_neg is_signed is_inference is_distributed is_coalesced is_floating_point "
    "is_complex element_size get_device _is_view _is_zerotensor has_names"
).split():
    if hasattr(Tensor, _name):
        _ask_the_local_tensor(_name)


@implements_torch(Tensor.is_contiguous)
def _says_contiguous(input: Tile, *, memory_format: torch.memory_format = torch.contiguous_format) -> bool:
    """Say what torch's tensor says; the rows of this rank may lie otherwise, or be none."""
    return is_whole_contiguous(input, memory_format)


@implements_torch(Tensor.stride)
def _stride(input: Tile, dim: int | None = None) -> Any:
    """Return the strides that torch's tensor would have, which no rank's part has."""
    strides = whole_strides(input)
    return strides if dim is None else strides[reduced_dims(input, dim)[0]]


def _answer_fact(fact: Callable[..., Any], *methods: Any) -> None:
    def handler(input: Tile, *args: Any, **kwargs: Any) -> Any:
        return fact(input, *args, **kwargs)

    implements_torch(*methods)(handler)


_answer_fact(Tile.size, Tensor.size)
_answer_fact(Tile.numel, torch.numel, Tensor.numel, Tensor.nelement)
_answer_fact(Tile.dim, Tensor.dim, Tensor.ndimension)
_answer_fact(len, Tensor.__len__)
_answer_fact(bool, Tensor.is_nonzero, torch.is_nonzero, Tensor.__bool__)


@implements_torch(keep_alive)
def _keep_alive(tile: Tile) -> None:
    with as_plain_tensors():
        keep_alive(tile)


@implements_torch(torch.is_same_size, Tensor.is_same_size, either=("input", "other"))
def _is_same_size(input: Any, other: Any) -> bool:
    return input.shape == other.shape


@implements_torch(Tensor.requires_grad_)
def _requires_grad_(tile: Tile, requires_grad: bool = True) -> Tile:
    tile.local.requires_grad_(requires_grad)
    return tile


@implements_torch(Tensor.item)
def _item(tile: Tile) -> Any:
    if tile.numel() != 1:
        raise ShardingError(
            f"item() of a Tile of shape {tuple(tile.shape)}: only a tile of one element can be a number; reduce it "
            "first"
        )
    return tile.full_tensor().item()


@implements_torch(torch.result_type, either=("tensor1", "tensor2"))
def _result_type(tensor1: Any, tensor2: Any) -> torch.dtype:
    return torch.result_type(*(x.local if isinstance(x, Tile) else x for x in (tensor1, tensor2)))


# -- the same rows elsewhere ------------------------------------------------------------------------------------------


def _move_the_local_tensor(method: Any) -> None:
    def handler(input: Tile, *args: Any, **kwargs: Any) -> Tile:
        return Tile(method(input.local, *args, **kwargs), input.layout, input.mesh)

    implements_torch(method)(handler)


for _method in (Tensor.cpu, Tensor.cuda, Tensor.pin_memory):
    _move_the_local_tensor(_method)


@implements_torch(Tensor.detach_)
def _detach_(input: Tile) -> Tile:
    input.local.detach_()
    return input


# -- attributes that are functions ------------------------------------------------------------------------------------


@implements_torch(Tensor.data)
def _data(input: Tile) -> Any:
    out = Tile(input.local.data, input.layout, input.mesh)
    return with_strides(out, whole_strides(input), input) if has_strides(input) else out


@implements_torch(old_grad)
def _gradient(input: Tile) -> Any:
    return input.grad


@implements_torch(Tensor.T)
def _reversed_dims(input: Tile) -> Any:
    return input.permute(tuple(range(input.ndim))[::-1])


@implements_torch(Tensor.H)
def _conjugate_transpose(input: Tile) -> Any:
    if input.ndim not in (0, 2):
        raise RuntimeError(f"tile.H of a Tile of shape {tuple(input.shape)}: only of 2 dims; use tile.mH")
    return input if input.ndim == 0 else input.adjoint()


@implements_torch(Tensor.mT)
def _matrix_transpose(input: Tile) -> Any:
    return input.transpose(-2, -1) if input.ndim else input.view_of_itself()


# -- gradients: autograd's truth is the local tensor ------------------------------------------------------------------


def _local_gradient(function: Any, gradient: Any, tile: Tile) -> Tensor:
    """Return a gradient of a tile, as this rank has it: a plain one is whole."""
    if not isinstance(gradient, Tile):
        if gradient.shape != tile.shape:
            raise ShardingError(
                f"{function.__name__}: a gradient of shape {tuple(gradient.shape)} for a Tile of shape "
                f"{tuple(tile.shape)}; pass a Tile of its layout, or the whole gradient"
            )
        return cut_whole_tensor(gradient, tile)
    if gradient.layout != tile.layout:
        raise ShardingError(
            f"{function.__name__}: a gradient cut as {gradient.layout} for a Tile cut as {tile.layout}; bring it to "
            "the same cuts with gradient.with_layout(tile.layout)"
        )
    return gradient.local


def _output_and_gradient(function: Any, output: Any, gradient: Any) -> tuple[Any, Any]:
    """Return what autograd starts from: the rows that this rank owns, so that none counts twice."""
    if not isinstance(output, Tile):
        return output, gradient.full_tensor() if isinstance(gradient, Tile) else gradient
    if gradient is None:
        if output.numel() != 1:
            raise RuntimeError("grad can be implicitly created only for scalar outputs: reduce the tile first")
        return output.full_tensor(), None
    own = output.owned()
    return own.local, _local_gradient(function, gradient.owned() if isinstance(gradient, Tile) else gradient, own)


def _as_sequence(value: Any) -> Sequence[Any]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _local_outputs(function: Any, outputs: Any, gradients: Any) -> tuple[list[Any], list[Any]]:
    roots = _as_sequence(outputs)
    seeds = _as_sequence(gradients) if gradients is not None else (None,) * len(roots)
    if len(seeds) != len(roots):
        raise ShardingError(
            f"{function.__name__} got {len(roots)} tensors and {len(seeds)} gradients; pass one for each"
        )
    pairs = [_output_and_gradient(function, y, g) for y, g in zip(roots, seeds, strict=True)]
    return [y for y, _ in pairs], [g for _, g in pairs]


def _local_inputs(inputs: Any) -> Any:
    """Return the leaves (or other tensors) whose gradients are wanted."""
    return None if inputs is None else [x.local if isinstance(x, Tile) else x for x in _as_sequence(inputs)]


@implements_torch(torch.autograd.backward, either=("tensors", "grad_tensors", "grad_variables", "inputs"))
def _backward(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: Any = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    outputs, gradients = _local_outputs(torch.autograd.backward, tensors, grad_tensors)
    torch.autograd.backward(outputs, gradients, retain_graph, create_graph, inputs=_local_inputs(inputs))


@implements_torch(Tensor.backward, either=("input", "gradient", "inputs"))
def _backward_of_one(
    input: Any, gradient: Any = None, retain_graph: Any = None, create_graph: bool = False, inputs: Any = None
) -> None:
    _backward(input, gradient, retain_graph, create_graph, inputs=inputs)


@implements_torch(torch.autograd.grad, either=("outputs", "inputs", "grad_outputs"))
def _grad(outputs: Any, inputs: Any, grad_outputs: Any = None, **options: Any) -> tuple[Any, ...]:
    if options.get("is_grads_batched"):
        raise ShardingError(
            "autograd.grad(is_grads_batched=True) is not answered on tiles: ask for one gradient a call"
        )
    sources = _as_sequence(inputs)
    out, gradients = _local_outputs(torch.autograd.grad, outputs, grad_outputs)
    results = torch.autograd.grad(out, _local_inputs(sources), gradients, **options)
    return tuple(
        Tile(g, x.layout, x.mesh) if isinstance(x, Tile) and g is not None else g
        for g, x in zip(results, sources, strict=True)
    )


@implements_torch(Tensor.retain_grad)
def _retain_grad(input: Tile) -> None:
    input.local.retain_grad()


@implements_torch(Tensor.register_hook)
def _register_hook(input: Tile, hook: Callable[[Any], Any]) -> Any:
    """Register a hook that sees the gradient as a tile of the same layout; a halo row has this rank's part."""
    # the hook must not hold the tile, or the tile's memory would never be freed
    layout, mesh = input.layout, input.mesh

    def on_local(gradient: Tensor) -> Tensor | None:
        tile = Tile(gradient, layout, mesh)
        changed = hook(tile)
        return None if changed is None else _local_gradient(Tensor.register_hook, changed, tile)

    return input.local.register_hook(on_local)


@implements_torch(Tensor.register_post_accumulate_grad_hook)
def _register_post_accumulate_grad_hook(input: Tile, hook: Callable[[Any], None]) -> Any:
    layout, mesh = input.layout, input.mesh

    def on_local(local: Tensor) -> None:
        hook(Tile(local, layout, mesh))

    return input.local.register_post_accumulate_grad_hook(on_local)


# -- what is refused wherever it is cut -------------------------------------------------------------------------------


def _refuse_memory(method: Any) -> None:
    def handler(*args: Any, **kwargs: Any) -> NoReturn:
        raise refusal_error(
            method,
            next(tiles_in((args, kwargs))),
            "it asks for the memory of the whole tensor, which no rank has",
            "use tile.local for this rank's part, or tile.full_tensor()",
        )

    implements_torch(method)(handler)


for _name in (
    "data_ptr storage untyped_storage storage_type set_ share_memory_ resize_ resize_as_ resize resize_as as_subclass "
    "is_set_to __setstate__ __getstate__ __reduce__ __array_wrap__ module_load"
).split() + METHODS_OF_MEMORY:
    if hasattr(Tensor, _name):
        _refuse_memory(getattr(Tensor, _name))
