"""Places that calls on tiles come from: the function, the modules and the line, by the frames of its thread."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from types import FrameType

import torch
from torch import nn

from jigsaw.torch_internals.autograd import code_of_engine, graph_task_id

_PACKAGES = (
    *(str(folder) + os.sep for folder in (Path(__file__).parents[1], Path(torch.__file__).parent)),
    contextlib.__file__,
    "<",
)
_DISPATCHER, _AUTOGRAD, _BACKWARD = "_call_handler", code_of_engine(), "the backward pass"


def is_of_packages(file: str) -> bool:
    """Say whether a file is one of jigsaw's or torch's, or one that no user wrote."""
    return file.startswith(_PACKAGES)


def place_of_call() -> tuple[str, str]:
    """Return the torch function that is under way in this thread, and the modules and the line that called it."""
    place = place_in_frames(sys._getframe(1))  # pyright: ignore[reportPrivateUsage]
    if graph_task_id() != -1:
        return _BACKWARD, place[1].rpartition(" > ")[2] or "called by autograd"
    return place


def place_in_frames(frame: FrameType | None) -> tuple[str, str]:
    """Return the torch function that is under way in a thread's frames, and the modules and the line that called it."""
    # innermost first: the last dispatch is the function that was called on tiles, the first module the innermost, and
    # the first frame outside jigsaw and torch the caller's line
    function, modules, line = "", list[str](), ""
    while frame is not None:
        code = frame.f_code
        if code.co_name == _DISPATCHER and not line:
            called = frame.f_locals.get("function")
            function = getattr(called, "__name__", str(called))
        if code is _AUTOGRAD and not line:
            function = _BACKWARD
        if code.co_name == "forward" and isinstance(frame.f_locals.get("self"), nn.Module):
            modules.append(type(frame.f_locals["self"]).__name__)
        if not line and not is_of_packages(code.co_filename):
            line = f"{code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return function or "no function of tiles", " > ".join([*reversed(modules), line])


def modules_of_call() -> list[nn.Module]:
    """Return the modules that are under way in this thread, innermost first: first arguments of its frames."""
    modules: list[nn.Module] = []
    frame = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if isinstance(first, nn.Module) and not any(first is module for module in modules):
            modules.append(first)
        frame = frame.f_back
    return modules
