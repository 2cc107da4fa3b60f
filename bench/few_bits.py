#!/usr/bin/env python3
"""Compares a quantized frozen base with bfloat16: LoRA steps of a transformer with FLUX.1's layers, and its output error.

    python3 bench/few_bits.py [--heads 8] [--layers 4] [--pixels 64] [--steps 6] [--rounds 3] [--build build]

Makes a model folder: tests/golden/flux/dev with head_dim 128 and random weights (build/random_weights). For each
base_weights_dtype, --rounds times alternately, trains a LoRA of rank 16 in bfloat16 with scan_layers, and once runs a
sampling step in float32 from the same noise. Columns: seconds of a training step (median of all but each run's first two) and
its ratio to bfloat16's; peak memory of training; relative L2 distance of the denoiser's output from that of unquantized
weights.

    python3 bench/few_bits.py --errors [--ggml libctransformers.so] [--heads 4] [--layers 2]

Only what quantization costs in quality: for each base_weights_dtype, and for each GGUF type of a file that ggml quantizes,
the distance of the output as above, and the structural similarity (SSIM) of images of four steps. The matrices of blocks
are quantized in both. --ggml is a library with ggml's functions ggml_quantize_q4_K and others, such as that of the package
ctransformers 0.2.27; PYTHONPATH must have gguf 0.17.1.

    python3 bench/few_bits.py --sampling [--heads 8] [--layers 4] [--rounds 3]

A denoising step in bfloat16, next to diffusers' transformer whose blocks have the layers of bitsandbytes 0.50 (int8, and NF4
with double quantization): seconds of a step, and peak memory of the process. PYTHONPATH must have torch, diffusers and
bitsandbytes.
"""
import argparse
import ctypes
import json
import os
import pathlib
import shutil
import statistics
import sys
import tempfile

import numpy as np
from safetensors.numpy import load_file, save_file

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
from sampling import ROOT, peak_mb


FILE_TYPES = ("Q8_0", "Q6_K", "Q5_K", "Q5_1", "Q5_0", "Q4_K", "Q4_1", "Q4_0")


def write_gguf(source, to, kind, library):
    """The file with matrices of blocks in another type, as ggml quantizes them."""
    import gguf
    quantize = getattr(library, "ggml_quantize_" + kind.lower().replace("_k", "_K"))
    quantize.restype = ctypes.c_size_t
    wanted = gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(to, "flux")
    for t in gguf.GGUFReader(source).tensors:
        values = np.array(t.data, dtype=np.float32)
        if values.ndim != 2 or "_blocks." not in t.name:
            writer.add_tensor(t.name, values)
            continue
        numbers, size = gguf.GGML_QUANT_SIZES[wanted]
        rows, columns = values.shape
        out, counts = np.zeros((rows, columns // numbers * size), np.uint8), (ctypes.c_int64 * 16)()
        # As one row, because some versions quantize only the first of several. Blocks do not cross rows.
        quantize(ctypes.c_void_p(values.ctypes.data), ctypes.c_void_p(out.ctypes.data), ctypes.c_int(values.size),
                 ctypes.c_int(values.size), counts)
        writer.add_tensor(t.name, out, raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def similarity(a, b, window=7):
    """Mean SSIM of images in [0, 1], [..., H, W, C], over windows of equal weights (Wang et al. 2004)."""
    def mean(x):
        return np.lib.stride_tricks.sliding_window_view(x, (window, window), axis=(-3, -2)).mean((-2, -1))
    n = window * window
    a, b = a.astype(np.float64), b.astype(np.float64)
    ma, mb = mean(a), mean(b)
    va, vb, both = ((mean(x) - m) * n / (n - 1) for x, m in ((a * a, ma * ma), (b * b, mb * mb), (a * b, ma * mb)))
    c1, c2 = 0.01 ** 2, 0.03 ** 2
    return (((2 * ma * mb + c1) * (2 * both + c2)) / ((ma * ma + mb * mb + c1) * (va + vb + c2))).mean()


def errors(a, at, common, noise):
    program = a.build / "maxdiffusion"
    runs = {t or "none (float32)": [f"base_weights_dtype={t}"] for t in a.types.split(",")}
    if a.ggml:
        library = ctypes.CDLL(str(a.ggml))
        peak_mb([program, "convert", at / "model", at / "wide.gguf", "component=transformer", "dtype=float32"])
        for kind in FILE_TYPES:
            write_gguf(at / "wide.gguf", at / f"{kind}.gguf", kind, library)
            runs[f"GGUF {kind}"] = [f"wan_transformer_pretrained_model_name_or_path={at}/{kind}.gguf"]
    common = common + ["activations_dtype=float32", "weights_dtype=float32", "prompt=a heart",
                       f"latents={at}/noise.safetensors"]
    found, first = {}, None
    print("| matrices of blocks | distance | SSIM |\n| --- | --- | --- |")
    for name, words in runs.items():
        for steps, kind, file in ((1, "latent", "latents"), (4, "np", "images")):
            place = at / f"out{len(found)}"
            peak_mb([program, "generate", *common, *words, f"output_dir={place}", f"num_inference_steps={steps}",
                     f"output_type={kind}"])
            found[name, file] = load_file(next(place.rglob(f"{file}.safetensors")))[file].astype(np.float64)
        first = first or name
        wide = found[first, "latents"]
        # One step removes the whole prediction: the sample is the noise minus the output.
        apart = np.linalg.norm(found[name, "latents"] - wide) / np.linalg.norm(wide - noise)
        print(f"| {name} | {apart:.4f} | {similarity(found[name, 'images'], found[first, 'images']):.4f} |", flush=True)


def bitsandbytes_step(folder, kind, pixels, steps=5):
    """Prints the median seconds of a call of diffusers' transformer with layers of bitsandbytes ("": without)."""
    import time

    import diffusers
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    net = diffusers.FluxTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    if kind:
        import bitsandbytes
        for name, block in [x for x in net.named_modules() if x[0].endswith("_blocks")]:
            for path, layer in list(block.named_modules()):
                if not isinstance(layer, torch.nn.Linear):
                    continue
                sizes = (layer.in_features, layer.out_features, layer.bias is not None)
                quantized = (bitsandbytes.nn.Linear4bit(*sizes, compute_dtype=torch.bfloat16, quant_type="nf4")
                             if kind == "nf4" else bitsandbytes.nn.Linear8bitLt(*sizes, has_fp16_weights=False))
                quantized.load_state_dict(layer.state_dict())
                parent, _, last = path.rpartition(".")
                setattr(block.get_submodule(parent), last, quantized.to("cpu"))
    c, tokens, text = net.config, (pixels // 4) ** 2, 12
    one = lambda *sizes: torch.randn(*sizes, dtype=torch.bfloat16)
    seconds = []
    with torch.no_grad():
        for _ in range(steps + 1):
            start = time.perf_counter()
            net(one(1, tokens, c.in_channels), one(1, text, c.joint_attention_dim), one(1, c.pooled_projection_dim),
                torch.full((1,), 0.5, dtype=torch.bfloat16), torch.zeros(tokens, 3), torch.zeros(text, 3),
                guidance=torch.full((1,), 3.5))
            seconds.append(time.perf_counter() - start)
    print(f"step {statistics.median(seconds[1:])}")


def sampling(a, at, common):
    program = a.build / "maxdiffusion"
    common = common + ["activations_dtype=bfloat16", "prompt=a heart", "output_type=latent"]
    found = {}
    for _ in range(a.rounds):
        for kind in ("", "int8", "nf4"):
            # A process of many steps less one of few: loading, quantizing and compiling are in both.
            seconds, peaks = zip(*[peak_mb([program, "generate", *common, f"base_weights_dtype={kind}", f"output_dir={at}/s",
                                            f"num_inference_steps={steps}"])[:2] for steps in (2, 12)])
            found.setdefault(("maxdiffusion.cpp", kind), []).append(((seconds[1] - seconds[0]) / 10, max(peaks)))
            _, peak, out = peak_mb([sys.executable, __file__, "--peer", at / "model/transformer", kind or "none",
                                    str(a.pixels)])
            found.setdefault(("bitsandbytes", kind), []).append((float(out.split("step ")[1].split()[0]), peak))
    print("| base | program | step, s | peak, MB |\n| --- | --- | --- | --- |")
    for (name, kind), rows in found.items():
        step, peak = (statistics.median(x) for x in zip(*rows))
        print(f"| {kind or 'bfloat16'} | {name if kind or name != 'bitsandbytes' else 'diffusers'} | {step:.3f} | {peak:.0f} |")


def main():
    if sys.argv[1:2] == ["--peer"]:
        return bitsandbytes_step(sys.argv[2], "" if sys.argv[3] == "none" else sys.argv[3], int(sys.argv[4]))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in dict(heads=8, layers=4, pixels=64, steps=6, rounds=3).items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--types", default=",float8_e4m3fn,int8,nf4", help="values of base_weights_dtype, with commas")
    parser.add_argument("--errors", action="store_true", help="only distances and similarities")
    parser.add_argument("--sampling", action="store_true", help="only denoising steps, and those of bitsandbytes")
    parser.add_argument("--ggml", type=pathlib.Path, help="with --errors: a library that quantizes GGUF's types")
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
        if a.errors:
            return errors(a, at, common, noise)
        if a.sampling:
            return sampling(a, at, common)
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
