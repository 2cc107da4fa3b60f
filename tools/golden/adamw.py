"""Records ten updates of torch.optim.AdamW with both clippings: python tools/golden/adamw.py

Writes tests/golden/adamw.json: starting values, the gradients of every update, and parameters, moments and gradient
norm after each. Float64, so that the comparison measures our rounding alone.
"""

import json
import pathlib

import torch

SHAPES = [(3, 4), (5,), ()]
CASES = {
    "plain": {},
    "norm": {"max_grad_norm": 1.0},
    "value": {"max_grad_value": 0.5},
    "both": {"max_grad_value": 0.5, "max_grad_norm": 0.7, "weight_decay": 0.0},
    "decay": {"weight_decay": 0.3, "betas": (0.8, 0.95), "eps": 1e-3},
}


def flat(tensors):
    return [[float(f"{v:.9g}") for v in t.flatten().tolist()] for t in tensors]


def run(case):
    generator = torch.Generator().manual_seed(0)
    draw = lambda shape: torch.randn(shape, generator=generator, dtype=torch.float64)
    params = [draw(s).requires_grad_() for s in SHAPES]
    start = flat(params)
    options = {"lr": 0.02, "betas": case.get("betas", (0.9, 0.999)), "eps": case.get("eps", 1e-8),
               "weight_decay": case.get("weight_decay", 1e-2)}
    optimizer = torch.optim.AdamW(params, **options)
    steps = []
    for k in range(10):
        for p in params:
            # Some steps are clipped, some are not; one gradient is exactly zero.
            p.grad = draw(p.shape) * (0.1 if k % 3 == 1 else 1.0) * (0.0 if k == 4 else 1.0)
        gradients = flat(p.grad for p in params)
        norm = torch.sqrt(sum((p.grad**2).sum() for p in params)).item()
        if "max_grad_value" in case:
            torch.nn.utils.clip_grad_value_(params, case["max_grad_value"])
        if "max_grad_norm" in case:
            # Not clip_grad_norm_, which adds 1e-6 to the norm.
            clipped = torch.sqrt(sum((p.grad**2).sum() for p in params)).item()
            for p in params:
                p.grad *= min(1.0, case["max_grad_norm"] / clipped) if clipped > 0 else 1.0
        optimizer.step()
        state = [optimizer.state[p] for p in params]
        steps.append({"gradients": gradients, "norm": norm, "params": flat(params),
                      "first": flat(s["exp_avg"] for s in state), "second": flat(s["exp_avg_sq"] for s in state)})
    return {"shapes": [list(s) for s in SHAPES], "options": {**options, **case}, "start": start, "steps": steps}


def main():
    path = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "adamw.json"
    with open(path, "w") as file:
        json.dump({"written_by": f"tools/golden/adamw.py, torch {torch.__version__}",
                   "cases": {name: run(case) for name, case in CASES.items()}}, file, separators=(",", ":"))
    print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
