"""Volumes given as objects: arrays and tensors, and images of nibabel, SimpleITK and MONAI, which know where they lie.

A library is known by the objects of its own that it has loaded: none is imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from jigsaw.errors import FieldError, GridError
from jigsaw.geometry.cut import Box, box_slices
from jigsaw.io.chunks.array_table import ArrayStore
from jigsaw.io.formats.array_source import SourceArray, open_array_source, without_mask

GIVEN_DIMS = ("channel", "z", "y", "x")
"""Dims that a volume may have, by the names that `dims=` gives, in the order of an array without names."""
_LIBRARY_DIMS = ("x", "y", "z", "channel")  # those of nibabel
_TO_RAS = np.diag(
    [-1.0, -1.0, 1.0, 1.0]
)  # from the left and the back, as DICOM and ITK count, to the right and the front


@runtime_checkable
class _IndexedArray(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> Any: ...
    def __getitem__(self, index: Any, /) -> Any: ...


@dataclass(frozen=True, eq=False)
class ArrayVolume:
    """An array as a source of boxes: one in memory, or one that reads what an index asks for, as those of zarr, h5py
    and dask do.
    """

    values: _IndexedArray
    dims: tuple[str, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @property
    def arrays(self) -> Mapping[str, SourceArray]:
        dtype = _dtype_of_read(self.values)
        stored = np.dtype("u1") if dtype.kind == "b" else dtype
        return {"array": SourceArray(self.values.shape, stored, self.dims, self.attrs)}

    def chunks(self, array: str) -> tuple[int, ...] | None:
        """Return its chunks, dask's by the largest along each dim; None for an array without any."""
        sizes = getattr(self.values, "chunks", None)
        return sizes and tuple(max(size) if isinstance(size, tuple) else size for size in sizes)

    def read(self, array: str, box: Box) -> NDArray[Any]:
        values = without_mask(self.values[box_slices(box)], f"an array of shape {tuple(self.values.shape)}")
        return values.view(np.uint8) if values.dtype.kind == "b" else values


def _dtype_of_read(values: _IndexedArray) -> np.dtype[Any]:
    """Return the dtype of what is read, by a voxel of it where the array does not say it in numpy's words.

    nibabel's arrays tell the dtype in the file, before slope and intercept, and tensorstore's one of their own.
    """
    nibabel = sys.modules.get("nibabel")
    try:
        dtype = None if nibabel is not None and nibabel.is_proxy(values) else np.dtype(values.dtype)
    except TypeError:
        dtype = None
    return dtype or np.asarray(values[(slice(0, 1),) * len(values.shape)]).dtype


@dataclass(frozen=True, eq=False)
class ItkFile:
    """A file that a SimpleITK ``ImageFileReader`` has been told to read: of it each box alone, where its format can."""

    path: str
    io: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    space: int

    @classmethod
    def of(cls, reader: Any, itk: Any) -> ItkFile:
        size, components = reader.GetSize(), reader.GetNumberOfComponents()
        one = itk.GetArrayViewFromImage(itk.Image([1] * len(size), reader.GetPixelID(), components))
        shape = (*size[::-1], *((components,) if one.ndim > len(size) else ()))
        return cls(reader.GetFileName(), reader.GetImageIO(), shape, one.dtype, len(size))

    def __getitem__(self, box: tuple[slice, ...]) -> NDArray[Any]:
        itk = sys.modules["SimpleITK"]
        reader = itk.ImageFileReader()  # one for each thread that reads
        reader.SetFileName(self.path)
        reader.SetImageIO(self.io)
        rows = box[: self.space][::-1]
        reader.SetExtractIndex([each.start for each in rows])
        reader.SetExtractSize([each.stop - each.start for each in rows])
        return itk.GetArrayFromImage(reader.Execute())[(..., *box[self.space :])]


@dataclass(frozen=True, eq=False)
class LibraryImage:
    """The values of an image object, what its dims are, and its affine from (x, y, z, 1) to the world, as nibabel's."""

    values: _IndexedArray
    dims: tuple[str, ...]
    affine: NDArray[np.float64]


def image_of_library(image: Any) -> LibraryImage | None:
    """Return an image of nibabel, SimpleITK or MONAI with its dims and affine; None for any other object."""
    nibabel, itk = sys.modules.get("nibabel"), sys.modules.get("SimpleITK")
    monai = sys.modules.get("monai.data.meta_tensor")
    if nibabel is not None and isinstance(image, nibabel.spatialimages.SpatialImage):
        values: Any = image.dataobj
        return LibraryImage(values, _LIBRARY_DIMS[: len(values.shape)], np.asarray(image.affine, np.float64))
    if monai is not None and isinstance(image, monai.MetaTensor):
        values = image.as_tensor()
        space = _LIBRARY_DIMS[: min(len(values.shape), len(image.meta.get("spatial_shape", "xyz")))]
        dims = ("channel", *space) if len(values.shape) > len(space) else space
        return LibraryImage(values, dims, np.asarray(image.affine.cpu(), np.float64))
    if itk is not None and isinstance(image, itk.Image | itk.ImageFileReader):
        is_file = isinstance(image, itk.ImageFileReader)
        if is_file:
            image.ReadImageInformation()
        values = ItkFile.of(image, itk) if is_file else itk.GetArrayViewFromImage(image)
        space = len(image.GetSize())
        dims = (*_LIBRARY_DIMS[:space][::-1], *(("channel",) if len(values.shape) > space else ()))
        return LibraryImage(values, dims, _itk_affine(image))
    return None


def _itk_affine(image: Any) -> NDArray[np.float64]:
    spacing, affine = np.asarray(image.GetSpacing()), np.eye(4)
    space = min(len(spacing), 3)
    directions = np.reshape(image.GetDirection(), (len(spacing), len(spacing)))
    affine[:space, :space] = (directions * spacing)[:space, :space]
    affine[:space, 3] = image.GetOrigin()[:space]
    return _TO_RAS @ affine


def values_of_array(array: Any) -> NDArray[Any] | None:
    """Return the values of an array, tensor or image in memory, not copied where numpy has their dtype; None for
    others.
    """
    image = image_of_library(array)
    values = array if image is None else image.values
    if isinstance(values, torch.Tensor):
        if values.layout != torch.strided or values.is_meta:
            raise FieldError(
                f"a volume of shape {tuple(values.shape)} is a tensor of layout {values.layout} on {values.device}, "
                "which has no voxel for each place; give x.to_dense(), on a device"
            )
        values = values.detach().cpu().resolve_neg()
        values = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return without_mask(values, f"an array of shape {values.shape}") if isinstance(values, np.ndarray) else None


def store_of_given(source: Any, dims: Sequence[str] | None) -> ArrayStore | None:
    """Return an array or an image as a store; None for anything else, such as a path.

    Raises: `GridError` for another number of dims than those of a volume.
    """
    image, values = image_of_library(source), values_of_array(source)
    if image is not None:
        attrs = {"affine": image.affine.tolist()}
        return _store_of_array(image.values if values is None else values, dims or image.dims, attrs)
    # arrays of zarr and xarray have names of dims, and their chunks may be missing
    if values is None and isinstance(source, _IndexedArray) and not isinstance(source, _kinds_of_stores()):
        return _store_of_array(source, dims, {})
    return None if values is None else _store_of_array(values, dims, {})


def _store_of_array(values: _IndexedArray, dims: Sequence[str] | None, attrs: Mapping[str, Any]) -> ArrayStore:
    usual = GIVEN_DIMS[-len(values.shape) :] if 2 <= len(values.shape) <= len(GIVEN_DIMS) else ()
    names = _dims_for(len(values.shape), usual if dims is None else dims)
    if not names:
        wanted = "[C, z, y, x], [z, y, x] or [y, x]" if dims is None else f"[{', '.join(dims)}]"
        raise GridError(
            f"an array of shape {values.shape} is not a volume {wanted}; name its dims, like dims=('x', 'y', 'z')"
        )
    named = open_array_source(ArrayVolume(values, names, attrs))
    return replace(named, url=f"array {list(values.shape)} of {values.dtype}")


def with_given_dims(store: ArrayStore, dims: Sequence[str] | None) -> ArrayStore:
    """Return the store with these names of the dims of each array that has as many, or as many as its dims of space."""
    if dims is None:
        return store
    named = {name: _dims_for(len(table.shape), dims) for name, table in store.arrays.items()}
    tables = {
        name: replace(store.arrays[name], dims=own_dims) if own_dims else store.arrays[name]
        for name, own_dims in named.items()
    }
    return replace(store, arrays=tables)


def _dims_for(count: int, dims: Sequence[str]) -> tuple[str, ...] | None:
    """Return which of `dims` an array of `count` dims has: a label map may lack the channels."""
    whole = tuple(dims)
    space = tuple(d for d in whole if d != "channel")
    return next((names for names in (whole, space) if names and len(names) == count), None)


def checked_dims(dims: Any) -> tuple[str, ...] | None:
    """Check and return the dims of a volume. Raises: `FieldError` for anything that does not name them."""
    if dims is None:
        return None
    names = tuple(dims) if isinstance(dims, Sequence) and not isinstance(dims, str) else ()
    if not {"y", "x"} <= set(names) <= set(GIVEN_DIMS) or len(set(names)) != len(names):
        raise FieldError(
            f"dims={dims!r} must name each stored dim once, in their order: y and x, and 'z' and 'channel' where there "
            "are such, like dims=('channel', 'z', 'y', 'x')"
        )
    return names


def _kinds_of_stores() -> tuple[type, ...]:
    """Return the arrays that are opened as stores, of those libraries that are loaded."""
    kinds = (("zarr", "Array"), ("xarray", "DataArray"))
    return tuple(getattr(sys.modules[library], kind) for library, kind in kinds if library in sys.modules)
