"""Strategies for tests of layers: a convolution is exact under them, and a layer that is wrong is found."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings

import jigsaw
from jigsaw.geometry.layout import Layout
from jigsaw.testing import assert_same_on_every_mesh
from jigsaw.testing.strategies import cut_tensors


@given(cut_tensors((1, 2, "lat", "lon")))
@settings(max_examples=12, deadline=None)
def test_a_convolution_is_exact(case):
    layer = torch.nn.Conv2d(2, 3, 3, padding=1)
    assert_same_on_every_mesh(layer, case.tensor, [case.mesh], spec=case.spec, split=case.split)


class MeanOfOwnRows(torch.nn.Module):
    """Looks at a rank's own rows alone, as a layer must not."""

    def forward(self, x):
        if not isinstance(x, jigsaw.Tile):
            return x - x.mean(-1, keepdim=True)
        return jigsaw.Tile(x.local - x.local.mean(-1, keepdim=True), x.layout, x.mesh)


def test_a_layer_that_looks_at_own_rows_alone_is_found():
    @given(cut_tensors((2, "lat"), sizes=(2, 12), most_ranks=2))
    @settings(max_examples=20, deadline=None, database=None)
    def holds(case):
        assert_same_on_every_mesh(MeanOfOwnRows(), case.tensor, [case.mesh], spec=case.spec, split=case.split)

    with pytest.raises(AssertionError, match="lat"):
        holds()


@given(cut_tensors((3, "data", "lat", 2, "lon"), sizes=(1, 5), most_ranks=6))
@settings(deadline=None)
def test_cuts_fit_the_tensor_and_the_mesh(case):
    layout = Layout.of(case.tensor.shape, case.spec, case.mesh, split=case.split)
    assert 2 <= layout.ranks <= 6
    for dim, points in case.split.items():
        assert points == sorted(points)
        assert (points[0], points[-1]) == (0, case.tensor.shape[dim])
        assert [cut.points for cut in layout.dim(dim)] == [tuple(points)]
    assert all(a <= b for points in case.split.values() for a, b in itertools.pairwise(points))
