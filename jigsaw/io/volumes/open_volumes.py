"""`open_volumes`: the user's arguments for images and label maps, checked, as `Volumes`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import FieldError, GridError
from jigsaw.geometry.cut import Box, SplitRule
from jigsaw.geometry.layout import DimSpec
from jigsaw.io.arguments import checked_choice
from jigsaw.io.datasets.epochs import check_whole_number
from jigsaw.io.datasets.samples import FLOAT_DTYPES, checked_dtype, mesh_and_axes, warn_of_idle_readers
from jigsaw.io.series.boundary import BoundaryRule
from jigsaw.io.series.request import MISSING_RULES, HaloWidth, SampleSpace
from jigsaw.io.series.statistics import Statistics
from jigsaw.io.series.times import is_whole_number
from jigsaw.io.volumes.augment import AskedAugmentations, Augmentation, OwnAugmentation
from jigsaw.io.volumes.crops import Foreground, find_foreground
from jigsaw.io.volumes.foreground_box import ForegroundBox, find_boxes
from jigsaw.io.volumes.respacing import GridRespacing, checked_spacing, intensities_of_volumes
from jigsaw.io.volumes.volume import (
    AffineMatrix,
    AxisTurn,
    RenamedLabels,
    StoredVolume,
    checked_orientation,
    differing_orientations,
    orientation_codes,
)
from jigsaw.io.volumes.volume_arrays import checked_dims
from jigsaw.io.volumes.volume_dataset import Volumes, whole_volume_sizes
from jigsaw.io.volumes.volume_listing import check_same_listing, listing_of_volumes
from jigsaw.tile.misuse import warn_once

_LABEL_DTYPES = ("uint8", "int16", "int32", "int64", *FLOAT_DTYPES)
_VOLUME_MODES = ("auto", "cooperative", "independent")

GivenVolume = Any
"""One image or label map: a path, URL, opened store or array; a list of them for channels in files of their own.

None in the list of an image is a channel that it lacks.
"""


def open_volumes(
    images: Sequence[GivenVolume],
    labels: Sequence[GivenVolume | None] | None = None,
    *,
    mesh: DeviceMesh | Mapping[str, int],
    crop: Sequence[int] | None,
    crops: int = 1,
    weights: Sequence[float] | None = None,
    orientation: str | None = None,
    box: ForegroundBox | None = None,
    spacing: float | Sequence[float] | None = None,
    foreground: Foreground | None = None,
    spec: Mapping[str, DimSpec] | None = None,
    halo: HaloWidth | Mapping[str, HaloWidth] | None = None,
    boundary: Mapping[str, BoundaryRule] | None = None,
    split: SplitRule | Mapping[str, SplitRule] = "balanced",
    align: int | Mapping[str, int] = 1,
    window: tuple[Any, Any] | Statistics | Sequence[Statistics] | None = None,
    normalize: tuple[Any, Any] | Statistics | Sequence[Statistics] | str | None = None,
    fill: float = 0.0,
    label_fill: float = 0,
    absent_fill: float | None = None,
    missing: str = "error",
    label_map: Mapping[int, int] | None = None,
    augment: Sequence[Augmentation | OwnAugmentation] | None = None,
    dtype: str | torch.dtype = "float32",
    label_dtype: str | torch.dtype = "int64",
    image_array: str | None = None,
    label_array: str | None = None,
    dims: Sequence[str] | None = None,
    axes: str = "zyx",
    level: int = 0,
    seed: int = 0,
    mode: str = "auto",
) -> Volumes:
    r"""Open random crops of volumes, cut over `mesh` while they are read: no more of each chunk than a crop touches.

    A sample is an image tile [C, \*crop] and, with labels, the label tile [C, \*crop] of the same box; space is ``z, y,
    x`` (or ``y, x``) in whatever order it is stored. A dim beyond space holds the channels.

    - `images`, `labels`: for each a path or URL, an opened store, or an array or tensor [z, y, x], [C, z, y, x] or [y,
      x]. One in memory every rank then has; of one that reads what its index asks for, as those of zarr, h5py, dask and
      nibabel, a rank reads what it needs. A list of them where channels have files of their own. None among `labels`
      stands for an image that has no label map, whose labels are `label_fill` everywhere;
    - `absent_fill`: the value of a channel that an image lacks, such as ``["t1.nii.gz", None]``, in all of its voxels,
      after `normalize` and `augment`. Samples say by `present` which channels there are. Without it, None is refused;
    - `mesh`: a `DeviceMesh`, or axis sizes as integers, to plan without ranks;
    - `crop`: rows along z, y, x. What a smaller volume lacks is `fill` (`label_fill`), half of it on either side. None
      takes whole volumes, each filled up to a multiple of `align`, and in a batch to the largest in it;
    - `crops`: how many of each volume make an epoch;
    - `weights`: a number >= 0 for each volume. Each sample is then of a volume that is drawn by them, with replacement,
      as torch's ``WeightedRandomSampler`` draws. An epoch has as many samples as without;
    - `orientation`: the end of the world toward which x, y and z run, like ``"RAS"``. Axes are permuted and flipped
      while they are read, each volume by its own affine (a label map without one like its image). The result is that of
      MONAI's ``Orientation`` and, for RAS, of nibabel's ``as_closest_canonical``; by default axes stay as stored;
    - `box`: a `jigsaw.io.ForegroundBox`: of each image and its label map, only the box around its voxels above a
      threshold is read, as if the files had no more. Affines say where it lies, and ``volumes.images[i].box`` which
      rows it has, after `orientation` and before `spacing`;
    - `spacing`: the distance of voxels along z, y, x, or one for all, in the unit of the files (mm in most). Each rank
      reads the stored rows that its own lie between, after `orientation`. It interpolates images linearly and labels to
      the nearest, on the grid of MONAI's ``Spacing``; `crop` counts voxels of that grid;
    - `foreground`: weights crops toward labeled voxels (`jigsaw.io.Foreground`) of the stored label maps; without it
      every place is equally likely;
    - `spec`, `halo`, `split`, `align`: how a crop is cut, as in `jigsaw.io.open`; labels do not have a halo;
    - `boundary`: the content of the halo beyond the ends of a crop, by dim. With ``"reflect"``, ``"replicate"`` or
      ``("fill", number)`` it has the volume's own rows, and beyond the volume what the rule says (see
      `jigsaw.io.series.boundary`). It is `fill` where the volume is smaller than the crop. By default, ``"clip"``, the
      halo ends with the crop;
    - `window`: (low, high) of the stored values, for each a number or one for each channel. Values outside become low
      or high, after `spacing` and before `augment`. Without `normalize`, low then becomes 0 and high 1, as in MONAI's
      ``ScaleIntensityRange(clip=True)``. For statistics (as for `normalize`) it is the lowest and the highest
      percentile;
    - `normalize`: (mean, std) of the image, for each a number or one for each channel, fused into the read. It may also
      be the result of `jigsaw.io.volume_statistics`, the path of a file of it, or a list with those of each volume;
    - `missing`: the rule for chunks that a store lacks, ``"error"`` or ``"fill"``, as in `jigsaw.io.open`; label maps
      in Zarr often leave out chunks of background;
    - `label_map`: a mapping from stored labels to new ones, like ``{2: 1, 3: 1}``, applied before `foreground` looks
      for classes; the others stay;
    - `augment`: changes made to each sample as it is read, drawn from (seed, epoch, sample), alike on every mesh: a
      list of steps (see `jigsaw.io.augment`), then functions of (tile, generator); not applied to ``whole(i)``;
    - `dtype`, `label_dtype`: of the tiles; labels are rounded to the nearest integer, and missing ones are
      `label_fill`. With a float `label_dtype` they are real numbers, such as soft labels or distances: read as they
      are stored, and interpolated as images are;
    - `image_array`, `label_array`: the array of a store that has several; `level`: that of an OME-Zarr image;
    - `dims`: the names of the stored dims: ``channel``, ``z``, ``y`` and ``x`` in their order. Needed where files
      (plain HDF5) do not name them, or an array has another order; a label map may lack the channels;
    - `axes`: the order of space in samples, ``"zyx"``, or ``"xyz"`` as MONAI's readers have it, for weights that come
      from MONAI or go there: views of the same tiles. Arguments stay along z, y, x;
    - `seed`: of the crops that ``volumes[i]`` gives; a `VolumeLoader` has its own;
    - `mode`: ``"cooperative"``, ``"independent"`` or ``"auto"``, as in `jigsaw.io.open`.

    *Sends*: nothing without `foreground` and `box`; with them, a digest of the list, the voxels found in each label
    map, and two numbers for each image and dim.

    Raises: a `ReadError` of `jigsaw.errors`, or `ShardingError` for impossible cuts, naming the request and what
    exists, alike on every rank. Reading raises `FieldError` for a label that `label_dtype` cannot hold.

    >>> mesh = jigsaw.init_mesh(depth=1)
    >>> volumes = jigsaw.io.open_volumes(["scan.zarr"], ["label.zarr"], mesh=mesh, crop=(16, 16, 16), crops=4)
    >>> sample = volumes[0]
    >>> len(volumes), sample.image.shape, sample.label.dtype
    (4, torch.Size([1, 16, 16, 16]), torch.int64)
    """
    checked_choice("missing", missing, MISSING_RULES)
    picture = StoredVolume((), image_array, level, given_dims=checked_dims(dims), missing=missing)
    pictures, maps = _given_pairs(images, labels, picture, replace(picture, array=label_array))
    image_fill = _checked_number("fill", fill)
    stand_in = None if absent_fill is None else _checked_number("absent_fill", absent_fill)
    _check_absent_channels(pictures, maps, stand_in)
    shares = _checked_weights(weights, len(pictures))
    pictures, maps = _turn_volumes(pictures, maps, checked_orientation(orientation))
    _check_volumes_match(pictures, maps)
    _warn_of_orientations(pictures)
    device_mesh, device, mesh_axes = mesh_and_axes(mesh)
    distances = checked_spacing(spacing, pictures[0].dims)
    _check_crops(crop, crops, foreground, bool(maps))
    if device_mesh is not None and spec is None:
        warn_of_idle_readers(mesh_axes, pictures[0].dims)
    check_whole_number("seed", seed, 0)
    label_type = checked_dtype("label_dtype", label_dtype, _LABEL_DTYPES)
    _check_classes(label_dtype, label_type.is_floating_point, foreground, label_map)
    filled = _label_fill(label_fill, label_type)
    renamed = RenamedLabels.of(label_map, label_type, filled)
    intensities = intensities_of_volumes(normalize, window, [image.present for image in pictures])
    values = intensities, image_fill, filled, stand_in, renamed, shares, orientation, distances
    listing = listing_of_volumes(pictures, maps, values)
    if box is not None or foreground is not None:  # whose voxels the ranks look for together
        check_same_listing(device_mesh, listing)
    if box is not None:
        pictures, maps = _boxed_volumes(pictures, maps, find_boxes(pictures, box, device_mesh))
    pictures, maps = _respace_volumes(pictures, maps, distances)
    opened = Volumes(
        images=pictures,
        labels=maps,
        mesh=device_mesh,
        device=device,
        frame=_volume_space(pictures, crop, mesh_axes, spec, halo, boundary, split, align),
        crops=crops,
        foreground=foreground,
        found=(),
        intensities=intensities,
        dtype=checked_dtype("dtype", dtype),
        label_dtype=label_type,
        fill=image_fill,
        label_fill=filled,
        renamed=renamed,
        mode=checked_choice("mode", mode, _VOLUME_MODES),
        is_whole=crop is None,
        x_first=checked_choice("axes", axes, ("zyx", "xyz")) == "xyz",
        augment=AskedAugmentations.of(augment),
        absent_fill=stand_in or 0.0,  # no image lacks a channel where it is None
        listing=listing,
        seed=seed,
    )
    for step in opened.augment.steps:
        for volume in range(len(opened.images)):
            step.check_fits(opened.sample_grid(volume))
    _check_nothing_beyond(opened)
    for index in range(0, len(opened), crops):  # refuse here what cannot be planned, not at the first batch
        opened.plans_of(opened.crop(index), opened.frame_of([index]))
    voxels = find_foreground(maps, foreground, device_mesh, renamed) if foreground else ()
    return replace(opened, found=voxels, weights=shares)


def _check_nothing_beyond(opened: Volumes) -> None:
    """Raise `GridError` where rows beyond a crop are asked for but cannot be had."""
    for dim, rule in zip(opened.frame.dims, opened.frame.boundary, strict=True):
        if rule.rule == "fill" and not all(each.holds(rule.value) for each in opened.intensities):
            low, high = opened.intensities[0].low[0], opened.intensities[0].high[0]
            raise GridError(
                f"boundary={{{dim!r}: ...}} fills with {rule.value:g}, which window= would clip to {low:g}..{high:g}; "
                "fill with a number of this range"
            )
    if not any(rule.is_beyond for rule in opened.frame.boundary):
        return
    moved = [f"augment=: {step}" for step in opened.augment.steps]
    moved += ["spacing="] * any(image.respacing for image in opened.images)
    if moved:
        raise GridError(
            f"{moved[0]} with boundary=, whose rows beyond a crop are those of the scan as it is stored; "
            "leave boundary= out and give a larger crop"
        )


def _volume_space(images: Sequence[StoredVolume], crop: Sequence[int] | None, *cuts: Any) -> SampleSpace:
    """Return how crops are cut; for whole volumes that of the largest, once each of them can be cut."""
    dims = images[0].dims
    if crop is not None:
        is_list = isinstance(crop, Sequence) and len(crop) == len(dims)
        if not is_list or not all(is_whole_number(n) and n >= 1 for n in crop):
            raise GridError(f"crop={crop!r} must be {len(dims)} whole numbers >= 1, of the dims {', '.join(dims)}")
        return _crop_space({d: int(n) for d, n in zip(dims, crop, strict=True)}, *cuts)
    spaces = {shape: _crop_space(dict(zip(dims, shape, strict=True)), *cuts) for shape in {i.shape for i in images}}
    rows = [whole_volume_sizes(shape, space.align) for shape, space in spaces.items()]
    return _crop_space(dict(zip(dims, map(max, zip(*rows, strict=True)), strict=True)), *cuts)


def _crop_space(sizes: Mapping[str, int], *cuts: Any) -> SampleSpace:
    """Return the space of crops. Raises: `GridError` for a boundary that joins ends, which crops lack; `HaloError`."""
    frame = SampleSpace.of(sizes, *cuts).on({})
    for dim, wraps in zip(frame.dims, frame.periodic, strict=True):
        if wraps:
            others = "'reflect', 'replicate' or ('fill', number)"
            raise GridError(f"boundary={{{dim!r}: 'periodic'}}: a crop's ends do not meet; use {others}")
    return frame


def _check_crops(crop: Sequence[int] | None, crops: int, foreground: Foreground | None, has_labels: bool) -> None:
    if foreground is not None and not isinstance(foreground, Foreground):
        raise FieldError(f"foreground={foreground!r} must be a jigsaw.io.Foreground, like jigsaw.io.Foreground(neg=1)")
    if foreground is not None and not has_labels:
        raise FieldError("foreground= weights crops by labels, and there are none; give labels=")
    if not is_whole_number(crops) or crops < 1:
        raise FieldError(f"crops={crops} must be at least 1, the crops of a volume in an epoch")
    if crop is None and (crops != 1 or foreground is not None):
        raise FieldError(
            f"crop=None: each sample is a whole volume, and crops={crops}, foreground={foreground} choose among crops; "
            "give a crop, or leave them out"
        )


def _given_pairs(
    images: Sequence[GivenVolume],
    labels: Sequence[GivenVolume | None] | None,
    picture: StoredVolume,
    form: StoredVolume,
) -> tuple[tuple[StoredVolume, ...], tuple[StoredVolume | None, ...]]:
    pictures = _given_volumes("images", images, picture)
    maps = () if labels is None else _given_labels(labels, form)
    if labels is not None and len(pictures) != len(maps):
        raise FieldError(
            f"{len(pictures)} images and {len(maps)} labels: each image needs its label map, or None in its place"
        )
    return pictures, maps


def _given_volumes(name: str, volumes: Sequence[GivenVolume], form: StoredVolume) -> tuple[StoredVolume, ...]:
    if isinstance(volumes, str | os.PathLike) or not isinstance(volumes, Sized) or not len(volumes):
        raise FieldError(
            f"{name}={volumes!r} must be a list of at least one path, like {name}=sorted(glob('*.nii.gz'))"
        )
    stores = (tuple(each) if isinstance(each, list | tuple) else (each,) for each in volumes)
    return tuple(replace(form, given=each) for each in stores)


def _given_labels(labels: Sequence[GivenVolume | None], form: StoredVolume) -> tuple[StoredVolume | None, ...]:
    if isinstance(labels, str | os.PathLike) or not isinstance(labels, Iterable) or all(m is not None for m in labels):
        return _given_volumes("labels", labels, form)
    present = [each for each in labels if each is not None]
    if not present:
        raise FieldError(f"labels={labels!r} names no label map; give labels=None where no image has one")
    opened = iter(_given_volumes("labels", present, form))
    return tuple(None if each is None else next(opened) for each in labels)


def _turn_volumes(
    images: Sequence[StoredVolume], labels: Sequence[StoredVolume | None], codes: str | None
) -> tuple[tuple[StoredVolume, ...], tuple[StoredVolume | None, ...]]:
    """Turn images and label maps so that axes run as `codes` say. Raises: `GridError` without an affine."""
    if codes is None:
        return tuple(images), tuple(labels)
    for image in images:
        _check_has_affine(image, f"orientation={codes!r}", "orientation=")
    turns = [AxisTurn.of(image.affine, codes) for image in images]
    maps = [
        label and label.turned(AxisTurn.of(label.affine, codes) if label.affines else turn)
        for label, turn in zip(labels, turns, strict=False)
    ]
    return tuple(image.turned(turn) for image, turn in zip(images, turns, strict=True)), tuple(maps)


def _boxed_volumes(
    images: Sequence[StoredVolume], labels: Sequence[StoredVolume | None], boxes: Sequence[Box]
) -> tuple[tuple[StoredVolume, ...], tuple[StoredVolume | None, ...]]:
    return (
        tuple(image.boxed(rows) for image, rows in zip(images, boxes, strict=True)),
        tuple(label and label.boxed(rows) for label, rows in zip(labels, boxes, strict=False)),
    )


def _respace_volumes(
    images: Sequence[StoredVolume], labels: Sequence[StoredVolume | None], spacing: tuple[float, ...] | None
) -> tuple[tuple[StoredVolume, ...], tuple[StoredVolume | None, ...]]:
    if spacing is None:
        return tuple(images), tuple(labels)
    for image in images:
        _check_has_affine(image, f"spacing={spacing}", "spacing=")
    grids = [GridRespacing.of(i.url, i.affine, i.dims, i.stored_shape, spacing) for i in images]
    return (
        tuple(image.respaced(grid) for image, grid in zip(images, grids, strict=True)),
        tuple(label and label.respaced(grid) for label, grid in zip(labels, grids, strict=False)),
    )


def _check_has_affine(image: StoredVolume, asked: str, argument: str) -> None:
    if not image.affines:
        raise GridError(
            f"{asked}: {image.url} has no affine, so nobody knows how it lies; write one into its "
            f"attribute 'affine' (4 x 4, from x, y, z to the world), or leave {argument} out"
        )


def _warn_of_orientations(images: Sequence[StoredVolume]) -> None:
    named = [(image.url, orientation_codes(image.affine)[: len(image.dims)]) for image in images if image.affines]
    if differ := differing_orientations(named):
        warn_once(
            f"orientations {differ}",
            f"{differ}: one batch would show bodies turned to different sides; give orientation='RAS' to "
            "open_volumes, which turns each as it is read",
        )


def _check_volumes_match(images: Sequence[StoredVolume], labels: Sequence[StoredVolume | None]) -> None:
    maps = [label for label in labels if label is not None]
    for kind, volumes in (("channels", images), ("channels", maps), ("dims", [*images, *maps])):
        for other in volumes[1:]:
            own, theirs = getattr(volumes[0], kind), getattr(other, kind)
            if own != theirs:
                raise GridError(
                    f"{volumes[0].url} has {kind} {own} and {other.url} {theirs}: one batch cannot hold both"
                )
    for each in images:
        _check_affines_match(each, "the channels of one image", each.affines)
    for image, label in zip(images, labels, strict=False):
        if label is None:
            continue
        if image.shape != label.shape:
            raise GridError(f"image {image.url} has shape {image.shape} and its label map {label.url} {label.shape}")
        _check_affines_match(image, "an image and its label map", (*image.affines[:1], *label.affines_in(image.unit)))


def _check_affines_match(image: StoredVolume, what: str, affines: Sequence[tuple[str, AffineMatrix]]) -> None:
    """Raise `GridError` where a corner of one lies more than half a voxel of the first from that of the first."""
    ends = [dict(zip(image.dims, image.shape, strict=True)).get(d, 1) - 1 for d in "xyz"]
    corners = np.array(np.meshgrid(*[(0, n) for n in ends], [1], indexing="ij")).reshape(4, -1)
    for url, affine in affines[1:]:
        first, own = affines[0]
        apart = float(np.abs(np.linalg.solve(own, affine @ corners) - corners).max())
        if apart > 0.5:
            raise GridError(
                f"{first} and {url} lie apart by {apart:.3g} voxels, and they are {what}; resample one onto the other"
            )


def _check_classes(dtype: Any, is_real: bool, foreground: Foreground | None, label_map: Any) -> None:
    if is_real and (foreground is not None or label_map is not None):
        raise FieldError(
            f"label_dtype={dtype!r} reads real numbers, and foreground= and label_map= are rules for classes; leave "
            "them out, or give an integer label_dtype"
        )


def _check_absent_channels(
    images: Sequence[StoredVolume], labels: Sequence[StoredVolume | None], fill: float | None
) -> None:
    """Raise `FieldError` for a channel that is absent where nothing says its value, or where nothing else is there."""
    for number, label in enumerate(labels):
        if label and any(each is None for each in label.given):
            raise FieldError(
                f"labels[{number}] lacks a channel (None); give its map, or None in place of the whole list"
            )
    for number, image in enumerate(images):
        if all(each is None for each in image.given):
            raise FieldError(f"images[{number}] names no file, so it has no shape; leave this image out")
        if fill is None and any(each is None for each in image.given):
            raise FieldError(
                f"images[{number}] lacks channel {image.absent[0]} (None); leave the image out, or give absent_fill=, "
                "the value that stands for it in samples, which then say by `present` that it is absent"
            )


def _checked_weights(weights: Sequence[float] | None, volumes: int) -> tuple[float, ...]:
    if weights is None:
        return ()
    try:
        shares = np.asarray(weights, np.float64)
    except (TypeError, ValueError):
        shares = np.zeros(0)
    if shares.shape != (volumes,) or not np.isfinite(shares.sum()) or (shares < 0).any() or not shares.any():
        raise FieldError(
            f"weights={weights!r} must be {volumes} numbers >= 0 that are not all 0, one for each image: how likely a "
            "sample is of it"
        )
    return tuple(shares.tolist())


def _checked_number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as e:
        raise FieldError(f"{name}={value!r} must be a number, what stands where an image has no voxel") from e


def _label_fill(fill: Any, dtype: torch.dtype) -> float:
    if dtype.is_floating_point:
        return _checked_number("label_fill", fill)
    held = torch.iinfo(dtype)
    try:
        number = int(fill)
    except (TypeError, ValueError, OverflowError):  # not a number, NaN or infinite
        number = None
    if number is None or number != fill or not held.min <= number <= held.max:
        raise FieldError(f"label_fill={fill!r} must be an integer that {dtype} holds, from {held.min} to {held.max}")
    return number
