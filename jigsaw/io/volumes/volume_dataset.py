"""`Volumes`: crops of images and label maps, their layouts and read plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod
from typing import Any, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jigsaw.geometry.cut import Box, Cut, Interval, box_shape
from jigsaw.geometry.layout import Layout
from jigsaw.io.chunks.array_table import ArrayStore
from jigsaw.io.datasets.samples import (
    MeshSamples,
    TileIfAny,
    TileRecord,
    dtype_name,
    empty_store,
    numpy_dtype_name,
)
from jigsaw.io.reading.engine import ReadEngine, StoreIdentity, look_at_store
from jigsaw.io.reading.read_plan import ReadPlan, plan_read
from jigsaw.io.series.request import ReadRequest, SampleSpace
from jigsaw.io.series.times import is_whole_number
from jigsaw.io.volumes.augment import AskedAugmentations, SampleGrid
from jigsaw.io.volumes.crops import AugmentedCrop, Foreground, FoundVoxels, RandomDraws, crop_origin
from jigsaw.io.volumes.respacing import ImageIntensities, RespaceStep
from jigsaw.io.volumes.volume import AffineMatrix, RenamedLabels, StoredVolume, voxel_spacing
from jigsaw.io.volumes.volume_listing import names_of_volumes
from jigsaw.ranks.mesh import mesh_coordinate
from jigsaw.tile.tile import Tile

_VOLUMES_COMPARED = 8  # number of volumes, spread over all, that ranks compare before they read
_VOLUME_STREAM = 1 << 32  # of the draws of volumes; those of augmentations count up from 1
_SHARES = 1 << 53  # as many as float64 tells apart below 1, so that a share of the weights never is all of them


RecordType = TypeVar("RecordType")


@dataclass(frozen=True)
class VolumeSample(TileRecord):
    r"""Crop, or whole volume: `image` and `label` tiles [C, \*space] of one box (`label` None without labels).

    `origin` is the volume's voxel where it begins (below 0 where the volume is padded), in the order of the dims, which
    is x, y, z where `x_first`.
    `affine` takes its voxels (x, y, z, 1) to the world, 4 x 4, as nibabel has it; `spacing` is in the order of dims.
    Both have the flips, turns and `Affine` of an augmented sample. Their `unit` is that of the file: "millimeter" in
    most, "" where it names none.
    `present` is a plain tensor of bool [C], alike on every rank: False for a channel that the image lacks.

    >>> mesh = jigsaw.init_mesh(depth=1)
    >>> volumes = jigsaw.io.open_volumes(["scan.zarr"], ["label.zarr"], mesh=mesh, crop=(16, 16, 16), crops=4)
    >>> sample = volumes[1]
    >>> sample.volume, sample.origin, sample.spacing
    (0, (11, 0, 1), (1.0, 1.0, 1.0))
    """

    image: Tile
    label: TileIfAny
    index: int
    volume: int
    origin: tuple[int, ...]
    affine: AffineMatrix
    spacing: tuple[float, ...]
    present: Tensor
    x_first: bool = False
    unit: str = ""


@dataclass(frozen=True)
class VolumeCrop:
    """Box and volume of a sample; `augmented` has the changes made to it."""

    volume: int
    origin: tuple[int, ...]
    augmented: AugmentedCrop | None = field(default=None, repr=False)
    sample: int = field(default=-1, repr=False)  # -1 for a whole volume

    def chain(
        self,
        volume: StoredVolume,
        is_label: bool,
        nearest: bool,
        fill: float = 0,
        intensities: ImageIntensities | None = None,
    ) -> AugmentedCrop | None:
        """Return the steps that the stored voxels of its image or label map go through; None where there are none.

        Where they lead between voxels, the value is that of the `nearest` one, or one between them.
        """
        steps = self.augmented or AugmentedCrop((), (0,) * len(self.origin), volume.shape)
        steps = steps.of_labels() if is_label else steps
        if volume.respacing:
            offset = tuple(first + at for first, at in zip(steps.first, self.origin, strict=True))
            steps = steps.after(RespaceStep(volume.respacing, offset, nearest, fill, intensities))
        return steps if steps.steps else None


@dataclass(frozen=True, eq=False)
class Volumes(MeshSamples):
    """Random crops of volumes, or whole volumes; made by `jigsaw.io.open_volumes`.

    ``len(ds)`` samples: `crops` of each volume, or each volume where it `is_whole` (`frame` is that of the largest).
    With `weights` it has as many, each of a volume that is drawn.
    ``ds[i]`` reads one (every rank of the mesh must ask for it, in the same order), a `jigsaw.io.VolumeLoader` reads
    batches in the background. The place of a crop follows from (`seed`, `epoch`, i) alone; `at` gives the dataset of
    another epoch.

    It pickles as its description: unpickled in another process, it joins the mesh when it first reads.

    *Sends*: what `plan` says, on its own process group.

    Raises: `IndexError` for a sample that does not exist; the `ReadError` of a read that failed, on every rank.

    >>> mesh = jigsaw.init_mesh(depth=1)
    >>> volumes = jigsaw.io.open_volumes(["scan.zarr"], ["label.zarr"], mesh=mesh, crop=(16, 16, 16), crops=4)
    >>> volumes.crop(0), volumes.at(seed=0, epoch=1).crop(0)
    (VolumeCrop(volume=0, origin=(0, 1, 1)), VolumeCrop(volume=0, origin=(14, 3, 6)))
    >>> volumes.whole(0).image.shape
    torch.Size([1, 33, 20, 24])
    """

    images: tuple[StoredVolume, ...]
    labels: tuple[StoredVolume | None, ...]
    crops: int
    foreground: Foreground | None
    found: tuple[FoundVoxels, ...]
    intensities: tuple[ImageIntensities, ...]
    dtype: torch.dtype
    label_dtype: torch.dtype
    fill: float
    label_fill: float
    renamed: RenamedLabels
    mode: str
    is_whole: bool = False
    x_first: bool = False
    augment: AskedAugmentations = AskedAugmentations()  # noqa: RUF009 (it is frozen)
    absent_fill: float = 0.0
    weights: tuple[float, ...] = ()
    listing: str = ""
    seed: int = 0
    epoch: int = 0

    def __len__(self) -> int:
        return len(self.images) * self.crops

    def marks_of_samples(self, count: int) -> bytes:
        """Return the names of the images, and how many crops each has."""
        return repr((self.crops, self.weights, names_of_volumes(self.images))).encode()

    def __repr__(self) -> str:
        box = " x ".join(f"{d} {n}" for d, n in zip(self.frame.dims, self.frame.sizes, strict=True))
        crop_text = f"whole, up to {box}" if self.is_whole else f"{self.crops} crops of {box} each"
        return f"Volumes({len(self.images)} volumes, {crop_text}; {self.layout})"

    @property
    def store(self) -> ArrayStore:
        """Empty store: every volume has a store of its own."""
        return empty_store("volumes")

    def identity(self) -> StoreIdentity:
        """Return the identity of some of the volumes; of many not all, because each would be opened."""
        every = [volume for volume in (*self.images, *self.labels) if volume is not None]
        some = every[:: -(-len(every) // _VOLUMES_COMPARED)]
        view = look_at_store(lambda: some[0].url, lambda: [t for v in some for t in v.tables.values()])
        return view._replace(listing=self.listing)

    @cached_property
    def layout(self) -> Layout:
        r"""The layout of a sample's image [C, \*space], halo included; of whole volumes that of the largest.

        Its dims of space are in the order of reading, ``z, y, x``, also under ``axes="xyz"``.
        """
        return self.frame.layout((self.images[0].channels,), (None,))

    @cached_property
    def label_layout(self) -> Layout:
        r"""Layout of a sample's label [C, \*space]; labels do not have a halo."""
        return self.frame.layout((self.label_channels,), (None,), halo=False)

    @property
    def label_channels(self) -> int:
        """Number of channels of a label; 0 without labels."""
        return next((label.channels for label in self.labels if label is not None), 0)

    @property
    def has_classes(self) -> bool:
        """True where labels are integers, and so are never interpolated."""
        return not self.label_dtype.is_floating_point

    @property
    def _label_numpy_dtype(self) -> str:
        return dtype_name(self.label_dtype) if self.has_classes else numpy_dtype_name(self.label_dtype)

    def sample_bytes(self) -> int:
        """Return the most bytes that any rank holds of one sample, image and label."""
        kinds = ((self.layout, self.dtype), (self.label_layout, self.label_dtype))
        return max(sum(prod(k.local_shape(c)) * d.itemsize for k, d in kinds) for c in self.layout.coords())

    def at(self, seed: int, epoch: int) -> Volumes:
        """Return the same volumes with the crops of another seed and epoch."""
        return self.changed(seed=seed, epoch=epoch)

    def crop(self, sample: int) -> VolumeCrop:
        """Return the box and volume of a sample: O(1), the same on every rank."""
        return self.crop_within(sample, self.frame_of([sample]))

    def crop_within(self, sample: int, frame: SampleSpace) -> VolumeCrop:
        """Return the box of a sample in a batch of this frame."""
        index, volume = self._index(sample), self.volume_of(sample)
        draws = RandomDraws(self.seed, self.epoch, index)
        voxels = self.found[volume] if self.found else None
        image = self.images[volume]
        origin = crop_origin(image.shape, frame.sizes, draws, self.foreground, voxels, image.respacing)
        return VolumeCrop(volume, origin, self._augmented(index, volume, origin, frame), index)

    def volume_of(self, sample: int) -> int:
        """Return the number of the volume that a sample is of; with `weights` it is drawn, with replacement."""
        index = self._index(sample)
        if not self.weights:
            return index // self.crops
        draws = RandomDraws(self.seed, self.epoch, index, _VOLUME_STREAM)
        share = draws.below(_SHARES) / _SHARES * self._weight_sums[-1]
        return int(np.searchsorted(self._weight_sums, share, side="right"))

    @cached_property
    def _weight_sums(self) -> NDArray[np.float64]:
        return np.cumsum(self.weights)

    def sample_grid(self, volume: int) -> SampleGrid:
        """Return the grid that is augmented of a volume: of its crops, or of all of it."""
        image = self.images[volume]
        return SampleGrid(image.dims, image.shape if self.is_whole else self.frame.sizes, image.spacing)

    def _augmented(self, index: int, volume: int, origin: tuple[int, ...], frame: SampleSpace) -> AugmentedCrop | None:
        grid = self.sample_grid(volume)
        steps = self.augment.drawn(self.seed, self.epoch, index, grid) if self.augment.steps else ()
        first = tuple(-at for at in origin) if self.is_whole else (0,) * len(origin)
        return AugmentedCrop(steps, first, grid.sizes) if steps else None

    def frame_of(self, samples: Sequence[int]) -> SampleSpace:
        """Return the frame of a batch: that of crops, or for whole volumes the smallest that holds each of them."""
        if not self.is_whole:
            return self.frame
        each = (whole_volume_sizes(self.images[self.volume_of(i)].shape, self.frame.align) for i in samples)
        return replace(self.frame, sizes=tuple(map(max, zip(*each, strict=True))))

    def plan(self, sample: int = 0) -> tuple[ReadPlan, ...]:
        """Return the read plans of a crop: of its image, and of its label where there are labels.

        For a far store it looks up the sizes of the objects that hold one chunk each, which reading does without.
        """
        return tuple(plan.ask_sizes() for plan in self.plans_of(self.crop(sample), self.frame_of([sample])))

    def plans_of(self, crop: VolumeCrop, frame: SampleSpace) -> tuple[ReadPlan, ...]:
        image = self.images[crop.volume]
        values = self.intensities[crop.volume]
        more: dict[str, Any] = {"scale": values.scale, "offset": values.offset, "boundary": frame.boundary}
        layout = frame.layout((1, image.channels), (None, None), axes=frame.domain)
        plans = [self._plan_volume(image, crop, layout, is_label=False, dtype=numpy_dtype_name(self.dtype), **more)]
        label = self.labels[crop.volume] if self.labels else None
        if label is not None:
            bare = frame.layout((1, label.channels), (None, None), halo=False, axes=frame.domain)
            lacks = any(table.masks or np.dtype(table.dtype).kind == "f" for table in label.tables.values())
            nan = self.label_fill if lacks else "keep"
            dtype = self._label_numpy_dtype
            plans.append(self._plan_volume(label, crop, bare, is_label=True, dtype=dtype, nan=nan))
        return tuple(plans)

    def _plan_volume(
        self, volume: StoredVolume, crop: VolumeCrop, layout: Layout, is_label: bool, **more: Any
    ) -> ReadPlan:
        if chain := crop.chain(volume, is_label, is_label and self.has_classes):
            window, first = chain.read_layout(layout, crop.origin, volume.stored_shape)
        else:
            window, first = _crop_layout(layout, crop.origin, volume.shape)
        rows = [(a, a + cut.size) for a, cut in zip(first, window.cuts[2:], strict=True)]
        # boxes of different scans are alike, and so are those of one scan that is changed in different ways
        steps = crop.augmented.steps if crop.augmented else ()
        purpose = (crop.volume, crop.sample, steps, (self.seed, self.epoch) if self.augment.own else ())
        request = ReadRequest(window, volume.parts(rows), missing=volume.missing, purpose=purpose, **more)
        return plan_read(request, volume.tables, self.mode)

    def read(
        self, engine: ReadEngine, crops: Sequence[VolumeCrop], frame: SampleSpace | None = None
    ) -> tuple[Tensor, Tensor]:
        r"""Read this rank's part of crops: images [B, C, \*held] and labels [B, C, \*owned].

        *Sends*: what the plans say.
        """
        frame = frame or self.frame
        at = frame.in_domain(mesh_coordinate(self.device_mesh()))
        layouts = engine.prepared(
            lambda: (
                frame.layout((len(crops), self.images[0].channels), (None, None), axes=frame.domain),
                frame.layout((len(crops), self.label_channels), (None, None), halo=False, axes=frame.domain),
            )
        )
        names = (numpy_dtype_name(self.dtype), self._label_numpy_dtype)
        blocks = [engine.memory.empty(k.local_shape(at), np.dtype(n)) for k, n in zip(layouts, names, strict=True)]
        kinds = list(zip(blocks, layouts, (self.fill, self.label_fill), strict=True))
        for i, crop in enumerate(crops):
            plans, volume = engine.prepared(partial(self.plans_of, crop, frame)), self.images[crop.volume]
            # a volume without labels has one plan
            for is_label, ((block, layout, fill), plan) in enumerate(zip(kinds, plans, strict=False)):
                values = None if is_label else self.intensities[crop.volume]
                nearest = bool(is_label) and self.has_classes
                # a label map has the grid of its image
                if chain := crop.chain(volume, bool(is_label), nearest, fill, values):
                    source, held = (
                        VolumeRead(plan, crop.origin, fill, None if volume.respacing else values),
                        chain.boxes(layout, at),
                    )
                    read = source.of_box(engine, chain, held[0], volume.stored_shape, block.dtype)
                    block[i] = chain.applied(torch.from_numpy(read), held, nearest).numpy()
                else:
                    VolumeRead(plan, crop.origin, fill, values).into(engine, block[i : i + 1], layout.held(at)[2:])
            if self.labels and self.labels[crop.volume] is None:
                blocks[1][i] = self.label_fill
        if self.renamed.old:
            blocks[1][...] = self.renamed.applied(blocks[1])
        image, label = (torch.from_numpy(block) for block in blocks)
        image = image.to(self.dtype)
        self.fill_absent(image, [crop.volume for crop in crops])
        return image, label.to(self.label_dtype)

    def fill_absent(self, images: Tensor, volumes: Sequence[int]) -> None:
        r"""Set the channels that volumes lack, in this rank's part of their images [B, C, \*held]."""
        for image, volume in zip(images, volumes, strict=True):
            if absent := self.images[volume].absent:
                image[absent] = self.absent_fill

    def __getitem__(self, sample: int) -> VolumeSample:
        index = self._index(sample)
        return self._sample(index, lambda: (self.crop(index), self.frame_of([index])))

    def whole(self, volume: int) -> VolumeSample:
        """Read a whole volume, cut like crops are: no rank holds more than its tile, without halo. For inference.

        Raises: `IndexError` for a volume that does not exist.
        """
        number, whole = self._volume_number(volume), self.frame

        def describe() -> tuple[VolumeCrop, SampleSpace]:
            image = self.images[number]
            sizes = dict(zip(image.dims, image.shape, strict=True))
            spec = dict(zip(whole.dims, whole.spec, strict=True))
            align = dict(zip(whole.dims, whole.align, strict=True))
            frame = SampleSpace.of(sizes, whole.axes, spec, None, None, "balanced", align)
            return VolumeCrop(number, (0,) * len(sizes)), frame

        return self._sample(-1, describe)

    def affine_of(self, crop: VolumeCrop) -> AffineMatrix:
        """Return the affine from the voxels (x, y, z, 1) of a sample to the world."""
        affine = self.images[crop.volume].affine_at(crop.origin)
        return crop.augmented.turned_affine(affine, self.frame.dims) if crop.augmented else affine

    def _volume_number(self, volume: int) -> int:
        count = len(self.images)
        if not is_whole_number(volume):
            raise TypeError(f"volume {volume!r} of {count} volumes must be an integer, its place among images=")
        if not -count <= volume < count:
            raise IndexError(f"volume {volume} of {count} volumes: they count from 0 to {count - 1}")
        return volume % count

    def _sample(self, index: int, describe: Callable[[], tuple[VolumeCrop, SampleSpace]]) -> VolumeSample:
        mesh, engine = self.device_mesh(), self._engine
        crop, frame = engine.prepared(describe)  # may open a volume, which fails on one rank alone
        values, labels = self.read(engine, [crop], frame)
        image, affine = self.images[crop.volume], self.affine_of(crop)
        layout = frame.layout((image.channels,), (None,))
        bare = frame.layout((self.label_channels,), (None,), halo=False)
        tile = Tile(values[0].to(mesh.device_type), layout, mesh)
        if index >= 0 and self.augment.own:
            tile = self.augment.finished(tile, self.seed, self.epoch, index)
            self.fill_absent(tile.local[None], [crop.volume])
        sample = VolumeSample(
            tile,
            Tile(labels[0].to(mesh.device_type), bare, mesh) if self.labels else None,
            index,
            crop.volume,
            crop.origin,
            affine,
            voxel_spacing(affine, frame.dims),
            torch.tensor(image.present, device=mesh.device_type),
            unit=image.unit,
        )
        return with_x_first(sample, "origin", "spacing") if self.x_first else sample


def with_x_first(record: RecordType, *along: str) -> RecordType:
    """Return a sample or batch whose dims of space are in reverse: views, for which nothing moves.

    `along` names its numbers along these dims, those of one sample or of each.
    """
    changed: dict[str, Any] = {"x_first": True}
    for name in along:
        values = getattr(record, name)
        changed[name] = values[..., ::-1].copy() if isinstance(values, np.ndarray) else values[::-1]
    for name in ("image", "label"):
        tile, space = getattr(record, name), np.shape(changed[along[0]])[-1]
        if tile is not None:
            lead = tile.ndim - space
            changed[name] = tile.permute(*range(lead), *range(tile.ndim - 1, lead - 1, -1))
    return replace(cast(Any, record), **changed)


def whole_volume_sizes(shape: Sequence[int], align: Sequence[int]) -> tuple[int, ...]:
    """Return the rows of a sample that is a whole volume: up to a multiple of `align` along each dim."""
    return tuple(-(-n // rows) * rows for n, rows in zip(shape, align, strict=True))


def _crop_layout(layout: Layout, at: Sequence[int], shape: Sequence[int]) -> tuple[Layout, tuple[int, ...]]:
    """Return the layout of the part of a crop that the volume has, and the volume's row where that begins along each
    dim.

    With a boundary it has rows of the crop's halo too; where a volume is smaller than the crop, all beyond it is fill.
    """
    cuts, begins = list(layout.cuts), list[int]()
    for d, (first, size) in enumerate(zip(at, shape, strict=True), start=2):
        cut = cuts[d]
        is_wider = not cut.wraps and 0 <= first <= size - cut.size
        low, high = (min(a for a, _ in cut.held), max(b for _, b in cut.held)) if is_wider else (0, cut.size)
        low, high = max(-first, low), min(size - first, high)
        if is_wider:  # the crop's rows and its halo's, which the ranks at its ends own in this read
            points, held = (
                (0, *(p - low for p in cut.points[1:-1]), high - low),
                ((a - low, b - low) for a, b in cut.held),
            )
            cuts[d] = Cut(high - low, points, cut.axes, tuple(held), wraps=False)
        elif (low, high) != (0, cut.size):
            points = tuple(min(max(p, low), high) - low for p in cut.points)
            held = tuple((min(max(a, low), high) - low, min(max(b, low), high) - low) for a, b in cut.held)
            cuts[d] = Cut(high - low, points, cut.axes, held)
        begins.append(first + low)
    return Layout(tuple(cuts), layout.axes), tuple(begins)


@dataclass(frozen=True)
class VolumeRead:
    """Read of a volume for a crop from `origin` on, clipped; `fill` stands for what the volume lacks."""

    plan: ReadPlan
    origin: Sequence[int]
    fill: float
    intensities: ImageIntensities | None

    def into(self, engine: ReadEngine, out: NDArray[Any], held: Sequence[Interval]) -> None:
        r"""Read a crop into `out` [1, C, \*held]."""
        crop_sizes = [high - low for low, high in held]
        lows = [max(-first, 0) for first in self.origin]
        spans = [
            (max(a, low) - a, min(b, low + cut.size) - a) if cut.wraps else (0, b - a)
            for (a, b), low, cut in zip(held, lows, self.plan.request.layout.cuts[2:], strict=True)
        ]
        if [(0, n) for n in crop_sizes] != spans:
            out[...] = self.fill
        self._read(engine, out[(slice(None), slice(None), *(slice(a, max(a, b)) for a, b in spans))])

    def of_box(
        self, engine: ReadEngine, chain: AugmentedCrop, box: Box, shape: Sequence[int], dtype: np.dtype[Any]
    ) -> NDArray[Any]:
        r"""Read a box of an augmented crop's window, [C, \*box]."""
        channels = self.plan.request.layout.cuts[1].size
        out = np.full((channels, *box_shape(box)), self.fill, dtype)
        inside: list[slice] = []
        for (a, b), at, first, n in zip(box, self.origin, chain.first, shape, strict=True):
            begin = a + first + at
            low, high = (min(max(row + first + at, 0), n) for row in (a, b))
            inside.append(slice(low - begin, high - begin) if low < high else slice(0, 0))
        self._read(engine, out[(None, slice(None), *inside)])
        return out

    def _read(self, engine: ReadEngine, room: NDArray[Any]) -> None:
        engine.read(self.plan, room)
        if self.intensities:
            self.intensities.clip_values(room[0])
