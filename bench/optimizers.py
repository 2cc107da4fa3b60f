#!/usr/bin/env python3
"""Times one update by each optimizer, next to the PyTorch packages: ./run bench --optimizers

    python3 bench/optimizers.py [--matrices 32] [--rounds 3] [--python PYTHON] [--build build] [NAME …]

Weights are 1024 × 1024 matrices, each with a vector of 1024 numbers. Columns: processor seconds of all threads per
update (the least of the rounds; PyTorch has one thread), its ratio to AdamW's of the same side, bytes of state per
weight. `--python` is one that has torch and the packages; a package that it lacks, or that does not run on a CPU, is a
dash with the reason below.
"""
import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent


def makers():
    """Optimizers by our name: functions of the parameters, each importing its package."""
    import importlib

    import torch

    def of(module, name, **options):
        return lambda p: getattr(importlib.import_module(module), name)(p, lr=1e-4, **options)

    def adafactor(p):
        return importlib.import_module("transformers.optimization").Adafactor(p)

    return {"adamw": lambda p: torch.optim.AdamW(p, lr=1e-4), "sgd": lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
            "adamw8bit": of("bitsandbytes.optim", "AdamW8bit"), "adafactor": adafactor,
            "muon": lambda p: torch.optim.Muon([x for x in p if x.dim() == 2], lr=1e-4),
            "came": of("came_pytorch", "CAME"), "lion": of("lion_pytorch", "Lion"),
            "prodigy": of("prodigyopt", "Prodigy"), "schedule_free_adamw": of("schedulefree", "AdamWScheduleFree")}


def peer(name, matrices):
    """Prints the time of updates by PyTorch."""
    import torch

    torch.set_num_threads(1)  # its idle threads spin, which would count as processor time
    torch.manual_seed(0)
    make = makers()[name]
    shapes = [s for _ in range(matrices) for s in ((1024, 1024), (1024,))]
    params = [torch.nn.Parameter(torch.randn(s) * 0.02) for s in shapes]
    for p in params:
        p.grad = torch.randn_like(p) * 0.02
    optimizer = make(params)
    if hasattr(optimizer, "train"):
        optimizer.train()
    times = []
    for _ in range(9):
        begun = time.process_time()
        optimizer.step()
        times.append(time.process_time() - begun)
    print(json.dumps({"cpu_seconds": statistics.median(times[2:])}))


def last_json(command):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    if done.returncode != 0:
        return None, (done.stderr.strip().splitlines() or ["?"])[-1]
    return json.loads(done.stdout.strip().splitlines()[-1]), None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--optimizers", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--matrices", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", default=str(ROOT / ".peers/bin/python"))
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    o = parser.parse_args()
    if o.peer:
        return peer(o.peer, o.matrices)
    names = o.names or ["adamw", "adamw8bit", "adafactor", "came", "lion", "prodigy", "schedule_free_adamw", "muon", "sgd"]
    ours, theirs, reasons = {}, {}, {}
    for _ in range(o.rounds):
        for name in dict.fromkeys(["adamw", *names]):
            row, reason = last_json([o.build / "optimizer_bench", o.matrices, name])
            if reason:
                sys.exit(f"optimizer_bench {name}: {reason}")
            if name not in ours or row["cpu_seconds"] < ours[name]["cpu_seconds"]:
                ours[name] = row
            row, reasons[name] = last_json([o.python, __file__, "--peer", name, "--matrices", o.matrices])
            if row:
                theirs[name] = min(theirs.get(name, 1e9), row["cpu_seconds"])
    print("| optimizer | CPU, s | ÷ adamw | PyTorch, s | ÷ adamw | ÷ PyTorch | bytes per weight |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name in names:
        mine, other = ours[name]["cpu_seconds"], theirs.get(name)
        cells = [f"{mine:.3f}", f"{mine / ours['adamw']['cpu_seconds']:.2f}"]
        cells += [f"{other:.3f}", f"{other / theirs['adamw']:.2f}", f"{mine / other:.2f}"] if other else ["–"] * 3
        print(f"| `{name}` | {' | '.join(cells)} | {ours[name]['state_bytes_per_weight']:.2f} |")
    for name in names:
        if reasons[name]:
            print(f"{name}: {reasons[name]}")


if __name__ == "__main__":
    main()
