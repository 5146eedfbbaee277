"""What a net has to beat: an atlas and intensities, fitted on the training half."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BIN, LEAST = 25.0, 1e-4  # Hounsfield units of a bin; how likely what was never seen is


def smoothed(x: Tensor, times: int = 1) -> Tensor:
    """The mean of 3 x 3 x 3 voxels, so many times: [K, z, y, x]."""
    for _ in range(times):
        x = F.avg_pool3d(x, 3, stride=1, padding=1, count_include_pad=False)
    return x


def bins(scan: Tensor) -> Tensor:
    return ((smoothed(scan[None])[0] + 1000) / BIN).clamp(0, 79).long()


def atlas(scan: Tensor, label: Tensor, other: Tensor, classes: int) -> Tensor:
    """The most likely class of each voxel of `other` [z, y, x], a half that lies as the training half does.

    As likely as the class is about the same place of the training half, times how often it is as bright there.
    """
    one_hot = F.one_hot(label, classes).movedim(-1, 0).float()
    place = smoothed(one_hot, times=3) + LEAST
    counts = torch.stack([torch.bincount(bins(scan)[label == k], minlength=80) for k in range(classes)]).float()
    brightness = counts / counts.sum(1, keepdim=True) + LEAST
    return (place * brightness[:, bins(other)]).argmax(0)
