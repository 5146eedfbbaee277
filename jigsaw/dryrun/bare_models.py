"""Model of a dry run: made by a function or copied, its weights without memory; its blocks, and its optimizer."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from jigsaw.dryrun.known_values import KnownValuesMode
from jigsaw.errors import ShardingError
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import own_buffers, own_parameters
from jigsaw.torch_internals.dispatch import without_modes
from jigsaw.torch_internals.fake_tensors import (
    DataDependentOutputException,
    FakeTensor,
    PaperMode,
    weights_converted_alone,
)
from jigsaw.torch_internals.private_names import replaced_in_torch

ModelMaker = Callable[..., nn.Module]
OptimizerMaker = Callable[[Iterable[nn.Parameter]], Optimizer]

_PARALLELIZED = "_jigsaw_parallelized"
_FactsOfModels = dict[tuple[Any, ...], Any]
_facts_of_models: _FactsOfModels | None = None


@contextmanager
def remembered_models() -> Generator[None]:
    """Assume that models do not change within the block, so that facts found for one mesh are used for the next."""
    global _facts_of_models
    before, _facts_of_models = _facts_of_models, facts_of_models()
    try:
        yield
    finally:
        _facts_of_models = before


def facts_of_models() -> _FactsOfModels:
    """Return what is known of models within `remembered_models`; an empty dict outside of it."""
    return {} if _facts_of_models is None else _facts_of_models


def made_once(model: nn.Module | ModelMaker) -> nn.Module | ModelMaker:
    """Return a function's model, made once, its weights without memory.  One that keeps floats otherwise is not."""
    if isinstance(model, nn.Module) or wants_mesh(model):
        return model
    with PaperMode(), KnownValuesMode():
        try:
            with weights_converted_alone(), _real_tensors_copied():
                built: nn.Module = model()
        except DataDependentOutputException:
            return model  # it reads values: made again in each dry run, which then reports where
        except RuntimeError:
            try:
                with without_modes(), torch.device("meta"):
                    whole = model()
            except Exception:
                return model  # the dry run will raise the function's own error
            check_model_made(whole)
            built = bare_copy(whole, set())
    check_model_made(built)
    return model if any(isinstance(x, FakeTensor) for m in built.modules() for x in _plain_tensors(m)) else built


def make_bare(make: ModelMaker, *mesh: DeviceMesh) -> nn.Module:
    """Return the model that a function makes in the caller's fake mode.

    A function that cannot run there makes its model on the meta device, which is copied into the fake mode.
    """
    try:
        with weights_converted_alone(), _real_tensors_copied():
            bare = make(*mesh)
    except RuntimeError as error:
        try:
            with without_modes(), _AssumedValues(), torch.device("meta"):
                whole = make(*mesh)
        except Exception:
            raise error from None  # the error of the function itself
        check_model_made(whole)
        bare = bare_copy(whole, set())
    check_model_made(bare)
    return bare


@contextmanager
def _real_tensors_copied() -> Generator[None]:
    """Let `copy.deepcopy` copy real tensors into the fake mode, in which torch itself copies no storage."""
    torchs_copy = Tensor.__deepcopy__

    def copied(tensor: Tensor, memo: dict[int, Any]) -> Any:
        if type(tensor) is not Tensor or tensor.grad_fn is not None:
            return torchs_copy(tensor, memo)
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return memo[id(tensor)]

    with replaced_in_torch(Tensor, "__deepcopy__", copied):
        yield


class _AssumedValues(KnownValuesMode):
    """Answers for values that Python reads on the meta device, as `trunc_normal_` does: nothing is true, numbers 1."""

    def unknown_value(self, func: Any, args: Any) -> Any:
        if args[0].is_meta:
            return False if args[0].dtype == torch.bool else 1
        return func(*args)


def _plain_tensors(module: nn.Module) -> list[Tensor]:
    """Return the tensors that a module has as plain attributes, beside weights and buffers."""
    kept = own_parameters(module), own_buffers(module)
    leaves = pytree.tree_leaves([x for x in vars(module).values() if not any(x is own for own in kept)])
    return [x for x in leaves if isinstance(x, Tensor)]


def _may_be_index(x: Any) -> bool:
    """Say whether a buffer may be an index: who owns the rows that it names follows from its values."""
    return type(x) is Tensor and x.device.type == "cpu" and x.dtype in (torch.int64, torch.int32) and x.ndim > 0


def keeps_indices(model: nn.Module) -> bool:
    """Say whether a module of a model keeps a tensor with values that may be an index."""
    return any(_may_be_index(x) for m in model.modules() for x in (*own_buffers(m).values(), *_plain_tensors(m)))


def wants_mesh(make: ModelMaker) -> bool:
    """Say whether a function makes its model from the mesh: it has exactly one argument without a default."""
    if not callable(make):
        raise ShardingError(f"model={make!r} must be a torch.nn.Module, or a function that makes one")
    variable = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(make).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in variable]
    if len(needed) > 1:
        name = getattr(make, "__name__", repr(make))
        raise ShardingError(
            f"model={name} is called without arguments, or with the mesh, but needs {', '.join(needed)}; pass a "
            f"function that knows them, as lambda: {name}(...)"
        )
    return bool(needed)


def check_model_made(model: Any) -> None:
    """Check the model.  *Raises*: `ShardingError` for one that is not a module, or has lazy weights."""
    if not isinstance(model, nn.Module):
        raise ShardingError(f"the model is made by a function that gives {model!r}, no torch.nn.Module")
    for name, p in model.named_parameters():
        if is_lazy(p):
            raise ShardingError(f"{name} is lazy, without a shape yet; call the model once before its dry run")


def bare_copy(model: nn.Module, left_out: set[nn.Module]) -> nn.Module:
    """Return a copy whose parameters have no memory, with nothing in the place of some modules.

    Buffers that may be indices share theirs, so that what is planned for them is planned once.
    """
    if hasattr(model, _PARALLELIZED):
        raise ShardingError("dry_run takes the model before jigsaw.parallelize, which it calls on a copy by itself")
    # deepcopy does not copy what has an entry here
    known: dict[int, Any] = {id(module): nn.Identity() for module in left_out}
    inside = {module for each in left_out for module in each.modules()}
    for module in model.modules():
        own = (*module.parameters(recurse=False), *module.buffers(recurse=False)) if module not in inside else ()
        for x in own:
            if id(x) not in known and not _may_be_index(x):
                bare = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
                known[id(x)] = nn.Parameter(bare, x.requires_grad) if isinstance(x, nn.Parameter) else bare
    with without_modes():  # tensors that may be indices keep their values
        kept = [module for module in model.modules() if module not in inside]
        indices = [x for module in kept for x in own_buffers(module).values() if _may_be_index(x)]
        for x in (*indices, *(x for module in kept for x in _plain_tensors(module))):
            if id(x) not in known:
                known[id(x)] = x.detach().requires_grad_(x.is_leaf and x.requires_grad)
        return copy.deepcopy(model, known)


def cast_weights(model: nn.Module, dtype: torch.dtype) -> None:
    """Do ``model.to(dtype)``, which itself cannot exchange tensors that the meter watches."""
    cast: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, p in module.named_parameters(recurse=False):
            if p.is_floating_point():
                cast[p] = cast[p] if p in cast else nn.Parameter(p.detach().to(dtype), p.requires_grad)
                setattr(module, name, cast[p])
        for name, x in module.named_buffers(recurse=False):
            if x.is_floating_point():
                setattr(module, name, x.to(dtype))


# -- blocks -----------------------------------------------------------------------------------------------------------


def checkpointed_modules(model: nn.Module, which: str | Sequence[str]) -> list[nn.Module]:
    """Return the modules that the backward pass computes again: the blocks of a model, or those of some names."""
    if which == "none":
        return []
    if which != "blocks":
        names = dict(model.named_modules())
        if isinstance(which, str) or not isinstance(which, Sequence) or not all(name in names for name in which):
            some = ", ".join(name for name in names if name)
            raise ShardingError(f"checkpoint={which!r} is to be 'none', 'blocks' or names of modules, of {some}")
        return [names[name] for name in which]
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and any(True for _ in m.parameters())]
    inner = {id(n) for m in lists for n in m.modules() if n is not m}
    rows: list[nn.Module] = [m for m in lists if id(m) not in inner]
    if not rows:
        rows += [m for m in model.modules() if isinstance(m, nn.Sequential) and len(m) > 1][:1]
    return [block for row in rows for block in row.children() if any(True for _ in block.parameters())]


def rows_of_blocks(model: nn.Module) -> list[nn.ModuleList | nn.Sequential]:
    """Return lists of at least three modules that are equal in type and weights."""

    def look(module: nn.Module) -> Any:
        return type(module), [(name, p.shape) for name, p in module.named_parameters()]

    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m) >= 3]
    return [row for row in lists if look(row[0])[1] and all(look(block) == look(row[0]) for block in row)]


# -- its optimizer ----------------------------------------------------------------------------------------------------

# Those that make the same state of parameters of a group that have the same shape and cut.
_OF_EACH_ALIKE = {
    torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
    torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
}  # fmt: skip


def _cut_of_weight(p: Tensor) -> tuple[Any, ...]:
    return (p.device_mesh, p.placements) if isinstance(p, DTensor) else ()


def stepped_optimizer(make: OptimizerMaker, parameters: Sequence[nn.Parameter]) -> Optimizer:
    """Return an optimizer with its state, by a step of the first of all parameters that are alike."""
    optimizer = make([p for p in parameters if p.requires_grad])
    if not isinstance(optimizer, Optimizer):
        raise ShardingError(f"optimizer= must make a torch.optim.Optimizer of parameters, and made {optimizer!r}")
    knows_looks = type(optimizer) in _OF_EACH_ALIKE
    firsts: dict[Any, nn.Parameter] = {}
    alike: list[tuple[nn.Parameter, nn.Parameter]] = []
    for at, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            look = (at, p.shape, p.stride(), p.dtype, _cut_of_weight(p)) if knows_looks else p
            alike.append((p, firsts.setdefault(look, p)))
    for p in firsts.values():
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for p, first in alike:
        if p is not first:
            state = optimizer.state[first].items()
            optimizer.state[p] = {name: x.clone() if isinstance(x, Tensor) else x for name, x in state}
    return optimizer
