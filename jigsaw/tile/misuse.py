"""Checks of likely mistakes: an error for wrong numbers, one warning for repeated work or gradients that stay
in parts.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import cache, partial
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from jigsaw.errors import ShardingError
from jigsaw.geometry.layout import AxisSizes
from jigsaw.ranks.call_places import is_of_packages
from jigsaw.ranks.mesh import axes_of_mesh
from jigsaw.tile.tile import tiles_in
from jigsaw.torch_internals.groups import wrapper_around

REPLACED_MARK = "_jigsaw_replaced_by_parallelize"
_warned: set[str] = set()


def _calling_frame() -> tuple[FrameType, int]:
    """Return the frame that called jigsaw or torch, and how many frames it is above this one."""
    frame, level = sys._getframe(), 0  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and is_of_packages(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return frame, level


def calling_line() -> str:
    """Return the file and line that called jigsaw or torch."""
    frame, _ = _calling_frame()
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def warn_once(about: str, text: str) -> None:
    """Warn once in a process, at the line that called jigsaw or torch."""
    if about not in _warned:
        _warned.add(about)
        warnings.warn(text, UserWarning, stacklevel=_calling_frame()[1])


@contextmanager
def without_warning(about: str) -> Generator[None]:
    """Suppress a warning within the block, for a caller that sums the parts of gradients itself."""
    is_new = about not in _warned
    _warned.add(about)
    try:
        yield
    finally:
        if is_new:
            _warned.discard(about)


UNREDUCED = "gradients that stay in parts"


def warn_of_unreduced(parameter: nn.Parameter) -> None:
    """Warn of a parameter that meets a cut tile, in a model that did not go through `jigsaw.parallelize`."""
    warn_once(
        UNREDUCED,
        f"a parameter of shape {tuple(parameter.shape)} meets a tile that is cut, but its model did not go through "
        "jigsaw.parallelize: each rank's gradient will be the part of its own rows; call jigsaw.parallelize(model, "
        "mesh), or sum the gradients over the mesh yourself",
    )


def warn_of_idle_axes(mesh: DeviceMesh, also_cutting: Iterable[str]) -> Callable[[nn.Module, Any, Any], None]:
    """Return a hook before the forward pass that warns of axes of the mesh that cut neither an input nor weights."""
    return partial(_look_at_inputs, axes_of_mesh(mesh), frozenset(also_cutting))


def _look_at_inputs(axes: AxisSizes, working: frozenset[str], module: nn.Module, args: Any, kwargs: Any) -> None:
    tiles = list(tiles_in((args, kwargs)))
    cutting = working.union(*(t.layout.cut_axes for t in tiles))
    idle = [f"{name!r} ({size} ranks)" for name, size in axes if size > 1 and name not in cutting]
    if tiles and idle:
        warn_once(
            f"idle axes {idle}",
            f"the mesh axes {', '.join(idle)} cut no input of {type(module).__name__} and no weight: their ranks do "
            "the same work; name them in the spec of the inputs, or make the mesh without them",
        )


def warn_of_no_wrapper(module: nn.Module, args: Any) -> None:
    """Warn before a forward pass whose gradients a wrapper is to sum, if there is none around it."""
    around = wrapper_around()
    if around is None and torch.is_grad_enabled():
        warn_once(
            "no wrapper",
            f"{type(module).__name__} went through jigsaw.parallelize(reduce=False), which leaves it to a wrapper to "
            "average gradients over all ranks, and no DistributedDataParallel is around this forward pass: each rank "
            "keeps the gradient of its own part; wrap the model, or leave out reduce=False",
        )


def mark_replaced(before: Iterable[nn.Parameter], after: Iterable[nn.Parameter]) -> None:
    """Mark parameters that the model no longer has, so that an optimizer made from them raises when it steps."""
    for parameter in set(before).difference(after):
        setattr(parameter, REPLACED_MARK, True)
    _watch_optimizers()


@cache
def _watch_optimizers() -> None:
    """Check the parameters before every step of any optimizer, once there are any marked ones."""
    register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if hasattr(parameter, REPLACED_MARK):
                raise ShardingError(
                    f"{type(optimizer).__name__} was made before jigsaw.parallelize, which cut the parameter of shape "
                    f"{tuple(parameter.shape)} that it holds: it would change nothing; make the optimizer from "
                    "model.parameters() after parallelize"
                )
