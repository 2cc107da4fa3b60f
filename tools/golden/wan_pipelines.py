"""Writes the goldens of video sampling: tiny random Wan folders, and what diffusers' pipelines make with them.

tests/golden/wan/ gets
  t2v/, a14b/, ti2v/, i2v/, flf2v/, i2v_a14b/   model folders as diffusers saves them; weights are bf16 numbers
  cases.json                name, folder, and the words of the command that should make the same
  golden.safetensors        <case>.noise  what the pipeline starts from, NCFHW, standard normal
                            <case>.latents, before the autoencoder, NCFHW; <case>.video, NFHWC in [0, 1]
                            image, last_image  u8 [H, W, 3], the pictures that videos begin and end with
                            metadata: noise_floor.<case>, the distance of the same run in float64
All in float32 on the CPU. The text encoder's tokenizer is that of tests/golden/data/t5/whole.

    python tools/golden/wan_pipelines.py
"""

import contextlib
import json
import pathlib
import shutil

import diffusers
import numpy
import torch
from diffusers import (AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler,
                       WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel)
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import (AutoTokenizer, CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, UMT5Config,
                          UMT5EncoderModel)

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
ROOT = GOLDEN / "wan"
# As published with Wan 2.1.
UNIPC = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000,
             solver_order=2, final_sigmas_type="zero", timestep_spacing="linspace")
LENGTH = 12


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
        if name.endswith("gamma") or (p.ndim == 1 and name.endswith("weight")):
            value = 1 + noise * 0.1
        elif p.ndim == 1 or "scale_shift_table" in name:
            value = noise * 0.1
        elif "embedding" in name or "shared" in name:
            value = noise * 0.5
        else:
            value = noise / p[0].numel() ** 0.5
        p.data = value.to(torch.bfloat16).to(torch.float32)
    return model.eval()


def transformer(generator, channels, **more):
    return randomize(WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=channels, out_channels=more.pop("out", 4), text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32, **more), generator)


def vae(generator, **more):
    channels = more.get("z_dim", 4)
    return randomize(AutoencoderKLWan(**(dict(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.1 * i - 0.2 for i in range(channels)],
        latents_std=[1.0 + 0.25 * i for i in range(channels)]) | more)), generator)


def encoder(generator):
    return randomize(UMT5EncoderModel(UMT5Config(
        vocab_size=180, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, relative_attention_num_buckets=8,
        relative_attention_max_distance=16)), generator)


def vision(generator):
    return randomize(CLIPVisionModel(CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=3, num_attention_heads=2, image_size=28, patch_size=14,
        projection_dim=8, hidden_act="gelu")), generator)


def make(generator):
    parts = dict(tokenizer=AutoTokenizer.from_pretrained(GOLDEN / "data" / "t5" / "whole"),
                 text_encoder=encoder(generator), scheduler=UniPCMultistepScheduler(**UNIPC))
    small = vae(generator)
    clip = dict(image_encoder=vision(generator), image_processor=CLIPImageProcessor(
        size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}))
    with_image = dict(image_dim=16, added_kv_proj_dim=24)
    residual = dict(z_dim=6, is_residual=True, patch_size=2, in_channels=12, out_channels=12, decoder_base_dim=6,
                    scale_factor_spatial=16)
    return {
        "t2v": WanPipeline(vae=small, transformer=transformer(generator, 4), **parts),
        "a14b": WanPipeline(vae=small, transformer=transformer(generator, 4), transformer_2=transformer(generator, 4),
                            boundary_ratio=0.875, **parts),
        "ti2v": WanPipeline(vae=vae(generator, **residual), transformer=transformer(generator, 6, out=6),
                            expand_timesteps=True, **parts),
        "i2v": WanImageToVideoPipeline(vae=small, transformer=transformer(generator, 12, **with_image), **clip, **parts),
        "flf2v": WanImageToVideoPipeline(
            vae=small, transformer=transformer(generator, 12, pos_embed_seq_len=10, **with_image), **clip, **parts),
        "i2v_a14b": WanImageToVideoPipeline(
            vae=small, transformer=transformer(generator, 12), transformer_2=transformer(generator, 12),
            boundary_ratio=0.9, image_encoder=None, image_processor=None, **parts),
    }


# name: (folder, class of the scheduler, arguments of the pipeline, video too)
NEGATIVE = dict(negative_prompt="grey")
LONG = dict(max_sequence_length=512)  # diffusers tells an image's tokens from the text's by this number
FIRST, BOTH = dict(NEGATIVE, image="image"), dict(NEGATIVE, image="image", last_image="last_image")
CASES = {
    "t2v_unipc": ("t2v", None, NEGATIVE, True),
    "t2v_euler": ("t2v", "FlowMatchEulerDiscreteScheduler", dict(flow_shift=5.0), False),
    "t2v_unguided_two_prompts": ("t2v", None, dict(prompt=["red heart", "blue"], guidance_scale=1.0, num_frames=9,
                                                   width=48), False),
    "t2v_one_frame": ("t2v", None, dict(NEGATIVE, num_frames=1), False),
    "a14b": ("a14b", None, dict(NEGATIVE, guidance_scale=4.0, guidance_scale_2=3.0), False),
    "a14b_boundary": ("a14b", "FlowMatchEulerDiscreteScheduler", dict(
        NEGATIVE, guidance_scale=4.0, guidance_scale_2=1.0, boundary_ratio=0.5), False),
    "ti2v": ("ti2v", None, dict(NEGATIVE, height=32, width=64), True),
    "ti2v_image": ("ti2v", None, dict(FIRST, height=32, width=64), False),
    "i2v": ("i2v", None, dict(FIRST, **LONG), False),
    "flf2v": ("flf2v", None, dict(BOTH, **LONG), False),
    "i2v_a14b": ("i2v_a14b", None, dict(FIRST, guidance_scale=3.5, guidance_scale_2=3.5), False),
}


def save(pipe, name):
    """In bf16, which holds the weights exactly."""
    pipe.save_pretrained(ROOT / name, safe_serialization=True)
    for file in (ROOT / name).rglob("*.safetensors"):
        save_file({k: v.to(torch.bfloat16) for k, v in load_file(file).items()}, file, metadata={"format": "pt"})


def run(pipes, case, dtype, pictures):
    folder, kind, arguments, video = CASES[case]
    a = dict(dict(prompt="a red heart", num_inference_steps=8, guidance_scale=5.0, height=32, width=32, num_frames=5,
                  max_sequence_length=LENGTH), **arguments)
    pipe = pipes[folder]
    if "image" in a and isinstance(pipe, WanPipeline):
        parts = {k: v for k, v in pipe.components.items() if k not in ("transformer_2",)}
        pipe = WanImageToVideoPipeline(**parts, image_encoder=None, image_processor=None, expand_timesteps=True)
    pipe.to(dtype)
    pipe.set_progress_bar_config(disable=True)
    shift, ratio = a.pop("flow_shift", 3.0), a.pop("boundary_ratio", None)
    saved, saved_ratio = pipe.scheduler, pipe.config.boundary_ratio
    if kind:
        pipe.scheduler = getattr(diffusers, kind)(num_train_timesteps=1000, shift=shift)
    if ratio:
        pipe.register_to_config(boundary_ratio=ratio)
    for key in ("image", "last_image"):
        if key in a:
            a[key] = Image.fromarray(pictures[key]).resize((a["width"], a["height"]), Image.LANCZOS)
    count = len(a["prompt"]) if isinstance(a["prompt"], list) else 1
    z, down = pipe.vae.config.z_dim, pipe.vae.config.scale_factor_spatial
    noise = torch.randn(count, z, (a["num_frames"] - 1) // 4 + 1, a["height"] // down, a["width"] // down,
                        generator=torch.Generator().manual_seed(sum(map(ord, case))))
    out = {"noise": noise}
    with kept_precision():
        out["latents"] = pipe(**a, latents=noise.to(dtype), output_type="latent").frames.float()
        if video:
            frames = pipe(**a, latents=noise.to(dtype), output_type="np").frames
            out["video"] = torch.from_numpy(numpy.ascontiguousarray(frames)).float()
    pipe.scheduler = saved
    pipe.register_to_config(boundary_ratio=saved_ratio)
    return out


def words_of(case):
    folder, kind, arguments, _ = CASES[case]
    a = dict(dict(prompt="a red heart", num_inference_steps=8, guidance_scale=5.0, height=32, width=32, num_frames=5,
                  max_sequence_length=LENGTH, flow_shift=3.0), **arguments)
    if "guidance_scale_2" in a:
        a |= {"guidance_scale_high": a.pop("guidance_scale"), "guidance_scale_low": a.pop("guidance_scale_2")}
    for key in ("image", "last_image"):
        if key in a:
            a[key] = "{}/" + key + ".png"
    words = [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in a.items()]
    if kind:
        words.append("diffusion_scheduler_config=" + json.dumps({"_class_name": kind}))
    return {"name": case, "folder": folder, "control": False, "words": words}


def main():
    diffusers.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(True)
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    generator = torch.Generator().manual_seed(11)
    pipes = make(generator)
    for name, pipe in pipes.items():
        save(pipe, name)
    pictures = {key: torch.randint(0, 256, (32, 32, 3), generator=generator, dtype=torch.uint8).numpy()
                for key in ("image", "last_image")}
    arrays, metadata = {k: torch.from_numpy(v) for k, v in pictures.items()}, {"diffusers": diffusers.__version__}
    for case in CASES:
        narrow = run(pipes, case, torch.float32, pictures)
        wide = run(pipes, case, torch.float64, pictures)
        floor = ((narrow["latents"] - wide["latents"]).norm() / wide["latents"].norm()).item()
        metadata[f"noise_floor.{case}"] = f"{floor:.2g}"
        arrays |= {f"{case}.{k}": v.contiguous() for k, v in narrow.items()}
        print(case, {k: list(v.shape) for k, v in narrow.items()}, f"noise floor {floor:.2g}")
    save_file(arrays, ROOT / "golden.safetensors", metadata=metadata)
    (ROOT / "cases.json").write_text(json.dumps([words_of(c) for c in CASES], indent=1) + "\n")


if __name__ == "__main__":
    main()
