"""Activations, adaptive pools, patches, sampling and statistics on tiles against the whole tensor."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.testing.oracle import random_functional
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 1}, {"lat": 3}, {"lat": 2, "lon": 2}]


def _loss(outputs):
    return random_functional([y if y.is_floating_point() else y.to(torch.float64) for y in outputs.values()])


def _unpooled(x, *args, **options):
    y, places = F.max_pool2d(x, *args, return_indices=True, **options)
    return F.max_unpool2d(y, places, *args, **options, output_size=x.shape[2:])


COMPLEX = torch.randn(4, 3, 3, 3, dtype=torch.complex128, generator=torch.Generator().manual_seed(2))

FUNCTIONS = {
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "softmin": lambda x: F.softmin(x, 2),
    "threshold": lambda x: F.threshold(x, 0.1, 20.0),
    "threshold_": lambda x: F.threshold_(x * 1, 0.1, 20.0),
    "rrelu": F.rrelu,
    "glu": lambda x: F.glu(x[:, :, :6], 2) * F.glu(x[:, :2], 1).mean((2, 3), keepdim=True),
    "glu of columns": lambda x: F.glu(x, 3),
    "aliases": lambda x: torch.subtract(torch.multiply(x, torch.absolute(x)), x.arctan()).negative_(),
    "comparisons": lambda x: torch.not_equal(x, 0.0).double() * torch.greater(x, x * 0.5).byte() * x,
    "special": lambda x: torch.special.erf(x) * torch.special.i1(x) + torch.special.softmax(x, 2),
    "hardtanh and more": lambda x: F.hardtanh(x) * F.celu(x) * F.mish(x) * F.selu(x) * F.hardshrink(x),
    "adaptive avg": lambda x: F.adaptive_avg_pool2d(x, (3, 4)),
    "adaptive avg, more": lambda x: F.adaptive_avg_pool2d(x, (9, 1)),
    "adaptive avg of one": lambda x: F.adaptive_avg_pool1d(x[0], 7),
    "adaptive max": lambda x: F.adaptive_max_pool2d(x, (3, 4)),
    "adaptive max of all": lambda x: F.adaptive_max_pool2d(F.relu(x - 1.5), 1),
    "adaptive max along lon": lambda x: F.adaptive_max_pool2d(x.round(), (None, 7)),
    "adaptive max of equal ones": lambda x: F.adaptive_max_pool2d((x > 0) + (x - x.detach()), 1),
    "adaptive max of equal rows": lambda x: F.adaptive_max_pool2d((x > 0) + (x - x.detach()), (2, 1)),
    "adaptive max of equal columns": lambda x: F.adaptive_max_pool2d((x > 0) + (x - x.detach()), (1, 3)),
    "area": lambda x: F.interpolate(x, (5, 3), mode="area"),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "unfold, strided": lambda x: F.unfold(x, (2, 3), stride=(2, 1), dilation=(1, 2)),
    "fold": lambda x: F.fold(F.unfold(x, 3, padding=1, stride=2) * 2, (7, 10), 3, padding=1, stride=2),
    "conv of complex numbers": lambda x: torch.view_as_real(
        F.conv2d(torch.complex(x, x.sin()), COMPLEX, COMPLEX[:, 0, 0, 0], stride=2, padding=1)
    ),
    "conv_transpose of complex numbers": lambda x: torch.view_as_real(
        F.conv_transpose2d(torch.complex(x, x.sin()), COMPLEX.mT[:3], stride=2)
    ),
    "Tensor.unfold": lambda x: x.unfold(2, 3, 2).unfold(3, 2, 2),
    "lp_pool": lambda x: F.lp_pool2d(x, 2, 2) + F.lp_pool2d(x.abs(), 3.0, 2, 2),
    "unpool": lambda x: _unpooled(x, 2),
    "unpool, overlapping": lambda x: _unpooled(x, 3, stride=2, padding=1),
    "local_response_norm": lambda x: F.local_response_norm(x, 2) + F.local_response_norm(x.transpose(1, 2), 3).sum(),
    "prelu": lambda x: F.prelu(x, torch.tensor([0.25, -0.5, 2.0], dtype=x.dtype)),
    "one_hot": lambda x: F.one_hot((x.detach().sigmoid() * 4).long(), 4) * x[..., None],
    "one_hot of all classes": lambda x: F.one_hot((x.detach().sigmoid() * 4).long()).sum(-1) * x,
    "bucketize": lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5, dtype=x.dtype)) * x,
    "searchsorted": lambda x: torch.searchsorted(torch.linspace(-1, 1, 5, dtype=x.dtype), x, right=True) * x,
    "isin": lambda x: torch.isin((x * 2).round(), torch.tensor([0.0, 2.0], dtype=x.dtype)) * x,
    "new tiles": lambda x: (
        (x.new_zeros(x.shape) + x.new_ones(3, 1, 10) * x + x.new_full((1,), 3.0)) * x.new_tensor(2.0)
    ),
    "grid_sample": lambda x: F.grid_sample(x, (x[:, :2] * 0.4).permute(0, 2, 3, 1), align_corners=False),
    "grid_sample at plain places": lambda x: F.grid_sample(
        x,
        F.affine_grid(torch.eye(2, 3, dtype=x.dtype).expand(2, 2, 3) * 0.8, (2, 3, 5, 6), align_corners=True),
        mode="bicubic",
        padding_mode="border",
        align_corners=True,
    ),
    "affine_grid": lambda x: F.affine_grid(x[:, :2, 0, :3], (2, 3, 4, 5), align_corners=False),
    "pairwise_distance": lambda x: F.pairwise_distance(x, x.flip(1)),
    "cosine_similarity": lambda x: F.cosine_similarity(x, x.square(), 2),
}


def _run(names, x):
    found, failed = {}, []
    for name in names:
        try:
            found[name] = FUNCTIONS[name](x)
        except Exception as error:
            failed.append(f"{name}: {error!r}")
    assert not failed, "\n".join(failed)
    return found


def test_functions_are_answered_as_by_the_whole_tensor():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 7, 10)
    assert_same_on_every_mesh(functools.partial(_run, list(FUNCTIONS)), x, MESHES, spec=SPACE, loss=_loss)


class _Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.prelu = nn.PReLU(3)
        self.norm = nn.InstanceNorm2d(3, affine=True, track_running_stats=True)
        self.batch = nn.BatchNorm2d(3)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Conv2d(3, 3, 3, padding=1))
        self.weighted = nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 3, 1))
        self.table = nn.Embedding(5, 3, padding_idx=1)

    def __reduce__(self):  # parametrized modules are not pickled
        return _remade, (self.state_dict(), self.training)

    def forward(self, x):
        y = self.weighted(self.spectral(self.prelu(self.norm(self.batch(x)))))
        codes = (x.detach()[:, 0].sigmoid() * 5).long()
        return y + self.table(codes).movedim(-1, 1)


def _remade(state, training):
    model = _Layers().double().train(training)
    model.load_state_dict(state)
    return model


@pytest.mark.parametrize("training", [True, False])
def test_layers_with_weights_and_statistics(training):
    torch.manual_seed(0)
    model = _Layers().train(training)
    assert_same_on_every_mesh(model, torch.randn(2, 3, 7, 10), MESHES[1:], spec=SPACE)


@pytest.mark.parametrize("norm", [nn.BatchNorm2d(5), nn.InstanceNorm2d(5, track_running_stats=True)])
def test_running_statistics_of_cut_channels_and_batches(norm):
    torch.manual_seed(0)
    assert_same_on_every_mesh(
        norm.train(), torch.randn(3, 5, 4, 4), [{"lat": 2, "lon": 2}], spec=("lon", "lat", None, None)
    )


DRAWS = {
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 2, 9),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "uniform_": lambda x: torch.zeros_like(x).uniform_(-1, 2),
    "normal_": lambda x: x.new_zeros(x.shape).normal_(1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2.0),
    "random_": lambda x: torch.empty_like(x).random_(3, 7),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.3),
    "normal": lambda x: torch.normal(x, 0.1),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, True),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=2),
    "hard gumbel_softmax": lambda x: F.gumbel_softmax(x, hard=True, dim=2),
}


def _drawn(**axes):
    mesh = world_mesh(**axes)
    torch.manual_seed(0)
    tile = shard(torch.randn(2, 3, 7, 10, dtype=torch.float64), mesh, SPACE)
    tile.local.requires_grad_()
    torch.manual_seed(1)
    found = {name: draw(tile) for name, draw in DRAWS.items()}
    assert all(type(y) is Tile and y.layout == tile.layout for y in found.values())
    sum(y.square().sum() for y in found.values() if y.requires_grad).backward()
    return {name: y.detach().full_tensor() for name, y in {**found, "gradient": tile.grad}.items()}


@on_ranks(1)
def _drawn_alone():
    return _drawn(lat=1)


@on_ranks(4)
def _drawn_in_parts():
    return [_drawn(lat=4), _drawn(lat=2, lon=2)]


def test_random_numbers_are_those_of_the_place_on_every_mesh():
    (alone,) = _drawn_alone()
    for by_mesh in _drawn_in_parts():
        for found in by_mesh:
            for name, y in found.items():
                torch.testing.assert_close(y, alone[name], rtol=1e-12, atol=1e-12, msg=name)
    one = torch.ones(2, 3, 10, dtype=torch.float64)
    torch.testing.assert_close(alone["hard gumbel_softmax"].sum(2), one)
    torch.testing.assert_close(alone["gumbel_softmax"].sum(2), one)
    assert set(alone["randint_like"].unique().tolist()) == set(range(2, 9))
    assert -1 <= alone["uniform_"].min() < 0 and 1 < alone["uniform_"].max() < 2
    assert abs(alone["normal_"].mean() - 1) < 0.3 and abs(alone["normal_"].std() - 2) < 0.2
    assert abs(alone["exponential_"].mean() - 0.5) < 0.1 and abs(alone["bernoulli_"].mean() - 0.3) < 0.08


def test_random_numbers_of_an_empty_tile_are_none():
    tile = shard(torch.rand(0, 3), jigsaw.init_mesh(lat=1), ("lat", None))
    for draw in (torch.bernoulli, torch.rand_like, F.dropout):
        assert draw(tile).shape == (0, 3)


def _without_bytes(x):
    """Torch rounds images of bytes after each dim; they are refused along cut dims."""
    return x.double() if x.dtype == torch.uint8 else x


KERNELS = {
    "unfold": lambda x: F.unfold(x, 2),
    "conv": lambda x: F.conv2d(x, torch.ones(3, 4, 2, 2, dtype=x.dtype)),
    "conv_transpose": lambda x: F.conv_transpose2d(x, torch.ones(4, 3, 2, 2, dtype=x.dtype)),
    "conv by another dtype": lambda x: F.conv2d(x, torch.ones(3, 4, 2, 2)),
    "avg_pool": lambda x: F.avg_pool2d(x, 2),
    "avg_pool of volumes": lambda x: F.avg_pool3d(x, 1),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x, 2),
    "adaptive_max_pool": lambda x: F.adaptive_max_pool2d(x, 2),
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": F.instance_norm,
    "bilinear": lambda x: F.bilinear(x, x, torch.ones(2, 5, 5)),
    "bilinear of one dtype": lambda x: F.bilinear(x, x, torch.ones(2, 5, 5, dtype=x.dtype)),
    "adaptive_avg_pool of volumes": lambda x: F.adaptive_avg_pool3d(x, (1, 2, None)),
    "adaptive_avg_pool of all": lambda x: F.adaptive_avg_pool3d(x, 1),
    "nearest": lambda x: F.interpolate(x, (7, 3)),
    "nearest by a factor": lambda x: F.interpolate(x, scale_factor=1.5),
    "bilinear images": lambda x: F.interpolate(_without_bytes(x), (7, 3), mode="bilinear"),
    "antialiased images": lambda x: F.interpolate(_without_bytes(x), (7, 3), mode="bilinear", antialias=True),
    "bicubic images": lambda x: F.interpolate(_without_bytes(x), scale_factor=2, mode="bicubic", align_corners=True),
    "trilinear volumes": lambda x: F.interpolate(_without_bytes(x[None]), scale_factor=2, mode="trilinear"),
    "pad by reflection": lambda x: F.pad(x, (1, 1, 2, 0), "reflect"),
    "pad by the ends": lambda x: F.pad(x, (1, 1, 2, 0), "replicate"),
    "pad by a number": lambda x: F.pad(x, (1, 1, 2, 0), value=1),
    "grid_sample": lambda x: F.grid_sample(x, torch.zeros(2, 3, 5, 2, dtype=x.dtype), align_corners=False),
    "grid_sample by another dtype": lambda x: F.grid_sample(x, torch.zeros(2, 3, 5, 2), align_corners=False),
    "attention": lambda x: F.scaled_dot_product_attention(x, x, x),
    "attention with a mask": lambda x: F.scaled_dot_product_attention(x, x, x, torch.ones(4, 4).tril().bool()),
    "gather by a byte": lambda x: x.gather(1, torch.zeros(2, 1, 4, 5, dtype=torch.uint8)),
    "gather by half a number": lambda x: x.gather(1, torch.zeros(2, 1, 4, 5, dtype=torch.int32)),
    "take_along_dim by a byte": lambda x: torch.take_along_dim(x, torch.zeros(2, 1, 4, 5, dtype=torch.uint8), 1),
    "bucketize": lambda x: torch.bucketize(x, torch.arange(3).to(x.dtype)),
    "searchsorted": lambda x: torch.searchsorted(x, x),
    "matmul": lambda x: x @ x.mT,
    "matmul by a matrix": lambda x: torch.matmul(x, torch.ones(5, 3, dtype=x.dtype)),
    "einsum": lambda x: torch.einsum("bcij,bcik->bjk", x, x),
    "tensordot": lambda x: torch.tensordot(x, x, ([0, 3], [0, 3])),
    "linear": lambda x: F.linear(x, torch.ones(3, 5, dtype=x.dtype)),
    "index_reduce": lambda x: x.index_reduce(1, torch.tensor([0, 2]), x[:, :2], "amax"),
    "scatter_reduce": lambda x: x.scatter_reduce(1, torch.zeros(2, 1, 4, 5, dtype=torch.int64), x[:, :1], "amax"),
}

KERNELS_OF_FEWER_DIMS = {
    "max_pool": (3, lambda x: F.max_pool1d(x, 2)),
    "max_pool with places": (3, lambda x: F.max_pool1d(x, 2, return_indices=True)[0]),
    "bmm": (3, lambda x: torch.bmm(x, x.mT)),
    "baddbmm": (3, lambda x: torch.baddbmm(x[:, :, :4], x, x.mT)),
    "mm": (2, lambda x: torch.mm(x, x.mT)),
    "mv": (2, lambda x: x.mv(torch.ones(5, dtype=x.dtype))),
    "addmm": (2, lambda x: torch.addmm(x[:, :4], x, x.mT)),
    "matmul of vectors": (1, lambda x: x @ x),
}


@on_ranks(2)
def test_a_dtype_that_torch_refuses_is_refused_where_a_rank_has_no_rows():
    mesh = world_mesh(lat=2)
    cuts = ((3, (0, 5, 5)), (0, (0, 0, 2)), (1, (0, 4, 4)), (2, (0, 0, 4)))
    cases = [(name, 4, function) for name, function in KERNELS.items()]
    refused = set()
    cases += [(name, *case) for name, case in KERNELS_OF_FEWER_DIMS.items()]
    for dtype in (torch.uint8, torch.int64, torch.bool, torch.complex128, torch.float64):
        x = torch.ones(2, 4, 4, 5).to(dtype)
        for at, (name, ndim, function) in enumerate(cases):
            try:
                expected = function(x[(0,) * (4 - ndim)])
            except RuntimeError:
                expected = None
            # what torch answers is cut once
            for dim, points in cuts if expected is None else cuts[at % 4 :][:1]:
                tile = shard(x, mesh, [None if d != dim else "lat" for d in range(4)], split={dim: points})
                tile = tile[(0,) * (4 - ndim)] if ndim < 4 else tile
                case = f"{name} {dtype} {dim}"
                if expected is None:
                    with comm.count() as counted, pytest.raises(RuntimeError):
                        function(tile)
                        pytest.fail(case)
                    assert not counted.calls, case
                    continue
                try:
                    found = function(tile)
                except ShardingError:
                    refused.add((name, dtype.is_floating_point or dtype.is_complex))
                    continue
                found = found.full_tensor() if isinstance(found, Tile) else found
                torch.testing.assert_close(found, expected, msg=case)
    # along a cut dim the core adds up floating numbers alone
    assert refused <= {(name, False) for name in ("mm", "linear", "matmul by a matrix", "addmm")}


@on_ranks(2)
def test_what_stays_refused():
    mesh = world_mesh(lat=2)
    tile = shard(torch.rand(2, 3, 6, 4), mesh, (None, None, "lat", None))
    leaf = shard(torch.rand(6, 4), mesh, ("lat", None))
    leaf.local.requires_grad_()
    index = shard(torch.arange(6), mesh, ("lat",))
    calls = (
        (lambda: torch.bernoulli(tile, generator=torch.Generator()), ShardingError, "generator.*manual_seed"),
        (lambda: F.embedding(index, torch.ones(6, 2), max_norm=1.0), ShardingError, "max_norm.*leave them out"),
        (lambda: F.interpolate(tile.byte(), scale_factor=2, mode="bilinear"), ShardingError, r"uint8.*tile.float\(\)"),
        (lambda: F.fractional_max_pool2d(tile, 2, output_size=2), ShardingError, "fractional.*random"),
        (lambda: F.adaptive_max_pool2d(tile, 2, return_indices=True), ShardingError, "return_indices=True"),
        (lambda: F.glu(tile, 1), RuntimeError, "must be even"),
        (lambda: leaf.__setitem__(0, 1.0), RuntimeError, "leaf Variable"),
        (lambda: leaf.detach().__setitem__(9, 1.0), IndexError, "out of range"),
        (lambda: leaf.detach().__setitem__(0, torch.ones(3)), ShardingError, "do not broadcast"),
        (lambda: tile[:, :, ::-1], ValueError, "greater than zero"),
        (lambda: tile[:, :, [6]], IndexError, "out of range"),
        (lambda: tile[torch.ones(2)], IndexError, "integers or bools"),
        (lambda: tile.gather(2, torch.zeros(2, 3, 1, 5, dtype=torch.int64)), RuntimeError, "larger than the Tile"),
    )
    with comm.count() as counted:
        for call, error, words in calls:
            with pytest.raises(error, match=words):
                call()
    assert counted.calls == []


@pytest.mark.parametrize("wrong", [1.5, -0.5, torch.nan])
def test_random_numbers_of_no_distribution_are_refused(wrong):
    mesh = world_mesh(lat=1)
    values = torch.tensor([[0.5, 0.25], [0.5, wrong]])
    tile = shard(values, mesh, ("lat", None))
    functions = [torch.bernoulli, lambda x: torch.zeros_like(x).bernoulli_(x)]
    if wrong < 1:
        functions += [lambda x: torch.normal(0.0, x)]
    if not wrong > 1:
        functions += [lambda x: torch.multinomial(x, 1), lambda x: torch.multinomial(x, 2, replacement=True)]
    for function in functions:
        for x in (values, tile):
            with pytest.raises(RuntimeError):
                function(x)
    nothing = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    for x in (nothing, shard(nothing, mesh, ("lat", None))):
        with pytest.raises(RuntimeError, match="multinomial"):
            torch.multinomial(x, 1)
    torch.normal(0.0, shard(nothing, mesh, ("lat", None)))
