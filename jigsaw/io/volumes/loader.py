"""`VolumeLoader`: batches of crops, read ahead in the background, that resume anywhere on any mesh."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from jigsaw.io._device import Carrier
from jigsaw.io.engine import Engine
from jigsaw.io.epochs import Epochs, Turn, batches_ahead
from jigsaw.io.frame import DATA
from jigsaw.io.volumes.dataset import Crop, Volumes
from jigsaw.io.volumes.volume import spacing_of
from jigsaw.layout import Layout
from jigsaw.mesh import coordinate
from jigsaw.tile import Tile


@dataclass(frozen=True)
class VolumeBatch:
    r"""`image` and `label` tiles [B, C, \*space] (`label` None without labels), and of each sample where it lies.

    `volumes` [B], `origins` [B, dims], `affines` [B, 4, 4] and `spacings` [B, dims]: as in `VolumeSample`.
    """

    image: Tile
    label: Tile | None
    samples: tuple[int, ...]
    volumes: tuple[int, ...]
    origins: NDArray[np.int64]
    affines: NDArray[np.float64]
    spacings: NDArray[np.float64]


_Block = tuple[Tensor, Tensor]


class VolumeLoader(Epochs[_Block, VolumeBatch]):
    """Batches of crops: iterate it once for each epoch, which has crops of its own.

    `batch_size` counts samples over the whole mesh.  The mesh axis ``data`` cuts the batch dim, and all ranks along the
    other axes share their samples; each reads its own tile of them.  Which crops come, and in which order, depends on
    `seed` and epoch alone, never on the mesh; `state_dict` resumes in O(1) on any mesh.

    A background thread reads ahead in order, at most `prefetch_bytes` a rank (0: no thread; None: two batches), and
    `threads` decode.  An iteration that is left early ends its epoch.

    Making one, and every step of an iteration, is collective over the mesh.

    *Sends*: what `Volumes.plan` says, on process groups of its own.

    Raises: `FieldError` for a batch size below 1, or larger than the dataset with `drop_last`; while iterating, the
    `ReadError` of the read that failed, with its traceback.
    """

    def __init__(
        self,
        dataset: Volumes,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        prefetch_bytes: int | None = None,
        threads: int | None = None,
    ) -> None:
        self.dataset = dataset
        self._prefetch_bytes, self._threads = prefetch_bytes, threads
        pieces = dict(dataset.frame.axes).get(DATA, 1)
        ahead = batches_ahead(-(-batch_size // pieces) * dataset.sample_bytes(), prefetch_bytes)
        alone = all(size == 1 for _, size in dataset.frame.domain)
        super().__init__(len(dataset), batch_size, shuffle, seed, drop_last, ahead, alone)
        if dataset.is_live:
            self._join()  # made by all ranks now; what was unpickled joins them later

    def __reduce__(self) -> tuple[Any, ...]:
        made_of = {
            "batch_size": self._order.batch_size,
            "shuffle": self._order.shuffle,
            "drop_last": self._order.drop_last,
            "prefetch_bytes": self._prefetch_bytes,
            "threads": self._threads,
        }
        return _revived, (self.dataset, made_of, self.state_dict())

    def close(self) -> None:
        """End the reading threads and let go of their memory; no iteration is possible afterwards."""
        self._end_iteration()
        if "_engine" in vars(self):
            self._engine.close()

    @property
    def bytes_read(self) -> int:
        """Stored bytes that this rank has fetched, over all iterations."""
        return self._engine.stats.stored_bytes if "_engine" in vars(self) else 0

    @cached_property
    def _engine(self) -> Engine:
        return self.dataset.new_engine(self._threads)

    @cached_property
    def _carrier(self) -> Carrier:
        return Carrier(self.dataset.device_mesh().device_type)

    def _join(self) -> None:
        _ = self._engine, self._carrier

    def _crops(self, turn: Turn, samples: tuple[int, ...]) -> list[Crop]:
        dataset = self.dataset.at(turn.at.seed, turn.at.epoch)
        return [dataset.crop(sample) for sample in samples]

    def _layouts(self, turn: Turn) -> tuple[Layout, Layout]:
        ds, count = self.dataset, len(turn.samples)
        return (
            ds.frame.layout((count, ds.images[0].channels), (DATA, None)),
            ds.frame.layout((count, ds.label_channels), (DATA, None), halo=False),
        )

    def _read(self, turn: Turn) -> _Block:
        first, stop = self._layouts(turn)[0].owned(coordinate(self.dataset.device_mesh()))[0]
        image, label = self._carrier.bring(self.dataset.read(self._engine, self._crops(turn, turn.samples[first:stop])))
        return image, label

    def _batch(self, turn: Turn, block: _Block) -> VolumeBatch:
        ds, mesh = self.dataset, self.dataset.device_mesh()
        crops = self._crops(turn, turn.samples)
        affines = [ds.images[crop.volume].affine_at(crop.origin) for crop in crops]
        self._carrier.hand_over(block)
        image, label = (Tile(local, layout, mesh) for local, layout in zip(block, self._layouts(turn), strict=True))
        return VolumeBatch(
            image,
            label if ds.labels else None,
            turn.samples,
            tuple(crop.volume for crop in crops),
            np.array([crop.origin for crop in crops], np.int64),
            np.stack(affines),
            np.array([spacing_of(affine, ds.frame.dims) for affine in affines]),
        )


def _revived(dataset: Volumes, made_of: Mapping[str, Any], state: Mapping[str, int]) -> VolumeLoader:
    """An unpickled loader, at the place where it was pickled: in the middle of an epoch it goes on."""
    loader = VolumeLoader(dataset, **made_of)
    loader.load_state_dict(state)
    return loader
