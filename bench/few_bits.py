#!/usr/bin/env python3
"""Compares a quantized frozen base with bfloat16: LoRA steps of a transformer with FLUX.1's layers, and its output error.

    python3 bench/few_bits.py [--heads 8] [--layers 4] [--pixels 64] [--steps 6] [--rounds 3] [--build build]

Makes a model folder: tests/golden/flux/dev with head_dim 128 and random weights (build/random_weights). For each
base_weights_dtype, --rounds times alternately, trains a LoRA of rank 16 in bfloat16 with scan_layers, and once runs a
sampling step in float32 from the same noise. Columns: seconds of a training step (median of all but each run's first two) and
its ratio to bfloat16's; peak memory of training; relative L2 distance of the denoiser's output from that of unquantized
weights.
"""
import argparse
import json
import pathlib
import shutil
import statistics
import sys
import tempfile

import numpy as np
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from sampling import ROOT, peak_mb


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(heads=8, layers=4, pixels=64, steps=6, rounds=3).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--types", default=",float8_e4m3fn,int8,nf4", help="values of base_weights_dtype, with commas")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    a = parser.parse_args()
    types = a.types.split(",")
    with tempfile.TemporaryDirectory() as place:
        at = pathlib.Path(place)
        shutil.copytree(ROOT / "tests/golden/flux/dev", at / "model")
        file = at / "model/transformer/config.json"
        config = json.loads(file.read_text())
        config |= dict(attention_head_dim=128, axes_dims_rope=[16, 56, 56], num_attention_heads=a.heads,
                       num_layers=a.layers, num_single_layers=2 * a.layers)
        file.write_text(json.dumps(config))
        for weights in (at / "model").glob("*/*.safetensors"):
            weights.unlink()
        made = peak_mb([a.build / "random_weights", at / "model"])[2]
        print(next(line for line in made.splitlines() if line.startswith("transformer")))
        common = [ROOT / "configs/base_flux_dev.yml", f"pretrained_model_name_or_path={at}/model", "hardware=cpu",
                  "scan_layers=true", f"resolution={a.pixels}", "max_sequence_length=12", "weights_dtype=bfloat16",
                  "attention=dot_product", "per_device_batch_size=1"]
        # The folder's autoencoder halves the sides of images; a token has 2×2 latents.
        noise = np.random.default_rng(1).standard_normal((1, 16, a.pixels // 2, a.pixels // 2), dtype=np.float32)
        save_file({"latents": noise}, at / "noise.safetensors")
        seconds, peaks, outputs = {t: [] for t in types}, {t: [] for t in types}, {}
        for r in range(a.rounds):
            for t in types:
                run = f"{t or 'bf16'}{r}"
                _, peak, _ = peak_mb([a.build / "maxdiffusion", "train", *common, "train_lora=true", "lora_rank=16",
                                      f"base_weights_dtype={t}", f"output_dir={at}", f"run_name={run}",
                                      "dataset_type=synthetic", "synthetic_num_samples=4", "train_data_dir=",
                                      f"max_train_steps={a.steps}", "checkpoint_every=-1",
                                      f"metrics_file={at}/{run}.jsonl",
                                      "cache_latents_text_encoder_outputs=true"])
                lines = [json.loads(x) for x in (at / f"{run}.jsonl").read_text().splitlines()]
                seconds[t] += [x["step_time_seconds"] for x in lines if "step_time_seconds" in x][2:]
                peaks[t].append(peak)
        for t in types:
            peak_mb([a.build / "maxdiffusion", "generate", *common, "activations_dtype=float32", "prompt=a heart",
                     f"base_weights_dtype={t}", f"output_dir={at}/{t or 'bf16'}", "num_inference_steps=1",
                     "output_type=latent", f"latents={at}/noise.safetensors"])
            found = list((at / (t or "bf16")).rglob("latents.safetensors"))
            outputs[t] = load_file(found[0])["latents"].astype(np.float64)
        # One step removes the whole prediction: the sample is the noise minus the output.
        size = np.linalg.norm(outputs[""] - noise)
        base = statistics.median(seconds[""])
        print("| base | step, s | ÷ | peak, MB | distance |\n| --- | --- | --- | --- | --- |")
        for t in types:
            step = statistics.median(seconds[t])
            print(f"| {t or 'bfloat16'} | {step:.3f} | {step / base:.2f} | {statistics.median(peaks[t]):.0f} | "
                  f"{np.linalg.norm(outputs[t] - outputs['']) / size:.4f} |")


if __name__ == "__main__":
    main()
