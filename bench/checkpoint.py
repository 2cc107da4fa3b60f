#!/usr/bin/env python3
"""What saving costs a loop that continues, compared with Orbax: ./run bench --checkpoint [options]

  --build DIR      where checkpoint_bench is (build)
  --megabytes N    of state (1000)
  --rounds N       how often each program is started (3); figures are medians over rounds
  --python FILE    a Python with jax and orbax-checkpoint, instead of .peers/

A step multiplies a state of float32 in its own memory; a checkpoint is saved on the way and written while steps go on.
"blocked" is the time of the call and what the first step after it takes longer than usual; "steps" what all steps took
longer until the checkpoint was whole; "memory" what the process had more at most, as a part of the state.
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
