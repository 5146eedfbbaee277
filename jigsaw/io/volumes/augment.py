"""Augmentation while reading: each rank makes its own part of the augmented sample from the voxels that it needs.

``open_volumes(..., augment=[Flip(), Affine(degrees=15), Noise(std=(0, 0.1))])`` takes the steps in this order, each
with its own probability `p`. The drawn parameters follow from (seed, epoch, sample) alone, and noise and displacements
also from the place in the sample. So a sample is the same on every mesh: a crop of the same augmentation of the whole
scan. Labels follow flips, turns and warps, by their nearest voxel. Beyond the scan lies `fill`.

- `Flip`, `Rotate90`: the crop backwards, or turned; bit for bit;
- `Gamma`, `Brightness`, `Noise`: of an image alone, bit for bit;
- `LowResolution`: of an image alone;
- `Affine`, `Elastic`: other voxels are read, those within their reach; an image is interpolated linearly.

A function of (tile, generator) comes last. It gets the image of each sample, as a `Tile`, when the sample is handed
over, and may do with it what tiles can do. The generator has the same numbers on every rank.

>>> flip = jigsaw.io.augment.Flip(p=1, dims=("x",))
>>> how = {"mesh": jigsaw.init_mesh(depth=1), "crop": (4, 4, 4)}
>>> plain = jigsaw.io.open_volumes(["scan.zarr"], ["label.zarr"], **how)[0]
>>> flipped = jigsaw.io.open_volumes(["scan.zarr"], ["label.zarr"], augment=[flip], **how)[0]
>>> torch.equal(flipped.image.local, plain.image.local.flip(3))
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from jigsaw.errors import FieldError, GridError
from jigsaw.io.arguments import is_real_number
from jigsaw.io.series.times import is_whole_number
from jigsaw.io.volumes.crops import RandomDraws
from jigsaw.io.volumes.drawn_steps import (
    AffineStep,
    CoarseStep,
    ElasticStep,
    IntensityStep,
    NoiseStep,
    VoxelStep,
    VoxelTurn,
)
from jigsaw.tile.tile import Tile

NumberRange = tuple[float, float]
OwnAugmentation = Callable[[Tile, torch.Generator], Tile]


@dataclass(frozen=True)
class SampleGrid:
    """The sample that is augmented: its dims, how many voxels it has along each, and how far apart they are."""

    dims: tuple[str, ...]
    sizes: tuple[int, ...]
    spacing: tuple[float, ...]


@dataclass(frozen=True)
class Augmentation:
    """A step that is taken with the probability `p`."""

    p: float = 0.5

    def __post_init__(self) -> None:
        if not _is_number(self.p) or not 0 <= self.p <= 1:
            raise FieldError(f"{type(self).__name__}(p={self.p!r}): a probability lies between 0 and 1")
        self._check()

    def _check(self) -> None:
        """Raise `FieldError` for invalid values."""

    def check_fits(self, grid: SampleGrid) -> None:
        """Raise `GridError` where samples on this grid cannot be augmented this way."""

    def drawn(self, draws: RandomDraws, grid: SampleGrid) -> VoxelStep | None:
        """Draw the step for one sample; None where it changes nothing."""
        return self._step(draws, grid) if draws.chance(self.p) else None

    def _step(self, draws: RandomDraws, grid: SampleGrid) -> VoxelStep:
        raise NotImplementedError(f"{type(self).__name__} draws no step")


@dataclass(frozen=True)
class Flip(Augmentation):
    """Mirror image along each of `dims` (all by default), each with the probability `p`."""

    dims: tuple[str, ...] | None = None

    def check_fits(self, grid: SampleGrid) -> None:
        _check_dims_there(self, self.dims, grid)

    def drawn(self, draws: RandomDraws, grid: SampleGrid) -> VoxelStep | None:
        flipped = tuple(d in (self.dims or grid.dims) and draws.chance(self.p) for d in grid.dims)
        return VoxelTurn(tuple(range(len(grid.dims))), flipped) if any(flipped) else None


@dataclass(frozen=True)
class Rotate90(Augmentation):
    """One, two or three quarter turns in the plane of two dims, as `torch.rot90`; both have as many voxels."""

    plane: tuple[str, str] = ("y", "x")

    def check_fits(self, grid: SampleGrid) -> None:
        if not isinstance(self.plane, Sequence) or len(self.plane) != 2:  # pyright: ignore[reportUnnecessaryIsInstance]
            raise GridError(f"{self}: plane= must be two dims, like ('y', 'x')")
        _check_dims_there(self, self.plane, grid)
        a, b = (grid.dims.index(d) for d in self.plane)
        if a == b or grid.sizes[a] != grid.sizes[b]:
            raise GridError(
                f"{self}: samples have {dict(zip(grid.dims, grid.sizes, strict=True))} voxels, and a quarter turn "
                "needs as many along both dims; give crop= so, or another plane"
            )

    def _step(self, draws: RandomDraws, grid: SampleGrid) -> VoxelStep:
        turns, (a, b) = 1 + draws.below(3), (grid.dims.index(d) for d in self.plane)
        order, flipped = list(range(len(grid.dims))), [False] * len(grid.dims)
        if turns != 2:
            order[a], order[b] = b, a
        flipped[a], flipped[b] = turns in (1, 2), turns in (2, 3)
        return VoxelTurn(tuple(order), tuple(flipped))


@dataclass(frozen=True)
class Gamma(Augmentation):
    """``low + width ((x - low) / width) ** gamma`` with ``width = high - low``; what lies below `low` stays.

    `between` is (low, high), in the units that `normalize` leaves: the range of a sample would have to be asked of all
    ranks.
    """

    gamma: NumberRange = (0.7, 1.5)
    between: NumberRange = (0.0, 1.0)

    def _check(self) -> None:
        _check_ends(self, "gamma", self.gamma, least=1e-6)
        _check_ends(self, "between", self.between)
        if self.between[0] == self.between[1]:
            raise FieldError(f"{self}: between= must be (low, high), and these are the same")

    def _step(self, draws: RandomDraws, grid: SampleGrid) -> VoxelStep:
        low, high = self.between
        return IntensityStep(gamma=draws.between(*self.gamma), low=low, width=high - low)


@dataclass(frozen=True)
class Brightness(Augmentation):
    """x times a number of the range `scale`, plus one of the range `shift`."""

    scale: NumberRange = (0.75, 1.25)
    shift: NumberRange = (0.0, 0.0)

    def _check(self) -> None:
        _check_ends(self, "scale", self.scale)
        _check_ends(self, "shift", self.shift)

    def _step(self, draws: RandomDraws, grid: SampleGrid) -> VoxelStep:
        return IntensityStep(scale=draws.between(*self.scale), shift=draws.between(*self.shift))


@dataclass(frozen=True)
class Noise(Augmentation):
    """Normal noise, whose standard deviation is drawn from the range `std`, in the units of the image."""

    std: NumberRange = (0.0, 0.1)

    def _check(self) -> None:
        _check_ends(self, "std", self.std, least=0)

    def _step(self, draws: RandomDraws, grid: SampleGrid) -> VoxelStep:
        return NoiseStep(draws.word(), draws.between(*self.std))


@dataclass(frozen=True)
class LowResolution(Augmentation):
    """View of a scanner with longer voxels: 1 / `zoom` as long along `dims` (all by default), on the same grid."""

    zoom: NumberRange = (0.5, 1.0)
    dims: tuple[str, ...] | None = None

    def _check(self) -> None:
        _check_ends(self, "zoom", self.zoom, least=0.01, most=1)

    def check_fits(self, grid: SampleGrid) -> None:
        _check_dims_there(self, self.dims, grid)

    def _step(self, draws: RandomDraws, grid: SampleGrid) -> VoxelStep:
        factor = 1 / draws.between(*self.zoom)
        return CoarseStep(tuple(factor if d in (self.dims or grid.dims) else 1.0 for d in grid.dims))


@dataclass(frozen=True)
class Affine(Augmentation):
    """Rotated, zoomed and shifted about the middle of the sample.

    - `degrees`: about each axis, an angle of -degrees to degrees; ``{"z": 15}`` turns within slices alone; in the
      world, so that bodies keep their shape where voxels are longer along one dim;
    - `scale`: the range of the zoom, above 1 larger;
    - `shift`: the most voxels of a shift along each dim.
    """

    degrees: float | Mapping[str, float] = 15.0
    scale: NumberRange = (0.85, 1.15)
    shift: float = 0.0

    def _check(self) -> None:
        _check_ends(self, "scale", self.scale, least=0.01)
        angles = self.degrees.values() if isinstance(self.degrees, Mapping) else (self.degrees,)
        for name, values in (("degrees", angles), ("shift", (self.shift,))):
            if not all(_is_number(v) and v >= 0 for v in values):
                raise FieldError(f"{self}: {name}= is the most, a number >= 0")

    def check_fits(self, grid: SampleGrid) -> None:
        if isinstance(self.degrees, Mapping):
            _check_dims_there(self, tuple(self.degrees), SampleGrid(("z", "y", "x"), (), ()))

    def _step(self, draws: RandomDraws, grid: SampleGrid) -> VoxelStep:
        dims = len(grid.dims)
        turn = np.eye(dims)
        for axis in "zyx":  # a plane can only turn about z
            most = self.degrees.get(axis, 0.0) if isinstance(self.degrees, Mapping) else self.degrees
            angle = math.radians(draws.between(-most, most))
            plane = [d for d in grid.dims if d != axis]
            if len(plane) != 2 or not most:
                continue
            a, b = (grid.dims.index(d) for d in plane)
            rotation = np.eye(dims)
            rotation[a, a] = rotation[b, b] = math.cos(angle)
            rotation[a, b], rotation[b, a] = -math.sin(angle), math.sin(angle)
            turn = turn @ rotation
        steps, zoom = np.array(grid.spacing), draws.between(*self.scale)
        matrix = turn * steps / steps[:, None] / zoom
        shift = tuple(draws.between(-self.shift, self.shift) for _ in grid.dims)
        return AffineStep(tuple(tuple(map(float, row)) for row in matrix), shift)


@dataclass(frozen=True)
class Elastic(Augmentation):
    """Displaced along each dim by a smooth field: at most by a number of voxels of the range `magnitude`.

    The field is a cubic B-spline of random displacements, `every` voxels apart (Rueckert et al., IEEE TMI 18, 1999).
    A sample's `affine` does not have it.
    """

    magnitude: NumberRange = (0.0, 4.0)
    every: int = 16

    def _check(self) -> None:
        _check_ends(self, "magnitude", self.magnitude, least=0)
        if not is_whole_number(self.every) or self.every < 1:
            raise FieldError(f"{self}: every= is a whole number of voxels, 1 or more")

    def _step(self, draws: RandomDraws, grid: SampleGrid) -> VoxelStep:
        return ElasticStep(draws.word(), draws.between(*self.magnitude), int(self.every))


@dataclass(frozen=True)
class AskedAugmentations:
    """The steps of a list, and the functions that come after them."""

    steps: tuple[Augmentation, ...] = ()
    own: tuple[OwnAugmentation, ...] = ()

    @classmethod
    def of(cls, augment: Any) -> AskedAugmentations:
        """Make it from a list. Raises: `FieldError` unless the list has augmentations and then functions."""
        if augment is None:
            return cls()
        expected = "a list of jigsaw.io.augment.Flip(...) and the like, then functions of (tile, generator)"
        if not isinstance(augment, Sequence):
            raise FieldError(f"augment={augment!r} must be {expected}")
        steps = tuple(each for each in augment if isinstance(each, Augmentation))
        own = tuple(augment[len(steps) :])
        are_functions = all(callable(each) and not isinstance(each, type) for each in own)
        if tuple(augment[: len(steps)]) != steps or not are_functions:
            raise FieldError(f"augment={list(augment)!r} must be {expected}")
        return cls(steps, own)

    def drawn(self, seed: int, epoch: int, sample: int, grid: SampleGrid) -> tuple[VoxelStep, ...]:
        """Draw the steps for a sample; each step draws for itself, so that another step does not change the others."""
        each = (step.drawn(RandomDraws(seed, epoch, sample, 1 + at), grid) for at, step in enumerate(self.steps))
        return tuple(step for step in each if step is not None)

    def finished(self, tile: Tile, seed: int, epoch: int, sample: int) -> Tile:
        """Apply the functions to an image. Raises: `FieldError` where one returns another layout or dtype."""
        for at, own in enumerate(self.own):
            generator = torch.Generator()
            generator.manual_seed(RandomDraws(seed, epoch, sample, 1 + len(self.steps) + at).word() >> 1)
            result = own(tile, generator)
            if not isinstance(result, Tile) or result.layout != tile.layout or result.dtype != tile.dtype:
                answer = f"{result.dtype} {result.layout}" if isinstance(result, Tile) else type(result).__name__
                raise FieldError(
                    f"augment=: {own!r} gave {answer} for a tile {tile.dtype} {tile.layout}; return an image of the "
                    "same shape and dtype, cut and held as the given one"
                )
            tile = result
        return tile


def _is_number(value: Any) -> bool:
    return is_real_number(value) and math.isfinite(value)


def _check_ends(step: Augmentation, name: str, ends: Any, least: float = -math.inf, most: float = math.inf) -> None:
    pair = tuple(ends) if isinstance(ends, Sequence) else ()
    if len(pair) != 2 or not all(map(_is_number, pair)) or not least <= pair[0] <= pair[1] <= most:
        limits = [f">= {least:g}"] * (least > -math.inf) + [f"<= {most:g}"] * (most < math.inf)
        raise FieldError(f"{type(step).__name__}({name}={ends!r}) must be (from, to), numbers {', '.join(limits)}")


def _check_dims_there(step: Augmentation, dims: Sequence[str] | None, grid: SampleGrid) -> None:
    if dims is None:
        return
    is_list = isinstance(dims, Sequence) and not isinstance(dims, str)  # pyright: ignore[reportUnnecessaryIsInstance]
    unknown = [d for d in dims if d not in grid.dims] if is_list else [dims]
    if unknown:
        raise GridError(
            f"{step} names {unknown[0]!r}, and the dims of space are {', '.join(grid.dims)}, given as a list"
        )
