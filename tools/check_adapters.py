"""Checks the adapters of a checkpoint with diffusers and PEFT: each file is loaded with every tensor used, and merged it
makes of the model's weights what `maxdiffusion lora merge` makes.

    python tools/check_adapters.py MODEL CHECKPOINT MERGED

MODEL: the model folder that the run began with, in float32. MERGED: `lora merge CHECKPOINT MERGED`. Needs torch, diffusers,
transformers and peft. Exit status 0 when all is well.
"""
import argparse
import pathlib
import sys

import diffusers
import peft
import torch
from safetensors import safe_open
from safetensors.torch import load_file


def weights_of(model):
    return {k.replace("base_layer.", ""): p.detach().double() for k, p in model.named_parameters() if ".default" not in k}


def unused(model, file, beginning):
    """Tensors of the file that are no parameter of the model: by name, without the adapter's, and by value."""
    held = {}
    for name, p in [*model.named_parameters(), *model.named_buffers()]:
        parts = [part for part in name.removeprefix("base_model.model.").split(".") if not part.startswith("default")]
        held[".".join(parts)] = p.detach()
    out = []
    for key, value in file.items():
        name = key.removeprefix(beginning)
        found = next((held[n] for n in (name, name + ".weight") if n in held), None)
        if found is None or found.shape != value.shape or not torch.equal(found, value):
            out.append(key)
    return out


def loaded(model_folder, checkpoint, component):
    """What diffusers or PEFT makes of the component: name of the file → (model, file's tensors, beginning of its keys)."""
    fresh = lambda: getattr(diffusers.DiffusionPipeline.from_pretrained(model_folder, safety_checker=None), component)
    lora = checkpoint / "pytorch_lora_weights.safetensors"
    if lora.exists():
        tensors = load_file(lora)
        if any(".lokr_" in k for k in tensors):
            model = fresh()
            model.load_lora_adapter(str(checkpoint), weight_name=lora.name, prefix=component)
        else:
            pipe = diffusers.DiffusionPipeline.from_pretrained(model_folder, safety_checker=None)
            pipe.load_lora_weights(str(checkpoint), weight_name=lora.name)
            model = getattr(pipe, component)
        yield lora.name, model, {k: v for k, v in tensors.items() if k.startswith(component + ".")}, component + "."
    folder = checkpoint / "peft" / component
    if folder.exists():
        model = peft.PeftModel.from_pretrained(fresh(), str(folder))
        yield f"peft/{component}", model, load_file(folder / "adapter_model.safetensors"), "base_model.model."


def merged(model):
    if isinstance(model, peft.PeftModel):
        return model.merge_and_unload()
    for layer in model.modules():
        if hasattr(layer, "merge") and hasattr(layer, "base_layer"):
            layer.merge()
    return model


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=pathlib.Path)
    parser.add_argument("checkpoint", type=pathlib.Path)
    parser.add_argument("merged", type=pathlib.Path)
    args = parser.parse_args()
    problems, files = [], 0
    component = "unet" if (args.model / "unet").exists() else "transformer"
    wanted = load_file(next((args.merged / component).glob("*.safetensors")))
    before = load_file(next((args.model / component).glob("*.safetensors")))
    for name, model, tensors, beginning in loaded(args.model, args.checkpoint, component):
        files += 1
        left = unused(model, tensors, beginning)
        problems += [f"{name}: {len(left)} tensors are not used: {left[:3]}"] if left or not tensors else []
        got = {k.removeprefix("base_model.model."): v for k, v in weights_of(merged(model)).items()}
        changed, worst = 0, 0.0
        for key, w in wanted.items():
            change = (w.double() - before[key].double()).norm()
            changed += bool(change)
            if change:
                worst = max(worst, ((got[key] - w.double()).norm() / change).item())
            elif not torch.equal(got[key], w.double()):
                problems.append(f"{name}: {key} changes")
        print(f"{name}: {len(tensors)} tensors change {changed} weights; largest distance from the merged: {worst:.2g}")
        if not changed or not worst <= 1e-4:
            problems.append(f"{name}: it changes {changed} weights, with a distance of {worst:.2g}")
    if not files:
        problems.append(f"{args.checkpoint}: no file that diffusers or PEFT reads")
    for p in problems:
        print("FAILED", p)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
