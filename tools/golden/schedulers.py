"""Records what diffusers' schedulers do, for tests/schedulers: python tools/golden/schedulers.py

Writes tests/golden/schedulers.json: timesteps, initial sigma, noise tables, and runs of a sample of two numbers, 1 and
-0.4 times the initial sigma, whose "network" is out = 0.3·input + 0.1·t/1000 − 0.2 (input: the scaled model input,
t: the timestep given to the network). Random noise is replaced by zeros; the standard deviation that would scale
them is recorded with the run.

diffusers computes in float32. Its modules are given float64 under that name, so that the goldens hold its formulas and
not its rounding; how far each run in real float32 is from that is printed. Needs scipy (LMS, use_beta_sigmas), torchsde
and k-diffusion's sampling.py.

Levels that diffusers has no switch for (sigma_schedule) are computed here from their definitions and given to diffusers'
Euler and Heun; DPM++ 2S ancestral and Restart, which it has not, are written here as k-diffusion and AUTOMATIC1111's
web UI define them. DPM++ 3M SDE is k-diffusion's function; DPM++ SDE is diffusers' class, and is compared here with
k-diffusion's. The Brownian path of both is replaced by one whose increments are the noise of the calls (BrownianPath).
"""

import collections
import copy
import functools
import importlib.util
import json
import pathlib
import sys
import types
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


class ConstantNoise:
    """Replaces randn_tensor by a constant."""

    value = 0.0

    def __call__(self, shape, generator=None, device=None, dtype=None):
        return torch.full(shape, self.value, dtype=dtype)


noise_source = ConstantNoise()


class BrownianPath:
    """In place of BrownianTreeNoiseSampler: the path's increments from σ to the middle of a step, and from there to its
    end, are the noise source's value at that call, as standard deviations. DPM++ SDE asks for the first, then for both."""

    def __init__(self, *_):
        self.first = None

    def __call__(self, sigma, sigma_next):
        sigma, sigma_next = float(sigma), float(sigma_next)
        if self.first is None:
            self.first = (sigma, sigma_next, noise_source.value)
            return noise_source.value
        (start, middle, value), self.first = self.first, None
        assert start == sigma and middle > sigma_next
        moved = value * (start - middle) ** 0.5 + noise_source.value * (middle - sigma_next) ** 0.5
        return moved / (start - sigma_next) ** 0.5


@functools.cache
def k_diffusion():
    """k_diffusion/sampling.py without the package's other modules, which need many more packages."""
    folder = pathlib.Path(importlib.util.find_spec("k_diffusion").origin).parent
    sys.modules["torchdiffeq"] = types.SimpleNamespace(odeint=None)
    sys.modules["k_diffusion"] = package = types.ModuleType("k_diffusion")
    package.__path__ = []
    package.utils = sys.modules["k_diffusion.utils"] = types.ModuleType("k_diffusion.utils")
    package.utils.append_dims = lambda x, n: x[(...,) + (None,) * (n - x.ndim)]
    spec = importlib.util.spec_from_file_location("k_diffusion.sampling", folder / "sampling.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module



def in_precision(name, torch_type, numpy_type):
    torch.set_default_dtype(torch_type)
    scheduler_class = getattr(diffusers, name)
    module = sys.modules[scheduler_class.__module__]
    module.torch, module.np, module.randn_tensor = WithFloat32(torch, torch_type), WithFloat32(np, numpy_type), noise_source
    module.BrownianTreeNoiseSampler = BrownianPath
    return scheduler_class


def rounded(value):
    """More digits than float32 has."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value


def published_levels(schedule, config, steps):
    """Noise levels by definition, without the last."""
    betas = np.linspace(config["beta_start"] ** 0.5, config["beta_end"] ** 0.5, 1000) ** 2
    a = np.cumprod(1 - betas)
    table = np.sqrt((1 - a) / a)
    if schedule == "kl_optimal":
        part = np.linspace(0, 1, steps)
        return np.tan(part * np.arctan(table[0]) + (1 - part) * np.arctan(table[-1]))
    if schedule == "simple":
        return np.array([table[-(1 + int(i * len(table) / steps))] for i in range(steps)])
    if schedule == "sgm_uniform":
        return np.exp(np.interp(np.linspace(999, 0, steps + 1)[:-1], np.arange(1000), np.log(table)))
    if schedule == "gits":  # ComfyUI's GITSScheduler with coefficient 1.2: for 4 steps, and its 20 for others
        known = {4: [14.61464119, 2.36326075, 0.92192322, 0.36617002, 0.02916753]}.get(steps) or [
            14.61464119, 7.49001646, 4.65472794, 3.07277966, 2.19988537, 1.61558151, 1.24153244, 0.95350921, 0.74807048,
            0.59516323, 0.50118381, 0.41087446, 0.34370604, 0.29807833, 0.25053367, 0.22545385, 0.19894916, 0.17026083,
            0.13792117, 0.09824532, 0.02916753]
        at = np.linspace(0, 1, steps + 1)
        return np.exp(np.interp(at, np.linspace(0, 1, len(known)), np.log(known)))[:-1]
    known = diffusers.schedulers.AysSchedules["StableDiffusion" + {"ays_sd15": "", "ays_sdxl": "XL"}[schedule] + "Sigmas"]
    known = known[:-1] + [0.029]  # the published end, which diffusers replaces by 0
    at = np.linspace(0, 1, steps + 1)
    return np.exp(np.interp(at, np.linspace(0, 1, len(known)), np.log(known)))[:-1]


def run_levels(name, schedule, config, steps):
    """diffusers' Euler with these levels; it searches their timesteps."""
    from_diffusers = run_in((torch.float64, np.float64), name, config, steps,
                            published_levels(schedule, config, steps))
    from_diffusers["config"]["sigma_schedule"] = schedule
    return from_diffusers


def euler_levels(config, steps):
    """Levels of diffusers' Euler, their timesteps, the timestep of any level, and the initial sigma."""
    euler = in_precision("EulerDiscreteScheduler", torch.float64, np.float64).from_config(config)
    euler.set_timesteps(steps)
    levels = euler.sigmas.tolist()
    log_table = np.log(np.sqrt((1 - euler.alphas_cumprod) / euler.alphas_cumprod).numpy())
    time_of = lambda sigma: float(euler._sigma_to_t(np.array(sigma), log_table))
    return levels, euler.timesteps.tolist(), time_of, float(euler.init_noise_sigma)


def two_s_ancestral(config, steps):
    """k-diffusion's sample_dpmpp_2s_ancestral with η = 1, with x0 from predicted noise."""
    levels, times, time_of, initial = euler_levels(config, steps)
    x, values, spread, timesteps = np.array([1.0, -0.4]) * initial, [], [], []

    def x0_of(x, sigma, t):
        timesteps.append(float(t))
        out = 0.3 * x / np.sqrt(sigma**2 + 1) + 0.1 * t / 1000 - 0.2
        return x - sigma * out

    for s, following, t in zip(levels[:-1], levels[1:], times):
        up = min(following, (following**2 * (s**2 - following**2) / s**2) ** 0.5)
        down = (following**2 - up**2) ** 0.5
        x0 = x0_of(x, s, t)
        if down == 0:
            x = x + (x - x0) / s * (down - s)
        else:
            h = np.log(s) - np.log(down)
            middle = np.exp(np.log(s) - 0.5 * h)
            x2 = middle / s * x - np.expm1(-h / 2) * x0
            values.append([float(v) for v in x2])
            spread.append(0.0)
            x0 = x0_of(x2, middle, time_of(middle))
            x = down / s * x - np.expm1(-h) * x0
        values.append([float(v) for v in x])
        spread.append(up)
    return {"config": {"_class_name": "DPMSolver2SAncestralScheduler", **config}, "steps": steps,
            "timesteps": timesteps, "init_noise_sigma": initial, "values": values, "spread": spread}


def by_k_diffusion(sampler, config, steps, noise):
    """The samples after each call of the network in k-diffusion's function `sampler`, and the timesteps of the calls.
    `noise`: of each call, as a function of its number."""
    levels, times, time_of, initial = euler_levels(config, steps)
    given, inputs, timesteps = dict(zip(levels, times)), [], []

    def x0_of(x, sigma):
        s = float(sigma[0])
        timesteps.append(given.get(s, time_of(s)))
        inputs.append([float(v) for v in x.flatten()])
        noise_source.value = noise(len(inputs) - 1)
        return x - s * (0.3 * x / np.sqrt(s**2 + 1) + 0.1 * timesteps[-1] / 1000 - 0.2)

    path = BrownianPath() if sampler == "sample_dpmpp_sde" else lambda *_: noise_source.value
    start = torch.tensor([[1.0, -0.4]], dtype=torch.float64) * initial
    end = getattr(k_diffusion(), sampler)(x0_of, start, torch.tensor(levels, dtype=torch.float64), disable=True,
                                          noise_sampler=path)
    noise_source.value = 0.0
    return inputs[1:] + [[float(v) for v in end.flatten()]], timesteps, initial


def three_m_sde(config, steps):
    """k-diffusion's sample_dpmpp_3m_sde with η = 1, with x0 from predicted noise and without its noise."""
    values, timesteps, initial = by_k_diffusion("sample_dpmpp_3m_sde", config, steps, lambda call: 0.0)
    spread = []
    for i in range(len(values)):
        moved, _, _ = by_k_diffusion("sample_dpmpp_3m_sde", config, steps, lambda call: float(call == i))
        spread.append(moved[i][0] - values[i][0])
    return {"config": {"_class_name": "DPMSolver3MSDEScheduler", **config}, "steps": steps,
            "timesteps": timesteps, "init_noise_sigma": initial, "values": values, "spread": spread}


def sde_with_noise(config, steps):
    """diffusers' DPM++ SDE with noise 1 in each call, which must be k-diffusion's too."""
    ours = noisy("DPMSolverSDEScheduler", config, steps)
    theirs, _, initial = by_k_diffusion("sample_dpmpp_sde", config, steps, lambda call: 1.0)
    assert np.allclose(ours["values"], theirs, rtol=1e-9, atol=1e-9), (ours["values"], theirs)
    return ours


def karras(n, low, high):
    ends = high ** (1 / 7), low ** (1 / 7)
    return [(ends[0] + i / (n - 1) * (ends[1] - ends[0])) ** 7 for i in range(n)]


def restart(config, steps):
    """Restart of Xu et al. 2023 with the web UI's choices, with x0 from predicted noise and without its noise."""
    levels, times, time_of, initial = euler_levels(config, steps)
    pairs, given = list(zip(levels[:-1], levels[1:])), dict(zip(levels, times))
    if steps >= 20:
        given = {}
        again, repetitions = (9, 1) if steps < 36 else (steps // 4, 2)
        levels = karras(steps - again * repetitions, levels[-2], levels[0]) + [0]
        pairs = list(zip(levels[:-1], levels[1:]))
        low, high = (min(range(len(levels)), key=lambda i: abs(levels[i] - s)) for s in (0.1, 2))
        repeated = karras(again + 1, levels[low], levels[high])
        pairs[low:low] = repetitions * list(zip(repeated[:-1], repeated[1:]))
    x, values, spread, timesteps = np.array([1.0, -0.4]) * initial, [], [], []

    def slope_of(x, sigma):
        timesteps.append(given.get(sigma, time_of(sigma)))
        return 0.3 * x / np.sqrt(sigma**2 + 1) + 0.1 * timesteps[-1] / 1000 - 0.2

    for i, (s, following) in enumerate(pairs):
        slope = slope_of(x, s)
        end = x + slope * (following - s)
        values.append([float(v) for v in end])
        spread.append(0.0)
        if following > 0:
            x = x + (slope + slope_of(end, following)) / 2 * (following - s)
            values.append([float(v) for v in x])
            up = pairs[i + 1][0]
            spread.append((up**2 - following**2) ** 0.5 if up > following else 0.0)
    return {"config": {"_class_name": "RestartScheduler", **config}, "steps": steps, "timesteps": timesteps,
            "init_noise_sigma": initial, "values": values, "spread": spread}


def noisy(name, config, steps):
    """With noise 1 in each call: SA-Solver's corrector and DPM++ SDE's second call add that of the call before again."""
    noise_source.value = 1.0
    scheduler = in_precision(name, torch.float64, np.float64).from_config(config)
    scheduler.set_timesteps(steps)
    scheduler.set_begin_index(0)
    x = torch.tensor([1.0, -0.4], dtype=torch.float64).reshape(1, 1, 1, 2) * float(getattr(scheduler, "init_noise_sigma", 1))
    values = []
    for t in scheduler.timesteps:
        model_input = scheduler.scale_model_input(x, t)
        x = scheduler.step(0.3 * model_input + 0.1 * float(t) / 1000 - 0.2, t, x, return_dict=False)[0]
        values.append([float(v) for v in x.flatten()])
    noise_source.value = 0.0
    return {"config": {"_class_name": name, **config}, "steps": steps, "values": values}


def run_in(types, name, config, steps, levels=None):
    scheduler = in_precision(name, *types).from_config(config)
    if levels is None:
        scheduler.set_timesteps(steps)
    else:
        scheduler.set_timesteps(sigmas=[*levels, 0.0])
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(0)  # as pipelines do: steps are counted, not found by timestep
    initial = float(getattr(scheduler, "init_noise_sigma", 1.0))
    x = torch.tensor([1.0, -0.4], dtype=types[0]).reshape(1, 1, 1, 2) * initial
    values, spread = [], []
    for t in scheduler.timesteps:
        model_input = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        out = 0.3 * model_input + 0.1 * float(t) / 1000 - 0.2
        eta = {"eta": config["eta"]} if "eta" in config else {}  # an argument in diffusers, a config field here
        noised = copy.deepcopy(scheduler)
        noise_source.value = 1.0
        far = noised.step(out, t, x, return_dict=False, **eta)[0]
        noise_source.value = 0.0
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


def begun(name, config, steps, first):
    """Image to image: the first steps are skipped. `levels`: results of add_noise for image 1 and noise 0, and for image 0
    and noise 1, before each call of the network."""
    scheduler = in_precision(name, torch.float64, np.float64).from_config(config)
    scheduler.set_timesteps(steps)
    timesteps = scheduler.timesteps[first * scheduler.order :]
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(first * scheduler.order)
    one, none = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)

    def noised(image, noise, t):
        if hasattr(scheduler, "scale_noise"):
            return float(scheduler.scale_noise(image, t[None], noise))
        return float(scheduler.add_noise(image, noise, t[None]))

    x, values, levels, random = torch.tensor([1.0, -0.4]).reshape(1, 1, 1, 2), [], [], False
    for t in timesteps:
        levels.append([noised(one, none, t), noised(none, one, t)])
        model_input = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
        out, noised_scheduler = 0.3 * model_input + 0.1 * float(t) / 1000 - 0.2, copy.deepcopy(scheduler)
        noise_source.value = 1.0
        far = noised_scheduler.step(out, t, x, return_dict=False)[0]
        noise_source.value = 0.0
        x = scheduler.step(out, t, x, return_dict=False)[0]
        random |= bool((far != x).any())
        values.append([float(v) for v in x.flatten()])
    return {"config": {"_class_name": name, **config}, "steps": steps, "first": first, "levels": levels, "random": random,
            "timesteps": [float(t) for t in timesteps], "values": values}


def all_begun():
    flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
    for name, config in [
        ("DDPMScheduler", SD), ("DDIMScheduler", {**SD, "steps_offset": 1}),
        ("PNDMScheduler", {**SD, "skip_prk_steps": True, "steps_offset": 1}), ("LMSDiscreteScheduler", SD),
        ("EulerDiscreteScheduler", {**SD, "timestep_spacing": "leading", "steps_offset": 1}),
        ("EulerAncestralDiscreteScheduler", SD), ("HeunDiscreteScheduler", SD), ("KDPM2DiscreteScheduler", SD),
        ("KDPM2AncestralDiscreteScheduler", SD), ("DPMSolverSDEScheduler", SD), ("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}),
        ("FlowMatchHeunDiscreteScheduler", {"shift": 3.0}), ("FlowMatchLCMScheduler", {"shift": 3.0}),
        ("DPMSolverMultistepScheduler", {**SD, "solver_order": 3}),
        ("DPMSolverMultistepScheduler", {**SD, "use_karras_sigmas": True}), ("DPMSolverMultistepScheduler", flow),
        ("UniPCMultistepScheduler", SD), ("UniPCMultistepScheduler", {**flow, "solver_order": 3}),
        ("DEISMultistepScheduler", {**SD, "solver_order": 3}), ("SASolverScheduler", {**SD, "predictor_order": 3}),
        ("LCMScheduler", SD), ("TCDScheduler", SD)]:
        for first in (1, 3, 7):
            yield begun(name, config, 8, first)
    yield begun("DPMSolverMultistepScheduler", {**SD, "solver_order": 3}, 20, 11)


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
        for prediction in PREDICTIONS[:2]:  # diffusers rejects the third
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

    def every(name, extra, predictions=PREDICTIONS, steps=5):
        for spacing in SPACINGS:
            for prediction in predictions:
                yield from run(name, {**SD, "timestep_spacing": spacing, "prediction_type": prediction, **extra}, steps)

    name = "EulerDiscreteScheduler"
    # With one step, diffusers' linspace is timestep 0, where there is nothing to denoise; this program's is the last one.
    one = {**SD, "timestep_spacing": "trailing"}
    yield from every(name, {"steps_offset": 1})
    yield from run(name, one, 1)
    yield from run(name, SD, 2, 8, 20)
    for extra in (karras, exponential, {"interpolation_type": "log_linear"}, minimum, cosine, {**karras, **minimum}):
        yield from run(name, {**SD, **extra}, 8)
    video = {"timestep_type": "continuous", "prediction_type": "v_prediction", "sigma_min": 0.002, "sigma_max": 700.0}
    yield from run(name, {**SD, **karras, **video, "timestep_spacing": "leading", "steps_offset": 1}, 1, 8)
    yield from run(name, {**SD, **karras, "interpolation_type": "log_linear", "timestep_type": "continuous"}, 4)
    yield from run(name, zero, 10)

    beta = {"use_beta_sigmas": True}
    for extra in (beta, {**beta, "timestep_spacing": "trailing"}, {**beta, "timestep_spacing": "leading"}):
        yield from run(name, {**SD, **extra}, 8)
    yield from run(name, {**SD, **beta}, 2, 30)
    for schedule in ("kl_optimal", "simple", "sgm_uniform", "ays_sd15", "ays_sdxl", "gits"):
        for n in (4, 20 if schedule == "gits" else 10, 25):
            yield run_levels(name, schedule, SD, n)

    yield from ancestral()

    name = "HeunDiscreteScheduler"
    yield from every(name, {"steps_offset": 1})
    yield from run(name, one, 1)
    yield from run(name, SD, 2, 20)
    for extra in (karras, exponential, beta, cosine, {"clip_sample": True, "clip_sample_range": 0.5},
                 {"clip_sample": True, "prediction_type": "v_prediction"}):
        yield from run(name, {**SD, **extra}, 8)
    for name in ("KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler"):
        yield from every(name, {"steps_offset": 1}, PREDICTIONS[:2])  # diffusers rejects the third
        yield from run(name, one, 1)
        yield from run(name, SD, 2, 20)
        for extra in (karras, exponential, beta, cosine):
            yield from run(name, {**SD, **extra}, 8)
    for n in (1, 2, 8, 20):
        yield two_s_ancestral({**one, "timestep_spacing": "trailing"}, n)
    for extra in (karras, {"timestep_spacing": "leading", "steps_offset": 1}):
        yield two_s_ancestral({**SD, **extra}, 8)
    name = "DPMSolverSDEScheduler"
    yield from every(name, {"steps_offset": 1}, PREDICTIONS[:2])  # diffusers rejects the third
    yield from run(name, one, 1)
    yield from run(name, SD, 2, 20)
    for extra in (karras, exponential, beta, cosine):
        yield from run(name, {**SD, **extra}, 8)
    for n in (2, 3, 8, 20):  # k-diffusion's fails with one step
        yield three_m_sde({**one, "timestep_spacing": "trailing"}, n)
    for extra in (karras, exponential, {"timestep_spacing": "leading", "steps_offset": 1}):
        yield three_m_sde({**SD, **extra}, 8)
    for n in (8, 20, 25, 36, 41):
        yield restart(SD, n)
    yield restart({**SD, "timestep_spacing": "leading", "steps_offset": 1}, 20)

    for name in ("LCMScheduler", "TCDScheduler"):
        for prediction in PREDICTIONS:
            yield from run(name, {**SD, "prediction_type": prediction}, 4)
        yield from run(name, SD, 1, 2, 8, 20)
        yield from run(name, {**SD, "original_inference_steps": 33}, 5)
    yield from run("LCMScheduler", {**SD, "clip_sample": True, "clip_sample_range": 0.5, "timestep_scaling": 0.01}, 4)
    for eta in (0.0, 0.5, 1.0):
        yield from run("TCDScheduler", {**SD, "eta": eta}, 4)

    name = "DEISMultistepScheduler"
    yield from every(name, {"steps_offset": 1})
    for order in (1, 2, 3):
        yield from run(name, {**SD, "solver_order": order}, 1, 2, 8, 20)
        yield from run(name, {**SD, "solver_order": order, "lower_order_final": False}, 8)
    for extra in (karras, exponential, beta, cosine):
        yield from run(name, {**SD, **extra}, 8)
    deis_flow = {"prediction_type": "flow_prediction", "use_flow_sigmas": True}
    for order in (2, 3):
        yield from run(name, {**deis_flow, "flow_shift": 3.0, "solver_order": order}, 1, 9, 20)

    name = "SASolverScheduler"
    yield from every(name, {"steps_offset": 1})
    for predictor, corrector in ((1, 1), (1, 2), (2, 1), (2, 2), (3, 2), (2, 4), (4, 4)):
        orders = {"predictor_order": predictor, "corrector_order": corrector}
        yield from run(name, {**SD, **orders}, 8, 20)
        yield from run(name, {**SD, **orders, "algorithm_type": "noise_prediction"}, 8)
    yield from run(name, {**SD, "lower_order_final": False}, 8)
    yield from run(name, SD, 1, 2)
    for extra in (karras, exponential, beta):
        yield from run(name, {**SD, **extra}, 8)
    for prediction in PREDICTIONS[1:]:
        yield from run(name, {**SD, "algorithm_type": "noise_prediction", "prediction_type": prediction}, 5)
    yield from run(name, {**deis_flow, "flow_shift": 3.0}, 1, 9, 20)

    for name in ("FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler"):
        for shift in (1.0, 3.0):
            yield from run(name, {"shift": shift}, 1, 4, 20)
    for extra in (karras, exponential, beta, {"shift_terminal": 0.1}):
        yield from run("FlowMatchLCMScheduler", {"shift": 3.0, **extra}, 8)

    name = "FlowMatchEulerDiscreteScheduler"
    for shift in (1.0, 3.0, 5.0):
        yield from run(name, {"shift": shift}, 1, 4, 20)
    yield from run(name, {"shift": 3.0, "shift_terminal": 0.1}, 8)
    yield from run(name, {"shift": 3.0, "invert_sigmas": True}, 6)
    yield from run(name, {"shift": 3.0, "stochastic_sampling": True}, 6)
    for extra in (karras, exponential, beta):
        yield from run(name, {"shift": 3.0, **extra}, 8)

    name = "LMSDiscreteScheduler"
    yield from every(name, {"steps_offset": 1})
    yield from run(name, one, 1)
    yield from run(name, SD, 2, 20)
    for extra in (karras, exponential, beta, cosine):
        yield from run(name, {**SD, **extra}, 8)

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
    yield from run(name, {**SD, "clip_sample": False, "thresholding": True, "dynamic_thresholding_ratio": 0.7,
                          "sample_max_value": 1.5}, 8)
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
            extra = {"solver_order": order, "solver_type": solver}
            for algorithm in ("dpmsolver++", "sde-dpmsolver++"):
                yield from run(name, {**SD, **extra, "algorithm_type": algorithm}, 8)
            for algorithm in ("dpmsolver", "sde-dpmsolver")[: 1 if order == 3 else 2]:
                yield from run(name, {**SD, **extra, **minimum, "algorithm_type": algorithm}, 8)
            yield from run(name, {**SD, **extra, **minimum, "lower_order_final": False}, 5)
    for prediction in PREDICTIONS[1:]:
        yield from run(name, {**SD, **minimum, "algorithm_type": "dpmsolver", "prediction_type": prediction}, 5)
    yield from run(name, {**SD, "solver_order": 3}, 1, 2, 20)
    for extra in (karras, {"use_lu_lambdas": True}, exponential, beta, {"euler_at_final": True, **minimum}, cosine):
        yield from run(name, {**SD, **extra}, 8)
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
            extra = {"solver_order": order, "solver_type": solver}
            # diffusers' bh1 computes infinity times zero in the step to no noise.
            yield from run(name, {**SD, **extra, **(minimum if solver == "bh1" else {})}, 8)
            yield from run(name, {**SD, **extra, **minimum, "predict_x0": False, "lower_order_final": False}, 5)
    for prediction in PREDICTIONS[1:]:
        yield from run(name, {**SD, **minimum, "predict_x0": False, "prediction_type": prediction}, 5)
    yield from run(name, {**SD, "solver_order": 3}, 1, 2, 20)
    yield from run(name, {**SD, "solver_order": 3, "disable_corrector": [0, 2, 3]}, 8)
    for extra in (karras, exponential, beta, minimum, cosine, {**karras, **minimum, "sigma_min": 0.1, "sigma_max": 10.0}):
        yield from run(name, {**SD, **extra}, 8)
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
        data = {"written_by": written_by, "runs": rounded(recorded), "tables": rounded(tables),
                "begun": rounded(list(all_begun())), "noisy": rounded([noisy("SASolverScheduler", SD, 8),
                                   noisy("SASolverScheduler", {**SD, "algorithm_type": "noise_prediction"}, 8),
                                   sde_with_noise(SD, 8), sde_with_noise({**SD, "use_karras_sigmas": True}, 20)])}
        json.dump(data, file, separators=(",", ":"))
    print(path, path.stat().st_size, "bytes,", len(recorded), "runs")


if __name__ == "__main__":
    main()
