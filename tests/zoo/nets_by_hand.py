"""Nets as their papers have them, where no package that can be installed does: plain torch and einops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_net import LATLON, ZooInput, ZooNet, image


class Window3d(nn.Module):
    """A Swin block in three dims (level, lat, lon), shifted, with the mask and the bias by earth position."""

    def __init__(self, width: int, heads: int, size: tuple[int, int, int], window: tuple[int, int, int], shift: bool):
        super().__init__()
        self.heads, self.size, self.window = heads, size, window
        self.shift = tuple(w // 2 for w in window) if shift else (0, 0, 0)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        tokens = window[0] * window[1] * window[2]
        self.bias = nn.Parameter(torch.zeros(heads, tokens, tokens))
        self.register_buffer("mask", self._mask() if shift else None, persistent=False)

    def _mask(self) -> Tensor:
        kinds = torch.zeros(1, *self.size, 1)
        number = 0
        for z in self._slices(0):
            for y in self._slices(1):
                kinds[:, z, y] = number  # longitude goes around: no mask
                number += 1
        windows = self._windows(kinds).squeeze(-1)
        return (windows[:, None] != windows[:, :, None]) * -100.0

    def _slices(self, dim: int) -> tuple[slice, ...]:
        w, s = self.window[dim], self.shift[dim]
        return slice(0, -w), slice(-w, -s), slice(-s, None)

    def _windows(self, x: Tensor) -> Tensor:
        b, z, y, u, c = x.shape
        wz, wy, wx = self.window
        x = x.view(b, z // wz, wz, y // wy, wy, u // wx, wx, c)
        return x.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(-1, wz * wy * wx, c)

    def _from_windows(self, x: Tensor, batch: int) -> Tensor:
        (z, y, u), (wz, wy, wx) = self.size, self.window
        x = x.view(batch, z // wz, y // wy, u // wx, wz, wy, wx, -1)
        return x.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(batch, z, y, u, -1)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.norm1(x)
        if self.mask is not None:
            x = torch.roll(x, tuple(-s for s in self.shift), (1, 2, 3))
        windows = self._windows(x)
        n, tokens, width = windows.shape
        q, k, v = self.qkv(windows).reshape(n, tokens, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        scores = q * (width // self.heads) ** -0.5 @ k.transpose(-2, -1) + self.bias
        if self.mask is not None:
            count = self.mask.shape[0]
            scores = scores.view(-1, count, self.heads, tokens, tokens) + self.mask[:, None]
            scores = scores.view(-1, self.heads, tokens, tokens)
        y = (scores.softmax(-1) @ v).transpose(1, 2).reshape(n, tokens, width)
        x = self._from_windows(self.proj(y), x.shape[0])
        if self.mask is not None:
            x = torch.roll(x, self.shift, (1, 2, 3))
        x = residual + x
        return x + self.mlp(self.norm2(x))


class Swin3d(nn.Module):
    """Patches in three dims, two window blocks, patches back."""

    def __init__(self) -> None:
        super().__init__()
        size, window = (2, 8, 12), (2, 2, 4)
        self.embed = nn.Conv3d(3, 8, (2, 3, 4), (2, 3, 4))
        self.blocks = nn.Sequential(*(Window3d(8, 2, size, window, shift) for shift in (False, True)))
        self.recover = nn.ConvTranspose3d(8, 2, (2, 3, 4), (2, 3, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).permute(0, 2, 3, 4, 1)
        return self.recover(self.blocks(x).permute(0, 4, 1, 2, 3))


class UTransformer(nn.Module):
    """As FuXi: a cube embedding, a strided residual block down, attention, one up, a skip, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Conv3d(3, 16, (2, 4, 4), (2, 4, 4))
        self.norm = nn.LayerNorm(16)
        self.down = nn.Conv2d(16, 16, 3, 2, 1)
        self.res = nn.Sequential(nn.Conv2d(16, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.SiLU())
        self.block = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True, norm_first=True)
        self.up = nn.ConvTranspose2d(32, 16, 2, 2)
        self.head = nn.Linear(32, 2 * 4 * 4)

    def forward(self, x: Tensor) -> Tensor:
        b, _, _, h, w = x.shape
        x = self.norm(self.embed(x).squeeze(2).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        skip = x
        down = self.down(x)
        down = down + self.res(down)
        shortcut = down
        y = self.block(down.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(shortcut.shape)
        y = self.up(torch.cat([shortcut, y], 1))
        y = self.head(torch.cat([y, skip], 1).permute(0, 2, 3, 1))
        y = y.reshape(b, h // 4, w // 4, 4, 4, 2).permute(0, 1, 3, 2, 4, 5)
        y = y.reshape(b, h, w, 2).permute(0, 3, 1, 2)
        return F.interpolate(y, size=(h, w), mode="bilinear")


class FourierBlock(nn.Module):
    """As FourCastNet: a block-diagonal network of Fourier modes, with soft shrinkage."""

    def __init__(self, width: int = 8, blocks: int = 2) -> None:
        super().__init__()
        self.blocks, self.size = blocks, width // blocks
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.w = nn.Parameter(torch.zeros(2, 2, blocks, self.size, self.size))
        self.b = nn.Parameter(torch.zeros(2, 2, blocks, self.size))
        self.mlp = nn.Sequential(nn.Linear(width, 16), nn.GELU(), nn.Linear(16, width))

    def _mix(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        def product(part: Tensor, of: int) -> Tensor:
            return torch.einsum("...bi,bio->...bo", part, self.w[layer, of])

        real = product(x.real, 0) - product(x.imag, 1) + self.b[layer, 0]
        imag = product(x.imag, 0) + product(x.real, 1) + self.b[layer, 1]
        return real, imag

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, c = x.shape
        z = torch.fft.rfft2(self.norm1(x), dim=(1, 2), norm="ortho").reshape(b, h, w // 2 + 1, self.blocks, self.size)
        real, imag = self._mix(z, 0)
        real, imag = self._mix(torch.complex(F.relu(real), F.relu(imag)), 1)
        z = torch.view_as_complex(F.softshrink(torch.stack([real, imag], dim=-1), 0.01))
        y = torch.fft.irfft2(z.reshape(b, h, w // 2 + 1, c), s=(h, w), dim=(1, 2), norm="ortho")
        x = x + y
        return x + self.mlp(self.norm2(x))


class FourCastNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 2, 2)
        self.position = nn.Parameter(torch.zeros(1, 12, 24, 8))
        self.blocks = nn.Sequential(FourierBlock(), FourierBlock())
        self.head = nn.Linear(8, 2 * 2 * 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patch(x).permute(0, 2, 3, 1) + self.position)
        b, h, w, _ = x.shape
        x = self.head(x).view(b, h, w, 2, 2, 2)
        return x.permute(0, 5, 1, 3, 2, 4).reshape(b, 2, h * 2, w * 2)


class LocalAttentionNet(nn.Module):
    """A periodic U-Net with attention by hand in its middle, as diffusion forecasts have."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, padding_mode="circular")
        self.down = nn.Conv2d(8, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(4, 8)
        self.qkv = nn.Conv2d(8, 24, 1)
        self.up = nn.Conv2d(16, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        skip = F.silu(self.first(x))
        y = self.norm(self.down(skip))
        q, k, v = self.qkv(y).flatten(2).chunk(3, dim=1)
        weights = torch.einsum("bcq,bck->bqk", q, k / 8**0.5).softmax(dim=-1)
        y = y + torch.einsum("bqk,bck->bcq", weights, v).view_as(y)
        y = F.interpolate(y, size=skip.shape[-2:], mode="nearest")
        return self.up(torch.cat([skip, y], dim=1))


CUBE = ZooInput((1, 3, 4, 24, 48), (None, *LATLON))
HAND_NETS = [
    ZooNet("Swin3d", "by hand", Swin3d, [CUBE]),
    ZooNet("UTransformer", "by hand", UTransformer, [ZooInput((1, 3, 2, 32, 48), (None, *LATLON))]),
    ZooNet("FourCastNet", "by hand", FourCastNet, [image(1, 3, 24, 48)]),
    ZooNet("U-Net with attention", "by hand", LocalAttentionNet, [image(1, 3, 25, 36)]),
]
