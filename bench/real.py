#!/usr/bin/env python3
"""Whole processes at the published sizes, ours and those of diffusers and peft: ./run bench --real [models] [options]

  models              of: sd15, sdxl, wan1.3b, flux, zimage (sd15)
  --work              of: generate, lora, full, convert (all): four steps of sampling with guidance; LoRA of rank 16 with
                      cached latents; steps of full training and its checkpoint, saved and resumed from; bf16 to f16
  --programs          of: ours, peer (both)
  --folder DIR        where models are made and kept (a temporary folder): DIR/MODEL
  --memory GB         what one process may take (what is free now)
  --steps N           of sampling and of training (4)
  --images N          that LoRA's data has (4)
  --build DIR         where maxdiffusion and random_weights are (build)
  --python PATH       a Python with torch, diffusers and peft, instead of .peers/
  --rows FILE         append every row as JSON

Models have random weights in bf16, written by build/random_weights: only time and memory mean something. What does not
fit into the memory or onto the disk is skipped by name. Seconds of a step leave the first one out; ours compiles in
every process.
"""

import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from sampling import FULL, ROOT, SCHEDULER, peak_mb, spans, write_folder

FLOW = dict(_class_name="FlowMatchEulerDiscreteScheduler", num_train_timesteps=1000, shift=3.0)
# gb: GB of the bf16 weights of text encoders, denoiser, autoencoder. work: GB that a process needs in addition to its
# weights, for this program and the peer, for sampling, LoRA and full training.
MODELS = {
    "sd15": dict(parts=dict(unet="unet_sd15", vae="vae", text_encoder="clip_l"), pipeline="StableDiffusionPipeline",
                 scheduler=SCHEDULER, config="base15", size=(512, 512), gb=(0.25, 1.72, 0.17), work=(3, 4, 3)),
    "sdxl": dict(parts=dict(unet="unet_sdxl", vae="vae", text_encoder="clip_l", text_encoder_2="clip_bigg"),
                 pipeline="StableDiffusionXLPipeline", scheduler=SCHEDULER, config="base_xl", size=(1024, 1024),
                 gb=(1.64, 5.14, 0.17), work=(5, 9, 9)),
    "wan1.3b": dict(parts=dict(transformer="wan21_t2v_1_3b", vae="wan_vae_21", text_encoder="umt5_xxl"),
                    pipeline="WanPipeline", scheduler=FLOW, config="base_wan_1_3b", size=(480, 832),
                    gb=(11.4, 2.84, 0.25), work=(4, 12, 12)),
    "flux": dict(parts=dict(transformer="flux_dev", vae="vae_flux", text_encoder="clip_l", text_encoder_2="t5_xxl"),
                 pipeline="FluxPipeline", scheduler=FLOW, config="base_flux_dev", size=(1024, 1024),
                 gb=(9.8, 23.8, 0.17), work=(6, 12, 12)),
    "zimage": dict(parts=dict(transformer="z_image", vae="vae_flux", text_encoder="qwen3_4b"), pipeline="ZImagePipeline",
                   scheduler=FLOW, config="base_zimage", size=(512, 512), gb=(8.04, 12.3, 0.17), work=(2, 8, 8)),
}
FRAMES = 17  # of a video


def needed(model, work, program):
    """Approximate GB of memory that a process needs."""
    text, denoiser, vae = MODELS[model]["gb"]
    sampling, lora, full = MODELS[model]["work"]
    if work == "generate":
        return sampling + (max(text, denoiser, vae) if program == "ours" else text + denoiser + vae)
    if work == "lora":
        return lora + max(text, denoiser)
    if work == "full":  # weights and gradients in bf16; moments, ours in f32, the peer's in bf16
        return full + denoiser * (6 if program == "ours" else 4)
    return 1 if program == "ours" else 2 * (text + denoiser + vae)


def measured(command):
    """Runs a command; returns the columns of the whole process, and its output."""
    wall, peak, text = peak_mb(command)
    return dict(wall_s=wall, processor_s=logged(text, r"processors ([\d.]+)"), peak_mb=peak), text


def logged(text, pattern):
    return float(re.search(pattern, text).group(1))


def free_gb():
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024 / 1e9 for line in lines if line.startswith("MemAvailable"))


def make(o, model, folder):
    """Writes the folder of a model once; returns seconds and megabytes."""
    m = MODELS[model]
    if (folder / "done").exists():
        return None
    shutil.rmtree(folder, ignore_errors=True)
    write_folder(folder, {name: json.loads((FULL / f"{file}.json").read_text()) for name, file in m["parts"].items()},
                 m["pipeline"], m["scheduler"])
    words = ROOT / "configs" / "models" / "moving_emoji" / "tokenizer"  # T5's, with few words; CLIP's is installed
    copied = {"wan1.3b": ("tokenizer", words), "flux": ("tokenizer_2", words),
              "zimage": ("tokenizer", ROOT / "tests" / "golden" / "zimage" / "base" / "tokenizer")}
    if model in copied:
        shutil.copytree(copied[model][1], folder / copied[model][0])
    whole, _ = measured([pathlib.Path(o.build) / "random_weights", folder])
    (folder / "done").touch()
    return dict(whole, gb=weights_gb(folder))


def weights_gb(folder):
    return sum(file.stat().st_size for file in folder.rglob("*.safetensors")) / 1e9


# --- ours ------------------------------------------------------------------------------------------------------------

def program(o, command, model, folder, out, words):
    m = MODELS[model]
    height, width = m["size"]
    size = ([f"height={height}", f"width={width}", f"num_frames={FRAMES}"] if model == "wan1.3b" else
            [f"resolution={height}", f"height={height}", f"width={width}"])
    return measured([pathlib.Path(o.build) / "maxdiffusion", command, ROOT / "configs" / f"{m['config']}.yml",
                    f"pretrained_model_name_or_path={folder}", f"output_dir={out}", "run_name=real",
                    "weights_dtype=bfloat16", "activations_dtype=bfloat16", "text_encoder_dtype=bfloat16",
                    "vae_dtype=bfloat16", "vae_weights_dtype=bfloat16", "jax_cache_dir=off", "enable_profiler=true",
                    "skip_first_n_steps_for_profiler=0", "profiler_steps=1000", *size, *words])


def our_generate(o, model, folder, out):
    guidance = [] if model in ("flux", "zimage") else ["guidance_scale=7.5", "negative_prompt=rain"]
    whole, log = program(o, "generate", model, folder, out,
                              ["prompt=a castle", f"num_inference_steps={o.steps}", "per_device_batch_size=1",
                               "diffusion_scheduler_config={}", *guidance])
    events = spans(out)
    compile_s = sum(e["dur"] for e in events if e["name"] == "compile") / 1e6
    text, denoised, decoded = (logged(log, rf"{what} after ([\d.]+) s") for what in ("encoded", "denoised", "decoded"))
    # A step's program runs when it is called or while the host waits; it is compiled before.
    begun, ended = (min(e["ts"] for e in events) + 1e6 * t for t in (text, denoised))
    runs = sum(e["dur"] for e in events
               if e["name"] in ("wait for device", "run program") and begun <= e["ts"] <= ended) / 1e6
    return dict(whole, phases=dict(compile=compile_s, text=text, step=runs / o.steps, decode=decoded - denoised),
                images=1 / whole["wall_s"])


def our_training(o, model, folder, out, words):
    words = ["dataset_type=synthetic", f"synthetic_num_samples={o.images}", "per_device_batch_size=1",
             "cache_latents_text_encoder_outputs=true", "log_period=1", f"timing_metrics_file={out}/phases",
             f"metrics_file={out}/metrics.jsonl", *words]
    out.mkdir(parents=True, exist_ok=True)
    whole, log = program(o, "train", model, folder, out, words)
    after = time.time() - (out / "metrics.jsonl").stat().st_mtime  # the last step
    steps = [json.loads(line)["perf/step_time_seconds"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    compile_s = sum(map(float, re.findall(r"compiled in ([\d.]+) s", log)))
    data = logged((out / "phases").read_text(), r"Finished: data - Duration: ([\d.]+)")
    step = sorted(steps[1:])[len(steps[1:]) // 2] if steps[1:] else steps[0]
    return dict(whole, images=1 / step,
                phases=dict(compile=compile_s, encode=data / o.images, first=steps[0], step=step, save=after))


def our_lora(o, model, folder, out):
    return our_training(o, model, folder, out, ["train_lora=true", "lora_rank=16", f"max_train_steps={o.steps}"])


def our_full(o, model, folder, out):
    words = ["low_precision_update=stochastic_rounding"]
    row = our_training(o, model, folder, out, [*words, f"max_train_steps={o.steps}"])
    row["gb"] = weights_gb(out / "real" / "checkpoints")
    again = our_training(o, model, folder, out, [*words, f"max_train_steps={o.steps + 1}", "save_final_checkpoint=false"])
    row["phases"]["resumed"] = again["wall_s"]
    return row


def our_convert(o, model, folder, out):
    whole, _ = measured([pathlib.Path(o.build) / "maxdiffusion", "convert", folder, out, "dtype=float16"])
    return dict(whole, gb=weights_gb(out))


# --- the peer, inside the other Python; each prints one JSON line ----------------------------------------------------

class Timed(dict):
    def __call__(self, key, f, *arguments, **named):
        start = time.perf_counter()
        result = f(*arguments, **named)
        self[key] = self.get(key, 0) + time.perf_counter() - start
        return result


def peer_generate(o, model, folder, out):
    import torch
    from diffusers import DiffusionPipeline

    timed = Timed()
    pipe = timed("load", DiffusionPipeline.from_pretrained, folder, torch_dtype=torch.bfloat16)
    for owner, name, key in ((pipe, "encode_prompt", "text"), (pipe.vae, "decode", "decode"),
                             (pipe.unet if hasattr(pipe, "unet") else pipe.transformer, "forward", "step")):
        inner = getattr(owner, name)
        setattr(owner, name, lambda *a, inner=inner, key=key, **k: timed(key, inner, *a, **k))
    height, width = MODELS[model]["size"]
    extra = dict(num_frames=FRAMES) if model == "wan1.3b" else {}
    if model == "zimage":
        extra |= dict(guidance_scale=0.0)
    elif model != "flux":
        extra |= dict(negative_prompt="rain", guidance_scale=7.5)
    pipe("a castle", height=height, width=width, num_inference_steps=o.steps, **extra)
    timed["step"] /= o.steps
    return dict(phases=timed)


def loss_of(model, folder):
    """A denoiser, and its loss for a latent and a text with the sizes of the work."""
    import diffusers
    import torch

    kind = torch.bfloat16
    part = "unet" if "unet" in MODELS[model]["parts"] else "transformer"
    config = json.loads((pathlib.Path(folder) / part / "config.json").read_text())
    net = getattr(diffusers, config["_class_name"]).from_pretrained(folder, subfolder=part, torch_dtype=kind)
    height, width = (n // 8 for n in MODELS[model]["size"])
    normal = lambda *sizes: torch.randn(*sizes, dtype=kind)

    def of_unet(latent, noise):
        scheduler = diffusers.DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
        t = torch.randint(0, 1000, (1,))
        added = dict(text_embeds=normal(1, 1280), time_ids=torch.tensor([[1024.0, 1024, 0, 0, 1024, 1024]], dtype=kind))
        named = dict(added_cond_kwargs=added) if model == "sdxl" else {}
        text = normal(1, 77, config["cross_attention_dim"])
        return net(scheduler.add_noise(latent, noise, t), t, text, return_dict=False, **named)[0], noise

    def of_wan(latent, noise):
        sigma = torch.rand(1, dtype=kind)
        noisy = (1 - sigma) * latent + sigma * noise
        return net(noisy, 1000 * sigma, normal(1, 512, config["text_dim"]), return_dict=False)[0], noise - latent

    def of_flux(latent, noise):
        sigma = torch.rand(1, dtype=kind)
        noisy = (1 - sigma) * latent + sigma * noise
        places = torch.zeros(latent.shape[1], 3)
        return net(noisy, normal(1, 512, config["joint_attention_dim"]), normal(1, config["pooled_projection_dim"]), sigma,
                   places, torch.zeros(512, 3), guidance=torch.full((1,), 3.5), return_dict=False)[0], noise - latent

    def of_z_image(latent, noise):
        sigma = torch.rand(1, dtype=kind)
        noisy = (1 - sigma) * latent + sigma * noise
        prediction = net([noisy[0]], 1 - sigma, [normal(512, config["cap_feat_dim"])], return_dict=False)[0][0]
        return -prediction[None], noise - latent

    if model == "zimage":
        sizes, f = (1, 16, 1, height, width), of_z_image
    elif model == "wan1.3b":
        sizes, f = (1, 16, 1 + (FRAMES - 1) // 4, height, width), of_wan
    elif model == "flux":
        sizes, f = (1, height * width // 4, config["in_channels"]), of_flux
    else:
        sizes, f = (1, 4, height, width), of_unet

    def loss():
        prediction, target = f(normal(*sizes), normal(*sizes))
        return torch.nn.functional.mse_loss(prediction.float(), target.float())

    return net, loss


def train(o, timed, parameters, loss):
    import torch

    optimizer = torch.optim.AdamW(parameters, lr=1e-5)

    def step():
        loss().backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    timed("first", step)
    for _ in range(o.steps - 1):
        timed("step", step)
    timed["step"] = timed.get("step", timed["first"]) / max(o.steps - 1, 1)
    return optimizer


def peer_lora(o, model, folder, out):
    import diffusers
    import torch
    from peft import LoraConfig

    timed = Timed()
    config = json.loads((pathlib.Path(folder) / "vae" / "config.json").read_text())
    vae = timed("load", getattr(diffusers, config["_class_name"]).from_pretrained, folder, subfolder="vae",
                torch_dtype=torch.bfloat16)
    height, width = MODELS[model]["size"]
    frames = [FRAMES] if model == "wan1.3b" else []
    with torch.inference_mode():
        for _ in range(o.images):
            timed("encode", vae.encode, torch.randn(1, 3, *frames, height, width, dtype=torch.bfloat16))
    timed["encode"] /= o.images
    del vae
    net, loss = timed("load", loss_of, model, folder)
    net.requires_grad_(False)
    net.add_adapter(LoraConfig(r=16, lora_alpha=16, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    train(o, timed, [p for p in net.parameters() if p.requires_grad], loss)
    return dict(phases=timed)


def peer_full(o, model, folder, out):
    import torch

    timed = Timed()
    net, loss = timed("load", loss_of, model, folder)
    net.train()
    optimizer = train(o, timed, list(net.parameters()), loss)
    out.mkdir(parents=True)
    state = dict(model=net.state_dict(), optimizer=optimizer.state_dict())
    timed("save", torch.save, state, out / "state.pt")
    timed("restore", torch.load, out / "state.pt")
    return dict(phases=timed, gb=(out / "state.pt").stat().st_size / 1e9)


def peer_convert(o, model, folder, out):
    import torch
    from diffusers import DiffusionPipeline

    timed = Timed()
    pipe = timed("load", DiffusionPipeline.from_pretrained, folder, torch_dtype=torch.float16)
    timed("save", pipe.save_pretrained, out)
    return dict(phases=timed, gb=weights_gb(out))


def peer(o, work, model, folder, out):
    command = [o.python, __file__, "--peer", work, model, folder, out, "--steps", o.steps, "--images", o.images]
    whole, text = measured(command)
    row = json.loads([line for line in text.splitlines() if line.startswith("{")][-1])
    seconds = {"generate": whole["wall_s"], "convert": None}.get(work, row["phases"].get("step"))
    return row | whole | dict(images=1 / seconds if seconds else None)


# --- the table -------------------------------------------------------------------------------------------------------

def cells(model, work, program, row):
    phases = ", ".join(f"{name} {seconds:.2f}" for name, seconds in row.get("phases", {}).items())
    images, gb = row.get("images"), row.get("gb")
    return [model, work, program, phases or "–", f"{row['wall_s']:.1f}", f"{row['processor_s']:.1f}",
            f"{row['peak_mb']:.0f}", f"{images:.3g}" if images else "–", f"{gb:.2f} ({1000 * gb / row['wall_s']:.0f})" if gb else "–"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("models", nargs="*")
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--work", default="generate,lora,full,convert")
    parser.add_argument("--programs", default="ours,peer")
    parser.add_argument("--folder")
    parser.add_argument("--memory", type=float)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--images", type=int, default=4)
    parser.add_argument("--python")
    parser.add_argument("--rows")
    parser.add_argument("--peer", nargs=4, help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.peer:
        work, model, folder, out = o.peer
        row = globals()[f"peer_{work}"](o, model, folder, pathlib.Path(out))
        return print(json.dumps(row))
    unknown = set(o.models) - set(MODELS)
    if unknown:
        sys.exit(f"error: no model {', '.join(sorted(unknown))}; there are: {', '.join(MODELS)}")
    programs = o.programs.split(",")
    if "peer" in programs and not o.python:
        from compare import reference_python
        o.python = reference_python()
    table = []

    def add(model, work, program, row):
        table.append(cells(model, work, program, row))
        print(" | ".join(table[-1]), file=sys.stderr, flush=True)
        if o.rows:
            with open(o.rows, "a") as file:
                print(json.dumps(dict(row, model=model, work=work, program=program)), file=file)

    skipped = []
    with tempfile.TemporaryDirectory() as scratch:
        for model in o.models or ["sd15"]:
            root = pathlib.Path(o.folder or scratch)
            folder = root / model
            size = sum(MODELS[model]["gb"])
            # The folder, and the largest output.
            written = dict(generate=0.1, lora=0.5, convert=size, full=6 * MODELS[model]["gb"][1])
            made = (folder / "done").exists()
            disk = (0 if made else size) + max(written[work] for work in o.work.split(","))
            free = shutil.disk_usage(root).free / 1e9
            if disk > free:
                skipped.append(f"{model}: {disk:.0f} GB of disk, {free:.0f} are free in {root}")
                continue
            for work in o.work.split(","):
                for name in programs:
                    most, need = o.memory or free_gb(), needed(model, work, name)
                    if need > most:
                        skipped.append(f"{model} {work}, {name}: about {need:.0f} GB of memory, {most:.0f} may be taken")
                        continue
                    if not made and (row := make(o, model, folder)):
                        add(model, "make", "ours", row)
                    made = True
                    with tempfile.TemporaryDirectory(dir=root) as out:
                        try:
                            run = globals()[f"our_{work}"] if name == "ours" else lambda *a, w=work: peer(a[0], w, *a[1:])
                            add(model, work, name, run(o, model, folder, pathlib.Path(out) / "out"))
                        except SystemExit as failure:
                            print(failure, file=sys.stderr)
                            skipped.append(f"{model} {work}, {name}: it failed (see above)")
            if not o.folder:
                shutil.rmtree(folder, ignore_errors=True)
    print("| model | work | program | s of its parts | process, s | of processors, s | peak, MB | images/s | "
          "GB (MB/s) |")
    print("|" + " --- |" * 9)
    names = dict(ours="maxdiffusion.cpp", peer="diffusers")
    for row in table:
        print("| " + " | ".join([*row[:2], names[row[2]], *row[3:]]) + " |")
    for line in skipped:
        print(f"skipped: {line}")


if __name__ == "__main__":
    main()
