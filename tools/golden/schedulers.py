"""Records what diffusers' schedulers do, for tests/schedulers: python tools/golden/schedulers.py

Writes tests/golden/schedulers.json: timesteps, initial sigma, noise tables, and runs of one scalar sample whose
"network" is out = 0.3·input + 0.1·t/1000 − 0.2 (input: the scaled model input, t: the timestep given to the network).
Draws of noise are replaced by zeros; the standard deviation that would scale them is recorded beside the run.
"""

import json
import pathlib

import diffusers
import diffusers.schedulers.scheduling_ddim as ddim
import diffusers.schedulers.scheduling_ddpm as ddpm
import torch
from diffusers import DDIMScheduler, DDPMScheduler, EulerDiscreteScheduler

SD = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
CLASSES = {c.__name__: c for c in (DDIMScheduler, DDPMScheduler, EulerDiscreteScheduler)}


def rounded(value):
    """Eight digits say all that float32 knows."""
    if isinstance(value, dict):
        return {k: rounded(v) for k, v in value.items()}
    if isinstance(value, list):
        return [rounded(v) for v in value]
    return float(f"{value:.8g}") if isinstance(value, float) else value


def zeros(shape, generator=None, device=None, dtype=None):
    return torch.zeros(shape, dtype=dtype)


def run(name, config, steps):
    scheduler = CLASSES[name].from_config(config)
    scheduler.set_timesteps(steps)
    x = torch.full((1, 1, 1, 1), 1.0) * scheduler.init_noise_sigma
    values, spread = [], []
    for t in scheduler.timesteps:
        model_input = scheduler.scale_model_input(x, t)
        out = 0.3 * model_input + 0.1 * float(t) / 1000 - 0.2
        if name == "DDPMScheduler":
            variance = scheduler._get_variance(int(t)) if int(t) > 0 else torch.tensor(0.0)
            log = config.get("variance_type") == "fixed_small_log"   # returns the deviation itself
            spread.append(float(variance if log else variance**0.5))
        x = scheduler.step(out, t, x, return_dict=False)[0]
        values.append(float(x.flatten()[0]))
    return {
        "config": {"_class_name": name, **config},
        "steps": steps,
        "timesteps": [float(t) for t in scheduler.timesteps],
        "init_noise_sigma": float(scheduler.init_noise_sigma),
        "values": values,
        **({"spread": spread} if spread else {}),
    }


def noising(config):
    scheduler = DDPMScheduler.from_config(config)
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


def main():
    ddim.randn_tensor = ddpm.randn_tensor = zeros
    runs = []
    for spacing in ("linspace", "leading", "trailing"):
        for prediction in ("epsilon", "v_prediction", "sample"):
            for steps in (4, 20):
                config = {**SD, "timestep_spacing": spacing, "prediction_type": prediction, "steps_offset": 1}
                runs.append(run("EulerDiscreteScheduler", config, steps))
    for spacing in ("leading", "trailing", "linspace"):
        for prediction in ("epsilon", "v_prediction", "sample"):
            config = {**SD, "timestep_spacing": spacing, "prediction_type": prediction, "clip_sample": False}
            runs.append(run("DDIMScheduler", {**config, "set_alpha_to_one": spacing == "trailing"}, 10))
            runs.append(run("DDPMScheduler", {**config, "variance_type": "fixed_small"}, 10))
    runs.append(run("DDPMScheduler", {**SD, "clip_sample": True, "variance_type": "fixed_large"}, 25))
    runs.append(run("DDPMScheduler", {**SD, "clip_sample": True, "variance_type": "fixed_small_log"}, 1000))
    runs.append(run("DDIMScheduler", {**SD, "clip_sample": True, "clip_sample_range": 0.5}, 7))
    # With v prediction no step divides by the signal, so zero terminal SNR is exact.
    zero = {**SD, "rescale_betas_zero_snr": True, "prediction_type": "v_prediction", "timestep_spacing": "trailing"}
    runs.append(run("DDIMScheduler", {**zero, "clip_sample": False}, 10))
    runs.append(run("EulerDiscreteScheduler", zero, 10))
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
        json.dump({"written_by": written_by, "runs": rounded(runs), "tables": rounded(tables)}, file, separators=(",", ":"))
    print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
