"""Private names of torch's dispatch: modes, operators, checkpoints, graphs of `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor

from jigsaw.torch_internals.private_names import LateName, private_attribute, private_name

# -- needed to import jigsaw ------------------------------------------------------------------------------------------

# How many modes see the operators of this thread.  Public: nothing tells.
count_modes: Callable[[], int] = private_name("torch._C:_len_torch_dispatch_stack")

# What `torch.compile` knows while it makes a graph, or None.  Public: `torch.compiler.is_compiling()`, which is false
# while the backward pass of the graph is made.
tracing_context: Callable[[], Any] = private_name("torch._guards:TracingContext.try_get")

# -- looked up at their first call ------------------------------------------------------------------------------------

# Lets tensors be real within the block, whatever modes are on.  Public: nothing does.
without_modes = LateName("torch.utils._python_dispatch:_disable_current_modes")

current_modes = LateName("torch.utils._python_dispatch:_get_current_dispatch_mode_stack")

# Chooses the kernel of a convolution.  Public: nothing tells.
_conv_kernel = LateName("torch._C:_select_conv_backend")


def is_conv_by_columns(x: Tensor, weight: Tensor, geometry: Sequence[Any]) -> bool:
    """Say whether torch convolves by columns: one product of the weights and each output's part of the input.

    `geometry` is what follows the bias in the operator's arguments.
    """
    kernels = private_name("torch._C:_ConvBackend")
    return _conv_kernel(x, weight, None, *geometry) in (kernels.Slow2d, kernels.Slow3d)


def modes_that_keep() -> tuple[type, type]:
    """Return the modes by which selective checkpointing keeps results; public is only its policy."""
    return (
        private_name("torch.utils.checkpoint:_CachingTorchDispatchMode"),
        private_name("torch.utils.checkpoint:_CachedTorchDispatchMode"),
    )


# What an operator takes and changes.  Public: its tags, which do not mark every operator that changes an argument.
operator_schema: Callable[[Any], Any] = private_attribute(torch.ops.aten.add.Tensor, "_schema")


def tensors_of_call(values: Any) -> list[Tensor]:
    """Return the tensors among an operator's arguments or results, which are in lists at most."""
    tensors: list[Tensor] = []
    for x in values if isinstance(values, (list, tuple)) else (values,):
        if isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, (list, tuple)):
            tensors += tensors_of_call(x)
    return tensors


def bound_argument(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return an argument of a call by the name that the operator's schema gives it; None where it has none."""
    for at, argument in enumerate(operator_schema(operator).arguments):
        if argument.name == name:
            return args[at] if at < len(args) else kwargs.get(name, argument.default_value)
    return None


def written_by_call(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that a call changes."""
    schema = operator_schema(func)
    if not schema.is_mutable:
        return []
    named = kwargs or {}
    values = [*zip(schema.arguments, args, strict=False), *((a, named.get(a.name)) for a in schema.arguments)]
    return tensors_of_call(
        [value for argument, value in values if argument.alias_info and argument.alias_info.is_write]
    )


# -- operators that have no public function ---------------------------------------------------------------------------

READ_NUMBER: Any = private_name("torch:ops.aten._local_scalar_dense.default")
DEVICE_OF_TENSOR: Any = private_name("torch:ops.prim.device.default")
UNSAFE_VIEW: Any = private_name("torch:ops.aten._unsafe_view")
CPU_ATTENTION: Any = private_name("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu")
CPU_ATTENTION_BACKWARD: Any = private_name("torch:ops.aten._scaled_dot_product_flash_attention_for_cpu_backward")


def operators_of_profiler() -> set[Any]:
    """Return the operators that name a stretch of a profile.  Public: `torch.profiler.record_function` calls them."""
    names = "_record_function_enter_new.default", "_record_function_exit._RecordFunction"
    return {private_name(f"torch:ops.profiler.{name}") for name in names}


def operators_of_weights() -> tuple[Any, Any]:
    """Return the operators by which FSDP2 gathers weights, and sums gradients into parts."""
    names = "_allgather_base_", "_reduce_scatter_base_"
    gather, sum_parts = (private_name(f"torch:ops.c10d.{name}.default") for name in names)
    return gather, sum_parts


# -- devices of others ------------------------------------------------------------------------------------------------

# Where torch looks for streams and random states of a device that is not its own.  Public: none; extensions call it.
register_device_module = LateName("torch:_register_device_module")

# -- graphs of torch.compile ------------------------------------------------------------------------------------------


def leave_to_python(function: Any, reason: str) -> None:
    """Let `torch.compile` call a function, and all that it calls, as they are.

    Public: `torch.compiler.disable`, which puts another call before each one.
    """
    frames = private_name("torch._C:_dynamo.eval_frame")
    function._torchdynamo_disable, function._torchdynamo_disable_msg = True, reason
    skip = private_attribute(frames, "_FrameAction")(frames).SKIP
    strategy = private_attribute(frames, "_FrameExecStrategy")(frames)(skip, skip)
    frames.set_code_exec_strategy(function.__code__, strategy)


# -- activation checkpointing -----------------------------------------------------------------------------------------


class Checkpointing:
    """Names in torch.utils.checkpoint.  Public: `context_fn=`, which whoever calls `checkpoint` passes."""

    # both are looked up in their module when a call begins
    FRAME = "_CheckpointFrame"
    FIRST_HOOK, LATER_HOOK = "_checkpoint_hook", "_recomputation_hook"

    def __init__(self) -> None:
        self.module: Any = torch.utils.checkpoint
        names = self.FRAME, self.FIRST_HOOK, self.LATER_HOOK, "_make_saved_tensor"
        values = [private_name(f"torch.utils.checkpoint:{name}") for name in names]
        self.frame, self.first_hook, self.later_hook, self.save_tensor = values
