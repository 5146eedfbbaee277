"""Denoising transformers of diffusers: what they denoise is cut along height and width."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from zoo_net import ZooInput, ZooNet, default_dtype, image, whole

TEXT = whole(1, 5, 8)
TIME = 0.5


def _clip(*shape: int) -> ZooInput:
    """Batch, channels, frames, rows and columns, the last two of which are cut."""
    return ZooInput(shape, (None, None, None, "lat", "lon"))


def _denoiser(
    name: str, inputs: Sequence[ZooInput], call: Any, title: str = "", casts: bool = True, **kwargs: Any
) -> ZooNet:
    def build() -> nn.Module:
        with default_dtype(torch.float32):  # modules of diffusers make tensors as they are imported
            kind = getattr(importlib.import_module("diffusers"), name)
        return kind(**kwargs)

    return ZooNet(title or name, "diffusers", build, inputs, call=call, casts=casts)


def _time(x: Any) -> Any:
    return torch.tensor([TIME], dtype=x.dtype)


def _mask(text: Any) -> Any:
    return torch.ones(text.shape[:2], dtype=torch.bool)


# -- tokens of patches, as the pipelines pack them ---------------------------------------------------------------------


def _packed(x: Any) -> Any:
    """Tokens [1, height / 2 * width / 2, channels * 4] of an image: a token a patch of 2 x 2."""
    _, channels, height, width = x.shape
    patches = x.view(1, channels, height // 2, 2, width // 2, 2).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(1, (height // 2) * (width // 2), channels * 4)


def _unpacked(tokens: Any, height: int, width: int) -> Any:
    channels = tokens.shape[2] // 4
    patches = tokens.view(1, height // 2, width // 2, channels, 2, 2).permute(0, 3, 1, 4, 2, 5)
    return patches.reshape(1, channels, height, width)


def _places(height: int, width: int, numbers: int = 3) -> Any:
    """The row and the column of each token, as Flux numbers them."""
    rows, columns = torch.meshgrid(torch.arange(height // 2), torch.arange(width // 2), indexing="ij")
    zeros = torch.zeros_like(rows)
    return torch.stack([zeros, rows, columns, zeros][:numbers], -1).flatten(0, 1).double()


def _flux(net: Any, x: Any, text: Any, pooled: Any) -> Any:
    size = x.shape[2:]
    places, none = _places(*size), torch.zeros(text.shape[1], 3).double()
    return _unpacked(net(_packed(x), text, pooled, _time(x), places, none).sample, *size)


def _flux2(net: Any, x: Any, text: Any) -> Any:
    size = x.shape[2:]
    places, none = _places(*size, 4), torch.zeros(text.shape[1], 4).double()
    return _unpacked(net(_packed(x), text, _time(x), places, none, guidance=_time(x)).sample, *size)


def _chroma(net: Any, x: Any, text: Any) -> Any:
    size = x.shape[2:]
    places, none = _places(*size), torch.zeros(text.shape[1], 3).double()
    return _unpacked(net(_packed(x), text, _time(x), places, none).sample, *size)


def _qwen(net: Any, x: Any, text: Any) -> Any:
    height, width = x.shape[2:]
    shapes = [[(1, height // 2, width // 2)]]
    return _unpacked(net(_packed(x), text, _mask(text), _time(x), shapes).sample, height, width)


def _ltx(net: Any, x: Any, text: Any) -> Any:
    frames, height, width = x.shape[2:]
    tokens = x.permute(0, 2, 3, 4, 1).flatten(1, 3)
    y = net(tokens, text, torch.tensor([5]), _mask(text), frames, height, width).sample
    return y.unflatten(1, (frames, height, width)).permute(0, 4, 1, 2, 3)


# -- those that make patches themselves --------------------------------------------------------------------------------


def _with_text(net: Any, x: Any, text: Any) -> Any:
    return net(x, encoder_hidden_states=text, timestep=torch.tensor([5])).sample


def _with_mask(net: Any, x: Any, text: Any) -> Any:
    return net(x, encoder_hidden_states=text, timestep=torch.tensor([5]), encoder_attention_mask=_mask(text)).sample


def _time_by_token(net: Any, x: Any, text: Any) -> Any:
    """Wan 2.2: each token has a time of its own, that of the first frame is 0."""
    frames, height, width = x.shape[2:]
    times = torch.full((frames, height // 2, width // 2), 5)
    times[0] = 0
    return net(x, encoder_hidden_states=text, timestep=times.flatten()[None]).sample


def _hunyuan(net: Any, x: Any, text: Any, pooled: Any) -> Any:
    return net(x, torch.tensor([5]), text, _mask(text), pooled, guidance=torch.tensor([6000.0])).sample


def _cogvideo(net: Any, x: Any, text: Any) -> Any:
    embeddings = importlib.import_module("diffusers.models.embeddings")
    frames, height, width = x.shape[2:]
    rows, columns = height // 2, width // 2
    turns = embeddings.get_3d_rotary_pos_embed(16, ((0, 0), (rows, columns)), (rows, columns), frames, device="cpu")
    y = net(x.permute(0, 2, 1, 3, 4), text, torch.tensor([5]), image_rotary_emb=turns).sample
    return y.permute(0, 2, 1, 3, 4)


def _cosmos(net: Any, x: Any, text: Any) -> Any:
    return net(x, _time(x), text, padding_mask=torch.zeros(1, 1, *x.shape[3:], dtype=x.dtype), fps=30).sample


def _cogview(net: Any, x: Any, text: Any) -> Any:
    size, corner = torch.tensor([[20, 20]]), torch.tensor([[0, 0]])
    return net(x, text, torch.tensor([5]), size, size, corner).sample


def _pixart(net: Any, x: Any, text: Any) -> Any:
    sizes = {"resolution": None, "aspect_ratio": None}
    return net(x, text, torch.tensor([5]), added_cond_kwargs=sizes, encoder_attention_mask=_mask(text)).sample


def _z_image(net: Any, x: Any, text: Any) -> Any:
    """It takes a list of clips of one frame."""
    return net([x[0][:, None]], _time(x), [text[0]])[0][0]


_WAN = {
    "num_attention_heads": 3,  # an odd number of heads on an even number of ranks
    "attention_head_dim": 12,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 8,
    "freq_dim": 16,
    "ffn_dim": 24,
    "num_layers": 2,
    "rope_max_seq_len": 32,
}
_FLUX = {
    "patch_size": 1,
    "in_channels": 16,
    "num_layers": 1,
    "num_single_layers": 1,
    "attention_head_dim": 16,
    "num_attention_heads": 3,
    "joint_attention_dim": 8,
    "axes_dims_rope": (4, 4, 8),
}
_IMAGE, _CLIP = image(1, 4, 20, 12), _clip(1, 4, 3, 20, 12)

DIFFUSION_NETS = [
    _denoiser("WanTransformer3DModel", [_CLIP, TEXT], _with_text, **_WAN),
    _denoiser("WanTransformer3DModel", [_CLIP, TEXT], _time_by_token, "WanTransformer3DModel (2.2)", **_WAN),
    _denoiser("FluxTransformer2DModel", [_IMAGE, TEXT, whole(1, 8)], _flux, pooled_projection_dim=8, **_FLUX),
    _denoiser(
        "Flux2Transformer2DModel",
        [_IMAGE, TEXT],
        _flux2,
        timestep_guidance_channels=16,
        **_FLUX | {"axes_dims_rope": (4, 4, 4, 4)},
    ),
    _denoiser(
        "ChromaTransformer2DModel",
        [_IMAGE, TEXT],
        _chroma,
        approximator_num_channels=8,
        approximator_hidden_dim=16,
        approximator_layers=1,
        **_FLUX,
    ),
    _denoiser(
        "QwenImageTransformer2DModel",
        [_IMAGE, TEXT],
        _qwen,
        in_channels=16,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=8,
        axes_dims_rope=(8, 4, 4),
    ),
    _denoiser(
        "HunyuanVideoTransformer3DModel",
        [_CLIP, TEXT, whole(1, 8)],
        _hunyuan,
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=10,
        num_layers=1,
        num_single_layers=1,
        num_refiner_layers=1,
        patch_size=2,
        text_embed_dim=8,
        pooled_projection_dim=8,
        rope_axes_dim=(2, 4, 4),
    ),
    _denoiser(
        "CogVideoXTransformer3DModel",
        [_CLIP, TEXT],
        _cogvideo,
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=4,
        text_embed_dim=8,
        num_layers=2,
        sample_width=12,
        sample_height=20,
        sample_frames=9,
        max_text_seq_length=5,
        use_rotary_positional_embeddings=True,
    ),
    _denoiser(
        "LTXVideoTransformer3DModel",
        [_CLIP, TEXT],
        _ltx,
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=2,
        caption_channels=8,
    ),
    _denoiser(
        "MochiTransformer3DModel",
        [_CLIP, TEXT],
        _with_mask,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        pooled_projection_dim=16,
        in_channels=4,
        text_embed_dim=8,
        time_embed_dim=4,
        max_sequence_length=16,
    ),
    _denoiser(
        "CosmosTransformer3DModel",
        [_CLIP, TEXT],
        _cosmos,
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=16,
        num_layers=2,
        mlp_ratio=2,
        text_embed_dim=8,
        adaln_lora_dim=4,
        max_size=(4, 32, 32),
        extra_pos_embed_type=None,  # its norm asks for float32
    ),
    _denoiser(
        "LatteTransformer3DModel",
        [_clip(1, 4, 3, 16, 16), TEXT],
        _with_text,
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        cross_attention_dim=16,
        attention_bias=True,
        sample_size=16,
        patch_size=2,
        activation_fn="gelu-approximate",
        num_embeds_ada_norm=1000,
        norm_type="ada_norm_single",
        norm_elementwise_affine=False,
        caption_channels=8,
        video_length=3,
    ),
    _denoiser(
        "PixArtTransformer2DModel",
        [_IMAGE, TEXT],
        _pixart,
        num_attention_heads=2,
        attention_head_dim=8,
        num_layers=2,
        cross_attention_dim=16,
        sample_size=20,
        caption_channels=8,
        use_additional_conditions=False,
    ),
    _denoiser(
        "AuraFlowTransformer2DModel",
        [_IMAGE, TEXT],
        _with_text,
        sample_size=20,
        num_mmdit_layers=1,
        num_single_dit_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=8,
        caption_projection_dim=16,
        pos_embed_max_size=256,
    ),
    _denoiser(
        "CogView4Transformer2DModel",
        [_IMAGE, TEXT],
        _cogview,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=8,
        num_attention_heads=2,
        text_embed_dim=8,
        time_embed_dim=8,
        condition_dim=4,
    ),
    _denoiser(
        "ZImageTransformer2DModel",
        [_IMAGE, TEXT],
        _z_image,
        in_channels=4,
        dim=32,
        n_layers=1,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=8,
        axes_dims=[8, 4, 4],
        axes_lens=[64, 32, 32],
    ),
]
