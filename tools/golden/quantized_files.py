"""Writes tests/golden/quantized_files/: quantized weights written by the published packages, and their dequantized values.

  types.gguf          a tensor of each type, of random blocks, by gguf's GGUFWriter; a reshaped one, as ComfyUI-GGUF does
  types.safetensors   the values that gguf reads of them
  written.safetensors numbers, and the bytes that gguf makes of them: NAME.q8_0, NAME.q4_0
  bnb.safetensors     layers as transformers and diffusers save them with bitsandbytes: nf4 with and without nested
                      statistics, fp4, int8
  bnb_values.safetensors  the numbers before, and NAME.read: what bitsandbytes reads of the layers, in float32

Run with a Python that has torch and safetensors, and gguf 0.18.0 (the first with MXFP4) and bitsandbytes 0.50.2 of PyPI:
    pip install --no-deps --target /tmp/few_bits gguf==0.18.0 bitsandbytes==0.50.2
    PYTHONPATH=/tmp/few_bits:.deps/interop python3 tools/golden/quantized_files.py [gguf | bitsandbytes]
"""
import pathlib
import sys

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from safetensors.numpy import save_file as save_numpy
from safetensors.torch import save_file

OUT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "quantized_files"
rng = np.random.default_rng(7)

# Offsets of float16 scales in a block; other bytes are arbitrary.
SCALES = {Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q5_0: [0], Type.Q5_1: [0, 2], Type.Q8_0: [0], Type.Q4_K: [0, 2],
          Type.Q5_K: [0, 2], Type.Q6_K: [208], Type.Q2_K: [80, 82], Type.Q3_K: [108], Type.IQ4_NL: [0],
          Type.IQ4_XS: [0], Type.TQ1_0: [52], Type.TQ2_0: [64], Type.MXFP4: []}


def random_blocks(kind, rows, blocks):
    numbers, size = gguf.GGML_QUANT_SIZES[kind]
    data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
    for at in SCALES[kind]:
        scale = rng.standard_normal((rows, blocks, 1)).astype(np.float16)
        data[:, :, at:at + 2] = scale.view(np.uint8)
    if kind == Type.MXFP4:  # the exponent of the scale, biased by 127
        data[:, :, 0] = rng.integers(120, 132, (rows, blocks))
    return data.reshape(rows, blocks * size)


def write_gguf():
    writer = gguf.GGUFWriter(OUT / "types.gguf", "flux")
    writer.add_string("general.name", "types")
    writer.add_uint32("a.number", 7)
    writer.add_array("a.list", ["one", "two"])
    values = {}
    for kind in SCALES:
        name = f"{kind.name.lower()}.weight"
        data = random_blocks(kind, 3, 2)
        values[name] = gguf.quants.dequantize(data, kind)
        writer.add_tensor(name, data, raw_dtype=kind)
    plain = rng.standard_normal((3, 5)).astype(np.float32)
    for kind, data in {Type.F32: plain, Type.F16: plain.astype(np.float16)}.items():
        values[f"{kind.name.lower()}.weight"] = data.astype(np.float32)
        writer.add_tensor(f"{kind.name.lower()}.weight", data)
    bf16 = gguf.quants.quantize(plain, Type.BF16)
    values["bf16.weight"] = gguf.quants.dequantize(bf16, Type.BF16)
    writer.add_tensor("bf16.weight", bf16, raw_dtype=Type.BF16)
    data = random_blocks(Type.Q4_K, 1, 1)
    writer.add_array("comfy.gguf.orig_shape.flat.weight", [4, 8, 2, 2, 2])
    writer.add_tensor("flat.weight", data, raw_dtype=Type.Q4_K)
    values["flat.weight"] = gguf.quants.dequantize(data, Type.Q4_K).reshape(4, 8, 2, 2, 2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_numpy(values, OUT / "types.safetensors")

    source = rng.standard_normal((6, 96)).astype(np.float32) * np.float32(0.05)
    source[0, :32] = 0
    source[1, :32] = np.float32(0.125) * np.arange(-16, 16, dtype=np.float32)
    save_numpy({"x": source} | {f"x.{t.name.lower()}": gguf.quants.quantize(source, t) for t in (Type.Q8_0, Type.Q4_0)},
               OUT / "written.safetensors")


def write_bitsandbytes():
    import bitsandbytes.functional as bnb

    # Rows are whole blocks: the CPU kernel of 0.50.2 uses a wrong block's magnitude for others.
    torch.manual_seed(7)
    layers, values = {}, {}
    for name, kind, nested, shape in [("nested", "nf4", True, (96, 192)), ("plain", "nf4", False, (6, 64)),
                                      ("fp4", "fp4", True, (6, 64))]:
        x = torch.randn(shape) * 0.05
        x[0] = 0
        data, state = bnb.quantize_4bit(x, blocksize=64, compress_statistics=nested, quant_type=kind)
        layers[f"{name}.weight"] = data
        for key, value in state.as_dict(packed=True).items():
            layers[f"{name}.weight.{key}"] = value.contiguous().clone()
        values |= {name: x, f"{name}.read": bnb.dequantize_4bit(data, state)}
    x = torch.randn(6, 96) * 0.05
    x[1] = 0
    rows, scale, _ = bnb.int8_vectorwise_quant(x)
    layers |= {"int8.weight": rows, "int8.SCB": scale, "int8.weight_format": torch.tensor(0, dtype=torch.uint8)}
    values |= {"int8": x, "int8.read": bnb.int8_vectorwise_dequant(rows, scale)}
    save_file(layers, OUT / "bnb.safetensors", metadata={"format": "pt"})
    save_file(values, OUT / "bnb_values.safetensors")


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    for name, write in {"gguf": write_gguf, "bitsandbytes": write_bitsandbytes}.items():
        if name in (sys.argv[1:] or [name]):
            write()
    print("gguf 0.18.0, bitsandbytes 0.50.2, torch", torch.__version__)


if __name__ == "__main__":
    main()
