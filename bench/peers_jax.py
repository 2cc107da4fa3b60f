"""The training step of bench/model_bench.cc by MaxDiffusion's own models on JAX, timed the same way, from the process's
start.

python bench/peers_jax.py unet|wan f32|bf16 FOLDER [--steps N]      prints one JSON line

FOLDER is a checkout of MaxDiffusion's repository. Same sizes (bench/models/*.json), batch, optimizer, clipping and noise
as bench/peers.py; bf16 is its mixed precision: weights f32, activations bf16.
"""

import argparse
import json
import pathlib
import sys
import time

from peers import report, seconds_since_start


def unet_of(jax, jnp, config, dtype, mesh, **options):
    """The model of a UNet's config.json, the width of its pooled text, and (params, latents, text, added, key) → loss."""
    from maxdiffusion.models.unet_2d_condition_flax import FlaxUNet2DConditionModel

    sizes = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()
             if k in FlaxUNet2DConditionModel.__dataclass_fields__}
    model = FlaxUNet2DConditionModel(dtype=dtype, weights_dtype=jnp.float32, split_head_dim=True, mesh=mesh, **sizes,
                                     **options)
    pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    betas = jnp.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2

    def loss(params, latents, text, added, key):
        of_noise, of_times = jax.random.split(key)
        noise = jax.random.normal(of_noise, latents.shape)
        t = jax.random.randint(of_times, latents.shape[:1], 0, 1000)
        signal = jnp.cumprod(1 - betas)[t][:, None, None, None]
        noisy = signal**0.5 * latents + (1 - signal) ** 0.5 * noise
        prediction = model.apply({"params": params}, noisy, t, text, added_cond_kwargs=added).sample
        return jnp.mean((prediction.astype(jnp.float32) - noise) ** 2)

    return model, pooled, loss


def unet_step(jax, jnp, config, dtype, mesh):
    model, pooled, loss_of = unet_of(jax, jnp, config, dtype, mesh)
    key = iter(jax.random.split(jax.random.key(0), 9))
    text = jax.random.normal(next(key), (2, 77, config["cross_attention_dim"]))
    added = {
        "text_embeds": jax.random.normal(next(key), (2, pooled)),
        "time_ids": jnp.array([[512.0, 512, 0, 0, 512, 512]] * 2),
    }
    mean, deviation = (jax.random.normal(next(key), (2, 4, 64, 64)) for _ in range(2))
    example = (jnp.zeros((2, 4, 64, 64)), jnp.ones((2,), jnp.int32), text, added)
    params = jax.jit(model.init)(next(key), *example)["params"]

    def loss(params, key):
        of_latents, key = jax.random.split(key)
        latents = mean + deviation * jax.random.normal(of_latents, mean.shape)
        return loss_of(params, latents, text, added, key)

    return params, loss


def wan_of(jax, jnp, config, make=lambda model: model(), **options):
    """Graph, weights and other state of a Wan transformer's config.json, and (params, rest, latents, text, key) → loss;
    `make` calls the constructor."""
    from flax import nnx
    from maxdiffusion.models.wan.transformers.transformer_wan import WanModel

    sizes = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items() if not k.startswith("_")}
    model = make(lambda: WanModel(nnx.Rngs(0), **options, **sizes))
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, latents, text, key):
        of_noise, of_times = jax.random.split(key)
        noise = jax.random.normal(of_noise, latents.shape, latents.dtype)
        sigma = jax.random.uniform(of_times, latents.shape[:1])
        mix = sigma[:, None, None, None, None]
        prediction = nnx.merge(graph, params, rest)((1 - mix) * latents + mix * noise, 1000 * sigma, text)
        return jnp.mean((prediction.astype(jnp.float32) - (noise - latents)) ** 2)

    return params, rest, loss


def wan_step(jax, jnp, config, dtype, mesh):
    params, rest, loss_of = wan_of(jax, jnp, config, dtype=dtype, weights_dtype=jnp.float32, mesh=mesh,
                                   attention="dot_product")
    key = iter(jax.random.split(jax.random.key(0), 9))
    text = jax.random.normal(next(key), (1, 512, config["text_dim"]))
    mean, deviation = (jax.random.normal(next(key), (1, 16, 5, 32, 32)) for _ in range(2))

    def loss(params, key):
        of_latents, key = jax.random.split(key)
        return loss_of(params, rest, mean + deviation * jax.random.normal(of_latents, mean.shape), text, key)

    return params, loss


STEPS = {"unet": unet_step, "wan": wan_step}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", choices=STEPS)
    parser.add_argument("dtype", choices=["f32", "bf16"])
    parser.add_argument("repository")
    parser.add_argument("--steps", type=int, default=10)
    options = parser.parse_args()
    sys.path.insert(0, str(pathlib.Path(options.repository) / "src"))

    import jax
    import jax.numpy as jnp
    import optax
    from flax import linen

    config = json.loads((pathlib.Path(__file__).parent / "models" / f"{options.model}.json").read_text())
    mesh = jax.make_mesh((1, 1, 1, 1), ("data", "fsdp", "context", "tensor"))
    dtype = {"f32": jnp.float32, "bf16": jnp.bfloat16}[options.dtype]
    with mesh, linen.logical_axis_rules([]):
        params, loss_of = STEPS[options.model](jax, jnp, config, dtype, mesh)
        params = linen.meta.unbox(params) if options.model == "unet" else params
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-4, weight_decay=0.01))
        state = jax.jit(optimizer.init)(params)

        def step(params, state, key):
            loss, grads = jax.value_and_grad(loss_of)(params, key)
            updates, state = optimizer.update(grads, state, params)
            return loss, optax.apply_updates(params, updates), state

        keys = jax.random.split(jax.random.key(1), options.steps + 1)
        start = time.perf_counter()
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, keys[0])
        traced = time.perf_counter()
        compiled = lowered.compile()
        compile_s = time.perf_counter() - traced
        runs = []
        for key in keys:
            begin, used = time.perf_counter(), time.process_time()
            loss, params, state = compiled(params, state, key)
            loss = float(loss)
            runs.append((time.perf_counter() - begin, time.process_time() - used))
            if len(runs) == 1:
                to_first_loss = seconds_since_start()
    count = sum(x.size for x in jax.tree.leaves(params))
    report(options, "MaxDiffusion on JAX " + jax.__version__, count, runs, to_first_loss, trace_s=traced - start, compile_s=compile_s)


if __name__ == "__main__":
    main()
