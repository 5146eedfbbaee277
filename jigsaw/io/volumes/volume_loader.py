"""`VolumeLoader`: batches of crops of images and label maps, read in the background."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jigsaw.geometry.axis_names import DATA_AXIS
from jigsaw.geometry.layout import Layout
from jigsaw.io.datasets.epochs import BatchTurn, EpochLoader
from jigsaw.io.datasets.samples import TileIfAny, TileRecord
from jigsaw.io.series.request import SampleSpace
from jigsaw.io.volumes.volume import voxel_spacing
from jigsaw.io.volumes.volume_dataset import VolumeCrop, Volumes, with_x_first
from jigsaw.tile.tile import Tile


@dataclass(frozen=True)
class VolumeBatch(TileRecord):
    r"""Batch of `image` and `label` tiles [B, C, \*space] (`label` None without labels), and the place of each sample.

    Values are in the units of the file, unless `normalize` says otherwise; labels do not have a halo. Whole volumes of
    several sizes (``crop=None``) each lie in the middle of a batch as large as the largest of them.

    `volumes` [B], `origins` [B, dims], `affines` [B, 4, 4], `spacings` [B, dims] and `present` [B, C]: as in
    `VolumeSample`, those of the whole batch.

    >>> mesh = jigsaw.init_mesh(depth=1)
    >>> volumes = jigsaw.io.open_volumes(["scan.zarr"], ["label.zarr"], mesh=mesh, crop=(16, 16, 16), crops=4)
    >>> batch = next(iter(jigsaw.io.VolumeLoader(volumes, batch_size=2)))
    >>> batch.samples, batch.volumes, batch.origins.shape
    ((0, 1), (0, 0), (2, 3))
    """

    image: Tile
    label: TileIfAny
    samples: tuple[int, ...]
    volumes: tuple[int, ...]
    origins: NDArray[np.int64]
    affines: NDArray[np.float64]
    spacings: NDArray[np.float64]
    present: Tensor
    x_first: bool = False


_LocalCrops = tuple[Tensor, Tensor, Tensor]
"""This rank's images and labels, and the channels that each image of the whole batch has."""


class VolumeLoader(EpochLoader[Volumes, _LocalCrops, VolumeBatch]):
    """Loader of batches of crops: iterate it once for each epoch, which has its own crops.

    `batch_size` counts samples over the whole mesh. The mesh axis ``data`` cuts the batch dim, and all ranks along the
    other axes share their samples; each reads its own tile of them. The crops and their order depend on `seed` and
    epoch alone, never on the mesh; `state_dict` resumes in O(1) on any mesh.

    A background thread reads ahead in order, at most `prefetch_bytes` a rank (0: no thread; None: two batches), and
    `threads` decode (None: this machine's cores, shared among its ranks).  An iteration that is left early ends its
    epoch.

    Making one, and every step of an iteration, is collective over the mesh. It pickles as its arguments and its state;
    an unpickled one joins the mesh when it first reads.

    *Shapes*: see `VolumeBatch`.
    *Sends*: what `Volumes.plan` says, on process groups of its own.

    Raises: `FieldError` for anything but `Volumes`, a seed below 0, a batch size below 1, or larger than the dataset
    with `drop_last`; while iterating, the `ReadError` of the read that failed, with its traceback.

    >>> mesh = jigsaw.init_mesh(depth=1)
    >>> volumes = jigsaw.io.open_volumes(["scan.zarr"], ["label.zarr"], mesh=mesh, crop=(16, 16, 16), crops=4)
    >>> loader = jigsaw.io.VolumeLoader(volumes, batch_size=2)
    >>> [batch.image.shape for batch in loader]
    [torch.Size([2, 1, 16, 16, 16]), torch.Size([2, 1, 16, 16, 16])]
    """

    _arrays = 2  # images and labels
    _kind, _opener = Volumes, "jigsaw.io.open_volumes"

    def _frame(self, turn: BatchTurn) -> SampleSpace:
        return self.dataset.at(turn.at.seed, turn.at.epoch).frame_of(turn.samples)

    def _crops(self, turn: BatchTurn, samples: tuple[int, ...]) -> list[VolumeCrop]:
        dataset, frame = self.dataset.at(turn.at.seed, turn.at.epoch), self._frame(turn)
        return [dataset.crop_within(sample, frame) for sample in samples]

    def _layouts(self, turn: BatchTurn) -> tuple[Layout, Layout]:
        ds, count, frame = self.dataset, len(turn.samples), self._frame(turn)
        return (
            frame.layout((count, ds.images[0].channels), (DATA_AXIS, None)),
            frame.layout((count, ds.label_channels), (DATA_AXIS, None), halo=False),
        )

    def _read(self, turn: BatchTurn) -> _LocalCrops:
        crops = self._crops(turn, self._own_samples(turn))
        values = self.dataset.read(self._engine, crops, self._frame(turn))
        present = [self.dataset.images[crop.volume].present for crop in self._crops(turn, turn.samples)]
        image, label, present = self._carrier.bring((*values, torch.tensor(present)))
        return image, label, present

    def _batch(self, turn: BatchTurn, block: _LocalCrops) -> VolumeBatch:
        ds, mesh = self.dataset, self._mesh
        crops = self._crops(turn, turn.samples)
        affines = [ds.affine_of(crop) for crop in crops]
        self._carrier.hand_over(block)
        if ds.augment.own:
            self._finish_images(turn, block[0])
        image, label = (Tile(local, layout, mesh) for local, layout in zip(block[:2], self._layouts(turn), strict=True))
        batch = VolumeBatch(
            image,
            label if ds.labels else None,
            turn.samples,
            tuple(crop.volume for crop in crops),
            np.array([crop.origin for crop in crops], np.int64),
            np.stack(affines),
            np.array([voxel_spacing(affine, ds.frame.dims) for affine in affines]),
            block[2],
        )
        return with_x_first(batch, "origins", "spacings") if ds.x_first else batch

    def _own_samples(self, turn: BatchTurn) -> tuple[int, ...]:
        first, stop = self._layouts(turn)[0].owned(self._coordinate)[0]
        return turn.samples[first:stop]

    def _finish_images(self, turn: BatchTurn, images: Tensor) -> None:
        """Let the user's functions have each image, as a tile on the ranks that share it."""
        ds, frame = self.dataset, self._frame(turn)
        shared = [name for name, _ in frame.domain]
        # where each rank has samples of its own, no axis cuts the tile, so nothing is sent on the whole mesh
        mesh = self._mesh[tuple(shared)] if shared and len(shared) < len(frame.axes) else self._mesh
        layout = frame.layout((ds.images[0].channels,), (None,), axes=frame.domain if shared else frame.axes)
        for image, sample in zip(images, self._own_samples(turn), strict=True):
            image.copy_(ds.augment.finished(Tile(image, layout, mesh), turn.at.seed, turn.at.epoch, sample).local)
        ds.fill_absent(images, [crop.volume for crop in self._crops(turn, self._own_samples(turn))])
