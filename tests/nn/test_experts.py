"""Mixtures of experts: routes, losses, dropped tokens and gradients of plain torch, whichever rank has which expert."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.nn.experts.experts import kept_by_capacity
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, run_on_ranks, world_mesh


class PlainExperts(nn.Module):
    """The oracle: every token through every expert by itself, in one process."""

    def __init__(self, dim, hidden, experts, top_k, capacity_factor=None, normalize=True, shared=0):
        super().__init__()
        torch.manual_seed(experts + top_k)
        self.top_k, self.capacity_factor, self.normalize, self.shared = top_k, capacity_factor, normalize, shared
        self.w1 = nn.Parameter(torch.randn(experts, hidden, dim) / 3)
        self.w2 = nn.Parameter(torch.randn(experts, dim, hidden) / 3)
        self.w3 = nn.Parameter(torch.randn(experts, hidden, dim) / 3)
        self.router = nn.Parameter(torch.randn(experts, dim))
        if shared:
            self.shared_w1 = nn.Parameter(torch.randn(shared * hidden, dim) / 3)
            self.shared_w2 = nn.Parameter(torch.randn(dim, shared * hidden) / 3)
            self.shared_w3 = nn.Parameter(torch.randn(shared * hidden, dim) / 3)

    def chosen(self, x):
        """The experts [tokens, top_k] of each token, and whether each had room left, one token after the other."""
        experts = len(self.router)
        chosen = F.linear(x, self.router).softmax(-1).topk(self.top_k).indices.reshape(-1, self.top_k)
        factor = self.capacity_factor or experts
        room = [math.ceil(factor * chosen.numel() / experts)] * experts
        kept = torch.zeros_like(chosen, dtype=torch.bool)
        for choice in range(self.top_k):
            for token, expert in enumerate(chosen[:, choice].tolist()):
                kept[token, choice] = room[expert] > 0
                room[expert] -= 1
        return chosen, kept

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        logits = F.linear(rows, self.router)
        p = logits.softmax(-1)
        chosen, kept = self.chosen(x)
        weights = p.gather(1, chosen)
        weights = weights / weights.sum(1, keepdim=True) if self.normalize else weights
        every = torch.einsum("td,ehd->teh", rows, self.w1), torch.einsum("td,ehd->teh", rows, self.w3)
        made = torch.einsum("teh,edh->ted", F.silu(every[0]) * every[1], self.w2)
        of_token = torch.zeros_like(p).scatter(1, chosen, weights * kept)
        y = (of_token[..., None] * made).sum(1)
        if self.shared:
            y = y + (F.silu(rows @ self.shared_w1.T) * (rows @ self.shared_w3.T)) @ self.shared_w2.T
        share = F.one_hot(chosen, len(self.router)).to(p.dtype).sum((0, 1)) / chosen.numel()
        balance = len(self.router) * (share * p.mean(0)).sum()
        return y.reshape(x.shape), balance, logits.logsumexp(1).square().mean()


class WithLosses(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        y = self.layer(x)
        return y if isinstance(y, tuple) else (y, self.layer.balance_loss, self.layer.z_loss)


def cut_experts(plain, mesh, axis, **more):
    """`jigsaw.nn.MoE` with the weights of the oracle."""
    experts, hidden, dim = plain.w1.shape
    how = {"capacity_factor": plain.capacity_factor, "normalize": plain.normalize, "shared_experts": plain.shared}
    made = jigsaw.nn.MoE(dim, hidden, experts, plain.top_k, mesh=mesh, axis=axis, **how, **more).to(plain.w1.dtype)
    with torch.no_grad():
        for p, value in zip(made.parameters(), plain.parameters(), strict=True):
            if isinstance(p, DTensor):
                value = distribute_tensor(value.contiguous(), p.device_mesh, p.placements)
            p.copy_(value)
    return made


class Build:
    """What runs on the ranks; a class, for it must pickle."""

    def __init__(self, axis, how=None):
        self.axis, self.how = axis, how

    def __call__(self, model, mesh):
        model = WithLosses(cut_experts(model.layer, mesh, self.axis))
        return model if self.how is None else jigsaw.parallelize(model, mesh, **self.how)


SMALL = {"dim": 6, "hidden": 5, "experts": 5, "top_k": 2}
LAYERS = {
    "dropless": PlainExperts(**SMALL, shared=2),
    "capacity": PlainExperts(**SMALL, capacity_factor=0.7),
    "switch": PlainExperts(**SMALL | {"top_k": 1}, capacity_factor=1.0, normalize=False),
}
# the mesh, how the tokens [3, 7, 5] are cut, and the axes of the experts
CUTS = [
    ({"lat": 1}, (None, "lat", None, None), "lat"),
    ({"lat": 2}, (None, "lat", None, None), "lat"),
    ({"lat": 3}, (None, None, "lat", None), "lat"),
    ({"lat": 4}, (None, "lat", None, None), "lat"),
    ({"lat": 2, "lon": 2}, (None, "lat", "lon", None), ("lat", "lon")),
    ({"data": 2, "lat": 2}, ("data", "lat", None, None), "lat"),
    ({"data": 2, "lat": 2}, ("data", None, "lat", None), "data"),
    ({"lat": 2, "expert": 2}, (None, "lat", None, None), "expert"),
    ({"lat": 2, "expert": 2}, ("expert", "lat", None, None), "expert"),
    ({"lat": 2, "channel": 2}, (None, "lat", None, "channel"), "lat"),
    ({"lat": 2}, (None, "lat", None, None), "expert"),
]


CASES = [(name, *cut) for name in LAYERS for cut in CUTS]


def _is_slow(name, mesh, spec, axis):
    return name == "switch" or (name == "capacity" and len(mesh) < 2)


@pytest.mark.parametrize(
    ("name", "mesh", "spec", "axis"),
    [pytest.param(*case, marks=[pytest.mark.slow] * _is_slow(*case), id=str(case)) for case in CASES],
)
def test_equal_to_one_process(name, mesh, spec, axis):
    x = torch.randn(3, 7, 5, 6, generator=torch.Generator().manual_seed(0))
    assert_same_on_every_mesh(WithLosses(LAYERS[name]), x, [mesh], spec=spec, build=Build(axis), gradients="parts")


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"lat": 2}, {"data": 2, "lat": 2}], ids=str)
@pytest.mark.parametrize("how", [{}, {"shard_weights": True, "unit_bytes": 1}], ids=["whole", "cut"])
def test_through_parallelize(axes, how):
    spec = ("data" if "data" in axes else None, None, "lat", None)
    x = torch.randn(3, 7, 5, 6, generator=torch.Generator().manual_seed(0))
    for layer in (LAYERS["dropless"], LAYERS["capacity"], PlainExperts(6, 5, 3, 2), PlainExperts(6, 6, 3, 2)):
        assert_same_on_every_mesh(WithLosses(layer), x, [axes], spec=spec, build=Build("lat", how))


def total_loss(model, x):
    y = model(x)
    layer = model[1]
    return y.square().mean() + 0.1 * layer.balance_loss + 0.01 * layer.z_loss


class PlainStack(nn.Sequential):
    def forward(self, x):
        y, *self[1].losses = self[1](self[0](x))
        self[1].balance_loss, self[1].z_loss = self[1].losses
        return self[2](y)


def stack(mesh=None, axis="lat", **how):
    torch.manual_seed(3)
    plain = PlainStack(nn.Linear(4, 6), PlainExperts(**SMALL, capacity_factor=0.8, shared=1), nn.Linear(6, 2)).double()
    if mesh is None:
        return plain
    return jigsaw.parallelize(nn.Sequential(plain[0], cut_experts(plain[1], mesh, axis), plain[2]), mesh, **how)


def train(model, x, steps):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = total_loss(model, x)
        loss.backward()
        jigsaw.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, optimizer


def _batch():
    return torch.randn(4, 7, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def _train_cut_and_save(path, axes, how):
    mesh = world_mesh(**axes)
    model = stack(mesh, **how)
    losses, optimizer = train(model, jigsaw.shard(_batch(), mesh, ("data", "lat", None)), 3)
    jigsaw.save(path, model=model, optimizer=optimizer)
    return losses


def _load_and_train(path, axes):
    mesh = world_mesh(**axes)
    model = stack(mesh)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    jigsaw.load(path, model=model, optimizer=optimizer)
    x = jigsaw.shard(_batch(), mesh, ("data", "lat", None))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = total_loss(model, x)
        loss.backward()
        jigsaw.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("axes", "how", "later"),
    [
        ({"lat": 2}, {}, {"lat": 1}),
        pytest.param({"lat": 1}, {}, {"lat": 3}, marks=pytest.mark.slow),
        ({"data": 2, "lat": 2}, {"shard_weights": True, "unit_bytes": 1}, {"lat": 2}),
    ],
    ids=str,
)
def test_training_goes_on_on_another_mesh(tmp_path, axes, how, later):
    expected, _ = train(stack(), _batch(), 6)
    ranks = math.prod(axes.values())
    for losses in run_on_ranks(ranks, _train_cut_and_save, tmp_path / "run", axes, how):
        assert losses == pytest.approx(expected[:3], rel=1e-9)
    for losses in run_on_ranks(math.prod(later.values()), _load_and_train, tmp_path / "run", later):
        assert losses == pytest.approx(expected[3:], rel=1e-9)


# -- what is sent -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("axis", [("lat", "lon"), "lon"])
@on_ranks(4)
def test_sent_bytes(axis):
    plain, mesh = copy.deepcopy(LAYERS["capacity"]).double(), world_mesh(lat=2, lon=2)
    layer = cut_experts(plain, mesh, axis)
    whole = torch.randn(3, 7, 5, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    x = jigsaw.shard(whole, mesh, (None, "lat", "lon", None))
    x.local.requires_grad_()
    with comm.count() as forward:
        y = layer(x)
    with comm.count() as backward:
        y.square().mean().backward()
    # the rank along the axes that has each token, and each choice's expert; what travels stays on this rank's line
    token = torch.arange(3 * 7 * 5)
    lat, lon = (token // 5 % 7 >= 4).long(), (token % 5 >= 3).long()
    home, line, here = (lon, lat == x.coordinate[0], x.coordinate[1])
    if axis == ("lat", "lon"):
        home, line, here = 2 * lat + lon, torch.ones_like(lat).bool(), 2 * x.coordinate[0] + x.coordinate[1]
    chosen, kept = plain.chosen(whole)
    # torch.chunk's rule, one axis after the other: 3 and 2, then 2, 1 and 1, 1
    goes = torch.tensor([0, 0, 0, 1, 1] if axis == "lon" else [0, 0, 1, 2, 3])[chosen]
    travels = kept & line[:, None] & (goes != home[:, None])
    given = int((travels & (home == here)[:, None]).sum()) * 6 * 8
    taken = int((travels & (goes == here)).sum()) * 6 * 8
    assert min(given, taken)
    for traffic in (forward, backward):
        calls = [call for call in traffic.calls if call.kind == "experts"]
        assert [call.sent_bytes for call in calls] == [given, taken]
        assert [call.received_bytes for call in calls] == [taken, given]
    pieces = comm.rank_count(mesh, axis)
    others = [call.sent_bytes for call in forward.calls if call.kind != "experts"]
    # for the losses, behind each of which a number of its layout travels, the capacity, and the rows of each expert
    of_losses = [2 * 3 * 8 * n // 4 for n in (5 + 1, 5, 1 + 1)]
    assert others == [*of_losses, 2 * 3 * 5 * 256 * 8 // 4, (pieces - 1) * 5 * 8]


@on_ranks(3)
def test_kept_rows_are_the_first_of_each_expert():
    mesh = world_mesh(lat=3)
    for places, experts, capacity in ((1, 1, 1), (90, 4, 9), (700, 3, 256), (70_000, 5, 3000), (70_000, 5, 90_000)):
        torch.manual_seed(places)
        place, chosen = torch.randperm(places), torch.randint(experts, (places,)) ** 2 % experts
        expected = torch.zeros(places, dtype=torch.bool)
        for e in range(experts):
            mine = (chosen == e).nonzero()[:, 0]
            expected[mine[place[mine].argsort()[:capacity]]] = True
        at = mesh.get_local_rank()
        with comm.count() as traffic:
            got = kept_by_capacity(chosen[at::3], place[at::3], places, capacity, experts, mesh, ["lat"])
        assert torch.equal(got, expected[at::3])
        digits = -(-max((places - 1).bit_length(), 1) // 8)
        assert traffic.sent_bytes == digits * (2 * 2 * experts * 256 * 8 // 3)


# -- what else tokens and experts may be ------------------------------------------------------------------------------


@on_ranks(4)
def test_ranks_without_experts_or_tokens():
    plain, mesh = copy.deepcopy(LAYERS["capacity"]).double(), world_mesh(lat=4)
    layer = cut_experts(plain, mesh, "lat")
    assert [layer.w1.to_local().shape[0], layer.w1.shape[0]] == [(2, 2, 1, 0)[mesh.get_local_rank()], 5]
    for rows in (2, 0):  # of inputs that need no gradient, as those of a first layer
        whole = torch.randn(1, rows, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
        y = layer(jigsaw.shard(whole, mesh, (None, "lat", None), halo={1: 1} if rows else None))
        torch.testing.assert_close(y.full_tensor(), plain(whole)[0])
        (y.square().sum() + (layer.balance_loss if rows else 0)).backward()
    copied = copy.deepcopy(layer)
    torch.testing.assert_close(copied(whole.new_ones(3, 6)), plain(whole.new_ones(3, 6))[0])  # a plain one, alike


@on_ranks(2)
def test_recomputed_and_in_narrow_types():
    plain, mesh = copy.deepcopy(LAYERS["capacity"]), world_mesh(lat=2)
    whole = torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(2))
    x, expected = jigsaw.shard(whole, mesh, (None, "lat", None)), plain(whole)
    layer = cut_experts(plain, mesh, "lat")
    gradients = []
    for run in (layer, lambda x: torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)):
        layer.zero_grad()
        y = run(x)
        (y.square().mean() + layer.balance_loss + layer.z_loss).backward()
        gradients.append([p.grad.to_local() if isinstance(p, DTensor) else p.grad for p in layer.parameters()])
    torch.testing.assert_close(*gradients)
    with torch.autocast("cpu", torch.bfloat16), comm.count() as narrow:
        y = layer(x)
    with comm.count() as wide:
        layer(x)
    bytes_of_rows = [[c.sent_bytes for c in count.calls if c.kind == "experts"] for count in (narrow, wide)]
    assert [2 * n for n in bytes_of_rows[0]] == bytes_of_rows[1]
    # chosen in float32, as without: only the experts are rounded
    torch.testing.assert_close(y.float().full_tensor(), expected[0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(layer.balance_loss, expected[1])
    y = layer.bfloat16()(x.bfloat16())
    assert y.dtype == torch.bfloat16
    assert layer.z_loss.dtype == torch.float32


def test_refused_sizes():
    mesh = jigsaw.init_mesh(lat=1)
    for sizes, more, told in [
        ((6, 5, 4, 5), {}, "top_k=5: a token goes to 1 to 4"),
        ((6, 0, 4, 2), {}, "hidden=0: sizes are at least 1"),
        ((6, 5, 4, 2), {"shared_experts": -1}, "shared_experts=-1"),
        ((6, 5, 4, 1.5), {}, "top_k=1.5: give a whole number"),
        ((6, 5, 4.0, 2), {}, "experts=4.0: give a whole number"),
        ((6, 5, 4, 2), {"capacity_factor": 0.0}, "capacity_factor=0.0: it is above 0"),
    ]:
        with pytest.raises(ShardingError, match=told):
            jigsaw.nn.MoE(*sizes, mesh=mesh, **more)
    layer = jigsaw.nn.MoE(6, 5, 4, 2, mesh=mesh)
    for shape in ((3, 5), (6,)):
        with pytest.raises(ShardingError, match="MoE takes tokens of 6 features"):
            layer(torch.ones(shape))
    with pytest.raises(ShardingError, match=r"tokens of floats, but the Tile has torch.int64; convert them"):
        layer(torch.ones((3, 6), dtype=torch.int64))
    with pytest.raises(ShardingError, match="MoE, whose messages depend on values, cannot be in a graph"):
        jigsaw.compile(nn.Sequential(layer))(jigsaw.shard(torch.ones(3, 6), mesh, ("lat", None)))
