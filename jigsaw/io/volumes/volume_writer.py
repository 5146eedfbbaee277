"""`jigsaw.io.write_volume`: a tile as a NIfTI file, each rank its own slab of it, or as OME-Zarr.

A NIfTI image has x fastest and channels last, so a slab of z is one run of bytes for each channel. A rank writes its
runs at their own places. A `.nii.gz` is a gzip file of several members, as in RFC 1952 (2.2). Each rank compresses its
slabs by itself, and all of them, one after the other, unpack to the whole file.
"""

from __future__ import annotations

import gzip
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jigsaw.drafts import begin_draft_file, open_unlinked
from jigsaw.errors import GridError, ShardingError, WriteError
from jigsaw.geometry.stencil_rules import InterpolationTable
from jigsaw.io.formats import nifti
from jigsaw.io.formats.conventions import METERS_BY_UNIT, unit_ratio
from jigsaw.io.rank_results import results_of_ranks
from jigsaw.io.volumes.ome_writer import COARSER_RULES, PyramidLevel, pyramid_levels, write_pyramid
from jigsaw.io.volumes.volume import AffineMatrix, StoredVolume, checked_affine, scaled_affine
from jigsaw.io.volumes.volume_dataset import VolumeSample
from jigsaw.nn.stencils.stencil import DimStencil, gather_input_rows, plan_stencil
from jigsaw.ranks.mesh import mesh_coordinate
from jigsaw.tile.tile import Tile

_HEADER_BYTES, _VOXELS_BEGIN, _LONGEST_SIDE = 348, 352, 32767
_NIFTI_CODES = {"u1": 2, "i2": 4, "i4": 8, "f4": 16, "f8": 64, "i1": 256, "u2": 512, "u4": 768, "i8": 1024, "u8": 1280}
_STORED_AS = {
    torch.bool: torch.uint8, torch.int64: torch.int32, torch.float16: torch.float32, torch.bfloat16: torch.float32
}  # fmt: skip
_UNITS_AT, _TIME_UNITS, _SCANNER = 123, 0b111000, 1
_UNIT_CODES = {"meter": 1, "millimeter": 2, "micrometer": 3}
_KEPT_FIELDS = ((_UNITS_AT, 1), (148, 80), (228, 24))
"""Offset and length of what is taken from a given header: units, description, auxiliary file."""


def write_volume(
    path: str | os.PathLike[str],
    data: Tile,
    *,
    like: Any = None,
    affine: AffineMatrix | None = None,
    onto: str | os.PathLike[str] | None = None,
    dtype: str | torch.dtype | None = None,
    mode: str = "w-",
    levels: int | None = None,
    coarser: str | None = None,
) -> None:
    r"""Write a tile [z, y, x] or [C, z, y, x] as ``.nii``, ``.nii.gz`` or ``.ome.zarr``. A batch dim of 1 before it is
    left out. It is [x, y, z] where `like` is a sample of ``open_volumes(axes="xyz")``.

    - `like`: its place in the world, and its unit: a `VolumeSample`, anything else with an `affine`, or the path of an
      image, in any format that `open_volumes` reads. Samples and images must have as many voxels; from a NIfTI file the
      description is taken, too;
    - `affine`: 4 x 4, from voxels (x, y, z, 1) to the world, used instead; without either it is the identity;
    - `onto`: the path of an image, on whose grid labels (integers or bool) are written. Each of its voxels takes the
      label of the nearest voxel of the tile, and 0 beyond the tile. The tile lies where `like` or `affine` says;
    - `dtype`: of the file; by default the tile's, but bool as uint8, bfloat16 and float16 as float32, and int64, which
      few programs read, as int32;
    - `mode`: ``"w-"`` makes a new file, ``"w"`` replaces one;
    - `levels`: of OME-Zarr (0.5, on Zarr v3), counting the volume itself; by default until no side is above 256. A
      level has half the rows of the one before; dims of long voxels are halved only once the others have become as
      long;
    - `coarser`: how a voxel of a coarser level is made from those of the level before. ``"mean"`` is the default for
      floats. ``"mode"``, the most frequent value and of several the smallest, is the default for integers.

    A NIfTI file takes its name when it is whole; OME-Zarr lists its arrays then. Programs that read gzip by members, as
    zlib, nibabel, ITK and SimpleITK do, read what several ranks have compressed.

    *Shapes*: global ``data.shape``; per rank its own tile, then a slab of z of ``ceil(z / P)`` rows, for OME-Zarr its
    part of every level.
    *Sends*: the rows that another rank writes, once; with `onto`, first those that another rank's voxels take; for each
    coarser level one row for each cut. Besides, less than a kilobyte for each rank.
    *Raises*: `WriteError` for another suffix or mode, a dtype that NIfTI lacks, or values that do not fit it. Also for
    sides above 32767, impossible levels, or a file that exists. `GridError` for an affine that
    cannot be inverted or written, and for `like` of other sides. Also for an image `onto` whose axes are turned against
    the tile's, and in OME-Zarr for an affine of turned axes. `ShardingError` for other shapes. All are alike on every
    rank; no NIfTI file is left then.

    >>> mask = jigsaw.shard(torch.ones(4, 6, 5, dtype=torch.uint8), jigsaw.init_mesh(depth=1), ("depth", None, None))
    >>> jigsaw.io.write_volume("mask.nii.gz", mask, affine=np.diag([1.0, 1, 2, 1]))
    >>> jigsaw.io.open_volumes(["mask.nii.gz"], mesh=jigsaw.init_mesh(z=1), crop=None)[0].spacing
    (2.0, 1.0, 1.0)
    """
    where = Path(path)
    packed, is_ome = where.name.endswith(".nii.gz"), where.name.endswith(".ome.zarr")
    if not packed and not is_ome and where.suffix != ".nii":
        raise WriteError(f"{where} must end with .nii or .nii.gz, or .ome.zarr; jigsaw.io.write makes Zarr and NetCDF")
    if mode not in ("w-", "w"):
        raise WriteError(f"mode={mode!r} must be 'w-' or 'w'")
    image = _channels_first(data, like).owned()
    if not all(image.shape):
        raise WriteError(f"write_volume of a tile of shape {tuple(data.shape)}, which has no voxel: leave it out")
    place = _WorldPlace(like, affine)
    if onto is not None:
        image, place = _put_on_scan(image, place, onto), _WorldPlace(onto, None)
    kind = _stored_dtype(image.dtype, dtype)
    if is_ome:
        _write_ome(where, image, kind, place, mode, levels, coarser)
    elif levels is not None or coarser is not None:
        raise WriteError(f"levels={levels}, coarser={coarser!r}: {where.name} has one level; write .ome.zarr")
    else:
        _write_nifti(where, image, kind, place, mode, packed)


@dataclass(frozen=True)
class _WorldPlace:
    like: Any
    affine: AffineMatrix | None

    @cached_property
    def unit(self) -> str:
        """Unit of the world, as OME-NGFF names it: that of the given file or sample, else mm."""
        if isinstance(self.like, str | os.PathLike):
            return StoredVolume((self.like,)).unit or "millimeter"
        return (self.like.unit if isinstance(self.like, VolumeSample) else "") or "millimeter"


def _write_ome(
    where: Path,
    image: Tile,
    kind: np.dtype[Any],
    place: _WorldPlace,
    mode: str,
    levels: int | None,
    coarser: str | None,
) -> None:
    rule = coarser or ("mean" if image.dtype.is_floating_point else "mode")
    if rule not in COARSER_RULES:
        raise WriteError(f"coarser={coarser!r} must be 'mean' or 'mode'")

    def begin() -> tuple[list[PyramidLevel], str]:
        _check_is_new(where, mode)
        _check_fits(where, image, kind)
        _, world = _place_in_world(place, image.shape[1:])
        return pyramid_levels(image.shape[1:], world, levels), place.unit

    begun = results_of_ranks(image.mesh, begin, WriteError)
    if any(other != begun[0] for other in begun):
        raise WriteError(f"{where}: the ranks give it other affines, levels or units; give all of them the same")
    # not every device can sum float16, and numpy lacks bfloat16
    wide = _STORED_AS.get(image.dtype, image.dtype)
    write_pyramid(where, image if image.dtype == torch.int64 else image.to(wide), kind, *begun[0], rule, mode == "w")


def _put_on_scan(image: Tile, place: _WorldPlace, onto: str | os.PathLike[str]) -> Tile:
    if image.dtype.is_floating_point or image.dtype.is_complex:
        raise WriteError(f"onto= takes the nearest label, and the tile is of {image.dtype}; give integers or bool")

    def begin() -> tuple[ScanAxis, ...]:
        scan, (_, world) = StoredVolume((onto,)), _place_in_world(place, image.shape[1:])
        on_scan = scaled_affine(scan.affine, unit_ratio(scan.unit, place.unit))
        return axes_of_scan(on_scan, _sides_of(scan), world, image.shape[1:])

    begun = results_of_ranks(image.mesh, begin, WriteError)
    if any(other != begun[0] for other in begun):
        raise WriteError(f"onto={os.fspath(onto)!r}: the ranks see other grids; give all of them the same")
    return labels_on_scan(image.to(torch.uint8) if image.dtype == torch.bool else image, begun[0])


def _sides_of(scan: StoredVolume) -> tuple[int, ...]:
    return (*(1,) * (3 - len(scan.dims)), *scan.stored_shape)


def _check_is_new(where: Path, mode: str) -> None:
    if mode == "w-" and os.path.lexists(where):  # also a link to what is not mounted
        raise WriteError(f"{where} is there; mode='w' replaces it")


def _check_fits(where: Path, image: Tile, kind: np.dtype[Any]) -> None:
    """Raise `WriteError` where a file does not hold these values; floats are rounded as in any cast."""
    values = _numpy_values(image.owned().local)
    if not values.size:
        return
    if kind.kind == "f":
        if values.dtype.kind == "f":
            fits = not ((np.abs(values) > np.finfo(kind).max) & np.isfinite(values)).any()
        else:  # integers are labels or counts, so none may become its neighbor
            fits = values.dtype.itemsize < kind.itemsize or _are_kept(values, kind)
    else:
        whole = values.dtype.kind != "f" or bool((values == np.rint(values)).all())
        limits = np.iinfo(kind)
        fits = whole and limits.min <= values.min().item() and values.max().item() <= limits.max
    if not fits:
        raise WriteError(f"{where}: values of {image.dtype} do not fit {kind.name}; give a wider dtype=, or round them")


def _are_kept(values: NDArray[Any], kind: np.dtype[Any]) -> bool:
    stored = values.astype(kind)
    limit = 2.0 ** (8 * values.dtype.itemsize - (values.dtype.kind == "i"))  # the first float beyond the integers
    return bool((stored < limit).all()) and bool((stored.astype(values.dtype) == values).all())


def _write_nifti(where: Path, image: Tile, kind: np.dtype[Any], place: _WorldPlace, mode: str, packed: bool) -> None:
    if max(image.shape) > _LONGEST_SIDE:
        raise WriteError(
            f"NIfTI-1 has sides of up to {_LONGEST_SIDE}, not {tuple(image.shape)}; write .ome.zarr instead"
        )
    mesh = image.mesh
    first = not any(mesh_coordinate(mesh))
    drafts: list[Path] = []

    def begin() -> tuple[bytes, int, str]:
        _check_is_new(where, mode)
        if where.exists() and where.stat().st_size and not nifti.claims(where):
            raise WriteError(f"{where} is not a NIfTI file, so mode='w' does not replace it; remove it yourself")
        _check_fits(where, image, kind)
        header = _header_bytes(image.shape, kind, place)
        start = gzip.compress(header, mtime=0) if packed else header
        if first:
            drafts.append(begin_draft_file(where))
            with open(open_unlinked(drafts[0], os.O_WRONLY), "wb") as file:
                _ = file.write(start)
        return header, len(start), drafts[0].name if first else ""

    try:
        begun = results_of_ranks(mesh, begin, WriteError)
        if len({header for header, *_ in begun}) > 1:
            raise WriteError(f"{where}: the ranks give it other affines, dtypes or headers; give all of them the same")
        draft = where.with_name(begun[0][2])
        slab = image.redistribute((None, mesh.mesh_dim_names, None, None)).local
        runs = [_as_bytes_of(channel, kind) for channel in slab]
        if packed:
            runs = [gzip.compress(run, 6, mtime=0) if len(run) else run for run in runs]
        # in mesh order, which is that of the slabs: the axes cut z from the first to the last
        sizes = results_of_ranks(mesh, lambda: [len(run) for run in runs], WriteError)
        position = image.layout.index(mesh_coordinate(mesh))
        _ = results_of_ranks(mesh, lambda: _write_runs(draft, begun[0][1], runs, sizes, position), WriteError)
        _ = results_of_ranks(mesh, lambda: draft.replace(where) if first else None, WriteError)
    finally:
        for each in drafts:
            each.unlink(missing_ok=True)


def _channels_first(data: Tile, like: Any) -> Tile:
    """Return the tile as [C, z, y, x]. Raises: `ShardingError` for another number of dims, or a batch of several."""
    if not isinstance(data, Tile):  # pyright: ignore[reportUnnecessaryIsInstance] # what a user may pass
        raise ShardingError(
            f"write_volume takes a tile, not {type(data).__name__}; cut it first: jigsaw.shard(x, mesh, spec)"
        )
    if isinstance(like, VolumeSample) and like.x_first:  # the dims of space are those of its mask: x, y, z, or x, y
        lead = max(0, data.ndim - len(like.spacing))
        data = data.permute(*range(lead), *range(data.ndim - 1, lead - 1, -1))
    image = data[0] if data.ndim == 5 and data.shape[0] == 1 else data
    image = image[None] if image.ndim == 3 else image
    if image.ndim != 4:
        raise ShardingError(
            f"write_volume of a tile of shape {tuple(data.shape)}: it must be [z, y, x] or [C, z, y, x]; write the "
            "samples of a batch one by one"
        )
    return image.detach()


def _stored_dtype(own: torch.dtype, wanted: str | torch.dtype | None) -> np.dtype[Any]:
    if own.is_complex:
        raise WriteError(f"write_volume of a tile of {own}: formats of volumes have real numbers; write its abs()")
    wanted = _STORED_AS.get(own, own) if wanted is None else wanted
    try:
        stored = torch.empty(0, dtype=wanted).numpy().dtype if isinstance(wanted, torch.dtype) else np.dtype(wanted)
    except TypeError:
        stored = np.dtype("V1")
    if stored.str[1:] not in _NIFTI_CODES:
        names = ", ".join(np.dtype(name).name for name in _NIFTI_CODES)
        raise WriteError(f"dtype={wanted!r} is none that is written as NIfTI: {names}")
    return stored.newbyteorder("<")


def _numpy_values(values: Tensor) -> NDArray[Any]:
    values = values.cpu()
    values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
    return values.resolve_neg().numpy()


def _as_bytes_of(channel: Tensor, kind: np.dtype[Any]) -> memoryview:
    """Return a slab [z, y, x] as the file has it: z slowest, x fastest."""
    stored = np.ascontiguousarray(_numpy_values(channel).astype(kind, copy=False))
    return stored.reshape(-1).view(np.uint8).data


def _write_runs(
    draft: Path, begin: int, runs: Sequence[bytes | memoryview], sizes: Sequence[Sequence[int]], position: int
) -> None:
    """Write this rank's runs, each behind all slabs of earlier channels, and of earlier ranks of its channel."""
    with open(open_unlinked(draft, os.O_WRONLY), "wb") as file:
        for channel, run in enumerate(runs):
            before = sum(sum(rank[:channel]) for rank in sizes) + sum(rank[channel] for rank in sizes[:position])
            if len(run):
                _ = file.seek(begin + before)
                _ = file.write(run)


def _header_bytes(shape: Sequence[int], kind: np.dtype[Any], place: _WorldPlace) -> bytes:
    """Return the header of NIfTI-1 (Cox et al. 2004, nifti1.h), up to where voxels begin; `shape` is [C, z, y, x]."""
    template, world = _place_in_world(place, shape[1:])
    head = bytearray(_VOXELS_BEGIN)
    for at, length in _KEPT_FIELDS:
        head[at : at + length] = template[at : at + length] if template else bytes(length)
    if place.unit not in _UNIT_CODES:
        world = scaled_affine(world, unit_ratio(place.unit, "millimeter"))
    other_unit = _UNIT_CODES["millimeter"] if place.unit in METERS_BY_UNIT else 0  # 0: the unit is not known
    head[_UNITS_AT] = head[_UNITS_AT] & _TIME_UNITS | _UNIT_CODES.get(place.unit, other_unit)
    channels, *space = shape
    sides = [*space[::-1], *([channels] if channels > 1 else [])]
    zooms = np.sqrt((world[:3, :3] ** 2).sum(0)).tolist()
    for at, what, *values in (
        (0, "i", _HEADER_BYTES),
        (40, "8h", len(sides), *sides, *[1] * (7 - len(sides))),
        (70, "2h", _NIFTI_CODES[kind.str[1:]], 8 * kind.itemsize),
        (76, "8f", 1, *zooms, 1, 0, 0, 0),
        (108, "3f", _VOXELS_BEGIN, 1, 0),
        (252, "2h", 0, _SCANNER),
        (280, "12f", *world[:3].ravel().tolist()),
        (344, "4s", b"n+1\0"),
    ):
        struct.pack_into("<" + what, head, at, *values)
    return bytes(head)


def _place_in_world(place: _WorldPlace, space: Sequence[int]) -> tuple[bytes, AffineMatrix]:
    """Return the header of a given NIfTI-1 file, else empty bytes; and the affine.

    Raises: `GridError` for an image with other sides than `space`, whose affine is that of its own voxels.
    """
    like, affine = place.like, place.affine
    header, own_affine = b"", getattr(like, "affine", None)
    if isinstance(like, str | os.PathLike):
        scan = StoredVolume((like,))
        own_affine, sides = scan.affine, _sides_of(scan)
        name = os.fspath(like)
        if name.endswith((".nii", ".nii.gz")) and "://" not in name:
            with gzip.open(name) if name.endswith(".gz") else open(name, "rb") as file:
                header = file.read(_HEADER_BYTES)
        if header[:4] != struct.pack("<i", _HEADER_BYTES):
            header = b""
    elif like is not None and own_affine is None:
        raise WriteError(f"like={type(like).__name__} has no affine; give a sample, the path of an image, or affine=")
    else:
        name, sides = type(like).__name__, _sides_of_object(like)
    world = checked_affine(affine if affine is not None else np.eye(4) if own_affine is None else own_affine)
    if world is None or not np.array_equal(world[3], (0, 0, 0, 1)) or np.abs(world).max() > np.finfo(np.float32).max:
        raise GridError(
            f"affine={affine if affine is not None else own_affine!r} must be an invertible 4 x 4 matrix of numbers, "
            "from (x, y, z, 1) to the world, whose last row is 0, 0, 0, 1 and whose numbers float32 holds"
        )
    if affine is None and sides not in (None, tuple(space)):
        raise GridError(
            f"like={name!r} has {sides} voxels along z, y, x and the tile {tuple(space)}, so its affine would put them "
            "elsewhere; give like= the sample that the tile was made of, or affine=, and to put labels back on the "
            "scan's own grid onto= its path"
        )
    return header, world


def _sides_of_object(like: Any) -> tuple[int, ...] | None:
    """Return the sides z, y, x of a sample, or of an image of nibabel's; None where they are not known."""
    if isinstance(like, VolumeSample):
        sides = tuple(like.image.shape[1:])[:: -1 if like.x_first else 1]
        return (*(1,) * (3 - len(sides)), *sides)
    shape = None if isinstance(like, Tensor) else getattr(like, "shape", None)
    return tuple(shape[::-1]) if isinstance(shape, tuple) and len(shape) == 3 else None


_OFF_AXIS = 0.05  # voxels by which an axis may drift along another over the whole scan: a header's float32 makes some
_ROUNDING = 1e-3  # voxels beyond its half by which an outer voxel may reach: affines in float32 are rounded by less


@dataclass(frozen=True)
class ScanAxis:
    """Dim of a scan: the dim of the tile that runs alike, or against it, and the nearest row of that for each row.

    Rows from `inside` on, up to its end, lie within the tile; the others are background.
    """

    dim: int
    is_reversed: bool
    rows: tuple[int, ...]
    inside: tuple[int, int]


def axes_of_scan(
    scan: AffineMatrix, sides: Sequence[int], tile: AffineMatrix, space: Sequence[int]
) -> tuple[ScanAxis, ...]:
    """Match the dims z, y, x of a scan of these `sides` with those of a tile of the sides `space`, by their affines.

    Raises: `GridError` for grids that are turned or sheared against each other.
    """
    into = np.linalg.inv(tile) @ scan
    axes: list[ScanAxis] = []
    for column, n in zip((2, 1, 0), sides, strict=True):
        along = np.abs(into[:3, column])
        row = int(along.argmax())
        if (np.delete(along, row) * n).max() > _OFF_AXIS:
            raise GridError(
                f"the axis {'xyz'[column]} of the scan runs along none of the tile's; labels are put back on grids "
                "whose axes run alike, so read the scan without turning it, or resample the labels beforehand"
            )
        size, slope = space[2 - row], into[row, column]
        at = into[row, column] * np.arange(n) + into[row, 3]
        within = np.flatnonzero((at > -0.5 - _ROUNDING) & (at < size - 0.5 + _ROUNDING))
        rows = np.clip(np.rint(at), 0, size - 1).astype(int)
        rows = size - 1 - rows if slope < 0 else rows
        inside = (int(within[0]), int(within[-1]) + 1) if len(within) else (0, 0)
        axes.append(ScanAxis(2 - row, bool(slope < 0), tuple(rows.tolist()), inside))
    if len({axis.dim for axis in axes}) < 3:
        raise GridError("two axes of the scan run along one of the tile's; give the affine that the tile has")
    return tuple(axes)


def labels_on_scan(labels: Tile, axes: Sequence[ScanAxis]) -> Tile:
    """Move labels [C, z, y, x] to the grid of a scan.

    *Shapes*: ``[C, *sides]``; cut as the labels are, at the points that lie nearest.
    *Sends*: the rows that other ranks' voxels take.
    """
    turned = [1 + axis.dim for axis in axes if axis.is_reversed]
    image = (labels.flip(turned) if turned else labels).permute(0, *(1 + axis.dim for axis in axes)).owned()
    along = tuple(DimStencil(d, InterpolationTable(axis.rows, axis.rows)) for d, axis in enumerate(axes, 1))
    plan = plan_stencil(image.layout, along, image.coordinate, "write_volume")
    x = gather_input_rows(image, plan)
    if plan.is_empty:
        return Tile(x.new_zeros(plan.shape), plan.out, image.mesh)
    touched = {d: (derived.needs[piece], derived.out.held[piece]) for d, derived, piece in plan.derived}
    for d, axis in enumerate(axes, 1):
        need, (start, stop) = touched.get(d, ((0, image.shape[d]), (0, len(axis.rows))))
        x = x.index_select(d, torch.tensor(axis.rows[start:stop], device=x.device) - need[0])
        first, last = (min(max(row, start), stop) - start for row in axis.inside)
        x.narrow(d, 0, first).zero_()
        x.narrow(d, last, stop - start - last).zero_()
    return Tile(x, plan.out, image.mesh)
