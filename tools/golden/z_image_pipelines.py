"""Writes the goldens of Z-Image: a tiny random folder, and what diffusers' pipeline makes with it.

tests/golden/zimage/ gets
  base/                     a model folder as diffusers saves it; weights are bf16 numbers. Turbo's differs in the shift
                            of its scheduler, and so is this folder with flow_shift=3
  cases.json                name, folder, and the words of the command that should sample the same
  golden.safetensors        <case>.noise  what the pipeline starts from, NCHW, standard normal
                            <case>.latents, before the autoencoder, NCHW, as scaled for the transformer
                            <case>.images, NHWC in [0, 1]
                            metadata: noise_floor.<case>, the distance of the same run in float64
All in float32 on the CPU. The tokenizer is that of tests/golden/data/tokenizers/qwen, with Qwen3's chat template for a
message of the user.

    python tools/golden/z_image_pipelines.py [CASE ...]      cases that are not named, and the folder, stay as they are
"""

import json
import pathlib

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, ZImagePipeline, ZImageTransformer2DModel
from transformers import AutoTokenizer, Qwen3Config, Qwen3Model

from flux_pipelines import kept_precision, record

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
ROOT = GOLDEN / "zimage"
SHIFT, TURBO_SHIFT = 6.0, 3.0
SCALE = 2  # of the autoencoder
TEMPLATE = ("{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
            "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
            "{% endif %}")


def randomize(model, generator):
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.ndim == 1:
            value = noise * 0.1 + (1.0 if name.endswith("weight") else 0.0)
        elif "embed_tokens" in name:
            value = noise * 0.5
        else:
            value = noise / p[0].numel() ** 0.5
        p.data = value.to(torch.bfloat16).to(torch.float32)
    return model.eval()


def make(generator):
    tokenizer = AutoTokenizer.from_pretrained(GOLDEN / "data" / "tokenizers" / "qwen")
    tokenizer.chat_template = TEMPLATE
    encoder = Qwen3Model(Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 1000000.0}))
    transformer = ZImageTransformer2DModel(
        dim=24, n_heads=2, n_kv_heads=2, axes_dims=[4, 4, 4], axes_lens=[640, 64, 64], in_channels=16, n_layers=2,
        n_refiner_layers=1, cap_feat_dim=16)
    vae = AutoencoderKL(
        block_out_channels=[8, 16], down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
        layers_per_block=1, norm_num_groups=4, latent_channels=16, sample_size=32, scaling_factor=0.3611,
        shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False)
    return ZImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=SHIFT, use_dynamic_shifting=False),
        vae=randomize(vae, generator), text_encoder=randomize(encoder, generator), tokenizer=tokenizer,
        transformer=randomize(transformer, generator))


LONG = "a red heart on a blue car beside 3 rivers, cinematic light, " * 4
# name: (arguments of the pipeline, turbo, whether images are decoded)
CASES = {
    "zimage": (dict(guidance_scale=4.0), False, True),
    "zimage_negative": (dict(negative_prompt="grey, 灰色", guidance_scale=0.5), False, False),
    "zimage_normalized": (dict(guidance_scale=5.0, cfg_normalization=True), False, False),
    "zimage_truncated": (dict(guidance_scale=5.0, cfg_truncation=0.5, num_inference_steps=8), False, False),
    # Texts of different lengths, two images each; more columns than rows.
    "zimage_batch": (dict(prompt=["red heart", LONG], num_images_per_prompt=2, width=48, guidance_scale=3.0), False, False),
    # A text that is truncated at a number of tokens that 32 does not divide.
    "zimage_cut": (dict(prompt=LONG, max_sequence_length=40, guidance_scale=2.0), False, False),
    "turbo": (dict(guidance_scale=0.0, num_inference_steps=8), True, True),
    "turbo_batch": (dict(guidance_scale=0.0, prompt=["", "blue"], height=52), True, False),
}


def arguments(case):
    return dict(dict(prompt="a red heart", num_inference_steps=4, height=32, width=32), **CASES[case][0])


def run(pipe, case, dtype):
    _, turbo, decodes = CASES[case]
    a = arguments(case)
    pipe.to(dtype)
    pipe.scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipe.scheduler.config, shift=TURBO_SHIFT if turbo else SHIFT)
    pipe.set_progress_bar_config(disable=True)
    count = (len(a["prompt"]) if isinstance(a["prompt"], list) else 1) * a.get("num_images_per_prompt", 1)
    noise = torch.randn(count, 16, a["height"] // SCALE, a["width"] // SCALE,
                        generator=torch.Generator().manual_seed(sum(map(ord, case))))
    out = {"noise": noise}
    copied = lambda: {k: list(v) if isinstance(v, list) else v for k, v in a.items()}  # the pipeline changes the list
    with kept_precision():
        out["latents"] = pipe(**copied(), latents=noise, output_type="latent").images.float()
        if decodes:
            out["images"] = pipe(**copied(), latents=noise, output_type="pt").images.movedim(1, -1).float()
    return out


def words_of(case):
    one = lambda v: v if isinstance(v, str) else json.dumps(float(v) if isinstance(v, bool) else v, ensure_ascii=False)
    words = [f"{k}={one(v)}" for k, v in arguments(case).items()]
    return {"name": case, "folder": "base", "words": words + (["flow_shift=3"] if CASES[case][1] else [])}


def main():
    pipe = make(torch.Generator().manual_seed(23))
    record(ROOT, {"base": pipe}, CASES, lambda case, dtype: run(pipe, case, dtype), words_of)


if __name__ == "__main__":
    main()
