#!/usr/bin/env python3
"""Times Wan's models and Flux's with random weights, ours and diffusers' in turns: ./run bench --video [options]

  --build DIR         where video_bench is (build)
  --rounds N          how often each program is started (3); figures are medians over rounds
  --reps N            timed runs per start, after the first (1); 0: the first is timed
  --models            of: wan_vae_21, wan_vae_22, wan21_t2v_1_3b, flux_dev, … (wan_vae_21): the published sizes; flux:
                      flux_dev's with 2 double and 4 single blocks instead of 19 and 38
  --sizes             of the videos, pixels: 256 for a square, 832x480 (256)
  --frames            their lengths (17; of Flux's images 1)
  --what              of: encode, decode, and denoise for the transformers, once on one latent (encode,decode)
  --dtypes            weights and activations of the transformers, ours: f32, bf16 (f32)
  --peer-dtypes       the same for diffusers (as --dtypes)
  --chunk N           latent frames at a time (1), ours; diffusers takes one
  --programs          of: ours, diffusers
  --python PATH       a Python with torch and diffusers, instead of .peers/

Prints one table: seconds, seconds of processors (which other programs on the machine lengthen less), and peak resident
memory of the process, with the share of it that was there before the first run (the interpreter, the weights).
"""

import argparse
import itertools
import json
import pathlib
import resource
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
FULL = ROOT / "tests" / "golden" / "full"


def peer(what, config, size, frames, dtype, reps):
    """Inside the other Python: prints one JSON line."""
    import torch
    from diffusers import AutoencoderKLWan, FluxTransformer2DModel, WanTransformer3DModel

    torch.manual_seed(0)
    kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
    torch.set_default_dtype(kind)
    config = json.loads(pathlib.Path(config).read_text())
    images = config.get("_class_name") == "FluxTransformer2DModel"
    made = FluxTransformer2DModel if images else WanTransformer3DModel if what == "denoise" else AutoencoderKLWan
    model = made.from_config(config).eval()
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    before, wall, processor = peak(), [], []
    c = model.config
    width, height = (int(n) for n in (size if "x" in size else f"{size}x{size}").split("x"))
    if images:
        rows, columns = height // 16, width // 16
        x, text = torch.randn(1, rows * columns, c.in_channels), torch.randn(1, 512, c.joint_attention_dim)
        places = torch.zeros(rows, columns, 3)
        places[..., 1], places[..., 2] = torch.arange(rows)[:, None], torch.arange(columns)[None]
        guidance = dict(guidance=torch.full((1,), 3.5)) if c.guidance_embeds else {}
        run = lambda: model(x, text, torch.randn(1, c.pooled_projection_dim), torch.full((1,), 0.5),
                            places.reshape(-1, 3), torch.zeros(512, 3), **guidance, return_dict=False)
    elif what == "denoise":
        x = torch.randn(1, c.in_channels, 1 + (frames - 1) // 4, height // 8, width // 8)
        text = torch.randn(1, 512, c.text_dim)
        run = lambda: model(x, torch.full((1,), 500.0), text, return_dict=False)
    else:
        side = (c.patch_size or 1) << (len(c.dim_mult) - 1)
        latents = 1 + (frames - 1 >> sum(c.temperal_downsample))
        x = (torch.rand(1, 3, frames, height, width) * 2 - 1 if what == "encode"
             else torch.randn(1, c.z_dim, latents, height // side, width // side))
        run = lambda: model.encode(x).latent_dist.mode() if what == "encode" else model.decode(x).sample
    with torch.inference_mode():
        for _ in range(reps + 1):
            start, used = time.perf_counter(), time.process_time()
            run()
            wall.append(time.perf_counter() - start)
            processor.append(time.process_time() - used)
    middle = lambda times: statistics.median(times[1:] or times)
    print(json.dumps(dict(program="diffusers", seconds=middle(wall), processor_s=middle(processor), before_mib=before,
                          peak_mib=peak())))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--video", action="store_true")
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--reps", type=int, default=1)
    parser.add_argument("--models", default="wan_vae_21")
    parser.add_argument("--sizes", default="256")
    parser.add_argument("--frames", default="17")
    parser.add_argument("--what", default="encode,decode")
    parser.add_argument("--chunk", type=int, default=1)
    parser.add_argument("--programs", default="ours,diffusers")
    parser.add_argument("--python")
    parser.add_argument("--dtypes", default="f32")
    parser.add_argument("--peer-dtypes")
    parser.add_argument("--peer", nargs=5, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.peer:
        return peer(*o.peer[:3], int(o.peer[3]), o.peer[4], o.reps)
    from compare import reference_python, run
    programs = o.programs.split(",")
    if "diffusers" in programs and not o.python:
        o.python = reference_python()
    commands = {
        "ours": lambda *case, dtype: [pathlib.Path(o.build) / "video_bench", *case, "--chunk", o.chunk, "--reps", o.reps,
                                      "--dtype", dtype],
        "diffusers": lambda *case, dtype: [o.python, __file__, "--reps", o.reps, "--peer", *case, dtype],
    }
    dtypes = {"ours": o.dtypes, "diffusers": o.peer_dtypes or o.dtypes}
    columns = [(p, dtype) for p in programs for dtype in dtypes[p].split(",")]
    print("| model | what | pixels | frames | dtype | program | s | of processors, s | before, MiB | peak, MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for model, what, size, frames in itertools.product(*(x.split(",") for x in (o.models, o.what, o.sizes, o.frames))):
        rows = {c: [] for c in columns}
        for _ in range(o.rounds):
            for p, dtype in columns:
                config = FULL / f"{model}.json"
                config = config if config.exists() else ROOT / "bench" / "models" / f"{model}.json"
                row = run(commands[p](what, config, size, frames, dtype=dtype))
                rows[p, dtype] += [row] if row else []
        for p, dtype in columns:
            if not rows[p, dtype]:
                continue
            m = {k: statistics.median(r[k] for r in rows[p, dtype])
                 for k in ("seconds", "processor_s", "before_mib", "peak_mib")}
            print(f"| {model} | {what} | {size} | {frames} | {dtype} | {rows[p, dtype][0]['program']} | "
                  f"{m['seconds']:.3g} | {m['processor_s']:.3g} | {m['before_mib']:.0f} | {m['peak_mib']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
