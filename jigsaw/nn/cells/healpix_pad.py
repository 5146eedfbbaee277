"""Padding of the twelve faces of a HEALPix grid with cells of the faces around each."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from jigsaw.comm.wire_values import values_on_device
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import cut_points
from jigsaw.geometry.healpix import padded_faces
from jigsaw.geometry.neighbors import Neighbors
from jigsaw.nn.cells.gather import gather_neighbors
from jigsaw.tile.tile import Tile


class HEALPixPad(nn.Module):
    """Module that pads each of the twelve faces of a HEALPix grid with `padding` rows and columns of those around it.

    It takes faces, along `face_dim`, of rows and columns (the last two dims), as DLWP and PhysicsNeMo lay them out:
    rows go to the south-west, columns to the south-east.  With ``face_dim=None`` it takes cells in nested order, the
    last dim, and gives faces.  A face at the equator has no face beyond its north and south corners, where three faces
    meet.  There the square is filled from both sides, with means along its diagonal.  At the other corners of that
    kind a block of one of the two faces is taken.  These are the numbers of DLWP, and of PhysicsNeMo's
    `HEALPixPadding`.

    *Shapes*: [..., 12, n, n] -> [..., 12, n + 2 padding, n + 2 padding], or [..., 12 n²] -> the same; per rank, whole
    faces.
    *Sends*: forward, each cell that a rank needs of others, once; backward, the gradient of each padded cell that
    another rank owns.
    *Raises*: `ShardingError` for a shape without twelve square faces, a padding wider than a face, and cut rows or
    columns of faces. Also for nested cells whose nside is not a power of two.

    Source: Karlbauer et al., arXiv 2311.06253.

    >>> faces = torch.arange(48.0).view(12, 2, 2)
    >>> jigsaw.nn.HEALPixPad(1)(faces)[4]
    tensor([[ 7.5000,  2.0000,  3.0000, 22.0000],
            [13.0000, 16.0000, 17.0000, 32.0000],
            [15.0000, 18.0000, 19.0000, 34.0000],
            [29.0000, 44.0000, 45.0000, 39.5000]])
    """

    def __init__(self, padding: int, face_dim: int | None = -3) -> None:
        super().__init__()
        if padding < 1:
            raise ShardingError(f"HEALPixPad: padding={padding} must be 1 or more")
        self.padding, self.face_dim = padding, face_dim

    def extra_repr(self) -> str:
        return f"{self.padding}, face_dim={self.face_dim}"

    def forward(self, x: Any) -> Any:
        shape, face_dim = tuple(x.shape), self.face_dim
        nside = math.isqrt(shape[-1] // 12) if face_dim is None else shape[-1]
        if face_dim is None:
            is_right = len(shape) > 0 and shape[-1] == 12 * nside**2 > 0
        else:
            is_right = len(shape) > 2 and shape[-2:] == (nside, nside) and shape[face_dim] == 12
        if not is_right or self.padding > nside:
            kind = "12 n² cells" if face_dim is None else f"12 faces along dim {face_dim}, of n x n cells"
            raise ShardingError(
                f"HEALPixPad({self.padding}): shape {shape} must have {kind}, n at least {self.padding}"
            )
        if face_dim is None:
            return self._padded(x, nside, None)
        x = x.movedim(face_dim, -3)
        if isinstance(x, Tile) and any(map(x.layout.is_cut, (x.ndim - 2, x.ndim - 1))):
            raise ShardingError(
                f"HEALPixPad: rows and columns of faces cannot be cut, but {x.layout} cuts them; cut dim {face_dim}"
            )
        cut = x.owned().layout.dim(x.ndim - 3)[0] if isinstance(x, Tile) else None
        return self._padded(x.flatten(-3), nside, None if cut is None else cut.points).movedim(-3, face_dim)

    def _padded(self, cells: Any, nside: int, faces: tuple[int, ...] | None) -> Any:
        size, p = nside + 2 * self.padding, self.padding
        table, has_second = _padding_table(nside, p, self.face_dim is None)
        points = None
        if isinstance(cells, Tile):
            pieces = cells.layout.dim(cells.ndim - 1)[0].pieces
            points = [size * face for face in faces or cut_points(12, pieces)]
        rows = gather_neighbors(cells, table, points=points)
        first, second = rows[..., :size], rows[..., size:]
        # made in each call: in a dry run or a graph it has no values, so it must not be kept
        is_mean = values_on_device(torch.from_numpy(has_second), None, cells.device)
        mean = torch.where(is_mean, 0.5 * first + 0.5 * second, first)
        return mean.unflatten(-2, (12, size))


@lru_cache(maxsize=16)
def _padding_table(nside: int, padding: int, nested: bool) -> tuple[Neighbors, NDArray[np.bool_]]:
    """Return the cells of each row of the padded faces, behind them the other one of a mean, and which are means."""
    if nested:
        Neighbors.healpix(nside)  # raises where nside is not a power of two
    first, second = (x.reshape(-1, x.shape[-1]) for x in padded_faces(nside, padding, nested))
    # at most one column of a row is a mean
    return Neighbors(np.hstack([first, second.max(1, keepdims=True)]), 12 * nside**2), second >= 0
