"""Padding on the sphere: against the rule of rows and columns, one by one, on every cut; what is sent."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.nn import SpherePad
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile import Tile

SPEC = (None, None, "lat", "lon")
MESHES = [{"lat": 1}, {"lat": 2}, {"lon": 3}, {"lat": 4}, {"lat": 2, "lon": 2}]


class RowByRow(nn.Module):
    """`SpherePad` on tiles; on a plain tensor the rule itself, a row and a column at a time."""

    def __init__(self, *args, **how):
        super().__init__()
        self.pad = SpherePad(*args, **how)

    def forward(self, x):
        return self.pad(x) if isinstance(x, Tile) else self.by_rule(x)

    def by_rule(self, x):
        (left, right, top, bottom), (nlat, nlon) = self.pad.padding, x.shape[-2:]
        signs = torch.ones(x.shape[self.pad.channel_dim]) if self.pad.vectors else torch.ones(1)
        signs[list(self.pad.vectors)] = -1
        signs = signs.view(-1, *[1] * (-self.pad.channel_dim - 2))  # a row has one dim less than x
        rows = []
        for i in range(-top, nlat + bottom):
            turned = not 0 <= i < nlat
            at = (-i if self.pad.at_pole[0] else -i - 1) if i < 0 else i
            at = (2 * nlat - i - 2 if self.pad.at_pole[1] else 2 * nlat - i - 1) if i >= nlat else at
            columns = [(j + turned * nlon // 2) % nlon for j in range(-left, nlon + right)]
            rows.append(x[..., at, columns] * (signs if turned else 1))
        return torch.stack(rows, -2)


def test_every_cut_follows_the_rule():
    x = torch.randn(2, 3, 7, 10)
    assert_same_on_every_mesh(RowByRow((3, 2, 1, 2), (True, False), vectors=(2, 0)), x, MESHES, spec=SPEC)
    some = [{"lat": 3}, {"lat": 2, "lon": 2}]
    assert_same_on_every_mesh(RowByRow(2), x, some, spec=SPEC, halo={2: 1, 3: 2}, periodic=(3,))
    # wider than the pieces, and as wide as can be; pieces without rows
    assert_same_on_every_mesh(RowByRow((10, 10, 6, 7), (True, False)), x, some, spec=SPEC)
    assert_same_on_every_mesh(RowByRow(2), x, some[:1], spec=SPEC, split={2: (0, 0, 7, 7)})
    levels = torch.randn(2, 4, 3, 5, 6)
    pad = RowByRow((1, 0, 0, 1), vectors=(1,), channel_dim=-4)
    assert_same_on_every_mesh(pad, levels, [{"channel": 2, "lat": 2}], spec=(None, "channel", None, "lat", None))


class PaddedConv(nn.Module):
    def __init__(self):
        super().__init__()
        self.pad, self.conv = SpherePad(1, at_pole=True), nn.Conv2d(3, 2, 3)

    def forward(self, x):
        return self.conv(self.pad(x))


def test_a_convolution_over_the_poles():
    assert_same_on_every_mesh(PaddedConv(), torch.randn(1, 3, 9, 12), [{"lat": 2, "lon": 2}], spec=SPEC)


@on_ranks(4)
def _sent(axes, left, right, top, bottom):
    mesh = world_mesh(**axes)
    x = jigsaw.shard(torch.randn(5, 12, 16), mesh, (None, "lat", "lon"))
    x.local.requires_grad_()
    with comm.count() as forward:
        y = SpherePad((left, right, top, bottom))(x)
    assert y.layout.has_halo
    if (left, top) == (right, bottom):
        with comm.count() as convolution:
            F.conv2d(y[None], torch.ones(1, 5, top + bottom + 1, left + right + 1))
        assert not convolution.sent_bytes
    with comm.count() as backward:
        y.local.sum().backward()
    assert backward.received_bytes == forward.sent_bytes
    assert backward.sent_bytes == forward.received_bytes
    return forward.received_bytes / (4 * 5)


def test_what_is_sent_are_rows_of_neighbors_and_turned_columns_of_others():
    # bands: rows of the neighbors; what is beyond a pole is the rank's own
    assert _sent({"lat": 4}, 2, 1, 1, 2) == [2 * 16, 3 * 16, 3 * 16, 1 * 16]
    # sectors of four columns: their own three beside, and seven of each of the three rows beyond the poles
    assert _sent({"lon": 4}, 2, 1, 1, 2) == [(2 + 1) * 12 + 3 * 7] * 4
    # quarters of 6 x 8: at the north pole two rows of a neighbor, three columns beside, and the eight turned ones
    north = 2 * 8 + (6 + 2) * 3 + 1 * 8
    south = 1 * 8 + (6 + 1) * 3 + 2 * 8
    assert _sent({"lat": 2, "lon": 2}, 2, 1, 1, 2) == [north, north, south, south]
    assert (
        _sent({"lat": 2, "lon": 2}, 2, 2, 1, 1) == [1 * 8 + (6 + 1) * 4 + 1 * 8] * 4
    )  # and the kernel 3 x 5 then nothing


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"padding": (0, 0, -1, 0)}, "is negative; crop with a slice"),
        ({"padding": (0, 0, 7, 0), "at_pole": True}, "top=7 of shape .* is too wide; use at most 6"),
        ({"padding": (0, 11, 0, 0)}, "right=11 of shape .* is too wide; use at most 10"),
        ({"padding": 1, "vectors": (3,)}, "names channel 3, but dim -3 of shape .* has 3"),
        ({"padding": 1, "vectors": (0,), "channel_dim": 4}, "channel_dim=4 of shape"),
        ({"padding": (1, 1)}, "padding=.* has 2 entries for 4"),
    ],
)
def test_what_is_refused(how, match):
    with pytest.raises(ShardingError, match=match):
        SpherePad(**how)(torch.randn(2, 3, 7, 10))


def test_an_odd_circle_has_no_other_side():
    with pytest.raises(ShardingError, match="needs an even number of columns, but dim -1 has 9"):
        SpherePad(1)(torch.randn(2, 3, 7, 9))
    assert SpherePad((1, 1, 0, 0))(torch.randn(7, 9)).shape == (7, 11)
    with pytest.raises(ShardingError, match="needs dims of latitude and longitude"):
        SpherePad(1)(torch.randn(7))


class EarthPadding(nn.Module):
    """As forecast models write it, with torch's own functions: roll, flip, cat, circular; then crop."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, x):
        turned = torch.roll(x, shifts=x.shape[-1] // 2, dims=-1)
        top, bottom = torch.flip(turned[..., :2, :], (-2,)), torch.flip(turned[..., -2:, :], (-2,))
        y = F.pad(torch.cat([top, x, bottom], dim=-2), (3, 3, 0, 0), mode="circular")
        return self.conv(y)[..., 2:-2, 3:-3]


def test_earth_padding_of_torchs_functions_runs_as_it_is():
    x = torch.randn(2, 3, 7, 10)
    assert_same_on_every_mesh(EarthPadding(), x, [{"lat": 3}, {"lat": 2, "lon": 2}], spec=SPEC)
    model = EarthPadding()
    by_pad = model.conv(SpherePad((3, 3, 2, 2))(x))[..., 2:-2, 3:-3]
    torch.testing.assert_close(by_pad, model(x))
