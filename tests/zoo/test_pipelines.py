"""Pipelines of diffusers make on ranks what they make in one process; so do autoencoders as they are served."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib.util import find_spec
from math import prod
from pathlib import Path

import pytest
import torch

if find_spec("diffusers") is None or find_spec("transformers") is None:
    pytest.skip("diffusers and transformers are not installed: make zoo", allow_module_level=True)

from pipelines import PIPELINES, built_pipeline, made_by_one_process, made_on_ranks
from zoo_net import default_dtype
from zoo_table import ZOO
from zoo_training import without_casts

import jigsaw
from jigsaw.testing import run_on_ranks, world_mesh

pytestmark = [pytest.mark.zoo, pytest.mark.timeout(900)]
MESHES = ({"y": 1}, {"y": 2}, {"y": 3}, {"y": 4}, {"y": 2, "x": 2})


def in_float64_on_ranks(name, axes, request):
    with without_casts(True):
        return made_on_ranks(name, axes, **request)


@pytest.fixture(scope="module")
def whole():
    """What one process makes, once for all meshes."""
    made = {}

    def make(name, **request):
        key = name, *request
        if key not in made:
            with without_casts(True):
                made[key] = made_by_one_process(PIPELINES[name], **request)
        return made[key]

    return make


@pytest.mark.parametrize("axes", MESHES, ids=str)
@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_makes_on_ranks_what_it_makes_in_one_process(name, axes, whole):
    want = whole(name)
    assert want.std() > 1e-3
    for got in run_on_ranks(prod(axes.values()), in_float64_on_ranks, name, axes, {}, timeout=120):
        assert got.dtype == torch.float64
        torch.testing.assert_close(got, want, rtol=0, atol=1e-9 * want.abs().max().item())


# -- autoencoders of videos, as they are served ------------------------------------------------------------------------

FRAMEWISE = {"use_framewise_encoding": True, "use_framewise_decoding": True}
AT_ONCE = dict.fromkeys(FRAMEWISE, False)
OVERLAPPING = {"use_tiling": True}
# The frames of a clip, so that each cache is used more than once, and settings that diffusers' methods make.
CACHES = {
    "Wan": ("AutoencoderKLWan", 9, {}),
    "QwenImage": ("AutoencoderKLQwenImage", 9, {}),
    "CogVideoX": ("AutoencoderKLCogVideoX", 17, {}),
    "Mochi, decoded framewise": ("AutoencoderKLMochi", 13, {"use_framewise_decoding": True}),
    "Hunyuan, at once": ("AutoencoderKLHunyuanVideo", 33, AT_ONCE),
    "Hunyuan, parts of time that overlap": ("AutoencoderKLHunyuanVideo", 33, FRAMEWISE),
    "LTX, at once": ("AutoencoderKLLTXVideo", 9, AT_ONCE),
    "Wan, tiles that overlap": (
        "AutoencoderKLWan",
        5,
        OVERLAPPING
        | dict.fromkeys(("tile_sample_min_height", "tile_sample_min_width"), 16)
        | dict.fromkeys(("tile_sample_stride_height", "tile_sample_stride_width"), 8),
    ),
}


def served_clip(case, dtype, axes=None, drawn=None):
    """Latents and clip of an autoencoder in inference, in one process or whole from the ranks of a mesh."""
    name, frames, settings = CACHES[case]
    net = replace(ZOO[f"diffusers/{name}"], dtype=dtype, drawn=drawn)
    with without_casts(net.is_wide), default_dtype(dtype), torch.no_grad():
        vae = net.model().eval()
        for setting, value in settings.items():
            assert hasattr(vae, setting)
            setattr(vae, setting, value)
        (given,) = net.inputs
        clip = replace(given, shape=(*given.shape[:2], frames, *given.shape[3:])).draw(1, drawn or dtype).to(dtype)
        if axes is not None:
            mesh = world_mesh(**axes)
            vae, clip = jigsaw.parallelize(vae, mesh), jigsaw.shard(clip, mesh, (None, None, None, "y", "x"))
        latents = vae.encode(clip).latent_dist.mode()
        made = latents, vae.decode(latents).sample
    return [each.full_tensor() if axes is not None else each for each in made]


@pytest.mark.parametrize("case", CACHES)
def test_an_autoencoder_with_its_cache_is_exact_on_every_mesh(case):
    wants = served_clip(case, torch.float64)
    for axes in MESHES:
        for gots in run_on_ranks(prod(axes.values()), served_clip, case, torch.float64, axes, timeout=120):
            for got, want in zip(gots, wants, strict=True):
                torch.testing.assert_close(got, want, rtol=0, atol=1e-9 * want.abs().max().item())


def root_mean_square(x):
    return x.double().square().mean().sqrt().item()


# Their norms take the mean of all points, so sums of ranks are added in another order, and a last digit may differ.
SUMMED = ("CogVideoX", "Mochi, decoded framewise", "Hunyuan, at once")


@pytest.mark.parametrize("case", ["Wan", "QwenImage", "LTX, at once", *SUMMED])
def test_bfloat16_is_that_of_one_process(case):
    exact = served_clip(case, torch.float64, drawn=torch.bfloat16)
    one = served_clip(case, torch.bfloat16)
    for axes in MESHES:
        (gots, *_) = run_on_ranks(prod(axes.values()), served_clip, case, torch.bfloat16, axes, timeout=120)
        for got, alone, want in zip(gots, one, exact, strict=True):
            assert got.dtype == torch.bfloat16
            own = root_mean_square(alone - want)
            assert 0 < own < 0.1 * root_mean_square(want)
            if case not in SUMMED or axes == {"y": 1}:
                assert torch.equal(got, alone)
            assert root_mean_square(got - want) < 1.5 * own
            assert root_mean_square(got - alone) < 1.5 * own


# -- the page ----------------------------------------------------------------------------------------------------------

PAGE = Path(__file__).parents[2] / "docs" / "diffusion.md"


def run_page(meshes):
    """The video and the clips of every block of the page, with small weights and a small clip."""
    text = PAGE.read_text().replace("= 81, 480, 832", "= 9, 80, 48")
    for written, other in meshes:
        assert written in text
        text = text.replace(written, other)
    names = {}
    with pytest.MonkeyPatch.context() as patch:
        pipe = PIPELINES["Wan"]
        patch.setattr("diffusers.WanPipeline.from_pretrained", lambda *_, **__: built_pipeline(pipe, torch.float32))
        for block in re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            exec(compile(block, PAGE.name, "exec"), names)
    return names["video"], names["clips"].full_tensor()


def test_the_page_runs_alike_on_one_rank_and_four():
    written = ("init_mesh(y=1, x=1)", "init_mesh(data=1, y=1)")
    video, clips = run_page([(each, each) for each in written])
    assert video.shape == (1, 9, 3, 80, 48) and clips.shape == (2, 9, 3, 80, 48)
    cut = list(zip(written, ("init_mesh(y=2, x=2)", "init_mesh(data=2, y=2)"), strict=True))
    for other_video, other_clips in run_on_ranks(4, run_page, cut, timeout=300):
        torch.testing.assert_close(other_video, video, rtol=0, atol=1e-4)
        torch.testing.assert_close(other_clips, clips, rtol=0, atol=1e-4)
