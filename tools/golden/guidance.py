"""Records predictions combined by diffusers' guiders: PYTHONPATH=.deps/interop python3 tools/golden/guidance.py

Writes tests/golden/guidance.json: for each guider predictions of five steps, with the prompt and without, of two samples of
eight numbers, and the combined prediction of each step.
"""

import json
import pathlib

import torch
from diffusers.guiders import AdaptiveProjectedGuidance, ClassifierFreeGuidance, ClassifierFreeZeroStarGuidance

STEPS = 5


def run(guider, keys, scale):
    torch.manual_seed(7)
    steps = []
    for i in range(STEPS):
        guider.set_state(step=i, num_inference_steps=STEPS, timestep=torch.tensor(0))
        guider.prepare_inputs({"x": (torch.zeros(1), torch.zeros(1))})
        positive, negative = torch.randn(2, 2, 2, 2, dtype=torch.float64), torch.randn(2, 2, 2, 2, dtype=torch.float64)
        with_prompt_alone = guider.num_conditions == 1
        out = guider.forward(positive, None if with_prompt_alone else negative).pred
        steps.append({"positive": positive.flatten().tolist(), "negative": negative.flatten().tolist(),
                      "prediction": out.flatten().tolist(), "guided": not with_prompt_alone})
    return {"keys": keys, "scale": scale, "steps": steps}


def main():
    runs = [run(ClassifierFreeGuidance(4.0), {}, 4.0),
            run(ClassifierFreeGuidance(4.0, start=0.3, stop=0.7), {"guidance_interval": [0.3, 0.7]}, 4.0)]
    for eta, norm, momentum in ((1.0, 15.0, None), (0.0, 0.0, None), (0.5, 2.0, None), (1.0, 2.5, -0.75), (0.2, 0.0, 0.5)):
        runs.append(run(
            AdaptiveProjectedGuidance(6.0, adaptive_projected_guidance_momentum=momentum,
                                      adaptive_projected_guidance_rescale=norm, eta=eta),
            {"guidance_method": "apg", "apg_eta": eta, "apg_norm_threshold": norm, "apg_momentum": momentum or 0.0}, 6.0))
    for zero in (0, 1, 3):
        runs.append(run(ClassifierFreeZeroStarGuidance(3.0, zero_init_steps=zero),
                        {"guidance_method": "cfg_zero", "cfg_zero_init_steps": zero}, 3.0))
    path = pathlib.Path(__file__).parents[2] / "tests" / "golden" / "guidance.json"
    path.write_text(json.dumps(json.loads(json.dumps(runs), parse_float=lambda v: float(f"{float(v):.9g}")),
                               separators=(",", ":")))
    print(path, path.stat().st_size, "bytes")


if __name__ == "__main__":
    main()
