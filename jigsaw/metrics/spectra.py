"""Energy of waves by their length."""

from __future__ import annotations

import math
from typing import Any

import torch

from jigsaw.metrics.area_weights import MetricValues

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
    modes = torch.fft.rfft(field, dim=lon_dim, norm="forward")
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
