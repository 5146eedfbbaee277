"""Distances between the surfaces of two masks, and the share of them that lies close.

A surface has few of the volume's voxels, so only their places travel, never the volume.  Each rank finds the surface
voxels of its tile (a convolution with a cross, one row from each neighbor).  All ranks gather the places, and each
measures the distances of its own voxels to all of the other mask's.  Of a ball of radius 60 in 256³, 16.8 million
voxels, 37 thousand lie on the surface.

The nearest voxel is exact, without a comparison of all pairs.  Voxels are sorted into cells of 8 along the coarsest
dim.  The voxels of a cell are compared with those of one near cell of the other mask. Then they are compared only with
cells that may have a nearer one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jigsaw import comm
from jigsaw.errors import ShardingError
from jigsaw.metrics.field_errors import MetricValues
from jigsaw.nn.losses.loss import check_same_shape
from jigsaw.ops.reductions import ReducedDims
from jigsaw.ops.whole_dims import rows_of_local
from jigsaw.tile.tile import Tile


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


_CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CELL = 8
_MOST_PAIRS = 1 << 22


def hausdorff95(
    prediction: MetricValues, truth: MetricValues, spacing: Sequence[float] = (1.0, 1.0, 1.0), percentile: float = 95.0
) -> Tensor:
    """Return max(p(d(P, T)), p(d(T, P))), where d(A, B) are the distances from the surface voxels of A to the nearest
    of B.

    p is the `percentile` (linear between two distances; 100 is the Hausdorff distance itself).  A mask is True where a
    value is not zero; its surface voxels have a face beside the background or the volume's end.  So the result is that
    of MONAI's `compute_hausdorff_distance`; other packages take one percentile of both directions together.  NaN where
    both masks are empty, infinite where one is.

    *Shapes*: prediction and truth ``[*classes, *space]`` of one shape, any dim cut; `spacing` has a voxel's size along
    each dim of space.  An ordinary tensor ``[*classes]`` in float64, on every rank.
    *Sends*: for each mask, 16 bytes a surface voxel (as many as the rank with the most has) and 16 more to each other
    rank. Also the rows beside the cuts in float32.
    *Raises*: `ShardingError` for two different shapes, or a spacing that is not of one to three dims of space.
    `ValueError` for a percentile outside 0 to 100.

    >>> mesh, truth = jigsaw.init_mesh(z=1), torch.zeros(2, 9, 9, 9)
    >>> truth[0, 2:5, 2:5, 2:5] = 1
    >>> tile = jigsaw.shard(truth, mesh, (None, "z", None, None))
    >>> jigsaw.metrics.hausdorff95(tile.roll(2, 1), tile, spacing=(2.5, 1.0, 1.0))
    tensor([5., nan], dtype=torch.float64)
    """
    if not 0 <= percentile <= 100:
        raise ValueError(f"hausdorff95(percentile={percentile}): a percentile is from 0 to 100; 95 is the usual one")
    _check_spacing("hausdorff95", prediction, spacing)
    both = _distances_both_ways("hausdorff95", prediction, truth, spacing)
    of_classes = [torch.stack([_linear_percentile(d, percentile) for d in distances]) for distances in both]
    one_is_empty = of_classes[0].isnan() != of_classes[1].isnan()
    return torch.maximum(*of_classes).masked_fill(one_is_empty, torch.inf).view(prediction.shape[: -len(spacing)])


def surface_dice(
    prediction: MetricValues,
    truth: MetricValues,
    tolerance: float | Sequence[float],
    spacing: Sequence[float] = (1.0, 1.0, 1.0),
) -> Tensor:
    """Return the share of both surfaces' voxels that lie within `tolerance` of the other surface, in the unit of
    `spacing`.

    Surfaces and distances are those of `hausdorff95`, so it is MONAI's `compute_surface_dice`: the normalized surface
    Dice of Nikolov et al. (2018), with voxels counted for area (Seidlitz et al. 2022).  `tolerance` is one number, or
    one for each of the last dim of classes.  NaN where both masks are empty, 0 where one is.

    *Shapes*, *Sends*: as `hausdorff95`.
    *Raises*: `ShardingError` as there, and where there are not as many tolerances as classes. `ValueError` for a
    tolerance below 0.

    >>> mesh, truth = jigsaw.init_mesh(z=1), torch.zeros(2, 9, 9, 9)
    >>> truth[0, 2:5, 2:5, 2:5] = 1
    >>> tile = jigsaw.shard(truth, mesh, (None, "z", None, None))
    >>> jigsaw.metrics.surface_dice(tile.roll(1, 1), tile, tolerance=1.0)
    tensor([1., nan], dtype=torch.float64)
    """
    _check_spacing("surface_dice", prediction, spacing)
    classes = tuple(prediction.shape)[: -len(spacing)]
    most = torch.as_tensor(tolerance, dtype=torch.float64)
    if most.ndim > 1 or (most.ndim and (not classes or len(most) != classes[-1])):
        raise ShardingError(f"surface_dice(tolerance={tolerance}): one number, or one for each class of {classes}")
    if not (most >= 0).all():
        raise ValueError(f"surface_dice(tolerance={tolerance}): a distance of 0 or more, in the unit of spacing")
    both = _distances_both_ways("surface_dice", prediction, truth, spacing)
    # distances of 0.8 mm are rounded: a tolerance of 0.8 includes all of them
    limits = (most.expand(classes).flatten() * (1 + 1e-9)).tolist()
    within = [torch.cat([forth, back]) <= limit for forth, back, limit in zip(*both, limits, strict=True)]
    return torch.stack([near.to(torch.float64).mean() for near in within]).view(classes)  # the mean of no values is NaN


def _check_spacing(name: str, prediction: MetricValues, spacing: Any) -> None:
    if not hasattr(spacing, "__len__") or len(spacing) not in _CONVOLUTIONS or len(spacing) > prediction.ndim:
        raise ShardingError(
            f"{name}(spacing={spacing}): one to three numbers, one for each of the last dims of "
            f"{tuple(prediction.shape)}, such as (1.0, 1.0)"
        )
    if not all(math.isfinite(step) and step != 0 for step in spacing):
        raise ValueError(f"{name}(spacing={tuple(spacing)}): the size of a voxel along each dim is finite and not 0")


def _distances_both_ways(
    name: str, prediction: MetricValues, truth: MetricValues, spacing: Sequence[float]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return for each class the distances from the prediction's surface to the truth's, and the other way."""
    check_same_shape(name, prediction, truth)
    space = len(spacing)
    with torch.no_grad():
        answer, true = (_surface_voxels(mask, space) for mask in (prediction, truth))
        shape = tuple(prediction.shape)
        return _distances_by_class(answer, true, shape, spacing), _distances_by_class(true, answer, shape, spacing)


class SurfaceVoxels(NamedTuple):
    """Surface voxels of a mask, by their numbers in the whole tensor: this rank's, and those of all ranks by rank.

    `tile` says which ranks have others; it is None where each has all.
    """

    mine: Tensor
    of_all: Tensor
    tile: Tile | None


def _surface_voxels(mask: MetricValues, space: int) -> SurfaceVoxels:
    """Return voxels of the mask that lack one of their neighbors beyond a face; there are none beyond the volume."""
    sizes = tuple(mask.shape)[-space:]
    inside = (mask != 0).reshape(-1, 1, *sizes)
    cross = torch.zeros((3,) * space, dtype=torch.float32, device=inside.device)
    for d in range(space):
        faces = [1] * space
        for faces[d] in (0, 2):
            cross[tuple(faces)] = 1
    neighbors = _CONVOLUTIONS[space](inside.float(), cross[None, None], padding=1)
    surface = inside & (neighbors < 2 * space)
    if not isinstance(surface, Tile):
        places = surface.flatten().nonzero().flatten()
        return SurfaceVoxels(places, places, None)
    own = surface.owned()
    places = torch.zeros((), dtype=torch.int64, device=own.local.device)
    for d, local in enumerate(own.local.nonzero(as_tuple=True)):
        places = places * own.shape[d] + rows_of_local(own.layout, own.coordinate, d, local.device)[local]
    return SurfaceVoxels(places, _gather_uneven(places, own), own)


def _gather_uneven(values: Tensor, tile: Tile) -> Tensor:
    """Return the values of all ranks that share `tile`, in order; *Sends*: 8 bytes, and as many values as the most, to
    each.
    """
    axes = tile.layout.cut_axes
    counts = [int(n) for n in comm.all_gather(torch.tensor([len(values)], device=values.device), tile.mesh, axes)]
    padded = F.pad(values, (0, max(counts) - len(values)))
    return torch.cat([x[:n] for x, n in zip(comm.all_gather(padded, tile.mesh, axes), counts, strict=True)])


def _distances_by_class(
    own: SurfaceVoxels, other: SurfaceVoxels, shape: Sequence[int], spacing: Sequence[float]
) -> list[Tensor]:
    """Return the distances from `own` to `other`, for each class; infinite where `other` is empty."""
    volume = math.prod(shape[-len(spacing) :])
    classes = math.prod(shape[: -len(spacing)])
    distances = own.mine.new_full(own.mine.shape, torch.inf, dtype=torch.float64)
    for k in range(classes):
        are_of_class = own.mine // volume == k
        points, targets = (
            _points_in_space(places[places // volume == k] % volume, shape[-len(spacing) :], spacing)
            for places in (own.mine, other.of_all)
        )
        if len(points) and len(targets):
            distances[are_of_class] = _nearest_distances(points, targets, spacing)
    if own.tile is not None:
        distances = _gather_uneven(distances, own.tile)
    of_class = own.of_all // volume
    return [distances[of_class == k] for k in range(classes)]


def _points_in_space(places: Tensor, sizes: Sequence[int], spacing: Sequence[float]) -> Tensor:
    """Return the points [voxels, space] in float64."""
    columns: list[Tensor] = []
    for n, step in zip(reversed(sizes), reversed(spacing), strict=True):
        columns.insert(0, (places % n).to(torch.float64) * step)
        places = places // n
    return torch.stack(columns, dim=1)


def _nearest_distances(points: Tensor, targets: Tensor, spacing: Sequence[float]) -> Tensor:
    nearest = torch.empty_like(points[:, 0])
    cells = [targets[at] for at in _by_cell(targets, spacing)]
    low, high = (torch.stack([getattr(cell, end)(0) for cell in cells]) for end in ("amin", "amax"))
    for at in _by_cell(points, spacing):
        cell_points = points[at]
        first, last = cell_points.amin(0), cell_points.amax(0)
        closest = torch.maximum(low - last, first - high).clamp(min=0).square().sum(1)
        farthest = torch.maximum(high - first, last - low).square().sum(1)
        so_far = _least_distances(cell_points, cells[int(farthest.argmin())])
        # a little more than the bound, which is rounded as the distances are
        worth = closest <= so_far.max().square() * (1 + 1e-9)
        candidates = torch.cat([cells[i] for i in worth.nonzero().flatten().tolist()])
        nearest[at] = _least_distances(cell_points, candidates)
    return nearest


def _least_distances(points: Tensor, targets: Tensor) -> Tensor:
    rows = points.split(max(_MOST_PAIRS // len(targets), 1))
    # distances by a product of matrices lose digits where two voxels lie side by side
    return torch.cat([torch.cdist(x, targets, compute_mode="donot_use_mm_for_euclid_dist").amin(1) for x in rows])


def _by_cell(points: Tensor, spacing: Sequence[float]) -> tuple[Tensor, ...]:
    """Return the numbers of the points of each non-empty cell."""
    places = (points / (_CELL * max(spacing))).long()
    number = torch.zeros_like(places[:, 0])
    for column in places.unbind(1):
        number = number * (int(column.max()) + 1) + column
    _, cell, counts = number.unique(return_inverse=True, return_counts=True)
    return cell.argsort().split(counts.tolist())


def _linear_percentile(values: Tensor, percentile: float) -> Tensor:
    """Do as `torch.quantile`, for any number of values, infinite ones and none."""
    if not len(values):
        return values.new_tensor(torch.nan)
    ranked, place = values.sort().values, percentile / 100 * (len(values) - 1)
    below, above = ranked[math.floor(place)], ranked[math.ceil(place)]
    return below if below == above else below.lerp(above, place - math.floor(place))
