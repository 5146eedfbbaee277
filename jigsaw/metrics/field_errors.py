"""Errors of a forecast against the truth."""

from __future__ import annotations

from typing import Any

import torch

from jigsaw.metrics.area_weights import MetricValues, average_over
from jigsaw.nn.losses.loss import check_same_shape
from jigsaw.ops.reductions import ReducedDims


def rmse(
    forecast: MetricValues,
    truth: MetricValues,
    dim: ReducedDims = None,
    weights: MetricValues | None = None,
    *,
    skip_missing: bool = False,
) -> Any:
    """Return the root of the mean of (forecast - truth)² along `dim`.

    With time in `dim` the root is taken after the mean over time, as WeatherBench2 does it.

    *Shapes*: forecast and truth of one shape; `weights` broadcast to it, e.g. [lat, 1].
    *Sends*: one all-reduce of the result, two with weights or `skip_missing`.
    *Raises*: `ShardingError` for two shapes.

    >>> truth = jigsaw.shard(torch.zeros(3, 5, 8), jigsaw.init_mesh(lat=1), (None, "lat", None))
    >>> area = jigsaw.metrics.latitude_weights([90, 45, 0, -45, -90])
    >>> jigsaw.metrics.rmse(truth + 2, truth, dim=(1, 2), weights=area).full_tensor()
    tensor([2., 2., 2.])
    """
    check_same_shape("rmse", forecast, truth)
    return average_over((forecast - truth).square(), dim, weights, skip_missing).sqrt()


def mae(
    forecast: MetricValues,
    truth: MetricValues,
    dim: ReducedDims = None,
    weights: MetricValues | None = None,
    *,
    skip_missing: bool = False,
) -> Any:
    """Return the mean of ``abs(forecast - truth)`` along `dim`; all else as in `rmse`.

    >>> jigsaw.metrics.mae(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))
    tensor(1.5000)
    """
    check_same_shape("mae", forecast, truth)
    return average_over((forecast - truth).abs(), dim, weights, skip_missing)


def bias(
    forecast: MetricValues,
    truth: MetricValues,
    dim: ReducedDims = None,
    weights: MetricValues | None = None,
    *,
    skip_missing: bool = False,
) -> Any:
    """Return the mean of forecast - truth along `dim`; all else as in `rmse`.

    >>> jigsaw.metrics.bias(torch.tensor([1.0, 2.0]), torch.tensor([2.0, 4.0]))
    tensor(-1.5000)
    """
    check_same_shape("bias", forecast, truth)
    return average_over(forecast - truth, dim, weights, skip_missing)


def acc(
    forecast: MetricValues,
    truth: MetricValues,
    climatology: MetricValues,
    dim: ReducedDims = None,
    weights: MetricValues | None = None,
    *,
    skip_missing: bool = False,
) -> Any:
    """Return mean(f t) / sqrt(mean(f²) mean(t²)) along `dim` of the anomalies f and t: forecast, truth minus
    climatology.

    The anomaly correlation of WeatherBench2, which does not subtract the anomalies' own means; it takes `dim` over
    space, and averages over time afterwards.  With `skip_missing` a place that either lacks is left out of all three
    means.

    *Shapes*: forecast and truth of one shape, to which climatology and weights broadcast.
    *Sends*: three all-reduces of the result, six with weights or `skip_missing`.
    *Raises*: `ShardingError` for two shapes.

    >>> truth, climatology = torch.tensor([3.0, -1.0, 5.0]), torch.tensor([1.0, 1.0, 1.0])
    >>> jigsaw.metrics.acc(2 * truth - 1, truth, climatology)
    tensor(1.)
    """
    check_same_shape("acc", forecast, truth)
    of_forecast, of_truth = forecast - climatology, truth - climatology
    both = of_forecast * of_truth
    squares = [of_forecast.square(), of_truth.square()]
    if skip_missing:
        squares = [s.masked_fill(both.isnan(), torch.nan) for s in squares]
    covariance, of_forecast, of_truth = (average_over(x, dim, weights, skip_missing) for x in (both, *squares))
    return covariance / (of_forecast * of_truth).sqrt()
