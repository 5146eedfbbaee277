"""Nets on cells and graphs: cells are cut, edges are whole, kept by the net or given at each step."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from zoo_net import ZooInput, ZooNet, default_dtype, image

import jigsaw

NODES, EDGES, CHANNELS, MESH_NODES = 41, 150, 6, 23
CELLS = ("lat", "lon")


def _edges(sources: int = NODES, targets: int = NODES, count: int = EDGES) -> Tensor:
    """A random graph, with a hub and repeated edges; some nodes have none."""
    draw = torch.Generator().manual_seed(5)
    source = torch.randint(0, sources - 3, (count,), generator=draw)
    target = torch.randint(0, targets - 3, (count,), generator=draw)
    target[:20] = 7
    return torch.stack([source, target])


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

    nodes = ZooInput((NODES, CHANNELS), (CELLS, None))
    return ZooNet(name, "torch-geometric", build, [nodes], call=call)


GEOMETRIC_NETS = (
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


def _meshed_grid() -> Any:
    """A grid, the mesh behind it, and the edges within and between: anemoi-graphs' form of a graph."""
    from torch_geometric.data import HeteroData

    graph, draw = HeteroData(), torch.Generator().manual_seed(1)
    for name, n in {"data": NODES, "hidden": MESH_NODES}.items():
        graph[name].x = torch.rand(n, 2, generator=draw) * 3 - 1.5
    for source, target in (("data", "hidden"), ("hidden", "hidden"), ("hidden", "data")):
        edges = graph[source, "to", target]
        edges.edge_index = _edges(graph[source].num_nodes, graph[target].num_nodes)
        edges.edge_length, edges.edge_dirs = (torch.randn(EDGES, n, generator=draw) for n in (1, 2))
    return graph


def _with_plain_cut(model: nn.Module, x: Any) -> Any:
    """Call a net of anemoi-models with docs/cells.md's hook in front of the layers that take plain tensors."""

    def cut(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        plain, *others = inputs
        is_plain = not isinstance(plain, jigsaw.Tile)
        return (jigsaw.shard(plain, x.mesh, ("cell", None)) if is_plain else plain, *others)

    for name, layer in model.named_modules():
        # hooks stay, because a checkpointed layer runs again in the backward pass
        takes_plain = name.endswith(("lin_edge", "emb_nodes_dst")) and isinstance(x, jigsaw.Tile)
        if takes_plain and not layer._forward_pre_hooks:
            layer.register_forward_pre_hook(cut)
    return model({"data": x})


ANEMOI_VARIABLES = {"t": 0, "q": 1, "z": 2, "lsm": 3, "tp": 4}
ANEMOI_ROLES = {"forcing": ["lsm"], "diagnostic": ["tp"], "target": None}


def _anemoi_config(kind: str, **kwargs: Any) -> dict[str, Any]:
    part = {
        "sub_graph_edge_attributes": ["edge_length", "edge_dirs"],
        "trainable_size": 2,
        "num_chunks": 1,
        "num_heads": 2,
        "mlp_hidden_ratio": 2,
        "mlp_extra_layers": 0,
        "cpu_offload": False,
        "layer_kernels": {},
        "graph_attention_backend": "pyg",
        **kwargs,
    }
    layers = "anemoi.models.layers"
    model = {
        "model": {
            "_target_": "anemoi.models.models.AnemoiModelEncProcDec",
            "hidden_nodes_name": "hidden",
            "latent_skip": True,
        },
        "num_channels": 8,
        "trainable_parameters": {"data": 2, "hidden": 2},
        "encoder": {"_target_": f"{layers}.mapper.{kind}ForwardMapper", **part},
        "processor": {"_target_": f"{layers}.processor.{kind}Processor", **part, "num_layers": 2},
        "decoder": {"_target_": f"{layers}.mapper.{kind}BackwardMapper", **part},
        "residual": {"_target_": f"{layers}.residual.SkipConnection"},
        "bounding": [],
    }
    return {"model": model, "training": {"multistep_input": 2, "multistep_output": 1}}


def _anemoi_indices() -> Any:
    from anemoi.models.data_indices.collection import IndexCollection
    from omegaconf import OmegaConf

    return IndexCollection(OmegaConf.create(ANEMOI_ROLES), ANEMOI_VARIABLES)


def _anemoi(name: str, kind: str, call: Callable[[nn.Module, Any], Any] | None = None, **kwargs: Any) -> ZooNet:
    def build() -> nn.Module:
        from anemoi.models.models import AnemoiModelEncProcDec

        return AnemoiModelEncProcDec(
            model_config=_anemoi_config(kind, **kwargs),
            data_indices={"data": _anemoi_indices()},
            statistics={"data": None},
            graph_data=_meshed_grid(),
        )

    cells = ZooInput((1, 2, 1, NODES, 4), (None, None, None, CELLS, None))
    return ZooNet(name, "anemoi-models", build, [cells], call=call or (lambda model, x: model({"data": x})))


def save_anemoi_checkpoint(path: Path) -> None:
    """Write a net with its normalization as anemoi-training writes checkpoints, for anemoi-inference."""
    from anemoi.models.interface import AnemoiModelInterface
    from anemoi.utils.checkpoints import save_metadata
    from anemoi.utils.config import DotDict

    indices = _anemoi_indices()
    normalizer = {
        "_target_": "anemoi.models.preprocessing.normalizer.InputNormalizer",
        "config": {"default": "mean-std"},
    }
    data = {"timestep": "6h", "datasets": {"data": {**ANEMOI_ROLES, "processors": {"normalizer": normalizer}}}}
    config = DotDict({**_anemoi_config("GraphTransformer", qk_norm=True), "data": data})
    known = {name: {"mars": {"param": name}} for name in ANEMOI_VARIABLES}
    known["lsm"]["constant_in_time"] = True
    named = {"input": indices.model.input.name_to_index, "output": indices.model.output.name_to_index}
    kinds = {"forcing": ["lsm"], "target": [], "prognostic": ["t", "q", "z"], "diagnostic": ["tp"]}
    steps = {"relative_date_indices_training": [-1, 0, 1], "timestep": "6h"}
    metadata = {
        "config": config,
        "dataset": {"data": {"variables": list(known), "shape": [10, 5, 1, NODES], "variables_metadata": known}},
        "data_indices": {"data": indices.todict()},
        "metadata_inference": {
            "dataset_names": ["data"],
            "task": "forecaster",
            "data": {"data_indices": named, "variable_types": kinds, "timesteps": steps},
        },
    }
    statistics = {"mean": [280, 5, 5e4, 0.3, 1], "stdev": [10, 2, 1e3, 0.2, 1], "minimum": [0] * 5, "maximum": [1] * 5}
    torch.manual_seed(0)
    net = AnemoiModelInterface(
        config=config,
        graph_data=_meshed_grid(),
        statistics={"data": {name: np.array(values, dtype="f8") for name, values in statistics.items()}},
        data_indices={"data": indices},
        metadata=metadata,
    )
    torch.save(net, path)
    save_metadata(str(path), json.loads(json.dumps(metadata, default=lambda x: x.tolist())))


ANEMOI_NETS = (
    _anemoi("GraphTransformer", "GraphTransformer", qk_norm=True),
    _anemoi("GraphTransformer (two chunks)", "GraphTransformer", num_chunks=2),
    _anemoi("GraphTransformer (edges cut by a hook)", "GraphTransformer", call=_with_plain_cut),
    _anemoi("GraphTransformer (heads)", "GraphTransformer", shard_strategy="heads"),
    _anemoi("GNN", "GNN"),
)


def _transolver(name: str, **kwargs: Any) -> ZooNet:
    """A net of points, each of which belongs to a few slices by shares; attention is between the slices."""

    def build() -> nn.Module:
        transolver = importlib.import_module("physicsnemo.models.transolver").Transolver
        return transolver(3, 2, embedding_dim=2, n_layers=2, n_hidden=16, n_head=2, slice_num=5, use_te=False, **kwargs)

    inputs = [ZooInput((2, NODES, channels), (None, CELLS, None)) for channels in (3, 2)]
    return ZooNet(name, "nvidia-physicsnemo", build, inputs)


TRANSOLVERS = (_transolver("Transolver (points)"),)


def _graph_cast() -> ZooNet:
    """A grid of 9 x 18, cut by latitude and longitude, and a mesh of 42 points that the net makes, with its edges."""

    def build() -> nn.Module:
        graph_cast = importlib.import_module("physicsnemo.models.graphcast.graph_cast_net").GraphCastNet
        sizes = {"input_dim_grid_nodes": 4, "output_dim_grid_nodes": 3, "hidden_dim": 8, "processor_layers": 3}
        with default_dtype(torch.float32):  # it makes its graph of that alone
            net = graph_cast(mesh_level=1, input_res=(9, 18), **sizes)
        # places and lengths of edges are plain attributes, which `.double()` of a module leaves as they are
        kept = {name: x for name, x in vars(net).items() if isinstance(x, Tensor) and x.is_floating_point()}
        for name, x in kept.items():
            setattr(net, name, x.double())
        return net

    return ZooNet("GraphCast", "nvidia-physicsnemo", build, [image(1, 4, 9, 18)])


def _mesh_graph_net(name: str, **kwargs: Any) -> ZooNet:
    """A net of a mesh whose nodes are cut; its edges, and what is known of them, are whole or cut."""

    def build() -> nn.Module:
        net = importlib.import_module("physicsnemo.models.meshgraphnet").MeshGraphNet
        hidden = {f"hidden_dim_{part}": 8 for part in ("processor", "node_encoder", "edge_encoder", "node_decoder")}
        return net(CHANNELS, 3, 2, processor_size=2, **hidden, **kwargs)

    kept = _edges()

    def call(model: nn.Module, nodes: Tensor, edges: Tensor) -> Any:
        graph = importlib.import_module("torch_geometric.data").Data(edge_index=kept, num_nodes=NODES)
        return model(nodes, edges, graph)

    inputs = [ZooInput((NODES, CHANNELS), (CELLS, None)), ZooInput((EDGES, 3), (CELLS, None))]
    return ZooNet(name, "nvidia-physicsnemo", build, inputs, call=call)


SCATTER_NETS = (
    _graph_cast(),
    _mesh_graph_net("MeshGraphNet"),
    _mesh_graph_net("MeshGraphNet (mean)", aggregation="mean", do_concat_trick=True),
)


FACES = (None, CELLS, None, None, None, None)
IN_FACES = (None, None, None, None, "lat", "lon")


def _healpix_unet(name: str, spec: Any, is_recurrent: bool = False) -> ZooNet:
    """A net of DLWP on twelve faces, cut along the faces or within each of them."""

    def build() -> nn.Module:
        models = importlib.import_module("physicsnemo.models.dlwp_healpix")
        layers = "physicsnemo.models.dlwp_healpix.layers"
        gelu = {"_target_": "physicsnemo.nn.CappedGELU", "cap_value": 10}
        conv = {"_target_": f"{layers}.ConvNeXtBlock", "kernel_size": 3, "activation": gelu}
        recurrent = {"_target_": f"{layers}.ConvGRUBlock", "kernel_size": 1}
        up = {"_target_": f"{layers}.TransposedConvUpsample", "upsampling": 2, "activation": gelu}
        sizes = {"n_layers": [1, 1], "dilations": [1, 1]}
        down = {"_target_": "physicsnemo.nn.HEALPixAvgPool"}
        encoder = {"conv_block": conv, "down_sampling_block": down, "n_channels": [8, 4], **sizes}
        decoder = {
            "conv_block": conv,
            "up_sampling_block": up,
            "output_layer": {"_target_": f"{layers}.BasicConvBlock", "kernel_size": 1, "n_layers": 1},
            "recurrent_block": recurrent if is_recurrent else None,
            "n_channels": [4, 8],
            **sizes,
        }
        return (models.HEALPixRecUNet if is_recurrent else models.HEALPixUNet)(
            encoder={"_target_": f"{layers}.UNetEncoder", "_recursive_": False, **encoder},
            decoder={"_target_": f"{layers}.UNetDecoder", "_recursive_": False, **decoder},
            input_channels=3,
            output_channels=3,
            n_constants=1,
            decoder_input_channels=1,
            input_time_dim=2,
            output_time_dim=2,
            presteps=int(is_recurrent),
        )

    steps = 4 if is_recurrent else 2
    fields = [ZooInput((1, 12, steps, channels, 8, 8), spec) for channels in (3, 1)]
    inputs = [*fields, ZooInput((12, 1, 8, 8), (spec[1], *spec[3:]))]
    return ZooNet(name, "nvidia-physicsnemo", build, inputs, call=lambda model, *fields: model(fields))


HEALPIX_NETS = (
    _healpix_unet("HEALPixUNet (faces)", FACES),
    _healpix_unet("HEALPixUNet (rows of faces)", IN_FACES),
    _healpix_unet("HEALPixRecUNet (faces)", FACES, is_recurrent=True),
)


class _LimitedArea:
    """What neural-lam's nets ask of a data store: names, sizes, statistics, and a folder with graphs."""

    num_grid_points = NODES

    def __init__(self, root: Path) -> None:
        self.root_path = root

    def get_vars_names(self, category: str) -> list[str]:
        return {"state": ["t", "q", "z"], "forcing": ["toa"]}.get(category, [])

    def get_num_data_vars(self, category: str) -> int:
        return len(self.get_vars_names(category))

    def get_dataarray(self, category: str, split: str | None, standardize: bool = False) -> None:
        return None  # no static fields

    def get_standardization_dataarray(self, category: str) -> Any:
        import xarray

        values = {"mean": 0.0, "std": 1.0, "diff_mean_standardized": 0.1, "diff_std_standardized": 0.5}
        return xarray.Dataset({f"{category}_{name}": ("feature", [value] * 3) for name, value in values.items()})

    def get_xy_extent(self, category: str) -> list[float]:
        return [0.0, 1.0, 0.0, 1.0]


def _neural_lam(name: str, net: str, levels: int, **kwargs: Any) -> ZooNet:
    sizes = [MESH_NODES, 11][:levels]

    def build() -> nn.Module:
        predictors = importlib.import_module("neural_lam.models")
        draw = torch.Generator().manual_seed(2)

        def features(n: int, width: int) -> Tensor:
            return torch.rand(n, width, generator=draw)

        graph: dict[str, Any] = {"mesh_features": [features(n, 2) for n in sizes]}
        pairs = {"g2m": [(NODES, sizes[0])], "m2g": [(sizes[0], NODES)], "m2m": [(n, n) for n in sizes]}
        if levels > 1:
            pairs |= {"mesh_up": [(sizes[0], sizes[1])], "mesh_down": [(sizes[1], sizes[0])]}
        for part, ends in pairs.items():
            edges = [_edges(source + 3, target + 3) for source, target in ends]  # each target has to have edges
            for one, (_, target) in zip(edges, ends, strict=True):
                one[1, 20 : 20 + target] = torch.arange(target)
            widths = [features(EDGES, 3) for _ in ends]
            is_list = part not in ("g2m", "m2g")
            graph |= {f"{part}_edge_index": edges if is_list else edges[0]}
            graph |= {f"{part}_features": widths if is_list else widths[0]}
        with tempfile.TemporaryDirectory() as root:
            folder = Path(root) / "graph" / "mesh"
            folder.mkdir(parents=True)
            (folder / "metainfo.yaml").write_text("spec_version: 0.1.0\n")
            for file, values in graph.items():
                torch.save(values, folder / f"{file}.pt")
            sizes_of_net = {"hidden_dim": 8, "processor_layers": 2}
            return getattr(predictors, net)(_LimitedArea(Path(root)), graph_name="mesh", **sizes_of_net, **kwargs)

    spec = (None, CELLS, None)
    inputs = [ZooInput((2, NODES, channels), spec) for channels in (3, 3, 3)]
    return ZooNet(name, "neural-lam", build, inputs)


NEURAL_LAM_NETS = (
    _neural_lam("GraphLAM", "GraphLAM", 1, output_std=True, output_clamping_lower={"q": 0.0}),
    _neural_lam("GraphLAM (propagation)", "GraphLAM", 1, g2m_gnn_type="PropagationNet", mesh_aggr="mean"),
    _neural_lam("HiLAM", "HiLAM", 2),
)

GRAPH_NETS = (*GEOMETRIC_NETS, *ANEMOI_NETS, *HEALPIX_NETS, *TRANSOLVERS, *SCATTER_NETS, *NEURAL_LAM_NETS)
