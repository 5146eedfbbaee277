"""Volumes as zarr stores and OME-Zarr images, with metadata as OME-NGFF 0.4 and 0.5 say."""

import numpy as np
import zarr

AFFINE = np.array([[-2.0, 0.0, 0.1, 90.0], [0.0, 1.5, 0.0, -126.0], [0.0, 0.2, 3.0, -72.0], [0.0, 0.0, 0.0, 1.0]])


def write(path, values, dims=("z", "y", "x"), chunks=(8, 8, 8), affine=AFFINE, name="image", mode="w", **options):
    """One array of a zarr group; its path."""
    group = zarr.open_group(str(path), mode=mode, zarr_format=3)
    options = {"config": {"write_empty_chunks": True}} | options
    made = group.create_array(
        name, shape=values.shape, chunks=chunks, dtype=values.dtype, dimension_names=dims, **options
    )
    made[...] = values
    if affine is not None:
        made.attrs["affine"] = np.asarray(affine).tolist()
    return str(path)


def image(shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


def label(shape, seed=0, balls=3):
    """A few small balls of the classes 1, 2, ... in a background of 0."""
    r = np.random.default_rng(seed)
    where = np.stack(np.meshgrid(*(np.arange(n) for n in shape), indexing="ij"))
    found = np.zeros(shape, "u1")
    for k in range(balls):
        center = np.array([r.integers(0, n) for n in shape]).reshape(-1, *(1,) * len(shape))
        found[((where - center) ** 2).sum(0) <= (k + 1) ** 2] = k + 1
    return found


def pairs(folder, shapes, chunks=(8, 8, 8)):
    """Paths of images and label maps of these shapes, and their values."""
    images, labels, values = [], [], []
    for i, shape in enumerate(shapes):
        values.append((image(shape, i), label(shape, i)))
        images.append(write(folder / f"image{i}.zarr", values[-1][0], chunks=chunks))
        labels.append(write(folder / f"label{i}.zarr", values[-1][1], chunks=chunks, name="label"))
    return images, labels, values


def ome(path, values, version, axes=("c", "z", "y", "x"), scale=(1.0, 2.0, 0.5, 0.25), shift=(0.0, 10.0, 20.0, 30.0)):
    """A pyramid of two levels, the second with half the rows of y and x."""
    group = zarr.open_group(str(path), mode="w", zarr_format=2 if version == "0.4" else 3)
    datasets = []
    for level, factor in enumerate((1, 2)):
        shown = values[..., ::factor, ::factor]
        names = {} if version == "0.4" else {"dimension_names": axes}
        made = group.create_array(
            f"s{level}", shape=shown.shape, chunks=(1, *(8,) * (shown.ndim - 1)), dtype=shown.dtype, **names
        )
        made[...] = shown
        step = [*scale[:-2], scale[-2] * factor, scale[-1] * factor]
        how = [{"type": "scale", "scale": step}, {"type": "translation", "translation": list(shift)}]
        datasets.append({"path": f"s{level}", "coordinateTransformations": how})
    kinds = {"c": {"type": "channel"}, "t": {"type": "time", "unit": "second"}}
    described = [{"name": a, **kinds.get(a, {"type": "space", "unit": "micrometer"})} for a in axes]
    whole = [{"type": "scale", "scale": [10.0 if a in "zyx" else 1.0 for a in axes]}]
    meta = [{"axes": described, "datasets": datasets, "coordinateTransformations": whole, "name": "image"}]
    if version == "0.4":
        group.attrs["multiscales"] = [{**meta[0], "version": version}]
    else:
        group.attrs["ome"] = {"version": version, "multiscales": meta}
    return str(path)
