"""`parallelize`: a plain torch model gets the gradients of the whole batch on every mesh, weights whole or cut."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from numbers import Integral
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor
from torch.nn.utils.spectral_norm import SpectralNorm

from jigsaw import comm
from jigsaw.comm import debug
from jigsaw.comm.agreement import told_where_different
from jigsaw.comm.graph_calls import lacks_values
from jigsaw.comm.wire_values import checksum_of_bits
from jigsaw.errors import ShardingError
from jigsaw.geometry.axis_names import CHANNEL_AXIS
from jigsaw.nn.shared_inputs import forget_last_input
from jigsaw.ops.into_torch.reentrant import at_end_of_pass
from jigsaw.ops.into_torch.whole_tensor import run_forward_whole
from jigsaw.parallel.channel_parallel import TensorPlan, completed_plan, cut_channels
from jigsaw.parallel.gradient_buckets import axes_not_cutting, axes_of_copies, local_part
from jigsaw.parallel.gradients import (
    GradientReducer,
    WholeGradients,
    has_gradient_hooks,
    mark_averaged,
    refuse_hooks,
)
from jigsaw.parallel.sharding import ShardingOptions, WeightSharding, sharding_units
from jigsaw.parallel.sharding import shard_model_weights as cut_weights
from jigsaw.ranks.model_world import begin_backward_pass, enter_model, leave_model
from jigsaw.tile.misuse import mark_replaced, warn_of_idle_axes, warn_of_no_wrapper, warn_once
from jigsaw.tile.tensor_shell import reduce_units_behind_their_gradients
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import forward_pre_hooks

M = TypeVar("M", bound=nn.Module)

_REDUCER = "_jigsaw_reducer"
_DONE = "_jigsaw_parallelized"
_MIB = 2**20


def parallelize(
    model: M,
    mesh: DeviceMesh,
    *,
    shard_weights: WeightSharding = False,
    replicate: str | Sequence[str] = (),
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reduce: bool = True,
    channel: str = CHANNEL_AXIS,
    tensor: TensorPlan | None = None,
    example: Any = None,
    gather_again: bool = False,
    units: Sequence[nn.Module] | None = None,
    unit_bytes: int = 4 * _MIB,
    bucket_bytes: int = 25 * _MIB,
    strict: bool = True,
) -> M:
    """Make ``loss.backward()`` give the gradient of the whole batch on every rank: g = mean over ranks of (n x part).

    Returns `model` itself, with the same parameter names and full shapes; on one rank it stays unchanged.  First all
    parameters and buffers become those of the first rank.  Call it after the model is on its device and before the
    optimizer is made.

    - By default every rank has whole weights, and the gradients are reduced in buckets of `bucket_bytes`, while the
      backward pass goes on, into ordinary ``.grad``.
    - ``shard_weights=True`` cuts weights, gradients and optimizer state into 1/P a rank by `fully_shard` over the
      flattened mesh, in `units` (modules that are gathered at once). By default these are elements of ``Sequential``
      and ``ModuleList`` of at least `unit_bytes`, and the rest.  Parameters are then DTensors; scalars stay whole.
      Where you call ``model.encode(x)`` and never ``model(x)``, name the modules that `encode` calls as units.
      A unit's weights are freed after its forward pass and gathered again for its backward pass; with
      ``shard_weights="keep"`` they stay.  Along the axes `replicate` every rank keeps the same part (hybrid sharding:
      gathered within a node, say, and only gradients cross the network).  `mp_policy` and `offload_policy` are those of
      `fully_shard`.
    - Where the mesh has the axis `channel`, weights of linear, convolution and attention layers are cut along it. They
      compute in pieces, with either of the above for the other axes (`jigsaw.parallel.channel_parallel`).  Tokens that
      the same axis cuts stay cut between them: norms, dropout and residuals work on 1/P of them.
    - `tensor` says where weights are cut, ``{"blocks.*.query": "column", "blocks.*.out": "row"}``, by patterns of
      module names as in `fnmatch`. The output channels of a "column" stay cut, through heads, gates and attention,
      until a "row" adds them up. So a block of a transformer sends what Megatron's does. "3 columns" are three parts
      that one layer makes, queries, keys and values, each cut so.  "gathered" is a column whose channels are gathered,
      "whole" leaves a layer as it is.  A plan of transformers serves too, ``model.tp_plan``.
      Layers that no pattern names are columns whose channels are gathered. ``{"*": "found", "head": "column"}`` takes
      what is found, as below, but for the layers that later patterns name.
    - Without `tensor` such pairs are found: the model runs once on paper, without values and messages. `example` has
      what it is called with (a tensor or tile, or a tuple of arguments), of which only shapes matter. Without one the
      model, or else its parts, are tried with a few likely inputs.  ``tensor={}`` looks for none.
    - A column of tokens that `channel` cuts keeps the tokens of all ranks for its backward pass. With
      ``gather_again=True`` it keeps 1/P of them, and gathers them a second time there, as Megatron-LM does: less
      memory for a gather more. An input that is changed in place behind the layer then raises in the backward pass.
      Calls that are checkpointed or compiled, and hooks for saved tensors around the model, do as without it.
    - ``reduce=False`` leaves the reduction to a wrapper that averages over all ranks,
      ``DistributedDataParallel(model)``; a forward pass without one warns.

    - ``strict=False`` runs a function that jigsaw cannot answer on such tiles on the whole tensor instead, on every
      rank, exactly. It warns of the cost, once for each line. By default such a function raises `ShardingError`. For a
      loss outside the model, use ``jigsaw.strict_mode(False)``.

    Loss terms of parameters alone, several forward passes before one backward, accumulation with or without `no_sync`,
    frozen, unused and tied parameters are all exact (docs/gradients.md).

    *Shapes*: unchanged; with ``shard_weights``, per rank ``ceil(shape[0] / P)`` of each parameter's first dim.
    *Sends*: once, the parameters and buffers of the first rank.  A backward pass: one all-reduce a bucket, 2 (P-1)/P of
    the bytes of all parameters. A parameter of 1 MiB or more that only contracts cut tokens needs half of that. With
    ``shard_weights`` one all-gather a unit (two, but for the rest; one with ``"keep"``) and one reduce-scatter. Along
    `replicate` one all-reduce of the part.
    *Raises*: `ShardingError` when the model differs between ranks in names, shapes or dtypes, lies on another device
    than the mesh, or has sparse embeddings. Also for a model that was parallelized before, and for axes that the mesh
    does not have. For a plan with an unknown word, a name that no module has, or a layer that cannot be cut so.

    >>> mesh = jigsaw.init_mesh(lat=1)
    >>> model = jigsaw.parallelize(torch.nn.Conv2d(3, 8, 3, padding=1), mesh)
    >>> tile = jigsaw.shard(torch.randn(2, 3, 9, 16), mesh, (None, None, "lat", None))
    >>> model(tile).square().mean().backward()
    >>> model.weight.grad.shape
    torch.Size([8, 3, 3, 3])
    """
    if not isinstance(mesh, DeviceMesh):  # pyright: ignore[reportUnnecessaryIsInstance] # what a user may pass
        raise ShardingError(f"mesh={mesh!r} must be a DeviceMesh, as jigsaw.init_mesh(lat=2) gives it")
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ShardingError(f"parallelize takes a model, not {type(model).__name__}; tensors are cut by jigsaw.shard")
    check_count("bucket_bytes", bucket_bytes)
    ranks = mesh.size()
    options = ShardingOptions.checked(mesh, shard_weights, replicate, mp_policy, offload_policy)
    if not hasattr(model, _DONE):
        tensor, pairs = completed_plan(model, tensor, comm.rank_count(mesh, channel), example)
        if pairs.failure:
            text = (
                f"columns and rows were looked for in the model's parts alone, because with example= {pairs.failure}; "
                "pass what it is called with, or a plan by tensor="
            )
            warn_once(f"example {type(model).__name__}", text)
    _check_model(model, mesh, tensor, gather_again)
    setattr(model, _DONE, True)
    reduce_units_behind_their_gradients()  # this also covers units that `fully_shard` makes later
    if not strict:
        run_forward_whole(model)
    if ranks == 1:
        return model
    _start_alike(model, mesh)
    made_before = list(model.parameters())
    cut_channels(model, mesh, channel, tensor, gather_again)
    _check_spectral_norms(model)
    model.register_forward_pre_hook(warn_of_idle_axes(mesh, _axes_of_weights(model)), with_kwargs=True)
    rest = dict(model.named_parameters())
    if options is not None:
        rest = cut_weights(model, mesh, sharding_units(model, unit_bytes) if units is None else units, options)
        whole = set(rest.values())
        refuse_hooks(p for p in model.parameters() if p not in whole)
    mark_replaced(made_before, model.parameters())
    for module in (model, *model.children()):  # children may be called alone, and must see a job of one process, too
        module.register_forward_pre_hook(_enter_module, prepend=True)
        module.register_forward_hook(partial(_leave_module, reduce), always_call=True)
    mark_averaged(model, ranks)
    if rest and reduce:
        reducer = GradientReducer(rest, mesh, bucket_bytes)
        object.__setattr__(model, _REDUCER, reducer)
        model.register_forward_pre_hook(reducer.begin)
    elif rest:
        WholeGradients(rest, mesh, own_hooks=0)
        model.register_forward_pre_hook(warn_of_no_wrapper)
    if debug.is_comparing():
        # compared before FSDP2 gathers the weights
        model.register_forward_pre_hook(_compare_now_and_then(model, mesh), prepend=True)
    return model


def _enter_module(module: nn.Module, args: Any) -> None:
    enter_model(module)


def _leave_module(reduce: bool, module: nn.Module, args: Any, output: Any) -> None:
    if leave_model(module):
        forget_last_input()
        if reduce and torch.is_grad_enabled():
            one_process_backward(output)


def one_process_backward(output: Any) -> None:
    """Let the backward pass through a model's result see one process, too."""
    for x in pytree.tree_leaves(output):
        if isinstance(x, Tile):
            # not raised here, but where the result is used, that its gradient would be lost
            with suppress(ShardingError):
                x.check_no_history()
        local = x.local if isinstance(x, Tile) else x
        if isinstance(local, Tensor) and local.grad_fn is not None and not lacks_values():
            local.register_hook(_begin_backward)


def _begin_backward(gradient: Tensor) -> None:
    if backward_pass := begin_backward_pass():
        at_end_of_pass(backward_pass)


def reducer_of(model: nn.Module) -> GradientReducer | None:
    """Return what averages the gradients of whole weights after `parallelize`; None where nothing does."""
    return getattr(model, _REDUCER, None)


def _compare_now_and_then(model: nn.Module, mesh: DeviceMesh) -> Callable[[nn.Module, Any], None]:
    passes = count()

    def hook(module: nn.Module, args: Any) -> None:
        if next(passes) % debug.hash_interval() == 0:
            named = model.named_parameters()
            sums = [(name, checksum_of_bits(local_part(p)), axes_of_copies(p, mesh)) for name, p in named]
            debug.compare_parameters(mesh, sums)

    return hook


def _axes_of_weights(model: nn.Module) -> set[str]:
    cut = [p for p in model.parameters() if isinstance(p, DTensor)]
    return {
        name
        for p in cut
        for name, placement in zip(p.device_mesh.mesh_dim_names or (), p.placements, strict=False)
        if not placement.is_replicate()
    }


# -- before -----------------------------------------------------------------------------------------------------------


def check_count(name: str, number: Any) -> None:
    """Raise `ShardingError` unless an argument is a whole number of at least 1."""
    if not isinstance(number, Integral) or isinstance(number, bool) or number < 1:
        raise ShardingError(f"{name}={number!r} must be a whole number, 1 or more")


def _check_model(model: nn.Module, mesh: DeviceMesh, tensor: TensorPlan | None, gather_again: bool) -> None:
    if getattr(model, _DONE, False):
        raise ShardingError(
            f"{type(model).__name__} went through jigsaw.parallelize before; call it once, on the outermost module"
        )
    hooked = [name for name, p in model.named_parameters() if has_gradient_hooks(p)]
    facts: list[tuple[Any, ...]] = [("tensor=", *(tensor or {}).items()), ("gather_again=", gather_again)]
    facts += [(n, tuple(p.shape), str(p.dtype), p.requires_grad, n in hooked) for n, p in model.named_parameters()]
    facts += [(name, tuple(b.shape), str(b.dtype), False, False) for name, b in model.named_buffers()]
    for at, theirs in enumerate(told_where_different("parallelize", mesh, facts)):
        if theirs != facts:
            wrong = sorted({str(x) for x in theirs} ^ {str(x) for x in facts}) or ["another order of parameters"]
            raise ShardingError(
                f"parallelize needs the same model and plan on every rank, but rank {at} of the mesh differs from this "
                f"one: {'; '.join(wrong[:4])}"
            )
    if hooked:
        raise ShardingError(
            f"parameter {hooked[0]!r} has a hook on its gradient from before parallelize, which would see this rank's "
            "part: register hooks after parallelize, and they see the whole gradient"
        )
    for name, p in model.named_parameters():
        if p.device.type not in (mesh.device_type, "meta"):
            raise ShardingError(
                f"parameter {name!r} is on {p.device.type} but the mesh is of {mesh.device_type} devices; "
                f"call model.to({mesh.device_type!r}) before parallelize"
            )
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise ShardingError(
                f"module {name!r} makes sparse gradients, which cannot be reduced in a bucket; "
                f"make it with sparse=False"
            )


def _check_spectral_norms(model: nn.Module) -> None:
    """Check for the old spectral norm, which multiplies plain vectors by its weight: torch refuses a cut one."""
    for name, module in model.named_modules():
        for hook in forward_pre_hooks(module):
            if isinstance(hook, SpectralNorm) and isinstance(getattr(module, f"{hook.name}_orig"), DTensor):
                raise ShardingError(
                    f"module {name!r} has torch.nn.utils.spectral_norm, and its weight is cut by a mesh axis; use "
                    "torch.nn.utils.parametrizations.spectral_norm, which is exact, or a mesh without that axis"
                )


@torch.no_grad()
def _start_alike(model: nn.Module, mesh: DeviceMesh) -> None:
    """Fill parameters and buffers with those of the first rank, or of the first that has the part."""
    for x in (*model.parameters(), *model.buffers()):
        if x.device.type != "meta":
            local = local_part(x)
            whole = local.contiguous()
            comm.broadcast_first(whole, mesh, axes_not_cutting(x, mesh))
            if whole is not local:
                local.copy_(whole)


# -- training ---------------------------------------------------------------------------------------------------------


@contextmanager
def no_sync(model: nn.Module) -> Generator[None]:
    """Let backward passes within the block add up this rank's parts and send nothing; the next one reduces them all.

    >>> model = jigsaw.parallelize(torch.nn.Linear(4, 1, bias=False), jigsaw.init_mesh(lat=1))
    >>> with jigsaw.no_sync(model):
    ...     model(torch.ones(1, 4)).sum().backward()
    >>> model(torch.ones(1, 4)).sum().backward()
    >>> model.weight.grad
    tensor([[2., 2., 2., 2.]])
    """
    reducer = reducer_of(model)
    if reducer is not None:
        reducer.hold_back()
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        if reducer is not None:
            reducer.hold_back()  # again, for what was frozen before the block and is trained in it
            reducer.enabled = True
        if isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(True)


@contextmanager
def reduced_at_end(model: nn.Module) -> Generator[None]:
    """Let backward passes within the block send no gradients of whole weights; its end averages them, whoever wrote
    them.

    Weights that are cut (`shard_weights`) are reduced by each backward pass.
    """
    reducer = reducer_of(model)
    if reducer is None:
        yield
        return
    reducer.enabled, reducer.early.waits_for_step = False, True
    try:
        yield
    finally:
        reducer.enabled, reducer.early.waits_for_step = True, False
    reducer.reduce_now()


PIPE_MARK = "_jigsaw_pipe"
"""Attribute of a parameter of a pipeline's stage: the mesh, its axis, and whether this rank counts it in a norm."""

Tensors = nn.Module | Tensor | Iterable[Tensor]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensors, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
) -> Tensor:
    """Scale gradients: ``g <- g min(1, max_norm / |g|)``, where ``|g|`` is the norm of all whole gradients; return
    ``|g|``.

    It is `torch.nn.utils.clip_grad_norm_`, also for a mix of plain parameters and DTensors of several meshes.  For a
    pipeline's stages (`jigsaw.pipeline`) the norm is that of all stages.

    *Sends*: nothing for whole weights; else one all-reduce of one number for each mesh axis that cuts parameters, and
    for the stages of a pipeline.
    *Raises*: `ValueError` for a `norm_type` that is not positive, `RuntimeError` as torch for `error_if_nonfinite`.

    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> weight.grad = torch.tensor([3.0, 4.0])
    >>> jigsaw.clip_grad_norm_([weight], max_norm=1.0)
    tensor(5.)
    >>> weight.grad
    tensor([0.6000, 0.8000])
    """
    if norm_type <= 0:
        raise ValueError(f"norm_type={norm_type} must be positive: 2.0, 1.0, float('inf')")
    if isinstance(parameters, nn.Module | Tensor):
        parameters = parameters.parameters() if isinstance(parameters, nn.Module) else [parameters]
    parameters = list(parameters)
    grads = [p.grad for p in parameters if p.grad is not None]
    total = _norm_over_stages(parameters, norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"the gradient norm of order {norm_type} is {total.item()}, so it cannot be clipped; "
            f"set error_if_nonfinite=False to go on"
        )
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for g in grads:
        local_part(g).mul_(scale.to(g.device))
    return total


def _norm_over_stages(parameters: Sequence[Tensor], p: float) -> Tensor:
    marks = {mark[:2]: mark for x in parameters if (mark := getattr(x, PIPE_MARK, None)) is not None}
    counted = [x.grad for x in parameters if x.grad is not None and getattr(x, PIPE_MARK, (0, 0, True))[2]]
    total = _total_norm(counted, p)
    for mesh, axis in marks:
        total = _combined_norm(total.to(torch.float64), mesh, axis, p).to(total.dtype)
    return total


def _total_norm(grads: Sequence[Tensor], p: float) -> Tensor:
    """Return (sum over all elements of all whole gradients of |g|^p)^(1/p)."""
    groups: dict[tuple[DeviceMesh, tuple[str, ...]] | None, list[Tensor]] = {}
    for g in grads:
        where = None
        if isinstance(g, DTensor):
            names = g.device_mesh.mesh_dim_names or ()
            where = (
                g.device_mesh,
                tuple(n for n, placement in zip(names, g.placements, strict=True) if not placement.is_replicate()),
            )
        groups.setdefault(where, []).append(local_part(g))
    norms: list[Tensor] = []
    for where, locals_ in groups.items():
        filled = [x for x in locals_ if x.numel()]
        norm = torch.nn.utils.get_total_norm(filled, p) if filled else locals_[0].new_zeros(())
        if where is not None:
            for axis in where[1]:
                norm = _combined_norm(norm, where[0], axis, p)
        norms.append(norm)
    return torch.linalg.vector_norm(torch.stack(norms), p) if norms else torch.tensor(0.0)


def _combined_norm(norm: Tensor, mesh: DeviceMesh, axis: str, p: float) -> Tensor:
    if p == float("inf"):
        return comm.all_reduce(norm, mesh, [axis], "max")
    return comm.all_reduce(norm**p, mesh, [axis]) ** (1 / p)
