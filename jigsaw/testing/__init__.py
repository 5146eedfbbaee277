"""Test your own distributed code: real ranks that start in milliseconds, and plain torch on the whole tensor as the
oracle.
"""

from jigsaw.testing.failure import RankFailedError
from jigsaw.testing.oracle import assert_adjoint, assert_same_on_every_mesh
from jigsaw.testing.post_order import PostOrderError
from jigsaw.testing.rank import world_mesh
from jigsaw.testing.world import on_ranks, run_on_ranks

__all__ = [
    "PostOrderError", "RankFailedError", "assert_adjoint", "assert_same_on_every_mesh", "on_ranks",
    "run_on_ranks", "world_mesh",
]  # fmt: skip
