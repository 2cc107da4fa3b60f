"""Writes the goldens of Qwen-Image: a tiny random folder, and the samples of diffusers' pipeline.

tests/golden/qwenimage/ gets
  base/                     a model folder as diffusers saves it; weights are bf16 numbers
  cases.json                name, folder, and the words of the command that should sample the same
  golden.safetensors        <case>.noise  what the pipeline starts from, NCHW (not packed), standard normal
                            <case>.latents, before the autoencoder, NCHW, as scaled for the transformer
                            <case>.images, NHWC in [0, 1]
                            metadata: noise_floor.<case>, the distance of the same run in float64
All in float32 on the CPU. The tokenizer has Qwen's steps and so many words that the part of the pipeline's template before
the prompt is 34 tokens, as in the published one.

    python tools/golden/qwen_image_pipelines.py [CASE ...]   cases that are not named, and the folder, stay as they are
"""

import json
import pathlib

import torch
from diffusers import (AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImagePipeline,
                       QwenImageTransformer2DModel)
from tokenizers import AddedToken, models, normalizers, pre_tokenizers
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

import json_tokenizers
from flux_pipelines import kept_precision, record
from z_image_pipelines import LONG, randomize

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
ROOT = GOLDEN / "qwenimage"
# As published.
SHIFTED = dict(base_image_seq_len=256, base_shift=0.5, max_image_seq_len=8192, max_shift=0.9, num_train_timesteps=1000,
               shift=1.0, shift_terminal=0.02, time_shift_type="exponential", use_dynamic_shifting=True)
SCALE = 2  # of the autoencoder


def tokenizer(template):
    """Byte pairs trained on the template's words."""
    json_tokenizers.corpus = lambda: [template.replace("{}", "")] * 8 + [LONG]
    t = json_tokenizers.trained(models.BPE(), normalizers.NFC(), json_tokenizers.qwen_steps(), 700,
                                initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    model = json.loads(t.to_str())["model"]
    q = Qwen2Tokenizer(vocab=model["vocab"], merges=[tuple(m) for m in model["merges"]])
    q.add_tokens([AddedToken(t, special=True, normalized=False) for t in ("<|im_start|>", "<|im_end|>")])
    return q


def make(generator):
    parts = QwenImagePipeline(scheduler=None, vae=None, text_encoder=None, tokenizer=None, transformer=None)
    words = tokenizer(parts.prompt_template_encode)
    dropped = words(parts.prompt_template_encode.split("{}")[0]).input_ids
    assert len(dropped) == parts.prompt_template_encode_start_idx, words.convert_ids_to_tokens(dropped)
    encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(
        text_config=dict(vocab_size=len(words), hidden_size=16, intermediate_size=24, num_hidden_layers=2,
                         num_attention_heads=2, num_key_value_heads=1, rms_norm_eps=1e-6,
                         rope_parameters={"rope_type": "default", "rope_theta": 1000000.0, "mrope_section": [2, 1, 1]}),
        vision_config=dict(depth=1, hidden_size=8, intermediate_size=8, num_heads=1, out_hidden_size=16, patch_size=2,
                           window_size=4, fullatt_block_indexes=[0])))
    transformer = QwenImageTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, axes_dims_rope=[2, 4, 2], in_channels=64, out_channels=16,
        num_layers=2, joint_attention_dim=16)
    vae = AutoencoderKLQwenImage(base_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True])
    return QwenImagePipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(**SHIFTED), vae=randomize(vae, generator),
        text_encoder=randomize(encoder, generator), tokenizer=words, transformer=randomize(transformer, generator))


# name: (arguments of the pipeline, whether images are decoded)
CASES = {
    "qwen_image": (dict(true_cfg_scale=1.0), True),
    "qwen_image_guided": (dict(negative_prompt="grey, 灰色", true_cfg_scale=4.0), True),
    # Texts of different lengths; more columns than rows.
    "qwen_image_batch": (dict(prompt=["red heart", LONG], negative_prompt=["", "blue"], width=48, true_cfg_scale=2.5), False),
    # Not with two prompts: diffusers 0.42 uses another prompt's mask for the second image of each.
    "qwen_image_pair": (dict(negative_prompt="grey", num_images_per_prompt=2, true_cfg_scale=2.0), False),
    # Enough tokens for another schedule.
    "qwen_image_large": (dict(height=64, width=100, num_inference_steps=3, negative_prompt=" ", true_cfg_scale=2.0), False),
    # An odd number of rows of tokens.
    "qwen_image_odd": (dict(height=20, width=36, num_inference_steps=8, true_cfg_scale=1.0), True),
    "qwen_image_cut": (dict(prompt=LONG, max_sequence_length=20, negative_prompt=LONG + LONG, true_cfg_scale=3.0), False),
}


def arguments(case):
    return dict(dict(prompt="a red heart", num_inference_steps=4, height=32, width=32), **CASES[case][0])


def run(pipe, case, dtype):
    a = arguments(case)
    pipe.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    count = (len(a["prompt"]) if isinstance(a["prompt"], list) else 1) * a.get("num_images_per_prompt", 1)
    height, width = a["height"] // SCALE, a["width"] // SCALE
    noise = torch.randn(count, 16, height, width, generator=torch.Generator().manual_seed(sum(map(ord, case))))
    packed = QwenImagePipeline._pack_latents(noise.to(dtype), count, 16, height, width)
    out = {"noise": noise}
    with kept_precision():
        latents = pipe(**a, latents=packed, output_type="latent").images
        out["latents"] = QwenImagePipeline._unpack_latents(latents, a["height"], a["width"], SCALE).squeeze(2).float()
        if CASES[case][1]:
            out["images"] = pipe(**a, latents=packed, output_type="pt").images.movedim(1, -1).float()
    return out


def words_of(case):
    one = lambda v: v if isinstance(v, str) else json.dumps(v, ensure_ascii=False)
    return {"name": case, "folder": "base", "words": [f"{k}={one(v)}" for k, v in arguments(case).items()]}


def main():
    pipe = make(torch.Generator().manual_seed(24))
    record(ROOT, {"base": pipe}, CASES, lambda case, dtype: run(pipe, case, dtype), words_of)


if __name__ == "__main__":
    main()
