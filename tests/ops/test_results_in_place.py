"""Results of functions on tiles may be changed in place, as those of plain tensors may."""

import pytest
import torch
import torch.nn.functional as F

import jigsaw
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 2}, {"lat": 3}]
WEIGHT = torch.linspace(-1, 1, 81, dtype=torch.float64).view(3, 3, 3, 3)

RESULTS = {
    "sum": lambda x: x.sum(2),
    "sum of all": lambda x: x.sum(),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "var": lambda x: x.var(2),
    "max": lambda x: x.max(2).values,
    "cumsum": lambda x: x.cumsum(2),
    "sort": lambda x: x.sort(2).values,
    "mse_loss": lambda x: F.mse_loss(x, torch.zeros_like(x)),
    "l1_loss": lambda x: F.l1_loss(x, x.detach() * 2, reduction="none"),
    "cross_entropy": lambda x: F.cross_entropy(x, (x[:, 0] > 0).long()),
    "conv2d": lambda x: F.conv2d(x, WEIGHT, padding=1),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 1),
    "interpolate": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "group_norm": lambda x: F.group_norm(x, 3),
    "layer_norm": lambda x: F.layer_norm(x, (7, 10)),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "circular": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "reflect": lambda x: F.pad(x, (0, 0, 1, 1), mode="reflect"),
    "roll": lambda x: x.roll(1, 2),
    "flip": lambda x: x.flip(2),
    "cat": lambda x: torch.cat([x, x], 2),
    "pick": lambda x: x[:, :, [0, 5]],
    "row": lambda x: x[:, :, 3] * 1,
    "gather": lambda x: x.gather(2, torch.zeros(2, 3, 4, 10, dtype=torch.long)),
    "flatten": lambda x: (x * 1).flatten(2),
    "matmul": lambda x: x.flatten(2) @ x.flatten(2).mT,
    "outer": lambda x: x.flatten(2).mT @ x.flatten(2),
    "einsum": lambda x: torch.einsum("bchw,bdhw->bcd", x, x),
    "attention": lambda x: F.scaled_dot_product_attention(*[x.flatten(2).mT] * 3),
    "linear": lambda x: F.linear(x.movedim(1, -1), WEIGHT[0, 0]),
    "linear over cut rows": lambda x: F.linear(x.movedim(2, -1), torch.ones(4, 7, dtype=x.dtype)),
    "fft": lambda x: torch.fft.irfft2(torch.fft.rfft2(x), s=(7, 10)),
    "unfold": lambda x: F.unfold(x, 3, padding=1),
    "pixel": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
    "diff": lambda x: x.diff(dim=2),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "stack": lambda x: torch.stack([x, x]),
    "reshape": lambda x: (x * 1).reshape(2, 3, 70),
    "grid_sample": lambda x: F.grid_sample(x, torch.zeros(2, 4, 4, 2, dtype=x.dtype), align_corners=False),
}


def changed_in_place(x):
    results = [make(x) for make in RESULTS.values()]
    for y in results:
        y += 1
        y *= 2
        y[..., None].view_as(y[..., None]).add_(1)
    return results


ON_ONE_RANK = {
    "sort": lambda x: x.sort().values,
    "fft": torch.fft.fft,
    "median": lambda x: x.median(0, keepdim=True).values,
    "cumsum": lambda x: x.cumsum(0),
    "flip": lambda x: x.flip(0),
    "diff": lambda x: x.diff(dim=0),
    "roll": lambda x: x.roll(0, 0),
}


def views_changed_in_place(x):
    results = [make(x) for make in ON_ONE_RANK.values()]
    for y in results:
        y.mul_(2)
        y[:1].add_(1)
    return results


@pytest.mark.parametrize("points", [(0, 0, 5), (0, 5, 5), (0, 2, 5)])
def test_results_with_all_rows_on_one_rank_may_be_changed_in_place(points):
    x = torch.randn(5, dtype=torch.float64)
    assert_same_on_every_mesh(views_changed_in_place, x, [{"lat": 2}], spec=("lat",), split={0: points})


@on_ranks(2)
def test_a_tile_cut_by_other_axes_has_its_own_memory_on_every_rank():
    tile = jigsaw.shard(torch.ones(5), world_mesh(lat=2), ("lat",), split={0: (0, 0, 5)})
    tile.redistribute((None,)).add_(1)
    assert torch.equal(tile.full_tensor(), torch.ones(5))


def _relu_after_a_view(x):
    y = x * 1
    y.narrow(0, 0, 1).add_(1)
    return [torch.relu_(y)]


def test_rows_around_a_circle_are_not_fetched_where_all_rows_were_changed():
    x = torch.randn(7, 3, dtype=torch.float64)
    assert_same_on_every_mesh(_relu_after_a_view, x, MESHES, spec=("lat", None), halo={0: (2, 1)}, periodic=(0,))


@on_ranks(2)
def test_a_view_of_an_extreme_may_be_changed_in_place():
    # without a backward pass, for which torch keeps the extreme
    x = torch.randn(2, 3, 7, 10)
    tile = jigsaw.shard(x, world_mesh(lat=2), SPACE).requires_grad_()
    for make in (lambda x: x.amax(2), lambda x: x.amin(2, keepdim=True), lambda x: torch.aminmax(x, dim=2).max):
        got, right = make(tile), make(x)
        for y in (got, right):
            y[0].add_(1)
        assert torch.equal(got.full_tensor(), right)


def test_results_may_be_changed_in_place():
    assert_same_on_every_mesh(changed_in_place, torch.randn(2, 3, 7, 10, dtype=torch.float64), MESHES, spec=SPACE)


@on_ranks(2)
def test_a_norm_of_no_rows_lies_in_new_memory():
    leaf = jigsaw.shard(torch.ones(1, 3, 1), world_mesh(lat=2), (None, None, "lat"), split={2: (0, 0, 1)})
    leaf.requires_grad_()
    made = F.local_response_norm(leaf, 2)
    made.fill_(2)
    assert leaf.full_tensor().eq(1).all()
    assert made.full_tensor().eq(2).all()


# torch's flatten is a view of these, or a copy, by the order of their dims in memory, which pieces of one row hide
MADE_OF_TRANSPOSED = {
    "pointwise": lambda x: x.t() * 2,
    "of three": lambda x: torch.where(x.t() > 3, x.t(), 0.0),
    "of a view and another": lambda x: (x * 1)[:, :6].t() + (x * 2).t(),
    "of rows and columns": lambda x: torch.addcmul(x.t(), x.t() * 1, x[0, 0] + x.t()[:, :1]),
    "reversed": lambda x: torch.rsub(x.t(), x.reshape(6, 7)),
    "of another dtype": lambda x: x.t().float(),
    "clone": lambda x: x.t().clone().tril_(),
    "contiguous": lambda x: x.t().contiguous(),
    "contiguous clone": lambda x: x.t().clone(memory_format=torch.contiguous_format),
    "contiguous slice": lambda x: x[:, :3].contiguous(),
    "masked_fill": lambda x: x.t().masked_fill(x.t() > 2, 0.0),
    "detach": lambda x: x.t().detach(),
    "sort": lambda x: x.t().sort(0).values,
    "sort of the other dim": lambda x: x.t().sort(1)[0],
    "argsort": lambda x: x.t().argsort().double(),
    "argsort of the first dim": lambda x: x.t().argsort(0, descending=True).double(),
    "msort": lambda x: x.t().msort(),
    "parts of a spectrum": lambda x: torch.fft.fftshift(torch.fft.fft(x)).real,
    "zeros_like": lambda x: torch.zeros_like(x.t()),
    "of three dims": lambda x: x[None].transpose(1, 2).sin(),
    "picked columns": lambda x: x.t()[:, torch.tensor([0, 3])],
    "picked rows": lambda x: x[None].transpose(0, 2)[torch.tensor([0, 2])],
    "picked twice": lambda x: x[None].transpose(0, 2)[torch.tensor([0, 2]), :, torch.tensor([0])],
    "view of picked columns": lambda x: (x.t()[:, torch.tensor([0, 3])].t() * 2)[1:],
    "index_select": lambda x: x.t().index_select(0, torch.tensor([0, 2])),
    "transform": lambda x: torch.fft.fft(x, dim=0).real.clone(),
    "transform of a transpose": lambda x: torch.fft.rfft(x.t(), dim=1).abs(),
    "longer transform": lambda x: torch.fft.rfft(x.t(), n=9, dim=0).abs(),
    "shorter transform": lambda x: torch.fft.rfft(x.t(), n=4, dim=0).abs(),
    "inverse": lambda x: torch.fft.irfft(torch.complex(x, x), dim=0),
    "longer inverse": lambda x: torch.fft.irfft(torch.complex(x, x), n=20, dim=0),
    "hfft": lambda x: torch.fft.hfft(torch.complex(x, x), dim=0),
    "of two dims": lambda x: torch.fft.rfft2(x[None].transpose(0, 1)).abs(),
    "inverse of all dims": lambda x: torch.fft.irfftn(torch.complex(x, x)[None].transpose(0, 1)),
    "real": lambda x: torch.complex(x, x).t().real,
    "imag of a sum": lambda x: (torch.complex(x, x) + 1).imag,
    "real of pairs": lambda x: torch.view_as_real(torch.complex(x, x).t())[..., 0],
    "complex of pairs": lambda x: torch.view_as_complex(torch.stack([x, x], -1).transpose(0, 1)).real,
    "conjugate of a slice": lambda x: torch.complex(x, x)[:, :3].conj(),
    "bits of a slice": lambda x: x[:, :3].view(torch.int64).view(torch.float64),
    "detached slice": lambda x: x[:, :3].detach(),
    "data of a slice": lambda x: x[:, :3].data,
    "itself as a view": lambda x: (x[:, :3] + 1).view_as(x[:, :3]),
    "channels last": lambda x: (x[:, :, None, None] * torch.ones(2, 3)).to(memory_format=torch.channels_last),
    "clone to channels last": lambda x: x[:, :, None, None].expand(7, 6, 2, 3).clone(memory_format=torch.channels_last),
    "cast": lambda x: x.t().to(torch.float32),
    "cast of a slice": lambda x: x[:, :3].type_as(torch.ones(1, dtype=torch.float32)),
    "real slice": lambda x: x[:, :3].real,
    "positive slice": lambda x: +x[:, :3],
    "no cast": lambda x: x[:, :3].to(x),
    "channels last of its own": lambda x: (x[:, :, None, None] * 1).contiguous(memory_format=torch.channels_last),
    "relu": lambda x: F.relu(x.t()),
    "narrow_copy": lambda x: torch.narrow_copy(x.t(), 0, 1, 3),
    "renorm": lambda x: torch.renorm(x.t(), 2, 0, 1.5),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, x.diagonal() * 2),
    "diagonal_scatter of a transpose": lambda x: torch.diagonal_scatter(x.t(), x.diagonal() * 2),
    "diagonal_scatter of a slice": lambda x: torch.diagonal_scatter(x[:, :3], x[:, 0][:3]),
    "diagonal_scatter of outer dims": lambda x: torch.diagonal_scatter(x[None], x[:, :1], 0, 0, 2),
    "select_scatter": lambda x: torch.select_scatter(x.t(), x[0], 1, 2),
    "select_scatter of a slice": lambda x: torch.select_scatter(x[:, :3], x[0, :3], 0, 2),
    "slice_scatter": lambda x: torch.slice_scatter(x.t(), x.t()[:2], 0, 1, 3),
    "slice_scatter of a slice": lambda x: torch.slice_scatter(x[:, 1:], x[:2, 1:], 0, 1, 3),
    "slice_scatter of an expanded row": lambda x: torch.slice_scatter(x[:1].expand(6, 6).t(), x[:2], 0, 1, 3),
    "index_add": lambda x: x.t().index_add(0, torch.tensor([1]), x.t()[:1]),
    "index_copy of a slice": lambda x: x[:, :3].index_copy(0, torch.tensor([1]), x[:1, :3]),
    "index_copy": lambda x: x.t().index_copy(0, torch.tensor([1]), x.t()[:1]),
    "index_fill": lambda x: x.t().index_fill(0, torch.tensor([1]), 3),
    "index_fill of a slice": lambda x: x[:, :3].index_fill(0, torch.tensor([1]), 3),
    "index_put": lambda x: x.t().index_put((torch.tensor([1]),), torch.tensor(2.0).to(x.dtype)),
    "scatter": lambda x: x.t().scatter(0, (x.t() > 0).long(), 1),
    "scatter_add": lambda x: x.t().scatter_add(0, (x.t() > 0).long(), x.t()),
    "scatter_reduce": lambda x: x.t().scatter_reduce(0, (x.t() > 0).long(), x.t(), "amax"),
    "masked_scatter": lambda x: x.t().masked_scatter(x.t() > 0, 2 * torch.ones(42).to(x.dtype)),
    "put": lambda x: x.t().put(torch.tensor([0]), torch.tensor([5.0]).to(x.dtype)),
    "tril": lambda x: x.t().tril(),
    "take_along_dim": lambda x: torch.take_along_dim(x.t(), (x.t() > 0).long(), 0),
    "gather": lambda x: x.t().gather(0, (x.t() > 0).long()),
    "fftshift": lambda x: torch.fft.fftshift(x.t()),
    "roll": lambda x: x.t().roll(1, 0),
    "cat": lambda x: torch.cat([x.t(), x.t()]),
    "stack": lambda x: torch.stack([x.t(), x.t()]),
    "repeat": lambda x: x.t().repeat(2, 1),
    "one_hot": lambda x: F.one_hot((x.t() > 0).long(), 2),
    "cumsum": lambda x: x.t().cumsum(0),
    "sum": lambda x: x[None].transpose(0, 2).sum(1),
    "amax": lambda x: x[None].transpose(0, 2).amax(1),
    "pad": lambda x: F.pad(x.t(), (1, 1)),
    "circular pad of a transpose": lambda x: F.pad(x.t()[None], (1, 1), "circular"),
    "reflected transpose": lambda x: F.pad(x.t()[None], (1, 1), "reflect"),
    "image of one row": lambda x: F.interpolate(x[:, :, None, None], size=(5, 3)),
    "circular channels-last image": lambda x: F.pad(
        (x * torch.ones(2, 3, 1, 1)).contiguous(memory_format=torch.channels_last),
        (1, 1, 1, 1),
        "circular",
    ),
    "circular image of one row": lambda x: F.pad(x[:, :, None, None], (1, 1, 1, 1), "circular"),
}


def _changed_if_flat(x, make):
    y = make(x * 1)
    y.contiguous().mul_(2)
    y.flatten().add_(1)
    y.reshape(-1)[-1] = 7
    return y


@on_ranks(4)
def test_what_is_made_of_a_transpose_is_flattened_as_torch_does():
    wrong, whole = [], 5 * torch.arange(42.0, dtype=torch.float64).reshape(7, 6).sin()
    for axes, spec, points in (
        ({"lat": 4}, ("lat", None), None),
        ({"lat": 4}, ("lat", None), (0, 1, 1, 6, 7)),
        ({"lat": 4}, (None, "lat"), None),
        ({"lat": 2, "lon": 2}, ("lat", "lon"), None),
        ({"lat": 2, "lon": 2}, ("lat", "lon"), (0, 1, 7)),
    ):
        tile = jigsaw.shard(whole, world_mesh(**axes), spec, split={0: points} if points else {})
        for name, make in MADE_OF_TRANSPOSED.items():
            expected, found = _changed_if_flat(whole, make), _changed_if_flat(tile, make)
            is_right = torch.allclose(found.full_tensor(), expected)
            is_right &= make(tile).is_contiguous() == make(whole).is_contiguous()
            wrong += [] if is_right else [(name, spec, points)]
    assert not wrong


BIAS = torch.ones(3, dtype=torch.float64, requires_grad=True)
WINDOWS = {
    "conv2d": lambda x: F.conv2d(x, WEIGHT, BIAS, padding=1),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, 2),
    "adaptive to one": lambda x: F.adaptive_avg_pool2d(x, 1),
    "adaptive maximum": lambda x: F.adaptive_max_pool2d(x, 1),
    "area": lambda x: F.interpolate(x, size=(2, 3), mode="area"),
    "area of one": lambda x: F.interpolate(x, size=(1, 1), mode="area"),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "circular": lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 1, 1, 1), mode="replicate"),
    "unfold": lambda x: F.unfold(x, 2),
    "pixel": lambda x: F.pixel_shuffle(x.repeat(1, 4, 1, 1), 2),
}


def _message_of_backward(x, make):
    """Torch's error of a backward pass after the operands were changed, or None."""
    y = make(x)
    x.detach().add_(1)
    BIAS.detach().add_(1)
    try:
        y.sum().backward()
    except RuntimeError as error:
        return "modified by an inplace operation" in str(error)
    return None


@on_ranks(2)
def test_a_rank_without_rows_keeps_what_torch_keeps():
    wrong, whole = [], torch.randn(1, 3, 4, 4, dtype=torch.float64)
    for name, make in WINDOWS.items():
        tile = jigsaw.shard(whole, world_mesh(lat=2), ("lat", None, None, None), split={0: (0, 0, 1)})
        found = _message_of_backward(tile.requires_grad_(), make)
        expected = _message_of_backward(whole.clone().requires_grad_(), make)
        wrong += [] if found is expected else [(name, found, expected)]
    assert not wrong


@on_ranks(2)
def test_views_of_a_leaf_that_was_changed_keep_their_gradients():
    for points in ((0, 0, 1), (0, 1, 1)):
        leaf = jigsaw.shard(torch.ones(1, 5), world_mesh(lat=2), ("lat", None), split={0: points}).requires_grad_()
        view = leaf.unsqueeze(-1)
        leaf.detach().add_(1)
        (2 * view).sum().backward()
        assert torch.equal(leaf.grad.full_tensor(), 2 * torch.ones(1, 5))
