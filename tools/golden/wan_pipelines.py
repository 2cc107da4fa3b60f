"""Writes the goldens of video sampling: tiny random Wan folders, and what diffusers' pipelines make with them.

tests/golden/wan/ gets
  t2v/, a14b/, ti2v/, i2v/, flf2v/, i2v_a14b/   model folders as diffusers saves them; weights are bf16 numbers
  cases.json                name, folder, and the words of the command that should make the same
  lora/*.safetensors        LoRA files in every layout, with matrices of one kind under several names
  golden.safetensors        <case>.noise  what the pipeline starts from, NCFHW, standard normal
                            <case>.latents, before the autoencoder, NCFHW; <case>.video, NFHWC in [0, 1]
                            image, last_image  u8 [H, W, 3], the images that videos begin and end with
                            metadata: noise_floor.<case>, the distance of the same run in float64
A case of LoRA names files, scales and transformers; one whose file holds the matrices of another case is checked to be
loaded by diffusers to the same latents, and is recorded as that case by `same_as`. What diffusers does not load (.diff,
.diff_b, .diff_m) is merged into the weights here.
All in float32 on the CPU. The text encoder's tokenizer is that of tests/golden/data/t5/whole.

    python tools/golden/wan_pipelines.py [CASE ...]      cases that are not named, and folders, stay as they are
"""

import contextlib
import json
import pathlib
import shutil
import sys

import diffusers
import numpy
import torch
from diffusers import (AutoencoderKLWan, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler,
                       WanImageToVideoPipeline, WanPipeline, WanTransformer3DModel)
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (AutoTokenizer, CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel, UMT5Config,
                          UMT5EncoderModel)

from flux_pipelines import kept_precision, save

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
ROOT = GOLDEN / "wan"
# As published with Wan 2.1.
UNIPC = dict(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0, num_train_timesteps=1000,
             solver_order=2, final_sigmas_type="zero", timestep_spacing="linspace")
LENGTH = 12


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


def transformer(generator, channels, **extra):
    return randomize(WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=channels, out_channels=extra.pop("out", 4), text_dim=16,
        freq_dim=16, ffn_dim=32, num_layers=2, rope_max_seq_len=32, **extra), generator)


def vae(generator, **extra):
    channels = extra.get("z_dim", 4)
    return randomize(AutoencoderKLWan(**(dict(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 2, 2], num_res_blocks=1, temperal_downsample=[False, True, True],
        latents_mean=[0.1 * i - 0.2 for i in range(channels)],
        latents_std=[1.0 + 0.25 * i for i in range(channels)]) | extra)), generator)


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


# name: (folder, class of the scheduler, arguments of the pipeline, whether the video is decoded)
NEGATIVE = dict(negative_prompt="grey")
LONG = dict(max_sequence_length=512)  # diffusers separates image and text tokens at this number
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


# LoRA cases; name: (folder, [(file, scale, component)], the case with equal latents or None)
LORAS = {
    "t2v_lora": ("t2v", [("diffusers", 0.8, "transformer")], None),
    "t2v_lora_comfyui": ("t2v", [("comfyui", 0.8, "transformer")], "t2v_lora"),
    "t2v_lora_toolkit": ("t2v", [("toolkit", 0.8, "transformer")], "t2v_lora"),
    "t2v_lora_kohya": ("t2v", [("kohya", 0.8, "transformer")], "t2v_lora"),
    "t2v_lora_peft": ("t2v", [("peft", 0.8, "transformer")], "t2v_lora"),
    "t2v_two_loras": ("t2v", [("diffusers", 0.75, "transformer"), ("others", -0.5, "transformer")], None),
    "t2v_lora_differences": ("t2v", [("differences", 0.75, "transformer")], None),
    "a14b_loras": ("a14b", [("comfyui", 0.8, "transformer"), ("low", 0.8, "transformer_2")], None),
    "a14b_lora_low": ("a14b", [("low", 1.25, "transformer_2")], None),
    "a14b_lora_named": ("a14b", [("named_low", 1.25, "transformer_2")], "a14b_lora_low"),
    "a14b_lora_plain": ("a14b", [("toolkit", 0.5, "transformer")], None),
}
CASES |= {case: (folder, None, NEGATIVE if folder == "t2v" else dict(NEGATIVE, guidance_scale=4.0, guidance_scale_2=3.0),
                 False) for case, (folder, _, _) in LORAS.items()}
# diffusers → original, as in the original program's module list; written out for two blocks.
ORIGINAL = {f"blocks.{i}.{a}": f"blocks.{i}.{b}" for i in range(2) for a, b in (
    *((f"attn{n}.{x}", f"{kind}_attn.{y}") for n, kind in ((1, "self"), (2, "cross"))
      for x, y in (("to_q", "q"), ("to_k", "k"), ("to_v", "v"), ("to_out.0", "o"))),
    ("ffn.net.0.proj", "ffn.0"), ("ffn.net.2", "ffn.2"))}
RANK, ALPHA = 2, 1.0

# Step caches; name: (folder, key of the cache, its other keys, arguments). The caches are implemented here around
# diffusers' pipelines, because diffusers does not have them.
RATIOS = [1.0, 1.0, 1.01, 0.99, 0.97, 0.98, 0.96, 1.03, 0.99, 1.0, 0.95, 0.94, 0.97, 0.98, 1.01, 0.99]
CACHES = {
    "t2v_cfg_cache": ("t2v", "use_cfg_cache", {}, dict(num_inference_steps=9, height=64, width=112)),
    "a14b_cfg_cache": ("a14b", "use_cfg_cache", {}, dict(num_inference_steps=12)),
    "t2v_magcache": ("t2v", "use_magcache", dict(mag_ratios_base=RATIOS, magcache_thresh=0.12, magcache_K=2,
                                                 retention_ratio=0.2), {}),
    "a14b_magcache": ("a14b", "use_magcache", dict(mag_ratios_base=RATIOS, magcache_thresh=0.2, magcache_K=3,
                                                   retention_ratio=0.25), dict(num_inference_steps=13)),
    "a14b_sen_cache": ("a14b", "use_sen_cache", {}, dict(num_inference_steps=40)),
}
CASES |= {case: (folder, None, NEGATIVE | extra if folder == "t2v" else
                 dict(NEGATIVE, guidance_scale=4.0, guidance_scale_2=3.0) | extra, False)
          for case, (folder, _, _, extra) in CACHES.items()}


def grid(shape, generator, size=1.0):
    """Numbers that are exact in bf16 and f16, and whose products with few terms are exact in f32."""
    return torch.randint(-32, 33, shape, generator=generator).float() / 32 * size


def matrices(model, names, generator):
    weights, out = dict(model.named_parameters()), {}
    for name in names:
        w = weights[name + ".weight"]
        out[name] = (grid((RANK, *w.shape[1:]), generator, 0.5),
                     grid((w.shape[0], RANK, *[1] * (w.ndim - 2)), generator, 0.5))
    return out


def lora_files(model):
    """File → (tensors, metadata), with independent random numbers."""
    generator = torch.Generator().manual_seed(12)
    blocks = matrices(model, ORIGINAL, generator)
    low = matrices(model, [n for n in ORIGINAL if "attn1" in n], generator)
    others = matrices(model, ["patch_embedding", "proj_out", "condition_embedder.time_proj",
                              "condition_embedder.text_embedder.linear_1", "condition_embedder.time_embedder.linear_2",
                              "blocks.1.attn2.to_v"], generator)
    alpha = torch.tensor(ALPHA)

    def named(pairs, prefix, rename=lambda n: n, ends=("lora_A", "lora_B"), factor=1.0, alphas=False):
        out = {}
        for name, (down, up) in pairs.items():
            out[f"{prefix}{rename(name)}.{ends[0]}.weight"] = down.clone()
            out[f"{prefix}{rename(name)}.{ends[1]}.weight"] = up * factor
            if alphas:
                out[f"{prefix}{rename(name)}.alpha"] = alpha.clone()
        return out

    def adapter(pairs):
        config = {"r": RANK, "lora_alpha": ALPHA, "target_modules": sorted(pairs), "peft_type": "LORA"}
        return {"lora_adapter_metadata": json.dumps({f"transformer.{k}": v for k, v in config.items()})}

    halves = ALPHA / RANK
    kohya = ("lora_down", "lora_up")
    differences = {
        "head.head.diff": grid(model.proj_out.weight.shape, generator, 0.25),
        "head.head.diff_b": grid(model.proj_out.bias.shape, generator, 0.25),
        "head.diff_m": grid(model.scale_shift_table.shape, generator, 0.25),
        "patch_embedding.diff": grid(model.patch_embedding.weight.shape, generator, 0.25),
        "patch_embedding.diff_b": grid(model.patch_embedding.bias.shape, generator, 0.25),
        "blocks.0.norm3.diff": grid(model.blocks[0].norm2.weight.shape, generator, 0.25),
        "blocks.0.norm3.diff_b": grid(model.blocks[0].norm2.bias.shape, generator, 0.25),
        "blocks.1.self_attn.norm_q.diff": grid(model.blocks[1].attn1.norm_q.weight.shape, generator, 0.25),
        "blocks.1.self_attn.q.diff_b": grid(model.blocks[1].attn1.to_q.bias.shape, generator, 0.25),
        "blocks.0.diff_m": grid(model.blocks[0].scale_shift_table.shape, generator, 0.25),
        "text_embedding.0.diff_b": grid(model.condition_embedder.text_embedder.linear_1.bias.shape, generator, 0.25),
    }
    return {
        "diffusers": (named(blocks, "transformer."), adapter(blocks)),
        "comfyui": (named(blocks, "diffusion_model.", ORIGINAL.get, kohya, alphas=True), {}),
        "toolkit": (named(blocks, "diffusion_model.", ORIGINAL.get, factor=halves), {}),
        "kohya": (named(blocks, "lora_unet_", lambda n: ORIGINAL[n].replace(".", "_"), kohya, alphas=True), {}),
        "peft": (named(blocks, "base_model.model.", factor=halves), {}),
        "others": (named(others, "transformer."), {}),
        "differences": ({"diffusion_model." + k: v for k, v in differences.items()}
                        | named({n: blocks[n] for n in list(blocks)[:4]}, "diffusion_model.", ORIGINAL.get, kohya,
                                alphas=True), {}),
        "low": (named(low, "diffusion_model.", ORIGINAL.get), {}),
        "named_low": (named(low, "transformer_2."), {}),
    }


# The parameters that lora_files()["differences"] changes.
DIFFERENCES = {
    "head.head.diff": "proj_out.weight", "head.head.diff_b": "proj_out.bias", "head.diff_m": "scale_shift_table",
    "patch_embedding.diff": "patch_embedding.weight", "patch_embedding.diff_b": "patch_embedding.bias",
    "blocks.0.norm3.diff": "blocks.0.norm2.weight", "blocks.0.norm3.diff_b": "blocks.0.norm2.bias",
    "blocks.1.self_attn.norm_q.diff": "blocks.1.attn1.norm_q.weight",
    "blocks.1.self_attn.q.diff_b": "blocks.1.attn1.to_q.bias", "blocks.0.diff_m": "blocks.0.scale_shift_table",
    "text_embedding.0.diff_b": "condition_embedder.text_embedder.linear_1.bias",
}


@contextlib.contextmanager
def merged_differences(model, scale):
    """The weights of `model` with the file of differences, times `scale`, added in float64."""
    tensors = load_file(ROOT / "lora" / "differences.safetensors")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    after, left = {k: v.double() for k, v in before.items()}, set(tensors)
    for key, parameter in DIFFERENCES.items():
        after[parameter] += scale * tensors["diffusion_model." + key].double()
        left.remove("diffusion_model." + key)
    for name, original in ORIGINAL.items():
        ends = [f"diffusion_model.{original}.{e}" for e in ("lora_down.weight", "lora_up.weight", "alpha")]
        if ends[0] in tensors:
            down, up, alpha = (tensors[e].double() for e in ends)
            after[name + ".weight"] += scale * alpha / RANK * (up @ down)
            left.difference_update(ends)
    assert not left, left
    model.load_state_dict({k: v.to(before[k].dtype) for k, v in after.items()})
    try:
        yield
    finally:
        model.load_state_dict(before)


@contextlib.contextmanager
def adapted(pipe, case):
    """The pipeline with a case's LoRA files."""
    if case not in LORAS:
        yield
        return
    if LORAS[case][1][0][0] == "differences":
        with merged_differences(pipe.transformer, LORAS[case][1][0][1]):
            yield
        return
    scales = {}
    for i, (file, scale, component) in enumerate(LORAS[case][1]):
        path = ROOT / "lora" / f"{file}.safetensors"
        source = dict(weight_name=path.name, pretrained_model_name_or_path_or_dict=path.parent)
        if file in ("peft", "named_low"):  # of which diffusers reads the tensors by its own name
            source = dict(pretrained_model_name_or_path_or_dict={
                "transformer." + k.removeprefix("base_model.model.").removeprefix("transformer_2."): v
                for k, v in load_file(path).items()})
        pipe.load_lora_weights(**source, adapter_name=f"a{i}", load_into_transformer_2=component == "transformer_2")
        scales.setdefault(component, {})[f"a{i}"] = scale
    for component, chosen in scales.items():
        getattr(pipe, component).set_adapters(list(chosen), list(chosen.values()))
    pipe.to(pipe.vae.dtype)
    try:
        yield
    finally:
        pipe.unload_lora_weights()


class Cached:
    """Replaces a pipeline's transformers: runs both, and reuses earlier results in some steps."""

    def __init__(self, pipe, case, steps, height):
        _, self.key, self.options, _ = CACHES[case]
        self.pipe, self.steps, self.height = pipe, steps, height
        self.models = [m for m in (pipe.transformer, pipe.transformer_2) if m is not None]
        self.forwards = [m.forward for m in self.models]
        self.calls, self.cached, self.reused, self.active = 0, {}, [], None
        for i, model in enumerate(self.models):
            model.forward = lambda i=i, **a: self.forward(i, **a)

    def restore(self):
        for model, forward in zip(self.models, self.forwards):
            model.forward = forward

    def forward(self, which, hidden_states, timestep, **a):
        step, conditioned = divmod(self.calls, 2)
        self.calls += 1
        if conditioned == 0:  # the pipeline computes the prompt's prediction first
            first = self.active != which
            if first:
                self.active, self.since = which, step
                self.cached, self.ratio, self.error, self.count = {}, [1, 1], [0, 0], 0
            self.now = self.decide(which, step, first, hidden_states, timestep)
            self.reused.append(self.now)
        run = lambda: self.forwards[which](hidden_states=hidden_states, timestep=timestep, **a)
        return getattr(self, self.key)(which, step, conditioned, run)

    def decide(self, which, step, first, x, timestep):
        n = self.steps
        if self.key == "use_cfg_cache":
            two = len(self.models) == 2
            start, end = n // 3, int(n * 0.9) if self.height >= 720 else n - (1 if two else 2)
            low = not two or which == 1
            return low and not first and start <= step < end and (step - start) % 5 != 0
        if self.key == "use_magcache":
            o = self.options
            ratios = numpy.array(o["mag_ratios_base"])
            if len(ratios) != 2 * n:
                at = numpy.round(numpy.linspace(0, len(ratios) // 2 - 1, n)).astype(int)
                ratios = numpy.stack([ratios[0::2][at], ratios[1::2][at]], 1).reshape(-1)
            boundary = self.boundary_step()
            length = boundary if which == 0 else n - boundary
            if first or step - self.since < int(length * o["retention_ratio"]):
                return False
            ratio = [self.ratio[i] * ratios[2 * step + i] for i in (0, 1)]
            error = [self.error[i] + abs(1 - ratio[i]) for i in (0, 1)]
            if max(error) < o["magcache_thresh"] and self.count < o["magcache_K"]:
                self.ratio, self.error, self.count = ratio, error, self.count + 1
                return True
            self.ratio, self.error, self.count = [1, 1], [0, 0], 0
            return False
        time = timestep.flatten()[0].item() / 1000
        if not (first or step < int(n * 0.3) or step >= int(n * 0.9)):
            self.score += (x - self.reference[0]).square().mean().sqrt().item() + abs(time - self.reference[1])
            if self.score <= 0.1 and self.count < 3:
                self.count += 1
                return True
        self.score, self.count, self.reference = 0.0, 0, (x.clone(), time)
        return False

    def boundary_step(self):
        times = self.pipe.scheduler.timesteps
        limit = self.pipe.config.boundary_ratio
        return len(times) if limit is None else int((times >= limit * 1000).sum())

    def use_cfg_cache(self, which, step, conditioned, run):
        if not self.now:
            out = run()
            self.cached[conditioned] = out[0]
            return out
        if conditioned == 0:
            self.positive = run()
            return self.positive
        t = lambda x: torch.fft.rfft2(x, dim=(-2, -1))
        h, w = self.positive[0].shape[-2:]
        rows, columns = max(1, h // 4), max(1, (w // 2 + 1) // 4)
        low = torch.zeros(h, w // 2 + 1, dtype=torch.bool)
        low[:rows, :columns] = True
        low[h - rows + 1:, :columns] = True
        early = which == 0 and (len(self.models) == 2 or step < self.steps // 2)
        weight = torch.where(low, 1.2 if early else 1.0, 1.0 if early else 1.2)
        change = (t(self.cached[1]) - t(self.cached[0])) * weight
        return (torch.fft.irfft2(t(self.positive[0]) + change, s=(h, w), dim=(-2, -1)),)

    def use_magcache(self, which, step, conditioned, run):
        blocks = self.models[which].blocks
        seen = {}
        handles = [blocks[0].register_forward_pre_hook(lambda m, a: seen.update(start=a[0].clone())),
                   blocks[-1].register_forward_hook(lambda m, a, out: seen.update(end=out))]
        try:
            if not self.now:
                out = run()
                self.cached[conditioned] = seen["end"] - seen["start"]
                return out
            residual = self.cached[conditioned]
            handles.append(blocks[-1].register_forward_hook(lambda m, a, out: seen["start"] + residual))
            return run()
        finally:
            for handle in handles:
                handle.remove()

    def use_sen_cache(self, which, step, conditioned, run):
        if not self.now:
            self.cached[conditioned] = run()
        return self.cached[conditioned]


def cache_words(case):
    _, key, options, _ = CACHES[case]
    return [f"{key}=true"] + [f"{k}={json.dumps(v)}" for k, v in options.items()]


def lora_words(case):
    """As the reference's keys have them where the model has two transformers, else lora_files."""
    _, files, _ = LORAS[case]
    names = [f"{f}.safetensors" for f, _, _ in files]
    if case in ("a14b_loras", "a14b_lora_low"):
        of = lambda component: [next((f"{f}.safetensors" for f, _, c in files if c == component), "")]
        config = {"lora_model_name_or_path": ["{}/lora"], "high_noise_weight_name": of("transformer"),
                  "low_noise_weight_name": of("transformer_2"), "adapter_name": ["distilled"], "rank": [RANK],
                  "scale": [files[0][1]], "from_pt": [True]}
        return ["lora_config=" + json.dumps(config), "enable_lora=true"]
    return ["lora_files=" + ",".join("{}/lora/" + n for n in names), "lora_scales=" + json.dumps([s for _, s, _ in files])]


def same_as(case):
    return LORAS[case][2] or case if case in LORAS else case


def run(pipes, case, dtype, images):
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
            a[key] = Image.fromarray(images[key]).resize((a["width"], a["height"]), Image.LANCZOS)
    count = len(a["prompt"]) if isinstance(a["prompt"], list) else 1
    z, down = pipe.vae.config.z_dim, pipe.vae.config.scale_factor_spatial
    noise = torch.randn(count, z, (a["num_frames"] - 1) // 4 + 1, a["height"] // down, a["width"] // down,
                        generator=torch.Generator().manual_seed(sum(map(ord, same_as(case)))))
    out = {"noise": noise}
    with kept_precision(), adapted(pipe, case):
        cached = Cached(pipe, case, a["num_inference_steps"], a["height"]) if case in CACHES else None
        out["latents"] = pipe(**a, latents=noise.to(dtype), output_type="latent").frames.float()
        if cached:
            cached.restore()
            assert any(cached.reused) and not all(cached.reused)
            out["reused"] = torch.tensor(cached.reused)
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
    words += lora_words(case) if case in LORAS else cache_words(case) if case in CACHES else []
    extra = {"same_as": same_as(case)} if same_as(case) != case else {}
    return {"name": case, "folder": folder, "control": False, "words": words} | extra


def main():
    diffusers.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(True)
    chosen = sys.argv[1:] or list(CASES)
    generator = torch.Generator().manual_seed(11)
    pipes = make(generator)
    images = {key: torch.randint(0, 256, (32, 32, 3), generator=generator, dtype=torch.uint8).numpy()
                for key in ("image", "last_image")}
    arrays, metadata = {k: torch.from_numpy(v) for k, v in images.items()}, {"diffusers": diffusers.__version__}
    if sys.argv[1:]:
        with safe_open(ROOT / "golden.safetensors", "pt") as file:
            metadata = file.metadata()
            arrays = {k: file.get_tensor(k) for k in file.keys()}
    else:
        shutil.rmtree(ROOT, ignore_errors=True)
        ROOT.mkdir(parents=True)
        for name, pipe in pipes.items():
            save(pipe, ROOT / name)
    (ROOT / "lora").mkdir(exist_ok=True)
    for name, (tensors, extra) in lora_files(pipes["t2v"].transformer).items():
        save_file({k: v.contiguous() if k.endswith("alpha") else v.to(torch.bfloat16).contiguous()
                   for k, v in tensors.items()}, ROOT / "lora" / f"{name}.safetensors", metadata=extra or None)
    for case in chosen:
        narrow = run(pipes, case, torch.float32, images)
        wide = run(pipes, case, torch.float64, images)
        floor = ((narrow["latents"] - wide["latents"]).norm() / wide["latents"].norm()).item()
        if same_as(case) != case:
            off = ((narrow["latents"] - arrays[f"{same_as(case)}.latents"]).norm() / wide["latents"].norm()).item()
            assert off <= max(10 * floor, 1e-5), (case, off)
            print(case, f"is {same_as(case)} to {off:.2g}")
            continue
        metadata[f"noise_floor.{case}"] = f"{floor:.2g}"
        reused = narrow.pop("reused", None)
        if reused is not None:
            assert reused.tolist() == wide["reused"].tolist()
            metadata[f"reused.{case}"] = "".join("x" if r else "." for r in reused.tolist())
        arrays |= {f"{case}.{k}": v.contiguous() for k, v in narrow.items()}
        print(case, {k: list(v.shape) for k, v in narrow.items()}, f"noise floor {floor:.2g}")
    save_file(arrays, ROOT / "golden.safetensors", metadata=metadata)
    (ROOT / "cases.json").write_text(json.dumps([words_of(c) for c in CASES], indent=1) + "\n")


if __name__ == "__main__":
    main()
