"""`open_volumes`: the user's arguments for images and label maps, checked, as `Volumes`.

`find_scans` finds the images and label maps of a folder as nnU-Net and BIDS lay it out.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import FieldError, GridError
from jigsaw.geometry.cut import SplitRule
from jigsaw.geometry.layout import DimSpec
from jigsaw.io.arguments import checked_choice
from jigsaw.io.datasets.samples import checked_dtype, mesh_and_axes, warn_of_idle_readers
from jigsaw.io.series.boundary import BoundaryRule
from jigsaw.io.series.request import MISSING_RULES, HaloWidth, SampleSpace
from jigsaw.io.series.statistics import Statistics
from jigsaw.io.series.times import is_whole_number
from jigsaw.io.volumes.augment import AskedAugmentations, Augmentation, OwnAugmentation
from jigsaw.io.volumes.crops import Foreground, find_foreground
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
from jigsaw.tile.misuse import warn_once

_SCAN_ENDINGS = (".nii.gz", ".nii")
_BIDS_LABEL_SUFFIX = "dseg"


class FoundScans(NamedTuple):
    """Paths of the channels of each scan, and its label map or None; `labels` is None where no scan has one.

    >>> found = jigsaw.io.FoundScans([["a_0000.nii.gz", "a_0001.nii.gz"]], None)
    >>> len(found.images[0])
    2
    """

    images: list[list[str]]
    labels: list[str | None] | None


def find_scans(folder: str | os.PathLike[str], channels: Sequence[str] | None = None, part: str = "Tr") -> FoundScans:
    """Find the scans of a folder, by rising name: ``open_volumes(*find_scans("Dataset004_Hippocampus"), ...)``.

    - nnU-Net's and the Decathlon's: ``imagesTr/CASE_0000.nii.gz`` (a number a channel, or a file with all of them) and
      ``labelsTr/CASE.nii.gz``; `part` is ``"Tr"``, ``"Ts"`` or ``"Va"``; `channels` are names of ``dataset.json``;
    - BIDS: ``sub-01/[ses-1/]anat/sub-01_[...]T1w.nii.gz``, with label maps ``*_dseg.nii.gz`` of the same subject and
      session there or under ``derivatives``; `channels` are suffixes, like ``["T1w", "FLAIR"]``.

    Only names and ``dataset.json`` are read.

    Raises: `FieldError` for a folder of neither kind, and for channels that it lacks. Also for a scan that lacks a
    channel or has several files or label maps of one kind.

    >>> import pathlib
    >>> for name in ("imagesTr/a_0000.nii.gz", "imagesTr/a_0001.nii.gz", "labelsTr/a.nii.gz"):
    ...     pathlib.Path("Dataset001", name).parent.mkdir(parents=True, exist_ok=True)
    ...     pathlib.Path("Dataset001", name).touch()
    >>> images, labels = jigsaw.io.find_scans("Dataset001")
    >>> [len(paths) for paths in images], labels
    ([2], ['Dataset001/labelsTr/a.nii.gz'])
    """
    root = Path(folder)
    if isinstance(channels, str):
        raise FieldError(f"channels={channels!r} must be a list of names, like [{channels!r}]")
    if (root / f"images{part}").is_dir():
        return _nnunet_scans(root, part, channels)
    if any(root.glob("sub-*/")):
        return _bids_scans(root, channels)
    names = ", ".join(sorted(p.name for p in root.iterdir())[:8]) if root.is_dir() else "no such folder"
    raise FieldError(
        f"{root} is laid out neither as nnU-Net (images{part}/) nor as BIDS (sub-*/): {names}; give open_volumes "
        "lists of paths instead"
    )


def _scans_in(folder: Path) -> dict[str, Path]:
    scans = {p.name[: -len(end)]: p for end in _SCAN_ENDINGS for p in folder.glob(f"*{end}")}
    return dict(sorted(scans.items()))


def _told(scans: list[list[str]], labels: list[str | None], where: str) -> FoundScans:
    if not scans:
        raise FieldError(f"{where} has no .nii or .nii.gz file that is a scan")
    return FoundScans(scans, labels if any(labels) else None)


def _nnunet_scans(root: Path, part: str, channels: Sequence[str] | None) -> FoundScans:
    files, maps = _scans_in(root / f"images{part}"), _scans_in(root / f"labels{part}")
    names = _channels_of_dataset(root)
    groups: dict[str, dict[str, Path]] = {}
    for name, path in files.items():
        case, _, number = name.rpartition("_")
        is_channel = bool(re.fullmatch(r"\d{4}", number))
        groups.setdefault(case if is_channel else name, {})[number if is_channel else "0000"] = path
    cases: dict[str, dict[str, Path]] = {}
    for case, paths in groups.items():
        # The Decathlon's names are like `la_0007`, and each is a scan: it has its own label map, or the numbers are not
        # those of channels.
        known = set(names) or {f"{k:04d}" for k in range(len(paths))}
        if set(paths) <= known and not any(f"{case}_{number}" in maps for number in paths):
            cases[case] = paths
        else:
            cases |= {f"{case}_{number}": {"0000": path} for number, path in paths.items()}
    wanted = _channel_numbers(root, names, channels, sorted({n for paths in cases.values() for n in paths}))
    scans = [[str(_channel_of(case, paths, n)) for n in wanted] for case, paths in cases.items()]
    labels = [str(maps[case]) if case in maps else None for case in cases]
    return _told(scans, labels, f"{root / f'images{part}'}")


def _channels_of_dataset(root: Path) -> dict[str, str]:
    """Return the names of channels by number, as ``dataset.json`` has them, if that exists."""
    about = root / "dataset.json"
    try:
        facts: Any = json.loads(about.read_text()) if about.is_file() else {}
        named: Any = facts.get("channel_names", facts.get("modality", {}))
        return {f"{int(number):04d}": str(name) for number, name in named.items()}
    except (AttributeError, ValueError) as e:  # the file is not JSON, not a mapping, or has no numbers
        raise FieldError(
            f"{about} does not say which channels there are, as nnU-Net's and the Decathlon's do: {e}"
        ) from e


def _channel_numbers(
    root: Path, names: Mapping[str, str], channels: Sequence[str] | None, present: list[str]
) -> list[str]:
    if channels is None:
        return present
    numbers = {name: number for number, name in names.items() if number in present}
    unknown = [name for name in channels if name not in numbers]
    if unknown:
        about, known = root / "dataset.json", ", ".join(numbers) or "none"
        raise FieldError(f"channels={list(channels)}: {about} names {known}, not {unknown[0]!r}")
    return [numbers[name] for name in channels]


def _channel_of(case: str, paths: Mapping[str, Path], channel: str) -> Path:
    if channel not in paths:
        raise FieldError(
            f"scan {case} has no channel {channel}; it has {', '.join(sorted(paths))}: name those that all have by "
            "channels=, or leave the scan out"
        )
    return paths[channel]


def _bids_scans(root: Path, channels: Sequence[str] | None) -> FoundScans:
    images: dict[str, dict[str, Path]] = {}
    labels: dict[str, Path] = {}
    derived = [*root.glob("derivatives/sub-*/"), *root.glob("derivatives/*/sub-*/")]
    for subject in (*root.glob("sub-*/"), *derived):
        for path in sorted(p for end in _SCAN_ENDINGS for p in subject.rglob(f"*{end}")):
            stem, _, suffix = path.name.split(".", 1)[0].rpartition("_")
            scan = "_".join(word for word in stem.split("_") if word.startswith(("sub-", "ses-")))
            if suffix == _BIDS_LABEL_SUFFIX:
                _keep_only(labels, scan, path, "label maps")
            elif subject not in derived:
                _keep_only(images.setdefault(scan, {}), suffix, path, f"{suffix} files")
    kinds = sorted({suffix for suffixes in images.values() for suffix in suffixes})
    if channels is None and len(kinds) > 1:
        raise FieldError(f"{root} has {', '.join(kinds)}; say which are the channels, like channels=[{kinds[0]!r}]")
    wanted = kinds if channels is None else list(channels)
    if unknown := [name for name in wanted if name not in kinds]:
        raise FieldError(f"channels={wanted}: {root} has {', '.join(kinds) or 'no scans'}, not {unknown[0]!r}")
    cases = sorted(scan for scan, suffixes in images.items() if any(name in suffixes for name in wanted))
    scans = [[str(_channel_of(scan, images[scan], name)) for name in wanted] for scan in cases]
    return _told(scans, [str(labels[s]) if s in labels else None for s in cases], str(root))


def _keep_only(files: dict[str, Path], name: str, path: Path, what: str) -> None:
    if name in files:
        raise FieldError(
            f"{files[name]} and {path} are both {what} of one scan; give open_volumes lists of paths instead"
        )
    files[name] = path


_LABEL_DTYPES = ("uint8", "int16", "int32", "int64")
_VOLUME_MODES = ("auto", "cooperative", "independent")

GivenVolume = Any
"""One image or label map: a path, URL, opened store or array; a list of them for channels in files of their own."""


def open_volumes(
    images: Sequence[GivenVolume],
    labels: Sequence[GivenVolume | None] | None = None,
    *,
    mesh: DeviceMesh | Mapping[str, int],
    crop: Sequence[int] | None,
    crops: int = 1,
    orientation: str | None = None,
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
    label_fill: int = 0,
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
    - `mesh`: a `DeviceMesh`, or axis sizes as integers, to plan without ranks;
    - `crop`: rows along z, y, x. What a smaller volume lacks is `fill` (`label_fill`), half of it on either side. None
      takes whole volumes, each filled up to a multiple of `align`, and in a batch to the largest in it;
    - `crops`: how many of each volume make an epoch;
    - `orientation`: the end of the world toward which x, y and z run, like ``"RAS"``. Axes are permuted and flipped
      while they are read, each volume by its own affine (a label map without one like its image). The result is that of
      MONAI's ``Orientation`` and, for RAS, of nibabel's ``as_closest_canonical``; by default axes stay as stored;
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
      `label_fill`;
    - `image_array`, `label_array`: the array of a store that has several; `level`: that of an OME-Zarr image;
    - `dims`: the names of the stored dims: ``channel``, ``z``, ``y`` and ``x`` in their order. Needed where files
      (plain HDF5) do not name them, or an array has another order; a label map may lack the channels;
    - `axes`: the order of space in samples, ``"zyx"``, or ``"xyz"`` as MONAI's readers have it, for weights that come
      from MONAI or go there: views of the same tiles. Arguments stay along z, y, x;
    - `seed`: of the crops that ``volumes[i]`` gives; a `VolumeLoader` has its own;
    - `mode`: ``"cooperative"``, ``"independent"`` or ``"auto"``, as in `jigsaw.io.open`.

    *Sends*: nothing without `foreground`; with it, the voxels found in each label map.

    Raises: a `ReadError` of `jigsaw.errors`, or `ShardingError` for impossible cuts, naming the request and what
    exists, alike on every rank. Reading raises `FieldError` for a label that `label_dtype` cannot hold.

    >>> mesh = jigsaw.init_mesh(depth=1)
    >>> volumes = jigsaw.io.open_volumes(["scan.zarr"], ["label.zarr"], mesh=mesh, crop=(16, 16, 16), crops=4)
    >>> sample = volumes[0]
    >>> len(volumes), sample.image.shape, sample.label.dtype
    (4, torch.Size([1, 16, 16, 16]), torch.int64)
    """
    named = checked_dims(dims)
    checked_choice("missing", missing, MISSING_RULES)
    picture = StoredVolume((), image_array, level, given_dims=named, missing=missing)
    pictures = _given_volumes("images", images, picture)
    maps = () if labels is None else _given_labels(labels, replace(picture, array=label_array))
    if labels is not None and len(pictures) != len(maps):
        raise FieldError(
            f"{len(pictures)} images and {len(maps)} labels: each image needs its label map, or None in its place"
        )
    pictures, maps = _turn_volumes(pictures, maps, checked_orientation(orientation))
    _check_volumes_match(pictures, maps)
    _warn_of_orientations(pictures)
    pictures, maps = _respace_volumes(pictures, maps, checked_spacing(spacing, pictures[0].dims))
    if foreground is not None and not maps:
        raise FieldError("foreground= weights crops by labels, and there are none; give labels=")
    if not is_whole_number(crops) or crops < 1:
        raise FieldError(f"crops={crops} must be at least 1, the crops of a volume in an epoch")
    if crop is None and (crops != 1 or foreground is not None):
        raise FieldError(
            f"crop=None: each sample is a whole volume, and crops={crops}, foreground={foreground} choose among crops; "
            "give a crop, or leave them out"
        )
    device_mesh, device, mesh_axes = mesh_and_axes(mesh)
    if device_mesh is not None and spec is None:
        warn_of_idle_readers(mesh_axes, pictures[0].dims)
    label_type = checked_dtype("label_dtype", label_dtype, _LABEL_DTYPES)
    filled = _label_fill(label_fill, label_type)
    try:
        image_fill = float(fill)
    except (TypeError, ValueError) as e:
        raise FieldError(f"fill={fill!r} must be a number, what stands where an image has no voxel") from e
    renamed = RenamedLabels.of(label_map, label_type, filled)
    opened = Volumes(
        images=pictures,
        labels=maps,
        mesh=device_mesh,
        device=device,
        frame=_volume_space(pictures, crop, mesh_axes, spec, halo, boundary, split, align),
        crops=crops,
        foreground=foreground,
        found=(),
        intensities=intensities_of_volumes(normalize, window, pictures[0].channels, len(pictures)),
        dtype=checked_dtype("dtype", dtype),
        label_dtype=label_type,
        fill=image_fill,
        label_fill=filled,
        renamed=renamed,
        mode=checked_choice("mode", mode, _VOLUME_MODES),
        is_whole=crop is None,
        x_first=checked_choice("axes", axes, ("zyx", "xyz")) == "xyz",
        augment=AskedAugmentations.of(augment),
        seed=seed,
    )
    for step in opened.augment.steps:
        for volume in range(len(opened.images)):
            step.check_fits(opened.sample_grid(volume))
    _check_nothing_beyond(opened)
    for index in range(0, len(opened), crops):  # refuse here what cannot be planned, not at the first batch
        opened.plans_of(opened.crop(index), opened.frame_of([index]))
    return replace(opened, found=find_foreground(maps, foreground, device_mesh, renamed)) if foreground else opened


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


def _given_volumes(name: str, volumes: Sequence[GivenVolume], form: StoredVolume) -> tuple[StoredVolume, ...]:
    if isinstance(volumes, str | os.PathLike) or not len(volumes):
        raise FieldError(
            f"{name}={volumes!r} must be a list of at least one path, like {name}=sorted(glob('*.nii.gz'))"
        )
    stores = (tuple(each) if isinstance(each, list | tuple) else (each,) for each in volumes)
    return tuple(replace(form, given=each) for each in stores)


def _given_labels(labels: Sequence[GivenVolume | None], form: StoredVolume) -> tuple[StoredVolume | None, ...]:
    if isinstance(labels, str | os.PathLike) or not any(each is None for each in labels):
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
        _check_affines_match(image, "an image and its label map", (*image.affines[:1], *label.affines))


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


def _label_fill(fill: Any, dtype: torch.dtype) -> int:
    held = torch.iinfo(dtype)
    try:
        number = int(fill)
    except (TypeError, ValueError, OverflowError):  # not a number, NaN or infinite
        number = None
    if number is None or number != fill or not held.min <= number <= held.max:
        raise FieldError(f"label_fill={fill!r} must be an integer that {dtype} holds, from {held.min} to {held.max}")
    return number
