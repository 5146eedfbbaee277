"""Nets of torch_geometric: nodes are cut, edges are whole, kept by the net or given at each step."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from zoo_net import ZooInput, ZooNet

NODES, EDGES, CHANNELS = 41, 150, 6


def _edges() -> Tensor:
    """A random graph, with a hub and repeated edges; some nodes have none."""
    draw = torch.Generator().manual_seed(5)
    edges = torch.randint(0, NODES - 3, (2, EDGES), generator=draw)
    edges[1, :20] = 7
    return edges


class _GraphNet(nn.Module):
    """Two layers, which share one graph."""

    def __init__(self, layer: Callable[[int, int], nn.Module], is_kept: bool, width: int) -> None:
        super().__init__()
        self.first, self.second = layer(CHANNELS, 8), layer(width, 5)
        self.kept = nn.Buffer(_edges()) if is_kept else None

    def forward(self, x: Tensor, edges: Tensor | None = None) -> Tensor:
        edges = self.kept if edges is None else edges
        return self.second(torch.tanh(self.first(x, edges)), edges)


def _geometric(name: str, conv: str, width: int = 8, is_given: bool = False, **kwargs: Any) -> ZooNet:
    def build() -> nn.Module:
        layers = importlib.import_module("torch_geometric.nn")

        def layer(channels: int, out: int) -> nn.Module:
            if conv in ("GINConv", "EdgeConv"):
                mlp = nn.Sequential(
                    nn.Linear((1 + (conv == "EdgeConv")) * channels, out), nn.SiLU(), nn.Linear(out, out)
                )
                return getattr(layers, conv)(mlp, **kwargs)
            return getattr(layers, conv)(channels, out, **kwargs)

        return _GraphNet(layer, not is_given, width)

    graph = _edges()

    def call(model: nn.Module, x: Tensor) -> Any:
        return model(x, graph) if is_given else model(x)

    nodes = ZooInput((NODES, CHANNELS), (("lat", "lon"), None))
    return ZooNet(name, "torch-geometric", build, [nodes], call=call)


GRAPH_NETS = (
    _geometric("GCNConv", "GCNConv"),
    _geometric("GCNConv (cached)", "GCNConv", cached=True),
    _geometric("SAGEConv", "SAGEConv"),
    _geometric("SAGEConv (max)", "SAGEConv", aggr="max"),
    _geometric("SAGEConv (edges given)", "SAGEConv", is_given=True, aggr="sum"),
    _geometric("GATConv", "GATConv", width=16, heads=2),
    _geometric("GATv2Conv", "GATv2Conv", width=16, heads=2, add_self_loops=False),
    _geometric("GraphConv", "GraphConv", aggr="mean"),
    _geometric("GINConv", "GINConv"),
    _geometric("EdgeConv", "EdgeConv", aggr="max"),
    _geometric("TransformerConv", "TransformerConv", width=16, heads=2),
)
