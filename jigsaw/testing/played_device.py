"""A device that is played: tensors of torch's PrivateUse1 in the host's memory, for tests without a GPU.

What a GPU refuses is refused there, too: tensors of two devices in one call.  And where the host would wait for a GPU
is counted.  `jigsaw.testing.on_ranks(device="played")` has it, with NCCL's law for messages; it needs a C++ compiler,
once.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import inspect
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.machinery import ExtensionFileLoader, ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from jigsaw.torch_internals.dispatch import register_device_module

PLAYED_DEVICE = "played"


_COMPILER = "c++"


def why_not_played() -> str:
    """Return the reason why this machine cannot play the device; empty if it can."""
    has_headers = Path(sysconfig.get_path("include"), "Python.h").exists()
    if sys.platform == "linux" and shutil.which(_COMPILER) and has_headers:
        return ""
    return f"device={PLAYED_DEVICE!r} is compiled once, on Linux, by {_COMPILER} with Python's headers (Python.h)"


@cache
def build_played_device() -> None:
    """Compile the device's library, unless it exists.

    Raises: `RuntimeError` where there is no compiler, or it fails.
    """
    built = _built_file()
    if built.exists():
        return
    if why_not_played():
        raise RuntimeError(why_not_played())
    built.parent.mkdir(parents=True, exist_ok=True)
    from torch.utils import cpp_extension  # imported here because it is slow

    with (built.parent / "lock").open("w") as lock:  # only one process compiles, which takes a minute
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not built.exists():
            _compile_to(built, cpp_extension.include_paths(), cpp_extension.library_paths())


def _compile_to(built: Path, includes: list[str], libraries: list[str]) -> None:
    paths = [f"-I{path}" for path in (*includes, sysconfig.get_path("include"))]
    with tempfile.TemporaryDirectory(dir=built.parent) as folder:
        library = Path(folder) / built.name
        flags = ["-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-DTORCH_EXTENSION_NAME={_MODULE}", "-o", str(library)]
        links = [*(f"-L{path}" for path in libraries), "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
        command = [_COMPILER, *flags, *paths, str(_SOURCE), *links]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise RuntimeError(f"device={PLAYED_DEVICE!r} cannot be compiled here:\n{ran.stderr}")
        library.replace(built)


_SOURCE, _MODULE = Path(__file__).with_suffix(".cpp"), "jigsaw_played_device"


def _built_file() -> Path:
    key = repr((_SOURCE.read_text(), torch.__version__, sys.version_info, platform.machine()))
    root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
    return Path(root) / _MODULE / f"{hashlib.sha256(key.encode()).hexdigest()[:16]}.so"


@cache
def _load_played_device() -> Any:
    loader = ExtensionFileLoader(_MODULE, str(_built_file()))
    module = module_from_spec(ModuleSpec(_MODULE, loader, origin=loader.path))
    loader.exec_module(module)
    return module


class _PlayedStream:
    """A stream whose work has ended when a call returns; `torch.cpu.Stream` has no events to wait for."""

    def __init__(self, priority: int = 0) -> None: ...

    def record_event(self, event: Any = None) -> torch.cpu.Event:
        return event or torch.cpu.Event()

    def wait_stream(self, _: Any) -> None: ...

    wait_event = wait_stream

    def synchronize(self) -> None: ...


class _DeviceModule(ModuleType):
    """`torch.played`, as `torch.cuda` is for a GPU."""

    Stream, Event, StreamContext = _PlayedStream, torch.cpu.Event, torch.cpu.StreamContext
    stream = staticmethod(torch.cpu.stream)
    get_rng_state, set_rng_state = staticmethod(torch.random.get_rng_state), staticmethod(torch.random.set_rng_state)

    def current_stream(self, _: Any = None) -> _PlayedStream:
        return _PlayedStream()

    def is_available(self) -> bool:
        return True

    is_initialized = is_available

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return 1

    def current_device(self) -> int:
        return 0

    def set_device(self, _: Any) -> None: ...

    synchronize = manual_seed_all = set_device

    def device(self, _: Any) -> Any:
        return nullcontext()

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


def register_played_device() -> None:
    """Give this process the device, for its life."""
    torch.utils.rename_privateuse1_backend(PLAYED_DEVICE)
    register_device_module(PLAYED_DEVICE, _DeviceModule(PLAYED_DEVICE))
    _load_played_device()
    torch.utils.generate_methods_for_privateuse1_backend()


def host_view(x: Tensor) -> Tensor:
    """Return a tensor of the host in the same memory, for code that sends from there."""
    return _load_played_device().host_view(x) if x.device.type == PLAYED_DEVICE else x


@contextmanager
def refuse_host_waits() -> Generator[None]:
    """Raise `RuntimeError` within the block where the host would wait for the device: at a number that is read, at a
    shape that depends on values, and at a copy that is not from or to pinned memory.
    """
    played = _load_played_device()
    played.refuse_waits(True)
    try:
        yield
    finally:
        played.refuse_waits(False)


def take_host_waits() -> list[str]:
    """Return the operations for which the host has waited since the last call."""
    return _load_played_device().take_waits()


_FACTORIES = (
    "tensor as_tensor from_numpy zeros ones empty full rand randn randint randperm arange linspace logspace eye "
    "hann_window tril_indices triu_indices"
).split()

_TORCH = Path(torch.__file__).parent
_HERE = Path(__file__)
_JIGSAW = _HERE.parent.parent


def make_tensors_on(device: str) -> None:
    """Let test bodies and the modules that they construct make their tensors on that device, for this process's life.

    Values are made on the CPU and then copied, so they are those of a run on CPUs, but for what modules draw in place.
    What jigsaw itself makes is left alone: it must lie on the device of what it is given, and a test shows where it
    does not.
    """
    for name in _FACTORIES:
        setattr(torch, name, _made_on(device, getattr(torch, name)))


def _made_on(device: str, factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> Any:
        tensor = factory(*args, **kwargs)
        is_told = kwargs.get("device") is not None or kwargs.get("out") is not None
        if is_told or not isinstance(tensor, Tensor) or tensor.device.type != "cpu" or not _is_of_a_test():
            return tensor
        moved = tensor.detach().to(device)
        return moved.requires_grad_(tensor.requires_grad)

    return make


def _is_of_a_test() -> bool:
    """Say whether the call comes from a test's own code, or from a module that is being constructed."""
    frame, is_of_jigsaw = inspect.currentframe(), False
    while frame is not None:  # from the innermost call outwards
        path = Path(frame.f_code.co_filename)
        if frame.f_code.co_name == "__init__" and isinstance(frame.f_locals.get("self"), nn.Module):
            return True
        if path != _HERE and path.is_relative_to(_JIGSAW):
            is_of_jigsaw = True
        elif path != _HERE and not path.is_relative_to(_TORCH):
            return not is_of_jigsaw
        frame = frame.f_back
    return False
