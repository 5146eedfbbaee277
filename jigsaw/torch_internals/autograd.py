"""Private names of torch's tensors and of its autograd.  Those of the first part are needed to import jigsaw."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, UntypedStorage, nn, ones

from jigsaw.torch_internals.private_names import LateName, private_attribute, private_name

# -- needed to import jigsaw: tiles call them in every operation -----------------------------------------------------

# The number of the backward pass of this thread, -1 outside of one.  Public: nothing tells of a backward pass.
graph_task_id: Callable[[], int] = private_name("torch._C:_current_graph_task_id")

# The class whose descriptors read a tile's shell and not its local tensor.  Public: `Tensor` dispatches every read.
TensorBase: Any = private_name("torch._C:TensorBase")

# Makes the shell of a tile, with sizes and no memory.  Public: `Tensor.as_subclass` needs memory.
make_wrapper: Any = private_name("torch:Tensor._make_wrapper_subclass")

# Lets C++ functions take a tile as the plain tensor that it is for them, as torch's page on subclasses tells.  Public:
# `torch.overrides` has a switch only for functions in Python.
as_plain_tensors: Any = private_name("torch._C:DisableTorchFunctionSubclass")

# How often the values of a tensor were changed.  Public: nothing reads it.
tensor_version: Callable[[Any], int] = private_attribute(Tensor, "_version")

# The same of the shell of a tile, of which `tensor_version` reads the local tensor.
own_version: Callable[[Any], int] = private_name("torch._C:TensorBase._version").__get__

# The tensor of which another one is a view, or None.  Public: nothing reads it.
base_of_view: Callable[[Any], Any] = private_attribute(Tensor, "_base")

# The identity of a tensor's memory.  Public: `data_ptr()`, which is 0 for all memory without values or elements.
memory_id: Callable[[Any], int] = private_attribute(UntypedStorage, "_cdata")

# The hooks on the gradient of a tensor, and those behind it.  Public: they can be added and removed, not counted.
gradient_hooks: Callable[[Any], Any] = private_attribute(Tensor, "_backward_hooks")
hooks_behind_gradient: Callable[[Any], Any] = private_attribute(Tensor, "_post_accumulate_grad_hooks")

# A module's own parameters, buffers and modules by name.  Public: `named_parameters(recurse=False)`, ten times as slow,
# which runs for each module in each forward pass.
own_parameters: Callable[[nn.Module], dict[str, Any]] = private_attribute(nn.Module(), "_parameters")
own_buffers: Callable[[nn.Module], dict[str, Any]] = private_attribute(nn.Module(), "_buffers")
own_modules: Callable[[nn.Module], dict[str, Any]] = private_attribute(nn.Module(), "_modules")

# The innermost hooks for saved tensors, or None.  Public: `saved_tensors_hooks` sets them, and nothing reads them.
saved_tensor_hooks: Any = private_name("torch._C:_autograd._top_saved_tensors_default_hooks")

# The function of `Tensor.grad`'s older name, which C++ dispatches beside the public one.
old_grad: Any = private_name("torch:Tensor._grad")

# The C++ functions behind `torch.meshgrid` and `torch.nn.utils.rnn.pad_sequence`, which dispatch under their own names.
cpp_meshgrid: Any = private_name("torch:_VF.meshgrid")
cpp_pad_sequence: Any = private_name("torch:_C._nn.pad_sequence")

# Says whether a tensor is a zero without memory.  Public: nothing tells.
is_zero_tensor: Callable[[Any], bool] = private_name("torch:Tensor._is_zerotensor")

# Raises later, on the device, where a tensor is false.  Public: `torch._check`, which waits for the value.
assert_on_device: Callable[..., None] = private_name("torch:_assert_async")

# -- looked up at their first call -----------------------------------------------------------------------------------

# Gives a shell the number of changes from before it entered the graph.  Public: nothing sets it.
set_versions = LateName("torch._C:_autograd._unsafe_set_version_counter")

# The end of the backward pass under way calls back.  Public: hooks are called for one tensor, not at the end.
queue_callback = LateName("torch.autograd:Variable._execution_engine.queue_callback")

# Raises for a leaf whose gradient `torch.autograd.grad` takes.  Public: nothing tells.
will_engine_run = LateName("torch._C:_will_engine_execute_node")

# The node of the backward pass that runs.  Public: hooks of a node, which would be on every node.
current_node = LateName("torch._C:_current_autograd_node")

# The number that the next node of a graph gets.  Public: nothing tells.
next_node_number = LateName("torch._C:_autograd._get_sequence_nr")

# Says whether autograd knows a tensor as a view.  Public: nothing tells.
is_view = LateName("torch:Tensor._is_view")

# Counts who holds a memory and a tensor.  Public: `torch.utils.swap_tensors` counts, and tells nobody.
memory_users = LateName("torch._C:_storage_Use_Count")
tensor_users = LateName("torch:Tensor._use_count")

# Lets an object that was found by a weak reference live on.  Public: torch's own containers, which call it.
keep_alive: Callable[[Tensor], None] = private_name("torch:Tensor._fix_weakref")

# Exchanges the C++ tensors of two objects.  Public: `torch.utils.swap_tensors`, which refuses what has weak references.
swap_tensors_in_place = LateName("torch._C:_swap_tensor_impl")

# Lets functions dispatch to tiles again where torch has switched it off.  Public: nothing does.
dispatching_again = LateName("torch.overrides:_enable_torch_function")

# Changes every tensor of a module by a function.  Public: `to` and `type`, which choose the dtype by a fixed rule.
apply_to_module = LateName("torch:nn.Module._apply")


def code_of_engine() -> Any:
    """Return the code by which a thread's frames show that autograd runs.  Public are `backward` and `grad`, whose
    frames are not there in a checkpoint's own pass.
    """
    return private_name("torch.autograd.graph:_engine_run_backward.__code__")


_some_node: Any = ones((), requires_grad=True).exp().grad_fn
_number_of_node = private_attribute(_some_node, "_sequence_nr")

# Shape, dtype and device of a node's results.  Public: nothing tells.
result_metadata: Callable[[Any], Any] = private_attribute(_some_node, "_input_metadata")


def node_number(node: Any) -> int:
    """Return the number that a node got when it was made; public is nothing."""
    return _number_of_node(node)()


def forward_pre_hooks(module: nn.Module) -> list[Any]:
    """Return the hooks that run before a module; public is nothing that lists them."""
    return list(private_attribute(module, "_forward_pre_hooks")(module).values())


def call_instead(module: Any, call: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace the call of a module, with its hooks, by `call` of it.  Public are hooks, and `forward`, around which the
    hooks run.
    """
    for name in ("_compiled_call_impl", "_call_impl"):
        private_attribute(module, name)
    module._compiled_call_impl = call(module._compiled_call_impl or module._call_impl)


# -- names that tiles answer or refuse as attributes -----------------------------------------------------------------

# Read from the local tensor, where this torch has them: a version without one has nothing to answer.
ATTRIBUTES_OF_LOCAL = (
    "_grad_fn _version _base _backward_hooks _post_accumulate_grad_hooks _has_symbolic_sizes_strides _python_dispatch"
).split()

# They reach for the memory of the whole tensor; a version without one has nothing to refuse.
METHODS_OF_MEMORY = (
    "_typed_storage _use_count _view_func _view_func_unsafe _rev_view_func_unsafe _lazy_clone "
    "_reduce_ex_internal _clear_non_serializable_cached_data"
).split()

# They make tensors of a class, and not of a tile.
MAKERS_OF_CLASS = "_make_subclass _make_wrapper_subclass _dtensor__new__".split()

# What autograd and `nn.Parameter` set on a tensor.
HOOKS_ATTRIBUTE, PARAMETER_ATTRIBUTE = "_backward_hooks", "_is_param"
