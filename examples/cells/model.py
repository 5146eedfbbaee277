"""A U-Net on HEALPix cells.  `gather_neighbors` is all that it needs of jigsaw; it runs on whole tensors, too."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import jigsaw


class CellConv(nn.Module):
    """The 3 x 3 convolution of a globe of cells: each cell and its eight neighbors, or seven at corners of faces."""

    def __init__(self, inputs: int, outputs: int, table: jigsaw.Neighbors) -> None:
        super().__init__()
        self.table, self.mix = table, nn.Linear(9 * inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, cells] -> the same."""
        near = jigsaw.nn.gather_neighbors(x, self.table)
        nine = torch.cat([x.unsqueeze(-1), near], -1)  # [B, C, cells, 9]
        return self.mix(nine.transpose(1, 2).flatten(2)).transpose(1, 2)


class Block(nn.Module):
    """x + conv(GELU(conv(norm(x))))."""

    def __init__(self, width: int, table: jigsaw.Neighbors) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.first, self.second = CellConv(width, width, table), CellConv(width, width, table)

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, cells] -> the same."""
        return x + self.second(F.gelu(self.first(self.norm(x))))


class CellModel(nn.Module):
    """forecast = (1 - damping) * last input + increment, both predicted from all inputs and the season.

    Cell k of a nested grid is made of the cells 4k to 4k + 3 of the next finer one, so that going down and up again
    sends nothing where the cuts lie at multiples of `block` cells.
    """

    def __init__(self, steps: int, level: int, widths: tuple[int, ...]) -> None:
        super().__init__()
        tables = [jigsaw.Neighbors.healpix(2 ** (level - k)) for k in range(len(widths))]
        self.block = 4 ** (len(widths) - 1)
        self.stem = nn.Linear(steps + 2, widths[0])
        self.down = nn.ModuleList(Block(width, table) for width, table in zip(widths[:-1], tables, strict=False))
        self.wide = nn.ModuleList(nn.Linear(fine, coarse) for fine, coarse in pairwise(widths))
        self.middle = Block(widths[-1], tables[-1])
        self.narrow = nn.ModuleList(nn.Linear(coarse, fine) for fine, coarse in pairwise(widths))
        self.up = nn.ModuleList(Block(width, table) for width, table in zip(widths[:-1], tables, strict=False))
        self.head = nn.Linear(widths[0], 2)
        nn.init.zeros_(self.head.weight)  # the first forecast is persistence
        nn.init.zeros_(self.head.bias)

    def forward(self, x: Tensor, season: Tensor) -> Tensor:
        """Inputs [B, T, cells] and season [B, 2] (sine and cosine of the time of year) -> [B, cells]."""
        last = x[:, -1]
        season = season[:, :, None].expand(-1, -1, x.shape[-1])
        x = self.stem(torch.cat([x, season], 1).transpose(1, 2)).transpose(1, 2)
        skips: list[Tensor] = []
        for block, wide in zip(self.down, self.wide, strict=True):
            skips.append(block(x))
            coarse = skips[-1].unflatten(-1, (-1, 4)).mean(-1)
            x = wide(coarse.transpose(1, 2)).transpose(1, 2)
        x = self.middle(x)
        for block, narrow in zip(reversed(self.up), reversed(self.narrow), strict=True):
            fine = narrow(x.transpose(1, 2)).transpose(1, 2).unsqueeze(-1).expand(-1, -1, -1, 4).flatten(2)
            x = block(skips.pop() + fine)
        damping, increment = self.head(x.transpose(1, 2)).unbind(-1)
        return last - damping * last + increment
