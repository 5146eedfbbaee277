"""A tile as index into a plain table: bags of embeddings, one-hot codes, places among sorted boundaries, and
histograms.

>>> tile = jigsaw.shard(torch.tensor([2, 0, 1]), jigsaw.init_mesh(lat=1), ("lat",))
>>> torch.nn.functional.one_hot(tile, 3).local[0]
tensor([0, 0, 1])
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw import comm
from jigsaw.geometry.cut import whole_dim
from jigsaw.ops.indexing import as_whole_tensor
from jigsaw.ops.listing import check_counts
from jigsaw.ops.meeting.plain_operands import operand_part
from jigsaw.ops.reductions import extreme_of_all
from jigsaw.ops.unknown_functions import uncut_tiles
from jigsaw.ops.whole_dims import with_whole_dims
from jigsaw.tile.tile import Tile, implements_torch, refusal_error


@implements_torch(F.embedding_bag, either=("input", "weight", "offsets", "per_sample_weights"))
def _embedding_bag(
    input: Any,
    weight: Any,
    offsets: Any = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Any = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Any:
    """Return the sum, mean or maximum of the rows of `weight` in each bag, a row of `input`; *Sends*: a reduction of
    bags that are cut.

    *Raises*: `ShardingError` for offsets, max_norm, scale_grad_by_freq and sparse.
    """
    if mode not in ("sum", "mean", "max") or (per_sample_weights is not None and mode != "sum"):
        raise ValueError(f"embedding_bag: mode={mode!r}, which is sum, mean or max; per_sample_weights go with sum")
    if offsets is not None or max_norm is not None or scale_grad_by_freq or sparse or not isinstance(input, Tile):
        like = next(x for x in (input, weight, offsets, per_sample_weights) if isinstance(x, Tile))
        raise refusal_error(
            F.embedding_bag,
            like,
            "offsets begin bags anywhere, and max_norm, scale_grad_by_freq and sparse depend on all indices",
            "give it a bag for each row of a 2-d Tile input, and leave them out, or use input.full_tensor()",
        )
    if input.ndim != 2:
        raise ValueError(f"embedding_bag: input has {input.ndim} dims; without offsets it has 2, a bag each row")
    rows = F.embedding(input, weight, padding_idx)
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return rows.sum(1) if mode == "sum" else rows.mean(1) if mode == "mean" else rows.amax(1)
    is_kept: Any = (input != padding_idx % weight.shape[0]).unsqueeze(-1)
    if mode == "max":
        return torch.where(is_kept.any(1), rows.masked_fill(~is_kept, -torch.inf).amax(1), 0.0)
    total = (rows * is_kept).sum(1)
    return total if mode == "sum" else total / is_kept.sum(1).clamp_min(1)


@implements_torch(F.one_hot)
def _one_hot(tensor: Tile, num_classes: int = -1) -> Tile:
    """Return one-hot codes.  *Sends*: without `num_classes` one all-reduce of a number, the largest class."""
    own = tensor.owned()
    if num_classes == -1:
        num_classes = int(extreme_of_all(own, op="max")) + 1
    return Tile(F.one_hot(own.local, num_classes), own.layout.insert(own.ndim, num_classes), own.mesh)


@implements_torch(torch.bucketize, either=("input", "boundaries"))
def _bucketize(input: Any, boundaries: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """Return places among boundaries.  *Sends*: boundaries that are a cut tile, to every rank."""
    bounds = as_whole_tensor(boundaries)
    if not isinstance(input, Tile):
        return torch.bucketize(input, bounds, out_int32=out_int32, right=right)
    return Tile(torch.bucketize(input.local, bounds, out_int32=out_int32, right=right), input.layout, input.mesh)


@implements_torch(torch.searchsorted, either=("sorted_sequence", "input", "sorter"))
def _searchsorted(
    sorted_sequence: Any,
    input: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Return what torch does.

    *Sends*: a sorted sequence that is a cut tile: of 1 dim to every rank, of several the rows that lie elsewhere.
    """
    named: dict[str, Any] = {"out_int32": out_int32, "right": right, "side": side}
    if not isinstance(input, Tile) or sorted_sequence.ndim == 1:
        sequence, named["sorter"] = as_whole_tensor(sorted_sequence), as_whole_tensor(sorter)
        if not isinstance(input, Tile):
            return torch.searchsorted(sequence, input, **named)
        return Tile(torch.searchsorted(sequence, input.local, **named), input.layout, input.mesh)
    if sorted_sequence.shape[:-1] != input.shape[:-1]:
        shapes = tuple(sorted_sequence.shape), tuple(input.shape)
        raise RuntimeError(f"searchsorted of shapes {shapes}: all dims but the last must have the same sizes")
    own = input.owned()
    layout = own.layout.replace_dim(own.ndim - 1, whole_dim(sorted_sequence.shape[-1]))
    if sorter is not None:
        named["sorter"] = operand_part(sorter, own, layout).contiguous()
    sequence = operand_part(sorted_sequence, own, layout).contiguous()
    return Tile(torch.searchsorted(sequence, own.local, **named), own.layout, own.mesh)


@implements_torch(torch.unravel_index)
def _unravel_index(indices: Tile, shape: Any) -> tuple[Any, ...]:
    """Return the place in each dim of `shape` of an index into all of its elements."""
    sizes = [shape] if isinstance(shape, int) else [int(n) for n in shape]
    if indices.dtype.is_floating_point or indices.dtype.is_complex or indices.dtype == torch.bool:
        raise ValueError(f"unravel_index: expected integer indices, got {indices.dtype}")
    places: list[Any] = []
    rest: Any = indices
    for size in reversed(sizes):
        places.append(rest % size)
        rest = torch.div(rest, size, rounding_mode="floor")
    return tuple(reversed(places))


@implements_torch(torch.isin, either=("elements", "test_elements"))
def _isin(elements: Any, test_elements: Any, *, assume_unique: bool = False, invert: bool = False) -> Any:
    """Say of each element whether it is a test element.  *Sends*: test elements that are a cut tile, to every rank."""
    tests = as_whole_tensor(test_elements)
    if not isinstance(elements, Tile):
        return torch.isin(elements, tests, assume_unique=assume_unique, invert=invert)
    is_in: Tensor = torch.isin(elements.local, tests, invert=invert)
    return Tile(is_in, elements.layout, elements.mesh)


@implements_torch(torch.histogram, either=("bins", "weight"))
def _histogram(input: Tile, bins: Any, *, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    """Do as `torch.histogramdd` for one number an element."""
    one = bins if isinstance(bins, int) else [bins]
    counts, edges = _count_in_boxes(_histogram_of_rows, input.unsqueeze(-1), one, range, weight, density)
    return torch.return_types.histogram((counts, edges[0]))  # pyright: ignore[reportAttributeAccessIssue]


@implements_torch(torch.histogramdd, either=("bins", "weight"))
def _histogramdd(input: Tile, bins: Any, range: Any = None, weight: Any = None, density: bool = False) -> Any:
    """Count how many elements, or how much of their `weight`, lie in each box of a grid; an element is a row of the
    last dim.

    *Sends*: the extremes where no `range` is given, a weight that lies elsewhere, and one all-reduce of the counts.
    *Raises*: `ShardingError` for counts at which torch's would end.
    """
    return _count_in_boxes(torch.histogramdd, input, bins, range, weight, density)


def _histogram_of_rows(rows: Tensor, bins: Any, *, range: Any, weight: Any) -> Any:
    """Count as `torch.histogram` does, which has kernels for narrow floats; `rows` have one column."""
    options = {"range": range} if isinstance(bins[0], int) else {}
    hist, edges = torch.histogram(rows.reshape(-1), bins[0], weight=weight, **options)
    return torch.return_types.histogramdd((hist, (edges,)))  # pyright: ignore[reportAttributeAccessIssue]


def _count_in_boxes(kernel: Any, input: Tile, bins: Any, range: Any, weight: Any, density: bool) -> Any:
    own = with_whole_dims(input.owned().detach(), (input.ndim - 1,))
    rows = own.layout.drop((own.ndim - 1,))
    if weight is not None and tuple(weight.shape) != rows.shape:
        raise RuntimeError(f"histogram: a weight of shape {tuple(weight.shape)} for elements of shape {rows.shape}")
    part = None if weight is None else operand_part(weight.detach(), own, rows).reshape(-1)
    edges = [bins] * own.shape[-1] if isinstance(bins, int) else [as_whole_tensor(b) for b in bins]
    if range is None and own.numel() and isinstance(edges[0], int):
        columns = own.unbind(-1)
        range = [float(extreme_of_all(c, op)) for c in columns for op in ("min", "max")]
    histogram = kernel(own.local.reshape(-1, own.shape[-1]), edges, range=range, weight=part)
    counts = comm.all_reduce(histogram.hist, own.mesh, rows.cut_axes, same=(rows, histogram.hist.shape))
    if weight is None:
        check_counts(torch.histogramdd, counts, own)
    if density:
        counts = counts / counts.sum()
        for d, edge in enumerate(histogram.bin_edges):
            counts = counts / edge.diff().reshape((-1, *(1,) * (counts.ndim - d - 1)))
    out = uncut_tiles(counts, own), uncut_tiles(tuple(histogram.bin_edges), own)
    return torch.return_types.histogramdd(out)  # pyright: ignore[reportAttributeAccessIssue]
