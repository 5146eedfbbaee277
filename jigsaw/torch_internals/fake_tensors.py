"""Private classes of torch for tensors without values.  Public: the meta device, which forgets the real device."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from jigsaw.torch_internals.autograd import own_buffers, own_parameters
from jigsaw.torch_internals.dispatch import DEVICE_OF_TENSOR, operator_schema, tracing_context, without_modes
from jigsaw.torch_internals.private_names import (
    LateName,
    private_attribute,
    replaced_in_torch,
    torch_imports,
)

with torch_imports():
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )
    from torch._subclasses.fake_tensor import in_kernel_invocation_manager as _on_meta_kernels
    from torch._subclasses.fake_tensor import log as _log_of_failures  # it prints what raises, though it is caught
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.utils._python_dispatch import TorchDispatchMode  # sees every operator; public is nothing that does

__all__ = [
    "MAKERS_OF_UNFILLED",
    "OF_EACH_ELEMENT",
    "VALUE_ERRORS",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "FunctionalTensor",
    "KnownMemory",
    "PaperMode",
    "TorchDispatchMode",
    "answer_by_shape",
    "constant_in_graph",
    "forget_known_memory",
    "forget_real_view",
    "has_values",
    "is_on_paper",
    "known_memory",
    "note_known_memory",
    "note_on_paper",
    "note_real_view",
    "note_values_read",
    "quiet_failures",
    "real_view",
    "weights_converted_alone",
]

VALUE_ERRORS = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
"""Errors of operators that need the values of tensors."""

# What a tensor of a graph wraps, so that changes in place become new tensors.  Public is nothing.
_is_wrapped = LateName("torch:_is_functional_tensor")
_wrapped_tensor = LateName("torch:_from_functional_tensor")

# Puts a tensor with values into the graph that is made.  Public: `torch.tensor` of a list, which calls it.
_copy_into_graph = LateName("torch:ops.aten.lift_fresh_copy.default")

# Views a tensor as one of a subclass on another device, as the constructor of `FakeTensor` does, and warns of who reads
# its address.  Public is `Tensor.as_subclass`, which knows no device.
_as_subclass = LateName("torch:Tensor._make_subclass")
_warn_of_addresses = LateName("torch:_C._set_warn_deprecated_on_mutable_data_ptr")

_WITHOUT_VALUES = (FakeTensor, FunctionalTensor)
_REAL_VIEW = "_jigsaw_real_view"
_KNOWN_MEMORY = "_jigsaw_known_memory"  # attribute of memory without values, and of that with its values
_ON_PAPER = "_jigsaw_on_paper"  # attribute of memory: whether elements of it were never written

# What ``Module.to`` and its kin do to each weight.  Public: `Module.apply`, which knows modules and no weights.
apply_of_module = private_attribute(nn.Module(), "_apply")


def note_real_view(x: Tensor, real: Tensor) -> None:
    """Note the tensor with values that a tensor without them stands for."""
    setattr(x, _REAL_VIEW, real)


def noted_real_view(x: Tensor) -> Tensor:
    """Return the tensor that was noted for one without values, else itself."""
    return getattr(x, _REAL_VIEW, x) if isinstance(x, FakeTensor) else x


def forget_real_view(x: Tensor) -> None:
    """Forget it, because the tensor without values is changed."""
    vars(x).pop(_REAL_VIEW, None)


@dataclass(eq=False)
class KnownMemory:
    """Values of memory without values while a graph is made; they follow from the inputs of the graph at `places`.

    The graph collects in `read_places` those inputs for whose values it is right.
    """

    real: Tensor | None
    places: frozenset[int]
    is_input: bool
    read_places: set[int]


def note_known_memory(x: Tensor, known: KnownMemory) -> None:
    """Note the values of a tensor of a graph, and so of all views of it."""
    if isinstance(x, _WITHOUT_VALUES) and known.real is not None and _strided(x) == _strided(known.real):
        setattr(x.untyped_storage(), _KNOWN_MEMORY, known)
        setattr(known.real.untyped_storage(), _KNOWN_MEMORY, known)
        if isinstance(x, FunctionalTensor):  # also of what it wraps, whose memory is another one after each change
            setattr(x.from_functional().untyped_storage(), _KNOWN_MEMORY, known)


def forget_known_memory(x: Tensor) -> None:
    """Forget the values of a tensor of a graph, because it is changed."""
    if isinstance(x, _WITHOUT_VALUES):
        setattr(x.untyped_storage(), _KNOWN_MEMORY, None)


def note_values_read(real: Tensor) -> None:
    """Note that a graph that is made is right for these values alone."""
    known: KnownMemory | None = getattr(real.untyped_storage(), _KNOWN_MEMORY, None)
    if known is not None:
        known.read_places |= known.places


def has_values(x: Tensor) -> bool:
    """Say whether a tensor is none of a graph that is made."""
    return not isinstance(x, _WITHOUT_VALUES) and not _is_wrapped(x)


def known_memory(x: Any) -> KnownMemory | None:
    """Return the values of the memory of a tensor in a graph, if they are known."""
    if isinstance(x, Tensor) and _is_wrapped(x):  # as `FunctionalTensor.tolist` takes it
        x = _wrapped_tensor(x)
    if not isinstance(x, _WITHOUT_VALUES) or x.layout != torch.strided:
        return None
    known: KnownMemory | None = getattr(x.untyped_storage(), _KNOWN_MEMORY, None)
    return known if known is not None and known.real is not None and known.real.dtype == x.dtype else None


def real_view(x: Any) -> Any:
    """Return the tensor with values that a tensor without them stands for, where one was noted, else itself."""
    known = known_memory(x)
    if known is None or known.real is None:
        return noted_real_view(x)
    with without_modes():
        return known.real.detach().as_strided(x.shape, x.stride(), x.storage_offset())


def constant_in_graph(real: Tensor) -> Tensor:
    """Return a tensor with values as a constant of the graph that is made; itself where none is."""
    return real if tracing_context() is None else _copy_into_graph(real)


def _strided(x: Tensor) -> tuple[Any, ...]:
    return x.dtype, tuple(x.shape), x.stride(), x.storage_offset()


def note_on_paper(real: Tensor, is_unwritten: bool = False) -> None:
    """Note that memory with values belongs to no model, but was computed for tensors without values."""
    setattr(real.untyped_storage(), _ON_PAPER, is_unwritten)


def is_on_paper(real: Tensor, unwritten: bool = False) -> bool:
    """Say whether memory was noted as computed; of `unwritten` memory, whether some of it may have no values yet."""
    noted = getattr(real.untyped_storage(), _ON_PAPER, None)
    return bool(noted) if unwritten else noted is not None


def _overloads(names: str, namespace: Any) -> set[Any]:
    pairs = (name.split(".") for name in names.split())
    return {getattr(getattr(namespace, packet), overload) for packet, overload in pairs}


# Functions of each element whose result has the shape, the strides and the type of their tensors, where these agree.
OF_EACH_ELEMENT = _overloads(
    "add.Tensor add_.Tensor sub.Tensor mul.Tensor mul_.Tensor div.Tensor sqrt.default addcmul_.default "
    "addcdiv_.default lerp_.Scalar copy_.default zeros_like.default clone.default",
    torch.ops.aten,
)
# functions that make tensors without setting values
MAKERS_OF_UNFILLED = {
    getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
}
_IN_PLACE = {func for func in OF_EACH_ELEMENT if operator_schema(func).is_mutable}
# These have a kernel in Python for the meta device, which takes four times as long as `new_empty`.
_ARITHMETIC = OF_EACH_ELEMENT - _IN_PLACE - _overloads("zeros_like.default clone.default", torch.ops.aten)
# Operators whose results follow from sizes, strides and types alone, by torch's own kernel for the meta device: views,
# functions of each element, products, new memory.  They are most of a training step's, and torch's table of earlier
# answers, which serves all operators, takes longer than the kernel itself.  Public is nothing.
_BY_SHAPE = OF_EACH_ELEMENT | _overloads(
    "detach.default alias.default view.default view.dtype slice.Tensor select.int as_strided.default t.default "
    "transpose.int permute.default expand.default unsqueeze.default squeeze.dim split.Tensor _unsafe_view.default "
    "mm.default mm.dtype addmm.default bmm.default empty_like.default new_empty.default new_zeros.default "
    "_to_copy.default",
    torch.ops.aten,
)
_EMPTY = _overloads("empty.memory_format empty_strided.default", torch.ops.aten)
_MESSAGES = _overloads("send.default recv_.default broadcast_.default allreduce_.default", torch.ops.c10d)


def answer_by_shape(func: Any, args: Sequence[Any], kwargs: Any) -> Any:
    """Return what `FakeTensorMode` does for some operators, in a fraction of its time; None where it has to answer."""
    is_message = func in _MESSAGES
    if not (is_message or func in _BY_SHAPE):
        return None
    first: Any = None
    for x in args[0] if is_message else args:
        if isinstance(x, Tensor):
            if type(x) is not FakeTensor or x.constant is not None:  # numbers that torch knows, or plain tensors
                return None
            first = x if first is None else first
    if first is None:
        return None
    if func in _IN_PLACE and _is_like_the_others(first, args):
        return first
    if func in _ARITHMETIC and not kwargs and _is_contiguous_float(first, args):
        func, args = torch.ops.aten.new_empty.default, (first, first.shape)
    if kwargs:
        if kwargs.get("pin_memory") or kwargs.get("device") not in (None, first.fake_device):
            return None
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}  # here it is the meta device
    with _on_meta_kernels(first.fake_mode):
        out = func(*args, **kwargs)
    if is_message or type(out) is FakeTensor:  # messages, and changes in place, return what they were given
        return out
    if isinstance(out, list):
        return [_tensor_on_paper(first.fake_mode, x, first.fake_device) for x in out]
    return _tensor_on_paper(first.fake_mode, out, first.fake_device)


def _tensor_on_paper(mode: FakeTensorMode, meta: Tensor, device: torch.device) -> FakeTensor:
    """Return a tensor of the meta device as one of `device`. In a `PaperMode` its attributes are copied from the first
    one, which torch's constructor made: that checks its arguments and sets each attribute by itself.
    """
    attributes = mode.attributes.get(device) if type(mode) is PaperMode else None
    if attributes is None:
        tensor = FakeTensor(mode, meta, device)
        if type(mode) is PaperMode:
            mode.attributes[device] = dict(vars(tensor))
        return tensor
    tensor: FakeTensor = _as_subclass(
        FakeTensor, meta, meta.requires_grad, dispatch_device=True, device_for_backend_keys=device
    )
    _warn_of_addresses(tensor)
    vars(tensor).update(attributes)
    return tensor


class PaperMode(FakeTensorMode):
    """The mode for runs on paper: torch's `FakeTensorMode`, with a shorter way for the most frequent operators."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.attributes: dict[torch.device, dict[str, Any]] = {}  # those of a new tensor, by its device

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch call the next method as it is, without the frame that keeps its compiler out of it."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF_TENSOR and type(args[0]) is FakeTensor:
            return args[0].fake_device  # asked once or twice an operator
        kwargs = kwargs or {}
        if func in _EMPTY and not kwargs.get("pin_memory") and kwargs.get("layout") in (None, torch.strided):
            device = kwargs.get("device") or torch.get_default_device()
            if device.type != "meta":
                return _tensor_on_paper(self, func(*args, **{**kwargs, "device": "meta"}), device)
        out = answer_by_shape(func, args, kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs) if out is None else out


def _is_like_the_others(first: Tensor, args: Sequence[Any]) -> bool:
    """Say whether a tensor has the shape and type of the others, and no place twice: what changes it needs no check."""
    others = (x for x in args[1:] if isinstance(x, Tensor))
    return 0 not in first.stride() and all(x.shape == first.shape and x.dtype == first.dtype for x in others)


def _is_contiguous_float(first: Tensor, args: Sequence[Any]) -> bool:
    """Say whether a function of each element gives for these arguments what `new_empty` gives for the first."""
    if not first.is_floating_point() or any(isinstance(x, complex) for x in args):
        return False
    tensors = [x for x in args if isinstance(x, Tensor)]
    return all(x.layout == torch.strided and x.is_contiguous() for x in tensors) and _is_like_the_others(first, args)


@contextmanager
def weights_converted_alone() -> Generator[None]:
    """Let ``Module.to`` put new weights in the place of those without values within the block.

    Torch swaps the two tensors, and refuses to where one has a weak reference. Torch itself keeps one to the first
    weights that it makes.  Public is the meta device, where no number can be read.
    """
    converted: dict[int, tuple[Tensor, Tensor]] = {}  # each weight once, where modules share it
    torchs = apply_of_module(nn.Module)

    def apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        own = own_parameters(module), own_buffers(module)
        if not any(isinstance(x, FakeTensor) for weights in own for x in weights.values()):
            return torchs(module, change, recurse)  # those of another thread have values
        for child in module.children() if recurse else ():
            apply_of_module(child)(change)
        for weights in own:
            for name, x in weights.items():
                if x is not None and id(x) not in converted:
                    with torch.no_grad():
                        y = change(x)
                    is_weight = isinstance(x, nn.Parameter) and y is not x
                    converted[id(x)] = x, nn.Parameter(y, x.requires_grad) if is_weight else y
                weights[name] = x if x is None else converted[id(x)][1]
        return module

    with replaced_in_torch(nn.Module, "_apply", apply):
        yield


@contextmanager
def quiet_failures() -> Generator[None]:
    """Let operators that raise in the block say so by their exception alone; nothing warns."""
    before, _log_of_failures.disabled = _log_of_failures.disabled, True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        _log_of_failures.disabled = before
