"""Writes the goldens of quantized layers: tests/golden/quantized/<case>/, files as tools/golden/models.py describes them.

A stack of a linear layer, a convolution and a linear layer, run by qwix under the rules that MaxDiffusion's Wan pipeline
makes of its keys: outputs, and gradients of everything. noise_floor_* are how far a float32 run of the same stack
without quantization is from it: what quantization itself does. Next to the cases:

  values.safetensors  numbers, and what qwix makes of them: <type>.<axes that have ranges of their own>.values (integers;
      floats as they are), .scale

The largest magnitude of a range lies halfway between two integers: a compiler that multiplies by the reciprocal of the
scale gets the one, another that divides the other. Both make 127 of a positive one; so ranges end in positive numbers here.

qwix runs on JAX, which nothing else here needs, so it has an environment of its own:

    python3 -m venv /tmp/qwix && /tmp/qwix/bin/pip install jax flax qwix safetensors
    /tmp/qwix/bin/python tools/golden/quantization.py
"""

import json
import pathlib

import jax
import numpy as np
import qwix
from flax import nnx
from jax import numpy as jnp
from safetensors.numpy import save_file

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "quantized"
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
ALL = ("dot_general", "einsum", "conv_general_dilated")
METHODS = ("weight_calibration_method", "act_calibration_method", "bwd_calibration_method")


def plain(dtype, path=".*"):
    return [qwix.QtRule(module_path=path, weight_qtype=dtype, act_qtype=dtype, op_names=ALL)]


def full(*methods):
    common = dict(module_path=".*", weight_qtype=E4M3, act_qtype=E4M3, disable_channelwise_axes=True,
                  **dict(zip(METHODS, methods)))
    return [qwix.QtRule(bwd_qtype=E5M2, op_names=ALL[:2], **common), qwix.QtRule(bwd_qtype=E4M3, op_names=ALL[2:], **common)]


CASES = {
    "int8": (dict(quantization="int8"), plain(jnp.int8)),
    "int8_some": (dict(quantization="int8", qwix_module_path="conv|last"), plain(jnp.int8, "conv|last")),
    "fp8": (dict(quantization="fp8"), plain(E4M3)),
    "fp8_full": (dict(quantization="fp8_full"), full("absmax", "absmax", "absmax")),
    "fp8_full_calibrated": (dict(quantization="fp8_full", weight_quantization_calibration_method="fixed,-0.5,0.5",
                                 act_quantization_calibration_method="rms,2.5",
                                 bwd_quantization_calibration_method="absmax,0.8"),
                            full("fixed,-0.5,0.5", "rms,2.5", "absmax,0.8")),
}


class Stack(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(6, 5, rngs=rngs)
        self.conv = nnx.Conv(5, 4, kernel_size=(3, 3), rngs=rngs)
        self.last = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.square(self.conv(jnp.square(self.first(x)))))


def ending_positive(x, axes):
    """Flips the signs of ranges (one per position along axes) whose largest magnitude is negative."""
    others = tuple(a for a in range(x.ndim) if a not in axes)
    return x * np.where(-x.min(others, keepdims=True) > x.max(others, keepdims=True), -1, 1).astype(x.dtype)


def published(tree):
    """Flax's kernels in PyTorch's layout."""
    out = {}
    for name in ("first", "conv", "last"):
        kernel = np.asarray(tree[name]["kernel"].get_value())
        axes = (kernel.ndim - 1, kernel.ndim - 2) + tuple(range(kernel.ndim - 2))
        out[f"{name}.weight"] = np.ascontiguousarray(kernel.transpose(axes))
        out[f"{name}.bias"] = np.asarray(tree[name]["bias"].get_value())
    return out


def distance(got, want):
    return max(float(np.linalg.norm(got[k] - want[k]) / np.linalg.norm(want[k])) for k in want)


def stacks():
    rng = np.random.default_rng(7)
    x = rng.standard_normal((2, 4, 3, 6)) * np.exp(rng.standard_normal((2, 4, 3, 1)) / 2)
    x = jnp.asarray(ending_positive(x, (0, 1, 2)), jnp.float32)
    dot = jnp.asarray(rng.standard_normal((2, 4, 3, 3)), jnp.float32)
    model = Stack(nnx.Rngs(3))
    graph, state = nnx.split(model)
    keys = jax.random.split(jax.random.key(5), len(jax.tree.leaves(state)))
    state = jax.tree.unflatten(jax.tree.structure(state), [
        jnp.asarray(ending_positive(np.asarray(v + 0.1 * jax.random.normal(k, v.shape)), (v.ndim - 1,)))
        for v, k in zip(jax.tree.leaves(state), keys)])
    model = nnx.merge(graph, state)

    def run(m):
        def loss(m, x):
            y = m(x)
            return jnp.sum(y * dot), y
        (_, y), (dm, dx) = nnx.value_and_grad(loss, argnums=(0, 1), has_aux=True)(m, x)
        return {"y": np.asarray(y)}, published(dm) | {"in.x": np.asarray(dx)}

    exact = run(model)
    for name, (config, rules) in CASES.items():
        out, grads = run(qwix.quantize_model(model, qwix.QtProvider(rules), x))
        floors = {"noise_floor_outputs": distance(exact[0], out), "noise_floor_gradients": distance(exact[1], grads)}
        print(name, floors)
        folder = ROOT / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        save_file(published(nnx.state(model)), folder / "weights.safetensors")
        save_file({"in.x": np.asarray(x), "dot.y": np.asarray(dot)} | {f"out.{k}": v for k, v in out.items()}
                  | {f"grad.{k}": v for k, v in grads.items()}, folder / "golden.safetensors",
                  {k: str(v) for k, v in floors.items()} | {"jax": jax.__version__, "qwix": qwix.__version__})


def values():
    rng = np.random.default_rng(11)
    x = (rng.standard_normal((4, 3, 64)) * np.exp(2 * rng.standard_normal((4, 3, 1)))).astype(np.float32)
    x[0, 0] = 0  # a range of nothing
    x[0, 1] = np.append(np.arange(63) - 31.5, 127.5)  # halves
    x[0, 2] *= 1e-22  # smaller than any scale
    x[1, 0, :4] = 1e30
    x = ending_positive(x, (0, 1))
    out = {"x": x}
    for name, dtype in (("int8", jnp.int8), ("e4m3", E4M3), ("e5m2", E5M2)):
        for axes in ((), (0,), (0, 1)):
            q = qwix.quantize(jnp.asarray(x), dtype, channelwise_axes=axes)
            prefix = f"{name}.{''.join(map(str, axes))}"
            out[f"{prefix}.values"] = np.asarray(q.qvalue.astype(jnp.int8 if name == "int8" else jnp.float32))
            out[f"{prefix}.scale"] = np.asarray(q.scale)
    save_file(out, ROOT / "values.safetensors")


stacks()
values()
