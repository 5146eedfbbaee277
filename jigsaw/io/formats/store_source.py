"""Source of a dataset's store: what the user gave to open it, and how another process opens it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from jigsaw.errors import FieldError, ReadError, redacted_text
from jigsaw.io.chunks.array_table import ArrayStore
from jigsaw.io.formats.disk_cache import DiskCache
from jigsaw.io.formats.ome import is_multiscale_group, multiscale_level
from jigsaw.io.formats.store import open_store


@dataclass(frozen=True, eq=False)
class StoreSource:
    """Source that a store is opened from. It pickles as that, and is opened on first use."""

    given: Any
    options: Mapping[str, Any] | None = None
    disk_cache: DiskCache | None = None
    level: int | None = None

    @cached_property
    def store(self) -> ArrayStore:
        """The opened store. Raises what `open_store` raises, and `FieldError` for anything but a `DiskCache`."""
        if self.disk_cache is not None and not isinstance(self.disk_cache, DiskCache):
            raise FieldError(
                f"disk_cache={self.disk_cache!r} must be a DiskCache: a folder, and how many bytes it may take, like "
                "jigsaw.io.DiskCache('cache', 10**11)"
            )
        opened = open_store(self.given, self.options)
        if self.level is not None or is_multiscale_group(opened.attrs):
            opened = multiscale_level(opened, self.level or 0)
        return opened if self.disk_cache is None else self.disk_cache.of(opened)

    def __repr__(self) -> str:
        return f"Source({redacted_text(repr(self.given))}, options={sorted(self.options or {})}, level={self.level})"

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.given, ArrayStore):
            raise ReadError(
                f"a dataset of an opened Store ({self.given.url}) cannot be pickled: its files are open in this "
                "process; give jigsaw.io.open the path or URL instead"
            )
        return {f.name: getattr(self, f.name) for f in fields(self)}
