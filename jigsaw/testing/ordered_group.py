"""A process group that keeps NCCL's law on gloo: it records what a rank posts, and results come with the wait for them.

It shows on CPUs what would fail on NCCL only:

- No tags reach gloo, so a message that relies on one meets another.
- A result stays out of the caller's tensor until `wait`, so a wait that was forgotten shows as a wrong number.
- A tensor that changes between the post and the wait is an error, because NCCL may read it or write it then.

`jigsaw.testing.on_ranks(backend="ordered")` has it; all ranks' records then go to `check_posts`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jigsaw.ranks.call_places import place_of_call
from jigsaw.testing.played_device import PLAYED_DEVICE, host_view
from jigsaw.testing.post_order import Post, PostedMessage, PostOrderError, PostWait
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.groups import serve_group
from jigsaw.torch_internals.private_names import replace_in_torch

ORDERED_BACKEND = "ordered"

_events: list[Post | PostWait] = []
_event_lock = threading.Lock()
_next_number = 0


def take_events() -> list[Post | PostWait]:
    """Return what this rank has posted and waited for since the last call."""
    with _event_lock:
        events = list(_events)
        _events.clear()
    return events


def _record_post(group: OrderedGroup, signature: str, messages: Sequence[PostedMessage] = (), name: str = "") -> int:
    global _next_number
    function, line = place_of_call()
    place = f"in {function}, {line}"
    with _event_lock:
        _next_number += 1
        post = Post(
            _next_number,
            name or group.communicator,
            group.members,
            signature,
            tuple(messages),
            place,
            threading.get_ident(),
        )
        _events.append(post)
        return _next_number


class _OrderedWork(dist.Work):
    """An operation under way; `wait` brings its results into the caller's tensors."""

    def __init__(
        self,
        number: int,
        works: Sequence[dist.Work],
        late: Sequence[tuple[Tensor, Tensor]] = (),
        sent: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        """Hold the tensors that are filled, each with its result, and those that are sent, each with its copy."""
        super().__init__()
        self._number, self._works, self._late = number, works, late
        # hold the copies, because gloo does not keep alive what it sends
        self._before = [*sent, *((x, _copy_of(x)) for x, _ in late)]
        self._lock, self._has_ended = threading.Lock(), False

    def wait(self, timeout: Any = None) -> bool:
        with _event_lock:
            _events.append(PostWait(self._number, threading.get_ident()))
        for work in self._works:
            _ = work.wait() if timeout is None else work.wait(timeout)
        self._finish()
        return True

    def _finish(self) -> None:
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            if not all(_has_same_bits(x, before) for x, before in self._before):
                raise PostOrderError(
                    "a tensor that is sent, or that a result was to come to, was changed before the wait for it; NCCL "
                    "reads and writes it at any time between: wait first, or change a copy"
                )
            with torch.no_grad():
                for target, result in self._late:
                    host_view(target).copy_(result)
            self._before, self._late = [], ()

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def is_success(self) -> bool:
        return True

    def result(self) -> list[Tensor]:
        self.wait()
        return []

    def get_future(self) -> Any:
        """Return a future of the results, for DDP's reducer."""
        targets = [target for target, _ in self._late]

        def end(arrived: Any) -> list[Tensor]:
            arrived.value()  # raises gloo's error, if there was one
            self._finish()
            return targets

        return torch.futures.collect_all([work.get_future() for work in self._works]).then(end)


class OrderedGroup(dist.ProcessGroup):
    """A group of ranks on gloo; torch calls it as it calls NCCL's."""

    supports_coalescing = True  # like NCCL: operations run in order, and those of a batch together

    def __init__(self, inner: dist.ProcessGroup, rank: int, members: Sequence[int], name: str) -> None:
        super().__init__(rank, len(members))  # pyright: ignore[reportCallIssue]
        self.inner, self.members, self.communicator = inner, tuple(members), name

    def collective(self, name: str, results: Any, *arguments: Any) -> dist.Work:
        """Post a collective, whose first argument has the tensors that it fills."""
        targets, private, late = _with_copies(results)
        inputs, copies, sent = _with_copies(arguments)
        options = [x for x in arguments if not isinstance(x, Tensor | list | tuple)]
        sizes = [] if name in _UNEVEN else [f"{x.numel()} {x.dtype}" for x in inputs or targets]
        number = _record_post(self, " ".join([name, *sizes, *map(_told_option, options)]).rstrip())
        return _OrderedWork(number, [getattr(self.inner, name)(private, *copies)], late, sent)

    def barrier(self, *arguments: Any, **named: Any) -> dist.Work:
        return _OrderedWork(_record_post(self, "barrier"), [self.inner.barrier(*arguments, **named)])

    def send(self, tensors: list[Tensor], dstRank: int, tag: int) -> dist.Work:
        return self.batch([(True, tensors[0], dstRank, tag)], is_pair=True)

    def recv(self, tensors: list[Tensor], srcRank: int, tag: int) -> dist.Work:
        return self.batch([(False, tensors[0], srcRank, tag)], is_pair=True)

    def batch(self, messages: Sequence[tuple[bool, Tensor, int, int]], is_pair: bool = False) -> dist.Work:
        """Post messages as one operation: whether it is sent, the tensor, the rank in the group and the tag of each.  A
        message by itself (`is_pair`) has a communicator of its two ranks, as torch's NCCL group makes one.
        """
        posted = [PostedMessage(sent, self.members[at], x.nbytes, tag) for sent, x, at, tag in messages]
        pair = f"{self.communicator} {sorted((self.members[self.rank()], posted[0].peer))}" if is_pair else ""
        number = _record_post(self, "", posted, pair)
        arriving = [(x, torch.empty_like(host_view(x)), at) for sent, x, at, _ in messages if not sent]
        leaving = [(x, _copy_of(x), at) for sent, x, at, _ in messages if sent]
        # receives first, because gloo sends only once the other side receives
        works = [self.inner.recv([private], at, 0) for _, private, at in arriving]
        works += [self.inner.send([copy], at, 0) for _, copy, at in leaving]
        return _OrderedWork(number, works, [x[:2] for x in arriving], [x[:2] for x in leaving])


_UNEVEN = ("alltoall", "all_to_all_single", "scatter", "gather")  # ranks have different numbers of elements, or none


def _with_copies(tree: Any) -> tuple[list[Tensor], Any, list[tuple[Tensor, Tensor]]]:
    """Return the tensors of a tree, the same tree of copies, and the pairs."""
    tensors = [x for x in pytree.tree_leaves(tree) if isinstance(x, Tensor)]
    pairs = [(x, _copy_of(x)) for x in tensors]
    copies = iter([copy for _, copy in pairs])
    return tensors, pytree.tree_map_only(Tensor, lambda _: next(copies), tree), pairs


def _copy_of(x: Tensor) -> Tensor:
    return host_view(x.detach()).clone()


def _has_same_bits(x: Tensor, other: Tensor) -> bool:
    x = host_view(x.detach())
    return torch.equal(*(torch.view_as_real(v) if v.is_complex() else v for v in (x, other))) or torch.equal(
        *(v.contiguous().view(-1).view(torch.uint8) for v in (x, other))  # NaN is not equal to itself
    )


def _told_option(option: Any) -> str:
    """Return what of a collective's options must be the same on all ranks."""
    root, op = getattr(option, "rootRank", None), getattr(option, "reduceOp", None)
    kinds = (
        [] if op is None else [name for name in ("SUM", "PRODUCT", "MIN", "MAX") if op == getattr(dist.ReduceOp, name)]
    )
    return " ".join([*kinds, *([] if root is None else [f"root {root}"])])


def _posting(name: str) -> Callable[..., dist.Work]:
    def post(self: OrderedGroup, results: Any, *arguments: Any, **named: Any) -> dist.Work:
        return self.collective(name, results, *arguments, *named.values())

    return post


for _name in (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "allgather", "allgather_coalesced", "gather"),
    *("all_gather_single", "all_gather_single_coalesced", "scatter", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_single_coalesced", "alltoall", "all_to_all_single"),
):
    setattr(OrderedGroup, _name, _posting(_name))


def _make_group(options: Any, _: Any) -> OrderedGroup:
    name, members = options.group_id, options.global_ranks_in_group or range(options.group_size)
    rank, timeout = options.group_rank, options.timeout
    gloo = dist.ProcessGroupGloo(options.store, rank, options.group_size, timeout=timeout)
    inner = dist.ProcessGroup(options.store, rank, options.group_size)
    serve_group(inner, gloo)
    group = OrderedGroup(inner, rank, list(members), name)
    serve_group(group, gloo)  # for callers that ask for the group's backend or its time-out
    return group


_batch_of_torch = dist.batch_isend_irecv


def _batch_of_messages(messages: list[dist.P2POp]) -> list[dist.Work]:
    """Do as `torch.distributed.batch_isend_irecv`, which posts the messages of a group like this one by one."""
    group: Any = messages[0].group or dist.group.WORLD
    if not isinstance(group, OrderedGroup):
        return _batch_of_torch(messages)
    return [group.batch([(m.op is dist.isend, m.tensor, m.group_peer, m.tag) for m in messages])]


def serve_ordered_groups() -> None:
    """Let torch make such groups in this process from now on."""
    dist.Backend.register_backend(ORDERED_BACKEND, _make_group, extended_api=True, devices=["cpu", PLAYED_DEVICE])
    replace_in_torch(dist, "batch_isend_irecv", _batch_of_messages)
