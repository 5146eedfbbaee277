"""Units of cut weights: the next is gathered while one computes, and a step leaves neither weights nor tiles behind."""

import contextlib
import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import jigsaw
from jigsaw.comm.first_meetings import forget_meetings
from jigsaw.testing import on_ranks, world_mesh

SPEC = (None, None, "lat", None)


class Blocks(nn.Module):
    """Blocks in the order that each forward pass is told, checkpointed or not."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 1)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GELU()) for _ in range(4))
        self.order, self.checkpointed = (0, 1, 2, 3), False

    def forward(self, x):
        x = self.stem(x)
        for at in self.order:
            block = self.blocks[at]
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return x


class _LoggedGather(DefaultAllGather):
    def __init__(self, log, name):
        self.log, self.name = log, name

    def __call__(self, output_tensor, input_tensor, group, async_op=False):
        self.log.append(f"gather {self.name}" if async_op else f"wait for {self.name}")
        return super().__call__(output_tensor, input_tensor, group, async_op)


def _cut(mesh, how):
    torch.manual_seed(0)
    whole = Blocks().double()
    cut = copy.deepcopy(whole)
    jigsaw.parallelize(cut, mesh, shard_weights=how, units=list(cut.blocks))
    x = torch.randn(1, 3, 7, 6).double()
    return whole, cut, x, jigsaw.shard(x, mesh, SPEC)


def _log_calls(model):
    log = []
    model.set_custom_all_gather(_LoggedGather(log, "rest"))

    def note(at):
        def hook(module, args, out):
            log.append(f"forward {at}")
            out.local.grad_fn.register_prehook(lambda grads: log.append(f"backward {at}"))

        return hook

    for at, block in enumerate(model.blocks):
        block.set_custom_all_gather(_LoggedGather(log, at))
        block[0].register_forward_hook(note(at))
    return log


FORWARD = "gather rest, gather 0, gather 1, forward 0, gather 2, forward 1, gather 3, forward 2, forward 3"
BACKWARD = {
    True: "gather 3, gather 2, backward 3, gather 1, backward 2, gather 0, backward 1, backward 0",
    "keep": "backward 3, backward 2, backward 1, backward 0",
}


@pytest.mark.parametrize("how", [True, "keep"])
@on_ranks(2)
def test_the_next_unit_is_on_its_way_while_one_computes(how):
    _, model, _, tile = _cut(world_mesh(lat=2), how)
    log = _log_calls(model)
    for _ in range(3):  # the order is that of the pass before
        log.clear()
        y = model(tile)
        forward, log[:] = list(log), []
        y.square().mean().backward()
    assert ", ".join(forward) == FORWARD
    assert ", ".join(log) == BACKWARD[how]


@on_ranks(2)
def test_another_order_is_exact():
    """What is gathered for nobody is freed, and gathered anew when the weights have changed."""
    whole, model, x, tile = _cut(world_mesh(lat=2), True)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (whole, model)]
    for order in ((0, 1, 2, 3), (0, 2), (1, 0, 3, 0), (3, 2, 1, 0), (0, 0, 1, 2), (0, 1, 2, 3)):
        whole.order = model.order = order
        for m, inputs, optimizer in ((whole, x, steps[0]), (model, tile, steps[1])):
            with torch.no_grad():
                m(inputs)
            optimizer.zero_grad()
            m(inputs).square().mean().backward()
            optimizer.step()
        for found, expected in zip(model.parameters(), whole.parameters(), strict=True):
            torch.testing.assert_close(found.full_tensor(), expected, rtol=0, atol=1e-13)


def _memory():
    """The size of every memory that a tensor with values has."""
    gc.collect()
    tensors = [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor) and type(x) is not jigsaw.Tile]
    tensors = [x.to_local() if isinstance(x, DTensor) else x for x in tensors if not x.is_meta]
    memory_sizes = {}
    for memory in (x.untyped_storage() for x in tensors):
        with contextlib.suppress(RuntimeError):  # a tensor without values, which a graph of another test has left
            memory_sizes[memory.data_ptr()] = memory.nbytes()
    return {at: n for at, n in memory_sizes.items() if n}


@pytest.mark.slow
@pytest.mark.parametrize("how", [True, "keep"])
@on_ranks(2)
def test_a_step_leaves_its_gradients_alone(how):
    _, model, _, tile = _cut(world_mesh(lat=2), how)
    for checkpointed in (False, True):
        model.checkpointed = checkpointed
        model.zero_grad()
        before = _memory()
        for _ in range(3):
            model(tile).square().mean().backward()
        forget_meetings(tile.mesh)  # it keeps a few elements of the last plain values that tiles met
        gradients = {p.grad.to_local().untyped_storage().data_ptr() for p in model.parameters()}
        # not numbers, which torch and jigsaw keep for the next step
        left = {at: n for at, n in _memory().items() if at not in before and at not in gradients and n > 8}
        assert not left
