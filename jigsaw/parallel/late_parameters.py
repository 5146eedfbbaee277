"""Parameters and layers that a model gets after `parallelize`, refused: nothing would reduce their gradients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from jigsaw.errors import ShardingError
from jigsaw.ops.meeting.plain_operands import AVERAGED_MARK
from jigsaw.torch_internals.autograd import own_modules, own_parameters

_KNOWN_NAMES = "_jigsaw_known_parameters"
# modules without a forward pass: the module around them looks at what they hold
_LISTS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


def note_parameters(module: nn.Module) -> None:
    """Note the names of the module's own parameters, so that later ones are told from them."""
    object.__setattr__(module, _KNOWN_NAMES, frozenset(own_parameters(module)))


def refuse_late_parameters(module: nn.Module) -> None:
    """Raise `ShardingError` for a trained parameter without a mark, of this module or of a later one in it."""
    for name, parameter in own_parameters(module).items():
        if parameter is not None and not hasattr(parameter, AVERAGED_MARK):
            _refuse_if_trained(module, name, parameter)
    for child in own_modules(module).values():
        # others look at themselves, before they run
        if isinstance(child, _LISTS) or not (child is None or hasattr(child, _KNOWN_NAMES)):
            refuse_late_parameters(child)


def gathered_parameters(unit: nn.Module) -> Iterator[nn.Parameter]:
    """Yield the parameters that a unit of FSDP2 has gathered; later ones, which it does not know, are refused."""
    for module in unit.modules():
        known = getattr(module, _KNOWN_NAMES, ())
        for name, parameter in own_parameters(module).items():
            if parameter is not None and name in known:
                yield parameter
            elif parameter is not None:
                _refuse_if_trained(module, name, parameter)


def refuse_other_weights(unit: nn.Module, args: Any) -> None:
    """Raise where a unit of FSDP2 is called with tensors in the place of its parameters: it would put its own there, or
    in the first call keep the others.
    """
    for module in unit.modules():
        for name, tensor in own_parameters(module).items():
            if tensor is not None and not isinstance(tensor, nn.Parameter):
                raise ShardingError(
                    f"{type(module).__name__} is called with another tensor as {name!r}, as torch.func.functional_call "
                    "does, and its own is cut (shard_weights=); copy_ the values into the parameters, or pass "
                    "shard_weights=False"
                )


def _refuse_if_trained(module: nn.Module, name: str, parameter: Any) -> None:
    if parameter.requires_grad and torch.is_grad_enabled():
        raise ShardingError(
            f"parameter {name!r} of {type(module).__name__} was replaced or added after parallelize: nothing would "
            "reduce its gradient; call jigsaw.parallelize last, and load with load_state_dict(assign=False), or give "
            "it requires_grad_(False) where it is not trained"
        )
