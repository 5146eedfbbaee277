"""Checkpoints of model, optimizer and loader, written by all ranks together and read on any mesh.

A checkpoint is a folder in the format of `torch.distributed.checkpoint`, with a key a tensor: ``model.<name>``,
``optimizer.<parameter>.<state>``, and a pickled value for what is small and alike on every rank.
"""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from jigsaw import comm


class CheckpointError(ValueError):
    """A checkpoint that is not there, not whole, or of another model or optimizer; raised alike on every rank."""


class Stateful(Protocol):
    """A loader, a learning rate schedule, a gradient scaler: its state is small, and alike on every rank."""

    def state_dict(self) -> Mapping[str, Any]:
        """What `load_state_dict` takes."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Go on from a state."""
        ...


Path_ = str | os.PathLike[str]


def save(
    path: Path_,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    loader: Stateful | None = None,
    **others: Stateful,
) -> None:
    """Write a checkpoint to the folder `path`, each rank its own part; an old one is replaced once all is written.

    `others` are more objects with ``state_dict``: ``scheduler=scheduler``.  An optimizer needs its `model`, which names
    its parameters.  Every rank calls this, with a `path` that all of them see.

    *Sends*: plans, and no tensors.
    *Raises*: `CheckpointError` for an optimizer without its model.
    """
    state: dict[str, Any] = {}
    if model is not None:
        state |= {f"model.{name}": x for name, x in _bare(model).state_dict().items()}
    if optimizer is not None:
        names = _names(model, optimizer)
        state["optimizer groups"] = pickle.dumps(_groups(optimizer, names))
        for p, values in optimizer.state.items():
            state |= {f"optimizer.{names[p]}.{key}": value for key, value in values.items()}
    for name, thing in _small(loader, others).items():
        state[f"state of {name}"] = pickle.dumps(thing.state_dict())
    final, part = Path(path), Path(f"{os.fspath(path)}.part")
    if _is_first():
        shutil.rmtree(part, ignore_errors=True)
    comm.barrier()
    dcp.save(state, checkpoint_id=part, no_dist=not dist.is_initialized())
    comm.barrier()
    if _is_first():
        old = Path(f"{part}.old")
        shutil.rmtree(old, ignore_errors=True)
        if final.exists():
            final.rename(old)
        part.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    comm.barrier()


def load(
    path: Path_,
    *,
    model: nn.Module | None = None,
    optimizer: Optimizer | None = None,
    loader: Stateful | None = None,
    **others: Stateful,
) -> None:
    """Read a checkpoint of any mesh into objects of this one: each rank reads the rows that it holds, in place.

    The model has been through `jigsaw.parallelize`, if it shall be, and the optimizer was made from it.

    *Raises*: `CheckpointError` that lists what is missing, left over or of another shape; nothing is changed then.
    """
    there = _metadata(Path(path))
    things = _small(loader, others)
    small: dict[str, Any] = {f"state of {name}": None for name in things}
    if optimizer is not None:
        small["optimizer groups"] = None
    absent = sorted(set(small) - set(there))
    if absent:
        raise CheckpointError(f"the checkpoint {os.fspath(path)} has no {' and no '.join(absent)}")
    state = _model_state(path, there, model)
    slots = _slots(path, there, model, optimizer)
    small = {key: pickle.loads(value) for key, value in _read(path, small).items()}
    if optimizer is not None:
        _check_groups(path, small["optimizer groups"], _groups(optimizer, _names(model, optimizer)))
    for name, thing in things.items():  # they refuse what does not fit them, so before anything else is changed
        thing.load_state_dict(small[f"state of {name}"])
    found = _read(path, state | slots)
    if optimizer is not None:
        _restore(optimizer, _names(model, optimizer), small["optimizer groups"], {key: found[key] for key in slots})


def _read(path: Path_, state: dict[str, Any]) -> dict[str, Any]:
    """`state`, its tensors filled and its other values replaced."""
    if state:
        dcp.load(state, checkpoint_id=path, no_dist=not dist.is_initialized())
    return state


def _is_first() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


# -- names ------------------------------------------------------------------------------------------------------------


def _bare(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def _names(model: nn.Module | None, optimizer: Optimizer) -> Mapping[Any, str]:
    """The name of every parameter of the optimizer."""
    named = {p: name for name, p in _bare(model).named_parameters()} if model is not None else {}
    strays = [p for group in optimizer.param_groups for p in group["params"] if p not in named]
    if strays:
        raise CheckpointError(
            f"the optimizer has {len(strays)} parameters that are not the model's (the first of shape "
            f"{tuple(strays[0].shape)}); pass model= as well, and make the optimizer after jigsaw.parallelize"
        )
    return named


def _small(loader: Stateful | None, others: Mapping[str, Stateful]) -> dict[str, Stateful]:
    return ({} if loader is None else {"loader": loader}) | dict(others)


def _groups(optimizer: Optimizer, names: Mapping[Any, str]) -> list[dict[str, Any]]:
    """The options of every parameter group, and the names of its parameters."""
    return [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]


# -- reading ----------------------------------------------------------------------------------------------------------


def _metadata(path: Path) -> dict[str, Any]:
    """What the checkpoint has, by key."""
    if not (path / ".metadata").exists():
        why = "is not whole: it has no .metadata, which is written last" if path.exists() else "does not exist"
        raise CheckpointError(f"the checkpoint {path} {why}")
    return dcp.FileSystemReader(path).read_metadata().state_dict_metadata


def _model_state(path: Path_, there: Mapping[str, Any], model: nn.Module | None) -> dict[str, Any]:
    """The model's own tensors, which are read in place."""
    if model is None:
        return {}
    state = {f"model.{name}": x for name, x in _bare(model).state_dict().items()}
    wrong = [f"left over: {key!r}" for key in there if key.startswith("model.") and key not in state]
    for key, x in state.items():
        saved = there.get(key)
        if saved is None:
            wrong.append(f"missing: {key!r}")
        elif isinstance(saved, TensorStorageMetadata) and saved.size != x.shape:
            wrong.append(f"{key!r} has shape {tuple(saved.size)}, the model's {tuple(x.shape)}")
    if wrong:
        raise CheckpointError(f"the checkpoint {os.fspath(path)} is of another model: {'; '.join(wrong[:5])}")
    return state


def _slots(
    path: Path_, there: Mapping[str, Any], model: nn.Module | None, optimizer: Optimizer | None
) -> dict[str, Any]:
    """A place for every value of the optimizer's state: a tensor like its parameter is cut as the parameter is."""
    if optimizer is None:
        return {}
    owners = {name: p for p, name in _names(model, optimizer).items()}
    slots: dict[str, Any] = {}
    for key, saved in there.items():
        if not key.startswith("optimizer."):
            continue
        name, _, kind = key.removeprefix("optimizer.").rpartition(".")
        if name not in owners:
            raise CheckpointError(f"the checkpoint {os.fspath(path)} has {key!r}, but the model has no such parameter")
        if not isinstance(saved, TensorStorageMetadata):
            slots[key] = None
        elif kind != "step" and saved.size == owners[name].shape:
            slots[key] = torch.zeros_like(owners[name], dtype=saved.properties.dtype, requires_grad=False)
        else:
            slots[key] = torch.zeros(saved.size, dtype=saved.properties.dtype)
    return slots


def _check_groups(path: Path_, saved: Sequence[Mapping[str, Any]], mine: Sequence[Mapping[str, Any]]) -> None:
    theirs, ours = ([group["params"] for group in groups] for groups in (saved, mine))
    if theirs != ours:
        raise CheckpointError(
            f"the checkpoint {os.fspath(path)} has an optimizer with groups of {[len(g) for g in theirs]} parameters, "
            f"this one has {[len(g) for g in ours]}, or other parameters in them; make it with the same groups"
        )


def _restore(optimizer: Optimizer, names: Mapping[Any, str], groups: Any, slots: Mapping[str, Any]) -> None:
    state: dict[str, dict[str, Any]] = {}
    for key, value in slots.items():
        name, _, kind = key.removeprefix("optimizer.").rpartition(".")
        state.setdefault(name, {})[kind] = value
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
    optimizer.state.clear()
    for p, name in names.items():
        if name in state:
            optimizer.state[p] = state[name]
