"""Zarr v2, v3 and sharded v3 as chunk tables: zarr reads the metadata, and the chunks are found and read without it."""

from __future__ import annotations

import os
from base64 import standard_b64decode
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from numpy.typing import NDArray
from zarr.codecs import ShardingCodec
from zarr.errors import ContainsArrayError
from zarr.storage import LocalStore, ObjectStore

from jigsaw.errors import (
    CorruptChunkError,
    MissingArrayError,
    ReadError,
    UnsupportedStoreError,
    cause_without_secrets,
    redacted_text,
)
from jigsaw.geometry.cut import box_slices
from jigsaw.io.arguments import checked_names
from jigsaw.io.chunks.array_table import (
    MISSING_VALUE_ATTRS,
    ArrayStore,
    ArrayTable,
    dtype_with_declared_sign,
    fill_is_missing,
    fill_value_of,
    missing_values_of,
)
from jigsaw.io.chunks.codecs import CodecDecoder, codec_that_runs_code, decoder_of_zarr_v2, decoder_of_zarr_v3
from jigsaw.io.chunks.files import LocalFiles, StoreFiles
from jigsaw.io.chunks.remote_files import RemoteFiles, files_of_url, is_remote_url
from jigsaw.io.formats import zarr_reach
from jigsaw.io.formats.conventions import (
    MAKANI_DIMS,
    anemoi_as_fields,
    describe_makani_fields,
    is_anemoi_store,
    is_makani_array,
)
from jigsaw.io.formats.slab_arrays import check_all_chunks_there, read_whole_coordinate
from jigsaw.io.formats.zarr_places import ObjectPlaces, ShardPlaces, ZarrKeyFiles, ZarrMetadataStore, ZarrPlaces
from jigsaw.io.series.coords import check_coordinate_size

ChunkLengths = Mapping[int, tuple[int, ...]]

_KNOWN_FORMATS = (
    "jigsaw.io.open reads Zarr (a folder, a zip file, a URL), NetCDF, HDF5, NIfTI (.nii, .nii.gz), .npy, and globs "
    "or lists of such files; open anything else, such as GRIB, with xarray and give its Dataset, or write a "
    "jigsaw.io.ArraySource"
)
_SINGLE_FILE_SUFFIXES = (".nc", ".nc3", ".nc4", ".cdf", ".h5", ".hdf5", ".npy", ".zarr")


def open_zarr(url: Any, options: Mapping[str, Any] | None = None) -> ArrayStore:
    """Open the chunk tables of a zarr group, or of one array: at a path or URL, or a store or node of zarr's own.

    `options` go to the store of a URL (see `jigsaw.io.chunks.remote_files.files_of_url`). Among them ``arrays`` names
    those to open, with the coordinates of their dims. It is for a store that is too large to list or cannot be listed
    (HTTP). ``outside`` gives the places that links and references may lead to (see `jigsaw.io.formats.zarr_reach`).
    """
    options = dict(options or {})
    asked = options.pop("arrays", None)
    named = None if asked is None else checked_names("arrays", asked)
    outside = zarr_reach.checked_outside(options.pop("outside", None))
    is_node = isinstance(url, zarr.Group | zarr.Array)
    node = zarr_reach.bounded_node(url if is_node else _open_zarr_node(url, options, outside), outside)
    try:
        # without this zarr refuses the metadata of rectilinear arrays
        with zarr.config.set({"array.rectilinear_chunks": True}):
            sources = dict(_zarr_arrays_of(node, named))
            if (
                isinstance(node, zarr.Group)
                and node.metadata.consolidated_metadata
                and isinstance(node.store, LocalStore)
            ):
                _check_against_own_metadata(sources)
        tables = {name: table_of_zarr(name, array) for name, array in sources.items()}
        describe_makani_fields(tables, _node_name(node))
        attrs = dict(node.attrs)
    except ReadError:
        raise
    except Exception as e:  # zarr may make anything of metadata that lie, "../" in a name included
        raise UnsupportedStoreError(
            f"{_node_name(node)} has metadata that cannot be read: {e}"
        ) from cause_without_secrets(e)

    def read_small(name: str) -> NDArray[Any]:
        table = tables[name]
        if table.decoder is not None:
            return read_whole_coordinate(table)
        if prod(table.shape) > 1:
            check_all_chunks_there(table)
        return _read_by_zarr(node, sources[name])

    store = ArrayStore(_node_name(node), tables, attrs, read_small)
    return anemoi_as_fields(store) if is_anemoi_store(store) else store


# the metadata by which the bytes of chunks become values, for each format of Zarr
_CODING_KEYS = {
    2: ("dtype", "chunks", "order", "filters", "compressor", "dimension_separator"),
    3: ("data_type", "codecs", "chunk_key_encoding", "chunk_grid"),
}


def _check_against_own_metadata(arrays: Mapping[str, Any]) -> None:
    """Raise where the consolidated metadata of a folder say otherwise than an array's own how its chunks are decoded:
    other values would be read.
    """
    for name, array in arrays.items():
        with suppress(FileNotFoundError):
            own = zarr.open_array(array.store, path=array.path, mode="r", zarr_format=array.metadata.zarr_format)
            listed, stored = array.metadata.to_dict(), own.metadata.to_dict()
            key = next((k for k in _CODING_KEYS[array.metadata.zarr_format] if listed[k] != stored[k]), None)
            # rows may have been added since, and a rectilinear grid lists the chunks of all rows
            if key is not None and not (key == "chunk_grid" and listed[key]["name"] == "rectilinear"):
                raise UnsupportedStoreError(
                    f"array {name!r} in {array.store}: the consolidated metadata of the store have {key}="
                    f"{listed[key]!r}, and the array's own {stored[key]!r}, as after a new array of that name; "
                    "consolidate them again (zarr.consolidate_metadata)"
                )


def _zarr_arrays_of(node: zarr_reach.ZarrNode, named: Sequence[str] | None) -> Iterator[tuple[str, Any]]:
    if isinstance(node, zarr.Array):
        return iter([(node.basename or "array", node)])
    return _listed_zarr_arrays(node) if named is None else _named_zarr_arrays(node, named)


def _read_by_zarr(node: zarr_reach.ZarrNode, array: Any) -> NDArray[Any]:
    check_coordinate_size(array.path, array.shape, array.nbytes)
    try:
        return _box_by_zarr(array, ...)
    except ReadError:
        raise
    except Exception as e:  # a codec may raise anything
        raise CorruptChunkError(
            f"array {array.path!r} of {_node_name(node)} cannot be read: {e}"
        ) from cause_without_secrets(e)


def _box_by_zarr(array: Any, box: Any) -> NDArray[Any]:
    _refuse_code_in_array(array)
    return np.asarray(array[box])


def arrays_without_code(url: Any) -> dict[str, Any]:
    """Return the arrays of a zarr group that another library reads for jigsaw; empty if `url` is not a group.

    Raises: `UnsupportedStoreError` when one has a codec that runs code. Also raised when its arrays cannot all be
    listed, because an unlisted one may be such.
    """
    try:
        with zarr.config.set({"array.rectilinear_chunks": True}):
            try:
                group = zarr.open_group(url, mode="r")
            except (FileNotFoundError, ContainsArrayError, ImportError):  # this is not a group
                return {}
            arrays = dict(_listed_zarr_arrays(group))
    except Exception as e:  # zarr may make anything of metadata that lie
        raise UnsupportedStoreError(
            f"the arrays of {redacted_text(str(url))} cannot all be listed ({redacted_text(str(e))}), so nothing says "
            "that none has a codec that runs code; remove or mend the metadata that cannot be read"
        ) from cause_without_secrets(e)
    for array in arrays.values():
        _refuse_code_in_array(array)
    return arrays


def _refuse_code_in_array(array: Any) -> None:
    meta = array.metadata
    codecs = (*(meta.filters or ()), meta.compressor) if meta.zarr_format == 2 else meta.codecs
    name = codec_that_runs_code([codec for codec in codecs if codec is not None])
    if name is not None:
        raise UnsupportedStoreError(
            f"array {array.path!r} in {array.store_path.store} has the codec {name!r}, which runs code that lies in "
            "the chunks; it is never read. If you trust the store, write the array again with other codecs"
        )


def _open_zarr_node(url: Any, options: dict[str, Any], outside: zarr_reach.OutsidePlaces) -> zarr_reach.ZarrNode:
    if is_remote_url(url):
        files, prefix = files_of_url(url, options)
        called = f"{files.name}/{prefix}"
        store: Any = ZarrMetadataStore(files, prefix)
        where: dict[str, Any] = {"store": store, "path": prefix}
    else:
        called, store = repr(url), zarr_reach.local_zarr_store(url, outside)
        where = {"store": store, "storage_options": options or None}
    try:
        with zarr.config.set({"array.rectilinear_chunks": True}):  # the group may have rectilinear arrays
            try:
                return zarr.open_group(**where, mode="r")
            except (FileNotFoundError, ContainsArrayError) as no_group:
                with suppress(FileNotFoundError, ValueError):
                    return zarr.open_array(**where, mode="r")
                refusal = store.refusal if isinstance(store, ZarrMetadataStore) else None
                raise refusal or no_group from None
    except ReadError:
        raise
    except Exception as e:  # any store may fail in its own way, and metadata may lie
        reason, cause = _reason_of_no_group(url, redacted_text(e, options)), cause_without_secrets(e, options)
        raise UnsupportedStoreError(f"{called} {reason}; {_KNOWN_FORMATS}") from cause


def _reason_of_no_group(url: Any, message: str) -> str:
    """Say why nothing can be opened there, also for a user who did not mean Zarr."""
    if not isinstance(url, str | os.PathLike) or is_remote_url(url):
        return f"cannot be opened as a Zarr group: {message}"
    if not os.path.lexists(url):
        return f"does not exist, as seen from {os.getcwd()!r}"
    if not os.path.isdir(url):
        return f"is a file of none of the known formats (as a Zarr group: {message})"
    file = next((p for p in sorted(Path(url).iterdir()) if p.suffix in _SINGLE_FILE_SUFFIXES), None)
    if file:
        return f"is a folder of files; give those along time as a glob: '{Path(url)}/*{file.suffix}'"
    return f"is a folder without a Zarr group: {message}"


def _node_name(node: zarr_reach.ZarrNode) -> str:
    files = remote_files_of_zarr(node.store)
    return str(node.store_path) if files is None else "/".join(filter(None, (files.name, node.path)))


def _listed_zarr_arrays(group: zarr.Group) -> Iterator[tuple[str, Any]]:
    files = remote_files_of_zarr(group.store)
    if files and not files.lists and group.metadata.consolidated_metadata is None:
        raise UnsupportedStoreError(
            f"the arrays of {_node_name(group)} cannot be listed: it has no consolidated metadata, and HTTP has no "
            "listing; consolidate it (zarr.consolidate_metadata), or name what to open: options={'arrays': ['t2m', …]}"
        )
    members: Any = group.members(max_depth=None)
    for name, member in sorted(members, key=lambda pair: pair[0]):
        if isinstance(member, zarr.Array):
            yield name, member


def _named_zarr_arrays(group: zarr.Group, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    coordinates: dict[str, None] = {}
    for name, member in _ask_group_for(group, names):
        if not isinstance(member, zarr.Array):
            raise MissingArrayError(f"{_node_name(group)} has no array {name!r}, which options={{'arrays': …}} names")
        yield name, member
        folder = name.rpartition("/")[0]
        coordinates |= {f"{folder}/{dim}".lstrip("/"): None for dim in _stored_dim_names(member.metadata) or () if dim}
    for name, member in _ask_group_for(group, [name for name in coordinates if name not in names]):
        if isinstance(member, zarr.Array):
            yield name, member


def _ask_group_for(group: zarr.Group, names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return the members with these names, or None; all are requested at once, because a store may be far away."""
    with ThreadPoolExecutor(max(len(names), 1)) as pool:
        return list(zip(names, pool.map(group.get, names), strict=True))


def table_of_zarr(name: str, array: Any) -> ArrayTable:
    """Return the chunk table of one zarr array."""
    meta = array.metadata
    own = np.dtype(object) if array.dtype.kind == "T" else np.dtype(array.dtype)
    dtype = dtype_with_declared_sign(own, meta.attributes)
    files = files_of_zarr(array.store)
    if meta.zarr_format == 2:
        chunks, lengths = tuple(meta.chunks), {}
        decoder = decoder_of_zarr_v2(dtype, meta.order, len(chunks), meta.filters or (), meta.compressor)
        places: ZarrPlaces = ObjectPlaces(array, files)
    else:
        chunks, lengths, decoder, places = _storage_of_v3(array, meta, dtype, files)
    if any(c < 1 <= n for c, n in zip(chunks, array.shape, strict=True)):
        raise UnsupportedStoreError(f"array {name!r} of shape {array.shape} has chunks of {chunks}; need at least 1")
    return ArrayTable(
        name=name,
        shape=tuple(array.shape),
        dims=_checked_dim_names(name, _stored_dim_names(meta), len(chunks)),
        dtype=(decoder.dtype if decoder else dtype).str,
        chunks=chunks,
        fill_value=fill_value_of(meta.fill_value, dtype),
        attrs={k: v for k, v in meta.attributes.items() if k != "_ARRAY_DIMENSIONS"},
        masks=_zarr_missing_values(meta, dtype, own),
        decoder=decoder,
        places=places,
        load_slowly=lambda box: _box_by_zarr(array, box_slices(box)),
        lengths=lengths,
    )


def _stored_dim_names(meta: Any) -> Any:
    return meta.attributes.get("_ARRAY_DIMENSIONS") if meta.zarr_format == 2 else meta.dimension_names


def _checked_dim_names(name: str, dims: Any, ndim: int) -> tuple[str, ...]:
    names = dims or [None] * ndim
    if not dims and is_makani_array(name, names):
        return MAKANI_DIMS
    if not isinstance(names, list | tuple) or len(names) != ndim or any(not isinstance(d, str | None) for d in names):
        raise UnsupportedStoreError(f"array {name!r} has the dims {dims!r}; need {ndim} names")
    return tuple(d or f"dim_{i}" for i, d in enumerate(names))


def _storage_of_v3(
    array: Any, meta: Any, dtype: np.dtype[Any], files: StoreFiles
) -> tuple[tuple[int, ...], ChunkLengths, CodecDecoder | None, ZarrPlaces]:
    outer, lengths = zarr_chunk_grid(array.name, array.shape, meta.chunk_grid.to_dict())
    codecs = meta.codecs
    if len(codecs) == 1 and isinstance(codecs[0], ShardingCodec):
        sharding = codecs[0]
        inner = tuple(sharding.chunk_shape)
        decoder = decoder_of_zarr_v3(dtype, len(inner), sharding.codecs)
        # an index is an array [chunks, 2] of u8, so what its codecs are is known as an array's are
        index = decoder_of_zarr_v3(np.dtype("u8"), len(inner) + 1, sharding.index_codecs)
        in_order = index and index.compression is None and index.order == tuple(range(len(inner) + 1))
        if decoder and index and in_order and not lengths:
            return inner, {}, decoder, ShardPlaces(array, inner, outer, sharding, index, files)
        return outer, lengths, None, ObjectPlaces(array, files)
    return outer, lengths, decoder_of_zarr_v3(dtype, len(outer), codecs), ObjectPlaces(array, files)


def zarr_chunk_grid(name: str, shape: Sequence[int], grid: Any) -> tuple[tuple[int, ...], ChunkLengths]:
    """Return the shape of the largest chunk, and the lengths of chunks along the dims where they differ.

    `grid` is the ``chunk_grid`` of an array's ``zarr.json``: ``regular``, or ``rectilinear``. The latter has for each
    dim one length for all, or a list of lengths and of pairs ``[length, how often]``. Chunks beyond the array's end may
    be listed, but are no longer stored.
    """
    form: Any = grid.get("configuration") or {}
    if grid["name"] == "regular":
        return tuple(form["chunk_shape"]), {}
    if grid["name"] != "rectilinear":
        raise UnsupportedStoreError(
            f"array {name!r} has a chunk grid {grid['name']!r}; only regular and rectilinear ones can be read"
        )
    lengths: dict[int, tuple[int, ...]] = {}
    for dim, (size, stored) in enumerate(zip(shape, form["chunk_shapes"], strict=True)):
        if not isinstance(stored, int):
            runs = [(each, 1) if isinstance(each, int) else each for each in stored]
            every = [length for length, count in runs for _ in range(count)]
            starts = [0, *accumulate(every)]
            if starts[-1] < size:
                raise UnsupportedStoreError(f"array {name!r} has chunks for {starts[-1]} of {size} rows of dim {dim}")
            lengths[dim] = tuple(n for n, start in zip(every, starts, strict=False) if start < size)
    largest = [max(lengths[d], default=1) if d in lengths else n for d, n in enumerate(form["chunk_shapes"])]
    return tuple(largest), lengths


def files_of_zarr(store: Any) -> StoreFiles:
    """Return the files of a zarr store. Those on disk must not change, because indices and block tables are kept."""
    if isinstance(store, LocalStore):
        return store.files if isinstance(store, zarr_reach.BoundedLocalStore) else LocalFiles(keep=True)
    return remote_files_of_zarr(store) or ZarrKeyFiles(store)


def remote_files_of_zarr(store: Any) -> RemoteFiles | None:
    """Return the objects of a zarr store over obstore, read without zarr; None for another store."""
    if not isinstance(store, ObjectStore):
        return None
    files = getattr(store, "files", None)
    return files if isinstance(files, RemoteFiles) else RemoteFiles.of(store.store)


def _zarr_missing_values(meta: Any, dtype: np.dtype[Any], own: np.dtype[Any]) -> tuple[float, ...]:
    """Return the stored values that mean "missing", by xarray's conventions.

    Zarr v3 has ``_FillValue`` among its attributes; zarr v2 has it as the array's `fill_value`.
    """
    attrs = meta.attributes
    declared: list[Any] = [
        _decoded_fill_value(attrs[name], dtype) if name == "_FillValue" else attrs[name]
        for name in MISSING_VALUE_ATTRS
        if name in attrs
    ]
    if meta.zarr_format == 2 and fill_is_missing(meta.fill_value, attrs):
        declared.append(fill_value_of(meta.fill_value, dtype))
    return missing_values_of(dtype, declared, own)


def _decoded_fill_value(value: Any, dtype: np.dtype[Any]) -> Any:
    """Decode xarray's ``_FillValue`` of a zarr v3 float: base64 of its eight bytes, or a text like "NaN"."""
    if not isinstance(value, str) or dtype.kind != "f":
        return value
    try:
        return float(value)
    except ValueError:
        return np.frombuffer(standard_b64decode(value), "<f8").item()
