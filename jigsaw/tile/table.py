"""`Table`: the answers to torch functions that meet a tile, and the slots that rooms above this one fill.

>>> from jigsaw.tile.table import table
>>> table.entries[torch.nonzero].kinds
((0, 'input', True), (9223372036854775807, 'as_tuple', False))
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from jigsaw.errors import ShardingError

TileHandler = Callable[..., Any]
ArgumentKinds = tuple[tuple[int, str, bool], ...]
H = TypeVar("H", bound=TileHandler)


class TableEntry(NamedTuple):
    """Handler of a torch function, and of its arguments (place, name) those that must be a Tile (True) or must not be
    one.  Arguments that may be either are left out.
    """

    handler: TileHandler
    kinds: ArgumentKinds = ()


class FoundAnswer(NamedTuple):
    """Entry of a function after its first call, ready for the next ones.

    `by_place` has the kinds by place (None: either), `names` are the keywords to check again, `watcher` runs before.
    """

    handler: TileHandler
    kinds: ArgumentKinds
    by_place: tuple[bool | None, ...]
    names: frozenset[str]
    watcher: Callable[..., Any] | None


class Table:
    """Answers to torch functions, and slots: functions that lower rooms call and that one upper room sets once, when
    it is imported.
    """

    # the handler of a function that no file of ops implements (ops.unknown_functions)
    find_rest: Callable[[Any], TileHandler]
    # the handler of a function, behind a check of its operands' dtypes where that is needed (ops.kernel_samples)
    with_check: Callable[[Any, TileHandler], TileHandler]
    # the check before a function, or None; it returns what to do with the result, if anything (ops.apart_copies)
    find_watcher: Callable[[Any], Callable[..., Any] | None]
    # sees each result that is, or is made of, a copy where torch has a view (ops.apart_copies)
    note_views: Callable[[Any], None]
    # raises a refusal, or returns the function's result all the same (ops.into_torch.whole_tensor)
    answer_refusal: Callable[[ShardingError, Any, Any, Any], Any]
    # passes a plain tensor into a custom Function beside a tile; its gradient is whole (ops.meeting.plain_operands)
    enter_function: Callable[[Tensor, Any], Tensor]
    # calls a function on tiles, and notes the call, while ranks debug (tile.noted_calls)
    note_call: Callable[..., Any]
    # while a pipeline finds its stages: sees every new tile, and replaces what a tile gives (stages.stage_calls)
    see_new_tile: Callable[[Any], None] | None = None
    see_left_tensor: Callable[[Tensor], Tensor] | None = None

    def __init__(self) -> None:
        self.entries: dict[Any, TableEntry] = {}
        self.found: dict[Any, FoundAnswer] = {}
        self.plain_readers: dict[type, Callable[[Any], Tensor]] = {}  # of classes that stand for plain tensors
        self.copies_made = 0  # copies of rows that torch returns as a view


table = Table()


def implements_torch(
    *functions: Any, tiles: Collection[str] = (), either: Collection[str] = (), plain: Collection[str] = ()
) -> Callable[[H], H]:
    """Answer these torch functions, and the tensor methods of the same name, with the decorated handler; name an
    operator of another package: ``"space::name"``.

    The handler's first argument is a Tile, unless it is in `plain`, and so are those of `tiles`.  Those of `either` may
    be a Tile or a plain value.  All others must be plain values.
    """

    def register(handler: H) -> H:
        entry = TableEntry(handler, tuple(_kinds_of_arguments(handler, tiles, either, plain)))
        for function in functions:
            table.entries[function] = entry
            table.found.clear()
            method = getattr(Tensor, getattr(function, "__name__", ""), None)
            if method is not None and getattr(torch, function.__name__, None) is function:
                table.entries.setdefault(method, entry)
        return handler

    return register


def _kinds_of_arguments(
    handler: TileHandler, tiles: Collection[str], either: Collection[str], plain: Collection[str]
) -> Iterator[tuple[int, str, bool]]:
    arguments = inspect.signature(handler).parameters.values()
    named = [a for a in arguments if a.kind not in (a.VAR_POSITIONAL, a.VAR_KEYWORD)]
    unknown = {*tiles, *either, *plain} - {a.name for a in named}
    assert not unknown, f"{handler} has no arguments {sorted(unknown)}"
    for place, argument in enumerate(named):
        at = sys.maxsize if argument.kind is argument.KEYWORD_ONLY else place
        if argument.name not in either:
            yield at, argument.name, argument.name in tiles or (at == 0 and argument.name not in plain)
