"""Operators that a dry run answers by torch's kernels for shapes, beside torch's real ones."""

import pytest
import torch

from jigsaw.torch_internals import fake_tensors
from jigsaw.torch_internals.dispatch import tensors_of_call
from jigsaw.torch_internals.fake_tensors import FakeTensorMode, answer_by_shape

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
}


def _assert_same(func, args, values=()):
    with FakeTensorMode() as mode:
        fakes = {id(x): mode.from_tensor(x) for x in args if isinstance(x, torch.Tensor)}
        given = [fakes.get(id(x), x) for x in args]
        quick = answer_by_shape(func, given, {})
    assert quick is not None, func
    real = func(*args, *values)
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
    if count == 1:
        _assert_same(func, [torch.ones(4, 3), 2.0]) if func is not aten.copy_.default else None


def test_products_and_means_on_the_way():
    for x in (torch.ones(6, 8), torch.ones(8, 6).t(), torch.ones(0, 8)):
        for y in (torch.ones(8, 5), torch.ones(5, 8).t()):
            _assert_same(aten.mm.default, [x, y])
            _assert_same(aten.addmm.default, [torch.ones(5), x, y])
    _assert_same(aten.bmm.default, [torch.ones(2, 6, 8), torch.ones(2, 5, 8).mT])
    _assert_same(aten.lerp_.Scalar, [torch.ones(6, 8), torch.ones(6, 8), 0.1])


def test_what_torch_has_to_answer():
    with FakeTensorMode():
        x, number = torch.ones(2, 3), torch.tensor(2.0)
        assert answer_by_shape(aten.gelu.default, (x,), {}) is None
        assert answer_by_shape(aten.mul.Tensor, (x, number), {}) is None  # torch knows the value of this one
    assert answer_by_shape(aten.t.default, (torch.ones(2, 3),), {}) is None  # a tensor with values
    every = fake_tensors._BY_SHAPE - set(VIEWS) - set(OF_EACH_ELEMENT)
    products = {aten.mm.default, aten.addmm.default, aten.bmm.default}
    assert every == products | {aten.view.default, aten.lerp_.Scalar}
    assert tensors_of_call((x, 1, [number, None], (x,))) == [x, number, x]
