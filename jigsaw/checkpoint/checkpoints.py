"""Checkpoints of model, optimizer and loader, written by all ranks together and read on any mesh.

A checkpoint is a folder in the format of `torch.distributed.checkpoint`, with a key a tensor: ``model.<name>``,
``optimizer.<parameter>.<state>``, and ``jigsaw.json`` for small state that is the same on every rank.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, cast, overload

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import zeros as replicated_zeros
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from jigsaw.checkpoint.checkpoint_files import (
    PlannedTensors,
    WrittenTensors,
    check_file_share,
    check_readable_in_place,
    check_same_arguments,
    fail_together,
    open_together,
    read_tensors,
)
from jigsaw.checkpoint.checkpoint_folder import (
    CheckpointDraft,
    begin_checkpoint,
    commit_checkpoint,
    removed_on_failure,
)
from jigsaw.checkpoint.checkpoint_index import StoredTensor
from jigsaw.checkpoint.checkpoint_state import (
    CheckpointPath,
    checked_path,
    is_converted_weight,
    plain_state,
    restored_state,
)
from jigsaw.checkpoint.model_states import copies_in_state, names_in_state
from jigsaw.checkpoint.numbered_saves import (
    RemovalShare,
    check_numbered,
    latest,
    older_saves,
    order_of_next,
    removal_shares,
    remove_folders,
    remove_share,
)
from jigsaw.checkpoint.pending_save import PendingSave, begin_save, end_pending_save
from jigsaw.checkpoint.piece_writers import check_equal_copies
from jigsaw.comm.agreement import decide_on_first_rank, told_in_job_where_different
from jigsaw.errors import CheckpointError, writing_to
from jigsaw.tile.tile import Tile

__all__ = ["CheckpointError", "PendingSave", "Stateful", "latest", "load", "save"]


class Stateful(Protocol):
    """A loader, a learning rate schedule, a gradient scaler: its state is small, and the same on every rank."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return what `load_state_dict` takes."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Continue from a state."""
        ...


@overload
def save(
    path: CheckpointPath,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    loader: Stateful | None = None,
    wait: Literal[True] = True,
    keep: int | None = None,
    **others: Stateful,
) -> None: ...


@overload
def save(
    path: CheckpointPath,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    loader: Stateful | None = None,
    wait: Literal[False],
    keep: int | None = None,
    **others: Stateful,
) -> PendingSave: ...


class StagedModel(Protocol):
    """A pipeline (`jigsaw.pipeline`), with the state of only this rank's stages, by the names of the whole model."""

    names_of_all_stages: Sequence[str]

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> Any: ...

    def named_parameters(self) -> Iterable[tuple[str, nn.Parameter]]: ...


CheckpointModel = nn.Module | StagedModel


def save(
    path: CheckpointPath,
    *,
    model: CheckpointModel | None = None,
    optimizer: Optimizer | None = None,
    loader: Stateful | None = None,
    wait: bool = True,
    keep: int | None = None,
    **others: Stateful,
) -> PendingSave | None:
    """Write a checkpoint to the folder `path`, each rank its own part; an old one is replaced once everything is
    written.

    A pipeline (`jigsaw.pipeline`) is a model as well, with an optimizer of its own on each rank; its checkpoint is that
    of the whole model. `others` are more objects with ``state_dict``: ``scheduler=scheduler``.  An optimizer needs its
    `model`, which names its parameters. Every rank calls this, with a `path` that all see.

    What their ``state_dict`` returns is numbers, texts, bytes, None, lists, tuples and dicts of them, and tensors of at
    most 1 MB. It is kept as JSON.

    With ``wait=False`` each rank copies its share (1/P of all bytes) to memory, and a thread writes it while training
    continues; `PendingSave.wait` returns once the checkpoint is whole.  A save waits for the one before it.

    With `keep`, older checkpoints beside this one are removed once it is whole, so that `keep` are left with this one.
    Of ``run/step-100``, ``run/step-200``, ... they are those with lower numbers, except for the last that were saved.
    `latest` finds the last one.  Only checkpoints that jigsaw wrote, without other files, are ever replaced or removed.

    *Sends*: two digests to all, of arguments and checksums, plans to the first rank, but no tensors.  What was
    planned for the last save is taken again where no rank's names, shapes or cuts have changed.
    *Raises*: `CheckpointError` for an optimizer without its model, and a state that is not plain. Also for tensors
    that should be the same on all ranks and are not, because a checkpoint would have those of one rank.  Also where
    `path` differs between ranks, or is anything but a checkpoint or an empty folder. Every rank raises where one
    cannot write, and where the save before failed in the background and no one waited for it.

    >>> model = torch.nn.Linear(4, 2)
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> jigsaw.save("step-100", model=model, optimizer=optimizer)
    >>> again = torch.nn.Linear(4, 2)
    >>> jigsaw.load("step-100", model=again)
    >>> torch.equal(again.weight, model.weight)
    True
    """
    end_pending_save()
    final, rank = checked_path(path), dist.get_rank() if dist.is_initialized() else 0
    if not wait:  # the working folder may be another one when the thread writes
        final = final.absolute()
    check_same_arguments(final, keep=keep)
    check_numbered(final, keep)
    tensors, small = fail_together(lambda: _checkpoint_state(model, optimizer, _stateful_objects(loader, others)))
    small = _joined_over_stages(model, small)
    check_equal_copies(tensors)
    what = f"the tensors of {final} cannot be written"
    draft = fail_together(lambda: begin_checkpoint(final, order_of_next(final)), of_first=True, what=what)
    # relative to this rank's own working folder
    draft = CheckpointDraft(final, final.with_name(draft.folder.name), draft.order)
    with removed_on_failure(draft, rank == 0):
        planned = PlannedTensors(draft.folder, tensors)
    older: list[Path] = []
    again = "save again; what was saved before is as it was"

    def write_own_part() -> WrittenTensors:
        with writing_to(final, again):  # torch's own words for a full disk are "unexpected pos"
            return planned.write()

    def close(written: list[WrittenTensors]) -> list[RemovalShare]:
        with writing_to(final, again):
            sums = planned.write_index(written)
        commit_checkpoint(draft, small, sums)
        older.extend([] if keep is None else older_saves(final, keep))
        return removal_shares(older, len(written))

    def write(group: dist.ProcessGroup | None) -> None:
        with removed_on_failure(draft, rank == 0):
            share = decide_on_first_rank(write_own_part, close, what, CheckpointError, group)
        if share is not None:
            decide_on_first_rank(
                lambda: remove_share(final.parent, share),
                lambda done: remove_folders(older, done, keep),
                f"checkpoints older than {final} cannot be removed",
                CheckpointError,
                group,
            )

    if wait:
        return write(None)
    planned.copy()
    del tensors  # because `write` would keep it otherwise
    return begin_save(final, write)


def load(
    path: CheckpointPath,
    *,
    model: CheckpointModel | None = None,
    optimizer: Optimizer | None = None,
    loader: Stateful | None = None,
    **others: Stateful,
) -> None:
    """Read a checkpoint of any mesh into objects of this one: each rank reads the rows that it holds, in place.

    Call `jigsaw.parallelize` before, if at all, and make the optimizer from that model.  No file of a checkpoint can
    make this run code.  Before anything is changed, the files of tensors are compared with the checksums of what was
    saved, each by one rank.

    *Raises*: `CheckpointError` that names a damaged file, or lists what is missing, left over or of another shape.
    Also for the state of another class of optimizer, and for ranks that name different checkpoints. Nothing is changed
    then.

    >>> model = torch.nn.Linear(4, 2)
    >>> jigsaw.save("best", model=model)
    >>> jigsaw.load("best", model=torch.nn.Linear(4, 3))
    Traceback (most recent call last):
        ...
    jigsaw.errors.CheckpointError: the checkpoint best is of another model: 'model.weight' has shape (2, 4)...
    """
    end_pending_save()  # the pending save may be of this checkpoint
    final = checked_path(path)
    check_same_arguments(final)
    checkpoint = open_together(final)
    things = _stateful_objects(loader, others)
    wanted = [f"state of {name}" for name in things] + ["optimizer groups"] * (optimizer is not None)
    absent = sorted(set(wanted) - set(checkpoint.state))
    if absent:
        raise CheckpointError(f"the checkpoint {os.fspath(path)} has no {' and no '.join(absent)}")
    small = {key: restored_state(value) for key, value in checkpoint.state.items()}
    stored = {**checkpoint.tensors, **{key: None for key in small if key.startswith(("model.", "optimizer."))}}
    state = _model_state(path, stored, model)
    slots = _optimizer_slots(path, stored, model, optimizer)
    if optimizer is not None:
        groups = _group_options(optimizer, _parameter_names(model, optimizer))
        elsewhere = set(_names_of_all_stages(model)).difference(*(group["params"] for group in groups))
        saved: Any = small["optimizer groups"]
        if not isinstance(saved, list) or not all(
            isinstance(each, dict) and isinstance(cast("Any", each).get("params"), list) for each in cast("Any", saved)
        ):
            raise CheckpointError(
                f"the checkpoint {os.fspath(path)} has parameter groups that jigsaw.save never writes"
            )
        for group in small["optimizer groups"]:
            group["params"] = [name for name in group["params"] if name not in elsewhere]
        _check_groups(path, small["optimizer groups"], groups)
        _check_options(path, small.get("optimizer options"), optimizer)
        _check_class(path, small.get("optimizer classes"), optimizer)
    tensors = {key: x for key, x in (state | slots).items() if isinstance(x, torch.Tensor)}
    copies = copies_in_state(model, state) if isinstance(model, nn.Module) else {}
    fail_together(lambda: check_readable_in_place(tensors))
    if tensors:
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        fail_together(lambda: check_file_share(checkpoint, rank, ranks))
    # first, because these may refuse their state, and then nothing else may have changed
    for name, thing in things.items():
        thing.load_state_dict(small[f"state of {name}"])
    read_tensors(checkpoint, tensors)
    if model is not None:
        extra = {key: small[key] for key in state if key not in tensors} | copies
        _unwrapped_model(model).load_state_dict(
            {key.removeprefix("model."): value for key, value in extra.items()}, strict=False
        )
    if optimizer is not None:
        values = {key: tensors[key] if key in tensors else small[key] for key in slots}
        _restore_optimizer(optimizer, _parameter_names(model, optimizer), small["optimizer groups"], values)


def _checkpoint_state(
    model: CheckpointModel | None, optimizer: Optimizer | None, things: Mapping[str, Stateful]
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return the tensors of a checkpoint, and everything else as JSON."""
    state: dict[str, Any] = {}
    small: dict[str, Any] = {}
    if model is not None:
        state |= {f"model.{name}": x for name, x in _unwrapped_model(model).state_dict().items()}
    if optimizer is not None:
        names = _parameter_names(model, optimizer)
        small["optimizer groups"] = plain_state(_group_options(optimizer, names), "optimizer.param_groups")
        small["optimizer options"] = sorted(_holding_optimizer(optimizer).defaults)
        small["optimizer classes"] = _optimizer_classes(optimizer)
        for p, values in _holding_optimizer(optimizer).state.items():
            if p not in names:
                raise CheckpointError(
                    f"the optimizer {type(optimizer).__name__} has state of {p!r}, which is not a parameter of the "
                    "model; keep what is of all parameters in its param_groups, or save it by a name of its own"
                )
            state |= {f"optimizer.{names[p]}.{key}": value for key, value in values.items()}
    tensors = {key: x for key, x in state.items() if isinstance(x, torch.Tensor)}
    for key, x in tensors.items():
        if isinstance(x, Tile):  # torch would write one rank's part of these
            raise CheckpointError(
                f"{key!r} is a Tile of shape {tuple(x.shape)}, as a buffer is that one was written into; a checkpoint "
                "keeps plain tensors and DTensors: register the buffer with persistent=False, or keep x.full_tensor()"
            )
        if x.layout != torch.strided:
            raise CheckpointError(
                f"{key!r} of shape {tuple(x.shape)} is of layout {x.layout}, and a checkpoint keeps dense tensors: "
                "make it x.to_dense(), or register the buffer with persistent=False"
            )
    small |= {key: plain_state(value, key) for key, value in state.items() if key not in tensors}
    for name, thing in things.items():
        small[f"state of {name}"] = plain_state(thing.state_dict(), f"{name}.state_dict()")
    return tensors, small


def _joined_over_stages(model: CheckpointModel | None, small: dict[str, Any]) -> dict[str, Any]:
    """Join what ranks with other stages of a pipeline have beside tensors, as the whole model would have it."""
    order = _names_of_all_stages(model)
    if not order:
        return small
    every = told_in_job_where_different("save", small) or [small]
    joined = {key: value for theirs in reversed(every) for key, value in theirs.items()}
    if "optimizer groups" in small:
        by_rank = [theirs["optimizer groups"] for theirs in every]
        if len({len(groups) for groups in by_rank}) > 1:
            raise CheckpointError(
                f"the optimizers of a pipeline's ranks have {sorted({len(g) for g in by_rank})} parameter groups; make "
                "the same groups on every rank, if need be without parameters"
            )
        names = [{name for group in groups for name in group["params"]} for groups in zip(*by_rank, strict=True)]
        joined["optimizer groups"] = [
            {**group, "params": [name for name in order if name in names_of_group]}
            for group, names_of_group in zip(by_rank[0], names, strict=True)
        ]
    return joined


def _names_of_all_stages(model: CheckpointModel | None) -> Sequence[str]:
    return getattr(model, "names_of_all_stages", ())


def _unwrapped_model(model: CheckpointModel) -> CheckpointModel:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _parameter_names(model: CheckpointModel | None, optimizer: Optimizer) -> Mapping[Any, str]:
    named: dict[Any, str] = {}
    if model is not None:
        inner = _unwrapped_model(model)
        named |= {p: name for name, p in inner.named_parameters()}
        named |= names_in_state(inner) if isinstance(inner, nn.Module) else {}
    strays = [p for group in optimizer.param_groups for p in group["params"] if p not in named]
    if strays:
        raise CheckpointError(
            f"the optimizer has {len(strays)} parameters that are not the model's (the first of shape "
            f"{tuple(strays[0].shape)}); pass model= as well, and make the optimizer after jigsaw.parallelize"
        )
    return named


def _stateful_objects(loader: Stateful | None, others: Mapping[str, Stateful]) -> dict[str, Stateful]:
    return ({} if loader is None else {"loader": loader}) | dict(others)


def _holding_optimizer(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer that holds this rank's state: the inner one of torch's ZeRO-1, which has only its part."""
    # not imported here, because that takes seconds; an optimizer of this class exists only if it was imported
    module: Any = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    is_zero = module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)
    return cast("Any", optimizer).optim if is_zero else optimizer


def _group_options(optimizer: Optimizer, names: Mapping[Any, str]) -> list[dict[str, Any]]:
    return [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]


def _model_state(path: CheckpointPath, stored: Mapping[str, Any], model: CheckpointModel | None) -> dict[str, Any]:
    if model is None:
        return {}
    state = {f"model.{name}": x for name, x in _unwrapped_model(model).state_dict().items()}
    known = {*state, *(f"model.{name}" for name in _names_of_all_stages(model))}
    wrong = [f"left over: {key!r}" for key in stored if key.startswith("model.") and key not in known]
    for key, x in state.items():
        saved = stored.get(key)
        if key not in stored:
            wrong.append(f"missing: {key!r}")
        elif isinstance(saved, StoredTensor) != isinstance(x, torch.Tensor):
            wrong.append(f"{key!r} is a tensor in one and a value in the other")
        elif isinstance(saved, StoredTensor) and saved.shape != x.shape:
            wrong.append(f"{key!r} has shape {saved.shape}, the model's {tuple(x.shape)}")
        elif isinstance(saved, StoredTensor) and not is_converted_weight(saved.dtype, x.dtype):
            wrong.append(f"{key!r} is {saved.dtype}, the model's {x.dtype}, which is not converted")
    if wrong:
        raise CheckpointError(f"the checkpoint {os.fspath(path)} is of another model: {'; '.join(wrong[:5])}")
    return state


def _optimizer_slots(
    path: CheckpointPath, stored: Mapping[str, Any], model: CheckpointModel | None, optimizer: Optimizer | None
) -> dict[str, Any]:
    """Return a place for every value of the optimizer's state: one like its parameter is cut as that is."""
    if optimizer is None:
        return {}
    owners = {name: p for p, name in _parameter_names(model, optimizer).items()}
    elsewhere = set(_names_of_all_stages(model))
    held = {p for group in _holding_optimizer(optimizer).param_groups for p in group["params"]}
    elsewhere |= {name for name, p in owners.items() if p not in held}
    owners = {name: p for name, p in owners.items() if p in held}
    slots: dict[str, Any] = {}
    for key, saved in stored.items():
        if not key.startswith("optimizer."):
            continue
        name, _, kind = key.removeprefix("optimizer.").rpartition(".")
        if name not in owners and name in elsewhere:
            continue
        if name not in owners:
            raise CheckpointError(f"the checkpoint {os.fspath(path)} has {key!r}, but the model has no such parameter")
        if not isinstance(saved, StoredTensor):
            slots[key] = None
        elif kind != "step" and saved.shape == owners[name].shape:
            slots[key] = torch.zeros_like(owners[name], dtype=saved.dtype, requires_grad=False)
        elif saved.shape and isinstance(owner := owners[name], DTensor):  # sums over a weight: whole on every rank
            slots[key] = replicated_zeros(saved.shape, dtype=saved.dtype, device_mesh=owner.device_mesh)
        else:  # steps are counted on the processor; those of a fused or captured optimizer move once groups are read
            device = "cpu" if kind == "step" else owners[name].device
            slots[key] = torch.zeros(saved.shape, dtype=saved.dtype, device=device)
    return slots


def _check_groups(
    path: CheckpointPath, saved: Sequence[Mapping[str, Any]], current: Sequence[Mapping[str, Any]]
) -> None:
    theirs, ours = ([group["params"] for group in groups] for groups in (saved, current))
    if theirs != ours:
        raise CheckpointError(
            f"the checkpoint {os.fspath(path)} has an optimizer with groups of {[len(g) for g in theirs]} parameters, "
            f"this one has {[len(g) for g in ours]}, or other parameters in them; make it with the same groups"
        )


def _optimizer_classes(optimizer: Optimizer) -> list[str]:
    """Return the names of an optimizer's class and of those that it is made from: ``AdamW``, ``Adam``."""
    classes = type(_holding_optimizer(optimizer)).__mro__
    return [each.__qualname__ for each in classes if issubclass(each, Optimizer) and each is not Optimizer]


def _check_class(path: CheckpointPath, saved: Any, optimizer: Optimizer) -> None:
    """Refuse the state of another class of optimizer, unless one is made from the other.

    Its options may all be options of this one, too: those of Adamax are options of Adam.  Older checkpoints do not
    say the class.
    """
    theirs, ours = cast("list[Any]", saved) if isinstance(saved, list) else [], _optimizer_classes(optimizer)
    if theirs and ours and theirs[0] not in ours and ours[0] not in theirs:
        raise CheckpointError(
            f"the checkpoint {os.fspath(path)} is of the optimizer {theirs[0]}, and this one is {ours[0]}, whose state "
            "is another; make the optimizer that was saved, or load the model alone"
        )


def _check_options(path: CheckpointPath, saved: Any, optimizer: Optimizer) -> None:
    """Refuse the state of another optimizer, which would begin anew from it, or fail in its first step."""
    holding = _holding_optimizer(optimizer)
    # versions of torch add options, or lack some of a later one; two optimizers each have some that the other lacks
    theirs = set(map(str, cast("Any", saved))) if isinstance(saved, list) else set[str]()
    ours = set(holding.defaults)
    if theirs - ours and ours - theirs:
        raise CheckpointError(
            f"the checkpoint {os.fspath(path)} is of another optimizer than {type(holding).__name__}: it has the "
            f"options {sorted(theirs - ours)}, and not {sorted(ours - theirs)}; make the optimizer that was saved, or "
            "load the model alone"
        )


def _restore_optimizer(optimizer: Optimizer, names: Mapping[Any, str], groups: Any, slots: Mapping[str, Any]) -> None:
    state: dict[str, dict[str, Any]] = {}
    for key, value in slots.items():
        name, _, kind = key.removeprefix("optimizer.").rpartition(".")
        state.setdefault(name, {})[kind] = value
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        for key, value in saved.items():
            if key == "params":
                continue
            if isinstance(value, torch.Tensor) and isinstance(current := group.get(key), torch.Tensor):
                value = value.to(current.device)  # such as a learning rate in a tensor, for CUDA graphs
            group[key] = value
    held_state = _holding_optimizer(optimizer).state
    held_state.clear()
    counts_there = {p for group in optimizer.param_groups if _counts_on_device(group) for p in group["params"]}
    for p, name in names.items():
        if name in state:
            held_state[p] = state[name]
            if p in counts_there and isinstance(step := state[name].get("step"), torch.Tensor):
                held_state[p]["step"] = step.to(p.device)


def _counts_on_device(group: Mapping[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("capturable"))
