"""Plan of columns and rows for a model that has none: a run on paper with an example, or with likely inputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from jigsaw.parallel.channel_watcher import ChannelWatcher, FoundPairs, PairCandidate
from jigsaw.parallel.models_on_paper import caches_on_paper, copy_without_values, unchanged_draws
from jigsaw.ranks.model_world import within_model
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.dispatch import without_modes
from jigsaw.torch_internals.fake_tensors import VALUE_ERRORS, PaperMode, quiet_failures


def find_pairs(
    model: nn.Module, able: Mapping[str, PairCandidate], ranks: int, example: tuple[Any, Mapping[str, Any]] | None
) -> FoundPairs:
    """Return the columns and rows among the layers that `able` names.

    `example` has the arguments of a call.  Without it the model is called with tokens, images or indices of the size
    that its first layer takes.  Where that raises, its parts are called so, also after an example.  A module that
    cannot run without values, as routed experts, is left out with all of its class: its result is taken to be as its
    first argument, and its parts are called.
    """
    if not able:
        return FoundPairs()
    mode = PaperMode()
    with without_modes():
        try:
            bare = copy_without_values(model, mode, "cpu")
        except Exception as error:  # the model's own code may raise any error
            return FoundPairs(reasons=dict.fromkeys(able, f"copy.deepcopy(model) raises {error!r}"))
        weights = {id(bare.get_submodule(name).weight): name for name in able}
        whole = set[str]()  # names of keys and values with fewer heads than ranks
        left_out = dict[nn.Module, str]()  # modules that need values, and what they raised
        while True:
            watcher = ChannelWatcher(weights, able, ranks, whole)
            with mode, torch.no_grad(), quiet_failures(), unchanged_draws(), within_model(bare):
                failure = ""
                if example is None:
                    _call_parts(watcher, "", bare, able, left_out)
                else:
                    args, kwargs = pytree.tree_map(_bare_input, example)
                    failure = _call_on_paper(watcher, bare, args, kwargs, left_out)
                    for child, module in bare.named_children() if failure else ():
                        _call_parts(watcher, child, module, able, left_out)
                for name, module in list(bare.named_modules()):
                    for child, inner in module.named_children() if module in left_out else ():
                        _call_parts(watcher, f"{name}.{child}", inner, able, left_out)
            pairs = replace(watcher.pairs(), failure=failure)
            if whole >= watcher.too_few:
                break
            whole |= watcher.too_few
        for cache in caches_on_paper():
            cache.cache_clear()
    names = {module: name for name, module in bare.named_modules()}
    owners = {
        module: why for module, why in left_out.items() if next(module.parameters(recurse=False), None) is not None
    }
    return replace(
        pairs, reasons=pairs.reasons | {names[m]: f"its weights stay whole: {why}" for m, why in owners.items()}
    )


def _bare_input(x: Any) -> Any:
    return torch.empty(x.shape, dtype=x.dtype) if isinstance(x, Tensor) else x


def _call_on_paper(
    watcher: ChannelWatcher, part: nn.Module, args: Any, kwargs: Mapping[str, Any], left_out: dict[nn.Module, str]
) -> str:
    """Follow a call.  Return why it failed, or an empty text."""
    leaves = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    before = watcher.begin(x for x in leaves if x.is_floating_point())
    try:
        with watcher:
            out = part(*args, **kwargs)
    except Exception as error:  # the model's own code may raise any error
        module = _module_to_leave_out(part, error, left_out)
        why = f"on paper {type(module or part).__name__} raises {type(error).__name__}: {error}"
        watcher.go_back(before, "" if module else why)
        if module is None:
            return why
        for each in part.modules():
            if type(each) is type(module):
                left_out[each], each.forward = why, _like_first_argument
    else:
        watcher.end(out)
        return ""
    return _call_on_paper(watcher, part, args, kwargs, left_out)


def _module_to_leave_out(part: nn.Module, error: Exception, left_out: Mapping[nn.Module, str]) -> nn.Module | None:
    """Return the innermost module of a part in which an error was raised, if it may be left out; the part is not.

    It may where it asked for values.  So may one with weights of several matrices, as experts have, whatever it raised:
    torch's kernels for shapes take fewer types of these than others do.
    """
    inner, module = set(part.modules()) - {part}, None
    at = error.__traceback__
    while at is not None:
        owner = at.tb_frame.f_locals.get("self")
        module = owner if isinstance(owner, nn.Module) and owner in inner else module
        at = at.tb_next
    has_matrices = module is not None and any(p.ndim > 2 for p in module.parameters(recurse=False))
    may_go = (has_matrices or isinstance(error, VALUE_ERRORS)) and module not in left_out
    return module if may_go else None


def _like_first_argument(*args: Any, **kwargs: Any) -> Tensor:
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    if not tensors:
        raise TypeError("a module that is left out on paper was called without a tensor")
    return torch.zeros_like(tensors[0])


# -- calls without an example -----------------------------------------------------------------------------------------


def _call_parts(
    watcher: ChannelWatcher,
    name: str,
    part: nn.Module,
    able: Mapping[str, PairCandidate],
    left_out: dict[nn.Module, str],
) -> None:
    prefix = f"{name}." if name else ""
    if sum(layer.startswith(prefix) for layer in able) < 2:
        return
    if not all(_call_on_paper(watcher, part, args, {}, left_out) for args in _likely_arguments(part)):
        return  # all likely arguments were tried, because only some fit the module
    for child, module in part.named_children():
        _call_parts(watcher, prefix + child, module, able, left_out)


def _likely_arguments(part: nn.Module) -> Iterator[tuple[Tensor, ...]]:
    if isinstance(part, (nn.ModuleList, nn.ModuleDict)):
        return
    kinds = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD
    wanted = [p for p in inspect.signature(part.forward).parameters.values() if p.kind in kinds]
    # language models of transformers have a default for each argument, and take tokens first
    count = max(sum(p.default is p.empty for p in wanted), min(len(wanted), 1))
    for first, vector in _first_inputs(part):
        yield (first,) * count
        if count > 1:  # such as a condition for each sample
            yield (first, *(vector,) * (count - 1))


def _first_inputs(part: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield inputs that the first layer takes, and a vector for each sample; two samples, sixteen tokens."""
    for module in part.modules():
        if isinstance(module, nn.Embedding):
            yield torch.zeros(2, 16, dtype=torch.int64), torch.empty(2, module.embedding_dim)
        elif isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            for size in (32, 224):
                yield torch.empty(2, module.in_channels, *(size,) * len(module.kernel_size)), torch.empty(2)
        elif isinstance(module, (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.MultiheadAttention)):
            width = (
                module.in_features
                if isinstance(module, nn.Linear)
                else module.embed_dim
                if isinstance(module, nn.MultiheadAttention)
                else module.normalized_shape[-1]
            )
            for tokens in ((16,), (4, 4), ()):
                yield torch.empty(2, *tokens, width), torch.empty(2, width)
        else:
            continue
        return
