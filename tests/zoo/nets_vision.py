"""Nets of torchvision, timm and segmentation-models-pytorch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from zoo_net import ZooInput, ZooNet, image, make

TV = "torchvision.models."
PHOTO = image(2, 3, 96, 64)


def _tv(name: str, place: str, given: ZooInput = PHOTO, **kwargs: Any) -> ZooNet:
    return ZooNet(name, "torchvision", make(TV + place, **kwargs), [given])


def _resnet(bottleneck: bool = False) -> nn.Module:
    from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet

    if bottleneck:
        return ResNet(Bottleneck, [1, 1, 1, 1], num_classes=10, groups=2, width_per_group=8)
    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10)


def _efficientnet() -> nn.Module:
    from torchvision.models.efficientnet import EfficientNet, MBConvConfig

    stage = partial(MBConvConfig, width_mult=1.0, depth_mult=1.0)
    stages = [stage(1, 3, 1, 8, 8, 1), stage(4, 3, 2, 8, 16, 1), stage(4, 5, 2, 16, 16, 2)]
    return EfficientNet(stages, dropout=0.0, stochastic_depth_prob=0.0, num_classes=10, last_channel=32)


def _convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    return ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 2)], num_classes=10, layer_scale=0.5)


def _swin(v2: bool = False) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    second = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2} if v2 else {}
    return swin.SwinTransformer([4, 4], 8, [2, 2], [2, 2], [4, 4], num_classes=10, stochastic_depth_prob=0.0, **second)


def _regnet() -> nn.Module:
    from torchvision.models.regnet import BlockParams, RegNet

    return RegNet(BlockParams.from_init_params(4, 8, 8, 2.0, 4, se_ratio=0.25), num_classes=10, stem_width=8)


def _vgg() -> nn.Module:
    from torchvision.models.vgg import VGG, make_layers

    layers = [4, "M", 8, "M"]
    with torch.device("meta"):  # its own classifier has 120 million weights
        vgg = VGG(make_layers(layers, batch_norm=True), init_weights=False)
    vgg.features, vgg.classifier = make_layers(layers, batch_norm=True), nn.Linear(8 * 49, 10)
    return vgg


def _backbone() -> nn.Module:
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.models.resnet import Bottleneck, ResNet

    net = ResNet(Bottleneck, [1, 1, 1, 1], width_per_group=8, replace_stride_with_dilation=[False, True, True])
    return IntermediateLayerGetter(net, {"layer2": "aux", "layer3": "out"})


def _fcn() -> nn.Module:
    from torchvision.models.segmentation.fcn import FCN, FCNHead

    return FCN(_backbone(), FCNHead(1024, 4), FCNHead(512, 4))


def _deeplab() -> nn.Module:
    from torchvision.models.segmentation.deeplabv3 import DeepLabHead, DeepLabV3

    return DeepLabV3(_backbone(), DeepLabHead(1024, 4, (2, 4, 6)))


class FcosHeads(nn.Module):
    """The convolutions of FCOS: a ResNet with its pyramid, and the heads over all of its levels."""

    def __init__(self) -> None:
        super().__init__()
        from torchvision.models.detection.fcos import FCOSHead
        from torchvision.ops.feature_pyramid_network import FeaturePyramidNetwork, LastLevelP6P7

        self.body = _backbone()
        self.pyramid = FeaturePyramidNetwork([512, 1024], 32, LastLevelP6P7(32, 32))
        self.head = FCOSHead(32, 2, 3, num_convs=1)

    def forward(self, x: Any) -> Any:
        return self.head(list(self.pyramid(self.body(x)).values()))


TORCHVISION_NETS = [
    ZooNet("FCOS heads", "torchvision", FcosHeads, [image(2, 3, 60, 48)]),
    ZooNet("resnet", "torchvision", _resnet, [image(2, 3, 100, 68)]),
    ZooNet("resnext", "torchvision", partial(_resnet, bottleneck=True), [PHOTO]),
    _tv("densenet", "densenet:DenseNet", growth_rate=4, block_config=(2, 2), num_init_features=8, num_classes=10),
    ZooNet("efficientnet", "torchvision", _efficientnet, [PHOTO]),
    _tv("mobilenet_v2", "mobilenetv2:MobileNetV2", width_mult=0.25, num_classes=10),
    _tv("mobilenet_v3_small", "mobilenetv3:mobilenet_v3_small", num_classes=10),
    ZooNet("convnext", "torchvision", _convnext, [PHOTO]),
    ZooNet("swin", "torchvision", _swin, [image(1, 3, 96, 64)]),
    ZooNet("swin_v2", "torchvision", partial(_swin, v2=True), [image(1, 3, 88, 64)]),
    _tv(
        "vit",
        "vision_transformer:VisionTransformer",
        image(2, 3, 48, 48),
        image_size=48,
        patch_size=8,
        num_layers=2,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
        num_classes=10,
    ),
    _tv(
        "maxvit",
        "maxvit:MaxVit",
        image(1, 3, 112, 112),
        input_size=(112, 112),
        stem_channels=8,
        partition_size=7,
        block_channels=[8, 16],
        block_layers=[1, 1],
        head_dim=4,
        stochastic_depth_prob=0.0,
        num_classes=10,
    ),
    ZooNet("regnet", "torchvision", _regnet, [PHOTO]),
    ZooNet("vgg", "torchvision", _vgg, [image(2, 3, 56, 56)]),
    _tv(
        "shufflenet",
        "shufflenetv2:ShuffleNetV2",
        stages_repeats=[1, 1, 1],
        stages_out_channels=[8, 16, 16, 16, 32],
        num_classes=10,
    ),
    _tv("googlenet", "googlenet:GoogLeNet", aux_logits=False, num_classes=10, init_weights=False, dropout=0.0),
    _tv("squeezenet", "squeezenet:SqueezeNet", version="1_1", num_classes=10, dropout=0.0),
    _tv("mnasnet", "mnasnet:MNASNet", alpha=0.25, num_classes=10, dropout=0.0),
    ZooNet("fcn", "torchvision", _fcn, [image(2, 3, 60, 48)]),
    ZooNet("deeplabv3", "torchvision", _deeplab, [image(2, 3, 60, 48)]),
    _tv("lraspp", "segmentation:lraspp_mobilenet_v3_large", weights_backbone=None, num_classes=4),
    ZooNet(
        "raft_small",
        "torchvision",
        make(TV + "optical_flow:raft_small"),
        [image(1, 3, 128, 128), image(1, 3, 128, 128)],
        call=lambda m, a, b: m(a, b, num_flow_updates=2),
        dtype=torch.float32,
    ),
]


def _timm(name: str, kind: str, given: ZooInput = PHOTO, **kwargs: Any) -> ZooNet:
    return ZooNet(name, "timm", make("timm:create_model", kind, num_classes=10, **kwargs), [given])


def _mixer(residual: bool = False) -> nn.Module:
    from timm.models import mlp_mixer

    block = {"block_layer": mlp_mixer.ResBlock, "norm_layer": mlp_mixer.Affine, "mlp_ratio": 4} if residual else {}
    return mlp_mixer.MlpMixer(num_classes=10, img_size=64, patch_size=8, embed_dim=16, num_blocks=2, **block)


SQUARE = image(2, 3, 64, 64)
TIMM_NETS = [
    _timm("ConvNeXt", "convnext_atto", dims=(8, 8, 16, 16), depths=(1, 1, 1, 1), ls_init_value=0.5),
    _timm("ConvNeXtV2", "convnextv2_atto", dims=(8, 8, 16, 16), depths=(1, 1, 1, 1)),
    _timm(
        "Swin",
        "swin_tiny_patch4_window7_224",
        image(1, 3, 96, 64),
        img_size=(96, 64),
        window_size=4,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(2, 2),
    ),
    _timm(
        "Swin features",
        "swin_tiny_patch4_window7_224",
        image(1, 3, 96, 64),
        img_size=(96, 64),
        window_size=4,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(2, 2),
        global_pool="",
    ),
    _timm(
        "SwinV2",
        "swinv2_tiny_window8_256",
        image(1, 3, 96, 64),
        img_size=(96, 64),
        window_size=4,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(2, 2),
    ),
    _timm(
        "SwinV2 cr",
        "swinv2_cr_tiny_224",
        image(1, 3, 96, 64),
        img_size=(96, 64),
        window_size=(4, 4),
        embed_dim=8,
        depths=(2, 2),
        num_heads=(2, 2),
    ),
    _timm(
        "MaxViT",
        "maxvit_pico_rw_256",
        image(1, 3, 64, 64),
        img_size=64,
        embed_dim=(32, 32),
        depths=(1, 1),
        stem_width=8,
    ),
    _timm("CoAtNet", "coatnet_pico_rw_224", image(1, 3, 96, 96), img_size=96),
    _timm("ViT", "vit_tiny_patch16_224", SQUARE, img_size=64, patch_size=8, embed_dim=16, depth=2, num_heads=2),
    _timm(
        "ViT features",
        "vit_tiny_patch16_224",
        image(1, 3, 96, 64),
        img_size=(96, 64),
        patch_size=8,
        embed_dim=16,
        depth=2,
        num_heads=2,
        class_token=False,
        global_pool="avg",
    ),
    ZooNet("Mixer", "timm", _mixer, [SQUARE]),
    ZooNet("ResMLP", "timm", partial(_mixer, residual=True), [SQUARE]),
    _timm("HRNet", "hrnet_w18_small", image(1, 3, 96, 64)),
    _timm(
        "DaViT", "davit_tiny", image(1, 3, 96, 64), embed_dims=(8, 16), depths=(1, 1), num_heads=(2, 2), window_size=4
    ),
    _timm("XCiT", "xcit_nano_12_p8_224", image(1, 3, 64, 48), img_size=(64, 48), embed_dim=16, depth=2, num_heads=2),
    _timm(
        "PVTv2",
        "pvt_v2_b0",
        image(1, 3, 96, 64),
        depths=(1, 1, 1, 1),
        embed_dims=(8, 8, 16, 16),
        num_heads=(1, 1, 2, 2),
    ),
    _timm(
        "EdgeNeXt",
        "edgenext_xx_small",
        image(1, 3, 96, 64),
        dims=(8, 16, 16, 16),
        depths=(1, 1, 2, 2),
        heads=(2, 2, 2, 2),
    ),
    ZooNet(
        "PoolFormer",
        "timm",
        make("timm.models.metaformer:MetaFormer", num_classes=10, depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
        [image(1, 3, 96, 64)],
    ),
    _timm("MobileViT", "mobilevit_xxs", image(1, 3, 64, 64)),
    ZooNet(
        "FocalNet",
        "timm",
        make(
            "timm.models.focalnet:FocalNet",
            num_classes=10,
            depths=(1, 1),
            embed_dim=8,
            focal_levels=(2, 2),
            focal_windows=(3, 3),
        ),
        [image(1, 3, 96, 64)],
    ),
    _timm("InceptionNeXt", "inception_next_atto", image(1, 3, 96, 64), dims=(16, 16, 16, 16), depths=(1, 1, 1, 1)),
    _timm("RegNetY", "regnety_002", image(2, 3, 96, 64)),
    _timm("BEiT", "beit_base_patch16_224", SQUARE, img_size=64, patch_size=8, embed_dim=16, depth=2, num_heads=2),
    ZooNet(
        "VOLO",
        "timm",
        make(
            "timm.models.volo:VOLO",
            num_classes=10,
            img_size=96,
            layers=(1, 1, 1, 1),
            embed_dims=(16, 32, 32, 32),
            num_heads=(2, 2, 2, 2),
            stem_hidden_dim=8,
            use_mix_token=False,
        ),
        [image(2, 3, 96, 96)],
    ),
    ZooNet(
        "Sequencer2D",
        "timm",
        make(
            "timm.models.sequencer:Sequencer2d",
            num_classes=10,
            layers=(1, 1, 1, 1),
            embed_dims=(8, 16, 16, 16),
            hidden_sizes=(4, 8, 8, 8),
        ),
        [image(2, 3, 100, 68)],
    ),
    _timm(
        "TNT",
        "tnt_s_patch16_224",
        image(2, 3, 96, 64),
        img_size=(96, 64),
        embed_dim=16,
        inner_dim=8,
        depth=2,
        num_heads_inner=2,
        num_heads_outer=2,
    ),
    _timm(
        "LeViT",
        "levit_128s",
        image(2, 3, 96, 96),
        img_size=96,
        embed_dim=(16, 24, 32),
        key_dim=8,
        depth=(1, 1, 1),
        num_heads=(2, 3, 4),
    ),
    _timm(
        "Twins SVT",
        "twins_svt_small",
        image(2, 3, 96, 64),
        img_size=(96, 64),
        embed_dims=(8, 16, 16, 16),
        num_heads=(1, 2, 2, 2),
        depths=(1, 2, 2, 1),
        wss=(4, 4, 4, 4),
    ),
    _timm("CaiT", "cait_xxs24_224", SQUARE, img_size=64, patch_size=8, embed_dim=16, depth=2, num_heads=2),
]


def _smp(name: str, given: ZooInput = PHOTO, **kwargs: Any) -> ZooNet:
    place = f"segmentation_models_pytorch:{name}"
    encoder = {"encoder_name": "resnet18", "encoder_weights": None} | kwargs
    return ZooNet(name, "segmentation-models-pytorch", make(place, classes=3, **encoder), [given])


SMALL_DECODER = {"encoder_depth": 3, "decoder_channels": (16, 8, 8)}
SMP_NETS = [
    _smp("Unet", **SMALL_DECODER),
    _smp("UnetPlusPlus", **SMALL_DECODER),
    _smp("FPN", decoder_pyramid_channels=16, decoder_segmentation_channels=32, decoder_dropout=0.0),
    _smp("PSPNet", decoder_dropout=0.0, psp_out_channels=16),
    _smp("DeepLabV3", decoder_channels=16, decoder_atrous_rates=(2, 4, 6)),
    _smp("DeepLabV3Plus", decoder_channels=16, decoder_atrous_rates=(2, 4, 6)),
    _smp("Linknet", encoder_depth=3),
    _smp("MAnet", **SMALL_DECODER),
    _smp("PAN", image(2, 3, 128, 128), decoder_channels=16),
    _smp("UPerNet", decoder_channels=16),
    _smp("Segformer", decoder_segmentation_channels=16),
]

VISION_NETS = [*TORCHVISION_NETS, *TIMM_NETS, *SMP_NETS]
