"""Checks a checkpoint with diffusers: the folder must load unchanged with exactly the expected weights. Also
generates an image, or a video whose frames are written next to each other.

    python tools/check_checkpoint.py runs/quickstart/checkpoints/1000 [--prompt "red heart"] [--out image.png]

Needs torch, diffusers and transformers. Exit status 0 if all checks pass; prints one line per failure.
"""
import argparse
import importlib
import inspect
import json
import pathlib
import sys

import torch
from diffusers import DiffusionPipeline
from PIL import Image


def components(folder):
    """(name, class) of every component of model_index.json that has weights."""
    index = json.loads((folder / "model_index.json").read_text())
    for name, value in index.items():
        if name.startswith("_") or not isinstance(value, list) or value[0] is None:
            continue
        cls = getattr(importlib.import_module(value[0]), value[1], None)
        if cls is None:
            raise SystemExit(f"{name}: {value[0]} has no class {value[1]}")
        if issubclass(cls, torch.nn.Module):
            yield name, cls


def check_weights(folder):
    problems = []
    for name, cls in components(folder):
        model, info = cls.from_pretrained(folder / name, output_loading_info=True)
        count = sum(p.numel() for p in model.parameters())
        print(f"{name}: {cls.__name__}, {count:,} parameters")
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
            if info.get(kind):
                problems.append(f"{name}: {kind}: {list(info[kind])[:5]} ({len(info[kind])} in all)")
        # A missing weight stays on the meta device, without values to look at.
        bad = [k for k, v in model.state_dict().items() if v.device.type != "meta" and not torch.isfinite(v.float()).all()]
        if bad:
            problems.append(f"{name}: values that are not finite in {bad[:5]}")
    return problems


def generate(folder, args):
    pipe = DiffusionPipeline.from_pretrained(folder)
    pipe.set_progress_bar_config(disable=True)
    size = args.size or pipe.unet.config.sample_size * pipe.vae_scale_factor
    # Only arguments that this pipeline accepts.
    taken = inspect.signature(pipe.__call__).parameters
    arguments = {k: getattr(args, k) for k in ("num_frames", "max_sequence_length", "text_encoder_out_layers")
            if k in taken and getattr(args, k)}
    out = pipe(prompt=args.prompt, height=size, width=size, num_inference_steps=args.steps, guidance_scale=args.guidance_scale,
               generator=torch.Generator().manual_seed(args.seed), output_type="pil", **arguments)
    if hasattr(out, "frames"):
        image = Image.new("RGB", (size * args.num_frames, size))
        for i, frame in enumerate(out.frames[0]):
            image.paste(frame, (size * i, 0))
    else:
        image = out.images[0]
    image.save(args.out)
    low, high = min(p[0] for p in image.getextrema()), max(p[1] for p in image.getextrema())
    print(f"{type(pipe).__name__}: {size}x{size} image of {args.prompt!r}, {args.steps} steps, "
          f"values {low}..{high}: {args.out}")
    return [] if high > low else [f"the image is one flat colour ({low})"]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--prompt", default="red heart")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance_scale", type=float, default=5.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=0, help="pixels; needed where the pipeline has no UNet")
    parser.add_argument("--num_frames", type=int, default=9)
    parser.add_argument("--max_sequence_length", type=int, default=512)
    parser.add_argument("--text_encoder_out_layers", type=json.loads, help="[9, 18, 27]; default: the pipeline's")
    parser.add_argument("--out", default="check_checkpoint.png")
    args = parser.parse_args()
    problems = check_weights(args.folder) or generate(args.folder, args)
    for p in problems:
        print("FAILED", p, file=sys.stderr)
    if not problems:
        print("ok")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
