"""Metrics: the same numbers on tiles, on every mesh, as on the whole tensor.  They take plain tensors, too.

They average over `dim`, by default all dims; then the result is an ordinary number, equal on every rank.  The other
dims are cut as they were.  `weights` broadcast to the values.  A missing value (NaN) makes NaN, unless
``skip_missing=True`` leaves it out of both sums.
"""

from jigsaw.metrics.field_errors import acc, bias, crps, latitude_weights, mae, rmse, spectrum, spread, spread_skill
from jigsaw.metrics.surfaces import dice, hausdorff95, surface_dice

__all__ = [
    "acc", "bias", "crps", "dice", "hausdorff95", "latitude_weights", "mae", "rmse", "spectrum", "spread",
    "spread_skill", "surface_dice",
]  # fmt: skip
