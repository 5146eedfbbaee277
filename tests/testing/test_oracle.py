"""What users test their layers with must itself fail when a layer is wrong."""

from __future__ import annotations

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import jigsaw
from jigsaw.testing import RankFailedError, assert_adjoint, assert_same_on_every_mesh

X = torch.randn(2, 3, 13, 10, generator=torch.Generator().manual_seed(0))
TWO = [{"lat": 2}]


class Scaled(nn.Module):
    """A weight, a positional embedding and a buffer, with one thing wrong when asked."""

    def __init__(self, wrong: str = ""):
        super().__init__()
        self.wrong = wrong
        self.weight = nn.Parameter(torch.randn(3, 1, 1))
        self.place = nn.Parameter(torch.randn(3, 13, 10))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += 1
        y = F.gelu(x * self.weight + self.place)
        if isinstance(x, jigsaw.Tile) and self.wrong:
            y = getattr(self, f"_wrong_{self.wrong}")(y)
        return y

    def _wrong_output(self, y):
        return y if y.coordinate[0] == 0 else jigsaw.Tile(y.local + 1e-3, y.layout, y.mesh)

    def _wrong_gradient(self, y):
        return jigsaw.Tile(y.local.detach() + 0.5 * (y.local - y.local.detach()), y.layout, y.mesh)

    def _wrong_buffer(self, y):
        self.seen += 1
        return y

    def _wrong_dtype(self, y):
        return y.float()

    def _wrong_shape(self, y):
        return y.full_tensor()[..., 1:]

    def _wrong_raise(self, y):
        raise KeyError("only on tiles")


def scale(x, by):
    return x * by


def mean_and_more(x):
    return {"a": x.mean(), "b": [x * 2, x + 1]}


def squared(output, target):
    return (output - target).square().mean()


def twice_forward_once_backward(x):
    return jigsaw.Tile(2 * x.local.detach() + x.local - x.local.detach(), x.layout, x.mesh)


def nothing(x):
    return x * 0.0


def per_rank(output):
    return output.local.sum() if isinstance(output, jigsaw.Tile) else output.sum()


def build_frozen(model, mesh):
    for p in model.parameters():
        p.requires_grad_(False)
    return model


def test_a_right_module_passes():
    assert_same_on_every_mesh(Scaled(), X)
    assert_same_on_every_mesh(Scaled(), X, spec=(None, None, "lat", "lon"))


def test_a_function_passes():
    assert_same_on_every_mesh(functools.partial(scale, by=3.0), X)
    assert_same_on_every_mesh(mean_and_more, X, TWO)


def test_replicas_data_axes_targets_halos_and_cuts():
    assert_same_on_every_mesh(Scaled(), X, [{"data": 2, "lat": 2}], target=X.flip(0), loss=squared)
    assert_same_on_every_mesh(Scaled(), X, [{"lat": 2, "other": 2}], spec=(None, None, "lat", None))
    assert_same_on_every_mesh(Scaled(), X, spec=(None, None, "lat", None), halo={2: 2}, periodic=[2])
    assert_same_on_every_mesh(Scaled(), X, [{"lat": 3}], split={2: (0, 1, 9, 13)})


def test_several_arguments_some_of_them_whole():
    arguments = [X, torch.randn(13, 1, generator=torch.Generator().manual_seed(1))]
    assert_same_on_every_mesh(torch.mul, arguments, spec=[(None, None, "lat", "lon"), None])
    assert_same_on_every_mesh(torch.mul, arguments, spec=[(None, None, "lat", "lon"), ("lat", None)])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("output", r"Scaled on the mesh lat=2 differs(?s:.*)rank 0: output: off by 0.001 at \(\d, \d, \d+, \d\)"),
        ("gradient", r"rank 1: gradient of weight: off by"),
        ("gradient", r"rank 1: gradient of input 0: off by"),
        ("buffer", r"rank 0: buffer seen: off by 1 at \(\)"),
        ("dtype", r"output: torch.float32 instead of torch.float64"),
        ("shape", r"output: shape \(2, 3, 13, 9\) instead of \(2, 3, 13, 10\)"),
    ],
)
def test_what_is_wrong_is_named(wrong, words):
    with pytest.raises(AssertionError, match=words):
        assert_same_on_every_mesh(Scaled(wrong), X, TWO)


def test_a_rank_that_raises_names_the_mesh():
    with pytest.raises(RankFailedError, match="KeyError: 'only on tiles'") as info:
        assert_same_on_every_mesh(Scaled("raise"), X, TWO)
    assert info.value.__notes__ == ["on the mesh lat=2"]


def test_a_gradient_that_is_missing_is_found():
    with pytest.raises(AssertionError, match="gradient of weight: not there"):
        assert_same_on_every_mesh(Scaled(), X, TWO, build=build_frozen)


def test_a_local_loss_is_found():
    with pytest.raises(AssertionError, match="rank 1: loss: off by"):
        assert_same_on_every_mesh(Scaled(), X, TWO, loss=per_rank)


def test_a_test_that_could_not_fail_is_refused():
    with pytest.raises(ValueError, match=r"the mesh lon=2 cuts no input: spec names the axes \['lat'\]"):
        assert_same_on_every_mesh(Scaled(), X, [{"lon": 2}], spec=(None, None, "lat", None))
    with pytest.raises(ValueError, match="spec names no axis"):
        assert_same_on_every_mesh(Scaled(), X, spec=(None, None, None, None))
    with pytest.raises(ValueError, match="the mesh lat=2 cuts no input"):
        assert_same_on_every_mesh(scale, [torch.ones(5), 2.0], TWO)


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="spec has 1 entries for 2 inputs"):
        assert_same_on_every_mesh(torch.mul, [X, X], TWO, spec=[(None, None, "lat", None)])
    with pytest.raises(ValueError, match="gradients='sum'"):
        assert_same_on_every_mesh(Scaled(), X, TWO, gradients="sum")


def test_adjoint():
    assert_adjoint(functools.partial(scale, by=3.0), (3, 13, 10), spec=(None, "lat", "lon"))
    assert_adjoint(functools.partial(scale, by=3.0), (13, 10), spec=("lat", "lon"), halo={0: 2})
    assert_adjoint(torch.sum, (13, 10), spec=("lat", "lon"))
    assert_adjoint(jigsaw.Tile.full_tensor, (13, 10), spec=("lat", "lon"))


def test_a_wrong_adjoint_is_found():
    with pytest.raises(
        AssertionError, match=r"twice_forward_once_backward on the mesh lat=1.*<F x, y> = .*<x, F\* y> = "
    ):
        assert_adjoint(twice_forward_once_backward, (13, 10), spec=("lat", "lon"))
    with pytest.raises(AssertionError, match="F x is zero everywhere"):
        assert_adjoint(nothing, (13, 10), spec=("lat", "lon"))
