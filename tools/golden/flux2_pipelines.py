"""Writes the goldens of FLUX.2-klein: tiny random folders, and the samples of diffusers' pipeline.

tests/golden/flux2/ gets
  base/, distilled/         model folders as diffusers saves them; weights are bf16 numbers. The second is guided by none
  cases.json                name, folder, and the words of the command that should sample the same
  golden.safetensors        <case>.noise  what the pipeline starts from, of patches, NCHW, standard normal
                            <case>.latents, as the autoencoder decodes them, NCHW
                            <case>.images, NHWC in [0, 1]
                            reference0, reference1  u8 [H, W, 3], reference images
                            metadata: noise_floor.<case>, the distance of the same run in float64
All in float32 on the CPU. The tokenizer is Z-Image's (tests/golden/zimage), which has Qwen3's chat template.

    python tools/golden/flux2_pipelines.py [CASE ...]      cases that are not named, and folders, stay as they are
"""

import json
import pathlib

import torch
from diffusers import AutoencoderKLFlux2, FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, Flux2Transformer2DModel
from PIL import Image
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

from flux_pipelines import kept_precision, record
from models import measured
from z_image_pipelines import randomize

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
ROOT = GOLDEN / "flux2"
LAYERS = [1, 2, 3]  # of the text encoder, instead of 9, 18 and 27
SCALE = 2  # of the autoencoder, without patches


def make(generator, distilled):
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "zimage" / "base" / "tokenizer")
    encoder = Qwen3ForCausalLM(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=8, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}))
    transformer = Flux2Transformer2DModel(
        num_attention_heads=2, attention_head_dim=16, axes_dims_rope=[4, 4, 4, 4], in_channels=16, num_layers=2,
        num_single_layers=2, joint_attention_dim=24, guidance_embeds=False, timestep_guidance_channels=32)
    vae = AutoencoderKLFlux2(
        block_out_channels=[8, 16], down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
        layers_per_block=1, norm_num_groups=4, latent_channels=4, sample_size=64)
    measured(vae, generator)
    return Flux2KleinPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=3.0, use_dynamic_shifting=True),
        vae=randomize(vae, generator), text_encoder=randomize(encoder, generator), tokenizer=tokenizer,
        transformer=randomize(transformer, generator), is_distilled=distilled)


LONG = "a red heart on a blue car beside 3 rivers, cinematic light, " * 4
# Patches divide neither size.
SIZES = {"reference0": (66, 81), "reference1": (101, 70)}
# name: (folder, arguments of the pipeline, whether images are decoded)
CASES = {
    "base": ("base", dict(guidance_scale=4.0), True),
    "base_unguided": ("base", dict(guidance_scale=1.0), False),
    # Texts of different lengths, two images each; more columns than rows.
    "base_batch": ("base", dict(prompt=["red heart", LONG], num_images_per_prompt=2, width=48, guidance_scale=3.0), False),
    # A truncated text; other layers.
    "base_cut": ("base", dict(prompt=LONG, max_sequence_length=40, text_encoder_out_layers=[4, 2, 0],
                              guidance_scale=4.0), False),
    "base_reference": ("base", dict(image=["reference0"], guidance_scale=2.5), False),
    "distilled": ("distilled", dict(), True),
    "distilled_batch": ("distilled", dict(prompt=["", "blue"], height=52), False),
    "distilled_references": ("distilled", dict(image=["reference0", "reference1"], num_images_per_prompt=2), True),
    # Enough tokens that the shift does not depend on the number of steps.
    "distilled_large": ("distilled", dict(height=264, width=268, num_inference_steps=2), False),
}


def reference(name, sizes=SIZES):
    height, width = sizes[name]
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    colors = [3 * y + x, 5 * x, 2 * (x + y) + 40 * (len(name) + int(name[-1]))]
    return torch.stack([c % 256 for c in colors], -1).to(torch.uint8)


def arguments(case):
    return dict(dict(prompt="a red heart", num_inference_steps=4, height=32, width=32, text_encoder_out_layers=LAYERS),
                **CASES[case][1])


def run(pipes, case, dtype):
    folder, _, decodes = CASES[case]
    a = arguments(case)
    pipe = pipes[folder]
    pipe.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    if "image" in a:
        a["image"] = [Image.fromarray(reference(name).numpy()) for name in a["image"]]
    count = (len(a["prompt"]) if isinstance(a["prompt"], list) else 1) * a.get("num_images_per_prompt", 1)
    noise = torch.randn(count, 16, a["height"] // SCALE // 2, a["width"] // SCALE // 2,
                        generator=torch.Generator().manual_seed(sum(map(ord, case))))
    out = {"noise": noise}
    with kept_precision():
        out["latents"] = pipe(**a, latents=noise, output_type="latent").images.float()
        if decodes:
            out["images"] = pipe(**a, latents=noise, output_type="pt").images.movedim(1, -1).float()
    return out


def words_of(case):
    def one(key, v):
        if key == "image":
            return ",".join(f"{{}}/{name}.png" for name in v)
        return v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)
    return {"name": case, "folder": CASES[case][0], "words": [f"{k}={one(k, v)}" for k, v in arguments(case).items()]}


def main():
    pipes = {name: make(torch.Generator().manual_seed(29 + name.startswith("d")), name == "distilled")
             for name in ("base", "distilled")}
    record(ROOT, pipes, CASES, lambda case, dtype: run(pipes, case, dtype), words_of,
           {name: reference(name) for name in SIZES})


if __name__ == "__main__":
    main()
