"""A halo from disk is a halo: the first layers of a model that is fed with one communicate nothing."""

import pytest
import torch
from globe_store import stacked
from torch.nn import functional as F

import jigsaw
from jigsaw import comm
from jigsaw.testing import on_ranks, world_mesh


def batch_of(path, mesh, halo):
    ds = jigsaw.io.open(
        path, mesh=mesh, fields=["t2m", "z500"], halo=halo, boundary={"lon": "periodic"}, dtype="float64",
        normalize={"t2m": (280, 10), "z500": (5e4, 1e3)},
    )  # fmt: skip
    whole = torch.from_numpy(stacked(path, ["2m_temperature", "geopotential@500"]))
    mean, std = torch.tensor([280, 5e4]), torch.tensor([10.0, 1e3])
    batch = next(iter(jigsaw.io.DataLoader(ds, batch_size=2)))
    want = (whole[:2] - mean[:, None, None]) / std[:, None, None]
    return batch.input[:, 0], want


def around(x, pad):
    """A globe padded: round in longitude, with zeros beyond the poles."""
    return F.pad(F.pad(x, (pad, pad, 0, 0), mode="circular"), (0, 0, pad, pad))


@pytest.mark.parametrize("axes", [{"lat": 2, "lon": 2}, {"lat": 4}, {"data": 2, "lon": 2}], ids=str)
@pytest.mark.parametrize(("kernel", "halo"), [(3, 1), (5, 2), (5, 3)])
@on_ranks(4)
def test_the_first_convolution_sends_nothing(wb2, axes, kernel, halo):
    x, whole = batch_of(wb2, world_mesh(**axes), halo)
    weight = torch.randn(3, 2, kernel, kernel, dtype=torch.float64)
    with comm.count() as sent:
        y = F.conv2d(around(x, kernel // 2), weight)
    assert (sent.sent_bytes, sent.received_bytes, sent.messages) == (0, 0, 0)
    torch.testing.assert_close(y.full_tensor(), F.conv2d(around(whole, kernel // 2), weight), rtol=1e-4, atol=1e-4)


@on_ranks(4)
def test_a_halo_that_is_too_narrow_is_completed_by_the_neighbors(wb2):
    x, whole = batch_of(wb2, world_mesh(lat=2, lon=2), 1)
    weight = torch.randn(3, 2, 5, 5, dtype=torch.float64)
    with comm.count() as sent:
        y = F.conv2d(x, weight, padding=2)
    assert sent.sent_bytes > 0
    torch.testing.assert_close(y.full_tensor(), F.conv2d(whole, weight, padding=2), rtol=1e-4, atol=1e-4)
