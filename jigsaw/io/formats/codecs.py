"""From a chunk's stored bytes to its values, straight into the caller's memory, without holding the GIL.

A `Decoder` knows the codecs that nearly all stores use.  `decoder_of` returns None for a pipeline that it does not
know; the reader then asks zarr's own pipeline for that array, and counts it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
_RUN_CODE = ("pickle", "dill", "marshal", "joblib")
Step = Callable[[Bytes, Bytes], None]


class BadChunkError(Exception):
    """Why a chunk cannot be decoded; the caller adds which chunk."""


class ShortChunkError(BadChunkError):
    """A chunk whose stored bytes end too early."""


@dataclass(frozen=True)
class Decoder:
    """Stored bytes of one chunk -> its values in C order of the *stored* dims' `order`, in `dtype`.

    `compression` is None for plain bytes.  `checked` says that a CRC-32C closes the stored bytes.
    """

    dtype: np.dtype[Any]
    order: tuple[int, ...]
    compression: str | None = None
    checked: bool = False

    @property
    def splits(self) -> bool:
        """Whether a part of a chunk can be decoded without the rest."""
        return not self.checked and self.compression in (None, "blosc")

    @property
    def is_plain(self) -> bool:
        """Whether the stored bytes are the values, so that they can be read in place."""
        return self.compression is None and not self.checked

    def decode(self, raw: Bytes, out: Bytes, mask: int = 0) -> None:
        """Fill `out`, which has exactly the chunk's size; Zarr leaves no filter out, so `mask` is 0.

        Raises: `BadChunkError` for what is cut short, damaged, or claims another size.
        """
        if self.checked:
            raw = without_crc(raw)
        if self.compression is None:
            if raw.size != out.size:
                kind = ShortChunkError if raw.size < out.size else BadChunkError
                raise kind(f"it has {raw.size} bytes and the chunk has {out.size}")
            out[:] = raw
            return
        try:
            _STEPS[self.compression](raw, out)
        except (RuntimeError, ValueError, struct.error, zlib.error) as e:
            raise BadChunkError(str(e)) from e


def without_crc(raw: Bytes) -> Bytes:
    """The stored bytes before their closing CRC-32C, which must match."""
    from google_crc32c import value as crc32c

    if raw.size < 4:
        raise ShortChunkError(f"it has {raw.size} bytes, too few for its checksum")
    body, stored = raw[:-4], int.from_bytes(raw[-4:].tobytes(), "little")
    if crc32c(body.tobytes()) != stored:
        raise BadChunkError("its CRC-32C does not match")
    return body


def _claims(claimed: int, out: Bytes) -> None:
    if claimed != out.size:
        raise BadChunkError(f"its header claims {claimed} decoded bytes and the chunk has {out.size}")


@cache
def _of_blosc() -> tuple[Callable[[Bytes, int], None], Step]:
    """What checks a frame, and what decodes it: to import them at every chunk would take as long as to check it."""
    from numcodecs import blosc  # pyright: ignore[reportAttributeAccessIssue]

    from jigsaw.io.formats.blosc import check  # which builds on this file

    return check, blosc.decompress


def _blosc(raw: Bytes, out: Bytes) -> None:
    check, decompress = _of_blosc()
    check(raw, out.size)
    decompress(raw, out)


def blosc_decode(frame: Bytes, out: Bytes) -> None:
    """Decode a Blosc frame that fills `out`.

    Raises: `BadChunkError` when it is damaged.
    """
    try:
        _blosc(frame, out)
    except (RuntimeError, ValueError) as e:
        raise BadChunkError(str(e)) from e


def _zstd_size(raw: Bytes) -> int | None:
    """The decoded size that a Zstandard frame's header gives, if it does."""
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


def _zstd(raw: Bytes, out: Bytes) -> None:
    from numcodecs import zstd  # pyright: ignore[reportAttributeAccessIssue]

    size = _zstd_size(raw)
    if size is not None:  # of a streamed frame it shows while decoding, which never goes beyond `out`
        _claims(size, out)
    zstd.decompress(raw, out)


def _lz4(raw: Bytes, out: Bytes) -> None:
    from numcodecs import lz4  # pyright: ignore[reportAttributeAccessIssue]

    if raw.size < 4:
        raise ShortChunkError(f"it has {raw.size} bytes, too few for an LZ4 header")
    _claims(int.from_bytes(raw[:4].tobytes(), "little"), out)
    lz4.decompress(raw, out)


def _deflate(raw: Bytes, out: Bytes) -> None:
    """Zlib and gzip, several members included; never decodes more than the chunk's size."""
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


_STEPS: dict[str, Step] = {"blosc": _blosc, "zstd": _zstd, "lz4": _lz4, "zlib": _deflate, "gzip": _deflate}


def decoder_of_v2(
    dtype: np.dtype[Any], order: str, ndim: int, filters: Sequence[Any], compressor: Any
) -> Decoder | None:
    """The decoder of a zarr v2 array, or None when it is not one of the fast ones."""
    name = None if compressor is None else str(compressor.codec_id)
    if filters or not _is_number(dtype) or name not in (None, *_STEPS):
        return None
    dims = tuple(range(ndim))
    return Decoder(dtype, dims[::-1] if order == "F" else dims, name)


def decoder_of_v3(dtype: np.dtype[Any], ndim: int, codecs: Sequence[Any]) -> Decoder | None:
    """The decoder of a zarr v3 codec chain: [transpose], bytes, [one compressor], [crc32c]; else None."""
    rest = [codec.to_dict() for codec in codecs]
    order = tuple(range(ndim))
    if rest and rest[0]["name"] == "transpose":
        order = tuple(rest.pop(0)["configuration"]["order"])
    if not rest or rest[0]["name"] != "bytes" or not _is_number(dtype):
        return None
    endian = (rest.pop(0).get("configuration") or {}).get("endian")
    names = [codec["name"] for codec in rest]
    checked = bool(names) and names[-1] == "crc32c"
    compressors = names[:-1] if checked else names
    if len(compressors) > 1 or any(name not in _STEPS for name in compressors):
        return None
    stored = dtype.newbyteorder(">" if str(getattr(endian, "value", endian)) == "big" else "<")
    return Decoder(stored, order, compressors[0] if compressors else None, checked)


def codec_that_runs_code(codecs: Sequence[Any]) -> str | None:
    """The name of the first of zarr's codecs that decodes a chunk by running what the chunk says; else None."""
    said = [codec.get_config() if hasattr(codec, "get_config") else codec.to_dict() for codec in codecs]
    return next((name for name in _names(said) if any(each in name.lower() for each in _RUN_CODE)), None)


def _names(said: Any) -> Iterator[str]:
    """The names of codecs, and of those within them, as a shard has some."""
    if isinstance(said, Mapping):
        yield from (str(said[key]) for key in ("id", "name") if key in said)
        said = list(said.values())
    if isinstance(said, list | tuple):
        for each in said:
            yield from _names(each)


def _is_number(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "biuf"
