"""The played device refuses what a GPU does, and knows where the host would wait for one."""

import contextlib
import signal

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import jigsaw
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.testing.played_device import PLAYED_DEVICE, refuse_host_waits, take_host_waits, why_not_played

pytestmark = [
    pytest.mark.skipif(bool(why_not_played()), reason=why_not_played() or "it may"),
    pytest.mark.slow,  # the device is compiled first, which takes minutes on a busy machine
    pytest.mark.timeout(900),
]


def _here(*shape):
    return torch.randn(*shape).to(PLAYED_DEVICE)


@on_ranks(1, device=PLAYED_DEVICE)
def test_values_and_gradients_are_those_of_the_host():
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.GELU(), nn.Conv2d(4, 2, 3, stride=2))
    x = torch.randn(2, 2, 7, 6)

    def results(device):
        own, given = net.to(device), x.detach().to(device).requires_grad_()
        out = torch.fft.irfft2(torch.fft.rfft2(own(given)).conj(), s=(3, 2)).unfold(-1, 2, 1)
        own.zero_grad()
        (out[..., 0, :].sin().square().sum() + F.softmax(given.flatten(1), 1).topk(3).values.sum()).backward()
        found = [out, given.grad, *(p.grad for p in own.parameters())]
        assert all(v.device.type == device for v in found)
        return [v.detach().cpu() for v in found]

    expected = results("cpu")
    for ours, theirs in zip(results(PLAYED_DEVICE), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


@on_ranks(1, device=PLAYED_DEVICE)
def test_a_call_takes_tensors_of_one_device_alone():
    here, there = _here(3, 3), torch.ones(3, 3, device="cpu")
    for call in (
        lambda: here + there,
        lambda: here @ there,
        lambda: torch.cat([here, there]),
        lambda: F.linear(here, there),
        lambda: here.copy_(there).index_select(0, torch.tensor([1], device="cpu")),
    ):
        with pytest.raises(RuntimeError, match="device"):
            call()
    assert (here * torch.tensor(2.0, device="cpu")).device.type == PLAYED_DEVICE  # a number of the host may come along


WAITS = {
    "a number": lambda x: x.sum().item(),
    "a truth": lambda x: bool((x > 0).all()),
    "places": lambda x: x.nonzero(),
    "a mask": lambda x: x[x > 0],
    "comparison": lambda x: torch.equal(x, x),
    "to the host": lambda x: x.cpu(),
    "from the host": lambda x: torch.ones(3, device="cpu").to(x.device),
    "segments": lambda x: torch.segment_reduce(x, "sum", lengths=torch.ones_like(x[0], dtype=torch.int64)),
}


@on_ranks(1, device=PLAYED_DEVICE)
def test_what_the_host_waits_for_is_told():
    x = _here(3, 3)
    x[0].add_(x[1] * 2).relu_()
    torch.ones(3, device="cpu").pin_memory().to(PLAYED_DEVICE, non_blocking=True)
    x.clamp_(max=torch.where(x > 1, x, 0.5)).cumsum(0).sort()
    take_host_waits()
    for name, call in WAITS.items():
        call(x)
        assert take_host_waits(), name
    for call in WAITS.values():
        with pytest.raises(RuntimeError, match="the host waits for the device"), refuse_host_waits():
            call(x)
    with refuse_host_waits():
        assert x.index_select(0, x.argmax(0)).device == x.device
    assert not take_host_waits()


@pytest.mark.parametrize("shard_weights", [False, True])
@on_ranks(2, device=PLAYED_DEVICE)
def test_cut_weights_and_a_reader_of_numbers_work_on_it(shard_weights):
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), nn.Conv2d(8, 3, 3, padding=1)), _here(1, 3, 9, 4)
    whole = net.to(PLAYED_DEVICE)
    expected = whole(x).square().mean()
    mesh = world_mesh(lat=2)
    tiled = jigsaw.parallelize(whole, mesh, shard_weights=shard_weights)
    found = tiled(jigsaw.shard(x, mesh, (None, None, "lat", None))).square().mean()
    found.backward()
    torch.testing.assert_close(found.detach().cpu(), expected.detach().cpu())


@on_ranks(4, device=PLAYED_DEVICE)
def test_attention_cut_along_channel_waits_for_nothing():
    mesh = world_mesh(lat=2, channel=2)
    model = jigsaw.parallelize(nn.MultiheadAttention(12, 4, batch_first=True).to(PLAYED_DEVICE), mesh)
    x = jigsaw.shard(_here(2, 7, 12), mesh, (None, "lat", None))
    for step in range(3):
        with refuse_host_waits() if step == 2 else contextlib.nullcontext():
            model(x, x, x, need_weights=False)[0].square().mean().backward()


@on_ranks(2, device=PLAYED_DEVICE)
def test_what_is_drawn_waits_for_nothing_and_is_that_of_the_host():
    """A seed comes from the first rank; it stays on the device, where no number is read from it."""

    def drawn(device, waits):
        torch.manual_seed(3)
        mesh = jigsaw.init_mesh(device=device, lat=2)
        x = jigsaw.shard(torch.ones(9, 4).to(device), mesh, ("lat", None))
        F.dropout(x, 0.5)  # makes once what it needs
        with waits:
            found = [F.dropout(x, 0.5), x.new_empty(9, 1).bernoulli_(0.4), torch.rand_like(x), torch.randn_like(x)]
        return [y.full_tensor().cpu() for y in found]

    for ours, theirs in zip(
        drawn(PLAYED_DEVICE, refuse_host_waits()), drawn("cpu", contextlib.nullcontext()), strict=True
    ):
        assert torch.equal(ours, theirs)


@on_ranks(2, device=PLAYED_DEVICE)
def test_no_host_waits_for_its_device_to_hear_of_a_request_to_end():
    with jigsaw.StopRequest(world_mesh(lat=2)) as stop:
        for step in range(3):
            if step == 1 and dist.get_rank() == 1:
                signal.raise_signal(signal.SIGUSR1)
            with refuse_host_waits():
                assert stop.heard() == (step >= 1)
