"""Joining along a cut dim: exact on every mesh, and rows stay where they lie as far as possible."""

from __future__ import annotations

import functools

import pytest
import torch
from tile_oracle import assert_answers_as_the_whole
from torch.nn.utils.rnn import pad_sequence

from jigsaw import comm
from jigsaw.ops.joining import joined_points
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh
from jigsaw.tile.tile_making import from_local, shard

PLAIN = torch.arange(2 * 3 * 2 * 10, dtype=torch.float64).reshape(2, 3, 2, 10) / 7


def _tokens(x):
    """Class tokens before the tokens of a picture, and taken off again."""
    tokens = x.flatten(2).transpose(1, 2)
    token = tokens.mean(1, keepdim=True)
    y = torch.cat([token, tokens], dim=1)
    y = y + y.square().mean(1, keepdim=True)
    return [y, y[:, 0], y[:, 1:], torch.cat([tokens, PLAIN[:, 0, :, :3]], 1)]


CASES = {
    "class tokens": _tokens,
    "faces": lambda x: [torch.cat([x, x * 2, x.square()], 2), torch.cat([x, x[..., :3]], -1)],
    "plain tensors": lambda x: [torch.cat([PLAIN, x, PLAIN[:, :, :1]], 2), torch.cat([x, PLAIN], -2)],
    "whole tiles": lambda x: [torch.cat([x, x.sum(2, keepdim=True)], 2), torch.cat([x[:, :, 1:2], x], 2)],
    "stacked": lambda x: torch.stack([x, x * 2], 2).flatten(2, 3),
    "sequences of one length": lambda x: pad_sequence([x.movedim(2, 0), x.movedim(2, 0).sin()], batch_first=True),
    "sequences of several lengths": lambda x: [
        pad_sequence([y, y[2:].sin(), y[:1]], padding_value=0.5, padding_side=side)
        for y in (x.movedim(2, 0), x.movedim(3, 0))
        for side in ("left", "right")
    ],
    "sequences, some plain": lambda x: pad_sequence([x[0, 0], PLAIN[0, 0], x[1, 2, :, :].float()], True, -1),
    "repeated": lambda x: [x.repeat(1, 1, 2, 3), x.tile(2, 1), torch.tile(x, (2, 2))],
    "differences": lambda x: [
        torch.diff(x, dim=2, append=x),
        x.diff(dim=-1, prepend=PLAIN[:, :, :1, :2].expand(2, 3, 7, 2)),
    ],
}


def _run(name, x):
    return CASES[name](x)


@pytest.mark.parametrize("name", CASES)
def test_it_is_exact_on_every_mesh(name):
    assert_answers_as_the_whole(functools.partial(_run, name))


class _WithToken(torch.nn.Module):
    """A class token that is a parameter, before tokens that are cut: its gradient is the first rank's part."""

    def __init__(self):
        super().__init__()
        self.token = torch.nn.Parameter(torch.randn(1, 1, 4))
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(torch.cat([self.token.expand(2, -1, -1), x], 1))
        return y[:, 0] * 2 + y[:, 1:].mean(1)


def test_a_class_token_has_its_whole_gradient():
    torch.manual_seed(0)
    meshes = [{"lat": 2}, {"lat": 3}, {"lat": 4}, {"data": 2, "lat": 2}]
    for rows in (2, 7):  # on four ranks two have no rows of the first
        assert_same_on_every_mesh(_WithToken(), torch.randn(2, rows, 4), meshes, spec=("data", "lat", None))


@on_ranks(2)
def test_a_tensor_of_no_elements_and_one_dim_is_left_out():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    empty = shard(torch.zeros(0), world_mesh(lat=2), ("lat",))
    y = torch.cat([empty, x, x * 2], 1)
    assert torch.equal(y.full_tensor(), torch.cat([x, x * 2], 1))
    y.square().sum().backward()
    torch.testing.assert_close(comm.all_reduce(x.grad, world_mesh(lat=2), ["lat"]), 10 * x.detach())


def test_rows_stay_as_far_as_possible():
    assert joined_points([1, 196], 1, [0, 49, 98, 147, 196]) == (0, 50, 99, 148, 197)
    assert joined_points([196, 4], 0, [0, 49, 98, 147, 196]) == (0, 49, 98, 147, 200)
    assert joined_points([721, 3], 0, [0, 361, 721]) == (0, 361, 724)
    assert joined_points([8, 8], 0, [0, 4, 8]) == (0, 8, 16)
    assert joined_points([9, 9], 1, [0, 5, 9]) == (0, 9, 18)
    assert joined_points([1, 0], 0, [0, 0, 1]) == (0, 0, 1)


@on_ranks(4)
def test_only_rows_that_change_their_rank_travel():
    mesh = world_mesh(lat=4)
    tokens = shard(torch.randn(2, 196, 8), mesh, (None, "lat", None))
    with comm.count() as counted:
        y = torch.cat([torch.zeros(2, 1, 8), tokens], 1)
        back = y[:, 1:]
    assert counted.calls == []
    assert back.layout == tokens.layout and y.layout.dim(1)[0].points == (0, 50, 99, 148, 197)
    assert torch.equal(back.local, tokens.local)
    # two of 8 rows on four ranks: of 4 rows each rank has 2 from each rank before; each gives away what is elsewhere
    x = shard(torch.arange(8.0), mesh, ("lat",))
    with comm.count() as counted:
        y = torch.cat([x, x], 0)
    assert torch.equal(y.full_tensor(), torch.cat([torch.arange(8.0)] * 2))
    rank = mesh.get_local_rank()
    assert counted.sent_bytes == 4 * (2 if rank in (0, 3) else 4)


@on_ranks(2)
def test_what_another_dim_is_cut_of_goes_where_it_is_joined():
    mesh = world_mesh(lat=2)
    whole = torch.arange(36.0).view(6, 6)
    x = shard(whole, mesh, ("lat", None))
    y = shard(whole, mesh, (None, "lat"))
    with comm.count() as counted:
        z = torch.cat([x, y], 0)
    assert {c.kind for c in counted.calls} == {"exchange", "recut"}
    assert torch.equal(z.full_tensor(), torch.cat([whole, whole]))
    with comm.count() as counted, pytest.raises(RuntimeError, match="they must agree"):
        torch.cat([x, x[:, :5]], 0)
    assert counted.calls == []


@on_ranks(3)
def test_pieces_without_rows():
    mesh = world_mesh(lat=3)
    x = torch.arange(2.0)
    tile = from_local(x[: (0, 2, 0)[mesh.get_local_rank()]], mesh, ("lat",), (2,), split=(0, 0, 2, 2))
    for parts in ([tile, tile], [tile[:0], tile], [tile, x, tile], [tile[1:], tile.mean(0, keepdim=True)]):
        y = torch.cat(parts, 0)
        assert torch.equal(y.full_tensor(), torch.cat([x if t is x else t.full_tensor() for t in parts]))
