"""Writes tests/golden/safetensors/: small files by the reference implementation of safetensors, which our reader must
read and our writer must repeat byte for byte. Run with a Python that has torch and safetensors:
    python tools/golden/safetensors_files.py
"""
import pathlib

import safetensors
import torch
from safetensors.torch import save_file

OUT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "safetensors"

# Element i of every tensor is i % 2 for bool and else i, so that the test can compute the same values.
TYPES = ["bool", "uint8", "int8", "float8_e5m2", "float8_e4m3fn", "int16", "uint16", "float16", "bfloat16", "int32",
         "uint32", "float32", "float64", "int64", "uint64"]


def counting(dtype, shape):
    n = torch.Size(shape).numel()
    values = torch.arange(n, dtype=torch.int64)
    if dtype == "bool":
        values %= 2
    return values.to(torch.float32).to(getattr(torch, dtype)).reshape(shape)


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    all_types = {f"t.{name}": counting(name, [2, 3]) for name in TYPES}
    save_file(all_types, OUT / "all_types.safetensors", metadata={"format": "pt"})
    shapes = {"scalar": counting("float32", []), "empty": counting("float32", [0, 4]), "b.odd": counting("uint8", [5]),
              "a.odd": counting("bfloat16", [3]), "名前": counting("float32", [1])}
    save_file(shapes, OUT / "shapes.safetensors")
    print("safetensors", safetensors.__version__, "torch", torch.__version__)


if __name__ == "__main__":
    main()
