"""Multi-frame DICOM: one file has the slices of a volume (Enhanced CT, MR and PET, segmentations), each a frame.

A frame says by itself where it lies, so frames may be stored in any order, and several stacks may share a file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import GridError, ReadError, UnsupportedStoreError, imports_needed
from jigsaw.geometry.cut import Box, Interval, box_shape
from jigsaw.io.chunks.array_table import ArrayStore, ArrayTable
from jigsaw.io.chunks.chunk import ChunkIndex, ChunkRef
from jigsaw.io.chunks.codecs import CodecDecoder
from jigsaw.io.chunks.files import BadChunkError, LocalFiles, ShortChunkError, fresh_memory
from jigsaw.io.formats import slab_arrays as slabs

DICOM_ARRAY_NAME = "image"
"""Name of the array of a file that has one stack of frames."""
_PREAMBLE_BYTES = 128
_PLACE_TOLERANCE = 1e-2  # mm; positions are decimal text, rounded by those who write it
_SPLIT_REMEDY = "split the file, or read its frames by a source of your own (jigsaw.io.ArraySource)"


def claims(url: Any) -> bool:
    """Say whether a local file begins as DICOM files do."""
    return slabs.magic_bytes(url, _PREAMBLE_BYTES + 4)[_PREAMBLE_BYTES:] == b"DICM"


def open_dicom(url: str | os.PathLike[str]) -> ArrayStore:
    """Open the array ``image`` [z, y, x] of a multi-frame DICOM file, its frames in the order in which they lie.

    ``affine`` [4, 4], among its attributes, maps (x, y, z) indices to millimeters as nibabel has them, to the right and
    the front. A file of several stacks or times has an array for each, such as ``stack 2`` and ``time 1``.

    Slope and intercept (Pixel Value Transformation) are scale_factor and add_offset where all frames share them;
    otherwise the array is float32, and has them applied. A segmentation of several segments is [channel, z, y, x], by
    rising segment number, named by the attribute ``segments``. A frame that it leaves out is 0, as DICOM says.

    Values of uncompressed frames are read by byte ranges, those of the needed rows alone. pydicom decodes the others,
    frame by frame.

    Raises: `UnsupportedStoreError` for a single slice, colors, frames without a place, or a compression that pydicom
    lacks a plugin for; `GridError` for frames that are missing, or lie unevenly or in the same place; `TruncatedError`
    and `CorruptChunkError` for damaged files.
    """
    path = os.fspath(url)
    return slabs.parse_named_file(path, "DICOM", lambda: _store_of_dicom(path))


def _store_of_dicom(path: str) -> ArrayStore:
    try:
        head, offset = _head_of_file(path)
        pixels = _PixelFormat.of(path, head, offset)
        tables = {name: _table_of_stack(path, name, head, pixels, stack) for name, stack in _stacks(path, head).items()}
    except (ReadError, BadChunkError, OSError):
        raise
    except Exception as e:  # pydicom parses values when they are asked for, and may raise anything then
        raise BadChunkError(f"its header: {type(e).__name__}: {e}") from e
    attrs = dict(next(iter(tables.values())).attrs) if len(tables) == 1 else {}
    return ArrayStore(path, tables, attrs, lambda name: slabs.read_whole_coordinate(tables[name]))


def _head_of_file(path: str) -> tuple[Any, int]:
    """Return the elements before the pixels, and the byte where the element of the pixels begins."""
    with imports_needed(UnsupportedStoreError, "reading DICOM needs pydicom: pip install 'jigsaw-torch[dicom]'"):
        import pydicom
    with open(path, "rb") as file:
        head = pydicom.dcmread(file, stop_before_pixels=True)
        offset = file.tell()
        file.seek(offset)
        tag = file.read(4)
    if "PerFrameFunctionalGroupsSequence" not in head:
        raise UnsupportedStoreError(
            f"{path!r} is a DICOM file of one slice, or of frames that do not say where they lie; a series of "
            "such files is read by a source of your own, as docs/medical.md has it"
        )
    if head.file_meta.TransferSyntaxUID.is_deflated:
        raise UnsupportedStoreError(f"{path!r} is deflated as a whole; write it again as Explicit VR Little Endian")
    if not tag:
        raise ShortChunkError("it ends before its pixels")
    if tag not in (b"\xe0\x7f\x10\x00", b"\x7f\xe0\x00\x10"):
        raise UnsupportedStoreError(
            f"{path!r} has no integers as Pixel Data (7FE0,0010); convert its float pixels to NIfTI, or "
            "read them by a source of your own (jigsaw.io.ArraySource)"
        )
    return head, offset


# -- the pixels of a frame -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PixelFormat:
    """Form of the stored frames, and where they begin in the file; `options` are pydicom's words for it."""

    path: str
    start: int
    stop: int
    frames: int
    rows: int
    columns: int
    bits: int
    unused_bits: int
    dtype: np.dtype[Any]
    syntax: Any
    options: Mapping[str, Any] = field(repr=False)

    @classmethod
    def of(cls, path: str, head: Any, offset: int) -> _PixelFormat:
        from pydicom.pixels import get_decoder

        syntax = head.file_meta.TransferSyntaxUID
        order = "<" if syntax.is_little_endian else ">"
        if head.SamplesPerPixel != 1:
            raise UnsupportedStoreError(f"{path!r} has {head.SamplesPerPixel} samples a pixel; gray values can be read")
        bits, kind = int(head.BitsAllocated), "i" if head.PixelRepresentation else "u"
        if bits not in (1, 8, 16, 32) or not 1 <= head.BitsStored <= bits:
            raise UnsupportedStoreError(f"{path!r} stores {head.BitsStored} of {bits} bits a pixel; 1, 8, 16 or 32 fit")
        options: dict[str, Any] = {
            "rows": int(head.Rows),
            "columns": int(head.Columns),
            "number_of_frames": int(head.NumberOfFrames),
            "samples_per_pixel": 1,
            "bits_allocated": bits,
            "bits_stored": int(head.BitsStored),
            "pixel_representation": int(head.PixelRepresentation),
            "photometric_interpretation": str(head.PhotometricInterpretation),
            "pixel_keyword": "PixelData",
        }
        if bits == 8 and not syntax.is_little_endian:  # its bytes may lie in pairs, or not
            raise UnsupportedStoreError(f"{path!r} has big-endian pixels of 8 bits; write it again as little endian")
        if syntax.is_encapsulated:
            decoder = get_decoder(syntax)
            if not decoder.is_available:
                raise UnsupportedStoreError(
                    f"{path!r} is compressed by {syntax.name}, for which pydicom has no plugin here: "
                    f"{'; '.join(decoder.missing_dependencies)}"
                )
            if "ExtendedOffsetTable" in head:
                options["extended_offsets"] = (head.ExtendedOffsetTable, head.ExtendedOffsetTableLengths)
        return cls(
            path=path,
            start=offset + (8 if syntax.is_implicit_VR else 12),
            stop=os.path.getsize(path),
            frames=int(head.NumberOfFrames),
            rows=int(head.Rows),
            columns=int(head.Columns),
            bits=bits,
            unused_bits=bits - int(head.BitsStored),
            dtype=np.dtype(f"{order}{kind}{max(bits // 8, 1)}"),
            syntax=syntax,
            options=options,
        ).checked(len(head.PerFrameFunctionalGroupsSequence))

    def checked(self, described: int) -> _PixelFormat:
        """Return it. Raises: an error for frames that the file does not have, or that it does not describe."""
        if self.frames != described or min(self.rows, self.columns, self.frames) < 1:
            raise BadChunkError(
                f"its header says {self.frames} frames of {self.rows} x {self.columns}, and describes {described}"
            )
        end = self.start if self.compressed else self.bytes_of_frame(self.frames - 1)[1]
        if end > self.stop:
            raise ShortChunkError(f"its frames take the bytes up to {end}, and the file has {self.stop}")
        return self

    @property
    def compressed(self) -> bool:
        return bool(self.syntax.is_encapsulated)

    @property
    def plain(self) -> bool:
        """True where the stored bytes are the values."""
        return not (self.compressed or self.unused_bits or self.bits == 1)

    def bits_of_rows(self, frame: int, rows: Interval) -> Interval:
        """Return the first bit of these rows of an uncompressed frame, and the bit after their last."""
        first, last = ((frame * self.rows + row) * self.columns * self.bits for row in rows)
        return first, last

    def bytes_of_frame(self, frame: int) -> Interval:
        """Return the first byte of a frame and the byte after its last; of compressed ones an equal share each."""
        if self.compressed:
            share = (self.stop - self.start) // self.frames
            return self.start + frame * share, self.start + (frame + 1) * share
        first, last = self.bits_of_rows(frame, (0, self.rows))
        return self.start + first // 8, self.start - (-last // 8)

    def read(self, files: slabs.PresentFiles, frame: int, rows: Interval) -> NDArray[Any]:
        """Read rows of a frame [rows, columns], in the machine's byte order, without what lies in unused bits."""
        if self.compressed:
            return self._decoded(frame)[slice(*rows)]
        first, last = self.bits_of_rows(frame, rows)
        room = fresh_memory(-(-last // 8) - first // 8)
        files.ranges(self.path, [(self.start + first // 8, room)])
        if self.bits == 1:  # frames and rows begin within bytes
            bits = np.unpackbits(room, bitorder="little")[first % 8 :]
            return bits[: last - first].reshape(-1, self.columns)
        values = room.view(self.dtype).reshape(-1, self.columns).astype(self.dtype.newbyteorder("="))
        return values << self.unused_bits >> self.unused_bits if self.unused_bits else values

    def _decoded(self, frame: int) -> NDArray[Any]:
        from pydicom.pixels import get_decoder

        with open(self.path, "rb") as file:
            file.seek(self.start)
            options: dict[str, Any] = {"pixel_vr": "OB" if self.bits <= 8 else "OW", **self.options}
            values, _ = get_decoder(self.syntax).as_array(file, index=frame, raw=True, **options)
        return values


# -- the stacks of a file --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _StackFrame:
    """One frame: its number in the file `path`, and the items of the functional groups that hold for it."""

    path: str
    number: int
    groups: tuple[Any, ...]

    def item(self, sequence: str) -> Any:
        """Return the item of a sequence, the frame's own or the one that all share; None where there is none."""
        return next((items[0] for group in self.groups if (items := group.get(sequence))), None)

    def needed(self, sequence: str, keyword: str) -> Any:
        item = self.item(sequence)
        if item is None or item.get(keyword) is None:
            raise UnsupportedStoreError(
                f"{self.path!r}: frame {self.number + 1} has no {keyword}, so where it lies is unknown; write it with "
                f"{sequence}, or read the frames by a source of your own (jigsaw.io.ArraySource)"
            )
        return item[keyword].value

    @property
    def content(self) -> Any:
        return self.item("FrameContentSequence") or {}

    @cached_property
    def place(self) -> NDArray[np.float64]:
        return np.array(self.needed("PlanePositionSequence", "ImagePositionPatient"), np.float64)

    @cached_property
    def plane(self) -> NDArray[np.float64]:
        """The directions of rows and columns, then the distances between rows and between columns."""
        directions = self.needed("PlaneOrientationSequence", "ImageOrientationPatient")
        return np.array([*directions, *self.needed("PixelMeasuresSequence", "PixelSpacing")], np.float64)

    @property
    def transformation(self) -> tuple[float, float] | None:
        item = self.item("PixelValueTransformationSequence")
        return None if item is None else (float(item.RescaleSlope), float(item.RescaleIntercept))

    @property
    def segment(self) -> int:
        item = self.item("SegmentIdentificationSequence")
        return 0 if item is None else int(item.ReferencedSegmentNumber)


def _stacks(path: str, head: Any) -> dict[str, list[_StackFrame]]:
    """Return the frames of each stack and time, by the name of its array."""
    shared = tuple(head.get("SharedFunctionalGroupsSequence") or ())
    frames = [_StackFrame(path, i, (own, *shared)) for i, own in enumerate(head.PerFrameFunctionalGroupsSequence)]
    marks = [(each.content.get("StackID"), each.content.get("TemporalPositionIndex")) for each in frames]
    several_stacks, several_times = (len(set(values)) > 1 for values in zip(*marks, strict=True))
    stacks: dict[str, list[_StackFrame]] = {}
    for frame, (stack, time) in zip(frames, marks, strict=True):
        words = [f"stack {stack}"] * several_stacks + [f"time {time}"] * several_times
        stacks.setdefault(", ".join(words) or DICOM_ARRAY_NAME, []).append(frame)
    return stacks


def _table_of_stack(path: str, name: str, head: Any, pixels: _PixelFormat, stack: Sequence[_StackFrame]) -> ArrayTable:
    kind = head.get("SegmentationType")
    described = {int(each.SegmentNumber): str(each.SegmentLabel) for each in head.get("SegmentSequence") or ()}
    # a label map has all segments in each frame
    segments = sorted(described) if kind is not None and stack[0].segment else []
    depths, affine = _grid_of_stack(path, name, stack, sparse=kind is not None)
    frames: dict[tuple[int, ...], int] = {}
    for frame, depth in zip(stack, depths, strict=True):
        lead = (segments.index(frame.segment), depth) if len(segments) > 1 else (depth,)
        if lead in frames:
            raise GridError(
                f"{path!r}: frames {frames[lead] + 1} and {frame.number + 1} of {name!r} lie in the same place, as "
                f"those of several echoes or directions do; {_SPLIT_REMEDY}"
            )
        frames[lead] = frame.number
    attrs: dict[str, Any] = {"affine": affine.tolist()}
    if segments:
        attrs["segments"] = [described[number] for number in segments]
    slopes = _slopes_of_stack(path, stack, head)
    if len(set(slopes.values())) == 1 and (common := next(iter(slopes.values()))) != (1.0, 0.0):
        attrs |= {"scale_factor": common[0], "add_offset": common[1]}
    reader = _FrameReader(pixels, frames, slopes if len(set(slopes.values())) > 1 else {})
    shape = (*((len(segments),) if len(segments) > 1 else ()), max(depths) + 1, pixels.rows, pixels.columns)
    plain = pixels.plain and not reader.slopes
    return ArrayTable(
        name=name,
        shape=shape,
        dims=("channel", "z", "y", "x")[-len(shape) :],
        dtype=(pixels.dtype if plain else reader.dtype).str,
        chunks=(*(1 for _ in shape[:-2]), pixels.rows, pixels.columns),
        attrs=attrs,
        places=reader,
        fill_value=0,
        decoder=CodecDecoder(pixels.dtype, tuple(range(len(shape)))) if plain else None,
        load_slowly=reader.values_of_box,
        slices=not pixels.compressed,
        clipped=True,
    )


def _slopes_of_stack(path: str, stack: Sequence[_StackFrame], head: Any) -> dict[int, tuple[float, float]]:
    """Return slope and intercept of each frame; a fractional segmentation has its largest value as 1."""
    if head.get("SegmentationType") == "FRACTIONAL":
        return {each.number: (1 / float(head.MaximumFractionalValue), 0.0) for each in stack}
    slopes = {each.number: each.transformation for each in stack}
    lacking = [number + 1 for number, slope in slopes.items() if slope is None]
    if 0 < len(lacking) < len(slopes):
        raise UnsupportedStoreError(
            f"{path!r}: frame {lacking[0]} has no PixelValueTransformationSequence and others have one, so its values "
            f"are in unknown units; {_SPLIT_REMEDY}"
        )
    return {number: slope or (1.0, 0.0) for number, slope in slopes.items()}


def _grid_of_stack(
    path: str, name: str, stack: Sequence[_StackFrame], sparse: bool
) -> tuple[list[int], NDArray[np.float64]]:
    """Return the row along z of each frame, and the affine from (x, y, z, 1) to the world.

    A `sparse` stack may leave frames out, where it says how far slices lie apart.
    """
    plane, places = stack[0].plane, np.array([each.place for each in stack])
    for frame in stack:
        if not np.allclose(frame.plane, plane, rtol=0, atol=1e-4):
            raise GridError(
                f"{path!r}: frame {frame.number + 1} of {name!r} lies along other directions or has other pixel "
                f"distances than frame {stack[0].number + 1}; {_SPLIT_REMEDY}"
            )
    right, down = plane[:3], plane[3:6]
    normal = np.cross(right, down)
    depths = places @ normal
    first = places[int(np.argmin(depths))]
    heights = np.unique(depths)
    heights = heights[np.concatenate([[True], np.diff(heights) > _PLACE_TOLERANCE])]
    measures = stack[0].item("PixelMeasuresSequence")
    apart = measures.get("SpacingBetweenSlices")
    if len(heights) == 1 and (apart := apart or measures.get("SliceThickness")) is None:
        raise GridError(f"{path!r}: {name!r} is one slice, and says neither SpacingBetweenSlices nor SliceThickness")
    if len(heights) == 1 or (sparse and apart):
        step = normal * abs(float(apart))
    else:
        step = (places[int(np.argmax(depths))] - first) / (len(heights) - 1)
    rows = np.rint((depths - depths.min()) / (step @ normal)).astype(int)
    off = np.abs(first + rows[:, None] * step - places).max(1)
    if not off.max() <= _PLACE_TOLERANCE or (not sparse and len(set(rows.tolist())) < len(heights)):
        worst = int(np.argmax(off))
        gaps = np.diff(heights)
        raise GridError(
            f"{path!r}: frames of {name!r} are missing, or lie unevenly: slices are {gaps.min():g} to {gaps.max():g} "
            f"mm apart, and frame {stack[worst].number + 1} is {off[worst]:g} mm beside its row; restore the frames, "
            "or resample the volume"
        )
    affine = np.eye(4)
    affine[:3] = np.c_[right * plane[7], down * plane[6], step, first]
    affine[:2] *= -1  # from the left and the back, as DICOM counts, to the right and the front, as nibabel does
    return rows.tolist(), affine


@dataclass(frozen=True)
class _FrameReader:
    """Places and values of a stack: `frames` has the frame at each (channel and) row along z.

    `slopes` has slope and intercept of each frame where they differ.
    """

    pixels: _PixelFormat
    frames: Mapping[tuple[int, ...], int]
    slopes: Mapping[int, tuple[float, float]]
    files: slabs.PresentFiles = field(default_factory=lambda: slabs.PresentFiles(LocalFiles(keep=True)))

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype("f4") if self.slopes else self.pixels.dtype.newbyteorder("=")

    def path(self, index: ChunkIndex) -> str:
        return self.pixels.path

    def locate(self, index: ChunkIndex) -> ChunkRef | None:
        """Return the bytes of a frame; None for one that a segmentation left out because it has nothing there."""
        frame = self.frames.get(tuple(index[:-2]))
        if frame is None:
            return None
        start, stop = self.pixels.bytes_of_frame(frame)
        return ChunkRef(self.pixels.path, start, stop - start)

    def values_of_box(self, box: Box) -> NDArray[Any]:
        values = np.zeros(box_shape(box), self.dtype)
        for lead, frame in self._frames_of(box):
            rows = self.pixels.read(self.files, frame, box[-2])[:, slice(*box[-1])]
            if self.slopes:
                slope, intercept = self.slopes[frame]
                rows = rows * slope + intercept
            values[lead] = rows
        return values

    def _frames_of(self, box: Box) -> Iterator[tuple[tuple[int, ...], int]]:
        """Return the place in a box and the number of each frame that it has."""
        for lead in product(*(range(a, b) for a, b in box[:-2])):
            if (frame := self.frames.get(lead)) is not None:
                yield tuple(i - a for i, (a, _) in zip(lead, box, strict=False)), frame
