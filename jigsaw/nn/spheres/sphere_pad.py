"""Padding on the sphere: longitude wraps around, and beyond a pole a meridian continues half-way round the globe.

The words are those of the reader's boundary ``pole`` (`jigsaw.io.series.boundary`): rows beyond a pole are *turned*.

Example: four ranks on lat=2, lon=2, x [6, 8] padded by a row and a column. Rank 0 owns rows 0:3 of columns 0:4, and
needs row 3 from rank 2 and columns 7 and 4 from rank 1.  The row beyond the pole is row 0 half-way round: for the
columns -1:5 that the rank holds, columns 3:9.  Column 3 is its own, 4:8 are rank 1's, and 8 is column 0, its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jigsaw.comm.exchange import exchange_rows
from jigsaw.comm.wire_values import values_on_device
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Interval
from jigsaw.geometry.stencil_rules import DerivedCut, StencilWindow
from jigsaw.nn.stencils.stencil import DimStencil, StencilPlan, entry_per_dim, is_cut_or_haloed, plan_stencil
from jigsaw.ops.meeting.plain_operands import cut_whole_tensor
from jigsaw.tile.tile import Tile


class SpherePad(nn.Module):
    """Module that pads a field on a sphere with rows and columns.  Column j is column j mod nlon.  Row -k beyond the
    north pole is row k - 1 (or k, where row 0 is the pole itself), turned. Its column j is column j + nlon / 2.  The
    south pole is the same.

    `padding` is that of `torch.nn.CircularPad2d`: one number, or (left, right, top, bottom) of the last two dims,
    latitude and longitude, whichever way latitude runs.  `at_pole` says whether the first and last rows lie at the
    poles.  `vectors` are the channels, along `channel_dim`, that change sign beyond a pole: components of vectors.

    *Shapes*: [..., nlat, nlon] -> [..., nlat + top + bottom, nlon + left + right]; per rank the rows and columns of
    padding belong to the first and last pieces.  Every rank holds the padding's width of its neighbors' rows too, so
    that the next convolution sends nothing.
    *Sends*: forward, the rows and columns that a rank holds beyond its own, from their owners: (top + bottom) rows at
    each border of latitude, (left + right) columns at each of longitude, and the corners between.  Of turned rows,
    those columns that are not its own; none where longitude is whole.  Backward, their gradients.
    *Raises*: `ShardingError` for padding that is negative, or wider than the dim, and for rows beyond a pole where nlon
    is odd. Also for vectors that are not channels, and dims that were flattened.

    >>> tile = jigsaw.shard(torch.arange(8.0).view(2, 4), jigsaw.init_mesh(lat=1, lon=1), ("lat", "lon"))
    >>> jigsaw.nn.SpherePad((0, 0, 1, 1))(tile).full_tensor()
    tensor([[2., 3., 0., 1.],
            [0., 1., 2., 3.],
            [4., 5., 6., 7.],
            [6., 7., 4., 5.]])
    """

    def __init__(
        self,
        padding: int | Sequence[int],
        at_pole: bool | tuple[bool, bool] = False,
        vectors: Sequence[int] = (),
        channel_dim: int = -3,
    ) -> None:
        super().__init__()
        self.padding = entry_per_dim(padding, 4, "padding")
        if min(self.padding) < 0:
            raise ShardingError(f"SpherePad: padding={padding} is negative; crop with a slice")
        self.at_pole = (at_pole, at_pole) if isinstance(at_pole, bool) else at_pole
        self.vectors, self.channel_dim = tuple(vectors), channel_dim

    def extra_repr(self) -> str:
        return f"{self.padding}, at_pole={self.at_pole}, vectors={self.vectors}"

    def forward(self, x: Any) -> Any:
        self._check(tuple(x.shape))
        signs = self._signs(x)
        if not isinstance(x, Tile):
            return self._pad_plain(x, signs)
        left, right, top, bottom = self.padding
        lat, lon = x.ndim - 2, x.ndim - 1
        along = (
            DimStencil(lat, StencilWindow(below=top, above=bottom), grow=(top, bottom), always=True),
            DimStencil(lon, StencilWindow(below=left, above=right), wrap=True, grow=(left, right)),
        )
        to = plan_stencil(x.layout, along, x.coordinate, "SpherePad")
        rows = exchange_rows(x.local, x.layout, to.target, x.mesh)
        if signs is not None:
            signs = cut_whole_tensor(signs, x)
        ends = [_turned_rows(x, to, needs, signs) for needs in self._rows_beyond(x.shape[lat], to.derived[0][1])]
        y = torch.cat([ends[0], rows, ends[1]], lat)
        # where longitude is whole, this rank has the columns for its padding, also for rows from other ranks
        return Tile(y if is_cut_or_haloed(x.layout, lon) else self._pad_columns(y), to.out, x.mesh)

    def _check(self, shape: tuple[int, ...]) -> None:
        left, right, top, bottom = self.padding
        if len(shape) < 2:
            raise ShardingError(f"SpherePad of shape {shape}: it needs dims of latitude and longitude")
        nlat, nlon = shape[-2:]
        wide = [("top", top, nlat - self.at_pole[0]), ("bottom", bottom, nlat - self.at_pole[1])]
        for name, width, most in (*wide, ("left", left, nlon), ("right", right, nlon)):
            if width > most:
                raise ShardingError(f"SpherePad: {name}={width} of shape {shape} is too wide; use at most {most}")
        if nlon % 2 and (top or bottom):
            raise ShardingError(
                f"SpherePad goes on half-way round the globe, which needs an even number of columns, but dim -1 has "
                f"{nlon}; pad longitude alone, or regrid"
            )
        if self.vectors and not -len(shape) <= self.channel_dim < len(shape):
            raise ShardingError(f"SpherePad: channel_dim={self.channel_dim} of shape {shape}")
        wrong = [c for c in self.vectors if not 0 <= c < shape[self.channel_dim]]
        if wrong:
            raise ShardingError(
                f"SpherePad: vectors={self.vectors} names channel {wrong[0]}, but dim {self.channel_dim} of shape "
                f"{shape} has {shape[self.channel_dim]}"
            )

    def _signs(self, x: Any) -> Tensor | None:
        if not self.vectors:
            return None
        shape = [1] * x.ndim
        shape[self.channel_dim] = x.shape[self.channel_dim]
        values = [-1.0 if c in self.vectors else 1.0 for c in range(x.shape[self.channel_dim])]
        return values_on_device(values, x.dtype, x.device).view(shape)

    def _pad_plain(self, x: Tensor, signs: Tensor | None) -> Tensor:
        _, _, top, bottom = self.padding
        (first, last), (nlat, nlon) = map(int, self.at_pole), x.shape[-2:]
        ends = [x[..., first : first + top, :], x[..., nlat - last - bottom : nlat - last, :]]
        north, south = (rows.flip(-2).roll(nlon // 2, -1) for rows in ends)
        if signs is not None:
            north, south = north * signs, south * signs
        return self._pad_columns(torch.cat([north, x, south], -2))

    def _pad_columns(self, x: Tensor) -> Tensor:
        left, right, _, _ = self.padding
        if not (left or right):
            return x
        nlon = x.shape[-1]
        return x.index_select(-1, torch.arange(-left, nlon + right, device=x.device) % nlon)

    def _rows_beyond(self, n: int, lat: DerivedCut) -> tuple[list[Interval], list[Interval]]:
        """Return the rows that, turned, fill each piece's rows beyond the first pole, and beyond the last."""
        top, (first, last) = self.padding[2], map(int, self.at_pole)
        held = [(start - top, stop - top) for start, stop in lat.out.held]
        north = [(first - min(stop, 0), first - start) if start < min(stop, 0) else (0, 0) for start, stop in held]
        south = [
            (2 * n - last - stop, 2 * n - last - max(start, n)) if max(start, n) < stop else (0, 0)
            for start, stop in held
        ]
        return north, south


def _turned_rows(x: Tile, to: StencilPlan, needs: Sequence[Interval], signs: Tensor | None) -> Tensor:
    """Return this rank's rows beyond one pole, of the columns that it holds; no rows for most ranks."""
    lat, lon = x.ndim - 2, x.ndim - 1
    needed = next((circle.needs for d, circle, _ in to.derived if d == lon), ((0, x.shape[lon]),))
    columns = [(start + x.shape[lon] // 2, stop + x.shape[lon] // 2) for start, stop in needed]
    target = to.target.replace_dim(lat, x.layout.dim(lat)[0].holding(needs))
    target = target.replace_dim(lon, x.layout.dim(lon)[0].holding(columns))
    rows = exchange_rows(x.local, x.layout, target, x.mesh).flip(lat)
    return rows if signs is None else rows * signs
