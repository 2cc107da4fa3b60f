"""Checks LoRA files with diffusers: diffusers must read every key, and all files must change the same weights equally.

    python tools/check_lora.py MODEL FILE [FILE ...]

MODEL: a model folder; its weights are not read, since a file's changes do not depend on them.
Prints the distance of each file's weight changes from the first file's. Needs torch,
diffusers, transformers and peft. Exit status 0 if all checks pass.
"""
import argparse
import importlib
import inspect
import json
import logging
import pathlib
import sys

import diffusers
import torch
from safetensors import safe_open


class Complaints(logging.Handler):
    """Warnings about keys without a target, or targets without a key."""

    def __init__(self):
        super().__init__(logging.WARNING)
        self.messages = []

    def emit(self, record):
        text = record.getMessage()
        if "keys" in text and "No LoRA keys associated" not in text:
            self.messages.append(text)


def pipeline(folder):
    """The pipeline of model_index.json with all-zero weights, so that the weights become what a file adds; and the names
    of the components that LoRA may change. Omits text encoders of transformers."""
    index = json.loads((folder / "model_index.json").read_text())
    kinds = {name: getattr(importlib.import_module(value[0]), value[1]) for name, value in index.items()
             if isinstance(value, list) and value[0]}
    models = [name for name, kind in kinds.items() if issubclass(kind, torch.nn.Module)]
    names = [n for n in models if n.startswith("transformer")] or [n for n in models if n != "vae"]
    parts = {}
    for name in [n for n in models if n in (*names, "vae")]:
        config = json.loads((folder / name / "config.json").read_text())
        kind = kinds[name]
        parts[name] = kind.from_config(config) if index[name][0] == "diffusers" else kind(kind.config_class(**config))
        for p in parts[name].parameters():
            torch.nn.init.zeros_(p)
    cls = getattr(diffusers, index["_class_name"])
    needed = {n: None for n, p in inspect.signature(cls).parameters.items() if p.default is inspect.Parameter.empty}
    return cls(**{**needed, **parts, "scheduler": kinds["scheduler"]()}), names


def added(folder, file):
    pipe, names = pipeline(folder)
    arguments = {}
    if "transformer_2" in inspect.signature(type(pipe)).parameters:  # both transformers have the same names; a file is for one of them
        with safe_open(file, "pt") as f:
            names = [(f.metadata() or {}).get("component", "transformer")]
        arguments["load_into_transformer_2"] = names == ["transformer_2"]
    pipe.load_lora_weights(str(file.parent), weight_name=file.name, **arguments)
    pipe.fuse_lora(components=names)
    return {f"{n}/{k}": p.detach().double() for n in names for k, p in getattr(pipe, n).named_parameters()
            if "lora_" not in k and p.detach().any()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("file", type=pathlib.Path, nargs="+")
    args = parser.parse_args()
    complaints = Complaints()
    for library in ("diffusers", "peft", "transformers"):
        logging.getLogger(library).addHandler(complaints)
    problems, first = [], None
    for file in args.file:
        changes = added(args.model, file)
        with safe_open(file, "pt") as f:
            pairs = sum(k.endswith(("lora_A.weight", "lora_down.weight", ".down.weight")) for k in f.keys())
        problems += [f"{file}: {m}" for m in complaints.messages]
        complaints.messages.clear()
        if first is None:
            first = changes
        distances = {k: ((changes[k] - w).norm() / w.norm()).item() for k, w in first.items() if k in changes}
        worst = max(distances.values(), default=0)
        print(f"{file}: {pairs} pairs change {len(changes)} weights; largest distance from {args.file[0].name}: {worst:.2g}")
        if set(changes) != set(first):
            problems.append(f"{file}: other weights change: {sorted(set(changes) ^ set(first))[:5]}")
        if len(changes) != pairs:
            problems.append(f"{file}: {pairs} pairs but {len(changes)} weights change")
        if not worst <= 1e-6:
            problems.append(f"{file}: {max(distances, key=distances.get)} differs by {worst:.2g}")
    for p in problems:
        print("FAILED", p)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
