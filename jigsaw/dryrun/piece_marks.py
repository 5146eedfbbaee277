"""Marks of the piece of a model that a kernel, a message or memory of a step belongs to.

A stage of a pipeline may begin with a *piece*.  All that the forward pass does from the first call in a piece to that
in the next belongs to the first one.  So do the parts of the backward pass that lead back through it: nodes of the
graph are numbered as the forward pass makes them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch import nn

from jigsaw.torch_internals.autograd import current_node, graph_task_id, next_node_number, node_number


class PieceMarks:
    """Marks of where each piece begins in a forward pass, by the numbers of the graph's nodes."""

    def __init__(self, model: nn.Module, names: Sequence[str]) -> None:
        self.names = list(names)
        self.first_nodes: list[int] = []
        self.order: list[int] = []
        for at, name in enumerate(names):
            model.get_submodule(name).register_forward_pre_hook(self._begin(at), prepend=True)

    def _begin(self, at: int) -> Any:
        def hook(module: nn.Module, args: Any) -> None:
            if at not in self.order:
                self.order.append(at)
                self.first_nodes.append(next_node_number())

        return hook

    def piece_here(self, before: int) -> int:
        """Return the piece under way; `before`, that of the last call, where nothing tells."""
        if graph_task_id() == -1:
            return self.order[-1] if self.order else before
        node = current_node()
        if node is None or not self.order or "AccumulateGrad" in node.name():
            return before
        return self.order[max(bisect_right(self.first_nodes, node_number(node)) - 1, 0)]
