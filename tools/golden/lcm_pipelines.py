"""Writes the goldens of latent consistency models (LCM): UNets with an embedding of the guidance scale (time_cond_proj_dim).

tests/golden/lcm/ gets
  lcm/                      a Stable Diffusion folder of such a UNet, with LCMScheduler; weights are bf16 numbers
  cases.json                name, folder, and the words of the command that should give the same
  golden.safetensors        <case>.noise  the initial noise, NCHW; <case>.latents
                            metadata: noise_floor.<case>, the distance of the same run in float64
All in float32 on the CPU. LCMScheduler adds noise between its steps, so that its cases have one step.

    python tools/golden/lcm_pipelines.py [CASE …]
"""

import json
import pathlib

import torch
from diffusers import DDIMScheduler, LatentConsistencyModelPipeline, LCMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextModel

from flux_pipelines import kept_precision, record
from pipelines import CROSS_DOWN, CROSS_UP, randomize

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
ROOT = GOLDEN / "lcm"
DDIM = {"_class_name": "DDIMScheduler", "timestep_spacing": "trailing"}
# name: (members of the scheduler's config, arguments of the pipeline)
CASES = {
    "lcm": ({}, dict(num_inference_steps=1, guidance_scale=8.5)),
    "lcm_weak": ({}, dict(num_inference_steps=1, guidance_scale=1.0)),
    "ddim": (DDIM, dict(num_inference_steps=4, guidance_scale=5.0)),
    "ddim_two_prompts": (DDIM, dict(prompt=["red heart", "blue"], num_inference_steps=3, guidance_scale=3.0, width=24)),
}


def arguments(case):
    return {"prompt": "a red heart", "height": 16, "width": 16, **CASES[case][1]}


def run(pipe, case, dtype):
    members, a = CASES[case][0], arguments(case)
    if members:  # diffusers' pipeline of LCM takes no other scheduler; that of Stable Diffusion feeds the scale alike
        config = {k: v for k, v in members.items() if k != "_class_name"}
        scheduler = DDIMScheduler.from_config(pipe.scheduler.config, **config)
        parts = pipe.components | {"scheduler": scheduler}
        pipe = StableDiffusionPipeline(**parts, requires_safety_checker=False)
    pipe.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    count = len(a["prompt"]) if isinstance(a["prompt"], list) else 1
    noise = torch.randn(count, 4, a["height"] // 2, a["width"] // 2,
                        generator=torch.Generator().manual_seed(sum(map(ord, case))))
    with kept_precision():
        latents = pipe(**a, latents=noise.to(dtype), output_type="latent").images.float()
    return {"noise": noise, "latents": latents}


def words_of(case):
    words = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in arguments(case).items()]
    if CASES[case][0]:
        words.append("diffusion_scheduler_config=" + json.dumps(CASES[case][0]))
    return {"name": "lcm_" + case, "same_as": case, "folder": "lcm", "words": words}


def main():
    if not hasattr(CLIPTextModel, "text_model"):
        CLIPTextModel.text_model = property(lambda self: self)
    unet = randomize(UNet2DConditionModel(
        time_cond_proj_dim=12, block_out_channels=[8, 16], down_block_types=[CROSS_DOWN, "DownBlock2D"],
        up_block_types=["UpBlock2D", CROSS_UP], layers_per_block=1, attention_head_dim=2, cross_attention_dim=16,
        norm_num_groups=4, sample_size=8), torch.Generator().manual_seed(43))
    parts = StableDiffusionPipeline.from_pretrained(GOLDEN / "pipelines" / "sd", torch_dtype=torch.float32).components
    parts |= {"unet": unet, "scheduler": LCMScheduler.from_config(parts["scheduler"].config)}
    pipe = LatentConsistencyModelPipeline(**parts, requires_safety_checker=False)
    record(ROOT, {"lcm": pipe}, CASES, lambda case, dtype: run(pipe, case, dtype), words_of)


if __name__ == "__main__":
    main()
