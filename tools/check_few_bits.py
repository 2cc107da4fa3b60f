"""Checks files of quantized weights with the packages that read them.

    python tools/check_few_bits.py FILE REFERENCE.safetensors --most 0.01 [--model FOLDER] [--arch QWEN3]

FILE: GGUF, read by gguf, or safetensors with ComfyUI's scaled float8, read by torch. REFERENCE: the same tensors under
the same names. Prints the largest distance (relative L2) of a tensor of each type, and for types that gguf writes whether
the bytes are those that it makes of the reference. --model: a folder with the config.json of a transformer; diffusers
loads FILE into it and runs without missing or unexpected keys. --arch: a MODEL_ARCH of gguf, whose table gives the names
in FILE of those in REFERENCE, which are transformers'. Exit status 0 when all is well.
"""
import argparse
import json
import pathlib
import sys

import torch
from safetensors.torch import load_file


def of_gguf(file, reference):
    import gguf
    reader = gguf.GGUFReader(file)
    out = {}
    for t in reader.tensors:
        values = torch.from_numpy(gguf.quants.dequantize(t.data, t.tensor_type).copy())
        shape = reader.get_field(f"comfy.gguf.orig_shape.{t.name}")
        shape = [int(shape.parts[i][0]) for i in shape.data] if shape else [int(n) for n in reversed(t.shape)]
        same = None
        if t.name in reference and t.tensor_type.name in ("Q8_0", "Q4_0"):
            again = gguf.quants.quantize(reference[t.name].float().numpy(), t.tensor_type)
            same = again.tobytes() == t.data.tobytes()
        out[t.name] = (t.tensor_type.name, values.reshape(shape), same)
    return out


def of_safetensors(file, reference):
    tensors = load_file(file)
    out = {}
    for name, t in tensors.items():
        if name.endswith((".scale_weight", "scaled_fp8")):
            continue
        values = t.float()
        if t.dtype == torch.float8_e4m3fn:
            values = values * tensors[name.removesuffix("weight") + "scale_weight"]
        out[name] = (str(t.dtype).removeprefix("torch."), values, None)
    if not any(name.endswith("scaled_fp8") for name in tensors):
        sys.exit("FAILED: no scaled_fp8")
    return out


def loaded_by_diffusers(file, folder):
    import diffusers
    name = json.loads((folder / "config.json").read_text())["_class_name"]
    kind = getattr(diffusers, name)
    model = kind.from_single_file(file, config=str(folder), torch_dtype=torch.float32,
                                  quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32))
    print(f"{name}: {sum(1 for _ in model.parameters())} parameters")


def names_of_gguf(reference, arch):
    import gguf
    arch = gguf.MODEL_ARCH[arch]
    table = gguf.get_tensor_name_map(arch, 1 + max(int(p) for name in reference for p in name.split(".") if p.isdigit()))
    return {table.get_name(name, (".weight", ".bias")): t for name, t in reference.items()}, gguf.MODEL_ARCH_NAMES[arch]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    parser.add_argument("reference")
    parser.add_argument("--most", type=float, required=True)
    parser.add_argument("--model", type=pathlib.Path)
    parser.add_argument("--arch")
    a = parser.parse_args()
    reference = load_file(a.reference)
    if a.arch:
        import gguf
        reference, name = names_of_gguf(reference, a.arch)
        written = gguf.GGUFReader(a.file).get_field("general.architecture").contents()
        if written != name:
            sys.exit(f"FAILED: general.architecture is {written}, not {name}")
    found = (of_gguf if a.file.endswith(".gguf") else of_safetensors)(a.file, reference)
    failed = []
    if found.keys() != reference.keys():
        failed.append(f"other names: {sorted(found.keys() ^ reference.keys())[:5]}")
    worst = {}
    for name in found.keys() & reference.keys():
        kind, got, same = found[name]
        want = reference[name].float()
        if got.shape != want.shape:
            failed.append(f"{name} is {tuple(got.shape)}, not {tuple(want.shape)}")
            continue
        distance = ((got - want).norm() / want.norm().clamp_min(1e-30)).item()
        worst[kind] = max(worst.get(kind, 0), distance)
        if not distance <= a.most:
            failed.append(f"{name} ({kind}): distance {distance:.4f}")
        if same is False:
            failed.append(f"{name} ({kind}): other bytes than gguf's")
    for kind, distance in sorted(worst.items()):
        print(f"{kind}: {sum(1 for f in found.values() if f[0] == kind)} tensors, distance {distance:.4f}")
    if a.model and not failed:
        loaded_by_diffusers(a.file, a.model)
    for f in failed[:10]:
        print("FAILED", f, file=sys.stderr)
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
