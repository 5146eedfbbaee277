"""Nets of transformers and diffusers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from zoo_net import ZooInput, ZooNet, image, whole

FRAME = image(1, 3, 96, 64)


def _hf(name: str, model: str, config: str, given: ZooInput = FRAME, **kwargs: Any) -> ZooNet:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**kwargs))

    def call(net: nn.Module, x: Any) -> Any:
        output = net(pixel_values=x)
        return {
            k: v for k, v in output.items() if k in ("logits", "last_hidden_state", "pooler_output", "predicted_depth")
        }

    return ZooNet(name, "transformers", build, [given], call=call)


ATTENTION = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
TRANSFORMERS_NETS = [
    _hf(
        "Segformer",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        depths=[1, 1, 1, 1],
        hidden_sizes=[8, 8, 16, 16],
        num_attention_heads=[1, 1, 2, 2],
        decoder_hidden_size=16,
        num_labels=3,
    ),
    _hf(
        "Swin",
        "SwinModel",
        "SwinConfig",
        image_size=(96, 64),
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
    ),
    _hf(
        "Swinv2",
        "Swinv2Model",
        "Swinv2Config",
        image_size=(96, 64),
        patch_size=4,
        embed_dim=8,
        depths=[2, 2],
        num_heads=[2, 2],
        window_size=4,
    ),
    _hf("ConvNext", "ConvNextModel", "ConvNextConfig", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1]),
    _hf("ConvNextV2", "ConvNextV2Model", "ConvNextV2Config", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1]),
    _hf(
        "Dinov2",
        "Dinov2Model",
        "Dinov2Config",
        image(1, 3, 64, 64),
        image_size=64,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        mlp_ratio=2,
    ),
    _hf(
        "Hiera",
        "HieraModel",
        "HieraConfig",
        image(1, 3, 64, 64),
        image_size=[64, 64],
        embed_dim=8,
        depths=[1, 1],
        num_heads=[1, 2],
        masked_unit_size=[4, 4],
        query_stride=[2, 2],
        num_query_pool=1,
    ),
    _hf("ViT", "ViTModel", "ViTConfig", image(1, 3, 64, 64), image_size=64, patch_size=8, **ATTENTION),
    _hf(
        "Pvt",
        "PvtV2Model",
        "PvtV2Config",
        hidden_sizes=[8, 8, 16, 16],
        depths=[1, 1, 1, 1],
        num_attention_heads=[1, 1, 2, 2],
    ),
    _hf(
        "ResNet",
        "ResNetModel",
        "ResNetConfig",
        embedding_size=8,
        hidden_sizes=[8, 16],
        depths=[1, 1],
        layer_type="basic",
    ),
    _hf("PoolFormer", "PoolFormerModel", "PoolFormerConfig", hidden_sizes=[8, 8, 16, 16], depths=[1, 1, 1, 1]),
    _hf(
        "DPT",
        "DPTForDepthEstimation",
        "DPTConfig",
        image(1, 3, 64, 64),
        image_size=64,
        patch_size=8,
        backbone_out_indices=[0, 1, 2, 3],
        neck_hidden_sizes=[8, 8, 16, 16],
        fusion_hidden_size=16,
        **ATTENTION | {"num_hidden_layers": 4},
    ),
    _hf(
        "Focalnet",
        "FocalNetModel",
        "FocalNetConfig",
        image_size=96,
        embed_dim=8,
        depths=[1, 1],
        hidden_sizes=[8, 16],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
    ),
]


def _diffusers(name: str, given: list[ZooInput], call: Any, model: str = "", **kwargs: Any) -> ZooNet:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, model or name)(**kwargs)

    return ZooNet(name, "diffusers", build, given, call=call)


def _at_time(net: nn.Module, x: Any) -> Any:
    return net(x, torch.tensor([5])).sample


UNET = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4}
DIFFUSERS_NETS = [
    _diffusers(
        "UNet2DModel",
        [image(1, 3, 36, 24)],
        _at_time,
        in_channels=3,
        out_channels=3,
        attention_head_dim=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        **UNET,
    ),
    _diffusers(
        "UNet2DConditionModel",
        [image(1, 4, 36, 24), whole(1, 5, 8)],
        lambda net, x, text: net(x, torch.tensor([5]), text).sample,
        cross_attention_dim=8,
        attention_head_dim=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        **UNET,
    ),
    _diffusers(
        "AutoencoderKL",
        [image(1, 3, 36, 24)],
        lambda net, x: net(x).sample,
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        **UNET,
    ),
    _diffusers(
        "VQModel",
        [image(1, 3, 36, 24)],
        lambda net, x: net.decoder(net.post_quant_conv(net.encode(x).latents)),
        down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
        up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
        **UNET,
    ),
    _diffusers(
        "DiTTransformer2DModel",
        [image(1, 4, 24, 24)],
        lambda net, x: net(x, timestep=torch.tensor([5]), class_labels=torch.tensor([1])).sample,
        num_attention_heads=2,
        attention_head_dim=4,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        sample_size=24,
        norm_num_groups=4,
        num_embeds_ada_norm=10,
    ),
]

HUB_NETS = [*TRANSFORMERS_NETS, *DIFFUSERS_NETS]
