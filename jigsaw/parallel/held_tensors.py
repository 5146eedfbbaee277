"""Tensors that modules keep as plain attributes: inputs and results of the graphs of `jigsaw.compile`.

A *holder* is a dict or list in which a module keeps them: its attributes, and dicts and lists among these.  For
example a module with ``self.tables = [a, {"b": b}]`` has three holders, and keeps a in the second and b in the third.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from jigsaw.tile.tile import Tile
from jigsaw.torch_internals import pytree
from jigsaw.torch_internals.placements import is_dtensor

Holder = dict[Any, Any] | list[Any]

_GONE = object()
# attributes of each module: parameters, buffers, children and hooks
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


@dataclass
class HeldChange:
    """A value that a forward pass put into a holder: one key of a dict, or all of a list."""

    holder: Holder
    key: Any
    value: Any

    def put(self, value: Any) -> None:
        if value is _GONE:
            cast(dict[Any, Any], self.holder).pop(self.key, None)
        else:
            self.holder[self.key] = value


class HeldTensors:
    """Tensors that some modules keep as plain attributes, by where they are kept."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        # the attributes of a module, and the keys that lead from them to a value, because its holder may be made anew
        self._places: list[tuple[Holder, tuple[Any, ...]]] = []
        self._known: set[tuple[int, tuple[Any, ...]]] = set()
        self.find_more()

    def find_more(self) -> bool:
        """Search all modules again; say whether there are places that were not known before."""
        before = len(self._places)
        for module in self._modules:
            attributes = vars(module)
            for path, value in _paths(attributes, ()):
                place = id(attributes), path
                if place not in self._known and any(_is_input(x) for x in _tensors_in(value)):
                    self._known.add(place)
                    self._places.append((attributes, path))
        return len(self._places) > before

    def tensors(self) -> list[Tensor | None]:
        """Return the tensors in the places now; None for others, and for those with a history, of an earlier step."""
        held: list[Tensor | None] = []
        for attributes, path in self._places:
            value = _value_at(attributes, path)
            if isinstance(value, Tensor):
                held.append(value if _is_input(value) else None)
            else:
                held.extend(x if _is_input(x) else None for x in _tensors_in(value))
        return held

    @contextmanager
    def replaced_by(self, tensors: Sequence[Tensor | None]) -> Generator[Callable[[], list[HeldChange]]]:
        """Let modules keep `tensors` (those of `tensors()` in a graph) within the block, and then their old values;
        call its result for values that were put there meanwhile.
        """
        holders = self._holders()
        before = [_copied(holder) for holder in holders]
        left = iter(tensors)
        for attributes, path in self._places:
            value = _value_at(attributes, path)
            leaves, spec = ([value], None) if isinstance(value, Tensor) else _flattened(value)
            inputs = [(next(left) if isinstance(x, Tensor) else None, x) for x in leaves]
            if any(x is not None for x, _ in inputs):
                new = [old if x is None else x for x, old in inputs]
                holder = cast(Holder, _value_at(attributes, path[:-1]))
                holder[path[-1]] = new[0] if spec is None else pytree.tree_unflatten(new, spec)
        entered = [_copied(holder) for holder in holders]
        try:
            yield lambda: [c for pair in zip(holders, entered, strict=True) for c in _changes(*pair)]
        finally:
            for holder, old in zip(holders, before, strict=True):
                for change in _changes(holder, old):
                    _restore_held(holder, change.key, old)

    def _holders(self) -> list[Holder]:
        holders: dict[int, Holder] = {}

        def visit(holder: Holder) -> None:
            if id(holder) not in holders:
                holders[id(holder)] = holder
                for _, value in _items(holder):
                    if isinstance(value, dict | list):
                        visit(cast(Holder, value))

        for module in self._modules:
            visit(vars(module))
        return list(holders.values())


def _items(holder: Holder) -> list[tuple[Any, Any]]:
    if isinstance(holder, list):
        return list(enumerate(holder))
    return [(key, value) for key, value in holder.items() if key not in _OF_EVERY_MODULE]


def _copied(holder: Holder) -> Holder:
    return list(holder) if isinstance(holder, list) else dict(holder)


def _paths(holder: Holder, path: tuple[Any, ...], depth: int = 8) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for key, value in _items(holder):
        if not isinstance(value, dict | list):
            yield (*path, key), value
        elif depth:  # the depth is limited, because a list may contain itself
            yield from _paths(cast(Holder, value), (*path, key), depth - 1)


def _value_at(holder: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        if isinstance(holder, dict):
            holder = cast(dict[Any, Any], holder).get(key)
        elif isinstance(holder, list) and isinstance(key, int) and key < len(cast(list[Any], holder)):
            holder = cast(list[Any], holder)[key]
        else:
            return None
    return holder


def _flattened(value: Any) -> tuple[list[Any], pytree.TreeSpec | None]:
    # dicts and lists are holders themselves
    return pytree.tree_flatten(value) if isinstance(value, tuple) else ([], None)


def _tensors_in(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [x for x in _flattened(value)[0] if isinstance(x, Tensor)]


def _is_input(x: Tensor) -> bool:
    # of the local tensor, because asking the tile itself would put its shell into the graph of autograd
    return (x.local if isinstance(x, Tile) else x).grad_fn is None and not is_dtensor(x)


def _changes(holder: Holder, old: Holder) -> list[HeldChange]:
    if isinstance(holder, list):
        is_same = len(holder) == len(old) and all(a is b for a, b in zip(holder, old, strict=True))
        return [] if is_same else [HeldChange(holder, slice(None), list(holder))]
    current, theirs = dict(_items(holder)), dict(_items(old))
    changes = [HeldChange(holder, k, v) for k, v in current.items() if theirs.get(k, _GONE) is not v]
    return changes + [HeldChange(holder, k, _GONE) for k in theirs if k not in current]


def _restore_held(holder: Holder, key: Any, old: Holder) -> None:
    if isinstance(holder, list):
        holder[:] = cast(list[Any], old)
    elif key in cast(dict[Any, Any], old):
        holder[key] = cast(dict[Any, Any], old)[key]
    else:
        del holder[key]
