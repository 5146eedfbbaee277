"""`torch.testing.assert_close` of tiles: each rank compares the rows that it owns, and all get the same result.

Torch does not dispatch this function, and reads ``tile.layout``, which is jigsaw's.  So a class that knows tiles
replaces its class for comparing two tensors, wherever `assert_close` was imported.  Lists, dicts, tolerances, messages
and the rule of closeness stay torch's own.

Example: four ranks, 37 rows cut at 0, 10, 19, 28, 37, of which row 30 is wrong.  The number of wrong elements is summed
over the ranks, 8 bytes from each.  Then each sends its greatest differences, and all raise the same ``AssertionError``
that names row 30.

>>> tile = jigsaw.shard(torch.arange(4.0), jigsaw.init_mesh(lat=1), ("lat",))
>>> torch.testing.assert_close(tile * 2, torch.tensor([0.0, 2.0, 5.0, 6.0]))
Traceback (most recent call last):
...
AssertionError: Tensor-likes are not close!
<BLANKLINE>
Mismatched elements: 1 / 4 (25.0%)
Greatest absolute difference: 1.0 at index (2,) (up to 1e-05 allowed)
Greatest relative difference: 0.20000000298023224 at index (2,) (up to 1.3e-06 allowed)
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Box
from jigsaw.geometry.layout import Layout
from jigsaw.ops.meeting.plain_operands import cut_whole_tensor
from jigsaw.ops.pointwise import align_tiles
from jigsaw.ops.whole_dims import rows_of_local
from jigsaw.ranks.mesh import axes_of_mesh
from jigsaw.tile.shell_making import at_first_tile
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals.comparisons import COMPARISONS, mismatch_message
from jigsaw.torch_internals.private_names import replace_in_torch

_comparisons: Any = COMPARISONS
_TorchsPair: Any = _comparisons.TensorLikePair

# the box of a rank, the number of mismatches, and the greatest absolute and relative difference, each with its place
_Difference = tuple[Any, tuple[int, ...]]
_Mismatches = tuple[Box, int, _Difference, _Difference]


class _TilePair(_TorchsPair):
    """Two tensors that are compared, of which one or both may be tiles.

    *Sends*: the rows of a tile that lies otherwise than the other one, as where tiles meet; 8 bytes all-reduced over
    the mesh; where they are not close, what the message says of each rank.
    *Raises*: `AssertionError`, as torch does it, on every rank; `ShardingError` for tiles that cannot meet, and for
    ``check_stride=True``.
    """

    actual: Any
    expected: Any

    def _process_inputs(self, actual: Any, expected: Any, *, id: Any, allow_subclasses: bool) -> tuple[Any, Any]:
        pair = actual, expected
        if not any(isinstance(x, Tile) for x in pair):
            return super()._process_inputs(actual, expected, id=id, allow_subclasses=allow_subclasses)
        if not all(isinstance(x, Tensor) for x in pair) or not (allow_subclasses or type(actual) is type(expected)):
            self._inputs_not_supported()
        return pair

    def compare(self) -> None:
        tiles = [x for x in (self.actual, self.expected) if isinstance(x, Tile)]
        if not tiles:
            super().compare()
            return
        try:
            self._compare_tiles(tiles[0])
        except ShardingError as refusal:  # torch would turn it into another error
            raise _comparisons.ErrorMeta(type(refusal), str(refusal), id=self.id) from refusal

    def _compare_tiles(self, first: Tile) -> None:
        pair = self.actual, self.expected
        if self.check_stride:
            raise ShardingError(
                f"assert_close(check_stride=True) on a Tile of shape {tuple(first.shape)}: its memory is each "
                "rank's own; leave it out, or compare tile.stride(), which is that of torch's tensor"
            )
        # compare plain tensors of the same shape, dtype and device, expanded from one element
        self._compare_attributes(*(x.local.new_empty(()).expand(x.shape) if isinstance(x, Tile) else x for x in pair))
        if any(x.is_meta for x in pair):
            return
        with torch.no_grad():
            self._first, self._layout, *local = _rows_side_by_side(*pair)
            self._compare_values(*self._equalize_attributes(*local))

    def _compare_regular_values_close(
        self, actual: Tensor, expected: Tensor, *, rtol: float, atol: float, equal_nan: bool, identifier: Any = None
    ) -> None:
        options: dict[str, Any] = {"rtol": rtol, "atol": atol, "identifier": identifier}
        if not any(isinstance(x, Tile) for x in (self.actual, self.expected)):
            super()._compare_regular_values_close(actual, expected, equal_nan=equal_nan, **options)
            return
        mesh, layout = self._first.mesh, self._layout
        wrong = ~torch.isclose(actual, expected, rtol=rtol, atol=atol, equal_nan=equal_nan)
        # over all axes: rows that should be the same on several ranks may differ by mistake
        axes = [name for name, _ in axes_of_mesh(mesh)]
        if (comm.all_reduce(wrong.sum(), mesh, axes, same=(layout,)) == 0).all():
            return
        own_mismatches = _greatest_differences(actual, expected, wrong, self._first, layout)
        of_ranks: list[_Mismatches] = comm.all_gather_object(mesh, own_mismatches)
        if layout.ndim:
            message = mismatch_message(
                default_identifier="Tensor-likes", **_told_together(of_ranks, math.prod(layout.shape)), **options
            )
        else:
            message = _comparisons.make_scalar_mismatch_msg(actual.item(), expected.item(), **options)
        self._fail(AssertionError, message)


def _rows_side_by_side(actual: Any, expected: Any) -> tuple[Tile, Layout, Tensor, Tensor]:
    """Return one of the tiles, a layout, and the rows of both in it that this rank owns; plain tensors are whole."""
    tiles = [x.detach().owned() for x in (actual, expected) if isinstance(x, Tile)]
    layout, ready = align_tiles(tiles)
    if len(tiles) == 2:
        return tiles[0], layout, ready[0], ready[1]
    rows = [
        ready[0] if isinstance(x, Tile) else cut_whole_tensor(x.detach().to_dense(), tiles[0], layout)
        for x in (actual, expected)
    ]
    return tiles[0], layout, rows[0], rows[1]


def _greatest_differences(actual: Tensor, expected: Tensor, wrong: Tensor, first: Tile, layout: Layout) -> _Mismatches:
    """Return what torch reports of this rank's elements that are not close, by their global index."""
    coord = first.coordinate
    rows = [rows_of_local(layout, coord, d, wrong.device) for d in range(layout.ndim)]
    if not (actual.is_floating_point() or actual.is_complex()):
        actual, expected = actual.to(torch.int64), expected.to(torch.int64)
    elif actual.itemsize == 1:  # torch cannot subtract 8-bit floats
        actual, expected = actual.float(), expected.float()
    away = (actual - expected).abs()

    def greatest(differences: Tensor) -> _Difference:
        differences = differences.masked_fill(~wrong, 0)
        if not differences.numel():
            return 0, (0,) * layout.ndim
        at = torch.unravel_index(differences.argmax(), differences.shape)
        return differences[at].item(), tuple(int(r[i]) for r, i in zip(rows, at, strict=True))

    return layout.owned(coord), int(wrong.sum()), greatest(away), greatest(away / expected.abs())


def _told_together(of_ranks: list[_Mismatches], elements: int) -> dict[str, Any]:
    """Return the same for the whole tensor; ranks that have the same rows count once."""
    counts: dict[Box, int] = {}
    for box, count, _, _ in of_ranks:
        counts[box] = max(count, counts.get(box, 0))
    total = sum(counts.values())
    absolute = _greatest_of_ranks([mismatches[2] for mismatches in of_ranks])
    relative = _greatest_of_ranks([mismatches[3] for mismatches in of_ranks])
    return {
        "extra": f"Mismatched elements: {total} / {elements} ({total / elements:.1%})",
        "abs_diff": absolute[0],
        "abs_diff_idx": absolute[1],
        "rel_diff": relative[0],
        "rel_diff_idx": relative[1],
    }


def _greatest_of_ranks(differences: list[_Difference]) -> _Difference:
    """Return the greatest difference: NaN first, as in `torch.max`; of equal ones the first in the tensor."""

    def order(one: _Difference) -> tuple[int, Any, tuple[int, ...]]:
        return (0, 0, one[1]) if math.isnan(one[0]) else (1, -one[0], one[1])

    return min(differences, key=order)


@at_first_tile
def _change_comparing() -> None:
    # `assert_close` looks the class up when it is called, so earlier imports of the function use it, too
    replace_in_torch(_comparisons, "TensorLikePair", _TilePair)
