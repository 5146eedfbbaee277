"""Functions that the table refuses: a typed error when strict, and else what plain torch gives, with its gradients."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F

import jigsaw
from jigsaw.errors import ShardingError
from jigsaw.testing import on_ranks, world_mesh
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

A = torch.Generator().manual_seed(3)
SQUARE = torch.randn(6, 6, generator=A, dtype=torch.float64)
GROWN = SQUARE @ SQUARE.T + 6 * torch.eye(6)  # symmetric, positive definite
WIDE = torch.randn(6, 9, generator=A, dtype=torch.float64)
STACK = torch.randn(4, 5, 5, generator=A, dtype=torch.float64)
SERIES = torch.randn(7, generator=A, dtype=torch.float64)
POSITIVE = WIDE.abs() + 1.5


def _symmetric(function):
    return lambda x: function(x + x.mT)


LINEAR = [
    ("cholesky", torch.linalg.cholesky, GROWN),
    ("cholesky_ex", lambda x: torch.linalg.cholesky_ex(x).L, GROWN),
    ("inv", torch.linalg.inv, GROWN),
    ("inv_ex", lambda x: torch.linalg.inv_ex(x).inverse, GROWN),
    ("det", torch.linalg.det, SQUARE),
    ("slogdet", torch.linalg.slogdet, SQUARE),
    ("logdet", torch.logdet, GROWN),
    ("det of many", torch.linalg.det, STACK),
    ("eigh", _symmetric(torch.linalg.eigh), SQUARE),
    ("eigvalsh", _symmetric(torch.linalg.eigvalsh), SQUARE),
    ("eig", lambda x: torch.linalg.eig(x).eigenvalues.abs(), SQUARE),
    ("eigvals", lambda x: torch.linalg.eigvals(x).abs(), SQUARE),
    ("svd", lambda x: torch.linalg.svd(x, full_matrices=False), WIDE),
    ("svdvals", torch.linalg.svdvals, WIDE),
    ("qr", torch.linalg.qr, SQUARE),
    ("lu", torch.linalg.lu, SQUARE),
    ("lu_factor", lambda x: torch.linalg.lu_factor(x).LU, SQUARE),
    ("lu_solve", lambda x: torch.linalg.lu_solve(*torch.linalg.lu_factor(x), x), SQUARE),
    ("ldl_factor", lambda x: torch.linalg.ldl_factor(x).LD.detach(), GROWN),
    ("lstsq", lambda x: torch.linalg.lstsq(x.mT, x.mT[:, :2]).solution, WIDE),
    ("matrix_exp", torch.linalg.matrix_exp, SQUARE),
    ("matrix_norm", torch.linalg.matrix_norm, STACK),
    ("matrix_norm 2", lambda x: torch.linalg.matrix_norm(x, 2), STACK),
    ("matrix_power", lambda x: torch.linalg.matrix_power(x, 3), SQUARE),
    ("matrix_rank", torch.linalg.matrix_rank, WIDE),
    ("cond", torch.linalg.cond, SQUARE),
    ("pinv", torch.linalg.pinv, WIDE),
    ("solve", lambda x: torch.linalg.solve(x, x[:, :2]), SQUARE),
    ("solve plain", lambda x: torch.linalg.solve(GROWN, x), WIDE),
    ("solve_triangular", lambda x: torch.linalg.solve_triangular(x, x, upper=True), GROWN),
    ("tensorinv", lambda x: torch.linalg.tensorinv(x.reshape(6, 2, 3), ind=1), SQUARE),
    ("tensorsolve", lambda x: torch.linalg.tensorsolve(x, torch.ones(6, dtype=x.dtype)), SQUARE),
    ("vander", lambda x: torch.linalg.vander(x, N=4), SERIES),
    ("householder", lambda x: torch.linalg.householder_product(x, SERIES[:6]), SQUARE),
    ("cholesky_solve", lambda x: torch.cholesky_solve(x, GROWN), WIDE),
    ("cholesky_inverse", torch.cholesky_inverse, GROWN),
    ("nuclear_norm", torch.nuclear_norm, WIDE),
    ("pca", lambda x: torch.svd(x).S, WIDE),
]
OTHERS = [
    ("vander alone", lambda x: torch.vander(x.detach(), N=3), SERIES),
    ("cov", torch.cov, WIDE),
    ("corrcoef", torch.corrcoef, WIDE),
    ("gradient", torch.gradient, WIDE),
    ("gradient along 1", lambda x: torch.gradient(x, dim=1, spacing=0.5), WIDE),
    ("histogram", lambda x: torch.histogram(x.detach(), 5), WIDE),
    ("histogramdd", lambda x: torch.histogramdd(x.detach()[:, :2], [3, 3]).hist, WIDE),
    ("combinations", torch.combinations, SERIES),
    ("pdist", F.pdist, WIDE),
    ("bilinear", lambda x: F.bilinear(x, x, torch.ones(2, 9, 9, dtype=x.dtype)), WIDE),
    ("renorm", lambda x: torch.renorm(x, 2, 0, 1.0), WIDE),
    ("channel_shuffle", lambda x: F.channel_shuffle(x, 2), STACK.mT[:, :4]),
    ("as_strided", lambda x: torch.as_strided_scatter(x, torch.zeros(3, dtype=x.dtype), (3,), (9,)), WIDE),
    ("diagonal_scatter", lambda x: torch.diagonal_scatter(x, torch.zeros(6, dtype=x.dtype)), SQUARE),
    ("stft", lambda x: torch.stft(x, 4, return_complex=True, center=False, window=torch.ones(4).double()).abs(),
     WIDE),
    ("sum_to_size", lambda x: x.sum_to_size(1, 9), WIDE),
    ("kl_div", lambda x: torch.kl_div(x, x.detach().exp()), WIDE),
    ("margin_ranking", lambda x: F.margin_ranking_loss(x, x.flip(0), torch.ones(6, 9, dtype=x.dtype)), WIDE),
    ("hinge", lambda x: F.hinge_embedding_loss(x, torch.ones(6, 9, dtype=x.dtype)), WIDE),
    ("triplet", lambda x: F.triplet_margin_loss(x, x.flip(0), x.flip(1)), WIDE),
    ("multi_margin", lambda x: F.multi_margin_loss(x, torch.arange(6)), WIDE),
    ("poisson_nll", lambda x: F.poisson_nll_loss(x, POSITIVE), WIDE),
    ("multilabel_soft", lambda x: F.multilabel_soft_margin_loss(x, (WIDE > 0).double()), WIDE),
    ("expit", torch.special.expit, WIDE),
    ("psi", torch.special.psi, POSITIVE),
    ("gammaln", torch.special.gammaln, POSITIVE),
    ("multigammaln", lambda x: torch.special.multigammaln(x, 2), POSITIVE),
    ("ndtr", torch.special.ndtr, WIDE),
    ("gammainc", lambda x: torch.special.gammainc(POSITIVE, x), POSITIVE),
    ("entr", torch.special.entr, POSITIVE),
    ("trapezoid", torch.trapezoid, WIDE),
    ("unravel_index", lambda x: torch.unravel_index(x.detach().argsort(0), (3, 9)), WIDE),
    ("nonzero_static", lambda x: torch.nonzero_static(x.detach() > 0, size=7), WIDE),
]  # fmt: skip


def _leaves(out):
    if isinstance(out, (list, tuple)):
        return [leaf for o in out for leaf in _leaves(o)]
    return [out]


def _answer(function, x, leaf):
    """The results, and the gradient of a sum over them in which every element has another weight."""
    results = _leaves(function(x))
    plain = [y.full_tensor() if isinstance(y, Tile) else y for y in results]
    total = 0
    for y, whole in zip(results, plain, strict=True):
        if whole.is_floating_point() and y.requires_grad:
            weight = torch.linspace(0.5, 1.5, max(whole.numel(), 1), dtype=whole.dtype)[: whole.numel()]
            total = total + (y.nan_to_num(0, 0, 0) * weight.view(whole.shape)).sum()
    gradient = None
    if isinstance(total, torch.Tensor) and total.requires_grad:
        (gradient,) = torch.autograd.grad(total, leaf)
    return plain, gradient


def _differs(function, x, mesh, spec):
    """What differs from plain torch, in a word; None where nothing does, or where it is refused by a typed error."""
    whole = x.clone().requires_grad_()
    expected, want = _answer(function, whole, whole)
    tile = shard(x, mesh, spec)
    tile.local.requires_grad_()
    try:
        found, got = _answer(function, tile, tile.local)
    except ShardingError as refusal:
        return f"refused: {refusal}"
    except Exception as error:
        return f"untyped {type(error).__name__}: {error}"
    if [y.shape for y in found] != [y.shape for y in expected]:
        return f"shapes {[tuple(y.shape) for y in found]}"
    for a, b in zip(found, expected, strict=True):
        if a.dtype != b.dtype or not torch.allclose(a, b, rtol=1e-9, atol=1e-10, equal_nan=True):
            return f"another result: {a} instead of {b}"
    if (got is None) != (want is None):
        return f"gradient {got} instead of {want}"
    if got is not None:
        rows = shard(want, mesh, spec).local
        if not torch.allclose(got, rows, rtol=1e-8, atol=1e-9, equal_nan=True):
            return f"another gradient, by {(got - rows).abs().max()}"
    return None


@pytest.mark.slow
@on_ranks(2, timeout=240)
def test_refused_functions_are_typed_when_strict_and_else_those_of_plain_torch():
    warnings.simplefilter("ignore")
    mesh = world_mesh(lat=2)
    wrong = []
    for name, function, x in [*LINEAR, *OTHERS]:
        for spec in dict.fromkeys([("lat", *(None,) * (x.ndim - 1)), (*(None,) * (x.ndim - 1), "lat")]):
            told = _differs(function, x, mesh, spec)
            if told is not None and not told.startswith("refused"):
                wrong.append(f"{name} {spec}, strict: {told}")
            with jigsaw.strict_mode(False):
                told = _differs(function, x, mesh, spec)
            if told is not None:
                wrong.append(f"{name} {spec}, not strict: {told}")
    assert not wrong, "\n".join(wrong)
