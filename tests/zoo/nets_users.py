"""Nets and losses as users write them by hand: recurrent, transformers with tokens of their own, experts, physics."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo_net import LATLON, ZooInput, ZooNet, image, labels, volume, whole

MOVIE = (None, *LATLON)  # batch, time, channels, rows, columns


class ConvLSTM(nn.Module):
    """State that starts as plain zeros, peepholes by grid point, one output a step."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.Conv2d(3 + 6, 4 * 6, 3, padding=1)
        self.peep = nn.Parameter(torch.zeros(3, 6, 25, 20))
        self.out = nn.Conv2d(6, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, steps, _, rows, columns = x.shape
        h = torch.zeros(b, 6, rows, columns, device=x.device, dtype=x.dtype)
        c, found = torch.zeros_like(h), []
        for k in range(steps):
            i, f, o, g = self.gates(torch.cat([x[:, k], h], 1)).chunk(4, 1)
            i = torch.sigmoid(i + self.peep[0] * c)
            f = torch.sigmoid(f + self.peep[1] * c + 1)
            c = f * c + i * torch.tanh(g)
            h = torch.sigmoid(o + self.peep[2] * c) * torch.tanh(c)
            found.append(self.out(h))
        return torch.stack(found, 1)


class GlobeConv(nn.Module):
    """Circular along longitude, reflected at the poles."""

    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(F.pad(x, (1, 1, 0, 0), mode="circular"), (0, 0, 1, 1), mode="reflect"))


class WeatherUNet(nn.Module):
    """Climatology, positions and static fields; what is interpolated is cropped to the skip."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("climatology", torch.randn(1, 4, 33, 48))
        self.register_buffer("std", torch.rand(1, 4, 1, 1) + 0.5)
        self.static = nn.Parameter(torch.randn(1, 2, 33, 48))
        self.first, self.middle, self.last = GlobeConv(8, 8), GlobeConv(8, 12), GlobeConv(20, 8)
        self.pool, self.out = nn.AvgPool2d(2, ceil_mode=True), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        lat = torch.linspace(-math.pi / 2, math.pi / 2, x.shape[-2], dtype=x.dtype)
        place = torch.stack([lat.sin(), lat.cos()])[None, :, :, None].expand(x.shape[0], -1, -1, x.shape[-1])
        static = self.static.expand(x.shape[0], -1, -1, -1)
        skip = F.gelu(self.first(torch.cat([(x - self.climatology) / self.std, place, static], 1)))
        y = F.gelu(self.middle(self.pool(skip)))
        y = F.interpolate(y, scale_factor=2, mode="bilinear")[..., : skip.shape[-2], : skip.shape[-1]]
        return self.out(F.gelu(self.last(torch.cat([y, skip], 1)))) * self.std + x


class AdaptiveBlock(nn.Module):
    """Attention and an MLP, shifted, scaled and gated by the lead time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 32), nn.GELU(approximate="tanh"), nn.Linear(32, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        a, b, g, d, e, k = (part.unsqueeze(1) for part in self.modulation(time).chunk(6, dim=1))
        y = self.norm(x) * (1 + b) + a
        x = x + g * self.attention(y, y, y, need_weights=False)[0]
        return x + k * self.mlp(self.norm(x) * (1 + e) + d)


class Stormer(nn.Module):
    """Tokens a variable, aggregated by cross attention; then adaptive blocks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.variables = nn.ModuleList(nn.Conv2d(1, width, 4, 4) for _ in range(3))
        self.names = nn.Parameter(torch.zeros(1, 3, width))
        self.query = nn.Parameter(torch.zeros(1, 1, width))
        self.gather = nn.MultiheadAttention(width, 2, batch_first=True)
        self.place = nn.Parameter(torch.zeros(1, 40, width))
        self.time = nn.Linear(8, width)
        self.blocks = nn.ModuleList(AdaptiveBlock(width) for _ in range(2))
        self.head = nn.Linear(width, 3 * 16)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        tokens = [net(x[:, i : i + 1]).flatten(2).transpose(1, 2) for i, net in enumerate(self.variables)]
        z = torch.stack(tokens, dim=1) + self.names.unsqueeze(2)
        b, _, count, _ = z.shape
        z = z.permute(0, 2, 1, 3).flatten(0, 1)
        z, _ = self.gather(self.query.repeat_interleave(z.shape[0], dim=0), z, z)
        z = z.squeeze(1).unflatten(0, (b, count)) + self.place
        angles = time[:, None] * torch.exp(-torch.arange(4, dtype=x.dtype))
        condition = self.time(torch.cat([angles.cos(), angles.sin()], -1))
        for block in self.blocks:
            z = block(z, condition)
        y = self.head(z).reshape(b, 5, 8, 4, 4, 3).permute(0, 5, 1, 3, 2, 4)
        return x + y.reshape(b, 3, 20, 32)


class Perceiver(nn.Module):
    """Few latents read all points and are read by them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.lift, self.out = nn.Linear(3 + 4, width), nn.Linear(width, 2)
        self.latents = nn.Parameter(torch.randn(6, width))
        self.read = nn.MultiheadAttention(width, 2, batch_first=True)
        self.think = nn.TransformerEncoderLayer(width, 2, 32, 0.0, batch_first=True)
        self.write = nn.MultiheadAttention(width, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        b, _, rows, columns = x.shape
        axes = (torch.linspace(-1, 1, rows), torch.linspace(-1, 1, columns))
        grid = torch.stack(torch.meshgrid(*axes, indexing="ij"), -1).to(x)
        grid = torch.cat([grid.sin(), grid.cos()], -1).expand(b, -1, -1, -1)
        points = self.lift(torch.cat([x.permute(0, 2, 3, 1), grid], -1).reshape(b, rows * columns, -1))
        latents = self.latents.unsqueeze(0).expand(b, -1, -1)
        latents = self.think(latents + self.read(latents, points, points)[0])
        y = points + self.write(points, latents, latents, need_weights=False)[0]
        return self.out(y).view(b, rows, columns, 2).permute(0, 3, 1, 2).contiguous()


class Columns(nn.Module):
    """A convolution and a GRU along the levels of each column."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gru, self.out = nn.Conv1d(2, 4, 3, padding=1), nn.GRU(4, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        b, c, rows, columns, levels = x.shape
        y = self.conv(x.permute(0, 2, 3, 1, 4).reshape(-1, c, levels))
        y, _ = self.gru(y.transpose(1, 2))
        return self.out(y).reshape(b, rows, columns, levels, 2).permute(0, 4, 1, 2, 3)


class SparseExperts(nn.Module):
    """Each point's best expert alone computes it: rows are picked, and added where they came from."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(3, 3)
        self.experts = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        points = x.permute(0, 2, 3, 1).reshape(-1, 3)
        gates, best = F.softmax(self.router(points), dim=-1).topk(1, dim=-1)
        out = torch.zeros_like(points)
        for k, expert in enumerate(self.experts):
            rows = torch.where(best[:, 0] == k)[0]
            out.index_add_(0, rows, expert(points[rows]) * gates[rows])
        return out.reshape(x.shape[0], *x.shape[-2:], 3).permute(0, 3, 1, 2)


class AxialAttention(nn.Module):
    """Along rows, then along columns."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.lift, self.out = nn.Conv2d(4, width, 1), nn.Conv2d(width, 2, 1)
        self.place = nn.Parameter(torch.zeros(1, width, 22, 1))
        self.along = nn.ModuleList(nn.MultiheadAttention(width, 2, batch_first=True) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x) + self.place
        for attention in self.along:
            b, c, rows, columns = x.shape
            y = x.permute(0, 2, 3, 1).reshape(b * rows, columns, c)
            x = x + attention(y, y, y)[0].reshape(b, rows, columns, c).permute(0, 3, 1, 2)
            x = x.transpose(2, 3)
        return self.out(x)


class Rollout(nn.Module):
    """Three steps, each from the two before, with forcings and a static field."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(10, 8, 3, padding=1, padding_mode="circular"), nn.SiLU(), nn.Conv2d(8, 3, 1))
        self.register_buffer("mean", torch.randn(3))
        self.register_buffer("std", torch.rand(3) + 1)

    def forward(self, x: Tensor, forcing: Tensor, static: Tensor) -> tuple[Tensor, Tensor]:
        before, now, found = x[:, :3], x[:, 3:], []
        mean, std = self.mean[None, :, None, None], self.std.view(1, -1, 1, 1)
        for k in range(3):
            state = [(before - mean) / std, (now - mean) / std, forcing[:, k], static]
            new = now + self.net(torch.cat(state, dim=1)) * std
            before, now = now, torch.cat([new[:, :1].clamp(min=0), new[:, 1:]], 1)
            found.append(now)
        return torch.stack(found, dim=1), torch.concat(found, dim=0)


class Slopes(nn.Module):
    """Gradients on uneven latitudes, and where they come from."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 3, 3, padding=1)
        self.register_buffer("lat", torch.linspace(-1.4, 1.4, 23).sin())

    def forward(self, x: Tensor) -> Tensor:
        south, east = torch.gradient(x, dim=(2, 3), spacing=(self.lat, torch.linspace(0, 6, 18).to(x)))
        return self.conv(torch.cat([south, F.interpolate(east, (23, 18), mode="bicubic", align_corners=True)], 1))


def _small(out: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.SiLU(), nn.Conv2d(8, out, 3, padding=1))


def _land_loss(y: Tensor, t: Tensor) -> Tensor:
    """Points without an observation are left out, by every way there is; terms are added in place."""
    known = ~torch.isnan(torch.where(t > 1, torch.nan, t))
    t = torch.nan_to_num(torch.where(known, t, torch.nan), nan=0.0)
    loss = F.mse_loss(y, t)
    loss += ((y - t) ** 2)[known].mean()
    loss += torch.where(known, (y - t).abs(), torch.zeros_like(y)).sum() / known.sum().clamp(min=1)
    loss *= 0.5
    z = y.clone()
    z[~known] = 0.0
    bias = z.sum((2, 3))
    bias += torch.masked_select(y, known).mean()
    weight = torch.cos(torch.linspace(-1.5, 1.5, y.shape[-2], dtype=y.dtype)).view(1, 1, -1, 1)
    spectrum = torch.fft.rfft(y, dim=-1).abs().pow(2).mean(dim=-2)
    return loss + bias.pow(2).mean() + (weight * (y - t) ** 2).mean() + spectrum[..., 1:].log().pow(2).mean()


def _classes_loss(y: Tensor, t: Tensor) -> Tensor:
    one = F.one_hot(t[:, 0], 3).permute(0, 3, 1, 2).to(y.dtype)
    p, logs = y.softmax(1), F.log_softmax(y, 1)
    both = (p * one).sum((2, 3))
    dice = 1 - (2 * both + 1) / (p.sum((2, 3)) + one.sum((2, 3)) + 1)
    cross = F.cross_entropy(y, t[:, 0], weight=torch.tensor([1.0, 2.0, 0.5]), ignore_index=2, label_smoothing=0.1)
    own = logs.gather(1, t)
    focal = (-((1 - own.exp()) ** 2) * own).mean()
    table = -(logs * torch.eye(3)[t[:, 0]].permute(0, 3, 1, 2)).sum(1).mean()
    return dice.mean() + cross + focal + table + F.cosine_similarity(y, one, dim=1).mean()


USER_NETS = [
    ZooNet("ConvLSTM", "by hand", ConvLSTM, [ZooInput((1, 4, 3, 25, 20), MOVIE)]),
    ZooNet("weather U-Net", "by hand", WeatherUNet, [image(1, 4, 33, 48)]),
    ZooNet("Stormer", "by hand", Stormer, [image(1, 3, 20, 32), whole(1)]),
    ZooNet("Perceiver", "by hand", Perceiver, [image(1, 3, 18, 20)]),
    ZooNet("columns", "by hand", Columns, [volume(1, 2, 14, 12, 6)]),
    ZooNet("sparse experts", "by hand", SparseExperts, [image(2, 3, 20, 18)]),
    ZooNet("axial attention", "by hand", AxialAttention, [image(1, 4, 22, 18)]),
    ZooNet(
        "rollout", "by hand", Rollout, [image(1, 6, 24, 19), ZooInput((1, 3, 2, 24, 19), MOVIE), image(1, 2, 24, 19)]
    ),
    ZooNet("slopes", "by hand", Slopes, [image(1, 3, 23, 18)]),
    ZooNet(
        "land loss", "by hand", lambda: _small(2), [image(1, 3, 25, 18)], targets=[image(1, 2, 25, 18)], loss=_land_loss
    ),
    ZooNet(
        "classes loss",
        "by hand",
        lambda: _small(3),
        [image(2, 3, 25, 18)],
        targets=[labels(3, 2, 1, 25, 18)],
        loss=_classes_loss,
    ),
]
