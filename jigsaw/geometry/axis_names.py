"""Names of mesh axes that have a meaning of their own, and the dims that axes cut where no spec says it.

An axis may have any other name: it then cuts what a spec says.
"""

from __future__ import annotations

from collections.abc import Iterable

DATA_AXIS = "data"  # cuts the batch
REPLICATE_AXIS = "replicate"  # cuts the batch, between groups of ranks that each have all weights
ENSEMBLE_AXIS = "ensemble"  # cuts the members of an ensemble
CHANNEL_AXIS = "channel"  # cuts weights, and the channels between layers
EXPERT_AXIS = "expert"  # cuts the experts of `jigsaw.nn.MoE`
PIPE_AXIS = "pipe"  # cuts a model into stages

SAMPLE_AXES = (DATA_AXIS, REPLICATE_AXIS, ENSEMBLE_AXIS)
"""Axes that cut batches and members, not space."""

SPACE_AXES = {4: ("lat", "lon"), 5: ("z", "y", "x")}
"""Axes of space by the input's number of dims, in the order of its last dims."""

_USUAL_DIMS = {DATA_AXIS: 0, REPLICATE_AXIS: 0, "z": -3, "depth": -3, "y": -2, "lat": -2, "x": -1, "lon": -1}


def usual_spec(dims: int, axes: Iterable[str]) -> tuple[str | tuple[str, ...] | None, ...]:
    """Return the spec of an input with `dims` dims: each axis cuts the dim that axes of its name usually cut.

    >>> from jigsaw.geometry.axis_names import usual_spec
    >>> usual_spec(4, ["replicate", "data", "channel", "lat"])
    (('replicate', 'data'), None, 'lat', None)
    """
    spec: list[tuple[str, ...]] = [()] * dims
    for name in axes:
        dim = _USUAL_DIMS.get(name)
        if dim is not None and -dims <= dim < dims:
            spec[dim] = *spec[dim], name
    return tuple(names if len(names) > 1 else next(iter(names), None) for names in spec)
