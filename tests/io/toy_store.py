"""Real zarr arrays in every storage form, and the sample that a request should give, by plain numpy."""

import numpy as np
import zarr
from numcodecs import LZ4, Blosc, Delta, GZip, Zlib, Zstd
from zarr.codecs import BloscCodec, BytesCodec, Crc32cCodec, GzipCodec, TransposeCodec, ZstdCodec

from jigsaw.geometry.layout import Layout
from jigsaw.io.series.request import ReadPart, ReadRequest

V2 = {
    "blosc": {"compressors": Blosc("lz4", 5, 1)},
    "blosc-zstd-bits": {"compressors": Blosc("zstd", 3, 2)},
    "zstd": {"compressors": Zstd(3)},
    "zlib": {"compressors": Zlib(1)},
    "gzip": {"compressors": GZip(1)},
    "lz4": {"compressors": LZ4()},
    "none": {"compressors": None},
    "slash": {"compressors": Zstd(), "chunk_key_encoding": {"name": "v2", "separator": "/"}},
    "fortran": {"compressors": Blosc(), "order": "F"},
    "big-endian": {"compressors": Blosc(), "dtype": ">f4"},
    "fortran-none": {"compressors": None, "order": "F", "dtype": ">f4"},
    "delta": {"compressors": Zstd(), "filters": [Delta(dtype="f4")]},
}
V3 = {
    "default": {},
    "plain": {"compressors": None},
    "blosc": {"compressors": BloscCodec(cname="lz4")},
    "gzip-crc": {"compressors": (GzipCodec(), Crc32cCodec())},
    "crc": {"compressors": (Crc32cCodec(),)},
    "dots": {"chunk_key_encoding": {"name": "default", "separator": "."}},
    "v2-keys": {"chunk_key_encoding": {"name": "v2", "separator": "."}},
    "big-endian": {"serializer": BytesCodec(endian="big")},
    "transposed": {"filters": (TransposeCodec(order=(1, 3, 0, 2)),)},
    "two-compressors": {"compressors": (GzipCodec(), ZstdCodec())},
}
SLOW = {("v2", "delta"), ("v3", "two-compressors"), ("sharded", "two-compressors")}
FORMS = [
    *(("v2", name) for name in V2),
    *(("v3", name) for name in V3),
    *(("sharded", name) for name in ("default", "plain", "gzip-crc", "big-endian", "transposed", "two-compressors")),
]

STEPS, LEVELS = 4, 3


def write(folder, form=("v2", "blosc"), rows=(13, 10), chunk=(1, 3, 5, 4), seed=0):
    """A store of `air` [time, level, lat, lon], `t2m` [time, lat, lon], `mask` [lat, lon]: its path and values."""
    r = np.random.default_rng(seed)
    values = {
        "air": r.normal(size=(STEPS, LEVELS, *rows)).astype("f4"),
        "t2m": r.normal(size=(STEPS, *rows)).astype("f4"),
        "mask": r.normal(size=rows).astype("f4"),
    }
    kind, name = form
    path = str(folder / f"{kind}-{name}.zarr")
    group = zarr.open_group(path, mode="w", zarr_format=2 if kind == "v2" else 3)
    for array, x in list(values.items()):
        one = (chunk[0], *chunk[2:]) if array == "t2m" else chunk[2:] if array == "mask" else chunk
        options = dict((V2 if kind == "v2" else V3)[name])
        if kind == "sharded":
            options["shards"] = tuple(2 * c for c in one)
        if array != "air" and name == "transposed":
            options.pop("filters")
        dims = ("time", "level", "lat", "lon")
        dims = dims if x.ndim == 4 else ("time", *dims[2:]) if x.ndim == 3 else dims[2:]
        if kind != "v2":
            options["dimension_names"] = dims
        made = group.create_array(array, shape=x.shape, chunks=one, **({"dtype": "f4"} | options))
        if kind == "v2":
            made.attrs["_ARRAY_DIMENSIONS"] = dims
        made[...] = x
        values[array] = made[...]  # Delta rounds
    return path, values


def layout(channels, times, rows, axes, halo=0):
    """[T, C, lat, lon] with lon periodic."""
    return Layout.of((times, channels, *rows), (None, None, "lat", "lon"), axes, halo={2: halo, 3: halo}, periodic=(3,))


def request(axes, rows=(13, 10), halo=0, steps=(1, 3), levels=(0, 2), **more):
    """Two levels of `air`, `t2m` and the static `mask` at some steps: 4 channels."""
    times = tuple((step, i) for i, step in enumerate(steps))
    n = len(levels)
    parts = (
        ReadPart("air", (times, tuple((k, c) for c, k in enumerate(levels)), None, None), (0, 1, 2, 3)),
        ReadPart("t2m", (times, None, None), (0, 2, 3), at=((1, n),)),
        *(ReadPart("mask", (None, None), (2, 3), at=((0, i), (1, n + 1))) for i in range(len(steps))),
    )
    return ReadRequest(layout(n + 2, len(steps), rows, axes, halo), parts, **more)


def sample(values, steps=(1, 3), levels=(0, 2)):
    """The whole sample of `request`, without normalization."""
    air, t2m = values["air"][list(steps)][:, list(levels)], values["t2m"][list(steps)][:, None]
    return np.concatenate([air, t2m, np.broadcast_to(values["mask"], t2m.shape)], axis=1)


def held(whole, lay, coord):
    """What one rank holds of a whole sample: lat clipped, lon wrapped."""
    for dim, (start, stop) in enumerate(lay.held(coord)):
        whole = whole.take(range(start, stop), axis=dim, mode="wrap")
    return whole
