"""Writes scheduler_config.json as diffusers saves it: of published models, and of every class with its defaults.

tests/golden/scheduler_configs.json gets a list of {name, text}: the text of the file, letter by letter.

    python tools/golden/scheduler_configs.py
"""

import json
import pathlib
import tempfile

import diffusers

FILE = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "scheduler_configs.json"
SD = dict(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
# As in these models' repositories.
PUBLISHED = {
    "sd15": ("PNDMScheduler", SD | dict(set_alpha_to_one=False, skip_prk_steps=True, steps_offset=1)),
    "sd21": ("DDIMScheduler", SD | dict(clip_sample=False, set_alpha_to_one=False, steps_offset=1,
                                        prediction_type="v_prediction")),
    "sdxl": ("EulerDiscreteScheduler", SD | dict(steps_offset=1, timestep_spacing="leading")),
    "sdxl_turbo": ("EulerAncestralDiscreteScheduler", SD | dict(steps_offset=1, timestep_spacing="trailing")),
    "sdxl_lightning": ("EulerDiscreteScheduler", SD | dict(steps_offset=1, timestep_spacing="trailing")),
    "sd_dpm": ("DPMSolverMultistepScheduler", SD | dict(steps_offset=1, use_karras_sigmas=True)),
    "flux_dev": ("FlowMatchEulerDiscreteScheduler", dict(base_image_seq_len=256, base_shift=0.5,
                                                         max_image_seq_len=4096, max_shift=1.15, shift=3.0,
                                                         use_dynamic_shifting=True)),
    "flux_schnell": ("FlowMatchEulerDiscreteScheduler", dict(shift=1.0)),
    "wan": ("UniPCMultistepScheduler", dict(flow_shift=3.0, prediction_type="flow_prediction", use_flow_sigmas=True)),
}
CLASSES = ["DDPMScheduler", "DDIMScheduler", "PNDMScheduler", "LMSDiscreteScheduler", "EulerDiscreteScheduler",
           "EulerAncestralDiscreteScheduler", "FlowMatchEulerDiscreteScheduler", "DPMSolverMultistepScheduler",
           "UniPCMultistepScheduler", "HeunDiscreteScheduler", "KDPM2DiscreteScheduler",
           "KDPM2AncestralDiscreteScheduler", "LCMScheduler", "TCDScheduler", "DEISMultistepScheduler",
           "SASolverScheduler", "FlowMatchHeunDiscreteScheduler", "FlowMatchLCMScheduler"]


def saved(kind, members):
    with tempfile.TemporaryDirectory() as folder:
        getattr(diffusers, kind)(**members).save_config(folder)
        return (pathlib.Path(folder) / "scheduler_config.json").read_text()


if __name__ == "__main__":
    cases = PUBLISHED | {name: (name, {}) for name in CLASSES}
    FILE.write_text(json.dumps([{"name": n, "text": saved(*c)} for n, c in cases.items()], indent=1) + "\n")
