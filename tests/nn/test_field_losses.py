"""Spectral, Dice, Tversky and focal losses: their formulas, MONAI's, and alike on every mesh with every gradient."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from monai.losses import BendingEnergyLoss, DiceLoss, DiffusionLoss, FocalLoss, TverskyLoss

from jigsaw import nn
from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh

MESHES = [{"lat": 1}, {"lat": 3}, {"lon": 4}, {"lat": 2, "lon": 2}]
SPACE = (None, None, "lat", "lon")
AREA = torch.linspace(0.1, 1, 7, dtype=torch.float64)[:, None]


def _loss(name, x, y, **options):
    if name == "focal_loss":
        y = (y > 0).to(x.dtype)
    elif name != "spectral_loss":
        x, y = x.softmax(1), (y > 0).to(x.dtype)
    return getattr(nn, name)(x, y, **options)


CASES = [
    ("spectral_loss", {"weight": AREA}),
    ("spectral_loss", {"dim": (-2, -1), "quantity": "log_power"}),
    ("spectral_loss", {"dim": -2, "quantity": "power", "reduction": "sum"}),
    ("spectral_loss", {"reduction": "none"}),
    ("dice_loss", {}),
    ("dice_loss", {"weight": AREA, "over_batch": True}),
    ("tversky_loss", {"alpha": 0.3, "beta": 0.7, "reduction": "none"}),
    ("focal_loss", {"alpha": 0.25}),
    ("focal_loss", {"weight": AREA, "gamma": 1.5}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_on_every_mesh(name, options):
    torch.manual_seed(0)
    case = functools.partial(_loss, name, **options)
    assert_same_on_every_mesh(case, [torch.randn(2, 3, 7, 10), torch.randn(2, 3, 7, 10)], MESHES, spec=[SPACE, SPACE])


@pytest.mark.parametrize("size", [10, 7])
@pytest.mark.parametrize("dim", [(-1,), (-2, -1)])
def test_modes_count_as_in_the_full_spectrum(size, dim):
    torch.manual_seed(0)
    x, y = torch.randn(2, 2, 6, size, dtype=torch.float64)
    full = [torch.fft.fftn(z, dim=dim, norm="ortho").abs() for z in (x, y)]
    for quantity, made in (
        ("amplitude", lambda a: a),
        ("power", torch.square),
        ("log_power", lambda a: torch.log(a**2 + 1e-8)),
    ):
        apart = (made(full[0]) - made(full[1])).square()
        found = nn.spectral_loss(x, y, dim, quantity=quantity)
        torch.testing.assert_close(found, apart.mean(), rtol=1e-10, atol=0)
        found = nn.spectral_loss(x, y, dim, quantity=quantity, reduction="sum")
        torch.testing.assert_close(found, apart.sum(), rtol=1e-10, atol=0)
    if dim != (-1,):
        return
    weight = torch.rand(6, 1, dtype=torch.float64)
    expected = ((full[0] - full[1]).square() * weight).sum() / weight.expand_as(x).sum()
    torch.testing.assert_close(nn.spectral_loss(x, y, dim, weight=weight), expected, rtol=1e-10, atol=0)


def test_segmentation_losses_are_monais():
    torch.manual_seed(0)
    x, labels = torch.randn(2, 3, 5, 6, 7, dtype=torch.float64), torch.randint(0, 3, (2, 5, 6, 7))
    p, truth = x.softmax(1), F.one_hot(labels, 3).movedim(-1, 1).double()
    for over_batch in (False, True):
        found = nn.dice_loss(p, truth, over_batch=over_batch)
        torch.testing.assert_close(found, DiceLoss(batch=over_batch)(p, truth), rtol=1e-12, atol=0)
        found = nn.tversky_loss(p, truth, alpha=0.3, beta=0.7, over_batch=over_batch)
        expected = TverskyLoss(alpha=0.3, beta=0.7, batch=over_batch)(p, truth)
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
    found = nn.focal_loss(x, truth, gamma=1.5, alpha=0.3)
    torch.testing.assert_close(found, FocalLoss(gamma=1.5, alpha=0.3)(x, truth).double(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9, 1.0, 2.0])
def test_gradients_of_focal_loss_are_finite_where_the_answer_is_certain(gamma):
    x = torch.tensor([20.0, -110.0, 1.0, -3.0], requires_grad=True)  # the sigmoid of the first is 1 in float32
    truth = torch.tensor([1.0, 0.0, 1.0, 0.0])
    nn.focal_loss(x, truth, gamma=gamma).backward()
    exact = x.detach().double().requires_grad_()
    nn.focal_loss(exact, truth.double(), gamma=gamma).backward()
    torch.testing.assert_close(x.grad, exact.grad.float(), rtol=1e-5, atol=1e-6)


def _of_displacements(loss, x):
    return loss(x * 1)


@pytest.mark.filterwarnings("ignore:Using a non-tuple sequence")  # of MONAI, on plain tensors
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", [BendingEnergyLoss, DiffusionLoss])
def test_monais_losses_of_displacements(kind, normalize):
    x = torch.randn(2, 3, 7, 6, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    meshes = [{"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}]
    loss = functools.partial(_of_displacements, kind(normalize=normalize))
    assert_same_on_every_mesh(loss, x, meshes, spec=(None, None, "lat", "lon", None))


def test_weights_of_voxels_are_voxels_that_stand_there_as_often():
    torch.manual_seed(0)
    p, truth = torch.rand(1, 2, 4, dtype=torch.float64), (torch.rand(1, 2, 4) > 0.5).double()
    often = torch.tensor([1, 3, 0, 2])
    for loss in (nn.dice_loss, nn.focal_loss, functools.partial(nn.tversky_loss, alpha=0.2, beta=0.8)):
        repeated = loss(p.repeat_interleave(often, -1), truth.repeat_interleave(often, -1))
        torch.testing.assert_close(loss(p, truth, weight=often), repeated, rtol=1e-12, atol=0)


def test_a_volume_in_half_precision_has_room():
    p = torch.full((1, 1, 70, 40, 40), 1.0, dtype=torch.float16)
    assert nn.dice_loss(p, p).item() == pytest.approx(0, abs=1e-6)
    assert nn.focal_loss(p, p).dtype == torch.float32


def test_what_is_refused():
    for loss in (nn.dice_loss, nn.tversky_loss, nn.focal_loss, nn.spectral_loss):
        with pytest.raises(ShardingError, match=r"input \(1, 2, 4\) and target \(1, 1, 4\) must have one shape"):
            loss(torch.ones(1, 2, 4), torch.ones(1, 1, 4))
    with pytest.raises(ShardingError, match=r"input \(2, 4\) must be \[batch, class, \*space\]; unsqueeze it"):
        nn.dice_loss(torch.ones(2, 4), torch.ones(2, 4))
    with pytest.raises(ValueError, match=r"spectral_loss\(quantity='energy'\): use one of amplitude, power, log_power"):
        nn.spectral_loss(torch.ones(4), torch.ones(4), quantity="energy")
