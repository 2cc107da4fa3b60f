"""What MaxDiffusion's training step of a UNet takes on TPUs that are not here, by the same compiler as ./run plan.

python bench/plan_jax.py FOLDER unet/config.json --topology v5p:2x2x1 --mesh 4,1,1,1 --batch 8 [--latents 64]

FOLDER is a checkout of MaxDiffusion's repository, whose rules for shards (configs/base_xl.yml) are taken; --mesh: data,
fsdp, context, tensor; --batch: of all devices; --latents: pixels of their side. Weights are float32, layers bfloat16,
AdamW and clipping by norm. TPU_LIBRARY_PATH names libtpu.so (.deps/libtpu/libtpu.so).
"""

import argparse
import json
import os
import pathlib
import sys
import time

from peers_jax import unet_of

RULES = (
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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("repository")
    parser.add_argument("config")
    parser.add_argument("--topology", default="v5p:2x2x1")
    parser.add_argument("--mesh", default="4,1,1,1")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--latents", type=int, default=64)
    parser.add_argument("--attention", default="dot_product")
    o = parser.parse_args()
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    sys.path.insert(0, str(pathlib.Path(o.repository) / "src"))

    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import linen
    from jax.experimental import topologies
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    devices = topologies.get_topology_desc(platform="tpu", topology_name=o.topology).devices
    sizes = [int(size) for size in o.mesh.split(",")]
    mesh = Mesh(np.array(devices).reshape(sizes), ("data", "fsdp", "context", "tensor"))

    config = json.loads(pathlib.Path(o.config).read_text())
    model, pooled, loss_of = unet_of(jax, jnp, config, jnp.bfloat16, mesh, attention_kernel=o.attention)

    with mesh, linen.logical_axis_rules(RULES):
        f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
        latents, text = f32(o.batch, 4, o.latents, o.latents), f32(o.batch, 77, config["cross_attention_dim"])
        added = {"text_embeds": f32(o.batch, pooled), "time_ids": f32(o.batch, 6)}
        times = jax.ShapeDtypeStruct((o.batch,), jnp.int32)
        key = jax.eval_shape(lambda: jax.random.key(0))
        boxed = jax.eval_shape(model.init, key, latents, times, text, added)["params"]
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01))
        state = {"params": boxed, "opt": jax.eval_shape(optimizer.init, boxed), "step": jax.ShapeDtypeStruct((), jnp.int32)}
        shardings = linen.logical_to_mesh_sharding(linen.get_partition_spec(state), mesh, RULES)
        whole = NamedSharding(mesh, PartitionSpec())
        by_batch = NamedSharding(mesh, PartitionSpec(("data", "fsdp")))
        plain = linen.meta.unbox(state)
        batch = {"latents": latents, "text": text, **added}

        def step(state, batch, key):
            extra = {"text_embeds": batch["text_embeds"], "time_ids": batch["time_ids"]}
            loss, grads = jax.value_and_grad(loss_of)(state["params"], batch["latents"], batch["text"], extra, key)
            updates, opt = optimizer.update(grads, state["opt"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt, "step": state["step"] + 1}, loss

        start = time.perf_counter()
        lowered = jax.jit(step, in_shardings=(shardings, by_batch, whole), out_shardings=(shardings, whole),
                          donate_argnums=0).lower(plain, batch, key)
        traced = time.perf_counter()
        compiled = lowered.compile()
        done = time.perf_counter()
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    text = compiled.as_text()
    kinds = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
    row = {"topology": o.topology, "mesh": o.mesh, "trace_s": traced - start, "compile_s": done - traced,
           "arguments_gib": memory.argument_size_in_bytes / 2**30, "temporary_gib": memory.temp_size_in_bytes / 2**30,
           "gb_read_and_written": cost.get("bytes accessed", 0) / 1e9, "tflop": cost.get("flops", 0) / 1e12,
           "estimated_ms": cost.get("optimal_seconds", 0) * 1e3,
           **{kind: sum(f" {kind}{end}(" in line for line in text.splitlines() for end in ("", "-start")) for kind in kinds}}
    print(json.dumps(row))


if __name__ == "__main__":
    main()
