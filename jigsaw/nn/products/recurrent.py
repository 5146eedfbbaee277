"""Recurrent layers: LSTM, GRU and RNN along a dim that is whole on each rank, and their cells.

Whole sequences on one rank need no message: for example, the pixels of a lat x lon tile as a batch of series.  Where
axes cut the sequence, rows are exchanged so that the axes cut the batch instead (`jigsaw.ops.whole_dims`), and back
afterwards.  On lat=4, [16, 32, 8] cut along 32 steps in pieces of 8 becomes 4 sequences of 32 steps a rank.

>>> series = jigsaw.shard(torch.randn(6, 9, 4), jigsaw.init_mesh(lat=1), ("lat", None, None))
>>> output, (last, _) = torch.nn.LSTM(4, 5, batch_first=True, bidirectional=True)(series)
>>> output.shape, last.shape
(torch.Size([6, 9, 10]), torch.Size([2, 6, 5]))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw.geometry.cut import whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.nn.weights import gathered_weight
from jigsaw.ops.meeting.plain_operands import cut_whole_tensor, plain_operand
from jigsaw.ops.whole_dims import brought_home, with_whole_dims
from jigsaw.tile.tile import Tile, implements_torch, refusal_error


def _answer_recurrence(function: Any) -> None:
    """Answer a recurrent layer, whose state is one tensor, or two for an LSTM."""

    def handler(
        input: Any,
        hx: Any,
        params: Any,
        has_biases: Any,
        num_layers: int,
        dropout: float = 0.0,
        train: bool = False,
        bidirectional: bool = False,
        batch_first: bool = False,
    ) -> Any:
        """Return (output, last states) of the sequences along dim 0, or dim 1 with `batch_first`.

        *Shapes*: the output is cut as the input; last states are cut along the batch only.
        *Sends*: where the sequence or the features are cut, (P-1)/P of a tile before and after, and as many backward.
        *Raises*: `ShardingError` for packed sequences, a plain input, weights that are tiles, dropout between layers.
        """
        states: Sequence[Any] = hx if isinstance(hx, (list, tuple)) else [hx]
        masks = bool(train and num_layers > 1 and dropout)
        _check_recurrence(function, [input, *states], params, has_biases, masks)
        batch, steps = (0, 1) if batch_first else (1, 0)
        tile = with_whole_dims(input.owned(), (steps, 2))
        layouts = [_state_layout(s, tile.layout, batch) for s in states]
        begin = [_local_state(s, tile, layout) for s, layout in zip(states, layouts, strict=True)]
        rows, none_here = tile.local, not tile.local.shape[batch]
        if none_here:  # torch refuses an empty batch; with a sequence of zeros, backward runs here, too
            rows, begin = _with_one_more(rows, batch), [_with_one_more(s, 1) for s in begin]
        weights = [plain_operand(w, tile) for w in (gathered_weight(w, tile) for w in params) if w is not None]
        options = (has_biases, num_layers, dropout, train, bidirectional, batch_first)
        output, *last = function(rows, begin if len(begin) > 1 else begin[0], weights, *options)
        if none_here:
            output, last = output.narrow(batch, 0, 0), [s.narrow(1, 0, 0) for s in last]
        home = input.layout.without_halo()
        size = output.shape[2]
        goal = home if size == home.shape[2] else home.replace_dim(2, whole_dim(size))
        answer = brought_home(Tile(output, tile.layout.replace_dim(2, whole_dim(size)), tile.mesh), goal)
        return answer, *(Tile(s, layout, tile.mesh) for s, layout in zip(last, layouts, strict=True))

    implements_torch(function, either=("input", "hx", "params", "has_biases"))(handler)


def _check_recurrence(function: Any, operands: Sequence[Any], params: Any, has_biases: Any, masks: bool) -> None:
    tile = next((x for x in (*operands, *params) if isinstance(x, Tile)), None)
    if tile is None or not isinstance(has_biases, bool):
        tile = tile if tile is not None else next(x for x in has_biases if isinstance(x, Tile))
        reason, remedy = "packed sequences are not answered", "pad the sequences, or use tile.full_tensor()"
    elif not isinstance(operands[0], Tile):
        reason, remedy = "the input is a plain tensor", "make the input a Tile with jigsaw.shard"
    elif any(isinstance(w, Tile) for w in params):
        reason, remedy = "a weight is a Tile", "pass the weights whole, or as DTensors"
    elif masks:
        reason = "dropout between layers would draw different masks on each rank"
        remedy = "use dropout=0, and single-layer modules with nn.Dropout between them"
    else:
        return
    raise refusal_error(function, tile, reason, remedy)


def _state_layout(state: Any, sequences: Layout, batch: int) -> Layout:
    layers, _, features = state.shape
    return Layout.from_dims([[whole_dim(layers)], sequences.dim(batch), [whole_dim(features)]], sequences.axes)


def _local_state(state: Any, sequences: Tile, layout: Layout) -> Tensor:
    if isinstance(state, Tile):
        return state.owned().with_layout(layout).local
    return cut_whole_tensor(state, sequences, layout)


def _with_one_more(x: Tensor, dim: int) -> Tensor:
    one = [1 if d == dim else n for d, n in enumerate(x.shape)]
    return torch.cat([x, x.new_zeros(one)], dim)


for _function in (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu):
    _answer_recurrence(_function)


@implements_torch(torch.lstm_cell, either=("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh"))
def _lstm_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> tuple[Any, Any]:
    hidden, cell = hx
    gates = F.linear(input, w_ih, b_ih) + F.linear(hidden, w_hh, b_hh)
    enter, forget, new, leave = gates.chunk(4, -1)
    cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
    return leave.sigmoid() * cell.tanh(), cell


@implements_torch(torch.gru_cell, either=("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh"))
def _gru_cell(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
    of_input, of_state = F.linear(input, w_ih, b_ih).chunk(3, -1), F.linear(hx, w_hh, b_hh).chunk(3, -1)
    reset, keep = (of_input[0] + of_state[0]).sigmoid(), (of_input[1] + of_state[1]).sigmoid()
    new = (of_input[2] + reset * of_state[2]).tanh()
    return (1 - keep) * new + keep * hx


def _answer_plain_cell(function: Any, activation: Any) -> None:
    def handler(input: Any, hx: Any, w_ih: Any, w_hh: Any, b_ih: Any = None, b_hh: Any = None) -> Any:
        return activation(F.linear(input, w_ih, b_ih) + F.linear(hx, w_hh, b_hh))

    implements_torch(function, either=("input", "hx", "w_ih", "w_hh", "b_ih", "b_hh"))(handler)


_answer_plain_cell(torch.rnn_tanh_cell, torch.tanh)
_answer_plain_cell(torch.rnn_relu_cell, torch.relu)
