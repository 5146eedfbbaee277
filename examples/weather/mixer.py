"""WeatherMixer in plain torch: patches of the globe, mixed along the tokens and along the channels in turn. No jigsaw.

After Kieckhefen et al., "Jigsaw: training multi-billion-parameter AI weather models with optimized model parallelism",
arXiv 2507.05753: an MLP-Mixer that sees the whole globe in every block, and whose work grows with the number of tokens
and not with its square.  Of the paper its abstracts were at hand, not its tables: the blocks, and how wide their layers
are beside `width`, are those of Tolstikhin et al., "MLP-Mixer", arXiv 2105.01601, table 1.

On a mesh with an axis `channel` the input's rows are best cut by it, too: ``(None, None, ("lat", "channel"), None)``.
Every rank then has 1/P of the tokens, and of all work.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class TokenLinear(nn.Linear):
    """A linear layer over the tokens.  No ``nn.Linear`` to `jigsaw.parallelize`, which cuts those along `channel`."""

    def forward(self, x: Tensor) -> Tensor:
        """[B, tokens, C] -> [B, new tokens, C]."""
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class MixerBlock(nn.Module):
    """x + MLP over the tokens of each channel, then x + MLP over the channels of each token; both normalized."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.token_norm, self.channel_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.tokens = nn.Sequential(TokenLinear(tokens, width // 2), nn.GELU(), TokenLinear(width // 2, tokens))
        self.channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        """[B, tokens, width] -> the same."""
        x = x + self.tokens(self.token_norm(x))
        return x + self.channels(self.channel_norm(x))


class WeatherMixer(nn.Module):
    """The next state of the atmosphere is the last one and an increment.

    `size` is the whole grid.  Rows that fill no patch, as the last of 721, are filled up with zeros.
    """

    def __init__(self, channels: int, size: tuple[int, int], width: int, blocks: int, patch: int = 8) -> None:
        super().__init__()
        self.patch, self.filled = patch, -size[0] % patch
        self.grid = (size[0] + self.filled) // patch, size[1] // patch
        self.encoder = nn.Linear(channels * patch**2, width)
        self.blocks = nn.ModuleList(MixerBlock(self.grid[0] * self.grid[1], width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.decoder = nn.Linear(width, channels * patch**2)

    def forward(self, state: Tensor) -> Tensor:
        """[B, C, lat, lon] -> the same."""
        x = F.pad(state, (0, 0, 0, self.filled))
        x = x.unflatten(3, (-1, self.patch)).unflatten(2, (-1, self.patch))  # [B, C, rows, patch, columns, patch]
        x = self.encoder(x.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))  # tokens: [B, rows * columns, width]
        for block in self.blocks:
            x = block(x)
        x = self.decoder(self.norm(x)).unflatten(1, self.grid).unflatten(3, (-1, self.patch, self.patch))
        x = x.permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
        return state + x[:, :, : state.shape[2]]
