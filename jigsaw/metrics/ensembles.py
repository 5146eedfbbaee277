"""Metrics of ensembles: the score, the spread, and the ratio of spread to error."""

from __future__ import annotations

import math
from typing import Any

from jigsaw.metrics.area_weights import MetricValues, average_over
from jigsaw.metrics.field_errors import rmse
from jigsaw.nn.losses.ensemble_loss import ensemble_crps
from jigsaw.ops.reductions import ReducedDims


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
    return average_over(ensemble_crps("crps", forecast, truth, member_dim, alpha), dim, weights, skip_missing)


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
    *Sends*: where the members are cut, two all-reduces of a member; then as `rmse`.

    >>> jigsaw.metrics.spread(torch.tensor([[1.0, 3.0], [5.0, 5.0]]))
    tensor(1.)
    """
    return average_over(forecast.var(member_dim), dim, weights, skip_missing).sqrt()


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
    et al., J. Hydrometeorol. 15, 2014).

    *Shapes*: as in `crps`.
    *Sends*: as `spread` and `rmse`, and where the members are cut, one all-reduce of a member.
    *Raises*: `ShardingError` for other shapes.

    >>> jigsaw.metrics.spread_skill(torch.tensor([[1.0, 3.0], [5.0, 5.0]]), torch.tensor([2.0, 3.0]))
    tensor(0.8660)
    """
    members = forecast.shape[member_dim]
    error = rmse(forecast.mean(member_dim), truth, dim, weights, skip_missing=skip_missing)
    return (
        math.sqrt((members + 1) / members)
        * spread(forecast, member_dim, dim, weights, skip_missing=skip_missing)
        / error
    )
