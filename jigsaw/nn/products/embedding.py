"""Embeddings: rows of a table at the indices of a tile.  The table is whole, or cut by its rows (the vocabulary).

>>> tile = jigsaw.shard(torch.tensor([[2, 0, 1]]), jigsaw.init_mesh(lat=1), (None, "lat"))
>>> torch.nn.Embedding(3, 4)(tile).shape
torch.Size([1, 3, 4])
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.comm.exchange import sum_held_rows
from jigsaw.comm.graph_calls import lacks_values
from jigsaw.comm.wire_values import is_on_accelerator
from jigsaw.errors import ShardingError
from jigsaw.geometry.axis_names import CHANNEL_AXIS
from jigsaw.geometry.layout import Layout
from jigsaw.nn.products.linear import gathered_tokens
from jigsaw.nn.weights import CutLayer, StoredWeight, cut_parameter, gathered_weight, local_weight, weight_layout
from jigsaw.tile.tile import Tile, implements_torch, refusal_error
from jigsaw.torch_internals.placements import is_dtensor


@implements_torch(F.embedding, either=("input", "weight"))
def tile_embedding(
    input: Any,
    weight: StoredWeight,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Return y = weight[input]; y is cut as the index is, and its last dim is whole.

    *Shapes*: input [...], weight [V, E], per rank its rows; y [..., E]. *Sends*: nothing for a whole weight, forward or
    backward, because the gradient of a parameter is a part.  For one cut by rows, where each rank looks up its own
    (Megatron's vocabulary cut): forward, an all-reduce of y over their axes; backward, nothing.  Where these axes cut
    the indices too: the indices to each other and a reduce-scatter of y; backward, a gather of its gradient.  A weight
    cut by columns is gathered. *Raises*: `ShardingError` for max_norm and scale_grad_by_freq, which depend on all
    indices.
    """
    if isinstance(weight, Tile):
        return weight[(input,)]
    is_cut = is_dtensor(weight) and bool(weight_layout(weight, input).cut_axes)
    if (max_norm is not None or scale_grad_by_freq or (sparse and is_cut)) and (input.layout.cut_dims or is_cut):
        raise refusal_error(
            F.embedding,
            input,
            "max_norm, scale_grad_by_freq and, of a cut weight, sparse depend on the indices of all ranks",
            "leave them out",
        )
    own = input.owned()
    out = own.layout.insert(own.ndim, weight.shape[1])
    stored = weight_layout(weight, own) if is_cut else None
    if stored is not None and stored.cut_dims == (0,):
        return _sum_over_rows(own, weight, padding_idx, stored, out)
    whole = gathered_weight(weight, own) if is_cut else weight
    assert whole is not None
    table = local_weight(whole, own, out)
    rows = F.embedding(own.local, table, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    return Tile(rows, out, own.mesh)


def _sum_over_rows(own: Tile, weight: Tensor, padding_idx: int | None, stored: Layout, out: Layout) -> Tile:
    """Sum over the ranks the rows of the table that each has, with zeros elsewhere."""
    (cut,) = stored.dim(0)
    axes = cut.axes
    are_cut = [a for a in axes if a in own.layout.cut_axes]
    if are_cut and len(are_cut) < len(axes):
        raise refusal_error(
            F.embedding,
            own,
            f"the weight is cut by {axes}, and only some of these axes cut the indices",
            "cut the indices by all of them or by none",
        )
    index = gathered_tokens(own, axes) if are_cut else own
    places, (start, stop) = index.local, cut.owned(stored.piece(cut, own.coordinate))
    if not (is_on_accelerator(places) or lacks_values()) and not ((places >= 0) & (places < cut.size)).all():
        raise IndexError(f"embedding: an index is out of range for a table of {cut.size} rows")
    # each rank along `axes` looks up different rows of the table, even where `axes` do not cut the indices
    work = out if are_cut else Layout.from_dims([stored.dim(0), *out.dims()], out.axes)
    table = local_weight(weight, own, work)
    is_mine = (places >= start) & (places < stop)
    if stop == start:
        rows = table.sum(0).expand(*places.shape, table.shape[1])
    else:
        pad = -1 if padding_idx is None else padding_idx % cut.size - start
        rows = F.embedding((places - start).clamp(0, stop - start - 1), table, pad if 0 <= pad < stop - start else None)
    parts = torch.where(is_mine.unsqueeze(-1), rows, 0.0)
    if not are_cut:
        return Tile(comm.sum_parts(parts, own.mesh, axes), out, own.mesh)
    held = index.layout.insert(own.ndim, weight.shape[1])
    return Tile(sum_held_rows(parts, held, out, own.mesh), out, own.mesh)


class Embedding(CutLayer, nn.Embedding):
    """`torch.nn.Embedding` whose table is cut by rows along `axis`: y = weight[index].

    Each rank holds 1/P of the table, its gradient and its optimizer state, as a DTensor with torch's name and full
    shape. The sizes need not divide.  On a mesh without that axis it is `torch.nn.Embedding`.  A `jigsaw.nn.Linear` to
    equally many classes has the same cut, and may share its weight.

    *Shapes*: weight [num_embeddings, embedding_dim], per rank ceil(num_embeddings / P) rows (the last may have fewer);
    y whole along `axis`, or cut as the indices are.
    *Sends*: see `tile_embedding`; once, when it is made, the parts of the first rank's initial values.
    *Raises*: `ShardingError` for max_norm, scale_grad_by_freq and sparse, where the table is cut.

    >>> mesh = jigsaw.init_mesh(channel=1)
    >>> table = jigsaw.nn.Embedding(10, 6, mesh=mesh)
    >>> table(jigsaw.shard(torch.tensor([[1, 9, 3]]), mesh, (None, None))).shape
    torch.Size([1, 3, 6])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        mesh: DeviceMesh,
        axis: str | Sequence[str] = CHANNEL_AXIS,
    ) -> None:
        if comm.rank_count(mesh, axis) > 1 and (max_norm is not None or scale_grad_by_freq or sparse):
            raise ShardingError(
                f"Embedding(max_norm={max_norm}, scale_grad_by_freq={scale_grad_by_freq}, sparse={sparse}) cannot be "
                f"cut along {axis!r}: they depend on the indices of all ranks; leave them out, or take torch.nn's"
            )
        super().__init__(
            num_embeddings, embedding_dim, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse,
            device=device, dtype=dtype,
        )  # fmt: skip
        self.weight = cut_parameter(self.weight.detach(), mesh, axis)
