"""NIfTI-1 and NIfTI-2 volumes: `.nii` by offset, `.nii.gz` through a decompressed file in the cache, local or remote.

The first index of a NIfTI image, x, runs fastest, so in memory its dims are ``(time,) z, y, x``.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import UnsupportedStoreError
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable
from jigsaw.io.chunks.files import BadChunkError, LocalFiles, ShortChunkError, StoreFiles
from jigsaw.io.formats import slab_arrays as slabs
from jigsaw.io.formats import unpacked_gzip as _unpacked
from jigsaw.io.formats.unpacked_gzip import FileStamp, UnpackedFile

NIFTI_ARRAY_NAME = "image"
"""Name of the one array of such a file."""
_NIFTI_DIMS = ("x", "y", "z", "time", "dim_5", "dim_6", "dim_7")
_NIFTI_TYPES = {2: "u1", 4: "i2", 8: "i4", 16: "f4", 64: "f8", 256: "i1", 512: "u2", 768: "u4", 1024: "i8", 1280: "u8"}
_SPACE_UNITS = {1: "m", 2: "mm", 3: "um"}
_VERSION_BY_LENGTH = {348: b"1", 540: b"2"}  # NIfTI's version by the length of its header
_LONGEST_NIFTI_HEADER = 540
_HEADER_FIELDS = {
    348: {
        "dim": (40, "8h"), "datatype": (70, "h"), "pixdim": (76, "8f"), "vox_offset": (108, "f"), "scl": (112, "2f"),
        "units": (123, "B"), "descrip": (148, "80s"), "codes": (252, "2h"), "qform": (256, "6f"), "sform": (280, "12f"),
        "magic": (344, "3s"),
    },
    540: {
        "magic": (4, "3s"), "datatype": (12, "h"), "dim": (16, "8q"), "pixdim": (104, "8d"), "vox_offset": (168, "q"),
        "scl": (176, "2d"), "descrip": (240, "80s"), "codes": (344, "2i"), "qform": (352, "6d"), "sform": (400, "12d"),
        "units": (500, "i"),
    },
}  # fmt: skip
"""The offset of each field in a header's C struct, and its type."""


def claims(url: Any) -> bool:
    """Say whether a local file is a `.nii.gz` that gzip wrote, or begins as NIfTI does."""
    name = os.fspath(url) if isinstance(url, str | os.PathLike) else ""
    if str(name).lower().endswith(".nii.gz"):
        return slabs.magic_bytes(url, 2) == b"\x1f\x8b"
    return _header_form(slabs.magic_bytes(url, _LONGEST_NIFTI_HEADER)) is not None


def open_nifti(url: str | os.PathLike[str], files: StoreFiles | None = None) -> ArrayStore:
    """Open the array ``image`` of a NIfTI file: ``(time,) z, y, x``, with its affine and voxel sizes among its
    attributes.

    ``affine`` [4, 4] maps (x, y, z) indices to millimeters (that of sform, else qform, else voxel sizes alone).
    ``zooms`` are the voxel sizes along x, y, z and time; scl_slope and scl_inter are scale_factor and add_offset.

    A `.nii.gz` is fetched and decompressed here, once on each machine. Complex and color values are refused.
    """
    path = os.fspath(url)
    packed = path.lower().endswith(".gz")
    files = files or LocalFiles(keep=not packed)
    table = slabs.parse_named_file(path, "NIfTI", lambda: _table_of_nifti(files, path, packed))
    return ArrayStore(path, {NIFTI_ARRAY_NAME: table}, dict(table.attrs), lambda _: slabs.read_whole_coordinate(table))


def _table_of_nifti(files: StoreFiles, path: str, packed: bool) -> ArrayTable:
    if packed:  # the header inside gives the number of bytes to decompress
        stamp = FileStamp.of(files, path)
        header = _NiftiHeader.of(path, _unpacked.unpacked_head(files, path, stamp.size, _LONGEST_NIFTI_HEADER))
        files, size = UnpackedFile(files, path, stamp, header.stop), header.stop
        files.make()
    else:
        header = _NiftiHeader.of(path, slabs.file_head(files, path, _LONGEST_NIFTI_HEADER))
        size = slabs.file_size(files, path)
    if header.stop > size:
        raise ShortChunkError(
            f"its header says {header.shape} of {header.dtype} from byte {header.start} on, "
            f"and the file has {size} bytes"
        )
    shape = header.shape[::-1]
    places = slabs.slab_places(files, path, header.start, shape, header.dtype.itemsize)
    return slabs.table_of_slabs(NIFTI_ARRAY_NAME, places, _NIFTI_DIMS[: len(shape)][::-1], header.dtype, header.attrs())


def _header_form(head: bytes) -> tuple[str, int] | None:
    """Return the byte order and length of a NIfTI header, also of one of a pair of files; None for anything else."""
    for sign, length in (("<", int.from_bytes(head[:4], "little")), (">", int.from_bytes(head[:4], "big"))):
        if length in _VERSION_BY_LENGTH:
            at = _HEADER_FIELDS[length]["magic"][0]
            magic = head[at : at + 3]
            return (sign, length) if magic in (s + _VERSION_BY_LENGTH[length] for s in (b"n+", b"ni")) else None
    return None


@dataclass(frozen=True)
class _NiftiHeader:
    """Fields of a header; `shape` in its own order, x first."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    start: int
    slope: float
    inter: float
    pixdim: tuple[float, ...]
    qform: tuple[float, ...]
    sform: tuple[float, ...]
    codes: tuple[int, ...]
    units: int
    description: str

    @classmethod
    def of(cls, path: str, head: bytes) -> _NiftiHeader:
        form = _header_form(head)
        if form is None or len(head) < form[1]:
            kind = UnsupportedStoreError if form is None else ShortChunkError
            raise kind(f"{path!r} is not a NIfTI file: its first {len(head)} bytes are not a header")
        order, length = form
        fields = _HEADER_FIELDS[length].items()
        values = {name: struct.unpack_from(order + what, head, at) for name, (at, what) in fields}
        if values["magic"][0].startswith(b"ni"):
            raise UnsupportedStoreError(f"{path!r} is the header of a pair of files; join them into one .nii")
        dim, (code, *_), (begin, *_) = values["dim"], values["datatype"], values["vox_offset"]
        if not 1 <= dim[0] <= 7 or any(n < 1 for n in dim[1 : dim[0] + 1]):
            raise BadChunkError(f"its `dim` is {tuple(dim)}: it must have 1 to 7 dims, each of size 1 or more")
        if code not in _NIFTI_TYPES:
            raise UnsupportedStoreError(
                f"{path!r} has values of NIfTI datatype {code}; those that can be read are {sorted(_NIFTI_TYPES)}: "
                "real numbers of up to 64 bits"
            )
        if not isfinite(begin) or begin != int(begin) or (begin and begin < length + 4):
            raise BadChunkError(f"its vox_offset is {begin}, but voxels cannot begin before byte {length + 4}")
        return cls(
            shape=tuple(dim[1 : dim[0] + 1]),
            dtype=np.dtype(order + _NIFTI_TYPES[code]),
            start=int(begin) or length + 4,  # an unset offset means right after the header
            slope=values["scl"][0],
            inter=values["scl"][1],
            pixdim=values["pixdim"],
            qform=values["qform"],
            sform=values["sform"],
            codes=values["codes"],
            units=values["units"][0],
            description=values["descrip"][0].partition(b"\0")[0].decode("latin-1").strip(),
        )

    @property
    def stop(self) -> int:
        return self.start + prod(self.shape) * self.dtype.itemsize

    def attrs(self) -> dict[str, Any]:
        attrs: dict[str, Any] = {"affine": self.affine().tolist(), "zooms": list(self.zooms())}
        if isfinite(self.slope) and self.slope != 0 and (self.slope, self.inter) != (1, 0):
            if not isfinite(self.inter):
                raise BadChunkError(f"its scl_inter is {self.inter}; it must be finite")
            attrs |= {"scale_factor": self.slope, "add_offset": self.inter}
        if self.units & 7 in _SPACE_UNITS:
            attrs["space_units"] = _SPACE_UNITS[self.units & 7]
        return attrs | ({"description": self.description} if self.description else {})

    def zooms(self) -> tuple[float, ...]:
        """Return the size of a voxel along x, y, z, and of a step in time."""
        return tuple(abs(p) for p in self.pixdim[1 : len(self.shape) + 1])

    def affine(self) -> NDArray[np.float64]:
        """Return the map from (x, y, z, 1) to space: by sform, else qform, else voxel sizes, with x pointing left."""
        affine = np.eye(4)
        if self.codes[1] > 0:
            affine[:3] = np.reshape(self.sform, (3, 4))
            return affine
        sizes = np.array([abs(p) for p in self.pixdim[1:4]])
        if self.codes[0] > 0:
            handed = -1.0 if self.pixdim[0] < 0 else 1.0
            affine[:3, :3] = _rotation_matrix(self.qform[:3]) * (sizes * (1, 1, handed))
            affine[:3, 3] = self.qform[3:]
            return affine
        sides = [*self.shape[:3], 1, 1][:3]
        sizes = np.where(np.arange(3) < len(self.shape), sizes, 1) * (-1, 1, 1)
        affine[:3, :3] = np.diag(sizes)
        affine[:3, 3] = -(np.array(sides) - 1) / 2 * sizes
        return affine


# below it the square of a is the rounding of b, c and d, which are stored as float32 (nifti1_io's `quatern_to_mat44`)
_LEAST_SQUARE = 1e-7


def _rotation_matrix(bcd: Sequence[float]) -> NDArray[np.float64]:
    """Return the rotation matrix of a unit quaternion a + bi + cj + dk, of which b, c and d are stored."""
    b, c, d = bcd
    rest = 1.0 - (b * b + c * c + d * d)
    if rest < -1e-5:
        raise BadChunkError(f"its quaternion {tuple(bcd)} is longer than 1")
    if rest < _LEAST_SQUARE:  # a turn by 180 degrees
        length = (b * b + c * c + d * d) ** 0.5
        a, b, c, d = 0.0, b / length, c / length, d / length
    else:
        a = rest**0.5
    return np.array(
        [
            [a * a + b * b - c * c - d * d, 2 * (b * c - a * d), 2 * (b * d + a * c)],
            [2 * (b * c + a * d), a * a + c * c - b * b - d * d, 2 * (c * d - a * b)],
            [2 * (b * d - a * c), 2 * (c * d + a * b), a * a + d * d - b * b - c * c],
        ]
    )
