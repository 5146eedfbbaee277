"""Fourier transforms of tiles against those of the whole tensor: forward, gradients, where results lie, bytes."""

from __future__ import annotations

import math
from itertools import pairwise, product
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jigsaw import comm
from jigsaw.comm import exchange
from jigsaw.geometry import transfers
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.transfers import layouts_between, plan_exchange
from jigsaw.ops.fourier import TransformKind, plan_transform
from jigsaw.parallel.parallelize import parallelize
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, run_on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 2}, {"lon": 3}, {"lat": 4}, {"lat": 2, "lon": 2}]
NORMS = (None, "forward", "backward", "ortho")
REAL = ("rfft", "ihfft", "fft", "irfft")
COMPLEX = ("fft", "ifft", "irfft", "hfft")


def _every_norm(x, names):
    """Each family in 1, 2 and n dims, with norms and dims that take turns."""
    ways = [
        *(("", {"dim": d}) for d in (-1, 2, 0)),
        *(("2", {"dim": d}) for d in ((-2, -1), (1, 3))),
        *(("n", {"dim": d}) for d in (None, (3, 1, 2), (2,))),
    ]
    return {
        (name + ending, i): getattr(torch.fft, name + ending)(x, norm=NORMS[i % 4], **how)
        for name in names
        for i, (ending, how) in enumerate(ways)
    }


def _of_real(x):
    return _every_norm(x, REAL)


def _of_complex(x):
    return _every_norm(x, COMPLEX)


@pytest.mark.parametrize("function", [_of_real, _of_complex])
def test_transforms(function):
    torch.manual_seed(0)
    x = torch.randn(2, 4, 7, 10, dtype=torch.complex64 if function is _of_complex else torch.float32)
    assert_same_on_every_mesh(function, x, MESHES, spec=SPACE)


@pytest.mark.parametrize("axes", [{"lat": 2, "lon": 2}, {"lat": 2, "lon": 3}])
def test_transforms_whose_axes_go_one_after_the_other(axes):
    run_on_ranks(math.prod(axes.values()), _transforms_in_two_rounds, axes)


def _transforms_in_two_rounds(axes):
    mesh, rounds = world_mesh(**axes), []
    plan_transform.cache_clear()

    def noted(source, target):
        rounds.append(layouts_between(source, target))
        return rounds[-1]

    with mock.patch.object(transfers, "MOST_PEERS_AT_ONCE", 1), mock.patch.object(exchange, "layouts_between", noted):
        x = torch.randn(1, 3, 7, 10, dtype=torch.float64)
        whole = x.clone().requires_grad_()
        tile = shard(x, mesh, SPACE)
        tile.local.requires_grad_()
        for run in (
            lambda v: torch.fft.irfft2(torch.fft.rfft2(v)[..., :3] * (2 + 1j), s=v.shape[-2:]),
            lambda v: torch.fft.fft2(v * (1 + 0.5j)).abs(),
        ):
            expected, found = run(whole), run(tile)
            weights = torch.randn(expected.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
            torch.testing.assert_close(found.full_tensor(), expected)
            (expected * weights).sum().backward()
            (found * weights).sum().backward()
    plan_transform.cache_clear()
    assert any(rounds)
    grad = Tile(tile.local.grad, tile.layout, mesh).full_tensor()
    torch.testing.assert_close(grad, whole.grad)


def test_a_rank_of_a_thousand_sends_to_those_along_one_axis_at_a_time():
    """At once it would send 1023 messages."""
    x = Layout.of((1, 64, 721, 1440), SPACE, (("lat", 32), ("lon", 32)))
    steps = [
        x,
        *(layout for layout, _ in plan_transform(x, x, TransformKind("fftn", "fftn"), (2, 3), (721, 1440)).steps),
    ]
    assert max(len(plan_exchange(*step, (15, 17)).sends) for step in pairwise(steps)) == 1023
    for source, target in pairwise(steps):
        for step in pairwise([source, *layouts_between(source, target), target]):
            assert len(plan_exchange(*step, (15, 17)).sends) <= 31


@on_ranks(2)
def test_transforms_of_narrow_tiles_under_autocast_are_those_of_float32():
    x = torch.randn(2, 4, 8, 6, generator=torch.Generator().manual_seed(0)).bfloat16()
    tile = shard(x, world_mesh(lat=2), (None, None, "lat", None))
    with torch.autocast("cpu", torch.bfloat16):
        for name in ("rfftn", "fft2", "hfft", "ifft"):
            whole, found = (getattr(torch.fft, name)(given) for given in (x, tile))
            assert found.dtype == whole.dtype
            torch.testing.assert_close(found.full_tensor(), whole)


def _padded_and_trimmed(x):
    f = torch.fft
    found = {}
    for n in (1, 6, 13):
        for d in (2, 3):
            found |= {(name, n, d): getattr(f, name)(x, n, d) for name in ("fft", "ifft", "rfft", "irfft", "hfft")}
    for s in ((4, 16), (12, 3), (-1, 7)):
        found |= {(name, s): getattr(f, name)(x, s=s) for name in ("fft2", "rfft2", "irfft2", "hfft2", "ihfft2")}
        found["rfftn", s] = f.rfftn(x, s)
        found["back", s] = f.irfftn(f.rfftn(x, dim=(2, 3))[..., :3, :4], s=s if min(s) > 0 else None, dim=(2, 3))
    return found


@pytest.mark.slow
def test_n_and_s_pad_and_trim():
    torch.manual_seed(0)
    assert_same_on_every_mesh(_padded_and_trimmed, torch.randn(1, 3, 7, 10), MESHES, spec=SPACE)


def _of_few_rows(x):
    return {
        **{name: getattr(torch.fft, name)(x) for name in ("rfft2", "fft2", "irfft2", "rfft", "fftn", "hfft", "ihfftn")},
        "lines": torch.fft.rfft(x[0, 0, :, 0]),
        "line and back": torch.fft.irfft(torch.fft.rfft(x[0, :1, :, 0], norm="ortho"), n=x.shape[2], norm="ortho"),
        "there and back": x + torch.fft.irfft2(torch.fft.rfft2(x), s=tuple(x.shape[-2:])),
    }


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1, 3, 2), (1, 2, 13, 3), (3, 1, 1, 9)])
def test_fewer_rows_than_ranks(shape):
    torch.manual_seed(0)
    assert_same_on_every_mesh(_of_few_rows, torch.randn(shape), MESHES, spec=SPACE)


def _in_three_dims(x):
    f = torch.fft
    modes = f.rfftn(x, dim=(2, 3, 4), norm="ortho")
    return {
        "modes": modes,
        "residual": x + f.irfftn(modes * (2 + 1j), s=tuple(x.shape[2:]), dim=(2, 3, 4), norm="ortho"),
        "complex": x + torch.real(f.fftn(x, dim=(-3, -2, -1))),
        "two of three": f.irfft2(f.rfft2(x, dim=(2, 4)), dim=(2, 4)),
    }


def test_three_dims():
    torch.manual_seed(0)
    meshes = [{"z": 4}, {"z": 2, "x": 2}, {"y": 2, "x": 2}]
    x = torch.randn(1, 2, 5, 6, 8)
    assert_same_on_every_mesh(_in_three_dims, x, meshes, spec=(None, None, "z", "y", "x"))


def _of_tokens(x):
    tokens = x.flatten(2).transpose(1, 2)
    mixed = tokens + torch.real(torch.fft.fft(torch.fft.fft(tokens, dim=-1), dim=-2))  # FNet's mixing
    return {"mixed": mixed, "real": torch.fft.rfft(tokens, dim=1), "both": torch.real(torch.fft.fft2(tokens))}


def test_tokens_flattened_from_two_cut_dims():
    torch.manual_seed(0)
    assert_same_on_every_mesh(_of_tokens, torch.randn(2, 4, 6, 8), MESHES, spec=SPACE)


def _shifted(x):
    f = torch.fft
    return {
        **{("there", d): f.fftshift(x, d) for d in (None, -1, (2, 3), (1, 2))},
        **{("back", d): f.ifftshift(x, d) for d in (None, 2, (2, 3), (0, 3))},
        "modes": f.ifftshift(f.fftshift(f.rfft2(x), dim=(-2,)), dim=(-2,)),
    }


def test_shifts():
    torch.manual_seed(0)
    assert_same_on_every_mesh(_shifted, torch.randn(2, 3, 7, 9), MESHES, spec=SPACE)


def test_a_halo_is_left_out_along_transformed_dims():
    torch.manual_seed(0)
    x = torch.randn(1, 4, 9, 10)
    assert_same_on_every_mesh(_of_few_rows, x, MESHES, spec=SPACE, halo={2: 1, 3: (1, 2)}, periodic=[3])


@on_ranks(2)
def test_a_halo_of_other_dims_stays():
    mesh = world_mesh(lat=2)
    x = torch.randn(2, 9, 10, dtype=torch.float64)
    tile = shard(x, mesh, (None, "lat", None), halo={1: 1, 2: 1}, periodic=[2])
    with comm.count() as traffic:
        modes = torch.fft.rfft(tile)
    start, stop = tile.layout.held(tile.coordinate)[1]
    torch.testing.assert_close(modes.local, torch.fft.rfft(x)[:, start:stop])
    assert traffic.sent_bytes == 0


# -- nets -------------------------------------------------------------------------------------------------------------


class FourierLayer(nn.Module):
    """A block of a Fourier neural operator: low modes of two corners, multiplied by complex weights."""

    def __init__(self, width, modes):
        super().__init__()
        self.modes = modes
        shape = (width, width, modes, modes)
        self.low = nn.Parameter(torch.randn(shape, dtype=torch.complex64))
        self.high = nn.Parameter(torch.randn(shape, dtype=torch.complex64))
        self.skip = nn.Conv2d(width, width, 1)

    def forward(self, x):
        m = self.modes
        x_ft = torch.fft.rfft2(x, norm="ortho")
        low = torch.einsum("bixy,ioxy->boxy", x_ft[:, :, :m, :m], self.low)
        high = torch.einsum("bixy,ioxy->boxy", x_ft[:, :, -m:, :m], self.high)
        between = torch.zeros_like(x_ft[:, :, m:-m, :m])
        y = torch.fft.irfft2(torch.cat([low, between, high], 2), s=tuple(x.shape[-2:]), norm="ortho")
        return x + F.gelu(y + self.skip(x))


class AdaptiveFilter(nn.Module):
    """A block of an adaptive Fourier neural operator: channels last, in blocks, soft shrinkage of the modes."""

    def __init__(self, blocks, size):
        super().__init__()
        self.blocks, self.size = blocks, size
        self.w = nn.Parameter(torch.randn(2, blocks, size, size))
        self.b = nn.Parameter(torch.randn(2, blocks, size))

    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        b, h, w, c = x.shape
        modes = torch.fft.rfft2(x, dim=(1, 2), norm="ortho").reshape(b, h, w // 2 + 1, self.blocks, self.size)
        real, imag = torch.real(modes), torch.imag(modes)

        def mix(y, part):
            return torch.einsum("...bi,bio->...bo", y, self.w[part])

        one = F.relu(mix(real, 0) - mix(imag, 1) + self.b[0])
        other = F.relu(mix(imag, 0) + mix(real, 1) + self.b[1])
        modes = torch.view_as_complex(F.softshrink(torch.stack([one, other], dim=-1), lambd=0.01))
        modes = modes.reshape(b, h, w // 2 + 1, c)
        return x + torch.fft.irfft2(modes, s=(h, w), dim=(1, 2), norm="ortho")


class SphericalFilter(nn.Module):
    """Fourier along longitude, a matrix of each mode over latitude, a weight a degree, and the same back."""

    def __init__(self, lat, lon, degrees, orders):
        super().__init__()
        self.lon, self.orders = lon, orders
        self.register_buffer("table", torch.randn(orders, degrees, lat))
        self.weight = nn.Parameter(torch.randn(3, 3, degrees, dtype=torch.complex64))

    def forward(self, x):
        modes = torch.view_as_real(2 * math.pi * torch.fft.rfft(x, dim=-1, norm="forward"))
        parts = [torch.einsum("...km,mlk->...lm", modes[..., : self.orders, i], self.table) for i in (0, 1)]
        coefficients = torch.view_as_complex(torch.stack(parts, dim=-1))
        coefficients = torch.view_as_real(torch.einsum("bilm,iol->bolm", coefficients, self.weight))
        parts = [torch.einsum("...lm,mlk->...km", coefficients[..., i], self.table) for i in (0, 1)]
        return torch.fft.irfft(torch.view_as_complex(torch.stack(parts, -1)), n=self.lon, dim=-1, norm="forward")


@pytest.mark.parametrize(
    "net", [FourierLayer(3, 3), AdaptiveFilter(2, 2), SphericalFilter(9, 14, 5, 6)], ids=lambda n: type(n).__name__
)
def test_nets(net):
    torch.manual_seed(0)
    channels = 4 if isinstance(net, AdaptiveFilter) else 3
    assert_same_on_every_mesh(net, torch.randn(2, channels, 9, 14), MESHES, spec=SPACE)


def test_complex_weights_through_parallelize():
    torch.manual_seed(0)
    x = torch.randn(1, 3, 9, 14)
    assert_same_on_every_mesh(FourierLayer(3, 3), x, MESHES[2:], spec=SPACE, build=parallelize)


# -- where results lie, and bytes -------------------------------------------------------------------------------------


@on_ranks(4)
def test_modes_stay_cut_and_the_inverse_comes_home():
    f = torch.fft
    cases = [
        ({"lat": 4}, {2: (0, 5, 9, 10, 32)}, (None, None, None, ("lat",))),
        ({"lon": 4}, {3: (0, 5, 9, 10, 64)}, (None, None, None, ("lon",))),
        ({"lat": 2, "lon": 2}, {2: (0, 5, 32), 3: (0, 40, 64)}, (None, None, None, ("lat", "lon"))),
    ]
    for axes, split, of_modes in cases:
        tile = shard(torch.randn(1, 8, 32, 64), world_mesh(**axes), SPACE, split=split)
        modes = f.rfft2(tile)
        assert [modes.layout.dim_axes(d) for d in range(4)] == [axes or () for axes in of_modes]
        low = modes[:, :, :12, :12]
        for back in (
            f.irfft2(modes),
            f.irfft2(low, s=(32, 64)),
            f.fft2(tile),
            f.irfft(f.rfft(tile)),
            f.fft(tile, dim=2),
        ):
            assert [(c.points, c.axes) for c in back.layout.cuts] == [(c.points, c.axes) for c in tile.layout.cuts]


def test_axes_come_home_on_every_mesh():
    """In integers, without ranks: real transforms over three dims and back, on meshes of up to three axes."""
    forward = TransformKind("rfftn", "fftn", makes_half=True)
    backward = TransformKind("irfftn", "ifftn", takes_half=True)
    for z, y, x, spec in product(
        (1, 2, 3), (1, 4), (1, 2), (("z", "y", "x"), (("z", "x"), "y", None), (None, "x", "z"))
    ):
        before = Layout.of((2, 5, 6, 9), (None, *spec), {"z": z, "y": y, "x": x})
        there = plan_transform(before, before, forward, (1, 2, 3), (5, 6, 5))
        back = plan_transform(there.out, there.out, backward, (1, 2, 3), (5, 6, 9))
        for plan in (there, back):
            for layout, dims in plan.steps:
                assert not any(layout.is_cut(d) for d in dims)
                assert set(layout.cut_axes) == set(before.cut_axes)
        assert len(there.steps) <= 4
        assert [(c.points, c.axes) for c in back.out.cuts] == [(c.points, c.axes) for c in before.cuts]


def _sent(function):
    with comm.count() as traffic:
        out = function()
    return out, traffic.sent_bytes, traffic.messages


@on_ranks(4)
def test_bytes_of_bands():
    tile = shard(torch.randn(1, 8, 32, 64), world_mesh(lat=4), (None, None, "lat", None))
    tile.local.requires_grad_()
    (place,) = tile.coordinate
    columns = (9, 8, 8, 8)[place]
    # rows of 33 modes in complex64: 8 channels and 8 rows a rank, all but this rank's own columns
    there = 8 * 8 * (33 - columns) * 8
    modes, sent, messages = _sent(lambda: torch.fft.rfft2(tile))
    assert (sent, messages) == (there, 3)
    low, sent, _ = _sent(lambda: torch.einsum("bixy,ioxy->boxy", modes[..., :12, :12], torch.randn(8, 8, 12, 12) + 0j))
    assert sent == 0
    # the same columns go back, from all rows but this rank's own; of the low modes only those that there are
    y, sent, _ = _sent(lambda: torch.fft.irfft2(modes))
    assert sent == 8 * 24 * columns * 8
    z, sent, _ = _sent(lambda: torch.fft.irfft2(low, s=(32, 64)))
    assert sent == 8 * 24 * (9, 3, 0, 0)[place] * 8
    _, sent, _ = _sent(lambda: (y + tile).local.square().sum().backward())
    assert sent == there + 8 * 24 * columns * 8
    assert z.layout == tile.layout


@on_ranks(4)
def test_bytes_of_visits():
    tile = shard(torch.randn(1, 8, 32, 64), world_mesh(lat=4), (None, None, "lat", None))
    local = tile.local.numel() * 4
    for function, factor in (
        (lambda: torch.fft.rfft(tile), 0),
        (lambda: torch.fft.fft(tile, dim=2), 0.75 * (1 + 2)),  # real there, complex back
        (lambda: torch.fft.fft(tile, dim=2, n=8), 0.75 * (1 + 2) / 4),  # the first rank's rows alone are transformed
    ):
        _, sent, _ = _sent(function)
        total = comm.all_gather_object(tile.mesh, sent)
        assert sum(total) == factor * 4 * local
    uncut = tile.redistribute((None, None, None, None))
    _, sent, _ = _sent(lambda: torch.fft.irfft2(torch.fft.rfft2(uncut)))
    assert sent == 0


# -- errors -----------------------------------------------------------------------------------------------------------


@on_ranks(2)
def test_wrong_arguments_raise_as_in_torch_before_anything_is_sent():
    f = torch.fft
    tile = shard(torch.randn(2, 9, 10), world_mesh(lat=2), (None, "lat", None))
    with comm.count() as traffic:
        for function, error, match in (
            (lambda: f.rfft2(f.fft(tile)), RuntimeError, "expects a real"),
            (lambda: f.fft(tile, n=0, dim=1), RuntimeError, r"Invalid number of data points \(0\)"),
            (lambda: f.fft(tile, dim=3), IndexError, "dim 3 is out of range"),
            (lambda: f.fft2(tile, dim=(1, 1)), RuntimeError, "name each once"),
            (lambda: f.fftn(tile, s=(2, 3), dim=(0,)), RuntimeError, "same length"),
            (lambda: f.fft(tile, norm="half", dim=1), RuntimeError, 'Invalid normalization mode: "half"'),
        ):
            with pytest.raises(error, match=match):
                function()
    assert traffic.messages == 0
