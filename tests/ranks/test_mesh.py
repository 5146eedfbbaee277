"""Named meshes: made, asked for coordinates and ranks, and refused with words."""

from __future__ import annotations

import gc
import weakref
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import jigsaw
from jigsaw.errors import ShardingError
from jigsaw.nn.weights import cut_parameter
from jigsaw.ranks.mesh import (
    TrafficKind,
    axes_in_mesh_order,
    axes_of_mesh,
    digest_of_ranks,
    flat_submesh,
    group_patience,
    groups_along,
    init_mesh,
    is_same_mesh,
    mesh_coordinate,
    mesh_group,
    mesh_patience,
    ranks_along,
    ranks_in_mesh,
)
from jigsaw.testing import on_ranks, world_mesh


@on_ranks(4)
def test_init_mesh_is_a_named_device_mesh():
    mesh = init_mesh(data=1, lat=2, lon=2)
    assert isinstance(mesh, DeviceMesh)
    assert axes_of_mesh(mesh) == (("data", 1), ("lat", 2), ("lon", 2))
    assert mesh_coordinate(mesh) == (0, *divmod(dist.get_rank(), 2))
    assert mesh.device_type == "cpu"


@on_ranks(2)
def test_a_mesh_that_does_not_fit_the_ranks():
    with pytest.raises(ShardingError, match=r"init_mesh\(lat=3\) has 3 places but there are 2 ranks; start that many"):
        init_mesh(lat=3)
    for axes in ({"lat": 0}, {"lat": -2, "lon": -1}, {"lat": -1, "lon": -1}):
        with pytest.raises(ShardingError, match=r"needs axes, each a whole number >= 1; one may be -1"):
            init_mesh(**axes)
    with pytest.raises(ShardingError, match=r"init_mesh\(\) without axes is for one rank, and there are 2; say what"):
        init_mesh()


def test_a_mesh_of_one_rank_needs_no_axes():
    assert axes_of_mesh(init_mesh()) == (("data", 1),)


@on_ranks(4)
def test_one_axis_takes_the_rest_of_the_ranks():
    assert axes_of_mesh(init_mesh(lat=-1)) == (("lat", 4),)
    assert axes_of_mesh(init_mesh(data=2, lat=-1, lon=1)) == (("data", 2), ("lat", 2), ("lon", 1))
    assert axes_of_mesh(init_mesh(data=4, lat=-1)) == (("data", 4), ("lat", 1))
    for others in (3, 8):
        what = rf"init_mesh\(lat=-1, lon={others}\) has places for multiples of {others} ranks but there are 4 ranks; "
        what += "start such a number with torchrun --nproc-per-node or srun --ntasks"
        with pytest.raises(ShardingError, match=what):
            init_mesh(lat=-1, lon=others)


@on_ranks(2)
def test_a_mesh_without_names():
    with pytest.raises(ShardingError, match=r"mesh of shape \(2,\) has no axis names; make it with jigsaw.init_mesh"):
        axes_of_mesh(DeviceMesh("cpu", [0, 1]))


@on_ranks(4)
def test_ranks_along_axes_come_in_mesh_order():
    mesh = DeviceMesh("cpu", [[3, 1], [0, 2]], mesh_dim_names=("lat", "lon"))
    lat, lon = mesh_coordinate(mesh)
    assert ranks_in_mesh(mesh) == (3, 1, 0, 2)
    assert ranks_along(mesh, "lon") == ((3, 1), (0, 2))[lat]
    assert ranks_along(mesh, ["lat", "absent"]) == ((3, 0), (1, 2))[lon]
    assert ranks_along(mesh, ["lon", "lat"]) == (3, 1, 0, 2)
    assert ranks_along(mesh, ()) == (dist.get_rank(),)
    assert axes_in_mesh_order(mesh, ["lon", "lat", "absent"]) == ("lat", "lon")
    assert axes_in_mesh_order(mesh, "lat_lon") == ()


@on_ranks(4)
def test_groups_that_exist_are_used():
    mesh = world_mesh(data=1, lat=2, lon=2)
    before = dist.distributed_c10d.get_pg_count()
    ((along_lat, _),) = groups_along(mesh, ["data", "lat"])
    assert along_lat is mesh.get_group("lat")
    ((along_both, ranks),) = groups_along(mesh, ["lon", "lat"])
    assert along_both is mesh_group(mesh) is dist.group.WORLD
    assert ranks == (0, 1, 2, 3)
    assert groups_along(mesh, "data") == []
    assert dist.distributed_c10d.get_pg_count() == before


@pytest.mark.parametrize("kind", TrafficKind)
@on_ranks(4, backend="gloo")
def test_gloo_has_one_group_for_all_traffic(kind):
    """Its messages overtake each other, and each group costs a connection to every rank."""
    mesh = world_mesh(lat=2, lon=2)
    before = dist.distributed_c10d.get_pg_count()
    assert groups_along(mesh, ["lat", "lon"], kind) == groups_along(mesh, ["lat", "lon"])
    assert mesh_group(mesh, kind) is mesh_group(mesh)
    assert dist.distributed_c10d.get_pg_count() == before


@on_ranks(4, backend="ordered")
def test_some_ranks_make_their_groups_without_the_others():
    """As stages of a pipeline do: names that counted would leave all ranks waiting for each other at the next group."""
    whole, part = world_mesh(lat=2, lon=2), DeviceMesh("cpu", [[3, 0, 1]], mesh_dim_names=("lat", "lon"))
    if part.get_coordinate() is not None:
        apart = {mesh_group(part, kind) for kind in TrafficKind}
        assert len(apart) == len(TrafficKind) and mesh_group(part) not in apart
        assert {tuple(dist.get_process_group_ranks(group)) for group in apart} == {(0, 1, 3)}
        ((sums, ranks),) = groups_along(part, "lon", TrafficKind.GRADIENTS)
        assert sums in apart and ranks == (3, 0, 1)
    group = mesh_group(whole, TrafficKind.MESSAGES)
    assert mesh_group(world_mesh(lat=4), TrafficKind.MESSAGES) is group
    ((along, _),) = groups_along(world_mesh(lat=2, lon=1, data=2), "lat", TrafficKind.GRADIENTS)
    total = torch.ones(1)
    dist.all_reduce(total, group=along)
    dist.all_reduce(total, group=group)
    dist.all_reduce(total, group=dist.new_group())
    assert total.item() == 2 * 4 * 4
    before = mesh_patience(whole)
    init_mesh(device="cpu", lat=4, timeout=77)
    assert group_patience(along, "cpu") == group_patience(group, "cpu") == timedelta(seconds=77)
    init_mesh(device="cpu", lat=4, timeout=before)


@on_ranks(4)
def test_same_mesh_compares_ranks_and_names():
    names = ("lat", "lon")
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=names)
    assert is_same_mesh(mesh, mesh)
    assert is_same_mesh(mesh, world_mesh(lat=2, lon=2))
    assert is_same_mesh(mesh, world_mesh(data=1, lat=2, lon=2)["lat", "lon"])
    for ranks, other in (([[0, 2], [1, 3]], names), ([[0, 1], [2, 3]], ("lon", "lat")), ([[0, 1, 2, 3]], names)):
        assert not is_same_mesh(mesh, DeviceMesh("cpu", ranks, mesh_dim_names=other))


@on_ranks(4)
def test_a_submesh_is_made_once():
    mesh = world_mesh(data=1, lat=2, lon=2)
    assert flat_submesh(mesh, "lat").mesh_dim_names == ("lat",)
    flat = flat_submesh(mesh, ["lat", "lon"])
    assert flat.mesh.tolist() == [0, 1, 2, 3]
    assert flat_submesh(mesh, ["lon", "lat"]) == flat


@pytest.mark.parametrize("rows", [10, 70])
@on_ranks(4)
def test_a_submesh_leaves_uneven_parameters_whole(rows):
    """torch gathers what two axes cut at once where a mesh knows one axis for both, and then takes rows for even."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("lat", "lon"))
    weight = torch.arange(3.0 * rows).reshape(rows, 3)
    parameter = cut_parameter(weight, mesh, ("lat", "lon"))
    assert flat_submesh(mesh, ("lat", "lon")).size() == 4
    assert torch.equal(parameter.full_tensor(), weight)
    assert torch.equal(cut_parameter(weight, mesh, ("lat", "lon")).full_tensor(), weight)


@on_ranks(2)
def test_asking_a_mesh_does_not_keep_it_alive():
    mesh = DeviceMesh("cpu", torch.tensor([[1], [0]]), mesh_dim_names=("lat", "lon"))
    ranks_along(mesh, "lat")
    groups_along(mesh, "lat")
    gone = weakref.ref(mesh)
    del mesh
    gc.collect()
    assert gone() is None


@given(st.lists(st.integers(0, 99), unique=True), st.lists(st.integers(0, 99), unique=True))
def test_a_digest_of_ranks_is_of_these_alone(one, other):
    assert (digest_of_ranks(one) == digest_of_ranks(other)) == (one == other)


def test_a_group_of_thousands_of_ranks_has_a_name_that_the_store_takes():
    store = dist.TCPStore("127.0.0.1", 0, 1, True, use_libuv=True)
    dist.PrefixStore(f"jigsaw messages cuda {digest_of_ranks(range(4096))}/", store).set("0", "here")


@pytest.mark.parametrize("size", [2.0, "2", True, None])
def test_sizes_are_whole_numbers(size):
    with pytest.raises(ShardingError, match="each a whole number >= 1"):
        jigsaw.init_mesh(lat=size)
