"""Zlib streams by libdeflate, straight into the caller's memory and without the GIL.

The library comes with the wheel ``deflate``, whose own functions hold the GIL and return memory of their own; its
exported C functions are called instead. Without the wheel, or where it hides them, Python's zlib decodes: the same
values in about twice the time. One core, a float32 field of 4 MB, shuffled, level 4: libdeflate 9 ms, ISA-L 14, zlib-ng
11, zlib 20.
"""

from __future__ import annotations

import ctypes
import threading
from functools import cache
from importlib import import_module
from typing import Any

from jigsaw.io.chunks.codecs import CodecDecoder
from jigsaw.io.chunks.files import BadChunkError, ByteArray

_FAILURE_TEXTS = {1: "its compressed stream is damaged or cut short", 2: "it decodes to fewer", 3: "it decodes to more"}


@cache
def libdeflate_functions() -> Any:
    """Return the C functions of libdeflate; None where they are not available."""
    try:
        found = ctypes.CDLL(str(import_module("deflate._deflate").__file__))
        found.libdeflate_alloc_decompressor.restype = ctypes.c_void_p
        found.libdeflate_free_decompressor.argtypes = [ctypes.c_void_p]
        found.libdeflate_free_decompressor.restype = None
        call = found.libdeflate_zlib_decompress
    except (ImportError, OSError, AttributeError):
        return None
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    call.argtypes, call.restype = [pointer, pointer, size, pointer, size, pointer], ctypes.c_int
    return found


class _Decompressor(threading.local):
    """A decompressor of each thread."""

    def __init__(self) -> None:
        self.library = libdeflate_functions()
        self.handle = self.library and self.library.libdeflate_alloc_decompressor()

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self.library.libdeflate_free_decompressor(self.handle)


_decompressor = _Decompressor()


def inflate_zlib(raw: ByteArray, out: ByteArray, decoder: CodecDecoder) -> None:
    """Decode a zlib stream that must fill `out`; `decoder` is what does it without libdeflate."""
    if not _decompressor.handle:
        decoder.decode(raw, out)
        return
    decode = _decompressor.library.libdeflate_zlib_decompress
    failed = decode(_decompressor.handle, raw.ctypes.data, raw.size, out.ctypes.data, out.size, None)
    if failed:
        size = "" if failed == 1 else f" than the chunk's {out.size} bytes"
        raise BadChunkError(_FAILURE_TEXTS.get(failed, f"libdeflate failed with {failed}") + size)
