"""Functions that few nets call, composed of others: against the whole tensor, forward and gradients."""

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from jigsaw import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.testing.oracle import random_functional
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

SPACE = (None, None, "lat", "lon")
MESHES = [{"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}]
PLACES = torch.tensor([0.0, 0.5, 0.7, 2.0, 2.5, 4.0, 4.1], dtype=torch.float64)
COUNTS = torch.tensor([1, 3, 0, 2, 1, 1, 2])


def _weights(x):
    return x[0, 0, :, 1].abs() + 0.1


CASES = {
    "gradient": torch.gradient,
    "gradient of second order": lambda x: torch.gradient(x, spacing=0.5, dim=(2, 3), edge_order=2),
    "gradient at places": lambda x: torch.gradient(x, spacing=(PLACES,), dim=2),
    "gradient at places, second order": lambda x: torch.gradient(x, spacing=(PLACES,), dim=2, edge_order=2),
    "gradient by dims": lambda x: torch.gradient(x, spacing=[2.0, 0.25], dim=[3, 1]),
    "gradient of two rows": lambda x: torch.gradient(x, dim=0),
    "cov": lambda x: torch.cov(x[0, 0]),
    "cov of columns": lambda x: x[1, 1].T.cov(correction=0),
    "cov of one": lambda x: torch.cov(x[0, 0, 2]),
    "cov with frequencies": lambda x: torch.cov(x[0, 0].T, fweights=COUNTS),
    "cov with weights": lambda x: torch.cov(x[0, 0].T, aweights=_weights(x).detach()),
    "cov with both": lambda x: torch.cov(x[0, 0].T, fweights=COUNTS, aweights=_weights(x).detach(), correction=2),
    "cov, complex": lambda x: torch.cov(torch.complex(x[0, 0], x[1, 2])),
    "corrcoef": lambda x: torch.corrcoef(x[1, 2]),
    "corrcoef of columns": lambda x: x[1, 2].mT.corrcoef(),
    # torch's own cannot go back: it changes in place what cumprod has kept
    "vander": lambda x: torch.vander(x[0, 0, :, 3].detach(), 4) * x.mean(),
    "vander, increasing": lambda x: torch.vander(x[0, 0, 3].detach(), increasing=True) * x.mean(),
    "linalg.vander": lambda x: torch.linalg.vander(x[0], N=3),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, x[..., 2, :7] * 2, 1, 2, 3),
    "diagonal_scatter below": lambda x: x.diagonal_scatter(x[..., :5, 1] * 3, -2, 2, 3),
    "diagonal_scatter of others": lambda x: torch.diagonal_scatter(x, x[0].movedim(0, 2)[..., :2], 0, 0, 1),
    "diagonal_scatter of a whole": lambda x: torch.diagonal_scatter(x, PLACES.expand(2, 3, 7), 3, 2, 3),
    "einsum of a diagonal": lambda x: torch.einsum("bcii->bci", x[..., :7]),
    "einsum of a trace": lambda x: torch.einsum("...ii", x[..., :7]),
    "einsum of diagonals": lambda x: torch.einsum("bcii,bcij->bj", x[..., :7], x),
    "einsum of a batch": lambda x: torch.einsum("aahw,hw->h", x[:, :2], x[0, 0]),
}


def _run(x):
    found = {}
    for name, case in CASES.items():
        try:
            found[name] = case(x)
        except Exception as error:
            error.add_note(f"case: {name}")
            raise
    return found


def _loss(outputs):
    leaves = [y for out in outputs.values() for y in (out if isinstance(out, (list, tuple)) else [out])]
    return random_functional([torch.view_as_real(y) if y.is_complex() else y for y in leaves])


@pytest.mark.slow
def test_functions_made_of_others():
    torch.manual_seed(0)
    x, split = torch.randn(2, 3, 7, 10), {2: (0, 0, 7, 7)}
    assert_same_on_every_mesh(_run, x, MESHES, spec=SPACE, loss=_loss)
    assert_same_on_every_mesh(_run, x, MESHES[1:2], spec=SPACE, loss=_loss, split=split)


class _Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(7, 4))

    def forward(self, x):
        codes = (x.detach()[0, 0].sigmoid() * 7).long()
        found = [F.embedding_bag(codes, self.table, mode=mode) for mode in ("sum", "mean", "max")]
        found += [
            F.embedding_bag(codes.T, self.table, mode=mode, padding_idx=3).square() for mode in ("sum", "mean", "max")
        ]
        found.append(F.embedding_bag(codes, self.table, mode="sum", per_sample_weights=x[1, 1]))
        return found


def test_embedding_bags():
    torch.manual_seed(0)
    assert_same_on_every_mesh(_Bags(), torch.randn(2, 3, 7, 10), MESHES, spec=SPACE)


class _MoreTokens(nn.Module):
    """Attention with a learned token behind the keys, and one of zeros."""

    def __init__(self):
        super().__init__()
        self.both = nn.MultiheadAttention(8, 2, add_bias_kv=True, add_zero_attn=True, batch_first=True)
        self.learned = nn.MultiheadAttention(8, 2, add_bias_kv=True, batch_first=True)
        self.zero = nn.MultiheadAttention(8, 2, add_zero_attn=True)
        self.mask = nn.Buffer(torch.randn(11, 11))
        self.padding = nn.Buffer(torch.arange(22).reshape(2, 11) % 7 == 1)

    def forward(self, x):
        first = self.both(x, x, x, attn_mask=self.mask)
        second = self.learned(x, x.sin(), x, need_weights=False, attn_mask=self.mask, is_causal=False)
        third = self.zero(x.transpose(0, 1), x.transpose(0, 1), x.transpose(0, 1), key_padding_mask=self.padding)
        return [*first, second[0], *third]


def test_attention_with_tokens_of_its_own():
    torch.manual_seed(0)
    x = torch.randn(2, 11, 8)
    assert_same_on_every_mesh(_MoreTokens(), x, MESHES[:2], spec=(None, "lat", None))
    assert_same_on_every_mesh(_MoreTokens(), x, MESHES[2:], spec=("lon", "lat", None))


@on_ranks(2)
def _samples(spec, mesh_is_cut):
    mesh = world_mesh(lat=2)
    weights = torch.rand(5, 9)
    weights[:, 4] = 0
    tile = shard(weights, mesh, spec if mesh_is_cut else (None, None))
    torch.manual_seed(3)
    one, many = torch.multinomial(tile, 8), torch.multinomial(tile, 4000, replacement=True)
    assert isinstance(one, Tile)
    counts = torch.stack([(many.full_tensor() == k).sum(1) for k in range(9)], 1) / 4000
    assert (counts - weights / weights.sum(1, keepdim=True)).abs().max() < 0.05
    assert set(one.full_tensor().flatten().tolist()) == {0, 1, 2, 3, 5, 6, 7, 8}
    assert all(len(set(row)) == 8 for row in one.full_tensor().tolist())
    assert torch.multinomial(tile[0], 3).shape == (3,)
    return one.full_tensor(), many.full_tensor()


def test_samples_are_the_same_on_every_mesh():
    expected = _samples((None, None), False)[0]
    for spec in (("lat", None), (None, "lat")):
        for found in _samples(spec, True):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@on_ranks(2)
def test_powers_of_integers_are_as_wide_as_those_of_torch():
    mesh = world_mesh(lat=2)
    for whole in (torch.tensor([3, 2], dtype=torch.uint8), torch.tensor([2], dtype=torch.int32)):
        for count in (None, 1, 3):
            found = torch.vander(shard(whole, mesh, ("lat",)), count)
            assert found.dtype == torch.int64
            assert torch.equal(found.full_tensor(), torch.vander(whole, count))
        for values in (whole[:1], whole.bool()):
            with pytest.raises(RuntimeError, match=r"linalg\.vander"):
                torch.linalg.vander(shard(values, mesh, ("lat",)))


@on_ranks(2)
def test_what_they_refuse():
    mesh = world_mesh(lat=2)
    tile = shard(torch.rand(6, 8), mesh, ("lat", None))
    codes, table = (tile * 5).long(), torch.rand(5, 3)
    with pytest.raises(ShardingError, match="offsets begin bags anywhere"):
        F.embedding_bag(codes.flatten(), table, torch.tensor([0, 4]))
    with pytest.raises(RuntimeError, match="edge_order=2 needs one more"):
        torch.gradient(tile[:2], dim=0, edge_order=2)
    with pytest.raises(RuntimeError, match="places for the 6 rows"):
        torch.gradient(tile, spacing=(PLACES,), dim=0)
    with pytest.raises(RuntimeError, match="cov: weights of shapes"):
        torch.cov(tile, fweights=COUNTS)
    with pytest.raises(RuntimeError, match="needs 1 or 2"):
        torch.corrcoef(tile.unsqueeze(0))
    with pytest.raises(RuntimeError, match="src has shape"):
        torch.diagonal_scatter(tile, torch.ones(5))
    with pytest.raises(RuntimeError, match="no more samples than places"):
        torch.multinomial(tile, 9)
    with pytest.raises(ShardingError, match=r"add\(out=...\).* x = add\(...\), or x\[...\] = it"):
        torch.add(tile, 1, out=tile)
    with pytest.raises(RuntimeError, match="label 'i' has sizes 6 and 8"):
        torch.einsum("ii->i", tile)


@functools.cache
def _layers(groups):
    torch.manual_seed(0)
    layer = nn.ConvTranspose2d(8, 12, 3, stride=2, padding=1, groups=groups).double()
    x = torch.randn(2, 8, 7, 5, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y.square().sum().backward()
    return layer, x, y


@on_ranks(4)
def test_grouped_transposed_convolutions_with_cut_weights():
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = world_mesh(lat=2, channel=2)
    for groups in (2, 4):
        layer, whole, expected = _layers(groups)
        for dim in (0, 1):
            for channel in (None, "channel"):
                weight = distribute_tensor(layer.weight.detach(), mesh["channel"], [Shard(dim)]).requires_grad_()
                bias = distribute_tensor(layer.bias.detach(), mesh["channel"], [Shard(0)]).requires_grad_()
                x = shard(whole.detach(), mesh, (None, channel, "lat", None))
                x.requires_grad_()
                y = F.conv_transpose2d(x, weight, bias, 2, 1, groups=groups)
                torch.testing.assert_close(y.full_tensor(), expected)
                y.square().sum().backward()
                torch.testing.assert_close(x.grad.full_tensor(), whole.grad)
                for found, like in ((weight.grad, layer.weight.grad), (bias.grad, layer.bias.grad)):
                    parts = found.full_tensor()
                    torch.distributed.all_reduce(parts)  # over lat; along channel both have the whole
                    torch.testing.assert_close(parts / 2, like)
