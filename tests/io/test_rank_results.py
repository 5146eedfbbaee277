"""Steps that fail on one rank, or give what all hear."""

import threading

import pytest

from jigsaw.errors import FieldError, ReadError, WriteError
from jigsaw.io.rank_results import result_of_first_rank, results_of_ranks
from jigsaw.testing import on_ranks, world_mesh


@on_ranks(2)
def test_every_rank_hears_of_results_and_failures():
    mesh = world_mesh(z=2)
    me = mesh.get_rank()

    def fails(rank, error):
        if me == rank:
            raise error
        return me

    assert results_of_ranks(mesh, lambda: me, ReadError) == [0, 1]
    assert result_of_first_rank(mesh, me == 0, lambda: "told") == "told"
    with pytest.raises(
        WriteError, match="rank 1 of the mesh: KeyError: <unlocked"
    ):  # an exception that does not pickle
        results_of_ranks(mesh, lambda: fails(1, KeyError(threading.Lock())), WriteError)
    with pytest.raises(FieldError, match="rank 0 of the mesh: first"):
        result_of_first_rank(mesh, me == 0, lambda: fails(0, FieldError("first")))
    with pytest.raises(FieldError, match=r"^both$"):
        results_of_ranks(mesh, lambda: fails(me, FieldError("both")), WriteError)


def test_one_rank_raises_what_was_raised():
    assert results_of_ranks(None, lambda: 1, ReadError) == [1]
    problem = FieldError("alone")

    def step():
        raise problem

    with pytest.raises(FieldError, match="alone") as caught:
        results_of_ranks(None, step, ReadError)
    assert caught.value is problem
