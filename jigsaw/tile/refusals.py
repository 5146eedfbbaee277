"""Refusals by the kind of an argument, the handling of a refused function, and the line to write instead."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from typing import Any

from jigsaw.errors import ShardingError
from jigsaw.geometry.layout import Layout

ArgumentKinds = tuple[tuple[int, str, bool], ...]


def argument_kinds(handler: Callable[..., Any]) -> ArgumentKinds:
    """Read from the annotations of a handler, for each argument (place, name), `Tile` (True) or something else (False).
    Arguments that may be either are left out.
    """
    found: list[tuple[int, str, bool]] = []
    for place, (name, parameter) in enumerate(inspect.signature(handler).parameters.items()):
        says = str(parameter.annotation)
        is_open = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not is_open and not any(word in says for word in ("Any", "Tile |", "Weight", "Values", "Mask")):
            at = place if parameter.kind is not parameter.KEYWORD_ONLY else sys.maxsize
            found.append((at, name, says == "Tile"))
    return tuple(found)


_answers: list[Callable[..., Any]] = []


def answers_refusals(answer: Callable[..., Any]) -> Callable[..., Any]:
    """Let `answer(refusal, function, args, kwargs)` handle refusals: it raises the refusal or returns a result.

    `jigsaw.ops.into_torch.whole_tensor` has the one.
    """
    _answers[:] = [answer]
    return answer


def answer_refusal(refusal: ShardingError, function: Any, args: Any, kwargs: Any) -> Any:
    """Return the function's result all the same, or raise the refusal."""
    return _answers[0](refusal, function, args, kwargs)


def spec_without(layout: Layout, dims: Sequence[int]) -> tuple[str | tuple[str, ...] | None, ...]:
    """Return the spec with the axes that cut `dims` moved to the longest other dim that nothing cuts, if there is one.

    >>> from jigsaw.tile.refusals import spec_without
    >>> spec_without(jigsaw.Layout.of((4, 9, 7), (None, "lat", None), (("lat", 2),)), [1])
    (None, None, 'lat')
    """
    axes = [layout.dim_axes(d) for d in range(layout.ndim)]
    for d in dims:
        free = [e for e in range(layout.ndim) if e not in dims and not axes[e] and layout.shape[e] > 1]
        if axes[d] and free:
            axes[max(free, key=lambda e: layout.shape[e])] = axes[d]
        axes[d] = ()
    return tuple(None if not names else names[0] if len(names) == 1 else tuple(names) for names in axes)
