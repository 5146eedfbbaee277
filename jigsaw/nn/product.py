"""Matrix products and einsum of tiles with tiles and with plain tensors.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.ones(2, 9, 4), mesh, (None, "lat", None))
>>> torch.einsum("blc,dc->bd", tile, torch.ones(5, 4)).local[0]
tensor([36., 36., 36., 36., 36.])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from jigsaw import comm
from jigsaw.layout import Layout, ShardingError, have_same_rows, whole_dim
from jigsaw.nn.linear import tile_linear
from jigsaw.nn.rank_order import CutGroup, take_owned_rows
from jigsaw.ops.pointwise import plain_operand
from jigsaw.tile import Tile, implements_torch, leave_tile, shared_mesh

DimLabels = Sequence[str]


# -- products by label ------------------------------------------------------------------------------------------------


def contract_labels(
    name: str, function: Callable[..., Tensor], operands: Sequence[Any], labels: Sequence[DimLabels], out: DimLabels
) -> Any:
    """``function`` on the local parts of `operands`, whose dims have `labels`; sums over cut labels that `out` lacks
    are global.

    *Shapes*: every label is cut as the tiles cut it; plain tensors are whole and cut to fit.
    *Sends*: one all-reduce of the result over the axes that cut contracted labels (it is then held alike along them);
    backward one all-reduce of the gradient of each tile that is held alike along an axis that cuts another operand.
    *Raises*: `ShardingError` when tiles cut a label differently, or one axis cuts two labels.
    """
    tiles = [t for t in operands if isinstance(t, Tile)]
    mesh = shared_mesh(tiles)
    cuts = _cuts_by_label(name, operands, labels)
    axes = tiles[0].layout.axes
    work = Layout.from_dims(list(cuts.values()), axes)
    locals_ = [_local_operand(t, by, cuts, work, tiles[0]) for t, by in zip(operands, labels, strict=True)]
    summed = [a for label, group in cuts.items() if label not in out for c in group for a in c.axes]
    y = comm.sum_parts(function(*locals_), mesh, summed, (name, work))
    layout = Layout.from_dims([cuts[label] for label in out], axes)
    return Tile(y, layout, mesh) if out else leave_tile(y, mesh)


def _cuts_by_label(name: str, operands: Sequence[Any], labels: Sequence[DimLabels]) -> dict[str, CutGroup]:
    """The cuts of each label; a dim of size 1 broadcasts."""
    found: dict[str, CutGroup] = {}
    sizes: dict[str, int] = {}
    for t, by in zip(operands, labels, strict=True):
        for d, label in enumerate(by):
            size = t.shape[d]
            if sizes.get(label, 1) != 1 and size not in (1, sizes[label]):
                raise RuntimeError(f"{name}: dim {label!r} has sizes {sizes[label]} and {size}")
            sizes[label] = max(size, sizes.get(label, 1)) if size else 0
    for t, by in zip(operands, labels, strict=True):
        if not isinstance(t, Tile):
            continue
        for d, label in enumerate(by):
            group = tuple(c.bare() for c in t.layout.dim(d))
            if t.shape[d] == 1 and sizes[label] != 1:
                if t.layout.is_cut(d):
                    raise ShardingError(
                        f"{name}: dim {d} of size 1 of a Tile {tuple(t.shape)} is cut; redistribute it so that this "
                        "dim is whole"
                    )
                continue
            if not have_same_rows(found.setdefault(label, group), group):
                raise ShardingError(
                    f"{name}: two tiles cut dim {label!r} differently, {_show_cuts(found[label], t)} and "
                    f"{_show_cuts(group, t)}; use tile.redistribute"
                )
    _check_label_axes(name, found)
    return {label: found.get(label, (whole_dim(size),)) for label, size in sizes.items()}


def _check_label_axes(name: str, cuts: dict[str, CutGroup]) -> None:
    taken: dict[str, str] = {}
    for label, group in cuts.items():
        for axis in (a for c in group for a in c.axes):
            other = taken.setdefault(axis, label)
            if other != label:
                raise ShardingError(
                    f"{name}: axis {axis!r} cuts both dim {other!r} and dim {label!r} of the operands, so their "
                    "products are spread over the ranks; "
                    f"redistribute one of them (attention over cut tokens: F.scaled_dot_product_attention)"
                )


def _show_cuts(group: CutGroup, tile: Tile) -> str:
    return str(Layout(group, tile.layout.axes, (len(group),)))


def _local_operand(operand: Any, labels: DimLabels, cuts: dict[str, CutGroup], work: Layout, first: Tile) -> Tensor:
    if isinstance(operand, Tile):
        alike = [a for a in work.cut_axes if a not in operand.layout.cut_axes]
        return comm.use_in_parts(operand.owned().local, operand.mesh, alike)
    x = plain_operand(operand, first, work)
    for d, label in enumerate(labels):
        if x.shape[d] != 1:
            x = take_owned_rows(x, d, cuts[label], work, first.coordinate)
    return x


# -- matmul -----------------------------------------------------------------------------------------------------------


@implements_torch(torch.matmul, Tensor.__matmul__, torch.mm, torch.bmm, torch.mv)
def tile_matmul(input: Any, other: Any) -> Any:
    """y = a b, batched as in torch.

    Where one operand is a matrix it is a `jigsaw.nn.linear.tile_linear`; both batched, each rank multiplies what it has
    and a cut contraction is summed (see `contract_labels`).
    """
    for x in (input, other):
        if isinstance(x, Tensor) and x.layout != torch.strided:
            raise ShardingError(
                f"matmul of a tensor of layout {x.layout} and a Tile is not answered: use to_dense(), or "
                "tile.full_tensor()"
            )
    if input.ndim == 1 and other.ndim == 1:
        return (input * other).sum()
    if other.ndim == 1:
        return (
            tile_linear(input, other.unsqueeze(0)).squeeze(-1)
            if isinstance(input, Tile)
            else tile_matmul(other, input.mT)
        )
    if input.ndim == 1:
        return tile_matmul(other.mT, input) if isinstance(other, Tile) else tile_linear(input, other.mT)
    if other.ndim == 2 and isinstance(input, Tile):
        return tile_linear(input, other.t())
    if input.ndim == 2 and isinstance(other, Tile):
        return tile_linear(other.mT, input).mT
    if input.shape[-1] != other.shape[-2]:
        raise RuntimeError(f"matmul: {tuple(input.shape)} and {tuple(other.shape)} cannot be multiplied")
    lead = max(input.ndim, other.ndim) - 2
    batch = [f"batch {d}" for d in range(lead)]
    labels = [[*batch[lead - (t.ndim - 2) :], *last] for t, last in ((input, "mk"), (other, "kn"))]
    return contract_labels("matmul", torch.matmul, (input, other), labels, [*batch, "m", "n"])


@implements_torch(Tensor.__rmatmul__)
def _rmatmul(input: Any, other: Any) -> Any:
    return tile_matmul(other, input)


@implements_torch(torch.addmm, torch.baddbmm)
def addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """y = beta input + alpha mat1 mat2; see `tile_matmul`."""
    product = torch.matmul(mat1, mat2)
    if torch.is_autocast_enabled(product.device.type):
        input = input.to(product.dtype)
    product = product * alpha if alpha != 1 else product
    return product if beta == 0 else product + (input * beta if beta != 1 else input)


# -- einsum -----------------------------------------------------------------------------------------------------------


@implements_torch(torch.einsum)
def einsum(equation: str, *operands: Any) -> Any:
    """The sum of products that `equation` says; see `contract_labels`.

    *Raises*: `ShardingError` for a repeated label (a diagonal) of one tile.
    """
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(operands):
        raise RuntimeError(f"einsum {equation!r} has {len(terms)} terms for {len(operands)} operands")
    labels = [_expand_term(term, t.ndim) for term, t in zip(terms, operands, strict=True)]
    dots = max((by for by in ([x for x in term if x.isdigit()] for term in labels)), key=len)
    out = (
        _with_dots(right, dots)
        if arrow
        else [*dots, *sorted(x for x in set("".join(terms)) - {"."} if "".join(terms).count(x) == 1)]
    )
    for term, t in zip(labels, operands, strict=True):
        if isinstance(t, Tile) and len(set(term)) != len(term):
            raise ShardingError(
                f"einsum {equation!r} takes a diagonal of a Tile of shape {tuple(t.shape)}; multiply by a mask and "
                "sum instead"
            )
    return contract_labels("einsum", lambda *locals_: torch.einsum(equation, *locals_), operands, labels, out)


def _expand_term(term: str, ndim: int) -> list[str]:
    """The labels of an operand's dims; those under the dots are numbered from the right."""
    count = ndim - len(term.replace("...", ""))
    if count < 0 or (count and "..." not in term):
        raise RuntimeError(f"einsum term {term!r} does not fit an operand of {ndim} dims")
    return _with_dots(term, [str(d) for d in reversed(range(count))])


def _with_dots(term: str, dots: Sequence[str]) -> list[str]:
    before, there, after = term.partition("...")
    return [*before, *(dots if there else ()), *after]
