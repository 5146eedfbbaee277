"""Chunk that is decoded as it is fetched, from beginning to end, in the memory of a few blocks instead of its own."""

from __future__ import annotations

from jigsaw.io.chunks.blosc import BloscFrame
from jigsaw.io.chunks.chunk import ChunkRef
from jigsaw.io.chunks.codecs import BadChunkError, ByteArray
from jigsaw.io.chunks.files import ByteAllocator, StoreFiles
from jigsaw.io.chunks.memory import fresh_memory


class ChunkStream:
    """The decoded bytes of a chunk in order: of a Blosc `frame` whose blocks lie in order, or stored as they are."""

    def __init__(
        self, files: StoreFiles, ref: ChunkRef, size: int, frame: BloscFrame | None, room: ByteAllocator
    ) -> None:
        self._files, self._ref, self._size, self._frame, self._room = files, ref, size, frame, room
        self._at = 0
        self._block = fresh_memory(0 if frame is None else min(frame.block, size))
        self._rest = self._block[:0]

    def read(self, out: ByteArray) -> None:
        """Fill `out` with the next bytes."""
        done = min(self._rest.size, out.size)
        out[:done], self._rest = self._rest[:done], self._rest[done:]
        if done == out.size:
            return
        if self._frame is None:
            self._fetch(self._at, out[done:])
            self._at += out.size - done
        else:
            self._blocks(self._frame, out[done:])

    def _blocks(self, frame: BloscFrame, out: ByteArray) -> None:
        """Decode the blocks that end within `out`, and the beginning of the one that does not, whose rest is kept."""
        whole = out.size if self._at + out.size == self._size else out.size // frame.block * frame.block
        if whole:
            self._decode(frame, out[:whole])
        if whole < out.size:
            block = self._block[: self._size - self._at]
            self._decode(frame, block)
            out[whole:], self._rest = block[: out.size - whole], block[out.size - whole :]

    def _decode(self, frame: BloscFrame, out: ByteArray) -> None:
        first = self._at // frame.block
        frame.run(first, first - (-out.size // frame.block), self._fetch, self._room, out)
        self._at += out.size

    def _fetch(self, offset: int, memory: ByteArray) -> None:
        if not self._files.ranges(self._ref.path, [(self._ref.offset + offset, memory)]):
            raise BadChunkError("it vanished while it was read")
