"""Oracle of tests: plain torch on the whole tensor in one process, and the same model on tiles on every mesh."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial
from torch.nn.functional import mse_loss

from jigsaw import comm
from jigsaw.geometry.axis_names import usual_spec
from jigsaw.geometry.layout import LayoutSpec
from jigsaw.ranks.mesh import axes_of_mesh
from jigsaw.testing.failure import RankFailedError
from jigsaw.testing.rank import world_mesh
from jigsaw.testing.world import run_on_ranks
from jigsaw.tile.misuse import UNREDUCED, without_warning
from jigsaw.tile.tile import Tile
from jigsaw.tile.tile_making import shard
from jigsaw.torch_internals.autograd import apply_to_module

OracleModel = Callable[..., Any]
OracleMesh = Mapping[str, int]


def assert_same_on_every_mesh(
    model: OracleModel,
    batch: Tensor | Sequence[Any],
    meshes: Sequence[OracleMesh] | None = None,
    *,
    spec: LayoutSpec | Sequence[LayoutSpec | None] | None = None,
    target: Tensor | None = None,
    target_spec: LayoutSpec | None = None,
    loss: Callable[..., Tensor] | None = None,
    build: Callable[[Any, DeviceMesh], OracleModel] | None = None,
    gradients: str | None = None,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-9,
    atol: float = 1e-12,
    timeout: float = 60.0,
    **cut: Any,
) -> None:
    """Assert that `model` on tiles gives what it gives on the whole tensor, on every mesh.

    It compares outputs, loss, buffers, and the gradients of every parameter and input.

    `model` is a module, or a function of tensors. It and the `batch` (one tensor, or the sequence of the arguments) are
    converted to `dtype` (complex ones to complex numbers of it). They run once in this process, and then on real ranks
    for each of `meshes` (mappings from axis to size). By default these are 1, 2, 3, 4 and 2 x 2 ranks of the axes that
    `spec` names. Everything must pickle. Use it from plain code or a test, not inside ``on_ranks``.

    - `spec` cuts a single tensor; for a sequence, it has one entry for each argument (None: passed whole). Without it,
      ``data`` cuts dim 0 and ``lat``, ``lon`` (or ``z``, ``y``, ``x``) the last dims. `cut` goes to `jigsaw.shard`:
      split=, align=, halo=, periodic=.
    - `loss` takes the output (and the `target`) and returns a scalar. By default it is the mean squared error where
      there is a `target`, else a random linear functional of all outputs.
    - `build(model, mesh)` makes what runs on the ranks, ``jigsaw.parallelize`` for example. `gradients` says what its
      plain parameters hold after the backward pass. With ``"parts"`` (the default without `build`) each rank has its
      part, to be summed over the mesh. With ``"whole"`` (the default with it) it has the whole gradient. A parameter
      that meets only plain tensors has no parts: test such a model through ``build=jigsaw.parallelize``.

    Each tensor may be off by ``atol + rtol * max |expected|``.

    Raises: `AssertionError` that lists every tensor that differs, with the mesh, the rank and the worst place;
    `RankFailedError` when a rank raises; `ValueError` for a mesh that cuts nothing.

    >>> model, batch = torch.nn.Conv2d(1, 2, 3, padding=1), torch.randn(2, 1, 7, 5)
    >>> jigsaw.testing.assert_same_on_every_mesh(model, batch, [{"lat": 2}], spec=(None, None, "lat", None))
    """
    if gradients not in (None, "parts", "whole"):
        raise ValueError(f"gradients={gradients!r}: each rank's gradient is one of its 'parts' or the 'whole'")
    inputs = [batch] if isinstance(batch, Tensor) else list(batch)
    specs = _input_specs(inputs, [spec] if isinstance(batch, Tensor) else spec)
    with_target = [] if target is None else [target]
    case = OracleCase(
        model=_in_dtype(model, dtype),
        inputs=[_in_dtype(x, dtype) for x in [*inputs, *with_target]],
        specs=[*specs, *([target_spec or (specs[0] if spec is not None else None)] if with_target else [])],
        given=spec is not None,
        arguments=len(inputs),
        loss=loss or (mse_loss if with_target else random_functional),
        build=build,
        parts=(build is None) if gradients is None else gradients == "parts",
        cut=dict(cut),
    )
    chosen = _default_meshes(case) if meshes is None else [dict(m) for m in meshes]
    plans = [(axes, _checked_specs(case, axes)) for axes in chosen]
    expected = _run_whole(case)
    for axes, by_input in plans:
        ranks = math.prod(axes.values())
        try:
            differences_by_rank = run_on_ranks(
                ranks, _rank_differences, replace(case, specs=by_input), expected, axes, rtol, atol, timeout=timeout
            )
        except RankFailedError as error:
            error.add_note(f"on the mesh {_mesh_as_text(axes)}")
            raise
        lines = [
            f"  rank {rank}: {line}" for rank, differences in enumerate(differences_by_rank) for line in differences
        ]
        if lines:
            name = type(model).__name__ if isinstance(model, nn.Module) else getattr(model, "__name__", repr(model))
            raise AssertionError(
                "\n".join([f"{name} on the mesh {_mesh_as_text(axes)} differs from the whole tensor's:", *lines])
            )


@dataclass(frozen=True)
class OracleCase:
    """Case that runs on every mesh.  The `target`, if any, is the input after the `arguments`."""

    model: OracleModel
    inputs: list[Any]
    specs: list[LayoutSpec | None]
    given: bool
    arguments: int
    loss: Callable[..., Tensor]
    build: Callable[[Any, DeviceMesh], OracleModel] | None
    parts: bool
    cut: dict[str, Any]


@dataclass
class OracleResult:
    """Whole tensors by name: ``output``, ``loss``, ``gradient of 0.weight``, …"""

    tensors: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def random_functional(output: Any) -> Tensor:
    """Sum all output elements times fixed random numbers, so that every element has its own gradient."""
    generator = torch.Generator().manual_seed(1)
    terms: list[Tensor] = []
    for _, leaf in _output_leaves(output):
        numbers = torch.view_as_real(leaf.resolve_conj()) if leaf.is_complex() else leaf
        factors = torch.randn(numbers.shape, generator=generator, dtype=numbers.dtype).to(numbers.device)
        terms.append((numbers * factors).sum())
    return cast(Tensor, sum(terms))


# -- the two runs ------------------------------------------------------------------------------------------------------


def _run_whole(case: OracleCase) -> OracleResult:
    model = copy.deepcopy(case.model)
    inputs = [_leaf_copy(x) for x in case.inputs]
    result = _run_case(case, model, inputs)
    for name, parameter in _trained_parameters(model):
        if parameter.grad is not None:
            result.tensors[f"gradient of {name}"] = parameter.grad
    for name, x in _differentiable_inputs(inputs[: case.arguments]):
        result.tensors[f"gradient of {name}"] = torch.zeros_like(x) if x.grad is None else x.grad
    return result


def _rank_differences(
    case: OracleCase, expected: OracleResult, axes: dict[str, int], rtol: float, atol: float
) -> list[str]:
    mesh = world_mesh(**axes)
    whole = case.model.to(mesh.device_type) if isinstance(case.model, nn.Module) else case.model
    model = whole if case.build is None else case.build(whole, mesh)
    wholes, tiles = _cut_inputs(case, mesh)
    with without_warning(UNREDUCED):  # no warning is needed: the parts are summed below
        outcome = _run_case(case, model, tiles)
    for name, parameter in _trained_parameters(model):
        if f"gradient of {name}" in expected.tensors or parameter.grad is not None:
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            outcome.tensors[f"gradient of {name}"] = _whole_gradient(gradient.detach(), mesh, case.parts)
    for name, x in _differentiable_inputs(tiles[: case.arguments]):
        outcome.tensors[f"gradient of {name}"] = _input_gradient(x, wholes[name], mesh)
    missing = [f"{name}: not there" for name in expected.tensors if name not in outcome.tensors]
    return missing + [
        line
        for name, got in outcome.tensors.items()
        for line in _compare_tensors(name, got, expected.tensors.get(name), rtol, atol)
    ]


def _run_case(case: OracleCase, model: OracleModel, inputs: list[Any]) -> OracleResult:
    output = model(*inputs[: case.arguments])
    loss = case.loss(output, *inputs[case.arguments :])
    if isinstance(loss, Tile) or loss.ndim:
        raise ValueError(f"loss must return a scalar tensor, got {type(loss).__name__} of shape {tuple(loss.shape)}")
    if loss.requires_grad:
        loss.backward()
    result = OracleResult({"loss": loss.detach()})
    for name, leaf in _output_leaves(output):
        result.tensors[name] = (leaf.full_tensor() if isinstance(leaf, (Tile, DTensor)) else leaf).detach()
    if isinstance(model, nn.Module):
        for name, buffer in model.named_buffers():
            result.tensors[f"buffer {_plain_name(name)}"] = (
                buffer.full_tensor() if isinstance(buffer, DTensor) else buffer
            )
    return result


def _cut_inputs(case: OracleCase, mesh: DeviceMesh) -> tuple[dict[str, Any], list[Any]]:
    """Return the whole inputs by name, and their tiles; with a halo the gradient goes through `shard`, which sums."""
    wholes: dict[str, Any] = {}
    tiles: list[Any] = []
    for i, (whole, spec) in enumerate(zip(case.inputs, case.specs, strict=True)):
        x = _on_device(whole, mesh.device_type)
        whole = _leaf_copy(x) if spec is None or case.cut.get("halo") else x
        tile = whole if spec is None else shard(whole, mesh, spec, **case.cut)
        if spec is not None and not tile.local.requires_grad and _has_gradient(tile.local):
            tile.local.requires_grad_()
        wholes[f"input {i}"] = whole
        tiles.append(tile)
    return wholes, tiles


def _input_gradient(x: Any, whole: Any, mesh: DeviceMesh) -> Tensor:
    if not isinstance(x, Tile):  # for an input passed whole, a rank's gradient is its part, as for a parameter
        return _whole_gradient(torch.zeros_like(x) if x.grad is None else x.grad, mesh, parts=True)
    if not x.local.is_leaf:
        return torch.zeros_like(whole) if whole.grad is None else whole.grad
    gradient = torch.zeros_like(x.local) if x.local.grad is None else x.local.grad
    return Tile(gradient, x.layout, x.mesh).full_tensor()


def _whole_gradient(gradient: Tensor, mesh: DeviceMesh, parts: bool) -> Tensor:
    """Return the whole gradient from that of this rank: parts are summed over axes that do not cut the tensor."""
    others = [name for name, _ in axes_of_mesh(mesh)]
    if isinstance(gradient, DTensor):
        names = gradient.device_mesh.mesh_dim_names or ()
        others = [name for name in others if name not in names]
        if parts:
            summed = [Partial() if p.is_replicate() else p for p in gradient.placements]
            gradient = DTensor.from_local(
                gradient.to_local(),
                gradient.device_mesh,
                summed,
                run_check=False,
                shape=gradient.shape,
                stride=gradient.stride(),
            )
        gradient = gradient.full_tensor()
    return comm.all_reduce(gradient, mesh, others) if parts else gradient


# -- comparing ---------------------------------------------------------------------------------------------------------


def _compare_tensors(name: str, got: Tensor, expected: Tensor | None, rtol: float, atol: float) -> Iterator[str]:
    if expected is None:
        yield f"{name}: is there, but the whole tensor's run has none"
    elif got.shape != expected.shape:
        yield f"{name}: shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    elif got.dtype != expected.dtype:
        yield f"{name}: {got.dtype} instead of {expected.dtype}"
    elif got.numel():
        wide = torch.promote_types(got.dtype, torch.float64)
        a, b = got.detach().to("cpu", wide), expected.detach().to("cpu", wide)
        error = torch.where(a.isnan() & b.isnan() | (a == b), 0.0, (a - b).abs()).nan_to_num(math.inf)
        worst, bound = error.max().item(), atol + rtol * b.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
        if worst > bound:
            at = tuple(int(i) for i in torch.unravel_index(error.argmax(), error.shape))
            wrong = int((error > bound).sum())
            yield (
                f"{name}: off by {worst:.3g} at {at} ({a[at].item():.6g} instead of {b[at].item():.6g}); "
                f"{wrong} of {got.numel()} elements are off by more than {bound:.3g}"
            )


# -- small parts -------------------------------------------------------------------------------------------------------


def _output_leaves(output: Any, name: str = "output") -> Iterator[tuple[str, Any]]:
    if isinstance(output, (Tensor, Tile)):
        yield name, output
    elif isinstance(output, Mapping):
        for key, value in cast(Mapping[Any, Any], output).items():
            yield from _output_leaves(value, f"{name}[{key!r}]")
    elif isinstance(output, (list, tuple)):
        for i, value in enumerate(cast(Sequence[Any], output)):
            yield from _output_leaves(value, f"{name}[{i}]")


def _in_dtype(x: Any, dtype: torch.dtype) -> Any:
    """Return floating numbers in `dtype`, complex ones of two of them."""
    if isinstance(x, nn.Module):
        return apply_to_module(copy.deepcopy(x), partial(_in_dtype, dtype=dtype))
    if not isinstance(x, Tensor) or not _has_gradient(x):
        return x
    return x.detach().to(dtype.to_complex() if x.is_complex() else dtype)


def _has_gradient(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _on_device(x: Any, device: str) -> Any:
    return x.detach().to(device).requires_grad_(x.requires_grad) if isinstance(x, Tensor) else x


def _leaf_copy(x: Any) -> Any:
    return x.detach().clone().requires_grad_() if isinstance(x, Tensor) and _has_gradient(x) else x


def _trained_parameters(model: OracleModel) -> list[tuple[str, nn.Parameter]]:
    if not isinstance(model, nn.Module):
        return []
    return [(_plain_name(name), p) for name, p in model.named_parameters() if p.requires_grad]


def _plain_name(name: str) -> str:
    return name.removeprefix("module.")  # DistributedDataParallel's wrapper


def _differentiable_inputs(inputs: Sequence[Any]) -> list[tuple[str, Any]]:
    return [(f"input {i}", x) for i, x in enumerate(inputs) if isinstance(x, (Tensor, Tile)) and x.requires_grad]


# -- specs and meshes --------------------------------------------------------------------------------------------------


def _input_specs(inputs: Sequence[Any], spec: Any) -> list[LayoutSpec | None]:
    if spec is None:
        return [None] * len(inputs)
    specs: list[LayoutSpec | None] = list(spec)
    if len(specs) != len(inputs):
        raise ValueError(
            f"spec has {len(specs)} entries for {len(inputs)} inputs; give one for each, None for a whole one"
        )
    return specs


def _checked_specs(case: OracleCase, axes: OracleMesh) -> list[LayoutSpec | None]:
    """Return the spec of each input on this mesh; raise `ValueError` for one that cuts nothing: no test could fail."""
    specs = case.specs if case.given else [_spec_of_input(x, axes) for x in case.inputs]
    named = set(_named_axes(specs))
    if math.prod(axes.values()) > 1 and not any(size > 1 and name in named for name, size in axes.items()):
        raise ValueError(
            f"the mesh {_mesh_as_text(axes)} cuts no input: spec names the axes {sorted(named)}; "
            f"name one of the mesh's axes in spec, or leave this mesh out"
        )
    return specs


def _spec_of_input(x: Any, axes: OracleMesh) -> LayoutSpec | None:
    return usual_spec(x.ndim, axes) if isinstance(x, Tensor) and x.ndim else None


def _named_axes(specs: Sequence[LayoutSpec | None]) -> list[str]:
    entries = [entry for spec in specs if spec is not None for entry in spec if entry is not None]
    return list(dict.fromkeys(a for entry in entries for a in ((entry,) if isinstance(entry, str) else entry)))


def _default_meshes(case: OracleCase) -> list[dict[str, int]]:
    named = _named_axes(case.specs) if case.given else ["lat", "lon"]
    if not named:
        raise ValueError("spec names no axis, so no mesh cuts anything; name one, as in (None, None, 'lat', 'lon')")
    square = [{named[0]: 2, named[1]: 2}] if len(named) > 1 else []
    return [{named[0]: size} for size in (1, 2, 3, 4)] + square


def _mesh_as_text(axes: OracleMesh) -> str:
    return ", ".join(f"{name}={size}" for name, size in axes.items())


_USUAL_MESHES = ({"lat": 1}, {"lat": 2}, {"lat": 3}, {"lat": 4}, {"lat": 2, "lon": 2})


def assert_adjoint(
    op: Callable[[Tile], Any],
    shape: Sequence[int],
    meshes: Sequence[Mapping[str, int]] = _USUAL_MESHES,
    *,
    spec: LayoutSpec,
    dtype: torch.dtype = torch.float64,
    rtol: float = 1e-10,
    timeout: float = 60.0,
    **cut: Any,
) -> None:
    """Assert ``<F x, y> = <x, F* y>`` for the linear `op` F on tiles and its backward pass F*, on every mesh.

    x is a random tensor of the global `shape`, cut by `spec` (and split=, align=, halo=, periodic=, as in
    `jigsaw.shard`). y is random on what each rank holds of F x. The products are sums over the ranks, in which a part
    that several ranks hold counts once. `op` returns a Tile, or a tensor that is the same on every rank; it must
    pickle. The error may be ``rtol * |F x| |y|``.

    Source: Hewett and Grady, A linear algebraic approach to model parallelism in deep learning, arXiv 2006.03108.

    Raises: `AssertionError` with both products; `RankFailedError` when a rank raises.

    >>> blur = torch.nn.Conv2d(1, 1, 3, padding=1, bias=False, dtype=torch.float64)
    >>> jigsaw.testing.assert_adjoint(blur, (2, 1, 7, 5), [{"lat": 2}], spec=(None, None, "lat", None))
    """
    for axes in meshes:
        ranks = math.prod(axes.values())
        products = run_on_ranks(
            ranks, _adjoint_products, op, tuple(shape), dict(axes), spec, dtype, cut, timeout=timeout
        )
        forward, backward, fx, y = (math.fsum(column) for column in zip(*products, strict=True))
        where = ", ".join(f"{name}={size}" for name, size in axes.items())
        if not forward or abs(forward - backward) > rtol * math.sqrt(fx * y):
            raise AssertionError(
                f"{getattr(op, '__name__', op)} on the mesh {where}, shape {tuple(shape)}: "
                f"<F x, y> = {forward!r}, but <x, F* y> = {backward!r}"
                + ("" if forward else "; F x is zero everywhere")
            )


def _adjoint_products(
    op: Callable[[Tile], Any],
    shape: tuple[int, ...],
    axes: dict[str, int],
    spec: LayoutSpec,
    dtype: torch.dtype,
    cut: dict[str, Any],
) -> tuple[float, float, float, float]:
    mesh = world_mesh(**axes)
    x = shard(torch.randn(shape, dtype=dtype), mesh, spec, **cut)
    x.local.requires_grad_()
    out = op(x)
    fx: Tensor = out.local if isinstance(out, Tile) else out
    box = out.layout.held(out.coordinate) if isinstance(out, Tile) else ()
    # ranks that hold the same box draw the same y, because gradients of equal parts are equal
    y = torch.randn(fx.shape, generator=torch.Generator().manual_seed(hash(box) % 2**63), dtype=fx.dtype)
    gradient = torch.autograd.grad(fx, x.local, y, allow_unused=True)[0] if fx.requires_grad else None
    gradient = torch.zeros_like(x.local) if gradient is None else gradient
    once_y = 1 / (out.layout.replicas if isinstance(out, Tile) else mesh.size())
    once_x = 1 / x.layout.replicas
    fx = fx.detach()
    return (
        once_y * (fx * y).sum().item(),
        once_x * (x.local.detach() * gradient).sum().item(),
        once_y * fx.square().sum().item(),
        once_y * y.square().sum().item(),
    )
