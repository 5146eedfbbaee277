"""Random crops: their places, and the steps drawn for each with the rows that every rank must read for them.

Both follow from (seed, epoch, sample) alone: they are the same on every rank without communication.

Places may be drawn to the foreground: a uniform sample of the voxels of each class of a label map, bounded in size. For
each class the voxels with the smallest hashes are kept (bottom-k sampling, Cohen and Kaplan 2007). This is a uniform
sample without replacement that can be taken chunk by chunk, by any rank, in any order, and merged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.drafts import draft_of
from jigsaw.errors import FieldError, GridError, ReadError
from jigsaw.geometry.cut import Box, Cut, cut_points
from jigsaw.geometry.layout import Layout, MeshCoordinate
from jigsaw.io.arguments import are_some_integers, check_cache_folder, is_real_number
from jigsaw.io.cache_folder import CacheFolder, user_cache_folder
from jigsaw.io.chunks.chunk import ChunkIndex
from jigsaw.io.chunks.files import ScratchMemory
from jigsaw.io.formats.slab_arrays import fill_missing_chunk
from jigsaw.io.rank_results import place_in_mesh, result_of_first_rank, results_of_ranks
from jigsaw.io.reading.placing import warn_of_rounding
from jigsaw.io.series.times import is_whole_number
from jigsaw.io.volumes.drawn_steps import VoxelStep, mix_words
from jigsaw.io.volumes.respacing import GridRespacing
from jigsaw.io.volumes.volume import AffineMatrix, RenamedLabels, StoredVolume, VolumeArray
from jigsaw.tile.misuse import warn_once

_VOXELS_AT_ONCE = 1 << 20  # voxels that are hashed at a time
_MOST_CLASSES = 512
ANY_CLASS = 1
"""Key of the one class where voxels of all classes count alike."""

_label_scratch = ScratchMemory()


@dataclass(frozen=True)
class Foreground:
    """Weights that pull crops toward the foreground of the label map.

    A crop is centered on a foreground voxel with the probability ``pos / (pos + neg)``, else on a background voxel, as
    in MONAI's ``RandCropByPosNegLabel``. The center moves inwards where the crop would reach beyond the volume. Missing
    values of a label map are neither.

    - `classes`: the labels that count as foreground; by default all but 0;
    - `by`: ``"voxels"``, where every foreground voxel is equally likely, or ``"classes"``, where every class of the
      volume is equally likely, then a voxel of it;
    - `kept`: how many voxels of each class are remembered, drawn uniformly: all of a class that has no more;
    - `cache`: a folder in which the voxels are kept for the next run, those of label maps in local files and in memory.
      Others may change unseen, so they are searched in each run.

    Raises: `FieldError` for invalid values.

    >>> how = {"mesh": jigsaw.init_mesh(depth=1), "crop": (8, 8, 8), "crops": 4}
    >>> half = jigsaw.io.Foreground(pos=1, neg=1)
    >>> volumes = jigsaw.io.open_volumes(["scan.zarr"], ["label.zarr"], foreground=half, **how)
    >>> [int(sample.label.sum()) > 0 for sample in volumes]
    [True, False, False, True]
    """

    pos: float = 1.0
    neg: float = 1.0
    classes: tuple[int, ...] | None = None
    by: str = "voxels"
    kept: int = 4096
    cache: str | None = None

    def __post_init__(self) -> None:
        are_numbers = is_real_number(self.pos) and is_real_number(self.neg)
        if not (are_numbers and self.pos >= 0 and self.neg >= 0 and 0 < self.pos + self.neg < float("inf")):
            raise FieldError(f"pos={self.pos!r}, neg={self.neg!r} must be weights >= 0 that are not both 0")
        if self.by not in ("voxels", "classes"):
            raise FieldError(f"by={self.by!r} must be 'voxels' or 'classes'")
        if not is_whole_number(self.kept) or self.kept < 1:
            raise FieldError(
                f"kept={self.kept!r} must be a whole number >= 1, the voxels that are remembered of a class"
            )
        if self.classes is not None and not are_some_integers(self.classes):
            raise FieldError(
                f"classes={self.classes!r} must be a list of the labels that count, like (1, 2), or None for all but 0"
            )
        check_cache_folder(self.cache)


@dataclass(frozen=True)
class KeptVoxels:
    """Voxels of one class: how many there are, and flat indices of a uniform sample, by rising hash."""

    count: int = 0
    at: NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    hashes: NDArray[np.uint64] = field(default_factory=lambda: np.empty(0, np.uint64))

    def merged(self, other: KeptVoxels, kept: int) -> KeptVoxels:
        hashes, at = np.concatenate([self.hashes, other.hashes]), np.concatenate([self.at, other.at])
        first = np.argsort(hashes, kind="stable")[:kept]
        return KeptVoxels(self.count + other.count, at[first], hashes[first])

    def bound(self, kept: int) -> np.uint64:
        """Return the hash above which voxels are not kept."""
        return self.hashes[-1] if self.at.size >= kept else np.uint64(2**64 - 1)


@dataclass(frozen=True)
class FoundVoxels:
    """Voxels of one label map: of the background, and of each foreground class; `labels` are some of its labels."""

    background: KeptVoxels = field(default_factory=KeptVoxels)
    classes: Mapping[int, KeptVoxels] = field(default_factory=dict[int, KeptVoxels])
    labels: frozenset[int] = frozenset()

    def merged(self, other: FoundVoxels, kept: int) -> FoundVoxels:
        classes = dict(self.classes)
        for label, more in other.classes.items():
            classes[label] = classes.get(label, KeptVoxels()).merged(more, kept)
        classes = dict(sorted(classes.items()))  # `crop_origin` draws a class by its place in this order
        labels = frozenset(sorted(self.labels | other.labels)[:_MOST_CLASSES])
        return FoundVoxels(self.background.merged(other.background, kept), classes, labels)


@dataclass(frozen=True)
class _LabelSearch:
    how: Foreground
    renamed: RenamedLabels


def find_foreground(
    labels: Sequence[StoredVolume | None],
    weights: Foreground,
    mesh: DeviceMesh | None,
    renamed: RenamedLabels = RenamedLabels(),  # noqa: B008 (it is frozen)
) -> tuple[FoundVoxels, ...]:
    """Find the foreground of every label map, once labels are `renamed`; an image without a label map has none.

    Collective over `mesh`, whose ranks share out the chunks.

    *Sends*: one agreement on what the cache has, one for each label map that it lacks, and one more where that is kept.

    Raises: `GridError` for label maps of several channels; `FieldError` for too many classes, where no label map has
    any foreground, or for a cache that cannot be written; or the `ReadError` of a chunk. All are alike on every rank.
    """
    search = _LabelSearch(weights, renamed)
    for volume in labels:
        if volume is not None and (n := volume.channels) != 1:
            raise GridError(f"{volume.url} has {n} channels; foreground is found in label maps of one channel")
    me, ranks = place_in_mesh(mesh)
    # the first rank's cache decides for all: ranks that see different folders would search different label maps
    maps = {i: volume for i, volume in enumerate(labels) if volume is not None}
    known = result_of_first_rank(
        mesh, me == 0, lambda: {i: _read_foreground(v, search) for i, v in maps.items()} if weights.cache else {}
    )
    voxels = [FoundVoxels() for _ in labels]
    for number, volume in maps.items():
        cached = known.get(number)
        voxels[number] = _search_volume(volume, search, mesh, me, ranks, number) if cached is None else cached
        if cached is None and weights.cache:
            result_of_first_rank(mesh, me == 0, partial(_write_foreground, volume, search, voxels[number]))
    if weights.pos:
        _check_foreground_found(voxels, weights)
    return tuple(voxels)


def _check_foreground_found(voxels: Sequence[FoundVoxels], weights: Foreground) -> None:
    """Warn of classes that no label map has; where none has any foreground, all crops would lie in the background."""
    present = frozenset[int]().union(*(each.labels for each in voxels))
    lacking = [label for label in weights.classes or () if label not in present]
    asked = f"Foreground(classes={weights.classes})"
    known = f"the labels there are: {', '.join(map(str, sorted(present)))}"
    if not any(kept.count for each in voxels for kept in each.classes.values()):
        what = (
            f"{asked}: no label map has any of these; {known}"
            if weights.classes
            else "no label map has any but label 0"
        )
        raise FieldError(f"there is no foreground to weight crops by, {what}; see that labels= are the label maps")
    if lacking:
        warn_once(
            f"{asked} lacks {lacking}",
            f"{asked}: no label map has {', '.join(map(str, lacking))}, so no crop is drawn to it; {known}",
        )


def _search_volume(
    volume: StoredVolume, asked: _LabelSearch, mesh: DeviceMesh | None, me: int, ranks: int, number: int
) -> FoundVoxels:
    """Search a volume: every rank looks through its chunks, and all learn the voxels, or the error, of each."""

    def search() -> FoundVoxels:
        stored, own_voxels = volume.stored[0], FoundVoxels()
        for at, index in enumerate(stored.table.grid.indices()):
            if (number + at) % ranks == me:  # label maps of one chunk are divided among ranks, too
                own_voxels = _search_chunk(volume, stored, index, asked, own_voxels)
        return own_voxels

    whole = FoundVoxels()
    for each in results_of_ranks(mesh, search, ReadError):
        whole = whole.merged(each, asked.how.kept)
    _check_class_count(len(whole.classes), volume.url)
    return whole


def _check_class_count(classes: int, url: str) -> None:
    if classes > _MOST_CLASSES:
        raise FieldError(
            f"{url} has more than {_MOST_CLASSES} labels, too many to weight by class; name those that count by "
            "classes=, or weight by='voxels'"
        )


def _search_chunk(
    volume: StoredVolume, stored: VolumeArray, index: ChunkIndex, asked: _LabelSearch, so_far: FoundVoxels
) -> FoundVoxels:
    table = stored.table
    chunk_box = tuple(
        (n - b, n - a) if d in stored.flip else (a, b)
        for d, (n, (a, b)) in enumerate(zip(table.shape, table.grid.box_of(index), strict=True))
    )
    # in the order of the volume's dims, the rows of the chunk that are the volume's own
    chunk_rows = [chunk_box[stored.roles.index(d)] for d in volume.dims]
    own_rows = [(max(a, c), min(b, d)) for (a, b), (c, d) in zip(chunk_rows, volume.own_box, strict=True)]
    if any(a >= b for a, b in own_rows):
        return so_far
    room = _label_scratch(table.grid.bytes_of(index))
    if table.loader.load(index, room).stored is None:
        fill_missing_chunk(table, index, room, volume.missing)
    values = table.loader.view(room, index)[tuple(slice(0, b - a) for a, b in table.grid.box_of(index))]
    values = stored.unpacked(values)
    if values.dtype.kind == "f":
        warn_of_rounding(values, f"{table.name!r} of {volume.url}")
        values = np.rint(values)
    values = stored.in_order(asked.renamed.applied(values), volume.dims)[..., 0]
    values = values[tuple(slice(a - at, b - at) for (a, b), (at, _) in zip(own_rows, chunk_rows, strict=True))]
    first = [a - at for (a, _), (at, _) in zip(own_rows, volume.own_box, strict=True)]
    return _search_values(values, first, volume.stored_shape, asked.how, so_far)


def _search_values(
    values: NDArray[Any], first: Sequence[int], shape: Sequence[int], weights: Foreground, so_far: FoundVoxels
) -> FoundVoxels:
    strides = [prod(shape[d + 1 :]) for d in range(len(shape))]
    step = max(1, _VOXELS_AT_ONCE // max(1, prod(values.shape[1:])))
    for top in range(0, values.shape[0], step):
        block = values[top : top + step]
        flat = np.zeros((1,) * block.ndim, np.int64)
        for d, (n, low, stride) in enumerate(zip(block.shape, (first[0] + top, *first[1:]), strides, strict=True)):
            rows = (low + np.arange(n, dtype=np.int64)) * stride
            flat = flat + rows.reshape([-1 if k == d else 1 for k in range(block.ndim)])
        so_far = _sift_voxels(block.ravel(), flat.ravel(), weights, so_far)
    return so_far


def _sift_voxels(values: NDArray[Any], flat: NDArray[np.int64], asked: Foreground, so_far: FoundVoxels) -> FoundVoxels:
    # labels are rounded, as when they are read; a missing one is neither foreground nor background
    if values.dtype.kind == "f":
        known = np.isfinite(values)
        values, flat = np.rint(values[known]), flat[known]
    labels = frozenset[int]() if asked.classes is None else frozenset(map(int, np.unique(values).tolist()))
    hashes, sifted = mix_words(flat.astype(np.uint64)), dict[int | None, KeptVoxels]()
    front = values != 0 if asked.classes is None else np.isin(values, asked.classes)
    for label, mask in _class_masks(values, front, asked):
        old = so_far.background if label is None else so_far.classes.get(label, KeptVoxels())
        near = mask & (hashes < old.bound(asked.kept))  # the other voxels' hashes are too large to be kept
        sifted[label] = KeptVoxels(int(mask.sum()), flat[near], hashes[near])
    classes = {label: more for label, more in sifted.items() if label is not None}
    return so_far.merged(FoundVoxels(sifted.get(None, KeptVoxels()), classes, labels), asked.kept)


def _class_masks(
    values: NDArray[Any], front: NDArray[np.bool_], weights: Foreground
) -> Iterator[tuple[int | None, NDArray[np.bool_]]]:
    if not front.all():
        yield None, ~front
    if not front.any():
        return
    if weights.by != "classes":
        yield ANY_CLASS, front
        return
    labels = np.unique(values[front]).tolist()
    _check_class_count(len(labels), "a label map")
    for label in labels:
        yield int(label), front & (values == label)


def _foreground_file(volume: StoredVolume, asked: _LabelSearch) -> str | None:
    """Return the name of a cache file; None for a label map of which nothing tells a change."""
    weights = asked.how
    checksum = volume.fingerprint((weights.classes, weights.by, weights.kept, asked.renamed))
    return None if checksum is None else f"foreground-{checksum}.npz"


def _foreground_cache(asked: _LabelSearch) -> CacheFolder:
    folder = user_cache_folder(asked.how.cache)
    assert folder is not None  # without a cache, nothing is looked up
    return folder


def _read_foreground(volume: StoredVolume, asked: _LabelSearch) -> FoundVoxels | None:
    """Read the voxels from the cache; None where they are absent, or the file is torn."""
    name = _foreground_file(volume, asked)
    try:
        file = None if name is None else _foreground_cache(asked).opened(name)
        if file is None:
            return None
        with file, np.load(file, allow_pickle=False) as held:
            labels, counts = held["labels"].tolist(), held["counts"].tolist()
            parts = [KeptVoxels(n, held[f"at{i}"], held[f"hashes{i}"]) for i, n in enumerate(counts)]
            present = frozenset(map(int, held["there"].tolist()))
    except (OSError, ValueError, KeyError, EOFError, BadZipFile):
        return None
    return FoundVoxels(parts[0], dict(zip(labels, parts[1:], strict=True)), present)


def _write_foreground(volume: StoredVolume, asked: _LabelSearch, voxels: FoundVoxels) -> None:
    name = _foreground_file(volume, asked)
    if name is None:
        return
    folder, parts = _foreground_cache(asked), [voxels.background, *voxels.classes.values()]
    arrays: dict[str, Any] = {"labels": np.array(list(voxels.classes), np.int64)}
    arrays["there"] = np.array(sorted(voxels.labels), np.int64)
    arrays["counts"] = np.array([p.count for p in parts], np.int64)
    for i, p in enumerate(parts):
        arrays |= {f"at{i}": p.at, f"hashes{i}": p.hashes}
    try:
        folder.make_ready()
        with draft_of(folder.path / name, folder.file_mode) as draft:
            np.savez(draft, **arrays)
    except OSError as e:
        raise FieldError(f"cache={asked.how.cache!r} of a Foreground cannot be written: {e}") from e


_WORD_VALUES = 1 << 64


class RandomDraws:
    """Numbers of a counter-based generator (Philox, Salmon et al. 2011) at the place (seed, epoch, sample).

    The raw words, because numpy's distributions may change from version to version.  Each `stream` has its own: 0 is
    that of where crops lie.
    """

    def __init__(self, seed: int, epoch: int, sample: int, stream: int = 0) -> None:
        key = np.array([seed % _WORD_VALUES, epoch % _WORD_VALUES], np.uint64)
        counter = np.array([0, 0, sample % _WORD_VALUES, stream], np.uint64)
        self._source = np.random.Philox(key=key, counter=counter)

    def word(self) -> int:
        return int(self._source.random_raw())

    def below(self, count: int) -> int:
        return (self.word() * count) >> 64

    def chance(self, p: float) -> bool:
        return self.word() < p * _WORD_VALUES

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * (self.word() / _WORD_VALUES)


def crop_origin(
    shape: Sequence[int],
    crop: Sequence[int],
    draws: RandomDraws,
    weights: Foreground | None,
    voxels: FoundVoxels | None,
    respacing: GridRespacing | None = None,
) -> tuple[int, ...]:
    """Draw the first row of a crop along each dim; a volume that is smaller, below row 0 then, lies in its middle."""
    stored = respacing.stored if respacing else shape  # the shape in which foreground was found
    center = None if weights is None or voxels is None else _foreground_center(stored, draws, weights, voxels)
    if center and respacing:
        center = respacing.nearest_voxel(center)
    if center is None:
        firsts = [draws.below(max(n - rows, 0) + 1) for n, rows in zip(shape, crop, strict=True)]
    else:
        firsts = [c - rows // 2 for c, rows in zip(center, crop, strict=True)]
    return tuple(
        -((rows - size) // 2) if rows > size else min(max(first, 0), size - rows)
        for first, size, rows in zip(firsts, shape, crop, strict=True)
    )


def _foreground_center(
    shape: Sequence[int], draws: RandomDraws, weights: Foreground, known: FoundVoxels
) -> tuple[int, ...] | None:
    """Draw a voxel of the kind that is drawn, or of the other kind where a volume has none of the first."""
    wants = draws.chance(weights.pos / (weights.pos + weights.neg))
    present = [kept.at for kept in known.classes.values() if kept.at.size]
    if not present or (not wants and known.background.at.size):
        voxels = known.background.at
    else:
        voxels = present[draws.below(len(present))]
    if not voxels.size:
        return None
    return tuple(int(i) for i in np.unravel_index(int(voxels[draws.below(voxels.size)]), tuple(shape)))


@dataclass(frozen=True)
class AugmentedCrop:
    """Steps of a sample, in the order in which they are taken.

    They count from the first voxel of a window of `sizes` voxels, the row `first` of the sample along each dim: a crop
    is its own window; of a whole volume it is the volume, wherever that lies in its batch.
    """

    steps: tuple[VoxelStep, ...]
    first: tuple[int, ...]
    sizes: tuple[int, ...]

    def of_labels(self) -> AugmentedCrop:
        return replace(self, steps=tuple(step for step in self.steps if step.moves_labels))

    def after(self, step: VoxelStep) -> AugmentedCrop:
        return replace(self, steps=(step, *self.steps))

    def stages(self, layout: Layout) -> list[list[Cut]]:
        """Return the cuts along each dim before each step, and after the last, in rows of the window."""
        cuts = [
            replace(cut, held=tuple((a - first, b - first) for a, b in cut.held), wraps=True)
            for cut, first in zip(layout.cuts[2:], self.first, strict=True)
        ]
        stages = [cuts]
        for step in reversed(self.steps):
            cuts = step.needed(cuts, self.sizes)
            stages.append(cuts)
        return stages[::-1]

    def boxes(self, layout: Layout, coordinate: MeshCoordinate) -> list[Box]:
        return [Layout(tuple(cuts), layout.axes).held(coordinate) for cuts in self.stages(layout)]

    def read_layout(self, layout: Layout, origin: Sequence[int], shape: Sequence[int]) -> tuple[Layout, list[int]]:
        """Return the layout of what is read for a crop from `origin` on, and the row of the volume where it begins."""
        cuts, begins = list(layout.cuts), list[int]()
        where = zip(self.stages(layout)[0], origin, self.first, shape, strict=True)
        for d, (cut, at, first, size) in enumerate(where, start=2):
            held = [tuple(min(max(row + first + at, 0), size) for row in rows) for rows in cut.held]
            rows = [(a, b) for a, b in held if a < b] or [(0, 1)]
            low, high = min(a for a, _ in rows), max(b for _, b in rows)
            spans = tuple((a - low, b - low) if a < b else (0, 0) for a, b in held)
            cuts[d] = Cut(high - low, cut_points(high - low, cut.pieces), cut.axes, spans)
            begins.append(low)
        return Layout(tuple(cuts), layout.axes), begins

    def applied(self, block: Tensor, boxes: Sequence[Box], nearest: bool) -> Tensor:
        r"""Return the values [C, \*box] of the last of the `boxes`, made from those of the first."""
        for step, source, target in zip(self.steps, boxes, boxes[1:], strict=False):
            block = step.applied(block, source, target, self.sizes, nearest)
        return block

    def turned_affine(self, affine: AffineMatrix, dims: Sequence[str]) -> AffineMatrix:
        """Return the affine of the augmented sample; `affine` is that of the voxels (x, y, z) before it."""
        to_source = np.eye(len(dims) + 1)
        for step in self.steps:
            to_source = to_source @ step.to_source(self.sizes)
        moved = np.eye(len(dims) + 1)
        moved[:-1, -1] = self.first
        to_source = moved @ to_source @ np.linalg.inv(moved)
        at = [*("xyz".index(d) for d in dims), 3]
        whole = np.eye(4)
        whole[np.ix_(at, at)] = to_source
        return affine @ whole
