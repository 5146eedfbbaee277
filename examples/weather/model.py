"""A forecast model in plain torch: strided encoder, attention over the coarse globe, decoder with skips. No jigsaw.

The same code runs on whole tensors and on tiles of them, on 73 x 144 points and on 721 x 1440 with 69 channels.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class GlobeConv(nn.Conv2d):
    """Convolution on a latitude-longitude grid: periodic along longitude, zeros beyond the poles."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, padding=(kernel // 2, 0))
        self.wrap = kernel // 2

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, lat, lon] -> the same, or half the rows and columns (rounded up) with stride 2."""
        return super().forward(F.pad(x, (self.wrap, self.wrap, 0, 0), mode="circular"))


class Block(nn.Module):
    """x + conv(GELU(conv(norm(x)))), both convolutions 3 x 3."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.first = GlobeConv(width, width)
        self.second = GlobeConv(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, lat, lon] -> the same."""
        return x + self.second(F.gelu(self.first(self.norm(x))))


class Attention(nn.Module):
    """Every point of the coarse globe attends to every other, then a pointwise MLP; both normalized and residual."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def split(self, x: Tensor) -> Tensor:
        """[B, N, C] -> [B, heads, N, C / heads]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, lat, lon] -> the same."""
        grid = x.shape[-2:]
        x = x.flatten(2).transpose(1, 2)  # tokens: [B, lat * lon, C]
        y = self.norm(x)
        y = F.scaled_dot_product_attention(
            self.split(self.query(y)), self.split(self.key(y)), self.split(self.value(y))
        )
        x = x + self.out(y.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.mlp_norm(x))
        return x.transpose(1, 2).unflatten(2, grid)


class GlobeModel(nn.Module):
    """forecast = (1 - damping) * last input + increment, both predicted from all inputs, the season and the place.

    `size` is the whole grid. The stem and every width after the first halve it, rounded up.
    """

    def __init__(
        self, steps: int, channels: int, size: tuple[int, int], widths: tuple[int, ...], attentions: int = 1
    ) -> None:
        super().__init__()
        pairs = list(pairwise(widths))
        self.stem = GlobeConv(steps * channels, widths[0], stride=2)
        self.encoder = nn.ModuleList(Block(width) for width in widths[:-1])
        self.down = nn.ModuleList(GlobeConv(fine, coarse, stride=2) for fine, coarse in pairs)
        self.middle = nn.Sequential(*(Attention(widths[-1]) for _ in range(attentions)))
        self.up = nn.ModuleList(GlobeConv(coarse, fine) for fine, coarse in pairs)
        self.decoder = nn.ModuleList(Block(width) for width in widths[:-1])
        self.head = GlobeConv(steps * channels + widths[0], 2 * channels)
        nn.init.zeros_(self.head.weight)  # the first forecast is persistence
        nn.init.zeros_(self.head.bias)
        self.stride = 2 ** len(widths)
        self.place = nn.Parameter(torch.zeros(1, widths[-1], *(-(-n // self.stride) for n in size)))
        self.season = nn.Sequential(nn.Linear(2, widths[-1]), nn.GELU(), nn.Linear(widths[-1], widths[-1]))

    def forward(self, x: Tensor, season: Tensor) -> Tensor:
        """Inputs [B, T, C, lat, lon] and season [B, 2] (sine and cosine of the time of year) -> [B, 1, C, lat, lon]."""
        last = x[:, -1]
        inputs = x.flatten(1, 2)
        x = self.stem(inputs)
        skips = []
        for block, down in zip(self.encoder, self.down, strict=True):
            skips.append(block(x))
            x = down(skips[-1])
        x = self.middle(x + self.place + self.season(season)[:, :, None, None])
        for block, up in zip(reversed(self.decoder), reversed(self.up), strict=True):
            skip = skips.pop()
            x = block(skip + up(F.interpolate(x, size=skip.shape[-2:])))
        x = self.head(torch.cat([inputs, F.interpolate(x, size=last.shape[-2:])], dim=1))
        damping, increment = x.chunk(2, dim=1)
        return (last - damping * last + increment).unsqueeze(1)
