"""Autoencoders of videos, encoded and decoded: those of diffusers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import nn
from zoo_net import ZooInput, ZooNet, default_dtype


def _frames(frames: int, height: int, width: int) -> list[ZooInput]:
    """A clip of three colors whose height and width are cut."""
    return [ZooInput((1, 3, frames, height, width), (None, None, None, "lat", "lon"))]


def _encoded_and_decoded(net: Any, x: Any) -> dict[str, Any]:
    latents = net.encode(x).latent_dist.mode()
    return {"latents": latents, "clip": net.decode(latents).sample}


def _without_tiling(net: Any, x: Any) -> dict[str, Any]:
    """Allegro's `encode` and `decode` have no other way than tiles that overlap; its parts do."""
    latents = _on_each_frame(net.quant_conv, net.encoder(x)).chunk(2, 1)[0]
    return {"latents": latents, "clip": net.decoder(_on_each_frame(net.post_quant_conv, latents))}


def _on_each_frame(layer: nn.Module, clip: Any) -> Any:
    frames = layer(clip.permute(0, 2, 1, 3, 4).flatten(0, 1))
    return frames.unflatten(0, (clip.shape[0], clip.shape[2])).permute(0, 2, 1, 3, 4)


def _autoencoder(
    name: str, given: list[ZooInput], call: Any = _encoded_and_decoded, casts: bool = False, **kwargs: Any
) -> ZooNet:
    def build() -> nn.Module:
        with default_dtype(torch.float32):  # modules of diffusers make tensors as they are imported
            kind = getattr(importlib.import_module("diffusers"), name)
        return kind(**kwargs)

    return ZooNet(name, "diffusers", build, given, call=call, casts=casts)


def _blocks(name: str, number: int = 2) -> dict[str, tuple[str, ...]]:
    return {"down_block_types": (f"{name}DownBlock3D",) * number, "up_block_types": (f"{name}UpBlock3D",) * number}


_NARROW = {"block_out_channels": (8, 8), "layers_per_block": 1, "norm_num_groups": 4, "latent_channels": 4}
_LATENTS = {"latents_mean": [0.1, -0.2, 0.3, 0.4], "latents_std": [1.0, 2.0, 0.5, 1.5]}
_WAN = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 1, "temperal_downsample": [True], **_LATENTS}

VIDEO_NETS = [
    _autoencoder("AutoencoderKLWan", _frames(5, 20, 12), **_WAN),
    _autoencoder("AutoencoderKLQwenImage", _frames(1, 20, 12), **_WAN),
    _autoencoder(
        "AutoencoderKLHunyuanVideo",
        _frames(5, 20, 12),
        **_NARROW | {"block_out_channels": (8, 8, 8)},
        **_blocks("HunyuanVideo", 3),
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    ),
    _autoencoder(
        "AutoencoderKLHunyuanVideo15",
        _frames(5, 20, 12),
        block_out_channels=(8, 8),
        layers_per_block=1,
        latent_channels=4,
        spatial_compression_ratio=2,
        temporal_compression_ratio=2,
    ),
    _autoencoder(
        "AutoencoderKLCogVideoX", _frames(5, 20, 12), **_NARROW, **_blocks("CogVideoX"), temporal_compression_ratio=2
    ),
    _autoencoder(
        "AutoencoderKLLTXVideo",
        _frames(3, 40, 24),
        casts=True,  # the variance of its norms
        latent_channels=4,
        block_out_channels=(8, 8),
        decoder_block_out_channels=(8, 8),
        down_block_types=("LTXVideoDownBlock3D",) * 2,
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, False),
        decoder_spatio_temporal_scaling=(True, False),
        decoder_inject_noise=(False, False, False),
        downsample_type=("conv", "conv"),
        upsample_residual=(False, False),
        upsample_factor=(1, 1),
        patch_size=2,
    ),
    _autoencoder(
        "AutoencoderKLMochi",
        _frames(7, 32, 24),
        encoder_block_out_channels=(32, 32, 32, 32),
        decoder_block_out_channels=(32, 32, 32, 32),
        latent_channels=4,
        layers_per_block=(1, 1, 1, 1, 1),
        add_attention_block=(False, True, True, True, True),
        **_LATENTS,
    ),
    _autoencoder(
        "AutoencoderKLCosmos",
        _frames(9, 32, 48),
        latent_channels=4,
        encoder_block_out_channels=(8, 8, 8, 8),
        decode_block_out_channels=(8, 8, 8, 8),
        attention_resolutions=(8,),
        resolution=32,
        num_layers=1,
        patch_size=2,
        spatial_compression_ratio=4,
        temporal_compression_ratio=4,
    ),
    _autoencoder(
        "AutoencoderKLAllegro",
        _frames(4, 20, 12),
        _without_tiling,
        **_NARROW,
        **_blocks("Allegro"),
        temporal_downsample_blocks=(True, False),
        temporal_upsample_blocks=(False, True),
        temporal_compression_ratio=2,
    ),
]
