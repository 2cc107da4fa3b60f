#!/usr/bin/env python3
"""Times sampling with SDXL-shaped models of random weights, ours and diffusers' in turns: ./run bench --sampling [options]

  --build DIR         where maxdiffusion is (build)
  --rounds N          how often each program is started (3); figures are medians over rounds
  --models            of: small, middle, sdxl (small,middle); sdxl is the published size
  --sizes             sides of the square images, pixels (256,512,1024)
  --dtypes            weights and activations of the UNet and the autoencoder: f32, bf16 (f32); text encoders' are f32
  --peer-dtypes       the same for diffusers (as --dtypes)
  --steps N           denoising steps, with guidance: each runs the UNet on two latents (4)
  --programs          of: ours, diffusers
  --python PATH       a Python with torch and diffusers, instead of .peers/

Prints one table: seconds for both text encoders (prompt and negative prompt), for one denoising step, for decoding, and
for the whole program (ours: cold, and warm from the executable cache), and peak resident memory. Our figures are read
from the program's own profile. Floors are what a step and decoding cannot be faster than on this machine: products, as
PyTorch counts those of its models, at the rate of one large product, and weights read once (model_bench rates).
"""

import argparse
import glob
import gzip
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
FULL = ROOT / "tests" / "golden" / "full"


def clip(width, layers, heads, projection, act):
    return dict(architectures=["CLIPTextModelWithProjection" if projection else "CLIPTextModel"], vocab_size=49408,
                hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=heads,
                max_position_embeddings=77, projection_dim=projection or width, hidden_act=act, bos_token_id=49406,
                eos_token_id=49407, pad_token_id=1)


def models(name):
    """Config dictionaries by component."""
    read = lambda file: json.loads(file.read_text())
    small, vae = read(ROOT / "bench" / "models" / "unet.json"), read(ROOT / "bench" / "models" / "vae.json")
    if name == "small":
        return dict(unet=small, vae=vae, text_encoder=clip(96, 4, 2, 0, "quick_gelu"),
                    text_encoder_2=clip(160, 4, 4, 256, "gelu"))
    if name == "middle":
        unet = dict(small, block_out_channels=[160, 320, 640], attention_head_dim=[5, 10, 20], cross_attention_dim=1024,
                    projection_class_embeddings_input_dim=640 + 6 * 64)
        return dict(unet=unet, vae=read(FULL / "vae.json"), text_encoder=clip(384, 8, 6, 0, "quick_gelu"),
                    text_encoder_2=clip(640, 12, 10, 640, "gelu"))
    return dict(unet=read(FULL / "unet_sdxl.json"), vae=read(FULL / "vae.json"), text_encoder=read(FULL / "clip_l.json"),
                text_encoder_2=read(FULL / "clip_bigg.json"))


SCHEDULER = dict(_class_name="EulerDiscreteScheduler", beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear",
                 num_train_timesteps=1000, prediction_type="epsilon", timestep_spacing="leading", steps_offset=1)


def write_folder(folder, parts, pipeline="StableDiffusionXLPipeline", scheduler=SCHEDULER):
    """A model folder with these configs by component, and one tokenizer per text encoder."""
    index = {"_class_name": pipeline}
    for component, config in {**parts, "scheduler": scheduler}.items():
        (folder / component).mkdir(parents=True)
        name = "scheduler_config.json" if component == "scheduler" else "config.json"
        (folder / component / name).write_text(json.dumps(config))
        class_name = config.get("_class_name", config.get("architectures", [""])[0])
        index[component] = ["diffusers" if "_class_name" in config else "transformers", class_name]
        if component.startswith("text_encoder"):
            kind = next((t for name, t in (("T5", "T5TokenizerFast"), ("Qwen", "Qwen2Tokenizer")) if name in class_name),
                        "CLIPTokenizer")
            index[component.replace("text_encoder", "tokenizer")] = ["transformers", kind]
    (folder / "model_index.json").write_text(json.dumps(index))


def peak_mb(command):
    """Runs a command; returns wall seconds, peak resident memory, and its output."""
    start = time.perf_counter()
    measured = [sys.executable, "-c", "import resource, subprocess, sys; code = subprocess.call(sys.argv[1:]); "
                "used = resource.getrusage(resource.RUSAGE_CHILDREN); print('processors', used.ru_utime + used.ru_stime); "
                "print('peak', used.ru_maxrss); sys.exit(code)", *map(str, command)]
    done = subprocess.run(measured, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"failed: {' '.join(map(str, command))}\n{done.stdout[-3000:]}")
    peak = int(done.stdout.rsplit("peak ", 1)[1]) * 1024 / 1e6
    return time.perf_counter() - start, peak, done.stdout


def spans(folder):
    """Events of the newest profile below a folder."""
    path = sorted(glob.glob(f"{folder}/**/*.trace.json.gz", recursive=True))[-1]
    return [e for e in json.load(gzip.open(path))["traceEvents"] if e["ph"] == "X"]


def from_profile(folder, steps):
    """Seconds that each program took, which run as they are called or while the host waits: text encoders, until others
    are compiled; the decoder, which runs last; between them denoising."""
    events = spans(folder)
    compiled, runs = (sorted(e["ts"] for e in events if e["name"] == name) for name in ("compile", "run program"))
    seconds = [0.0, 0.0, 0.0]
    for e in events:
        if e["name"] in ("wait for device", "run program"):
            seconds[(e["ts"] > compiled[1]) + (e["ts"] >= runs[-1])] += e["dur"] / 1e6
    return dict(text_s=seconds[0], step_s=seconds[1] / steps, decode_s=seconds[2])


def ours(o, folder, cache, size, dtype):
    with tempfile.TemporaryDirectory() as out:
        kind = {"f32": "float32", "bf16": "bfloat16"}[dtype]
        command = [pathlib.Path(o.build) / "maxdiffusion", "generate", ROOT / "configs" / "base_xl.yml",
                   f"pretrained_model_name_or_path={folder}", "run_name=", f"output_dir={out}", "prompt=a castle", "negative_prompt=rain",
                   f"resolution={size}", f"num_inference_steps={o.steps}", "per_device_batch_size=1", "guidance_scale=7.5",
                   "diffusion_scheduler_config={}", f"weights_dtype={kind}", f"activations_dtype={kind}",
                   f"vae_weights_dtype={kind}", f"vae_dtype={kind}",
                   f"jax_cache_dir={cache}", "enable_profiler=true"]
        wall, peak, _ = peak_mb(command)
        return dict(from_profile(out, o.steps), wall_s=wall, peak_mb=peak)


def peer(name, size, dtype, steps):
    """Inside the other Python: prints one JSON line."""
    import torch
    from diffusers import AutoencoderKL, EulerDiscreteScheduler, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    torch.manual_seed(0)
    parts = models(name)
    seconds = {}

    def timed(key, f):
        start = time.perf_counter()
        result = f()
        seconds[key] = seconds.get(key, 0) + time.perf_counter() - start
        return result

    with torch.inference_mode():
        ids = torch.full((2, 77), 49407)
        ids[:, 0] = 49406
        encoders = [kind(CLIPTextConfig(**{k: v for k, v in parts[c].items() if k != "architectures"})).eval()
                    for c, kind in (("text_encoder", CLIPTextModel), ("text_encoder_2", CLIPTextModelWithProjection))]
        outputs = timed("text_s", lambda: [e(ids, output_hidden_states=True) for e in encoders])
        embeds = torch.cat([x.hidden_states[-2] for x in outputs], -1)
        pooled = outputs[1].text_embeds
        del encoders, outputs
        kind = {"f32": torch.float32, "bf16": torch.bfloat16}[dtype]
        before = torch.get_default_dtype()
        torch.set_default_dtype(kind)
        unet = UNet2DConditionModel.from_config(parts["unet"]).eval()
        torch.set_default_dtype(before)
        down = 2 ** (len(parts["vae"]["block_out_channels"]) - 1)
        scheduler = EulerDiscreteScheduler.from_config({k: v for k, v in SCHEDULER.items() if k != "_class_name"})
        scheduler.set_timesteps(steps)
        latents = torch.randn(1, 4, size // down, size // down) * scheduler.init_noise_sigma
        added = dict(text_embeds=pooled.to(kind), time_ids=torch.tensor([[size, size, 0, 0, size, size]] * 2, dtype=kind))

        def step(latents, t):
            both = scheduler.scale_model_input(torch.cat([latents] * 2), t).to(kind)
            e = unet(both, t, embeds.to(kind), added_cond_kwargs=added, return_dict=False)[0].float()
            return scheduler.step(e[:1] + 7.5 * (e[1:] - e[:1]), t, latents, return_dict=False)[0]

        for t in scheduler.timesteps:
            latents = timed("step_s", lambda: step(latents, t))
        seconds["step_s"] /= steps
        del unet
        torch.set_default_dtype(kind)
        vae = AutoencoderKL.from_config(parts["vae"]).eval()
        timed("decode_s", lambda: vae.decode((latents / parts["vae"]["scaling_factor"]).to(kind)).sample)
    print(json.dumps(seconds))


def count(name, size):
    """Runs in the other Python: prints one JSON line, GFLOP and billions of weights of a step and of decoding."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from torch.utils.flop_counter import FlopCounterMode

    parts = models(name)
    with torch.device("meta"):
        unet, vae = UNet2DConditionModel.from_config(parts["unet"]), AutoencoderKL.from_config(parts["vae"])
        side = size // 2 ** (len(parts["vae"]["block_out_channels"]) - 1)
        added = dict(text_embeds=torch.ones(2, parts["text_encoder_2"]["projection_dim"]), time_ids=torch.ones(2, 6))
        text = torch.ones(2, 77, parts["unet"]["cross_attention_dim"])
        runs = dict(step=(unet, lambda: unet(torch.ones(2, 4, side, side), torch.ones(()), text, added_cond_kwargs=added)),
                    decode=(vae.decoder, lambda: vae.decode(torch.ones(1, 4, side, side))))
        work = {}
        for what, (model, run) in runs.items():
            with FlopCounterMode(display=False) as counter:
                run()
            work[what] = [counter.get_total_flops() / 1e9, sum(p.numel() for p in model.parameters()) / 1e9]
    print(json.dumps(work))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--sampling", action="store_true")
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", default="small,middle")
    parser.add_argument("--sizes", default="256,512,1024")
    parser.add_argument("--dtypes", default="f32")
    parser.add_argument("--peer-dtypes")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--programs", default="ours,diffusers")
    parser.add_argument("--python")
    parser.add_argument("--peer", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--count", nargs=2, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.count:
        return count(o.count[0], int(o.count[1]))
    if o.peer:
        return peer(o.peer[0], int(o.peer[1]), o.peer[2], o.steps)
    programs = o.programs.split(",")
    if "diffusers" in programs and not o.python:
        from compare import reference_python
        o.python = reference_python()
    rows = {}
    answer = lambda *command: json.loads(subprocess.run(list(map(str, command)), capture_output=True, text=True,
                                                        check=True).stdout.splitlines()[-1])
    with tempfile.TemporaryDirectory() as scratch:
        for name in o.models.split(","):
            folder = pathlib.Path(scratch) / name
            write_folder(folder, models(name))
            if "ours" in programs:
                subprocess.run([pathlib.Path(o.build) / "random_weights", folder], check=True)
            for size in map(int, o.sizes.split(",")):
                for _ in range(o.rounds):
                    for dtype in o.dtypes.split(",") if "ours" in programs else []:
                        key = (name, size, dtype)
                        with tempfile.TemporaryDirectory() as cache:
                            cold = ours(o, folder, cache, size, dtype)
                            warm = ours(o, folder, cache, size, dtype)
                        rows.setdefault((*key, "maxdiffusion.cpp"), []).append(dict(warm, wall_s=cold["wall_s"],
                                                                                    warm_s=warm["wall_s"]))
                    for dtype in (o.peer_dtypes or o.dtypes).split(",") if "diffusers" in programs else []:
                        wall, peak, out = peak_mb([o.python, __file__, "--peer", name, size, dtype, "--steps", o.steps])
                        line = json.loads([l for l in out.splitlines() if l.startswith("{")][-1])
                        rows.setdefault((name, size, dtype, "diffusers"), []).append(dict(line, wall_s=wall, peak_mb=peak))
    columns = dict(text_s="text, s", step_s="step, s", step_floor="floor, s", decode_s="decode, s",
                   decode_floor="floor, s", wall_s="program, s", warm_s="warm, s", peak_mb="peak, MB")
    print("| model | pixels | dtype | program | " + " | ".join(columns.values()) + " | step ÷ | decode ÷ |")
    print("|" + " --- |" * (len(columns) + 6))
    median = {k: {c: statistics.median(r[c] for r in v) for c in columns if c in v[0]} for k, v in rows.items()}
    if "diffusers" in programs:
        rates = {dtype: answer(pathlib.Path(o.build) / "model_bench", "rates", dtype) for dtype in o.dtypes.split(",")}
        work = {(name, size): answer(o.python, __file__, "--count", name, size) for name, size, *_ in rows}
        for (name, size, dtype, program), m in median.items():
            for what, (gflop, weights) in work[name, size].items() if program != "diffusers" else []:
                gb = weights * {"f32": 4, "bf16": 2}[dtype]
                m[f"{what}_floor"] = gflop / rates[dtype]["gflop_per_s"] + gb / rates[dtype]["gb_per_s"]
    for (name, size, dtype, program), m in sorted(median.items(), key=lambda x: [x[0][0], x[0][1], x[0][3]]):
        peers = [v for k, v in median.items() if k[:2] == (name, size) and k[3] == "diffusers"]
        cells = ["–" if c not in m else f"{m[c]:.0f}" if c == "peak_mb" else f"{m[c]:.3g}" for c in columns]
        ratios = [f"{m[c] / min(p[c] for p in peers):.2f}" if peers else "–" for c in ("step_s", "decode_s")]
        print("| " + " | ".join([name, f"{size}²", dtype, program, *cells, *ratios]) + " |")


if __name__ == "__main__":
    main()
