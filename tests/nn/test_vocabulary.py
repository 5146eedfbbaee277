"""Tables and losses whose vocabulary, or classes, are cut: exact, and no row of logits travels."""

from __future__ import annotations

import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import jigsaw
from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.testing import assert_same_on_every_mesh, on_ranks, world_mesh

CLASSES = torch.linspace(0.5, 2, 7, dtype=torch.float64)
LOSSES = {
    "plain": {},
    "weighted, ignored": {"weight": CLASSES, "ignore_index": 2},
    "smoothed": {"label_smoothing": 0.1, "reduction": "sum"},
    "weighted, smoothed, ignored": {"weight": CLASSES, "label_smoothing": 0.2, "ignore_index": 2},
    "each": {"reduction": "none", "weight": CLASSES},
}
MESHES = [{"channel": 1}, {"channel": 2}, {"channel": 3}, {"channel": 4}, {"lat": 2, "channel": 2}]


def _losses(names, x, y):
    """All kinds of losses at once, of class indices `y`; likelihoods and probabilities, too."""
    found = [F.cross_entropy(x, y, **LOSSES[name]) for name in names]
    soft = x.detach().flip(1).softmax(1)
    found += [F.cross_entropy(x, soft, weight=CLASSES, label_smoothing=0.1)]
    found += [F.nll_loss(x.log_softmax(1), y, weight=CLASSES, ignore_index=2)]
    return found


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_losses_of_cut_classes(mesh):
    generator = torch.Generator().manual_seed(0)
    x, y = 9 * torch.randn(3, 7, 5, 4, generator=generator), torch.randint(7, (3, 5, 4), generator=generator)
    run = functools.partial(_losses, list(LOSSES))
    assert_same_on_every_mesh(run, [x, y], [mesh], spec=[(None, "channel", "lat", None), (None, "lat", None)])
    # targets whole, and logits that are minus infinity where they are not a target
    low = x.masked_fill(torch.arange(7)[:, None, None] == (y[:, None] + 1) % 7, -torch.inf)
    run = functools.partial(_losses, ["plain"])
    assert_same_on_every_mesh(run, [low[:2], y[:2]], [mesh], spec=[(None, "channel", None, "lat"), None])


@on_ranks(3)
def test_a_rank_without_classes_and_tokens_cut_alike():
    mesh = world_mesh(channel=3)
    torch.manual_seed(0)
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(4, (6,))
    x.requires_grad_()
    expected = F.cross_entropy(x, y)
    expected.backward()
    tile = jigsaw.shard(x.detach(), mesh, (None, "channel"), split={1: (0, 1, 4, 4)})
    tile.local.requires_grad_()
    for target in (y, jigsaw.shard(y, mesh, ("channel",))):
        tile.local.grad = None
        loss = F.cross_entropy(tile, target)
        loss.backward()
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(tile.grad.full_tensor(), x.grad)
    loss = F.cross_entropy(tile.bfloat16(), y)
    assert loss.dtype == torch.bfloat16
    torch.testing.assert_close(loss.double(), expected, rtol=0.02, atol=0.02)
    with pytest.raises(IndexError, match="a target is out of range for 4 classes"):
        F.cross_entropy(tile, y + 3)


@on_ranks(2)
def test_logits_do_not_travel():
    mesh = world_mesh(channel=2)
    x = jigsaw.shard(torch.randn(50, 640, dtype=torch.float64), mesh, (None, "channel"))
    x.local.requires_grad_()
    y = torch.arange(50)
    with comm.count() as forward:
        loss = F.cross_entropy(x, y)
    with comm.count() as backward:
        loss.backward()
    # the maximum of each position; its sum and target: each with numbers that tell whether ranks do the same
    assert [call.sent_bytes for call in forward.calls] == [(50 + 2) * 8, (2 * 50 + 1) * 8]
    assert not backward.calls


# -- tables -----------------------------------------------------------------------------------------------------------


class Language(nn.Module):
    """Words in, a distribution over words out; head and table may share their weight."""

    def __init__(self, tied=True):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(11, 6, padding_idx=-2)
        self.mlp = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6))
        self.head = nn.Linear(6, 11)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, words, target):
        x = self.table(words)
        x = x + self.mlp(x)
        logits = self.head(x)
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=3), x


def cut_vocabulary(model, mesh):
    """The same net, whose table and head are cut by words."""
    table = jigsaw.nn.Embedding(11, 6, padding_idx=-2, mesh=mesh)
    head = jigsaw.nn.Linear(6, 11, mesh=mesh)
    is_tied = model.head.weight is model.table.weight
    with torch.no_grad():
        for made, plain in (
            (table.weight, model.table.weight),
            (head.weight, model.head.weight),
            (head.bias, model.head.bias),
        ):
            is_cut = isinstance(made, DTensor)
            made.copy_(distribute_tensor(plain.data, made.device_mesh, made.placements) if is_cut else plain.data)
    model.table, model.head = table.double(), head.double()
    if is_tied:
        model.head.weight = model.table.weight
    return jigsaw.parallelize(model, mesh)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_a_language_model(mesh):
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(11, (2, 2, 9), generator=generator)
    for tied in (True, False):
        for spec in ((None, "lat"), (None, ("lat", "channel")))["lat" not in mesh :]:
            assert_same_on_every_mesh(Language(tied), [*words], [mesh], spec=[spec, spec], build=cut_vocabulary)


@on_ranks(4)
def test_bytes_and_refusals_of_cut_tables():
    mesh = world_mesh(lat=2, channel=2)
    table = jigsaw.nn.Embedding(11, 6, mesh=mesh)
    here = 5 - mesh.get_local_rank("lat")  # of nine words
    for spec in ((None, "lat"), (None, ("lat", "channel"))):
        words = jigsaw.shard(torch.arange(18).reshape(2, 9) % 11, mesh, spec)
        with comm.count() as forward:
            y = table(words)
        with comm.count() as backward:
            y.square().sum().backward()
        mine = words.local.shape[1]
        sent = [("all_reduce", 2 * here * 6 * 4)]
        if mine < here:  # the words to the other rank along channel, and what it asked for
            sent = [("exchange", 2 * mine * 8), ("exchange", 2 * (here - mine) * 6 * 4)]
        assert [(call.kind, call.sent_bytes) for call in forward.calls] == sent
        gathered = 2 * mine * 6 * 4 if mine < here else 0
        assert [call.sent_bytes for call in backward.calls if call.kind == "exchange"] == [gathered] * (mine < here)
    columns = nn.Embedding(11, 6)
    columns.weight = nn.Parameter(distribute_tensor(columns.weight.data, mesh["channel"], [Shard(1)]))
    torch.testing.assert_close(columns(words).full_tensor(), columns.weight.full_tensor()[words.full_tensor()])
    with pytest.raises(ShardingError, match=r"max_norm=1\.0.*cannot be cut along 'channel'"):
        jigsaw.nn.Embedding(11, 6, max_norm=1.0, mesh=mesh)
    with pytest.raises(ShardingError, match="depend on the indices of all ranks; leave them out"):
        F.embedding(words, table.weight, scale_grad_by_freq=True)
    with pytest.raises(ShardingError, match="cut the indices by all of them or by none"):
        jigsaw.nn.Embedding(11, 6, mesh=mesh, axis=("lat", "channel"))(jigsaw.shard(torch.arange(4), mesh, ("lat",)))
    with pytest.raises(IndexError, match="out of range for a table of 11 rows"):
        table(words + 11)
