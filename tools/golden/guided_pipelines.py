"""Writes the goldens of guidance that changes the model or the sampler: diffusers' samples with the folders of other
goldens, using perturbed attention (its pag pipelines), FreeU, skipped layers (its hooks), CFG++ (its DDIM and Euler
with replaced noise), dynamic thresholding, TCD with the pipelines' eta, and Euler with the timesteps of EDM's models.

tests/golden/guided/ gets
  cases.json                name, folder (of another golden), and the words of the command that must give the same result
  golden.safetensors        <case>.noise  initial noise of the pipeline, standard normal; <case>.latents
                            metadata: noise_floor.<case>, the distance of the same run in float64
All in float32 on the CPU.

    PYTHONPATH=.deps/interop python3 tools/golden/guided_pipelines.py [CASE …]
"""

import contextlib
import inspect
import json
import pathlib

import torch
from diffusers import (DDIMScheduler, EulerDiscreteScheduler, StableDiffusionPAGPipeline, StableDiffusionPipeline,
                       StableDiffusionXLPAGPipeline, StableDiffusionXLPipeline, WanPipeline)
from diffusers.guiders import SkipLayerGuidance
from diffusers.hooks import HookRegistry, LayerSkipConfig
from diffusers.hooks.layer_skip import _apply_layer_skip_hook
from transformers import CLIPTextModel

from flux_pipelines import kept_precision, record
from pipelines import scheduler_of

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
FOLDERS = {"sd": "pipelines/sd", "sdxl": "pipelines/sdxl", "wan": "wan/t2v"}
PIPELINES = {"sd": StableDiffusionPipeline, "sdxl": StableDiffusionXLPipeline, "wan": WanPipeline}
PAG = {"sd": StableDiffusionPAGPipeline, "sdxl": StableDiffusionXLPAGPipeline}
DDIM, EULER = dict(_class_name="DDIMScheduler"), dict(_class_name="EulerDiscreteScheduler")
THRESHOLD = dict(thresholding=True, dynamic_thresholding_ratio=0.9, sample_max_value=1.5)
V = dict(prediction_type="v_prediction")
# As published with Stable Video Diffusion, which has sigma_max 700.
EDM = EULER | V | dict(timestep_type="continuous", use_karras_sigmas=True, sigma_min=0.002, timestep_spacing="leading")
IMAGE = dict(num_inference_steps=8, guidance_scale=5.0, height=16, width=16, negative_prompt="purple")
VIDEO = dict(num_inference_steps=8, guidance_scale=5.0, height=32, width=32, num_frames=5, max_sequence_length=12,
             negative_prompt="grey")

# name: (folder, members of the scheduler's config, arguments)
CASES = {
    "pag": ("sd", DDIM, dict(pag_scale=3.0)),
    "pag_adaptive_unguided": ("sd", DDIM, dict(pag_scale=2.0, pag_adaptive_scale=0.003, guidance_scale=1.0)),
    "pag_down_and_mid": ("sd", EULER, dict(pag_scale=1.5, pag_applied_layers=["mid", "down_blocks.0"], width=24)),
    "pag_rescaled_batch": ("sdxl", {}, dict(pag_scale=3.0, pag_applied_layers=["up_blocks.0", "mid"], guidance_rescale=0.5,
                                            prompt=["red heart", "blue"])),
    "freeu": ("sd", DDIM, dict(freeu=[0.9, 0.2, 1.5, 1.6])),
    "freeu_oblong": ("sdxl", {}, dict(freeu=[0.6, 0.4, 1.1, 1.2], height=24, width=40)),
    "cfg_pp": ("sd", DDIM, dict(cfg_pp_lambda=0.6)),
    "cfg_pp_v": ("sd", DDIM | V, dict(cfg_pp_lambda=1.0)),
    "cfg_pp_euler": ("sdxl", EULER, dict(cfg_pp_lambda=0.3)),
    "thresholding": ("sd", DDIM | THRESHOLD, {}),
    "thresholding_dpmpp": ("sdxl", dict(_class_name="DPMSolverMultistepScheduler", **THRESHOLD),
                           dict(prompt=["red heart", "blue"], width=24)),
    "tcd": ("sd", dict(_class_name="TCDScheduler"), dict(num_inference_steps=4)),  # with the pipeline's eta, 0
    "continuous": ("sdxl", EDM | dict(sigma_max=700.0), {}),
    "continuous_small": ("sd", EDM | dict(sigma_max=14.6), dict(guidance_rescale=0.5, width=24)),
    "continuous_pag": ("sd", EDM | dict(sigma_max=80.0), dict(pag_scale=2.0, pag_adaptive_scale=0.001)),
    "skip_layers": ("wan", {}, dict(skip_layer_guidance_scale=2.5, skip_layer_guidance_layers=[1],
                                    skip_layer_guidance_start=0.1, skip_layer_guidance_stop=0.7)),
    "skip_layers_unguided": ("wan", {}, dict(skip_layer_guidance_scale=2.5, skip_layer_guidance_layers=[0],
                                             skip_layer_guidance_stop=0.9, guidance_scale=1.0, width=48)),
}


def arguments(case):
    folder, _, extra = CASES[case]
    return {"prompt": "a red heart", **(VIDEO if folder == "wan" else IMAGE), **extra}


@contextlib.contextmanager
def without_noise_of_the_prompt(pipe, part):
    """CFG++: steps with the guided prediction and the noise of the prediction without the prompt."""
    unet, predictions = pipe.unet.forward, {}

    def forward(*args, **extra):
        out = unet(*args, **extra)
        predictions["negative"], predictions["positive"] = out[0].chunk(2)
        return out
    pipe.unet.forward, step = forward, pipe.scheduler.step

    def renoised(prediction, t, sample, **extra):
        negative, positive = predictions["negative"], predictions["positive"]
        guided = negative + part * (positive - negative)
        s = pipe.scheduler
        if isinstance(s, DDIMScheduler):
            before = t - s.config.num_train_timesteps // s.num_inference_steps
            a, b = s.alphas_cumprod[t].to(sample), (s.alphas_cumprod[before] if before >= 0 else s.final_alpha_cumprod).to(sample)
            x0 = step(guided, t, sample, **{**extra, "return_dict": True}).pred_original_sample
            noise = a.sqrt() * negative + (1 - a).sqrt() * sample if s.config.prediction_type == "v_prediction" else negative
            return (b.sqrt() * x0 + (1 - b).sqrt() * noise,)
        if s.step_index is None:
            s._init_step_index(t)
        sigma, after = s.sigmas[s.step_index].to(sample), s.sigmas[s.step_index + 1].to(sample)
        s._step_index += 1
        return (sample - sigma * guided + after * negative,)
    renoised.__signature__ = inspect.signature(step)  # the pipeline reads it
    pipe.scheduler.step = renoised
    yield
    del pipe.unet.forward, pipe.scheduler.step


@contextlib.contextmanager
def without_layers(pipe, a, guidance_scale):
    """Skip-layer guidance with diffusers' guider and hook: replaces the prediction with the prompt so that the pipeline's
    guidance yields the guider's result."""
    layers = a.pop("skip_layer_guidance_layers")
    guider = SkipLayerGuidance(guidance_scale, a.pop("skip_layer_guidance_scale"), a.pop("skip_layer_guidance_start", 0.01),
                               a.pop("skip_layer_guidance_stop", 0.2), layers)
    transformer, calls = pipe.transformer.forward, 0
    each = 2 if guidance_scale > 1 else 1

    def forward(*args, **extra):
        nonlocal calls
        step, without_prompt = divmod(calls, each)
        calls += 1
        out = transformer(*args, **extra)
        guider.set_state(step=step, num_inference_steps=a["num_inference_steps"], timestep=None)
        if without_prompt or not guider._is_slg_enabled():
            return out
        _apply_layer_skip_hook(pipe.transformer, LayerSkipConfig(layers, fqn="blocks"), "skip")
        skipped = transformer(*args, **extra)[0]
        HookRegistry.check_if_exists_or_initialize(pipe.transformer).remove_hook("skip", recurse=True)
        zero = torch.zeros_like(skipped)
        guided = guider.forward(out[0], *([zero] if each == 2 else [None]), skipped).pred
        return (guided / guidance_scale if each == 2 else guided,)
    pipe.transformer.forward = forward
    yield
    del pipe.transformer.forward


def run(pipes, case, dtype):
    folder, members, _ = CASES[case]
    a = arguments(case)
    pipe = pipes(folder, a.pop("pag_applied_layers", "mid" if "pag_scale" in a else None))
    pipe.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    saved, pipe.scheduler = pipe.scheduler, scheduler_of(pipe, members)
    count = len(a["prompt"]) if isinstance(a["prompt"], list) else 1
    if isinstance(a["prompt"], list):
        a["negative_prompt"] = [a["negative_prompt"]] * count
    shape = (count, 4, 2, a["height"] // 8, a["width"] // 8) if folder == "wan" else (count, 4, a["height"] // 2, a["width"] // 2)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(sum(map(ord, case))))
    with kept_precision(), contextlib.ExitStack() as stack:
        if "freeu" in a:
            pipe.enable_freeu(*a.pop("freeu"))
            stack.callback(pipe.disable_freeu)
        if "cfg_pp_lambda" in a:
            stack.enter_context(without_noise_of_the_prompt(pipe, a.pop("cfg_pp_lambda")))
        if "skip_layer_guidance_scale" in a:
            stack.enter_context(without_layers(pipe, a, a["guidance_scale"]))
        out = pipe(**a, latents=noise.to(dtype), output_type="latent")
        latents = (out.frames if folder == "wan" else out.images).float()
    pipe.scheduler = saved
    return {"noise": noise, "latents": latents}


def words_of(case):
    folder, members, extra = CASES[case]
    a = arguments(case)
    words = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in a.items()]
    if "cfg_pp_lambda" in a:
        words.append("guidance_method=cfg_pp")
    if members:
        words.append("diffusion_scheduler_config=" + json.dumps(members))
    return {"name": "guided_" + case, "same_as": case, "folder": "../" + FOLDERS[folder], "words": words}


def main():
    if not hasattr(CLIPTextModel, "text_model"):
        CLIPTextModel.text_model = property(lambda self: self)
    loaded = {}

    def pipes(folder, layers):
        name = (folder, str(layers))
        if name not in loaded:
            kind, extra = (PAG[folder], {"pag_applied_layers": layers}) if layers else (PIPELINES[folder], {})
            loaded[name] = kind.from_pretrained(GOLDEN / FOLDERS[folder], torch_dtype=torch.float32, **extra)
        return loaded[name]
    record(GOLDEN / "guided", {}, CASES, lambda case, dtype: run(pipes, case, dtype), words_of)


if __name__ == "__main__":
    main()
