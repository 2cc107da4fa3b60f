"""Writes the goldens of caches between denoising steps: diffusers' samples with the folders of other goldens, and its
hooks of first-block cache and MagCache. FLUX.2's first-block cache, which those hooks do not take, DeepCache and TeaCache are
written here: modules of diffusers' models return what they returned in an earlier step.

tests/golden/cached/ gets
  cases.json                name, folder (of another golden), and the words of the command that must give the same result
  golden.safetensors        <case>.noise  initial noise of the pipeline, NCHW (NCFHW), standard normal; <case>.latents
                            metadata: noise_floor.<case>, the distance of the same run in float64; reused.<case>, a
                            character for each step: x if it reused what an earlier one computed
All in float32 on the CPU.

    PYTHONPATH=.deps/interop python3 tools/golden/cached_pipelines.py [CASE …]
"""

import json
import pathlib

import numpy
import torch
from diffusers import (Flux2KleinPipeline, FlowMatchEulerDiscreteScheduler, FluxPipeline, QwenImagePipeline,
                       StableDiffusionPipeline, StableDiffusionXLPipeline, WanPipeline, ZImagePipeline)
from diffusers.hooks import FirstBlockCacheConfig, MagCacheConfig, apply_first_block_cache, apply_mag_cache
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.hooks.first_block_cache import FBCHeadBlockHook
from diffusers.hooks.hooks import CacheContext, _set_cache_context
from diffusers.hooks.mag_cache import MagCacheHeadHook
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from transformers import CLIPTextModel

from flux_pipelines import kept_precision, record
from pipelines import scheduler_of
from z_image_pipelines import TURBO_SHIFT

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
# name: (folder, pipeline, arguments)
FOLDERS = {
    "flux": ("flux/dev", FluxPipeline, dict(guidance_scale=3.5, max_sequence_length=12)),
    "flux2": ("flux2/base", Flux2KleinPipeline, dict(guidance_scale=1.0, text_encoder_out_layers=[1, 2, 3])),
    "qwen": ("qwenimage/base", QwenImagePipeline, dict(true_cfg_scale=1.0)),
    "zimage": ("zimage/base", ZImagePipeline, dict(guidance_scale=0.5)),
    "wan": ("wan/t2v", WanPipeline, dict(guidance_scale=1.0, num_frames=5, max_sequence_length=12)),
    "sd": ("pipelines/sd", StableDiffusionPipeline, dict(guidance_scale=5.0, height=16, width=16)),
    "sdxl": ("pipelines/sdxl", StableDiffusionXLPipeline, dict(guidance_scale=5.0, height=16, width=16)),
}
RATIOS = [1.0, 1.2, 1.1, 0.99, 1.02, 0.97, 1.01, 0.96, 0.9, 1.05]
FIRST, MAG, DEEP, TEA = "use_first_block_cache", "use_magcache", "use_deepcache", "use_teacache"

# name: (folder, cache, its settings, further arguments)
CASES = {
    "flux_first_block": ("flux", FIRST, dict(threshold=0.46), {}),
    "flux_first_block_batch": ("flux", FIRST, dict(threshold=0.5), dict(prompt=["red heart", "blue"], width=48)),
    "flux2_first_block": ("flux2", FIRST, dict(threshold=1.1), {}),
    "qwen_first_block": ("qwen", FIRST, dict(threshold=0.8), {}),
    # Guided: both rows decide together.
    "zimage_first_block": ("zimage", FIRST, dict(threshold=1.21), dict(height=36, width=44)),
    "wan_first_block": ("wan", FIRST, dict(threshold=0.45), {}),
    "flux_magcache": ("flux", MAG, dict(threshold=0.06, most=2), {}),
    "flux2_magcache": ("flux2", MAG, dict(threshold=0.1, most=3), {}),
    "zimage_magcache": ("zimage", MAG, dict(threshold=0.06, most=3), dict(guidance_scale=0.0)),
    "qwen_magcache": ("qwen", MAG, dict(threshold=0.052, most=1), {}),
    "flux_teacache": ("flux", TEA, dict(threshold=0.3, coefficients=[2.0, -1.5, 0.6, 0.01]),
                      dict(prompt=["red heart", "blue"], width=48)),
    "flux2_teacache": ("flux2", TEA, dict(threshold=0.65, coefficients=[1, 0]), {}),
    "qwen_teacache": ("qwen", TEA, dict(threshold=0.65, coefficients=[1, 0]), {}),
    "zimage_teacache": ("zimage", TEA, dict(threshold=1.5, coefficients=[1, 0]), dict(height=36, width=44)),
    "wan_teacache": ("wan", TEA, dict(threshold=2.5, coefficients=[1, 0]), {}),
    "deepcache": ("sd", DEEP, dict(interval=3, branch=0), {}),
    "deepcache_unguided": ("sd", DEEP, dict(interval=2, branch=1), dict(guidance_scale=1.0, width=24)),
    "deepcache_coarse": ("sd", DEEP, dict(interval=2, branch=2), {}),
    "deepcache_sdxl": ("sdxl", DEEP, dict(interval=4, branch=0), dict(prompt=["red heart", "blue"])),
    "deepcache_sdxl_coarse": ("sdxl", DEEP, dict(interval=2, branch=2), {}),
}


def arguments(case):
    folder, _, _, extra = CASES[case]
    return dict(prompt="a red heart", num_inference_steps=10, height=32, width=32) | FOLDERS[folder][2] | extra


def decided(difference, threshold):
    """Whether a relative difference is above the threshold; rounding must not decide."""
    assert abs(difference / threshold - 1) > 2e-3, (difference, threshold)
    return difference > threshold


def with_first_block_hooks(transformer, threshold, reused):
    apply_first_block_cache(transformer, FirstBlockCacheConfig(threshold))
    original = FBCHeadBlockHook._should_compute_remaining_blocks

    def watched(self, residual):
        before = self.state_manager.get_state().head_block_residual
        if before is not None:
            decided(((residual - before).abs().mean() / before.abs().mean()).item(), threshold)
        computes = original(self, residual)
        reused.append(not computes)
        return computes
    FBCHeadBlockHook._should_compute_remaining_blocks = watched
    return lambda: setattr(FBCHeadBlockHook, "_should_compute_remaining_blocks", original)


def with_first_block(transformer, threshold, reused):
    """The first-block cache for FLUX.2, whose last blocks return text and image as one sequence."""
    blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
    state = dict(skips=False)

    def wrapped(block, first, last):
        forward = block.forward

        def run(hidden_states, encoder_hidden_states=None, **a):
            if not first and state["skips"]:
                return hidden_states if encoder_hidden_states is None else (encoder_hidden_states, hidden_states)
            out = forward(hidden_states=hidden_states, encoder_hidden_states=encoder_hidden_states, **a)
            if first:
                added, before = out[1] - hidden_states, state.get("added")
                state["skips"] = before is not None and not decided(
                    ((added - before).abs().mean() / before.abs().mean()).item(), threshold)
                reused.append(state["skips"])
                if state["skips"]:
                    return out[0], out[1] + state["others"]
                state["added"], state["image"] = added, out[1]
            if last:
                state["others"] = out[:, -state["image"].shape[1]:] - state["image"]
            return out
        block.forward = run
    for i, block in enumerate(blocks):
        wrapped(block, i == 0, i == len(blocks) - 1)


def with_magcache(transformer, steps, threshold, most, reused):
    original = MagCacheHeadHook.new_forward

    def watched(self, module, *args, **kwargs):
        out = original(self, module, *args, **kwargs)
        reused.append(not self.state_manager.get_state().should_compute)
        return out
    MagCacheHeadHook.new_forward = watched
    apply_mag_cache(transformer, MagCacheConfig(threshold=threshold, max_skip_steps=most, retention_ratio=0.2,
                                                num_inference_steps=steps, mag_ratios=RATIOS))
    return lambda: setattr(MagCacheHeadHook, "new_forward", original)


class Seen(Exception):
    """Ends a block's forward at its attention, with what that gets."""


def input_of(block, *args, **kwargs):
    def stop(_, a, k):
        raise Seen(k.get("hidden_states", a[0] if a else None))
    attention = getattr(block, "attn", None) or block.attention
    handle = attention.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        type(block).forward(block, *args, **kwargs)
    except Seen as seen:
        return seen.args[0]
    finally:
        handle.remove()


def with_teacache(folder, transformer, steps, threshold, coefficients, reused):
    blocks = (transformer.layers if folder == "zimage" else transformer.blocks if folder == "wan" else
              [*transformer.transformer_blocks, *getattr(transformer, "single_transformer_blocks", [])])
    state = dict(distance=0.0)

    def decide(now):
        before, state["input"] = state.get("input"), now
        if len(reused) in (0, steps - 1):
            state["distance"], runs = 0.0, True
        else:
            change = ((now - before).abs().mean() / before.abs().mean()).item()
            state["distance"] += numpy.poly1d(coefficients)(change)
            runs = decided(state["distance"], threshold)
            state["distance"] = 0.0 if runs else state["distance"]
        reused.append(not runs)
        return runs

    def wrapped(block, first, last):
        forward = block.forward

        def run(*args, **kwargs):
            hidden = args[0] if args else kwargs["hidden_states"]
            text = None if folder in ("wan", "zimage") else kwargs["encoder_hidden_states"]
            if first:
                state["runs"] = decide(args[2] if folder == "wan" else input_of(block, *args, **kwargs))
                state["start"] = hidden
            if not state["runs"]:
                hidden = hidden + state["added"] if first else hidden
                return hidden if text is None else (text, hidden)
            out = forward(*args, **kwargs)
            if last:
                image = out[1] if isinstance(out, tuple) else out
                state["added"] = image[:, -state["start"].shape[1]:] - state["start"]
            return out
        block.forward = run
    for i, block in enumerate(blocks):
        wrapped(block, i == 0, i == len(blocks) - 1)


def with_deepcache(unet, interval, branch, reused):
    """Modules below skip connection `branch` return what they returned in the last step that computed them."""
    forward, calls = unet.forward, 0

    def counted(*args, **kwargs):
        nonlocal calls
        reused.append(calls % interval != 0)
        calls += 1
        return forward(*args, **kwargs)
    unet.forward = counted

    def wrapped(module):
        compute, kept = module.forward, None

        def run(*args, **kwargs):
            nonlocal kept
            if not reused[-1]:
                kept = compute(*args, **kwargs)
            return kept
        module.forward = run
    skip = 0  # of conv_in
    for block in unet.down_blocks:
        parts = [[r, a] if a is not None else [r]
                 for r, a in zip(block.resnets, getattr(block, "attentions", [None] * len(block.resnets)))]
        for part in parts + [[d] for d in block.downsamplers or []]:
            skip += 1
            for module in part if skip > branch else []:
                wrapped(module)
    if unet.mid_block is not None:
        wrapped(unet.mid_block)
    for block in unet.up_blocks:
        for k, resnet in enumerate(block.resnets):
            attentions = getattr(block, "attentions", None)
            for module in ([resnet, attentions[k]] if attentions else [resnet]) if skip > branch else []:
                wrapped(module)
            below, skip = skip > branch, skip - 1
        for module in block.upsamplers or [] if below else []:
            wrapped(module)


def run(case, dtype):
    folder, cache, settings, _ = CASES[case]
    name, pipeline, _ = FOLDERS[folder]
    a = arguments(case)
    extra = dict(is_distilled=False) if folder == "flux2" else {}
    pipe = pipeline.from_pretrained(GOLDEN / name, torch_dtype=torch.float32, **extra).to(dtype)
    pipe.set_progress_bar_config(disable=True)
    if folder in ("sd", "sdxl"):
        pipe.scheduler = scheduler_of(pipe, dict(_class_name="DDIMScheduler"))
    if folder == "zimage":  # Turbo's shift
        pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, shift=TURBO_SHIFT)
    model = pipe.unet if cache == DEEP else pipe.transformer
    reused = []
    restore = (with_deepcache(model, reused=reused, **settings) if cache == DEEP else
               with_magcache(model, a["num_inference_steps"], reused=reused, **settings) if cache == MAG else
               with_teacache(folder, model, a["num_inference_steps"], reused=reused, **settings) if cache == TEA else
               (with_first_block if folder == "flux2" else with_first_block_hooks)(model, reused=reused, **settings))
    if folder == "zimage":  # whose pipeline sets none, and whose blocks name their first argument otherwise
        TransformerBlockRegistry.get(ZImageTransformerBlock)._get_parameter_from_args_kwargs = (
            lambda _, args=(), kwargs=None: args[0] if args else kwargs["x"])
        _set_cache_context(model, CacheContext("both"))
    count = len(a["prompt"]) if isinstance(a["prompt"], list) else 1
    side = lambda n: n // (8 if folder == "wan" else 4 if folder == "flux2" else 2)
    channels = 4 if folder in ("sd", "sdxl", "wan") else model.config.in_channels if folder == "flux2" else 16
    shape = (count, channels, *([2] if folder == "wan" else []), side(a["height"]), side(a["width"]))
    if folder == "flux2":
        shape = (count, 16, side(a["height"]), side(a["width"]))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, case))))
    latents = noise.to(dtype)
    if folder in ("flux", "qwen"):
        latents = pipeline._pack_latents(latents, count, 16, shape[-2], shape[-1])
    if folder == "zimage":
        latents = noise
    try:
        with kept_precision():
            out = pipe(**a, latents=latents, output_type="latent")
    finally:
        if restore:
            restore()
    made = out.frames if folder == "wan" else out.images
    if folder in ("flux", "qwen"):
        made = pipeline._unpack_latents(made, a["height"], a["width"], 2)
        made = made.squeeze(2) if folder == "qwen" else made
    assert any(reused) and not all(reused) and len(reused) == a["num_inference_steps"], reused
    print(case, "".join("x" if r else "." for r in reused))
    return {"noise": noise, "latents": made.float(), "reused": torch.tensor(reused)}


def words_of(case):
    folder, cache, settings, _ = CASES[case]
    words = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in arguments(case).items()]
    words += [f"{cache}=true", "per_device_batch_size=2"]  # both samples decide together
    if folder == "zimage":
        words.append("flow_shift=3")
    if cache == FIRST:
        words.append(f"first_block_cache_threshold={settings['threshold']}")
    if cache == MAG:
        words += [f"magcache_thresh={settings['threshold']}", f"magcache_K={settings['most']}", "retention_ratio=0.2",
                  "mag_ratios_base=" + json.dumps([r for r in RATIOS for _ in range(2)])]
    if cache == TEA:
        words += [f"teacache_thresh={settings['threshold']}", f"teacache_coefficients={settings['coefficients']}"]
    if cache == DEEP:
        words += [f"deepcache_interval={settings['interval']}", f"deepcache_branch={settings['branch']}",
                  'diffusion_scheduler_config={"_class_name": "DDIMScheduler"}']
    return {"name": "cached_" + case, "same_as": case, "folder": "../" + FOLDERS[folder][0], "words": words}


def main():
    if not hasattr(CLIPTextModel, "text_model"):
        CLIPTextModel.text_model = property(lambda self: self)
    record(GOLDEN / "cached", {}, CASES, run, words_of)


if __name__ == "__main__":
    main()
