"""Checks event files: TensorBoard must read them, and their values must equal those of metrics.jsonl.

    python tools/check_events.py runs/quickstart

Needs tensorboard. Exit status 0 when all is well.
"""
import json
import pathlib
import struct
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TAGS = {"loss": "learning/loss", "grad_norm": "learning/grad_norm", "learning_rate": "learning/current_learning_rate",
        "step_time_seconds": "perf/step_time_seconds", "per_device_tflops": "perf/per_device_tflops",
        "per_device_tflops_per_sec": "perf/per_device_tflops_per_sec"}


def to_f32(x):
    return struct.unpack("f", struct.pack("f", x))[0]


def main():
    run = pathlib.Path(sys.argv[1])
    events = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0, "images": 0, "tensors": 0})
    events.Reload()
    tags = events.Tags()
    print("scalars", tags["scalars"], "images", tags["images"], "texts", tags["tensors"])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    problems = []
    for key, tag in TAGS.items():
        want = {line["step"]: line[key] for line in lines if line.get(key) is not None}
        if not want:
            continue
        got = {e.step: e.value for e in events.Scalars(tag)} if tag in tags["scalars"] else {}
        if got.keys() != want.keys():
            problems.append(f"{tag}: {len(got)} steps in the event files, {len(want)} in metrics.jsonl")
        for step in got.keys() & want.keys():
            if abs(got[step] - to_f32(want[step])) > 1e-6 * abs(want[step]):
                problems.append(f"{tag}: step {step}: {got[step]} in the event files, {want[step]} in metrics.jsonl")
                break
    for p in problems:
        print("FAILED", p, file=sys.stderr)
    if not problems:
        print(f"ok: {len(lines)} steps agree")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
