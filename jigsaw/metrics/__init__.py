"""Metrics: the same numbers on tiles, on every mesh, as on the whole tensor.  Plain tensors are answered alike.

`dim` is what is averaged, by default all dims, and then the answer is an ordinary number, equal on every rank; what
dims are left are cut as they were.  `weights` broadcast to what is averaged.  A missing value (NaN) makes NaN, unless
``skip_missing=True`` leaves it out of both sums.
"""

from jigsaw.metrics.area_weights import latitude_weights
from jigsaw.metrics.ensembles import crps, spread, spread_skill
from jigsaw.metrics.field_errors import acc, bias, mae, rmse
from jigsaw.metrics.overlaps import dice
from jigsaw.metrics.spectra import spectrum
from jigsaw.metrics.surfaces import hausdorff95, surface_dice

__all__ = [
    "acc",
    "bias",
    "crps",
    "dice",
    "hausdorff95",
    "latitude_weights",
    "mae",
    "rmse",
    "spectrum",
    "spread",
    "spread_skill",
    "surface_dice",
]
