"""Copies of models without values, and what functions remember of them."""

import functools

import torch

from jigsaw.parallel.models_on_paper import caches_on_paper
from jigsaw.torch_internals.fake_tensors import FakeTensorMode


@functools.cache
def _ones_of(size):
    return {"ones": [torch.ones(size)]} if size % 100 == 0 else size


def test_a_cache_of_many_entries_is_looked_at_again_when_some_were_added():
    _ones_of.cache_clear()
    for size in range(300):
        _ones_of(size)
    assert _ones_of not in caches_on_paper()
    assert _ones_of not in caches_on_paper()
    with FakeTensorMode():
        _ones_of(400)
    assert _ones_of in caches_on_paper()
    _ones_of.cache_clear()
    assert _ones_of not in caches_on_paper()
    with FakeTensorMode():
        _ones_of(100)
    assert _ones_of in caches_on_paper()
    _ones_of.cache_clear()
