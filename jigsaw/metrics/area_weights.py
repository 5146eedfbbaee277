"""Weights of rows of latitude, and means of values that may be missing."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from jigsaw.fields.latlon import latitude_rows
from jigsaw.nn.losses.loss import weighted_mean
from jigsaw.ops.reductions import ReducedDims

# A Tile or a plain whole Tensor: torch's stubs know only the latter, so this stays open.
MetricValues = Any


def latitude_weights(latitudes: Any, dtype: torch.dtype | None = None) -> Tensor:
    """Return w = sin(upper edge) - sin(lower edge) of each row's cells, divided by their mean: [lat, 1].

    Cells end halfway between rows, the outer ones at the poles or half a row out (a region's). So a row at a pole
    counts for the little area that it covers.  On a globe these are WeatherBench2's weights.

    Raises: `GridError` for values that are not latitudes in degrees, north or south first.

    >>> jigsaw.metrics.latitude_weights([90, 45, 0, -45, -90]).flatten()
    tensor([0.1903, 1.3530, 1.9134, 1.3530, 0.1903])
    """
    rows = latitude_rows(latitudes)
    areas = np.diff(np.sin(np.deg2rad(rows.edges)))
    areas = areas[::-1] if rows.falling else areas
    return torch.tensor(areas / areas.mean(), dtype=dtype or torch.get_default_dtype())[:, None]


def average_over(values: Any, dim: ReducedDims, weights: MetricValues | None, skip_missing: bool) -> Any:
    """Return the weighted mean along `dim`; of nothing, or of missing values alone, it is NaN.

    *Sends*: one all-reduce of the result, two with weights or where values may be missing.
    """
    if skip_missing:
        missing = values.isnan()
        values = values.masked_fill(missing, 0)
        counted = (~missing).to(values.dtype)
        weights = counted if weights is None else counted * weights
    return values.mean(dim) if weights is None else weighted_mean(values, weights, dim)
