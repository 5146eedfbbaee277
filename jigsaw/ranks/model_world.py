"""`torch.distributed` as a model sees it: a job of one process, whatever the number of ranks.

A model on a mesh is one program on whole tensors, so a sum over "all processes" changes nothing.  While a model of
`jigsaw.parallelize` runs, its thread sees a default group of one process: world size 1, rank 0, and collectives that
change nothing.  So a net that divides by the world size is right.

For example a codebook adds up ``counts`` [K] over two ranks in its forward pass, and divides by the world size.  Its
tile has the counts of the whole batch already: ``all_reduce`` leaves them, and the division is by 1.

torch keeps its groups in one object, which others may replace.  A replacement serves from the beginning of the first
forward pass under way to the end of the last, and answers other threads as before.  Groups that are passed by name are
real ones: those of FSDP2, of a mesh, and of jigsaw itself, which calls `job_group` here.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d

from jigsaw.errors import ShardingError
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import dispatching_again, graph_task_id
from jigsaw.torch_internals.groups import WORLD_NAME, known_groups


class OneProcessError(ShardingError):
    """A call between processes about the state of a model, which sees one process; on whole tensors it would be wrong
    too.
    """


class _ModelState(threading.local):
    """Models that run in this thread, outermost first, and whether it makes a group of the job meanwhile."""

    def __init__(self) -> None:
        self.models: list[object] = []
        self.is_of_job = False


_state = _ModelState()
_backward_passes: set[int] = set()
_open_lock = threading.Lock()
_open_count = 0


def is_one_process() -> bool:
    """Say whether this thread runs a model's forward pass, or a backward pass through one."""
    if _state.is_of_job:
        return False
    if _state.models:
        return True
    return bool(_backward_passes) and graph_task_id() in _backward_passes  # pyright: ignore[reportPrivateUsage]


def enter_model(model: object) -> None:
    """Let this thread see one process until `leave_model`."""
    if not _state.models:
        _open_world()
    _state.models.append(model)


def leave_model(model: object) -> bool:
    """End what `enter_model` of the same model began, if it did; say whether it was the outermost one.

    Models within it end with it: one that an interrupt ends (a BaseException) gets no call of its hooks.
    """
    places = [place for place, entered in enumerate(_state.models) if entered is model]
    if not places:
        return False
    del _state.models[places[-1] :]
    if _state.models:
        return False
    _close_world()
    return True


def is_in_forward_pass() -> bool:
    """Say whether this thread runs a model's forward pass."""
    return bool(_state.models)


@contextmanager
def within_model(model: object) -> Generator[None]:
    """Do `enter_model` and `leave_model` around a block."""
    enter_model(model)
    try:
        yield
    finally:
        leave_model(model)


@contextmanager
def of_the_job() -> Generator[None]:
    """Let this thread see the job within the block, even in a forward pass, to make groups of its ranks."""
    before, _state.is_of_job = _state.is_of_job, True
    try:
        yield
    finally:
        _state.is_of_job = before


class BackwardPass:
    """A backward pass that sees one process until it is called, or dropped.

    Torch calls nothing at the end of a pass that raises, but drops what waits for its end.
    """

    def __init__(self, number: int) -> None:
        _open_world()
        _backward_passes.add(number)
        self._end = weakref.finalize(self, _end_backward_pass, number)

    def __call__(self) -> None:
        self._end()


def begin_backward_pass() -> BackwardPass | None:
    """Let the backward pass under way see one process until the result is called or dropped; None where it does
    already.
    """
    number = graph_task_id()
    return None if number == -1 or number in _backward_passes else BackwardPass(number)


def _end_backward_pass(number: int) -> None:
    _backward_passes.remove(number)
    _close_world()


# -- the job ----------------------------------------------------------------------------------------------------------


def job_group() -> dist.ProcessGroup | None:
    """Return the default group of the job's processes; None where there is none."""
    world = known_groups()
    return vars(world)["job"].default_pg if isinstance(world, _WorldOfModels) else world.default_pg


def job_rank(group: dist.ProcessGroup | None = None) -> int:
    """Do as `torch.distributed.get_rank`, in a forward pass too."""
    world = job_group()
    # for a group that this rank is not in, torch has a number and no object
    if world is None or not isinstance(group, dist.ProcessGroup | None):
        return _get_rank(group)
    return world.rank() if group is None else group.rank()


def job_size() -> int:
    """Return the number of the job's processes; 1 without a group."""
    group = job_group()
    return 1 if group is None else group.size()


# -- in the place of torch's ------------------------------------------------------------------------------------------


class _DoneWork(dist.Work):
    """Result of a collective that has nothing to wait for."""

    def __init__(self, result: Any) -> None:
        super().__init__()
        self._result = result

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Any:
        return self._result

    def get_future(self) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(self._result)
        return future


def finished_work(result: Any) -> dist.Work:
    """Return the result of ``async_op=True`` where nothing is to be done."""
    return _DoneWork(result)


def _unchanged(self: Any, tensors: Any = (), *_: Any, **__: Any) -> dist.Work:
    return _DoneWork(tensors)


@torch.no_grad()
def _filled(self: Any, results: Any, values: Any, *_: Any, **__: Any) -> dist.Work:
    """Fill every tensor among `results` with its counterpart among `values`, in its own shape."""
    targets, sources = pytree.tree_leaves(results), pytree.tree_leaves(values)
    if len(targets) != len(sources):
        raise OneProcessError(
            f"a collective with a list of {max(len(targets), len(sources))} tensors: a parallelized model is one "
            "process, so make as many as torch.distributed.get_world_size() says in its forward pass, which is 1"
        )
    with dispatching_again():  # so that copies from and to tiles are dispatched to tiles
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source.reshape(target.shape))
    return _DoneWork(results)


def _refused(self: Any, *_: Any, **__: Any) -> NoReturn:
    raise OneProcessError(
        "a message to another process from a parallelized model, which is one process; leave it out, or name the group "
        "of a mesh: group=mesh.get_group(axis)"
    )


class _ModelGroup(dist.ProcessGroup):
    """The default group that a model sees."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # pyright: ignore[reportCallIssue]

    @property
    def group_name(self) -> Any:
        """Refuse the functions that look a group up by its name."""
        raise OneProcessError(
            "a collective by the name of the default group (torch.distributed._functional_collectives) in a "
            "parallelized model, which is one process; leave it out, or use torch.distributed's own collectives"
        )


def _answer_calls(answer: Any, names: str) -> None:
    for name in names.split():
        setattr(_ModelGroup, name, answer)


_answer_calls(_unchanged, "allreduce allreduce_coalesced broadcast reduce barrier monitored_barrier")
_answer_calls(_filled, "allgather allgather_coalesced all_gather_single all_gather_single_coalesced gather scatter")
_answer_calls(
    _filled, "reduce_scatter reduce_scatter_single reduce_scatter_single_coalesced alltoall all_to_all_single"
)
_answer_calls(_refused, "send recv recv_anysource")


class _WorldOfModels:
    """Torch's own world of groups, except for the default group of a thread that runs a model."""

    def __init__(self, job: Any) -> None:
        vars(self).update(job=job, group=_ModelGroup())

    def __getattribute__(self, name: str) -> Any:
        own = object.__getattribute__(self, "__dict__")
        if name == "__dict__" or name == "__class__":
            return object.__getattribute__(self, name)
        if name == "default_pg" and is_one_process():
            return own["group"]
        return getattr(own["job"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["job"], name, value)


_get_rank = dist.get_rank


def _rank_of_model(group: dist.ProcessGroup | None = None) -> int:
    """Do as `torch.distributed.get_rank` while models run: for a real group it is this process' own rank in it."""
    if group is None or group is c10d.GroupMember.WORLD:
        return _get_rank(group)
    return job_rank(group)


_undo: list[partial[Any]] = []


def _open_world() -> None:
    global _open_count
    with _open_lock:
        _open_count += 1
        if _open_count > 1:
            return
        job = known_groups()
        if job.default_pg is None:
            return
        world: Any = _WorldOfModels(job)
        group = vars(world)["group"]
        # groups that the model makes have one process, too, and meet in a store of their own
        job.pg_map[group] = (job.pg_map[job.default_pg][0], dist.HashStore())
        job.pg_group_ranks[group] = {0: 0}
        # torch's profiler asks for it of every group
        job.pg_backend_config[group] = job.pg_backend_config[job.default_pg]
        for groups in (job.pg_map, job.pg_group_ranks, job.pg_backend_config):
            _undo.append(partial(groups.pop, group, None))
        _replace(c10d, WORLD_NAME, world)
        for module, rank in ((dist, _rank_of_model), (c10d, _rank_of_model), (device_mesh, job_rank)):
            _replace(module, "get_rank", rank)
        _name_no_group(job.default_pg)


def _close_world() -> None:
    global _open_count
    with _open_lock:
        _open_count -= 1
        while not _open_count and _undo:
            _undo.pop()()


def _replace(module: Any, name: str, value: Any) -> None:
    _undo.append(partial(setattr, module, name, getattr(module, name)))
    setattr(module, name, value)


def _name_no_group(group: dist.ProcessGroup) -> None:
    """Let the functions of ``torch.distributed.nn`` look up the default group when they are called, not once
    at import.
    """
    functions: Sequence[Any] = list(vars(sys.modules.get("torch.distributed.nn.functional", object)).values())
    for function in functions:
        defaults = function.__defaults__ if isinstance(function, FunctionType) else None
        if defaults and any(value is group for value in defaults):
            function.__defaults__ = tuple(None if value is group else value for value in defaults)
