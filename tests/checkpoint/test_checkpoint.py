"""Checkpoints: what one mesh saved, another goes on from as if nothing had happened."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import jigsaw
from jigsaw.checkpoint.checkpoints import load, save
from jigsaw.errors import CheckpointError
from jigsaw.parallel.parallelize import parallelize
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

MODES = {"whole": {}, "cut": {"shard_weights": True, "unit_bytes": 1}}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.blocks = nn.Sequential(nn.Conv2d(8, 8, 1), nn.GELU(), nn.Conv2d(8, 8, 1))
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.spare = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return self.blocks(self.norm(self.first(x))) * self.scale


class Counter:
    """A loader's state, in small."""

    def __init__(self, seen=0):
        self.seen = seen

    def state_dict(self):
        return {"seed": 7, "epoch": 0, "next": self.seen}

    def load_state_dict(self, state):
        self.seen = state["next"]


def _parts():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(1)
    model = Net()
    x, y = torch.randn(4, 3, 7, 10), torch.randn(4, 8, 7, 10)
    return model, x, y


def _optimizer(model):
    body = [p for name, p in model.named_parameters() if name != "scale"]
    groups = [{"params": body}, {"params": [model.scale], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)


def _steps(model, optimizer, schedule, x, y, count):
    losses = []
    for _ in range(count):
        optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def _schedule(optimizer):
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def _spec(axes):
    return ("data" if "data" in axes else None, None, "lat", "lon")


def _setting(axes, mode):
    model, x, y = _parts()
    mesh = world_mesh(**axes)
    model = parallelize(model, mesh, **MODES[mode])
    optimizer = _optimizer(model)
    return (
        model,
        optimizer,
        _schedule(optimizer),
        jigsaw.shard(x, mesh, _spec(axes)),
        jigsaw.shard(y, mesh, _spec(axes)),
    )


def _train_and_save(path, axes, mode):
    model, optimizer, schedule, x, y = _setting(axes, mode)
    losses = _steps(model, optimizer, schedule, x, y, 3)
    save(path, model=model, optimizer=optimizer, loader=Counter(12), schedule=schedule)
    return losses


def _load_and_train(path, axes, mode):
    model, optimizer, schedule, x, y = _setting(axes, mode)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    loader = Counter()
    load(path, model=model, optimizer=optimizer, loader=loader, schedule=schedule)
    assert loader.seen == 12
    assert math.isclose(optimizer.param_groups[0]["lr"], 1e-2 * 0.9**3)
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    assert model.spare not in optimizer.state
    return _steps(model, optimizer, schedule, x, y, 3)


def _ranks(axes):
    return math.prod(axes.values())


def _train_with_zero_1(path, axes, is_loaded):
    """Three steps with torch's `ZeroRedundancyOptimizer`, saved, or three that go on from there."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, x, y = _parts()
    mesh = world_mesh(**axes)
    model = parallelize(model, mesh)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, eps=1e-4)
    if is_loaded:
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1)
        load(path, model=model, optimizer=optimizer)
    losses = _steps(model, optimizer, _schedule(optimizer), *(jigsaw.shard(z, mesh, _spec(axes)) for z in (x, y)), 3)
    if not is_loaded:
        save(path, model=model, optimizer=optimizer)
    return losses


@pytest.mark.slow
def test_state_that_zero_1_cuts_is_saved_whole(tmp_path):
    model, x, y = _parts()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    expected = _steps(model, optimizer, _schedule(optimizer), x, y, 3)
    for losses in run_on_ranks(3, _train_with_zero_1, tmp_path / "saved", {"lat": 3}, False):
        assert losses == pytest.approx(expected, rel=1e-9)
    expected = _steps(model, optimizer, _schedule(optimizer), x, y, 3)
    for losses in run_on_ranks(2, _train_with_zero_1, tmp_path / "saved", {"lat": 2}, True):
        assert losses == pytest.approx(expected, rel=1e-9)


WAYS = [
    pytest.param(({"lat": 2, "lon": 2}, "cut"), ({"data": 2}, "whole"), marks=pytest.mark.slow),
    pytest.param(({"data": 2}, "whole"), ({"lat": 3}, "cut"), marks=pytest.mark.slow),
    pytest.param(({"lat": 3}, "cut"), ({"lat": 1}, "whole"), marks=pytest.mark.slow),
    (({"lat": 2, "channel": 2}, "cut"), ({"lon": 2}, "cut")),
    (({"lat": 1}, "whole"), ({"channel": 2, "lon": 2}, "cut")),
    pytest.param(({"channel": 2}, "whole"), ({"data": 2, "channel": 2}, "whole"), marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_training_goes_on_on_another_mesh(tmp_path, before, after):
    model, x, y = _parts()
    optimizer = _optimizer(model)
    expected = torch.tensor(_steps(model, optimizer, _schedule(optimizer), x, y, 6))
    torch.set_default_dtype(torch.float32)
    path = tmp_path / "run" / "last"
    path.parent.mkdir()
    for losses in run_on_ranks(_ranks(before[0]), _train_and_save, path, *before):
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), expected[:3], rtol=1e-9, atol=0)
    for losses in run_on_ranks(_ranks(after[0]), _load_and_train, path, *after):
        torch.testing.assert_close(torch.tensor(losses, dtype=torch.float64), expected[3:], rtol=1e-9, atol=0)


def _save_twice(path):
    model, optimizer, *_ = _setting({"lat": 2}, "cut")
    save(path, model=model)
    with torch.no_grad():
        model.first.bias.fill_(3)
    save(path, model=model, optimizer=optimizer)
    fresh, *_ = _setting({"lat": 2}, "cut")
    load(path, model=fresh)
    bias = fresh.first.bias
    return (bias.full_tensor() if isinstance(bias, DTensor) else bias).tolist()


def test_a_checkpoint_is_replaced_once_the_new_one_is_written(tmp_path):
    assert run_on_ranks(2, _save_twice, tmp_path / "last") == [[3.0] * 8] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["last"]


def test_without_ranks(tmp_path):
    model = nn.Linear(2, 3)
    save(tmp_path / "one", model=model)
    other = nn.Linear(2, 3)
    load(tmp_path / "one", model=other)
    assert torch.equal(other.weight, model.weight)
    assert not dist.is_initialized() or dist.get_world_size() == 1


def _saved(path, model=None, **more):
    save(path, model=model or nn.Linear(2, 3), **more)
    return path


def test_misuse_is_told(tmp_path):
    path = tmp_path / "it"
    with pytest.raises(CheckpointError, match="it does not exist"):
        load(path, model=nn.Linear(2, 3))
    path.mkdir()
    with pytest.raises(CheckpointError, match=r"it is not whole: it has no jigsaw\.json"):
        load(path, model=nn.Linear(2, 3))
    _saved(path)
    wider = nn.Sequential(nn.Linear(2, 3))
    with pytest.raises(CheckpointError, match=r"another model: left over: 'model\.weight'.*missing: 'model\.0\."):
        load(path, model=wider)
    with pytest.raises(CheckpointError, match=r"'model\.weight' has shape \(3, 2\), the model's \(4, 2\)"):
        load(path, model=nn.Linear(2, 4))
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(CheckpointError, match="has no optimizer groups"):
        load(path, model=model, optimizer=optimizer)
    with pytest.raises(CheckpointError, match="has no state of loader"):
        load(path, loader=Counter())
    with pytest.raises(CheckpointError, match=r"2 parameters that are not the model's .*pass model= as well"):
        save(path, optimizer=optimizer)


def test_an_optimizer_of_other_groups_is_refused_and_nothing_is_read(tmp_path):
    model = nn.Linear(2, 3)
    model(torch.ones(2)).sum().backward()
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    path = _saved(tmp_path / "it", model, optimizer=optimizer)
    other = nn.Linear(2, 3)
    before = copy.deepcopy(other.state_dict())
    split = torch.optim.Adam([{"params": [other.weight]}, {"params": [other.bias]}])
    with pytest.raises(CheckpointError, match=r"groups of \[2\] parameters, this one has \[1, 1\]"):
        load(path, model=other, optimizer=split)
    unlike = torch.optim.SGD(other.parameters(), momentum=0.9)
    with pytest.raises(CheckpointError, match=r"another optimizer than SGD: it has .*'betas'.* not .*'momentum'"):
        load(path, model=other, optimizer=unlike)
    assert unlike.param_groups[0]["lr"] == torch.optim.SGD(other.parameters()).param_groups[0]["lr"]
    assert all(torch.equal(x, before[name]) for name, x in other.state_dict().items())
    for maker in (torch.optim.Adamax, torch.optim.RAdam):  # their options are all options of Adam
        with pytest.raises(CheckpointError, match=rf"of the optimizer Adam, and this one is {maker.__name__}, whose"):
            load(path, model=other, optimizer=maker(other.parameters()))
    assert all(torch.equal(x, before[name]) for name, x in other.state_dict().items())
    load(path, model=other, optimizer=torch.optim.AdamW(other.parameters()))  # it is made from Adam


def test_a_path_is_a_text_and_expanded_buffers_are_not_read_into(tmp_path):
    for path in (None, 3, b"it"):
        for function in (save, load):
            with pytest.raises(CheckpointError, match=r"path=.* is a .*; give a text or a pathlib.Path"):
                function(path, model=nn.Linear(2, 3))
    model = nn.Linear(2, 3)
    model.register_buffer("mask", torch.ones(1, 3).expand(2, 3))
    _saved(tmp_path / "it", model)
    jigsaw.save_weights(tmp_path / "it.safetensors", model)
    nn.init.zeros_(model.weight)
    with pytest.raises(CheckpointError, match=r"'model.mask' of shape \(2, 3\) is expanded: .* make it x.contiguous"):
        load(tmp_path / "it", model=model)
    with pytest.raises(CheckpointError, match=r"'mask' of shape \(2, 3\) is expanded"):
        jigsaw.load_weights(tmp_path / "it.safetensors", model)
    assert not model.weight.any()


@on_ranks(2)
def test_ranks_that_name_other_checkpoints_are_refused_on_each(tmp_path):
    rank, model = dist.get_rank(), nn.Linear(2, 3)
    nn.init.ones_(model.weight), nn.init.ones_(model.bias)
    of_ranks = [tmp_path / "step-1", tmp_path / "step-2"]
    told = r"path= is 'step-1.*' on rank 0 of the job and 'step-2.*' on rank 1; give every rank the same"
    with pytest.raises(CheckpointError, match=told):
        save(of_ranks[rank], model=model)
    with pytest.raises(CheckpointError, match=r"keep= is 1 on rank 0 of the job and 0 on rank 1"):
        save(of_ranks[0], model=model, keep=[1, 0][rank])
    with pytest.raises(CheckpointError, match=told):
        jigsaw.save_weights(of_ranks[rank].with_suffix(".safetensors"), model)
    for path in of_ranks:
        save(path, model=model)
    with pytest.raises(CheckpointError, match=told):
        load(of_ranks[rank], model=model)


@on_ranks(2)
def test_state_of_another_shape_than_its_cut_weight_comes_back_as_it_was(tmp_path):
    mesh = world_mesh(lat=2)
    x = jigsaw.shard(torch.randn(2, 3, 5, 4), mesh, (None, None, "lat", None))

    def new_training():
        torch.manual_seed(1)
        model = jigsaw.parallelize(nn.Conv2d(3, 4, 3, padding=1), mesh, shard_weights=True)
        return model, torch.optim.Adafactor(model.parameters())

    def step(model, optimizer):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    model, optimizer = new_training()
    step(model, optimizer)
    save(tmp_path / "it", model=model, optimizer=optimizer)
    other, fresh = new_training()
    load(tmp_path / "it", model=other, optimizer=fresh)
    step(model, optimizer)
    step(other, fresh)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.full_tensor(), two.full_tensor())


class Refusing:
    """A loader of another, shorter dataset."""

    def state_dict(self):
        return {"seen": 9}

    def load_state_dict(self, state):
        raise ValueError(f"{state['seen']} samples are more than there are")


def test_a_loader_that_refuses_its_state_leaves_the_model_as_it_is(tmp_path):
    model = nn.Linear(2, 3)
    path = _saved(tmp_path / "it", nn.Linear(2, 3), loader=Refusing())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="9 samples are more than there are"):
        load(path, model=model, loader=Refusing())
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


class Copying(nn.Linear):
    """A layer whose state is a copy in another dtype, and a value besides."""

    def __init__(self, value):
        super().__init__(4, 3, dtype=torch.float16)
        self.value = torch.tensor(value)

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "weight"] = destination[prefix + "weight"].float()

    def get_extra_state(self):
        return self.value.clone()

    def set_extra_state(self, state):
        self.value = state


def test_a_model_takes_what_its_state_has_copies_of(tmp_path):
    model, again = Copying(3), Copying(0)
    save(tmp_path / "a", model=model)
    load(tmp_path / "a", model=again)
    assert torch.equal(again.weight, model.weight) and torch.equal(again.bias, model.bias)
    assert again.value.item() == 3


class Wrapper(nn.Module):
    """A wrapper as Lightning's: its modules have a name more than its state."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def state_dict(self, **options):
        return self.inner.state_dict(**options)

    def load_state_dict(self, state_dict, strict=True):
        return self.inner.load_state_dict(state_dict, strict)


def test_parameters_have_the_names_of_the_state(tmp_path):
    def trained(wrap):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, 4)).sum().backward()
        return wrap(model), optimizer

    model, optimizer = trained(Wrapper)
    optimizer.step()
    save(tmp_path / "a", model=model, optimizer=optimizer)
    again, other = trained(lambda model: model)
    load(tmp_path / "a", model=again, optimizer=other)
    assert other.state[again.weight]["step"].item() == 1


def test_what_a_checkpoint_cannot_keep_is_named(tmp_path):
    model = nn.Linear(4, 3)
    model.register_buffer("edges", torch.eye(3).to_sparse())
    with pytest.raises(CheckpointError, match=r"'model\.edges' of shape \(3, 3\) is of layout torch.sparse_coo"):
        save(tmp_path / "a", model=model)
    del model.edges
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["global"] = {"seen": 3}
    with pytest.raises(CheckpointError, match="the optimizer SGD has state of 'global', which is not a parameter"):
        save(tmp_path / "a", model=model, optimizer=optimizer)
    save(tmp_path / "a", model=model)
    with pytest.raises(CheckpointError, match=r"'model\.weight' of shape \(3, 4\) is on the device meta"):
        load(tmp_path / "a", model=nn.Linear(4, 3, device="meta"))
