"""`pair`: two datasets as one, for inputs and targets on other grids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import FieldError, ShardingError, WindowError
from jigsaw.geometry.layout import Layout
from jigsaw.io.datasets.dataset import Dataset, Sample
from jigsaw.io.datasets.held_steps import HeldSteps
from jigsaw.io.series.store_survey import StoreSurvey
from jigsaw.io.series.times import kind_of_times, later_times


@dataclass(frozen=True, eq=False)
class PairedDataset(Dataset):
    """Samples of two datasets at the same times: the input of one, and for a target the input of its `partner`.

    Each is cut by the mesh as it was opened, and read by an engine of its own.
    """

    partner: Dataset = field(kw_only=True)

    def __repr__(self) -> str:
        return f"PairedDataset({self.unpaired!r} with {self.partner!r})"

    @cached_property
    def unpaired(self) -> Dataset:
        """The dataset of the inputs alone."""
        own: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(Dataset)}
        own["mesh"] = self.mesh_so_far
        return Dataset(**own)

    @cached_property
    def target_dataset(self) -> Dataset:
        """The dataset of the targets, on the mesh of the inputs."""
        return self.partner if self.partner.is_live else self.partner.changed(mesh=self.device_mesh())

    @cached_property
    def target_layout(self) -> Layout:
        r"""The layout of a sample's target [T, C, \*space], with the halo that the partner was opened with."""
        return self.partner.layout

    @property
    def target_fields(self) -> tuple[str, ...]:
        """The name of each channel of the partner's input."""
        return self.partner.fields

    def target_times(self, sample: int) -> NDArray[Any]:
        """Return the times that the partner's input steps are valid at."""
        return self.partner.input_times(sample)

    def sample_bytes(self) -> int:
        """Return the most bytes that any rank holds of one sample, input and target."""
        return self.unpaired.sample_bytes() + self.partner.sample_bytes()

    def reading(self, samples: Sequence[int], kept: HeldSteps | None = None) -> NoReturn:
        """Refuse, because inputs and targets are read one by one.  Raises: `FieldError`, always."""
        raise FieldError(
            "a pair has two stores, so that no single plan or recommendation is that of its samples; take "
            "data.unpaired, the inputs, and data.partner, the targets, one by one"
        )

    def changed(self, **fields: Any) -> Self:
        """Return a copy with other attributes; of other anchors the partner has those of the same times."""
        if "anchors" in fields:
            kept = self.partner.anchors[np.searchsorted(self.anchors, fields["anchors"])]
            fields["partner"] = self.partner.changed(anchors=kept)
        return super().changed(**fields)

    def __getitem__(self, sample: int) -> Sample:
        ours = self.unpaired[sample]
        theirs = self.target_dataset[sample]
        return replace(ours, target=theirs.input, target_times=theirs.input_times)


def pair(inputs: Dataset, targets: Dataset) -> PairedDataset:
    r"""Return one dataset of two whose grids, stores or fields differ: a sample has the input of both.

    Its samples are those of the times that both have, the anchors of their windows. The input is that of `inputs`, and
    the target that of `targets`, each with its own grid, layout, halo, steps and normalization. Both are opened without
    targets; ``inputs=["6h"]`` of the second makes the target a later step. A `jigsaw.io.DataLoader` and
    `jigsaw.io.split` take the result as any other dataset.

    *Shapes*: input and target [T, C, \*space], each as its own `Dataset.layout`. *Sends*: nothing.

    Raises: `FieldError` for anything but two datasets of `jigsaw.io.open`, `ShardingError` for two meshes. Also
    `WindowError` for datasets that have targets, no common time, or other members.

    >>> mesh = jigsaw.init_mesh(lat=1, lon=1)
    >>> whole = jigsaw.io.open("globe.zarr", mesh=mesh, fields=["t2m", "u10"], inputs=["-6h", "0h"])
    >>> tropics = jigsaw.io.open("globe.zarr", mesh=mesh, fields=["t2m"], region={"lat": (-30, 30)}, every="12h")
    >>> data = jigsaw.io.pair(whole, tropics)
    >>> len(data), data[0].input.shape, data[0].target.shape
    (3, torch.Size([2, 2, 9, 16]), torch.Size([1, 1, 3, 16]))
    >>> data[0].input_times[-1] == data[0].target_times[0]
    np.True_
    """
    datasets = {"inputs": inputs, "targets": targets}
    for name, dataset in datasets.items():
        if not isinstance(dataset, Dataset) or isinstance(dataset, PairedDataset):  # pyright: ignore[reportUnnecessaryIsInstance] # what a user may pass
            raise FieldError(f"pair: {name}={dataset!r} must be a dataset as jigsaw.io.open(…, mesh=…) returns it")
        if dataset.targets:
            raise WindowError(
                f"pair: {name} was opened with targets={list(dataset.targets)}, but a pair's target is the input of "
                f"the second dataset; open both without, and the second with inputs={list(dataset.targets)}"
            )
    if inputs.frame.axes != targets.frame.axes:
        raise ShardingError(
            f"pair: inputs are cut by a mesh of {dict(inputs.frame.axes)}, targets by one of "
            f"{dict(targets.frame.axes)}; open both with the same mesh"
        )
    meshes = [dataset.mesh_so_far for dataset in datasets.values()]
    if meshes[0] != meshes[1]:
        raise ShardingError(
            f"pair: inputs and targets are cut alike, by {dict(inputs.frame.axes)}, on other devices or ranks: "
            f"{meshes[0]} and {meshes[1]}; open both with the same mesh"
        )
    counts = {name: len(dataset) // len(dataset.anchors) for name, dataset in datasets.items()}
    if len(set(counts.values())) > 1:
        raise WindowError(
            f"pair: of each time there are {counts['inputs']} samples of inputs and {counts['targets']} of targets; "
            "open both with as many members, select={'member': [0, 1]}, or one, select={'member': 0}"
        )
    _check_members(inputs, targets)
    # a window of the next step alone has its first anchor before the series, where no time is
    anchors = [d.anchors[(d.anchors >= 0) & (d.anchors < len(d.times))] for d in datasets.values()]
    times = [_anchor_times(name, datasets[name], at) for name, at in zip(datasets, anchors, strict=True)]
    if kind_of_times(times[0]) != kind_of_times(times[1]):
        raise WindowError(
            f"pair: times of inputs are like {times[0][0]}, of targets like {times[1][0]}: they cannot be compared; "
            "rewrite one with the units and calendar of the other"
        )
    _, ours, theirs = np.intersect1d(*times, assume_unique=True, return_indices=True)
    if not len(ours):
        spans = " and ".join(f"{name} {t[0]} to {t[-1]}" for name, t in zip(datasets, times, strict=True))
        raise WindowError(f"pair: no time is in both, with windows that are whole: {spans}; select others with time=")
    own: dict[str, Any] = {f.name: getattr(inputs, f.name) for f in fields(Dataset)}
    own["anchors"] = anchors[0][ours]
    return PairedDataset(**own, partner=targets.changed(anchors=anchors[1][theirs]))


def _check_members(inputs: Dataset, targets: Dataset) -> None:
    """Raise `WindowError` for samples of other places along a further dim, where both stores have its coordinate."""
    ours, theirs = (_places_by_dim(dataset) for dataset in (inputs, targets))
    for (dim, own), (other_dim, other) in zip(ours.items(), theirs.items(), strict=False):
        if own is not None and other is not None and own != other:
            raise WindowError(
                f"pair: samples of inputs are those of {dim!r} {own}, samples of targets those of {other_dim!r} "
                f"{other}, and the first is paired with the first; choose the same ones by select="
            )


def _places_by_dim(dataset: Dataset) -> dict[str, list[Any] | None]:
    """Return the coordinates of the several places along each further dim; None where the store has none."""
    survey, places = StoreSurvey(dataset.store), dict[str, list[Any] | None]()
    for variable in dataset.variables:
        for dim, chosen in dataset.choices.items():
            if len(chosen) > 1 and dim in variable.table.dims and dim != dataset.stacked:
                is_stated = survey.coords.name(variable.table, dim) is not None
                places[dim] = survey.values_along(variable, dim)[list(chosen)].tolist() if is_stated else None
    return {dim: places[dim] for dim in dataset.choices if dim in places}


def _anchor_times(name: str, dataset: Dataset, anchors: NDArray[np.int64]) -> NDArray[Any]:
    """Return the time that each anchor is valid at: in a forecast, its start plus the lead time."""
    if not len(anchors):
        raise WindowError(f"pair: {name} has no window with its anchor in the series; select a longer time")
    times = dataset.times[anchors]
    for dim, values in dataset.origins.items():
        first, *others = dataset.choices[dim]
        if others:
            raise WindowError(
                f"pair: {name} has samples of {1 + len(others)} places along {dim!r}, which have times of their own; "
                f"choose one, like select={{{dim!r}: {first}}}"
            )
        times = later_times(times, values[first])
    return times
