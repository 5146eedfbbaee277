"""What every rank must pass alike: the arguments of `jigsaw.shard` and `jigsaw.from_local`, and values, by checksum."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from jigsaw import comm
from jigsaw.cut import RanksDifferError
from jigsaw.mesh import axes_of_mesh, ranks_along


def agree_on_arguments(
    what: str, mesh: DeviceMesh, x: Tensor, with_values: bool, **arguments: object
) -> list[tuple[tuple[int, ...], int]]:
    """The shape and checksum of all ranks' tensors, in mesh order, once all else that they pass is known to be the
    same.
    """
    alike = {
        "mesh": (axes_of_mesh(mesh), ranks_along(mesh, [n for n, _ in axes_of_mesh(mesh)])),
        "dtype": x.dtype,
        **arguments,
    }
    mine = {name: repr(value) for name, value in alike.items()} | {"requires_grad": repr(x.requires_grad)}
    checksum = checksum_of_bits(x) if with_values and mesh.size() > 1 else 0
    found = comm.all_gather_object(mesh, (mine, tuple(x.shape), checksum))
    for at, (theirs, _, _) in enumerate(found):
        for name, value in theirs.items():
            if value != found[0][0][name]:
                raise RanksDifferError(
                    f"{what}: the ranks must agree on {name}, but at place {at} of the mesh it is {value}, "
                    f"at place 0 {found[0][0][name]}"
                )
    return [(shape, number) for _, shape, number in found]


def checksum_of_bits(x: Tensor) -> int:
    """A number of the bits of `x`, element after element: NaN equals a NaN of the same bits, and 0.0 is not -0.0.

    On a GPU the sums of the columns and rows of its bytes, 8 kB to a row, stand for them, so that few leave it.
    """
    flat = x.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)
    if flat.is_cuda:
        words = torch.nn.functional.pad(flat, (0, -flat.numel() % 8192)).view(torch.int64).view(-1, 1024)
        flat = torch.cat([words.sum(0), words.sum(1)]).view(torch.uint8)
    return zlib.crc32(flat.cpu().numpy().data)
