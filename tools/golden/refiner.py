"""Writes the goldens of SDXL's refiner: diffusers' two pipelines in sequence, with the folder of another golden.

tests/golden/refiner/ gets
  refiner/             a StableDiffusionXLImg2ImgPipeline with the second text encoder alone and aesthetic scores; weights
                       are bf16 numbers
  cases.json           name, folder, and the words of the command that should give the same
  golden.safetensors   <case>.noise  what the base begins with, or what the image gets; <case>.latents; <case>.images
                       photo  u8 [H, W, 3]
                       metadata: noise_floor.<case>, the distance of the same run in float64
All in float32 on the CPU. The pipelines take a random latent of the autoencoder's posterior; here they take its mode.

    python tools/golden/refiner.py [CASE …]
"""

import json
import pathlib

import torch
from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline, UNet2DConditionModel
from PIL import Image
from transformers import CLIPTextModel

from flux_pipelines import kept_precision, record
from image_to_image import PICTURES, patched, sampler
from pipelines import CROSS_DOWN, CROSS_UP, randomize, scheduler_of

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
ROOT = GOLDEN / "refiner"
COMMON = dict(prompt="a red heart", num_inference_steps=10, guidance_scale=5.0, height=16, width=24)
# name: (whether the base comes first, scheduler's members of both, arguments)
CASES = {
    "default": (True, {}, dict(denoising_end=0.8)),
    "early": (True, {}, dict(denoising_end=0.45, negative_prompt="purple", aesthetic_score=7.5,
                             negative_aesthetic_score=1.5)),
    "ddim": (True, sampler("DDIM"), dict(denoising_end=0.7, num_images_per_prompt=2)),
    # A step of the model is exactly at the switch: 301.
    "at_a_step": (True, sampler("DDIM"), dict(denoising_end=0.699)),
    "dpmpp_2m": (True, sampler("DPMSolverMultistep"), dict(denoising_end=0.6)),
    "base_alone": (True, {}, dict(denoising_end=0.6, alone=True)),
    "image": (False, {}, dict(strength=0.5, aesthetic_score=4.0)),
    "image_from_within": (False, {}, dict(denoising_start=0.6)),  # the image gets no noise
}
SCORES = ("aesthetic_score", "negative_aesthetic_score")


def make():
    base = StableDiffusionXLPipeline.from_pretrained(GOLDEN / "pipelines" / "sdxl", torch_dtype=torch.float32)
    width = base.text_encoder_2.config.hidden_size
    unet = randomize(UNet2DConditionModel(
        block_out_channels=[8, 16], down_block_types=["DownBlock2D", CROSS_DOWN], up_block_types=[CROSS_UP, "UpBlock2D"],
        layers_per_block=1, attention_head_dim=[1, 2], transformer_layers_per_block=[1, 1], cross_attention_dim=width,
        use_linear_projection=True, norm_num_groups=4, addition_embed_type="text_time", addition_time_embed_dim=6,
        projection_class_embeddings_input_dim=16 + 5 * 6, sample_size=8), torch.Generator().manual_seed(41))
    refiner = StableDiffusionXLImg2ImgPipeline(
        vae=base.vae, text_encoder=None, text_encoder_2=base.text_encoder_2, tokenizer=None, tokenizer_2=base.tokenizer_2,
        unet=unet, scheduler=base.scheduler, requires_aesthetics_score=True, force_zeros_for_empty_prompt=False,
        add_watermarker=False)
    for pipe in (base, refiner):
        pipe.vae.register_to_config(force_upcast=False)
        pipe.set_progress_bar_config(disable=True)
    return base, refiner


def run(base, refiner, case, dtype):
    first, members, extra = CASES[case]
    a = dict(COMMON, **extra)
    alone = a.pop("alone", False)
    base.to(dtype), refiner.to(dtype)
    saved = base.scheduler
    count, h, w = a.get("num_images_per_prompt", 1), a["height"] // 2, a["width"] // 2
    noise = torch.randn(count, 4, h, w, generator=torch.Generator().manual_seed(sum(map(ord, case))))
    out = {"noise": noise}
    with kept_precision():
        def twice(kind):
            base.scheduler, refiner.scheduler = scheduler_of(base, members), scheduler_of(base, members)
            b = dict(a)
            if first:
                scores = {k: b.pop(k) for k in SCORES if k in b}
                latents = base(**b, latents=noise.to(dtype), output_type="latent").images
                base.scheduler = saved
                if alone:
                    return latents
                end = b.pop("denoising_end")
                for k in ("height", "width"):
                    b.pop(k)
                return refiner(**b, **scores, image=latents, denoising_start=end, output_type=kind).images
            patched(refiner, noise)
            image = Image.fromarray(PICTURES["photo"].numpy()).resize((b.pop("width"), b.pop("height")), Image.LANCZOS)
            images = refiner(**b, image=image, output_type=kind).images
            base.scheduler = saved
            return images

        out["latents"] = twice("latent").float()
        if not alone:
            out["images"] = twice("pt").movedim(1, -1).float()
    base.scheduler = saved
    return out


def words_of(case):
    first, members, extra = CASES[case]
    a = dict(COMMON, **extra)
    alone = a.pop("alone", False)
    words = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in a.items()]
    words += ["image={}/photo.png"] if not first else [] if alone else ["refiner={}/refiner"]
    if members:
        words.append("diffusion_scheduler_config=" + json.dumps(members))
    return {"name": "refiner_" + case, "same_as": case, "folder": "../pipelines/sdxl" if first else "refiner",
            "words": words}


def main():
    if not hasattr(CLIPTextModel, "text_model"):
        CLIPTextModel.text_model = property(lambda self: self)
    base, refiner = make()
    record(ROOT, {"refiner": refiner}, CASES, lambda case, dtype: run(base, refiner, case, dtype), words_of,
           {"photo": PICTURES["photo"]})


if __name__ == "__main__":
    main()
