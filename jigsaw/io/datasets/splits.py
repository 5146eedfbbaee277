"""`split`: training, validation and test samples by date, such that no window reaches from one into another."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jigsaw.errors import WindowError
from jigsaw.io.datasets.dataset import Dataset
from jigsaw.io.datasets.pairs import PairedDataset
from jigsaw.io.series.times import date_digit_range, is_whole_number, later_times, stamp_digits

SplitRange = tuple[int, int]


def split(dataset: Dataset, **ranges: Any) -> dict[str, Dataset]:
    """Return for each named range of time the dataset of the samples whose inputs and targets all lie within it.

    ``split(ds, train=("1979", "2015"), validation=("2016", "2016"), test=("2017", None))``: pairs or slices of dates,
    both ends included, or of step positions, the end excluded. Ranges may not overlap, so no step is in two of them.
    Samples keep all their targets, so the longest rollout counts; samples that reach over an end are left out.

    Times are those that steps are *valid* at: in a forecast, its start plus the lead time. With windows along the lead
    time, a forecast is kept whole or not at all. A pair is split by dates, which hold the steps of both datasets.

    *Sends*: nothing.

    Raises: `WindowError` for anything but a dataset, ranges that overlap or hold no sample, or for dates where the
    store lacks them. Also for positions in a pair.

    >>> data = jigsaw.io.open("globe.zarr", mesh={"lat": 1}, fields=["t2m"], targets=[1])
    >>> parts = jigsaw.io.split(data, train=("2020-01-01T00", "2020-01-01T18"), test=("2020-01-02", None))
    >>> {name: len(part) for name, part in parts.items()}
    {'train': 3, 'test': 3}
    """
    if not isinstance(dataset, Dataset):
        raise WindowError(f"split({dataset!r}) needs a jigsaw.io.Dataset: what jigsaw.io.open(…, mesh=…) returns")
    if not ranges:
        raise WindowError("split(dataset) names no range; give some, like train=('1979', '2015')")
    bounds = {name: _range_ends(name, wanted) for name, wanted in ranges.items()}
    dated = {not all(end is None or is_whole_number(end) for end in span) for span in bounds.values()}
    if len(dated) > 1:
        raise WindowError(f"split mixes dates and step positions: {ranges}; use one of them")
    (by_date,) = dated
    if isinstance(dataset, PairedDataset) and not by_date:
        raise WindowError(
            f"split: {ranges} are step positions, which count the steps of a pair's inputs and not of its targets; "
            "split it by dates, or split both datasets and pair the parts"
        )
    ends = {name: _included_ends(dataset, span, by_date) for name, span in bounds.items()}
    for (one, a), (other, b) in combinations(ends.items(), 2):
        if a[0] <= b[1] and b[0] <= a[1]:
            raise WindowError(
                f"split: {one}={ranges[one]!r} and {other}={ranges[other]!r} overlap, so that samples of one would be "
                "known to the other; end one before the other begins"
            )
    spans = _SampleSpans(dataset, by_date)
    return {name: spans.inside(name, ranges[name], ends[name]) for name in ranges}


def _range_ends(name: str, span: Any) -> tuple[Any, Any]:
    ends = (span.start, span.stop) if isinstance(span, slice) else span
    if not isinstance(ends, tuple | list) or len(ends) != 2 or (isinstance(span, slice) and span.step is not None):
        raise WindowError(f"split: {name}={span!r} is not a range; give (first, last), like ('1979', '2015')")
    return ends[0], ends[1]


def _included_ends(dataset: Dataset, ends: tuple[Any, Any], dated: bool) -> SplitRange:
    """Return the first and last place that a range includes: dates as YYYYMMDDhhmmss, or step positions."""
    if dated:
        return date_digit_range(*ends)
    start, stop, _ = slice(*ends).indices(len(dataset.times))
    return start, stop - 1


class _SampleSpans:
    """The first and the last place that each sample touches, in dates or positions."""

    def __init__(self, dataset: Dataset, dated: bool) -> None:
        self.dataset, self.dated = dataset, dated
        self.of_targets = _SampleSpans(dataset.partner, dated) if isinstance(dataset, PairedDataset) else None
        steps = (*dataset.inputs, *dataset.targets)
        at, summed = dataset.stored_steps, max((1 + len(s.earlier) for s in dataset.sums), default=1)
        # the first step that a sum reaches: 6 stored steps up to one of every 6 reach no other
        self.low = np.searchsorted(at, at[dataset.anchors + min(steps)] - summed, side="right")
        self.high = dataset.anchors + max(steps)
        # forecasts with windows along the lead time begin at dates of a further dim
        self.began = next((d for d, v in dataset.origins.items() if v.dtype.kind != "m"), None)
        if not dated and self.began is not None:
            raise WindowError(f"split by positions counts steps of lead time here; split by dates of {self.began!r}")

    def inside(self, name: str, wanted: Any, ends: SplitRange) -> Dataset:
        dataset, targets = self.dataset, self.of_targets
        if self.began is not None:
            kept = self._forecasts(self.began, ends)
            kept = kept if targets is None or targets.anchors_inside(ends).all() else ()
            part = dataset.changed(choices={**dataset.choices, self.began: kept})
        else:
            is_kept = self.anchors_inside(ends) & (True if targets is None else targets.anchors_inside(ends))
            part = dataset.changed(anchors=dataset.anchors[is_kept])
        if not len(part):
            times = dataset.times if self.began is None else dataset.origins[self.began]
            extent = f"the dataset has {len(dataset)}, {times[0]} to {times[-1]}"
            raise WindowError(f"split: {name}={wanted!r} holds no sample; {extent}")
        return part

    def anchors_inside(self, ends: SplitRange) -> NDArray[np.bool_]:
        """Return of each anchor whether all that its samples touch lies between the ends."""
        low, high = self._places()
        return (low >= ends[0]) & (high <= ends[1])

    def _places(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the first and last place of each anchor, over all choices of lead time."""
        if not self.dated:
            return self.low, self.high
        low, high = self.dataset.times[self.low], self.dataset.times[self.high]
        for dim, leads in self.dataset.origins.items():
            picked = leads[list(self.dataset.choices[dim])]
            # there is a sample for each lead time, so an anchor's samples lie between its shortest and its longest lead
            low, high = later_times(low, picked.min()), later_times(high, picked.max())
        return _digits_of_times(low), _digits_of_times(high)

    def _forecasts(self, dim: str, ends: SplitRange) -> tuple[int, ...]:
        """Return the chosen forecasts that lie between the ends, from their first step to their last."""
        began, leads = self.dataset.origins[dim], self.dataset.times
        chosen = np.array(self.dataset.choices[dim])
        first, last = leads[self.low.min()], leads[self.high.max()]
        low, high = (_digits_of_times(began[chosen] + _addable_duration(began, lead)) for lead in (first, last))
        return tuple(int(i) for i in chosen[(low >= ends[0]) & (high <= ends[1])])


def _addable_duration(stamps: NDArray[Any], lead: Any) -> Any:
    return lead.astype("timedelta64[us]").item() if stamps.dtype.kind == "O" else lead


def _digits_of_times(times: NDArray[Any]) -> NDArray[np.int64]:
    if times.dtype.kind not in "MO":
        raise WindowError("split by dates needs a time with units, but the store's has none; use step positions")
    return stamp_digits(times)
