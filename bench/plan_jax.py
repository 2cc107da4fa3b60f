"""What MaxDiffusion's training step of a UNet or of a Wan transformer takes on TPUs that are not attached, by the same
compiler as ./run plan.

python bench/plan_jax.py FOLDER config.json --topology v5p:2x2x1 --mesh 4,1,1,1 --batch 8 [--latents 64,64]

FOLDER is a checkout of MaxDiffusion's repository, whose rules for shards (configs/base_xl.yml, base_wan_14b.yml) are
taken; --mesh: data, fsdp, context, tensor; --batch: of all devices; --latents: their last sizes, such as 64,64 or
21,90,160 (frames, height, width). UNet: weights are float32, layers bfloat16, AdamW and clipping by norm. Wan: both
bfloat16 with its exceptions, AdamW with moments of the weights' types, remat_policy FULL, scan_layers; --blocks: the
eight flash_block_sizes in the order of BLOCKS. TPU_LIBRARY_PATH names libtpu.so (.deps/libtpu/libtpu.so).

The row has the predicted seconds of a step as ./run plan counts them: operations by the compiler's cycles, attention
kernels by their products at the peak, and messages, none overlapping.
"""

import argparse
import collections
import json
import math
import os
import pathlib
import re
import sys
import time

from peers_jax import unet_of, wan_of

UNET_RULES = (
    ("batch", "data"),
    ("activation_batch", ("data", "fsdp")),
    ("activation_heads", "tensor"),
    ("activation_kv", "tensor"),
    ("embed", "fsdp"),
    ("heads", "tensor"),
    ("conv_batch", ("data", "fsdp")),
    ("out_channels", "tensor"),
    ("conv_out", "fsdp"),
)
WAN_RULES = (
    *((f"activation_{kind}_attn_{axis}", "context" if axis == "q_length" else None)
      for kind in ("self", "cross") for axis in ("heads", "q_length", "kv_length")),
    ("batch", ("data", "fsdp")),
    ("activation_batch", ("data", "fsdp")),
    ("activation_length", "context"),
    ("activation_heads", "tensor"),
    ("mlp", "tensor"),
    ("embed", ("context", "fsdp")),
    ("heads", "tensor"),
    ("norm", "tensor"),
    ("conv_batch", ("data", "context", "fsdp")),
    ("out_channels", "tensor"),
    ("conv_out", "context"),
    ("layers_per_stage", None),
    ("activation_kv_length", "context"),
)
WAN_FLOAT32 = ("norm", "condition_embedder", "scale_shift_table")  # weights that stay so
BLOCKS = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute",
          "block_q_dq", "block_kv_dq")

# FLOPs/s of bfloat16, bytes/s of one axis of the torus, cycles/s (maxdiffusion/pjrt/platform_tpu.cc)
CHIPS = {"v5e": (197e12, 100e9, 1.5e9), "v5p": (459e12, 200e9, 1.75e9), "v6e": (918e12, 200e9, 1.75e9)}
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4, "s8": 1, "u8": 1, "pred": 1}
# Products of queries × keys × width in a kernel: jax's splash attention, and XLA's own, which takes logits.
PRODUCTS = {"splash_mha_fwd": 2, "splash_mha_dq": 3, "splash_mha_dkv": 4, "online-softmax": 1}


def shapes_of(text):
    return [(kind, [int(size) for size in sizes.split(",") if size])
            for kind, sizes in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", text)]


def bytes_of(shapes):
    return sum(BYTES.get(kind, 0) * math.prod(sizes) for kind, sizes in shapes)


def group_size(line):
    """Devices of one group of a collective."""
    if mesh := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
        return math.prod(int(sizes[axis]) for axis in re.findall(r"'(\w+)'", mesh[2]))
    if iota := re.search(r"replica_groups=\[\d+,(\d+)\]", line):
        return int(iota[1])
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", line)
    return listed[1].count(",") + 1 if listed else 2


def message(kind, line, result):
    """Bytes of a collective, and what they travel of a ring: `seconds_of` in maxdiffusion/commands/plan.cc."""
    shapes, n, start = shapes_of(result), group_size(line), f" {kind}-start(" in line
    if kind == "all-gather":
        return bytes_of(shapes[len(shapes) // 2:] if start else shapes), (n - 1) / n
    if kind == "collective-permute":
        return bytes_of(shapes[:1]), 2
    if kind == "all-to-all":
        return bytes_of(shapes), n / 4
    if kind == "reduce-scatter":
        return bytes_of(shapes) * n, (n - 1) / n
    return bytes_of(shapes), 2 * (n - 1) / n


def kernel_flops(line):
    """The first operands with fractions are queries and keys, or logits and values."""
    name = re.match(rf"\s+%?({'|'.join(PRODUCTS)})\b|", line.replace("_segmented", " "))[1]
    if not name:
        return 0
    operands = re.search(r"operand_layout_constraints=\{(.*?)\}\}", line)[1]
    (*heads, queries, width), second = [sizes for kind, sizes in shapes_of(operands) if kind in ("bf16", "f32")][:2]
    return 2 * PRODUCTS[name] * math.prod(heads) * queries * width * second[-1 if name == "online-softmax" else -2]


def predicted(text, chip):
    """Seconds of a step by the compiler's schedule, from the optimized program's text."""
    peak, rate, clock = CHIPS[chip]
    computations, entry = {}, None
    for line in text.splitlines():
        if head := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
            body = computations[head[2]] = []
            entry = head[2] if head[1] else entry
        elif line.startswith("  ") and computations:
            body.append(line)
    total = collections.Counter()

    def trips_of(line, condition):
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', line):
            return int(known[1])
        limit = re.search(r" s32\[\][^ ]* constant\((\d+)\)", "\n".join(computations[condition]))
        return int(limit[1]) if limit else 1

    def read(name, times, started):
        for line in computations[name]:
            op = re.match(r"\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][a-z0-9\-]*)\(", line)
            if not op or op[2].endswith(("-done", "-update")):
                continue
            result, opcode = op.groups()
            if started and opcode == "custom-call":
                total["kernels"] += times * kernel_flops(line) / peak
                total["kernel_calls"] += times * ("tpu_custom_call" in line)
            elif started and (cycles := re.search(r'"estimated_cycles":"(\d+)"', line)):
                total["operations"] += times * int(cycles[1]) / clock
            kind = opcode.removesuffix("-start")
            if kind in KINDS:
                size, part = message(kind, line, result)
                total[kind] += times * size
                total["messages"] += times * size * part / rate
            elif opcode == "while":
                condition, body = (re.search(rf"{key}=%?([\w.\-]+)", line)[1] for key in ("condition", "body"))
                read(body, times * trips_of(line, condition), started)
            elif called := re.search(r"calls=%?([\w.\-]+)", line):
                read(called[1], times, False)

    read(entry, 1, True)
    seconds = {f"{part}_s": total[part] for part in ("operations", "kernels", "messages")}
    return {**seconds, "step_s": sum(seconds.values()), "kernel_calls": total["kernel_calls"],
            **{f"{kind}_gib": total[kind] / 2**30 for kind in KINDS if total[kind]}}


def unet(jax, jnp, o, config, mesh):
    """Weights, batch, optimizer, and (params, batch, key) → loss."""
    import optax

    model, pooled, loss_of = unet_of(jax, jnp, config, jnp.bfloat16, mesh,
                                     attention_kernel=o.attention or "dot_product")
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    added = {"text_embeds": f32(o.batch, pooled), "time_ids": f32(o.batch, 6)}
    latents, text = f32(o.batch, 4, *o.latents), f32(o.batch, 77, config["cross_attention_dim"])
    times = jax.ShapeDtypeStruct((o.batch,), jnp.int32)
    key = jax.eval_shape(lambda: jax.random.key(0))
    params = jax.eval_shape(model.init, key, latents, times, text, added)["params"]

    def loss(params, batch, key):
        return loss_of(params, batch["latents"], batch["text"], {name: batch[name] for name in added}, key)

    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01))
    return params, {"latents": latents, "text": text, **added}, optimizer, loss


def wan(jax, jnp, o, config, mesh):
    """As `unet`. The batch has at least one sample a device, of which the step takes --batch."""
    import optax
    from flax import nnx
    from jax.experimental.pallas.ops.tpu.splash_attention.splash_attention_kernel import BlockSizes

    blocks = BlockSizes(**dict(zip(BLOCKS, map(int, o.blocks.split(",")), strict=True)))
    params, rest, loss_of = wan_of(jax, jnp, config, nnx.eval_shape, dtype=jnp.bfloat16, weights_dtype=jnp.bfloat16,
                                   mesh=mesh, attention=o.attention or "flash", flash_block_sizes=blocks,
                                   remat_policy="FULL", scan_layers=True)

    def typed(path, x):
        exempt = any(word in jax.tree_util.keystr(path) for word in WAN_FLOAT32)
        return jax.ShapeDtypeStruct(x.shape, jnp.float32 if exempt else jnp.bfloat16)

    loaded = max(o.batch, mesh.size)
    batch = {"latents": jax.ShapeDtypeStruct((loaded, config["in_channels"], *o.latents), jnp.float32),
             "text": jax.ShapeDtypeStruct((loaded, 512, config["text_dim"]), jnp.float32)}

    def loss(params, batch, key):
        latents, text = (batch[name][:o.batch].astype(jnp.bfloat16) for name in ("latents", "text"))
        return loss_of(params, rest, latents, text, key)

    return jax.tree_util.tree_map_with_path(typed, params), batch, optax.adamw(1e-5, weight_decay=0.0), loss


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("repository")
    parser.add_argument("config")
    parser.add_argument("--topology", default="v5p:2x2x1")
    parser.add_argument("--mesh", default="4,1,1,1")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--latents", default="64,64")
    parser.add_argument("--attention")
    parser.add_argument("--blocks", default=",".join(["512"] * len(BLOCKS)))
    parser.add_argument("--program", help="a file for the optimized program's text")
    o = parser.parse_args()
    o.latents = [int(size) for size in o.latents.split(",")]
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    sys.path.insert(0, str(pathlib.Path(o.repository) / "src"))

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import linen, nnx
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(platform="tpu", topology_name=o.topology).devices
    sizes = [int(size) for size in o.mesh.split(",")]
    axes = ("data", "fsdp", "context", "tensor")
    mesh = Mesh(np.array(devices).reshape(sizes), axes)
    config = json.loads(pathlib.Path(o.config).read_text())
    is_wan = config["_class_name"].startswith("Wan")
    rules, batch_axes = (WAN_RULES, axes) if is_wan else (UNET_RULES, axes[:2])

    with mesh, linen.logical_axis_rules(rules):
        params, batch, optimizer, loss_of = (wan if is_wan else unet)(jax, jnp, o, config, mesh)
        state = {"params": params, "opt": jax.eval_shape(optimizer.init, params),
                 "step": jax.ShapeDtypeStruct((), jnp.int32)}
        key = jax.eval_shape(lambda: jax.random.key(0))
        shardings = (nnx.get_named_sharding(state, mesh) if is_wan else
                     linen.logical_to_mesh_sharding(linen.get_partition_spec(state), mesh, rules))
        whole = NamedSharding(mesh, PartitionSpec())
        by_batch = NamedSharding(mesh, PartitionSpec(batch_axes))

        def step(state, batch, key):
            loss, grads = jax.value_and_grad(loss_of)(state["params"], batch, key)
            updates, opt = optimizer.update(grads, state["opt"], state["params"])
            state = {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}
            return state, (loss, optax.global_norm(grads))

        start = time.perf_counter()
        lowered = jax.jit(step, in_shardings=(shardings, by_batch, whole), out_shardings=(shardings, whole),
                          donate_argnums=0).lower(linen.meta.unbox(state), batch, key)
        traced = time.perf_counter()
        compiled = lowered.compile()
        done = time.perf_counter()
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    text = compiled.as_text()
    if o.program:
        pathlib.Path(o.program).write_text(text)
    row = {"topology": o.topology, "mesh": o.mesh, "trace_s": traced - start, "compile_s": done - traced,
           "arguments_gib": memory.argument_size_in_bytes / 2**30, "temporary_gib": memory.temp_size_in_bytes / 2**30,
           "gb_read_and_written": cost.get("bytes accessed", 0) / 1e9, "tflop": cost.get("flops", 0) / 1e12,
           "estimated_ms": cost.get("optimal_seconds", 0) * 1e3,
           **{kind: len(re.findall(rf" {kind}(?:-start)?\(", text)) for kind in KINDS},
           **predicted(text, o.topology.split(":")[0])}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
