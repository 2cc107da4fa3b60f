"""Writes the goldens of image to image and of inpainting: results of diffusers' pipelines for an image, with the folders of
other goldens.

tests/golden/image_to_image/ gets
  flux_fill/                a FLUX.1 folder whose transformer takes a mask and the masked image; written if it is absent
  inpainting/               a Stable Diffusion folder whose UNet takes a mask and the masked image; weights are bf16 numbers
  cases.json                name, folder (of another golden), and the words of the command that should give the same
  golden.safetensors        <case>.noise  the noise that the image gets, NCHW; <case>.latents; <case>.images
                            photo, other, mask, white  u8 [H, W, 3], the images
                            metadata: noise_floor.<case>, the distance of the same run in float64
All in float32 on the CPU. The pipelines take a random latent of the autoencoder's posterior; here they take its mode.

    python tools/golden/image_to_image.py [CASE …]
"""

import json
import pathlib
import sys

import numpy
import torch
from diffusers import (Flux2KleinInpaintPipeline, FluxFillPipeline, FluxImg2ImgPipeline, FluxInpaintPipeline,
                       FluxTransformer2DModel, QwenImageImg2ImgPipeline, QwenImageInpaintPipeline, StableDiffusionImg2ImgPipeline,
                       StableDiffusionInpaintPipeline, StableDiffusionXLImg2ImgPipeline, StableDiffusionXLInpaintPipeline,
                       UNet2DConditionModel, ZImageImg2ImgPipeline, ZImageInpaintPipeline)
from PIL import Image
from transformers import CLIPTextModel

from flux_pipelines import kept_precision, record
from flux2_pipelines import LAYERS
from pipelines import CROSS_DOWN, CROSS_UP, randomize, scheduler_of
import flux_pipelines

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
ROOT = GOLDEN / "image_to_image"
FOLDERS = {"sd": "pipelines/sd", "sdxl": "pipelines/sdxl", "flux": "flux/dev", "z_image": "zimage/base",
           "qwen_image": "qwenimage/base", "flux2": "flux2/base", "inpainting": "image_to_image/inpainting",
           "flux_fill": "image_to_image/flux_fill"}
PIPELINES = {"sd": StableDiffusionImg2ImgPipeline, "sdxl": StableDiffusionXLImg2ImgPipeline, "flux": FluxImg2ImgPipeline,
             "z_image": ZImageImg2ImgPipeline, "qwen_image": QwenImageImg2ImgPipeline}
INPAINTING = {"sd": StableDiffusionInpaintPipeline, "sdxl": StableDiffusionXLInpaintPipeline, "flux": FluxInpaintPipeline,
              "z_image": ZImageInpaintPipeline, "qwen_image": QwenImageInpaintPipeline, "flux2": Flux2KleinInpaintPipeline,
              "inpainting": StableDiffusionInpaintPipeline, "flux_fill": FluxFillPipeline}
DEFAULTS = {
    "sd": dict(num_inference_steps=8, guidance_scale=7.5, height=16, width=16),
    "sdxl": dict(num_inference_steps=8, guidance_scale=7.5, height=16, width=16),
    "flux": dict(num_inference_steps=5, guidance_scale=3.5, height=32, width=32, max_sequence_length=24),
    "z_image": dict(num_inference_steps=5, guidance_scale=2.0, height=32, width=32, max_sequence_length=64),
    "qwen_image": dict(num_inference_steps=5, true_cfg_scale=3.0, negative_prompt="grey", height=32, width=32,
                       max_sequence_length=64),
}


def sampler(name, **extra):
    return dict(_class_name=name + "Scheduler", **extra)


DEFAULTS["inpainting"] = DEFAULTS["sd"]
DEFAULTS["flux_fill"] = dict(DEFAULTS["flux"], guidance_scale=30.0)
DEFAULTS["flux2"] = dict(num_inference_steps=4, guidance_scale=2.0, height=48, width=32, text_encoder_out_layers=LAYERS)
OWN = dict(height=None, width=None)  # the size of the image, rounded down
# name: (folder, members of the scheduler's config, arguments of the pipeline, pictures too)
CASES = {
    "sd": ("sd", {}, {}, True),  # PNDM and a strength of 0.8, as published
    "sd_euler": ("sd", sampler("EulerDiscrete", timestep_spacing="leading"), dict(strength=0.5), False),
    "sd_dpmpp_2m": ("sd", sampler("DPMSolverMultistep"), dict(strength=0.7), False),
    "sd_heun": ("sd", sampler("HeunDiscrete"), dict(strength=0.6), False),
    "sd_ddim": ("sd", sampler("DDIM"), dict(strength=0.55, negative_prompt="purple"), False),
    "sd_unipc": ("sd", sampler("UniPCMultistep"), dict(strength=0.75), False),
    # One step, the last: it adds no noise.
    "sd_euler_ancestral": ("sd", sampler("EulerAncestralDiscrete"), dict(strength=0.125), False),
    "sd_whole_strength": ("sd", sampler("DDIM"), dict(strength=1.0), False),
    "sd_own_size": ("sd", sampler("DDIM"), dict(strength=0.5, **OWN), True),
    "sd_two_prompts": ("sd", sampler("DDIM"), dict(prompt=["red heart", "blue"], num_images_per_prompt=2, width=24),
                       False),
    "sd_two_images": ("sd", sampler("DDIM"), dict(prompt=["red heart", "blue"], images=["photo", "other"]), False),
    "sdxl": ("sdxl", {}, dict(num_inference_steps=20), True),  # Euler and a strength of 0.3
    "sdxl_dpmpp_2m_karras": ("sdxl", sampler("DPMSolverMultistep", use_karras_sigmas=True),
                             dict(strength=0.6, negative_prompt="purple"), False),
    "sdxl_own_size": ("sdxl", {}, dict(strength=0.5, **OWN), False),
    "flux": ("flux", {}, {}, True),
    # 5 steps; skipping 2.75 of them leaves 2.
    "flux_part_of_a_step": ("flux", {}, dict(strength=0.45, height=48), False),
    "z_image": ("z_image", {}, dict(num_inference_steps=4), True),
    "z_image_strong": ("z_image", {}, dict(strength=0.9, negative_prompt="grey", **OWN), False),
    "qwen_image": ("qwen_image", {}, {}, True),
    "qwen_image_weak": ("qwen_image", {}, dict(strength=0.35, height=48), False),
    # With a mask.
    "sd_masked": ("sd", {}, dict(mask="mask"), True),
    "sd_masked_euler": ("sd", sampler("EulerDiscrete", timestep_spacing="leading"), dict(mask="mask", strength=0.6), False),
    "sd_masked_heun": ("sd", sampler("HeunDiscrete"), dict(mask="mask", strength=0.5), False),
    "sd_masked_dpmpp_2m": ("sd", sampler("DPMSolverMultistep"), dict(mask="mask", strength=1.0, height=24), False),
    "sd_masked_crop": ("sd", sampler("DDIM"), dict(mask="white", padding_mask_crop=3, height=32, width=32), True),
    "sd_masked_batch": ("sd", sampler("DDIM"), dict(mask="mask", prompt=["red heart", "blue"], num_images_per_prompt=2),
                        False),
    "sdxl_masked": ("sdxl", {}, dict(mask="mask"), True),
    "flux_masked": ("flux", {}, dict(mask="mask"), True),
    "z_image_masked": ("z_image", {}, dict(mask="mask", strength=0.7), False),
    "qwen_image_masked": ("qwen_image", {}, dict(mask="mask"), False),
    "flux2_masked": ("flux2", {}, dict(mask="mask"), False),
    "inpainting": ("inpainting", {}, dict(mask="mask"), True),
    "inpainting_weak": ("inpainting", sampler("EulerDiscrete"), dict(mask="mask", strength=0.5, negative_prompt="grey"),
                        False),
    "flux_fill": ("flux_fill", {}, dict(mask="mask"), False),
    "flux_fill_weak": ("flux_fill", {}, dict(mask="mask", strength=0.6, prompt=["red heart", "blue"], height=48), False),
}


def make_images():
    generator = torch.Generator().manual_seed(5)
    smooth = lambda h, w: torch.nn.functional.interpolate(
        torch.rand(1, 3, 4, 5, generator=generator), (h, w), mode="bicubic")[0].clamp(0, 1)
    return {name: (smooth(h, w) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()
            for name, h, w in (("photo", 37, 50), ("other", 24, 24))}


PICTURES = make_images()
# A grey gradient; the mask is its part that is at least half white.
PICTURES["mask"] = torch.zeros(37, 50, 3, dtype=torch.uint8)
PICTURES["mask"][8:21, 5:30] = (torch.arange(25) * 10 + 15).to(torch.uint8)[None, :, None]
PICTURES["white"] = (PICTURES["mask"] > 0).to(torch.uint8) * 255


def arguments(case):
    folder, _, extra, _ = CASES[case]
    a = {"prompt": "a red heart", **DEFAULTS[folder], **extra}
    return {k: v for k, v in a.items() if v is not None}


def patched(pipe, noise):
    """Makes the pipeline use this noise, and the mode of the latent distribution."""
    module = sys.modules[type(pipe).__module__]
    module.randn_tensor = lambda shape, dtype=None, **_: noise.reshape(shape).to(dtype)
    module.retrieve_latents = lambda out, generator=None, sample_mode=None: out.latent_dist.mode()


def run(pipes, case, dtype):
    folder, members, _, media = CASES[case]
    a = arguments(case)
    masked = a.pop("mask", False)
    pipe = pipes(folder, masked)
    pipe.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    saved, pipe.scheduler = pipe.scheduler, scheduler_of(pipe, members)
    scale = getattr(pipe, "vae_scale_factor", 8)
    images = [Image.fromarray(PICTURES[name].numpy()) for name in a.pop("images", ["photo"])]
    multiple = scale * (1 if folder.startswith("sd") else 2)
    height, width = a.pop("height", images[0].height), a.pop("width", images[0].width)
    height, width = height // multiple * multiple, width // multiple * multiple
    if "padding_mask_crop" not in a:
        images = [image.resize((width, height), Image.LANCZOS) for image in images]
    if folder != "flux2" and (masked or not folder.startswith("sd")):
        a |= dict(height=height, width=width)
    if masked:
        a["mask_image"] = Image.fromarray(PICTURES[masked].numpy())
        if "padding_mask_crop" not in a:
            a["mask_image"] = a["mask_image"].resize((width, height), Image.LANCZOS)
    count = (len(a["prompt"]) if isinstance(a["prompt"], list) else 1) * a.get("num_images_per_prompt", 1)
    channels = pipe.vae.config.get("latent_channels") or pipe.vae.config.z_dim
    patch = 2 if folder == "flux2" else 1
    noise = torch.randn(count, channels * patch**2, height // scale // patch, width // scale // patch,
                        generator=torch.Generator().manual_seed(sum(map(ord, case))))
    patched(pipe, noise)
    out = {"noise": noise}
    with kept_precision():
        if "padding_mask_crop" in a:  # the pipeline returns only whole images
            last = {}
            a["callback_on_step_end"] = lambda p, step, t, state: last.update(state) or {}
            image = pipe(**a, image=images[0]).images[0]
            out["latents"] = last["latents"].float()
            out["images"] = torch.from_numpy(numpy.array(image)[None]).float() / 255
        else:
            latents = pipe(**a, image=images if len(images) > 1 else images[0], output_type="latent").images
            if latents.ndim == 3:
                latents = type(pipe)._unpack_latents(latents, height, width, scale)
                latents = latents.squeeze(2) if latents.ndim == 5 else latents
            out["latents"] = latents.float()
            if media:
                out["images"] = pipe(**a, image=images[0], output_type="pt").images.movedim(1, -1).float()
    pipe.scheduler = saved
    return out


def words_of(case):
    folder, members, _, _ = CASES[case]
    a = arguments(case)
    masked = a.pop("mask", False)
    words = ["image=" + ",".join("{}/" + name + ".png" for name in a.pop("images", ["photo"]))]
    words += [f"mask_image={{}}/{masked}.png"] if masked else []
    words += [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in a.items()]
    if members:
        words.append("diffusion_scheduler_config=" + json.dumps(members))
    return {"name": "image_to_image_" + case, "same_as": case, "folder": "../" + FOLDERS[folder], "words": words}


def main():
    if not hasattr(CLIPTextModel, "text_model"):
        CLIPTextModel.text_model = property(lambda self: self)
    loaded = {}

    def pipes(folder, masked):
        if (folder, bool(masked)) not in loaded:
            kind = (INPAINTING if masked else PIPELINES)[folder]
            extra = {"inpainting": {"unet": inpainting.unet}, "flux_fill": {"transformer": filling}}.get(folder, {})
            base = FOLDERS["flux" if folder == "flux_fill" else "sd" if extra else folder]
            pipe = kind.from_pretrained(GOLDEN / base, torch_dtype=torch.float32, **extra)
            if folder == "sdxl":  # its autoencoder has the dtype of the run
                pipe.vae.register_to_config(force_upcast=False)
            loaded[folder, bool(masked)] = pipe
        return loaded[folder, bool(masked)]

    inpainting = StableDiffusionInpaintPipeline.from_pretrained(GOLDEN / FOLDERS["sd"], unet=randomize(UNet2DConditionModel(
        in_channels=9, block_out_channels=[8, 16], down_block_types=[CROSS_DOWN, "DownBlock2D"],
        up_block_types=["UpBlock2D", CROSS_UP], layers_per_block=1, attention_head_dim=2, cross_attention_dim=16,
        norm_num_groups=4, sample_size=8), torch.Generator().manual_seed(31)))
    filling = flux_pipelines.randomize(FluxTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, axes_dims_rope=[2, 4, 2], in_channels=2 * 64 + 4 * 4, out_channels=64,
        num_layers=2, num_single_layers=2, joint_attention_dim=12, pooled_projection_dim=16, guidance_embeds=True),
        torch.Generator().manual_seed(37))
    if not (ROOT / "flux_fill").exists():
        flux_pipelines.save(pipes("flux_fill", True), ROOT / "flux_fill")
    record(ROOT, {"inpainting": inpainting}, CASES, lambda case, dtype: run(pipes, case, dtype), words_of, PICTURES)


if __name__ == "__main__":
    main()
