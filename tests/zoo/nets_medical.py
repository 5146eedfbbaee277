"""Nets of MONAI and nnU-Net, and MONAI's losses."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from zoo_net import ZooInput, ZooNet, image, labels, make, volume, whole

NETS = "monai.networks.nets:"
SMALL = (4, 4, 8, 8, 8, 4)


def _monai(name: str, given: ZooInput | list[ZooInput], net: str = "", **kwargs: Any) -> ZooNet:
    inputs = given if isinstance(given, list) else [given]
    call, casts = kwargs.pop("call", None), kwargs.pop("casts", False)
    place = net if ":" in net else NETS + (net or name)
    return ZooNet(name, "monai", make(place, **kwargs), inputs, call=call, casts=casts)


def _loss(name: str, casts: bool = False, **kwargs: Any) -> ZooNet:
    """A small net that is trained with one of MONAI's losses on labels."""

    def loss_class() -> type[nn.Module]:
        import monai.losses

        return getattr(monai.losses, name)

    def build() -> nn.Module:
        loss_class()  # its package is imported here, before the net's time begins
        return nn.Sequential(nn.Conv3d(1, 4, 3, padding=1), nn.GELU(), nn.Conv3d(4, 3, 1))

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return loss_class()(to_onehot_y=True, **kwargs)(y, target)

    shape = (2, 1, 13, 10, 6)
    return ZooNet(name, "monai", build, [volume(*shape)], loss=loss, targets=[labels(3, *shape)], casts=casts)


def _voxelmorph() -> nn.Module:
    from monai.networks.nets import VoxelMorph, VoxelMorphUNet

    unet = VoxelMorphUNet(
        spatial_dims=3, in_channels=2, unet_out_channels=4, channels=(4, 4, 4, 4), final_conv_channels=(4, 4)
    )
    return VoxelMorph(unet, integration_steps=3, half_res=True, spatial_dims=3)


def _nnunet(name: str, place: str, size: ZooInput, dims: int, **kwargs: Any) -> ZooNet:
    def build() -> nn.Module:
        conv, norm = (nn.Conv3d, nn.InstanceNorm3d) if dims == 3 else (nn.Conv2d, nn.InstanceNorm2d)
        return make(
            f"dynamic_network_architectures.architectures.unet:{place}",
            input_channels=1,
            n_stages=3,
            features_per_stage=[4, 8, 8],
            conv_op=conv,
            kernel_sizes=3,
            strides=[1, 2, 2],
            num_classes=2,
            n_conv_per_stage_decoder=[1, 1],
            conv_bias=True,
            norm_op=norm,
            norm_op_kwargs={"eps": 1e-5, "affine": True},
            nonlin=nn.LeakyReLU,
            nonlin_kwargs={"inplace": True},
            **kwargs,
        )()

    return ZooNet(name, "dynamic-network-architectures", build, [size])


MEDICAL_NETS = [
    _monai(
        "UNet",
        volume(2, 1, 24, 16, 8),
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=(4, 8, 8),
        strides=(2, 2),
        num_res_units=2,
    ),
    _monai(
        "UNet 2d batch norm",
        image(2, 1, 36, 28),
        "UNet",
        spatial_dims=2,
        in_channels=1,
        out_channels=2,
        channels=(4, 8, 8),
        strides=(2, 2),
        norm="batch",
    ),
    _monai("BasicUNet", volume(1, 1, 37, 32, 16), spatial_dims=3, features=SMALL),
    _monai("BasicUNet 2d", image(2, 1, 37, 32), "BasicUNet", spatial_dims=2, features=SMALL, upsample="nontrainable"),
    _monai("BasicUNetPlusPlus", volume(1, 1, 32, 32, 16), spatial_dims=3, features=SMALL),
    _monai(
        "AttentionUnet",
        volume(2, 1, 24, 16, 8),
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        channels=(4, 8, 8),
        strides=(2, 2),
    ),
    _monai(
        "SegResNet",
        volume(1, 1, 24, 16, 8),
        init_filters=8,
        blocks_down=(1, 1, 1),
        blocks_up=(1, 1),
        out_channels=2,
    ),
    _monai(
        "SegResNetVAE",
        volume(1, 1, 24, 16, 8),
        init_filters=8,
        blocks_down=(1, 1, 1),
        blocks_up=(1, 1),
        input_image_size=(24, 16, 8),
        vae_nz=4,
    ),
    _monai(
        "SegResNetDS",
        volume(1, 1, 24, 16, 8),
        init_filters=8,
        blocks_down=(1, 1, 1),
        dsdepth=2,
    ),
    _monai(
        "DynUNet",
        volume(2, 1, 24, 16, 8),
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[4, 8, 8],
        res_block=True,
    ),
    _monai(
        "DynUNet deep supervision",
        volume(2, 1, 32, 16, 8),
        "DynUNet",
        spatial_dims=3,
        in_channels=1,
        out_channels=2,
        kernel_size=[3, 3, 3, 3],
        strides=[1, 2, 2, 2],
        upsample_kernel_size=[2, 2, 2],
        filters=[4, 8, 8, 8],
        deep_supervision=True,
    ),
    _monai(
        "VNet",
        image(1, 1, 32, 32),
        spatial_dims=2,
        dropout_dim=2,
        act=("elu", {"inplace": False}),
        dropout_prob_down=None,
        dropout_prob_up=(None, 0.0),
    ),
    _monai(
        "UNETR",
        volume(1, 1, 32, 32, 16),
        in_channels=1,
        out_channels=2,
        img_size=(32, 32, 16),
        feature_size=4,
        hidden_size=12,
        mlp_dim=16,
        num_heads=2,
    ),
    _monai(
        "SwinUNETR",
        volume(1, 1, 64, 32, 32),
        in_channels=1,
        out_channels=2,
        feature_size=12,
        depths=(1, 1, 1, 1),
        num_heads=(1, 1, 2, 2),
        window_size=4,
    ),
    _monai(
        "SwinUNETR 2d",
        image(1, 1, 96, 64),
        "SwinUNETR",
        in_channels=1,
        out_channels=2,
        feature_size=12,
        depths=(2, 2, 2, 2),
        num_heads=(1, 1, 2, 2),
        window_size=4,
        spatial_dims=2,
    ),
    _monai(
        "MedNeXt",
        volume(1, 1, 48, 32, 16),
        init_filters=4,
        blocks_down=(1, 1, 1, 1),
        blocks_bottleneck=1,
        blocks_up=(1, 1, 1, 1),
        kernel_size=3,
        use_residual_connection=True,
        global_resp_norm=True,
    ),
    _monai(
        "MedNeXt 2d",
        image(1, 1, 36, 48),
        "MedNeXt",
        spatial_dims=2,
        init_filters=4,
        blocks_down=(1, 1),
        blocks_bottleneck=1,
        blocks_up=(1, 1),
        kernel_size=5,
    ),
    _monai(
        "DiffusionModelUNet",
        [image(1, 1, 24, 16), whole(1, classes=100)],
        spatial_dims=2,
        in_channels=1,
        out_channels=1,
        num_res_blocks=1,
        channels=(8, 8),
        attention_levels=(False, True),
        norm_num_groups=4,
        num_head_channels=4,
    ),
    _monai(
        "HighResNet",
        volume(1, 1, 21, 16, 8),
        out_channels=2,
        layer_params=[
            {"name": "conv_0", "n_features": 4, "kernel_size": 3},
            {"name": "res_1", "n_features": 4, "kernels": (3, 3), "repeat": 1},
            {"name": "res_2", "n_features": 8, "kernels": (3, 3), "repeat": 1},
            {"name": "conv_1", "n_features": 8, "kernel_size": 1},
            {"name": "conv_2", "kernel_size": 1},
        ],
    ),
    _monai(
        "RegUNet",
        volume(1, 1, 24, 16, 8),
        spatial_dims=3,
        in_channels=1,
        num_channel_initial=4,
        depth=2,
        out_channels=3,
    ),
    _monai(
        "ViT",
        volume(1, 1, 24, 16, 8),
        in_channels=1,
        img_size=(24, 16, 8),
        patch_size=4,
        hidden_size=12,
        mlp_dim=16,
        num_layers=2,
        num_heads=2,
        classification=False,
    ),
    _monai(
        "AutoencoderKL",
        image(1, 1, 24, 16),
        spatial_dims=2,
        num_res_blocks=1,
        channels=(8, 8),
        attention_levels=(False, True),
        norm_num_groups=4,
    ),
    _monai(
        "AutoencoderKlMaisi",
        volume(1, 1, 20, 12, 8),
        "monai.apps.generation.maisi.networks.autoencoderkl_maisi:AutoencoderKlMaisi",
        call=lambda net, x: net.decode(net.encode(x)[0]),
        casts=True,
        spatial_dims=3,
        in_channels=1,
        out_channels=1,
        num_res_blocks=(1, 1),
        num_channels=(8, 8),
        attention_levels=(False, False),
        norm_num_groups=4,
        num_splits=2,  # of its convolutions, along a dim that is cut
    ),
    _monai(
        "Restormer",
        image(1, 1, 32, 24),
        "monai.networks.nets.restormer:Restormer",
        in_channels=1,
        out_channels=1,
        dim=8,
        num_blocks=(1, 1),
        heads=(1, 2),
        num_refinement_blocks=1,
    ),
    _monai(
        "DenseNet",
        image(2, 1, 64, 48),
        spatial_dims=2,
        in_channels=1,
        out_channels=3,
        init_features=8,
        growth_rate=4,
        block_config=(2, 2),
        bn_size=2,
    ),
    _monai(
        "ResNet",
        volume(2, 1, 32, 32, 16),
        block="basic",
        layers=[1, 1, 1, 1],
        block_inplanes=[4, 8, 8, 8],
        n_input_channels=1,
        num_classes=3,
    ),
    ZooNet("VoxelMorph", "monai", _voxelmorph, [volume(1, 1, 32, 24, 16), volume(1, 1, 32, 24, 16)]),
    _monai(
        "GlobalNet",
        image(1, 2, 32, 32),
        casts=True,  # its reference grid
        image_size=[32, 32],
        spatial_dims=2,
        in_channels=2,
        num_channel_initial=4,
        depth=2,
    ),
    _monai(
        "LocalNet",
        image(1, 2, 32, 32),
        spatial_dims=2,
        in_channels=2,
        num_channel_initial=4,
        extract_levels=(0, 1, 2),
        out_channels=2,
    ),
    _monai(
        "ControlNet",
        [image(1, 1, 32, 16), whole(1, classes=100), image(1, 1, 64, 32)],
        spatial_dims=2,
        in_channels=1,
        num_res_blocks=(1, 1),
        channels=(8, 8),
        attention_levels=(False, True),
        norm_num_groups=4,
        num_head_channels=4,
        conditioning_embedding_in_channels=1,
        conditioning_embedding_num_channels=(4, 4),
    ),
    _monai(
        "SPADEAutoencoderKL",
        [image(1, 1, 24, 16), image(1, 3, 24, 16)],
        spatial_dims=2,
        label_nc=3,
        num_res_blocks=(1, 1),
        channels=(8, 8),
        attention_levels=(False, True),
        norm_num_groups=4,
        spade_intermediate_channels=4,
    ),
    _monai(
        "ViTAutoEnc",
        image(1, 1, 32, 32),
        in_channels=1,
        img_size=(32, 32),
        patch_size=(4, 4),
        hidden_size=12,
        mlp_dim=16,
        num_layers=2,
        num_heads=2,
        spatial_dims=2,
    ),
    _monai(
        "VarAutoEncoder",
        image(1, 1, 32, 24),
        spatial_dims=2,
        in_shape=(1, 32, 24),
        out_channels=1,
        latent_size=4,
        channels=(4, 8),
        strides=(2, 2),
    ),
    _nnunet("PlainConvUNet", "PlainConvUNet", volume(2, 1, 24, 16, 8), 3, n_conv_per_stage=1, deep_supervision=True),
    _nnunet("ResidualEncoderUNet", "ResidualEncoderUNet", volume(2, 1, 24, 16, 8), 3, n_blocks_per_stage=1),
    _nnunet("ResidualEncoderUNet 2d", "ResidualEncoderUNet", image(2, 1, 36, 28), 2, n_blocks_per_stage=1),
    _loss("DiceLoss", softmax=True),
    _loss("DiceCELoss", softmax=True),
    _loss("DiceFocalLoss", softmax=True, casts=True),
    _loss("FocalLoss", use_softmax=True, casts=True),
    _loss("TverskyLoss", softmax=True),
    _loss("GeneralizedDiceLoss", softmax=True),
]
