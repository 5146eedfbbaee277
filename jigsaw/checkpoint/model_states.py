"""Names of parameters in a model's ``state_dict``, and tensors of it that are not the model's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from jigsaw.torch_internals.autograd import memory_id


def names_in_state(model: nn.Module) -> dict[Any, str]:
    """Return the parameters by their first names in a model's state: a wrapper may name modules otherwise."""
    values = reversed(model.state_dict(keep_vars=True).items())
    return {x: name for name, x in values if isinstance(x, nn.Parameter)}


def copies_in_state(model: nn.Module, state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a model's state that are not its own memory, which the model itself has to take."""
    own = {None, *map(_memory_number, (*model.parameters(), *model.buffers()))}
    return {key: x for key, x in state.items() if isinstance(x, torch.Tensor) and _memory_number(x) not in own}


def _memory_number(x: torch.Tensor) -> int | None:
    """Return the number of this rank's memory of a plain tensor or DTensor; None for other classes."""
    local = x.to_local() if isinstance(x, DTensor) else x
    return memory_id(local.untyped_storage()) if type(local) in (torch.Tensor, nn.Parameter) else None
