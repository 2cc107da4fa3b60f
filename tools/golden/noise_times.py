"""Records times, loss weights, thresholds and enlarged noise of training for tests/golden/noise_times.json.

    PYTHONPATH=.deps/interop python3 tools/golden/noise_times.py

Times and weights of flow matching and SNR are what diffusers computes (compute_density_for_timestep_sampling,
compute_loss_weighting_for_sd3, compute_snr of diffusers.training_utils; calculate_shift and
FlowMatchEulerDiscreteScheduler). diffusers has no function for the rest, whose formulas are those of kohya's sd-scripts
(commit 48d368fa, library/custom_train_functions.py and library/train_util.py): min-SNR and debiased weights, the scale of
v prediction's loss, thresholds by schedule, distances. Enlarging is PyTorch's bilinear interpolation.
"""

import json
import math

import diffusers
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.training_utils import (compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3,
                                      compute_snr)


def density(scheme, count=8, **arguments):
    """The random numbers that the function reads, and what it makes of them."""
    make = torch.randn if scheme == "logit_normal" else torch.rand
    source = make(count, generator=torch.Generator().manual_seed(7))
    out = compute_density_for_timestep_sampling(scheme, count, generator=torch.Generator().manual_seed(7),
                                                **{"logit_mean": 0.0, "logit_std": 1.0, "mode_scale": 1.29, **arguments})
    return {**arguments, "from": source.tolist(), "to": out.tolist()}


def noise_models():
    for prediction, zero in (("epsilon", False), ("v_prediction", False), ("v_prediction", True)):
        s = DDPMScheduler(beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012, prediction_type=prediction,
                          rescale_betas_zero_snr=zero)
        if zero:  # diffusers keeps the last ᾱ above 0, for its samplers
            s.alphas_cumprod[-1] = 0
        t = torch.tensor([0, 1, 250, 500, 998, 999])
        snr = compute_snr(s, t).double()
        a = s.alphas_cumprod[t].double()
        most = torch.minimum(snr, torch.tensor(1000.0))
        v = prediction == "v_prediction"
        c = 0.1
        yield {
            "prediction_type": prediction, "zero": zero, "timesteps": t.tolist(), "snr": snr.tolist(),
            "min_snr_5": (torch.minimum(snr, torch.tensor(5.0)) / (snr + 1 if v else snr)).tolist(),
            "debiased": (1 / (most + 1) if v else 1 / most.sqrt()).tolist(),
            "scale_v": (most / (most + 1)).tolist(),
            "threshold_snr": ((1 - c) / (1 + ((1 - a) / a) ** 0.5) ** 2 + c).tolist(),
            "threshold_exponential": (torch.exp(math.log(c) / 1000 * t.double()) * 0.5).tolist(),
        }


def distances():
    e = torch.tensor([-3.0, -0.01, 0.0, 1e-4, 0.2, 1.5], dtype=torch.float64)
    for c in (0.1, 0.7):
        root = torch.sqrt(e ** 2 + c ** 2) - c
        yield {"c": c, "e": e.tolist(), "l1": e.abs().tolist(), "l2": (e ** 2).tolist(), "huber": (2 * c * root).tolist(),
               "smooth_l1": (2 * root).tolist()}


def enlarged():
    z = torch.randn(1, 1, 3, 2, generator=torch.Generator().manual_seed(1))
    y = torch.nn.Upsample(size=(7, 5), mode="bilinear")(z)
    return {"from": z[0, 0].tolist(), "to": y[0, 0].tolist()}


sigmas = torch.tensor([0.001, 0.2, 0.5, 0.9, 1.0], dtype=torch.float64)
u = torch.tensor([0.1, 0.5, 0.8], dtype=torch.float64)
scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
golden = {
    "diffusers": diffusers.__version__, "torch": torch.__version__,
    "logit_normal": [density("logit_normal"), density("logit_normal", logit_mean=0.5, logit_std=1.3)],
    "mode": [density("mode"), density("mode", mode_scale=-0.5)],
    "weights": {"sigmas": sigmas.tolist(), **{name: compute_loss_weighting_for_sd3(name, sigmas).tolist()
                                              for name in ("sigma_sqrt", "cosmap")}},
    "dynamic_shift": [{"tokens": n, "from": u.tolist(),
                       "to": scheduler.time_shift(calculate_shift(n), 1.0, u).tolist()} for n in (64, 1024, 4096)],
    "noise_models": list(noise_models()),
    "distances": list(distances()),
    "enlarged": enlarged(),
}
with open("tests/golden/noise_times.json", "w") as f:
    json.dump(golden, f, indent=1)
    f.write("\n")
