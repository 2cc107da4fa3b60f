#!/usr/bin/env python3
"""Runs every program of the comparison in turns and prints one table: ./run bench [options]

  --build DIR        where model_bench is (build)
  --rounds N         how often each program is started (3); figures are medians over rounds
  --steps N          timed steps per start (5)
  --models, --dtypes, --programs   comma-separated choices; models: unet, vae, wan (a
                     transformer of videos), z_image, qwen_image
  --work predict     time one call of a transformer alone, as in a step of sampling; also of qwen3, a text encoder
  --rows FILE        append every row as JSON
  --data             time the reading of every kind of data instead (needs libbenchmark-dev; Parquet, Arrow and
                     ArrayRecord where $PYTHON has their libraries, see bench/data_files.py)
  --mesh             time the same step on one device and on eight virtual ones instead

  --maxdiffusion FOLDER   a checkout of MaxDiffusion's repository: its models on JAX, too (unet and wan)

Programs: ours cold (no executable cache), ours warm (cache filled by a run before), PyTorch eager, PyTorch compiled.
The peers live in .peers/, made on first use.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]


def reference_python():
    python = ROOT / ".peers" / "bin" / "python"
    if not python.exists():
        print("making .peers/ (PyTorch and diffusers, once) …", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", ROOT / ".peers"], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", ROOT / "bench" / "requirements.txt"], check=True)
    return python


def run(command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        print(f"failed: {' '.join(map(str, command))}\n{done.stderr[-2000:]}", file=sys.stderr)
        return None
    return json.loads(lines[-1])


def data(o):
    """How fast each kind of data is read: rows of data_bench."""
    command = [str(pathlib.Path(o.build) / "data_bench"), "--benchmark_filter=read_|decode_big|gather",
               "--benchmark_format=json", "--benchmark_min_time=1", f"--benchmark_repetitions={o.rounds}"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"failed: {' '.join(command)}\n{done.stderr[-2000:]}")
    groups = {}
    for r in json.loads(done.stdout)["benchmarks"]:
        if r["run_type"] == "iteration" and "items_per_second" in r:
            groups.setdefault(r["run_name"].removesuffix("/real_time"), []).append(r)
    print("| program | data | samples/s | MB/s |\n| --- | --- | --- | --- |")
    for name, group in groups.items():
        row = {"program": "maxdiffusion.cpp", "data": name,
               "samples_per_s": statistics.median(r["items_per_second"] for r in group),
               "mb_per_s": statistics.median(r["bytes_per_second"] for r in group) / 1e6}
        print("| {program} | {data} | {samples_per_s:.0f} | {mb_per_s:.0f} |".format(**row))
        if o.rows:
            with open(o.rows, "a") as file:
                print(json.dumps(row), file=file)


def meshes(o):
    """What a step costs on virtual devices, over the same step on one."""
    ours = [pathlib.Path(o.build) / "model_bench", "unet", "f32", "--batch", 8, "--pixels", 32, "--steps", o.steps]
    runs = {"one device": [], "data 8": ["--mesh", "8,1,1,1"], "data 2 × fsdp 4": ["--mesh", "2,4,1,1"],
            "data 2 × fsdp 2 × tensor 2": ["--mesh", "2,2,1,2"]}
    rows = {name: [row for _ in range(o.rounds) if (row := run([*ours, *words, "--name", name]))]
            for name, words in runs.items()}
    columns = {"step_s": "step, s", "floor_s": "floor, s", "processor_s": "of processors, s", "compile_s": "compile, s",
               "peak_resident_mb": "peak, MB"}
    print("| mesh | " + " | ".join(columns.values()) + " | step ÷ | processors ÷ |")
    print("|" + " --- |" * (len(columns) + 3))
    median = {name: {c: statistics.median(r[c] for r in group) for c in columns} for name, group in rows.items() if group}
    for name, m in median.items():
        cells = [f"{m[c]:.0f}" if c.endswith("mb") else f"{m[c]:.2f}" for c in columns]
        ratios = [f"{m[c] / median['one device'][c]:.2f}" for c in ("step_s", "processor_s")]
        print("| " + " | ".join([name, *cells, *ratios]) + " |")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--models", default="unet,vae")
    parser.add_argument("--dtypes", default="f32,bf16")
    parser.add_argument("--programs", default="cold,warm,eager,compile")
    parser.add_argument("--python", help="a Python with torch and diffusers, instead of .peers/")
    parser.add_argument("--work", choices=["train", "predict"], default="train")
    parser.add_argument("--rows")
    parser.add_argument("--data", action="store_true")
    parser.add_argument("--mesh", action="store_true")
    parser.add_argument("--maxdiffusion")
    o = parser.parse_args()
    if o.data:
        return data(o)
    if o.mesh:
        return meshes(o)
    programs = o.programs.split(",") + (["jax"] if o.maxdiffusion else [])
    python = o.python or (reference_python() if {"eager", "compile", "jax"} & set(programs) else None)
    ours = pathlib.Path(o.build) / "model_bench"
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        for model in o.models.split(","):
            for dtype in o.dtypes.split(","):
                for _ in range(o.rounds):
                    for program in programs:
                        common = [model, dtype]
                        steps = ["--steps", o.steps, "--work", o.work]
                        if program == "cold":
                            row = run([ours, *common, *steps, "--name", "maxdiffusion.cpp cold"])
                        elif program == "warm":
                            warm = [ours, *common, "--cache", cache, "--name", "maxdiffusion.cpp warm"]
                            if not any(r["program"].endswith("warm") and (r["model"], r["dtype"]) == (model, dtype)
                                       for r in rows):
                                run([*warm, "--steps", 0, "--work", o.work])
                            row = run([*warm, *steps])
                        elif program == "jax":
                            if model not in ("unet", "wan") or o.work != "train":
                                continue
                            row = run([python, ROOT / "bench" / "peers_jax.py", *common, o.maxdiffusion, "--steps", o.steps])
                        else:
                            row = run([python, ROOT / "bench" / "peers.py", *common, program, *steps])
                        if row:
                            rows.append(row)
                            print(json.dumps(row), file=sys.stderr)
                            if o.rows:
                                with open(o.rows, "a") as file:
                                    print(json.dumps(row), file=file)
    columns = {"step_s": "step, s", "floor_s": "floor, s", "processor_s": "of processors, s", "to_first_loss_s": "to first loss, s", "compile_s": "compile, s",
               "load_s": "load, s", "trace_s": "trace, s", "emit_s": "emit, s", "peak_resident_mb": "peak, MB"}
    print("| model | dtype | program | " + " | ".join(columns.values()) + " | step ÷ PyTorch's best | first ÷ |")
    print("|" + " --- |" * (len(columns) + 5))
    for model in o.models.split(","):
        for dtype in o.dtypes.split(","):
            groups = {}
            for r in rows:
                if (r["model"], r["dtype"]) == (model, dtype):
                    groups.setdefault(r["program"], []).append(r)
            median = {
                name: {c: statistics.median(r[c] for r in group) for c in columns if c in group[0]}
                for name, group in groups.items()
            }
            peers = [m for name, m in median.items() if name.startswith("PyTorch")]
            for name, m in median.items():
                cells = [f"{m[c]:.2f}" if c in m and not c.endswith("mb") else f"{m[c]:.0f}" if c in m else ""
                         for c in columns]
                ratios = [f"{m[c] / min(p[c] for p in peers):.2f}" if peers else ""
                          for c in ("step_s", "to_first_loss_s")]
                print("| " + " | ".join([model, dtype, name, *cells, *ratios]) + " |")


if __name__ == "__main__":
    main()
