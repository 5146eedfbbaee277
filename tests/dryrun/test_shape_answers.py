"""Operators that a dry run answers by torch's kernels for shapes, beside torch's real ones."""

from functools import partial

import pytest
import torch
from torch import nn

from jigsaw.dryrun import step_meter
from jigsaw.dryrun.counted_steps import are_same_steps
from jigsaw.dryrun.rank_playing import StepPlan, play_rank
from jigsaw.torch_internals import fake_tensors
from jigsaw.torch_internals.dispatch import tensors_of_call
from jigsaw.torch_internals.fake_tensors import FakeTensor, FakeTensorMode, PaperMode, answer_by_shape

aten = torch.ops.aten


def _tensors():
    """Contiguous, turned, part of a larger one, broadcast, without rows, and of half as many bytes."""
    whole = torch.ones(6, 8)
    return [whole, torch.ones(8, 6).t(), torch.ones(9, 16)[2:8, 1:9], torch.ones(1, 8).expand(6, 8), torch.ones(0, 8)]


VIEWS = {
    aten.detach.default: (),
    aten.alias.default: (),
    aten.slice.Tensor: (1, 2, 7, 2),
    aten.select.int: (1, 3),
    aten.as_strided.default: ((2, 3), (2, 1), 1),
    aten.t.default: (),
    aten.transpose.int: (0, 1),
    aten.permute.default: ([1, 0],),
    aten.expand.default: ([3, -1, -1],),
    aten.unsqueeze.default: (1,),
    aten.squeeze.dim: (0,),
    aten.view.dtype: (torch.int32,),
    aten.split.Tensor: (4, 1),
}
OF_EACH_ELEMENT = {
    aten.add.Tensor: 1,
    aten.sub.Tensor: 1,
    aten.mul.Tensor: 1,
    aten.div.Tensor: 1,
    aten.add_.Tensor: 1,
    aten.mul_.Tensor: 1,
    aten.copy_.default: 1,
    aten.addcmul_.default: 2,
    aten.addcdiv_.default: 2,
    aten.sqrt.default: 0,
    aten.zeros_like.default: 0,
    aten.clone.default: 0,
}
NEW = {
    aten.empty_like.default: ((), {"dtype": torch.bfloat16}),
    aten.new_empty.default: (([3, 5],), {"pin_memory": False}),
    aten.new_zeros.default: (([3, 5],), {"dtype": torch.float64, "device": torch.device("cpu")}),
    aten._to_copy.default: ((), {"dtype": torch.bfloat16}),
}


def _assert_same(func, args, **kwargs):
    with FakeTensorMode() as mode:
        fakes = {id(x): mode.from_tensor(x) for x in args if isinstance(x, torch.Tensor)}
        given = [fakes.get(id(x), x) for x in args]
        quick = answer_by_shape(func, given, kwargs)
    assert quick is not None, func
    real = func(*args, **kwargs)
    if isinstance(real, list):
        assert len(quick) == len(real)
        quick, real = quick[-1], real[-1]
    assert (quick.shape, quick.stride(), quick.dtype) == (real.shape, real.stride(), real.dtype), func
    assert quick.storage_offset() == real.storage_offset() and quick.device == real.device
    shared = [x.untyped_storage().data_ptr() == real.untyped_storage().data_ptr() for x in args if x is not None
              and isinstance(x, torch.Tensor) and x.numel()]  # fmt: skip
    told = [fakes[id(x)].untyped_storage()._cdata == quick.untyped_storage()._cdata for x in args
            if isinstance(x, torch.Tensor) and x.numel()]  # fmt: skip
    assert shared == told, func
    assert (quick is given[0]) == (real is args[0])


def test_views():
    for func, more in VIEWS.items():
        for x in _tensors():
            if func is not aten.as_strided.default or x.numel():
                _assert_same(func, [x, *more])
    for x in (torch.ones(6, 8), torch.ones(12, 8)[::2]):
        _assert_same(aten.view.default, [x, [6, 2, 4]])


@pytest.mark.parametrize("func", OF_EACH_ELEMENT, ids=str)
def test_functions_of_each_element(func):
    count, is_in_place = OF_EACH_ELEMENT[func], func._schema.is_mutable
    for x in _tensors():
        if is_in_place and 0 in x.stride():
            continue  # torch refuses to write into what has several places at once
        for y in (torch.ones_like(x), torch.ones(x.shape, dtype=torch.bfloat16), x.clone().t().contiguous().t()):
            _assert_same(func, [x, *[y] * count])
    _assert_same(func, [torch.ones(4, 3), *[torch.ones(3)] * count])
    others = [
        torch.ones(4, 3, dtype=torch.int64),
        torch.ones(()),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.ones(2, 1, 4, 5).to(memory_format=torch.channels_last),
    ]
    for x in others if not is_in_place else ():
        _assert_same(func, [x, *[torch.ones_like(x)] * count])
        _assert_same(func, [x, *[torch.ones(x.shape)] * count])
    if count == 1 and not is_in_place:
        _assert_same(func, [torch.ones(4, 3), 2j])
    if count == 2:
        _assert_same(func, [torch.ones(4, 3)] * 3, value=0.5)
    if count == 1:
        _assert_same(func, [torch.ones(4, 3), 2.0]) if func is not aten.copy_.default else None


@pytest.mark.parametrize("func", NEW, ids=str)
def test_new_memory(func):
    more, kwargs = NEW[func]
    for x in _tensors():
        _assert_same(func, [x, *more], **kwargs)
    with FakeTensorMode():
        assert answer_by_shape(func, (torch.ones(2, 3), *more), {"pin_memory": True}) is None
        assert answer_by_shape(func, (torch.ones(2, 3), *more), {"device": torch.device("meta")}) is None


def test_products_and_means_on_the_way():
    for x in (torch.ones(6, 8), torch.ones(8, 6).t(), torch.ones(0, 8)):
        for y in (torch.ones(8, 5), torch.ones(5, 8).t()):
            _assert_same(aten.mm.default, [x, y])
            _assert_same(aten.addmm.default, [torch.ones(5), x, y])
    _assert_same(aten.bmm.default, [torch.ones(2, 6, 8), torch.ones(2, 5, 8).mT])
    _assert_same(aten.lerp_.Scalar, [torch.ones(6, 8), torch.ones(6, 8), 0.1])
    _assert_same(aten._unsafe_view.default, [torch.ones(6, 8), [6, 2, 4]])
    with FakeTensorMode():
        narrow = torch.ones(6, 8, dtype=torch.bfloat16)
        wide = answer_by_shape(aten.mm.dtype, (narrow, narrow.t(), torch.float32), {})
        assert (wide.shape, wide.dtype) == ((6, 6), torch.float32)


def _empty_tensors():
    like = torch.ones(2, 3, 4, 5)
    return [
        torch.empty(3, 5),
        torch.empty(()),
        torch.empty(2, 3, 4, 5, dtype=torch.bfloat16, memory_format=torch.channels_last),
        torch.empty_strided((3, 5), (1, 3), dtype=torch.int64),
        torch.empty(3, 5, requires_grad=True) + 1,
        torch.empty(3, layout=torch.sparse_coo),
        torch.empty_like(like.mT),
        like.mT.half(),
        torch.empty(4, device="cuda:0") if torch.cuda.is_available() else torch.empty(4, device="cpu"),
        torch.empty(4, device="meta"),
    ]


def test_the_mode_of_runs_on_paper_answers_as_torchs():
    with FakeTensorMode(allow_non_fake_inputs=True):
        expected = _empty_tensors()
    with PaperMode() as mode:
        quick = _empty_tensors()
    for x, y in zip(quick, expected, strict=True):
        assert (x.shape, x.dtype, x.device, x.layout) == (y.shape, y.dtype, y.device, y.layout)
        assert x.layout != torch.strided or x.stride() == y.stride()
        assert type(x) is type(y) and getattr(x, "fake_mode", mode) is mode
        if isinstance(x, FakeTensor):
            assert {**vars(x), "fake_mode": None} == {**vars(y), "fake_mode": None}
            assert torch._C._dispatch_keys(x) == torch._C._dispatch_keys(y)


def test_what_torch_has_to_answer():
    with FakeTensorMode():
        x, number = torch.ones(2, 3), torch.tensor(2.0)
        assert answer_by_shape(aten.gelu.default, (x,), {}) is None
        assert answer_by_shape(aten.mul.Tensor, (x, number), {}) is None  # torch knows the value of this one
    assert answer_by_shape(aten.t.default, (torch.ones(2, 3),), {}) is None  # a tensor with values
    every = fake_tensors._BY_SHAPE - set(VIEWS) - set(OF_EACH_ELEMENT) - set(NEW)
    products = {aten.mm.default, aten.mm.dtype, aten.addmm.default, aten.bmm.default}
    assert every == products | {aten.view.default, aten._unsafe_view.default, aten.lerp_.Scalar}
    assert tensors_of_call((x, 1, [number, None], (x,))) == [x, number, x]


class _Uneven(nn.Module):
    """Weights of which several are alike, whose rows two ranks do not share evenly, and one without a gradient."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(7, 7) for _ in range(3)), nn.Linear(7, 4, bias=False), nn.LayerNorm(4))
        self.layers[1].bias.requires_grad_(False)

    def forward(self, x):
        return self.layers(x)


# with the same functions in the first step as later: where DTensor sees one first, its own trial of it is counted
OPTIMIZERS = {
    "AdamW": {},
    "Adam": {"amsgrad": True, "weight_decay": 0.1},
    "SGD": {"weight_decay": 0.1},
    "RMSprop": {"centered": True},
    "NAdam": {},
    "Adagrad": {},
}


@pytest.mark.parametrize("axes", [{"lat": 2}, {"lat": 2, "channel": 2}], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_counts_as_torch_runs_it(name, axes, monkeypatch):
    """By parts of weights that are cut, from the first of each parameters that are alike; torch's answers beside."""
    torchs = getattr(torch.optim, name)

    class Own(torchs):
        """The same, of which nothing is known."""

    def phases(optimizer):
        made = partial(optimizer, **OPTIMIZERS[name])
        spec = (None, "lat", None)
        plan = StepPlan(_Uneven, ((2, 5, 7),), spec=spec, optimizer=made, shard_weights=True, keeps_calls=False)
        return play_rank(plan, axes, 1).phases

    quick = phases(torchs)
    monkeypatch.setattr(step_meter, "answer_by_parts", lambda *_: NotImplemented)
    monkeypatch.setattr(step_meter, "answer_by_shape", lambda *_: None)
    slow = phases(Own)
    assert quick["step"].kernels
    assert all(are_same_steps(quick[phase], slow[phase]) for phase in slow)
