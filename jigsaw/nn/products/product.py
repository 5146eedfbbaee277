"""Matrix products and einsum of tiles with tiles and with plain tensors.

>>> mesh = jigsaw.init_mesh(lat=1)
>>> tile = jigsaw.shard(torch.ones(2, 9, 4), mesh, (None, "lat", None))
>>> torch.einsum("blc,dc->bd", tile, torch.ones(5, 4)).local[0]
tensor([36., 36., 36., 36., 36.])
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.geometry.layout import Layout
from jigsaw.nn.products.contraction import plan_contraction
from jigsaw.nn.products.label_cuts import DimLabels, LabelCuts, choose_label_cuts, cuts_of_tile
from jigsaw.nn.products.linear import tile_linear
from jigsaw.nn.sparse_product import is_sparse_matrix, sparse_matmul
from jigsaw.tile.tile import Tile, implements_torch, leave_tile, shared_mesh

# -- products by label ------------------------------------------------------------------------------------------------


def contract_labels(
    name: str, function: Callable[..., Tensor], operands: Sequence[Any], labels: Sequence[DimLabels], out: DimLabels
) -> Any:
    """Run ``function`` on the local parts of `operands` with `labels`; sums over cut labels that `out` lacks are
    global.

    *Shapes*: every label is cut as the tiles cut it; plain tensors are whole and cut to fit.  An axis that cuts several
    labels keeps the first of `out` (`jigsaw.nn.products.label_cuts`). *Sends*: the operands that such an axis cuts
    elsewhere. This rank's part goes to each of the P-1 others along it (or 1/P of that, where the operand has the label
    that stays cut), and backward gradients return.  One all-reduce of the result over the axes of contracted labels.
    Backward, one of the gradient of each tile that is the same along an axis that cuts another operand.
    """
    tiles = [t for t in operands if isinstance(t, Tile)]
    mesh = shared_mesh(tiles)
    layouts = tuple(t.layout if isinstance(t, Tile) else None for t in operands)
    shapes = tuple(tuple(t.shape) for t in operands)
    plan, summed, layout = _plan_product(name, layouts, shapes, tuple(map(tuple, labels)), tuple(out))
    y = function(*[plan.bring_operand(t, by, tiles[0]) for t, by in zip(operands, labels, strict=True)])
    y = comm.sum_parts(y, mesh, summed, (name, plan.work)) if summed else y
    return Tile(y, layout, mesh) if out else leave_tile(y, mesh)


@lru_cache(maxsize=1024)
def _plan_product(
    name: str,
    layouts: tuple[Layout | None, ...],
    shapes: tuple[tuple[int, ...], ...],
    labels: tuple[tuple[str, ...], ...],
    out: tuple[str, ...],
) -> tuple[LabelCuts, tuple[str, ...], Layout]:
    plan = choose_label_cuts(name, layouts, shapes, labels, out)
    return plan, tuple(plan.axes_along([by for by in plan.cuts if by not in out])), plan.result_layout(out)


# -- matmul -----------------------------------------------------------------------------------------------------------


@implements_torch(
    torch.matmul, torch.linalg.matmul, Tensor.__matmul__, torch.mm, torch.bmm, torch.mv, either=("input", "other")
)
def tile_matmul(input: Any, other: Any) -> Any:
    """Return y = a b, batched as in torch.

    Where one operand is a matrix, and the axes that cut both form a grid, it is a `tile_linear`. Else each rank
    multiplies its own parts, and a cut contraction is summed.  Of two dims that one axis cuts, the first stays cut.
    """
    if is_sparse_matrix(input) or is_sparse_matrix(other):
        return sparse_matmul(input, other)
    if input.ndim == 0 or other.ndim == 0:
        raise RuntimeError(f"matmul: both operands need at least 1 dim, got {input.ndim} and {other.ndim}")
    if max(input.ndim, other.ndim) > 1:
        for x, w, is_turned in ((input, other, False), (other, input, True)):
            if isinstance(x, Tile) and w.ndim <= 2 and (y := _as_linear(x, w, is_turned)) is not None:
                return y
    labels, out = _labels_of_matmul(input.ndim, other.ndim)
    if input.shape[-1] != other.shape[labels[1].index("k")]:
        raise RuntimeError(f"matmul: {tuple(input.shape)} and {tuple(other.shape)} cannot be multiplied")
    return contract_labels("matmul", torch.matmul, (input, other), labels, out)


@lru_cache(maxsize=64)
def _labels_of_matmul(ndim: int, other_ndim: int) -> tuple[tuple[tuple[str, ...], tuple[str, ...]], tuple[str, ...]]:
    lead = max(ndim, other_ndim, 2) - 2
    batch = tuple(f"batch {d}" for d in range(lead))
    first = (*batch[lead - (ndim - 2) :], "m", "k") if ndim > 1 else ("k",)
    second = (*batch[lead - (other_ndim - 2) :], "k", "n") if other_ndim > 1 else ("k",)
    return (first, second), tuple(by for by in (*batch, "m", "n") if by in first or by in second)


def _as_linear(x: Tile, w: Tensor | Tile, is_turned: bool) -> Any:
    """Return x w, or w x where `is_turned`, as a linear with the weight `w` of 1 or 2 dims; None without a grid."""
    rows = x.mT if is_turned and x.ndim > 1 else x
    weight = w.unsqueeze(0) if w.ndim == 1 else w if is_turned else w.t()
    if isinstance(weight, Tile) and not _form_grid(rows.layout.without_halo(), weight.layout.without_halo()):
        return None
    y = tile_linear(rows, weight)
    return y.squeeze(-1) if w.ndim == 1 else y.mT if is_turned and x.ndim > 1 else y


def _form_grid(x: Layout, weight: Layout) -> bool:
    inner = weight.dim_axes(1)
    if inner and x.dim_axes(x.ndim - 1) != inner and len(inner) > 1:
        return False  # W would have to travel along some of these axes and stay along others
    try:
        plan_contraction(x, weight)
    except ShardingError:
        return False
    return True


@implements_torch(Tensor.__rmatmul__, either=("input", "other"))
def _rmatmul(input: Any, other: Any) -> Any:
    return tile_matmul(other, input)


# -- products with a sum ----------------------------------------------------------------------------------------------


@implements_torch(torch.addmm, torch.baddbmm, either=("input", "mat1", "mat2"))
def addmm(input: Any, mat1: Any, mat2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    """Return y = beta input + alpha mat1 mat2; see `tile_matmul`."""
    return _add_to_product(input, torch.matmul(mat1, mat2), beta, alpha)


@implements_torch(torch.addmv, either=("input", "mat", "vec"))
def _addmv(input: Any, mat: Any, vec: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return _add_to_product(input, torch.matmul(mat, vec), beta, alpha)


@implements_torch(torch.addbmm, either=("input", "batch1", "batch2"))
def _addbmm(input: Any, batch1: Any, batch2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return _add_to_product(input, torch.einsum("bmk,bkn->mn", batch1, batch2), beta, alpha)


@implements_torch(torch.addr, either=("input", "vec1", "vec2"))
def _addr(input: Any, vec1: Any, vec2: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    return _add_to_product(input, torch.outer(vec1, vec2), beta, alpha)


def _add_to_product(input: Any, product: Any, beta: float, alpha: float) -> Any:
    """Return beta input + alpha product; where beta = 0, torch does not read the input, which may hold anything."""
    product = product * alpha if alpha != 1 else product
    if beta == 0:
        return product
    if torch.is_autocast_enabled(product.device.type):
        input = input.to(product.dtype)
    input = input * beta if beta != 1 else input
    if isinstance(input, Tile) and isinstance(product, Tile):
        lead = product.ndim - input.ndim
        if any(set(input.layout.dim_axes(d)) != set(product.layout.dim_axes(lead + d)) for d in range(input.ndim)):
            product, labels = product.owned(), [str(d) for d in range(product.ndim)]
            brought = cuts_of_tile(product, labels).bring_operand(input, labels[lead:], product)
            return Tile(product.local + brought, product.layout, product.mesh)
    return product + input


# -- products of several dims, and of several matrices ----------------------------------------------------------------


@implements_torch(torch.tensordot, either=("a", "b"))
def _tensordot(a: Any, b: Any, dims: Any = 2) -> Any:
    if isinstance(dims, Tensor):
        dims = dims.tolist() if dims.numel() > 1 else int(dims)
    if isinstance(dims, int):
        if not 0 <= dims <= min(a.ndim, b.ndim):
            raise RuntimeError(f"tensordot: dims={dims} of operands of {a.ndim} and {b.ndim} dims")
        dims = (list(range(a.ndim - dims, a.ndim)), list(range(dims)))
    of_a, of_b = [d % a.ndim for d in dims[0]], [d % b.ndim for d in dims[1]]
    if len(of_a) != len(of_b):
        raise RuntimeError(f"tensordot: dims={dims} must name as many dims of both operands")
    first, second = [f"a{d}" for d in range(a.ndim)], [f"b{d}" for d in range(b.ndim)]
    for d, e in zip(of_a, of_b, strict=True):
        second[e] = first[d]
    out = [by for by in (*first, *second) if (by in first) != (by in second)]

    def multiply(x: Tensor, y: Tensor) -> Tensor:
        return torch.tensordot(x, y, (of_a, of_b))  # pyright: ignore[reportArgumentType]

    return contract_labels("tensordot", multiply, (a, b), [first, second], out)


@implements_torch(torch.inner, either=("input", "other"))
def _inner(input: Any, other: Any) -> Any:
    if input.ndim == 0 or other.ndim == 0:
        return input * other
    if input.shape[-1] != other.shape[-1]:
        raise RuntimeError(f"inner: the last dims of {tuple(input.shape)} and {tuple(other.shape)} differ")
    return _tensordot(input, other, ([-1], [-1]))


@implements_torch(torch.outer, torch.ger, either=("input", "vec2"))
def _outer(input: Any, vec2: Any) -> Any:
    if input.ndim != 1 or vec2.ndim != 1:
        raise RuntimeError(f"outer: operands of {input.ndim} and {vec2.ndim} dims; it takes vectors")
    return contract_labels("outer", torch.outer, (input, vec2), [["i"], ["j"]], ["i", "j"])


@implements_torch(torch.linalg.multi_dot, either=("tensors",))
def _multi_dot(tensors: Sequence[Any]) -> Any:
    """Return the product of several matrices, by the fewest multiplications; the ends may be vectors."""
    if len(tensors) < 2:
        raise RuntimeError(f"multi_dot: {len(tensors)} operands; it takes two or more")
    rows = [x.shape[0] if x.ndim > 1 or i else 1 for i, x in enumerate(tensors)]
    sizes = (*rows, tensors[-1].shape[1] if tensors[-1].ndim > 1 else 1)
    return _multiply_between(tensors, sizes, 0, len(tensors))


@implements_torch(torch.chain_matmul)
def _chain_matmul(*matrices: Any) -> Any:
    return matrices[0] if len(matrices) == 1 else _multi_dot(matrices)


def _multiply_between(tensors: Sequence[Any], sizes: tuple[int, ...], start: int, stop: int) -> Any:
    if stop - start == 1:
        return tensors[start]
    at = _cheapest_split(sizes, start, stop)[1]
    return torch.matmul(_multiply_between(tensors, sizes, start, at), _multiply_between(tensors, sizes, at, stop))


@lru_cache(maxsize=1024)
def _cheapest_split(sizes: tuple[int, ...], start: int, stop: int) -> tuple[int, int]:
    if stop - start == 1:
        return 0, start
    costs = [
        (_cheapest_split(sizes, start, at)[0] + _cheapest_split(sizes, at, stop)[0], at)
        for at in range(start + 1, stop)
    ]
    return min((cost + sizes[start] * sizes[at] * sizes[stop], at) for cost, at in costs)


# -- einsum -----------------------------------------------------------------------------------------------------------


@implements_torch(torch.einsum, plain=("equation",))
def einsum(equation: str, *operands: Any) -> Any:
    """Sum the products that `equation` names; see `contract_labels`.  A repeated label takes the diagonal."""
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    labels, out = read_equation(equation, tuple([t.ndim for t in operands]))
    if any(isinstance(t, Tile) and len(set(by)) != len(by) for by, t in zip(labels, operands, strict=True)):
        _, arrow, right = equation.replace(" ", "").partition("->")
        pairs = [_without_repeats(by, t) for by, t in zip(labels, operands, strict=True)]
        terms = ["".join(x for x in term if not x.isdigit()) for term, _ in pairs]
        places = [next((k for k, x in enumerate(term) if x.isdigit()), None) for term, _ in pairs]
        terms = [t if at is None else t[:at] + "..." + t[at:] for t, at in zip(terms, places, strict=True)]
        to = right if arrow else "".join("..." if x == "0" else x for x in out if x == "0" or not x.isdigit())
        return einsum(f"{','.join(terms)}->{to}", *(t for _, t in pairs))
    return contract_labels("einsum", lambda *locals_: torch.einsum(equation, *locals_), operands, labels, out)


@lru_cache(maxsize=1024)
def read_equation(equation: str, ndims: tuple[int, ...]) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Return the labels of each operand of an einsum, which has `ndims` dims, and those of the result."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    if len(terms) != len(ndims):
        raise RuntimeError(f"einsum {equation!r} has {len(terms)} terms for {len(ndims)} operands")
    labels = tuple(tuple(_expand_term(term, ndim)) for term, ndim in zip(terms, ndims, strict=True))
    dots = max((by for by in ([x for x in term if x.isdigit()] for term in labels)), key=len)
    out = (
        _with_dots(right, dots)
        if arrow
        else [*dots, *sorted(x for x in set("".join(terms)) - {"."} if "".join(terms).count(x) == 1)]
    )
    return labels, tuple(out)


def _without_repeats(labels: Sequence[str], x: Any) -> tuple[list[str], Any]:
    """Return an operand with the diagonal of the dims of each repeated label, which then comes last."""
    names = list(labels)
    while len(set(names)) != len(names):
        label = next(x for x in names if names.count(x) > 1)
        first = names.index(label)
        second = names.index(label, first + 1)
        if x.shape[first] != x.shape[second]:
            raise RuntimeError(f"einsum: label {label!r} has sizes {x.shape[first]} and {x.shape[second]}")
        x = x.diagonal(0, first, second)
        names = [n for k, n in enumerate(names) if k not in (first, second)] + [label]
    return names, x


def _expand_term(term: str, ndim: int) -> list[str]:
    count = ndim - len(term.replace("...", ""))
    if count < 0 or (count and "..." not in term):
        raise RuntimeError(f"einsum term {term!r} does not fit an operand of {ndim} dims")
    return _with_dots(term, [str(d) for d in reversed(range(count))])


def _with_dots(term: str, dots: Sequence[str]) -> list[str]:
    before, ellipsis, after = term.partition("...")
    return [*before, *(dots if ellipsis else ()), *after]
