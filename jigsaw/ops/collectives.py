"""`torch.distributed`'s collectives of tiles: a tile is the whole tensor, so nothing is summed, gathered or sent.

In a forward pass of a parallelized model there is one process (`jigsaw.ranks.model_world`).  Elsewhere the world size
is that of the job, by which a sum would be divided.  So there only collectives with the same result for any number of
processes are answered. `all_gather` is, too: it gives as many copies of the whole as it asks for.

>>> tile = jigsaw.shard(torch.ones(4), jigsaw.init_mesh(lat=1), ("lat",))
>>> torch.distributed.all_reduce(tile, torch.distributed.ReduceOp.MAX)
>>> tile.full_tensor()
tensor([1., 1., 1., 1.])
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import distributed

from jigsaw.ranks.model_world import OneProcessError, finished_work, is_one_process
from jigsaw.tile.tile import implements_torch, tiles_in
from jigsaw.torch_internals.autograd import as_plain_tensors

dist: Any = distributed  # Any, because torch marks some of its functions as deprecated
_OPS = dist.ReduceOp
_SAME_FOR_ANY_NUMBER = (_OPS.AVG, _OPS.MAX, _OPS.MIN, _OPS.BAND, _OPS.BOR)
_CHANGES_NOTHING = (dist.all_reduce, dist.all_reduce_coalesced, dist.broadcast, dist.reduce)
_FILLS = (
    *(dist.all_gather, dist.all_gather_single, dist.all_gather_coalesced, dist.gather, dist.scatter),
    *(dist.reduce_scatter, dist.reduce_scatter_single, dist.all_to_all, dist.all_to_all_single),
)
_SENDS = (dist.send, dist.recv, dist.isend, dist.irecv)


def _run_collective(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a collective of one process.  *Sends*: nothing."""
    tile = next(tiles_in((args, kwargs)))
    name = f"torch.distributed.{function.__name__} of a Tile of shape {tuple(tile.shape)}"
    whole = "a Tile is the whole tensor on every rank"
    group: Any = kwargs.get("group")
    is_alone = isinstance(group, dist.ProcessGroup) and group.size() == 1
    if group is not None and group is not dist.group.WORLD and not is_alone:
        raise OneProcessError(f"{name} with group=: {whole}, whatever the group; leave the call out")
    if function is dist.all_gather and not is_one_process():
        return _gather_copies(*args, **kwargs)
    is_idempotent = function is dist.broadcast or kwargs.get("op") in _SAME_FOR_ANY_NUMBER
    if function in _SENDS or not (is_alone or is_one_process() or (function in _CHANGES_NOTHING and is_idempotent)):
        raise OneProcessError(
            f"{name}: {whole}, not a part of a sum or a list; leave the call out, and the division by the world size; "
            "in a forward pass of a parallelized model, whose world size is 1, it is answered"
        )
    if function in _CHANGES_NOTHING:
        return finished_work(args[0]) if kwargs.get("async_op") else None
    with as_plain_tensors():
        # torch checks the arguments, in a group of one process
        return function(*args, **kwargs)


def _gather_copies(tensor_list: Any, tensor: Any, group: Any = None, async_op: bool = False) -> Any:
    """Copy the tile to each place of the list, because all ranks have the same tensor; metrics gather like this."""
    for place in tensor_list:
        place.copy_(tensor)
    return finished_work(tensor) if async_op else None


for _function in (*_CHANGES_NOTHING, *_FILLS, *_SENDS):
    implements_torch(_function)(partial(_run_collective, _function))
