"""Who computes in `computing.py`: each contender makes a step on this rank, and what the step gave, whole.

A contender is called with the plain model, its whole input and the axes of the mesh, and returns a `Side`.  What it
needs beyond torch is imported when it is asked.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import jigsaw
from jigsaw.testing import world_mesh

Axes = dict[str, int]


@dataclass(frozen=True)
class Side:
    """A step (forward and backward); the whole result and gradients of the input and the parameters in the last."""

    step: Callable[[], None]
    answer: Callable[[], Sequence[Tensor]]


# -- models ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer block: attention and an MLP, each after a norm."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Any) -> Any:
        y = self.norm1(x)
        q, k, v = (f(y).unflatten(-1, (-1, self.head)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """The bare function of queries, keys and values, stacked in front."""

    def forward(self, x: Any) -> Any:
        return F.scaled_dot_product_attention(*x.unbind(0))


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def convolutions(width: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.GELU()]
    return nn.Sequential(*layers)


# -- torch and jigsaw ------------------------------------------------------------------------------------------------


def _whole(x: Any) -> Tensor:
    if isinstance(x, DTensor | jigsaw.Tile):
        return x.full_tensor().detach()
    return x.detach()


def _side(model: nn.Module, leaf: Any, gradient: Callable[[], Tensor]) -> Side:
    """The step of a model whose `leaf` is its input; `gradient` is that of the input, whole."""
    last: list[Any] = []

    def step() -> None:
        model.zero_grad()
        if isinstance(leaf, jigsaw.Tile):
            leaf.local.grad = None
        else:
            leaf.grad = None
        y = model(leaf)
        y.square().sum().backward()
        for part in (leaf, *model.parameters()):
            if isinstance(part.grad, DTensor):  # DTensor leaves sums to whoever uses them, as an optimizer does
                part.grad = part.grad.redistribute(placements=part.placements)
        last[:] = [y.detach()]

    def answer() -> list[Tensor]:
        return [_whole(last[0]), gradient(), *(_whole(p.grad) for p in model.parameters())]

    return Side(step, answer)


def plain(model: nn.Module, x: Tensor, axes: Axes) -> Side:
    model, leaf = copy.deepcopy(model), x.clone().requires_grad_()
    return _side(model, leaf, lambda: leaf.grad)


def on_tiles(spec: tuple[str | None, ...], way: str | None = None, **options: Any) -> Callable[..., Side]:
    """Jigsaw: the input cut as `spec`, the model through `parallelize`."""

    def make(model: nn.Module, x: Tensor, axes: Axes) -> Side:
        mesh = world_mesh(**axes)
        tile = jigsaw.shard(x, mesh, spec)
        model = jigsaw.parallelize(copy.deepcopy(model), mesh, example=tile, **options)
        leaf = jigsaw.Tile(tile.local.clone().requires_grad_(), tile.layout, mesh)
        side = _side(model, leaf, lambda: jigsaw.Tile(leaf.local.grad, leaf.layout, mesh).full_tensor())
        return side if way is None else Side(_in_way(way, side.step), side.answer)

    return make


def _in_way(way: str, step: Callable[[], None]) -> Callable[[], None]:
    def stepped() -> None:
        with jigsaw.nn.attention_way(way):
            step()

    return stepped


# -- DTensor ---------------------------------------------------------------------------------------------------------


def _mesh(axes: Axes) -> Any:
    return init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))


def tensor_parallel(is_sequence_cut: bool) -> Callable[..., Side]:
    """`torch.distributed.tensor.parallel` as its tutorial has it: columns, then rows; tokens whole, or cut between."""

    def make(model: nn.Module, x: Tensor, axes: Axes) -> Side:
        mesh, model, tokens = _mesh(axes), copy.deepcopy(model), x.ndim - 2
        there = Shard(tokens) if is_sequence_cut else Replicate()
        rows = RowwiseParallel(output_layouts=there, use_local_output=False)
        if isinstance(model, Block):
            columns = ColwiseParallel()
            plan: dict[str, Any] = {
                **dict.fromkeys(("q", "k", "v", "mlp.0"), columns),
                "out": RowwiseParallel(output_layouts=there, use_local_output=False),
                "mlp.2": rows,
            }
            if is_sequence_cut:
                arrives = {"input_layouts": (there,), "desired_input_layouts": (Replicate(),)}
                plan |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
                plan |= {"mlp": PrepareModuleInput(**arrives)}
            model = parallelize_module(model, mesh, plan)
            if not is_sequence_cut:
                for norm in (model.norm1, model.norm2):
                    distribute_module(norm, mesh)
        else:
            plan = {"0": ColwiseParallel(input_layouts=there), "2": rows}
            model = parallelize_module(model, mesh, plan)
        leaf = distribute_tensor(x, mesh, [there]).detach().requires_grad_()
        return _side(model, leaf, lambda: _whole(leaf.grad))

    return make


def context_parallel(backend: str) -> Callable[..., Side]:
    """`torch.distributed.tensor.experimental.context_parallel`."""

    def make(model: nn.Module, x: Tensor, axes: Axes) -> Side:
        from torch.distributed.tensor.experimental import context_parallel as cut_context
        from torch.nn.attention import SDPBackend, sdpa_kernel

        mesh, last = _mesh(axes), []

        def step() -> None:
            buffer = x.clone()
            with (
                sdpa_kernel(getattr(SDPBackend, backend)),
                cut_context(mesh, buffers=[buffer], buffer_seq_dims=[x.ndim - 2]),
            ):
                leaf = buffer.clone().requires_grad_()
                y = model(leaf)
                y.square().sum().backward()
                last[:] = [y.detach(), leaf.grad]

        def answer() -> list[Tensor]:
            # it deals the tokens so that causal attention is balanced: rank r has parts r and 2 P - 1 - r
            return [_undealt(part) for part in last]

        return Side(step, answer)

    return make


def _undealt(part: Tensor) -> Tensor:
    ranks = dist.get_world_size()
    parts = [torch.empty_like(part) for _ in range(ranks)]
    dist.all_gather(parts, part.contiguous())
    halves = [p.chunk(2, -2) for p in parts]
    return torch.cat([h[0] for h in halves] + [h[1] for h in reversed(halves)], -2)


# -- PhysicsNeMo -----------------------------------------------------------------------------------------------------


def shard_tensor(registered: bool) -> Callable[..., Side]:
    """`physicsnemo.domain_parallel.ShardTensor`, rows cut; its convolution `registered`, as it does with CUDA alone."""

    def make(model: nn.Module, x: Tensor, axes: Axes) -> Side:
        from physicsnemo import domain_parallel
        from physicsnemo.distributed import DistributedManager

        if not DistributedManager.is_initialized():
            # its own way to begin names a device to gloo, which torch 2.13 refuses
            begin, dist.init_process_group = dist.init_process_group, lambda *given, **named: None
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")
            try:
                DistributedManager.initialize()
            finally:
                dist.init_process_group = begin
        if registered:
            # not by register_custom_ops, which needs a torchvision and timm that fit
            importlib.import_module("physicsnemo.domain_parallel.shard_utils.conv_patches")
        mesh, model = _mesh(axes), distribute_module(copy.deepcopy(model), _mesh(axes))
        leaf = domain_parallel.scatter_tensor(x, 0, mesh, (Shard(2),), requires_grad=True)
        return _side(model, leaf, lambda: _whole(leaf.grad))

    return make


# -- torch-harmonics -------------------------------------------------------------------------------------------------


class WithoutKernels(MetaPathFinder, Loader):
    """Imports torch-harmonics without its attention and DISCO convolutions, whose compiled kernels are of one torch
    alone; transforms do not use them.
    """

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        left_out = ("torch_harmonics.attention", "torch_harmonics.disco")
        return ModuleSpec(fullname, self, is_package=True) if fullname.startswith(left_out) else None

    def exec_module(self, module: ModuleType) -> None:
        def stand_in(name: str) -> type[nn.Module]:
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (nn.Module,), {})

        module.__dict__["__getattr__"] = stand_in


class Transforms(nn.Module):
    """To coefficients and back; what a rank makes of `torch_harmonics` (distributed, or not) or of jigsaw."""

    def __init__(self, there: nn.Module, back: nn.Module) -> None:
        super().__init__()
        self.there, self.back = there, back

    def forward(self, x: Any) -> Any:
        return self.back(self.there(x))


def harmonics(points: tuple[int, int], is_vector: bool, package: str) -> nn.Module:
    """A transform and its inverse on a Gaussian grid."""
    if package == "jigsaw":
        v = "Vector" if is_vector else ""
        pair = (f"{v}SphericalHarmonicTransform", f"Inverse{v}SphericalHarmonicTransform")
        made = [getattr(jigsaw.nn, name)(*points, grid="legendre-gauss") for name in pair]
        return Transforms(*made)
    if not any(isinstance(finder, WithoutKernels) for finder in sys.meta_path):
        sys.meta_path.insert(0, WithoutKernels())
    import torch_harmonics
    import torch_harmonics.distributed

    v = "Vector" if is_vector else ""
    room, d = (torch_harmonics.distributed, "Distributed") if package == "distributed" else (torch_harmonics, "")
    made = [getattr(room, f"{d}{way}Real{v}SHT")(*points, grid="legendre-gauss") for way in ("", "Inverse")]
    return Transforms(*made).float()


def distributed_harmonics(is_vector: bool) -> Callable[..., Side]:
    """`torch_harmonics.distributed`; the input is this rank's rows and columns, by its own rule."""

    def make(model: nn.Module, x: Tensor, axes: Axes) -> Side:
        mesh = _mesh(axes)
        harmonics((x.shape[-2], x.shape[-1]), is_vector, "plain")
        thd = importlib.import_module("torch_harmonics.distributed")
        groups = [mesh.get_group(name) if axes.get(name, 1) > 1 else None for name in ("lat", "lon")]
        thd.init(*groups)
        model = harmonics((x.shape[-2], x.shape[-1]), is_vector, "distributed")
        part = x
        for dim, (name, group) in zip((-2, -1), zip(("lat", "lon"), groups, strict=True), strict=True):
            if group is not None:
                part = thd.split_tensor_along_dim(part, dim, axes[name])[dist.get_rank(group)]
        leaf = part.contiguous().clone().requires_grad_()
        side = _side(model, leaf, lambda: _joined(leaf.grad, axes))

        def step() -> None:
            thd.init(*groups)  # global, and another contender's mesh had its turn
            side.step()

        return Side(step, lambda: [_joined(side.answer()[0], axes), _joined(leaf.grad, axes)])

    return make


def _joined(part: Tensor, axes: Axes) -> Tensor:
    """The rows and columns of all ranks, put together."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, part)
    columns = axes.get("lon", 1)
    return torch.cat([torch.cat(parts[i : i + columns], -1) for i in range(0, len(parts), columns)], -2)
