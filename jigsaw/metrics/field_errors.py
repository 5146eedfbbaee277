"""Errors of a forecast against the truth, scores of ensembles, and energy of waves."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from jigsaw.fields.latlon import latitude_rows
from jigsaw.nn.losses.field_losses import ensemble_crps
from jigsaw.nn.losses.loss import as_wide_floats, check_same_shape, weighted_mean
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
    return torch.tensor(latitude_rows(latitudes).latitude_shares(), dtype=dtype or torch.get_default_dtype())[:, None]


def _average_of(values: Any, dim: ReducedDims, weights: MetricValues | None) -> Any:
    """Return the weighted mean along `dim`; of nothing, or of missing values alone, it is NaN.

    *Sends*: one all-reduce of the result, two with weights.
    """
    return values.mean(dim) if weights is None else weighted_mean(values, weights, dim)


def _present_alone(values: Any, missing: Any, weights: MetricValues | None) -> tuple[Any, Any]:
    """Return values with 0 where they are missing, and weights of 0 there.

    It comes before squares and roots: their gradient at a NaN is NaN, whatever becomes of the result.
    """
    return values.masked_fill(missing, 0), _weights_of_present(missing, values.dtype, weights)


def _weights_of_present(missing: Any, dtype: torch.dtype, weights: MetricValues | None) -> Any:
    counted = (~missing).to(dtype)
    return counted if weights is None else counted * weights


def _forecast_errors(
    name: str, forecast: MetricValues, truth: MetricValues, weights: MetricValues | None, skip_missing: bool
) -> tuple[Any, Any]:
    """Return the errors and their weights."""
    check_same_shape(name, forecast, truth)
    errors = as_wide_floats(forecast) - as_wide_floats(truth)
    return _present_alone(errors, errors.isnan(), weights) if skip_missing else (errors, weights)


def rmse(
    forecast: MetricValues,
    truth: MetricValues,
    dim: ReducedDims = None,
    weights: MetricValues | None = None,
    *,
    skip_missing: bool = False,
) -> Any:
    """Return the root of the mean of (forecast - truth)² along `dim`.

    With time in `dim` the root is taken after the mean over time, as WeatherBench2 does it. float16, bfloat16 and
    integers are computed in float32, long integers in float64.

    *Shapes*: forecast and truth of one shape; `weights` broadcast to it, e.g. [lat, 1].
    *Sends*: one all-reduce of the result, two with weights or `skip_missing`.
    *Raises*: `ShardingError` for two shapes, and for weights of another.

    >>> truth = jigsaw.shard(torch.zeros(3, 5, 8), jigsaw.init_mesh(lat=1), (None, "lat", None))
    >>> area = jigsaw.metrics.latitude_weights([90, 45, 0, -45, -90])
    >>> jigsaw.metrics.rmse(truth + 2, truth, dim=(1, 2), weights=area).full_tensor()
    tensor([2., 2., 2.])
    """
    errors, weights = _forecast_errors("rmse", forecast, truth, weights, skip_missing)
    return _average_of(errors.square(), dim, weights).sqrt()


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
    errors, weights = _forecast_errors("mae", forecast, truth, weights, skip_missing)
    return _average_of(errors.abs(), dim, weights)


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
    errors, weights = _forecast_errors("bias", forecast, truth, weights, skip_missing)
    return _average_of(errors, dim, weights)


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
    of_forecast, of_truth = as_wide_floats(forecast) - climatology, as_wide_floats(truth) - climatology
    if skip_missing:
        missing = of_forecast.isnan() | of_truth.isnan()
        of_truth = of_truth.masked_fill(missing, 0)
        of_forecast, weights = _present_alone(of_forecast, missing, weights)
    products = of_forecast * of_truth, of_forecast.square(), of_truth.square()
    covariance, of_forecast, of_truth = (_average_of(x, dim, weights) for x in products)
    return covariance / (of_forecast * of_truth).sqrt()


# the mean of the radii at the poles and the equator in meters, WeatherBench2's
EARTH_RADIUS = 6_367_500.0


def spectrum(field: MetricValues, latitudes: Any = None, lat_dim: int = -2, lon_dim: int = -1) -> Any:
    """Return ``S[0] = C |F[0]|²``, ``S[k] = 2 C |F[k]|²`` for k > 0: the zonal energy spectrum, by wavenumber and
    latitude.

    F is the Fourier transform along longitude divided by its n points. C is the length of the circle of latitude in
    meters, or 1 without `latitudes` (degrees).  It is WeatherBench2's `ZonalEnergySpectrum`. For an odd n the sum of S
    / C is the mean of squares along longitude. For an even n the last mode counts twice, too.  Averages over time or
    latitudes are the user's, e.g. ``spectrum(x, lats)[..., 30:60, :].mean((0, -2))``.  A missing value makes its circle
    NaN.

    *Shapes*: any dims, [.., lat, lon] by default; the result has n // 2 + 1 wavenumbers in the place of `lon_dim`, and
    is cut as the field.
    *Sends*: where longitude is cut, one exchange of the field, one of its modes.
    *Raises*: `ValueError` for latitudes that are not the rows of `lat_dim`.

    >>> wave = torch.cos(torch.arange(12) * 2 * torch.pi / 6).expand(3, 12)
    >>> jigsaw.metrics.spectrum(wave)[0].round(decimals=4) + 0.0
    tensor([0.0000, 0.0000, 0.5000, 0.0000, 0.0000, 0.0000, 0.0000])
    """
    modes = torch.fft.rfft(as_wide_floats(field), dim=lon_dim, norm="forward")
    power = torch.view_as_real(modes).square().sum(-1)
    after = field.ndim - 1 - lon_dim % field.ndim
    twins = torch.full((power.shape[lon_dim],), 2.0, dtype=power.dtype, device=power.device)
    twins[0] = 1.0
    power = power * twins.view(-1, *(1,) * after)
    if latitudes is None:
        return power
    degrees = torch.as_tensor(latitudes, dtype=power.dtype, device=power.device)
    if degrees.ndim != 1 or len(degrees) != field.shape[lat_dim]:
        raise ValueError(
            f"spectrum(latitudes={tuple(degrees.shape)}): dim {lat_dim} has {field.shape[lat_dim]} rows, and wants a "
            "latitude for each"
        )
    circles = 2 * math.pi * EARTH_RADIUS * torch.deg2rad(degrees).cos()
    return power * circles.view(-1, *(1,) * (field.ndim - 1 - lat_dim % field.ndim))


def crps(
    forecast: MetricValues,
    truth: MetricValues,
    member_dim: int = 1,
    dim: ReducedDims = None,
    weights: MetricValues | None = None,
    *,
    alpha: float = 1.0,
    skip_missing: bool = False,
) -> Any:
    """Return the mean of the continuous ranked probability score along `dim` of the truth: the fair
    `jigsaw.nn.crps_loss`.

    ``alpha=0`` is that of the ensemble as it is; the package scores calls them ``"fair"`` and ``"ecdf"``.  With
    `skip_missing` a place that is missing in the truth or any member is left out.

    *Shapes*: forecast ``[time, member, *space]`` or members along another `member_dim`, truth ``[time, *space]``.
    *Sends*: where P ranks cut the members, (P-1)/P of the forecast's bytes on a rank; then as `rmse`.
    *Raises*: `ShardingError` for other shapes, and for a single member unless `alpha` is 0.

    >>> forecast, truth = torch.tensor([[1.0, 3.0], [5.0, 5.0]]), torch.tensor([2.0, 4.0])
    >>> jigsaw.metrics.crps(forecast, truth), jigsaw.metrics.crps(forecast, truth, alpha=0.0)
    (tensor(0.5000), tensor(0.7500))
    """
    scores = ensemble_crps("crps", forecast, truth, member_dim, alpha)
    if skip_missing:
        scores, weights = _present_alone(scores, scores.isnan(), weights)
    return _average_of(scores, dim, weights)


def spread(
    forecast: MetricValues,
    member_dim: int = 1,
    dim: ReducedDims = None,
    weights: MetricValues | None = None,
    *,
    skip_missing: bool = False,
) -> Any:
    """Return the root of the mean along `dim` of the members' variance, divided by M - 1.

    *Shapes*: forecast ``[time, member, *space]``; `dim` and `weights` are of ``[time, *space]``.
    *Sends*: where the members are cut, two all-reduces of a member, three with `skip_missing`; then as `rmse`.

    >>> jigsaw.metrics.spread(torch.tensor([[1.0, 3.0], [5.0, 5.0]]))
    tensor(1.)
    """
    forecast = as_wide_floats(forecast)
    if skip_missing:
        missing = forecast.isnan().any(member_dim)
        weights = _weights_of_present(missing, forecast.dtype, weights)
        forecast = forecast.masked_fill(missing.unsqueeze(member_dim), 0)
    return _average_of(forecast.var(member_dim), dim, weights).sqrt()


def spread_skill(
    forecast: MetricValues,
    truth: MetricValues,
    member_dim: int = 1,
    dim: ReducedDims = None,
    weights: MetricValues | None = None,
    *,
    skip_missing: bool = False,
) -> Any:
    """Return sqrt((M + 1) / M) spread / RMSE of the members' mean: 1 for an ensemble from which the truth might be
    drawn.

    Below 1 the ensemble is too confident.  The factor corrects for the larger error of the mean of few members (Fortin
    et al., J. Hydrometeorol. 15, 2014).  With `skip_missing` both are of the places where neither the truth nor any
    member is missing.

    *Shapes*: as in `crps`.
    *Sends*: as `spread` and `rmse`, and where the members are cut, one all-reduce of a member.
    *Raises*: `ShardingError` for other shapes.

    >>> jigsaw.metrics.spread_skill(torch.tensor([[1.0, 3.0], [5.0, 5.0]]), torch.tensor([2.0, 3.0]))
    tensor(0.8660)
    """
    members, forecast = forecast.shape[member_dim], as_wide_floats(forecast)
    if skip_missing:
        forecast = forecast.masked_fill(truth.isnan().unsqueeze(member_dim), torch.nan)
    error = rmse(forecast.mean(member_dim), truth, dim, weights, skip_missing=skip_missing)
    return (
        math.sqrt((members + 1) / members)
        * spread(forecast, member_dim, dim, weights, skip_missing=skip_missing)
        / error
    )
