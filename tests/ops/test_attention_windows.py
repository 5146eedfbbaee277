"""Windows across tile borders: the blocks of window transformers, written as people write them for one device."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from jigsaw import comm, shard
from jigsaw.geometry.cut import Cut, cut_points, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.ops.meeting.reshaped_cuts import plan_reshape
from jigsaw.testing import assert_same_on_every_mesh, on_ranks
from jigsaw.testing.rank import world_mesh

MESHES = [{"lat": 2}, {"lat": 3}, {"lat": 4}, {"lat": 2, "lon": 2}]


# -- two dims: Swin and Swin V2 ---------------------------------------------------------------------------------------


def window_partition(x, window):
    b, h, w, c = x.shape
    x = x.view(b, h // window, window, w // window, window, c)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, window, window, c)


def window_reverse(windows, window, h, w):
    b = int(windows.shape[0] / (h * w / window / window))
    x = windows.view(b, h // window, w // window, window, window, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(b, h, w, -1)


def shifted_regions(h, w, window, shift, like):
    regions = torch.zeros((1, h, w, 1), dtype=like.dtype, device=like.device)
    count = 0
    edges = (slice(0, -window), slice(-window, -shift), slice(-shift, None))
    for rows in edges:
        for columns in edges:
            regions[:, rows, columns, :] = count
            count += 1
    return regions


def mask_between(regions, window):
    regions = window_partition(regions, window).view(-1, window * window)
    mask = regions.unsqueeze(1) - regions.unsqueeze(2)
    return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)


class WindowAttention(nn.Module):
    def __init__(self, dim, window, heads, cosine=False):
        super().__init__()
        self.heads, self.cosine, self.scale = heads, cosine, (dim // heads) ** -0.5
        self.table = nn.Parameter(torch.randn((2 * window - 1) ** 2, heads))
        at = torch.stack(torch.meshgrid(torch.arange(window), torch.arange(window), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None, :] + window - 1
        self.register_buffer("index", apart[0] * (2 * window - 1) + apart[1])
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)
        self.logit_scale = nn.Parameter(torch.log(10 * torch.ones(heads, 1, 1)))

    def forward(self, x, mask=None):
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        if self.cosine:
            scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1)
            scores = scores * torch.clamp(self.logit_scale, max=math.log(100.0)).exp()
        else:
            scores = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        scores = scores + bias.unsqueeze(0)
        if mask is not None:
            windows = mask.shape[0]
            scores = scores.view(b // windows, windows, self.heads, n, n) + mask.unsqueeze(1).unsqueeze(0)
            scores = scores.view(-1, self.heads, n, n)
        x = scores.softmax(dim=-1) @ v
        return self.proj(x.transpose(1, 2).reshape(b, n, c))


class SwinBlock(nn.Module):
    def __init__(self, dim, window, shift, heads=2, cosine=False):
        super().__init__()
        self.window, self.shift, self.cosine = window, shift, cosine
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = WindowAttention(dim, window, heads, cosine)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def attend(self, x, regions=None):
        _, h, w, c = x.shape
        window = self.window
        x = F.pad(x, (0, 0, 0, -w % window, 0, -h % window))
        _, rows, columns, _ = x.shape
        mask = None
        if self.shift:
            x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
            regions = shifted_regions(rows, columns, window, self.shift, x) if regions is None else regions
            mask = mask_between(regions, window)
        windows = window_partition(x, window).view(-1, window * window, c)
        windows = self.attn(windows, mask).view(-1, window, window, c)
        x = window_reverse(windows, window, rows, columns)
        if self.shift:
            x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
        return x[:, :h, :w, :].contiguous()

    def forward(self, x, regions=None):
        if self.cosine:
            x = x + self.norm1(self.attend(x))
            return x + self.norm2(self.mlp(x))
        x = x + self.attend(self.norm1(x), regions)
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x):
        _, h, w, _ = x.shape
        x = F.pad(x, (0, 0, 0, w % 2, 0, h % 2))
        parts = [x[:, 0::2, 0::2, :], x[:, 1::2, 0::2, :], x[:, 0::2, 1::2, :], x[:, 1::2, 1::2, :]]
        return self.reduction(self.norm(torch.cat(parts, -1)))


class PatchExpand(nn.Module):
    """Twice the rows, from tokens [b, h * w, c]."""

    def __init__(self, dim):
        super().__init__()
        self.expand, self.norm = nn.Linear(dim, 2 * dim, bias=False), nn.LayerNorm(dim // 2)

    def forward(self, x, h, w):
        b, _, c = x.shape
        x = self.expand(x).view(b, h, w, 2, 2, c // 2).permute(0, 1, 3, 2, 4, 5).reshape(b, h * 2, w * 2, c // 2)
        return self.norm(x.view(b, -1, c // 2)).view(b, h * 2, w * 2, c // 2)


class SmallSwin(nn.Module):
    """Two blocks, merged, two blocks of fewer windows, expanded, and the skip connection."""

    def __init__(self, window, cosine=False):
        super().__init__()
        self.embed = nn.Conv2d(2, 4, 2, 2)
        self.first = nn.Sequential(
            SwinBlock(4, window, 0, cosine=cosine), SwinBlock(4, window, window // 2, cosine=cosine)
        )
        self.merge, self.expand = PatchMerging(4), PatchExpand(8)
        self.second = nn.Sequential(
            SwinBlock(8, window, 0, cosine=cosine), SwinBlock(8, window, window // 2, cosine=cosine)
        )
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        x = self.embed(x).flatten(2).transpose(1, 2).unflatten(1, (x.shape[2] // 2, x.shape[3] // 2))
        skip = self.first(x)
        x = self.second(self.merge(skip))
        b, h, w, c = x.shape
        x = self.expand(x.view(b, h * w, c), h, w)[:, : skip.shape[1], : skip.shape[2], :]
        return self.head(x + skip).permute(0, 3, 1, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "rows"),
    [(4, (26, 20)), (3, (18, 12)), (2, (38, 22))],
    ids=["padded", "few windows", "odd halves"],
)
def test_swin(window, rows):
    torch.manual_seed(0)
    x = torch.randn(2, 2, *rows)
    assert_same_on_every_mesh(SmallSwin(window), x, MESHES, spec=(None, None, "lat", "lon"))


@pytest.mark.slow
def test_swin_v2_and_windows_of_all_rows():
    torch.manual_seed(0)
    space = (None, "lat", "lon", None)
    assert_same_on_every_mesh(
        SmallSwin(4, cosine=True), torch.randn(1, 2, 26, 20), MESHES, spec=(None, None, "lat", "lon")
    )
    # one window of all rows: its tokens stay cut, and keys travel
    assert_same_on_every_mesh(SwinBlock(4, 6, 0), torch.randn(2, 6, 6, 4), MESHES, spec=space)
    assert_same_on_every_mesh(SwinBlock(4, 6, 0), torch.randn(2, 6, 18, 4), MESHES, spec=space)
    assert_same_on_every_mesh(SwinBlock(4, 5, 2), torch.randn(1, 9, 14, 4), MESHES, spec=space)
    # a mask made of a tile, uncut or cut as it comes
    x = torch.randn(1, 9, 14, 4)
    regions = shifted_regions(10, 15, 5, 2, x)
    for of_mask in ((None, None, None, None), space):
        assert_same_on_every_mesh(SwinBlock(4, 5, 2), [x, regions], MESHES, spec=[space, of_mask])


# -- three dims: Swin 3-D, Pangu, FuXi, FengWu, Aurora ----------------------------------------------------------------


class EarthAttention(nn.Module):
    """Windows of level x lat x lon with a bias for each window of level and lat, as Pangu has it."""

    def __init__(self, dim, shape, window, heads=2):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        z, h, _ = (n // w for n, w in zip(shape, window, strict=True))
        tokens = math.prod(window)
        self.table = nn.Parameter(torch.randn(tokens * tokens // 2, z * h, heads))
        self.register_buffer("index", torch.randint(0, tokens * tokens // 2, (tokens, tokens)))
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        b, kinds, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, kinds, n, 3, self.heads, c // self.heads).permute(3, 0, 4, 1, 2, 5)
        scores = (q * self.scale) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(n, n, kinds, -1).permute(3, 2, 0, 1).contiguous()
        scores = scores + bias.unsqueeze(0)
        if mask is not None:
            around = mask.shape[0]
            scores = scores.view(b // around, around, self.heads, kinds, n, n) + mask.unsqueeze(1).unsqueeze(0)
            scores = scores.view(-1, self.heads, kinds, n, n)
        x = (F.softmax(scores, dim=-1) @ v).permute(0, 2, 3, 1, 4).reshape(b, kinds, n, c)
        return self.proj(x)


def earth_partition(x, window):
    b, z, h, w, c = x.shape
    a, p, q = window
    x = x.view(b, z // a, a, h // p, p, w // q, q, c).permute(0, 5, 1, 3, 2, 4, 6, 7).contiguous()
    return x.view(-1, (z // a) * (h // p), a, p, q, c)


def earth_reverse(windows, window, z, h, w):
    a, p, q = window
    b = int(windows.shape[0] / (w / q))
    x = windows.view(b, w // q, z // a, h // p, a, p, q, -1).permute(0, 2, 4, 3, 5, 1, 6, 7).contiguous()
    return x.view(b, z, h, w, -1)


class EarthBlock(nn.Module):
    def __init__(self, dim, shape, window, shift):
        super().__init__()
        self.shape, self.window, self.shift = shape, window, shift
        self.padded = tuple(-(-n // w) * w for n, w in zip(shape, window, strict=True))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = EarthAttention(dim, self.padded, window)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.pad = nn.ZeroPad3d(self.pads())
        self.register_buffer("mask", self.shifted_mask() if any(shift) else None)

    def pads(self):
        widths = []
        for n, full in zip(reversed(self.shape), reversed(self.padded), strict=True):
            before = (full - n) // 2
            widths += [before, full - n - before]
        return tuple(widths)

    def shifted_mask(self):
        """Longitude is a circle: the mask parts levels and latitudes alone."""
        (z, h, w), (a, p, q), (s, t, _) = self.padded, self.window, self.shift
        regions = torch.zeros(1, z, h, w, 1)
        count = 0
        for levels in (slice(0, -a), slice(-a, -s), slice(-s, None)):
            for rows in (slice(0, -p), slice(-p, -t), slice(-t, None)):
                regions[:, levels, rows, :, :] = count
                count += 1
        regions = earth_partition(regions, self.window).view(w // q, -1, a * p * q)
        mask = regions.unsqueeze(2) - regions.unsqueeze(3)
        return mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)

    def forward(self, x):
        (z, h, w), (a, p, q) = self.shape, self.window
        b, _, c = x.shape
        skip = x
        x = self.norm1(x).view(b, z, h, w, c)
        x = self.pad(x.permute(0, 4, 1, 2, 3)).permute(0, 2, 3, 4, 1)
        if any(self.shift):
            x = torch.roll(x, shifts=tuple(-s for s in self.shift), dims=(1, 2, 3))
        windows = earth_partition(x, self.window)
        around, kinds = windows.shape[0], windows.shape[1]
        windows = self.attn(windows.view(around, kinds, a * p * q, c), self.mask)
        x = earth_reverse(windows.view(around, kinds, a, p, q, c), self.window, *self.padded)
        if any(self.shift):
            x = torch.roll(x, shifts=self.shift, dims=(1, 2, 3))
        left, _, top, _, front, _ = self.pads()
        x = x[:, front : front + z, top : top + h, left : left + w, :].reshape(b, z * h * w, c)
        x = skip + x
        return x + self.mlp(self.norm2(x))


class SmallPangu(nn.Module):
    """Tokens of level x lat x lon, two blocks at full and two at half resolution, and the skip joined at the end."""

    def __init__(self, shape, window):
        super().__init__()
        z, h, w = shape
        self.shape, self.half = shape, (z, -(-h // 2), -(-w // 2))
        shift = tuple(n // 2 for n in window)
        self.first = nn.Sequential(EarthBlock(4, shape, window, (0, 0, 0)), EarthBlock(4, shape, window, shift))
        self.second = nn.Sequential(
            EarthBlock(8, self.half, window, (0, 0, 0)), EarthBlock(8, self.half, window, shift)
        )
        self.down, self.norm = nn.Linear(16, 8, bias=False), nn.LayerNorm(16)
        self.up, self.mix = nn.Linear(8, 16, bias=False), nn.Linear(4, 4)

    def forward(self, x):
        b, c = x.shape[:2]
        (z, h, w), (_, low, narrow) = self.shape, self.half
        x = self.first(x.reshape(b, c, -1).transpose(1, 2))
        skip = x
        x = F.pad(x.reshape(b, z, h, w, c).permute(0, 4, 1, 2, 3), (0, 2 * narrow - w, 0, 2 * low - h)).permute(
            0, 2, 3, 4, 1
        )
        x = x.reshape(b, z, low, 2, narrow, 2, c).permute(0, 1, 2, 4, 3, 5, 6).reshape(b, z * low * narrow, 4 * c)
        x = self.second(self.down(self.norm(x)))
        x = self.up(x).reshape(b, z, low, narrow, 2, 2, c).permute(0, 1, 2, 4, 3, 5, 6)
        x = x.reshape(b, z, low * 2, narrow * 2, c)[:, :, :h, :w, :].reshape(b, z * h * w, c)
        x = self.mix(x)
        return torch.cat([x, skip], dim=-1).transpose(1, 2).reshape(b, 2 * c, z, h, w)


@pytest.mark.slow
def test_pangu():
    torch.manual_seed(0)
    net = SmallPangu((3, 13, 18), (2, 4, 6))
    assert_same_on_every_mesh(net, torch.randn(1, 4, 3, 13, 18), MESHES, spec=(None, None, None, "lat", "lon"))


# -- other windows: DaViT, MaxViT -------------------------------------------------------------------------------------


def grid_partition(x, size):
    b, h, w, c = x.shape
    x = x.view(b, size, h // size, size, w // size, c)
    return x.permute(0, 2, 4, 1, 3, 5).contiguous().view(-1, size, size, c)


def grid_reverse(windows, size, h, w):
    c = windows.shape[-1]
    x = windows.view(-1, h // size, w // size, size, size, c)
    return x.permute(0, 3, 1, 4, 2, 5).contiguous().view(-1, h, w, c)


class SmallMaxViT(nn.Module):
    """Attention in blocks, then in grids of rows that lie far apart."""

    def __init__(self, dim, size):
        super().__init__()
        self.size, self.norm = size, nn.LayerNorm(dim)
        self.block, self.grid = WindowAttention(dim, size, 2), WindowAttention(dim, size, 2)

    def forward(self, x):
        _, h, w, c = x.shape
        n = self.size
        parts = window_partition(self.norm(x), n)
        x = x + window_reverse(self.block(parts.view(-1, n * n, c)).view(-1, n, n, c), n, h, w)
        parts = grid_partition(self.norm(x), n)
        return x + grid_reverse(self.grid(parts.view(-1, n * n, c)).view(-1, n, n, c), n, h, w)


class KernelAttention(nn.Module):
    """DaViT: attention in windows by torch's kernel, then between channels, over all tokens."""

    def __init__(self, dim, window, heads=2):
        super().__init__()
        self.window, self.heads = window, heads
        self.qkv, self.proj, self.norm = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim), nn.LayerNorm(dim)
        self.channels = nn.Linear(dim, 3 * dim)

    def forward(self, x):
        b, h, w, c = x.shape
        n = self.window
        y = F.pad(self.norm(x), (0, 0, 0, (n - w % n) % n, 0, (n - h % n) % n))
        _, rows, columns, _ = y.shape
        parts = window_partition(y, n).view(-1, n * n, c)
        qkv = self.qkv(parts).reshape(parts.shape[0], n * n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv.unbind(0)).transpose(1, 2).reshape(-1, n * n, c)
        y = window_reverse(self.proj(y).view(-1, n, n, c), n, rows, columns)[:, :h, :w, :].contiguous()
        x = (x + y).view(b, h * w, c)
        q, k, v = self.channels(x).reshape(b, h * w, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        scores = ((q * (h * w) ** -0.5).transpose(-1, -2) @ k).softmax(dim=-1)
        y = (scores @ v.transpose(-1, -2)).transpose(-1, -2)
        return x + y.transpose(1, 2).reshape(b, h * w, c)


def test_maxvit_and_davit():
    torch.manual_seed(0)
    space = (None, "lat", "lon", None)
    assert_same_on_every_mesh(SmallMaxViT(4, 4), torch.randn(2, 20, 12, 4), MESHES, spec=space)
    assert_same_on_every_mesh(SmallMaxViT(4, 3), torch.randn(1, 6, 9, 4), MESHES, spec=space)
    assert_same_on_every_mesh(KernelAttention(4, 4), torch.randn(2, 13, 10, 4), MESHES, spec=space)


# -- what travels -----------------------------------------------------------------------------------------------------


@on_ranks(4)
def test_a_shifted_window_sends_the_rows_of_its_shift():
    mesh = world_mesh(lat=4)
    x = torch.randn(1, 32, 6, 3, dtype=torch.float64)
    row = 6 * 3 * 8
    spec = (None, "lat", None, None)
    even, uneven = shard(x, mesh, spec), shard(x, mesh, spec, split={1: (0, 7, 16, 25, 32)})
    for tile, moved in ((even, 0), (uneven, [0, 1, 1, 0][mesh.get_local_rank()])):
        with comm.count() as roll:
            rolled = torch.roll(tile, shifts=(-2, -2), dims=(1, 2))
        assert roll.sent_bytes == 2 * row
        with comm.count() as view:
            parts = window_partition(rolled[:, :, :4], 4)
        assert {c.kind for c in view.calls} <= {"realign"}
        assert view.sent_bytes == moved * row * 4 // 6
        with comm.count() as rest:
            back = window_reverse(parts, 4, 32, 4)
        assert rest.sent_bytes == 0
        torch.testing.assert_close(back.full_tensor(), torch.roll(x, (-2, -2), (1, 2))[:, :, :4])


@on_ranks(4)
def test_a_view_that_parts_every_row_cuts_another_dim():
    mesh = world_mesh(lat=4)
    x = torch.randn(6, 7, 4, dtype=torch.float64)
    tile = shard(x, mesh, (None, "lat", None))
    tile.local.requires_grad_()
    with comm.count() as forward:
        y = tile.view(6, 4, 7)
    assert y.layout.spec == ("lat", None, None)
    assert {c.kind for c in forward.calls} == {"recut"}
    # rank 0 keeps 2 of its 2 x 6 rows of 4 and gives 10, the last one keeps 1 of 6 and gives 5
    assert forward.sent_bytes == [8, 8, 10, 5][mesh.get_local_rank()] * 4 * 8
    (y * y).sum().backward()
    torch.testing.assert_close(y.full_tensor(), x.view(6, 4, 7))
    torch.testing.assert_close(tile.grad.full_tensor(), 2 * x)
    # nothing else can be cut: one rank gets what there is
    alone = shard(x[:1], mesh, (None, "lat", None)).view(4, 7)
    assert [*alone.layout.cuts[0].points] == [0, 4, 4, 4, 4]
    torch.testing.assert_close(alone.full_tensor(), x[0].view(4, 7))
    one = shard(x[:1, :1, :1], mesh, ("lat", None, None)).view(1, 1)
    assert one.full_tensor().item() == x[0, 0, 0]


# -- the rule of views, in integers -----------------------------------------------------------------------------------


def _rows_of(layout, shape):
    """For each rank the elements that it owns, in the order in which its local tensor has them."""
    every = np.arange(math.prod(shape)).reshape([c.size for c in layout.cuts])
    return [every[tuple(slice(a, b) for a, b in layout.owned(at))].ravel().tolist() for at in layout.coords()]


@st.composite
def _views(draw):
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12]), min_size=1, max_size=4))
    axes = {"lat": draw(st.integers(2, 4)), "lon": draw(st.integers(1, 3))}
    cuts = [whole_dim(n) for n in sizes]
    for axis, pieces in axes.items():
        free = [d for d, c in enumerate(cuts) if not c.is_cut]
        if pieces > 1 and free:
            d = draw(st.sampled_from(free))
            inner = draw(st.lists(st.integers(0, sizes[d]), min_size=pieces - 1, max_size=pieces - 1))
            cuts[d] = Cut(sizes[d], (0, *sorted(inner), sizes[d]), (axis,))
    left, shape = math.prod(sizes), []
    while left > 1 and len(shape) < 4:
        n = draw(st.sampled_from([k for k in range(1, left + 1) if left % k == 0]))
        shape.append(n)
        left //= n
    return Layout(tuple(cuts), tuple(axes.items())), (*shape, left)


@settings(max_examples=400, deadline=None)
@given(_views())
def test_every_view_is_answered(view):
    layout, shape = view
    before, after = plan_reshape(layout, shape)
    assert (before.shape, after.shape) == (layout.shape, shape)
    assert _rows_of(before, layout.shape) == _rows_of(after, shape)
    kept = [a.axes == b.axes for a, b in zip(layout.cuts, before.cuts, strict=True)]
    if not all(kept):
        assert sum(1 for c in before.cuts if c.axes) <= sum(1 for c in layout.cuts if c.axes)


def test_points_that_would_all_fall_on_one_rank_are_shared_out():
    axes = (("lat", 2), ("lon", 3))
    rows = Layout((Cut(14, (0, 3, 14), ("lat",)), whole_dim(5)), axes)
    assert plan_reshape(rows, (2, 7, 5))[0].cuts[0].points == (0, 7, 14)
    three = Layout((Cut(12, cut_points(12, 6), ("lat", "lon")),), axes)
    assert plan_reshape(three, (3, 4))[1].cuts[0].points == (0, 1, 1, 2, 2, 3, 3)
    # one window of all rows stays cut inside
    window = Layout((Cut(7, (0, 4, 7), ("lat",)), whole_dim(5)), axes)
    assert plan_reshape(window, (1, 7, 5))[1].spec == (None, "lat", None)
    # of two dims that can be cut, the one of more rows
    mixed = Layout((whole_dim(2), Cut(5, (0, 3, 5), ("lat",)), whole_dim(2), whole_dim(9)), axes)
    assert plan_reshape(mixed, (2, 2, 5, 9))[1].spec == (None, None, None, "lat")
