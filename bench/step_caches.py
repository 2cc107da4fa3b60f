#!/usr/bin/env python3
"""Quality and speed of caches between denoising steps: ./run bench --step-caches CONFIG [words] [--caches WORDS …]

  CONFIG    a run or a config, and words for it, as maxdiffusion generate takes them
  --build   where maxdiffusion is (build)
  --caches  words of each row, as in 'use_deepcache=true deepcache_interval=2' (those that CONFIG's family has)

Prints one table: of each cache the steps that reused something, seconds of all steps next to the exact run's, and the
mean similarity to its samples (SSIM of Wang et al. 2004 as in maxdiffusion/metrics/similarity.h, 1 if they are equal).
The first run of each row compiles; the second is timed.
"""

import argparse
import json
import pathlib
import re
import struct
import subprocess
import tempfile

import numpy

ROWS = [f"use_deepcache=true deepcache_interval={n} deepcache_branch={b}" for b, n in ((0, 2), (0, 3), (0, 5), (1, 3))] + [
    f"use_first_block_cache=true first_block_cache_threshold={x}" for x in (0.05, 0.1, 0.2)] + [
    f"use_teacache=true teacache_coefficients=[1,0] teacache_thresh={x}" for x in (0.1, 0.2, 0.4)] + [
    "use_sen_cache=true", "use_cfg_cache=true"]


def tensor(file):
    """The only tensor of a safetensors file, f32."""
    data = file.read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    (entry,) = header.values()
    begin, end = entry["data_offsets"]
    return numpy.frombuffer(data[8 + size + begin:8 + size + end], "<f4").reshape(entry["shape"])


def similarity(a, b):
    """Of [(F,) H, W, 3] in [0, 1]: the mean over windows of 7 values along each axis, or the longest odd number."""
    sides = [min(7, n - (n + 1) % 2) for n in a.shape[:-1]]
    n = numpy.prod(sides)
    axes = tuple(range(a.ndim - 1))

    def mean(x):
        for axis, side in zip(axes, sides):
            x = numpy.lib.stride_tricks.sliding_window_view(x, side, axis).mean(-1)
        return x
    a, b = (numpy.round(x.astype(numpy.float64) * 255) for x in (a, b))
    of_a, of_b = mean(a), mean(b)
    var_a, var_b, both = (n / (n - 1) * (mean(x * y) - p * q)
                          for x, y, p, q in ((a, a, of_a, of_a), (b, b, of_b, of_b), (a, b, of_a, of_b)))
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    return ((2 * of_a * of_b + c1) * (2 * both + c2) / ((of_a ** 2 + of_b ** 2 + c1) * (var_a + var_b + c2))).mean()


def generate(program, words, folder):
    """Samples, seconds between the encoded prompts and the denoised samples, and the log's part of reused steps; None if
    the model has no such cache."""
    for _ in range(2):
        for file in folder.glob("*"):
            file.unlink()
        done = subprocess.run([program, "generate", *words, f"output_dir={folder}", "output_type=np"],
                              capture_output=True, text=True)
        if done.returncode == 2 and "expected false" in done.stderr:
            return None
        if done.returncode:
            raise SystemExit(done.stderr)
    seconds = float(re.search(r"denoised after ([\d.]+) s", done.stderr).group(1))
    reused = re.search(r"Cached (\d+)/(\d+) steps", done.stderr)
    (file,) = folder.glob("*.safetensors")
    return tensor(file), seconds, reused and int(reused.group(1)) / int(reused.group(2))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="+", metavar="CONFIG")
    parser.add_argument("--step-caches", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--build", default="build")
    parser.add_argument("--caches", nargs="*", default=ROWS)
    o = parser.parse_args()
    program = str(pathlib.Path(o.build) / "maxdiffusion")
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder)
        exact, whole, _ = generate(program, o.words, out)
        print("| cache | steps reused | time of the steps | SSIM to the exact samples |\n| --- | --- | --- | --- |")
        print(f"| none | – | {whole:.1f} s | 1 |")
        for row in o.caches:
            made = generate(program, o.words + row.split(), out)
            if made is None:
                continue
            samples, seconds, part = made
            ssim = numpy.mean([similarity(a, b) for a, b in zip(samples, exact)])
            print(f"| `{row}` | {100 * part:.0f}% | {seconds:.1f} s | {ssim:.3f} |", flush=True)


if __name__ == "__main__":
    main()
