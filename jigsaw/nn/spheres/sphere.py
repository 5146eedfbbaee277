"""Operators of torch-harmonics on cut spheres: DISCO convolution, its transpose, and neighborhood attention.

The package registers them with torch (``torch.ops.disco_kernels``, ``torch.ops.attention_kernels``); jigsaw answers
them by name, so the package need not be installed.  Its sparse matrix psi has one row of entries for each output
latitude (the transpose: for each input latitude), with columns ``lat * nlon + lon``.  So a rank makes its own rows of
latitude from the rows that psi names, with the entries of psi for them.  Where longitude is cut, its axes cut latitude
finer meanwhile.

Example: two ranks on lat=2, x [1, 8, 24, 48], a filter that reaches three rows.  Rank 0 makes rows 0:12 of [1, 8, 7,
24, 48] and reads rows 0:15, of which it lacks three.  The result, seven times as large, does not travel.

Source of the method: Ocampo, Price, McEwen, arXiv 2209.13603; Bonev et al., arXiv 2505.11157.

>>> layout = jigsaw.Layout.of((1, 8, 6, 4), (None, None, "lat", None), (("lat", 2),))
>>> three_rows = tuple((max(row - 1, 0), min(row + 2, 6)) for row in range(6))
>>> jigsaw.nn.spheres.sphere.plan_sphere(layout, 2, three_rows, 4, "a filter").needs
((0, 4), (2, 6))
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from jigsaw.geometry.cut import Cut, Interval, whole_dim
from jigsaw.geometry.layout import Layout
from jigsaw.geometry.matmul_grid import refine_cut
from jigsaw.geometry.stencil_rules import ceil_div
from jigsaw.nn.stencils.stencil import empty_result, single_cut
from jigsaw.tile.tile import Tile, implements_torch, shared_mesh
from jigsaw.torch_internals.autograd import tensor_version

# For each output row of latitude, the input rows that make it; (0, 0) for one without any.
LatitudeBands = tuple[Interval, ...]


# -- which rows, in integers ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SpherePlan:
    """Plan of rows: `needs` of each piece of `made`, the latitudes while longitude is whole; `home`: final cuts."""

    made: Cut
    needs: tuple[Interval, ...]
    home: tuple[Cut, Cut]

    def source(self, layout: Layout, lat: int) -> Layout:
        size = layout.shape[lat]
        held = stretched_cut(self.made, size).holding(self.needs)
        return layout.replace_dim(lat + 1, whole_dim(layout.shape[lat + 1])).replace_dim(lat, held)


@lru_cache(maxsize=1024)
def plan_sphere(layout: Layout, lat: int, bands: LatitudeBands, columns: int, name: str) -> SpherePlan:
    """Plan how ranks share out rows of latitude made from a tile of `layout`: `columns` of longitude each.

    *Raises*: `ShardingError` for latitudes or longitudes that were flattened with other dims.
    """
    rows, circle = single_cut(layout, lat, name).bare(), single_cut(layout, lat + 1, name).bare()
    target = stretched_cut(refine_cut(rows, circle.axes, dict(layout.axes)), len(bands))
    home = stretched_cut(rows, len(bands)), stretched_cut(circle, columns)
    return SpherePlan(target, tuple(_needed_rows(bands, target.owned(i)) for i in range(target.pieces)), home)


def stretched_cut(cut: Cut, size: int) -> Cut:
    """Return the same cut for a dim that has another number of rows."""
    if cut.size == size:
        return cut
    return Cut(size, tuple(ceil_div(p * size, cut.size) for p in cut.points), cut.axes)


def _needed_rows(bands: LatitudeBands, rows: Interval) -> Interval:
    named = [b for b in bands[rows[0] : rows[1]] if b[0] < b[1]]
    return (min(a for a, _ in named), max(b for _, b in named)) if named else (0, 0)


# -- psi --------------------------------------------------------------------------------------------------------------

# attribute of memory: what was derived from the indices of psi in it, because reading them on the host waits for a GPU
_MARK = "_jigsaw_psi"
_MOST_VIEWS = 256  # parts of one memory: torch-harmonics has one for each kernel


def _kept_values(columns: Tensor) -> dict[Any, Any]:
    """Return what may be kept as long as these indices stay in their memory as they are, also of other views of it."""
    try:
        memory: Any = columns.untyped_storage()
        version = tensor_version(columns)
    except (NotImplementedError, RuntimeError):  # in inference mode torch counts no changes
        return {}
    known: dict[Any, dict[Any, Any]] = getattr(memory, _MARK, {})
    view = version, columns.dtype, columns.shape, columns.stride(), columns.storage_offset()
    if view not in known and len(known) >= _MOST_VIEWS:
        known = {}
    setattr(memory, _MARK, known)
    return known.setdefault(view, {})


def _latitude_bands(
    columns: Tensor, rows: int, width: int, is_turned: bool, entries: Callable[[], tuple[Tensor, Tensor]]
) -> LatitudeBands:
    """Return the bands of psi, each of whose `entries` reads a row and makes one of `rows`; kept by `columns`.  Where
    input and output have as many rows, a forward and a backward pass read other ones of the same psi.
    """
    kept, key = _kept_values(columns), (rows, width, is_turned, "bands")
    if key not in kept:
        reads, makes = entries()
        first = torch.full((rows,), torch.iinfo(torch.int64).max, device=reads.device)
        first = first.scatter_reduce(0, makes, reads, "amin")
        last = torch.full((rows,), -1, device=reads.device).scatter_reduce(0, makes, reads, "amax")
        kept[key] = tuple((a, b + 1) if b >= 0 else (0, 0) for a, b in zip(first.tolist(), last.tolist(), strict=True))
    return kept[key]


def _kept_part(columns: Tensor, key: Any, make: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    kept = _kept_values(columns)
    if key not in kept:
        kept[key] = make()
    return kept[key]


def _row_offsets(rows: Tensor, count: int) -> Tensor:
    """Return where each of `count` rows begins in a rising list of rows, and where the last one ends."""
    return torch.searchsorted(rows.contiguous(), torch.arange(count + 1, device=rows.device))


def _psi_of_rows(
    kernels: Tensor, rows: Tensor, columns: Tensor, target: Interval, held: Interval, width: int, transposed: bool
) -> tuple[Tensor, ...]:
    """Return the entries of a DISCO psi that make the rows `target` from the rows `held`, counted from the first of
    each: their places, the begins of rows of entries, and their kernel, row and column.
    """
    makes = columns // width if transposed else rows
    (at,) = ((makes >= target[0]) & (makes < target[1])).nonzero(as_tuple=True)
    of_row, of_column = (held[0], target[0]) if transposed else (target[0], held[0])
    kernels, rows, columns = kernels[at], rows[at] - of_row, columns[at] - of_column * width
    # entries of the same kernel and row are neighbors
    starts = torch.ones(len(at), dtype=torch.bool, device=at.device)
    starts[1:] = (kernels[1:] != kernels[:-1]) | (rows[1:] != rows[:-1])
    (begins,) = starts.nonzero(as_tuple=True)
    offsets = torch.cat([begins, begins.new_tensor([len(at)])])
    return at, offsets, kernels, rows, columns


# -- DISCO ------------------------------------------------------------------------------------------------------------


def _answer_contraction(name: str, *, transposed: bool) -> None:
    @implements_torch(name)
    def contract(
        inp: Tile,
        roff_idx: Tensor,
        ker_idx: Tensor,
        row_idx: Tensor,
        col_idx: Tensor,
        vals: Tensor,
        kernel_size: int,
        nlat_out: int,
        nlon_out: int,
    ) -> Tile:
        """Return y[b, c, k, t, p] = sum over i, j of psi[k, t, i, j] x[b, c, i, j + p * nlon_in / nlon_out].

        *Shapes*: [B, C, H, W] -> [B, C, K, H', W']; the transpose back; per rank the same of its own rows.
        *Sends*: the rows of latitude that a filter reaches beyond a border. Where longitude is cut, also the tile to
        other rows, and the result back.  Backward as many.
        *Raises*: `ShardingError` for latitudes or longitudes that were flattened with other dims.
        """
        function = _operator(name)
        lat = 3 if transposed else 2
        width = nlon_out if transposed else inp.shape[lat + 1]

        def entries() -> tuple[Tensor, Tensor]:
            latitudes = col_idx // width
            return (row_idx, latitudes) if transposed else (latitudes, row_idx)

        bands = _latitude_bands(col_idx, nlat_out, width, transposed, entries)
        plan = plan_sphere(inp.layout, lat, bands, nlon_out, name)
        source = plan.source(inp.layout.without_halo(), lat)
        layout = source.replace_dim(lat, plan.made).replace_dim(lat + 1, whole_dim(nlon_out))
        layout = layout.drop((2,)) if transposed else layout.insert(2, kernel_size)
        held = inp.with_layout(source).local
        piece = layout.piece(plan.made, inp.coordinate)
        rows, needed = plan.made.owned(piece), plan.needs[piece]
        at, *psi = _kept_part(
            col_idx,
            (rows, needed, transposed),
            lambda: _psi_of_rows(ker_idx, row_idx, col_idx, rows, needed, width, transposed),
        )
        if len(at) and held.numel():
            out = function(held.contiguous(), *psi, vals[at], kernel_size, rows[1] - rows[0], nlon_out)
        else:
            out = empty_result(layout.local_shape(inp.coordinate), held)
        return _circles_at_home(Tile(out, layout, inp.mesh), lat - 1 if transposed else lat + 1, plan)


def _circles_at_home(tile: Tile, lat: int, plan: SpherePlan) -> Tile:
    rows, circle = plan.home
    return tile.with_layout(tile.layout.replace_dim(lat, rows).replace_dim(lat + 1, circle))


def _operator(name: str) -> Any:
    space, operator = name.split("::")
    return getattr(getattr(torch.ops, space), operator).default


for _name in ("forward", "_disco_s2_contraction_optimized"):
    _answer_contraction(f"disco_kernels::{_name}", transposed=False)
for _name in ("backward", "_disco_s2_transpose_contraction_optimized"):
    _answer_contraction(f"disco_kernels::{_name}", transposed=True)


@implements_torch("disco_kernels::_disco_s2_fused_conv_optimized", either=("inp", "weight"))
def _fused_convolution(inp: Any, weight: Any, *psi: Any) -> Any:
    """Run the contraction and the weights after it, as the operator that saves memory does; *Sends*: as the former."""
    roff, kernels, rows, columns, vals, *_split = psi[:11]
    kernel_size, nlat_out, nlon_out, groups, groupsize = psi[11:16]
    contract = _operator("disco_kernels::_disco_s2_contraction_optimized")
    x = contract(inp, roff, kernels, rows, columns, vals, kernel_size, nlat_out, nlon_out)
    x = x.unflatten(1, (groups, groupsize))
    return torch.einsum("bgckxy,gock->bgoxy", x, weight).flatten(1, 2)


# -- attention --------------------------------------------------------------------------------------------------------


@implements_torch("attention_kernels::permute_to_nhwc")
def _channels_last(x: Tile) -> Any:
    return x.permute(0, 2, 3, 1).contiguous()


@implements_torch("attention_kernels::permute_to_nchw")
def _channels_second(x: Tile) -> Any:
    return x.permute(0, 3, 1, 2).contiguous()


def _answer_attention(name: str) -> None:
    @implements_torch(name, tiles=("vw", "qw"))
    def attend(
        kw: Tile,
        vw: Tile,
        qw: Tile,
        quad_weights: Tensor,
        col_idx: Tensor,
        row_off: Tensor,
        seg: Tensor,
        seg_off: Tensor,
        nh: int,
        nlon_in: int,
        nlat_out: int,
        nlon_out: int,
    ) -> Tile:
        """Return the softmax over the neighbors of each point, weighted by the area of each.

        *Shapes*: keys [B, H, W, C], values [B, H, W, D], queries [B, H', W', C] -> [B, H', W', D]. Per rank the same
        for its own queries.
        *Sends*: the rows of keys and values that queries reach beyond a border. Where longitude or channels are cut,
        also the tiles to other rows, and the result back.  Backward as many.
        *Raises*: `ShardingError` for latitudes or longitudes that were flattened with other dims.
        """
        mesh = shared_mesh((qw, kw, vw))
        upward = nlon_in % nlon_out != 0  # psi then has a row of entries for each input latitude
        width = nlon_out if upward else nlon_in

        def entries() -> tuple[Tensor, Tensor]:
            rows, latitudes = torch.repeat_interleave(row_off.diff()), col_idx // width
            return (rows, latitudes) if upward else (latitudes, rows)

        bands = _latitude_bands(col_idx, nlat_out, width, upward, entries)
        queries, keys, values = (_with_whole_channels(x) for x in (qw, kw, vw))
        plan = plan_sphere(queries.layout, 1, bands, nlon_out, name)
        layout = plan.source(queries.layout.without_halo(), 1).replace_dim(1, plan.made)
        batch = layout.dim(0)
        q = queries.with_layout(layout).local
        k, v = (
            x.with_layout(plan.source(x.layout.without_halo().replace_dim(0, *batch), 1)).local for x in (keys, values)
        )
        piece = layout.piece(plan.made, qw.coordinate)
        own_rows, held = plan.made.owned(piece), plan.needs[piece]
        psi = _kept_part(
            col_idx,
            (own_rows, held),
            lambda: _neighbors_of_rows(col_idx, row_off, seg, seg_off, own_rows, held, width, upward),
        )
        if q.numel() and v.numel():
            weights = quad_weights[held[0] : held[1]]
            out = _operator(name)(k, v, q, weights, *psi, nh, nlon_in, own_rows[1] - own_rows[0], nlon_out)
        else:
            out = empty_result((*q.shape[:-1], vw.shape[-1]), q, k, v)
        features = stretched_cut(single_cut(qw.layout, 3, name), vw.shape[3])
        home = qw.layout.without_halo().replace_dim(3, features)  # the result is on the grid of the queries
        return Tile(out, layout.replace_dim(3, whole_dim(vw.shape[3])), mesh).with_layout(home)


def _with_whole_channels(x: Tile) -> Tile:
    """Return x with whole channels, along which heads are packed; axes that cut them cut latitude from here on."""
    if not x.layout.is_cut(3):
        return x
    own = x.layout.without_halo()
    rows = refine_cut(single_cut(own, 1, "attention"), own.dim_axes(3), dict(own.axes))
    return x.with_layout(own.replace_dim(3, whole_dim(own.shape[3])).replace_dim(1, rows))


def _neighbors_of_rows(
    columns: Tensor,
    offsets: Tensor,
    arcs: Tensor,
    arc_offsets: Tensor,
    target: Interval,
    held: Interval,
    width: int,
    upward: bool,
) -> tuple[Tensor, ...]:
    """Return the neighbors in an attention's psi that make the rows `target` from the rows `held`, counted from the
    first of each: columns and their row offsets, and the same as arcs of longitude.
    """
    if not upward:
        (a, b), low = target, held[0]
        arcs = arcs[arc_offsets[a] : arc_offsets[b]].clone()
        arcs[:, 0] -= low
        columns = columns[offsets[a] : offsets[b]] - low * width
        return columns, offsets[a : b + 1] - offsets[a], arcs, arc_offsets[a : b + 1] - arc_offsets[a]
    (a, b), count = held, held[1] - held[0]

    def of_both(latitudes: Tensor, begins: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.repeat_interleave(begins.diff())
        keep = (rows >= a) & (rows < b) & (latitudes >= target[0]) & (latitudes < target[1])
        return keep, _row_offsets(rows[keep] - a, count).to(begins.dtype)

    keep, new_offsets = of_both(columns // width, offsets)
    keep_arcs, new_arc_offsets = of_both(arcs[:, 0], arc_offsets)
    arcs = arcs[keep_arcs]
    arcs[:, 0] -= target[0]
    return columns[keep] - target[0] * width, new_offsets, arcs, new_arc_offsets


for _name in ("_neighborhood_s2_attention_optimized", "_neighborhood_s2_attention_torch"):
    _answer_attention(f"attention_kernels::{_name}")
