"""Zarr v3: every rank writes its own chunks or shards; one file, replaced atomically, says what is complete.

Chunks of new steps are written while the store's metadata still has its old shape. Then the first rank writes the root
``zarr.json``, which holds the metadata of all arrays (consolidated) and the number of complete steps. So readers see
whole steps only, whenever its writers ended.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from base64 import standard_b64encode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from struct import pack
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from jigsaw.drafts import draft_of, path_of_draft, unforeseen_name
from jigsaw.errors import WriteError, imports_needed
from jigsaw.geometry.cut import Box, box_slices
from jigsaw.io.writing.cf import StoredCoordinate, plain_attribute
from jigsaw.io.writing.deliver import (
    StoreCompleteness,
    completeness_from_attrs,
    failing_with_remedy,
    listed_coordinates,
    reading_growing_store,
)
from jigsaw.io.writing.outline import ArrayOutline, GrowingStore, StoredArrays, StoredCoordinates

_ZARR_CHUNK_STEPS = 1024
_METADATA_NAMES = ("zarr.json", ".zgroup", ".zarray", ".zattrs", ".zmetadata")
_CHUNK_NAME = re.compile(r"(c|(c\.)?\d+(\.\d+)*)(\.[0-9a-f]{32}\.partial)?")
"""Chunk or a folder of chunks: ``c``, ``0``, ``0.1``, ``c.0.1``; also while zarr writes it."""


class ZarrSink:
    """A local Zarr v3 group that every rank writes to."""

    writers: tuple[int, ...] = ()

    def __init__(
        self,
        path: Path,
        append_dim: str | None,
        encoding: Mapping[str, Any],
        remedy: str = "go on with mode='a': the steps that were complete are there",
    ) -> None:
        self.path, self.remedy, self._dim = path, remedy, append_dim
        self._encoding = {k: v for k, v in encoding.items() if k not in ("dtype", "compressors")}
        self._compressors = encoding.get("compressors", "auto")
        self._arrays: dict[str, Any] = {}
        self._attrs: dict[str, Any] = {}
        self._documents: dict[str, dict[str, Any]] = {}
        """Documents that each array's ``zarr.json`` holds, or will hold."""
        self._left: tuple[StoreCompleteness | None, Mapping[str, Any]] = None, {}
        """The store's completeness and the shapes of its arrays, as this sink found or left them last."""

    def find(self, append_dim: str) -> GrowingStore | None:
        """Return the store as far as it is complete, whatever was being added when its writer ended."""
        if not self.path.exists() or not any(self.path.iterdir()):
            return None
        group = _import_zarr().open_group(str(self.path), mode="r")
        done = completeness_from_attrs(dict(group.attrs))
        if group.metadata.zarr_format != 3:
            raise WriteError(f"{self.path} is Zarr v2; convert it to v3 to append, or write a new store")
        members: Any = dict(group.members(max_depth=None))
        if done is not None and not members:
            return None  # the writer ended before the first step was complete
        if done is not None and done.append_dim not in (None, append_dim):
            raise WriteError(f"{self.path} grows along {done.append_dim!r}, not append_dim={append_dim!r}")
        self._attrs = dict(group.attrs)
        root = self._document("zarr.json")
        self._left = _state_of_root(root)
        self._documents = dict(_listed_documents(root)) or {
            name: self._document(f"{name}/zarr.json") for name in members
        }
        top = {name: a for name, a in members.items() if isinstance(a, _import_zarr().Array) and "/" not in name}
        listed_names = listed_coordinates(a.attrs for a in top.values())
        dims = {name: tuple(a.metadata.dimension_names or ()) for name, a in top.items()}
        coords = {
            name: StoredCoordinate(name, dims[name], np.asarray(a[...]), dict(a.attrs))
            for name, a in top.items()
            if name in listed_names or dims[name] == (name,)
        }
        arrays = {
            name: ArrayOutline(name, dims[name], a.shape, a.dtype.name, a.chunks, a.shards, dict(a.attrs))
            for name, a in top.items()
            if name not in coords
        }
        sizes = {n for a in arrays.values() for d, n in zip(a.dims, a.shape, strict=True) if d == append_dim}
        if len(sizes) != 1:
            raise WriteError(f"{self.path} has no array that can grow along append_dim={append_dim!r}")
        return GrowingStore(arrays, coords, sizes.pop())

    @reading_growing_store
    def stored_steps(self, append_dim: str) -> int:
        """Return the number of complete steps that are there; this sink stays as it is."""
        growing = ZarrSink(self.path, append_dim, {}).find(append_dim)
        return 0 if growing is None else growing.steps

    @failing_with_remedy
    def create(self, arrays: StoredArrays, coords: StoredCoordinates, attrs: Mapping[str, Any], replace: bool) -> None:
        """Write the root first, with nothing complete, then the arrays that it does not list yet.

        All arrays are created in memory before an old store is removed, which stays where zarr refuses one of them.
        """
        zarr = _import_zarr()
        self._attrs = {name: plain_attribute(value) for name, value in attrs.items()}
        _check_json(self._attrs)
        options = {item.name: self._options_of_array(item) for item in (*arrays, *coords)}
        for name, each in options.items():
            try:
                zarr.create_array(zarr.storage.MemoryStore(), **each)
            except Exception as error:
                raise WriteError(f"{self.path} is not written: zarr refuses array {name!r}: {error}") from error
        if self.path.exists():
            self._clear(replace)
        self._write_root(StoreCompleteness(self._dim, 0, False))
        for name, each in options.items():
            zarr.create_array(f"{self.path}/{name}", **each)
            self._documents[name] = self._document(f"{name}/zarr.json")

    def _options_of_array(self, item: ArrayOutline | StoredCoordinate) -> dict[str, Any]:
        """Return arguments of `zarr.create_array` for an array without a row along the dim that grows."""
        if isinstance(item, ArrayOutline):
            layout = {"chunks": item.chunks, "shards": item.shards, **self._encoding}
            shape, dtype, fill, compressors = item.shape, item.dtype, item.fill, self._compressors
        else:
            shape, kind = item.values.shape, item.values.dtype.kind
            sizes = zip(item.dims, shape, strict=True)
            layout = {"chunks": tuple(_ZARR_CHUNK_STEPS if d == self._dim else max(n, 1) for d, n in sizes)}
            dtype, fill = str if kind == "U" else item.values.dtype, np.nan if kind == "f" else None
            compressors = "auto"
        return {
            "shape": tuple(0 if d == self._dim else n for d, n in zip(item.dims, shape, strict=True)),
            "dtype": dtype,
            "fill_value": fill,
            "dimension_names": item.dims,
            "attributes": _zarr_attributes(item, dtype),
            "zarr_format": 3,
            "compressors": _with_checksum(compressors),
            **layout,
        }

    def _clear(self, replace: bool) -> None:
        if self.path.is_dir() and not any(self.path.iterdir()):
            return
        if not replace:
            raise WriteError(f"{self.path} exists; write elsewhere, or choose mode='w' to replace or 'a' to append")
        if not is_zarr_group(self.path):
            raise WriteError(f"{self.path} is not a Zarr store, so mode='w' does not replace it; remove it yourself")
        remove_zarr_store(self.path)

    @failing_with_remedy
    def check_untouched(self) -> None:
        """Compare the root with what this sink found or left there; another writer would be overwritten in silence."""
        anew = "only one writer at a time may grow a store; open it anew with mode='a'"
        try:
            done, shapes = _state_of_root(self._document("zarr.json"))
        except FileNotFoundError:
            raise WriteError(f"{self.path} was removed while this writer had it open; write it again") from None
        known, known_shapes = self._left
        if done is not None and done.steps != (0 if known is None else known.steps):
            of_known = "no count of them" if known is None else known.steps
            raise WriteError(
                f"another writer has appended to {self.path}, or replaced it: it has {done.steps} complete steps and "
                f"this writer knows of {of_known}; {anew}"
            )
        if done != known or any(shapes[name] != known_shapes[name] for name in {*shapes} & {*known_shapes}):
            raise WriteError(f"another writer has changed {self.path} since this writer's last step; {anew}")

    @failing_with_remedy
    def commit(self, coords: StoredCoordinates, start: int, done: StoreCompleteness) -> None:
        for c in coords:
            first = [start if d == self._dim else 0 for d in c.dims]
            shape = tuple(a + n for a, n in zip(first, c.values.shape, strict=True))
            self._open(c.name, shape)[tuple(slice(a, b) for a, b in zip(first, shape, strict=True))] = c.values
        for name in self._arrays:
            self._replace(f"{name}/zarr.json", self._documents[name])
        self._write_root(done)

    def _write_root(self, done: StoreCompleteness) -> None:
        listed = self._documents if done.steps or done.closed else {}
        documents = {name: listed[name] for name in sorted(listed, key=lambda name: (name.count("/"), name))}
        root = {
            "attributes": {**self._attrs, **done.attrs()},
            "zarr_format": 3,
            "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": documents},
            "node_type": "group",
        }
        self._replace("zarr.json", root)
        self._left = _state_of_root(root)

    def _document(self, key: str) -> dict[str, Any]:
        return json.loads((self.path / key).read_bytes())

    def _replace(self, key: str, document: Mapping[str, Any]) -> None:
        """Write a metadata file beside and rename it, so that a reader meets the old one or the new one."""
        final = self.path / key
        final.parent.mkdir(parents=True, exist_ok=True)
        with draft_of(final) as beside:
            beside.write(json.dumps(document, indent=2).encode())

    def attach(self, arrays: StoredArrays) -> None:
        for array in arrays:
            self._open(array.name, array.shape)

    def _open(self, name: str, shape: tuple[int, ...]) -> Any:
        """Open an array with the shape that it will have; the one on disk does not grow by it."""
        zarr = _import_zarr()
        if name not in self._arrays:
            known = zarr.open_array(f"{self.path}/{name}", mode="r+", zarr_format=3)
            self._documents[name] = self._document(f"{name}/zarr.json")
            self._arrays[name] = _writing_all_chunks(self._documents[name], known)
        known = self._arrays[name]
        if known.shape != shape:
            self._documents[name] = grown = {**self._documents[name], "shape": list(shape)}
            self._arrays[name] = _writing_all_chunks(grown, known)
        return self._arrays[name]

    @failing_with_remedy
    def put(self, name: str, box: Box, block: NDArray[Any]) -> None:
        self._arrays[name][box_slices(box)] = block

    def close(self, done: bool) -> None:
        self._arrays.clear()


def _listed_documents(root: Mapping[str, Any]) -> Mapping[str, dict[str, Any]]:
    """Return the documents of arrays that a root lists, as consolidated metadata; empty for one that lists none."""
    consolidated: Any = root.get("consolidated_metadata") or {}
    return consolidated.get("metadata") or {}


def _state_of_root(root: Mapping[str, Any]) -> tuple[StoreCompleteness | None, Mapping[str, Any]]:
    """Return the completeness that a root states, and the shape of each array that it lists."""
    shapes = {name: list(each.get("shape", ())) for name, each in _listed_documents(root).items()}
    return completeness_from_attrs(root.get("attributes") or {}), shapes


def _import_zarr() -> Any:
    """Import the package, which a program that only reads other formats can do without."""
    with imports_needed(WriteError, "writing a Zarr store needs zarr: pip install 'jigsaw-torch[zarr]'"):
        import zarr
    return zarr


def _writing_all_chunks(document: Mapping[str, Any], array: Any) -> Any:
    """Return an array of a given shape. It writes chunks of fill values too, so that a missing chunk was lost."""
    zarr = _import_zarr()
    return zarr.Array(zarr.AsyncArray(document, array.store_path, config={"write_empty_chunks": True}))


def _with_checksum(codec: Any) -> tuple[Any, ...]:
    """Return the compressors of an array, then a CRC-32C over their output: a flipped bit is found at reading."""
    from zarr.codecs import Crc32cCodec, ZstdCodec

    if isinstance(codec, str) and codec == "auto":
        return ZstdCodec(), Crc32cCodec()
    codecs = () if codec is None else tuple(codec) if isinstance(codec, Sequence) else (codec,)
    has_one = any(
        isinstance(each, Crc32cCodec) or (isinstance(each, Mapping) and each.get("name") == "crc32c") for each in codecs
    )
    return codecs if has_one else (*codecs, Crc32cCodec())


def _check_json(attrs: Mapping[str, Any]) -> None:
    for name, value in attrs.items():
        try:
            json.dumps(value)
        except TypeError as error:
            raise WriteError(
                f"attrs[{name!r}] is {value!r}, which JSON does not hold ({error}); give numbers, texts, or lists and "
                "dicts of these"
            ) from None


def _zarr_attributes(item: ArrayOutline | StoredCoordinate, dtype: DTypeLike) -> dict[str, Any]:
    """Return attributes as JSON; the ``_FillValue`` of floats is base64 of its eight bytes, as in xarray's Zarr v3."""
    plain = {k: plain_attribute(v) for k, v in item.attrs.items()}
    fill = plain.get("_FillValue")
    if isinstance(fill, str) and np.dtype(dtype).kind in "iufc":
        raise WriteError(f"_FillValue={fill!r} of array {item.name!r} of {np.dtype(dtype)} must be a number")
    if isinstance(fill, int | float) and np.dtype(dtype).kind == "f":
        plain["_FillValue"] = standard_b64encode(pack("<d", fill)).decode()
    return plain


def remove_zarr_store(path: Path) -> None:
    """Remove an existing store at once, because what is left of it would still say that it is whole.

    Raises: `WriteError` for a symbolic link, and for a folder that has anything else than a store in it.
    """
    if path.is_symlink():
        raise WriteError(f"{path} is a symbolic link, so it is not replaced; remove it yourself")
    if (stray := next(_foreign_files(path, False), None)) is not None:
        raise WriteError(f"{path} is not replaced, because {stray} is not part of a Zarr store; move that file away")
    moved = unforeseen_name(path, "replaced")
    path.rename(moved)
    shutil.rmtree(moved)


def _foreign_files(folder: Path, is_array: bool) -> Iterator[Path]:
    """Iterate over files below a group or an array that are neither its metadata nor chunks."""
    with os.scandir(folder) as entries:
        for entry in entries:
            path = folder / entry.name
            is_chunk = is_array and _CHUNK_NAME.fullmatch(entry.name) is not None
            if entry.is_dir(follow_symlinks=False):
                yield from _foreign_files(path, is_chunk or _is_array(path))
            elif not is_chunk and entry.name not in _METADATA_NAMES and path_of_draft(path) is None:
                yield path


def _is_array(folder: Path) -> bool:
    try:
        return (folder / ".zarray").exists() or json.loads((folder / "zarr.json").read_bytes())["node_type"] == "array"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return False


def is_zarr_group(path: Path) -> bool:
    """Say whether a folder is a Zarr group."""
    return any((path / name).exists() for name in ("zarr.json", ".zgroup"))


def zarr_store_attrs(path: Path) -> Mapping[str, Any]:
    """Return the global attributes of a store."""
    return dict(_import_zarr().open_group(str(path), mode="r").attrs)
