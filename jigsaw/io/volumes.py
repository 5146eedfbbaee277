"""`open_volumes`: images and label maps as crops that are cut while they are read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from dataclasses import fields as dataclass_fields
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.io.crops import Draws, origin
from jigsaw.io.dataset import DTYPES, dtype_name
from jigsaw.io.engine import Engine
from jigsaw.io.errors import FieldError, GridError, ReadError
from jigsaw.io.foreground import Foreground, Found, find
from jigsaw.io.frame import DATA, Frame, Width
from jigsaw.io.plan import ReadPlan, plan_read
from jigsaw.io.request import Request
from jigsaw.io.table import Store
from jigsaw.io.volume import Affine, Volume, spacing_of
from jigsaw.layout import Cut, DimSpec, Interval, Layout, Split
from jigsaw.mesh import axes_of, coordinate, init_mesh
from jigsaw.tile import Tile

_LABEL_DTYPES = ("uint8", "int16", "int32", "int64")
_MODES = ("auto", "cooperative", "independent")

Given = Any
"""One image or label map: a path, URL or opened store; a list of them for channels in files of their own."""


@dataclass(frozen=True)
class VolumeSample:
    r"""A crop, or a whole volume: `image` and `label` tiles [C, \*space] of one box (`label` None without labels).

    `origin` is the volume's voxel where it begins (below 0 where the volume is padded), in the order of the dims.
    `affine` takes its voxels (x, y, z, 1) to the world, 4 x 4, as nibabel has it; `spacing` is in the order of the dims.
    """

    image: Tile
    label: Tile | None
    index: int
    volume: int
    origin: tuple[int, ...]
    affine: Affine
    spacing: tuple[float, ...]


@dataclass(frozen=True)
class Crop:
    """Which box of which volume a sample is."""

    volume: int
    origin: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Volumes:
    """Random crops of volumes; made by `jigsaw.io.open_volumes`.

    ``len(ds)`` samples, `crops` of each volume.  ``ds[i]`` reads one (every rank of the mesh must ask for it, in the
    same order), a `jigsaw.io.VolumeLoader` reads batches in the background.  Where a crop lies follows from (`seed`,
    `epoch`, i) alone; `at` gives the dataset of another epoch.
    """

    images: tuple[Volume, ...]
    labels: tuple[Volume, ...]
    mesh: DeviceMesh | None
    device: str | None
    frame: Frame
    crops: int
    foreground: Foreground | None
    found: tuple[Found, ...]
    scale: tuple[float, ...]
    offset: tuple[float, ...]
    dtype: torch.dtype
    label_dtype: torch.dtype
    fill: float
    label_fill: int
    mode: str
    seed: int = 0
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.images) * self.crops

    def __repr__(self) -> str:
        box = " x ".join(f"{d} {n}" for d, n in zip(self.frame.dims, self.frame.sizes, strict=True))
        return f"Volumes({len(self.images)} volumes, {self.crops} crops of {box} each; {self.layout})"

    def __getstate__(self) -> dict[str, Any]:
        return {f.name: None if f.name == "mesh" else getattr(self, f.name) for f in dataclass_fields(self)}

    # -- shapes ------------------------------------------------------------------------------------------------------

    @cached_property
    def layout(self) -> Layout:
        r"""The layout of a sample's image [C, \*space], halo included."""
        return self.frame.layout((self.images[0].channels,), (None,))

    @cached_property
    def label_layout(self) -> Layout:
        r"""The layout of a sample's label [C, \*space]; labels have no halo."""
        return self.frame.layout((self.label_channels,), (None,), halo=False)

    @property
    def label_channels(self) -> int:
        return self.labels[0].channels if self.labels else 0

    def sample_bytes(self) -> int:
        """The most bytes that any rank holds of one sample, image and label."""
        sizes = [
            prod(self.layout.local_shape(c)) * self.dtype.itemsize
            + prod(self.label_layout.local_shape(c)) * self.label_dtype.itemsize
            for c in self.layout.coords()
        ]
        return max(sizes)

    # -- where crops lie ---------------------------------------------------------------------------------------------

    def at(self, seed: int, epoch: int) -> Volumes:
        """The same volumes with the crops of another seed and epoch."""
        return replace(self, seed=seed, epoch=epoch)

    def crop(self, sample: int) -> Crop:
        """Which box of which volume a sample is: O(1), the same on every rank."""
        index = self._index(sample)
        volume = index // self.crops
        draws = Draws(self.seed, self.epoch, index)
        found = self.found[volume] if self.found else None
        return Crop(volume, origin(self.images[volume].shape, self.frame.sizes, draws, self.foreground, found))

    # -- reading -----------------------------------------------------------------------------------------------------

    def plan(self, sample: int = 0) -> tuple[ReadPlan, ...]:
        """The read plans of a crop: of its image, and of its label where there are labels."""
        return self._plans(self.crop(sample), self.frame)

    def _plans(self, crop: Crop, frame: Frame) -> tuple[ReadPlan, ...]:
        image = self.images[crop.volume]
        layout = frame.layout((1, image.channels), (None, None), axes=frame.domain)
        request = Request(
            _window(layout, crop.origin, image.shape),
            image.parts(_first(crop)),
            self.scale,
            self.offset,
            DTYPES[dtype_name(self.dtype)],
        )
        plans = [plan_read(request, image.tables, self.mode)]
        if self.labels:
            label = self.labels[crop.volume]
            bare = frame.layout((1, label.channels), (None, None), halo=False, axes=frame.domain)
            masked = any(table.masks for table in label.tables.values())
            request = Request(
                _window(bare, crop.origin, label.shape),
                label.parts(_first(crop)),
                dtype=dtype_name(self.label_dtype),
                nan=self.label_fill if masked else "keep",
            )
            plans.append(plan_read(request, label.tables, self.mode))
        return tuple(plans)

    def read(self, engine: Engine, crops: Sequence[Crop], frame: Frame | None = None) -> tuple[Tensor, Tensor]:
        r"""This rank's part of crops: images [B, C, \*held] and labels [B, C, \*owned].

        *Sends*: what the plans say.
        """
        frame = frame or self.frame
        here = frame.in_domain(coordinate(self.device_mesh()))
        layouts = (
            frame.layout((len(crops), self.images[0].channels), (None, None), axes=frame.domain),
            frame.layout((len(crops), self.label_channels), (None, None), halo=False, axes=frame.domain),
        )
        names = (DTYPES[dtype_name(self.dtype)], dtype_name(self.label_dtype))
        blocks = [
            engine.memory.empty(layout.local_shape(here), np.dtype(name))
            for layout, name in zip(layouts, names, strict=True)
        ]
        for i, crop in enumerate(crops):
            for block, layout, fill, plan in zip(
                blocks, layouts, (self.fill, self.label_fill), self._plans(crop, frame), strict=False
            ):
                _read_window(engine, plan, block[i : i + 1], layout.held(here)[2:], crop.origin, fill)
        image, label = (torch.from_numpy(block) for block in blocks)
        return image.to(self.dtype), label

    def __getitem__(self, sample: int) -> VolumeSample:
        index = self._index(sample)
        return self._sample(index, self.crop(index), self.frame)

    def whole(self, volume: int) -> VolumeSample:
        """A whole volume, cut like crops are: no rank holds more than its tile, without halo.  For inference."""
        image = self.images[volume]
        sizes = dict(zip(image.dims, image.shape, strict=True))
        spec = dict(zip(self.frame.dims, self.frame.spec, strict=True))
        align = dict(zip(self.frame.dims, self.frame.align, strict=True))
        fitting = {d: n for d, n in align.items() if sizes[d] % n == 0}
        frame = Frame.of(sizes, self.frame.axes, spec, None, None, "balanced", fitting)
        return self._sample(-1, Crop(volume % len(self.images), (0,) * len(sizes)), frame)

    def _sample(self, index: int, crop: Crop, frame: Frame) -> VolumeSample:
        mesh, image = self.device_mesh(), self.images[crop.volume]
        values, labels = self.read(self._engine, [crop], frame)
        affine = image.affine_at(crop.origin)
        layouts = (
            frame.layout((image.channels,), (None,)),
            frame.layout((self.label_channels,), (None,), halo=False),
        )
        return VolumeSample(
            Tile(values[0].to(mesh.device_type), layouts[0], mesh),
            Tile(labels[0].to(mesh.device_type), layouts[1], mesh) if self.labels else None,
            index,
            crop.volume,
            crop.origin,
            affine,
            spacing_of(affine, frame.dims),
        )

    @cached_property
    def _engine(self) -> Engine:
        return self.new_engine()

    def new_engine(self, threads: int | None = None) -> Engine:
        """A reader of plans with process groups of its own; making one is collective over the mesh."""
        return Engine(Store("volumes", {}, {}, _no_array), self.device_mesh(), threads, apart=(DATA,))

    @property
    def is_live(self) -> bool:
        """Whether it belongs to this process: a dataset that was unpickled does not before it first reads."""
        return self.mesh is not None or self.device is None

    def device_mesh(self) -> DeviceMesh:
        """The mesh; of an unpickled dataset it is made now, over all ranks.

        Raises: `ReadError` when the volumes were opened with integers for one.
        """
        if self.device is None:
            raise ReadError(
                "these volumes were opened with a mesh of plain integers, so they can plan, not read; pass a DeviceMesh"
            )
        return self._joined if self.mesh is None else self.mesh

    @cached_property
    def _joined(self) -> DeviceMesh:
        return init_mesh(device=self.device, **dict(self.frame.axes))

    def _index(self, sample: int) -> int:
        if not -len(self) <= sample < len(self):
            raise IndexError(f"sample {sample} of {len(self)} crops")
        return int(sample) % len(self)


# -- windows ---------------------------------------------------------------------------------------------------------


def _first(crop: Crop) -> tuple[int, ...]:
    """The first row of the volume that a crop holds."""
    return tuple(max(n, 0) for n in crop.origin)


def _inside(first: int, rows: int, size: int) -> Interval:
    """The rows of a crop that the volume has."""
    return max(-first, 0), min(size - first, rows)


def _window(layout: Layout, at: Sequence[int], shape: Sequence[int]) -> Layout:
    """The layout of the part of a crop that the volume has: all of it, unless the volume is smaller."""
    cuts = list(layout.cuts)
    for d, (first, size) in enumerate(zip(at, shape, strict=True), start=2):
        cuts[d] = _clipped(cuts[d], *_inside(first, cuts[d].size, size))
    return Layout(tuple(cuts), layout.axes)


def _clipped(cut: Cut, low: int, high: int) -> Cut:
    if (low, high) == (0, cut.size):
        return cut
    points = tuple(min(max(p, low), high) - low for p in cut.points)
    held = tuple((min(max(a, low), high) - low, min(max(b, low), high) - low) for a, b in cut.held)
    return Cut(high - low, points, cut.axes, held)


def _read_window(
    engine: Engine, plan: ReadPlan, out: NDArray[Any], held: Sequence[Interval], at: Sequence[int], fill: float
) -> None:
    """Read a crop into `out` [1, C, \\*held]; rows beyond the volume are `fill`."""
    crop_sizes = [high - low for low, high in held]
    window = plan.request.layout
    lows = [max(-first, 0) for first in at]
    spans = [
        (max(a, low) - a, min(b, low + cut.size) - a)
        for (a, b), low, cut in zip(held, lows, window.cuts[2:], strict=True)
    ]
    inside = tuple(slice(a, max(a, b)) for a, b in spans)
    if [(0, n) for n in crop_sizes] != spans:
        out[...] = fill
    engine.read(plan, out[(slice(None), slice(None), *inside)])


def _no_array(name: str) -> NDArray[Any]:
    raise ReadError(f"volumes have no array {name!r} in common")


# -- opening ---------------------------------------------------------------------------------------------------------


def open_volumes(
    images: Sequence[Given],
    labels: Sequence[Given] | None = None,
    *,
    mesh: DeviceMesh | Mapping[str, int],
    crop: Sequence[int],
    crops: int = 1,
    foreground: Foreground | None = None,
    spec: Mapping[str, DimSpec] | None = None,
    halo: Width | Mapping[str, Width] | None = None,
    split: Split | Mapping[str, Split] = "balanced",
    align: int | Mapping[str, int] = 1,
    normalize: tuple[Any, Any] | None = None,
    fill: float = 0.0,
    label_fill: int = 0,
    dtype: str | torch.dtype = "float32",
    label_dtype: str | torch.dtype = "int64",
    image_array: str | None = None,
    label_array: str | None = None,
    level: int = 0,
    seed: int = 0,
    mode: str = "auto",
) -> Volumes:
    r"""Random crops of volumes, cut over `mesh` while they are read: of each chunk that a crop touches, no more.

    A sample is an image tile [C, \*crop] and, with labels, the label tile [C, \*crop] of the same box; space is
    ``z, y, x`` (or ``y, x``) in whatever order it is stored.  A dim beyond space holds the channels.

    - `images`, `labels`: a path or URL each, or an opened store; a list of them where channels have files of their own;
    - `mesh`: a `DeviceMesh`, or axis sizes as integers, to plan without ranks;
    - `crop`: rows along z, y, x; what a smaller volume lacks is `fill` (`label_fill`), half of it on either side;
    - `crops`: how many of each volume make an epoch;
    - `foreground`: weights crops towards labelled voxels (`jigsaw.io.Foreground`); without it every place is alike;
    - `spec`, `halo`, `split`, `align`: how a crop is cut, as in `jigsaw.io.open`; labels have no halo;
    - `normalize`: (mean, std) of the image, a number each or one a channel, fused into the read;
    - `dtype`, `label_dtype`: of the tiles;
    - `image_array`, `label_array`: which array of a store, where it has several; `level`: of an OME-Zarr image.

    *Sends*: nothing without `foreground`; with it, what was found of each label map.

    Raises: a `ReadError` of `jigsaw.io.errors` naming what was asked and what there is, alike on every rank.
    """
    pictures = _volumes("images", images, image_array, level)
    maps = () if labels is None else _volumes("labels", labels, label_array, level)
    _check_alike(pictures, maps, labels is not None)
    if foreground is not None and not maps:
        raise FieldError("foreground= weights crops by labels, and there are none; give labels=")
    sizes = _sizes(crop, pictures[0].dims)
    if crops < 1:
        raise FieldError(f"crops={crops} must be at least 1, the crops of a volume in an epoch")
    device_mesh, axes = (None, tuple(mesh.items())) if isinstance(mesh, Mapping) else (mesh, axes_of(mesh))
    scale, offset = _multiply_add(normalize, pictures[0].channels)
    made = Volumes(
        images=pictures,
        labels=maps,
        mesh=device_mesh,
        device=device_mesh.device_type if device_mesh else None,
        frame=Frame.of(sizes, axes, spec, halo, None, split, align),
        crops=crops,
        foreground=foreground,
        found=(),
        scale=scale,
        offset=offset,
        dtype=_dtype("dtype", dtype, tuple(DTYPES)),
        label_dtype=_dtype("label_dtype", label_dtype, _LABEL_DTYPES),
        fill=fill,
        label_fill=label_fill,
        mode=_mode(mode),
        seed=seed,
    )
    for index in range(0, len(made), crops):
        made.plan(index)  # what cannot be planned is refused here, not at the first batch
    return replace(made, found=find(maps, foreground, device_mesh)) if foreground else made


def _volumes(name: str, given: Sequence[Given], array: str | None, level: int) -> tuple[Volume, ...]:
    if isinstance(given, str) or not len(given):
        raise FieldError(f"{name}={given!r} must be a list of at least one path")
    return tuple(
        Volume(tuple(each) if isinstance(each, list | tuple) else (each,), array, level) for each in given
    )


def _check_alike(images: Sequence[Volume], labels: Sequence[Volume], labelled: bool) -> None:
    """Raises: `GridError` or `FieldError` naming the two that do not fit together."""
    if labelled and len(images) != len(labels):
        raise FieldError(f"{len(images)} images and {len(labels)} labels: each image needs its label map")
    for kind, volumes in (("channels", images), ("channels", labels), ("dims", [*images, *labels])):
        for other in volumes[1:]:
            mine, theirs = getattr(volumes[0], kind), getattr(other, kind)
            if mine != theirs:
                raise GridError(f"{volumes[0].url} has {kind} {mine} and {other.url} {theirs}: they make no one batch")
    for image, label in zip(images, labels, strict=False):
        if image.shape != label.shape:
            raise GridError(f"image {image.url} has shape {image.shape} and its label map {label.url} {label.shape}")
        if image.is_placed and label.is_placed and _apart(image, label) > 0.5:
            raise GridError(
                f"image {image.url} and its label map {label.url} lie apart by {_apart(image, label):.3g} voxels; "
                "resample one onto the other"
            )


def _apart(image: Volume, label: Volume) -> float:
    """The largest distance between the same corner of both, in voxels of the image."""
    ends = [dict(zip(image.dims, image.shape, strict=True)).get(d, 1) - 1 for d in "xyz"]
    corners = np.array(np.meshgrid(*[(0, n) for n in ends], [1], indexing="ij")).reshape(4, -1)
    there = np.linalg.solve(image.affine, label.affine @ corners)
    return float(np.abs(there - corners).max())


def _sizes(crop: Sequence[int], dims: Sequence[str]) -> dict[str, int]:
    if len(crop) != len(dims) or any(n < 1 for n in crop):
        raise GridError(f"crop={tuple(crop)} must be {len(dims)} sizes >= 1, of the dims {', '.join(dims)}")
    return {d: int(n) for d, n in zip(dims, crop, strict=True)}


def _multiply_add(normalize: tuple[Any, Any] | None, channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if normalize is None:
        return (1.0,) * channels, (0.0,) * channels
    try:
        mean, std = (np.broadcast_to(np.asarray(v, np.float64), (channels,)) for v in normalize)
    except ValueError as e:
        raise FieldError(f"normalize={normalize!r} must be (mean, std), a number each or one for {channels} channels") from e
    if not (np.isfinite(mean).all() and np.isfinite(std).all() and (std > 0).all()):
        raise FieldError(f"normalize={normalize!r}: means must be finite and standard deviations above 0")
    return tuple((1 / std).tolist()), tuple((-mean / std).tolist())


def _dtype(argument: str, given: str | torch.dtype, known: Sequence[str]) -> torch.dtype:
    name = dtype_name(given) if isinstance(given, torch.dtype) else given
    if name not in known:
        raise FieldError(f"{argument}={given!r} must be one of {sorted(known)}")
    return getattr(torch, name)


def _mode(mode: str) -> str:
    if mode not in _MODES:
        raise FieldError(f"mode={mode!r} must be one of {_MODES}")
    return mode
