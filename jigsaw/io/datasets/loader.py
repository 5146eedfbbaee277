"""`DataLoader`: batches of tiles, read ahead in the background, that resume anywhere on any mesh."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jigsaw.geometry.axis_names import DATA_AXIS
from jigsaw.geometry.layout import Layout
from jigsaw.io.datasets.dataset import Dataset, SampleReading
from jigsaw.io.datasets.epochs import BatchTurn, EpochLoader, check_whole_number
from jigsaw.io.datasets.held_steps import HeldSteps
from jigsaw.io.datasets.pairs import PairedDataset
from jigsaw.io.datasets.samples import RolloutLengths, TileIfAny, TileRecord
from jigsaw.io.reading.chunk_readers import ReadCounts
from jigsaw.tile.tile import Tile


@dataclass(frozen=True)
class Batch(TileRecord):
    r"""`input` and `target` tiles [B, T, C, \*space] (None without targets), the samples, and their times [B, T].

    Values are in the units of the store, unless `normalize` says otherwise; times are datetime64, or cftime dates of
    other calendars. On each rank a tile has the rank's own rows, the input also those of its halo. With `stack`, tiles
    are [B, member, T, C, \*space].

    With forcings, they are the last channels of the input, and `target_forcings` those of the target's times.

    >>> mesh = jigsaw.init_mesh(lat=1, lon=1)
    >>> data = jigsaw.io.open("globe.zarr", mesh=mesh, fields=["t2m"], targets=[1])
    >>> batch = next(iter(jigsaw.io.DataLoader(data, batch_size=2)))
    >>> batch.input.shape, batch.target.shape, batch.samples
    (torch.Size([2, 1, 1, 9, 16]), torch.Size([2, 1, 1, 9, 16]), (0, 1))
    >>> batch.target_times.astype("datetime64[h]")
    array([['2020-01-01T06'],
           ['2020-01-01T12']], dtype='datetime64[h]')
    """

    input: Tile
    target: TileIfAny
    samples: tuple[int, ...]
    input_times: NDArray[Any]
    target_times: NDArray[Any]
    target_forcings: TileIfAny = None


_LocalBatch = tuple[Dataset, list[Tensor]]
"""The dataset of an epoch, with its targets; a rank's input, target and target forcings."""


class DataLoader(EpochLoader[Dataset, _LocalBatch, Batch]):
    """Batches of a dataset: iterate it once for each epoch.

    `batch_size` counts samples over the whole mesh. The mesh axis ``data`` cuts the batch dim, and all ranks along the
    other axes share their samples; each reads its own tile of them. The order depends on `seed` and epoch alone, never
    on the mesh. Steps that the windows of a batch share, or those of a batch and the next, are read once. Fields
    without time are read only once in all. `cache_bytes` keeps further steps in memory, the last used ones of so many
    bytes a rank. Of a `jigsaw.io.pair` it reads both, side by side, within the same bytes.

    `rollout` says how many of the dataset's targets an epoch has: ``{0: 1, 5: 4, 10: 12}`` is one in the epochs 0 to 4,
    four from 5 on, twelve from 10 on. The samples are those of the longest rollout, so that epochs are equally long and
    a state means the same place.

    A background thread reads ahead in order, at most `prefetch_bytes` a rank (0: no thread; None: two batches), and
    `threads` decode (None: this machine's cores, shared among its ranks). An iteration that is left early ends its
    epoch: the next one begins a new epoch, as in torch. `state_dict` resumes in O(1) on any mesh.

    Making one, and every step of an iteration, is collective over the mesh. It pickles as its arguments and its state;
    an unpickled one joins the mesh when it first reads.

    *Shapes*: see `Batch`.
    *Sends*: what `Dataset.plan` says, on process groups of its own.

    Raises: `FieldError` for anything but a `Dataset`, a seed below 0, a batch size below 1, or larger than the dataset
    with `drop_last`; `WindowError` for a `rollout` that the targets cannot give; while iterating, the `ReadError` of
    the read that failed, with its traceback.

    >>> mesh = jigsaw.init_mesh(lat=1, lon=1)
    >>> data = jigsaw.io.open("globe.zarr", mesh=mesh, fields=["t2m"], targets=[1])
    >>> loader = jigsaw.io.DataLoader(data, batch_size=2, shuffle=True, seed=3)
    >>> [batch.samples for batch in loader]
    [(4, 1), (3, 2), (6, 0), (5,)]
    >>> loader.state_dict()
    {'seed': 3, 'epoch': 1, 'next_sample': 0}
    >>> loader.close()
    """

    _kind, _opener = Dataset, "jigsaw.io.open"

    def __init__(
        self,
        dataset: Dataset,
        batch_size: int = 1,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        rollout: Mapping[int, int] | int | None = None,
        prefetch_bytes: int | None = None,
        cache_bytes: int = 0,
        threads: int | None = None,
    ) -> None:
        check_whole_number("cache_bytes", cache_bytes, 0, ": the bytes of decoded steps that a rank keeps")
        self._check(dataset)
        self._rollout, self._cache_bytes = RolloutLengths.of(rollout, len(dataset.targets)), cache_bytes
        super().__init__(
            dataset,
            batch_size,
            shuffle=shuffle,
            seed=seed,
            drop_last=drop_last,
            prefetch_bytes=prefetch_bytes,
            threads=threads,
        )

    def _made_of(self) -> dict[str, Any]:
        more = {"rollout": dict(self._rollout.lengths) or None, "cache_bytes": self._cache_bytes}
        return super()._made_of() | more

    @cached_property
    def _kept(self) -> HeldSteps:
        return self.dataset.new_steps(self._own_cache)

    @cached_property
    def _by_targets(self) -> dict[int, Dataset]:
        """Datasets by their number of targets, each made when an epoch first needs it."""
        dataset = self.dataset
        return {len(dataset.targets): dataset.unpaired if isinstance(dataset, PairedDataset) else dataset}

    @cached_property
    def _partner(self) -> DataLoader | None:
        """The loader of a pair's targets: the same samples in the same order."""
        if not isinstance(self.dataset, PairedDataset):
            return None
        targets = self.dataset.target_dataset
        batch_bytes = self.batch_bytes // self.dataset.sample_bytes() * targets.sample_bytes()
        arguments: dict[str, Any] = self._made_of() | {"cache_bytes": self._cache_bytes - self._own_cache}
        if self._prefetch_bytes is not None:
            arguments["prefetch_bytes"] = self._ahead * batch_bytes
        return DataLoader(targets, **arguments)

    @property
    def _own_cache(self) -> int:
        """The bytes of the cache that are for the inputs of a pair, by their share of a sample."""
        if not isinstance(self.dataset, PairedDataset):
            return self._cache_bytes
        own = self.dataset.unpaired.sample_bytes()
        return self._cache_bytes * own // self.dataset.sample_bytes()

    def _join(self) -> None:
        super()._join()
        _ = self._partner

    def __iter__(self) -> Iterator[Batch]:
        self._join()
        partner = self._partner
        if partner is None:
            yield from super().__iter__()
            return
        partner._state, partner._resumed = self._state, self._resumed
        # The partner first: this loader's state counts a batch as handed out, which holds once both are read.
        for other, batch in zip(partner, super().__iter__(), strict=True):
            yield replace(batch, target=other.input, target_times=other.input_times)

    def close(self) -> None:
        """End the reading threads and let go of their memory; no iteration is possible afterwards."""
        super().close()
        if (partner := vars(self).get("_partner")) is not None:
            partner.close()

    @property
    def read_counts(self) -> ReadCounts:
        """Counts of this rank over all iterations, counted as the `rows` of a plan: requests, chunks, bytes."""
        partner = vars(self).get("_partner")
        return super().read_counts + (partner.read_counts if partner is not None else ReadCounts())

    @property
    def waited_s(self) -> float:
        """Seconds that this rank has waited for data, over all iterations."""
        partner = vars(self).get("_partner")
        return super().waited_s + (partner.waited_s if partner is not None else 0.0)

    def _failed(self) -> None:
        # Of four ranks that share a batch rank 2 fails. The others may hold the steps of this batch while rank 2 does
        # not, and would plan another next read than rank 2. So every rank forgets them, also one that only heard of it.
        vars(self).pop("_kept", None)

    def _dataset_at(self, epoch: int) -> Dataset:
        steps = self._rollout.at(epoch)
        if steps not in self._by_targets:
            self._by_targets[steps] = self.dataset.rollout(steps)
        return self._by_targets[steps]

    def _read(self, turn: BatchTurn) -> _LocalBatch:
        dataset = self._dataset_at(turn.at.epoch)
        own_samples = self._own_samples(turn.samples)
        # Fewer samples than ranks along `data`: of the last 3 on data=4, lat=2 the two ranks of the fourth place read
        # nothing. They share their reads with each other alone, so no other rank waits for them.
        if not own_samples:
            shapes = [layout.local_shape(self._coordinate) for layout in _batch_layouts(dataset, turn.samples)]
            empty = [torch.empty(shape, dtype=self.dataset.dtype) for shape in shapes]
            return dataset, self._carrier.bring(empty)
        reading = dataset.reading(own_samples, self._kept)
        following = [self._own_samples(samples) for samples in turn.following]
        self._fetch_ahead(dataset, reading, following)
        # The steps that the next batch of this epoch needs are kept, which every rank knows from the order alone. The
        # last batch has no next one, so without `cache_bytes` nothing is kept beyond the end of an epoch.
        wanted = dataset.keys(following[0]) if following else ()
        block = dataset.read(self._engine, reading, self._kept, frozenset(wanted))
        return dataset, self._carrier.bring(dataset.unpack(block, reading))

    def _fetch_ahead(self, dataset: Dataset, reading: SampleReading, following: Sequence[tuple[int, ...]]) -> None:
        """Fetch from far stores what a batch needs, then what the following batches need."""
        ahead, kept = self._engine.ahead, self._kept
        if ahead is None:
            return
        ahead.expect(reading.request, partial(dataset.plan_of, reading))
        # A plan that was made ahead is used only if the request of that batch is identical. So for each batch, predict
        # the steps that will be held by then. A batch without samples on this rank reads nothing, and ends the loop.
        for samples in takewhile(bool, following):
            kept = kept.foreseen(reading.keys, frozenset(dataset.keys(samples)))
            reading = dataset.reading(samples, kept)
            ahead.expect(reading.request, partial(dataset.plan_of, reading))

    def _own_samples(self, samples: tuple[int, ...]) -> tuple[int, ...]:
        """Return the samples of a batch that this rank reads: none where there are fewer than ranks along `data`."""
        layout = self.dataset.frame.layout((len(samples), 1), (DATA_AXIS, None))
        first, stop = layout.owned(self._coordinate)[0]
        return samples[first:stop]

    def _batch(self, turn: BatchTurn, block: _LocalBatch) -> Batch:
        samples, (dataset, parts) = turn.samples, block
        self._carrier.hand_over(parts)
        layouts = _batch_layouts(dataset, samples)
        input_tile, target, forced = (Tile(x, layout, self._mesh) for x, layout in zip(parts, layouts, strict=True))
        return Batch(
            input_tile,
            target if dataset.targets else None,
            samples,
            np.stack([dataset.input_times(s) for s in samples]),
            np.stack([dataset.target_times(s) for s in samples]),
            forced if dataset.targets and dataset.forcings else None,
        )


def _batch_layouts(ds: Dataset, samples: tuple[int, ...]) -> list[Layout]:
    layouts = ((ds.layout, True), (ds.target_layout, False), (ds.forcing_layout, True))
    leads = [(len(samples), *layout.shape[: -len(ds.frame.dims)]) for layout, _ in layouts]
    spec = (DATA_AXIS, *(None for _ in leads[0][1:]))
    return [ds.frame.layout(lead, spec, halo=halo) for lead, (_, halo) in zip(leads, layouts, strict=True)]
