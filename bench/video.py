#!/usr/bin/env python3
"""Times Wan's video autoencoders with random weights in f32, ours and diffusers' in turns: ./run bench --video [options]

  --build DIR         where video_bench is (build)
  --rounds N          how often each program is started (3); figures are medians over rounds
  --reps N            timed runs per start, after the first (1)
  --models            of: wan_vae_21, wan_vae_22 (wan_vae_21): the published sizes
  --sizes             sides of the square videos, pixels (256)
  --frames            their lengths (17)
  --what              of: encode, decode
  --chunk N           latent frames at a time (1), ours; diffusers takes one
  --programs          of: ours, diffusers
  --python PATH       a Python with torch and diffusers, instead of .judge/

Prints one table: seconds, seconds of processors (which other programs on the machine lengthen less), and peak resident
memory of the process, with the share of it that was there before the first run (the interpreter, the weights).
"""

import argparse
import json
import pathlib
import resource
import statistics
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
FULL = ROOT / "tests" / "golden" / "full"


def peer(what, config, size, frames, reps):
    """Inside the other Python: prints one JSON line."""
    import torch
    from diffusers import AutoencoderKLWan

    torch.manual_seed(0)
    model = AutoencoderKLWan.from_config(json.loads(pathlib.Path(config).read_text())).eval()
    peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    before, wall, processor = peak(), [], []
    c = model.config
    side = (c.patch_size or 1) << (len(c.dim_mult) - 1)
    latents = 1 + (frames - 1 >> sum(c.temperal_downsample))
    x = (torch.rand(1, 3, frames, size, size) * 2 - 1 if what == "encode"
         else torch.randn(1, c.z_dim, latents, size // side, size // side))
    with torch.inference_mode():
        for _ in range(reps + 1):
            start, used = time.perf_counter(), time.process_time()
            model.encode(x).latent_dist.mode() if what == "encode" else model.decode(x).sample
            wall.append(time.perf_counter() - start)
            processor.append(time.process_time() - used)
    print(json.dumps(dict(program="diffusers", seconds=statistics.median(wall[1:]),
                          processor_s=statistics.median(processor[1:]), before_mib=before, peak_mib=peak())))


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
    parser.add_argument("--peer", nargs=4, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.peer:
        return peer(o.peer[0], o.peer[1], int(o.peer[2]), int(o.peer[3]), o.reps)
    from compare import judge, run
    programs = o.programs.split(",")
    if "diffusers" in programs and not o.python:
        o.python = judge()
    commands = {
        "ours": lambda *case: [pathlib.Path(o.build) / "video_bench", *case, "--chunk", o.chunk, "--reps", o.reps],
        "diffusers": lambda *case: [o.python, __file__, "--reps", o.reps, "--peer", *case],
    }
    print("| model | what | pixels | frames | program | s | of processors, s | before, MiB | peak, MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for model in o.models.split(","):
        for what in o.what.split(","):
            for size in o.sizes.split(","):
                for frames in o.frames.split(","):
                    rows = {p: [] for p in programs}
                    for _ in range(o.rounds):
                        for p in programs:
                            row = run(commands[p](what, FULL / f"{model}.json", size, frames))
                            rows[p] += [row] if row else []
                    for p in programs:
                        if not rows[p]:
                            continue
                        m = {k: statistics.median(r[k] for r in rows[p])
                             for k in ("seconds", "processor_s", "before_mib", "peak_mib")}
                        print(f"| {model} | {what} | {size}² | {frames} | {rows[p][0]['program']} | {m['seconds']:.3g} | "
                              f"{m['processor_s']:.3g} | {m['before_mib']:.0f} | {m['peak_mib']:.0f} |", flush=True)


if __name__ == "__main__":
    main()
