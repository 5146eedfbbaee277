"""Overlap of two masks."""

from __future__ import annotations

from typing import Any

import torch

from jigsaw.metrics.area_weights import MetricValues
from jigsaw.nn.losses.loss import check_same_shape
from jigsaw.ops.reductions import ReducedDims


def dice(
    prediction: MetricValues, truth: MetricValues, dim: ReducedDims = None, weights: MetricValues | None = None
) -> Any:
    """Return ``2 |P and T| / (|P| + |T|)`` of two masks along `dim`, in float64; NaN where both are empty.

    A mask is True where a value is not zero.  Label maps have one for each class, ``dice(found == 2, truth == 2)``, or
    all by `one_hot`.  With `weights` voxels count for their weight.

    *Shapes*: prediction and truth of one shape; with ``dim=(2, 3, 4)``, [batch, class, z, y, x] gives [batch, class].
    *Sends*: three all-reduces of the result.
    *Raises*: `ShardingError` for two different shapes.

    >>> jigsaw.metrics.dice(torch.tensor([1, 1, 0, 0]), torch.tensor([1, 0, 0, 0])).item()
    0.6666666666666666
    """
    check_same_shape("dice", prediction, truth)
    predicted, true = prediction != 0, truth != 0

    def size_of(mask: Any) -> Any:
        return (mask.to(torch.float64) if weights is None else mask.to(torch.float64) * weights).sum(dim)

    return 2 * size_of(predicted & true) / (size_of(predicted) + size_of(true))
