"""Judge of LoRA files: diffusers loads each with every key read, and all change the same weights in the same way.

    python tools/check_lora.py MODEL FILE [FILE ...]

MODEL: a folder with unet/config.json, text_encoder/config.json and, for SDXL, text_encoder_2/config.json; or with
transformer/config.json of Wan or of Flux. Weights are not needed, since what a file adds does not depend on them.
Prints how far each file's change of each weight is from the first file's. Needs torch, diffusers, transformers and peft. Exit status 0 when all is well.
"""
import argparse
import json
import logging
import pathlib
import sys

import torch
from diffusers import (AutoencoderKL, AutoencoderKLWan, DDPMScheduler, FluxPipeline, FluxTransformer2DModel,
                       StableDiffusionPipeline, StableDiffusionXLPipeline, UNet2DConditionModel, WanPipeline,
                       WanTransformer3DModel)
from safetensors import safe_open
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection


class Complaints(logging.Handler):
    """Warnings about keys that found no place, or places that found no key."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        text = record.getMessage()
        if "keys" in text and "No LoRA keys associated" not in text:
            self.messages.append(text)


def component(folder, name):
    config = json.loads((folder / name / "config.json").read_text())
    if name == "unet":
        return UNet2DConditionModel.from_config(config)
    if name.startswith("transformer"):
        kind = FluxTransformer2DModel if config["_class_name"] == "FluxTransformer2DModel" else WanTransformer3DModel
        return kind.from_config(config)
    kind = CLIPTextModelWithProjection if "Projection" in config["architectures"][0] else CLIPTextModel
    return kind(CLIPTextConfig(**config))


def pipeline(folder):
    names = [n for n in ("transformer", "transformer_2") if (folder / n / "config.json").exists()]
    names = names or [n for n in ("unet", "text_encoder", "text_encoder_2") if (folder / n / "config.json").exists()]
    parts = {n: component(folder, n) for n in names}
    for model in parts.values():  # what remains is what the file adds
        for p in model.parameters():
            torch.nn.init.zeros_(p)
    if isinstance(parts.get("transformer"), FluxTransformer2DModel):
        return FluxPipeline(**parts, vae=None, scheduler=DDPMScheduler(), tokenizer=None, text_encoder=None,
                            tokenizer_2=None, text_encoder_2=None), names
    if "transformer" in names:
        vae = AutoencoderKLWan(base_dim=4, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
                               latents_mean=[0.0] * 4, latents_std=[1.0] * 4)
        return WanPipeline(**parts, vae=vae, scheduler=DDPMScheduler(), tokenizer=None, text_encoder=None), names
    rest = dict(vae=AutoencoderKL(block_out_channels=[8], norm_num_groups=2), tokenizer=None,
                scheduler=DDPMScheduler())
    if "text_encoder_2" in names:
        return StableDiffusionXLPipeline(**parts, **rest, tokenizer_2=None), names
    return StableDiffusionPipeline(**parts, **rest, safety_checker=None, feature_extractor=None,
                                   requires_safety_checker=False), names


def added(folder, file):
    pipe, names = pipeline(folder)
    given = {}
    if isinstance(pipe, WanPipeline):  # its names are the same for both transformers; one file is for one of them
        with safe_open(file, "pt") as f:
            names = [(f.metadata() or {}).get("component", "transformer")]
        given["load_into_transformer_2"] = names == ["transformer_2"]
    pipe.load_lora_weights(str(file.parent), weight_name=file.name, **given)
    pipe.fuse_lora(components=names)
    return {f"{n}/{k}": p.detach().double() for n in names for k, p in getattr(pipe, n).named_parameters()
            if "lora_" not in k and p.detach().any()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("file", type=pathlib.Path, nargs="+")
    args = parser.parse_args()
    complaints = Complaints()
    for library in ("diffusers", "peft", "transformers"):
        logging.getLogger(library).addHandler(complaints)
    problems, first = [], None
    for file in args.file:
        changes = added(args.model, file)
        with safe_open(file, "pt") as f:
            pairs = sum(k.endswith(("lora_A.weight", "lora_down.weight", ".down.weight")) for k in f.keys())
        problems += [f"{file}: {m}" for m in complaints.messages]
        complaints.messages.clear()
        if first is None:
            first = changes
        distances = {k: ((changes[k] - w).norm() / w.norm()).item() for k, w in first.items() if k in changes}
        worst = max(distances.values(), default=0)
        print(f"{file}: {pairs} pairs change {len(changes)} weights; largest distance from {args.file[0].name}: {worst:.2g}")
        if set(changes) != set(first):
            problems.append(f"{file}: other weights change: {sorted(set(changes) ^ set(first))[:5]}")
        if len(changes) != pairs:
            problems.append(f"{file}: {pairs} pairs but {len(changes)} weights change")
        if not worst <= 1e-6:
            problems.append(f"{file}: {max(distances, key=distances.get)} differs by {worst:.2g}")
    for p in problems:
        print("FAILED", p)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
