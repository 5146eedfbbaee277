"""Large graph nets planned on 1 to 64 devices by dry runs: memory, seconds and bytes of a training step.

    python benchmarks/cells_planned.py --output benchmarks/results/cells-planned-MACHINE-MONTH.jsonl

Nets of the published sizes in bfloat16, with AdamW and blocks checkpointed.  Two are written with `gather_neighbors`
and `scatter_to_cells`, and the third is as anemoi-models has it (``pip install anemoi-models torch-geometric``):

- `graphcast`: 0.25 degrees, 721 x 1440 points of 474 channels. The encoder takes the points within 0.6 of the longest
  edge of the mesh, the decoder three corners of the mesh a point, and 16 layers work on the edges of all seven
  refinements of the icosahedron, 512 channels wide (Lam et al., arXiv 2212.12794).
- `graph transformer`: N320 to O96 and back, 16 layers of attention over 16 near points with 1024 channels and 16 heads,
  as AIFS has them (Lang et al., arXiv 2406.01465), whose own layers attend to windows instead.
- `anemoi`: `AnemoiModelEncProcDec` on the same points and edges, with its graph transformers as encoder, processor of
  16 layers and decoder, 1024 channels wide with 16 heads.  It checkpoints each layer by itself.

Points lie along Hilbert's curve.  Each row says what the rank in the middle takes.  `planned_s` is how long the dry run
took, and `planned_cpu_s` the processor time of that.  With ``--real`` the same step, after two others, runs on real
ranks of this machine, too: `sent_by_real_ranks` is what the rank in the middle sends.
"""

from __future__ import annotations

import argparse
import time
from importlib.metadata import version
from itertools import combinations
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from cells import n320_points, octahedral_points
from result_file import ResultFile, add_result_options
from torch import Tensor, nn

import jigsaw
from jigsaw import Neighbors, comm
from jigsaw.geometry.curve import curve_order
from jigsaw.nn import gather_neighbors, scatter_to_cells
from jigsaw.testing import run_on_ranks, world_mesh

Points = tuple[np.ndarray, np.ndarray]


def refined_icosahedron(refinements: int) -> tuple[Points, np.ndarray, float]:
    """Latitudes and longitudes of the corners, the edges of all refinements in both directions, [2, edges], and the
    longest of the last refinement in degrees.
    """
    golden = (1 + 5**0.5) / 2
    corners = [np.roll((0, a, b * golden), turn) for turn in range(3) for a in (1, -1) for b in (1, -1)]
    points = np.array(corners) / np.linalg.norm(corners[0])
    near = points @ points.T > 0.4  # neighbors of a corner; itself, too
    faces = np.array([c for c in combinations(range(12), 3) if all(near[a, b] for a, b in combinations(c, 2))])
    edges = [faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]
    for _ in range(refinements):
        sides = np.sort(np.concatenate([faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]), axis=1)
        unique, middle = np.unique(sides, axis=0, return_inverse=True)
        ab, bc, ca = middle.reshape(3, -1) + len(points)
        halves = points[unique].sum(1)
        points = np.concatenate([points, halves / np.linalg.norm(halves, axis=1, keepdims=True)])
        a, b, c = faces.T
        faces = np.concatenate([np.stack(f, 1) for f in ((a, ab, ca), (b, bc, ab), (c, ca, bc), (ab, bc, ca))])
        edges += [faces[:, [0, 1]], faces[:, [1, 2]], faces[:, [2, 0]]]
    places = np.degrees(np.arcsin(points[:, 2])), np.degrees(np.arctan2(points[:, 1], points[:, 0]))
    order = curve_order(*places)
    pairs = np.unique(np.sort(np.argsort(order)[np.concatenate(edges)], axis=1), axis=0)
    chords = np.linalg.norm(points[faces[:, 0]] - points[faces[:, 1]], axis=1)
    longest = float(np.degrees(2 * np.arcsin(chords.max() / 2)))
    return along_curve(*places), np.concatenate([pairs, pairs[:, ::-1]]).T, longest


def along_curve(lat: np.ndarray, lon: np.ndarray) -> Points:
    """Points in the order in which `jigsaw.io.open(..., order="curve")` reads them."""
    order = curve_order(lat, lon)
    return lat[order], lon[order]


def regular_points(rows: int, columns: int) -> Points:
    """Points of a regular grid with rows at both poles."""
    lat, lon = np.meshgrid(np.linspace(90, -90, rows), np.arange(columns) * 360 / columns, indexing="ij")
    return along_curve(lat.ravel(), lon.ravel())


def as_edges(table: Neighbors) -> Neighbors:
    """Make a table of k neighbors one of edges."""
    span = (0, table.targets)
    return Neighbors.of_edges(table.sources_of(span), table.targets_of(span), table.sources, table.targets)


# -- GraphCast --------------------------------------------------------------------------------------------------------


def mlp(inside: int, width: int, out: int | None = None) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(inside, width), nn.SiLU(), nn.Linear(width, out or width)]
    return nn.Sequential(*layers, nn.LayerNorm(width)) if out is None else nn.Sequential(*layers)


class Interaction(nn.Module):
    """A message along each edge, from both its ends and what it had before, and a new value of each target."""

    def __init__(self, graph: Neighbors, width: int) -> None:
        super().__init__()
        span = (0, graph.targets)
        targets = graph.targets_of(span)
        self.graph, self.ends = graph, Neighbors.of_edges(targets, targets, graph.targets, graph.targets)
        self.message, self.update = mlp(3 * width, width), mlp(2 * width, width)

    def forward(self, source: Tensor, target: Tensor, edge: Tensor) -> tuple[Tensor, Tensor]:
        from_source = gather_neighbors(source, self.graph, dim=0, points=self._points_of(target))
        from_target = gather_neighbors(target, self.ends, dim=0)
        edge = edge + self.message(torch.cat([edge, from_source, from_target], -1))
        return target + self.update(torch.cat([target, scatter_to_cells(edge, self.graph, dim=0)], -1)), edge

    @staticmethod
    def _points_of(target: Any) -> Any:
        return target.layout.dim(0)[0].points if isinstance(target, jigsaw.Tile) else None


class GraphCast(nn.Module):
    """An encoder from grid to mesh, layers on the mesh, a decoder to the grid; places of points are inputs, and cut."""

    def __init__(self, grid: Points, refinements: int, channels: int, out: int, width: int, layers: int) -> None:
        super().__init__()
        places, edges, longest = refined_icosahedron(refinements)
        to_mesh = Neighbors.of_points(*places, radius=0.6 * longest, sources=grid)
        mesh = Neighbors.of_edges(*edges, len(places[0]), len(places[0]))
        to_grid = as_edges(Neighbors.of_points(*grid, k=3, sources=places))
        self.grid_embedding, self.mesh_embedding = mlp(channels, width), mlp(3, width)
        self.encoder, self.decoder = Interaction(to_mesh, width), Interaction(to_grid, width)
        self.edge_embeddings = nn.ModuleList([mlp(6, width) for _ in range(3)])
        self.layers = nn.ModuleList([Interaction(mesh, width) for _ in range(layers)])
        self.last = mlp(width, width, out)

    def embedded_edges(self, number: int, block: Interaction, source: Tensor, target: Tensor) -> Tensor:
        """Edges by the places of both their ends."""
        points = block._points_of(target)
        ends = gather_neighbors(source, block.graph, dim=0, points=points), gather_neighbors(target, block.ends, dim=0)
        return self.edge_embeddings[number](torch.cat(ends, -1))

    def forward(self, x: Tensor, grid_places: Tensor, mesh_places: Tensor) -> Tensor:
        grid, mesh = self.grid_embedding(x), self.mesh_embedding(mesh_places)
        edge = self.embedded_edges(0, self.encoder, grid_places, mesh_places)
        mesh, _ = self.encoder(grid, mesh, edge)
        edge = self.embedded_edges(1, self.layers[0], mesh_places, mesh_places)
        for layer in self.layers:
            mesh, edge = layer(mesh, mesh, edge)
        edge = self.embedded_edges(2, self.decoder, mesh_places, grid_places)
        grid, _ = self.decoder(mesh, grid, edge)
        return self.last(grid)


# -- a graph transformer ----------------------------------------------------------------------------------------------


class NearAttention(nn.Module):
    """Attention of each target to near sources, and an MLP."""

    def __init__(self, table: Neighbors, width: int, heads: int) -> None:
        super().__init__()
        self.table, self.heads = table, heads
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(3)])
        self.q, self.kv, self.out = nn.Linear(width, width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        points = Interaction._points_of(target)
        kv = gather_neighbors(self.kv(self.norms[0](source)), self.table, dim=0, points=points)
        k, v = kv.unflatten(-1, (2, self.heads, -1)).unbind(2)  # [cells, near, heads, head]
        q = self.q(self.norms[1](target)).unflatten(-1, (self.heads, -1)).unsqueeze(1)
        weights = ((q * k).sum(-1) / k.shape[-1] ** 0.5).softmax(1)
        target = target + self.out((weights.unsqueeze(-1) * v).sum(1).flatten(1))
        return target + self.mlp(self.norms[2](target))


class GraphTransformer(nn.Module):
    """An encoder to a coarse grid, layers there, and a decoder back, of attention to near points."""

    def __init__(self, grid: Points, coarse: Points, channels: int, out: int, width: int, layers: int) -> None:
        super().__init__()
        self.first, self.places = nn.Linear(channels, width), nn.Linear(3, width)
        near = Neighbors.of_points(*coarse, k=16)
        self.encoder = NearAttention(Neighbors.of_points(*coarse, k=32, sources=grid), width, 16)
        self.layers = nn.ModuleList([NearAttention(near, width, 16) for _ in range(layers)])
        self.decoder = NearAttention(Neighbors.of_points(*grid, k=3, sources=coarse), width, 16)
        self.last = nn.Linear(width, out)

    def forward(self, x: Tensor, grid_places: Tensor, coarse_places: Tensor) -> Tensor:
        grid = self.first(x) + self.places(grid_places)
        coarse = self.encoder(grid, self.places(coarse_places))
        for layer in self.layers:
            coarse = layer(coarse, coarse)
        return self.last(self.decoder(coarse, grid))


# -- anemoi-models ----------------------------------------------------------------------------------------------------

STEPS, FORCINGS = 2, 10


class AnemoiNet(nn.Module):
    """The encoder, processor and decoder of anemoi-models: x [1, steps, 1, cells, variables]."""

    mesh: Any = None

    def __init__(self, grid: Points, coarse: Points, variables: int, width: int, layers: int, cuts_edges: bool) -> None:
        super().__init__()
        from anemoi.models.data_indices.collection import IndexCollection
        from anemoi.models.models import AnemoiModelEncProcDec
        from omegaconf import OmegaConf

        part = {
            "sub_graph_edge_attributes": ["edge_length", "edge_dirs"], "trainable_size": 8, "num_chunks": 1,
            "num_heads": 16, "mlp_hidden_ratio": 4, "mlp_extra_layers": 0, "cpu_offload": False, "layer_kernels": {},
            "graph_attention_backend": "pyg", "qk_norm": True,
        }  # fmt: skip
        kinds, where = "anemoi.models.layers", {"num_layers": layers, "num_chunks": layers}
        model = {
            "model": {"hidden_nodes_name": "hidden", "latent_skip": True},
            "num_channels": width,
            "trainable_parameters": {"data": 8, "hidden": 8},
            "encoder": {"_target_": f"{kinds}.mapper.GraphTransformerForwardMapper", **part},
            "processor": {"_target_": f"{kinds}.processor.GraphTransformerProcessor", **part, **where},
            "decoder": {"_target_": f"{kinds}.mapper.GraphTransformerBackwardMapper", **part},
            "residual": {"_target_": f"{kinds}.residual.SkipConnection"},
            "bounding": [],
        }
        names = [f"v{number}" for number in range(variables)]
        split = OmegaConf.create({"forcing": names[:FORCINGS], "diagnostic": [], "target": None})
        indices = IndexCollection(split, {name: number for number, name in enumerate(names)})
        self.net = AnemoiModelEncProcDec(
            model_config={"model": model, "training": {"multistep_input": STEPS, "multistep_output": 1}},
            data_indices={"data": indices}, statistics={"data": None}, graph_data=near_edges(grid, coarse),
        )  # fmt: skip
        if cuts_edges:
            for name, layer in self.named_modules():
                if name.endswith(("lin_edge", "emb_nodes_dst")):
                    layer.register_forward_pre_hook(self.cut_plain)

    def cut_plain(self, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Cut plain features of edges and hidden points in front of a layer, so that no rank has its whole product."""
        x, *others = inputs
        return (x if isinstance(x, jigsaw.Tile) else jigsaw.shard(x, self.mesh, ("cell", None)), *others)

    def forward(self, x: Tensor) -> Tensor:
        self.mesh = x.mesh if isinstance(x, jigsaw.Tile) else jigsaw.init_mesh(cell=1)
        return self.net({"data": x})["data"]


def near_edges(grid: Points, coarse: Points) -> Any:
    """The edges of `GraphTransformer` in anemoi-graphs' form, sorted by their target."""
    from torch_geometric.data import HeteroData

    graph, points = HeteroData(), {"data": grid, "hidden": coarse}
    for name, places in points.items():
        graph[name].x = torch.from_numpy(np.radians(np.stack(places, 1))).float()
    for source, target, k in (("data", "hidden", 32), ("hidden", "hidden", 16), ("hidden", "data", 3)):
        table = Neighbors.of_points(*points[target], k=k, sources=points[source])
        span = (0, table.targets)
        ends = torch.from_numpy(np.stack([table.sources_of(span), table.targets_of(span)]))
        edges = graph[source, "to", target]
        edges.edge_index = ends
        edges.edge_dirs = graph[source].x[ends[0]] - graph[target].x[ends[1]]
        edges.edge_length = edges.edge_dirs.norm(dim=1, keepdim=True)
    return graph


# -- plans ------------------------------------------------------------------------------------------------------------


ANEMOI_NETS = ("anemoi", "anemoi, edges cut")
NETS = ("graphcast", "graph transformer", *ANEMOI_NETS)
# how each net is planned: the first two give tiles on any mesh, and the third a plain tensor on one device
PLANS: dict[str, dict[str, Any]] = {
    **{name: {"spec": ("cell", None), "checkpoint": "blocks"} for name in NETS[:2]},
    **{name: {"spec": (None, None, None, "cell", None), "loss": lambda y: y.square().mean()} for name in ANEMOI_NETS},
}


def planned_net(name: str, is_small: bool) -> tuple[nn.Module, list[tuple[int, ...]]]:
    """Make a net, and the shapes of its inputs."""
    width, layers = (32, 2) if is_small else (512, 16)
    if name == "graphcast":
        grid, refinements = regular_points(*((19, 36) if is_small else (721, 1440))), 2 if is_small else 6
        net = GraphCast(grid, refinements, 474, 227, width, layers)
        return net, [(len(grid[0]), 474), (len(grid[0]), 3), (10 * 4**refinements + 2, 3)]
    fine = along_curve(*(octahedral_points(12) if is_small else n320_points()))
    coarse = along_curve(*octahedral_points(6 if is_small else 96))
    if name in ANEMOI_NETS:
        net = AnemoiNet(fine, coarse, 109, 2 * width, layers, name == ANEMOI_NETS[1])
        return net, [(1, STEPS, 1, len(fine[0]), 109)]
    net = GraphTransformer(fine, coarse, 218, 102, 2 * width, layers)
    return net, [(len(fine[0]), 218), (len(fine[0]), 3), (len(coarse[0]), 3)]


def sent_by_ranks(name: str) -> int:
    """Return the bytes that this rank sends in the third step of a small net: in the second indices are planned."""
    mesh, spec = world_mesh(cell=dist.get_world_size()), PLANS[name]["spec"]
    net, shapes = planned_net(name, is_small=True)
    net = jigsaw.parallelize(net.to(torch.bfloat16), mesh)
    tiles = [jigsaw.shard(torch.randn(shape, dtype=torch.bfloat16), mesh, spec) for shape in shapes]
    for _ in range(3):
        with comm.count() as counted:
            net(*tiles).square().mean().backward()
    return counted.sent_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--net", choices=NETS, nargs="+", default=NETS, help="these nets alone")
    parser.add_argument("--real", action="store_true", help="with --small: count on real ranks, too")
    parser.add_argument("--small", action="store_true", help="small nets on coarse grids")
    add_result_options(parser)
    options = parser.parse_args()
    chosen = "" if options.net == NETS else " --net " + " ".join(map(repr, options.net))
    chosen += (
        f" --devices {' '.join(map(str, options.devices))}" + " --small" * options.small + " --real" * options.real
    )
    command = "python benchmarks/cells_planned.py" + chosen
    theirs = {"anemoi-models": version("anemoi-models")} if {*ANEMOI_NETS} & {*options.net} else {}
    file = ResultFile(options, command, torch=torch.__version__, **theirs)
    for name in options.net:
        net, shapes = planned_net(name, options.small)
        cells = shapes[0][PLANS[name]["spec"].index("cell")]
        for devices in options.devices:
            began, began_cpu = time.perf_counter(), time.process_time()
            report = jigsaw.dry_run(
                net, shapes, {"cell": devices}, dtype=torch.bfloat16, ranks=[devices // 2], device="h100",
                **PLANS[name],
            )  # fmt: skip
            assert report.is_complete, report.remarks
            planned = {
                "planned_s": round(time.perf_counter() - began, 1),
                "planned_cpu_s": round(time.process_time() - began_cpu, 1),
            }
            real = run_on_ranks(devices, sent_by_ranks, name)[devices // 2] if options.real else None
            file.add(
                {
                    "net": name, "weights": report.parameters, "cells": cells, "devices": devices,
                    "device": "h100", "peak_GiB": round(report.peak_bytes / 2**30, 2), "fits": report.fits,
                    "step_s": float(f"{report.seconds:.3g}"), "sent_MiB": round(report.sent_bytes / 2**20, 1),
                    "messages": report.messages, **planned,
                    **({} if real is None else {"sent_bytes": report.sent_bytes, "sent_by_real_ranks": real}),
                }
            )  # fmt: skip


if __name__ == "__main__":
    main()
