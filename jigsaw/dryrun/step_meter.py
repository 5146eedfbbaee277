"""Meter of one rank's step, operator by operator: memory that is alive, floating-point operations, bytes.

The operators are those below autograd, so the meter sees those of the backward pass and of the optimizer as well.  On
tensors without values (`FakeTensorMode`) it counts what a step would take; the same meter over a real step checks that.
torch's own memory tracker depends on modules and their tensor arguments, which tiles are not below autograd.  torch's
own formulas count floating-point operations.
"""

from __future__ import annotations

import os
import sys
import weakref
from bisect import bisect_right
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from jigsaw.comm import TrafficCall
from jigsaw.dryrun import bare_models
from jigsaw.dryrun.conv_memory import scratch_bytes
from jigsaw.dryrun.counted_steps import CountedPhase, KernelCost
from jigsaw.dryrun.kernel_clock import KernelCall
from jigsaw.dryrun.known_values import KnownValues, has_real_values
from jigsaw.dryrun.report import PHASES, PHASES_AGAIN
from jigsaw.errors import ShardingError
from jigsaw.parallel.gradient_buckets import local_part
from jigsaw.ranks import call_places
from jigsaw.ranks.model_world import job_rank
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.autograd import current_node, graph_task_id, memory_id, next_node_number, node_number
from jigsaw.torch_internals.dispatch import (
    CPU_ATTENTION,
    CPU_ATTENTION_BACKWARD,
    DEVICE_OF_TENSOR,
    READ_NUMBER,
    bound_argument,
    operator_schema,
    operators_of_profiler,
    operators_of_weights,
    tensors_of_call,
    without_modes,
    written_by_call,
)
from jigsaw.torch_internals.fake_tensors import (
    OF_EACH_ELEMENT,
    DynamicOutputShapeException,
    FakeTensor,
    TorchDispatchMode,
    answer_by_shape,
    noted_real_view,
)
from jigsaw.torch_internals.groups import is_file_of_fsdp
from jigsaw.torch_internals.placements import answer_by_parts


class PieceMarks:
    """Marks of where each *piece* begins in a forward pass: a module that a stage of a pipeline may begin with.

    All that follows the first call in a piece belongs to it, up to that in the next.  So do the parts of the backward
    pass that lead back through it: nodes of the graph are numbered as the forward pass makes them.
    """

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.names = list(names)
        self.first_nodes: list[int] = []
        self.order: list[int] = []
        for at, name in enumerate(names):
            model.get_submodule(name).register_forward_pre_hook(self._begin(at), prepend=True)

    def _begin(self, at: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if at not in self.order:
                self.order.append(at)
                self.first_nodes.append(next_node_number())

        return hook

    def piece_here(self, before: int) -> int:
        if graph_task_id() == -1:
            return self.order[-1] if self.order else before
        node = current_node()
        if node is None or not self.order or "AccumulateGrad" in node.name():
            return before
        return self.order[max(bisect_right(self.first_nodes, node_number(node)) - 1, 0)]


aten = torch.ops.aten


@dataclass
class PhaseCount:
    """Counts of one phase of a step; `events` are bytes that began (> 0) or ceased to be alive, by memory."""

    kernels: list[KernelCost] = field(default_factory=list[KernelCost])
    kernels_again: int = 0
    events: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    begins_with: dict[int, int] = field(default_factory=dict[int, int])
    # the numbers of events and kernels when the last node of a backward pass had run
    end: tuple[int, int] | None = None
    # if pieces of the model are counted separately: the piece of each kernel, jigsaw call and FSDP2 message
    pieces: tuple[list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], []))
    # messages of FSDP2, which jigsaw.comm does not see
    of_weights: list[TrafficCall] = field(default_factory=list[TrafficCall])


class StepMeter(TorchDispatchMode):
    """Counter of what runs within it, in phases; `value_reads` are lines that read a value that is not there."""

    def __init__(self, keeps_calls: bool = True, on_processor: bool = True) -> None:
        super().__init__()
        self._keeps_calls = keeps_calls  # calls are kept to be timed later
        self._on_processor = on_processor
        self.phases: dict[str, PhaseCount] = {}
        self.value_reads: Counter[str] = Counter()
        self._kinds: dict[int, str] = {}  # memory -> kind, where known
        self._live: dict[int, tuple[int, int]] = {}  # address of a storage -> its number here, its bytes
        self._numbers = 0
        self._phase = PhaseCount()
        self._is_backward = False
        # if pieces are counted separately: the current one, that of each memory, and the number of jigsaw's messages
        self.marks: PieceMarks | None = None
        self.calls: list[TrafficCall] = []
        self._piece = 0
        self._piece_of_memory: dict[int, int] = {}
        self.known_values = KnownValues()

    def begin_phase(self, name: str) -> None:
        alive = dict(self._live.values())
        self._is_backward = name in (PHASES[1], PHASES_AGAIN[PHASES[1]])
        self._phase = self.phases.setdefault(name, PhaseCount(begins_with=alive))

    # -- memory -------------------------------------------------------------------------------------------------------

    def mark_memory(self, tensors: Iterable[Any], kind: str) -> None:
        for storage in _storages_of(tensors):
            self._kinds[self._number_of(storage)] = kind

    def mark_the_rest(self, kind: str) -> None:
        for number, _ in self._live.values():
            self._kinds.setdefault(number, kind)

    def _number_of(self, storage: torch.UntypedStorage) -> int:
        at = memory_id(storage)
        known = self._live.get(at)
        if known is None:
            self._numbers += 1
            known = self._live[at] = self._numbers, storage.nbytes()
            if self.marks is not None:
                self._piece_of_memory[self._numbers] = self._piece
            self._phase.events.append(known)
            # a storage has one Python object as long as it lives, and whoever holds it keeps the reference alive, too
            weakref.finalize(storage, _end_of_memory, weakref.ref(self), at, known[0]).atexit = False
        return known[0]

    def _end(self, at: int, number: int) -> None:
        known = self._live.get(at)
        if known is not None and known[0] == number:
            del self._live[at]
            self._phase.events.append((number, -known[1]))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Note a changed size: FSDP2 frees gathered weights by making their memory empty, and fills it again."""
        known = self._live.get(memory_id(storage))
        if known is not None and storage.nbytes() != known[1]:
            self._phase.events.append((known[0], storage.nbytes() - known[1]))
            self._live[memory_id(storage)] = known[0], storage.nbytes()

    def counted_phase(self, name: str, calls: Sequence[TrafficCall]) -> CountedPhase:
        """Return the counts of a phase, with the calls of `jigsaw.comm` in it, once each memory's kind is known."""
        phase = self.phases[name]
        before: Counter[str] = Counter()
        for number, size in phase.begins_with.items():
            before[self._kinds.get(number, "temporary")] += size
        changes = [(self._kinds.get(number, "temporary"), size) for number, size in phase.events]
        end, last = (len(changes), len(phase.kernels)) if phase.end is None else phase.end
        return CountedPhase(
            phase.kernels[:last],
            phase.kernels[last:],
            phase.kernels_again,
            before,
            changes[:end],
            changes[end:],
            list(calls),
            phase.of_weights,
        )

    # -- operators ----------------------------------------------------------------------------------------------------

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Let torch call the next method as it is: what keeps its compiler out of it is a tenth of a dry run."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is DEVICE_OF_TENSOR and isinstance(args[0], FakeTensor):
            return args[0].fake_device  # asked once or twice an operator
        kwargs = kwargs or {}
        if any(issubclass(t, DTensor) for t in types):
            # operators on local tensors are counted when they arrive
            by_parts = func in OF_EACH_ELEMENT and not kwargs.keys() & _OTHER_RESULT
            return answer_by_parts(self._answer, func, args, kwargs) if by_parts else NotImplemented
        return self._answer(func, args, kwargs)

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in _READ_BY_PYTHON:
            if isinstance(args[0], FakeTensor):
                return self._read_value(func, args)
            with without_modes():  # states of random numbers are real tensors
                return func(*args, **kwargs)
        if self._is_backward and self._phase.end is None and (graph_task_id() != -1 and current_node() is None):
            self._phase.end = len(self._phase.events), len(self._phase.kernels)
        if self.marks is not None:
            self._piece = self._piece_under_way(self.marks)
        if func in _OF_PROFILER:
            with without_modes():
                return func(*args, **kwargs)
        if self.known_values.follows_integers:  # in a dry run of a model that keeps indices
            kept = [x for x in written_by_call(func, args, kwargs) if has_real_values(x)]
            if kept:
                return self._answer_beside(kept, func, args, kwargs)
        return self._answer_on_paper(func, args, kwargs)

    def _answer_on_paper(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = answer_by_shape(func, args, kwargs)
        is_remembered = False
        if out is None:
            try:
                out = func(*args, **kwargs)
            except DynamicOutputShapeException:
                out = self.known_values.answer_by_values(func, args, kwargs)
                if out is None:
                    raise
                is_remembered = True
        if not is_remembered:
            self.known_values.remember(func, args, kwargs, out)
        self._count_kernel(func, args, kwargs, out)
        return out

    def _answer_beside(self, kept: list[Tensor], func: Any, args: Any, kwargs: Any) -> Any:
        """Answer a call that changes an index of the user's model: it stays as it is, and counts as unknown."""
        written = {id(x): torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in kept}
        args, kwargs = pytree.tree_map_only(Tensor, lambda x: written.get(id(x), x), (args, kwargs))
        out = func(*args, **kwargs)
        self.known_values.forget(kept)
        self._count_kernel(func, args, kwargs, out)
        origins = {memory_id(written[id(x)].untyped_storage()): x for x in kept}
        return pytree.tree_map_only(Tensor, lambda x: origins.get(memory_id(x.untyped_storage()), x), out)

    def _piece_under_way(self, marks: PieceMarks) -> int:
        of_calls = self._phase.pieces[1]
        of_calls += [self._piece] * (len(self.calls) - len(of_calls))
        return marks.piece_here(self._piece)

    def phase_of_piece(self, name: str, piece: int, calls: Sequence[TrafficCall]) -> CountedPhase:
        """Return the kernels of a piece in a phase, and its messages without sums of gradients, which work hides."""
        phase = self.phases[name]
        of_kernels, of_calls, of_weights = phase.pieces
        of_calls = of_calls + [self._piece] * (len(calls) - len(of_calls))
        sent = [c for c, at in zip(calls, of_calls, strict=True) if at == piece and not c.is_behind]
        gathered = [c for c, at in zip(phase.of_weights, of_weights, strict=True) if at == piece]
        kernels = [cost for cost, at in zip(phase.kernels, of_kernels, strict=True) if at == piece]
        return CountedPhase(kernels, calls=sent, calls_of_weights=gathered)

    def kept_by_piece(self) -> Counter[int]:
        sizes: Counter[int] = Counter()
        for number, size in self.phases["backward"].begins_with.items():
            if self._kinds.get(number) == "activations":
                sizes[self._piece_of_memory.get(number, 0)] += size
        return sizes

    def _count_kernel(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        results = tensors_of_call(out)
        fresh = False
        for storage in _storages_of(results):
            fresh = fresh or memory_id(storage) not in self._live
            self._number_of(storage)
        call_of_weights = None
        if func in _OF_WEIGHTS:
            call_of_weights = _call_on_ring(_OF_WEIGHTS[func], args[2], max(args[0].nbytes, args[1].nbytes), 1)
        elif func is _c10d.allreduce_.default and _is_called_by_fsdp():  # over ranks with the same part (`replicate`)
            call_of_weights = _call_on_ring("gradients", args[1], sum(x.nbytes for x in args[0]), 2)
        if call_of_weights is not None:
            self._phase.of_weights.append(call_of_weights)
            self._phase.pieces[2].append(self._piece)
        packet, changes = func.overloadpacket, operator_schema(func).is_mutable
        if func.namespace == "c10d" or not (fresh or changes) or packet in _WITHOUT_WORK:
            return
        scratch = scratch_bytes(func, args, out, self._on_processor)
        if scratch:
            self._numbers += 1
            self._phase.events += [(self._numbers, scratch), (self._numbers, -scratch)]
        tensors = tensors_of_call((*args, *kwargs.values()))
        moved = sum(map(_bytes_touched, (*tensors, *results)))
        formula = flop_registry.get(packet) or _MORE_FLOP.get(packet)
        flop = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
        is_causal = bound_argument(func, args, kwargs, "is_causal") if flop else None
        if is_causal:
            flop = _causal_part(flop, *(bound_argument(func, args, kwargs, name) for name in ("query", "key")))
        like = tensors[0] if tensors else results[0] if results else None
        dtype = torch.float32 if like is None else like.dtype
        # nodes of the backward pass run without gradients, a checkpointed forward pass with them
        self._phase.kernels_again += self._is_backward and torch.is_grad_enabled()
        call = KernelCall.of(func, args, kwargs) if self._keeps_calls else None
        self._phase.pieces[0].append(self._piece)
        self._phase.kernels.append(KernelCost(flop, moved, dtype, func, call, is_causal is not None))

    def _read_value(self, func: Any, args: Any) -> Any:
        """Return the value that Python reads of a tensor.

        Of one without any, jigsaw's own checks pass, and others are noted.
        """
        x, value = args[0], self.known_values.read_value(func, args)
        if value is not None:
            return value
        place, is_own = _reading_line()
        if not is_own:
            self.value_reads[place] += 1
            if self.value_reads[place] > _MOST_READS:
                raise ShardingError(
                    f"{place} asks for a value for the {_MOST_READS + 1}st time, and a dry run has none: a loop that "
                    "ends by a value has no end here; bound its turns by a number"
                )
        if x.dtype == torch.bool or func is aten.equal.default:
            return is_own
        return 1.0 if x.dtype.is_floating_point else 1

    @contextmanager
    def counting(self) -> Generator[None]:
        resize = torch.UntypedStorage.resize_

        def resize_and_tell(storage: torch.UntypedStorage, size: int) -> None:
            resize(storage, size)
            self._resized(storage)

        torch.UntypedStorage.resize_ = resize_and_tell  # pyright: ignore[reportAttributeAccessIssue]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize


def _end_of_memory(meter: weakref.ref[StepMeter], at: int, number: int) -> None:
    alive = meter()  # None if the meter has ended: memory of an index lives longer
    if alive is not None:
        alive._end(at, number)  # pyright: ignore[reportPrivateUsage]


_OF_PROFILER = operators_of_profiler()
_OTHER_RESULT = {"dtype", "device", "layout"}  # arguments that make a result of another kind
_READ_BY_PYTHON = {READ_NUMBER, aten.equal.default}
# memory is made or given another shape, and nothing is read or written
_WITHOUT_WORK = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided, aten.detach_}


def _attention_flop(count: Any, tensors: int, *args: Tensor, **named: Any) -> int:
    return count(*(x.shape for x in args[:tensors]))


def _causal_part(flop: int, query: Tensor, key: Tensor) -> int:
    """Return the operations of attention in which query i meets keys 0 to i alone; torch counts those of all keys."""
    queries, keys = query.shape[-2], key.shape[-2]
    short = min(queries, keys)
    pairs = short * (short + 1) // 2 + (queries - short) * keys
    return flop * pairs // max(queries * keys, 1)


# attention on CPUs, which torch's own table lacks
_MORE_FLOP: dict[Any, Any] = {
    CPU_ATTENTION: partial(_attention_flop, sdpa_flop_count, 3),
    CPU_ATTENTION_BACKWARD: partial(_attention_flop, sdpa_backward_flop_count, 4),
}

_c10d = torch.ops.c10d
_OF_WEIGHTS = dict(zip(operators_of_weights(), ("gathered weights", "gradients"), strict=True))


def _call_on_ring(kind: str, box: Any, size: int, rounds: int) -> TrafficCall:
    """Return what a rank sends on a ring around which `size` bytes, a part for each rank, travel `rounds` times."""
    group: dist.ProcessGroup = dist.ProcessGroup.unbox(box)
    ranks = dist.get_process_group_ranks(group)
    messages = rounds * (len(ranks) - 1)
    moved = messages * size // len(ranks)
    following = ranks[(dist.get_group_rank(group, job_rank()) + 1) % len(ranks)]
    return TrafficCall(kind, moved, moved, messages, ((following, moved),), True, tuple(ranks))


def _is_called_by_fsdp() -> bool:
    """Say whether FSDP2 calls this; sums of jigsaw's own are counted where they begin."""
    frame: Any = sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    while frame is not None and not frame.f_code.co_filename.startswith(_OWN_FILES):
        if is_file_of_fsdp(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _bytes_touched(x: Tensor) -> int:
    # an expanded tensor is read once per element, from memory that exists once
    return min(x.numel() * x.itemsize, x.untyped_storage().nbytes())


def _storages_of(values: Iterable[Any]) -> Iterator[torch.UntypedStorage]:
    for x in values:
        if isinstance(x, DTensor):
            x = local_part(x)
        if isinstance(x, Tensor) and x.layout == torch.strided:
            yield noted_real_view(x).untyped_storage()  # a view of a kept index is in the memory of that


_OWN_FILES = str(Path(__file__).parents[1]) + os.sep
# files by which a value of a Tile is read; the place that is shown is the caller of these
_SHOWN_BY = ("tensor_shell.py", "tensor_methods.py", "tile.py", "reductions.py", "lookup.py", "step_meter.py")
_MOST_READS = 1000  # at one line


def _reading_line() -> tuple[str, bool]:
    """Return the line that reads a value, and whether it is one of jigsaw's own."""
    frame: Any = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and call_places.is_of_packages(frame.f_code.co_filename):
        file = frame.f_code.co_filename
        if file == bare_models.__file__:
            break  # while a model is constructed, its own code reads, even if all of it lies in packages
        if file.startswith(_OWN_FILES) and not file.endswith(_SHOWN_BY):
            return f"{file}:{frame.f_lineno}", True
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}", False
