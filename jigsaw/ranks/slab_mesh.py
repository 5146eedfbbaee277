"""Mesh of more ranks than exist: this process plays several of them, one after the other (`jigsaw.nn.chunked`).

Each rank of the real mesh has its rows of one dim in slabs.  A slab is what a rank of a finer mesh would have. That
mesh has one axis more, `SLAB_AXIS`, minor to those that cut the dim.  So all arithmetic of layouts holds, and a slab's
rows are a tile with a halo.  Nothing can be sent while a slab runs, because the other slabs are not running.  For
missing rows the slab raises `RowsMissing`, and its caller runs it again with more. Statistics and keys of all slabs
come from its `player` (`jigsaw.nn.slab_statistics`). Everything else is refused.

Example: two ranks with two slabs each of 16 rows. The axes are lat=2 and slab=2, and ("lat", "slab") cut the dim at 0,
4, 8, 12, 16. Rank 1 plays the coordinates (1, 0), which owns 8:12, and (1, 1), which owns 12:16.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import Cut, Interval
from jigsaw.geometry.layout import AxisSizes, Layout, MeshCoordinate

SLAB_AXIS = "slab"


class RowsMissing(BaseException):
    """Raised where a function needs rows that slabs do not hold.  It has, for each cut, by its axes: how many (below,
    above), of how many, and whether they lie beyond an end, on a circle.

    It is not an error: the caller of the slab catches it, and no ``except Exception`` of a net does.
    """

    def __init__(self, lacking: dict[tuple[str, ...], tuple[int, int, int, bool]]) -> None:
        super().__init__(lacking)
        self.lacking = lacking


class SlabMesh:
    """The finer mesh, as the rank that plays one slab of it sees it; layouts and tiles use it like a `DeviceMesh`."""

    def __init__(
        self,
        axes: AxisSizes,
        coordinate: MeshCoordinate,
        device_type: str,
        real: DeviceMesh | None = None,
        player: object = None,
    ) -> None:
        self.mesh_dim_names = tuple(name for name, _ in axes)
        self.shape = tuple(size for _, size in axes)
        self.ndim = len(axes)
        self.device_type, self.real, self.player = device_type, real, player
        self._coordinate = coordinate
        self._jigsaw_size = torch.Size(self.shape).numel()  # what `mesh_size` keeps with a mesh

    def get_coordinate(self) -> list[int]:
        return list(self._coordinate)

    def _refuse(self) -> NoReturn:
        raise ShardingError(
            f"{CHUNKED_NAME}: a function of the module needs values of all slabs at once (a mean, a softmax, a "
            "transform, a product along the dim that the slabs cut); chunk the submodules before and after it "
            "instead, or cut another dim into slabs with dim="
        )

    def size(self) -> int:
        self._refuse()

    def get_group(self, *_: Any) -> NoReturn:
        self._refuse()

    @property
    def mesh(self) -> NoReturn:
        self._refuse()

    def check_rows(self, source: Layout, target: Layout) -> None:
        """Check that every slab has the rows that it needs, from layouts, so that all ranks find the same.

        Raises: `RowsMissing` where the slabs could hold more, `ShardingError` where a dim would be cut in another way.
        """
        if set(source.cut_axes) != set(target.cut_axes) or source.groups != target.groups:
            self._refuse()
        lacking: dict[tuple[str, ...], tuple[int, int, int, bool]] = {}
        for has, wants in zip(source.cuts, target.cuts, strict=True):
            if has.axes != wants.axes:
                self._refuse()
            below, above = _rows_lacking(has, wants)
            if has.is_cut and (below or above):
                lacking[has.axes] = below, above, has.size, any(a < 0 or b > has.size for a, b in wants.held)
        if lacking:
            raise RowsMissing(lacking)


CHUNKED_NAME = "jigsaw.nn.chunked"


def _rows_lacking(has: Cut, wants: Cut) -> Interval:
    """Return the most rows that a piece lacks, below and above."""
    pairs = [(h, w) for h, w in zip(has.held, wants.held, strict=True) if w[0] < w[1]]
    below = max((h[0] - w[0] for h, w in pairs), default=0)
    above = max((w[1] - h[1] for h, w in pairs), default=0)
    return max(below, 0), max(above, 0)
