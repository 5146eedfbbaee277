"""Nets of transformers and diffusers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from zoo_net import ZooInput, ZooNet, image, whole

FRAME = image(1, 3, 96, 64)


def _hf(name: str, model: str, config: str, given: ZooInput = FRAME, casts: bool = False, **kwargs: Any) -> ZooNet:
    def build() -> nn.Module:
        import transformers

        return getattr(transformers, model)(getattr(transformers, config)(**kwargs))

    def call(net: nn.Module, x: Any) -> Any:
        output = net(pixel_values=x)
        return {k: v for k, v in output.items() if k in _OUTPUTS}

    return ZooNet(name, "transformers", build, [given], call=call, casts=casts)


_OUTPUTS = {
    *("logits", "last_hidden_state", "pooler_output", "predicted_depth", "reconstruction"),
    *("class_queries_logits", "masks_queries_logits"),
}


def _on_backbone(name: str, model: str, config: str, backbone: str, given: ZooInput, **kwargs: Any) -> ZooNet:
    """A head of transformers on a backbone of its own; `kwargs` that begin with ``of_`` are the backbone's."""
    own = {k: v for k, v in kwargs.items() if not k.startswith("of_")}
    casts = own.pop("casts", False)
    of_backbone = {k.removeprefix("of_"): v for k, v in kwargs.items() if k.startswith("of_")}

    def build() -> nn.Module:
        import transformers

        inner = getattr(transformers, backbone)(**of_backbone)
        detr = {k: transformers.DetrConfig(**v) for k, v in own.items() if k == "decoder_config"}
        return getattr(transformers, model)(getattr(transformers, config)(backbone_config=inner, **own | detr))

    def call(net: nn.Module, x: Any) -> Any:
        return {k: v for k, v in net(pixel_values=x).items() if k in _OUTPUTS}

    return ZooNet(name, "transformers", build, [given], call=call, casts=casts)


ATTENTION = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "intermediate_size": 32}
NARROW = {"num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16, "mlp_ratio": 2}
DETR = {"layers": 1, "attention_heads": 2, "ffn_dim": 16}
STAGES = ["stage1", "stage2", "stage3", "stage4"]
SWIN = {
    "of_image_size": 64,
    "of_embed_dim": 8,
    "of_depths": [1, 1, 1, 1],
    "of_num_heads": [1, 1, 2, 2],
    "of_window_size": 4,
    "of_out_features": STAGES,
}
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
    _hf(
        "Dinov2 with registers",
        "Dinov2WithRegistersModel",
        "Dinov2WithRegistersConfig",
        image(1, 3, 70, 56),
        casts=True,  # the positions that it interpolates
        image_size=56,
        **NARROW,
    ),
    _hf(
        "BEiT",
        "BeitForSemanticSegmentation",
        "BeitConfig",
        image(2, 3, 64, 64),
        image_size=64,
        patch_size=8,
        out_indices=[1, 2, 3, 4],
        num_labels=3,
        use_auxiliary_head=False,
        use_relative_position_bias=True,
        **ATTENTION | {"num_hidden_layers": 4},
    ),
    _hf(
        "Swin2SR",
        "Swin2SRForImageSuperResolution",
        "Swin2SRConfig",
        image(1, 3, 32, 24),
        image_size=32,
        embed_dim=8,
        depths=[2],
        num_heads=[2],
        window_size=4,
        upscale=2,
    ),
    _hf(
        "VideoMAE",
        "VideoMAEModel",
        "VideoMAEConfig",
        ZooInput((1, 4, 3, 48, 48), (None, None, None, "lat", "lon")),
        image_size=48,
        patch_size=8,
        num_frames=4,
        tubelet_size=2,
        **ATTENTION,
    ),
    _on_backbone(
        "DepthAnything",
        "DepthAnythingForDepthEstimation",
        "DepthAnythingConfig",
        "Dinov2Config",
        image(1, 3, 70, 56),
        casts=True,  # the positions that its backbone interpolates
        of_image_size=56,
        of_patch_size=14,
        of_out_features=["stage1", "stage2"],
        of_reshape_hidden_states=False,
        reassemble_hidden_size=16,
        patch_size=14,
        neck_hidden_sizes=[8, 8],
        reassemble_factors=[2, 1],
        fusion_hidden_size=8,
        head_hidden_size=4,
        depth_estimation_type="metric",  # the other one ends in a ReLU, behind which all is zero in so small a net
        **{f"of_{k}": v for k, v in NARROW.items()},
    ),
    _on_backbone(
        "MaskFormer",
        "MaskFormerForInstanceSegmentation",
        "MaskFormerConfig",
        "SwinConfig",
        image(1, 3, 64, 64),
        fpn_feature_size=32,
        mask_feature_size=32,
        num_labels=3,
        # without dropout, which draws otherwise for each microbatch of a pipeline
        decoder_config={"d_model": 16, "num_queries": 5, "dropout": 0.0}
        | {f"{part}_{what}": n for part in ("encoder", "decoder") for what, n in DETR.items()},
        **SWIN,
    ),
    _on_backbone(
        "Mask2Former",
        "Mask2FormerForUniversalSegmentation",
        "Mask2FormerConfig",
        "SwinConfig",
        image(1, 3, 64, 64),
        feature_size=32,
        mask_feature_size=32,
        hidden_dim=32,
        encoder_feedforward_dim=16,
        encoder_layers=1,
        decoder_layers=2,
        num_attention_heads=2,
        dim_feedforward=16,
        num_queries=5,
        num_labels=3,
        **SWIN,
    ),
    _on_backbone(
        "UperNet",
        "UperNetForSemanticSegmentation",
        "UperNetConfig",
        "ConvNextConfig",
        image(2, 3, 96, 64),
        hidden_size=16,
        use_auxiliary_head=False,
        num_labels=3,
        of_hidden_sizes=[8, 8, 16, 16],
        of_depths=[1, 1, 1, 1],
        of_out_features=STAGES,
    ),
]


def _diffusers(
    name: str, given: list[ZooInput], call: Any, model: str = "", casts: bool = False, **kwargs: Any
) -> ZooNet:
    def build() -> nn.Module:
        import diffusers

        return getattr(diffusers, model or name)(**kwargs)

    return ZooNet(name, "diffusers", build, given, call=call, casts=casts)


def _at_time(net: nn.Module, x: Any) -> Any:
    return net(x, torch.tensor([5])).sample


TEXT = whole(1, 5, 8)
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
    _diffusers(
        "SD3Transformer2DModel",
        [image(1, 4, 16, 16), TEXT, whole(1, 8)],
        lambda net, x, text, pooled: net(x, text, pooled, torch.tensor([5])).sample,
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=16,
        pooled_projection_dim=8,
        pos_embed_max_size=16,
    ),
    _diffusers(
        "Lumina2Transformer2DModel",
        [image(1, 4, 16, 12), TEXT],
        lambda net, x, text: net(x, torch.tensor([0.5], dtype=x.dtype), text, torch.ones(1, text.shape[1]).bool())[0],
        sample_size=16,
        in_channels=4,
        hidden_size=24,
        num_layers=1,
        num_refiner_layers=1,
        num_attention_heads=3,
        num_kv_heads=1,
        multiple_of=16,
        axes_dim_rope=(4, 2, 2),
        axes_lens=(64, 32, 32),
        cap_feat_dim=8,
    ),
    _diffusers(
        "SanaTransformer2DModel",
        [image(1, 4, 16, 16), TEXT],
        lambda net, x, text: net(x, text, torch.tensor([5])).sample,
        casts=True,  # linear attention
        sample_size=16,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        num_attention_heads=2,
        attention_head_dim=4,
        num_cross_attention_heads=2,
        cross_attention_head_dim=4,
        cross_attention_dim=8,
        caption_channels=8,
        patch_size=1,
    ),
    _diffusers(
        "AutoencoderDC",
        [image(1, 3, 64, 48)],
        lambda net, x: net(x).sample,
        casts=True,  # linear attention, and the variance of its norms
        encoder_block_types=("ResBlock", "EfficientViTBlock"),
        decoder_block_types=("ResBlock", "EfficientViTBlock"),
        encoder_block_out_channels=(8, 16),
        decoder_block_out_channels=(8, 16),
        encoder_layers_per_block=(1, 1),
        decoder_layers_per_block=(1, 1),
        encoder_qkv_multiscales=((), (5,)),
        decoder_qkv_multiscales=((), (5,)),
        attention_head_dim=8,
        latent_channels=4,
    ),
    _diffusers(
        "UNet3DConditionModel",
        [ZooInput((1, 4, 2, 16, 16), (None, None, None, "lat", "lon")), TEXT],
        lambda net, x, text: net(x, torch.tensor([5]), text).sample,
        cross_attention_dim=8,
        attention_head_dim=4,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"),
        up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        **UNET,
    ),
    _diffusers(
        "AutoencoderKLTemporalDecoder",
        [image(2, 3, 32, 24)],
        lambda net, x: net(x, num_frames=2).sample,
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        layers_per_block=1,
    ),
    _diffusers(
        "ControlNetModel",
        [image(1, 4, 16, 16), TEXT, image(1, 3, 32, 32)],
        lambda net, x, text, control: net(x, torch.tensor([5]), text, control).mid_block_res_sample,
        cross_attention_dim=8,
        attention_head_dim=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        conditioning_embedding_out_channels=(4, 8),
        **UNET,
    ),
]

HUB_NETS = [*TRANSFORMERS_NETS, *DIFFUSERS_NETS]
