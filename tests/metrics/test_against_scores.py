"""The package scores answers alike, weights and missing values too."""

from __future__ import annotations

import numpy as np
import pytest
import scores
import torch
import xarray as xr

from jigsaw import metrics

AREA = metrics.latitude_weights(np.linspace(90, -90, 7), dtype=torch.float64)


def _fields(holes, *members):
    torch.manual_seed(0)
    x, y = (torch.randn(3, *shape, 7, 10, dtype=torch.float64) for shape in (members, ()))
    if holes:
        missing = torch.arange(y.numel()).reshape(y.shape) % 5 == 0
        missing[0] = True
        y = y.masked_fill(missing, torch.nan)
    return x, y


def _named(x, *names):
    return xr.DataArray(x.numpy(), dims=names)


@pytest.mark.parametrize("holes", [False, True])
def test_fields_are_scored_as_by_scores(holes):
    x, y = _fields(holes)
    truth = _named(y, "time", "lat", "lon")
    weights = _named(AREA[:, 0], "lat")
    for name, theirs in (
        ("rmse", scores.continuous.rmse),
        ("mae", scores.continuous.mae),
        ("bias", scores.continuous.additive_bias),
    ):
        for dim, reduced in (((0, 1, 2), None), ((1, 2), ["lat", "lon"])):
            expected = theirs(_named(x, "time", "lat", "lon"), truth, reduce_dims=reduced, weights=weights)
            found = getattr(metrics, name)(x, y, dim=dim, weights=AREA, skip_missing=holes)
            np.testing.assert_allclose(found, expected, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("holes", [False, True])
def test_ensembles_are_scored_as_by_scores(holes):
    x, y = _fields(holes, 5)
    names = (("time", "member", "lat", "lon"), ("time", "lat", "lon"))
    for alpha, method in ((1.0, "fair"), (0.0, "ecdf")):
        expected = scores.probability.crps_for_ensemble(
            _named(x, *names[0]), _named(y, *names[1]), "member", method=method, preserve_dims="time"
        )
        found = metrics.crps(x, y, dim=(1, 2), alpha=alpha, skip_missing=holes)
        np.testing.assert_allclose(found, expected, rtol=1e-12)
