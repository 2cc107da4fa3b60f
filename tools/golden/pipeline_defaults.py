"""Writes tests/golden/pipeline_defaults.json: the defaults of sampling in the signatures of diffusers' pipelines, as
pipeline → argument → default. Nothing is computed.

    PYTHONPATH=.deps/interop python3 tools/golden/pipeline_defaults.py
"""

import inspect
import json
import pathlib

import diffusers

PIPELINES = [
    "StableDiffusionImg2ImgPipeline", "StableDiffusionInpaintPipeline", "StableDiffusionControlNetPipeline",
    "StableDiffusionControlNetImg2ImgPipeline", "StableDiffusionControlNetInpaintPipeline",
    "StableDiffusionXLImg2ImgPipeline", "StableDiffusionXLInpaintPipeline", "StableDiffusionXLControlNetPipeline",
    "StableDiffusionXLControlNetImg2ImgPipeline", "StableDiffusionXLControlNetInpaintPipeline"]
ARGUMENTS = ["strength", "controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end", "eta",
             "aesthetic_score", "negative_aesthetic_score", "guidance_rescale"]


def main():
    found = {}
    for name in PIPELINES:
        its = inspect.signature(getattr(diffusers, name).__call__).parameters
        found[name] = {argument: its[argument].default for argument in ARGUMENTS if argument in its}
    path = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden" / "pipeline_defaults.json"
    data = {"written_by": f"tools/golden/pipeline_defaults.py, diffusers {diffusers.__version__}", "pipelines": found}
    path.write_text(json.dumps(data, indent=1) + "\n")


main()
