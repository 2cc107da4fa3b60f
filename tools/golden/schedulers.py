"""Records what diffusers' schedulers do, for tests/schedulers: python tools/golden/schedulers.py

Writes tests/golden/schedulers.json: timesteps, initial sigma, noise tables, and runs of a sample of two numbers, 1 and
-0.4 times the initial sigma, whose "network" is out = 0.3·input + 0.1·t/1000 − 0.2 (input: the scaled model input,
t: the timestep given to the network). Random noise is replaced by zeros; the standard deviation that would scale
them is recorded with the run.

diffusers computes in float32. Its modules are given float64 under that name, so that the goldens hold its formulas and
not its rounding; how far each run in real float32 is from that is printed. Needs scipy (LMS).
"""

import collections
import copy
import json
import pathlib
import sys
import warnings

import diffusers
import numpy as np
import torch

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SPACINGS = ("linspace", "leading", "trailing")
PREDICTIONS = ("epsilon", "v_prediction", "sample")


class WithFloat32:
    """A module in which float32 is another type."""

    def __init__(self, module, float32):
        self._module, self.float32 = module, float32

    def __getattr__(self, name):
        return getattr(self._module, name)


class Draw:
    """In place of randn_tensor."""

    value = 0.0

    def __call__(self, shape, generator=None, device=None, dtype=None):
        return torch.full(shape, self.value, dtype=dtype)


draw = Draw()


def in_precision(name, torch_type, numpy_type):
    torch.set_default_dtype(torch_type)
    scheduler_class = getattr(diffusers, name)
    module = sys.modules[scheduler_class.__module__]
    module.torch, module.np, module.randn_tensor = WithFloat32(torch, torch_type), WithFloat32(np, numpy_type), draw
    return scheduler_class


def rounded(value):
    """More digits than float32 knows."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def run_in(types, name, config, steps):
    scheduler = in_precision(name, *types).from_config(config)
    scheduler.set_timesteps(steps)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)  # as pipelines do: steps are counted, not found by timestep
    initial = float(getattr(scheduler, "init_noise_sigma", 1.0))
    x = torch.tensor([1.0, -0.4], dtype=types[0]).reshape(1, 1, 1, 2) * initial
    values, spread = [], []
    for t in scheduler.timesteps:
        model_input = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        out = 0.3 * model_input + 0.1 * float(t) / 1000 - 0.2
        eta = {"eta": config["eta"]} if "eta" in config else {}  # diffusers' is an argument, ours a member
        noised = copy.deepcopy(scheduler)
        draw.value = 1.0
        far = noised.step(out, t, x, return_dict=False, **eta)[0]
        draw.value = 0.0
        x = scheduler.step(out, t, x, return_dict=False, **eta)[0]
        spread.append(float((far - x).flatten()[0]))
        values.append([float(v) for v in x.flatten()])
    result = {
        "config": {"_class_name": name, **config},
        "steps": steps,
        "timesteps": [float(t) for t in scheduler.timesteps],
        "init_noise_sigma": initial,
        "values": values,
    }
    return {**result, "spread": spread} if any(spread) else result


noise_floor = collections.defaultdict(float)


def run(name, config, *steps):
    results = []
    for n in steps:
        exact = run_in((torch.float64, np.float64), name, config, n)
        single = run_in((torch.float32, np.float32), name, config, n)
        if not np.isfinite(exact["values"]).all():
            raise ValueError(f"{name} {config} {n} steps: {exact['values']}")
        a, b = np.array(exact["values"]), np.array(single["values"])
        worst = float(np.max(np.abs(a - b) / (1 + np.abs(a))))
        if worst > 1e-5:
            print(f"float32 is {worst:.1e} away: {name} {config} {n} steps")
        noise_floor[name] = max(noise_floor[name], worst)
        results.append(exact)
    return results


def noising(config):
    scheduler = in_precision("DDPMScheduler", torch.float64, np.float64).from_config(config)
    t = torch.tensor([0, 1, 249, 500, 998, 999])
    x0 = torch.linspace(-1, 1, 6).reshape(6, 1)
    noise = torch.linspace(2, -1, 6).reshape(6, 1)
    return {
        "config": {"_class_name": "DDPMScheduler", **config},
        "timesteps": t.tolist(),
        "alphas_cumprod": scheduler.alphas_cumprod[t].tolist(),
        "x0": x0.flatten().tolist(),
        "noise": noise.flatten().tolist(),
        "noised": scheduler.add_noise(x0, noise, t).flatten().tolist(),
        "velocity": scheduler.get_velocity(x0, noise, t).flatten().tolist(),
    }


def ancestral():
    """With v prediction no step divides by the signal, so zero terminal SNR is exact."""
    name = "EulerAncestralDiscreteScheduler"
    for spacing in SPACINGS:
        for prediction in PREDICTIONS[:2]:  # diffusers refuses the third
            yield from run(name, {**SD, "timestep_spacing": spacing, "prediction_type": prediction,
                                  "steps_offset": 1}, 5)
    yield from run(name, {**SD, "timestep_spacing": "trailing"}, 1, 2, 20)
    yield from run(name, {**SD, "beta_schedule": "squaredcos_cap_v2"}, 8)
    yield from run(name, {**SD, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction",
                          "timestep_spacing": "trailing"}, 10)


def runs():
    # With v prediction no step divides by the signal, so zero terminal SNR is exact.
    zero = {**SD, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "timestep_spacing": "trailing"}
    karras, exponential = {"use_karras_sigmas": True}, {"use_exponential_sigmas": True}
    minimum = {"final_sigmas_type": "sigma_min"}
    cosine = {"beta_schedule": "squaredcos_cap_v2"}

    def every(name, more, predictions=PREDICTIONS, steps=5):
        for spacing in SPACINGS:
            for prediction in predictions:
                yield from run(name, {**SD, "timestep_spacing": spacing, "prediction_type": prediction, **more}, steps)

    name = "EulerDiscreteScheduler"
    # diffusers' linspace of one step is timestep 0, where there is nothing to denoise; ours is the last one.
    one = {**SD, "timestep_spacing": "trailing"}
    yield from every(name, {"steps_offset": 1})
    yield from run(name, one, 1)
    yield from run(name, SD, 2, 8, 20)
    for more in (karras, exponential, {"interpolation_type": "log_linear"}, minimum, cosine, {**karras, **minimum}):
        yield from run(name, {**SD, **more}, 8)
    video = {"timestep_type": "continuous", "prediction_type": "v_prediction", "sigma_min": 0.002, "sigma_max": 700.0}
    yield from run(name, {**SD, **karras, **video, "timestep_spacing": "leading", "steps_offset": 1}, 1, 8)
    yield from run(name, {**SD, **karras, "interpolation_type": "log_linear", "timestep_type": "continuous"}, 4)
    yield from run(name, zero, 10)

    yield from ancestral()

    name = "FlowMatchEulerDiscreteScheduler"
    for shift in (1.0, 3.0, 5.0):
        yield from run(name, {"shift": shift}, 1, 4, 20)
    yield from run(name, {"shift": 3.0, "shift_terminal": 0.1}, 8)
    yield from run(name, {"shift": 3.0, "invert_sigmas": True}, 6)
    yield from run(name, {"shift": 3.0, "stochastic_sampling": True}, 6)
    for more in (karras, exponential):
        yield from run(name, {"shift": 3.0, **more}, 8)

    name = "LMSDiscreteScheduler"
    yield from every(name, {"steps_offset": 1})
    yield from run(name, one, 1)
    yield from run(name, SD, 2, 20)
    for more in (karras, exponential, cosine):
        yield from run(name, {**SD, **more}, 8)

    name = "DDIMScheduler"
    yield from every(name, {"clip_sample": False})
    yield from every(name, {"clip_sample": True, "set_alpha_to_one": False, "steps_offset": 1})
    yield from run(name, {**SD, "clip_sample_range": 0.5}, 1, 2, 20)
    yield from run(name, {**SD, "eta": 0.7, "clip_sample": False}, 5)
    yield from run(name, {**zero, "clip_sample": False}, 10)

    name = "DDPMScheduler"
    yield from every(name, {"clip_sample": False})
    yield from run(name, SD, 1, 2, 20)
    yield from run(name, {**SD, "variance_type": "fixed_large", "clip_sample_range": 0.5}, 8)
    yield from run(name, {**SD, "variance_type": "fixed_small_log"}, 8)
    yield from run(name, {**zero, "clip_sample": False}, 10)

    name = "PNDMScheduler"
    yield from every(name, {"skip_prk_steps": True, "steps_offset": 1}, PREDICTIONS[:2])
    yield from run(name, {**SD, "skip_prk_steps": True}, 1, 2, 8, 20)
    yield from run(name, {**SD, "skip_prk_steps": True, "set_alpha_to_one": True}, 5)
    yield from every(name, {"steps_offset": 1}, PREDICTIONS[:2], 8)

    name = "DPMSolverMultistepScheduler"
    yield from every(name, {"steps_offset": 1})
    for order in (1, 2, 3):
        for solver in ("midpoint", "heun") if order == 2 else ("midpoint",):
            more = {"solver_order": order, "solver_type": solver}
            for algorithm in ("dpmsolver++", "sde-dpmsolver++"):
                yield from run(name, {**SD, **more, "algorithm_type": algorithm}, 8)
            for algorithm in ("dpmsolver", "sde-dpmsolver")[: 1 if order == 3 else 2]:
                yield from run(name, {**SD, **more, **minimum, "algorithm_type": algorithm}, 8)
            yield from run(name, {**SD, **more, **minimum, "lower_order_final": False}, 5)
    for prediction in PREDICTIONS[1:]:
        yield from run(name, {**SD, **minimum, "algorithm_type": "dpmsolver", "prediction_type": prediction}, 5)
    yield from run(name, {**SD, "solver_order": 3}, 1, 2, 20)
    for more in (karras, {"use_lu_lambdas": True}, exponential, {"euler_at_final": True, **minimum}, cosine):
        yield from run(name, {**SD, **more}, 8)
    yield from run(name, {**SD, **karras, **minimum, "solver_order": 3, "timestep_spacing": "leading"}, 20)
    for spacing in SPACINGS:
        yield from run(name, {**cosine, **karras, "timestep_spacing": spacing, "lambda_min_clipped": -5.1}, 8)
        yield from run(name, {**cosine, "timestep_spacing": spacing, "lambda_min_clipped": -5.1}, 8)
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    yield from run(name, {**flow, "flow_shift": 3.0}, 1, 9, 20)
    yield from run(name, zero, 10)

    name = "UniPCMultistepScheduler"
    yield from every(name, {"steps_offset": 1})
    for order in (1, 2, 3):
        for solver in ("bh1", "bh2"):
            more = {"solver_order": order, "solver_type": solver}
            # diffusers' bh1 steps to no noise with infinity times zero.
            yield from run(name, {**SD, **more, **(minimum if solver == "bh1" else {})}, 8)
            yield from run(name, {**SD, **more, **minimum, "predict_x0": False, "lower_order_final": False}, 5)
    for prediction in PREDICTIONS[1:]:
        yield from run(name, {**SD, **minimum, "predict_x0": False, "prediction_type": prediction}, 5)
    yield from run(name, {**SD, "solver_order": 3}, 1, 2, 20)
    yield from run(name, {**SD, "solver_order": 3, "disable_corrector": [0, 2, 3]}, 8)
    for more in (karras, exponential, minimum, cosine, {**karras, **minimum, "sigma_min": 0.1, "sigma_max": 10.0}):
        yield from run(name, {**SD, **more}, 8)
    for shift, order, steps in ((3.0, 2, 1), (3.0, 2, 6), (5.0, 2, 20), (3.0, 3, 9), (1.0, 1, 9)):
        yield from run(name, {**flow, "flow_shift": shift, "solver_order": order}, steps)
    yield from run(name, {**flow, "flow_shift": 5.0, "shift_terminal": 0.1}, 8)
    yield from run(name, {**flow, "flow_shift": 5.0, "solver_type": "bh1", **minimum}, 8)
    yield from run(name, {**flow, **karras}, 8)
    yield from run(name, zero, 10)


def main():
    warnings.filterwarnings("ignore")
    diffusers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    recorded = list(runs())
    print(dict(noise_floor))
    tables = [
        noising(c)
        for c in (
            SD,
            {"beta_schedule": "linear"},
            {"beta_schedule": "squaredcos_cap_v2"},
            {**SD, "rescale_betas_zero_snr": True},
        )
    ]
    path = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "schedulers.json"
    written_by = f"tools/golden/schedulers.py, diffusers {diffusers.__version__}, torch {torch.__version__}"
    with open(path, "w") as file:
        data = {"written_by": written_by, "runs": rounded(recorded), "tables": rounded(tables)}
        json.dump(data, file, separators=(",", ":"))
    print(path, path.stat().st_size, "bytes,", len(recorded), "runs")


if __name__ == "__main__":
    main()
