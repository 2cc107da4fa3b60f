"""Records ten updates of torch.optim.AdamW and SGD, with both clippings: python tools/golden/optimizers.py

Writes tests/golden/adamw.json and sgd.json: starting values, the gradients of every update, and after each the
parameters, the optimizer's state and the gradient norm. Float64, so that the comparison measures our rounding alone.
"""

import json
import pathlib

import torch

SHAPES = [(3, 4), (5,), ()]
# Optimizer, its defaults here, names of its state, cases.
OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}, ["exp_avg", "exp_avg_sq"], {
        "plain": {},
        "norm": {"max_grad_norm": 1.0},
        "value": {"max_grad_value": 0.5},
        "both": {"max_grad_value": 0.5, "max_grad_norm": 0.7, "weight_decay": 0.0},
        "decay": {"weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-3},
    }),
    "sgd": (torch.optim.SGD, {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0}, ["momentum_buffer"], {
        "plain": {},
        "without_momentum": {"momentum": 0.0, "weight_decay": 0.1},
        "nesterov": {"nesterov": True, "momentum": 0.8},
        "decay": {"weight_decay": 0.3, "max_grad_value": 0.5, "max_grad_norm": 0.7},
        "nesterov_decay": {"nesterov": True, "weight_decay": 0.1, "max_grad_norm": 1.0},
    }),
}


def flat(tensors):
    return [[float(f"{v:.9g}") for v in t.flatten().tolist()] for t in tensors]


def run(make, options, names, clipping):
    generator = torch.Generator().manual_seed(0)
    randn = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    params = [randn(s).requires_grad_() for s in SHAPES]
    start = flat(params)
    optimizer = make(params, lr=0.02, **options)
    steps = []
    for k in range(10):
        for p in params:
            # Some steps are clipped, some are not; one gradient is exactly zero.
            p.grad = randn(p.shape) * (0.1 if k % 3 == 1 else 1.0) * (0.0 if k == 4 else 1.0)
        gradients = flat(p.grad for p in params)
        norm = torch.sqrt(sum((p.grad**2).sum() for p in params)).item()
        if "max_grad_value" in clipping:
            torch.nn.utils.clip_grad_value_(params, clipping["max_grad_value"])
        if "max_grad_norm" in clipping:
            # Not clip_grad_norm_, which adds 1e-6 to the norm.
            clipped = torch.sqrt(sum((p.grad**2).sum() for p in params)).item()
            for p in params:
                p.grad *= min(1.0, clipping["max_grad_norm"] / clipped) if clipped > 0 else 1.0
        optimizer.step()
        state = [optimizer.state[p] for p in params]
        steps.append({"gradients": gradients, "norm": norm, "params": flat(params),
                      "slots": [flat(s[n] for s in state) for n in names if state[0].get(n) is not None]})
    return {"shapes": [list(s) for s in SHAPES], "options": {"lr": 0.02, **options, **clipping}, "start": start,
            "steps": steps}


def main():
    for name, (make, defaults, names, cases) in OPTIMIZERS.items():
        path = pathlib.Path(__file__).parents[2] / "tests" / "golden" / f"{name}.json"
        recorded = {}
        for case, changes in cases.items():
            options = {k: changes.get(k, v) for k, v in defaults.items()}
            recorded[case] = run(make, options, names, {k: v for k, v in changes.items() if k not in defaults})
        with open(path, "w") as file:
            json.dump({"written_by": f"tools/golden/optimizers.py, torch {torch.__version__}", "cases": recorded}, file,
                      separators=(",", ":"))
        print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
