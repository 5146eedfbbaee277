"""Functions that make tiles of tensors: a whole one that every rank has is cut, or each rank gives its own part.

>>> jigsaw.shard(torch.ones(4, 6), jigsaw.init_mesh(lat=1), ("lat", None)).shape
torch.Size([4, 6])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw.comm.agreement import agree_on_arguments, are_alike
from jigsaw.comm.collectives import all_gather_object
from jigsaw.comm.exchange import memory_format_of, redistribute_rows
from jigsaw.comm.wire_values import checksum_of_bits, lie_in_one_memory
from jigsaw.errors import ShardingError
from jigsaw.geometry.cut import SplitRule
from jigsaw.geometry.layout import Layout, LayoutSpec, MeshCoordinate
from jigsaw.ranks.mesh import axes_of_mesh, mesh_coordinate
from jigsaw.tile.tile import Tile
from jigsaw.torch_internals.fake_tensors import FakeTensor


def shard(
    x: Tensor,
    mesh: DeviceMesh,
    spec: LayoutSpec,
    split: SplitRule | Mapping[int, SplitRule] = "balanced",
    align: int | Mapping[int, int] = 1,
    halo: Mapping[int, int | tuple[int, int]] | None = None,
    periodic: Sequence[int] = (),
) -> Tile:
    """Cut a whole tensor, the same on every rank, into tiles.

    *Shapes*: global ``x.shape``; per rank the balanced (or `split`, `align`) share of every dim that `spec` names, plus
    `halo` rows a side (dim -> rows, or (below, above)), which wrap on `periodic` dims.  ``align=4`` keeps four rows
    together along every dim but those that ``data``, ``replicate`` or ``ensemble`` cuts, ``align={2: 4}`` along dim 2.
    *Sends*: only one agreement on the arguments and a checksum of `x`; backward, one exchange when `x` requires grad,
    so that its gradient is whole on every rank.
    *Raises*: `ShardingError` on every rank, for a spec that does not fit, or ranks whose shapes, dtypes, values or
    other arguments differ.

    A tensor that does not require grad is never shared with the tile, so that the whole one can be freed or changed.
    The tile lies on the device of the mesh: of a whole tensor elsewhere this rank's share is copied there, or all of
    one that requires grad.

    >>> mesh = jigsaw.init_mesh(lat=1)
    >>> tile = jigsaw.shard(torch.arange(6.0), mesh, ("lat",), halo={0: 1}, periodic=[0])
    >>> tile.local
    tensor([5., 0., 1., 2., 3., 4., 5., 0.])
    >>> tile
    Tile(shape (6,), torch.float32; cut: nowhere; at lat=0/1 owns [0:6], held (8,))
    """
    _check_can_be_cut("shard", x, mesh)
    checksums = agree_on_arguments(
        "shard", mesh, x, True, shape=tuple(x.shape), spec=spec, split=split, align=align, halo=halo, periodic=periodic
    )
    layout = Layout.of(x.shape, spec, axes_of_mesh(mesh), split=split, align=align, halo=halo, periodic=periodic)
    for at, checksum in enumerate(checksums):
        if checksum != checksums[0]:
            raise ShardingError(
                f"shard takes the whole tensor, the same on every rank, but the values at place {at} of the mesh are "
                f"not those at place 0 (shape {tuple(x.shape)}): seed the ranks alike where they are drawn "
                "(torch.manual_seed), broadcast them from one rank (torch.distributed.broadcast), or give each rank's "
                "own part to jigsaw.from_local"
            )
    uncut = Layout.of(x.shape, (None,) * x.ndim, layout.axes)
    if x.requires_grad:
        x = _on_mesh_device(x, mesh)  # on the mesh's device, because its gradient travels between ranks
    local = redistribute_rows(x, uncut, layout, mesh)
    if lie_in_one_memory(local, x) and not x.requires_grad:
        local = local.clone(memory_format=memory_format_of(x))
    return Tile(_on_mesh_device(local, mesh), layout, mesh)


def _check_can_be_cut(name: str, x: Any, mesh: Any) -> None:
    if isinstance(x, Tile):
        raise ShardingError(f"{name} takes a plain tensor, and this is a Tile, which redistribute(spec) cuts anew")
    if not isinstance(x, Tensor):
        raise ShardingError(f"{name} takes a tensor, not {type(x).__name__}; give torch.as_tensor(x)")
    if not isinstance(mesh, DeviceMesh):
        raise ShardingError(f"{name}: mesh={mesh!r} must be a DeviceMesh, as jigsaw.init_mesh(lat=2) gives it")


def _on_mesh_device(local: Tensor, mesh: DeviceMesh) -> Tensor:
    is_there = local.device.type in (mesh.device_type, "meta")  # a tensor without values lies nowhere
    return local if is_there else local.to(mesh.device_type)


def from_local(
    local: Tensor,
    mesh: DeviceMesh,
    spec: LayoutSpec,
    shape: Sequence[int],
    split: SplitRule | Mapping[int, SplitRule] = "balanced",
    align: int | Mapping[int, int] = 1,
    halo: Mapping[int, int | tuple[int, int]] | None = None,
    periodic: Sequence[int] = (),
) -> Tile:
    """Return the tile whose local part this rank has already; `shape` is the global one.

    *Shapes*: global `shape`; per rank ``local.shape``, the share that `shard` with these arguments would give it.
    *Sends*: two agreements: every rank learns whether all parts fit; for each axis that cuts nothing, one on a checksum
    of `local`.
    *Raises*: `ShardingError` on every rank, when one rank's part does not have the shape that the layout gives it. Also
    when ranks that hold the same part have other values, or pass different arguments.

    A part on another device than that of the mesh is copied there.

    >>> mesh = jigsaw.init_mesh(lat=1)
    >>> tile = jigsaw.from_local(torch.ones(5, 2), mesh, ("lat", None), shape=(5, 2))
    >>> tile.sum().item()
    10.0
    """
    _check_can_be_cut("from_local", local, mesh)
    agree_on_arguments(
        "from_local",
        mesh,
        local,
        False,
        shape=shape,
        spec=spec,
        split=split,
        align=align,
        halo=halo,
        periodic=periodic,
    )
    layout = Layout.of(shape, spec, axes_of_mesh(mesh), split=split, align=align, halo=halo, periodic=periodic)
    _check_parts(local, layout, mesh)
    return Tile(_on_mesh_device(local, mesh), layout, mesh)


def _check_parts(local: Tensor, layout: Layout, mesh: DeviceMesh) -> None:
    """Raise on every rank where a rank's part does not fit, or ranks that hold the same part have other values."""
    uncut = [name for name, size in layout.axes if size > 1 and name not in layout.cut_axes]
    own_part = tuple(local.shape), checksum_of_bits(local) if uncut and not isinstance(local, FakeTensor) else 0
    # with wide halos two pieces may hold the same rows; then all parts are compared one by one
    held = [[rows for rows in cut.held if rows[0] < rows[1]] for cut in layout.cuts]
    is_right = not uncut or all(len(set(each)) == len(each) for each in held)
    for axis in uncut if is_right else ():
        is_right = are_alike(mesh, own_part, (axis,)) and is_right
    is_right = is_right and own_part[0] == layout.local_shape(mesh_coordinate(mesh))
    if are_alike(mesh, is_right) and is_right:
        return
    first: dict[Any, tuple[MeshCoordinate, int]] = {}
    for coord, (part, checksum) in zip(layout.coords(), all_gather_object(mesh, own_part), strict=True):
        if part != layout.local_shape(coord):
            raise ShardingError(
                f"from_local: the rank at {coord} passed a local tensor of shape {part}, but {layout} gives it "
                f"{layout.local_shape(coord)}; pass that part, or the split= that cuts it so"
            )
        other, known = first.setdefault(layout.held(coord), (coord, checksum))
        if checksum != known:
            raise ShardingError(
                f"from_local: the ranks at {coord} and {other} hold one part of {layout}, but passed other values; "
                "name the axis that cuts them in spec=, or make them alike (seed the ranks alike, or broadcast)"
            )
