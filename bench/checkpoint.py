#!/usr/bin/env python3
"""How much saving a checkpoint slows a training loop, compared with Orbax: ./run bench --checkpoint [options]

  --build DIR      where checkpoint_bench is (build)
  --megabytes N    size of the state (1000)
  --rounds N       runs of each program (3); results are medians over rounds
  --python FILE    a Python with jax and orbax-checkpoint, instead of .peers/

Each step multiplies a float32 state in place; one checkpoint is saved meanwhile and written while steps continue.
"blocked" is the time of the call plus the extra time of the first step after it; "steps" the extra time of all steps
until the checkpoint was complete; "memory" the peak extra memory of the process as a fraction of the state.
"""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]


def anonymous():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) * 1024 for line in status if line.startswith("RssAnon:"))


def orbax(folder, megabytes):
    import jax
    import jax.numpy as jnp
    import orbax.checkpoint as ocp

    n = megabytes * 1_000_000 // 50 // 4
    # Numbers that do not compress.
    state = {f"adam_m/unet/{i:02}": jax.random.uniform(jax.random.key(i), (n,), jnp.float32) for i in range(50)}
    run = jax.jit(lambda s: jax.tree.map(lambda x: x * 1.0001, s), donate_argnums=0)

    def step():
        nonlocal state
        begun = time.perf_counter()
        state = jax.block_until_ready(run(state))
        return time.perf_counter() - begun

    for _ in range(3):
        step()
    usual = statistics.median(step() for _ in range(9))
    checkpointer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
    memory, done = anonymous(), threading.Event()
    most = memory

    def sample():
        nonlocal most
        while not done.wait(0.002):
            most = max(most, anonymous())

    threading.Thread(target=sample).start()
    begun = time.perf_counter()
    checkpointer.save(pathlib.Path(folder) / "1", args=ocp.args.StandardSave(state))
    call = time.perf_counter() - begun
    written = 0

    def wait():
        nonlocal written
        checkpointer.wait_until_finished()
        written = time.perf_counter() - begun
        done.set()

    threading.Thread(target=wait).start()
    extra = []
    while not done.is_set():
        extra.append(step() - usual)
    per_gb = 1000 / megabytes
    print(json.dumps({"program": f"Orbax {ocp.__version__}", "step_ms": usual * 1e3,
                      "call_ms_per_gb": call * 1e3 * per_gb, "first_step_ms_per_gb": extra[0] * 1e3 * per_gb,
                      "steps_ms_per_gb": sum(extra) * 1e3 * per_gb, "written_s_per_gb": written * per_gb,
                      "memory_part": (most - memory) / 1e9 * per_gb}))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", default=str(ROOT / "build"))
    parser.add_argument("--megabytes", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python")
    parser.add_argument("--checkpoint", action="store_true")
    parser.add_argument("--orbax", help="be the peer, and write into this folder")
    o = parser.parse_args()
    if o.orbax:
        return orbax(o.orbax, o.megabytes)
    sys.path.insert(0, str(ROOT / "bench"))
    from compare import reference_python, run

    python = o.python or reference_python()
    rows = {}
    for _ in range(o.rounds):
        for program in ("ours", "orbax"):
            with tempfile.TemporaryDirectory() as folder:
                command = ([pathlib.Path(o.build) / "checkpoint_bench", folder, o.megabytes] if program == "ours" else
                           [python, __file__, "--orbax", folder, "--megabytes", o.megabytes])
                if row := run(command):
                    rows.setdefault(row["program"], []).append(row)
    print("| program | step, ms | call, ms/GB | first step longer, ms/GB | blocked, ms/GB | steps longer, ms/GB | "
          "written, s/GB | memory ÷ state |")
    print("|" + " --- |" * 8)
    for program, group in rows.items():
        m = {k: statistics.median(r[k] for r in group) for k in group[0] if k != "program"}
        blocked = m["call_ms_per_gb"] + max(0, m["first_step_ms_per_gb"])
        print(f"| {program} | {m['step_ms']:.0f} | {m['call_ms_per_gb']:.1f} | {m['first_step_ms_per_gb']:.0f} | "
              f"{blocked:.0f} | {m['steps_ms_per_gb']:.0f} | {m['written_s_per_gb']:.1f} | {m['memory_part']:.2f} |")


if __name__ == "__main__":
    main()
