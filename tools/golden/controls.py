"""Records several ControlNets at once: PYTHONPATH=.deps/interop python3 tools/golden/controls.py

tests/golden/controls/ gets a second, random ControlNet of each kind (second, second_sdxl), and cases.json and
golden.safetensors as tools/golden/pipelines.py writes them: samples of diffusers' pipelines with a MultiControlNetModel.
"""

import json
import pathlib

import diffusers
import torch
from diffusers import (ControlNetModel, StableDiffusionControlNetPipeline, StableDiffusionPipeline,
                       StableDiffusionXLControlNetPipeline, StableDiffusionXLPipeline)
from PIL import Image
from pipelines import randomize
from safetensors.torch import save_file

ROOT = pathlib.Path(__file__).resolve().parents[2] / "tests" / "golden"
OUT = ROOT / "controls"
CASES = {  # name: (folder, arguments)
    "sd_two": ("sd", dict(controlnet_conditioning_scale=[0.5, 1.0], control_guidance_start=[0.0, 0.25],
                          control_guidance_end=[0.75, 1.0])),
    "sd_one_scale": ("sd", dict(controlnet_conditioning_scale=0.7)),
    "sdxl_two": ("sdxl", dict(controlnet_conditioning_scale=[1.0, 0.4], control_guidance_end=[0.5, 0.9])),
}


def load(folder, dtype):
    xl = folder == "sdxl"
    kind = StableDiffusionXLPipeline if xl else StableDiffusionPipeline
    plain = kind.from_pretrained(ROOT / "pipelines" / folder, torch_dtype=dtype)
    nets = [ControlNetModel.from_pretrained(p, torch_dtype=dtype)
            for p in (ROOT / "pipelines" / ("controlnet_sdxl" if xl else "controlnet"), OUT / ("second_sdxl" if xl else "second"))]
    controlled = StableDiffusionXLControlNetPipeline if xl else StableDiffusionControlNetPipeline
    extra = dict(add_watermarker=False) if xl else dict(requires_safety_checker=False)
    return controlled(**plain.components, controlnet=nets, **extra)


def run(case, dtype, images):
    folder, arguments = CASES[case]
    pipe = load(folder, dtype)
    pipe.set_progress_bar_config(disable=True)
    noise = torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(sum(map(ord, case))))
    latents = pipe(prompt="a red heart", negative_prompt="purple", image=[Image.fromarray(i.numpy()) for i in images],
                   num_inference_steps=8, guidance_scale=7.5, height=16, width=16, latents=noise.to(dtype),
                   output_type="latent", **arguments).images
    return {"noise": noise, "latents": latents.float()}


@torch.no_grad()
def main():
    diffusers.logging.set_verbosity_error()
    torch.use_deterministic_algorithms(True)
    OUT.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(23)
    for name, folder in (("second", "controlnet"), ("second_sdxl", "controlnet_sdxl")):
        config = ControlNetModel.load_config(ROOT / "pipelines" / folder)
        net = randomize(ControlNetModel.from_config(config), generator)
        net.to(torch.bfloat16).save_pretrained(OUT / name)
    images = [torch.randint(0, 256, (16, 16, 3), generator=generator, dtype=torch.uint8) for _ in range(2)]
    arrays, metadata, cases = {"one": images[0], "two": images[1]}, {"diffusers": diffusers.__version__}, []
    for case, (folder, arguments) in CASES.items():
        exact, single = run(case, torch.float64, images), run(case, torch.float32, images)
        off = (exact["latents"] - single["latents"]).double()
        metadata[f"noise_floor.{case}"] = str((off.norm() / exact["latents"].double().norm()).item())
        arrays |= {f"{case}.{name}": value for name, value in single.items()}
        xl = "_sdxl" if folder == "sdxl" else ""
        words = ["prompt=a red heart", "negative_prompt=purple", "num_inference_steps=8", "guidance_scale=7.5", "height=16",
                 "width=16", f"controlnet_model_name_or_path={{}}/../pipelines/controlnet{xl},{{}}/second{xl}",
                 "controlnet_image={}/one.png,{}/two.png",
                 *(f"{key}={json.dumps(value)}" for key, value in arguments.items())]
        cases.append({"name": case, "folder": f"../pipelines/{folder}", "control": False, "words": words})
        print(case, metadata[f"noise_floor.{case}"])
    (OUT / "cases.json").write_text(json.dumps(cases, indent=1) + "\n")
    save_file(arrays, OUT / "golden.safetensors", metadata=metadata)


if __name__ == "__main__":
    main()
