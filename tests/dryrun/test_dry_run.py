"""A dry run beside the real one: messages counted, memory measured; and what it says of nets that would not run."""

import copy
import gc
import re
import sys
from dataclasses import replace
from functools import partial
from itertools import accumulate

import pytest
import small_nets
import torch
from small_nets import NETS, counted_step, dry_step
from torch import nn
from torch.profiler import ProfilerActivity, profile

import jigsaw
from jigsaw.dryrun import DEVICES, Traffic
from jigsaw.dryrun.rank_playing import StepPlan, mean_square_of_tiles, play_rank
from jigsaw.dryrun.step_meter import StepMeter
from jigsaw.errors import ShardingError
from jigsaw.parallel.gradient_buckets import local_part
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

MESHES = [
    {"lat": 2},
    pytest.param({"lat": 1}, marks=pytest.mark.slow),
    pytest.param({"lat": 2, "lon": 2}, marks=pytest.mark.slow),
    pytest.param({"lon": 4}, marks=[pytest.mark.slow, pytest.mark.nightly]),
]


def _counted_on_ranks(axes, names):
    return {name: counted_step(name, axes) for name in names}


def _assert_same_messages(axes, names=tuple(NETS)):
    ranks = torch.Size(axes.values()).numel()
    real = run_on_ranks(ranks, _counted_on_ranks, axes, names)
    for name in names:
        report = dry_step(name, axes, ranks=range(ranks))
        assert report.is_complete
        for played, counted in zip(report.ranks, real, strict=True):
            for phase in ("forward", "backward"):
                found = {kind: (t.sent_bytes, t.messages) for kind, t in played.phases[phase].traffic.items()}
                assert found == counted[name][phase], (name, axes, played.rank, phase)
        assert report.sent_bytes == max(sum(b for p in c[name].values() for b, _ in p.values()) for c in real)


@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_messages_are_those_of_real_ranks(axes):
    _assert_same_messages(axes)


@pytest.mark.slow
def test_messages_of_weights_that_channel_cuts():
    _assert_same_messages({"lat": 2, "channel": 2}, ["unet", "transformer"])


@pytest.mark.slow
@pytest.mark.nightly
def test_messages_are_those_of_eight_ranks():
    _assert_same_messages({"lat": 4, "lon": 2})


# -- memory -----------------------------------------------------------------------------------------------------------

BIG_NETS = {
    "unet": (small_nets.SmallUNet, (1, 3, 128, 160), 2),
    "transformer": (partial(small_nets.SmallTransformer, 64, 4, 3), (1, 3, 128, 160), 4),
    "mixer": (partial(small_nets.SmallMixer, 256, 48), (1, 3, 256, 40), 1),
}


def _measured_peak(name, axes, **options):
    """On a real rank: the bytes that torch's allocator has out at the highest point of a second step, by profiler."""
    mesh = world_mesh(**axes)
    make, shape, align = BIG_NETS[name]
    model = jigsaw.parallelize(make(), mesh, **options)
    optimizer = torch.optim.AdamW(model.parameters())
    spec = tuple(a if a in axes else None for a in small_nets.SPEC)
    tile = jigsaw.shard(torch.randn(shape), mesh, spec, align={2: align, 3: align})

    def step():
        model(tile).square().mean().backward()
        optimizer.step()

    step()
    optimizer.zero_grad()
    state = [x for values in optimizer.state.values() for x in values.values()]
    before = sum(local_part(x).nbytes for x in (*model.parameters(), *model.buffers(), *state)) + tile.local.nbytes
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    events = profiled.profiler.kineto_results.events()
    changes = [size for _, size in sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")]
    return before + max(accumulate(changes))


def _measured_peaks(axes, **options):
    return {name: _measured_peak(name, axes, **options) for name in BIG_NETS}


def _assert_measured_memory(axes, monkeypatch, **options):
    monkeypatch.setattr(small_nets, "NETS", BIG_NETS)
    ranks = torch.Size(axes.values()).numel()
    measured = run_on_ranks(ranks, _measured_peaks, axes, **options)
    for name in BIG_NETS:
        report = dry_step(name, axes, ranks=[0], **options)
        assert report.peak_bytes == pytest.approx(measured[0][name], rel=0.1), name
        assert sum(report.peak.values()) == report.peak_bytes
        assert set(report.peak) == {"weights", "gradients", "optimizer", "activations", "temporary"}


@pytest.mark.slow
def test_memory_is_within_a_tenth_of_what_torch_allocates(monkeypatch):
    _assert_measured_memory({"lat": 2}, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize(("axes", "options"), [({"lat": 1}, {}), ({"lat": 2, "lon": 2}, {"shard_weights": True})])
def test_memory_on_other_meshes(axes, options, monkeypatch):
    _assert_measured_memory(axes, monkeypatch, **options)


# -- operations, time, links ------------------------------------------------------------------------------------------


def test_operations_of_products():
    net = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
    report = jigsaw.dry_run(net, (4, 10, 8), {"data": 2}, optimizer=None)
    rows = 4 * 10 // 2
    assert report.ranks[0].phases["forward"].flop == 2 * rows * 8 * 16 * 2
    # no gradient of the input: three products of four
    assert report.ranks[0].phases["backward"].flop == 2 * rows * 8 * 16 * 3
    assert "step" not in report.ranks[0].phases
    assert report.ranks[0].phases["forward"].peak["weights"] == (8 * 16 * 2 + 16 + 8) * 4


def test_seconds_are_the_longest_of_three():
    device = replace(DEVICES["h100"], flop_share=1.0, memory_share=1.0, kernel_seconds=1e-3)
    assert device.kernel_time(int(67e12), 10, torch.float32) == (1.0, "flop")
    assert device.kernel_time(10, int(3.35e12), torch.float32) == (1.0, "memory")
    assert device.kernel_time(10, 10, torch.float32) == (1e-3, "kernels")


def test_products_of_cut_dims_are_narrow_on_a_gpu_and_wide_on_a_processor():
    plan = StepPlan(nn.Linear(64, 32), ((4, 16, 64),), (None, None, "lat"), torch.bfloat16, optimizer=None)
    found = {}
    for name in ("cpu", "h100"):
        played = play_rank(replace(plan, on_processor=DEVICES[name].is_processor), {"lat": 2}, 0)
        products = [k for phase in played.phases.values() for k in phase.kernels if k.flop]
        found[name] = {k.dtype for k in products}, sum(k.flop for k in products)
    assert found["cpu"] == ({torch.float32}, found["h100"][1])
    assert found["h100"][0] == {torch.bfloat16}


def test_messages_go_by_the_link_between_two_ranks():
    net = nn.Conv2d(3, 3, 3, padding=1)
    one = jigsaw.dry_run(net, (1, 3, 32, 16), {"lat": 4}, ranks=[1], ranks_per_node=4)
    two = jigsaw.dry_run(net, (1, 3, 32, 16), {"lat": 4}, ranks=[1], ranks_per_node=2)
    links = one.ranks[0].phases["forward"].links, two.ranks[0].phases["forward"].links
    row = 3 * 16 * 4
    halo = one.ranks[0].phases["forward"].traffic["exchange"]
    assert halo == Traffic(2 * row, 2)
    assert set(links[0]) == {"node"}
    # one halo row to rank 0, of the same node, one to rank 2; the sum of the loss goes on to rank 2
    assert links[1]["node"] == Traffic(row, 1)
    assert links[0]["node"] == links[1]["node"] + links[1]["network"]
    assert one.seconds < two.seconds


def test_a_ring_over_nodes_is_as_slow_as_its_slowest_link():
    device = DEVICES["a100"]
    a_second = 0.75 * device.network_bandwidth * 2  # two ranks of a node send to the next one, each by its adapter
    assert device.ring_time(int(a_second), 3, ranks=4, nodes=2) == pytest.approx(1 + 2 * 8e-6 + 15e-6)
    # a sum of many bytes goes round the ring twice, with one start between nodes less than there are nodes
    assert device.ring_time(int(a_second), 6, ranks=4, nodes=2) == pytest.approx(1 + 4 * 8e-6 + 2 * 15e-6)
    # a sum of few takes a tree: up and down, a start for the other rank of the node and three for eight nodes
    assert device.ring_time(16, 30, ranks=16, nodes=8) == pytest.approx(2 * (8e-6 + 3 * 15e-6), rel=1e-3)
    # where every rank is a node of its own, no link of nodes is there
    assert device.ring_time(0, 3, ranks=4, nodes=4) == pytest.approx(3 * 15e-6)

    # ranks 1 and 3 of both nodes sum the gradients of a net with 3 * 3 + 3 weights
    how = {"optimizer": None, "ranks": [1], "ranks_per_node": 2, "device": device}
    report = jigsaw.dry_run(nn.Linear(3, 3), (4, 3), {"data": 4}, **how)
    backward = report.ranks[0].phases["backward"]
    sent = backward.traffic["all_reduce"]
    assert set(backward.links) == {"network"}
    assert backward.message_seconds == pytest.approx(device.ring_time(sent.sent_bytes, 6, ranks=4, nodes=2))
    first = jigsaw.dry_run(nn.Linear(3, 3), (4, 3), {"data": 4}, **how | {"ranks": [0]}).ranks[0].phases["backward"]
    assert set(first.links) == {"node"}  # it sends to its neighbor, and waits for the slower links as well
    assert first.message_seconds == backward.message_seconds


class Picking(nn.Module):
    """What looks at indices and variances before it uses them: a dry run takes it that they are right."""

    def __init__(self):
        super().__init__()
        self.linear, self.table = nn.Linear(4, 4), nn.Embedding(5, 4)

    def forward(self, x):
        y = self.linear(x)[:, [2, 0, 1, 3]] + x.index_select(0, torch.tensor([0, 5, 5])).mean()
        y = y.index_add(1, torch.tensor([0, 2]), y[:, :2]).gather(1, torch.tensor([[3, 0, 1, 2]]).expand(8, 4))
        return y + self.table(torch.tensor([1, 2])).sum() + nn.functional.gaussian_nll_loss(y, x, x.square())


def test_indices_are_taken_to_be_right():
    report = jigsaw.dry_run(Picking(), (8, 4), {"lat": 2}, spec=("lat", None), ranks=[0, 1])
    assert report.is_complete and not report.remarks


def test_ranks_of_weights_cut_twice_are_told_apart():
    net = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
    axes, spec = {"replicate": 2, "data": 2, "channel": 2}, (("replicate", "data"), None, None)
    how = {"spec": spec, "shard_weights": True, "replicate": "replicate", "ranks": [0, 7, 2]}
    report = jigsaw.dry_run(net, (8, 4, 8), axes, **how)
    assert report.is_complete
    assert len({(rank.sent_bytes, rank.messages, rank.flop) for rank in report.ranks}) == 1


@pytest.mark.slow
def test_checkpointing_computes_twice_and_keeps_less():
    how = {"shard_weights": True}
    plain = dry_step("transformer", {"lat": 2}, ranks=[0], **how)
    twice = dry_step("transformer", {"lat": 2}, ranks=[0], checkpoint="blocks", **how)
    assert twice.flop > 1.2 * plain.flop
    held = [r.ranks[0].phases["backward"].peak["activations"] for r in (twice, plain)]
    assert held[0] < held[1]
    assert plain.ranks[0].phases["forward"].traffic["gathered weights"].sent_bytes > 0
    named = dry_step("transformer", {"lat": 2}, ranks=[0], checkpoint=["blocks.0", "blocks.1"], **how)
    assert named.flop == twice.flop


# -- what would not run -----------------------------------------------------------------------------------------------


class _Refused(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.inverse = nn.Conv2d(3, 3, 3, padding=1), _Inverse()

    def forward(self, x):
        y = self.conv(x)
        if y.isnan().any():
            raise ValueError("the dry run must not take a net for broken")
        return self.inverse(y)[:, :, 1:] + x[:, :, :-1]


class _Inverse(nn.Module):
    def forward(self, x):
        return torch.linalg.pinv(x).transpose(-1, -2)


class _Chosen(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(3, 3, 1), _Masked())

    def forward(self, x):
        return self.inner(x)


class _Masked(nn.Module):
    def forward(self, x):
        return x[x[:, 0, 0, 0] > 0]


def test_remarks_name_what_fails_on_several_ranks():
    report = jigsaw.dry_run(_Refused(), (1, 3, 33, 12), {"lat": 4})
    found = {remark.kind: remark for remark in report.remarks}
    assert set(found) == {"refused", "re-cut", "value"}
    assert found["refused"].module == "inverse"
    assert found["refused"].function == "linalg_pinv"
    # what a rank lacks, of the rank with the fewest rows
    assert found["refused"].sent_bytes == 3 * (33 - 8) * 12 * 4
    assert "test_dry_run.py" in found["value"].function
    assert report.is_complete
    assert not jigsaw.dry_run(nn.Conv2d(3, 3, 3), (1, 3, 33, 12), {"lat": 4}, ranks=[1]).remarks


class _Queries(nn.Module):
    """Learned queries of each row, alike at all rows: made for the whole tensor, or for those that a rank has."""

    def __init__(self, own: bool):
        super().__init__()
        self.own, self.table, self.product = own, nn.Parameter(torch.randn(2, 32)), nn.Linear(32, 32)

    def forward(self, x):
        queries = self.table.expand(x.shape[0], -1, -1)
        if self.own:
            queries = self.table + torch.zeros_like(x[:, :2])
        y = nn.functional.scaled_dot_product_attention(self.product(queries), x, x)
        return y + queries + queries.sin()


@pytest.mark.slow
def test_a_plain_tensor_that_every_rank_makes_whole_is_remarked():
    how = {"mesh": {"lat": 4}, "spec": ("lat", None, None)}
    (remark,) = jigsaw.dry_run(nn.Sequential(_Queries(own=False)), (8192, 5, 32), **how).remarks
    assert (remark.kind, remark.module, remark.function) == ("repeated", "0", "mm")
    assert remark.sent_bytes == 8192 * 3 // 4 * 2 * 32 * 4
    assert not jigsaw.dry_run(nn.Sequential(_Queries(own=True)), (8192, 5, 32), **how).remarks
    # what is small, and what no axis cuts
    assert not jigsaw.dry_run(_Queries(own=False), (512, 5, 32), **how).remarks
    assert not jigsaw.dry_run(_Queries(own=False), (8192, 5, 32), {"lat": 2}, spec=(None, "lat", None)).remarks


class CopiedPlaces(nn.Module):
    """A net with a copy of a tensor that the process already has, as caches of torch-harmonics give it."""

    def __init__(self):
        super().__init__()
        self.places = nn.Buffer(copy.deepcopy(PLACES))

    def forward(self, x):
        return x * self.places


PLACES = torch.linspace(0, 1, 4)


def test_a_function_may_copy_a_tensor_that_is_there():
    report = jigsaw.dry_run(CopiedPlaces, (24, 4), {"cell": 2}, spec=("cell", None), optimizer=None)
    assert report.is_complete and PLACES.sum() == 2


class OwnPlaces(nn.Module):
    """A net that cuts a tensor of its own, and a projection of it beside the input."""

    def __init__(self):
        super().__init__()
        self.places, self.project = nn.Buffer(torch.randn(24, 3)), nn.Linear(3, 4)

    def forward(self, x):
        places = jigsaw.shard(self.places, x.mesh, ("cell", None)) if isinstance(x, jigsaw.Tile) else self.places
        return x + self.project(places)


def test_a_net_may_cut_a_tensor_of_its_own():
    report = jigsaw.dry_run(OwnPlaces(), (24, 4), {"cell": 2}, spec=("cell", None))
    assert report.is_complete and not report.remarks
    assert {k: t.sent_bytes for k, t in report.ranks[0].phases["backward"].traffic.items()} == {"all_reduce": 72}


def test_what_needs_values_stops_with_its_module():
    report = jigsaw.dry_run(_Chosen(), (2, 3, 33, 12), {"lat": 2}, ranks=[0])
    assert [(r.kind, r.module) for r in report.remarks] == [("stopped", "inner.1")]
    assert not report.is_complete
    assert "values of tensors" in str(report)


class _Said(nn.Module):
    """A convolution, and whatever a function makes of what it gives."""

    def __init__(self, say):
        super().__init__()
        self.conv, self.say, self.table = nn.Conv2d(3, 3, 3, padding=1), say, torch.arange(12.0)

    def forward(self, x):
        return self.say(self.conv(x * self.table))


def _raising(y):
    raise ValueError("no")


class _Refined(nn.Module):
    """Refines in turns until a value is small."""

    def __init__(self):
        super().__init__()
        self.first, self.turn = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        x = self.first(x)
        while x.abs().max() > 2.0:
            x = self.turn(x)
        return x


def test_a_step_whose_loop_had_no_turn_is_not_complete():
    report = jigsaw.dry_run(_Refined(), (1, 3, 8, 8), {"lat": 2})
    assert not report.is_complete
    (skipped,) = [r for r in report.remarks if r.kind == "skipped"]
    assert (skipped.module, skipped.function) == ("turn", "Conv2d")
    assert "bound loops by numbers" in skipped.reason
    frozen = _Refined()
    frozen.turn.requires_grad_(False)
    assert jigsaw.dry_run(frozen, (1, 3, 8, 8), {"lat": 2}).is_complete


def _never_small(y):
    while not (y.abs() < 1).all():
        y = y / 2
    return y


@pytest.mark.parametrize(
    ("say", "loss", "stopped"),
    [
        (_raising, None, r"no, from .*test_dry_run.py:\d+"),
        (lambda y: y[:, 3], None, r"index 3 is out of range for dim 1 .* from .*test_dry_run.py:\d+"),
        (lambda y: y.missing, None, "missing"),
        (lambda y: None, None, "gives no tile to take a loss of; pass loss="),
        (lambda y: y, lambda y: (y, y), "the loss is a tuple; it must be a tensor of one number"),
        (lambda y: y, lambda y: y, r"the loss is a tensor of shape \(2, 3, 16, 12\)"),
        (lambda y: y, lambda y: y.mean().item(), "the loss is a float"),
        (lambda y: _raising(y) if not y.isfinite().all() else y, None, "no, from .* were assumed, which may be why"),
        pytest.param(_never_small, None, "a loop that ends by a value has no end here", marks=pytest.mark.slow),
    ],
)
def test_whatever_a_model_raises_ends_in_a_report(say, loss, stopped):
    report = jigsaw.dry_run(_Said(say), (2, 3, 16, 12), {"lat": 2}, loss=loss, ranks=[0])
    (remark,) = [r for r in report.remarks if r.kind == "stopped"]
    assert re.search(stopped, remark.reason)
    assert not report.is_complete
    assert str(report)


def test_numbers_that_python_wrote_down_have_values():
    sizes = []
    net = _Said(lambda y: sizes.append(int(torch.tensor(5)) + torch.tensor(0.5).item()) or y)
    report = jigsaw.dry_run(net, (2, 3, 16, 12), {"lat": 2}, ranks=[0])
    assert sizes == [5.5]
    assert report.is_complete and not report.remarks


def test_looks_by_functions_are_told():
    def look(y):
        return y if torch.allclose(y, y) or torch.equal(y, y) else nn.functional.one_hot(y.argmax(1)).sum() + y

    report = jigsaw.dry_run(_Said(look), (2, 3, 16, 12), {"lat": 2}, ranks=[0])
    (remark,) = report.remarks
    assert (remark.kind, "asks 3 times" in remark.reason) == ("value", True)
    alike = _Said(lambda y: torch.testing.assert_close(y, y) or y)
    assert not jigsaw.dry_run(alike, (2, 3, 16, 12), {"lat": 2}, ranks=[0]).remarks


class _Sum(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)

    def forward(self, x, y):
        return self.table(x) + self.table(y)


class TimedConv(nn.Module):
    """A convolution of a field, scaled by a time that is passed whole."""

    def __init__(self):
        super().__init__()
        self.conv, self.embed = nn.Conv2d(3, 4, 3, padding=1), nn.Linear(1, 4)

    def forward(self, x, time):
        return self.conv(x) * self.embed(time)[:, :, None, None]


def _sent_by_timed_conv():
    model, mesh = jigsaw.parallelize(TimedConv(), world_mesh(lat=2)), world_mesh(lat=2)
    tile = jigsaw.shard(torch.randn(1, 3, 9, 8), mesh, (None, None, "lat", None))
    with jigsaw.comm.count() as traffic:
        model(tile, torch.ones(1, 1)).square().mean().backward()
    return traffic.sent_bytes


def test_an_input_without_a_spec_is_passed_whole():
    spec = [(None, None, "lat", None), None]
    report = jigsaw.dry_run(TimedConv, [(1, 3, 9, 8), (1, 1)], {"lat": 2}, spec=spec, optimizer=None)
    assert report.is_complete
    assert report.sent_bytes == max(run_on_ranks(2, _sent_by_timed_conv))


def test_integers_are_of_inputs_alone_and_one_spec_is_for_all():
    how = {"spec": ("data", "lat"), "dtype": torch.int64}
    report = jigsaw.dry_run(_Sum(), [(4, 6), (4, 6)], {"data": 2, "lat": 2}, **how)
    assert report.is_complete and not report.remarks
    assert report.ranks[0].phases["forward"].peak["weights"] == 7 * 4 * 4
    with pytest.raises(
        ShardingError, match=r"the input is \(4, 6\), \(4,\); of several inputs pass a list with a spec"
    ):
        jigsaw.dry_run(_Sum(), [(4, 6), (4,)], {"data": 2}, **how)


class _Causal(nn.Module):
    def __init__(self, is_causal):
        super().__init__()
        self.linear, self.is_causal = nn.Linear(15, 45), is_causal

    def forward(self, x):
        q, k, v = self.linear(x).unflatten(-1, (3, 3, 5)).permute(2, 0, 3, 1, 4).unbind(0)
        with jigsaw.nn.attention_way("ring"):
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)


@pytest.mark.slow
def test_a_causal_ring_has_half_of_the_work():
    how = {"x_shape": (1, 4096, 15), "mesh": {"lat": 4}, "spec": (None, "lat", None), "ranks": [0, 2]}
    causal, every = (jigsaw.dry_run(_Causal(is_causal), **how) for is_causal in (True, False))
    assert causal.flop == pytest.approx(every.flop / 2, rel=0.15)
    assert len({rank.flop for rank in causal.ranks}) == 1  # halves of queries change ranks


class _WholeCausal(_Causal):
    def forward(self, x):
        q, k, v = self.linear(x).unflatten(-1, (3, 3, 5)).permute(2, 0, 3, 1, 4).unbind(0)
        return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)


def test_causal_attention_costs_half():
    device = replace(DEVICES["h100"], attention_share=1e-6)  # so that attention is nearly all of the time
    how = {"x_shape": (2, 512, 15), "mesh": {"data": 2}, "spec": ("data", None, None), "ranks": [0], "device": device}
    causal, every = (jigsaw.dry_run(_WholeCausal(is_causal), **how).ranks[0].phases for is_causal in (True, False))
    for phase, products in (("forward", 2), ("backward", 5)):
        less = products * 2 * 3 * 512 * 5 * (512 - 513 / 2)  # query i meets i + 1 keys
        assert every[phase].flop - causal[phase].flop == less
        assert causal[phase].seconds == pytest.approx(every[phase].seconds / 2, rel=0.01)


class _Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.register_buffer("mask", torch.ones(20, 20, dtype=torch.bool).triu(1))

    def forward(self, x):
        return self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]


def test_attention_whose_heads_channel_cuts():
    axes = {"data": 2, "lat": 2, "channel": 2}
    report = jigsaw.dry_run(_Heads(), (2, 20, 16), axes, spec=("data", ("lat", "channel"), None))
    assert report.is_complete and not report.remarks
    # no rows of weights: each rank has those of its own heads in all three parts
    assert {tuple(sorted(rank.phases["forward"].traffic)) for rank in report.ranks} == {("all_reduce", "exchange")}


def test_the_process_is_left_as_it_was():
    hook, was_initialized = sys.excepthook, torch.distributed.is_initialized()
    net = nn.Conv2d(3, 3, 3, padding=1)
    weight = net.weight.detach().clone()
    jigsaw.dry_run(net, (1, 3, 16, 16), {"lat": 2}, dtype=torch.float64)
    assert torch.distributed.is_initialized() == was_initialized
    assert sys.excepthook is hook
    assert torch.equal(net.weight, weight)
    assert net.weight.grad is None
    jigsaw.parallelize(net, jigsaw.init_mesh(lat=1))  # not parallelized before
    with pytest.raises(ShardingError, match=r"before jigsaw\.parallelize"):
        jigsaw.dry_run(net, (1, 3, 16, 16), {"lat": 2})


@pytest.mark.parametrize(
    "thresholds", [pytest.param((1, 1, 1), marks=pytest.mark.slow), (0, 0, 0)], ids=["always", "never"]
)
def test_memory_is_the_same_whenever_garbage_is_collected(thresholds):
    """The whole weights of a model that was cut lie in circles of references, with the hooks that cut them."""
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GELU()) for _ in range(3)]
    net, shape, mesh = nn.Sequential(*blocks), (1, 8, 12, 12), {"data": 1, "lat": 2}
    usual, before = jigsaw.dry_run(net, shape, mesh, shard_weights=True), gc.get_threshold()
    try:
        gc.set_threshold(*thresholds)
        report = jigsaw.dry_run(net, shape, mesh, shard_weights=True)
    finally:
        gc.set_threshold(*before)
    assert report == usual


class _Transformed(nn.Module):
    def forward(self, x):
        return torch.fft.irfft2(torch.fft.rfft2(x), s=x.shape[-2:])


def test_the_first_dry_run_of_a_transform_is_as_the_next():
    """Its shapes are asked once, and no other test has this size."""
    first, second = (jigsaw.dry_run(_Transformed(), (1, 1, 37, 41), {"lat": 4}) for _ in range(2))
    assert first == second


@on_ranks(2)
def _dry_run_on_ranks():
    mesh = world_mesh(lat=2)
    report = jigsaw.dry_run(nn.Conv2d(3, 3, 3, padding=1), (1, 3, 16, 16), {"lat": 2, "lon": 2})
    tile = jigsaw.shard(torch.ones(8), mesh, ("lat",))
    return report.sent_bytes, tile.sum().item()


def test_a_dry_run_beside_a_real_group():
    assert _dry_run_on_ranks()[0][1] == 8.0


def test_weights_that_channel_cuts_are_parted_as_well():
    net = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.GELU(), nn.Conv2d(16, 8, 1))
    size = sum(p.numel() for p in net.parameters()) * 4
    how = {"mesh": {"lat": 2, "channel": 2}, "ranks": [0]}
    halves, parts = (jigsaw.dry_run(net, (1, 8, 16, 16), **how, shard_weights=cut) for cut in (False, True))
    bias = 8 * 4  # of the row layer, on every rank of the channel
    assert halves.ranks[0].phases["forward"].peak["weights"] == (size + bias) // 2
    assert parts.ranks[0].phases["forward"].traffic["gathered weights"].messages > 0
    assert parts.ranks[0].phases["step"].peak["optimizer"] < halves.ranks[0].phases["step"].peak["optimizer"]


def test_models_that_are_too_big_are_made_without_memory():
    report = jigsaw.dry_run(lambda: nn.Linear(2**17, 2**17, bias=False), (2, 2**17), {"data": 2}, ranks=[0])
    assert report.parameters == 2**34
    assert not report.fits
    assert "DOES NOT FIT" in str(report)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"device": "abacus"}, "device='abacus' is none of a100"),
        ({"ranks": [4]}, r"ranks=\[4\] must be some of the mesh's, 0 to 3"),
        (
            {"spec": [(None, None, None, "lat"), (None,)]},
            r"1 inputs but 2 specs; .* spec=\[\(None, None, 'lat', None\)",
        ),
        ({"spec": ("lat",)}, r"spec=\('lat',\) is for 1 dims, but the input is \(1, 3, 16, 16\)"),
        ({"x_shape": "1,3"}, r"x_shape='1,3' must be the global shape"),
        ({"x_shape": ()}, r"x_shape=\(\) must be the global shape"),
        ({"mesh": 4}, "mesh=4 must name axes and their sizes"),
        ({"mesh": {"lat": 0}}, "mesh={'lat': 0} must name axes"),
        ({"ranks": 0}, "ranks=0 must be some of the mesh's, 0 to 3"),
        ({"ranks_per_node": 0}, "ranks_per_node=0 must be a whole number, 1 or more"),
        ({"checkpoint": ["1"]}, r"checkpoint=\['1'\] is to be 'none', 'blocks' or names of modules"),
        ({"dtype": "bfloat16"}, "dtype='bfloat16' must be a torch.dtype"),
        ({"loss": "mse"}, "loss='mse' must be a function"),
        ({"optimizer": "adam"}, "optimizer='adam' must be what makes one"),
        ({"dataset": 3}, "dataset=3 must be what jigsaw.io.open gives"),
        ({"model": None}, "model=None must be a torch.nn.Module"),
        ({"model": nn.Conv2d}, "model=Conv2d .* needs in_channels, out_channels, kernel_size; .* lambda: Conv2d"),
        ({"model": lambda: 3}, "a function that gives 3, no torch.nn.Module"),
        ({"model": nn.LazyConv2d(3, 3)}, "weight is lazy"),
        ({"loss": lambda y: mean_square_of_tiles([])}, None),
    ],
)
def test_refusals(how, match):
    how = {"model": nn.Conv2d(3, 3, 3, padding=1), "x_shape": (1, 3, 16, 16), "mesh": {"lat": 4}} | how
    if match is None:
        (remark,) = jigsaw.dry_run(**how).remarks
        assert "pass loss=" in remark.reason
    else:
        with pytest.raises(ShardingError, match=match):
            jigsaw.dry_run(**how)


def test_a_function_may_initialize_and_convert_the_model_that_it_makes():
    def make():
        net = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 3, 1))
        nn.init.trunc_normal_(net[0].weight)  # draws again those that are too large: it reads values
        return net.to(torch.bfloat16)

    report = jigsaw.dry_run(make, (1, 3, 16, 32), {"lat": 2})
    assert report.is_complete
    assert {remark.kind for remark in report.remarks} == {"value"}
    assert replace(report, remarks=()) == jigsaw.dry_run(make(), (1, 3, 16, 32), {"lat": 2})
    # a function of a package: no line of the user's asks for the values
    make.__code__ = make.__code__.replace(co_filename=torch.__file__)
    assert jigsaw.dry_run(make, (1, 3, 16, 32), {"lat": 2}).is_complete
    with pytest.raises(RuntimeError, match="the maker's own"):
        jigsaw.dry_run(lambda: _raise("the maker's own"), (1, 3, 16, 32), {"lat": 2})


def _raise(words):
    raise RuntimeError(words)


class _ReadsItsNumbers(nn.Module):
    """Reads numbers that it wrote down: rates of layers, while it is made, and sizes, in its forward pass."""

    def __init__(self):
        super().__init__()
        self.rates = [rate.item() for rate in torch.linspace(0, 0.2, 3)]
        table = torch.zeros(3)
        table[1] = 0.5
        table.add_(1.0)
        self.table = table.tolist()
        self.layer = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        sizes = torch.tensor([[7, 10], [3, 5]])
        rows, columns = sizes[0].tolist()
        starts = sizes.prod(1).cumsum(0)
        NUMBERS.append((*self.rates, *self.table, rows, columns, int(starts[-1])))
        return self.layer(x)[:, :, :rows, :columns]


class _DrawsANumber(_ReadsItsNumbers):
    def forward(self, x):
        return self.layer(x) * torch.rand(3).sum().item()


NUMBERS = []


@pytest.mark.parametrize("make", [_ReadsItsNumbers, lambda: _ReadsItsNumbers().to(torch.float32)], ids=["cpu", "cast"])
def test_numbers_that_a_model_wrote_down_are_known(make):
    NUMBERS.clear()
    report = jigsaw.dry_run(make, (2, 3, 7, 10), {"lat": 2})
    assert report.is_complete
    assert not report.remarks
    assert set(NUMBERS) == {
        (0.0, torch.linspace(0, 0.2, 3)[1].item(), torch.tensor(0.2).item(), 1.0, 1.5, 1.0, 7, 10, 85)
    }


def test_numbers_that_a_model_draws_are_not_known():
    report = jigsaw.dry_run(_DrawsANumber, (2, 3, 7, 10), {"lat": 2})
    assert [remark.kind for remark in report.remarks] == ["value"]


def test_a_metered_real_step_is_done_once():
    x = torch.zeros(3)
    with StepMeter().counting():
        x += 1.0
        torch.nn.init.ones_(x[1:]).add_(1.0)
    assert x.tolist() == [1.0, 2.0, 2.0]


class _ChangesANumber(nn.Module):
    """Changes a number that it wrote down by one that it draws, and keeps another."""

    def forward(self, x):
        kept, scale = torch.tensor(3.0), torch.tensor(2.0)
        torch._foreach_add_([scale.view(1)], [torch.rand(1)])  # which returns nothing
        return x * scale.item() + kept.item()


def test_a_number_that_is_changed_is_known_no_longer():
    report = jigsaw.dry_run(_ChangesANumber, (4, 1, 8), {"lat": 2}, spec=(None, None, "lat"))
    (remark,) = report.remarks
    assert (remark.kind, "asks 1 times" in remark.reason) == ("value", True)


class ChangesElements(nn.Module):
    """Changes single elements of what it computed, and reads them after other changes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x):
        y = x * self.scale
        first, last = y[0, 3], y.select(0, 1).select(0, 5)
        first.add_(5)
        y[1, 0] += 2
        y.mul_(2)
        return y * (first + last)


@on_ranks(2)
def _bytes_of_changed_elements():
    mesh = world_mesh(lat=2)
    net = jigsaw.parallelize(ChangesElements(), mesh)
    tile = jigsaw.shard(torch.ones(2, 6), mesh, (None, "lat"))
    net(tile).square().mean().backward()  # what ranks compare once has been compared
    with jigsaw.comm.count() as counted:
        net(tile).square().mean().backward()
    return counted.sent_bytes


def test_a_step_that_changes_elements_in_place_has_a_dry_run():
    report = jigsaw.dry_run(ChangesElements(), (2, 6), {"lat": 2}, spec=(None, "lat"), optimizer=None)
    assert report.is_complete, report.remarks
    assert [rank.sent_bytes for rank in report.ranks] == _bytes_of_changed_elements()
