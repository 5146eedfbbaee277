"""Codecs from a chunk's stored bytes to its values in the caller's memory: Blosc, Zstandard and LZ4 decode straight
into it, without holding the GIL; zlib's output is copied there.

A `CodecDecoder` knows the codecs that nearly all stores use. `decoder_of_zarr_v2` and `decoder_of_zarr_v3` return None
for a pipeline that it does not know. The reader then decodes that array by zarr itself, and counts it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jigsaw.io.chunks.blosc import DecodeStep, decode_blosc_frame
from jigsaw.io.chunks.files import BadChunkError, ByteArray, ShortChunkError

_RUN_CODE = ("pickle", "dill", "marshal", "joblib")


@dataclass(frozen=True)
class CodecDecoder:
    """Stored bytes of one chunk -> its values in C order of the *stored* dims' `order`, in `dtype`.

    `compression` is None for plain bytes.  `checked` says that a CRC-32C closes the stored bytes.
    """

    dtype: np.dtype[Any]
    order: tuple[int, ...]
    compression: str | None = None
    checked: bool = False

    @property
    def splits(self) -> bool:
        return not self.checked and self.compression in (None, "blosc")

    @property
    def is_plain(self) -> bool:
        return self.compression is None and not self.checked

    def decode(self, raw: ByteArray, out: ByteArray, mask: int = 0) -> None:
        """Fill `out`, which has exactly the chunk's size; Zarr leaves no filter out, so `mask` is 0.

        Raises: `BadChunkError` for what is cut short, damaged, or claims another size.
        """
        if self.checked:
            raw = without_crc(raw)
        if self.compression is None:
            check_same_size(raw, out)
            out[:] = raw
            return
        try:
            _DECODE_STEPS[self.compression](raw, out)
        except (RuntimeError, ValueError, struct.error, zlib.error) as e:
            raise BadChunkError(str(e)) from e


def check_same_size(raw: ByteArray, out: ByteArray) -> None:
    """Refuse decoded bytes that are fewer or more than the chunk's."""
    if raw.size != out.size:
        kind = ShortChunkError if raw.size < out.size else BadChunkError
        raise kind(f"it has {raw.size} bytes and the chunk has {out.size}")


def without_crc(raw: ByteArray) -> ByteArray:
    """Return the stored bytes without their closing CRC-32C, which must match."""
    from google_crc32c import value as crc32c

    if raw.size < 4:
        raise ShortChunkError(f"it has {raw.size} bytes, too few for its checksum")
    body, stored = raw[:-4], int.from_bytes(raw[-4:].tobytes(), "little")
    if crc32c(body) != stored:
        raise BadChunkError("its CRC-32C does not match")
    return body


def _check_claimed_size(claimed: int, out: ByteArray) -> None:
    if claimed != out.size:
        raise BadChunkError(f"its header claims {claimed} decoded bytes and the chunk has {out.size}")


def zstd_frame_size(raw: ByteArray) -> int | None:
    """Return the decoded size in a Zstandard frame's header, if it is there."""
    if raw.size < 6 or raw[:4].tobytes() != b"\x28\xb5\x2f\xfd":
        raise BadChunkError("it does not begin with a Zstandard frame")
    descriptor = int(raw[4])
    single, flag = descriptor >> 5 & 1, descriptor >> 6
    width = (1 if single else 0, 2, 4, 8)[flag]
    at = 5 + (0 if single else 1) + (0, 1, 2, 4)[descriptor & 3]
    if not width:
        return None
    if raw.size < at + width:
        raise ShortChunkError(f"it has {raw.size} bytes, too few for a Zstandard header")
    return int.from_bytes(raw[at : at + width].tobytes(), "little") + (256 if width == 2 else 0)


def _decode_zstd(raw: ByteArray, out: ByteArray) -> None:
    from numcodecs import zstd  # pyright: ignore[reportAttributeAccessIssue]

    size = zstd_frame_size(raw)
    if size is not None:  # of a streamed frame it shows while decoding, which never goes beyond `out`
        _check_claimed_size(size, out)
    zstd.decompress(raw, out)


def _decode_lz4(raw: ByteArray, out: ByteArray) -> None:
    from numcodecs import lz4  # pyright: ignore[reportAttributeAccessIssue]

    if raw.size < 4:
        raise ShortChunkError(f"it has {raw.size} bytes, too few for an LZ4 header")
    _check_claimed_size(int.from_bytes(raw[:4].tobytes(), "little"), out)
    lz4.decompress(raw, out)


def _decode_deflate(raw: ByteArray, out: ByteArray) -> None:
    """Decode zlib and gzip, also of several members, and never more than the chunk's size."""
    done, rest = 0, memoryview(raw.data)
    while rest:
        engine = zlib.decompressobj(wbits=47)  # either header
        part = engine.decompress(rest, out.size - done + 1)
        if done + len(part) > out.size:
            raise BadChunkError(f"it decodes to more than the chunk's {out.size} bytes")
        if not engine.eof:
            raise ShortChunkError(f"its compressed stream ends after {done + len(part)} of {out.size} bytes")
        out[done : done + len(part)] = np.frombuffer(part, np.uint8)
        done, rest = done + len(part), memoryview(engine.unused_data)
    if done != out.size:
        raise BadChunkError(f"it decodes to {done} bytes and the chunk has {out.size}")


_DECODE_STEPS: dict[str, DecodeStep] = {
    "blosc": decode_blosc_frame,
    "zstd": _decode_zstd,
    "lz4": _decode_lz4,
    "zlib": _decode_deflate,
    "gzip": _decode_deflate,
}


def decoder_of_zarr_v2(
    dtype: np.dtype[Any], order: str, ndim: int, filters: Sequence[Any], compressor: Any
) -> CodecDecoder | None:
    """Return the decoder of a zarr v2 array, or None when it is not one of the fast ones."""
    name = None if compressor is None else str(compressor.codec_id)
    if filters or not _is_number_dtype(dtype) or name not in (None, *_DECODE_STEPS):
        return None
    dims = tuple(range(ndim))
    return CodecDecoder(dtype, dims[::-1] if order == "F" else dims, name)


def decoder_of_zarr_v3(dtype: np.dtype[Any], ndim: int, codecs: Sequence[Any]) -> CodecDecoder | None:
    """Return the decoder of a zarr v3 codec chain: [transpose], bytes, [one compressor], [crc32c]; else None."""
    rest = [codec.to_dict() for codec in codecs]
    order = tuple(range(ndim))
    if rest and rest[0]["name"] == "transpose":
        order = tuple(rest.pop(0)["configuration"]["order"])
    if not rest or rest[0]["name"] != "bytes" or not _is_number_dtype(dtype):
        return None
    endian = (rest.pop(0).get("configuration") or {}).get("endian")
    names = [codec["name"] for codec in rest]
    checked = bool(names) and names[-1] == "crc32c"
    compressors = names[:-1] if checked else names
    if len(compressors) > 1 or any(name not in _DECODE_STEPS for name in compressors):
        return None
    stored = dtype.newbyteorder(">" if str(getattr(endian, "value", endian)) == "big" else "<")
    return CodecDecoder(stored, order, compressors[0] if compressors else None, checked)


def codec_that_runs_code(codecs: Sequence[Any]) -> str | None:
    """Return the name of the first of zarr's codecs that decodes a chunk by running code in the chunk; else None."""
    configs = [codec.get_config() if hasattr(codec, "get_config") else codec.to_dict() for codec in codecs]
    return next((name for name in _codec_names(configs) if any(each in name.lower() for each in _RUN_CODE)), None)


def _codec_names(configs: Any) -> Iterator[str]:
    """Yield the names of codecs, and of those inside them, such as a shard's."""
    if isinstance(configs, Mapping):
        yield from (str(configs[key]) for key in ("id", "name") if key in configs)
        configs = list(configs.values())
    if isinstance(configs, list | tuple):
        for each in configs:
            yield from _codec_names(each)


def _is_number_dtype(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biuf"
