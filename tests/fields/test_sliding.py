"""Sliding windows over tiles: MONAI's result on the whole volume, in either way, on every mesh."""

from functools import lru_cache

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import jigsaw
from jigsaw import comm
from jigsaw.errors import FieldError, PeerError, RanksDifferError
from jigsaw.fields.sliding import sliding_window
from jigsaw.testing import on_ranks, run_on_ranks, world_mesh

MESHES = [{"z": 1}, {"z": 2}, {"z": 4}, {"z": 2, "y": 2}, {"data": 2, "x": 2}]
CASES = {
    "uneven": ((13, 7, 10), {"roi": (6, 5, 7), "overlap": 0.5}),
    "small": ((5, 11, 7), {"roi": (8, 4, 7), "overlap": 0.25, "fill": -1.0}),
    "whole": ((9, 7, 10), {"roi": (None, 4, 6), "overlap": 0.4, "blend": "constant"}),
    "apart": ((12, 8, 9), {"roi": (5, 8, 4), "overlap": 0.0, "sigma": 0.3}),
}


def model(seed=0):
    torch.manual_seed(seed)
    layers = nn.Conv3d(2, 3, 3, padding=1), nn.GELU(), nn.Conv3d(3, 4, 3, padding=1)
    return nn.Sequential(*layers).double().eval()


def volume(space, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(2, 2, *space)))


@lru_cache
def oracle(space, roi, overlap, blend="gaussian", sigma=0.125, fill=0.0):
    from monai.inferers.utils import sliding_window_inference  # slow to import, and the ranks need none

    roi = [n if rows is None else rows for n, rows in zip(space, roi, strict=True)]
    with torch.no_grad():
        return sliding_window_inference(
            volume(space), roi, 3, model(), overlap=overlap, mode=blend, sigma_scale=sigma, cval=fill
        )


def slid(space, axes, windows, options):
    tile = jigsaw.shard(volume(space), world_mesh(**axes), ("data", None, "z", "y", "x"))
    found = sliding_window(model(), tile, windows=windows, **options)
    assert found.layout.spec == tile.layout.spec
    assert [c.points for c in found.layout.cuts[2:]] == [c.points for c in tile.layout.cuts[2:]]
    return found.full_tensor().numpy()


@pytest.mark.parametrize("windows", ["cut", "dealt"])
@pytest.mark.parametrize("axes", MESHES, ids=str)
def test_tiles_give_what_monai_gives_for_the_whole_volume(axes, windows):
    for space, options in CASES.values():
        want = oracle(space, **options)
        for found in run_on_ranks(int(np.prod(list(axes.values()))), slid, space, axes, windows, options):
            np.testing.assert_allclose(found, want, rtol=0, atol=1e-10)


@pytest.mark.parametrize("case", CASES)
def test_a_plain_tensor_needs_no_mesh(case):
    space, options = CASES[case]
    found = sliding_window(model(), volume(space), **options)
    np.testing.assert_allclose(found, oracle(space, **options), rtol=0, atol=1e-10)
    assert not found.requires_grad


class Encoder(nn.Module):
    """Strided down and up again with a skip, as in a U-Net."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv3d(1, 4, 3, padding=1)
        self.down = nn.Conv3d(4, 4, 3, stride=2, padding=1)
        self.up = nn.ConvTranspose3d(4, 4, 2, stride=2)
        self.last = nn.Conv3d(8, 2, 1)

    def forward(self, x):
        fine = F.relu(self.first(x))
        return self.last(torch.cat([fine, self.up(F.relu(self.down(fine)))], 1))


def encoder():
    torch.manual_seed(3)
    return Encoder().double().eval()


@on_ranks(4)
def test_windows_of_a_strided_model_are_cut_at_its_strides():
    x = volume((13, 10, 9))[:1, :1]
    want = sliding_window(encoder(), x, (8, 8, 8))
    tile = jigsaw.shard(x, world_mesh(z=2, y=2), (None, None, "z", "y", None))
    mine = jigsaw.parallelize(encoder(), tile.mesh)
    found = sliding_window(mine, tile, (8, 8, 8), align=2)
    np.testing.assert_allclose(found.full_tensor(), want, rtol=0, atol=1e-10)


@on_ranks(4)
def test_no_rank_ever_holds_the_volume_and_dealt_windows_send_their_rows_twice():
    space, roi = (32, 6, 6), (8, 6, 6)
    mesh = world_mesh(z=4)
    tile = jigsaw.shard(volume(space)[:1, :1], mesh, (None, None, "z", None, None))
    seen = []

    def same(x):
        seen.append(tuple(x.local.shape if isinstance(x, jigsaw.Tile) else x.shape))
        return x

    with comm.count() as count:
        found = sliding_window(same, tile, roi, overlap=0.5, windows="dealt")
    np.testing.assert_allclose(found.local, tile.local, rtol=0, atol=1e-12)
    assert set(seen) == {(1, 1, *roi)}
    assert len(seen) == (2 if mesh.get_rank() < 3 else 1)  # 7 windows
    # windows at 0, 4, 8, ... of tiles of 8 rows: every other one lies half on the next tile
    rows = 8 * 4 * 6 * 6
    halves = {0: 1, 1: 2, 2: 2, 3: 1}[mesh.get_rank()]
    moved = [c.sent_bytes for c in count.calls if c.kind == "exchange"]
    assert sum(moved) == halves * rows
    seen.clear()
    sliding_window(same, tile, roi, overlap=0.5, windows="cut")
    assert set(seen) == {(1, 1, 2, 6, 6)}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_model_that_works_in_place_changes_no_scan(ranks):
    run_on_ranks(ranks, _slide_in_place, ranks)


def _slide_in_place(ranks):
    mesh = world_mesh(z=ranks)
    x = volume((8, 8, 8))[:1, :1]
    for windows in ("cut", "dealt"):
        tile = jigsaw.shard(x, mesh, (None, None, "z", None, None))
        found = sliding_window(lambda v: v.sub_(1.0).mul_(2.0), tile, (4, 4, 4), overlap=0.5, windows=windows)
        torch.testing.assert_close(found.full_tensor(), (x - 1) * 2)
        assert torch.equal(tile.full_tensor(), x)


def refusals():
    x = volume((6, 6, 6))
    return [
        (r"roi=\(4, 4\) must have a size for each dim of space", {"roi": (4, 4)}, x, model()),
        (r"roi=4 must have a size for each dim of space, like roi=\(4, 4, 4\)", {"roi": 4}, x, model()),
        (r"roi=\(4.5, 4, None\) must be whole numbers of rows", {"roi": (4.5, 4, None)}, x, model()),
        (r"fill=-9.0 is none of the values of torch.uint8", {"roi": (4, 4, 4), "fill": -9.0}, x.byte(), model()),
        (r"fill=0.5 is none of the values of torch.int16", {"roi": (4, 4, 4), "fill": 0.5}, x.short(), model()),
        (r"volume of shape .* has no batch dim; give volume.unsqueeze\(0\)", {"roi": (4, 4, 4)}, x[0], model()),
        (r"has no batch and no channel dim; give volume\[None, None\]", {"roi": (4, 4, 4)}, x[0, 0], model()),
        (r"overlap=1.0 must be a share in \[0, 1\)", {"roi": (4, 4, 4), "overlap": 1.0}, x, model()),
        (r"overlap=\(0.5, 0.5\) must be a share", {"roi": (4, 4, 4), "overlap": (0.5, 0.5)}, x, model()),
        (r"fill='a' must be a number", {"roi": (4, 4, 4), "fill": "a"}, x, model()),
        (r"roi=\(inf, 4, 4\) must be whole numbers", {"roi": (float("inf"), 4, 4)}, x, model()),
        ("sigma=None must be 'constant', or", {"roi": (4, 4, 4), "blend": "gaussian", "sigma": None}, x, model()),
        (r"volume is a ndarray; give a tile or a tensor", {"roi": (4, 4, 4)}, x.numpy(), model()),
        (
            "blend='mean', sigma=0.125 must be 'constant', or 'gaussian'",
            {"roi": (4, 4, 4), "blend": "mean"},
            x,
            model(),
        ),
        ("windows='all' must be 'cut' or 'dealt'", {"roi": (4, 4, 4), "windows": "all"}, x, model()),
        (
            r"the model gave \(2, 2, 2, 4, 4\) for a window \(2, 2, 4, 4, 4\)",
            {"roi": (4, 4, 4)},
            x,
            lambda w: w[:, :, 1:3],
        ),
        ("the model gave a dict for a window", {"roi": (4, 4, 4)}, x, lambda w: {"out": w}),
    ]


@pytest.mark.parametrize("number", range(17))
def test_what_does_not_fit_is_refused(number):
    why, options, x, net = refusals()[number]
    with pytest.raises(FieldError, match=why):
        sliding_window(net, x, **options)


@pytest.mark.parametrize("well", [0, 2])
@on_ranks(2)
def test_a_model_that_fails_on_one_rank_fails_on_all(well):
    """On its first window, or after so many."""
    mesh = world_mesh(z=2)
    tile = jigsaw.shard(volume((24, 4, 4)), mesh, (None, None, "z", None, None))
    seen = []

    def fails(x):
        seen.append(x)
        if mesh.get_rank() == 1 and len(seen) > well:
            raise ZeroDivisionError("no weights here")
        return x

    kind = ZeroDivisionError if mesh.get_rank() == 1 else PeerError
    with pytest.raises(kind, match="no weights here"):
        sliding_window(fails, tile, (4, 4, 4), windows="dealt")


@on_ranks(2)
def test_cut_channels_and_plain_answers_are_refused_on_every_rank():
    tile = jigsaw.shard(volume((6, 6, 6)), world_mesh(c=2), (None, "c", None, None, None))
    with pytest.raises(FieldError, match="needs whole channels, and they are cut; use windows='cut'"):
        sliding_window(model(), tile, (4, 4, 4), windows="dealt")
    tile = jigsaw.shard(volume((6, 6, 6)), world_mesh(z=2), (None, None, "z", None, None))
    with pytest.raises(FieldError, match="plain tensor for a tile; use windows='dealt'"):
        sliding_window(lambda x: torch.zeros(x.shape), tile, (4, 4, 4))


@on_ranks(2)
@pytest.mark.parametrize("windows", ["cut", "dealt"])
def test_ranks_that_ask_for_other_windows_refuse(windows):
    mesh = world_mesh(z=2)
    tile = jigsaw.shard(volume((13, 7, 10)), mesh, (None, None, "z", None, None))
    with pytest.raises(RanksDifferError, match="agree on overlap"):
        sliding_window(model(), tile, (6, 5, 7), windows=windows, overlap=0.25 * (1 + mesh.get_rank()))
