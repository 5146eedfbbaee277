"""Functions that are made of others, their operands cut anyhow or plain, against those of the whole tensors."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from random_cuts import any_spec, assert_as_the_whole

from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard

WINDOW = torch.hann_window(6, dtype=torch.float64) + 0.1
LABELS = torch.randint(1, 5, (4, 3), generator=torch.Generator().manual_seed(0))
PADDED = LABELS.masked_fill(torch.arange(3) >= torch.tensor([[3], [2], [1], [3]]), -1)


def _short_times(x, **options):
    return torch.view_as_real(torch.stft(x, 8, 3, return_complex=True, **options))


def _back(x, **options):
    spectra = torch.stft(x, 8, 2, 6, WINDOW, return_complex=True)
    return torch.istft(spectra * (1 + x.mean()), 8, 2, 6, WINDOW, **options)


def _ctc(x, targets=LABELS, lengths=(3, 2, 1, 3), **options):
    return F.ctc_loss(x.log_softmax(-1), targets, (9, 8, 9, 7), lengths, **options)


FUNCTIONS = {
    "pdist": ([(7, 3)], lambda x: F.pdist(x, 3.0)),
    "pdist, euclidean": ([(7, 3)], torch.pdist),
    "bilinear": ([(5, 7, 3), (5, 7, 2), (4, 3, 2), (4,)], F.bilinear),
    "bilinear without bias": ([(7, 3), (7, 2), (4, 3, 2)], F.bilinear),
    "stft": ([(3, 33)], lambda x: _short_times(x, center=False)),
    "stft, centered": ([(3, 33)], lambda x: _short_times(x, win_length=6, window=WINDOW, normalized=True)),
    "stft of one": ([(33,)], lambda x: torch.stft(x, 8, onesided=False, pad_mode="constant", return_complex=False)),
    "istft": ([(3, 33)], _back),
    "istft of one": ([(33,)], lambda x: _back(x, length=35)),
    "istft of a spectrum that is not mirrored": (
        [(8, 5), (8, 5)],
        lambda x, y: torch.istft(torch.complex(x, y), 8, 3, window=torch.ones(8, dtype=x.dtype)),
    ),
    "ctc_loss": ([(9, 4, 5)], _ctc),
    "ctc_loss, one after the other": ([(9, 4, 5)], lambda x: _ctc(x, LABELS.flatten()[:9], reduction="sum")),
    "ctc_loss, none": ([(9, 4, 5)], lambda x: _ctc(x, lengths=(3, 3, 0, 1), reduction="none")),
    "ctc_loss, padded": ([(9, 4, 5)], lambda x: _ctc(x, PADDED)),
    "ctc_loss of one": ([(9, 5)], lambda x: F.ctc_loss(x.log_softmax(-1), LABELS[0], (9,), (3,))),
    "copies": (
        [(4, 6)],
        lambda x: torch.cat(
            [
                torch.permute_copy(x, (1, 0)),
                torch.t_copy(x),
                torch.transpose_copy(x, 0, 1),
                torch.unsqueeze_copy(x, 2).squeeze(2).mT,
                torch.stack(torch.unbind_copy(x, 1)),
                torch.view_copy(x, (6, 4)),
                torch.cat(torch.split_copy(x, 2, 1), 1).mT,
                torch.unfold_copy(x, 0, 2, 1).flatten(0, 1).expand(18, 2).repeat(1, 2)[:6],
                torch.expand_copy(x[:, :1], (4, 6)).mT,
                torch.slice_copy(x, 1, 1, None, 2).repeat(2, 1)[:4].repeat(1, 2).mT,
                torch.diagonal_copy(x).expand(6, 4),
                torch.select_copy(x, 1, 3).expand(6, 4) * torch.alias_copy(x).mT * torch.detach_copy(x.detach()).mT,
            ]
        ),
    ),
}


def _check(mesh, seed):
    generator = random.Random(seed)
    torch.manual_seed(seed)
    for shapes, function in FUNCTIONS.values():
        for _ in range(2):
            specs = [any_spec(generator, s, mesh.mesh_dim_names) for s in shapes]
            if all(s is None for s in specs):
                continue
            assert_as_the_whole(function, shapes, specs, mesh)


@on_ranks(2)
def test_functions_on_two_ranks():
    _check(world_mesh(lat=2), 0)


@on_ranks(3)
def test_functions_on_three_ranks():
    _check(world_mesh(lat=3), 1)


@on_ranks(4)
def test_functions_on_two_axes():
    _check(world_mesh(lat=2, lon=2), 2)


def _integers(x):
    index = (x.sigmoid() * 24).long()
    edges = [torch.linspace(-2, 2, 4, dtype=x.dtype), torch.tensor([-1.0, 0.5, 3.0], dtype=x.dtype)]
    found = [*torch.unravel_index(index, (2, 3, 4)), torch.unravel_index(index, (30,))[0]]
    found += torch.meshgrid([x[0, 0], x[0, :3, 0]], indexing="xy") + torch.meshgrid([x[0, 0]])
    ordered = x.sort(-1)
    found += [torch.searchsorted(ordered.values, x[..., :5].contiguous(), right=True)]
    found += [torch.searchsorted(x, x * 0.5, sorter=ordered.indices, out_int32=True)]
    found += [torch.searchsorted(torch.linspace(-1, 1, 7).expand(2, 7, 7).to(x.dtype), x, side="right")]
    found += [x[[slice(None), slice(1, 5)]], x[[..., 3]], x[[[0, 1], [3, 2]]], x[[torch.tensor([0, 1]), None]]]
    x = x.detach()
    found += torch.histogram(x, 5) + torch.histogram(x, edges[0], weight=x.abs()) + torch.histogram(x, 3, density=True)
    hist, ends = torch.histogramdd(x[..., :2], edges, weight=x[..., 2].abs(), density=True)
    found += [hist, *ends, torch.histogramdd(x[..., :3], 2).hist, torch.histogram(x, 4, range=(-0.5, 2.0)).hist]
    return [y.double() for y in found]


def test_places_and_counts():
    x = torch.randn(2, 7, 10, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_same_on_every_mesh(_integers, x, spec=(None, "lat", "lon"))


@on_ranks(2)
def test_lists_of_items_are_written_as_tuples_are():
    x = torch.arange(12.0).reshape(3, 4)
    tile = shard(x, world_mesh(lat=2), ("lat", None))
    for target in (x, tile):
        target[[slice(1, 3), slice(0, 2)]] = 7.0
        target[[..., 3]] += 1
    assert tile.full_tensor().equal(x)


@on_ranks(2)
def test_what_does_not_fit_is_refused():
    mesh = world_mesh(lat=2)
    tile = shard(torch.zeros(9, 4, 5), mesh, (None, "lat", None))
    with pytest.raises(RuntimeError, match=r"ctc_loss: input_lengths \[9, 9, 9, 10\]"):
        F.ctc_loss(tile, LABELS, (9, 9, 9, 10), (1, 1, 1, 1))
    for lengths in ((1, 1, 1, 4), (1.0, 1.0, 1.0, 1.0), (-1, 1, 1, 1)):  # of one rank alone, or of another memory
        with pytest.raises(RuntimeError, match="one integer each, none longer than the steps or the labels"):
            F.ctc_loss(tile, LABELS, (9, 9, 9, 9), lengths)
    with pytest.raises(RuntimeError, match="labels from 0 to 4"):
        F.ctc_loss(tile, torch.full((4, 3), 5), (9, 9, 9, 9), (1, 1, 1, 1))
    with pytest.raises(RuntimeError, match="pdist of shape"):
        F.pdist(tile)
    with pytest.raises(RuntimeError, match="bilinear of shapes"):
        F.bilinear(tile, tile, torch.ones(1, 2, 3))
    with pytest.raises(RuntimeError, match="searchsorted of shapes"):
        torch.searchsorted(torch.ones(2, 3), tile)
    with pytest.raises(ShardingError, match="stft on a Tile"):
        torch.stft(tile, 4, return_complex=True)
    with pytest.raises(ValueError, match=r"unravel_index: expected integer indices, got torch.float32"):
        torch.unravel_index(tile, (3, 4))
