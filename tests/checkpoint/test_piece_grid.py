"""Grids of pieces: rules say the same as lists do, for cuts of every kind, and are as short for a thousand ranks."""

import itertools
import json
import random
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import jigsaw
from jigsaw.checkpoint import checkpoint_files, piece_writers
from jigsaw.checkpoint.checkpoint_folder import checkpoint_contents
from jigsaw.checkpoint.parted_tensors import cuts_of_tensor
from jigsaw.checkpoint.piece_grid import _files_of_pieces, cut_rows, grid_from_json, grid_of_ranks, ranges_of_files
from jigsaw.checkpoint.piece_writers import PieceWriters, RankMesh, TensorKind, TensorKinds
from jigsaw.errors import CheckpointError
from jigsaw.testing import run_on_ranks
from jigsaw.torch_internals.placements import shard_of_parts

AXES = [(), ((3, 1),), ((4, 1),), ((2, 1), (2, 1)), ((2, 3),), ((2, 2), (3, 1)), ((3, 2), (2, 3))]


def _rows_of_ranks(size, axes):
    """Rows that each place along the axes has, by torch's own functions, axis by axis."""
    groups = [torch.arange(size)]
    for ranks, parts in axes:
        shares = []
        for rows in groups:
            pieces = [part.chunk(ranks) for part in rows.tensor_split(parts)]
            shares += [
                torch.cat([each[at] if at < len(each) else rows[:0] for each in pieces]).tolist() for at in range(ranks)
            ]
        groups = [torch.tensor(rows, dtype=torch.long) for rows in shares]
    return [rows.tolist() for rows in groups]


@pytest.mark.parametrize("size", [0, 1, 2, 7, 10, 13, 33])
@pytest.mark.parametrize("axes", AXES)
def test_rows_are_cut_as_torch_cuts_them(size, axes):
    begins, owners = cut_rows(size, axes)
    rows = [[] for _ in _rows_of_ranks(size, axes)]
    for start, stop, owner in zip(begins, [*begins[1:], size], owners, strict=True):
        rows[owner] += range(start, stop)
    assert rows == _rows_of_ranks(size, axes)
    assert all(a != b for a, b in itertools.pairwise(owners))  # no two pieces where one does


def _json_again(grid, most=10**6):
    told = json.loads(json.dumps(grid.as_json()))
    return grid_from_json(grid.shape, told["cuts"], told["files"], most)


@pytest.mark.parametrize("rows", [1, 7, 10, 13])
@pytest.mark.parametrize("columns", [1, 4, 33])
def test_a_box_needs_the_pieces_that_share_elements_with_it(rows, columns):
    ranks = np.arange(24).reshape(2, 3, 4)[:, ::-1]
    grid = grid_of_ranks((rows, columns), [[0, 2], [1]], [1, 2, 1], ranks)
    by_rows, by_columns = cut_rows(rows, ((2, 1), (4, 1))), cut_rows(columns, ((3, 2),))
    assert _json_again(grid) == grid
    owner = np.full((rows, columns), -1)
    for piece in grid.pieces_in(((0, rows), (0, columns))):
        (a, b), (c, d) = piece.box
        assert (owner[a:b, c:d] == -1).all()
        owner[a:b, c:d] = piece.file
    for at, place in enumerate(by_rows[1]):
        for along, column in enumerate(by_columns[1]):
            of_piece = ranks[place // 4, column, place % 4]
            assert owner[by_rows[0][at], by_columns[0][along]] == of_piece
    for _ in range(20):
        (a, b), (c, d) = (sorted(random.choices(range(n + 1), k=2)) for n in (rows, columns))
        files = {each.file for each in grid.pieces_in(((a, b), (c, d)))}
        assert files == set(owner[a:b, c:d].reshape(-1).tolist())


def test_numbers_of_pieces_count_those_of_their_file():
    files, numbers = _files_of_pieces(((3, 2, 1), (3, 3, 0), (0, 2, 4)))
    assert files.tolist() == [3, 4, 3, 3, 3, 0, 4]
    assert numbers.tolist() == [0, 0, 1, 2, 3, 0, 1]


@pytest.mark.parametrize("seed", range(20))
def test_ranges_have_the_numbers_that_they_were_made_of(seed):
    random.seed(seed)
    files = np.array(random.choices(range(1 + seed % 5), k=1 + seed))
    assert _files_of_pieces(ranges_of_files(files))[0].tolist() == files.tolist()


def test_a_thousand_ranks_need_no_more_numbers():
    for ranks, axes in ((np.arange(1024), [[0], []]), (np.arange(1024).reshape(32, 32), [[0, 1], []])):
        grid = grid_of_ranks((4096, 33), axes, [1] * ranks.ndim, ranks)
        assert grid.as_json() == {"cuts": [4, 33], "files": [[0, 1024, 1]]}
    in_parts = grid_of_ranks((3072, 5), [[0], []], [3], np.arange(1024))
    assert in_parts.as_json() == {"cuts": [1, 5], "files": [[0, 1024, 1]] * 3}
    by_both = grid_of_ranks((64, 64), [[1], [0]], [1, 1], np.arange(1024).reshape(32, 32))
    assert by_both.as_json() == {"cuts": [2, 2], "files": [[at, 32, 32] for at in range(32)]}


def _kinds(mesh, cuts, **more):
    return TensorKinds((mesh,), {"w": TensorKind(torch.float32, (6, 4), 0, cuts), **more}, has_others=False)


def test_ranks_with_the_same_rows_share_out_the_tensors():
    kind = TensorKind(torch.float32, (6, 4), 0, (None, (0, 1)))
    mesh = RankMesh((2, 3), tuple(range(6)))
    writers = PieceWriters([TensorKinds((mesh,), {f"w{n}": kind for n in range(4)}, has_others=False)] * 6)
    written = {name: [rank for rank in range(6) if writers.writes(rank, name)] for name in ("w0", "w1", "w2", "w3")}
    assert written == {"w0": [0, 1, 2], "w1": [3, 4, 5], "w2": [0, 1, 2], "w3": [3, 4, 5]}
    assert writers.stored_tensors()["w1"].pieces.files == ((3, 3, 1),)


def test_stages_of_a_pipeline_write_what_their_mesh_has():
    first, second = RankMesh((2,), (0, 1)), RankMesh((2,), (2, 3))
    one, other = _kinds(first, ((0, 1),)), _kinds(second, ((0, 1),), x=TensorKind(torch.float32, (3,)))
    writers = PieceWriters([one, one, other, other])  # a tied weight is written by the first of its stages
    assert [writers.writes(rank, "w") for rank in range(4)] == [True, True, False, False]
    assert [writers.writes(rank, "x") for rank in range(4)] == [False, False, True, False]


def test_a_part_that_a_rank_of_the_mesh_does_not_save_is_refused():
    mesh = RankMesh((2,), (0, 1))
    for other in (TensorKinds((), {}, has_others=False), _kinds(mesh, ((1, 1),))):
        with pytest.raises(CheckpointError, match="rank 1 is on the mesh of 'w', and has no tensor of this name"):
            PieceWriters([_kinds(mesh, ((0, 1),)), other])


# -- on ranks ---------------------------------------------------------------------------------------------------------


def _placements(mesh):
    cuts = [Shard(0), Shard(1), Replicate(), shard_of_parts(0, 2), shard_of_parts(1, 3)]
    return [*itertools.product(cuts, repeat=mesh.ndim)]


def _cut_tensors(sides, scale):
    """Tensors cut in every way, whose values are the numbers of their elements, times a scale."""
    mesh = dist.device_mesh.init_device_mesh("cpu", sides)
    tensors = {}
    for at, placements in enumerate(_placements(mesh)):
        for rows, columns in ((7, 6), (10, 13), (1, 2)):
            place, whole = mesh.get_coordinate(), scale * torch.arange(1.0, rows * columns + 1).reshape(rows, columns)
            local = whole
            for ranks, coordinate, placement in zip(sides, place, placements, strict=True):
                if not placement.is_replicate():
                    parts = getattr(placement, "split_factor", 1)
                    pieces = [part.chunk(ranks, placement.dim) for part in local.tensor_split(parts, placement.dim)]
                    empty = local.narrow(placement.dim, 0, 0)
                    own = [each[coordinate] if coordinate < len(each) else empty for each in pieces]
                    local = torch.cat(own, placement.dim)
            x = DTensor.from_local(
                local.contiguous(), mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            tensors[f"t{at}_{rows}"] = x
    return tensors


def _model_of(tensors):
    model = nn.Module()
    for name, x in tensors.items():
        model.register_buffer(name, x)
    return model


def _save_cuts(path, sides, most_pieces):
    tensors, read = _cut_tensors(sides, 1.0), _cut_tensors(sides, 0.0)
    limit = mock.patch.object(checkpoint_files, "_MOST_PIECES_FOR_TORCH", most_pieces)
    with limit, mock.patch.dict(checkpoint_files._agreed_plans, clear=True):  # which would be taken again
        jigsaw.save(path, model=_model_of(tensors))
    jigsaw.load(path, model=_model_of(read))
    for name, x in read.items():
        assert torch.equal(x.to_local(), tensors[name].to_local()), name


def _numbers(shape):
    return torch.arange(1.0, np.prod(shape) + 1).reshape(shape)


def _load_whole(path):
    index = json.loads((path / "tensors.json").read_text())
    tensors = {name.removeprefix("model."): torch.zeros(each["shape"]) for name, each in index.items()}
    jigsaw.load(path, model=_model_of(tensors))
    for name, x in tensors.items():
        assert torch.equal(x, _numbers(x.shape)), name


def _load_cut(path, sides):
    read, expected = _cut_tensors(sides, 0.0), _cut_tensors(sides, 1.0)
    index = json.loads((path / "tensors.json").read_text())
    read = {name: x for name, x in read.items() if f"model.{name}" in index}
    model = _model_of(read)
    model.names_of_all_stages = [name.removeprefix("model.") for name in index]  # of which it has some
    jigsaw.load(path, model=model)
    for name, x in read.items():
        assert torch.equal(x.to_local(), expected[name].to_local()), name


@pytest.mark.parametrize("sides", [(1,), (2,), (3,), (4,), (2, 2)])
def test_tensors_cut_in_every_way_come_back_on_any_mesh(tmp_path, sides):
    path = tmp_path / "it"
    run_on_ranks(int(np.prod(sides)), _save_cuts, path, sides, 1000)
    _load_whole(path)
    for other in ((3,), (2, 2)):
        run_on_ranks(int(np.prod(other)), _load_cut, path, other)
    index = json.loads((path / "tensors.json").read_text())
    tensors = {name: torch.zeros(each["shape"]) for name, each in index.items()}
    dcp.load(tensors, checkpoint_id=path, no_dist=True)  # torch's own tools find the same
    for name, x in tensors.items():
        assert torch.equal(x, _numbers(x.shape)), name


def test_with_too_many_pieces_for_torchs_index_there_is_none(tmp_path):
    path = tmp_path / "it"
    run_on_ranks(4, _save_cuts, path, (2, 2), 10)
    assert ".metadata" not in checkpoint_contents(path).files
    assert not (path / ".metadata").exists()
    _load_whole(path)


def _save_with_others(path):
    """Save a tensor that only torch's planner knows how to cut, beside one that rules cut."""
    mesh = dist.device_mesh.init_device_mesh("cpu", (3,))
    cut = distribute_tensor(_numbers((7, 2)), mesh, [Shard(0)])
    other = distribute_tensor(_numbers((4, 3)), mesh, [Shard(1)])
    tensors = {"cut": cut, "other": other, "plain": _numbers((5,))}
    unknown = mock.patch.object(
        piece_writers, "cuts_of_tensor", lambda x: None if x.shape == other.shape else cuts_of_tensor(x)
    )
    with unknown, mock.patch.object(checkpoint_files, "_MOST_PIECES_FOR_TORCH", 0):
        jigsaw.save(path, model=_model_of(tensors))


def test_tensors_of_other_types_have_lists_in_the_same_index(tmp_path):
    path = tmp_path / "it"
    run_on_ranks(3, _save_with_others, path)
    index = json.loads((path / "tensors.json").read_text())
    assert {name: sorted(each) for name, each in index.items()} == {
        "model.cut": ["cuts", "dtype", "files", "shape"],
        "model.plain": ["cuts", "dtype", "files", "shape"],
        "model.other": ["dtype", "pieces", "shape"],
    }
    _load_whole(path)
