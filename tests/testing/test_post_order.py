"""NCCL's law: jobs that keep it pass on gloo's ordered groups, and each way to break it is found."""

from contextlib import nullcontext
from dataclasses import replace
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh
from jigsaw.testing.failure import RankFailedError
from jigsaw.testing.ordered_group import take_events
from jigsaw.testing.post_order import Post, PostedMessage, PostOrderError, PostWait, check_posts
from jigsaw.torch_internals.groups import group_by_name

BOTH = (0, 1)


def sum_of(number, communicator="a", signature="allreduce 3"):
    return Post(number, communicator, BOTH, signature)


def batch_of(number, *messages, communicator="a"):
    return Post(number, communicator, BOTH, messages=tuple(PostedMessage(*m) for m in messages))


def to(peer, size=8, tag=0):
    return True, peer, size, tag


def out_of(peer, size=8, tag=0):
    return False, peer, size, tag


# -- records ----------------------------------------------------------------------------------------------------------


RIGHT = {
    "nothing": ([], []),
    "sums": ([sum_of(1), PostWait(1), sum_of(2)], [sum_of(1), sum_of(2), PostWait(2)]),
    "a swap": ([batch_of(1, to(1), out_of(1)), PostWait(1)], [batch_of(1, out_of(0), to(0)), PostWait(1)]),
    "two messages, taken in two batches": (
        [batch_of(1, to(1), to(1, 4))],
        [batch_of(1, out_of(0)), batch_of(2, out_of(0, 4))],
    ),
    "a sum behind a message on another communicator": (
        [sum_of(1, "b"), batch_of(2, to(1)), PostWait(2), PostWait(1)],
        [batch_of(1, out_of(0)), sum_of(2, "b"), PostWait(1), PostWait(2)],
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_what_nccl_runs_passes(name):
    check_posts(RIGHT[name])


WRONG = {
    "a tag that matters": (
        "different tags",
        [batch_of(1, to(1, tag=0)), batch_of(2, to(1, tag=1))],
        [batch_of(1, out_of(0, tag=1)), batch_of(2, out_of(0, tag=0))],
    ),
    "messages that cross": (
        "different sizes",
        [batch_of(1, to(1, 8)), batch_of(2, to(1, 4))],
        [batch_of(1, out_of(0, 4)), batch_of(2, out_of(0, 8))],
    ),
    "another order of sums": (
        "different collectives",
        [sum_of(1), sum_of(2, signature="broadcast 3")],
        [sum_of(1, signature="broadcast 3"), sum_of(2)],
    ),
    "a message that a sum must pass": (
        "wait for each other forever",
        [sum_of(1), batch_of(2, to(1))],
        [batch_of(1, out_of(0)), sum_of(2)],
    ),
    "waits on two communicators": (
        "wait for each other forever",
        [sum_of(1), PostWait(1), sum_of(2, "b")],
        [sum_of(1, "b"), PostWait(1), sum_of(2)],
    ),
    "a sum that one rank leaves out": ("wait for each other forever", [sum_of(1)], []),
    "a message that nobody takes": ("wait for each other forever", [batch_of(1, to(1))], [sum_of(1, "b")]),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_nccl_does_not_run_is_found(name):
    words, *ranks = WRONG[name]
    with pytest.raises(PostOrderError, match=words):
        check_posts(ranks)


def test_a_wait_in_one_thread_lets_another_post():
    other = Post(2, "b", BOTH, "allreduce 3", thread=1)
    check_posts([[sum_of(1), PostWait(1), other], [Post(1, "b", BOTH, "allreduce 3"), PostWait(1), sum_of(2)]])


# -- on ranks ---------------------------------------------------------------------------------------------------------


def swapped(first_tag, second_tag):
    """Each rank sends two messages of one size; what was sent first is taken with `first_tag`."""
    other = 1 - dist.get_rank()
    sent, taken = [torch.full((3,), n) for n in (1.0, 2.0)], [torch.zeros(3) for _ in range(2)]
    messages = [dist.P2POp(dist.irecv, x, other, tag=t) for x, t in zip(taken, (first_tag, second_tag), strict=True)]
    messages += [dist.P2POp(dist.isend, x, other, tag=t) for t, x in enumerate(sent)]
    for work in dist.batch_isend_irecv(messages):
        work.wait()
    return [x[0].item() for x in taken]


@pytest.mark.parametrize("backend", ["gloo", "ordered"])
def test_messages_in_order_arrive(backend):
    assert on_ranks(2, backend=backend)(swapped)(0, 1) == [[1, 2], [1, 2]]


def test_messages_that_rely_on_tags_are_found():
    assert on_ranks(2)(swapped)(1, 0) == [[2, 1], [2, 1]]
    with pytest.raises(PostOrderError, match="NCCL has no tags"):
        on_ranks(2, backend="ordered")(swapped)(1, 0)


def taken_one_by_one():
    other, x, y = 1 - dist.get_rank(), torch.zeros(3), torch.ones(3)
    for work in [dist.irecv(x, other), dist.isend(y, other)]:
        work.wait()


def test_ranks_that_first_take_and_then_send_are_found():
    on_ranks(2)(taken_one_by_one)()
    with pytest.raises(PostOrderError, match="wait for each other forever"):
        on_ranks(2, backend="ordered")(taken_one_by_one)()


def crossed():
    """One rank posts a sum and then a message, the other the message first: gloo runs both."""
    rank, x, y = dist.get_rank(), torch.ones(4), torch.zeros(4)
    if rank == 0:
        works = [dist.all_reduce(x, async_op=True), *dist.batch_isend_irecv([dist.P2POp(dist.isend, y, 1)])]
    else:
        works = [*dist.batch_isend_irecv([dist.P2POp(dist.irecv, y, 0)]), dist.all_reduce(x, async_op=True)]
    for work in works:
        work.wait()


def test_a_message_that_a_sum_must_pass_is_found_and_its_place_is_told():
    on_ranks(2)(crossed)()
    with pytest.raises(PostOrderError, match=r"rank 0: allreduce .*test_post_order.py:\d+.*rank 1: messages from 0"):
        on_ranks(2, backend="ordered")(crossed)()


def summed_without_waiting():
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    early = x.tolist()
    work.wait()
    return early, x.tolist()


def test_a_result_comes_with_the_wait_for_it():
    assert on_ranks(2, backend="ordered")(summed_without_waiting)() == [([1, 1], [2, 2])] * 2


def changed_while_it_is_sent():
    x = torch.ones(2)
    work = dist.all_reduce(x, async_op=True)
    x.add_(1)
    work.wait()


def test_a_tensor_that_changes_before_the_wait_is_found():
    with pytest.raises(RankFailedError, match="was changed before the wait"):
        on_ranks(2, backend="ordered")(changed_while_it_is_sent)()


def every_collective():
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine, parts = torch.full((2,), float(rank)), [torch.zeros(2) for _ in range(ranks)]
    dist.all_gather(parts, mine)
    whole = torch.zeros(2 * ranks)
    dist.all_gather_single(whole, mine)
    assert torch.equal(torch.cat(parts), whole)
    row = torch.zeros(2)
    dist.reduce_scatter_single(row, whole.clone())
    assert torch.equal(row, ranks * mine)
    dist.reduce_scatter(row, [part.clone() for part in parts])
    assert torch.equal(row, ranks * mine)
    first = mine.clone()
    dist.broadcast(first, 1)
    assert torch.equal(first, torch.ones(2))
    others = torch.zeros(ranks)
    dist.all_to_all_single(others, torch.full((ranks,), float(rank)))
    assert others.tolist() == list(range(ranks))
    found = [None] * ranks
    dist.all_gather_object(found, rank)
    assert found == list(range(ranks))
    dist.gather(mine, parts if rank == 0 else None, dst=0)
    dist.scatter(row, parts if rank == 0 else None, src=0)
    assert torch.equal(row, mine)
    dist.reduce(mine, 0)
    dist.barrier()
    if rank == 0:
        assert mine.tolist() == [3, 3]


def test_every_collective_is_that_of_gloo():
    on_ranks(3, backend="ordered")(every_collective)()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.down, self.norm = nn.Conv2d(2, 6, 3, stride=2, padding=1), nn.GroupNorm(2, 6)
        self.up = nn.Conv2d(6, 2, 3, padding=1)

    def forward(self, x):
        y = F.interpolate(F.gelu(self.norm(self.down(x))), scale_factor=2)
        return self.up(y) + x


def trained(how, axes, steps=2):
    mesh = world_mesh(**axes)
    torch.manual_seed(0)
    model = jigsaw.parallelize(Net(), mesh, **how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = jigsaw.shard(torch.randn(2, 2, 14, 10), mesh, (None, None, "lat", "lon" if "lon" in axes else None))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def trained_by_ddp():
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 2)))
    x = torch.randn(6, 4)[3 * dist.get_rank() : 3 * dist.get_rank() + 3]
    losses = []
    for _ in range(3):
        model.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.1 * p.grad
        losses.append(loss.item())
    return losses, [p.sum().item() for p in model.parameters()]


def test_gradients_of_ddp_come_through():
    assert on_ranks(2, backend="ordered")(trained_by_ddp)() == run_on_ranks(2, trained_by_ddp)


@pytest.mark.parametrize(
    ("how", "axes"),
    [
        ({}, {"lat": 2}),
        pytest.param({}, {"lat": 3}, marks=pytest.mark.slow),
        pytest.param({}, {"lat": 2, "lon": 2}, marks=pytest.mark.slow),
        pytest.param({"shard_weights": True}, {"lat": 2, "lon": 2}, marks=pytest.mark.slow),
        ({"shard_weights": True}, {"lat": 2}),
    ],
)
def test_training_keeps_the_law(how, axes):
    ranks = torch.tensor(list(axes.values())).prod().item()
    by_law = on_ranks(ranks, backend="ordered")(trained)(how, axes)
    assert by_law == run_on_ranks(ranks, trained, how, axes)


# -- groups of their own ----------------------------------------------------------------------------------------------


def posts_of_a_step(is_shared):
    """What a rank posts in the passes of three convolutions; with `is_shared`, to one group, as all other traffic."""
    mesh = world_mesh(lat=2)
    with pytest.MonkeyPatch.context() as patch:
        if is_shared:
            patch.setattr("jigsaw.ranks.mesh._group_apart", lambda kind, ranks, group, device: group)
        convolutions = nn.Sequential(*(nn.Conv2d(2, 2, 3, padding=1) for _ in range(3)))
        model = jigsaw.parallelize(convolutions, mesh, bucket_bytes=1)
        x = jigsaw.shard(torch.randn(1, 2, 14, 10), mesh, (None, None, "lat", None))
        take_events()
        loss = model(x).square().mean()
        forward = take_events()
        loss.backward()
    return forward, take_events()


def sums_at_the_end(events):
    """The same record of a rank that is late with its sums: all else that it does comes first."""
    sums = {e.number for e in events if isinstance(e, Post) and e.signature}
    assert len(sums) == 6
    ordered = sorted(events, key=lambda e: (e.number in sums, isinstance(e, PostWait) and e.number in sums))
    return [replace(e, number=e.number + 1000 * (e.number in sums)) for e in ordered]


@pytest.mark.parametrize("is_shared", [False, True])
def test_halos_wait_behind_no_sum_of_gradients(is_shared):
    (forward, first), (_, second) = on_ranks(2, backend="ordered")(posts_of_a_step)(is_shared)
    check_posts([first, second])
    with pytest.raises(PostOrderError, match="wait for each other forever") if is_shared else nullcontext():
        check_posts([first, sums_at_the_end(second)])
    halos = {e.communicator for e in first if isinstance(e, Post) and e.messages}
    sums = {e.communicator for e in first if isinstance(e, Post) and e.signature}
    of_forward = {e.communicator for e in forward if isinstance(e, Post) and e.signature}
    assert halos and sums and of_forward
    assert len(halos | sums | of_forward) == (1 if is_shared else 3)


def posts_of_cut_weights(axes, how):
    """What a rank posts in a step whose norm adds up tiles between units of cut weights."""
    mesh = world_mesh(**axes)
    layers = [nn.Conv2d(2, 2, 3, padding=1), nn.GroupNorm(1, 2), nn.Conv2d(2, 2, 3, padding=1)]
    model = jigsaw.parallelize(nn.Sequential(*layers), mesh, shard_weights=True, unit_bytes=1, **how)
    x = jigsaw.shard(torch.randn(1, 2, 14, 10), mesh, (None, None, "lat", None))
    take_events()
    model(x).square().mean().backward()
    return [event for event in take_events() if isinstance(event, Post)]


@pytest.mark.parametrize(
    ("axes", "how"), [({"lat": 2}, {}), ({"lat": 3}, {}), ({"data": 2, "lat": 2}, {"replicate": "data"})]
)
def test_cut_weights_wait_behind_no_collective_of_tiles(axes, how):
    ranks = prod(axes.values())
    for posts in on_ranks(ranks, backend="ordered")(posts_of_cut_weights)(axes, how):
        of_units = {p.communicator for p in posts if p.signature.startswith(("all_gather_single", "reduce_scatter"))}
        others = {p.communicator for p in posts} - of_units
        of_copies = {name for name in others if "weights" in name}  # the sums of hybrid sharding's copies
        assert len(of_units) == 1 and "weights" in of_units.pop() and len(of_copies) == len(how)
        assert {p.communicator for p in posts if p.messages} < others - of_copies


@on_ranks(2, backend="ordered")
def test_ranks_may_come_to_sums_and_messages_in_any_order():
    """Groups are made where all ranks are; a group that two ranks make in other order would never be whole."""
    mesh, made = world_mesh(lat=2), []

    def made_anew(name, *facts):
        made.append(name.split()[1])
        return group_by_name(f"{name} once more", *facts)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jigsaw.ranks.mesh._groups_by_kind", {})
        patch.setattr("jigsaw.ranks.mesh.group_by_name", made_anew)
        jigsaw.parallelize(nn.Linear(3, 3), mesh)
        assert made == ["gradients"]
        own, other = torch.ones(3), torch.empty(3)
        total, at = torch.ones(3), mesh.get_rank()
        steps = [
            lambda: comm.start_sum(total, mesh, ("lat",)),
            lambda: comm.swap_messages(mesh, [(1 - at, own)], [(1 - at, other)]),
        ]
        for work in [step() for step in (steps if at == 0 else reversed(steps))]:
            work.wait()
    assert made == ["gradients", "messages"] and total.tolist() == [2, 2, 2] and other.tolist() == [1, 1, 1]
