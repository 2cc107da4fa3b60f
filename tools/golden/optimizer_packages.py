"""Records optimizers of published packages on two small problems: python tools/golden/optimizer_packages.py [NAME …]

    pip install --target DIR --no-deps lion-pytorch==0.2.5 prodigyopt==1.1.2 schedulefree==1.4.1 came-pytorch==0.1.3 \
        bitsandbytes==0.50.2
    PYTHONPATH=.deps/interop:DIR python tools/golden/optimizer_packages.py

Writes tests/golden/NAME.json: starting values, and what parameters and states are after 1 and 50 updates of a quadratic
and of a network of two layers. Float64, so that the comparison measures our rounding alone; bitsandbytes in float32.
"""

import importlib.metadata
import json
import pathlib
import sys

import torch

STEPS = (1, 50)


def numbers(t):
    if t.dtype == torch.uint8:
        return t.flatten().tolist()
    return [float(f"{v:.8g}") for v in t.detach().double().flatten().tolist()]


def quadratic(dtype, sizes=((4, 6), (5,), (), (2, 3, 2, 2))):
    generator = torch.Generator().manual_seed(3)
    randn = lambda s: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)
    start = [randn(s) for s in sizes]
    curvature = [randn(s).abs() + 0.1 for s in sizes]
    goal = [randn(s) for s in sizes]
    loss = lambda ps: sum((a * (p - t) ** 2).sum() for p, a, t in zip(ps, curvature, goal)) / 2
    return start, loss, {"curvature": [numbers(c) for c in curvature], "goal": [numbers(g) for g in goal]}


def network(dtype, sizes=((6, 5), (6,), (3, 6), (3,))):
    generator = torch.Generator().manual_seed(5)
    randn = lambda s: torch.randn(s, generator=generator, dtype=torch.float64).to(dtype)
    start = [randn(s) / max(1, len(s)) for s in sizes]
    x, goal = randn((8, sizes[0][1])), randn((8, sizes[2][0]))
    loss = lambda p: ((torch.tanh(x @ p[0].T + p[1]) @ p[2].T + p[3] - goal) ** 2).mean()
    return start, loss, {"x": numbers(x), "goal": numbers(goal)}


PROBLEMS = {"quadratic": quadratic, "network": network}


def arguments(options):
    """In the form of `optimizer_args`."""
    return [f"{k}={','.join(map(str, v)) if isinstance(v, tuple) else v}" for k, v in options.items()]


def record(make, problem, lr, options, states, scalars=None, evaluated=False, dtype=torch.float64):
    start, loss, data = PROBLEMS[problem](dtype)
    params = [p.clone().requires_grad_() for p in start]
    optimizer = make(params, lr, options)
    steps = {}
    for k in range(1, STEPS[-1] + 1):
        if evaluated:
            optimizer.train()
        for p in params:
            p.grad = None
        loss(params).backward()
        optimizer.step()
        if k not in STEPS:
            continue
        if evaluated:
            optimizer.eval()
        slots = [[numbers(s) if s is not None else None for s in (states(optimizer, p, n) for p in params)]
                 for n in range(states.count)]
        steps[k] = {"params": [numbers(p) for p in params], "slots": slots}
        if scalars:
            steps[k]["scalars"] = [float(v) for v in scalars(optimizer)]
    return {"problem": problem, "lr": lr, "args": arguments(options), "shapes": [list(p.shape) for p in start],
            "start": [numbers(p) for p in start], "data": data, "steps": steps}


class Named:
    """States by their names in the package."""

    def __init__(self, *names):
        self.names, self.count = names, len(names)

    def __call__(self, optimizer, p, n):
        return optimizer.state[p].get(self.names[n])


def lion():
    from lion_pytorch import Lion
    make = lambda params, lr, options: Lion(params, lr=lr, **options)
    states = Named("exp_avg")
    return "lion-pytorch", {
        "quadratic": record(make, "quadratic", 1e-2, {}, states),
        "network": record(make, "network", 2e-3, {"betas": (0.95, 0.98), "weight_decay": 0.1}, states),
    }


def adafactor():
    from transformers.optimization import Adafactor

    def make(params, lr, options):
        relative = options.get("relative_step", True)
        return Adafactor(params, lr=None if relative else lr, **options)

    factored = ("exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_sq")
    return "transformers", {
        "relative": record(make, "quadratic", 1, {"eps": (1e-30, 1.5)}, Named(*factored)),
        "fixed": record(make, "network", 1e-2,
                        {"relative_step": False, "scale_parameter": False, "beta1": 0.9, "weight_decay": 0.1},
                        Named(*factored, "exp_avg")),
        "warmup": record(make, "network", 1, {"warmup_init": True, "clip_threshold": 0.5, "decay_rate": -0.5},
                         Named(*factored)),
    }


def came():
    from came_pytorch import CAME
    make = lambda params, lr, options: CAME(params, lr=lr, **options)
    states = Named("exp_avg", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_res_row", "exp_avg_res_col", "exp_avg_sq")
    return "came-pytorch", {
        "quadratic": record(make, "quadratic", 1e-2, {}, states),
        "network": record(make, "network", 5e-3, {"betas": (0.8, 0.99, 0.999), "weight_decay": 0.1}, states),
    }


def prodigy():
    from prodigyopt import Prodigy
    # Not the default d0 of 1e-6: in float32 the distance of a weight near 1 would have two digits in the first updates.
    make = lambda params, lr, options: Prodigy(params, lr=lr, **options)
    states = Named("exp_avg", "exp_avg_sq", "s", "p0")
    scalars = lambda o: [o.param_groups[0][k] for k in ("d", "d_max", "d_numerator")]
    return "prodigyopt", {
        "quadratic": record(make, "quadratic", 1, {"d0": 1e-3}, states, scalars),
        "network": record(make, "network", 0.5,
                          {"betas": (0.8, 0.99), "weight_decay": 0.1, "use_bias_correction": True,
                           "safeguard_warmup": True, "d_coef": 2.0, "d0": 1e-3, "growth_rate": 1.02}, states, scalars),
        "coupled": record(make, "quadratic", 1,
                          {"beta3": 0.9, "weight_decay": 0.1, "decouple": False, "d0": 1e-2, "eps": 1e-2}, states,
                          scalars),
    }


def schedule_free_adamw():
    from schedulefree import AdamWScheduleFree
    make = lambda params, lr, options: AdamWScheduleFree(params, lr=lr, foreach=False, **options)
    states = Named("z", "exp_avg_sq")
    scalars = lambda o: [o.param_groups[0][k] for k in ("weight_sum", "lr_max")]
    return "schedulefree", {
        "quadratic": record(make, "quadratic", 1e-2, {}, states, scalars, evaluated=True),
        "network": record(make, "network", 1e-2,
                          {"betas": (0.8, 0.99), "weight_decay": 0.1, "warmup_steps": 7, "r": 0.5,
                           "weight_lr_power": 1.0, "eps": 1e-2}, states, scalars, evaluated=True),
    }


class MuonAndAdamw:
    """torch.optim.Muon for matrices, of convolutions as matrices, and AdamW for the rest; all in float64."""

    def __init__(self, params, lr, options):
        adamw_options = {k.removeprefix("adamw_"): v for k, v in options.items() if k.startswith("adamw_")}
        decay = options.get("weight_decay", 0.1)
        self.views = {p: p.detach().reshape(p.shape[0], -1) for p in params if p.dim() >= 2}
        self.matrices = torch.optim.Muon(list(self.views.values()), lr=lr,
                                         **{k: v for k, v in options.items() if not k.startswith("adamw_")})
        rest = [p for p in params if p.dim() < 2]
        ratio = adamw_options.pop("lr_ratio", 1)
        self.rest = torch.optim.AdamW(rest, lr=lr * ratio, weight_decay=decay, **adamw_options)

    def step(self):
        for p, view in self.views.items():
            view.grad = p.grad.reshape(view.shape)
        narrow, torch.bfloat16 = torch.bfloat16, torch.float64
        self.matrices.step()
        torch.bfloat16 = narrow
        self.rest.step()

    def states(self, p, n):
        if p in self.views:
            return self.matrices.state[self.views[p]]["momentum_buffer"] if n == 0 else None
        return None if n == 0 else self.rest.state[p][("exp_avg", "exp_avg_sq")[n - 1]]


def muon():
    states = lambda o, p, n: o.states(p, n)
    states.count = 3
    return "torch", {
        "quadratic": record(MuonAndAdamw, "quadratic", 1e-2, {}, states),
        "network": record(MuonAndAdamw, "network", 1e-2,
                          {"weight_decay": 0.02, "momentum": 0.9, "nesterov": False, "ns_steps": 4,
                           "adjust_lr_fn": "match_rms_adamw", "adamw_betas": (0.8, 0.99), "adamw_lr_ratio": 0.5},
                          states),
        "spectral": record(MuonAndAdamw, "network", 1e-2, {"adjust_lr_fn": "spectral_unclamped", "eps": 0.1}, states),
    }


def adamw8bit():
    from bitsandbytes.backends.cpu import ops
    from bitsandbytes.optim import AdamW8bit

    def exact(x, code, absmax, out, block):
        """The package's search of the nearest code, instead of its C++ library's, which has errors of up to 3e-5."""
        codes, largest = torch.ops.bitsandbytes.quantize_blockwise(x.double(), code, block)
        out.copy_(codes), absmax.copy_(largest)

    ops._quant_blockwise_fp32_direct = exact
    sizes = ((12, 25), (5,))
    PROBLEMS["quadratic"] = lambda dtype: quadratic(dtype, sizes)

    def make(params, lr, options):
        optimizer = AdamW8bit(params, lr=lr, **options)
        optimizer.is_managed = True
        return optimizer

    def states(optimizer, p, n):
        s = optimizer.state[p]
        if p.numel() < 6:
            return [None, None, None, None, s["state1"], s["state2"]][n]
        return [s["state1"], s["state2"], s["absmax1"], s["absmax2"], None, None][n]

    states.count = 6
    return "bitsandbytes", {
        "quadratic": record(make, "quadratic", 1e-2, {"min_8bit_size": 6}, states, dtype=torch.float32),
        "decay": record(make, "quadratic", 1e-2,
                        {"min_8bit_size": 6, "betas": (0.8, 0.95), "weight_decay": 0.3, "eps": 1e-4}, states,
                        dtype=torch.float32),
    }


OPTIMIZERS = {f.__name__: f for f in (lion, adafactor, came, prodigy, schedule_free_adamw, muon, adamw8bit)}


def main():
    for name in sys.argv[1:] or OPTIMIZERS:
        package, cases = OPTIMIZERS[name]()
        path = pathlib.Path(__file__).parents[2] / "tests" / "golden" / f"{name}.json"
        written_by = f"tools/golden/optimizer_packages.py, {package} {importlib.metadata.version(package)}"
        path.write_text(json.dumps({"written_by": written_by, "cases": cases}, separators=(",", ":")))
        print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
