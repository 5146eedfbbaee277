"""`ForegroundBox`: the part of each scan that is read, the box around its voxels above a threshold.

The box is that of MONAI's ``CropForeground(allow_smaller=True)``. Ranks share out the chunks of all scans, and exchange
the first and the last row along each dim that they saw.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.drafts import draft_of
from jigsaw.errors import FieldError, GridError, ReadError
from jigsaw.geometry.cut import Box, Interval
from jigsaw.io.arguments import are_some_integers, check_cache_folder, is_real_number
from jigsaw.io.cache_folder import user_cache_folder
from jigsaw.io.rank_results import place_in_mesh, result_of_first_rank, results_of_ranks
from jigsaw.io.series.times import is_whole_number
from jigsaw.io.volumes.volume import StoredVolume


@dataclass(frozen=True)
class ForegroundBox:
    """Rule for the part of each scan that is read: the box around its voxels above a threshold, such as the body.

    - `above`: voxels of a greater value count, in the units of the files;
    - `margin`: rows that the box has more at either end, as one number or along ``z, y, x``. It ends with the scan, as
      that of MONAI's ``CropForeground(allow_smaller=True)``;
    - `channels`: those that are looked at; a voxel counts that is above in any of them. By default all;
    - `cache`: a folder in which the boxes are kept for the next run, those of images in local files and in memory.
      Others may change unseen, so they are searched in each run.

    Raises: `FieldError` for invalid values.

    >>> how = {"mesh": jigsaw.init_mesh(depth=1), "crop": None}
    >>> box = jigsaw.io.ForegroundBox(above=0.5, margin=1)
    >>> jigsaw.io.open_volumes(["label.zarr"], box=box, **how).images[0].box
    ((9, 15), (4, 10), (5, 13))
    """

    above: float = 0.0
    margin: int | Sequence[int] = 0
    channels: tuple[int, ...] | None = None
    cache: str | None = None

    def __post_init__(self) -> None:
        if not is_real_number(self.above) or math.isnan(self.above):
            raise FieldError(f"above={self.above!r} must be a number, the value that voxels of the box are above")
        margins = self.margin if isinstance(self.margin, Sequence) else [self.margin]
        if isinstance(self.margin, str) or not all(is_whole_number(rows) and rows >= 0 for rows in margins):
            raise FieldError(f"margin={self.margin!r} must be whole numbers >= 0, rows at either end of the box")
        if self.channels is not None and not are_some_integers(self.channels):
            raise FieldError(
                f"channels={self.channels!r} must be a list of the channels to look at, like (0,), or None for all"
            )
        check_cache_folder(self.cache)

    def check_fits(self, image: StoredVolume) -> None:
        """Raise `FieldError` for channels that an image does not have, or margins of other dims."""
        if isinstance(self.margin, Sequence) and len(self.margin) != len(image.dims):
            raise FieldError(
                f"margin={self.margin!r} must be one number, or {len(image.dims)}, of the dims {', '.join(image.dims)}"
            )
        count = image.channels
        if unknown := [c for c in self.channels or () if not is_whole_number(c) or not 0 <= c < count]:
            raise FieldError(f"channels={self.channels}: images have the channels 0 to {count - 1}, not {unknown[0]!r}")

    def widened(self, rows: Box, image: StoredVolume) -> Box:
        """Return the box with its margin, within the image."""
        margins = self.margin if isinstance(self.margin, Sequence) else [self.margin] * len(rows)
        return tuple(
            (max(a - more, 0), min(b + more, n))
            for (a, b), more, n in zip(rows, margins, image.stored_shape, strict=True)
        )


def find_boxes(images: Sequence[StoredVolume], asked: ForegroundBox, mesh: DeviceMesh | None) -> tuple[Box, ...]:
    """Find the box of every image. Collective over `mesh`, whose ranks share out the slabs of all of them.

    *Sends*: what the cache of the first rank has, then two numbers for each image and dim to every other rank.

    Raises: `GridError` for an image without a voxel above the threshold; `FieldError` for channels that images lack, or
    a cache that cannot be written; the `ReadError` of a chunk. All are alike on every rank.
    """
    if not isinstance(asked, ForegroundBox):  # pyright: ignore[reportUnnecessaryIsInstance] # what a user may pass
        raise FieldError(f"box={asked!r} must be a jigsaw.io.ForegroundBox, like jigsaw.io.ForegroundBox(above=0)")
    for image in images:
        asked.check_fits(image)
    me, ranks = place_in_mesh(mesh)
    # the first rank's cache decides for all: ranks that see different folders would search different images
    known = result_of_first_rank(mesh, me == 0, partial(_read_boxes, images, asked))
    slabs = [(number, slab) for number, image in enumerate(images) if number not in known for slab in image.slabs()]

    def search() -> dict[int, Box]:
        own_boxes = dict[int, Box]()
        for number, slab in slabs[me::ranks]:
            if rows := _box_in_slab(images[number], slab, asked):
                own_boxes[number] = _joined_boxes(own_boxes.get(number, rows), rows)
        return own_boxes

    boxes = dict[int, Box]()
    for each in results_of_ranks(mesh, search, ReadError):
        boxes |= {number: _joined_boxes(boxes.get(number, rows), rows) for number, rows in each.items()}
    for number, image in enumerate(images):
        if number not in known and number not in boxes:
            raise GridError(
                f"{image.url} has no voxel above {asked.above:g}, so ForegroundBox(above={asked.above:g}) leaves "
                "nothing of it; give a lower above=, or leave the image out"
            )
    if asked.cache and boxes:
        result_of_first_rank(mesh, me == 0, partial(_write_boxes, images, asked, boxes))
    boxes |= known
    return tuple(asked.widened(boxes[number], image) for number, image in enumerate(images))


def _joined_boxes(first: Box, other: Box) -> Box:
    return tuple((min(a, c), max(b, d)) for (a, b), (c, d) in zip(first, other, strict=True))


def _box_in_slab(image: StoredVolume, slab: Sequence[Interval], asked: ForegroundBox) -> Box | None:
    values = image.read_window(slab)
    above = (values if asked.channels is None else values[list(asked.channels)]) > asked.above
    rows: list[Interval] = []
    for d, (first, _) in enumerate(slab):
        along = np.flatnonzero(above.any(tuple(k for k in range(above.ndim) if k != d + 1)))
        if not along.size:
            return None
        rows.append((first + int(along[0]), first + int(along[-1]) + 1))
    return tuple(rows)


def _box_file(image: StoredVolume, asked: ForegroundBox) -> str | None:
    # the margin is added to what is kept
    checksum = image.fingerprint(replace(asked, margin=0, cache=None))
    return None if checksum is None else f"box-{checksum}.json"


def _read_boxes(images: Sequence[StoredVolume], asked: ForegroundBox) -> Mapping[int, Box]:
    """Read the boxes that the cache has; a file that is torn counts as absent."""
    folder, boxes = user_cache_folder(asked.cache) if asked.cache else None, dict[int, Box]()
    for number, image in enumerate(images) if folder else ():
        name = _box_file(image, asked)
        file = folder.opened(name) if folder and name else None
        if file is None:
            continue
        with file:
            try:
                rows = tuple((int(a), int(b)) for a, b in zip(*json.load(file), strict=True))
            except (OSError, ValueError, TypeError):
                continue
        if len(rows) == len(image.dims) and all(
            0 <= a < b <= n for (a, b), n in zip(rows, image.stored_shape, strict=True)
        ):
            boxes[number] = rows
    return boxes


def _write_boxes(images: Sequence[StoredVolume], asked: ForegroundBox, boxes: Mapping[int, Box]) -> None:
    folder = user_cache_folder(asked.cache)
    assert folder is not None  # without a cache, nothing is written
    try:
        folder.make_ready()
        for number, rows in boxes.items():
            if name := _box_file(images[number], asked):
                with draft_of(folder.path / name, folder.file_mode) as draft:
                    _ = draft.write(json.dumps([*zip(*rows, strict=True)]).encode())
    except OSError as e:
        raise FieldError(f"cache={asked.cache!r} of a ForegroundBox cannot be written: {e}") from e
