"""Nets of neuraloperator, torch-harmonics, microsoft-aurora, PhysicsNeMo, The Well and CREDIT."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import torch
from torch import Tensor, nn
from zoo_net import ZooInput, ZooNet, image, make, whole

GLOBE = image(1, 3, 24, 48)


def _neural(name: str, net: str = "", given: ZooInput = GLOBE, **kwargs: Any) -> ZooNet:
    return ZooNet(
        name,
        "neuraloperator",
        make(f"neuralop.models.{net}" if ":" in net else f"neuralop.models:{net or name}", **kwargs),
        [given],
        casts=True,
    )


FOURIER = {"in_channels": 3, "out_channels": 2, "hidden_channels": 8}
MODES = {"n_modes": (6, 6), "n_layers": 2}


def _uqno() -> nn.Module:
    from neuralop.models import FNO, UQNO

    return UQNO(FNO(**FOURIER, **MODES), FNO(**FOURIER, **MODES))


NEURALOP_NETS = [
    _neural("FNO", **FOURIER, **MODES),
    _neural("FNO uneven", "FNO", image(1, 3, 25, 37), norm="instance_norm", **FOURIER, **MODES),
    _neural("FNO padded", "FNO", domain_padding=0.25, **FOURIER, **MODES),
    _neural("TFNO", factorization="tucker", rank=0.5, **FOURIER, **MODES),
    _neural(
        "UNO",
        uno_out_channels=[8, 8, 8],
        uno_n_modes=[[6, 6]] * 3,
        uno_scalings=[[1, 1], [0.5, 0.5], [2, 2]],
        n_layers=3,
        channel_mlp_skip="linear",
        lifting_channels=16,
        projection_channels=16,
        **FOURIER,
    ),
    ZooNet("UQNO", "neuraloperator", _uqno, [GLOBE]),
    _neural(
        "CODANO",
        given=image(1, 3, 24, 24),
        n_layers=2,
        n_modes=[[4, 4]] * 2,
        hidden_variable_codimension=4,
        lifting_channels=4,
        projection_channels=4,
        n_heads=[1, 1],
        attention_scaling_factors=[1, 1],
        per_layer_scaling_factors=[[1, 1], [1, 1]],
    ),
]


class Transforms(nn.Module):
    """A filter of spherical coefficients, with a weight each."""

    def __init__(self, vector: bool = False) -> None:
        import torch_harmonics as th

        super().__init__()
        kinds = (th.RealVectorSHT, th.InverseRealVectorSHT) if vector else (th.RealSHT, th.InverseRealSHT)
        self.forth, self.back = kinds[0](24, 48, grid="equiangular"), kinds[1](24, 48, grid="equiangular")
        self.weight = nn.Parameter(torch.ones(self.forth.lmax, self.forth.mmax))

    def forward(self, x: Tensor) -> Tensor:
        return self.back(self.forth(x) * self.weight)


def _sphere(name: str, place: str, **kwargs: Any) -> ZooNet:
    size = {"img_size": (24, 48), "scale_factor": 2, "in_chans": 3, "out_chans": 2}
    build = make(f"torch_harmonics.examples.models.{place}", **size, **kwargs)
    return ZooNet(name, "torch-harmonics", build, [GLOBE], dtype=torch.float32)


HARMONICS_NETS = [
    ZooNet("RealSHT", "torch-harmonics", Transforms, [GLOBE]),
    ZooNet("RealVectorSHT", "torch-harmonics", lambda: Transforms(vector=True), [image(1, 2, 24, 48)]),
    _sphere("SFNO", "sfno:SphericalFourierNeuralOperator", embed_dim=8, num_layers=2),
    _sphere(
        "SFNO instance norm",
        "sfno:SphericalFourierNeuralOperator",
        embed_dim=8,
        num_layers=2,
        normalization_layer="instance_norm",
        pos_embed="learnable lat",
    ),
    _sphere("LSNO", "lsno:LocalSphericalNeuralOperator", embed_dim=8, num_layers=2),
    _sphere(
        "S2UNet",
        "s2unet:SphericalUNet",
        embed_dims=[8, 8],
        depths=[1, 1],
        drop_conv_rate=0.0,
        drop_path_rate=0.0,
        drop_dense_rate=0.0,
    ),
    _sphere("S2Transformer", "s2transformer:SphericalTransformer", embed_dim=8, num_layers=2, attention_mode="global"),
    _sphere(
        "S2Transformer neighborhood",
        "s2transformer:SphericalTransformer",
        embed_dim=8,
        num_layers=2,
        num_heads=2,
        attention_mode="neighborhood",
    ),
    _sphere(
        "S2Segformer",
        "s2segformer:SphericalSegformer",
        embed_dims=[8, 8],
        depths=[1, 1],
        heads=[1, 1],
        drop_path_rate=0.0,
        attention_mode="global",
    ),
    _sphere(
        "S2Segformer neighborhood",
        "s2segformer:SphericalSegformer",
        embed_dims=[8, 8],
        depths=[1, 1],
        heads=[2, 2],
        drop_path_rate=0.0,
        attention_mode="neighborhood",
    ),
]


def _aurora() -> nn.Module:
    from aurora import Aurora

    return Aurora(
        surf_vars=("2t", "msl"), static_vars=("lsm", "z"), atmos_vars=("t", "q"), window_size=(2, 2, 4),
        encoder_depths=(1, 1), encoder_num_heads=(2, 2), decoder_depths=(1, 1), decoder_num_heads=(2, 2),
        embed_dim=16, num_heads=2, latent_levels=4, patch_size=2, use_lora=False,
    )  # fmt: skip


def _forecast(model: nn.Module, surface: Any, static: Any, air: Any, rows: int) -> Any:
    """A forecast as aurora's users make it: variables by name in a `Batch`."""
    from aurora import Batch, Metadata

    batch = Batch(
        surf_vars={"2t": surface[:, :, 0], "msl": surface[:, :, 1]},
        static_vars={"lsm": static[0], "z": static[1]},
        atmos_vars={"t": air[:, :, 0], "q": air[:, :, 1]},
        metadata=Metadata(
            lat=torch.linspace(90, -90, rows + 1)[:rows],
            lon=torch.linspace(0, 360, 33)[:-1],
            time=(datetime(2020, 6, 1, 12, 0),),
            atmos_levels=(100, 500),
        ),
    )
    found = model(batch)
    return {"surface": found.surf_vars, "air": found.atmos_vars}


def _aurora_net(name: str, rows: int) -> ZooNet:
    return ZooNet(
        name,
        "microsoft-aurora",
        _aurora,
        [
            ZooInput((1, 2, 2, rows, 32), (None, None, None, "lat", "lon")),
            ZooInput((2, rows, 32), (None, "lat", "lon")),
            ZooInput((1, 2, 2, 2, rows, 32), (None, None, None, None, "lat", "lon")),
        ],
        call=lambda model, surface, static, air: _forecast(model, surface, static, air, rows),
        dtype=torch.float32,
    )


def _nemo(name: str, place: str, given: list[ZooInput], call: Any = None, **kwargs: Any) -> ZooNet:
    dtype = kwargs.pop("dtype", torch.float64)
    build = make(f"physicsnemo.models.{place}", **kwargs)
    return ZooNet(name, "nvidia-physicsnemo", build, given, call=call, dtype=dtype)


CUBE = (None, None, None, "lat", "lon")
NEMO_NETS = [
    _nemo(
        "AFNO",
        "afno:AFNO",
        [image(1, 3, 24, 48)],
        inp_shape=[24, 48],
        in_channels=3,
        out_channels=2,
        patch_size=[4, 4],
        embed_dim=16,
        depth=2,
        num_blocks=2,
        dtype=torch.float32,
    ),
    _nemo(
        "Pangu",
        "pangu:Pangu",
        [image(1, 7, 24, 48), ZooInput((1, 5, 13, 24, 48), CUBE)],
        lambda net, surface, air: net(net.prepare_input(surface[:, :4], surface[:, 4:], air)),
        img_size=(24, 48),
        patch_size=(2, 4, 4),
        embed_dim=8,
        num_heads=(2, 2, 2, 2),
        window_size=(2, 3, 6),
    ),
    _nemo(
        "Fengwu",
        "fengwu:Fengwu",
        [image(1, 4 + 5 * 4, 24, 48)],
        lambda net, x: net(x),
        img_size=(24, 48),
        pressure_level=4,
        embed_dim=8,
        num_heads=(2, 2, 2, 2),
        window_size=(2, 3, 6),
    ),
    _nemo(
        "DLWP",
        "dlwp:DLWP",
        [ZooInput((1, 3, 6, 16, 16), CUBE)],
        nr_input_channels=3,
        nr_output_channels=2,
        nr_initial_channels=4,
        depth=2,
    ),
    _nemo(
        "FNO",
        "fno:FNO",
        [GLOBE],
        in_channels=3,
        out_channels=2,
        latent_channels=8,
        num_fno_layers=2,
        num_fno_modes=6,
        padding=4,
    ),
    _nemo(
        "SongUNet",
        "diffusion_unets:SongUNet",
        [image(1, 3, 32, 32), whole(1), whole(1, 0)],
        lambda net, x, noise, _: net(x, noise, None),
        img_resolution=32,
        in_channels=3,
        out_channels=2,
        model_channels=8,
        channel_mult=[1, 2],
        num_blocks=1,
        attn_resolutions=[16],
        dropout=0.0,
    ),
    _nemo(
        "DhariwalUNet",
        "diffusion_unets:DhariwalUNet",
        [image(1, 3, 32, 32), whole(1)],
        lambda net, x, noise: net(x, noise, None),
        img_resolution=32,
        in_channels=3,
        out_channels=2,
        model_channels=64,
        channel_mult=[1, 1],
        num_blocks=1,
        attn_resolutions=[16],
        dropout=0.0,
    ),
    _nemo(
        "UNet",
        "unet:UNet",
        [ZooInput((1, 1, 24, 16, 8), (None, None, "lat", "lon", None))],
        in_channels=1,
        out_channels=2,
        model_depth=2,
        feature_map_channels=[8, 8, 8, 8],
        num_conv_blocks=2,
        gradient_checkpointing=False,
        normalization_args={"num_groups": 4},
    ),
    _nemo(
        "UNet checkpointed",
        "unet:UNet",
        [ZooInput((1, 1, 24, 16, 8), (None, None, "lat", "lon", None))],
        in_channels=1,
        out_channels=2,
        model_depth=2,
        feature_map_channels=[8, 8, 8, 8],
        num_conv_blocks=2,
        normalization_args={"num_groups": 4},
    ),
    _nemo(
        "DPOT",
        "dpot:DPOTNet",
        [ZooInput((1, 24, 24, 2, 3), (None, "lat", "lon", None, None))],
        inp_shape=24,
        patch_size=4,
        in_channels=3,
        out_channels=2,
        in_timesteps=2,
        num_blocks=2,
        embed_dim=16,
        out_layer_dim=8,
        depth=2,
        modes=3,
        dtype=torch.float32,
    ),
    _nemo(
        "SRResNet",
        "srrn:SRResNet",
        [ZooInput((1, 2, 12, 10, 4), (None, None, "lat", "lon", None))],
        in_channels=2,
        out_channels=2,
        conv_layer_size=8,
        n_resid_blocks=1,
        scaling_factor=2,
    ),
    _nemo(
        "Pix2Pix",
        "pix2pix:Pix2Pix",
        [image(1, 2, 24, 32)],
        in_channels=2,
        out_channels=2,
        dimension=2,
        conv_layer_size=8,
        n_downsampling=2,
        n_upsampling=2,
        n_blocks=1,
    ),
    _nemo(
        "Pix2PixUnet",
        "pix2pix:Pix2PixUnet",
        [image(2, 2, 96, 64)],
        in_channels=2,
        out_channels=2,
        n_downsampling=5,
        filter_size=4,
    ),
]


def _well(name: str, shape: tuple[int, ...], *, channels_last: bool = False, net: str = "", **kwargs: Any) -> ZooNet:
    """A baseline of The Well, on `shape` of space; its FNO and TFNO need a neuraloperator before 2.0."""
    sizes = (1, *shape, 3) if channels_last else (1, 3, *shape)
    space = ("lat", "lon", None)[: len(shape)]
    spec = (None, *space, None) if channels_last else (None, None, *space)
    build = make(f"the_well.benchmark.models:{net or name}", 3, 2, len(shape), shape, **kwargs)
    return ZooNet(name, "the_well", build, [ZooInput(sizes, spec)], casts=name == "AFNO")


_WELL_VIT = {"hidden_dim": 48, "num_heads": 4, "processor_blocks": 2}

WELL_NETS = [
    _well("UNetClassic", (48, 64), init_features=4),
    _well("UNetClassic 3d", (48, 32, 16), net="UNetClassic", init_features=4, gradient_checkpointing=True),
    _well("UNetConvNext", (48, 64), init_features=4),
    _well("UNetConvNext 3d", (48, 32, 16), net="UNetConvNext", init_features=4, gradient_checkpointing=True),
    _well("DilatedResNet", (25, 36), hidden_dim=8, blocks=2),
    _well("AViT", (64, 96), channels_last=True, **_WELL_VIT),
    _well("AViT 3d", (64, 48, 32), net="AViT", channels_last=True, **_WELL_VIT),
    _well("AFNO", (48, 64), channels_last=True, hidden_dim=16, n_blocks=2),
    _well("ReFNO", (24, 32), channels_last=True, hidden_dim=8, blocks=2),
]

STATE = {"channels": 2, "levels": 2, "surface_channels": 1, "input_only_channels": 1, "output_only_channels": 1}
CROSS = {
    "dim": (16, 32, 64, 128),
    "depth": (1, 1, 1, 1),
    "dim_head": 8,
    "local_window_size": 2,
    "global_window_size": (4, 2, 2, 1),
    "cross_embed_kernel_sizes": ((4, 8), (2, 4), (2, 4), (2, 4)),
    "cross_embed_strides": (2, 2, 2, 2),
}
EARTH = {"activate": True, "mode": "earth", "pad_lat": [5, 6], "pad_lon": [12, 12]}


def _credit(name: str, place: str, size: tuple[int, int] = (32, 64), frames: int = 2, **kwargs: Any) -> ZooNet:
    cube = ZooInput((1, 6, frames, *size), CUBE)
    sizes = {"image_height": size[0], "image_width": size[1], "frames": frames}
    build = make(f"credit.models.{place}", **sizes, **STATE, **kwargs)
    return ZooNet(name, "miles-credit", build, [cube], casts=True)


CREDIT_NETS = [
    _credit("WXFormer", "wxformer.crossformer:CrossFormer", **CROSS),
    _credit(
        "WXFormer 37 rows",
        "wxformer.crossformer:CrossFormer",
        (37, 72),
        padding_conf=EARTH,
        **{**CROSS, "local_window_size": 3},
    ),
    _credit("WXFormer next", "wxformer.wxformer_next:NextGenWXFormer", num_spectral_nodes=4, col_attn_heads=2, **CROSS),
    _credit("CrossFormer", "crossformer:CrossFormer", frames=1, **CROSS),
    _credit("CAMulator", "camulator:Camulator", **CROSS),
    _credit(
        "FuXi", "fuxi:Fuxi", patch_height=4, patch_width=4, dim=16, num_groups=4, num_heads=2, depth=2, window_size=4
    ),
    _credit(
        "Swin V2",
        "swin:SwinTransformerV2Cr",
        frames=1,
        img_size=(32, 64),
        patch_size=2,
        window_size=4,
        embed_dim=16,
        depths=(2, 2),
        num_heads=(2, 2),
    ),
    _credit("WXFormer ensemble", "wxformer.crossformer_ensemble:CrossFormerWithNoise", frames=1, freeze=False, **CROSS),
]

WEATHER_NETS = [
    *NEURALOP_NETS,
    *HARMONICS_NETS,
    _aurora_net("Aurora", 16),
    _aurora_net("Aurora 17 rows", 17),
    *NEMO_NETS,
    *WELL_NETS,
    *CREDIT_NETS,
]
