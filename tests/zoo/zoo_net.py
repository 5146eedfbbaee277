"""What the zoo knows of a net: how it is built small, what it takes, how it is cut, and what it is trained with."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LATLON: tuple[str | None, ...] = (None, None, "lat", "lon")
MESHES = ({"lat": 2}, {"lat": 3}, {"lat": 2, "lon": 2})


@dataclass(frozen=True)
class ZooInput:
    """One tensor that a net takes: normal numbers, or whole ones below `classes`; `spec=None` passes it whole."""

    shape: tuple[int, ...]
    spec: tuple[str | tuple[str, ...] | None, ...] | None = LATLON
    classes: int = 0

    def draw(self, seed: int, dtype: torch.dtype) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.classes:
            return torch.randint(self.classes, self.shape, generator=generator)
        return torch.randn(self.shape, generator=generator, dtype=dtype)


def image(*shape: int) -> ZooInput:
    """Batch, channels, rows cut by `lat`, columns cut by `lon`."""
    return ZooInput(shape)


def volume(*shape: int) -> ZooInput:
    """Batch, channels, two dims that are cut, and one that is not."""
    return ZooInput(shape, (*LATLON, None))


def labels(classes: int, *shape: int) -> ZooInput:
    """Whole numbers below `classes`, cut as images are, or as volumes."""
    return ZooInput(shape, (*LATLON, None)[: len(shape)], classes)


def whole(*shape: int, classes: int = 0) -> ZooInput:
    """What every rank passes whole: a time, a class, a text."""
    return ZooInput(shape, None, classes)


def as_built(model: nn.Module) -> nn.Module:
    """The model itself: plain training is done to it as it is."""
    return model


@dataclass(frozen=True)
class ZooNet:
    """A net of a package, as it is installed.

    - `build` makes it small, under one seed; every weight gets noise, so that no zero hides anything.
    - `call(model, *inputs)` is how a user calls it; by default ``model(*inputs)``.
    - `loss(output, *targets)` is a scalar; by default the mean squared error of every tensor of the output.
    - `casts` says that it computes in float32 in places, whatever it is given; both runs then leave out its casts.
    - `prepare` is what is done to the model once it is built (`uses.py`).
    - `drawn` is the dtype in which weights and inputs are drawn, where they are made wider (`zoo_training`).
    - `rtol` is for what computes in float32 by other means.
    - `distributions` are packages whose versions are told.
    """

    name: str
    package: str
    build: Callable[[], nn.Module]
    inputs: Sequence[ZooInput]
    call: Callable[..., Any] | None = None
    targets: Sequence[ZooInput] = ()
    loss: Callable[..., Tensor] | None = None
    dtype: torch.dtype = torch.float64
    casts: bool = False
    rtol: float | None = None
    meshes: Sequence[dict[str, int]] = MESHES
    heavy: bool = False
    prepare: Callable[[nn.Module], nn.Module] = as_built
    drawn: torch.dtype | None = None

    @property
    def key(self) -> str:
        return f"{self.package}/{self.name}"

    @property
    def is_wide(self) -> bool:
        """Whether its casts to float32 are left out."""
        return self.casts and self.dtype == torch.float64

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        with default_dtype(self.drawn or torch.get_default_dtype()):
            model = self.build().train()
        _to_width(model, self.drawn or self.dtype)
        _add_noise(model)
        _to_width(model, self.dtype)
        return self.prepare(model)

    def draw_inputs(self) -> list[Tensor]:
        return self._draw(self.inputs, 100)

    def draw_targets(self) -> list[Tensor]:
        return self._draw(self.targets, 200)

    def _draw(self, kinds: Sequence[ZooInput], seed: int) -> list[Tensor]:
        drawn = [x.draw(seed + i, self.drawn or self.dtype) for i, x in enumerate(kinds)]
        return [x.to(self.dtype) if x.is_floating_point() else x for x in drawn]


def make(place: str, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """``make("package.module:Name", ...)``: the net is imported when it is built."""

    def build() -> nn.Module:
        module, name = place.split(":")
        return getattr(importlib.import_module(module), name)(*args, **kwargs)

    return build


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """What a net makes as it is built or run (positions, bases) is as wide as its weights."""
    kept = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(kept)


def _to_width(model: nn.Module, dtype: torch.dtype) -> None:
    """`Module.to(dtype)` leaves complex parameters as narrow as they are; `Tensor.to` may be one without casts."""
    wide = torch.complex128 if dtype == torch.float64 else torch.complex64

    def widen(x: Tensor) -> Tensor:
        own = dtype if x.is_floating_point() else wide if x.is_complex() else x.dtype
        return x if x.dtype == own else torch.empty_like(x, dtype=own).copy_(x)

    model._apply(widen)


@torch.no_grad()
def _add_noise(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    for p in model.parameters():
        if not (p.is_floating_point() or p.is_complex()):
            continue
        fan_in = max(p[0].numel(), 1) if p.ndim > 1 else 25
        p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype) * 0.5 / fan_in**0.5)


def define_missing_operators() -> None:
    """The wheel of torchvision on PyPI is for CUDA; with a torch for CPU its operators are missing, which no net of
    the zoo needs, and it cannot be imported without their names.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _KEPT.append(library)


_KEPT: list[Any] = []
