"""Writes the goldens of Flux: tiny random folders, and what diffusers' pipeline makes with them.

tests/golden/flux/ gets
  dev/, schnell/            model folders as diffusers saves them; weights are bf16 numbers
  cases.json                name, folder, and the words of the command that should give the same
  golden.safetensors        <case>.noise  what the pipeline starts from, NCHW (not packed), standard normal
                            <case>.latents, before the autoencoder, NCHW, as scaled for the transformer
                            <case>.images, NHWC in [0, 1]
                            metadata: noise_floor.<case>, the distance of the same run in float64
All in float32 on the CPU. The tokenizers are those of tests/golden/pipelines/sd and tests/golden/data/t5/whole.

    python tools/golden/flux_pipelines.py [CASE ...]      cases that are not named, and folders, stay as they are
"""

import contextlib
import json
import pathlib
import shutil
import sys

import diffusers
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, CLIPTextConfig, CLIPTextModel, CLIPTokenizer, T5Config, T5EncoderModel

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
ROOT = GOLDEN / "flux"
# As published with dev and with schnell.
SHIFTED = dict(base_image_seq_len=256, base_shift=0.5, max_image_seq_len=4096, max_shift=1.15, num_train_timesteps=1000,
               shift=3.0, use_dynamic_shifting=True)
PLAIN = SHIFTED | dict(shift=1.0, use_dynamic_shifting=False)
LENGTH = 12  # tokens of T5
SCALE = 2    # of the autoencoder


@contextlib.contextmanager
def kept_precision():
    """x.float(), which models call to compute parts in float32 at least, does not round float64."""
    plain = torch.Tensor.float
    torch.Tensor.float = lambda x: x if x.dtype == torch.float64 else plain(x)
    try:
        yield
    finally:
        torch.Tensor.float = plain


def randomize(model, generator):
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator)
        if p.ndim == 1:
            value = noise * 0.1 + (1.0 if name.endswith("weight") else 0.0)
        elif isinstance(model, (CLIPTextModel, T5EncoderModel)) and ("embedding" in name or "shared" in name):
            value = noise * 0.5
        else:
            value = noise / p[0].numel() ** 0.5
        p.data = value.to(torch.bfloat16).to(torch.float32)
    return model.eval()


def transformer(generator, guided):
    return randomize(FluxTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, axes_dims_rope=[2, 4, 2], in_channels=64, num_layers=2,
        num_single_layers=2, joint_attention_dim=12, pooled_projection_dim=16, guidance_embeds=guided), generator)


def make(generator):
    # Quick GELU and the legacy end token, as the published encoder has them.
    tokenizer = CLIPTokenizer.from_pretrained(GOLDEN / "pipelines" / "sd" / "tokenizer", model_max_length=77)
    words = len(tokenizer)
    clip = CLIPTextModel(CLIPTextConfig(
        vocab_size=words, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=77, projection_dim=16, bos_token_id=0, eos_token_id=2, pad_token_id=1,
        hidden_act="quick_gelu"))
    t5 = T5EncoderModel(T5Config(
        vocab_size=180, d_model=12, d_kv=6, d_ff=20, num_layers=2, num_heads=2, relative_attention_num_buckets=8,
        relative_attention_max_distance=16, feed_forward_proj="gated-gelu"))
    vae = AutoencoderKL(
        block_out_channels=[8, 16], down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
        layers_per_block=1, norm_num_groups=4, latent_channels=16, sample_size=32, scaling_factor=0.3611,
        shift_factor=0.1159, use_quant_conv=False, use_post_quant_conv=False)
    parts = dict(text_encoder=randomize(clip, generator), text_encoder_2=randomize(t5, generator),
                 vae=randomize(vae, generator), tokenizer=tokenizer,
                 tokenizer_2=AutoTokenizer.from_pretrained(GOLDEN / "data" / "t5" / "whole"))
    return {
        "dev": FluxPipeline(transformer=transformer(generator, True),
                            scheduler=FlowMatchEulerDiscreteScheduler(**SHIFTED), **parts),
        "schnell": FluxPipeline(transformer=transformer(generator, False),
                                scheduler=FlowMatchEulerDiscreteScheduler(**PLAIN), **parts),
    }


# name: (folder, arguments of the pipeline, pictures too)
CASES = {
    "dev": ("dev", {}, True),
    "dev_guided_otherwise": ("dev", dict(guidance_scale=1.5), False),
    "dev_second_prompt": ("dev", dict(prompt_2="blue"), False),
    # Two prompts, two pictures each; more columns than rows.
    "dev_batch": ("dev", dict(prompt=["red heart", "blue"], num_images_per_prompt=2, width=48), False),
    # So many tokens that the schedule is another.
    "dev_large": ("dev", dict(height=64, width=96, num_inference_steps=3), False),
    "dev_true_guidance": ("dev", dict(negative_prompt="grey", true_cfg_scale=2.0), False),
    "dev_second_negative": ("dev", dict(negative_prompt="grey", negative_prompt_2="blue", true_cfg_scale=2.0), False),
    "schnell": ("schnell", dict(guidance_scale=0.0), True),
    "schnell_batch": ("schnell", dict(guidance_scale=0.0, prompt=["red heart", "blue"], height=48), False),
}


def save(pipe, folder):
    """In bf16, which holds the weights exactly."""
    pipe.save_pretrained(folder, safe_serialization=True)
    for file in folder.rglob("*.safetensors"):
        save_file({k: v.to(torch.bfloat16) if v.is_floating_point() else v for k, v in load_file(file).items()}, file, metadata={"format": "pt"})


def arguments(case):
    return dict(dict(prompt="a red heart", num_inference_steps=4, guidance_scale=3.5, height=32, width=32,
                     max_sequence_length=LENGTH), **CASES[case][1])


def run(pipes, case, dtype):
    folder, _, decodes = CASES[case]
    a = arguments(case)
    pipe = pipes[folder]
    pipe.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    count = (len(a["prompt"]) if isinstance(a["prompt"], list) else 1) * a.get("num_images_per_prompt", 1)
    height, width = a["height"] // SCALE, a["width"] // SCALE
    noise = torch.randn(count, 16, height, width, generator=torch.Generator().manual_seed(sum(map(ord, case))))
    packed = FluxPipeline._pack_latents(noise.to(dtype), count, 16, height, width)
    out = {"noise": noise}
    with kept_precision():
        latents = pipe(**a, latents=packed, output_type="latent").images
        out["latents"] = FluxPipeline._unpack_latents(latents, a["height"], a["width"], SCALE).float()
        if decodes:
            out["images"] = pipe(**a, latents=packed, output_type="pt").images.movedim(1, -1).float()
    return out


def words_of(case):
    words = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in arguments(case).items()]
    return {"name": case, "folder": CASES[case][0], "words": words}


def record(root, pipes, cases, run, words_of, extra={}):
    """Writes the folders of `pipes`, by name, and run(case, dtype) of each case with its noise floor; with cases on the
    command line those alone. `extra`: further arrays."""
    diffusers.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(True)
    chosen = sys.argv[1:] or list(cases)
    arrays, metadata = {}, {"diffusers": diffusers.__version__}
    if sys.argv[1:]:
        with safe_open(root / "golden.safetensors", "pt") as file:
            metadata = file.metadata()
            arrays = {k: file.get_tensor(k) for k in file.keys()}
    else:
        shutil.rmtree(root, ignore_errors=True)
        root.mkdir(parents=True)
        for name, pipe in pipes.items():
            save(pipe, root / name)
    for case in chosen:
        narrow = run(case, torch.float32)
        wide = run(case, torch.float64)
        floor = ((narrow["latents"] - wide["latents"]).norm() / wide["latents"].norm()).item()
        metadata[f"noise_floor.{case}"] = f"{floor:.2g}"
        reused = narrow.pop("reused", None)  # by step: whether it reuses what an earlier one computed
        if reused is not None:
            assert reused.tolist() == wide["reused"].tolist()
            metadata[f"reused.{case}"] = "".join("x" if r else "." for r in reused.tolist())
        arrays |= {f"{case}.{k}": v.contiguous() for k, v in narrow.items()}
        print(case, {k: list(v.shape) for k, v in narrow.items()}, f"noise floor {floor:.2g}")
    save_file(arrays | extra, root / "golden.safetensors", metadata=metadata)
    (root / "cases.json").write_text(json.dumps([words_of(c) for c in cases], indent=1, ensure_ascii=False) + "\n")


def main():
    pipes = make(torch.Generator().manual_seed(21))
    record(ROOT, pipes, CASES, lambda case, dtype: run(pipes, case, dtype), words_of)


if __name__ == "__main__":
    main()
