"""Random numbers alike in both runs that are compared: drawn by the global position, as tiles draw them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import jigsaw
from jigsaw.geometry.layout import Layout
from jigsaw.ranks.mesh import axes_of_mesh

_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
_RANDOM: dict[Any, tuple[str, ...]] = {
    F: (*_DROPOUTS, "rrelu", "gumbel_softmax", "scaled_dot_product_attention"),
    torch: ("dropout", "rand_like", "randn_like", "randint_like", "bernoulli", "multinomial"),
    Tensor: ("bernoulli_", "exponential_", "log_normal_", "normal_", "random_", "uniform_"),
}


@contextmanager
def drawn_by_place(mesh: DeviceMesh) -> Iterator[None]:
    """Whole tensors draw as tiles do, which nothing cuts.

    Dropout of a net in training is then compared, too: torch's own stream gives a whole tensor other masks than tiles,
    which have the same on every mesh. Both sides take a number of torch's generator a function, so that they stay in
    step, and what is drawn by shape alone (``torch.rand(3)``) is the same.
    """
    kept = [(place, name, getattr(place, name)) for place, names in _RANDOM.items() for name in names]
    for place, name, function in kept:
        setattr(place, name, _by_place(function, mesh))
    try:
        yield
    finally:
        for place, name, function in kept:
            setattr(place, name, function)


def _by_place(function: Any, mesh: DeviceMesh) -> Any:
    is_attention = function.__name__ == "scaled_dot_product_attention"

    def as_tile(x: Any) -> Any:
        return jigsaw.Tile(x, Layout.of(x.shape, (None,) * x.ndim, axes_of_mesh(mesh)), mesh)

    def draw(*args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if any(isinstance(x, jigsaw.Tile) for x in tensors):
            return _on_tiles(function, args, kwargs)
        is_random = not is_attention or (args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0)) > 0
        # jigsaw tries a method's arguments on an empty tensor, which draws nothing
        if not is_random or not any(x.numel() for x in tensors) or kwargs.get("generator") is not None:
            return function(*args, **kwargs)
        tiles = [as_tile(x) if isinstance(x, Tensor) else x for x in args]
        named = {name: as_tile(x) if isinstance(x, Tensor) else x for name, x in kwargs.items()}
        found = _on_tiles(function, tiles, named)
        return tensors[0] if function.__name__.endswith("_") else found.local

    return draw


def _on_tiles(function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Torch's own way asks for the function by its name, which is ours now."""
    return jigsaw.Tile.__torch_function__(function, (jigsaw.Tile,), tuple(args), kwargs)
