"""Torch's own samples of its functions and modules (`OpInfo`, `ModuleInfo`) on random cuts, against plain torch.

Every rank makes the same samples from the same seeds, answers them with plain torch on the whole tensors and with
tiles, and says what became of each: answered, refused (a typed error on every rank), untyped, or wrong.
"""

from __future__ import annotations

import copy
import functools
import pickle
import random
import sys
import types
import unittest
import warnings
from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import jigsaw
from jigsaw import comm
from jigsaw.errors import RanksDifferError, ShardingError
from jigsaw.geometry.layout import Layout
from jigsaw.ranks.waiting_ranks import WaitError
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard

if "expecttest" not in sys.modules:  # torch's own tests compare texts with it; the samples do not need it
    try:
        import expecttest  # noqa: F401
    except ImportError:
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase
        sys.modules["expecttest"] = stub

AXES = {1: {"lat": 1}, 2: {"lat": 2}, 3: {"lat": 3}, 4: {"lat": 2, "lon": 2}}
_DTYPES = (torch.float64, torch.complex128, torch.float32, torch.int64, torch.bool)
_WAIT = timedelta(seconds=120)  # a busy machine is slow; ranks that wait for each other wait for ever


# Values that plain torch does not fix: of these only shapes and errors are compared.
RANDOM = frozenset(
    "empty empty_like new_empty new_empty_strided empty_strided empty_permuted bernoulli cauchy exponential geometric "
    "log_normal multinomial normal normal.in_place normal.number_mean rand_like randn_like randint_like uniform "
    "nn.functional.dropout nn.functional.dropout2d nn.functional.dropout3d nn.functional.alpha_dropout "
    "nn.functional.feature_alpha_dropout.with_train nn.functional.rrelu svd_lowrank pca_lowrank "
    "nn.functional.fractional_max_pool2d nn.functional.fractional_max_pool3d "
    "nn.functional.scaled_dot_product_attention".split()
)

# Of a plain tensor and the shape (or dtype) of a tile: the answer is plain, and so is the gradient.
SHAPE_ONLY = frozenset(("broadcast_tensors", "expand_as", "reshape_as", "to", "view_as"))


@dataclass(frozen=True)
class Finding:
    """What became of one sample: `how` is answered, refused, untyped, wrong or apart (ranks that differ)."""

    name: str
    sample: int
    how: str
    text: str = ""


@cache
def all_infos():
    """(name, info) of every function and module that torch has samples of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db
        from torch.testing._internal.common_modules import module_db
    named = [(f"{o.name}{'.' if o.variant_test_name else ''}{o.variant_test_name}", o) for o in op_db]
    return named + [(m.name, m) for m in module_db]


def _seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)  # noqa: NPY002 - torch draws some samples from it


def _samples(info, most, generator, device):
    """At most so many of (made, arguments, parameters), any of what torch has: `made` is how a module is made, or
    whether the function is the one in place.
    """
    dtype = next((d for d in _DTYPES if d in info.dtypes), None)
    if dtype is None:
        return
    if hasattr(info, "module_cls"):
        needs = dtype.is_floating_point
        for given in _some_of(info.module_inputs_func(info, device, dtype, needs, training=True), most, generator):
            made, forward = given.constructor_input, given.forward_input
            if forward is not None:
                yield (made.args, made.kwargs, dtype, device), (forward.args, forward.kwargs)
        return
    needs = info.supports_autograd and (dtype.is_floating_point or dtype.is_complex)
    for given in _some_of(info.sample_inputs(device, dtype, needs), most, generator):
        arguments = (given.input, *given.args), dict(given.kwargs)
        yield False, arguments
        if info.inplace_variant is not None and isinstance(given.input, torch.Tensor):
            yield True, arguments


def _function_of(info, made):
    if isinstance(made, bool):
        return functools.partial(_in_place, info.inplace_variant) if made else info.op
    args, kwargs, dtype, device = made
    _seed_all(0)
    return info.module_cls(*args, **kwargs).to(device, dtype)


def _in_place(variant, input, *args, **kwargs):
    target = input.clone()
    return target, variant(target, *args, **kwargs)


def _some_of(samples, most, generator):
    every = list(samples)
    return every if len(every) <= most else [every[k] for k in sorted(generator.sample(range(len(every)), most))]


# -- on the ranks -----------------------------------------------------------------------------------------------------


@cache
def _mesh(ranks, device):
    return jigsaw.init_mesh(device=device, timeout=_WAIT, **AXES[ranks])


def answer_samples(ranks, names, most, seed, path, device="cpu", halos=False):
    """The findings of these functions, on this rank; `path` is where it says which one is under way.  With `halos` the
    tiles hold rows of their neighbors, and axes cut different dims where there are as many.
    """
    warnings.simplefilter("ignore")
    mesh = _mesh(ranks, device)
    shard(torch.ones(1, device=device), mesh, (None,))  # the first tile changes torch.masked, which torch's list names
    infos = dict(all_infos())
    findings = []
    for name in names:
        generator = random.Random(f"{name} {seed} {ranks}")
        with open(path, "w") as file:
            file.write(name)
        _seed_all(seed)
        try:
            samples = list(_samples(infos[name], most, generator, device))
        except Exception as error:  # of torch's own samples
            findings.append(Finding(name, 0, "no sample", repr(error)[:200]))
            continue
        for at, (made, arguments) in enumerate(_same_on_ranks(samples, mesh)):
            found = _try_sample(name, _function_of(infos[name], made), arguments, mesh, generator, halos)
            if found is not None:
                findings.append(Finding(name, at, *found))
    return findings


def _same_on_ranks(samples, mesh):
    """The first rank's: some of torch's come out of a set, so in an order by process."""
    told = comm.all_gather_object(mesh, [_pickled(each) for each in samples] if mesh.get_rank() == 0 else None)[0]
    return [mine if data is None else pickle.loads(data) for mine, data in zip(samples, told, strict=True)]


def _pickled(sample):
    try:
        return pickle.dumps(sample)
    except Exception:  # a lambda among the arguments
        return None


def _try_sample(name, function, arguments, mesh, generator, halos):
    leaves, tree = tree_flatten(arguments)
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) if _is_plain(x) else x for x in leaves]
    specs = [_any_cut(x, mesh, generator, halos) if _is_plain(x) else None for x in leaves]
    if not any(specs):
        return None
    whole, again = copy.deepcopy(function), copy.deepcopy(function)
    try:
        expected = _run_sample(whole, leaves, tree, 0)
        other = _run_sample(again, leaves, tree, 1)
        is_random = name in RANDOM or not _all_same(expected[0], other[0])
    except Exception:  # torch refuses its own sample here
        is_random = None
    # memory that nobody filled may be alike on one rank and not on another
    heard = comm.all_gather_object(mesh, is_random)
    if None in heard:
        return None
    is_random = any(heard)
    tiles = [x if spec is None else _cut(x, mesh, spec) for x, spec in zip(leaves, specs, strict=True)]
    given = [_with_halo(x, spec) if isinstance(x, Tile) else x for x, spec in zip(tiles, specs, strict=True)]
    text = f"{[(tuple(x.shape), s) for x, s in zip(leaves, specs, strict=True) if _is_plain(x)]}"
    try:
        found = _run_sample(function, given, tree, 0)
        how, said = "answered", ""
    except (RanksDifferError, WaitError):
        raise  # the worst: ranks whose messages differ
    except ShardingError as error:
        how, said = "refused", str(error)
    except Exception as error:
        how, said = "untyped", f"{type(error).__name__}: {error}"
    hows = comm.all_gather_object(mesh, how)
    if len(set(hows)) > 1:
        return "apart", f"{hows}: {said[:300]} | {text}"
    if how == "answered":
        wrong = _differences(found, expected, leaves, tiles, whole, function, mesh, is_random, name in SHAPE_ONLY)
        heard = [w for w in comm.all_gather_object(mesh, wrong) if w]
        if heard:
            return "wrong", f"{heard[0][:400]} | {text}"
    return how, f"{said[:300]} | {text}"


def _is_plain(x):
    return isinstance(x, torch.Tensor) and x.layout == torch.strided


def _any_cut(x, mesh, generator, halos):
    """None (plain), or (spec, split, halo, periodic) with each axis of the mesh in some dim, at any points."""
    if x.ndim == 0 or generator.random() < 0.25:
        return None
    axes_of_dim, split, halo, periodic = [()] * x.ndim, {}, {}, []
    free = list(range(x.ndim))
    for axis in mesh.mesh_dim_names:
        place = generator.choice(free)
        axes_of_dim[place] = (*axes_of_dim[place], axis)
        if halos and len(free) > 1:
            free.remove(place)
    for d, axes in enumerate(axes_of_dim):
        pieces = 1
        for axis in axes:
            pieces *= mesh.size(mesh.mesh_dim_names.index(axis))
        inner = sorted(generator.randint(0, x.shape[d]) for _ in range(pieces - 1))
        if axes and generator.random() < 0.5:
            split[d] = (0, *inner, x.shape[d])
        if halos and axes and x.shape[d] and generator.random() < 0.7:
            halo[d] = (generator.randint(0, min(2, x.shape[d])), generator.randint(0, min(2, x.shape[d])))
            periodic += [d] if generator.random() < 0.4 else []
    return tuple(axes or None for axes in axes_of_dim), split, halo, tuple(periodic)


def _cut(x, mesh, how):
    spec, split, _, _ = how
    tile = shard(x.detach(), mesh, spec, split=split or "balanced")
    tile.local.requires_grad_(x.requires_grad)
    return tile


def _with_halo(tile, how):
    """The tile with rows of its neighbors, whose gradients go back to it."""
    spec, split, halo, periodic = how
    axes = tile.layout.axes
    layout = Layout.of(tuple(tile.shape), spec, axes, split=split or "balanced", halo=halo, periodic=periodic)
    return tile.with_layout(layout) if halo else tile


def _run_sample(function, leaves, tree, seed):
    """The outputs, after the gradients of a random functional of them went back."""
    for x in leaves:
        if isinstance(x, torch.Tensor) and not isinstance(x, Tile):
            x.grad = None
    _seed_all(seed)
    # not the leaves themselves: a function may change its argument in place
    given = [x if isinstance(x, Tile) or not _is_plain(x) else x.clone() if x.requires_grad else x for x in leaves]
    args, kwargs = tree_unflatten(given, tree)
    outputs, _ = tree_flatten(function(*args, **kwargs))
    generator = torch.Generator().manual_seed(0)
    total = 0
    for y in outputs:
        if isinstance(y, (torch.Tensor, Tile)) and y.requires_grad:
            weights = torch.randn(tuple(y.shape), generator=generator, dtype=torch.float64).to(y.device, y.dtype)
            part = (y * weights).sum()
            total = total + (part.real if y.dtype.is_complex else part)
    if isinstance(total, torch.Tensor):
        total.backward()
    gradients = [None if not isinstance(x, torch.Tensor) or isinstance(x, Tile) else x.grad for x in leaves]
    return outputs, gradients


def _all_same(first, second):
    pairs = zip(first, second, strict=True)
    return all(
        not isinstance(a, torch.Tensor) or torch.equal(a.detach().nan_to_num(), b.detach().nan_to_num())
        for a, b in pairs
    )


def _differences(found, expected, leaves, tiles, whole, function, mesh, is_random, is_alike):
    """What differs, in words; every rank comes to the same messages."""
    said = []
    if len(found[0]) != len(expected[0]):
        return f"{len(found[0])} outputs, not {len(expected[0])}"
    for at, (y, right) in enumerate(zip(found[0], expected[0], strict=True)):
        said += _compare(f"output {at}", y.full_tensor() if isinstance(y, Tile) else y, right, is_random)
    names = [name for name, _ in jigsaw.ranks.mesh.axes_of_mesh(mesh)]
    for at, (x, tile) in enumerate(zip(leaves, tiles, strict=True)):
        right = expected[1][at]
        if right is None or is_random:
            continue
        if isinstance(tile, Tile):
            grad = torch.zeros_like(tile.local) if tile.local.grad is None else tile.local.grad
            grad = Tile(grad, tile.layout, mesh).full_tensor()
        elif is_alike:  # its whole gradient is on each rank
            grad = torch.zeros_like(x) if found[1][at] is None else _filled(found[1][at])
        else:  # each rank has its part
            grad = found[1][at]
            grad = comm.all_reduce(torch.zeros_like(x) if grad is None else _filled(grad), mesh, names)
        said += _compare(f"gradient of argument {at}", grad, _filled(right), False)
    if isinstance(function, torch.nn.Module) and not is_random:
        for (name, p), (_, right) in zip(function.named_parameters(), whole.named_parameters(), strict=True):
            if right.grad is not None:
                grad = comm.all_reduce(torch.zeros_like(p) if p.grad is None else p.grad, mesh, names)
                said += _compare(f"gradient of {name}", grad, right.grad, False)
    return "; ".join(said)


def _filled(grad):
    """A sparse gradient with its zeros."""
    return grad.to_dense() if grad.layout != torch.strided else grad


def _compare(what, found, right, is_random):
    if not isinstance(right, torch.Tensor) or not isinstance(found, torch.Tensor):
        is_same = type(found) is type(right) and found == right
        return [] if is_random or is_same else [f"{what}: {found} != {right}"]
    if found.shape != right.shape or found.dtype != right.dtype:
        return [f"{what}: {tuple(found.shape)} {found.dtype}, not {tuple(right.shape)} {right.dtype}"]
    if is_random or not right.numel():
        return []
    if right.dtype == torch.bool or not (right.is_floating_point() or right.is_complex()):
        return [] if torch.equal(found, right) else [f"{what}: other values"]
    tolerance = {torch.float64: 1e-8, torch.complex128: 1e-8}.get(right.dtype, 1e-4)
    scale = right.detach().nan_to_num(0, 0, 0).abs().max().item()
    atol = tolerance * max(scale, 1e-3)
    if torch.allclose(found.detach(), right.detach(), rtol=tolerance, atol=atol, equal_nan=True):
        return []
    off = (found.detach() - right.detach()).abs().nan_to_num().max().item()
    return [f"{what}: off by {off:.3g} of {scale:.3g}"]
