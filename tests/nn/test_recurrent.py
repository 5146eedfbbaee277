"""Recurrent layers and cells on tiles that are cut along the batch, the steps, or both."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import jigsaw
from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import shard


class Rows(nn.Module):
    """Rows and columns of an image as sequences, as Sequencer has them, and the last states of both."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.LSTM(3, 4, num_layers=2, batch_first=True, bidirectional=True)
        self.along = nn.GRU(3, 3, bias=False)
        self.plain = nn.RNN(8, 5, nonlinearity="relu")
        self.narrow = nn.LSTM(3, 4, proj_size=2, batch_first=True)

    def forward(self, x):
        b, c, h, w = x.shape
        down, (last, _) = self.down(x.permute(0, 3, 2, 1).reshape(b * w, h, c))
        along, state = self.along(x.permute(3, 0, 2, 1).reshape(w, b * h, c))
        again, _ = self.along(along, state)
        one, kept = self.plain(down[0])
        pixels, _ = self.narrow(x.permute(0, 2, 3, 1).reshape(b * h * w, 1, c))
        return [down.reshape(b, w, h, 8), last * 2, again.reshape(w, b, h, 3), one, kept, pixels]


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.gru, self.rnn = nn.LSTMCell(3, 4), nn.GRUCell(4, 5, bias=False), nn.RNNCell(5, 3)
        self.relu = nn.RNNCell(3, 3, nonlinearity="relu")

    def forward(self, x):
        rows = x.permute(0, 2, 3, 1).reshape(-1, 3)
        state = None
        for _ in range(2):
            state = self.lstm(rows, state)
        return [state[1], self.relu(self.rnn(self.gru(state[0])), rows)]


@pytest.mark.parametrize("model", [Rows, Cells])
def test_recurrent_layers_are_those_of_the_whole_tensor(model):
    torch.manual_seed(0)
    x, meshes = torch.randn(2, 3, 5, 4), [{"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2}]
    spec = (None, None, "lat", "lon")
    assert_same_on_every_mesh(model(), x, meshes, spec=spec, build=jigsaw.parallelize)


@on_ranks(2)
def test_what_recurrent_layers_refuse():
    mesh = world_mesh(lat=2)
    tile = shard(torch.randn(4, 6, 3), mesh, ("lat", None, None))
    with pytest.raises(ShardingError, match=r"dropout between layers.*nn.Dropout"):
        nn.LSTM(3, 4, num_layers=2, dropout=0.5, batch_first=True)(tile)
    with pytest.raises(ShardingError, match=r"the input is a plain tensor.*jigsaw.shard"):
        nn.GRU(3, 4, batch_first=True)(torch.randn(4, 6, 3), shard(torch.randn(1, 4, 4), mesh, (None, "lat", None)))
    packed = nn.utils.rnn.PackedSequence(tile.reshape(24, 3), torch.tensor([4] * 6))
    with pytest.raises(ShardingError, match="packed sequences"):
        nn.GRU(3, 4)(packed)


@on_ranks(2)
def test_one_sequence_on_two_ranks():
    gru, x = nn.GRU(3, 4), torch.randn(6, 3)
    found = gru(shard(x, world_mesh(lat=2), ("lat", None)))
    for y, whole in zip(found, gru(x), strict=True):
        torch.testing.assert_close(y.full_tensor(), whole)
