"""Whole pipelines of diffusers with small random weights: text encoder, scheduler, denoiser and autoencoder.

    PYTHONPATH=. python tests/zoo/pipelines.py                  # Wan's on one process, one rank, two and four
    PYTHONPATH=. python tests/zoo/pipelines.py --requests 2     # two requests at once

A JSON object a way: seconds of a request; processor seconds of it, of a denoising step and of the decoding, on the rank
that needs most, the least of `--rounds`; the bytes that this rank sends in a step and in decoding, by kind; the most
memory of a rank; and `off`, the largest difference to one process, of its largest value.  Each rank has one thread.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import Tensor
from zoo_net import define_missing_operators

import jigsaw
from jigsaw.testing import run_on_ranks, world_mesh

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from result_file import ResultFile, add_result_options

define_missing_operators()

Spec = tuple[str | None, ...]
IMAGE: Spec = ("data", None, "y", "x")
CLIP: Spec = ("data", None, None, "y", "x")
WORDS = ["a", "cat", "dog", "on", "the", "moon", "blurred"]


@dataclass(frozen=True)
class TinyPipeline:
    """A pipeline, the noise that it begins with and how that is cut, and the arguments of a request."""

    make: Callable[[], Any]
    noise: tuple[int, ...]
    spec: Spec
    request: dict[str, Any]
    arrange: Callable[[Any], Any] = field(default=lambda noise: noise)  # of the noise, as the pipeline takes it
    denoiser: str = "transformer"


def word_tokenizer(length: int = 8) -> Any:
    """A tokenizer whose tokens are these words: those of the hub cannot be fetched by a test."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    numbers = {name: i for i, name in enumerate(["<pad>", "<unk>", "</s>", *WORDS])}
    words = Tokenizer(models.WordLevel(numbers, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 2)])
    names = {"pad_token": "<pad>", "unk_token": "<unk>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=length, **names)


def _t5(name: str = "T5") -> Any:
    import transformers

    sizes = {"vocab_size": 10, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return getattr(transformers, f"{name}EncoderModel")(getattr(transformers, f"{name}Config")(**sizes))


def _clip_text() -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=10,
            hidden_size=8,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=8,
            projection_dim=8,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
    )


def _image_autoencoder(**kwargs: Any) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        **kwargs,
    )


def make_wan(heads: int = 3, layers: int = 2, width: int = 4, dim_mult: Any = (1, 1, 1, 1), **kwargs: Any) -> Any:
    """Wan 2.1, from text to a clip, with its published scheduler."""
    from diffusers import AutoencoderKLWan, UniPCMultistepScheduler, WanPipeline, WanTransformer3DModel

    denoiser = WanTransformer3DModel(
        num_attention_heads=heads,
        attention_head_dim=12,
        in_channels=4,
        out_channels=4,
        text_dim=8,
        freq_dim=16,
        ffn_dim=heads * 48,
        num_layers=layers,
    )
    vae = AutoencoderKLWan(
        base_dim=width,
        z_dim=4,
        dim_mult=list(dim_mult),
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.1, -0.2, 0.3, 0.4],
        latents_std=[1.0, 2.0, 0.5, 1.5],
    )
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    return WanPipeline(word_tokenizer(), _t5("UMT5"), vae, scheduler, denoiser, **kwargs)


def _make_flux() -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    denoiser = FluxTransformer2DModel(
        in_channels=16,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=3,
        joint_attention_dim=8,
        pooled_projection_dim=8,
        axes_dims_rope=(4, 4, 8),
        guidance_embeds=True,
    )
    vae = _image_autoencoder(shift_factor=0.1, scaling_factor=0.4, use_quant_conv=False, use_post_quant_conv=False)
    scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    return FluxPipeline(scheduler, vae, _clip_text(), word_tokenizer(), _t5(), word_tokenizer(), denoiser)


def _packed_for_flux(noise: Any) -> Any:
    from diffusers import FluxPipeline

    return FluxPipeline._pack_latents(noise, *noise.shape)


def _make_stable_diffusion() -> Any:
    from diffusers import EulerDiscreteScheduler, StableDiffusionPipeline, UNet2DConditionModel

    denoiser = UNet2DConditionModel(
        block_out_channels=(8, 8),
        layers_per_block=1,
        norm_num_groups=4,
        cross_attention_dim=8,
        attention_head_dim=2,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )
    parts = (_image_autoencoder(), _clip_text(), word_tokenizer(), denoiser, EulerDiscreteScheduler(steps_offset=1))
    return StableDiffusionPipeline(*parts, None, None, requires_safety_checker=False)


def _make_ltx() -> Any:
    from diffusers import (
        AutoencoderKLLTXVideo,
        FlowMatchEulerDiscreteScheduler,
        LTXPipeline,
        LTXVideoTransformer3DModel,
    )

    denoiser = LTXVideoTransformer3DModel(
        in_channels=4,
        out_channels=4,
        num_attention_heads=2,
        attention_head_dim=8,
        cross_attention_dim=16,
        num_layers=1,
        caption_channels=8,
    )
    vae = AutoencoderKLLTXVideo(
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
    )
    return LTXPipeline(FlowMatchEulerDiscreteScheduler(), vae, _t5(), word_tokenizer(), denoiser)


def _packed_for_ltx(noise: Any) -> Any:
    from diffusers import LTXPipeline

    return LTXPipeline._pack_latents(noise, 1, 1)


def _make_cogvideo() -> Any:
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )

    denoiser = CogVideoXTransformer3DModel(
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=4,
        time_embed_dim=4,
        text_embed_dim=8,
        num_layers=1,
        sample_width=12,
        sample_height=20,
        sample_frames=9,
        max_text_seq_length=8,
        use_rotary_positional_embeddings=True,
    )
    vae = AutoencoderKLCogVideoX(
        block_out_channels=(8, 8),
        down_block_types=("CogVideoXDownBlock3D",) * 2,
        up_block_types=("CogVideoXUpBlock3D",) * 2,
        layers_per_block=1,
        norm_num_groups=4,
        latent_channels=4,
        temporal_compression_ratio=2,
    )
    return CogVideoXPipeline(word_tokenizer(), _t5(), vae, denoiser, CogVideoXDDIMScheduler())


TEXT = {"prompt": "a cat on the moon", "num_inference_steps": 3, "output_type": "pt"}
GUIDED = TEXT | {"negative_prompt": "blurred", "guidance_scale": 4.0}
PIPELINES = {
    "Wan": TinyPipeline(
        make_wan,
        (1, 4, 3, 10, 6),
        CLIP,
        GUIDED | {"height": 80, "width": 48, "num_frames": 9, "max_sequence_length": 8},
    ),
    "Wan 2.2": TinyPipeline(
        lambda: make_wan(expand_timesteps=True),
        (1, 4, 3, 10, 6),
        CLIP,
        GUIDED | {"height": 80, "width": 48, "num_frames": 9, "max_sequence_length": 8},
    ),
    "Flux": TinyPipeline(
        _make_flux,
        (1, 4, 20, 12),
        IMAGE,
        TEXT | {"height": 40, "width": 24, "max_sequence_length": 8},
        _packed_for_flux,
    ),
    "Stable Diffusion": TinyPipeline(
        _make_stable_diffusion, (1, 4, 20, 12), IMAGE, GUIDED | {"height": 40, "width": 24}, denoiser="unet"
    ),
    "LTX": TinyPipeline(
        _make_ltx,
        (1, 4, 2, 24, 16),
        CLIP,
        GUIDED | {"height": 96, "width": 64, "num_frames": 3, "max_sequence_length": 8},
        _packed_for_ltx,
    ),
    "CogVideoX": TinyPipeline(
        _make_cogvideo,
        (1, 3, 4, 20, 12),
        CLIP,
        GUIDED | {"height": 40, "width": 24, "num_frames": 5, "max_sequence_length": 8},
    ),
}


# -- a request ---------------------------------------------------------------------------------------------------------


def built_pipeline(pipeline: TinyPipeline, dtype: torch.dtype) -> Any:
    """The pipeline with the same weights wherever it is built."""
    torch.manual_seed(0)
    pipe = pipeline.make()
    pipe.set_progress_bar_config(disable=True)
    for part in pipe.components.values():
        if isinstance(part, torch.nn.Module):
            part.to(dtype).eval()
    return pipe


def cut_pipeline(pipeline: TinyPipeline, dtype: torch.dtype, axes: dict[str, int]) -> Any:
    """The same, its denoiser and its autoencoder on the ranks of a mesh; the text encoder runs whole on each."""
    pipe = built_pipeline(pipeline, dtype)
    jigsaw.parallelize(getattr(pipe, pipeline.denoiser), world_mesh(**axes))
    jigsaw.parallelize(pipe.vae, world_mesh(**axes))
    return pipe


def drawn_noise(pipeline: TinyPipeline, dtype: torch.dtype, axes: dict[str, int] | None = None) -> Any:
    """The noise that a request begins with, as the pipeline takes it, cut where there is a mesh."""
    noise: Any = torch.randn(pipeline.noise, generator=torch.Generator().manual_seed(3)).to(dtype)
    if axes is not None:
        noise = jigsaw.shard(noise, world_mesh(**axes), pipeline.spec)
    return pipeline.arrange(noise)


def made_by_one_process(pipeline: TinyPipeline, dtype: torch.dtype = torch.float64, **request: Any) -> Tensor:
    """What plain diffusers makes of the request."""
    pipe = built_pipeline(pipeline, dtype)
    return pipe(latents=drawn_noise(pipeline, dtype), **pipeline.request | request)[0]


def made_on_ranks(name: str, axes: dict[str, int], dtype: torch.dtype = torch.float64, **request: Any) -> Tensor:
    """The same on the ranks of a mesh, whole on each of them."""
    pipeline = PIPELINES[name]
    pipe = cut_pipeline(pipeline, dtype, axes)
    return pipe(latents=drawn_noise(pipeline, dtype, axes), **pipeline.request | request)[0].full_tensor()


# -- its time and its messages -----------------------------------------------------------------------------------------


def timed_pipeline(options: argparse.Namespace) -> TinyPipeline:
    """Wan's pipeline, so wide that its steps take longer than Python does."""
    frames, height, width = options.latents
    sides = {"height": height * 8, "width": width * 8, "num_frames": (frames - 1) * 4 + 1}
    steps = {"num_inference_steps": options.steps, "max_sequence_length": 8}
    prompts = {"prompt": [TEXT["prompt"]] * options.requests, "negative_prompt": ["blurred"] * options.requests}
    return TinyPipeline(
        lambda: make_wan(options.heads, options.layers, options.width, (1, 2, 4, 4)),
        (options.requests, 4, frames, height, width),
        CLIP,
        GUIDED | sides | steps | prompts,
    )


def timed_request(axes: dict[str, int] | None, options: argparse.Namespace) -> dict[str, Any]:
    """The row of this rank; without axes, plain diffusers on whole tensors."""
    pipeline = timed_pipeline(options)
    make = built_pipeline if axes is None else partial(cut_pipeline, axes=axes)
    pipe = make(pipeline, torch.float32)
    noise = drawn_noise(pipeline, torch.float32, axes)

    def made(output: str) -> tuple[Any, tuple[float, float], Counter[str]]:
        began, began_cpu = time.perf_counter(), time.process_time()
        with jigsaw.comm.count() as traffic:
            result = pipe(latents=noise, **pipeline.request | {"output_type": output})[0]
        sent: Counter[str] = Counter()
        for call in traffic.calls:
            sent[call.kind] += call.sent_bytes
        return result, (time.perf_counter() - began, time.process_time() - began_cpu), sent

    frames, _, in_all = made("pt")
    _, _, denoising = made("latent")
    requests = [made("pt")[1] for _ in range(options.rounds)]
    denoised = [made("latent")[1] for _ in range(options.rounds)]
    request_s, request_cpu = map(min, zip(*requests, strict=True))
    denoised_cpu = min(cpu for _, cpu in denoised)
    return {
        "request_s": round(request_s, 2),
        "request_cpu_s": round(request_cpu, 2),
        "step_cpu_s": round(denoised_cpu / options.steps, 3),
        "decode_cpu_s": round(request_cpu - denoised_cpu, 2),
        "step_bytes": {kind: n // options.steps for kind, n in denoising.items() if n},
        "decode_bytes": {kind: n for kind, n in (in_all - denoising).items() if n},
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
        "frames": frames if axes is None else frames.full_tensor(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--latents", type=int, nargs=3, default=(3, 30, 52), help="frames, height and width of latents")
    parser.add_argument("--heads", type=int, default=12)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--width", type=int, default=24, help="channels of the autoencoder's first block")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    add_result_options(parser)
    options = parser.parse_args()
    versions = {"torch": torch.__version__, "diffusers": version("diffusers")}
    asked = {name: value for name, value in vars(options).items() if name not in ("output", "hardware")}
    results = ResultFile(options, f"python tests/zoo/pipelines.py, {asked}", **versions)
    ways = [None, {"y": 1}, {"y": 2}, {"y": 2, "x": 2}]
    if options.requests > 1:
        ways = [None, {"y": 2}, {"data": 2}, {"data": 2, "y": 2}]
    want: Tensor | None = None
    for axes in ways:
        ranks = math.prod((axes or {}).values())
        every = run_on_ranks(ranks, timed_request, axes, options, timeout=3600)
        row = max(every, key=lambda each: each["request_cpu_s"])
        frames = row.pop("frames")
        want = frames if want is None else want
        off = float((frames - want).abs().max() / want.abs().max())
        peak = max(each["peak_mib"] for each in every)
        results.add(
            {"mesh": axes or "plain diffusers", "requests": options.requests, **row, "peak_mib": peak, "off": off}
        )


if __name__ == "__main__":
    main()
